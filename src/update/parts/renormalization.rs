//! Renormalisation, as in <https://github.com/karpathy/nanochat>.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Stage};

/// Least norm that is scaled up. Orthogonal matrices have a norm of at least 1; a matrix of zeros
/// stays zero.
const LEAST_NORM: f64 = 1e-10;

/// Scales the result of the iteration, `m` by `n`, to the Frobenius norm of an orthogonal matrix,
/// `sqrt(min(m, n))`, as in <https://github.com/karpathy/nanochat>. Singular values that the
/// iteration left below or above 1 then do not change the size of the update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Renormalization;

impl From<Renormalization> for Part {
    fn from(part: Renormalization) -> Self {
        Self::Renormalization(part)
    }
}

impl Behaviour for Renormalization {
    fn name(&self) -> &'static str {
        "renormalisation"
    }

    fn stage(&self) -> Stage {
        Stage::After
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let [m, n] = context.matrices.shape;
        let norm = x.clone().square().sum_dims(&[1, 2]).sqrt().clamp_min(LEAST_NORM);
        x * norm.recip().mul_scalar((m.min(n) as f64).sqrt())
    }
}
