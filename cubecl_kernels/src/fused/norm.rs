//! Frobenius norms without overflow or underflow at any scale.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::parts::{Layout, groups, number_of, own_part, read};
use super::{Batch, F32, Part, UNITS, cubes, grid, own_matrix, own_vectors, vector_size};
use crate::error::Result;
use crate::units::together;

/// Vectors whose squares are added up one after the other, before the sums are: what is lost by rounding grows
/// with the length of both.
pub(super) const SUMMED: usize = 64;

/// Parts of a norm that every cube of [`normalize`] adds up itself; of more, the sum is taken before. All cubes of
/// a matrix read them all: with so many parts, 16 MB from the cache for a matrix of 64 MB, about as long as a launch.
const FEW_PARTS: usize = 1024;

/// Units of a cube for short rows: those of a plane on most devices.
const FEWEST_UNITS: usize = 32;

/// The norms of a batch in parts: for each, a scale and the sum of the squares of the elements divided
/// by it, `[k, parts, 2]` float32 values. As in LAPACK's `slassq`.
#[derive(Debug, Clone)]
pub struct Norms {
    /// The values.
    pub handle: Handle,
    /// Parts of each norm.
    pub parts: usize,
}

impl Norms {
    /// Room for the norms of a batch.
    pub fn empty(client: &Client, batch: Batch, parts: usize) -> Self {
        Self { handle: client.empty(2 * batch.count * parts * size_of::<f32>()), parts }
    }

    /// The same norms in one part each.
    fn joined(&self, client: &Client, batch: Batch) -> Self {
        let whole = Self::empty(client, batch, 1);
        let units = together(&client.properties().hardware, UNITS);
        // SAFETY: every index is below the parts of a matrix.
        unsafe {
            join_kernel::launch_unchecked(
                client,
                grid(1, batch.count),
                CubeDim::new_1d(units),
                AddressType::from_len(2 * batch.count * self.parts),
                self.arg(batch),
                whole.arg(batch),
                batch.count,
                self.parts,
                units,
            );
        }
        whole
    }

    pub(super) fn arg(&self, batch: Batch) -> BufferArg {
        // SAFETY: the buffer holds two values per part, by the contract of the type.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), 2 * batch.count * self.parts) }
    }
}

/// Takes the norms of the rows of some tensors of a type, of so many elements each; the last row of a tensor may be
/// shorter. Every tensor comes with the number of its first row among those that there are norms of.
///
/// Every unit adds up its squares one after the other: take so many parts that these are few.
///
/// # Errors
///
/// Those of the [module](super).
pub fn norms(
    client: &Client,
    tensors: &[(Part, usize)],
    elements: usize,
    norms: &Norms,
    dtype: ElemType,
) -> Result<()> {
    let rows = |part: &Part| part.len().div_ceil(elements.max(1));
    let count = tensors.iter().map(|(part, first)| first + rows(part)).max().unwrap_or(0);
    tensors.iter().try_for_each(|(part, _)| part.check(client, "the input", dtype))?;
    let values = 2 * count * norms.parts;
    Batch::check_values(&[("the norms", &norms.handle, values)])?;
    let tensors: Vec<_> = tensors.iter().filter(|(part, _)| !part.is_empty()).cloned().collect();
    for group in groups(client, &tensors, 1, 1) {
        let all = group.iter().map(|(part, _)| part);
        // As few elements in a vector as float32 has: of more, registers would spill on compute capability 9.0.
        let layout = Layout::new(client, &[dtype, F32], all.clone(), &[elements]);
        let layout = layout.with_rows(all.clone().map(rows));
        let size = layout.vector_size;
        // Units beyond the vectors of a row would only wait.
        let wanted = (elements / size).next_power_of_two().clamp(FEWEST_UNITS, UNITS as usize);
        let units = together(&client.properties().hardware, wanted as u32);
        // SAFETY: every index is below the vectors of a tensor, and rows were checked above.
        unsafe {
            norms_kernel::launch_unchecked(
                client,
                layout.cube_count(norms.parts),
                CubeDim::new_1d(units),
                layout.address_type(values),
                size,
                all.clone().map(|part| part.vectors(size)).collect(),
                BufferArg::from_raw_parts(norms.handle.clone(), values),
                layout.firsts(),
                layout.ends(),
                all.map(|part| part.len() / size).collect(),
                group.iter().map(|(_, first)| *first).collect(),
                elements / size,
                units,
                dtype,
            );
        }
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn norms_kernel<F: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<F, N>]>>,
    norms: &mut [f32],
    firsts: &Sequence<usize>,
    ends: &Sequence<usize>,
    lengths: &Sequence<usize>,
    numbers: &Sequence<usize>,
    vectors: usize,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let (own, row) = own_part(firsts, ends, own_matrix());
    if own >= tensors.len() {
        terminate!();
    }
    let place = number_of(numbers, own) + row;
    let end = min((row + 1) * vectors, number_of(lengths, own));
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    let (first, step) = own_vectors();
    for i in range_stepped(row * vectors + first, end, step) {
        let (s, q) = with_squares::<N>(scale, squares, read(tensors, own, i));
        scale = s;
        squares = q;
    }
    store_part(norms, place, scale, squares, units);
}

