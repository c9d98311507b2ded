//! The states that users' optimizers made, in records and checkpoints: only the owner of a
//! parameter knows the names and shapes of its state. Rank 0 writes it, or in parts the owner.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use burn::optim::{StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_pack::Scalar;
use serde::{Deserialize, Serialize};

use super::bucket_shard::Shard;
use super::divided_model::DividedModel;
use crate::checkpoint::{Planned, Read, States};
use crate::comm::World;
use crate::distributed::plan::BucketKind;
use crate::error::Result;
use crate::flat;
use crate::host;
use crate::update::{OWN_STATE, of_another, unused as unused_slot};

/// Bytes of a message, in which the states of several matrices have room.
const CHUNK: usize = 1 << 24;

/// The ranks that get what all ranks hold parts of.
#[derive(Clone, Copy)]
pub enum Receivers<'a> {
    All,
    Main,
    /// The ranks that have them: nothing is sent. For every sharded slot, in their order, the rank
    /// that writes it if all ranks have it.
    Holders(&'a [Option<usize>]),
}

/// The states of whole parameters, without their elements.
pub struct OwnStates {
    /// By the index of the parameter in the plan: those of all ranks where they are written, of
    /// this rank elsewhere.
    outlines: BTreeMap<usize, Outline>,
    /// The bytes of all ranks' states.
    sizes: BTreeMap<usize, usize>,
}

/// A state without the elements of its tensors.
#[derive(Serialize, Deserialize)]
struct Outline {
    tensors: Vec<TensorOutline>,
    scalars: Vec<(String, Scalar)>,
}

/// A tensor of a state.
#[derive(Serialize, Deserialize)]
struct TensorOutline {
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
    fn of(state: StateSink) -> Self {
        let entry = |(name, data): (String, TensorData)| {
            let (bytes, shape, dtype) = data.into_parts();
            TensorOutline { name, dtype, shape: shape.to_vec(), bytes: bytes.len() }
        };
        Self { tensors: state.tensors.into_iter().map(entry).collect(), scalars: state.scalars }
    }

    fn bytes(&self) -> usize {
        self.tensors.iter().map(|entry| entry.bytes).sum()
    }
}

