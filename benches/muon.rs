//! Compares Muon with Burn's own on the shapes of a GPT-2 layer (width 768).
//!
//! ```text
//! cargo bench --bench muon            # all groups
//! cargo bench --bench muon -- layer   # those whose names contain a text
//! ```
//!
//! Each group compares implementations of the same computation, which run in turns, so that all of
//! them meet the same other load. Printed are the medians, and the ratios to the first one: the
//! median over all turns, between the quartiles. `burn` is `burn::optim::Muon`.

mod common;

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use common::{LAYER, Matrices};
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

/// Implementations of one computation, by name.
type Candidates<'a> = Vec<(String, Box<dyn FnMut() + 'a>)>;

/// A candidate with a name.
fn candidate<'a>(name: &str, routine: impl FnMut() + 'a) -> (String, Box<dyn FnMut() + 'a>) {
    (name.to_owned(), Box::new(routine))
}

/// Turns that every group takes at least, and the time after which it ends.
const TURNS: usize = 11;
const TIME: Duration = Duration::from_secs(20);

/// Runs candidates in turns and prints their times, if the name of the group contains the text that
/// the command line asks for.
fn compare(group: &str, mut candidates: Candidates) {
    let mut asked = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    if asked.next().is_some_and(|text| !group.contains(&text)) {
        return;
    }
    let device = Device::default();
    let begin = Instant::now();
    let mut turns: Vec<Vec<f64>> = vec![];
    // The first turn compiles kernels and fills caches.
    while turns.len() <= TURNS || begin.elapsed() < TIME {
        let mut times = vec![0.0; candidates.len()];
        // From another candidate on in each turn, forwards and backwards: what one leaves in the
        // caches, and the memory that it frees, are met by the next.
        for place in 0..times.len() {
            let forwards = (turns.len() / 2 + place) % times.len();
            let is_forwards = turns.len().is_multiple_of(2);
            let index = if is_forwards { forwards } else { times.len() - 1 - forwards };
            let start = Instant::now();
            candidates[index].1();
            device.sync().expect("every kernel of the device succeeds");
            times[index] = start.elapsed().as_secs_f64();
            free_leaves();
        }
        turns.push(times);
    }
    for (index, (name, _)) in candidates.iter().enumerate() {
        let measured = &turns[1..];
        let quartiles = |value: &dyn Fn(&Vec<f64>) -> f64| {
            let mut values: Vec<f64> = measured.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
        };
        let [_, time, _] = quartiles(&|times| times[index] * 1e3);
        let [low, ratio, high] = quartiles(&|times| times[index] / times[0]);
        let turns = measured.len();
        println!("{group:28} {name:24} {time:9.2} ms {ratio:6.3} ({low:.3} to {high:.3}) x{turns}");
    }
}

/// Frees the leaves that steps have replaced, which Burn's autodiff does in a backward pass. A
/// training run has one before every step.
fn free_leaves() {
    let device = Device::default().autodiff();
    drop(Tensor::<1>::ones([1], &device).require_grad().sum().backward());
}

/// Compares one symmetric product with Burn's matmul.
fn symmetric_product() {
    for [m, n] in
        [[256, 256], [512, 512], [512, 2048], [768, 768], [768, 3072], [1024, 1024], [2048, 2048]]
    {
        let a = &random([m, n]).unsqueeze::<3>();
        let product = |path: ComputePath| move || drop(black_box(path.product(a.clone(), None)));
        let matmul = || drop(black_box(a.clone().matmul(a.clone().swap_dims(1, 2))));
        let portable = candidate("portable", product(ComputePath::Portable));
        let mut candidates = vec![candidate("matmul", matmul), portable];
        let fastest = ComputePath::choose(KernelPolicy::Auto, &a.device(), a.dtype().into());
        if fastest != ComputePath::Portable {
            candidates.push(candidate(&format!("{fastest:?}").to_lowercase(), product(fastest)));
        }
        compare(&format!("symmetric product/{m}x{n}"), candidates);
    }
}

/// Measures the orthogonalisation in both forms, with Keller Jordan's coefficients.
fn newton_schulz() {
    for [m, n] in [[768, 768], [768, 3072], [3072, 768]] {
        let batch = random([m, n]).unsqueeze::<3>();
        let mut candidates: Candidates = vec![];
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
            let batch = batch.clone();
            let iterate = move || drop(black_box(newton_schulz.orthogonalize(batch.clone())));
            candidates.push(candidate(name, iterate));
        }
        compare(&format!("newton-schulz/{m}x{n}"), candidates);
    }
}

/// Updates a model by its gradients.
type Step = Box<dyn FnMut(Matrices, GradientsParams) -> Matrices>;

/// Measures a whole step of single matrices and of a layer, through a module optimizer.
fn step() {
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
        let candidates = optimizers.map(|(name, mut step)| {
            let mut trained = Some(model.clone());
            let (model, gradients) = (&model, &gradients);
            let routine = move || {
                let mut grads = GradientsParams::new();
                for (matrix, gradient) in model.matrices.iter().zip(gradients) {
                    grads.register(matrix.id, gradient.clone());
                }
                trained = trained.take().map(|model| step(model, grads));
            };
            candidate(name, routine)
        });
        compare(&format!("step/{parameter}"), candidates.into());
    }
}

/// Measures a step of a layer with each part of the update and kind of weight decay.
fn parts() {
    let device = Device::default().autodiff();
    let model = Matrices::new(&LAYER, &device);
    let plain = || MuonConfig::new().with_rule(RoutingRule::muon("matrices"));
    let with = |part: Part| plain().with_parts(vec![part]);
    let corrected = MomentumConfig::new().with_bias_correction(true);
    let configs = [
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
    ];
    let candidates = configs.map(|(name, config)| {
        let (model, mut optim) = (&model, config.init(&model));
        let mut trained = Some(model.clone());
        let routine = move || {
            let gradients = model.gradients();
            trained = trained.take().map(|model| optim.step(1e-3, model, gradients));
        };
        candidate(name, routine)
    });
    compare("parts/layer", candidates.into());
}

fn main() {
    symmetric_product();
    newton_schulz();
    step();
    parts();
}
