//! The sum over ranks, with the same bits on every engine.
//!
//! Contributions are added up in float32: rank 0 and 1, rank 2 and 3, and so on, then neighbouring
//! sums, until one is left. If a level has an odd number of sums, the last one joins the next level
//! unchanged. The order depends on the number of ranks only, and equal contributions of a power of
//! two of ranks add up without rounding.

use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::flat;

/// The operation that a reduction applies to the contributions of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
// Exhaustive: an engine has to implement every operation.
pub enum ReduceOp {
    /// The sum over all ranks.
    Sum,
    /// The mean over all ranks.
    Mean,
}

impl ReduceOp {
    /// Turns the float32 sum over `ranks` ranks into the result, and rounds it once to `dtype`.
    pub(super) fn finish(self, sum: Tensor<1>, ranks: usize, dtype: DType) -> Tensor<1> {
        match self {
            Self::Sum => sum.cast(dtype),
            Self::Mean => sum.div_scalar(ranks as f64).cast(dtype),
        }
    }
}

/// The number of half-precision elements that are added up at once. They are widened to float32
/// first, which takes 16 MiB: little compared with a bucket, and enough for launches to be bound by
/// memory.
const BLOCK: usize = 1 << 22;

/// Reduces the contributions of `ranks` ranks, which follow each other in one tensor.
#[cfg(any(test, feature = "processes"))]
pub fn rows(received: Tensor<1>, ranks: usize, op: ReduceOp, dtype: DType) -> Tensor<1> {
    let length = received.dims()[0] / ranks;
    if length == 0 {
        return flat::empty(dtype, &received.device());
    }
    let (contributed, device) = (received.dtype(), received.device());
    let rows = received.reshape([ranks, length]);
    let sum = |rows: Tensor<2>| op.finish(rows_in_pairs(rows.cast(FloatDType::F32)), ranks, dtype);
    let blocks = blocks([ranks, length], contributed);
    if blocks.len() == 1 {
        // Moved, so that the first sums free it.
        return sum(rows);
    }
    let block = |columns: Range<usize>| sum(rows.clone().slice([0..ranks, columns]));
    let sums = blocks.into_iter().map(block).collect();
    drop(rows);
    flat::concat(sums, dtype, &device)
}

/// Returns the bytes that [`rows`] holds at most, for contributions of a type and `elements` in
/// all: the contributions, float32 copies of those in half precision, and half as many sums.
pub fn bytes_of_rows(elements: usize, ranks: usize, contributed: DType) -> usize {
    let given = elements * contributed.size();
    if ranks == 1 || elements == 0 {
        return given;
    }
    let width = width_of_blocks([ranks, elements.div_ceil(ranks)], contributed);
    let widened = elements.min(width * ranks);
    let sums = widened / ranks * ranks.div_ceil(2);
    // A single block takes the place of the contributions. Of several, the sums remain.
    let rest = match widened == elements {
        true => 0,
        false => given + elements / ranks * DType::F32.size(),
    };
    rest + (widened + sums) * DType::F32.size()
}

/// Reduces contributions on any devices, one per rank and of equal lengths, on `device`.
pub fn parts(parts: &[Tensor<1>], op: ReduceOp, dtype: DType, device: &Device) -> Tensor<1> {
    let (ranks, length) = (parts.len(), parts[0].dims()[0]);
    match (length, parts) {
        (0, _) => flat::empty(dtype, device),
        (_, [only]) => only.clone().to_device(device).cast(dtype),
        _ => {
            let block = |columns: Range<usize>| {
                let widened = |part| {
                    flat::slice(part, columns.clone()).to_device(device).cast(FloatDType::F32)
                };
                op.finish(parts_in_pairs(parts.iter().map(widened).collect()), ranks, dtype)
            };
            let blocks = blocks([ranks, length], parts[0].dtype()).into_iter();
            flat::concat(blocks.map(block).collect(), dtype, device)
        }
    }
}

/// Returns the blocks of columns that are reduced one by one. Float32 is one block, since nothing
/// is widened.
fn blocks([ranks, length]: [usize; 2], contributed: DType) -> Vec<Range<usize>> {
    let width = width_of_blocks([ranks, length], contributed);
    (0..length).step_by(width).map(|start| start..(start + width).min(length)).collect()
}

