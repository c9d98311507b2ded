//! The products on Burn's Flex backend, by faer, which can compute a lower triangle alone.

use faer::linalg::matmul::{matmul, triangular, triangular::BlockStructure};
use faer::{Accum, MatMut, MatRef, Par};

/// Smallest `m * n * k` of a product that several threads share. Burn's Flex uses the same.
pub const THREADS_FROM: usize = 192 * 192 * 192;

/// Smallest `m * n * k` that a thread is given, on average: each piece of a product packs its
/// factors anew, and a thread may have to wait for a core.
pub const PIECE: usize = 128 * 128 * 128;

/// Tiles into which a thread's share of a product is cut, so that another thread can take one over
/// from a thread that the system has put aside. With two, a quiet machine is as fast as with one.
const TILES_PER_THREAD: usize = 2;

/// Rows and columns that faer's kernels compute at a time; a tile has a multiple of them.
const KERNEL_SIDE: usize = 16;

/// Side of the tiles in which a triangle is mirrored: both tiles stay in the cache.
const MIRROR_TILE: usize = 32;

/// A product `alpha A B` that replaces a matrix, or is added to it.
#[derive(Clone, Copy)]
pub struct Factors<'a> {
    pub a: MatRef<'a, f32>,
    pub b: MatRef<'a, f32>,
    pub alpha: f32,
    pub accum: Accum,
}

impl<'a> Factors<'a> {
    /// Multiplications of the product.
    fn operations(&self) -> usize {
        self.a.nrows() * self.a.ncols() * self.b.ncols()
    }

    /// The factors of the rows above `row`, and of those from it on.
    fn split_rows(self, row: usize) -> (Self, Self) {
        let (above, below) = self.a.split_at_row(row);
        (Self { a: above, ..self }, Self { a: below, ..self })
    }

    /// The factors of the columns before `column`, and of those from it on.
    fn split_columns(self, column: usize) -> (Self, Self) {
        let (left, right) = self.b.split_at_col(column);
        (Self { b: left, ..self }, Self { b: right, ..self })
    }
}

/// Computes one of `k` products that run side by side, by rows.
pub fn product(factors: Factors<'_>, result: &mut [f32], k: usize) {
    let tiles = tiles_of_each(k, factors.operations());
    let (rows, columns) = (factors.a.nrows(), factors.b.ncols());
    product_in_tiles(factors, MatMut::from_row_major_slice_mut(result, rows, columns), tiles);
}

/// Computes one of `k` products that run side by side and whose results are symmetric, by rows:
/// its lower triangle, which it mirrors.
pub fn symmetric_product(factors: Factors<'_>, result: &mut [f32], k: usize) {
    let tiles = tiles_of_each(k, factors.operations());
    let m = factors.a.nrows();
    triangle_in_tiles(factors, MatMut::from_row_major_slice_mut(&mut *result, m, m), tiles);
    mirror(result, m);
}

/// Number of tiles for each of `k` products with `operations` multiplications.
fn tiles_of_each(k: usize, operations: usize) -> usize {
    // Below it, waking threads takes longer than the product.
    if operations < THREADS_FROM {
        return 1;
    }
    let wanted = (TILES_PER_THREAD * rayon::current_num_threads()).div_ceil(k.max(1));
    wanted.min(operations / PIECE)
}

/// Computes a product in about `tiles` tiles.
///
/// Threads share tiles by rayon alone: the threads of one product of faer wait for each other in
/// loops that take a whole core, which other processes may need. A tile has the bits of the whole
/// product.
fn product_in_tiles(factors: Factors<'_>, result: MatMut<'_, f32>, tiles: usize) {
    let (rows, columns) = (result.nrows(), result.ncols());
    // Halves of halves instead of a grid: any number of tiles, of nearly equal size. Every element
    // is summed in one tile, so the bits do not depend on the number.
    let [first, second] = [tiles / 2, tiles - tiles / 2];
    let split = |side: usize| (side * first / tiles).next_multiple_of(KERNEL_SIDE).min(side);
    if tiles < 2 {
        let Factors { a, b, alpha, accum } = factors;
        matmul(result, accum, a, b, alpha, Par::Seq);
    } else if rows >= columns {
        let (above, below) = factors.split_rows(split(rows));
        let (result_above, result_below) = result.split_at_row_mut(split(rows));
        rayon::join(
            || product_in_tiles(above, result_above, first),
            || product_in_tiles(below, result_below, second),
        );
    } else {
        let (left, right) = factors.split_columns(split(columns));
        let (result_left, result_right) = result.split_at_col_mut(split(columns));
        rayon::join(
            || product_in_tiles(left, result_left, first),
            || product_in_tiles(right, result_right, second),
        );
    }
}

/// Computes the lower triangle of a square product in about `tiles` tiles: the square below the
/// diagonal in half of them, as it has half of the operations, and two triangles.
fn triangle_in_tiles(factors: Factors<'_>, result: MatMut<'_, f32>, tiles: usize) {
    if tiles < 2 {
        let Factors { a, b, alpha, accum } = factors;
        let (triangle, whole) = (BlockStructure::TriangularLower, BlockStructure::Rectangular);
        triangular::matmul(result, triangle, accum, a, whole, b, whole, alpha, Par::Seq);
        return;
    }
    // Two triangles and the square below the first: it has half of the elements, so it gets half of
    // the tiles.
    let half = (result.nrows() / 2).next_multiple_of(KERNEL_SIDE).min(result.nrows());
    let (upper, _, square, lower) = result.split_at_mut(half, half);
    let (above, below) = factors.split_rows(half);
    rayon::join(
        || product_in_tiles(below.split_columns(half).0, square, tiles / 2),
        || {
            rayon::join(
                || triangle_in_tiles(above.split_columns(half).0, upper, tiles / 4),
                || triangle_in_tiles(below.split_columns(half).1, lower, tiles / 4),
            )
        },
    );
}

/// Copies the lower triangle of an `m` by `m` matrix onto its upper one.
pub fn mirror(matrix: &mut [f32], m: usize) {
    // Tile by tile, since the transposed writes of a whole row would each miss the cache.
    for top in (0..m).step_by(MIRROR_TILE) {
        for left in (0..=top).step_by(MIRROR_TILE) {
            for i in top..(top + MIRROR_TILE).min(m) {
                let (above, row) = matrix.split_at_mut(i * m);
                let row = &row[left..(left + MIRROR_TILE).min(i)];
                // Without an index, which would be checked for every element.
                let column = above.iter_mut().skip(left * m + i).step_by(m);
                column.zip(row).for_each(|(mirrored, value)| *mirrored = *value);
            }
        }
    }
}
