//! MARS' correction of the gradient's variance.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage, frobenius};
use crate::checks::ensure_size;
use crate::error::Result;

/// Name of the gradient of the step before, in records.
pub(super) const PREVIOUS_GRADIENT: &str = "previous_gradient";

/// Adds `gamma mu / (1 - mu) (G - G')` to the gradient `G`, where `G'` is the gradient of the step
/// before and `mu` the momentum, and scales the sum down to a Frobenius norm of at most 1: MARS-M
/// (Liu et al., <https://arxiv.org/abs/2510.21800>; Yuan et al.,
/// <https://arxiv.org/abs/2411.10438>).
///
/// [`new`](Self::new) is the approximate form, which takes one gradient for each step. In the
/// exact form, [`exact`](Self::exact), `G'` is the gradient of this step's batch for the parameters
/// before the last step: a second backward pass computes it, and [`correct`](Self::correct) adds
/// the correction before the step.
///
/// The paper's MARS-M has a constant momentum without Nesterov, where `mu / (1 - mu)` is a constant
/// too: `MomentumConfig::from(0.95).with_nesterov(false)`. With the default momentum, which rises
/// from 0.85 to 0.95, that factor rises from 5.7 to 19.
///
/// In the approximate form, `G'` is float32 (float64 for float64 parameters), as large as the
/// momentum, and zero before the first step. The exact form has no state, but needs the parameters
/// before the last step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Mars {
    /// Strength of the correction, zero or more; 0.025 in the papers.
    pub gamma: f64,
    /// `true` for gradients that [`correct`](Self::correct) has corrected: the part then only
    /// limits their norms.
    #[serde(default)]
    pub exact: bool,
}

impl Mars {
    /// Makes the part of the approximate form with a strength of the correction, zero or more.
    pub fn new(gamma: f64) -> Self {
        Self { gamma, exact: false }
    }

    /// Makes the part of the exact form with a strength of the correction, zero or more. Every step
    /// has to be given the gradients of [`correct`](Self::correct).
    pub fn exact(gamma: f64) -> Self {
        Self { gamma, exact: true }
    }
}

impl From<Mars> for Part {
    fn from(part: Mars) -> Self {
        Self::Mars(part)
    }
}

impl Behaviour for Mars {
    fn name(&self) -> &'static str {
        "MARS"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Gradient]
    }

    fn check(&self) -> Result<()> {
        ensure_size("Mars.gamma", self.gamma)
    }

    fn reads(&self, quantity: Quantity) -> bool {
        quantity == Quantity::Keep && !self.exact
    }

    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        if self.exact {
            return vec![];
        }
        vec![Slot { name: PREVIOUS_GRADIENT, extent: Extent::Element, dtype: SlotDtype::Precise }]
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let corrected = if self.exact { x } else { self.approximate(x, state, context) };
        let norm = frobenius(corrected.clone());
        // A norm below 1 is left as it is.
        corrected / norm.clamp_min(1.0)
    }
}

impl Mars {
    /// The gradient with the change since the last step added.
    fn approximate(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let previous = state.get(PREVIOUS_GRADIENT).clone().cast(x.dtype()).reshape(x.dims());
        // The gradient without the correction, since the next step compares gradients.
        context.advance(state, PREVIOUS_GRADIENT, x.dims(), |_| x.clone());
        let mu = context.read(&context.known.keep);
        let strength = mu.clone().mul_scalar(self.gamma) / mu.neg().add_scalar(1.0);
        x.clone() + (x - previous) * strength
    }
}
