//! Burn's primitives where it does not fuse operations: the device's tensors.

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{Cube, CubeBackend};

/// Fails to compile where Burn fuses and this crate does not: turn on its feature `fusion`.
const _: fn(Cube) -> CubeBackend = |backend| backend;

/// Returns the tensors: their operations are queued on the device when they are called.
pub(in crate::backend::cubecl) fn primitives(tensors: Vec<CubeTensor>) -> Option<Vec<CubeTensor>> {
    Some(tensors)
}

/// Returns the primitive of a tensor. `None` if its device is not one of CubeCL.
pub(crate) fn primitive<const D: usize>(tensor: Tensor<D>) -> Option<CubeTensor> {
    tensor.try_into_primitive::<Cube>().ok()
}

/// Returns Burn's tensor of a CubeCL tensor: the inverse of [`primitive`].
pub(crate) fn from_primitive(tensor: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<Cube>(tensor)
}
