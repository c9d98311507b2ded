//! The Muon optimizer for [Burn](https://burn.dev), on one device or many.
//!
//! Muon orthogonalises the momentum of a network's hidden matrices; AdamW updates all other
//! parameters. The crate routes every parameter to one of them by its name, type and shape, and
//! prints the result with its reasons. In a Burn training loop, only the line that makes the
//! optimizer changes:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig, loss::{MseLoss, Reduction}};
//! use burn::optim::GradientsParams;
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use distmuon::{MuonConfig, Schedule};
//!
//! #[derive(Module, Debug)]
//! struct Net { up: Linear, hidden: Linear, head: Linear }
//!
//! let device = Device::default().autodiff();
//! let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
//! let mut model = Net { up: linear(8, 32), hidden: linear(32, 32), head: linear(32, 1) };
//!
//! let routing = MuonConfig::new().route(&model)?; // every parameter, with a reason
//! println!("{routing}");
//! let mut optim = MuonConfig::new().init_batched(&model)?;
//! let lr = Schedule::warmup_constant_warmdown(3e-3, 2, 10, 8);
//! for step in 0..20 {
//!     let x = Tensor::<2>::random([16, 8], Distribution::Normal(0.0, 1.0), &device);
//!     let y = x.clone().sum_dim(1);
//!     let hidden = relu(model.hidden.forward(relu(model.up.forward(x))));
//!     let loss = MseLoss::new().forward(model.head.forward(hidden), y, Reduction::Mean);
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     model = optim.step(lr.at(step), model, grads)?;
//! }
//! # Ok::<(), distmuon::Error>(())
//! ```
//!
//! [`MuonConfig::init_batched`] works on all matrices of one shape as one batch, in few launches.
//! [`MuonConfig::init`] returns Burn's `ModuleOptimizer` instead, as burn-train's `Learner`
//! requires. [`DistMuonConfig::start`] makes the optimizer of `init_batched` on one device and on
//! many ranks (threads or processes that train one model together, usually with one device each).
//! [`World::launch`] runs the loop on every rank: see [several devices](guide::ranks), with the
//! lines that change.
//!
//! Everything that can fail returns a [`Result`], except where Burn's interfaces do not have one:
//! [`MuonConfig::init`] and [`MuonConfig::build`], next to [`MuonConfig::try_init`] and
//! [`MuonConfig::try_build`], and the step of a `ModuleOptimizer` panic with the error's message.
//!
//! # By task
//!
//! The [`guide`] has small programs and tables for each task:
//!
//! - [coming from AdamW](guide::from_adamw) or from Burn's own Muon, and
//!   [comparisons](guide::comparison) with both;
//! - [choosing a learning rate](guide::learning_rate), and [all other settings](guide::settings);
//! - [training by the settings of others](guide::recipes);
//! - [training on one device](guide::one_device), with the fewest launches;
//! - [training on several devices](guide::ranks): a complete program before and after;
//! - [processes and several hosts](guide::hosts): launchers, their variables and the secret;
//! - [models that do not fit](guide::large_models) a rank, and messages behind the passes;
//! - [training with burn-train's `Learner`](guide::learner);
//! - [saving and resuming](guide::resuming), also on another number of ranks;
//! - [exchange with PyTorch](guide::exchange): weights and states as safetensors, and back;
//! - [routing](guide::routing), the optimizer of every parameter;
//! - [excluding and freezing layers, LoRA](guide::excluding);
//! - [mixed precision](guide::mixed_precision): master weights, gradients and loss scaling;
//! - [clipping gradients](guide::clipping), together or separately;
//! - [accumulating gradients](guide::accumulation);
//! - [bounding the logits of attention](guide::qk_clip), by QK-clip;
//! - [is it really Muon?](guide::is_it_really_muon): expectations, and the account of a step;
//! - [watching a run](guide::watching): routing, skipped steps, memory;
//! - [memory, time and launches](guide::cost);
//! - [troubleshooting](guide::troubleshooting): errors, causes and remedies;
//! - [testing and measuring on a GPU](guide::gpu).
//!
//! # Module overview
//!
//! | module | contents |
//! |---|---|
//! | [`muon`] | [`MuonConfig`], and [`Muon`], a Burn [`Optimizer`](burn::optim::Optimizer) for one parameter |
//! | [`orthogonalize`] | [`NewtonSchulz`], the iteration on batches of matrices, in two forms and several types |
//! | [`routing`] | [`Routing`], the optimizer of every parameter, and [`RoutingRule`], which overrides it |
//! | [`elementwise`] | [`AdamWConfig`] and [`LionConfig`], the settings of all other parameters |
//! | [`account`] | [`Account`], what a step has done to every parameter |
//! | [`custom`] | any other optimizer of Burn's interface, sharded by whole parameters |
//! | [`parts`] | optional stages of Muon's update, such as [`NorMuon`](parts::NorMuon) |
//! | [`qk_clip`] | [`QkClip`], which scales the projections of attention heads with large logits |
//! | [`comm`] | [`World`], the ranks that train together, and their collectives |
//! | [`distributed`] | [`DistMuonConfig`] and the optimizers of many ranks; [`plan`](distributed::plan), the assignment of matrices to ranks |
//! | [`parallel`] | layers and experts of which every rank has a slice |
//! | [`schedule`] | [`Schedule`], for momentum, weight decay and learning rate over the steps of a run |
//! | [`recipe`] | [`Recipe`], settings with which others train by Muon, with their sources |
//! | [`certificate`] | a hash chain of what a run was trained with, and of its weights |
//! | [`checkpoint`] | saving and loading the state of a run as one file, which is replaced atomically |
//! | [`exchange`] | weights and states as safetensors, for PyTorch and back |
//! | [`link`] | [`Link`](link::Link), a differentiable operation whose value is computed elsewhere |
//! | [`error`] | [`Error`], with the remedy in every message |
//!
//! # Devices
//!
//! The features `flex` (default), `wgpu`, `vulkan`, `cuda`, `cpu` and `tch` enable Burn's features
//! of the same names. For Flex and Burn's CubeCL backends, this crate has kernels for the iteration
//! and for the elementwise parts of a step. On other backends, such as LibTorch (`tch`), Burn's own
//! operations compute the same, with more roundings in half precision. [`KernelPolicy`] chooses
//! between kernels and Burn's operations; [`KernelPolicy::Tuned`] measures the kernels when a shape
//! is first used.
//!
//! The kernels are tested on software devices (WGSL, SPIR-V with cooperative matrices, CubeCL's CPU
//! runtime) and on one GPU with one rank: `docs/results/gpu.md`.
//!
//! Feature `fusion` (default) supports Burn's fusion on the CubeCL backends. It has to be enabled
//! if the feature `fusion` of `burn` is, which is Burn's default.
//!
//! # Items behind features
//!
//! | feature | adds | needs |
//! |---|---|---|
//! | `train` | `DistMuonStrategy`, `LearnerLogits`, `SkippedStepsMetric`, `DiagnosticsMetric` and `MuonShareMetric`, for burn-train's `Learner` | nothing |
//! | `optimal` | `distributed::plan::Balancing::Optimal`, plans by mixed-integer programming | nothing |
//! | `mpi` | `comm::World::mpi` and `comm::Mpi`, ranks that are processes over MPI, also of `comm::World::from_env` | an MPI and libclang, to build |
//! | `cuda` | `comm::World::nccl`, `comm::Nccl` and `comm::Reduction`, ranks over NCCL, also of `comm::World::from_env` | an LLVM bundle, which Burn downloads; NCCL to run |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
// Only the engines of Flex and of CubeCL read the arguments of the backend extensions.
#![cfg_attr(not(any(feature = "flex", feature = "cube")), allow(unused))]

