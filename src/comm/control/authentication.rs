//! Mutual authentication: a process and rank 0 prove to each other that they know the secret of the
//! world before the process becomes a participant.
//!
//! Each side sends 32 random bytes, which the other side signs with HMAC-SHA256 (RFC 2104). The
//! signed data name the protocol and the side that signs, so a proof can neither be used again nor
//! be sent back to the side that made it. The process proves its knowledge first, since anything on
//! the network can reach rank 0.

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

#[cfg(any(test, feature = "mpi", feature = "cuda"))]
use crate::error::{Error, Result};

/// The crate and its version, which must be the same for all processes.
pub const VERSION: &str = concat!("distmuon ", env!("CARGO_PKG_VERSION"));

type Nonce = [u8; 32];
type Proof = [u8; 32];

/// The first message of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// Distinguishes a rank 0 of this protocol from any other program that listens.
    protocol: [u8; 8],
    /// Random bytes for the process to sign.
    nonce: Nonce,
}

/// The answer of a process to the challenge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the process.
    pub version: String,
    /// The rank of the process.
    pub rank: usize,
    /// The number of ranks that it was launched with.
    pub size: usize,
    /// Random bytes for rank 0 to sign.
    nonce: Nonce,
    proof: Proof,
}

/// The answer of rank 0 to a [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    /// The process is admitted, by a rank 0 that proves that it knows the secret.
    Welcome(Proof),
    /// The process is not admitted, for this reason.
    Refused(String),
}

/// The side that signs.
#[derive(Clone, Copy)]
enum Signer {
    Member,
    Rank0,
}

/// The last byte is the version of the protocol.
const PROTOCOL: [u8; 8] = *b"dmctrl\0\x02";

impl Challenge {
    /// Creates a challenge, which is used once.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { protocol: PROTOCOL, nonce: random()? })
    }

    /// Returns `true` if a rank 0 of this version of the protocol wrote the challenge.
    pub fn has_known_protocol(&self) -> bool {
        self.protocol == PROTOCOL
    }
}

impl Hello {
    /// Creates the answer of a rank to a challenge.
    pub fn new(
        challenge: &Challenge,
        rank: usize,
        size: usize,
        secret: &[u8],
    ) -> std::io::Result<Self> {
        let version = VERSION.to_owned();
        let hello = Self { version, rank, size, nonce: random()?, proof: [0; 32] };
        Ok(hello.signed(challenge, secret))
    }

    /// Returns the same message with a proof of its present content.
    pub fn signed(self, challenge: &Challenge, secret: &[u8]) -> Self {
        let proof = mac(Signer::Member, challenge, &self, secret).finalize().into_bytes().into();
        Self { proof, ..self }
    }

    /// Returns `true` if the writer of this message knows the secret. Takes constant time.
    pub fn is_authentic(&self, challenge: &Challenge, secret: &[u8]) -> bool {
        mac(Signer::Member, challenge, self, secret).verify_slice(&self.proof).is_ok()
    }

    /// Returns rank 0's proof for the writer of this message.
    pub fn welcome(&self, challenge: &Challenge, secret: &[u8]) -> Admission {
        Admission::Welcome(
            mac(Signer::Rank0, challenge, self, secret).finalize().into_bytes().into(),
        )
    }

    /// Returns `true` if the writer of a welcome to this message knows the secret. Takes constant
    /// time.
    pub fn accepts_welcome(&self, challenge: &Challenge, proof: &Proof, secret: &[u8]) -> bool {
        mac(Signer::Rank0, challenge, self, secret).verify_slice(proof).is_ok()
    }
}

/// The data that a side signs.
fn mac(side: Signer, challenge: &Challenge, hello: &Hello, secret: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.update(&challenge.protocol);
    mac.update(match side {
        Signer::Member => b"member",
        Signer::Rank0 => b"rank 0",
    });
    mac.update(&challenge.nonce);
    // The nonces of both sides, so that neither proof fits another connection.
    mac.update(&hello.nonce);
    mac.update(&(hello.rank as u64).to_le_bytes());
    mac.update(&(hello.size as u64).to_le_bytes());
    // Last: every other field has a fixed length, so no two messages sign the same bytes.
    mac.update(hello.version.as_bytes());
    mac
}

fn random() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

/// Returns a secret of 256 random bits, in hexadecimal digits, for a launcher that sets none.
///
/// # Errors
///
/// [`Error::Launch`] if the operating system does not provide random numbers.
#[cfg(any(test, feature = "mpi", feature = "cuda"))]
pub fn random_secret() -> Result<String> {
    let bytes = random().map_err(|error| Error::Launch {
        variable: "DISTMUON_SECRET".to_owned(),
        value: "not set".to_owned(),
        reason: format!("can't make a random secret: {error}"),
        remedy: "set DISTMUON_SECRET to the same long random text on all ranks",
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_valid_for_one_challenge_rank_version_side_and_secret() {
        let challenge = Challenge::new().unwrap();
        let hello = Hello::new(&challenge, 1, 4, b"secret").unwrap();
        assert!(hello.is_authentic(&challenge, b"secret"));
        assert!(!hello.is_authentic(&challenge, b"another"));
        assert!(!hello.is_authentic(&Challenge::new().unwrap(), b"secret"));
        assert!(!Hello { rank: 2, ..hello.clone() }.is_authentic(&challenge, b"secret"));
        assert!(
            !Hello { version: "distmuon 9".into(), ..hello.clone() }
                .is_authentic(&challenge, b"secret")
        );
        // A process's proof is not a proof of rank 0, and vice versa.
        let Admission::Welcome(proof) = hello.welcome(&challenge, b"secret") else { panic!() };
        assert!(hello.accepts_welcome(&challenge, &proof, b"secret"));
        assert!(!hello.accepts_welcome(&challenge, &proof, b"another"));
        assert!(!hello.accepts_welcome(&challenge, &hello.proof, b"secret"));
        assert!(!Hello { proof, ..hello }.is_authentic(&challenge, b"secret"));
    }

    #[test]
    fn random_secrets_are_long_and_differ() {
        let [first, second] = [random_secret().unwrap(), random_secret().unwrap()];
        assert!(first.len() == 64 && first != second);
    }
}
