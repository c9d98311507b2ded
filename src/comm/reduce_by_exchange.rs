//! Exact reductions over engines that move parts and add up nothing.
//!
//! Every rank receives all contributions to its part, in their type, and adds them up itself (see
//! [`reduce`]). A rank sends `(N - 1) / N` of the buffer, which is the least possible, and two
//! bytes for an element of half precision.

use burn::tensor::{DType, Tensor};

use super::call::Call;
use super::counts::{even_counts, is_direct, offset, offsets};
use super::{Engine, Pending, ReduceOp, sum_over_ranks};
use crate::error::Result;

/// An engine whose ranks know the counts of all parts without asking.
pub trait MovesParts: Engine + Sized + 'static {
    /// Returns another handle of the same rank, for the second half of a call.
    fn share(&self) -> Self;

    /// Sends `send[r]` elements to every rank `r`, and receives `receive[r]` from it. The counts
    /// that all ranks give fit together.
    fn exchange(
        &self,
        call: Call,
        tensor: Tensor<1>,
        send: &[usize],
        receive: &[usize],
    ) -> Result<Pending>;
}

/// Starts an [`all_reduce`](Engine::all_reduce): even parts are reduced, then gathered.
pub fn all_reduce<E: MovesParts>(engine: &E, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
    let (length, dtype) = (tensor.dims()[0], tensor.dtype());
    let call = Call::all_reduce(&tensor, op);
    // Reduce parts, then gather them: every rank sends about two buffers, however many ranks there
    // are.
    let counts = even_counts(length, engine.size());
    let reduced = reduce_in_one_exchange(engine, call, tensor, &counts, op, dtype)?;
    if counts.len() == 1 {
        return Ok(reduced);
    }
    let engine = engine.share();
    Ok(Pending::new(reduced.bytes(), move || engine.all_gather(reduced.wait()?, &counts)?.wait()))
}

/// Starts a [`reduce_scatter`](Engine::reduce_scatter) whose result has the type `dtype`.
pub fn reduce_scatter<E: MovesParts>(
    engine: &E,
    tensor: Tensor<1>,
    counts: &[usize],
    op: ReduceOp,
    dtype: DType,
) -> Result<Pending> {
    let (rank, size, length) = (engine.rank(), engine.size(), tensor.dims()[0]);
    let call = Call::reduce_scatter(&tensor, counts, op);
    if is_direct(counts) {
        return reduce_in_one_exchange(engine, call, tensor, counts, op, dtype);
    }
    let even = even_counts(length, size);
    // The second exchange moves sums, and adds up nothing.
    let second_call = Call { op: None, ..call.clone() };
    let reduced = reduce_in_one_exchange(engine, call, tensor, &even, op, dtype)?;
    // Both sides know the counts without a message: they follow from the two divisions alone.
    let (send, receive) = (overlaps(&even, rank, counts), overlaps(counts, rank, &even));
    let engine = engine.share();
    Ok(Pending::new(reduced.bytes(), move || {
        engine.exchange(second_call, reduced.wait()?, &send, &receive)?.wait()
    }))
}

/// Starts a reduction in which every rank receives all contributions to its part.
fn reduce_in_one_exchange<E: MovesParts>(
    engine: &E,
    call: Call,
    tensor: Tensor<1>,
    counts: &[usize],
    op: ReduceOp,
    dtype: DType,
) -> Result<Pending> {
    let size = engine.size();
    if size == 1 {
        // Of one rank, both the sum and the mean are the tensor.
        return Ok(Pending::ready(tensor.cast(dtype)));
    }
    let received = engine.exchange(call, tensor, counts, &vec![counts[engine.rank()]; size])?;
    Ok(Pending::new(received.bytes(), move || {
        Ok(sum_over_ranks::rows(received.wait()?, size, op, dtype))
    }))
}

/// Returns the numbers of elements that a rank's part of one division of a buffer shares with every
/// part of another division.
fn overlaps(counts: &[usize], rank: usize, others: &[usize]) -> Vec<usize> {
    let start = offset(counts, rank);
    let end = start + counts[rank];
    let other_starts = offsets(others).into_iter().zip(others);
    let shared =
        // Where two parts do not touch, the end is before the start, and counts as no elements.
        other_starts.map(|(other, count)| end.min(other + count).saturating_sub(start.max(other)));
    shared.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_two_divisions_overlap_in_the_same_elements_on_both_sides() {
        let (counts, parts) = ([0, 7, 1, 0], even_counts(8, 4));
        assert_eq!(parts, [2; 4]);
        assert_eq!(even_counts(3, 4), [1, 1, 1, 0]);
        for rank in 0..4 {
            let sent = overlaps(&parts, rank, &counts);
            assert_eq!(sent.iter().sum::<usize>(), parts[rank]);
            for (to, sent) in sent.into_iter().enumerate() {
                assert_eq!(sent, overlaps(&counts, to, &parts)[rank], "{rank} to {to}");
            }
        }
    }
}
