//! Checkpoints that continue on other numbers of ranks, and bad checkpoints.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use burn::optim::{LambConfig, OptimizerRecord};
use distmuon::comm::World;
use distmuon::distributed::{DistModuleOptimizer, Gradients};
use distmuon::{Error, MuonConfig, Result, RoutingRule, checkpoint};
use distmuon_testing::watched::{counted, with_counted_values};
use distmuon_testing::worlds::{self, Case, Folder, cases};
use serde::{Serialize, Serializer};

use crate::{Net, config, device, loads_states, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![a_checkpoint_continues_bit_for_bit_on_any_number_of_ranks,];

pub const IN_PROCESS: &[Case] = cases![
    a_record_is_loaded_with_the_parameter_ids_of_its_rank,
    bad_checkpoints_are_rejected_on_all_ranks,
    ranks_that_load_different_files_are_rejected,
    ranks_that_load_different_records_are_rejected,
    damage_that_one_rank_reads_is_rejected_on_all_ranks,
    a_save_may_take_longer_than_the_deadline,
    a_save_sends_the_state_to_rank_0_only,
    states_of_users_optimizers_do_not_pass_through_rank_0s_connections,
    a_save_in_the_background_is_that_of_its_step_on_all_ranks,
];

fn a_checkpoint_continues_bit_for_bit_on_any_number_of_ranks() {
    let folder = Folder::create();
    let path = |count: usize| folder.path().join(format!("{count}.ckpt"));
    let config = config().with_gradients(Gradients::Averaged).with_bucket_mb(Some(0.002));
    let train = |world: &World, saved: Option<usize>, steps: std::ops::Range<u64>| {
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(world, &net)?;
        if let Some(count) = saved {
            let step: u64;
            (net, optim, step) = checkpoint::load(path(count), net, optim)?;
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
            let (net, optim) = train(&world, None, 0..5)?;
            checkpoint::save(path(count), &net, &optim, &5u64)
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
        // The single-device optimizer continues from the same file.
        let net = Net::new(&device());
        let optim = config.muon.init(&net);
        let (mut net, mut optim, step): (_, _, u64) =
            checkpoint::load(path(saved), net, optim).unwrap();
        for step in step..10 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients);
        }
        assert!(net.weights() == uninterrupted[0], "saved on {saved}, loaded without ranks");
    }
}

