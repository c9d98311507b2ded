//! Muown's parameters: a magnitude and a direction of every output.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage, norms_along};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;

/// Names of its state in records: of every output, and of every matrix.
pub(super) const MAGNITUDE: &str = "magnitude";
pub(super) const DIRECTION_NORM: &str = "direction_norm";
pub(super) const MAGNITUDE_GRADIENT: &str = "magnitude_gradient";
pub(super) const MOMENTS: [&str; 2] = ["magnitude_moment_1", "magnitude_moment_2"];
pub(super) const WEIGHTS: [&str; 2] = ["magnitude_weight_1", "magnitude_weight_2"];

/// Trains the magnitudes of outputs and their directions apart (Lion et al., "Muown: Row-Norm
/// Control for Muon Optimization", <https://arxiv.org/abs/2605.10797>).
///
/// A row of the parameter, the weights of one output, is `g v / |v|`. Muon updates the direction
/// `v` by its part of the gradient, which is orthogonal to `v`, and Adam the magnitude `g` by the
/// rest, with the same learning rate. Norms of rows then grow only as far as the magnitudes do. The
/// rows of a parameter that starts at zero stay zero.
///
/// The form is `Muown` of <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, read in November
/// 2026, which has no Nesterov. The part has a weight decay of its own, and
/// [`MuonConfig::weight_decay`] has to be zero.
///
/// [`MuonConfig::weight_decay`]: crate::MuonConfig::weight_decay
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Muown {
    /// Decays of Adam's moments, in `[0, 1)`: 0.9 and 0.95 in the source.
    pub betas: [f64; 2],
    /// Constant that is added to the root of the second moment, zero or more: 1e-8 in the source.
    pub epsilon: f64,
    /// Decay of the magnitudes, `g <- (1 - lr w) g` after their step: 0 in the source.
    pub weight_decay: f64,
}

impl Muown {
    /// Makes the part with the settings of the source.
    pub fn new() -> Self {
        Self { betas: [0.9, 0.95], epsilon: 1e-8, weight_decay: 0.0 }
    }

    /// Sets the decays of Adam's moments, in `[0, 1)`.
    pub fn with_betas(self, betas: [f64; 2]) -> Self {
        Self { betas, ..self }
    }

    /// Sets the constant that is added to the root of the second moment, zero or more.
    pub fn with_epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }

    /// Sets the decay of the magnitudes, zero or more.
    pub fn with_weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay, ..self }
    }
}

impl Default for Muown {
    fn default() -> Self {
        Self::new()
    }
}

impl From<Muown> for Part {
    fn from(part: Muown) -> Self {
        Self::Muown(part)
    }
}

/// A parameter before a step.
struct Rows {
    /// The dimension along which the weights of an output are.
    along: usize,
    /// The unit vectors of the rows; zeros for rows of zeros.
    units: Tensor<3>,
    magnitudes: Tensor<3>,
    /// The norms of `v`.
    direction_norms: Tensor<3>,
}

impl Rows {
    fn of(state: &Slots, context: &Context<'_>) -> Self {
        let along = context.known.matrices.along_output();
        let values = context.read(&context.known.old);
        let norms = norms_along(values.clone(), along);
        let stored = |slot| state.get(slot).clone().cast(context.dtype).reshape(norms.dims());
        // The sign of the stored magnitude, with the size of the row as it is: a clip of attention,
        // or the user, may have changed the row since the last step.
        let is_negative = stored(MAGNITUDE).lower_elem(0.0);
        let magnitudes = norms.clone().mask_where(is_negative, norms.clone().neg());
        // Before the first step, both are the norms of the rows.
        let direction_norms = stored(DIRECTION_NORM);
        let is_first = direction_norms.clone().equal_elem(0.0);
        let direction_norms = direction_norms.mask_where(is_first, norms);
        let units = values / or_one(magnitudes.clone());
        Self { along, units, magnitudes, direction_norms }
    }
}

