//! The rounds of a world as a state machine: arrivals, waits, deadlines, and the rank responsible
//! for a failure.
//!
//! A round is one call of a group. Every member of the group, a participant, arrives in the round
//! with a payload. The round is a barrier: it is complete when all participants have arrived. The
//! state machine never blocks and knows nothing of threads or connections.
//! [`thread_rounds`](super::thread_rounds) puts it behind a lock for ranks that are threads; rank
//! 0's server in `control` drives it with the messages of ranks that are processes. The owner of
//! the state informs waiting ranks when a round is complete or the world has failed, and asks from
//! time to time whether a deadline has passed.
//!
//! Calls that MPI or NCCL carry out are not rounds. A rank that has waited for such an external
//! call for some time reports it, so that the calls are compared and a missing rank is found.
//!
//! Ranks that make different calls in different groups wait for each other without an end. A rank
//! is *blocked* if all of its threads that make calls wait. Of blocked ranks each of which waits
//! for another one of them, none can go on: that is a deadlock, which ends the world at once.
//!
//! A rank of which one thread makes all calls may go on before its external calls have ended. It is
//! then blocked *in order*, at each of them. In a circle of such ranks, each has begun its call
//! before the call of the rank before it. Ranks that have one order of all calls make no circle.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The reason for which a world ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// A rank died, failed, or did not arrive in time.
    Peer {
        /// The rank that failed.
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
pub type RoundKey = (u64, u64);

/// Extra time for a call that all ranks have reached: a lost connection is noticed within it, and
/// names the responsible rank better than a timeout.
const CONNECTION_LOSS_GRACE: Duration = Duration::from_secs(2);

/// The time for which a busy rank suspends all deadlines, unless another limit is set.
const BUSY_LIMIT: Duration = Duration::from_secs(3600);

/// The time after which a busy rank for which others wait is logged.
const BUSY_NOTICE: Duration = Duration::from_secs(300);

/// The number of calls that the description of a deadlock names.
const NAMED_CALLS: usize = 8;

/// The longest deadline, 34 years: an `Instant` may not reach further.
pub const LONGEST_WAIT: Duration = Duration::from_secs(1 << 30);

/// A point at which a rank waits for the other members of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WaitPoint {
    /// A round of this state machine.
    Round(RoundKey),
    /// A call carried out by an engine that does not detect failures.
    ExternalCall(RoundKey),
}

/// One call of a group, with the payloads of its members.
struct Round<C, P> {
    members: Arc<[usize]>,
    /// The call of the member that arrived first, with which all others are compared.
    call: C,
    /// The index of the member that arrived first.
    first: usize,
    payloads: Vec<Option<P>>,
    arrived: usize,
    /// Members that have collected the payloads, or never will.
    finished: usize,
}

impl<C, P> Round<C, P> {
    fn is_complete(&self) -> bool {
        self.arrived == self.members.len()
    }
}

/// The external calls of a group, as far as ranks have reported them.
struct ExternalCalls {
    members: Arc<[usize]>,
    /// The number of every rank's latest reported call.
    latest: HashMap<usize, u64>,
    /// The calls that are the latest of some rank.
    current: BTreeMap<u64, ReportedCall>,
}

struct ReportedCall {
    call: Arc<str>,
    /// The rank that reported it first.
    first: usize,
    /// The number of ranks whose latest call it is.
    ranks: usize,
}

#[derive(Clone)]
struct Wait {
    point: WaitPoint,
    since: Instant,
    /// The name of an external call; empty for a round, which names its call.
    call: Arc<str>,
}

/// The points at which a rank is blocked. Empty for a rank that may go on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocked {
    /// The points at which the rank waits.
    pub points: Vec<WaitPoint>,
    /// `true` if one thread makes all of the rank's calls: no later one comes before one of these.
    /// Otherwise, each of several threads waits at one of the points.
    pub in_order: bool,
}

