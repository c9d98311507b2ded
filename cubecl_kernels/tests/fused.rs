//! The elementwise kernels, compared with loops in float64 on the runtime that the features choose
//! (wgpu without any).

mod common;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use common::{Real, assert_mentions, client, download, excused, upload, values};
use cubecl::client::Client;
use cubecl::server::Handle;
use distmuon_kernels::fused::{
    AcceptBuffers, AdamW, AdamWTypes, AdamWUpdate, Batch, Joined, MomentumBuffers, MomentumInput,
    ParameterUpdate, Published, RowNorms, Rows, SkipBuffers, StepControls, accept, adamw, apply,
    apply_and_count, normalize, norms, reject, restore, update_momentum,
};
use distmuon_kernels::{Error, Matrices, add_identity};

/// Returns a number of partial norms: one, several, more than the units of a cube, more than a cube
/// adds up itself, or the number that distmuon uses.
fn partials(batch: Batch) -> usize {
    match batch.elements {
        1 => 1,
        1002 => 300,
        9000 => 1500,
        elements => elements.div_ceil(1 << 14).max(3),
    }
}

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Matrices of one element, of odd sizes, of more elements than a cube processes at a time, and
/// more matrices than a launch takes.
const BATCHES: [Batch; 7] = [
    Batch { count: 1, elements: 1 },
    Batch { count: 3, elements: 7 },
    Batch { count: 2, elements: 256 },
    Batch { count: 5, elements: 1002 },
    Batch { count: 2, elements: 9000 },
    Batch { count: 1, elements: 70_001 },
    Batch { count: 90, elements: 40 },
];

/// Returns a buffer as rows.
fn rows(handle: &Handle, count: usize, elements: usize) -> Rows {
    Rows { handle: handle.clone(), count, elements }
}

/// Uploads every matrix to a buffer of its own, except the last two of several matrices, which
/// share one.
fn upload_tensors<F: Real>(client: &Client, values: &[f64], batch: Batch) -> Vec<Rows> {
    let tensor = |count: usize| {
        move |values: &[f64]| rows(&upload::<F>(client, values), count, batch.elements)
    };
    let (single, pair) = match batch.count {
        1 => (values, &[][..]),
        count => values.split_at((count - 2) * batch.elements),
    };
    let singles = single.chunks(batch.elements).map(tensor(1));
    singles.chain(pair.chunks(2 * batch.elements).map(tensor(2))).collect()
}

/// Returns the values of tensors one after the other.
fn download_tensors<F: Real>(client: &Client, tensors: &[Rows]) -> Vec<f64> {
    tensors.iter().flat_map(|tensor| download::<F>(client, &tensor.handle)).collect()
}

/// Returns the index of the tensor of every matrix.
fn tensor_indices(tensors: &[Rows]) -> Vec<usize> {
    let numbered = tensors.iter().enumerate();
    numbered.flat_map(|(index, tensor)| std::iter::repeat_n(index, tensor.count)).collect()
}

/// Returns a flag for every tensor, 1 for those that are rejected.
fn reject_tensors<F: Real>(client: &Client, tensors: &[Rows], largest: f32) -> Handle {
    let flags = upload::<f32>(client, &vec![0.0; tensors.len()]);
    let whole = tensors.iter().enumerate().map(|(index, tensor)| {
        let row = Rows { count: 1, elements: tensor.len(), ..tensor.clone() };
        (row, index)
    });
    let whole: Vec<_> = whole.collect();
    reject(client, &whole, &flags, tensors.len(), F::elem_type_native(), largest).unwrap();
    flags
}

/// The results of a momentum step, excluding the momentum.
struct MomentumResults {
    update: Handle,
    norms: RowNorms,
}

/// Updates the momentum of a batch by gradients of the same weight.
fn momentum_step<G: Real, F: Real>(
    client: &Client,
    grads: &[Rows],
    momentum: &Handle,
    (rejected, factor): (&Handle, Option<&Handle>),
    batch: Batch,
    (keep, fresh, nesterov): (f32, f32, bool),
) -> Result<MomentumResults, Error> {
    let dtypes = [G::elem_type_native(), F::elem_type_native()];
    let update = client.empty(batch.len() * dtypes[1].size());
    let norms = RowNorms::empty(client, batch, partials(batch));
    let buffers = MomentumBuffers { momentum, update: &update, norms: &norms, rejected, factor };
    let numbered = grads.iter().cloned().enumerate();
    let input = |(flag, grad)| MomentumInput { grad, flag, keep, fresh };
    let inputs: Vec<_> = numbered.map(input).collect();
    // In two calls, as a caller does that has more parameters than one call takes.
    let (first, second) = inputs.split_at(inputs.len() / 2);
    let first_count = first.iter().map(|input| input.grad.count).sum();
    update_momentum(client, first, buffers, batch, 0, dtypes, nesterov)?;
    update_momentum(client, second, buffers, batch, first_count, dtypes, nesterov)?;
    Ok(MomentumResults { update, norms })
}

