//! The error type of the kernels, and the checks before a launch.

use cubecl::client::Client;
use cubecl::features::TypeUsage;
use cubecl::ir::{AddressType, ElemType};
use cubecl::server::Handle;

/// The reason why a kernel was not launched, or why its result could not be read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device does not support the element type.
    #[error(
        "the element type is not supported: expected one that the device reads, converts and \
         writes, got {0:?}; use float32"
    )]
    Dtype(ElemType),
    /// An operand does not fit the other operands or the kernel.
    #[error(
        "the shape or type of {operand} does not fit: expected {expected}, got {actual}; pass \
         operands that fit together"
    )]
    Shape {
        /// The operand that does not fit.
        operand: &'static str,
        /// The shapes that are accepted.
        expected: String,
        /// The operand's shape.
        actual: String,
    },
    /// The operand's layout in memory has gaps that the kernel does not skip.
    #[error(
        "the strides of {operand} do not fit: expected {expected}, got {strides:?}; copy it to a \
         contiguous buffer first"
    )]
    Strides {
        /// The operand that does not fit.
        operand: &'static str,
        /// The layouts that are accepted.
        expected: &'static str,
        /// The operand's strides.
        strides: [usize; 3],
    },
    /// A buffer is smaller than the elements that are read or written.
    #[error(
        "the buffer of {operand} is too small: expected at least {needed} bytes, got {bytes}; \
         allocate a larger one"
    )]
    Buffer {
        /// The operand in the buffer.
        operand: &'static str,
        /// Bytes of the buffer.
        bytes: u64,
        /// Bytes that are read or written.
        needed: u64,
    },
    /// The batch has more matrices than one launch can have.
    #[error(
        "the batch is too large: expected at most {max} matrices in one launch, got {count}; \
         split the batch"
    )]
    TooMany {
        /// Matrices of the batch.
        count: usize,
        /// Matrices that one launch can have.
        max: usize,
    },
    /// A buffer has more elements than the device can address.
    #[error(
        "the buffer is too large: expected elements that the device can address, got {elements}; \
         split the batch"
    )]
    TooLarge {
        /// Elements from the first to the last one.
        elements: usize,
    },
    /// The result is larger than the largest allocation of the device.
    #[error(
        "the result is too large: expected at most the {max} bytes of one allocation on this \
         device, got {bytes}; split the batch"
    )]
    Memory {
        /// Bytes of the result.
        bytes: u64,
        /// Bytes of the largest allocation.
        max: u64,
    },
    /// The device did not return a result.
    #[error("the result can't be read: {0}; check that the device still works")]
    Read(String),
    /// The device does not run the kernel.
    #[error("the kernel {kernel} does not run on this device: {reason}; choose another tiling")]
    Unsupported {
        /// The kernel.
        kernel: String,
        /// The requirement that the device does not meet.
        reason: String,
    },
}

/// A [`Result`](core::result::Result) with this crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Checks that kernels on a device can read, convert and write a type.
pub(crate) fn check_dtype(client: &Client, dtype: ElemType) -> Result<()> {
    let usage = TypeUsage::Buffer | TypeUsage::Conversion;
    let is_supported = client.properties().type_usage(dtype).is_superset(usage);
    if is_supported { Ok(()) } else { Err(Error::Dtype(dtype)) }
}

/// Checks that a device has addresses for a number of elements.
pub(crate) fn check_addresses(client: &Client, elements: usize) -> Result<()> {
    let has_addresses = client.properties().supports_address(AddressType::from_len(elements));
    if has_addresses { Ok(()) } else { Err(Error::TooLarge { elements }) }
}

/// Checks that a launch has at least as many cubes along a dimension as there are matrices.
pub(crate) fn check_count(count: usize, max_cubes: u32) -> Result<()> {
    let max = max_cubes as usize;
    if count <= max { Ok(()) } else { Err(Error::TooMany { count, max }) }
}

/// Checks that a buffer has room for a number of elements.
pub(crate) fn check_buffer(
    operand: &'static str,
    handle: &Handle,
    elements: usize,
    dtype: ElemType,
) -> Result<()> {
    let bytes = handle.size_in_used();
    // Saturates for extents that no buffer has, so those are also rejected.
    let needed = elements.saturating_mul(dtype.size()) as u64;
    if bytes < needed { Err(Error::Buffer { operand, bytes, needed }) } else { Ok(()) }
}
