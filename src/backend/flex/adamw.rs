//! A step of AdamW on Burn's Flex backend, in one pass over memory.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};

use super::chunks::{CHUNK, Cut, CutMut, Pieces};
use super::tensors::{contiguous, rounded, single, values};
use crate::backend::ops::{AdamWOps, ElementwiseRows};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<Flex>;

impl AdamWOps for Flex {
    fn adamw(
        parameters: TensorList<Self>,
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
        let step = |((parameter, grad), row): ((Float, Float), ElementwiseRows)| {
            let ElementwiseRows { flag, first: start, .. } = row;
            let (decay, lr) = (row.decay as f32, row.lr as f32);
            // Before anything is written: the moments of the parameter stay as well.
            if rejected[flag] != 0.0 {
                return parameter;
            }
            let (dtype, c1, c2) = (parameter.dtype(), c1[flag], c2[flag]);
            let (mut parameter, grad) = (float32(parameter), float32(grad));
            let range = start..start + parameter.shape().num_elements();
            let moments = (
                CutMut(&mut first.storage_mut::<f32>()[range.clone()], CHUNK),
                CutMut(&mut second.storage_mut::<f32>()[range], CHUNK),
            );
            let values = CutMut(parameter.storage_mut::<f32>(), CHUNK);
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
            rounded(parameter, dtype)
        };
        let each = parameters.0.into_iter().zip(grads.0).zip(rows);
        let parameters = TensorList(each.map(step).collect());
        (parameters, rounded(first, moment_dtype), rounded(second, moment_dtype))
    }
}
