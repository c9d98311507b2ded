//! Where the ranks of one process meet: every rank leaves something and takes what all have left.
//!
//! Nothing here knows of tensors. A call is compared between the ranks, a payload is handed over.
//! Ranks may run ahead: arriving never blocks, only meeting does. The first failure is everybody's.
//!
//! What a rank leaves, that rank drops. A lazy backend orders the uses of a tensor by the thread that
//! made it: dropped by another one, a tensor can be gone before an operation that was given it runs.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

/// Why ranks could not meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// A rank is gone, or did not come in time.
    Peer {
        /// Its rank in the world.
        rank: usize,
        /// What happened to it.
        cause: String,
    },
    /// Ranks made different calls.
    Mismatch {
        /// Who called what.
        calls: String,
    },
}

/// Calls elsewhere that are remembered.
#[cfg(feature = "processes")]
const ELSEWHERE: usize = 1000;
/// How long a rank that waits elsewhere may be silent: it says so ten times a second.
const SILENCE: Duration = Duration::from_secs(2);

/// A meeting: the group, and how many meetings the group had before.
type Key = (u64, u64);

/// What every member of a group has left at a meeting.
struct Meeting<C, P> {
    arrived: Vec<Option<(C, P)>>,
    /// Members that have taken what was left, or will not.
    finished: usize,
}

/// What a rank waits for.
struct Wait {
    call: String,
    /// The ranks of the world that it waits for.
    missing: Vec<usize>,
    /// When it said so, if it waits elsewhere.
    said: Option<Instant>,
}

struct State<C, P> {
    meetings: BTreeMap<Key, Meeting<C, P>>,
    /// What ranks waited for elsewhere.
    #[cfg(feature = "processes")]
    elsewhere: BTreeMap<Key, BTreeMap<usize, C>>,
    /// What every rank of the world waits for now.
    waits: Vec<Option<Wait>>,
    /// What every rank of the world has left and nobody needs any more.
    returned: Vec<Vec<P>>,
    /// Ranks of the world that have returned.
    left: Vec<bool>,
    failure: Option<Failure>,
}

/// The place that all ranks of a world share.
pub struct Hall<C, P> {
    state: Mutex<State<C, P>>,
    changed: Condvar,
    groups: AtomicU64,
}

/// The place of one rank in one group.
pub struct Seat<C, P> {
    hall: Arc<Hall<C, P>>,
    group: u64,
    /// The ranks in the world of the group's members.
    members: Arc<[usize]>,
    /// The own index among the members.
    rank: usize,
    meetings: AtomicU64,
    deadline: Duration,
}

/// The right to what the others leave at one meeting.
pub struct Ticket<C, P> {
    hall: Arc<Hall<C, P>>,
    key: Key,
    members: Arc<[usize]>,
    /// The own rank in the world.
    rank: usize,
    call: String,
    deadline: Duration,
}

