//! The crate's own cases, which the public references do not cover, from a reference in float64
//! that orthogonalises by an SVD.

use std::collections::HashMap;
use std::path::Path;

use distmuon_testing::references::{
    newton_schulz, newton_schulz_aol, newton_schulz_schatten, random,
};
use faer::Mat;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::muon::{
    AdaptiveNorm, Brake, FormName, Lookahead, Magnitudes, Mixture, MuonSettings, NormalizationName,
    Ratio, ScaleName, SecondMoment, SecondMomentName, Variance, ViewName, WeightDecayName,
};
use super::{Case, Header, Outcome};

/// Steps of a case.
const STEPS: usize = 4;

/// Name, shape in the layout of the file, learning rate, and changes of the plain settings.
fn descriptions() -> Vec<(&'static str, Vec<usize>, f64, Value)> {
    vec![
        ("own-spectral-wide", vec![20, 44], 0.02, json!({"scale": "spectral"})),
        ("own-spectral-tall", vec![44, 20], 0.02, json!({"scale": "spectral"})),
        ("own-no-scale-factor", vec![31, 17], 0.02, json!({"scale": "none", "lr_factor": 0.37})),
        ("own-polar-express", vec![24, 72], 0.02, json!({"coefficients": "polar_express/1.05"})),
        (
            "own-deepseek-v4",
            vec![24, 40],
            0.02,
            json!({"coefficients": "deepseek_v4", "ns_steps": 10}),
        ),
        (
            "own-custom-coefficients",
            vec![16, 16],
            0.02,
            json!({"coefficients": [[3.0, -3.2, 1.2], [1.875, -1.25, 0.375]], "ns_steps": 6}),
        ),
        ("own-experts", vec![3, 24, 16], 0.02, json!({"view": "batch"})),
        ("own-convolution", vec![12, 3, 3, 3], 0.02, json!({"view": "flatten"})),
        (
            "own-momentum-warmup",
            vec![18, 30],
            0.05,
            json!({"momentum_warmup": {"from": 0.85, "steps": 3}}),
        ),
        ("own-f16", vec![32, 64], 0.02, json!({"iteration_dtype": "f16"})),
        (
            "own-computed-coefficients",
            vec![40, 16],
            0.02,
            json!({
                "coefficients": {"lower": 1e-4, "cushion": 0.02, "safety": 1.05}, "ns_steps": 7,
            }),
        ),
        ("own-aol", vec![24, 24], 0.02, json!({"coefficients": "aol", "ns_steps": 4})),
        (
            "own-momentum-sum",
            vec![30, 18],
            0.05,
            json!({"momentum_form": "sum", "momentum_warmup": {"from": 0.5, "steps": 3}}),
        ),
        (
            "own-update-floor",
            vec![24, 16],
            0.05,
            json!({"relative_update": {"least": 2.5}, "weight_decay": 0.0}),
        ),
        (
            "own-row-floor-cautious",
            vec![20, 28],
            0.05,
            json!({
                "relative_update": {"least": 1.9, "rows": true}, "weight_decay": 0.5,
                "weight_decay_method": "cautious_after",
                "radial_brake": {"outward": 0.0, "inward": 1.0},
            }),
        ),
        (
            "own-relative-update",
            vec![3, 16, 24],
            0.05,
            json!({"relative_update": {"least": 1.0, "most": 1.0}, "view": "batch"}),
        ),
        (
            "own-aol-rows",
            vec![20, 44],
            0.02,
            json!({"coefficients": "aol", "ns_steps": 4, "normalization": "aol"}),
        ),
        (
            "own-aol-columns",
            vec![2, 36, 20],
            0.02,
            json!({
                "coefficients": "polar_express/1.05", "normalization": "aol", "view": "batch",
            }),
        ),
        ("own-aol-square", vec![24, 24], 0.02, json!({"normalization": "aol"})),
        ("own-schatten", vec![24, 40], 0.02, json!({"normalization": "schatten4"})),
        ("own-sign", vec![24, 36], 0.02, json!({"sign": true, "nesterov": false})),
        (
            "own-momentum-mixture",
            vec![20, 28],
            0.02,
            json!({
                "momentum": 0.0,
                "momentum_mixture": {
                    "ages": [3.0, 12.0, 56.0], "weights": [0.2, 0.3, 0.5], "momentum": 0.95,
                },
            }),
        ),
        (
            "own-muown",
            vec![20, 28],
            0.05,
            json!({
                "nesterov": false, "weight_decay": 0.0,
                "muown": {"betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1},
            }),
        ),
        (
            "own-muown-stack",
            vec![3, 24, 16],
            0.05,
            json!({
                "nesterov": false, "weight_decay": 0.0, "scale": "spectral", "view": "batch",
                "muown": {"betas": [0.5, 0.7], "epsilon": 1e-8, "weight_decay": 0.0},
            }),
        ),
        (
            "own-ema-nesterov",
            vec![36, 24],
            0.02,
            json!({
                "weight_decay": 0.1,
                "ema_nesterov": {"decay": 0.7, "from": 0.2, "to": 0.8, "steps": 4},
            }),
        ),
        (
            "own-ema-nesterov-stack",
            vec![3, 10, 24],
            0.05,
            json!({
                "view": "batch",
                "ema_nesterov": {"decay": 0.99, "from": 0.6, "to": 0.0, "steps": 5},
            }),
        ),
        ("own-mars", vec![24, 36], 0.02, json!({"nesterov": false, "mars": {"gamma": 0.025}})),
        (
            "own-mars-stack",
            vec![3, 20, 12],
            0.05,
            json!({"nesterov": false, "momentum": 0.8, "mars": {"gamma": 0.1}, "view": "batch"}),
        ),
        ("own-namo", vec![28, 20], 0.02, json!({"namo": {"beta2": 0.95, "epsilon": 1e-8}})),
        (
            "own-namo-columns",
            vec![3, 12, 20],
            0.02,
            json!({"view": "batch", "namo": {"beta2": 0.9, "epsilon": 1e-8, "limit": 0.9}}),
        ),
        (
            "own-namo-corrected",
            vec![20, 36],
            0.05,
            json!({
                "nesterov": false, "bias_correction": true, "scale": "match_rms_adamw",
                "weight_decay": 0.0,
                "namo": {
                    "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 2.0, "largest_rate": 1.0,
                },
            }),
        ),
        (
            "own-namo-corrected-nesterov",
            vec![3, 16, 10],
            0.02,
            json!({
                "momentum": 0.9, "bias_correction": true, "view": "batch",
                "namo": {"beta2": 0.99, "epsilon": 5.0},
            }),
        ),
        (
            "own-namo-corrected-columns",
            vec![36, 20],
            0.05,
            json!({
                "nesterov": false, "bias_correction": true, "weight_decay": 0.0,
                "namo": {
                    "beta2": 0.99, "epsilon": 1e-8, "limit": 0.75, "weight_decay": 2.0,
                    "largest_rate": 0.035,
                },
            }),
        ),
        (
            "own-sign-adamuon",
            vec![20, 32],
            0.02,
            json!({
                "sign": true, "nesterov": false, "scale": "none", "rms": 0.2,
                "second_moment": {"method": "adamuon", "beta2": 0.95, "epsilon": 1e-8},
            }),
        ),
    ]
}

fn header(lr: f64, changes: &Value) -> Header {
    let mut config = json!({
        "coefficients": "kj", "ns_steps": 5, "epsilon": 1e-7, "iteration_dtype": "f32",
        "momentum_form": "lerp", "momentum": 0.95, "nesterov": true,
        "scale": "original", "weight_decay": 0.1,
    });
    for (key, value) in changes.as_object().expect("an object") {
        config[key] = value.clone();
    }
    let half = config["iteration_dtype"] != "f32";
    Header {
        reference: "float64, polynomials applied to the singular values of an SVD".into(),
        optimizer: "muon".into(),
        steps: STEPS,
        lr,
        config,
        tolerance: if half { 0.02 } else { 1e-4 },
        params: vec![],
    }
}

/// Writes every case into the folder.
pub fn write_own(folder: &Path) {
    for (seed, (name, shape, lr, changes)) in descriptions().into_iter().enumerate() {
        let header = header(lr, &changes);
        let size: usize = shape.iter().product();
        let vector = |seed: u64| random(size, 1, seed).col_as_slice(0).to_vec();
        let seed = 1_000 * (seed as u64 + 1);
        let init: Vec<f64> = vector(seed).iter().map(|x| 0.1 * x).collect();
        let grads: Vec<Vec<f64>> = (1..=STEPS as u64).map(|step| vector(seed + step)).collect();
        let mut tensors = vec![("param.0.init".to_owned(), init.clone())];
        for (step, grad) in grads.iter().enumerate() {
            tensors.push((format!("grad.0.{}", step + 1), grad.clone()));
        }
        // The reference continues from what the file holds, which is float32.
        let rounded = |values: &[f64]| values.iter().map(|x| *x as f32 as f64).collect::<Vec<_>>();
        let grads: Vec<_> = grads.iter().map(|grad| rounded(grad)).collect();
        for (step, parameter) in
            reference(&header, &shape, &rounded(&init), &grads).iter().enumerate()
        {
            tensors.push((format!("param.0.{}", step + 1), parameter.clone()));
        }
        let bytes: Vec<(String, Vec<u8>)> = tensors
            .into_iter()
            .map(|(name, values)| {
                (name, values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect())
            })
            .collect();
        let views = bytes.iter().map(|(name, bytes)| {
            (name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a whole tensor"))
        });
        let case = serde_json::to_string(&header).expect("a header is JSON");
        let metadata = HashMap::from([("case".to_owned(), case)]);
        let path = folder.join(format!("{name}.safetensors"));
        safetensors::serialize_to_file(views, Some(metadata), &path).expect("a writable folder");
    }
}

/// Compares the files with a reference computed anew from what they hold.
pub fn check_own(folder: &Path) -> Outcome<()> {
    for (name, shape, lr, changes) in descriptions() {
        let case = Case::read(&folder.join(format!("{name}.safetensors")))
            .map_err(|error| format!("{name}: {error}"))?;
        if case.header.config != header(lr, &changes).config || case.header.lr != lr {
            return Err(format!("{name}: the file has other settings; write the cases anew"));
        }
        let values =
            |name: &str| -> Outcome<Vec<f64>> { Ok(case.tensor(name)?.iter::<f64>().collect()) };
        let grads = (1..=STEPS)
            .map(|step| values(&format!("grad.0.{step}")))
            .collect::<Outcome<Vec<_>>>()?;
        let parameters = reference(&case.header, &shape, &values("param.0.init")?, &grads);
        for (step, reference) in parameters.iter().enumerate() {
            let stored = values(&format!("param.0.{}", step + 1))?;
            let error =
                stored.iter().zip(reference).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            if error > 1e-6 {
                return Err(format!("{name}, step {}: the file is off by {error:.1e}", step + 1));
            }
        }
    }
    Ok(())
}

/// The parameter after every step, in float64. The formulas are those of
/// `tests/conformance/README.md`.
fn reference(header: &Header, shape: &[usize], init: &[f64], grads: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let settings: MuonSettings =
        serde_json::from_value(header.config.clone()).expect("the header has all settings");
    let is_normuon = |moment: &SecondMoment| !matches!(moment.method, SecondMomentName::AdaMuon);
    let has_parts =
        settings.second_moment.as_ref().is_some_and(is_normuon) || settings.hyperball.is_some();
    let is_cut = settings.splits.is_some() || settings.heads.is_some();
    let is_known = matches!(
        settings.weight_decay_method,
        WeightDecayName::Decoupled | WeightDecayName::CautiousAfter
    );
    assert!(is_known && !has_parts && !is_cut, "not in this reference: {settings:?}");
    let [rows, columns] = match (settings.view, shape) {
        (ViewName::Flatten, [rows, rest @ ..]) => [*rows, rest.iter().product()],
        (_, [.., rows, columns]) => [*rows, *columns],
        _ => panic!("not a matrix: {shape:?}"),
    };
    let (outputs, inputs) = (rows as f64, columns as f64);
    let scale = match settings.scale {
        ScaleName::None => 1.0,
        ScaleName::Original => (outputs / inputs).max(1.0).sqrt(),
        ScaleName::MatchRmsAdamw => 0.2 * outputs.max(inputs).sqrt(),
        ScaleName::LongerSide => outputs.max(inputs).sqrt(),
        ScaleName::Spectral => (outputs / inputs).sqrt(),
    };
    let schedule = settings.coefficients.set().schedule(settings.ns_steps).expect("a usable set");
    let mut parameter = init.to_vec();
    let mut momentum = vec![0.0; init.len()];
    // The sum of the weights of the gradients in the momentum.
    let mut weight = 0.0;
    let mut previous = vec![0.0; init.len()];
    let mut moments = vec![Moments::default(); init.len() / (rows * columns)];
    let averages = settings.momentum_mixture.as_ref().map_or(0, |mixture| mixture.ages.len());
    let mut averages = vec![vec![0.0; init.len()]; averages];
    // The average of the last steps of `ema_nesterov`, and the lookahead of the step.
    let (mut average_step, mut lookahead) = (vec![0.0; init.len()], 0.0);
    let mut rows_of_muown: Vec<MuownRow> = match settings.muown {
        Some(_) => init.chunks(columns).map(MuownRow::new).collect(),
        None => vec![],
    };
    grads
        .iter()
        .enumerate()
        .map(|(step, grad)| {
            let (given, mut grad, before) = (grad, grad.clone(), parameter.clone());
            if let Some(Mixture { ages, weights, momentum }) = &settings.momentum_mixture {
                let mut mixed: Vec<f64> = grad.iter().map(|g| (1.0 - momentum) * g).collect();
                for ((average, age), weight) in averages.iter_mut().zip(ages).zip(weights) {
                    for ((a, g), mixed) in average.iter_mut().zip(&grad).zip(&mut mixed) {
                        *a = (age * *a + g) / (1.0 + age);
                        *mixed += momentum * weight * *a;
                    }
                }
                grad = mixed;
            }
            for ((row, grad), values) in rows_of_muown
                .iter_mut()
                .zip(grad.chunks_mut(columns))
                .zip(parameter.chunks(columns))
            {
                row.split(values, grad);
            }
            let mu = match &settings.momentum_warmup {
                Some(warmup) if step < warmup.steps => {
                    let progress = (step + 1) as f64 / warmup.steps as f64;
                    warmup.from + (settings.momentum - warmup.from) * progress
                }
                _ => settings.momentum,
            };
            let fresh = match settings.momentum_form {
                FormName::Lerp => 1.0 - mu,
                FormName::Sum => 1.0,
            };
            if let Some(Variance { gamma }) = settings.mars {
                for (index, grad) in grad.chunks_mut(rows * columns).enumerate() {
                    let previous = &mut previous[index * rows * columns..];
                    for (g, previous) in grad.iter_mut().zip(previous) {
                        let given = *g;
                        *g += gamma * mu / (1.0 - mu) * (given - *previous);
                        *previous = given;
                    }
                    let norm = norm(grad).max(1.0);
                    grad.iter_mut().for_each(|g| *g /= norm);
                }
            }
            let grad = &grad;
            for (m, g) in momentum.iter_mut().zip(grad) {
                *m = mu * *m + fresh * g;
            }
            weight = mu * weight + fresh;
            let look_ahead = |(m, g): (&f64, &f64)| mu * m + fresh * g;
            let update: Vec<f64> = match settings.nesterov {
                true => momentum.iter().zip(grad).map(look_ahead).collect(),
                false => momentum.clone(),
            };
            let update: Vec<f64> = match (settings.bias_correction, settings.nesterov) {
                (false, _) => update,
                (true, false) => update.iter().map(|x| x / weight).collect(),
                (true, true) => update.iter().map(|x| x / (mu * weight + fresh)).collect(),
            };
            let signs = |x: &f64| if *x == 0.0 { 0.0 } else { x.signum() };
            let update: Vec<f64> = match settings.sign {
                true => update.iter().map(signs).collect(),
                false => update,
            };
            for (k, update) in update.chunks(rows * columns).enumerate() {
                let matrix = Mat::from_fn(rows, columns, |i, j| update[i * columns + j]);
                let orthogonal = match settings.normalization {
                    NormalizationName::Frobenius => {
                        newton_schulz(&matrix, &schedule, settings.epsilon)
                    }
                    NormalizationName::Schatten4 => newton_schulz_schatten(&matrix, &schedule),
                    NormalizationName::Aol => newton_schulz_aol(&matrix, &schedule),
                };
                let grad = &given[k * rows * columns..][..rows * columns];
                let grad = Mat::from_fn(rows, columns, |i, j| grad[i * columns + j]);
                let scale = settings.lr_factor * scale;
                let (orthogonal, decays) =
                    moments[k].apply(&settings, [header.lr, scale], orthogonal, [&grad, &matrix]);
                let update = faer::Scale(scale) * orthogonal;
                let matrix = &mut parameter[k * rows * columns..][..rows * columns];
                let old = Mat::from_fn(rows, columns, |i, j| matrix[i * columns + j]);
                if let Some(magnitudes) = settings.muown {
                    let of_matrix = rows_of_muown[k * rows..].iter_mut();
                    for (i, (row, values)) in of_matrix.zip(matrix.chunks_mut(columns)).enumerate()
                    {
                        let update: Vec<f64> = (0..columns).map(|j| update[(i, j)]).collect();
                        row.step(magnitudes, header.lr, &update, values);
                    }
                    continue;
                }
                let new = stepped(&settings, header.lr, &old, update, &decays);
                for (index, value) in matrix.iter_mut().enumerate() {
                    *value = new[(index / columns, index % columns)];
                }
            }
            if let Some(Lookahead { decay, from, to, steps }) = settings.ema_nesterov {
                let progress = ((step + 2) as f64 / steps as f64).min(1.0);
                let next = from + (to - from) * progress;
                for ((y, average), before) in
                    parameter.iter_mut().zip(&mut average_step).zip(&before)
                {
                    let step = *y - (before - lookahead * *average);
                    *average = decay * *average + (1.0 - decay) * step;
                    *y += next * *average;
                }
                lookahead = next;
            }
            parameter.clone()
        })
        .collect()
}

/// The second moments of a matrix.
#[derive(Clone, Default)]
struct Moments {
    steps: i32,
    of_elements: Option<Mat<f64>>,
    of_columns: Vec<f64>,
}

impl Moments {
    /// The result of the iteration after the parts with second moments, and the decay of every
    /// column that comes with it, from the rate and its scale, and the gradient and the update
    /// before the iteration.
    fn apply(
        &mut self,
        settings: &MuonSettings,
        [lr, scale]: [f64; 2],
        mut orthogonal: Mat<f64>,
        [grad, update]: [&Mat<f64>; 2],
    ) -> (Mat<f64>, Vec<f64>) {
        self.steps += 1;
        let (rows, columns) = (update.nrows(), update.ncols());
        if let Some(SecondMoment { beta2, epsilon, .. }) = settings.second_moment {
            let old = self.of_elements.take().unwrap_or_else(|| Mat::zeros(rows, columns));
            let new = Mat::from_fn(rows, columns, |i, j| {
                beta2 * old[(i, j)] + (1.0 - beta2) * orthogonal[(i, j)].powi(2)
            });
            orthogonal = Mat::from_fn(rows, columns, |i, j| {
                orthogonal[(i, j)] / (new[(i, j)].sqrt() + epsilon)
            });
            self.of_elements = Some(new);
        }
        let mut decays = vec![0.0; columns];
        if let Some(namo) = settings.namo {
            let AdaptiveNorm { beta2, epsilon, limit, weight_decay, largest_rate } = namo;
            let norm = |matrix: &Mat<f64>, column: usize| match limit {
                None => matrix.norm_l2(),
                Some(_) => matrix.col(column).norm_l2(),
            };
            self.of_columns.resize(columns, 0.0);
            let corrected =
                if settings.bias_correction { 1.0 - beta2.powi(self.steps) } else { 1.0 };
            let mut factors = vec![];
            for (column, moment) in self.of_columns.iter_mut().enumerate() {
                *moment = beta2 * *moment + (1.0 - beta2) * norm(grad, column).powi(2);
                let root = moment.sqrt() + epsilon;
                factors.push(f64::sqrt(corrected) * norm(update, column) / root);
            }
            if let Some(limit) = limit.filter(|limit| *limit > 0.0) {
                let mean = factors.iter().sum::<f64>() / columns as f64;
                factors.iter_mut().for_each(|f| *f = f.clamp(limit * mean, mean / limit));
            }
            let most = largest_rate.unwrap_or(f64::INFINITY);
            let factor = |j: usize| factors[j].min(most / (lr * scale));
            orthogonal = Mat::from_fn(rows, columns, |i, j| factor(j) * orthogonal[(i, j)]);
            decays = factors.iter().map(|f| weight_decay * (lr * f).min(most)).collect();
        }
        if let Some(rms) = settings.rms {
            let norm = rms * ((rows * columns) as f64).sqrt();
            orthogonal = faer::Scale(norm / orthogonal.norm_l2()) * &orthogonal;
        }
        (orthogonal, decays)
    }
}

/// A matrix after a step by an update, with the parts and the decay of the settings, and the decays
/// of columns.
fn stepped(
    settings: &MuonSettings,
    lr: f64,
    old: &Mat<f64>,
    mut update: Mat<f64>,
    of_columns: &[f64],
) -> Mat<f64> {
    if let Some(Ratio { least, most, rows }) = settings.relative_update {
        let factor = |old: f64, update: f64| {
            let floor = (least * old / update).max(1.0);
            most.map_or(floor, |most| floor.min(most * old / update))
        };
        let whole = factor(old.norm_l2(), update.norm_l2());
        update = Mat::from_fn(update.nrows(), update.ncols(), |i, j| {
            let of_row = || factor(old.row(i).norm_l2(), update.row(i).norm_l2());
            update[(i, j)] * if rows { of_row() } else { whole }
        });
    }
    let decay = lr * settings.weight_decay;
    let is_after = settings.weight_decay_method == WeightDecayName::CautiousAfter;
    let kept = if is_after { 1.0 } else { 1.0 - decay };
    let mut new = faer::Scale(kept) * old - faer::Scale(lr) * &update;
    new = Mat::from_fn(new.nrows(), new.ncols(), |i, j| new[(i, j)] - of_columns[j] * old[(i, j)]);
    if let Some(Brake { outward, inward }) = settings.radial_brake {
        let change = new.norm_l2() - old.norm_l2();
        let fraction = if change > 0.0 { outward } else { inward };
        new = faer::Scale((old.norm_l2() + fraction * change) / new.norm_l2()) * new;
    }
    if is_after {
        new = Mat::from_fn(new.nrows(), new.ncols(), |i, j| {
            let agrees = old[(i, j)] * update[(i, j)] > 0.0;
            new[(i, j)] * if agrees { 1.0 - decay } else { 1.0 }
        });
    }
    new
}

/// A row of a parameter of Muown, `g v / |v|`.
struct MuownRow {
    magnitude: f64,
    direction_norm: f64,
    /// The unit vector, and the gradient of the magnitude, of the step.
    unit: Vec<f64>,
    gradient: f64,
    moments: [f64; 2],
    steps: i32,
}

impl MuownRow {
    fn new(values: &[f64]) -> Self {
        let norm = norm(values);
        let (unit, gradient) = (vec![], 0.0);
        Self { magnitude: norm, direction_norm: norm, unit, gradient, moments: [0.0; 2], steps: 0 }
    }

    /// Replaces the gradient of a row by that of its direction.
    fn split(&mut self, values: &[f64], grad: &mut [f64]) {
        self.unit = values.iter().map(|value| value / self.magnitude).collect();
        self.gradient = self.unit.iter().zip(&*grad).map(|(u, g)| u * g).sum();
        for (grad, unit) in grad.iter_mut().zip(&self.unit) {
            *grad = self.magnitude / self.direction_norm * (*grad - unit * self.gradient);
        }
    }

    fn step(&mut self, settings: Magnitudes, lr: f64, update: &[f64], values: &mut [f64]) {
        let Magnitudes { betas, epsilon, weight_decay } = settings;
        let direction: Vec<f64> = self
            .unit
            .iter()
            .zip(update)
            .map(|(u, update)| u * self.direction_norm - lr * update)
            .collect();
        self.steps += 1;
        for ((moment, beta), power) in self.moments.iter_mut().zip(betas).zip([1, 2]) {
            *moment = beta * *moment + (1.0 - beta) * self.gradient.powi(power);
        }
        let corrected = |index: usize| self.moments[index] / (1.0 - betas[index].powi(self.steps));
        let adam = corrected(0) / (corrected(1).sqrt() + epsilon);
        self.magnitude = (self.magnitude - lr * adam) * (1.0 - lr * weight_decay);
        self.direction_norm = norm(&direction);
        for (value, direction) in values.iter_mut().zip(direction) {
            *value = self.magnitude * direction / self.direction_norm;
        }
    }
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}
