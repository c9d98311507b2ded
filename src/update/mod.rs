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
mod custom;
mod elementwise;
mod idle_matrices;
mod int8_blocks;
mod layer;
mod ledger;
mod lr_scale;
pub(crate) mod missing_gradients;
mod momentum;
mod muon;
pub mod parts;
mod precision;
mod refused_states;
mod rounding;
mod skip_counts;
mod state;
mod step_norms;
mod step_size;

use burn::tensor::Tensor;

pub(crate) use clipping::clip;
pub(crate) use custom::{OWN_STATE, WholeParameter, WholeUpdate};
pub(crate) use elementwise::{
    BURNS_MOMENTS, BURNS_TIME, CORRECTIONS, ELEMENTS, ELEMENTWISE_SLOTS, ElementwiseParameter,
    ElementwiseRule, ElementwiseUpdate, MOMENTS, RoleSettings, Roles, from_burns, of_burns,
    unflatten_burns,
};
pub(crate) use idle_matrices::Clocks;
pub(crate) use layer::{Decision, MAX_RANK, WholeOptimizer, with_rank};
pub use layer::{LayerOptimizer, Rejected};
pub(crate) use ledger::{Entries, Ledger};
pub use ledger::{IterationUsed, UpdatedBy};
pub use lr_scale::LrScale;
pub(crate) use momentum::{MOMENTUM, MOMENTUM_WEIGHT};
pub use momentum::{MomentumConfig, MomentumForm};
pub(crate) use muon::{MuonBatch, MuonParameter, MuonPiece, MuonUpdate, TIME};
pub(crate) use parts::Matrices;
pub use precision::{MasterWeights, StateDtype};
pub(crate) use precision::{Precision, is_half};
pub(crate) use refused_states::{
    BEGIN_ANEW, OF_INIT, REFUSED, Refusals, Resumable, Resumed, Rule, Unrouted, of_another,
};
pub(crate) use rounding::Origin;
pub use skip_counts::SkippedSteps;
pub(crate) use skip_counts::{CountSlot, Reserved};
pub(crate) use state::{IDLE, MANTISSA, MASTER, SKIPPED, Slot, Slots, missing, unused};
pub(crate) use step_norms::{Observations, SUMS};
pub use step_size::WeightDecay;
pub(crate) use step_size::{StepSize, ensure_rate};

/// The tensors of a step, flat, in the order of its parameters.
pub(crate) struct UpdateTensors {
    pub values: Vec<Tensor<1>>,
    pub gradients: Vec<Tensor<1>>,
}

impl UpdateTensors {
    /// The tensors of one parameter.
    pub fn of_one<const D: usize>(value: Tensor<D>, gradient: Tensor<D>) -> Self {
        let [value, gradient] = [value, gradient].map(|tensor| tensor.reshape([-1]));
        Self { values: vec![value], gradients: vec![gradient] }
    }
}

/// The rank in errors of an optimizer that knows of no ranks.
pub(crate) const ONLY_RANK: usize = 0;
