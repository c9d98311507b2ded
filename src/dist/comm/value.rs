//! Small values of the host as bytes, and back.
//!
//! They are MessagePack, which has every float, and names fields, so that types may leave some out.

use serde::{Serialize, de::DeserializeOwned};

use crate::error::{Error, Result};

/// The bytes of a value.
///
/// # Panics
///
/// If the value can't be serialized.
pub fn to_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("a value that can be serialized")
}

/// The value that a rank gave as bytes.
///
/// # Errors
///
/// [`Error::Mismatch`] if they are not those of such a value.
pub fn from_bytes<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).map_err(|error| Error::Mismatch {
        calls: format!("rank {rank} gave a value of another type: {error}"),
    })
}

/// The values that all ranks gave as bytes, in their order.
///
/// # Errors
///
/// As [`from_bytes`].
pub fn all_from_bytes<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    all.iter().enumerate().map(|(rank, bytes)| from_bytes(rank, bytes)).collect()
}
