//! The program of a rank, the start of ranks, and processes that are killed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
#[cfg(feature = "mpi")]
use burn::tensor::{DType, Tensor};
use distmuon::Result;
use distmuon::checkpoint::Saver;
#[cfg(feature = "mpi")]
use distmuon::comm::ReduceOp;
use distmuon::comm::{Launch, World};
use distmuon::distributed::DistMuonConfig;
use distmuon_testing::host::{self, Waits};
use distmuon_testing::models::{Fixed, Layers, gradients, weights};
#[cfg(feature = "mpi")]
use distmuon_testing::mpirun;
use distmuon_testing::watched::watched;
use distmuon_testing::{excused, skip, worlds};
use libtest_mimic::{Arguments, Trial};

use crate::gpus;
#[cfg(feature = "mpi")]
use crate::{hosts, passes};

const RANKS: usize = 3;
pub const VICTIM: usize = 1;
const STEPS: u64 = 4;
/// The deadline for other ranks, which no test should come near.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// The variable with the folder of checkpoints. It is set in processes that are ranks.
pub const FOLDER: &str = "DISTMUON_TEST_FOLDER";
/// The variable with the point at which the victim is killed: a phase, and the number of events
/// before.
const KILLED_AT: &str = "DISTMUON_TEST_KILLED_AT";
/// The variable that is set in processes whose ranks each save a part.
const IN_PARTS: &str = "DISTMUON_TEST_IN_PARTS";
/// The variable with the victim's point at which the hosts are cut off from each other. It is set
/// in processes of a world of hosts.
#[cfg(feature = "mpi")]
pub const CUT_AT: &str = "DISTMUON_TEST_CUT_AT";

/// The variable that is set in the processes of an mpirun world whose rank [`VICTIM`] returns
/// between two calls.
#[cfg(feature = "mpi")]
const RETURNS_EARLY: &str = "DISTMUON_TEST_RETURNS_EARLY";

fn model(device: &Device) -> Layers {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
    let layers = vec![linear(6, 6), linear(4, 9), linear(9, 4), linear(6, 6)];
    Layers { layers }.map(&mut Fixed::new(5))
}

/// A configuration with buckets of one or two parameters, so that a step has many points.
fn config() -> DistMuonConfig {
    DistMuonConfig::new().with_bucket_mb(Some(0.0002)).with_small_elements(32)
}

/// Points at which the victim is killed. At the start, the model is broadcast and checked. In a
/// step, gradients are reduced and parameters are published. In a save, states are gathered and the
/// checkpoint is published.
const DEATHS: [&str; 12] = [
    "start 0: 0",
    "start 0: 12",
    "start 0: 18",
    "start 0: 24",
    "step 0: 0",
    "step 1: 6",
    "step 1: 10",
    "step 1: 17",
    "step 1: 20",
    "step 1: 24",
    "save 1: 3",
    "save 1: 8",
];

