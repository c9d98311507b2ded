//! Collectives over flat tensors, the engines that carry them out, and the [`World`] of ranks.
//!
//! A rank is one of the threads or processes that train together. An engine moves buffers between
//! ranks, independently of any optimizer. All ranks of a group make every call, in the same order.
//! A program starts a call first and waits for its result later; some engines carry out the call in
//! between. Names and meanings are as in MPI and NCCL. The ranks' parts of a buffer may have
//! different lengths, also zero.
//!
//! Reductions are exact: every engine adds up in float32, in the same order, so all engines return
//! the same bits. Only NCCL's own reductions, which are optional (`Reduction::Native`), add up in
//! another order.
//!
//! | engine | ranks | constructor | feature | needs |
//! |---|---|---|---|---|
//! | [`Threads`] | threads of one process, on any devices | [`World::launch`], [`World::threads`] | none | nothing |
//! | `Mpi` | processes; tensors pass through the host | `World::launch`, `World::mpi` | `mpi` | an MPI, and libclang to build |
//! | `Nccl` | processes, or threads, with a CUDA device each | `World::launch`, `World::nccl` | `cuda` | Burn's LLVM bundle to build; `libnccl.so.2` to run |
//!
//! [`World::launch`] starts threads, unless a launcher has started the process: it reads the
//! variables that a launcher sets, as `Launch` does. Processes use NCCL on CUDA devices and MPI on
//! all others. Threads use NCCL where each has a CUDA device of its own and the library is found.

mod agreement;
mod call;
mod choose_engine;
mod communicator;
#[cfg(feature = "processes")]
mod control;
mod counts;
mod devices;
mod engine;
mod hierarchy;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod pending;
#[cfg(feature = "processes")]
mod reduce_by_exchange;
pub(crate) mod sum_over_ranks;
mod thread_rounds;
mod uneven_batches;
// Processes make external calls.
#[cfg_attr(not(feature = "processes"), allow(dead_code))]
mod rounds;
mod sync;
mod threads;
mod validate;
mod value_bytes;
mod world;

pub(crate) use agreement::{Difference, digest, unequal, unite};
pub use communicator::Communicator;
pub use counts::PairCounts;
pub(crate) use counts::received;
#[doc(hidden)] // for engines of tests
pub use engine::Engine;
#[doc(hidden)] // `World::by_node` makes it
pub use hierarchy::Hierarchy;
pub use launch::Launch;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "cuda")]
#[doc(hidden)] // for the memory of tests
pub use nccl::{Buffer, CudaMemory, DeviceMemory, Order, StreamEvent};
#[cfg(feature = "cuda")]
pub use nccl::{Nccl, Reduction};
pub use pending::{Pending, PendingParts};
pub(crate) use rounds::named;
pub use sum_over_ranks::ReduceOp;
#[doc(hidden)] // `World::threads` makes it
pub use threads::Threads;
pub use uneven_batches::{Join, Joined};
pub(crate) use validate::exchanges;
pub(crate) use world::message;
pub use world::{DEADLINE, World};
