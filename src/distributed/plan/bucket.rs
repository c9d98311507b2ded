//! Buckets: parameters that are communicated together, and their positions in a flat buffer.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::repeat_n;
use std::ops::Range;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::element_counts::Counts;
use super::{MatrixOrder, Parameter, Placement, PlanConfig, Work};

/// Elements of a row, the unit in which parameters that are updated element by element are divided
/// between ranks. In the flat buffer they are padded to whole rows, so that no row belongs to two
/// parameters.
pub const ROW_ELEMENTS: usize = 256;

/// The way in which ranks divide a bucket.
// Exhaustive: code that lays out or reads a buffer has to handle every kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BucketKind {
    /// By matrices: a rank's shard consists of the matrices that it owns.
    Matrices,
    /// By parameters: a rank's shard consists of the whole parameters that it owns.
    Whole,
    /// By rows of [`ROW_ELEMENTS`] elements: every rank has the same number of rows. Zeros fill the
    /// last rows of the buffer.
    Elements,
    /// Not at all: every rank updates the whole bucket, and gradients are all-reduced.
    Replicated,
}

/// Neighbouring flat elements of a parameter in the flat buffer of a bucket, followed by zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// Index of the parameter in the plan.
    pub parameter: usize,
    /// First element of the piece, in the parameter.
    pub start: usize,
    /// Elements of the run.
    pub len: usize,
    /// Zeros that follow the run in the buffer.
    pub padding: usize,
}

/// Parameters that are communicated together, in a flat buffer that is the concatenation of the
/// pieces.
///
/// Every parameter is in exactly one bucket. All parameters of a bucket have the same type and the
/// same settings.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// The way in which ranks divide the bucket.
    pub kind: BucketKind,
    /// Type of all elements.
    pub dtype: DType,
    /// The place of its parameters between steps.
    pub placement: Placement,
    /// Indices of the bucket's parameters in the plan.
    pub parameters: Vec<usize>,
    /// The pieces in the order of the buffer. A bucket of matrices has one piece for each matrix,
    /// ordered by owner, then shape, then as in `parameters`. A bucket of whole parameters has one
    /// piece for each of them, ordered by owner, then as in `parameters`. Other buckets have one
    /// piece for each parameter, in the order of `parameters`.
    pub pieces: Vec<Piece>,
    /// Elements of each rank's shard. The shards are adjacent and together cover the buffer, except
    /// in a replicated bucket, where each shard is the whole buffer.
    pub counts: Counts,
}

impl Bucket {
    pub(super) fn new(
        BucketContents { kind, dtype, placement, parameters: indices }: BucketContents,
        parameters: &[Parameter],
        owners: &[Vec<usize>],
        world_size: usize,
    ) -> Self {
        let (pieces, counts) = match kind {
            BucketKind::Matrices | BucketKind::Whole => {
                owned_pieces(&indices, parameters, owners, world_size)
            }
            BucketKind::Elements => {
                let mut pieces = element_pieces(&indices, parameters);
                let counts = equal_rows(world_size, &mut pieces);
                (pieces, counts)
            }
            BucketKind::Replicated => {
                let pieces = element_pieces(&indices, parameters);
                let total = pieces.iter().map(Piece::extent).sum();
                (pieces, repeat_n(total, world_size).collect())
            }
        };
        Self { kind, dtype, placement, parameters: indices, pieces, counts }
    }

    /// The bucket of a single parameter that the backward pass reduces, from its blocks and the
    /// owners of their matrices.
    pub(crate) fn of_one(blocks: &[Parameter], owners: &[Vec<usize>], world_size: usize) -> Self {
        let kind = match blocks[0].work {
            Work::Matrices { .. } => BucketKind::Matrices,
            Work::Whole => BucketKind::Whole,
            Work::Elements => BucketKind::Elements,
        };
        let (dtype, parameters) = (blocks[0].dtype, (0..blocks.len()).collect());
        let placement = blocks[0].placement;
        let contents = BucketContents { kind, dtype, placement, parameters };
        Self::new(contents, blocks, owners, world_size)
    }

