//! The decisions about matrices of a shape, before they are iterated.

use burn::tensor::{DType, Device, FloatDType};

use super::config::{IterationDtype, IterationForm};
use super::cost;
use crate::backend::{ComputePath, KernelPolicy, NativeKernels};

/// Largest workspace, in multiples of the input, for which [`IterationForm::Auto`] still picks a
/// form when a smaller one exists.
const LARGEST_WORKSPACE: usize = 3;

/// The decisions about the orthogonalisation of matrices of a shape, from
/// [`NewtonSchulz::explain`](super::NewtonSchulz::explain).
///
/// ```
/// use burn::tensor::{DType, Device};
/// use distmuon::{IterationForm, IterationPlan, NewtonSchulzConfig};
///
/// let iteration = NewtonSchulzConfig::new().with_form(IterationForm::Standard).init()?;
/// let plan: IterationPlan = iteration.explain_shape([768, 3072], DType::F32, &Device::default());
/// assert_eq!(plan.form, IterationForm::Standard); // `Auto` chooses by the operations
/// println!("{:?}, {}: {:.2e} operations", plan.dtype, plan.kernel, plan.operations);
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct IterationPlan {
    /// The form that runs, never [`IterationForm::Auto`].
    pub form: IterationForm,
    /// The number of steps, each of one polynomial.
    pub steps: usize,
    /// Indices of the steps before which the Gram form restarts; empty for the standard form.
    pub restarts: Vec<usize>,
    /// The type of the iteration.
    pub dtype: FloatDType,
    /// The implementation of the products.
    pub path: ComputePath,
    /// Name of the kernel that computes `X X^T`.
    pub kernel: String,
    /// The use of native kernels, with the reason if they do not run.
    pub native: NativeKernels,
    /// `true` if one kernel computes all steps of the Gram form.
    pub single_kernel: bool,
    /// Floating-point operations for one matrix.
    pub operations: f64,
    /// Bytes of memory for one matrix, its result included and its input excluded.
    pub workspace: usize,
}

impl IterationPlan {
    /// The name of the kernel for a batch on a device.
    pub(crate) fn kernel_of(&self, [k, m, n]: [usize; 3], device: &Device) -> String {
        match &self.native {
            NativeKernels::Used(kernels) => kernels.clone(),
            NativeKernels::Measured(_) | NativeKernels::Refused(_) => {
                self.path.kernel(device, self.dtype, [k, m.min(n), m.max(n)])
            }
        }
    }
}

/// The settings that decide on the plan of a shape.
#[derive(Debug, Clone)]
pub(super) struct Planner {
    pub form: IterationForm,
    pub dtype: IterationDtype,
    pub policy: KernelPolicy,
    pub steps: cost::Steps,
    /// For every type that the Gram form may run in; `None` where the Gram form is not exact
    /// enough.
    pub restarts: Vec<(FloatDType, Option<Vec<usize>>)>,
    /// The same for float32 on devices that multiply in TF32.
    pub tf32_restarts: Option<Vec<usize>>,
}

impl Planner {
    /// The plan for matrices of a shape and type, without the name of the kernel.
    pub fn plan(&self, [m, n]: [usize; 2], given: DType, device: &Device) -> IterationPlan {
        // Tall matrices are iterated from the other side, at the same cost.
        let (m, n) = (m.min(n), m.max(n));
        let dtype = self.dtype.resolve(device, given);
        let bytes = |elements: usize| {
            // Before and after the iteration, the matrix exists in both types.
            let both = m * n * (DType::from(dtype).size() + given.size().max(4));
            both.max(elements * DType::from(dtype).size())
        };
        let path = ComputePath::choose(self.policy, device, dtype);
        let share = |inner| path.symmetric_share(m, inner);
        let standard = IterationPlan {
            form: IterationForm::Standard,
            steps: self.steps.all,
            restarts: vec![],
            dtype,
            path,
            kernel: String::new(),
            native: NativeKernels::Refused("the plan is for the form alone".to_owned()),
            single_kernel: false,
            operations: cost::standard(self.steps, m, n, share),
            workspace: bytes(cost::standard_memory(m, n)),
        };
        let single_kernel = path.is_small(device, m);
        let restarts = match ComputePath::rounds_factors(device, dtype) {
            true => self.tf32_restarts.as_deref(),
            false => self.restarts(dtype),
        };
        let gram = restarts.map(|restarts| IterationPlan {
            form: IterationForm::Gram,
            restarts: restarts.to_vec(),
            single_kernel,
            operations: cost::gram(self.steps, restarts.len(), m, n, share),
            workspace: match single_kernel {
                // `R`, `Z` and `Q` stay in shared memory.
                true => standard.workspace,
                false => bytes(cost::gram_memory(m, n)),
            },
            ..standard.clone()
        });
        let pays = |gram: &IterationPlan| {
            let fits = gram.workspace <= LARGEST_WORKSPACE * m * n * given.size();
            // Small products take less time than their launches, of which one kernel saves most.
            single_kernel || fits && gram.operations < standard.operations
        };
        match (self.form, gram) {
            (IterationForm::Gram, Some(gram)) => gram,
            (IterationForm::Auto, Some(gram)) if pays(&gram) => gram,
            (IterationForm::Auto | IterationForm::Gram | IterationForm::Standard, _) => standard,
        }
    }

    /// The restarts of the Gram form in a type, if it is exact enough.
    fn restarts(&self, dtype: FloatDType) -> Option<&[usize]> {
        self.restarts.iter().find(|(known, _)| *known == dtype)?.1.as_deref()
    }
}
