//! Products in TF32 on Flex, for tests without a device that has matrix units for TF32.
//!
//! The feature `simulated-tf32` is for the tests' package. With it, and with
//! `DISTMUON_TEST_TF32=1`, iterations in float32 on Flex round the factors of every product, and
//! `ComputePath::rounds_factors` says so.

use std::env;
use std::sync::LazyLock;

use burn::backend::{Dispatch, DispatchDevice, tensor::FloatTensor};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// The bits of float32's fraction that TF32 does not have.
const DROPPED_BITS: u32 = 23 - 10;

/// Returns `true` if factors of products of a type on a device are rounded in simulation.
pub(super) fn is_simulated(device: &Device, dtype: DType) -> bool {
    static SIMULATED: LazyLock<bool> =
        LazyLock::new(|| env::var("DISTMUON_TEST_TF32").is_ok_and(|value| value == "1"));
    dtype == DType::F32 && matches!(device.as_dispatch(), DispatchDevice::Flex(_)) && *SIMULATED
}

/// The nearest values of TF32, and of two equally near ones the larger in magnitude: the rounding
/// of PTX's `cvt.rna.tf32`, which CubeCL uses.
pub(super) fn rounded(x: FloatTensor<Dispatch>) -> FloatTensor<Dispatch> {
    let x = Tensor::<3>::from_dispatch(x);
    let (shape, device) = (x.dims(), x.device());
    let values: Vec<f32> = x
        .into_data()
        .try_into_vec::<f32>()
        .expect("the simulation is of float32")
        .into_iter()
        .map(to_tf32)
        .collect();
    let rounded = Tensor::<3>::from_data(TensorData::new(values, shape), (&device, DType::F32));
    rounded.into_dispatch()
}

fn to_tf32(x: f32) -> f32 {
    // The sum below would carry the bits of a NaN into other numbers.
    if !x.is_finite() {
        return x;
    }
    let half = 1 << (DROPPED_BITS - 1);
    // A carry into the exponent is right: the next larger number has the next exponent.
    f32::from_bits((x.to_bits() + half) & (u32::MAX << DROPPED_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_to_ten_bits_and_halves_away_from_zero() {
        let ulp = 2f32.powi(-10);
        for (x, expected) in [
            (0.0, 0.0),
            (1.0, 1.0),
            (1.0 + 0.49 * ulp, 1.0),
            (1.0 + 0.5 * ulp, 1.0 + ulp),
            (1.0 + 1.5 * ulp, 1.0 + 2.0 * ulp),
            (2.0 - 0.1 * ulp, 2.0),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!([to_tf32(x), to_tf32(-x)], [expected, -expected], "{x}");
        }
        assert!(to_tf32(f32::NAN).is_nan());
    }
}
