//! The elementwise kernels against loops in float64, on the runtime that the features choose (wgpu
//! without any).

mod common;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use common::{Real, client, download, excused, upload, values};
use cubecl::client::Client;
use cubecl::server::Handle;
use distmuon_kernels::fused::{
    AdamW, Averaged, Batch, Controls, Momenta, Norms, Part, Stepped, Updated, accumulate, adamw,
    apply, normalize, norms, refuse,
};
use distmuon_kernels::{Error, Matrices, add_identity};

/// Parts of norms: one, several, more than units are in a cube, more than a cube adds up itself, or as many as
/// distmuon takes.
fn parts(batch: Batch) -> usize {
    match batch.elements {
        1 => 1,
        1002 => 300,
        9000 => 1500,
        elements => elements.div_ceil(1 << 14).max(3),
    }
}

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Matrices of one element, of odd sizes, of more than a cube takes at a time, and more than a launch takes.
const BATCHES: [Batch; 7] = [
    Batch { count: 1, elements: 1 },
    Batch { count: 3, elements: 7 },
    Batch { count: 2, elements: 256 },
    Batch { count: 5, elements: 1002 },
    Batch { count: 2, elements: 9000 },
    Batch { count: 1, elements: 70_001 },
    Batch { count: 21, elements: 40 },
];

/// A buffer of rows.
fn part(handle: &Handle, rows: usize, elements: usize) -> Part {
    Part { handle: handle.clone(), rows, elements }
}

/// Values in a buffer for every matrix, but the last two of several matrices in one.
fn apart<F: Real>(client: &Client, values: &[f64], batch: Batch) -> Vec<Part> {
    let rows = |rows: usize| {
        move |values: &[f64]| part(&upload::<F>(client, values), rows, batch.elements)
    };
    let (single, pair) = match batch.count {
        1 => (values, &[][..]),
        count => values.split_at((count - 2) * batch.elements),
    };
    let singles = single.chunks(batch.elements).map(rows(1));
    singles.chain(pair.chunks(2 * batch.elements).map(rows(2))).collect()
}

/// The values of parts one after the other.
fn together<F: Real>(client: &Client, parts: &[Part]) -> Vec<f64> {
    parts.iter().flat_map(|part| download::<F>(client, &part.handle)).collect()
}

/// The number of the part of every matrix.
fn owners(parts: &[Part]) -> Vec<usize> {
    let numbered = parts.iter().enumerate();
    numbered.flat_map(|(number, part)| std::iter::repeat_n(number, part.rows)).collect()
}

/// A flag for every part, 1 where it can't be used.
fn refused<F: Real>(client: &Client, parts: &[Part], largest: f32) -> Handle {
    let flags = upload::<f32>(client, &vec![0.0; parts.len()]);
    let whole = parts.iter().enumerate().map(|(number, part)| {
        let row = Part { rows: 1, elements: part.len(), ..part.clone() };
        (row, number)
    });
    let whole: Vec<_> = whole.collect();
    refuse(client, &whole, &flags, parts.len(), F::elem_type_native(), largest).unwrap();
    flags
}

/// Momentum, with the results of its step.
struct Accumulated {
    update: Handle,
    norms: Norms,
}

/// Advances the momentum of a batch by gradients of the same weight.
fn accumulated<G: Real, F: Real>(
    client: &Client,
    grads: &[Part],
    momentum: &Handle,
    (left, factor): (&Handle, Option<&Handle>),
    batch: Batch,
    (mu, nesterov): (f32, bool),
) -> Result<Accumulated, Error> {
    let dtypes = [G::elem_type_native(), F::elem_type_native()];
    let update = client.empty(batch.len() * dtypes[1].size());
    let norms = Norms::empty(client, batch, parts(batch));
    let momenta = Momenta { momentum, update: &update, norms: &norms, left, factor };
    let numbered = grads.iter().cloned().enumerate();
    let grads: Vec<_> = numbered.map(|(flag, grad)| Averaged { grad, flag, mu }).collect();
    // In two calls, as by who has more parameters than a call takes.
    let (first, second) = grads.split_at(grads.len() / 2);
    let rows = first.iter().map(|of| of.grad.rows).sum();
    accumulate(client, first, momenta, batch, 0, dtypes, nesterov)?;
    accumulate(client, second, momenta, batch, rows, dtypes, nesterov)?;
    Ok(Accumulated { update, norms })
}

