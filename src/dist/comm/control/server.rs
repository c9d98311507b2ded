//! Rank 0's side: lets the world's processes in, and stands in for each of them at the meeting point
//! that ranks of one process use, too.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::super::rendezvous::{Failure, Hall};
use super::protocol::{self, Challenge, Hello, MEMBER, Reply, Request, STRANGER, VERSION};

type Seat = super::super::rendezvous::Seat<String, Arc<[u8]>>;

/// How long a process may take to prove that it belongs to the world.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections that may be unproved at once; more are closed.
const STRANGERS: usize = 64;
/// How long rank 0 stays for the others after the world has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Who is let in.
pub struct Rules {
    pub size: usize,
    pub secret: Vec<u8>,
    /// How long a rank may be waited for.
    pub deadline: Duration,
}

/// The listener of rank 0 and what it knows of the others. Ends when all of them have left.
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

struct State {
    rules: Rules,
    /// Where ranks that have not joined will sit.
    free: Mutex<Vec<Option<Seat>>>,
    /// Watches without being a rank.
    host: Seat,
    strangers: AtomicUsize,
    members: AtomicUsize,
    closing: AtomicBool,
}

impl Server {
    /// Waits for the processes of a world in the background.
    pub fn start(listener: TcpListener, rules: Rules) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let mut seats = Hall::seats(rules.size, rules.deadline);
        let host = seats[0].join(0, (0..rules.size).collect(), 0);
        let state = Arc::new(State {
            free: Mutex::new(seats.drain(..).map(Some).collect()),
            host,
            strangers: AtomicUsize::new(0),
            members: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            rules,
        });
        let accepting = Some(thread::spawn({
            let state = state.clone();
            move || accept(&listener, &state)
        }));
        Ok(Self { address, state, accepting })
    }

    /// Where rank 0 itself reaches it.
    pub fn address(&self) -> SocketAddr {
        if self.address.ip().is_unspecified() {
            (Ipv4Addr::LOCALHOST, self.address.port()).into()
        } else {
            self.address
        }
    }
}

