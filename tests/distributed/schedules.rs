//! Schedules of a parameter that does not have a gradient in some steps: an expert without tokens,
//! under a momentum warm-up.

use std::ops::Range;

use burn::module::Module;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::store::ModuleRecord;
use distmuon::comm::World;
use distmuon::distributed::{DistMuonConfig, Gradients};
use distmuon::{Error, MuonConfig, Schedule, checkpoint};
use distmuon_testing::worlds::{Case, Folder, cases};

use crate::{Net, config, device, ranks};

pub const EVERYWHERE: &[Case] = cases![
    schedules_are_at_the_same_step_on_any_number_of_ranks,
    values_that_a_program_sets_are_those_of_schedules,
];

const STEPS: u64 = 8;
const SAVED: u64 = 5;

/// A configuration in which all scheduled values differ from step to step.
fn scheduled() -> DistMuonConfig {
    let config = config().with_gradients(Gradients::Averaged).with_bucket_mb(Some(0.002));
    let muon = MuonConfig {
        momentum: Schedule::constant(0.5).linear(STEPS as usize, 0.95).into(),
        weight_decay: Schedule::constant(0.0).linear(STEPS as usize, 0.4).into(),
        ..config.muon.clone()
    };
    config.with_muon(muon)
}

/// Gradients of a step. The first of three equal matrices does not have one in some steps, and the
/// experts do not have one before the run is saved.
fn gradients(net: &Net, step: u64) -> GradientsParams {
    let mut gradients = net.gradients(step);
    if step % 3 != 1 {
        gradients.remove::<2>(net.square[0].weight.id);
    }
    if step < SAVED + 1 {
        gradients.remove::<3>(net.experts.id);
    }
    gradients
}

fn on_ranks(world: &World, path: &std::path::Path, steps: Range<u64>) -> Result<Net, Error> {
    let mut net = Net::new(world.device());
    let mut optim = scheduled().init(world, &net)?;
    if steps.start > 0 {
        let step: u64;
        (net, optim, step) = optim.load(path, net)?;
        assert_eq!(step, steps.start);
    }
    for step in steps.clone() {
        let gradients = gradients(&net, step);
        net = optim.step(0.05, net, gradients)?;
    }
    if steps.end == SAVED {
        optim.save(path, &net, &SAVED)?;
    }
    Ok(net)
}

fn on_one_device(path: &std::path::Path, steps: Range<u64>) -> Vec<Vec<u8>> {
    let mut net = Net::new(&device());
    let mut optim = scheduled().muon.init(&net);
    if steps.start > 0 {
        (net, optim, _) = checkpoint::load::<_, u64, _>(path, net, optim).unwrap();
    }
    for step in steps {
        let gradients = gradients(&net, step);
        net = optim.step(0.05, net, gradients);
    }
    net.weights()
}

/// Trains with `DistMuon` on every rank, to which Burn passes one parameter after the other. Every
/// rank saves and loads its record.
fn by_parameter(world: &World) -> Result<Net, Error> {
    let mut net = Net::new(world.device());
    let mut optim = scheduled().per_parameter(world)?.init(&net)?;
    for step in 0..STEPS {
        if step == SAVED {
            let model = net.clone().into_record().into_bytes().expect("a valid record");
            let states = optim.to_record().into_bytes().expect("a valid record");
            net = Net::new(world.device());
            net = net.load_record(ModuleRecord::from_bytes(model).expect("a valid record"));
            let states = OptimizerRecord::from_bytes(states).expect("a valid record");
            optim = scheduled().per_parameter(world)?.init(&net)?.load_record(states);
        }
        let gradients = gradients(&net, step);
        net = optim.step(0.05, net, gradients);
    }
    Ok(net)
}

fn schedules_are_at_the_same_step_on_any_number_of_ranks() {
    let folder = Folder::create();
    let expected = on_one_device(folder.path(), 0..STEPS);
    for count in [1, 3] {
        let path = folder.path().join(format!("{count}.ckpt"));
        let run = |steps: Range<u64>| {
            ranks(count, |world| Ok(on_ranks(&world, &path, steps.clone())?.weights())).unwrap()
        };
        for weights in run(0..STEPS) {
            assert!(weights == expected, "{count} ranks");
        }
        run(0..SAVED);
        for weights in run(SAVED..STEPS) {
            assert!(weights == expected, "{count} ranks, saved and loaded");
        }
        if path.exists() {
            assert!(on_one_device(&path, SAVED..STEPS) == expected, "saved on {count} ranks");
        }
        for weights in ranks(count, |world| Ok(by_parameter(&world)?.weights())).unwrap() {
            assert!(weights == expected, "DistMuon on {count} ranks");
        }
    }
}

fn values_that_a_program_sets_are_those_of_schedules() {
    let MuonConfig { momentum, weight_decay, .. } = scheduled().muon;
    let train = |count: usize, config: &DistMuonConfig, sets: bool| {
        let run = ranks(count, |world| {
            let mut net = Net::new(world.device());
            let mut optim = config.init(&world, &net)?;
            for step in 0..STEPS {
                if sets {
                    optim.set_momentum(momentum.momentum.at(step as usize))?;
                    optim.set_weight_decay(weight_decay.rate().at(step as usize))?;
                }
                let gradients = net.gradients(step);
                net = optim.step(0.05, net, gradients)?;
            }
            Ok(net.weights())
        });
        run.unwrap()
    };
    let constant =
        MuonConfig { momentum: 0.5.into(), weight_decay: 0.0.into(), ..scheduled().muon };
    let constant = scheduled().with_muon(constant);
    let expected = &train(1, &scheduled(), false)[0];
    assert!(*expected != train(1, &constant, false)[0], "the schedules matter");
    for count in [1, 2, 4] {
        for weights in train(count, &constant, true) {
            assert!(weights == *expected, "{count} ranks");
        }
    }
}
