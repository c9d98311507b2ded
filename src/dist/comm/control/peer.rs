//! A connection of rank 0's server.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use mio::net::TcpStream;

use super::proof::Challenge;
use super::protocol::{Frame, Incoming, STRANGER, short};

/// Frames written at once.
const SLICES: usize = 16;

/// The part that the process at the other end plays.
pub enum Role {
    Stranger(Challenge),
    Member(usize),
    /// It has heard all that it will hear.
    Dismissed,
}

/// A connection.
pub struct Peer {
    pub stream: TcpStream,
    pub role: Role,
    pub incoming: Incoming,
    pub outgoing: VecDeque<Frame>,
    /// Bytes of the first outgoing frame that are written.
    written: usize,
    pub since: Instant,
    pub heard: Instant,
}

impl Peer {
    /// A connection whose process is sent a challenge.
    pub fn new(stream: TcpStream, challenge: Challenge) -> Self {
        let now = Instant::now();
        Self {
            stream,
            outgoing: VecDeque::from([short(&challenge)]),
            role: Role::Stranger(challenge),
            incoming: Incoming::new(STRANGER),
            written: 0,
            since: now,
            heard: now,
        }
    }

    /// Writes as much as the connection takes.
    pub fn flush(&mut self, sent: &AtomicU64) -> io::Result<()> {
        while !self.outgoing.is_empty() {
            let first = self.outgoing.iter().take(SLICES).enumerate();
            let slices: Vec<IoSlice<'_>> = first
                .map(|(i, frame)| IoSlice::new(if i == 0 { &frame[self.written..] } else { frame }))
                .collect();
            let written = match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            sent.fetch_add(written as u64, Ordering::Relaxed);
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
