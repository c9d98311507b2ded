//! The errors of both forms, for spectra of many kinds, in every type.

use burn::tensor::{DType, Device, FloatDType};
use distmuon::{Coefficients, IterationDtype, IterationForm, NewtonSchulz, Normalization};
use distmuon_testing::device::{has_tf32, has_type};
use distmuon_testing::references::{polar, polynomial, random, tensor};
use faer::Mat;

use super::{config, run, schedule, sets, takes_minutes};

/// Singular vectors of matrices of one size, from which matrices of any spectrum with known results
/// are made.
struct Vectors {
    left: Mat<f64>,
    right: Mat<f64>,
}

impl Vectors {
    fn new(m: usize, n: usize) -> Self {
        Self { left: polar(&random(m, m, 23)), right: polar(&random(n, m, 29)) }
    }

    fn with(&self, values: &[f64]) -> Mat<f64> {
        let (m, n) = (self.left.nrows(), self.right.nrows());
        let rank = values.iter().rposition(|value| *value != 0.0).map_or(0, |last| last + 1);
        let scaled = Mat::from_fn(m, rank, |i, j| self.left[(i, j)] * values[j]);
        &scaled * self.right.submatrix(0, 0, n, rank).transpose()
    }

    /// The result of exact arithmetic for the matrix with these singular values.
    fn image(
        &self,
        values: &[f64],
        schedule: &[[f64; 3]],
        normalization: Normalization,
    ) -> Mat<f64> {
        let power = match normalization {
            Normalization::Schatten4 => 4.0,
            _ => 2.0,
        };
        let norm = values.iter().map(|s| s.powf(power)).sum::<f64>().powf(1.0 / power);
        self.with(&values.iter().map(|s| polynomial(schedule, s / norm)).collect::<Vec<_>>())
    }

    /// A matrix of every spectrum, with its name and singular values.
    fn spectra(&self) -> Vec<(&'static str, Vec<f64>, Mat<f64>)> {
        let all = spectra(self.left.nrows(), self.right.nrows()).into_iter();
        all.map(|(name, values)| (name, values.clone(), self.with(&values))).collect()
    }
}

/// Spectra of gradients, and spectra in which rounding has the largest effect, for `m` by `n`
/// matrices.
fn spectra(m: usize, n: usize) -> Vec<(&'static str, Vec<f64>)> {
    let graded = |value: &dyn Fn(f64) -> f64| -> Vec<f64> {
        (0..m).map(|i| value(i as f64 / (m - 1) as f64)).collect()
    };
    let equal = |rank: usize, rest: f64| -> Vec<f64> {
        (0..m).map(|i| if i < rank.max(1) { 1.0 } else { rest }).collect()
    };
    let noise = random(m, n, 31).thin_svd().unwrap().S().column_vector().iter().copied().collect();
    vec![
        ("half ones, half zeros", equal(m / 2, 0.0)),
        ("linear from 1 to 0", graded(&|x| 1.0 - x)),
        ("two decades", graded(&|x| 10f64.powf(-2.0 * x))),
        ("four decades", graded(&|x| 10f64.powf(-4.0 * x))),
        ("rank m/8 and 1 % noise", equal(m / 8, 1e-2)),
        ("random entries", noise),
        ("rank 1", equal(1, 0.0)),
        ("rank m/16, equal", equal(m / 16, 0.0)),
        ("rank m/5, equal", equal(m / 5, 0.0)),
        ("rank 2m/5, equal", equal(2 * m / 5, 0.0)),
        ("rank m/2 and 0.1 % noise", equal(m / 2, 1e-3)),
    ]
}

/// The types that the device supports, with the error that is always allowed. Empty on devices in
/// software, which would take minutes.
fn types() -> Vec<(IterationDtype, f64)> {
    if takes_minutes() {
        return vec![];
    }
    let all = [
        (IterationDtype::F16, FloatDType::F16, 1e-2),
        (IterationDtype::Bf16, FloatDType::BF16, 1e-2),
        (IterationDtype::F32, FloatDType::F32, if has_tf32() { 1e-2 } else { 1e-4 }),
    ];
    all.into_iter()
        .filter(|(_, dtype, _)| has_type(*dtype))
        .map(|(iteration, _, error)| (iteration, error))
        .collect()
}

