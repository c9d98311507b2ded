//! The argument checks that [`Communicator`](super::Communicator) makes for every engine.

use burn::tensor::{DType, Tensor};

use crate::error::{Error, Result};

/// Returns `true` if ranks can exchange tensors of this type.
pub fn exchanges(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The call whose arguments are checked, as its errors name it.
pub struct CheckedCall {
    pub collective: &'static str,
    pub rank: usize,
    /// The number of ranks in the group.
    pub size: usize,
}

impl CheckedCall {
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
        // First, since the count of this rank is looked up below.
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
