//! Saves that training does not wait for.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Bytes, Device};
use distmuon::checkpoint::{self, Checkpointed, Saver, WhenBusy};
use distmuon::{DistModuleOptimizer, DistMuonConfig, Error, MuonConfig, RoutingRule, World};
use distmuon_testing::models::{self, Fixed};

fn run() -> (Linear, ModuleOptimizer) {
    let net = LinearConfig::new(37, 41).init(&Device::default().autodiff());
    let net: Linear = net.map(&mut Fixed::new(3));
    let optim = MuonConfig::new().init(&net);
    step((net, optim), 0)
}

fn step((net, mut optim): (Linear, ModuleOptimizer), seed: u64) -> (Linear, ModuleOptimizer) {
    let gradients = models::gradients(&net, seed);
    (optim.step(0.01, net, gradients), optim)
}

#[test]
fn a_file_holds_the_values_of_its_save_whatever_comes_after() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for host_mb in [None, Some(0)] {
        let mut saver = Saver::new();
        if let Some(host_mb) = host_mb {
            saver = saver.with_host_mb(host_mb);
        }
        let mut trained = run();
        for number in 0..8 {
            let (net, optim) = &trained;
            checkpoint::save(path(&format!("now-{number}")), net, optim, &number).unwrap();
            saver.save(path(&format!("later-{number}")), net, optim, &number).unwrap();
            // In place, while the file may be being written.
            trained = step(trained, number);
        }
        saver.wait().unwrap();
        assert!(!saver.is_saving());
        for number in 0..8 {
            let bytes = |name: &str| fs::read(path(&format!("{name}-{number}"))).unwrap();
            assert!(bytes("now") == bytes("later"), "save {number}, {host_mb:?}");
        }
    }
}

/// The records of a model and of an optimizer, to be written when the result is called.
fn records(net: &Linear, optim: &ModuleOptimizer) -> impl FnOnce() -> [Bytes; 2] + use<> {
    let (net, optim) = (net.clone().into_record(), optim.to_record());
    move || [net.into_bytes().unwrap(), optim.into_bytes().unwrap()]
}

/// Values that the next step changes in place while the file is being written, and records that are
/// used after it.
#[test]
fn a_step_changes_neither_the_file_that_is_being_written_nor_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let device = Device::default();
    let adamw = MuonConfig::new().with_rule(RoutingRule::adamw(""));
    let of_users = MuonConfig::new()
        .with_optimizer("adam", AdamConfig::new().build())
        .with_rule(RoutingRule::custom("", "adam"));
    // Burn's own operations in place change what its records have not read yet.
    for (config, is_ours) in [(MuonConfig::new(), true), (adamw, true), (of_users, false)] {
        let net = LinearConfig::new(512, 1024).init(&device.clone().autodiff());
        let mut net: Linear = net.map(&mut Fixed::new(3));
        let (mut single, mut batched) = (config.init(&net), config.init_batched(&net).unwrap());
        let mut saver = Saver::new();
        for number in 0..3 {
            let case = format!("save {number}, {config:?}");
            checkpoint::save(path("now"), &net, &batched, &number).unwrap();
            let expected = records(&net, &single)();
            let kept = records(&net, &single);
            saver.save(path("later"), &net, &batched, &number).unwrap();
            let gradients = || models::gradients(&net, number);
            let [of_batched, of_single] = [gradients(), gradients()];
            net = batched.step(0.01, net, of_batched).unwrap();
            device.sync().unwrap();
            saver.wait().unwrap();
            let files = ["now", "later"].map(|file| fs::read(path(file)).unwrap());
            assert!(files[0] == files[1], "file: {case}");
            assert!(!is_ours || kept() == expected, "records before a batched step: {case}");

            let expected = records(&net, &single)();
            let kept = records(&net, &single);
            saver.save(path("later"), &net, &single, &number).unwrap();
            checkpoint::save(path("now"), &net, &single, &number).unwrap();
            net = single.step(0.01, net, of_single);
            device.sync().unwrap();
            saver.wait().unwrap();
            let files = ["now", "later"].map(|file| fs::read(path(file)).unwrap());
            assert!(files[0] == files[1], "file of one parameter at a time: {case}");
            assert!(!is_ours || kept() == expected, "records before a step: {case}");
        }
    }
}

#[test]
fn an_error_of_the_thread_comes_with_the_next_call() {
    let folder = tempfile::tempdir().unwrap();
    let (net, optim) = run();
    // The file can be written, but not take the place of a folder that is not empty.
    let (path, good) = (folder.path().join("step-1"), folder.path().join("step-2"));
    fs::create_dir_all(path.join("held")).unwrap();
    let is_checkpoint = |result: Result<(), Error>| match result {
        Err(Error::Checkpoint { path: named, .. }) => assert_eq!(named, path),
        other => panic!("{other:?}"),
    };
    let mut saver = Saver::new();
    saver.save(&path, &net, &optim, &1usize).unwrap();
    is_checkpoint(saver.save(&good, &net, &optim, &2usize));
    assert!(!good.exists(), "nothing is saved after an error");
    saver.save(&good, &net, &optim, &2usize).unwrap();
    saver.wait().unwrap();
    saver.save(&path, &net, &optim, &1usize).unwrap();
    is_checkpoint(saver.wait());
    saver.wait().unwrap();
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 2, "no temporary file is left");
}