/// Returns the Euclidean norm.
fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn assert_close(actual: &[f64], expected: &[f64], tolerance: f64, name: &str) {
    assert_eq!(actual.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(1e-30, |a: f64, x| a.max(x.abs()));
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (actual - expected).abs() / largest;
        assert!(error <= tolerance, "{name}, entry {i}: {actual}, expected {expected}");
    }
}

/// Returns gradients that are finite, except in the first of several matrices.
fn partly_non_finite<F: Real>(batch: Batch) -> Vec<f64> {
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
        for (nesterov, factor, weight) in
            [(true, None, 0.25), (false, None, 1.0), (true, Some(0.25), 0.25)]
        {
            let grads = partly_non_finite::<F>(batch);
            let momenta = values::<F>(batch.len(), 2);
            let old = values::<F>(batch.len(), 3);
            let grad = upload_tensors::<F>(&client, &grads, batch);
            let momentum = upload::<F>(&client, &momenta);
            let parameters = upload_tensors::<F>(&client, &old, batch);
            let indices = tensor_indices(&grad);

            let rejected = reject_tensors::<F>(&client, &grad, f32::MAX);
            let mut flags = vec![0.0; grad.len()];
            flags[0] = if batch.count > 1 { 1.0 } else { 0.0 };
            assert_eq!(download::<f32>(&client, &rejected), flags, "{batch:?}");
            let is_updated = |i: usize| flags[indices[i / batch.elements]] == 0.0;

            let scale = factor.map(|factor| upload::<f32>(&client, &[factor]));
            let controls = (&rejected, scale.as_ref());
            let rule = (0.75, weight as f32, nesterov);
            let MomentumResults { update, norms } =
                momentum_step::<F, F>(&client, &grad, &momentum, controls, batch, rule).unwrap();
            let fresh = |i: usize| weight * factor.unwrap_or(1.0) * grads[i];
            let averaged: Vec<f64> = (0..batch.len())
                .map(|i| if is_updated(i) { 0.75 * momenta[i] + fresh(i) } else { momenta[i] })
                .collect();
            let ahead: Vec<f64> = (0..batch.len())
                .map(|i| match (is_updated(i), nesterov) {
                    (false, _) => 0.0,
                    (true, true) => 0.75 * averaged[i] + fresh(i),
                    (true, false) => averaged[i],
                })
                .collect();
            let name = format!("{batch:?}, nesterov {nesterov}");
            assert_close(&download::<F>(&client, &momentum), &averaged, tolerance, &name);
            assert_close(&download::<F>(&client, &update), &ahead, tolerance, &name);

            let normal = normalize(&client, &update, &norms, batch, [dtype; 2], 1e-7).unwrap();
            let normalized = |matrix: &[f64]| -> Vec<f64> {
                let divisor = norm(matrix).max(1e-7);
                matrix.iter().map(|x| x / divisor).collect()
            };
            let expected: Vec<f64> = ahead.chunks(batch.elements).flat_map(normalized).collect();
            assert_close(&download::<F>(&client, &normal), &expected, tolerance, &name);

            // The last matrix has diverged; the flags of the batch begin at the third one.
            let is_diverged = |i: usize| batch.count > 1 && i / batch.elements == batch.count - 1;
            let mut flags = vec![0.0; batch.count + 2];
            flags[batch.count + 1] = if batch.count > 1 { 1.0 } else { 0.0 };
            let diverged = (&upload::<f32>(&client, &flags), 2);
            let decay = |index: usize| 1.0 - 0.125 * (index % 5) as f32;
            let lr = |index: usize| 0.5 + (index % 3) as f32;
            let step = |(flag, values): (usize, Rows)| ParameterUpdate {
                values,
                flag,
                decay: decay(flag),
                lr: lr(flag),
            };
            let mut updates: Vec<_> = parameters.iter().cloned().enumerate().map(step).collect();
            let dtypes = [dtype; 2];
            let own = (&updates[..], Joined(false));
            apply(&client, own, &update, &rejected, diverged, (batch, 0), dtypes).unwrap();
            let expected: Vec<f64> = (0..batch.len())
                .map(|i| match is_updated(i) && !is_diverged(i) {
                    true => {
                        let index = indices[i / batch.elements];
                        f64::from(decay(index)) * old[i] - f64::from(lr(index)) * ahead[i]
                    }
                    false => old[i],
                })
                .collect();
            let values = download_tensors::<F>(&client, &parameters);
            assert_close(&values, &expected, 2.0 * tolerance, &name);

            // The same in one buffer for all parameters, bit by bit.
            let all = upload::<F>(&client, &old);
            for update in &mut updates {
                update.values.handle = all.clone();
            }
            let joined = (&updates[..], Joined(true));
            apply(&client, joined, &update, &rejected, diverged, (batch, 0), dtypes).unwrap();
            assert_eq!(download::<F>(&client, &all), values, "{name}");
            if batch.count == 1 {
                check_counted::<F>(&client, &old, &update, &values, [decay(0), lr(0)], &name);
            }
        }
    }
}

