//! Rank 0's state of a world of processes, and its answers to the messages of members.
//!
//! A member arrives in a round by a message with its payload. When the round is complete, the call
//! board computes the result and addresses it to the members. This module does not read, write or
//! block; `server` carries the messages.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::rounds::{Failure, RoundKey, Rounds, WaitPoint};
use super::protocol::{
    Frame, HEADER_BYTES, MAX_MESSAGE, Op, Outcome, Reply, Request, frame, short_frame,
};

/// The payload of one member. `None` differs from an empty payload.
type Payload = Option<Frame>;

/// The state of a world of processes.
pub struct CallBoard {
    rounds: Rounds<Op, Payload>,
    /// The members of every group, as ranks of the world.
    groups: HashMap<u64, Arc<[usize]>>,
    /// The index in a group of a rank of the world.
    indices: HashMap<(u64, usize), usize>,
    /// The total length of the payloads of every round that is not complete.
    volumes: HashMap<RoundKey, usize>,
    /// `true` if a rank was blocked since the last look for a deadlock.
    is_blocked: bool,
}

/// Frames to send, each with the rank of the world that gets it.
pub type Outbox = Vec<(usize, Frame)>;

impl CallBoard {
    /// Creates the state of a world whose ranks are all in group 0.
    pub fn new(rounds: Rounds<Op, Payload>, size: usize) -> Self {
        let mut board = Self {
            rounds,
            groups: HashMap::new(),
            indices: HashMap::new(),
            volumes: HashMap::new(),
            is_blocked: false,
        };
        board.add_group((0..size).collect());
        board
    }

    /// Adds a group, and returns its number.
    fn add_group(&mut self, members: Arc<[usize]>) -> u64 {
        let group = self.groups.len() as u64;
        let indices = members.iter().enumerate().map(|(index, rank)| ((group, *rank), index));
        self.indices.extend(indices);
        self.groups.insert(group, members);
        group
    }

    /// Returns the first failure of the world.
    pub fn failure(&self) -> Option<&Failure> {
        self.rounds.failure()
    }

    /// Ends the world because of a rank. The first failure is kept.
    pub fn fail(&mut self, rank: usize, cause: String) {
        self.rounds.fail(Failure::Peer { rank, cause });
    }

    /// Ends the world because a rank has sent nothing for too long.
    pub fn fail_silent(&mut self, rank: usize, silence: Duration) {
        let call = self.rounds.awaited_call(rank);
        let wait = call.map_or(String::new(), |call| format!(", when it waited for {call}"));
        self.fail(rank, format!("silent for {silence:.1?}{wait}"));
    }

    /// Notes that a rank makes no further call.
    pub fn depart(&mut self, rank: usize) {
        self.rounds.depart(rank, Instant::now());
    }

    /// Ends the world if ranks wait for each other, or if one has waited for too long. Returns the
    /// responsible rank, if there is one.
    pub fn expire(&mut self, now: Instant) -> Option<usize> {
        self.rounds.notice_busy(now);
        // At a tick, not at the message: most blocked ranks go on in the meantime.
        if std::mem::take(&mut self.is_blocked) {
            self.rounds.find_deadlock();
        }
        match self.rounds.expire_all(now) {
            Some(Failure::Peer { rank, .. }) => Some(rank),
            _ => None,
        }
    }

    /// Appends to the cause of the failure, which must not have been sent to any rank yet.
    pub fn append_to_cause(&mut self, text: &str) {
        self.rounds.append_to_cause(text);
    }

    /// Handles a message of a member, and adds the answers to `out`. A failure of the world is not
    /// among them, since it is sent to all ranks.
    pub fn handle(&mut self, rank: usize, request: Request, payload: &[u8], out: &mut Outbox) {
        let now = Instant::now();
        // Errors need no answer, since every rank is sent the failure, and then expects no other.
        match request {
            Request::Call { key, op, has_payload } => {
                let payload = has_payload.then(|| Frame::from(payload));
                self.call(rank, key, op, payload, now, out);
            }
            Request::Wait { key, call, waited } => {
                // The clocks of the hosts may differ, so a process sends the time that it has
                // waited.
                let since = now.checked_sub(waited).unwrap_or(now);
                if let Some((members, _)) = self.membership(rank, key) {
                    _ = self.rounds.wait_externally(rank, key, &members, call.into(), since);
                }
            }
            Request::ClearWait { key } => {
                self.rounds.clear_wait(rank, WaitPoint::ExternalCall(key));
            }
            Request::Blocked { blocked, external_calls } => {
                self.rounds.block_after(rank, external_calls.into_iter().collect(), blocked);
                self.is_blocked = true;
            }
            Request::Busy(busy) => self.rounds.set_busy(rank, busy, now),
            Request::BusyLimit(limit) => self.rounds.set_busy_limit(limit),
            Request::Heartbeat => out.push((rank, short_frame(&Reply::Heartbeat))),
            Request::Fail { cause } => self.fail(rank, cause),
            Request::Depart { external_calls } => {
                self.rounds.depart_after(rank, external_calls.into_iter().collect(), now);
            }
        }
    }

    /// Returns the members of a group, and a rank's index in it. Ends the world if the rank is not
    /// a member of the group.
    fn membership(&mut self, rank: usize, (group, _): RoundKey) -> Option<(Arc<[usize]>, usize)> {
        let index = self.indices.get(&(group, rank)).copied();
        let membership = index.and_then(|index| Some((self.groups.get(&group)?.clone(), index)));
        if membership.is_none() {
            let cause = format!("it made a call in group {group}, of which it is not a member");
            self.fail(rank, cause);
        }
        membership
    }

