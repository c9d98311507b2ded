//! Detection of tensors that a device will never compute.

#[cfg(feature = "fusion")]
use std::sync::mpsc::{Sender, channel};

use burn::backend::tensor::FloatTensor;
#[cfg(all(test, feature = "fusion"))]
use burn::tensor::DType;
use burn::tensor::{Device, Tensor};
use burn_cubecl::Cube;
#[cfg(feature = "fusion")]
use burn_cubecl::CubeBackend;
#[cfg(feature = "fusion")]
use burn_cubecl::fusion::{CubeFusionHandle, FusionCubeRuntime};
use burn_cubecl::tensor::CubeTensor;
#[cfg(feature = "fusion")]
use burn_fusion::custom::{Operation, StreamId};
#[cfg(feature = "fusion")]
use burn_fusion::{ExecutionError, FusionTensor};
#[cfg(feature = "fusion")]
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use cubecl::server::{IoError, ServerError};

/// Returns the primitives of tensors of one device, once the operations that compute them are
/// queued there. One request serves all tensors. `None` if Burn dropped an operation that one of
/// them needs.
#[cfg(feature = "fusion")]
fn primitives(tensors: Vec<FusionTensor<FusionCubeRuntime>>) -> Option<Vec<CubeTensor>> {
    let client = tensors.first()?.client.clone();
    let inputs: Vec<_> = tensors.into_iter().map(FusionTensor::into_ir).collect();
    let (sender, receiver) = channel();
    let operation = OperationIr::Custom(CustomOpIr::new("hand_over", &inputs, &[]));
    client.register(StreamId::current(), operation, HandOver { inputs, to: sender });
    client.sync(|| ());
    // An operation that needs the result of a failed one is dropped, and with it the sender.
    receiver.recv().ok()
}

#[cfg(not(feature = "fusion"))]
fn primitives(tensors: Vec<CubeTensor>) -> Option<Vec<CubeTensor>> {
    Some(tensors)
}

/// An operation that computes nothing, and sends its inputs to the thread that waits for them.
#[cfg(feature = "fusion")]
#[derive(Debug)]
struct HandOver {
    inputs: Vec<TensorIr>,
    to: Sender<Vec<CubeTensor>>,
}

#[cfg(feature = "fusion")]
impl Operation<FusionCubeRuntime> for HandOver {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        let inputs = self.inputs.iter().map(|input| handles.get_float_tensor::<CubeBackend>(input));
        // The receiver is gone only if the thread that asked has panicked.
        _ = self.to.send(inputs.collect());
        Ok(())
    }
}

/// Returns the first of some named tensors of one device that will never be computed, with the
/// reason: a tensor that the device could not allocate, or one that needs such a tensor. Waits
/// until all work is queued on the device, but not until the work is done: a later failure is not
/// found.
pub(crate) fn first_failure<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Tensor<1>)>,
) -> Option<(&'a str, Device, Failure)> {
    let on_cube = |named: (&'a str, &'a Tensor<1>)| {
        Some((named, named.1.clone().try_into_primitive::<Cube>().ok()?))
    };
    let (named, given): (Vec<_>, Vec<_>) = tensors.filter_map(on_cube).unzip();
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
        let reason = "an operation before it failed; its error is in the log".to_owned();
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
                let reason = words.split("\nBacktrace").next().unwrap_or_default().to_owned();
                Self { reason, is_memory: false }
            }
        }
    }
}

#[cfg(all(test, feature = "fusion"))]
mod tests {
    use burn::backend::DispatchDevice;
    use burn_fusion::get_client;

    use super::*;
    use crate::skips::excused;

    /// An operation that fails, so that Burn drops it.
    #[derive(Debug)]
    struct Fails;

    impl Operation<FusionCubeRuntime> for Fails {
        fn execute(&self, _: &mut HandleContainer<CubeFusionHandle>) -> Result<(), ExecutionError> {
            Err(ExecutionError::WithContext { reason: "the test asks for it".to_owned() })
        }
    }

    #[test]
    fn a_tensor_of_a_failed_operation_is_named() {
        let device = Device::default();
        let DispatchDevice::Cube(cube) = device.as_dispatch() else {
            excused("operations fail later than they are called on CubeCL's devices only");
            return;
        };
        // Queued before the failure: operations that are fused with a failing one are not computed
        // either.
        let good = Tensor::<1>::ones([3], &device);
        assert!(first_failure([("good", &good)].into_iter()).is_none());
        let client = get_client::<CubeBackend>(cube);
        let id = client.create_empty_handle();
        let output = TensorIr::uninit(id, [3].into(), DType::F32);
        let operation = OperationIr::Custom(CustomOpIr::new("fails", &[], &[output]));
        let lost = client.register(StreamId::current(), operation, Fails).remove(0);
        let lost = Tensor::<1>::from_primitive::<Cube>(lost).add_scalar(1.0);
        let tensors = [("good", &good), ("lost", &lost), ("more", &good)];
        let (name, _, failure) = first_failure(tensors.into_iter()).expect("one failed");
        assert_eq!(name, "lost");
        assert!(failure.reason.contains("an operation before it failed"), "{}", failure.reason);
        assert!(first_failure([("good", &good)].into_iter()).is_none());
    }
}
