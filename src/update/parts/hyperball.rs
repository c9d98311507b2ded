//! Hyperball: parameters of a constant Frobenius norm.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage, frobenius};
use crate::error::{Error, Result};

/// Name of the initial norm in records.
pub(super) const RADIUS: &str = "radius";

/// Least norm that is scaled up.
const LEAST_NORM: f64 = 1e-10;

/// Keeps every matrix at a Frobenius norm, the radius `R`: the update is scaled to the norm `R`,
/// and so is the parameter after the step
/// (<https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, `MuonHyperball`).
///
/// The learning rate then is the angle of a step, so `lr_scale` and `lr_factor` have no effect.
/// Weight decay that scales the parameter would only change that angle: `Decoupled`, `Independent`
/// and `SquaredRate` have to be zero. A matrix of zeros has no initial radius and stays zero.
///
/// ```
/// use distmuon::MuonConfig;
/// use distmuon::parts::{Hyperball, Radius};
///
/// let part = Hyperball::initial(); // or `Hyperball::fixed(8.0)`
/// assert_eq!(part.radius, Radius::Initial);
/// let config = MuonConfig::new().with_parts(vec![part.into()]).with_weight_decay(0.0.into());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Hyperball {
    /// The norm of the matrices.
    pub radius: Radius,
}

/// The norm at which [`Hyperball`] keeps a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Radius {
    /// The norm of the matrix before its first step, of which the state has one value for every
    /// matrix.
    Initial,
    /// The same norm for all matrices, larger than zero.
    Fixed(f64),
}

impl Hyperball {
    /// Keeps every matrix at the norm that it has before its first step.
    pub fn initial() -> Self {
        Self { radius: Radius::Initial }
    }

    /// Keeps all matrices at one norm, larger than zero.
    pub fn fixed(radius: f64) -> Self {
        Self { radius: Radius::Fixed(radius) }
    }

    /// The norm of every matrix, `[k, 1, 1]` or `[1, 1, 1]`.
    fn norms(&self, like: &Tensor<3>, state: &Slots) -> Tensor<3> {
        match self.radius {
            Radius::Initial => {
                state.get(RADIUS).clone().cast(like.dtype()).reshape([like.dims()[0], 1, 1])
            }
            Radius::Fixed(radius) => {
                Tensor::full([1, 1, 1], radius, (&like.device(), like.dtype()))
            }
        }
    }
}

impl From<Hyperball> for Part {
    fn from(part: Hyperball) -> Self {
        Self::Hyperball(part)
    }
}

impl Behaviour for Hyperball {
    fn name(&self) -> &'static str {
        "hyperball"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::After, Stage::Parameter]
    }

    fn check(&self) -> Result<()> {
        match self.radius {
            Radius::Fixed(radius) if !(radius.is_finite() && radius > 0.0) => {
                Err(Error::setting("Hyperball.radius", radius, "a finite number above zero"))
            }
            Radius::Initial | Radius::Fixed(_) => Ok(()),
        }
    }

    fn reads(&self, quantity: Quantity) -> bool {
        quantity == Quantity::OldNorm && self.radius == Radius::Initial
    }

    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        let initial = Slot { name: RADIUS, extent: Extent::Matrix, dtype: SlotDtype::Precise };
        (self.radius == Radius::Initial).then_some(initial).into_iter().collect()
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        // The step multiplies by the scale.
        let scale = if context.stage == Stage::After { context.known.scale } else { 1.0 };
        if context.stage == Stage::After && self.radius == Radius::Initial {
            let before = context.read(&context.known.old_norm);
            context.advance(state, RADIUS, before.dims(), |old| {
                // Zero stands for a radius that was not measured yet.
                let is_first = old.clone().equal_elem(0.0);
                old.mask_where(is_first, before)
            });
        }
        let norm = frobenius(x.clone()).mul_scalar(scale).clamp_min(LEAST_NORM);
        let radius = self.norms(&x, state);
        x * (radius / norm)
    }
}
