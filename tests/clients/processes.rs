//! Runs in processes of their own: this program starts itself.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use distmuon::MuonConfig;
use distmuon_testing::models::assert_same_weights;

use crate::client::{Choice, Entry, Run, device};

/// The variable with the folder of a run. It is set in processes that train.
const FOLDER: &str = "DISTMUON_TEST_FOLDER";

const STEPS: usize = 30;
const SAVED_AT: usize = 15;

/// The name of a run whose gradients are those of another model.
const WITHOUT_GRADIENTS: &str = "without gradients";

pub fn is_child() -> bool {
    env::var_os(FOLDER).is_some()
}

/// The program of a process that trains: the name of the client, the first step, the last one and
/// perhaps a number of ranks are its arguments.
pub fn run(clients: &[Entry]) {
    log::set_logger(&Warnings).expect("no other logger is set");
    log::set_max_level(log::LevelFilter::Warn);
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [name, numbers @ ..] = &arguments[..] else { panic!("{arguments:?}: expected a name") };
    if name == WITHOUT_GRADIENTS {
        return train_on_another_model();
    }
    let client = clients.iter().find(|client| client.name == name).expect("the client is known");
    let numbers: Vec<usize> =
        numbers.iter().map(|number| number.parse().expect("a number")).collect();
    let [start, end, ref ranks @ ..] = numbers[..] else { panic!("{numbers:?}: expected two") };
    let folder = PathBuf::from(env::var_os(FOLDER).expect("the parent sets the folder"));
    let (steps, choice) = (start..end, Choice::DistMuon);
    let run = Run {
        folder,
        steps,
        total: STEPS,
        seed: 0,
        rate: 1e-3,
        choice,
        rules: vec![],
        world: None,
    };
    let parameters = match ranks.first() {
        None => (client.train)(&run),
        Some(ranks) => {
            let mut of_ranks = (client.train_on_ranks)(&run, *ranks);
            let first = of_ranks.swap_remove(0);
            assert!(of_ranks.iter().all(|other| *other == first), "the ranks differ");
            first
        }
    };
    let parameters: Vec<u8> = parameters.into_iter().flat_map(f32::to_le_bytes).collect();
    fs::write(run.file("parameters"), parameters).expect("the folder exists");
}

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        eprintln!("{}: {}", record.level(), record.args());
    }

    fn flush(&self) {}
}

fn start(folder: &Path, name: &str, steps: [usize; 2], ranks: Option<usize>) -> Output {
    let program = env::args_os().next().expect("a program has a name");
    let mut program = Command::new(program);
    // Products are small, and two runs are tested at a time.
    program.env("RAYON_NUM_THREADS", "1");
    program.arg(name).args(steps.into_iter().chain(ranks).map(|number| number.to_string()));
    program.env(FOLDER, folder);
    program.output().expect("the program starts again")
}

/// Trains in a process, and returns the elements of all parameters.
fn trained(folder: &Path, name: &str, steps: [usize; 2], ranks: Option<usize>) -> Vec<f32> {
    let output = start(folder, name, steps, ranks);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}, steps {steps:?}: {errors}");
    assert!(!errors.contains("WARN: an optimizer"), "{errors}");
    let parameters = fs::read(folder.join("parameters")).expect("the process has written them");
    let (elements, _) = parameters.as_chunks();
    elements.iter().copied().map(f32::from_le_bytes).collect()
}

/// Asserts that a run in two processes has the parameters of one in one process: bit for bit on
/// Flex.
pub fn continues(name: &str) {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let [whole, halves] = folders.each_ref().map(|folder| folder.path());
    let expected = trained(whole, name, [0, STEPS], None);
    let half = trained(halves, name, [0, SAVED_AT], None);
    assert!(half != expected, "the second half changes nothing");
    assert_same_weights(name, &trained(halves, name, [SAVED_AT, STEPS], None), &expected);
}

/// Asserts that two ranks with the same data have the parameters of one device: bit for bit on
/// Flex, since the mean of two equal gradients is exact.
pub fn trains_on_ranks(name: &str) {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let [one, two] = folders.each_ref().map(|folder| folder.path());
    let expected = trained(one, name, [0, STEPS], Some(1));
    assert_same_weights(name, &trained(two, name, [0, STEPS], Some(2)), &expected);
}

/// Takes steps in which no parameter has a gradient.
fn train_on_another_model() {
    let model = || -> Linear { LinearConfig::new(4, 4).init(&device()) };
    let (mut net, other) = (model(), model());
    let mut optim = MuonConfig::new().init(&net);
    for _ in 0..3 {
        let loss = other.forward(Tensor::<2>::ones([1, 4], &device())).sum();
        net = optim.step(1e-3, net, GradientsParams::from_grads(loss.backward(), &other));
    }
}

/// Burn calls nothing of an optimizer in such a step, so the end of the run is the first occasion.
pub fn a_run_without_gradients_is_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = start(folder.path(), WITHOUT_GRADIENTS, [0, 0], None);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("WARN: an optimizer") && errors.contains("another model"), "{errors}");
}
