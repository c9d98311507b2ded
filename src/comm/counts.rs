//! Positions of the ranks' parts in a buffer in which the parts follow each other.

/// Returns the number of elements before the part of `rank`.
pub fn offset(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// Returns the number of elements before every part.
pub fn offsets(counts: &[usize]) -> Vec<usize> {
    let start = |next: &mut usize, count: &usize| Some(std::mem::replace(next, *next + count));
    counts.iter().scan(0, start).collect()
}
