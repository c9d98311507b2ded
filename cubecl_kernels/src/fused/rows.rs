//! Tensors of several parameters in one launch, each in its own buffer.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{cubes_per_row, grid, vector_size};
use crate::error::{Result, check_addresses, check_buffer, check_dtype};

/// Largest number of tensors in one launch: a kernel contains its memory accesses once for each.
const MAX_TENSORS: usize = 8;

/// The rows of one parameter's tensor in a buffer, in order.
#[derive(Debug, Clone)]
pub struct Rows {
    /// The buffer.
    pub handle: Handle,
    /// The number of rows.
    pub count: usize,
    /// Elements of a row.
    pub elements: usize,
}

impl Rows {
    /// Returns the number of elements of all rows.
    pub fn len(&self) -> usize {
        self.count * self.elements
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that the device supports a type, and that the buffer has room for the elements.
    pub(super) fn check(
        &self,
        client: &Client,
        operand: &'static str,
        dtype: ElemType,
    ) -> Result<()> {
        check_addresses(client, self.len())?;
        check_dtype(client, dtype)?;
        check_buffer(operand, &self.handle, self.len(), dtype)
    }

    /// Returns the buffer, read in vectors.
    pub(super) fn vectors(&self, vector_size: usize) -> BufferArg {
        // SAFETY: every caller has checked that the buffer holds the elements.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len() / vector_size) }
    }
}

/// Splits items into groups of one launch each, for a kernel that binds some buffers per item and a
/// number of other ones. A device limits the buffers that a kernel binds.
pub(super) fn launch_groups<'a, T>(
    client: &Client,
    items: &'a [T],
    buffers_per_item: usize,
    other_buffers: usize,
) -> impl Iterator<Item = &'a [T]> {
    // One more is for scalars and lengths.
    let bound = other_buffers + 1;
    let free = (client.properties().hardware.max_bindings as usize).saturating_sub(bound);
    items.chunks((free / buffers_per_item).clamp(1, MAX_TENSORS))
}

/// The grid of a launch over the rows of some tensors.
pub(super) struct RowGrid {
    /// Length of the longest vectors that all tensors can be read in.
    pub vector_size: usize,
    /// Cubes among which the longest row is divided.
    pub cubes_per_row: usize,
    /// Rows of all tensors.
    pub rows: usize,
    /// Elements of the longest tensor.
    longest: usize,
    /// The first row of every tensor.
    first_rows: Vec<usize>,
}

impl RowGrid {
    /// Returns the launch grid. Vectors are as wide as all types allow, and all steps of the
    /// elements in other buffers.
    pub fn new<'a>(
        client: &Client,
        dtypes: &[ElemType],
        tensors: impl Iterator<Item = &'a Rows> + Clone,
        steps: &[usize],
    ) -> Self {
        let lengths = tensors.clone().map(|tensor| tensor.elements).chain(steps.iter().copied());
        let vector_size = vector_size(client, dtypes, lengths);
        let longest_row = tensors.clone().map(|tensor| tensor.elements).max().unwrap_or(0);
        let cubes_per_row = cubes_per_row(longest_row / vector_size);
        let longest = tensors.clone().map(Rows::len).max().unwrap_or(0);
        let grid = Self { vector_size, cubes_per_row, rows: 0, longest, first_rows: vec![] };
        grid.with_row_counts(tensors.map(|tensor| tensor.count))
    }

    /// Replaces the number of rows of every tensor.
    pub fn with_row_counts(mut self, counts: impl Iterator<Item = usize>) -> Self {
        self.rows = 0;
        self.first_rows = vec![];
        for count in counts {
            self.first_rows.push(self.rows);
            self.rows += count;
        }
        self
    }

    /// Returns the first row of every tensor.
    pub fn first_rows(&self) -> SequenceArg<usize> {
        self.first_rows.iter().copied().collect()
    }

    /// Returns the row after the last one of every tensor.
    pub fn end_rows(&self) -> SequenceArg<usize> {
        self.first_rows.iter().skip(1).chain([&self.rows]).copied().collect()
    }

    /// Returns a grid with a number of cubes for every row. It may have more rows of cubes than
    /// needed.
    pub fn cube_count(&self, cubes_per_row: usize) -> CubeCount {
        grid(cubes_per_row, self.rows)
    }

    /// Returns the addresses for the elements of the tensors and of another buffer.
    pub fn address_type(&self, other_elements: usize) -> AddressType {
        AddressType::from_len(self.longest.max(other_elements))
    }
}

/// Returns the tensor that a row of a launch belongs to, and its row there. For rows after the last
/// tensor, the index is the number of tensors.
#[cube]
pub(super) fn locate_row(
    first_rows: &Sequence<usize>,
    end_rows: &Sequence<usize>,
    row: usize,
) -> (usize, usize) {
    let mut index = first_rows.len().runtime();
    let mut first = row;
    #[unroll]
    for tensor in 0..first_rows.len() {
        if row >= first_rows[tensor] && row < end_rows[tensor] {
            index = tensor.runtime();
            first = first_rows[tensor];
        }
    }
    (index, row - first)
}

// A buffer can't be chosen at run time. The functions below branch on the tensor instead: all units
// of a cube take the same branch, which costs less than the memory access, and the loops around the
// accesses are compiled once.

/// Reads the vector at a position of a tensor.
#[cube]
pub(super) fn read<F: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<F, N>]>>,
    index: usize,
    position: usize,
) -> Vector<f32, N> {
    let mut vector = Vector::<f32, N>::new(0.0);
    #[unroll]
    for tensor in 0..tensors.len() {
        if index == tensor {
            vector = Vector::cast_from(tensors[tensor][position]);
        }
    }
    vector
}

/// Replaces the vector at a position of a tensor.
#[cube]
pub(super) fn write<F: Float, N: Size>(
    tensors: &mut Sequence<Box<[Vector<F, N>]>>,
    index: usize,
    position: usize,
    vector: Vector<f32, N>,
) {
    #[unroll]
    for tensor in 0..tensors.len() {
        if index == tensor {
            let values = tensors.index_mut(tensor);
            values[position] = Vector::cast_from(vector);
        }
    }
}

/// Returns the number that belongs to a tensor.
#[cube]
pub(super) fn number_of(numbers: &Sequence<usize>, index: usize) -> usize {
    let mut number = 0_usize.runtime();
    #[unroll]
    for tensor in 0..numbers.len() {
        if index == tensor {
            number = numbers[tensor];
        }
    }
    number
}

/// Returns a factor of a sequence, such as that of a tensor.
#[cube]
pub(crate) fn factor_of(factors: &Sequence<f32>, index: usize) -> f32 {
    let mut factor = f32::new(0.0);
    #[unroll]
    for i in 0..factors.len() {
        if index == i {
            factor = factors[i];
        }
    }
    factor
}
