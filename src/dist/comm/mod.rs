//! Collectives over flat tensors, and the engines that carry them out.
//!
//! An engine moves buffers and knows no optimizer. Every call is made by all ranks of a group, in
//! the same order; it is started, and waited for later. Whether it advances in between is the
//! engine's doing. Names and meanings are those of MPI and NCCL; the counts of ranks may
//! differ, and be zero.
//!
//! Reductions are exact: every engine adds up in float32, in the same order, so that all of them
//! return the same bits. Only NCCL can be told to add up in its own way (`Reduction::Native`).

#[cfg(feature = "processes")]
mod control;
#[cfg(feature = "processes")]
mod exchange;
mod hierarchy;
mod meetings;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod reduce;
mod rendezvous;
mod sync;
mod threads;
pub(super) mod value;

use std::fmt::{self, Debug};

use burn::tensor::{DType, Tensor};

use crate::error::{Error, Result};

pub use hierarchy::Hierarchy;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "cuda")]
pub use nccl::{Buffer, CudaMemory, Mark, Memory, Nccl, Reduction};
use rendezvous::Failure;
pub use threads::Threads;

/// The operation that a reduction applies to the contributions of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
}

impl ReduceOp {
    /// Turns the float32 sum over `ranks` ranks into the result, and rounds it once to `dtype`.
    fn finish(self, sum: Tensor<1>, ranks: usize, dtype: DType) -> Tensor<1> {
        match self {
            Self::Sum => sum.cast(dtype),
            Self::Mean => sum.div_scalar(ranks as f64).cast(dtype),
        }
    }
}

/// One rank's access to a group of ranks.
///
/// Tensors are float32, float16 or bfloat16. Reductions add up in float32, in pairs of neighbouring
/// ranks, then in pairs of these sums, and so on, and round the result once.
///
/// Some calls need a second exchange, which starts when the result of the first is waited for. All
/// ranks therefore have to wait for the results of a group in the order of the calls, and a result
/// that one rank does not wait for, no rank may wait for.
///
/// All methods fail with [`Error::PeerFailed`] after a rank of the world has failed, and with
/// [`Error::Mismatch`] if the ranks make different calls. A failure found by one rank reaches all.
pub trait Communicator: Debug + Send + Sync {
    /// Name of the engine, as in `threads`.
    fn engine(&self) -> &'static str;

