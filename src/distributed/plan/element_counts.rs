//! The numbers of elements of all ranks.

use serde::{Deserialize, Serialize};

/// A number of elements for every rank: of its shard of a bucket, or of its part of a parameter.
///
/// Ranks in a row with the same number are one entry, so that parameters with one owner, or with
/// equal shards, take the same memory on any number of ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Counts(Vec<Equal>);

/// Ranks in a row that have the same number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Equal {
    ranks: usize,
    elements: usize,
}

impl Counts {
    /// Returns the numbers in the order of ranks.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().flat_map(|equal| std::iter::repeat_n(equal.elements, equal.ranks))
    }

    /// Returns the numbers in the order of ranks, as a collective takes them.
    pub fn to_vec(&self) -> Vec<usize> {
        self.iter().collect()
    }

    /// Returns the ranks that have elements.
    pub fn holders(&self) -> impl Iterator<Item = usize> {
        let mut end = 0;
        self.0.iter().flat_map(move |equal| {
            let start = end;
            end += equal.ranks;
            if equal.elements > 0 { start..end } else { end..end }
        })
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.iter().map(|equal| equal.ranks).sum()
    }

    /// Returns the number of a rank.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn of(&self, rank: usize) -> usize {
        let mut end = 0;
        let equal = self.0.iter().find(|equal| {
            end += equal.ranks;
            rank < end
        });
        equal.expect("a rank of the counts").elements
    }

    /// Returns the sum of the numbers of the lower ranks: the first element of a rank's shard.
    pub fn before(&self, rank: usize) -> usize {
        let mut rest = rank;
        let sum = |equal: &Equal| {
            let ranks = equal.ranks.min(rest);
            rest -= ranks;
            ranks * equal.elements
        };
        self.0.iter().map(sum).sum()
    }
}

impl FromIterator<usize> for Counts {
    fn from_iter<I: IntoIterator<Item = usize>>(counts: I) -> Self {
        let mut equal: Vec<Equal> = vec![];
        for elements in counts {
            match equal.last_mut().filter(|last| last.elements == elements) {
                Some(last) => last.ranks += 1,
                None => equal.push(Equal { ranks: 1, elements }),
            }
        }
        Self(equal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_the_ranks_in_few_entries() {
        let one_owner = |ranks: usize| (0..ranks).map(|rank| if rank == 5 { 7 } else { 0 });
        for ranks in [8, 64, 512, 4096] {
            let counts: Counts = one_owner(ranks).collect();
            assert_eq!(counts.0.len(), 3);
            assert_eq!(counts.to_vec(), one_owner(ranks).collect::<Vec<_>>());
            assert_eq!((counts.ranks(), counts.of(5), counts.of(ranks - 1)), (ranks, 7, 0));
            assert_eq!([0, 5, 6, ranks].map(|rank| counts.before(rank)), [0, 0, 7, 7]);
            assert_eq!(counts.holders().collect::<Vec<_>>(), [5]);
            let equal: Counts = std::iter::repeat_n(3, ranks).collect();
            assert!(equal.holders().eq(0..ranks));
            assert_eq!((equal.0.len(), equal.before(ranks)), (1, 3 * ranks));
        }
    }
}
