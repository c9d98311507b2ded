//! Several parts together: skipped steps, missing states, and matrices of zeros.

use burn::optim::Optimizer;
use burn::tensor::{DType, Device, Tensor};
use distmuon::parts::{AdaMuon, EmaNesterov, Hyperball, Mars, Muown, Namo, NorMuon};
use distmuon::{DistMuonConfig, Error, MuonConfig, Result, World, checkpoint};
use distmuon_testing::combinations::{Net, combinations, routed, with_momentum};
use distmuon_testing::references::random;

use super::{plain, tensor};

const LR: f64 = 0.02;

fn device() -> Device {
    Device::default().autodiff()
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
        (Muown::new().into(), "magnitude"),
        (EmaNesterov::new(0.5.into()).into(), "average_step"),
    ] {
        let config = MuonConfig::new().with_weight_decay(0.0.into()).with_parts(vec![part]);
        let dist = DistMuonConfig::new().with_muon(routed(config));
        let error = World::threads([device()], |world| -> Result<()> {
            let net = Net::new(world.device());
            let optim = dist.init(&world, &net)?;
            optim.load::<_, u64>(&plain, net).map(|_| ())
        });
        let error = error.unwrap_err();
        assert!(matches!(error, Error::OtherRun { .. }), "{error}");
        let text = error.to_string();
        let missing = format!("`weight_stack`: its saved state does not have `{slot}`");
        assert!(text.contains(&missing), "{text}");
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
        let muon = with_momentum(config, 0.9.into()).build();
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
