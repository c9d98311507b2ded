//! Parameters in half precision: master weights, random rounding, gradients in float32, loss
//! scaling, and the bytes of each.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, bf16};
use distmuon::distributed::{GradDtype, LossScaleConfig};
use distmuon::{
    DistMuonConfig, Error, GradientBuffer, MasterWeights, MaxLogits, MuonConfig, QkClipConfig,
    QkClipRule, Result, RoutingRule, StateDtype, World, checkpoint,
};
use distmuon_testing::device::{has_type, is_flex};
use distmuon_testing::lacks;
use distmuon_testing::models::{Fixed, Layers, weights};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const STEPS: u64 = 6;

/// Matrices for Muon, two of one shape, and tensors for AdamW, of which one is a single row.
#[derive(Module, Debug)]
struct Net {
    hidden: Vec<Param<Tensor<2>>>,
    table: Param<Tensor<2>>,
    gain: Param<Tensor<1>>,
}

impl Net {
    fn new(dtype: DType, device: &Device) -> Self {
        let matrix = |rows, columns| {
            let ones = Tensor::<2>::ones([rows, columns], (device, DType::F32));
            Param::from_tensor(ones.require_grad())
        };
        let gain = Tensor::<1>::ones([7], (device, DType::F32));
        let net = Self {
            hidden: vec![matrix(6, 10), matrix(8, 8), matrix(6, 10)],
            table: matrix(40, 32),
            gain: Param::from_tensor(gain.require_grad()),
        };
        net.map(&mut Fixed::new(3)).map(&mut Rounded(dtype))
    }
}

/// Rounds parameters to bfloat16, and converts them to a type.
struct Rounded(DType);

impl ModuleMapper for Rounded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| old.cast(DType::BF16).cast(self.0).detach().require_grad())
    }
}

/// Gradients that bfloat16 has, in a type, for a model of any type. Some are small.
fn gradients<M: Module>(model: &M, seed: u64, dtype: DType) -> GradientsParams {
    struct Random(StdRng, DType, GradientsParams);
    impl ModuleVisitor for Random {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner();
            let count = value.shape().num_elements();
            let random = (0..count).map(|_| self.0.random_range(-0.1..0.1));
            let random = random.map(|x: f32| bf16::from_f32(x).to_f32());
            let data = TensorData::new(random.collect::<Vec<_>>(), value.shape());
            let gradient = Tensor::<D>::from_data(data, (&value.device(), DType::F32));
            self.2.register::<D>(param.id, gradient.cast(self.1));
        }
    }
    let mut random = Random(StdRng::seed_from_u64(seed), dtype, GradientsParams::new());
    model.visit(&mut random);
    random.2
}

fn device() -> Device {
    Device::default().autodiff()
}

fn config(master: MasterWeights) -> MuonConfig {
    MuonConfig::new()
        .with_master_weights(master)
        .with_rule(RoutingRule::muon("hidden"))
        .with_rule(RoutingRule::adamw("table"))
}

/// A rate at which most steps are smaller than half a unit in the last place of bfloat16.
const LR: f64 = 2e-4;

/// Compares weights with those of another run: bit for bit on Flex, where a matrix has the same
/// bits in a batch and alone, and up to some units in the last place of half precision elsewhere.
fn assert_same(actual: &[f32], expected: &[f32], case: impl std::fmt::Display) {
    assert_eq!(actual.len(), expected.len(), "{case}");
    for (actual, expected) in actual.iter().zip(expected) {
        let is_same = if is_flex() { actual == expected } else { (actual - expected).abs() < 4e-3 };
        assert!(is_same, "{case}: {actual} for {expected}");
    }
}

/// The weights in float32 after steps with Burn's optimizer of single parameters.
fn alone(dtype: DType, config: &MuonConfig) -> Vec<f32> {
    let mut net = Net::new(dtype, &device());
    let mut optim = config.init(&net);
    for step in 0..STEPS {
        let grads = gradients(&net, step, dtype);
        net = optim.step(LR, net, grads);
    }
    floats(&net)
}

