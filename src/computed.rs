//! What a device could not compute.

use burn::tensor::Tensor;

use crate::error;

/// Fails if a device will never compute a tensor, as far as that is known without waiting for it: memory
/// that ran out is.
pub(crate) fn check<const D: usize>(parameter: &str, tensor: &Tensor<D>) -> error::Result<()> {
    #[cfg(feature = "cube")]
    if let Some(failure) = crate::cube::failure(tensor) {
        return Err(error::Error::NotComputed {
            parameter: parameter.to_owned(),
            device: format!("{:?}", tensor.device()),
            reason: failure.reason,
            remedy: match failure.is_memory {
                true => "use more ranks, a smaller batch, or less `workspace_mb` and `bucket_mb`",
                false => "mend what the device was given before",
            },
        });
    }
    let _ = (parameter, tensor);
    Ok(())
}
