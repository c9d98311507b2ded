//! AdamW for what is no hidden matrix: at a learning rate relative to Muon's, untouched by gradients
//! that are not finite, and on rows, so that a share of many parameters is updated at once.
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
//! moments of float16 parameters are float32.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod ops;

use std::sync::Arc;

use burn::config::Config;
use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};

use crate::checkpoint::saved_tensor;
use crate::computed;
use crate::error::{Error, Result};
use crate::gate::{Gate, SkippedSteps};
use crate::gradient;
use crate::muon::ops::finite;
use crate::muon::rule::{ONLY_RANK, Rates};
use crate::orthogonalize::Kernels;
pub(crate) use ops::Rows;

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
        kernels: Kernels,
        lr_factor: f64,
        parameter: &str,
        skipped: &SkippedSteps,
    ) -> GatedAdamW {
        GatedAdamW {
            settings: self.clone(),
            kernels,
            lr_factor,
            parameter: parameter.into(),
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

/// The type of the moments of parameters of a type. Squares of gradients below 1e-3 are zero in float16,
/// and of those above 255 infinite.
pub(crate) fn moment_dtype(of: DType) -> DType {
    if of == DType::F16 { DType::F32 } else { of }
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
    lr_factor: f64,
    parameter: Arc<str>,
    skipped: SkippedSteps,
}

/// What AdamW remembers of a parameter. Its record has the tensors `moment_1`, `moment_2`,
/// `correction_1`, `correction_2` and `skipped`.
#[derive(Clone)]
pub(crate) struct GatedAdamWState<const D: usize> {
    moments: Moments<D>,
    /// The sums of the weights in the moments, `[1]` each.
    corrections: [Tensor<1>; 2],
    skipped: Tensor<1>,
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
        Some(Self { moments, corrections, skipped: saved_tensor("skipped", prefix, src, device)? })
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
        gradient::check(&self.parameter, ONLY_RANK, &parameter, &grad)
            .unwrap_or_else(|error| panic!("{error}"));
        let (shape, device) = (parameter.dims(), parameter.device());
        let zero = || Tensor::<1>::zeros([1], (&device, DType::F32));
        let is_first = state.is_none();
        let GatedAdamWState { moments, corrections, skipped } = state.unwrap_or_else(|| {
            let zeros = || Tensor::zeros(shape, (&device, moment_dtype(grad.dtype())));
            GatedAdamWState {
                moments: Moments { moment_1: zeros(), moment_2: zeros() },
                corrections: [zero(), zero()],
                skipped: zero(),
            }
        });
        let row = |tensor: Tensor<D>| tensor.reshape([1, -1]);
        let (grad, moments) = (row(grad), moments.map(row));
        let rates = Rates::of_one(lr * self.lr_factor, 1.0, self.settings.weight_decay, &device);
        let gate = finite(self.kernels, &grad.clone().reshape([1, 1, -1]));
        let corrections = self.settings.correct(corrections, &gate);
        let rows = Rows { gate, rates, corrections };
        let (updated, moments) =
            self.settings.step(self.kernels, row(parameter), grad, moments, &rows);

        let Rows { gate, corrections, .. } = rows;
        let skipped = gate.count(skipped);
        self.skipped.record(&self.parameter, skipped.clone());
        if is_first {
            computed::check(&self.parameter, &updated).unwrap_or_else(|error| panic!("{error}"));
        }
        let moments = moments.map(|tensor| tensor.reshape(shape));
        (updated.reshape(shape), Some(GatedAdamWState { moments, corrections, skipped }))
    }

    fn to_device<const D: usize>(state: GatedAdamWState<D>, device: &Device) -> GatedAdamWState<D> {
        GatedAdamWState {
            moments: state.moments.map(|tensor| tensor.to_device(device)),
            corrections: state.corrections.map(|tensor| tensor.to_device(device)),
            skipped: state.skipped.to_device(device),
        }
    }
}
