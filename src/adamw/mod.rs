//! AdamW for what is no hidden matrix: at a learning rate relative to Muon's, untouched by gradients
//! that are not finite, and on several parameters at once, each where it lies.
//!
//! With betas `b1` and `b2`, learning rate `lr` and weight decay `w`, a step with gradient `G` is
//!
//! ```text
//! M <- b1 M + (1 - b1) G          c1 <- b1 c1 + (1 - b1)
//! V <- b2 V + (1 - b2) G^2        c2 <- b2 c2 + (1 - b2)
//! P <- (1 - lr w) P - lr (M / c1) / (sqrt(V / c2) + epsilon)
//! ```
//!
//! (Loshchilov and Hutter, <https://arxiv.org/abs/1711.05101>). The corrections `c` are the moving
//! averages of ones: the usual `1 - b^t`, but counting only steps that were taken, on the device. The
//! moments of float16 and bfloat16 parameters are float32.
//!
//! A step is not taken where `G` is not finite, or so large that its square would make `V` infinite for good:
//! above 1.8e19 (1.3e154 for float64 parameters).

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod ops;

use std::sync::Arc;

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};

use crate::checkpoint::saved_tensor;
use crate::clipping;
use crate::computed;
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::gradient;
use crate::muon::ops::{Flagged, refuse};
use crate::muon::rule::{ONLY_RANK, Rates, check_rate, precise_dtype};
use crate::orthogonalize::Kernels;
use crate::skipped::{self, Counting, SkippedSteps};
pub(crate) use ops::{Controls, Part};

/// Configuration of AdamW for embeddings, the output head, vectors and scalars.
///
/// The `*_lr` are factors on the learning rate given to `step`, so that one schedule moves all of
/// them. For schedules of their own, see [`Routing::group`](crate::Routing::group).
#[derive(Config, Debug)]
pub struct AdamWSettings {
    /// Decay of the first moment, in `[0, 1)`.
    #[config(default = 0.9)]
    pub beta_1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    #[config(default = 0.95)]
    pub beta_2: f64,
    /// Added to the root of the second moment.
    #[config(default = 1e-8)]
    pub epsilon: f64,
    /// Decoupled weight decay.
    #[config(default = 0.0)]
    pub weight_decay: f64,
    /// Learning rate of embeddings, relative to the one given to `step`.
    #[config(default = 1.0)]
    pub embedding_lr: f64,
    /// Learning rate of the output head, relative to the one given to `step`.
    #[config(default = 1.0)]
    pub head_lr: f64,
    /// Learning rate of vectors and scalars, relative to the one given to `step`.
    #[config(default = 1.0)]
    pub vector_lr: f64,
}

impl AdamWSettings {
    /// Refuses settings that no run can use.
    pub(crate) fn check(&self) -> Result<()> {
        let decay = |value: f64| (0.0..1.0).contains(&value);
        let size = |value: f64| value.is_finite() && value >= 0.0;
        let (decays, sizes) = ("at least 0 and less than 1", "a finite number, zero or more");
        for (setting, value, usable, expected) in [
            ("adamw.beta_1", self.beta_1, decay(self.beta_1), decays),
            ("adamw.beta_2", self.beta_2, decay(self.beta_2), decays),
            ("adamw.epsilon", self.epsilon, size(self.epsilon), sizes),
            ("adamw.weight_decay", self.weight_decay, size(self.weight_decay), sizes),
            ("adamw.embedding_lr", self.embedding_lr, size(self.embedding_lr), sizes),
            ("adamw.head_lr", self.head_lr, size(self.head_lr), sizes),
            ("adamw.vector_lr", self.vector_lr, size(self.vector_lr), sizes),
        ] {
            if !usable {
                return Err(Error::Setting { setting, value: value.to_string(), expected });
            }
        }
        Ok(())
    }

