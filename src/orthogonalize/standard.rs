//! The standard form: products with `X` at every step.

use burn::tensor::Tensor;

use super::{Polynomial, products::Products};

/// Applies the polynomials to the singular values of `x`, which is at most 1 in norm.
pub fn iterate(mut x: Tensor<3>, schedule: &[Polynomial], products: Products) -> Tensor<3> {
    for &[a, b, c] in schedule {
        let r = products.square(&x);
        let z = products.symmetric(r.clone(), r.clone(), r, c, b);
        x = products.apply_and_add(z, x, a);
    }
    x
}
