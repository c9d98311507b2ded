//! [CubeCL](https://github.com/tracel-ai/cubecl) kernels of `distmuon`, independent of Burn.
//!
//! A kernel takes a client, buffers and sizes, and runs on every CubeCL runtime.
//!
//! - [`product`]: products plus a scaled addend; of a symmetric product, only half is computed;
//! - [`gram`]: Newton-Schulz on small matrices, one cube per matrix;
//! - [`fused`]: the elementwise parts of a step of Muon and AdamW, each in one pass over memory;
//! - [`add_identity`]: the sum of a matrix and the identity;
//! - [`mirror`]: the completion of a symmetric matrix from its lower triangle;
//! - [`units`]: the number of units of a cube;
//! - `native`, with feature `cuda`: products in Hopper's own instructions, for whole iterations;
//! - `operands`, with feature `cuda`: the order of CubeCL's work with that of other streams.

#![warn(missing_docs)]

mod error;
pub mod fused;
pub mod gram;
mod identity;
mod matrices;
mod mirror;
#[cfg(feature = "cuda")]
pub mod native;
#[cfg(feature = "cuda")]
pub mod operands;
pub mod product;
// A link to the file of `distmuon-skips`: unit tests also run from the published package, which
// that package is not part of.
#[cfg(test)]
#[allow(dead_code)] // other tests use the rest
mod skipped_tests;
pub mod units;

pub use error::{Error, Result};
pub use identity::add_identity;
pub use matrices::Matrices;
pub use mirror::mirror;

/// Compiles the program of the README as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    mod cuda_codegen;

    use cubecl::client::Client;

    /// Returns any available device, and otherwise reports a skipped test.
    pub(crate) fn any_device() -> Option<Client> {
        let client = std::panic::catch_unwind(|| cubecl::Device::Wgpu(Default::default()).client());
        if client.is_err() {
            crate::skipped_tests::skip("there is no device");
        }
        client.ok()
    }
}
