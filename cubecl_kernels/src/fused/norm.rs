//! Frobenius norms without overflow or underflow at any scale.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::rows::{LaunchArguments, RowGrid, launch_groups, locate_row, number_of, read};
use super::{Batch, F32, Rows, UNITS, cube_row, cubes_per_row, grid, unit_vectors, vector_size};
use crate::error::Result;
use crate::units::exchanging_units;

/// Vectors whose squares are summed one after the other, before the sums are: the rounding error
/// grows with the length of both.
pub(super) const VECTORS_PER_SUM: usize = 64;

/// Partial norms that every cube of [`normalize`] adds up itself; if there are more, another kernel
/// adds them up before. All cubes of a matrix read all of its partial norms: with this
/// number, 16 MB from the cache for a matrix of 64 MB, which takes about as long as a launch.
const MAX_UNJOINED_PARTIALS: usize = 1024;

/// Units of a cube for short rows: those of a plane on most devices.
const MIN_UNITS: usize = 32;

/// The norms of the rows of a batch as partial norms, in `[k, partials, 2]` float32 values.
///
/// A partial norm is a scale and the sum of the squares of the elements divided by it, as in
/// LAPACK's `slassq`.
#[derive(Debug, Clone)]
pub struct RowNorms {
    /// The buffer of the values.
    pub handle: Handle,
    /// Partial norms of each row.
    pub partials: usize,
}

impl RowNorms {
    /// Allocates the norms of a batch, which are not initialised.
    pub fn empty(client: &Client, batch: Batch, partials: usize) -> Self {
        Self { handle: client.empty(2 * batch.count * partials * size_of::<f32>()), partials }
    }

    /// Returns the same norms with one partial norm each.
    fn joined(&self, client: &Client, batch: Batch) -> Self {
        let whole = Self::empty(client, batch, 1);
        let units = exchanging_units(&client.properties().hardware, UNITS);
        // SAFETY: every index is below the partial norms of a matrix.
        unsafe {
            join_kernel::launch_unchecked(
                client,
                grid(1, batch.count),
                CubeDim::new_1d(units),
                AddressType::from_len(2 * batch.count * self.partials),
                self.arg(batch),
                whole.arg(batch),
                batch.count,
                self.partials,
                units,
            );
        }
        whole
    }

    pub(super) fn arg(&self, batch: Batch) -> BufferArg {
        // SAFETY: every caller has checked or allocated a buffer of two values per partial norm.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), 2 * batch.count * self.partials) }
    }
}

