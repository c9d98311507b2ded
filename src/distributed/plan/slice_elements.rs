//! Parameters that are cut along dimensions: the elements of the whole that every rank has.

use std::ops::Range;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::flat;

/// A division of a parameter along one dimension among the ranks of an axis.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cut {
    /// The name of the axis.
    pub axis: String,
    /// The number of ranks of the axis. They divide every part as
    /// [`World::part`](crate::comm::World::part) divides items.
    pub ranks: usize,
    /// The dimension.
    pub dimension: usize,
    /// The number of equal parts of the dimension that are divided each, as of a fused weight.
    pub parts: usize,
}

/// The elements along every dimension that a slice has, as ranges of the whole in ascending order.
type Ranges = Vec<Vec<Range<usize>>>;

/// The slices of a parameter, which have every element of the whole once.
///
/// The elements of a slice, in its own order, are in the order of the whole: the elements in a
/// range of the whole are neighbours in every slice. The owner of a range therefore exchanges a
/// single piece with each rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slices {
    axes: Vec<String>,
    shape: Vec<usize>,
    slices: Vec<Ranges>,
    /// The number of slices that are gathered for a use: 1 unless they are [rows](Self::in_rows).
    gathered: usize,
}

impl Slices {
    /// Returns the slices of a parameter with a shape. Of several cuts, the first is the outermost:
    /// the coordinate on the axis of the last one varies the fastest from slice to slice.
    ///
    /// # Panics
    ///
    /// If the shape does not have a dimension, if parts do not divide it, or if a cut after the
    /// first one of a dimension has several parts.
    pub fn new(shape: &[usize], cuts: &[Cut]) -> Self {
        let whole = shape.iter().map(|extent| single(0..*extent)).collect();
        let mut slices: Vec<Ranges> = vec![whole];
        for (index, cut) in cuts.iter().enumerate() {
            let Cut { dimension, parts, ranks, .. } = *cut;
            assert!(shape[dimension].is_multiple_of(parts), "parts divide the dimension");
            let is_first = cuts[..index].iter().all(|cut| cut.dimension != dimension);
            // A later cut divides what the first has left, whose parts are no longer alike.
            assert!(is_first || parts == 1, "the first cut of a dimension has its parts");
            // Every slice so far is cut again. The coordinate of this cut varies faster than those
            // before.
            let cut_again = |ranges: Ranges| {
                (0..ranks).map(move |coordinate| {
                    let mut ranges = ranges.clone();
                    ranges[dimension] = cut.of(&ranges[dimension], coordinate);
                    ranges
                })
            };
            slices = slices.into_iter().flat_map(cut_again).collect();
        }
        let axes = cuts.iter().map(|cut| cut.axis.clone()).collect();
        Self { axes, shape: shape.to_vec(), slices, gathered: 1 }
    }

    /// Returns every slice in equal rows along a further axis, which are gathered for a use of the
    /// slice: rows of the matrices of a stack one after the other, or elements of a vector. The
    /// rows of neighbouring ranks follow each other in the slice, and may differ by one row.
    ///
    /// The whole then has two dimensions, all of its rows and their elements.
    pub fn in_rows(&self, axis: &str, ranks: usize) -> Self {
        let (leading, row) = match self.shape.len() {
            0 | 1 => (self.shape.len(), 1),
            dimensions => (dimensions - 1, self.shape[dimensions - 1]),
        };
        let of_slice = |ranges: &Ranges| {
            let all = merged(&ranges[..leading], &self.shape[..leading]);
            let of_row = ranges.get(leading).cloned().unwrap_or_else(|| single(0..1));
            (0..ranks).map(move |rank| {
                vec![select(&all, flat::share(extent(&all), rank, ranks)), of_row.clone()]
            })
        };
        let slices = self.slices.iter().flat_map(of_slice).collect();
        let axes = [&self.axes[..], &[axis.to_owned()]].concat();
        let shape = vec![self.shape[..leading].iter().product(), row];
        Self { axes, shape, slices, gathered: ranks }
    }

    /// Returns the slices of the elements in a range of a dimension, as a parameter of its own.
    pub fn of_range(&self, dimension: usize, range: Range<usize>) -> Self {
        let mut shape = self.shape.clone();
        shape[dimension] = range.len();
        // A slice may have nothing of the range: its shape has a 0 there.
        let of_range = |ranges: &Ranges| {
            let mut ranges = ranges.clone();
            ranges[dimension] = common(&ranges[dimension], &range);
            ranges
        };
        let slices = self.slices.iter().map(of_range).collect();
        Self { axes: self.axes.clone(), shape, slices, ..*self }
    }

