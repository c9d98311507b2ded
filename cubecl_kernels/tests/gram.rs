//! The iteration on small matrices, compared with loops in float64.

mod common;

use core::ops::RangeInclusive;

use common::{Real, client, download, lacks, upload};
use cubecl::prelude::*;
use distmuon_kernels::{Matrices, gram};

/// The first three steps of Polar Express (Amsel et al., <https://arxiv.org/abs/2505.16932>).
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

/// Returns `alpha X + beta Y`.
fn weighted_sum(alpha: f64, x: &Matrix, beta: f64, y: &Matrix) -> Matrix {
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
        let z = weighted_sum(b, &r, c, &times(&r, &r));
        let factor = weighted_sum(1.0, &z, a, &identity);
        q = times(&q, &factor);
        r = times(&times(&factor, &r), &factor);
    }
    q
}

/// Returns `X X^T` for an `X` of norm 1.
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
    check_steps::<F>(k, m, &POLYNOMIALS, 1..=POLYNOMIALS.len(), tolerance);
}

fn check_steps<F: Real>(
    k: usize,
    m: usize,
    polynomials: &[[f32; 3]],
    steps: RangeInclusive<usize>,
    tolerance: f64,
) {
    let Some(client) = client::<F>() else { return };
    if m > gram::max_rows(&client) {
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
        let q = gram::accumulate_q(&client, &r, &polynomials[..steps]).unwrap();
        let q = download::<F>(&client, &q.handle);
        for (i, start) in starts.iter().enumerate() {
            let expected = reference(start.clone(), &polynomials[..steps]);
            let size = expected.iter().flatten().fold(0.0, |a: f64, x| a.max(x.abs()));
            for (index, expected) in expected.iter().flatten().enumerate() {
                let [row, column] = [index / m, index % m];
                let entry = |row, column| q[(i * m + row) * m + column];
                let error = (entry(row, column) - expected).abs() / size;
                assert!(error < tolerance, "m {m}, {steps} steps, [{row}, {column}]: {error}");
                assert!(entry(row, column) == entry(column, row), "not symmetric");
            }
        }
    }
}

#[test]
fn one_step_on_a_tiny_matrix_matches_float64() {
    check_steps::<f32>(1, 5, &POLYNOMIALS, 1..=1, 2e-5);
}

/// A kernel of its own computes cubic polynomials, which have no square. The last schedule has a
/// polynomial of either kind.
#[test]
fn tiny_matrices_with_cubic_polynomials_match_float64() {
    let cubic = [1.5, -0.5, 0.0];
    let schedules = [vec![cubic; 3], vec![cubic, POLYNOMIALS[2], cubic]];
    for polynomials in &schedules {
        for m in [5, 40] {
            check_steps::<f32>(2, m, polynomials, 1..=polynomials.len(), 2e-5);
        }
    }
}

#[test]
fn q_in_float32_matches_float64() {
    for (k, m) in [(3, 1), (2, 16), (3, 33), (1, 48), (1, 64), (1, 128)] {
        check::<f32>(k, m, 2e-5);
    }
}

#[test]
fn q_in_float16_matches_float64() {
    check::<half::f16>(3, 21, 2e-3);
}

#[test]
fn q_in_bfloat16_matches_float64() {
    check::<half::bf16>(3, 21, 1.6e-2);
}

#[test]
fn operands_that_do_not_fit_are_rejected() {
    let Some(client) = client::<f32>() else { return };
    let empty = |shape| Matrices::empty(&client, f32::elem_type_native(), shape);
    let error =
        |r: &Matrices| gram::accumulate_q(&client, r, &POLYNOMIALS).unwrap_err().to_string();
    assert!(error(&empty([1, 4, 5])).contains("square"));
    assert!(error(&empty([1, 200, 200])).contains("at most"));
    let short = Matrices { handle: empty([1, 3, 4]).handle, ..empty([1, 4, 4]) };
    let text = error(&short);
    assert!(text.contains("the buffer of R is too small"), "{text}");
    assert!(text.contains("got 48"), "{text}");
    let nothing = empty([0, 4, 4]);
    assert_eq!(gram::accumulate_q(&client, &nothing, &POLYNOMIALS).unwrap().shape, [0, 4, 4]);
}
