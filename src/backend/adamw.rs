//! A step of AdamW, on a compute path.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::compute_path::{ComputePath, KernelPolicy};
use super::ops::{AdamWControls, AdamWOps, AdamWStep, ElementwiseRows, Moments};
use super::portable;
use super::tensor_list::TensorList;
use super::values::Values;

impl AdamWStep {
    /// One step of several parameters: their new values and moments, on the path of the parameters.
    /// A cautious step and AMSGrad have no kernels.
    pub fn run(
        self,
        policy: KernelPolicy,
        parameters: Values,
        grads: Vec<Tensor<1>>,
        moments: Moments,
        controls: &AdamWControls<'_>,
        rows: &[ElementwiseRows],
    ) -> (Values, Moments) {
        let dtype = parameters.dtype();
        let path = match ComputePath::choose(policy, &parameters.device(), dtype.into()) {
            _ if self.cautious || self.amsgrad => ComputePath::Portable,
            path => path,
        };
        let grads = match path {
            // The kernel reads gradients in their type: no launch for each of them.
            ComputePath::CubeCl { .. } => grads,
            _ => grads.into_iter().map(|grad| grad.cast(dtype)).collect(),
        };
        match path {
            ComputePath::Portable => {
                let parameters = parameters.into_each();
                let (updated, moments) =
                    portable::adamw(self, parameters, grads, moments, controls, rows);
                (Values::Each(updated), moments)
            }
            ComputePath::Flex | ComputePath::CubeCl { .. } => {
                self.on_path(parameters, grads, moments, controls, rows)
            }
        }
    }

    fn on_path(
        self,
        parameters: Values,
        grads: Vec<Tensor<1>>,
        moments: Moments,
        controls: &AdamWControls<'_>,
        rows: &[ElementwiseRows],
    ) -> (Values, Moments) {
        let &AdamWControls { rejected, corrections: [c1, c2], factor } = controls;
        let constants = [self.beta_1, self.beta_2, self.epsilon].map(|x| x as f32);
        let grads = TensorList::from_tensors(grads);
        let [m, v] = [moments.moment_1, moments.moment_2].map(Tensor::into_dispatch);
        // A backend extension has no optional tensors: where there is no factor, any tensor stands
        // in.
        let by = factor.unwrap_or(rejected);
        let [rejected, c1, c2, by] = [rejected, c1, c2, by].map(|x| x.clone().into_dispatch());
        let (rows, scaled) = (rows.to_vec(), factor.is_some());
        let (values, moments) = parameters.through(|values, places| {
            let (values, m, v) = Dispatch::adamw(
                values, places, grads, m, v, rejected, c1, c2, by, rows, constants, scaled,
            );
            (values, [m, v])
        });
        let [moment_1, moment_2] = moments.map(Tensor::from_dispatch);
        (values, Moments { moment_1, moment_2, max_moment_2: None })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, TensorData, s};

    use super::*;
    use crate::backend::precise_dtype;
    use crate::checks::rounds_to;
    use crate::skipped_tests::lacks;

    #[test]
    fn the_fastest_path_computes_the_same_as_burns_operations() {
        let device = Device::default();
        // More than one launch or thread processes at a time; the fourth is rejected.
        let lengths = [20_000, 9_000, 768, 512, 256, 256, 7, 256, 256, 1, 300];
        let firsts: Vec<usize> =
            (0..lengths.len()).map(|index| lengths[..index].iter().sum::<usize>()).collect();
        let all: usize = lengths.iter().sum();
        let random = |low: f64, high: f64| {
            Tensor::<1>::random([all], Distribution::Uniform(low, high), (&device, DType::F32))
        };
        let per_parameter = |value: fn(usize) -> f32| {
            let values: Vec<f32> = (0..lengths.len()).map(value).collect();
            Tensor::<1>::from_data(TensorData::from(&*values), (&device, DType::F32))
        };
        let rejected = per_parameter(|i| if i == 3 { 1.0 } else { 0.0 });
        let corrections =
            [per_parameter(|i| 0.1 * (1 + i) as f32), per_parameter(|i| 0.05 * (1 + i) as f32)];
        let rows = |i: usize| ElementwiseRows {
            flag: i,
            first: firsts[i],
            decay: 1.0 - 0.01 * i as f64,
            lr: f64::from(0.1 * i as f32),
        };
        let rows: Vec<ElementwiseRows> = (0..lengths.len()).map(rows).collect();
        let grads = random(-1.0, 1.0).slice_fill(s![firsts[3]..firsts[3] + 1], f32::NAN);
        let (values, first, second) = (random(-1.0, 1.0), random(-1.0, 1.0), random(0.0, 1.0));
        let split = |tensor: Tensor<1>| tensor.split_with_sizes(lengths.to_vec(), 0);
        let (cautious, amsgrad) = (false, false);
        let step = AdamWStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, cautious, amsgrad };
        let factor = Tensor::<1>::from_data([0.5_f32], (&device, DType::F32));
        for (dtype, factor) in [
            (DType::F32, None),
            (DType::F32, Some(&factor)),
            (DType::F16, None),
            (DType::BF16, Some(&factor)),
        ] {
            if !(device.supports_dtype(dtype) && rounds_to(&device, dtype.into())) {
                lacks(format!("{dtype:?}"));
                continue;
            }
            let cast = |tensor: &Tensor<1>| tensor.clone().cast(dtype);
            let moment_dtype = precise_dtype(dtype);
            let moments = || Moments {
                moment_1: first.clone().cast(moment_dtype),
                moment_2: second.clone().cast(moment_dtype),
                max_moment_2: None,
            };
            let controls = AdamWControls { rejected: &rejected, corrections: &corrections, factor };
            let run = |policy| {
                let (values, grads) = (split(cast(&values)), split(cast(&grads)));
                let values = Values::Each(values);
                let (new, moments) = step.run(policy, values, grads, moments(), &controls, &rows);
                (Tensor::cat(new.into_each(), 0), moments)
            };
            let (fast, fast_moments) = run(KernelPolicy::Auto);
            let (plain, plain_moments) = run(KernelPolicy::Portable);
            let tolerance = if dtype == DType::F32 { 1e-6 } else { 0.01 };
            let path = ComputePath::choose(KernelPolicy::Auto, &device, dtype.into());
            assert!(dtype != DType::F32 || path != ComputePath::Portable, "both paths are one");
            for (fast, plain, old, dtype) in [
                (fast, plain, &values, dtype),
                (fast_moments.moment_1, plain_moments.moment_1, &first, moment_dtype),
                (fast_moments.moment_2, plain_moments.moment_2, &second, moment_dtype),
            ] {
                assert_eq!(fast.dtype(), dtype);
                let norm = |tensor: Tensor<1>| {
                    tensor.cast(DType::F32).square().sum().sqrt().into_scalar::<f32>()
                };
                let difference = norm(fast.clone() - plain.clone()) / norm(plain);
                assert!(difference < tolerance, "{dtype:?}: {difference}");
                let rejected = |tensor: Tensor<1>| tensor.slice(s![firsts[3]..firsts[4]]);
                let kept = rejected(fast) - rejected(old.clone().cast(dtype));
                assert_eq!(
                    kept.abs().max().into_scalar::<f32>(),
                    0.0,
                    "a rejected parameter stays"
                );
            }
        }
    }
}
