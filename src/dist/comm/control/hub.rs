//! Rank 0's answers to the messages of members. Nothing here reads, writes or blocks.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::super::meetings::{Failure, Key, Meetings, Place};
use super::protocol::{Frame, HEADER, MEMBER, Op, Outcome, Reply, Request, frame, short};

/// The data of one member; none is not the same as empty.
type Given = Option<Frame>;

/// The state of a world of processes.
pub struct Hub {
    meetings: Meetings<Op, Given>,
    /// The ranks in the world of every group's members.
    groups: HashMap<u64, Arc<[usize]>>,
    /// The index of a rank of the world in a group.
    indices: HashMap<(u64, usize), usize>,
    /// The bytes given in the rounds that are not complete.
    volumes: HashMap<Key, usize>,
}

/// Frames to send, each to one rank of the world.
pub type Outbox = Vec<(usize, Frame)>;

impl Hub {
    /// A world whose ranks are all in group 0.
    pub fn new(meetings: Meetings<Op, Given>, size: usize) -> Self {
        let mut hub = Self {
            meetings,
            groups: HashMap::new(),
            indices: HashMap::new(),
            volumes: HashMap::new(),
        };
        hub.add_group((0..size).collect());
        hub
    }

    /// Returns the number of a new group.
    fn add_group(&mut self, members: Arc<[usize]>) -> u64 {
        let group = self.groups.len() as u64;
        let indices = members.iter().enumerate().map(|(index, rank)| ((group, *rank), index));
        self.indices.extend(indices);
        self.groups.insert(group, members);
        group
    }

    /// Returns the first failure of the world.
    pub fn failure(&self) -> Option<&Failure> {
        self.meetings.failure()
    }

    /// Ends the world because of a rank. The first failure stays.
    pub fn fail(&mut self, rank: usize, cause: String) {
        self.meetings.fail(Failure::Peer { rank, cause });
    }

    /// Ends the world because a rank has been silent.
    pub fn fail_silent(&mut self, rank: usize, silence: std::time::Duration) {
        let when = self.meetings.waits_for(rank);
        let when = when.map_or(String::new(), |call| format!(", when it waited for {call}"));
        self.fail(rank, format!("silent for {silence:.1?}{when}"));
    }

    /// Notes that a rank is gone.
    pub fn leave(&mut self, rank: usize) {
        self.meetings.leave(rank, Instant::now());
    }

    /// Ends the world if a rank has waited for too long, and returns the rank to blame.
    pub fn expire(&mut self, now: Instant) -> Option<usize> {
        match self.meetings.expire_all(now) {
            Some(Failure::Peer { rank, .. }) => Some(rank),
            _ => None,
        }
    }

    /// Adds something to the cause of the failure.
    pub fn explain(&mut self, more: &str) {
        self.meetings.explain(more);
    }

    /// Takes a message of a member, with its raw bytes, and adds what is to be sent because of it.
    /// A failure of the world is not among that: it goes to all ranks.
    pub fn take(&mut self, rank: usize, request: Request, raw: &[u8], out: &mut Outbox) {
        let now = Instant::now();
        // After a failure, every rank learns of it and expects no other answer.
        match request {
            Request::Call { key, op, given } => {
                let given = given.then(|| Frame::from(raw));
                self.call(rank, key, op, given, now, out);
            }
            Request::Wait { key, call, waited } => {
                let since = now.checked_sub(waited).unwrap_or(now);
                if let Some((members, _)) = self.members(rank, key) {
                    _ = self.meetings.wait_elsewhere(rank, key, &members, call.into(), since);
                }
            }
            Request::GoOn { key } => self.meetings.go_on(rank, Place::Elsewhere(key)),
            Request::Busy(busy) => self.meetings.set_busy(rank, busy, now),
            Request::Beat => out.push((rank, short(&Reply::Beat))),
            Request::Fail { cause } => self.fail(rank, cause),
            Request::Leave { made } => {
                self.meetings.leave_after(rank, made.into_iter().collect(), now);
            }
        }
    }

    /// The members of a rank's group, and its index in it. A rank that names a group of others ends
    /// the world.
    fn members(&mut self, rank: usize, (group, _): Key) -> Option<(Arc<[usize]>, usize)> {
        let index = self.indices.get(&(group, rank)).copied();
        let place = index.and_then(|index| Some((self.groups.get(&group)?.clone(), index)));
        if place.is_none() {
            self.fail(rank, format!("it called in group {group}, of which it is not a member"));
        }
        place
    }

