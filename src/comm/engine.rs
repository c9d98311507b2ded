//! The interface that every engine implements.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;

use super::{PairCounts, Pending, PendingParts, ReduceOp};
use crate::error::Result;

/// One rank's access to a group of ranks, as an engine implements it.
///
/// Programs call the methods of [`Communicator`](super::Communicator), which documents them. A
/// communicator validates the arguments and then calls the method of the same name here. An engine
/// relies on these checks. If it passes memory to a library, it asserts that the counts fit it:
///
/// - tensors are float32, float16 or bfloat16;
/// - there is one count for every rank of the group, in `all_to_all` two;
/// - the counts of `reduce_scatter`, and in `all_to_all` those that this rank sends, add up to the
///   length of the tensor;
/// - in `all_gather` and `gather`, this rank's count is the length of its tensor;
/// - a root is the rank of a member of the group.
///
/// An engine makes the check that needs several ranks: that all ranks make the same call with the
/// same counts, and in `all_to_all` that a rank receives what another one sends. It returns
/// [`Error::Mismatch`](crate::Error::Mismatch) if they do not.
pub trait Engine: Debug + Send + Sync {
    /// Returns the name of the engine, as in `threads`.
    fn engine_name(&self) -> &'static str;

    /// Returns the library and the version that the engine uses.
    fn version(&self) -> String {
        concat!("distmuon ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    /// Returns this rank's index in the group, starting at 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Implements [`Communicator::nodes`](super::Communicator::nodes). One node by default.
    fn nodes(&self) -> Vec<Vec<usize>> {
        vec![(0..self.size()).collect()]
    }

    /// Implements [`Communicator::communicators`](super::Communicator::communicators).
    fn communicators(&self) -> usize;

    /// Implements [`Communicator::has_exact_sums`](super::Communicator::has_exact_sums).
    fn has_exact_sums(&self) -> bool;

    /// Implements [`Communicator::all_reduce`](super::Communicator::all_reduce).
    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending>;

    /// Implements [`Communicator::reduce_scatter`](super::Communicator::reduce_scatter).
    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending>;

    /// Implements [`Communicator::reduce_scatter_f32`](super::Communicator::reduce_scatter_f32).
    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending>;

    /// Implements [`Communicator::all_gather`](super::Communicator::all_gather).
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending>;

    /// Implements [`Communicator::broadcast`](super::Communicator::broadcast).
    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending>;

    /// Implements [`Communicator::all_to_all`](super::Communicator::all_to_all).
    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending>;

    /// Implements [`Communicator::gather`](super::Communicator::gather).
    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts>;

    /// Implements [`Communicator::all_gather_bytes`](super::Communicator::all_gather_bytes).
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;

    /// Implements [`Communicator::gather_bytes`](super::Communicator::gather_bytes).
    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>>;

    /// Implements [`Communicator::broadcast_bytes`](super::Communicator::broadcast_bytes).
    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>>;

    /// Implements [`Communicator::first_bytes`](super::Communicator::first_bytes).
    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>>;

    /// Implements [`Communicator::or_bytes`](super::Communicator::or_bytes).
    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>>;

    /// Implements [`Communicator::set_busy`](super::Communicator::set_busy).
    fn set_busy(&self, busy: bool);

    /// Implements [`Communicator::set_busy_limit`](super::Communicator::set_busy_limit).
    fn set_busy_limit(&self, limit: Duration);

    /// Implements [`Communicator::synchronize`](super::Communicator::synchronize). Does nothing by
    /// default, which suits an engine whose results are complete when they are returned.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Implements [`Communicator::barrier`](super::Communicator::barrier).
    fn barrier(&self) -> Result<()> {
        self.first_bytes(None).map(|_| ())
    }

    /// Implements [`Communicator::split`](super::Communicator::split).
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Engine>>;

    /// Implements [`Communicator::fail`](super::Communicator::fail).
    fn fail(&self, cause: &str);
}
