//! The engine for ranks with a GPU each: threads of one process, processes, or hosts, over NCCL.
//!
//! Every group has a communicator of its own. Its calls don't block: after each, NCCL is asked how it
//! went until it says, so that a rank that waits for a dead one is told by [`Control`] and ends it.
//! Sums are NCCL's, in an order of its choice, in float32: half precision is widened before and
//! rounded once after. Parts of unequal size go as grouped calls, one for every rank.
//!
//! A result may be used before it is there, if the device makes what uses it wait. Then a thread
//! ([`Watch`]) sees to it that it comes.

mod cuda;
mod group;
mod library;
mod memory;
mod peers;
mod watch;

use std::fmt::{self, Debug};
use std::os::raw::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, FloatDType, Tensor};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::control::{Elsewhere, Meeting};
use super::{
    Call, Communicator, Pending, ReduceOp, before, check_counts, check_dtype, check_root,
    exchange_pairs,
};
use crate::dist::Launch;
use crate::error::Result;
pub use cuda::CudaMemory;
use group::{Group, grouped};
use library::{ENGINE, Library, dotted};
pub use memory::{Buffer, Mark, Memory};
use peers::Peers;
use watch::Watch;

const F32: c_int = ncclDataType_t::ncclFloat32 as c_int;
const BYTE: c_int = ncclDataType_t::ncclUint8 as c_int;
const SUM: c_int = ncclRedOp_t::ncclSum as c_int;

/// Engine of GPUs over NCCL.
#[derive(Debug)]
pub struct Nccl {
    shared: Arc<Shared>,
}

/// What calls on their way hold on to. Fields are dropped in this order.
#[derive(Debug)]
struct Shared {
    watch: Watch,
    peers: Arc<Peers>,
    /// What calls use that nobody waits for any more.
    orphans: Mutex<Vec<Used>>,
    memory: Arc<dyn Memory>,
}

/// Gives a call to NCCL, for a communicator: with the sending and the receiving buffer, on a stream.
type Give<'a> = &'a dyn Fn(&Library, ncclComm_t, [&Buffer; 2], *mut c_void) -> c_int;

/// The buffers of a call, and where the stream is when it has finished.
struct Used {
    buffers: [Buffer; 2],
    mark: Box<dyn Mark>,
}

/// A call on its way. Dropped unfinished, it leaves to the group what NCCL still uses.
struct Started {
    shared: Arc<Shared>,
    call: Elsewhere,
    used: Option<Used>,
}

impl Debug for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.buffers)
    }
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
        Ok(Self::of(Peers { control, group }, memory))
    }

    fn of(peers: Peers, memory: Arc<dyn Memory>) -> Self {
        let peers = Arc::new(peers);
        let watch = Watch::new(peers.clone());
        Self { shared: Arc::new(Shared { watch, peers, orphans: Mutex::default(), memory }) }
    }

    /// Starts a call.
    fn start(
        &self,
        call: Call,
        send: Tensor<1>,
        received: usize,
        give: Give<'_>,
    ) -> Result<impl FnOnce() -> Result<Tensor<1>> + Send + 'static> {
        let shared = self.shared.clone();
        shared.watch.check()?;
        shared.bury();
        let Peers { control, group } = &*shared.peers;
        let call = control.announce(call);
        let send = shared.memory.buffer(send)?;
        let receive = shared.memory.empty(received, send.dtype)?;
        let stream = shared.memory.begin()?;
        let given = group
            .lock(control.rank(), &call.call)
            .map(|comm| give(&group.library, comm.0, [&send, &receive], stream));
        let settled = given.and_then(|code| group.settle(control, &call, code));
        // After this, NCCL uses no buffers any more.
        settled.map_err(|error| shared.peers.end(&call, error))?;
        let mark = shared.memory.end()?;
        let used = Some(Used { buffers: [send, receive], mark });
        let started = Started { shared, call, used };
        Ok(move || started.finish())
    }

    /// Starts a call that moves elements as they are.
    fn moved(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        give: Give<'_>,
    ) -> Result<Pending> {
        check_dtype(call.collective, self.rank(), tensor.dtype())?;
        Ok(Pending::new(self.start(call, tensor, received, give)?))
    }

    /// Starts a call that adds up, in float32.
    fn reduced(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        give: Give<'_>,
    ) -> Result<Pending> {
        check_dtype(call.collective, self.rank(), tensor.dtype())?;
        let (dtype, size) = (tensor.dtype(), self.size());
        let op = call.op.expect("a call that adds up");
        let finish = self.start(call, tensor.cast(FloatDType::F32), received, give)?;
        Ok(Pending::new(move || Ok(op.finish(finish()?, size, dtype))))
    }
}

impl Started {
    /// The result. Later work waits for it on the device, if that can be had: the call is followed to
    /// its end, and its buffers may go, since what becomes of their memory is later work. Else this
    /// waits.
    fn finish(mut self) -> Result<Tensor<1>> {
        let Self { shared, call, used } = &mut self;
        let mark = &used.as_ref().expect("it is finished once").mark;
        let held = mark.hold_later_work().map_err(|error| shared.peers.end(call, error))?;
        if !held {
            shared.peers.finish(call, &**mark, thread::yield_now)?;
        }
        let Used { buffers: [_, receive], mark } = used.take().expect("it is finished once");
        if held {
            shared.watch.follow(call.clone(), mark);
        }
        Ok(shared.memory.tensor(receive))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let (Some(used), Ok(mut orphans)) = (self.used.take(), self.shared.orphans.lock()) {
            orphans.push(used);
        }
    }
}

