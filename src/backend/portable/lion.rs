//! A step of Lion, in Burn's operations on every backend.

use burn::tensor::{Tensor, s};

use crate::backend::ops::{ElementwiseRows, LionStep};
use crate::backend::precise::scaled;
use crate::backend::{FiniteMask, precise_dtype};

/// One step of several parameters: their new values, and the new momentum of all of them. A
/// parameter whose flag is set in `rejected` keeps its values and momentum.
pub fn lion(
    LionStep { beta_1, beta_2 }: LionStep,
    parameters: Vec<Tensor<1>>,
    grads: Vec<Tensor<1>>,
    mut momentum: Tensor<1>,
    rejected: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    rows: &[ElementwiseRows],
) -> (Vec<Tensor<1>>, Tensor<1>) {
    let mut updated = vec![];
    for ((old, grad), rows) in parameters.into_iter().zip(grads).zip(rows) {
        let (dtype, stored) = (old.dtype(), momentum.dtype());
        let precise = precise_dtype(dtype);
        let row = |tensor: Tensor<1>| tensor.cast(precise).reshape([1, -1]);
        let flat = |tensor: Tensor<2>, dtype| tensor.reshape([-1]).cast(dtype);
        let mask = FiniteMask::from_rows(rejected.clone().slice(s![rows.flag..rows.flag + 1]));
        let grad = match factor {
            Some(factor) => scaled(grad, factor.clone()),
            None => grad,
        };
        let grad = mask.zero_rejected(row(grad));
        let range = rows.first..rows.first + old.dims()[0];
        let average = row(momentum.clone().slice([range.clone()]));
        let mixed =
            |beta: f64| average.clone().mul_scalar(beta) + grad.clone().mul_scalar(1.0 - beta);
        let values = row(old);
        let new = values.clone().mul_scalar(rows.decay) - mixed(beta_1).sign().mul_scalar(rows.lr);
        updated.push(flat(mask.select(new, values), dtype));
        let average = flat(mask.select(mixed(beta_2), average.clone()), stored);
        momentum = match momentum.dims() == average.dims() {
            true => average,
            false => momentum.slice_assign([range], average),
        };
    }
    (updated, momentum)
}
