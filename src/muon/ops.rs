//! The elementwise parts of a step, as a Burn backend extension: each may be one pass over memory.
//!
//! Backends that are not named in the attribute run them in Burn's operations. Tensors are batches
//! `[k, m, n]`; there is one value per matrix, `[k]` in float32, of everything that may differ
//! between them.

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::rule::Rates;
use crate::gate::{Gate, spread};
#[cfg(feature = "fusion")]
use crate::orthogonalize::ops::norms_of;
use crate::orthogonalize::ops::{Norms, norm_parts};
use crate::orthogonalize::{Engine, Kernels};

/// The elementwise parts of a step.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait StepOps: Backend {
    /// 1 for every matrix whose entries are finite and at most `largest` in magnitude, else 0.
    #[fusion(meta = |grad, _largest| per_matrix(grad))]
    fn finite(grad: FloatTensor<Self>, largest: f32) -> FloatTensor<Self>;

    /// The new momentum, and what is to be orthogonalised, in the type of the momentum, and its norms in
    /// [`parts`](crate::orthogonalize::ops::MatrixOps::norms), from a gradient and the momentum before it.
    /// A matrix that is not accepted keeps its momentum, and zeros are to be orthogonalised.
    #[fusion(meta = |grad, momentum, _accepted, _mu, _nesterov, parts| {
        (momentum.clone(), momentum.clone(), norms_of(grad.shape.dims::<3>()[0], *parts))
    })]
    fn accumulate(
        grad: FloatTensor<Self>,
        momentum: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        mu: f32,
        nesterov: bool,
        parts: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `keep P - lr U` for matrices that are accepted, `P` for the others.
    #[fusion(dtype = parameter, shape = parameter)]
    fn apply(
        parameter: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        keep: FloatTensor<Self>,
        lr: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// One float32 value for every matrix.
#[cfg(feature = "fusion")]
fn per_matrix(batch: &TensorSpec) -> TensorSpec {
    TensorSpec::new([batch.shape.dims::<3>()[0]].into(), burn::tensor::DType::F32)
}

/// Accepts the matrices whose entries are finite and at most `largest` in magnitude.
pub(crate) fn finite(kernels: Kernels, grad: &Tensor<3>, largest: f64) -> Gate {
    match Engine::choose(kernels, &grad.device(), grad.dtype().into()) {
        Engine::Portable => Gate::of_rows(grad, largest),
        Engine::Flex | Engine::Cube { .. } => Gate::from_accepted(Tensor::from_dispatch(
            Dispatch::finite(grad.clone().into_dispatch(), largest.min(f32::MAX.into()) as f32),
        )),
    }
}

/// [`StepOps::accumulate`] on the engine of the gradient; the norms where they cost nothing.
pub(super) fn accumulate(
    kernels: Kernels,
    grad: Tensor<3>,
    momentum: Tensor<3>,
    gate: &Gate,
    mu: f64,
    nesterov: bool,
) -> (Tensor<3>, Tensor<3>, Option<Norms>) {
    match Engine::choose(kernels, &grad.device(), grad.dtype().into()) {
        Engine::Portable => {
            let grad = gate.clean(grad).cast(momentum.dtype());
            let averaged = lerp(momentum.clone(), grad.clone(), 1.0 - mu);
            let update = if nesterov { lerp(grad, averaged.clone(), mu) } else { averaged.clone() };
            (gate.choose(averaged, momentum), update, None)
        }
        Engine::Flex | Engine::Cube { .. } => {
            let parts = norm_parts(&grad);
            let (momentum, update, norms) = Dispatch::accumulate(
                grad.into_dispatch(),
                momentum.into_dispatch(),
                gate.accepted().into_dispatch(),
                mu as f32,
                nesterov,
                parts,
            );
            let norms = Norms(Tensor::from_dispatch(norms));
            (Tensor::from_dispatch(momentum), Tensor::from_dispatch(update), Some(norms))
        }
    }
}

/// [`StepOps::apply`] on the engine of the parameter.
pub(super) fn apply(
    kernels: Kernels,
    parameter: Tensor<3>,
    direction: Tensor<3>,
    gate: &Gate,
    rates: &Rates,
) -> Tensor<3> {
    let Rates { keep, lr } = rates.clone();
    match Engine::choose(kernels, &parameter.device(), parameter.dtype().into()) {
        Engine::Portable => {
            let given = parameter.dtype();
            // In the type of the rates, in which `1 - 1e-4` is not 1, and rounded once.
            let [wide, direction] = [parameter.clone(), direction].map(|x| x.cast(lr.dtype()));
            let [keep, lr] = [keep, lr].map(|x| spread(x, &wide));
            gate.choose((wide * keep - direction * lr).cast(given), parameter)
        }
        Engine::Flex | Engine::Cube { .. } => Tensor::from_dispatch(Dispatch::apply(
            parameter.into_dispatch(),
            direction.into_dispatch(),
            gate.accepted().into_dispatch(),
            keep.into_dispatch(),
            lr.into_dispatch(),
        )),
    }
}

/// `from + weight (to - from)`, as `(1 - weight) from + weight to`.
fn lerp(from: Tensor<3>, to: Tensor<3>, weight: f64) -> Tensor<3> {
    from.mul_scalar(1.0 - weight) + to.mul_scalar(weight)
}
