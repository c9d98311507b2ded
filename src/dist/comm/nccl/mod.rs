//! The engine for processes with a GPU each, on one host or many, over NCCL.
//!
//! Every group has a communicator of its own. Its calls don't block: after each, NCCL is asked how it
//! went until it says, so that a rank that waits for a dead one is told by
//! [`Control`](super::control::Control) and ends it.
//!
//! A result may be used before it is there, if the device makes what uses it wait. Then a thread
//! ([`watch`]) sees to it that it comes.

mod call;
mod cuda;
mod group;
mod library;
mod memory;
mod native;
mod peers;
mod watch;

use std::os::raw::c_int;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use cudarc::nccl::sys::ncclDataType_t;

use super::control::Meeting;
use super::exchange::{self, Exchange};
use super::{
    Call, Communicator, Pending, ReduceOp, check_counts, check_root, exchange_pairs, starts,
};
use crate::dist::Launch;
use crate::error::Result;
use call::Shared;
pub use cuda::CudaMemory;
use group::{Group, grouped};
use library::{ENGINE, Library, dotted};
pub use memory::{Buffer, Mark, Memory};
use peers::Peers;

const BYTE: c_int = ncclDataType_t::ncclUint8 as c_int;

/// The way in which the engine `nccl` reduces.
///
/// A reduce_scatter of `B` elements with even shares makes each of `N` ranks send `(N - 1) / N B` of
/// them either way, and an all_reduce twice as many. `Exact` sends elements in their type, `Native` in
/// float32. For 6.5 million elements (25 MiB of float32) on 8 ranks, a rank sends:
///
/// | | float32 | float16, bfloat16 |
/// |---|---|---|
/// | `Exact` | 21.9 MiB | 10.9 MiB |
/// | `Native` | 21.9 MiB | 21.9 MiB |
///
/// `Exact` also needs memory for what a rank receives, as much as the buffer, and a pass over it: on an
/// H100 at 3350 GB/s, where NVLink brings 450 GB/s and a network 50 GB/s. Between hosts it sends more.
/// On `n` hosts of `d` ranks, each rank sends `(n - 1) / n B` elements across; all ranks of a host
/// together send `d` times that, where a ring of NCCL sends `(N - 1) / N B`. [`Hierarchy`](super::Hierarchy)
/// brings it down to `(n - 1) / n B` per host, so that [`World::nccl`](crate::dist::World::nccl) puts it
/// over several hosts. `Native` needs none: its rings cross the border of a host once.
///
/// These are numbers on paper; neither was measured on several GPUs. `Exact` wants shares of many
/// ranks in each buffer: a rank that owns all of it receives twice the buffer, and the links of the
/// others idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// All contributions to a part are sent to its rank in their type, and added up there in float32, in
    /// the order of ranks: the bits are those of every other engine, whatever the topology. The default,
    /// since it is reproducible, and moves as many bytes as `Native` in float32 and half as many in half
    /// precision.
    #[default]
    Exact,
    /// NCCL's own reductions, in float32 and in an order of its choice, over rings, trees or in the
    /// network's switches. Sums differ between topologies and versions of NCCL in their last bits.
    Native,
}

/// Engine of GPUs over NCCL.
#[derive(Debug)]
pub struct Nccl {
    shared: Arc<Shared>,
    reduction: Reduction,
}

impl Nccl {
    /// The engine of a process with one CUDA device. A rank that waits for another longer than
    /// `deadline` gives up for all.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine) if NCCL or the device can't be used,
    /// [`Error::Launch`](crate::Error::Launch) without an address,
    /// [`Error::Rendezvous`](crate::Error::Rendezvous) if the ranks don't find together.
    pub fn connect(launch: &Launch, device: &Device, deadline: Duration) -> Result<Self> {
        Self::over(Arc::new(CudaMemory::new(device, launch.rank)?), launch, deadline)
    }