/// Compares the kernel that also counts with the values that a step without it has made.
fn check_counted<F: Real>(
    client: &Client,
    old: &[f64],
    direction: &Handle,
    expected: &[f64],
    factors: [f32; 2],
    name: &str,
) {
    for flag in [0.0, 1.0] {
        let parameter = rows(&upload::<F>(client, old), 1, old.len());
        let [flags, skipped, counted, zero] =
            [flag, 3.0, 7.0, 7.0].map(|value| upload::<f32>(client, &[value]));
        let counts = SkipBuffers { skipped: &skipped, counted: &counted, zero: &zero };
        let dtypes = [F::elem_type_native(); 2];
        apply_and_count(client, &parameter, direction, &flags, counts, factors, dtypes).unwrap();
        let expected = if flag == 0.0 { expected } else { old };
        assert_close(&download::<F>(client, &parameter.handle), expected, 1e-6, name);
        let counts = [&skipped, &counted, &zero].map(|handle| download::<f32>(client, handle)[0]);
        assert_eq!(counts, [3.0, 3.0 + flag, 0.0], "{name}");
    }
}

#[test]
fn muon_kernels_in_float32_match_float64() {
    check_muon::<f32>(1e-6);
}

#[test]
fn muon_kernels_in_float16_match_float64() {
    check_muon::<half::f16>(2e-3);
}

#[test]
fn muon_kernels_in_bfloat16_match_float64() {
    check_muon::<half::bf16>(2e-2);
}

/// As in a step whose iteration is in half precision.
#[test]
fn operands_of_two_types_are_rounded_only_when_they_are_stored() {
    type F = half::f16;
    let (Some(client), Some(_)) = (client::<f32>(), client::<F>()) else { return };
    let batch = Batch { count: 3, elements: 1002 };
    let half = F::elem_type_native();
    let inputs = values::<f32>(batch.len(), 1);
    let parameters = values::<f32>(batch.len(), 2);
    let input = upload::<f32>(&client, &inputs);
    let normalized = |matrix: &[f64]| matrix.iter().map(|x| x / norm(matrix)).collect::<Vec<_>>();
    let expected: Vec<f64> = inputs.chunks(batch.elements).flat_map(normalized).collect();
    let mut normal = None;
    for partials in [1, 5, 40] {
        let whole = RowNorms::empty(&client, batch, partials);
        let tensors = [(rows(&input, 1, batch.len()), 0)];
        norms(&client, &tensors, batch.elements, &whole, F32).unwrap();
        let rounded = normalize(&client, &input, &whole, batch, [F32, half], 0.0).unwrap();
        let name = format!("{partials} partial norms");
        assert_close(&download::<F>(&client, &rounded), &expected, 1e-3, &name);
        normal = Some(rounded);
    }
    let parameter = rows(&upload::<f32>(&client, &parameters), 3, 1002);
    let rejected = upload::<f32>(&client, &[0.0]);
    let diverged = (&upload::<f32>(&client, &[0.0; 3]), 0);
    let direction = normal.unwrap();
    let updates = [ParameterUpdate { values: parameter.clone(), flag: 0, decay: 0.75, lr: 2.0 }];
    let dtypes = [F32, half];
    let updates = (&updates[..], Joined(false));
    apply(&client, updates, &direction, &rejected, diverged, (batch, 0), dtypes).unwrap();
    let directions = download::<F>(&client, &direction);
    let expected: Vec<f64> =
        parameters.iter().zip(&directions).map(|(p, u)| 0.75 * p - 2.0 * u).collect();
    let updated = download::<f32>(&client, &parameter.handle);
    assert_close(&updated, &expected, 1e-6, "parameters");

    // Gradients in half precision are added to a momentum in float32.
    let grads = values::<F>(batch.len(), 3);
    let momenta = values::<f32>(batch.len(), 4);
    let grad = upload_tensors::<F>(&client, &grads, batch);
    let momentum = upload::<f32>(&client, &momenta);
    let rejected = upload::<f32>(&client, &vec![0.0; grad.len()]);
    let rule = (0.5, 0.5, true);
    momentum_step::<F, f32>(&client, &grad, &momentum, (&rejected, None), batch, rule).unwrap();
    let averaged: Vec<f64> = momenta.iter().zip(&grads).map(|(m, g)| 0.5 * m + 0.5 * g).collect();
    assert_close(&download::<f32>(&client, &momentum), &averaged, 1e-6, "momentum");
}

