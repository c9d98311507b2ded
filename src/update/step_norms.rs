//! Norms of a step, computed where it is taken. Nothing is read back here.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Tensor};

use crate::flat;

/// The number of sums of a parameter.
pub(crate) const SUMS: usize = 3;

/// The sums of parameters in a step.
#[derive(Default)]
pub(crate) struct Observations(BTreeMap<usize, Tensor<1>>);

impl Observations {
    /// Adds a part of a parameter: its values before and after the step, and the sum of the
    /// [`orthogonality_errors`] of its matrices.
    pub fn add(&mut self, parameter: usize, old: Tensor<1>, new: &Tensor<1>, errors: Tensor<1>) {
        let square = |x: Tensor<1>| x.square().sum().cast(DType::F32);
        let change = square(new.clone() - old);
        let sums = Tensor::cat(vec![change, square(new.clone()), errors], 0);
        let sums = match self.0.remove(&parameter) {
            Some(before) => before + sums,
            None => sums,
        };
        self.0.insert(parameter, sums);
    }

    /// The sums of all parameters: for each the square of the norm of its change, of its
    /// values, and the errors of its matrices. Zeros for parameters that were not observed.
    pub fn sums(mut self, parameters: usize, device: &Device) -> Tensor<1> {
        let sums = (0..parameters).map(|index| {
            self.0.remove(&index).unwrap_or_else(|| Tensor::zeros([SUMS], (device, DType::F32)))
        });
        flat::concat(sums.collect(), DType::F32, device)
    }
}

/// For every matrix `O` of a batch, the mean square of the singular values of `O O^T - I`, on the
/// shorter side: 0 for orthogonal matrices, and 1 for zeros.
pub(crate) fn orthogonality_errors(batch: &Tensor<3>) -> Tensor<1> {
    let [count, m, n] = batch.dims();
    let batch = batch.clone().cast(DType::F32);
    // The smaller of the two products, which has the same singular values.
    let (wide, side) = if m <= n { (batch, m) } else { (batch.swap_dims(1, 2), n) };
    let square = wide.clone().matmul(wide.swap_dims(1, 2));
    let identity = Tensor::<2>::eye(side, &square.device()).cast(DType::F32).unsqueeze::<3>();
    let errors = (square - identity).square().sum_dims(&[1, 2]).div_scalar(side as f64);
    errors.reshape([count])
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn orthogonal_matrices_have_no_error_and_zeros_have_one() {
        let device = Device::default();
        for shape in [[2, 2, 3], [2, 3, 2]] {
            let diagonal = |value: f32| {
                let index = move |i: usize| (i / shape[2] % shape[1], i % shape[2]);
                (0..6).map(move |i| if index(i).0 == index(i).1 { value } else { 0.0 })
            };
            let values: Vec<f32> = diagonal(1.0).chain(diagonal(0.0)).collect();
            let batch =
                Tensor::<3>::from_data(TensorData::new(values, shape), (&device, DType::F32));
            let errors = orthogonality_errors(&batch).into_data();
            errors.assert_eq(&TensorData::from([0.0_f32, 1.0]), true);
        }
    }

    #[test]
    fn parts_of_a_parameter_are_added_up() {
        let device = Device::default();
        let tensor = |values: [f32; 2]| Tensor::<1>::from_data(values, (&device, DType::F32));
        let mut observations = Observations::default();
        let none = || Tensor::zeros([1], (&device, DType::F32));
        observations.add(1, tensor([1.0, 1.0]), &tensor([4.0, 5.0]), none());
        observations.add(1, tensor([0.0, 0.0]), &tensor([0.0, 1.0]), none() + 0.5);
        let sums = observations.sums(2, &device).into_data();
        sums.assert_eq(&TensorData::from([0.0_f32, 0.0, 0.0, 26.0, 42.0, 0.5]), true);
    }
}
