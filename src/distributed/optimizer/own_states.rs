//! The states that users' optimizers made, in records and checkpoints: only the owner of a
//! parameter knows the names and shapes of its state, and rank 0 writes it.

use std::collections::{BTreeMap, BTreeSet};

use burn::optim::{StateSink, StateSource};
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_pack::Scalar;
use serde::{Deserialize, Serialize};

use super::DistModuleOptimizer;
use crate::checkpoint::{Planned, States};
use crate::distributed::plan::BucketKind;
use crate::error::Result;
use crate::update::{OWN_STATE, of_another, unused as unused_slot};

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

/// The problem of a tensor that Burn would read in another type: it reads states in the default
/// type of the device.
fn other_type(name: &str, dtype: DType, device: &Device) -> Option<String> {
    let default = DType::from(device.settings().float_dtype);
    let (saved, read) = (dtype.name(), default.name());
    (dtype.is_float() && dtype != default).then(|| {
        format!(
            "its saved `{name}` is not of the device's default type: expected {read}, got {saved}"
        )
    })
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

    /// The problem of the state of a parameter that this rank owns.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if the state can't be read.
    pub(super) fn own_problem(&self, index: usize, states: &States) -> Result<Option<String>> {
        if self.plan.owner(index, 0) != self.world.rank() {
            return Ok(None);
        }
        let (device, path) = (self.device(), &self.model[self.trained[index].model].path);
        let (mut source, names) = self.source(path, states)?;
        let other_type = names.iter().find_map(|(name, dtype)| other_type(name, *dtype, &device));
        if other_type.is_some() {
            return Ok(other_type);
        }
        let mut shards = self.shards.iter().filter(|shard| shard.owns(index));
        let shard = shards.next().expect("an owner has the parameter");
        if shard.read_own(index, &mut source, &device).is_none() {
            return Ok(Some(of_another()));
        }
        // An optimizer takes what it knows.
        let mut names = names.iter().map(|(name, _)| name.as_str());
        Ok(names.find(|name| source.take_tensor("", name).is_some()).map(unused_slot))
    }

    /// The state of a whole parameter, as an optimizer reads it, with the names and types of its
    /// tensors.
    fn source(&self, path: &str, states: &States) -> Result<(StateSource, Vec<(String, DType)>)> {
        let (tensors, scalars) = states.under(path, OWN_STATE);
        let (mut source, mut names) = (StateSource::new(scalars), vec![]);
        for (name, in_archive) in tensors {
            let data = states.archive().data(in_archive)?;
            names.push((name.clone(), data.dtype()));
            source.insert_tensor(name, data);
        }
        Ok((source, names))
    }

    /// Reads the states of this rank's parameters. Those of `unused` parameters become empty.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if a state can't be read.
    ///
    /// # Panics
    ///
    /// If a state has a [problem](Self::own_problem).
    pub(super) fn fill_own(&mut self, states: &States, unused: &BTreeSet<String>) -> Result<()> {
        let device = self.device();
        for shard in 0..self.shards.len() {
            for index in self.shards[shard].bucket.parameters.clone() {
                if !self.shards[shard].owns(index) {
                    continue;
                }
                let path = &self.model[self.trained[index].model].path;
                let mut source = match unused.contains(path) {
                    true => StateSource::default(),
                    false => self.source(path, states)?.0,
                };
                let own = self.shards[shard].read_own(index, &mut source, &device);
                self.shards[shard].set_own(index, own.expect("its problems were looked for"));
            }
        }
        Ok(())
    }
}
