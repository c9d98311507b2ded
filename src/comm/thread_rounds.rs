//! Rounds of ranks that are threads of one process: a shared state behind a lock.
//!
//! Every rank holds a [`Participant`] for each of its groups. In a round, every participant of the
//! group [arrives](Participant::arrive) with a payload and [collects](PendingRound::collect) the
//! payloads of all. Arriving never blocks, so a rank may be several rounds ahead of the others.
//! Collecting waits until all participants have arrived, or until it is known that one will not
//! come: because it has [departed](Participant::depart), has failed, or is late. The ranks' calls
//! are compared; their payloads are opaque, and need not be tensors. The first failure of a world
//! ends all of its incomplete rounds, on all ranks.
//!
//! A payload is dropped by the rank that contributed it. A lazy backend orders the uses of a tensor
//! by the thread that made the tensor: dropped by another thread, a tensor can be freed before a
//! queued operation that uses it runs.

use std::collections::HashSet;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use super::rounds::Failure;
use super::rounds::{RoundKey, Rounds, WaitPoint};
use super::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, ThreadId, current_thread};

/// The time after which a rank that waits looks for ranks that wait for each other while others
/// compute.
const LOOK_AFTER: Duration = Duration::from_millis(500);

struct SharedState<C, P> {
    rounds: Rounds<C, P>,
    /// For every rank of the world, the threads that have made calls. A rank is blocked if all of
    /// them wait.
    callers: Vec<HashSet<ThreadId>>,
    /// For every rank of the world, the payloads it contributed that no rank needs any more.
    released: Vec<Vec<P>>,
}

/// The state that all ranks of a world share.
pub struct ThreadRounds<C, P> {
    state: Mutex<SharedState<C, P>>,
    /// Notified when a round is complete, the world has failed, or a rank is no longer busy.
    changed: Condvar,
    next_group: AtomicU64,
}

/// One rank's membership in one group.
pub struct Participant<C, P> {
    shared: Arc<ThreadRounds<C, P>>,
    group: u64,
    /// The members of the group, as ranks of the world.
    members: Arc<[usize]>,
    /// This rank's index among the members.
    rank: usize,
    next_round: AtomicU64,
    /// One, of which every participant of this rank in any group has a clone.
    groups: Arc<()>,
}

/// A round in which this rank has arrived, and whose payloads it may collect.
pub struct PendingRound<C: Clone + PartialEq + Display, P: Clone> {
    shared: Arc<ThreadRounds<C, P>>,
    key: RoundKey,
    /// This rank's index in the world.
    rank: usize,
}

