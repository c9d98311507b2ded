//! The messages between rank 0 and the processes of a world, and their form.
//!
//! A frame is a length of four bytes, the lowest first, and that many bytes: a message in
//! [postcard](https://postcard.jamesmunns.com/wire-format), and then raw bytes that belong to it.
//! Lengths are limited before anything is read, and further before a process has proved that it
//! belongs to the world.

use std::fmt::{self, Display};
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use super::super::meetings::{Failure, Key};

/// The longest frame of a process that has not proved anything yet, in bytes.
pub const STRANGER: usize = 1 << 10;
/// The longest frame of a member of the world, in bytes.
pub const MEMBER: usize = 1 << 28;
/// The most bytes that a message has besides raw bytes, without the lengths of those of all members.
pub const HEADER: usize = 64;
/// The most raw bytes of one member.
pub const LONGEST: usize = MEMBER - HEADER;
/// The longest description of a call, in bytes.
pub const CALL: usize = 200;
/// The longest cause of a failure, in bytes. It goes to all ranks.
pub const CAUSE: usize = 4 << 10;
/// A frame to send. Shared by all ranks that get the same one.
pub type Frame = Arc<[u8]>;

/// The operations of a group on small data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// All get what all give.
    AllGather,
    /// One member gets what all give.
    Gather {
        /// The index of that member.
        root: usize,
    },
    /// All get what one member gives.
    Broadcast {
        /// The index of that member.
        root: usize,
    },
    /// All get what the first member gives that gives anything.
    First,
    /// All get the bits that are set anywhere.
    Or {
        /// The number of bytes that each gives.
        length: usize,
    },
    /// The group is divided by color, a number that each member gives with a key to sort by.
    Split,
}

impl Op {
    /// The name of the method that does it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllGather => "all_gather_bytes",
            Self::Gather { .. } => "gather_bytes",
            Self::Broadcast { .. } => "broadcast_bytes",
            Self::First => "first_bytes",
            Self::Or { .. } => "or_bytes",
            Self::Split => "split",
        }
    }
}

impl Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather { root } | Self::Broadcast { root } => {
                write!(f, "{} with root {root}", self.name())
            }
            Self::Or { length } => write!(f, "{} of {length} bytes", self.name()),
            Self::AllGather | Self::First | Self::Split => f.write_str(self.name()),
        }
    }
}

/// A message of a member to rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// A call with small data, whose result is answered when all members have come.
    Call {
        /// The group and the number of the call among its calls with small data.
        key: Key,
        /// The call.
        op: Op,
        /// Tells empty data from none. The data are the raw bytes of the frame.
        given: bool,
    },
    /// The member has waited for some time for a call of an engine.
    Wait {
        /// The group and the number of the call among its calls of engines.
        key: Key,
        /// The call, [`bounded`] by [`CALL`].
        call: String,
        /// The time that the member has waited for it.
        waited: Duration,
    },
    /// The member no longer waits for that call.
    GoOn {
        /// As of [`Wait`](Self::Wait).
        key: Key,
    },
    /// The member does something that may take longer than the deadline, or has done it.
    Busy(bool),
    /// The member is alive.
    Beat,
    /// The world ends because of the member.
    Fail {
        /// The reason, [`bounded`] by [`CAUSE`].
        cause: String,
    },
    /// The member makes no further call.
    Leave {
        /// The number of its calls of engines, in every group.
        made: Vec<(u64, u64)>,
    },
}

/// A message of rank 0 to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The result of a call with small data. Equal for all members that get the same result.
    Done(Key, Outcome),
    /// Rank 0 is alive.
    Beat,
    /// The world has ended.
    Failed(Failure),
}

/// The result of a call with small data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The data of all members, one after the other in the raw bytes, with these lengths.
    All(Vec<usize>),
    /// The result is the raw bytes.
    Bytes,
    /// The raw bytes are those of this member, the lowest that gave some.
    First(usize),
    /// There is no result for this member.
    Nothing,
    /// A new group.
    Group {
        /// Its number.
        group: u64,
        /// The index of the member in it.
        rank: usize,
        /// The number of its members.
        size: usize,
        /// The index of its first member in the old group.
        first: usize,
    },
    /// The result has more bytes than fit into a frame.
    TooLong(usize),
}

/// Returns a frame that holds a message and raw bytes.
///
/// # Errors
///
/// The length of the frame, if it is too long.
pub fn frame<T: Serialize>(message: &T, raw: &[&[u8]]) -> Result<Frame, usize> {
    let message =
        postcard::to_stdvec(message).expect("messages have no state that can't be written");
    let length = message.len() + raw.iter().map(|raw| raw.len()).sum::<usize>();
    if length > MEMBER {
        return Err(length);
    }
    let mut frame = Vec::with_capacity(4 + length);
    frame.extend((length as u32).to_le_bytes());
    frame.extend(message);
    raw.iter().for_each(|raw| frame.extend_from_slice(raw));
    Ok(frame.into())
}

