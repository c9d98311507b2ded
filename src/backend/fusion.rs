//! Boundaries between kernels that Burn fuses.

use burn::tensor::{FloatDType, Tensor};

use super::path::{ComputePath, KernelPolicy};

/// The same tensor, in memory: a result that the kernels of later operations read, instead of
/// computing it again in between. Burn fuses no operation with a reversal of the order, and two of
/// them are the tensor itself.
///
/// Burn 0.22.1 fuses more than it computes rightly, as seen on a Vulkan device: a conversion to
/// half precision and back does not round, and a tensor `[1]` may be wrong where it is computed in
/// one kernel with longer ones.
pub(crate) fn in_memory(tensor: Tensor<1>) -> Tensor<1> {
    let is_flex = || {
        let path = ComputePath::choose(KernelPolicy::Auto, &tensor.device(), FloatDType::F32);
        path == ComputePath::Flex
    };
    if !cfg!(feature = "fusion") || is_flex() {
        return tensor;
    }
    tensor.flip([0]).flip([0])
}
