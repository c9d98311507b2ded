//! Rounding to half precision: the other neighbour, at random, and without loss.
//!
//! Burn does not reinterpret the bits of a tensor, so neighbours are found by arithmetic and
//! conversions. Every sum and product below is exact, or far from the middle of two neighbours.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

use crate::backend::rounded;

/// Digits of a significand in bfloat16 and in float16, with the hidden one.
const BF16_DIGITS: i32 = 8;
const F16_DIGITS: i32 = 11;
/// The smallest positive number of float16. For bfloat16 it is 9.2e-41, below the numbers that
/// devices compute with.
const F16_SMALLEST: f64 = 1.0 / (1 << 24) as f64;
/// The largest prime below 2^15, so that no product of two remainders overflows an `i32`.
const PRIME: u64 = 32_749;
/// Odd constants below 2^14, which mix the digits of an index.
const MIX: [i32; 3] = [12_289, 15_733, 9_973];

/// The neighbour of half-precision values in the direction of others, both in float32. Where both
/// are equal, that value.
pub(super) fn neighbour(nearest: &Tensor<1>, toward: &Tensor<1>, half: DType) -> Tensor<1> {
    let (digits, smallest) = match half {
        DType::F16 => (F16_DIGITS, F16_SMALLEST),
        _ => (BF16_DIGITS, 0.0),
    };
    // Between one half of the distance to the neighbour and all of it, so that the sum rounds to
    // the neighbour: below a power of two, the distance is half of that above it.
    let relative = 2f64.powi(-digits) * (1.0 + 1.0 / 64.0);
    let part = nearest.clone().abs().mul_scalar(relative).clamp_min(0.75 * smallest);
    let moved = nearest.clone() + part * (toward.clone() - nearest.clone()).sign();
    rounded(moved, half).cast(DType::F32)
}

/// The origin of values, which decides how they are rounded at random.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    /// The parameter's name.
    pub parameter: &'a str,
    /// Index of the first value in the parameter.
    pub element: usize,
    /// Steps that the parameter has taken.
    pub step: usize,
}

impl Origin<'_> {
    /// Two remainders modulo [`PRIME`], from a mixture of seed, parameter and step (`splitmix64`,
    /// Steele et al., "Fast splittable pseudorandom number generators", 2014).
    fn keys(self, seed: u64) -> [i32; 2] {
        let mut z = seed;
        let parameter = crc32fast::hash(self.parameter.as_bytes()).into();
        for part in [parameter, self.step as u64] {
            // SplitMix64 (Steele, Lea and Flood, 2014), whose constants these are.
            z = (z ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^= z >> 31;
        }
        [z % PRIME, (z >> 32) % PRIME].map(|key| key as i32)
    }

    /// Numbers in `(0, 1)`, one for each of `count` values: the same for an element, wherever its
    /// parameter is cut.
    fn uniform(self, seed: u64, count: usize, device: &Device) -> Tensor<1> {
        let [first, last] = self.keys(seed);
        // Two digits of 15 bits of the index, whose upper bits do not count: with a negative start,
        // no index leaves the range of 32 bits.
        let start = (self.element % (1 << 30)) as i64 - (1 << 30);
        let index = Tensor::<1, Int>::arange(start..start + count as i64, (device, DType::I32));
        let low = index.clone().bitwise_and_scalar(0x7FFF);
        let high = index.bitwise_right_shift_scalar(15).bitwise_and_scalar(0x7FFF);
        let prime = PRIME as i32;
        let mixed = (low.clone().mul_scalar(MIX[0]).add_scalar(first)).remainder_scalar(prime);
        let mixed = mixed.clone() * mixed + high.mul_scalar(MIX[1]);
        let mixed = mixed.remainder_scalar(prime);
        // Linear at the end, since squares take only half of the remainders.
        let mixed = mixed.clone() * mixed + low;
        let mixed = mixed.remainder_scalar(prime).mul_scalar(MIX[2]).add_scalar(last);
        // Not the default type of the device, which may be half precision.
        let numbers = mixed.remainder_scalar(prime).cast(FloatDType::F32);
        numbers.add_scalar(0.5).div_scalar(PRIME as f64)
    }
}

