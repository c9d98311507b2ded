//! What the benches measure: matrices, and those of a GPT-2 layer.

#![allow(dead_code)] // every bench uses its own part

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor};

/// The matrices of a GPT-2 layer (width 768).
pub const LAYER: [[usize; 2]; 6] =
    [[768, 768], [768, 768], [768, 768], [768, 768], [768, 3072], [3072, 768]];

/// A matrix of normal numbers.
pub fn random(shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A model that consists of matrices.
#[derive(Module, Debug)]
pub struct Matrices {
    pub matrices: Vec<Param<Tensor<2>>>,
}

impl Matrices {
    pub fn new(shapes: &[[usize; 2]], device: &Device) -> Self {
        let matrix = |shape: &[usize; 2]| Param::from_tensor(random(*shape, device).require_grad());
        Self { matrices: shapes.iter().map(matrix).collect() }
    }

    /// Gradients that are as the matrices are.
    pub fn gradients(&self) -> GradientsParams {
        self.gradients_from(self)
    }

    /// Gradients that are as another model's matrices are.
    pub fn gradients_from(&self, values: &Self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (matrix, value) in self.matrices.iter().zip(&values.matrices) {
            gradients.register(matrix.id, value.val().inner());
        }
        gradients
    }
}
