//! The operations of a step, as extensions of Burn's backends.
//!
//! [`MatrixOps`] are the products of the iteration, [`StepOps`] the elementwise operations around
//! it, and [`AdamWOps`] a step of AdamW. A backend with kernels implements them and is named in the
//! attributes: Flex in `flex/`, every CubeCL runtime in `cubecl/`. Backends that are not named run
//! the portable bodies (`portable/`), which are composed of Burn's own operations and also run on
//! the dispatching backend.
//!
//! Gradients and parameters are read and written where they are, several in one call. The
//! optimizer's state is stored as batches `[k, m, n]`, in which a parameter has the number of
//! matrices of its tensor.

use std::ops::Range;

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, TensorMetadata, backend_extension, tensor::FloatTensor};
#[cfg(feature = "fusion")]
use burn::tensor::DType;
use burn::tensor::{FloatDType, Shape, Tensor};

use super::portable;
use super::program::{Polynomial, PreparedProgram, Program, Side, Step};
use super::tensor_list::TensorList;

/// Rows of a tensor, and the location of their flags.
#[derive(Debug, Clone, Copy)]
pub struct FlaggedRows {
    /// Index of the first row's flag.
    pub flag: usize,
    /// Number of rows of the tensor.
    pub rows: usize,
}

/// The momentum of a parameter in a step.
#[derive(Debug, Clone, Copy)]
pub struct MomentumStep {
    /// Index of the parameter's flag.
    pub flag: usize,
    /// Weight of the old momentum.
    pub keep: f64,
    /// Weight of the gradient.
    pub fresh: f64,
}

impl MomentumStep {
    /// Both weights in float32, where they have the same sum as in float64: 1 for an average.
    #[cfg_attr(not(any(feature = "flex", feature = "cube")), expect(dead_code))]
    pub fn weights(self) -> [f32; 2] {
        let keep = self.keep as f32;
        [keep, (self.keep + self.fresh - f64::from(keep)) as f32]
    }
}

/// The step of a parameter, `P <- decay P - lr U`.
#[derive(Debug, Clone, Copy)]
pub struct ParameterStep {
    /// Index of the parameter's flag.
    pub flag: usize,
    /// Factor on the old values.
    pub decay: f64,
    /// Factor on the direction.
    pub lr: f64,
    /// `true` if the old values are only decayed where they and the direction have equal signs.
    pub cautious: bool,
}

/// The flags of the matrices of a batch, among the flags of others.
#[derive(Debug, Clone, Copy)]
pub struct MatrixFlags<'a> {
    pub flags: &'a Tensor<1>,
    /// Index of the first one of the batch.
    pub first: usize,
}

/// A parameter in a step that updates element by element.
#[derive(Debug, Clone, Copy)]
pub struct ElementwiseRows {
    /// Index of the parameter's flag and, for AdamW, bias corrections.
    pub flag: usize,
    /// Index of its first element in the state.
    pub first: usize,
    /// Factor on the old values.
    pub decay: f64,
    /// Factor on the step.
    pub lr: f64,
}

/// The norms of a batch in parts, as [`MatrixOps::norms`] returns them.
pub(crate) struct PartialNorms(pub Tensor<3>);

/// The results of [`StepOps::update_momentum`] for a whole batch.
pub(crate) struct MomentumUpdate {
    pub momentum: Tensor<3>,
    /// The update to orthogonalise, in the type of the momentum.
    pub update: Tensor<3>,
    /// The norms of the update, if the kernel computes them without a further pass.
    pub norms: Option<PartialNorms>,
}

/// The counts of parameters over their steps, in one value for each.
pub(crate) struct StepCounts {
    /// Steps that left the parameter as it is.
    pub skipped: Tensor<1>,
    /// AdamW's bias corrections: the sums of the weights in both moments.
    pub corrections: [Tensor<1>; 2],
}

/// The decisions of a step on the device.
pub(crate) struct Acceptance {
    /// 1 where a parameter stays as it is, else 0.
    pub rejected: Tensor<1>,
    /// The counts after the step.
    pub counts: StepCounts,
    /// Flags for a later step, if the kernel has written some.
    pub zeros: Option<Tensor<1>>,
}

/// The count of a parameter's skipped steps, which the step of its only matrix advances.
pub(crate) struct SkipCount {
    pub skipped: Tensor<1>,
    /// A flag for a later step, if the kernel has written one.
    pub zero: Option<Tensor<1>>,
}

