//! Tensors of Burn's CubeCL backends as the kernels take them.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::features::TypeUsage;
use cubecl::server::Handle;
use distmuon_kernels::Matrices;
use distmuon_kernels::fused::Batch;

type Float = FloatTensor<CubeBackend>;

/// Fails to compile where Burn fuses and this crate does not: turn on its feature `fusion`.
#[cfg(not(feature = "fusion"))]
const _: fn(burn_cubecl::Cube) -> CubeBackend = |backend| backend;

/// Whether the kernels take this type on this device. CubeCL's CPU runtime, whose units are threads
/// that wait for each other, is left to Burn.
pub(crate) fn serves(device: &CubeDevice, dtype: DType) -> bool {
    let client = device.client();
    let properties = client.properties();
    let usage = TypeUsage::Buffer | TypeUsage::Conversion;
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && properties.hardware.plane_size_max > 1
        && properties.type_usage(dtype_to_elem_type(dtype)).is_superset(usage)
}

/// A batch `[k, m, n]` with contiguous rows or columns, copied if it has neither.
pub(crate) fn matrices(tensor: Float) -> Matrices {
    let of = |tensor: &Float| {
        let strides = tensor.meta.strides();
        Matrices {
            handle: tensor.handle.clone(),
            dtype: dtype_to_elem_type(tensor.dtype),
            shape: tensor.shape().dims(),
            strides: [strides[0], strides[1], strides[2]],
        }
    };
    let matrices = of(&tensor);
    if matrices.has_contiguous_lines() { matrices } else { of(&into_contiguous(tensor)) }
}

/// A contiguous tensor of a buffer, on the device of another one.
pub(crate) fn tensor(like: &Float, handle: Handle, shape: Shape, dtype: DType) -> Float {
    Float::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}

/// The elements in order, in another type if asked to.
pub(crate) fn contiguous(tensor: Float, dtype: DType) -> Float {
    into_contiguous(cast(tensor, dtype))
}

/// The elements in order in a buffer that nobody else reads.
pub(crate) fn unshared(tensor: Float) -> Float {
    let tensor = into_contiguous(tensor);
    if tensor.can_mut() && tensor.is_nonoverlapping() { tensor } else { tensor.copy() }
}

/// The first dimension and the elements of each of its entries.
pub(crate) fn batch(tensor: &Float) -> Batch {
    let shape = tensor.shape();
    Batch { count: shape[0], elements: shape.num_elements() / shape[0].max(1) }
}
