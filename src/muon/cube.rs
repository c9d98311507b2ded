//! The elementwise parts of a step on Burn's CubeCL backends, in one pass over memory each.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use distmuon_kernels::fused::{self, Momentum};

use super::ops::StepOps;
use crate::cube::{FITS, batch, contiguous, tensor, unshared};

type Float = FloatTensor<CubeBackend>;

/// Momentum and parameters are updated in place where nobody else reads them.
impl StepOps for CubeBackend {
    fn finite(grad: Float, largest: f32) -> Float {
        let grad = contiguous(grad.clone(), grad.dtype);
        let of = batch(&grad);
        let dtype = dtype_to_elem_type(grad.dtype);
        let accepted = fused::finite(&grad.client, &grad.handle, of, dtype, largest).expect(FITS);
        tensor(&grad, accepted, [of.count].into(), DType::F32)
    }

    fn accumulate(
        grad: Float,
        momentum: Float,
        accepted: Float,
        mu: f32,
        nesterov: bool,
        parts: usize,
    ) -> (Float, Float, Float) {
        let momentum = unshared(momentum);
        let grad = contiguous(grad, momentum.dtype);
        let accepted = contiguous(accepted, DType::F32);
        let of = batch(&grad);
        let (update, norms) = fused::accumulate(
            &grad.client,
            [&grad.handle, &momentum.handle, &accepted.handle],
            of,
            dtype_to_elem_type(momentum.dtype),
            Momentum { mu, nesterov },
            parts,
        )
        .expect(FITS);
        let update = tensor(&grad, update, grad.shape(), momentum.dtype);
        let norms = tensor(&grad, norms.handle, [of.count, parts, 2].into(), DType::F32);
        (momentum, update, norms)
    }

    fn apply(parameter: Float, direction: Float, accepted: Float, keep: Float, lr: Float) -> Float {
        let parameter = unshared(parameter);
        let direction = contiguous(direction.clone(), direction.dtype);
        let [accepted, keep, lr] = [accepted, keep, lr].map(|x| contiguous(x, DType::F32));
        fused::apply(
            &parameter.client,
            &parameter.handle,
            &direction.handle,
            [&accepted.handle, &keep.handle, &lr.handle],
            batch(&parameter),
            [parameter.dtype, direction.dtype].map(dtype_to_elem_type),
        )
        .expect(FITS);
        parameter
    }
}
