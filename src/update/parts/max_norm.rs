//! An upper limit of the norm of parameters.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Stage, frobenius};
use crate::error::{Error, Result};

/// Scales a matrix whose Frobenius norm is larger than a limit down to that limit, after the step:
/// the projection on the ball of that radius (Parikh and Boyd, "Proximal Algorithms", 2014, section
/// 6.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MaxNorm {
    /// The largest Frobenius norm, larger than zero.
    pub limit: f64,
}

impl MaxNorm {
    /// Makes the part with the largest Frobenius norm, larger than zero.
    pub fn new(limit: f64) -> Self {
        Self { limit }
    }
}

impl From<MaxNorm> for Part {
    fn from(part: MaxNorm) -> Self {
        Self::MaxNorm(part)
    }
}

impl Behaviour for MaxNorm {
    fn name(&self) -> &'static str {
        "max norm"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Parameter]
    }

    fn check(&self) -> Result<()> {
        match self.limit.is_finite() && self.limit > 0.0 {
            true => Ok(()),
            false => Err(Error::setting("MaxNorm.limit", self.limit, "a finite number above zero")),
        }
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, _context: &Context<'_>) -> Tensor<3> {
        let norm = frobenius(x.clone());
        // A matrix of zeros has an infinite quotient, which the clamp to 1 makes harmless.
        x * norm.recip().mul_scalar(self.limit).clamp_max(1.0)
    }
}
