//! Newton-Schulz orthogonalisation of batches of matrices.
//!
//! [`NewtonSchulz::orthogonalize`] maps every matrix `X = U S V^T` of a batch to a matrix near its
//! polar factor `U V^T`, by applying odd polynomials to its singular values. Two forms compute the
//! same polynomials:
//!
//! - the [standard form](Form::Standard), `X <- a X + (b A + c A^2) X` with `A = X X^T`
//!   (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>);
//! - the [Gram form](Form::Gram), which iterates on the small `R = X X^T` alone and multiplies `X`
//!   once at the end (<https://github.com/Dao-AILab/gram-newton-schulz>).
//!
//! Both run on the smaller side of the matrix, and all products of polynomials of one symmetric
//! matrix go through one operation that computes a single triangle ([`ops`]).

pub mod coefficients;
pub mod cost;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod gram;
pub mod ops;
mod portable;
mod products;
#[cfg(feature = "cube")]
mod replay;
pub mod restarts;
mod rounding;
mod standard;

pub use coefficients::{Coefficients, Polynomial};
pub use ops::{Engine, Kernels};

use burn::backend::{Backend, DTypeUsage, Dispatch};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use crate::computed;
use crate::error::{Error, Result};
use crate::muon::rule::precise_dtype;
use ops::Norms;
use products::Products;

/// The precision of the iteration; the norm before it is taken in float32 at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum IterationDtype {
    /// Half precision where the device has matrix units for it, float16 before bfloat16, and
    /// float32 elsewhere.
    Auto,
    /// float32, and float64 for matrices in that.
    F32,
    /// float16: eight times as exact as bfloat16, for its three more bits of mantissa.
    F16,
    /// bfloat16. `docs/precision.md` has the errors of all types.
    Bf16,
}

impl IterationDtype {
    /// The type that tensors of `dtype` on `device` are iterated in.
    fn resolve(self, device: &Device, dtype: DType) -> FloatDType {
        let accelerated = |half: DType| {
            Dispatch::dtype_usage(device.as_dispatch(), half).contains(DTypeUsage::Accelerated)
        };
        match self {
            // Whoever trains in float64 wants its digits.
            Self::Auto | Self::F32 if dtype == DType::F64 => FloatDType::F64,
            Self::Auto if accelerated(DType::F16) => FloatDType::F16,
            Self::Auto if accelerated(DType::BF16) => FloatDType::BF16,
            Self::Auto | Self::F32 => FloatDType::F32,
            Self::F16 => FloatDType::F16,
            Self::Bf16 => FloatDType::BF16,
        }
    }

    /// The types that [`resolve`](Self::resolve) may return.
    fn candidates(self) -> &'static [FloatDType] {
        match self {
            Self::Auto => &[FloatDType::F16, FloatDType::BF16, FloatDType::F32, FloatDType::F64],
            Self::F32 => &[FloatDType::F32, FloatDType::F64],
            Self::F16 => &[FloatDType::F16],
            Self::Bf16 => &[FloatDType::BF16],
        }
    }
}

/// The form of the iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// Whichever needs fewer operations for the shape; the standard form where the Gram form would
    /// take more than three times the memory of the matrix: so for matrices near to square, unless the
    /// iteration is in half the precision of the matrix. The standard form, too, where [`restarts::choose`]
    /// finds no restarts that keep the error of the Gram form within about three times that of the
    /// standard form, and in float32 where the device multiplies in TF32: errors of ten bits grow there with
    /// restarts that were chosen for 23.
    Auto,
    /// Products with `X` at every step.
    Standard,
    /// Products with `X X^T` only, with the restarts that [`restarts::choose`] computes; refused where it
    /// finds none. In float32 on a device that multiplies in TF32, those are too few for some coefficients.
    Gram,
}

/// A Newton-Schulz iteration, ready to run on matrices of any shape.
#[derive(Debug, Clone)]
pub struct NewtonSchulz {
    schedule: Vec<Polynomial>,
    epsilon: f64,
    dtype: IterationDtype,
    form: Form,
    kernels: Kernels,
    workspace: usize,
    /// Recordings, if they are wanted.
    #[cfg(feature = "cube")]
    recordings: Option<std::sync::Arc<replay::Recordings>>,
    /// For every type that the Gram form may run in; `None` where the Gram form is not exact enough.
    restarts: Vec<(FloatDType, Option<Vec<usize>>)>,
}

/// The default workspace, in MB.
const WORKSPACE: usize = 1024;

/// The most that a form may have in memory beside what it works on, where another one has less: in
/// multiples of that.
const MOST_MEMORY: usize = 3;

/// How matrices of a shape are orthogonalised.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The form that runs, never [`Form::Auto`].
    pub form: Form,
    /// The steps before which the Gram form restarts; empty for the standard form.
    pub restarts: Vec<usize>,
    /// The type of the iteration.
    pub dtype: FloatDType,
    /// What computes the products.
    pub engine: Engine,
    /// Which of its kernels computes `X X^T`.
    pub kernel: String,
    /// Whether one kernel carries the small `R` of the Gram form through all steps.
    pub in_one_cube: bool,
    /// Floating-point operations for one matrix.
    pub operations: f64,
    /// Bytes that one matrix takes beside the one that was given, its result included.
    pub workspace: usize,
}

