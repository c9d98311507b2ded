//! The errors of both forms, for spectra of many kinds, in every type.

use burn::tensor::{DType, Device, FloatDType};
use distmuon::{
    Coefficients, IterationDtype, IterationForm, IterationPlan, MuonConfig, NewtonSchulz,
    NewtonSchulzConfig, Normalization, Recipe,
};
use distmuon_testing::device::{has_tf32, has_type};
use distmuon_testing::references::{almost_orthogonal, polar, polynomial, random, tensor};
use faer::Mat;

use super::{config, run, schedule, sets, takes_minutes};

const NORMALIZATIONS: [Normalization; 3] =
    [Normalization::Frobenius, Normalization::Schatten4, Normalization::Aol];

/// Singular vectors of matrices of one size, from which matrices of any spectrum with known results
/// are made.
#[derive(Clone)]
struct Vectors {
    left: Mat<f64>,
    right: Mat<f64>,
}

impl Vectors {
    fn new(m: usize, n: usize) -> Self {
        let rank = m.min(n);
        Self { left: polar(&random(m, rank, 23)), right: polar(&random(n, rank, 29)) }
    }

    fn with(&self, values: &[f64]) -> Mat<f64> {
        let (m, n) = (self.left.nrows(), self.right.nrows());
        let rank = values.iter().rposition(|value| *value != 0.0).map_or(0, |last| last + 1);
        let scaled = Mat::from_fn(m, rank, |i, j| self.left[(i, j)] * values[j]);
        &scaled * self.right.submatrix(0, 0, n, rank).transpose()
    }

    /// A matrix of every spectrum.
    fn spectra(&self) -> Vec<Input> {
        let (m, n) = (self.left.nrows(), self.right.nrows());
        let all = spectra(m.min(n), m.max(n)).into_iter();
        all.map(|(name, values)| Input::new(name, self.clone(), values)).collect()
    }
}

/// A matrix with a name and a known decomposition.
struct Input {
    name: &'static str,
    vectors: Vectors,
    values: Vec<f64>,
    matrix: Mat<f64>,
}

impl Input {
    fn new(name: &'static str, vectors: Vectors, values: Vec<f64>) -> Self {
        let matrix = vectors.with(&values);
        Self { name, vectors, values, matrix }
    }

    /// An input with any matrix.
    fn decomposed(name: &'static str, matrix: Mat<f64>) -> Self {
        let svd = matrix.thin_svd().expect("the SVD converges");
        let values: Vec<f64> = svd.S().column_vector().iter().copied().collect();
        let vectors = Vectors { left: svd.U().to_owned(), right: svd.V().to_owned() };
        Self { name, vectors, values, matrix }
    }

    /// The matrix that the polynomials are applied to.
    fn normalized(&self, normalization: Normalization) -> Self {
        let power = match normalization {
            Normalization::Aol => {
                return Self::decomposed(self.name, almost_orthogonal(&self.matrix));
            }
            Normalization::Schatten4 => 4.0,
            _ => 2.0,
        };
        let norm = self.values.iter().map(|s| s.powf(power)).sum::<f64>().powf(1.0 / power);
        let values = self.values.iter().map(|s| s / norm).collect();
        Self::new(self.name, self.vectors.clone(), values)
    }

    /// The matrix with other singular values.
    fn map(&self, f: impl Fn(f64) -> f64) -> Mat<f64> {
        self.vectors.with(&self.values.iter().map(|value| f(*value)).collect::<Vec<_>>())
    }

