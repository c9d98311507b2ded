//! The elementwise parts of a step of Muon and of AdamW, each in one pass over memory.
//!
//! Gradients and parameters are read and written where they lie: a launch takes several, a [`Part`] each. What
//! belongs to the optimizer lies in batches `[k, elements]`, in order in one buffer. A float32 flag for every
//! parameter says if it is left as it is, with its momentum or moments. Everything is computed in float32 and
//! rounded once.
//!
//! Buffers begin where vectors of 16 bytes may. Nothing is launched on what does not fit: [`Error::Dtype`] for a type
//! that the device does not have, [`Error::Buffer`] for a buffer that is too small, [`Error::Shape`] for rows that are
//! not those of the batch, [`Error::TooLarge`] for more elements than it has addresses.

mod adamw;
mod muon;
mod norm;
mod parts;
mod refuse;

pub use adamw::{AdamW, Controls, Stepped, adamw};
pub use muon::{Averaged, Momenta, Updated, accumulate, apply};
pub use norm::{Norms, normalize, norms};
pub use parts::Part;
pub use refuse::refuse;

#[cfg(test)]
pub(crate) use {
    adamw::adamw_kernel,
    muon::{accumulate_kernel, apply_kernel},
    norm::{join_kernel, normalize_kernel, norms_kernel},
    refuse::refuse_kernel,
};

use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::error::{Error, Result, check_addresses, check_buffer, check_dtype};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Units of a cube.
pub(crate) const UNITS: u32 = 256;

/// The most cubes that all runtimes take in a dimension.
const MOST_CUBES: usize = 65_535;

/// Buffers that a kernel binds at most for one parameter, with one for scalars and lengths: those of [`adamw`]. A
/// device that binds fewer at once can't run it.
pub const MOST_BUFFERS: usize = 9;

/// Vectors that a unit takes on, where there are enough.
const VECTORS_PER_UNIT: usize = 8;

/// A batch of matrices, or of anything else that is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// How many.
    pub count: usize,
    /// Elements of each.
    pub elements: usize,
}

impl Batch {
    /// Elements of all.
    pub fn len(self) -> usize {
        self.count * self.elements
    }

    /// Returns `true` if there is nothing to do.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Refuses types that a device has not, and buffers without room for the elements.
    fn check(self, client: &Client, buffers: &[(&'static str, &Handle, ElemType)]) -> Result<()> {
        check_addresses(client, self.len())?;
        buffers.iter().try_for_each(|(what, handle, dtype)| {
            check_dtype(client, *dtype)?;
            check_buffer(what, handle, self.len(), *dtype)
        })
    }

    /// Refuses parts that are not matrices of the batch, from `first` on.
    fn check_parts<'a>(
        self,
        what: &'static str,
        mut parts: impl Iterator<Item = &'a Part>,
        first: usize,
    ) -> Result<()> {
        let fits = |end, part: &Part| {
            let end = end + part.rows;
            match part.elements == self.elements && end <= self.count {
                true => Ok(end),
                false => Err(Error::Shape {
                    what,
                    found: [end, 1, part.elements],
                    expected: format!("at most [{}, 1, {}]", self.count, self.elements),
                }),
            }
        };
        parts.try_fold(first, fits).map(drop)
    }

    /// Refuses buffers without room for so many float32 values.
    fn check_values(buffers: &[(&'static str, &Handle, usize)]) -> Result<()> {
        let mut buffers = buffers.iter();
        buffers.try_for_each(|(what, handle, values)| check_buffer(what, handle, *values, F32))
    }

    /// The buffer of its elements, read in vectors.
    fn vectors(self, handle: &Handle, vector_size: usize) -> BufferArg {
        // SAFETY: every function here checks first that the buffer holds the elements of the batch.
        unsafe { BufferArg::from_raw_parts(handle.clone(), self.len() / vector_size) }
    }

    fn address_type(self) -> AddressType {
        AddressType::from_len(self.len())
    }
}

/// The longest vectors that elements of these types can be read in, and that divide some lengths.
fn vector_size(
    client: &Client,
    dtypes: &[ElemType],
    lengths: impl Iterator<Item = usize> + Clone,
) -> usize {
    let bytes = dtypes.iter().map(ElemType::size).max().unwrap_or(1);
    let divides = |size: &usize| lengths.clone().all(|length| length.is_multiple_of(*size));
    client.io_optimized_vector_sizes(bytes).filter(divides).max().unwrap_or(1)
}

/// Cubes that a row of vectors is divided among. Where there are too few, units take more vectors.
fn cubes(vectors: usize) -> usize {
    vectors.div_ceil(VECTORS_PER_UNIT * UNITS as usize).clamp(1, MOST_CUBES)
}

/// A grid with so many cubes for every row; there may be more rows of cubes.
fn grid(cubes: usize, rows: usize) -> CubeCount {
    let layers = rows.div_ceil(MOST_CUBES).max(1);
    CubeCount::Static(cubes as u32, rows.div_ceil(layers).max(1) as u32, layers as u32)
}

/// The matrix of a cube.
#[cube]
fn own_matrix() -> usize {
    (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) as usize
}

/// The first vector of a matrix that a unit takes, and the step to the next one.
#[cube]
fn own_vectors() -> (usize, usize) {
    let first = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    (first as usize, (CUBE_COUNT_X * CUBE_DIM_X) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_dimension_of_a_grid_is_too_long() {
        for (vectors, rows) in [(0, 0), (1, 1), (1 << 40, 3), (77, 65_536), (2048, 1 << 24)] {
            let CubeCount::Static(x, y, z) = grid(cubes(vectors), rows) else {
                panic!("a constant")
            };
            let longest = x.max(y).max(z) as usize;
            assert!((1..=MOST_CUBES).contains(&longest), "{vectors} {rows}: {x} x {y} x {z}");
            assert!(y as usize * z as usize >= rows);
        }
        assert_eq!(cubes(2048 * 7 + 1), 8);
    }
}
