//! The state of all meetings of a world: who has come to which call, who waits, who is to blame.
//!
//! A pure state machine that never blocks. [`rendezvous`](super::rendezvous) puts it behind a lock
//! for ranks that are threads; rank 0's server of `control` drives it with the messages of
//! processes. Its owner tells waiting ranks when a round is complete or the world has failed, and
//! asks it from time to time whether a deadline has passed.

use std::collections::HashMap;
#[cfg(feature = "processes")]
use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The reason for which ranks could not meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// A rank died, failed, or did not come in time.
    Peer {
        /// Its rank in the world.
        rank: usize,
        /// The reason it gave, or what was observed.
        cause: String,
    },
    /// Ranks made different calls.
    Mismatch {
        /// The ranks and their calls.
        calls: String,
    },
}

/// The number of a group, and of a call among the group's calls of one kind.
pub type Key = (u64, u64);

/// Extra time for a call that all ranks came to: a dead connection is noticed within it, and names
/// a better culprit.
#[cfg(feature = "processes")]
const GRACE: Duration = Duration::from_secs(2);

/// The longest deadline, which no run lives to see: points in time beyond it may not exist.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// A point at which a rank waits for the other members of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A round of this state machine.
    Here(Key),
    /// A call of an engine that knows nothing of failures.
    #[cfg(feature = "processes")]
    Elsewhere(Key),
}

/// One call of a group, and what every member gave to it.
struct Round<C, P> {
    members: Arc<[usize]>,
    /// The call of the member that came first, with which all others are compared.
    call: C,
    first: usize,
    given: Vec<Option<P>>,
    arrived: usize,
    /// Members that have taken the result, or never will.
    finished: usize,
}

impl<C, P> Round<C, P> {
    fn is_complete(&self) -> bool {
        self.arrived == self.members.len()
    }
}

/// The calls of a group that engines carry out, as far as ranks have reported them.
#[cfg(feature = "processes")]
struct Calls {
    members: Arc<[usize]>,
    /// The number of every rank's latest reported call.
    latest: HashMap<usize, u64>,
    /// The calls that are the latest of some rank.
    current: BTreeMap<u64, Reported>,
}

#[cfg(feature = "processes")]
struct Reported {
    call: Arc<str>,
    /// The rank that reported it first.
    rank: usize,
    /// The number of ranks whose latest call it is.
    ranks: usize,
}

#[derive(Clone)]
struct Wait {
    place: Place,
    since: Instant,
    /// The call, where no round knows it.
    #[cfg(feature = "processes")]
    call: Arc<str>,
}

#[derive(Default)]
struct Rank {
    /// Several threads of a process may wait at once.
    waits: Vec<Wait>,
    busy: bool,
    left: bool,
    /// For a rank that has left, the number of calls that it made elsewhere in every group.
    #[cfg(feature = "processes")]
    made: HashMap<u64, u64>,
}

impl Rank {
    /// Returns `true` if the rank is busy and waits for nobody.
    fn is_occupied(&self) -> bool {
        self.busy && !self.left && self.waits.is_empty()
    }
}

/// The state of all meetings of a world.
pub struct Meetings<C, P> {
    rounds: HashMap<Key, Round<C, P>>,
    #[cfg(feature = "processes")]
    calls: HashMap<u64, Calls>,
    ranks: Vec<Rank>,
    /// The number of ranks that have left.
    left: usize,
    /// The last time a rank was occupied no longer. All deadlines start anew there.
    resumed: Option<Instant>,
    deadline: Duration,
    failure: Option<Failure>,
}

impl<C: Clone + PartialEq + Display, P: Clone> Meetings<C, P> {
    /// A world of `size` ranks, in which no rank waits for another longer than `deadline`.
    pub fn new(size: usize, deadline: Duration) -> Self {
        Self {
            rounds: HashMap::new(),
            #[cfg(feature = "processes")]
            calls: HashMap::new(),
            ranks: (0..size).map(|_| Rank::default()).collect(),
            left: 0,
            resumed: None,
            deadline: deadline.min(FOREVER),
            failure: None,
        }
    }

