//! CubeCL kernels of distmuon. They know nothing of Burn: a client, buffers and sizes are all they
//! take, so that they run on every CubeCL runtime.
//!
//! This version has the second half of a symmetric product, [`mirror`], which completes a matrix of
//! which only the lower triangle is known.

#![warn(missing_docs)]

mod mirror;

pub use mirror::mirror;
