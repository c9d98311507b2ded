//! Checkpoints that move between numbers of ranks, and bad ones.

use distmuon::dist::{Gradients, World};
use distmuon::{Error, MuonConfig, Rule};

use crate::worlds::{Case, Folder, cases};
use crate::{Net, config, device, ranks, ranks_here};

pub const SOUND: &[Case] = cases![a_checkpoint_moves_between_numbers_of_ranks,];

pub const OTHERS: &[Case] = cases![bad_checkpoints_are_refused_on_all_ranks,];

fn a_checkpoint_moves_between_numbers_of_ranks() {
    let folder = Folder::new();
    let path = |count: usize| folder.path().join(format!("{count}.ckpt"));
    let config = config().with_gradients(Gradients::Averaged).with_bucket_mb(0.002);
    let train = |world: &World, saved: Option<usize>, steps: std::ops::Range<u64>| {
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(world, &net)?;
        if let Some(count) = saved {
            let step: u64;
            (net, optim, step) = optim.load(path(count), net)?;
            assert_eq!(step, steps.start);
        }
        for step in steps {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok::<_, Error>((net, optim))
    };
    let uninterrupted = ranks(1, |world| Ok(train(&world, None, 0..10)?.0.weights())).unwrap();
    for count in [1, 2, 3, 4] {
        ranks(count, |world| {
            let (net, mut optim) = train(&world, None, 0..5)?;
            optim.save(path(count), &net, &5u64)
        })
        .unwrap();
    }
    for saved in [1, 2, 3, 4] {
        for count in [1, 2, 3, 4] {
            let run = ranks(count, |world| Ok(train(&world, Some(saved), 5..10)?.0.weights()));
            for weights in run.unwrap() {
                assert!(weights == uninterrupted[0], "saved on {saved}, loaded on {count}");
            }
        }
        // The single-device optimizer goes on from the same file.
        let net = Net::new(&device());
        let optim = config.muon.init(&net);
        let (mut net, mut optim, step): (_, _, u64) =
            distmuon::checkpoint::load(path(saved), net, optim).unwrap();
        for step in step..10 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients);
        }
        assert!(net.weights() == uninterrupted[0], "saved on {saved}, loaded without ranks");
    }
}

fn bad_checkpoints_are_refused_on_all_ranks() {
    let folder = Folder::new();
    let path = folder.path().join("run.ckpt");
    let save = |path: std::path::PathBuf| {
        ranks_here(2, move |world| {
            let net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().init(&world, &net)?;
            Ok(optim.save(&path, &net, &0).map_err(|error| error.to_string()))
        })
        .unwrap()
    };
    assert_eq!(save(path.clone()), [Ok(()), Ok(())]);
    let nowhere = save(folder.path().join("no/such/folder"));
    assert!(
        nowhere.iter().all(|saved| saved.as_ref().is_err_and(|e| e.contains("no/such/folder")))
    );

    let before = std::fs::read(&path).unwrap();
    let truncated = folder.path().join("truncated.ckpt");
    std::fs::write(&truncated, &before[..before.len() / 2]).unwrap();
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = config().init(&world, &net)?;
        Ok(optim.load::<_, i32>(&truncated, net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    }
    // States of another rule.
    let other = config().with_muon(MuonConfig::new().with_rule(Rule::adamw(".")));
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = other.init(&world, &net)?;
        Ok(optim.load::<_, i32>(&path, net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(error.to_string().contains("configure the optimizer as it was"), "{error}");
    }
}
