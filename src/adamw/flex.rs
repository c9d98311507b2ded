//! A step of AdamW on Burn's Flex backend, in one pass over memory.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use rayon::prelude::*;

use super::ops::AdamWOps;
use crate::orthogonalize::flex::{CHUNK, contiguous, rounded, single};

impl AdamWOps for Flex {
    fn adamw(
        parameters: FloatTensor<Self>,
        grads: FloatTensor<Self>,
        moment_1: FloatTensor<Self>,
        moment_2: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        [beta_1, beta_2, epsilon]: [f32; 3],
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [count, columns] = parameters.shape().dims();
        let (dtype, of_moments) = (parameters.dtype(), moment_1.dtype());
        let float32 = |tensor| contiguous(single(tensor));
        let [mut values, mut first, mut second] = [parameters, moment_1, moment_2].map(float32);
        let (grads, rows) = (float32(grads), float32(rows));
        let of_row = |what: usize, row: usize| rows.storage::<f32>()[what * count + row];
        let chunks = values
            .storage_mut::<f32>()
            .par_chunks_mut(CHUNK)
            .zip(first.storage_mut::<f32>().par_chunks_mut(CHUNK))
            .zip(second.storage_mut::<f32>().par_chunks_mut(CHUNK))
            .zip(grads.storage::<f32>().par_chunks(CHUNK));
        chunks.enumerate().for_each(|(chunk, (((values, first), second), grads))| {
            for (row, part) in row_parts(chunk * CHUNK, values.len(), columns) {
                let [accepted, keep, lr, c1, c2] = [0, 1, 2, 3, 4].map(|what| of_row(what, row));
                if accepted == 0.0 {
                    continue;
                }
                let moments = first[part.clone()].iter_mut().zip(&mut second[part.clone()]);
                let elements = values[part.clone()].iter_mut().zip(moments).zip(&grads[part]);
                for ((p, (m, v)), g) in elements {
                    *m = beta_1 * *m + (1.0 - beta_1) * g;
                    *v = beta_2 * *v + (1.0 - beta_2) * g * g;
                    *p = keep * *p - lr * (*m / c1 / ((*v / c2).sqrt() + epsilon));
                }
            }
        });
        (rounded(values, dtype), rounded(first, of_moments), rounded(second, of_moments))
    }
}

/// The rows that `length` elements from `start` belong to, and the part of the elements of each.
fn row_parts(
    start: usize,
    length: usize,
    columns: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let rows = start / columns..(start + length).div_ceil(columns);
    rows.map(move |row| {
        let from = (row * columns).max(start) - start;
        (row, from..((row + 1) * columns).min(start + length) - start)
    })
}
