//! A parameter of the passes: the conversion between the whole, as modules use it, and the parts of
//! ranks.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};

use super::form::Form;
use crate::distributed::plan::{Counts, Overlap, Run};
use crate::distributed::trainable::ModelParameter;
use crate::flat;
use crate::matrix_blocks::Blocks;
use crate::parameters::Placement;

/// A parameter whose gradient is reduced in the backward pass. An owned one is also divided among
/// ranks between steps, and may be frozen instead.
///
/// A rank updates its *shard*, and holds its *part*: the shards of all ranks that have replicas of
/// the part. Without replicas, a part is a shard.
#[derive(Debug)]
pub struct PassParameter {
    /// The parameter's index among the owned parameters.
    pub index: usize,
    pub path: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// The type of this rank's shard of its mean gradient after a pass.
    pub mean_dtype: DType,
    pub placement: Placement,
    /// `false` for one that was frozen when the model was divided.
    pub is_trained: bool,
    /// The blocks that are trained each as a parameter of its own.
    blocks: Blocks,
    /// The axes along which it is cut: it has the shape of this rank's slice.
    axes: Vec<String>,
    most_elements: usize,
    division: ParameterDivision,
    /// The form in which the whole is stored, if it is owned.
    pub form: Form,
}

/// The division of a parameter among the ranks that share it.
#[derive(Debug)]
struct ParameterDivision {
    /// This rank's position.
    position: Position,
    /// Elements of the shards of all ranks, which follow each other.
    counts: Counts,
    /// The blocks in the shard of this rank.
    runs: Vec<Run>,
    /// Elements of the parts, which together are the parameter.
    part_counts: Counts,
    /// Elements of the shards of this rank's part.
    shard_counts: Counts,
    /// In the order of the parts.
    pieces: Vec<BlockPiece>,
}

/// The position of a rank among those that share a parameter, or a slice of it, and its replicas.
#[derive(Debug, Clone, Copy)]
pub struct Position {
    /// The index of its replica.
    pub replica: usize,
    /// The index of its part, and of its shard in that part.
    pub part: usize,
    pub shard: usize,
}

/// Neighbouring elements of a block.
#[derive(Debug)]
struct BlockPiece {
    block: usize,
    /// The part that has them.
    part: usize,
    elements: Range<usize>,
    /// Zeros that follow.
    padding: usize,
    /// The piece's first position in the parts of all ranks, and in the shards of all ranks.
    in_parts: usize,
    in_shards: usize,
}

/// Elements of one block, in the shard of a rank.
pub struct BlockPart {
    pub block: usize,
    /// The first of the elements, in the block.
    pub start: usize,
    pub values: Tensor<1>,
}

/// The shards of a parameter, or of a slice, that ranks share.
pub struct ParameterShards {
    /// The shard of every rank: elements of blocks in its order, with zeros behind them.
    pub in_use: Vec<Vec<Overlap>>,
    /// The shard of this rank. Its elements are counted as a step has them: in the rows of a block
    /// that the rank stores, or in the block that is used.
    pub runs: Vec<Run>,
}

impl ParameterDivision {
    fn new(shards: ParameterShards, positions: &[Position], position: Position) -> Self {
        let ParameterShards { in_use, runs } = shards;
        let extent = |held: &Overlap| held.elements.len() + held.padding;
        let counts: Counts = in_use.iter().map(|shard| shard.iter().map(extent).sum()).collect();
        let mut order = positions.to_vec();
        // Gathered parts follow each other in the order of the axis, and shards in the order of
        // replicas.
        order.sort_by_key(|position| (position.part, position.shard));
        let (mut pieces, mut in_parts) = (vec![], 0);
        let mut part_counts = vec![0; 1 + order.iter().map(|p| p.part).max().unwrap_or(0)];
        for position in &order {
            let mut in_shards = counts.before(position.replica);
            part_counts[position.part] += counts.of(position.replica);
            for held in &in_use[position.replica] {
                let Overlap { parameter: block, elements, padding } = held.clone();
                let part = position.part;
                pieces.push(BlockPiece { block, part, elements, padding, in_parts, in_shards });
                in_parts += extent(held);
                in_shards += extent(held);
            }
        }
        let shards = order.iter().filter(|other| other.part == position.part);
        let shard_counts = shards.map(|shard| counts.of(shard.replica)).collect();
        Self {
            position,
            runs,
            counts,
            part_counts: part_counts.into_iter().collect(),
            shard_counts,
            pieces,
        }
    }
}

