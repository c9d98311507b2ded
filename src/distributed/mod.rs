//! Muon and AdamW on many ranks.
//!
//! A [`World`](crate::World) is one rank's view of all ranks, [`comm`](crate::comm) has the
//! collectives, and a [`plan`] assigns every matrix to an owner. [`DistMuonConfig`] configures
//! three optimizers:
//!
//! - [`DistModuleOptimizer`] for your own training loop, which shards states and work among ranks;
//! - `DistMuonStrategy` (feature `train`) for burn-train's `Learner`, which uses the first one;
//! - [`DistMuon`] where a Burn [`Optimizer`](burn::optim::Optimizer) of single parameters is
//!   required.
//!
//! The guide has [a complete program](crate::guide::ranks) for one device and for many ranks.

mod busy;
mod config;
mod dist_muon;
mod exclusive;
#[doc(hidden)] // for the bench `scaling`
pub mod forecast;
mod layout;
#[cfg(feature = "train")]
mod learner;
mod measured_costs;
mod mesh;
mod optimizer;
mod placement_rules;
pub mod plan;
mod same_parameters;
mod sliced_parameters;
mod trainable;

pub use config::{
    CostSource, DistMuonConfig, GradDtype, Gradients, LossScaleConfig, OnAuditFailure, Publish,
    StatesOn,
};
pub use dist_muon::DistMuon;
#[doc(hidden)]
pub use dist_muon::{DistMuonState, Ownership};
#[doc(inline)]
pub use forecast::{Links, MemoryForecast, RankMemory, TimeAssumptions, Timeline};
pub use layout::{Keep, Layout, LayoutTable, WeightAverage};
#[cfg(feature = "train")]
pub use learner::{DistMuonStrategy, LearnerLogits};
#[cfg(feature = "train")]
#[doc(hidden)]
pub use learner::{Latest, LatestAccount, LatestDiagnostics};
pub use mesh::{Axis, Mesh};
pub use optimizer::{
    Diagnostics, DistModuleOptimizer, GroupDiagnostics, MemoryReport, ParameterDiagnostics, Usage,
};
pub use placement_rules::Place;
