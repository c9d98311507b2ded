//! A step of AdamW on Burn's CubeCL backends, in one pass over memory.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use distmuon_kernels::fused::{self, AdamW};

use super::ops::AdamWOps;
use crate::cube::{FITS, batch, contiguous, unshared};

type Float = FloatTensor<CubeBackend>;

/// Everything is updated in place where nobody else reads it.
impl AdamWOps for CubeBackend {
    fn adamw(
        parameters: Float,
        grads: Float,
        moment_1: Float,
        moment_2: Float,
        rows: Float,
        [beta_1, beta_2, epsilon]: [f32; 3],
    ) -> (Float, Float, Float) {
        let dtype = parameters.dtype;
        let of_moments = moment_1.dtype;
        let [parameters, first, second] = [parameters, moment_1, moment_2].map(unshared);
        let (grads, rows) = (contiguous(grads, dtype), contiguous(rows, DType::F32));
        fused::adamw(
            &parameters.client,
            [&parameters.handle, &grads.handle, &first.handle, &second.handle],
            &rows.handle,
            batch(&parameters),
            [dtype, of_moments].map(dtype_to_elem_type),
            AdamW { beta_1, beta_2, epsilon },
        )
        .expect(FITS);
        (parameters, first, second)
    }
}
