//! What processes tell each other beside their tensors: who is there, small data, and failures.
//!
//! Rank 0 listens, the others connect, and everything goes through it. This is no engine of tensors:
//! those go over MPI or NCCL, which know nothing of a rank that fails.

mod protocol;
mod server;

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use protocol::{Challenge, Hello, Reply, Request};
use server::{Rules, Server};

use super::rendezvous::Failure;
use crate::error::{Error, Result};

/// Time between attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Time between looks at whether the world goes on.
const CHECK: Duration = Duration::from_millis(100);
/// How long a call may take before it is compared with those of the other ranks.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// How much longer than a deadline its keeper may take to say so.
const GRACE: Duration = Duration::from_secs(2);

/// One process's way to the others.
#[derive(Debug)]
pub struct Control {
    link: Arc<Link>,
    group: u64,
    /// The ranks in the world of the group's members.
    members: Arc<[usize]>,
    /// The own index among them.
    rank: usize,
    /// Calls of the group that went elsewhere.
    calls: AtomicU64,
}

/// A call of a group that goes elsewhere: over an engine that knows nothing of failures.
#[derive(Debug, Clone)]
pub struct Elsewhere {
    /// Calls of the group before it.
    pub number: u64,
    /// What is called.
    pub call: String,
}

/// The connection to rank 0, shared by all groups of a process.
struct Link {
    stream: Mutex<TcpStream>,
    rank: usize,
    deadline: Duration,
    groups: AtomicU64,
    failure: OnceLock<Failure>,
    /// On rank 0. Dropped last, when this process has left itself.
    _server: Option<Server>,
}

/// A place where rank 0 listens: for its own process the listener, for the others the address.
pub struct Meeting {
    /// Where the others reach rank 0.
    pub address: String,
    listener: Option<TcpListener>,
}

impl Meeting {
    /// Where a rank finds the others, at an address that all of them know.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] on rank 0 if nothing can listen there.
    pub fn at(rank: usize, host: &str, port: u16) -> Result<Self> {
        let address = format!("{host}:{port}");
        if rank > 0 {
            return Ok(Self { address, listener: None });
        }
        // What only this machine reaches should be reached from this machine only.
        let found = (host, port).to_socket_addrs().map(|mut found| found.next());
        let loopback = matches!(found, Ok(Some(found)) if found.ip().is_loopback());
        let own: IpAddr = if loopback { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED }.into();
        match TcpListener::bind((own, port)) {
            Ok(listener) => Ok(Self { address, listener: Some(listener) }),
            Err(error) => Err(Error::Rendezvous {
                rank,
                address,
                reason: format!("rank 0 can't listen there: {error}"),
                remedy: "set MASTER_PORT to a port that nothing else uses, on all ranks",
            }),
        }
    }

    /// Rank 0's place at any free port, reached under the name of its host.
    ///
    /// # Errors
    ///
    /// As [`at`](Self::at).
    #[cfg(any(test, feature = "mpi"))]
    pub fn anywhere(host: &str) -> Result<Self> {
        let Self { listener, .. } = Self::at(0, host, 0)?;
        let port = listener.as_ref().and_then(|listener| listener.local_addr().ok());
        let port = port.map_or(0, |address| address.port());
        Ok(Self { address: format!("{host}:{port}"), listener })
    }

    /// A place that rank 0 has told of.
    #[cfg(any(test, feature = "mpi"))]
    pub fn known(address: String) -> Self {
        Self { address, listener: None }
    }

