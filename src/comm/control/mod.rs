//! The control plane of ranks that are processes: membership, rounds with small payloads, failures.
//!
//! Rank 0 listens and the other processes connect to it. In a round, every participant of a group
//! sends a payload of bytes to rank 0, which answers all participants when the last one has
//! arrived; a round is therefore also a barrier. Tensors pass through MPI or NCCL, which do not
//! detect a rank that fails. A process that has waited for such an external call for some time
//! reports it to rank 0, which compares the calls and finds the rank responsible for a timeout.

mod authentication;
mod call_board;
mod connect;
mod connection_to_member;
mod connection_to_server;
mod heartbeat_times;
mod protocol;
mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[cfg(any(feature = "mpi", feature = "cuda"))]
pub use authentication::random_secret;
pub use connect::Endpoint;
use connection_to_server::{Answer, ServerConnection, Waiting};
use protocol::{MAX_CALL, Op, Outcome, Request};

use super::rounds::{Failure, WaitPoint};
use crate::error::{Error, Result};

/// The time for which a rank waits for the cause of an engine's error to arrive from other ranks.
pub const COMPARE_AFTER: Duration = Duration::from_secs(1);
/// The time after which a wait is reported to rank 0. Including the time on the network, a departed
/// rank, and ranks that wait for each other, are noticed in less than a second.
const REPORT_AFTER: Duration = Duration::from_millis(500);

/// The time for which a call is polled without sleeping: the duration of a short call.
const SPIN: Duration = Duration::from_millis(1);
/// The longest sleep between two polls of a call.
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// A process's view of one group: its participant in the group's rounds and external calls.
#[derive(Debug)]
pub struct Control {
    link: Arc<ServerConnection>,
    group: u64,
    /// This process's index in the group.
    rank: usize,
    size: usize,
    /// The number of the group's next round.
    next_round: AtomicU64,
    /// The number of the group's external calls so far.
    external_calls: Arc<AtomicU64>,
    /// One, of which this process's view of any group has a clone.
    groups: Arc<()>,
}

/// A call of a group that MPI or NCCL carries out, which do not detect failures.
#[derive(Debug, Clone)]
pub struct ExternalCall {
    /// The number of the group's external calls before this one.
    pub number: u64,
    /// The call, shortened if its description is long.
    pub call: String,
}

/// A wait that has been reported to rank 0, until this value is dropped.
struct ReportedWait<'a> {
    link: &'a ServerConnection,
    key: (u64, u64),
    _waiting: Waiting<'a>,
}

impl Drop for ReportedWait<'_> {
    fn drop(&mut self) {
        self.link.notify(&Request::ClearWait { key: self.key });
    }
}

impl Control {
    /// The view of the world.
    fn new(link: ServerConnection, rank: usize, size: usize) -> Self {
        let (group, external_calls) = (0, link.external_calls(0));
        let (link, next_round, groups) = (Arc::new(link), AtomicU64::new(0), Arc::new(()));
        Self { link, group, rank, size, next_round, external_calls, groups }
    }

    /// The number of groups of which this process has a view.
    pub fn groups(&self) -> usize {
        Arc::strong_count(&self.groups)
    }

    /// Lets this rank depart from its world, also while others hold its communicators.
    pub fn departure(&self) -> impl FnOnce() + Send + use<> {
        let link = self.link.clone();
        move || link.depart()
    }

    /// This process's index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of members of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Arrives in the next round with a payload, and waits for the result.
    fn call(&self, op: Op, payload: Option<&[u8]>) -> Result<Answer> {
        let key = (self.group, self.next_round.fetch_add(1, Ordering::SeqCst));
        let request = Request::Call { key, op, has_payload: payload.is_some() };
        self.link.call(op.name(), key, &request, payload.unwrap_or_default())
    }

