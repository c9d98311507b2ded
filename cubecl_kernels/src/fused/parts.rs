//! Tensors of several parameters that one launch works on, each where it lies.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{cubes, grid, vector_size};
use crate::error::{Result, check_addresses, check_buffer, check_dtype};

/// The most parts of one launch: what a kernel does is written out for each of them.
const MOST_PARTS: usize = 8;

/// The rows of one parameter in a buffer, in order.
#[derive(Debug, Clone)]
pub struct Part {
    /// The buffer.
    pub handle: Handle,
    /// Its rows.
    pub rows: usize,
    /// Elements of a row.
    pub elements: usize,
}

impl Part {
    /// Elements of all rows.
    pub fn len(&self) -> usize {
        self.rows * self.elements
    }

    /// Returns `true` if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses a type that the device does not have, and a buffer without room for the elements.
    pub(super) fn check(&self, client: &Client, what: &'static str, dtype: ElemType) -> Result<()> {
        check_addresses(client, self.len())?;
        check_dtype(client, dtype)?;
        check_buffer(what, &self.handle, self.len(), dtype)
    }

    /// The buffer, read in vectors.
    pub(super) fn vectors(&self, vector_size: usize) -> BufferArg {
        // SAFETY: every function here checks first that the buffer holds the elements of the part.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len() / vector_size) }
    }
}

/// The items in groups for a launch each, where a kernel binds `each` buffers for an item and `others` beside
/// them: a device may bind only so many at once.
pub(super) fn groups<'a, T>(
    client: &Client,
    items: &'a [T],
    each: usize,
    others: usize,
) -> impl Iterator<Item = &'a [T]> {
    // Another for scalars and lengths.
    let free = (client.properties().hardware.max_bindings as usize).saturating_sub(others + 1);
    items.chunks((free / each).clamp(1, MOST_PARTS))
}

/// The grid of a launch over some parts.
pub(super) struct Layout {
    /// The longest vectors that all of them can be read in.
    pub vector_size: usize,
    /// Cubes that the longest row is divided among.
    pub cubes: usize,
    /// All rows.
    pub rows: usize,
    /// Elements of the longest part.
    most: usize,
    firsts: Vec<usize>,
}

impl Layout {
    /// The layout of parts whose elements are of these types, and lie at multiples of some `steps` in other buffers.
    pub fn new<'a>(
        client: &Client,
        dtypes: &[ElemType],
        parts: impl Iterator<Item = &'a Part> + Clone,
        steps: &[usize],
    ) -> Self {
        let lengths = parts.clone().map(|part| part.elements).chain(steps.iter().copied());
        let vector_size = vector_size(client, dtypes, lengths);
        let longest = parts.clone().map(|part| part.elements).max().unwrap_or(0);
        let cubes = cubes(longest / vector_size);
        let most = parts.clone().map(Part::len).max().unwrap_or(0);
        let layout = Self { vector_size, cubes, rows: 0, most, firsts: vec![] };
        layout.with_rows(parts.map(|part| part.rows))
    }

    /// The same with other rows: so many of each part.
    pub fn with_rows(mut self, counts: impl Iterator<Item = usize>) -> Self {
        (self.rows, self.firsts) = (0, vec![]);
        for count in counts {
            self.firsts.push(self.rows);
            self.rows += count;
        }
        self
    }

    /// The first row of every part.
    pub fn firsts(&self) -> SequenceArg<usize> {
        self.firsts.iter().copied().collect()
    }

    /// The row behind the last one of every part.
    pub fn ends(&self) -> SequenceArg<usize> {
        self.firsts.iter().skip(1).chain([&self.rows]).copied().collect()
    }

    /// So many cubes for every row; there may be more rows of cubes.
    pub fn cube_count(&self, cubes: usize) -> CubeCount {
        grid(cubes, self.rows)
    }

    /// Addresses for the elements of the parts, and of a buffer of so many.
    pub fn address_type(&self, others: usize) -> AddressType {
        AddressType::from_len(self.most.max(others))
    }
}

/// The part that a row of a launch belongs to, and its row there. Rows behind the last part belong to none: to a
/// number behind those of all parts.
#[cube]
pub(super) fn own_part(
    firsts: &Sequence<usize>,
    ends: &Sequence<usize>,
    row: usize,
) -> (usize, usize) {
    let mut own = firsts.len().runtime();
    let mut first = row;
    #[unroll]
    for part in 0..firsts.len() {
        if row >= firsts[part] && row < ends[part] {
            own = part.runtime();
            first = firsts[part];
        }
    }
    (own, row - first)
}

/// The vector of a part at a position. Buffers can't be chosen at run time, but branches that all units of a cube
/// take together cost less than the memory does, and the loops around them are written out once.
#[cube]
pub(super) fn read<F: Float, N: Size>(
    parts: &Sequence<Box<[Vector<F, N>]>>,
    own: usize,
    at: usize,
) -> Vector<f32, N> {
    let mut vector = Vector::<f32, N>::new(0.0);
    #[unroll]
    for part in 0..parts.len() {
        if own == part {
            vector = Vector::cast_from(parts[part][at]);
        }
    }
    vector
}

/// Replaces the vector of a part at a position.
#[cube]
pub(super) fn write<F: Float, N: Size>(
    parts: &mut Sequence<Box<[Vector<F, N>]>>,
    own: usize,
    at: usize,
    vector: Vector<f32, N>,
) {
    #[unroll]
    for part in 0..parts.len() {
        if own == part {
            let values = parts.index_mut(part);
            values[at] = Vector::cast_from(vector);
        }
    }
}

/// The number of a part.
#[cube]
pub(super) fn number_of(numbers: &Sequence<usize>, own: usize) -> usize {
    let mut number = 0_usize.runtime();
    #[unroll]
    for part in 0..numbers.len() {
        if own == part {
            number = numbers[part];
        }
    }
    number
}

/// The factor of a part.
#[cube]
pub(super) fn factor_of(factors: &Sequence<f32>, own: usize) -> f32 {
    let mut factor = f32::new(0.0);
    #[unroll]
    for part in 0..factors.len() {
        if own == part {
            factor = factors[part];
        }
    }
    factor
}
