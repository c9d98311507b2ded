//! Newton-Schulz on small matrices: one cube computes all steps for a whole matrix.
//!
//! Below about a hundred rows, a product takes less time than the launch of the next kernel. Here
//! the Gram form (<https://github.com/Dao-AILab/gram-newton-schulz>) runs in shared memory: for
//! `R = X X^T`, [`accumulate_q`] returns the product `Q` of all `Z + a I` with `Z = b R + c R^2`,
//! where every step advances `R <- (Z + a I) R (Z + a I)`. All intermediate values are float32, and
//! all intermediate matrices symmetric.
//!
//! ```text
//! R, Z, Q in shared memory, in blocks of 16 x 16; unit (y, x) has one entry of every block:
//!
//!     L . . .      only the blocks L and D are computed, and of D only the entries
//!     L L . .      on and below the diagonal; each is stored with its mirror image
//!     L L L .
//!     D on the diagonal
//! ```

use cubecl::client::Client;
use cubecl::ir::{ElemType, HardwareProperties};
use cubecl::prelude::*;

use crate::error::{Error, Result, check_buffer, check_count, check_dtype};
use crate::fused::factor_of;
use crate::matrices::Matrices;

/// Units along each side of a cube, and the side of the blocks that the units share.
pub(crate) const SIDE: u32 = 16;

/// Rows of the largest matrices. A unit keeps `b (b + 1) / 2` sums in registers for `b = m / SIDE`
/// rows of blocks: 36 at most.
pub(crate) const MAX_ROWS: usize = 128;

/// Matrices that a cube keeps in shared memory: `R`, `Z` and `Q`.
const SHARED_MATRICES: usize = 3;

/// Returns the number of rows of the largest matrices that [`accumulate_q`] accepts on a device.
pub fn max_rows(client: &Client) -> usize {
    max_rows_for(&client.properties().hardware)
}

/// Returns [`max_rows`] from the properties of a device.
pub(crate) fn max_rows_for(hardware: &HardwareProperties) -> usize {
    // R, Z and Q, all in float32, whatever the type of the input.
    let floats = hardware.max_shared_memory_size / size_of::<f32>();
    let fits = |rows: &usize| SHARED_MATRICES * rows * rows <= floats;
    (SIDE as usize..=MAX_ROWS).step_by(SIDE as usize).filter(fits).max().unwrap_or(0)
}

/// Returns the product `Q` of the [module](self) for every symmetric `R` of a batch, in the same
/// type. `polynomials` has the coefficients `[a, b, c]` of every step.
///
/// # Errors
///
/// [`Error::Dtype`] for a type that the device does not support, [`Error::Shape`] for matrices that
/// are not square or larger than [`max_rows`], [`Error::Buffer`] and [`Error::TooMany`].
pub fn accumulate_q(client: &Client, r: &Matrices, polynomials: &[[f32; 3]]) -> Result<Matrices> {
    let [k, m, n] = r.shape;
    check_dtype(client, r.dtype)?;
    let max_rows = max_rows(client);
    if m != n || m > max_rows {
        let expected = format!("square matrices of at most {max_rows} rows");
        let actual = format!("{:?}", r.shape);
        return Err(Error::Shape { operand: "R", expected, actual });
    }
    check_count(k, client.properties().hardware.max_cube_count.0)?;
    check_buffer("R", &r.handle, r.extent(), r.dtype)?;
    let q = Matrices::empty(client, r.dtype, r.shape);
    if r.extent() == 0 {
        return Ok(q);
    }
    // A kernel for each number of blocks: the loops over them are unrolled.
    let blocks = (m as u32).div_ceil(SIDE);
    let coefficients = |index: usize| polynomials.iter().map(|p| p[index]).collect();
    let [matrix, row, column] = r.strides;
    // SAFETY: entries outside the matrices are neither read nor written.
    unsafe {
        accumulate_q_kernel::launch_unchecked(
            client,
            CubeCount::Static(k as u32, 1, 1),
            CubeDim::new_2d(SIDE, SIDE),
            AddressType::from_len(r.extent().max(q.extent())),
            BufferArg::from_raw_parts(r.handle.clone(), r.extent()),
            BufferArg::from_raw_parts(q.handle.clone(), q.extent()),
            m as u32,
            matrix,
            row,
            column,
            coefficients(0),
            coefficients(1),
            coefficients(2),
            are_cubic(polynomials),
            blocks,
            r.dtype,
        );
    }
    Ok(q)
}

