//! A process's connection to rank 0, shared by all of its groups and threads.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::super::meetings::{Failure, Key};
use super::beat::{Beat, STALL};
use super::protocol::{
    CAUSE, Frame, Incoming, LONGEST, MEMBER, Outcome, Reply, Request, bounded, frame, parse, short,
    write,
};
use super::server::Server;
use crate::error::{Error, Result};

/// The longest time that a process that leaves, or has failed, waits for rank 0 to take notice.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes read at once.
const CHUNK: usize = 1 << 14;
/// The stack of the reading thread, which calls nothing deep.
const STACK: usize = 1 << 17;

/// The result of a call, and the raw bytes that belong to it.
pub type Answer = (Outcome, Vec<u8>);

/// A process's connection to rank 0.
pub struct Link {
    shared: Arc<Shared>,
    pub deadline: Duration,
    /// The number of calls of engines, in every group.
    made: Mutex<BTreeMap<u64, Arc<AtomicU64>>>,
    reader: Option<JoinHandle<()>>,
    /// On rank 0. Dropped last, when this process has left itself.
    _server: Option<Server>,
}

/// The state that the calling threads share with the one that reads.
struct Shared {
    stream: TcpStream,
    rank: usize,
    size: usize,
    beat: Beat,
    /// Held while a frame is written.
    writing: Mutex<()>,
    calls: Mutex<Calls>,
    /// Notified when a call is answered, the world has failed, or the reader has ended.
    changed: Condvar,
    failure: OnceLock<Failure>,
    leaving: AtomicBool,
}

#[derive(Default)]
struct Calls {
    /// The calls that wait for an answer, and their answers.
    answers: HashMap<Key, Option<Answer>>,
    /// Set when the reader has ended.
    ended: bool,
}

impl Link {
    /// The connection of a rank that rank 0 has welcomed.
    ///
    /// # Errors
    ///
    /// If the operating system has no thread for it.
    pub fn new(
        stream: TcpStream,
        (rank, size): (usize, usize),
        deadline: Duration,
        server: Option<Server>,
    ) -> std::io::Result<Self> {
        let beat = Beat::new(size, deadline);
        stream.set_write_timeout(Some(beat.silence))?;
        let shared = Arc::new(Shared {
            stream,
            rank,
            size,
            beat,
            writing: Mutex::default(),
            calls: Mutex::default(),
            changed: Condvar::new(),
            failure: OnceLock::new(),
            leaving: AtomicBool::new(false),
        });
        let reader = thread::Builder::new().name("distmuon control".into()).stack_size(STACK);
        let reader = reader.spawn({
            let shared = shared.clone();
            move || shared.read()
        })?;
        Ok(Self { shared, deadline, made: Mutex::default(), reader: Some(reader), _server: server })
    }

