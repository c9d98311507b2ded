//! x
use burn::optim::StateSource;
use burn::tensor::{Device, Tensor};

/// The tensor of an optimizer state that was saved under this name, with the type it was saved in.
pub(crate) fn saved_tensor<const D: usize>(
    name: &str,
    prefix: &str,
    source: &mut StateSource,
    device: &Device,
) -> Option<Tensor<D>> {
    let data = source.take_tensor(prefix, name)?;
    let dtype = data.dtype();
    (data.rank() == D).then(|| Tensor::from_data(data, (device, dtype)))
}
