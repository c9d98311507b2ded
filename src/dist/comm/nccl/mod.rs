//! The engine for ranks with a GPU each: threads of one process, processes, or hosts, over NCCL.
//!
//! Every group has a communicator of its own. Its calls don't block: after each, NCCL is asked how it
//! went until it says, so that a rank that waits for a dead one is told by [`Control`] and ends it.
//! Sums are NCCL's, in an order of its choice, in float32: half precision is widened before and
//! rounded once after. Parts of unequal size go as grouped calls, one for every rank.

mod cuda;
mod library;
mod memory;

use std::fmt::{self, Debug};
use std::os::raw::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{Device, FloatDType, Tensor};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};

use super::control::{Control, Elsewhere, Meeting};
use super::{
    Call, Communicator, Pending, ReduceOp, before, check_counts, check_dtype, check_root,
    exchange_pairs,
};
use crate::dist::Launch;
use crate::error::{Error, Result};
use cuda::CudaMemory;
use library::{Config, ENGINE, Library, dotted, is_fine};
pub use memory::{Buffer, Mark, Memory};

const F32: c_int = ncclDataType_t::ncclFloat32 as c_int;
const BYTE: c_int = ncclDataType_t::ncclUint8 as c_int;
const SUM: c_int = ncclRedOp_t::ncclSum as c_int;
/// How long a communicator may take to end in peace.
const FAREWELL: Duration = Duration::from_secs(10);

/// Engine of GPUs over NCCL.
#[derive(Debug)]
pub struct Nccl {
    shared: Arc<Shared>,
}

/// What calls on their way hold on to.
#[derive(Debug)]
struct Shared {
    control: Control,
    group: Group,
    /// What calls use that nobody waits for any more.
    orphans: Mutex<Vec<Used>>,
    memory: Arc<dyn Memory>,
}

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

/// A communicator of NCCL.
struct Group {
    library: Arc<Library>,
    comm: Mutex<Handle>,
    ended: AtomicBool,
}

struct Handle(ncclComm_t);

// SAFETY: NCCL allows any thread to use a communicator, one at a time, which the mutex sees to.
unsafe impl Send for Handle {}

impl Debug for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.buffers)
    }
}

impl Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL communicator of {:?}", self.library.path)
    }
}

impl Nccl {
    /// The engine of a process with one CUDA device. A rank that waits for another longer than
    /// `deadline` gives up for all.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if NCCL or the device can't be used, [`Error::Launch`] without an address,
    /// [`Error::Rendezvous`] if the ranks don't find together.
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
        Ok(Self { shared: Arc::new(Shared::new(control, group, memory)) })
    }

    /// Starts a call: `launch` gives it to NCCL, with the sending and the receiving buffer.
    fn start(
        &self,
        call: Call,
        send: Tensor<1>,
        received: usize,
        launch: impl FnOnce(&Library, ncclComm_t, [&Buffer; 2], *mut c_void) -> c_int,
    ) -> Result<impl FnOnce() -> Result<Tensor<1>> + Send + 'static> {
        let shared = self.shared.clone();
        shared.bury();
        let call = shared.control.announce(call);
        let send = shared.memory.buffer(send)?;
        let receive = shared.memory.empty(received, send.dtype)?;
        let code = {
            let comm = shared.group.lock();
            let stream = shared.memory.begin()?;
            launch(&shared.group.library, comm.0, [&send, &receive], stream)
        };
        let settled = shared.group.settle(&shared.control, &call, code);
        // After this, NCCL uses no buffers any more.
        settled.map_err(|error| shared.end(&call, error))?;
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
        launch: impl FnOnce(&Library, ncclComm_t, [&Buffer; 2], *mut c_void) -> c_int,
    ) -> Result<Pending> {
        check_dtype(call.collective, self.rank(), tensor.dtype())?;
        Ok(Pending::new(self.start(call, tensor, received, launch)?))
    }

    /// Starts a call that adds up, in float32.
    fn reduced(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        launch: impl FnOnce(&Library, ncclComm_t, [&Buffer; 2], *mut c_void) -> c_int,
    ) -> Result<Pending> {
        check_dtype(call.collective, self.rank(), tensor.dtype())?;
        let (dtype, size) = (tensor.dtype(), self.size());
        let op = call.op.expect("a call that adds up");
        let finish = self.start(call, tensor.cast(FloatDType::F32), received, launch)?;
        Ok(Pending::new(move || Ok(op.finish(finish()?, size, dtype))))
    }
}

