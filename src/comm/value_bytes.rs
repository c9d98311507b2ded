//! Small values of the host as bytes, and back.
//!
//! The format is MessagePack. It represents every float, infinities and NaN included, and it names
//! fields, so types may leave some out.

use serde::{Serialize, de::DeserializeOwned};

use crate::error::{Error, Result};

/// Returns the bytes of a value.
///
/// # Panics
///
/// If the value can't be serialized.
pub fn to_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("the value can be serialized")
}

/// Returns the value that a rank gave as bytes.
///
/// # Errors
///
/// [`Error::Mismatch`] if the bytes are not such a value.
pub fn from_bytes<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).map_err(|error| Error::Mismatch {
        calls: format!("rank {rank} gave a value of another type: {error}"),
    })
}

/// Returns the values that all ranks gave as bytes, in the order of ranks.
///
/// # Errors
///
/// As [`from_bytes`].
pub fn all_from_bytes<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    all.iter().enumerate().map(|(rank, bytes)| from_bytes(rank, bytes)).collect()
}