/// The constants of a step of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AdamWStep {
    pub beta_1: f64,
    pub beta_2: f64,
    pub epsilon: f64,
    /// Decays only the elements that do not grow by it: those with `P U >= 0`.
    pub cautious: bool,
    /// Divides by the root of the largest second moment so far.
    pub amsgrad: bool,
}

/// The constants of a step of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LionStep {
    pub beta_1: f64,
    pub beta_2: f64,
}

/// The moving averages of the gradients and of their squares.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    pub moment_1: Tensor<1>,
    pub moment_2: Tensor<1>,
    /// The largest second moment so far, of AMSGrad.
    pub max_moment_2: Option<Tensor<1>>,
}

impl Moments {
    /// The moments, with the same operation applied.
    pub fn map(self, f: impl Fn(Tensor<1>) -> Tensor<1>) -> Self {
        let max_moment_2 = self.max_moment_2.map(&f);
        Self { moment_1: f(self.moment_1), moment_2: f(self.moment_2), max_moment_2 }
    }
}

/// The device's values for every parameter of a step.
pub(crate) struct AdamWControls<'a> {
    /// 1 for parameters that stay as they are, else 0.
    pub rejected: &'a Tensor<1>,
    /// The corrections of both moments after the step.
    pub corrections: &'a [Tensor<1>; 2],
    /// The factor on all gradients.
    pub factor: Option<&'a Tensor<1>>,
}

/// Products of matrices in batches. Factors are rounded to the type that a kernel computes in.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MatrixOps: Backend {
    /// `A A^T`: `[k, m, n]` to `[k, m, m]`. Kernels may be chosen by measuring.
    #[fusion(dtype = a, shape = square(a))]
    fn syrk(a: FloatTensor<Self>, _tuned: bool) -> FloatTensor<Self> {
        portable::syrk::<Self>(a)
    }

    /// `alpha A B^T + beta C`, for a result that is known to be symmetric: `a` and `b` are
    /// `[k, m, n]`; `c` is symmetric and `[k, m, m]` like the result.
    #[fusion(dtype = c, shape = c)]
    fn symmetric_product(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        alpha: f64,
        beta: f64,
        _tuned: bool,
    ) -> FloatTensor<Self> {
        portable::symmetric_product::<Self>(a, b, c, alpha, beta)
    }

    /// `A B + beta C`, with `a` `[k, m, n]`, `b` `[k, n, p]`, and `c` `[k, m, p]` like the result.
    #[fusion(dtype = c, shape = c)]
    fn product_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        beta: f64,
        _tuned: bool,
    ) -> FloatTensor<Self> {
        portable::product_add::<Self>(a, b, c, beta)
    }

    /// `A B`, with `a` `[k, m, n]`, `b` `[k, n, p]`.
    #[fusion(meta = |a, b| {
        let [k, m, _] = a.shape.dims();
        let [_, _, p] = b.shape.dims();
        TensorSpec::new([k, m, p].into(), a.dtype)
    })]
    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(a, b)
    }

    /// `Z + I`.
    #[fusion(dtype = z, shape = z)]
    fn plus_identity(z: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::plus_identity::<Self>(z)
    }

    /// The product `Q` of all `Z + a I` with `Z = b R + c R^2`. Every step advances
    /// `R <- (Z + a I) R (Z + a I)`. One kernel computes the whole Gram form for small matrices.
    #[fusion(dtype = r, shape = r)]
    fn accumulate_q(r: FloatTensor<Self>, schedule: Vec<Polynomial>) -> FloatTensor<Self>;

    /// The result of a program for a batch of matrices, without gaps between its rows. Where
    /// `native` products of the device's own are allowed, a backend may compute it by these.
    #[fusion(dtype = x, shape = x)]
    fn iterate(
        x: FloatTensor<Self>,
        program: PreparedProgram,
        tuned: bool,
        _native: bool,
    ) -> FloatTensor<Self> {
        program.program().compute::<Self>(x, Products::Backend { tuned }, |x| x)
    }

    /// Copies `values` into the buffer of `target`, even if other tensors share that buffer, and
    /// returns `target`.
    #[fusion(dtype = target, shape = target)]
    fn overwrite(target: FloatTensor<Self>, values: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Writes the norms of the rows of tensors, of `elements` elements each, in parts:
    /// `[rows, parts, 2]` float32 values, a scale and the sum of the squares of the elements
    /// divided by it, as in LAPACK's `slassq`. The last row of a tensor may be shorter. `firsts`
    /// has the index of each tensor's first row.
    #[fusion(dtype = norms, shape = norms)]
    fn norms(
        norms: FloatTensor<Self>,
        #[extension_type] tensors: TensorList<Self>,
        firsts: Vec<usize>,
        elements: usize,
    ) -> FloatTensor<Self>;

    /// Divides every matrix by its norm, or by `epsilon` if that is larger, and rounds to `dtype`.
    #[fusion(meta = |x, _norms, _epsilon, dtype| {
        TensorSpec::new(x.shape.clone(), (*dtype).into())
    })]
    fn normalize(
        x: FloatTensor<Self>,
        norms: FloatTensor<Self>,
        epsilon: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;
}

