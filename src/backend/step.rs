//! The elementwise operations of a Muon step, on a compute path.

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, Shape, Tensor};

use super::compute_path::{ComputePath, KernelPolicy};
use super::ops::{
    MatrixFlags, MomentumStep, MomentumUpdate, ParameterStep, PartialNorms, SkipCount, StepOps,
};
use super::portable;
use super::tensor_list::TensorList;
use super::values::Values;

/// The tensors in other shapes, one for each, with their elements in the same order.
pub(crate) fn reshaped(
    tensors: Vec<FloatTensor<Dispatch>>,
    shapes: Vec<Shape>,
) -> Vec<FloatTensor<Dispatch>> {
    let Some(first) = tensors.first() else {
        return tensors; // No backend is named by an empty list.
    };
    if !ComputePath::has_operations(&first.device()) {
        let each = tensors.into_iter().zip(shapes);
        return each.map(|(tensor, shape)| Dispatch::float_reshape(tensor, shape)).collect();
    }
    Dispatch::reshape_all(TensorList(tensors), shapes).0
}

/// [`StepOps::update_momentum`] for a whole batch, on the path of the momentum, whose type may have
/// more digits than the gradients' type. There is one gradient and one step for each parameter of
/// the batch.
pub(crate) fn update_momentum(
    policy: KernelPolicy,
    grads: Vec<Tensor<1>>,
    momentum: Tensor<3>,
    rejected: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    steps: &[MomentumStep],
    nesterov: bool,
) -> MomentumUpdate {
    let dtype = momentum.dtype();
    let path = ComputePath::choose(policy, &momentum.device(), dtype.into());
    let grads = match path {
        // The kernel reads gradients in their type: no launch for each of them.
        ComputePath::CubeCl { .. } => grads,
        _ => grads.into_iter().map(|grad| grad.cast(dtype)).collect(),
    };
    if path == ComputePath::Portable {
        return portable::update_momentum(grads, momentum, rejected, factor, steps, nesterov);
    }
    // Flex computes in float32: converted once for the batch, not in every call.
    let computed_in = if path == ComputePath::Flex { DType::F32 } else { dtype };
    let momentum = momentum.cast(computed_in);
    // A backend extension has no optional tensors: where there is no factor, any tensor stands in.
    let by = factor.unwrap_or(rejected);
    let [rejected, by] = [rejected, by].map(|tensor| tensor.clone().into_dispatch());
    let (momentum, update, norms) = Dispatch::update_momentum(
        TensorList::from_tensors(grads),
        momentum.into_dispatch(),
        rejected,
        by,
        steps.to_vec(),
        nesterov,
        factor.is_some(),
    );
    let [momentum, update, norms] = [momentum, update, norms].map(Tensor::from_dispatch);
    let [momentum, update] = [momentum, update].map(|tensor: Tensor<3>| tensor.cast(dtype));
    MomentumUpdate { momentum, update, norms: Some(PartialNorms(norms)) }
}

/// [`StepOps::apply`] for a whole batch, on the path of the parameters.
pub(crate) fn apply(
    policy: KernelPolicy,
    parameters: Values,
    direction: Tensor<3>,
    rejected: &Tensor<1>,
    diverged: MatrixFlags<'_>,
    steps: &[ParameterStep],
) -> Values {
    let path = ComputePath::choose(policy, &direction.device(), parameters.dtype().into());
    // No kernel compares signs.
    if path == ComputePath::Portable || steps.iter().any(|step| step.cautious) {
        let parameters = parameters.into_each();
        return Values::Each(portable::apply(parameters, direction, rejected, diverged, steps));
    }
    // As in `update_momentum`.
    let direction = if path == ComputePath::Flex { direction.cast(DType::F32) } else { direction };
    let [rejected, flags] = [rejected, diverged.flags].map(|flags| flags.clone().into_dispatch());
    let (direction, steps) = (direction.into_dispatch(), steps.to_vec());
    let apply = |list, places| {
        (Dispatch::apply(list, places, direction, rejected, flags, steps, diverged.first), ())
    };
    parameters.through(apply).0
}

/// [`apply`] for one parameter of one matrix, which stays as it is if its `flag` is set. Also
/// counts that: in one launch, where there is a kernel for the step.
pub(crate) fn apply_and_count(
    policy: KernelPolicy,
    parameter: Values,
    direction: Tensor<3>,
    flag: &Tensor<1>,
    step: ParameterStep,
    skipped: Tensor<1>,
) -> (Values, SkipCount) {
    let path = ComputePath::choose(policy, &direction.device(), parameter.dtype().into());
    let has_kernel = matches!(path, ComputePath::CubeCl { .. }) && !step.cautious;
    let one = match parameter {
        Values::Each(mut values) if has_kernel && values.len() == 1 => values.swap_remove(0),
        parameter => {
            let diverged = MatrixFlags { flags: flag, first: 0 };
            let steps = [ParameterStep { flag: 0, ..step }];
            let values = apply(policy, parameter, direction, flag, diverged, &steps);
            return (values, SkipCount { skipped: skipped + flag.clone(), zero: None });
        }
    };
    let [parameter, flag, skipped] = [one, flag.clone(), skipped].map(Tensor::into_dispatch);
    let factors = [step.decay, step.lr];
    let (values, skipped, zero) =
        Dispatch::apply_and_count(parameter, direction.into_dispatch(), flag, skipped, factors);
    let [values, skipped, zero] = [values, skipped, zero].map(Tensor::from_dispatch);
    (Values::Each(vec![values]), SkipCount { skipped, zero: Some(zero) })
}

/// [`StepOps::restore`] of master weights, on the path of the parameters.
pub(crate) fn restore(
    masters: Tensor<1>,
    parameters: Vec<Tensor<1>>,
    firsts: &[usize],
) -> Tensor<1> {
    let dtype = parameters[0].dtype().into();
    match ComputePath::choose(KernelPolicy::Auto, &masters.device(), dtype) {
        ComputePath::Portable => {
            let rounded = rounded(masters.clone(), parameters[0].dtype());
            portable::restore(masters, rounded, parameters, firsts)
        }
        ComputePath::Flex | ComputePath::CubeCl { .. } => {
            let parameters = TensorList::from_tensors(parameters);
            let masters = masters.into_dispatch();
            Tensor::from_dispatch(Dispatch::restore(masters, parameters, firsts.to_vec()))
        }
    }
}

/// [`StepOps::round_parts`], on any device.
pub(crate) fn round_parts(
    all: Tensor<1>,
    places: Vec<Range<usize>>,
    dtype: FloatDType,
) -> Vec<Tensor<1>> {
    if !ComputePath::has_operations(all.device().as_dispatch()) {
        return Values::Joined { all: all.cast(dtype), places }.into_each();
    }
    Dispatch::round_parts(all.into_dispatch(), places, dtype).into_tensors()
}

/// Rounds to half precision, in memory: in one kernel, Burn 0.22.1 converts to half precision and
/// back without rounding, as seen on a Vulkan device. A reversed order is a kernel by itself.
pub(crate) fn rounded(x: Tensor<1>, half: DType) -> Tensor<1> {
    match ComputePath::choose(KernelPolicy::Auto, &x.device(), FloatDType::F32) {
        ComputePath::Flex => x.cast(half),
        ComputePath::CubeCl { .. } | ComputePath::Portable => x.cast(half).flip([0]).flip([0]),
    }
}