impl NewtonSchulz {
    /// An iteration of `steps` steps with a coefficient set.
    ///
    /// `epsilon` is the least Frobenius norm that a matrix is divided by: a matrix smaller than that
    /// comes out smaller, too, instead of as amplified noise. With zero the result does not depend
    /// on the scale of the input; a matrix of zeros stays zero.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for zero steps, unusable coefficients, an `epsilon` that is negative or
    /// not finite, and for [`Form::Gram`] with coefficients for which [`restarts::choose`] finds no
    /// restarts in `dtype`.
    pub fn new(
        coefficients: &Coefficients,
        steps: usize,
        epsilon: f64,
        dtype: IterationDtype,
        form: Form,
    ) -> Result<Self> {
        if !(epsilon.is_finite() && epsilon >= 0.0) {
            return Err(Error::Setting {
                setting: "epsilon",
                value: epsilon.to_string(),
                expected: "a finite number, zero or more",
            });
        }
        let schedule = coefficients.schedule(steps)?;
        let restarts: Vec<_> = dtype
            .candidates()
            .iter()
            .filter(|_| form != Form::Standard)
            .map(|dtype| (*dtype, restarts::choose(&schedule, *dtype)))
            .collect();
        if form == Form::Gram && restarts.iter().any(|(_, restarts)| restarts.is_none()) {
            return Err(Error::Setting {
                setting: "form",
                value: format!("Gram with {coefficients:?} in {dtype:?}"),
                expected: "Auto or Standard, since restarts can't keep the Gram form exact with these coefficients",
            });
        }
        Ok(Self {
            schedule,
            epsilon,
            dtype,
            form,
            kernels: Kernels::Auto,
            workspace: WORKSPACE,
            #[cfg(feature = "cube")]
            recordings: None,
            restarts,
        })
    }

    /// The implementations that may be used.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Restricts the implementations that may be used.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// How much memory an iteration may use beside the batch that it is given, in MB of 10^6 bytes.
    /// A larger batch is worked on in parts, one matrix at a time at least, and its result is made beside
    /// that; what one matrix takes is in
    /// [`explain`](Self::explain). It is up to three times the matrix, and with [`Form::Gram`] where
    /// [`Form::Auto`] would not choose it up to five times.
    pub fn with_workspace(mut self, megabytes: usize) -> Self {
        self.workspace = megabytes;
        self
    }

    /// Whether the iterations of a shape are recorded once and replayed as one launch, where the device
    /// has graphs; elsewhere nothing changes. Only those of a software Vulkan device were tried. It pays for small matrices, and keeps what a
    /// recording needs in memory. No other thread may work on the device while a recording is made, which
    /// is at the first step.
    #[cfg_attr(not(feature = "cube"), allow(unused_mut, unused_variables))]
    pub fn with_graphs(mut self, graphs: bool) -> Self {
        #[cfg(feature = "cube")]
        {
            self.recordings = graphs.then(Default::default);
        }
        self
    }

    /// For how many shapes there is a recording.
    pub fn recorded(&self) -> usize {
        #[cfg(feature = "cube")]
        if let Some(recordings) = &self.recordings {
            return recordings.count();
        }
        0
    }

    /// Refuses a type that a device has not.
    pub(crate) fn check(&self, parameter: &str, device: &Device, dtype: DType) -> Result<()> {
        let (given, dtype) = (dtype, self.dtype.resolve(device, dtype));
        let has_type = device.supports_dtype(dtype);
        if has_type && (given == dtype.into() || computed::rounds_to(device, dtype)) {
            return Ok(());
        }
        Err(Error::Dtype {
            parameter: parameter.to_owned(),
            device: format!("{device:?}"),
            dtype: format!("{dtype:?}"),
        })
    }

    /// Replaces every matrix `U S V^T` of the batch `[k, m, n]` by one near `U V^T`, of the same
    /// type and on the same device.
    ///
    /// Any sizes will do, also 1 and 0. A matrix with an entry that is not finite gives one of NaN
    /// and leaves the others of the batch alone.
    pub fn orthogonalize(&self, batch: Tensor<3>) -> Tensor<3> {
        let dtype = batch.dtype();
        self.direction(batch, None).cast(dtype)
    }

    /// [`orthogonalize`](Self::orthogonalize) in the type of the iteration, with norms that may be known already,
    /// in parts that the workspace has room for.
    pub(crate) fn direction(&self, batch: Tensor<3>, norms: Option<Norms>) -> Tensor<3> {
        let [k, m, n] = batch.dims();
        if k * m * n == 0 {
            return batch;
        }
        let plan = self.plan(batch.dims(), batch.dtype(), &batch.device());
        // How many matrices the workspace has room for.
        let part = (self.workspace * 1_000_000 / plan.workspace).max(1);
        if part >= k {
            #[cfg(feature = "cube")]
            if let Some(replayed) = self.replayed(&plan, &batch, norms.as_ref()) {
                return replayed;
            }
            return self.orthogonalize_part(&plan, batch, norms);
        }
        // Not `empty`, of which Flex makes two.
        let mut result =
            Tensor::full(batch.dims(), 0.0, (&batch.device(), DType::from(plan.dtype)));
        for start in (0..k).step_by(part) {
            let range = start..(start + part).min(k);
            let norms =
                norms.as_ref().map(|Norms(norms)| Norms(norms.clone().slice([range.clone()])));
            let own = batch.clone().slice([range.clone()]);
            let own = self.orthogonalize_part(&plan, own, norms);
            result = result.slice_assign([range, 0..m, 0..n], own);
        }
        result
    }

