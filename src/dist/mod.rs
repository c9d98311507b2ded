//! Muon and AdamW on many ranks.

pub mod comm;
mod config;
mod flat;
mod held;
#[cfg(feature = "train")]
mod learner;
mod memory;
mod muon;
mod optimizer;
pub mod plan;
mod record;
mod shard;
mod start;
mod world;

pub use comm::{Communicator, Pending, ReduceOp};
pub use config::{CostSource, DistMuonConfig, Gradients};
#[cfg(feature = "train")]
pub use learner::DistMuonStrategy;
pub use memory::{Bytes, MemoryReport};
pub use muon::{DistMuon, DistMuonState, Place};
pub use optimizer::DistModuleOptimizer;
pub use world::{DEADLINE, World};
