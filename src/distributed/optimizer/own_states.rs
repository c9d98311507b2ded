//! The states that users' optimizers made, in records and checkpoints: only the owner of a
//! parameter knows the names and shapes of its state, and rank 0 writes it.

use std::collections::{BTreeMap, HashSet};

use burn::optim::{StateSink, StateSource};
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_pack::Scalar;
use serde::{Deserialize, Serialize};

use super::DistModuleOptimizer;
use crate::checkpoint::{Planned, States};
use crate::distributed::plan::BucketKind;
use crate::error::{Error, Result};
use crate::update::{OWN_STATE, unfit, unused};

/// Bytes of a message, well below the limit of an engine's messages.
const CHUNK: usize = 1 << 26;

/// The states of whole parameters.
pub struct OwnStates {
    /// Those of all ranks, by the index of the parameter in the plan.
    outlines: BTreeMap<usize, Outline>,
    /// The elements of those of this rank.
    local: BTreeMap<usize, Vec<u8>>,
}

/// A state without the elements of its tensors.
#[derive(Serialize, Deserialize)]
struct Outline {
    tensors: Vec<Entry>,
    scalars: Vec<(String, Scalar)>,
}

/// A tensor of a state.
#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: usize,
}

/// Fails for a tensor that Burn would read in another type: it reads states in the default type of
/// the device.
fn ensure_kept(
    path: &str,
    rank: usize,
    (name, dtype): (&str, DType),
    device: &Device,
) -> Result<()> {
    let default = DType::from(device.settings().float_dtype);
    if !dtype.is_float() || dtype == default {
        return Ok(());
    }
    let (saved, read) = (dtype.name(), default.name());
    let reason = format!(
        "its saved `{name}` is not of the device's default type: expected {read}, got {saved}"
    );
    Err(Error::parameter(path, rank, reason, "give the device the default type of the saved state"))
}

impl Outline {
    /// Takes a state apart: its outline, and the elements of its tensors.
    fn of(state: StateSink) -> (Self, Vec<u8>) {
        let (mut tensors, mut elements) = (vec![], vec![]);
        for (name, data) in state.tensors {
            let (bytes, shape, dtype) = data.into_parts();
            elements.extend_from_slice(&bytes);
            tensors.push(Entry { name, dtype, shape: shape.to_vec(), bytes: bytes.len() });
        }
        (Self { tensors, scalars: state.scalars }, elements)
    }

    fn bytes(&self) -> usize {
        self.tensors.iter().map(|entry| entry.bytes).sum()
    }
}

impl OwnStates {
    /// The tensors of the states, in the order in which [`DistModuleOptimizer::collect_own`] passes
    /// them on, given the identity of every parameter.
    pub fn planned(&self, id: impl Fn(usize) -> u64) -> Vec<Planned> {
        let each = self.outlines.iter().flat_map(|(parameter, outline)| {
            let id = id(*parameter);
            outline.tensors.iter().map(move |Entry { name, dtype, shape, bytes }| Planned {
                name: format!("{id}.{name}"),
                dtype: *dtype,
                shape: shape.clone(),
                id: Some(id),
                bytes: *bytes,
            })
        });
        each.collect()
    }

    /// The numbers of the states, given the identity of every parameter.
    pub fn scalars(&self, id: impl Fn(usize) -> u64) -> Vec<(String, Scalar)> {
        let each = self.outlines.iter().flat_map(|(parameter, outline)| {
            let id = id(*parameter);
            outline.scalars.iter().map(move |(name, value)| (format!("{id}.{name}"), *value))
        });
        each.collect()
    }
}

impl DistModuleOptimizer {
    /// The states of this rank.
    pub(super) fn local_own_states(&self) -> OwnStates {
        let states = self.shards.iter().flat_map(|shard| shard.own_states());
        let each = states.map(|(parameter, state)| (parameter, Outline::of(state)));
        let (mut outlines, mut local) = (BTreeMap::new(), BTreeMap::new());
        for (parameter, (outline, elements)) in each {
            outlines.insert(parameter, outline);
            local.insert(parameter, elements);
        }
        OwnStates { outlines, local }
    }

