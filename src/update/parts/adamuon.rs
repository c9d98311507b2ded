//! AdaMuon's second moment (Si et al., <https://arxiv.org/abs/2507.11005>), in the form of NVIDIA's
//! Emerging-Optimizers, which takes no sign of the momentum before the iteration.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;

/// Name of the second moment in records.
pub(super) const SECOND_MOMENT: &str = "element_moment";

/// Divides every element of the result of the iteration by the root of its second moment,
/// `sqrt(V) + epsilon` (Si et al., <https://arxiv.org/abs/2507.11005>).
///
/// The second moment is the moving average of the squares. It starts at zero, without bias
/// correction, and is float32 (float64 for float64 parameters): as large as the momentum. The
/// quotient is larger than the result of the iteration. With
/// [`Renormalization::rms(0.2)`](super::Renormalization::rms) after it and
/// [`LrScale::None`](crate::LrScale::None), its size is the paper's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AdaMuon {
    /// Decay of the second moment, in `[0, 1)`.
    pub beta_2: f64,
    /// Summand of the root, zero or more; 1e-8 by default.
    pub epsilon: f64,
}

impl AdaMuon {
    /// Makes the part with a decay of the second moment, in `[0, 1)`.
    pub fn new(beta_2: f64) -> Self {
        Self { beta_2, epsilon: 1e-8 }
    }

    /// Sets the summand of the root, zero or more.
    pub fn with_epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }
}

impl From<AdaMuon> for Part {
    fn from(part: AdaMuon) -> Self {
        Self::AdaMuon(part)
    }
}

impl Behaviour for AdaMuon {
    fn name(&self) -> &'static str {
        "AdaMuon"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::After]
    }

    fn check(&self) -> Result<()> {
        ensure_decay("AdaMuon.beta_2", self.beta_2)?;
        ensure_size("AdaMuon.epsilon", self.epsilon)
    }

    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        vec![Slot { name: SECOND_MOMENT, extent: Extent::Element, dtype: SlotDtype::Precise }]
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let squares = x.clone().square().mul_scalar(1.0 - self.beta_2);
        let moment = context
            .advance(state, SECOND_MOMENT, x.dims(), |old| old.mul_scalar(self.beta_2) + squares);
        // An element that was never anything but zero stays zero, also without a summand.
        x / moment.sqrt().add_scalar(self.epsilon).clamp_min(f32::MIN_POSITIVE)
    }
}