pub mod account;
mod backend;
pub mod certificate;
pub mod checkpoint;
mod checks;
mod checksum;
pub mod comm;
pub mod custom;
pub mod distributed;
pub mod elementwise;
pub mod error;
mod exact_mars;
pub mod exchange;
mod gradient_buffer;
pub mod guide;
mod host;
pub mod link;
mod load_difference;
mod matrix_blocks;
mod matrix_view;
#[cfg(feature = "train")]
mod metric;
pub mod muon;
pub mod orthogonalize;
pub mod parallel;
mod parameters;
pub mod qk_clip;
pub mod recipe;
mod replaced_file;
pub mod routing;
pub mod schedule;
mod settings_from_depth;
// A link to the file of `distmuon-skips`: unit tests also run from the published package, which
// that package is not part of.
mod flat;
#[cfg(test)]
#[allow(dead_code)] // the devices of the enabled features decide which skips there are
mod skipped_tests;
// A link to the file of `distmuon-testing`, for the same reason.
#[cfg(test)]
mod logs;
// A link to the file of the kernels' tests, for the same reason.
#[cfg(all(test, feature = "cuda"))]
#[allow(dead_code)] // the kernels' tests use all of it
mod cuda_stand_in;
mod update;

pub use account::Account;
pub use backend::{ComputePath, KernelPolicy, NativeKernels};
pub use comm::Launch;
pub use comm::World;
pub use custom::CustomOptimizers;
pub use distributed::{DistModuleOptimizer, DistMuon, DistMuonConfig};
#[cfg(feature = "train")]
pub use distributed::{DistMuonStrategy, LearnerLogits};
pub use elementwise::{AdamWConfig, ElementwiseConfig, LionConfig};
pub use error::{Error, Result};
pub use exact_mars::GradientPair;
pub use gradient_buffer::GradientBuffer;
pub use matrix_blocks::BlockSide;
pub use matrix_view::{MatrixLayout, MatrixView};
#[cfg(feature = "train")]
pub use metric::{DiagnosticsMetric, DiagnosticsQuantity, MuonShareMetric, SkippedStepsMetric};
#[doc(hidden)]
pub use muon::MuonState;
pub use muon::{Muon, MuonConfig};
pub use orthogonalize::{
    Coefficients, IterationDtype, IterationForm, IterationPlan, NewtonSchulz, NewtonSchulzConfig,
    Normalization,
};
pub use qk_clip::{ClippedHeads, LatentHead, MaxLogits, QkClip, QkClipConfig, QkClipRule};
pub use recipe::Recipe;
pub use routing::{
    Expectation, FirstLinear, MuonRoutingRule, ParameterRole, ParameterRoute, RoleSummary, Routing,
    RoutingRule,
};
pub use schedule::Schedule;
pub use settings_from_depth::Dial;
pub use update::parts::{self, Part};
pub use update::{
    LrScale, MasterWeights, MomentumConfig, MomentumForm, SkippedSteps, StateDtype, WeightDecay,
};

/// Runs the program of the README as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
