//! The finite check of a step: flags of rows with values that are not finite, on the device.
//! [`FiniteMask`](super::FiniteMask) then leaves these rows as they are.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::compute_path::{ComputePath, KernelPolicy};
use super::ops::{FlaggedRows, StepOps};
use super::portable;
use super::tensor_list::TensorList;

/// Sets the flags of rows with an element that is not finite, or larger than `largest` in
/// magnitude, to 1.
pub(crate) fn reject<const D: usize>(
    policy: KernelPolicy,
    flags: Tensor<1>,
    tensors: &[Tensor<D>],
    rows: &[FlaggedRows],
    largest: f64,
) -> Tensor<1> {
    let Some(first) = tensors.first() else { return flags };
    match ComputePath::choose(policy, &first.device(), first.dtype().into()) {
        ComputePath::Portable => {
            let each = tensors.iter().zip(rows);
            each.fold(flags, |flags, (tensor, rows)| {
                portable::reject(flags, tensor, *rows, largest)
            })
        }
        ComputePath::Flex | ComputePath::CubeCl { .. } => {
            let tensors = TensorList::from_tensors(tensors.to_vec());
            // A larger limit would be infinite in float32, and reject nothing.
            let largest = largest.min(f32::MAX.into()) as f32;
            let flags = Dispatch::reject(flags.into_dispatch(), tensors, rows.to_vec(), largest);
            Tensor::from_dispatch(flags)
        }
    }
}
