//! Ranks of MPI whose calls do not fit each other.

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
    if !mpirun::is_there() {
        return;
    }
    let mut mpirun = mpirun::mpirun(RANKS);
    let program = std::env::args_os().next().expect("a program has a name");
    mpirun.arg(program).env(RANK, "1").arg("--nocapture");
    mpirun.args(["mpi::counts_of_two_processes_that_do_not_fit_are_a_mismatch", "--exact"]);
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let text = String::from_utf8_lossy(&output.stdout);
    for rank in 0..RANKS {
        let line = text.lines().find(|line| line.contains(&format!("rank {rank} has ")));
        let line =
            line.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
        let cause = "rank 1: all_to_all(f32), rank 0: another call, or other counts";
        assert!(line.contains(cause), "{line}");
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
