//! Frobenius norms without overflow or underflow at any scale.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Batch, UNITS, own_matrix, own_vectors};

/// The parts of the norms of a batch that the cubes have found: for each, a scale and the sum of the
/// squares of the elements divided by it. As in LAPACK's `slassq`.
#[derive(Debug, Clone)]
pub struct Norms {
    pub(super) parts: Handle,
    pub(super) cubes: u32,
}

impl Norms {
    /// Room for the parts of a batch.
    pub(super) fn empty(client: &Client, batch: Batch, cubes: u32) -> Self {
        let parts = client.empty(2 * batch.count * cubes as usize * size_of::<f32>());
        Self { parts, cubes }
    }

    pub(super) fn arg(&self, batch: Batch) -> BufferArg {
        // SAFETY: `empty` made it of that size.
        unsafe {
            BufferArg::from_raw_parts(self.parts.clone(), 2 * batch.count * self.cubes as usize)
        }
    }
}

/// Divides every matrix by its norm, or by `epsilon` if that is larger, and rounds to `O`.
pub fn normalize<F: Float + CubeElement, O: Float + CubeElement>(
    client: &Client,
    input: &Handle,
    norms: &Norms,
    batch: Batch,
    epsilon: f32,
) -> Handle {
    let output = client.empty(batch.len() * size_of::<O>());
    if batch.is_empty() {
        return output;
    }
    let size = batch.vector_size(client, size_of::<F>().max(size_of::<O>()));
    // SAFETY: every index is below the vectors of a matrix.
    unsafe {
        normalize_kernel::launch_unchecked::<F, O>(
            client,
            batch.cube_count(size),
            CubeDim::new_1d(UNITS),
            batch.address_type(),
            size,
            batch.vectors(input, size),
            batch.vectors(&output, size),
            norms.arg(batch),
            batch.elements / size,
            batch.count,
            norms.cubes as usize,
            epsilon,
        );
    }
    output
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn normalize_kernel<F: Float, O: Float, N: Size>(
    input: &[Vector<F, N>],
    output: &mut [Vector<O, N>],
    norms: &[f32],
    vectors: usize,
    count: usize,
    cubes: usize,
    epsilon: f32,
) {
    let matrix = own_matrix();
    if matrix >= count {
        terminate!();
    }
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    for part in 0..cubes {
        let at = 2 * (matrix * cubes + part);
        let (s, q) = joined(scale, squares, norms[at], norms[at + 1]);
        scale = s;
        squares = q;
    }
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
fn joined(scale_a: f32, squares_a: f32, scale_b: f32, squares_b: f32) -> (f32, f32) {
    let scale = max(scale_a, scale_b);
    let divisor = max(scale, f32::new(f32::MIN_POSITIVE));
    let (a, b) = (scale_a / divisor, scale_b / divisor);
    (scale, squares_a * a * a + squares_b * b * b)
}

/// Writes the sum over the units of a cube as its part of the norm of its matrix.
#[cube]
pub(super) fn store_part(norms: &mut [f32], scale: f32, squares: f32) {
    let mut scales = Shared::<[f32]>::new_slice(UNITS as usize);
    let mut sums = Shared::<[f32]>::new_slice(UNITS as usize);
    scales[UNIT_POS_X as usize] = scale;
    sums[UNIT_POS_X as usize] = squares;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(UNITS.ilog2()) {
        let half = comptime!((UNITS / 2) >> level);
        if UNIT_POS_X < half {
            let (a, b) = (UNIT_POS_X as usize, (UNIT_POS_X + half) as usize);
            let (s, q) = joined(scales[a], sums[a], scales[b], sums[b]);
            scales[a] = s;
            sums[a] = q;
        }
        sync_cube();
    }
    if UNIT_POS_X == 0 {
        let at = 2 * (own_matrix() * CUBE_COUNT_X as usize + CUBE_POS_X as usize);
        norms[at] = scales[0];
        norms[at + 1] = sums[0];
    }
}