    /// The rule for one parameter, at `lr_factor` times the learning rate.
    pub(crate) fn build(
        &self,
        (kernels, clipping): (Kernels, Option<&GradientClippingConfig>),
        lr_factor: f64,
        parameter: &str,
        skipped: &SkippedSteps,
    ) -> GatedAdamW {
        GatedAdamW {
            settings: self.clone(),
            kernels,
            clipping: clipping.cloned(),
            lr_factor,
            parameter: parameter.into(),
            reserved: skipped.reserve(),
            skipped: skipped.clone(),
        }
    }

    /// The corrections after a step, of rows or of parameters.
    pub(crate) fn correct(&self, corrections: [Tensor<1>; 2], gate: &Gate) -> [Tensor<1>; 2] {
        let [first, second] = corrections;
        [(first, self.beta_1), (second, self.beta_2)].map(|(old, beta)| {
            gate.choose(old.clone().mul_scalar(beta).add_scalar(1.0 - beta), old)
        })
    }
}

/// The type of the moments of parameters of a type. In float16, squares of gradients below 1e-3 are zero, and
/// of those above 255 infinite; in bfloat16, `0.999 V` rounds to `V`, so that it never falls.
pub(crate) fn moment_dtype(of: DType) -> DType {
    precise_dtype(of)
}

/// The largest gradient of parameters of a type whose square the second moment can hold.
pub(crate) fn largest_gradient(of: DType) -> f64 {
    if of == DType::F64 { f64::MAX.sqrt() } else { f64::from(f32::MAX).sqrt() * (1.0 - 1e-6) }
}

/// The moving averages of the gradients and of their squares, in [`moment_dtype`].
#[derive(Clone, Debug)]
pub(crate) struct Moments<const D: usize> {
    pub moment_1: Tensor<D>,
    pub moment_2: Tensor<D>,
}

impl<const D: usize> Moments<D> {
    /// The same done to both.
    pub fn map<const E: usize>(self, f: impl Fn(Tensor<D>) -> Tensor<E>) -> Moments<E> {
        Moments { moment_1: f(self.moment_1), moment_2: f(self.moment_2) }
    }
}

/// AdamW for one parameter, behind a [`Gate`].
#[derive(Clone)]
pub(crate) struct GatedAdamW {
    settings: AdamWSettings,
    kernels: Kernels,
    clipping: Option<GradientClippingConfig>,
    lr_factor: f64,
    parameter: Arc<str>,
    skipped: SkippedSteps,
    /// Where the states count.
    reserved: skipped::Place,
}

/// What AdamW remembers of a parameter. Its record has the tensors `moment_1`, `moment_2`,
/// `correction_1`, `correction_2` and `skipped`.
#[derive(Clone)]
pub(crate) struct GatedAdamWState<const D: usize> {
    moments: Moments<D>,
    /// The sums of the weights in the moments, `[1]` each.
    corrections: [Tensor<1>; 2],
    skipped: Tensor<1>,
    /// Where the skipped steps are counted.
    place: skipped::Place,
}

impl<const D: usize> GatedAdamWState<D> {
    /// The state before the first step of a parameter.
    fn new(shape: [usize; D], dtype: DType, device: &Device) -> Self {
        let zeros = || Tensor::zeros(shape, (device, moment_dtype(dtype)));
        let zero = |dtype| Tensor::zeros([1], (device, dtype));
        Self {
            moments: Moments { moment_1: zeros(), moment_2: zeros() },
            corrections: [zero(precise_dtype(dtype)), zero(precise_dtype(dtype))],
            skipped: zero(DType::F32),
            place: skipped::Place::default(),
        }
    }
}

impl<const D: usize> RecordState for GatedAdamWState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "moment_1", self.moments.moment_1.to_data());
        out.push_tensor(prefix, "moment_2", self.moments.moment_2.to_data());
        out.push_tensor(prefix, "correction_1", self.corrections[0].to_data());
        out.push_tensor(prefix, "correction_2", self.corrections[1].to_data());
        out.push_tensor(prefix, "skipped", self.skipped.to_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let moments = Moments {
            moment_1: saved_tensor("moment_1", prefix, src, device)?,
            moment_2: saved_tensor("moment_2", prefix, src, device)?,
        };
        let corrections = [
            saved_tensor("correction_1", prefix, src, device)?,
            saved_tensor("correction_2", prefix, src, device)?,
        ];
        let skipped = saved_tensor("skipped", prefix, src, device)?;
        Some(Self { moments, corrections, skipped, place: skipped::Place::default() })
    }
}