    /// Returns the same slices of a parameter with a first dimension of one element.
    pub fn unsqueezed(&self) -> Self {
        let slices = self.slices.iter().map(|ranges| [&[single(0..1)], &ranges[..]].concat());
        let (axes, slices) = (self.axes.clone(), slices.collect());
        Self { axes, shape: [&[1], &self.shape[..]].concat(), slices, ..*self }
    }

    /// Returns the names of the axes along which the parameter is cut, the outermost first.
    pub fn axes(&self) -> &[String] {
        &self.axes
    }

    /// Returns the number of slices.
    pub fn count(&self) -> usize {
        self.slices.len()
    }

    /// Returns the number of slices with which ranks compute: those that are left after rows were
    /// gathered.
    pub fn used(&self) -> usize {
        self.slices.len() / self.gathered
    }

    /// Returns the number of elements that come before a slice in what is gathered for a use.
    pub fn before_in_use(&self, slice: usize) -> usize {
        (slice - slice % self.gathered..slice)
            .map(|slice| self.shape(slice).iter().product::<usize>())
            .sum()
    }

    /// Returns the ranges of the whole that a slice has along a dimension, in ascending order.
    pub fn ranges(&self, slice: usize, dimension: usize) -> &[Range<usize>] {
        &self.slices[slice][dimension]
    }

    /// Returns the shape of the whole.
    pub fn whole(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the shape of a slice.
    pub fn shape(&self, slice: usize) -> Vec<usize> {
        self.slices[slice].iter().map(|ranges| extent(ranges)).collect()
    }

    /// Returns the number of elements of a slice that come before a position in the whole.
    pub fn before(&self, slice: usize, position: usize) -> usize {
        // From the outermost dimension inwards: count the slice's elements in the rows before the
        // position, then go on within the row of the position.
        let mut inner: usize = self.shape.iter().product();
        let mut held: usize = self.shape(slice).iter().product();
        if position >= inner {
            return held;
        }
        let (mut rest, mut before) = (position, 0);
        for (dimension, ranges) in self.slices[slice].iter().enumerate() {
            inner /= self.shape[dimension];
            // A slice may be empty along a dimension, if there are more ranks than elements.
            held = held.checked_div(extent(ranges)).unwrap_or(0);
            let coordinate = rest / inner;
            rest %= inner;
            before += extent(&common(ranges, &(0..coordinate))) * held;
            // The slice has nothing of this row, so nothing before a position within it.
            if !ranges.iter().any(|range| range.contains(&coordinate)) {
                break;
            }
        }
        before
    }

    /// Returns the range that a slice has of a range of the whole.
    pub fn range(&self, slice: usize, range: &Range<usize>) -> Range<usize> {
        self.before(slice, range.start)..self.before(slice, range.end)
    }

    /// Returns the values that a slice has of the values in a range of the whole, both flat.
    pub fn cut(&self, values: &Tensor<1>, range: &Range<usize>, slice: usize) -> Tensor<1> {
        // The range in boxes: only a box can be sliced along its dimensions.
        let mut first = 0;
        let boxes = boxes(range.clone(), &self.shape).into_iter().map(|within| {
            let elements = within.iter().map(Range::len).product::<usize>();
            let values = flat::slice(values, first..first + elements);
            first += elements;
            cut_box(values, &within, &self.slices[slice])
        });
        flat::concat(boxes.collect(), values.dtype(), &values.device())
    }

    /// Returns the values in a range of the whole from those that all slices have of it, flat: the
    /// reverse of [`cut`](Self::cut).
    pub fn join(&self, pieces: &[Tensor<1>], range: &Range<usize>) -> Tensor<1> {
        // Each rank has sent its elements in the order of the whole, so one position for each is
        // enough.
        let mut firsts = vec![0; pieces.len()];
        let boxes = boxes(range.clone(), &self.shape).into_iter().map(|within| {
            let slices = self.slices.iter().zip(pieces).zip(&mut firsts);
            let pieces = slices.map(|((ranges, values), first)| {
                let ranges: Ranges =
                    ranges.iter().zip(&within).map(|(held, box_)| common(held, box_)).collect();
                let elements = ranges.iter().map(|ranges| extent(ranges)).product::<usize>();
                let values = flat::slice(values, *first..*first + elements);
                *first += elements;
                (ranges, values)
            });
            // Empty pieces have no place in the box.
            join_box(pieces.filter(|(_, values)| values.dims() != [0]).collect(), &within)
        });
        flat::concat(boxes.collect(), pieces[0].dtype(), &pieces[0].device())
    }
}

/// A rank's slice of a parameter.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    pub slices: Slices,
    pub index: usize,
}

