//! The meeting point of ranks that are threads: every rank leaves a payload and takes the payloads of
//! all.
//!
//! Nothing here knows of tensors. A call is compared between the ranks, a payload is handed over.
//! Ranks may run ahead: arriving never blocks, only meeting does. The first failure reaches all ranks.
//!
//! A payload is dropped by the rank that left it. A lazy backend orders the uses of a tensor by the
//! thread that made it: dropped by another one, a tensor can be gone before an operation that was
//! given it runs.

use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use super::meetings::Failure;
use super::meetings::{Key, Meetings, Place};
use super::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

struct State<C, P> {
    meetings: Meetings<C, P>,
    /// For every rank of the world, the payloads that it left and that no rank needs any more.
    returned: Vec<Vec<P>>,
}

/// The meeting point that all ranks of a world share.
pub struct Hall<C, P> {
    state: Mutex<State<C, P>>,
    /// Notified when a round is complete, the world has failed, or a busy rank is busy no longer.
    changed: Condvar,
    groups: AtomicU64,
}

/// The place of one rank in one group.
pub struct Seat<C, P> {
    hall: Arc<Hall<C, P>>,
    group: u64,
    /// The ranks in the world of the group's members.
    members: Arc<[usize]>,
    /// This rank's index among the members.
    rank: usize,
    rounds: AtomicU64,
}

/// The right to the payloads of one round.
pub struct Ticket<C: Clone + PartialEq + Display, P: Clone> {
    hall: Arc<Hall<C, P>>,
    key: Key,
    /// This rank's rank in the world.
    rank: usize,
}

impl<C: Clone + PartialEq + Display, P: Clone> Hall<C, P> {
    /// The seats of a world of `size` ranks, all in one group. No rank waits for another longer
    /// than `deadline`.
    pub fn seats(size: usize, deadline: Duration) -> Vec<Seat<C, P>> {
        let state = State {
            meetings: Meetings::new(size, deadline),
            returned: (0..size).map(|_| vec![]).collect(),
        };
        let hall = Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            groups: AtomicU64::new(1),
        });
        let members: Arc<[usize]> = (0..size).collect();
        let seat = |rank| Seat {
            hall: hall.clone(),
            group: 0,
            members: members.clone(),
            rank,
            rounds: AtomicU64::new(0),
        };
        (0..size).map(seat).collect()
    }

    fn lock(&self) -> Guard<'_, C, P> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Seat<C, P> {
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

    /// Leaves `payload` in the next round of the group, without waiting.
    ///
    /// # Errors
    ///
    /// The world's failure, which a call that differs from another member's becomes.
    pub fn arrive(&self, call: C, payload: P) -> Result<Ticket<C, P>, Failure> {
        let key = (self.group, self.rounds.fetch_add(1, Ordering::SeqCst));
        self.take_back();
        let mut state = self.hall.lock();
        let arrived = state.meetings.arrive(key, &self.members, self.rank, call, payload);
        // Waiting ranks are woken once a round, and not at every arrival.
        if !matches!(arrived, Ok(false)) {
            self.hall.changed.notify_all();
        }
        drop(state);
        arrived.map(|_| Ticket { hall: self.hall.clone(), key, rank: self.world_rank() })
    }

    /// Drops the payloads of this rank that no rank needs any more.
    fn take_back(&self) {
        let returned = std::mem::take(&mut self.hall.lock().returned[self.world_rank()]);
        // After the lock is released: a payload's drop may take long.
        drop(returned);
    }

    /// The seat in a new group. All of its members make this call with the same group, which
    /// [`new_group`](Self::new_group) numbered for one of them.
    pub fn join(&self, group: u64, members: Vec<usize>, rank: usize) -> Self {
        let members = members.iter().map(|member| self.members[*member]).collect();
        Self { hall: self.hall.clone(), group, members, rank, rounds: AtomicU64::new(0) }
    }

    /// Returns a number that no group has yet.
    pub fn new_group(&self) -> u64 {
        self.hall.groups.fetch_add(1, Ordering::SeqCst)
    }

    /// Ends all rounds, present and future, because of this rank. The first failure stays.
    pub fn fail(&self, cause: String) {
        self.hall.lock().meetings.fail(Failure::Peer { rank: self.world_rank(), cause });
        self.hall.changed.notify_all();
    }

    /// Returns the rank in the world that failed first.
    pub fn failed(&self) -> Option<usize> {
        match self.hall.lock().meetings.failure() {
            Some(Failure::Peer { rank, .. }) => Some(*rank),
            _ => None,
        }
    }

    /// Says that this rank does something that may take longer than the deadline, or has done it. No rank
    /// times out meanwhile, except while this one waits itself.
    pub fn set_busy(&self, busy: bool) {
        self.hall.lock().meetings.set_busy(self.world_rank(), busy, Instant::now());
        self.hall.changed.notify_all();
    }

    /// Says that this rank comes to no further round.
    pub fn leave(&self) {
        self.take_back();
        self.hall.lock().meetings.leave(self.world_rank(), Instant::now());
        self.hall.changed.notify_all();
    }
}

/// A lock on the state that is released while a rank waits.
type Guard<'a, C, P> = MutexGuard<'a, State<C, P>>;

impl<C: Clone + PartialEq + Display, P: Clone> Ticket<C, P> {
    /// Waits until all members have arrived, and returns what they left, in their order.
    ///
    /// A round that all members came to succeeds for all, whatever has happened since.
    ///
    /// # Errors
    ///
    /// The world's failure, which a member that is late or has returned becomes.
    pub fn meet(self) -> Result<Vec<P>, Failure> {
        let mut state = self.hall.lock();
        let outcome = match state.meetings.result(self.key) {
            Some(payloads) => Ok(payloads),
            None => match state.meetings.wait(self.rank, self.key, Instant::now()) {
                Ok(()) => {
                    let (waited, outcome) = self.wait(state);
                    state = waited;
                    state.meetings.go_on(self.rank, Place::Here(self.key));
                    outcome
                }
                Err(failure) => Err(failure),
            },
        };
        if outcome.is_err() {
            self.hall.changed.notify_all();
        }
        drop(state);
        outcome
    }

    fn wait<'a>(
        &'a self,
        mut state: Guard<'a, C, P>,
    ) -> (Guard<'a, C, P>, Result<Vec<P>, Failure>) {
        let place = Place::Here(self.key);
        loop {
            if let Some(payloads) = state.meetings.result(self.key) {
                return (state, Ok(payloads));
            }
            let now = Instant::now();
            let failure = state.meetings.failure().cloned();
            if let Some(failure) = failure.or_else(|| state.meetings.expire(self.rank, place, now))
            {
                return (state, Err(failure));
            }
            let due = state.meetings.due(self.rank, place).expect("this rank waits");
            // Past due without a failure, a busy rank is the reason: it notifies when it is done.
            let patience = if due > now { due - now } else { state.meetings.deadline() };
            state = self.hall.changed.wait_timeout(state, patience).expect("no panic under it").0;
        }
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Drop for Ticket<C, P> {
    fn drop(&mut self) {
        let Ok(mut state) = self.hall.state.lock() else { return };
        for (rank, payload) in state.meetings.finish(self.key) {
            state.returned[rank].push(payload);
        }
    }
}

impl<C, P> fmt::Debug for Seat<C, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {:?}", self.rank, self.members)
    }
}