fn close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30, |a: f64, x| a.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / largest;
        assert!(error <= tolerance, "{what}, entry {i}: {found}, expected {expected}");
    }
}

/// All but the first part of several are finite.
fn poisoned<F: Real>(batch: Batch) -> Vec<f64> {
    let mut grads = values::<F>(batch.len(), 1);
    if batch.count > 1 {
        grads[batch.elements - 1] = [f64::NAN, f64::INFINITY][batch.count % 2];
    }
    grads
}

fn check_muon<F: Real>(tolerance: f64) {
    let Some(client) = client::<F>() else { return };
    let dtype = F::elem_type_native();
    for batch in BATCHES {
        for (nesterov, factor) in [(true, None), (false, None), (true, Some(0.25))] {
            let (grads, momenta) = (poisoned::<F>(batch), values::<F>(batch.len(), 2));
            let old = values::<F>(batch.len(), 3);
            let grad = apart::<F>(&client, &grads, batch);
            let momentum = upload::<F>(&client, &momenta);
            let parameters = apart::<F>(&client, &old, batch);
            let owners = owners(&grad);

            let left = refused::<F>(&client, &grad, f32::MAX);
            let mut flags = vec![0.0; grad.len()];
            flags[0] = if batch.count > 1 { 1.0 } else { 0.0 };
            assert_eq!(download::<f32>(&client, &left), flags, "{batch:?}");
            let is_taken = |i: usize| flags[owners[i / batch.elements]] == 0.0;

            let scale = factor.map(|factor| upload::<f32>(&client, &[factor]));
            let controls = (&left, scale.as_ref());
            let rule = (0.75, nesterov);
            let Accumulated { update, norms } =
                accumulated::<F, F>(&client, &grad, &momentum, controls, batch, rule).unwrap();
            let fresh = |i: usize| 0.25 * factor.unwrap_or(1.0) * grads[i];
            let averaged: Vec<f64> = (0..batch.len())
                .map(|i| if is_taken(i) { 0.75 * momenta[i] + fresh(i) } else { momenta[i] })
                .collect();
            let ahead: Vec<f64> = (0..batch.len())
                .map(|i| match (is_taken(i), nesterov) {
                    (false, _) => 0.0,
                    (true, true) => 0.75 * averaged[i] + fresh(i),
                    (true, false) => averaged[i],
                })
                .collect();
            let what = format!("{batch:?}, nesterov {nesterov}");
            close(&download::<F>(&client, &momentum), &averaged, tolerance, &what);
            close(&download::<F>(&client, &update), &ahead, tolerance, &what);

            let normal = normalize(&client, &update, &norms, batch, [dtype; 2], 1e-7).unwrap();
            let norm = |matrix: &[f64]| matrix.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-7);
            let expected: Vec<f64> = ahead
                .chunks(batch.elements)
                .flat_map(|matrix| matrix.iter().map(|x| x / norm(matrix)).collect::<Vec<_>>())
                .collect();
            close(&download::<F>(&client, &normal), &expected, tolerance, &what);

            // The last matrix is late; its flags begin at the third.
            let is_late = |i: usize| batch.count > 1 && i / batch.elements == batch.count - 1;
            let mut late = vec![0.0; batch.count + 2];
            late[batch.count + 1] = if batch.count > 1 { 1.0 } else { 0.0 };
            let late = upload::<f32>(&client, &late);
            let keep = |number: usize| 1.0 - 0.125 * (number % 5) as f32;
            let lr = |number: usize| 0.5 + (number % 3) as f32;
            let updated = |(flag, values): (usize, Part)| Updated {
                values,
                flag,
                keep: keep(flag),
                lr: lr(flag),
            };
            let steps: Vec<_> = parameters.iter().cloned().enumerate().map(updated).collect();
            apply(&client, &steps, &update, &left, (&late, 2), (batch, 0), [dtype; 2]).unwrap();
            let expected: Vec<f64> = (0..batch.len())
                .map(|i| match is_taken(i) && !is_late(i) {
                    true => {
                        let of = owners[i / batch.elements];
                        f64::from(keep(of)) * old[i] - f64::from(lr(of)) * ahead[i]
                    }
                    false => old[i],
                })
                .collect();
            close(&together::<F>(&client, &parameters), &expected, 2.0 * tolerance, &what);
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
        let whole = Norms::empty(&client, batch, parts);
        let of = [(part(&input, 1, batch.len()), 0)];
        norms(&client, &of, batch.elements, &whole, F32).unwrap();
        let rounded = normalize(&client, &input, &whole, batch, [F32, half], 0.0).unwrap();
        close(&download::<F>(&client, &rounded), &expected, 1e-3, &format!("{parts} parts"));
        normal = Some(rounded);
    }
    let parameter = part(&upload::<f32>(&client, &parameters), 3, 1002);
    let (left, late) = (upload::<f32>(&client, &[0.0]), upload::<f32>(&client, &[0.0; 3]));
    let direction = normal.unwrap();
    let updated = [Updated { values: parameter.clone(), flag: 0, keep: 0.75, lr: 2.0 }];
    apply(&client, &updated, &direction, &left, (&late, 0), (batch, 0), [F32, half]).unwrap();
    let directions = download::<F>(&client, &direction);
    let updated: Vec<f64> =
        parameters.iter().zip(&directions).map(|(p, u)| 0.75 * p - 2.0 * u).collect();
    close(&download::<f32>(&client, &parameter.handle), &updated, 1e-6, "parameters");

    // Gradients in half precision go into a momentum in float32.
    let (grads, momenta) = (values::<F>(batch.len(), 3), values::<f32>(batch.len(), 4));
    let (grad, momentum) = (apart::<F>(&client, &grads, batch), upload::<f32>(&client, &momenta));
    let left = upload::<f32>(&client, &vec![0.0; grad.len()]);
    accumulated::<F, f32>(&client, &grad, &momentum, (&left, None), batch, (0.5, true)).unwrap();
    let averaged: Vec<f64> = momenta.iter().zip(&grads).map(|(m, g)| 0.5 * m + 0.5 * g).collect();
    close(&download::<f32>(&client, &momentum), &averaged, 1e-6, "momentum");
}

