//! Tensors of the CPU for the engine `nccl` over the test library.

#![allow(dead_code)] // every target uses its own part

use std::os::raw::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::Result;
use distmuon::dist::comm::{Buffer, Mark, Memory, Nccl};
use distmuon::dist::{Launch, World};

type Create = unsafe extern "C" fn() -> *mut c_void;
type Count = unsafe extern "C" fn(*mut c_void) -> u64;

/// Who waits for the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// The engine.
    Host,
    /// Whoever uses a result, as work on a device does.
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
            let held = AtomicU64::new(0);
            let stream = Stream { stream: create(), launched, finished, held, _library: library };
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
    let engine = Nccl::over(Arc::new(HostMemory::new(device.clone(), waits)), launch, deadline)?;
    Ok(World::new(Arc::new(engine), device))
}

impl Memory for HostMemory {
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer> {
        let data = Arc::new(tensor.into_data());
        let finished = self.stream.finished();
        let mut sent = self.sent.lock().expect("no panic under it");
        sent.retain(|(needed, _)| *needed > finished);
        sent.push((self.stream.launched() + 1, data.clone()));
        Ok(Buffer {
            pointer: data.as_bytes().as_ptr().cast_mut().cast(),
            length: data.num_elements(),
            dtype: data.dtype(),
            held: Box::new(data),
        })
    }

    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer> {
        // Poisoned, so that what is not written is seen.
        let mut bytes = vec![0xff_u8; length * dtype.size()];
        Ok(Buffer { pointer: bytes.as_mut_ptr().cast(), length, dtype, held: Box::new(bytes) })
    }

    fn tensor(&self, buffer: Buffer) -> Tensor<1> {
        while self.stream.finished() < self.stream.held.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let bytes = buffer.held.downcast::<Vec<u8>>().expect("a buffer of this memory");
        let data = TensorData::from_bytes_vec(*bytes, [buffer.length], buffer.dtype);
        Tensor::from_data(data, (&self.device, buffer.dtype))
    }

    fn begin(&self) -> Result<*mut c_void> {
        Ok(self.stream.stream)
    }

    fn end(&self) -> Result<Box<dyn Mark>> {
        let (stream, waits) = (self.stream.clone(), self.waits);
        Ok(Box::new(Place { launched: stream.launched(), stream, waits }))
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
