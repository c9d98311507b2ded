//! NAMO's second moment of gradient norms.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;

/// Name of the root of the second moment in records.
pub(super) const SECOND_MOMENT: &str = "gradient_norm";
/// Name of the sum of the weights of all squared norms in the second moment, in records.
pub(super) const WEIGHT: &str = "gradient_norm_weight";

/// Scales the result of the iteration by `|U| / (sqrt(v) + epsilon)`, where `U` is what was
/// orthogonalised and `v` the moving average of the squared norm of the gradients. The update
/// shrinks where gradients contradict each other. This is NAMO, in the form of
/// <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>.
///
/// The second moment is one value for every matrix, which starts at zero. Its root is stored, in
/// float32 (float64 for float64 parameters), since squares of large gradients are infinite.
///
/// The paper corrects the bias of both moments (<https://arxiv.org/abs/2602.17080>),
/// so that the first update has the size of a later one; Emerging-Optimizers corrects neither. Here
/// [`with_bias_correction`](Self::with_bias_correction) and
/// [`MomentumConfig::bias_correction`](crate::MomentumConfig::bias_correction) are either both set
/// or both not: the momentum's alone would make the first update `1 / sqrt(1 - beta_2)` times as
/// large. The paper also scales the weight decay by the factor, which this part does not.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Namo {
    /// Decay of the second moment, in `[0, 1)`.
    pub beta_2: f64,
    /// Summand of the root, zero or more; 1e-30 by default. The 1e-8 of the source is larger than
    /// the gradients that a clip of the global norm may leave.
    pub epsilon: f64,
    /// `true` to divide the second moment by the sum of the weights that the squared norms have in
    /// it, `1 - beta_2^t` after `t` steps. Steps that a parameter skips do not count.
    #[serde(default)]
    pub bias_correction: bool,
}

impl Namo {
    /// Makes the part with a decay of the second moment, in `[0, 1)`.
    pub fn new(beta_2: f64) -> Self {
        Self { beta_2, epsilon: 1e-30, bias_correction: false }
    }

    /// Sets the summand of the root, zero or more.
    pub fn with_epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }

    /// Sets whether the bias of the second moment is corrected.
    pub fn with_bias_correction(self, bias_correction: bool) -> Self {
        Self { bias_correction, ..self }
    }
}

impl From<Namo> for Part {
    fn from(part: Namo) -> Self {
        Self::Namo(part)
    }
}

impl Behaviour for Namo {
    fn name(&self) -> &'static str {
        "NAMO"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::After]
    }

    fn check(&self) -> Result<()> {
        ensure_decay("Namo.beta_2", self.beta_2)?;
        ensure_size("Namo.epsilon", self.epsilon)
    }

    fn reads(&self, quantity: Quantity) -> bool {
        matches!(quantity, Quantity::GradientNorm | Quantity::UpdateNorm)
    }

    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        let slot = |name| Slot { name, extent: Extent::Matrix, dtype: SlotDtype::Precise };
        [slot(SECOND_MOMENT)]
            .into_iter()
            .chain(self.bias_correction.then(|| slot(WEIGHT)))
            .collect()
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let gradient = context.read(&context.known.gradient_norm);
        let update = context.read(&context.known.update_norm);
        let root = context.advance(state, SECOND_MOMENT, gradient.dims(), |old| {
            // Relative to the larger of both, whose square neither overflows nor underflows.
            let largest = old.clone().max_pair(gradient.clone()).clamp_min(f32::MIN_POSITIVE);
            let square = |norm: Tensor<3>| (norm / largest.clone()).square();
            let moment = square(old).mul_scalar(self.beta_2)
                + square(gradient.clone()).mul_scalar(1.0 - self.beta_2);
            moment.sqrt() * largest
        });
        let root = if self.bias_correction {
            let weight = context.advance(state, WEIGHT, gradient.dims(), |old| {
                old.mul_scalar(self.beta_2).add_scalar(1.0 - self.beta_2)
            });
            // Zero before the first step that is not skipped, whose update is zero.
            root / weight.sqrt().clamp_min(f32::MIN_POSITIVE)
        } else {
            root
        };
        x * (update / root.add_scalar(self.epsilon).clamp_min(f32::MIN_POSITIVE))
    }
}