/// The products that compute a program.
#[derive(Debug, Clone, Copy)]
pub(super) enum Products {
    /// Burn's operations.
    Portable,
    /// The backend's own.
    Backend {
        /// `true` if the kernels are chosen by measuring.
        tuned: bool,
    },
}

impl Products {
    fn syrk<B: MatrixOps>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Portable => portable::syrk::<B>(x),
            Self::Backend { tuned } => B::syrk(x, tuned),
        }
    }

    fn symmetric_product<B: MatrixOps>(
        self,
        [a, b]: [FloatTensor<B>; 2],
        c: FloatTensor<B>,
        alpha: f64,
        beta: f64,
    ) -> FloatTensor<B> {
        match self {
            Self::Portable => portable::symmetric_product::<B>(a, b, c, alpha, beta),
            Self::Backend { tuned } => B::symmetric_product(a, b, c, alpha, beta, tuned),
        }
    }

    fn plus_identity<B: MatrixOps>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Portable => portable::plus_identity::<B>(x),
            Self::Backend { .. } => B::plus_identity(x),
        }
    }

    fn product<B: MatrixOps>(self, [a, b]: [FloatTensor<B>; 2]) -> FloatTensor<B> {
        match self {
            Self::Portable => B::float_matmul(a, b),
            Self::Backend { .. } => B::product(a, b),
        }
    }

    fn product_add<B: MatrixOps>(
        self,
        [a, b]: [FloatTensor<B>; 2],
        c: FloatTensor<B>,
        beta: f64,
    ) -> FloatTensor<B> {
        match self {
            Self::Portable => portable::product_add::<B>(a, b, c, beta),
            Self::Backend { tuned } => B::product_add(a, b, c, beta, tuned),
        }
    }
}

impl Program {
    /// Runs the program on a batch. `rounded` is applied to every factor of a product.
    pub(super) fn compute<B: MatrixOps>(
        &self,
        x: FloatTensor<B>,
        products: Products,
        rounded: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let [_, m, n] = x.shape().dims();
        self.run(x, |step, operands| {
            step.compute::<B>(operands, Side::of([m, n]), products, &rounded)
        })
    }
}

impl Step {
    /// Computes the result from the operands.
    fn compute<B: MatrixOps>(
        &self,
        operands: Vec<FloatTensor<B>>,
        side: Side,
        products: Products,
        rounded: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let mut operands = operands.into_iter();
        let mut next = || operands.next().expect("a step has its operands");
        let on_side = |symmetric, x| match side {
            Side::Left => [symmetric, x].map(&rounded),
            Side::Right => [x, symmetric].map(&rounded),
        };
        let scaled = |z, factor| match factor {
            1.0 => z,
            factor => portable::scaled::<B>(z, factor),
        };
        match *self {
            Self::Square { .. } => {
                let x = match side {
                    Side::Left => next(),
                    Side::Right => B::float_swap_dims(next(), 1, 2),
                };
                products.syrk::<B>(rounded(x))
            }
            Self::Symmetric { alpha, beta, .. } => {
                let (factors, c) = ([next(), next()].map(rounded), next());
                products.symmetric_product::<B>(factors, c, alpha, beta)
            }
            Self::Rescaled { by, .. } => {
                let (x, by) = (next(), portable::divisors::<B>(next(), by));
                let by = match side {
                    Side::Left => by,
                    Side::Right => B::float_swap_dims(by, 1, 2),
                };
                portable::over::<B>(x, by)
            }
            Self::RescaledSquare { by, .. } => {
                let r = next();
                // From the same `R` as for `X`, so that the result is the square of the new `X`.
                let by = portable::divisors::<B>(r.clone(), by);
                let of_columns = B::float_swap_dims(by.clone(), 1, 2);
                portable::over::<B>(r, B::float_mul(by, of_columns))
            }
            Self::PlusIdentity { factor, .. } => {
                products.plus_identity::<B>(scaled(next(), factor))
            }
            // Its kernel computes from `R` in float32.
            Self::AccumulateQ { ref schedule, .. } => B::accumulate_q(next(), schedule.clone()),
            Self::Apply { .. } => products.product::<B>(on_side(next(), next())),
            Self::ApplyAndAdd { factor, a: beta, .. } => {
                let (z, x) = (scaled(next(), factor), next());
                products.product_add::<B>(on_side(z, x.clone()), x, beta)
            }
        }
    }
}

