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
/// [After a change]: crate::guide::resuming#after-a-change
#[doc = include_str!("../docs/guide/from-adamw.md")]
pub mod from_adamw {}

/// Losses and times next to AdamW and Burn's own Muon, and the work that each optimizer supports.
///
/// [The results]: crate::guide#other-documents
/// [leaderboard]: crate::guide#other-documents
/// [measured]: crate::guide#other-documents
/// [any Burn optimizer]: crate::guide::settings#another-optimizer-for-some-parameters
/// [recipes]: crate::guide::recipes
/// [float32 master weights]: crate::guide::mixed_precision
/// [QK-clip]: crate::guide::qk_clip
/// [slices of layers and experts]: crate::guide::slices
/// [norms of a step]: crate::guide::watching#norms-of-a-step
/// [ranks]: crate::guide::ranks
/// [routing]: crate::guide::routing
/// [settings#parts-and-weight-decay]: crate::guide::settings#parts-and-weight-decay
#[doc = include_str!("../docs/guide/comparison.md")]
pub mod comparison {}

/// Learning rates to start with, the measured sweep, and the scale of a matrix.
///
/// [`AdamWConfig`]: crate::AdamWConfig
/// [`Routing::group`]: crate::Routing::group
/// [`LrScale`]: crate::LrScale
/// [docs/results]: crate::guide#other-documents
/// [leaderboard]: crate::guide#other-documents
/// [settings#momentumconfig]: crate::guide::settings#momentumconfig
/// [recipes.md]: crate::guide#other-documents
/// [training.md]: crate::guide#other-documents
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
/// [large-models#messages-behind-the-passes]: crate::guide::large_models#messages-behind-the-passes
/// [learning-rate]: crate::guide::learning_rate
/// [mixed-precision#momentum-in-8-bits]: crate::guide::mixed_precision#momentum-in-8-bits
/// [mixed-precision#states-on-the-host]: crate::guide::mixed_precision#states-on-the-host
/// [ranks]: crate::guide::ranks
/// [recipes]: crate::guide::recipes
/// [routing]: crate::guide::routing
/// [watching#skipped-steps]: crate::guide::watching#skipped-steps
/// [audits]: crate::guide::is_it_really_muon#a-second-computation-by-another-rank
/// [Mixed precision]: crate::guide::mixed_precision
/// [The same bits]: crate::guide::ranks#the-same-bits-on-all-ranks
/// [docs/results]: crate::guide#other-documents
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
/// [heads]: crate::guide::heads
/// [qk-clip]: crate::guide::qk_clip
/// [settings]: crate::guide::settings
/// [`IterationDtype::Auto`]: crate::IterationDtype::Auto
/// [`NewtonSchulzConfig`]: crate::NewtonSchulzConfig
/// [precision]: crate::guide#other-documents
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
/// [results/gpu]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/one-device.md")]
pub mod one_device {}

/// A complete program on one device and on many, with the lines that change.
///
/// [`World::launch`]: crate::comm::World::launch
/// [Processes and several hosts]: crate::guide::hosts
/// [Troubleshooting]: crate::guide::troubleshooting
/// [docs/design]: crate::guide#other-documents
/// [gpu#which-kernels-run]: crate::guide::gpu#which-kernels-run
/// [hosts#launching]: crate::guide::hosts#launching
/// [is-it-really-muon#a-second-computation-by-another-rank]:
///     crate::guide::is_it_really_muon#a-second-computation-by-another-rank
/// [large-models]: crate::guide::large_models
/// [large-models#ranks-with-fewer-batches]: crate::guide::large_models#ranks-with-fewer-batches
/// [large-models#the-changed-lines]: crate::guide::large_models#the-changed-lines
/// [one-device#devices-and-features]: crate::guide::one_device#devices-and-features
/// [slices]: crate::guide::slices
/// [settings#lionconfig]: crate::guide::settings#lionconfig
#[doc = include_str!("../docs/guide/ranks.md")]
pub mod ranks {}

