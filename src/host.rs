//! The host as a device of Burn: the Flex backend, whose tensors are in the memory of the host.

use burn::tensor::kind::Basic;
use burn::tensor::{AllocationProperty, Bytes, DType, Device, Tensor, TensorData};

/// The device whose tensors are in the memory of the host. `None` in a build without Flex.
pub(crate) fn host() -> Option<Device> {
    #[cfg(feature = "flex")]
    return Some(Device::flex());
    #[cfg(not(feature = "flex"))]
    return None;
}

/// Returns `true` for a device whose tensors are in the memory of the host.
pub(crate) fn is_on_host(device: &Device) -> bool {
    host().is_some_and(|host| host == device.clone().inner())
}

/// The same values in the memory of the host.
///
/// Burn copies the values of a tensor of CubeCL's when their bytes are first used: from a buffer
/// that an operation in place may have changed since, and which the bytes keep to their end. Data
/// that outlives the next operation on its tensor has to go through this function.
pub(crate) fn copied(data: TensorData) -> TensorData {
    if data.bytes().property() != AllocationProperty::Device {
        return data;
    }
    let (bytes, shape, dtype) = data.into_parts();
    TensorData::from_bytes(copy_of(&bytes, dtype), shape, dtype)
}

/// Zeros for elements of a type, in memory with the alignment that they need.
///
/// Burn copies the bytes of a `Vec<u8>`, which may have another one, so that both are there for a
/// moment.
pub(crate) fn zeros(elements: usize, dtype: DType) -> Bytes {
    match dtype.size() {
        2 => Bytes::from_elems(vec![0_u16; elements]),
        4 => Bytes::from_elems(vec![0_u32; elements]),
        8 => Bytes::from_elems(vec![0_u64; elements]),
        size => Bytes::from_elems(vec![0_u8; elements * size]),
    }
}

/// A copy of the bytes of elements of a type, with the alignment of [`zeros`].
pub(crate) fn copy_of(bytes: &[u8], dtype: DType) -> Bytes {
    let mut copy = zeros(bytes.len() / dtype.size(), dtype);
    copy.copy_from_slice(bytes);
    copy
}

/// A tensor on another device. A device that it leaves for the host keeps nothing of it.
pub(crate) fn moved<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    device: &Device,
) -> Tensor<D, K> {
    if !is_on_host(device) || is_on_host(&tensor.device()) {
        return tensor.to_device(device);
    }
    let dtype = tensor.dtype();
    Tensor::from_data(copied(tensor.into_data()), (device, dtype))
}
