//! Gradients, learning rates and types at their limits: parameters neither freeze nor become
//! non-finite, and skipped gradients are counted.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, Param, ParamGroup, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer, OptimizerRecord};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, f16, s};
use burn_pack::{Reader, Writer};
use distmuon::comm::World;
use distmuon::distributed::DistMuonConfig;
use distmuon::parts::{
    AdaMuon, ColumnEquilibration, Mars, MomentumMixture, Muown, Namo, NorMuon, Renormalization,
    RowEquilibration, Sign,
};
use distmuon::{
    AdamWConfig, Coefficients, Error, IterationDtype, IterationForm, KernelPolicy, MuonConfig,
    NewtonSchulzConfig, Part, Result, Routing, RoutingRule, StateDtype, checkpoint,
};
use distmuon_testing::device::{has_type, is_flex};
use distmuon_testing::models::{bits, largest_difference};
use distmuon_testing::{lacks, logs, panic_message};

/// A matrix for Muon and a vector for AdamW.
#[derive(Module, Debug)]
pub struct Net {
    pub matrix: Param<Tensor<2>>,
    pub vector: Param<Tensor<1>>,
}

fn device() -> Device {
    Device::default().autodiff()
}

fn plain(net: &Net) -> [Vec<f32>; 2] {
    let values = |data: TensorData| data.iter::<f32>().collect();
    [values(net.matrix.val().into_data()), values(net.vector.val().into_data())]
}

impl Net {
    pub fn new(dtype: DType, [m, n]: [usize; 2], device: &Device) -> Self {
        let values: Vec<f32> = (0..m * n).map(|i| (i as f32 * 0.7).sin()).collect();
        let matrix = Tensor::<2>::from_data(TensorData::new(values, [m, n]), (device, dtype));
        let vector = Tensor::<1>::full([n], 0.5, (device, dtype));
        Self {
            matrix: Param::initialized(ParamId::new(), matrix.require_grad()),
            vector: Param::initialized(ParamId::new(), vector.require_grad()),
        }
    }

    /// The entries of a matrix of gradients of one size.
    fn entries(&self, size: f32) -> Vec<f32> {
        waves(self.matrix.val().shape().num_elements(), size, 0.2)
    }

    /// Gradients of one size.
    fn gradients(&self, size: f32) -> GradientsParams {
        let (matrix, vector) = (self.matrix.val().inner(), self.vector.val().inner());
        let mut gradients = GradientsParams::new();
        let matrix_gradient = on(&matrix.device(), self.entries(size), matrix.dims());
        gradients.register(self.matrix.id, matrix_gradient.cast(matrix.dtype()));
        let [n] = vector.dims();
        let vector_gradient = on(&vector.device(), waves(n, size, 0.4), [n]);
        gradients.register(self.vector.id, vector_gradient.cast(vector.dtype()));
        gradients
    }
}

fn waves(length: usize, size: f32, shift: f32) -> Vec<f32> {
    (0..length).map(|i| size * (i as f32 * 1.3 + shift).cos()).collect()
}