/// Launchers, their variables, the secret, NCCL and nodes.
///
/// [Several devices]: crate::guide::ranks
/// [SECURITY.md]: crate::guide#other-documents
/// [docs/design]: crate::guide#other-documents
/// [large-models]: crate::guide::large_models
/// [slices]: crate::guide::slices
/// [failures]: crate::guide#other-documents
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
/// [`WeightAverage`]: crate::distributed::WeightAverage
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
/// [accumulation]: crate::guide::accumulation
/// [excluding#lora]: crate::guide::excluding#lora
/// [gpu#which-kernels-run]: crate::guide::gpu#which-kernels-run
/// [ranks#the-same-result]: crate::guide::ranks#the-same-result
/// [resuming]: crate::guide::resuming
/// [slices]: crate::guide::slices
/// [slices#memory-and-messages]: crate::guide::slices#memory-and-messages
/// [slices#rows-of-an-embedding]: crate::guide::slices#rows-of-an-embedding
/// [`DistMuonConfig::forecast_memory`]: crate::DistMuonConfig::forecast_memory
/// [`DistMuonConfig::forecast_time`]: crate::DistMuonConfig::forecast_time
/// [`Layout::allow_unused`]: crate::distributed::Layout::allow_unused
/// [`Layout::drain`]: crate::distributed::Layout::drain
/// [`unused`]: crate::distributed::Layout::unused
/// [`World::join`]: crate::World::join
/// [`map_elements`]: crate::distributed::Layout::map_elements
/// [`discard`]: crate::distributed::Layout::discard
/// [`discard_pass`]: crate::distributed::Layout::discard_pass
/// [`GradientBuffer`]: crate::GradientBuffer
/// [`with_ahead_mb`]: crate::distributed::Layout::with_ahead_mb
/// [`with_in_flight_mb`]: crate::distributed::Layout::with_in_flight_mb
/// [`with_config`]: crate::distributed::Layout::with_config
/// [layouts]: crate::guide#other-documents
/// [excluding]: crate::guide::excluding
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
/// [`PairCounts`]: crate::comm::PairCounts
/// [`RowEmbedding`]: crate::parallel::RowEmbedding
#[doc = include_str!("../docs/guide/slices.md")]
pub mod slices {}

/// A complete program for burn-train's `Learner`.
///
/// [Several devices]: crate::guide::ranks
/// [divide the parameters]: crate::guide::large_models
/// [Bounding the logits of attention]: crate::guide::qk_clip
// Its program needs a feature, without which it is documented and not tested.
///
/// [is-it-really-muon#burns-optimizer-and-the-learner]:
///     crate::guide::is_it_really_muon#burns-optimizer-and-the-learner
/// [ranks]: crate::guide::ranks
#[cfg_attr(any(feature = "train", not(doctest)), doc = include_str!("../docs/guide/learner.md"))]
pub mod learner {}

/// Checkpoints, their contents, and other numbers of ranks.
///
/// [`checkpoint::save`]: crate::checkpoint::save
/// [`checkpoint::load`]: crate::checkpoint::load
/// [`Schedule::at(step)`]: crate::Schedule::at
/// [hosts#limits]: crate::guide::hosts#limits
/// [ranks]: crate::guide::ranks
/// [ranks#the-same-result]: crate::guide::ranks#the-same-result
/// [ranks#the-same-start]: crate::guide::ranks#the-same-start
/// [saving-without-waiting]: crate::guide::saving_without_waiting
/// [saving-without-waiting#one-file-from-each-rank]:
///     crate::guide::saving_without_waiting#one-file-from-each-rank
/// [`checkpoint::load_matching`]: crate::checkpoint::load_matching
/// [`Part`]: crate::Part
/// [`world.part_of`]: crate::World::part_of
#[doc = include_str!("../docs/guide/resuming.md")]
pub mod resuming {}

/// Saves in the background, their memory and their times, and one file from each rank.
///
/// [`checkpoint::Saver`]: crate::checkpoint::Saver
/// [`WhenBusy::Refuse`]: crate::checkpoint::WhenBusy::Refuse
/// [`Saver::with_parts`]: crate::checkpoint::Saver::with_parts
/// [`Saver::with_patience`]: crate::checkpoint::Saver::with_patience
/// [docs/results]: crate::guide#other-documents
/// [large-models]: crate::guide::large_models
/// [slices]: crate::guide::slices
#[doc = include_str!("../docs/guide/saving-without-waiting.md")]
pub mod saving_without_waiting {}

/// Runs that move to PyTorch, or from there.
///
/// [`exchange::Exchange`]: crate::exchange::Exchange
/// [`Exchange::with_names`]: crate::exchange::Exchange::with_names
/// [`Exchange::with_steps`]: crate::exchange::Exchange::with_steps
/// [Recipes]: crate::guide::recipes
/// [large-models]: crate::guide::large_models
/// [mixed-precision]: crate::guide::mixed_precision
/// [mixed-precision#the-settings]: crate::guide::mixed_precision#the-settings
/// [settings#parts-and-weight-decay]: crate::guide::settings#parts-and-weight-decay
#[doc = include_str!("../docs/guide/exchange.md")]
pub mod exchange {}

/// The table of a model, the built-in rules behind it, and your own.
///
/// [Excluding, freezing and LoRA]: crate::guide::excluding
/// [excluding#first-layers]: crate::guide::excluding#first-layers
/// [learning-rate#rates-for-embeddings-and-the-head]:
///     crate::guide::learning_rate#rates-for-embeddings-and-the-head
#[doc = include_str!("../docs/guide/routing.md")]
pub mod routing {}

