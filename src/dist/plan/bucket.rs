//! What travels together, and where in the flat buffer it lies.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::{Parameter, PlanSettings, Work};

/// Parameters that are updated element by element are dealt out in rows of so many elements. In
/// the flat buffer they are padded to whole rows, so that no row belongs to two parameters.
pub const GRAIN: usize = 256;

/// How the ranks divide a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BucketKind {
    /// By matrices: a rank's share is the matrices it owns.
    Matrices,
    /// By rows of [`GRAIN`] elements, equally many for every rank: zeros fill up the last rows.
    Elements,
    /// Not at all: every rank updates all of it, and gradients are all-reduced.
    Replicated,
}

/// A run of a parameter's flat elements in the flat buffer of a bucket, then zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// Index of the parameter in the plan.
    pub parameter: usize,
    /// First element of the run, in the parameter.
    pub start: usize,
    /// Elements of the run.
    pub len: usize,
    /// Zeros that follow it in the buffer.
    pub padding: usize,
}

/// What travels together, in a flat buffer that is the concatenation of the pieces.
///
/// A parameter is in one bucket, whole. All of a bucket have one type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// How the ranks divide it.
    pub kind: BucketKind,
    /// Type of all elements.
    pub dtype: DType,
    /// Indices of its parameters in the plan.
    pub parameters: Vec<usize>,
    /// Of a bucket of matrices, one piece for each, ordered by owner, then shape, then as in
    /// `parameters`. Else one piece for each parameter, in order.
    pub pieces: Vec<Piece>,
    /// Elements of each rank's share. The shares lie one after the other and are the whole, except
    /// where the bucket is replicated: there each share is the whole.
    pub counts: Vec<usize>,
}

impl Bucket {
    pub(super) fn new(
        Contents { kind, dtype, parameters: indices }: Contents,
        parameters: &[Parameter],
        owners: &[Vec<usize>],
        world_size: usize,
    ) -> Self {
        let (pieces, counts) = match kind {
            BucketKind::Matrices => matrix_pieces(&indices, parameters, owners, world_size),
            BucketKind::Elements | BucketKind::Replicated => {
                let mut pieces: Vec<_> =
                    indices.iter().map(|&index| element_piece(index, parameters)).collect();
                let total = pieces.iter().map(Piece::extent).sum();
                let counts = match kind {
                    BucketKind::Replicated => vec![total; world_size],
                    _ => equal_rows(total, world_size, &mut pieces),
                };
                (pieces, counts)
            }
        };
        Self { kind, dtype, parameters: indices, pieces, counts }
    }

    /// Elements of the flat buffer.
    pub fn elements(&self) -> usize {
        self.pieces.iter().map(Piece::extent).sum()
    }

    /// Where the elements of each parameter lie: for every piece in their order, its start in the
    /// parameter, its start in the buffer, and its length.
    pub fn by_parameter(&self) -> BTreeMap<usize, Vec<(usize, usize, usize)>> {
        let mut parameters: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        let mut at = 0;
        for piece in &self.pieces {
            parameters.entry(piece.parameter).or_default().push((piece.start, at, piece.len));
            at += piece.extent();
        }
        parameters.values_mut().for_each(|pieces| pieces.sort_unstable());
        parameters
    }

    /// Where in the flat buffer the share of a rank lies.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn share(&self, rank: usize) -> Range<usize> {
        let start = match self.kind {
            BucketKind::Replicated => 0,
            BucketKind::Matrices | BucketKind::Elements => self.counts[..rank].iter().sum(),
        };
        start..start + self.counts[rank]
    }

    /// What lies in a range of the flat buffer, in order: a parameter, the range of its elements,
    /// and how many of the zeros that follow them are inside.
    pub fn overlaps(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
        let clip = move |position: usize| position.clamp(range.start, range.end);
        let mut end = 0;
        self.pieces.iter().filter_map(move |piece| {
            let at = end;
            end += piece.extent();
            let (from, to, last) = (clip(at), clip(at + piece.len), clip(end));
            let element = |position: usize| piece.start + (position - at).min(piece.len);
            (from < last).then(|| (piece.parameter, element(from)..element(to), last - to))
        })
    }
}

impl Piece {
    /// Elements in the flat buffer.
    fn extent(&self) -> usize {
        self.len + self.padding
    }
}

/// A bucket before anything has an owner.
pub(super) struct Contents {
    pub kind: BucketKind,
    pub dtype: DType,
    pub parameters: Vec<usize>,
}

