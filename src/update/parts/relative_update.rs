//! Floors and limits of updates, relative to the parameter.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Quantity, Stage, frobenius, norms_along};
use crate::error::{Error, Result};

/// Least norm in a floor alone, from the source's record.
const LEAST_NORM: f64 = 1e-8;
/// Least norm of an update in a ratio with a limit: `eps` of Emerging-Optimizers.
const LEAST_UPDATE: f64 = 1e-15;

/// The norms whose ratio is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RelativeTo {
    /// The Frobenius norms of every matrix.
    Matrix,
    /// The norms of the entries of every output.
    Outputs,
}

/// Keeps the ratio of an update to its parameter between a least and a largest value. The update
/// `U` has the scale of the learning rate, but not the rate itself. It is multiplied by
/// `min(max(1, least |P| / |U|), most |P| / |U|)`, where `P` is the parameter before the step. The
/// learning rate times the ratio then is the relative change of a step.
///
/// - [`floor`](Self::floor) is the u/w floor of modded-nanogpt's third track
///   (<https://github.com/KellerJordan/modded-nanogpt>, pull request 274, May 2026): 0.35 there.
/// - [`floor_per_output`](Self::floor_per_output) is its row floor (pull request 328, June 2026):
///   0.3825 there.
/// - [`exact`](Self::exact) is `RelativeUpdate` of
///   <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, with a ratio of 1 there. A parameter of
///   zeros stays zero.
///
/// ```
/// use distmuon::MuonConfig;
/// use distmuon::parts::{RelativeTo, RelativeUpdate};
///
/// let part = RelativeUpdate::floor_per_output(0.3825).with_most(Some(1.0));
/// assert_eq!(part.to, RelativeTo::Outputs); // the others are of whole matrices
/// let config = MuonConfig::new().with_parts(vec![part.into()]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RelativeUpdate {
    /// The least ratio, zero or more.
    pub least: f64,
    /// The largest ratio, at least `least`; `None` for no limit.
    pub most: Option<f64>,
    /// The norms whose ratio is kept.
    pub to: RelativeTo,
}

impl RelativeUpdate {
    /// Raises updates of matrices to a least ratio.
    pub fn floor(least: f64) -> Self {
        Self { least, most: None, to: RelativeTo::Matrix }
    }

    /// Raises the updates of every output to a least ratio.
    pub fn floor_per_output(least: f64) -> Self {
        Self { least, most: None, to: RelativeTo::Outputs }
    }

    /// Gives the updates of all matrices one ratio.
    pub fn exact(ratio: f64) -> Self {
        Self { least: ratio, most: Some(ratio), to: RelativeTo::Matrix }
    }

    /// Sets the largest ratio, `None` for no limit.
    pub fn with_most(self, most: Option<f64>) -> Self {
        Self { most, ..self }
    }

    /// Returns `true` if only the ratio decides on the norm of an update.
    pub(super) fn is_exact(&self) -> bool {
        self.to == RelativeTo::Matrix && self.most == Some(self.least)
    }
}

impl From<RelativeUpdate> for Part {
    fn from(part: RelativeUpdate) -> Self {
        Self::RelativeUpdate(part)
    }
}

impl Behaviour for RelativeUpdate {
    fn name(&self) -> &'static str {
        "relative update"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::After]
    }

    fn check(&self) -> Result<()> {
        let is_ratio = |ratio: f64| ratio.is_finite() && ratio >= 0.0;
        if !is_ratio(self.least) {
            let expected = "a finite number, zero or more";
            return Err(Error::setting("RelativeUpdate.least", self.least, expected));
        }
        match self.most {
            Some(most) if !(is_ratio(most) && most >= self.least) => {
                let expected = "a finite number, at least `least`, or `None` for no limit";
                Err(Error::setting("RelativeUpdate.most", most, expected))
            }
            _ => Ok(()),
        }
    }

    fn reads(&self, quantity: Quantity) -> bool {
        match self.to {
            RelativeTo::Matrix => quantity == Quantity::OldNorm,
            RelativeTo::Outputs => quantity == Quantity::OldOutputNorms,
        }
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let known = context.known;
        let (old, update) = match self.to {
            RelativeTo::Matrix => (context.read(&known.old_norm), frobenius(x.clone())),
            RelativeTo::Outputs => (
                context.read(&known.old_output_norms),
                norms_along(x.clone(), known.matrices.along_output()),
            ),
        };
        // The step multiplies by the scale.
        let update = update.mul_scalar(known.scale);
        let factor = match self.most {
            None => {
                let ratio = old.clamp_min(LEAST_NORM) / update.clamp_min(LEAST_NORM);
                ratio.mul_scalar(self.least).clamp_min(1.0)
            }
            Some(most) => {
                // Without a least norm of the parameter, so that a parameter of zeros stays zero.
                let ratio = old / update.clamp_min(LEAST_UPDATE);
                let floor = ratio.clone().mul_scalar(self.least).clamp_min(1.0);
                floor.min_pair(ratio.mul_scalar(most))
            }
        };
        x * factor
    }
}