impl<C: Clone + PartialEq + Display, P: Clone> Hall<C, P> {
    /// The seats of a world of `size` ranks, all in one group. No rank waits for another longer
    /// than `deadline`.
    pub fn seats(size: usize, deadline: Duration) -> Vec<Seat<C, P>> {
        let state = State {
            meetings: BTreeMap::new(),
            #[cfg(feature = "processes")]
            elsewhere: BTreeMap::new(),
            waits: (0..size).map(|_| None).collect(),
            returned: (0..size).map(|_| vec![]).collect(),
            left: vec![false; size],
            failure: None,
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
            meetings: AtomicU64::new(0),
            deadline,
        };
        (0..size).map(seat).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State<C, P>> {
        self.state.lock().expect("nothing panics while it holds the lock")
    }

    fn fail(&self, failure: Failure) -> Failure {
        let mut state = self.lock();
        let first = state.failure.get_or_insert(failure).clone();
        self.changed.notify_all();
        first
    }
}

impl Wait {
    /// How long nothing was heard of a rank, if that is too long.
    fn silence(&self) -> Option<Duration> {
        self.said.map(|said| said.elapsed()).filter(|silence| *silence > SILENCE)
    }
}

impl<C, P> State<C, P> {
    /// Who keeps a rank waiting for too long. A rank that is missing because it waits itself is not to
    /// blame, but one that it waits for.
    fn culprit(&self, rank: usize, deadline: Duration) -> Failure {
        let late = |rank: usize, wait: &Wait| {
            let cause = format!("it did not come to {} within {deadline:?}", wait.call);
            Failure::Peer { rank, cause }
        };
        let wait_of = |rank: usize| self.waits[rank].as_ref();
        let first = wait_of(rank).expect("it waits");
        let mut asked = vec![rank];
        let mut next = 0;
        while let Some(wait) = asked.get(next).and_then(|rank| wait_of(*rank)) {
            for missing in &wait.missing {
                let Some(own) = wait_of(*missing) else { return late(*missing, wait) };
                if let Some(silence) = own.silence() {
                    let call = &own.call;
                    let cause = format!("silent for {silence:.1?}, when it waited for {call}");
                    return Failure::Peer { rank: *missing, cause };
                }
                if !asked.contains(missing) {
                    asked.push(*missing);
                }
            }
            next += 1;
        }
        // They wait for each other.
        late(first.missing[0], first)
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Seat<C, P> {
    /// The own index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The members of the group.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The own rank in the world.
    fn world_rank(&self) -> usize {
        self.members[self.rank]
    }

    /// Leaves `payload` at the next meeting of the group, without waiting.
    ///
    /// # Errors
    ///
    /// The world's failure, if there is one; a mismatch, if somebody made another call.
    pub fn arrive(&self, call: C, payload: P) -> Result<Ticket<C, P>, Failure> {
        let key = (self.group, self.meetings.fetch_add(1, Ordering::SeqCst));
        let ticket = Ticket {
            hall: self.hall.clone(),
            key,
            members: self.members.clone(),
            rank: self.world_rank(),
            call: call.to_string(),
            deadline: self.deadline,
        };
        self.take_back();
        let mut state = self.hall.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let size = self.size();
        let meeting = state
            .meetings
            .entry(key)
            .or_insert_with(|| Meeting { arrived: (0..size).map(|_| None).collect(), finished: 0 });
        meeting.arrived[self.rank] = Some((call, payload));
        let mismatch = meeting.mismatch(&self.members);
        if let Some(mismatch) = &mismatch {
            state.failure = Some(mismatch.clone());
        }
        self.hall.changed.notify_all();
        drop(state);
        match mismatch {
            Some(mismatch) => Err(mismatch),
            None => Ok(ticket),
        }
    }

    /// Drops what this rank has left and nobody needs any more.
    fn take_back(&self) {
        let returned = std::mem::take(&mut self.hall.lock().returned[self.world_rank()]);
        drop(returned);
    }

    /// The seat in a new group. All of its members make this call with the same group, which
    /// [`new_group`](Self::new_group) numbered for one of them.
    pub fn join(&self, group: u64, members: Vec<usize>, rank: usize) -> Self {
        let members = members.iter().map(|member| self.members[*member]).collect();
        Self {
            hall: self.hall.clone(),
            group,
            members,
            rank,
            meetings: AtomicU64::new(0),
            deadline: self.deadline,
        }
    }

    /// A number that no group has yet.
    pub fn new_group(&self) -> u64 {
        self.hall.groups.fetch_add(1, Ordering::SeqCst)
    }

    /// Ends all meetings, present and future, because of this rank. The first failure stays.
    pub fn fail(&self, cause: String) {
        self.hall.fail(Failure::Peer { rank: self.world_rank(), cause });
    }

    /// Ends the world because of another rank, which can't say so itself.
    #[cfg(feature = "processes")]
    pub fn fail_for(&self, rank: usize, cause: String) {
        self.hall.fail(Failure::Peer { rank, cause });
    }

    /// Says that this rank waits for `call`, which others have to make, too, but not here. Whoever
    /// waits for something else at the same point ends the world; so does, once it is too late, who
    /// keeps this rank waiting.
    ///
    /// # Errors
    ///
    /// The world's failure, which all of these are.
    #[cfg(feature = "processes")]
    pub fn compare(&self, number: u64, call: C, too_late: bool) -> Result<(), Failure> {
        self.check()?;
        let own = self.world_rank();
        let mut state = self.hall.lock();
        let State { elsewhere, waits, .. } = &mut *state;
        let waiting = elsewhere.entry((self.group, number)).or_default();
        waiting.insert(own, call.clone());
        let other = waiting.iter().find(|(_, other)| **other != call);
        let other = other.map(|(rank, other)| format!("rank {rank}: {other}, rank {own}: {call}"));
        let is_silent = |rank: usize| waits[rank].as_ref().and_then(Wait::silence).is_some();
        let others = self.members.iter().copied().filter(|rank| *rank != own);
        let missing = others.filter(|rank| !waiting.contains_key(rank) || is_silent(*rank));
        let missing: Vec<usize> = missing.collect();
        let too_late = too_late && !missing.is_empty();
        let said = Some(Instant::now());
        waits[own] = Some(Wait { call: call.to_string(), missing, said });
        while elsewhere.len() > ELSEWHERE {
            elsewhere.pop_first();
        }
        let failure = match other {
            Some(calls) => Failure::Mismatch { calls },
            None if too_late => state.culprit(own, self.deadline),
            None => return Ok(()),
        };
        drop(state);
        Err(self.hall.fail(failure))
    }

    /// Says that this rank no longer waits for what it said last.
    #[cfg(feature = "processes")]
    pub fn goes_on(&self) {
        self.hall.lock().waits[self.world_rank()] = None;
    }

    /// Whether the world goes on.
    ///
    /// # Errors
    ///
    /// Its failure.
    #[cfg(feature = "processes")]
    pub fn check(&self) -> Result<(), Failure> {
        self.hall.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// The rank in the world that everybody was failed by.
    pub fn failed(&self) -> Option<usize> {
        match self.hall.lock().failure {
            Some(Failure::Peer { rank, .. }) => Some(rank),
            _ => None,
        }
    }

    /// Says that this rank comes to no further meeting.
    pub fn leave(&self) {
        self.take_back();
        self.hall.lock().left[self.world_rank()] = true;
        self.hall.changed.notify_all();
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Meeting<C, P> {
    fn complete(&self) -> bool {
        self.arrived.iter().all(Option::is_some)
    }

    fn payloads(&self) -> Vec<P> {
        self.arrived.iter().flatten().map(|(_, payload)| payload.clone()).collect()
    }

    fn missing(&self) -> impl Iterator<Item = usize> {
        self.arrived.iter().enumerate().filter(|(_, call)| call.is_none()).map(|(rank, _)| rank)
    }

    /// Who called what, if not everybody who has arrived called the same.
    fn mismatch(&self, members: &[usize]) -> Option<Failure> {
        let calls = || {
            let seated = self.arrived.iter().zip(members);
            seated.filter_map(|(arrived, rank)| Some((rank, &arrived.as_ref()?.0)))
        };
        let (_, first) = calls().next()?;
        if calls().all(|(_, call)| call == first) {
            return None;
        }
        let calls: Vec<String> =
            calls().map(|(rank, call)| format!("rank {rank}: {call}")).collect();
        Some(Failure::Mismatch { calls: calls.join(", ") })
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Ticket<C, P> {
    /// Waits until all members have arrived, and takes what they left, in their order.
    ///
    /// A meeting that everybody came to succeeds for everybody, whatever happened since.
    ///
    /// # Errors
    ///
    /// The world's failure, which a member that is late or has returned becomes.
    pub fn meet(self) -> Result<Vec<P>, Failure> {
        let hall = self.hall.clone();
        let start = Instant::now();
        let mut state = hall.lock();
        loop {
            let meeting = state.meetings.get(&self.key).expect("it lives until all have finished");
            if let Some(mismatch) = meeting.mismatch(&self.members) {
                return Err(mismatch);
            }
            if meeting.complete() {
                let payloads = meeting.payloads();
                state.waits[self.rank] = None;
                return Ok(payloads);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let missing: Vec<usize> =
                meeting.missing().map(|member| self.members[member]).collect();
            let gone = missing.iter().copied().find(|rank| state.left[*rank]);
            state.waits[self.rank] = Some(Wait { call: self.call.clone(), missing, said: None });
            let failure = match (gone, self.deadline.checked_sub(start.elapsed())) {
                (Some(rank), _) => {
                    Failure::Peer { rank, cause: format!("it returned without {}", self.call) }
                }
                (None, Some(left)) => {
                    state = hall.changed.wait_timeout(state, left).expect("no panic under it").0;
                    continue;
                }
                (None, None) => state.culprit(self.rank, self.deadline),
            };
            drop(state);
            return Err(hall.fail(failure));
        }
    }
}

impl<C, P> Drop for Ticket<C, P> {
    fn drop(&mut self) {
        let Ok(mut state) = self.hall.state.lock() else { return };
        if let Some(meeting) = state.meetings.get_mut(&self.key) {
            meeting.finished += 1;
            if meeting.finished == self.members.len() {
                let finished = state.meetings.remove(&self.key).expect("it was there");
                for (arrived, rank) in finished.arrived.into_iter().zip(&*self.members) {
                    state.returned[*rank].extend(arrived.map(|(_, payload)| payload));
                }
            }
        }
    }
}

impl<C, P> fmt::Debug for Seat<C, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {:?}", self.rank, self.members)
    }
}
