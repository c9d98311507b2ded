//! Parameters in half precision on one device: random rounding, changed parameters, files without
//! master weights, and gradients in float32. Momentum in 8 bits. Those on ranks are in
//! `distributed/precision.rs`.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::distributed::LossScaleConfig;
use distmuon::{
    AdamWConfig, Error, GradientBuffer, LionConfig, MasterWeights, MuonConfig, Result, RoutingRule,
    StateDtype, World, checkpoint,
};
use distmuon_testing::models::{Fixed, Layers};
use distmuon_testing::precision::{LR, Net, assert_same, config, dist, floats, gradients, has};

fn device() -> Device {
    Device::default().autodiff()
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
            .with_adamw(AdamWConfig::new())
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
    // Averages in bfloat16 would not decrease.
    let states = config(MasterWeights::Full).with_state_dtype(StateDtype::BFloat16);
    for (config, expected) in [
        (states.clone().with_momentum(0.999.into()), "momentum.momentum"),
        (states.clone().with_adamw(AdamWConfig::new().with_beta_2(0.999)), "rest.AdamW.beta_2"),
        (states.clone().with_rest(LionConfig::new().with_beta_2(0.997).into()), "rest.Lion.beta_2"),
    ] {
        assert_eq!(setting(config.try_build().unwrap_err()), expected);
    }
    states.try_build().unwrap();
    // As would those in 8 bits, of Muon: moments are float32.
    let states = states.with_state_dtype(StateDtype::Int8);
    let momentum = RoutingRule::muon("hidden").momentum(0.993);
    let net = Net::new(DType::F32, &device());
    for (config, expected) in [
        (states.clone().with_momentum(0.993.into()), "momentum.momentum"),
        (states.clone().with_rule(momentum), "rules (`hidden`).momentum.momentum"),
    ] {
        let error = config.route(&net).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("at most 0.992") && text.contains("0.993"), "{text}");
        assert_eq!(setting(error), expected);
    }
    let beta = AdamWConfig::new().with_beta_2(0.999);
    states.with_momentum(0.992.into()).with_adamw(beta).route(&net).unwrap();

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

/// Inputs, and the outputs of a network that another one is trained to imitate.
struct Imitation {
    inputs: Tensor<2>,
    outputs: Tensor<2>,
}

impl Imitation {
    const STEPS: u64 = 30;
    const LR: f64 = 0.02;

    fn net() -> Layers {
        Layers::square(3, 20, &device()).map(&mut Fixed::new(5))
    }

    fn forward(net: &Layers, inputs: Tensor<2>) -> Tensor<2> {
        net.layers.iter().fold(inputs, |x, layer| relu(layer.forward(x.clone())) + x)
    }

    fn new() -> Self {
        let inputs = Self::net().layers[0].weight.val().inner().detach();
        let others = [0, 1].map(|dimension| inputs.clone().flip([dimension]));
        let inputs = Tensor::cat([vec![inputs], others.to_vec()].concat(), 0);
        let inputs = Tensor::from_inner(inputs * 10.0);
        let teacher = Layers::square(3, 20, &device()).map(&mut Fixed::new(6));
        Self { outputs: Self::forward(&teacher, inputs.clone()).detach(), inputs }
    }

    fn loss(&self, net: &Layers) -> Tensor<1> {
        (Self::forward(net, self.inputs.clone()) - self.outputs.clone()).square().mean()
    }

    fn gradients(&self, net: &Layers) -> GradientsParams {
        GradientsParams::from_grads(self.loss(net).backward(), net)
    }

    fn value(&self, net: &Layers) -> f64 {
        self.loss(net).into_scalar::<f32>().into()
    }
}

fn in_8_bits() -> MuonConfig {
    MuonConfig::new().with_rule(RoutingRule::muon("")).with_state_dtype(StateDtype::Int8)
}