/// Computes the norms of the rows of some tensors of one type. A row has `elements` elements; the
/// last row of a tensor may have fewer.
///
/// Every tensor comes with the index of its first row in `norms`. Every unit adds up its squares
/// one after the other: `norms` should have enough partial norms to keep these sums short.
///
/// # Errors
///
/// Those of the [module](super).
pub fn norms(
    client: &Client,
    tensors: &[(Rows, usize)],
    elements: usize,
    norms: &RowNorms,
    dtype: ElemType,
) -> Result<()> {
    let row_count = |rows: &Rows| rows.len().div_ceil(elements.max(1));
    let ends = tensors.iter().map(|(rows, first)| first + row_count(rows));
    let count = ends.max().unwrap_or(0);
    tensors.iter().try_for_each(|(rows, _)| rows.check(client, "the input", dtype))?;
    let values = 2 * count * norms.partials;
    Batch::check_f32_buffers(&[("the norms", &norms.handle, values)])?;
    let tensors: Vec<_> = tensors.iter().filter(|(rows, _)| !rows.is_empty()).cloned().collect();
    let longest = tensors.iter().map(|(rows, _)| rows.len()).max().unwrap_or(0);
    let address = AddressType::from_len(longest.max(values));
    let arguments = LaunchArguments { buffers: 1, numbers: 4, shared: 1, address };
    let shape = |(rows, _): &(Rows, usize)| [row_count(rows), elements];
    for group in launch_groups(client, &tensors, arguments, shape) {
        let all_rows = group.iter().map(|(rows, _)| rows);
        // Vectors have at most as many elements as those of float32: registers would spill on
        // compute capability 9.0 with more.
        let grid = RowGrid::new(client, &[dtype, F32], all_rows.clone(), &[elements])
            .with_row_counts(all_rows.clone().map(row_count));
        let size = grid.vector_size;
        // Units past the vectors of a row would only wait.
        let units = (elements / size).next_power_of_two().clamp(MIN_UNITS, UNITS as usize);
        let units = exchanging_units(&client.properties().hardware, units as u32);
        // SAFETY: every index is below the vectors of a tensor, and rows were checked above.
        unsafe {
            norms_kernel::launch_unchecked(
                client,
                grid.cube_count(norms.partials),
                CubeDim::new_1d(units),
                address,
                size,
                all_rows.clone().map(|rows| rows.vectors(size)).collect(),
                BufferArg::from_raw_parts(norms.handle.clone(), values),
                grid.first_rows(),
                grid.end_rows(),
                all_rows.map(|rows| rows.len() / size).collect(),
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
    first_rows: &Sequence<usize>,
    end_rows: &Sequence<usize>,
    lengths: &Sequence<usize>,
    first_norms: &Sequence<usize>,
    vectors: usize,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let (index, row) = locate_row(first_rows, end_rows, cube_row());
    if index >= tensors.len() {
        terminate!();
    }
    let norm = number_of(first_norms, index) + row;
    let end = min((row + 1) * vectors, number_of(lengths, index));
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    let (first, step) = unit_vectors();
    for i in range_stepped(row * vectors + first, end, step) {
        let (s, q) = add_squares::<N>(scale, squares, read(tensors, index, i));
        scale = s;
        squares = q;
    }
    store_partial(norms, norm, scale, squares, units);
}

/// Adds up the partial norms of a matrix in one cube: every unit some of them, then the cube their
/// sums.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn join_kernel(
    norms: &[f32],
    whole: &mut [f32],
    count: usize,
    partials: usize,
    #[comptime] units: u32,
) {
    let matrix = cube_row();
    if matrix >= count {
        terminate!();
    }
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    for partial in range_stepped(UNIT_POS_X as usize, partials, units as usize) {
        let position = 2 * (matrix * partials + partial);
        let (s, q) = add_partials(scale, squares, norms[position], norms[position + 1]);
        scale = s;
        squares = q;
    }
    store_partial(whole, matrix, scale, squares, units);
}

/// Divides every matrix by its norm, or by `epsilon` if that is larger, and returns the result.
/// `dtypes` are the types of the input and of the result.
///
/// # Errors
///
/// Those of the [module](super).
pub fn normalize(
    client: &Client,
    input: &Handle,
    norms: &RowNorms,
    batch: Batch,
    dtypes: [ElemType; 2],
    epsilon: f32,
) -> Result<Handle> {
    let output = client.empty(batch.len() * dtypes[1].size());
    batch.check(client, &[("the input", input, dtypes[0]), ("the result", &output, dtypes[1])])?;
    let values = 2 * batch.count * norms.partials;
    Batch::check_f32_buffers(&[("the norms", &norms.handle, values)])?;
    if batch.is_empty() {
        return Ok(output);
    }
    let whole = (norms.partials > MAX_UNJOINED_PARTIALS).then(|| norms.joined(client, batch));
    let norms = whole.as_ref().unwrap_or(norms);
    let size = vector_size(client, &dtypes, [batch.elements].into_iter());
    let units = exchanging_units(&client.properties().hardware, UNITS);
    // SAFETY: every index is below the vectors of a matrix.
    unsafe {
        normalize_kernel::launch_unchecked(
            client,
            grid(cubes_per_row(batch.elements / size), batch.count),
            CubeDim::new_1d(units),
            batch.address_type(),
            size,
            batch.vectors(input, size),
            batch.vectors(&output, size),
            norms.arg(batch),
            batch.elements / size,
            batch.count,
            norms.partials,
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
    partials: usize,
    epsilon: f32,
    #[comptime] units: u32,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    let matrix = cube_row();
    if matrix >= count {
        terminate!();
    }
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    for partial in range_stepped(UNIT_POS_X as usize, partials, units as usize) {
        let position = 2 * (matrix * partials + partial);
        let (s, q) = add_partials(scale, squares, norms[position], norms[position + 1]);
        scale = s;
        squares = q;
    }
    let (scale, squares) = sum_over_units(scale, squares, units);
    // Both divisors are positive, so a matrix of zeros stays zero.
    let smallest = f32::new(f32::MIN_POSITIVE);
    let scale = max(scale, smallest);
    let root = max(max(squares.sqrt(), smallest), epsilon / scale);
    let (first, step) = unit_vectors();
    for i in range_stepped(first, vectors, step) {
        let position = matrix * vectors + i;
        let x = Vector::<f32, N>::cast_from(input[position]);
        // One after the other: their product may overflow or underflow.
        output[position] = Vector::cast_from(x / Vector::new(scale) / Vector::new(root));
    }
}

/// Returns the sum of a scaled sum of squares and the squares of a vector.
#[cube]
pub(super) fn add_squares<N: Size>(scale: f32, squares: f32, x: Vector<f32, N>) -> (f32, f32) {
    let mut largest = f32::new(0.0);
    #[unroll]
    for j in 0..N::value() {
        largest = max(largest, x.extract(j).abs());
    }
    let mut sum = f32::new(0.0);
    if largest > 0.0 {
        #[unroll]
        for j in 0..N::value() {
            // At most 1, so that its square can't overflow; the largest element has exactly 1.
            let ratio = x.extract(j) / largest;
            sum += ratio * ratio;
        }
    }
    add_partials(scale, squares, largest, sum)
}

/// Returns the sum of two scaled sums of squares.
#[cube]
pub(super) fn add_partials(
    scale_a: f32,
    squares_a: f32,
    scale_b: f32,
    squares_b: f32,
) -> (f32, f32) {
    let scale = max(scale_a, scale_b);
    // Two rows of zeros: 0 / 0 would be NaN.
    let divisor = max(scale, f32::new(f32::MIN_POSITIVE));
    let a = scale_a / divisor;
    let b = scale_b / divisor;
    (scale, squares_a * a * a + squares_b * b * b)
}

/// Writes the sum over the units of this cube as its partial norm of its matrix.
#[cube]
pub(super) fn store_partial(
    norms: &mut [f32],
    matrix: usize,
    scale: f32,
    squares: f32,
    #[comptime] units: u32,
) {
    let (scale, squares) = sum_over_units(scale, squares, units);
    if UNIT_POS_X == 0 {
        let position = 2 * (matrix * CUBE_COUNT_X as usize + CUBE_POS_X as usize);
        norms[position] = scale;
        norms[position + 1] = squares;
    }
}

/// Returns the sum over the units of a cube, on all of them.
#[cube]
fn sum_over_units(scale: f32, squares: f32, #[comptime] units: u32) -> (f32, f32) {
    let mut scales = Shared::<[f32]>::new_slice(units as usize);
    let mut sums = Shared::<[f32]>::new_slice(units as usize);
    scales[UNIT_POS_X as usize] = scale;
    sums[UNIT_POS_X as usize] = squares;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(units.ilog2()) {
        let half = comptime!((units / 2) >> level);
        if UNIT_POS_X < half {
            let a = UNIT_POS_X as usize;
            let b = (UNIT_POS_X + half) as usize;
            let (s, q) = add_partials(scales[a], sums[a], scales[b], sums[b]);
            scales[a] = s;
            sums[a] = q;
        }
        sync_cube();
    }
    (scales[0], sums[0])
}
