//! The memory of a CUDA device that Burn's tensors lie in.
//!
//! NCCL has a stream of its own. CubeCL's streams can't be named from here. Where the driver has events
//! of whole contexts (CUDA 12.5), one makes NCCL's stream wait for all of CubeCL's before a call, and
//! one makes all of CubeCL's wait for NCCL's when the result is used. Else the host waits for the
//! device before a call, and for NCCL after it.
//!
//! Meanwhile another thread may record a graph, in the mode that CubeCL chooses: the driver then
//! refuses calls such as event queries on all threads of the process, and gives the recording up. None
//! of the calls here touches a stream that is recorded, so that all of them are made in relaxed mode
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html>), as NCCL's own are. A
//! lock instead could deadlock: a recording waits for the device, which may wait for a call of
//! another rank of this process.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::{self, Debug};
use std::os::raw::{c_int, c_void};
use std::sync::{Mutex, MutexGuard};

use burn::backend::Cuda;
use burn::tensor::{DType, Device, Tensor};
#[cfg(feature = "fusion")]
use burn_cubecl::CubeBackend;
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
#[cfg(feature = "fusion")]
use burn_fusion::{NoOp, get_client, stream::StreamId};
#[cfg(feature = "fusion")]
use burn_ir::{BackendIr, InitOperationIr, OperationIr, OperationOutput};
use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::{DriverError, result, sys};

use super::library::ENGINE;
use super::memory::{Buffer, Mark, Memory};
use crate::cube::{Failure, primitive};
use crate::error::{Error, Result};

/// The first driver with `cuCtxRecordEvent` and `cuCtxWaitEvent`
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CTX.html>).
const CONTEXT_EVENTS: c_int = 12_050;

/// Makes calls of the driver that a recording on another thread neither refuses nor suffers from.
fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the thread's mode is exchanged with the variable's.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let outcome = calls();
    // SAFETY: as above; this puts the former mode back.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    outcome
}

/// Devices that a rank of this process has. Two ranks on one would wait for each other: an event of the
/// context holds both.
static TAKEN: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// A device that no other rank of this process has.
struct Taken(usize);

impl Taken {
    fn all() -> MutexGuard<'static, BTreeSet<usize>> {
        TAKEN.lock().expect("nothing panics while it holds the lock")
    }

    fn take(index: usize) -> Option<Self> {
        Self::all().insert(index).then_some(Self(index))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        Self::all().remove(&self.0);
    }
}

/// The memory of a CUDA device, and a stream for NCCL on it. There is one of a device in a process.
pub struct CudaMemory {
    client: Client,
    device: CubeDevice,
    /// The same device, to wait for.
    burn: Device,
    rank: usize,
    cuda: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Whether work is ordered by events of the whole context, and not by waiting on the host.
    has_context_events: bool,
    _taken: Taken,
}

// SAFETY: contexts, streams and events of CUDA may be used by any thread that makes the context current.
unsafe impl Send for CudaMemory {}
// SAFETY: as above.
unsafe impl Sync for CudaMemory {}

impl Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {:?}", self.device)
    }
}

impl CudaMemory {
    /// The memory of a device, for a rank.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if it is not a CUDA device, if another rank of this process has it, or if the
    /// driver refuses.
    pub fn new(device: &Device, rank: usize) -> Result<Self> {
        let burn = device.clone().inner();
        let tensor = Tensor::<1>::empty([1], &burn);
        let unfit = |reason: String, remedy| Error::Engine {
            engine: ENGINE,
            rank,
            operation: "choose a device".into(),
            reason,
            remedy,
        };
        let Some(CubeTensor { client, device: CubeDevice::Cuda(cuda), .. }) = primitive(tensor)
        else {
            let remedy = "give every rank a CUDA device, or use the engine mpi";
            return Err(unfit(format!("{burn:?} is not a CUDA device"), remedy));
        };
        let (index, device) = (cuda.index, CubeDevice::Cuda(cuda));
        let _taken = Taken::take(index).ok_or_else(|| {
            let remedy = "give every rank that is a thread a device, or start a process for each";
            unfit(format!("another rank of this process uses {burn:?}"), remedy)
        })?;
        let open = || -> Result<_, DriverError> {
            result::init()?;
            let cuda = result::device::get(index as c_int)?;
            // SAFETY: the device exists; this is the context that CubeCL works in, too.
            let context = unsafe { result::primary_ctx::retain(cuda) }?;
            // SAFETY: the context was just retained.
            unsafe { result::ctx::set_current(context) }?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            let mut version = 0;
            // SAFETY: one number is written.
            unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
            Ok((cuda, context, stream, version >= CONTEXT_EVENTS))
        };
        let (cuda, context, stream, has_context_events) =
            open().map_err(|error| refused(rank, "open the device", error))?;
        Ok(Self { client, device, burn, rank, cuda, context, stream, has_context_events, _taken })
    }