fn on<const D: usize>(device: &Device, values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

fn config() -> MuonConfig {
    MuonConfig::new().with_weight_decay(0.0.into())
}

fn made(config: &MuonConfig, net: &Net) -> (Routing, ModuleOptimizer) {
    let routing = config.clone().with_rule(RoutingRule::muon("matrix")).route(net).unwrap();
    let optim = routing.init();
    (routing, optim)
}

/// The largest change of matrix and vector by one step with gradients.
fn moved(config: &MuonConfig, spoil: impl Fn(&Net) -> GradientsParams) -> ([f32; 2], usize) {
    let net = Net::new(DType::F32, [4, 4], &device());
    let (routing, mut optim) = made(config, &net);
    let before = plain(&net);
    let gradients = spoil(&net);
    let after = plain(&optim.step(0.1, net, gradients));
    let changes = [0, 1].map(|i: usize| largest_difference(&before[i], &after[i]));
    (changes, routing.skipped_steps().read().len())
}

#[test]
fn large_finite_gradients_neither_freeze_nor_spoil_parameters() {
    for kernels in [KernelPolicy::Auto, KernelPolicy::Portable] {
        for outlier in [1e15, 1e20, 3e38] {
            let net = Net::new(DType::F32, [4, 6], &device());
            let (_, mut optim) = made(&config().with_kernels(kernels), &net);
            let step = |optim: &mut ModuleOptimizer, net: Net, size| {
                let gradients = net.gradients(size);
                optim.step(1e-3, net, gradients)
            };
            let net = step(&mut optim, net, 1.0);
            let net = step(&mut optim, net, outlier);
            let before = plain(&net);
            // 0.95^1500 forgets a square of 1e30.
            let net = (0..if outlier > 1e19 { 20 } else { 1500 })
                .fold(net, |net, _| step(&mut optim, net, 1.0));
            let after = plain(&net);
            for (old, new) in before.iter().zip(&after) {
                assert!(new.iter().all(|x| x.is_finite()), "{outlier} {kernels:?}");
                let change = largest_difference(old, new);
                assert!(change > 3e-3, "{outlier} {kernels:?}: moved by {change}");
            }
        }
    }
}

/// A matrix with gradients of any size, and others of one size, from zero.
#[derive(Module, Debug)]
struct Outlier {
    outlier: Param<Tensor<2>>,
    matrix: Param<Tensor<2>>,
    row: Param<Tensor<2>>,
    silent: Param<Tensor<2>>,
    /// AdamW's.
    vector: Param<Tensor<1>>,
}

impl Outlier {
    /// The values of all but the outlier after five steps in which the gradients are clipped by the
    /// norm of all.
    fn trained(size: f32, dtype: DType, muon: MuonConfig) -> [Vec<f32>; 4] {
        Self::trained_from(0.0, size, dtype, muon)
    }

    /// [`trained`](Self::trained), with other elements of the matrices before.
    fn trained_from(start: f32, size: f32, dtype: DType, muon: MuonConfig) -> [Vec<f32>; 4] {
        let device = device();
        let full = |m, n| {
            let values = Tensor::<2>::full([m, n], start, (&device, dtype));
            Param::initialized(ParamId::new(), values.require_grad())
        };
        let mut net = Self {
            outlier: full(6, 8),
            matrix: full(6, 8),
            row: full(1, 8),
            silent: full(6, 8),
            vector: Param::initialized(
                ParamId::new(),
                Tensor::<1>::zeros([8], (&device, dtype)).require_grad(),
            ),
        };
        let config = DistMuonConfig::new().with_muon(muon).with_max_norm(Some(1.0));
        let mut optim = config.init(&World::alone(device.clone()), &net).unwrap();
        for step in 0..5 {
            let mut gradients = GradientsParams::new();
            let sizes = [size, 0.01, 0.01, 0.0];
            for (of, size) in [&net.outlier, &net.matrix, &net.row, &net.silent].iter().zip(sizes) {
                let shape @ [m, n] = of.val().dims();
                let gradient = on(&device.clone().inner(), waves(m * n, size, step as f32), shape);
                gradients.register(of.id, gradient.cast(dtype));
            }
            let gradient = on(&device.clone().inner(), waves(8, 0.01, step as f32), [8]);
            gradients.register(net.vector.id, gradient.cast(dtype));
            net = optim.step(0.01, net, gradients).unwrap();
        }
        let values = |data: TensorData| data.iter::<f32>().collect();
        let matrices = [&net.matrix, &net.row, &net.silent].map(|of| of.val().into_data());
        let [matrix, row, silent] = matrices.map(values);
        [matrix, row, silent, values(net.vector.val().into_data())]
    }
}

/// Clipping by the norm of all gradients makes those of the other matrices tiny.
#[test]
fn an_outlier_and_a_clip_leave_the_updates_of_other_matrices_their_size() {
    // Gradients of rank 2: in half precision, an iteration makes the rest of its own rounding.
    let float32 = NewtonSchulzConfig::new().with_dtype(IterationDtype::F32);
    let all = || config().with_newton_schulz(float32.clone()).with_rule(RoutingRule::muon("."));
    let [portable, auto] = [KernelPolicy::Portable, KernelPolicy::Auto];
    let parts: [Part; 8] = [
        Mars::new(0.025).into(),
        RowEquilibration.into(),
        ColumnEquilibration.into(),
        NorMuon::new(0.95).into(),
        AdaMuon::new(0.95).into(),
        Namo::new(0.95).into(),
        Sign.into(),
        Renormalization::orthogonal().into(),
    ];
    let mixture = vec![MomentumMixture::k_maxwell().into()];
    let forms = parts.map(|part| all().with_parts(vec![part])).into_iter().chain([
        all(),
        all().with_momentum(0.0.into()).with_parts(mixture),
        all().with_state_dtype(StateDtype::Int8),
        all().with_state_dtype(StateDtype::BFloat16),
    ]);
    let forms: Vec<MuonConfig> = forms.collect();
    for (dtype, size) in [
        (DType::F32, 5e7),
        (DType::F32, 2e11),
        (DType::F32, 1e25),
        (DType::BF16, 2e11),
        (DType::F16, 6e4),
    ] {
        if dtype != DType::F32 && !has_type(FloatDType::from(dtype)) {
            lacks(dtype.name());
            continue;
        }
        for (kernels, form) in
            [portable, auto].iter().flat_map(|k| forms.iter().map(move |form| (k, form)))
        {
            let config = form.clone().with_kernels(*kernels);
            let expected = Outlier::trained(0.01, dtype, config.clone());
            let actual = Outlier::trained(size, dtype, config);
            let case = format!("{dtype:?}, {size:e}, {form:?}, {kernels:?}");
            for (actual, expected) in actual.iter().zip(&expected).take(2) {
                let difference = largest_difference(actual, expected);
                let [largest, reached] = [expected, actual]
                    .map(|values| values.iter().fold(0.0f32, |max, x| max.max(x.abs())));
                assert!(largest > 1e-3, "{case}: {largest}");
                // An iteration turns what a momentum of fewer bits rounds into other directions.
                match form.state_dtype == StateDtype::Float32 {
                    true => assert!(difference < 0.02 * largest, "{case}: {difference}"),
                    false => assert!(reached > 0.7 * largest, "{case}: {reached} of {largest}"),
                }
            }
            assert!(actual[2].iter().all(|x| *x == 0.0), "{case}: zeros stay");
        }
    }
}

/// The remedy of `docs/guide/clipping.md`.
#[test]
fn an_outlier_and_a_clip_fade_adamw_unless_its_epsilon_is_smaller() {
    let moved = |size, epsilon: Option<f64>| {
        let adamw = AdamWConfig::new().with_weight_decay(0.0);
        let adamw = epsilon.map_or(adamw.clone(), |epsilon| adamw.with_epsilon(epsilon));
        let muon = config().with_adamw(adamw).with_rule(RoutingRule::muon("matrix|outlier"));
        let [_, _, _, vector] = Outlier::trained(size, DType::F32, muon);
        vector.into_iter().fold(0.0f32, |max, x| max.max(x.abs()))
    };
    // A float32 has no square of what an outlier of 1e20 leaves of the others, and one of 1e15
    // leaves a square that some devices take for zero, since it is subnormal.
    let outliers: &[_] = if is_flex() { &[5e7, 2e11, 1e15] } else { &[5e7, 2e11] };
    assert_faded_unless_epsilon_is_smaller(outliers, moved);
}

/// Muown updates the norms of rows by Adam, whose epsilon is that of the source.
#[test]
fn an_outlier_and_a_clip_fade_the_norms_of_muown_unless_its_epsilon_is_smaller() {
    let changes = |size, epsilon: Option<f64>| {
        let part = Muown::new();
        let part = epsilon.map_or(part, |epsilon| part.with_epsilon(epsilon));
        let muon = config().with_parts(vec![part.into()]).with_rule(RoutingRule::muon("."));
        let [matrix, ..] = Outlier::trained_from(0.5, size, DType::F32, muon);
        let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
        // An output has a column of `[6, 8]`.
        let column = |j: usize| (0..6).map(|i| matrix[8 * i + j]).collect::<Vec<f32>>();
        (0..8).map(|j| (norm(&column(j)) - 0.5 * 6_f32.sqrt()).abs()).fold(0.0, f32::max)
    };
    assert_faded_unless_epsilon_is_smaller(&[5e7, 2e11], changes);
}

/// Fails unless outliers of these sizes fade what a run has changed, and an epsilon of 1e-20 keeps
/// it. `changed` is the largest change of a run by the size of its outlier and by an epsilon.
fn assert_faded_unless_epsilon_is_smaller(
    outliers: &[f32],
    changed: impl Fn(f32, Option<f64>) -> f32,
) {
    let expected = changed(0.01, None);
    assert!(expected > 0.01, "{expected}");
    for &outlier in outliers {
        let faded = changed(outlier, None);
        assert!(faded < 0.5 * expected, "{outlier:e}: {faded} of {expected}");
        let kept = changed(outlier, Some(1e-20));
        assert!((kept - expected).abs() < 0.02 * expected, "{outlier:e}: {kept} of {expected}");
    }
}

#[test]
fn gradients_too_large_for_adamw_are_skipped_and_counted() {
    let ([matrix, vector], skipped) = moved(&config(), |net| net.gradients(1e20));
    assert!(matrix > 0.01 && vector == 0.0 && skipped == 1, "{matrix} {vector} {skipped}");
}

#[test]
fn clipping_does_not_hide_non_finite_gradients() {
    let spoilt = |bad: f32| {
        move |net: &Net| {
            let mut gradients = net.gradients(1.0);
            let matrix = gradients.remove::<2>(net.matrix.id).unwrap();
            let first = Tensor::<2>::full([1, 1], bad, &matrix.device());
            gradients.register(net.matrix.id, matrix.slice_assign([0..1, 0..1], first));
            let vector = gradients.remove::<1>(net.vector.id).unwrap();
            let first = Tensor::<1>::full([1], bad, &vector.device());
            gradients.register(net.vector.id, vector.slice_assign(s![0..1], first));
            gradients
        }
    };
    for clipping in [GradientClippingConfig::Value(1.0), GradientClippingConfig::Norm(1.0)] {
        let config = config().with_grad_clipping(Some(clipping.clone()));
        for bad in [f32::NAN, f32::INFINITY] {
            let (changes, skipped) = moved(&config, spoilt(bad));
            assert_eq!((changes, skipped), ([0.0; 2], 2), "{clipping:?} {bad}");
        }
        // A norm of 1e20 is finite.
        let ([matrix, _], _) = moved(&config, |net| net.gradients(1e20));
        assert!(matrix > 0.01, "{clipping:?}: {matrix}");
    }
}

#[test]
fn momentum_of_float16_keeps_small_gradients() {
    if !has_type(FloatDType::F16) {
        lacks("float16");
        return;
    }
    for kernels in [KernelPolicy::Auto, KernelPolicy::Portable] {
        for size in [1e-5, 1e-6] {
            let config = config().with_kernels(kernels);
            let [half, single] = [DType::F16, DType::F32].map(|dtype| {
                let net = Net::new(dtype, [16, 32], &device());
                // The same numbers for both, rounded to float16 on the host, since a device may
                // leave out a cast to float16 and back.
                let rounded = |x: f32| f16::from_f32(x).to_f32();
                let values = net.entries(size).into_iter().map(rounded).collect();
                let device = Device::default();
                let gradient = on(&device, values, net.matrix.val().dims()).cast(dtype);
                let (_, state) =
                    config.build().step(1e-3, net.matrix.val().inner(), gradient, None);
                let momentum = state.unwrap().momentum();
                assert_eq!(momentum.dtype(), DType::F32);
                momentum
            });
            let error = (half - single.clone()).abs().max() / single.abs().max();
            let error = error.into_scalar::<f32>();
            assert!(error < 1e-5, "{size} {kernels:?}: {error}");
        }
    }
}

#[test]
fn the_second_moment_of_bfloat16_parameters_converges() {
    if !has_type(FloatDType::BF16) {
        lacks("bfloat16");
        return;
    }
    let adamw = AdamWConfig::new().with_beta_2(0.999);
    let net = Net::new(DType::BF16, [2, 4], &device());
    let (_, mut optim) = made(&config().with_adamw(adamw), &net);
    let ones = |net: &Net, value: f32| {
        let mut gradients = GradientsParams::new();
        let vector = net.vector.val().inner();
        gradients.register(net.vector.id, vector.zeros_like().add_scalar(value));
        gradients
    };
    // With a constant gradient, every step has the size of the learning rate, after any number of
    // steps.
    let mut net = net;
    for step in 0..1500 {
        let gradients = ones(&net, 1.0);
        net = optim.step(if step < 1499 { 0.0 } else { 0.25 }, net, gradients);
    }
    let [_, vector] = plain(&net);
    assert!((vector[0] - 0.25).abs() < 4e-3, "{}", vector[0]);
}

#[test]
fn float64_parameters_are_updated_with_float64_rates() {
    if !has_type(FloatDType::F64) {
        lacks("float64");
        return;
    }
    let (lr, decay, steps) = (2.5e-6, 0.01, 200);
    let settings = AdamWConfig::new().with_weight_decay(decay);
    let config = MuonConfig::new()
        .with_weight_decay(decay.into())
        .with_adamw(settings)
        .with_rule(RoutingRule::muon("matrix"));
    let expected = (1.0 - lr * decay).powi(steps);
    let check = |before: &Net, after: &Net| {
        let [old, new] = [before, after].map(|net| net.matrix.val().into_data());
        let pairs = old.iter::<f64>().zip(new.iter::<f64>());
        for (old, new) in pairs.filter(|(old, _)| old.abs() > 0.1) {
            assert!((new / old - expected).abs() < 1e-13, "{} {expected}", new / old);
        }
        // AdamW also decays parameters with zero gradients.
        let new = after.vector.val().into_data().iter::<f64>().next().unwrap();
        assert!((new / 0.5 - expected).abs() < 1e-13, "{new}");
    };
    let net = Net::new(DType::F64, [4, 6], &device());
    let mut optim = config.init(&net);
    let mut trained = net.clone();
    for _ in 0..steps {
        let gradients = trained.gradients(0.0);
        trained = optim.step(lr, trained, gradients);
    }
    check(&net, &trained);
    // Collectives do not support float64, which is an error before the first step.
    let world = World::alone(device());
    let error = DistMuonConfig::new().with_muon(config).init(&world, &net).map(|_| ()).unwrap_err();
    let Error::Parameter { parameter, .. } = &error else { panic!("{error}") };
    assert_eq!(parameter, "matrix");
}

#[test]
fn adamw_in_float64_follows_a_float64_reference() {
    if !has_type(FloatDType::F64) {
        lacks("float64");
        return;
    }
    // AdamW in float64, from its definition.
    let (lr, settings) = (1e-5, AdamWConfig::new().with_weight_decay(0.01));
    let net = Net::new(DType::F64, [2, 3], &device());
    let (_, mut optim) = made(&config().with_adamw(settings), &net);
    let (mut trained, mut values) = (net, [0.5_f64; 3]);
    let (mut m, mut v) = ([0.0_f64; 3], [0.0_f64; 3]);
    for t in 1..=300 {
        let gradients = trained.gradients(1.0 + (t as f32).sin());
        let g = gradients.get::<1>(trained.vector.id).unwrap().into_data();
        for (i, g) in g.iter::<f64>().enumerate() {
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            let (c1, c2) = (1.0 - 0.9_f64.powi(t), 1.0 - 0.95_f64.powi(t));
            values[i] =
                (1.0 - lr * 0.01) * values[i] - lr * (m[i] / c1) / ((v[i] / c2).sqrt() + 1e-8);
        }
        trained = optim.step(lr, trained, gradients);
    }
    let actual = trained.vector.val().into_data();
    for (actual, expected) in actual.iter::<f64>().zip(values) {
        assert!((actual - expected).abs() < 1e-13, "{actual} {expected}");
    }
}

#[test]
fn parameters_without_elements_are_accepted() {
    let net = Net::new(DType::F32, [0, 8], &device());
    let (_, mut optim) = made(&config(), &net);
    let gradients = net.gradients(1.0);
    assert_eq!(optim.step(0.1, net.clone(), gradients).matrix.val().dims(), [0, 8]);

    let muon = config().with_rule(RoutingRule::muon("matrix"));
    let optim = DistMuonConfig::new().with_muon(muon).with_max_norm(Some(1.0));
    World::threads_with(World::devices(2), net, |world, net| {
        let mut optim = optim.init(&world, &net)?;
        let gradients = net.gradients(1.0);
        let net = optim.step(0.1, net, gradients)?;
        assert_eq!(net.matrix.val().dims(), [0, 8]);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn settings_that_would_spoil_every_step_are_rejected() {
    for (config, named) in [
        (
            config().with_grad_clipping(Some(GradientClippingConfig::Norm(f32::NAN))),
            "grad_clipping",
        ),
        (config().with_grad_clipping(Some(GradientClippingConfig::Value(0.0))), "grad_clipping"),
        (config().with_max_skipped(Some(0)), "max_skipped"),
    ] {
        match config.try_build() {
            Err(Error::Setting { setting, .. }) => assert_eq!(setting, named),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn learning_rates_that_no_run_can_use_are_rejected() {
    for lr in [f64::NAN, f64::INFINITY, 1e39, -1e-3] {
        let net = Net::new(DType::F32, [4, 4], &device());
        let (_, mut optim) = made(&config(), &net);
        let world = World::alone(device());
        let mut shared = DistMuonConfig::new()
            .with_muon(config().with_rule(RoutingRule::muon("matrix")))
            .init(&world, &net)
            .unwrap();
        let error = shared.step(lr, net.clone(), net.gradients(1.0)).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::Usage { .. }), "{error}");
        assert!(error.to_string().contains("the learning rate is invalid"), "{error}");
        let gradients = net.gradients(1.0);
        let message = panic_message(|| optim.step(lr, net, gradients));
        assert!(message.contains("learning rate"), "{message}");
    }
    // Of one group of parameters only.
    let net = Net::new(DType::F32, [4, 4], &device());
    let group = ParamGroup::from_predicate("vector");
    let rates = ModuleLrScheduler::new(ConstantLr::new(0.01));
    let mut rates = rates.with_group(group, ConstantLr::new(-1e-3));
    let muon = config().with_rule(RoutingRule::muon("matrix"));
    let mut batched = muon.init_batched(&net).unwrap();
    let error = batched.step(rates.step(), net.clone(), net.gradients(1.0)).map(drop).unwrap_err();
    assert!(error.to_string().contains("the learning rate is invalid"), "{error}");
    let (_, mut optim) = made(&config(), &net);
    let gradients = net.gradients(1.0);
    let message = panic_message(|| optim.step(rates.step(), net, gradients));
    assert!(message.contains("learning rate"), "{message}");
}

/// The counts of optimizers that were dropped stay, and nothing else of them.
#[test]
fn optimizers_made_anew_of_one_routing_leave_their_counts_only() {
    let net = Net::new(DType::F32, [4, 4], &device());
    let routing = config().with_rule(RoutingRule::muon("matrix")).route(&net).unwrap();
    let mut sizes = vec![];
    for made in 1..=12 {
        let mut optim = routing.init();
        optim.step(0.1, net.clone(), net.gradients(f32::NAN));
        assert_eq!(routing.skipped_steps().read()["matrix"], made);
        drop(optim);
        assert_eq!(routing.skipped_steps().read()["matrix"], made);
        sizes.push(format!("{:?}", routing.skipped_steps()).len());
    }
    // A longer number takes a digit more.
    assert!(sizes[11] <= sizes[1] + 8, "{sizes:?}");
}

/// Gradients of another model, or none.
#[test]
fn steps_without_any_gradient_end_the_run() {
    let (net, other) =
        (Net::new(DType::F32, [4, 4], &device()), Net::new(DType::F32, [4, 4], &device()));
    let config = config().with_rule(RoutingRule::muon("matrix")).with_max_absent(Some(3));
    for ranks in [1, 2] {
        let steps = World::threads_with(World::devices(ranks), net.clone(), |world, mut net| {
            let mut optim = DistMuonConfig::new().with_muon(config.clone()).init(&world, &net)?;
            let mut taken = 0;
            loop {
                // The fourth one has gradients: those before it do not count.
                let gradients = match taken {
                    2 => net.gradients(1.0),
                    1 => GradientsParams::new(),
                    _ => other.gradients(1.0),
                };
                match optim.step(0.1, net, gradients) {
                    Ok(stepped) => net = stepped,
                    Err(error) => return Ok::<_, Error>((taken, error.to_string())),
                }
                taken += 1;
            }
        });
        for (taken, error) in steps.unwrap() {
            assert_eq!(taken, 5, "{error}");
            assert!(
                error.contains("3 steps in a row") && error.contains("`max_absent`"),
                "{error}"
            );
        }
    }
}

/// The default limit, which the guide names.
#[test]
fn a_hundred_steps_without_any_gradient_end_the_run() {
    let net = Net::new(DType::F32, [4, 4], &device());
    let config = config().with_rule(RoutingRule::muon("matrix"));
    let taken = |step: &mut dyn FnMut(Net) -> Result<Net>| {
        let mut net = net.clone();
        (0..200).take_while(|_| step(net.clone()).map(|stepped| net = stepped).is_ok()).count()
    };
    let mut batched = config.init_batched(&net).unwrap();
    assert_eq!(taken(&mut |net| batched.step(0.1, net, GradientsParams::new())), 99);
    let world = World::alone(device());
    let mut of_ranks = DistMuonConfig::new().with_muon(config).init(&world, &net).unwrap();
    assert_eq!(taken(&mut |net| of_ranks.step(0.1, net, GradientsParams::new())), 99);
}

/// As of a layer that the loss does not use.
#[test]
fn a_parameter_without_gradients_is_named() {
    let net = Net::new(DType::F32, [4, 4], &device());
    let config = config().with_rule(RoutingRule::muon("matrix")).with_max_absent(Some(3));
    for ranks in [1, 2] {
        let run = World::threads_with(World::devices(ranks), net.clone(), |world, mut net| {
            let mut optim = DistMuonConfig::new().with_muon(config.clone()).init(&world, &net)?;
            let mut seen = vec![];
            for step in 0..6 {
                let mut gradients = net.gradients(1.0);
                // The vector has one on the last rank only, in the last step.
                if step < 5 || world.rank() + 1 < world.size() {
                    gradients.remove::<1>(net.vector.id);
                }
                net = optim.step(0.1, net, gradients)?;
                seen.push(optim.absent().get("vector").copied());
            }
            Ok::<_, Error>(seen)
        });
        for seen in run.unwrap() {
            assert_eq!(seen, [None, None, Some(3), Some(4), Some(5), None]);
        }
    }
}

/// Rank 0 warns for all.
#[test]
fn a_parameter_without_gradients_on_any_rank_is_warned_of() {
    logs::collect();
    // No other test has this limit.
    let config = config().with_rule(RoutingRule::muon("matrix")).with_max_absent(Some(11));
    let net = Net::new(DType::F32, [4, 4], &device());
    let run = World::threads_with(World::devices(2), net, |world, mut net| {
        let mut optim = DistMuonConfig::new().with_muon(config.clone()).init(&world, &net)?;
        for _ in 0..30 {
            let mut gradients = net.gradients(1.0);
            gradients.remove::<1>(net.vector.id);
            net = optim.step(0.1, net, gradients)?;
        }
        Ok::<_, Error>(())
    });
    run.unwrap();
    let warnings = logs::with(&["WARN", "`vector` had no gradient in 11 steps in a row"]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
}

/// The steps at which counts are read, which the guide names.
#[test]
fn counts_of_skipped_steps_are_read_at_the_first_step_and_at_every_25th() {
    #[derive(Module, Debug)]
    struct Named {
        skipped_for_thirty_steps: Param<Tensor<2>>,
    }
    logs::collect();
    let ones = Tensor::<2>::ones([4, 4], (&device(), DType::F32)).require_grad();
    let net = Named { skipped_for_thirty_steps: Param::from_tensor(ones) };
    let config = MuonConfig::new().with_max_skipped(None).with_rule(RoutingRule::muon("skipped"));
    let mut optim = config.init_batched(&net).unwrap();
    let mut net = net;
    let warned = |net: &mut Named, optim: &mut distmuon::DistModuleOptimizer, steps: usize| {
        for _ in 0..steps {
            let mut gradients = GradientsParams::new();
            let bad = Tensor::<2>::full([4, 4], f32::NAN, (&device().inner(), DType::F32));
            gradients.register(net.skipped_for_thirty_steps.id, bad);
            *net = optim.step(0.1, net.clone(), gradients).unwrap();
        }
        logs::with(&["WARN", "skipped_for_thirty_steps"]).len()
    };
    // Each reading is logged at the latest in the step after it.
    for (more, expected) in [(2, 1), (22, 1), (2, 2), (4, 2)] {
        assert_eq!(warned(&mut net, &mut optim, more), expected, "after {more} more steps");
    }
}

/// Burn's optimizer counts nothing by itself.
#[test]
fn a_parameter_without_gradients_is_named_on_one_device() {
    logs::collect();
    // No other test has this limit.
    let config = config().with_rule(RoutingRule::muon("matrix")).with_max_absent(Some(7));
    let named = || logs::with(&["WARN", "`vector` had no gradient in 7 steps in a row"]).len();
    let mut net = Net::new(DType::F32, [4, 4], &device());
    let mut optim = config.init(&net);
    for (steps, expected) in [(7, 0), (1, 1), (20, 1)] {
        for _ in 0..steps {
            let mut gradients = net.gradients(1.0);
            gradients.remove::<1>(net.vector.id);
            net = optim.step(0.1, net, gradients);
        }
        assert_eq!(named(), expected, "after {steps} more steps");
    }
}

/// An optimizer of one parameter at a time, one of all, and ranks.
#[test]
fn gradients_of_other_types_are_converted() {
    if !has_type(FloatDType::BF16) {
        lacks("bfloat16");
        return;
    }
    let config = config().with_rule(RoutingRule::muon("matrix"));
    for dtype in [DType::BF16, DType::F16] {
        let gradients = |net: &Net| {
            let mut gradients = net.gradients(1.0);
            let matrix = gradients.remove::<2>(net.matrix.id).unwrap();
            gradients.register(net.matrix.id, matrix.cast(dtype));
            gradients
        };
        let net = Net::new(DType::F32, [4, 4], &device());
        let expected = plain(&config.init(&net).step(0.1, net.clone(), gradients(&net)));
        for ranks in [1, 2] {
            let stepped = World::threads_with(World::devices(ranks), net.clone(), |world, net| {
                let config = DistMuonConfig::new().with_muon(config.clone());
                let mut optim = config.init(&world, &net)?;
                let gradients = gradients(&net);
                Ok::<_, Error>(plain(&optim.step(0.1, net, gradients)?))
            });
            for values in stepped.unwrap() {
                for (values, expected) in values.iter().zip(&expected) {
                    assert!(largest_difference(values, expected) < 1e-6, "{dtype:?}, {ranks}");
                }
            }
        }
    }
}

/// A configuration whose coefficients turn every update into infinity.
fn explosive() -> MuonConfig {
    config()
        .with_newton_schulz(
            NewtonSchulzConfig::new()
                .with_coefficients(Coefficients::Custom(vec![[1e20, 0.0, 0.0]; 3]))
                .with_form(IterationForm::Standard),
        )
        .with_rule(RoutingRule::muon("matrix"))
}

#[test]
fn non_finite_updates_are_skipped_and_counted() {
    let counted = [("matrix".to_owned(), 2)].into();
    for kernels in [KernelPolicy::Auto, KernelPolicy::Portable] {
        let config = explosive().with_kernels(kernels);
        let net = Net::new(DType::F32, [4, 6], &device());
        let (routing, mut optim) = made(&config, &net);
        let before = bits(&net.matrix.val());
        let mut trained = net.clone();
        for _ in 0..2 {
            let gradients = trained.gradients(1.0);
            trained = optim.step(0.1, trained, gradients);
        }
        assert_eq!(bits(&trained.matrix.val()), before);
        assert_ne!(bits(&trained.vector.val()), bits(&net.vector.val()));
        assert_eq!(routing.skipped_steps().read(), counted);
        let config = DistMuonConfig::new().with_muon(config);
        World::threads_with(World::devices(2), net, |world, mut net| {
            let mut optim = config.init(&world, &net)?;
            for _ in 0..2 {
                let gradients = net.gradients(1.0);
                net = optim.step(0.1, net, gradients)?;
            }
            assert_eq!(bits(&net.matrix.val()), before);
            assert_eq!(optim.skipped_steps().read(), counted);
            Ok::<_, Error>(())
        })
        .unwrap();
    }
}

#[test]
fn a_run_that_skips_every_step_ends_with_an_error() {
    let muon = explosive().with_max_skipped(Some(4));
    let config = DistMuonConfig::new().with_muon(muon.clone());
    let net = Net::new(DType::F32, [4, 6], &device());
    let error = World::threads_with(World::devices(2), net.clone(), |world, mut net| {
        let mut optim = config.init(&world, &net)?;
        for _ in 0..20 {
            let gradients = net.gradients(f32::NAN);
            net = optim.step(0.1, net, gradients)?;
        }
        Ok::<_, Error>(())
    });
    let Err(Error::Skipped { parameter, steps }) = error else { panic!("{error:?}") };
    assert_eq!((parameter.as_str(), steps), ("matrix", 4));

    let (_, mut optim) = made(&muon, &net);
    let message = panic_message(|| {
        let mut net = net;
        for _ in 0..20 {
            let gradients = net.gradients(f32::NAN);
            net = optim.step(0.1, net, gradients);
        }
    });
    assert!(message.contains("skipped in 4 steps in a row"), "{message}");
}

#[test]
fn skipped_steps_of_all_optimizers_of_a_routing_add_up() {
    let net = Net::new(DType::F32, [4, 6], &device());
    let (routing, mut first) = made(&config(), &net);
    let mut second = routing.init();
    let bad = net.gradients(f32::NAN);
    let net = first.step(0.1, net, bad);
    let good = net.gradients(1.0);
    let net = second.step(0.1, net, good);
    let counts = [("matrix".to_owned(), 1), ("vector".to_owned(), 1)].into();
    assert_eq!(routing.skipped_steps().read(), counts);

    // Optimizers that are built without a routing, whose parameters do not have names.
    let rule = config().build();
    let skipped = rule.skipped_steps().clone();
    let mut optim = ModuleOptimizer::from(rule);
    let matrices = Two { a: net.matrix.clone(), b: Net::new(DType::F32, [3, 3], &device()).matrix };
    let mut gradients = GradientsParams::new();
    for (param, value) in [(&matrices.a, f32::NAN), (&matrices.b, 1.0)] {
        let zeros = param.val().inner().zeros_like();
        gradients.register(param.id, zeros.add_scalar(value));
    }
    optim.step(0.1, matrices, gradients);
    assert_eq!(skipped.read().into_values().sum::<u64>(), 1);
}

/// The record as older versions wrote it, with the moments of bfloat16 parameters in bfloat16.
fn older(record: OptimizerRecord) -> OptimizerRecord {
    let reader = Reader::from_bytes(record.into_bytes().unwrap()).unwrap();
    let (scalars, metadata) = (reader.scalars().clone(), reader.metadata().clone());
    let tensors = reader.into_tensors().unwrap().into_iter().map(|tensor| {
        let (name, dtype, shape, id, bytes) = tensor.into_parts().unwrap();
        let data = TensorData::from_bytes(bytes, shape, dtype);
        let is_moment = name.contains(".moment_");
        let data = if is_moment { data.convert_dtype(DType::BF16) } else { data };
        let (bytes, shape, dtype) = data.into_parts();
        burn_pack::Tensor::new(name, dtype, shape, id, bytes)
    });
    let mut writer = Writer::new(tensors.collect());
    for (name, value) in scalars {
        writer = writer.with_scalar(&name, value);
    }
    for (name, value) in &metadata {
        writer = writer.with_metadata(name, value);
    }
    OptimizerRecord::from_bytes(writer.into_bytes().unwrap()).unwrap()
}

#[test]
fn half_precision_states_of_older_files_are_widened() {
    if !has_type(FloatDType::BF16) {
        lacks("bfloat16");
        return;
    }
    let muon = config().with_rule(RoutingRule::muon("matrix"));
    let net = Net::new(DType::BF16, [4, 6], &device());
    let mut optim = muon.init(&net);
    let gradients = net.gradients(1.0);
    let net = optim.step(0.1, net, gradients);
    let record = || older(optim.to_record()).into_bytes().unwrap();

    let mut alone = muon.init(&net).load_record(OptimizerRecord::from_bytes(record()).unwrap());
    let expected = plain(&alone.step(0.1, net.clone(), net.gradients(0.5)));
    assert_ne!(expected, plain(&muon.init(&net).step(0.1, net.clone(), net.gradients(0.5))));
    let config = DistMuonConfig::new().with_muon(muon);
    let on_ranks = World::threads_with(World::devices(2), net, |world, net| {
        let optim = config.init(&world, &net)?;
        let mut optim = optim.load_record(OptimizerRecord::from_bytes(record()).unwrap())?;
        let gradients = net.gradients(0.5);
        Ok::<_, Error>(plain(&optim.step(0.1, net, gradients)?))
    });
    assert_eq!(on_ranks.unwrap(), [expected.clone(), expected]);
}

#[derive(Module, Debug)]
struct Two {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
}

#[test]
fn skipped_steps_continue_from_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let net = Net::new(DType::F32, [4, 6], &device());
    let (_, mut optim) = made(&config(), &net);
    let bad = net.gradients(f32::NAN);
    let net = optim.step(0.1, net, bad);
    checkpoint::save(&path, &net, &optim, &1).unwrap();

    let (routing, optim) = made(&config(), &net);
    let (net, mut optim, _): (_, _, i32) = checkpoint::load(&path, net, optim).unwrap();
    let counts = [("matrix".to_owned(), 1), ("vector".to_owned(), 1)].into();
    assert_eq!(routing.skipped_steps().read(), counts);
    let good = net.gradients(1.0);
    let net = optim.step(0.1, net, good);
    assert_eq!(routing.skipped_steps().read(), counts);
    // The counts of the file replace those of an optimizer that has already counted.
    let bad = net.gradients(f32::NAN);
    let net = optim.step(0.1, net, bad);
    assert_eq!(routing.skipped_steps().read()["matrix"], 2);
    let (net, _, _): (_, _, i32) = checkpoint::load(&path, net, optim).unwrap();
    assert_eq!(routing.skipped_steps().read(), counts);

    let muon = config().with_rule(RoutingRule::muon("matrix"));
    let world = World::alone(device());
    let optim = DistMuonConfig::new().with_muon(muon).init(&world, &net).unwrap();
    let (_, optim, _): (_, _, i32) = checkpoint::load(&path, net, optim).unwrap();
    assert_eq!(optim.skipped_steps().read()["matrix"], 1);
}