    /// Joins the world of `size` ranks as one of them. Waits for rank 0, and not for the others.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if rank 0 is not reached within the deadline, or does not let this
    /// process in.
    pub fn join(
        self,
        rank: usize,
        size: usize,
        secret: &str,
        deadline: Duration,
    ) -> Result<Control> {
        let Self { address, listener } = self;
        let secret = secret.as_bytes();
        let refused = |reason: String, remedy| Error::Rendezvous {
            rank,
            address: address.clone(),
            reason,
            remedy,
        };
        let rules = Rules { size, secret: secret.to_vec(), deadline };
        let server = listener.map(|listener| Server::start(listener, rules)).transpose();
        let server = server.map_err(|error| refused(error.to_string(), "free some resources"))?;
        let own = server.as_ref().map(|server| server.address().to_string());
        let own = own.as_deref().unwrap_or(&address);
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        let (stream, greeting) = loop {
            let stream = connect(own, left()).map_err(|error| {
                refused(
                    format!("rank 0 did not answer within {deadline:?}: {error}"),
                    "start rank 0, and set MASTER_ADDR and MASTER_PORT to where this rank reaches it",
                )
            })?;
            let greeting = greet(&stream, rank, size, secret, deadline);
            // Closed at once by a rank 0 that has too many strangers before it: there will be room.
            let closed = matches!(&greeting, Err(error) if CLOSED.contains(&error.kind()));
            if !closed || left() <= RETRY {
                break (stream, greeting);
            }
            thread::sleep(RETRY);
        };
        match greeting {
            Ok(Reply::Fine) => {}
            Ok(Reply::Refused(reason)) => {
                return Err(refused(
                    format!("rank 0 refused this process: {reason}"),
                    "start every rank once, with the same program, number of ranks and secret",
                ));
            }
            Ok(reply) => return Err(refused(format!("it answered {reply:?}"), OTHER)),
            Err(error) => return Err(refused(format!("it did not greet back: {error}"), OTHER)),
        }
        let link = Link {
            stream: Mutex::new(stream),
            rank,
            deadline,
            groups: AtomicU64::new(1),
            failure: OnceLock::new(),
            _server: server,
        };
        Ok(Control {
            link: Arc::new(link),
            group: 0,
            members: (0..size).collect(),
            rank,
            calls: AtomicU64::new(0),
        })
    }
}

/// How a connection ends that the other side does not want.
const CLOSED: [io::ErrorKind; 3] =
    [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
/// How a read ends that has waited long enough.
const TOO_LATE: [io::ErrorKind; 2] = [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut];
const OTHER: &str = "something else listens there: set MASTER_PORT to a free port, on all ranks";

fn connect(address: &str, deadline: Duration) -> io::Result<TcpStream> {
    let start = Instant::now();
    loop {
        let attempt = || {
            let left = deadline.saturating_sub(start.elapsed()).max(RETRY);
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for found in address.to_socket_addrs()? {
                match TcpStream::connect_timeout(&found, left) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        match attempt() {
            Ok(stream) => return Ok(stream),
            Err(error) if start.elapsed() + RETRY > deadline => return Err(error),
            Err(_) => thread::sleep(RETRY),
        }
    }
}

fn greet(
    mut stream: &TcpStream,
    rank: usize,
    size: usize,
    secret: &[u8],
    deadline: Duration,
) -> io::Result<Reply> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(deadline + GRACE))?;
    stream.set_write_timeout(Some(deadline + GRACE))?;
    let challenge: Challenge = protocol::read(&mut stream, protocol::STRANGER)?;
    protocol::write(&mut stream, &Hello::new(&challenge, rank, size, secret))?;
    protocol::read(&mut stream, protocol::STRANGER)
}

impl Control {
    /// The own index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Members of the group.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// How long a rank may be waited for.
    pub fn deadline(&self) -> Duration {
        self.link.deadline
    }

    /// Small data of all members, to all members. Waits.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`], [`Error::Mismatch`].
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let (group, members) = (self.group, self.members.to_vec());
        match self.link.ask(&Request::Gather { group, members, bytes })? {
            Reply::Gathered(all) => Ok(all),
            _ => Err(self.link.lost("it answered something else".into())),
        }
    }

    /// Small data of all members, to one of them.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        let all = self.all_gather_bytes(bytes)?;
        Ok((root == self.rank).then_some(all))
    }

    /// Small data of one member, to all of them.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        let own = if root == self.rank { bytes } else { vec![] };
        Ok(self.all_gather_bytes(own)?.swap_remove(root))
    }

    /// The lowest member that gives anything, and what it gives.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        let own = bytes.map_or(vec![], |bytes| [vec![1], bytes].concat());
        let all = self.all_gather_bytes(own)?;
        let first = all.iter().position(|bytes| !bytes.is_empty());
        Ok(first.map(|rank| (rank, all[rank][1..].to_vec())))
    }

    /// The bits that are set on any member.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let all = self.all_gather_bytes(bytes)?;
        let or = |all: Vec<u8>, own: &Vec<u8>| all.iter().zip(own).map(|(a, b)| a | b).collect();
        Ok(all[1..].iter().fold(all[0].clone(), or))
    }

    /// Says whether this rank is at work that others should wait for.
    pub fn set_busy(&self, _busy: bool) {}

    /// A call that goes elsewhere, as all members make it now.
    pub fn announce(&self, call: impl ToString) -> Elsewhere {
        Elsewhere { number: self.calls.fetch_add(1, Ordering::SeqCst), call: call.to_string() }
    }

    /// Waits until `finished` says so, which is asked again and again.
    ///
    /// # Errors
    ///
    /// Those of `finished`; [`Error::PeerFailed`] and [`Error::Mismatch`] if the call can't finish, since
    /// a rank failed, waits for something else, or does not come within the deadline.
    pub fn wait(&self, call: &Elsewhere, mut finished: impl FnMut() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        let mut next_check = CHECK;
        while !finished()? {
            thread::yield_now();
            let elapsed = start.elapsed();
            if elapsed >= next_check {
                // A comparison tells of failures, too.
                match elapsed < PATIENCE {
                    true => self.check()?,
                    false => self.compare(call, elapsed >= self.deadline())?,
                }
                if elapsed >= self.deadline() + GRACE {
                    self.fail(&format!(
                        "{} did not finish, though all ranks came to it",
                        call.call
                    ));
                }
                next_check = elapsed + CHECK;
            }
        }
        if start.elapsed() >= PATIENCE {
            // It waits no more. This call has its result, whatever the world does.
            self.check().ok();
        }
        Ok(())
    }

    /// Why a call failed: an engine may see first what another rank did, or that it called something
    /// else, in words of its own. The others are listened to for `patience`.
    pub fn cause_of(&self, call: &Elsewhere, error: Error, patience: Duration) -> Error {
        let start = Instant::now();
        while start.elapsed() < patience {
            if let Err(cause) = self.compare(call, false) {
                return cause;
            }
            thread::sleep(CHECK);
        }
        self.fail(&error.to_string());
        error
    }

    /// Says which call this rank waits for, to find out who waits for another one.
    fn compare(&self, call: &Elsewhere, too_late: bool) -> Result<()> {
        let (group, members) = (self.group, self.members.to_vec());
        let Elsewhere { number, call } = call.clone();
        self.link.ask(&Request::Compare { group, members, number, call, too_late }).map(drop)
    }

    /// Whether the world goes on.
    ///
    /// # Errors
    ///
    /// Why it does not.
    pub fn check(&self) -> Result<()> {
        self.link.ask(&Request::Check).map(drop)
    }

    /// Ends the world because of this rank.
    pub fn fail(&self, cause: &str) {
        self.link.ask(&Request::Fail { cause: cause.to_owned() }).ok();
    }

    /// Whether the world was seen to have ended.
    pub fn has_failed(&self) -> bool {
        self.link.failure.get().is_some()
    }

    /// The group of the members that give the same color, in the order of `key` and then of rank,
    /// and their indices in this group.
    ///
    /// # Errors
    ///
    /// As [`all_gather_bytes`](Self::all_gather_bytes).
    pub fn split(&self, color: usize, key: usize) -> Result<(Self, Vec<usize>)> {
        // Everybody offers a number for a new group; that of a group's first member counts.
        let own = self.link.groups.fetch_add(1, Ordering::SeqCst);
        let own = super::offer(color, key, own << 24 | self.link.rank as u64);
        let offers = self.all_gather_bytes(own)?;
        let (group, members) = super::members(&offers, color);
        let rank = members.iter().position(|rank| *rank == self.rank).expect("of the own color");
        let world = members.iter().map(|member| self.members[*member]).collect();
        let control =
            Self { link: self.link.clone(), group, members: world, rank, calls: AtomicU64::new(0) };
        Ok((control, members))
    }
}

