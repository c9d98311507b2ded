//! Rank 0's side of the control plane: one thread that admits the processes of a world, receives
//! their messages and sends the answers.
//!
//! The thread polls all connections. It passes the messages of members to the call board, which
//! holds the rounds and their payloads. It sends the frames that the call board returns, and checks
//! all deadlines at every tick.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use super::super::rounds::Rounds;
use super::authentication::{Admission, Challenge, Hello, VERSION};
use super::call_board::{CallBoard, Outbox};
use super::connection_to_member::{Peer, Role};
use super::heartbeat_times::{HeartbeatTimes, STALL};
use super::protocol::{Frame, MAX_MESSAGE, Reply, Request, parse, parse_all, short_frame};

/// The time that a process has to authenticate itself.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Unauthenticated connections that may be open at once, in addition to one for each rank that has
/// not joined.
pub const MAX_UNAUTHENTICATED_CONNECTIONS: usize = 64;
/// File descriptors of rank 0 in addition to the ranks' connections: for files, libraries,
/// devices, and processes that are not members.
const RESERVED_DESCRIPTORS: usize = 32 + MAX_UNAUTHENTICATED_CONNECTIONS;
/// The time for which rank 0 keeps serving the other ranks after the world has failed, so that they
/// receive the failure.
const REPORT_GRACE: Duration = Duration::from_secs(2);
/// The time for which rank 0, which has departed or failed, stays for ranks that have not joined.
/// They would look for rank 0 until the deadline.
const JOIN_GRACE: Duration = Duration::from_secs(5);
/// Time between checks of all deadlines.
const TICK: Duration = Duration::from_millis(50);
/// Bytes read at once.
const CHUNK: usize = 1 << 16;

const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);

/// The parameters of a world that rank 0 serves.
pub struct ServerConfig {
    /// The number of ranks.
    pub size: usize,
    pub secret: Vec<u8>,
    /// The longest time that one rank waits for another.
    pub deadline: Duration,
}

/// The serving thread. Ends when all ranks have departed.
pub struct Server {
    address: SocketAddr,
    closing: Arc<AtomicBool>,
    waker: Waker,
    /// Bytes that were sent to members.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test measures it"))]
    pub sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to serve a world in the background.
    ///
    /// # Errors
    ///
    /// If the operating system's limits are too low for this number of ranks.
    pub fn start(mut listener: TcpListener, config: ServerConfig) -> io::Result<Self> {
        // Many systems set a low soft limit for the sake of `select`, which is not used here.
        let limit = rlimit::increase_nofile_limit(u64::MAX)?;
        if limit < (config.size + RESERVED_DESCRIPTORS) as u64 {
            return Err(io::Error::other(out_of_descriptors(config.size, limit)));
        }
        let address = listener.local_addr()?;
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let closing = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        let service = Service {
            poll,
            listener,
            address,
            limit,
            heartbeat: HeartbeatTimes::new(config.size, config.deadline),
            board: CallBoard::new(Rounds::new(config.size, config.deadline), config.size),
            ranks: vec![RankState::NotJoined; config.size],
            not_joined: config.size,
            members: 0,
            peers: vec![],
            free_slots: vec![],
            unauthenticated: 0,
            accepting: true,
            failure_sent: None,
            scratch: vec![0; CHUNK],
            sent: sent.clone(),
            closing: closing.clone(),
            config,
        };
        let thread = thread::Builder::new().name("distmuon rank 0".into());
        let thread = Some(thread.spawn(move || service.run())?);
        Ok(Self { address, closing, waker, sent, thread })
    }

    /// The addresses at which rank 0's process reaches the server.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let loopback: &[std::net::IpAddr] = match self.address {
            SocketAddr::V4(address) if address.ip().is_unspecified() => {
                &[Ipv4Addr::LOCALHOST.into()]
            }
            // The unspecified IPv6 address accepts both families; a system may have a loopback
            // interface for only one of them.
            SocketAddr::V6(address) if address.ip().is_unspecified() => {
                &[Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]
            }
            address => return vec![address],
        };
        loopback.iter().map(|ip| (*ip, self.address.port()).into()).collect()
    }
}

