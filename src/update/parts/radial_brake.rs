//! A brake on changes of the norm of parameters.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Quantity, Stage, frobenius};
use crate::error::{Error, Result};

/// Norms and changes of norms below this are zero: `eps` of the source.
const LEAST_NORM: f64 = 1e-15;

/// Keeps a fraction of the change that a step makes of the Frobenius norm of a matrix. The matrix
/// is scaled to the norm `|P| + s (|P'| - |P|)`, where `P` is the matrix before the step and `P'`
/// after it. The source is `RadialBrakeHook` of
/// <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, read in November 2026.
///
/// Weight decay is part of the step, and its change of the norm is braked as well. The source
/// measures the first norm after decay. Without weight decay, both are the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RadialBrake {
    /// The fraction `s` for a norm that grows, from 0 to 1: 0.5 in the source.
    pub outward: f64,
    /// The fraction `s` for a norm that shrinks, from 0 to 1: 1 in the source.
    pub inward: f64,
}

impl RadialBrake {
    /// Makes the part with the fractions for a norm that grows and for one that shrinks, from 0 to
    /// 1.
    pub fn new(outward: f64, inward: f64) -> Self {
        Self { outward, inward }
    }
}

impl From<RadialBrake> for Part {
    fn from(part: RadialBrake) -> Self {
        Self::RadialBrake(part)
    }
}

impl Behaviour for RadialBrake {
    fn name(&self) -> &'static str {
        "radial brake"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Parameter]
    }

    fn check(&self) -> Result<()> {
        let fractions =
            [("RadialBrake.outward", self.outward), ("RadialBrake.inward", self.inward)];
        match fractions.into_iter().find(|(_, fraction)| !(0.0..=1.0).contains(fraction)) {
            Some((name, fraction)) => Err(Error::setting(name, fraction, "a number from 0 to 1")),
            None => Ok(()),
        }
    }

    fn reads(&self, quantity: Quantity) -> bool {
        quantity == Quantity::OldNorm
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let or_zero = |norm: Tensor<3>| {
            let is_zero = norm.clone().lower_elem(LEAST_NORM);
            norm.mask_fill(is_zero, 0.0)
        };
        let old = or_zero(context.read(&context.known.old_norm));
        let new = or_zero(frobenius(x.clone()));
        let change = new.clone() - old.clone();
        let (grows, shrinks) = (
            change.clone().greater_equal_elem(LEAST_NORM),
            change.clone().lower_equal_elem(-LEAST_NORM),
        );
        let kept =
            change.zeros_like().mask_fill(grows, self.outward).mask_fill(shrinks, self.inward);
        // A matrix whose new norm is zero stays zero.
        let factor = (old + kept * change) / new.clone().clamp_min(LEAST_NORM);
        x * factor.mask_fill(new.equal_elem(0.0), 0.0)
    }
}
