//! The elementwise parts of a step, as a Burn backend extension: each may be one pass over memory.
//!
//! Backends that are not named in the attribute run them in Burn's operations. Tensors are batches
//! `[k, m, n]`; there is one value per matrix, `[k]` in float32, of everything that may differ
//! between them.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::rule::Rates;
use crate::gate::{Gate, spread};
use crate::orthogonalize::{Engine, Kernels};

/// The elementwise parts of a step.
#[backend_extension(Flex: cfg(feature = "flex"))]
pub trait StepOps: Backend {
    /// 1 for every matrix whose entries are finite, else 0.
    fn finite(grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The new momentum, and what is to be orthogonalised, from a gradient and the momentum before
    /// it. A matrix that is not accepted keeps its momentum, and zeros are to be orthogonalised.
    fn accumulate(
        grad: FloatTensor<Self>,
        momentum: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        mu: f32,
        nesterov: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `keep P - lr U` for matrices that are accepted, `P` for the others.
    fn apply(
        parameter: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        keep: FloatTensor<Self>,
        lr: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Accepts the matrices whose entries are finite.
pub(crate) fn finite(kernels: Kernels, grad: &Tensor<3>) -> Gate {
    match Engine::choose(kernels, &grad.device(), grad.dtype().into()) {
        Engine::Portable => Gate::of_rows(grad),
        Engine::Flex => Gate::from_accepted(Tensor::from_dispatch(Dispatch::finite(
            grad.clone().into_dispatch(),
        ))),
    }
}

/// [`StepOps::accumulate`] on the engine of the gradient.
pub(super) fn accumulate(
    kernels: Kernels,
    grad: Tensor<3>,
    momentum: Tensor<3>,
    gate: &Gate,
    mu: f64,
    nesterov: bool,
) -> (Tensor<3>, Tensor<3>) {
    match Engine::choose(kernels, &grad.device(), grad.dtype().into()) {
        Engine::Portable => {
            let grad = gate.clean(grad);
            let averaged = lerp(momentum.clone(), grad.clone(), 1.0 - mu);
            let update = if nesterov { lerp(grad, averaged.clone(), mu) } else { averaged.clone() };
            (gate.choose(averaged, momentum), update)
        }
        Engine::Flex => {
            let (momentum, update) = Dispatch::accumulate(
                grad.into_dispatch(),
                momentum.into_dispatch(),
                gate.accepted().into_dispatch(),
                mu as f32,
                nesterov,
            );
            (Tensor::from_dispatch(momentum), Tensor::from_dispatch(update))
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
            let [keep, lr] = [keep, lr].map(|x| spread(x.cast(parameter.dtype()), &parameter));
            gate.choose(parameter.clone() * keep - direction * lr, parameter)
        }
        Engine::Flex => Tensor::from_dispatch(Dispatch::apply(
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