/// Divisors, without zeros.
fn or_one(divisors: Tensor<3>) -> Tensor<3> {
    let is_zero = divisors.clone().equal_elem(0.0);
    divisors.mask_fill(is_zero, 1.0)
}

impl Behaviour for Muown {
    fn name(&self) -> &'static str {
        "Muown"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Gradient, Stage::Parameter]
    }

    fn check(&self) -> Result<()> {
        self.betas.iter().try_for_each(|beta| ensure_decay("Muown.betas", *beta))?;
        ensure_size("Muown.epsilon", self.epsilon)?;
        ensure_size("Muown.weight_decay", self.weight_decay)
    }

    fn reads(&self, quantity: Quantity) -> bool {
        matches!(quantity, Quantity::Old | Quantity::Lr)
    }

    fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        let extent = if matrices.along_output() == 2 { Extent::Row } else { Extent::Column };
        let slot = |extent| move |name| Slot { name, extent, dtype: SlotDtype::Precise };
        let of_outputs = [MAGNITUDE, DIRECTION_NORM, MAGNITUDE_GRADIENT, MOMENTS[0], MOMENTS[1]];
        of_outputs.map(slot(extent)).into_iter().chain(WEIGHTS.map(slot(Extent::Matrix))).collect()
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let rows = Rows::of(state, context);
        match context.stage {
            Stage::Gradient => self.direction_gradient(x, rows, state, context),
            _ => self.joined(x, rows, state, context),
        }
    }
}

impl Muown {
    /// The gradient of `v`. The gradient of `g` is kept for the end of the step.
    fn direction_gradient(
        &self,
        gradient: Tensor<3>,
        Rows { along, units, magnitudes, direction_norms }: Rows,
        state: &mut Slots,
        context: &Context<'_>,
    ) -> Tensor<3> {
        let of_magnitudes = (gradient.clone() * units.clone()).sum_dim(along);
        context.advance(state, MAGNITUDE_GRADIENT, of_magnitudes.dims(), |_| of_magnitudes.clone());
        let ratio = or_one(magnitudes) / or_one(direction_norms);
        (gradient - units * of_magnitudes) * ratio
    }

    /// The parameter `g v / |v|` after the steps of both. `stepped` is the old parameter plus the
    /// step of `v`.
    fn joined(
        &self,
        stepped: Tensor<3>,
        Rows { along, units, magnitudes, direction_norms }: Rows,
        state: &mut Slots,
        context: &Context<'_>,
    ) -> Tensor<3> {
        let lr = context.read(&context.known.lr);
        let step = stepped - context.read(&context.known.old);
        let directions = units * direction_norms + step;
        let shape = magnitudes.dims();
        let gradient = state.get(MAGNITUDE_GRADIENT).clone().cast(context.dtype).reshape(shape);
        let mut averaged = |index: usize, fresh: Tensor<3>| {
            let beta = self.betas[index];
            let average =
                |old: Tensor<3>, new: Tensor<3>| old.mul_scalar(beta) + new.mul_scalar(1.0 - beta);
            let moment = context.advance(state, MOMENTS[index], shape, |old| average(old, fresh));
            let one = Tensor::ones_like(&lr);
            let weight =
                context.advance(state, WEIGHTS[index], [shape[0], 1, 1], |old| average(old, one));
            // Zero before the first step that is not skipped.
            moment / or_one(weight)
        };
        let first = averaged(0, gradient.clone());
        let root = averaged(1, gradient.square()).sqrt().add_scalar(self.epsilon);
        let magnitudes = magnitudes - lr.clone() * first / or_one(root);
        let magnitudes = magnitudes * lr.mul_scalar(-self.weight_decay).add_scalar(1.0);
        let norms = norms_along(directions.clone(), along);
        let new = directions / or_one(norms.clone()) * magnitudes.clone();
        context.advance(state, MAGNITUDE, shape, |_| magnitudes);
        context.advance(state, DIRECTION_NORM, shape, |_| norms);
        new
    }
}
