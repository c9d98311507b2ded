//! A communicator of NCCL, whose calls do not block: after each of them, NCCL is polled for its
//! state.

use std::fmt::{self, Debug};
use std::os::raw::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclResult_t, ncclUniqueId};

use super::library::{Config, ENGINE, Library, is_ok_so_far};
use crate::comm::control::{COMPARE_AFTER, Control, ExternalCall, pause};
use crate::error::{Error, Result};

/// The time that a communicator may take to finalize before it is aborted.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(10);

/// A communicator of NCCL.
pub struct RawCommunicator {
    pub library: Arc<Library>,
    comm: Mutex<Handle>,
    /// Set when the communicator was aborted or destroyed. Its handle is invalid from then on.
    ended: AtomicBool,
    /// `true` if NCCL's last state blames another rank.
    blames_another: AtomicBool,
}

pub struct Handle(pub ncclComm_t);

// SAFETY: NCCL allows any thread to use a communicator, one at a time, which the mutex ensures.
unsafe impl Send for Handle {}

impl Debug for RawCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL communicator of {:?}", self.library.path)
    }
}

impl RawCommunicator {
    /// Returns the communicator of all ranks, with an identity that rank 0 creates.
    pub fn world(library: Arc<Library>, control: &Control) -> Result<Self> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        let bytes = if control.rank() == 0 {
            // SAFETY: the function writes one identity.
            let code = unsafe { (library.get_unique_id)(&mut id) };
            check_code(&library, null_mut(), code, 0, "ncclGetUniqueId")?;
            id.internal.map(|byte| byte.to_ne_bytes()[0]).to_vec()
        } else {
            vec![]
        };
        let bytes = control.broadcast_bytes(bytes, 0)?;
        for (byte, received) in id.internal.iter_mut().zip(&bytes) {
            // `c_char` is signed on some platforms only.
            *byte = i8::from_ne_bytes([*received]) as _;
        }
        let (rank, size) = (control.rank() as c_int, control.size() as c_int);
        let mut config = Config::nonblocking();
        let mut comm = null_mut();
        // SAFETY: `comm` is written, and the configuration is read during the call.
        let code = unsafe { (library.init_rank)(&mut comm, size, id, rank, &mut config) };
        Self::initialized(library, comm, control, code, "ncclCommInitRankConfig")
    }

    /// Returns the communicator of the ranks with the same color. All ranks of this communicator
    /// make this call.
    pub fn split(&self, parent: &Control, control: &Control, color: c_int) -> Result<Self> {
        let mut config = Config::nonblocking();
        let mut comm = null_mut();
        let library = self.library.clone();
        let key = control.rank() as c_int;
        let call = parent.begin_call("split");
        let split = self.lock(parent.rank(), &call.call).and_then(|handle| {
            // SAFETY: as for `ncclCommInitRankConfig`.
            let code = unsafe { (library.split)(handle.0, color, key, &mut comm, &mut config) };
            // `settle` locks the communicator again.
            drop(handle);
            self.settle(parent, &call, code).map(|()| code)
        });
        let code = split.map_err(|error| parent.cause_of(&call, error, self.compare_timeout()))?;
        Self::initialized(library, comm, control, code, "ncclCommSplit")
    }

    /// Waits until a communicator is initialised.
    fn initialized(
        library: Arc<Library>,
        comm: ncclComm_t,
        control: &Control,
        code: c_int,
        operation: &'static str,
    ) -> Result<Self> {
        check_code(&library, null_mut(), code, control.rank(), operation)?;
        let comm = Mutex::new(Handle(comm));
        let (ended, blames_another) = Default::default();
        let this = Self { library, comm, ended, blames_another };
        let call = control.begin_call(operation);
        this.settle(control, &call, code).map_err(|error| {
            let cause = control.cause_of(&call, error, this.compare_timeout());
            this.abort();
            cause
        })?;
        Ok(this)
    }

    /// Locks the communicator for NCCL's next call.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if it was aborted or destroyed.
    pub fn lock(&self, rank: usize, operation: &str) -> Result<MutexGuard<'_, Handle>> {
        let handle = self.handle();
        match self.ended.load(Ordering::SeqCst) {
            false => Ok(handle),
            true => Err(Error::Engine {
                engine: ENGINE,
                rank,
                operation: operation.to_owned(),
                reason: "the communicator was ended by another call".to_owned(),
                remedy: "see the error of that call",
            }),
        }
    }

    fn handle(&self) -> MutexGuard<'_, Handle> {
        self.comm.lock().expect("nothing panics while it holds the lock")
    }

    /// Returns `true` if NCCL has accepted its last call, and `false` if that is in progress.
    ///
    /// # Errors
    ///
    /// NCCL's error.
    pub fn poll(&self, rank: usize, operation: &str) -> Result<bool> {
        let handle = self.lock(rank, operation)?;
        let mut state = 0;
        // SAFETY: the communicator is alive, and one number is written.
        let code = unsafe { (self.library.async_error)(handle.0, &mut state) };
        check_code(&self.library, handle.0, code, rank, operation)?;
        let blames_another = state == ncclResult_t::ncclRemoteError as c_int;
        self.blames_another.store(blames_another, Ordering::SeqCst);
        check_code(&self.library, handle.0, state, rank, operation)?;
        Ok(state == ncclResult_t::ncclSuccess as c_int)
    }

    /// Waits until NCCL has accepted a call. NCCL carries the call out later.
    pub fn settle(&self, control: &Control, call: &ExternalCall, code: c_int) -> Result<()> {
        let rank = control.rank();
        let operation = &call.call;
        check_code(&self.library, self.lock(rank, operation)?.0, code, rank, operation)?;
        control.wait(call, || self.poll(rank, operation))
    }

    /// Returns the time to wait for a cause other than NCCL's error. The time is longer if NCCL
    /// blames another rank, which should report its failure first.
    pub fn compare_timeout(&self) -> Duration {
        // The other rank waits for a cause itself, and may be busy.
        if self.blames_another.load(Ordering::SeqCst) { 5 * COMPARE_AFTER } else { COMPARE_AFTER }
    }

    /// Aborts all calls in flight, and the communicator.
    pub fn abort(&self) {
        let handle = self.handle();
        if !self.ended.swap(true, Ordering::SeqCst) && !handle.0.is_null() {
            // SAFETY: the communicator is alive, and not used afterwards.
            unsafe { (self.library.abort)(handle.0) };
        }
    }

    /// Finalizes the communicator when all calls are done, and destroys it. Aborts it after an
    /// error or [`FINALIZE_TIMEOUT`].
    pub fn finalize(&self) {
        {
            let handle = self.handle();
            if self.ended.load(Ordering::SeqCst) || handle.0.is_null() {
                return;
            }
            // SAFETY: the communicator is alive.
            unsafe { (self.library.finalize)(handle.0) };
        }
        let start = Instant::now();
        loop {
            match self.poll(0, "ncclCommFinalize") {
                Ok(true) => break,
                Ok(false) if start.elapsed() < FINALIZE_TIMEOUT => pause(start.elapsed()),
                _ => return self.abort(),
            }
        }
        self.ended.store(true, Ordering::SeqCst);
        // SAFETY: the communicator is alive, and not used afterwards.
        unsafe { (self.library.destroy)(self.handle().0) };
    }
}