#[test]
fn norms_of_the_rows_of_many_tensors_match_float64() {
    let Some(client) = client::<f32>() else { return };
    let elements = 256;
    // Whole rows, a shorter one at the end, odd lengths, a single short row; more tensors than a
    // launch takes.
    let lengths: [usize; 70] = std::array::from_fn(|i| match i {
        0..12 => [1024, 600, 257, 256, 3, 512, 1000, 130, 770, 999, 256, 64][i],
        _ => 7 * i,
    });
    let row_count = |length: usize| length.div_ceil(elements);
    let count: usize = lengths.iter().map(|length| row_count(*length)).sum();
    for partials in [1, 3] {
        let all = RowNorms::empty(&client, Batch { count, elements }, partials);
        let mut tensors = vec![];
        let mut expected = vec![];
        let mut first = count;
        for (seed, length) in lengths.into_iter().enumerate() {
            let scale = [1e-25, 1.0, 1e25][seed % 3];
            let values: Vec<f64> = values::<f32>(length, seed);
            let values: Vec<f64> = values.iter().map(|x| (x * scale) as f32 as f64).collect();
            // The norms of later tensors come first.
            first -= row_count(length);
            tensors.push((rows(&upload::<f32>(&client, &values), 1, length), first));
            let norms = values.chunks(elements).map(|row| norm(row) / scale);
            expected.push((first, scale, norms.collect::<Vec<_>>()));
        }
        norms(&client, &tensors, elements, &all, F32).unwrap();
        let all = download::<f32>(&client, &all.handle);
        for (first, scale, norms) in expected {
            for (row, expected) in norms.into_iter().enumerate() {
                let start = 2 * (first + row) * partials;
                let pairs = all[start..start + 2 * partials].chunks(2);
                let squares = pairs.map(|pair| pair[0] * pair[0] * pair[1]);
                let norm = squares.sum::<f64>().sqrt() / scale;
                assert!((norm - expected).abs() <= 1e-6 * expected, "{norm} for {expected}");
            }
        }
    }
}

#[test]
fn rows_with_an_entry_above_the_limit_are_rejected() {
    let Some(client) = client::<f32>() else { return };
    let count = 3;
    let elements = 3000;
    let mut grads = values::<f32>(count * elements, 5);
    grads[1500] = 1.7e19;
    grads[4500] = -1.9e19;
    let grad = rows(&upload::<f32>(&client, &grads), count, elements);
    for (largest, expected) in [(f32::MAX, [0.0; 5]), (1.8e19, [0.0, 0.0, 1.0, 0.0, 0.0])] {
        let flags = upload::<f32>(&client, &[0.0; 5]);
        reject(&client, &[(grad.clone(), 1)], &flags, 5, F32, largest).unwrap();
        assert_eq!(download::<f32>(&client, &flags), expected, "up to {largest}");
    }
}

#[test]
fn parameters_are_accepted_and_counted() {
    let Some(client) = client::<f32>() else { return };
    // More than a cube has units.
    for (parameters, has_absent, diverged) in
        [(1, false, false), (3, true, false), (301, true, true)]
    {
        let flags = |of: usize| -> Vec<f64> {
            (0..parameters)
                .map(|at| if (at * at + of).is_multiple_of(5) { of as f64 } else { 0.0 })
                .collect()
        };
        let (rejects, diverges) = (flags(1), flags(2));
        let absent: Vec<f64> =
            flags(4).iter().map(|flag| f64::from(u8::from(*flag > 0.0))).collect();
        let sums = if diverged { [&*rejects, &diverges].concat() } else { rejects.clone() };
        let counts: Vec<f64> = (0..parameters).map(|at| at as f64).collect();
        let [sums, absent_flags, skipped] =
            [&sums, &absent, &counts].map(|values| upload::<f32>(&client, values));
        let corrections = [0.5, 0.25].map(|value| upload::<f32>(&client, &vec![value; parameters]));
        let [rejected, counted, zeros] =
            [(); 3].map(|()| upload::<f32>(&client, &vec![7.0; parameters]));
        let buffers = AcceptBuffers {
            sums: &sums,
            absent: has_absent.then_some(&absent_flags),
            skipped: &skipped,
            corrections: corrections.each_ref(),
            rejected: &rejected,
            counted: &counted,
            zeros: &zeros,
        };
        let weights = [[0.5, 0.5], [0.75, 0.25]];
        accept(&client, buffers, parameters, diverged, weights).unwrap();
        let [rejected, counted, zeros, first, second] =
            [&rejected, &counted, &zeros, &corrections[0], &corrections[1]]
                .map(|handle| download::<f32>(&client, handle));
        for at in 0..parameters {
            let is_rejected = rejects[at] > 0.0;
            let stays = is_rejected || has_absent && absent[at] > 0.0;
            let skips = f64::from(u8::from(is_rejected) + u8::from(diverged && diverges[at] > 0.0));
            assert_eq!(rejected[at], f64::from(u8::from(stays)), "{at} of {parameters}");
            assert_eq!(counted[at], counts[at] + skips, "{at} of {parameters}");
            assert_eq!(zeros[at], 0.0);
            let expected = if stays { [0.5, 0.25] } else { [0.75, 0.4375] };
            assert_eq!([first[at], second[at]], expected, "{at} of {parameters}");
        }
        assert_eq!(download::<f32>(&client, &skipped), counts, "the old counts stay");
    }
}

