//! Values that have to be more precise than a type.

use burn::tensor::{DType, Tensor};

/// The type for values that have to be more precise than parameters of a type, such as learning
/// rates: float64 for float64, and float32 for all others. In float32, `1 - lr decay` moves in
/// steps of 6e-8, which is more than the precision that float64 is chosen for.
pub(crate) fn precise_dtype(parameter: DType) -> DType {
    if parameter == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A gradient times a factor `[1]`, rounded once: in half precision, the factor itself would lose
/// digits or be zero.
pub(crate) fn scaled<const D: usize>(grad: Tensor<D>, factor: Tensor<1>) -> Tensor<D> {
    let dtype = grad.dtype();
    let grad = wide(grad);
    // Operands have to be of one type, and the factor may be of another than the gradient.
    let factor = factor.cast(grad.dtype()).reshape([1; D]);
    (grad * factor).cast(dtype)
}

/// The tensor in [`precise_dtype`].
pub(super) fn wide<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let dtype = precise_dtype(tensor.dtype());
    tensor.cast(dtype)
}
