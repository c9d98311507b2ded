//! Checkpoints to which every rank writes a part: folders that continue on other numbers of ranks,
//! and bad ones.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Int, Tensor};
use distmuon::Result;
use distmuon::checkpoint::{self, Saver};
use distmuon::comm::World;
use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig, Gradients, Layout};
use distmuon_testing::watched::counted;
use distmuon_testing::worlds::{Case, Folder, cases};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::custom::{self, custom};
use crate::{Net, config, device, loads_states, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![parts_continue_bit_for_bit_on_any_number_of_ranks,];

pub const IN_PROCESS: &[Case] = cases![
    every_rank_writes_its_share,
    every_rank_writes_the_momentum_that_it_owns,
    owned_parameters_are_written_by_their_owners,
    a_checkpoint_without_a_part_is_not_whole,
    folders_of_version_1_are_loaded,
    damaged_parts_are_rejected,
    parts_of_other_saves_are_rejected,
    a_rank_that_cannot_write_ends_the_save_on_all_ranks,
    an_interrupted_save_leaves_the_checkpoint_before,
    a_part_that_does_not_come_is_named,
    the_last_folders_are_kept_and_the_latest_is_found,
    files_that_no_save_wrote_stay,
    the_index_of_another_program_is_not_replaced,
    rank_0_writes_what_the_ranks_have_differently,
    a_failed_save_is_one_error,
    a_refused_save_makes_no_folder,
];

/// A model and its optimizer, new or of a checkpoint, after some steps.
fn train(
    world: &World,
    from: Option<&Path>,
    steps: Range<u64>,
) -> Result<(Net, DistModuleOptimizer)> {
    custom::train(world, &custom().with_gradients(Gradients::Averaged), from, steps)
}

/// Saves in parts, and returns once the checkpoint is complete.
fn save<T: Serialize>(world: &World, path: &Path, steps: u64, progress: &T) -> Result<()> {
    save_run(world, path, train(world, None, 0..steps)?, progress)
}

fn save_run<T: Serialize>(
    world: &World,
    path: &Path,
    (net, optim): (Net, DistModuleOptimizer),
    progress: &T,
) -> Result<()> {
    let mut saver = Saver::new().with_parts().with_patience(Duration::from_secs(20));
    saver.save(path, &net, &optim, progress)?;
    let saved = saver.wait();
    // Rank 0 completes the folder.
    world.comm().barrier()?;
    saved
}

/// A checkpoint that three ranks have saved after some steps, which are its progress.
fn saved(folder: &Folder, name: &str, steps: u64) -> PathBuf {
    let path = folder.path().join(name);
    ranks_here(3, |world| save(&world, &path, steps, &steps)).unwrap();
    path
}

/// The files of a checkpoint: its parts in the order of their ranks, and its index.
fn files(path: &Path) -> (Vec<PathBuf>, PathBuf) {
    let files = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let (index, mut parts): (Vec<_>, Vec<_>) =
        files.partition(|path| path.extension().is_some_and(|extension| extension == "json"));
    parts.sort();
    let [index] = &index[..] else { panic!("{index:?}") };
    (parts, index.clone())
}

/// The errors of the ranks that load a checkpoint.
fn load_errors(path: &Path) -> Vec<String> {
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = custom().init(&world, &net)?;
        let loaded = optim.load::<_, u64>(path, net).map(|_| ());
        Ok(loaded.expect_err("the checkpoint is bad").to_string())
    });
    errors.unwrap()
}

fn parts_continue_bit_for_bit_on_any_number_of_ranks() {
    if !loads_states() {
        return;
    }
    // AdamW's parameters are cut into rows, and those of users' optimizers are whole.
    for config in [config(), custom()] {
        parts_continue(&config.with_gradients(Gradients::Averaged));
    }
}

