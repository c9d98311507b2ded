//! The products on Burn's Flex backend, by faer, which can compute a lower triangle alone.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::FloatDType;
use faer::linalg::matmul::{matmul, triangular, triangular::BlockStructure};
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::tensors::{CHUNK, contiguous, rounded, scaled_squares, serves, single, zeros};
use crate::backend::ops::MatrixOps;
use crate::backend::portable;
use crate::backend::program::Polynomial;
use crate::backend::tensor_list::TensorList;

/// Smallest `m * n * k` of a product that several threads share. Burn's Flex uses the same.
const THREADS_FROM: usize = 192 * 192 * 192;

/// Smallest `m * n * k` of a piece of a product, on average: each packs its factors anew.
const PIECE: usize = 128 * 128 * 128;

/// Tiles into which a thread's share of a product is cut, so that another thread can take one over
/// from a thread that the system has put aside. With two, a quiet machine is as fast as with one.
const TILES_PER_THREAD: usize = 2;

/// Rows and columns that faer's kernels compute at a time; a tile has a multiple of them.
const KERNEL_SIDE: usize = 16;

/// Side of the tiles in which a triangle is mirrored: both tiles stay in the cache.
const MIRROR_TILE: usize = 32;

/// Half-precision operands are multiplied and added in float32, and rounded once.
impl MatrixOps for Flex {
    fn syrk(a: FloatTensor<Self>, _tuned: bool) -> FloatTensor<Self> {
        if !serves(a.dtype()) {
            return portable::syrk::<Self>(a);
        }
        let [k, m, _] = a.shape().dims();
        let dtype = a.dtype();
        let a = single(a);
        let result = zeros([k, m, m]);
        rounded(lower_triangles(a.clone(), a, result, 1.0, Accum::Replace), dtype)
    }

    fn symmetric_product(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        alpha: f64,
        beta: f64,
        _tuned: bool,
    ) -> FloatTensor<Self> {
        if !serves(a.dtype()) {
            return portable::symmetric_product::<Self>(a, b, c, alpha, beta);
        }
        let dtype = a.dtype();
        let scaled = Self::float_mul_scalar(single(c), beta.into());
        rounded(lower_triangles(single(a), single(b), scaled, alpha as f32, Accum::Add), dtype)
    }

    fn product_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        beta: f64,
        _tuned: bool,
    ) -> FloatTensor<Self> {
        if !serves(a.dtype()) {
            return portable::product_add::<Self>(a, b, c, beta);
        }
        let dtype = a.dtype();
        let scaled = Self::float_mul_scalar(single(c), beta.into());
        rounded(products(single(a), single(b), scaled, Accum::Add), dtype)
    }

    /// Unlike Burn's, it does not copy an operand as a whole to rearrange it.
    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        if !serves(a.dtype()) {
            return Self::float_matmul(a, b);
        }
        let ([k, m, _], [_, _, p]) = (a.shape().dims(), b.shape().dims());
        let dtype = a.dtype();
        let result = zeros([k, m, p]);
        rounded(products(single(a), single(b), result, Accum::Replace), dtype)
    }

    fn plus_identity(z: FloatTensor<Self>) -> FloatTensor<Self> {
        let (dtype, [_, m, _]) = (z.dtype(), z.shape().dims());
        let mut z = contiguous(single(z));
        // At least 1: an empty batch has matrices of any size, and chunks of none panic.
        let matrices = z.storage_mut::<f32>().chunks_exact_mut((m * m).max(1));
        matrices.flat_map(|matrix| matrix.iter_mut().step_by(m + 1)).for_each(|x| *x += 1.0);
        rounded(z, dtype)
    }

    /// Never called: launches cost nothing on a CPU, so no matrix counts as small.
    fn accumulate_q(_: FloatTensor<Self>, _: Vec<Polynomial>) -> FloatTensor<Self> {
        // A launch costs nothing on a CPU: small matrices take the way of all others.
        unreachable!("`ComputePath::is_small` returns `false` on Flex")
    }

    /// Never called with a recording's buffer: Flex has no graphs.
    fn overwrite(_: FloatTensor<Self>, values: FloatTensor<Self>) -> FloatTensor<Self> {
        values
    }

    fn norms(
        norms: FloatTensor<Self>,
        tensors: TensorList<Self>,
        firsts: Vec<usize>,
        elements: usize,
    ) -> FloatTensor<Self> {
        let [_, parts, _] = norms.shape().dims();
        let mut norms = contiguous(norms);
        for (tensor, first) in tensors.0.into_iter().zip(firsts) {
            let tensor = contiguous(single(tensor));
            let rows = tensor.storage::<f32>().par_chunks(elements.max(1));
            let of_rows = &mut norms.storage_mut::<f32>()[2 * first * parts..];
            of_rows.par_chunks_exact_mut(2 * parts).zip(rows).for_each(|(norms, row)| {
                let chunks = norms.par_chunks_exact_mut(2).zip(row.par_chunks(CHUNK));
                chunks.for_each(|(norm, chunk)| norm.copy_from_slice(&scaled_squares(chunk)));
            });
        }
        norms
    }

    fn normalize(
        x: FloatTensor<Self>,
        norms: FloatTensor<Self>,
        epsilon: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let [_, m, n] = x.shape().dims();
        let [_, parts, _] = norms.shape().dims();
        let (mut x, norms) = (contiguous(single(x)), contiguous(norms));
        let matrices = x.storage_mut::<f32>().par_chunks_exact_mut((m * n).max(1));
        let norms = norms.storage::<f32>().par_chunks_exact((2 * parts).max(1));
        matrices.zip(norms).for_each(|(matrix, norms)| {
            // A norm is kept as a scale and a sum of scaled squares, so that no square under- or
            // overflows in float32.
            let part = |part: &[f32]| f64::from(part[0]).powi(2) * f64::from(part[1]);
            let squares = norms.chunks_exact(2).map(part).sum::<f64>();
            let norm = squares.sqrt().max(epsilon);
            // A matrix of zeros, without an `epsilon`, stays zero.
            let scale = if norm == 0.0 { 0.0 } else { norm.recip() };
            let scaled = |values: &mut [f32]| {
                values.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32)
            };
            matrix.par_chunks_mut(CHUNK).for_each(scaled);
        });
        rounded(x, dtype.into())
    }
}

