//! Tensors of the CPU for the engine `nccl` over the test library.

#![allow(dead_code)] // every target uses its own part

use std::os::raw::c_void;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::Result;
use distmuon::dist::comm::{Buffer, Mark, Memory, Nccl};
use distmuon::dist::{Launch, World};

type Create = unsafe extern "C" fn() -> *mut c_void;
type Count = unsafe extern "C" fn(*mut c_void) -> u64;

/// The memory of the host, and a stream of the test library.
#[derive(Debug)]
pub struct HostMemory {
    device: Device,
    stream: *mut c_void,
    launched: Count,
    finished: Count,
    _library: libloading::Library,
}

// SAFETY: streams of the test library may be used by any thread, and are never freed.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub fn new(device: Device) -> Self {
        // SAFETY: these are the functions of the test library.
        unsafe {
            let library =
                libloading::Library::new(folder().join("libnccl.so")).expect("it was built");
            let create = *library.get::<Create>(b"distmuonTestStreamCreate").expect("it is there");
            let launched =
                *library.get::<Count>(b"distmuonTestStreamLaunched").expect("it is there");
            let finished =
                *library.get::<Count>(b"distmuonTestStreamFinished").expect("it is there");
            Self { device: device.inner(), stream: create(), launched, finished, _library: library }
        }
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
pub fn world(launch: &Launch, device: Device, deadline: Duration) -> Result<World> {
    let engine = Nccl::over(Arc::new(HostMemory::new(device.clone())), launch, deadline)?;
    Ok(World::new(Arc::new(engine), device))
}

impl Memory for HostMemory {
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer> {
        let data = tensor.into_data();
        let pointer = data.as_bytes().as_ptr().cast_mut().cast();
        Ok(Buffer {
            pointer,
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
        let bytes = buffer.held.downcast::<Vec<u8>>().expect("a buffer of this memory");
        let data = TensorData::from_bytes_vec(*bytes, [buffer.length], buffer.dtype);
        Tensor::from_data(data, (&self.device, buffer.dtype))
    }

    fn begin(&self) -> Result<*mut c_void> {
        Ok(self.stream)
    }

    fn end(&self) -> Result<Box<dyn Mark>> {
        // SAFETY: the stream is one of the test library.
        let launched = unsafe { (self.launched)(self.stream) };
        Ok(Box::new(Place { stream: self.stream, launched, finished: self.finished }))
    }
}

struct Place {
    stream: *mut c_void,
    launched: u64,
    finished: Count,
}

// SAFETY: as of `HostMemory`.
unsafe impl Send for Place {}

impl Mark for Place {
    fn is_passed(&self) -> Result<bool> {
        // SAFETY: as above; the library stays loaded, since the engine holds it, too.
        Ok(unsafe { (self.finished)(self.stream) } >= self.launched)
    }
}