/// The elements of all parameters.
fn floats<M: Module>(model: &M) -> Vec<f32> {
    struct Values(Vec<f32>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().cast(DType::F32).into_data().iter::<f32>());
        }
    }
    let mut values = Values(vec![]);
    model.visit(&mut values);
    values.0
}

/// The weights of every rank after steps in which all ranks have equal gradients of a type.
fn on_ranks(count: usize, dtype: DType, gradient: DType, dist: &DistMuonConfig) -> Vec<Vec<f32>> {
    let trained = World::threads(vec![device(); count], |world| -> Result<_> {
        let mut net = Net::new(dtype, world.device());
        let mut optim = dist.init(&world, &net)?;
        for step in 0..STEPS {
            let grads = gradients(&net, step, gradient);
            net = optim.step(LR, net, grads)?;
        }
        Ok(floats(&net))
    });
    trained.unwrap()
}

fn dist(muon: MuonConfig) -> DistMuonConfig {
    DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(0.0005)).with_small_elements(16)
}

/// Returns `true` if the device has a type, and reports it otherwise.
fn has(dtype: FloatDType) -> bool {
    let has = has_type(dtype);
    if !has {
        lacks(DType::from(dtype).name());
    }
    has
}

#[test]
fn master_weights_are_those_of_a_run_in_float32() {
    for half in [FloatDType::BF16, FloatDType::F16].into_iter().filter(|half| has(*half)) {
        let half = DType::from(half);
        let wide = alone(DType::F32, &config(MasterWeights::Full));
        let rounded: Vec<f32> = {
            let data = TensorData::from(&*wide);
            let tensor = Tensor::<1>::from_data(data, (&Device::default(), DType::F32));
            tensor.cast(half).cast(DType::F32).into_data().iter::<f32>().collect()
        };
        let full = alone(half, &config(MasterWeights::Full));
        assert_same(&full, &rounded, half.name());
        let lost = alone(half, &config(MasterWeights::None));
        assert_ne!(lost, rounded, "{half:?}");
        for count in [1, 2, 4] {
            for weights in on_ranks(count, half, half, &dist(config(MasterWeights::Full))) {
                assert_same(&weights, &rounded, format_args!("{half:?} on {count} ranks"));
            }
        }
    }
}

#[test]
fn bits_of_the_significand_are_exact_master_weights() {
    if !has(FloatDType::BF16) {
        return;
    }
    let wide = alone(DType::F32, &config(MasterWeights::Full));
    // Ties go to the larger number.
    let nearest = |x: f32| {
        let (down, up) = (x.to_bits() & 0xFFFF_0000, (x.to_bits() & 0xFFFF_0000) + 0x1_0000);
        let [down, up] = [down, up].map(f32::from_bits);
        let [to_down, to_up] = [down, up].map(|y| (f64::from(y) - f64::from(x)).abs());
        if to_down < to_up || to_down == to_up && down > up { down } else { up }
    };
    let expected: Vec<f32> = wide.into_iter().map(nearest).collect();
    let lean = alone(DType::BF16, &config(MasterWeights::Mantissa));
    assert_same(&lean, &expected, "one device");
    for count in [1, 2, 3, 4] {
        let dist = dist(config(MasterWeights::Mantissa));
        for weights in on_ranks(count, DType::BF16, DType::BF16, &dist) {
            // Three equal gradients have a mean that rounds.
            let same = weights.iter().zip(&expected).filter(|(a, b)| a == b).count();
            let is_rounded = count == 3 || !is_flex();
            assert!(same == expected.len() || is_rounded && same * 100 > expected.len() * 95);
        }
    }
}

#[test]
fn every_kind_of_master_weights_is_the_same_on_any_number_of_ranks() {
    let kinds = [
        MasterWeights::Full,
        MasterWeights::Mantissa,
        MasterWeights::None,
        MasterWeights::Stochastic { seed: 9 },
    ];
    if !has(FloatDType::BF16) {
        return;
    }
    for kind in kinds {
        for states in [StateDtype::Float32, StateDtype::BFloat16] {
            let config = config(kind).with_state_dtype(states);
            let expected = alone(DType::BF16, &config);
            for count in [1, 2, 4] {
                for gradient in [DType::BF16, DType::F32] {
                    let grad_dtype = match gradient {
                        DType::F32 => GradDtype::Float32,
                        _ => GradDtype::Parameter,
                    };
                    let dist = dist(config.clone()).with_grad_dtype(grad_dtype);
                    for weights in on_ranks(count, DType::BF16, gradient, &dist) {
                        let case = format_args!("{kind:?}, {states:?}, {count} ranks");
                        assert_same(&weights, &expected, case);
                    }
                }
            }
        }
    }
}