    /// The same memory, where the host waits: what ordering on the device is compared with.
    pub fn waiting_on_host(mut self) -> Self {
        self.has_context_events = false;
        self
    }

    /// Whether work is ordered on the device, without waiting on the host.
    pub fn orders_on_device(&self) -> bool {
        self.has_context_events
    }

    fn refused(&self, operation: &str) -> impl FnOnce(DriverError) -> Error {
        let (rank, operation) = (self.rank, operation.to_owned());
        move |error| refused(rank, &operation, error)
    }

    fn event(&self) -> Result<Event> {
        // SAFETY: the context is retained as long as this lives.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(self.refused("use the context"))?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = event.map_err(self.refused("create an event"))?;
        let holds = self.has_context_events;
        Ok(Event { event, context: self.context, rank: self.rank, holds })
    }

    /// Pins the memory of a tensor.
    fn pinned(&self, tensor: CubeTensor, length: usize, dtype: DType) -> Result<Buffer> {
        type Server = <CudaRuntime as Runtime>::Server;
        let resource = self.client.get_resource::<Server>(tensor.handle.clone());
        let resource = resource.map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "pin the memory of a tensor".into(),
            reason: Failure::from(error).reason,
            remedy: "free memory of the device, for example with a smaller `bucket_mb`",
        })?;
        let pointer = resource.resource().ptr as *mut c_void;
        let held = Held { tensor, _resource: Box::new(resource) };
        // SAFETY: the tensor is contiguous and has that many elements, and the resource pins them.
        Ok(unsafe { Buffer::new(pointer, length, dtype, Box::new(held)) })
    }

    /// Makes the stream wait for all work in the context.
    fn wait_for_context(&self) -> Result<()> {
        let ready = self.event()?;
        // SAFETY: context, stream and event are alive; the event may be destroyed before it is passed.
        unsafe {
            sys::cuCtxRecordEvent(self.context, ready.event)
                .result()
                .map_err(self.refused("record an event"))?;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(self.stream, ready.event, flags)
                .map_err(self.refused("wait for an event"))
        }
    }

    /// Waits on the host until the tensors' work is done.
    fn wait_for_device(&self) -> Result<()> {
        self.burn.sync().map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "wait for the device".into(),
            reason: error.to_string(),
            remedy: "an earlier operation on this device failed: fix that first",
        })?;
        // SAFETY: the context is retained as long as this lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(self.refused("use the context"))
    }

    fn mark(&self) -> Result<Box<dyn Mark>> {
        let event = self.event()?;
        // SAFETY: stream and event are alive.
        unsafe { result::event::record(event.event, self.stream) }
            .map_err(self.refused("record an event"))?;
        Ok(Box::new(event))
    }
}

/// A tensor, and its memory in its place.
struct Held {
    tensor: CubeTensor,
    _resource: Box<dyn Any>,
}

// SAFETY: what pins the memory is a counted reference that is dropped, and nothing else.
unsafe impl Send for Held {}