    /// The bucket as a rank has it whose parameters are slices: for every row of a grid, the slices
    /// of the shards of its ranks, one after the other. Its counts are the rows'. `positions` has
    /// the row and the column of every rank. The last rank is in the last row.
    ///
    /// A bucket without cuts is the same everywhere.
    pub(crate) fn of_slice(
        &self,
        parameters: &[Parameter],
        positions: &[[usize; 2]],
        slice: usize,
    ) -> Self {
        if self.parameters.iter().all(|index| parameters[*index].slices.is_none()) {
            return self.clone();
        }
        // Row by row of the grid: a replica's part of the slice is what its owners hold of it. Most
        // ranks own nothing of a bucket, and this is done for the slice of every rank.
        let [last_row, _] = positions[positions.len() - 1];
        let mut owners = vec![vec![]; last_row + 1];
        for rank in self.counts.holders() {
            let [row, column] = positions[rank];
            owners[row].push((column, rank));
        }
        let (mut pieces, mut counts): (_, Vec<usize>) = (vec![], vec![]);
        for mut row in owners {
            row.sort_unstable();
            let first = pieces.len();
            let runs = row.into_iter().flat_map(|(_, rank)| self.runs(rank));
            pieces.extend(runs.filter_map(|Run { parameter, elements, .. }| {
                let slices = parameters[parameter].slices.as_ref();
                // Elements of a slice in the order of the whole: a run stays a run.
                let held = slices.expect("all of a bucket are cut").range(slice, &elements);
                let (start, len) = (held.start, held.len());
                (len > 0).then_some(Piece { parameter, start, len, padding: 0 })
            }));
            counts.push(pieces[first..].iter().map(Piece::extent).sum());
        }
        let counts = counts.into_iter().collect();
        Self { pieces, counts, parameters: self.parameters.clone(), ..*self }
    }

    /// The bucket in which every rank has the shard of the rank before it, and rank 0 the last
    /// one.
    ///
    /// # Panics
    ///
    /// If the bucket is replicated.
    pub(crate) fn of_previous_ranks(&self) -> Self {
        assert!(self.kind != BucketKind::Replicated, "every rank has all of a replicated bucket");
        let mut counts = self.counts.to_vec();
        let (mut pieces, last) = (self.pieces.clone(), counts[counts.len() - 1]);
        let (mut moved, mut elements) = (0, 0);
        // No piece of matrices is in two shards.
        while elements < last {
            moved += 1;
            elements += pieces[pieces.len() - moved].extent();
        }
        pieces.rotate_right(moved);
        counts.rotate_right(1);
        let counts = counts.into_iter().collect();
        Self { pieces, counts, parameters: self.parameters.clone(), ..*self }
    }

    /// Returns the index of the settings of the bucket's parameters.
    pub fn settings(&self, parameters: &[Parameter]) -> usize {
        self.parameters.first().map_or(0, |index| parameters[*index].settings)
    }

    /// Returns the number of elements of the flat buffer, including padding.
    pub fn elements(&self) -> usize {
        self.pieces.iter().map(Piece::extent).sum()
    }

    /// Returns the number of bytes of the flat buffer, including padding.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Returns the segments of each parameter, by the parameter's index, ordered by their first
    /// elements.
    pub fn by_parameter(&self) -> BTreeMap<usize, Vec<InBuffer>> {
        let mut position = 0;
        by_parameter(self.pieces.iter().map(|piece| {
            let segment = InBuffer { first: piece.start, start: position, len: piece.len };
            // With the padding, which is in the buffer and in no parameter.
            position += piece.extent();
            (piece.parameter, segment)
        }))
    }

    /// Returns the segments of each parameter in a rank's shard, by the parameter's index, ordered
    /// by their first elements. Their positions are those in the shard.
    ///
    /// # Panics
    ///
    /// If `rank` is not a rank of the plan.
    pub fn of_rank(&self, rank: usize) -> BTreeMap<usize, Vec<InBuffer>> {
        by_parameter(self.runs(rank).into_iter().map(|Run { parameter, elements, range }| {
            let (first, start) = (elements.start, range.start);
            (parameter, InBuffer { first, start, len: elements.len() })
        }))
    }

    /// Returns the elements of each rank's shard, without padding.
    ///
    /// # Panics
    ///
    /// If the bucket is replicated.
    pub fn held(&self) -> Vec<usize> {
        assert!(self.kind != BucketKind::Replicated, "every rank has all of a replicated bucket");
        let elements = |rank| {
            let overlaps = self.overlaps(self.shard_range(rank));
            overlaps.map(|overlap| overlap.elements.len()).sum()
        };
        (0..self.counts.ranks()).map(elements).collect()
    }

