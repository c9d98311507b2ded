//! Clipping by the norm of all gradients.

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};

use super::World;
use super::comm::ReduceOp;
use super::flat;
use super::plan::{Bucket, BucketKind, GRAIN, Parameter, Plan, Work};
use crate::error::Result;

/// Added to the norm that gradients are clipped by, as in PyTorch's `clip_grad_norm_`.
const NORM_EPSILON: f64 = 1e-6;

/// The most that the norm of all gradients may be, and how it is taken.
pub struct Clip {
    max_norm: f64,
    /// The places of this rank's rows among the rows of all parameters in model order: their squares are
    /// added up in an order that does not depend on the plan.
    places: Tensor<1, Int>,
    /// Rows of all parameters.
    rows: usize,
    device: Device,
}

impl Clip {
    pub fn new(max_norm: f64, plan: &Plan, rank: usize, device: &Device) -> Self {
        // The rows of a parameter come one after the other, after those of the parameters before.
        let mut first = vec![];
        let mut rows = 0;
        for parameter in plan.parameters() {
            first.push(rows);
            rows += parameter.elements().div_ceil(row_elements(parameter));
        }
        let of_bucket = |bucket: &Bucket| {
            let parts = bucket.overlaps(bucket.share(rank));
            let places = parts.flat_map(|(number, elements, padding)| {
                let parameter = &plan.parameters()[number];
                let length = row_elements(parameter);
                let of_parameter = parameter.elements().div_ceil(length);
                let start = elements.start.div_ceil(length);
                let count = (elements.len() + padding) / length;
                // Rows of zeros behind a parameter go to the place after all others.
                let place = |row| if row < of_parameter { first[number] + row } else { rows };
                (start..start + count).map(|row| place(row) as i32).collect::<Vec<_>>()
            });
            places.collect::<Vec<_>>()
        };
        let counted = plan.buckets().iter().filter(|bucket| counts(bucket, rank));
        let places: Vec<i32> = counted.flat_map(of_bucket).collect();
        let places = Tensor::from_data(TensorData::from(&*places), device);
        Self { max_norm, places, rows, device: device.clone() }
    }

    /// The factor on all gradients, from the squares of the accepted rows of every bucket that
    /// [`counts`] on this rank.
    pub fn factor(&self, world: &World, squares: Vec<Tensor<1>>) -> Result<Tensor<1>> {
        let mut all = Tensor::<1>::zeros([self.rows + 1], (&self.device, DType::F32));
        let own = flat::join(squares, DType::F32, &self.device);
        if own.dims() != [0] {
            all = all.select_assign(0, self.places.clone(), own, IndexingUpdateOp::Add);
        }
        let all = world.comm().all_reduce(all, ReduceOp::Sum)?.wait()?;
        let norm = all.sum().sqrt().add_scalar(NORM_EPSILON);
        // A norm that overflows makes the factor zero, as in PyTorch.
        Ok(norm.recip().mul_scalar(self.max_norm).clamp_max(1.0))
    }
}

/// Tells whether a rank adds its squares of a bucket: of what all ranks have, rank 0 alone does.
pub fn counts(bucket: &Bucket, rank: usize) -> bool {
    bucket.kind != BucketKind::Replicated || rank == 0
}

/// Elements of a row of a parameter.
fn row_elements(parameter: &Parameter) -> usize {
    match parameter.work {
        Work::Matrices { rows, columns, .. } => rows * columns,
        Work::Elements => GRAIN,
    }
}
