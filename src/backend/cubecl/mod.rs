//! The operations on Burn's CubeCL backends, by the kernels of `distmuon-kernels`.

mod adamw;
mod failure;
mod matrix;
#[cfg(feature = "cuda")]
mod native;
mod primitives;
mod product;
mod step;
mod tensors;
mod tune;

#[cfg(feature = "cuda")]
pub(crate) use failure::Failure;
pub(crate) use failure::first_failure;
pub(super) use matrix::{kernel, max_small_rows};
#[cfg(feature = "cuda")]
pub(super) use native::native_kernels;
#[cfg(feature = "cuda")]
pub(crate) use primitives::{from_primitive, primitive};
pub(super) use tensors::{has_tf32, serves};