/// Rounds float32 values to one of both neighbours in half precision. The mean of many roundings is
/// the value, up to 2^-15 of the distance between the neighbours. Values that are half precision
/// stay.
pub(super) fn stochastic(x: Tensor<1>, half: DType, seed: u64, origin: Origin<'_>) -> Tensor<1> {
    let nearest = rounded(x.clone(), half).cast(DType::F32);
    let other = neighbour(&nearest, &x, half);
    let gap = (other.clone() - nearest.clone()).abs();
    let distance = (x - nearest.clone()).abs();
    let uniform = origin.uniform(seed, gap.dims()[0], &gap.device());
    // An infinite neighbour is never chosen: its distance is infinite.
    // With the probability `distance / gap`, so that the mean is `x`.
    let moves = (uniform * gap).lower(distance);
    nearest.mask_where(moves, other).cast(half)
}

/// The digits of float32 that bfloat16 does not have.
const LOW_DIGITS: f64 = 65_536.0;

/// Splits float32 values into the nearest bfloat16 and an integer of 16 bits in float32: the
/// difference, in 65536ths of the distance to the neighbour in its direction. Ties round up, so
/// that the integer is in `-32768..=32767`. [`joined`] is the exact reverse for magnitudes above
/// 1e-30; smaller ones may lose digits.
pub(super) fn split(x: Tensor<1>) -> (Tensor<1>, Tensor<1>) {
    let nearest = rounded(x.clone(), DType::BF16).cast(DType::F32);
    let other = neighbour(&nearest, &x, DType::BF16);
    // A tie has two nearest values, of which devices choose either: the upper one is taken here, on
    // all of them.
    let is_tie = (other.clone() - x.clone()).equal(x.clone() - nearest.clone());
    let rounds_up = is_tie.bool_and(other.clone().greater(nearest.clone()));
    let high = nearest.clone().mask_where(rounds_up.clone(), other.clone());
    let other = other.mask_where(rounds_up, nearest);
    let gap = (other - high.clone()).abs().clamp_min(f32::MIN_POSITIVE);
    // Rounded, since not every device divides exactly.
    let low = ((x - high.clone()) / gap).mul_scalar(LOW_DIGITS).round();
    (high.cast(DType::BF16), low)
}