/// Every unit adds up some parts, then the cube their sums.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn join_kernel(
    norms: &[f32],
    whole: &mut [f32],
    count: usize,
    parts: usize,
    #[comptime] units: u32,
) {
    let matrix = own_matrix();
    if matrix >= count {
        terminate!();
    }
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    for part in range_stepped(UNIT_POS_X as usize, parts, units as usize) {
        let at = 2 * (matrix * parts + part);
        let (s, q) = joined(scale, squares, norms[at], norms[at + 1]);
        scale = s;
        squares = q;
    }
    store_part(whole, matrix, scale, squares, units);
}

/// Divides every matrix by its norm, or by `epsilon` if that is larger. The types are those of the
/// input and of the result.
pub fn normalize(
    client: &Client,
    input: &Handle,
    norms: &Norms,
    batch: Batch,
    dtypes: [ElemType; 2],
    epsilon: f32,
) -> Result<Handle> {
    let output = client.empty(batch.len() * dtypes[1].size());
    batch.check(client, &[("the input", input, dtypes[0]), ("the result", &output, dtypes[1])])?;
    Batch::check_values(&[("the norms", &norms.handle, 2 * batch.count * norms.parts)])?;
    if batch.is_empty() {
        return Ok(output);
    }
    let whole = (norms.parts > FEW_PARTS).then(|| norms.joined(client, batch));
    let norms = whole.as_ref().unwrap_or(norms);
    let size = vector_size(client, &dtypes, [batch.elements].into_iter());
    let units = together(&client.properties().hardware, UNITS);
    // SAFETY: every index is below the vectors of a matrix.
    unsafe {
        normalize_kernel::launch_unchecked(
            client,
            grid(cubes(batch.elements / size), batch.count),
            CubeDim::new_1d(units),
            batch.address_type(),
            size,
            batch.vectors(input, size),
            batch.vectors(&output, size),
            norms.arg(batch),
            batch.elements / size,
            batch.count,
            norms.parts,
            epsilon,
            units,
            dtypes,
        );
    }
    Ok(output)
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn normalize_kernel<F: Float, O: Float, N: Size>(
    input: &[Vector<F, N>],
    output: &mut [Vector<O, N>],
    norms: &[f32],
    vectors: usize,
    count: usize,
    parts: usize,
    epsilon: f32,
    #[comptime] units: u32,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    let matrix = own_matrix();
    if matrix >= count {
        terminate!();
    }
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    for part in range_stepped(UNIT_POS_X as usize, parts, units as usize) {
        let at = 2 * (matrix * parts + part);
        let (s, q) = joined(scale, squares, norms[at], norms[at + 1]);
        scale = s;
        squares = q;
    }
    let (scale, squares) = summed(scale, squares, units);
    let smallest = f32::new(f32::MIN_POSITIVE);
    let scale = max(scale, smallest);
    let root = max(max(squares.sqrt(), smallest), epsilon / scale);
    let (first, step) = own_vectors();
    for i in range_stepped(first, vectors, step) {
        let at = matrix * vectors + i;
        let x = Vector::<f32, N>::cast_from(input[at]);
        output[at] = Vector::cast_from(x / Vector::new(scale) / Vector::new(root));
    }
}

/// Adds a vector to a scaled sum of squares.
#[cube]
pub(super) fn with_squares<N: Size>(scale: f32, squares: f32, x: Vector<f32, N>) -> (f32, f32) {
    let mut largest = f32::new(0.0);
    #[unroll]
    for j in 0..N::value() {
        largest = max(largest, x.extract(j).abs());
    }
    let mut sum = f32::new(0.0);
    if largest > 0.0 {
        #[unroll]
        for j in 0..N::value() {
            let share = x.extract(j) / largest;
            sum += share * share;
        }
    }
    joined(scale, squares, largest, sum)
}

/// The sum of two scaled sums of squares.
#[cube]
pub(super) fn joined(scale_a: f32, squares_a: f32, scale_b: f32, squares_b: f32) -> (f32, f32) {
    let scale = max(scale_a, scale_b);
    let divisor = max(scale, f32::new(f32::MIN_POSITIVE));
    let (a, b) = (scale_a / divisor, scale_b / divisor);
    (scale, squares_a * a * a + squares_b * b * b)
}

/// Writes the sum over the units of a cube as its part of the norm of its matrix.
#[cube]
pub(super) fn store_part(
    norms: &mut [f32],
    matrix: usize,
    scale: f32,
    squares: f32,
    #[comptime] units: u32,
) {
    let (scale, squares) = summed(scale, squares, units);
    if UNIT_POS_X == 0 {
        let at = 2 * (matrix * CUBE_COUNT_X as usize + CUBE_POS_X as usize);
        norms[at] = scale;
        norms[at + 1] = squares;
    }
}

/// The sum over the units of a cube, on all of them.
#[cube]
fn summed(scale: f32, squares: f32, #[comptime] units: u32) -> (f32, f32) {
    let mut scales = Shared::<[f32]>::new_slice(units as usize);
    let mut sums = Shared::<[f32]>::new_slice(units as usize);
    scales[UNIT_POS_X as usize] = scale;
    sums[UNIT_POS_X as usize] = squares;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(units.ilog2()) {
        let half = comptime!((units / 2) >> level);
        if UNIT_POS_X < half {
            let (a, b) = (UNIT_POS_X as usize, (UNIT_POS_X + half) as usize);
            let (s, q) = joined(scales[a], sums[a], scales[b], sums[b]);
            scales[a] = s;
            sums[a] = q;
        }
        sync_cube();
    }
    (scales[0], sums[0])
}
