//! The iteration on small matrices against loops in float64.

mod common;

use core::ops::RangeInclusive;

use common::{Real, client, download, lacks, upload};
use cubecl::prelude::*;
use distmuon_kernels::{Matrices, gram};

/// Polar Express, the first three steps (Amsel et al., <https://arxiv.org/abs/2505.16932>).
const POLYNOMIALS: [[f32; 3]; 3] = [
    [8.156_554, -22.483_294, 15.878_77],
    [4.042_93, -2.808_918, 0.500_018],
    [3.891_668, -2.772_484, 0.506_065],
];

type Matrix = Vec<Vec<f64>>;

fn times(x: &Matrix, y: &Matrix) -> Matrix {
    let entry = |row: &[f64], j: usize| row.iter().zip(y).map(|(x, y)| x * y[j]).sum();
    x.iter().map(|row| (0..row.len()).map(|j| entry(row, j)).collect()).collect()
}

/// `alpha X + beta Y`.
fn combined(alpha: f64, x: &Matrix, beta: f64, y: &Matrix) -> Matrix {
    let row = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        x.iter().zip(y).map(|(x, y)| alpha * x + beta * y).collect()
    };
    x.iter().zip(y).map(row).collect()
}

fn reference(mut r: Matrix, polynomials: &[[f32; 3]]) -> Matrix {
    let m = r.len();
    let identity: Matrix =
        (0..m).map(|i| (0..m).map(|j| if i == j { 1.0 } else { 0.0 }).collect()).collect();
    let mut q = identity.clone();
    for [a, b, c] in polynomials.iter().map(|p| p.map(f64::from)) {
        let z = combined(b, &r, c, &times(&r, &r));
        let factor = combined(1.0, &z, a, &identity);
        q = times(&q, &factor);
        r = times(&times(&factor, &r), &factor);
    }
    q
}

/// `X X^T` for an `X` of norm 1.
fn start(m: usize, seed: usize) -> Matrix {
    let x: Matrix = (0..m)
        .map(|i| {
            (0..2 * m).map(|j| (((i * 31 + j * 17 + seed) * 7919) % 2003) as f64 - 1001.0).collect()
        })
        .collect();
    let norm = x.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y / norm / norm).sum();
    x.iter().map(|row| x.iter().map(|other| dot(row, other)).collect()).collect()
}

fn check<F: Real>(k: usize, m: usize, tolerance: f64) {
    check_steps::<F>(k, m, 1..=POLYNOMIALS.len(), tolerance);
}

fn check_steps<F: Real>(k: usize, m: usize, steps: RangeInclusive<usize>, tolerance: f64) {
    let Some(client) = client::<F>() else { return };
    if m > gram::most_rows(&client) {
        lacks(format!("room for {m} rows in its shared memory"));
        return;
    }
    let rounded = |x: f64| -> f64 { F::new(x as f32).into() };
    let starts: Vec<Matrix> = (0..k)
        .map(|seed| {
            start(m, seed).into_iter().map(|row| row.into_iter().map(rounded).collect()).collect()
        })
        .collect();
    let flat: Vec<f64> = starts.iter().flatten().flatten().copied().collect();
    let r = Matrices::contiguous(upload::<F>(&client, &flat), F::elem_type_native(), [k, m, m]);
    for steps in steps {
        let q = gram::accumulate(&client, &r, &POLYNOMIALS[..steps]).unwrap();
        let found = download::<F>(&client, &q.handle);
        for (i, start) in starts.iter().enumerate() {
            let expected = reference(start.clone(), &POLYNOMIALS[..steps]);
            let size = expected.iter().flatten().fold(0.0, |a: f64, x| a.max(x.abs()));
            for (at, expected) in expected.iter().flatten().enumerate() {
                let [row, column] = [at / m, at % m];
                let at = |row, column| found[(i * m + row) * m + column];
                let error = (at(row, column) - expected).abs() / size;
                assert!(error < tolerance, "m {m}, {steps} steps, [{row}, {column}]: {error}");
                assert!(at(row, column) == at(column, row), "not symmetric");
            }
        }
    }
}

#[test]
fn tiny() {
    check_steps::<f32>(1, 5, 1..=1, 2e-5);
}

#[test]
fn float32() {
    for (k, m) in [(3, 1), (2, 16), (3, 33), (1, 48), (1, 64), (1, 128)] {
        check::<f32>(k, m, 2e-5);
    }
}

#[test]
fn float16() {
    check::<half::f16>(3, 21, 2e-3);
}

#[test]
fn bfloat16() {
    check::<half::bf16>(3, 21, 1.6e-2);
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(client) = client::<f32>() else { return };
    let of = |shape| Matrices::empty(&client, f32::elem_type_native(), shape);
    let error =
        |shape| gram::accumulate(&client, &of(shape), &POLYNOMIALS).unwrap_err().to_string();
    assert!(error([1, 4, 5]).contains("square"));
    assert!(error([1, 200, 200]).contains("at most"));
    let short = Matrices { handle: of([1, 3, 4]).handle, ..of([1, 4, 4]) };
    let error = gram::accumulate(&client, &short, &POLYNOMIALS).unwrap_err().to_string();
    assert!(error.contains("R has a buffer of 48 bytes"), "{error}");
    assert_eq!(gram::accumulate(&client, &of([0, 4, 4]), &POLYNOMIALS).unwrap().shape, [0, 4, 4]);
}
