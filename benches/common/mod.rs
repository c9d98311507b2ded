//! Code that the benches share: the matrices that they measure, and medians.

#![allow(dead_code)] // no bench uses all of it

pub mod collectives;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor};

/// The matrices of a GPT-2 layer (width 768).
pub const LAYER: [[usize; 2]; 6] =
    [[768, 768], [768, 768], [768, 768], [768, 768], [768, 3072], [3072, 768]];

/// Returns the median of some times, the upper one of an even number.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A matrix of normally distributed numbers.
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

    /// Gradients with the values of the matrices.
    pub fn gradients(&self) -> GradientsParams {
        self.gradients_from(self)
    }

    /// Gradients with the values of another model's matrices.
    pub fn gradients_from(&self, values: &Self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (matrix, value) in self.matrices.iter().zip(&values.matrices) {
            gradients.register(matrix.id, value.val().inner());
        }
        gradients
    }
}
