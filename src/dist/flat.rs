//! Flat tensors, cut and joined without touching empty ones, which not every backend takes.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};

/// The elements in a range.
pub fn part(tensor: &Tensor<1>, range: Range<usize>) -> Tensor<1> {
    match range.len() {
        0 => empty(tensor.dtype(), &tensor.device()),
        length if length == tensor.dims()[0] => tensor.clone(),
        _ => tensor.clone().slice([range]),
    }
}

/// The tensors of a type one after the other, on a device; there may be none.
pub fn join(tensors: Vec<Tensor<1>>, dtype: DType, device: &Device) -> Tensor<1> {
    let filled = tensors.into_iter().filter(|tensor| tensor.dims() != [0]);
    let mut parts: Vec<Tensor<1>> = filled.map(|tensor| tensor.to_device(device)).collect();
    match parts.len() {
        0 => empty(dtype, device),
        1 => parts.swap_remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

/// The numbers of some tensors one after the other, in float32, and a zero.
pub fn with_zero(mut tensors: Vec<Tensor<1>>, device: &Device) -> Tensor<1> {
    tensors.push(Tensor::zeros([1], (device, DType::F32)));
    join(tensors, DType::F32, device)
}

/// No elements.
pub fn empty(dtype: DType, device: &Device) -> Tensor<1> {
    Tensor::empty([0], (device, dtype))
}
