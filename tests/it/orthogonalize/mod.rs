//! Newton-Schulz against float64 references, for every kind of matrix that may occur in a run.

mod precision;

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData, s};
use distmuon::ComputePath;
use distmuon::{
    Coefficients, IterationDtype, IterationForm, KernelPolicy, NativeKernels, NewtonSchulz,
    NewtonSchulzConfig, Normalization,
};
use distmuon_testing::device::{has_tf32, has_type, is_flex, tf32_or};
use distmuon_testing::models::bits;
use distmuon_testing::references::{
    self, distance, matrix, newton_schulz, polar, random, tensor, with_spectrum,
};
use distmuon_testing::{excused, lacks};
use faer::Mat;
use proptest::prelude::*;

fn sets() -> Vec<Coefficients> {
    vec![
        Coefficients::KellerJordan,
        Coefficients::You,
        Coefficients::polar_express(),
        Coefficients::PolarExpressCushioned,
        Coefficients::polar_express_for(1e-2),
        Coefficients::polar_express_for(1e-4),
        Coefficients::Aol,
        Coefficients::Cubic,
        Coefficients::DeepSeekV4,
    ]
}

fn schedule(set: &Coefficients) -> Vec<[f64; 3]> {
    set.schedule(set.designed_steps()).unwrap()
}

/// A configuration in float32, without an epsilon.
fn config(set: &Coefficients, steps: usize) -> NewtonSchulzConfig {
    NewtonSchulzConfig::new()
        .with_coefficients(set.clone())
        .with_steps(Some(steps))
        .with_epsilon(0.0)
        .with_dtype(IterationDtype::F32)
}

fn iteration(set: &Coefficients, epsilon: f64, form: IterationForm) -> NewtonSchulz {
    let config = config(set, set.designed_steps()).with_epsilon(epsilon).with_form(form);
    config.init().unwrap()
}

fn default_config() -> NewtonSchulzConfig {
    let set = Coefficients::polar_express();
    config(&set, set.designed_steps())
}

/// The forms that are precise in float32. Where products are in TF32, `precision.rs` compares the
/// Gram form with float16.
fn forms() -> &'static [IterationForm] {
    match has_tf32() {
        true => &[IterationForm::Standard],
        false => &[IterationForm::Standard, IterationForm::Gram],
    }
}

fn default_iteration() -> NewtonSchulz {
    default_config().init().unwrap()
}

/// A bound for an error of the standard form in float32. Where products are in TF32, it is larger
/// by twice the error that rounding their factors makes in float64.
fn bound(
    float32: f64,
    input: &Mat<f64>,
    schedule: &[[f64; 3]],
    error: impl Fn(&Mat<f64>) -> f64,
) -> f64 {
    if !has_tf32() {
        return float32;
    }
    let rounded = references::newton_schulz_in_tf32(input, schedule);
    float32 + 2.0 * rounded.iter().map(error).fold(0.0, f64::max)
}

fn run(iteration: &NewtonSchulz, input: &Mat<f64>) -> Mat<f64> {
    matrix(&iteration.orthogonalize(tensor(input, &Device::default())), 0)
}