    /// The longest time that a rank may be waited for.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the first failure of the world as an error.
    pub fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Returns the first failure of the world.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Ends the world, and returns its first failure, which stays.
    pub fn fail(&mut self, failure: Failure) -> Failure {
        self.failure.get_or_insert(failure).clone()
    }

    /// Adds what a member gives to a round. Returns `true` if it was the last one.
    ///
    /// # Errors
    ///
    /// The world's failure, which a call that differs from the first member's becomes.
    pub fn arrive(
        &mut self,
        key: Key,
        members: &Arc<[usize]>,
        member: usize,
        call: C,
        payload: P,
    ) -> Result<bool, Failure> {
        self.check()?;
        let round = self.rounds.entry(key).or_insert_with(|| Round {
            members: members.clone(),
            call: call.clone(),
            first: member,
            given: vec![None; members.len()],
            arrived: 0,
            finished: 0,
        });
        if round.call != call {
            let (first, this) = (members[round.first], members[member]);
            let calls = format!("rank {first}: {}, rank {this}: {call}", round.call);
            return Err(self.fail(Failure::Mismatch { calls }));
        }
        if round.given[member].replace(payload).is_none() {
            round.arrived += 1;
        }
        Ok(round.is_complete())
    }

    /// Returns what the members gave to a round, in their order, if all have.
    pub fn result(&self, key: Key) -> Option<Vec<P>> {
        let round = self.rounds.get(&key).filter(|round| round.is_complete())?;
        Some(round.given.iter().flatten().cloned().collect())
    }

    /// Notes that a member needs a round no longer. After the last member, returns what was given,
    /// and by which rank of the world.
    pub fn finish(&mut self, key: Key) -> Vec<(usize, P)> {
        let Some(round) = self.rounds.get_mut(&key) else { return vec![] };
        round.finished += 1;
        if round.finished < round.members.len() {
            return vec![];
        }
        self.remove(key)
    }

    /// Ends a round, and returns what was given, and by which rank of the world.
    pub fn remove(&mut self, key: Key) -> Vec<(usize, P)> {
        let Some(Round { members, given, .. }) = self.rounds.remove(&key) else { return vec![] };
        let given = members.iter().copied().zip(given);
        given.filter_map(|(rank, payload)| Some((rank, payload?))).collect()
    }

    /// Notes that a rank waits in a round.
    ///
    /// # Errors
    ///
    /// The world's failure, which a member that has returned without coming becomes.
    pub fn wait(&mut self, rank: usize, key: Key, now: Instant) -> Result<(), Failure> {
        self.add(
            rank,
            Wait {
                place: Place::Here(key),
                since: now,
                #[cfg(feature = "processes")]
                call: "".into(),
            },
        )
    }

    fn add(&mut self, rank: usize, wait: Wait) -> Result<(), Failure> {
        self.check()?;
        // Without the first test, every wait would cost as much as there are members.
        let gone = (self.left > 0)
            .then(|| self.missing(&wait).find(|missing| self.ranks[*missing].left))
            .flatten();
        if let Some(gone) = gone {
            let cause = self.returned_without(&wait);
            return Err(self.fail(Failure::Peer { rank: gone, cause }));
        }
        self.end_occupation(rank, wait.since);
        self.go_on(rank, wait.place);
        self.ranks[rank].waits.push(wait);
        Ok(())
    }

    /// Notes that a rank no longer waits at a place. Its other threads may wait elsewhere.
    pub fn go_on(&mut self, rank: usize, place: Place) {
        self.ranks[rank].waits.retain(|wait| wait.place != place);
    }

    /// Notes that a rank, if it was [occupied](Rank::is_occupied), is so no longer.
    fn end_occupation(&mut self, rank: usize, now: Instant) {
        if self.ranks[rank].is_occupied() {
            self.resumed = self.resumed.max(Some(now));
        }
    }

    /// Notes that a rank does something that may take longer than the deadline, or has done it.
    pub fn set_busy(&mut self, rank: usize, busy: bool, now: Instant) {
        self.end_occupation(rank, now);
        self.ranks[rank].busy = busy;
    }

