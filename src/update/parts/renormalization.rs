//! Renormalisation to a Frobenius norm.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Stage};
use crate::error::{Error, Result};

/// Least norm that is scaled up. Orthogonal matrices have a norm of at least 1; a matrix of zeros
/// stays zero.
const LEAST_NORM: f64 = 1e-10;

/// Scales the result of the iteration, `m` by `n`, to a Frobenius norm, as Muon+ does
/// (<https://arxiv.org/abs/2602.21545>).
///
/// ```
/// use distmuon::parts::{Renormalization, TargetNorm};
/// use distmuon::{LrScale, MuonConfig};
///
/// let part = Renormalization::rms(0.2);
/// assert_eq!(part.target, TargetNorm::Rms(0.2));
/// let config = MuonConfig::new().with_parts(vec![part.into()]).with_lr_scale(LrScale::None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Renormalization {
    /// The norm after the part.
    pub target: TargetNorm,
}

/// A Frobenius norm of matrices `m` by `n`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TargetNorm {
    /// The norm of an orthogonal matrix, `sqrt(min(m, n))`.
    Orthogonal,
    /// The norm of elements with this root mean square, larger than zero: `r sqrt(m n)`.
    Rms(f64),
    /// The same for all shapes, larger than zero.
    Frobenius(f64),
}

impl Renormalization {
    /// Scales to the norm of an orthogonal matrix, as in <https://github.com/karpathy/nanochat>:
    /// singular values that the iteration left below or above 1 then do not change the size of the
    /// update.
    pub fn orthogonal() -> Self {
        Self { target: TargetNorm::Orthogonal }
    }

    /// Scales to a root mean square of the elements, larger than zero. With 0.2 and
    /// [`LrScale::None`](crate::LrScale::None), updates have AdamW's size exactly (Si et al.,
    /// <https://arxiv.org/abs/2507.11005>).
    pub fn rms(rms: f64) -> Self {
        Self { target: TargetNorm::Rms(rms) }
    }

    /// Scales to a Frobenius norm, larger than zero.
    pub fn frobenius(norm: f64) -> Self {
        Self { target: TargetNorm::Frobenius(norm) }
    }
}

impl From<Renormalization> for Part {
    fn from(part: Renormalization) -> Self {
        Self::Renormalization(part)
    }
}

impl TargetNorm {
    fn of(self, [m, n]: [usize; 2]) -> f64 {
        match self {
            Self::Orthogonal => (m.min(n) as f64).sqrt(),
            Self::Rms(rms) => rms * ((m * n) as f64).sqrt(),
            Self::Frobenius(norm) => norm,
        }
    }
}

impl Behaviour for Renormalization {
    fn name(&self) -> &'static str {
        "renormalisation"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::After]
    }

    fn check(&self) -> Result<()> {
        match self.target {
            TargetNorm::Rms(size) | TargetNorm::Frobenius(size)
                if !(size.is_finite() && size > 0.0) =>
            {
                Err(Error::setting("Renormalization.target", size, "a finite number above zero"))
            }
            TargetNorm::Orthogonal | TargetNorm::Rms(_) | TargetNorm::Frobenius(_) => Ok(()),
        }
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        // Without `by_largest`, since elements are about 1 after the iteration.
        let norm = x.clone().square().sum_dims(&[1, 2]).sqrt().clamp_min(LEAST_NORM);
        x * norm.recip().mul_scalar(self.target.of(context.known.matrices.shape))
    }
}
