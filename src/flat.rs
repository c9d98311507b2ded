//! Tensors sliced, concatenated and expanded, without the calls that not every backend carries out:
//! those with empty tensors, and expansions that change nothing.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, kind::Basic};

/// The items of a rank, of items that ranks divide: the parts follow each other, and differ in
/// length by at most one item.
pub fn share(items: usize, rank: usize, ranks: usize) -> Range<usize> {
    let boundary = |rank: usize| rank * items / ranks;
    boundary(rank)..boundary(rank + 1)
}

/// The elements in a range.
pub fn slice(tensor: &Tensor<1>, range: Range<usize>) -> Tensor<1> {
    match range.len() {
        0 => empty(tensor.dtype(), &tensor.device()),
        length if length == tensor.dims()[0] => tensor.clone(),
        _ => tensor.clone().slice([range]),
    }
}

/// Moves a tensor out, for an operation that writes in place: with a second reference, it would be
/// copied before. A further reference to any tensor takes its place, which costs no operation.
pub fn take(tensor: &mut Tensor<1>, any: &Tensor<1>) -> Tensor<1> {
    std::mem::replace(tensor, any.clone())
}

/// The elements in memory of their own. A slice is a view: with it, all of the tensor that it was
/// cut from stays in memory.
pub fn copied(view: Tensor<1>) -> Tensor<1> {
    let [elements] = view.dims();
    let all = 0..elements;
    // A concatenation or a product with 1 may return the view.
    match elements {
        0 => view,
        _ => Tensor::empty([elements], (&view.device(), view.dtype())).slice_assign([all], view),
    }
}

/// Ranges of a tensor, one after the other. The rest of the tensor does not stay in memory.
pub fn joined(tensor: &Tensor<1>, ranges: impl Iterator<Item = Range<usize>>) -> Tensor<1> {
    let ranges: Vec<_> = ranges.filter(|range| !range.is_empty()).collect();
    if let Some(distance) = distance(&ranges, tensor.dims()[0]) {
        // One launch instead of one for each range.
        let lines = tensor.clone().reshape([ranges.len(), distance]);
        return lines.slice([0..ranges.len(), ranges[0].clone()]).reshape([-1]);
    }
    let mut parts: Vec<_> = ranges.into_iter().map(|range| slice(tensor, range)).collect();
    match parts.len() {
        // Several are copied when they are joined.
        1 if parts[0].dims() != tensor.dims() => copied(parts.swap_remove(0)),
        _ => concat(parts, tensor.dtype(), &tensor.device()),
    }
}

/// The distance of several ranges of equal length, if there is one range in every part of this
/// length of `elements` elements, at the same place.
fn distance(ranges: &[Range<usize>], elements: usize) -> Option<usize> {
    let [first, second, ..] = ranges else { return None };
    // On a mesh, the parts of owners may be in another order than the elements.
    let distance = second.start.checked_sub(first.start)?;
    let are_alike = ranges.iter().enumerate().all(|(index, range)| {
        *range == (first.start + index * distance..first.end + index * distance)
    });
    // Ranges that follow each other are a slice, without a launch.
    let are_apart = first.len() < distance && first.end <= distance;
    (are_alike && are_apart && elements == ranges.len() * distance).then_some(distance)
}

/// The tensors of one type, one after the other, on a device. There may be none.
pub fn concat(tensors: Vec<Tensor<1>>, dtype: DType, device: &Device) -> Tensor<1> {
    // Some backends do not concatenate empty tensors.
    let filled = tensors.into_iter().filter(|tensor| tensor.dims() != [0]);
    let mut parts: Vec<Tensor<1>> = filled.map(|tensor| tensor.to_device(device)).collect();
    match parts.len() {
        0 => empty(dtype, device),
        // No copy of a single tensor.
        1 => parts.swap_remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

/// A flat tensor of `elements` elements with each of the given tensors from its first index on, and
/// zeros in between. There is at least one tensor, and they do not overlap.
pub fn place(tensors: Vec<Tensor<1>>, firsts: &[usize], elements: usize) -> Tensor<1> {
    let (dtype, device) = (tensors[0].dtype(), tensors[0].device());
    let mut placed: Vec<_> = firsts.iter().zip(tensors).collect();
    // A concatenation in order, with zeros in the gaps: one launch instead of one for each tensor.
    placed.sort_by_key(|(first, _)| **first);
    let zeros = |count| Tensor::zeros([count], (&device, dtype));
    let (mut all, mut end) = (vec![], 0);
    for (&first, tensor) in placed {
        all.extend((first > end).then(|| zeros(first - end)));
        end = first + tensor.dims()[0];
        all.push(tensor);
    }
    all.extend((elements > end).then(|| zeros(elements - end)));
    concat(all, dtype, &device)
}

/// The values of float32 tensors one after the other, followed by a zero.
pub fn with_zero(mut tensors: Vec<Tensor<1>>, device: &Device) -> Tensor<1> {
    tensors.push(Tensor::zeros([1], (device, DType::F32)));
    concat(tensors, DType::F32, device)
}

/// The tensor in a larger shape, without a copy.
///
/// With a mask that is expanded from `[1]` to `[1]`, Burn 0.22.1 selected the wrong values on a
/// Vulkan device, with fusion.
pub fn expand<const D: usize, K: Basic>(tensor: Tensor<D, K>, shape: [usize; D]) -> Tensor<D, K> {
    if tensor.dims() == shape { tensor } else { tensor.expand(shape) }
}

/// A flat tensor of zeros.
///
/// There may be none: Burn 0.22.1 fuses an operation that writes no element with others, such as
/// operations of a tensor `[1]`, and launches no kernel for all of them.
pub fn zeros(elements: usize, dtype: DType, device: &Device) -> Tensor<1> {
    match elements {
        0 => empty(dtype, device),
        _ => Tensor::zeros([elements], (device, dtype)),
    }
}

/// A function of each element of a tensor. There may be none, for the reason of [`zeros`].
pub fn mapped<const D: usize>(
    tensor: Tensor<D>,
    function: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    if tensor.shape().num_elements() == 0 { tensor } else { function(tensor) }
}

/// A tensor without elements. No kernel writes it.
pub fn empty(dtype: DType, device: &Device) -> Tensor<1> {
    Tensor::empty([0], (device, dtype))
}

/// Bytes of a tensor's elements.
pub fn bytes<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_at_equal_distances_are_lines() {
        let of = |ranges: &[[usize; 2]], elements| {
            let ranges: Vec<_> = ranges.iter().map(|[start, end]| *start..*end).collect();
            distance(&ranges, elements)
        };
        assert_eq!(of(&[[0, 2], [3, 5], [6, 8]], 9), Some(3));
        assert_eq!(of(&[[1, 3], [4, 6]], 6), Some(3));
        // Another distance, a part without a range, ranges that cross the end of a part, one range,
        // ranges that follow each other, and the reverse order.
        for (ranges, elements) in [
            (&[[0, 2], [3, 5], [7, 9]][..], 9),
            (&[[0, 2], [3, 5]], 9),
            (&[[2, 4], [5, 7]], 6),
            (&[[0, 2]], 4),
            (&[[0, 2], [2, 4]], 4),
            (&[[4, 8], [0, 4]], 8),
        ] {
            assert_eq!(of(ranges, elements), None, "{ranges:?}");
        }
    }
}
