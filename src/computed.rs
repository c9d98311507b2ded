//! What a device could not compute.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::error;

/// Fails if a device will never compute the tensor of a parameter, as far as that is known without waiting for it:
/// memory that ran out is.
pub(crate) fn check(parameter: &str, tensor: &Tensor<1>) -> error::Result<()> {
    check_all([(parameter, tensor)].into_iter())
}

/// [`check`] of several tensors on one device, which are given to it together.
pub(crate) fn check_all<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Tensor<1>)>,
) -> error::Result<()> {
    #[cfg(feature = "cube")]
    if let Some((parameter, device, failure)) = crate::cube::first_failure(tensors) {
        return Err(error::Error::NotComputed {
            parameter: parameter.to_owned(),
            device: format!("{device:?}"),
            reason: failure.reason,
            remedy: match failure.is_memory {
                true => "use more ranks, a smaller batch, or less `workspace_mb` and `bucket_mb`",
                false => "mend what the device was given before",
            },
        });
    }
    #[cfg(not(feature = "cube"))]
    let _ = tensors;
    Ok(())
}

/// Whether a device rounds to a type that it says it has. CubeCL's CPU runtime has bfloat16, but needs
/// a processor with instructions for it, or libgcc 13, and computes rubbish otherwise.
pub(crate) fn rounds_to(device: &Device, dtype: FloatDType) -> bool {
    let values = [1.5_f32, -2.0, 0.0, 64.0];
    let there = Tensor::<1>::from_data(values, (device, DType::F32)).cast(dtype);
    let back = there.cast(FloatDType::F32).try_into_data();
    back.is_ok_and(|back| back.as_slice::<f32>().is_ok_and(|back| back == values))
}
