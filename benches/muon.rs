//! Compares Muon with Burn's own on the shapes of a GPT-2 layer (width 768), in one run.
//!
//! ```text
//! cargo bench --bench muon
//! ```
//!
//! Each group compares implementations of the same computation, where `burn` is
//! `burn::optim::Muon`, or the parts of an update with none. At the end, the ratios to `burn`,
//! `matmul` or `no parts` are printed, from the medians of the same run.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use common::{LAYER, Matrices, median};
use criterion::{BenchmarkId, Criterion};
use distmuon::parts::{
    AdaMuon, ColumnEquilibration, Hyperball, Mars, MaxNorm, Namo, NorMuon, Part, Renormalization,
    RowEquilibration,
};
use distmuon::{
    Coefficients, ComputePath, IterationDtype, IterationForm, KernelPolicy, MomentumConfig,
    MuonConfig, NewtonSchulzConfig, RoutingRule, WeightDecay,
};

fn random(shape: [usize; 2]) -> Tensor<2> {
    common::random(shape, &Device::default())
}

/// Medians of the samples of this run, by group and name.
#[derive(Default)]
struct Medians(RefCell<BTreeMap<String, BTreeMap<String, f64>>>);

impl Medians {
    /// Measures with criterion, and stores the median over all iterations.
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
                        device.sync().expect("every kernel of the device succeeds");
                        let elapsed = start.elapsed();
                        samples.push(elapsed.as_secs_f64());
                        elapsed
                    })
                    .sum()
            })
        });
        bench.finish();
        if samples.is_empty() {
            return; // the filter of the command line excludes this measurement
        }
        let key = format!("{group}/{parameter}");
        self.0.borrow_mut().entry(key).or_default().insert(name.to_owned(), median(samples));
    }

    fn print(&self) {
        for (group, medians) in self.0.borrow().iter() {
            let base = ["burn", "matmul", "no parts"]
                .iter()
                .find_map(|base| Some((base, medians.get(*base)?)));
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

/// Compares one symmetric product with Burn's matmul.
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
        measure("portable", &|| ComputePath::Portable.product(a.clone(), None));
        let fastest = ComputePath::choose(KernelPolicy::Auto, &a.device(), a.dtype().into());
        if fastest != ComputePath::Portable {
            measure(&format!("{fastest:?}").to_lowercase(), &|| fastest.product(a.clone(), None));
        }
    }
}

/// Measures the orthogonalisation in both forms, with Keller Jordan's coefficients.
fn newton_schulz(criterion: &mut Criterion, medians: &Medians) {
    for shape in [[768, 768], [768, 3072], [3072, 768]] {
        let batch = random(shape).unsqueeze::<3>();
        let parameter = format!("{}x{}", shape[0], shape[1]);
        for (name, form, kernels) in [
            ("standard", IterationForm::Standard, KernelPolicy::Auto),
            ("gram", IterationForm::Gram, KernelPolicy::Auto),
            ("standard, portable", IterationForm::Standard, KernelPolicy::Portable),
            ("gram, portable", IterationForm::Gram, KernelPolicy::Portable),
        ] {
            let newton_schulz = NewtonSchulzConfig::new()
                .with_coefficients(Coefficients::KellerJordan)
                .with_steps(Some(5))
                .with_dtype(IterationDtype::F32)
                .with_form(form)
                .init()
                .expect("usable settings")
                .with_kernels(kernels);
            medians.measure(criterion, "newton-schulz", name, &parameter, || {
                black_box(newton_schulz.orthogonalize(batch.clone()));
            });
        }
    }
}

/// Updates a model by its gradients.
type Step = Box<dyn FnMut(Matrices, GradientsParams) -> Matrices>;