/// The type in which the standard form is as precise as the Gram form has to be in another type.
fn standard_dtype(gram: IterationDtype) -> IterationDtype {
    if gram == IterationDtype::F32 && has_tf32() { IterationDtype::F16 } else { gram }
}

/// The relative error of an iteration.
fn error(iteration: &NewtonSchulz, input: &Mat<f64>, exact: &Mat<f64>) -> f64 {
    (run(iteration, input) - exact).norm_l2() / exact.norm_l2()
}

/// Compares both forms for all spectra of a size. If the Gram form is rejected, results have to be
/// finite.
fn compare_forms(
    sets: &[Coefficients],
    normalization: Normalization,
    steps: Option<usize>,
    vectors: &Vectors,
    dtypes: &[(IterationDtype, f64)],
) {
    let inputs = vectors.spectra();
    for set in sets {
        let steps = steps.unwrap_or(set.designed_steps());
        let schedule = set.schedule(steps).unwrap();
        let image = |values| vectors.image(values, &schedule, normalization);
        let exact: Vec<_> = inputs.iter().map(|(_, values, _)| image(values)).collect();
        for (dtype, allowed) in dtypes {
            let build = |dtype, form| {
                let config = config(set, steps).with_normalization(normalization);
                config.with_dtype(dtype).with_form(form).init()
            };
            let standard = build(standard_dtype(*dtype), IterationForm::Standard).unwrap();
            let gram = build(*dtype, IterationForm::Gram).ok();
            for ((name, _, input), exact) in inputs.iter().zip(&exact) {
                let case =
                    format!("{name}, {:?}, {set:?}, {steps} steps, {dtype:?}", input.shape());
                let standard = error(&standard, input, exact);
                assert!(standard.is_finite(), "{case}");
                let Some(gram) = &gram else { continue };
                let restarts = gram.explain(&tensor(input, &Device::default())).restarts;
                let gram = error(gram, input, exact);
                let bound = 3.0 * standard + allowed;
                assert!(gram <= bound, "{case} {restarts:?}: {gram:.2e}, standard {standard:.2e}");
            }
        }
    }
}

#[test]
fn the_gram_form_is_about_as_precise_as_the_standard_form() {
    for [m, n] in [[48, 160], [96, 96], [224, 448]] {
        let vectors = Vectors::new(m, n);
        compare_forms(&sets(), Normalization::Frobenius, None, &vectors, &types());
        compare_forms(&sets(), Normalization::Schatten4, None, &vectors, &types());
    }
}

/// The diagonal elements of every product are equal for equal singular values, and round alike: the
/// errors of both forms are no averages over elements, and one may be large where the other happens
/// to be small.
#[test]
fn matrices_with_equal_singular_values_are_scaled_by_at_most_a_tenth_more() {
    let half = types().into_iter().filter(|(dtype, _)| *dtype != IterationDtype::F32);
    for (dtype, _) in half {
        for m in (16..=160).step_by(8) {
            let vectors = Vectors::new(m, 2 * m);
            let (ones, input) = (vec![1.0; m], vectors.with(&vec![1.0; m]));
            for set in sets() {
                let steps = set.designed_steps();
                let build = |form| config(&set, steps).with_dtype(dtype).with_form(form).init();
                let exact =
                    vectors.image(&ones, &set.schedule(steps).unwrap(), Normalization::Frobenius);
                let error = |form| build(form).map(|built| error(&built, &input, &exact)).ok();
                let standard = error(IterationForm::Standard).expect("the form has no restarts");
                let Some(gram) = error(IterationForm::Gram) else { continue };
                assert!(gram <= 3.0 * standard + 0.1, "{m}, {set:?}, {dtype:?}: {gram:.2e}");
            }
        }
    }
}

#[test]
fn the_default_coefficients_are_precise_on_large_matrices() {
    let half: Vec<_> =
        types().into_iter().filter(|(dtype, _)| *dtype != IterationDtype::F32).collect();
    let (set, vectors) = ([Coefficients::polar_express()], Vectors::new(512, 1024));
    compare_forms(&set, Normalization::Frobenius, None, &vectors, &half);
}

/// Results are finite, and the forms are equally precise.
#[test]
fn both_forms_are_precise_for_any_number_of_steps() {
    let safe = Coefficients::PolarExpress { safety: 1.01 };
    let sets = [sets(), vec![safe]].concat();
    let vectors = Vectors::new(24, 60);
    for steps in 1..=20 {
        compare_forms(&sets, Normalization::Frobenius, Some(steps), &vectors, &types());
    }
}

