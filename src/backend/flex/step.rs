//! The elementwise parts of a step on Burn's Flex backend, in one pass over memory each.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use rayon::prelude::*;

use super::tensors::{
    CHUNK, contiguous, rounded, rows_of_chunk, scaled_squares, single, values, zeros,
};
use crate::backend::ops::{FlaggedRows, MomentumStep, ParameterStep, StepOps, norm_parts};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<Flex>;

impl StepOps for Flex {
    fn reject(
        flags: Float,
        tensors: TensorList<Self>,
        rows: Vec<FlaggedRows>,
        largest: f32,
    ) -> Float {
        let mut flags = contiguous(flags);
        let usable = |chunk: &[f32]| chunk.iter().all(|x| x.is_finite() && x.abs() <= largest);
        for (tensor, FlaggedRows { flag, rows }) in tensors.0.into_iter().zip(rows) {
            let tensor = contiguous(single(tensor));
            let elements = tensor.shape().num_elements() / rows;
            let flags = flags.storage_mut::<f32>()[flag..flag + rows].par_iter_mut();
            let rows = tensor.storage::<f32>().par_chunks_exact(elements.max(1));
            flags.zip(rows).with_min_len(rows_of_chunk(elements)).for_each(|(flag, row)| {
                if !row.par_chunks(CHUNK).all(usable) {
                    *flag = 1.0;
                }
            });
        }
        flags
    }

    fn update_momentum(
        grads: TensorList<Self>,
        momentum: Float,
        rejected: Float,
        factor: Float,
        steps: Vec<MomentumStep>,
        nesterov: bool,
        scaled: bool,
    ) -> (Float, Float, Float) {
        let (dtype, [k, m, n]) = (momentum.dtype(), momentum.shape().dims());
        let norm_parts = norm_parts(m * n);
        let (rejected, factor) = (values(rejected), values(factor)[0]);
        let mut momentum = contiguous(single(momentum));
        let (mut update, mut norms) = (zeros([k, m, n]), zeros([k, norm_parts, 2]));
        let mut start = 0;
        for (grad, step) in grads.0.into_iter().zip(steps) {
            let (grad, [keep, weight], flag) =
                (contiguous(single(grad)), step.weights(), step.flag);
            let end = start + grad.shape().num_elements();
            let updates = &mut update.storage_mut::<f32>()[start..end];
            if rejected[flag] != 0.0 {
                // The momentum stays as it is; the update has no matrix to orthogonalise.
                updates.fill(0.0);
                start = end;
                continue;
            }
            let momenta = momentum.storage_mut::<f32>()[start..end].par_chunks_exact_mut(m * n);
            let updates = updates.par_chunks_exact_mut(m * n);
            let size = 2 * norm_parts;
            let norms =
                &mut norms.storage_mut::<f32>()[start / (m * n) * size..end / (m * n) * size];
            let grads = grad.storage::<f32>().par_chunks_exact(m * n);
            let matrices = momenta.zip(updates).zip(norms.par_chunks_exact_mut(size)).zip(grads);
            let matrices = matrices.with_min_len(rows_of_chunk(m * n));
            matrices.for_each(|(((momentum, update), norms), grad)| {
                let outputs = momentum.par_chunks_mut(CHUNK).zip(update.par_chunks_mut(CHUNK));
                let chunks = outputs.zip(norms.par_chunks_exact_mut(2)).zip(grad.par_chunks(CHUNK));
                chunks.for_each(|(((momenta, updates), norm), grads)| {
                    for ((m, u), g) in momenta.iter_mut().zip(&mut *updates).zip(grads) {
                        let grad = if scaled { g * factor } else { *g };
                        let fresh = weight * grad;
                        *m = keep * *m + fresh;
                        *u = if nesterov { keep * *m + fresh } else { *m };
                    }
                    // While the values are in the cache: the iteration needs the norms next.
                    norm.copy_from_slice(&scaled_squares(updates));
                });
            });
            start = end;
        }
        (rounded(momentum, dtype), rounded(update, dtype), norms)
    }

    fn apply(
        parameters: TensorList<Self>,
        direction: Float,
        rejected: Float,
        diverged: Float,
        steps: Vec<ParameterStep>,
        first_diverged: usize,
    ) -> TensorList<Self> {
        let [_, m, n] = direction.shape().dims();
        let direction = contiguous(single(direction));
        let (rejected, diverged) = (values(rejected), values(diverged));
        let mut matrix = 0;
        let update =
            |(parameter, ParameterStep { flag, decay, lr, .. }): (Float, ParameterStep)| {
                let (dtype, decay, lr) = (parameter.dtype(), decay as f32, lr as f32);
                let start = matrix;
                // Before the return: the next parameter's directions follow, whether this one is
                // updated or not.
                matrix += parameter.shape().num_elements() / (m * n);
                if rejected[flag] != 0.0 {
                    return parameter;
                }
                let mut parameter = contiguous(single(parameter));
                let matrices = parameter.storage_mut::<f32>().par_chunks_exact_mut(m * n);
                let directions = direction.storage::<f32>()[start * m * n..matrix * m * n]
                    .par_chunks_exact(m * n);
                let diverged = &diverged[first_diverged + start..first_diverged + matrix];
                let matrices = matrices
                    .zip(directions)
                    .zip(diverged)
                    .with_min_len(rows_of_chunk(m * n))
                    // Matrices whose iteration diverged keep their values.
                    .filter(|(_, diverged)| **diverged == 0.0);
                matrices.for_each(|((parameter, direction), _)| {
                    let directions = direction.par_chunks(CHUNK);
                    parameter.par_chunks_mut(CHUNK).zip(directions).for_each(
                        |(parameters, directions)| {
                            for (p, u) in parameters.iter_mut().zip(directions) {
                                *p = decay * *p - lr * u;
                            }
                        },
                    );
                });
                rounded(parameter, dtype)
            };
        TensorList(parameters.0.into_iter().zip(steps).map(update).collect())
    }
}
