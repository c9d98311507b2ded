//! Small values that the ranks of a world exchange, and checks that all ranks have the same value.
//!
//! Compared values are sent as a digest first, in a message whose length does not depend on the
//! number of ranks. Only if digests differ, rank 0 sends its value to all ranks.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{Communicator, World, value_bytes};
use crate::error::{Error, Result};

/// A setting whose value on a rank is not that on rank 0.
#[derive(Debug, Serialize, serde::Deserialize)]
pub(crate) struct Difference {
    pub setting: String,
    pub first: String,
    pub other: String,
}

impl World {
    /// Returns the values of all ranks on every rank. The bytes that a rank receives grow with the
    /// number of ranks.
    ///
    /// Floats keep all their bits, and may be infinite or NaN.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]); [`Error::Mismatch`] on a rank that
    /// receives a value of another type.
    ///
    /// # Panics
    ///
    /// If the value can't be serialized.
    pub fn all_gather_value<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        value_bytes::all_from_bytes(&self.comm().all_gather_bytes(value_bytes::to_bytes(value))?)
    }

    /// Returns the values of all ranks on rank `root`, and `None` on the others.
    ///
    /// ```
    /// distmuon::World::launch(2, |world| {
    ///     let names = world.gather_value(&format!("rank {}", world.rank()), 0)?;
    ///     if let Some(names) = names {
    ///         assert_eq!(names, ["rank 0", "rank 1"]);
    ///     }
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
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
        let all = self.comm().gather_bytes(value_bytes::to_bytes(value), root)?;
        all.map(|all| value_bytes::all_from_bytes(&all)).transpose()
    }

    /// Returns the value of rank `root` on every rank. The values of the other ranks are ignored.
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
        // Only the root's bytes are sent.
        let bytes = if self.rank() == root { value_bytes::to_bytes(value) } else { vec![] };
        value_bytes::from_bytes(root, &self.comm().broadcast_bytes(bytes, root)?)
    }

    /// Returns on every rank what rank 0 makes of the values of all. The bytes grow with the ranks,
    /// and in [`all_gather_value`](Self::all_gather_value) with their square.
    ///
    /// # Errors
    ///
    /// As [`all_gather_value`](Self::all_gather_value).
    pub(crate) fn combine_on_rank_0<T, R>(
        &self,
        value: &T,
        combine: impl FnOnce(Vec<T>) -> R,
    ) -> Result<R>
    where
        T: Serialize + DeserializeOwned,
        R: Serialize + DeserializeOwned,
    {
        let combined = self.gather_value(value, 0)?.map(combine);
        let bytes = combined.as_ref().map(value_bytes::to_bytes).unwrap_or_default();
        value_bytes::from_bytes(0, &self.comm().broadcast_bytes(bytes, 0)?)
    }

    /// Returns `true` on every rank if any rank gives `true`.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]).
    pub fn any(&self, condition: bool) -> Result<bool> {
        // Empty bytes differ from none, so that `true` needs no content.
        Ok(self.comm().first_bytes(condition.then(Vec::new))?.is_some())
    }

    /// Returns the outcome of something that all ranks have done, if all of them succeeded.
    ///
    /// # Errors
    ///
    /// This rank's error, or else [`Error::PeerFailed`] with the first rank that has one.
    pub fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        let cause = outcome.as_ref().err().map(|error| error.to_string().into_bytes());
        let first = self.comm().first_bytes(cause)?;
        // This rank's own error first: it says more than the text that the others get.
        let value = outcome?;
        match first {
            Some((rank, cause)) => {
                let cause = String::from_utf8_lossy(&cause).into_owned();
                Err(Error::PeerFailed { rank, cause })
            }
            None => Ok(value),
        }
    }

    /// Returns, on all ranks, the first rank whose value is not rank 0's, and the description by
    /// `difference`, which is given rank 0's value and then that rank's. Returns `None` if all
    /// values are equal.
    pub(crate) fn compare<T, D>(
        &self,
        value: &T,
        difference: impl Fn(&T, &T) -> Option<D>,
    ) -> Result<Option<(usize, D)>>
    where
        T: Serialize + DeserializeOwned,
        D: Serialize + DeserializeOwned,
    {
        if unite(self.comm(), vec![], digest(&value_bytes::to_bytes(value)))?.is_some() {
            return Ok(None);
        }
        // Only after a difference: the values may be long.
        let first = self.broadcast_value(value, 0)?;
        let described =
            difference(&first, value).map(|difference| value_bytes::to_bytes(&difference));
        let described = self.comm().first_bytes(described)?;
        described
            .map(|(rank, bytes)| Ok((rank, value_bytes::from_bytes(rank, &bytes)?)))
            .transpose()
    }

    /// Fails on all ranks if a setting differs on any of them.
    pub(crate) fn same_settings<T: Serialize + DeserializeOwned>(
        &self,
        settings: &T,
        difference: impl Fn(&T, &T) -> Option<Difference>,
    ) -> Result<()> {
        match self.compare(settings, difference)? {
            Some((rank, Difference { setting, first, other })) => {
                Err(Error::SettingsDiffer { rank, setting, other, first })
            }
            None => Ok(()),
        }
    }

    /// Fails on all ranks if a configuration differs on any of them, and names its first field that
    /// does.
    ///
    /// # Panics
    ///
    /// If the configuration is not valid JSON.
    pub(crate) fn same_config<T: Serialize>(&self, config: &T) -> Result<()> {
        let local = serde_json::to_value(config).expect("a configuration is valid JSON");
        self.same_settings(&local, |first, other| difference("", first, other))
    }
}

