//! A process's connection to rank 0, shared by all of its groups and threads.
//!
//! A calling thread sends a message with its payload and waits until the reading thread has the
//! result of the round. The reading thread also sends heartbeats and notices a lost connection.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use super::super::rounds::{Blocked, Failure, RoundKey, WaitPoint};
use super::REPORT_AFTER;
use super::heartbeat_times::{HeartbeatTimes, STALL};
use super::protocol::{
    Frame, Incoming, MAX_CAUSE, MAX_MESSAGE, MAX_PAYLOAD, Outcome, Reply, Request, bounded, frame,
    parse, short_frame, write,
};
use super::server::Server;
use crate::error::{Error, Result};

/// The longest time that a process that departs, or has failed, waits for rank 0's reaction.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Bytes read at once.
const CHUNK: usize = 1 << 14;
/// The stack size of the reading thread, whose calls are not deep.
const STACK: usize = 1 << 17;

/// The result of a round, and its payload.
pub type Answer = (Outcome, Vec<u8>);

/// A process's connection to rank 0.
pub struct ServerConnection {
    shared: Arc<Shared>,
    pub deadline: Duration,
    /// The number of external calls so far, in every group.
    external_calls: Mutex<BTreeMap<u64, Arc<AtomicU64>>>,
    callers: Mutex<Callers>,
    reader: Option<JoinHandle<()>>,
    /// On rank 0. Dropped last, after this process has departed.
    _server: Option<Server>,
}

/// The state that the calling threads share with the reading thread.
struct Shared {
    stream: TcpStream,
    rank: usize,
    size: usize,
    heartbeat: HeartbeatTimes,
    /// Held while a frame is written.
    writing: Mutex<()>,
    answers: Mutex<Answers>,
    /// Notified when a call is answered, the world has failed, or the reading thread has ended.
    changed: Condvar,
    failure: OnceLock<Failure>,
    departing: AtomicBool,
}

/// The threads that make calls.
#[derive(Default)]
struct Callers {
    threads: HashSet<ThreadId>,
    /// The waits of these threads that have lasted for some time.
    waiting: HashMap<ThreadId, WaitPoint>,
    /// The threads that have watched calls of these threads for some time.
    watching: HashMap<ThreadId, WaitPoint>,
}

impl Callers {
    /// The points at which the rank is blocked, if it is.
    fn blocked(&self) -> Option<Blocked> {
        let in_order = self.threads.len() == 1;
        let are_all_waiting = self.waiting.len() == self.threads.len();
        // The calls of several threads have no order: a watched one tells nothing of the others.
        let watched = in_order.then_some(self.watching.values()).into_iter().flatten();
        let points = self.waiting.values().chain(watched).copied().collect();
        (in_order || are_all_waiting).then_some(Blocked { points, in_order })
    }
}

/// The wait of a thread, until this value is dropped.
pub struct Waiting<'a>(&'a ServerConnection);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let (mut callers, thread) = (self.0.callers(), thread::current().id());
        callers.waiting.remove(&thread);
        callers.watching.remove(&thread);
    }
}

#[derive(Default)]
struct Answers {
    /// The answers of the calls that are waited for. `None` until the answer has arrived.
    pending: HashMap<RoundKey, Option<Answer>>,
    reader_ended: bool,
}

impl ServerConnection {
    /// Starts the reading thread of a rank that rank 0 has admitted.
    ///
    /// # Errors
    ///
    /// If the operating system can't start a thread.
    pub fn new(
        stream: TcpStream,
        (rank, size): (usize, usize),
        deadline: Duration,
        server: Option<Server>,
    ) -> std::io::Result<Self> {
        let heartbeat = HeartbeatTimes::new(size, deadline);
        // If rank 0 takes no bytes for so long, it is dead or cut off.
        stream.set_write_timeout(Some(heartbeat.timeout))?;
        let shared = Arc::new(Shared {
            stream,
            rank,
            size,
            heartbeat,
            writing: Mutex::default(),
            answers: Mutex::default(),
            changed: Condvar::new(),
            failure: OnceLock::new(),
            departing: AtomicBool::new(false),
        });
        let reader =
            thread::Builder::new().name("distmuon control".into()).stack_size(STACK).spawn({
                let shared = shared.clone();
                move || shared.run_reader()
            })?;
        let (external_calls, callers) = (Mutex::default(), Mutex::default());
        let reader = Some(reader);
        Ok(Self { shared, deadline, external_calls, callers, reader, _server: server })
    }

