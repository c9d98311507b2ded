//! The elementwise kernels against loops in float64, on the runtime that the features choose (wgpu
//! without any).

mod common;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use common::{Real, client, download, upload, values};
use distmuon_kernels::Error;
use distmuon_kernels::fused::{
    AdamW, Batch, Momentum, Norms, accumulate, adamw, apply, finite, normalize, norms,
};

/// Parts of norms: one, several, more than every unit adds up itself, or as many as distmuon takes.
fn parts(batch: Batch) -> usize {
    match batch.elements {
        1 => 1,
        9000 => 300,
        elements => elements.div_ceil(1 << 14).max(3),
    }
}

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Matrices of one element, of odd sizes, and of more than a cube takes at a time.
const BATCHES: [Batch; 6] = [
    Batch { count: 1, elements: 1 },
    Batch { count: 3, elements: 7 },
    Batch { count: 2, elements: 256 },
    Batch { count: 5, elements: 1002 },
    Batch { count: 2, elements: 9000 },
    Batch { count: 1, elements: 70_001 },
];

fn close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30, |a: f64, x| a.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / largest;
        assert!(error <= tolerance, "{what}, entry {i}: {found}, expected {expected}");
    }
}

/// All but the first matrix of several are finite.
fn poisoned<F: Real>(batch: Batch) -> Vec<f64> {
    let mut grads = values::<F>(batch.len(), 1);
    if batch.count > 1 {
        grads[batch.elements - 1] = [f64::NAN, f64::INFINITY][batch.count % 2];
    }
    grads
}

fn accepts(batch: Batch) -> Vec<f64> {
    (0..batch.count).map(|i| if batch.count > 1 && i == 0 { 0.0 } else { 1.0 }).collect()
}

fn check_muon<F: Real>(tolerance: f64) {
    let Some(client) = client::<F>() else { return };
    let dtype = F::elem_type_native();
    for batch in BATCHES {
        for nesterov in [true, false] {
            let (grads, momenta) = (poisoned::<F>(batch), values::<F>(batch.len(), 2));
            let parameters = values::<F>(batch.len(), 3);
            let handles = [&grads, &momenta, &parameters].map(|x| upload::<F>(&client, x));
            let [grad, momentum, parameter] = &handles;

            let accepted = finite(&client, grad, batch, dtype, f32::MAX).unwrap();
            assert_eq!(download::<f32>(&client, &accepted), accepts(batch), "{batch:?}");

            let rule = Momentum { mu: 0.75, nesterov };
            let (update, norms) =
                accumulate(&client, [grad, momentum, &accepted], batch, dtype, rule, parts(batch))
                    .unwrap();
            let taken = accepts(batch);
            let is_taken = |i: usize| taken[i / batch.elements] == 1.0;
            let averaged: Vec<f64> = (0..batch.len())
                .map(|i| if is_taken(i) { 0.75 * momenta[i] + 0.25 * grads[i] } else { momenta[i] })
                .collect();
            let ahead: Vec<f64> = (0..batch.len())
                .map(|i| match (is_taken(i), nesterov) {
                    (false, _) => 0.0,
                    (true, true) => 0.75 * averaged[i] + 0.25 * grads[i],
                    (true, false) => averaged[i],
                })
                .collect();
            let what = format!("{batch:?}, nesterov {nesterov}");
            close(&download::<F>(&client, momentum), &averaged, tolerance, &what);
            close(&download::<F>(&client, &update), &ahead, tolerance, &what);

            let normal = normalize(&client, &update, &norms, batch, [dtype; 2], 1e-7).unwrap();
            let norm = |matrix: &[f64]| matrix.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-7);
            let expected: Vec<f64> = ahead
                .chunks(batch.elements)
                .flat_map(|matrix| matrix.iter().map(|x| x / norm(matrix)).collect::<Vec<_>>())
                .collect();
            close(&download::<F>(&client, &normal), &expected, tolerance, &what);

            let per_matrix = |of: fn(usize) -> f64| {
                let values: Vec<f64> = (0..batch.count).map(of).collect();
                (upload::<f32>(&client, &values), values)
            };
            let (keep, keeps) = per_matrix(|i| 1.0 - 0.125 * i as f64);
            let (lr, lrs) = per_matrix(|i| 0.5 + i as f64);
            apply(&client, parameter, &update, [&accepted, &keep, &lr], batch, [dtype; 2]).unwrap();
            let updated: Vec<f64> = (0..batch.len())
                .map(|i| match is_taken(i) {
                    true => {
                        let matrix = i / batch.elements;
                        keeps[matrix] * parameters[i] - lrs[matrix] * ahead[i]
                    }
                    false => parameters[i],
                })
                .collect();
            close(&download::<F>(&client, parameter), &updated, 2.0 * tolerance, &what);
        }
    }
}

#[test]
fn muon_float32() {
    check_muon::<f32>(1e-6);
}

#[test]
fn muon_float16() {
    check_muon::<half::f16>(2e-3);
}

#[test]
fn muon_bfloat16() {
    check_muon::<half::bf16>(2e-2);
}

