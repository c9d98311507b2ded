//! What happens to a parameter whose gradient is not finite: nothing, decided on the device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::tensor::{Bool, FloatDType, Tensor};

/// Which rows of a gradient count, as a tensor on its device: no value is read back. A row is
/// whatever is accepted or refused as a whole: a matrix of a batch, a piece of a parameter.
#[derive(Clone)]
pub(crate) struct Gate {
    /// One entry per row, float32: 1 if the row is accepted, else 0.
    accepted: Tensor<1>,
}

impl Gate {
    /// Accepts the rows whose entries are all finite.
    pub fn of_rows<const D: usize>(grad: &Tensor<D>) -> Self {
        let [rows, columns] = rows_of(grad);
        let finite = grad.clone().is_finite().reshape([rows, columns]).all_dim(1);
        Self { accepted: ones_where(finite).reshape([rows]) }
    }

    /// A gate from its tensor.
    pub fn from_accepted(accepted: Tensor<1>) -> Self {
        Self { accepted }
    }

    /// The tensor of the gate.
    pub fn accepted(&self) -> Tensor<1> {
        self.accepted.clone()
    }

    /// Accepts all rows together if it accepts every one: a gate of one row.
    pub fn all(&self) -> Self {
        Self { accepted: self.accepted().min() }
    }

    /// A gate of one row for as many rows as there are.
    pub fn expand(&self, rows: usize) -> Self {
        Self { accepted: self.accepted().expand([rows]) }
    }

    /// The gradient, with zeros where it is refused.
    pub fn clean<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        let refused = self.refused(&grad);
        grad.mask_fill(refused, 0.0)
    }

    /// The updated tensor, and the old one where the gradient is refused.
    pub fn choose<const D: usize>(&self, updated: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        updated.mask_where(self.refused(&old), old)
    }

    /// One more than before for every row that is refused.
    pub fn count(&self, before: Tensor<1>) -> Tensor<1> {
        before + self.accepted().neg().add_scalar(1.0)
    }

    fn refused<const D: usize>(&self, like: &Tensor<D>) -> Tensor<D, Bool> {
        spread(self.accepted(), like).equal_elem(0.0)
    }
}

/// 1 where a condition holds and 0 elsewhere, in float32.
///
/// Burn makes numbers of conditions in the type that the device is configured to have by default, which
/// may be bfloat16 or float64.
pub(crate) fn ones_where<const D: usize>(condition: Tensor<D, Bool>) -> Tensor<D> {
    condition.float().cast(FloatDType::F32)
}

/// One value per row as a tensor that is shaped like another one, without a copy.
pub(crate) fn spread<const D: usize>(values: Tensor<1>, like: &Tensor<D>) -> Tensor<D> {
    let [rows] = values.dims();
    let mut shape = [1; D];
    shape[0] = rows;
    values.reshape(shape).expand(like.shape())
}

/// Rows, the first dimension, and the elements of each.
fn rows_of<const D: usize>(tensor: &Tensor<D>) -> [usize; 2] {
    let dims = tensor.dims();
    [dims[0], dims[1..].iter().product()]
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
