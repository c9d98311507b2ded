//! The size of a step: the only place where learning rate, scale and weight decay meet.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::schedule::Schedule;

/// Weight decay with rate `w`, a schedule over the steps of a run. A number converts to decoupled
/// weight decay at a constant rate, as in `.with_weight_decay(0.1.into())`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WeightDecay {
    /// `P <- (1 - lr w) P`, with the learning rate before it is scaled (Loshchilov and Hutter,
    /// <https://arxiv.org/abs/1711.05101>).
    Decoupled(Schedule),
    /// [`Decoupled`](Self::Decoupled), only for elements whose sign is not opposed to the update's,
    /// `U` in `P <- P - lr U`: the decay never works against the update
    /// (<https://github.com/microsoft/dion>).
    Cautious(Schedule),
    /// [`Cautious`](Self::Cautious) with the scaled learning rate, as in
    /// <https://github.com/karpathy/nanochat>.
    CautiousScaled(Schedule),
    /// [`Cautious`](Self::Cautious) after the parts of the parameter, so that a part that sets a
    /// norm does not undo it: `P <- (1 - lr w) P'` for the elements with `P U > 0`, where `P` is
    /// the parameter before the step and `P'` after it and its parts (modded-nanogpt's third track,
    /// <https://github.com/KellerJordan/modded-nanogpt>, pull request 328, June 2026).
    CautiousAfter(Schedule),
    /// `P <- (1 - w) P`: the decay does not follow the learning rate
    /// (<https://github.com/NVIDIA-NeMo/Emerging-Optimizers>).
    Independent(Schedule),
    /// `P <- (1 - lr^2 w) P`, with the learning rate before it is scaled: in a schedule, decay
    /// fades with the square of the rate (Chowdhery et al., <https://arxiv.org/abs/2204.02311>).
    SquaredRate(Schedule),
    /// `G <- G + w P` before the momentum, after the gradient is clipped: the gradient of
    /// `w |P|^2 / 2` (L2 regularisation, `weight_decay` of PyTorch's SGD).
    Coupled(Schedule),
}

impl From<f64> for WeightDecay {
    fn from(rate: f64) -> Self {
        Self::Decoupled(rate.into())
    }
}

impl From<Schedule> for WeightDecay {
    fn from(rate: Schedule) -> Self {
        Self::Decoupled(rate)
    }
}

impl WeightDecay {
    /// The same kind of decay at a constant rate.
    pub(crate) fn at_rate(&self, rate: f64) -> Self {
        let rate = Schedule::constant(rate);
        match self {
            Self::Decoupled(_) => Self::Decoupled(rate),
            Self::Cautious(_) => Self::Cautious(rate),
            Self::CautiousScaled(_) => Self::CautiousScaled(rate),
            Self::CautiousAfter(_) => Self::CautiousAfter(rate),
            Self::Independent(_) => Self::Independent(rate),
            Self::SquaredRate(_) => Self::SquaredRate(rate),
            Self::Coupled(_) => Self::Coupled(rate),
        }
    }

    /// Returns the rate `w` over the steps of a run.
    pub fn rate(&self) -> &Schedule {
        match self {
            Self::Decoupled(rate)
            | Self::Cautious(rate)
            | Self::CautiousScaled(rate)
            | Self::CautiousAfter(rate)
            | Self::Independent(rate)
            | Self::SquaredRate(rate)
            | Self::Coupled(rate) => rate,
        }
    }
}

/// The size of a parameter's step, `P <- decay P - lr U`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSize {
    /// The factor on the old values.
    pub decay: f64,
    /// The factor on the update.
    pub lr: f64,
    /// `true` if only old values whose sign is not opposed to the update's are decayed.
    pub cautious: bool,
    /// The factor on the old values that are added to the gradient.
    pub coupled: f64,
    /// The share of the new values that is taken off after the parts, where they agree with the
    /// update.
    pub after: f64,
}

impl StepSize {
    /// The step size at a learning rate, at step `time` of the parameter. `scale` applies to the
    /// update, and not to decoupled weight decay.
    pub fn new(lr: f64, scale: f64, weight_decay: &WeightDecay, time: usize) -> Self {
        let scaled = lr * scale;
        let rate = weight_decay.rate().at(time);
        let (decayed_at, cautious) = match weight_decay {
            WeightDecay::Decoupled(_) => (lr, false),
            WeightDecay::Cautious(_) => (lr, true),
            WeightDecay::CautiousScaled(_) => (scaled, true),
            // At a rate of 1, since this decay does not follow the learning rate.
            WeightDecay::Independent(_) => (1.0, false),
            WeightDecay::SquaredRate(_) => (lr * lr, false),
            // The first has been added to the gradient, and the second comes after the parts.
            WeightDecay::Coupled(_) | WeightDecay::CautiousAfter(_) => (0.0, false),
        };
        let coupled = if matches!(weight_decay, WeightDecay::Coupled(_)) { rate } else { 0.0 };
        let after = match weight_decay {
            WeightDecay::CautiousAfter(_) => lr * rate,
            _ => 0.0,
        };
        Self { decay: decay(decayed_at, rate), lr: scaled, cautious, coupled, after }
    }

    /// The step size of decoupled weight decay at a constant rate.
    pub fn decoupled(lr: f64, rate: f64) -> Self {
        Self { decay: decay(lr, rate), lr, cautious: false, coupled: 0.0, after: 0.0 }
    }
}

/// The factor on old values.
fn decay(lr: f64, rate: f64) -> f64 {
    1.0 - lr * rate
}

/// Fails for a learning rate that would make parameters NaN or infinite, or move them away from the
/// minimum.
pub(crate) fn ensure_rate(lr: f64) -> Result<()> {
    // In float32, the type of the smallest range that rates are applied in.
    match (lr as f32).is_finite() && lr >= 0.0 {
        true => Ok(()),
        false => Err(Error::usage(
            "the learning rate is invalid",
            "a finite number, zero or more",
            lr,
            "look for a division by zero in its schedule; to maximise, negate the loss",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_decay_depends_on_the_method() {
        let size = |decay: WeightDecay| {
            let size = StepSize::new(0.1, 4.0, &decay, 0);
            assert_eq!(size.after, 0.0);
            (size.decay, size.lr, size.cautious, size.coupled)
        };
        let rate = || Schedule::constant(0.25);
        assert_eq!(size(WeightDecay::Decoupled(rate())), (0.975, 0.4, false, 0.0));
        assert_eq!(size(WeightDecay::Cautious(rate())), (0.975, 0.4, true, 0.0));
        assert_eq!(size(WeightDecay::CautiousScaled(rate())), (0.9, 0.4, true, 0.0));
        assert_eq!(size(WeightDecay::Independent(rate())), (0.75, 0.4, false, 0.0));
        assert_eq!(size(WeightDecay::SquaredRate(rate())), (0.9975, 0.4, false, 0.0));
        assert_eq!(size(WeightDecay::Coupled(rate())), (1.0, 0.4, false, 0.25));
        let after = StepSize::new(0.1, 4.0, &WeightDecay::CautiousAfter(rate()), 0);
        assert_eq!((after.decay, after.lr, after.after), (1.0, 0.4, 0.025));
        assert_eq!(WeightDecay::from(0.25), WeightDecay::Decoupled(rate()));
    }
}
