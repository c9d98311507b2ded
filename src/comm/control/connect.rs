//! The endpoint at which rank 0 listens, and how a process joins the world there.
//!
//! A process connects to the endpoint and proves in a handshake that it knows the secret of the
//! world. It then has a [`Control`], the participant of the group of all ranks. Rank 0 also starts
//! the server.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use mio::net::TcpListener;
use socket2::{Domain, SockRef, Socket, Type};

use super::super::rounds::LONGEST_WAIT;
use super::Control;
use super::authentication::{Admission, Challenge, Hello};
use super::connection_to_server::ServerConnection;
use super::protocol::{
    MAX_UNAUTHENTICATED_MESSAGE, message_too_long, parse_all, short_frame, write,
};
use super::server::{HANDSHAKE_TIMEOUT, Server, ServerConfig};
use crate::error::{Error, Result};

/// Time between attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// The length of the queue of connections to accept, which the system may reduce. All ranks connect
/// at once.
const BACKLOG: i32 = 1 << 14;
/// The remedy of a failed handshake.
const CHECK_LISTENER: &str =
    "check that nothing else listens there, and that DISTMUON_SECRET is the same on all ranks";

/// The point at which rank 0 listens.
pub struct Endpoint {
    /// The address at which the other ranks reach rank 0.
    pub address: String,
    /// On rank 0 only.
    listener: Option<TcpListener>,
}

impl Endpoint {
    /// Returns the endpoint at an address that all ranks know. Rank 0 listens there.
    ///
    /// Rank 0 listens on all interfaces, unless the text of `host` is `localhost` or a loopback
    /// address. A name that resolves to a loopback address on rank 0's machine may resolve to
    /// another address on other machines.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] on rank 0 if it can't listen at the address.
    pub fn at(rank: usize, host: &str, port: u16) -> Result<Self> {
        let address = format_address(host, port);
        if rank > 0 {
            return Ok(Self { address, listener: None });
        }
        let local = SocketAddr::new(interface(host, resolve_host), port);
        match listen(local) {
            Ok(listener) => Ok(Self { address, listener: Some(listener) }),
            Err(error) => Err(Error::Rendezvous {
                rank,
                address,
                reason: format!("rank 0 can't listen at {local}: {error}"),
                remedy: "set MASTER_PORT to a free port, on all ranks",
            }),
        }
    }

    /// Returns rank 0's endpoint at any free port of a host.
    ///
    /// # Errors
    ///
    /// As [`at`](Self::at).
    #[cfg(any(test, feature = "mpi", feature = "cuda"))]
    pub fn at_free_port(host: &str) -> Result<Self> {
        let Self { listener, .. } = Self::at(0, host, 0)?;
        let port = listener.as_ref().and_then(|listener| listener.local_addr().ok());
        let port = port.map_or(0, |address| address.port());
        Ok(Self { address: format_address(host, port), listener })
    }

    /// Returns the endpoint at an address that rank 0 has sent to this rank.
    #[cfg(any(test, feature = "mpi", feature = "cuda"))]
    pub fn known(address: String) -> Self {
        Self { address, listener: None }
    }

    /// Joins the world of `size` ranks as one of them. Waits for rank 0, but not for the others.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if rank 0 can't be reached within the deadline, refuses this process,
    /// or does not know the secret.
    pub fn join(
        self,
        rank: usize,
        size: usize,
        secret: &str,
        deadline: Duration,
    ) -> Result<Control> {
        let Self { address, listener } = self;
        // The end of a longer deadline may not fit into an `Instant`.
        let deadline = deadline.min(LONGEST_WAIT);
        let failed = |reason: String, remedy| Error::Rendezvous {
            rank,
            address: address.clone(),
            reason,
            remedy,
        };
        let config = ServerConfig { size, secret: secret.as_bytes().to_vec(), deadline };
        let server = listener.map(|listener| Server::start(listener, config)).transpose();
        let server = server.map_err(|error| {
            failed(
                format!("rank 0 can't serve the other ranks: {error}"),
                "raise the limits of rank 0's process",
            )
        })?;
        let addresses = || match &server {
            Some(server) => Ok(server.addresses()),
            None => resolve_address(&address),
        };
        // One deadline for everything: names that do not resolve yet, a rank 0 that starts late,
        // and the handshake.
        let until = Instant::now() + deadline;
        let joined = connected(&addresses, (rank, size), secret.as_bytes(), until);
        let (stream, outcome) = joined.map_err(|(tried, error)| {
            failed(
                format!("rank 0 did not answer within {deadline:?} at {tried}: {error}"),
                "start rank 0, and set MASTER_ADDR and MASTER_PORT to its address",
            )
        })?;
        match outcome {
            Ok(None) => {}
            Ok(Some(reason)) => {
                return Err(failed(
                    format!("rank 0 refused this process: {reason}"),
                    "start every rank once, with the same program, number of ranks and secret",
                ));
            }
            Err(error) => {
                let reason = format!("the handshake with rank 0 failed: {error}");
                return Err(failed(reason, CHECK_LISTENER));
            }
        }
        let link =
            ServerConnection::new(stream, (rank, size), deadline, server).map_err(|error| {
                failed(
                    format!("can't start a thread for the connection: {error}"),
                    "raise the limit on processes (`ulimit -u`)",
                )
            })?;
        Ok(Control::new(link, rank, size))
    }
}

