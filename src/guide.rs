//! A guide by task: programs to copy, with their side effects and costs.
//!
//! | you want to | read |
//! |---|---|
//! | replace AdamW, or Burn's own Muon | [`from_adamw`] |
//! | compare with AdamW and with Burn's own Muon | [`comparison`] |
//! | choose a learning rate | [`learning_rate`] |
//! | choose everything else | [`settings`] |
//! | train by the settings of others | [`recipes`] |
//! | train on one device, with the fewest launches | [`one_device`] |
//! | train on several devices | [`ranks`] |
//! | start ranks as processes, on one host or several | [`hosts`] |
//! | train models that do not fit a rank, or hide messages | [`large_models`] |
//! | cut layers or experts into slices, one for each rank | [`slices`] |
//! | use burn-train's `Learner` | [`learner`] |
//! | save a run and continue it, also on another number of ranks | [`resuming`] |
//! | save while training goes on | [`saving_without_waiting`] |
//! | move a run to PyTorch, or from there | [`exchange`] |
//! | see and change the optimizer of every parameter | [`routing`] |
//! | exclude a layer from Muon, freeze it, or train LoRA adapters | [`excluding`] |
//! | orthogonalise every head of an attention by itself | [`heads`] |
//! | train in bfloat16 or float16 | [`mixed_precision`] |
//! | clip gradients | [`clipping`] |
//! | step once for several batches | [`accumulation`] |
//! | bound the logits of attention | [`qk_clip`] |
//! | be sure that Muon ran, on every matrix and once | [`is_it_really_muon`] |
//! | see the routing, the skips and the memory of a run | [`watching`] |
//! | know the cost in memory and time | [`cost`] |
//! | understand an error | [`troubleshooting`] |
//! | test and measure the crate on a GPU | [`gpu`] |
//!
//! # Other documents
//!
//! The source package also has
//!
//! - `docs/design/`: the reasons for the layout of the modules, the update, the kernels, the
//!   restarts and the ranks;
//! - `docs/results/`: all measurements, with their dates and commands;
//! - `SECURITY.md` and `CHANGELOG.md`.

/// The lines that change, and the settings that change with them.
///
/// [Clipping gradients]: crate::guide::clipping
/// [Excluding and freezing]: crate::guide::excluding
/// [Memory, time and launches]: crate::guide::cost
#[doc = include_str!("../docs/guide/from-adamw.md")]
pub mod from_adamw {}

/// Losses and times next to AdamW and Burn's own Muon, and the work that each optimizer supports.
///
/// [The results]: crate::guide#other-documents
/// [measured]: crate::guide#other-documents
/// [any Burn optimizer]: crate::guide::settings
/// [recipes]: crate::guide::recipes
/// [float32 master weights]: crate::guide::mixed_precision
/// [QK-clip]: crate::guide::qk_clip
/// [slices of layers and experts]: crate::guide::slices
/// [norms of a step]: crate::guide::watching
#[doc = include_str!("../docs/guide/comparison.md")]
pub mod comparison {}

/// Learning rates to start with, the measured sweep, and the scale of a matrix.
///
/// [`AdamWConfig`]: crate::AdamWConfig
/// [`Routing::group`]: crate::Routing::group
/// [`LrScale`]: crate::LrScale
/// [docs/results]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/learning-rate.md")]
pub mod learning_rate {}

/// All settings, their defaults, and reasons to change them.
///
/// [Choosing a learning rate]: crate::guide::learning_rate
/// [Excluding, freezing and LoRA]: crate::guide::excluding
/// [Clipping gradients]: crate::guide::clipping
/// [Is it really Muon?]: crate::guide::is_it_really_muon
/// [One device]: crate::guide::one_device
/// [Troubleshooting]: crate::guide::troubleshooting
/// [docs/design]: crate::guide#other-documents
/// [`Part`]: crate::Part
/// [`Coefficients`]: crate::Coefficients
#[doc = include_str!("../docs/guide/settings.md")]
pub mod settings {}

/// Settings with which others train by Muon, and the cost of their parts.
///
/// [`Recipe`]: crate::Recipe
/// [`Dial`]: crate::Dial
/// [`DistModuleOptimizer`]: crate::DistModuleOptimizer
/// [`AdamWConfig`]: crate::AdamWConfig
/// [Choosing a learning rate]: crate::guide::learning_rate
/// [docs/results]: crate::guide#other-documents
/// [leaderboard]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/recipes.md")]
pub mod recipes {}