    fn call(
        &mut self,
        rank: usize,
        key: Key,
        op: Op,
        mut given: Given,
        now: Instant,
        out: &mut Outbox,
    ) {
        let Some((members, member)) = self.members(rank, key) else { return };
        let volume = self.volumes.entry(key).or_default();
        *volume += given.as_ref().map_or(0, |given| given.len());
        if exceeds(op, *volume, members.len()) {
            // The result is refused, and memory stays bounded until then.
            given = Some(Frame::default());
        }
        match self.meetings.arrive(key, &members, member, op, given) {
            Ok(true) => self.answer(key, op, &members, out),
            Ok(false) => _ = self.meetings.wait(rank, key, now),
            Err(_) => {}
        }
    }

    /// Answers all members of a complete round.
    fn answer(&mut self, key: Key, op: Op, members: &[usize], out: &mut Outbox) {
        for rank in members {
            self.meetings.go_on(*rank, Place::Here(key));
        }
        let volume = self.volumes.remove(&key).unwrap_or_default();
        let given: Vec<Given> =
            self.meetings.remove(key).into_iter().map(|(_, given)| given).collect();
        if exceeds(op, volume, members.len()) {
            return to_all(members, short(&Reply::Done(key, Outcome::TooLong(volume))), out);
        }
        let done = |outcome, raw: &[&[u8]]| {
            let too_long = |length| short(&Reply::Done(key, Outcome::TooLong(length)));
            frame(&Reply::Done(key, outcome), raw).unwrap_or_else(too_long)
        };
        match op {
            Op::AllGather => to_all(members, all(&given, done), out),
            Op::Gather { root } => {
                let mut nothing = Vec::new();
                to_all(members, done(Outcome::Nothing, &[]), &mut nothing);
                if let Some((_, frame)) = nothing.get_mut(root) {
                    *frame = all(&given, done);
                }
                out.extend(nothing);
            }
            Op::Broadcast { root } => {
                let bytes = given.get(root).cloned().flatten().unwrap_or_default();
                to_all(members, done(Outcome::Bytes, &[&bytes]), out);
            }
            Op::First => {
                let mut found = given.iter().enumerate();
                let first = found.find_map(|(rank, given)| Some((rank, given.as_ref()?)));
                let reply = match first {
                    Some((rank, bytes)) => done(Outcome::First(rank), &[bytes]),
                    None => done(Outcome::Nothing, &[]),
                };
                to_all(members, reply, out);
            }
            Op::Or { length } => {
                let mut any = vec![0; length.min(MEMBER)];
                for given in given.iter().flatten() {
                    any.iter_mut().zip(&**given).for_each(|(any, byte)| *any |= byte);
                }
                to_all(members, done(Outcome::Bytes, &[&any]), out);
            }
            Op::Split => self.split(key, members, &given, out),
        }
    }

    /// Makes a group of the members of every color, and tells each its place.
    fn split(&mut self, key: Key, members: &[usize], given: &[Given], out: &mut Outbox) {
        let mut colors: BTreeMap<u64, Vec<(u64, usize)>> = BTreeMap::new();
        for (member, given) in given.iter().enumerate() {
            let [color, place] = numbers(given.as_deref().unwrap_or_default());
            colors.entry(color).or_default().push((place, member));
        }
        for mut places in colors.into_values() {
            places.sort_unstable();
            let (size, first) = (places.len(), places[0].1);
            let ranks: Arc<[usize]> = places.iter().map(|(_, member)| members[*member]).collect();
            let group = self.add_group(ranks.clone());
            for (rank, in_world) in ranks.iter().enumerate() {
                let outcome = Outcome::Group { group, rank, size, first };
                out.push((*in_world, short(&Reply::Done(key, outcome))));
            }
        }
    }
}

/// Returns `true` if the result of a call does not fit into a frame. A header grows with the number
/// of members where it has their lengths.
fn exceeds(op: Op, volume: usize, members: usize) -> bool {
    let gathers = matches!(op, Op::AllGather | Op::Gather { .. });
    gathers && volume + HEADER + 5 * members > MEMBER
}

fn all(given: &[Given], done: impl Fn(Outcome, &[&[u8]]) -> Frame) -> Frame {
    let parts: Vec<&[u8]> =
        given.iter().map(|given| given.as_deref().unwrap_or_default()).collect();
    done(Outcome::All(parts.iter().map(|part| part.len()).collect()), &parts)
}

fn to_all(members: &[usize], frame: Frame, out: &mut Outbox) {
    out.extend(members.iter().map(|rank| (*rank, frame.clone())));
}

/// Color and key of a member of a split, as bytes.
pub fn offer(color: usize, key: usize) -> Vec<u8> {
    [color as u64, key as u64].into_iter().flat_map(u64::to_le_bytes).collect()
}

fn numbers(offer: &[u8]) -> [u64; 2] {
    let number = |at: usize| {
        let bytes = offer.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    [number(0), number(8)]
}
