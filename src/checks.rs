//! Checks of settings, of what a step is given, and of what a device has made of it.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::error::{Error, Result};

/// Fails for a setting that is not the decay of a moving average.
pub(crate) fn ensure_decay(setting: &str, value: f64) -> Result<()> {
    // NaN is in no range, and so is refused too.
    match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::setting(setting, value, "at least 0 and less than 1")),
    }
}

/// Fails for a setting that is negative or not finite.
pub(crate) fn ensure_size(setting: &str, value: f64) -> Result<()> {
    match value.is_finite() && value >= 0.0 {
        true => Ok(()),
        false => Err(Error::setting(setting, value, "a finite number, zero or more")),
    }
}

/// Fails if the gradient of a parameter has another shape, or is on another device.
pub(crate) fn ensure_gradient_matches<const D: usize>(
    path: &str,
    rank: usize,
    parameter: &Tensor<D>,
    gradient: &Tensor<D>,
) -> Result<()> {
    let [shape, expected] = [gradient, parameter].map(Tensor::dims);
    if shape != expected {
        let reason =
            format!("its gradient has the wrong shape: expected {expected:?}, got {shape:?}");
        return Err(Error::parameter(
            path,
            rank,
            reason,
            "give gradients of the parameter's shape",
        ));
    }
    // Gradients come without autodiff, parameters may have it.
    let [device, expected] = [gradient, parameter].map(|tensor| tensor.device().inner());
    if device != expected {
        let reason =
            format!("its gradient is on the wrong device: expected {expected:?}, got {device:?}");
        return Err(Error::parameter(path, rank, reason, "move the gradient with `to_device`"));
    }
    Ok(())
}

/// Fails if a device will never compute the tensor of a parameter, as far as that is known without
/// waiting for the device: memory that ran out is.
pub(crate) fn ensure_computed(parameter: &str, tensor: &Tensor<1>) -> Result<()> {
    ensure_all_computed([(parameter, tensor)].into_iter())
}

/// [`ensure_computed`] for several tensors on one device, which are submitted to it together.
pub(crate) fn ensure_all_computed<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Tensor<1>)>,
) -> Result<()> {
    #[cfg(feature = "cube")]
    if let Some((parameter, device, failure)) = crate::backend::first_failure(tensors) {
        return Err(Error::NotComputed {
            parameter: parameter.to_owned(),
            device: format!("{device:?}"),
            reason: failure.reason,
            remedy: match failure.is_memory {
                true => {
                    "use more ranks, a smaller batch, or a smaller `workspace_mb`, `bucket_mb` or \
                     `ahead_mb`"
                }
                false => "fix the operation on this device that failed first",
            },
        });
    }
    #[cfg(not(feature = "cube"))]
    let _ = tensors;
    Ok(())
}

/// Returns `true` if a device rounds to a type that it claims to support.
///
/// CubeCL's CPU runtime supports bfloat16 only on a processor with instructions for it, or with
/// libgcc 13, and returns garbage otherwise.
pub(crate) fn rounds_to(device: &Device, dtype: FloatDType) -> bool {
    // Exact in every float type, so that a device which rounds returns them unchanged.
    let values = [1.5_f32, -2.0, 0.0, 64.0];
    let rounded = Tensor::<1>::from_data(values, (device, DType::F32)).cast(dtype);
    let back = rounded.cast(FloatDType::F32).try_into_data();
    back.is_ok_and(|back| back.as_slice::<f32>().is_ok_and(|back| back == values))
}