/// Two optimizers of one device, the backends, and their kernels.
///
/// [Clipping gradients]: crate::guide::clipping
/// [many ranks]: crate::guide::ranks
/// [On a GPU]: crate::guide::gpu
/// [Watching a run]: crate::guide::watching
/// [docs/design]: crate::guide#other-documents
/// [docs/results]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/one-device.md")]
pub mod one_device {}

/// A complete program on one device and on many, with the lines that change.
///
/// [`World::launch`]: crate::comm::World::launch
/// [Processes and several hosts]: crate::guide::hosts
/// [Troubleshooting]: crate::guide::troubleshooting
/// [docs/design]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/ranks.md")]
pub mod ranks {}

/// Launchers, their variables, the secret, NCCL and nodes.
///
/// [Several devices]: crate::guide::ranks
/// [SECURITY.md]: crate::guide#other-documents
/// [docs/design]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/hosts.md")]
pub mod hosts {}

/// Parameters that are divided among ranks, and messages behind the passes.
///
/// [`Layout`]: crate::distributed::Layout
/// [`Layout::overlap_backward`]: crate::distributed::Layout::overlap_backward
/// [`Layout::rows`]: crate::distributed::Layout::rows
/// [`Mesh::new`]: crate::distributed::Mesh::new
/// [`Place`]: crate::distributed::Place
/// [`Keep::Nothing`]: crate::distributed::Keep::Nothing
/// [`Keep::Weights`]: crate::distributed::Keep::Weights
/// [`Publish::AtFirstUse`]: crate::distributed::Publish::AtFirstUse
/// [`shard`]: crate::distributed::Layout::shard
/// [`start`]: crate::DistMuonConfig::start
/// [Several devices]: crate::guide::ranks
/// [`average`]: crate::distributed::Layout::average
/// [`collect`]: crate::distributed::Layout::collect
/// [`unshard`]: crate::distributed::Layout::unshard
/// [`with_small_elements`]: crate::distributed::Layout::with_small_elements
/// [`save`]: crate::DistModuleOptimizer::save
/// [`load`]: crate::DistModuleOptimizer::load
/// [`finish_publication`]: crate::DistModuleOptimizer::finish_publication
/// [`Error::Mismatch`]: crate::Error::Mismatch
/// [docs/results]: crate::guide#other-documents
/// [Tensor and expert parallelism]: crate::guide::slices
/// [all placements]: crate::guide::slices#all-placements
#[doc = include_str!("../docs/guide/large-models.md")]
pub mod large_models {}

/// Layers and experts of which every rank has a slice: tensor and expert parallelism.
///
/// [Models that do not fit]: crate::guide::large_models
/// [Bounding the logits of attention]: crate::guide::qk_clip
/// [Troubleshooting]: crate::guide::troubleshooting
/// [docs/design]: crate::guide#other-documents
/// [`Layout`]: crate::distributed::Layout
/// [`Place::shard`]: crate::distributed::Place::shard
/// [`Axis::data`]: crate::distributed::Axis::data
/// [`Axis::model`]: crate::distributed::Axis::model
/// [`Mesh::data`]: crate::distributed::Mesh::data
/// [`ColumnLinear`]: crate::parallel::ColumnLinear
/// [`RowLinear`]: crate::parallel::RowLinear
/// [`enter`]: crate::parallel::enter
/// [`leave`]: crate::parallel::leave
/// [`exchange`]: crate::parallel::exchange
#[doc = include_str!("../docs/guide/slices.md")]
pub mod slices {}

/// A complete program for burn-train's `Learner`.
///
/// [Several devices]: crate::guide::ranks
/// [divide the parameters]: crate::guide::large_models
/// [Bounding the logits of attention]: crate::guide::qk_clip
// Its program needs a feature, without which it is documented and not tested.
#[cfg_attr(any(feature = "train", not(doctest)), doc = include_str!("../docs/guide/learner.md"))]
pub mod learner {}

/// Checkpoints, their contents, and other numbers of ranks.
///
/// [`checkpoint::save`]: crate::checkpoint::save
/// [`checkpoint::load`]: crate::checkpoint::load
/// [`Schedule::at(step)`]: crate::Schedule::at
#[doc = include_str!("../docs/guide/resuming.md")]
pub mod resuming {}

/// Saves in the background, their memory and their times, and one file from each rank.
///
/// [`checkpoint::Saver`]: crate::checkpoint::Saver
/// [`WhenBusy::Refuse`]: crate::checkpoint::WhenBusy::Refuse
/// [`Saver::with_parts`]: crate::checkpoint::Saver::with_parts
/// [`Saver::with_patience`]: crate::checkpoint::Saver::with_patience
/// [docs/results]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/saving-without-waiting.md")]
pub mod saving_without_waiting {}

