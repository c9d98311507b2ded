//! Code that the tests of distmuon have in common.
//!
//! - [`references`]: results in float64, from code that shares nothing with the crate;
//! - [`models`]: models, their weights, gradients and records;
//! - [`device`]: properties of the default device;
//! - [`worlds`]: the same case on every engine;
//! - [`watched`]: an engine that reports the calls of another one;
//! - `host`, with feature `cuda`: the engine `nccl` over a library that needs no GPU;
//! - [`mpirun`]: ranks that are processes of Open MPI.

pub mod device;
#[cfg(feature = "cuda")]
pub mod host;
pub mod models;
pub mod mpirun;
#[cfg(feature = "mpi")]
mod profile;
pub mod references;
pub mod watched;
pub mod worlds;

pub use distmuon_skips::{excused, lacks, skip};
