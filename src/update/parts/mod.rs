//! Optional stages of Muon's update, for [`MuonConfig::parts`](crate::MuonConfig::parts).

// Every part has a file. To add a part, write its file, and register it here: in `Part`, in
// `Part::behaviour`, and with the names of its slots in `SLOT_NAMES`.

mod adamuon;
mod combinations;
mod ema_nesterov;
mod equilibration;
mod hyperball;
mod mars;
mod max_norm;
mod momentum_mixture;
mod muown;
mod namo;
mod normuon;
mod radial_brake;
mod relative_update;
mod renormalization;
mod sign;

use std::fmt;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::state::{Slot, Slots};
use crate::backend::FiniteMask;
use crate::error::Result;
use crate::matrix_view::MatrixLayout;
use crate::schedule::Schedule;

pub use adamuon::AdaMuon;
pub(crate) use combinations::check as check_combination;
pub use ema_nesterov::EmaNesterov;
pub use equilibration::{ColumnEquilibration, RowEquilibration};
pub use hyperball::{Hyperball, Radius};
pub use mars::Mars;
pub use max_norm::MaxNorm;
pub use momentum_mixture::MomentumMixture;
pub use muown::Muown;
pub use namo::Namo;
pub use normuon::{Averaged, NorMuon};
pub use radial_brake::RadialBrake;
pub use relative_update::{RelativeTo, RelativeUpdate};
pub use renormalization::{Renormalization, TargetNorm};
pub use sign::Sign;

/// An optional stage of Muon's update, in addition to momentum, iteration and weight decay. Parts
/// run stage after stage, and within a stage in the order in which they are listed: see
/// [`stages`](Self::stages). Lists in which one part undoes another are rejected:
/// [`Hyperball`] with [`MaxNorm`], with [`RadialBrake`] or with a weight decay that only scales,
/// [`Muown`] with one of these parts or with any weight decay, [`EmaNesterov`] with any of these
/// four parts or with a decay after the parts, [`MomentumMixture`] with a momentum, a decay of
/// [`Namo`] with another weight decay, with [`Hyperball`] or [`Muown`], or after [`EmaNesterov`],
/// and a scale after the iteration ([`Renormalization`], [`Namo`], [`RelativeUpdate`] of matrices)
/// right before a part that sets the norm anew.
///
/// ```
/// use distmuon::parts::{NorMuon, Renormalization, RowEquilibration};
/// use distmuon::{Coefficients, LrScale, MuonConfig, NewtonSchulzConfig, WeightDecay};
///
/// // With the coefficients and scales of nanochat.
/// let config = MuonConfig::new()
///     .with_newton_schulz(
///         NewtonSchulzConfig::new().with_coefficients(Coefficients::PolarExpressCushioned),
///     )
///     .with_parts(vec![
///         RowEquilibration.into(),
///         Renormalization::orthogonal().into(),
///         NorMuon::new(0.9).into(),
///     ])
///     .with_lr_scale(LrScale::Original)
///     .with_weight_decay(WeightDecay::CautiousScaled(0.28.into()));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Part {
    /// Adds a correction of the variance to the gradient.
    Mars(Mars),
    /// Averages gradients over several times, in place of the momentum.
    MomentumMixture(MomentumMixture),
    /// Takes the signs of the momentum, before the iteration.
    Sign(Sign),
    /// Scales all rows to equal norms, before the iteration.
    RowEquilibration(RowEquilibration),
    /// Scales all columns to equal norms, before the iteration.
    ColumnEquilibration(ColumnEquilibration),
    /// Scales to a Frobenius norm, after the iteration.
    Renormalization(Renormalization),
    /// Equalises the sizes of the updates of neurons by a second moment, after the iteration.
    NorMuon(NorMuon),
    /// Divides every element by the root of a second moment, after the iteration.
    AdaMuon(AdaMuon),
    /// Scales by the norms of momentum and gradients, after the iteration.
    Namo(Namo),
    /// Keeps the ratio of an update to the parameter above a floor and below a limit.
    RelativeUpdate(RelativeUpdate),
    /// Keeps the parameter at a Frobenius norm.
    Hyperball(Hyperball),
    /// Limits the Frobenius norm of the parameter.
    MaxNorm(MaxNorm),
    /// Keeps a fraction of the change of the parameter's Frobenius norm.
    RadialBrake(RadialBrake),
    /// Trains magnitudes and directions of outputs apart.
    Muown(Muown),
    /// Moves the parameter ahead along an average of the last steps.
    EmaNesterov(EmaNesterov),
}

