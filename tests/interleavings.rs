//! The rounds of ranks that are threads, and the waits of ranks that are processes, under a
//! scheduler that tries thousands of interleavings and fails on a deadlock.

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

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use distmuon_testing::logs; // for the unit tests of the rounds
use rounds::{Blocked, RoundKey, Rounds, WaitPoint};
use shuttle::sync::{Arc, Condvar, Mutex, mpsc};
use shuttle::thread;
use thread_rounds::{Failure, Participant, ThreadRounds};

const INTERLEAVINGS: usize = 2000;

/// Runs a world in many interleavings.
fn interleave(world: impl Fn() + Copy + Send + Sync + 'static) {
    shuttle::check_random(world, INTERLEAVINGS);
    shuttle::check_pct(world, INTERLEAVINGS, 3);
}

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
    interleave(world);
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

/// A rank that is a process with several threads that make calls, which another engine carries out,
/// and its messages to the server. A thread may be overtaken between any two of them. All have made
/// a call before any waits, as [`Communicator`](distmuon::comm::Communicator) asks of them.
struct Process {
    rank: usize,
    world: Arc<ExternalWorld>,
    /// The number of its calls in every group.
    counts: Mutex<HashMap<u64, u64>>,
    callers: usize,
    waiting: Mutex<HashMap<thread::ThreadId, WaitPoint>>,
}

/// The server of a world, and the engine that carries out its calls.
struct ExternalWorld {
    server: Mutex<Server>,
    /// Notified when a rank is blocked, or all have ended.
    news: Condvar,
    engine: Mutex<Started>,
    /// Notified when a rank has started a call, or the world has failed.
    progress: Condvar,
}

struct Server {
    rounds: Rounds<String, ()>,
    is_blocked: bool,
    ended: bool,
}

/// The ranks that have started every call.
#[derive(Default)]
struct Started {
    ranks: HashMap<RoundKey, HashSet<usize>>,
    has_failed: bool,
}

impl Process {
    /// Makes a call of a group, and waits for its end. Returns `false` if the world failed.
    fn call(&self, group: u64, members: &[usize]) -> bool {
        let key = self.start(group);
        self.finish(key, members)
    }

    /// Makes all calls. Another thread for each group waits for their ends.
    fn run_ahead(self: Arc<Self>, calls: Calls) {
        let mut watches = HashMap::new();
        for (group, members) in calls {
            let (orders, _) = watches.entry(group).or_insert_with(|| {
                let (orders, received) = mpsc::channel();
                let (process, members) = (self.clone(), members.clone());
                let watch = move || received.iter().all(|key| process.finish(key, &members));
                (orders, thread::spawn(watch))
            });
            // A watch ends early if the world has failed.
            _ = orders.send(self.start(group));
        }
        for (orders, watch) in watches.into_values() {
            drop(orders);
            watch.join().expect("no watch panics");
        }
    }

    /// Makes a call of a group.
    fn start(&self, group: u64) -> RoundKey {
        let key = {
            let mut counts = self.counts.lock().unwrap();
            let count = counts.entry(group).or_default();
            *count += 1;
            (group, *count - 1)
        };
        let mut engine = self.world.engine.lock().unwrap();
        engine.ranks.entry(key).or_default().insert(self.rank);
        self.world.progress.notify_all();
        key
    }

    /// Waits for the end of a call. Returns `false` if the world failed.
    fn finish(&self, key: RoundKey, members: &[usize]) -> bool {
        let mut engine = self.world.engine.lock().unwrap();
        let mut is_reported = false;
        while engine.ranks[&key].len() < members.len() && !engine.has_failed {
            if is_reported {
                engine = self.world.progress.wait(engine).unwrap();
                continue;
            }
            drop(engine);
            self.report(key, members);
            is_reported = true;
            engine = self.world.engine.lock().unwrap();
        }
        let is_complete = engine.ranks[&key].len() == members.len();
        drop(engine);
        if is_reported {
            let mut server = self.world.server.lock().unwrap();
            server.rounds.clear_wait(self.rank, WaitPoint::ExternalCall(key));
            drop(server);
            self.waiting.lock().unwrap().remove(&thread::current().id());
        }
        is_complete
    }

    /// Reports a wait to the server, and that this rank is blocked if all of its threads wait.
    fn report(&self, key: RoundKey, members: &[usize]) {
        let call = Arc::from(format!("call {key:?}"));
        let since = Instant::now();
        let mut server = self.world.server.lock().unwrap();
        // An error is the world's, of which the engine tells.
        _ = server.rounds.wait_externally(self.rank, key, &members.into(), call, since);
        drop(server);
        let mut waiting = self.waiting.lock().unwrap();
        waiting.insert(thread::current().id(), WaitPoint::ExternalCall(key));
        let points: Vec<_> = waiting.values().copied().collect();
        drop(waiting);
        let in_order = self.callers == 1;
        if in_order || points.len() == self.callers {
            let counts = self.counts.lock().unwrap().clone();
            let mut server = self.world.server.lock().unwrap();
            server.rounds.block_after(self.rank, counts, Blocked { points, in_order });
            server.is_blocked = true;
            self.world.news.notify_all();
        }
    }
}