/// The errors of a handshake that may succeed when it is repeated.
const RETRYABLE: [ErrorKind; 5] = [
    ErrorKind::UnexpectedEof,
    ErrorKind::ConnectionReset,
    ErrorKind::BrokenPipe,
    ErrorKind::TimedOut,
    ErrorKind::WouldBlock,
];

/// Returns a host without the brackets of an IPv6 address.
fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn format_address(host: &str, port: u16) -> String {
    let host = without_brackets(host);
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn resolve_host(host: &str) -> Vec<IpAddr> {
    let addresses = (host, 0).to_socket_addrs();
    let ips = addresses.map(|addresses| addresses.map(|address| address.ip()));
    ips.map(Iterator::collect).unwrap_or_default()
}

/// Returns the interface on which rank 0 listens. Of a name's addresses, only the family counts: a
/// name that resolves to a loopback address here may resolve to another address of this machine
/// elsewhere.
fn interface(host: &str, resolve: impl FnOnce(&str) -> Vec<IpAddr>) -> IpAddr {
    let host = without_brackets(host);
    let (is_local, family) = match host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) if ip.is_loopback() => return ip,
        Ok(ip) => (false, ip),
        Err(_) => {
            let ips = resolve(host);
            let preferred = ips.iter().find(|ip| ip.is_ipv4()).or(ips.first());
            let family = preferred.copied().unwrap_or(Ipv4Addr::UNSPECIFIED.into());
            (host.eq_ignore_ascii_case("localhost"), family)
        }
    };
    match (family, is_local) {
        (IpAddr::V4(_), true) => Ipv4Addr::LOCALHOST.into(),
        (IpAddr::V4(_), false) => Ipv4Addr::UNSPECIFIED.into(),
        (IpAddr::V6(_), true) => Ipv6Addr::LOCALHOST.into(),
        // Accepts connections of both families.
        (IpAddr::V6(_), false) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        // Some systems would refuse IPv4 connections otherwise.
        socket.set_only_v6(false)?;
    }
    // A port of a world that has just ended can be used again. On Windows, this would let a port
    // have two listeners.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from_std(socket.into()))
}

/// Returns the addresses of a text that holds a host and a port.
fn resolve_address(address: &str) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    let port: u16 = port.parse().map_err(|_| io::Error::other("the address has no port"))?;
    Ok((without_brackets(host), port).to_socket_addrs()?.collect())
}

/// The outcome of a handshake: the reason if rank 0 refuses this process.
type Handshake = io::Result<Option<String>>;

/// The addresses that were tried, and the last error.
type Unanswered = (String, io::Error);

/// Connects to rank 0, and returns the outcome of the handshake.
///
/// # Errors
///
/// As [`connect`].
fn connected(
    resolve: &dyn Fn() -> io::Result<Vec<SocketAddr>>,
    place: (usize, usize),
    secret: &[u8],
    until: Instant,
) -> Result<(TcpStream, Handshake), Unanswered> {
    loop {
        let stream = connect(resolve, until)?;
        let outcome = handshake(&stream, place, secret, until);
        // Rank 0 closes a connection at once while it has too many that are unauthenticated.
        let retry = matches!(&outcome, Err(error) if RETRYABLE.contains(&error.kind()));
        if !retry || Instant::now() + RETRY >= until {
            return Ok((stream, outcome));
        }
        thread::sleep(RETRY);
    }
}

