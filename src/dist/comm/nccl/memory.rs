//! How the elements of tensors become memory that NCCL can reach.

use std::any::Any;
use std::fmt::{self, Debug};
use std::os::raw::c_void;

use burn::tensor::{DType, Tensor};

use crate::error::Result;

/// Where the tensors of a rank lie, and how work on them is ordered with NCCL's. All methods are
/// called by one thread at a time.
pub trait Memory: Debug + Send + Sync {
    /// The elements of a tensor, in order, where they stay while the buffer is held.
    ///
    /// # Errors
    ///
    /// If the tensor is on another device.
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer>;

    /// Memory for so many elements.
    ///
    /// # Errors
    ///
    /// If there is none left.
    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer>;

    /// The tensor of a buffer that [`empty`](Self::empty) made, and that a call has filled, or will have
    /// before work that is queued from now on.
    fn tensor(&self, buffer: Buffer) -> Tensor<1>;

    /// The stream for NCCL's next call, which starts after all work on tensors that was queued so far.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn begin(&self) -> Result<*mut c_void>;

    /// A mark behind what was given to the stream so far.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn end(&self) -> Result<Box<dyn Mark>>;
}

/// A place in a stream.
pub trait Mark: Send {
    /// Makes all work on tensors that is queued from now on wait until the stream has passed this place,
    /// without waiting here; whether that could be had. Reuse of the memory of tensors that are
    /// dropped is such work.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn hold_later_work(&self) -> Result<bool>;

    /// Whether the stream has passed it.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn is_passed(&self) -> Result<bool>;
}

/// Elements of a type in memory that NCCL can reach.
pub struct Buffer {
    /// Their first byte.
    pub pointer: *mut c_void,
    /// Their number.
    pub length: usize,
    /// Their type.
    pub dtype: DType,
    /// What keeps them there.
    pub held: Box<dyn Any + Send>,
}

// SAFETY: the memory is held by the buffer itself, and the pointer is not read but given to NCCL.
unsafe impl Send for Buffer {}

impl Buffer {
    /// The byte at which an element begins.
    pub(super) fn at(&self, element: usize) -> *mut c_void {
        self.pointer.cast::<u8>().wrapping_add(element * self.dtype.size()).cast()
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {:?}", self.length, self.dtype.name(), self.pointer)
    }
}