impl Started {
    fn finish(mut self) -> Result<Tensor<1>> {
        let Self { shared, call, used } = &mut self;
        let mark = &used.as_ref().expect("it is finished once").mark;
        let finished = shared.control.wait(call, || {
            shared.group.check(shared.control.rank(), &call.call)?;
            mark.is_passed()
        });
        finished.map_err(|error| shared.end(call, error))?;
        let [_, receive] = used.take().expect("it is finished once").buffers;
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
    fn new(control: Control, group: Group, memory: Arc<dyn Memory>) -> Self {
        Self { control, group, memory, orphans: Mutex::default() }
    }

    /// Frees what finished calls used that nobody waited for.
    fn bury(&self) {
        let mut orphans = self.orphans.lock().expect("nothing panics while it holds the lock");
        orphans.retain(|used| !matches!(used.mark.is_passed(), Ok(true)));
    }

    /// Ends the world because of an error, and what NCCL still does.
    fn end(&self, call: &Elsewhere, error: Error) -> Error {
        let cause = self.control.cause_of(call, error);
        self.group.abort();
        cause
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.control.has_failed() { self.group.abort() } else { self.group.part() }
    }
}

impl Group {
    /// The communicator of all ranks, which rank 0 gives a name.
    fn world(library: Arc<Library>, control: &Control) -> Result<Self> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        let own = if control.rank() == 0 {
            // SAFETY: it writes one identity.
            let code = unsafe { (library.get_unique_id)(&mut id) };
            failed(&library, null_mut(), code, 0, "ncclGetUniqueId")?;
            id.internal.map(|byte| byte.to_ne_bytes()[0]).to_vec()
        } else {
            vec![]
        };
        let ids = control.all_gather_bytes(own)?;
        for (byte, received) in id.internal.iter_mut().zip(&ids[0]) {
            *byte = i8::from_ne_bytes([*received]) as _;
        }
        let (rank, size) = (control.rank() as c_int, control.size() as c_int);
        let mut config = Config::nonblocking();
        let mut comm = null_mut();
        // SAFETY: `comm` is written, and the settings are read during the call.
        let code = unsafe { (library.init_rank)(&mut comm, size, id, rank, &mut config) };
        Self::made(library, comm, control, code, "ncclCommInitRankConfig")
    }

    /// The communicator of some of the ranks, all of which call this.
    fn split(&self, parent: &Control, control: &Control, color: c_int) -> Result<Self> {
        let mut config = Config::nonblocking();
        let mut comm = null_mut();
        let library = self.library.clone();
        let key = control.rank() as c_int;
        // SAFETY: as of `ncclCommInitRankConfig`.
        let code = unsafe { (library.split)(self.lock().0, color, key, &mut comm, &mut config) };
        let call = parent.announce("split");
        let settled = self.settle(parent, &call, code);
        settled.map_err(|error| parent.cause_of(&call, error))?;
        Self::made(library, comm, control, code, "ncclCommSplit")
    }