/// A weight of 1 and steps of a hundredth of the distance to the next number in bfloat16.
#[test]
fn random_rounding_moves_weights_in_the_mean_and_the_nearest_number_does_not() {
    if !has(FloatDType::BF16) {
        return;
    }
    let moved = |master| {
        let ones = Tensor::<2>::ones([64, 64], (&device(), DType::BF16)).require_grad();
        let mut net = Layers::square(1, 64, &device());
        net.layers[0].weight = Param::from_tensor(ones);
        let config = MuonConfig::new()
            .with_master_weights(master)
            .with_adamw(distmuon::AdamWConfig::new())
            .with_rule(RoutingRule::adamw(""));
        let mut optim = config.init(&net);
        for _ in 0..50 {
            let mut grads = GradientsParams::new();
            let id = net.layers[0].weight.id;
            grads.register(id, Tensor::<2>::ones([64, 64], (&Device::default(), DType::BF16)));
            net = optim.step(2f64.powi(-8) / 100.0, net, grads);
        }
        let weights = floats(&net);
        1.0 - weights.iter().map(|x| f64::from(*x)).sum::<f64>() / weights.len() as f64
    };
    let expected = 50.0 * 2f64.powi(-8) / 100.0;
    assert_eq!(moved(MasterWeights::None), 0.0);
    for master in [MasterWeights::Stochastic { seed: 1 }, MasterWeights::Stochastic { seed: 2 }] {
        let moved = moved(master);
        assert!((moved / expected - 1.0).abs() < 0.1, "{moved} instead of {expected}");
    }
}

#[test]
fn a_parameter_that_was_changed_between_steps_counts_as_it_is() {
    if !has(FloatDType::BF16) {
        return;
    }
    for master in [MasterWeights::Full, MasterWeights::Mantissa] {
        let train = |change: bool| {
            let mut net = Net::new(DType::BF16, &device());
            let mut optim = config(master).init_batched(&net).unwrap();
            let grads = gradients(&net, 0, DType::BF16);
            net = optim.step(LR, net, grads).unwrap();
            if change {
                net.table = net.table.map(|old| (old * 0.0 + 3.0).detach().require_grad());
            }
            let grads = gradients(&net, 1, DType::BF16);
            net = optim.step(LR, net, grads).unwrap();
            floats(&Table { table: net.table })
        };
        assert!(train(false).iter().all(|x| x.abs() < 0.5));
        assert!(train(true).iter().all(|x| (x - 3.0).abs() < 0.02), "{master:?}");
    }
}

#[derive(Module, Debug)]
struct Table {
    table: Param<Tensor<2>>,
}

#[test]
fn checkpoints_continue_with_the_bits_of_master_weights() {
    if !has(FloatDType::BF16) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for master in
        [MasterWeights::Full, MasterWeights::Mantissa, MasterWeights::Stochastic { seed: 5 }]
    {
        let config = config(master);
        let expected = alone(DType::BF16, &config);
        let path = folder.path().join(format!("{master:?}"));
        let steps = |count: usize, range: std::ops::Range<u64>| {
            let dist = dist(config.clone());
            let trained = World::threads(vec![device(); count], |world| -> Result<_> {
                let mut net = Net::new(DType::BF16, world.device());
                let mut optim = dist.init(&world, &net)?;
                if range.start > 0 {
                    (net, optim, _) = optim.load::<_, u64>(&path, net)?;
                }
                for step in range.clone() {
                    let grads = gradients(&net, step, DType::BF16);
                    net = optim.step(LR, net, grads)?;
                }
                if range.end < STEPS {
                    optim.save(&path, &net, &range.end)?;
                }
                Ok(floats(&net))
            });
            trained.unwrap().swap_remove(0)
        };
        steps(4, 0..2);
        steps(2, 2..4);
        assert_same(&steps(1, 4..STEPS), &expected, format_args!("{master:?}"));

        let net = Net::new(DType::BF16, &device());
        let optim = config.init(&net);
        let (mut net, mut optim, start) = checkpoint::load::<_, u64, _>(&path, net, optim).unwrap();
        for step in start..STEPS {
            let grads = gradients(&net, step, DType::BF16);
            net = optim.step(LR, net, grads);
        }
        assert_same(&floats(&net), &expected, format_args!("{master:?} on a single device"));
    }
}

