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

/// Returns the result of Newton-Schulz in exact arithmetic for singular values that are divided by
/// the fourth root of the sum of their fourth powers.
pub fn newton_schulz_schatten(matrix: &Mat<f64>, schedule: &[[f64; 3]]) -> Mat<f64> {
    let norm = (matrix * matrix.transpose()).norm_l2().sqrt();
    apply(matrix, |s| polynomial(schedule, s / norm))
}

/// Returns a matrix with rows divided by the root of the sum of the magnitudes in a row of `X X^T`,
/// or with columns divided likewise if it has more rows than columns. Rows of zeros stay zero.
pub fn almost_orthogonal(matrix: &Mat<f64>) -> Mat<f64> {
    if matrix.nrows() > matrix.ncols() {
        return almost_orthogonal(&matrix.transpose().to_owned()).transpose().to_owned();
    }
    let gram = matrix * matrix.transpose();
    let divisor = |i: usize| gram.row(i).norm_l1().sqrt();
    Mat::from_fn(matrix.nrows(), matrix.ncols(), |i, j| match divisor(i) {
        0.0 => 0.0,
        divisor => matrix[(i, j)] / divisor,
    })
}

/// Returns the result of Newton-Schulz in exact arithmetic for a matrix that is rescaled by
/// [`almost_orthogonal`].
pub fn newton_schulz_aol(matrix: &Mat<f64>, schedule: &[[f64; 3]]) -> Mat<f64> {
    apply(&almost_orthogonal(matrix), |s| polynomial(schedule, s))
}

/// Returns results of Newton-Schulz in the standard form, whose products have factors rounded to
/// TF32 and are exact otherwise: one for the matrix, and others for reflections of it, reflected
/// back. A reflection changes every rounding, but not the exact result.
pub fn newton_schulz_in_tf32(matrix: &Mat<f64>, schedule: &[[f64; 3]]) -> Vec<Mat<f64>> {
    let (rows, columns) = (matrix.nrows(), matrix.ncols());
    let norm = matrix.norm_l2();
    let result = |seed: u64| {
        let reflected = |matrix: &Mat<f64>| match seed {
            0 => matrix.clone(),
            seed => {
                let left = reflection(rows, matrix, seed);
                reflection(columns, &left.transpose().to_owned(), seed).transpose().to_owned()
            }
        };
        let x = reflected(&Mat::from_fn(rows, columns, |i, j| matrix[(i, j)] / norm));
        let result = match rows <= columns {
            true => standard_in_tf32(x, schedule),
            false => standard_in_tf32(x.transpose().to_owned(), schedule).transpose().to_owned(),
        };
        reflected(&result)
    };
    (0..4).map(result).collect()
}

/// Returns `H A` with a reflection `H` of `size` dimensions, of which there is one for every seed.
fn reflection(size: usize, matrix: &Mat<f64>, seed: u64) -> Mat<f64> {
    let v = random(size, 1, seed);
    let factor = -2.0 / v.norm_l2().powi(2);
    matrix + faer::Scale(factor) * &v * (v.transpose() * matrix)
}

fn standard_in_tf32(mut x: Mat<f64>, schedule: &[[f64; 3]]) -> Mat<f64> {
    for [a, b, c] in schedule {
        let [a, b, c] = [a, b, c].map(|factor| faer::Scale(*factor));
        let rounded = to_tf32(&x);
        let r = &rounded * rounded.transpose();
        let z = c * (to_tf32(&r) * to_tf32(&r)) + b * r;
        x = to_tf32(&z) * rounded + a * x;
    }
    x
}

/// Returns the entries with ten bits of fraction, of two equally near ones the larger in magnitude.
fn to_tf32(matrix: &Mat<f64>) -> Mat<f64> {
    let dropped = f64::MANTISSA_DIGITS - 11;
    Mat::from_fn(matrix.nrows(), matrix.ncols(), |i, j| {
        let bits = matrix[(i, j)].to_bits() + (1 << (dropped - 1));
        f64::from_bits(bits & (u64::MAX << dropped))
    })
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
