//! Mirrored triangles, compared with plain loops on the runtime that the features choose (wgpu
//! without any).

mod common;

use common::{Real, client, download, upload};
use cubecl::prelude::*;
use distmuon_kernels::{Matrices, mirror};

/// Runs the kernel on a batch whose upper triangles are NaN.
fn check<F: Real>(m: usize, batch: usize, addend: bool) {
    let Some(client) = client::<F>() else { return };
    let lower = |index: usize| {
        let (matrix, row, column) = (index / (m * m), index / m % m, index % m);
        (matrix * m + row.max(column)) * m + row.min(column)
    };
    let value = |index: usize| (index % 1000) as f64 / 8.0;
    let entry = |index: usize| if lower(index) == index { value(index) } else { f64::NAN };
    let input: Vec<f64> = (0..batch * m * m).map(entry).collect();
    let ones = upload::<F>(&client, &vec![1.0; batch * m * m]);
    let square = |handle| Matrices::contiguous(handle, F::elem_type_native(), [batch, m, m]);
    let matrices = square(upload::<F>(&client, &input));
    let ones = square(ones);
    let (alpha, beta) = if addend { (2.0, 3.0) } else { (1.0, 0.0) };
    mirror(&client, &matrices, alpha, addend.then_some((&ones, beta))).unwrap();
    let output = download::<F>(&client, &matrices.handle);
    assert_eq!(output.len(), input.len());
    for (index, actual) in output.iter().enumerate() {
        let expected = f64::from(alpha) * value(lower(index)) + f64::from(beta);
        assert_eq!(*actual, expected, "m {m}, batch {batch}, entry {index}");
    }
}

#[test]
fn float32_triangles_are_mirrored_exactly() {
    for (m, batch) in [(1, 1), (7, 3), (16, 1), (33, 2), (100, 1), (129, 2)] {
        check::<f32>(m, batch, false);
        check::<f32>(m, batch, true);
    }
}

#[test]
fn float16_triangles_are_mirrored_exactly() {
    for (m, batch) in [(5, 2), (64, 1), (65, 3)] {
        check::<half::f16>(m, batch, false);
        check::<half::f16>(m, batch, true);
    }
}

#[test]
fn bfloat16_triangles_are_mirrored_exactly() {
    // Nothing is rounded: eight bits are enough for the values up to 32.
    check::<half::bf16>(16, 1, false);
}

#[test]
fn operands_that_do_not_fit_are_rejected() {
    let Some(client) = client::<f32>() else { return };
    let zeros = |shape| {
        Matrices::contiguous(upload::<f32>(&client, &[0.0; 32]), f32::elem_type_native(), shape)
    };
    let error = |c: &Matrices, d: Option<&Matrices>| {
        mirror(&client, c, 1.0, d.map(|d| (d, 1.0))).unwrap_err().to_string()
    };
    let square = zeros([2, 3, 3]);
    assert!(error(&zeros([2, 3, 4]), None).contains("square"));
    let text = error(&square, Some(&zeros([1, 3, 3])));
    assert!(text.contains("type of D") && text.contains("got [1, 3, 3]"), "{text}");
    let wide = Matrices { strides: [12, 4, 1], ..square.clone() };
    assert!(error(&square, Some(&wide)).contains("copy it"));
    assert!(error(&wide, None).contains("copy it"));
}

#[test]
fn empty_batches_change_nothing() {
    let Some(client) = client::<f32>() else { return };
    let handle = upload::<f32>(&client, &[1.0, 2.0]);
    for [k, m] in [[0, 3], [3, 0]] {
        let dtype = f32::elem_type_native();
        let empty = Matrices::contiguous(handle.clone(), dtype, [k, m, m]);
        mirror(&client, &empty, 1.0, None).unwrap();
    }
    assert_eq!(download::<f32>(&client, &handle), [1.0, 2.0]);
}