#[test]
fn a_missing_folder_is_an_error_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (net, optim) = run();
    let saved = Saver::new().save(folder.path().join("missing/run.bpk"), &net, &optim, &1usize);
    assert!(matches!(saved, Err(Error::Checkpoint { .. })), "{saved:?}");
}

#[test]
fn a_second_save_waits_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first.bpk"), folder.path().join("second.bpk"));
    let (net, optim) = run();
    // It takes far longer to write than the second call takes to begin.
    let large = LinearConfig::new(2000, 2000).init(&Device::default().autodiff());
    let of_large = MuonConfig::new().init(&large);

    let mut saver = Saver::new().with_when_busy(WhenBusy::Refuse);
    let mut is_refused = || {
        saver.wait().unwrap();
        saver.save(&first, &large, &of_large, &1usize).unwrap();
        match saver.save(&second, &net, &optim, &2usize) {
            Ok(()) => false, // the first one had ended
            Err(Error::Usage { what: "the save is refused", .. }) => true,
            other => panic!("{other:?}"),
        }
    };
    assert!((0..20).any(|_| is_refused()));
    drop(saver); // waits
    assert_eq!(checkpoint::progress::<usize>(&first).unwrap(), 1);

    fs::remove_file(&first).unwrap();
    let mut saver = Saver::new();
    saver.save(&first, &large, &of_large, &3usize).unwrap();
    saver.save(&second, &net, &optim, &4usize).unwrap();
    assert_eq!(checkpoint::progress::<usize>(&first).unwrap(), 3);
    saver.wait().unwrap();
    assert_eq!(checkpoint::progress::<usize>(&second).unwrap(), 4);
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_last_files_are_kept_and_the_latest_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for other in ["step-5.txt", "other-1.bpk", "run.bpk", "step-900.bpk"] {
        fs::write(path(other), b"not of this run").unwrap();
    }
    let (net, optim) = run();
    // Those of the process before count as well, and a higher number is not older.
    for before in ["step-8.bpk", "step-9.bpk"] {
        checkpoint::save(path(before), &net, &optim, &0usize).unwrap();
    }
    let mut saver = Saver::new().with_keep_last(2);
    for number in [10, 11, 100] {
        saver.save(path(&format!("step-{number}.bpk")), &net, &optim, &number).unwrap();
    }
    saver.wait().unwrap();
    let kept =
        ["other-1.bpk", "run.bpk", "step-100.bpk", "step-11.bpk", "step-5.txt", "step-900.bpk"];
    assert_eq!(names(folder.path()), kept);
    fs::remove_file(path("step-900.bpk")).unwrap();
    let latest = checkpoint::latest(path("step-0.bpk")).unwrap();
    assert_eq!(latest, Some(path("step-100.bpk")));
    assert_eq!(checkpoint::progress::<usize>(path("step-100.bpk")).unwrap(), 100);
    assert_eq!(checkpoint::latest(path("missing/step-0.bpk")).unwrap(), None);
    assert_eq!(checkpoint::latest(path("mine-0.bpk")).unwrap(), None);
}

#[test]
fn files_without_a_number_are_not_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (net, optim) = run();
    let mut saver = Saver::new().with_keep_last(2);
    let path = folder.path().join("run.bpk");
    for refused in [saver.save(&path, &net, &optim, &1usize), checkpoint::latest(&path).map(drop)] {
        match refused {
            Err(Error::Usage { what, .. }) => assert!(what.contains("has no number"), "{what}"),
            other => panic!("{other:?}"),
        }
    }
    assert!(names(folder.path()).is_empty());
}

/// Prints how long a save keeps training from going on: at once, and in the background, with the
/// step after it, next to which the thread reads and writes. A step of AdamW, which takes the time
/// of reading and writing all states; of Muon, only the first round has a step.
#[test]
#[ignore = "it measures"]
fn times_of_saves() {
    let device = Device::default().autodiff();
    let net: Vec<Linear> = (0..8).map(|_| LinearConfig::new(2048, 2048).init(&device)).collect();
    println!("{} MB of weights", net.num_params() * 4 / 1_000_000);
    let adamw = MuonConfig::new().with_rule(RoutingRule::adamw("."));
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    for (optimizer, config, steps) in [("AdamW", adamw, usize::MAX), ("Muon", muon, 1)] {
        let folder = tempfile::tempdir_in(".").unwrap();
        // The forms take turns, so that a slow moment of the machine does not hit one alone.
        let times = World::threads_with(World::devices(2), net.clone(), |world, net| {
            let mut forms = forms(&world, net, &config, folder.path())?;
            let mut times: Vec<_> = forms.iter().map(|(name, _)| (*name, vec![])).collect();
            for round in 0..WARM_UPS + ROUNDS {
                for ((_, run), (_, times)) in forms.iter_mut().zip(&mut times) {
                    times.push(run(round, round < steps));
                    world.comm().barrier()?;
                }
            }
            Ok::<_, Error>(times)
        });
        for (form, times) in times.unwrap().swap_remove(0) {
            print_times(&format!("{optimizer}, {form}"), &times[WARM_UPS..]);
        }
    }
}

