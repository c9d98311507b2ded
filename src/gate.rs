//! Flags of rows or parameters that a step leaves as they are, decided on the device.

use burn::tensor::{Bool, FloatDType, Tensor};

/// A flag for every row, as a tensor on its device: no value is read back. A row is whatever is taken or left as a
/// whole: a matrix of a batch, a piece of a parameter.
#[derive(Clone)]
pub(crate) struct Gate {
    /// One entry per row: `true` if it is left.
    left: Tensor<1, Bool>,
}

impl Gate {
    /// A gate from its flags: 0 for every row that is taken, and else more.
    pub fn from_left(left: Tensor<1>) -> Self {
        Self { left: left.greater_elem(0.0) }
    }

    /// A gate of one row for as many rows as there are.
    pub fn expanded(self, rows: usize) -> Self {
        Self { left: self.left.expand([rows]) }
    }

    /// The tensor, with zeros in the rows that are left.
    pub fn clean<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        let left = self.left(&tensor);
        tensor.mask_fill(left, 0.0)
    }

    /// The new tensor, and the old one in the rows that are left.
    pub fn choose<const D: usize>(&self, new: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        new.mask_where(self.left(&old), old)
    }

    /// The flags as a tensor that is shaped like another one, without a copy.
    fn left<const D: usize>(&self, like: &Tensor<D>) -> Tensor<D, Bool> {
        let [rows] = self.left.dims();
        let mut shape = [1; D];
        shape[0] = rows;
        self.left.clone().reshape(shape).expand(like.shape())
    }
}

/// 1 where a condition holds and 0 elsewhere, in float32.
///
/// Burn makes numbers of conditions in the type that the device is configured to have by default, which
/// may be bfloat16 or float64.
pub(crate) fn ones_where<const D: usize>(condition: Tensor<D, Bool>) -> Tensor<D> {
    condition.float().cast(FloatDType::F32)
}