impl Shared {
    /// Frees what finished calls used that nobody waited for.
    fn bury(&self) {
        let mut orphans = self.orphans.lock().expect("nothing panics while it holds the lock");
        orphans.retain(|used| !matches!(used.mark.is_passed(), Ok(true)));
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
        let length = tensor.dims()[0];
        let call = Call { counts: vec![length], op: Some(op), ..Call::on("all_reduce", &tensor) };
        self.reduced(call, tensor, length, &|nccl, comm, [from, to], stream| {
            // SAFETY: both buffers hold that many floats and are held until the stream has passed.
            unsafe { (nccl.all_reduce)(from.pointer, to.pointer, length, F32, SUM, comm, stream) }
        })
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let lengths = (counts.iter().sum(), tensor.dims()[0]);
        check_counts("reduce_scatter", self.rank(), self.size(), counts, lengths)?;
        let call =
            Call { counts: counts.to_vec(), op: Some(op), ..Call::on("reduce_scatter", &tensor) };
        let own = counts[self.rank()];
        self.reduced(call, tensor, own, &|nccl, comm, [from, to], stream| {
            // SAFETY: the buffers hold the sum of the counts and the own count, and are held until the
            // stream has passed.
            if counts.iter().all(|count| *count == own) {
                return unsafe {
                    (nccl.reduce_scatter)(from.pointer, to.pointer, own, F32, SUM, comm, stream)
                };
            }
            let roots = (0..counts.len()).filter(|root| counts[*root] > 0);
            grouped(
                nccl,
                roots.map(|root| unsafe {
                    let (part, count) = (from.at(before(counts, root)), counts[root]);
                    (nccl.reduce)(part, to.pointer, count, F32, SUM, root as c_int, comm, stream)
                }),
            )
        })
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("all_gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let call = Call { counts: counts.to_vec(), ..Call::on("all_gather", &tensor) };
        let width = tensor.dtype().size();
        self.moved(call, tensor, counts.iter().sum(), &|nccl, comm, [from, to], stream| {
            // SAFETY: the buffers hold the own count and the sum of the counts, and are held until the
            // stream has passed.
            if counts.iter().all(|count| *count == own) {
                return unsafe {
                    (nccl.all_gather)(from.pointer, to.pointer, own * width, BYTE, comm, stream)
                };
            }
            let roots = (0..counts.len()).filter(|root| counts[*root] > 0);
            grouped(
                nccl,
                roots.map(|root| unsafe {
                    let (part, bytes) = (to.at(before(counts, root)), counts[root] * width);
                    (nccl.broadcast)(from.pointer, part, bytes, BYTE, root as c_int, comm, stream)
                }),
            )
        })
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        check_root("broadcast", self.rank(), self.size(), root)?;
        let length = tensor.dims()[0];
        let call =
            Call { counts: vec![length], root: Some(root), ..Call::on("broadcast", &tensor) };
        let bytes = length * tensor.dtype().size();
        self.moved(call, tensor, length, &|nccl, comm, [from, to], stream| {
            // SAFETY: both buffers hold that many bytes and are held until the stream has passed.
            unsafe {
                (nccl.broadcast)(from.pointer, to.pointer, bytes, BYTE, root as c_int, comm, stream)
            }
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending> {
        let (rank, size) = (self.rank(), self.size());
        check_counts("all_to_all", rank, size, send, (send.iter().sum(), tensor.dims()[0]))?;
        check_counts("all_to_all", rank, size, receive, (0, 0))?;
        exchange_pairs(self, send, receive)?;
        let call = Call::on("all_to_all", &tensor);
        let width = tensor.dtype().size();
        self.moved(call, tensor, receive.iter().sum(), &|nccl, comm, [from, to], stream| {
            // SAFETY: the buffers hold the sums of their counts, and are held until the stream has passed.
            let sends = (0..size).filter(|peer| send[*peer] > 0).map(|peer| unsafe {
                let (part, bytes) = (from.at(before(send, peer)), send[peer] * width);
                (nccl.send)(part, bytes, BYTE, peer as c_int, comm, stream)
            });
            let receives = (0..size).filter(|peer| receive[*peer] > 0).map(|peer| unsafe {
                let (part, bytes) = (to.at(before(receive, peer)), receive[peer] * width);
                (nccl.receive)(part, bytes, BYTE, peer as c_int, comm, stream)
            });
            grouped(nccl, sends.chain(receives))
        })
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<Pending> {
        let own = tensor.dims()[0];
        let mut send = vec![0; self.size()];
        send[root] = own;
        let receive = if root == self.rank() { counts.to_vec() } else { vec![0; self.size()] };
        self.all_to_all(tensor, &send, &receive)
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

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let Peers { control: parent, group } = &*self.shared.peers;
        let (control, first) = parent.split(color, key)?;
        // The first member's rank tells the groups apart, whatever the colors are.
        let group = group.split(parent, &control, first as c_int);
        let group = group.inspect_err(|error| self.fail(&error.to_string()))?;
        Ok(Box::new(Self::of(Peers { control, group }, self.shared.memory.clone())))
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