impl<C: Clone + PartialEq + Display, P: Clone> ThreadRounds<C, P> {
    /// Returns the participants of a world of `size` ranks, all in one group. No rank waits for
    /// another longer than `deadline`.
    pub fn participants(size: usize, deadline: Duration) -> Vec<Participant<C, P>> {
        let state = SharedState {
            rounds: Rounds::new(size, deadline),
            callers: vec![HashSet::new(); size],
            released: (0..size).map(|_| vec![]).collect(),
        };
        let shared = Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            // Group 0 is the world.
            next_group: AtomicU64::new(1),
        });
        let members: Arc<[usize]> = (0..size).collect();
        (0..size)
            .map(|rank| Participant {
                shared: shared.clone(),
                group: 0,
                members: members.clone(),
                rank,
                next_round: AtomicU64::new(0),
                groups: Arc::new(()),
            })
            .collect()
    }

    fn lock(&self) -> Guard<'_, C, P> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Participant<C, P> {
    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of members of the group.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    fn world_rank(&self) -> usize {
        self.members[self.rank]
    }

    /// Contributes `payload` to the next round of the group, without waiting.
    ///
    /// # Errors
    ///
    /// The world's failure; a call that differs from another member's fails the world.
    pub fn arrive(&self, call: C, payload: P) -> Result<PendingRound<C, P>, Failure> {
        // The n-th call of every member of a group belongs to the same round.
        let key = (self.group, self.next_round.fetch_add(1, Ordering::SeqCst));
        self.drop_released();
        let mut state = self.shared.lock();
        state.callers[self.world_rank()].insert(current_thread().id());
        let arrival = state.rounds.arrive(key, &self.members, self.rank, call, payload);
        // Waiting ranks are woken once per round, not at every arrival.
        if !matches!(arrival, Ok(false)) {
            self.shared.changed.notify_all();
        }
        drop(state);
        let shared = self.shared.clone();
        arrival.map(|_| PendingRound { shared, key, rank: self.world_rank() })
    }

    /// Drops the payloads of this rank that no rank needs any more.
    fn drop_released(&self) {
        let released = std::mem::take(&mut self.shared.lock().released[self.world_rank()]);
        // After the lock is released: dropping a payload may take long.
        drop(released);
    }

    /// Returns this rank's participant in a new group. All members of the new group make this call
    /// with the same `group`, a number that one of them got from [`new_group`](Self::new_group).
    pub fn join(&self, group: u64, members: Vec<usize>, rank: usize) -> Self {
        let members = members.iter().map(|member| self.members[*member]).collect();
        let next_round = AtomicU64::new(0);
        let (shared, groups) = (self.shared.clone(), self.groups.clone());
        Self { shared, group, members, rank, next_round, groups }
    }

    /// The number of groups in which this rank has a participant.
    pub fn groups(&self) -> usize {
        Arc::strong_count(&self.groups)
    }

    /// Returns a number that no group has yet.
    pub fn new_group(&self) -> u64 {
        self.shared.next_group.fetch_add(1, Ordering::SeqCst)
    }

    /// Ends all rounds, present and future, because of this rank. The first failure is kept.
    pub fn fail(&self, cause: String) {
        self.shared.lock().rounds.fail(Failure::Peer { rank: self.world_rank(), cause });
        self.shared.changed.notify_all();
    }

    /// Returns the rank of the world that failed first.
    pub fn failed(&self) -> Option<usize> {
        match self.shared.lock().rounds.failure() {
            Some(Failure::Peer { rank, .. }) => Some(*rank),
            _ => None,
        }
    }

    /// Notes that this rank begins (`true`) or has ended (`false`) work that may take longer than
    /// the deadline. Meanwhile no rank times out, except while this rank itself waits.
    pub fn set_busy(&self, busy: bool) {
        self.shared.lock().rounds.set_busy(self.world_rank(), busy, Instant::now());
        self.shared.changed.notify_all();
    }

    /// Sets the longest time for which a busy rank of the world is waited for.
    pub fn set_busy_limit(&self, limit: Duration) {
        self.shared.lock().rounds.set_busy_limit(limit);
        self.shared.changed.notify_all();
    }

    /// Notes that this rank arrives in no further round.
    pub fn depart(&self) {
        // The last chance to drop them on this rank's thread.
        self.drop_released();
        let mut state = self.shared.lock();
        state.rounds.depart(self.world_rank(), Instant::now());
        state.find_deadlock_of_all();
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> SharedState<C, P> {
    /// Notes that a thread of a rank waits in a round.
    fn wait(&mut self, rank: usize, key: RoundKey, now: Instant) -> Result<(), Failure> {
        self.rounds.wait(rank, key, now)?;
        let callers = &mut self.callers[rank];
        callers.insert(current_thread().id());
        // Every thread that has ever made a call waits: the rank can't go on by itself.
        if self.rounds.waits(rank) == callers.len() {
            self.rounds.block_everywhere(rank);
        }
        self.find_deadlock_of_all().map_or(Ok(()), Err)
    }

    /// Ends the world if all ranks wait, so that none will arrive anywhere.
    fn find_deadlock_of_all(&mut self) -> Option<Failure> {
        self.rounds.all_are_blocked().then(|| self.rounds.find_deadlock()).flatten()
    }
}

/// A lock on the state that is released while a rank waits.
type Guard<'a, C, P> = MutexGuard<'a, SharedState<C, P>>;

impl<C: Clone + PartialEq + Display, P: Clone> PendingRound<C, P> {
    /// Waits until all members have arrived, and returns their payloads, in the order of members.
    ///
    /// A complete round succeeds on all ranks, even if the world has failed since.
    ///
    /// # Errors
    ///
    /// The world's failure; a member that is late or has departed fails the world.
    pub fn collect(self) -> Result<Vec<P>, Failure> {
        let mut state = self.shared.lock();
        let outcome = match state.rounds.payloads(self.key) {
            Some(payloads) => Ok(payloads),
            None => {
                let outcome = match state.wait(self.rank, self.key, Instant::now()) {
                    Ok(()) => {
                        let (relocked, outcome) = self.wait(state);
                        state = relocked;
                        outcome
                    }
                    Err(failure) => Err(failure),
                };
                state.rounds.clear_wait(self.rank, WaitPoint::Round(self.key));
                outcome
            }
        };
        if outcome.is_err() {
            self.shared.changed.notify_all();
        }
        // Before `self`, whose `drop` takes the lock.
        drop(state);
        outcome
    }

    fn wait<'a>(
        &'a self,
        mut state: Guard<'a, C, P>,
    ) -> (Guard<'a, C, P>, Result<Vec<P>, Failure>) {
        let point = WaitPoint::Round(self.key);
        let mut look = Some(Instant::now() + LOOK_AFTER);
        loop {
            // Before the failure: a complete round succeeds on all of its ranks, also where one
            // collects late.
            if let Some(payloads) = state.rounds.payloads(self.key) {
                return (state, Ok(payloads));
            }
            let now = Instant::now();
            let mut failure = state.rounds.failure().cloned();
            if look.is_some_and(|look| now >= look) {
                look = None;
                // Once per wait, since the search costs time in proportion to all waits.
                failure = failure.or_else(|| state.rounds.find_deadlock());
            }
            if let Some(failure) = failure.or_else(|| state.rounds.expire(self.rank, point, now)) {
                return (state, Err(failure));
            }
            state.rounds.notice_busy(now);
            let pause = state.rounds.pause(self.rank, point, now);
            let timeout = look.map_or(pause, |look| pause.min(look - now));
            let woken = self.shared.changed.wait_timeout(state, timeout);
            state = woken.expect("no thread panics while it holds the lock").0;
        }
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Drop for PendingRound<C, P> {
    fn drop(&mut self) {
        // Does not panic, as `lock` would: a panic while another one unwinds aborts the process.
        let Ok(mut state) = self.shared.state.lock() else { return };
        for (rank, payload) in state.rounds.finish(self.key) {
            // Each rank drops its own payloads, at its next call, on its thread: not under this
            // lock.
            state.released[rank].push(payload);
        }
    }
}

impl<C, P> fmt::Debug for Participant<C, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {:?}", self.rank, self.members)
    }
}
