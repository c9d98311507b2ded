//! Tensors of Burn's CubeCL backends, as the kernels read and write them.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, StreamId};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use cubecl::std::tensor::into_contiguous as copied;
use distmuon_kernels::Matrices;
use distmuon_kernels::fused::{Batch, MAX_BUFFERS, Rows};

type Float = FloatTensor<CubeBackend>;

/// Panic message where the kernels' checks can't fail: the path was chosen for the type, and the
/// tensors here are contiguous.
pub(super) const VALIDATED: &str =
    "the compute path supports the type, and tensors fill their buffers";

/// Returns `true` if the kernels support this type on this device, and if the device can bind all
/// buffers of a kernel.
pub(in crate::backend) fn serves(device: &CubeDevice, dtype: DType) -> bool {
    let client = device.client();
    let properties = client.properties();
    let usage = TypeUsage::Buffer | TypeUsage::Conversion;
    // WebGPU guarantees eight storage buffers, fewer than the kernels bind.
    properties.hardware.max_bindings as usize >= MAX_BUFFERS
        && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && properties.type_usage(dtype_to_elem_type(dtype)).is_superset(usage)
}

/// Returns `true` if the factors of float32 products are rounded to TF32, by the kernels and by
/// Burn.
pub(in crate::backend) fn has_tf32(device: &CubeDevice) -> bool {
    device.client().properties().supports_type(ElemType::Float(FloatKind::TF32))
}

/// A batch `[k, m, n]` with contiguous rows or columns, copied if it has neither.
pub(in crate::backend) fn matrices(tensor: Float) -> Matrices {
    let view = |tensor: &Float| {
        let strides = tensor.meta.strides();
        Matrices {
            handle: tensor.handle.clone(),
            dtype: dtype_to_elem_type(tensor.dtype),
            shape: tensor.shape().dims(),
            strides: [strides[0], strides[1], strides[2]],
        }
    };
    let matrices = view(&tensor);
    if matrices.has_contiguous_lines() { matrices } else { view(&into_contiguous(tensor)) }
}

/// A contiguous tensor of a buffer, on the device of another one.
pub(in crate::backend) fn tensor(
    like: &Float,
    handle: Handle,
    shape: Shape,
    dtype: DType,
) -> Float {
    Float::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}

/// A contiguous tensor of any values, on the device of another one.
pub(in crate::backend) fn uninitialised(like: &Float, shape: Shape, dtype: DType) -> Float {
    let handle = like.client.empty(shape.num_elements() * dtype.size());
    tensor(like, handle, shape, dtype)
}

/// The elements in order, cast to a type.
pub(in crate::backend) fn contiguous(tensor: Float, dtype: DType) -> Float {
    into_contiguous(cast(tensor, dtype))
}

/// The elements in order in a buffer that no other tensor shares, and that this thread has made.
pub(in crate::backend) fn unshared(tensor: Float) -> Float {
    let tensor = into_contiguous(tensor);
    if is_unshared(&tensor) { tensor } else { copy_of(&tensor) }
}

/// [`unshared`], of a value that outlives a step: a parameter or a state. It is also copied where
/// bytes that Burn has read from it, as for a record of its module, bind the buffer until they are
/// used.
pub(in crate::backend) fn unread(tensor: Float) -> Float {
    let tensor = into_contiguous(tensor);
    if is_unshared(&tensor) && !is_read_later(&tensor) { tensor } else { copy_of(&tensor) }
}

fn is_unshared(tensor: &Float) -> bool {
    // Every thread has a stream. Others wait for the stream that made a buffer, and not for the one
    // that wrote to it last: what a rank got from another is not written to.
    let is_of_this_stream = tensor.handle.stream == StreamId::current();
    tensor.can_mut() && tensor.is_nonoverlapping() && is_of_this_stream
}

fn is_read_later(tensor: &Float) -> bool {
    // Launches bind buffers as well, until the device's thread has taken and submitted them: it is
    // asked to do both. What they fail with is found where their results are read. Submitting comes
    // second, since it may wait for the device.
    let (client, memory) = (&tensor.client, &tensor.handle.memory);
    if memory.is_bound() {
        client.check([]).ok();
    }
    if memory.is_bound() {
        client.flush().ok();
    }
    memory.is_bound()
}

fn copy_of(tensor: &Float) -> Float {
    // Not Burn's `copy`: like every result of its operations, that has gaps between rows on CUDA.
    let dtype = dtype_to_elem_type(tensor.dtype);
    let copy = copied(&tensor.client, tensor.clone().binding(), dtype);
    self::tensor(tensor, copy.handle, tensor.shape(), tensor.dtype)
}

/// The first dimension and the elements of each of its entries.
pub(in crate::backend) fn batch(tensor: &Float) -> Batch {
    let shape = tensor.shape();
    Batch { count: shape[0], elements: shape.num_elements() / shape[0].max(1) }
}

/// A contiguous tensor as `rows` rows of `elements` elements.
pub(in crate::backend) fn part(tensor: &Float, rows: usize, elements: usize) -> Rows {
    Rows { handle: tensor.handle.clone(), count: rows, elements }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::backend::DispatchDevice;
    use burn::tensor::{Device, Int, Tensor};
    use cubecl::server::BufferBinding;

    use super::*;
    use crate::backend::cubecl::primitive;
    use crate::skipped_tests::excused;

    /// A tensor of the default device, if that is one of CubeCL's.
    fn made() -> Option<Tensor<1>> {
        let device = Device::default();
        match device.as_dispatch() {
            DispatchDevice::Cube(_) => Some(Tensor::<1, Int>::arange(0..64, &device).float()),
            _ => None,
        }
    }

    /// Returns `true` if a function returns the tensor's own buffer.
    fn keeps(buffer: fn(Float) -> Float, tensor: Tensor<1>) -> bool {
        let id = |tensor: &Float| {
            let BufferBinding { memory, .. } = tensor.handle.clone().binding();
            memory.id()
        };
        let tensor = primitive(tensor).expect("a tensor of CubeCL");
        let before = id(&tensor);
        id(&buffer(tensor)) == before
    }

    #[test]
    fn buffers_are_kept_where_nothing_else_reads_them() {
        let Some(tensor) = made() else {
            excused("only CubeCL's devices have buffers that are kept or copied");
            return;
        };
        for buffer in [unshared, unread] {
            assert!(keeps(buffer, tensor.clone() + 1.0));
            let shared = tensor.clone() + 1.0;
            assert!(!keeps(buffer, shared.clone()), "a second tensor reads it");
            drop(shared);
            let other = tensor.clone();
            let foreign = thread::spawn(move || other + 1.0).join().unwrap();
            assert!(!keeps(buffer, foreign), "another thread has made it");
        }
        let read = tensor + 1.0;
        let data = read.clone().into_data();
        assert!(!keeps(unread, read), "its bytes are not read yet");
        drop(data);
    }
}
