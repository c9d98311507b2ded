//! Ranks that fail in a forward pass, a backward pass, a step or a save of owned parameters and of
//! slices, over `mpi`.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use distmuon::comm::{Launch, World};
use distmuon::distributed::{Axis, DistMuonConfig, Layout, Mesh, Place};
use distmuon::parallel::{enter, leave};
use distmuon::{Error, Result, checkpoint};
use distmuon_testing::models::{Fixed, Layers};
use distmuon_testing::mpirun;
use distmuon_testing::watched::watched;

use crate::hosts::wait_for;
use crate::ranks::{DEADLINE, FOLDER, VICTIM, text};

const RANKS: usize = 4;
/// The variable with the event at which the victim fails. It is set in processes that are ranks.
pub const FAILS_AT: &str = "DISTMUON_TEST_FAILS_AT";
/// The variable with the distance from one event to the next at which the victim fails. A start of
/// processes takes seconds: by default not every event has one.
const EVERY: &str = "DISTMUON_TEST_EVERY_EVENT";
const DISTANCE: usize = 16;
/// In place of an event: the victim saves where the others train on.
const SAVES_ALONE: usize = usize::MAX - 1;

/// Runs a rank, which writes its outcome to the folder.
pub fn work(fails_at: &str) {
    let folder = std::env::var_os(FOLDER).expect("ranks have a folder");
    let folder = Path::new(&folder);
    let fails_at = fails_at.parse().expect("a number");
    let launch = Launch::from_env().expect("mpirun sets the variables of a rank");
    let device = Device::default().autodiff().gradient_checkpointing();
    let world = World::mpi(&launch, device, DEADLINE).expect("the ranks can connect");
    let events = Arc::new(AtomicUsize::new(0));
    let outcome = match train(&world, folder, fails_at, &events) {
        Ok(()) => format!("trained: {}", events.load(SeqCst)),
        Err(error @ Error::PeerFailed { .. }) => format!("PeerFailed: {error}"),
        Err(error) => format!("failed: {error}"),
    };
    let path = |rank: usize| folder.join(format!("outcome-{rank}"));
    // Renamed, since others look for it.
    let incomplete = folder.join(format!("incomplete-{}", launch.rank));
    fs::write(&incomplete, outcome).expect("the folder exists");
    fs::rename(&incomplete, path(launch.rank)).expect("the folder exists");
    // mpirun ends the other ranks when the first rank has ended after a failure.
    wait_for("outcome on every rank", || (0..RANKS).all(|rank| path(rank).exists()));
    thread::sleep(Duration::from_millis(100));
}

/// Saves the model before and after a step. The victim fails at an event after the first save.
fn train(world: &World, folder: &Path, fails_at: usize, events: &Arc<AtomicUsize>) -> Result<()> {
    let checkpoint = folder.join("run.ckpt");
    let counts = Arc::new(AtomicBool::new(false));
    let world = watched(world, {
        let (counts, events) = (counts.clone(), events.clone());
        move |event| {
            let fails = event.rank == VICTIM
                && counts.load(SeqCst)
                && events.fetch_add(1, SeqCst) == fails_at;
            if fails { Err(Error::EmptyModel) } else { Ok(()) }
        }
    });
    let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::model("tp", 2)])?;
    let layout = Layout::new(&mesh)
        .with_place(Place::shard(r"^layers\.0\.", "tp", 1))
        .with_place(Place::shard(r"^layers\.1\.", "tp", 0))
        .owned("dp")
        .with_small_elements(1)
        .with_ahead_mb(0.001);
    let model = Layers::square(5, 12, world.device()).map(&mut Fixed::new(5));
    let model = layout.shard(model)?;
    let mut optim = DistMuonConfig::new().init_on(&layout, &model)?;
    optim.save(&checkpoint, &model, &0)?;
    if fails_at == SAVES_ALONE && world.rank() == VICTIM {
        optim.save(&checkpoint, &model, &2)?;
    }
    counts.store(true, SeqCst);
    let input = Tensor::<2>::ones([3, 12], world.device());
    let group = mesh.group("tp").expect("an axis of the mesh");
    let (region, rest) = model.layers.split_at(2);
    let forward = |x, layers: &[Linear]| layers.iter().fold(x, |x, layer| layer.forward(x));
    let output = forward(leave(forward(enter(input, group), region), group), rest);
    let gradients = layout.backward(&output.square().mean(), &model)?;
    let model = optim.step(0.01, model, gradients)?;
    world.comm().synchronize()?;
    optim.save(&checkpoint, &model, &1)
}

/// The outcomes of all ranks, and the progress of the checkpoint that they leave.
fn outcomes(fails_at: usize) -> (Vec<String>, i32) {
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::args_os().next().expect("a program has a name");
    let mut mpirun = mpirun::mpirun(RANKS);
    mpirun.arg(program).env(FOLDER, folder.path()).env(FAILS_AT, fails_at.to_string());
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let outcome = |rank: usize| {
        let outcome = fs::read_to_string(folder.path().join(format!("outcome-{rank}")));
        outcome.unwrap_or_else(|_| panic!("rank {rank}: {}", text(&output.stderr)))
    };
    let outcomes = (0..RANKS).map(outcome).collect();
    let progress = checkpoint::progress(folder.path().join("run.ckpt"));
    (outcomes, progress.expect("a complete checkpoint"))
}

/// The rank waits in the group of all ranks, and the others in groups of two.
pub fn a_rank_that_saves_alone_is_named_with_its_call_at_once() {
    if !mpirun::is_there() {
        return;
    }
    let (outcomes, progress) = outcomes(SAVES_ALONE);
    assert_eq!(progress, 0, "{outcomes:?}");
    let is_named = |outcome: &String| {
        outcome.starts_with("failed: the ranks disagree")
            && outcome.contains(&format!("rank {VICTIM}: first_bytes"))
    };
    assert!(outcomes.iter().all(is_named), "{outcomes:?}");
}

pub fn a_rank_that_fails_is_named_by_all_others() {
    if !mpirun::is_there() {
        return;
    }
    let (undisturbed, progress) = outcomes(usize::MAX);
    assert_eq!(progress, 1, "{undisturbed:?}");
    let events = undisturbed[VICTIM].strip_prefix("trained: ");
    let events: usize = events.and_then(|events| events.parse().ok()).expect("the rank trains");
    assert!(events > 40, "{events}");
    let distance = if std::env::var_os(EVERY).is_some() { 1 } else { DISTANCE };
    for fails_at in (0..events).step_by(distance) {
        let (outcomes, _) = outcomes(fails_at);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let cause = format!("rank {VICTIM} failed");
            let is_told = outcome.starts_with("PeerFailed: ") && outcome.contains(&cause);
            // A region keeps no error: the next call tells also the rank that failed in it.
            let is_named = is_told || rank == VICTIM && outcome.starts_with("failed: ");
            assert!(is_named, "rank {rank}, event {fails_at} of {events}: {outcome}");
        }
    }
}
