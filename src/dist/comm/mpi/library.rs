//! MPI's library and communicators, and the life of both.

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

/// MPI, initialised. Finalised with the last world.
pub struct Library {
    pub universe: ManuallyDrop<Universe>,
    /// After a failure MPI can't be finalised: it would wait for the dead.
    abandoned: AtomicBool,
}

/// A communicator of MPI.
pub struct Group {
    pub comm: ManuallyDrop<SimpleCommunicator>,
    pub library: Arc<Library>,
}

// SAFETY: MPI is initialised for calls from several threads at a time, and communicators are handles.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}
// SAFETY: as above.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl Library {
    /// MPI, which one process can initialise once.
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
                failed("MPI was initialised before, and can't be again", remedy)
            })?;
        let library =
            Self { universe: ManuallyDrop::new(universe), abandoned: AtomicBool::new(false) };
        if level < mpi::Threading::Multiple {
            let remedy = "use a build of MPI with MPI_THREAD_MULTIPLE";
            return Err(failed("this MPI serves one thread only", remedy));
        }
        let library = Arc::new(library);
        *loaded = Arc::downgrade(&library);
        Ok(library)
    }

    /// Leaves MPI as it is: after a failure, finalising it would wait for the dead.
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

impl Group {
    pub fn new(comm: SimpleCommunicator, library: Arc<Library>) -> Arc<Self> {
        // SAFETY: the communicator is alive; errors are to be returned, not to end the process.
        unsafe { ffi::MPI_Comm_set_errhandler(comm.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        Arc::new(Self { comm: ManuallyDrop::new(comm), library })
    }

    pub fn raw(&self) -> ffi::MPI_Comm {
        self.comm.as_raw()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.library.abandoned.load(Ordering::SeqCst) {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.comm) };
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MPI communicator of {}", self.comm.size())
    }
}

/// Turns MPI's codes into its own words.
pub fn check(code: c_int, rank: usize, operation: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the text has the length that MPI asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    text.truncate(length as usize);
    Err(Error::Engine {
        engine: ENGINE,
        rank,
        operation: operation.to_owned(),
        reason: String::from_utf8_lossy(&text).into_owned(),
        remedy: "look at the output of the other ranks and of mpirun",
    })
}
