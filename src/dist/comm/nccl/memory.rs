//! How the elements of tensors become memory that NCCL can reach.

use std::any::Any;
use std::fmt::{self, Debug};
use std::os::raw::c_void;

use burn::tensor::{DType, Tensor};

use crate::error::Result;

/// The memory of a rank's tensors, and how work on it is ordered with NCCL's. All methods are called
/// by one thread at a time, in the order [`buffer`](Self::buffer), [`empty`](Self::empty),
/// [`begin`](Self::begin), a call of NCCL, [`end`](Self::end).
///
/// All groups of a rank share its memory and its stream. A stream for each would gain nothing on CUDA:
/// the events that order NCCL's work with the tensors' are those of the whole context, and hence order
/// all of its streams, too.
///
/// # Safety
///
/// NCCL reads and writes the buffers on the stream, unchecked. An implementation promises that
///
/// - buffers are as [`Buffer::new`] says, with as many elements of the tensor's type as the tensor
///   has, or as were asked for, and that two of them never overlap, unless neither is written to;
/// - the memory of a buffer is not used for anything else before the stream has passed the next
///   [`end`](Self::end), even if the buffer is dropped after a mark has
///   [held later work](Mark::hold_later_work);
/// - [`begin`](Self::begin) returns a stream that lives as long as the memory, and whose next work
///   starts after all work on tensors that was queued so far;
/// - a mark is passed no sooner than all work that was given to the stream before it.
pub unsafe trait Memory: Debug + Send + Sync {
    /// Returns the elements of a tensor, in order, where they stay while the buffer is held.
    ///
    /// # Errors
    ///
    /// If the tensor is on another device.
    fn buffer(&self, tensor: Tensor<1>) -> Result<Buffer>;

    /// Allocates memory for `length` elements.
    ///
    /// # Errors
    ///
    /// If there is none left.
    fn empty(&self, length: usize, dtype: DType) -> Result<Buffer>;

    /// Returns the tensor of a buffer that [`empty`](Self::empty) made, and that a call has filled, or
    /// will have before work that is queued from now on.
    fn tensor(&self, buffer: Buffer) -> Tensor<1>;

    /// Returns the stream for NCCL's next call, which starts after all work on tensors that was queued
    /// so far, and a mark that is passed when that work is done: from then on a call that does not
    /// finish waits for other ranks.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn begin(&self) -> Result<(*mut c_void, Box<dyn Mark>)>;

    /// Sets a mark behind all that was given to the stream so far.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn end(&self) -> Result<Box<dyn Mark>>;
}

/// A place in a stream.
pub trait Mark: Send {
    /// Makes all work on tensors that is queued from now on wait until the stream has passed this
    /// place, without waiting here. Returns `false` if the device does not support that. Reuse of the
    /// memory of tensors that are dropped is such work.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn hold_later_work(&self) -> Result<bool>;

    /// Returns `true` if the stream has passed this place.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn is_passed(&self) -> Result<bool>;
}

/// Elements of a type in memory that NCCL can reach.
pub struct Buffer {
    pointer: *mut c_void,
    length: usize,
    dtype: DType,
    held: Box<dyn Any + Send>,
}

// SAFETY: the memory is held by the buffer itself, and the pointer is not read but given to NCCL.
unsafe impl Send for Buffer {}

impl Buffer {
    /// A buffer of `length` elements that begin at `pointer`.
    ///
    /// # Safety
    ///
    /// As long as `held` lives, `length` elements of `dtype` at `pointer` can be read by NCCL and, if
    /// [`Memory::empty`] returns the buffer, written by it.
    pub unsafe fn new(
        pointer: *mut c_void,
        length: usize,
        dtype: DType,
        held: Box<dyn Any + Send>,
    ) -> Self {
        Self { pointer, length, dtype, held }
    }

    /// The number of elements.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The owner of the memory, as it was given to [`new`](Self::new).
    pub fn into_held(self) -> Box<dyn Any + Send> {
        self.held
    }

    /// Bytes of all elements.
    pub(super) fn bytes(&self) -> usize {
        self.length * self.dtype.size()
    }

    /// The address of an element.
    pub(super) fn at(&self, element: usize) -> *mut c_void {
        self.pointer.cast::<u8>().wrapping_add(element * self.dtype.size()).cast()
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {:?}", self.length, self.dtype.name(), self.pointer)
    }
}