fn parts_continue(config: &DistMuonConfig) {
    let folder = Folder::create();
    let path = |count: usize| folder.path().join(format!("{count}.parts"));
    let train = |world: &World, from: Option<&Path>, steps: Range<u64>| {
        custom::train(world, config, from, steps)
    };
    let weights = |count: usize, from: Option<&Path>, steps: Range<u64>| {
        ranks(count, |world| Ok(train(&world, from, steps.clone())?.0.weights())).unwrap()
    };
    let uninterrupted = weights(1, None, 0..8).swap_remove(0);
    for saved in [1, 2, 3, 4] {
        ranks(saved, |world| save_run(&world, &path(saved), train(&world, None, 0..5)?, &5u64))
            .unwrap();
        for count in [1, 2, 3, 4] {
            for weights in weights(count, Some(&path(saved)), 5..8) {
                assert!(weights == uninterrupted, "saved on {saved}, loaded on {count}");
            }
        }
        let net = Net::new(&device());
        let optim = config.muon.init(&net);
        let (mut net, mut optim, step): (_, _, u64) =
            checkpoint::load(path(saved), net, optim).unwrap();
        let alone = checkpoint::load_weights(path(saved), Net::new(&device())).unwrap();
        assert!(alone.weights() == net.weights());
        for step in step..8 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients);
        }
        assert!(net.weights() == uninterrupted, "saved on {saved}, loaded without ranks");
    }
}

/// The tensors of a part: the sections of its index, as JSON, by their names.
fn sections(part: &Path) -> BTreeMap<String, Value> {
    let bytes = fs::read(part).unwrap();
    let (_, footer) = bytes.split_at(bytes.len() - 24);
    let length = u64::from_le_bytes(*footer.first_chunk().unwrap()) as usize;
    let index: Value = serde_json::from_slice(&bytes[bytes.len() - 24 - length..][..length])
        .expect("an index before the footer");
    let sections = index["tensors"].as_array().unwrap().iter();
    sections.map(|one| (one["name"].as_str().unwrap().to_owned(), one.clone())).collect()
}

/// The bytes that each rank sends in a save in parts, and the paths and owners of the matrices.
fn sent(
    count: usize,
    path: &Path,
    layout: impl Fn(&World) -> Layout + Sync,
    config: &DistMuonConfig,
) -> Vec<(usize, Vec<(String, usize)>)> {
    let sent = ranks_here(count, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let (net, optim) = config.start(layout(&world), net)?;
        traffic.lock().unwrap().clear();
        let mut saver = Saver::new().with_parts();
        saver.save(path, &net, &optim, &1u64)?;
        saver.wait()?;
        let sent = traffic.lock().unwrap().values().sum::<usize>();
        let plan = optim.plan();
        let owned = plan.parameters().iter().enumerate().filter(|(_, one)| one.matrices() == 1);
        let owned = owned.map(|(index, one)| (one.path.clone(), plan.owner(index, 0)));
        Ok((sent, owned.collect()))
    });
    sent.unwrap()
}

/// No state is sent, and the file of each rank has what it owns.
fn every_rank_writes_the_momentum_that_it_owns() {
    let folder = Folder::create();
    for count in [2, 3] {
        let path = folder.path().join(format!("{count}"));
        let runs = sent(count, &path, |world| world.into(), &config());
        assert!(runs.iter().all(|(sent, _)| *sent == 0), "{runs:?}");
        let (parts, _) = files(&path);
        let sections: Vec<_> = parts.iter().map(|part| sections(part)).collect();
        let id = |path: &str| {
            let mut models = sections.iter().filter_map(|one| one.get(&format!("model.{path}")));
            models.next().expect("a part has the parameter")["id"].as_u64().unwrap()
        };
        let (_, matrices) = &runs[0];
        assert!(matrices.len() > count, "{matrices:?}");
        for (path, owner) in matrices {
            let name = format!("optimizer.{}.momentum", id(path));
            let has: Vec<_> =
                (0..count).filter(|rank| sections[*rank].contains_key(&name)).collect();
            assert_eq!(has, [*owner], "{path}");
            assert!(sections[*owner][&name].get("excerpt").is_none(), "{path}");
        }
        // The rows of AdamW's parameters are in the files of the ranks that have them.
        let mut parts_of: BTreeMap<&str, usize> = BTreeMap::new();
        for section in sections.iter().flatten().filter(|(_, one)| one.get("excerpt").is_some()) {
            *parts_of.entry(section.0).or_default() += 1;
        }
        // On two ranks, the cut lies between two of them.
        assert_eq!(parts_of.is_empty(), count == 2, "{parts_of:?}");
        assert!(parts_of.values().all(|parts| *parts > 1), "{parts_of:?}");
    }
}

