//! Calls of NCCL in flight, and the memory that they use.

use std::fmt::{self, Debug};
use std::os::raw::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use burn::tensor::Tensor;
use cudarc::nccl::sys::ncclComm_t;

use super::library::Library;
use super::memory::{Buffer, DeviceMemory, StreamEvent};
use super::peers::Peers;
use super::watch::Watch;
use crate::comm::Pending;
use crate::comm::call::Call;
use crate::comm::control::ExternalCall;
use crate::error::Result;

/// The state of a group that its calls share.
///
/// Fields are dropped in this order: the thread that follows calls ends before NCCL's communicator,
/// and both before the memory that NCCL uses.
#[derive(Debug)]
pub struct Shared {
    pub watch: Watch,
    pub peers: Arc<Peers>,
    /// The buffers of calls whose results were dropped.
    abandoned: Mutex<Vec<InUse>>,
    pub memory: Arc<dyn DeviceMemory>,
}

/// The arguments that all calls have in common.
pub struct Arguments<'a> {
    pub nccl: &'a Library,
    pub comm: ncclComm_t,
    pub send: &'a Buffer,
    pub receive: &'a Buffer,
    pub stream: *mut c_void,
}

/// The buffers of a call, which NCCL may use.
struct InUse {
    buffers: [Buffer; 2],
    /// The events at which the call may start and has finished. `None` if the second one could not
    /// be recorded.
    events: Option<[Box<dyn StreamEvent>; 2]>,
}

/// A call in flight. Dropped unfinished, it moves its buffers to the group, since NCCL still uses
/// them.
struct StartedCall {
    shared: Arc<Shared>,
    call: ExternalCall,
    in_use: Option<InUse>,
}

impl Debug for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.buffers)
    }
}

impl Shared {
    pub fn new(peers: Peers, memory: Arc<dyn DeviceMemory>) -> Arc<Self> {
        let peers = Arc::new(peers);
        let watch = Watch::new(peers.clone());
        Arc::new(Self { watch, peers, abandoned: Mutex::default(), memory })
    }

    /// Starts a call that receives `received` elements. `launch` passes the call to NCCL. Both
    /// buffers are kept until the stream has passed the call.
    pub fn start(
        self: &Arc<Self>,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        launch: impl FnOnce(Arguments<'_>) -> c_int,
    ) -> Result<Pending> {
        let Peers { control, comm } = &*self.peers;
        self.watch.check()?;
        self.release_finished();
        let call = control.begin_call(call);
        // In this order: making the buffers queues all work on them, which `begin` then waits for.
        let prepared = self.memory.buffer(tensor).and_then(|send| {
            let receive = self.memory.empty(received, send.dtype())?;
            Ok((send, receive, self.memory.begin()?))
        });
        // The call counts as made: without an error, the others would wait for it until the
        // deadline.
        let (send, receive, (stream, ready)) =
            prepared.map_err(|error| self.peers.end(&call, error))?;
        let launched = comm.lock(control.rank(), &call.call).map(|handle| {
            let (send, receive) = (&send, &receive);
            launch(Arguments { nccl: &comm.library, comm: handle.0, send, receive, stream })
        });
        let settled = launched.and_then(|code| comm.settle(control, &call, code));
        settled.map_err(|error| {
            // When the world has ended, NCCL no longer uses the buffers. A call before this one may
            // have failed first, and ended the world: its error is the cause.
            let error = self.peers.end(&call, error);
            self.watch.flush().err().unwrap_or(error)
        })?;
        let bytes = send.bytes() + receive.bytes();
        let mut in_use = InUse { buffers: [send, receive], events: None };
        in_use.events = match self.memory.end() {
            Ok(done) => Some([ready, done]),
            Err(error) => {
                // NCCL has accepted the call and uses the buffers until the communicator is
                // aborted.
                self.abandoned().push(in_use);
                return Err(self.peers.end(&call, error));
            }
        };
        let started = StartedCall { shared: self.clone(), call, in_use: Some(in_use) };
        Ok(Pending::new(bytes, move || started.finish()))
    }

    fn abandoned(&self) -> MutexGuard<'_, Vec<InUse>> {
        self.abandoned.lock().expect("nothing panics while it holds the lock")
    }

    /// Frees the buffers of finished calls whose results were dropped.
    fn release_finished(&self) {
        // An event that can't be queried keeps its buffers: NCCL may still use them.
        let is_in_use = |in_use: &InUse| match &in_use.events {
            Some([_, done]) => !matches!(done.is_passed(), Ok(true)),
            None => true,
        };
        self.abandoned().retain(is_in_use);
    }
}

impl StartedCall {
    /// Returns the result. If the device supports it, later work waits for the result there. The
    /// call is then followed until it ends, and its buffers may be dropped, since reuse of their
    /// memory is later work. Otherwise this function waits.
    fn finish(mut self) -> Result<Tensor<1>> {
        const ONCE: &str = "a call is finished once, and its events were recorded when it started";
        let Self { shared, call, in_use } = &mut self;
        let events = in_use.as_ref().and_then(|in_use| in_use.events.as_ref());
        let [ready, done] = events.expect(ONCE).each_ref().map(|event| &**event);
        let later_work_waits =
            done.make_later_work_wait().map_err(|error| shared.peers.end(call, error))?;
        if !later_work_waits {
            shared.peers.finish(call, [ready, done], thread::yield_now)?;
        }
        let InUse { buffers: [_, receive], events } = in_use.take().expect(ONCE);
        if later_work_waits {
            shared.watch.follow(call.clone(), events.expect(ONCE));
        }
        Ok(shared.memory.tensor(receive))
    }
}

impl Drop for StartedCall {
    fn drop(&mut self) {
        // A poisoned lock is not a reason to panic in a drop.
        if let (Some(in_use), Ok(mut abandoned)) =
            (self.in_use.take(), self.shared.abandoned.lock())
        {
            abandoned.push(in_use);
        }
    }
}
