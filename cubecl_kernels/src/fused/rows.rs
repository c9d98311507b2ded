//! Tensors of several parameters in one launch, each in its own buffer.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{cubes_per_row, grid, vector_size};
use crate::error::{Result, check_addresses, check_buffer, check_dtype};

/// Largest number of tensors in one launch, if all of them are short: a kernel contains its memory
/// accesses once for each.
pub(crate) const MAX_TENSORS: usize = 64;

/// Tensors among which a kernel branches at a time, and the most of which a launch may have any
/// number and any length. Above it, the number is a power of two, so that a device compiles few
/// kernels, and the kernels spill a few bytes of registers.
pub(crate) const BRANCHES: usize = 8;

/// Elements of a short tensor. Eight longer ones take a device about as long as the host takes for
/// a launch: 10 us at 28 bytes for each element of AdamW and 4 TB/s. Computed, not measured.
const SHORT: usize = 1 << 16;

/// Bytes of a kernel's arguments on CUDA, without what is left for those that all tensors share.
const ARGUMENT_BYTES: usize = 4096 - 512;

/// Elements past the ends of short tensors that the units of a launch may be started for, since the
/// longest tensor has that many more. By estimate, not measured, the 1024 cubes for these are
/// started in the time of a launch.
const MAX_IDLE: usize = 1 << 23;

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
    /// Returns the number of rows and their length.
    pub(super) fn shape(&self) -> [usize; 2] {
        [self.count, self.elements]
    }

    /// Returns the number of elements of all rows.
    pub fn len(&self) -> usize {
        self.count * self.elements
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all elements of a joined buffer as one row.
    fn joined(&self, elements: usize) -> Self {
        Self { handle: self.handle.clone(), count: 1, elements }
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

/// `true` if the values of all parameters of a call are in one buffer, and `false` if each
/// parameter has a buffer of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined(pub bool);

impl Joined {
    /// Checks that the device supports a type, and that buffers have room for the values. A joined
    /// buffer has `elements`.
    pub(super) fn check<'a>(
        self,
        client: &Client,
        mut values: impl Iterator<Item = &'a Rows>,
        elements: usize,
        dtype: ElemType,
    ) -> Result<()> {
        let checked = |values: &Rows| values.check(client, "the parameter", dtype);
        match self {
            Self(false) => values.try_for_each(checked),
            Self(true) => values.next().map_or(Ok(()), |values| checked(&values.joined(elements))),
        }
    }

    /// Returns the buffers of the parameters of a launch, read in vectors. A joined buffer has
    /// `elements`.
    pub(super) fn buffers<'a, S>(
        self,
        values: impl Iterator<Item = &'a Rows>,
        elements: usize,
        vector_size: usize,
    ) -> S
    where
        S: FromIterator<BufferArg>,
    {
        let one = |values: &Rows| match self {
            Self(false) => values.vectors(vector_size),
            Self(true) => values.joined(elements).vectors(vector_size),
        };
        values.take(if self.0 { 1 } else { usize::MAX }).map(one).collect()
    }
}

/// The arguments of a kernel of several tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchArguments {
    /// Buffers of each tensor.
    pub buffers: usize,
    /// Numbers of each tensor.
    pub numbers: usize,
    /// Buffers that all tensors share, without the one for numbers and lengths.
    pub shared: usize,
    /// The type of addresses, and of the largest numbers.
    pub address: AddressType,
}

impl LaunchArguments {
    /// Returns the largest number of tensors in a launch. Devices limit the buffers that a kernel
    /// binds, and CUDA limits the bytes of its arguments: each buffer has a pointer and a length.
    fn max_tensors(self, client: &Client) -> usize {
        let bindings = client.properties().hardware.max_bindings as usize;
        // One more for the buffer in which CubeCL passes numbers.
        let by_bindings = bindings.saturating_sub(self.shared + 1) / self.buffers;
        let length = self.address.size();
        let by_bytes = ARGUMENT_BYTES / (self.buffers * (8 + length) + self.numbers * length);
        by_bindings.min(by_bytes).clamp(1, MAX_TENSORS)
    }
}

/// Splits items into groups of one launch each. `shape` returns the number of an item's rows and
/// their length: a launch starts as many units for each row as its longest one needs.
pub(super) fn launch_groups<'a, T>(
    client: &Client,
    items: &'a [T],
    arguments: LaunchArguments,
    shape: impl Fn(&T) -> [usize; 2],
) -> impl Iterator<Item = &'a [T]> {
    let max_tensors = arguments.max_tensors(client);
    let mut left = items;
    std::iter::from_fn(move || {
        let (group, others) = left.split_at(group_size(left.iter().map(&shape), max_tensors));
        left = others;
        (!group.is_empty()).then_some(group)
    })
}