#[test]
fn every_set_and_form_matches_the_exact_polynomials() {
    for set in sets() {
        for &form in forms() {
            for kernels in [KernelPolicy::Auto, KernelPolicy::Portable] {
                let newton_schulz = iteration(&set, 1e-7, form).with_kernels(kernels);
                for (rows, columns) in [(64, 64), (32, 96), (96, 32), (37, 53), (128, 512)] {
                    let input = random(rows, columns, 1);
                    let result = run(&newton_schulz, &input);
                    let exact = references::newton_schulz(&input, &schedule(&set), 1e-7);
                    let error = distance(&result, &exact);
                    // The Gram form squares the input, and also the effect of rounding.
                    let bound = tf32_or(if form == IterationForm::Gram { 2e-3 } else { 2e-4 });
                    assert!(
                        error < bound,
                        "{set:?} {form:?} {kernels:?} {rows}x{columns}: {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn schatten_norms_match_the_exact_polynomials() {
    for set in [Coefficients::polar_express(), Coefficients::You, Coefficients::Cubic] {
        for &form in forms() {
            for kernels in [KernelPolicy::Auto, KernelPolicy::Portable] {
                let config = config(&set, set.designed_steps()).with_form(form);
                let config = config.with_normalization(Normalization::Schatten4);
                let newton_schulz = config.init().unwrap().with_kernels(kernels);
                for (rows, columns) in [(64, 64), (32, 96), (96, 32), (37, 53), (1, 5)] {
                    let input = random(rows, columns, 1);
                    let result = run(&newton_schulz, &input);
                    let exact = references::newton_schulz_schatten(&input, &schedule(&set));
                    let error = distance(&result, &exact);
                    let bound = tf32_or(if form == IterationForm::Gram { 2e-3 } else { 2e-4 });
                    let case = format!("{set:?} {form:?} {kernels:?} {rows}x{columns}");
                    assert!(error < bound, "{case}: {error}");
                }
            }
        }
    }
}

#[test]
fn schatten_norms_leave_zeros_and_small_matrices_small() {
    for &form in forms() {
        let config = default_config().with_form(form).with_epsilon(1.0);
        let newton_schulz = config.with_normalization(Normalization::Schatten4).init().unwrap();
        let random = random(24, 40, 3);
        let small = run(&newton_schulz, &(faer::Scale(1e-6) * &random));
        // The steps multiply small values by up to 804, and the norm by up to 3.1 here.
        assert!(small.norm_l2() < 0.1, "{form:?}: {}", small.norm_l2());
        assert_eq!(run(&newton_schulz, &Mat::zeros(24, 40)).norm_l2(), 0.0, "{form:?}");
        // A matrix that is not finite has no effect on others.
        let device = Device::default();
        let both = |first: f64| {
            let first = Mat::from_fn(24, 40, |i, j| if (i, j) == (3, 4) { first } else { 0.5 });
            Tensor::cat(vec![tensor(&first, &device), tensor(&random, &device)], 0)
        };
        let [with_nan, without] =
            [f64::NAN, 0.5].map(|x| matrix(&newton_schulz.orthogonalize(both(x)), 1));
        assert_eq!(distance(&with_nan, &without), 0.0, "{form:?}");
        assert!(matrix(&newton_schulz.orthogonalize(both(f64::NAN)), 0).norm_l2().is_nan());
    }
}

/// A random matrix whose rows have norms over some decades.
fn with_graded_rows(rows: usize, columns: usize, decades: f64) -> Mat<f64> {
    let random = random(rows, columns, 43);
    let scale = |i: usize| 10f64.powf(-decades * i as f64 / rows as f64);
    Mat::from_fn(rows, columns, |i, j| scale(i) * random[(i, j)])
}

/// The iteration that rescales the rows of matrices.
fn almost_orthogonal(set: &Coefficients, form: IterationForm) -> NewtonSchulzConfig {
    let config = config(set, set.designed_steps()).with_form(form);
    config.with_normalization(Normalization::Aol)
}

#[test]
fn aol_matches_the_exact_polynomials_of_the_rescaled_matrix() {
    for set in [Coefficients::polar_express(), Coefficients::Aol, Coefficients::Cubic] {
        for &form in forms() {
            for kernels in [KernelPolicy::Auto, KernelPolicy::Portable] {
                let iteration = almost_orthogonal(&set, form).init().unwrap();
                let iteration = iteration.with_kernels(kernels);
                for (rows, columns) in [(64, 64), (32, 96), (96, 32), (37, 53), (1, 5), (5, 1)] {
                    let input = with_graded_rows(rows, columns, 1.0);
                    let result = run(&iteration, &input);
                    let exact = references::newton_schulz_aol(&input, &schedule(&set));
                    let error = distance(&result, &exact);
                    let bound = tf32_or(if form == IterationForm::Gram { 2e-3 } else { 2e-4 });
                    // The errors of one singular value do not average out: up to 0.03 with TF32.
                    let bound = if rows.min(columns) == 1 { 4.0 * bound } else { bound };
                    let case = format!("{set:?} {form:?} {kernels:?} {rows}x{columns}");
                    assert!(error < bound, "{case}: {error}");
                }
            }
        }
    }
}

#[test]
fn aol_leaves_zeros_and_small_matrices_small() {
    for &form in forms() {
        let config = almost_orthogonal(&Coefficients::polar_express(), form);
        let iteration = config.clone().with_epsilon(1.0).init().unwrap();
        let random = random(24, 40, 3);
        let small = run(&iteration, &(faer::Scale(1e-6) * &random));
        // The steps multiply small values by up to 804, and the rescaling by up to 20 here.
        assert!(small.norm_l2() < 0.5, "{form:?}: {}", small.norm_l2());
        assert_eq!(run(&iteration, &Mat::zeros(24, 40)).norm_l2(), 0.0, "{form:?}");
        // Rows of zeros stay zero, and have no effect on others.
        let iteration = config.init().unwrap();
        let some = Mat::from_fn(30, 40, |i, j| if i < 24 { random[(i, j)] } else { 0.0 });
        let (with_zeros, alone) = (run(&iteration, &some), run(&iteration, &random));
        assert_eq!(with_zeros.submatrix(24, 0, 6, 40).norm_l2(), 0.0, "{form:?}");
        let error = distance(&with_zeros.submatrix(0, 0, 24, 40).to_owned(), &alone);
        assert!(error < tf32_or(1e-5), "{form:?}: {error}");
        // A matrix that is not finite has no effect on others.
        let device = Device::default();
        for bad in [f64::NAN, f64::INFINITY] {
            let first = Mat::from_fn(24, 40, |i, j| if (i, j) == (3, 4) { bad } else { 0.5 });
            let both = Tensor::cat(vec![tensor(&first, &device), tensor(&random, &device)], 0);
            let both = iteration.orthogonalize(both);
            assert_eq!(distance(&matrix(&both, 1), &alone), 0.0, "{form:?}");
            assert!(matrix(&both, 0).norm_l2().is_nan(), "{form:?}, {bad}");
        }
    }
}

/// Float16 has no squares of small numbers: many equal rows far below another one are the worst
/// case, since none of their products may be left out of a sum.
#[test]
fn aol_bounds_every_matrix_at_every_scale_in_every_type() {
    let random = random(96, 160, 47);
    let equal = |small: f64| {
        Mat::from_fn(96, 160, |i, j| if i == 0 { random[(0, j)] } else { small * random[(1, j)] })
    };
    let rank_one = Mat::from_fn(96, 160, |i, j| random[(i, 0)] * random[(0, j)]);
    let mut inputs = vec![rank_one, with_graded_rows(96, 160, 4.0)];
    inputs.extend((0..10).map(|power| equal(4f64.powi(-2 * power))));
    for (dtype, held) in [
        (IterationDtype::F32, FloatDType::F32),
        (IterationDtype::F16, FloatDType::F16),
        (IterationDtype::Bf16, FloatDType::BF16),
    ] {
        if !has_type(held) {
            lacks(format!("{held:?}"));
            continue;
        }
        for form in [IterationForm::Standard, IterationForm::Auto] {
            let config = almost_orthogonal(&Coefficients::polar_express(), form);
            let iteration = config.with_dtype(dtype).init().unwrap();
            for (index, input) in inputs.iter().enumerate() {
                let reference = run(&iteration, input);
                let largest = reference.thin_svd().unwrap().S().column_vector()[0];
                let case = format!("{index}, {dtype:?}, {form:?}");
                assert!(largest > 0.7 && largest < 1.3, "{case}: {largest}");
                // Powers of two, with which no rounding changes.
                for scale in [2f64.powi(-60), 2f64.powi(100)] {
                    let result = run(&iteration, &(faer::Scale(scale) * input));
                    let error = distance(&result, &reference);
                    assert!(error < 1e-6, "{case}, scale {scale}: {error}");
                }
            }
        }
    }
}

#[test]
fn results_are_close_to_the_polar_factor_of_an_svd() {
    for (rows, columns) in [(512, 512), (512, 256), (256, 512)] {
        // Well-conditioned, so that every singular value is within the designed interval.
        let rank = rows.min(columns);
        let values: Vec<f64> = (0..rank).map(|i| 1.0 + i as f64 / rank as f64).collect();
        let input = with_spectrum(rows, columns, &values, 3);
        let error = distance(&run(&default_iteration(), &input), &polar(&input));
        assert!(error < 0.1, "{rows}x{columns}: {error}");
    }
}

#[test]
fn sixteen_polar_express_steps_give_an_orthogonal_matrix() {
    let set = Coefficients::PolarExpress { safety: 1.0 };
    let newton_schulz = config(&set, 16).with_form(IterationForm::Standard).init();
    let input = random(48, 80, 5);
    let error =
        |result: &Mat<f64>| distance(&(result * result.transpose()), &Mat::identity(48, 48));
    let actual = error(&run(&newton_schulz.unwrap(), &input));
    let bound = bound(1e-5, &input, &set.schedule(16).unwrap(), error);
    assert!(actual < bound, "{actual}, bound {bound}");
}

#[test]
fn matrices_of_odd_and_degenerate_shapes_match_float64() {
    for (rows, columns) in
        [(1, 1), (1, 7), (7, 1), (1, 300), (2, 3), (511, 513), (511, 257), (257, 513)]
    {
        let input = random(rows, columns, 7);
        let result = run(&default_iteration(), &input);
        let schedule = schedule(&Coefficients::polar_express());
        let exact = newton_schulz(&input, &schedule, 0.0);
        let error = |result: &Mat<f64>| distance(result, &exact);
        let (error, bound) = (error(&result), bound(2e-4, &input, &schedule, error));
        assert!(error < bound, "{rows}x{columns}: {error}, bound {bound}");
    }
    let empty = Tensor::<3>::zeros([0, 4, 5], &Device::default());
    assert_eq!(default_iteration().orthogonalize(empty).dims(), [0, 4, 5]);
}

#[test]
fn results_do_not_depend_on_scale_without_epsilon() {
    let input = random(24, 40, 11);
    let reference = run(&default_iteration(), &input);
    for scale in [1e-30, 1e-12, 1e20] {
        let result = run(&default_iteration(), &(faer::Scale(scale) * &input));
        assert!(distance(&result, &reference) < tf32_or(1e-4), "scale {scale}");
    }
}

#[test]
fn epsilon_keeps_tiny_matrices_tiny() {
    let newton_schulz = iteration(&Coefficients::polar_express(), 1e-7, IterationForm::Auto);
    let input = faer::Scale(1e-30) * &random(24, 40, 11);
    let result = run(&newton_schulz, &input);
    assert!(result.norm_max() < 1e-18 && result.norm_max().is_finite());
}

#[test]
fn zero_matrices_stay_zero() {
    for epsilon in [0.0, 1e-7] {
        for (rows, columns) in [(8, 8), (8, 24), (600, 520)] {
            let newton_schulz =
                iteration(&Coefficients::polar_express(), epsilon, IterationForm::Auto);
            let result = run(&newton_schulz, &Mat::zeros(rows, columns));
            assert_eq!(result.norm_max(), 0.0, "{rows}x{columns}, epsilon {epsilon}");
        }
    }
}

#[test]
fn rank_deficient_matrices_keep_their_rank() {
    for (rows, columns) in [(64, 64), (64, 200)] {
        let mut values = vec![1.0; rows];
        values[rows / 2..].fill(0.0);
        let input = with_spectrum(rows, columns, &values, 13);
        let result = run(&default_iteration(), &input);
        assert!(distance(&result, &polar(&input)) < 0.2, "{rows}x{columns}");
        let rank =
            result.thin_svd().unwrap().S().column_vector().iter().filter(|s| **s > 0.1).count();
        assert_eq!(rank, rows / 2);
    }
}

/// Spectra from flat to spanning nine decades, in aspects from 1 to 8: no singular value may leave
/// the interval that exact arithmetic keeps it in.
#[test]
fn singular_values_of_every_spectrum_stay_in_their_interval() {
    // On LibTorch's CPU device, this test is fast enough.
    if matches!(fastest(), ComputePath::CubeCl { .. }) && takes_minutes() {
        return;
    }
    let m = 96;
    let spread = move |i: usize| i as f64 / (m - 1) as f64;
    type Spectrum = Box<dyn Fn(usize) -> f64>;
    let zoo: [(&str, Spectrum); 7] = [
        ("flat", Box::new(|_| 1.0)),
        ("linear", Box::new(move |i| 1.0 - 0.999 * spread(i))),
        ("decade", Box::new(move |i| 10f64.powf(-spread(i)))),
        ("three decades", Box::new(move |i| 10f64.powf(-3.0 * spread(i)))),
        ("nine decades", Box::new(move |i| 10f64.powf(-9.0 * spread(i)))),
        ("one large", Box::new(|i| if i == 0 { 1.0 } else { 1e-4 })),
        ("half zero", Box::new(move |i| if i < m / 2 { 1.0 } else { 0.0 })),
    ];
    for (name, value) in &zoo {
        let values: Vec<f64> = (0..m).map(value).collect();
        for aspect in [1, 2, 4, 8] {
            let input = with_spectrum(m, m * aspect, &values, 17);
            for set in sets() {
                let schedule = schedule(&set);
                let exact = newton_schulz(&input, &schedule, 0.0);
                let error = |result: &Mat<f64>| distance(result, &exact);
                for &form in forms() {
                    let result = run(&iteration(&set, 0.0, form), &input);
                    // Rounding of a zero singular value is amplified by the slope at zero, up to
                    // 8e4 for ten steps; float32 itself is precise to 1e-7.
                    let slope: f64 = schedule.iter().map(|[a, _, _]| a).product();
                    let bound = bound(5e-4 + 2e-7 * slope, &input, &schedule, error);
                    let error = error(&result);
                    assert!(
                        error < bound,
                        "{name} x{aspect} {set:?} {form:?}: {error}, bound {bound}"
                    );
                    let largest = result.thin_svd().unwrap().S().column_vector()[0];
                    let limit = if set == Coefficients::Cubic { 1.3 } else { 1.21 };
                    assert!(
                        largest < limit + bound,
                        "{name} x{aspect} {set:?} {form:?}: {largest}"
                    );
                }
            }
        }
    }
}

#[test]
fn half_precision_is_close_to_float64() {
    for (dtype, held) in
        [(IterationDtype::F16, FloatDType::F16), (IterationDtype::Bf16, FloatDType::BF16)]
    {
        if !has_type(held) {
            lacks(format!("{held:?}"));
            continue;
        }
        for (rows, columns) in [(64, 64), (64, 256), (256, 64)] {
            let set = Coefficients::polar_express();
            let newton_schulz =
                config(&set, 5).with_epsilon(1e-7).with_dtype(dtype).init().unwrap();
            let input = random(rows, columns, 19);
            let result = run(&newton_schulz, &input);
            let exact = references::newton_schulz(&input, &schedule(&set), 1e-7);
            let error = distance(&result, &exact);
            assert!(error < 0.1, "{dtype:?} {rows}x{columns}: {error}");
        }
    }
}

/// float64 is iterated in float64, with coefficients in float64, at any scale.
#[test]
fn float64_matrices_are_iterated_in_float64_at_any_scale() {
    let device = Device::default();
    if !has_type(FloatDType::F64) {
        lacks("float64");
        return;
    }
    let input = random(8, 12, 37);
    let exact = newton_schulz(&input, &schedule(&Coefficients::polar_express()), 0.0);
    for scale in [1.0, 1e-200, 1e200] {
        let values: Vec<f64> = (0..96).map(|i| scale * input[(i / 12, i % 12)]).collect();
        let batch =
            Tensor::<3>::from_data(TensorData::new(values, [1, 8, 12]), (&device, DType::F64));
        for form in [IterationForm::Standard, IterationForm::Gram] {
            let iteration = iteration(&Coefficients::polar_express(), 0.0, form);
            assert_eq!(iteration.explain(&batch).dtype, FloatDType::F64);
            let result = matrix(&iteration.orthogonalize(batch.clone()), 0);
            let error = (result - &exact).norm_l2() / exact.norm_l2();
            assert!(error < 1e-13, "{form:?}, scale {scale}: {error:e}");
        }
    }
}

#[test]
fn a_batch_is_bit_equal_to_its_single_matrices() {
    let device = Device::default();
    for shape in [[3, 20, 33], [2, 33, 20], [2, 130, 130], [3, 200, 520]] {
        let batch = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &device);
        for normalization in
            [Normalization::Frobenius, Normalization::Schatten4, Normalization::Aol]
        {
            let iteration = default_config().with_normalization(normalization).init().unwrap();
            let whole = iteration.orthogonalize(batch.clone());
            for i in 0..shape[0] {
                let single = iteration.orthogonalize(batch.clone().slice(s![i..i + 1]));
                let from_batch = whole.clone().slice(s![i..i + 1]);
                let case = format!("{shape:?}, {normalization:?}, matrix {i}");
                assert_eq!(bits(&single), bits(&from_batch), "{case}");
            }
        }
    }
}

/// Burn takes both devices for equal, and kernels run without autodiff only.
#[test]
fn plans_for_devices_with_autodiff_and_without_are_not_mixed_up() {
    let plain = Device::default();
    let devices = [plain.clone().autodiff(), plain.clone()];
    let path = |iteration: &NewtonSchulz, device: &Device| {
        iteration.explain_shape([6, 9], DType::F32, device).path
    };
    let expected = devices.each_ref().map(|device| path(&default_iteration(), device));
    let x = Tensor::<3>::random([2, 6, 9], Distribution::Default, (&plain, DType::F32));
    let result = bits(&default_iteration().orthogonalize(x.clone()));
    for order in [[0, 1], [1, 0]] {
        let iteration = default_iteration();
        for device in order {
            assert_eq!(path(&iteration, &devices[device]), expected[device], "{order:?}");
        }
        assert!(bits(&iteration.orthogonalize(x.clone())) == result, "{order:?}");
        let leaf = Tensor::<3>::from_inner(x.clone()).require_grad();
        let gradients = iteration.orthogonalize(leaf.clone()).square().sum().backward();
        assert!(leaf.grad(&gradients).is_some(), "{order:?}");
    }
}

#[test]
fn a_bad_matrix_does_not_spoil_its_batch() {
    let device = Device::default();
    let good = Tensor::<3>::random([1, 16, 16], Distribution::Default, &device);
    let bad = good.clone().mul_scalar(f32::NAN);
    let result = default_iteration().orthogonalize(Tensor::cat(vec![good.clone(), bad], 0));
    let alone = default_iteration().orthogonalize(good);
    assert_eq!(bits(&result.clone().slice(s![0..1])), bits(&alone));
    assert!(matrix(&result, 1)[(0, 0)].is_nan());
}

#[test]
fn non_contiguous_batches_agree_with_contiguous_copies() {
    let device = Device::default();
    let wide = Tensor::<3>::random([2, 40, 90], Distribution::Normal(0.0, 1.0), &device);
    let cases = [
        wide.clone().swap_dims(1, 2),
        wide.clone().slice([0..2, 3..30, 5..77]),
        wide.clone().permute([1, 0, 2]),
        wide.clone().slice(s![0..1]).expand([3, 40, 90]),
    ];
    for case in cases {
        let copy = Tensor::<3>::from_data(case.to_data(), &device);
        let (result, reference) =
            (default_iteration().orthogonalize(case), default_iteration().orthogonalize(copy));
        let error = (result - reference).abs().max().into_scalar::<f32>();
        assert!(f64::from(error) < tf32_or(1e-5), "{error}");
    }
}

/// Returns `true` on software devices, on which spectra take minutes.
fn takes_minutes() -> bool {
    let takes_minutes = fastest() != ComputePath::Flex && !has_tf32();
    if takes_minutes {
        excused("spectra are compared on Flex and CUDA");
    }
    takes_minutes
}

/// The expected compute path of the default device.
fn fastest() -> ComputePath {
    let device = format!("{:?}", Device::default());
    match () {
        _ if is_flex() => ComputePath::Flex,
        _ if cfg!(feature = "cube") && device.contains("Cube") => {
            ComputePath::CubeCl { tuned: false }
        }
        _ => ComputePath::Portable,
    }
}

/// Returns `true` on CubeCL's CPU runtime, which has neither cubes of many units nor graphs.
fn on_cpu_runtime() -> bool {
    format!("{:?}", Device::default()).contains("CpuDevice")
}

#[test]
fn explains_the_form_type_and_kernel_that_run() {
    let device = Device::default();
    let explain =
        |iteration: &NewtonSchulz, m, n| iteration.explain(&Tensor::<3>::zeros([1, m, n], &device));
    let auto = default_iteration();
    let wide = explain(&auto, 256, 1024);
    let form = if has_tf32() { IterationForm::Standard } else { IterationForm::Gram };
    assert_eq!((wide.form, wide.dtype), (form, FloatDType::F32));
    assert_eq!(explain(&auto, 1024, 256), wide);
    assert_eq!(
        explain(&auto, 256, 256).form,
        IterationForm::Standard,
        "the Gram form saves nothing here"
    );
    assert_eq!(wide.path, fastest());
    let kernel = match fastest() {
        ComputePath::Flex => "faer",
        ComputePath::CubeCl { .. } => "cube",
        ComputePath::Portable => "Burn's matmul",
        path => unreachable!("the tests know no other path: {path:?}"),
    };
    assert!(wide.kernel.contains(kernel), "{}", wide.kernel);
    // Only CUDA devices have native kernels, and the tests' iteration is in float32.
    let NativeKernels::Refused(reason) = &wide.native else { panic!("{:?}", wide.native) };
    assert!(reason.contains("CUDA device") || reason.contains("neither in float16"), "{reason}");
    let recorded = explain(&default_config().with_graphs(true).init().unwrap(), 256, 1024);
    assert_eq!(recorded, wide, "recordings leave no kernel out");
    // One kernel computes a small Gram form, which is not chosen in TF32.
    let gram = explain(&default_config().with_form(IterationForm::Gram).init().unwrap(), 16, 16);
    let has_cubes = matches!(fastest(), ComputePath::CubeCl { .. }) && !on_cpu_runtime();
    assert_eq!((gram.form, gram.single_kernel), (IterationForm::Gram, has_cubes), "{gram:?}");
    let small = explain(&auto, 16, 16);
    assert_eq!(small.single_kernel, has_cubes && !has_tf32(), "{small:?}");
    let portable = auto.with_kernels(KernelPolicy::Portable);
    let explained = explain(&portable, 16, 16);
    assert_eq!((explained.path, explained.form), (ComputePath::Portable, IterationForm::Standard));

    let half = config(&Coefficients::KellerJordan, 5)
        .with_dtype(IterationDtype::F16)
        .with_form(IterationForm::Gram);
    assert_eq!(explain(&half.init().unwrap(), 64, 64).restarts, [3]);
}

/// Sizes that tiles divide and others, small and large, single and batched, transposed and not.
#[test]
fn kernels_agree_with_burns_operations() {
    let device = Device::default();
    for [k, m, n] in [[1, 128, 256], [3, 70, 50], [2, 33, 96], [4, 16, 24], [1, 150, 150]] {
        let batch = Tensor::<3>::random([k, m, n], Distribution::Normal(0.0, 1.0), &device);
        for &form in forms() {
            let auto = iteration(&Coefficients::polar_express(), 1e-7, form);
            assert_eq!(auto.explain(&batch).path, fastest());
            let portable = auto.clone().with_kernels(KernelPolicy::Portable);
            for batch in [batch.clone(), batch.clone().swap_dims(1, 2)] {
                let difference = auto.orthogonalize(batch.clone()) - portable.orthogonalize(batch);
                let error = difference.abs().max().into_scalar::<f32>();
                assert!(f64::from(error) < tf32_or(1e-3), "{k}x{m}x{n}, {form:?}: {error}");
            }
        }
    }
}

/// Small batches, which are recorded, and one that is not; both sides, and sizes that fill no tile.
#[test]
fn native_kernels_agree_with_burns_operations() {
    let device = Device::default();
    // Between Flex and Burn's operations, which round more often, it is up to 0.008 and 0.06.
    for (dtype, largest) in [(IterationDtype::F16, 0.02), (IterationDtype::Bf16, 0.15)] {
        for form in [IterationForm::Standard, IterationForm::Auto] {
            let config = config(&Coefficients::KellerJordan, 5).with_dtype(dtype).with_form(form);
            let native = config.init().unwrap();
            for shape @ [k, m, n] in [[1, 128, 256], [3, 200, 136], [2, 136, 520], [1, 1032, 4104]]
            {
                if let NativeKernels::Refused(reason) =
                    native.explain_shape([m, n], DType::F32, &device).native
                {
                    excused(format!("native kernels in {dtype:?}: {reason}"));
                    return;
                }
                let normal = Distribution::Normal(0.0, 1.0);
                let batch = Tensor::<3>::random(shape, normal, &device);
                let portable = native.clone().with_kernels(KernelPolicy::Portable);
                // The second time, a recording is replayed.
                for _ in 0..2 {
                    let expected = portable.orthogonalize(batch.clone());
                    let difference = native.orthogonalize(batch.clone()) - expected.clone();
                    let norm = |x: Tensor<3>| x.square().sum().sqrt().into_scalar::<f32>();
                    let error = norm(difference) / norm(expected);
                    assert!(error < largest, "{k}x{m}x{n}, {dtype:?}, {form:?}: {error}");
                }
            }
        }
    }
}

/// A graph is recorded at the first batch of a shape, unless one kernel iterates it or it is large.
/// Later batches do not overwrite its result.
#[test]
fn recorded_graphs_serve_later_batches_of_the_same_shape() {
    let device = Device::default();
    let recorded = default_config().with_graphs(true).init().unwrap();
    let batches = [1.0, 100.0, 0.01]
        .map(|size| Tensor::<3>::random([2, 72, 136], Distribution::Normal(0.0, size), &device));
    let results = batches.clone().map(|batch| recorded.orthogonalize(batch));
    for (batch, result) in batches.into_iter().zip(results) {
        let error =
            (result - default_iteration().orthogonalize(batch)).abs().max().into_scalar::<f32>();
        assert!(f64::from(error) < tf32_or(1e-5), "{error}");
    }
    let has_graphs = matches!(fastest(), ComputePath::CubeCl { .. }) && !on_cpu_runtime();
    assert_eq!(recorded.recorded(), usize::from(has_graphs));

    let one_kernel = Tensor::<3>::ones([2, 16, 24], &device);
    let is_one = recorded.explain(&one_kernel).single_kernel;
    drop(recorded.orthogonalize(one_kernel));
    let expected = usize::from(has_graphs) * if is_one { 1 } else { 2 };
    assert_eq!(recorded.recorded(), expected, "one kernel is one launch");
    drop(recorded.orthogonalize(Tensor::ones([1, 65, (1024 * 4096) / 65 + 1], &device)));
    assert_eq!(recorded.recorded(), expected, "a large batch");
}

/// Kernels are measured at the first batch, and the fastest is used.
#[test]
fn tuned_kernels_agree_with_burns_operations() {
    let batch =
        Tensor::<3>::random([2, 70, 130], Distribution::Normal(0.0, 1.0), &Device::default());
    let tuned = default_iteration().with_kernels(KernelPolicy::Tuned);
    let path = tuned.explain(&batch).path;
    let measured = matches!(fastest(), ComputePath::CubeCl { .. });
    assert_eq!(path == ComputePath::CubeCl { tuned: true }, measured);
    let reference = default_iteration().with_kernels(KernelPolicy::Portable);
    let expected = reference.orthogonalize(batch.clone());
    for _ in 0..2 {
        let difference = tuned.orthogonalize(batch.clone()) - expected.clone();
        let error = difference.abs().max().into_scalar::<f32>();
        assert!(f64::from(error) < tf32_or(1e-3), "{error}");
    }
    // The explanation names the kernel that was chosen.
    let kernel = tuned.explain(&batch).kernel;
    assert!(!measured || kernel.contains("cube") || kernel.contains("Burn's matmul"), "{kernel}");
}

#[test]
fn a_small_workspace_does_not_change_results() {
    let batch =
        Tensor::<3>::random([5, 100, 120], Distribution::Normal(0.0, 1.0), &Device::default());
    let whole = default_iteration().orthogonalize(batch.clone());
    for megabytes in [0, 1] {
        let parts = default_config().with_workspace_mb(megabytes).init().unwrap();
        let parts = parts.orthogonalize(batch.clone());
        let error = (whole.clone() - parts).abs().max().into_scalar::<f32>();
        assert!(f64::from(error) < tf32_or(1e-5), "{megabytes} MB: {error}");
    }
}

#[test]
fn invalid_settings_are_rejected_and_named() {
    let new = |steps, epsilon, form, set: &Coefficients| {
        let config = config(set, steps).with_epsilon(epsilon).with_form(form);
        config.with_dtype(IterationDtype::Bf16).init().unwrap_err().to_string()
    };
    let kj = Coefficients::KellerJordan;
    assert!(
        new(0, 1e-7, IterationForm::Auto, &kj)
            .contains("`steps` is invalid: expected at least 1, got 0")
    );
    assert!(
        new(5, f64::NAN, IterationForm::Auto, &kj)
            .contains("`epsilon` is invalid: expected a finite number, zero or more, got NaN")
    );
    assert!(
        new(5, -1.0, IterationForm::Auto, &kj)
            .contains("`epsilon` is invalid: expected a finite number, zero or more, got -1")
    );
    let wild = Coefficients::Custom(vec![[50.0, -75.0, 26.0]; 8]);
    assert!(new(8, 1e-7, IterationForm::Gram, &wild).contains("`form`"));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn orthogonalising_commutes_with_transposition(
        rows in 1usize..40,
        columns in 1usize..40,
        seed in 0u64..1000,
    ) {
        let input = random(rows, columns, seed);
        let transposed = input.transpose().to_owned();
        let result = run(&default_iteration(), &transposed);
        let reference = run(&default_iteration(), &input);
        prop_assert!(distance(&result, &reference.transpose().to_owned()) < tf32_or(1e-3));
    }

    #[test]
    fn orthogonalising_commutes_with_rotations(
        rows in 2usize..24,
        columns in 2usize..24,
        seed in 0u64..1000,
    ) {
        let input = random(rows, columns, seed);
        let left = polar(&random(rows, rows, seed + 1));
        let right = polar(&random(columns, columns, seed + 2));
        let rotated = &left * &input * &right;
        let result = run(&default_iteration(), &rotated);
        let reference = &left * run(&default_iteration(), &input) * &right;
        // Both results are rounded.
        let schedule = schedule(&Coefficients::polar_express());
        let exact = newton_schulz(&rotated, &schedule, 0.0);
        let bound = 2.0 * bound(1e-3, &rotated, &schedule, |result| distance(result, &exact));
        let error = distance(&result, &reference);
        prop_assert!(error < bound, "{error}, bound {bound}");
    }

    #[test]
    fn forms_and_compute_paths_agree(
        rows in 1usize..60,
        columns in 1usize..60,
        seed in 0u64..1000,
    ) {
        let input = random(rows, columns, seed);
        let set = Coefficients::polar_express();
        for normalization in
            [Normalization::Frobenius, Normalization::Schatten4, Normalization::Aol]
        {
            let iteration = |form| {
                let config = config(&set, set.designed_steps()).with_form(form);
                config.with_normalization(normalization).init().unwrap()
            };
            let portable = iteration(IterationForm::Standard);
            let reference = run(&portable.with_kernels(KernelPolicy::Portable), &input);
            for &form in forms() {
                let result = run(&iteration(form), &input);
                prop_assert!(distance(&result, &reference) < tf32_or(2e-3));
            }
        }
    }
}