/// The position of a [`Part`] in Muon's update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Before the momentum, on the gradient.
    Gradient,
    /// Between the momentum and the iteration.
    Before,
    /// Between the iteration and the change of the parameter.
    After,
    /// After the change of the parameter, on its values.
    Parameter,
}

/// The names of all slots that parts may store. A record does not know the configuration, and is
/// read by these.
pub(crate) const SLOT_NAMES: [&str; 23] = [
    normuon::SECOND_MOMENT,
    adamuon::SECOND_MOMENT,
    namo::SECOND_MOMENT,
    namo::WEIGHT,
    mars::PREVIOUS_GRADIENT,
    hyperball::RADIUS,
    muown::MAGNITUDE,
    muown::DIRECTION_NORM,
    muown::MAGNITUDE_GRADIENT,
    muown::MOMENTS[0],
    muown::MOMENTS[1],
    muown::WEIGHTS[0],
    muown::WEIGHTS[1],
    ema_nesterov::AVERAGE,
    ema_nesterov::LOOKAHEAD,
    momentum_mixture::AVERAGES[0],
    momentum_mixture::AVERAGES[1],
    momentum_mixture::AVERAGES[2],
    momentum_mixture::AVERAGES[3],
    momentum_mixture::AVERAGES[4],
    momentum_mixture::AVERAGES[5],
    momentum_mixture::AVERAGES[6],
    momentum_mixture::AVERAGES[7],
];

/// The behaviour of a part.
trait Behaviour {
    /// The part's name, as the literature has it.
    fn name(&self) -> &'static str;

    /// The part's positions in the update.
    fn stages(&self) -> &'static [Stage];

    /// Fails for a setting that no run can use.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns `true` if the part reads a quantity of the step.
    fn reads(&self, _quantity: Quantity) -> bool {
        false
    }

    /// The setting that changes over the steps of a run.
    fn schedule(&self) -> Option<&Schedule> {
        None
    }

    /// The slots that it stores of matrices.
    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        vec![]
    }

    /// The new batch of the context's stage. `x` is float32 or float64.
    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3>;
}

/// The matrices of a batch: their shape, and the dimension of it that counts outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrices {
    pub shape: [usize; 2],
    pub layout: MatrixLayout,
}

impl Matrices {
    /// The dimension of a batch `[k, m, n]` along which the entries of one input are.
    pub(super) fn along_input(self) -> usize {
        3 - self.along_output()
    }

    /// The dimension of a batch `[k, m, n]` along which the entries of one output are: of the rows,
    /// in the literature's layout `[outputs, inputs]`.
    pub(super) fn along_output(self) -> usize {
        match self.layout {
            MatrixLayout::OutIn => 2,
            MatrixLayout::InOut => 1,
        }
    }
}

/// A quantity of a step that is computed only if a part reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    Keep,
    Lr,
    BaseLr,
    Old,
    OldNorm,
    OldOutputNorms,
    GradientNorm,
    GradientInputNorms,
    UpdateNorm,
    UpdateInputNorms,
    NextOfSchedule,
}

/// The quantities of a step so far. Tensors have one value for every matrix, `[k, 1, 1]`, and are
/// `None` if no part [reads](Part::reads) them.
pub(super) struct Known {
    pub matrices: Matrices,
    /// The factor on the learning rate.
    pub scale: f64,
    /// The weight of the old momentum.
    pub keep: Option<Tensor<3>>,
    /// The learning rate, without the factor of the shape.
    pub lr: Option<Tensor<3>>,
    /// The learning rate without any factor.
    pub base_lr: Option<Tensor<3>>,
    /// The parameter before the step, `[k, m, n]`.
    pub old: Option<Tensor<3>>,
    /// The Frobenius norm of the parameter before the step.
    pub old_norm: Option<Tensor<3>>,
    /// The norms of the entries of every output of the parameter before the step, `[k, m, 1]` or
    /// `[k, 1, n]`.
    pub old_output_norms: Option<Tensor<3>>,
    /// The Frobenius norm of the gradient.
    pub gradient_norm: Option<Tensor<3>>,
    /// The norms of the entries of every input of the gradient, as `old_output_norms`.
    pub gradient_input_norms: Option<Tensor<3>>,
    /// The Frobenius norm of what is orthogonalised.
    pub update_norm: Option<Tensor<3>>,
    /// The norms of the entries of every input of what is orthogonalised.
    pub update_input_norms: Option<Tensor<3>>,
    /// The value of the part's schedule at the matrix's next step.
    pub next_of_schedule: Option<Tensor<3>>,
}

