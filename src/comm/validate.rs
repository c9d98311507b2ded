//! The argument checks that [`Communicator`](super::Communicator) makes for every engine, and the
//! comparison of counts that the engines make among their ranks.

use burn::tensor::{DType, Tensor};

#[cfg(feature = "processes")]
use super::{Engine, value};
use crate::error::{Error, Result};

/// Returns `true` if ranks can exchange tensors of this type.
pub fn exchanges(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The call whose arguments are checked, as its errors name it.
pub struct Arguments {
    pub collective: &'static str,
    pub rank: usize,
    /// The number of ranks in the group.
    pub size: usize,
}

impl Arguments {
    /// Checks that ranks can exchange tensors of this type.
    pub fn dtype(&self, tensor: &Tensor<1>) -> Result<()> {
        let dtype = tensor.dtype();
        if exchanges(dtype) {
            return Ok(());
        }
        let reason = format!(
            "the element type is not supported: expected float32, float16 or bfloat16, got {}",
            dtype.name()
        );
        self.reject(reason, "cast the tensor")
    }

    /// Checks that the root is a member of the group.
    pub fn root(&self, root: usize) -> Result<()> {
        if root < self.size {
            return Ok(());
        }
        let size = self.size;
        let reason =
            format!("the root is not in the group: expected a rank below {size}, got {root}");
        self.reject(reason, "give the rank of a member of the group")
    }

    /// Checks that there is one count for every rank.
    pub fn one_per_rank(&self, counts: &[usize]) -> Result<()> {
        if counts.len() == self.size {
            return Ok(());
        }
        let reason = format!(
            "the number of counts is wrong: expected {}, one for every rank, got {}",
            self.size,
            counts.len()
        );
        self.reject(reason, "give one count for every rank")
    }

    /// Checks the counts of a tensor that is divided among the ranks.
    pub fn scattered(&self, counts: &[usize], tensor: &Tensor<1>) -> Result<()> {
        self.one_per_rank(counts)?;
        let remedy = "give counts that add up to the length of the tensor";
        self.length(counts, counts.iter().sum(), tensor, remedy)
    }

    /// Checks the counts of tensors that are concatenated.
    pub fn gathered(&self, counts: &[usize], tensor: &Tensor<1>) -> Result<()> {
        self.one_per_rank(counts)?;
        let remedy = "give this rank's count the length of its tensor";
        self.length(counts, counts[self.rank], tensor, remedy)
    }

    fn length(
        &self,
        counts: &[usize],
        expected: usize,
        tensor: &Tensor<1>,
        remedy: &'static str,
    ) -> Result<()> {
        let length = tensor.dims()[0];
        if length == expected {
            return Ok(());
        }
        let reason = format!(
            "the tensor does not fit the counts {counts:?}: expected {expected} elements, \
             got {length}"
        );
        self.reject(reason, remedy)
    }

    fn reject(&self, reason: String, remedy: &'static str) -> Result<()> {
        let Self { collective, rank, .. } = *self;
        Err(Error::Collective { collective, rank, reason, remedy })
    }
}

/// Asserts what makes the memory of a call large enough: one count for every rank, and all
/// elements that are sent. A communicator has checked both. An engine that is called without one
/// panics here instead of reading past the end of a buffer.
#[cfg(feature = "processes")]
pub fn assert_fits<const N: usize>(
    tensor: &Tensor<1>,
    sent: usize,
    counts: [&[usize]; N],
    size: usize,
) {
    for counts in counts {
        assert_eq!(counts.len(), size, "counts, one for every rank");
    }
    assert_eq!(tensor.dims()[0], sent, "elements of the tensor, as the counts say");
}

/// The counts of one rank in an `all_to_all`: the elements that it sends to every rank, and those
/// that it expects from every rank.
pub type SentAndReceived = [Vec<usize>; 2];

/// Checks that every rank sends to every other rank the number of elements that is expected there.
pub fn check_pairs(counts: &[SentAndReceived]) -> Result<()> {
    let ranks = 0..counts.len();
    let pairs = ranks.clone().flat_map(|from| ranks.clone().map(move |to| (from, to)));
    let numbers = |(from, to): (usize, usize)| (counts[from][0][to], counts[to][1][from]);
    let mut different = pairs.filter(|pair| {
        let (sent, received) = numbers(*pair);
        sent != received
    });
    let Some((from, to)) = different.next() else { return Ok(()) };
    let (sent, received) = numbers((from, to));
    Err(Error::Mismatch {
        calls: format!(
            "rank {from}: all_to_all with {sent} elements for rank {to}, rank {to}: all_to_all \
             with {received} elements from rank {from}"
        ),
    })
}

/// [`check_pairs`] on an engine whose ranks know only their part of the counts. Waits for all
/// ranks.
#[cfg(feature = "processes")]
pub fn exchange_pairs(engine: &dyn Engine, send: &[usize], receive: &[usize]) -> Result<()> {
    let all = engine.all_gather_bytes(value::to_bytes(&[send, receive]))?;
    let counts: Vec<SentAndReceived> = value::all_from_bytes(&all)?;
    // A rank that makes another call with bytes takes part in this one. Its bytes may look like
    // counts.
    let other = counts.iter().position(|pair| pair.iter().any(|counts| counts.len() != all.len()));
    match other {
        Some(rank) => Err(Error::Mismatch {
            calls: format!("rank {rank} did not call all_to_all, and this rank did"),
        }),
        None => check_pairs(&counts),
    }
}

#[cfg(all(test, feature = "processes"))]
mod tests {
    use std::panic;

    use super::*;

    #[test]
    fn counts_that_do_not_fit_the_memory_of_a_call_panic() {
        let tensor = Tensor::<1>::zeros([4], &Default::default());
        let fits = |sent, counts: &[usize]| {
            panic::catch_unwind(|| assert_fits(&tensor, sent, [counts], 2)).is_ok()
        };
        assert!(fits(4, &[4, 1]));
        assert!(!fits(5, &[5, 1]), "an element more than the tensor has");
        assert!(!fits(4, &[4]), "a count for one of two ranks");
    }
}
