//! Forecasts: pure functions of a plan that say what a run would cost, before it runs.
//!
//! No rank, device or tensor takes part: [`timeline`] has the seconds of an iteration on a
//! described [`Machine`], and [`MemoryForecast`] the bytes of every rank. Nothing of a step depends
//! on it.

mod memory;
mod planned_rank;
mod planned_world;
mod time;

pub use memory::{MemoryForecast, RankMemory};
pub use time::{Links, Machine, PassTimes, TimeAssumptions, Timeline, timeline};
