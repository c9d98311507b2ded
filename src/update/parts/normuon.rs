//! NorMuon's variance reduction (Li et al., <https://arxiv.org/abs/2510.05491>), in the form of
//! <https://github.com/karpathy/nanochat>.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Stage};
use crate::checks::ensure_decay;
use crate::error::Result;

/// Name of the second moment in records.
pub(super) const SECOND_MOMENT: &str = "second_moment";

/// Least second moment that is divided by, and least norm that is scaled up, as in nanochat.
const LEAST: f64 = 1e-10;

/// Divides the result of the iteration by the root of a second moment, and scales the quotient to
/// the Frobenius norm before the division (Li et al., <https://arxiv.org/abs/2510.05491>; here as
/// in <https://github.com/karpathy/nanochat>).
///
/// The second moment is the moving average of the squares, averaged over the shorter dimension of
/// the matrix: it has one value for each index of the longer dimension, or for each output of a
/// square matrix. It starts at zero, without bias correction, and is float32 (float64 for float64
/// parameters).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NorMuon {
    /// Decay of the second moment, in `[0, 1)`; 0.9 in nanochat.
    pub beta_2: f64,
}

impl NorMuon {
    /// Makes the part with a decay of the second moment, in `[0, 1)`.
    pub fn new(beta_2: f64) -> Self {
        Self { beta_2 }
    }
}

impl From<NorMuon> for Part {
    fn from(part: NorMuon) -> Self {
        Self::NorMuon(part)
    }
}

/// The dimension of a batch `[k, m, n]` over which squares are averaged.
fn averaged(matrices: Matrices) -> usize {
    let [m, n] = matrices.shape;
    match m.cmp(&n) {
        std::cmp::Ordering::Less => 1,
        std::cmp::Ordering::Equal => matrices.along_output(),
        std::cmp::Ordering::Greater => 2,
    }
}

impl Behaviour for NorMuon {
    fn name(&self) -> &'static str {
        "NorMuon"
    }

    fn stage(&self) -> Stage {
        Stage::After
    }

    fn check(&self) -> Result<()> {
        ensure_decay("NorMuon.beta_2", self.beta_2)
    }

    fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        let extent = if averaged(matrices) == 2 { Extent::Row } else { Extent::Column };
        vec![Slot { name: SECOND_MOMENT, extent, dtype: SlotDtype::Precise }]
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let dimension = averaged(context.matrices);
        let mean = x.clone().square().mean_dim(dimension);
        let stored = state.take(SECOND_MOMENT);
        let dtype = stored.dtype();
        let old = stored.cast(x.dtype()).reshape(mean.dims());
        let new = old.clone().mul_scalar(self.beta_2) + mean.clone().mul_scalar(1.0 - self.beta_2);
        let new = (context.mask)().select(new, old);
        state.put(SECOND_MOMENT, new.clone().reshape([-1]).cast(dtype));
        let factor = new.clamp_min(LEAST).sqrt().recip();
        // Norms before and after, up to the root of the averaged dimension, which is in both.
        let before = mean.clone().sum_dims(&[1, 2]).sqrt();
        let after = (mean * factor.clone().square()).sum_dims(&[1, 2]).sqrt();
        x * factor * (before / after.clamp_min(LEAST))
    }
}
