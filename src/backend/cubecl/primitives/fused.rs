//! Burn's primitives where it fuses operations: a primitive is a handle, and the device's tensor
//! exists once the operations that compute it are queued.

use std::sync::mpsc::{Sender, channel};

use burn::tensor::Tensor;
use burn_cubecl::fusion::{CubeFusionHandle, FusionCubeRuntime};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{Cube, CubeBackend};
use burn_fusion::custom::{Operation, StreamId};
use burn_fusion::{ExecutionError, FusionTensor, NoOp, get_client};
use burn_ir::{
    BackendIr, CustomOpIr, HandleContainer, InitOperationIr, OperationIr, OperationOutput, TensorIr,
};

/// Returns the primitives of tensors of one device, once the operations that compute them are
/// queued there. One request serves all tensors. `None` if Burn dropped an operation that one of
/// them needs.
pub(in crate::backend::cubecl) fn primitives(
    tensors: Vec<FusionTensor<FusionCubeRuntime>>,
) -> Option<Vec<CubeTensor>> {
    let client = tensors.first()?.client.clone();
    let inputs: Vec<_> = tensors.into_iter().map(FusionTensor::into_ir).collect();
    let (sender, receiver) = channel();
    let operation = OperationIr::Custom(CustomOpIr::new("hand_over", &inputs, &[]));
    client.register(StreamId::current(), operation, HandOver { inputs, to: sender });
    client.sync(|| ());
    // An operation that needs the result of a failed one is dropped, and with it the sender.
    receiver.recv().ok()
}

/// An operation that computes nothing, and sends its inputs to the thread that waits for them.
#[derive(Debug)]
struct HandOver {
    inputs: Vec<TensorIr>,
    to: Sender<Vec<CubeTensor>>,
}

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

/// Returns the primitive of a tensor once the operations that compute it are queued on its device.
/// `None` if that is not a device of CubeCL.
pub(crate) fn primitive<const D: usize>(tensor: Tensor<D>) -> Option<CubeTensor> {
    let fused = tensor.try_into_primitive::<Cube>().ok()?;
    let client = fused.client.clone();
    Some(client.resolve_tensor_float::<CubeBackend>(fused))
}

/// Returns Burn's tensor of a CubeCL tensor: the inverse of [`primitive`].
pub(crate) fn from_primitive(tensor: CubeTensor) -> Tensor<1> {
    let (device, shape, dtype) = (tensor.device.clone(), tensor.meta.shape().clone(), tensor.dtype);
    let client = get_client::<CubeBackend>(&device);
    let handle = <CubeBackend as BackendIr>::float_tensor_handle(tensor);
    let output = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    let operation = OperationIr::Init(output);
    let fused =
        client.register(StreamId::current(), operation, NoOp::<CubeBackend>::new()).output();
    Tensor::from_primitive::<Cube>(fused)
}

#[cfg(test)]
mod tests {
    use burn::backend::DispatchDevice;
    use burn::tensor::{DType, Device};

    use super::*;
    use crate::backend::first_failure;
    use crate::skipped_tests::excused;

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
