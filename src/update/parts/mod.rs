//! Optional stages of Muon's update, for [`MuonConfig::parts`](crate::MuonConfig::parts).

// Every part has a file. To add a part, write its file, and register it here: in `Part`, in
// `Part::behaviour`, and with the names of its slots in `SLOT_NAMES`.

mod normuon;
mod renormalization;
mod row_equilibration;

use std::fmt;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::state::{Slot, Slots};
use crate::backend::{FiniteMask, precise_dtype};
use crate::error::Result;
use crate::matrix_view::MatrixLayout;

pub use normuon::NorMuon;
pub use renormalization::Renormalization;
pub use row_equilibration::RowEquilibration;

/// An optional stage of Muon's update, in addition to momentum, iteration and weight decay. Parts
/// run in the order in which they are listed, first those before the iteration, then those after
/// it: see [`stage`](Self::stage).
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
///         Renormalization.into(),
///         NorMuon::new(0.9).into(),
///     ])
///     .with_lr_scale(LrScale::Original)
///     .with_weight_decay(WeightDecay::CautiousScaled(0.28.into()));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Part {
    /// Scales all rows to equal norms, before the iteration.
    RowEquilibration(RowEquilibration),
    /// Scales to the Frobenius norm of an orthogonal matrix, after the iteration.
    Renormalization(Renormalization),
    /// Equalises the sizes of the updates of neurons by a second moment, after the iteration.
    NorMuon(NorMuon),
}

/// The position of a [`Part`] in Muon's update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Between the momentum and the iteration.
    Before,
    /// Between the iteration and the change of the parameter.
    After,
}

/// The names of all slots that parts may store. A record does not know the configuration, and is
/// read by these.
pub(crate) const SLOT_NAMES: [&str; 1] = [normuon::SECOND_MOMENT];

/// The behaviour of a part.
trait Behaviour {
    /// The part's name, as the literature has it.
    fn name(&self) -> &'static str;

    /// The part's position in the update.
    fn stage(&self) -> Stage;

    /// Fails for a setting that no run can use.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The slots that it stores of matrices.
    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        vec![]
    }

    /// The new update of a batch. `x` is in [`precise_dtype`].
    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3>;
}

/// The matrices of a batch: their shape, and the dimension of it that counts outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrices {
    pub shape: [usize; 2],
    pub layout: MatrixLayout,
}

impl Matrices {
    /// The dimension of a batch `[k, m, n]` along which the entries of one output are: of the rows,
    /// in the literature's layout `[outputs, inputs]`.
    fn along_output(self) -> usize {
        match self.layout {
            MatrixLayout::OutIn => 2,
            MatrixLayout::InOut => 1,
        }
    }
}

/// The circumstances of a step.
pub(super) struct Context<'a> {
    pub matrices: Matrices,
    /// The matrices whose state stays as it is.
    pub mask: &'a dyn Fn() -> FiniteMask,
}

impl Part {
    fn behaviour(&self) -> &dyn Behaviour {
        match self {
            Self::RowEquilibration(part) => part,
            Self::Renormalization(part) => part,
            Self::NorMuon(part) => part,
        }
    }

    /// Returns the position of the part in the update.
    pub fn stage(&self) -> Stage {
        self.behaviour().stage()
    }

    /// The first part of a kind that is listed before: both would store their state under one name.
    pub(crate) fn first_repeated(parts: &[Self]) -> Option<&Self> {
        let kind = |part: &Self| std::mem::discriminant(part);
        let repeated =
            |index: &usize| parts[..*index].iter().any(|p| kind(p) == kind(&parts[*index]));
        (0..parts.len()).find(repeated).map(|index| &parts[index])
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
        let dtype: DType = precise_dtype(update.dtype());
        self.behaviour().apply(update.cast(dtype), state, context)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match self.stage() {
            Stage::Before => "before the iteration",
            Stage::After => "after the iteration",
        };
        write!(f, "{} ({stage})", self.behaviour().name())
    }
}

/// Every matrix divided by its largest magnitude, so that no square overflows or underflows, and
/// that magnitude, `[k, 1, 1]`.
fn by_largest(x: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let largest = x.clone().abs().max_dim(2).max_dim(1).clamp_min(f32::MIN_POSITIVE);
    (x / largest.clone(), largest)
}
