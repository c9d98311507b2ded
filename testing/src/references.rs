//! References in float64 that share no code with the crate.

use burn::tensor::{DType, Device, Tensor, TensorData};
use faer::Mat;
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Returns a matrix with entries from -1 to 1.
pub fn random(rows: usize, columns: usize, seed: u64) -> Mat<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    Mat::from_fn(rows, columns, |_, _| rng.random_range(-1.0..1.0))
}

/// Returns a matrix with these singular values and random singular vectors.
pub fn with_spectrum(rows: usize, columns: usize, values: &[f64], seed: u64) -> Mat<f64> {
    let rank = rows.min(columns);
    assert_eq!(values.len(), rank);
    let left = polar(&random(rows, rank, seed));
    let right = polar(&random(columns, rank, seed + 1));
    let scaled = Mat::from_fn(rows, rank, |i, j| left[(i, j)] * values[j]);
    &scaled * right.transpose()
}

/// Returns the orthogonal factor `U V^T`, over the singular values that are not zero.
pub fn polar(matrix: &Mat<f64>) -> Mat<f64> {
    apply(matrix, |_| 1.0)
}

/// Returns `U f(S) V^T`. Singular values that are zero except for rounding stay zero.
fn apply(matrix: &Mat<f64>, f: impl Fn(f64) -> f64) -> Mat<f64> {
    let svd = matrix.thin_svd().expect("the SVD converges");
    let (u, s, v) = (svd.U(), svd.S().column_vector(), svd.V());
    let rank = matrix.nrows().min(matrix.ncols());
    let tiny = s[0] * 1e-13;
    let values: Vec<f64> = (0..rank).map(|i| if s[i] > tiny { f(s[i]) } else { 0.0 }).collect();
    let scaled = Mat::from_fn(matrix.nrows(), rank, |i, j| u[(i, j)] * values[j]);
    &scaled * v.transpose()
}

/// Applies the odd polynomials of a schedule to a number, one after the other.
pub fn polynomial(schedule: &[[f64; 3]], x: f64) -> f64 {
    schedule.iter().fold(x, |x, [a, b, c]| a * x + b * x.powi(3) + c * x.powi(5))
}

/// Returns the result of Newton-Schulz in exact arithmetic: the singular values, divided by the
/// Frobenius norm of the matrix, go through the polynomials.
pub fn newton_schulz(matrix: &Mat<f64>, schedule: &[[f64; 3]], epsilon: f64) -> Mat<f64> {
    let norm = matrix.norm_l2().max(epsilon);
    if norm == 0.0 {
        return matrix.clone();
    }
    apply(matrix, |s| polynomial(schedule, s / norm))
}

/// Returns the largest magnitude of the difference of two matrices.
pub fn distance(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
    (a - b).norm_max()
}

/// Returns a matrix as a batch of one in float32.
pub fn tensor(matrix: &Mat<f64>, device: &Device) -> Tensor<3> {
    let (rows, columns) = (matrix.nrows(), matrix.ncols());
    let values: Vec<f32> =
        (0..rows * columns).map(|i| matrix[(i / columns, i % columns)] as f32).collect();
    Tensor::from_data(TensorData::new(values, [1, rows, columns]), (device, DType::F32))
}

/// Returns one matrix of a batch.
pub fn matrix(batch: &Tensor<3>, index: usize) -> Mat<f64> {
    let [_, rows, columns] = batch.dims();
    let values: Vec<f64> = batch.to_data().iter::<f64>().collect();
    Mat::from_fn(rows, columns, |i, j| values[index * rows * columns + i * columns + j])
}
