//! A step of AdamW on rows, as a Burn backend extension: it may be one pass over memory.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{AdamWSettings, Moments};
use crate::gate::{Gate, spread};
use crate::muon::rule::Rates;
use crate::orthogonalize::{Engine, Kernels};

/// What AdamW does to every element.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait AdamWOps: Backend {
    /// The new values and moments of rows `[r, c]`. There is one float32 value per row, `[5, r]`, of:
    /// whether it is accepted; what its values are multiplied by; its learning rate; the
    /// corrections of its first and of its second moment. A row that is not accepted keeps
    /// everything. The constants are both betas and epsilon.
    #[fusion(meta = |parameters, _grads, moment_1, moment_2, _rows, _constants| {
        (parameters.clone(), moment_1.clone(), moment_2.clone())
    })]
    fn adamw(
        parameters: FloatTensor<Self>,
        grads: FloatTensor<Self>,
        moment_1: FloatTensor<Self>,
        moment_2: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        constants: [f32; 3],
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

/// What a step has for every row.
pub(crate) struct Rows {
    pub gate: Gate,
    pub rates: Rates,
    /// The corrections of both moments after the step.
    pub corrections: [Tensor<1>; 2],
}

impl AdamWSettings {
    /// One step of rows `[rows, columns]`: their new values and moments, from the engine of the
    /// parameters.
    pub(crate) fn step(
        &self,
        kernels: Kernels,
        parameters: Tensor<2>,
        grads: Tensor<2>,
        moments: Moments<2>,
        rows: &Rows,
    ) -> (Tensor<2>, Moments<2>) {
        let dtype = parameters.dtype().into();
        match Engine::choose(kernels, &parameters.device(), dtype) {
            Engine::Portable => self.portable(parameters, grads, moments, rows),
            Engine::Flex | Engine::Cube { .. } => {
                let Rows { gate, rates, corrections: [c1, c2] } = rows;
                let rates = rates.clone();
                let rows = vec![gate.accepted(), rates.keep, rates.lr, c1.clone(), c2.clone()];
                let (parameters, moment_1, moment_2) = Dispatch::adamw(
                    parameters.into_dispatch(),
                    grads.into_dispatch(),
                    moments.moment_1.into_dispatch(),
                    moments.moment_2.into_dispatch(),
                    Tensor::<1>::stack::<2>(rows, 0).into_dispatch(),
                    [self.beta_1, self.beta_2, self.epsilon].map(|x| x as f32),
                );
                let [moment_1, moment_2] = [moment_1, moment_2].map(Tensor::from_dispatch);
                (Tensor::from_dispatch(parameters), Moments { moment_1, moment_2 })
            }
        }
    }

    /// [`step`](Self::step) in Burn's operations.
    fn portable(
        &self,
        parameters: Tensor<2>,
        grads: Tensor<2>,
        moments: Moments<2>,
        Rows { gate, rates, corrections }: &Rows,
    ) -> (Tensor<2>, Moments<2>) {
        let (given, dtype) = (parameters.clone(), moments.moment_1.dtype());
        let (parameters, grads) = (parameters.cast(dtype), gate.clean(grads).cast(dtype));
        let averaged = |old: Tensor<2>, new: Tensor<2>, beta: f64| {
            let averaged = old.clone().mul_scalar(beta) + new.mul_scalar(1.0 - beta);
            gate.choose(averaged, old)
        };
        let moment_1 = averaged(moments.moment_1, grads.clone(), self.beta_1);
        let moment_2 = averaged(moments.moment_2, grads.square(), self.beta_2);
        let column = |values: &Tensor<1>| spread(values.clone().cast(dtype), &parameters);
        // The correction of a row that was never accepted is zero, but it is not updated either.
        let [c1, c2] = corrections.clone().map(|c| c.clamp_min(f32::MIN_POSITIVE));
        let root = (moment_2.clone() / column(&c2)).sqrt().add_scalar(self.epsilon);
        let direction = moment_1.clone() / column(&c1) / root;
        let updated = parameters.clone() * column(&rates.keep) - direction * column(&rates.lr);
        (gate.choose(updated.cast(given.dtype()), given), Moments { moment_1, moment_2 })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, s};

    use burn::optim::Optimizer;

    use super::*;
    use crate::adamw::moment_dtype;
    use crate::computed::rounds_to;
    use crate::skipped::SkippedSteps;

    #[test]
    fn the_fastest_engine_computes_what_burns_operations_do() {
        let device = Device::default();
        let (count, columns) = (7, 9_000); // more than a thread takes at a time
        let random = |low: f64, high: f64| {
            Tensor::<2>::random([count, columns], Distribution::Uniform(low, high), &device)
        };
        let row = |of: fn(usize) -> f32| {
            let values: Vec<f32> = (0..count).map(of).collect();
            Tensor::<1>::from_data(burn::tensor::TensorData::from(&*values), &device)
        };
        let rows = Rows {
            gate: Gate::from_accepted(row(|i| if i == 3 { 0.0 } else { 1.0 })),
            rates: Rates { keep: row(|i| 1.0 - 0.01 * i as f32), lr: row(|i| 0.1 * i as f32) },
            corrections: [row(|i| 0.1 * (1 + i) as f32), row(|i| 0.05 * (1 + i) as f32)],
        };
        let grads = random(-1.0, 1.0).slice_fill([3..4, 0..1], f32::NAN);
        let (values, first, second) = (random(-1.0, 1.0), random(-1.0, 1.0), random(0.0, 1.0));
        let settings = AdamWSettings::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !(device.supports_dtype(dtype) && rounds_to(&device, dtype.into())) {
                println!("skipped: the device has no {dtype:?}");
                continue;
            }
            let cast = |tensor: &Tensor<2>| tensor.clone().cast(dtype);
            let of_moments = moment_dtype(dtype);
            let moments = || Moments {
                moment_1: first.clone().cast(of_moments),
                moment_2: second.clone().cast(of_moments),
            };
            let run =
                |kernels| settings.step(kernels, cast(&values), cast(&grads), moments(), &rows);
            let (fast, fast_moments) = run(Kernels::Auto);
            let (plain, plain_moments) = run(Kernels::Portable);
            let tolerance = if dtype == DType::F32 { 1e-6 } else { 0.01 };
            let engine = Engine::choose(Kernels::Auto, &device, dtype.into());
            assert!(dtype != DType::F32 || engine != Engine::Portable, "both engines are one");
            for (fast, plain, old, dtype) in [
                (fast, plain, &values, dtype),
                (fast_moments.moment_1, plain_moments.moment_1, &first, of_moments),
                (fast_moments.moment_2, plain_moments.moment_2, &second, of_moments),
            ] {
                assert_eq!(fast.dtype(), dtype);
                let norm = |tensor: Tensor<2>| {
                    tensor.cast(DType::F32).square().sum().sqrt().into_scalar::<f32>()
                };
                let difference = norm(fast.clone() - plain.clone()) / norm(plain);
                assert!(difference < tolerance, "{dtype:?}: {difference}");
                let kept = fast.slice(s![3..4]) - old.clone().cast(dtype).slice(s![3..4]);
                assert_eq!(kept.abs().max().into_scalar::<f32>(), 0.0, "a refused row stays");
            }
        }
    }

    /// The square of such a gradient is zero in float16, and the step after it would be divided by epsilon.
    #[test]
    fn small_gradients_in_float16_make_small_steps() {
        let device = Device::default();
        if !device.supports_dtype(DType::F16) {
            println!("skipped: the device has no F16");
            return;
        }
        for kernels in [Kernels::Auto, Kernels::Portable] {
            let optimizer = AdamWSettings::new().build(
                (kernels, None),
                1.0,
                "weight",
                &SkippedSteps::new(None),
            );
            let of = |value: f32| Tensor::<1>::full([8], value, (&device, DType::F16));
            let (mut weight, mut state) = (of(1.0), None);
            for grad in [1e-4, 0.0, 2e3, 0.0] {
                (weight, state) = optimizer.step(0.01, weight, of(grad), state);
            }
            let weight = weight.cast(DType::F32).into_data();
            let moved = weight.iter::<f32>().map(|x| (x - 1.0).abs()).fold(0.0, f32::max);
            assert!(moved > 0.01 && moved < 0.06, "{kernels:?}: moved by {moved}");
        }
    }
}