impl Link {
    /// Rank 0's answer.
    fn ask(&self, request: &Request) -> Result<Reply> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone().into());
        }
        // Only others can keep rank 0 from answering at once.
        let patience = match request {
            Request::Gather { .. } => self.deadline + GRACE,
            _ => self.deadline,
        };
        let mut stream = self.stream.lock().expect("nothing panics while it holds the lock");
        stream.set_read_timeout(Some(patience)).ok();
        let reply = protocol::write(&mut *stream, request)
            .and_then(|()| protocol::read(&mut *stream, protocol::MEMBER));
        drop(stream);
        match reply {
            Ok(Reply::Failed(failure)) => Err(self.failure.get_or_init(|| failure).clone().into()),
            Ok(reply) => Ok(reply),
            Err(error) if TOO_LATE.contains(&error.kind()) => {
                Err(self.lost(format!("it did not answer within {patience:?}")))
            }
            Err(error) => Err(self.lost(error.to_string())),
        }
    }

    /// Rank 0 is gone.
    fn lost(&self, reason: String) -> Error {
        let cause = format!("the connection to it was lost: {reason}");
        self.failure.get_or_init(|| Failure::Peer { rank: 0, cause }).clone().into()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Ok(stream) = self.stream.get_mut() {
            if thread::panicking() {
                let cause = "it panicked".to_owned();
                protocol::write(stream, &Request::Fail { cause }).ok();
            }
            protocol::write(stream, &Request::Leave).ok();
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.rank)
    }
}

#[cfg(test)]
mod tests;
