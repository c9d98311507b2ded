//! Float64 references that share no code with the crate.

#![allow(dead_code, unused_imports)] // every test target uses its own part

mod skips;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use distmuon::KernelPolicy;
use distmuon::ComputePath;
use faer::Mat;
use rand::{RngExt, SeedableRng, rngs::StdRng};
pub use skips::{excused, lacks, skip};

/// Whether the device rounds the factors of float32 products to TF32, as Burn's own products on CUDA are.
pub fn has_tf32() -> bool {
    format!("{:?}", Device::default()).contains("Cuda")
}

/// A tolerance for float32, or for TF32, which has ten bits: an iteration keeps two digits.
pub fn tf32_or(tolerance: f64) -> f64 {
    if has_tf32() { tolerance.max(1e-2) } else { tolerance }
}

/// Whether the device rounds to a type: CubeCL's CPU runtime says that it has bfloat16 where it has not.
pub fn has_type(dtype: FloatDType) -> bool {
    let device = Device::default();
    let back = || {
        let there = Tensor::<1>::from_data([1.5_f32], (&device, DType::F32)).cast(dtype);
        there.cast(DType::F32).into_scalar::<f32>()
    };
    device.supports_dtype(dtype) && back() == 1.5
}

/// A matrix with entries from -1 to 1.
pub fn random(rows: usize, columns: usize, seed: u64) -> Mat<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    Mat::from_fn(rows, columns, |_, _| rng.random_range(-1.0..1.0))
}

/// A matrix with these singular values and random singular vectors.
pub fn with_spectrum(rows: usize, columns: usize, values: &[f64], seed: u64) -> Mat<f64> {
    let rank = rows.min(columns);
    assert_eq!(values.len(), rank);
    let left = polar(&random(rows, rank, seed));
    let right = polar(&random(columns, rank, seed + 1));
    let scaled = Mat::from_fn(rows, rank, |i, j| left[(i, j)] * values[j]);
    &scaled * right.transpose()
}

/// The orthogonal factor `U V^T`, over the singular values that are not zero.
pub fn polar(matrix: &Mat<f64>) -> Mat<f64> {
    apply(matrix, |_| 1.0)
}

/// `U f(S) V^T`; singular values that are zero but for rounding stay zero.
pub fn apply(matrix: &Mat<f64>, f: impl Fn(f64) -> f64) -> Mat<f64> {
    let svd = matrix.thin_svd().expect("the SVD converges");
    let (u, s, v) = (svd.U(), svd.S().column_vector(), svd.V());
    let rank = matrix.nrows().min(matrix.ncols());
    let tiny = s[0] * 1e-13;
    let values: Vec<f64> = (0..rank).map(|i| if s[i] > tiny { f(s[i]) } else { 0.0 }).collect();
    let scaled = Mat::from_fn(matrix.nrows(), rank, |i, j| u[(i, j)] * values[j]);
    &scaled * v.transpose()
}

/// The odd polynomials of a schedule, one after the other.
pub fn polynomial(schedule: &[[f64; 3]], x: f64) -> f64 {
    schedule.iter().fold(x, |x, [a, b, c]| a * x + b * x.powi(3) + c * x.powi(5))
}

/// What exact arithmetic makes of a matrix: its singular values, divided by the Frobenius norm, go
/// through the polynomials.
pub fn newton_schulz(matrix: &Mat<f64>, schedule: &[[f64; 3]], epsilon: f64) -> Mat<f64> {
    let norm = matrix.norm_l2().max(epsilon);
    if norm == 0.0 {
        return matrix.clone();
    }
    apply(matrix, |s| polynomial(schedule, s / norm))
}

/// Largest magnitude of the difference.
pub fn distance(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
    (a - b).norm_max()
}

/// A matrix as a batch of one.
pub fn tensor(matrix: &Mat<f64>, device: &Device) -> Tensor<3> {
    let (rows, columns) = (matrix.nrows(), matrix.ncols());
    let values: Vec<f32> =
        (0..rows * columns).map(|i| matrix[(i / columns, i % columns)] as f32).collect();
    Tensor::from_data(TensorData::new(values, [1, rows, columns]), device)
}

/// One matrix of a batch.
pub fn matrix(batch: &Tensor<3>, index: usize) -> Mat<f64> {
    let [_, rows, columns] = batch.dims();
    let values: Vec<f64> = batch.to_data().iter::<f64>().collect();
    Mat::from_fn(rows, columns, |i, j| values[index * rows * columns + i * columns + j])
}

/// The bits of a tensor.
pub fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u8> {
    tensor.to_data().as_bytes().to_vec()
}

/// Values in float32, whatever the device's default is, that depend on no generator that other tests use.
pub struct Fixed(pub StdRng);

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let values = (0..old.shape().num_elements()).map(|_| self.0.random_range(-0.3..0.3));
            let values = TensorData::new(values.collect::<Vec<f32>>(), old.shape());
            Tensor::from_data(values, (&old.device(), DType::F32)).require_grad()
        })
    }
}

/// Gradients of a model that depend on the seed only.
pub fn gradients<M: Module>(model: &M, seed: u64) -> GradientsParams {
    struct Random(StdRng, GradientsParams);
    impl ModuleVisitor for Random {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner();
            let values = (0..value.shape().num_elements()).map(|_| self.0.random_range(-1.0..1.0));
            let values = TensorData::new(values.collect::<Vec<f32>>(), value.shape());
            let gradient = Tensor::from_data(values, (&value.device(), value.dtype()));
            self.1.register::<D>(param.id, gradient);
        }
    }
    let mut random = Random(StdRng::seed_from_u64(seed), GradientsParams::new());
    model.visit(&mut random);
    random.1
}

/// A matrix that the default device has no memory to compute; nothing where such a request can't be refused.
pub fn beyond_memory(rows: usize, columns: usize) -> Option<Tensor<2>> {
    let device = Device::default();
    let engine = ComputePath::choose(KernelPolicy::Auto, &device, FloatDType::F32);
    if !matches!(engine, ComputePath::CubeCl { .. }) {
        excused("only CubeCL's devices tell what they can't allocate");
        return None;
    }
    // A tebibyte.
    let huge = Tensor::<2>::ones([1 << 19, 1 << 19], &device);
    let lost = huge.slice([0..rows, 0..columns]).add_scalar(1.0);
    // Fusion would otherwise compute it where it is used, without the ones.
    lost.clone().try_into_data().expect_err("there is no such memory");
    Some(lost)
}

/// The bytes of every parameter of a model.
pub fn weights<M: Module>(model: &M) -> Vec<Vec<u8>> {
    struct Weights(Vec<Vec<u8>>);
    impl ModuleVisitor for Weights {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(bits(&param.val()));
        }
    }
    let mut weights = Weights(vec![]);
    model.visit(&mut weights);
    weights.0
}