/// As in a step whose iteration is in half precision.
#[test]
fn mixed_types() {
    type F = half::f16;
    let (Some(client), Some(_)) = (client::<f32>(), client::<F>()) else { return };
    let (batch, half) = (Batch { count: 3, elements: 1002 }, F::elem_type_native());
    let (inputs, parameters) = (values::<f32>(batch.len(), 1), values::<f32>(batch.len(), 2));
    let input = upload::<f32>(&client, &inputs);
    let norm = |matrix: &[f64]| matrix.iter().map(|x| x * x).sum::<f64>().sqrt();
    let normalized = |matrix: &[f64]| matrix.iter().map(|x| x / norm(matrix)).collect::<Vec<_>>();
    let expected: Vec<f64> = inputs.chunks(batch.elements).flat_map(normalized).collect();
    let mut normal = None;
    for parts in [1, 5, 40] {
        let norms = norms(&client, &input, batch, F32, parts).unwrap();
        let rounded = normalize(&client, &input, &norms, batch, [F32, half], 0.0).unwrap();
        close(&download::<F>(&client, &rounded), &expected, 1e-3, &format!("{parts} parts"));
        normal = Some(rounded);
    }
    let parameter = upload::<f32>(&client, &parameters);
    let [ones, keep, lr] = [1.0, 0.75, 2.0].map(|x| upload::<f32>(&client, &[x; 3]));
    let direction = normal.unwrap();
    apply(&client, &parameter, &direction, [&ones, &keep, &lr], batch, [F32, half]).unwrap();
    let directions = download::<F>(&client, &direction);
    let updated: Vec<f64> =
        parameters.iter().zip(&directions).map(|(p, u)| 0.75 * p - 2.0 * u).collect();
    close(&download::<f32>(&client, &parameter), &updated, 1e-6, "parameters");
}

#[test]
fn matrices_with_something_too_large_are_refused() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 3, elements: 3000 };
    let mut grads = values::<f32>(batch.len(), 5);
    (grads[1500], grads[4500]) = (1.7e19, -1.9e19);
    let grad = upload::<f32>(&client, &grads);
    for (largest, expected) in [(f32::MAX, [1.0; 3]), (1.8e19, [1.0, 0.0, 1.0])] {
        let accepted = finite(&client, &grad, batch, F32, largest).unwrap();
        assert_eq!(download::<f32>(&client, &accepted), expected, "up to {largest}");
    }
}

#[test]
fn norms_at_any_scale() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 2, elements: 3000 };
    for scale in [1e-30, 1e-20, 1.0, 1e20, 1e30] {
        let grads: Vec<f64> =
            values::<f32>(batch.len(), 4).iter().map(|x| f64::from((x * scale) as f32)).collect();
        let grad = upload::<f32>(&client, &grads);
        let momentum = upload::<f32>(&client, &vec![0.0; batch.len()]);
        let accepted = finite(&client, &grad, batch, F32, f32::MAX).unwrap();
        let rule = Momentum { mu: 0.0, nesterov: false };
        let (update, norms) =
            accumulate(&client, [&grad, &momentum, &accepted], batch, F32, rule, parts(batch))
                .unwrap();
        let normal = normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
        let normal = download::<f32>(&client, &normal);
        for matrix in normal.chunks(batch.elements) {
            let norm = matrix.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((norm - 1.0).abs() < 1e-5, "scale {scale}: {norm}");
        }
        // A norm below epsilon is not amplified.
        let small = normalize(&client, &update, &norms, batch, [F32; 2], 1e-7).unwrap();
        let norm = download::<f32>(&client, &small)[..batch.elements]
            .iter()
            .map(|x| x * x)
            .sum::<f64>()
            .sqrt();
        assert!(if scale < 1e-10 { norm < 1e-10 } else { (norm - 1.0).abs() < 1e-5 }, "{norm}");
    }
    let zeros = upload::<f32>(&client, &vec![0.0; batch.len()]);
    let accepted = finite(&client, &zeros, batch, F32, f32::MAX).unwrap();
    let rule = Momentum { mu: 0.5, nesterov: true };
    let (update, norms) =
        accumulate(&client, [&zeros, &zeros, &accepted], batch, F32, rule, parts(batch)).unwrap();
    let normal = normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
    assert!(download::<f32>(&client, &normal).iter().all(|x| *x == 0.0), "zero stays zero");
}

