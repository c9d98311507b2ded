//! Finding rank 0 and joining its world.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mio::net::TcpListener;
use socket2::{Domain, SockRef, Socket, Type};

use super::Control;
use super::link::Link;
use super::proof::{Challenge, Greeting, Hello};
use super::protocol::{STRANGER, parse_all, short, write};
use super::server::{GREETING, Rules, Server};
use crate::error::{Error, Result};

/// Time between attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Connections that may wait to be accepted, as far as the system allows: all ranks connect at once.
const BACKLOG: i32 = 1 << 14;
/// The longest time to wait for rank 0.
const FOREVER: Duration = Duration::from_secs(1 << 30);
const OTHER: &str =
    "check that nothing else listens there, and that DISTMUON_SECRET is the same on all ranks";

/// A place where rank 0 listens: for its own process the listener, for the others the address.
pub struct Meeting {
    /// The address at which the others reach rank 0.
    pub address: String,
    listener: Option<TcpListener>,
}

impl Meeting {
    /// The place at which a rank finds the others, at an address that all of them know.
    ///
    /// Rank 0 can be reached from this machine only if the text of `host` says so: `localhost` or a
    /// loopback address. A name may lead to a loopback address on rank 0's machine alone.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] on rank 0 if nothing can listen there.
    pub fn at(rank: usize, host: &str, port: u16) -> Result<Self> {
        let address = written(host, port);
        if rank > 0 {
            return Ok(Self { address, listener: None });
        }
        let here = SocketAddr::new(interface(host, resolved), port);
        match listen(here) {
            Ok(listener) => Ok(Self { address, listener: Some(listener) }),
            Err(error) => Err(Error::Rendezvous {
                rank,
                address,
                reason: format!("rank 0 can't listen at {here}: {error}"),
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
        Ok(Self { address: written(host, port), listener })
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
    /// [`Error::Rendezvous`] if rank 0 is not reached within the deadline, does not let this process
    /// in, or does not know the secret.
    pub fn join(
        self,
        rank: usize,
        size: usize,
        secret: &str,
        deadline: Duration,
    ) -> Result<Control> {
        let Self { address, listener } = self;
        // A clock has no point in time at the end of a longer deadline.
        let deadline = deadline.min(FOREVER);
        let refused = |reason: String, remedy| Error::Rendezvous {
            rank,
            address: address.clone(),
            reason,
            remedy,
        };
        let rules = Rules { size, secret: secret.as_bytes().to_vec(), deadline };
        let server = listener.map(|listener| Server::start(listener, rules)).transpose();
        let server = server.map_err(|error| {
            refused(format!("rank 0 can't serve the others: {error}"), "raise the limits of rank 0")
        })?;
        let find = || match &server {
            Some(server) => Ok(server.addresses()),
            None => found(&address),
        };
        let until = Instant::now() + deadline;
        let (stream, greeting) = loop {
            let stream = connect(&find, until).map_err(|(tried, error)| {
                refused(
                    format!("rank 0 did not answer within {deadline:?} at {tried}: {error}"),
                    "start rank 0, and set MASTER_ADDR and MASTER_PORT to where this rank reaches it",
                )
            })?;
            let greeting = greet(&stream, (rank, size), secret.as_bytes(), until);
            // Closed at once by a rank 0 that has too many strangers before it: there will be room.
            let again = matches!(&greeting, Err(error) if AGAIN.contains(&error.kind()));
            if !again || Instant::now() + RETRY >= until {
                break (stream, greeting);
            }
            thread::sleep(RETRY);
        };
        match greeting {
            Ok(None) => {}
            Ok(Some(reason)) => {
                return Err(refused(
                    format!("rank 0 refused this process: {reason}"),
                    "start every rank once, with the same program, number of ranks and secret",
                ));
            }
            Err(error) => return Err(refused(format!("it did not greet back: {error}"), OTHER)),
        }
        let link = Link::new(stream, (rank, size), deadline, server);
        let link = link.map_err(|error| {
            refused(
                format!("no thread for the connection: {error}"),
                "raise the limit on processes",
            )
        })?;
        Ok(Control::new(Arc::new(link), 0, rank, size))
    }
}

/// The errors of a greeting that may go well the next time.
const AGAIN: [ErrorKind; 5] = [
    ErrorKind::UnexpectedEof,
    ErrorKind::ConnectionReset,
    ErrorKind::BrokenPipe,
    ErrorKind::TimedOut,
    ErrorKind::WouldBlock,
];

/// The text of a host without the brackets of an IPv6 address.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn written(host: &str, port: u16) -> String {
    let host = bare(host);
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn resolved(host: &str) -> Vec<IpAddr> {
    let found = (host, 0).to_socket_addrs().map(|found| found.map(|address| address.ip()));
    found.map(Iterator::collect).unwrap_or_default()
}

/// The interface on which rank 0 listens. Only the family of a name's addresses counts: a name that
/// leads to a loopback address here may lead to this machine from others.
fn interface(host: &str, resolve: impl FnOnce(&str) -> Vec<IpAddr>) -> IpAddr {
    let host = bare(host);
    let (is_local, family) = match host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) if ip.is_loopback() => return ip,
        Ok(ip) => (false, ip),
        Err(_) => {
            let found = resolve(host);
            let v4 = found.iter().find(|ip| ip.is_ipv4()).or(found.first());
            let family = v4.copied().unwrap_or(Ipv4Addr::UNSPECIFIED.into());
            (host.eq_ignore_ascii_case("localhost"), family)
        }
    };
    match (family, is_local) {
        (IpAddr::V4(_), true) => Ipv4Addr::LOCALHOST.into(),
        (IpAddr::V4(_), false) => Ipv4Addr::UNSPECIFIED.into(),
        (IpAddr::V6(_), true) => Ipv6Addr::LOCALHOST.into(),
        // Takes connections of both families.
        (IpAddr::V6(_), false) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn listen(here: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(here), Type::STREAM, None)?;
    if here.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // A port of a world that has just ended can be used again. On Windows, this would let a port have
    // two listeners.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&here.into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from_std(socket.into()))
}

/// The addresses of a host and port in one text.
fn found(address: &str) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    let port: u16 = port.parse().map_err(|_| io::Error::other("the address has no port"))?;
    Ok((bare(host), port).to_socket_addrs()?.collect())
}

/// A connection to the first address that takes one, else the addresses and the last error.
fn connect(
    find: &dyn Fn() -> io::Result<Vec<SocketAddr>>,
    until: Instant,
) -> Result<TcpStream, (String, io::Error)> {
    loop {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        let addresses = find().unwrap_or_else(|error| {
            last = error;
            vec![]
        });
        for (i, address) in addresses.iter().enumerate() {
            // An address that swallows everything leaves time for those after it.
            let left = until.saturating_duration_since(Instant::now());
            let share = (left / (addresses.len() - i) as u32).max(RETRY);
            match TcpStream::connect_timeout(address, share) {
                Ok(stream) if is_itself(&stream) => {
                    forget(stream);
                    last = ErrorKind::ConnectionRefused.into();
                }
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        if Instant::now() + RETRY > until {
            let tried: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            let tried = if tried.is_empty() { "no address".into() } else { tried.join(", ") };
            return Err((tried, last));
        }
        thread::sleep(RETRY);
    }
}

/// Returns `true` for a connection whose two ends are the same socket. The system may draw the very port that it
/// connects to, where rank 0 does not listen yet.
fn is_itself(stream: &TcpStream) -> bool {
    stream.local_addr().is_ok_and(|own| stream.peer_addr().is_ok_and(|other| own == other))
}

/// Closes a connection so that its port is free at once.
fn forget(stream: TcpStream) {
    // Ended in peace, it would keep the port for a minute, in which rank 0 could not listen there.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).ok();
}

/// Proves to rank 0 that this process belongs to the world, and lets it prove the same. Returns the
/// reason if it does not let this process in.
pub(super) fn greet(
    stream: &TcpStream,
    (rank, size): (usize, usize),
    secret: &[u8],
    until: Instant,
) -> io::Result<Option<String>> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(left(until)?))?;
    // A connection that did not fit into the system's queue may look open here while rank 0 does not
    // know of it. Once it has spoken, the process may be a member, and must not try again.
    let soon = until.min(Instant::now() + GREETING);
    let challenge: Challenge = parse_all(&read(stream, soon)?)?;
    if !challenge.is_known() {
        return Err(io::Error::other("it speaks another version of the protocol"));
    }
    let hello = Hello::new(&challenge, rank, size, secret)?;
    write(stream, &short(&hello))?;
    match parse_all(&read(stream, until)?)? {
        Greeting::Welcome(proof) if hello.is_welcome(&challenge, &proof, secret) => Ok(None),
        Greeting::Welcome(_) => Err(io::Error::other("it does not know the secret of this world")),
        Greeting::Refused(reason) => Ok(Some(reason)),
    }
}

/// Reads the content of one frame, and nothing of what may follow.
fn read(stream: &TcpStream, until: Instant) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    read_exact(stream, &mut length, until)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > STRANGER {
        return Err(io::Error::new(ErrorKind::InvalidData, "what it sent is not a greeting"));
    }
    let mut content = vec![0; length];
    read_exact(stream, &mut content, until)?;
    Ok(content)
}

/// Fills a buffer. The time limit is for all of it.
fn read_exact(mut stream: &TcpStream, mut bytes: &mut [u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    left.ok_or_else(|| ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_that_says_so_is_reached_from_its_own_machine_alone() {
        for (host, addresses, expected) in [
            ("localhost", &["127.0.0.1", "::1"][..], "127.0.0.1"),
            ("LocalHost", &["::1"], "::1"),
            ("127.0.0.1", &[], "127.0.0.1"),
            ("127.0.1.1", &[], "127.0.1.1"),
            ("::1", &[], "::1"),
            ("[::1]", &[], "::1"),
            // As Debian's installer and many containers write it into /etc/hosts.
            ("debian", &["127.0.1.1"], "0.0.0.0"),
            ("container", &["127.0.0.1"], "0.0.0.0"),
            ("container", &["::1", "127.0.0.1"], "0.0.0.0"),
            ("node", &["10.0.0.7", "fd00::7"], "0.0.0.0"),
            ("node", &["fd00::7"], "::"),
            ("unknown", &[], "0.0.0.0"),
            ("10.0.0.7", &[], "0.0.0.0"),
            ("[fd00::7]", &[], "::"),
        ] {
            let resolve = |name: &str| {
                assert_eq!(name, host);
                addresses.iter().map(|ip| ip.parse().unwrap()).collect()
            };
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(interface(host, resolve), expected, "{host} {addresses:?}");
        }
    }

    #[test]
    fn a_connection_to_itself_is_seen_and_leaves_its_port() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let address = socket.local_addr().unwrap();
        socket.connect(&address).unwrap();
        let stream = socket.into();
        assert!(is_itself(&stream));
        forget(stream);
        listen(address.as_socket().unwrap()).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(!is_itself(&TcpStream::connect(address).unwrap()));
    }

    #[test]
    fn addresses_are_written_and_found() {
        for (host, text) in [
            ("node", "node:29500"),
            ("10.0.0.7", "10.0.0.7:29500"),
            ("::1", "[::1]:29500"),
            ("[::1]", "[::1]:29500"),
        ] {
            assert_eq!(written(host, 29500), text);
        }
        assert_eq!(found("[::1]:29500").unwrap(), ["[::1]:29500".parse().unwrap()]);
        assert_eq!(found("10.0.0.7:1").unwrap(), ["10.0.0.7:1".parse().unwrap()]);
        assert!(found("node").is_err());
    }
}