/// Layers that AdamW trains, layers that nothing trains, and adapters.
///
/// [heads]: crate::guide::heads
/// [large-models]: crate::guide::large_models
/// [ranks]: crate::guide::ranks
/// [results/clients#the-first-layer]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/excluding.md")]
pub mod excluding {}

/// Matrices of an attention as one matrix for every head, or for pairs of heads.
///
/// [Checkpoints]: crate::guide::resuming
/// [QK-clip]: crate::guide::qk_clip
/// [ranks]: crate::guide::ranks
#[doc = include_str!("../docs/guide/heads.md")]
pub mod heads {}

/// The norm of all gradients, also on one device, and Burn's setter that has no effect.
///
/// [`DistMuonConfig::max_norm`]: crate::distributed::DistMuonConfig::max_norm
/// [ranks]: crate::guide::ranks
#[doc = include_str!("../docs/guide/clipping.md")]
pub mod clipping {}

/// Master weights, gradients in float32, loss scaling, and the bytes of each.
///
/// [`GradientBuffer`]: crate::GradientBuffer
/// [docs/results]: crate::guide#other-documents
/// [`custom`]: crate::custom
/// [large-models]: crate::guide::large_models
/// [large-models#messages-behind-the-passes]: crate::guide::large_models#messages-behind-the-passes
/// [ranks]: crate::guide::ranks
/// [settings#distmuonconfig]: crate::guide::settings#distmuonconfig
/// [`DistMuonConfig::forecast_memory`]: crate::DistMuonConfig::forecast_memory
/// [`round_means`]: crate::distributed::Layout::round_means
#[doc = include_str!("../docs/guide/mixed-precision.md")]
pub mod mixed_precision {}

/// One step for several batches, and the effects of a sum instead of a mean.
///
/// [Mixed precision]: crate::guide::mixed_precision
/// [ranks]: crate::guide::ranks
#[doc = include_str!("../docs/guide/accumulation.md")]
pub mod accumulation {}

/// QK-clip for multi-head, grouped-query and latent attention.
///
/// [Tensor and expert parallelism]: crate::guide::slices
/// [mixed-precision]: crate::guide::mixed_precision
/// [ranks]: crate::guide::ranks
#[doc = include_str!("../docs/guide/qk-clip.md")]
pub mod qk_clip {}

/// Expectations that are errors where they do not hold, and the account of a step.
///
/// [mutations]: crate::guide#other-documents
/// [diagnostics]: crate::guide::watching#norms-of-a-step
/// [large-models]: crate::guide::large_models
/// [learner]: crate::guide::learner
/// [one-device]: crate::guide::one_device
/// [ranks]: crate::guide::ranks
/// [ranks#the-same-bits-on-all-ranks]: crate::guide::ranks#the-same-bits-on-all-ranks
/// [ranks#the-same-result]: crate::guide::ranks#the-same-result
/// [slices]: crate::guide::slices
/// [watching#skipped-steps]: crate::guide::watching#skipped-steps
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
/// [learning-rate#the-scale-of-a-matrix]: crate::guide::learning_rate#the-scale-of-a-matrix
/// [qk-clip]: crate::guide::qk_clip
#[doc = include_str!("../docs/guide/watching.md")]
pub mod watching {}

/// Memory, time, launches and the first build.
///
/// [Mixed precision]: crate::guide::mixed_precision
/// [`Routing::summary`]: crate::Routing::summary
/// [docs/results]: crate::guide#other-documents
/// [docs/design]: crate::guide#other-documents
/// [gpu]: crate::guide::gpu
/// [gpu#burns-fusion]: crate::guide::gpu#burns-fusion
/// [large-models]: crate::guide::large_models
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
/// [exchange]: crate::guide::exchange
/// [excluding#frozen-parameters]: crate::guide::excluding#frozen-parameters
/// [is-it-really-muon]: crate::guide::is_it_really_muon
/// [large-models#parameters-that-some-ranks-do-not-use]:
///     crate::guide::large_models#parameters-that-some-ranks-do-not-use
/// [ranks#the-same-bits-on-all-ranks]: crate::guide::ranks#the-same-bits-on-all-ranks
/// [saving-without-waiting]: crate::guide::saving_without_waiting
/// [Checkpoints]: crate::guide::resuming
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
/// [design/kernels#the-second-generation]: crate::guide#other-documents
/// [large-models]: crate::guide::large_models
/// [large-models#messages-behind-the-passes]: crate::guide::large_models#messages-behind-the-passes
/// [the host's time]: crate::guide#other-documents
/// [mixed]: crate::guide#other-documents
#[doc = include_str!("../docs/guide/gpu.md")]
pub mod gpu {}
