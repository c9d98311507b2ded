//! A lookahead along the average of the last steps.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;
use crate::schedule::Schedule;

/// Names of its state in records: the average of every element, and the lookahead of every matrix.
pub(super) const AVERAGE: &str = "average_step";
pub(super) const LOOKAHEAD: &str = "lookahead";

/// Takes gradients at a point ahead, along a moving average of the last steps (Yau et al.,
/// "EMA-Nesterov", <https://arxiv.org/abs/2605.25395>).
///
/// The parameter `y = x + b m` is the point ahead of `x`. A step moves it to the new `x`, the
/// average to `m <- d m + (1 - d) (x' - x)`, for the old `x` and the new `x'`, and the parameter to
/// `x' + b' m`, where `b'` is the lookahead of the next step. Weight decay is part of the step.
///
/// Let the lookahead end at zero, so that the run ends at `x`. Where it is not zero, an evaluation
/// sees the point ahead. The source of the 39th result of modded-nanogpt's track 3 (pull request
/// 308, May 2026) has a decay of 0.99, and a lookahead of 0.6 times the share of the highest
/// learning rate from step 500 to 2400 of 3125, and zero before and after. It wraps the optimizer
/// of the whole model, and so moves all parameters. The part moves the matrices that Muon updates
/// alone: embeddings, the head and vectors are not ahead.
///
/// The average is float32 (float64 for float64 parameters), and as large as the momentum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EmaNesterov {
    /// The decay `d` of the average, in `[0, 1)`: 0.99 in the source.
    pub decay: f64,
    /// The lookahead `b` over the steps of a run, zero or more.
    pub lookahead: Schedule,
}

impl EmaNesterov {
    /// Makes the part with a lookahead over the steps of a run, and the decay of the source.
    pub fn new(lookahead: Schedule) -> Self {
        Self { decay: 0.99, lookahead }
    }

    /// Sets the decay of the average, in `[0, 1)`.
    pub fn with_decay(self, decay: f64) -> Self {
        Self { decay, ..self }
    }
}

impl From<EmaNesterov> for Part {
    fn from(part: EmaNesterov) -> Self {
        Self::EmaNesterov(part)
    }
}

impl Behaviour for EmaNesterov {
    fn name(&self) -> &'static str {
        "EMA-Nesterov"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Parameter]
    }

    fn check(&self) -> Result<()> {
        ensure_decay("EmaNesterov.decay", self.decay)?;
        let mut lookaheads = self.lookahead.extremes();
        lookaheads.try_for_each(|lookahead| ensure_size("EmaNesterov.lookahead", lookahead))
    }

    fn reads(&self, quantity: Quantity) -> bool {
        matches!(quantity, Quantity::Old | Quantity::NextOfSchedule)
    }

    fn schedule(&self) -> Option<&Schedule> {
        Some(&self.lookahead)
    }

    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        let slot = |name, extent| Slot { name, extent, dtype: SlotDtype::Precise };
        vec![slot(AVERAGE, Extent::Element), slot(LOOKAHEAD, Extent::Matrix)]
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let of_matrices = [x.dims()[0], 1, 1];
        let moved = x.clone() - context.read(&context.known.old);
        // Stored, since the next step of a matrix may be a skipped one.
        let lookahead = state.get(LOOKAHEAD).clone().cast(context.dtype).reshape(of_matrices);
        let average = context.advance(state, AVERAGE, x.dims(), |average| {
            let step = moved + average.clone() * lookahead;
            average.mul_scalar(self.decay) + step.mul_scalar(1.0 - self.decay)
        });
        let next = context.read(&context.known.next_of_schedule);
        let next = context.advance(state, LOOKAHEAD, of_matrices, |_| next);
        x + average * next
    }
}