pub fn main() {
    host::use_test_library();
    #[cfg(feature = "mpi")]
    if std::env::var_os(RETURNS_EARLY).is_some() {
        return miss_a_rank();
    }
    #[cfg(feature = "mpi")]
    if let Ok(event) = std::env::var(passes::FAILS_AT) {
        return passes::work(&event);
    }
    if let Some(folder) = std::env::var_os(FOLDER) {
        return work(Path::new(&folder));
    }
    let cases: &[(&str, fn())] = &[
        ("processes_are_bit_equal_to_threads", processes_are_bit_equal_to_threads),
        (
            "a_killed_rank_is_named_by_all_others_and_training_resumes",
            a_killed_rank_is_named_by_all_others_and_training_resumes,
        ),
        ("torchrun_starts_the_ranks", torchrun_starts_the_ranks),
        (gpus::TEST, gpus::threads_with_a_gpu_each_are_over_nccl),
        (
            "a_process_without_an_engine_is_named_by_all_others",
            a_process_without_an_engine_is_named_by_all_others,
        ),
        (
            "a_process_that_cannot_join_reports_what_is_missing",
            a_process_that_cannot_join_reports_what_is_missing,
        ),
        #[cfg(feature = "mpi")]
        ("a_rank_that_returns_early_is_named_under_mpirun", a_rank_that_returns_early_is_named),
        #[cfg(feature = "mpi")]
        (
            "a_rank_that_fails_in_a_pass_is_named_by_all_others",
            passes::a_rank_that_fails_is_named_by_all_others,
        ),
        #[cfg(feature = "mpi")]
        (
            "a_rank_that_saves_alone_is_named_with_its_call_at_once",
            passes::a_rank_that_saves_alone_is_named_with_its_call_at_once,
        ),
        #[cfg(feature = "mpi")]
        ("hosts_that_lose_their_link_fail_and_resume_later", hosts::fail_and_resume_after_a_cut),
    ];
    let trials = cases.iter().map(|(name, case)| {
        Trial::test(*name, move || {
            case();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

/// Runs a rank, which trains, saves every step, and prints its error.
fn work(folder: &Path) {
    if let Err(error) = train(folder) {
        eprintln!("{error}");
        #[cfg(feature = "mpi")]
        hosts::report(folder, &error);
        std::process::exit(3);
    }
}

fn train(folder: &Path) -> Result<()> {
    let launch = Launch::from_env()?;
    let device = Device::default().autodiff();
    let world = world(&launch, device)?;
    let description = world.describe()?;
    if world.rank() == 0 {
        println!("{description}");
    }
    let comm = world.communicator();
    let steps = steps(&world, folder);
    steps.inspect_err(|error| comm.fail(&error.to_string()))
}

fn world(launch: &Launch, device: Device) -> Result<World> {
    #[cfg(feature = "mpi")]
    if std::env::var_os(CUT_AT).is_some() {
        return World::mpi(launch, device, hosts::DEADLINE);
    }
    host::world(launch, device, DEADLINE, Waits::Device)
}

/// The current phase of a rank, and the number of its events in this phase.
struct Phase(Mutex<(&'static str, u64, usize)>);

impl Phase {
    fn enter(&self, name: &'static str, step: u64) {
        *self.0.lock().unwrap() = (name, step, 0);
    }

    /// The point of an event.
    fn event(&self) -> String {
        let (name, step, events) = &mut *self.0.lock().unwrap();
        *events += 1;
        format!("{name} {step}: {}", *events - 1)
    }
}

fn steps(world: &World, folder: &Path) -> Result<()> {
    let phase = Arc::new(Phase(Mutex::new(("start", 0, 0))));
    let (here, killed_at) = (phase.clone(), std::env::var(KILLED_AT).ok());
    #[cfg(feature = "mpi")]
    let (cut_at, shared) = (std::env::var(CUT_AT).ok(), folder.to_owned());
    let world = watched(world, move |event| {
        if event.rank != VICTIM {
            return Ok(());
        }
        let here = Some(here.event());
        if here == killed_at {
            kill(std::process::id());
        }
        #[cfg(feature = "mpi")]
        if here == cut_at {
            hosts::wait_for_the_cut(&shared);
        }
        Ok(())
    });
    let saver = || Saver::new().with_parts().with_patience(DEADLINE / 6);
    let mut saver = std::env::var_os(IN_PARTS).map(|_| saver());
    let path = folder.join(if saver.is_some() { "run.parts" } else { "run.ckpt" });
    let mut net = world.broadcast(model(world.device()))?;
    let mut optim = config().init(&world, &net)?;
    let mut step = 0;
    if path.is_file() || path.join("index.json").is_file() {
        (net, optim, step) = optim.load(&path, net)?;
    }
    while step < STEPS {
        phase.enter("step", step);
        let gradients = gradients(&net, step);
        net = optim.step(0.01, net, gradients)?;
        phase.enter("save", step);
        step += 1;
        match &mut saver {
            Some(saver) => saver.save(&path, &net, &optim, &step)?,
            None => optim.save(&path, &net, &step)?,
        }
    }
    saver.iter_mut().try_for_each(Saver::wait)?;
    fs::write(folder.join(format!("weights-{}", world.rank())), weights(&net).concat())
        .expect("the folder exists");
    Ok(())
}

/// Kills a process without a signal that it could handle, as the system does if memory is short.
fn kill(process: u32) {
    let killed = Command::new("kill").args(["-9", &process.to_string()]).status();
    assert!(killed.is_ok_and(|killed| killed.success()));
    thread::sleep(DEADLINE);
}

fn program() -> Command {
    let name = std::env::args_os().next().expect("a program has a name");
    let mut program = Command::new(name);
    program.env("RAYON_NUM_THREADS", "1");
    // Without the variables of a launcher or of a Python environment in which the test itself runs.
    let inherited = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in inherited.filter(|name| LAUNCHERS.iter().any(|start| name.starts_with(start))) {
        program.env_remove(name);
    }
    program
}

/// The beginnings of the variables of launchers and of Python's environments.
const LAUNCHERS: [&str; 12] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "DISTMUON_SECRET",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
];

/// Starts the processes of a world as a launcher does.
fn start(folder: &Path, variables: &[(&str, String)]) -> Vec<Child> {
    start_each(folder, |_| variables.to_vec())
}

/// Starts the processes of a world, each with variables of its own.
fn start_each<'a>(
    folder: &Path,
    variables: impl Fn(usize) -> Vec<(&'a str, String)>,
) -> Vec<Child> {
    let port = worlds::free_port().to_string();
    let rank = |rank: usize| {
        let mut program = program();
        program.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
        let host = worlds::loopback();
        program.env("MASTER_ADDR", host).env("MASTER_PORT", &port).env(FOLDER, folder);
        program.envs(variables(rank));
        program.stdout(Stdio::piped()).stderr(Stdio::piped());
        program.spawn().expect("this program can be started again")
    };
    (0..RANKS).map(rank).collect()
}

/// Waits for all processes, and returns their outputs.
fn finish(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().expect("the process ends")).collect()
}

/// The time from the end of the victim until the end of all others.
fn time_after_death(children: &mut [Child]) -> Duration {
    let begin = Instant::now();
    let end = |child: &mut Child| {
        while child.try_wait().expect("a process can be asked").is_none() {
            assert!(begin.elapsed() < DEADLINE, "a rank waited for the deadline");
            thread::sleep(Duration::from_millis(1));
        }
    };
    end(&mut children[VICTIM]);
    let start = Instant::now();
    children.iter_mut().for_each(end);
    start.elapsed()
}

pub fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

/// Returns the weights at the end, which have to be equal on all ranks.
pub fn trained(folder: &Path, ranks: usize) -> Vec<u8> {
    let weights: Vec<_> =
        (0..ranks).map(|rank| fs::read(folder.join(format!("weights-{rank}"))).unwrap()).collect();
    assert!(weights.iter().all(|other| *other == weights[0]), "the ranks agree");
    weights.into_iter().next().expect("a world has a rank")
}

/// Returns the weights that threads of one process train.
fn expected() -> Vec<u8> {
    let devices = vec![Device::default().autodiff(); RANKS];
    let trained = World::threads(devices, |world| {
        let mut net = model(world.device());
        let mut optim = config().init(&world, &net)?;
        for step in 0..STEPS {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok::<_, distmuon::Error>(weights(&net).concat())
    });
    trained.unwrap().swap_remove(0)
}

fn processes_are_bit_equal_to_threads() {
    let folder = tempfile::tempdir().unwrap();
    for output in finish(start(folder.path(), &[])) {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert!(trained(folder.path(), RANKS) == expected(), "as threads do, bit by bit");
}

fn a_killed_rank_is_named_by_all_others_and_training_resumes() {
    let points = DEATHS.map(|point| (point, None));
    // A save in parts has three calls, since no state is sent: after the last, each rank writes its
    // part, and waits for those of the others.
    let in_parts = ["save 0: 1", "save 1: 0", "save 1: 2", "step 2: 3", "save 2: 1"];
    let in_parts = in_parts.map(|point| (point, Some((IN_PARTS, "1".to_owned()))));
    for (point, in_parts) in points.into_iter().chain(in_parts) {
        let folder = tempfile::tempdir().unwrap();
        let begin = Instant::now();
        let killed_at = (KILLED_AT, point.to_owned());
        let variables: Vec<_> = [killed_at].into_iter().chain(in_parts.clone()).collect();
        let mut children = start(folder.path(), &variables);
        let after = time_after_death(&mut children);
        println!("killed at {point}: all others have ended after {after:.2?}");
        let outputs = finish(children);
        assert!(begin.elapsed() < DEADLINE, "{point}: no rank waited for the deadline");
        for (rank, output) in outputs.iter().enumerate() {
            let stderr = text(&output.stderr);
            if rank == VICTIM {
                assert_eq!(output.status.signal(), Some(9), "{point}: {stderr}");
            } else {
                assert_eq!(output.status.code(), Some(3), "{point}, rank {rank}: {stderr}");
                assert!(stderr.contains("rank 1 failed"), "{point}, rank {rank}: {stderr}");
            }
        }
        // All ranks start again from the last checkpoint, with the result of an undisturbed run.
        for output in finish(start(folder.path(), in_parts.as_slice())) {
            assert!(output.status.success(), "{point}: {}", text(&output.stderr));
        }
        assert!(trained(folder.path(), RANKS) == expected(), "{point}");
    }
}

/// Runs a rank of a world in which [`VICTIM`] returns early. The others print their error and the
/// time that it took.
#[cfg(feature = "mpi")]
fn miss_a_rank() {
    let launch = Launch::from_env().expect("mpirun sets the variables of a rank");
    let world = World::mpi(&launch, Device::default(), DEADLINE).expect("the ranks can connect");
    let sum = || -> Result<()> {
        let ones = Tensor::<1>::ones([4], (world.device(), DType::F32));
        world.comm().all_reduce(ones, ReduceOp::Sum)?.wait().map(|_| ())
    };
    sum().expect("all ranks make the call");
    if world.rank() == VICTIM {
        return;
    }
    let start = Instant::now();
    let error = sum().expect_err("a rank is missing");
    println!("rank {} after {} ms: {error}", world.rank(), start.elapsed().as_millis());
    // mpirun ends all ranks when the first rank ends after a failure.
    thread::sleep(Duration::from_secs(5));
}

#[cfg(feature = "mpi")]
fn a_rank_that_returns_early_is_named() {
    if !mpirun::is_there() {
        return;
    }
    let program = std::env::args_os().next().expect("a program has a name");
    let mut mpirun = mpirun::mpirun(RANKS);
    mpirun.arg(program).env(RETURNS_EARLY, "1");
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let stdout = text(&output.stdout);
    println!("{stdout}");
    for rank in (0..RANKS).filter(|rank| *rank != VICTIM) {
        let line = stdout.lines().find(|line| line.starts_with(&format!("rank {rank} after ")));
        let line = line.unwrap_or_else(|| panic!("rank {rank}: {stdout}{}", text(&output.stderr)));
        let cause = format!("rank {VICTIM} failed: it returned without");
        assert!(line.contains(&cause), "{line}");
        let waited = line.split(' ').nth(3).and_then(|waited| waited.parse().ok());
        let waited = Duration::from_millis(waited.expect("the line has a number"));
        assert!(waited < DEADLINE / 4, "{line}");
    }
}

fn torchrun_starts_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mut torchrun = Command::new("torchrun");
    torchrun.args(["--no-python", "--standalone", "--nproc-per-node", &RANKS.to_string()]);
    let program = std::env::args_os().next().expect("a program has a name");
    torchrun.arg(program).env(FOLDER, folder.path()).env("RAYON_NUM_THREADS", "1");
    match torchrun.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", text(&output.stderr));
            assert!(trained(folder.path(), RANKS) == expected());
        }
        Err(_) => skip("torchrun is not installed"),
    }
}

/// One process has another NCCL, which the others learn of when it has joined.
fn a_process_without_an_engine_is_named_by_all_others() {
    for victim in [0, VICTIM] {
        let folder = tempfile::tempdir().unwrap();
        let begin = Instant::now();
        let old = |rank: usize| if rank == victim { "20403" } else { "22903" };
        let outputs = finish(start_each(folder.path(), |rank| {
            vec![("DISTMUON_TEST_NCCL_VERSION", old(rank).to_owned())]
        }));
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        for (rank, output) in outputs.iter().enumerate() {
            let stderr = text(&output.stderr);
            assert!(stderr.contains("NCCL is too old"), "rank {rank}: {stderr}");
            let blames = stderr.contains(&format!("rank {victim} failed"));
            assert_eq!(blames, rank != victim, "rank {rank}: {stderr}");
        }
    }
}

/// The error names the missing setting and a remedy.
fn a_process_that_cannot_join_reports_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().expect("a plain path");
    let elsewhere = without_test_library();
    let full =
        [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")];
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Variables<'_>, &[&str]); 4] = [
        (&[("RANK", "0")], &["WORLD_SIZE is not set"]),
        (&[("RANK", "0"), ("WORLD_SIZE", "1")], &["MASTER_ADDR is not set", "free port"]),
        (
            &[&full[..], &[("DISTMUON_TEST_NCCL_VERSION", "20403")]].concat(),
            &["NCCL is too old", "NCCL 2.4.3", "2.18"],
        ),
        (
            &[&full[..], &[("DISTMUON_NCCL_PATH", empty), ("LD_LIBRARY_PATH", &elsewhere)]]
                .concat(),
            &["NCCL was not found", "libnccl.so.2", "DISTMUON_NCCL_PATH", empty],
        ),
    ];
    for (variables, expected) in cases {
        let mut program = program();
        program.env(FOLDER, folder.path()).envs(variables.iter().copied());
        if expected[0] == "NCCL was not found" && system_has_nccl() {
            excused("this system has NCCL");
            continue;
        }
        let output = program.output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{error}");
        for words in expected {
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }
}

/// The search path of libraries without the folder in which cargo puts the test library.
fn without_test_library() -> String {
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = std::env::split_paths(&folders);
    let others = folders.filter(|folder| !folder.join("libnccl.so").exists());
    let others = std::env::join_paths(others).expect("the folders were joined before");
    others.into_string().expect("plain paths")
}

/// Returns `true` if the loader or a package of the system's Python has NCCL.
fn system_has_nccl() -> bool {
    let pythons = ["/usr/local/lib", "/usr/lib"].map(|folder| fs::read_dir(folder).into_iter());
    let pythons = pythons.into_iter().flatten().flatten().flatten().map(|entry| entry.path());
    let packages = pythons
        .flat_map(|python| ["site", "dist"].map(|kind| python.join(format!("{kind}-packages"))));
    let mut wheels = packages.filter(|folder| folder.join("nvidia/nccl/lib").exists());
    // SAFETY: NCCL's initialisers do nothing but register.
    wheels.next().is_some() || unsafe { libloading::Library::new("libnccl.so.2").is_ok() }
}
