//! Detection of tensors that a device will never compute.

use burn::backend::tensor::FloatTensor;
use burn::tensor::{Device, Tensor};
use burn_cubecl::Cube;
use cubecl::server::{IoError, ServerError};

use super::primitives::primitives;

/// Returns the first of some named tensors of one device that will never be computed, with the
/// reason: a tensor that the device could not allocate, or one that needs such a tensor. Waits
/// until all work is queued on the device, but not until the work is done: a later failure is not
/// found.
pub(crate) fn first_failure<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Tensor<1>)>,
) -> Option<(&'a str, Device, Failure)> {
    let (named, given): (Vec<_>, Vec<_>) = tensors
        .filter_map(|named| Some((named, named.1.clone().try_into_primitive::<Cube>().ok()?)))
        .unzip();
    // Every request waits for the device: one for all tensors, as long as nothing fails.
    if given.is_empty() || failure(given.clone()).is_none() {
        return None;
    }
    let mut each = named.into_iter().zip(given);
    each.find_map(|((name, tensor), given)| Some((name, tensor.device(), failure(vec![given])?)))
}

/// Returns the reason for which one of these tensors will never be computed.
fn failure(tensors: Vec<FloatTensor<Cube>>) -> Option<Failure> {
    let Some(given) = primitives(tensors) else {
        let reason = "an operation before it failed, whose error is in the log".to_owned();
        return Some(Failure { reason, is_memory: false });
    };
    let client = &given.first()?.client;
    client.check(given.iter().map(|tensor| &tensor.handle)).err().map(Failure::from)
}

/// The reason for which a device does not compute a tensor.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The reason in words.
    pub reason: String,
    /// `true` if the device lacks memory.
    pub is_memory: bool,
}

impl From<ServerError> for Failure {
    /// Returns the root of the failure, without the operations that were skipped because of it and
    /// without the backtrace.
    fn from(error: ServerError) -> Self {
        let of_memory = |reason| Self { reason, is_memory: true };
        match error {
            ServerError::Several { mut errors, .. } if !errors.is_empty() => {
                Self::from(errors.swap_remove(0))
            }
            ServerError::Unwritten { root, .. } => Self::from(*root),
            ServerError::Io(IoError::OutOfMemory { size, .. }) => {
                of_memory(format!("it has no room for {size} more bytes"))
            }
            ServerError::Io(IoError::BufferTooBig { size, .. }) => {
                of_memory(format!("it can't allocate {size} bytes at once"))
            }
            other => {
                let words = other.to_string();
                // CubeCL appends its backtrace, which says nothing to a user.
                let reason = words.split("\nBacktrace").next().unwrap_or_default().to_owned();
                Self { reason, is_memory: false }
            }
        }
    }
}
