//! Tensors of several parameters as one argument of a backend extension.

#[cfg(feature = "fusion")]
use burn::backend::fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime, FusionTensor,
    custom::{
        ExtensionMetadata, Float, FusionValueAdapter, HandleContainer, OutputTensor, TensorId,
        TensorIr, TensorSpec,
    },
};
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    ExtensionType, tensor::FloatTensor,
};
use burn::tensor::Tensor;

/// Tensors of one device. Burn derives extension types for structs and enums, not for lists.
pub struct TensorList<B: Backend>(pub Vec<FloatTensor<B>>);

impl TensorList<Dispatch> {
    /// The list of some tensors.
    pub fn from_tensors<const D: usize>(tensors: Vec<Tensor<D>>) -> Self {
        Self(tensors.into_iter().map(Tensor::into_dispatch).collect())
    }

    /// The tensors of the list.
    pub fn into_tensors(self) -> Vec<Tensor<1>> {
        self.0.into_iter().map(Tensor::from_dispatch).collect()
    }
}

impl<B: Backend> ExtensionType<B> for TensorList<B> {
    type Target = TensorList<Dispatch>;

    fn map_to_dispatch<F>(self, map_kind: F, autodiff: DispatchAutodiffContext) -> Self::Target
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        let mapped =
            |tensor| DispatchTensor { kind: map_kind(BackendTensor::Float(tensor)), autodiff };
        TensorList(self.0.into_iter().map(mapped).collect())
    }

    fn map_from_dispatch<F>(target: Self::Target, unwrap_kind: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        Self(target.0.into_iter().map(|tensor| unwrap_kind(tensor).float()).collect())
    }

    fn routing_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn routing_float_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn autodiff_context(target: &Self::Target) -> DispatchAutodiffContext {
        let disabled = DispatchAutodiffContext::Disabled;
        target.0.iter().fold(disabled, |context, tensor| context.merge(tensor.autodiff))
    }
}

/// The handles of an inner backend's tensors.
#[cfg(feature = "fusion")]
type Handles<B> =
    HandleContainer<<<B as FusionBackend>::FusionRuntime as FusionRuntime>::FusionHandle>;

#[cfg(feature = "fusion")]
impl<B: Backend> ExtensionMetadata for TensorList<B> {
    type Metadata = Vec<TensorSpec>;
    type Input = Vec<TensorIr>;
    type Output = Vec<OutputTensor>;
}

/// Each tensor as Burn's adapter for one has it, in order.
#[cfg(feature = "fusion")]
impl<B: FusionBackend> FusionValueAdapter<B> for TensorList<B> {
    type Metadata = Vec<TensorSpec>;
    type Input = Vec<TensorIr>;
    type Output = Vec<OutputTensor>;
    type Inner = Self;
    type Fused = TensorList<Fusion<B>>;

    fn to_metadata(value: &Self::Fused) -> Self::Metadata {
        value.0.iter().map(<Float as FusionValueAdapter<B>>::to_metadata).collect()
    }

    fn visit_fused_tensors(
        value: &Self::Fused,
        visit: &mut impl FnMut(&FusionTensor<B::FusionRuntime>),
    ) {
        value.0.iter().for_each(visit);
    }

    fn tensor_count(meta: &Self::Metadata) -> usize {
        meta.len()
    }

    fn append_input_ir(value: Self::Fused, inputs: &mut Vec<TensorIr>) -> Self::Input {
        let appended =
            |tensor| <Float as FusionValueAdapter<B>>::append_input_ir(tensor, &mut *inputs);
        value.0.into_iter().map(appended).collect()
    }

    fn resolve_inputs(input: &Self::Input, handles: &mut Handles<B>) -> Self::Inner {
        let resolved =
            |tensor| <Float as FusionValueAdapter<B>>::resolve_inputs(tensor, &mut *handles);
        Self(input.iter().map(resolved).collect())
    }

    fn append_output_ir(
        meta: &Self::Metadata,
        out: &mut Vec<TensorIr>,
        create: &mut impl FnMut() -> TensorId,
    ) -> Self::Output {
        meta.iter()
            .map(|tensor| {
                <Float as FusionValueAdapter<B>>::append_output_ir(tensor, &mut *out, &mut *create)
            })
            .collect()
    }

    fn validate_outputs(
        value: &Self::Inner,
        output: &Self::Output,
        device: Option<&B::Device>,
    ) -> Result<(), ExecutionError> {
        // `zip` below would pass over what is missing.
        if value.0.len() != output.len() {
            let (expected, got) = (output.len(), value.0.len());
            let reason =
                format!("a list of tensors has another length: expected {expected}, got {got}");
            return Err(ExecutionError::generic(reason));
        }
        let mut each = value.0.iter().zip(output);
        each.try_for_each(|(tensor, output)| {
            <Float as FusionValueAdapter<B>>::validate_outputs(tensor, output, device)
        })
    }

    fn register_output_handles(value: Self, output: &Self::Output, handles: &mut Handles<B>) {
        for (tensor, output) in value.0.into_iter().zip(output) {
            <Float as FusionValueAdapter<B>>::register_output_handles(tensor, output, handles);
        }
    }

    fn build_fused_output(
        meta: &Self::Metadata,
        tensors: &mut std::vec::IntoIter<FusionTensor<B::FusionRuntime>>,
    ) -> Self::Fused {
        let built =
            |tensor| <Float as FusionValueAdapter<B>>::build_fused_output(tensor, &mut *tensors);
        TensorList(meta.iter().map(built).collect())
    }
}