#[test]
fn add_identity_adds_one_to_the_diagonal_only() {
    fn check<F: Real>() {
        let Some(client) = client::<F>() else { return };
        for [k, m] in [[3, 1], [2, 7], [2, 64], [1, 90]] {
            let z = values::<F>(k * m * m, 8);
            let handle = upload::<F>(&client, &z);
            let matrices = Matrices::contiguous(handle, F::elem_type_native(), [k, m, m]);
            let sum = add_identity(&client, &matrices).unwrap();
            let is_diagonal = |i: usize| i / m % m == i % m;
            let rounded = |x: f64| Into::<f64>::into(F::new(x as f32));
            let expected: Vec<f64> = z
                .iter()
                .enumerate()
                .map(|(i, x)| if is_diagonal(i) { rounded(x + 1.0) } else { *x })
                .collect();
            assert_eq!(download::<F>(&client, &sum.handle), expected, "{k} x {m}");
        }
    }
    check::<f32>();
    check::<half::f16>();
    check::<half::bf16>();
}

#[test]
fn norms_neither_overflow_nor_underflow_at_any_scale() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 2, elements: 3000 };
    for scale in [1e-30, 1e-20, 1.0, 1e20, 1e30] {
        let grads: Vec<f64> =
            values::<f32>(batch.len(), 4).iter().map(|x| f64::from((x * scale) as f32)).collect();
        let grad = upload_tensors::<f32>(&client, &grads, batch);
        let momentum = upload::<f32>(&client, &vec![0.0; batch.len()]);
        let controls = (&reject_tensors::<f32>(&client, &grad, f32::MAX), None);
        let rule = (0.0, 1.0, false);
        let MomentumResults { update, norms } =
            momentum_step::<f32, f32>(&client, &grad, &momentum, controls, batch, rule).unwrap();
        let normal = normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
        let normal = download::<f32>(&client, &normal);
        for matrix in normal.chunks(batch.elements) {
            let norm = norm(matrix);
            assert!((norm - 1.0).abs() < 1e-5, "scale {scale}: {norm}");
        }
        // A norm below epsilon is not amplified.
        let small = normalize(&client, &update, &norms, batch, [F32; 2], 1e-7).unwrap();
        let norm = norm(&download::<f32>(&client, &small)[..batch.elements]);
        assert!(if scale < 1e-10 { norm < 1e-10 } else { (norm - 1.0).abs() < 1e-5 }, "{norm}");
    }
    let zeros = || upload::<f32>(&client, &vec![0.0; batch.len()]);
    let grad = vec![rows(&zeros(), 2, 3000)];
    let momentum = zeros();
    let controls = (&reject_tensors::<f32>(&client, &grad, f32::MAX), None);
    let rule = (0.5, 0.5, true);
    let MomentumResults { update, norms } =
        momentum_step::<f32, f32>(&client, &grad, &momentum, controls, batch, rule).unwrap();
    let normal = normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
    assert!(download::<f32>(&client, &normal).iter().all(|x| *x == 0.0), "zero stays zero");
}

