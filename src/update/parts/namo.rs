//! NAMO's second moment of gradient norms.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::{Error, Result};

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
///
/// [`per_input`](Self::per_input) is the paper's NAMO-D, with a factor for each input.
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
    /// `Some(c)` to take the norms of the weights of each input in place of the whole matrix, and
    /// to limit the factors of inputs to `[c f, f / c]` for their mean `f`; `c` from 0, for no
    /// limit, to 1. 0.75 in the source (`NAMO_D` of <https://github.com/minxin-zhg/namo>, whose
    /// columns are inputs).
    #[serde(default)]
    pub per_input: Option<f64>,
}

impl Namo {
    /// Makes the part with a decay of the second moment, in `[0, 1)`.
    pub fn new(beta_2: f64) -> Self {
        Self { beta_2, epsilon: 1e-30, bias_correction: false, per_input: None }
    }

    /// Makes the part with a factor for each input, of a decay of the second moment, in `[0, 1)`,
    /// and a limit of the factors, from 0 to 1.
    pub fn per_input(beta_2: f64, limit: f64) -> Self {
        Self { per_input: Some(limit), ..Self::new(beta_2) }
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
        if let Some(limit) = self.per_input.filter(|limit| !(0.0..=1.0).contains(limit)) {
            return Err(Error::setting("Namo.per_input", limit, "a number from 0 to 1"));
        }
        ensure_size("Namo.epsilon", self.epsilon)
    }

    fn reads(&self, quantity: Quantity) -> bool {
        match self.per_input {
            None => matches!(quantity, Quantity::GradientNorm | Quantity::UpdateNorm),
            Some(_) => {
                matches!(quantity, Quantity::GradientInputNorms | Quantity::UpdateInputNorms)
            }
        }
    }

    fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        let slot = |name, extent| Slot { name, extent, dtype: SlotDtype::Precise };
        let extent = match (self.per_input, matrices.along_input()) {
            (None, _) => Extent::Matrix,
            (Some(_), 2) => Extent::Row,
            (Some(_), _) => Extent::Column,
        };
        let weight = self.bias_correction.then(|| slot(WEIGHT, Extent::Matrix));
        [slot(SECOND_MOMENT, extent)].into_iter().chain(weight).collect()
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let known = context.known;
        let (gradient, update) = match self.per_input {
            None => (&known.gradient_norm, &known.update_norm),
            Some(_) => (&known.gradient_input_norms, &known.update_input_norms),
        };
        let (gradient, update) = (context.read(gradient), context.read(update));
        let root = context.advance(state, SECOND_MOMENT, gradient.dims(), |old| {
            // Relative to the larger of both, whose square neither overflows nor underflows.
            let largest = old.clone().max_pair(gradient.clone()).clamp_min(f32::MIN_POSITIVE);
            let square = |norm: Tensor<3>| (norm / largest.clone()).square();
            let moment = square(old).mul_scalar(self.beta_2)
                + square(gradient.clone()).mul_scalar(1.0 - self.beta_2);
            moment.sqrt() * largest
        });
        let root = if self.bias_correction {
            let of_matrices = [x.dims()[0], 1, 1];
            let weight = context.advance(state, WEIGHT, of_matrices, |old| {
                old.mul_scalar(self.beta_2).add_scalar(1.0 - self.beta_2)
            });
            // Zero before the first step that is not skipped, whose update is zero.
            root / weight.sqrt().clamp_min(f32::MIN_POSITIVE)
        } else {
            root
        };
        let factor = update / root.add_scalar(self.epsilon).clamp_min(f32::MIN_POSITIVE);
        x * match self.per_input.filter(|limit| *limit > 0.0) {
            Some(limit) => limited(factor, limit),
            None => factor,
        }
    }
}

/// Factors of inputs within a limit of their mean.
fn limited(factors: Tensor<3>, limit: f64) -> Tensor<3> {
    let mean = factors.clone().mean_dim(1).mean_dim(2).expand(factors.dims());
    factors.max_pair(mean.clone().mul_scalar(limit)).min_pair(mean.div_scalar(limit))
}
