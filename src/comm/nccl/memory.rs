//! The interface between tensors and the memory that NCCL accesses.

use std::any::Any;
use std::fmt::{self, Debug};
use std::os::raw::c_void;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use crate::error::Result;

/// The memory of a rank's tensors with a stream for the calls of a group, and the order of work on
/// the memory with NCCL's work.
///
/// For each call, one thread calls [`buffer`](Self::buffer), [`empty`](Self::empty),
/// [`begin`](Self::begin), NCCL, and [`end`](Self::end), one call at a time.
///
/// # Safety
///
/// NCCL reads and writes the buffers on the stream, unchecked. An implementation guarantees that
///
/// - buffers satisfy [`Buffer::new`], with the elements of the tensor, or with the requested number
///   and type of elements;
/// - two buffers never overlap, unless neither is written to;
/// - the memory of a buffer is not reused before the stream has passed the event of the next
///   [`end`](Self::end), even if the buffer is dropped after
///   [`StreamEvent::make_later_work_wait`];
/// - [`begin`](Self::begin) returns a stream that lives as long as the memory, and whose next work
///   starts after all work on the memory of the call's buffers that was queued before;
/// - an event is not passed before all work that the stream was given before the event.
pub unsafe trait DeviceMemory: Debug + Send + Sync {
    /// Returns the same memory, with a stream of its own for another group.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn for_group(&self) -> Result<Arc<dyn DeviceMemory>>;

    /// Returns the elements of a tensor, in order. They stay at their address while the buffer
    /// exists.
    ///
    /// # Errors
    ///
    /// If the tensor is on another device.
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer>;

    /// Allocates memory for `length` elements.
    ///
    /// # Errors
    ///
    /// If the memory is exhausted.
    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer>;

    /// Returns the tensor of a buffer that [`empty`](Self::empty) has allocated. A call has filled
    /// the buffer, or fills it before work that is queued from now on.
    fn tensor(&self, buffer: Buffer) -> Tensor<1>;

    /// Returns the stream for NCCL's next call, which starts after all work on its buffers that was
    /// queued before. Also returns an event that is passed when that work is done. A call that does
    /// not finish after this event waits for other ranks.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn begin(&self) -> Result<(*mut c_void, Box<dyn StreamEvent>)>;

    /// Records an event after all work that the stream was given so far.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn end(&self) -> Result<Box<dyn StreamEvent>>;
}

/// A position in a stream.
pub trait StreamEvent: Send {
    /// Makes all work on tensors that is queued from now on wait until the stream has passed this
    /// event, without waiting on the host. Reuse of the memory of dropped tensors is such work.
    /// Returns `false` if the device does not support that.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn make_later_work_wait(&self) -> Result<bool>;

    /// Returns `true` if the stream has passed this event.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn is_passed(&self) -> Result<bool>;
}

/// Elements of one type in memory that NCCL can access.
pub struct Buffer {
    pointer: *mut c_void,
    length: usize,
    dtype: DType,
    owner: Box<dyn Any + Send>,
}

// SAFETY: the buffer owns the memory, and the pointer is not dereferenced but passed to NCCL.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Returns a buffer of `length` elements that begin at `pointer`.
    ///
    /// # Safety
    ///
    /// As long as `owner` lives, NCCL can read `length` elements of `dtype` at `pointer` and, if
    /// [`DeviceMemory::empty`] returns the buffer, write them.
    pub unsafe fn new(
        pointer: *mut c_void,
        length: usize,
        dtype: DType,
        owner: Box<dyn Any + Send>,
    ) -> Self {
        Self { pointer, length, dtype, owner }
    }

    /// Returns the number of elements.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the owner of the memory that was given to [`new`](Self::new).
    pub fn into_owner(self) -> Box<dyn Any + Send> {
        self.owner
    }

    /// Returns the bytes of all elements.
    pub(super) fn bytes(&self) -> usize {
        self.length * self.dtype.size()
    }

    /// Returns the address of an element.
    pub(super) fn address(&self, element: usize) -> *mut c_void {
        self.pointer.cast::<u8>().wrapping_add(element * self.dtype.size()).cast()
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {:?}", self.length, self.dtype.name(), self.pointer)
    }
}
