//! A step of AdamW.

use burn::tensor::{Tensor, s};

use crate::backend::FiniteMask;
use crate::backend::ops::{AdamWControls, AdamWStep, ElementwiseRows, Moments};
use crate::backend::precise::scaled;

/// [`AdamWOps::adamw`](crate::backend::ops::AdamWOps::adamw), for any number of parameters.
pub fn adamw(
    step: AdamWStep,
    parameters: Vec<Tensor<1>>,
    grads: Vec<Tensor<1>>,
    mut moments: Moments,
    controls: &AdamWControls<'_>,
    rows: &[ElementwiseRows],
) -> (Vec<Tensor<1>>, Moments) {
    let mut updated = vec![];
    for ((values, grad), rows) in parameters.into_iter().zip(grads).zip(rows) {
        let range = rows.first..rows.first + values.dims()[0];
        let old = moments.clone().map(|moment| moment.slice([range.clone()]));
        let (values, new) = one_parameter(step, values, grad, old, controls, rows);
        let assign = |all: Tensor<1>, part: Tensor<1>| match all.dims() == part.dims() {
            true => part,
            false => all.slice_assign([range.clone()], part),
        };
        let largest = moments.max_moment_2.zip(new.max_moment_2);
        moments = Moments {
            moment_1: assign(moments.moment_1, new.moment_1),
            moment_2: assign(moments.moment_2, new.moment_2),
            max_moment_2: largest.map(|(all, part)| assign(all, part)),
        };
        updated.push(values);
    }
    (updated, moments)
}

fn one_parameter(
    AdamWStep { beta_1, beta_2, epsilon, cautious, .. }: AdamWStep,
    parameter: Tensor<1>,
    grad: Tensor<1>,
    moments: Moments,
    &AdamWControls { rejected, corrections, factor }: &AdamWControls<'_>,
    rows: &ElementwiseRows,
) -> (Tensor<1>, Moments) {
    let dtype = moments.moment_1.dtype();
    let row = |tensor: Tensor<1>| tensor.reshape([1, -1]);
    let of_parameter = |values: &Tensor<1>| values.clone().slice(s![rows.flag..rows.flag + 1]);
    let mask = FiniteMask::from_rows(of_parameter(rejected));
    let grad = match factor {
        Some(factor) => scaled(grad, factor.clone()),
        None => grad,
    };
    let grad = mask.zero_rejected(row(grad)).cast(dtype);
    let averaged = |old: Tensor<1>, new: Tensor<2>, beta: f64| {
        let old = row(old);
        mask.select(old.clone().mul_scalar(beta) + new.mul_scalar(1.0 - beta), old)
    };
    let moment_1 = averaged(moments.moment_1, grad.clone(), beta_1);
    let moment_2 = averaged(moments.moment_2, grad.square(), beta_2);
    // Reddi et al., algorithm 2 (<https://arxiv.org/abs/1904.09237>).
    let max_moment_2 = moments.max_moment_2.map(|old| {
        let old = row(old);
        mask.select(old.clone().max_pair(moment_2.clone()), old)
    });
    // The correction of a parameter that was never updated is zero. The quotient is not used then,
    // but has to stay finite for the selection below.
    let [c1, c2] = corrections
        .each_ref()
        .map(|c| of_parameter(c).clamp_min(f32::MIN_POSITIVE).cast(dtype).reshape([1, 1]));
    let squares = max_moment_2.as_ref().unwrap_or(&moment_2).clone();
    let root = (squares / c2).sqrt().add_scalar(epsilon);
    let direction = moment_1.clone() / c1 / root;
    let old = row(parameter);
    let precise = old.clone().cast(dtype);
    let decayed = precise.clone().mul_scalar(rows.decay);
    let decayed = match cautious {
        // Chen et al. (<https://arxiv.org/abs/2510.12402>).
        true => decayed.mask_where((precise.clone() * direction.clone()).lower_elem(0.0), precise),
        false => decayed,
    };
    let updated = (decayed - direction.mul_scalar(rows.lr)).cast(old.dtype());
    let flat = |tensor: Tensor<2>| tensor.reshape([-1]);
    let moments = Moments {
        moment_1: flat(moment_1),
        moment_2: flat(moment_2),
        max_moment_2: max_moment_2.map(flat),
    };
    (flat(mask.select(updated, old)), moments)
}
