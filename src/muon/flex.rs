//! The elementwise parts of a step on Burn's Flex backend, in one pass over memory each.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::{FloatDType, TensorData};
use rayon::prelude::*;

use super::ops::StepOps;
use crate::orthogonalize::flex::{CHUNK, contiguous, rounded, single};

impl StepOps for Flex {
    fn accumulate(
        grad: FloatTensor<Self>,
        momentum: FloatTensor<Self>,
        mu: f32,
        nesterov: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (shape, device, dtype) = (grad.shape(), grad.device(), momentum.dtype());
        let (grad, mut momentum) = (contiguous(single(grad)), contiguous(single(momentum)));
        let finite = |values: &[f32]| values.iter().all(|x| x.is_finite());
        let accepted = grad.storage::<f32>().par_chunks(CHUNK).all(finite);
        let mut update = Self::float_empty(shape, &device, FloatDType::F32);
        if accepted {
            let momenta = momentum.storage_mut::<f32>().par_chunks_mut(CHUNK);
            let updates = update.storage_mut::<f32>().par_chunks_mut(CHUNK);
            let grads = grad.storage::<f32>().par_chunks(CHUNK);
            momenta.zip(updates).zip(grads).for_each(|((momenta, updates), grads)| {
                for ((m, u), g) in momenta.iter_mut().zip(updates).zip(grads) {
                    let fresh = (1.0 - mu) * g;
                    *m = mu * *m + fresh;
                    *u = if nesterov { mu * *m + fresh } else { *m };
                }
            });
        }
        let accepted = TensorData::from([if accepted { 1.0f32 } else { 0.0 }]);
        let accepted = Self::float_from_data(accepted, &device);
        (rounded(momentum, dtype), rounded(update, dtype), accepted)
    }

    fn apply(
        parameter: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        accepted: FloatTensor<Self>,
        keep: f32,
        lr: f32,
    ) -> FloatTensor<Self> {
        let accepted = accepted.storage::<f32>()[0] != 0.0;
        if !accepted {
            return parameter;
        }
        let dtype = parameter.dtype();
        let (mut parameter, direction) =
            (contiguous(single(parameter)), contiguous(single(direction)));
        let parameters = parameter.storage_mut::<f32>().par_chunks_mut(CHUNK);
        let directions = direction.storage::<f32>().par_chunks(CHUNK);
        parameters.zip(directions).for_each(|(parameters, directions)| {
            for (p, u) in parameters.iter_mut().zip(directions) {
                *p = keep * *p - lr * u;
            }
        });
        rounded(parameter, dtype)
    }
}
