//! The engine for ranks that are processes on one host or many, over MPI (the MPI standard, version 3).
//!
//! Tensors pass through the memory of the host. Sums are MPI's, in an order of its choice, in
//! float32: half precision is widened before and rounded once after. With every call goes a
//! signature of it, so that ranks which make different calls are told instead of given garbage.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::{ManuallyDrop, forget};
use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::{Color, Communicator as _, SimpleCommunicator};
use mpi::traits::{AsRaw, Root};

use super::control::{Control, Elsewhere, Meeting, PATIENCE};
use super::{
    Call, Communicator, Pending, ReduceOp, before, check_counts, check_dtype, check_root,
    exchange_pairs,
};
use crate::dist::Launch;
use crate::error::{Error, Result};

const ENGINE: &str = "mpi";
/// Where an empty buffer is said to be: Rust has none of it at an address that MPI gives a meaning.
static SOMEWHERE: [u8; 8] = [0; 8];

/// Engine of processes over MPI.
#[derive(Debug)]
pub struct Mpi {
    // In this order: whoever leaves the world can finalise, which waits for the others.
    control: Arc<Control>,
    group: Arc<Group>,
    device: Device,
}

/// MPI, initialised. Finalised with the last world.
struct Library {
    universe: ManuallyDrop<Universe>,
    /// After a failure MPI can't be finalised: it would wait for the dead.
    abandoned: AtomicBool,
}