    fn call(
        &mut self,
        rank: usize,
        key: RoundKey,
        op: Op,
        mut payload: Payload,
        now: Instant,
        out: &mut Outbox,
    ) {
        let Some((members, member)) = self.membership(rank, key) else { return };
        let volume = self.volumes.entry(key).or_default();
        // A gathered result is one message, which has a limit.
        *volume += payload.as_ref().map_or(0, |payload| payload.len());
        if exceeds_frame(op, *volume, members.len()) {
            // The result will be `TooLong`. Dropping the payload bounds the memory until then.
            payload = Some(Frame::default());
        }
        match self.rounds.arrive(key, &members, member, op, payload) {
            Ok(true) => self.answer(key, op, &members, out),
            Ok(false) => _ = self.rounds.wait(rank, key, now),
            Err(_) => {}
        }
    }

    /// Answers all members of a complete round.
    fn answer(&mut self, key: RoundKey, op: Op, members: &[usize], out: &mut Outbox) {
        for rank in members {
            self.rounds.clear_wait(*rank, WaitPoint::Round(key));
        }
        let volume = self.volumes.remove(&key).unwrap_or_default();
        let payloads: Vec<Payload> =
            self.rounds.remove(key).into_iter().map(|(_, payload)| payload).collect();
        if exceeds_frame(op, volume, members.len()) {
            let reply = Reply::Done(key, Outcome::TooLong(volume));
            return send_to_all(members, short_frame(&reply), out);
        }
        let done = |outcome, payload: &[&[u8]]| {
            frame(&Reply::Done(key, outcome), payload)
                .unwrap_or_else(|length| short_frame(&Reply::Done(key, Outcome::TooLong(length))))
        };
        match op {
            Op::AllGather => send_to_all(members, gathered(&payloads, done), out),
            Op::Gather { root } => {
                let mut replies = Vec::new();
                send_to_all(members, done(Outcome::Nothing, &[]), &mut replies);
                if let Some((_, frame)) = replies.get_mut(root) {
                    *frame = gathered(&payloads, done);
                }
                out.extend(replies);
            }
            Op::Broadcast { root } => {
                let payload = payloads.get(root).cloned().flatten().unwrap_or_default();
                send_to_all(members, done(Outcome::Bytes, &[&payload]), out);
            }
            Op::First => {
                let mut indexed = payloads.iter().enumerate();
                let first = indexed.find_map(|(member, payload)| Some((member, payload.as_ref()?)));
                let reply = match first {
                    Some((member, payload)) => done(Outcome::First(member), &[payload]),
                    None => done(Outcome::Nothing, &[]),
                };
                send_to_all(members, reply, out);
            }
            Op::Or { length } => {
                // Bounded, since a member's message sets the length of this allocation.
                let mut bits = vec![0; length.min(MAX_MESSAGE)];
                for payload in payloads.iter().flatten() {
                    bits.iter_mut().zip(&**payload).for_each(|(bits, byte)| *bits |= byte);
                }
                send_to_all(members, done(Outcome::Bytes, &[&bits]), out);
            }
            Op::Split => self.split(key, members, &payloads, out),
        }
    }

    /// Makes a group of the members of every color, and sends each member its index there.
    fn split(&mut self, key: RoundKey, members: &[usize], payloads: &[Payload], out: &mut Outbox) {
        let mut colors: BTreeMap<u64, Vec<(u64, usize)>> = BTreeMap::new();
        for (member, payload) in payloads.iter().enumerate() {
            let [color, sort_key] = split_numbers(payload.as_deref().unwrap_or_default());
            colors.entry(color).or_default().push((sort_key, member));
        }
        for mut same_color in colors.into_values() {
            same_color.sort_unstable();
            let size = same_color.len();
            // Engines take it as the color of the group: it is unique, and fits into their
            // integers.
            let first = same_color[0].1;
            let ranks: Arc<[usize]> =
                same_color.iter().map(|(_, member)| members[*member]).collect();
            let group = self.add_group(ranks.clone());
            for (rank, world_rank) in ranks.iter().enumerate() {
                let outcome = Outcome::Group { group, rank, size, first };
                out.push((*world_rank, short_frame(&Reply::Done(key, outcome))));
            }
        }
    }
}

/// Returns `true` if the result of a call does not fit into a frame. Only the results of gathers
/// hold several payloads, with a length for each.
fn exceeds_frame(op: Op, volume: usize, members: usize) -> bool {
    let gathers = matches!(op, Op::AllGather | Op::Gather { .. });
    // A length has at most 5 bytes: postcard writes 7 bits of a number per byte.
    gathers && volume + HEADER_BYTES + 5 * members > MAX_MESSAGE
}

fn gathered(payloads: &[Payload], done: impl Fn(Outcome, &[&[u8]]) -> Frame) -> Frame {
    let parts: Vec<&[u8]> =
        payloads.iter().map(|payload| payload.as_deref().unwrap_or_default()).collect();
    done(Outcome::All(parts.iter().map(|part| part.len()).collect()), &parts)
}

fn send_to_all(members: &[usize], frame: Frame, out: &mut Outbox) {
    out.extend(members.iter().map(|rank| (*rank, frame.clone())));
}

/// Returns the payload of a member of a split: its color and key.
pub fn split_payload(color: usize, key: usize) -> Vec<u8> {
    [color as u64, key as u64].into_iter().flat_map(u64::to_le_bytes).collect()
}

fn split_numbers(payload: &[u8]) -> [u64; 2] {
    let number = |start: usize| {
        let bytes = payload.get(start..start + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    [number(0), number(8)]
}