    fn callers(&self) -> MutexGuard<'_, Callers> {
        self.callers.lock().expect("no thread panics while it holds the lock")
    }

    /// Notes that this thread makes calls.
    pub fn note_caller(&self) {
        let mut callers = self.callers();
        let is_new = callers.threads.insert(thread::current().id());
        let count = callers.threads.len();
        drop(callers);
        // Before the first call of this thread, which may come between calls of the other one.
        if is_new && count == 2 {
            self.notify(&Request::Blocked { blocked: Blocked::default(), external_calls: vec![] });
        }
    }

    /// The time after which a wait is reported. A short deadline must not pass before.
    pub fn report_after(&self) -> Duration {
        REPORT_AFTER.min(self.deadline / 2)
    }

    /// Notes that this thread has waited for some time. If that blocks this rank, rank 0 is told of
    /// it. A thread that makes no calls watches the calls of others.
    pub fn waits_at(&self, point: WaitPoint) -> Waiting<'_> {
        let mut callers = self.callers();
        let thread = thread::current().id();
        let is_caller = callers.threads.contains(&thread);
        let Callers { waiting, watching, .. } = &mut *callers;
        if is_caller { waiting } else { watching }.insert(thread, point);
        let blocked = callers.blocked();
        // Before the message, whose write may wait.
        drop(callers);
        if let Some(blocked) = blocked {
            // Counted later than the points: a call that is missing here comes after them.
            self.notify(&Request::Blocked { blocked, external_calls: self.counts() });
        }
        Waiting(self)
    }

    /// The number of external calls so far in every group.
    fn counts(&self) -> Vec<(u64, u64)> {
        let calls = self.external_calls.lock().expect("no thread panics while it holds the lock");
        calls.iter().map(|(group, count)| (*group, count.load(Ordering::SeqCst))).collect()
    }

    /// Returns the counter of a group's external calls.
    pub fn external_calls(&self, group: u64) -> Arc<AtomicU64> {
        let mut calls =
            self.external_calls.lock().expect("no thread panics while it holds the lock");
        calls.entry(group).or_default().clone()
    }

    /// This process's rank in the world.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Returns the failure of the world.
    pub fn failure(&self) -> Option<&Failure> {
        self.shared.failure.get()
    }

    /// Returns the failure of the world as an error.
    pub fn check(&self) -> Result<()> {
        self.failure().map_or(Ok(()), |failure| Err(failure.clone().into()))
    }

    /// Sends a message that has no answer.
    pub fn notify(&self, request: &Request) {
        self.shared.send(&short_frame(request));
    }

    /// Tells rank 0 that this process makes no further call.
    pub fn depart(&self) {
        // Before the message: the reading thread reports an end that it does not expect.
        if self.shared.departing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.notify(&Request::Depart { external_calls: self.counts() });
        // Rank 0 closes the connection when it has read the last message, so none is lost.
        self.shared.stream.shutdown(Shutdown::Write).ok();
    }

    /// Sends a call and waits for its result. Errors refer to the call by `name`.
    pub fn call(
        &self,
        name: &'static str,
        key: RoundKey,
        request: &Request,
        payload: &[u8],
    ) -> Result<Answer> {
        self.check()?;
        self.note_caller();
        let rank = self.shared.rank;
        let too_long = |length| payload_too_long(name, rank, length);
        // Rank 0 is not sent a call that is rejected here, and other ranks would wait for it.
        let reject = |length| {
            let error = too_long(length);
            if self.shared.size > 1 {
                self.fail(&error.to_string());
            }
            error
        };
        if payload.len() > MAX_PAYLOAD {
            return Err(reject(payload.len()));
        }
        let frame = frame(request, &[payload]).map_err(reject)?;
        // Before the request: the reader drops answers that nothing expects.
        self.shared.answers().pending.insert(key, None);
        self.shared.send(&frame);
        // Most calls are answered at once: only those that wait cost a report.
        let is_answered = self.shared.is_answered_within(key, self.report_after());
        let _waiting = (!is_answered).then(|| self.waits_at(WaitPoint::Round(key)));
        match self.shared.wait_for_answer(key)? {
            (Outcome::TooLong(length), _) => Err(too_long(length)),
            answer => Ok(answer),
        }
    }

    /// Waits until the world has failed, but not longer than `timeout`.
    pub fn wait_for_failure(&self, timeout: Duration) {
        self.shared.wait_for_failure(timeout);
    }

    /// Ends the world, and waits until this process has been sent the failure.
    pub fn fail(&self, cause: &str) {
        self.notify(&Request::Fail { cause: bounded(cause.to_owned(), MAX_CAUSE) });
        self.wait_for_failure(SHUTDOWN_GRACE);
    }

    /// The number of bytes that rank 0 has sent.
    #[cfg(test)]
    pub fn sent(&self) -> Option<u64> {
        self._server.as_ref().map(|server| server.sent.load(Ordering::Relaxed))
    }

    /// The connection, for tests that cut it.
    #[cfg(test)]
    pub fn stream(&self) -> &TcpStream {
        &self.shared.stream
    }
}