/// Distributes the parameters to buckets. This depends on nothing but the arguments, so that plans
/// with different owners have the same buckets.
///
/// Matrices are sorted by the leading term of what orthogonalising them costs, `m m n` with `m` the
/// shorter side, the largest first, so that the longest work starts soonest and that a bucket has
/// few shapes; everything else stays in the order of the model.
pub(super) fn layout(parameters: &[Parameter], settings: &PlanSettings) -> Vec<Contents> {
    let kind = |parameter: &Parameter| match parameter.work {
        Work::Matrices { .. } => BucketKind::Matrices,
        Work::Elements if parameter.elements() < settings.small_elements => BucketKind::Replicated,
        Work::Elements => BucketKind::Elements,
    };
    let mut buckets = vec![];
    for wanted in [BucketKind::Matrices, BucketKind::Elements, BucketKind::Replicated] {
        let mut chosen: Vec<usize> =
            (0..parameters.len()).filter(|&index| kind(&parameters[index]) == wanted).collect();
        chosen.sort_by_key(|&index| size_class(&parameters[index]));
        for (dtype, indices) in by_dtype(&chosen, parameters) {
            cut(&indices, parameters, settings.bucket_bytes)
                .into_iter()
                .for_each(|parameters| buckets.push(Contents { kind: wanted, dtype, parameters }));
        }
    }
    buckets
}

/// Sorts matrices by their size, then by their shape; the rest has no order of its own.
fn size_class(parameter: &Parameter) -> Option<(Reverse<u128>, [usize; 2])> {
    let Work::Matrices { rows, columns, .. } = parameter.work else { return None };
    let (m, n) = (rows.min(columns) as u128, rows.max(columns) as u128);
    Some((Reverse(m * m * n), [rows, columns]))
}

/// The indices apart by type, types in the order of their first parameters.
fn by_dtype(indices: &[usize], parameters: &[Parameter]) -> Vec<(DType, Vec<usize>)> {
    let mut groups: Vec<(DType, Vec<usize>)> = vec![];
    for &index in indices {
        let dtype = parameters[index].dtype;
        match groups.iter_mut().find(|(of, _)| *of == dtype) {
            Some((_, group)) => group.push(index),
            None => groups.push((dtype, vec![index])),
        }
    }
    groups
}

/// Cuts the sequence wherever a bucket would get larger than allowed.
fn cut(indices: &[usize], parameters: &[Parameter], bucket_bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = vec![];
    let mut filled = 0;
    for &index in indices {
        let bytes = buffer_elements(&parameters[index]) * parameters[index].dtype.size();
        match buckets.last_mut() {
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

/// Elements that a parameter takes in the flat buffer.
fn buffer_elements(parameter: &Parameter) -> usize {
    match parameter.work {
        Work::Matrices { .. } => parameter.elements(),
        Work::Elements => parameter.elements().next_multiple_of(GRAIN),
    }
}

fn element_piece(parameter: usize, parameters: &[Parameter]) -> Piece {
    let len = parameters[parameter].elements();
    Piece { parameter, start: 0, len, padding: len.next_multiple_of(GRAIN) - len }
}

/// Deals out equally many rows, for which the last piece gets more zeros: engines have one call of their
/// library for equal shares, and one for every rank for others.
fn equal_rows(elements: usize, world_size: usize, pieces: &mut [Piece]) -> Vec<usize> {
    let padded = elements.next_multiple_of(world_size * GRAIN);
    if let Some(last) = pieces.last_mut() {
        last.padding += padded - elements;
    }
    vec![padded / world_size; world_size]
}

/// The matrices in the order of their owners, and how many elements each owner has.
fn matrix_pieces(
    indices: &[usize],
    parameters: &[Parameter],
    owners: &[Vec<usize>],
    world_size: usize,
) -> (Vec<Piece>, Vec<usize>) {
    let mut counts = vec![0; world_size];
    let mut pieces = vec![];
    for &parameter in indices {
        let Work::Matrices { rows, columns, .. } = parameters[parameter].work else { continue };
        let len = rows * columns;
        for (index, &owner) in owners[parameter].iter().enumerate() {
            counts[owner] += len;
            let piece = Piece { parameter, start: index * len, len, padding: 0 };
            pieces.push((owner, piece));
        }
    }
    // `indices` is sorted by shape, and this sort keeps that order within a rank.
    pieces.sort_by_key(|&(owner, _)| owner);
    (pieces.into_iter().map(|(_, piece)| piece).collect(), counts)
}