    /// The counter of a group's calls of engines.
    pub fn count(&self, group: u64) -> Arc<AtomicU64> {
        let mut made = self.made.lock().expect("no thread panics while it holds the lock");
        made.entry(group).or_default().clone()
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

    /// Sends a message that is not answered.
    pub fn tell(&self, request: &Request) {
        self.shared.send(&short(request));
    }

    /// Sends a call and waits for its result. `name` is that of the call, for errors.
    pub fn ask(
        &self,
        name: &'static str,
        key: Key,
        request: &Request,
        raw: &[u8],
    ) -> Result<Answer> {
        self.check()?;
        let rank = self.shared.rank;
        let refused = |length| too_long(name, rank, length);
        // Rank 0 does not hear of a call that is refused here, and other ranks would wait for it.
        let refused_here = |length| {
            let error = refused(length);
            if self.shared.size > 1 {
                self.fail(&error.to_string());
            }
            error
        };
        if raw.len() > LONGEST {
            return Err(refused_here(raw.len()));
        }
        let frame = frame(request, &[raw]).map_err(refused_here)?;
        self.shared.calls().answers.insert(key, None);
        self.shared.send(&frame);
        match self.shared.answer(key)? {
            (Outcome::TooLong(length), _) => Err(refused(length)),
            answer => Ok(answer),
        }
    }

    /// Waits until the world has failed, but not longer than `patience`.
    pub fn listen(&self, patience: Duration) {
        let unchanged = |calls: &mut Calls| self.failure().is_none() && !calls.ended;
        let waited =
            self.shared.changed.wait_timeout_while(self.shared.calls(), patience, unchanged);
        drop(waited.expect("no thread panics while it holds the lock"));
    }

    /// Ends the world, and waits until that is known.
    pub fn fail(&self, cause: &str) {
        self.tell(&Request::Fail { cause: bounded(cause.to_owned(), CAUSE) });
        self.listen(FAREWELL);
    }

    /// Bytes that rank 0 has sent.
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

fn too_long(collective: &'static str, rank: usize, length: usize) -> Error {
    Error::Collective {
        collective,
        rank,
        reason: format!("{length} bytes, expected at most {}", LONGEST),
        remedy: "send less at once, or send it as a tensor",
    }
}

impl Shared {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().expect("no thread panics while it holds the lock")
    }

    fn send(&self, frame: &Frame) {
        let writing = self.writing.lock().expect("no thread panics while it holds the lock");
        let written = write(&self.stream, frame);
        drop(writing);
        if let Err(error) = written {
            // Rank 0 may have said why before it closed the connection: the reader knows best.
            self.stream.shutdown(Shutdown::Both).ok();
            let unchanged = |calls: &mut Calls| self.failure.get().is_none() && !calls.ended;
            drop(self.changed.wait_timeout_while(self.calls(), FAREWELL, unchanged));
            self.lost(error.to_string());
        }
    }

    /// Waits for the answer to a call. An answer that has come counts, whatever happened since.
    fn answer(&self, key: Key) -> Result<Answer> {
        let unanswered = |calls: &mut Calls| {
            let answered = calls.answers.get(&key).is_some_and(Option::is_some);
            !answered && self.failure.get().is_none() && !calls.ended
        };
        let calls = self.changed.wait_while(self.calls(), unanswered);
        let answer = calls.expect("no thread panics while it holds the lock").answers.remove(&key);
        match (answer.flatten(), self.failure.get()) {
            (Some(answer), _) => Ok(answer),
            (None, Some(failure)) => Err(failure.clone().into()),
            (None, None) => Err(self.lost("it was closed".into()).into()),
        }
    }

    /// Takes what rank 0 sends, and says from time to time that this process lives.
    fn read(&self) {
        let lost = self.receive();
        if !self.leaving.load(Ordering::SeqCst) {
            self.lost(lost);
        }
        self.calls().ended = true;
        self.changed.notify_all();
    }

    /// Returns the reason for its end.
    fn receive(&self) -> String {
        let (mut incoming, mut scratch) = (Incoming::new(MEMBER), vec![0; CHUNK]);
        let start = Instant::now();
        let (mut heard, mut next) = (start, start + self.beat.first(self.rank, self.size));
        loop {
            let now = Instant::now();
            if now >= next {
                self.beat();
                next = now + self.beat.interval;
            }
            let pause = next.saturating_duration_since(now).max(Duration::from_millis(1));
            if let Err(error) = self.stream.set_read_timeout(Some(pause)) {
                return error.to_string();
            }
            match incoming.fill(&self.stream, &mut scratch) {
                Ok(0) => return "it closed it".into(),
                Ok(_) => heard = Instant::now(),
                Err(error) if is_pause(error.kind()) => {
                    // A process that was stopped did not ask, and so got no answer.
                    if now.elapsed() > pause + STALL {
                        heard = Instant::now();
                    }
                    let silence = heard.elapsed();
                    if silence > self.beat.silence {
                        return format!("silent for {silence:.1?}");
                    }
                }
                Err(error) => return error.to_string(),
            }
            loop {
                match incoming.take() {
                    Ok(Some(content)) => {
                        if let Err(error) = self.take(&content) {
                            return error.to_string();
                        }
                    }
                    Ok(None) => break,
                    Err(error) => return error.to_string(),
                }
            }
        }
    }

    fn beat(&self) {
        // A thread that is writing says the same.
        if let Ok(_writing) = self.writing.try_lock() {
            write(&self.stream, &short(&Request::Beat)).ok();
        }
    }

    fn take(&self, content: &[u8]) -> std::io::Result<()> {
        let (reply, raw) = parse(content)?;
        let mut calls = self.calls();
        match reply {
            Reply::Beat => return Ok(()),
            Reply::Failed(failure) => _ = self.failure.set(failure),
            Reply::Done(key, outcome) => {
                // A call that has been given up has no entry.
                if let Some(answer) = calls.answers.get_mut(&key) {
                    *answer = Some((outcome, raw.to_vec()));
                }
            }
        }
        drop(calls);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that rank 0 is gone, unless something failed before.
    fn lost(&self, reason: String) -> Failure {
        let cause = format!("the connection to it was lost: {reason}");
        let calls = self.calls();
        let failure = self.failure.get_or_init(|| Failure::Peer { rank: 0, cause }).clone();
        drop(calls);
        self.changed.notify_all();
        failure
    }
}

/// Returns `true` for a read that has waited long enough.
fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Drop for Link {
    fn drop(&mut self) {
        if thread::panicking() {
            self.tell(&Request::Fail { cause: "it panicked".to_owned() });
        }
        let made = self.made.get_mut().map(std::mem::take).unwrap_or_default();
        let made = made.into_iter().map(|(group, count)| (group, count.load(Ordering::SeqCst)));
        self.shared.leaving.store(true, Ordering::SeqCst);
        self.tell(&Request::Leave { made: made.collect() });
        // Rank 0 closes the connection when it has heard: nothing that was said last is lost.
        self.shared.stream.shutdown(Shutdown::Write).ok();
        let unended = |calls: &mut Calls| !calls.ended;
        drop(self.shared.changed.wait_timeout_while(self.shared.calls(), FAREWELL, unended));
        self.shared.stream.shutdown(Shutdown::Both).ok();
        if let Some(reader) = self.reader.take() {
            reader.join().ok();
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.shared.rank)
    }
}