/// Measures a whole step of single matrices and of a layer, through a module optimizer.
fn step(criterion: &mut Criterion, medians: &Medians) {
    let layer: &[[usize; 2]] = &LAYER;
    let groups = [
        ("768x768", &layer[..1]),
        ("768x3072", &layer[4..5]),
        ("3072x768", &layer[5..]),
        ("layer", layer),
        ("512x2048", &[[512, 2048]]),
        ("24 of 768x64", &[[768, 64]; 24]),
        ("8 of 64x576", &[[64, 576]; 8]),
        ("8 of 128x512", &[[128, 512]; 8]),
        ("64 of 16x16", &[[16, 16]; 64]),
    ];
    for (parameter, shapes) in groups {
        let device = Device::default().autodiff();
        let model = Matrices::new(shapes, &device);
        let gradients: Vec<Tensor<2>> = shapes.iter().map(|shape| random(*shape)).collect();
        let ours_default = MuonConfig::new().with_rule(RoutingRule::muon("matrices"));
        // The settings of Burn's Muon, so that both compute the same.
        let newton_schulz = NewtonSchulzConfig::new()
            .with_coefficients(Coefficients::KellerJordan)
            .with_dtype(IterationDtype::F32);
        let ours = ours_default.clone().with_newton_schulz(newton_schulz);
        let decay = burn::optim::decay::WeightDecayConfig::new(0.1);
        let burns = burn::optim::MuonConfig::new().with_weight_decay(Some(decay));
        let per_parameter = |mut optim: ModuleOptimizer| -> Step {
            Box::new(move |model, grads| optim.step(1e-3, model, grads))
        };
        let mut batched = ours.init_batched(&model).expect("usable settings");
        let optimizers = [
            ("burn", per_parameter(burns.init())),
            ("distmuon", per_parameter(ours.init(&model))),
            ("distmuon, defaults", per_parameter(ours_default.init(&model))),
            (
                "distmuon, whole model",
                Box::new(move |model, grads| {
                    batched.step(1e-3, model, grads).expect("no rank fails")
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

/// Measures a step of a layer with each part of the update and kind of weight decay.
fn parts(criterion: &mut Criterion, medians: &Medians) {
    let device = Device::default().autodiff();
    let model = Matrices::new(&LAYER, &device);
    let plain = || MuonConfig::new().with_rule(RoutingRule::muon("matrices"));
    let with = |part: Part| plain().with_parts(vec![part]);
    let corrected = MomentumConfig::new().with_bias_correction(true);
    for (name, config) in [
        ("no parts", plain()),
        ("RowEquilibration", with(RowEquilibration.into())),
        ("ColumnEquilibration", with(ColumnEquilibration.into())),
        ("Renormalization", with(Renormalization::orthogonal().into())),
        ("NorMuon::new", with(NorMuon::new(0.9).into())),
        ("NorMuon::per_output", with(NorMuon::per_output(0.9).into())),
        ("AdaMuon", with(AdaMuon::new(0.9).into())),
        ("Namo", with(Namo::new(0.9).into())),
        ("Mars", with(Mars::new(0.025).into())),
        ("Hyperball", with(Hyperball::initial().into()).with_weight_decay(0.0.into())),
        ("MaxNorm", with(MaxNorm::new(1.2).into())),
        ("cautious decay", plain().with_weight_decay(WeightDecay::Cautious(0.1.into()))),
        ("coupled decay", plain().with_weight_decay(WeightDecay::Coupled(0.1.into()))),
        ("bias correction", plain().with_momentum(corrected)),
    ] {
        let mut optim = config.init(&model);
        let mut trained = Some(model.clone());
        medians.measure(criterion, "parts", name, "layer", || {
            let gradients = model.gradients();
            trained = trained.take().map(|model| optim.step(1e-3, model, gradients));
        });
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let medians = Medians::default();
    symmetric_product(&mut criterion, &medians);
    newton_schulz(&mut criterion, &medians);
    step(&mut criterion, &medians);
    parts(&mut criterion, &medians);
    medians.print();
    criterion.final_summary();
}
