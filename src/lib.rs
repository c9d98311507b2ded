//! Muon for [Burn](https://burn.dev): the optimizer that orthogonalises the momentum of hidden
//! matrices, with AdamW for everything else.
//!
//! One line changes in a Burn training loop: the optimizer is made for the model.
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
//! let routing = MuonConfig::new().route(&model)?; // who updates what, and why
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
//! # By task
//!
//! The [`guide`] has small programs and tables for each:
//!
//! - [coming from AdamW](guide::from_adamw), or from Burn's own Muon: what else changes;
//! - [choosing a learning rate](guide::learning_rate);
//! - [excluding and freezing layers, LoRA](guide::excluding);
//! - [clipping gradients](guide::clipping), by one norm or each by itself;
//! - [accumulating gradients](guide::accumulation);
//! - [saving and resuming](guide::resuming);
//! - [watching a run](guide::watching);
//! - [from 1 to 8 GPUs](guide::ranks): a complete program before and after;
//! - [training with burn-train's `Learner`](guide::learner);
//! - [what it costs](guide::cost), in memory and time.
//!
//! # By component
//!
//! - [`muon`]: the rule for one parameter, [`Muon`], which is a Burn
//!   [`Optimizer`](burn::optim::Optimizer), and its configuration, [`MuonConfig`];
//! - [`orthogonalize`]: Newton-Schulz on batches of matrices, in two forms and any precision;
//! - [`route`]: which parameter goes to Muon and which to AdamW;
//! - [`adamw`]: what AdamW's parameters are trained with;
//! - [`dist`]: the same on many ranks;
//! - [`schedule`]: momentum, weight decay and learning rate over the steps of a run;
//! - [`checkpoint`]: a run in one file that is replaced as a whole;
//! - [`error`]: what can go wrong.
//!
//! # Devices and features
//!
//! The features `flex` (default), `wgpu`, `vulkan`, `cuda`, `cpu` and `tch` enable Burn's features of
//! the same names. On Flex and on Burn's CubeCL backends, the iteration and the
//! elementwise parts have kernels of their own; elsewhere, as on LibTorch (`tch`), they are composed of Burn's
//! operations ([`KernelPolicy`]), which round half precision more often. KernelPolicy are
//! tested on software devices (WGSL, SPIR-V with cooperative matrices, CubeCL's CPU runtime) and compiled
//! for CUDA; nothing has run on a GPU yet.
//!
//! [`KernelPolicy::Tuned`] measures them when a shape is met first. Feature `fusion` (default) is Burn's fusion
//! on the CubeCL backends; it has to be on here if it is on in `burn`, whose default it is, too.
//!
//! Items that need a feature:
//!
//! | feature | adds |
//! |---|---|
//! | `train` | `dist::DistMuonStrategy` and `SkippedStepsMetric`, for burn-train's `Learner` |
//! | `optimal` | plans by mixed-integer programming, `dist::plan::Balancing::Optimal` |
//! | `mpi` | `dist::World::mpi`: ranks that are processes over MPI; needs an MPI and libclang to build |
//! | `cuda` | `dist::World::nccl` and `dist::Reduction`: ranks that are processes over NCCL; Burn downloads an LLVM bundle to build |
//! | `mpi` or `cuda` | `dist::World::from_env`, `dist::World::from_env_or_alone` and `dist::Launch`, for what a launcher starts |
//!
//! Documentation that is built without these devices, as on docs.rs, has `train` and `optimal` only.

#![warn(missing_docs)]
// Only the engines of Flex and of CubeCL read the arguments of the backend extensions.
#![cfg_attr(not(any(feature = "flex", feature = "cube")), allow(unused))]

pub mod adamw;
mod backend;
pub mod checkpoint;
mod checks;
pub mod comm;
pub mod distributed;
pub mod error;
pub mod guide;
mod matrix_view;
#[cfg(feature = "train")]
mod metric;
pub mod muon;
pub mod orthogonalize;
mod parameters;
pub mod routing;
pub mod schedule;
mod slices;
mod update;

pub use adamw::AdamWConfig;
pub use backend::{ComputePath, KernelPolicy};
#[cfg(feature = "processes")]
pub use comm::Launch;
pub use comm::World;
#[cfg(feature = "train")]
pub use distributed::DistMuonStrategy;
pub use distributed::{DistModuleOptimizer, DistMuon, DistMuonConfig};
#[cfg(test)]
use distmuon_skips as skips;
pub use error::{Error, Result};
pub use matrix_view::{MatrixLayout, MatrixView};
#[cfg(feature = "train")]
pub use metric::SkippedStepsMetric;
pub use muon::{MomentumConfig, Muon, MuonConfig, MuonState};
pub use orthogonalize::{
    Coefficients, IterationDtype, IterationForm, IterationPlan, NewtonSchulz, NewtonSchulzConfig,
};
pub use routing::{
    MuonRoutingRule, ParameterRole, ParameterRoute, RoleSummary, Routing, RoutingRule,
};
pub use schedule::Schedule;
pub use update::parts::{self, Part};
pub use update::{LrScale, SkippedSteps, WeightDecay};

/// Runs the program of the README as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