/// As files of older versions are.
#[test]
fn files_without_master_weights_start_them_from_the_parameters() {
    if !has(FloatDType::BF16) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plain");
    let net = Net::new(DType::BF16, &device());
    let mut optim = config(MasterWeights::None).init(&net);
    let grads = gradients(&net, 0, DType::BF16);
    let net = optim.step(LR, net, grads);
    checkpoint::save(&path, &net, &optim, &()).unwrap();
    for master in [MasterWeights::Full, MasterWeights::Mantissa] {
        let load = || Net::new(DType::BF16, &device());
        let single = config(master).init(&load());
        let (net, mut single, ()) = checkpoint::load(&path, load(), single).unwrap();
        let grads = gradients(&net, 1, DType::BF16);
        let expected = floats(&single.step(LR, net, grads));
        let batched = config(master).init_batched(&load()).unwrap();
        let (net, mut batched, ()) = batched.load(&path, load()).unwrap();
        let grads = gradients(&net, 1, DType::BF16);
        let actual = floats(&batched.step(LR, net, grads).unwrap());
        assert_same(&actual, &expected, format_args!("{master:?}"));
    }
}

/// Half of the gradients of a step, so that sums of micro-batches need more digits.
#[test]
fn micro_batches_are_added_up_in_float32() {
    if !has(FloatDType::BF16) {
        return;
    }
    let net = Net::new(DType::BF16, &device());
    let mut buffer = GradientBuffer::new();
    let mut expected = vec![0.0; 7];
    for step in 0..9 {
        let grads = gradients(&net, step, DType::BF16);
        let gain: Tensor<1> = grads.get(net.gain.id).unwrap();
        let gain = gain.cast(DType::F32).into_data();
        expected.iter_mut().zip(gain.iter::<f32>()).for_each(|(sum, x)| *sum += f64::from(x));
        buffer.add(&net, grads).unwrap();
    }
    let elements = 2 * 60 + 64 + 40 * 32 + 7;
    assert_eq!((buffer.count(), buffer.bytes()), (9, 4 * elements));
    let mean = buffer.take_mean(&net);
    let gain: Tensor<1> = mean.get(net.gain.id).unwrap();
    assert_eq!(gain.dtype(), DType::F32);
    for (x, sum) in gain.into_data().iter::<f32>().zip(&expected) {
        assert!((f64::from(x) - sum / 9.0).abs() < 1e-8);
    }
    assert_eq!((buffer.count(), buffer.bytes()), (0, 0));
    buffer.add(&net, gradients(&net, 0, DType::BF16)).unwrap();
    let sum: Tensor<1> = buffer.take_sum().get(net.gain.id).unwrap();
    let first: Tensor<1> = gradients(&net, 0, DType::F32).get(net.gain.id).unwrap();
    sum.into_data().assert_eq(&first.into_data(), true);
}

/// Gradients of a loss times a scale.
fn scaled(net: &Net, step: u64, scale: f64) -> GradientsParams {
    struct Scale(GradientsParams, f64);
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = self.0.remove::<D>(param.id).unwrap().cast(DType::F32);
            self.0.register(param.id, grad.mul_scalar(self.1).cast(DType::F16));
        }
    }
    let mut grads = Scale(gradients(net, step, DType::F32), scale);
    net.visit(&mut grads);
    grads.0
}

