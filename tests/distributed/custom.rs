//! Optimizers of the user's, sharded by whole parameters: the bits of one device, the decisions of
//! all ranks, and checkpoints that continue on other numbers of ranks.

use burn::optim::{AdafactorConfig, GradientsParams, LambConfig};
use burn::tensor::{FloatDType, Tensor};
use distmuon::comm::World;
use distmuon::distributed::plan::BucketKind;
use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig, Gradients};
use distmuon::{Error, MuonConfig, Result, RoutingRule, checkpoint};
use distmuon_testing::worlds::{Case, Folder, cases};

use crate::{Net, config, device, ranks, ranks_here, trained};

pub const EVERYWHERE: &[Case] = cases![
    users_optimizers_give_the_bits_of_one_device_on_any_number_of_ranks,
    the_clipped_steps_of_users_optimizers_do_not_depend_on_the_ranks,
    a_bad_gradient_of_one_rank_keeps_users_optimizers_from_a_step_on_all,
    states_of_users_optimizers_continue_on_any_number_of_ranks,
];

pub const IN_PROCESS: &[Case] = cases![
    states_of_another_optimizer_are_rejected_on_all_ranks,
    optimizers_of_other_names_are_rejected_on_all_ranks,
];

/// Adafactor, whose steps depend on rows, columns and norms, and LAMB, whose steps depend on norms,
/// for parameters of one to three dimensions. Muon and AdamW update the others.
pub fn muon() -> MuonConfig {
    config()
        .muon
        .with_optimizer("adafactor", AdafactorConfig::new().build())
        .with_optimizer("lamb", LambConfig::new().build())
        .with_rule(RoutingRule::custom("embedding|head|experts", "adafactor"))
        .with_rule(RoutingRule::custom(r"^wide|norm\.gamma", "lamb"))
}

pub fn custom() -> DistMuonConfig {
    config().with_muon(muon()).with_bucket_mb(Some(0.002))
}

/// The weights after some steps on one device, as a Burn optimizer.
fn on_one_device(steps: u64) -> Vec<Vec<u8>> {
    let mut net = Net::new(&device());
    let mut optim = muon().init(&net);
    for step in 0..steps {
        let gradients = net.gradients(step);
        net = optim.step(0.01, net, gradients);
    }
    net.weights()
}

fn users_optimizers_give_the_bits_of_one_device_on_any_number_of_ranks() {
    let expected = on_one_device(4);
    assert_ne!(expected, trained(1, 4, &config()), "the optimizers differ");
    for count in [1, 2, 3, 4] {
        let averaged = custom().with_gradients(Gradients::Averaged);
        assert!(trained(count, 4, &averaged) == expected, "averaged, {count} ranks");
    }
    // The mean of equal gradients is exact.
    for count in [2, 4] {
        assert!(trained(count, 4, &custom()) == expected, "reduced, {count} ranks");
    }
    let owners = ranks(3, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = custom().init(&world, &net)?;
        let buckets = optim.plan().buckets().iter();
        let whole = buckets.filter(|bucket| bucket.kind == BucketKind::Whole);
        let whole = whole.flat_map(|bucket| bucket.parameters.clone());
        Ok(whole.map(|index| optim.plan().owner(index, 0)).collect::<Vec<_>>())
    });
    let mut owners = owners.unwrap().swap_remove(0);
    assert_eq!(owners.len(), 7);
    owners.sort_unstable();
    owners.dedup();
    assert_eq!(owners, [0, 1, 2], "every rank owns some of the parameters");
}

fn the_clipped_steps_of_users_optimizers_do_not_depend_on_the_ranks() {
    // LAMB does not depend on the size of all gradients, but on that of one step to the next.
    let clipped = custom().with_gradients(Gradients::Averaged).with_max_norm(Some(0.1));
    let expected = trained(1, 4, &clipped);
    assert_ne!(expected, on_one_device(4));
    for count in [2, 3, 4] {
        assert!(trained(count, 4, &clipped) == expected, "{count} ranks");
    }
}

fn a_bad_gradient_of_one_rank_keeps_users_optimizers_from_a_step_on_all() {
    let run = |spoil: fn(&World, &Net, &mut GradientsParams)| {
        let run = ranks(3, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = custom().init(&world, &net)?;
            for step in 0..4 {
                let mut gradients = net.gradients(step);
                if step == 2 {
                    spoil(&world, &net, &mut gradients);
                }
                net = optim.step(0.01, net, gradients)?;
            }
            Ok((net.weights(), optim.skipped_steps().read()))
        });
        let mut runs = run.unwrap();
        assert!(runs.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
        runs.swap_remove(0)
    };
    let (without, none) = run(|_, net, gradients| {
        gradients.remove::<2>(net.head.weight.id);
        gradients.remove::<2>(net.wide.weight.id);
    });
    assert!(none.is_empty(), "{none:?}");
    let (skipped, counts) = run(|world, net, gradients| {
        for param in [&net.head.weight, &net.wide.weight] {
            if world.rank() == 1 {
                let bad: Tensor<2> =
                    gradients.remove(param.id).expect("every parameter has a gradient");
                gradients.register(param.id, bad.mul_scalar(f32::NAN));
            }
        }
    });
    assert!(skipped == without, "as if there were no gradient");
    let counts: Vec<_> = counts.iter().map(|(path, count)| (path.as_str(), *count)).collect();
    assert_eq!(counts, [("head.weight", 1), ("wide.weight", 1)]);
}

