//! The elementwise parts of a step on Burn's CubeCL backends, in one pass over memory each.

use std::ops::Range;

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use distmuon_kernels::fused::{
    self, AcceptBuffers, Joined, MomentumBuffers, MomentumInput, ParameterUpdate, Published,
    RowNorms, SkipBuffers,
};

use super::tensors::{VALIDATED, batch, contiguous, part, uninitialised, unread, unshared};
use crate::backend::ops::{FlaggedRows, MomentumStep, ParameterStep, StepOps, norm_parts};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<CubeBackend>;

/// Momentum, flags and parameters are updated in place where no other tensor shares their buffers.
impl StepOps for CubeBackend {
    fn reject(
        flags: Float,
        tensors: TensorList<Self>,
        rows: Vec<FlaggedRows>,
        largest: f32,
    ) -> Float {
        let flags = unshared(flags);
        let tensors = tensors.0;
        let dtype = tensors[0].dtype;
        let rows = tensors.into_iter().zip(rows);
        let rows = rows.map(|(tensor, FlaggedRows { flag, rows })| {
            let elements = tensor.shape().num_elements() / rows;
            (part(&contiguous(tensor, dtype), rows, elements), flag)
        });
        let (rows, count) = (rows.collect::<Vec<_>>(), flags.shape().num_elements());
        let dtype = dtype_to_elem_type(dtype);
        fused::reject(&flags.client, &rows, &flags.handle, count, dtype, largest).expect(VALIDATED);
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
        let [sums, absent, skipped] = [sums, absent, skipped].map(|x| contiguous(x, DType::F32));
        let [first, second] = [correction_1, correction_2].map(unread);
        // The old counts stay: whoever reads them may do so later.
        let [rejected, counted, zeros] =
            [(); 3].map(|()| uninitialised(&skipped, skipped.shape(), DType::F32));
        let parameters = skipped.shape().num_elements();
        let buffers = AcceptBuffers {
            sums: &sums.handle,
            absent: has_absent.then_some(&absent.handle),
            skipped: &skipped.handle,
            corrections: [&first.handle, &second.handle],
            rejected: &rejected.handle,
            counted: &counted.handle,
            zeros: &zeros.handle,
        };
        let diverged = sums.shape().num_elements() > parameters;
        fused::accept(&sums.client, buffers, parameters, diverged, weights).expect(VALIDATED);
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
        // Advanced in place; a copy is made where a second reference still reads the old one.
        let momentum = unread(momentum);
        let [rejected, factor] = [rejected, factor].map(|x| contiguous(x, DType::F32));
        let (of, grads) = (batch(&momentum), grads.0);
        let update = uninitialised(&momentum, momentum.shape(), momentum.dtype);
        let partials = norm_parts(of.elements);
        let norms = uninitialised(&momentum, [of.count, partials, 2].into(), DType::F32);
        let dtypes = [grads[0].dtype, momentum.dtype];
        let averaged = |(grad, step): (Float, MomentumStep)| {
            let rows = grad.shape().num_elements() / of.elements;
            let grad = part(&contiguous(grad, dtypes[0]), rows, of.elements);
            let [keep, fresh] = step.weights();
            MomentumInput { grad, flag: step.flag, keep, fresh }
        };
        let grads: Vec<_> = grads.into_iter().zip(steps).map(averaged).collect();
        let momenta = MomentumBuffers {
            momentum: &momentum.handle,
            update: &update.handle,
            norms: &RowNorms { handle: norms.handle.clone(), partials },
            rejected: &rejected.handle,
            factor: scaled.then_some(&factor.handle),
        };
        let (client, dtypes) = (&momentum.client, dtypes.map(dtype_to_elem_type));
        fused::update_momentum(client, &grads, momenta, of, 0, dtypes, nesterov).expect(VALIDATED);
        (momentum, update, norms)
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
        // The kernel reads directions in their type, which may be another than the parameters'.
        let of_direction = direction.dtype;
        let direction = contiguous(direction, of_direction);
        let [rejected, diverged] = [rejected, diverged].map(|x| contiguous(x, DType::F32));
        let parameters: Vec<_> = parameters.0.into_iter().map(unread).collect();
        let (of, dtypes) = (batch(&direction), [parameters[0].dtype, of_direction]);
        let joined = Joined(!places.is_empty());
        let updated = |(index, step): (usize, ParameterStep)| {
            let ParameterStep { flag, decay, lr, .. } = step;
            let (values, elements) = match places.get(index) {
                Some(place) => (&parameters[0], place.len()),
                None => (&parameters[index], parameters[index].shape().num_elements()),
            };
            ParameterUpdate {
                values: part(values, elements / of.elements, of.elements),
                flag,
                decay: decay as f32,
                lr: lr as f32,
            }
        };
        let updates: Vec<_> = steps.into_iter().enumerate().map(updated).collect();
        fused::apply(
            &direction.client,
            (&updates, joined),
            &direction.handle,
            &rejected.handle,
            (&diverged.handle, first_diverged),
            (of, 0),
            dtypes.map(dtype_to_elem_type),
        )
        .expect(VALIDATED);
        TensorList(parameters)
    }

    fn apply_and_count(
        parameter: Float,
        direction: Float,
        flag: Float,
        skipped: Float,
        factors: [f64; 2],
    ) -> (Float, Float, Float) {
        let dtypes = [parameter.dtype, direction.dtype];
        let direction = contiguous(direction, dtypes[1]);
        let [flag, skipped] = [flag, skipped].map(|x| contiguous(x, DType::F32));
        let parameter = unread(parameter);
        // The old count stays: whoever reads it may do so later.
        let [counted, zero] =
            [(); 2].map(|()| uninitialised(&skipped, skipped.shape(), DType::F32));
        let counts =
            SkipBuffers { skipped: &skipped.handle, counted: &counted.handle, zero: &zero.handle };
        let values = part(&parameter, 1, parameter.shape().num_elements());
        let (client, dtypes) = (&parameter.client, dtypes.map(dtype_to_elem_type));
        let factors = factors.map(|factor| factor as f32);
        let (direction, flag) = (&direction.handle, &flag.handle);
        fused::apply_and_count(client, &values, direction, flag, counts, factors, dtypes)
            .expect(VALIDATED);
        (parameter, counted, zero)
    }

    fn restore(masters: Float, parameters: TensorList<Self>, firsts: Vec<usize>) -> Float {
        let masters = unread(masters);
        let dtype = parameters.0[0].dtype;
        // In memory, and by the conversion that has rounded the parameters.
        let rounded = contiguous(masters.clone(), dtype);
        let published = |(values, first): (Float, usize)| {
            let elements = values.shape().num_elements();
            Published { values: part(&contiguous(values, dtype), 1, elements), first }
        };
        let parameters: Vec<_> = parameters.0.into_iter().zip(firsts).map(published).collect();
        let (elements, dtype) = (masters.shape().num_elements(), dtype_to_elem_type(dtype));
        let client = &masters.client;
        fused::restore(client, &parameters, &masters.handle, &rounded.handle, elements, dtype)
            .expect(VALIDATED);
        masters
    }
}
