//! The step, as pure functions on a batch: no rank, no module, no record.
//!
//! With momentum `mu`, weight decay `w` and learning rate `lr`, a step of [`MuonUpdate`] with
//! gradient `G` is
//!
//! ```text
//! M <- mu M + (1 - mu) G
//! U  = mu M + (1 - mu) G  with Nesterov, else M
//! U  = parts before the iteration (U)
//! O  = parts after it (orthogonalize(U))
//! P <- (1 - lr w) P - lr scale O
//! ```
//!
//! and every line is one function: `backend::update_momentum`, [`Part::apply`],
//! `NewtonSchulz::direction`, [`StepSize`] and `backend::apply`.

mod clipping;
mod elementwise;
mod layer;
mod lr_scale;
mod momentum;
mod muon;
mod observations;
pub mod parts;
mod precision;
mod resumed;
mod rounding;
mod skipped;
mod stacks;
mod state;
mod step_size;
mod whole;

pub(crate) use clipping::clip;
pub(crate) use elementwise::{
    BURNS_TIME, CORRECTIONS, ELEMENTS, ELEMENTWISE_SLOTS, ElementwiseParameter, ElementwiseRule,
    ElementwiseUpdate, RoleFactors, Roles, from_burns, of_burns, unflatten_burns,
};
pub(crate) use layer::{Decision, MAX_RANK, WholeOptimizer, with_rank};
pub use layer::{LayerOptimizer, Rejected};
pub use lr_scale::LrScale;
pub(crate) use momentum::{MOMENTUM, MOMENTUM_WEIGHT};
pub use momentum::{MomentumConfig, MomentumForm};
pub(crate) use muon::{MuonBatch, MuonParameter, MuonPart, MuonUpdate, TIME};
pub(crate) use observations::{Observations, SUMS};
pub(crate) use parts::Matrices;
pub use precision::{MasterWeights, StateDtype};
pub(crate) use precision::{Precision, is_half};
pub(crate) use resumed::{
    OF_INIT, REFUSED, Refusals, Resumable, Resumed, Rule, Unrouted, of_another,
};
pub(crate) use rounding::Origin;
pub use skipped::SkippedSteps;
pub(crate) use skipped::{Place, Reserved};
pub(crate) use stacks::Clocks;
pub(crate) use state::{IDLE, MANTISSA, MASTER, SKIPPED, Slot, Slots, missing, unused};
pub use step_size::WeightDecay;
pub(crate) use step_size::{StepSize, ensure_rate};
pub(crate) use whole::{OWN_STATE, WholeParameter, WholeUpdate};

/// The rank in errors of an optimizer that knows of no ranks.
pub(crate) const ONLY_RANK: usize = 0;