#[test]
fn norms_of_rows_of_many_tensors() {
    let Some(client) = client::<f32>() else { return };
    let elements = 256;
    // Whole rows, a short one at the end, of odd lengths, one that is short itself; more than a launch takes.
    let lengths = [1024, 600, 257, 256, 3, 512, 1000, 130, 770, 999, 256, 64];
    let rows = |length: usize| length.div_ceil(elements);
    let count: usize = lengths.iter().map(|length| rows(*length)).sum();
    for parts in [1, 3] {
        let all = Norms::empty(&client, Batch { count, elements }, parts);
        let (mut tensors, mut expected, mut first) = (vec![], vec![], count);
        for (seed, length) in lengths.into_iter().enumerate() {
            let scale = [1e-25, 1.0, 1e25][seed % 3];
            let values: Vec<f64> = values::<f32>(length, seed);
            let values: Vec<f64> = values.iter().map(|x| (x * scale) as f32 as f64).collect();
            // Those that come later have their rows before.
            first -= rows(length);
            tensors.push((part(&upload::<f32>(&client, &values), 1, length), first));
            let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt() / scale;
            expected.push((first, scale, values.chunks(elements).map(norm).collect::<Vec<_>>()));
        }
        norms(&client, &tensors, elements, &all, F32).unwrap();
        let found = download::<f32>(&client, &all.handle);
        for (first, scale, rows) in expected {
            for (row, expected) in rows.into_iter().enumerate() {
                let at = 2 * (first + row) * parts;
                let squares = found[at..at + 2 * parts].chunks(2).map(|of| of[0] * of[0] * of[1]);
                let norm = squares.sum::<f64>().sqrt() / scale;
                assert!((norm - expected).abs() <= 1e-6 * expected, "{norm} for {expected}");
            }
        }
    }
}