    /// Returns the bytes of all members, in the order of members. Waits for all.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`], [`Error::Mismatch`]; [`Error::Collective`] if the bytes or the result
    /// are too long for a message.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match self.call(Op::AllGather, Some(&bytes))? {
            (Outcome::All(lengths), payload) => Ok(split_parts(&lengths, &payload)),
            _ => self.unexpected_answer(),
        }
    }

    /// Returns the bytes of all members to member `root`, and `None` to the others. Waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        match self.call(Op::Gather { root }, Some(&bytes))? {
            (Outcome::All(lengths), payload) => Ok(Some(split_parts(&lengths, &payload))),
            (Outcome::Nothing, _) => Ok(None),
            _ => self.unexpected_answer(),
        }
    }

    /// Returns the bytes of member `root` to all members. Waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        let bytes = (root == self.rank).then_some(&*bytes);
        match self.call(Op::Broadcast { root }, bytes)? {
            (Outcome::Bytes, payload) => Ok(payload),
            _ => self.unexpected_answer(),
        }
    }

    /// Returns the lowest member that contributes bytes, and these bytes. Waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        match self.call(Op::First, bytes.as_deref())? {
            (Outcome::First(rank), payload) => Ok(Some((rank, payload))),
            (Outcome::Nothing, _) => Ok(None),
            _ => self.unexpected_answer(),
        }
    }

    /// Returns the bitwise OR of the bytes of all members, which have equal lengths. Waits for all.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match self.call(Op::Or { length: bytes.len() }, Some(&bytes))? {
            (Outcome::Bytes, payload) => Ok(payload),
            _ => self.unexpected_answer(),
        }
    }

    fn unexpected_answer<T>(&self) -> Result<T> {
        let cause = "its answer is not of the kind that the call expects";
        Err(Error::PeerFailed { rank: 0, cause: cause.into() })
    }

    /// Notes that this process begins (`true`) or has ended (`false`) work that may take longer
    /// than the deadline. Meanwhile no rank times out, except while this process itself waits.
    pub fn set_busy(&self, busy: bool) {
        self.link.notify(&Request::Busy(busy));
    }

    /// Sets the longest time for which a busy process of the world is waited for.
    pub fn set_busy_limit(&self, limit: Duration) {
        self.link.notify(&Request::BusyLimit(limit));
    }

    /// Numbers an external call. All members of the group begin the same external calls in the same
    /// order.
    pub fn begin_call(&self, call: impl ToString) -> ExternalCall {
        // Before any wait: a rank is blocked once all of its callers wait, and this thread is one
        // now.
        self.link.note_caller();
        let number = self.external_calls.fetch_add(1, Ordering::SeqCst);
        ExternalCall { number, call: protocol::bounded(call.to_string(), MAX_CALL) }
    }

    /// Waits until `finished`, which is called again and again, returns `true`.
    ///
    /// # Errors
    ///
    /// As `finished`; [`Error::PeerFailed`] and [`Error::Mismatch`] if the call can't finish,
    /// since a rank failed, has departed, waits for a different call, or does not arrive within the
    /// deadline.
    pub fn wait(
        &self,
        call: &ExternalCall,
        mut finished: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let start = Instant::now();
        let report_after = self.link.report_after();
        let mut reported = None;
        // Before the failure of the world is looked at, which does not undo a call that has
        // finished.
        while !finished()? {
            self.check()?;
            let waited = start.elapsed();
            if reported.is_none() && waited >= report_after {
                reported = Some(self.report_wait(call, waited));
            }
            pause(waited);
        }
        Ok(())
    }

    fn report_wait(&self, call: &ExternalCall, waited: Duration) -> ReportedWait<'_> {
        let key = (self.group, call.number);
        self.link.notify(&Request::Wait { key, call: call.call.clone(), waited });
        // After the message: rank 0 has to know the call before it learns that this rank is blocked
        // in it.
        let _waiting = self.link.waits_at(WaitPoint::ExternalCall(key));
        ReportedWait { link: &self.link, key, _waiting }
    }

    /// Returns the reason why an external call failed, which is `error` unless another rank failed
    /// first. Waits up to `timeout` for the failure of another rank: an engine may notice it, or a
    /// different call there, before rank 0 reports it, and describes it in its own terms.
    pub fn cause_of(&self, call: &ExternalCall, error: Error, timeout: Duration) -> Error {
        let _reported = self.report_wait(call, Duration::ZERO);
        self.link.wait_for_failure(timeout);
        match self.link.failure() {
            // Another thread of this rank failed first, and knows no more than this thread does.
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

    /// Returns `true` if the world is known to have failed.
    pub fn has_failed(&self) -> bool {
        self.link.failure().is_some()
    }

    /// Returns the group of the members with the same color, in the order of `key` and then of
    /// rank. The second value is the index in this group of the new group's first member.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn split(&self, color: usize, key: usize) -> Result<(Self, usize)> {
        match self.call(Op::Split, Some(&call_board::split_payload(color, key)))? {
            (Outcome::Group { group, rank, size, first }, _) => {
                let (link, groups) = (self.link.clone(), self.groups.clone());
                let external_calls = link.external_calls(group);
                let next_round = AtomicU64::new(0);
                let view = Self { link, group, rank, size, next_round, external_calls, groups };
                Ok((view, first))
            }
            _ => self.unexpected_answer(),
        }
    }
}

/// Pauses between two polls of a call that has been waited for this long. A thread that only yields
/// is always ready to run, which slows the ranks that it waits for and the threads that send
/// heartbeats.
pub fn pause(waited: Duration) {
    match waited < SPIN {
        true => thread::yield_now(),
        // A small fraction of the time waited so far, so that no call takes notably longer.
        false => thread::sleep(MAX_SLEEP.min(waited / 64)),
    }
}

/// Splits bytes into parts of these lengths.
fn split_parts(lengths: &[usize], mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let part = |length: &usize| {
        // Lengths come from the network: a wrong one must not panic.
        let (part, rest) = bytes.split_at((*length).min(bytes.len()));
        bytes = rest;
        part.to_vec()
    };
    lengths.iter().map(part).collect()
}

#[cfg(test)]
mod tests;