/// Returns whether no polynomial has a square of `R`.
pub(crate) fn are_cubic(polynomials: &[[f32; 3]]) -> bool {
    polynomials.iter().all(|[_, _, c]| *c == 0.0)
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn accumulate_q_kernel<F: Float>(
    input: &[F],
    output: &mut [F],
    m: u32,
    matrix_stride: usize,
    row_stride: usize,
    column_stride: usize,
    // At run time, since every schedule would otherwise be compiled as a kernel of its own.
    a: &Sequence<f32>,
    b: &Sequence<f32>,
    c: &Sequence<f32>,
    // At compile time, since a branch at run time takes registers that the sums need.
    #[comptime] cubic: bool,
    #[comptime] blocks: u32,
    #[define(F)] _dtype: ElemType,
) {
    let entries = comptime!((blocks * blocks * SIDE * SIDE) as usize);
    let mut r = Shared::<[f32]>::new_slice(entries);
    let mut z = Shared::<[f32]>::new_slice(entries);
    let mut q = Shared::<[f32]>::new_slice(entries);
    // One cube for each matrix: units of a cube alone share memory and can wait for each other.
    let matrix = CUBE_POS_X as usize;

    // Entries outside the matrix are zeros, which the products below may add.
    #[unroll]
    for i in 0..blocks {
        #[unroll]
        for j in 0..blocks {
            let (row, column) = entry(i, j);
            let mut value = f32::new(0.0);
            if row < m && column < m {
                let offset = row as usize * row_stride + column as usize * column_stride;
                value = f32::cast_from(input[matrix * matrix_stride + offset]);
            }
            r[index(row, column, blocks)] = value;
        }
    }
    sync_cube();

    // Z = b R + c R^2, Q = Z + a I
    advance_z(&mut z, &r, factor_of(b, 0usize), factor_of(c, 0usize), cubic, blocks);
    sync_cube();
    add_identity(&mut q, &z, factor_of(a, 0usize), blocks);
    for step in 1..a.len() {
        // R = (Z + a I) R (Z + a I), with the last step's Z
        let last_a = factor_of(a, step - 1);
        for _ in 0..2u32 {
            let sums = product(&r, &z, f32::new(1.0), last_a, blocks);
            // All units have read the old R before it is overwritten.
            sync_cube();
            store(&mut r, &sums, blocks);
            sync_cube();
        }
        // Z = b R + c R^2, Q = Q (Z + a I)
        advance_z(&mut z, &r, factor_of(b, step), factor_of(c, step), cubic, blocks);
        sync_cube();
        let sums = product(&q, &z, f32::new(1.0), factor_of(a, step), blocks);
        sync_cube();
        store(&mut q, &sums, blocks);
    }
    sync_cube();

    #[unroll]
    for i in 0..blocks {
        #[unroll]
        for j in 0..blocks {
            let (row, column) = entry(i, j);
            if row < m && column < m {
                let side = m as usize;
                let position = (matrix * side + row as usize) * side + column as usize;
                output[position] = F::cast_from(q[index(row, column, blocks)]);
            }
        }
    }
}

/// Writes `Z = b R + c R^2`, which has no product if all polynomials are cubic.
#[cube]
fn advance_z(
    z: &mut [f32],
    r: &[f32],
    b: f32,
    c: f32,
    #[comptime] cubic: bool,
    #[comptime] blocks: u32,
) {
    if cubic {
        #[unroll]
        for i in 0..blocks {
            #[unroll]
            for j in 0..blocks {
                let (row, column) = entry(i, j);
                let position = index(row, column, blocks);
                z[position] = b * r[position];
            }
        }
    } else {
        let sums = product(r, r, c, b, blocks);
        store(z, &sums, blocks);
    }
}

/// Returns the row and the column of the entry that this unit has in a block.
#[cube]
fn entry(#[comptime] i: u32, #[comptime] j: u32) -> (u32, u32) {
    (i * SIDE + UNIT_POS_Y, j * SIDE + UNIT_POS_X)
}

#[cube]
fn index(row: u32, column: u32, #[comptime] blocks: u32) -> usize {
    (row * comptime!(blocks * SIDE) + column) as usize
}

/// Returns the entries of `alpha X Y + beta X` that this unit has in the blocks on and below the
/// diagonal, row by row, for polynomials `X` and `Y` of one symmetric matrix.
#[cube]
fn product(x: &[f32], y: &[f32], alpha: f32, beta: f32, #[comptime] blocks: u32) -> Array<f32> {
    let mut sums = Array::<f32>::new(comptime!((blocks * (blocks + 1) / 2) as usize));
    #[unroll]
    for block in 0..comptime!((blocks * (blocks + 1) / 2) as usize) {
        sums[block] = f32::new(0.0);
    }
    // The outer loop, so that an element of `x` is read once for all blocks of its row.
    for inner in 0..comptime!(blocks * SIDE) {
        #[unroll]
        for i in 0..blocks {
            let left = x[index(entry(i, 0u32).0, inner, blocks)];
            #[unroll]
            for j in 0..comptime!(i + 1) {
                let block = comptime!((i * (i + 1) / 2 + j) as usize);
                sums[block] += left * y[index(inner, entry(0u32, j).1, blocks)];
            }
        }
    }
    #[unroll]
    for i in 0..blocks {
        #[unroll]
        for j in 0..comptime!(i + 1) {
            let block = comptime!((i * (i + 1) / 2 + j) as usize);
            let (row, column) = entry(i, j);
            sums[block] = alpha * sums[block] + beta * x[index(row, column, blocks)];
        }
    }
    sums
}

/// Stores the entries on and below the diagonal, and their mirror images.
#[cube]
fn store(x: &mut [f32], sums: &Array<f32>, #[comptime] blocks: u32) {
    #[unroll]
    for i in 0..blocks {
        #[unroll]
        for j in 0..comptime!(i + 1) {
            let (row, column) = entry(i, j);
            let value = sums[comptime!((i * (i + 1) / 2 + j) as usize)];
            // Of blocks on the diagonal, the other half is the mirror image, which another unit
            // writes.
            if column <= row {
                x[index(row, column, blocks)] = value;
                x[index(column, row, blocks)] = value;
            }
        }
    }
}

/// Writes `X + a I`.
#[cube]
fn add_identity(result: &mut [f32], x: &[f32], a: f32, #[comptime] blocks: u32) {
    #[unroll]
    for i in 0..blocks {
        #[unroll]
        for j in 0..blocks {
            let (row, column) = entry(i, j);
            let added = select(row == column, a, f32::new(0.0));
            let position = index(row, column, blocks);
            result[position] = x[position] + added;
        }
    }
}
