//! The elementwise parts of a step on Burn's Flex backend, in one pass over memory each.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, bf16, f16};

use super::chunks::{CHUNK, Cut, CutMut, Pieces};
use super::tensors::{contiguous, rounded, scaled_squares, single, updated, values, zeros};
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
            let flags = CutMut(&mut flags.storage_mut::<f32>()[flag..flag + rows], 1);
            let rows = Cut(tensor.storage::<f32>(), elements.max(1));
            (flags, rows).each(elements, |(flag, row)| {
                if !Cut(row, CHUNK).all(CHUNK, usable) {
                    flag[0] = 1.0;
                }
            });
        }
        flags
    }

    fn accept(
        sums: Float,
        absent: Float,
        skipped: Float,
        correction_1: Float,
        correction_2: Float,
        weights: [[f32; 2]; 2],
        has_absent: bool,
    ) -> (Float, Float, Float, Float, Float) {
        let (sums, absent) = (values(sums), values(absent));
        let [mut counted, mut first, mut second] =
            [skipped, correction_1, correction_2].map(contiguous);
        let parameters = counted.shape().num_elements();
        let zeros = || Float::filled_typed([parameters].into(), DType::F32, 0f32);
        let (mut rejected, zeros) = (zeros(), zeros());
        for at in 0..parameters {
            let is_rejected = sums[at] > 0.0;
            let has_diverged = sums.get(parameters + at).is_some_and(|sum| *sum > 0.0);
            let skips = f32::from(u8::from(is_rejected) + u8::from(has_diverged));
            counted.storage_mut::<f32>()[at] += skips;
            if is_rejected || has_absent && absent[at] > 0.0 {
                rejected.storage_mut::<f32>()[at] = 1.0;
                continue;
            }
            for (correction, [keep, fresh]) in [&mut first, &mut second].into_iter().zip(weights) {
                let value = &mut correction.storage_mut::<f32>()[at];
                *value = *value * keep + fresh;
            }
        }
        (rejected, counted, first, second, zeros)
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
            let momenta = CutMut(&mut momentum.storage_mut::<f32>()[start..end], m * n);
            let size = 2 * norm_parts;
            let norms =
                &mut norms.storage_mut::<f32>()[start / (m * n) * size..end / (m * n) * size];
            let outputs = (momenta, CutMut(updates, m * n));
            let inputs = (CutMut(norms, size), Cut(grad.storage::<f32>(), m * n));
            (outputs, inputs).each(m * n, |((momentum, update), (norms, grad))| {
                let outputs = (CutMut(momentum, CHUNK), CutMut(update, CHUNK));
                let chunks = (outputs, (CutMut(norms, 2), Cut(grad, CHUNK)));
                chunks.each(CHUNK, |((momenta, updates), (norm, grads))| {
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
        places: Vec<Range<usize>>,
        direction: Float,
        rejected: Float,
        diverged: Float,
        steps: Vec<ParameterStep>,
        first_diverged: usize,
    ) -> TensorList<Self> {
        let [_, m, n] = direction.shape().dims();
        let direction = contiguous(single(direction));
        let (rejected, diverged) = (values(rejected), values(diverged));
        let lengths: Vec<usize> = match places.is_empty() {
            true => parameters.0.iter().map(|values| values.shape().num_elements()).collect(),
            false => places.iter().map(Range::len).collect(),
        };
        // The matrices of a rejected parameter are in the batch as well.
        let firsts = lengths.iter().scan(0, |end, length| {
            let first = *end;
            *end += length / (m * n);
            Some(first)
        });
        let each = firsts.zip(steps);
        let each = each.map(|(first, step)| (rejected[step.flag] == 0.0).then_some((first, step)));
        let update = |parameter: &mut [f32], (first, step): (usize, ParameterStep)| {
            let (decay, lr) = (step.decay as f32, step.lr as f32);
            let end = first + parameter.len() / (m * n);
            let directions = &direction.storage::<f32>()[first * m * n..end * m * n];
            let diverged = &diverged[first_diverged + first..first_diverged + end];
            let matrices = ((CutMut(parameter, m * n), Cut(directions, m * n)), Cut(diverged, 1));
            matrices.each(m * n, |((parameter, direction), diverged)| {
                // Matrices whose iteration diverged keep their values.
                if diverged[0] != 0.0 {
                    return;
                }
                let chunks = (CutMut(parameter, CHUNK), Cut(direction, CHUNK));
                chunks.each(CHUNK, |(parameters, directions)| {
                    for (p, u) in parameters.iter_mut().zip(directions) {
                        *p = decay * *p - lr * u;
                    }
                });
            });
        };
        TensorList(updated(parameters.0, &places, each, update))
    }

    fn restore(masters: Float, parameters: TensorList<Self>, firsts: Vec<usize>) -> Float {
        let half = parameters.0[0].dtype();
        let mut masters = contiguous(masters);
        for (values, first) in parameters.0.into_iter().zip(firsts) {
            let values = contiguous(single(values));
            let end = first + values.shape().num_elements();
            let masters = CutMut(&mut masters.storage_mut::<f32>()[first..end], CHUNK);
            (masters, Cut(values.storage::<f32>(), CHUNK)).each(CHUNK, |(masters, values)| {
                for (master, value) in masters.iter_mut().zip(values) {
                    if round(*master, half) != *value {
                        *master = *value;
                    }
                }
            });
        }
        masters
    }
}

/// A value, rounded to half precision.
fn round(value: f32, half: DType) -> f32 {
    match half {
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => bf16::from_f32(value).to_f32(),
    }
}
