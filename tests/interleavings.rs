//! The rounds of ranks that are threads, under a scheduler that tries thousands of
//! interleavings and fails on a deadlock.

#[allow(dead_code)] // Only ranks that are processes use the rest.
#[path = "../src/comm/rounds.rs"]
mod rounds;
#[allow(dead_code)] // These tests number their groups.
#[path = "../src/comm/thread_rounds.rs"]
mod thread_rounds;

/// The synchronisation primitives of the rounds of threads, controlled by the scheduler.
mod sync {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub use shuttle::thread::{ThreadId, current as current_thread};
}

use std::time::Duration;

use shuttle::thread;
use thread_rounds::{Failure, Participant, ThreadRounds};

const INTERLEAVINGS: usize = 2000;

/// Runs a function on every rank of a new world, in many interleavings, and checks its results.
fn explore<T: Send + 'static, P: Clone + Send + 'static>(
    size: usize,
    run: fn(&Participant<String, P>) -> T,
    check: fn(Vec<T>),
) {
    let world = move || {
        let participants = ThreadRounds::participants(size, Duration::from_secs(3600));
        let threads: Vec<_> = participants
            .into_iter()
            .map(|rank| {
                thread::spawn(move || {
                    let outcome = run(&rank);
                    rank.depart();
                    outcome
                })
            })
            .collect();
        check(threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect());
    };
    shuttle::check_random(world, INTERLEAVINGS);
    shuttle::check_pct(world, INTERLEAVINGS, 3);
}

/// Arrives in a round, and collects the payloads of all ranks.
fn exchange(
    rank: &Participant<String, usize>,
    call: &str,
    payload: usize,
) -> Result<Vec<usize>, Failure> {
    rank.arrive(call.to_owned(), payload)?.collect()
}

#[test]
fn ranks_several_rounds_ahead_collect_the_payloads_of_each_round() {
    explore(
        3,
        |rank| {
            let arrive =
                |round: usize| rank.arrive("sum".into(), 10 * round + rank.rank()).unwrap();
            let rounds = [arrive(0), arrive(1), arrive(2)];
            rounds.into_iter().rev().map(|round| round.collect().unwrap()).collect::<Vec<_>>()
        },
        |outcomes| {
            for outcome in outcomes {
                assert_eq!(outcome, [[20, 21, 22], [10, 11, 12], [0, 1, 2]]);
            }
        },
    );
}

#[test]
fn a_failure_reaches_all_ranks() {
    explore(
        3,
        |rank| {
            let first = exchange(rank, "first", rank.rank());
            if rank.rank() == 1 {
                rank.fail("a bug".into());
            }
            (first, exchange(rank, "second", rank.rank()))
        },
        |outcomes| {
            let bug = Failure::Peer { rank: 1, cause: "a bug".into() };
            for (first, second) in outcomes {
                // All ranks had arrived in the first round when rank 1 failed.
                assert_eq!(first, Ok(vec![0, 1, 2]));
                assert_eq!(second, Err(bug.clone()));
            }
        },
    );
}

#[test]
fn a_rank_that_departs_early_fails_the_ranks_that_wait_for_it() {
    explore(
        3,
        |rank| if rank.rank() == 2 { None } else { Some(exchange(rank, "sum", 0)) },
        |outcomes| {
            for outcome in &outcomes[..2] {
                let Some(Err(Failure::Peer { rank: 2, cause })) = outcome else {
                    panic!("{outcome:?}")
                };
                assert!(cause.contains("returned without sum"), "{cause}");
            }
        },
    );
}

#[test]
fn different_calls_are_an_error_on_all_ranks() {
    explore(
        3,
        |rank| exchange(rank, if rank.rank() == 1 { "sum" } else { "gather" }, 0),
        |outcomes| {
            for outcome in outcomes {
                let Err(Failure::Mismatch { calls }) = outcome else { panic!("{outcome:?}") };
                assert!(calls.contains("rank 1: sum"), "{calls}");
            }
        },
    );
}

#[test]
fn ranks_in_different_groups_fail_as_soon_as_all_of_them_wait() {
    explore(
        3,
        |rank| {
            let together = exchange(rank, "first", 0);
            // The usual mistake: rank 0 saves, and the others train on.
            let call = match rank.rank() {
                0 => exchange(rank, "save", 0),
                index => exchange(&rank.join(1, vec![0, 1, 2], index), "gather", 0),
            };
            (together, call)
        },
        |outcomes| {
            for (together, call) in outcomes {
                assert_eq!(together, Ok(vec![0; 3]));
                let Err(Failure::Mismatch { calls }) = call else { panic!("{call:?}") };
                // One of the others may be about to make its call.
                assert!(calls.contains("rank 0: save in group 0 of ranks 0 to 2"), "{calls}");
                assert!(calls.contains(": gather in group 1 of ranks 0 to 2"), "{calls}");
            }
        },
    );
}

#[test]
fn chains_of_ranks_that_one_rank_will_serve_do_not_fail() {
    explore(
        4,
        |rank| {
            let pair =
                |first: usize, index| rank.join(1 + first as u64, vec![first, first + 1], index);
            // Rank 3 serves rank 2, which then serves rank 1, and so on.
            let mut served = vec![];
            if rank.rank() < 3 {
                served.extend(exchange(&pair(rank.rank(), 0), "serve", 0).unwrap());
            }
            if rank.rank() > 0 {
                served.extend(exchange(&pair(rank.rank() - 1, 1), "serve", 1).unwrap());
            }
            served
        },
        |outcomes| assert_eq!(outcomes.concat(), [0, 1].repeat(6)),
    );
}

/// A payload that only the thread that made it may drop, as the tensors of a lazy backend.
struct ThreadBound(thread::ThreadId);

impl ThreadBound {
    fn new() -> Self {
        Self(thread::current().id())
    }
}

impl Clone for ThreadBound {
    fn clone(&self) -> Self {
        Self::new()
    }
}

impl Drop for ThreadBound {
    fn drop(&mut self) {
        assert_eq!(self.0, thread::current().id(), "dropped by another rank");
    }
}

#[test]
fn a_payload_is_dropped_by_the_rank_that_contributed_it() {
    explore(
        3,
        |rank| {
            let arrive = |call: &str, payload| rank.arrive(call.to_owned(), payload).unwrap();
            let rounds = [
                arrive("first", Some(ThreadBound::new())),
                arrive("second", Some(ThreadBound::new())),
            ];
            for round in rounds {
                assert_eq!(round.collect().unwrap().len(), 3);
            }
            // No rank returns before all ranks have collected the payloads.
            arrive("last", None).collect().unwrap();
        },
        |outcomes| assert_eq!(outcomes.len(), 3),
    );
}