/// Values that have one owner are not sent either.
fn owned_parameters_are_written_by_their_owners() {
    let folder = Folder::create();
    for count in [2, 3] {
        let path = folder.path().join(format!("{count}"));
        let owned = |world: &World| Layout::from(world).owned("dp").with_small_elements(1);
        let runs = sent(count, &path, owned, &config());
        let runs: Vec<usize> = runs.into_iter().map(|(sent, _)| sent).collect();
        let whole = folder.path().join(format!("{count}.bpk"));
        ranks_here(count, |world| {
            let net = world.broadcast(Net::new(world.device()))?;
            let (net, optim) = config().start(owned(&world), net)?;
            checkpoint::save(&whole, &net, &optim, &1u64)
        })
        .unwrap();
        let bytes = fs::metadata(&whole).unwrap().len() as usize;
        // Only the rows of the three parameters that are updated element by element.
        assert!(runs.iter().sum::<usize>() < bytes / 4, "{runs:?} of {bytes}");
        let load = |path: &Path| checkpoint::load_weights(path, Net::new(&device())).unwrap();
        assert!(load(&path).weights() == load(&whole).weights());
    }
}

fn a_checkpoint_without_a_part_is_not_whole() {
    let folder = Folder::create();
    let path = folder.path().join("run");
    sent(3, &path, |world| world.into(), &config());
    let (parts, index) = files(&path);
    let text = fs::read_to_string(&index).unwrap();
    let mut listed: Value = serde_json::from_str(&text).unwrap();
    listed["parts"].as_array_mut().unwrap().remove(1);
    fs::write(&index, listed.to_string()).unwrap();
    for bad in [&path, &parts[0]] {
        let error = &load_errors(bad)[0];
        assert!(error.contains("is not whole") && error.contains("optimizer."), "{error}");
    }
    // A part twice: both have the same elements.
    listed = serde_json::from_str(&text).unwrap();
    let listed_parts = listed["parts"].as_array_mut().unwrap();
    listed_parts.push(listed_parts[1].clone());
    fs::write(&index, listed.to_string()).unwrap();
    let error = &load_errors(&path)[0];
    assert!(error.contains("is in another part, too") || error.contains("is not whole"), "{error}");
}

/// In them, every tensor is in one part.
fn folders_of_version_1_are_loaded() {
    if !loads_states() {
        return;
    }
    let folder = Folder::create();
    let path = folder.path().join("run");
    ranks_here(1, |world| save(&world, &path, 1, &1u64)).unwrap();
    let (_, index) = files(&path);
    let text = fs::read_to_string(&index).unwrap();
    let older = text.replacen(r#""version":2"#, r#""version":1"#, 1);
    assert_ne!(older, text);
    fs::write(&index, older).unwrap();
    ranks_here(2, |world| train(&world, Some(&path), 1..2).map(|_| ())).unwrap();
    fs::write(&index, text.replacen(r#""version":2"#, r#""version":3"#, 1)).unwrap();
    assert!(load_errors(&path)[0].contains("expected 1 to 2, got 3"));
}

/// Every rank writes about as many bytes, and sends none.
fn every_rank_writes_its_share() {
    let folder = Folder::create();
    let path = folder.path().join("run");
    let config = config().with_bucket_mb(Some(0.002));
    let runs = sent(3, &path, |world| world.into(), &config);
    assert!(runs.iter().all(|(sent, _)| *sent == 0), "{runs:?}");
    let (parts, _) = files(&path);
    // Without the names of tensors, and the zeros between them, which are most of small files.
    let bytes =
        |part: &PathBuf| sections(part).into_values().map(|one| one["bytes"].as_u64().unwrap());
    let written: Vec<u64> = parts.iter().map(|part| bytes(part).sum()).collect();
    let largest = parts.iter().flat_map(bytes).max().unwrap();
    let [least, most] = [*written.iter().min().unwrap(), *written.iter().max().unwrap()];
    assert!(parts.len() == 3 && most - least <= largest, "{written:?}, {largest}");
}

fn damaged_parts_are_rejected() {
    if !loads_states() {
        return;
    }
    let folder = Folder::create();
    let path = saved(&folder, "run", 1);
    let (parts, index) = files(&path);
    let sound = fs::read(&index).unwrap();
    // Every byte of the index, and bytes of all tensors of a part.
    for file in [&index, &parts[1]] {
        let sound = fs::read(file).unwrap();
        for position in (0..sound.len()).step_by(if *file == index { 1 } else { 997 }) {
            let mut bytes = sound.clone();
            bytes[position] ^= 4;
            fs::write(file, bytes).unwrap();
            let errors = load_errors(&path);
            assert!(errors[0].contains("run"), "byte {position} of {file:?}: {errors:?}");
        }
        fs::write(file, sound).unwrap();
    }
    let outside = String::from_utf8(sound.clone()).unwrap().replacen("part-", "../part-", 1);
    fs::write(&index, outside).unwrap();
    assert!(load_errors(&path)[0].contains("is not the name of a part"));
    fs::write(&index, &sound).unwrap();

    let part = fs::read(&parts[2]).unwrap();
    fs::write(&parts[2], &part[..part.len() / 2]).unwrap();
    assert!(load_errors(&path)[0].contains("got a damaged end"));
    fs::remove_file(&parts[2]).unwrap();
    let error = &load_errors(&path)[0];
    assert!(error.contains("-2.bpk") && error.contains("copy all files"), "{error}");
    fs::write(&parts[2], part).unwrap();

    fs::remove_file(&index).unwrap();
    assert!(load_errors(&path)[0].contains("it has no `index.json`"));
    fs::write(&index, sound).unwrap();
    ranks_here(2, |world| train(&world, Some(&path), 1..2).map(|_| ())).unwrap();
}

fn parts_of_other_saves_are_rejected() {
    let folder = Folder::create();
    let [first, second] = [1, 2].map(|steps| saved(&folder, &format!("run-{steps}"), steps));
    fs::copy(&files(&first).0[1], &files(&second).0[1]).unwrap();
    let errors = load_errors(&second);
    assert!(errors[0].contains("-1.bpk") && errors[0].contains("another save"), "{errors:?}");
}

/// Progress that one rank can't write.
struct Unwritable(bool);

impl Serialize for Unwritable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            true => Err(serde::ser::Error::custom("this rank's pen is broken")),
            false => serializer.serialize_u64(2),
        }
    }
}

