//! The elementwise parts of a step on Burn's CubeCL backends, in one pass over memory each.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use distmuon_kernels::fused::{self, Averaged, Momenta, Norms, Updated};

use super::ops::{Averaging, Flagged, StepOps, Updating};
use crate::cube::{FITS, batch, contiguous, part, unshared};
use crate::parts::Parts;

type Float = FloatTensor<CubeBackend>;

/// Momentum, flags and parameters are updated in place where nobody else reads them.
impl StepOps for CubeBackend {
    fn refuse(flags: Float, tensors: Parts<Self>, rows: Vec<Flagged>, largest: f32) -> Float {
        let flags = unshared(flags);
        let tensors = tensors.into_vec();
        let dtype = tensors[0].dtype;
        let rows = tensors.into_iter().zip(rows);
        let rows = rows.map(|(tensor, Flagged { flag, rows })| {
            let elements = tensor.shape().num_elements() / rows;
            (part(&contiguous(tensor, dtype), rows, elements), flag)
        });
        let (rows, count) = (rows.collect::<Vec<_>>(), flags.shape().num_elements());
        let dtype = dtype_to_elem_type(dtype);
        fused::refuse(&flags.client, &rows, &flags.handle, count, dtype, largest).expect(FITS);
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
        let [momentum, update, norms] = [momentum, update, norms].map(unshared);
        let [left, factor] = [left, factor].map(|x| contiguous(x, DType::F32));
        let (of, grads) = (batch(&momentum), grads.into_vec());
        let dtypes = [grads[0].dtype, momentum.dtype];
        let averaged = |(grad, Averaging { flag, mu }): (Float, Averaging)| {
            let rows = grad.shape().num_elements() / of.elements;
            Averaged { grad: part(&contiguous(grad, dtypes[0]), rows, of.elements), flag, mu }
        };
        let grads: Vec<_> = grads.into_iter().zip(parts).map(averaged).collect();
        let momenta = Momenta {
            momentum: &momentum.handle,
            update: &update.handle,
            norms: &Norms { handle: norms.handle.clone(), parts: norms.shape()[1] },
            left: &left.handle,
            factor: scaled.then_some(&factor.handle),
        };
        let (client, dtypes) = (&momentum.client, dtypes.map(dtype_to_elem_type));
        fused::accumulate(client, &grads, momenta, of, first, dtypes, nesterov).expect(FITS);
        (momentum, update, norms)
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
        let of_direction = direction.dtype;
        let direction = contiguous(direction, of_direction);
        let [left, late] = [left, late].map(|x| contiguous(x, DType::F32));
        let parameters: Vec<_> = parameters.into_vec().into_iter().map(unshared).collect();
        let (of, dtypes) = (batch(&direction), [parameters[0].dtype, of_direction]);
        let updated = |(values, Updating { flag, keep, lr }): (&Float, Updating)| {
            let rows = values.shape().num_elements() / of.elements;
            Updated { values: part(values, rows, of.elements), flag, keep, lr }
        };
        let updates: Vec<_> = parameters.iter().zip(parts).map(updated).collect();
        fused::apply(
            &direction.client,
            &updates,
            &direction.handle,
            &left.handle,
            (&late.handle, first_late),
            (of, first),
            dtypes.map(dtype_to_elem_type),
        )
        .expect(FITS);
        Parts::from_vec(parameters)
    }
}