/// Adds `A B` to `result`, or replaces it.
fn products(
    a: FloatTensor<Flex>,
    b: FloatTensor<Flex>,
    result: FloatTensor<Flex>,
    accum: Accum,
) -> FloatTensor<Flex> {
    each_matrix(a, b, result, |result, a, b, tiles| {
        let result = MatMut::from_row_major_slice_mut(result, a.nrows(), b.ncols());
        product_in_tiles(Factors { a, b, alpha: 1.0, accum }, result, tiles);
    })
}

/// Adds `alpha A B^T` to `result`, or replaces it, and makes it symmetric.
fn lower_triangles(
    a: FloatTensor<Flex>,
    b: FloatTensor<Flex>,
    result: FloatTensor<Flex>,
    alpha: f32,
    accum: Accum,
) -> FloatTensor<Flex> {
    // A view: the product reads it by columns.
    let b = Flex::float_swap_dims(b, 1, 2);
    each_matrix(a, b, result, |result, a, b, tiles| {
        let m = a.nrows();
        let triangle = MatMut::from_row_major_slice_mut(&mut *result, m, m);
        triangle_in_tiles(Factors { a, b, alpha, accum }, triangle, tiles);
        mirror(result, m);
    })
}

/// Runs `multiply` with the result and the factors of every matrix of the batch, and with the
/// number of tiles in which it is computed.
fn each_matrix(
    a: FloatTensor<Flex>,
    b: FloatTensor<Flex>,
    result: FloatTensor<Flex>,
    multiply: impl Fn(&mut [f32], MatRef<'_, f32>, MatRef<'_, f32>, usize) + Sync,
) -> FloatTensor<Flex> {
    let ([k, m, n], [_, _, p]) = (a.shape().dims(), b.shape().dims());
    // Matrices of a batch are iterated in parallel; tiles keep the threads busy where there are few
    // of them.
    let tiles = tiles_of_each(k, m * n * p);
    // faer reads rows or columns with any distance; other layouts are copied once.
    let (a, b) = (by_rows_or_columns(a), by_rows_or_columns(b));
    let mut result = contiguous(result);
    let (matrices_a, matrices_b) = (matrices(&a), matrices(&b));
    let results = result.storage_mut::<f32>().par_chunks_exact_mut((m * p).max(1));
    results
        .enumerate()
        .for_each(|(i, result)| multiply(result, matrices_a(i), matrices_b(i), tiles));
    result
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

/// A product `alpha A B` that replaces a matrix, or is added to it.
#[derive(Clone, Copy)]
struct Factors<'a> {
    a: MatRef<'a, f32>,
    b: MatRef<'a, f32>,
    alpha: f32,
    accum: Accum,
}

impl<'a> Factors<'a> {
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

/// The tensor itself if its rows or its columns are contiguous, else a copy of which they are.
fn by_rows_or_columns(tensor: FloatTensor<Flex>) -> FloatTensor<Flex> {
    let strides = tensor.layout().strides();
    if strides[1].min(strides[2]) == 1 && strides[0] >= 0 { tensor } else { tensor.to_contiguous() }
}

/// The matrices of a batch whose rows or columns are contiguous.
fn matrices<'a>(tensor: &'a FloatTensor<Flex>) -> impl Fn(usize) -> MatRef<'a, f32> + Sync {
    let [_, rows, columns] = tensor.shape().dims();
    let layout = tensor.layout();
    let [batch, row, column] = [0, 1, 2].map(|i| layout.strides()[i] as usize);
    let values = &tensor.storage::<f32>()[layout.start_offset()..];
    move |i| {
        let values = &values[i * batch..];
        if column == 1 {
            MatRef::from_row_major_slice_with_stride(values, rows, columns, row)
        } else {
            MatRef::from_column_major_slice_with_stride(values, rows, columns, column)
        }
    }
}

/// Copies the lower triangle of an `m` by `m` matrix onto its upper one.
fn mirror(matrix: &mut [f32], m: usize) {
    // Tile by tile, since the transposed writes of a whole row would each miss the cache.
    for top in (0..m).step_by(MIRROR_TILE) {
        for left in (0..=top).step_by(MIRROR_TILE) {
            for i in top..(top + MIRROR_TILE).min(m) {
                for j in left..(left + MIRROR_TILE).min(i) {
                    matrix[j * m + i] = matrix[i * m + j];
                }
            }
        }
    }
}
