//! AdamW for what is no hidden matrix: Burn's own rule, at a learning rate relative to Muon's, and
//! untouched by gradients that are not finite.

use std::sync::Arc;

use burn::config::Config;
use burn::optim::{self, LearningRate, Optimizer, RecordState, StateSink, StateSource, join_path};
use burn::tensor::{Device, Tensor};

use crate::checkpoint::saved_tensor;
use crate::error::{Error, Result};
use crate::gate::{Gate, SkippedSteps};

/// Configuration of AdamW for embeddings, the output head, vectors and scalars (Loshchilov and
/// Hutter, <https://arxiv.org/abs/1711.05101>).
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
        lr_factor: f64,
        parameter: &str,
        skipped: &SkippedSteps,
    ) -> GatedAdamW {
        let adamw = optim::AdamWConfig::new()
            .with_beta_1(self.beta_1 as f32)
            .with_beta_2(self.beta_2 as f32)
            .with_epsilon(self.epsilon as f32)
            .with_weight_decay(self.weight_decay as f32)
            .build();
        GatedAdamW { adamw, lr_factor, parameter: parameter.into(), skipped: skipped.clone() }
    }
}

/// Burn's AdamW behind a [`Gate`].
#[derive(Clone)]
pub(crate) struct GatedAdamW {
    adamw: optim::AdamW,
    lr_factor: f64,
    parameter: Arc<str>,
    skipped: SkippedSteps,
}

/// Burn's state, and the count of skipped steps.
#[derive(Clone)]
pub(crate) struct GatedAdamWState<const D: usize> {
    adamw: optim::AdamWState<D>,
    skipped: Tensor<1>,
}

impl<const D: usize> RecordState for GatedAdamWState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.adamw.state_flatten(&join_path(prefix, "adamw"), out);
        out.push_tensor(prefix, "skipped", self.skipped.to_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self {
            adamw: RecordState::state_unflatten(&join_path(prefix, "adamw"), src, device)?,
            skipped: saved_tensor("skipped", prefix, src, device)?,
        })
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
        let (old, skipped) = match state {
            Some(state) => (Some(state.adamw), Some(state.skipped)),
            None => (None, None),
        };
        let [old_1, old_2] = match &old {
            Some(old) => [old.momentum.moment_1.clone(), old.momentum.moment_2.clone()],
            None => [grad.zeros_like(), grad.zeros_like()],
        };
        let gate = Gate::of(&grad);
        let (updated, state) =
            self.adamw.step(lr * self.lr_factor, parameter.clone(), gate.clean(grad), old);
        let mut adamw = state.expect("AdamW always returns its state");
        adamw.momentum.moment_1 = gate.choose(adamw.momentum.moment_1, old_1);
        adamw.momentum.moment_2 = gate.choose(adamw.momentum.moment_2, old_2);

        let skipped = gate.count(skipped);
        self.skipped.record(&self.parameter, skipped.clone());
        (gate.choose(updated, parameter), Some(GatedAdamWState { adamw, skipped }))
    }

    fn to_device<const D: usize>(state: GatedAdamWState<D>, device: &Device) -> GatedAdamWState<D> {
        GatedAdamWState {
            adamw: <optim::AdamW as Optimizer>::to_device(state.adamw, device),
            skipped: state.skipped.to_device(device),
        }
    }
}