    /// The engine of a process whose tensors lie in any memory that NCCL can reach.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn over(memory: Arc<dyn Memory>, launch: &Launch, deadline: Duration) -> Result<Self> {
        let Launch { rank, world_size, ref secret, .. } = *launch;
        let library = Arc::new(Library::load(rank)?);
        let (host, port) = launch.known_address()?;
        let control = Meeting::at(rank, host, port)?.join(rank, world_size, secret, deadline)?;
        let group = Group::world(library, &control).inspect_err(|error| {
            control.fail(&error.to_string());
        })?;
        let shared = Shared::new(Peers { control, group }, memory);
        Ok(Self { shared, reduction: Reduction::default() })
    }

    /// Chooses how to reduce: the same on all ranks.
    #[must_use]
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        Self { reduction, ..self }
    }
}

impl Exchange for Nccl {
    fn share(&self) -> Self {
        Self { shared: self.shared.clone(), reduction: self.reduction }
    }

    fn exchange(
        &self,
        call: Call,
        tensor: Tensor<1>,
        send: &[usize],
        receive: &[usize],
    ) -> Result<Pending> {
        let width = tensor.dtype().size();
        let filled = |counts: &[usize]| {
            let parts = starts(counts).into_iter().zip(counts.to_vec()).enumerate();
            parts.filter(|(_, (_, count))| *count > 0)
        };
        self.shared.start(call, tensor, receive.iter().sum(), |given| {
            let (comm, stream) = (given.comm, given.stream);
            // SAFETY: the buffers hold the sums of their counts, and are held until the stream has
            // passed.
            let sends = filled(send).map(|(peer, (start, count))| unsafe {
                let (part, bytes) = (given.send.at(start), count * width);
                (given.nccl.send)(part, bytes, BYTE, peer as c_int, comm, stream)
            });
            // SAFETY: as above.
            let receives = filled(receive).map(|(peer, (start, count))| unsafe {
                let (part, bytes) = (given.receive.at(start), count * width);
                (given.nccl.receive)(part, bytes, BYTE, peer as c_int, comm, stream)
            });
            grouped(given.nccl, sends.chain(receives))
        })
    }
}