impl Slice {
    /// The shape of the slice.
    pub fn shape(&self) -> Vec<usize> {
        self.slices.shape(self.index)
    }

    /// This slice of a whole, both flat, in memory of its own.
    pub fn of(&self, whole: &Tensor<1>) -> Tensor<1> {
        let slice = self.slices.cut(whole, &(0..whole.dims()[0]), self.index);
        // A view would keep the memory of the whole alive.
        if slice.dims() == whole.dims() { slice } else { flat::copied(slice) }
    }

    /// The numbers of elements of all slices.
    pub fn counts(&self) -> Vec<usize> {
        (0..self.slices.count()).map(|slice| self.slices.shape(slice).iter().product()).collect()
    }

    /// The whole from all slices one after the other, flat.
    pub fn whole(&self, all: &Tensor<1>) -> Tensor<1> {
        let mut first = 0;
        let pieces = self.counts().into_iter().map(|count| {
            first += count;
            flat::slice(all, first - count..first)
        });
        let elements = self.slices.whole().iter().product();
        self.slices.join(&pieces.collect::<Vec<_>>(), &(0..elements))
    }
}

impl Cut {
    /// The ranges of the rank at a coordinate, of ranges that the cuts before have left.
    fn of(&self, ranges: &[Range<usize>], coordinate: usize) -> Vec<Range<usize>> {
        // A fused weight, such as queries, keys and values, is divided part by part: every rank
        // gets its share of each.
        // Exact: the number of parts divides the dimension.
        let part = extent(ranges) / self.parts;
        let own = (0..self.parts).map(|index| {
            let own = flat::share(part, coordinate, self.ranks);
            index * part + own.start..index * part + own.end
        });
        own.flat_map(|own| select(ranges, own)).collect()
    }
}

fn single(range: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(range).collect()
}

fn extent(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// The elements of a box along all of its dimensions, as ranges of the whole in ascending order.
fn merged(ranges: &[Vec<Range<usize>>], shape: &[usize]) -> Vec<Range<usize>> {
    let mut outer = single(0..1);
    for (ranges, extent) in ranges.iter().zip(shape) {
        let mut all: Vec<Range<usize>> = vec![];
        for first in outer.into_iter().flatten().map(|index| index * extent) {
            for range in ranges {
                let range = first + range.start..first + range.end;
                match all.last_mut().filter(|last| last.end == range.start) {
                    // Whole rows follow each other, so that a stack is one range.
                    Some(last) => last.end = range.end,
                    None => all.push(range),
                }
            }
        }
        outer = all;
    }
    outer
}

/// The elements at some positions in ranges that follow each other.
fn select(ranges: &[Range<usize>], positions: Range<usize>) -> Vec<Range<usize>> {
    let mut first = 0;
    let mut selected = vec![];
    for range in ranges {
        let here = first..first + range.len();
        let [start, end] = [positions.start.max(here.start), positions.end.min(here.end)];
        if start < end {
            selected.push(range.start + start - first..range.start + end - first);
        }
        first = here.end;
    }
    selected
}

/// The elements of some ranges that lie within another one, counted from its start.
fn common(ranges: &[Range<usize>], within: &Range<usize>) -> Vec<Range<usize>> {
    let common = ranges.iter().filter_map(|range| {
        let [start, end] = [range.start.max(within.start), range.end.min(within.end)];
        (start < end).then(|| start - within.start..end - within.start)
    });
    common.collect()
}

/// The elements in a flat range of a tensor as boxes, in their order: the rest of a first row,
/// whole rows, and the start of a last one.
fn boxes(range: Range<usize>, shape: &[usize]) -> Vec<Vec<Range<usize>>> {
    let [_, rest @ ..] = shape else { return vec![] };
    if range.is_empty() {
        return vec![];
    }
    let inner: usize = rest.iter().product();
    let (first, last) = (range.start / inner, range.end / inner);
    let row = |index: usize, range: Range<usize>| {
        let of_row = boxes(range, rest).into_iter();
        of_row
            .map(move |within| [&single(index..index + 1)[..], &within].concat())
            .collect::<Vec<_>>()
    };
    // The range lies within one row.
    if first == last {
        return row(first, range.start - first * inner..range.end - first * inner);
    }
    // The rows that the range has from end to end.
    let whole = range.start.div_ceil(inner)..last;
    let mut all = vec![];
    if whole.start > first {
        all.extend(row(first, range.start - first * inner..inner));
    }
    if !whole.is_empty() {
        let rest = rest.iter().map(|extent| 0..*extent).collect::<Vec<_>>();
        all.push([&single(whole)[..], &rest].concat());
    }
    if range.end > last * inner {
        all.extend(row(last, 0..range.end - last * inner));
    }
    all
}

/// The numbers of elements of the dimensions before and after one.
fn around(extents: &[usize], dimension: usize) -> [usize; 2] {
    [extents[..dimension].iter().product(), extents[dimension + 1..].iter().product()]
}

/// The values of a box that a slice has, both flat.
fn cut_box(mut values: Tensor<1>, within: &[Range<usize>], slice: &Ranges) -> Tensor<1> {
    let mut extents: Vec<usize> = within.iter().map(Range::len).collect();
    for dimension in 0..extents.len() {
        let ranges = common(&slice[dimension], &within[dimension]);
        let held = extent(&ranges);
        // Nothing is cut along this dimension: no copy.
        if held == extents[dimension] {
            continue;
        }
        // Not every backend accepts a range of no elements.
        if held == 0 {
            return flat::empty(values.dtype(), &values.device());
        }
        let [outer, inner] = around(&extents, dimension);
        // Three dimensions are enough for a cut along any one of them.
        let rows = values.reshape([outer, extents[dimension], inner]);
        let pieces =
            ranges.into_iter().map(|range| rows.clone().slice([0..outer, range, 0..inner]));
        values = Tensor::cat(pieces.collect(), 1).reshape([-1]);
        extents[dimension] = held;
    }
    values
}

/// The values of a box from all slices that have some, flat: dimension by dimension, the
/// pieces that differ in it alone become one.
fn join_box(mut pieces: Vec<(Ranges, Tensor<1>)>, within: &[Range<usize>]) -> Tensor<1> {
    for (dimension, range) in within.iter().enumerate() {
        let mut joined: Vec<(Ranges, Tensor<1>)> = vec![];
        while let Some((ranges, _)) = pieces.first() {
            let mut key = ranges.clone();
            // The piece as it will be: whole along this dimension.
            key[dimension] = single(0..range.len());
            // Pieces that differ along this dimension alone are neighbours in it.
            let (alike, others): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|(ranges, _)| {
                let mut others = ranges.iter().zip(&key).enumerate();
                others.all(|(index, (ranges, key))| index == dimension || ranges == key)
            });
            pieces = others;
            joined.push((key, join_along(dimension, alike)));
        }
        pieces = joined;
    }
    let (_, values) = pieces.pop().expect("some slice has every element");
    values
}

