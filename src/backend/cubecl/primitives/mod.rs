//! Conversions between Burn's tensors and the tensors of CubeCL's devices.

// NCCL is the only one to need all of them.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

#[cfg(feature = "fusion")]
mod fused;
#[cfg(not(feature = "fusion"))]
mod plain;

#[cfg(feature = "fusion")]
pub(crate) use fused::*;
#[cfg(not(feature = "fusion"))]
pub(crate) use plain::*;