impl Blocked {
    /// Returns `true` if a blocked rank waits for ever, given points that will never be complete.
    fn is_stuck(&self, never: impl Fn(&WaitPoint) -> bool) -> bool {
        match self.in_order {
            true => self.points.iter().any(never),
            false => self.points.iter().all(never),
        }
    }
}

#[derive(Default)]
struct Rank {
    /// Several threads of a process may wait at once.
    waits: Vec<Wait>,
    blocked: Blocked,
    /// `true` once several threads make its calls, which have no order.
    has_several_threads: bool,
    /// The time since which it is busy.
    busy: Option<Instant>,
    /// `true` once the log has told that it is busy for long.
    noticed: bool,
    departed: bool,
    /// The number of its external calls in every group, for a rank that has departed or that is
    /// blocked.
    external_calls: HashMap<u64, u64>,
}

impl Rank {
    /// The time since which the rank is busy, if it waits for no other rank.
    fn occupied(&self) -> Option<Instant> {
        self.busy.filter(|_| !self.departed && self.waits.is_empty())
    }
}

/// The state of all rounds of a world.
pub struct Rounds<C, P> {
    rounds: HashMap<RoundKey, Round<C, P>>,
    /// The external calls of every group.
    external: HashMap<u64, ExternalCalls>,
    ranks: Vec<Rank>,
    /// The number of ranks that have departed.
    departed: usize,
    /// The last time that a rank ceased to be occupied. All deadlines start anew at that time.
    resumed: Option<Instant>,
    deadline: Duration,
    /// The longest time for which a busy rank suspends deadlines.
    busy_limit: Duration,
    failure: Option<Failure>,
}

impl<C: Clone + PartialEq + Display, P: Clone> Rounds<C, P> {
    /// Creates the state of a world of `size` ranks, in which no rank waits for another longer than
    /// `deadline`.
    pub fn new(size: usize, deadline: Duration) -> Self {
        Self {
            rounds: HashMap::new(),
            external: HashMap::new(),
            ranks: (0..size).map(|_| Rank::default()).collect(),
            departed: 0,
            resumed: None,
            deadline: deadline.min(LONGEST_WAIT),
            busy_limit: BUSY_LIMIT,
            failure: None,
        }
    }

    /// Returns the first failure of the world as an error.
    pub fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Returns the first failure of the world.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Ends the world, and returns its first failure, which is kept.
    pub fn fail(&mut self, failure: Failure) -> Failure {
        self.failure.get_or_insert(failure).clone()
    }