/// For parameters and moments of two types.
fn check_adamw<F: Real, M: Real>(tolerance: f64) {
    let (Some(client), Some(_)) = (client::<F>(), client::<M>()) else { return };
    // More rows than a dimension of cubes can have, too.
    for batch in BATCHES.into_iter().chain([Batch { count: 70_000, elements: 4 }]) {
        let grads = poisoned::<F>(batch);
        let (old, first) = (values::<F>(batch.len(), 5), values::<M>(batch.len(), 6));
        let second: Vec<f64> = values::<M>(batch.len(), 7).iter().map(|x| x.abs()).collect();
        let [a, b] = [&old, &grads].map(|x| upload::<F>(&client, x));
        let [c, d] = [&first, &second].map(|x| upload::<M>(&client, x));
        let taken = accepts(batch);
        let wave = |i: usize| 0.5 + (i % 4) as f64 * 0.125;
        let waves: Vec<f64> = (0..batch.count).map(wave).collect();
        let rows = [&taken, &waves, &waves, &waves, &waves].map(|x| x.as_slice()).concat();
        let rows = upload::<f32>(&client, &rows);
        let constants = AdamW { beta_1: 0.75, beta_2: 0.875, epsilon: 1e-3 };
        let dtypes = [F::elem_type_native(), M::elem_type_native()];
        adamw(&client, [&a, &b, &c, &d], &rows, batch, dtypes, constants).unwrap();
        let mut expected = [old.clone(), first.clone(), second.clone()];
        for i in (0..batch.len()).filter(|i| taken[i / batch.elements] == 1.0) {
            let row = wave(i / batch.elements);
            let m = 0.75 * first[i] + 0.25 * grads[i];
            let v = 0.875 * second[i] + 0.125 * grads[i] * grads[i];
            let value = row * old[i] - row * (m / row / ((v / row).sqrt() + 1e-3));
            [expected[0][i], expected[1][i], expected[2][i]] = [value, m, v];
        }
        let found =
            [download::<F>(&client, &a), download::<M>(&client, &c), download::<M>(&client, &d)];
        for (found, expected) in found.iter().zip(&expected) {
            close(found, expected, tolerance, &format!("{batch:?}"));
        }
    }
}

#[test]
fn adamw_float32() {
    check_adamw::<f32, f32>(1e-5);
}

#[test]
fn adamw_float16() {
    check_adamw::<half::f16, f32>(2e-3);
    check_adamw::<half::f16, half::f16>(2e-3);
}

#[test]
fn adamw_bfloat16() {
    check_adamw::<half::bf16, half::bf16>(2e-2);
}

#[test]
fn nothing_to_do() {
    let Some(client) = client::<f32>() else { return };
    for batch in [Batch { count: 0, elements: 4 }, Batch { count: 3, elements: 0 }] {
        let handle = upload::<f32>(&client, &[1.0, 2.0]);
        let accepted = finite(&client, &handle, batch, F32, f32::MAX).unwrap();
        let rule = Momentum { mu: 0.5, nesterov: true };
        let (update, norms) =
            accumulate(&client, [&handle, &handle, &accepted], batch, F32, rule, parts(batch))
                .unwrap();
        normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
        apply(&client, &handle, &update, [&accepted; 3], batch, [F32; 2]).unwrap();
        let constants = AdamW { beta_1: 0.9, beta_2: 0.9, epsilon: 0.0 };
        let rows = upload::<f32>(&client, &[1.0; 15]);
        adamw(&client, [&handle; 4], &rows, batch, [F32; 2], constants).unwrap();
        assert_eq!(download::<f32>(&client, &handle), [1.0, 2.0]);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 2, elements: 12 };
    let [whole, short] = [24, 23].map(|count| upload::<f32>(&client, &vec![1.0; count]));
    let [flags, no_flags] = [2, 1].map(|count| upload::<f32>(&client, &vec![1.0; count]));
    let says = |error: Error, words: &str| {
        assert!(error.to_string().contains(words), "{error}");
    };
    says(
        finite(&client, &short, batch, F32, f32::MAX).unwrap_err(),
        "gradient has a buffer of 92 bytes",
    );
    let rule = Momentum { mu: 0.5, nesterov: true };
    let accumulated = |grad, momentum, flags| {
        accumulate(&client, [grad, momentum, flags], batch, F32, rule, 3).map(|(_, norms)| norms)
    };
    says(accumulated(&whole, &short, &flags).unwrap_err(), "momentum");
    says(accumulated(&whole, &whole, &no_flags).unwrap_err(), "flags");
    let more = Norms { parts: 4, ..accumulated(&whole, &whole, &flags).unwrap() };
    says(normalize(&client, &whole, &more, batch, [F32; 2], 0.0).unwrap_err(), "norms");
    says(norms(&client, &short, batch, F32, 3).map(drop).unwrap_err(), "input");
    let applied = |direction, lr| {
        apply(&client, &whole, direction, [&flags, &flags, lr], batch, [F32; 2]).unwrap_err()
    };
    says(applied(&short, &flags), "direction");
    says(applied(&whole, &no_flags), "lr");
    let constants = AdamW { beta_1: 0.9, beta_2: 0.9, epsilon: 0.0 };
    let stepped = |moment, rows| {
        adamw(&client, [&whole, &whole, &whole, moment], rows, batch, [F32; 2], constants)
    };
    says(stepped(&short, &whole).unwrap_err(), "second moment");
    says(stepped(&whole, &flags).unwrap_err(), "rows");
    let double = ElemType::Float(FloatKind::F64);
    if client.properties().supports_type(double) {
        println!("skipped: the device has all types");
    } else {
        says(
            finite(&client, &whole, Batch { count: 1, elements: 1 }, double, f32::MAX).unwrap_err(),
            "has no",
        );
    }
}
