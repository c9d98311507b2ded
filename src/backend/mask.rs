//! Masks of rows that a step leaves as they are, decided on the device.

use burn::tensor::{Bool, FloatDType, Tensor};

use crate::flat::expand;

/// A flag for every row, as a tensor on its device: no value is read back. A row is a unit that a
/// step updates or leaves as a whole: a matrix of a batch, a slice of a parameter.
#[derive(Clone)]
pub(crate) struct FiniteMask {
    /// One entry per row: `true` if the row is rejected.
    rejected: Tensor<1, Bool>,
}

impl FiniteMask {
    /// A mask from flags: 0 for every row that is updated, and positive for every row that is
    /// rejected.
    pub fn from_rows(flags: Tensor<1>) -> Self {
        Self { rejected: flags.greater_elem(0.0) }
    }

    /// A mask of one row, repeated.
    pub fn expanded(self, rows: usize) -> Self {
        Self { rejected: expand(self.rejected, [rows]) }
    }

    /// The tensor, with zeros in the rejected rows.
    pub fn zero_rejected<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.fill_rejected(tensor, 0.0)
    }

    /// The tensor, with a value in the rejected rows.
    pub fn fill_rejected<const D: usize>(&self, tensor: Tensor<D>, value: f32) -> Tensor<D> {
        let rejected = self.like(&tensor);
        tensor.mask_fill(rejected, value)
    }

    /// The new tensor, with the old values in the rejected rows.
    pub fn select<const D: usize>(&self, new: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        // Not by a factor of 0, since 0 times NaN is NaN.
        new.mask_where(self.like(&old), old)
    }

    /// The mask in the shape of a tensor, without a copy.
    fn like<const D: usize>(&self, tensor: &Tensor<D>) -> Tensor<D, Bool> {
        let [rows] = self.rejected.dims();
        let mut shape = [1; D];
        shape[0] = rows;
        expand(self.rejected.clone().reshape(shape), tensor.dims())
    }
}

/// 1 where a condition holds and 0 elsewhere, in float32.
///
/// Burn converts conditions to the device's default float type, which may be bfloat16 or float64.
pub(crate) fn ones_where<const D: usize>(condition: Tensor<D, Bool>) -> Tensor<D> {
    condition.float().cast(FloatDType::F32)
}