/// Checks AdamW for parameters and moments of two types.
fn check_adamw<F: Real, G: Real, M: Real>(tolerance: f64) {
    let (Some(client), Some(_), Some(_)) = (client::<F>(), client::<G>(), client::<M>()) else {
        return;
    };
    // The longest first, odd ones, and more than a launch takes.
    let lengths: [usize; 75] = std::array::from_fn(|i| match i {
        0..10 => [70_001, 9000, 1024, 512, 256, 256, 256, 7, 1, 4096][i],
        _ => 4 * i + i % 2,
    });
    // The first elements in the moments, which have gaps.
    let firsts: Vec<usize> = (0..lengths.len())
        .map(|i| lengths[..i].iter().map(|n: &usize| n.next_multiple_of(256)).sum::<usize>() + 256)
        .collect();
    let elements = lengths.iter().map(|n| n.next_multiple_of(256)).sum::<usize>() + 512;
    let first = values::<M>(elements, 6);
    let second: Vec<f64> = values::<M>(elements, 7).iter().map(|x| x.abs()).collect();
    let wave = |i: usize| 0.5 + (i % 4) as f64 * 0.125;
    for factor in [None, Some(0.5)] {
        let olds = lengths.map(|length| values::<F>(length, 5 + length));
        let mut grads = lengths.map(|length| values::<G>(length, 9 + length));
        grads[3][17] = f64::NAN;
        let moments = || [&first, &second].map(|x| upload::<M>(&client, x));
        let row = |handle: Handle, values: &[f64]| rows(&handle, 1, values.len());
        let parameters = olds.each_ref().map(|values| row(upload::<F>(&client, values), values));
        let grad_rows = grads.each_ref().map(|values| row(upload::<G>(&client, values), values));
        let rejected = reject_tensors::<G>(&client, &grad_rows, f32::MAX);
        let corrections = upload::<f32>(&client, &(0..lengths.len()).map(wave).collect::<Vec<_>>());
        let scale = factor.map(|factor| upload::<f32>(&client, &[factor]));
        let controls = StepControls {
            rejected: &rejected,
            corrections: [&corrections; 2],
            factor: scale.as_ref(),
        };
        let update = |index: usize| AdamWUpdate {
            values: parameters[index].clone(),
            grad: grad_rows[index].handle.clone(),
            first: firsts[index],
            flag: index,
            decay: wave(index) as f32,
            lr: wave(index) as f32,
        };
        let mut updates: Vec<_> = (0..lengths.len()).map(update).collect();
        let constants = AdamW { beta_1: 0.75, beta_2: 0.875, epsilon: 1e-3 };
        let dtypes = AdamWTypes {
            parameters: F::elem_type_native(),
            grads: G::elem_type_native(),
            moments: M::elem_type_native(),
        };
        let run = |updates: &[AdamWUpdate], joined| {
            let [moment_1, moment_2] = moments();
            let (updates, both) = ((updates, joined), [&moment_1, &moment_2]);
            adamw(&client, updates, both, elements, controls, dtypes, constants).unwrap();
            [moment_1, moment_2].map(|moment| download::<M>(&client, &moment))
        };
        let advanced = run(&updates, Joined(false));
        let mut m = first.clone();
        let mut v = second.clone();
        let mut expected = olds.clone();
        // The fourth parameter is rejected: its gradient has a NaN.
        for index in (0..lengths.len()).filter(|index| *index != 3) {
            let correction = wave(index);
            for i in 0..lengths[index] {
                let position = firsts[index] + i;
                let grad = factor.unwrap_or(1.0) * grads[index][i];
                m[position] = 0.75 * m[position] + 0.25 * grad;
                v[position] = 0.875 * v[position] + 0.125 * grad * grad;
                let root = (v[position] / correction).sqrt() + 1e-3;
                let step = m[position] / correction / root;
                expected[index][i] = wave(index) * expected[index][i] - wave(index) * step;
            }
        }
        let updated = parameters.each_ref().map(|rows| download::<F>(&client, &rows.handle));
        for (index, expected) in expected.iter().enumerate() {
            let name = format!("parameter {index}, {factor:?}");
            assert_close(&updated[index], expected, tolerance, &name);
        }
        assert_close(&advanced[0], &m, tolerance, "first moments");
        assert_close(&advanced[1], &v, tolerance, "second moments");

        // The same in one buffer for all parameters, bit by bit.
        let mut together = vec![0.25; elements];
        let place = |index: usize| firsts[index]..firsts[index] + lengths[index];
        for (index, old) in olds.iter().enumerate() {
            together[place(index)].copy_from_slice(old);
        }
        let all = upload::<F>(&client, &together);
        for update in &mut updates {
            update.values.handle = all.clone();
        }
        assert_eq!(run(&updates, Joined(true)), advanced);
        for (index, updated) in updated.iter().enumerate() {
            together[place(index)].copy_from_slice(updated);
        }
        // The elements between the parameters stay.
        assert_eq!(download::<F>(&client, &all), together);
    }
}

#[test]
fn adamw_in_float32_matches_float64() {
    check_adamw::<f32, f32, f32>(1e-5);
}

#[test]
fn adamw_in_float16_matches_float64() {
    check_adamw::<half::f16, half::f16, f32>(2e-3);
    check_adamw::<half::f16, half::f16, half::f16>(2e-3);
    // As with master weights.
    check_adamw::<f32, half::f16, f32>(1e-5);
}

#[test]
fn adamw_in_bfloat16_matches_float64() {
    check_adamw::<half::bf16, half::bf16, half::bf16>(2e-2);
    check_adamw::<f32, half::bf16, f32>(1e-5);
}

