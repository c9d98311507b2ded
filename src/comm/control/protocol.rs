//! The messages between rank 0 and the processes of a world, and their encoding.
//!
//! A frame is a length of four bytes, in little-endian order, and content of that length: a message
//! in [postcard](https://postcard.jamesmunns.com/wire-format), followed by a payload of raw bytes.
//! A payload is the data that a participant contributes to a round, or the result of the round.
//! Lengths are checked before any content is read, against a lower limit until a process is
//! authenticated.

use std::fmt::{self, Display};
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use super::super::rounds::{Blocked, Failure, RoundKey};

/// The longest content of a frame of a process that is not authenticated, in bytes.
pub const MAX_UNAUTHENTICATED_MESSAGE: usize = 1 << 10;
/// The longest content of a frame of a member of the world, in bytes.
pub const MAX_MESSAGE: usize = 1 << 28;
/// The largest size of a message without its payload, excluding the lengths in [`Outcome::All`].
pub const HEADER_BYTES: usize = 64;
/// The longest payload of one member, in bytes.
pub const MAX_PAYLOAD: usize = MAX_MESSAGE - HEADER_BYTES;
/// The longest description of a call, in bytes.
pub const MAX_CALL: usize = 200;
/// The longest cause of a failure, in bytes. Every cause is sent to all ranks.
pub const MAX_CAUSE: usize = 4 << 10;
/// A frame to send, shared by all ranks that get the same one.
pub type Frame = Arc<[u8]>;

/// The operation of a round: how the members' payloads become results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// All members get the payloads of all.
    AllGather,
    /// One member gets the payloads of all.
    Gather {
        /// The index of this member.
        root: usize,
    },
    /// All members get the payload of one.
    Broadcast {
        /// The index of this member.
        root: usize,
    },
    /// All members get the payload of the first member that has one.
    First,
    /// All members get the bitwise OR of all payloads.
    Or {
        /// The length of every payload.
        length: usize,
    },
    /// The group is split by color. Every payload holds a color and a key to sort by.
    Split,
}

impl Op {
    /// The name of the method that makes such a call.
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
    /// The member arrives in a round. The answer is the result, when all members have arrived.
    Call {
        /// The group, and the number of the round among the group's rounds.
        key: RoundKey,
        /// The call.
        op: Op,
        /// Distinguishes an empty payload from none.
        has_payload: bool,
    },
    /// The member has waited for some time for an external call.
    Wait {
        /// The group, and the number of the call among the group's external calls.
        key: RoundKey,
        /// The call, [`bounded`] by [`MAX_CALL`].
        call: String,
        /// The time that the member has waited for the call.
        waited: Duration,
    },
    /// The member no longer waits for an external call.
    ClearWait {
        /// The key of the [`Wait`](Self::Wait).
        key: RoundKey,
    },
    /// All threads of the member that make calls have waited for some time, or calls of its only
    /// such thread have not ended for some time.
    Blocked {
        /// The points of these waits.
        blocked: Blocked,
        /// The number of its external calls in every group.
        external_calls: Vec<(u64, u64)>,
    },
    /// The member begins (`true`) or has ended (`false`) work that may take longer than the
    /// deadline.
    Busy(bool),
    /// The longest time for which a busy member is waited for.
    BusyLimit(Duration),
    /// The member is alive.
    Heartbeat,
    /// The world ends because of the member.
    Fail {
        /// The reason, [`bounded`] by [`MAX_CAUSE`].
        cause: String,
    },
    /// The member makes no further call.
    Depart {
        /// The number of its external calls in every group.
        external_calls: Vec<(u64, u64)>,
    },
}

/// A message of rank 0 to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The result of a round. Equal for all members that get the same result.
    Done(RoundKey, Outcome),
    /// Rank 0 is alive.
    Heartbeat,
    /// The world has ended.
    Failed(Failure),
}

/// The result of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The payloads of all members, one after the other, with these lengths.
    All(Vec<usize>),
    /// The payload is the result.
    Bytes,
    /// The payload of this member, the first that has one.
    First(usize),
    /// There is no result for this member.
    Nothing,
    /// A new group.
    Group {
        /// The number of the group.
        group: u64,
        /// The index of the member in the new group.
        rank: usize,
        /// The number of members of the new group.
        size: usize,
        /// The index in the old group of the new group's first member.
        first: usize,
    },
    /// The result is too long for a frame, with this number of bytes.
    TooLong(usize),
}

/// Returns a frame that holds a message and a payload in parts.
///
/// # Errors
///
/// The length of the content, if it exceeds [`MAX_MESSAGE`].
pub fn frame<T: Serialize>(message: &T, payload: &[&[u8]]) -> Result<Frame, usize> {
    let message = postcard::to_stdvec(message).expect("every message can be serialised");
    let length = message.len() + payload.iter().map(|part| part.len()).sum::<usize>();
    if length > MAX_MESSAGE {
        return Err(length);
    }
    // A length of four bytes, the message, and the payload as it is: large payloads are not
    // encoded.
    let mut frame = Vec::with_capacity(4 + length);
    // The length fits, since `MAX_MESSAGE` is far below 2^32.
    frame.extend((length as u32).to_le_bytes());
    frame.extend(message);
    payload.iter().for_each(|part| frame.extend_from_slice(part));
    Ok(frame.into())
}