/// Turns a code of NCCL into an error with NCCL's text for it, unless the code is a success.
fn check_code(
    library: &Library,
    comm: ncclComm_t,
    code: c_int,
    rank: usize,
    operation: &str,
) -> Result<()> {
    if is_ok_so_far(code) {
        return Ok(());
    }
    Err(Error::Engine {
        engine: ENGINE,
        rank,
        operation: operation.to_owned(),
        reason: library.error_text(code, comm),
        remedy: "set NCCL_DEBUG=WARN on all ranks and read NCCL's output",
    })
}

/// Makes calls that NCCL treats as one. Returns the code of the first call that failed, or of
/// the group.
pub fn grouped(library: &Library, calls: impl Iterator<Item = c_int>) -> c_int {
    // SAFETY: every start of a group has its end.
    let start = unsafe { (library.group_start)() };
    // All calls are made, even after a failed one: the iterator makes them as it advances.
    let failed =
        calls.filter(|code| !is_ok_so_far(*code)).fold(None, |first, code| first.or(Some(code)));
    // SAFETY: as above.
    let end = unsafe { (library.group_end)() };
    [Some(start), failed, Some(end)]
        .into_iter()
        .flatten()
        .find(|code| !is_ok_so_far(*code))
        .unwrap_or(end)
}
