//! What a device can't do.

use cubecl::client::Client;
use cubecl::features::TypeUsage;
use cubecl::ir::{AddressType, ElemType};
use cubecl::server::Handle;

/// Why a kernel is not launched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device has no such type.
    #[error("the device has no {0:?}; take float32")]
    Dtype(ElemType),
    /// Matrices do not go together.
    #[error("{what} is {found:?}, but must be {expected}")]
    Shape {
        /// Which of them.
        what: &'static str,
        /// Its shape.
        found: [usize; 3],
        /// What would do.
        expected: String,
    },
    /// Neither the rows nor the columns are contiguous, or not the whole where that is asked for.
    #[error("{0} has gaps in memory that the kernel does not skip; copy it first")]
    Strides(&'static str),
    /// A buffer is too small for what it should hold.
    #[error("{what} has a buffer of {bytes} bytes, but needs {needed}")]
    Buffer {
        /// What it should hold.
        what: &'static str,
        /// Bytes of the buffer.
        bytes: u64,
        /// Bytes that are read or written.
        needed: u64,
    },
    /// The batch has more matrices than a launch can have.
    #[error("{count} matrices are more than the {most} of one launch; split the batch")]
    TooMany {
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// The device can't address so many elements.
    #[error(
        "a buffer of {elements} elements is beyond the addresses of this device; split the batch"
    )]
    TooLarge {
        /// From the first to the last element.
        elements: usize,
    },
    /// The result is larger than anything that the device allocates at once.
    #[error(
        "a result of {bytes} bytes is beyond the {most} of one allocation on this device; split the batch"
    )]
    Memory {
        /// Bytes of the result.
        bytes: u64,
        /// Bytes of the largest allocation.
        most: u64,
    },
    /// A result can't be read from the device.
    #[error("the device did not return a result: {0}")]
    Read(String),
    /// The device refuses the kernel.
    #[error("the kernel {kernel} does not run on this device: {reason}; choose another")]
    Refused {
        /// The kernel.
        kernel: String,
        /// What is missing.
        reason: String,
    },
}

/// A [`Result`](core::result::Result) with this crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Refuses a type that kernels can't read, compute with and write on a device.
pub(crate) fn check_dtype(client: &Client, dtype: ElemType) -> Result<()> {
    let usage = TypeUsage::Buffer | TypeUsage::Conversion;
    let has_type = client.properties().type_usage(dtype).is_superset(usage);
    if has_type { Ok(()) } else { Err(Error::Dtype(dtype)) }
}

/// Refuses more elements than a device has addresses for.
pub(crate) fn check_addresses(client: &Client, elements: usize) -> Result<()> {
    let has_addresses = client.properties().supports_address(AddressType::from_len(elements));
    if has_addresses { Ok(()) } else { Err(Error::TooLarge { elements }) }
}

/// Refuses more matrices than a launch has cubes along their dimension.
pub(crate) fn check_count(count: usize, cubes: u32) -> Result<()> {
    let most = cubes as usize;
    if count <= most { Ok(()) } else { Err(Error::TooMany { count, most }) }
}

/// Refuses a buffer that has no room for so many elements.
pub(crate) fn check_buffer(
    what: &'static str,
    handle: &Handle,
    elements: usize,
    dtype: ElemType,
) -> Result<()> {
    let (bytes, needed) = (handle.size_in_used(), elements.saturating_mul(dtype.size()) as u64);
    if bytes < needed { Err(Error::Buffer { what, bytes, needed }) } else { Ok(()) }
}