// SAFETY: buffers are contiguous tensors, pinned while they are held; new ones are allocations of their
// own. CubeCL's reuse of memory is work on its streams, which wait for NCCL's, or the host does. The
// stream is destroyed with the memory. Marks are events behind all that the stream was given.
unsafe impl Memory for CudaMemory {
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer> {
        let (length, dtype) = (tensor.dims()[0], tensor.dtype());
        let tensor = primitive(tensor).filter(|tensor| tensor.device == self.device);
        let tensor = tensor.ok_or_else(|| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "take a tensor".into(),
            reason: format!("it is not on {:?}", self.device),
            remedy: "give tensors on the device of the world",
        })?;
        self.pinned(into_contiguous(tensor), length, dtype)
    }

    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer> {
        // Plain bytes: contiguous. An allocation of nothing has no address.
        let handle = self.client.empty((length * dtype.size()).max(1));
        let (client, device) = (self.client.clone(), self.device.clone());
        let tensor = CubeTensor::new_contiguous(client, device, [length].into(), handle, dtype);
        self.pinned(tensor, length, dtype)
    }

    fn tensor(&self, buffer: Buffer) -> Tensor<1> {
        let held = buffer.into_held().downcast::<Held>().expect("a buffer of this memory");
        tensor_of(held.tensor)
    }

    fn begin(&self) -> Result<(*mut c_void, Box<dyn Mark>)> {
        let ready = relaxed(|| match self.has_context_events {
            true => self.wait_for_context().and_then(|()| self.mark()),
            false => self.wait_for_device().and_then(|()| self.mark()),
        })?;
        Ok((self.stream.cast(), ready))
    }

    fn end(&self) -> Result<Box<dyn Mark>> {
        relaxed(|| self.mark())
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // SAFETY: both were made by this, and nothing else uses them.
        unsafe {
            result::ctx::set_current(self.context).ok();
            result::stream::destroy(self.stream).ok();
            result::primary_ctx::release(self.cuda).ok();
        }
    }
}

/// An event of CUDA.
struct Event {
    event: sys::CUevent,
    context: sys::CUcontext,
    rank: usize,
    /// Whether the whole context can wait for it.
    holds: bool,
}

// SAFETY: as of `CudaMemory`.
unsafe impl Send for Event {}

impl Mark for Event {
    fn hold_later_work(&self) -> Result<bool> {
        if !self.holds {
            return Ok(false);
        }
        // SAFETY: context and event are alive; the event may be destroyed before it is passed.
        relaxed(|| unsafe { sys::cuCtxWaitEvent(self.context, self.event) })
            .result()
            .map(|()| true)
            .map_err(|error| refused(self.rank, "wait for an event", error))
    }

    fn is_passed(&self) -> Result<bool> {
        // SAFETY: the context is retained by the memory, which calls hold, and the event is alive.
        let query = || unsafe {
            result::ctx::set_current(self.context)
                .map_err(|error| refused(self.rank, "use the context", error))?;
            Ok::<_, Error>(sys::cuEventQuery(self.event))
        };
        let code = relaxed(query)?;
        match code {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => code
                .result()
                .map(|()| true)
                .map_err(|error| refused(self.rank, "wait for NCCL", error)),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: CUDA frees it when it has been passed.
        relaxed(|| unsafe { result::event::destroy(self.event) }).ok();
    }
}

fn refused(rank: usize, operation: &str, error: DriverError) -> Error {
    Error::Engine {
        engine: ENGINE,
        rank,
        operation: operation.to_owned(),
        reason: format!("{error:?}"),
        remedy: "check that the device still works, for example with nvidia-smi",
    }
}

/// The way back.
#[cfg(feature = "fusion")]
fn tensor_of(tensor: CubeTensor) -> Tensor<1> {
    let (device, shape, dtype) = (tensor.device.clone(), tensor.meta.shape().clone(), tensor.dtype);
    let client = get_client::<CubeBackend>(&device);
    let handle = <CubeBackend as BackendIr>::float_tensor_handle(tensor);
    let made = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    let operation = OperationIr::Init(made);
    let fused =
        client.register(StreamId::current(), operation, NoOp::<CubeBackend>::new()).output();
    Tensor::from_primitive::<Cuda>(fused)
}

#[cfg(not(feature = "fusion"))]
fn tensor_of(tensor: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<Cuda>(tensor)
}
