//! The description of a call, which the ranks compare, and the failure of ranks to make the same
//! one.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::{DType, Tensor};

use super::ReduceOp;
use super::rounds::Failure;
use crate::error::Error;

/// The properties of a call that have to be equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub collective: &'static str,
    pub dtype: Option<DType>,
    /// Lengths that are the same on all ranks.
    pub counts: Vec<usize>,
    pub op: Option<ReduceOp>,
    pub root: Option<usize>,
}

/// The number of counts that the description of a call lists. Of more it has a hash: every call is
/// described.
const NAMED_COUNTS: usize = 64;

impl Call {
    pub fn new(collective: &'static str) -> Self {
        Self { collective, dtype: None, counts: vec![], op: None, root: None }
    }

    /// A call with a tensor, of which the type is compared.
    fn with_tensor(collective: &'static str, tensor: &Tensor<1>) -> Self {
        Self { dtype: Some(tensor.dtype()), ..Self::new(collective) }
    }

    pub fn all_reduce(tensor: &Tensor<1>, op: ReduceOp) -> Self {
        let counts = tensor.dims().to_vec();
        Self { counts, op: Some(op), ..Self::with_tensor("all_reduce", tensor) }
    }

    pub fn reduce_scatter(tensor: &Tensor<1>, counts: &[usize], op: ReduceOp) -> Self {
        let counts = counts.to_vec();
        Self { counts, op: Some(op), ..Self::with_tensor("reduce_scatter", tensor) }
    }

    pub fn all_gather(tensor: &Tensor<1>, counts: &[usize]) -> Self {
        Self { counts: counts.to_vec(), ..Self::with_tensor("all_gather", tensor) }
    }

    pub fn broadcast(tensor: &Tensor<1>, root: usize) -> Self {
        let counts = tensor.dims().to_vec();
        Self { counts, root: Some(root), ..Self::with_tensor("broadcast", tensor) }
    }

    /// Without counts, which differ between the ranks: an engine compares the counts of pairs.
    pub fn all_to_all(tensor: &Tensor<1>) -> Self {
        Self::with_tensor("all_to_all", tensor)
    }

    pub fn gather(tensor: &Tensor<1>, counts: &[usize], root: usize) -> Self {
        let counts = counts.to_vec();
        Self { counts, root: Some(root), ..Self::with_tensor("gather", tensor) }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, dtype, counts, op, root } = self;
        write!(f, "{collective}(")?;
        if let Some(dtype) = dtype {
            write!(f, "{}", dtype.name())?;
        }
        match &counts[..] {
            [] => {}
            counts if counts.len() <= NAMED_COUNTS => write!(f, " {counts:?}")?,
            counts => {
                // The hasher's keys are fixed, so that processes of one build hash equal counts to
                // equal numbers.
                let mut hasher = DefaultHasher::new();
                counts.hash(&mut hasher);
                write!(f, " {} counts #{:016x}", counts.len(), hasher.finish())?;
            }
        }
        if let Some(op) = op {
            write!(f, " {op:?}")?;
        }
        if let Some(root) = root {
            write!(f, " root {root}")?;
        }
        write!(f, ")")
    }
}

// Not in the file of `Failure`, which a test of interleavings compiles without the rest of the
// crate.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Peer { rank, cause } => Self::PeerFailed { rank, cause },
            Failure::Mismatch { calls } => Self::Mismatch { calls },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_counts_are_described_in_short_and_stay_different() {
        let call = |ranks: usize, last: usize| {
            let mut counts = vec![3; ranks];
            counts[ranks - 1] = last;
            let tensor = Tensor::zeros([1], &Default::default());
            Call::all_gather(&tensor, &counts).to_string()
        };
        assert!(call(8, 5).contains("[3, 3, 3, 3, 3, 3, 3, 5]"), "{}", call(8, 5));
        assert!(call(4096, 5).len() < 80 && call(4096, 5) == call(4096, 5), "{}", call(4096, 5));
        assert_ne!(call(4096, 5), call(4096, 6));
    }
}