/// The frame of a message that is always short enough.
pub fn short<T: Serialize>(message: &T) -> Frame {
    frame(message, &[]).expect("the message is short")
}

/// Reads a message and the raw bytes after it from what a frame holds.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<(T, &[u8])> {
    postcard::take_from_bytes(bytes).map_err(|error| invalid(error.to_string()))
}

/// Reads a message that has no raw bytes.
pub fn parse_all<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match parse(bytes)? {
        (message, []) => Ok(message),
        (_, rest) => Err(invalid(format!("{} bytes too many", rest.len()))),
    }
}

/// Frames that arrive piece by piece. Memory grows with what arrives, not with what is promised.
pub struct Incoming {
    limit: usize,
    bytes: Vec<u8>,
}

impl Incoming {
    /// Accepts frames of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, bytes: vec![] }
    }

    /// Changes the limit.
    pub fn limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Reads once, using `scratch`, and returns the number of bytes read: 0 at the end of the stream.
    pub fn fill(&mut self, mut stream: impl Read, scratch: &mut [u8]) -> io::Result<usize> {
        // No more than one frame is kept beyond the last that was taken.
        let room = (4 + self.limit).saturating_sub(self.bytes.len()).clamp(1, scratch.len());
        let read = stream.read(&mut scratch[..room])?;
        self.bytes.extend_from_slice(&scratch[..read]);
        Ok(read)
    }

    /// Takes the content of the first frame, if it is complete.
    pub fn take(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.limit {
            let limit = self.limit;
            return Err(invalid(format!("a message of {length} bytes, where {limit} are allowed")));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let rest = self.bytes.split_off(4 + length);
        let mut content = std::mem::replace(&mut self.bytes, rest);
        content.drain(..4);
        Ok(Some(content))
    }
}

/// Writes a frame.
pub fn write(mut stream: impl Write, frame: &Frame) -> io::Result<()> {
    stream.write_all(frame)
}

/// Shortens a text to at most `longest` bytes. Different texts stay different.
pub fn bounded(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let hash = Sha256::digest(&text);
        let hash: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let cut = (0..=longest - 21).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(cut);
        text.push_str("... #");
        text.push_str(&hash);
    }
    text
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::proof::{Challenge, Greeting, Hello};
    use super::*;

    /// The frames that a reader makes of bytes that arrive in pieces of at most `piece`.
    fn taken(bytes: &[u8], limit: usize, piece: usize) -> io::Result<Vec<Vec<u8>>> {
        let (mut incoming, mut frames, mut stream) = (Incoming::new(limit), vec![], bytes);
        while incoming.fill(&mut stream, &mut vec![0; piece])? > 0 {
            assert!(incoming.bytes.len() <= limit + 4);
            while let Some(frame) = incoming.take()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            piece in 1_usize..300,
        ) {
            let _ = taken(&bytes, STRANGER, piece);
            let _ = parse::<Request>(&bytes);
            let _ = parse::<Reply>(&bytes);
            let _ = parse_all::<Challenge>(&bytes);
            let _ = parse_all::<Hello>(&bytes);
            let _ = parse_all::<Greeting>(&bytes);
        }

        #[test]
        fn damage_is_never_a_crash(
            at in 0_usize..60,
            bit in 0_u32..8,
            cut in 0_usize..60,
            piece in 1_usize..70,
        ) {
            let request = Request::Call { key: (7, 3), op: Op::Or { length: 40 }, given: true };
            let mut bytes = frame(&request, &[&[1; 40]]).unwrap().to_vec();
            let whole = taken(&[&bytes[..], &bytes[..]].concat(), STRANGER, piece).unwrap();
            prop_assert_eq!(whole.len(), 2);
            prop_assert_eq!(parse::<Request>(&whole[1]).unwrap(), (request, &[1_u8; 40][..]));
            let length = bytes.len();
            bytes[at % length] ^= 1 << bit;
            bytes.truncate(length - cut % length);
            for content in taken(&bytes, STRANGER, piece).unwrap_or_default() {
                let _ = parse::<Request>(&content);
            }
        }

        #[test]
        fn descriptions_are_short_and_stay_different(
            call in "[a-z\u{e4}]{0,600}",
            at in 0_usize..600,
        ) {
            let short = bounded(call.clone(), CALL);
            prop_assert!(short.len() <= CALL);
            prop_assert!(call.len() > CALL || short == call);
            let mut letters: Vec<char> = call.chars().collect();
            if let Some(letter) = letters.get_mut(at) {
                *letter = 'X';
                prop_assert_ne!(bounded(letters.into_iter().collect(), CALL), short);
            }
        }
    }

    #[test]
    fn promises_of_gigabytes_cost_nothing() {
        let mut promise = u32::MAX.to_le_bytes().to_vec();
        promise.extend([0; 10]);
        let error = taken(&promise, MEMBER, 64).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
