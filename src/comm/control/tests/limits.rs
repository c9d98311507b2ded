//! Tests of messages and worlds that are too large.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::super::protocol::MAX_PAYLOAD;
use super::*;

fn assert_too_long(error: &Error, call: &str) {
    let Error::Collective { collective, reason, .. } = error else { panic!("{error}") };
    assert!(*collective == call && reason.contains(&format!("at most {MAX_PAYLOAD}")), "{error}");
}

#[test]
fn gathers_that_are_too_long_fail_at_once_with_a_reason() {
    // Hundreds of megabytes take a while on a busy machine.
    let deadline = 20 * DEADLINE;
    let (world, _) = world_within(deadline, 5);
    let start = Instant::now();
    let length = MAX_PAYLOAD / 4;
    for error in on_all(&world.0, |rank| rank.all_gather_bytes(vec![1; length]).unwrap_err()) {
        assert_too_long(&error, "all_gather_bytes");
        assert!(error.to_string().contains(&(5 * length).to_string()), "{error}");
    }
    assert!(start.elapsed() < deadline / 2, "the deadline was not waited for");
    // The world has not failed.
    assert_gathers(&world.0);
}

#[test]
fn requests_that_are_too_long_are_rejected_before_they_are_sent() {
    let (world, _) = world(1);
    let error = world.0[0].broadcast_bytes(vec![0; MAX_PAYLOAD + 1], 0).unwrap_err();
    assert_too_long(&error, "broadcast_bytes");
    assert_gathers(&world.0);
}

/// The environment variable that is set in a child process.
#[cfg(unix)]
const CHILD: &str = "DISTMUON_TEST_LIMITS";

/// Starts one test of this file in a child process.
#[cfg(unix)]
fn child(test: &str, role: &str) -> Child {
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut command = Command::new(std::env::args_os().next().unwrap());
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command.env(CHILD, role).stdout(Stdio::piped()).spawn().unwrap()
}

/// Lowers both limits on this process's file descriptors, which can't be undone.
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
        return println!("error: {error}");
    }
    let output = child(TEST, "rank 0").wait_with_output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("a world of 40 ranks needs 136 file descriptors"), "{printed}");
    assert!(printed.contains("the limit is 64") && printed.contains("ulimit -n"), "{printed}");
}

#[test]
#[cfg(unix)]
fn a_connection_that_cannot_be_accepted_ends_the_world_with_a_reason() {
    const TEST: &str = "a_connection_that_cannot_be_accepted_ends_the_world_with_a_reason";
    if std::env::var_os(CHILD).is_some() {
        limit_descriptors(128);
        let (endpoint, address) = open();
        let first = endpoint.join(0, 3, SECRET, DEADLINE).unwrap();
        // Another part of the process opens all remaining descriptors.
        let files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        println!("address: {address}");
        println!("error: {}", first.all_gather_bytes(vec![]).unwrap_err());
        return drop(files);
    }
    let mut rank_0 = child(TEST, "rank 0");
    let mut lines = BufReader::new(rank_0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut printed =
        |key: &str| lines.find_map(|line| Some(line.split_once(key)?.1.to_owned())).expect(key);
    let _pending = TcpStream::connect(printed("address: ")).unwrap();
    let error = printed("error: ");
    assert!(error.contains("rank 0 failed: it can't accept another connection"), "{error}");
    assert!(error.contains("its limit on file descriptors is 128"), "{error}");
    rank_0.wait().unwrap();
}
