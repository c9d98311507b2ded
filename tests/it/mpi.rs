//! Ranks of MPI whose calls do not fit each other, and their secrets.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use distmuon::comm::{DEADLINE, Launch, PairCounts, Pending, World};
use distmuon_testing::mpirun;

/// Set for the processes of a test.
const RANK: &str = "DISTMUON_TEST_RANK";
const RANKS: usize = 3;

#[test]
fn counts_of_two_processes_that_do_not_fit_are_a_mismatch() {
    if std::env::var_os(RANK).is_some() {
        return exchange_other_counts();
    }
    let test = "mpi::counts_of_two_processes_that_do_not_fit_are_a_mismatch";
    for line in outcomes(test, RANKS, "1", 0..RANKS) {
        let cause = "rank 1: all_to_all(f32), rank 0: another call, or other counts";
        assert!(line.contains(cause), "{line}");
    }
}

/// Without one, rank 0 draws a secret and sends it over MPI.
#[test]
fn a_secret_that_is_set_replaces_the_one_that_mpi_sends() {
    if let Ok(secrets) = std::env::var(RANK) {
        return join_with(&secrets);
    }
    let test = "mpi::a_secret_that_is_set_replaces_the_one_that_mpi_sends";
    for (secrets, told, words) in [
        ("none", 0..2, "a world of 2"),
        ("equal", 0..2, "a world of 2"),
        // Rank 0 waits for another process.
        ("other", 1..2, "the secret in DISTMUON_SECRET differs from rank 0's"),
    ] {
        for line in outcomes(test, 2, secrets, told) {
            assert!(line.contains(words), "{secrets}: {line}");
        }
    }
}

/// Runs a test on ranks that are processes, and returns the lines with the outcomes of some of
/// them. None without mpirun.
fn outcomes(test: &str, ranks: usize, value: &str, told: Range<usize>) -> Vec<String> {
    if !mpirun::is_there() {
        return vec![];
    }
    let mut mpirun = mpirun::mpirun(ranks);
    let program = std::env::args_os().next().expect("a program has a name");
    mpirun.arg(program).env(RANK, value).args(["--nocapture", test, "--exact"]);
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let outcome = |rank| {
        let line = text.lines().find(|line| line.contains(&format!("rank {rank} has ")));
        let errors = String::from_utf8_lossy(&output.stderr);
        line.unwrap_or_else(|| panic!("{text}{errors}")).to_owned()
    };
    told.map(outcome).collect()
}

/// Runs a rank that joins a world, whose secrets are `none`, `equal` or `other` ones.
fn join_with(secrets: &str) {
    let mut launch = Launch::from_env().expect("mpirun sets the variables of a rank");
    let rank = launch.rank;
    launch.secret = match secrets {
        "none" => String::new(),
        "equal" => "a secret".to_owned(),
        _ => format!("the secret of {rank}"),
    };
    match World::mpi(&launch, Device::default(), Duration::from_secs(10)) {
        Ok(world) => println!("rank {rank} has a world of {}", world.size()),
        Err(error) => {
            println!("rank {rank} has {error}");
            thread::sleep(Duration::from_secs(3)); // as below
        }
    }
}

/// Runs a rank. Rank 1 expects an element less of rank 0 than that sends.
fn exchange_other_counts() {
    let launch = Launch::from_env().expect("mpirun sets the variables of a rank");
    let world = World::mpi(&launch, Device::default(), DEADLINE).expect("the ranks can connect");
    let (rank, comm) = (world.rank(), world.comm());
    let mut counts = PairCounts { sent: vec![2; RANKS], received: vec![2; RANKS] };
    counts.received[0] -= usize::from(rank == 1);
    let values = Tensor::<1>::ones([2 * RANKS], (world.device(), DType::F32));
    let exchanged = comm.all_to_all(values, &counts).and_then(Pending::wait);
    let error = exchanged.map(drop).and_then(|()| comm.barrier()).expect_err("the counts differ");
    println!("rank {rank} has {error}");
    // mpirun ends all ranks when the first one ends after a failure.
    thread::sleep(Duration::from_secs(3));
}
