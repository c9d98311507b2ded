//! The products of an iteration, on the side of the matrix where they are smaller.

use burn::tensor::{Device, Tensor};

use super::{Polynomial, ops::Engine};

/// The side from which symmetric matrices multiply `X`. The formulas are written for `Left`; `Right`
/// is their transpose, and spares transposing `X`.
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
    engine: Engine,
    small: bool,
}

impl Products {
    /// The products for `m` by `n` matrices on a device.
    pub fn new(m: usize, n: usize, engine: Engine, device: &Device) -> Self {
        let side = if m <= n { Side::Left } else { Side::Right };
        Self { side, engine, small: engine.is_small(device, m.min(n)) }
    }

    /// All products of the Gram form in one kernel, if the matrices are small enough for that: see
    /// [`MatrixOps::accumulate_small`](super::ops::MatrixOps::accumulate_small).
    pub fn accumulated(self, r: &Tensor<3>, schedule: &[Polynomial]) -> Option<Tensor<3>> {
        self.small.then(|| self.engine.accumulate_small(r.clone(), schedule))
    }

    /// `X X^T`.
    pub fn square(self, x: &Tensor<3>) -> Tensor<3> {
        self.engine.syrk(match self.side {
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
        self.engine.symmetric_product(a, b, c, alpha, beta)
    }

    /// `Z + I`.
    pub fn plus_identity(self, z: Tensor<3>) -> Tensor<3> {
        self.engine.plus_identity(z)
    }

    /// `Q X`, for a symmetric `Q`.
    pub fn apply(self, q: Tensor<3>, x: Tensor<3>) -> Tensor<3> {
        match self.side {
            Side::Left => self.engine.product(q, x),
            Side::Right => self.engine.product(x, q),
        }
    }

    /// `Z X + a X`, for a symmetric `Z`.
    pub fn apply_and_add(self, z: Tensor<3>, x: Tensor<3>, a: f64) -> Tensor<3> {
        match self.side {
            Side::Left => self.engine.product_add(z, x.clone(), x, a),
            Side::Right => self.engine.product_add(x.clone(), z, x, a),
        }
    }
}
