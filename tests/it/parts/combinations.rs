//! Several parts together: on ranks, in checkpoints, and on matrices of zeros.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{DType, Device, Tensor};
use distmuon::distributed::Gradients;
use distmuon::parts::{
    AdaMuon, ColumnEquilibration, Hyperball, Mars, MaxNorm, Namo, NorMuon, Renormalization,
    RowEquilibration,
};
use distmuon::{
    DistMuonConfig, Error, LionConfig, MatrixLayout, MomentumConfig, MomentumForm, MuonConfig,
    Result, RoutingRule, Schedule, WeightDecay, World, checkpoint,
};
use distmuon_testing::models::{Fixed, assert_same_weights, gradients, values};
use distmuon_testing::references::random;

use super::{plain, tensor};

/// Combinations with all parts, kinds of decay and forms of momentum, and states of every extent.
fn combinations() -> Vec<(&'static str, MuonConfig)> {
    let corrected = MomentumConfig::new().with_bias_correction(true);
    let sum = MomentumConfig::new().with_form(MomentumForm::Sum).with_bias_correction(true);
    let warmup = MomentumConfig::from(Schedule::momentum_warmup(0.95, 3));
    vec![
        ("as in nanochat", {
            let parts = vec![
                RowEquilibration.into(),
                Renormalization::orthogonal().into(),
                NorMuon::new(0.9).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_weight_decay(WeightDecay::CautiousScaled(0.2.into()))
        }),
        ("second moments of elements", {
            let parts = vec![
                Mars::new(0.025).into(),
                AdaMuon::new(0.9).into(),
                Renormalization::rms(0.2).into(),
                MaxNorm::new(1.2).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_momentum(warmup)
                .with_weight_decay(WeightDecay::Coupled(0.1.into()))
        }),
        ("moments of matrices", {
            let parts = vec![
                ColumnEquilibration.into(),
                Hyperball::initial().into(),
                Namo::new(0.9).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_momentum(corrected)
                .with_weight_decay(0.0.into())
                .with_rest(LionConfig::new().with_weight_decay(0.1).into())
        }),
        ("moments of outputs", {
            let parts = vec![
                RowEquilibration.into(),
                ColumnEquilibration.into(),
                NorMuon::per_output(0.9).into(),
                Namo::new(0.9).into(),
                MaxNorm::new(1.2).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_momentum(sum)
                .with_weight_decay(WeightDecay::Independent(0.05.into()))
                .with_rest(LionConfig::new().into())
        }),
        ("a fixed norm", {
            let parts = vec![Hyperball::fixed(1.5).into(), NorMuon::new(0.5).into()];
            MuonConfig::new().with_parts(parts).with_weight_decay(WeightDecay::Cautious(0.3.into()))
        }),
        ("no parts", MuonConfig::new().with_weight_decay(WeightDecay::SquaredRate(50.0.into()))),
    ]
}

/// Matrices of one shape in several parameters, a matrix of two blocks, a stack of matrices, and
/// for the rest a vector that every rank updates whole and a table that is cut among ranks.
#[derive(Module, Debug)]
struct Net {
    weights: Vec<Param<Tensor<2>>>,
    weight_stack: Param<Tensor<3>>,
    bias: Param<Tensor<1>>,
    table: Param<Tensor<2>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let ones = |shape: [usize; 2]| {
            Param::from_tensor(Tensor::<2>::ones(shape, (device, DType::F32)).require_grad())
        };
        let stack = Tensor::<3>::ones([3, 6, 10], (device, DType::F32));
        let bias = Tensor::<1>::ones([5], (device, DType::F32));
        let net = Self {
            weights: vec![ones([6, 10]), ones([10, 6]), ones([6, 10]), ones([7, 7]), ones([6, 14])],
            weight_stack: Param::from_tensor(stack.require_grad()),
            bias: Param::from_tensor(bias.require_grad()),
            table: ones([9, 4]),
        };
        net.map(&mut Fixed::new(5))
    }

    /// Gradients of a step. One of the second step is not finite.
    fn gradients(&self, step: u64) -> GradientsParams {
        let mut gradients = gradients(self, step);
        if step == 1 {
            let id = self.weights[2].id;
            let gradient = gradients.remove::<2>(id).expect("the matrix has a gradient");
            gradients.register(id, gradient.mul_scalar(f32::NAN));
        }
        gradients
    }
}

/// A configuration with rules for a [`Net`].
fn routed(config: MuonConfig) -> MuonConfig {
    config
        .with_rule(RoutingRule::muon("weights"))
        .with_rule(RoutingRule::muon(r"weights\.2").layout(MatrixLayout::OutIn))
        .with_rule(RoutingRule::muon(r"weights\.4").split([10, 4]))
        .with_rule(RoutingRule::muon("weight_stack").batch())
        .with_rule(RoutingRule::adamw("table"))
}

const STEPS: u64 = 4;
const LR: f64 = 0.02;

fn device() -> Device {
    Device::default().autodiff()
}

/// Ranks in small buckets.
fn distributed(config: &MuonConfig) -> DistMuonConfig {
    DistMuonConfig::new()
        .with_muon(config.clone())
        .with_bucket_mb(Some(0.0005))
        .with_small_elements(8)
}

/// The weights after all steps of Burn's optimizer of single parameters.
fn by_parameter(config: &MuonConfig) -> Vec<f32> {
    let mut net = Net::new(&device());
    let mut optim = config.init(&net);
    for step in 0..STEPS {
        let gradients = net.gradients(step);
        net = optim.step(LR, net, gradients);
    }
    values(&net)
}

#[test]
fn parts_are_exact_on_any_number_of_ranks() {
    for (name, config) in combinations() {
        let config = routed(config);
        let expected = by_parameter(&config);
        assert!(expected.iter().all(|value| value.is_finite()), "{name}");
        for count in [1, 2, 3, 4, 5] {
            // The mean of five equal gradients may differ from them in the last digit.
            let gradients = if count == 5 { Gradients::Averaged } else { Gradients::PerRank };
            let dist = distributed(&config).with_gradients(gradients);
            let trained = World::threads(vec![device(); count], |world| -> Result<_> {
                let mut net = Net::new(world.device());
                let mut optim = dist.init(&world, &net)?;
                for step in 0..STEPS {
                    let gradients = net.gradients(step);
                    net = optim.step(LR, net, gradients)?;
                }
                Ok((values(&net), optim.skipped_steps().read()))
            });
            for (actual, skipped) in trained.unwrap() {
                assert_same_weights(&format!("{name}, {count} ranks"), &actual, &expected);
                assert_eq!(skipped, [("weights.2".to_owned(), 1)].into());
            }
        }
    }
}

/// The weights after all steps on ranks, from a checkpoint if there is one to load, or after two
/// steps if there is one to save.
fn on_ranks(
    config: &MuonConfig,
    count: usize,
    save: Option<&std::path::Path>,
    load: Option<&std::path::Path>,
) -> Vec<f32> {
    let dist = distributed(config);
    let trained = World::threads(vec![device(); count], |world| -> Result<_> {
        let mut net = Net::new(world.device());
        let mut optim = dist.init(&world, &net)?;
        let mut start = 0;
        if let Some(path) = load {
            (net, optim, start) = optim.load::<_, u64>(path, net)?;
        }
        let end = if save.is_some() { 2 } else { STEPS };
        for step in start..end {
            let gradients = net.gradients(step);
            net = optim.step(LR, net, gradients)?;
        }
        if let Some(path) = save {
            optim.save(path, &net, &end)?;
        }
        Ok(values(&net))
    });
    trained.unwrap().swap_remove(0)
}

/// Saves after two steps with one optimizer, and continues with another.
#[test]
fn checkpoints_of_parts_continue_on_any_number_of_ranks() {
    for (name, config) in combinations() {
        let config = routed(config);
        let expected = by_parameter(&config);
        let folder = tempfile::tempdir().unwrap();
        let [saved, single] = ["ranks", "single"].map(|name| folder.path().join(name));
        on_ranks(&config, 3, Some(&saved), None);
        for count in [1, 2, 4] {
            let actual = on_ranks(&config, count, None, Some(&saved));
            assert_same_weights(&format!("{name}, 3 ranks to {count}"), &actual, &expected);
        }

        let net = Net::new(&device());
        let optim = config.init(&net);
        let (mut net, mut optim, start) =
            checkpoint::load::<_, u64, _>(&saved, net, optim).unwrap();
        assert_eq!(start, 2);
        checkpoint::save(&single, &net, &optim, &start).unwrap();
        for step in start..STEPS {
            let gradients = net.gradients(step);
            net = optim.step(LR, net, gradients);
        }
        let case = format!("{name}, ranks to a single device");
        assert_same_weights(&case, &values(&net), &expected);
        let case = format!("{name}, a single device to ranks");
        assert_same_weights(&case, &on_ranks(&config, 2, None, Some(&single)), &expected);
    }
}

/// The state of every part has to be in a checkpoint that its configuration continues from.
#[test]
fn checkpoints_without_the_state_of_a_part_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    let net = Net::new(&device());
    let mut optim = routed(MuonConfig::new().with_weight_decay(0.0.into())).init(&net);
    let gradients = net.gradients(0);
    let net = optim.step(LR, net, gradients);
    checkpoint::save(&plain, &net, &optim, &1u64).unwrap();
    for (part, slot) in [
        (NorMuon::new(0.9).into(), "second_moment"),
        (AdaMuon::new(0.9).into(), "element_moment"),
        (Namo::new(0.9).into(), "gradient_norm"),
        (Mars::new(0.025).into(), "previous_gradient"),
        (Hyperball::initial().into(), "radius"),
    ] {
        let config = MuonConfig::new().with_weight_decay(0.0.into()).with_parts(vec![part]);
        let dist = DistMuonConfig::new().with_muon(routed(config));
        let error = World::threads([device()], |world| -> Result<()> {
            let net = Net::new(world.device());
            let optim = dist.init(&world, &net)?;
            optim.load::<_, u64>(&plain, net).map(|_| ())
        });
        let error = error.unwrap_err();
        let Error::Parameter { parameter, reason, .. } = &error else { panic!("{error}") };
        assert!(parameter.starts_with("weight") && reason.contains(slot), "{error}");
    }
}

/// A gradient that is not finite changes neither the parameter nor the state of a part, also in the
/// first step.
#[test]
fn skipped_steps_leave_no_trace() {
    let start = tensor(&random(6, 10, 1));
    let grads = [2, 3].map(|seed| tensor(&random(6, 10, seed)));
    for (name, config) in combinations() {
        // Skipped steps count in schedules.
        let momentum = config.momentum.clone().with_momentum(0.9.into());
        let muon = config.with_momentum(momentum).build();
        let run = |grads: Vec<Tensor<2>>| {
            let (mut value, mut state) = (start.clone(), None);
            for grad in grads {
                (value, state) = muon.step(LR, value, grad, state);
            }
            value.into_data()
        };
        let expected = run(grads.to_vec());
        for skipped in 0..=2 {
            let mut with_skipped = grads.to_vec();
            with_skipped.insert(skipped, start.clone().mul_scalar(f32::NAN));
            assert_eq!(run(with_skipped), expected, "{name}, {skipped}");
        }
    }
}

/// Gradients before a projection that starts at zero are such matrices.
#[test]
fn matrices_of_zeros_stay_finite_with_all_parts() {
    for (name, config) in combinations() {
        let parts = config.parts;
        for size in [[8, 8], [16, 16], [64, 32]] {
            let muon = plain().with_parts(parts.clone()).with_momentum(config.momentum.clone());
            let muon = muon.build();
            for start in [0.0, 1.0] {
                let start = Tensor::<2>::full(size, start, (&Device::default(), DType::F32));
                let (after, state) = muon.step(0.1, start.clone(), start.zeros_like(), None);
                let limit = start.clone().abs().max().into_scalar::<f32>() * (1.0 + 1e-5);
                let largest = after.clone().abs().max().into_scalar::<f32>();
                assert!(largest <= limit, "{name} {size:?}: {largest}");
                for tiny in [1e-30, 1.0] {
                    let grad = tensor(&random(size[0], size[1], 3)).mul_scalar(tiny);
                    let (after, state) = muon.step(0.1, after.clone(), grad, state.clone());
                    let largest = after.abs().max().into_scalar::<f32>();
                    assert!(largest <= limit + 1.0, "{name} {size:?}, {tiny}: {largest}");
                    assert_eq!(state.unwrap().skipped().into_scalar::<f32>(), 0.0, "{name}");
                }
            }
        }
    }
}
