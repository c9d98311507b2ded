//! CubeCL kernels of distmuon. They know nothing of Burn: a client, buffers and sizes are all they
//! take, so that they run on every CubeCL runtime.
//!
//! - [`product`]: products with an epilogue, of which symmetric ones compute only half;
//! - [`gram`]: Newton-Schulz on small matrices, a whole matrix in one cube;
//! - [`fused`]: the elementwise parts of a step of Muon and AdamW, each in one pass over memory;
//! - [`add_identity`]: adds the identity;
//! - [`mirror`]: completes a symmetric matrix of which only the lower triangle is known;
//! - [`units`]: how many units a cube has.

#![warn(missing_docs)]

#[cfg(test)]
mod cuda_code;
mod error;
pub mod fused;
pub mod gram;
mod identity;
mod matrices;
mod mirror;
pub mod product;
#[cfg(test)]
#[path = "../../tests/common/skips.rs"]
mod skips;
pub mod units;

pub use error::{Error, Result};
pub use identity::add_identity;
pub use matrices::Matrices;
pub use mirror::mirror;