#[test]
fn momentum_in_8_bits_trains_as_in_float32() {
    let imitation = Imitation::new();
    let run = |states: StateDtype| {
        let mut net = Imitation::net();
        let mut optim = in_8_bits().with_state_dtype(states).init(&net);
        let mut batched_net = Imitation::net();
        let config = in_8_bits().with_state_dtype(states);
        let mut batched = config.init_batched(&batched_net).unwrap();
        for _ in 0..Imitation::STEPS {
            let grads = imitation.gradients(&net);
            net = optim.step(Imitation::LR, net, grads);
            let grads = imitation.gradients(&batched_net);
            batched_net = batched.step(Imitation::LR, batched_net, grads).unwrap();
        }
        assert_same(&floats(&batched_net), &floats(&net), format_args!("{states:?}"));
        (imitation.value(&net), batched.memory().states.now)
    };
    let before = imitation.value(&Imitation::net());
    let (float, bytes) = run(StateDtype::Float32);
    let (coded, bytes_of_codes) = run(StateDtype::Int8);
    println!("loss {before} before, {float} in float32, {coded} in 8 bits");
    assert!(float < before / 2.0, "{before} {float}");
    assert!(coded != float && (coded / float - 1.0).abs() < 0.02, "{float} {coded}");
    // Three matrices of 400 elements, in 4 blocks each.
    assert_eq!((bytes, bytes_of_codes), (3 * 1600, 3 * (400 + 4 * 4)));
}

#[test]
fn a_run_with_momentum_in_8_bits_resumes_with_the_same_bits() {
    let imitation = Imitation::new();
    let folder = tempfile::tempdir().unwrap();
    let [single, batched] = ["single", "batched"].map(|name| folder.path().join(name));
    let mut net = Imitation::net();
    let mut optim = in_8_bits().init(&net);
    for step in 0..Imitation::STEPS {
        if step == 10 {
            checkpoint::save(&single, &net, &optim, &step).unwrap();
        }
        let grads = imitation.gradients(&net);
        net = optim.step(Imitation::LR, net, grads);
    }
    let expected = floats(&net);

    let load = |path, states| {
        let optim = in_8_bits().with_state_dtype(states).init(&Imitation::net());
        checkpoint::load::<_, u64, _>(path, Imitation::net(), optim).unwrap()
    };
    let (mut net, mut optim, start) = load(&single, StateDtype::Int8);
    for _ in start..Imitation::STEPS {
        let grads = imitation.gradients(&net);
        net = optim.step(Imitation::LR, net, grads);
    }
    assert_same(&floats(&net), &expected, "one parameter at a time");

    let optim = in_8_bits().init_batched(&Imitation::net()).unwrap();
    let (net, optim, _) = optim.load::<_, u64>(&single, Imitation::net()).unwrap();
    optim.save(&batched, &net, &start).unwrap();
    let optim = in_8_bits().init_batched(&Imitation::net()).unwrap();
    let (mut net, mut optim, _) = optim.load::<_, u64>(&batched, Imitation::net()).unwrap();
    for _ in start..Imitation::STEPS {
        let grads = imitation.gradients(&net);
        net = optim.step(Imitation::LR, net, grads).unwrap();
    }
    assert_same(&floats(&net), &expected, "a whole model");

    // The next step reads the decoded momentum, whatever type stores the new one.
    let next = |states| {
        let (net, mut optim, _) = load(&batched, states);
        let grads = imitation.gradients(&net);
        floats(&optim.step(Imitation::LR, net, grads))
    };
    let coded = next(StateDtype::Int8);
    assert_same(&next(StateDtype::Float32), &coded, "to float32");
}

/// A state by itself, whose momentum is float32.
#[test]
fn momentum_in_8_bits_is_read_in_float32() {
    let muon = in_8_bits().with_momentum(0.9.into()).build();
    let gradient = Imitation::net().layers[0].weight.val().inner();
    let (_, state) = muon.step(LR, gradient.clone(), gradient.clone(), None);
    let momentum = state.unwrap().momentum();
    assert_eq!((momentum.dtype(), momentum.dims()), (DType::F32, [20, 20]));
    let expected = gradient.mul_scalar(0.1);
    let largest = expected.clone().abs().max().into_scalar::<f32>();
    let error = (momentum - expected).abs().max().into_scalar::<f32>();
    assert!(error > 0.0 && error < 0.008 * largest, "{error} of {largest}");
}