    /// Adds a member's payload to a round. Returns `true` if the round is complete.
    ///
    /// # Errors
    ///
    /// The world's failure; a call that differs from the first member's fails the world.
    pub fn arrive(
        &mut self,
        key: RoundKey,
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
            payloads: vec![None; members.len()],
            arrived: 0,
            finished: 0,
        });
        if round.call != call {
            let first = members[round.first];
            let rank = members[member];
            let calls = format!("rank {first}: {}, rank {rank}: {call}", round.call);
            return Err(self.fail(Failure::Mismatch { calls }));
        }
        // A member that arrives again, with a newer payload, does not count twice.
        if round.payloads[member].replace(payload).is_none() {
            round.arrived += 1;
        }
        Ok(round.is_complete())
    }

    /// Returns the payloads of a complete round, in the order of members.
    pub fn payloads(&self, key: RoundKey) -> Option<Vec<P>> {
        let round = self.rounds.get(&key).filter(|round| round.is_complete())?;
        Some(round.payloads.iter().flatten().cloned().collect())
    }

    /// Notes that one more member has finished with a round. After the last member, returns the
    /// payloads with the ranks of the world that contributed them.
    pub fn finish(&mut self, key: RoundKey) -> Vec<(usize, P)> {
        let Some(round) = self.rounds.get_mut(&key) else { return vec![] };
        round.finished += 1;
        // The payloads stay until the last member has read them.
        if round.finished < round.members.len() {
            return vec![];
        }
        self.remove(key)
    }

    /// Removes a round, and returns its payloads with the ranks of the world that contributed them.
    pub fn remove(&mut self, key: RoundKey) -> Vec<(usize, P)> {
        let Some(Round { members, payloads, .. }) = self.rounds.remove(&key) else { return vec![] };
        let payloads = members.iter().copied().zip(payloads);
        payloads.filter_map(|(rank, payload)| Some((rank, payload?))).collect()
    }

    /// Notes that a rank waits in a round.
    ///
    /// # Errors
    ///
    /// The world's failure; a missing member that has departed fails the world.
    pub fn wait(&mut self, rank: usize, key: RoundKey, now: Instant) -> Result<(), Failure> {
        self.add_wait(rank, Wait { point: WaitPoint::Round(key), since: now, call: "".into() })
    }

    fn add_wait(&mut self, rank: usize, wait: Wait) -> Result<(), Failure> {
        self.check()?;
        // Without the first test, every wait would cost time in proportion to the members.
        let departed = (self.departed > 0)
            .then(|| self.missing(&wait).find(|missing| self.ranks[*missing].departed))
            .flatten();
        if let Some(departed) = departed {
            let cause = self.early_return(&wait);
            return Err(self.fail(Failure::Peer { rank: departed, cause }));
        }
        // A busy rank that waits is not occupied any more: others may be waiting for it now.
        self.end_occupation(rank, wait.since);
        self.clear_wait(rank, wait.point);
        self.ranks[rank].waits.push(wait);
        Ok(())
    }

    /// Notes that a rank no longer waits at a point. Its other threads may wait at others.
    pub fn clear_wait(&mut self, rank: usize, point: WaitPoint) {
        let Rank { waits, blocked, .. } = &mut self.ranks[rank];
        waits.retain(|wait| wait.point != point);
        if blocked.in_order {
            blocked.points.retain(|other| *other != point);
        } else if blocked.points.contains(&point) {
            // One thread of the rank goes on, so the rank as a whole is not blocked.
            blocked.points.clear();
        }
    }

    /// The number of points at which a rank waits.
    pub fn waits(&self, rank: usize) -> usize {
        self.ranks[rank].waits.len()
    }

    /// Notes that a rank is blocked at some points. It may have ceased to wait at one of them since
    /// it said so.
    pub fn block(&mut self, rank: usize, mut blocked: Blocked) {
        let state = &mut self.ranks[rank];
        let waits_at = |point: &WaitPoint| state.waits.iter().any(|wait| wait.point == *point);
        // The message that a rank is blocked may be overtaken by the end of one of its waits.
        state.has_several_threads |= !blocked.in_order;
        if blocked.in_order {
            // Several threads may watch calls, and their messages may come in another order: late,
            // or after a further thread has made calls.
            if state.has_several_threads {
                return;
            }
            let known = std::mem::take(&mut state.blocked.points);
            let is_new = |point: &WaitPoint| !blocked.points.contains(point);
            let known: Vec<WaitPoint> = known.into_iter().filter(is_new).collect();
            blocked.points.extend(known);
            blocked.points.retain(waits_at);
        } else if !blocked.points.iter().all(waits_at) {
            if !state.blocked.in_order {
                return;
            }
            // An earlier report of calls in order counts no more.
            blocked = Blocked::default();
        }
        state.blocked = blocked;
    }

    /// [`block`](Self::block) at all points of the rank.
    pub fn block_everywhere(&mut self, rank: usize) {
        let points = self.ranks[rank].waits.iter().map(|wait| wait.point).collect();
        self.block(rank, Blocked { points, in_order: false });
    }

    /// Returns `true` if no rank can go on by itself.
    pub fn all_are_blocked(&self) -> bool {
        self.ranks.iter().all(|rank| rank.departed || !rank.blocked.points.is_empty())
    }

    /// Ends the world if blocked ranks wait for each other, and returns the failure.
    pub fn find_deadlock(&mut self) -> Option<Failure> {
        if self.failure.is_some() {
            return None;
        }
        // Waits at one point miss the same ranks, which are looked up once for each point.
        let mut missing: HashMap<WaitPoint, Vec<usize>> = HashMap::new();
        for wait in self.ranks.iter().flat_map(|rank| &rank.waits) {
            missing.entry(wait.point).or_insert_with(|| self.missing(wait).collect());
        }
        // The largest set of ranks each of which waits for another one of the set: start with all
        // blocked ranks, and take out those that may go on until none is left to take out.
        let mut stuck: Vec<bool> = self
            .ranks
            .iter()
            .map(|rank| !rank.blocked.points.is_empty() && !rank.departed)
            .collect();
        loop {
            // A thread goes on, or a call ends, if all ranks that it waits for may arrive.
            let never = |point: &WaitPoint| missing[point].iter().any(|rank| stuck[*rank]);
            let is_free = |rank: &usize| !self.ranks[*rank].blocked.is_stuck(never);
            let free: Vec<usize> =
                (0..stuck.len()).filter(|rank| stuck[*rank] && is_free(rank)).collect();
            if free.is_empty() {
                break;
            }
            free.into_iter().for_each(|rank| stuck[rank] = false);
        }
        let stuck: Vec<usize> = (0..stuck.len()).filter(|rank| stuck[*rank]).collect();
        (!stuck.is_empty()).then(|| {
            let calls = self.calls(&stuck);
            self.fail(Failure::Mismatch { calls })
        })
    }

    /// The calls that some ranks wait for, with their groups.
    fn calls(&self, ranks: &[usize]) -> String {
        let mut by_point: Vec<(&Wait, Vec<usize>)> = vec![];
        for rank in ranks {
            for wait in &self.ranks[*rank].waits {
                match by_point.iter_mut().find(|(known, _)| known.point == wait.point) {
                    Some((_, ranks)) => ranks.push(*rank),
                    None => by_point.push((wait, vec![*rank])),
                }
            }
        }
        // Of thousands of ranks, a message that names some calls is read; one that names all is
        // not.
        let more = by_point.len().saturating_sub(NAMED_CALLS);
        let described = by_point.iter().take(NAMED_CALLS).map(|(wait, ranks)| {
            let (group, members) = self.group(wait.point);
            let (call, ranks, members) = (self.call_name(wait), named(ranks), named(members));
            format!("{ranks}: {call} in group {group} of {members}")
        });
        let described = described.collect::<Vec<_>>().join(", ");
        if more > 0 { format!("{described}, and {more} more calls") } else { described }
    }

    /// Starts all deadlines anew if a rank is [occupied](Rank::occupied), which it is about to
    /// cease to be.
    fn end_occupation(&mut self, rank: usize, now: Instant) {
        if self.ranks[rank].occupied().is_some() {
            self.resumed = self.resumed.max(Some(now));
        }
    }

    /// Notes that a rank begins (`true`) or has ended (`false`) work that may take longer than the
    /// deadline.
    pub fn set_busy(&mut self, rank: usize, busy: bool, now: Instant) {
        self.end_occupation(rank, now);
        let state = &mut self.ranks[rank];
        (state.busy, state.noticed) = (busy.then_some(now), false);
    }

    /// Sets the longest time for which a busy rank suspends deadlines: an hour by default.
    pub fn set_busy_limit(&mut self, limit: Duration) {
        self.busy_limit = limit;
    }

    /// Logs, once, that a rank is busy for long while others wait.
    pub fn notice_busy(&mut self, now: Instant) {
        if self.ranks.iter().all(|rank| rank.waits.is_empty()) {
            return;
        }
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let Some(since) = rank.occupied().filter(|_| !rank.noticed) else { continue };
            let busy = now.saturating_duration_since(since);
            if busy >= BUSY_NOTICE {
                rank.noticed = true;
                log::warn!(
                    "rank {index} has been busy for {busy:.0?}, as with a checkpoint, and others \
                     wait for it: the world ends after {:?}",
                    self.busy_limit
                );
            }
        }
    }

    /// Notes that a rank makes no further call, which ends the world if another rank waits for it.
    pub fn depart(&mut self, rank: usize, now: Instant) {
        self.end_occupation(rank, now);
        let state = &mut self.ranks[rank];
        self.departed += usize::from(!std::mem::replace(&mut state.departed, true));
        // A departed rank waits for nothing, and others must not be told that it blocks.
        state.waits.clear();
        state.blocked = Blocked::default();
        let waits = self.ranks.iter().flat_map(|other| &other.waits);
        let unmet = waits.into_iter().find(|wait| self.is_missing(rank, wait));
        if let Some(cause) = unmet.map(|wait| self.early_return(wait)) {
            self.fail(Failure::Peer { rank, cause });
        }
    }

    /// Returns the time at which a wait of a rank expires, if no rank is occupied then.
    pub fn due(&self, rank: usize, point: WaitPoint) -> Option<Instant> {
        let wait = self.ranks[rank].waits.iter().find(|wait| wait.point == point)?;
        Some(self.due_time(wait))
    }

    fn due_time(&self, wait: &Wait) -> Instant {
        // The time that others were busy does not count against those that wait.
        wait.since.max(self.resumed.unwrap_or(wait.since)) + self.deadline
    }

    /// Returns `true` if any rank is [occupied](Rank::occupied), for less than the limit. No wait
    /// expires then: any rank may wait for the occupied one through others, or have waited for it
    /// until a moment ago.
    fn is_suspended(&self, now: Instant) -> bool {
        self.ranks.iter().any(|rank| rank.occupied().is_some_and(|since| !self.is_over(since, now)))
    }

    /// Returns `true` if a rank that is busy since some time has been busy for too long.
    fn is_over(&self, since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) >= self.busy_limit
    }

    /// Returns the time after which a wait that has not ended looks at the state again.
    pub fn pause(&self, rank: usize, point: WaitPoint, now: Instant) -> Duration {
        let due = self.due(rank, point).map_or(Duration::ZERO, |due| due - now.min(due));
        let ranks = self.ranks.iter().filter_map(Rank::occupied);
        // A rank that is busy notifies when it is done.
        let busy = ranks.flat_map(|since| [since + BUSY_NOTICE, since + self.busy_limit]);
        let busy = busy.filter(|time| *time > now).map(|time| time - now).min();
        match (due, busy) {
            // A rank may have been spared for so long.
            (Duration::ZERO, busy) => busy.unwrap_or(self.deadline.min(CONNECTION_LOSS_GRACE)),
            (due, busy) => busy.map_or(due, |busy| busy.min(due)),
        }
    }

    /// Ends the world if a rank has waited at a point for too long, and returns the failure.
    pub fn expire(&mut self, rank: usize, point: WaitPoint, now: Instant) -> Option<Failure> {
        let wait = self.ranks[rank].waits.iter().find(|wait| wait.point == point)?;
        if now < self.due_time(wait) || self.is_suspended(now) {
            return None;
        }
        let failure = self.responsible(rank, wait, now)?;
        Some(self.fail(failure))
    }

    /// Finds the rank responsible for a timeout by following the wait-for graph. A rank that is
    /// itself waiting is not blamed: if all of them wait for each other, their calls differ.
    fn responsible(&self, rank: usize, first: &Wait, now: Instant) -> Option<Failure> {
        // A search in breadth: the rank that is named is the one with the fewest waits in between.
        let mut visited = vec![false; self.ranks.len()];
        visited[rank] = true;
        let mut waits = vec![first];
        let mut next = 0;
        while let Some(wait) = waits.get(next).copied() {
            for missing in self.missing(wait) {
                let state = &self.ranks[missing];
                // It runs and does not come: everything else waits for it.
                if state.waits.is_empty() {
                    return Some(self.late(missing, wait));
                }
                // It can go on, but its thread has not run since, for instance on a machine that
                // was suspended. Its wait is none for another rank.
                if state.waits.iter().any(|wait| self.is_answered(wait)) {
                    let is_late = now >= self.due_time(first) + CONNECTION_LOSS_GRACE;
                    return is_late.then(|| self.late(missing, wait));
                }
                if !std::mem::replace(&mut visited[missing], true) {
                    waits.extend(&state.waits);
                }
            }
            next += 1;
        }
        match self.missing(first).next() {
            Some(_) => {
                let ranks: Vec<usize> = (0..visited.len()).filter(|rank| visited[*rank]).collect();
                Some(Failure::Mismatch { calls: self.calls(&ranks) })
            }
            // All ranks came, and the engine does not finish. If a connection is lost, the control
            // plane names the rank within this time.
            None if now >= self.due_time(first) + CONNECTION_LOSS_GRACE => {
                let call = self.call_name(first);
                let cause = format!("{call} did not finish, although all ranks came to it");
                Some(Failure::Peer { rank, cause })
            }
            None => None,
        }
    }

    /// Returns `true` if the round that a rank waits for is complete.
    fn is_answered(&self, wait: &Wait) -> bool {
        matches!(wait.point, WaitPoint::Round(_)) && self.missing(wait).next().is_none()
    }

    /// The failure of a rank that is missing for longer than the deadline.
    fn late(&self, rank: usize, wait: &Wait) -> Failure {
        let call = self.call_name(wait);
        let cause = match self.ranks[rank].busy {
            Some(_) => format!("it did not come to {call}, and was busy for {:?}", self.busy_limit),
            None => format!("it did not come to {call} within {:?}", self.deadline),
        };
        Failure::Peer { rank, cause }
    }

    /// The cause of the failure of a rank that has departed and is waited for.
    fn early_return(&self, wait: &Wait) -> String {
        format!("it returned without {}", self.call_name(wait))
    }

    fn call_name(&self, wait: &Wait) -> String {
        match wait.point {
            WaitPoint::Round(key) => {
                self.rounds.get(&key).map_or("a call".into(), |round| round.call.to_string())
            }
            WaitPoint::ExternalCall(_) => wait.call.to_string(),
        }
    }

    /// The number and the members of the group of a point.
    fn group(&self, point: WaitPoint) -> (u64, &[usize]) {
        match point {
            WaitPoint::Round(key) => {
                (key.0, self.rounds.get(&key).map_or(&[], |round| &round.members))
            }
            WaitPoint::ExternalCall((group, _)) => {
                (group, self.external.get(&group).map_or(&[], |calls| &calls.members))
            }
        }
    }

    /// The ranks of the world that a wait is for: members that have not arrived.
    fn missing<'a>(&'a self, wait: &Wait) -> impl Iterator<Item = usize> + 'a {
        let point = wait.point;
        let (_, members) = self.group(point);
        let arrived =
            move |(member, rank): &(usize, &usize)| self.has_arrived(point, *member, **rank);
        members.iter().enumerate().filter(move |member| !arrived(member)).map(|(_, rank)| *rank)
    }

    /// Returns `true` if a wait is for this rank.
    fn is_missing(&self, rank: usize, wait: &Wait) -> bool {
        self.missing(wait).any(|missing| missing == rank)
    }

    /// Returns `true` if a member of a group, which is a rank of the world, has reached a point.
    fn has_arrived(&self, point: WaitPoint, member: usize, rank: usize) -> bool {
        match point {
            // A round is removed only when it is complete.
            WaitPoint::Round(key) => {
                self.rounds.get(&key).is_none_or(|round| round.payloads[member].is_some())
            }
            WaitPoint::ExternalCall((group, number)) => {
                let latest = self.external.get(&group).and_then(|calls| calls.latest.get(&rank));
                let total = self.ranks[rank].external_calls.get(&group);
                latest.is_some_and(|latest| *latest >= number)
                    || total.is_some_and(|total| *total > number)
            }
        }
    }
}