#[test]
fn rows_with_something_too_large_are_refused() {
    let Some(client) = client::<f32>() else { return };
    let (rows, elements) = (3, 3000);
    let mut grads = values::<f32>(rows * elements, 5);
    (grads[1500], grads[4500]) = (1.7e19, -1.9e19);
    let grad = part(&upload::<f32>(&client, &grads), rows, elements);
    for (largest, expected) in [(f32::MAX, [0.0; 5]), (1.8e19, [0.0, 0.0, 1.0, 0.0, 0.0])] {
        let flags = upload::<f32>(&client, &[0.0; 5]);
        refuse(&client, &[(grad.clone(), 1)], &flags, 5, F32, largest).unwrap();
        assert_eq!(download::<f32>(&client, &flags), expected, "up to {largest}");
    }
}

#[test]
fn the_identity_is_added() {
    fn check<F: Real>() {
        let Some(client) = client::<F>() else { return };
        for [k, m] in [[3, 1], [2, 7], [2, 64], [1, 90]] {
            let z = values::<F>(k * m * m, 8);
            let of = |handle| Matrices::contiguous(handle, F::elem_type_native(), [k, m, m]);
            let sum = add_identity(&client, &of(upload::<F>(&client, &z))).unwrap();
            let is_diagonal = |at: usize| at / m % m == at % m;
            let rounded = |x: f64| Into::<f64>::into(F::new(x as f32));
            let expected: Vec<f64> = z
                .iter()
                .enumerate()
                .map(|(at, x)| if is_diagonal(at) { rounded(x + 1.0) } else { *x })
                .collect();
            assert_eq!(download::<F>(&client, &sum.handle), expected, "{k} x {m}");
        }
    }
    check::<f32>();
    check::<half::f16>();
    check::<half::bf16>();
}

#[test]
fn norms_at_any_scale() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 2, elements: 3000 };
    for scale in [1e-30, 1e-20, 1.0, 1e20, 1e30] {
        let grads: Vec<f64> =
            values::<f32>(batch.len(), 4).iter().map(|x| f64::from((x * scale) as f32)).collect();
        let grad = apart::<f32>(&client, &grads, batch);
        let momentum = upload::<f32>(&client, &vec![0.0; batch.len()]);
        let left = refused::<f32>(&client, &grad, f32::MAX);
        let Accumulated { update, norms } =
            accumulated::<f32, f32>(&client, &grad, &momentum, (&left, None), batch, (0.0, false))
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
    let zeros = || upload::<f32>(&client, &vec![0.0; batch.len()]);
    let (grad, momentum) = (vec![part(&zeros(), 2, 3000)], zeros());
    let left = refused::<f32>(&client, &grad, f32::MAX);
    let Accumulated { update, norms } =
        accumulated::<f32, f32>(&client, &grad, &momentum, (&left, None), batch, (0.5, true))
            .unwrap();
    let normal = normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
    assert!(download::<f32>(&client, &normal).iter().all(|x| *x == 0.0), "zero stays zero");
}

