//! Muon and AdamW on many ranks.
//!
//! A [`World`](crate::World) is a rank's view of all of them, [`comm`](crate::comm) has the
//! collectives, and a [`plan`] assigns owners to matrices. Three optimizers are built on these, all
//! from [`DistMuonConfig`]:
//!
//! - [`DistModuleOptimizer`] for a training loop of your own: it shards everything;
//! - `DistMuonStrategy` (feature `train`) for burn-train's `Learner`, by means of the first;
//! - [`DistMuon`] where a Burn [`Optimizer`](burn::optim::Optimizer) of single parameters is
//!   required.
//!
//! The guide has [a complete program](crate::guide::ranks) for one device and for many ranks.

mod config;
#[cfg(feature = "train")]
mod learner;
mod measured_costs;
mod optimizer;
mod per_parameter;
pub mod plan;

pub use config::{CostSource, DistMuonConfig, Gradients};
#[cfg(feature = "train")]
pub use learner::DistMuonStrategy;
pub use optimizer::{DistModuleOptimizer, MemoryReport, Usage};
pub use per_parameter::{DistMuon, DistMuonState, Ownership};
