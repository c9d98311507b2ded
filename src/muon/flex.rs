//! The elementwise parts of a step on Burn's Flex backend, in one pass over memory each.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::TensorData;
use rayon::prelude::*;

use super::ops::StepOps;
use crate::orthogonalize::flex::{CHUNK, contiguous, rounded, scaled_squares, single, zeros};

impl StepOps for Flex {
    fn finite(grad: FloatTensor<Self>, largest: f32) -> FloatTensor<Self> {
        let [_, m, n] = grad.shape().dims();
        let grad = contiguous(single(grad));
        let finite = |chunk: &[f32]| chunk.iter().all(|x| x.is_finite() && x.abs() <= largest);
        let matrices = grad.storage::<f32>().par_chunks_exact((m * n).max(1));
        let accepted: Vec<f32> = matrices
            .map(|matrix| if matrix.par_chunks(CHUNK).all(finite) { 1.0 } else { 0.0 })
            .collect();
        Self::float_from_data(TensorData::from(&*accepted), &Default::default())
    }

    fn accumulate(
        grad: FloatTensor<Self>,
        momentum: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        mu: f32,
        nesterov: bool,
        parts: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = momentum.dtype();
        let [count, m, n] = grad.shape().dims();
        let size = (m * n).max(1);
        let (grad, mut momentum) = (contiguous(single(grad)), contiguous(single(momentum)));
        let accepted = values(accepted);
        let (mut update, mut norms) = (zeros([count, m, n]), zeros([count, parts, 2]));
        let momenta = momentum.storage_mut::<f32>().par_chunks_exact_mut(size);
        let updates = update.storage_mut::<f32>().par_chunks_exact_mut(size);
        let all_norms = norms.storage_mut::<f32>().par_chunks_exact_mut((2 * parts).max(1));
        let grads = grad.storage::<f32>().par_chunks_exact(size);
        let matrices = momenta.zip(updates).zip(all_norms).zip(grads).zip(&accepted);
        matrices.for_each(|((((momentum, update), norms), grad), accepted)| {
            if *accepted == 0.0 {
                update.fill(0.0);
                return;
            }
            let outputs = momentum.par_chunks_mut(CHUNK).zip(update.par_chunks_mut(CHUNK));
            let chunks = outputs.zip(norms.par_chunks_exact_mut(2)).zip(grad.par_chunks(CHUNK));
            chunks.for_each(|(((momenta, updates), norm), grads)| {
                for ((m, u), g) in momenta.iter_mut().zip(&mut *updates).zip(grads) {
                    let fresh = (1.0 - mu) * g;
                    *m = mu * *m + fresh;
                    *u = if nesterov { mu * *m + fresh } else { *m };
                }
                norm.copy_from_slice(&scaled_squares(updates));
            });
        });
        (rounded(momentum, dtype), rounded(update, dtype), norms)
    }

    fn apply(
        parameter: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        keep: FloatTensor<Self>,
        lr: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [_, m, n] = parameter.shape().dims();
        let size = (m * n).max(1);
        let dtype = parameter.dtype();
        let (mut parameter, direction) =
            (contiguous(single(parameter)), contiguous(single(direction)));
        let (accepted, keep, lr) = (values(accepted), values(keep), values(lr));
        let parameters = parameter.storage_mut::<f32>().par_chunks_exact_mut(size);
        let directions = direction.storage::<f32>().par_chunks_exact(size);
        let matrices = parameters.zip(directions).zip(&accepted).zip(&keep).zip(&lr);
        matrices.filter(|(((_, accepted), _), _)| **accepted != 0.0).for_each(
            |((((parameter, direction), _), keep), lr)| {
                let directions = direction.par_chunks(CHUNK);
                let chunks = parameter.par_chunks_mut(CHUNK).zip(directions);
                chunks.for_each(|(parameters, directions)| {
                    for (p, u) in parameters.iter_mut().zip(directions) {
                        *p = keep * *p - lr * u;
                    }
                });
            },
        );
        rounded(parameter, dtype)
    }
}

/// One value per matrix.
fn values(tensor: FloatTensor<Flex>) -> Vec<f32> {
    contiguous(tensor).storage::<f32>().to_vec()
}