fn a_rank_that_cannot_write_ends_the_save_on_all_ranks() {
    let folder = Folder::create();
    let path = saved(&folder, "run", 1);
    let before = files(&path);
    for broken in [0, 2] {
        let errors = ranks_here(3, |world| {
            let progress = Unwritable(world.rank() == broken);
            Ok(save(&world, &path, 2, &progress).expect_err("a rank can't write").to_string())
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|error| error.contains("pen is broken")), "{errors:?}");
        assert_eq!(checkpoint::progress::<u64>(&path).unwrap(), 1, "as before");
    }
    // The next save removes what the others have written.
    saved(&folder, "run", 3);
    let (parts, _) = files(&path);
    assert!(parts.len() == 3 && parts.iter().all(|part| !before.0.contains(part)), "{parts:?}");
    assert_eq!(checkpoint::progress::<u64>(&path).unwrap(), 3);
    // A file where the folder would be.
    let file = folder.path().join("file");
    fs::write(&file, "not a folder").unwrap();
    let errors = ranks_here(2, |world| Ok(save(&world, &file, 1, &1).unwrap_err().to_string()));
    for error in errors.unwrap() {
        assert!(error.contains("cannot create the folder"), "{error}");
    }
}

/// A killed process leaves parts without an index behind, and temporary files.
fn an_interrupted_save_leaves_the_checkpoint_before() {
    if !loads_states() {
        return;
    }
    let folder = Folder::create();
    let [path, other] = [("run", 1), ("other", 2)].map(|(name, steps)| saved(&folder, name, steps));
    let (parts, _) = files(&path);
    for part in &files(&other).0[..2] {
        fs::copy(part, path.join(part.file_name().unwrap())).unwrap();
        let scratch = format!("{}.77-1.tmp", part.file_name().unwrap().to_string_lossy());
        fs::copy(part, path.join(scratch)).unwrap();
    }
    ranks_here(2, |world| train(&world, Some(&path), 1..2).map(|_| ())).unwrap();
    assert_eq!(files(&path).0.len(), 3 + 4);
    saved(&folder, "run", 2);
    let after = files(&path).0;
    assert!(after.len() == 3 && after.iter().all(|part| !parts.contains(part)), "{after:?}");
    // Of a first save, nothing is a checkpoint.
    let first = folder.path().join("first");
    fs::create_dir(&first).unwrap();
    fs::copy(&after[0], first.join(after[0].file_name().unwrap())).unwrap();
    assert!(load_errors(&first)[0].contains("it is not a checkpoint"));
}

