//! The elementwise parts of a step, as a Burn backend extension: each may be one pass over memory.
//!
//! Backends that are not named in the attribute run them in Burn's operations.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use crate::gate::Gate;
use crate::orthogonalize::{Engine, Kernels};

/// The elementwise parts of a step. Tensors are shaped like the parameter; `accepted` is `[1]`, 1 if
/// the gradient is finite and 0 otherwise.
#[backend_extension(Flex: cfg(feature = "flex"))]
pub trait StepOps: Backend {
    /// The new momentum, what is to be orthogonalised, and `accepted`, from a gradient and the
    /// momentum before it. A gradient that is not finite leaves the momentum as it is.
    fn accumulate(
        grad: FloatTensor<Self>,
        momentum: FloatTensor<Self>,
        mu: f32,
        nesterov: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `keep P - lr U` if the gradient was accepted, else `P`.
    fn apply(
        parameter: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        keep: f32,
        lr: f32,
    ) -> FloatTensor<Self>;
}

/// [`StepOps::accumulate`] on the engine of the gradient.
pub(super) fn accumulate<const D: usize>(
    kernels: Kernels,
    grad: Tensor<D>,
    momentum: Tensor<D>,
    mu: f64,
    nesterov: bool,
) -> (Tensor<D>, Tensor<D>, Gate) {
    match Engine::choose(kernels, &grad.device(), grad.dtype().into()) {
        Engine::Portable => {
            let gate = Gate::of(&grad);
            let grad = gate.clean(grad);
            let averaged = lerp(momentum.clone(), grad.clone(), 1.0 - mu);
            let update = if nesterov { lerp(grad, averaged.clone(), mu) } else { averaged.clone() };
            (gate.choose(averaged, momentum), update, gate)
        }
        Engine::Flex => {
            let (grad, momentum) = (grad.into_dispatch(), momentum.into_dispatch());
            let (momentum, update, accepted) =
                Dispatch::accumulate(grad, momentum, mu as f32, nesterov);
            let gate = Gate::from_accepted(Tensor::from_dispatch(accepted));
            (Tensor::from_dispatch(momentum), Tensor::from_dispatch(update), gate)
        }
    }
}

/// [`StepOps::apply`] on the engine of the parameter.
pub(super) fn apply<const D: usize>(
    kernels: Kernels,
    parameter: Tensor<D>,
    direction: Tensor<D>,
    gate: &Gate,
    keep: f64,
    lr: f64,
) -> Tensor<D> {
    match Engine::choose(kernels, &parameter.device(), parameter.dtype().into()) {
        Engine::Portable => {
            let updated = parameter.clone().mul_scalar(keep) - direction.mul_scalar(lr);
            gate.choose(updated, parameter)
        }
        Engine::Flex => Tensor::from_dispatch(Dispatch::apply(
            parameter.into_dispatch(),
            direction.into_dispatch(),
            gate.accepted().into_dispatch(),
            keep as f32,
            lr as f32,
        )),
    }
}

/// `from + weight (to - from)`, as `(1 - weight) from + weight to`.
fn lerp<const D: usize>(from: Tensor<D>, to: Tensor<D>, weight: f64) -> Tensor<D> {
    from.mul_scalar(1.0 - weight) + to.mul_scalar(weight)
}
