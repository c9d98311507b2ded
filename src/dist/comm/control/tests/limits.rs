//! Messages and worlds that are too large.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::super::protocol::LONGEST;
use super::*;

fn too_long(error: &Error, call: &str) {
    let Error::Collective { collective, reason, .. } = error else { panic!("{error}") };
    assert!(*collective == call && reason.contains(&format!("at most {LONGEST}")), "{error}");
}

#[test]
fn gathers_that_are_too_long_fail_at_once_with_a_reason() {
    // Hundreds of megabytes take a while on a busy machine.
    let deadline = 20 * DEADLINE;
    let (world, _) = world_within(deadline, 5);
    let start = Instant::now();
    let share = LONGEST / 4;
    for error in on_all(&world.0, |rank| rank.all_gather_bytes(vec![1; share]).unwrap_err()) {
        too_long(&error, "all_gather_bytes");
        assert!(error.to_string().contains(&(5 * share).to_string()), "{error}");
    }
    assert!(start.elapsed() < deadline / 2, "the deadline was not waited for");
    // Nothing was lost: the world goes on.
    gathers(&world.0);
}

#[test]
fn requests_that_are_too_long_are_refused_before_they_are_sent() {
    let (world, _) = world(1);
    let error = world.0[0].broadcast_bytes(vec![0; LONGEST + 1], 0).unwrap_err();
    too_long(&error, "broadcast_bytes");
    gathers(&world.0);
}

/// The name of a variable that says which child a process is.
#[cfg(unix)]
const CHILD: &str = "DISTMUON_TEST_LIMITS";

/// Starts one test of this file again, in a process of its own.
#[cfg(unix)]
fn child(test: &str, role: &str) -> Child {
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut command = Command::new(std::env::args_os().next().unwrap());
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command.env(CHILD, role).stdout(Stdio::piped()).spawn().unwrap()
}

/// Gives this process so few file descriptors, for ever.
#[cfg(unix)]
fn limit_descriptors(limit: u64) {
    rlimit::setrlimit(rlimit::Resource::NOFILE, limit, limit).unwrap();
}

#[test]
#[cfg(unix)]
fn a_world_of_more_ranks_than_descriptors_names_the_limit() {
    const TEST: &str = "a_world_of_more_ranks_than_descriptors_names_the_limit";
    if std::env::var_os(CHILD).is_some() {
        limit_descriptors(64);
        let error = open().0.join(0, 40, SECRET, DEADLINE).map(drop).unwrap_err();
        return println!("said: {error}");
    }
    let output = child(TEST, "rank 0").wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("a world of 40 ranks needs 136 file descriptors"), "{said}");
    assert!(said.contains("the limit is 64") && said.contains("ulimit -n"), "{said}");
}

#[test]
#[cfg(unix)]
fn connections_that_cannot_be_taken_end_the_world_with_a_reason() {
    const TEST: &str = "connections_that_cannot_be_taken_end_the_world_with_a_reason";
    if std::env::var_os(CHILD).is_some() {
        limit_descriptors(128);
        let (meeting, address) = open();
        let first = meeting.join(0, 3, SECRET, DEADLINE).unwrap();
        // Something else in the process takes all that is left.
        let taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        println!("address: {address}");
        println!("said: {}", first.all_gather_bytes(vec![]).unwrap_err());
        return drop(taken);
    }
    let mut rank_0 = child(TEST, "rank 0");
    let mut lines = BufReader::new(rank_0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.find_map(|line| Some(line.split_once("address: ")?.1.to_owned())).unwrap();
    let _waits = TcpStream::connect(address).unwrap();
    let said = lines.find_map(|line| Some(line.split_once("said: ")?.1.to_owned())).unwrap();
    assert!(said.contains("rank 0 failed: it can't take another connection"), "{said}");
    assert!(said.contains("the limit on file descriptors there is 128"), "{said}");
    rank_0.wait().unwrap();
}