/// Ranks that have no folder in common.
fn a_part_that_does_not_come_is_named() {
    let folder = Folder::create();
    let errors = ranks_here(2, |world| {
        let (net, optim) = train(&world, None, 0..1)?;
        let path = folder.path().join(format!("host-{}", world.rank()));
        let mut saver = Saver::new().with_parts().with_patience(Duration::from_millis(300));
        saver.save(&path, &net, &optim, &1)?;
        Ok(saver.wait().map_err(|error| error.to_string()))
    });
    let errors = errors.unwrap();
    let error = errors[0].as_ref().expect_err("rank 1's part is elsewhere");
    assert!(error.contains("rank 1 did not write its part in 300ms"), "{error}");
    assert!(error.contains("a folder that all ranks share"), "{error}");
    assert_eq!(errors[1], Ok(()));
}

fn the_last_folders_are_kept_and_the_latest_is_found() {
    let folder = Folder::create();
    let path = |step: u64| folder.path().join(format!("step-{step}"));
    ranks_here(2, |world| {
        let (net, optim) = train(&world, None, 0..1)?;
        let mut saver = Saver::new().with_parts().with_keep_last(2);
        (1..=4).try_for_each(|step| saver.save(path(step), &net, &optim, &step))?;
        saver.wait()
    })
    .unwrap();
    assert_eq!([1, 2, 3, 4].map(|step| path(step).exists()), [false, false, true, true]);
    // It has no index.
    fs::create_dir(path(5)).unwrap();
    assert_eq!(checkpoint::latest(path(0)).unwrap(), Some(path(4)));
}

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

fn files_that_no_save_wrote_stay() {
    let folder = Folder::create();
    let path = |step: u64| folder.path().join(format!("step-{step}"));
    let write = |step: u64, names: &[&str]| {
        fs::create_dir_all(path(step)).unwrap();
        names.iter().for_each(|name| fs::write(path(step).join(name), "{}").unwrap());
    };
    // A folder and a file of another program.
    write(2, &["index.json", "page.html"]);
    fs::write(path(1), "not a checkpoint").unwrap();
    assert_eq!(checkpoint::latest(path(0)).unwrap(), Some(path(1)), "the folder is none");

    // Names that are almost those of parts, in a checkpoint, and what killed saves have left there.
    let users =
        ["config.json", "part-00000.parquet", "part-1-0.bpk", "part-ABCD000000000001-0.bpk"];
    let more = ["part-0000000000000001-0.json", "part-0000000000000001-00.bpk", "index.json.tmp"];
    let left = ["part-0000000000000001-0.bpk", "part-0000000000000001-1.failed"];
    let temporary = ["part-0000000000000001-7.bpk.12-3.tmp", "index.json.12-3.tmp"];
    for names in [&users[..], &more, &left, &temporary] {
        write(3, names);
    }
    let mut users = [&users[..], &more].concat();
    users.sort_unstable();
    let is_users = |name: &String| users.contains(&name.as_str());
    saved(&folder, "step-3", 1);
    let found = names(&path(3));
    assert_eq!(found.len(), users.len() + 3 + 1, "{found:?}");
    assert_eq!(found.iter().filter(|name| is_users(name)).count(), users.len(), "{found:?}");

    ranks_here(2, |world| {
        let (net, optim) = train(&world, None, 0..1)?;
        let mut saver = Saver::new().with_parts().with_keep_last(1);
        saver.save(path(4), &net, &optim, &4)?;
        saver.wait()
    })
    .unwrap();
    assert_eq!(names(&path(3)), users);
    assert_eq!(names(&path(2)), ["index.json", "page.html"]);
    assert_eq!(names(folder.path()), ["step-1", "step-2", "step-3", "step-4"]);
    assert_eq!(checkpoint::latest(path(0)).unwrap(), Some(path(4)));
}

fn the_index_of_another_program_is_not_replaced() {
    let folder = Folder::create();
    let path = folder.path().join("site");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("index.json"), r#"{"pages": []}"#).unwrap();
    let errors = ranks_here(2, |world| Ok(save(&world, &path, 0, &1).unwrap_err().to_string()));
    for error in errors.unwrap() {
        assert!(error.contains("is not a checkpoint's, and is not replaced"), "{error}");
    }
    assert_eq!(names(&path), ["index.json"]);
}

