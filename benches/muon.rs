//! Muon against Burn's own on the shapes of a GPT-2 layer (width 768), in one run.
//!
//! ```text
//! cargo bench --bench muon
//! ```
//!
//! Each group compares implementations of one thing: `burn` is `burn::optim::Muon`. Afterwards the
//! ratios to `burn` (or to `matmul`) are printed, from the medians of the same run.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use common::{LAYER, Matrices};
use criterion::{BenchmarkId, Criterion};
use distmuon::orthogonalize::Engine;
use distmuon::{Coefficients, Form, IterationDtype, Kernels, MuonConfig, NewtonSchulz, Rule};

fn random(shape: [usize; 2]) -> Tensor<2> {
    common::random(shape, &Device::default())
}

/// Medians of the samples of this run, by group and name.
#[derive(Default)]
struct Medians(RefCell<BTreeMap<String, BTreeMap<String, f64>>>);

impl Medians {
    /// Measures with criterion, and keeps the median of the single iterations.
    fn measure(
        &self,
        criterion: &mut Criterion,
        group: &str,
        name: &str,
        parameter: &str,
        mut routine: impl FnMut(),
    ) {
        let device = Device::default();
        let mut samples = Vec::new();
        let mut bench = criterion.benchmark_group(group);
        bench.sample_size(10).warm_up_time(Duration::from_secs(1));
        bench.measurement_time(Duration::from_secs(4));
        bench.bench_function(BenchmarkId::new(name, parameter), |bencher| {
            bencher.iter_custom(|iterations| {
                (0..iterations)
                    .map(|_| {
                        let start = Instant::now();
                        routine();
                        device.sync().expect("the device works");
                        let elapsed = start.elapsed();
                        samples.push(elapsed.as_secs_f64());
                        elapsed
                    })
                    .sum()
            })
        });
        bench.finish();
        if samples.is_empty() {
            return; // filtered out
        }
        samples.sort_by(f64::total_cmp);
        let key = format!("{group}/{parameter}");
        let median = samples[samples.len() / 2];
        self.0.borrow_mut().entry(key).or_default().insert(name.to_owned(), median);
    }

    fn print(&self) {
        for (group, medians) in self.0.borrow().iter() {
            let base = ["burn", "matmul"].iter().find_map(|base| Some((base, medians.get(*base)?)));
            for (name, median) in medians {
                let ratio = base.map(|(base, time)| format!("{:.3} x {base}", median / time));
                println!(
                    "{group:40} {name:24} {:9.2} ms  {}",
                    median * 1e3,
                    ratio.unwrap_or_default()
                );
            }
        }
    }
}

/// One symmetric product against Burn's matmul.
fn symmetric_product(criterion: &mut Criterion, medians: &Medians) {
    for [m, n] in
        [[256, 256], [512, 512], [512, 2048], [768, 768], [768, 3072], [1024, 1024], [2048, 2048]]
    {
        let a = random([m, n]).unsqueeze::<3>();
        let parameter = format!("{m}x{n}");
        let mut measure = |name: &str, routine: &dyn Fn() -> Tensor<3>| {
            medians.measure(criterion, "symmetric product", name, &parameter, || {
                black_box(routine());
            });
        };
        measure("matmul", &|| a.clone().matmul(a.clone().swap_dims(1, 2)));
        measure("portable", &|| Engine::Portable.syrk(a.clone()));
        let fastest = Engine::choose(Kernels::Auto, &a.device(), a.dtype().into());
        if fastest != Engine::Portable {
            measure(&format!("{fastest:?}").to_lowercase(), &|| fastest.syrk(a.clone()));
        }
    }
}

/// Orthogonalisation in both forms, with Keller Jordan's coefficients.
fn newton_schulz(criterion: &mut Criterion, medians: &Medians) {
    for shape in [[768, 768], [768, 3072], [3072, 768]] {
        let batch = random(shape).unsqueeze::<3>();
        let parameter = format!("{}x{}", shape[0], shape[1]);
        for (name, form, kernels) in [
            ("standard", Form::Standard, Kernels::Auto),
            ("gram", Form::Gram, Kernels::Auto),
            ("standard, portable", Form::Standard, Kernels::Portable),
            ("gram, portable", Form::Gram, Kernels::Portable),
        ] {
            let set = Coefficients::KellerJordan;
            let newton_schulz = NewtonSchulz::new(&set, 5, 1e-7, IterationDtype::F32, form)
                .expect("usable settings");
            let newton_schulz = newton_schulz.with_kernels(kernels);
            medians.measure(criterion, "newton-schulz", name, &parameter, || {
                black_box(newton_schulz.orthogonalize(batch.clone()));
            });
        }
    }
}

/// A step of a model with its gradients.
type Step = Box<dyn FnMut(Matrices, GradientsParams) -> Matrices>;

/// A whole step of single matrices and of a layer, through a module optimizer.
fn step(criterion: &mut Criterion, medians: &Medians) {
    let layer = LAYER.map(|shape| vec![shape]);
    let whole = LAYER.to_vec();
    let groups = [
        ("768x768", &layer[0]),
        ("768x3072", &layer[4]),
        ("3072x768", &layer[5]),
        ("layer", &whole),
    ];
    for (parameter, shapes) in groups {
        let device = Device::default().autodiff();
        let model = Matrices::new(shapes, &device);
        let gradients: Vec<Tensor<2>> = shapes.iter().map(|shape| random(*shape)).collect();
        let ours = MuonConfig::new()
            .with_coefficients(Coefficients::KellerJordan)
            .with_iteration_dtype(IterationDtype::F32)
            .with_rule(Rule::muon("matrices"));
        let ours_default = MuonConfig::new().with_rule(Rule::muon("matrices"));
        let decay = burn::optim::decay::WeightDecayConfig::new(0.1);
        let burns = burn::optim::MuonConfig::new().with_weight_decay(Some(decay));
        let singly = |mut optim: ModuleOptimizer| -> Step {
            Box::new(move |model, grads| optim.step(1e-3, model, grads))
        };
        let mut whole_model = ours.init_whole(&model).expect("usable settings");
        let optimizers = [
            ("burn", singly(burns.init())),
            ("distmuon", singly(ours.init(&model))),
            ("distmuon, defaults", singly(ours_default.init(&model))),
            (
                "distmuon, whole model",
                Box::new(move |model, grads| {
                    whole_model.step(1e-3, model, grads).expect("no rank fails")
                }),
            ),
        ];
        for (name, mut step) in optimizers {
            let mut trained = Some(model.clone());
            medians.measure(criterion, "step", name, parameter, || {
                let mut grads = GradientsParams::new();
                for (matrix, gradient) in model.matrices.iter().zip(&gradients) {
                    grads.register(matrix.id, gradient.clone());
                }
                trained = trained.take().map(|model| step(model, grads));
            });
        }
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let medians = Medians::default();
    symmetric_product(&mut criterion, &medians);
    newton_schulz(&mut criterion, &medians);
    step(&mut criterion, &medians);
    medians.print();
    criterion.final_summary();
}
