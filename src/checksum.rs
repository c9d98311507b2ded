//! A checksum of the bits of tensors, by which ranks notice that their values differ.

use burn::tensor::Tensor;

/// Bytes of a word, and the number of words that are added at once, each to a sum of its own: a
/// processor multiplies several at a time.
const WORD: usize = size_of::<u64>();
const LANES: usize = 4;

/// 2^64 divided by the golden ratio, as in Knuth's multiplicative hashing (The Art of Computer
/// Programming, vol. 3, 6.4). Odd, so that a product with it has an inverse.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Adds a word to a sum. Both words that differ and sums that differ give sums that differ.
///
/// A product spreads a bit to higher ones only, and the highest one not at all: its half is added
/// to the lower ones before another product.
fn added(sum: u64, word: u64) -> u64 {
    let product = (sum ^ word).wrapping_mul(FACTOR);
    (product ^ product >> 32).wrapping_mul(FACTOR).rotate_left(29)
}

/// The checksum of bytes, in 64 bits. One word that differs always changes it.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let mut sums = [0; LANES];
    let mut blocks = bytes.chunks_exact(LANES * WORD);
    for block in &mut blocks {
        for (sum, word) in sums.iter_mut().zip(block.chunks_exact(WORD)) {
            *sum = added(*sum, u64::from_le_bytes(word.try_into().expect("a whole word")));
        }
    }
    let rest = blocks.remainder().chunks(WORD).map(|bytes| {
        let mut word = [0; WORD];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    rest.chain(sums).chain([bytes.len() as u64]).fold(0, added)
}

/// The checksum of the bits of a tensor, on the host: of any NaN, and of the sign of zeros.
pub(crate) fn of_bits<const D: usize>(tensor: Tensor<D>) -> u64 {
    checksum(tensor.into_data().as_bytes())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    #[test]
    fn every_bit_changes_the_checksum() {
        for length in [0, 1, 7, 8, 31, 32, 33, 100] {
            let bytes: Vec<u8> = (0..length).map(|index| (index * 37 % 251) as u8).collect();
            let flipped = (0..8 * length).map(|bit| {
                let mut bytes = bytes.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                checksum(&bytes)
            });
            let sums: HashSet<u64> = flipped.chain([checksum(&bytes)]).collect();
            assert_eq!(sums.len(), 8 * length + 1, "{length} bytes");
        }
    }

    #[test]
    fn the_order_and_the_number_of_bytes_change_the_checksum() {
        let zeros: HashSet<u64> = (0..100).map(|length| checksum(&vec![0; length])).collect();
        assert_eq!(zeros.len(), 100);
        let mut bytes: Vec<u8> = (0..64).collect();
        let before = checksum(&bytes);
        bytes.rotate_left(32); // whole blocks
        assert_ne!(checksum(&bytes), before);
    }

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
