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

/// The numbers of elements, or of rows, that a rank exchanges with every rank of a group.
///
/// [`Communicator::pair_counts`](super::Communicator::pair_counts) makes them. No rank has the
/// numbers of all pairs of ranks, which would grow with their square.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PairCounts {
    /// One for every rank: what this rank sends to it.
    pub sent: Vec<usize>,
    /// One for every rank: what it sends to this rank.
    pub received: Vec<usize>,
}

impl PairCounts {
    /// The counts of the way back.
    #[must_use]
    pub fn back(&self) -> Self {
        Self { sent: self.received.clone(), received: self.sent.clone() }
    }
}
