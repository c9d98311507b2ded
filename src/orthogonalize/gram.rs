//! The Gram form: the iteration runs on `R = X X^T`, and `X` is multiplied by the accumulated `Q`
//! at the restarts and at the end (<https://github.com/Dao-AILab/gram-newton-schulz>). A single
//! step between two restarts is one of the standard form, which costs as much and rounds less.

use burn::tensor::Tensor;

use super::{Polynomial, products::Products, standard};

/// Applies the polynomials to the singular values of `x`, which is at most 1 in norm; `restarts`
/// are the steps before which `x` is brought up to date.
pub fn iterate(
    mut x: Tensor<3>,
    schedule: &[Polynomial],
    restarts: &[usize],
    products: Products,
) -> Tensor<3> {
    let segments = [&[0], restarts, &[schedule.len()]].concat();
    for segment in segments.windows(2) {
        let steps = &schedule[segment[0]..segment[1]];
        x = match steps.len() {
            1 => standard::iterate(x, steps, products),
            _ => products.apply(accumulate_q(products.square(&x), steps, products), x),
        };
    }
    x
}

/// The product `Q` of all `W = Z + a I` with `Z = b R + c R^2`, where every step advances
/// `R <- W R W`. What is stored of a step is `Z / a`, so that the identity is added as it is: `a`
/// would be rounded, the same way at every restart. The first `a` is multiplied in with the second.
fn accumulate_q(mut r: Tensor<3>, schedule: &[Polynomial], products: Products) -> Tensor<3> {
    if let Some(q) = products.accumulated_q(&r, schedule) {
        return q;
    }
    // `a Y (Z + I)`, for polynomials `Y` and `Z` of one symmetric matrix.
    let times = |y: Tensor<3>, z: Tensor<3>, a| products.symmetric(y.clone(), z, y, a, a);
    let mut q = None;
    for (step, &[a, b, c]) in schedule.iter().enumerate() {
        let z = products.symmetric(r.clone(), r.clone(), r.clone(), c / a, b / a);
        q = Some(match q {
            None => products.plus_identity(z.clone()),
            Some(q) if step == 1 => times(q, z.clone(), schedule[0][0] * a),
            Some(q) => times(q, z.clone(), a),
        });
        if step + 1 < schedule.len() {
            let rz = times(r, z.clone(), a);
            r = times(rz, z, a);
        }
    }
    q.expect("a schedule has at least one step")
}
