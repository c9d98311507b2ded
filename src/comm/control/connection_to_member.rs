//! A connection of rank 0's server.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use mio::net::TcpStream;

use super::authentication::Challenge;
use super::protocol::{Frame, Incoming, MAX_UNAUTHENTICATED_MESSAGE, short_frame};

/// Frames written at once.
const SLICES: usize = 16;

/// The role of the process at the other end.
pub enum Role {
    /// The peer has not answered the challenge.
    Unauthenticated(Challenge),
    /// The peer is this rank of the world.
    Member(usize),
    /// The connection is closed as soon as all outgoing frames are written.
    Closing,
}

/// A connection.
pub struct Peer {
    pub stream: TcpStream,
    pub role: Role,
    pub incoming: Incoming,
    pub outgoing: VecDeque<Frame>,
    /// Bytes of the first outgoing frame that are written.
    written: usize,
    /// The time at which the connection was accepted, or its member departed.
    pub since: Instant,
    /// The time at which the last bytes arrived.
    pub last_heard: Instant,
}

impl Peer {
    /// Creates a connection that sends a challenge first.
    pub fn new(stream: TcpStream, challenge: Challenge) -> Self {
        let now = Instant::now();
        Self {
            stream,
            outgoing: VecDeque::from([short_frame(&challenge)]),
            role: Role::Unauthenticated(challenge),
            incoming: Incoming::new(MAX_UNAUTHENTICATED_MESSAGE),
            written: 0,
            since: now,
            last_heard: now,
        }
    }

    /// Writes outgoing frames until none is left or the connection accepts no more bytes.
    pub fn flush(&mut self, sent: &AtomicU64) -> io::Result<()> {
        while !self.outgoing.is_empty() {
            let first = self.outgoing.iter().take(SLICES).enumerate();
            let slices: Vec<IoSlice<'_>> = first
                .map(|(i, frame)| IoSlice::new(if i == 0 { &frame[self.written..] } else { frame }))
                .collect();
            let written = match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => written,
                // The poll reports the connection again when it takes bytes.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            sent.fetch_add(written as u64, Ordering::Relaxed);
            // A write may end inside any frame, and the next one continues there.
            self.written += written;
            while let Some(frame) = self.outgoing.front()
                && self.written >= frame.len()
            {
                self.written -= frame.len();
                self.outgoing.pop_front();
            }
        }
        Ok(())
    }
}
