//! Clipping by the norm of all gradients.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::backend::ScaledNorms;
use crate::comm::{ReduceOp, World};
use crate::distributed::plan::{Bucket, BucketKind, Overlap, Parameter, Plan, ROW_ELEMENTS, Work};
use crate::error::Result;
use crate::flat;

/// Added to the norm that gradients are clipped by, as in PyTorch's `clip_grad_norm_`.
const NORM_EPSILON: f64 = 1e-6;

/// The limit of the norm of all gradients, and the order in which it is computed.
pub struct Clip {
    max_norm: f64,
    /// For every row of all parameters in model order, its index among this rank's rows; one past
    /// the last index for a row of another rank. Norms are added in this order, which does not
    /// depend on the plan.
    sources: Tensor<1, Int>,
    /// For every row of this rank, the index of its parameter.
    parameters: Tensor<1, Int>,
    device: Device,
}

impl Clip {
    /// Clipping of a rank's gradients.
    pub fn new(max_norm: f64, plan: &Plan, rank: usize, device: &Device) -> Self {
        // The rows of a parameter follow the rows of the parameters before it.
        let mut first = vec![];
        let mut rows = 0;
        for parameter in plan.parameters() {
            first.push(rows);
            rows += parameter.elements().div_ceil(row_elements(parameter));
        }
        // For every row of this rank its parameter, and for every row that it counts its index in
        // model order.
        let (mut parameters, mut positions) = (vec![], vec![]);
        for bucket in plan.buckets() {
            for overlap in bucket.overlaps(bucket.shard_range(rank)) {
                let Overlap { parameter: index, elements, padding } = overlap;
                let parameter = &plan.parameters()[index];
                let length = row_elements(parameter);
                let count = (elements.len() + padding) / length;
                parameters.extend(std::iter::repeat_n(index as i32, count));
                if counts(bucket, rank) {
                    let (start, first) = (elements.start.div_ceil(length), first[index]);
                    let end = parameter.elements().div_ceil(length);
                    // Rows of padding after a parameter have no position.
                    let position = |row| (row < end).then_some(first + row);
                    positions.extend((start..start + count).map(position));
                }
            }
        }
        // Rows of other ranks point behind this rank's rows, where a zero is: the sum over the
        // ranks fills them.
        let mut sources = vec![positions.len() as i32; rows];
        for (row, position) in positions.into_iter().enumerate() {
            position.into_iter().for_each(|position| sources[position] = row as i32);
        }
        let sources = Tensor::from_data(TensorData::from(&*sources), device);
        let parameters = Tensor::from_data(TensorData::from(&*parameters), device);
        Self { max_norm, sources, parameters, device: device.clone() }
    }

    /// The flags of parameters, repeated for each of this rank's rows.
    pub fn broadcast_rows(&self, flags: &Tensor<1>) -> Tensor<1> {
        match self.parameters.dims() {
            [0] => flat::empty(flags.dtype(), &self.device),
            _ => flags.clone().select(0, self.parameters.clone()),
        }
    }

    /// The factor on all gradients, from the norms of the accepted rows of every bucket that
    /// [`counts`] on this rank. The norms are of gradients times `scale`.
    pub fn factor(&self, world: &World, norms: Vec<ScaledNorms>, scale: f64) -> Result<Tensor<1>> {
        let (scales, squares) = norms.into_iter().map(|norms| (norms.scale, norms.squares)).unzip();
        let in_order = |rows: Vec<Tensor<1>>| {
            let rows = rows.into_iter().map(|values| values.cast(DType::F32)).collect();
            // A gather with a zero after all rows: a scatter would run in one thread on CubeCL.
            flat::with_zero(rows, &self.device).select(0, self.sources.clone())
        };
        let all = Tensor::cat(vec![in_order(scales), in_order(squares)], 0);
        // Every row comes from one rank, and the sum adds zeros to it: all ranks then add up the
        // same numbers in the same order.
        let all = world.comm().all_reduce(all, ReduceOp::Sum)?.wait()?;
        let [rows] = self.sources.dims();
        let (scales, squares) = (flat::slice(&all, 0..rows), flat::slice(&all, rows..2 * rows));
        let norms = ScaledNorms { scale: scales, squares };
        // The gradients are still multiplied by the loss scale, so the limit is as well.
        Ok(norms.factor(self.max_norm * scale, NORM_EPSILON * scale))
    }
}

/// Returns `true` if a rank adds its norms of a bucket: of a replicated bucket, only rank 0 does.
pub fn counts(bucket: &Bucket, rank: usize) -> bool {
    bucket.kind != BucketKind::Replicated || rank == 0
}

/// Elements of a row of a parameter.
fn row_elements(parameter: &Parameter) -> usize {
    match parameter.work {
        Work::Matrices { rows, columns, .. } => rows * columns,
        Work::Whole => parameter.elements(),
        Work::Elements => ROW_ELEMENTS,
    }
}