fn check_restored<H: Real>() {
    let (Some(client), Some(_)) = (client::<f32>(), client::<H>()) else { return };
    // Vectors of four and of one, and more parameters than a launch takes.
    for lengths in [vec![70_000, 1024, 8], vec![5, 300, 1], vec![40; 90]] {
        let first = |index: usize| lengths[..index].iter().sum::<usize>() + 8 * (index + 1);
        let elements = first(lengths.len());
        let mut masters = values::<f32>(elements, 3);
        // Rounded to the next number of half precision, as far as `H` does.
        let rounded = upload::<H>(&client, &masters);
        let mut published: Vec<Vec<f64>> = {
            let rounded = download::<H>(&client, &rounded);
            let values = |(index, length): (usize, &usize)| {
                rounded[first(index)..first(index) + length].to_vec()
            };
            lengths.iter().enumerate().map(values).collect()
        };
        // The first and the last element of some parameters were changed.
        for (index, values) in published.iter_mut().enumerate().step_by(2) {
            let last = values.len() - 1;
            (values[0], values[last]) = (2.0, f64::NAN);
            masters[first(index)] = 2.0;
            masters[first(index) + last] = f64::NAN;
        }
        let stored = upload::<f32>(&client, &{
            let mut old = masters.clone();
            for (index, length) in lengths.iter().enumerate().step_by(2) {
                old[first(index)] = 0.123;
                old[first(index) + length - 1] = 0.123;
            }
            old
        });
        let parameters: Vec<_> = published
            .iter()
            .enumerate()
            .map(|(index, values)| {
                let values = rows(&upload::<H>(&client, values), 1, values.len());
                Published { values, first: first(index) }
            })
            .collect();
        restore(&client, &parameters, &stored, &rounded, elements, H::elem_type_native()).unwrap();
        let restored = download::<f32>(&client, &stored);
        assert_eq!(restored.len(), masters.len());
        for (index, (restored, master)) in restored.iter().zip(&masters).enumerate() {
            let is_equal = restored == master || restored.is_nan() && master.is_nan();
            assert!(is_equal, "{index}: {restored}, expected {master}");
        }
    }
}

#[test]
fn changed_parameters_replace_their_master_weights() {
    check_restored::<half::f16>();
    check_restored::<half::bf16>();
}

#[test]
fn empty_batches_change_nothing() {
    let Some(client) = client::<f32>() else { return };
    for batch in [Batch { count: 0, elements: 4 }, Batch { count: 3, elements: 0 }] {
        let handle = upload::<f32>(&client, &[1.0, 2.0]);
        let flags = upload::<f32>(&client, &[0.0; 3]);
        let nothing = rows(&handle, batch.count, batch.elements);
        reject(&client, &[(nothing.clone(), 0)], &flags, 3, F32, f32::MAX).unwrap();
        let grads = [nothing.clone()];
        let rule = (0.5, 0.5, true);
        let MomentumResults { update, norms } =
            momentum_step::<f32, f32>(&client, &grads, &handle, (&flags, None), batch, rule)
                .unwrap();
        normalize(&client, &update, &norms, batch, [F32; 2], 0.0).unwrap();
        let updates = [ParameterUpdate { values: nothing.clone(), flag: 0, decay: 0.0, lr: 1.0 }];
        for joined in [Joined(false), Joined(true)] {
            let updates = (&updates[..], joined);
            apply(&client, updates, &update, &flags, (&flags, 0), (batch, 0), [F32; 2]).unwrap();
        }
        let constants = AdamW { beta_1: 0.9, beta_2: 0.9, epsilon: 0.0 };
        let controls = StepControls { rejected: &flags, corrections: [&flags; 2], factor: None };
        let grad = handle.clone();
        let updates =
            [AdamWUpdate { values: nothing.clone(), grad, first: 0, flag: 0, decay: 0.0, lr: 1.0 }];
        for joined in [Joined(false), Joined(true)] {
            let (updates, dtypes) = ((&updates[..], joined), AdamWTypes::all(F32));
            adamw(&client, updates, [&handle; 2], 0, controls, dtypes, constants).unwrap();
        }
        restore(&client, &[Published { values: nothing, first: 0 }], &handle, &handle, 0, F32)
            .unwrap();
        assert_eq!(download::<f32>(&client, &handle), [1.0, 2.0]);
        let empty = Matrices::contiguous(handle, F32, [batch.count, 0, 0]);
        assert_eq!(add_identity(&client, &empty).unwrap().shape, empty.shape);
    }
}