/// Returns the frame of a message that has no payload and is always short enough.
pub fn short_frame<T: Serialize>(message: &T) -> Frame {
    frame(message, &[]).expect("a message without a payload is short")
}

/// Splits the content of a frame into a message and its payload.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<(T, &[u8])> {
    postcard::take_from_bytes(bytes).map_err(|error| invalid(error.to_string()))
}

/// Reads a message that has no payload from the content of a frame.
pub fn parse_all<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match parse(bytes)? {
        (message, []) => Ok(message),
        (_, payload) => {
            let length = payload.len();
            Err(invalid(format!("a message is too long: expected no payload, got {length} bytes")))
        }
    }
}

/// Frames that arrive in pieces. Memory grows with the bytes that arrive, not with the lengths that
/// frames announce.
pub struct Incoming {
    limit: usize,
    bytes: Vec<u8>,
}

impl Incoming {
    /// Accepts frames whose content has at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, bytes: vec![] }
    }

    /// Changes the limit.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Reads once, by way of `scratch`, and returns the number of bytes read: 0 at the end of the
    /// stream.
    pub fn fill(&mut self, mut stream: impl Read, scratch: &mut [u8]) -> io::Result<usize> {
        // At most one frame is kept beyond the last one taken.
        let space = (4 + self.limit).saturating_sub(self.bytes.len()).clamp(1, scratch.len());
        let read = stream.read(&mut scratch[..space])?;
        self.bytes.extend_from_slice(&scratch[..read]);
        Ok(read)
    }

    /// Removes the first frame and returns its content, if the frame is complete.
    pub fn take_frame(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        // Before the content arrives, so that the memory for it stays within the limit.
        if length > self.limit {
            return Err(invalid(message_too_long(self.limit, length)));
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

/// The error text of a message that is longer than its limit.
pub fn message_too_long(limit: usize, length: usize) -> String {
    format!("a message is too long: expected at most {limit} bytes, got {length}")
}

/// Writes a frame.
pub fn write(mut stream: impl Write, frame: &Frame) -> io::Result<()> {
    stream.write_all(frame)
}

/// Shortens a text to at most `limit` bytes, by a hash of the text, so that different texts stay
/// different.
pub fn bounded(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let hash = Sha256::digest(&text);
        let hash: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        // 21 bytes are for "... #" and 16 hexadecimal digits.
        let length = (0..=limit - 21).rev().find(|length| text.is_char_boundary(*length));
        text.truncate(length.unwrap_or(0));
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

    use super::super::authentication::{Admission, Challenge, Hello};
    use super::*;

    /// Returns the contents of the frames in bytes that arrive in pieces of at most `piece`.
    fn contents(bytes: &[u8], limit: usize, piece: usize) -> io::Result<Vec<Vec<u8>>> {
        let mut incoming = Incoming::new(limit);
        let mut contents = vec![];
        let mut stream = bytes;
        while incoming.fill(&mut stream, &mut vec![0; piece])? > 0 {
            assert!(incoming.bytes.len() <= limit + 4);
            while let Some(content) = incoming.take_frame()? {
                contents.push(content);
            }
        }
        Ok(contents)
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_or_rejected_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            piece in 1_usize..300,
        ) {
            let _ = contents(&bytes, MAX_UNAUTHENTICATED_MESSAGE, piece);
            let _ = parse::<Request>(&bytes);
            let _ = parse::<Reply>(&bytes);
            let _ = parse_all::<Challenge>(&bytes);
            let _ = parse_all::<Hello>(&bytes);
            let _ = parse_all::<Admission>(&bytes);
        }

        #[test]
        fn a_damaged_frame_is_parsed_or_rejected_without_a_panic(
            position in 0_usize..60,
            bit in 0_u32..8,
            cut in 0_usize..60,
            piece in 1_usize..70,
        ) {
            let op = Op::Or { length: 40 };
            let request = Request::Call { key: (7, 3), op, has_payload: true };
            let mut bytes = frame(&request, &[&[1; 40]]).unwrap().to_vec();
            let limit = MAX_UNAUTHENTICATED_MESSAGE;
            let whole = contents(&[&bytes[..], &bytes[..]].concat(), limit, piece).unwrap();
            prop_assert_eq!(whole.len(), 2);
            prop_assert_eq!(parse::<Request>(&whole[1]).unwrap(), (request, &[1_u8; 40][..]));
            let length = bytes.len();
            bytes[position % length] ^= 1 << bit;
            bytes.truncate(length - cut % length);
            for content in contents(&bytes, limit, piece).unwrap_or_default() {
                let _ = parse::<Request>(&content);
            }
        }

        #[test]
        fn bounded_texts_are_short_and_stay_different(
            call in "[a-z\u{e4}]{0,600}",
            position in 0_usize..600,
        ) {
            let short = bounded(call.clone(), MAX_CALL);
            prop_assert!(short.len() <= MAX_CALL);
            prop_assert!(call.len() > MAX_CALL || short == call);
            let mut letters: Vec<char> = call.chars().collect();
            if let Some(letter) = letters.get_mut(position) {
                *letter = 'X';
                prop_assert_ne!(bounded(letters.into_iter().collect(), MAX_CALL), short);
            }
        }
    }

    #[test]
    fn a_frame_that_announces_gigabytes_is_rejected_at_once() {
        let mut bytes = u32::MAX.to_le_bytes().to_vec();
        bytes.extend([0; 10]);
        let error = contents(&bytes, MAX_MESSAGE, 64).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