/// The float32 values that [`split`] has split.
pub(super) fn joined(high: Tensor<1>, low: Tensor<1>) -> Tensor<1> {
    let high = high.cast(DType::F32);
    let toward = high.clone() + low.clone().sign() * high.clone().abs();
    let gap = (neighbour(&high, &toward, DType::BF16) - high.clone()).abs();
    high + low.div_scalar(LOW_DIGITS) * gap
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::checks::rounds_to;
    use crate::skipped_tests::lacks;

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), (&Device::default(), DType::F32))
    }

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        tensor.cast(DType::F32).into_data().iter::<f32>().collect()
    }

    /// Returns `true` if the default device computes with a type, and reports it otherwise.
    fn has(half: DType) -> bool {
        let device = Device::default();
        let has = device.supports_dtype(half) && rounds_to(&device, half.into());
        if !has {
            lacks(half.name());
        }
        has
    }

    /// Values on both sides of powers of two, and in every part of their interval.
    fn samples() -> Vec<f32> {
        let exponents = (-40..40).step_by(3);
        let significands = [0x00_0000, 0x00_0001, 0x00_7FFF, 0x00_8000, 0x00_8001, 0x01_8000];
        let significands = significands.into_iter().chain([0x7F_7FFF, 0x7F_8000, 0x7F_FFFF]);
        let bits = significands.flat_map(|s| {
            exponents.clone().map(move |exponent| (((exponent + 127) as u32) << 23) | s)
        });
        bits.map(f32::from_bits).flat_map(|x| [x, -x]).chain([0.0]).collect()
    }

    #[test]
    fn numbers_of_elements_above_a_billion_do_not_depend_on_the_cut() {
        let device = Device::default();
        let numbers = |element: usize, count: usize| {
            let origin = Origin { parameter: "weight", element, step: 11 };
            values(origin.uniform(7, count, &device))
        };
        // Within these ranges, the index leaves 30 bits, and then 31.
        for middle in [1 << 30, 1 << 31] {
            let all = numbers(middle - 5, 10);
            assert_eq!(all, [numbers(middle - 5, 5), numbers(middle, 5)].concat());
            assert!(all.iter().all(|number| (0.0..1.0).contains(number)), "{all:?}");
        }
    }

    #[test]
    fn split_values_are_joined_exactly() {
        if !has(DType::BF16) {
            return;
        }
        let samples = samples();
        let (high, low) = split(tensor(&samples));
        for (x, low) in samples.iter().zip(values(low.clone())) {
            assert!(low.fract() == 0.0 && (-32768.0..32768.0).contains(&low), "{x:e}: {low}");
        }
        for (x, high) in samples.iter().zip(values(high.clone())) {
            let other = f64::from(bf16::from_f32(*x)) - f64::from(*x);
            assert_eq!((f64::from(high) - f64::from(*x)).abs(), other.abs(), "{x:e}");
        }
        let back = values(joined(high, low));
        for (x, back) in samples.iter().zip(back) {
            assert_eq!(x.to_bits() & 0x7FFF_FFFF, back.to_bits() & 0x7FFF_FFFF, "{x:e}, {back:e}");
            assert_eq!(*x, back);
        }
    }

    #[test]
    fn random_rounding_takes_both_neighbours_with_the_right_frequency() {
        for (half, gap) in [(DType::BF16, 2f32.powi(-7)), (DType::F16, 2f32.powi(-10))] {
            if !has(half) {
                continue;
            }
            for share in [0.0, 0.25, 0.9] {
                let x = 1.5 + share * gap;
                let count = 40_000;
                let all = tensor(&vec![x; count]);
                let rounded = values(stochastic(
                    all,
                    half,
                    7,
                    Origin { parameter: "weight", element: 3, step: 11 },
                ));
                let upper = rounded.iter().filter(|y| **y == 1.5 + gap).count();
                assert_eq!(upper + rounded.iter().filter(|y| **y == 1.5).count(), count);
                let frequency = upper as f64 / count as f64;
                assert!((frequency - f64::from(share)).abs() < 0.01, "{half:?}: {frequency}");
            }
        }
    }

    #[test]
    fn random_rounding_depends_on_seed_parameter_and_step_and_not_on_cuts() {
        if !has(DType::BF16) {
            return;
        }
        let x: Vec<f32> = (0..3000).map(|i| 1.0 + i as f32 * 1.7e-5).collect();
        let rounded = |range: std::ops::Range<usize>, seed, path: &str, step| {
            let origin = Origin { parameter: path, element: range.start, step };
            values(stochastic(tensor(&x[range]), DType::BF16, seed, origin))
        };
        let whole = rounded(0..3000, 1, "a", 5);
        assert_eq!(rounded(0..3000, 1, "a", 5), whole);
        assert_eq!([rounded(0..777, 1, "a", 5), rounded(777..3000, 1, "a", 5)].concat(), whole);
        for (seed, path, step) in [(2, "a", 5), (1, "b", 5), (1, "a", 6)] {
            let other = rounded(0..3000, seed, path, step);
            let equal = other.iter().zip(&whole).filter(|(a, b)| a == b).count();
            assert!((1000..2900).contains(&equal), "{seed} {path} {step}: {equal}");
        }
    }

    /// Neighbours from the bits.
    fn expected(x: f32, half: DType) -> (f32, f32) {
        let of_bits = |bits: u16| match half {
            DType::F16 => f16::from_bits(bits).to_f32(),
            _ => bf16::from_bits(bits).to_f32(),
        };
        let bits = match half {
            DType::F16 => f16::from_f32(x).to_bits(),
            _ => bf16::from_f32(x).to_bits(),
        };
        let nearest = of_bits(bits);
        let other = match () {
            () if nearest == x => nearest,
            () if (x > nearest) == (x > 0.0) => of_bits(bits + 1),
            () => of_bits(bits - 1),
        };
        (nearest, other)
    }

    proptest! {
        #[test]
        fn neighbours_are_those_of_the_bits(significand in -2.0f32..2.0, exponent in -20i32..14) {
            for half in [DType::BF16, DType::F16] {
                if !has(half) {
                    continue;
                }
                let x = significand * 2f32.powi(exponent);
                // Zero has neighbours of its own.
                prop_assume!(x.abs() > 1e-7);
                let (nearest, other) = expected(x, half);
                let found = values(neighbour(&tensor(&[nearest]), &tensor(&[x]), half));
                prop_assert_eq!(found[0], other);
            }
        }
    }
}