/// The values of pieces that differ in a dimension alone.
fn join_along(dimension: usize, mut pieces: Vec<(Ranges, Tensor<1>)>) -> Tensor<1> {
    if pieces.len() == 1 {
        return pieces.swap_remove(0).1;
    }
    let mut rows: Vec<(usize, Tensor<3>)> = vec![];
    for (ranges, values) in pieces {
        let extents: Vec<usize> = ranges.iter().map(|ranges| extent(ranges)).collect();
        let [outer, inner] = around(&extents, dimension);
        let values = values.reshape([outer, extents[dimension], inner]);
        let mut first = 0;
        for range in &ranges[dimension] {
            let end = first + range.len();
            rows.push((range.start, values.clone().slice([0..outer, first..end, 0..inner])));
            first = end;
        }
    }
    // The parts of a fused weight alternate between the slices.
    rows.sort_by_key(|(start, _)| *start);
    // Along the middle dimension of three, whichever dimension was cut.
    Tensor::cat(rows.into_iter().map(|(_, rows)| rows).collect(), 1).reshape([-1])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};
    use proptest::prelude::*;

    use super::*;

    fn cut(dimension: usize, parts: usize, ranks: usize) -> Cut {
        Cut { axis: String::new(), dimension, parts, ranks }
    }

    fn floats(values: &Tensor<1>) -> Vec<f32> {
        values.to_data().iter::<f32>().collect()
    }

    prop_compose! {
        /// Slices of any shape, whose dimensions are multiples of the parts of the first cut; in
        /// rows or not.
        fn any_slices()(
            shape in prop::collection::vec(1..4usize, 1..4),
            fused in 1..4usize,
            cuts in prop::collection::vec((0..3usize, 1..5usize), 0..4),
            rows in prop::option::of(1..5usize),
        ) -> Slices {
            let shape: Vec<usize> = shape.into_iter().map(|extent| extent * fused).collect();
            let cuts = cuts.into_iter().enumerate().map(|(index, (dimension, ranks))| {
                cut(dimension % shape.len(), if index == 0 { fused } else { 1 }, ranks)
            });
            let slices = Slices::new(&shape, &cuts.collect::<Vec<_>>());
            rows.map_or(slices.clone(), |ranks| slices.in_rows("", ranks))
        }
    }

    proptest! {
        #[test]
        fn slices_have_every_element_once(slices in any_slices(), ends in any::<[u16; 2]>()) {
            let elements: usize = slices.whole().iter().product();
            let mut ends = ends.map(|end| end as usize % (elements + 1));
            ends.sort_unstable();
            for range in [0..elements, ends[0]..ends[1]] {
                let numbers: Vec<f32> = range.clone().map(|index| index as f32).collect();
                let whole =
                    Tensor::<1>::from_data(TensorData::from(&*numbers), &Device::default());
                let pieces: Vec<_> =
                    (0..slices.count()).map(|slice| slices.cut(&whole, &range, slice)).collect();
                for (slice, piece) in pieces.iter().enumerate() {
                    let held = slices.range(slice, &range);
                    prop_assert_eq!(piece.dims(), [held.len()]);
                    // They are where the slice has them.
                    let every: Vec<f32> = (0..elements).map(|index| index as f32).collect();
                    let every =
                        Tensor::<1>::from_data(TensorData::from(&*every), &Device::default());
                    let all = floats(&slices.cut(&every, &(0..elements), slice));
                    prop_assert_eq!(&floats(piece), &all[held]);
                }
                let mut all: Vec<f32> = pieces.iter().flat_map(floats).collect();
                all.sort_by(f32::total_cmp);
                prop_assert_eq!(&all, &numbers);
                prop_assert_eq!(floats(&slices.join(&pieces, &range)), numbers);
            }
        }
    }

    /// The elements along a dimension that every slice has.
    fn along(slices: &Slices, dimension: usize) -> Vec<Vec<Range<usize>>> {
        slices.slices.iter().map(|ranges| ranges[dimension].clone()).collect()
    }

    #[test]
    fn a_fused_weight_is_cut_in_each_of_its_parts() {
        let slices = Slices::new(&[4, 18], &[cut(1, 3, 2)]);
        assert_eq!(along(&slices, 1), [[0..3, 6..9, 12..15], [3..6, 9..12, 15..18]]);
        assert_eq!(slices.shape(1), [4, 9]);
        let values = slices.of_range(1, 6..12);
        assert_eq!(along(&values, 1), [single(0..3), single(3..6)]);
        assert_eq!(values.shape(1), [4, 3]);
    }

    #[test]
    fn rows_of_a_slice_follow_each_other_in_it() {
        // Two experts along one axis, columns along another, and three ranks that store rows.
        let used = Slices::new(&[2, 4, 6], &[cut(0, 1, 2), cut(2, 1, 2)]);
        let rows = used.in_rows("dp", 3);
        assert_eq!((rows.count(), rows.used(), rows.whole()), (12, 4, &[8, 6][..]));
        let all: Vec<f32> = (0..48).map(|index| index as f32).collect();
        let whole = Tensor::<1>::from_data(TensorData::from(&*all), &Device::default());
        for slice in 0..used.count() {
            let expected = floats(&used.cut(&whole, &(0..48), slice));
            let own: Vec<_> = (3 * slice..3 * slice + 3)
                .map(|row| (rows.before_in_use(row), floats(&rows.cut(&whole, &(0..48), row))))
                .collect();
            assert_eq!(own.iter().map(|(first, _)| *first).collect::<Vec<_>>(), [0, 3, 6]);
            assert_eq!(own.into_iter().flat_map(|(_, rows)| rows).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn rows_are_those_of_all_matrices_of_a_stack_and_may_be_uneven_or_none() {
        let rows = |shape: &[usize], ranks| {
            let rows = Slices::new(shape, &[]).in_rows("dp", ranks);
            (0..ranks).map(|rank| rows.shape(rank)).collect::<Vec<_>>()
        };
        assert_eq!(rows(&[2, 3, 5], 4), [[1, 5], [2, 5], [1, 5], [2, 5]]);
        assert_eq!(rows(&[3, 7], 2), [[1, 7], [2, 7]]);
        assert_eq!(rows(&[1, 7], 2), [[0, 7], [1, 7]]);
        assert_eq!(rows(&[5], 2), [[2, 1], [3, 1]]);
    }

    #[test]
    fn cuts_of_one_dimension_are_cut_again() {
        let slices = Slices::new(&[5], &[cut(0, 1, 2), cut(0, 1, 3)]);
        // Two and three elements, then none, one and one, and one each.
        let expected =
            [vec![], single(0..1), single(1..2), single(2..3), single(3..4), single(4..5)];
        assert_eq!(along(&slices, 0), expected);
    }
}