/// Returns how many of the first tensors are in one launch, from their numbers of rows and the
/// lengths of these.
fn group_size(shapes: impl Iterator<Item = [usize; 2]>, max_tensors: usize) -> usize {
    let (mut tensors, mut longest, mut rows, mut elements) = (0, 0, 0, 0);
    let mut are_short = true;
    let fits = |[count, length]: &[usize; 2]| {
        tensors += 1;
        longest = longest.max(*length);
        rows += count;
        elements += count * length;
        are_short &= count * length <= SHORT;
        // The grid has the length of the longest row for all: cubes past the end of shorter ones
        // are launched for nothing.
        (are_short || tensors <= BRANCHES) && rows * longest - elements <= MAX_IDLE
    };
    match shapes.take(max_tensors).take_while(fits).count() {
        // Powers of two: each number of tensors is a kernel to compile.
        many @ BRANCHES.. => 1 << many.ilog2(),
        few => few,
    }
}

/// The grid of a launch over the rows of some tensors.
pub(super) struct RowGrid {
    /// Length of the longest vectors that all tensors can be read in.
    pub vector_size: usize,
    /// Cubes among which the longest row is divided.
    pub cubes_per_row: usize,
    /// Rows of all tensors.
    pub rows: usize,
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
        // One width of vectors for all: a kernel has one type of buffer.
        let longest_row = tensors.clone().map(|tensor| tensor.elements).max().unwrap_or(0);
        let cubes_per_row = cubes_per_row(longest_row / vector_size);
        let grid = Self { vector_size, cubes_per_row, rows: 0, first_rows: vec![] };
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

// A buffer can't be chosen at run time. The functions below branch on the tensor instead, in two
// levels: all units of a cube take the same branch, which costs less than the memory access, and
// the loops around the accesses are compiled once.

/// Reads the vector at a position of a tensor.
#[cube]
pub(super) fn read<F: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<F, N>]>>,
    index: usize,
    position: usize,
) -> Vector<f32, N> {
    let mut vector = Vector::<f32, N>::new(0.0);
    let count = tensors.len();
    #[unroll]
    for block in 0..comptime!(count.div_ceil(BRANCHES)) {
        if comptime!(count <= BRANCHES) || index / BRANCHES == block {
            #[unroll]
            for tensor in comptime!(block * BRANCHES)..comptime!(count.min((block + 1) * BRANCHES))
            {
                if index == tensor {
                    vector = Vector::cast_from(tensors[tensor][position]);
                }
            }
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
    let count = tensors.len();
    #[unroll]
    for block in 0..comptime!(count.div_ceil(BRANCHES)) {
        if comptime!(count <= BRANCHES) || index / BRANCHES == block {
            #[unroll]
            for tensor in comptime!(block * BRANCHES)..comptime!(count.min((block + 1) * BRANCHES))
            {
                if index == tensor {
                    let values = tensors.index_mut(tensor);
                    values[position] = Vector::cast_from(vector);
                }
            }
        }
    }
}

/// Returns the number that belongs to a tensor.
#[cube]
pub(super) fn number_of(numbers: &Sequence<usize>, index: usize) -> usize {
    let mut number = 0_usize.runtime();
    let count = numbers.len();
    #[unroll]
    for block in 0..comptime!(count.div_ceil(BRANCHES)) {
        if comptime!(count <= BRANCHES) || index / BRANCHES == block {
            #[unroll]
            for tensor in comptime!(block * BRANCHES)..comptime!(count.min((block + 1) * BRANCHES))
            {
                if index == tensor {
                    number = numbers[tensor];
                }
            }
        }
    }
    number
}

/// Returns a factor of a sequence, such as that of a tensor.
#[cube]
pub(crate) fn factor_of(factors: &Sequence<f32>, index: usize) -> f32 {
    let mut factor = f32::new(0.0);
    let count = factors.len();
    #[unroll]
    for block in 0..comptime!(count.div_ceil(BRANCHES)) {
        if comptime!(count <= BRANCHES) || index / BRANCHES == block {
            #[unroll]
            for tensor in comptime!(block * BRANCHES)..comptime!(count.min((block + 1) * BRANCHES))
            {
                if index == tensor {
                    factor = factors[tensor];
                }
            }
        }
    }
    factor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_takes_many_tensors_of_similar_length() {
        let groups = |lengths: &[usize]| {
            let (mut left, mut sizes) = (lengths, vec![]);
            while !left.is_empty() {
                let size = group_size(left.iter().map(|length| [1, *length]), MAX_TENSORS);
                left = &left[size..];
                sizes.push(size);
            }
            sizes
        };
        assert_eq!(groups(&[768; 72]), [64, 8]);
        assert_eq!(groups(&[768; 71]), [64, 7]);
        assert_eq!(groups(&[768; 30]), [16, 8, 6]);
        assert_eq!(groups(&[SHORT + 1; 30]), [8, 8, 8, 6]);
        assert_eq!(groups(&[[768; 9], [SHORT + 1; 9]].concat()), [8, 8, 2]);
        // The long one would start units for rows that end before them.
        assert_eq!(groups(&[38_597_376, 768, 768, 768]), [1, 3]);
        assert_eq!(groups(&[MAX_IDLE + 768, 768, 768, 768]), [2, 2]);
        assert_eq!(groups(&[MAX_IDLE / 2, 0, 0, 0]), [3, 1]);
    }
}
