//! Calls of NCCL on their way, and the memory that they use.

use std::fmt::{self, Debug};
use std::os::raw::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use burn::tensor::Tensor;
use cudarc::nccl::sys::ncclComm_t;

use super::super::control::Elsewhere;
use super::super::{Call, Pending, check_dtype};
use super::library::Library;
use super::memory::{Buffer, Mark, Memory};
use super::peers::Peers;
use super::watch::Watch;
use crate::error::Result;

/// The parts of a group that its calls hold on to. Fields are dropped in this order.
#[derive(Debug)]
pub struct Shared {
    pub watch: Watch,
    pub peers: Arc<Peers>,
    /// Memory of calls that are not waited for any more.
    orphans: Mutex<Vec<Used>>,
    pub memory: Arc<dyn Memory>,
}

/// The arguments that all calls take.
pub struct Arguments<'a> {
    pub nccl: &'a Library,
    pub comm: ncclComm_t,
    pub send: &'a Buffer,
    pub receive: &'a Buffer,
    pub stream: *mut c_void,
}

/// The buffers of a call.
struct Used {
    buffers: [Buffer; 2],
    /// The places in the stream at which the call may start and has finished; nothing where that could
    /// not be marked.
    marks: Option<[Box<dyn Mark>; 2]>,
}

/// A call on its way. Dropped unfinished, it leaves its memory to the group: NCCL still uses it.
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

impl Shared {
    pub fn new(peers: Peers, memory: Arc<dyn Memory>) -> Arc<Self> {
        let peers = Arc::new(peers);
        let watch = Watch::new(peers.clone());
        Arc::new(Self { watch, peers, orphans: Mutex::default(), memory })
    }

    /// Starts a call, which `give` hands to NCCL, and which receives `received` elements. Both buffers
    /// are held until the stream has passed the call.
    pub fn start(
        self: &Arc<Self>,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        give: impl FnOnce(Arguments<'_>) -> c_int,
    ) -> Result<Pending> {
        let Peers { control, group } = &*self.peers;
        check_dtype(call.collective, control.rank(), tensor.dtype())?;
        self.watch.check()?;
        self.bury();
        let call = control.announce(call);
        // In this order: taking the buffers queues all work on them, which `begin` then waits for.
        let taken = self.memory.buffer(tensor).and_then(|send| {
            let receive = self.memory.empty(received, send.dtype())?;
            Ok((send, receive, self.memory.begin()?))
        });
        // The call is counted as made: the others would wait for it until the deadline.
        let (send, receive, (stream, ready)) =
            taken.map_err(|error| self.peers.end(&call, error))?;
        let given = group.lock(control.rank(), &call.call).map(|comm| {
            let (send, receive) = (&send, &receive);
            give(Arguments { nccl: &group.library, comm: comm.0, send, receive, stream })
        });
        let settled = given.and_then(|code| group.settle(control, &call, code));
        settled.map_err(|error| {
            // When the world has ended, NCCL uses no buffers any more. A call before this one may
            // have failed first, and ended it: its error is the cause.
            let error = self.peers.end(&call, error);
            self.watch.flush().err().unwrap_or(error)
        })?;
        let bytes = send.bytes() + receive.bytes();
        let mut used = Used { buffers: [send, receive], marks: None };
        used.marks = match self.memory.end() {
            Ok(done) => Some([ready, done]),
            Err(error) => {
                // NCCL has taken the call and uses the buffers until the communicator is gone.
                self.orphans().push(used);
                return Err(self.peers.end(&call, error));
            }
        };
        let started = Started { shared: self.clone(), call, used: Some(used) };
        Ok(Pending::new(bytes, move || started.finish()))
    }

    fn orphans(&self) -> MutexGuard<'_, Vec<Used>> {
        self.orphans.lock().expect("nothing panics while it holds the lock")
    }

    /// Frees the memory of finished calls that were never waited for.
    fn bury(&self) {
        let is_used = |used: &Used| match &used.marks {
            Some([_, done]) => !matches!(done.is_passed(), Ok(true)),
            None => true,
        };
        self.orphans().retain(is_used);
    }
}

impl Started {
    /// Returns the result. If the device supports it, later work waits for the result there: the call
    /// is followed to its end, and its buffers may go, since reuse of their memory is later work. Else
    /// this waits.
    fn finish(mut self) -> Result<Tensor<1>> {
        const ONCE: &str = "a call is finished once, and its marks were set when it started";
        let Self { shared, call, used } = &mut self;
        let marks = used.as_ref().and_then(|used| used.marks.as_ref());
        let [ready, done] = marks.expect(ONCE).each_ref().map(|mark| &**mark);
        let held = done.hold_later_work().map_err(|error| shared.peers.end(call, error))?;
        if !held {
            shared.peers.finish(call, [ready, done], thread::yield_now)?;
        }
        let Used { buffers: [_, receive], marks } = used.take().expect(ONCE);
        if held {
            shared.watch.follow(call.clone(), marks.expect(ONCE));
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