impl PassParameter {
    /// `positions` has the position of every rank of the group, `rank` is this rank's number in it.
    pub fn new(
        index: usize,
        parameter: &ModelParameter,
        mean_dtype: DType,
        shards: ParameterShards,
        (positions, rank): (&[Position], usize),
    ) -> Self {
        let slices = parameter.slice.as_ref().map(|slice| &slice.slices);
        let division = ParameterDivision::new(shards, positions, positions[rank]);
        Self {
            index,
            path: parameter.path.clone(),
            shape: parameter.shape.clone(),
            dtype: parameter.dtype,
            mean_dtype,
            placement: parameter.placement,
            is_trained: !parameter.trainable.is_empty(),
            blocks: parameter.held.clone(),
            axes: slices.map_or(vec![], |slices| slices.axes().to_vec()),
            most_elements: parameter.slice.as_ref().map_or(division.counts.iter().sum(), |slice| {
                slice.counts().into_iter().max().unwrap_or_default()
            }),
            division,
            form: Form::default(),
        }
    }

    /// The remedy for gradients that no pass has reduced.
    pub fn remedy(&self) -> &'static str {
        match self.placement {
            Placement::Owned => {
                "take gradients by the optimizer's `backward`, or pass them to `Layout::collect`"
            }
            Placement::Reduced | Placement::Replicated => {
                "take gradients by the optimizer's `backward`, or pass them to `Layout::collect`; \
                 or leave `overlap_backward` and `DistMuonConfig::overlap` out, so that a step \
                 reduces them"
            }
        }
    }

    /// Elements of all parts, by the ranks that share the parameter.
    pub fn part_counts(&self) -> &Counts {
        &self.division.part_counts
    }

    /// Elements of the shards of this rank's part, by the ranks that have replicas of it.
    pub fn shard_counts(&self) -> &Counts {
        &self.division.shard_counts
    }

    /// The axes along which it is cut.
    pub fn axes(&self) -> &[String] {
        &self.axes
    }

    /// Elements of the shards of all ranks of the group.
    pub fn counts(&self) -> &Counts {
        &self.division.counts
    }

    /// Elements of this rank's part.
    pub fn part_count(&self) -> usize {
        self.division.part_counts.of(self.division.position.part)
    }

    /// Elements of this rank's shard.
    pub fn shard_count(&self) -> usize {
        self.division.shard_counts.of(self.division.position.shard)
    }

    /// The index of this rank's part, and of its shard in that part.
    pub fn part_index(&self) -> usize {
        self.division.position.part
    }

    pub fn shard_index(&self) -> usize {
        self.division.position.shard
    }

    /// Elements of all parts: of the largest slice, if the parameter is cut, since all ranks have
    /// to decide alike on the parameters that are sent ahead.
    pub fn most_elements(&self) -> usize {
        self.most_elements
    }

    /// Bytes of all parts, as [`most_elements`](Self::most_elements).
    pub fn bytes(&self) -> usize {
        self.most_elements * self.dtype.size()
    }

    /// NaN in place of the whole, flat.
    pub fn nan(&self, device: &Device) -> Tensor<1> {
        let elements: usize = self.shape.iter().product();
        Tensor::full([elements], f32::NAN, (device, self.dtype))
    }

    /// The whole, flat, from a buffer in which each part begins at one of `starts`. It does not
    /// keep what else the buffer has.
    pub fn whole(&self, buffer: &Tensor<1>, starts: &[usize]) -> Tensor<1> {
        let counts = &self.division.part_counts;
        self.assembled(buffer, |piece| {
            starts[piece.part] + piece.in_parts - counts.before(piece.part)
        })
    }

    /// The whole, flat, from the shards of all ranks one after the other.
    pub fn whole_of_shards(&self, shards: &Tensor<1>) -> Tensor<1> {
        self.assembled(shards, |piece| piece.in_shards)
    }

    fn assembled(&self, buffer: &Tensor<1>, first: impl Fn(&BlockPiece) -> usize) -> Tensor<1> {
        let blocks = 0..self.blocks.count();
        self.blocks.join(blocks.map(|block| self.block(block, buffer, &first)).collect())
    }

    /// A block from its pieces in a buffer, each at its first position.
    fn block(
        &self,
        block: usize,
        buffer: &Tensor<1>,
        first: impl Fn(&BlockPiece) -> usize,
    ) -> Tensor<1> {
        let mut pieces: Vec<_> = self.division.pieces.iter().filter(|p| p.block == block).collect();
        pieces.sort_by_key(|piece| piece.elements.start);
        let end = |piece: &BlockPiece| first(piece) + piece.elements.len();
        // Pieces that follow each other in the buffer as well are one range, so that a parameter in
        // rows is not copied if it has a buffer of its own.
        let runs = pieces.chunk_by(|a, b| end(a) == first(b));
        let ranges = runs.map(|run| first(run[0])..end(run[run.len() - 1]));
        if self.blocks.is_whole() {
            return flat::joined(buffer, ranges);
        }
        // Views: the blocks are copied when they are joined.
        let values = ranges.map(|range| flat::slice(buffer, range)).collect();
        flat::concat(values, buffer.dtype(), &buffer.device())
    }

    /// All parts one after the other, from the whole.
    pub fn parts(&self, whole: Tensor<1>) -> Tensor<1> {
        self.joined(whole, &self.division.pieces)
    }

    /// Pieces of the whole, one after the other.
    fn joined<'a>(
        &self,
        whole: Tensor<1>,
        pieces: impl IntoIterator<Item = &'a BlockPiece>,
    ) -> Tensor<1> {
        let (dtype, device) = (whole.dtype(), whole.device());
        let (blocks, pieces) = (self.blocks.cut(whole), pieces.into_iter().collect::<Vec<_>>());
        // Neighbours in the whole, such as rows, are one slice.
        let follows = |a: &&BlockPiece, b: &&BlockPiece| {
            a.padding == 0 && a.block == b.block && a.elements.end == b.elements.start
        };
        let mut values = vec![];
        for run in pieces.chunk_by(follows) {
            let (first, BlockPiece { elements, padding, .. }) = (run[0], run[run.len() - 1]);
            values.push(flat::slice(&blocks[first.block], first.elements.start..elements.end));
            values.extend((*padding > 0).then(|| flat::zeros(*padding, dtype, &device)));
        }
        flat::concat(values, dtype, &device)
    }

    /// This rank's part of the whole, in memory of its own. One element that nothing reads where a
    /// rank has none, since a parameter has at least one.
    pub fn part(&self, whole: Tensor<1>) -> Tensor<1> {
        let (dtype, device) = (whole.dtype(), whole.device());
        if self.part_count() == 0 {
            return Tensor::zeros([1], (&device, dtype));
        }
        let start = self.division.part_counts.before(self.division.position.part);
        let part = start..start + self.part_count();
        let is_whole = whole.dims() == [part.len()];
        let own = self.division.pieces.iter().filter(|piece| part.contains(&piece.in_parts));
        let own = self.joined(whole, own);
        // A slice is a view, which would keep the whole in memory.
        if is_whole { own } else { flat::copied(own) }
    }

    /// The elements of this rank's part without the one that stands in for none.
    pub fn sent(&self, part: &Tensor<1>) -> Tensor<1> {
        flat::slice(part, 0..self.part_count())
    }

    /// This rank's shard of its part.
    pub fn shard(&self, part: &Tensor<1>) -> Tensor<1> {
        let start = self.division.shard_counts.before(self.division.position.shard);
        flat::slice(part, start..start + self.shard_count())
    }

    /// The blocks of this rank's shard, or of its gradient.
    pub fn cut(&self, shard: &Tensor<1>) -> Vec<BlockPart> {
        let block = |Run { parameter: block, elements, range }: &Run| {
            let values = flat::slice(shard, range.clone());
            BlockPart { block: *block, start: elements.start, values }
        };
        self.division.runs.iter().map(block).collect()
    }

    /// This rank's shard from its blocks, the reverse of [`cut`](Self::cut).
    pub fn join(
        &self,
        mut values: impl FnMut(usize, Range<usize>) -> Tensor<1>,
        device: &Device,
    ) -> Tensor<1> {
        let runs = &self.division.runs;
        if runs.is_empty() {
            return flat::zeros(self.shard_count(), self.dtype, device);
        }
        let firsts: Vec<usize> = runs.iter().map(|run| run.range.start).collect();
        let values = runs.iter().map(|run| values(run.parameter, run.elements.clone())).collect();
        flat::place(values, &firsts, self.shard_count())
    }
}