/// Elements of a part of a norm: enough work for a thread or a cube, and the same on every backend,
/// so that sums are added in one order.
pub(super) const NORM_PART: usize = 1 << 14;

/// The number of parts in which the norm of a row of `elements` elements is computed.
pub(super) fn norm_parts(elements: usize) -> usize {
    elements.div_ceil(NORM_PART).max(1)
}

/// `[k, m, m]` for `[k, m, n]`.
#[cfg(feature = "fusion")]
fn square(shape: &Shape) -> Shape {
    let [k, m, _] = shape.dims();
    [k, m, m].into()
}

/// The elementwise operations of a Muon step.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait StepOps: Backend {
    /// The tensors in other shapes, one for each, with their elements in the same order. With
    /// fusion, every operation and every tensor that is dropped is a task of its service thread: a
    /// step has one operation for all parameters.
    #[fusion(meta = |tensors, shapes| {
        let spec = |(tensor, shape): (&TensorSpec, &Shape)| {
            TensorSpec::new(shape.clone(), tensor.dtype)
        };
        tensors.iter().zip(shapes).map(spec).collect::<Vec<_>>()
    })]
    fn reshape_all(
        #[extension_type] tensors: TensorList<Self>,
        shapes: Vec<Shape>,
    ) -> TensorList<Self> {
        let each = tensors.0.into_iter().zip(shapes);
        TensorList(each.map(|(tensor, shape)| Self::float_reshape(tensor, shape)).collect())
    }

    /// Sets the flags of rows with an element that is not finite, or larger than `largest` in
    /// magnitude, to 1.
    #[fusion(dtype = flags, shape = flags)]
    fn reject(
        flags: FloatTensor<Self>,
        #[extension_type] tensors: TensorList<Self>,
        rows: Vec<FlaggedRows>,
        largest: f32,
    ) -> FloatTensor<Self>;

    /// The decisions and counts of a step: flags of the parameters that stay as they are, the
    /// numbers of skipped steps, both corrections, and zeros. A parameter stays if its value in
    /// `sums` is positive, which counts as skipped, or its flag in `absent` is set, where they are
    /// given. Positive values of `sums` that follow only count. Corrections of other parameters
    /// advance by the weights of the old value, and of 1.
    #[fusion(meta = |_sums, _absent, skipped, first, second, _weights, _has_absent| {
        (skipped.clone(), skipped.clone(), first.clone(), second.clone(), skipped.clone())
    })]
    #[allow(clippy::type_complexity)] // A backend extension returns no struct of tensors.
    fn accept(
        sums: FloatTensor<Self>,
        absent: FloatTensor<Self>,
        skipped: FloatTensor<Self>,
        correction_1: FloatTensor<Self>,
        correction_2: FloatTensor<Self>,
        weights: [[f32; 2]; 2],
        has_absent: bool,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    );

    /// Advances the momentum of a batch by its gradients: the momentum, the update to
    /// orthogonalise, in its type, and the update's [partial norms](MatrixOps::norms). A parameter
    /// whose flag is set in `rejected` keeps its momentum, and its update is zero. Gradients are
    /// multiplied by `factor` if they are `scaled`.
    #[fusion(meta = |_grads, momentum, _rejected, _factor, _steps, _nesterov, _scaled| {
        let [k, m, n] = momentum.shape.dims();
        let norms = TensorSpec::new([k, norm_parts(m * n), 2].into(), DType::F32);
        (momentum.clone(), momentum.clone(), norms)
    })]
    // A backend extension accepts no struct of tensors and numbers.
    #[allow(clippy::too_many_arguments)]
    fn update_momentum(
        #[extension_type] grads: TensorList<Self>,
        momentum: FloatTensor<Self>,
        rejected: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        steps: Vec<MomentumStep>,
        nesterov: bool,
        scaled: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `decay P - lr U` with the matrices of a batch. A parameter whose flag is set in `rejected`
    /// stays as it is, and so does a matrix whose flag is set in `diverged`, in which the batch
    /// starts at `first_diverged`. No step is cautious.
    ///
    /// If there are `places`, one tensor has all parameters, like the batch, and these are the
    /// elements of each. Else each parameter is a tensor.
    #[fusion(meta = |
        parameters, _places, _direction, _rejected, _diverged, _steps, _first_diverged
    | {
        parameters.clone()
    })]
    // A backend extension accepts no struct of tensors and numbers.
    #[allow(clippy::too_many_arguments)]
    fn apply(
        #[extension_type] parameters: TensorList<Self>,
        places: Vec<Range<usize>>,
        direction: FloatTensor<Self>,
        rejected: FloatTensor<Self>,
        diverged: FloatTensor<Self>,
        steps: Vec<ParameterStep>,
        first_diverged: usize,
    ) -> TensorList<Self>;

    /// [`apply`](Self::apply) for one parameter of one matrix, which stays as it is if its `flag`
    /// is set: its new values, the number of steps that left it as it is, from the number before,
    /// and a zero. The factors are on the old values and on the direction.
    #[fusion(meta = |parameter, _direction, _flag, skipped, _factors| {
        (parameter.clone(), skipped.clone(), skipped.clone())
    })]
    fn apply_and_count(
        parameter: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        flag: FloatTensor<Self>,
        skipped: FloatTensor<Self>,
        factors: [f64; 2],
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [decay, lr] = factors;
        let zero = Self::float_zeros(flag.shape(), &flag.device(), FloatDType::F32);
        let steps = vec![ParameterStep { flag: 0, decay, lr, cautious: false }];
        let (one, rejected, diverged) = (vec![parameter], flag.clone(), flag.clone());
        let one = Self::apply(TensorList(one), vec![], direction, rejected, diverged, steps, 0);
        let parameter = one.0.into_iter().next().expect("one parameter has new values");
        (parameter, Self::float_add(skipped, flag), zero)
    }

    /// Master weights `[elements]` in float32, brought up to date with their parameters in half
    /// precision: an element whose parameter is not the rounded master weight was changed since the
    /// last step, and is the parameter from now on. `firsts` has the index of each parameter's
    /// first element.
    #[fusion(dtype = masters, shape = masters)]
    fn restore(
        masters: FloatTensor<Self>,
        #[extension_type] parameters: TensorList<Self>,
        firsts: Vec<usize>,
    ) -> FloatTensor<Self>;

    /// The elements in some places of a flat tensor, rounded to a type, each as a tensor.
    #[fusion(meta = |_all, places, dtype| {
        let spec = |place: &Range<usize>| TensorSpec::new([place.len()].into(), (*dtype).into());
        places.iter().map(spec).collect::<Vec<_>>()
    })]
    fn round_parts(
        all: FloatTensor<Self>,
        places: Vec<Range<usize>>,
        dtype: FloatDType,
    ) -> TensorList<Self> {
        let device = all.device();
        let all = Self::float_cast(all, dtype);
        let part = |place: Range<usize>| match place.is_empty() {
            // Some backends do not slice nothing.
            true => Self::float_empty([0].into(), &device, dtype),
            false => Self::float_slice(all.clone(), &[place.into()]),
        };
        TensorList(places.into_iter().map(part).collect())
    }
}

