//! The engine for ranks with a GPU each, over NCCL: processes on one host or many, or threads.
//!
//! Every group has its communicator of NCCL, whose calls do not block. After each call, NCCL is
//! polled until it has accepted the call. A rank that waits for a dead one therefore learns of the
//! death from [`Control`](super::control::Control), and aborts the communicator.
//!
//! A result may be used before its call has finished, if the device makes the work wait that uses
//! it. A thread ([`watch`]) then waits until the call has finished, or aborts it.

mod call;
mod cuda;
mod group;
mod library;
mod memory;
mod native_reduction;
mod peers;
mod watch;

use std::os::raw::c_int;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use cudarc::nccl::sys::ncclDataType_t;

use super::call::Call;
use super::control::{Endpoint, random_secret};
use super::counts::offsets;
use super::reduce_by_exchange::{self, MovesParts};
use super::validate::assert_fits;
use super::{Engine, Launch, PairCounts, Pending, PendingParts, ReduceOp};
use crate::error::Result;
use crate::flat;
use call::Shared;
pub use cuda::CudaMemory;
pub use distmuon_kernels::operands::Order;
use group::{RawCommunicator, grouped};
use library::{ENGINE, Library, dotted};
pub use memory::{Buffer, DeviceMemory, StreamEvent};
use peers::Peers;

// Parts are moved as bytes, in one way for all types of elements. Only native reductions name a
// type.
const BYTE: c_int = ncclDataType_t::ncclUint8 as c_int;

/// The kind of reductions of the engine [`Nccl`].
///
/// In a reduce_scatter of `B` elements with even shards, each of `N` ranks sends `(N - 1) / N B`
/// elements with either kind, and in an all_reduce twice that number. `Exact` sends elements in
/// their type, `Native` in float32. For 6.5 million elements (25 MiB of float32) on 8 ranks, a rank
/// sends:
///
/// | | float32 | float16, bfloat16 |
/// |---|---|---|
/// | `Exact` | 21.9 MiB | 10.9 MiB |
/// | `Native` | 21.9 MiB | 21.9 MiB |
///
/// `Exact` also needs memory of the size of the buffer for the received elements, and a pass over
/// that memory. On an H100, memory is read at 3350 GB/s, whereas NVLink transfers 450 GB/s and a
/// network 50 GB/s. Between hosts, `Exact` sends more. On `n` hosts of `d` ranks, each rank sends
/// `(n - 1) / n B` elements to other hosts. All ranks of a host together send `d` times that, where
/// a ring of NCCL sends `(N - 1) / N B`. Sums inside hosts, as by
/// [`World::by_node`](crate::comm::World::by_node), reduce that to `(n - 1) / n B` per host, and
/// [`World::nccl`](crate::comm::World::nccl) takes them on several hosts. `Native` does not need
/// them: its rings cross the boundary of a host once.
///
/// These numbers are computed; neither kind was measured on several GPUs. `Exact` is best with
/// shards of many ranks in each buffer: a rank that owns the whole buffer receives twice its size,
/// while the links of the other ranks are idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Reduction {
    /// Sums with the same bits as on every other engine and any topology: the contributions to a
    /// part are sent to its rank in their type, and added up there in float32, in the order of
    /// ranks.
    ///
    /// This is the default, since it is reproducible, and moves the same number of bytes as
    /// `Native` in float32, and half that number in half precision.
    #[default]
    Exact,
    /// NCCL's reductions, in float32 and in an order that NCCL chooses, over rings or trees or in
    /// the network's switches. Sums differ between topologies and versions of NCCL in their last
    /// bits.
    Native,
}

/// The point at which ranks that are threads of one process meet.
pub(super) struct Meeting {
    size: usize,
    address: String,
    /// Rank 0's, until it joins.
    endpoint: Mutex<Option<Endpoint>>,
    secret: String,
}

impl Meeting {
    /// Listens at a free port of this host, for this process only.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`](crate::Error::Rendezvous) if there is none,
    /// [`Error::Launch`](crate::Error::Launch) if the system has no random numbers.
    pub fn new(size: usize) -> Result<Self> {
        let endpoint = Endpoint::at_free_port("127.0.0.1")?;
        let address = endpoint.address.clone();
        Ok(Self { size, address, endpoint: Mutex::new(Some(endpoint)), secret: random_secret()? })
    }

    fn endpoint(&self, rank: usize) -> Endpoint {
        let mut first = self.endpoint.lock().expect("no holder of the lock panics");
        let first = if rank == 0 { first.take() } else { None };
        first.unwrap_or_else(|| Endpoint::known(self.address.clone()))
    }
}

/// The engine for ranks with a CUDA device each, over NCCL.
#[derive(Debug)]
pub struct Nccl {
    shared: Arc<Shared>,
    reduction: Reduction,
}