/// A communicator of MPI.
struct Group {
    comm: ManuallyDrop<SimpleCommunicator>,
    library: Arc<Library>,
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
    fn load(rank: usize) -> Result<Arc<Self>> {
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
    fn new(comm: SimpleCommunicator, library: Arc<Library>) -> Arc<Self> {
        // SAFETY: the communicator is alive; errors are to be returned, not to end the process.
        unsafe { ffi::MPI_Comm_set_errhandler(comm.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        Arc::new(Self { comm: ManuallyDrop::new(comm), library })
    }

    fn raw(&self) -> ffi::MPI_Comm {
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

/// A call of MPI that was started, with all memory that it may touch until it has finished.
struct Started {
    request: ffi::MPI_Request,
    /// Held for MPI.
    send: TensorData,
    receive: Vec<u8>,
    counts: Vec<Vec<c_int>>,
    finished: bool,
}

// SAFETY: requests may be tested by any thread, and what is held is memory that moves with this.
unsafe impl Send for Started {}

/// What every rank says that it calls.
struct Signature {
    request: ffi::MPI_Request,
    own: Box<[u64; 1]>,
    all: Vec<u64>,
    finished: bool,
}

// SAFETY: as of `Started`.
unsafe impl Send for Signature {}

/// Whether a request has finished.
fn test(request: &mut ffi::MPI_Request, rank: usize, call: &Elsewhere) -> Result<bool> {
    let mut flag = 0;
    // SAFETY: the request is that of a started call, or null when it has finished.
    let code = unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
    check(code, rank, &call.call)?;
    Ok(flag != 0)
}

/// Turns MPI's codes into its own words.
fn check(code: c_int, rank: usize, operation: &str) -> Result<()> {
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

impl Signature {
    fn start(group: &Group, rank: usize, call: &Elsewhere) -> Result<Self> {
        let mut hasher = DefaultHasher::new();
        (call.number, &call.call).hash(&mut hasher);
        let mut signature = Self {
            // SAFETY: a constant.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            own: Box::new([hasher.finish()]),
            all: vec![0; group.comm.size() as usize],
            finished: false,
        };
        // SAFETY: both buffers are on the heap and live until the request has finished.
        let code = unsafe {
            ffi::MPI_Iallgather(
                signature.own.as_ptr().cast(),
                1,
                ffi::RSMPI_UINT64_T,
                signature.all.as_mut_ptr().cast(),
                1,
                ffi::RSMPI_UINT64_T,
                group.raw(),
                &mut signature.request,
            )
        };
        check(code, rank, &call.call)?;
        Ok(signature)
    }

    fn test(&mut self, rank: usize, call: &Elsewhere) -> Result<bool> {
        self.finished = self.finished || test(&mut self.request, rank, call)?;
        Ok(self.finished)
    }
}

impl Drop for Signature {
    fn drop(&mut self) {
        if !self.finished {
            // MPI may still write there.
            forget(std::mem::take(&mut self.own));
            forget(std::mem::take(&mut self.all));
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.finished {
            // MPI may still read and write there.
            forget(std::mem::replace(&mut self.send, TensorData::new(Vec::<u8>::new(), [0])));
            forget(std::mem::take(&mut self.receive));
            forget(std::mem::take(&mut self.counts));
        }
    }
}

/// The signatures differ.
fn different(rank: usize, call: &Elsewhere) -> Error {
    let calls = format!("rank {rank}: {}, another: something else", call.call);
    Error::Mismatch { calls }
}

/// MPI's type for the elements of a tensor that are moved and not computed with.
fn moved_as(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match dtype.size() {
            2 => ffi::RSMPI_UINT16_T,
            _ => ffi::RSMPI_FLOAT,
        }
    }
}

/// Lengths and offsets as MPI takes them.
fn layout(counts: &[usize], collective: &'static str, rank: usize) -> Result<[Vec<c_int>; 2]> {
    let int = |number: usize| {
        c_int::try_from(number).map_err(|_| Error::Collective {
            collective,
            rank,
            reason: format!("{number} elements are more than MPI counts in an int"),
            remedy: "set a smaller `bucket_mb`",
        })
    };
    int(counts.iter().sum())?;
    let lengths = counts.iter().map(|count| int(*count)).collect::<Result<Vec<_>>>()?;
    let offsets = (0..counts.len()).map(|rank| int(before(counts, rank)));
    Ok([lengths, offsets.collect::<Result<Vec<_>>>()?])
}

impl Mpi {
    /// The engine of a process that mpirun or srun started, with results on the device. A rank that
    /// waits for another longer than `deadline` gives up for all.
    ///
    /// The ranks find together over MPI itself, or where [`Launch::address`] says.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if MPI can't be used, [`Error::Launch`] if it counts other ranks than the
    /// launcher, [`Error::Rendezvous`] if the ranks don't find together.
    pub fn connect(launch: &Launch, device: Device, deadline: Duration) -> Result<Self> {
        let library = Library::load(launch.rank)?;
        let world = library.universe.world().duplicate();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if (rank, size) != (launch.rank, launch.world_size) {
            return Err(Error::Launch {
                variable: "the rank".into(),
                value: format!("{} of {}", launch.rank, launch.world_size),
                reason: format!("but MPI says {rank} of {size}"),
                remedy: "start the program with the mpirun or srun of this MPI, and with no other launcher",
            });
        }
        let group = Group::new(world, library);
        let meeting = match &launch.address {
            Some((host, port)) => Meeting::at(rank, host, *port),
            None => Self::meeting(&group, rank),
        };
        let joined = meeting.and_then(|meeting| meeting.join(rank, size, &launch.secret, deadline));
        // Who does not find the others can't finalise MPI with them either.
        let control =
            joined.inspect_err(|_| group.library.abandoned.store(true, Ordering::SeqCst))?;
        Ok(Self { control: Arc::new(control), group, device })
    }

    /// Rank 0 opens a port anywhere and tells the others by MPI.
    fn meeting(group: &Group, rank: usize) -> Result<Meeting> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let one_host = group.comm.split_shared(0).size() == group.comm.size();
        let host = if one_host { "127.0.0.1".to_owned() } else { host };
        let meeting = if rank == 0 { Some(Meeting::anywhere(&host)) } else { None };
        // An address of nothing says that rank 0 could not listen.
        let address = match &meeting {
            Some(Ok(meeting)) => meeting.address.clone(),
            _ => String::new(),
        };
        let mut length = [address.len() as u64];
        let root = group.comm.process_at_rank(0);
        root.broadcast_into(&mut length[..]);
        let mut bytes = address.into_bytes();
        bytes.resize(length[0] as usize, 0);
        root.broadcast_into(&mut bytes[..]);
        match meeting {
            Some(meeting) => meeting,
            None if bytes.is_empty() => Err(Error::PeerFailed {
                rank: 0,
                cause: "it could not listen for the others".into(),
            }),
            None => Ok(Meeting::known(String::from_utf8_lossy(&bytes).into_owned())),
        }
    }

    /// Starts a call of MPI and its signature. `start` gets both buffers, and counts that live as long.
    fn start(
        &self,
        call: Call,
        data: TensorData,
        received: usize,
        counts: Vec<Vec<c_int>>,
        start: impl FnOnce(*const c_void, *mut c_void, &[Vec<c_int>], &mut ffi::MPI_Request) -> c_int,
    ) -> Result<impl FnOnce() -> Result<TensorData> + Send + 'static> {
        let (rank, dtype) = (self.rank(), data.dtype());
        let call = self.control.announce(call);
        let mut signature = Signature::start(&self.group, rank, &call)?;
        let mut started = Started {
            // SAFETY: a constant.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            send: data,
            receive: vec![0; received * dtype.size()],
            counts,
            finished: false,
        };
        let (send, receive) = (started.send.as_bytes().as_ptr(), started.receive.as_mut_ptr());
        let or_somewhere =
            |pointer: *const u8, empty| if empty { SOMEWHERE.as_ptr() } else { pointer };
        let send = or_somewhere(send, started.send.as_bytes().is_empty());
        let receive = or_somewhere(receive, started.receive.is_empty()).cast_mut();
        let code = start(send.cast(), receive.cast(), &started.counts, &mut started.request);
        check(code, rank, &call.call)?;
        let (control, group) = (self.control.clone(), self.group.clone());
        Ok(move || {
            let outcome = control
                .wait(&call, || signature.test(rank, &call))
                .and_then(|()| match signature.all.iter().all(|other| *other == signature.own[0]) {
                    true => Ok(()),
                    false => Err(different(rank, &call)),
                })
                .and_then(|()| {
                    control.wait(&call, || {
                        started.finished =
                            started.finished || test(&mut started.request, rank, &call)?;
                        Ok(started.finished)
                    })
                });
            if let Err(error) = outcome {
                group.library.abandoned.store(true, Ordering::SeqCst);
                return Err(control.cause_of(&call, error, PATIENCE));
            }
            let bytes = std::mem::take(&mut started.receive);
            Ok(TensorData::from_bytes_vec(bytes, [received], dtype))
        })
    }

    /// The elements of a tensor, on the host.
    fn read(&self, tensor: Tensor<1>) -> Result<TensorData> {
        tensor.try_into_data().map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank(),
            operation: "read a tensor".into(),
            reason: error.to_string(),
            remedy: "mend what the device was given before",
        })
    }

    /// Starts a call that moves elements as they are.
    fn moved(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        counts: Vec<Vec<c_int>>,
        start: impl FnOnce(
            (*const c_void, *mut c_void, ffi::MPI_Datatype),
            &[Vec<c_int>],
            &mut ffi::MPI_Request,
        ) -> c_int,
    ) -> Result<Pending> {
        let data = self.read(tensor)?;
        let (device, dtype) = (self.device.clone(), data.dtype());
        let start = |send, receive, counts: &[Vec<c_int>], request: &mut ffi::MPI_Request| {
            start((send, receive, moved_as(dtype)), counts, request)
        };
        let finish = self.start(call, data, received, counts, start)?;
        Ok(Pending::new(move || Ok(Tensor::from_data(finish()?, (&device, dtype)))))
    }

    /// Starts a call that adds up, in float32.
    fn reduced(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        counts: Vec<Vec<c_int>>,
        start: impl FnOnce(*const c_void, *mut c_void, &[Vec<c_int>], &mut ffi::MPI_Request) -> c_int,
    ) -> Result<Pending> {
        let (device, dtype, size) = (self.device.clone(), tensor.dtype(), self.size());
        let op = call.op.expect("a call that adds up");
        let data = self.read(tensor.cast(FloatDType::F32))?;
        let finish = self.start(call, data, received, counts, start)?;
        Ok(Pending::new(move || {
            let sum = Tensor::<1>::from_data(finish()?, (&device, DType::F32));
            Ok(op.finish(sum, size, dtype))
        }))
    }
}

impl Communicator for Mpi {
    fn engine(&self) -> &'static str {
        ENGINE
    }

    fn version(&self) -> String {
        let version = mpi::environment::library_version().unwrap_or_default();
        version.lines().next().unwrap_or_default().split(',').next().unwrap_or_default().to_owned()
    }

    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        check_dtype("all_reduce", self.rank(), tensor.dtype())?;
        let length = tensor.dims()[0];
        let call = Call { counts: vec![length], op: Some(op), ..Call::on("all_reduce", &tensor) };
        let counts = layout(&[length], "all_reduce", self.rank())?.into();
        let comm = self.group.raw();
        self.reduced(call, tensor, length, counts, |send, receive, counts, request| {
            // SAFETY: both buffers hold that many floats and live until the request has finished.
            unsafe {
                let (float, sum) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM);
                ffi::MPI_Iallreduce(send, receive, counts[0][0], float, sum, comm, request)
            }
        })
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        check_dtype("reduce_scatter", self.rank(), tensor.dtype())?;
        let lengths = (counts.iter().sum(), tensor.dims()[0]);
        check_counts("reduce_scatter", self.rank(), self.size(), counts, lengths)?;
        let call =
            Call { counts: counts.to_vec(), op: Some(op), ..Call::on("reduce_scatter", &tensor) };
        let own = counts[self.rank()];
        let counts = layout(counts, "reduce_scatter", self.rank())?.into();
        let comm = self.group.raw();
        self.reduced(call, tensor, own, counts, |send, receive, counts, request| {
            // SAFETY: the buffers hold the sum of the counts and the own count, and live until the
            // request has finished, as the counts do.
            unsafe {
                let (counts, float, sum) = (counts[0].as_ptr(), ffi::RSMPI_FLOAT, ffi::RSMPI_SUM);
                ffi::MPI_Ireduce_scatter(send, receive, counts, float, sum, comm, request)
            }
        })
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        check_dtype("all_gather", self.rank(), tensor.dtype())?;
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("all_gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let call = Call { counts: counts.to_vec(), ..Call::on("all_gather", &tensor) };
        let all = counts.iter().sum();
        let counts = layout(counts, "all_gather", self.rank())?.into();
        let comm = self.group.raw();
        self.moved(call, tensor, all, counts, |(send, receive, of), counts, request| {
            let (lengths, offsets) = (counts[0].as_ptr(), counts[1].as_ptr());
            let own = own as c_int;
            // SAFETY: the buffers hold the own count and the sum of the counts, and live until the
            // request has finished, as the counts do.
            unsafe {
                ffi::MPI_Iallgatherv(send, own, of, receive, lengths, offsets, of, comm, request)
            }
        })
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        check_dtype("broadcast", self.rank(), tensor.dtype())?;
        check_root("broadcast", self.rank(), self.size(), root)?;
        let length = tensor.dims()[0];
        let call =
            Call { counts: vec![length], root: Some(root), ..Call::on("broadcast", &tensor) };
        let counts = layout(&[length], "broadcast", self.rank())?.into();
        let (comm, bytes) = (self.group.raw(), length * tensor.dtype().size());
        let is_root = root == self.rank();
        self.moved(call, tensor, length, counts, |(send, receive, of), counts, request| {
            // SAFETY: both buffers hold that many elements and don't overlap, and the one that is
            // given to MPI lives until the request has finished.
            unsafe {
                if is_root {
                    receive.cast::<u8>().copy_from_nonoverlapping(send.cast(), bytes);
                }
                ffi::MPI_Ibcast(receive, counts[0][0], of, root as c_int, comm, request)
            }
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending> {
        let (rank, size) = (self.rank(), self.size());
        check_dtype("all_to_all", rank, tensor.dtype())?;
        check_counts("all_to_all", rank, size, send, (send.iter().sum(), tensor.dims()[0]))?;
        check_counts("all_to_all", rank, size, receive, (0, 0))?;
        exchange_pairs(self, send, receive)?;
        let call = Call::on("all_to_all", &tensor);
        let received = receive.iter().sum();
        let counts = [layout(send, "all_to_all", rank)?, layout(receive, "all_to_all", rank)?];
        let comm = self.group.raw();
        self.moved(call, tensor, received, counts.concat(), |(from, to, of), counts, request| {
            let [send, send_at, receive, receive_at] =
                [0, 1, 2, 3].map(|part: usize| counts[part].as_ptr());
            // SAFETY: the buffers hold the sums of their counts, and live until the request has
            // finished, as the counts do.
            unsafe {
                ffi::MPI_Ialltoallv(
                    from, send, send_at, of, to, receive, receive_at, of, comm, request,
                )
            }
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
        self.control.all_gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        self.control.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        self.control.broadcast_bytes(bytes, root)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        self.control.first_bytes(bytes)
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.control.or_bytes(bytes)
    }

    fn set_busy(&self, busy: bool) {
        self.control.set_busy(busy);
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let (control, first) = self.control.split(color, key)?;
        // The first member's rank tells the groups apart, whatever the colors are.
        let group = Color::with_value(first as c_int);
        let comm = self.group.comm.split_by_color_with_key(group, control.rank() as c_int);
        let comm = comm.expect("everybody is of a group");
        Ok(Box::new(Self {
            control: Arc::new(control),
            group: Group::new(comm, self.group.library.clone()),
            device: self.device.clone(),
        }))
    }

    fn fail(&self, cause: &str) {
        self.group.library.abandoned.store(true, Ordering::SeqCst);
        self.control.fail(cause);
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // Others failed: MPI would wait for them.
        if self.control.has_failed() {
            self.group.library.abandoned.store(true, Ordering::SeqCst);
        }
    }
}