/// A step of AdamW.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait AdamWOps: Backend {
    /// The AdamW update of several parameters, applied element by element: their new values, and
    /// both moments.
    ///
    /// A parameter whose flag is set in `rejected` keeps its values and moments. `rejected` and
    /// both corrections have one value for every parameter. Gradients are multiplied by `factor` if
    /// they are `scaled`. The constants are `beta_1`, `beta_2` and `epsilon`.
    ///
    /// If there are `places`, one tensor has all parameters, like the moments, and these are the
    /// elements of each. Else each parameter is a tensor.
    #[fusion(meta = |
        parameters, _places, _grads, moment_1, moment_2, _rejected, _correction_1, _correction_2,
        _factor, _rows, _constants, _scaled
    | {
        (parameters.clone(), moment_1.clone(), moment_2.clone())
    })]
    // A backend extension accepts no struct of tensors and numbers.
    #[allow(clippy::too_many_arguments)]
    fn adamw(
        #[extension_type] parameters: TensorList<Self>,
        places: Vec<Range<usize>>,
        #[extension_type] grads: TensorList<Self>,
        moment_1: FloatTensor<Self>,
        moment_2: FloatTensor<Self>,
        rejected: FloatTensor<Self>,
        correction_1: FloatTensor<Self>,
        correction_2: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        rows: Vec<ElementwiseRows>,
        constants: [f32; 3],
        scaled: bool,
    ) -> (TensorList<Self>, FloatTensor<Self>, FloatTensor<Self>);
}
