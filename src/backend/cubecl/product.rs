//! A product, with its operands as tensors and as matrices.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use distmuon_kernels::product::{Product, Tiling, Triangle};
use distmuon_kernels::{Matrices, Result};

use super::tensors::{matrices, tensor};

type Float = FloatTensor<CubeBackend>;

/// A product to compute: `alpha A B + beta C`.
#[derive(Clone)]
pub(super) struct Operands {
    /// `A`, for its device.
    pub tensor: Float,
    pub lhs: Matrices,
    pub rhs: Matrices,
    pub alpha: f32,
    pub addend: Option<(Matrices, f32)>,
    pub triangle: Triangle,
}

impl Operands {
    pub fn new(
        a: &Float,
        rhs: Matrices,
        alpha: f32,
        addend: Option<(&Float, f32)>,
        triangle: Triangle,
    ) -> Self {
        Self {
            tensor: a.clone(),
            lhs: matrices(a.clone()),
            rhs,
            alpha,
            addend: addend.map(|(addend, beta)| (matrices(addend.clone()), beta)),
            triangle,
        }
    }

    /// `alpha A B^T + beta C`, which is symmetric.
    pub fn symmetric(a: &Float, b: &Float, alpha: f32, addend: Option<(&Float, f32)>) -> Self {
        // A view with other strides: nothing is transposed in memory.
        Self::new(a, matrices(b.clone()).transposed(), alpha, addend, Triangle::Lower)
    }

    pub fn product(&self) -> Product<'_> {
        Product {
            a: &self.lhs,
            b: &self.rhs,
            alpha: self.alpha,
            addend: self.addend.as_ref().map(|(addend, beta)| (addend, *beta)),
            triangle: self.triangle,
        }
    }

    pub fn multiply_with(&self, tiling: &Tiling) -> Result<Float> {
        Ok(self.result(self.product().launch(&self.tensor.client, tiling)?))
    }

    pub fn result(&self, Matrices { handle, shape, .. }: Matrices) -> Float {
        tensor(&self.tensor, handle, shape.into(), self.tensor.dtype)
    }
}
