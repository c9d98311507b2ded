//! This rank's share of a bucket whose parameters are slices: the pieces of matrices to which it
//! applies the directions that their owners have distributed.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::Tensor;

use super::decisions::StepInputs;
use super::detached_parameters::FlatTensors;
use crate::distributed::mesh::Grid;
use crate::distributed::plan::{Bucket, Overlap, Parameter, Slice};
use crate::flat;
use crate::update::{MuonPiece, MuonUpdate};

/// The pieces of matrices in a share.
pub struct Share {
    pieces: Vec<MatrixPiece>,
    /// This rank's slices, by parameter.
    slices: BTreeMap<usize, Slice>,
}

/// The elements of a matrix that are in this rank's slice of its parameter.
struct MatrixPiece {
    parameter: usize,
    /// The range of the matrix in the whole parameter.
    matrix: Range<usize>,
    /// The range of the piece in the slice.
    elements: Range<usize>,
    /// The range of the piece in the share.
    range: Range<usize>,
}

impl Share {
    /// The share of the rank of a grid: of the matrices that its row of ranks owns.
    pub fn new(bucket: &Bucket, parameters: &[Parameter], grid: &Grid) -> Self {
        let slice = |parameter: &usize| {
            let slices = parameters[*parameter].slices.clone().expect("all of a bucket are cut");
            (*parameter, Slice { slices, index: grid.slice })
        };
        let slices: BTreeMap<_, _> = bucket.parameters.iter().map(slice).collect();
        let row = grid.ranks[grid.replica].iter();
        let matrices = row.flat_map(|rank| bucket.overlaps(bucket.shard_range(*rank)));
        let mut end = 0;
        let pieces = matrices.filter_map(|Overlap { parameter, elements: matrix, .. }| {
            let elements = slices[&parameter].slices.range(grid.slice, &matrix);
            let range = end..end + elements.len();
            end = range.end;
            // A matrix that lies in other slices alone, such as an expert of another rank.
            (!range.is_empty()).then_some(MatrixPiece { parameter, matrix, elements, range })
        });
        Self { pieces: pieces.collect(), slices }
    }

    /// The share after a step: the values with the directions applied to them.
    pub fn apply(
        &self,
        muon: &MuonUpdate,
        directions: &Tensor<1>,
        values: &mut FlatTensors,
        inputs: &StepInputs,
    ) -> Tensor<1> {
        let (dtype, device) = (directions.dtype(), directions.device());
        // Pieces of one length are a batch.
        let batches = self.pieces.chunk_by(|a, b| a.range.len() == b.range.len());
        let updated = batches.flat_map(|pieces| {
            let range = pieces[0].range.start..pieces[pieces.len() - 1].range.end;
            // The shape of the matrices is of no matter here: a direction is applied element by
            // element.
            let shape = [pieces.len(), 1, pieces[0].range.len()];
            let direction = flat::slice(directions, range).reshape(shape);
            let piece = |MatrixPiece { parameter, matrix, elements, .. }: &MatrixPiece| {
                let Slice { slices, index } = &self.slices[parameter];
                let factors = inputs.factors(*parameter, matrix);
                MuonPiece {
                    values: values.take_elements(*parameter, elements.clone(), dtype, &device),
                    size: inputs.sizes[*parameter],
                    // QK-clip has factors of whole heads, of which the slice has some.
                    factors: factors.map(|factors| slices.cut(&factors, matrix, *index)),
                }
            };
            muon.apply(pieces.iter().map(piece).collect(), direction)
        });
        flat::concat(updated.collect(), dtype, &device)
    }
}