    /// Returns the range of a rank's shard in the flat buffer.
    ///
    /// # Panics
    ///
    /// If `rank` is not a rank of the plan.
    pub fn shard_range(&self, rank: usize) -> Range<usize> {
        // Every rank has all of a replicated bucket.
        let start = match self.kind {
            BucketKind::Replicated => 0,
            BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                self.counts.before(rank)
            }
        };
        start..start + self.counts.of(rank)
    }

    /// Returns the contents of a rank's shard: neighbouring elements of one parameter are one run.
    ///
    /// # Panics
    ///
    /// If `rank` is not a rank of the plan.
    pub fn runs(&self, rank: usize) -> Vec<Run> {
        let (mut runs, mut end): (Vec<Run>, usize) = (vec![], 0);
        for Overlap { parameter, elements, padding } in self.overlaps(self.shard_range(rank)) {
            let range = end..end + elements.len();
            end = range.end + padding;
            match runs.last_mut() {
                Some(last)
                    if last.parameter == parameter
                        && last.elements.end == elements.start
                        && last.range.end == range.start =>
                {
                    (last.elements.end, last.range.end) = (elements.end, range.end);
                }
                // Padding alone, as at the end of a bucket of elements.
                _ if range.is_empty() => {}
                _ => runs.push(Run { parameter, elements, range }),
            }
        }
        runs
    }

    /// Returns the contents of a range of the flat buffer, in order.
    pub fn overlaps(&self, range: Range<usize>) -> impl Iterator<Item = Overlap> {
        let clip = move |position: usize| position.clamp(range.start, range.end);
        let mut next_start = 0;
        self.pieces.iter().filter_map(move |piece| {
            let start = next_start;
            let end = start + piece.extent();
            next_start = end;
            let (from, to, last) = (clip(start), clip(start + piece.len), clip(end));
            // Positions in the padding are clipped to the end of the elements.
            let element = |position: usize| piece.start + (position - start).min(piece.len);
            (from < last).then(|| Overlap {
                parameter: piece.parameter,
                elements: element(from)..element(to),
                padding: last - to,
            })
        })
    }
}

/// Groups segments by the indices of their parameters, ordered by their first elements.
fn by_parameter(
    segments: impl Iterator<Item = (usize, InBuffer)>,
) -> BTreeMap<usize, Vec<InBuffer>> {
    let mut parameters: BTreeMap<usize, Vec<_>> = BTreeMap::new();
    segments.for_each(|(parameter, segment)| {
        parameters.entry(parameter).or_default().push(segment);
    });
    // Owners may have taken the matrices of a parameter in any order.
    parameters.values_mut().for_each(|segments| segments.sort_unstable());
    parameters
}

/// The contents of a piece that are in a range of the flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    /// Index of the parameter in the plan.
    pub parameter: usize,
    /// The range of the parameter's elements.
    pub elements: Range<usize>,
    /// Zeros after these elements that are inside the range.
    pub padding: usize,
}

/// Neighbouring elements of a parameter in the flat buffer of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InBuffer {
    /// First of the elements, in the parameter.
    pub first: usize,
    /// Position of the first one in the buffer.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
}

/// Neighbouring elements of a parameter in one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Index of the parameter in the plan.
    pub parameter: usize,
    /// The elements' range in the parameter.
    pub elements: Range<usize>,
    /// The elements' range in the shard. Zeros may follow.
    pub range: Range<usize>,
}

impl Piece {
    /// Elements in the flat buffer, including padding.
    fn extent(&self) -> usize {
        self.len + self.padding
    }
}

/// The parameters of a bucket, before matrices have owners.
pub(super) struct BucketContents {
    pub kind: BucketKind,
    pub dtype: DType,
    pub placement: Placement,
    pub parameters: Vec<usize>,
}

/// Distributes the parameters to buckets. The result depends on the arguments only, so plans with
/// different owners have the same buckets.
///
/// [`MatrixOrder::Size`] sorts matrices by the leading term of the cost of orthogonalising them,
/// `m m n` with `m` the shorter side. All other parameters stay in the order of the model.
pub(super) fn layout(parameters: &[Parameter], config: &PlanConfig) -> Vec<BucketContents> {
    let kind_of = |parameter: &Parameter| match parameter.work {
        Work::Matrices { .. } => BucketKind::Matrices,
        Work::Whole => BucketKind::Whole,
        Work::Elements
            if !parameter.placement.reduces_in_backward()
                && parameter.slices.is_none()
                && parameter.elements() < config.small_elements =>
        {
            BucketKind::Replicated
        }
        Work::Elements => BucketKind::Elements,
    };
    let mut buckets = vec![];
    // Matrices first, since their updates take longest and hide the messages of what follows; small
    // parameters last, with the decision of all ranks.
    let kinds =
        [BucketKind::Matrices, BucketKind::Whole, BucketKind::Elements, BucketKind::Replicated];
    for kind in kinds {
        let mut chosen: Vec<usize> =
            (0..parameters.len()).filter(|&index| kind_of(&parameters[index]) == kind).collect();
        // These sorts are stable, which keeps the order of the model where keys are equal.
        let by_size = |indices: &mut [usize]| {
            indices.sort_by_key(|index| matrix_order(&parameters[*index]));
        };
        if config.order == MatrixOrder::Size {
            by_size(&mut chosen);
        }
        for ((dtype, placement, ..), indices) in groups(&chosen, parameters) {
            // The rows of such a parameter do not depend on others, so that a layout alone
            // determines them.
            let bytes = match kind {
                // No room for a second one: each is a bucket of its own.
                BucketKind::Elements if placement.reduces_in_backward() => 0,
                _ => config.bucket_bytes,
            };
            buckets.extend(cut(&indices, parameters, bytes).into_iter().map(|mut parameters| {
                // In any order of the buckets, matrices of one shape are a batch.
                by_size(&mut parameters);
                BucketContents { kind, dtype, placement, parameters }
            }));
        }
    }
    buckets
}