#[test]
fn a_step_that_overflows_on_one_rank_is_skipped_on_all() {
    if !has(FloatDType::F16) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    // Clipped, since the norm has the scale as well.
    let plain = dist(config(MasterWeights::Full)).with_max_norm(Some(0.3));
    let scale = LossScaleConfig::new().with_initial(1024.0).with_interval(3);
    let scaling = plain.clone().with_loss_scale(Some(scale));
    let run = |count: usize, dist: &DistMuonConfig, overflows: Option<u64>| {
        let trained = World::threads(vec![device(); count], |world| -> Result<_> {
            let mut net = Net::new(DType::F16, world.device());
            let mut optim = dist.init(&world, &net)?;
            let mut scales = vec![];
            for step in 0..STEPS {
                if overflows == Some(step) {
                    let before = weights(&net);
                    // The last rank's gradients are infinite, those of the others are not.
                    let factor = if world.rank() + 1 == count { 1e9 } else { 1.0 };
                    let grads = scaled(&net, 77, optim.loss_scale() * factor);
                    net = optim.step(LR, net, grads)?;
                    assert!(weights(&net) == before);
                    scales.push(optim.loss_scale());
                    optim.save(&path, &net, &step)?;
                    let again = dist.init(&world, &net)?;
                    (net, optim, _) = again.load::<_, u64>(&path, net)?;
                }
                let grads = scaled(&net, step, optim.loss_scale());
                net = optim.step(LR, net, grads)?;
                scales.push(optim.loss_scale());
            }
            Ok((floats(&net), scales, optim.skipped_steps().read()))
        });
        trained.unwrap()
    };
    let expected = &run(1, &plain, None)[0].0;
    for count in [1, 2, 4] {
        for (weights, scales, skipped) in run(count, &scaling, None) {
            // Powers of two scale exactly.
            assert_same(&weights, expected, format_args!("{count} ranks"));
            assert_eq!(scales, [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0]);
            assert_eq!(skipped, [].into());
        }
        for (weights, scales, skipped) in run(count, &scaling, Some(2)) {
            let case = format_args!("{count} ranks, with a step that overflows");
            assert_same(&weights, expected, case);
            assert_eq!(scales, [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]);
            assert!(skipped.values().all(|count| *count == 1) && skipped.len() == 5, "{skipped:?}");
        }
    }
}

/// Bytes per parameter of the tensors that every rank has at the beginning of a step, and the
/// largest sum at any time without the buffers that are in flight.
fn bytes(ranks: usize, [of, gradient]: [DType; 2], muon: MuonConfig) -> f64 {
    let dist = DistMuonConfig::new()
        .with_muon(muon)
        .with_grad_dtype(if gradient == DType::F32 {
            GradDtype::Float32
        } else {
            GradDtype::Parameter
        })
        .with_bucket_mb(Some(0.02))
        .with_in_flight(1);
    let elements = 16 * 64 * 64;
    let measured = World::threads(vec![device(); ranks], |world| -> Result<_> {
        let net = Layers::square(16, 64, world.device()).map(&mut Fixed::new(4));
        let mut net = net.map(&mut Rounded(of));
        let mut optim = dist.init(&world, &net)?;
        for step in 0..2 {
            let grads = gradients(&net, step, gradient);
            net = optim.step(LR, net, grads)?;
        }
        let report = optim.memory();
        let begin = report.parameters.peak
            + report.gradients.peak
            + report.masters.peak
            + report.states.peak;
        let largest = report.total.peak - report.buffers.peak;
        assert!(largest <= begin, "{ranks} ranks, {of:?}: {largest} of {begin}\n{report}");
        Ok(begin as f64 / elements as f64)
    });
    let measured = measured.unwrap();
    assert!(measured.iter().all(|bytes| *bytes == measured[0]), "{measured:?}");
    measured[0]
}