/// Runs that move to PyTorch, or from there.
///
/// [`exchange::Exchange`]: crate::exchange::Exchange
/// [`Exchange::with_names`]: crate::exchange::Exchange::with_names
/// [`Exchange::with_steps`]: crate::exchange::Exchange::with_steps
/// [Recipes]: crate::guide::recipes
#[doc = include_str!("../docs/guide/exchange.md")]
pub mod exchange {}

/// The table of a model, the built-in rules behind it, and your own.
///
/// [Excluding, freezing and LoRA]: crate::guide::excluding
#[doc = include_str!("../docs/guide/routing.md")]
pub mod routing {}

/// Layers that AdamW trains, layers that nothing trains, and adapters.
#[doc = include_str!("../docs/guide/excluding.md")]
pub mod excluding {}

/// Matrices of an attention as one matrix for every head, or for pairs of heads.
///
/// [Checkpoints]: crate::guide::resuming
/// [QK-clip]: crate::guide::qk_clip
#[doc = include_str!("../docs/guide/heads.md")]
pub mod heads {}

/// The norm of all gradients, also on one device, and Burn's setter that has no effect.
///
/// [`DistMuonConfig::max_norm`]: crate::distributed::DistMuonConfig::max_norm
#[doc = include_str!("../docs/guide/clipping.md")]
pub mod clipping {}

/// Master weights, gradients in float32, loss scaling, and the bytes of each.
///
/// [`GradientBuffer`]: crate::GradientBuffer
/// [docs/results]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/mixed-precision.md")]
pub mod mixed_precision {}

/// One step for several batches, and the effects of a sum instead of a mean.
///
/// [Mixed precision]: crate::guide::mixed_precision
#[doc = include_str!("../docs/guide/accumulation.md")]
pub mod accumulation {}

/// QK-clip for multi-head, grouped-query and latent attention.
///
/// [Tensor and expert parallelism]: crate::guide::slices
#[doc = include_str!("../docs/guide/qk-clip.md")]
pub mod qk_clip {}

/// Expectations that are errors where they do not hold, and the account of a step.
///
/// [mutations]: crate::guide#other-documents
/// [diagnostics]: crate::guide::watching
#[doc = include_str!("../docs/guide/is-it-really-muon.md")]
pub mod is_it_really_muon {}

/// Tables, counts, warnings and metrics of a run.
///
/// [Is it really Muon?]: crate::guide::is_it_really_muon
/// [`Routing::summary()`]: crate::Routing::summary
/// [`NewtonSchulz::explain_shape`]: crate::NewtonSchulz::explain_shape
/// [`DistModuleOptimizer::diagnostics()`]: crate::distributed::DistModuleOptimizer::diagnostics
/// [`DistModuleOptimizer::report()`]: crate::distributed::DistModuleOptimizer::report
/// [`DistModuleOptimizer::memory()`]: crate::distributed::DistModuleOptimizer::memory
/// [`World::describe()?`]: crate::comm::World::describe
#[doc = include_str!("../docs/guide/watching.md")]
pub mod watching {}

/// Memory, time, launches and the first build.
///
/// [Mixed precision]: crate::guide::mixed_precision
/// [`Routing::summary`]: crate::Routing::summary
/// [docs/results]: crate::guide#other-documents
/// [docs/design]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/cost.md")]
pub mod cost {}

/// Errors, their causes and their remedies.
///
/// [Is it really Muon?]: crate::guide::is_it_really_muon
/// [Processes and several hosts]: crate::guide::hosts
/// [Choosing settings]: crate::guide::settings
/// [Excluding, freezing and LoRA]: crate::guide::excluding
/// [Watching a run]: crate::guide::watching
/// [Clipping gradients]: crate::guide::clipping
/// [One device]: crate::guide::one_device
/// [Tensor and expert parallelism]: crate::guide::slices
#[doc = include_str!("../docs/guide/troubleshooting.md")]
pub mod troubleshooting {}

/// The build and the command that test and measure the crate on a GPU.
///
/// [docs/results]: crate::guide#other-documents
/// [counts]: crate::guide#other-documents
/// [docs/design]: crate::guide#other-documents
/// [Troubleshooting]: crate::guide::troubleshooting
/// [Processes and several hosts]: crate::guide::hosts
/// [One device]: crate::guide::one_device
/// [`IterationDtype::Auto`]: crate::IterationDtype::Auto
#[doc = include_str!("../docs/guide/gpu.md")]
pub mod gpu {}