    /// The outlines of all ranks' states, and the elements of this rank's. All ranks make this
    /// call.
    pub(super) fn own_states(&self) -> Result<OwnStates> {
        let mut states = self.local_own_states();
        let is_whole = |kind| kind == BucketKind::Whole;
        if self.world.size() > 1 && self.shards.iter().any(|shard| is_whole(shard.bucket.kind)) {
            let all = self.world.all_gather_value(&states.outlines)?;
            states.outlines = all.into_iter().flatten().collect();
        }
        Ok(states)
    }

    /// Passes on the tensors of all states, parameter by parameter, on rank 0 or on all ranks. All
    /// ranks make this call.
    pub(super) fn collect_own(
        &self,
        mut states: OwnStates,
        everywhere: bool,
        mut each: impl FnMut(TensorData),
    ) -> Result<()> {
        for (parameter, outline) in &states.outlines {
            let owner = self.plan.owner(*parameter, 0);
            let local = states.local.remove(parameter).unwrap_or_default();
            let elements = self.sent(owner, outline.bytes(), local, everywhere)?;
            if !everywhere && !self.world.is_main() {
                continue;
            }
            let mut start = 0;
            for Entry { dtype, shape, bytes, .. } in &outline.tensors {
                let values = elements[start..start + bytes].to_vec();
                start += bytes;
                let values = Bytes::from_bytes_vec(values);
                each(TensorData::from_bytes(values, shape.clone(), *dtype));
            }
        }
        Ok(())
    }

    /// The bytes of an owner, on rank 0 or on all ranks.
    fn sent(
        &self,
        owner: usize,
        count: usize,
        local: Vec<u8>,
        everywhere: bool,
    ) -> Result<Vec<u8>> {
        let comm = self.world.comm();
        if self.world.size() == 1 || !everywhere && owner == 0 {
            return Ok(local);
        }
        let mut all = vec![];
        for start in (0..count).step_by(CHUNK) {
            // Nothing on ranks that are not the owner.
            let part = |end: usize| local[start.min(local.len())..end.min(local.len())].to_vec();
            let part = part(start + CHUNK);
            match everywhere {
                true => all.extend(comm.broadcast_bytes(part, owner)?),
                false => {
                    let parts = comm.gather_bytes(part, 0)?.unwrap_or_default();
                    all.extend(parts.into_iter().flatten());
                }
            }
        }
        Ok(all)
    }

    /// Reads the states of this rank's parameters, and adds the paths and names of the states of
    /// all ranks to `requested`.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if a state is not one of the parameter's optimizer, or of another type
    /// than the device's default; [`Error::Checkpoint`] if it can't be read.
    pub(super) fn fill_own(
        &mut self,
        states: &States,
        requested: &mut HashSet<(String, String)>,
    ) -> Result<()> {
        let (rank, device) = (self.world.rank(), self.device());
        let shards = self.shards.iter_mut();
        for shard in shards.filter(|shard| shard.bucket.kind == BucketKind::Whole) {
            for index in shard.bucket.parameters.clone() {
                let path = &self.model[self.trained[index].model].path;
                let (tensors, scalars) = states.under(path, OWN_STATE);
                requested.extend(tensors.iter().map(|(name, _)| (path.clone(), name.clone())));
                if self.plan.owner(index, 0) != rank {
                    continue;
                }
                let mut source = StateSource::new(scalars);
                for (name, in_archive) in &tensors {
                    let data = states.archive().data(in_archive)?;
                    ensure_kept(path, rank, (name, data.dtype()), &device)?;
                    source.insert_tensor(name.clone(), data);
                }
                if shard.load_own(index, &mut source, &device).is_none() {
                    let problem = "its saved `state` is that of another optimizer".to_owned();
                    return Err(unfit(path, rank, problem));
                }
                // An optimizer takes what it knows.
                let mut is_left = |name: &str| source.take_tensor("", name).is_some();
                let mut names = tensors.iter().map(|(name, _)| name.as_str());
                if let Some(left) = names.find(|name| is_left(name)) {
                    return Err(unfit(path, rank, unused(left)));
                }
            }
        }
        Ok(())
    }
}