impl Nccl {
    /// Returns the version of the NCCL that is installed, as NCCL encodes it: 22903 is 2.29.3.
    ///
    /// ```no_run
    /// let version = distmuon::comm::Nccl::installed_version()?;
    /// assert!(version >= 21800, "ncclCommSplit came with 2.18");
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine) if NCCL is not found, or is too old.
    pub fn installed_version() -> Result<i32> {
        Ok(Library::load(0)?.version())
    }

    /// Connects a process with one CUDA device, and returns its engine. A rank that waits for
    /// another longer than `deadline` ends the world.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine) if NCCL or the device can't be used,
    /// [`Error::Launch`](crate::Error::Launch) without an address,
    /// [`Error::Rendezvous`](crate::Error::Rendezvous) if the ranks can't connect to each other.
    pub fn connect(launch: &Launch, device: &Device, deadline: Duration) -> Result<Self> {
        Self::of_process(|| cuda_memory(device, launch.rank), launch, deadline)
    }

    /// Connects a process whose tensors are in any memory that NCCL can access, and returns its
    /// engine.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn over(
        memory: Arc<dyn DeviceMemory>,
        launch: &Launch,
        deadline: Duration,
    ) -> Result<Self> {
        Self::of_process(|| Ok(memory), launch, deadline)
    }

    fn of_process(
        memory: impl FnOnce() -> Result<Arc<dyn DeviceMemory>>,
        launch: &Launch,
        deadline: Duration,
    ) -> Result<Self> {
        let Launch { rank, world_size, ref secret, .. } = *launch;
        let (host, port) = launch.required_address()?;
        Self::at(Endpoint::at(rank, host, port)?, memory, (rank, world_size), secret, deadline)
    }

    /// Connects a thread of a process whose ranks are threads.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub(super) fn meeting(
        memory: impl FnOnce() -> Result<Arc<dyn DeviceMemory>>,
        meeting: &Meeting,
        rank: usize,
        deadline: Duration,
    ) -> Result<Self> {
        let endpoint = meeting.endpoint(rank);
        Self::at(endpoint, memory, (rank, meeting.size), &meeting.secret, deadline)
    }

    /// Joins before all that may fail, so that the other ranks are told of it.
    fn at(
        endpoint: Endpoint,
        memory: impl FnOnce() -> Result<Arc<dyn DeviceMemory>>,
        (rank, world_size): (usize, usize),
        secret: &str,
        deadline: Duration,
    ) -> Result<Self> {
        let control = endpoint.join(rank, world_size, secret, deadline)?;
        let make = || -> Result<_> {
            let memory = memory()?;
            let library = Arc::new(Library::load(rank)?);
            Ok((RawCommunicator::world(library, &control)?, memory))
        };
        let (comm, memory) = make().inspect_err(|error| control.fail(&error.to_string()))?;
        let shared = Shared::new(Peers { control, comm }, memory);
        Ok(Self { shared, reduction: Reduction::default() })
    }

    /// Sets the kind of reductions, which has to be the same on all ranks.
    #[must_use]
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        Self { reduction, ..self }
    }
}

/// The memory of a rank's CUDA device.
pub(super) fn cuda_memory(device: &Device, rank: usize) -> Result<Arc<dyn DeviceMemory>> {
    Ok(Arc::new(CudaMemory::new(device, rank)?))
}

impl MovesParts for Nccl {
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
        assert_fits(&tensor, send.iter().sum(), [send, receive], self.size());
        let width = tensor.dtype().size();
        // Both sides skip empty parts, since their counts fit together.
        let filled = |counts: &[usize]| {
            let parts = offsets(counts).into_iter().zip(counts.to_vec()).enumerate();
            parts.filter(|(_, (_, count))| *count > 0)
        };
        self.shared.start(call, tensor, receive.iter().sum(), |arguments| {
            let (comm, stream) = (arguments.comm, arguments.stream);
            // SAFETY: the buffers hold the sums of their counts, and are kept until the stream has
            // passed the call.
            let sends = filled(send).map(|(peer, (start, count))| unsafe {
                let (part, bytes) = (arguments.send.address(start), count * width);
                (arguments.nccl.send)(part, bytes, BYTE, peer as c_int, comm, stream)
            });
            // SAFETY: as above.
            let receives = filled(receive).map(|(peer, (start, count))| unsafe {
                let (part, bytes) = (arguments.receive.address(start), count * width);
                (arguments.nccl.receive)(part, bytes, BYTE, peer as c_int, comm, stream)
            });
            grouped(arguments.nccl, sends.chain(receives))
        })
    }
}

impl Nccl {
    /// Lets this rank depart from its world, also while a model holds its communicators.
    pub(in crate::comm) fn departure(&self) -> impl FnOnce() + Send + use<> {
        self.shared.peers.control.departure()
    }
}

