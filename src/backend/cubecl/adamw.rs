//! A step of AdamW on Burn's CubeCL backends, in one pass over memory.

use std::ops::Range;

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use distmuon_kernels::fused::{self, AdamW, AdamWTypes, AdamWUpdate, Joined, StepControls};

use super::tensors::{VALIDATED, contiguous, part, unread};
use crate::backend::ops::{AdamWOps, ElementwiseRows};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<CubeBackend>;

/// Parameters and moments are updated in place where no other tensor shares their buffers.
impl AdamWOps for CubeBackend {
    fn adamw(
        parameters: TensorList<Self>,
        places: Vec<Range<usize>>,
        grads: TensorList<Self>,
        moment_1: Float,
        moment_2: Float,
        rejected: Float,
        correction_1: Float,
        correction_2: Float,
        factor: Float,
        rows: Vec<ElementwiseRows>,
        [beta_1, beta_2, epsilon]: [f32; 3],
        scaled: bool,
    ) -> (TensorList<Self>, Float, Float) {
        // Whoever else reads these buffers keeps the old values.
        let parameters: Vec<_> = parameters.0.into_iter().map(unread).collect();
        let [first, second] = [moment_1, moment_2].map(unread);
        let [rejected, c1, c2, factor] =
            [rejected, correction_1, correction_2, factor].map(|x| contiguous(x, DType::F32));
        let of_grads = grads.0[0].dtype;
        let dtypes = AdamWTypes {
            parameters: dtype_to_elem_type(parameters[0].dtype),
            grads: dtype_to_elem_type(of_grads),
            moments: dtype_to_elem_type(first.dtype),
        };
        let joined = Joined(!places.is_empty());
        let stepped = |(index, (grad, of)): (usize, (Float, ElementwiseRows))| {
            let values = &parameters[if joined.0 { 0 } else { index }];
            AdamWUpdate {
                values: part(values, 1, grad.shape().num_elements()),
                grad: contiguous(grad, of_grads).handle,
                first: of.first,
                flag: of.flag,
                decay: of.decay as f32,
                lr: of.lr as f32,
            }
        };
        let steps: Vec<_> = grads.0.into_iter().zip(rows).enumerate().map(stepped).collect();
        let corrections = [&c1.handle, &c2.handle];
        let factor = scaled.then_some(&factor.handle);
        fused::adamw(
            &first.client,
            (&steps, joined),
            [&first.handle, &second.handle],
            first.shape().num_elements(),
            StepControls { rejected: &rejected.handle, corrections, factor },
            dtypes,
            AdamW { beta_1, beta_2, epsilon },
        )
        .expect(VALIDATED);
        (TensorList(parameters), first, second)
    }
}
