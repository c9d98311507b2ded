//! Compute paths: the operations of a step, and their implementations, one folder per backend.
//!
//! [`ops`] declares the operations as extensions of Burn's backends. [`path`] decides which
//! implementation runs, and `matrix`, `step` and `adamw` call it: the portable one, which is
//! composed of Burn's own operations and serves as the reference, or the kernels of a backend.

mod acceptance;
mod adamw;
mod compute_path;
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
mod portable;
mod precise;
mod program;
mod step;
mod tensor_list;
#[cfg(feature = "simulated-tf32")]
mod tf32;
mod values;

pub(crate) use acceptance::accept;
pub use compute_path::{ComputePath, KernelPolicy, NativeKernels};
#[cfg(feature = "cube")]
pub(crate) use cubecl::first_failure;
#[cfg(feature = "cuda")]
pub(crate) use cubecl::{Failure, from_primitive, primitive};
pub(crate) use finite::reject;
pub(crate) use mask::{FiniteMask, ones_where};
pub(crate) use norms::ScaledNorms;
pub(crate) use ops::{
    Acceptance, AdamWControls, AdamWStep, ElementwiseRows, FlaggedRows, LionStep, MatrixFlags,
    Moments, MomentumStep, MomentumUpdate, ParameterStep, PartialNorms, SkipCount, StepCounts,
};
pub(crate) use portable::{corrected, lion};
pub(crate) use precise::{precise_dtype, scaled};
pub use program::Polynomial;
pub(crate) use program::{AOL_SIZE, PreparedProgram, Program, Rescaling, Step, Value};
pub(crate) use step::{
    apply, apply_and_count, reshaped, restore, round_parts, rounded, update_momentum,
};
pub(crate) use values::{Values, split};
