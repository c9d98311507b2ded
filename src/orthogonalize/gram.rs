//! The Gram form: the iteration runs on `R = X X^T`, and `X` is multiplied by the accumulated `Q`
//! at the restarts and at the end (<https://github.com/Dao-AILab/gram-newton-schulz>).

use burn::tensor::Tensor;

use super::{Polynomial, products::Products};

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
        let q = accumulate(products.square(&x), &schedule[segment[0]..segment[1]], products);
        x = products.apply(q, x);
    }
    x
}

/// The product `Q` of all `Z + a I` with `Z = b R + c R^2`, where every step advances
/// `R <- (Z + a I) R (Z + a I)`.
fn accumulate(mut r: Tensor<3>, schedule: &[Polynomial], products: Products) -> Tensor<3> {
    if let Some(q) = products.accumulated(&r, schedule) {
        return q;
    }
    // `Y (Z + a I)`, for polynomials `Y` and `Z` of one symmetric matrix.
    let times = |y: Tensor<3>, z: Tensor<3>, a| products.symmetric(y.clone(), z, y, 1.0, a);
    let mut q = None;
    for (step, &[a, b, c]) in schedule.iter().enumerate() {
        let z = products.symmetric(r.clone(), r.clone(), r.clone(), c, b);
        q = Some(match q {
            None => z.clone() + identity(&z).mul_scalar(a),
            Some(q) => times(q, z.clone(), a),
        });
        if step + 1 < schedule.len() {
            let rz = times(r, z.clone(), a);
            r = times(rz, z, a);
        }
    }
    q.expect("a schedule has at least one step")
}

fn identity(like: &Tensor<3>) -> Tensor<3> {
    let [_, m, _] = like.dims();
    Tensor::<2>::eye(m, &like.device()).cast(like.dtype()).unsqueeze()
}
