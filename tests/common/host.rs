//! Tensors of the CPU for the engine `nccl` over the test library.

#![allow(dead_code)] // every target uses its own part

use std::cell::Cell;
use std::os::raw::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::dist::comm::{Buffer, Mark, Memory, Nccl};
use distmuon::dist::{Launch, Reduction, World};
use distmuon::{Error, Result};

type Create = unsafe extern "C" fn() -> *mut c_void;
type Count = unsafe extern "C" fn(*mut c_void) -> u64;
type Delay = unsafe extern "C" fn(*mut c_void, u64);

thread_local! {
    static BACKLOG: Cell<Option<Duration>> = const { Cell::new(None) };
    static LOSES_MARK: Cell<bool> = const { Cell::new(false) };
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
pub struct HostMemory {
    device: Device,
    stream: Arc<Stream>,
    waits: Waits,
    /// What the stream may still read, though its tensor is gone: memory of a device is not reused
    /// before.
    sent: Mutex<Vec<(u64, Arc<TensorData>)>>,
}

#[derive(Debug)]
struct Stream {
    stream: *mut c_void,
    launched: Count,
    finished: Count,
    delay: Delay,
    /// What work on tensors waits for.
    held: AtomicU64,
    _library: libloading::Library,
}

// SAFETY: streams of the test library may be used by any thread, and are never freed.
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
    pub fn new(device: Device, waits: Waits) -> Self {
        // SAFETY: these are the functions of the test library.
        unsafe {
            let library =
                libloading::Library::new(folder().join("libnccl.so")).expect("it was built");
            let create = *library.get::<Create>(b"distmuonTestStreamCreate").expect("it is there");
            let launched =
                *library.get::<Count>(b"distmuonTestStreamLaunched").expect("it is there");
            let finished =
                *library.get::<Count>(b"distmuonTestStreamFinished").expect("it is there");
            let delay = *library.get::<Delay>(b"distmuonTestStreamDelay").expect("it is there");
            let (stream, held) = (create(), AtomicU64::new(0));
            let stream = Stream { stream, launched, finished, delay, held, _library: library };
            let (device, stream) = (device.inner(), Arc::new(stream));
            Self { device, stream, waits, sent: Mutex::default() }
        }
    }
}

/// Makes the next call of this thread fail on its way, on this rank.
pub fn fail_next() {
    // SAFETY: this is a function of the test library.
    unsafe {
        let library = libloading::Library::new(folder().join("libnccl.so")).expect("it was built");
        let fail: libloading::Symbol<'_, unsafe extern "C" fn()> =
            library.get(b"distmuonTestFailNext").expect("it is there");
        fail();
    }
}

/// Keeps this rank's device busy for some time before the next call of this thread.
pub fn delay_next(time: Duration) {
    BACKLOG.set(Some(time));
}

/// Makes the mark behind the next call of this thread fail, as a driver may.
pub fn lose_next_mark() {
    LOSES_MARK.set(true);
}

/// Bytes that this thread's rank has sent to others so far.
pub fn sent() -> u64 {
    // SAFETY: this is a function of the test library.
    unsafe {
        let library = libloading::Library::new(folder().join("libnccl.so")).expect("it was built");
        let sent: libloading::Symbol<'_, unsafe extern "C" fn() -> u64> =
            library.get(b"distmuonTestBytesSent").expect("it is there");
        sent()
    }
}

/// Where the test library lies: beside the tests.
pub fn folder() -> PathBuf {
    let own = PathBuf::from(std::env::args_os().next().expect("a program has a name"));
    own.parent().expect("it is in a folder").to_owned()
}

/// Makes the engine find the test library, unless it is told of another.
pub fn use_test_library() {
    if std::env::var_os("DISTMUON_NCCL_PATH").is_some() {
        return;
    }
    // SAFETY: called first thing, before there are threads.
    unsafe { std::env::set_var("DISTMUON_NCCL_PATH", folder()) };
}

/// A world over the test library.
pub fn world(launch: &Launch, device: Device, deadline: Duration, waits: Waits) -> Result<World> {
    world_that(launch, device, deadline, waits, Reduction::default())
}

/// A world over the test library that reduces in a way.
pub fn world_that(
    launch: &Launch,
    device: Device,
    deadline: Duration,
    waits: Waits,
    reduction: Reduction,
) -> Result<World> {
    let engine = Nccl::over(Arc::new(HostMemory::new(device.clone(), waits)), launch, deadline)?;
    Ok(World::new(Arc::new(engine.with_reduction(reduction)), device))
}

// SAFETY: buffers are memory of the host, which the test library can reach: data of tensors, kept until
// the stream has passed their call, and vectors, of which `tensor` makes a tensor when the stream has
// passed the last call that is held. Streams are never freed, and work on tensors is done when it
// returns.
unsafe impl Memory for HostMemory {
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer> {
        if let Some(time) = BACKLOG.take() {
            self.stream.delay(time);
        }
        let data = Arc::new(tensor.into_data());
        let finished = self.stream.finished();
        let mut sent = self.sent.lock().expect("no panic under it");
        sent.retain(|(needed, _)| *needed > finished);
        sent.push((self.stream.launched() + 1, data.clone()));
        let (length, dtype) = (data.num_elements(), data.dtype());
        let pointer = data.as_bytes().as_ptr().cast_mut().cast();
        // SAFETY: the data has that many elements, which are not moved with it, and only read.
        Ok(unsafe { Buffer::new(pointer, length, dtype, Box::new(data)) })
    }

    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer> {
        // Poisoned, so that what is not written is seen.
        let mut bytes = vec![0xff_u8; length * dtype.size()];
        // SAFETY: the bytes are those of as many elements, and stay where they are with their vector.
        Ok(unsafe { Buffer::new(bytes.as_mut_ptr().cast(), length, dtype, Box::new(bytes)) })
    }

    fn tensor(&self, buffer: Buffer) -> Tensor<1> {
        while self.stream.finished() < self.stream.held.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_micros(100)); // ranks are more than cores
        }
        let (length, dtype) = (buffer.length(), buffer.dtype());
        let bytes = buffer.into_held().downcast::<Vec<u8>>().expect("a buffer of this memory");
        let data = TensorData::from_bytes_vec(*bytes, [length], dtype);
        Tensor::from_data(data, (&self.device, dtype))
    }

    fn begin(&self) -> Result<(*mut c_void, Box<dyn Mark>)> {
        Ok((self.stream.stream, self.mark()))
    }

    fn end(&self) -> Result<Box<dyn Mark>> {
        if LOSES_MARK.take() {
            return Err(Error::Engine {
                engine: "nccl",
                rank: 0,
                operation: "create an event".to_owned(),
                reason: "the driver is out of memory".to_owned(),
                remedy: "free some",
            });
        }
        Ok(self.mark())
    }
}

impl HostMemory {
    fn mark(&self) -> Box<dyn Mark> {
        let (stream, waits) = (self.stream.clone(), self.waits);
        Box::new(Place { launched: stream.launched(), stream, waits })
    }
}

struct Place {
    stream: Arc<Stream>,
    launched: u64,
    waits: Waits,
}

impl Mark for Place {
    fn hold_later_work(&self) -> Result<bool> {
        if self.waits == Waits::Device {
            self.stream.held.fetch_max(self.launched, Ordering::SeqCst);
        }
        Ok(self.waits == Waits::Device)
    }

    fn is_passed(&self) -> Result<bool> {
        Ok(self.stream.finished() >= self.launched)
    }
}
