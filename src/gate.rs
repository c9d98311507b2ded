//! What happens to a parameter whose gradient is not finite: nothing, decided on the device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::tensor::{Bool, FloatDType, Tensor};

/// Whether a gradient is finite, as a tensor on its device: no value is read back.
#[derive(Clone)]
pub(crate) struct Gate {
    /// `[1]`, float32: 1 if the gradient is finite, else 0.
    accepted: Tensor<1>,
}

impl Gate {
    /// Looks at every entry of the gradient.
    pub fn of<const D: usize>(grad: &Tensor<D>) -> Self {
        Self { accepted: grad.clone().is_finite().all().float().cast(FloatDType::F32) }
    }

    /// A gate from its tensor.
    pub fn from_accepted(accepted: Tensor<1>) -> Self {
        Self { accepted }
    }

    /// The tensor of the gate.
    pub fn accepted(&self) -> Tensor<1> {
        self.accepted.clone()
    }

    /// The gradient, or zeros if it is refused.
    pub fn clean<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        let refused = self.refused(&grad);
        grad.mask_fill(refused, 0.0)
    }

    /// The updated tensor, or the old one if the gradient is refused.
    pub fn choose<const D: usize>(&self, updated: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        updated.mask_where(self.refused(&old), old)
    }

    /// One more than before if the gradient is refused.
    pub fn count(&self, before: Option<Tensor<1>>) -> Tensor<1> {
        let one = self.accepted().neg().add_scalar(1.0);
        match before {
            Some(before) => before + one,
            None => one,
        }
    }

    fn refused<const D: usize>(&self, like: &Tensor<D>) -> Tensor<D, Bool> {
        self.accepted().equal_elem(0.0).unsqueeze::<D>().expand(like.shape())
    }
}

/// How often each parameter was left untouched because its gradient was not finite.
///
/// The counts stay on the devices until they are asked for, and are saved with the optimizer's
/// state. Clones share them.
#[derive(Clone, Default, Debug)]
pub struct SkippedSteps {
    counts: Arc<Mutex<BTreeMap<String, Tensor<1>>>>,
}

impl SkippedSteps {
    /// Parameters that were left untouched at least once, with the number of times. Waits for the
    /// devices.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let counts = self.counts.lock().expect("no holder of the lock panics").clone();
        counts
            .into_iter()
            .map(|(parameter, count)| (parameter, count.into_scalar::<f32>() as u64))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    pub(crate) fn record(&self, parameter: &str, count: Tensor<1>) {
        let mut counts = self.counts.lock().expect("no holder of the lock panics");
        counts.insert(parameter.to_owned(), count);
    }
}
