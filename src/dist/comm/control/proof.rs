//! Proofs of knowing the world's secret, by which processes and rank 0 let each other in.
//!
//! Each side gives the other 32 random bytes to sign with HMAC-SHA256 (RFC 2104). What is signed
//! names the protocol and the side that signs: a proof can't be used again, nor sent back to the
//! side that it came from. The process proves first, since anybody can reach rank 0.

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

#[cfg(any(test, feature = "mpi"))]
use crate::error::{Error, Result};

/// The crate and its version, which all processes must have in common.
pub const VERSION: &str = concat!("distmuon ", env!("CARGO_PKG_VERSION"));

type Nonce = [u8; 32];
type Proof = [u8; 32];

/// The first message of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// Tells a world of this protocol from anything else that listens.
    protocol: [u8; 8],
    /// Random bytes for the process to sign.
    nonce: Nonce,
}

/// The answer of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the process.
    pub version: String,
    /// Its rank.
    pub rank: usize,
    /// The number of ranks that it knows of.
    pub size: usize,
    /// Random bytes for rank 0 to sign.
    nonce: Nonce,
    proof: Proof,
}

/// The answer of rank 0, after which a process is a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Greeting {
    /// The process is let in, by a rank 0 that proves that it knows the secret.
    Welcome(Proof),
    /// The process is not let in, for this reason.
    Refused(String),
}

/// The side that signs.
#[derive(Clone, Copy)]
enum Side {
    Member,
    Rank0,
}

/// The last byte is the version of the protocol.
const PROTOCOL: [u8; 8] = *b"dmctrl\0\x02";

impl Challenge {
    /// A new challenge, which is used once.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { protocol: PROTOCOL, nonce: random()? })
    }

    /// Returns `true` if a rank 0 of this protocol wrote it.
    pub fn is_known(&self) -> bool {
        self.protocol == PROTOCOL
    }
}

impl Hello {
    /// The answer of a rank to a challenge.
    pub fn new(
        challenge: &Challenge,
        rank: usize,
        size: usize,
        secret: &[u8],
    ) -> std::io::Result<Self> {
        let (version, nonce) = (VERSION.to_owned(), random()?);
        let hello = Self { version, rank, size, nonce, proof: [0; 32] };
        Ok(hello.signed(challenge, secret))
    }

    /// The same message with a proof of what it says now.
    pub fn signed(self, challenge: &Challenge, secret: &[u8]) -> Self {
        let proof = mac(Side::Member, challenge, &self, secret).finalize().into_bytes().into();
        Self { proof, ..self }
    }

    /// Returns `true` if the writer knows the secret. Takes the same time whatever differs.
    pub fn is_proved(&self, challenge: &Challenge, secret: &[u8]) -> bool {
        mac(Side::Member, challenge, self, secret).verify_slice(&self.proof).is_ok()
    }

    /// Rank 0's proof in return.
    pub fn welcome(&self, challenge: &Challenge, secret: &[u8]) -> Greeting {
        Greeting::Welcome(mac(Side::Rank0, challenge, self, secret).finalize().into_bytes().into())
    }

    /// Returns `true` if the writer of a welcome knows the secret. Takes the same time whatever
    /// differs.
    pub fn is_welcome(&self, challenge: &Challenge, proof: &Proof, secret: &[u8]) -> bool {
        mac(Side::Rank0, challenge, self, secret).verify_slice(proof).is_ok()
    }
}

/// The data that a side signs: all fields have a fixed length, but for the version, which comes last.
fn mac(side: Side, challenge: &Challenge, hello: &Hello, secret: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.update(&challenge.protocol);
    mac.update(match side {
        Side::Member => b"member",
        Side::Rank0 => b"rank 0",
    });
    mac.update(&challenge.nonce);
    mac.update(&hello.nonce);
    mac.update(&(hello.rank as u64).to_le_bytes());
    mac.update(&(hello.size as u64).to_le_bytes());
    mac.update(hello.version.as_bytes());
    mac
}

fn random() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

/// Returns a secret of 256 random bits, in hexadecimal digits, for a launcher that gives none.
///
/// # Errors
///
/// [`Error::Launch`] if the operating system has no random numbers.
#[cfg(any(test, feature = "mpi"))]
pub fn random_secret() -> Result<String> {
    let bytes = random().map_err(|error| Error::Launch {
        variable: "DISTMUON_SECRET".to_owned(),
        value: "not set".to_owned(),
        reason: format!("no random secret could be made: {error}"),
        remedy: "set DISTMUON_SECRET to the same long random text on all ranks",
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_challenge_rank_side_and_secret() {
        let challenge = Challenge::new().unwrap();
        let hello = Hello::new(&challenge, 1, 4, b"secret").unwrap();
        assert!(hello.is_proved(&challenge, b"secret"));
        assert!(!hello.is_proved(&challenge, b"another"));
        assert!(!hello.is_proved(&Challenge::new().unwrap(), b"secret"));
        assert!(!Hello { rank: 2, ..hello.clone() }.is_proved(&challenge, b"secret"));
        assert!(
            !Hello { version: "distmuon 9".into(), ..hello.clone() }
                .is_proved(&challenge, b"secret")
        );
        // A process's proof is not one of rank 0, nor the other way round.
        let Greeting::Welcome(proof) = hello.welcome(&challenge, b"secret") else { panic!() };
        assert!(hello.is_welcome(&challenge, &proof, b"secret"));
        assert!(!hello.is_welcome(&challenge, &proof, b"another"));
        assert!(!hello.is_welcome(&challenge, &hello.proof, b"secret"));
        assert!(!Hello { proof, ..hello }.is_proved(&challenge, b"secret"));
    }

    #[test]
    fn random_secrets_are_long_and_differ() {
        let [first, second] = [random_secret().unwrap(), random_secret().unwrap()];
        assert!(first.len() == 64 && first != second);
    }
}