fn width_of_blocks([ranks, length]: [usize; 2], contributed: DType) -> usize {
    match contributed {
        DType::F32 => length,
        // Half precision is widened before the sum: block by block, so that the float32 copies of
        // all ranks never exist at once.
        _ => (BLOCK / ranks).clamp(1, length),
    }
}

/// Adds up tensors in pairs. Contributions of other ranks are separate tensors, and putting them
/// into rows would copy them.
fn parts_in_pairs(mut level: Vec<Tensor<1>>) -> Tensor<1> {
    // Neighbours first, then pairs of pairs. The order depends on the number of ranks alone, so the
    // bits depend neither on the engine nor on timing.
    while level.len() > 1 {
        let mut rest = level.into_iter();
        level = Vec::new();
        while let Some(first) = rest.next() {
            level.push(match rest.next() {
                Some(second) => first + second,
                None => first,
            });
        }
    }
    level.pop().expect("a group has at least one rank")
}

/// Adds up rows in pairs, with one launch per level, or two if the number of rows is odd.
#[cfg(any(test, feature = "processes"))]
fn rows_in_pairs(mut rows: Tensor<2>) -> Tensor<1> {
    // The sum of the unpaired last rows of all levels so far, which comes after all other rows.
    let mut unpaired: Option<Tensor<2>> = None;
    loop {
        let [count, width] = rows.dims();
        if count % 2 == 1 {
            let last = rows.clone().slice([count - 1..count, 0..width]);
            let last = match unpaired.take() {
                Some(unpaired) => last + unpaired,
                None => last,
            };
            if count == 1 {
                return last.reshape([width]);
            }
            rows = rows.slice([0..count - 1, 0..width]);
            unpaired = Some(last);
        }
        // A reshape puts neighbouring rows into one row: the left half of the columns is the first
        // of each pair.
        let pairs = count / 2;
        let halves = rows.reshape([pairs, 2 * width]);
        let left = halves.clone().slice([0..pairs, 0..width]);
        rows = left + halves.slice([0..pairs, width..2 * width]);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    /// The same sums in pairs, of a list.
    fn sum_in_pairs(mut level: Vec<f32>) -> f32 {
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| pair.iter().sum()).collect();
        }
        level[0]
    }

    #[test]
    fn rows_and_parts_are_added_up_in_pairs() {
        let (device, mut rng) = (Device::default(), StdRng::seed_from_u64(1));
        for (ranks, length) in (1..=9).map(|ranks| (ranks, 37)) {
            let values: Vec<f32> =
                (0..ranks * length).map(|_| rng.random_range(-1.0..1.0)).collect();
            let contribution = |rank: usize| values[rank * length..(rank + 1) * length].to_vec();
            let column = |i| (0..ranks).map(|rank| values[rank * length + i]).collect();
            let sums = (0..length).map(|i| sum_in_pairs(column(i)));
            let expected: Vec<u32> = sums.map(|sum| (sum / ranks as f32).to_bits()).collect();
            let tensor = |values: Vec<f32>| {
                let length = values.len();
                Tensor::<1>::from_data(TensorData::new(values, [length]), (&device, DType::F32))
            };
            let contributions: Vec<Tensor<1>> =
                (0..ranks).map(|rank| tensor(contribution(rank))).collect();
            let all = tensor(values.clone());
            let results = [
                rows(all, ranks, ReduceOp::Mean, DType::F32),
                parts(&contributions, ReduceOp::Mean, DType::F32, &device),
            ];
            for result in results {
                let bits = result.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>();
                assert!(bits == expected, "{ranks} ranks");
            }
        }
    }

    #[test]
    fn half_precision_in_blocks_has_the_sums_of_the_whole() {
        let (device, length) = (Device::default(), BLOCK / 2 + 1);
        let values =
            Tensor::<1, burn::tensor::Int>::arange(0..3 * length as i64, &device).float() % 251.0;
        let half = values.clone().cast(FloatDType::F16);
        let sum = rows(half.clone(), 3, ReduceOp::Sum, DType::F32);
        assert_eq!(sum.dims(), [length]);
        let contributions: Vec<_> = half.split(length, 0);
        let others = [
            rows(values, 3, ReduceOp::Sum, DType::F32),
            parts(&contributions, ReduceOp::Sum, DType::F32, &device),
        ];
        for other in others {
            assert_eq!((sum.clone() - other).abs().max().into_scalar::<f32>(), 0.0);
        }
    }
}
