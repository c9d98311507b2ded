//! A guide by task: what to write, what else it changes, and what it costs.
//!
//! | you want to | read |
//! |---|---|
//! | replace AdamW, or Burn's own Muon | [`from_adamw`] |
//! | choose a learning rate | [`learning_rate`] |
//! | keep a layer from Muon, freeze it, or train LoRA adapters | [`excluding`] |
//! | clip gradients | [`clipping`] |
//! | step once for several batches | [`accumulation`] |
//! | save a run and go on with it, on another number of ranks too | [`resuming`] |
//! | see what updates what, and what goes wrong | [`watching`] |
//! | train on several devices | [`ranks`] |
//! | use burn-train's `Learner` | [`learner`] |
//! | know what it costs in memory and time | [`cost`] |
//!
//! # Documents beside this guide
//!
//! - [`distributed`]: engines, launchers, the phases of a step, guarantees, and what to do when a start fails;
//! - [`benchmarks`]: all measurements, with their commands.
//!
//! The source package also has `docs/kernels.md`, how the kernels of the CubeCL backends work, `docs/precision.md`, what
//! rounding makes of the iteration, `docs/gpu.md`, what to run on a GPU, and `SECURITY.md`. Figures are in the source package only.

/// One line that changes, and the settings that change with it.
///
/// [Excluding and freezing]: crate::guide::excluding
#[doc = include_str!("../docs/guide/from-adamw.md")]
pub mod from_adamw {}

/// Learning rates to start with, the measured sweep, and the scale of a matrix.
///
/// [`AdamWSettings`]: crate::AdamWSettings
/// [`Routing::group`]: crate::Routing::group
/// [`LrScale`]: crate::LrScale
#[doc = include_str!("../docs/guide/learning-rate.md")]
pub mod learning_rate {}

/// Layers that AdamW trains, layers that nothing trains, and adapters.
#[doc = include_str!("../docs/guide/excluding.md")]
pub mod excluding {}

/// The norm of all gradients, on one device too, and Burn's setter that has no effect.
///
/// [`DistMuonConfig::max_norm`]: crate::dist::DistMuonConfig::max_norm
#[doc = include_str!("../docs/guide/clipping.md")]
pub mod clipping {}

/// One step for several batches, and what a sum is instead of a mean.
#[doc = include_str!("../docs/guide/accumulation.md")]
pub mod accumulation {}

/// Checkpoints, what comes back of a run, and other numbers of ranks.
///
/// [`checkpoint::save`]: crate::checkpoint::save
/// [`checkpoint::load`]: crate::checkpoint::load
/// [`Schedule::at(step)`]: crate::Schedule::at
#[doc = include_str!("../docs/guide/resuming.md")]
pub mod resuming {}

/// Tables, counts, warnings and metrics of a run.
///
/// [`Routing::summary()`]: crate::Routing::summary
/// [`NewtonSchulz::explain_shape`]: crate::NewtonSchulz::explain_shape
/// [`DistModuleOptimizer::report()`]: crate::dist::DistModuleOptimizer::report
/// [`DistModuleOptimizer::memory()`]: crate::dist::DistModuleOptimizer::memory
/// [`World::describe()?`]: crate::dist::World::describe
#[doc = include_str!("../docs/guide/watching.md")]
pub mod watching {}

/// A complete program on one device and on many, with the lines that change.
///
/// [`World::threads_with`]: crate::dist::World::threads_with
/// [docs/distributed.md]: crate::guide::distributed
#[doc = include_str!("../docs/guide/ranks.md")]
pub mod ranks {}

/// A complete program for burn-train's `Learner`.
///
/// [From 1 to 8 GPUs]: crate::guide::ranks
#[doc = include_str!("../docs/guide/learner.md")]
pub mod learner {}

/// Memory, time and the first build.
///
/// [`Routing::summary`]: crate::Routing::summary
/// [docs/benchmarks.md]: crate::guide::benchmarks
/// [docs/distributed.md]: crate::guide::distributed
#[doc = include_str!("../docs/guide/cost.md")]
pub mod cost {}

/// Engines, launchers, the phases of a step, guarantees, memory and time on many ranks.
///
/// [The guide]: crate::guide::ranks
/// [SECURITY.md]: crate::guide#documents-beside-this-guide
/// [benchmarks.md]: crate::guide::benchmarks
/// [scaling]: data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'%20width='1'%20height='1'/%3E
#[doc = include_str!("../docs/distributed.md")]
pub mod distributed {}

/// All measurements, with their commands and conditions.
///
/// [losses]: data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'%20width='1'%20height='1'/%3E
/// [kernels.md]: crate::guide#documents-beside-this-guide
#[doc = include_str!("../docs/benchmarks.md")]
pub mod benchmarks {}
