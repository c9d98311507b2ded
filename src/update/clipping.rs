//! Clipping of the gradient of one parameter.

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::Tensor;

use crate::backend::{ScaledNorms, scaled};

/// The gradient of one parameter, clipped as it is configured. It has to be finite, or its
/// parameter rejected.
pub(crate) fn clip<const D: usize>(
    config: Option<&GradientClippingConfig>,
    grad: Tensor<D>,
) -> Tensor<D> {
    match config {
        None => grad,
        // NaN stays NaN, and an infinite element becomes the limit: rejection comes before.
        Some(&GradientClippingConfig::Value(limit)) => grad.clamp(-limit, limit),
        Some(&GradientClippingConfig::Norm(limit)) => {
            let norms = ScaledNorms::of_rows(grad.clone().reshape([1, -1]));
            scaled(grad, norms.factor(f64::from(limit), 0.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    fn clipped(config: &GradientClippingConfig, values: &[f32]) -> Vec<f32> {
        let device = Device::default();
        let grad = Tensor::<1>::from_data(TensorData::from(values), (&device, DType::F32));
        clip(Some(config), grad).into_data().iter::<f32>().collect()
    }

    #[test]
    fn gradients_of_any_size_are_clipped_to_the_norm() {
        let one = GradientClippingConfig::Norm(1.0);
        for size in [1e-30, 1e-3, 1.0, 1e20, 1e37] {
            let computed = clipped(&one, &[3.0 * size, -4.0 * size]);
            let expected = if size < 0.1 { [3.0 * size, -4.0 * size] } else { [0.6, -0.8] };
            for (computed, expected) in computed.iter().zip(expected) {
                assert!(
                    (computed / expected - 1.0).abs() < 1e-6,
                    "{size}: {computed} for {expected}"
                );
            }
        }
        assert_eq!(clipped(&one, &[0.0, 0.0]), [0.0, 0.0]);
        assert_eq!(
            clipped(&GradientClippingConfig::Value(0.5), &[3.0, -1.0, 0.2]),
            [0.5, -0.5, 0.2]
        );
    }
}
