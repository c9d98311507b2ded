//! Clipping of gradients by norms that neither overflow nor underflow.

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::Tensor;

use crate::muon::rule::precise_dtype;

/// Norms of rows, `scale sqrt(squares)`: the largest magnitude of a row, and the sum of the squares of what
/// is divided by it, as in LAPACK's `slassq`.
pub(crate) struct Norms {
    pub scale: Tensor<1>,
    pub squares: Tensor<1>,
}

impl Norms {
    /// The norms of rows, in float32, and in float64 of float64.
    pub fn of_rows(rows: Tensor<2>) -> Self {
        let [count, _] = rows.dims();
        let rows = wide(rows);
        let scale = rows.clone().abs().max_dim(1).clamp_min(f32::MIN_POSITIVE);
        let squares = (rows / scale.clone()).square().sum_dim(1);
        Self { scale: scale.reshape([count]), squares: squares.reshape([count]) }
    }

    /// The factor `[1]` that makes the norm over all rows `max_norm`, or 1 if it is less. `epsilon` is added
    /// to the norm.
    pub fn factor(self, max_norm: f64, epsilon: f64) -> Tensor<1> {
        let largest = self.scale.clone().max().clamp_min(f32::MIN_POSITIVE);
        let relative = self.scale / largest.clone();
        let norm = (self.squares * relative.square()).sum().sqrt();
        // Divided by the largest scale, numerator and denominator stay finite.
        let of_largest = |value: f64| largest.clone().recip().mul_scalar(value);
        (of_largest(max_norm) / (norm + of_largest(epsilon))).clamp_max(1.0)
    }
}

/// The gradient of one parameter, clipped as it is configured. It has to be finite, or refused by its
/// [gate](crate::gate::Gate).
pub(crate) fn clip<const D: usize>(
    config: Option<&GradientClippingConfig>,
    grad: Tensor<D>,
) -> Tensor<D> {
    match config {
        None => grad,
        Some(&GradientClippingConfig::Value(most)) => grad.clamp(-most, most),
        Some(&GradientClippingConfig::Norm(most)) => {
            let factor = Norms::of_rows(grad.clone().reshape([1, -1])).factor(f64::from(most), 0.0);
            scaled(grad, factor)
        }
    }
}

/// A gradient times a factor `[1]`, rounded once: in half precision the factor itself would lose digits, or
/// be zero.
pub(crate) fn scaled<const D: usize>(grad: Tensor<D>, factor: Tensor<1>) -> Tensor<D> {
    let dtype = grad.dtype();
    let grad = wide(grad);
    let factor = factor.cast(grad.dtype()).reshape([1; D]);
    (grad * factor).cast(dtype)
}

/// The tensor in [`precise_dtype`].
fn wide<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let dtype = precise_dtype(tensor.dtype());
    tensor.cast(dtype)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, FloatDType, TensorData};

    use super::*;

    fn clipped(config: &GradientClippingConfig, values: &[f32]) -> Vec<f32> {
        let device = Device::default();
        let grad = Tensor::<1>::from_data(TensorData::from(values), (&device, DType::F32));
        clip(Some(config), grad).into_data().iter::<f32>().collect()
    }

    #[test]
    fn norms_of_any_size_are_clipped() {
        let one = GradientClippingConfig::Norm(1.0);
        for size in [1e-30, 1e-3, 1.0, 1e20, 1e37] {
            let found = clipped(&one, &[3.0 * size, -4.0 * size]);
            let expected = if size < 0.1 { [3.0 * size, -4.0 * size] } else { [0.6, -0.8] };
            for (found, expected) in found.iter().zip(expected) {
                assert!((found / expected - 1.0).abs() < 1e-6, "{size}: {found} for {expected}");
            }
        }
        assert_eq!(clipped(&one, &[0.0, 0.0]), [0.0, 0.0]);
        assert_eq!(
            clipped(&GradientClippingConfig::Value(0.5), &[3.0, -1.0, 0.2]),
            [0.5, -0.5, 0.2]
        );
    }

    #[test]
    fn rows_of_very_different_sizes_have_one_norm() {
        let device = Device::default();
        let rows = Tensor::<2>::from_data([[3e20, 0.0], [0.0, 4e20], [1e-30, 1.0]], &device);
        let factor = Norms::of_rows(rows.cast(FloatDType::F32)).factor(1.0, 1e-6);
        let factor = factor.into_data().iter::<f64>().next().unwrap();
        assert!((factor * 5e20 - 1.0).abs() < 1e-6, "{factor}");
    }
}