impl Drop for Server {
    /// Waits until all ranks have departed, so that every rank gets the answer to its last call.
    fn drop(&mut self) {
        self.closing.store(true, Ordering::SeqCst);
        self.waker.wake().ok();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

fn out_of_descriptors(size: usize, limit: u64) -> String {
    format!(
        "a world of {size} ranks needs {} file descriptors on rank 0, and the limit is {limit} \
         (`ulimit -n`)",
        size + RESERVED_DESCRIPTORS
    )
}

/// The state of a rank of the world.
#[derive(Clone, Copy, PartialEq)]
enum RankState {
    /// The rank has not joined.
    NotJoined,
    /// The rank has joined, over the connection in this slot.
    Joined(usize),
    /// The rank has departed, or its connection was lost.
    Departed,
}

struct Service {
    poll: Poll,
    listener: TcpListener,
    address: SocketAddr,
    /// The limit on file descriptors.
    limit: u64,
    config: ServerConfig,
    heartbeat: HeartbeatTimes,
    board: CallBoard,
    ranks: Vec<RankState>,
    /// The number of ranks that have not joined.
    not_joined: usize,
    /// The number of ranks that have joined and not departed.
    members: usize,
    /// The connections. The slot of a connection is its token.
    peers: Vec<Option<Peer>>,
    /// Slots in `peers` without a connection.
    free_slots: Vec<usize>,
    /// The number of unauthenticated connections.
    unauthenticated: usize,
    /// Cleared until the next tick when the operating system can't accept a connection.
    accepting: bool,
    /// The time at which the failure of the world was sent to all members.
    failure_sent: Option<Instant>,
    scratch: Vec<u8>,
    sent: Arc<AtomicU64>,
    closing: Arc<AtomicBool>,
}

impl Service {
    fn run(mut self) {
        // All ranks may send at once. With too small a capacity, some would seem to be silent.
        let mut events = Events::with_capacity(self.config.size + MAX_UNAUTHENTICATED_CONNECTIONS);
        let mut last = Instant::now();
        let mut closing = None;
        loop {
            let pause = (last + TICK).saturating_duration_since(Instant::now());
            if let Err(error) = self.poll.poll(&mut events, Some(pause))
                && error.kind() != ErrorKind::Interrupted
            {
                self.board.fail(0, format!("it can't poll its connections: {error}"));
                self.send_failure();
                return;
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept(),
                    WAKER => {}
                    Token(slot) => self.serve(slot),
                }
            }
            let now = Instant::now();
            if now >= last + TICK {
                // After a stall of this process, silence says nothing of the others.
                self.tick(now, now - last > STALL);
                last = now;
            }
            self.send_failure();
            if self.closing.load(Ordering::SeqCst) {
                let since = *closing.get_or_insert(now);
                let until = match self.failure_sent {
                    Some(sent) => since.max(sent) + REPORT_GRACE,
                    None => since + self.config.deadline,
                };
                let may_join = self.not_joined > 0 && now < since + JOIN_GRACE;
                // Rank 0 is about to exit. First, the others get what they wait for: the failure,
                // or their last answers.
                if !may_join && (self.is_finished() || now >= until) {
                    return;
                }
            }
        }
    }

    /// Returns `true` if all ranks that have joined have departed, and all frames are sent.
    fn is_finished(&self) -> bool {
        let mut peers = self.peers.iter().flatten();
        // Strangers are not waited for, which could otherwise keep rank 0 from its end.
        self.members == 0 && peers.all(|peer| matches!(peer.role, Role::Unauthenticated(_)))
    }

    fn max_unauthenticated(&self) -> usize {
        MAX_UNAUTHENTICATED_CONNECTIONS + self.not_joined
    }

    /// Accepts the connections that wait, and sends each a challenge.
    fn accept(&mut self) {
        // Until none waits: the poll reports a listener once, however many connections there are.
        while self.accepting {
            match self.listener.accept() {
                // Dropped, which closes the connection. A rank tries again.
                Ok(_) if self.unauthenticated >= self.max_unauthenticated() => {}
                Ok((stream, _)) => _ = self.send_challenge(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_peer_error(&error) => {}
                Err(error) => {
                    self.accepting = false;
                    if self.not_joined == 0 {
                        return; // All ranks have joined, so no further connection is needed.
                    }
                    let limit = self.limit;
                    let open = self.peers.len() - self.free_slots.len();
                    let cause = format!(
                        "it can't accept another connection: {error}; {open} are open, and its \
                         limit on file descriptors is {limit} (`ulimit -n`)"
                    );
                    self.board.fail(0, cause);
                }
            }
        }
    }

    /// Sends a challenge to a process that may be a rank.
    fn send_challenge(&mut self, mut stream: TcpStream) -> io::Result<()> {
        // Messages are short, and a rank waits for each.
        stream.set_nodelay(true)?;
        let challenge = Challenge::new()?;
        let slot = self.free_slots.pop().unwrap_or(self.peers.len());
        if slot == self.peers.len() {
            self.peers.push(None);
        }
        let both = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, Token(slot), both) {
            self.free_slots.push(slot);
            return Err(error);
        }
        self.unauthenticated += 1;
        self.peers[slot] = Some(Peer::new(stream, challenge));
        // The challenge is written at once, since the process says nothing before it has it.
        self.serve(slot);
        Ok(())
    }

    /// Reads the bytes that a connection has, handles them, and writes the outgoing frames.
    fn serve(&mut self, slot: usize) {
        let mut out = Outbox::new();
        let mut open = self.receive(slot, &mut out);
        // Also after an error: these answers are for ranks whose connections are well.
        for (rank, frame) in out {
            self.send(rank, frame);
        }
        if let Some(peer) = self.peers[slot].as_mut() {
            open = open.and_then(|()| peer.flush(&self.sent));
            // A refused or departed process still gets its last message.
            let is_done = matches!(peer.role, Role::Closing) && peer.outgoing.is_empty();
            if open.is_err() || is_done {
                self.close(slot, open.err());
            }
        }
    }

    /// Reads and handles messages until a connection has no more bytes.
    fn receive(&mut self, slot: usize, out: &mut Outbox) -> io::Result<()> {
        loop {
            let Some(peer) = self.peers[slot].as_mut() else { return Ok(()) };
            match peer.incoming.fill(&mut peer.stream, &mut self.scratch) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => peer.last_heard = Instant::now(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            while let Some(peer) = self.peers[slot].as_mut()
                && let Some(content) = peer.incoming.take_frame()?
            {
                match &peer.role {
                    Role::Unauthenticated(_) => self.admit(slot, &parse_all(&content)?),
                    Role::Member(rank) => {
                        let rank = *rank;
                        let (request, payload) = parse(&content)?;
                        let departs = matches!(request, Request::Depart { .. });
                        self.board.handle(rank, request, payload, out);
                        if departs {
                            peer.role = Role::Closing;
                            peer.since = Instant::now();
                            self.members -= 1;
                            self.ranks[rank] = RankState::Departed;
                        }
                    }
                    Role::Closing => {}
                }
            }
        }
    }

    /// Makes a process the rank that it asks for, or refuses it with a reason.
    fn admit(&mut self, slot: usize, hello: &Hello) {
        let outcome = self.check_admission(slot, hello);
        let Some(peer) = self.peers[slot].as_mut() else { return };
        let Role::Unauthenticated(challenge) = &peer.role else { return };
        self.unauthenticated -= 1;
        let (admission, role) = match outcome {
            Ok(()) => {
                self.ranks[hello.rank] = RankState::Joined(slot);
                self.not_joined -= 1;
                self.members += 1;
                // Until then a stranger could send no more than a short message.
                peer.incoming.set_limit(MAX_MESSAGE);
                (hello.welcome(challenge, &self.config.secret), Role::Member(hello.rank))
            }
            Err(reason) => (Admission::Refused(reason), Role::Closing),
        };
        peer.role = role;
        peer.outgoing.push_back(short_frame(&admission));
        // A rank that joins after the failure was sent is also sent it.
        if let (Some(_), Role::Member(rank), Some(failure)) =
            (self.failure_sent, &peer.role, self.board.failure())
        {
            let rank = *rank;
            let frame = short_frame(&Reply::Failed(failure.clone()));
            self.send(rank, frame);
        }
    }

    /// Checks whether a process can be the rank that it asks for. An authenticated process that
    /// can't be admitted ends a world that is not complete, since the others would wait for it.
    ///
    /// # Errors
    ///
    /// The reason for which the process is refused.
    fn check_admission(&mut self, slot: usize, hello: &Hello) -> Result<(), String> {
        let Some(Peer { role: Role::Unauthenticated(challenge), .. }) = &self.peers[slot] else {
            return Err("it has been admitted already".into());
        };
        let ServerConfig { size, secret, .. } = &self.config;
        // First of all checks: whoever does not know the secret must neither end the world nor
        // learn of its ranks.
        if !hello.is_authentic(challenge, secret) {
            return Err("the secret in DISTMUON_SECRET differs from rank 0's".into());
        }
        let reason = if hello.version != VERSION {
            format!("it runs {} and rank 0 runs {VERSION}", hello.version)
        } else if hello.size != *size {
            format!("it was launched with {} ranks and rank 0 with {size}", hello.size)
        } else if hello.rank >= *size {
            format!("rank {} does not exist: expected a rank below {size}", hello.rank)
        } else if self.ranks[hello.rank] == RankState::NotJoined {
            return Ok(());
        } else {
            format!("another process is rank {} already", hello.rank)
        };
        // In a complete world no rank waits for this process, which is refused alone.
        if self.not_joined > 0 {
            self.board.fail(hello.rank, reason.clone());
        }
        Err(reason)
    }

    /// Queues a frame for a rank, and writes the bytes that the rank's connection accepts now.
    fn send(&mut self, rank: usize, frame: Frame) {
        let RankState::Joined(slot) = self.ranks[rank] else { return };
        let Some(peer) = self.peers[slot].as_mut() else { return };
        peer.outgoing.push_back(frame);
        if let Err(error) = peer.flush(&self.sent) {
            self.close(slot, Some(error));
        }
    }

    /// Sends the failure of the world to all members, once.
    fn send_failure(&mut self) {
        if self.failure_sent.is_some() {
            return;
        }
        let Some(failure) = self.board.failure() else { return };
        let frame = short_frame(&Reply::Failed(failure.clone()));
        self.failure_sent = Some(Instant::now());
        for rank in 0..self.ranks.len() {
            self.send(rank, frame.clone());
        }
    }

    /// Closes a connection. Ends the world if the connection is a member's.
    fn close(&mut self, slot: usize, error: Option<io::Error>) {
        let Some(mut peer) = self.peers[slot].take() else { return };
        self.poll.registry().deregister(&mut peer.stream).ok();
        self.free_slots.push(slot);
        match peer.role {
            Role::Unauthenticated(_) => self.unauthenticated -= 1,
            Role::Closing => {}
            Role::Member(rank) => {
                self.ranks[rank] = RankState::Departed;
                self.members -= 1;
                let reason = match error {
                    // The end of a stream is what the death of a process looks like from here.
                    Some(error) if error.kind() != ErrorKind::UnexpectedEof => error.to_string(),
                    _ => "its process ended".to_owned(),
                };
                self.board.fail(rank, format!("the connection to it was lost: {reason}"));
                self.board.depart(rank);
            }
        }
    }

    /// Checks all deadlines. After a stall of this thread, no member counts as silent.
    fn tick(&mut self, now: Instant, stalled: bool) {
        // Descriptors may have become free since the last try.
        if !std::mem::replace(&mut self.accepting, true) {
            self.accept();
        }
        for slot in 0..self.peers.len() {
            let Some(peer) = self.peers[slot].as_mut() else { continue };
            let silence = now.saturating_duration_since(peer.last_heard);
            match peer.role {
                // This process was not running: the messages may be in its buffers.
                Role::Member(_) if stalled => peer.last_heard = now,
                Role::Member(rank)
                    if silence > self.heartbeat.timeout && self.failure_sent.is_none() =>
                {
                    self.board.fail_silent(rank, silence);
                }
                Role::Unauthenticated(_) | Role::Closing
                    if now - peer.since > HANDSHAKE_TIMEOUT =>
                {
                    self.close(slot, None);
                }
                _ => {}
            }
        }
        let late = self.board.expire(now);
        // Most often the address is wrong, or a firewall drops the connection.
        if late.is_some_and(|rank| self.ranks[rank] == RankState::NotJoined) {
            let text = format!("; it never joined, and rank 0 listens at {}", self.address);
            self.board.append_to_cause(&text);
        }
    }
}

/// Returns `true` if a connection ended before it was accepted.
fn is_peer_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted
    )
}