/// Connects to the first address that accepts a connection.
///
/// # Errors
///
/// The addresses that were tried and the last error, if no address accepts a connection in time.
fn connect(
    resolve: &dyn Fn() -> io::Result<Vec<SocketAddr>>,
    until: Instant,
) -> Result<TcpStream, Unanswered> {
    loop {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        // At every try: a name may resolve only later.
        let addresses = resolve().unwrap_or_else(|error| {
            last = error;
            vec![]
        });
        for (i, address) in addresses.iter().enumerate() {
            // An address that drops all packets must leave time for the addresses after it.
            let remaining = until.saturating_duration_since(Instant::now());
            let timeout = (remaining / (addresses.len() - i) as u32).max(RETRY);
            match TcpStream::connect_timeout(address, timeout) {
                // A connection to a local port where nothing listens may meet itself.
                Ok(stream) if is_self_connected(&stream) => {
                    reset(stream);
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

/// Returns `true` for a connection whose two ends are the same socket. While rank 0 does not listen
/// yet, the system may choose the very port that it connects to as the local one.
fn is_self_connected(stream: &TcpStream) -> bool {
    stream.local_addr().is_ok_and(|local| stream.peer_addr().is_ok_and(|peer| local == peer))
}

/// Closes a connection so that its port is free at once.
fn reset(stream: TcpStream) {
    // An orderly close would keep the port for a minute, in which rank 0 could not listen there.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).ok();
}

/// Authenticates this process to rank 0, and rank 0 to this process. Returns the reason if rank 0
/// refuses this process.
pub(super) fn handshake(
    stream: &TcpStream,
    (rank, size): (usize, usize),
    secret: &[u8],
    until: Instant,
) -> Handshake {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(remaining(until)?))?;
    // A connection that did not fit into the system's queue may look open here although rank 0 does
    // not know of it. The first read therefore has a short limit, after which the process tries
    // again. Once it has answered the challenge, it may be a member and must not try again.
    let soon = until.min(Instant::now() + HANDSHAKE_TIMEOUT);
    let challenge: Challenge = parse_all(&read(stream, soon)?)?;
    if !challenge.has_known_protocol() {
        return Err(io::Error::other("rank 0 uses another version of the protocol"));
    }
    let hello = Hello::new(&challenge, rank, size, secret)?;
    write(stream, &short_frame(&hello))?;
    match parse_all(&read(stream, until)?)? {
        Admission::Welcome(proof) if hello.accepts_welcome(&challenge, &proof, secret) => Ok(None),
        Admission::Welcome(_) => {
            Err(io::Error::other("rank 0 does not know the secret of this world"))
        }
        Admission::Refused(reason) => Ok(Some(reason)),
    }
}

/// Reads the content of one frame, and no byte of the frames that may follow.
fn read(stream: &TcpStream, until: Instant) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    read_exact(stream, &mut length, until)?;
    let length = u32::from_le_bytes(length) as usize;
    // Whatever answers there may claim any length, and it has not proved anything yet.
    if length > MAX_UNAUTHENTICATED_MESSAGE {
        let reason = message_too_long(MAX_UNAUTHENTICATED_MESSAGE, length);
        return Err(io::Error::new(ErrorKind::InvalidData, reason));
    }
    let mut content = vec![0; length];
    read_exact(stream, &mut content, until)?;
    Ok(content)
}

/// Fills a buffer. The time limit applies to all reads together.
fn read_exact(mut stream: &TcpStream, mut bytes: &mut [u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        // Before every read: a server that sends a byte now and then must not hold the deadline up.
        stream.set_read_timeout(Some(remaining(until)?))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the time until a point in time.
fn remaining(until: Instant) -> io::Result<Duration> {
    let remaining = until.checked_duration_since(Instant::now());
    remaining.filter(|time| !time.is_zero()).ok_or_else(|| ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_listens_on_all_interfaces_unless_the_text_of_the_host_is_local() {
        for (host, addresses, expected) in [
            ("localhost", &["127.0.0.1", "::1"][..], "127.0.0.1"),
            ("LocalHost", &["::1"], "::1"),
            ("127.0.0.1", &[], "127.0.0.1"),
            ("127.0.1.1", &[], "127.0.1.1"),
            ("::1", &[], "::1"),
            ("[::1]", &[], "::1"),
            // Debian's installer and many containers write this into /etc/hosts.
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
    fn a_self_connected_socket_is_detected_and_leaves_its_port_free() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let address = socket.local_addr().unwrap();
        socket.connect(&address).unwrap();
        let stream = socket.into();
        assert!(is_self_connected(&stream));
        reset(stream);
        listen(address.as_socket().unwrap()).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(!is_self_connected(&TcpStream::connect(address).unwrap()));
    }

    #[test]
    fn addresses_of_both_families_are_formatted_and_resolved() {
        for (host, text) in [
            ("node", "node:29500"),
            ("10.0.0.7", "10.0.0.7:29500"),
            ("::1", "[::1]:29500"),
            ("[::1]", "[::1]:29500"),
        ] {
            assert_eq!(format_address(host, 29500), text);
        }
        assert_eq!(resolve_address("[::1]:29500").unwrap(), ["[::1]:29500".parse().unwrap()]);
        assert_eq!(resolve_address("10.0.0.7:1").unwrap(), ["10.0.0.7:1".parse().unwrap()]);
        assert!(resolve_address("node").is_err());
    }
}
