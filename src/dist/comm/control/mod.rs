//! The control plane: membership, small data, and failures of ranks that are processes.
//!
//! Rank 0 listens, the others connect, and everything goes through it. Tensors go over MPI or NCCL,
//! which know nothing of a rank that fails.

mod beat;
mod hub;
mod link;
mod meeting;
mod peer;
mod proof;
mod protocol;
mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use link::{Answer, Link};
pub use meeting::Meeting;
#[cfg(feature = "mpi")]
pub use proof::random_secret;
use protocol::{CALL, Op, Outcome, Request};

use super::meetings::Failure;
use crate::error::{Error, Result};

/// The time for which the others are listened to for the cause of an engine's error.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// The time that a call of an engine may take before rank 0 is told of it. Together with the way there
/// and back, less than a second passes until a rank that is gone is noticed.
const QUIET: Duration = Duration::from_millis(500);

/// The time for which a call is asked about without a break: the length of a short one.
const SPIN: Duration = Duration::from_millis(1);
/// The longest break between two looks at a call.
const NAP: Duration = Duration::from_millis(1);

/// A process's view of one group.
#[derive(Debug)]
pub struct Control {
    link: Arc<Link>,
    group: u64,
    /// This process's index in the group.
    rank: usize,
    size: usize,
    /// Calls of the group with small data so far.
    rounds: AtomicU64,
    /// Calls of the group that went elsewhere so far.
    calls: Arc<AtomicU64>,
}

/// A call of a group that goes elsewhere: over an engine that knows nothing of failures.
#[derive(Debug, Clone)]
pub struct Elsewhere {
    /// The number of such calls of the group before it.
    pub number: u64,
    /// The call, shortened if its description is long.
    pub call: String,
}

/// Rank 0 knows that this process waits, as long as this lives.
struct Waiting<'a> {
    link: &'a Link,
    key: (u64, u64),
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.link.tell(&Request::GoOn { key: self.key });
    }
}

impl Control {
    fn new(link: Arc<Link>, group: u64, rank: usize, size: usize) -> Self {
        let calls = link.count(group);
        Self { link, group, rank, size, rounds: AtomicU64::new(0), calls }
    }

    /// This process's index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of members of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The longest time that a rank may be waited for.
    pub fn deadline(&self) -> Duration {
        self.link.deadline
    }

    /// Makes a call with small data, and waits for its result.
    fn call(&self, op: Op, bytes: Option<&[u8]>) -> Result<Answer> {
        let key = (self.group, self.rounds.fetch_add(1, Ordering::SeqCst));
        let request = Request::Call { key, op, given: bytes.is_some() };
        self.link.ask(op.name(), key, &request, bytes.unwrap_or_default())
    }

