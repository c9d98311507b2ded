//! Small values that the ranks of a world tell each other, and what they have to agree on.
//!
//! Compared values go as a digest first, in a message whose length does not depend on the number of
//! ranks; only where digests differ, rank 0's value goes to all.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Serialize, de::DeserializeOwned};

use super::World;
use super::comm::{Communicator, value};
use crate::error::{Error, Result};

/// A setting whose value on a rank is not that on rank 0.
#[derive(Debug, Serialize, serde::Deserialize)]
pub(super) struct Difference {
    pub setting: String,
    pub first: String,
    pub other: String,
}

impl World {
    /// Returns a value of every rank, to all ranks. What a rank receives grows with their number.
    ///
    /// Values travel bit by bit: floats may be infinite or not a number.
    ///
    /// # Errors
    ///
    /// As every collective; [`Error::Mismatch`] on a rank that receives a value which can't be read as one of
    /// its own type.
    ///
    /// # Panics
    ///
    /// If the value can't be serialized.
    pub fn all_gather_value<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        value::all_from_bytes(&self.comm().all_gather_bytes(value::to_bytes(value))?)
    }

    /// Returns a value of every rank, on rank `root`; nothing on the others.
    ///
    /// # Errors
    ///
    /// As [`all_gather_value`](Self::all_gather_value).
    ///
    /// # Panics
    ///
    /// As [`all_gather_value`](Self::all_gather_value).
    pub fn gather_value<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        let all = self.comm().gather_bytes(value::to_bytes(value), root)?;
        all.map(|all| value::all_from_bytes(&all)).transpose()
    }

    /// Returns the value of rank `root`, to all ranks. What the others give is ignored.
    ///
    /// # Errors
    ///
    /// As [`all_gather_value`](Self::all_gather_value).
    ///
    /// # Panics
    ///
    /// As [`all_gather_value`](Self::all_gather_value).
    pub fn broadcast_value<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<T> {
        let own = if self.rank() == root { value::to_bytes(value) } else { vec![] };
        value::from_bytes(root, &self.comm().broadcast_bytes(own, root)?)
    }

    /// Returns `true` on all ranks if any of them gives `true`.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn any(&self, here: bool) -> Result<bool> {
        Ok(self.comm().first_bytes(here.then(Vec::new))?.is_some())
    }

    /// Returns the outcome of something that all ranks have done, if it went well on all of them.
    ///
    /// # Errors
    ///
    /// This rank's error, or else [`Error::PeerFailed`] with the first rank that has one.
    pub fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        let cause = outcome.as_ref().err().map(|error| error.to_string().into_bytes());
        let first = self.comm().first_bytes(cause)?;
        let value = outcome?;
        match first {
            Some((rank, cause)) => {
                let cause = String::from_utf8_lossy(&cause).into_owned();
                Err(Error::PeerFailed { rank, cause })
            }
            None => Ok(value),
        }
    }

    /// The first rank whose value is not rank 0's, and what `difference` of rank 0's value and its own
    /// returns there, to all ranks; nothing where all values are equal.
    pub(super) fn compare<T, D>(
        &self,
        own: &T,
        difference: impl Fn(&T, &T) -> Option<D>,
    ) -> Result<Option<(usize, D)>>
    where
        T: Serialize + DeserializeOwned,
        D: Serialize + DeserializeOwned,
    {
        if unite(self.comm(), vec![], digest(&value::to_bytes(own)))?.is_some() {
            return Ok(None);
        }
        let first = self.broadcast_value(own, 0)?;
        let found = difference(&first, own).map(|found| value::to_bytes(&found));
        let found = self.comm().first_bytes(found)?;
        found.map(|(rank, bytes)| Ok((rank, value::from_bytes(rank, &bytes)?))).transpose()
    }

    /// Fails on all ranks if a setting differs on any of them.
    pub(super) fn same_settings<T: Serialize + DeserializeOwned>(
        &self,
        own: &T,
        difference: impl Fn(&T, &T) -> Option<Difference>,
    ) -> Result<()> {
        match self.compare(own, difference)? {
            Some((rank, Difference { setting, first, other })) => {
                Err(Error::SettingsDiffer { rank, setting, other, first })
            }
            None => Ok(()),
        }
    }
}

/// Unites the bits of all ranks in one message; nothing where their digests differ.
pub(super) fn unite(
    comm: &dyn Communicator,
    bits: Vec<u8>,
    digest: u64,
) -> Result<Option<Vec<u8>>> {
    let length = bits.len();
    // In the union, a digest and its complement share a bit only if a rank has given another digest.
    let told = [bits, digest.to_le_bytes().into(), (!digest).to_le_bytes().into()].concat();
    let mut united = comm.or_bytes(told)?;
    let digests = united.split_off(length);
    let (digest, complement) = digests.split_at(size_of::<u64>());
    let same = digest.iter().zip(complement).all(|(a, b)| a & b == 0);
    Ok(same.then_some(united))
}

/// A number that is the same for equal values in every process of one program.
pub(super) fn digest<T: Hash + ?Sized>(value: &T) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