    /// Notes that a rank comes to no further call, which ends the world if another rank waits for it.
    pub fn leave(&mut self, rank: usize, now: Instant) {
        self.end_occupation(rank, now);
        let this = &mut self.ranks[rank];
        self.left += usize::from(!std::mem::replace(&mut this.left, true));
        this.waits.clear();
        let waits = self.ranks.iter().flat_map(|other| &other.waits);
        let missed = waits.into_iter().find(|wait| self.misses(wait, rank));
        if let Some(cause) = missed.map(|wait| self.returned_without(wait)) {
            self.fail(Failure::Peer { rank, cause });
        }
    }

    /// When a rank that waits in a round has waited for too long, if no rank is occupied then.
    pub fn due(&self, rank: usize, place: Place) -> Option<Instant> {
        let wait = self.ranks[rank].waits.iter().find(|wait| wait.place == place)?;
        Some(self.due_of(wait))
    }

    fn due_of(&self, wait: &Wait) -> Instant {
        wait.since.max(self.resumed.unwrap_or(wait.since)) + self.deadline
    }

    /// Returns `true` if any rank is [occupied](Rank::is_occupied). Nobody is given up then: any rank may wait
    /// for that one through others, or have waited for it until a moment ago.
    fn is_suspended(&self) -> bool {
        self.ranks.iter().any(Rank::is_occupied)
    }

    /// Ends the world if a rank has waited for too long at a place, and returns its failure.
    pub fn expire(&mut self, rank: usize, place: Place, now: Instant) -> Option<Failure> {
        let wait = self.ranks[rank].waits.iter().find(|wait| wait.place == place)?;
        if now < self.due_of(wait) || self.is_suspended() {
            return None;
        }
        let culprit = self.culprit(rank, wait, now)?;
        Some(self.fail(culprit))
    }

    /// Finds the rank responsible for a timeout by following the wait-for graph. A rank that is
    /// itself waiting is not to blame, unless all of them wait for each other.
    fn culprit(&self, rank: usize, first: &Wait, _now: Instant) -> Option<Failure> {
        let mut asked = vec![false; self.ranks.len()];
        asked[rank] = true;
        let mut waits = vec![first];
        let mut next = 0;
        while let Some(wait) = waits.get(next).copied() {
            for missing in self.missing(wait) {
                let state = &self.ranks[missing];
                if state.waits.is_empty() {
                    return Some(self.late(missing, wait));
                }
                if !std::mem::replace(&mut asked[missing], true) {
                    waits.extend(&state.waits);
                }
            }
            next += 1;
        }
        match self.missing(first).next() {
            Some(missing) => Some(self.late(missing, first)),
            #[cfg(feature = "processes")]
            None if _now >= self.due_of(first) + GRACE => {
                let call = self.call_of(first);
                let cause = format!("{call} did not finish, though all ranks came to it");
                Some(Failure::Peer { rank, cause })
            }
            None => None,
        }
    }

    fn late(&self, rank: usize, wait: &Wait) -> Failure {
        let (call, deadline) = (self.call_of(wait), self.deadline);
        Failure::Peer { rank, cause: format!("it did not come to {call} within {deadline:?}") }
    }

    fn returned_without(&self, wait: &Wait) -> String {
        format!("it returned without {}", self.call_of(wait))
    }

    fn call_of(&self, wait: &Wait) -> String {
        match wait.place {
            Place::Here(key) => {
                self.rounds.get(&key).map_or("a call".into(), |round| round.call.to_string())
            }
            #[cfg(feature = "processes")]
            Place::Elsewhere(_) => wait.call.to_string(),
        }
    }

    /// The ranks of the world that a rank waits for.
    fn missing<'a>(&'a self, wait: &Wait) -> impl Iterator<Item = usize> + 'a {
        let place = wait.place;
        let members: &[usize] = match place {
            Place::Here(key) => self.rounds.get(&key).map_or(&[], |round| &round.members),
            #[cfg(feature = "processes")]
            Place::Elsewhere((group, _)) => {
                self.calls.get(&group).map_or(&[], |calls| &calls.members)
            }
        };
        let came = move |(member, rank): &(usize, &usize)| self.has_come(place, *member, **rank);
        members.iter().enumerate().filter(move |member| !came(member)).map(|(_, rank)| *rank)
    }

    /// Returns `true` if a wait is for this rank.
    fn misses(&self, wait: &Wait, rank: usize) -> bool {
        self.missing(wait).any(|missing| missing == rank)
    }

    /// Returns `true` if a member of a group, a rank of the world, has come to a place.
    fn has_come(&self, place: Place, member: usize, _rank: usize) -> bool {
        match place {
            Place::Here(key) => {
                self.rounds.get(&key).is_none_or(|round| round.given[member].is_some())
            }
            #[cfg(feature = "processes")]
            Place::Elsewhere((group, number)) => {
                let latest = self.calls.get(&group).and_then(|calls| calls.latest.get(&_rank));
                let made = self.ranks[_rank].made.get(&group);
                latest.is_some_and(|latest| *latest >= number)
                    || made.is_some_and(|made| *made > number)
            }
        }
    }
}

