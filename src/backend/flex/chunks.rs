//! Passes over memory, piece by piece: on all of rayon's threads where there is enough for them.

use rayon::prelude::*;

use crate::backend::ops::NORM_PART;

/// Elements that a thread processes at a time in a pass over memory. Sums are computed per chunk,
/// so that their order does not depend on the number of threads.
pub(super) const CHUNK: usize = NORM_PART;

/// Fewest elements of a pass that several threads share. The caller waits until one of rayon's
/// threads answers, which takes longer than a small pass, above all where other processes have the
/// cores: see `docs/results/cpu.md`. With a quarter of this, a batch of 8 matrices of 64 x 576 took
/// 1.11 times as long as one matrix after the other, and with this 0.97 (2026-11-29, two cores).
const SHARED_FROM: usize = 32 * CHUNK;

/// Slices that are cut into as many pieces each, which belong together.
pub(super) trait Pieces: Sized {
    /// The pieces of all slices with one number.
    type Piece: Send;

    /// The number of pieces.
    fn count(&self) -> usize;

    /// The pieces in order.
    fn here(self) -> impl Iterator<Item = Self::Piece>;

    /// The pieces for rayon's threads.
    fn shared(self) -> impl IndexedParallelIterator<Item = Self::Piece>;

    /// Calls a function for every piece, which stands for a number of `elements`.
    fn each(self, elements: usize, f: impl Fn(Self::Piece) + Send + Sync) {
        if self.count() * elements < SHARED_FROM {
            return self.here().for_each(f);
        }
        // A thread gets a chunk at least.
        self.shared().with_min_len(CHUNK.div_ceil(elements.max(1))).for_each(f);
    }

    /// Returns `true` if a condition holds for every piece of `elements`.
    fn all(self, elements: usize, f: impl Fn(Self::Piece) -> bool + Send + Sync) -> bool {
        match self.count() * elements < SHARED_FROM {
            true => self.here().all(f),
            false => self.shared().all(f),
        }
    }
}

/// A slice in pieces of a size. The last one may be shorter.
pub(super) struct Cut<'a>(pub &'a [f32], pub usize);

/// [`Cut`] for a slice that is changed.
pub(super) struct CutMut<'a>(pub &'a mut [f32], pub usize);

impl<'a> Pieces for Cut<'a> {
    type Piece = &'a [f32];

    fn count(&self) -> usize {
        self.0.len().div_ceil(self.1)
    }

    fn here(self) -> impl Iterator<Item = Self::Piece> {
        self.0.chunks(self.1)
    }

    fn shared(self) -> impl IndexedParallelIterator<Item = Self::Piece> {
        self.0.par_chunks(self.1)
    }
}

impl<'a> Pieces for CutMut<'a> {
    type Piece = &'a mut [f32];

    fn count(&self) -> usize {
        self.0.len().div_ceil(self.1)
    }

    fn here(self) -> impl Iterator<Item = Self::Piece> {
        self.0.chunks_mut(self.1)
    }

    fn shared(self) -> impl IndexedParallelIterator<Item = Self::Piece> {
        self.0.par_chunks_mut(self.1)
    }
}

impl<A: Pieces, B: Pieces> Pieces for (A, B) {
    type Piece = (A::Piece, B::Piece);

    fn count(&self) -> usize {
        // As many as `zip` yields.
        self.0.count().min(self.1.count())
    }

    fn here(self) -> impl Iterator<Item = Self::Piece> {
        self.0.here().zip(self.1.here())
    }

    fn shared(self) -> impl IndexedParallelIterator<Item = Self::Piece> {
        self.0.shared().zip(self.1.shared())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each piece once, with the pieces of the other slices that have its number, on both ways.
    #[test]
    fn pieces_belong_together_whoever_takes_them() {
        for length in [0, 1, 7, SHARED_FROM - 1, SHARED_FROM, 3 * SHARED_FROM + 5] {
            let from: Vec<f32> = (0..length).map(|x| x as f32).collect();
            let mut to = vec![0.0; length];
            let mut counts = vec![0.0; length.div_ceil(CHUNK)];
            let pieces = ((CutMut(&mut to, CHUNK), Cut(&from, CHUNK)), CutMut(&mut counts, 1));
            pieces.each(CHUNK, |((to, from), count)| {
                to.copy_from_slice(from);
                count[0] += 1.0;
            });
            assert_eq!(to, from);
            assert!(counts.iter().all(|count| *count == 1.0), "{length}");
            assert!(Cut(&from, CHUNK).all(CHUNK, |piece| piece[0] >= 0.0));
            let last = length as f32 - 1.0;
            let has_last = |piece: &[f32]| piece.contains(&last);
            assert_eq!(Cut(&from, CHUNK).all(CHUNK, |piece| !has_last(piece)), length == 0);
        }
    }
}