    /// The result of a recording, if there may be one.
    #[cfg(feature = "cube")]
    fn replayed(
        &self,
        plan: &Explanation,
        batch: &Tensor<3>,
        norms: Option<&Norms>,
    ) -> Option<Tensor<3>> {
        let recordings = self.recordings.as_ref()?;
        if !matches!(plan.engine, Engine::Cube { .. }) {
            return None;
        }
        recordings.run(batch, norms, |batch, norms| {
            let (recorded, plan) = (Self { recordings: None, ..self.clone() }, plan.clone());
            let norms = norms.map(|Norms(norms)| norms);
            Box::new(move || {
                recorded.orthogonalize_part(&plan, batch.clone(), norms.clone().map(Norms))
            })
        })
    }

    fn orthogonalize_part(
        &self,
        plan: &Explanation,
        batch: Tensor<3>,
        norms: Option<Norms>,
    ) -> Tensor<3> {
        let [_, m, n] = batch.dims();
        let (dtype, device) = (batch.dtype(), batch.device());
        let products = Products::new(m, n, plan.engine, &device);
        let precise = FloatDType::from(precise_dtype(dtype));
        let norm_engine = Engine::choose(self.kernels, &device, precise);
        let x = norm_engine.normalize(batch.cast(precise), norms, self.epsilon, plan.dtype);
        match plan.form {
            Form::Gram => gram::iterate(x, &self.schedule, &plan.restarts, products),
            _ => standard::iterate(x, &self.schedule, products),
        }
    }

    /// How [`orthogonalize`](Self::orthogonalize) treats the matrices of `batch`.
    pub fn explain(&self, batch: &Tensor<3>) -> Explanation {
        self.explained(batch.dims(), batch.dtype(), &batch.device())
    }

    /// [`explain`](Self::explain), for a matrix that need not exist yet.
    pub fn explain_shape(&self, [m, n]: [usize; 2], dtype: DType, device: &Device) -> Explanation {
        self.explained([1, m, n], dtype, device)
    }

    fn explained(&self, shape: [usize; 3], dtype: DType, device: &Device) -> Explanation {
        let plan = self.plan(shape, dtype, device);
        let [k, m, n] = shape;
        let kernel = plan.engine.kernel(device, plan.dtype, [k, m.min(n), m.max(n)]);
        Explanation { kernel, ..plan }
    }

    /// The explanation but for the name of the kernel, which the iteration does not need.
    fn plan(&self, [_, m, n]: [usize; 3], dtype: DType, device: &Device) -> Explanation {
        let (m, n) = (m.min(n), m.max(n));
        let (given, dtype) = (dtype, self.dtype.resolve(device, dtype));
        let bytes = |elements: usize| {
            // Before and after the iteration, the matrix is there in both types.
            let both = m * n * (DType::from(dtype).size() + given.size().max(4));
            both.max(elements * DType::from(dtype).size())
        };
        let engine = Engine::choose(self.kernels, device, dtype);
        let share = |inner| engine.symmetric_share(m, inner);
        let steps = self.schedule.len();
        let standard = Explanation {
            form: Form::Standard,
            restarts: vec![],
            dtype,
            engine,
            kernel: String::new(),
            in_one_cube: false,
            operations: cost::standard(steps, m, n, share),
            workspace: bytes(cost::standard_memory(m, n)),
        };
        let in_one_cube = engine.is_small(device, m);
        let gram = self.restarts(dtype).map(|restarts| Explanation {
            form: Form::Gram,
            restarts: restarts.to_vec(),
            in_one_cube,
            operations: cost::gram(steps, restarts.len(), m, n, share),
            workspace: match in_one_cube {
                true => standard.workspace,
                false => bytes(cost::gram_memory(m, n)),
            },
            ..standard.clone()
        });
        let pays = |gram: &Explanation| {
            let fits = gram.workspace <= MOST_MEMORY * m * n * given.size();
            let is_faster = in_one_cube || fits && gram.operations < standard.operations;
            is_faster && !Engine::rounds_factors(device, dtype)
        };
        match (self.form, gram) {
            (Form::Gram, Some(gram)) => gram,
            (Form::Auto, Some(gram)) if pays(&gram) => gram,
            _ => standard,
        }
    }

    fn restarts(&self, dtype: FloatDType) -> Option<&[usize]> {
        self.restarts.iter().find(|(known, _)| *known == dtype)?.1.as_deref()
    }
}