impl Communicator for Nccl {
    fn engine(&self) -> &'static str {
        ENGINE
    }

    fn version(&self) -> String {
        let library = &self.shared.peers.group.library;
        format!("NCCL {} ({})", dotted(library.version()), library.path.display())
    }

    fn rank(&self) -> usize {
        self.shared.peers.control.rank()
    }

    fn size(&self) -> usize {
        self.shared.peers.control.size()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        match self.reduction {
            Reduction::Exact => exchange::all_reduce(self, tensor, op),
            Reduction::Native => native::all_reduce(&self.shared, tensor, op),
        }
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        match self.reduction {
            Reduction::Exact => exchange::reduce_scatter(self, tensor, counts, op, dtype),
            Reduction::Native => native::reduce_scatter(&self.shared, tensor, counts, op, dtype),
        }
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let (op, dtype) = (ReduceOp::Sum, DType::F32);
        match self.reduction {
            Reduction::Exact => exchange::reduce_scatter(self, tensor, counts, op, dtype),
            Reduction::Native => native::reduce_scatter(&self.shared, tensor, counts, op, dtype),
        }
    }

    /// Uneven shares go as grouped broadcasts, one for every rank that has any, since NCCL's own call
    /// takes equal ones: padded to the largest, shares of few owners would move up to `N` times as many
    /// bytes. Broadcasts follow NCCL's rings, over which no rank sends more than the whole and every
    /// byte crosses the border of a host once; sent to every rank directly, the largest share would leave
    /// its owner `N - 1` times.
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("all_gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let call = Call { counts: counts.to_vec(), ..Call::on("all_gather", &tensor) };
        let width = tensor.dtype().size();
        self.shared.start(call, tensor, counts.iter().sum(), |given| {
            let (comm, stream) = (given.comm, given.stream);
            let (from, to) = (given.send.at(0), given.receive.at(0));
            if counts.iter().all(|count| *count == own) {
                // SAFETY: the buffers hold this rank's count and as many of every rank, and are held
                // until the stream has passed.
                return unsafe {
                    (given.nccl.all_gather)(from, to, own * width, BYTE, comm, stream)
                };
            }
            let shares = starts(counts).into_iter().zip(counts).enumerate();
            let shares = shares.filter(|(_, (_, count))| **count > 0);
            // SAFETY: the buffers hold this rank's count and the sum of the counts, and are held until
            // the stream has passed. Only the root of a broadcast reads what it sends.
            let broadcasts = shares.map(|(root, (start, count))| unsafe {
                let (part, bytes) = (given.receive.at(start), count * width);
                (given.nccl.broadcast)(from, part, bytes, BYTE, root as c_int, comm, stream)
            });
            grouped(given.nccl, broadcasts)
        })
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        check_root("broadcast", self.rank(), self.size(), root)?;
        let length = tensor.dims()[0];
        let call =
            Call { counts: vec![length], root: Some(root), ..Call::on("broadcast", &tensor) };
        let bytes = length * tensor.dtype().size();
        self.shared.start(call, tensor, length, |given| {
            let (from, to) = (given.send.at(0), given.receive.at(0));
            let (comm, stream) = (given.comm, given.stream);
            // SAFETY: both buffers hold that many bytes and are held until the stream has passed.
            unsafe { (given.nccl.broadcast)(from, to, bytes, BYTE, root as c_int, comm, stream) }
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending> {
        let (rank, size) = (self.rank(), self.size());
        check_counts("all_to_all", rank, size, send, (send.iter().sum(), tensor.dims()[0]))?;
        check_counts("all_to_all", rank, size, receive, (0, 0))?;
        exchange_pairs(self, send, receive)?;
        self.exchange(Call::on("all_to_all", &tensor), tensor, send, receive)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<Pending> {
        let (rank, size) = (self.rank(), self.size());
        check_root("gather", rank, size, root)?;
        let own = counts.get(rank).copied().unwrap_or_default();
        check_counts("gather", rank, size, counts, (own, tensor.dims()[0]))?;
        let call =
            Call { counts: counts.to_vec(), root: Some(root), ..Call::on("gather", &tensor) };
        let mut send = vec![0; size];
        send[root] = own;
        let receive = if rank == root { counts.to_vec() } else { vec![0; size] };
        self.exchange(call, tensor, &send, &receive)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.shared.peers.control.all_gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        check_root("gather_bytes", self.rank(), self.size(), root)?;
        self.shared.peers.control.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        check_root("broadcast_bytes", self.rank(), self.size(), root)?;
        self.shared.peers.control.broadcast_bytes(bytes, root)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        self.shared.peers.control.first_bytes(bytes)
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.shared.peers.control.or_bytes(bytes)
    }

    fn set_busy(&self, busy: bool) {
        self.shared.peers.control.set_busy(busy);
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let Peers { control: parent, group } = &*self.shared.peers;
        let (control, first) = parent.split(color, key)?;
        // The first member's rank tells the groups apart, whatever the colors are.
        let group = group.split(parent, &control, first as c_int);
        let group = group.inspect_err(|error| self.fail(&error.to_string()))?;
        let shared = Shared::new(Peers { control, group }, self.shared.memory.clone());
        Ok(Box::new(Self { shared, reduction: self.reduction }))
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.watch.flush()?;
        // What another rank sent after a failure is not to be used either.
        self.shared.peers.control.check()
    }

    fn fail(&self, cause: &str) {
        // In this order: that NCCL ended is an effect, and the cause should be known before it.
        self.shared.peers.control.fail(cause);
        self.shared.peers.group.abort();
    }
}