    /// Sends small data of all members to all members, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`], [`Error::Mismatch`]; [`Error::Collective`] if there is more than a
    /// message can hold.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match self.call(Op::AllGather, Some(&bytes))? {
            (Outcome::All(lengths), raw) => Ok(parts(&lengths, &raw)),
            _ => self.misunderstood(),
        }
    }

    /// Sends small data of all members to one of them, and waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        match self.call(Op::Gather { root }, Some(&bytes))? {
            (Outcome::All(lengths), raw) => Ok(Some(parts(&lengths, &raw))),
            (Outcome::Nothing, _) => Ok(None),
            _ => self.misunderstood(),
        }
    }

    /// Sends small data of one member to all of them, and waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        let bytes = (root == self.rank).then_some(&*bytes);
        match self.call(Op::Broadcast { root }, bytes)? {
            (Outcome::Bytes, raw) => Ok(raw),
            _ => self.misunderstood(),
        }
    }

    /// Returns the lowest member that gives anything, and what it gives. Waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        match self.call(Op::First, bytes.as_deref())? {
            (Outcome::First(rank), raw) => Ok(Some((rank, raw))),
            (Outcome::Nothing, _) => Ok(None),
            _ => self.misunderstood(),
        }
    }

    /// Returns the bits that are set on any member. All give equally many bytes. Waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match self.call(Op::Or { length: bytes.len() }, Some(&bytes))? {
            (Outcome::Bytes, raw) => Ok(raw),
            _ => self.misunderstood(),
        }
    }

    fn misunderstood<T>(&self) -> Result<T> {
        let cause = "it answered something else than what it was asked";
        Err(Error::PeerFailed { rank: 0, cause: cause.into() })
    }

    /// Says that this process does something that may take longer than the deadline, or has done it. No rank
    /// times out meanwhile, except while this one waits itself.
    pub fn set_busy(&self, busy: bool) {
        self.link.tell(&Request::Busy(busy));
    }

    /// Numbers a call that goes elsewhere, as all members make it now.
    pub fn announce(&self, call: impl ToString) -> Elsewhere {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        Elsewhere { number, call: protocol::bounded(call.to_string(), CALL) }
    }

    /// Waits until `finished` says so, which is asked again and again.
    ///
    /// # Errors
    ///
    /// Those of `finished`; [`Error::PeerFailed`] and [`Error::Mismatch`] if the call can't finish, since
    /// a rank failed, has returned, waits for something else, or does not come within the deadline.
    pub fn wait(&self, call: &Elsewhere, mut finished: impl FnMut() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        let quiet = QUIET.min(self.deadline() / 2);
        let mut waiting = None;
        while !finished()? {
            self.check()?;
            let waited = start.elapsed();
            if waiting.is_none() && waited >= quiet {
                waiting = Some(self.waiting(call, waited));
            }
            pause(waited);
        }
        Ok(())
    }

    fn waiting(&self, call: &Elsewhere, waited: Duration) -> Waiting<'_> {
        let key = (self.group, call.number);
        self.link.tell(&Request::Wait { key, call: call.call.clone(), waited });
        Waiting { link: &self.link, key }
    }

    /// Returns the reason why a call failed: an engine may see first what another rank did, or that
    /// it called something else, in words of its own. The others are listened to for `patience`.
    pub fn cause_of(&self, call: &Elsewhere, error: Error, patience: Duration) -> Error {
        let _waiting = self.waiting(call, Duration::ZERO);
        self.link.listen(patience);
        match self.link.failure() {
            // Another thread of this rank was first: what it knows is what this one knows.
            Some(Failure::Peer { rank, .. }) if *rank == self.link.rank() => {}
            Some(failure) => return failure.clone().into(),
            None => self.fail(&error.to_string()),
        }
        error
    }

    /// Returns the failure of the world as an error. Sends nothing.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`], [`Error::Mismatch`].
    pub fn check(&self) -> Result<()> {
        self.link.check()
    }

    /// Ends the world because of this rank.
    pub fn fail(&self, cause: &str) {
        self.link.fail(cause);
    }

    /// Returns `true` if the world is known to have ended.
    pub fn has_failed(&self) -> bool {
        self.link.failure().is_some()
    }

    /// Returns the group of the members that give the same color, in the order of `key` and then of
    /// rank, and the index in this group of its first member.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn split(&self, color: usize, key: usize) -> Result<(Self, usize)> {
        match self.call(Op::Split, Some(&hub::offer(color, key)))? {
            (Outcome::Group { group, rank, size, first }, _) => {
                Ok((Self::new(self.link.clone(), group, rank, size), first))
            }
            _ => self.misunderstood(),
        }
    }
}

/// Pauses between two looks at a call that has been waited for this long. A rank that only yields is always
/// ready to run: it slows the ranks that it waits for, and the threads that report that it lives.
fn pause(waited: Duration) {
    match waited < SPIN {
        true => thread::yield_now(),
        // A small part of what was waited already, so that no call takes notably longer.
        false => thread::sleep(NAP.min(waited / 64)),
    }
}

/// Divides bytes into parts of these lengths.
fn parts(lengths: &[usize], mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let part = |length: &usize| {
        let (part, rest) = bytes.split_at((*length).min(bytes.len()));
        bytes = rest;
        part.to_vec()
    };
    lengths.iter().map(part).collect()
}

#[cfg(test)]
mod scale;
#[cfg(test)]
mod tests;
