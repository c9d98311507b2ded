//! Collectives over flat tensors, the engines that carry them out, and the [`World`] of ranks.
//!
//! An engine moves buffers and knows no optimizer. All ranks of a group make every call, in the
//! same order. A call is started first and waited for later. Whether it advances in between depends
//! on the engine. Names and meanings are those of MPI and NCCL. The counts of ranks may differ and
//! may be zero.
//!
//! Reductions are exact: every engine adds up in float32, in the same order, so that all of them
//! return the same bits. Only NCCL has another, configurable order (`Reduction::Native`).
//!
//! | engine | ranks | constructor | feature | needs |
//! |---|---|---|---|---|
//! | [`Threads`] | threads of one process, on any devices | [`World::threads`], [`World::threads_with`] | none | nothing |
//! | `Mpi` | processes; tensors pass through the host | `World::mpi`, `World::from_env` | `mpi` | an MPI, and libclang to build |
//! | `Nccl` | processes, or threads, on CUDA devices | `World::nccl`, `World::from_env` | `cuda` | Burn's LLVM bundle to build; `libnccl.so.2` to run |
//!
//! `World::from_env` takes NCCL on CUDA devices and MPI on all others. It reads the variables of a
//! launcher, as `Launch` does.

mod agreement;
mod call;
mod communicator;
#[cfg(feature = "processes")]
mod control;
mod counts;
mod devices;
mod engine;
#[cfg(feature = "processes")]
mod exchange;
mod hierarchy;
#[cfg(feature = "processes")]
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod pending;
mod reduce;
mod rendezvous;
// External calls are those of processes.
#[cfg_attr(not(feature = "processes"), allow(dead_code))]
mod rounds;
mod sync;
mod threads;
mod validate;
mod value;
mod world;

pub(crate) use agreement::{Difference, digest, unite};
pub use communicator::Communicator;
pub use engine::Engine;
pub use hierarchy::Hierarchy;
#[cfg(feature = "processes")]
pub use launch::Launch;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "cuda")]
pub use nccl::{Buffer, CudaMemory, DeviceMemory, Nccl, Reduction, StreamEvent};
pub use pending::Pending;
pub use reduce::ReduceOp;
pub use threads::Threads;
pub(crate) use validate::exchanges;
pub(crate) use world::message;
pub use world::{DEADLINE, World};
