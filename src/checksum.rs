//! A checksum of the bits of tensors, by which ranks notice that their values differ.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use xxhash_rust::xxh3::xxh3_64;

/// The checksum of the bits of a tensor, on the host: of any NaN, and of the sign of zeros.
pub(crate) fn of_bits<const D: usize>(tensor: Tensor<D>) -> u64 {
    of_data(&tensor.into_data())
}

/// The checksum of the bits of data.
pub(crate) fn of_data(data: &TensorData) -> u64 {
    xxh3_64(data.as_bytes())
}

/// The checksums of the bits of ranges of elements of a tensor, which is read once.
pub(crate) fn of_parts(tensor: Tensor<1>, parts: impl Iterator<Item = Range<usize>>) -> Vec<u64> {
    let size = tensor.dtype().size();
    let data = tensor.into_data();
    let bytes = data.as_bytes();
    parts.map(|part| xxh3_64(&bytes[part.start * size..part.end * size])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    #[test]
    fn zeros_of_two_signs_and_two_nans_have_other_checksums() {
        let of = |bits: u32| {
            let data = TensorData::from([f32::from_bits(bits)]);
            of_bits(Tensor::<1>::from_data(data, (&Device::default(), DType::F32)))
        };
        let all = [0, 1 << 31, f32::NAN.to_bits(), f32::NAN.to_bits() + 1];
        assert_eq!(all.map(of).into_iter().collect::<HashSet<_>>().len(), all.len());
        assert_eq!(of(f32::NAN.to_bits()), of(f32::NAN.to_bits()));
    }
}
