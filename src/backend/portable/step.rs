//! The elementwise operations of a Muon step.

use burn::tensor::{DType, Tensor, s};

use crate::backend::ops::{
    Acceptance, FlaggedRows, MatrixFlags, MomentumStep, MomentumUpdate, ParameterStep, StepCounts,
};
use crate::backend::precise::scaled;
use crate::backend::{FiniteMask, ones_where, precise_dtype};
use crate::flat;

/// [`StepOps::reject`](crate::backend::ops::StepOps::reject), for one tensor.
pub fn reject<const D: usize>(
    flags: Tensor<1>,
    tensor: &Tensor<D>,
    FlaggedRows { flag, rows }: FlaggedRows,
    largest: f64,
) -> Tensor<1> {
    let usable =
        tensor.clone().is_finite().bool_and(tensor.clone().abs().lower_equal_elem(largest));
    let rejected =
        usable.reshape([rows, tensor.shape().num_elements() / rows]).all_dim(1).bool_not();
    let range = flag..flag + rows;
    // The larger of both: a flag that is set stays set.
    let new = ones_where(rejected).reshape([rows]).max_pair(flags.clone().slice([range.clone()]));
    flags.slice_assign([range], new)
}

/// [`accept`](crate::backend::accept), by Burn's operations.
pub fn accept(
    sums: Tensor<1>,
    absent: Option<&Tensor<1>>,
    StepCounts { skipped, corrections }: StepCounts,
    betas: Option<[f64; 2]>,
) -> Acceptance {
    let ([parameters], [all]) = (skipped.dims(), sums.dims());
    // A sum of flags over ranks counts; a flag says whether.
    let any = |range| ones_where(flat::slice(&sums, range).greater_elem(0.0));
    let rejected = any(0..parameters);
    let skips = match all > parameters {
        true => rejected.clone() + any(parameters..2 * parameters),
        false => rejected.clone(),
    };
    let rejected = match absent {
        Some(absent) => rejected.max_pair(absent.clone()),
        None => rejected,
    };
    let corrections = match betas {
        Some(betas) => corrected(corrections, betas, &FiniteMask::from_rows(rejected.clone())),
        None => corrections,
    };
    let counts = StepCounts { skipped: skipped + skips, corrections };
    Acceptance { rejected, counts, zeros: None }
}

/// AdamW's bias corrections after a step, for the rows of a mask.
pub fn corrected(
    corrections: [Tensor<1>; 2],
    [beta_1, beta_2]: [f64; 2],
    mask: &FiniteMask,
) -> [Tensor<1>; 2] {
    let [first, second] = corrections;
    [(first, beta_1), (second, beta_2)].map(|(old, beta)| {
        // The same average as a moment, of ones: `1 - beta^t` for the steps that were taken.
        mask.select(old.clone().mul_scalar(beta).add_scalar(1.0 - beta), old)
    })
}

/// [`StepOps::update_momentum`](crate::backend::ops::StepOps::update_momentum), for a whole batch.
pub fn update_momentum(
    grads: Vec<Tensor<1>>,
    momentum: Tensor<3>,
    rejected: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    steps: &[MomentumStep],
    nesterov: bool,
) -> MomentumUpdate {
    let [_, m, n] = momentum.dims();
    let rows: Vec<usize> = grads.iter().map(|grad| grad.dims()[0] / (m * n)).collect();
    let (mut momenta, mut updates) = (vec![], vec![]);
    let old = split(momentum, &rows);
    for (((grad, step), old), rows) in grads.into_iter().zip(steps).zip(old).zip(rows) {
        let row = |tensor: Tensor<3>| tensor.reshape([1, -1]);
        let matrices = |row: Tensor<2>| row.reshape([rows, m, n]);
        let (old, mask) = (row(old), mask(rejected, step.flag));
        let grad =
            factor.map_or_else(|| grad.clone(), |factor| scaled(grad.clone(), factor.clone()));
        let grad = mask.zero_rejected(grad.reshape([1, -1])).cast(old.dtype());
        let fresh = grad.mul_scalar(step.fresh);
        let new = old.clone().mul_scalar(step.keep) + fresh.clone();
        let update = if nesterov { new.clone().mul_scalar(step.keep) + fresh } else { new.clone() };
        momenta.push(matrices(mask.select(new, old)));
        updates.push(matrices(mask.zero_rejected(update)));
    }
    MomentumUpdate { momentum: joined(momenta), update: joined(updates), norms: None }
}

/// [`StepOps::apply`](crate::backend::ops::StepOps::apply), for a whole batch.
pub fn apply(
    parameters: Vec<Tensor<1>>,
    direction: Tensor<3>,
    rejected: &Tensor<1>,
    MatrixFlags { flags: diverged, mut first }: MatrixFlags<'_>,
    steps: &[ParameterStep],
) -> Vec<Tensor<1>> {
    let [_, m, n] = direction.dims();
    let rows: Vec<usize> = parameters.iter().map(|values| values.dims()[0] / (m * n)).collect();
    let directions = split(direction, &rows);
    let each = parameters.into_iter().zip(steps).zip(directions).zip(rows);
    let updated = each.map(|(((old, step), direction), rows)| {
        let old = old.reshape([rows, m * n]);
        let diverged = diverged.clone().slice(s![first..first + rows]);
        first += rows;
        let masks = [mask(rejected, step.flag).expanded(rows), FiniteMask::from_rows(diverged)];
        // Computed in a type in which `1 - 1e-4` is not 1, and rounded once.
        let precise = precise_dtype(old.dtype());
        let new = stepped(
            old.clone().cast(precise),
            direction.reshape([rows, m * n]).cast(precise),
            step,
        );
        let new = new.cast(old.dtype());
        masks.iter().fold(new, |new, mask| mask.select(new, old.clone())).reshape([-1])
    });
    updated.collect()
}

/// [`StepOps::restore`](crate::backend::ops::StepOps::restore), with the `rounded` master weights.
pub fn restore(
    masters: Tensor<1>,
    rounded: Tensor<1>,
    parameters: Vec<Tensor<1>>,
    firsts: &[usize],
) -> Tensor<1> {
    let published = flat::place(parameters, firsts, masters.dims()[0]);
    // Element by element: an edit of some values keeps the digits of the others.
    let is_same = rounded.equal(published.clone());
    published.cast(DType::F32).mask_where(is_same, masters)
}

/// `decay P - lr U`, where a cautious step decays only the elements with `P U >= 0`.
fn stepped(old: Tensor<2>, direction: Tensor<2>, step: &ParameterStep) -> Tensor<2> {
    let decayed = match step.cautious {
        true => {
            let opposed = (old.clone() * direction.clone()).lower_elem(0.0);
            old.clone().mul_scalar(step.decay).mask_where(opposed, old)
        }
        false => old.mul_scalar(step.decay),
    };
    decayed - direction.mul_scalar(step.lr)
}

/// The mask of one parameter, of one row.
fn mask(rejected: &Tensor<1>, flag: usize) -> FiniteMask {
    FiniteMask::from_rows(rejected.clone().slice(s![flag..flag + 1]))
}

/// A batch as consecutive batches of `rows` matrices.
fn split(batch: Tensor<3>, rows: &[usize]) -> Vec<Tensor<3>> {
    match rows {
        [_] => vec![batch],
        _ => batch.split_with_sizes(rows.to_vec(), 0),
    }
}

/// The reverse of [`split`].
fn joined(mut batches: Vec<Tensor<3>>) -> Tensor<3> {
    match batches.len() {
        1 => batches.swap_remove(0),
        _ => Tensor::cat(batches, 0),
    }
}