/// Gradients of low rank with little noise, for which the Gram form without enough restarts
/// returned NaN.
#[test]
fn many_steps_are_finite_in_half_precision() {
    let vectors = Vectors::new(48, 160);
    let values: Vec<f64> = (0..48).map(|i| if i < 24 { 1.0 } else { 1e-3 }).collect();
    let input = vectors.with(&values);
    for (dtype, _) in types() {
        for (set, steps) in [
            (Coefficients::polar_express(), 10),
            (Coefficients::polar_express(), 12),
            (Coefficients::PolarExpressCushioned, 9),
        ] {
            let auto = config(&set, steps).with_epsilon(1e-7).with_dtype(dtype).init().unwrap();
            let result = run(&auto, &input);
            assert!(result.norm_l2().is_finite(), "{set:?}, {steps} steps, {dtype:?}");
        }
    }
}

/// The tables of `docs/results/precision.md`; run with `--ignored --nocapture`.
#[test]
#[ignore = "it prints tables"]
fn tables_of_errors() {
    let set = Coefficients::polar_express();
    let iterations = types().into_iter().flat_map(|(dtype, _)| {
        let build = |form| config(&set, 5).with_dtype(dtype).with_form(form).init().unwrap();
        [IterationForm::Standard, IterationForm::Gram].map(|form| (dtype, build(form)))
    });
    let iterations: Vec<_> = iterations.collect();
    for [m, n] in [[48, 160], [224, 448], [512, 1024]] {
        let titles = iterations.iter().map(|(dtype, iteration)| {
            let plan = iteration.explain_shape([m, n], DType::F32, &Device::default());
            format!(" {dtype:?} {:?} {:?} |", plan.form, plan.restarts)
        });
        println!("\n| {m} by {n} |{}", titles.collect::<String>());
        let vectors = Vectors::new(m, n);
        for (name, values, input) in vectors.spectra() {
            let exact = vectors.image(&values, &schedule(&set), Normalization::Frobenius);
            let cells = iterations
                .iter()
                .map(|(_, iteration)| format!(" {:.1e} |", error(iteration, &input, &exact)));
            println!("| {name} |{}", cells.collect::<String>());
        }
    }
}

/// The table of norms in `docs/results/precision.md`: the relative errors to the polar factor, over
/// the singular values that are not zero, with the operations that they take. Run with `--ignored
/// --nocapture`.
#[test]
#[ignore = "it prints a table"]
fn errors_of_norms() {
    let sets = [
        (Coefficients::KellerJordan, 5),
        (Coefficients::You, 5),
        (Coefficients::polar_express(), 5),
        (Coefficients::PolarExpressCushioned, 5),
        (Coefficients::polar_express(), 6),
    ];
    for [m, n] in [[256, 256], [256, 1024]] {
        let vectors = Vectors::new(m, n);
        let inputs = vectors.spectra();
        let names: String = inputs.iter().map(|(name, ..)| format!(" {name} |")).collect();
        println!("\n| {m} by {n} | m^3 | mean |{names}");
        for (set, steps) in &sets {
            for normalization in [Normalization::Frobenius, Normalization::Schatten4] {
                for (dtype, _) in types() {
                    let config = config(set, *steps).with_normalization(normalization);
                    let iteration = config.with_dtype(dtype).with_form(IterationForm::Auto).init();
                    let iteration = iteration.unwrap();
                    let plan = iteration.explain_shape([m, n], DType::F32, &Device::default());
                    let of_input = |(_, values, input): &(&str, Vec<f64>, Mat<f64>)| {
                        let signs =
                            values.iter().map(|value| value.signum() * f64::from(*value > 0.0));
                        let polar = vectors.with(&signs.collect::<Vec<_>>());
                        error(&iteration, input, &polar)
                    };
                    let errors: Vec<f64> = inputs.iter().map(of_input).collect();
                    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
                    let cells: String =
                        errors.iter().map(|error| format!(" {error:.3} |")).collect();
                    let operations = plan.operations / (m as f64).powi(3);
                    println!(
                        "| {set:?}, {steps}, {normalization:?}, {dtype:?}, {:?} {:?} \
                         | {operations:.0} | {mean:.3} |{cells}",
                        plan.form, plan.restarts
                    );
                }
            }
        }
    }
}
