//! Muon and AdamW on many ranks.

pub mod comm;
mod config;
mod flat;
mod held;
mod memory;
mod optimizer;
pub mod plan;
mod record;
mod shard;
mod start;
mod world;

pub use comm::{Communicator, Pending, ReduceOp};
pub use config::{CostSource, DistMuonConfig, Gradients};
pub use memory::{Bytes, MemoryReport};
pub use optimizer::DistModuleOptimizer;
pub use world::{DEADLINE, World};