const WARM_UPS: usize = 2;
const ROUNDS: usize = 10;

/// Seconds of a save at once, of one in the background, of a step beside its thread, of the wait
/// for the thread, and of a step alone. Without steps, theirs are none.
type Times = [f64; 5];

/// Runs a round of a form, given its number, with steps or without. A form of one device does
/// nothing on other ranks.
type Round = Box<dyn FnMut(usize, bool) -> Option<Times>>;

/// The forms of saves.
fn forms(
    world: &World,
    net: Vec<Linear>,
    config: &MuonConfig,
    folder: &Path,
) -> Result<Vec<(&'static str, Round)>, Error> {
    let mut forms: Vec<(&str, Round)> = vec![];
    let mut add = |name: &'static str, round: Round| forms.push((name, round));
    let folder = |name: &str| {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    };
    let of_model =
        |net, optim: &mut DistModuleOptimizer, gradients| optim.step(0.01, net, gradients).unwrap();
    if world.is_main() {
        let alone = |net, optim: &mut ModuleOptimizer, gradients| optim.step(0.01, net, gradients);
        let batched = || Ok::<_, Error>((net.clone(), config.init_batched(&net)?));
        let run = (net.clone(), config.init(&net));
        add("init", rounds((folder("init"), Saver::new()), run, alone));
        add("init_batched", rounds((folder("batched"), Saver::new()), batched()?, of_model));
        let limited = Saver::new().with_host_mb(64);
        add("with_host_mb(64)", rounds((folder("limited"), limited), batched()?, of_model));
    } else {
        ["init", "init_batched", "with_host_mb(64)"]
            .into_iter()
            .for_each(|name| add(name, Box::new(|_, _| None)));
    }
    for (name, saver) in
        [("2 ranks", Saver::new()), ("2 ranks, in parts", Saver::new().with_parts())]
    {
        let optim = DistMuonConfig::new().with_muon(config.clone()).init(world, &net)?;
        add(name, rounds((folder(name), saver), (net.clone(), optim), of_model));
    }
    Ok(forms)
}

/// The result of a call, and its seconds.
fn timed<T>(call: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    (call(), start.elapsed().as_secs_f64())
}

/// The rounds of a run and its saver.
fn rounds<O: Checkpointed + 'static>(
    (folder, mut saver): (PathBuf, Saver),
    (net, mut optim): (Vec<Linear>, O),
    step: impl Fn(Vec<Linear>, &mut O, GradientsParams) -> Vec<Linear> + 'static,
) -> Round {
    let mut trained = Some(net);
    Box::new(move |round, steps| {
        let path = |kind: &str| folder.join(format!("{kind}-{}", round % 2));
        let mut net = trained.take().expect("the round before has put it back");
        let step = |net: Vec<Linear>, optim: &mut O, seed: u64| match steps {
            true => {
                let gradients = models::gradients(&net, seed);
                timed(|| step(net, optim, gradients))
            }
            false => (net, 0.0),
        };
        let (alone, beside);
        (net, alone) = step(net, &mut optim, 2 * round as u64);
        let (saved, now) = timed(|| checkpoint::save(path("now"), &net, &optim, &round));
        saved.unwrap();
        let (saved, later) = timed(|| saver.save(path("later"), &net, &optim, &round));
        saved.unwrap();
        (net, beside) = step(net, &mut optim, 2 * round as u64 + 1);
        let (saved, rest) = timed(|| saver.wait());
        saved.unwrap();
        trained = Some(net);
        Some([now, later, beside, rest, alone])
    })
}

/// Prints the medians of the rounds, and the ratio of both kinds of saves.
fn print_times(name: &str, rounds: &[Option<Times>]) {
    let rounds: Vec<Times> = rounds.iter().flatten().copied().collect();
    let sorted = |value: &dyn Fn(&Times) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let middle = |values: Vec<f64>| values[values.len() / 2];
    let [now, later, beside, rest, alone] =
        [0, 1, 2, 3, 4].map(|index| middle(sorted(&|times| times[index])));
    let ratios = sorted(&|times| times[1] / times[0]);
    println!(
        "{name}: {now:.3} s; in the background {later:.4} s, a step {beside:.3} s, without \
         {alone:.3} s, then {rest:.3} s of waiting; ratio {:.4}, at worst {:.4}",
        ratios[ratios.len() / 2],
        ratios[ratios.len() - 1]
    );
}
