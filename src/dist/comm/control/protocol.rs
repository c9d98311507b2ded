//! What the processes of a world and rank 0 say to each other, and how it is written.
//!
//! A message is its length, four bytes with the lowest first, and that many bytes of
//! [postcard](https://postcard.jamesmunns.com/wire-format). Lengths are limited before anything is
//! read, and further before a process has proved that it belongs to the world.

use std::io::{self, Read, Write};

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::Sha256;

use super::super::rendezvous::Failure;

/// The longest message of a process that is not yet known, in bytes.
pub const STRANGER: usize = 1 << 10;
/// The longest message of a member of the world, in bytes.
pub const MEMBER: usize = 1 << 28;
/// Says that both sides speak this protocol and are the same crate.
pub const VERSION: &str = concat!("distmuon ", env!("CARGO_PKG_VERSION"));

/// The first message, from rank 0: something to sign.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge(pub [u8; 32]);

/// The answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the process.
    pub version: String,
    /// Its rank.
    pub rank: usize,
    /// The number of ranks that it knows of.
    pub size: usize,
    /// [`prove`] of the rest.
    pub proof: [u8; 32],
}

impl Hello {
    /// The answer of a rank to a challenge.
    pub fn new(challenge: &Challenge, rank: usize, size: usize, secret: &[u8]) -> Self {
        let proof = mac(challenge, rank, size, secret).finalize().into_bytes().into();
        Self { version: VERSION.to_owned(), rank, size, proof }
    }

    /// Whether who wrote this knows the secret. Takes the same time whatever differs.
    pub fn is_proved(&self, challenge: &Challenge, secret: &[u8]) -> bool {
        mac(challenge, self.rank, self.size, secret).verify_slice(&self.proof).is_ok()
    }
}

/// HMAC-SHA256 (RFC 2104) over what is said, under the secret.
fn mac(challenge: &Challenge, rank: usize, size: usize, secret: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::new_from_slice(secret).expect("any length will do");
    mac.update(&challenge.0);
    mac.update(&(rank as u64).to_le_bytes());
    mac.update(&(size as u64).to_le_bytes());
    mac
}

/// What a member asks rank 0 for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The bytes of all members of a group.
    Gather {
        /// The group's number; 0 is the world.
        group: u64,
        /// Its members' ranks in the world.
        members: Vec<usize>,
        /// The own bytes.
        bytes: Vec<u8>,
    },
    /// Comparison of a call that takes long with those of the others.
    Compare {
        /// The group's number.
        group: u64,
        /// Its members' ranks in the world.
        members: Vec<usize>,
        /// How many calls the group made before.
        number: u64,
        /// The call.
        call: String,
        /// Whether it has been waited for too long.
        too_late: bool,
    },
    /// Whether the world goes on.
    Check,
    /// The end of the world.
    Fail {
        /// Why.
        cause: String,
    },
    /// Nothing any more.
    Leave,
}

/// What rank 0 answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// All is well.
    Fine,
    /// The process is not let in.
    Refused(String),
    /// The bytes of all members.
    Gathered(Vec<Vec<u8>>),
    /// The world has ended.
    Failed(Failure),
}

/// Writes one message.
pub fn write<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).ok().filter(|length| *length as usize <= MEMBER);
    let length = length.ok_or_else(|| invalid(format!("{} bytes to send", bytes.len())))?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend(bytes);
    stream.write_all(&frame)?;
    stream.flush()
}

/// Reads one message of at most `limit` bytes; memory grows with what arrives, not with what is promised.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read, limit: usize) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(invalid(format!("a message of {length} bytes, where {limit} are allowed")));
    }
    let mut bytes = Vec::new();
    stream.take(length as u64).read_to_end(&mut bytes)?;
    if bytes.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match postcard::take_from_bytes(&bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(invalid(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(invalid(error.to_string())),
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn anything_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read::<Request>(&mut &bytes[..], STRANGER);
            let _ = read::<Hello>(&mut &bytes[..], STRANGER);
            let _ = read::<Reply>(&mut &bytes[..], STRANGER);
        }

        #[test]
        fn damage_is_never_a_crash(at in 0_usize..60, bit in 0_u32..8, cut in 0_usize..60) {
            let request = Request::Gather { group: 7, members: vec![0, 3], bytes: vec![1; 40] };
            let mut bytes = Vec::new();
            write(&mut bytes, &request).unwrap();
            let length = bytes.len();
            prop_assert_eq!(read::<Request>(&mut &bytes[..], STRANGER).unwrap(), request);
            bytes[at % length] ^= 1 << bit;
            bytes.truncate(length - cut % length);
            let _ = read::<Request>(&mut &bytes[..], STRANGER);
        }
    }

    #[test]
    fn promises_of_gigabytes_cost_nothing() {
        let mut promise = u32::MAX.to_le_bytes().to_vec();
        promise.extend([0; 10]);
        let error = read::<Request>(&mut &promise[..], MEMBER).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_proof_is_of_one_challenge_rank_and_secret() {
        let challenge = Challenge([3; 32]);
        let hello = Hello::new(&challenge, 1, 4, b"secret");
        assert!(hello.is_proved(&challenge, b"secret"));
        assert!(!hello.is_proved(&challenge, b"another"));
        assert!(!hello.is_proved(&Challenge([4; 32]), b"secret"));
        assert!(!Hello { rank: 2, ..hello }.is_proved(&challenge, b"secret"));
    }
}