#[test]
fn buffers_and_rows_that_do_not_fit_are_rejected() {
    let Some(client) = client::<f32>() else { return };
    let batch = Batch { count: 2, elements: 12 };
    let [whole, short] = [24, 23].map(|count| upload::<f32>(&client, &vec![1.0; count]));
    let [flags, few_flags] = [2, 1].map(|count| upload::<f32>(&client, &vec![0.0; count]));
    let tensor = |handle| rows(handle, 2, 12);

    let reject =
        |grad, flags| reject(&client, &[(tensor(grad), 0)], flags, 2, F32, f32::MAX).unwrap_err();
    assert_mentions(reject(&short, &flags), "the buffer of the gradient is too small");
    assert_mentions(reject(&short, &flags), "got 92");
    assert_mentions(reject(&whole, &few_flags), "flags");

    let step = |grad, momentum, flags: &Handle| {
        let grads = [rows(grad, 1, 12), rows(grad, 1, 12)];
        let rule = (0.5, 0.5, true);
        momentum_step::<f32, f32>(&client, &grads, momentum, (flags, None), batch, rule)
            .map(|step| step.norms)
    };
    let tiny = upload::<f32>(&client, &[1.0]);
    assert_mentions(step(&tiny, &whole, &flags).unwrap_err(), "gradient");
    assert_mentions(step(&whole, &short, &flags).unwrap_err(), "momentum");
    assert_mentions(step(&whole, &whole, &few_flags).unwrap_err(), "flags");

    let row_norms = step(&whole, &whole, &flags).unwrap();
    let misplaced = |grad, first| {
        let update = upload::<f32>(&client, &[0.0; 24]);
        let buffers = MomentumBuffers {
            momentum: &whole,
            update: &update,
            norms: &row_norms,
            rejected: &flags,
            factor: None,
        };
        let inputs = [MomentumInput { grad, flag: 0, keep: 0.5, fresh: 0.5 }];
        update_momentum(&client, &inputs, buffers, batch, first, [F32; 2], true).unwrap_err()
    };
    let after_the_end = misplaced(rows(&whole, 1, 12), 2);
    assert_mentions(after_the_end.clone(), "type of the gradients");
    assert_mentions(after_the_end, "expected at most [2, 1, 12], got [3, 1, 12]");
    assert_mentions(misplaced(rows(&whole, 2, 8), 0), "got [2, 1, 8]");

    let more = RowNorms { partials: row_norms.partials + 1, ..row_norms };
    let error = normalize(&client, &whole, &more, batch, [F32; 2], 0.0).unwrap_err();
    assert_mentions(error, "norms");
    let norms = |input, row_norms: RowNorms| {
        norms(&client, &[(rows(input, 1, 24), 0)], 12, &row_norms, F32).unwrap_err()
    };
    assert_mentions(norms(&short, RowNorms::empty(&client, batch, 3)), "input");
    assert_mentions(norms(&whole, RowNorms { handle: flags.clone(), partials: 1 }), "norms");

    let apply = |values, direction, diverged, joined| {
        let updates = [ParameterUpdate { values: tensor(values), flag: 0, decay: 1.0, lr: 1.0 }];
        let diverged = (diverged, 0);
        let updates = (&updates[..], joined);
        apply(&client, updates, direction, &flags, diverged, (batch, 0), [F32; 2]).unwrap_err()
    };
    for joined in [Joined(false), Joined(true)] {
        assert_mentions(apply(&short, &whole, &flags, joined), "parameter");
        assert_mentions(apply(&whole, &short, &flags, joined), "direction");
        let error = apply(&whole, &whole, &few_flags, joined);
        assert_mentions(error, "flags of diverged matrices");
    }

    let constants = AdamW { beta_1: 0.9, beta_2: 0.9, epsilon: 0.0 };
    let adamw = |grad: &Handle, moment, corrections| {
        let values = rows(&whole, 1, 24);
        let grad = grad.clone();
        let updates = [AdamWUpdate { values, grad, first: 0, flag: 1, decay: 1.0, lr: 1.0 }];
        let corrections = [&flags, corrections];
        let controls = StepControls { rejected: &flags, corrections, factor: None };
        let (updates, dtypes) = ((&updates[..], Joined(false)), AdamWTypes::all(F32));
        adamw(&client, updates, [&whole, moment], 24, controls, dtypes, constants).unwrap_err()
    };
    assert_mentions(adamw(&short, &whole, &flags), "gradient");
    assert_mentions(adamw(&whole, &short, &flags), "second moment");
    assert_mentions(adamw(&whole, &whole, &few_flags), "corrections");

    let restore = |values, masters, rounded| {
        let parameters = [Published { values: rows(values, 1, 20), first: 4 }];
        restore(&client, &parameters, masters, rounded, 24, F32).unwrap_err()
    };
    assert_mentions(restore(&tiny, &whole, &whole), "parameter");
    assert_mentions(restore(&whole, &short, &whole), "the master weights");
    assert_mentions(restore(&whole, &whole, &short), "the rounded master weights");

    let oblong = Matrices::contiguous(whole.clone(), F32, [1, 4, 6]);
    assert_mentions(add_identity(&client, &oblong).unwrap_err(), "square");
    let large = Matrices::contiguous(whole.clone(), F32, [1, 5, 5]);
    assert_mentions(add_identity(&client, &large).unwrap_err(), "Z");
}

#[test]
fn a_type_that_the_device_does_not_support_is_rejected() {
    let Some(client) = client::<f32>() else { return };
    let double = ElemType::Float(FloatKind::F64);
    if client.properties().supports_type(double) {
        excused("the device supports all types");
        return;
    }
    let flags = upload::<f32>(&client, &[0.0]);
    let one = [(rows(&upload::<f32>(&client, &[1.0; 2]), 1, 1), 0)];
    let error = reject(&client, &one, &flags, 1, double, f32::MAX).unwrap_err();
    assert_mentions(error, "not supported");
}
