//! The memory of a CUDA device, which holds Burn's tensors.
//!
//! NCCL's calls have a separate stream, and CubeCL's streams are not accessible from here. If the
//! driver supports events of whole contexts (CUDA 12.5), one event makes NCCL's stream wait for all
//! of CubeCL's streams before a call, and another one makes all of CubeCL's streams wait for NCCL's
//! when the result is used. Otherwise the host waits for the device before a call, and for NCCL
//! after it.
//!
//! Another thread may record a graph at the same time, in the mode that CubeCL chooses. The driver
//! then refuses calls such as event queries on all threads of the process, and gives up the
//! recording. None of the calls here touches a recorded stream, so all of them are made in relaxed
//! mode (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html>), as NCCL makes
//! its calls. A lock instead could deadlock: a recording waits for the device, which may wait for a
//! call of another rank of this process.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::{self, Debug};
use std::os::raw::{c_int, c_void};
use std::sync::{Mutex, MutexGuard};

use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::{DriverError, result, sys};

use super::library::ENGINE;
use super::memory::{Buffer, DeviceMemory, StreamEvent};
use crate::backend::{Failure, from_primitive, primitive};
use crate::error::{Error, Result};

/// The first driver version with `cuCtxRecordEvent` and `cuCtxWaitEvent`
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CTX.html>).
const CONTEXT_EVENTS: c_int = 12_050;

/// Makes calls of the driver that neither disturb a recording on another thread nor are refused
/// because of it.
fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the thread's mode is exchanged with the variable's.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let outcome = calls();
    // SAFETY: as above; this puts the former mode back.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    outcome
}

/// The devices that ranks of this process use. Two ranks on one device would wait for each other,
/// since an event of the context makes both wait.
static CLAIMED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// A rank's claim to a device, which no other rank of this process can claim.
struct ClaimedDevice(usize);

impl ClaimedDevice {
    fn all() -> MutexGuard<'static, BTreeSet<usize>> {
        CLAIMED.lock().expect("nothing panics while it holds the lock")
    }

    /// Returns `None` if another rank has claimed the device.
    fn claim(index: usize) -> Option<Self> {
        let is_free = Self::all().insert(index);
        // Not `then_some`: a claim that is dropped unused would release the other rank's claim.
        is_free.then(|| Self(index))
    }
}

impl Drop for ClaimedDevice {
    fn drop(&mut self) {
        Self::all().remove(&self.0);
    }
}

/// The memory of a CUDA device, and a stream for NCCL on it. A process has at most one for each
/// device.
pub struct CudaMemory {
    client: Client,
    device: CubeDevice,
    /// The same device as Burn's type, on which the host can wait.
    burn_device: Device,
    rank: usize,
    cuda: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// `true` if work is ordered by events of the whole context, and not by waiting on the host.
    has_context_events: bool,
    _claim: ClaimedDevice,
}

// SAFETY: any thread that makes the context current may use contexts, streams and events of CUDA.
unsafe impl Send for CudaMemory {}
// SAFETY: as above.
unsafe impl Sync for CudaMemory {}

impl Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {:?}", self.device)
    }
}

impl CudaMemory {
    /// Returns the memory of a device, for a rank.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the device is not a CUDA device, if another rank of this process uses
    /// it, or if the driver fails.
    pub fn new(device: &Device, rank: usize) -> Result<Self> {
        let burn_device = device.clone().inner();
        let tensor = Tensor::<1>::empty([1], &burn_device);
        let unsuitable = |reason: String, remedy| Error::Engine {
            engine: ENGINE,
            rank,
            operation: "choose a device".into(),
            reason,
            remedy,
        };
        let Some(CubeTensor { client, device: CubeDevice::Cuda(cuda), .. }) = primitive(tensor)
        else {
            let remedy = "give every rank a CUDA device, or use the engine mpi";
            return Err(unsuitable(format!("{burn_device:?} is not a CUDA device"), remedy));
        };
        let index = cuda.index;
        let device = CubeDevice::Cuda(cuda);
        let claim = ClaimedDevice::claim(index).ok_or_else(|| {
            let remedy = "give every rank that is a thread a device, or start a process per rank";
            unsuitable(format!("another rank of this process uses {burn_device:?}"), remedy)
        })?;
        let open = || -> Result<_, DriverError> {
            result::init()?;
            let cuda = result::device::get(index as c_int)?;
            // SAFETY: the device exists. CubeCL also works in this context.
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
            open().map_err(|error| driver_error(rank, "open the device", error))?;
        Ok(Self {
            client,
            device,
            burn_device,
            rank,
            cuda,
            context,
            stream,
            has_context_events,
            _claim: claim,
        })
    }

    /// Returns the same memory, on which work is ordered by waiting on the host, for comparisons
    /// with ordering on the device.
    pub fn waiting_on_host(mut self) -> Self {
        self.has_context_events = false;
        self
    }

    /// Returns `true` if work is ordered on the device, without waiting on the host.
    pub fn orders_on_device(&self) -> bool {
        self.has_context_events
    }

    fn driver_error(&self, operation: &str) -> impl FnOnce(DriverError) -> Error {
        let rank = self.rank;
        let operation = operation.to_owned();
        move |error| driver_error(rank, &operation, error)
    }

    fn event(&self) -> Result<Event> {
        // SAFETY: the context is retained as long as the memory lives.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(self.driver_error("use the context"))?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Event {
            event: event.map_err(self.driver_error("create an event"))?,
            context: self.context,
            rank: self.rank,
            orders_context: self.has_context_events,
        })
    }

    /// Pins the memory of a tensor to its address, as long as the buffer exists.
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
        let owner = PinnedTensor { tensor, _resource: Box::new(resource) };
        // SAFETY: the tensor is contiguous and has that many elements, and the resource pins them.
        Ok(unsafe { Buffer::new(pointer, length, dtype, Box::new(owner)) })
    }

    /// Makes the stream wait for all work in the context.
    fn wait_for_context(&self) -> Result<()> {
        let ready = self.event()?;
        // SAFETY: context, stream and event are alive; the event may be destroyed before it is
        // passed.
        unsafe {
            sys::cuCtxRecordEvent(self.context, ready.event)
                .result()
                .map_err(self.driver_error("record an event"))?;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(self.stream, ready.event, flags)
                .map_err(self.driver_error("wait for an event"))
        }
    }

    /// Waits on the host until all work on tensors is done.
    fn wait_for_device(&self) -> Result<()> {
        self.burn_device.sync().map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "wait for the device".into(),
            reason: error.to_string(),
            remedy: "fix the operation on this device that failed first",
        })?;
        // SAFETY: the context is retained as long as the memory lives.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(self.driver_error("use the context"))
    }

    /// Records an event after all work that NCCL's stream was given so far.
    fn record(&self) -> Result<Box<dyn StreamEvent>> {
        let event = self.event()?;
        // SAFETY: stream and event are alive.
        unsafe { result::event::record(event.event, self.stream) }
            .map_err(self.driver_error("record an event"))?;
        Ok(Box::new(event))
    }
}

