//! The signs of the momentum.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Stage};

/// Gives the iteration the signs of the momentum in place of its values: 1, -1, or 0 for zero.
///
/// AdaMuon orthogonalises signs, so that its second moments do not depend on the size of gradients
/// (Si et al., algorithm 1, <https://arxiv.org/abs/2507.11005>). The paper's update is
/// `vec![Sign.into(), AdaMuon::new(beta).into(), Renormalization::rms(0.2).into()]` with
/// [`LrScale::None`](crate::LrScale::None) and without Nesterov.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sign;

impl From<Sign> for Part {
    fn from(part: Sign) -> Self {
        Self::Sign(part)
    }
}

impl Behaviour for Sign {
    fn name(&self) -> &'static str {
        "sign"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Before]
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, _context: &Context<'_>) -> Tensor<3> {
        x.sign()
    }
}
