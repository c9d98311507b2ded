//! Compute paths: the operations of a step, and their implementations, one folder per backend.
//!
//! [`ops`] declares the operations as extensions of Burn's backends. [`path`] decides which
//! implementation runs, and `matrix`, `step` and `adamw` call it: the portable one, which is
//! composed of Burn's own operations and serves as the reference, or the kernels of a backend.

mod adamw;
#[cfg(feature = "cube")]
mod cubecl;
mod finite;
#[cfg(feature = "flex")]
mod flex;
pub(crate) mod graphs;
mod mask;
mod matrix;
mod norms;
pub(crate) mod ops;
mod path;
mod portable;
mod program;
mod step;
mod tensor_list;
#[cfg(feature = "simulated-tf32")]
mod tf32;

#[cfg(feature = "cube")]
pub(crate) use cubecl::first_failure;
#[cfg(feature = "cuda")]
pub(crate) use cubecl::{Failure, from_primitive, primitive};
pub(crate) use finite::reject;
pub(crate) use mask::{FiniteMask, ones_where};
pub(crate) use norms::{ScaledNorms, scaled};
pub(crate) use ops::{
    AdamWControls, AdamWStep, ElementwiseRows, FlaggedRows, LionStep, Moments, MomentumStep,
    MomentumUpdate, ParameterStep, PartialNorms,
};
pub use path::{ComputePath, KernelPolicy, NativeKernels};
pub(crate) use portable::lion;
pub use program::Polynomial;
pub(crate) use program::{Buffers, Program, Step, Value};
pub(crate) use step::{apply, reshaped, update_momentum};

use burn::tensor::DType;

/// The type for values that have to be more precise than parameters of a type, such as learning
/// rates: float64 for float64, and float32 for all others. In float32, `1 - lr decay` moves in
/// steps of 6e-8, which is more than the precision that float64 is chosen for.
pub(crate) fn precise_dtype(parameter: DType) -> DType {
    if parameter == DType::F64 { DType::F64 } else { DType::F32 }
}
