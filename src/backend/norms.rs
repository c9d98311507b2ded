//! Norms of rows that neither overflow nor underflow.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};

use super::compute_path::{ComputePath, KernelPolicy};
use super::ops::{MatrixOps, norm_parts};
use super::precise::{precise_dtype, wide};
use super::tensor_list::TensorList;
use crate::flat;

/// Norms of rows, `scale sqrt(squares)`: a scale of the magnitude of the row, and the sum of the
/// squares of the elements divided by it, as in LAPACK's `slassq`.
pub(crate) struct ScaledNorms {
    pub scale: Tensor<1>,
    pub squares: Tensor<1>,
}

impl ScaledNorms {
    /// The norms of rows, in float32, and in float64 for float64.
    pub fn of_rows(rows: Tensor<2>) -> Self {
        let [count, _] = rows.dims();
        let rows = wide(rows);
        // Positive, so that a row of zeros has a quotient of 0 and not NaN.
        let scale = rows.clone().abs().max_dim(1).clamp_min(f32::MIN_POSITIVE);
        let squares = (rows / scale.clone()).square().sum_dim(1);
        Self { scale: scale.reshape([count]), squares: squares.reshape([count]) }
    }

    /// The norms of `count` rows of `elements` elements. Tensors of one type, each with the index
    /// of its first row, make up the rows, with zeros in between. The last row of a tensor may be
    /// shorter.
    pub fn of_tensors(
        policy: KernelPolicy,
        tensors: &[Tensor<1>],
        firsts: &[usize],
        elements: usize,
        count: usize,
        device: &Device,
    ) -> Self {
        let dtype = tensors.first().map_or(DType::F32, Tensor::dtype);
        if ComputePath::choose(policy, device, dtype.into()) == ComputePath::Portable {
            let zeros = Tensor::zeros([count], (device, precise_dtype(dtype)));
            let zeros = Self { scale: zeros.clone(), squares: zeros };
            return tensors.iter().zip(firsts).fold(zeros, |norms, (tensor, first)| {
                norms.with_rows_of(tensor.clone(), *first, elements)
            });
        }
        let norms = Tensor::<3>::zeros([count, norm_parts(elements), 2], (device, DType::F32));
        let norms = match tensors {
            [] => norms,
            _ => {
                let tensors = TensorList::from_tensors(tensors.to_vec());
                let (norms, firsts) = (norms.into_dispatch(), firsts.to_vec());
                Tensor::from_dispatch(Dispatch::norms(norms, tensors, firsts, elements))
            }
        };
        let [scale, squares] = norms.split(1, 2).try_into().expect("a scale and a sum");
        Self::joined(scale.squeeze_dim(2), squares.squeeze_dim(2))
    }

    /// The norms, a tensor's rows from index `first` on.
    fn with_rows_of(self, tensor: Tensor<1>, first: usize, elements: usize) -> Self {
        let [length] = tensor.dims();
        let rows = length.div_ceil(elements);
        let (dtype, device) = (tensor.dtype(), tensor.device());
        let padding = flat::zeros(rows * elements - length, dtype, &device);
        let whole = flat::concat(vec![tensor, padding], dtype, &device);
        let Self { scale, squares } = Self::of_rows(whole.reshape([rows, elements]));
        let range = first..first + rows;
        Self {
            scale: self.scale.slice_assign([range.clone()], scale),
            squares: self.squares.slice_assign([range], squares),
        }
    }

    /// The norms of rows from the norms of their parts, `[rows, parts]`.
    fn joined(scale: Tensor<2>, squares: Tensor<2>) -> Self {
        let [rows, parts] = scale.dims();
        // One part is the whole: no second scaling, which would round once more.
        if parts == 1 {
            return Self { scale: scale.reshape([rows]), squares: squares.reshape([rows]) };
        }
        let largest = scale.clone().max_dim(1).clamp_min(f32::MIN_POSITIVE);
        let squares = (squares * (scale / largest.clone()).square()).sum_dim(1);
        Self { scale: largest.reshape([rows]), squares: squares.reshape([rows]) }
    }

    /// The factor `[1]` that scales the norm over all rows down to `max_norm`, or 1 if it is
    /// smaller. `epsilon` is added to the norm.
    pub fn factor(self, max_norm: f64, epsilon: f64) -> Tensor<1> {
        let largest = self.scale.clone().max().clamp_min(f32::MIN_POSITIVE);
        let relative = self.scale / largest.clone();
        let norm = (self.squares * relative.square()).sum().sqrt();
        // Divided by the largest scale, numerator and denominator stay finite.
        let relative_to_largest = |value: f64| largest.clone().recip().mul_scalar(value);
        // Never above 1: clipping does not lengthen a gradient.
        (relative_to_largest(max_norm) / (norm + relative_to_largest(epsilon))).clamp_max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{FloatDType, TensorData};

    use super::*;

    #[test]
    fn rows_of_very_different_sizes_have_one_norm() {
        let device = Device::default();
        let rows = Tensor::<2>::from_data([[3e20, 0.0], [0.0, 4e20], [1e-30, 1.0]], &device);
        let factor = ScaledNorms::of_rows(rows.cast(FloatDType::F32)).factor(1.0, 1e-6);
        let factor = factor.into_data().iter::<f64>().next().unwrap();
        assert!((factor * 5e20 - 1.0).abs() < 1e-6, "{factor}");
    }

    #[test]
    fn norms_of_tensors_are_those_of_their_rows() {
        let device = Device::default();
        let random = |length, seed: usize| {
            let values = (0..length)
                .map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 - 1001.0)
                .map(|x| x * [1e-30, 1.0, 1e30][seed % 3])
                .collect::<Vec<_>>();
            Tensor::<1>::from_data(TensorData::from(&*values), (&device, DType::F32))
        };
        // Rows in one part and in several; tensors that end within a row, and gaps between them.
        for (elements, lengths) in [(16, [48, 40, 16, 5]), (40_000, [80_000, 40_000, 120_000, 7])] {
            let tensors: Vec<_> = lengths.iter().enumerate().map(|(i, n)| random(*n, i)).collect();
            let firsts = [2, 0, 6, 9];
            let computed = |policy| {
                let norms =
                    ScaledNorms::of_tensors(policy, &tensors, &firsts, elements, 11, &device);
                assert_eq!((norms.scale.dims(), norms.squares.dims()), ([11], [11]));
                let by_row = norms.scale.clone() * norms.squares.clone().sqrt();
                let factor = norms.factor(1.0, 0.0).into_scalar::<f32>();
                (by_row.into_data().iter::<f32>().collect::<Vec<_>>(), factor)
            };
            let (rows, factor) = computed(KernelPolicy::Auto);
            let (expected, reference) = computed(KernelPolicy::Portable);
            for (row, expected) in rows.iter().zip(&expected) {
                assert!((row - expected).abs() <= 1e-5 * expected, "{row} for {expected}");
            }
            assert!((factor / reference - 1.0).abs() < 1e-5, "{factor} for {reference}");
        }
    }
}
