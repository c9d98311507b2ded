//! Tensors of the CPU for the engine `nccl` over the test library.

use std::cell::Cell;
use std::os::raw::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::comm::{Buffer, DeviceMemory, Launch, Nccl, Reduction, StreamEvent, World};
use distmuon::{Error, Result};

type CreateFn = unsafe extern "C" fn() -> *mut c_void;
type CountFn = unsafe extern "C" fn(*mut c_void) -> u64;
type DelayFn = unsafe extern "C" fn(*mut c_void, u64);

const EXPORTED: &str = "the test library exports the function";

thread_local! {
    static BACKLOG: Cell<Option<Duration>> = const { Cell::new(None) };
    static FAILS_EVENT: Cell<bool> = const { Cell::new(false) };
    static POLLS: Cell<usize> = const { Cell::new(0) };
}

/// The side that waits for the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// The engine.
    Host,
    /// The work that uses a result, as on a device.
    Device,
}

/// The memory of the host, and a stream of the test library.
#[derive(Debug)]
struct HostMemory {
    device: Device,
    stream: Arc<Stream>,
    waits: Waits,
    /// The data that the stream may still read after its tensor was dropped, and the number of
    /// calls after which the stream no longer reads the data. A device does not reuse memory before
    /// that.
    in_use: Mutex<Vec<(u64, Arc<TensorData>)>>,
}

#[derive(Debug)]
struct Stream {
    stream: *mut c_void,
    launched: CountFn,
    finished: CountFn,
    delay: DelayFn,
    /// The number of calls that work on tensors waits for.
    awaited: AtomicU64,
    _library: libloading::Library,
}

// SAFETY: any thread may use the streams of the test library, which are never freed.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    fn launched(&self) -> u64 {
        // SAFETY: the stream is one of the test library, which is loaded.
        unsafe { (self.launched)(self.stream) }
    }

    fn finished(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.finished)(self.stream) }
    }

    fn delay(&self, time: Duration) {
        // SAFETY: as above.
        unsafe { (self.delay)(self.stream, time.as_millis() as u64) }
    }
}

impl HostMemory {
    /// Creates a stream of the test library for tensors on a device.
    fn new(device: Device, waits: Waits) -> Self {
        let library = test_library();
        // SAFETY: these are functions of the test library, with their types.
        let (stream, launched, finished, delay) = unsafe {
            let create = library.get::<CreateFn>(b"distmuonTestStreamCreate").expect(EXPORTED);
            (
                create(),
                *library.get::<CountFn>(b"distmuonTestStreamLaunched").expect(EXPORTED),
                *library.get::<CountFn>(b"distmuonTestStreamFinished").expect(EXPORTED),
                *library.get::<DelayFn>(b"distmuonTestStreamDelay").expect(EXPORTED),
            )
        };
        let awaited = AtomicU64::new(0);
        let stream = Stream { stream, launched, finished, delay, awaited, _library: library };
        let in_use = Mutex::default();
        Self { device: device.inner(), stream: Arc::new(stream), waits, in_use }
    }
}

fn test_library() -> libloading::Library {
    // SAFETY: the file is the test library, which is safe to initialise.
    unsafe { libloading::Library::new(folder().join("libnccl.so")).expect("the library was built") }
}

/// Makes the next call of this thread fail while it is in flight, on this rank.
pub fn fail_next() {
    let library = test_library();
    // SAFETY: this is a function of the test library, with its type.
    unsafe {
        let fail: libloading::Symbol<'_, unsafe extern "C" fn()> =
            library.get(b"distmuonTestFailNext").expect(EXPORTED);
        fail();
    }
}

/// Keeps this rank's device busy for some time before the next call of this thread.
pub fn delay_next(time: Duration) {
    BACKLOG.set(Some(time));
}

/// The number of times that this thread has asked whether an event is passed.
pub fn polls() -> usize {
    POLLS.get()
}

/// Makes the event behind the next call of this thread fail, as a driver may.
pub fn fail_next_event() {
    FAILS_EVENT.set(true);
}

/// Returns the bytes that this thread's rank has sent to others so far.
pub(crate) fn sent() -> u64 {
    let library = test_library();
    // SAFETY: this is a function of the test library, with its type.
    unsafe {
        let sent: libloading::Symbol<'_, unsafe extern "C" fn() -> u64> =
            library.get(b"distmuonTestBytesSent").expect(EXPORTED);
        sent()
    }
}

/// Returns the folder of the test library, which is that of the test programs.
fn folder() -> PathBuf {
    let program = PathBuf::from(std::env::args_os().next().expect("a program has a name"));
    program.parent().expect("a program is in a folder").to_owned()
}

/// Makes the engine find the test library, unless a variable names another one.
pub fn use_test_library() {
    if std::env::var_os("DISTMUON_NCCL_PATH").is_some() {
        return;
    }
    // SAFETY: the caller starts its threads after this call.
    unsafe { std::env::set_var("DISTMUON_NCCL_PATH", folder()) };
}