/// A model and its optimizer, continued from a checkpoint if there is one.
pub fn train(
    world: &World,
    config: &DistMuonConfig,
    saved: Option<&std::path::Path>,
    steps: std::ops::Range<u64>,
) -> Result<(Net, DistModuleOptimizer)> {
    let mut net = world.broadcast(Net::new(world.device()))?;
    let mut optim = config.init(world, &net)?;
    if let Some(path) = saved {
        let step: u64;
        (net, optim, step) = checkpoint::load(path, net, optim)?;
        assert_eq!(step, steps.start);
    }
    for step in steps {
        let gradients = net.gradients(step);
        net = optim.step(0.01, net, gradients)?;
    }
    Ok((net, optim))
}

/// Burn reads the state of an optimizer in the default type of the device.
fn states_of_users_optimizers_in_another_type_than_the_default_are_rejected() {
    let state = ranks(2, |world| {
        let (net, optim) = train(&world, &custom(), None, 0..1)?;
        let loaded = custom().init(&world, &net)?.load_record(optim.to_record()?);
        Ok(loaded.map(|_| ()).unwrap_err().to_string())
    });
    let errors = state.unwrap();
    assert!(errors.iter().all(|error| error.contains("the device's default type")), "{errors:?}");
}

fn states_of_users_optimizers_continue_on_any_number_of_ranks() {
    if device().settings().float_dtype != FloatDType::F32 {
        return states_of_users_optimizers_in_another_type_than_the_default_are_rejected();
    }
    let folder = Folder::create();
    let path = |count: usize| folder.path().join(format!("{count}.ckpt"));
    let config = custom().with_gradients(Gradients::Averaged);
    let expected = on_one_device(6);
    for count in [1, 2, 3] {
        let saved = ranks(count, |world| {
            let (net, optim) = train(&world, &config, None, 0..3)?;
            checkpoint::save(path(count), &net, &optim, &3u64)
        });
        saved.unwrap();
    }
    for saved in [1, 2, 3] {
        for count in [1, 2, 4] {
            let run = ranks(count, |world| {
                Ok(train(&world, &config, Some(&path(saved)), 3..6)?.0.weights())
            });
            for weights in run.unwrap() {
                assert!(weights == expected, "saved on {saved}, loaded on {count}");
            }
        }
        let net = Net::new(&device());
        let optim = muon().init(&net);
        let (mut net, mut optim, step): (_, _, u64) =
            checkpoint::load(path(saved), net, optim).unwrap();
        for step in step..6 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients);
        }
        assert!(net.weights() == expected, "saved on {saved}, loaded without ranks");
    }
    // A record has the states on every rank.
    let run = ranks(3, |world| {
        let (net, optim) = train(&world, &config, None, 0..3)?;
        let record = optim.to_record()?;
        let mut optim = config.init(&world, &net)?.load_record(record)?;
        (3..6)
            .try_fold(net, |net, step| {
                let gradients = net.gradients(step);
                optim.step(0.01, net, gradients)
            })
            .map(|net| net.weights())
    });
    assert!(run.unwrap().iter().all(|weights| *weights == expected), "by a record");
}

fn states_of_another_optimizer_are_rejected_on_all_ranks() {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let saved = ranks_here(2, |world| {
        let (net, optim) = train(&world, &custom(), None, 0..1)?;
        optim.save(&path, &net, &1u64)
    });
    saved.unwrap();
    let adafactor = || AdafactorConfig::new().build();
    let lamb = || LambConfig::new().build();
    let others = [
        custom().muon.with_optimizer("lamb", adafactor()),
        custom().muon.with_optimizer("adafactor", lamb()),
        config().muon,
    ];
    for muon in others {
        let errors = ranks_here(2, |world| {
            let other = custom().with_muon(muon.clone());
            let loaded = train(&world, &other, Some(&path), 1..1);
            Ok(loaded.map(|_| ()).unwrap_err())
        });
        let errors = errors.unwrap();
        for error in errors {
            assert!(matches!(error, Error::OtherRun { .. }), "{error}");
            assert!(error.to_string().contains("optimizer state of `"), "{error}");
        }
    }
}

fn optimizers_of_other_names_are_rejected_on_all_ranks() {
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let name = ["adafactor", "lamb"][world.rank()];
        let muon = config()
            .muon
            .with_optimizer(name, LambConfig::new().build())
            .with_rule(RoutingRule::custom("head", name));
        let made = DistMuonConfig::new().with_muon(muon).init(&world, &net);
        Ok(made.map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        let Error::SettingsDiffer { rank: 1, setting, .. } = &error else { panic!("{error}") };
        assert_eq!(setting, "muon.optimizers");
    }
}
