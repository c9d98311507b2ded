//! Muon and AdamW on many ranks.
//!
//! A [`World`] is a rank's view of all of them, its [`comm`] the collectives, and a [`plan`] says who
//! owns what. Three optimizers are built on these, all from [`DistMuonConfig`]:
//!
//! - [`DistModuleOptimizer`] for a training loop of one's own: the one that shares everything;
//! - `DistMuonStrategy` (feature `train`) for burn-train's `Learner`, by means of the first;
//! - [`DistMuon`] for what wants a Burn [`Optimizer`](burn::optim::Optimizer) of single parameters.
//!
//! The guide has [a complete program](crate::guide::ranks) for one device and for many ranks.

mod agree;
mod clip;
pub mod comm;
mod config;
mod flat;
mod held;
#[cfg(feature = "processes")]
mod launch;
#[cfg(feature = "train")]
mod learner;
mod memory;
mod muon;
mod optimizer;
pub mod plan;
mod record;
mod rows;
mod shard;
mod start;
mod world;

#[cfg(feature = "cuda")]
pub use comm::Reduction;
pub use comm::{Communicator, Pending, ReduceOp};
pub use config::{CostSource, DistMuonConfig, Gradients};
#[cfg(feature = "processes")]
pub use launch::Launch;
#[cfg(feature = "train")]
pub use learner::DistMuonStrategy;
pub use memory::{Bytes, MemoryReport};
pub use muon::{DistMuon, DistMuonState, Place};
pub use optimizer::DistModuleOptimizer;
pub use world::{DEADLINE, World};