fn payload_too_long(collective: &'static str, rank: usize, length: usize) -> Error {
    Error::Collective {
        collective,
        rank,
        reason: format!("data too long: expected at most {MAX_PAYLOAD} bytes, got {length}"),
        remedy: "send less per call, or send the data as a tensor",
    }
}

impl Shared {
    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().expect("no thread panics while it holds the lock")
    }

    fn wait_for_failure(&self, timeout: Duration) {
        let unchanged =
            |answers: &mut Answers| self.failure.get().is_none() && !answers.reader_ended;
        let waited = self.changed.wait_timeout_while(self.answers(), timeout, unchanged);
        drop(waited.expect("no thread panics while it holds the lock"));
    }

    fn send(&self, frame: &Frame) {
        let writing = self.writing.lock().expect("no thread panics while it holds the lock");
        let written = write(&self.stream, frame);
        drop(writing);
        if let Err(error) = written {
            // Rank 0 may have sent a failure before it closed the connection. The reading thread
            // then has the better cause.
            self.stream.shutdown(Shutdown::Both).ok();
            self.wait_for_failure(SHUTDOWN_GRACE);
            self.connection_lost(error.to_string());
        }
    }

    /// Returns `true` if a call still waits for its answer.
    fn is_unanswered(&self, answers: &Answers, key: RoundKey) -> bool {
        let answered = answers.pending.get(&key).is_some_and(Option::is_some);
        !answered && self.failure.get().is_none() && !answers.reader_ended
    }

    /// Waits for the answer to a call, but not longer than `timeout`.
    fn is_answered_within(&self, key: RoundKey, timeout: Duration) -> bool {
        let unanswered = |answers: &mut Answers| self.is_unanswered(answers, key);
        let waited = self.changed.wait_timeout_while(self.answers(), timeout, unanswered);
        !waited.expect("no thread panics while it holds the lock").1.timed_out()
    }

    /// Waits for the answer to a call. An answer that has arrived counts, even if the world has
    /// failed since.
    fn wait_for_answer(&self, key: RoundKey) -> Result<Answer> {
        let unanswered = |answers: &mut Answers| self.is_unanswered(answers, key);
        let answers = self.changed.wait_while(self.answers(), unanswered);
        let mut answers = answers.expect("no thread panics while it holds the lock");
        let answer = answers.pending.remove(&key);
        drop(answers);
        match (answer.flatten(), self.failure.get()) {
            (Some(answer), _) => Ok(answer),
            (None, Some(failure)) => Err(failure.clone().into()),
            (None, None) => Err(self.connection_lost("it was closed".into()).into()),
        }
    }

    /// The reading thread: handles the messages of rank 0, and sends heartbeats.
    fn run_reader(&self) {
        let reason = self.receive();
        if !self.departing.load(Ordering::SeqCst) {
            self.connection_lost(reason);
        }
        self.answers().reader_ended = true;
        self.changed.notify_all();
    }

    /// Receives until the connection ends, and returns the reason for the end.
    fn receive(&self) -> String {
        let mut incoming = Incoming::new(MAX_MESSAGE);
        let mut scratch = vec![0; CHUNK];
        let start = Instant::now();
        let mut last_heard = start;
        let mut next_heartbeat = start + self.heartbeat.first_delay(self.rank, self.size);
        loop {
            let now = Instant::now();
            if now >= next_heartbeat {
                self.send_heartbeat();
                next_heartbeat = now + self.heartbeat.interval;
            }
            let pause = next_heartbeat.saturating_duration_since(now);
            // A read timeout of zero is an error.
            let pause = pause.max(Duration::from_millis(1));
            if let Err(error) = self.stream.set_read_timeout(Some(pause)) {
                return error.to_string();
            }
            match incoming.fill(&self.stream, &mut scratch) {
                Ok(0) => return "rank 0 closed it".into(),
                Ok(_) => last_heard = Instant::now(),
                Err(error) if is_pause(error.kind()) => {
                    // A process that was stopped sent no heartbeats, so rank 0 answered none.
                    if now.elapsed() > pause + STALL {
                        last_heard = Instant::now();
                    }
                    let silence = last_heard.elapsed();
                    if silence > self.heartbeat.timeout {
                        return format!("silent for {silence:.1?}");
                    }
                }
                Err(error) => return error.to_string(),
            }
            loop {
                match incoming.take_frame() {
                    Ok(Some(content)) => {
                        if let Err(error) = self.handle(&content) {
                            return error.to_string();
                        }
                    }
                    Ok(None) => break,
                    Err(error) => return error.to_string(),
                }
            }
        }
    }

    fn send_heartbeat(&self) {
        // If the lock is taken, a thread writes a frame, which shows that this process is alive.
        if let Ok(_writing) = self.writing.try_lock() {
            write(&self.stream, &short_frame(&Request::Heartbeat)).ok();
        }
    }

    /// Handles a message of rank 0.
    fn handle(&self, content: &[u8]) -> std::io::Result<()> {
        let (reply, payload) = parse(content)?;
        // Held for a failure as well: a thread between its check and its sleep would miss the
        // notification.
        let mut answers = self.answers();
        match reply {
            Reply::Heartbeat => return Ok(()),
            Reply::Failed(failure) => _ = self.failure.set(failure),
            Reply::Done(key, outcome) => {
                // A call whose thread no longer waits has no entry.
                if let Some(answer) = answers.pending.get_mut(&key) {
                    *answer = Some((outcome, payload.to_vec()));
                }
            }
        }
        drop(answers);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that rank 0 can't be reached, and returns the failure of the world: this one, unless
    /// another one was first.
    fn connection_lost(&self, reason: String) -> Failure {
        let cause = format!("the connection to it was lost: {reason}");
        // Under the lock, so that no thread goes to sleep between its check and the notification.
        let answers = self.answers();
        let failure = self.failure.get_or_init(|| Failure::Peer { rank: 0, cause }).clone();
        drop(answers);
        self.changed.notify_all();
        failure
    }
}

/// Returns `true` if a read ended without data because its time ran out or a signal arrived.
fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Drop for ServerConnection {
    fn drop(&mut self) {
        if thread::panicking() {
            self.notify(&Request::Fail { cause: "it panicked".to_owned() });
        }
        self.depart();
        let running = |answers: &mut Answers| !answers.reader_ended;
        let answers = self.shared.answers();
        drop(self.shared.changed.wait_timeout_while(answers, SHUTDOWN_GRACE, running));
        self.shared.stream.shutdown(Shutdown::Both).ok();
        if let Some(reader) = self.reader.take() {
            reader.join().ok();
        }
    }
}

impl fmt::Debug for ServerConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.shared.rank)
    }
}