/// The sort key of matrices, by size and then by shape. It is the same for all other parameters.
fn matrix_order(parameter: &Parameter) -> Option<(Reverse<u128>, [usize; 2])> {
    let Work::Matrices { rows, columns, .. } = parameter.work else { return None };
    // The product of three sides may exceed 64 bits.
    let (m, n) = (rows.min(columns) as u128, rows.max(columns) as u128);
    Some((Reverse(m * m * n), [rows, columns]))
}

/// The type, placement, axes of cuts and settings of parameters that may share a bucket.
type Group<'a> = (DType, Placement, &'a [String], usize);

/// Separates the indices by group, in the order of the first parameter of each group.
fn groups<'a>(indices: &[usize], parameters: &'a [Parameter]) -> Vec<(Group<'a>, Vec<usize>)> {
    let mut groups: Vec<(Group, Vec<usize>)> = vec![];
    for &index in indices {
        let parameter = &parameters[index];
        let key = (parameter.dtype, parameter.placement, parameter.cut_axes(), parameter.settings);
        match groups.iter_mut().find(|(group, _)| *group == key) {
            Some((_, group)) => group.push(index),
            None => groups.push((key, vec![index])),
        }
    }
    groups
}

/// Cuts the sequence wherever a bucket would exceed the allowed size.
fn cut(indices: &[usize], parameters: &[Parameter], bucket_bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = vec![];
    let mut filled = 0;
    for &index in indices {
        let bytes = buffer_elements(&parameters[index]) * parameters[index].dtype.size();
        match buckets.last_mut() {
            // A parameter larger than a bucket has one alone: parameters are never cut here.
            Some(bucket) if filled + bytes <= bucket_bytes => bucket.push(index),
            _ => {
                filled = 0;
                buckets.push(vec![index]);
            }
        }
        filled += bytes;
    }
    buckets
}

/// Elements that a parameter takes in the flat buffer, including padding to whole rows.
fn buffer_elements(parameter: &Parameter) -> usize {
    match parameter.work {
        Work::Matrices { .. } | Work::Whole => parameter.elements(),
        Work::Elements => parameter.elements().next_multiple_of(ROW_ELEMENTS),
    }
}

fn element_pieces(indices: &[usize], parameters: &[Parameter]) -> Vec<Piece> {
    let piece = |&parameter: &usize| {
        let len = parameters[parameter].elements();
        Piece { parameter, start: 0, len, padding: len.next_multiple_of(ROW_ELEMENTS) - len }
    };
    indices.iter().map(piece).collect()
}

/// Divides the buffer into the same number of rows for every rank, for which the last piece gets
/// more zeros. Engines have a single library call for shards of equal size, and need one call per
/// rank for others.
fn equal_rows(world_size: usize, pieces: &mut [Piece]) -> Counts {
    let elements: usize = pieces.iter().map(Piece::extent).sum();
    let padded = elements.next_multiple_of(world_size * ROW_ELEMENTS);
    if let Some(last) = pieces.last_mut() {
        // All shards have the same number of rows, so the last parameter is followed by zeros.
        last.padding += padded - elements;
    }
    repeat_n(padded / world_size, world_size).collect()
}

/// The matrices or whole parameters in the order of their owners, and the number of elements of
/// each owner.
fn owned_pieces(
    indices: &[usize],
    parameters: &[Parameter],
    owners: &[Vec<usize>],
    world_size: usize,
) -> (Vec<Piece>, Counts) {
    // Counts of zero are allowed: a rank may own nothing of a bucket.
    let mut counts = vec![0; world_size];
    let mut pieces = vec![];
    for &parameter in indices {
        let (_, len) = parameters[parameter].owned();
        for (index, &owner) in owners[parameter].iter().enumerate() {
            counts[owner] += len;
            let piece = Piece { parameter, start: index * len, len, padding: 0 };
            pieces.push((owner, piece));
        }
    }
    // Matrices are sorted by shape in `indices`, and this stable sort keeps that order within a
    // rank.
    pieces.sort_by_key(|&(owner, _)| owner);
    (pieces.into_iter().map(|(_, piece)| piece).collect(), counts.into_iter().collect())
}
