//! The elementwise parts of a step of Muon and of AdamW, each in one pass over memory.
//!
//! Gradients and parameters are read and written in place: a launch takes several tensors, each as
//! [`Rows`]. The optimizer's state is in batches `[k, elements]`, in order in one buffer. Every
//! parameter has a float32 flag. If it is set, the gradient was rejected: the parameter stays as it
//! is, with its momentum or moments. Everything is computed in float32 and rounded once. The
//! float32 [master weights](restore) of parameters in half precision are [joined](Joined) in one
//! buffer.
//!
//! Buffers begin at multiples of 16 bytes, where vectors may begin. Operands that do not fit are
//! rejected before anything is launched:
//!
//! - [`Error::Dtype`] for a type that the device does not support;
//! - [`Error::Buffer`] for a buffer that is too small;
//! - [`Error::Shape`] for rows that are not those of the batch;
//! - [`Error::TooLarge`] for a buffer of more elements than the device can address.

mod accept;
mod adamw;
mod masters;
mod muon;
mod norm;
mod reject;
mod rows;

pub use accept::{AcceptBuffers, accept};
pub use adamw::{AdamW, AdamWTypes, AdamWUpdate, StepControls, adamw};
pub use masters::{Published, restore};
pub use muon::{
    MomentumBuffers, MomentumInput, ParameterUpdate, SkipBuffers, apply, apply_and_count,
    update_momentum,
};
pub use norm::{RowNorms, normalize, norms};
pub use reject::reject;
pub(crate) use rows::factor_of;
pub use rows::{Joined, Rows};

#[cfg(test)]
pub(crate) use {
    accept::accept_kernel,
    adamw::adamw_kernel,
    masters::restore_kernel,
    muon::{apply_and_count_kernel, apply_kernel, update_momentum_kernel},
    norm::{join_kernel, normalize_kernel, norms_kernel},
    reject::reject_kernel,
    rows::{BRANCHES, MAX_TENSORS},
};

use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::error::{Error, Result, check_addresses, check_buffer, check_dtype};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Units of a cube.
pub(crate) const UNITS: u32 = 256;

/// Largest number of cubes along a dimension that all runtimes accept.
const MAX_CUBES: usize = 65_535;

/// Largest number of buffers that a kernel binds for one parameter, which is that of [`adamw`],
/// including the buffer for scalars and lengths. The kernels do not run on a device that binds
/// fewer buffers at once.
pub const MAX_BUFFERS: usize = 9;

/// Vectors that a unit processes if there are enough of them.
const VECTORS_PER_UNIT: usize = 8;

/// A batch of matrices, or of other contiguous rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// The number of matrices.
    pub count: usize,
    /// Elements of each matrix.
    pub elements: usize,
}

impl Batch {
    /// Returns the number of elements of all matrices.
    pub fn len(self) -> usize {
        self.count * self.elements
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Checks that the device supports the types, and that the buffers have room for the elements.
    fn check(self, client: &Client, buffers: &[(&'static str, &Handle, ElemType)]) -> Result<()> {
        check_addresses(client, self.len())?;
        buffers.iter().try_for_each(|(operand, handle, dtype)| {
            check_dtype(client, *dtype)?;
            check_buffer(operand, handle, self.len(), *dtype)
        })
    }

    /// Checks that the rows of some tensors are matrices of the batch, from `first` on.
    fn check_rows<'a>(
        self,
        operand: &'static str,
        mut tensors: impl Iterator<Item = &'a Rows>,
        first: usize,
    ) -> Result<()> {
        let fits = |end, rows: &Rows| {
            let end = end + rows.count;
            match rows.elements == self.elements && end <= self.count {
                true => Ok(end),
                false => Err(Error::Shape {
                    operand,
                    expected: format!("at most [{}, 1, {}]", self.count, self.elements),
                    actual: format!("{:?}", [end, 1, rows.elements]),
                }),
            }
        };
        tensors.try_fold(first, fits).map(drop)
    }

    /// Checks that buffers have room for a number of float32 values each.
    fn check_f32_buffers(buffers: &[(&'static str, &Handle, usize)]) -> Result<()> {
        buffers
            .iter()
            .try_for_each(|&(operand, handle, values)| check_buffer(operand, handle, values, F32))
    }

    /// Checks that the factor on all gradients, if there is one, has its value.
    fn check_factor(factor: Option<&Handle>) -> Result<()> {
        factor.map_or(Ok(()), |factor| check_buffer("the factor", factor, 1, F32))
    }

    /// Returns the buffer of the batch's elements, read in vectors.
    fn vectors(self, handle: &Handle, vector_size: usize) -> BufferArg {
        // SAFETY: every function here checks first that the buffer holds the elements of the batch.
        unsafe { BufferArg::from_raw_parts(handle.clone(), self.len() / vector_size) }
    }

    fn address_type(self) -> AddressType {
        AddressType::from_len(self.len())
    }
}

/// Returns the length of the longest vectors that elements of some types can be read in, and that
/// divide some lengths.
fn vector_size(
    client: &Client,
    dtypes: &[ElemType],
    lengths: impl Iterator<Item = usize> + Clone,
) -> usize {
    let bytes = dtypes.iter().map(ElemType::size).max().unwrap_or(1);
    // A vector across the end of a row would mix two rows.
    let divides = |size: &usize| lengths.clone().all(|length| length.is_multiple_of(*size));
    client.io_optimized_vector_sizes(bytes).filter(divides).max().unwrap_or(1)
}

/// Returns the number of cubes that a row of vectors is divided among. If that is too small, units
/// process more vectors.
fn cubes_per_row(vectors: usize) -> usize {
    vectors.div_ceil(VECTORS_PER_UNIT * UNITS as usize).clamp(1, MAX_CUBES)
}

/// Returns a grid with a number of cubes for every row. It may have more rows of cubes than needed.
fn grid(cubes_per_row: usize, rows: usize) -> CubeCount {
    // Rows of cubes beyond the limit of a dimension are divided among layers.
    let layers = rows.div_ceil(MAX_CUBES).max(1);
    CubeCount::Static(cubes_per_row as u32, rows.div_ceil(layers).max(1) as u32, layers as u32)
}

/// Returns the row of a launch that this cube works on.
#[cube]
fn cube_row() -> usize {
    (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) as usize
}

/// Returns the first vector of a row that this unit processes, and the step to the next one.
#[cube]
fn unit_vectors() -> (usize, usize) {
    let first = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    (first as usize, (CUBE_COUNT_X * CUBE_DIM_X) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_of_any_size_covers_all_rows_within_the_limits_of_its_dimensions() {
        for (vectors, rows) in [(0, 0), (1, 1), (1 << 40, 3), (77, 65_536), (2048, 1 << 24)] {
            let CubeCount::Static(x, y, z) = grid(cubes_per_row(vectors), rows) else {
                panic!("a grid has a static count")
            };
            let longest = x.max(y).max(z) as usize;
            assert!((1..=MAX_CUBES).contains(&longest), "{vectors} {rows}: {x} x {y} x {z}");
            assert!(y as usize * z as usize >= rows);
        }
        assert_eq!(cubes_per_row(2048 * 7 + 1), 8);
    }
}
