//! The elementwise parts of a step on Burn's Flex backend, in one pass over memory each.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use rayon::prelude::*;

use super::ops::{Averaging, Flagged, StepOps, Updating};
use crate::orthogonalize::flex::{CHUNK, contiguous, rounded, scaled_squares, single};
use crate::parts::Parts;

type Float = FloatTensor<Flex>;

impl StepOps for Flex {
    fn refuse(flags: Float, tensors: Parts<Self>, rows: Vec<Flagged>, largest: f32) -> Float {
        let mut flags = contiguous(flags);
        let usable = |chunk: &[f32]| chunk.iter().all(|x| x.is_finite() && x.abs() <= largest);
        for (tensor, Flagged { flag, rows }) in tensors.into_vec().into_iter().zip(rows) {
            let tensor = contiguous(single(tensor));
            let elements = tensor.shape().num_elements() / rows;
            let flags = flags.storage_mut::<f32>()[flag..flag + rows].par_iter_mut();
            let rows = tensor.storage::<f32>().par_chunks_exact(elements.max(1));
            flags.zip(rows).for_each(|(flag, row)| {
                if !row.par_chunks(CHUNK).all(usable) {
                    *flag = 1.0;
                }
            });
        }
        flags
    }

    fn accumulate(
        grads: Parts<Self>,
        momentum: Float,
        update: Float,
        norms: Float,
        left: Float,
        factor: Float,
        parts: Vec<Averaging>,
        first: usize,
        nesterov: bool,
        scaled: bool,
    ) -> (Float, Float, Float) {
        let (dtype, [_, m, n]) = (momentum.dtype(), momentum.shape().dims());
        let [_, of_norms, _] = norms.shape().dims();
        let (left, factor) = (values(left), values(factor)[0]);
        let [mut momentum, mut update] = [momentum, update].map(|of| contiguous(single(of)));
        let mut norms = contiguous(norms);
        let mut start = first * m * n;
        for (grad, Averaging { flag, mu }) in grads.into_vec().into_iter().zip(parts) {
            let grad = contiguous(single(grad));
            let end = start + grad.shape().num_elements();
            let updates = &mut update.storage_mut::<f32>()[start..end];
            if left[flag] != 0.0 {
                updates.fill(0.0);
                start = end;
                continue;
            }
            let momenta = momentum.storage_mut::<f32>()[start..end].par_chunks_exact_mut(m * n);
            let updates = updates.par_chunks_exact_mut(m * n);
            let size = 2 * of_norms;
            let norms =
                &mut norms.storage_mut::<f32>()[start / (m * n) * size..end / (m * n) * size];
            let grads = grad.storage::<f32>().par_chunks_exact(m * n);
            let matrices = momenta.zip(updates).zip(norms.par_chunks_exact_mut(size)).zip(grads);
            matrices.for_each(|(((momentum, update), norms), grad)| {
                let outputs = momentum.par_chunks_mut(CHUNK).zip(update.par_chunks_mut(CHUNK));
                let chunks = outputs.zip(norms.par_chunks_exact_mut(2)).zip(grad.par_chunks(CHUNK));
                chunks.for_each(|(((momenta, updates), norm), grads)| {
                    for ((m, u), g) in momenta.iter_mut().zip(&mut *updates).zip(grads) {
                        let grad = if scaled { g * factor } else { *g };
                        let fresh = (1.0 - mu) * grad;
                        *m = mu * *m + fresh;
                        *u = if nesterov { mu * *m + fresh } else { *m };
                    }
                    norm.copy_from_slice(&scaled_squares(updates));
                });
            });
            start = end;
        }
        (rounded(momentum, dtype), rounded(update, dtype), norms)
    }

    fn apply(
        parameters: Parts<Self>,
        direction: Float,
        left: Float,
        late: Float,
        parts: Vec<Updating>,
        first: usize,
        first_late: usize,
    ) -> Parts<Self> {
        let [_, m, n] = direction.shape().dims();
        let direction = contiguous(single(direction));
        let (left, late) = (values(left), values(late));
        let mut matrix = first;
        let update = |(parameter, Updating { flag, keep, lr }): (Float, Updating)| {
            let dtype = parameter.dtype();
            let start = matrix;
            matrix += parameter.shape().num_elements() / (m * n);
            if left[flag] != 0.0 {
                return parameter;
            }
            let mut parameter = contiguous(single(parameter));
            let matrices = parameter.storage_mut::<f32>().par_chunks_exact_mut(m * n);
            let directions =
                direction.storage::<f32>()[start * m * n..matrix * m * n].par_chunks_exact(m * n);
            let late = &late[first_late + start..first_late + matrix];
            let matrices = matrices.zip(directions).zip(late).filter(|(_, late)| **late == 0.0);
            matrices.for_each(|((parameter, direction), _)| {
                let directions = direction.par_chunks(CHUNK);
                parameter.par_chunks_mut(CHUNK).zip(directions).for_each(
                    |(parameters, directions)| {
                        for (p, u) in parameters.iter_mut().zip(directions) {
                            *p = keep * *p - lr * u;
                        }
                    },
                );
            });
            rounded(parameter, dtype)
        };
        Parts::from_vec(parameters.into_vec().into_iter().zip(parts).map(update).collect())
    }
}

/// The float32 values of a small tensor.
pub(crate) fn values(tensor: Float) -> Vec<f32> {
    contiguous(tensor).storage::<f32>().to_vec()
}
