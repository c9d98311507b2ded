//! The meeting point of ranks that are threads, under a scheduler that tries thousands of
//! interleavings and fails on one in which nobody can go on.

#[allow(dead_code)] // processes use the rest
#[path = "../src/dist/comm/meetings.rs"]
mod meetings;
#[allow(dead_code)] // the tests use no groups
#[path = "../src/dist/comm/rendezvous.rs"]
mod rendezvous;

/// The primitives of the meeting point, under the control of the scheduler.
mod sync {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
}

use std::time::Duration;

use rendezvous::{Failure, Hall, Seat};
use shuttle::thread;

const INTERLEAVINGS: usize = 2000;

/// Runs a function on every rank of a new world, in many interleavings, and looks at what it returns.
fn explore<T: Send + 'static, P: Clone + Send + 'static>(
    size: usize,
    rank: fn(&Seat<String, P>) -> T,
    check: fn(Vec<T>),
) {
    let world = move || {
        let seats = Hall::seats(size, Duration::from_secs(3600));
        let threads: Vec<_> = seats
            .into_iter()
            .map(|seat| {
                thread::spawn(move || {
                    let outcome = rank(&seat);
                    seat.leave();
                    outcome
                })
            })
            .collect();
        check(threads.into_iter().map(|thread| thread.join().expect("no panic")).collect());
    };
    shuttle::check_random(world, INTERLEAVINGS);
    shuttle::check_pct(world, INTERLEAVINGS, 3);
}

fn meet(seat: &Seat<String, usize>, call: &str, payload: usize) -> Result<Vec<usize>, Failure> {
    seat.arrive(call.to_owned(), payload)?.meet()
}

#[test]
fn ranks_that_run_ahead_meet_all_the_same() {
    explore(
        3,
        |seat| {
            let arrive = |turn: usize| seat.arrive("sum".into(), 10 * turn + seat.rank()).unwrap();
            let tickets = [arrive(0), arrive(1), arrive(2)];
            tickets.into_iter().rev().map(|ticket| ticket.meet().unwrap()).collect::<Vec<_>>()
        },
        |outcomes| {
            for outcome in outcomes {
                assert_eq!(outcome, [[20, 21, 22], [10, 11, 12], [0, 1, 2]]);
            }
        },
    );
}

#[test]
fn a_failure_reaches_everybody() {
    explore(
        3,
        |seat| {
            let first = meet(seat, "first", seat.rank());
            if seat.rank() == 1 {
                seat.fail("a bug".into());
            }
            (first, meet(seat, "second", seat.rank()))
        },
        |outcomes| {
            let bug = Failure::Peer { rank: 1, cause: "a bug".into() };
            for (first, second) in outcomes {
                // All had arrived at the first meeting when the rank failed.
                assert_eq!(first, Ok(vec![0, 1, 2]));
                assert_eq!(second, Err(bug.clone()));
            }
        },
    );
}

#[test]
fn who_leaves_is_missed() {
    explore(
        3,
        |seat| if seat.rank() == 2 { None } else { Some(meet(seat, "sum", 0)) },
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
        |seat| meet(seat, if seat.rank() == 1 { "sum" } else { "gather" }, 0),
        |outcomes| {
            for outcome in outcomes {
                let Err(Failure::Mismatch { calls }) = outcome else { panic!("{outcome:?}") };
                assert!(calls.contains("rank 1: sum"), "{calls}");
            }
        },
    );
}

/// Something that only the thread that made it may drop, as the tensors of a lazy backend.
struct Own(thread::ThreadId);

impl Own {
    fn new() -> Self {
        Self(thread::current().id())
    }
}

impl Clone for Own {
    fn clone(&self) -> Self {
        Self::new()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        assert_eq!(self.0, thread::current().id(), "dropped by another rank");
    }
}

#[test]
fn what_a_rank_leaves_it_drops_itself() {
    explore(
        3,
        |seat| {
            let arrive = |call: &str, own| seat.arrive(call.to_owned(), own).unwrap();
            let tickets = [arrive("first", Some(Own::new())), arrive("second", Some(Own::new()))];
            for ticket in tickets {
                assert_eq!(ticket.meet().unwrap().len(), 3);
            }
            // Nobody returns before all have taken what was left.
            arrive("last", None).meet().unwrap();
        },
        |outcomes| assert_eq!(outcomes.len(), 3),
    );
}
