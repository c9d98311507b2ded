//! Parts of the update together: the weights of one device on any number of ranks, and checkpoints
//! that continue on other numbers of ranks.

use std::path::Path;

use burn::optim::ModuleOptimizer;
use distmuon::distributed::{DistMuonConfig, Gradients};
use distmuon::{MuonConfig, checkpoint};
use distmuon_testing::combinations::{Net, combinations, routed};
use distmuon_testing::models::{assert_same_weights, values};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::{device, ranks};

pub const EVERYWHERE: &[Case] = cases![
    parts_are_exact_on_any_number_of_ranks,
    checkpoints_of_parts_continue_on_any_number_of_ranks,
];

pub const IN_PROCESS: &[Case] =
    cases![checkpoints_of_parts_continue_on_one_device_and_return_to_ranks,];

const STEPS: u64 = 4;
const LR: f64 = 0.02;

/// Ranks in small buckets.
fn distributed(config: &MuonConfig) -> DistMuonConfig {
    DistMuonConfig::new()
        .with_muon(config.clone())
        .with_bucket_mb(Some(0.0005))
        .with_small_elements(8)
}

/// The weights after the steps of Burn's optimizer of single parameters from one on.
fn by_parameter(mut net: Net, mut optim: ModuleOptimizer, start: u64) -> Vec<f32> {
    for step in start..STEPS {
        let gradients = net.gradients(step);
        net = optim.step(LR, net, gradients);
    }
    values(&net)
}

/// The weights after all steps on one device.
fn expected(config: &MuonConfig) -> Vec<f32> {
    let net = Net::new(&device());
    let optim = config.init(&net);
    by_parameter(net, optim, 0)
}

fn parts_are_exact_on_any_number_of_ranks() {
    for (name, config) in combinations() {
        let config = routed(config);
        let expected = expected(&config);
        assert!(expected.iter().all(|value| value.is_finite()), "{name}");
        for count in [1, 2, 3, 4, 5].into_iter().filter(worlds::has) {
            // The mean of five equal gradients may differ from them in the last digit.
            let gradients = if count == 5 { Gradients::Averaged } else { Gradients::PerRank };
            let dist = distributed(&config).with_gradients(gradients);
            let trained = ranks(count, |world| {
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

/// Saves after two steps on ranks.
fn save(config: &MuonConfig, count: usize, path: &Path) {
    let dist = distributed(config);
    let saved = ranks(count, |world| {
        let mut net = Net::new(world.device());
        let mut optim = dist.init(&world, &net)?;
        for step in 0..2 {
            let gradients = net.gradients(step);
            net = optim.step(LR, net, gradients)?;
        }
        optim.save(path, &net, &2u64)
    });
    saved.unwrap();
}

/// The weights after all steps on ranks, of which the first ones are in a checkpoint.
fn continued(config: &MuonConfig, count: usize, path: &Path) -> Vec<Vec<f32>> {
    let dist = distributed(config);
    let trained = ranks(count, |world| {
        let net = Net::new(world.device());
        let optim = dist.init(&world, &net)?;
        let (mut net, mut optim, start) = optim.load::<_, u64>(path, net)?;
        for step in start..STEPS {
            let gradients = net.gradients(step);
            net = optim.step(LR, net, gradients)?;
        }
        Ok(values(&net))
    });
    trained.unwrap()
}

fn checkpoints_of_parts_continue_on_any_number_of_ranks() {
    for (name, config) in combinations() {
        let config = routed(config);
        let expected = expected(&config);
        let folder = Folder::create();
        let path = folder.path().join("run");
        save(&config, 3, &path);
        for count in [1, 2, 4] {
            for actual in continued(&config, count, &path) {
                assert_same_weights(&format!("{name}, 3 ranks to {count}"), &actual, &expected);
            }
        }
    }
}

fn checkpoints_of_parts_continue_on_one_device_and_return_to_ranks() {
    for (name, config) in combinations() {
        let config = routed(config);
        let expected = expected(&config);
        let folder = Folder::create();
        let [on_ranks, single] = ["ranks", "single"].map(|name| folder.path().join(name));
        save(&config, 3, &on_ranks);

        let net = Net::new(&device());
        let optim = config.init(&net);
        let (net, optim, start) = checkpoint::load::<_, u64, _>(&on_ranks, net, optim).unwrap();
        assert_eq!(start, 2);
        checkpoint::save(&single, &net, &optim, &start).unwrap();
        let case = format!("{name}, ranks to a single device");
        assert_same_weights(&case, &by_parameter(net, optim, start), &expected);
        for actual in continued(&config, 2, &single) {
            let case = format!("{name}, a single device to ranks");
            assert_same_weights(&case, &actual, &expected);
        }
    }
}