/// The first entry that two JSON values do not have in common.
fn difference(path: &str, first: &Value, other: &Value) -> Option<Difference> {
    if first == other {
        return None;
    }
    if let (Value::Object(first), Value::Object(other)) = (first, other) {
        // The keys of both, since a rank may have a setting that the other lacks.
        return first.keys().chain(other.keys()).find_map(|key| {
            let path = format!("{path}{}{key}", if path.is_empty() { "" } else { "." });
            let [first, other] = [first, other].map(|value| value.get(key).unwrap_or(&Value::Null));
            difference(&path, first, other)
        });
    }
    let setting = path.to_owned();
    Some(Difference { setting, first: first.to_string(), other: other.to_string() })
}

/// Returns the union of the bits of all ranks, in one message. Returns `None` if their digests
/// differ.
pub(crate) fn unite(comm: &Communicator, bits: Vec<u8>, digest: u64) -> Result<Option<Vec<u8>>> {
    let length = bits.len();
    let mut united = comm.or_bytes([bits, with_complement(digest).into()].concat())?;
    let digests = united.split_off(length);
    Ok(is_same(&digests).then_some(united))
}

/// Returns the indices of the numbers that are not the same on all ranks, in one message. The
/// count is the same on all ranks.
pub(crate) fn unequal(comm: &Communicator, numbers: &[u64]) -> Result<Vec<usize>> {
    let bytes = numbers.iter().flat_map(|number| with_complement(*number));
    let united = comm.or_bytes(bytes.collect())?;
    let pairs = united.chunks_exact(2 * size_of::<u64>()).enumerate();
    Ok(pairs.filter(|(_, pair)| !is_same(pair)).map(|(index, _)| index).collect())
}

/// A number and its complement, which share a bit in the union of all ranks only if a rank has
/// given another number.
fn with_complement(number: u64) -> [u8; 2 * size_of::<u64>()] {
    // United by OR over all ranks, a bit that differs is set in the number and in the complement:
    // see `is_same`. One call compares any number of ranks.
    let [low, high] = [number, !number].map(u128::from);
    (low | high << u64::BITS).to_le_bytes()
}

/// Returns `true` if all ranks have given the same number, from the union of what they gave.
fn is_same(united: &[u8]) -> bool {
    let (number, complement) = united.split_at(size_of::<u64>());
    number.iter().zip(complement).all(|(a, b)| a & b == 0)
}

/// Returns a number that is the same for equal values in every process of one program.
pub(crate) fn digest<T: Hash + ?Sized>(value: &T) -> u64 {
    // Without random keys: ranks that are processes compare the digests.
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_setting_that_differs_is_named() {
        let first = json!({"a": {"b": 1, "c": [1, 2]}, "d": {"Cosine": 1}});
        let named = |other: Value| difference("", &first, &other).map(|found| found.setting);
        assert_eq!(named(first.clone()), None);
        for (other, setting) in [
            (json!({"a": {"b": 1, "c": [1, 3]}, "d": {"Cosine": 1}}), "a.c"),
            (json!({"a": {"b": 1, "c": [1, 2]}, "d": {"Linear": 1}}), "d.Cosine"),
            (json!({"a": {"b": 1, "c": [1, 2]}, "d": {"Cosine": 1}, "e": 1}), "e"),
            (json!({"a": 1, "d": {"Cosine": 1}}), "a"),
        ] {
            assert_eq!(named(other).as_deref(), Some(setting));
        }
    }
}
