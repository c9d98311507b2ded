//! What a gradient has to be.

use burn::tensor::Tensor;

use crate::error::{Error, Result};

/// Fails if the gradient of a parameter has another shape, or is on another device.
pub(crate) fn check<const D: usize>(
    path: &str,
    rank: usize,
    parameter: &Tensor<D>,
    gradient: &Tensor<D>,
) -> Result<()> {
    let refuse =
        |reason, remedy| Err(Error::Parameter { parameter: path.to_owned(), rank, reason, remedy });
    let [own, expected] = [gradient, parameter].map(Tensor::dims);
    if own != expected {
        let reason = format!("its gradient is {own:?}, and not {expected:?}");
        return refuse(reason, "give gradients of the shape of the parameter");
    }
    let [own, expected] = [gradient, parameter].map(|tensor| tensor.device().inner());
    if own != expected {
        let reason = format!("its gradient is on {own:?}, and not on {expected:?}");
        return refuse(reason, "move it there with `to_device`");
    }
    Ok(())
}