/// A model with values that are not trained.
#[derive(Module, Debug)]
struct Normalized {
    linear: Linear,
    norms: Vec<BatchNorm>,
    seen: Param<Tensor<1, Int>>,
    other: Param<Tensor<1, Int>>,
}

impl Normalized {
    fn new(device: &Device) -> Self {
        let seen = || Param::initialized(ParamId::new(), Tensor::zeros([6], device));
        Self {
            linear: LinearConfig::new(6, 6).init(device),
            norms: (0..3).map(|_| BatchNormConfig::new(6).init(device)).collect(),
            seen: seen(),
            other: seen(),
        }
    }

    /// All that no optimizer trains.
    fn untrained(&self) -> Vec<Vec<u8>> {
        let running = self.norms.iter().flat_map(|norm| [&norm.running_mean, &norm.running_var]);
        let running = running.map(|state| state.value_sync().into_data());
        let seen = [&self.seen, &self.other].map(|seen| seen.val().into_data());
        running.chain(seen).map(|data| data.as_bytes().to_vec()).collect()
    }
}

/// Every rank has seen other data.
fn rank_0_writes_what_the_ranks_have_differently() {
    let folder = Folder::create();
    let [whole, parts] = ["run.bpk", "run.parts"].map(|name| folder.path().join(name));
    let untrained = ranks_here(3, |world| {
        let mut net = world.broadcast(Normalized::new(world.device()))?;
        let optim = DistMuonConfig::new().init(&world, &net)?;
        let rank = world.rank() as f64;
        for norm in &net.norms {
            let of_rank = Distribution::Normal(rank, 1.0 + rank);
            norm.forward(Tensor::<2>::random([8, 6], of_rank, world.device()));
        }
        net.seen = net.seen.map(|seen| seen.add_scalar(1 + world.rank() as i64));
        net.other = net.other.map(|seen| seen.add_scalar(5 + world.rank() as i64));
        let untrained = net.untrained();
        checkpoint::save(&whole, &net, &optim, &1)?;
        let mut saver = Saver::new().with_parts();
        saver.save(&parts, &net, &optim, &1)?;
        saver.wait()?;
        Ok(untrained)
    });
    let untrained = untrained.unwrap();
    assert!(untrained[0].iter().zip(&untrained[1]).all(|(first, other)| first != other));
    for path in [whole, parts] {
        let loaded = checkpoint::load_weights(&path, Normalized::new(&device())).unwrap();
        assert!(loaded.untrained() == untrained[0], "{path:?}");
    }
}

fn a_failed_save_is_one_error() {
    let folder = Folder::create();
    let path = saved(&folder, "run", 1);
    for broken in [0, 2] {
        ranks_here(3, |world| {
            let (net, optim) = train(&world, None, 0..1)?;
            let mut saver = Saver::new().with_parts().with_patience(Duration::from_secs(20));
            let unwritable = Unwritable(world.rank() == broken);
            let error = saver.save(&path, &net, &optim, &unwritable).unwrap_err();
            assert!(error.to_string().contains("pen is broken"), "{error}");
            saver.save(&path, &net, &optim, &(10 + broken))?;
            saver.wait()
        })
        .unwrap();
        assert_eq!(checkpoint::progress::<usize>(&path).unwrap(), 10 + broken);
        assert_eq!(files(&path).0.len(), 3, "the files of the failed save are removed");
    }
}

fn a_refused_save_makes_no_folder() {
    let folder = Folder::create();
    let path = folder.path().join("run");
    let errors = ranks_here(2, |world| {
        let (net, optim) = train(&world, None, 0..0)?;
        let mut saver = Saver::new().with_parts();
        let empty = saver.save("", &net, &optim, &1).unwrap_err();
        let numberless = saver.with_keep_last(1).save(&path, &net, &optim, &1).unwrap_err();
        Ok([empty, numberless].map(|error| error.to_string()))
    });
    for [empty, numberless] in errors.unwrap() {
        assert!(empty.contains("the path of the checkpoint is empty"), "{empty}");
        assert!(numberless.contains("has no number"), "{numberless}");
    }
    assert!(!path.exists());
}