impl ExternalWorld {
    /// Looks for a deadlock whenever a rank is blocked, until all ranks have ended.
    fn serve(&self) {
        let mut server = self.server.lock().unwrap();
        while !server.ended {
            if std::mem::take(&mut server.is_blocked) && server.rounds.find_deadlock().is_some() {
                self.engine.lock().unwrap().has_failed = true;
                self.progress.notify_all();
            }
            if !server.is_blocked && !server.ended {
                server = self.news.wait(server).unwrap();
            }
        }
    }
}

/// The calls of a thread: a group and its members for each.
type Calls = Vec<(u64, Vec<usize>)>;

/// Runs the threads of three processes, and returns the failure of the world. Those with one thread
/// may go on before their calls have ended.
fn run_processes(runs_ahead: bool, calls: fn(rank: usize) -> Vec<Calls>) -> Option<Failure> {
    let rounds = Rounds::new(3, Duration::from_secs(3600));
    let world = Arc::new(ExternalWorld {
        server: Mutex::new(Server { rounds, is_blocked: false, ended: false }),
        news: Condvar::new(),
        engine: Mutex::default(),
        progress: Condvar::new(),
    });
    let server = {
        let world = world.clone();
        thread::spawn(move || world.serve())
    };
    let threads = (0..3).flat_map(|rank| {
        let calls = calls(rank);
        let process = Arc::new(Process {
            rank,
            world: world.clone(),
            counts: Mutex::default(),
            callers: calls.len(),
            waiting: Mutex::default(),
        });
        calls.into_iter().map(move |calls| {
            let process = process.clone();
            thread::spawn(move || match runs_ahead {
                true => process.run_ahead(calls),
                false => _ = calls.iter().all(|(group, members)| process.call(*group, members)),
            })
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no rank panics"));
    world.server.lock().unwrap().ended = true;
    world.news.notify_all();
    server.join().expect("the server does not panic");
    let server = world.server.lock().unwrap();
    server.rounds.failure().cloned()
}

#[test]
fn processes_whose_threads_will_be_served_do_not_fail() {
    let world = || {
        let failure = run_processes(false, |rank| {
            let all = (0, vec![0, 1, 2]);
            let pair = |first: usize| (1 + first as u64, vec![first, first + 1]);
            // Rank 2 serves rank 1, which then serves rank 0, in one thread. The other thread
            // makes calls of all ranks.
            let chain = match rank {
                0 => vec![pair(0), pair(0)],
                1 => vec![pair(1), pair(0), pair(1), pair(0)],
                _ => vec![pair(1), pair(1)],
            };
            vec![chain, vec![all; 2]]
        });
        assert_eq!(failure, None);
    };
    interleave(world);
}

#[test]
fn processes_all_of_whose_threads_wait_for_each_other_fail() {
    let world = || {
        let failure = run_processes(false, |rank| {
            let in_group = |group: u64| (group, vec![0, 1, 2]);
            // Both threads come to calls that others never make, one of them after a call of all.
            let other = u64::from(rank == 0);
            vec![vec![in_group(1 + other)], vec![in_group(0), in_group(3 + other)]]
        });
        let Some(Failure::Mismatch { calls }) = failure else { panic!("{failure:?}") };
        assert!(calls.contains("in group"), "{calls}");
    };
    interleave(world);
}

#[test]
fn processes_that_run_ahead_in_one_order_do_not_fail() {
    let world = || {
        let failure = run_processes(true, |rank| {
            // Each rank makes those of its groups, in this order.
            let groups = [(0, vec![0, 1, 2]), (1, vec![0, 1]), (2, vec![1, 2]), (3, vec![2, 0])];
            let order = [1, 0, 2, 3, 1, 0, 3, 2, 2, 1];
            let calls = order.map(|group| groups[group].clone()).into_iter();
            vec![calls.filter(|(_, members)| members.contains(&rank)).collect()]
        });
        assert_eq!(failure, None);
    };
    interleave(world);
}

#[test]
fn processes_that_run_ahead_to_calls_that_others_never_make_fail() {
    let world = || {
        let failure = run_processes(true, |rank| {
            let in_group = |group: u64| (group, vec![0, 1, 2]);
            // Rank 0 makes one call that the others leave out, and they one that it leaves out.
            let other = if rank == 0 { 1 } else { 2 };
            vec![vec![in_group(0), in_group(other), in_group(0), in_group(3)]]
        });
        let Some(Failure::Mismatch { calls }) = failure else { panic!("{failure:?}") };
        assert!(calls.contains("in group"), "{calls}");
    };
    interleave(world);
}
