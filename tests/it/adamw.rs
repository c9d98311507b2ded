//! AdamW with cautious weight decay, and with AMSGrad.

use burn::module::Module;
use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::{DType, Device};
use distmuon::{AdamWConfig, DistMuonConfig, MuonConfig, Result, RoutingRule, World, checkpoint};
use distmuon_testing::models::{self, Fixed, assert_same_weights, largest_difference, values};

use super::extremes::Net;

const STEPS: u64 = 6;
const LR: f64 = 0.01;

fn device() -> Device {
    Device::default().autodiff()
}

/// Parameters of AdamW's alone.
fn new_net(device: &Device) -> Net {
    Net::new(DType::F32, [9, 4], device).map(&mut Fixed::new(6))
}

/// The gradients of a step. The first are the largest by far, which AMSGrad remembers. The mean
/// over ranks is exact.
fn gradients(net: &Net, step: u64) -> GradientsParams {
    let mut all = models::gradients(net, step);
    let scale = if step == 0 { 8.0 } else { 1.0 };
    let mut scaled = GradientsParams::new();
    scaled.register(net.matrix.id, all.remove::<2>(net.matrix.id).unwrap() * scale);
    scaled.register(net.vector.id, all.remove::<1>(net.vector.id).unwrap() * scale);
    scaled
}

/// AdamW with a decay that shows, and the settings in question.
fn adamw(cautious: bool, amsgrad: bool) -> AdamWConfig {
    AdamWConfig::new()
        .with_weight_decay(2.0)
        .with_cautious_weight_decay(cautious)
        .with_amsgrad(amsgrad)
}

fn config(adamw: AdamWConfig) -> MuonConfig {
    MuonConfig::new().with_adamw(adamw).with_rule(RoutingRule::adamw("matrix"))
}

const ALL: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

#[test]
fn steps_are_those_of_burns_adamw() {
    let mut ends = vec![];
    for (cautious, amsgrad) in ALL {
        let burns = BurnAdamWConfig::new()
            .with_beta_2(0.95)
            .with_epsilon(1e-8)
            .with_weight_decay(2.0)
            .with_cautious_weight_decay(cautious)
            .with_amsgrad(amsgrad);
        let trained = |optim: &mut burn::optim::ModuleOptimizer| {
            let mut net = new_net(&device());
            for step in 0..STEPS {
                let grads = gradients(&net, step);
                net = optim.step(LR, net, grads);
            }
            values(&net)
        };
        let expected = trained(&mut burns.init());
        let actual = trained(&mut config(adamw(cautious, amsgrad)).init(&new_net(&device())));
        let difference = largest_difference(&expected, &actual);
        assert!(difference < 2e-6, "{cautious} {amsgrad}: {difference}");
        ends.push(actual);
    }
    // Every setting changes the steps.
    for (index, end) in ends.iter().enumerate() {
        for other in &ends[..index] {
            assert!(largest_difference(end, other) > 1e-3);
        }
    }
}

#[test]
fn states_are_those_of_ranks_and_of_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    for (cautious, amsgrad) in ALL {
        let config = config(adamw(cautious, amsgrad));
        let single = folder.path().join(format!("{cautious}-{amsgrad}"));
        let mut net = new_net(&device());
        let mut optim = config.init(&net);
        for step in 0..STEPS {
            if step == 2 {
                checkpoint::save(&single, &net, &optim, &step).unwrap();
            }
            let grads = gradients(&net, step);
            net = optim.step(LR, net, grads);
        }
        let expected = values(&net);
        for count in [1, 2, 3] {
            for load in [false, true] {
                let dist = DistMuonConfig::new().with_muon(config.clone());
                let trained = World::threads(vec![device(); count], |world| -> Result<_> {
                    let mut net = new_net(world.device());
                    let mut optim = dist.init(&world, &net)?;
                    let mut start = 0;
                    if load {
                        (net, optim, start) = optim.load::<_, u64>(&single, net)?;
                    }
                    for step in start..STEPS {
                        let grads = gradients(&net, step);
                        net = optim.step(LR, net, grads)?;
                    }
                    Ok(values(&net))
                });
                for actual in trained.unwrap() {
                    let name = format!("{cautious} {amsgrad} on {count} ranks, {load}");
                    assert_same_weights(&name, &actual, &expected);
                }
            }
        }
    }
}

/// The third state of AMSGrad is not dropped in silence, and not made up.
#[test]
fn a_checkpoint_of_the_other_setting_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    for amsgrad in [false, true] {
        let path = folder.path().join(format!("{amsgrad}"));
        let world = World::alone(device());
        let dist = |amsgrad| DistMuonConfig::new().with_muon(config(adamw(false, amsgrad)));
        let net = new_net(&device());
        let mut optim = dist(amsgrad).init(&world, &net).unwrap();
        let grads = gradients(&net, 0);
        let net = optim.step(LR, net, grads).unwrap();
        optim.save(&path, &net, &0).unwrap();
        let other = dist(!amsgrad).init(&world, &net).unwrap();
        let error = other.load::<_, u64>(&path, net).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("max_moment_2"), "{error}");
    }
}
