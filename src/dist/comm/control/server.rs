//! Rank 0's side: one thread that lets the world's processes in, and takes and answers their messages.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use super::super::meetings::Meetings;
use super::beat::{Beat, STALL};
use super::hub::{Hub, Outbox};
use super::peer::{Peer, Role};
use super::proof::{Challenge, Greeting, Hello, VERSION};
use super::protocol::{Frame, MEMBER, Reply, Request, parse, parse_all, short};

/// The time that a process has to prove that it belongs to the world.
pub const GREETING: Duration = Duration::from_secs(5);
/// Processes that may be unproved at once, besides the ranks that have not joined.
pub const STRANGERS: usize = 64;
/// File descriptors of rank 0 besides those of the other ranks: for files, libraries, devices, and
/// processes that are not members.
const RESERVE: usize = 32 + STRANGERS;
/// How long rank 0 stays for the others after the world has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Time between looks at deadlines.
const TICK: Duration = Duration::from_millis(50);
/// Bytes read at once.
const CHUNK: usize = 1 << 16;

const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);

/// The rules by which rank 0 lets processes in.
pub struct Rules {
    pub size: usize,
    pub secret: Vec<u8>,
    /// The longest time that a rank may be waited for.
    pub deadline: Duration,
}

/// The thread that serves the others. Ends when all of them have left.
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
    /// If the operating system has too little for so many ranks.
    pub fn start(mut listener: TcpListener, rules: Rules) -> io::Result<Self> {
        // The soft limit is low on many systems, so that `select` works; this is `epoll` and its like.
        let limit = rlimit::increase_nofile_limit(u64::MAX)?;
        if limit < (rules.size + RESERVE) as u64 {
            return Err(io::Error::other(out_of_descriptors(rules.size, limit)));
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
            beat: Beat::new(rules.size, rules.deadline),
            hub: Hub::new(Meetings::new(rules.size, rules.deadline), rules.size),
            seats: vec![Seat::Free; rules.size],
            free: rules.size,
            members: 0,
            peers: vec![],
            vacant: vec![],
            strangers: 0,
            accepting: true,
            told: None,
            scratch: vec![0; CHUNK],
            sent: sent.clone(),
            closing: closing.clone(),
            rules,
        };
        let thread = thread::Builder::new().name("distmuon rank 0".into());
        let thread = Some(thread.spawn(move || service.run())?);
        Ok(Self { address, closing, waker, sent, thread })
    }

    /// The address at which rank 0's own process reaches it.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let loopback: &[std::net::IpAddr] = match self.address {
            SocketAddr::V4(address) if address.ip().is_unspecified() => {
                &[Ipv4Addr::LOCALHOST.into()]
            }
            // An address of both families may have a loopback interface of one only.
            SocketAddr::V6(address) if address.ip().is_unspecified() => {
                &[Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]
            }
            address => return vec![address],
        };
        loopback.iter().map(|ip| (*ip, self.address.port()).into()).collect()
    }
}

impl Drop for Server {
    /// Waits until all have left: what they asked for last is on its way.
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
        "a world of {size} ranks needs {} file descriptors on rank 0, and the limit is {limit}: \
         raise the hard limit there (`ulimit -n`)",
        size + RESERVE
    )
}

/// The state of a rank of the world.
#[derive(Clone, Copy, PartialEq)]
enum Seat {
    /// It has not joined.
    Free,
    /// It has joined, over this connection.
    Taken(usize),
    /// It has left.
    Left,
}

struct Service {
    poll: Poll,
    listener: TcpListener,
    address: SocketAddr,
    /// The limit on file descriptors.
    limit: u64,
    rules: Rules,
    beat: Beat,
    hub: Hub,
    seats: Vec<Seat>,
    /// Ranks that have not joined.
    free: usize,
    /// Ranks that have joined and not left.
    members: usize,
    peers: Vec<Option<Peer>>,
    /// Places in `peers` without a connection.
    vacant: Vec<usize>,
    strangers: usize,
    /// Cleared when the operating system refuses a connection, until the next tick.
    accepting: bool,
    /// When all members were told that the world has failed.
    told: Option<Instant>,
    scratch: Vec<u8>,
    sent: Arc<AtomicU64>,
    closing: Arc<AtomicBool>,
}