    /// Which library of which version the engine uses.
    fn version(&self) -> String {
        concat!("distmuon ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    /// This rank's index in the group, starting at 0.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// The ranks of every node, where shares travel inside nodes before they go between them: equally
    /// many in each. One node otherwise.
    fn nodes(&self) -> Vec<Vec<usize>> {
        vec![(0..self.size()).collect()]
    }

    /// The sum or mean of the tensors of all ranks, to all ranks.
    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending>;

    /// The sum or mean of the tensors of all ranks, of which rank `r` gets its part: `counts[r]`
    /// elements, after those of the ranks before it. The counts are the same on all ranks.
    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending>;

    /// The sum that [`reduce_scatter`](Self::reduce_scatter) returns, left in float32: a part of a
    /// larger sum that is rounded when all of it has been added up.
    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending>;

    /// The tensors of all ranks one after the other, to all ranks; rank `r` gives `counts[r]`
    /// elements. The counts are the same on all ranks.
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending>;

    /// The tensor of rank `root`, to all ranks. The others give one of the same length.
    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending>;

    /// A part of the tensor to every rank: `send[r]` elements to rank `r`, `receive[r]` from it. The
    /// parts received come one after the other.
    ///
    /// Ranks know only their parts of the `N * N` counts. Every call therefore compares all of them
    /// first, as small data through rank 0, which waits: use it for a few calls, and not in every
    /// step on many ranks.
    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending>;

    /// The tensors of all ranks one after the other, to rank `root`; rank `r` gives `counts[r]`
    /// elements. The counts are the same on all ranks. The others get nothing: a tensor of no elements.
    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<Pending>;

    /// Small data of the host, from all ranks to all ranks. Waits.
    ///
    /// The bytes that every rank receives grow with the number of ranks: where less is needed, the methods below
    /// send less.
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;

    /// Small data of the host, from all ranks to rank `root`, and nothing to the others. Waits.
    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>>;

    /// Small data of rank `root`, to all ranks. What the others give is ignored. Waits.
    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>>;

    /// The lowest rank that gives anything, and what it gives, to all ranks. Waits.
    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>>;

    /// The bits that are set on any rank, to all ranks, which give equally many bytes. Waits.
    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>>;

    /// Says that this rank does something that may take longer than the deadline, such as writing a file,
    /// or has done it. Meanwhile, no rank is given up for coming late, since it may itself wait for this
    /// one, except while this rank waits, too. That a rank died is still noticed.
    fn set_busy(&self, busy: bool);

    /// Waits until every call that was waited for has been carried out. An engine may hand out results
    /// before, where the device makes what uses them wait.
    ///
    /// # Errors
    ///
    /// What went wrong since, which the next call returns, too: the results are not to be used then.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Waits until all ranks have come this far.
    fn barrier(&self) -> Result<()> {
        self.first_bytes(None).map(|_| ())
    }

    /// The group of the ranks that give the same color, in the order of `key` and then of rank.
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>>;

    /// Ends the world: every other rank's calls fail with this rank and cause.
    fn fail(&self, cause: &str);
}

/// The result of a collective that was started.
#[must_use = "a collective is finished by waiting for it"]
pub struct Pending {
    bytes: usize,
    finish: Box<dyn FnOnce() -> Result<Tensor<1>> + Send>,
}

impl Pending {
    /// A result that is finished by a function, and whose call holds `bytes` bytes until then.
    pub fn new(bytes: usize, finish: impl FnOnce() -> Result<Tensor<1>> + Send + 'static) -> Self {
        Self { bytes, finish: Box::new(finish) }
    }

    /// A result that is there already.
    pub fn ready(tensor: Tensor<1>) -> Self {
        Self::new(bytes_of(&tensor), move || Ok(tensor))
    }

    /// Bytes that the call holds until it is waited for: its buffers for sending and receiving.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Waits for the result, or until the device makes everything wait that uses it: see
    /// [`Communicator::synchronize`].
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`] if another rank failed or did not come in time, [`Error::Mismatch`] if
    /// the ranks made different calls.
    pub fn wait(self) -> Result<Tensor<1>> {
        (self.finish)()
    }
}

impl Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({} bytes)", self.bytes)
    }
}

/// Bytes of a tensor's elements.
fn bytes_of(tensor: &Tensor<1>) -> usize {
    tensor.dims()[0] * tensor.dtype().size()
}

/// Tells whether ranks exchange tensors of a type.
pub(super) fn exchanges(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Refuses a type that is not accumulated anywhere.
fn check_dtype(collective: &'static str, rank: usize, dtype: DType) -> Result<()> {
    match exchanges(dtype) {
        true => Ok(()),
        false => Err(Error::Collective {
            collective,
            rank,
            reason: format!("it was given {}", dtype.name()),
            remedy: "give float32, float16 or bfloat16",
        }),
    }
}

/// Refuses counts that are not one for every rank, or do not add up to what is there.
fn check_counts(
    collective: &'static str,
    rank: usize,
    size: usize,
    counts: &[usize],
    (expected, given): (usize, usize),
) -> Result<()> {
    let reason = if counts.len() != size {
        format!("{} counts for {size} ranks", counts.len())
    } else if expected != given {
        format!("the counts {counts:?} ask for {expected} elements and {given} are given")
    } else {
        return Ok(());
    };
    Err(Error::Collective { collective, rank, reason, remedy: "give one count for every rank" })
}

/// What the ranks have to agree on.
#[derive(Debug, Clone, PartialEq)]
struct Call {
    collective: &'static str,
    dtype: Option<DType>,
    /// Lengths that are the same on all ranks.
    counts: Vec<usize>,
    op: Option<ReduceOp>,
    root: Option<usize>,
}

impl Call {
    fn new(collective: &'static str) -> Self {
        Self { collective, dtype: None, counts: vec![], op: None, root: None }
    }

    fn on(collective: &'static str, tensor: &Tensor<1>) -> Self {
        Self { dtype: Some(tensor.dtype()), ..Self::new(collective) }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, dtype, counts, op, root } = self;
        write!(f, "{collective}(")?;
        if let Some(dtype) = dtype {
            write!(f, "{}", dtype.name())?;
        }
        if !counts.is_empty() {
            write!(f, " {counts:?}")?;
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

/// Refuses a root that is not a member of the group.
fn check_root(collective: &'static str, rank: usize, size: usize, root: usize) -> Result<()> {
    if root < size {
        return Ok(());
    }
    Err(Error::Collective {
        collective,
        rank,
        reason: format!("root {root} in a group of {size}"),
        remedy: "give the rank of a member of the group",
    })
}

/// Refuses parts that are sent and not expected, or the other way round: for every rank, how many
/// elements it sends to every rank and expects from it.
fn check_pairs(parts: &[[Vec<usize>; 2]]) -> Result<()> {
    let pairs = (0..parts.len()).flat_map(|from| (0..parts.len()).map(move |to| (from, to)));
    let numbers = |(from, to): (usize, usize)| (parts[from][0][to], parts[to][1][from]);
    let Some((from, to)) = pairs.into_iter().find(|pair| numbers(*pair).0 != numbers(*pair).1)
    else {
        return Ok(());
    };
    let (sent, received) = numbers((from, to));
    Err(Error::Mismatch {
        calls: format!(
            "rank {from}: all_to_all with {sent} elements for rank {to}, rank {to}: all_to_all with \
             {received} elements from rank {from}"
        ),
    })
}

/// [`check_pairs`], where a rank knows of its own parts only.
#[cfg(feature = "processes")]
fn exchange_pairs(comm: &dyn Communicator, send: &[usize], receive: &[usize]) -> Result<()> {
    let all = comm.all_gather_bytes(value::to_bytes(&[send, receive]))?;
    let parts: Vec<[Vec<usize>; 2]> = value::all_from_bytes(&all)?;
    // Bytes of another call may look like counts.
    match parts.iter().position(|parts| parts.iter().any(|counts| counts.len() != all.len())) {
        Some(rank) => Err(Error::Mismatch {
            calls: format!("rank {rank} did not call all_to_all, and this rank did"),
        }),
        None => check_pairs(&parts),
    }
}

/// The number of elements before the part of `rank`.
fn before(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// The element at which every part begins, for parts that lie one after the other.
fn starts(counts: &[usize]) -> Vec<usize> {
    let start = |next: &mut usize, count: &usize| Some(std::mem::replace(next, *next + count));
    counts.iter().scan(0, start).collect()
}

/// What a rank offers for a group: its color, its place among those of the color, and a number.
fn offer(color: usize, key: usize, group: u64) -> Vec<u8> {
    [color as u64, key as u64, group].into_iter().flat_map(u64::to_le_bytes).collect()
}

/// The group that the first member of a color offers, and its members in the order of key and rank.
/// Every offer is one of [`offer`].
fn members(offers: &[Vec<u8>], color: usize) -> (u64, Vec<usize>) {
    let numbers = |bytes: &[u8]| -> Vec<u64> {
        let numbers = bytes.chunks_exact(8).map(|bytes| bytes.try_into().expect("eight bytes"));
        numbers.map(u64::from_le_bytes).collect()
    };
    let mut members: Vec<(Vec<u64>, usize)> =
        offers.iter().enumerate().map(|(rank, bytes)| (numbers(bytes), rank)).collect();
    members.retain(|(offer, _)| offer[0] == color as u64);
    members.sort_by_key(|(offer, rank)| (offer[1], *rank));
    (members[0].0[2], members.into_iter().map(|(_, rank)| rank).collect())
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Peer { rank, cause } => Self::PeerFailed { rank, cause },
            Failure::Mismatch { calls } => Self::Mismatch { calls },
        }
    }
}
