//! The memory of a CUDA device, which holds Burn's tensors.
//!
//! NCCL's calls have a [`SideStream`] for each group, which waits for CubeCL's work on the tensors
//! of a call. All of CubeCL's streams wait for it when the result is used, or the host does.

use std::fmt::{self, Debug};
use std::os::raw::c_void;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use distmuon_kernels::native::{
    Claim, DriverError, Refusal, SideEvent, SideStream, in_relaxed_mode,
};
use distmuon_kernels::operands::{Operand, Order};

use super::library::ENGINE;
use super::memory::{Buffer, DeviceMemory, StreamEvent};
use crate::backend::{Failure, from_primitive, primitive};
use crate::error::{Error, Result};

/// The memory of a CUDA device, and a stream for NCCL on it. A device belongs to at most one rank
/// of a process.
pub struct CudaMemory {
    client: Client,
    device: CubeDevice,
    index: usize,
    rank: usize,
    stream: SideStream,
    order: Order,
    claim: Arc<Claim>,
}

impl Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {:?}, with calls {}", self.device, self.order)
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
        // A tensor has the client of its device, and tells whether the device is a CUDA device.
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
        let order = Order::of(index).map_err(|Refusal(reason)| {
            unsuitable(reason, "check that the device works, for example with nvidia-smi")
        })?;
        let stream =
            SideStream::new(index).map_err(|error| driver_error(rank, "open the device", error))?;
        Ok(Self { client, device, index, rank, stream, order, claim: Arc::new(claim) })
    }

    /// Returns the same memory, with another order of the work on it, for comparisons. `order` is
    /// one of this device.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn with_order(&self, order: Order) -> Result<Self> {
        let Self { index, rank, .. } = *self;
        let stream = SideStream::new(index).map_err(self.driver_error("open a stream"))?;
        let (client, device) = (self.client.clone(), self.device.clone());
        Ok(Self { client, device, index, rank, stream, order, claim: self.claim.clone() })
    }

    /// Returns the way in which NCCL's calls wait for the work on tensors.
    pub fn order(&self) -> &Order {
        &self.order
    }

    fn driver_error(&self, operation: &str) -> impl FnOnce(DriverError) -> Error {
        let rank = self.rank;
        let operation = operation.to_owned();
        move |error| driver_error(rank, &operation, error)
    }

    /// Pins the memory of a tensor to its address, as long as the buffer exists.
    fn pinned(&self, tensor: CubeTensor, length: usize, dtype: DType) -> Result<Buffer> {
        let operand =
            Operand::new(&self.client, &tensor.handle).map_err(|error| Error::Engine {
                engine: ENGINE,
                rank: self.rank,
                operation: "pin the memory of a tensor".into(),
                reason: Failure::from(error).reason,
                remedy: "free memory of the device, for example with a smaller `bucket_mb`",
            })?;
        let pointer = operand.address() as *mut c_void;
        let owner = PinnedTensor { tensor, _operand: operand };
        // SAFETY: the tensor is contiguous and has that many elements, and the operand pins them.
        Ok(unsafe { Buffer::new(pointer, length, dtype, Box::new(owner)) })
    }

    /// Records an event after all work that NCCL's stream was given so far.
    fn record(&self) -> Result<Box<dyn StreamEvent>> {
        let event = self.stream.record().map_err(self.driver_error("record an event"))?;
        let host_waits = matches!(self.order, Order::Host);
        Ok(Box::new(Event { event, rank: self.rank, host_waits }))
    }
}

/// A tensor whose memory stays at its address.
struct PinnedTensor {
    tensor: CubeTensor,
    _operand: Operand,
}

// SAFETY: buffers are contiguous tensors, pinned while the buffers exist, and new ones are separate
// allocations. Both are operands, whose work the stream waits for. CubeCL's reuse of memory is work
// on its streams, which wait for NCCL's stream, unless the host waits. The stream is destroyed with
// the memory. Events are recorded after all work that the stream was given.
unsafe impl DeviceMemory for CudaMemory {
    fn for_group(&self) -> Result<Arc<dyn DeviceMemory>> {
        Ok(Arc::new(self.with_order(self.order().clone())?))
    }

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
        // NCCL is given an address and a length, and knows no strides.
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
        let ready = self.order.ready(&self.client).map_err(|Refusal(reason)| Error::Engine {
            engine: ENGINE,
            rank: self.rank,
            operation: "wait for the device".into(),
            reason,
            remedy: "fix the operation on this device that failed first",
        })?;
        let ready = in_relaxed_mode(|| {
            let waits = self.stream.wait_for(ready);
            waits.map_err(self.driver_error("wait for the work on tensors"))?;
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
    host_waits: bool,
}

impl StreamEvent for Event {
    fn make_later_work_wait(&self) -> Result<bool> {
        if self.host_waits {
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
