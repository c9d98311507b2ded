//! Numbers of elements of the ranks' parts, and positions of these parts in a buffer in which they
//! follow each other.

/// The number of elements that a rank may receive however uneven the parts are: at most 4 MiB. An
/// exchange of that size is bound by its latency, which a second exchange would double.
const SMALL: usize = 1 << 20;

/// Returns the number of elements before the part of `rank`.
pub fn offset(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// Returns the number of elements before every part.
pub fn offsets(counts: &[usize]) -> Vec<usize> {
    counts.iter().scan(0, |next, count| Some(std::mem::replace(next, *next + count))).collect()
}

/// The numbers of elements, or of rows, that a rank exchanges with every rank of a group.
///
/// [`Communicator::pair_counts`](super::Communicator::pair_counts) makes them. No rank has the
/// numbers of all pairs of ranks, which would grow with their square.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PairCounts {
    /// The number of elements that this rank sends to every rank.
    pub sent: Vec<usize>,
    /// The number of elements that every rank sends to this rank.
    pub received: Vec<usize>,
}

impl PairCounts {
    /// The counts of the way back.
    #[must_use]
    pub fn back(&self) -> Self {
        Self { sent: self.received.clone(), received: self.sent.clone() }
    }
}

/// Returns `true` if every rank receives its part from all ranks. Where the rank with the largest
/// part would receive up to N times the buffer, even parts are reduced instead and sent to their
/// owners, so that it receives at most two buffers.
pub fn is_direct(counts: &[usize]) -> bool {
    let (largest, length) = (counts.iter().max().copied(), counts.iter().sum::<usize>());
    counts.len() * largest.unwrap_or_default() <= SMALL.max(2 * length)
}

/// Returns the elements that a rank receives at one time to reduce a buffer into parts.
pub fn received(counts: &[usize], rank: usize) -> usize {
    let (size, length) = (counts.len(), counts.iter().sum());
    match size {
        1 => 0,
        _ if is_direct(counts) => size * counts[rank],
        _ => {
            let even = even_counts(length, size)[rank];
            // Two exchanges, one after the other, of which the larger counts. The second begins
            // with the sum of the even part.
            (size * even).max(even + counts[rank])
        }
    }
}

/// Returns the lengths of parts of a buffer that differ by one element at most.
pub fn even_counts(length: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| length / ranks + usize::from(rank < length % ranks)).collect()
}
