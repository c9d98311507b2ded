//! Products in TF32 on Flex, for tests without a device that has matrix units for TF32.
//!
//! The feature `simulated-tf32` is for the tests' package. With it, and with
//! `DISTMUON_TEST_TF32=1`, iterations in float32 on Flex round the factors of every product, and
//! `ComputePath::rounds_factors` says so.

use std::env;
use std::sync::LazyLock;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::program::{Polynomial, Products};

/// The bits of float32's fraction that TF32 does not have.
const DROPPED_BITS: u32 = 23 - 10;

/// Returns `true` if factors of products of a type on a device are rounded in simulation.
pub(super) fn is_simulated(device: &Device, dtype: DType) -> bool {
    static SIMULATED: LazyLock<bool> =
        LazyLock::new(|| env::var("DISTMUON_TEST_TF32").is_ok_and(|value| value == "1"));
    dtype == DType::F32 && matches!(device.as_dispatch(), DispatchDevice::Flex(_)) && *SIMULATED
}

/// Products of factors in TF32. Sums and addends stay in float32.
pub(super) struct RoundedFactors<P>(pub P);

impl<P: Products<Matrix = Tensor<3>>> Products for RoundedFactors<P> {
    type Matrix = Tensor<3>;

    fn transposed(&self, x: Tensor<3>) -> Tensor<3> {
        self.0.transposed(x)
    }

    fn syrk(&self, a: Tensor<3>) -> Tensor<3> {
        self.0.syrk(rounded(a))
    }

    fn symmetric_product(
        &self,
        factors: [Tensor<3>; 2],
        c: Tensor<3>,
        alpha: f64,
        beta: f64,
    ) -> Tensor<3> {
        self.0.symmetric_product(factors.map(rounded), c, alpha, beta)
    }

    fn plus_identity(&self, z: Tensor<3>) -> Tensor<3> {
        self.0.plus_identity(z)
    }

    fn product(&self, factors: [Tensor<3>; 2]) -> Tensor<3> {
        self.0.product(factors.map(rounded))
    }

    fn product_add(&self, factors: [Tensor<3>; 2], c: Tensor<3>, beta: f64) -> Tensor<3> {
        self.0.product_add(factors.map(rounded), c, beta)
    }

    /// One kernel computes it from `R` in float32.
    fn accumulate_q(&self, r: Tensor<3>, schedule: &[Polynomial]) -> Tensor<3> {
        self.0.accumulate_q(r, schedule)
    }
}

/// The nearest values of TF32, and of two equally near ones the larger in magnitude: the rounding
/// of PTX's `cvt.rna.tf32`, which CubeCL uses.
fn rounded(x: Tensor<3>) -> Tensor<3> {
    let (shape, device) = (x.dims(), x.device());
    let values = x.into_data().try_into_vec::<f32>().expect("the simulation is of float32");
    let values: Vec<f32> = values.into_iter().map(to_tf32).collect();
    Tensor::from_data(TensorData::new(values, shape), (&device, DType::F32))
}

fn to_tf32(x: f32) -> f32 {
    if !x.is_finite() {
        return x;
    }
    let half = 1 << (DROPPED_BITS - 1);
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