impl OwnStates {
    /// The tensors of the states, in the order in which [`collect`](Self::collect) passes
    /// them on, given the identity of every parameter.
    pub fn planned(&self, id: impl Fn(usize) -> u64) -> Vec<Planned> {
        let each = self.outlines.iter().flat_map(|(parameter, outline)| {
            let id = id(*parameter);
            outline.tensors.iter().map(move |TensorOutline { name, dtype, shape, bytes }| Planned {
                bytes: *bytes,
                ..Planned::new(format!("{id}.{name}"), *dtype, shape.clone(), Some(id))
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

impl OwnStates {
    fn of(outlines: BTreeMap<usize, Outline>) -> Self {
        let size = |(parameter, outline): (&usize, &Outline)| (*parameter, outline.bytes());
        Self { sizes: outlines.iter().map(size).collect(), outlines }
    }

    /// The states of this rank. Each is copied to the host, to see its shape, and dropped.
    pub fn local(shards: &[Shard]) -> Self {
        let states = shards.iter().flat_map(|shard| shard.own_states());
        Self::of(states.map(|(number, state)| (number, Outline::of(state))).collect())
    }

    /// The states of all ranks, with their outlines on rank 0 or on all ranks; for
    /// [`Receivers::Holders`] this rank's states. All ranks make this call.
    pub fn gather(divided: &DividedModel, shards: &[Shard], receivers: Receivers) -> Result<Self> {
        let (world, mut own) = (&divided.world, Self::local(shards));
        let is_whole = |shard: &Shard| shard.bucket.kind == BucketKind::Whole;
        let stay = matches!(receivers, Receivers::Holders(_));
        if stay || world.size() == 1 || !shards.iter().any(is_whole) {
            return Ok(own);
        }
        if let Some(all) = world.gather_value(&own.outlines, 0)? {
            own = Self::of(all.into_iter().flatten().collect());
        }
        if matches!(receivers, Receivers::All) {
            return Ok(Self::of(world.broadcast_value(&own.outlines, 0)?));
        }
        Ok(Self { sizes: world.broadcast_value(&own.sizes, 0)?, ..own })
    }

    /// Passes on the tensors of all states, parameter by parameter, on the ranks that receive them.
    /// All ranks make this call.
    pub fn collect(
        &self,
        divided: &DividedModel,
        shards: &[Shard],
        receivers: Receivers,
        mut each: impl FnMut(usize, Read),
    ) -> Result<()> {
        // In the order of the plan, and with all sizes known, so that all ranks make the same
        // calls.
        for (parameter, bytes) in &self.sizes {
            let owner = divided.plan.owner(*parameter, 0);
            let local = match divided.world.rank() == owner {
                true => elements(*parameter, shards),
                false => vec![],
            };
            let elements = match receivers {
                Receivers::All => sent(local, *bytes, owner, &divided.world, true)?,
                Receivers::Main => sent(local, *bytes, owner, &divided.world, false)?,
                Receivers::Holders(_) => local,
            };
            if matches!(receivers, Receivers::Main) && !divided.world.is_main() {
                continue;
            }
            let mut start = 0;
            for TensorOutline { dtype, shape, bytes, .. } in &self.outlines[parameter].tensors {
                let values = host::copy_of(&elements[start..start + bytes], *dtype);
                start += bytes;
                let data = TensorData::from_bytes(values, shape.clone(), *dtype);
                each(*bytes, Box::new(iter::once(data)));
            }
        }
        Ok(())
    }
}

/// The elements of the state of a parameter that this rank owns.
fn elements(parameter: usize, shards: &[Shard]) -> Vec<u8> {
    let shard = shards.iter().find(|shard| shard.owns(parameter));
    let state = shard.expect("an owner has the parameter").own_state(parameter);
    let mut elements = vec![];
    let tensors = state.tensors.into_iter();
    tensors.for_each(|(_, data)| elements.extend_from_slice(data.as_bytes()));
    elements
}

/// The elements of a state, from their owner to rank 0 or to all ranks: as words that an engine
/// moves, whatever their types are. Only the owner has them in `local`.
fn sent(
    mut local: Vec<u8>,
    bytes: usize,
    owner: usize,
    world: &World,
    everywhere: bool,
) -> Result<Vec<u8>> {
    let comm = world.comm();
    if comm.size() == 1 || !everywhere && owner == 0 {
        return Ok(local);
    }
    let word = DType::F32.size();
    // Padded to whole words; `truncate` drops the zeros at the end.
    local.resize(local.len().next_multiple_of(word), 0);
    let device = (&world.device().clone().inner(), DType::F32);
    let mut all = vec![];
    for start in (0..bytes).step_by(CHUNK) {
        let count = CHUNK.min(bytes - start).div_ceil(word);
        let mut counts = vec![0; comm.size()];
        counts[owner] = count;
        let words = counts[comm.rank()];
        let part = match words {
            0 => flat::empty(device.1, device.0),
            _ => {
                let part = host::copy_of(&local[start..start + words * word], device.1);
                Tensor::from_data(TensorData::from_bytes(part, [words], device.1), device)
            }
        };
        let received = match everywhere {
            true => vec![comm.all_gather(part, &counts)?.wait()?],
            false => comm.gather(part, &counts, 0)?.wait()?,
        };
        if everywhere || comm.rank() == 0 {
            let of_all = received.into_iter().map(Tensor::into_data);
            of_all.for_each(|data| all.extend_from_slice(data.as_bytes()));
        }
    }
    all.truncate(bytes);
    Ok(all)
}

/// The problem of the state of a parameter that this rank owns.
///
/// # Errors
///
/// [`Error::Checkpoint`](crate::Error::Checkpoint) if the state can't be read.
pub fn own_problem(
    divided: &DividedModel,
    shards: &[Shard],
    index: usize,
    states: &States,
) -> Result<Option<String>> {
    if divided.plan.owner(index, 0) != divided.world.rank() {
        return Ok(None);
    }
    let (device, path) = (divided.device(), &divided.of_model(index).path);
    let (mut source, names) = source(path, states)?;
    let other_type = names.iter().find_map(|(name, dtype)| other_type(name, *dtype, &device));
    if other_type.is_some() {
        return Ok(other_type);
    }
    let mut shards = shards.iter().filter(|shard| shard.owns(index));
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
fn source(path: &str, states: &States) -> Result<(StateSource, Vec<(String, DType)>)> {
    let (tensors, scalars) = states.under(path, OWN_STATE);
    let (mut source, mut names) = (StateSource::new(scalars), vec![]);
    for (name, in_archive) in tensors {
        let data = states.archive().data(in_archive)?;
        names.push((name.clone(), data.dtype()));
        source.insert_tensor(name, data);
    }
    Ok((source, names))
}

/// Reads the states of this rank's parameters. States of `unused` parameters become empty.
///
/// # Errors
///
/// [`Error::Checkpoint`](crate::Error::Checkpoint) if a state can't be read.
///
/// # Panics
///
/// If a state has a [problem](own_problem).
pub fn fill_own(
    shards: &mut [Shard],
    divided: &DividedModel,
    states: &States,
    unused: &BTreeSet<String>,
) -> Result<()> {
    let device = divided.device();
    for shard in shards {
        for index in shard.bucket.parameters.clone() {
            if !shard.owns(index) {
                continue;
            }
            let path = &divided.of_model(index).path;
            let mut source = match unused.contains(path) {
                true => StateSource::default(),
                false => source(path, states)?.0,
            };
            let own = shard.read_own(index, &mut source, &device);
            shard.set_own(index, own.expect("its problems were looked for"));
        }
    }
    Ok(())
}
