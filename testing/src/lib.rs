//! Code that the tests of distmuon have in common.
//!
//! - [`references`]: results in float64, from code that shares nothing with the crate;
//! - [`models`]: models, their weights, gradients and records;
//! - [`precision`]: a model in half precision, and its runs;
//! - [`naive`]: the reference for sharded optimizers;
//! - [`combinations`]: parts of the update that are used together, and a model for them;
//! - [`device`]: properties of the default device;
//! - [`empty_operations`]: operations without elements, which fusion must not see;
//! - [`worlds`]: the same case on every engine;
//! - [`simulated`]: a rank among many that are not there;
//! - [`watched`]: an engine that reports the calls of another one;
//! - `host`, with feature `cuda`: the engine `nccl` over a library that needs no GPU;
//! - [`mpirun`]: ranks that are processes of Open MPI.

pub mod combinations;
pub mod device;
pub mod empty_operations;
#[cfg(feature = "cuda")]
pub mod host;
pub mod logs;
pub mod models;
pub mod mpirun;
pub mod naive;
pub mod precision;
#[cfg(feature = "mpi")]
mod profile;
pub mod references;
pub mod simulated;
pub mod watched;
pub mod worlds;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use distmuon_skips::{excused, lacks, skip};

/// Returns the message of the panic that a function ends with.
///
/// # Panics
///
/// If the function returns, or its panic has another payload than a formatted message.
pub fn panic_message<T>(run: impl FnOnce() -> T) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).map(drop).expect_err("the function panics");
    *panic.downcast::<String>().expect("the panic has a formatted message")
}
