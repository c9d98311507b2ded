//! A step of AdamW on several parameters, as a Burn backend extension: it may be one pass over memory.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Tensor, s};

use super::{AdamWSettings, Moments};
use crate::clipping;
use crate::gate::Gate;
use crate::muon::rule::Rates;
use crate::orthogonalize::{Engine, Kernels};
use crate::parts::{Parts, calls};

/// How a parameter is updated.
#[derive(Debug, Clone, Copy)]
pub struct Updating {
    /// The number of the parameter's flag and corrections.
    pub flag: usize,
    /// The first of its elements in the moments.
    pub first: usize,
    /// The factor on the old values.
    pub keep: f32,
    /// The factor on the step.
    pub lr: f32,
}

/// A step of AdamW, element by element.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait AdamWOps: Backend {
    /// The new values of parameters, and the moments in which theirs are new. A parameter whose flag in `left` is
    /// set keeps everything. There is one value for every parameter in `left` and both corrections; gradients are
    /// multiplied by `factor` if they are `scaled`. The constants are both betas and epsilon.
    #[fusion(meta = |
        parameters, _grads, moment_1, moment_2, _left, _correction_1, _correction_2, _factor, _parts,
        _constants, _scaled
    | {
        (parameters.clone(), moment_1.clone(), moment_2.clone())
    })]
    #[allow(clippy::too_many_arguments)] // a backend extension takes no struct of tensors and numbers
    fn adamw(
        #[extension_type] parameters: Parts<Self>,
        #[extension_type] grads: Parts<Self>,
        moment_1: FloatTensor<Self>,
        moment_2: FloatTensor<Self>,
        left: FloatTensor<Self>,
        correction_1: FloatTensor<Self>,
        correction_2: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        parts: Vec<Updating>,
        constants: [f32; 3],
        scaled: bool,
    ) -> (Parts<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

/// A parameter in a step: its place and its factors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// The number of its flag and corrections.
    pub flag: usize,
    /// The first of its elements in the moments.
    pub first: usize,
    pub rates: Rates,
}

/// The values on the device that a step has for every parameter, and for all of them.
pub(crate) struct Controls<'a> {
    /// 1 for parameters that stay as they are, else 0.
    pub left: &'a Tensor<1>,
    /// The corrections of both moments after the step.
    pub corrections: &'a [Tensor<1>; 2],
    /// The factor on all gradients.
    pub factor: Option<&'a Tensor<1>>,
}

impl AdamWSettings {
    /// One step of some parameters: their new values and moments, from the engine of the parameters.
    pub(crate) fn step(
        &self,
        kernels: Kernels,
        parameters: Vec<Tensor<1>>,
        grads: Vec<Tensor<1>>,
        moments: Moments<1>,
        controls: &Controls<'_>,
        parts: &[Part],
    ) -> (Vec<Tensor<1>>, Moments<1>) {
        let Some(first) = parameters.first() else { return (parameters, moments) };
        match Engine::choose(kernels, &first.device(), first.dtype().into()) {
            Engine::Portable => self.portable(parameters, grads, moments, controls, parts),
            Engine::Flex | Engine::Cube { .. } => {
                self.in_calls(parameters, grads, moments, controls, parts)
            }
        }
    }

    fn in_calls(
        &self,
        parameters: Vec<Tensor<1>>,
        grads: Vec<Tensor<1>>,
        moments: Moments<1>,
        controls: &Controls<'_>,
        parts: &[Part],
    ) -> (Vec<Tensor<1>>, Moments<1>) {
        let &Controls { left, corrections: [c1, c2], factor } = controls;
        let constants = [self.beta_1, self.beta_2, self.epsilon].map(|x| x as f32);
        let (mut parameters, mut grads) = (parameters.into_iter(), grads.into_iter());
        let (mut m, mut v) = (moments.moment_1.into_dispatch(), moments.moment_2.into_dispatch());
        let mut updated = vec![];
        for call in calls(parts.len()) {
            // Taken out, so that they are updated in place.
            let of_call = [&mut parameters, &mut grads]
                .map(|all| Parts::from_tensors(all.take(call.len()).collect()));
            let [values, grads] = of_call;
            // A backend extension takes no tensor that may be absent.
            let by = factor.unwrap_or(left);
            let [left, c1, c2, by] = [left, c1, c2, by].map(|x| x.clone().into_dispatch());
            let parts = parts[call].iter().map(Part::updating).collect();
            let scaled = factor.is_some();
            let new =
                Dispatch::adamw(values, grads, m, v, left, c1, c2, by, parts, constants, scaled);
            updated.extend(new.0.into_tensors());
            (m, v) = (new.1, new.2);
        }
        let [moment_1, moment_2] = [m, v].map(Tensor::from_dispatch);
        (updated, Moments { moment_1, moment_2 })
    }

    /// [`step`](Self::step) in Burn's operations.
    fn portable(
        &self,
        parameters: Vec<Tensor<1>>,
        grads: Vec<Tensor<1>>,
        mut moments: Moments<1>,
        controls: &Controls<'_>,
        parts: &[Part],
    ) -> (Vec<Tensor<1>>, Moments<1>) {
        let each = parameters.into_iter().zip(grads).zip(parts);
        let mut updated = vec![];
        for ((values, grad), part) in each {
            let place = part.first..part.first + values.dims()[0];
            let old = moments.clone().map(|moment| moment.slice([place.clone()]));
            let (new, of_part) = self.portable_part(values, grad, old, controls, part);
            let put = |all: Tensor<1>, of: Tensor<1>| match all.dims() == of.dims() {
                true => of,
                false => all.slice_assign([place.clone()], of),
            };
            moments = Moments {
                moment_1: put(moments.moment_1, of_part.moment_1),
                moment_2: put(moments.moment_2, of_part.moment_2),
            };
            updated.push(new);
        }
        (updated, moments)
    }

