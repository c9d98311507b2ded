//! NorMuon's variance reduction (Li et al., <https://arxiv.org/abs/2510.05491>).

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;

/// Name of the second moment in records.
pub(super) const SECOND_MOMENT: &str = "second_moment";

/// Least norm that is scaled up, as in nanochat.
const LEAST_NORM: f64 = 1e-10;

/// Divides the result of the iteration by the root of a second moment `v`, and scales the quotient
/// to the Frobenius norm before the division (Li et al., <https://arxiv.org/abs/2510.05491>).
///
/// The second moment is the moving average of the squares, averaged over one dimension of the
/// matrix. It starts at zero, without bias correction, and is float32 (float64 for float64
/// parameters).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NorMuon {
    /// Decay of the second moment, in `[0, 1)`; 0.95 in the paper, 0.9 in nanochat.
    pub beta_2: f64,
    /// Guard of the division, zero or more; 1e-10 by default.
    pub epsilon: f64,
    /// The dimension over which squares are averaged.
    pub averaged: Averaged,
}

/// The dimension over which [`NorMuon`] averages squares, and the form of its division.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Averaged {
    /// The shorter dimension: one moment for each index of the longer one, or for each output of a
    /// square matrix. The divisor is `sqrt(max(v, epsilon))`, as in
    /// <https://github.com/karpathy/nanochat>.
    ShorterDimension,
    /// The inputs: one moment for each output, as in the paper and in
    /// <https://github.com/microsoft/dion>. The divisor is `sqrt(v) + epsilon`.
    Inputs,
}

impl NorMuon {
    /// Makes the part of nanochat with a decay of the second moment, in `[0, 1)`: one moment for
    /// each index of the longer dimension.
    pub fn new(beta_2: f64) -> Self {
        Self { beta_2, epsilon: 1e-10, averaged: Averaged::ShorterDimension }
    }

    /// Makes the part of the paper with a decay of the second moment, in `[0, 1)`: one moment for
    /// each output.
    pub fn per_output(beta_2: f64) -> Self {
        Self { averaged: Averaged::Inputs, ..Self::new(beta_2) }
    }

    /// Sets the guard of the division, zero or more.
    pub fn with_epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }

    /// The dimension of a batch `[k, m, n]` over which squares are averaged.
    fn dimension(&self, matrices: Matrices) -> usize {
        let [m, n] = matrices.shape;
        match self.averaged {
            Averaged::ShorterDimension if m < n => 1,
            Averaged::ShorterDimension if m > n => 2,
            Averaged::ShorterDimension | Averaged::Inputs => matrices.along_output(),
        }
    }

    /// The divisor for second moments.
    fn divisor(&self, moments: Tensor<3>) -> Tensor<3> {
        match self.averaged {
            Averaged::ShorterDimension => moments.clamp_min(self.epsilon).sqrt(),
            Averaged::Inputs => moments.sqrt().add_scalar(self.epsilon),
        }
        // An `epsilon` of zero is allowed, and a moment may be zero.
        .clamp_min(f32::MIN_POSITIVE)
    }
}

impl From<NorMuon> for Part {
    fn from(part: NorMuon) -> Self {
        Self::NorMuon(part)
    }
}

impl Behaviour for NorMuon {
    fn name(&self) -> &'static str {
        "NorMuon"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::After]
    }

    fn check(&self) -> Result<()> {
        ensure_decay("NorMuon.beta_2", self.beta_2)?;
        ensure_size("NorMuon.epsilon", self.epsilon)
    }

    fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        let extent = if self.dimension(matrices) == 2 { Extent::Row } else { Extent::Column };
        vec![Slot { name: SECOND_MOMENT, extent, dtype: SlotDtype::Precise }]
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let mean = x.clone().square().mean_dim(self.dimension(context.known.matrices));
        let moments = context.advance(state, SECOND_MOMENT, mean.dims(), |old| {
            old.mul_scalar(self.beta_2) + mean.clone().mul_scalar(1.0 - self.beta_2)
        });
        let factor = self.divisor(moments).recip();
        // Norms before and after, up to the root of the averaged dimension, which is in both.
        let before = mean.clone().sum_dims(&[1, 2]).sqrt();
        let after = (mean * factor.clone().square()).sum_dims(&[1, 2]).sqrt();
        x * factor * (before / after.clamp_min(LEAST_NORM))
    }
}
