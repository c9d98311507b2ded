//! A communicator of NCCL, whose calls don't block: after each, NCCL is asked how it went.

use std::fmt::{self, Debug};
use std::os::raw::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclResult_t, ncclUniqueId};

use super::super::control::{Control, Elsewhere, PATIENCE};
use super::library::{Config, ENGINE, Library, is_fine};
use crate::error::{Error, Result};

/// How long a communicator may take to end in peace.
const FAREWELL: Duration = Duration::from_secs(10);

/// A communicator of NCCL.
pub struct Group {
    pub library: Arc<Library>,
    comm: Mutex<Handle>,
    ended: AtomicBool,
    /// Whether NCCL's error is that of another rank.
    blames_another: AtomicBool,
}

pub struct Handle(pub ncclComm_t);

// SAFETY: NCCL allows any thread to use a communicator, one at a time, which the mutex sees to.
unsafe impl Send for Handle {}

impl Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL communicator of {:?}", self.library.path)
    }
}

impl Group {
    /// The communicator of all ranks, which rank 0 gives a name.
    pub fn world(library: Arc<Library>, control: &Control) -> Result<Self> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        let own = if control.rank() == 0 {
            // SAFETY: it writes one identity.
            let code = unsafe { (library.get_unique_id)(&mut id) };
            failed(&library, null_mut(), code, 0, "ncclGetUniqueId")?;
            id.internal.map(|byte| byte.to_ne_bytes()[0]).to_vec()
        } else {
            vec![]
        };
        let own = control.broadcast_bytes(own, 0)?;
        for (byte, received) in id.internal.iter_mut().zip(&own) {
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
    pub fn split(&self, parent: &Control, control: &Control, color: c_int) -> Result<Self> {
        let mut config = Config::nonblocking();
        let mut comm = null_mut();
        let library = self.library.clone();
        let key = control.rank() as c_int;
        let call = parent.announce("split");
        let split = self.lock(parent.rank(), &call.call).and_then(|own| {
            // SAFETY: as of `ncclCommInitRankConfig`.
            let code = unsafe { (library.split)(own.0, color, key, &mut comm, &mut config) };
            drop(own);
            self.settle(parent, &call, code).map(|()| code)
        });
        let code = split.map_err(|error| parent.cause_of(&call, error, self.patience()))?;
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
        let comm = Mutex::new(Handle(comm));
        let (ended, blames_another) = Default::default();
        let group = Self { library, comm, ended, blames_another };
        let call = control.announce(operation);
        group.settle(control, &call, code).map_err(|error| {
            let cause = control.cause_of(&call, error, group.patience());
            group.abort();
            cause
        })?;
        Ok(group)
    }

    /// The communicator, for NCCL's next call. Nobody else uses it as long as this is held.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if it was ended.
    pub fn lock(&self, rank: usize, operation: &str) -> Result<MutexGuard<'_, Handle>> {
        let comm = self.handle();
        match self.ended.load(Ordering::SeqCst) {
            false => Ok(comm),
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

    /// How NCCL's last call went: whether it is done with it.
    pub fn check(&self, rank: usize, operation: &str) -> Result<bool> {
        let comm = self.lock(rank, operation)?;
        let mut state = 0;
        // SAFETY: the communicator is alive, and one number is written.
        let code = unsafe { (self.library.async_error)(comm.0, &mut state) };
        failed(&self.library, comm.0, code, rank, operation)?;
        let remote = state == ncclResult_t::ncclRemoteError as c_int;
        self.blames_another.store(remote, Ordering::SeqCst);
        failed(&self.library, comm.0, state, rank, operation)?;
        Ok(state == ncclResult_t::ncclSuccess as c_int)
    }

    /// Waits until NCCL has taken a call, which is not until it is carried out.
    pub fn settle(&self, control: &Control, call: &Elsewhere, code: c_int) -> Result<()> {
        let (rank, operation) = (control.rank(), &call.call);
        failed(&self.library, self.lock(rank, operation)?.0, code, rank, operation)?;
        control.wait(call, || self.check(rank, operation))
    }

    /// How long to listen for a better reason than NCCL's: longer where it blames another rank, which
    /// should speak first.
    pub fn patience(&self) -> Duration {
        if self.blames_another.load(Ordering::SeqCst) { 2 * PATIENCE } else { PATIENCE }
    }

    /// Ends what is on its way, however it stands.
    pub fn abort(&self) {
        let comm = self.handle();
        if !self.ended.swap(true, Ordering::SeqCst) && !comm.0.is_null() {
            // SAFETY: the communicator is alive, and not used afterwards.
            unsafe { (self.library.abort)(comm.0) };
        }
    }

    /// Ends the communicator when all is done.
    pub fn part(&self) {
        {
            let comm = self.handle();
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
        unsafe { (self.library.destroy)(self.handle().0) };
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
pub fn grouped(library: &Library, calls: impl Iterator<Item = c_int>) -> c_int {
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
