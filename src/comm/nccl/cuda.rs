//! The memory of a CUDA device, which holds Burn's tensors.
//!
//! NCCL's calls have a [`SideStream`]. If the driver has events of whole contexts, the stream waits
//! for all of CubeCL's streams before a call, and all of CubeCL's streams wait for it when the
//! result is used. Otherwise the host waits for the device before a call, and for NCCL after it.

use std::any::Any;
use std::fmt::{self, Debug};
use std::os::raw::c_void;

use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use distmuon_kernels::native::{Claim, DriverError, SideEvent, SideStream, in_relaxed_mode};

use super::library::ENGINE;
use super::memory::{Buffer, DeviceMemory, StreamEvent};
use crate::backend::{Failure, from_primitive, primitive};
use crate::error::{Error, Result};

/// The memory of a CUDA device, and a stream for NCCL on it. A process has at most one for each
/// device.
pub struct CudaMemory {
    client: Client,
    device: CubeDevice,
    /// The same device as Burn's type, on which the host can wait.
    burn_device: Device,
    rank: usize,
    stream: SideStream,
    /// `true` if work is ordered by events of the whole context, and not by waiting on the host.
    orders_on_device: bool,
    /// Two ranks on one device would wait for each other.
    _claim: Claim,
}

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
        let claim = Claim::new(index).ok_or_else(|| {
            let remedy = "give every rank that is a thread a device, or start a process per rank";
            unsuitable(format!("another rank of this process uses {burn_device:?}"), remedy)
        })?;
        let stream =
            SideStream::new(index).map_err(|error| driver_error(rank, "open the device", error))?;
        let orders_on_device = stream.has_context_events();
        Ok(Self { client, device, burn_device, rank, stream, orders_on_device, _claim: claim })
    }

    /// Returns the same memory, on which work is ordered by waiting on the host, for comparisons
    /// with ordering on the device.
    pub fn waiting_on_host(mut self) -> Self {
        self.orders_on_device = false;
        self
    }

    /// Returns `true` if work is ordered on the device, without waiting on the host.
    pub fn orders_on_device(&self) -> bool {
        self.orders_on_device
    }

    fn driver_error(&self, operation: &str) -> impl FnOnce(DriverError) -> Error {
        let rank = self.rank;
        let operation = operation.to_owned();
        move |error| driver_error(rank, &operation, error)
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

    /// Waits on the host until all work on tensors is done.
    fn wait_for_device(&self) -> Result<()> {
        self.burn_device.sync().map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "wait for the device".into(),
            reason: error.to_string(),
            remedy: "fix the operation on this device that failed first",
        })?;
        self.stream.make_current().map_err(self.driver_error("use the context"))
    }

    /// Records an event after all work that NCCL's stream was given so far.
    fn record(&self) -> Result<Box<dyn StreamEvent>> {
        let event = self.stream.record().map_err(self.driver_error("record an event"))?;
        Ok(Box::new(Event { event, rank: self.rank, orders_on_device: self.orders_on_device }))
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
        let ready = in_relaxed_mode(|| {
            match self.orders_on_device {
                true => {
                    let waits = self.stream.wait_for_context();
                    waits.map_err(self.driver_error("wait for an event"))?;
                }
                false => self.wait_for_device()?,
            }
            self.record()
        })?;
        Ok((self.stream.as_ptr(), ready))
    }

    fn end(&self) -> Result<Box<dyn StreamEvent>> {
        in_relaxed_mode(|| self.record())
    }
}

/// A position in NCCL's stream.
struct Event {
    event: SideEvent,
    rank: usize,
    orders_on_device: bool,
}

impl StreamEvent for Event {
    fn make_later_work_wait(&self) -> Result<bool> {
        if !self.orders_on_device {
            return Ok(false);
        }
        let waits = self.event.make_context_wait();
        waits.map_err(|error| driver_error(self.rank, "wait for an event", error))
    }

    fn is_passed(&self) -> Result<bool> {
        self.event.is_passed().map_err(|error| driver_error(self.rank, "wait for NCCL", error))
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
