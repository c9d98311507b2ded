//! A step of AdamW on Burn's Flex backend, in one pass over memory.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use rayon::prelude::*;

use super::ops::{AdamWOps, Updating};
use crate::muon::flex::values;
use crate::orthogonalize::flex::{CHUNK, contiguous, rounded, single};
use crate::parts::Parts;

type Float = FloatTensor<Flex>;

impl AdamWOps for Flex {
    fn adamw(
        parameters: Parts<Self>,
        grads: Parts<Self>,
        moment_1: Float,
        moment_2: Float,
        left: Float,
        correction_1: Float,
        correction_2: Float,
        factor: Float,
        parts: Vec<Updating>,
        [beta_1, beta_2, epsilon]: [f32; 3],
        scaled: bool,
    ) -> (Parts<Self>, Float, Float) {
        let of_moments = moment_1.dtype();
        let float32 = |tensor| contiguous(single(tensor));
        let [mut first, mut second] = [moment_1, moment_2].map(float32);
        let [left, c1, c2, factor] = [left, correction_1, correction_2, factor].map(values);
        let step = |((parameter, grad), of): ((Float, Float), Updating)| {
            let Updating { flag, first: start, keep, lr } = of;
            if left[flag] != 0.0 {
                return parameter;
            }
            let (dtype, c1, c2) = (parameter.dtype(), c1[flag], c2[flag]);
            let (mut parameter, grad) = (float32(parameter), float32(grad));
            let place = start..start + parameter.shape().num_elements();
            let chunks = parameter
                .storage_mut::<f32>()
                .par_chunks_mut(CHUNK)
                .zip(first.storage_mut::<f32>()[place.clone()].par_chunks_mut(CHUNK))
                .zip(second.storage_mut::<f32>()[place].par_chunks_mut(CHUNK))
                .zip(grad.storage::<f32>().par_chunks(CHUNK));
            chunks.for_each(|(((values, first), second), grads)| {
                let moments = first.iter_mut().zip(second);
                for ((p, (m, v)), g) in values.iter_mut().zip(moments).zip(grads) {
                    let g = if scaled { g * factor[0] } else { *g };
                    *m = beta_1 * *m + (1.0 - beta_1) * g;
                    *v = beta_2 * *v + (1.0 - beta_2) * g * g;
                    *p = keep * *p - lr * (*m / c1 / ((*v / c2).sqrt() + epsilon));
                }
            });
            rounded(parameter, dtype)
        };
        let each = parameters.into_vec().into_iter().zip(grads.into_vec()).zip(parts);
        let parameters = Parts::from_vec(each.map(step).collect());
        (parameters, rounded(first, of_moments), rounded(second, of_moments))
    }
}