/// The circumstances of a part.
pub(super) struct Context<'a> {
    pub stage: Stage,
    /// The type of the batch.
    pub dtype: DType,
    pub known: &'a Known,
    /// The matrices whose state stays as it is.
    pub mask: &'a dyn Fn() -> FiniteMask,
}

impl Context<'_> {
    /// Advances a slot of float32 or float64 values: the new values from the old ones. Masked
    /// matrices keep theirs.
    fn advance(
        &self,
        state: &mut Slots,
        slot: &str,
        shape: [usize; 3],
        new: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let stored = state.take(slot);
        let dtype = stored.dtype();
        let old = stored.cast(self.dtype).reshape(shape);
        // A matrix that stays as it is must also keep its state.
        let new = (self.mask)().select(new(old.clone()), old);
        state.put(slot, new.clone().reshape([-1]).cast(dtype));
        new
    }

    /// A quantity that the part [reads](Part::reads), in the type of the batch.
    fn read(&self, quantity: &Option<Tensor<3>>) -> Tensor<3> {
        quantity.clone().expect("`reads` names it").cast(self.dtype)
    }
}

impl Part {
    fn behaviour(&self) -> &dyn Behaviour {
        match self {
            Self::Mars(part) => part,
            Self::MomentumMixture(part) => part,
            Self::Sign(part) => part,
            Self::RowEquilibration(part) => part,
            Self::ColumnEquilibration(part) => part,
            Self::Renormalization(part) => part,
            Self::NorMuon(part) => part,
            Self::AdaMuon(part) => part,
            Self::Namo(part) => part,
            Self::RelativeUpdate(part) => part,
            Self::Hyperball(part) => part,
            Self::MaxNorm(part) => part,
            Self::RadialBrake(part) => part,
            Self::Muown(part) => part,
            Self::EmaNesterov(part) => part,
        }
    }

    /// Returns the positions of the part in the update.
    ///
    /// ```
    /// use distmuon::parts::{Hyperball, Part, Stage};
    ///
    /// let part = Part::from(Hyperball::initial());
    /// assert_eq!(part.stages(), [Stage::After, Stage::Parameter]);
    /// println!("{part}"); // hyperball (after the iteration and on the parameter)
    /// ```
    pub fn stages(&self) -> &'static [Stage] {
        self.behaviour().stages()
    }

    pub(super) fn reads(&self, quantity: Quantity) -> bool {
        self.behaviour().reads(quantity)
    }

    pub(super) fn schedule(&self) -> Option<&Schedule> {
        self.behaviour().schedule()
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.behaviour().check()
    }

    pub(crate) fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        self.behaviour().slots(matrices)
    }

    pub(super) fn apply(
        &self,
        update: Tensor<3>,
        state: &mut Slots,
        context: &Context<'_>,
    ) -> Tensor<3> {
        self.behaviour().apply(update.cast(context.dtype), state, context)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages: Vec<&str> = self
            .stages()
            .iter()
            .map(|stage| match stage {
                Stage::Gradient => "on the gradient",
                Stage::Before => "before the iteration",
                Stage::After => "after the iteration",
                Stage::Parameter => "on the parameter",
            })
            .collect();
        write!(f, "{} ({})", self.behaviour().name(), stages.join(" and "))
    }
}

/// Every matrix divided by its largest magnitude, so that no square overflows or underflows, and
/// that magnitude, `[k, 1, 1]`.
fn by_largest(x: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    // Squares of numbers from 1e-30 to 1e+20 leave the range of float32; those of ratios do not.
    let largest = x.clone().abs().max_dim(2).max_dim(1).clamp_min(f32::MIN_POSITIVE);
    (x / largest.clone(), largest)
}

/// The norms along a dimension of a batch, of size 1 there.
pub(super) fn norms_along(x: Tensor<3>, dimension: usize) -> Tensor<3> {
    // As in `by_largest`.
    let largest = x.clone().abs().max_dim(dimension).clamp_min(f32::MIN_POSITIVE);
    (x / largest.clone()).square().sum_dim(dimension).sqrt() * largest
}

/// The Frobenius norm of every matrix, `[k, 1, 1]`.
pub(super) fn frobenius(x: Tensor<3>) -> Tensor<3> {
    let (x, largest) = by_largest(x);
    x.square().sum_dims(&[1, 2]).sqrt() * largest
}
