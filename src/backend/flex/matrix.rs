//! The iteration and the norms on Burn's Flex backend.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::FloatDType;

use super::chunks::{CHUNK, Cut, CutMut, Pieces};
use super::iteration::iterate;
use super::products::mirror;
use super::tensors::{contiguous, rounded, scaled_squares, single};
use crate::backend::ops::MatrixOps;
use crate::backend::portable;
use crate::backend::program::{Polynomial, PreparedProgram};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<Flex>;

/// An iteration runs as a whole. Its products on their own are Burn's, and serve TF32's simulation.
impl MatrixOps for Flex {
    /// Matrices in half precision are multiplied and added in float32, and every result is rounded
    /// once.
    fn iterate(x: Float, program: PreparedProgram, _tuned: bool, _native: bool) -> Float {
        let (dtype, [_, m, n]) = (x.dtype(), x.shape().dims());
        let mut x = contiguous(single(x));
        iterate(x.storage_mut(), &program, [m, n], dtype);
        rounded(x, dtype)
    }

    /// For an iteration that simulates TF32, as [`symmetric_product`](Self::symmetric_product).
    fn syrk(a: Float, _tuned: bool) -> Float {
        mirrored(portable::syrk::<Self>(a))
    }

    /// The result is exactly symmetric, as on a GPU: the Gram form relies on it.
    fn symmetric_product(
        a: Float,
        b: Float,
        c: Float,
        alpha: f64,
        beta: f64,
        _tuned: bool,
    ) -> Float {
        mirrored(portable::symmetric_product::<Self>(a, b, c, alpha, beta))
    }

    /// Never called: launches cost nothing on a CPU, so no matrix counts as small.
    fn accumulate_q(_: Float, _: Vec<Polynomial>) -> Float {
        unreachable!("`ComputePath::is_small` returns `false` on Flex")
    }

    /// Never called with a recording's buffer: Flex has no graphs.
    fn overwrite(_: Float, values: Float) -> Float {
        values
    }

    fn norms(
        norms: Float,
        tensors: TensorList<Self>,
        firsts: Vec<usize>,
        elements: usize,
    ) -> Float {
        let [_, parts, _] = norms.shape().dims();
        let mut norms = contiguous(norms);
        for (tensor, first) in tensors.0.into_iter().zip(firsts) {
            let tensor = contiguous(single(tensor));
            let rows = Cut(tensor.storage::<f32>(), elements.max(1));
            let of_rows = &mut norms.storage_mut::<f32>()[2 * first * parts..];
            (CutMut(of_rows, 2 * parts), rows).each(elements, |(norms, row)| {
                let chunks = (CutMut(norms, 2), Cut(row, CHUNK));
                chunks.each(CHUNK, |(norm, chunk)| norm.copy_from_slice(&scaled_squares(chunk)));
            });
        }
        norms
    }

    fn normalize(x: Float, norms: Float, epsilon: f64, dtype: FloatDType) -> Float {
        let [_, m, n] = x.shape().dims();
        let [_, parts, _] = norms.shape().dims();
        let (mut x, norms) = (contiguous(single(x)), contiguous(norms));
        let matrices = CutMut(x.storage_mut::<f32>(), (m * n).max(1));
        let norms = Cut(norms.storage::<f32>(), (2 * parts).max(1));
        (matrices, norms).each(m * n, |(matrix, norms)| {
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
            CutMut(matrix, CHUNK).each(CHUNK, scaled);
        });
        rounded(x, dtype.into())
    }
}

/// The lower triangles of a batch, mirrored.
fn mirrored(matrices: Float) -> Float {
    let (dtype, [_, m, _]) = (matrices.dtype(), matrices.shape().dims());
    let mut matrices = contiguous(single(matrices));
    let values = matrices.storage_mut::<f32>();
    values.chunks_exact_mut((m * m).max(1)).for_each(|matrix| mirror(matrix, m));
    rounded(matrices, dtype)
}