impl Engine for Nccl {
    fn engine_name(&self) -> &'static str {
        ENGINE
    }

    fn version(&self) -> String {
        let library = &self.shared.peers.comm.library;
        format!("NCCL {} ({})", dotted(library.version()), library.path.display())
    }

    fn rank(&self) -> usize {
        self.shared.peers.control.rank()
    }

    fn size(&self) -> usize {
        self.shared.peers.control.size()
    }

    fn communicators(&self) -> usize {
        self.shared.peers.control.groups()
    }

    fn has_exact_sums(&self) -> bool {
        self.reduction == Reduction::Exact
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        match self.reduction {
            Reduction::Exact => reduce_by_exchange::all_reduce(self, tensor, op),
            Reduction::Native => native_reduction::all_reduce(&self.shared, tensor, op),
        }
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        match self.reduction {
            Reduction::Exact => reduce_by_exchange::reduce_scatter(self, tensor, counts, op, dtype),
            Reduction::Native => {
                native_reduction::reduce_scatter(&self.shared, tensor, counts, op, dtype)
            }
        }
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let (op, dtype) = (ReduceOp::Sum, DType::F32);
        match self.reduction {
            Reduction::Exact => reduce_by_exchange::reduce_scatter(self, tensor, counts, op, dtype),
            Reduction::Native => {
                native_reduction::reduce_scatter(&self.shared, tensor, counts, op, dtype)
            }
        }
    }

    /// Uneven parts are sent as grouped broadcasts, one for every rank with a non-empty part, since
    /// NCCL's all_gather takes equal parts. Padded to the largest one, the parts of few owners
    /// would move up to `N` times the bytes. Broadcasts follow NCCL's rings, over which no rank
    /// sends more than the whole and every byte crosses the boundary of a host once. Sent to every
    /// rank directly, the largest part would leave its owner `N - 1` times.
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let sent = counts[self.rank()];
        assert_fits(&tensor, sent, [counts], self.size());
        let call = Call::all_gather(&tensor, counts);
        let width = tensor.dtype().size();
        self.shared.start(call, tensor, counts.iter().sum(), |arguments| {
            let (comm, stream) = (arguments.comm, arguments.stream);
            let (send, receive) = (arguments.send.address(0), arguments.receive.address(0));
            if counts.iter().all(|count| *count == sent) {
                // SAFETY: the buffers hold this rank's count and the same number for every rank,
                // and are kept until the stream has passed the call.
                return unsafe {
                    (arguments.nccl.all_gather)(send, receive, sent * width, BYTE, comm, stream)
                };
            }
            let parts = offsets(counts).into_iter().zip(counts).enumerate();
            let filled = parts.filter(|(_, (_, count))| **count > 0);
            // SAFETY: the buffers hold this rank's count and the sum of the counts, and are kept
            // until the stream has passed the call. Only the root of a broadcast reads the sent
            // buffer.
            let broadcasts = filled.map(|(root, (start, count))| unsafe {
                let (part, bytes) = (arguments.receive.address(start), count * width);
                (arguments.nccl.broadcast)(send, part, bytes, BYTE, root as c_int, comm, stream)
            });
            grouped(arguments.nccl, broadcasts)
        })
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        let length = tensor.dims()[0];
        let call = Call::broadcast(&tensor, root);
        let bytes = flat::bytes(&tensor);
        self.shared.start(call, tensor, length, |arguments| {
            let (send, receive) = (arguments.send.address(0), arguments.receive.address(0));
            let (comm, stream) = (arguments.comm, arguments.stream);
            let root = root as c_int;
            // SAFETY: both buffers hold that many bytes and are kept until the stream has passed
            // the call.
            unsafe { (arguments.nccl.broadcast)(send, receive, bytes, BYTE, root, comm, stream) }
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        self.exchange(Call::all_to_all(&tensor), tensor, &counts.sent, &counts.received)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
        let (rank, size) = (self.rank(), self.size());
        // An exchange in which only the root receives: parts may be uneven.
        let call = Call::gather(&tensor, counts, root);
        let mut send = vec![0; size];
        send[root] = counts[rank];
        let receive = if rank == root { counts.to_vec() } else { vec![0; size] };
        self.exchange(call, tensor, &send, &receive).map(Pending::in_one_tensor)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.shared.peers.control.all_gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        self.shared.peers.control.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
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

    fn set_busy_limit(&self, limit: Duration) {
        self.shared.peers.control.set_busy_limit(limit);
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Engine>> {
        let Peers { control: parent, comm } = &*self.shared.peers;
        // First what may fail on this rank alone, then the calls that all ranks make.
        let memory =
            self.shared.memory.for_group().inspect_err(|error| self.fail(&error.to_string()))?;
        let (control, first) = parent.split(color, key)?;
        // The rank of a group's first member is different for every group, whatever the colors are.
        let comm = comm.split(parent, &control, first as c_int);
        let comm = comm.inspect_err(|error| self.fail(&error.to_string()))?;
        let shared = Shared::new(Peers { control, comm }, memory);
        Ok(Arc::new(Self { shared, reduction: self.reduction }))
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.watch.flush()?;
        // Data that another rank has sent after a failure must not be used either.
        self.shared.peers.control.check()
    }

    fn fail(&self, cause: &str) {
        // In this order: the end of NCCL is an effect, and the other ranks should learn of the
        // cause before it.
        self.shared.peers.control.fail(cause);
        self.shared.peers.comm.abort();
    }
}