#[test]
fn bytes_per_parameter_are_those_of_the_guide() {
    for ranks in [1, 2, 4, 8] {
        let n = ranks as f64;
        let adamw = || MuonConfig::new().with_rule(RoutingRule::adamw(""));
        let muon = || MuonConfig::new().with_rule(RoutingRule::muon(""));
        let lean = muon()
            .with_master_weights(MasterWeights::Mantissa)
            .with_state_dtype(StateDtype::BFloat16);
        let single = [DType::F32; 2];
        assert_eq!(bytes(ranks, single, adamw()), 8.0 + 8.0 / n);
        assert_eq!(bytes(ranks, single, muon()), 8.0 + 4.0 / n);
        for half in [FloatDType::F16, FloatDType::BF16].into_iter().filter(|half| has(*half)) {
            let half = DType::from(half);
            assert_eq!(bytes(ranks, [half; 2], adamw()), 4.0 + 12.0 / n);
            assert_eq!(bytes(ranks, [half, DType::F32], adamw()), 6.0 + 12.0 / n);
            assert_eq!(bytes(ranks, [half; 2], muon()), 4.0 + 8.0 / n);
            assert_eq!(bytes(ranks, [half, DType::F32], muon()), 6.0 + 8.0 / n);
            if half == DType::BF16 {
                assert_eq!(bytes(ranks, [half; 2], lean.clone()), 4.0 + 4.0 / n);
                assert_eq!(bytes(ranks, [half, DType::F32], lean.clone()), 6.0 + 4.0 / n);
            }
        }
    }
}

#[test]
fn settings_that_do_not_fit_are_rejected() {
    let setting = |error: Error| match error {
        Error::Setting { setting, .. } => setting,
        other => panic!("{other}"),
    };
    if has(FloatDType::F16) {
        let net = Net::new(DType::F16, &device());
        let error = config(MasterWeights::Mantissa).route(&net).unwrap_err();
        assert!(error.to_string().contains("`hidden.0`"), "{error}");
        assert_eq!(setting(error), "master_weights");

        let error = World::threads(vec![device(); 2], |world| -> Result<()> {
            let net = Net::new(DType::F16, world.device());
            let mut optim = dist(config(MasterWeights::Full)).init(&world, &net)?;
            let grads = gradients(&net, 0, DType::F32);
            optim.step(LR, net, grads).map(drop)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("with_grad_dtype"), "{error}");
    }
    let net = Net::new(DType::F32, &device());
    let scale = LossScaleConfig::new;
    for (scale, expected) in [
        (scale().with_initial(0.0), "loss_scale.initial"),
        (scale().with_growth(1.0), "loss_scale.growth"),
        (scale().with_backoff(1.0), "loss_scale.backoff"),
        (scale().with_interval(0), "loss_scale.interval"),
    ] {
        let dist = dist(config(MasterWeights::Full)).with_loss_scale(Some(scale));
        let error = dist.init(&World::alone(device()), &net).map(drop).unwrap_err();
        assert_eq!(setting(error), expected);
    }
}

#[derive(Module, Debug)]
struct Attentive {
    attention: Attention,
}

#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
}

/// The weights after steps in each of which the first of two heads is clipped.
fn clipped(ranks: usize, dtype: DType) -> Vec<Vec<f32>> {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let dist = dist(muon);
    let trained = World::threads(vec![device(); ranks], |world| -> Result<_> {
        let linear = || LinearConfig::new(8, 8).init(world.device());
        let attention = Attention { query: linear(), key: linear() };
        let net = Attentive { attention }.map(&mut Fixed::new(3)).map(&mut Rounded(dtype));
        let rule = QkClipRule::multi_head("attention$", 2);
        let clip = QkClipConfig::new().with_rule(rule).init(&net)?;
        let (mut net, mut optim) = (net.clone(), dist.init(&world, &net)?);
        for step in 0..STEPS {
            let mut logits = MaxLogits::new();
            let maxima = [103.7_f32, 99.0];
            logits.report("attention", Tensor::from_data(maxima, (&Device::default(), DType::F32)));
            optim.clip_heads(&clip.factors_on(&world, &logits)?);
            let grads = gradients(&net, step, dtype);
            net = optim.step(LR, net, grads)?;
        }
        Ok(floats(&net))
    });
    trained.unwrap()
}

#[test]
fn clipped_heads_keep_the_digits_of_master_weights() {
    if !has(FloatDType::BF16) {
        return;
    }
    let wide = clipped(1, DType::F32).swap_remove(0);
    let rounded: Vec<f32> = wide.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    for ranks in [1, 2, 4] {
        for weights in clipped(ranks, DType::BF16) {
            assert_same(&weights, &rounded, format_args!("{ranks} ranks"));
        }
    }
}