    /// Waits until a communicator can be used.
    fn made(
        library: Arc<Library>,
        comm: ncclComm_t,
        control: &Control,
        code: c_int,
        operation: &'static str,
    ) -> Result<Self> {
        failed(&library, null_mut(), code, control.rank(), operation)?;
        let group = Self { library, comm: Mutex::new(Handle(comm)), ended: AtomicBool::new(false) };
        let call = control.announce(operation);
        group.settle(control, &call, code).map_err(|error| {
            let cause = control.cause_of(&call, error);
            group.abort();
            cause
        })?;
        Ok(group)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Handle> {
        self.comm.lock().expect("nothing panics while it holds the lock")
    }

    /// How NCCL's last call went: whether it is done with it.
    fn check(&self, rank: usize, operation: &str) -> Result<bool> {
        let comm = self.lock();
        if self.ended.load(Ordering::SeqCst) {
            let reason = "the communicator was ended by another call".to_owned();
            let remedy = "see the error of that call";
            return Err(Error::Engine {
                engine: ENGINE,
                rank,
                operation: operation.to_owned(),
                reason,
                remedy,
            });
        }
        let mut state = 0;
        // SAFETY: the communicator is alive, and one number is written.
        let code = unsafe { (self.library.async_error)(comm.0, &mut state) };
        failed(&self.library, comm.0, code, rank, operation)?;
        failed(&self.library, comm.0, state, rank, operation)?;
        Ok(state == ncclResult_t::ncclSuccess as c_int)
    }

    /// Waits until NCCL has taken a call, which is not until it is carried out.
    fn settle(&self, control: &Control, call: &Elsewhere, code: c_int) -> Result<()> {
        failed(&self.library, self.lock().0, code, control.rank(), &call.call)?;
        control.wait(call, || self.check(control.rank(), &call.call))
    }

    /// Ends what is on its way, however it stands.
    fn abort(&self) {
        let comm = self.lock();
        if !self.ended.swap(true, Ordering::SeqCst) && !comm.0.is_null() {
            // SAFETY: the communicator is alive, and not used afterwards.
            unsafe { (self.library.abort)(comm.0) };
        }
    }

    /// Ends the communicator when all is done.
    fn part(&self) {
        {
            let comm = self.lock();
            if self.ended.load(Ordering::SeqCst) || comm.0.is_null() {
                return;
            }
            // SAFETY: the communicator is alive.
            unsafe { (self.library.finalize)(comm.0) };
        }
        let start = Instant::now();
        loop {
            match self.check(0, "ncclCommFinalize") {
                Ok(true) => break,
                Ok(false) if start.elapsed() < FAREWELL => thread::yield_now(),
                _ => return self.abort(),
            }
        }
        self.ended.store(true, Ordering::SeqCst);
        // SAFETY: the communicator is alive, and not used afterwards.
        unsafe { (self.library.destroy)(self.lock().0) };
    }
}

/// An error of a call that went wrong at once.
fn failed(
    library: &Library,
    comm: ncclComm_t,
    code: c_int,
    rank: usize,
    operation: &str,
) -> Result<()> {
    if is_fine(code) {
        return Ok(());
    }
    Err(Error::Engine {
        engine: ENGINE,
        rank,
        operation: operation.to_owned(),
        reason: library.words(code, comm),
        remedy: "set NCCL_DEBUG=WARN on all ranks and look at what NCCL writes",
    })
}

/// Calls that NCCL takes as one. The first that is refused counts.
fn grouped(library: &Library, calls: impl Iterator<Item = c_int>) -> c_int {
    // SAFETY: every start has its end.
    let start = unsafe { (library.group_start)() };
    let refused =
        calls.filter(|code| !is_fine(*code)).fold(None, |first, code| first.or(Some(code)));
    // SAFETY: as above.
    let end = unsafe { (library.group_end)() };
    [Some(start), refused, Some(end)]
        .into_iter()
        .flatten()
        .find(|code| !is_fine(*code))
        .unwrap_or(end)
}

impl Communicator for Nccl {
    fn engine(&self) -> &'static str {
        ENGINE
    }

    fn version(&self) -> String {
        let library = &self.shared.group.library;
        format!("NCCL {} ({})", dotted(library.version()), library.path.display())
    }

    fn rank(&self) -> usize {
        self.shared.control.rank()
    }

    fn size(&self) -> usize {
        self.shared.control.size()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        let length = tensor.dims()[0];
        let call = Call { counts: vec![length], op: Some(op), ..Call::on("all_reduce", &tensor) };
        self.reduced(call, tensor, length, |nccl, comm, [from, to], stream| {
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
        self.reduced(call, tensor, own, |nccl, comm, [from, to], stream| {
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
        self.moved(call, tensor, counts.iter().sum(), |nccl, comm, [from, to], stream| {
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
        check_root(self.rank(), self.size(), root)?;
        let length = tensor.dims()[0];
        let call =
            Call { counts: vec![length], root: Some(root), ..Call::on("broadcast", &tensor) };
        let bytes = length * tensor.dtype().size();
        self.moved(call, tensor, length, |nccl, comm, [from, to], stream| {
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
        self.moved(call, tensor, receive.iter().sum(), |nccl, comm, [from, to], stream| {
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

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.shared.control.all_gather_bytes(bytes)
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let Shared { control: parent, group, memory, .. } = &*self.shared;
        let (control, members) = parent.split(color, key)?;
        // The first member's rank tells the groups apart, whatever the colors are.
        let group = group.split(parent, &control, members[0] as c_int);
        let group = group.inspect_err(|error| self.fail(&error.to_string()))?;
        Ok(Box::new(Self { shared: Arc::new(Shared::new(control, group, memory.clone())) }))
    }

    fn fail(&self, cause: &str) {
        // In this order: that NCCL ended is an effect, and the cause should be known before it.
        self.shared.control.fail(cause);
        self.shared.group.abort();
    }
}
