//! The products of an iteration, on the side of the matrix where they are smaller.

use burn::tensor::Tensor;

use crate::backend::{ComputePath, Polynomial};

/// The side from which symmetric matrices multiply `X`. The formulas are written for `Left`;
/// `Right` is their transpose, and avoids transposing `X`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// `m <= n`: polynomials of `X X^T`, from the left.
    Left,
    /// `m > n`: polynomials of `X^T X`, from the right.
    Right,
}

/// The products that the forms are made of.
#[derive(Debug, Clone, Copy)]
pub struct Products {
    side: Side,
    path: ComputePath,
    single_kernel: bool,
}

impl Products {
    /// The products for `m` by `n` matrices. `single_kernel` is `true` if they are small enough for
    /// [`ComputePath::accumulate_q`].
    pub fn new(m: usize, n: usize, path: ComputePath, single_kernel: bool) -> Self {
        let side = if m <= n { Side::Left } else { Side::Right };
        Self { side, path, single_kernel }
    }

    /// The product `Q` of the Gram form from one kernel, if the matrices are small enough for that:
    /// see [`ComputePath::accumulate_q`].
    pub fn accumulated_q(self, r: &Tensor<3>, schedule: &[Polynomial]) -> Option<Tensor<3>> {
        self.single_kernel.then(|| self.path.accumulate_q(r.clone(), schedule))
    }

    /// `X X^T`.
    pub fn square(self, x: &Tensor<3>) -> Tensor<3> {
        self.path.syrk(match self.side {
            Side::Left => x.clone(),
            Side::Right => x.clone().swap_dims(1, 2),
        })
    }

    /// `alpha A B + beta C`, for polynomials of one symmetric matrix.
    pub fn symmetric(
        self,
        a: Tensor<3>,
        b: Tensor<3>,
        c: Tensor<3>,
        alpha: f64,
        beta: f64,
    ) -> Tensor<3> {
        self.path.symmetric_product(a, b, c, alpha, beta)
    }

    /// `Z + I`.
    pub fn plus_identity(self, z: Tensor<3>) -> Tensor<3> {
        self.path.plus_identity(z)
    }

    /// `Q X`, for a symmetric `Q`.
    pub fn apply(self, q: Tensor<3>, x: Tensor<3>) -> Tensor<3> {
        match self.side {
            Side::Left => self.path.product(q, x),
            Side::Right => self.path.product(x, q),
        }
    }

    /// `Z X + a X`, for a symmetric `Z`.
    pub fn apply_and_add(self, z: Tensor<3>, x: Tensor<3>, a: f64) -> Tensor<3> {
        match self.side {
            Side::Left => self.path.product_add(z, x.clone(), x, a),
            Side::Right => self.path.product_add(x.clone(), z, x, a),
        }
    }
}