    fn portable_part(
        &self,
        given: Tensor<1>,
        grad: Tensor<1>,
        moments: Moments<1>,
        &Controls { left, corrections, factor }: &Controls<'_>,
        Part { flag, rates, .. }: &Part,
    ) -> (Tensor<1>, Moments<1>) {
        let dtype = moments.moment_1.dtype();
        let row = |tensor: Tensor<1>| tensor.reshape([1, -1]);
        let of_part = |values: &Tensor<1>| values.clone().slice(s![*flag..*flag + 1]);
        let gate = Gate::from_left(of_part(left));
        let grad = match factor {
            Some(factor) => clipping::scaled(grad, factor.clone()),
            None => grad,
        };
        let grad = gate.clean(row(grad)).cast(dtype);
        let averaged = |old: Tensor<1>, new: Tensor<2>, beta: f64| {
            let old = row(old);
            gate.choose(old.clone().mul_scalar(beta) + new.mul_scalar(1.0 - beta), old)
        };
        let moment_1 = averaged(moments.moment_1, grad.clone(), self.beta_1);
        let moment_2 = averaged(moments.moment_2, grad.square(), self.beta_2);
        // The correction of a parameter that was never updated is zero, but it is not updated now either.
        let [c1, c2] = corrections
            .each_ref()
            .map(|c| of_part(c).clamp_min(f32::MIN_POSITIVE).cast(dtype).reshape([1, 1]));
        let root = (moment_2.clone() / c2).sqrt().add_scalar(self.epsilon);
        let direction = moment_1.clone() / c1 / root;
        let old = row(given.clone());
        let kept = old.clone().cast(dtype).mul_scalar(rates.keep);
        let updated = (kept - direction.mul_scalar(rates.lr)).cast(old.dtype());
        let flat = |tensor: Tensor<2>| tensor.reshape([-1]);
        let moments = Moments { moment_1: flat(moment_1), moment_2: flat(moment_2) };
        (flat(gate.choose(updated, old)), moments)
    }
}

impl Part {
    fn updating(&self) -> Updating {
        let Self { flag, first, rates: Rates { keep, lr } } = *self;
        Updating { flag, first, keep: keep as f32, lr: lr as f32 }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, TensorData};

    use burn::optim::Optimizer;

    use super::*;
    use crate::adamw::moment_dtype;
    use crate::computed::rounds_to;
    use crate::skipped::SkippedSteps;
    use crate::skips::lacks;

    #[test]
    fn the_fastest_engine_computes_what_burns_operations_do() {
        let device = Device::default();
        // More than a call takes, and than a thread does at a time; the fourth is refused.
        let lengths = [20_000, 9_000, 768, 512, 256, 256, 7, 256, 256, 1, 300];
        let firsts: Vec<usize> =
            (0..lengths.len()).map(|part| lengths[..part].iter().sum::<usize>()).collect();
        let all: usize = lengths.iter().sum();
        let random = |low: f64, high: f64| {
            Tensor::<1>::random([all], Distribution::Uniform(low, high), (&device, DType::F32))
        };
        let of_parts = |of: fn(usize) -> f32| {
            let values: Vec<f32> = (0..lengths.len()).map(of).collect();
            Tensor::<1>::from_data(TensorData::from(&*values), (&device, DType::F32))
        };
        let left = of_parts(|i| if i == 3 { 1.0 } else { 0.0 });
        let corrections = [of_parts(|i| 0.1 * (1 + i) as f32), of_parts(|i| 0.05 * (1 + i) as f32)];
        let rates = |i: usize| Rates { keep: 1.0 - 0.01 * i as f64, lr: f64::from(0.1 * i as f32) };
        let part = |i: usize| Part { flag: i, first: firsts[i], rates: rates(i) };
        let parts: Vec<Part> = (0..lengths.len()).map(part).collect();
        let grads = random(-1.0, 1.0).slice_fill(s![firsts[3]..firsts[3] + 1], f32::NAN);
        let (values, first, second) = (random(-1.0, 1.0), random(-1.0, 1.0), random(0.0, 1.0));
        let split = |tensor: Tensor<1>| tensor.split_with_sizes(lengths.to_vec(), 0);
        let settings = AdamWSettings::new();
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
            let of_moments = moment_dtype(dtype);
            let moments = || Moments {
                moment_1: first.clone().cast(of_moments),
                moment_2: second.clone().cast(of_moments),
            };
            let controls = Controls { left: &left, corrections: &corrections, factor };
            let run = |kernels| {
                let (values, grads) = (split(cast(&values)), split(cast(&grads)));
                let (new, of) = settings.step(kernels, values, grads, moments(), &controls, &parts);
                (Tensor::cat(new, 0), of)
            };
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
                let norm = |tensor: Tensor<1>| {
                    tensor.cast(DType::F32).square().sum().sqrt().into_scalar::<f32>()
                };
                let difference = norm(fast.clone() - plain.clone()) / norm(plain);
                assert!(difference < tolerance, "{dtype:?}: {difference}");
                let refused = |of: Tensor<1>| of.slice(s![firsts[3]..firsts[4]]);
                let kept = refused(fast) - refused(old.clone().cast(dtype));
                assert_eq!(kept.abs().max().into_scalar::<f32>(), 0.0, "what is refused stays");
            }
        }
    }

    /// The square of such a gradient is zero in float16, and the step after it would be divided by epsilon.
    #[test]
    fn small_gradients_in_float16_make_small_steps() {
        let device = Device::default();
        if !device.supports_dtype(DType::F16) {
            lacks("float16");
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