#[cfg(feature = "processes")]
impl<C: Clone + PartialEq + Display, P: Clone> Meetings<C, P> {
    /// Notes that a rank has waited for some time for a call of an engine.
    ///
    /// # Errors
    ///
    /// The world's failure: a rank that makes another call at the same point, or has returned
    /// without this one.
    pub fn wait_elsewhere(
        &mut self,
        rank: usize,
        key: Key,
        members: &Arc<[usize]>,
        call: Arc<str>,
        since: Instant,
    ) -> Result<(), Failure> {
        self.check()?;
        let calls = self.calls.entry(key.0).or_insert_with(|| Calls {
            members: members.clone(),
            latest: HashMap::new(),
            current: BTreeMap::new(),
        });
        if let Some(calls) = calls.report(rank, key.1, &call) {
            return Err(self.fail(Failure::Mismatch { calls }));
        }
        self.add(rank, Wait { place: Place::Elsewhere(key), since, call })
    }

    /// Notes how many calls a rank that leaves has made elsewhere, in every group.
    pub fn leave_after(&mut self, rank: usize, made: HashMap<u64, u64>, now: Instant) {
        self.ranks[rank].made = made;
        self.leave(rank, now);
    }

    /// Ends the world if any rank has waited for too long, and returns its failure.
    pub fn expire_all(&mut self, now: Instant) -> Option<Failure> {
        if self.failure.is_some() || self.is_suspended() {
            return None;
        }
        // Ranks that wait for the same call miss the same ranks: one look at each call is enough,
        // since the one that has waited longest is due first.
        let mut seen = HashSet::new();
        let waits = self
            .ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, state)| state.waits.iter().map(move |wait| (rank, wait)));
        let due = waits.filter(|(_, wait)| now >= self.due_of(wait));
        let culprit = due
            .filter(|(_, wait)| {
                seen.insert(match wait.place {
                    Place::Here(key) => (false, key),
                    Place::Elsewhere(key) => (true, key),
                })
            })
            .find_map(|(rank, wait)| self.culprit(rank, wait, now))?;
        Some(self.fail(culprit))
    }

    /// Adds something to the cause of the failure, before anybody has learnt of it.
    pub fn explain(&mut self, more: &str) {
        if let Some(Failure::Peer { cause, .. }) = &mut self.failure {
            cause.push_str(more);
        }
    }

    /// Returns the call that a rank waits for.
    pub fn waits_for(&self, rank: usize) -> Option<String> {
        self.ranks[rank].waits.first().map(|wait| self.call_of(wait))
    }
}

#[cfg(feature = "processes")]
impl Calls {
    /// Makes a call a rank's latest. Returns both calls if another rank makes another one there.
    fn report(&mut self, rank: usize, number: u64, call: &Arc<str>) -> Option<String> {
        let before = self.latest.get(&rank).copied();
        if let Some(other) = self.current.get(&number).filter(|other| other.call != *call) {
            return Some(format!("rank {}: {}, rank {rank}: {call}", other.rank, other.call));
        }
        // A thread that waits for an earlier call takes nothing back.
        if before.is_some_and(|before| before >= number) {
            return None;
        }
        self.latest.insert(rank, number);
        let first = || Reported { call: call.clone(), rank, ranks: 0 };
        self.current.entry(number).or_insert_with(first).ranks += 1;
        let last = before.and_then(|before| Some((before, self.current.get_mut(&before)?)));
        if let Some((before, reported)) = last {
            reported.ranks -= 1;
            if reported.ranks == 0 {
                self.current.remove(&before);
            }
        }
        None
    }
}
