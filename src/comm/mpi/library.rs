//! The lifetimes of MPI and of its communicators.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::{Communicator as _, SimpleCommunicator};
use mpi::traits::AsRaw;

use super::ENGINE;
use crate::error::{Error, Result};

/// MPI, initialised. It is finalized with the last world.
pub struct Library {
    pub universe: ManuallyDrop<Universe>,
    /// Set after a failure. Finalizing MPI would then wait for dead ranks.
    abandoned: AtomicBool,
}

/// A communicator of MPI.
pub struct RawCommunicator {
    pub comm: ManuallyDrop<SimpleCommunicator>,
    pub library: Arc<Library>,
}

// SAFETY: MPI is initialised for concurrent calls from several threads, and communicators are
// handles.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}
// SAFETY: as above.
unsafe impl Send for RawCommunicator {}
// SAFETY: as above.
unsafe impl Sync for RawCommunicator {}

impl Library {
    /// Initialises MPI, which a process can do once, or returns the initialised one.
    pub fn load(rank: usize) -> Result<Arc<Self>> {
        static LOADED: Mutex<Weak<Library>> = Mutex::new(Weak::new());
        let failed = |reason: &str, remedy| Error::Engine {
            engine: ENGINE,
            rank,
            operation: "MPI_Init_thread".into(),
            reason: reason.into(),
            remedy,
        };
        let mut loaded = LOADED.lock().expect("nothing panics while it holds the lock");
        if let Some(library) = loaded.upgrade() {
            return Ok(library);
        }
        let (universe, level) = mpi::initialize_with_threading(mpi::Threading::Multiple)
            .ok_or_else(|| {
                let remedy = "keep one world for as long as the program needs one";
                failed("MPI was initialised before, and can't be initialised again", remedy)
            })?;
        let library =
            Self { universe: ManuallyDrop::new(universe), abandoned: AtomicBool::new(false) };
        if level < mpi::Threading::Multiple {
            // Other ranks may have got the level, and would wait for this one at the end.
            library.abandon();
            let reason = "this MPI does not support calls from several threads: expected \
                          MPI_THREAD_MULTIPLE, got a lower level";
            return Err(failed(reason, "use a build of MPI with MPI_THREAD_MULTIPLE"));
        }
        let library = Arc::new(library);
        *loaded = Arc::downgrade(&library);
        Ok(library)
    }

    /// Leaves MPI and its communicators allocated when they are dropped. After a failure,
    /// finalizing MPI would wait for dead ranks.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if !*self.abandoned.get_mut() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.universe) };
        }
    }
}

impl RawCommunicator {
    pub fn new(comm: SimpleCommunicator, library: Arc<Library>) -> Arc<Self> {
        // By default, an error of MPI ends the process.
        // SAFETY: the communicator is alive, and the error handler is a constant of the library.
        unsafe { ffi::MPI_Comm_set_errhandler(comm.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        Arc::new(Self { comm: ManuallyDrop::new(comm), library })
    }

    pub fn raw(&self) -> ffi::MPI_Comm {
        self.comm.as_raw()
    }
}

impl Drop for RawCommunicator {
    fn drop(&mut self) {
        if !self.library.abandoned.load(Ordering::SeqCst) {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.comm) };
        }
    }
}

impl fmt::Debug for RawCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MPI communicator of {} ranks", self.comm.size())
    }
}

/// Turns a code of MPI into an error with MPI's text for it.
pub fn check_code(code: c_int, rank: usize, operation: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the text has the length that MPI requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    text.truncate(length as usize);
    Err(Error::Engine {
        engine: ENGINE,
        rank,
        operation: operation.to_owned(),
        reason: String::from_utf8_lossy(&text).into_owned(),
        remedy: "read the output of the other ranks and of mpirun",
    })
}