    /// The polar factor, over the singular values that are not zero.
    fn polar(&self) -> Mat<f64> {
        let least = 1e-13 * self.values[0];
        self.map(|value| if value > least { 1.0 } else { 0.0 })
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
    let normalized: Vec<_> = inputs.iter().map(|input| input.normalized(normalization)).collect();
    for set in sets {
        let steps = steps.unwrap_or(set.designed_steps());
        let schedule = set.schedule(steps).unwrap();
        let image = |input: &Input| input.map(|value| polynomial(&schedule, value));
        let exact: Vec<_> = normalized.iter().map(image).collect();
        for (dtype, allowed) in dtypes {
            let build = |dtype, form| {
                let config = config(set, steps).with_normalization(normalization);
                config.with_dtype(dtype).with_form(form).init()
            };
            let standard = build(standard_dtype(*dtype), IterationForm::Standard).unwrap();
            let gram = build(*dtype, IterationForm::Gram).ok();
            for (Input { name, matrix: input, .. }, exact) in inputs.iter().zip(&exact) {
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
    let large = [([224, 448], &NORMALIZATIONS[..1])];
    let small = [[48, 160], [96, 96]].map(|shape| (shape, &NORMALIZATIONS[..]));
    for ([m, n], normalizations) in small.into_iter().chain(large) {
        let vectors = Vectors::new(m, n);
        for normalization in normalizations {
            compare_forms(&sets(), *normalization, None, &vectors, &types());
        }
    }
}

/// The diagonal elements of every product are equal for equal singular values, and round alike: the
/// errors of both forms are no averages over elements, and one may be large where the other happens
/// to be small.
#[test]
fn matrices_with_equal_singular_values_are_scaled_by_at_most_a_tenth_more() {
    let half = types().into_iter().filter(|(dtype, _)| *dtype != IterationDtype::F32);
    for (dtype, _) in half {
        // The largest excess was predicted for eight times as many columns.
        let shapes = (16..=160).step_by(8).map(|m| [m, 2 * m]);
        for [m, n] in shapes.chain([48, 72, 112].map(|m| [m, 8 * m])) {
            let vectors = Vectors::new(m, n);
            let input = Input::new("flat", vectors, vec![1.0; m]);
            let normalized = input.normalized(Normalization::Frobenius);
            for set in sets() {
                let steps = set.designed_steps();
                let build = |form| config(&set, steps).with_dtype(dtype).with_form(form).init();
                let schedule = set.schedule(steps).unwrap();
                let exact = normalized.map(|value| polynomial(&schedule, value));
                let error =
                    |form| build(form).map(|built| error(&built, &input.matrix, &exact)).ok();
                let standard = error(IterationForm::Standard).expect("the form has no restarts");
                let Some(gram) = error(IterationForm::Gram) else { continue };
                assert!(gram <= 3.0 * standard + 0.1, "{m} by {n}, {set:?}, {dtype:?}: {gram:.2e}");
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
    for steps in (1..=10).chain([15, 20]) {
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
        for input in vectors.spectra() {
            let normalized = input.normalized(Normalization::Frobenius);
            let exact = normalized.map(|value| polynomial(&schedule(&set), value));
            let cells = iterations
                .iter()
                .map(|(_, built)| format!(" {:.1e} |", error(built, &input.matrix, &exact)));
            println!("| {} |{}", input.name, cells.collect::<String>());
        }
    }
}

/// Further matrices: other spectra, and rows of different norms, which have to do with the singular
/// vectors. With those of [`spectra`], there are twenty.
fn further(vectors: &Vectors) -> Vec<Input> {
    let (m, n) = (vectors.left.nrows(), vectors.right.nrows());
    let k = m.min(n);
    let spectrum = |name, value: &dyn Fn(usize) -> f64| {
        Input::new(name, vectors.clone(), (0..k).map(value).collect())
    };
    let random = random(m, n, 37);
    let rows = |name, scale: &dyn Fn(usize) -> f64| {
        Input::decomposed(name, Mat::from_fn(m, n, |i, j| scale(i) * random[(i, j)]))
    };
    vec![
        spectrum("all equal", &|_| 1.0),
        spectrum("1 / i^(1/2)", &|i| (i as f64 + 1.0).powf(-0.5)),
        spectrum("1 / i", &|i| 1.0 / (i as f64 + 1.0)),
        spectrum("three decades", &|i| 10f64.powf(-3.0 * i as f64 / (k - 1) as f64)),
        spectrum("equal, and one of ten times", &|i| if i == 0 { 10.0 } else { 1.0 }),
        spectrum("rank m/8 and 0.1 % noise", &|i| if i < k / 8 { 1.0 } else { 1e-3 }),
        rows("random, rows over a decade", &|i| 10f64.powf(-(i as f64) / m as f64)),
        rows("random, rows over three decades", &|i| 10f64.powf(-3.0 * i as f64 / m as f64)),
        rows("random, one row of 100 times", &|i| if i == 3 { 100.0 } else { 1.0 }),
    ]
}

/// The errors of an iteration to the polar factors of matrices of one size.
struct Errors {
    /// The mean and the largest over matrices of full rank.
    full_rank: [f64; 2],
    /// The same for matrices with more than one singular value of zero.
    zeros: [f64; 2],
}

impl Errors {
    fn new(iteration: &NewtonSchulz, inputs: &[Input], polars: &[Mat<f64>]) -> Self {
        let of = |has_zeros: bool| {
            let is_meant = |input: &Input| {
                let zeros = input.values.iter().filter(|value| **value == 0.0).count();
                (zeros > 1) == has_zeros
            };
            let meant = inputs.iter().zip(polars).filter(|(input, _)| is_meant(input));
            let errors = meant.map(|(input, polar)| error(iteration, &input.matrix, polar));
            let errors: Vec<f64> = errors.collect();
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            [mean, errors.into_iter().fold(0.0, max_or_nan)]
        };
        Self { full_rank: of(false), zeros: of(true) }
    }
}

fn max_or_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// An iteration in the table of errors by operations.
struct Row {
    set: &'static str,
    steps: usize,
    normalization: Normalization,
    dtype: IterationDtype,
    shape: [usize; 2],
    plan: IterationPlan,
    errors: Errors,
}

impl Row {
    /// Multiplications and additions, in multiples of the cube of the shorter side.
    fn operations(&self) -> f64 {
        self.plan.operations / (self.shape[0].min(self.shape[1]) as f64).powi(3)
    }

    fn csv(&self) -> String {
        let Self { set, steps, normalization, dtype, shape: [m, n], plan, errors } = self;
        let restarts: Vec<_> = plan.restarts.iter().map(usize::to_string).collect();
        let Errors { full_rank, zeros } = errors;
        let cells = full_rank.iter().chain(zeros).map(|error| format!(",{error:.3}"));
        format!(
            "\"{set}\",{steps},{normalization:?},{:?},{},{dtype:?},{m},{n},{:.0}{}\n",
            plan.form,
            restarts.join(" "),
            self.operations(),
            cells.collect::<String>(),
        )
    }
}

/// The sets of the table of errors by operations, with their numbers of steps.
fn sets_and_steps() -> Vec<(&'static str, Coefficients, usize)> {
    let five = |name, set: Coefficients| (name, set.clone(), set.designed_steps());
    // Sets with the margins of their sources, or with other steps than they were designed for.
    let of_recipe = |name, recipe| {
        let NewtonSchulzConfig { coefficients, steps, .. } =
            MuonConfig::preset(recipe, 1000).newton_schulz;
        let steps = steps.unwrap_or(coefficients.designed_steps());
        (name, coefficients, steps)
    };
    vec![
        five("Keller Jordan", Coefficients::KellerJordan),
        five("You", Coefficients::You),
        five("Polar Express", Coefficients::polar_express()),
        ("Polar Express", Coefficients::polar_express(), 6),
        ("Polar Express", Coefficients::polar_express(), 8),
        five("Polar Express, cushioned", Coefficients::PolarExpressCushioned),
        // The polynomials for six steps, of which the published ones are those for five.
        (
            "Polar Express, cushioned",
            Coefficients::PolarExpressFor { lower: 1e-3, cushion: 0.02, safety: 1.02 },
            6,
        ),
        of_recipe("modded-nanogpt", Recipe::ModdedNanogpt),
        of_recipe("nanochat", Recipe::Nanochat),
        of_recipe("motif", Recipe::Motif),
        of_recipe("track-3", Recipe::Track3),
        ("CANS", Coefficients::PolarExpressFor { lower: 1e-3, cushion: 0.0, safety: 1.0 }, 5),
        five("Polar Express for 1e-2", Coefficients::polar_express_for(1e-2)),
        five("Polar Express for 1e-4", Coefficients::polar_express_for(1e-4)),
        five("Aol", Coefficients::Aol),
        five("Cubic", Coefficients::Cubic),
        five("DeepSeek-V4", Coefficients::DeepSeekV4),
    ]
}

/// The iterations of the table for matrices of one size: all that the Gram form does not reject.
fn rows(shape @ [m, n]: [usize; 2]) -> Vec<Row> {
    let vectors = Vectors::new(m, n);
    let inputs: Vec<_> = vectors.spectra().into_iter().chain(further(&vectors)).collect();
    assert_eq!(inputs.len(), 20);
    let polars: Vec<_> = inputs.iter().map(Input::polar).collect();
    let mut rows = vec![];
    for (set, coefficients, steps) in sets_and_steps() {
        for normalization in NORMALIZATIONS {
            for (dtype, _) in types() {
                for form in [IterationForm::Standard, IterationForm::Gram] {
                    let config = config(&coefficients, steps).with_normalization(normalization);
                    let iteration = config.with_dtype(dtype).with_form(form).init();
                    let Ok(iteration) = iteration else { continue };
                    let plan = iteration.explain_shape(shape, DType::F32, &Device::default());
                    let errors = Errors::new(&iteration, &inputs, &polars);
                    rows.push(Row { set, steps, normalization, dtype, shape, plan, errors });
                }
            }
        }
    }
    rows
}

/// The tables of errors by operations in `docs/results/precision.md`: the relative errors to the
/// polar factor of the matrix in float64, over twenty spectra. The file that
/// `DISTMUON_ERRORS` names gets all forms and shapes. Run with `--ignored --nocapture`.
#[test]
#[ignore = "it prints a table"]
fn errors_by_operations() {
    let shapes = [[64, 64], [64, 128], [256, 64], [64, 512], [128, 512]];
    let all: Vec<_> = shapes.into_iter().flat_map(rows).collect();
    let is_last = |row: &&Row| row.shape == shapes[shapes.len() - 1];
    for (set, _, steps) in sets_and_steps() {
        for normalization in NORMALIZATIONS {
            let is_first = normalization == NORMALIZATIONS[0];
            let name = if is_first { format!("{set}, {steps}") } else { String::new() };
            print!("| {name} | {normalization:?} |");
            for (dtype, _) in types() {
                let is_meant = |row: &&Row| {
                    (row.set, row.steps) == (set, steps)
                        && (row.normalization, row.dtype) == (normalization, dtype)
                };
                let rows = all.iter().filter(is_last).filter(is_meant);
                // That of `IterationForm::Auto`.
                let row = rows.min_by(|a, b| a.operations().total_cmp(&b.operations()));
                let row = row.expect("the standard form is never rejected");
                let Errors { full_rank: [mean, _], zeros: [of_zeros, _] } = row.errors;
                print!(" {:.0} | {mean:.3} | {of_zeros:.3} |", row.operations());
            }
            println!();
        }
    }
    if let Some(path) = std::env::var_os("DISTMUON_ERRORS") {
        let title = "coefficients,steps,normalization,form,restarts,type,rows,columns,operations,\
                     full_rank_mean,full_rank_worst,zeros_mean,zeros_worst\n";
        let lines: String = all.iter().map(Row::csv).collect();
        std::fs::write(path, [title, &lines].concat()).expect("a folder that exists");
    }
}