impl GatedAdamW {
    /// [`step`](Optimizer::step), with the errors that it panics with.
    fn try_step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<GatedAdamWState<D>>,
    ) -> Result<(Tensor<D>, GatedAdamWState<D>)> {
        check_rate(lr)?;
        gradient::check(&self.parameter, ONLY_RANK, &parameter, &grad)?;
        let (shape, device, dtype) = (parameter.dims(), parameter.device(), grad.dtype());
        let is_first = state.is_none();
        let mut state = state.unwrap_or_else(|| GatedAdamWState::new(shape, dtype, &device));
        if !state.place.has_started() {
            self.start_counting(&mut state);
        }
        if shape.contains(&0) {
            // Nothing to update, and Burn takes a zero in a new shape for the old length.
            return Ok((parameter, state));
        }
        let GatedAdamWState { moments, corrections, skipped, mut place } = state;
        let flags = Tensor::zeros([1], (&device, DType::F32));
        let (flat, whole) =
            (|tensor: Tensor<D>| tensor.reshape([-1]), [Flagged { flag: 0, rows: 1 }]);
        let of_grad = [flat(grad.clone())];
        // Clipping comes after that: it would make an infinite gradient a usual one.
        let left = refuse(self.kernels, flags, &of_grad, &whole, largest_gradient(dtype));
        let grad = clipping::clip(self.clipping.as_ref(), grad);
        // Files of older versions have bfloat16 here.
        let moments = moments.map(|moment| flat(moment).cast(moment_dtype(dtype)));
        let corrections = self.settings.correct(corrections, &Gate::from_left(left.clone()));
        let rates = Rates::new(lr * self.lr_factor, 1.0, self.settings.weight_decay);
        let part = [Part { flag: 0, first: 0, rates }];
        let controls = Controls { left: &left, corrections: &corrections, factor: None };
        let (parameter, grad) = (vec![flat(parameter)], vec![flat(grad)]);
        let (mut updated, moments) =
            self.settings.step(self.kernels, parameter, grad, moments, &controls, &part);
        let updated = updated.swap_remove(0);
        if is_first {
            computed::check(&self.parameter, &updated)?;
        }

        let skipped = skipped + left;
        let times = [place.next_step()];
        self.skipped.record(&mut place, skipped.clone(), &times, true)?;
        let moments = moments.map(|tensor| tensor.reshape(shape));
        Ok((updated.reshape(shape), GatedAdamWState { moments, corrections, skipped, place }))
    }
}

impl Counting for GatedAdamW {
    fn start_counting<const D: usize>(&self, state: &mut GatedAdamWState<D>) {
        let names = vec![self.parameter.to_string()];
        let reserved = Some(self.reserved);
        state.place = self.skipped.start(reserved, names, state.skipped.clone(), vec![0]);
    }
}

impl Optimizer for GatedAdamW {
    type State<const D: usize> = GatedAdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<GatedAdamWState<D>>,
    ) -> (Tensor<D>, Option<GatedAdamWState<D>>) {
        let stepped = self.try_step(lr, parameter, grad, state);
        let (updated, state) = stepped.unwrap_or_else(|error| panic!("{error}"));
        (updated, Some(state))
    }

    fn to_device<const D: usize>(state: GatedAdamWState<D>, device: &Device) -> GatedAdamWState<D> {
        GatedAdamWState {
            moments: state.moments.map(|tensor| tensor.to_device(device)),
            corrections: state.corrections.map(|tensor| tensor.to_device(device)),
            skipped: state.skipped.to_device(device),
            place: state.place,
        }
    }
}
