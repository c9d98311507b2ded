//! Numbers of elements of the ranks' parts, and positions of these parts in a buffer in which they
//! follow each other.

/// Returns the number of elements before the part of `rank`.
pub fn offset(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// Returns the number of elements before every part.
pub fn offsets(counts: &[usize]) -> Vec<usize> {
    let start = |next: &mut usize, count: &usize| Some(std::mem::replace(next, *next + count));
    counts.iter().scan(0, start).collect()
}

/// Returns the numbers of elements that a rank sends to every rank, and that it receives from every
/// rank, where `counts[from][to]` has those of all pairs.
#[cfg(any(feature = "mpi", feature = "cuda"))]
pub fn sent_and_received(counts: &[Vec<usize>], rank: usize) -> [Vec<usize>; 2] {
    [counts[rank].clone(), counts.iter().map(|sent| sent[rank]).collect()]
}