impl<C: Clone + PartialEq + Display, P: Clone> Rounds<C, P> {
    /// Notes that a rank has waited for some time for an external call.
    ///
    /// # Errors
    ///
    /// The world's failure; another rank with a different call of this number, or that has departed
    /// without the call, fails the world.
    pub fn wait_externally(
        &mut self,
        rank: usize,
        key: RoundKey,
        members: &Arc<[usize]>,
        call: Arc<str>,
        since: Instant,
    ) -> Result<(), Failure> {
        self.check()?;
        let calls = self.external.entry(key.0).or_insert_with(|| ExternalCalls {
            members: members.clone(),
            latest: HashMap::new(),
            current: BTreeMap::new(),
        });
        if let Some(calls) = calls.report(rank, key.1, &call) {
            return Err(self.fail(Failure::Mismatch { calls }));
        }
        self.add_wait(rank, Wait { point: WaitPoint::ExternalCall(key), since, call })
    }

    /// Notes that a rank makes no further call, after this number of external calls in every group.
    pub fn depart_after(&mut self, rank: usize, external_calls: HashMap<u64, u64>, now: Instant) {
        self.ranks[rank].external_calls = external_calls;
        self.depart(rank, now);
    }

    /// [`block`](Self::block) after this number of external calls in every group.
    pub fn block_after(
        &mut self,
        rank: usize,
        external_calls: HashMap<u64, u64>,
        blocked: Blocked,
    ) {
        let counts = &mut self.ranks[rank].external_calls;
        for (group, count) in external_calls {
            // Of two threads, the message with fewer calls may come last.
            counts.entry(group).and_modify(|known| *known = count.max(*known)).or_insert(count);
        }
        self.block(rank, blocked);
    }

