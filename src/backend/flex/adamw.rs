//! A step of AdamW on Burn's Flex backend, in one pass over memory.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;

use super::chunks::{CHUNK, Cut, CutMut, Pieces};
use super::tensors::{contiguous, rounded, single, updated, values};
use crate::backend::ops::{AdamWOps, ElementwiseRows};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<Flex>;

impl AdamWOps for Flex {
    fn adamw(
        parameters: TensorList<Self>,
        places: Vec<Range<usize>>,
        grads: TensorList<Self>,
        moment_1: Float,
        moment_2: Float,
        rejected: Float,
        correction_1: Float,
        correction_2: Float,
        factor: Float,
        rows: Vec<ElementwiseRows>,
        [beta_1, beta_2, epsilon]: [f32; 3],
        scaled: bool,
    ) -> (TensorList<Self>, Float, Float) {
        let moment_dtype = moment_1.dtype();
        let float32 = |tensor| contiguous(single(tensor));
        let [mut first, mut second] = [moment_1, moment_2].map(float32);
        let [rejected, c1, c2, factor] = [rejected, correction_1, correction_2, factor].map(values);
        let mut step = |parameter: &mut [f32], grad: Float, row: ElementwiseRows| {
            let ElementwiseRows { flag, first: start, .. } = row;
            let (decay, lr) = (row.decay as f32, row.lr as f32);
            let (grad, c1, c2) = (float32(grad), c1[flag], c2[flag]);
            let range = start..start + parameter.len();
            let moments = (
                CutMut(&mut first.storage_mut::<f32>()[range.clone()], CHUNK),
                CutMut(&mut second.storage_mut::<f32>()[range], CHUNK),
            );
            let values = CutMut(parameter, CHUNK);
            let chunks = ((values, moments), Cut(grad.storage::<f32>(), CHUNK));
            chunks.each(CHUNK, |((values, (first, second)), grads)| {
                let moments = first.iter_mut().zip(second);
                for ((p, (m, v)), g) in values.iter_mut().zip(moments).zip(grads) {
                    let g = if scaled { g * factor[0] } else { *g };
                    *m = beta_1 * *m + (1.0 - beta_1) * g;
                    *v = beta_2 * *v + (1.0 - beta_2) * g * g;
                    *p = decay * *p - lr * (*m / c1 / ((*v / c2).sqrt() + epsilon));
                }
            });
        };
        // A rejected parameter is not touched: its moments stay as well.
        let each = grads.0.into_iter().zip(rows).map(|(grad, row)| {
            let is_updated = rejected[row.flag] == 0.0;
            is_updated.then_some((grad, row))
        });
        let parameters = updated(parameters.0, &places, each, |values, (grad, row)| {
            step(values, grad, row);
        });
        (TensorList(parameters), rounded(first, moment_dtype), rounded(second, moment_dtype))
    }
}
