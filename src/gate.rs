//! What happens to a parameter whose gradient is not finite: nothing, decided on the device.

use burn::tensor::{Bool, FloatDType, Tensor};

/// Which rows of a gradient count, as a tensor on its device: no value is read back. A row is
/// whatever is accepted or refused as a whole: a matrix of a batch, a piece of a parameter.
#[derive(Clone)]
pub(crate) struct Gate {
    /// One entry per row, float32: 1 if the row is accepted, else 0.
    accepted: Tensor<1>,
}

impl Gate {
    /// Accepts the rows whose entries are finite and at most `largest` in magnitude.
    pub fn of_rows<const D: usize>(grad: &Tensor<D>, largest: f64) -> Self {
        let [rows, columns] = rows_of(grad);
        let usable = grad.clone().is_finite();
        let usable = usable.bool_and(grad.clone().abs().lower_equal_elem(largest));
        Self { accepted: ones_where(usable.reshape([rows, columns]).all_dim(1)).reshape([rows]) }
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

    /// Accepts the rows that both accept.
    pub fn and(&self, other: &Self) -> Self {
        Self { accepted: self.accepted() * other.accepted() }
    }

    /// 1 for every row that is refused, else 0.
    pub fn refused_rows(&self) -> Tensor<1> {
        self.accepted().neg().add_scalar(1.0)
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
        before + self.refused_rows()
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