impl Drop for Server {
    /// Waits until all have left: what they asked for last is on its way.
    fn drop(&mut self) {
        let start = Instant::now();
        let patience = || match self.state.host.check() {
            Ok(()) => self.state.rules.deadline,
            Err(_) => LAST_WORDS,
        };
        while self.state.members.load(Ordering::SeqCst) > 0 && start.elapsed() < patience() {
            thread::sleep(Duration::from_millis(1));
        }
        self.state.closing.store(true, Ordering::SeqCst);
        let woken = TcpStream::connect_timeout(&self.address(), HANDSHAKE);
        if let (Ok(_), Some(accepting)) = (woken, self.accepting.take()) {
            accepting.join().ok();
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for stream in listener.incoming() {
        if state.closing.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        if state.strangers.fetch_add(1, Ordering::SeqCst) >= STRANGERS {
            state.strangers.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let state = state.clone();
        thread::spawn(move || {
            let joined = let_in(&stream, &state);
            state.strangers.fetch_sub(1, Ordering::SeqCst);
            // Whoever proves nothing is nobody: its connection is closed, and that is all.
            if let Ok(Some(seat)) = joined {
                serve(stream, seat);
                state.members.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }
}

/// The seat of a process that belongs to the world.
fn let_in(mut stream: &TcpStream, state: &State) -> io::Result<Option<Seat>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HANDSHAKE))?;
    stream.set_write_timeout(Some(HANDSHAKE))?;
    let mut challenge = Challenge([0; 32]);
    getrandom::fill(&mut challenge.0).map_err(io::Error::other)?;
    protocol::write(&mut stream, &challenge)?;
    let hello: Hello = protocol::read(&mut stream, STRANGER)?;
    match seat(&hello, &challenge, state) {
        Ok(seat) => {
            state.members.fetch_add(1, Ordering::SeqCst);
            protocol::write(&mut stream, &Reply::Fine)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(state.rules.deadline))?;
            Ok(Some(seat))
        }
        Err(reason) => {
            protocol::write(&mut stream, &Reply::Refused(reason))?;
            Ok(None)
        }
    }
}

/// The seat that a process asks for, or why it doesn't get it. A member of the world that can't take
/// part ends it, since it would be waited for in vain.
fn seat(hello: &Hello, challenge: &Challenge, state: &State) -> Result<Seat, String> {
    let Rules { size, secret, .. } = &state.rules;
    if !hello.is_proved(challenge, secret) {
        return Err("the secret in DISTMUON_SECRET is not that of rank 0".into());
    }
    let mut free = state.free.lock().expect("nothing panics while it holds the lock");
    let waiting = free.iter().any(Option::is_some);
    let reason = if hello.version != VERSION {
        format!("it runs {} and rank 0 runs {VERSION}", hello.version)
    } else if hello.size != *size {
        format!("it was told of {} ranks and rank 0 of {size}", hello.size)
    } else if hello.rank >= *size {
        format!("there is no rank {} among {size}", hello.rank)
    } else if let Some(seat) = free[hello.rank].take() {
        return Ok(seat);
    } else {
        format!("another process is rank {} already", hello.rank)
    };
    if waiting {
        state.host.fail_for(hello.rank, reason.clone());
    }
    Err(reason)
}

/// Stands in for a process until it leaves. Reads ahead, so that its death is seen at once, whatever
/// it waits for.
fn serve(stream: TcpStream, seat: Seat) {
    let Ok(mut reading) = stream.try_clone() else { return };
    let (requests, received) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| answer(stream, &seat, received));
        loop {
            match protocol::read(&mut reading, MEMBER) {
                Ok(Request::Leave) => break seat.leave(),
                Ok(request) => {
                    if requests.send(request).is_err() {
                        break;
                    }
                }
                Err(error) => {
                    let lost = match error.kind() {
                        io::ErrorKind::UnexpectedEof => "it died".to_owned(),
                        _ => format!("{error}"),
                    };
                    seat.fail(format!("the connection to it was lost: {lost}"));
                    break seat.leave();
                }
            }
        }
        drop(requests);
    });
}

/// Answers requests, one after the other.
fn answer(mut stream: TcpStream, world: &Seat, requests: mpsc::Receiver<Request>) {
    let mut groups = Groups { world, seats: HashMap::new() };
    for request in requests {
        if !matches!(request, Request::Compare { .. }) {
            world.goes_on();
        }
        let reply = match request {
            Request::Gather { group, members, bytes } => groups
                .seat(group, members)
                .and_then(|seat| seat.arrive("all_gather_bytes".into(), bytes.into())?.meet())
                .map(|all| Reply::Gathered(all.iter().map(|bytes| bytes.to_vec()).collect())),
            Request::Compare { group, members, number, call, too_late } => groups
                .seat(group, members)
                .and_then(|seat| seat.compare(number, call, too_late))
                .map(|()| Reply::Fine),
            Request::Check => world.check().map(|()| Reply::Fine),
            Request::Fail { cause } => {
                world.fail(cause);
                Ok(Reply::Fine)
            }
            Request::Leave => return,
        };
        if protocol::write(&mut stream, &reply.unwrap_or_else(Reply::Failed)).is_err() {
            return; // the reader sees it, too
        }
    }
}

/// The seats of a process in the groups that it has spoken for.
struct Groups<'a> {
    world: &'a Seat,
    seats: HashMap<u64, Seat>,
}

impl Groups<'_> {
    fn seat(&mut self, group: u64, members: Vec<usize>) -> Result<&Seat, Failure> {
        let world = self.world;
        let rank = members.iter().position(|rank| *rank == world.rank());
        let known = members.iter().all(|rank| *rank < world.size());
        let rank = rank.filter(|_| known).ok_or_else(|| Failure::Peer {
            rank: world.rank(),
            cause: format!("it spoke for {members:?}, which is no group of its own"),
        })?;
        Ok(self.seats.entry(group).or_insert_with(|| world.join(group, members, rank)))
    }
}