fn bad_checkpoints_are_rejected_on_all_ranks() {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let save = |path: std::path::PathBuf| {
        ranks_here(2, move |world| {
            let net = world.broadcast(Net::new(world.device()))?;
            let optim = config().init(&world, &net)?;
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
    let other = config().with_muon(MuonConfig::new().with_rule(RoutingRule::adamw(".")));
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = other.init(&world, &net)?;
        Ok(optim.load::<_, i32>(&path, net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(error.to_string().contains("make model and optimizer as they were"), "{error}");
    }
}

/// A model and its optimizer after some steps.
fn trained(world: &World, steps: u64) -> Result<(Net, DistModuleOptimizer)> {
    let mut net = world.broadcast(Net::new(world.device()))?;
    let mut optim = config().with_bucket_mb(Some(0.002)).init(world, &net)?;
    for step in 0..steps {
        let gradients = net.gradients(step);
        net = optim.step(0.01, net, gradients)?;
    }
    Ok((net, optim))
}

/// The errors of ranks, each of which loads its file.
fn load_errors(paths: &[&Path]) -> Vec<Error> {
    let errors = ranks_here(paths.len(), |world| {
        let (net, optim) = trained(&world, 0)?;
        Ok(optim.load::<_, u64>(paths[world.rank()], net).map(|_| ()).unwrap_err())
    });
    errors.unwrap()
}

fn ranks_that_load_different_files_are_rejected() {
    let folder = Folder::create();
    let paths = [1u64, 2].map(|steps| {
        let path = folder.path().join(format!("{steps}.ckpt"));
        ranks_here(2, |world| {
            let (net, optim) = trained(&world, steps)?;
            optim.save(&path, &net, &steps)
        })
        .unwrap();
        path
    });
    let [new, old] = [&*paths[1], &*paths[0]];
    for error in load_errors(&[new, old]) {
        let Error::CheckpointsDiffer { rank: 1, expected, got } = &error else { panic!("{error}") };
        assert!(expected.contains("2.ckpt") && expected.ends_with("progress 2"), "{error}");
        assert!(got.contains("1.ckpt") && got.ends_with("progress 1"), "{error}");
        assert!(error.to_string().contains("give all ranks copies of the same file"), "{error}");
    }
    for error in load_errors(&[new, new, old, old]) {
        assert!(matches!(&error, Error::CheckpointsDiffer { rank: 2, .. }), "{error}");
    }
    // Copies at different paths are one checkpoint.
    let copy = folder.path().join("copy.ckpt");
    std::fs::copy(new, &copy).unwrap();
    let loaded = ranks_here(2, |world| {
        let (net, optim) = trained(&world, 0)?;
        let path = if world.rank() == 0 { new } else { &*copy };
        let (net, _, progress): (_, _, u64) = optim.load(path, net)?;
        Ok((net.weights(), progress))
    });
    let loaded = loaded.unwrap();
    assert!(loaded[0] == loaded[1] && loaded[0].1 == 2);
}

fn ranks_that_load_different_records_are_rejected() {
    let records = [0, 1].map(|steps| {
        let records = ranks_here(1, |world| {
            let (_, optim) = trained(&world, steps)?;
            Ok(optim.to_record()?.into_bytes().expect("a record can be written").to_vec())
        });
        records.unwrap().swap_remove(0)
    });
    let errors = ranks_here(2, |world| {
        let (_, optim) = trained(&world, 0)?;
        let bytes = records[world.rank()].clone();
        let record = OptimizerRecord::from_bytes(burn::tensor::Bytes::from_bytes_vec(bytes));
        Ok(optim.load_record(record.expect("the bytes are a record")).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(matches!(&error, Error::CheckpointsDiffer { rank: 1, .. }), "{error}");
    }
}

/// The ranks read different tensors, so one rank may be the only reader of a damaged byte.
fn damage_that_one_rank_reads_is_rejected_on_all_ranks() {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let save = |world: World| {
        let (net, optim) = trained(&world, 1)?;
        optim.save(&path, &net, &1u64)
    };
    ranks_here(3, save).unwrap();
    let sound = std::fs::read(&path).unwrap();
    let damaged = folder.path().join("damaged.ckpt");
    // An odd stride reaches every tensor and the padding between tensors.
    for position in (0..sound.len()).step_by(997) {
        let mut bytes = sound.clone();
        bytes[position] ^= 4;
        std::fs::write(&damaged, bytes).unwrap();
        let errors = load_errors(&[&*damaged; 3]);
        let detected = errors.iter().filter(|error| matches!(error, Error::Checkpoint { .. }));
        assert!(detected.count() > 0, "byte {position}: {errors:?}");
        for error in &errors {
            assert!(error.to_string().contains("is damaged"), "byte {position}: {error}");
        }
    }
}

/// Progress that takes a given time to be written.
struct Slow(Duration);

impl Serialize for Slow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        std::thread::sleep(self.0);
        serializer.serialize_u64(1)
    }
}

fn a_save_may_take_longer_than_the_deadline() {
    let deadline = Duration::from_secs(3);
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let saved = worlds::ranks_here(deadline, 3, |world| {
        let (net, optim) = trained(&world, 1)?;
        optim.save(&path, &net, &Slow(2 * deadline))?;
        world.comm().barrier()
    });
    saved.unwrap();
    assert!(path.exists());
}

/// A save sends the state once, to the rank that writes.
fn a_save_sends_the_state_to_rank_0_only() {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let calls = Mutex::new(vec![]);
    let saved = ranks_here(3, |world| {
        let (net, _) = trained(&world, 0)?;
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let optim = config().with_bucket_mb(Some(0.002)).init(&world, &net)?;
        traffic.lock().unwrap().clear();
        optim.save(&path, &net, &1u64)?;
        let sent = traffic.lock().unwrap().clone();
        let sent = sent.into_iter().filter(|(_, bytes)| *bytes > 0);
        calls.lock().unwrap().extend(sent.map(|(collective, _)| (collective, world.rank())));
        Ok(())
    });
    saved.unwrap();
    let calls = calls.into_inner().unwrap();
    assert!(!calls.is_empty());
    for (collective, rank) in calls {
        assert!(collective == "gather" && rank != 0, "rank {rank}: {collective}");
    }
}

/// States of users' optimizers are messages of tensors, like all others: rank 0's connections carry
/// their names and shapes only.
fn states_of_users_optimizers_do_not_pass_through_rank_0s_connections() {
    if !loads_states() {
        return;
    }
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let muon = config().muon.with_optimizer("lamb", LambConfig::new().build());
    let muon = muon.with_rule(RoutingRule::custom(r"(embedding|head)\.weight", "lamb"));
    let config = config().with_muon(muon);
    // Two moments of either.
    let state = 2 * 21 * 37 * 4;
    let sent = ranks_here(3, |world| {
        let (world, values) = with_counted_values(&world);
        let net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(&world, &net)?;
        let gradients = net.gradients(1);
        let net = optim.step(0.01, net, gradients)?;
        values.lock().unwrap().clear();
        optim.save(&path, &net, &1u64)?;
        let saved = values.lock().unwrap().values().sum::<usize>();
        let (_, optim, _): (_, _, u64) = optim.load(&path, net)?;
        let loaded = values.lock().unwrap().values().sum::<usize>() - saved;
        let record = optim.to_record()?;
        let gathered = values.lock().unwrap().values().sum::<usize>() - saved - loaded;
        drop(record);
        Ok([saved, loaded, gathered])
    });
    for (rank, sent) in sent.unwrap().into_iter().enumerate() {
        println!("rank {rank}: {sent:?} bytes of values, a state is {state}");
        assert!(sent.iter().all(|bytes| *bytes < state), "rank {rank}: {sent:?} of {state}");
    }
}

/// Every rank draws the ids of its parameters, and the names in its record contain these ids.
fn a_record_is_loaded_with_the_parameter_ids_of_its_rank() {
    let runs = ranks_here(2, |world| {
        let (net, optim) = trained(&world, 2)?;
        let record = optim.to_record()?;
        let net_2 = Net::new(world.device());
        assert_ne!(net.wide.weight.id, net_2.wide.weight.id, "the models have different ids");
        let optim = config().init(&world, &net_2)?;
        let mut optim = optim.load_record(record)?;
        let gradients = net.gradients(7);
        Ok(optim.step(0.01, net, gradients)?.weights())
    });
    let runs = runs.unwrap();
    assert!(runs[0] == runs[1], "the ranks agree");
}

fn a_save_in_the_background_is_that_of_its_step_on_all_ranks() {
    let folder = Folder::create();
    let path = |name: &str| folder.path().join(name);
    let blocked = path("step-9");
    std::fs::create_dir_all(blocked.join("held")).unwrap();
    ranks(2, |world| {
        let (mut net, mut optim) = trained(&world, 2)?;
        let mut saver = checkpoint::Saver::new().with_keep_last(2);
        for step in 0..4 {
            checkpoint::save(path(&format!("now-{step}")), &net, &optim, &step)?;
            saver.save(path(&format!("later-{step}")), &net, &optim, &step)?;
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        saver.save(&blocked, &net, &optim, &9u64)?;
        // Rank 0 alone has the error, which the next save returns on all ranks.
        let next = saver.save(path("step-10"), &net, &optim, &10u64);
        let message = next.expect_err("the save before failed").to_string();
        assert!(message.contains("step-9"), "{message}");
        saver.save(path("step-10"), &net, &optim, &10u64)?;
        saver.wait()
    })
    .unwrap();
    for step in [2, 3] {
        let bytes = |name: &str| std::fs::read(path(&format!("{name}-{step}"))).unwrap();
        assert!(bytes("now") == bytes("later"), "step {step}");
    }
    assert!(!path("later-1").exists() && path("step-10").exists());
}