/// A tensor whose memory stays at its address.
struct PinnedTensor {
    tensor: CubeTensor,
    _resource: Box<dyn Any>,
}

// SAFETY: the resource is a counted reference, which is only kept and dropped.
unsafe impl Send for PinnedTensor {}

// SAFETY: buffers are contiguous tensors, pinned while the buffers exist, and new ones are separate
// allocations. CubeCL's reuse of memory is work on its streams, which wait for NCCL's stream,
// unless the host waits. The stream is destroyed with the memory. Events are recorded after all
// work that the stream was given.
unsafe impl DeviceMemory for CudaMemory {
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer> {
        let (length, dtype) = (tensor.dims()[0], tensor.dtype());
        let tensor = primitive(tensor).filter(|tensor| tensor.device == self.device);
        let tensor = tensor.ok_or_else(|| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "get the memory of a tensor".into(),
            reason: format!("the tensor is not on {:?}", self.device),
            remedy: "give tensors on the device of the world",
        })?;
        self.pinned(into_contiguous(tensor), length, dtype)
    }

    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer> {
        // Plain bytes are contiguous. At least one byte: an allocation of no bytes has no address.
        let handle = self.client.empty((length * dtype.size()).max(1));
        let (client, device) = (self.client.clone(), self.device.clone());
        let tensor = CubeTensor::new_contiguous(client, device, [length].into(), handle, dtype);
        self.pinned(tensor, length, dtype)
    }

    fn tensor(&self, buffer: Buffer) -> Tensor<1> {
        let owner = buffer.into_owner().downcast::<PinnedTensor>();
        let owner = owner.expect("the buffer was allocated by this memory");
        from_primitive(owner.tensor)
    }

    fn begin(&self) -> Result<(*mut c_void, Box<dyn StreamEvent>)> {
        let ready = relaxed(|| match self.has_context_events {
            true => self.wait_for_context().and_then(|()| self.record()),
            false => self.wait_for_device().and_then(|()| self.record()),
        })?;
        Ok((self.stream.cast(), ready))
    }

    fn end(&self) -> Result<Box<dyn StreamEvent>> {
        relaxed(|| self.record())
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // SAFETY: the stream and the reference to the context were made in `new`, and nothing else
        // uses them.
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
    /// `true` if the whole context can wait for the event.
    orders_context: bool,
}

// SAFETY: as for `CudaMemory`.
unsafe impl Send for Event {}

impl StreamEvent for Event {
    fn make_later_work_wait(&self) -> Result<bool> {
        if !self.orders_context {
            return Ok(false);
        }
        // SAFETY: context and event are alive; the event may be destroyed before it is passed.
        relaxed(|| unsafe { sys::cuCtxWaitEvent(self.context, self.event) })
            .result()
            .map(|()| true)
            .map_err(|error| driver_error(self.rank, "wait for an event", error))
    }

    fn is_passed(&self) -> Result<bool> {
        // SAFETY: the memory retains the context, calls keep the memory, and the event is alive.
        let query = || unsafe {
            result::ctx::set_current(self.context)
                .map_err(|error| driver_error(self.rank, "use the context", error))?;
            Ok::<_, Error>(sys::cuEventQuery(self.event))
        };
        let code = relaxed(query)?;
        match code {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => code
                .result()
                .map(|()| true)
                .map_err(|error| driver_error(self.rank, "wait for NCCL", error)),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is not used afterwards. CUDA frees it when the stream has passed it.
        relaxed(|| unsafe { result::event::destroy(self.event) }).ok();
    }
}

fn driver_error(rank: usize, operation: &str, error: DriverError) -> Error {
    Error::Engine {
        engine: ENGINE,
        rank,
        operation: operation.to_owned(),
        reason: format!("{error:?}"),
        remedy: "check that the device still works, for example with nvidia-smi",
    }
}