/// For parameters and moments of two types.
fn check_adamw<F: Real, M: Real>(tolerance: f64) {
    let (Some(client), Some(_)) = (client::<F>(), client::<M>()) else { return };
    // The longest first, and odd ones, one of them alone in its launch.
    let lengths = [70_001, 9000, 1024, 512, 256, 256, 256, 7, 1, 4096];
    // Where they begin in the moments, which have gaps.
    let firsts: Vec<usize> = (0..lengths.len())
        .map(|i| lengths[..i].iter().map(|n: &usize| n.next_multiple_of(256)).sum::<usize>() + 256)
        .collect();
    let elements = lengths.iter().map(|n| n.next_multiple_of(256)).sum::<usize>() + 512;
    let (first, second) = (values::<M>(elements, 6), values::<M>(elements, 7));
    let second: Vec<f64> = second.iter().map(|x| x.abs()).collect();
    let wave = |i: usize| 0.5 + (i % 4) as f64 * 0.125;
    for factor in [None, Some(0.5)] {
        let olds = lengths.map(|length| values::<F>(length, 5 + length));
        let mut grads = lengths.map(|length| values::<F>(length, 9 + length));
        grads[3][17] = f64::NAN;
        let [c, d] = [&first, &second].map(|x| upload::<M>(&client, x));
        let of = |values: &[f64]| part(&upload::<F>(&client, values), 1, values.len());
        let [parameters, of_grads] = [&olds, &grads].map(|all| all.each_ref().map(|x| of(x)));
        let left = refused::<F>(&client, &of_grads, f32::MAX);
        let corrections = upload::<f32>(&client, &(0..lengths.len()).map(wave).collect::<Vec<_>>());
        let scale = factor.map(|factor| upload::<f32>(&client, &[factor]));
        let controls =
            Controls { left: &left, corrections: [&corrections; 2], factor: scale.as_ref() };
        let stepped = |number: usize| Stepped {
            values: parameters[number].clone(),
            grad: of_grads[number].handle.clone(),
            first: firsts[number],
            flag: number,
            keep: wave(number) as f32,
            lr: wave(number) as f32,
        };
        let steps: Vec<_> = (0..lengths.len()).map(stepped).collect();
        let constants = AdamW { beta_1: 0.75, beta_2: 0.875, epsilon: 1e-3 };
        let dtypes = [F::elem_type_native(), M::elem_type_native()];
        adamw(&client, &steps, [&c, &d], elements, controls, dtypes, constants).unwrap();
        let (mut m, mut v, mut expected) = (first.clone(), second.clone(), olds.clone());
        for number in (0..lengths.len()).filter(|number| *number != 3) {
            let row = wave(number);
            for i in 0..lengths[number] {
                let (at, grad) = (firsts[number] + i, factor.unwrap_or(1.0) * grads[number][i]);
                m[at] = 0.75 * m[at] + 0.25 * grad;
                v[at] = 0.875 * v[at] + 0.125 * grad * grad;
                let step = m[at] / row / ((v[at] / row).sqrt() + 1e-3);
                expected[number][i] = row * expected[number][i] - row * step;
            }
        }
        for (number, expected) in expected.iter().enumerate() {
            let found = download::<F>(&client, &parameters[number].handle);
            close(&found, expected, tolerance, &format!("parameter {number}, {factor:?}"));
        }
        close(&download::<M>(&client, &c), &m, tolerance, "first moments");
        close(&download::<M>(&client, &d), &v, tolerance, "second moments");
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
        let flags = upload::<f32>(&client, &[0.0; 3]);
        let nothing = part(&handle, batch.count, batch.elements);
        refuse(&client, &[(nothing.clone(), 0)], &flags, 3, F32, f32::MAX).unwrap();
        let controls = (&flags, None);
        let Accumulated { update, norms } = accumulated::<f32, f32>(
            &client,
            std::slice::from_ref(&nothing),
            &handle,
            controls,
            batch,
            (0.5, true),
        )
        .unwrap();
        normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
        let values = nothing;
        let updated = [Updated { values: values.clone(), flag: 0, keep: 0.0, lr: 1.0 }];
        apply(&client, &updated, &update, &flags, (&flags, 0), (batch, 0), [F32; 2]).unwrap();
        let constants = AdamW { beta_1: 0.9, beta_2: 0.9, epsilon: 0.0 };
        let controls = Controls { left: &flags, corrections: [&flags; 2], factor: None };
        let grad = handle.clone();
        let stepped = [Stepped { values, grad, first: 0, flag: 0, keep: 0.0, lr: 1.0 }];
        adamw(&client, &stepped, [&handle; 2], 0, controls, [F32; 2], constants).unwrap();
        assert_eq!(download::<f32>(&client, &handle), [1.0, 2.0]);
        let empty = Matrices::contiguous(handle, F32, [batch.count, 0, 0]);
        assert_eq!(add_identity(&client, &empty).unwrap().shape, empty.shape);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 2, elements: 12 };
    let [whole, short] = [24, 23].map(|count| upload::<f32>(&client, &vec![1.0; count]));
    let [flags, no_flags] = [2, 1].map(|count| upload::<f32>(&client, &vec![0.0; count]));
    let says = |error: Error, words: &str| {
        assert!(error.to_string().contains(words), "{error}");
    };
    let of = |handle| part(handle, 2, 12);
    let marked = |grad, flags| refuse(&client, &[(of(grad), 0)], flags, 2, F32, f32::MAX);
    says(marked(&short, &flags).unwrap_err(), "gradient has a buffer of 92 bytes");
    says(marked(&whole, &no_flags).unwrap_err(), "flags");
    let step = |grad, momentum, flags: &Handle| {
        let grads = [part(grad, 1, 12), part(grad, 1, 12)];
        let rule = (0.5, true);
        accumulated::<f32, f32>(&client, &grads, momentum, (flags, None), batch, rule)
            .map(|accumulated| accumulated.norms)
    };
    let tiny = upload::<f32>(&client, &[1.0]);
    says(step(&tiny, &whole, &flags).unwrap_err(), "gradient");
    says(step(&whole, &short, &flags).unwrap_err(), "momentum");
    says(step(&whole, &whole, &no_flags).unwrap_err(), "flags");
    let norms_of = step(&whole, &whole, &flags).unwrap();
    let behind = |grad, first| {
        let update = upload::<f32>(&client, &[0.0; 24]);
        let (momentum, update, norms, left) = (&whole, &update, &norms_of, &flags);
        let momenta = Momenta { momentum, update, norms, left, factor: None };
        let grads = [Averaged { grad, flag: 0, mu: 0.5 }];
        accumulate(&client, &grads, momenta, batch, first, [F32; 2], true).unwrap_err()
    };
    says(
        behind(part(&whole, 1, 12), 2),
        "the gradients is [3, 1, 12], but must be at most [2, 1, 12]",
    );
    says(behind(part(&whole, 2, 8), 0), "the gradients is [2, 1, 8]");
    let more = Norms { parts: norms_of.parts + 1, ..norms_of };
    says(normalize(&client, &whole, &more, batch, [F32; 2], 0.0).unwrap_err(), "norms");
    let taken =
        |input, of: Norms| norms(&client, &[(part(input, 1, 24), 0)], 12, &of, F32).unwrap_err();
    says(taken(&short, Norms::empty(&client, batch, 3)), "input");
    says(taken(&whole, Norms { handle: flags.clone(), parts: 1 }), "norms");
    let applied = |values, direction, late| {
        let updated = [Updated { values: of(values), flag: 0, keep: 1.0, lr: 1.0 }];
        apply(&client, &updated, direction, &flags, (late, 0), (batch, 0), [F32; 2]).unwrap_err()
    };
    says(applied(&short, &whole, &flags), "parameter");
    says(applied(&whole, &short, &flags), "direction");
    says(applied(&whole, &whole, &no_flags), "late flags");
    let constants = AdamW { beta_1: 0.9, beta_2: 0.9, epsilon: 0.0 };
    let stepped = |grad: &Handle, moment, corrections| {
        let values = part(&whole, 1, 24);
        let grad = grad.clone();
        let stepped = [Stepped { values, grad, first: 0, flag: 1, keep: 1.0, lr: 1.0 }];
        let corrections = [&flags, corrections];
        let controls = Controls { left: &flags, corrections, factor: None };
        adamw(&client, &stepped, [&whole, moment], 24, controls, [F32; 2], constants).unwrap_err()
    };
    says(stepped(&short, &whole, &flags), "gradient");
    says(stepped(&whole, &short, &flags), "second moment");
    says(stepped(&whole, &whole, &no_flags), "corrections");
    let oblong = Matrices::contiguous(whole.clone(), F32, [1, 4, 6]);
    says(add_identity(&client, &oblong).unwrap_err(), "square");
    let large = Matrices::contiguous(whole.clone(), F32, [1, 5, 5]);
    says(add_identity(&client, &large).unwrap_err(), "Z");
    let double = ElemType::Float(FloatKind::F64);
    if client.properties().supports_type(double) {
        excused("the device has all types");
    } else {
        let one = [(part(&whole, 1, 1), 0)];
        says(refuse(&client, &one, &flags, 2, double, f32::MAX).unwrap_err(), "has no");
    }
}