/// Returns a world over the test library.
pub fn world(launch: &Launch, device: Device, deadline: Duration, waits: Waits) -> Result<World> {
    world_that(launch, device, deadline, waits, Reduction::default())
}

/// Returns a world over the test library with a kind of reductions.
pub(crate) fn world_that(
    launch: &Launch,
    device: Device,
    deadline: Duration,
    waits: Waits,
    reduction: Reduction,
) -> Result<World> {
    let engine = Nccl::over(Arc::new(HostMemory::new(device.clone(), waits)), launch, deadline)?;
    Ok(World::new(engine.with_reduction(reduction), device))
}

/// Runs a function on ranks over the test library that are threads of this process, as
/// [`World::threads`] does where each has a CUDA device.
pub fn threads<T: Send>(
    deadline: Duration,
    count: usize,
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    threads_with(deadline, count, |_| Ok(()), run)
}

/// As [`threads`], where the memory of a rank's device may fail.
pub fn threads_with<T: Send>(
    deadline: Duration,
    count: usize,
    check: impl Fn(usize) -> Result<()> + Sync,
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let memory = |device: &Device, rank: usize| -> Result<Arc<dyn DeviceMemory>> {
        check(rank)?;
        Ok(Arc::new(HostMemory::new(device.clone(), Waits::Host)))
    };
    World::nccl_threads(deadline, vec![Device::default().autodiff(); count], memory, run)
}

// SAFETY: buffers are memory of the host, which the test library can access: data of tensors, kept
// until the stream has passed their call, and vectors, which `tensor` turns into tensors when the
// stream has passed the last awaited call. Streams are never freed, and work on tensors is done
// when it returns.
unsafe impl DeviceMemory for HostMemory {
    fn for_group(&self) -> Result<Arc<dyn DeviceMemory>> {
        Ok(Arc::new(Self::new(self.device.clone(), self.waits)))
    }

    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer> {
        if let Some(time) = BACKLOG.take() {
            self.stream.delay(time);
        }
        let data = Arc::new(tensor.into_data());
        let finished = self.stream.finished();
        let mut in_use = self.in_use.lock().expect("no holder of the lock panics");
        in_use.retain(|(last_call, _)| *last_call > finished);
        in_use.push((self.stream.launched() + 1, data.clone()));
        let (length, dtype) = (data.num_elements(), data.dtype());
        let pointer = data.as_bytes().as_ptr().cast_mut().cast();
        // SAFETY: the data has that many elements, which are only read, and which keep their
        // address.
        Ok(unsafe { Buffer::new(pointer, length, dtype, Box::new(data)) })
    }

    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer> {
        // NaN, so that elements that are not written are noticed.
        let mut bytes = vec![0xff_u8; length * dtype.size()];
        // SAFETY: the vector has the bytes of that many elements, and keeps their address.
        Ok(unsafe { Buffer::new(bytes.as_mut_ptr().cast(), length, dtype, Box::new(bytes)) })
    }

    fn tensor(&self, buffer: Buffer) -> Tensor<1> {
        while self.stream.finished() < self.stream.awaited.load(Ordering::SeqCst) {
            // Not a yield: with more ranks than cores, that would take time from the streams.
            thread::sleep(Duration::from_micros(100));
        }
        let (length, dtype) = (buffer.length(), buffer.dtype());
        let bytes = buffer.into_owner().downcast::<Vec<u8>>();
        let bytes = bytes.expect("the buffer was allocated by this memory");
        let data = TensorData::from_bytes_vec(*bytes, [length], dtype);
        Tensor::from_data(data, (&self.device, dtype))
    }

    fn begin(&self) -> Result<(*mut c_void, Box<dyn StreamEvent>)> {
        Ok((self.stream.stream, self.record()))
    }

    fn end(&self) -> Result<Box<dyn StreamEvent>> {
        if FAILS_EVENT.take() {
            return Err(Error::Engine {
                engine: "nccl",
                rank: 0,
                operation: "create an event".to_owned(),
                reason: "the driver is out of memory".to_owned(),
                remedy: "free memory of the device",
            });
        }
        Ok(self.record())
    }
}

impl HostMemory {
    fn record(&self) -> Box<dyn StreamEvent> {
        let stream = self.stream.clone();
        Box::new(HostEvent { launched: stream.launched(), stream, waits: self.waits })
    }
}

/// The position in a stream behind the first `launched` calls.
struct HostEvent {
    stream: Arc<Stream>,
    launched: u64,
    waits: Waits,
}

impl StreamEvent for HostEvent {
    fn make_later_work_wait(&self) -> Result<bool> {
        if self.waits == Waits::Device {
            self.stream.awaited.fetch_max(self.launched, Ordering::SeqCst);
        }
        Ok(self.waits == Waits::Device)
    }

    fn is_passed(&self) -> Result<bool> {
        POLLS.set(POLLS.get() + 1);
        Ok(self.stream.finished() >= self.launched)
    }
}
