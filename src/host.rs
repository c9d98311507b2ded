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

/// Zeros for bytes of elements of a type, in memory with the alignment that they need.
///
/// Burn copies the bytes of a `Vec<u8>`, which may have another one, so that both are there for a
/// moment.
pub(crate) fn zeros(bytes: usize, dtype: DType) -> Bytes {
    // Several quantized values may share a byte, and have their scales behind them.
    let size = if matches!(dtype, DType::QFloat(_)) { 1 } else { dtype.size() };
    match size {
        2 if bytes.is_multiple_of(2) => Bytes::from_elems(vec![0_u16; bytes / 2]),
        4 if bytes.is_multiple_of(4) => Bytes::from_elems(vec![0_u32; bytes / 4]),
        8 if bytes.is_multiple_of(8) => Bytes::from_elems(vec![0_u64; bytes / 8]),
        _ => Bytes::from_bytes_vec(vec![0; bytes]),
    }
}

/// A copy of the bytes of elements of a type, with the alignment of [`zeros`].
pub(crate) fn copy_of(bytes: &[u8], dtype: DType) -> Bytes {
    let mut copy = zeros(bytes.len(), dtype);
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

#[cfg(test)]
mod tests {
    use burn::tensor::quantization::{QuantScheme, QuantStore, QuantValue};

    use super::*;

    #[test]
    fn zeros_of_any_type_have_all_bytes() {
        let quantized = QuantScheme::default().with_value(QuantValue::Q4S);
        let quantized = [QuantStore::Native, QuantStore::PackedU32(0)]
            .map(|store| DType::QFloat(quantized.with_store(store)));
        let types = [DType::U8, DType::BF16, DType::F32, DType::F64].into_iter().chain(quantized);
        for dtype in types {
            for bytes in [0, 7, 16] {
                assert_eq!(zeros(bytes, dtype).to_vec(), vec![0; bytes], "{dtype:?}");
            }
        }
    }
}
