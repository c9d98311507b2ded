//! The elementwise operations of a Muon step, on a compute path.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use super::ops::{MomentumStep, MomentumUpdate, ParameterStep, PartialNorms, StepOps, norm_parts};
use super::path::{ComputePath, KernelPolicy};
use super::portable;
use super::tensor_list::{TensorList, calls};

/// [`StepOps::update_momentum`] for a whole batch, on the path of the gradients. There is one
/// gradient and one step for each parameter of the batch.
pub(crate) fn update_momentum(
    policy: KernelPolicy,
    grads: Vec<Tensor<1>>,
    momentum: Tensor<3>,
    rejected: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    steps: &[MomentumStep],
    nesterov: bool,
) -> MomentumUpdate {
    let (shape @ [k, m, n], device) = (momentum.dims(), momentum.device());
    let path = ComputePath::choose(policy, &device, grads[0].dtype().into());
    if path == ComputePath::Portable {
        return portable::update_momentum(grads, momentum, rejected, factor, steps, nesterov);
    }
    let dtype = momentum.dtype();
    // Flex computes in float32: converted once for the batch, not in every call.
    let computed_in = if path == ComputePath::Flex { DType::F32 } else { dtype };
    let momentum = momentum.cast(computed_in);
    let update = path.output(shape, computed_in, &device).into_dispatch();
    let norms = path.output([k, norm_parts(m * n), 2], DType::F32, &device).into_dispatch();
    let mut next = 0;
    let all = calls(grads.len()).fold((momentum.into_dispatch(), update, norms), |all, call| {
        let grads = grads[call.clone()].to_vec();
        let rows: usize = grads.iter().map(|grad| grad.dims()[0] / (m * n)).sum();
        let steps = steps[call].to_vec();
        let (grads, rejected) = (TensorList::from_tensors(grads), rejected.clone());
        // A backend extension has no optional tensors: where there is no factor, any tensor stands
        // in.
        let by = factor.unwrap_or(&rejected).clone().into_dispatch();
        let (rejected, scaled) = (rejected.into_dispatch(), factor.is_some());
        let first = next;
        next += rows;
        Dispatch::update_momentum(
            grads, all.0, all.1, all.2, rejected, by, steps, first, nesterov, scaled,
        )
    });
    let [momentum, update, norms] = [all.0, all.1, all.2].map(Tensor::from_dispatch);
    let [momentum, update] = [momentum, update].map(|tensor: Tensor<3>| tensor.cast(dtype));
    MomentumUpdate { momentum, update, norms: Some(PartialNorms(norms)) }
}

/// [`StepOps::apply`] for a whole batch, on the path of the parameters. The flags of its matrices
/// in `diverged` start at `first_diverged`.
pub(crate) fn apply(
    policy: KernelPolicy,
    parameters: Vec<Tensor<1>>,
    direction: Tensor<3>,
    rejected: &Tensor<1>,
    (diverged, first_diverged): (&Tensor<1>, usize),
    steps: &[ParameterStep],
) -> Vec<Tensor<1>> {
    let [_, m, n] = direction.dims();
    let path = ComputePath::choose(policy, &direction.device(), parameters[0].dtype().into());
    // No kernel compares signs.
    if path == ComputePath::Portable || steps.iter().any(|step| step.cautious) {
        let diverged = (diverged, first_diverged);
        return portable::apply(parameters, direction, rejected, diverged, steps);
    }
    // As in `update_momentum`.
    let direction = if path == ComputePath::Flex { direction.cast(DType::F32) } else { direction };
    let lengths: Vec<usize> = parameters.iter().map(|parameter| parameter.dims()[0]).collect();
    let (mut next, mut parameters) = (0, parameters.into_iter());
    let apply = |call: Range<usize>| {
        let rows = lengths[call.clone()].iter().sum::<usize>() / (m * n);
        // Moved out of the list: a second reference would make the kernels copy before they write
        // in place.
        let parameters = TensorList::from_tensors(parameters.by_ref().take(call.len()).collect());
        let [rejected, diverged] = [rejected, diverged].map(|flags| flags.clone().into_dispatch());
        let direction = direction.clone().into_dispatch();
        let steps = steps[call].to_vec();
        let first = next;
        next += rows;
        Dispatch::apply(parameters, direction, rejected, diverged, steps, first, first_diverged)
            .into_tensors()
    };
    calls(lengths.len()).flat_map(apply).collect()
}