impl Service {
    fn run(mut self) {
        // All ranks may have something to say at once: a small number would make some look silent.
        let mut events = Events::with_capacity(self.rules.size + STRANGERS);
        let mut last = Instant::now();
        let mut closing = None;
        loop {
            let pause = (last + TICK).saturating_duration_since(Instant::now());
            if let Err(error) = self.poll.poll(&mut events, Some(pause))
                && error.kind() != ErrorKind::Interrupted
            {
                self.hub.fail(0, format!("it can't wait for the others: {error}"));
                self.tell();
                return;
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept(),
                    WAKER => {}
                    Token(at) => self.serve(at),
                }
            }
            let now = Instant::now();
            if now >= last + TICK {
                self.tick(now, now - last > STALL);
                last = now;
            }
            self.tell();
            if self.closing.load(Ordering::SeqCst) {
                let since = *closing.get_or_insert(now);
                let until = match self.told {
                    Some(told) => since.max(told) + AFTER_FAILURE,
                    None => since + self.rules.deadline,
                };
                if self.only_strangers() || now >= until {
                    return;
                }
            }
        }
    }

    /// Returns `true` if all ranks that have joined have left, and got what was sent to them.
    fn only_strangers(&self) -> bool {
        let mut peers = self.peers.iter().flatten();
        self.members == 0 && peers.all(|peer| matches!(peer.role, Role::Stranger(_)))
    }

    fn accept(&mut self) {
        while self.accepting {
            match self.listener.accept() {
                // More are closed at once; a rank among them tries again.
                Ok(_) if self.strangers >= STRANGERS + self.free => {}
                Ok((stream, _)) => _ = self.greet(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_of_the_peer(&error) => {}
                Err(error) => {
                    self.accepting = false;
                    if self.free == 0 {
                        return; // all ranks are there: the world needs no more connections
                    }
                    let limit = self.limit;
                    self.hub.fail(0, format!(
                        "it can't take another connection: {error}; {} are open, and the limit on \
                         file descriptors there is {limit} (`ulimit -n`)",
                        self.peers.len() - self.vacant.len(),
                    ));
                }
            }
        }
    }

    /// Sends a challenge to a process that may be a rank.
    fn greet(&mut self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let challenge = Challenge::new()?;
        let at = self.vacant.pop().unwrap_or(self.peers.len());
        if at == self.peers.len() {
            self.peers.push(None);
        }
        let both = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut stream, Token(at), both) {
            self.vacant.push(at);
            return Err(error);
        }
        self.strangers += 1;
        self.peers[at] = Some(Peer::new(stream, challenge));
        self.serve(at);
        Ok(())
    }

    /// Reads and writes what a connection has and takes.
    fn serve(&mut self, at: usize) {
        let mut out = Outbox::new();
        let mut open = self.receive(at, &mut out);
        for (rank, frame) in out {
            self.send(rank, frame);
        }
        if let Some(peer) = self.peers[at].as_mut() {
            open = open.and_then(|()| peer.flush(&self.sent));
            let heard_all = matches!(peer.role, Role::Dismissed) && peer.outgoing.is_empty();
            if open.is_err() || heard_all {
                self.close(at, open.err());
            }
        }
    }

    fn receive(&mut self, at: usize, out: &mut Outbox) -> io::Result<()> {
        loop {
            let Some(peer) = self.peers[at].as_mut() else { return Ok(()) };
            match peer.incoming.fill(&mut peer.stream, &mut self.scratch) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => peer.heard = Instant::now(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            while let Some(peer) = self.peers[at].as_mut()
                && let Some(content) = peer.incoming.take()?
            {
                match &peer.role {
                    Role::Stranger(_) => self.let_in(at, &parse_all(&content)?),
                    Role::Member(rank) => {
                        let rank = *rank;
                        let (request, raw) = parse(&content)?;
                        let leaves = matches!(request, Request::Leave { .. });
                        self.hub.take(rank, request, raw, out);
                        if leaves {
                            peer.role = Role::Dismissed;
                            peer.since = Instant::now();
                            self.members -= 1;
                            self.seats[rank] = Seat::Left;
                        }
                    }
                    Role::Dismissed => {}
                }
            }
        }
    }

    /// Gives a process the seat that it asks for, or tells it why not.
    fn let_in(&mut self, at: usize, hello: &Hello) {
        let seat = self.seat(at, hello);
        let Some(peer) = self.peers[at].as_mut() else { return };
        let Role::Stranger(challenge) = &peer.role else { return };
        self.strangers -= 1;
        let (greeting, role) = match seat {
            Ok(()) => {
                self.seats[hello.rank] = Seat::Taken(at);
                self.free -= 1;
                self.members += 1;
                peer.incoming.limit(MEMBER);
                (hello.welcome(challenge, &self.rules.secret), Role::Member(hello.rank))
            }
            Err(reason) => (Greeting::Refused(reason), Role::Dismissed),
        };
        peer.role = role;
        peer.outgoing.push_back(short(&greeting));
        // A rank that comes after a failure is told of it, too.
        if let (Some(_), Role::Member(rank), Some(failure)) =
            (self.told, &peer.role, self.hub.failure())
        {
            let (rank, failure) = (*rank, short(&Reply::Failed(failure.clone())));
            self.send(rank, failure);
        }
    }

    /// The reason for which a process does not get the seat that it asks for, if so. A member of the world that can't
    /// take part ends it, since the others would wait for it in vain.
    fn seat(&mut self, at: usize, hello: &Hello) -> Result<(), String> {
        let Some(Peer { role: Role::Stranger(challenge), .. }) = &self.peers[at] else {
            return Err("it has been greeted already".into());
        };
        let Rules { size, secret, .. } = &self.rules;
        if !hello.is_proved(challenge, secret) {
            return Err("the secret in DISTMUON_SECRET is not that of rank 0".into());
        }
        let reason = if hello.version != VERSION {
            format!("it runs {} and rank 0 runs {VERSION}", hello.version)
        } else if hello.size != *size {
            format!("it was told of {} ranks and rank 0 of {size}", hello.size)
        } else if hello.rank >= *size {
            format!("there is no rank {} among {size}", hello.rank)
        } else if self.seats[hello.rank] == Seat::Free {
            return Ok(());
        } else {
            format!("another process is rank {} already", hello.rank)
        };
        if self.free > 0 {
            self.hub.fail(hello.rank, reason.clone());
        }
        Err(reason)
    }

    /// Queues a frame for a rank and writes as much as its connection takes.
    fn send(&mut self, rank: usize, frame: Frame) {
        let Seat::Taken(at) = self.seats[rank] else { return };
        let Some(peer) = self.peers[at].as_mut() else { return };
        peer.outgoing.push_back(frame);
        if let Err(error) = peer.flush(&self.sent) {
            self.close(at, Some(error));
        }
    }

    /// Tells all members of the world's failure, once.
    fn tell(&mut self) {
        let Some(failure) = self.hub.failure().filter(|_| self.told.is_none()) else { return };
        let frame = short(&Reply::Failed(failure.clone()));
        self.told = Some(Instant::now());
        for rank in 0..self.seats.len() {
            self.send(rank, frame.clone());
        }
    }

    /// Ends a connection. That of a member that has not left ends the world.
    fn close(&mut self, at: usize, error: Option<io::Error>) {
        let Some(mut peer) = self.peers[at].take() else { return };
        self.poll.registry().deregister(&mut peer.stream).ok();
        self.vacant.push(at);
        match peer.role {
            Role::Stranger(_) => self.strangers -= 1,
            Role::Dismissed => {}
            Role::Member(rank) => {
                self.seats[rank] = Seat::Left;
                self.members -= 1;
                let lost = match error {
                    Some(error) if error.kind() != ErrorKind::UnexpectedEof => error.to_string(),
                    _ => "it died".to_owned(),
                };
                self.hub.fail(rank, format!("the connection to it was lost: {lost}"));
                self.hub.leave(rank);
            }
        }
    }

    /// Looks at all deadlines.
    fn tick(&mut self, now: Instant, stalled: bool) {
        if !std::mem::replace(&mut self.accepting, true) {
            self.accept();
        }
        for at in 0..self.peers.len() {
            let Some(peer) = self.peers[at].as_mut() else { continue };
            let silence = now.saturating_duration_since(peer.heard);
            match peer.role {
                Role::Member(_) if stalled => peer.heard = now,
                Role::Member(rank) if silence > self.beat.silence && self.told.is_none() => {
                    self.hub.fail_silent(rank, silence);
                }
                Role::Stranger(_) | Role::Dismissed if now - peer.since > GREETING => {
                    self.close(at, None);
                }
                _ => {}
            }
        }
        let late = self.hub.expire(now);
        if late.is_some_and(|rank| self.seats[rank] == Seat::Free) {
            self.hub.explain(&format!("; it never joined, and rank 0 listens at {}", self.address));
        }
    }
}

/// Returns `true` if a connection ended before it was accepted.
fn is_of_the_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted
    )
}
