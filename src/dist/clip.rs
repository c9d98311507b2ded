//! Clipping by the norm of all gradients.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::World;
use super::comm::ReduceOp;
use super::flat;
use super::plan::{Bucket, BucketKind, GRAIN, Parameter, Plan, Work};
use crate::clipping::Norms;
use crate::error::Result;

/// Added to the norm that gradients are clipped by, as in PyTorch's `clip_grad_norm_`.
const NORM_EPSILON: f64 = 1e-6;

/// The most that the norm of all gradients may be, and how it is taken.
pub struct Clip {
    max_norm: f64,
    /// For every row of all parameters in model order, its place among this rank's rows; behind them for
    /// a row of another rank. Norms are put together in this order, which does not depend on the plan.
    sources: Tensor<1, Int>,
    /// For every row of this rank, the number of its parameter.
    parameters: Tensor<1, Int>,
    device: Device,
}

impl Clip {
    /// Clips the gradients of a rank whose rows, of all buckets, are of the parameters `of_rows`.
    pub fn new(
        max_norm: f64,
        plan: &Plan,
        rank: usize,
        of_rows: &[usize],
        device: &Device,
    ) -> Self {
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
                let of_first = first[number];
                // Rows of zeros behind a parameter have no place.
                let place = move |row| (row < of_parameter).then_some(of_first + row);
                (start..start + count).map(place)
            });
            places.collect::<Vec<_>>()
        };
        let counted = plan.buckets().iter().filter(|bucket| counts(bucket, rank));
        let places: Vec<Option<usize>> = counted.flat_map(of_bucket).collect();
        let mut sources = vec![places.len() as i32; rows];
        for (own, place) in places.into_iter().enumerate() {
            place.into_iter().for_each(|place| sources[place] = own as i32);
        }
        let sources = Tensor::from_data(TensorData::from(&*sources), device);
        let parameters: Vec<i32> = of_rows.iter().map(|number| *number as i32).collect();
        let parameters = Tensor::from_data(TensorData::from(&*parameters), device);
        Self { max_norm, sources, parameters, device: device.clone() }
    }

    /// For every row of this rank, the flag of its parameter.
    pub fn spread(&self, flags: &Tensor<1>) -> Tensor<1> {
        match self.parameters.dims() {
            [0] => flat::empty(flags.dtype(), &self.device),
            _ => flags.clone().select(0, self.parameters.clone()),
        }
    }

    /// The factor on all gradients, from the norms of the accepted rows of every bucket that
    /// [`counts`] on this rank.
    pub fn factor(&self, world: &World, norms: Vec<Norms>) -> Result<Tensor<1>> {
        let (scales, squares) = norms.into_iter().map(|of| (of.scale, of.squares)).unzip();
        let in_order = |own: Vec<Tensor<1>>| {
            let own = own.into_iter().map(|values| values.cast(DType::F32)).collect();
            // A gather with a zero behind all rows: a scatter is one thread on CubeCL, for any number of rows.
            flat::with_zero(own, &self.device).select(0, self.sources.clone())
        };
        let all = Tensor::cat(vec![in_order(scales), in_order(squares)], 0);
        let all = world.comm().all_reduce(all, ReduceOp::Sum)?.wait()?;
        let [rows] = self.sources.dims();
        let (scale, squares) = (flat::part(&all, 0..rows), flat::part(&all, rows..2 * rows));
        Ok(Norms { scale, squares }.factor(self.max_norm, NORM_EPSILON))
    }
}

/// Tells whether a rank adds its norms of a bucket: of what all ranks have, rank 0 alone does.
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