    /// Ends the world if any rank has waited for too long, and returns the failure.
    pub fn expire_all(&mut self, now: Instant) -> Option<Failure> {
        if self.failure.is_some() || self.is_suspended(now) {
            return None;
        }
        // Ranks that wait for the same call miss the same ranks: one look at each call is enough,
        // and its longest wait is due first.
        let mut seen = HashSet::new();
        let waits = self
            .ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, state)| state.waits.iter().map(move |wait| (rank, wait)));
        let due = waits.filter(|(_, wait)| now >= self.due_time(wait));
        let failure = due
            .filter(|(_, wait)| seen.insert(wait.point))
            .find_map(|(rank, wait)| self.responsible(rank, wait, now))?;
        Some(self.fail(failure))
    }

    /// Appends to the cause of the failure, which must not have been sent to any rank yet.
    pub fn append_to_cause(&mut self, text: &str) {
        if let Some(Failure::Peer { cause, .. }) = &mut self.failure {
            cause.push_str(text);
        }
    }

    /// Returns the call that a rank waits for.
    pub fn awaited_call(&self, rank: usize) -> Option<String> {
        self.ranks[rank].waits.first().map(|wait| self.call_name(wait))
    }
}

/// The text of some ranks.
pub fn named(ranks: &[usize]) -> String {
    // A group has the order of its keys.
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    match &ranks[..] {
        [rank] => format!("rank {rank}"),
        [first, .., last] if last - first + 1 == ranks.len() => format!("ranks {first} to {last}"),
        _ => {
            let listed: Vec<String> =
                ranks.iter().take(NAMED_CALLS).map(ToString::to_string).collect();
            let more = ranks.len().saturating_sub(NAMED_CALLS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("ranks {}{more}", listed.join(", "))
        }
    }
}

impl ExternalCalls {
    /// Makes a call a rank's latest. Returns both calls if another rank makes a different call of
    /// this number.
    fn report(&mut self, rank: usize, number: u64, call: &Arc<str>) -> Option<String> {
        let previous = self.latest.get(&rank).copied();
        if let Some(other) = self.current.get(&number).filter(|other| other.call != *call) {
            return Some(format!("rank {}: {}, rank {rank}: {call}", other.first, other.call));
        }
        // A thread that waits for an earlier call does not undo the latest one.
        if previous.is_some_and(|previous| previous >= number) {
            return None;
        }
        self.latest.insert(rank, number);
        let first_report = || ReportedCall { call: call.clone(), first: rank, ranks: 0 };
        self.current.entry(number).or_insert_with(first_report).ranks += 1;
        let replaced =
            previous.and_then(|previous| Some((previous, self.current.get_mut(&previous)?)));
        if let Some((previous, reported)) = replaced {
            // Only calls that are some rank's latest are kept, so memory does not grow with the
            // calls.
            reported.ranks -= 1;
            if reported.ranks == 0 {
                self.current.remove(&previous);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs;

    #[test]
    fn a_rank_whose_round_is_complete_is_late_and_does_not_wait() {
        let mut rounds = Rounds::new(2, LONGEST_WAIT);
        let (start, members) = (Instant::now(), Arc::from([0, 1]));
        rounds.arrive((0, 0), &members, 1, "or", ()).unwrap();
        rounds.wait(1, (0, 0), start).unwrap();
        rounds.arrive((0, 0), &members, 0, "or", ()).unwrap();
        // Rank 0 goes on, and the thread of rank 1 does not run.
        rounds.arrive((0, 1), &members, 0, "gather", ()).unwrap();
        rounds.wait(0, (0, 1), start).unwrap();
        let due = start + LONGEST_WAIT;
        assert!(rounds.expire(0, WaitPoint::Round((0, 1)), due).is_none());
        let failure = rounds.expire(0, WaitPoint::Round((0, 1)), due + CONNECTION_LOSS_GRACE);
        let Some(Failure::Peer { rank: 1, cause }) = failure else { panic!("it is not blamed") };
        assert!(cause.starts_with("it did not come to gather"), "{cause}");
    }

    /// Ranks 0 and 1 have each begun a call that the other one has not.
    fn waiting_in_order(later: Blocked) -> Option<Failure> {
        let mut rounds: Rounds<&str, ()> = Rounds::new(2, LONGEST_WAIT);
        let (start, members) = (Instant::now(), Arc::from([0, 1]));
        for rank in 0..2 {
            let (key, group) = ((rank as u64, 0), rank as u64);
            rounds.wait_externally(rank, key, &members, "sum".into(), start).unwrap();
            let points = vec![WaitPoint::ExternalCall(key)];
            let blocked = Blocked { points, in_order: true };
            rounds.block_after(rank, HashMap::from([(group, 1)]), blocked.clone());
            if rank == 1 {
                rounds.block_after(1, HashMap::new(), later.clone());
                // The same again does no harm, and a late one after another thread's call is none.
                rounds.block_after(1, HashMap::from([(group, 1)]), blocked);
                assert!(rounds.ranks[1].blocked.points.len() <= 1);
            }
        }
        rounds.find_deadlock()
    }

    #[test]
    fn calls_in_order_tell_of_ranks_that_wait_for_each_other_unless_a_thread_joins() {
        let in_order = Blocked { points: vec![], in_order: true };
        assert!(matches!(waiting_in_order(in_order), Some(Failure::Mismatch { .. })));
        assert_eq!(waiting_in_order(Blocked::default()), None);
    }

    #[test]
    fn a_rank_that_is_busy_for_five_minutes_is_noticed_if_others_wait() {
        let mut rounds = Rounds::new(2, LONGEST_WAIT);
        let (start, key) = (Instant::now(), (0, 0));
        let after = |seconds| start + Duration::from_secs(seconds);
        rounds.set_busy(0, true, start);
        rounds.notice_busy(after(400));
        assert!(!rounds.ranks[0].noticed, "nothing waits");
        rounds.arrive(key, &Arc::from([0, 1]), 1, "sum", ()).unwrap();
        rounds.wait(1, key, start).unwrap();
        logs::collect();
        rounds.set_busy_limit(Duration::from_secs(4321));
        for (seconds, noticed) in [(299, false), (300, true), (301, true)] {
            rounds.notice_busy(after(seconds));
            assert_eq!([rounds.ranks[0].noticed, rounds.ranks[1].noticed], [noticed, false]);
        }
        // Once, with the limit of this test.
        assert_eq!(
            logs::with(&["busy", "4321s"]),
            ["WARN: rank 0 has been busy for 300s, as with a checkpoint, and others wait for \
                 it: the world ends after 4321s"]
        );
    }
}
