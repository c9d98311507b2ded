//! The operations on Burn's CubeCL backends, by the kernels of `distmuon-kernels`.

mod adamw;
mod failure;
#[cfg(feature = "cuda")]
mod hopper;
mod matrix;
mod primitives;
mod product;
mod step;
mod tensors;
mod tune;

#[cfg(feature = "cuda")]
pub(crate) use failure::Failure;
pub(crate) use failure::first_failure;
#[cfg(feature = "cuda")]
pub(super) use hopper::{has_native_kernels, native_kernels};
pub(super) use matrix::{kernel, max_small_rows};
#[cfg(feature = "cuda")]
pub(crate) use primitives::{from_primitive, primitive};
pub(super) use tensors::{has_tf32, serves};
