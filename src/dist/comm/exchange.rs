//! Exact reductions over engines that move parts and add up nothing.
//!
//! Every rank receives all contributions to its part, in their type, and adds them up itself (see
//! [`reduce`]). A rank sends `(N - 1) / N` of the buffer, which is the least possible, and two bytes
//! for an element of half precision.

use burn::tensor::{DType, Tensor};

use super::{Call, Communicator, Pending, ReduceOp, check_counts, check_dtype, reduce, starts};
use crate::error::Result;

/// Elements that a rank may receive for parts however uneven: 4 MiB at most, where one exchange is
/// bound by its latency, and a second one would double it.
const SMALL: usize = 1 << 20;

/// An engine whose ranks know the counts of all parts without asking.
pub trait Exchange: Communicator + Sized + 'static {
    /// A second way to the same rank, for the second half of a call.
    fn share(&self) -> Self;

    /// Sends `send[r]` elements to every rank `r`, and receives `receive[r]` from it. All ranks give
    /// counts that fit together.
    fn exchange(
        &self,
        call: Call,
        tensor: Tensor<1>,
        send: &[usize],
        receive: &[usize],
    ) -> Result<Pending>;
}

/// Starts an [`all_reduce`](Communicator::all_reduce): even parts are reduced, then gathered.
pub fn all_reduce<E: Exchange>(engine: &E, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
    check_dtype("all_reduce", engine.rank(), tensor.dtype())?;
    let (length, dtype) = (tensor.dims()[0], tensor.dtype());
    let call = Call { counts: vec![length], op: Some(op), ..Call::on("all_reduce", &tensor) };
    let counts = even(length, engine.size());
    let reduced = at_once(engine, call, tensor, &counts, op, dtype)?;
    if counts.len() == 1 {
        return Ok(reduced);
    }
    let engine = engine.share();
    Ok(Pending::new(reduced.bytes(), move || engine.all_gather(reduced.wait()?, &counts)?.wait()))
}

/// Starts a [`reduce_scatter`](Communicator::reduce_scatter) whose result has the type `dtype`.
pub fn reduce_scatter<E: Exchange>(
    engine: &E,
    tensor: Tensor<1>,
    counts: &[usize],
    op: ReduceOp,
    dtype: DType,
) -> Result<Pending> {
    let (rank, size, length) = (engine.rank(), engine.size(), tensor.dims()[0]);
    check_dtype("reduce_scatter", rank, tensor.dtype())?;
    check_counts("reduce_scatter", rank, size, counts, (counts.iter().sum(), length))?;
    let call =
        Call { counts: counts.to_vec(), op: Some(op), ..Call::on("reduce_scatter", &tensor) };
    let largest = counts.iter().max().copied().unwrap_or_default();
    if size * largest <= SMALL.max(2 * length) {
        return at_once(engine, call, tensor, counts, op, dtype);
    }
    // The rank with the largest part would receive it from everybody: up to N times the buffer. Even
    // parts are reduced instead and sent to their owners, so that it receives at most two buffers.
    let parts = even(length, size);
    let moved = Call { op: None, ..call.clone() };
    let reduced = at_once(engine, call, tensor, &parts, op, dtype)?;
    let (send, receive) = (overlaps(&parts, rank, counts), overlaps(counts, rank, &parts));
    let engine = engine.share();
    Ok(Pending::new(reduced.bytes(), move || {
        engine.exchange(moved, reduced.wait()?, &send, &receive)?.wait()
    }))
}

/// Starts a reduction of which every rank receives all contributions to its part.
fn at_once<E: Exchange>(
    engine: &E,
    call: Call,
    tensor: Tensor<1>,
    counts: &[usize],
    op: ReduceOp,
    dtype: DType,
) -> Result<Pending> {
    let size = engine.size();
    if size == 1 {
        return Ok(Pending::ready(tensor.cast(dtype)));
    }
    let received = engine.exchange(call, tensor, counts, &vec![counts[engine.rank()]; size])?;
    Ok(Pending::new(received.bytes(), move || Ok(reduce::rows(received.wait()?, size, op, dtype))))
}

/// Parts of a buffer whose lengths differ by one element at most.
fn even(length: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| length / ranks + usize::from(rank < length % ranks)).collect()
}

/// The elements that a rank's part of one division of a buffer shares with every part of another.
fn overlaps(counts: &[usize], rank: usize, others: &[usize]) -> Vec<usize> {
    let start = starts(counts)[rank];
    let end = start + counts[rank];
    let other_starts = starts(others).into_iter().zip(others);
    let shared =
        other_starts.map(|(from, count)| end.min(from + count).saturating_sub(start.max(from)));
    shared.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_buffer_in_any_division() {
        let (counts, parts) = ([0, 7, 1, 0], even(8, 4));
        assert_eq!(parts, [2; 4]);
        assert_eq!(even(3, 4), [1, 1, 1, 0]);
        for rank in 0..4 {
            let sent = overlaps(&parts, rank, &counts);
            assert_eq!(sent.iter().sum::<usize>(), parts[rank]);
            for (to, sent) in sent.into_iter().enumerate() {
                assert_eq!(sent, overlaps(&counts, to, &parts)[rank], "{rank} to {to}");
            }
        }
    }
}
