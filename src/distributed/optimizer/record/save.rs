//! The collection of the states of all ranks, and the files that ranks write.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Bytes, Tensor, TensorData};
use serde::Serialize;

use super::super::DistModuleOptimizer;
use super::super::bucket_shard::Shard;
use super::super::custom_states::{OwnStates, Receivers};
use super::super::divided_model::DividedModel;
use super::contents::HeldValues;
use crate::checkpoint::{self, Begun, Entry, Read, Saver, Saving};
use crate::comm::World;
use crate::distributed::busy::Busy;
use crate::distributed::plan::{BucketKind, InBuffer};
use crate::error::Result;
use crate::host::{self, is_on_host};

/// The rank that writes each tensor of a checkpoint, the same on all ranks.
struct Writers {
    /// For the model's tensors, in their order.
    model: Vec<usize>,
    /// For the sharded slots, in the order of [`collect`]. `None` where each rank writes what
    /// it has.
    slots: Vec<Option<usize>>,
}

impl Writers {
    /// Rank 0 writes everything.
    fn main(entries: &[Entry]) -> Self {
        Self { model: vec![0; entries.len()], slots: vec![] }
    }

    /// Every rank writes its states. Rank 0 writes the slices of all ranks, which meet there, and
    /// what the ranks may have differently, such as running statistics: all of it belongs together.
    /// Every other tensor is written by the rank with the fewest bytes so far, of those that have
    /// elements of it.
    fn all(divided: &DividedModel, entries: &[Entry]) -> Self {
        let ranks = divided.world.size();
        let mut written = vec![0; ranks];
        // The tensors that any rank may write come last: these make up for all others.
        let mut replicated = vec![];
        for (number, (bucket, slot)) in divided.slots_of_buckets().enumerate() {
            let values = divided.slot_values(bucket, slot.name);
            let size = slot.dtype.resolve(bucket.dtype).size();
            match values.kind {
                BucketKind::Replicated => replicated.push((number, values.counts.of(0) * size)),
                BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                    let held = written.iter_mut().zip(values.held());
                    held.for_each(|(written, count)| *written += count * size);
                }
            }
        }
        let mut next = |ranks: &[usize], bytes: usize| {
            let least = ranks.iter().copied().min_by_key(|rank| written[*rank]);
            let rank = least.expect("a rank has each parameter");
            written[rank] += bytes;
            rank
        };
        let holders = holders_of(divided, entries);
        let mut order: Vec<usize> = (0..entries.len()).collect();
        order.sort_by_key(|index| holders[*index].len());
        let mut model = vec![0; entries.len()];
        for index in order {
            model[index] = next(&holders[index], entries[index].planned.bytes);
        }
        let mut slots = vec![None; divided.slots_of_buckets().count()];
        let all: Vec<usize> = (0..ranks).collect();
        for (number, bytes) in replicated {
            slots[number] = Some(next(&all, bytes));
        }
        Self { model, slots }
    }
}

/// The ranks that may write each of the model's tensors.
fn holders_of(divided: &DividedModel, entries: &[Entry]) -> Vec<Vec<usize>> {
    let trained: HashSet<&str> =
        divided.parameters.iter().map(|parameter| &*parameter.path).collect();
    let holders = |entry: &Entry| {
        let path = entry.path();
        let is_slice = divided.cuts.slice(path).is_some();
        if is_slice || !entry.is_divided && !trained.contains(path) {
            return vec![0];
        }
        let owned = divided.passes.get(path).filter(|found| found.placement.is_owned());
        match owned {
            Some(owned) => owned.counts().holders().collect(),
            None => (0..divided.world.size()).collect(),
        }
    };
    entries.iter().map(holders).collect()
}

impl DistModuleOptimizer {
    /// Writes a checkpoint, or this rank's part of it. Makes the collective calls of [`collect`]
    /// even if a file can't be written, because the other ranks make them: the outer error is a
    /// collective's, the inner one the file's. All ranks make this call.
    pub(super) fn write<M: Module, T: Serialize>(
        &self,
        (saver, path): (&mut Saver, &Path),
        model: &M,
        parts: Vec<(String, Tensor<1>)>,
        progress: &T,
    ) -> Result<Result<()>> {
        let Self { divided, shards, .. } = self;
        let (world, rank, in_parts) = (&divided.world, divided.world.rank(), saver.is_in_parts());
        let writes = in_parts || world.is_main();
        let _busy = writes.then(|| Busy::new(world.communicator()));
        let mut entries = checkpoint::entries(model, divided);
        let number = || saver.number(path);
        let save = if in_parts { share_identities(world, number, &mut entries)? } else { 0 };
        let writers = match in_parts {
            true => Writers::all(divided, &entries),
            false => Writers::main(&entries),
        };
        let receivers = if in_parts { Receivers::Holders(&writers.slots) } else { Receivers::Main };
        let own = OwnStates::gather(divided, shards, receivers)?;
        let target = saver.target(path, save, [rank, world.size()]);
        let counters = match world.is_main() {
            true => divided.recorded_counters(&self.accounts.counters),
            false => vec![],
        };
        // The ids in the file belong to the saved model, by which Burn finds the state of a
        // parameter: after a load they differ from the last step's.
        let ids: HashMap<String, u64> = entries.iter().filter_map(Entry::identity).collect();
        let waiting = saver.waiting(&entries, is_on_host(world.device()));
        let start = || {
            let states = self.contents(&counters, &own, &ids, receivers)?.of_optimizer();
            let here = entries.iter().zip(&writers.model).filter(|(_, writer)| **writer == rank);
            let here = here.map(|(entry, _)| entry.planned.clone()).collect();
            let begun = Begun::new(&target.file(), (model, divided), progress)?;
            begun.with((here, states), waiting)
        };
        let mut saving = writes.then(start).transpose();
        put_entries(divided, entries.into_iter().zip(writers.model), parts, &mut saving)?;
        collect(divided, shards, &own, receivers, |bytes, read| put(&mut saving, bytes, read))?;
        for counter in counters {
            let value = TensorData::from([counter.value]);
            put(&mut saving, value.bytes().len(), Box::new(iter::once(value)));
        }
        // Collectives may return results that the device has not received yet.
        world.comm().synchronize()?;
        Ok(match saving.transpose() {
            Some(saving) => saver.finish(target, saving),
            None => Ok(()),
        })
    }
}

/// Writes the entries of which this rank is the writer. All ranks make this call: they collect what
/// is divided.
fn put_entries(
    divided: &DividedModel,
    entries: impl Iterator<Item = (Entry, usize)>,
    parts: Vec<(String, Tensor<1>)>,
    saving: &mut Result<Option<Saving>>,
) -> Result<()> {
    let mut parts = parts.into_iter();
    for (entry, writer) in entries {
        let whole = match entry.is_divided {
            true => {
                let (path, part) = parts.next().expect("every divided parameter has a part");
                Some(divided.collect_whole(&path, part, writer)?)
            }
            false => None,
        };
        if writer == divided.world.rank() {
            let Entry { planned, data, .. } = entry;
            put(saving, planned.bytes, Box::new(iter::once_with(move || data(whole))));
        }
    }
    Ok(())
}

/// Gives the entries of all ranks the identities of rank 0's, and returns its number of the save,
/// so that the parts of all ranks agree. All ranks make this call.
fn share_identities(
    world: &World,
    number: impl FnOnce() -> u64,
    entries: &mut [Entry],
) -> Result<u64> {
    // Rank 0 alone looks into the folder.
    let save = if world.is_main() { number() } else { 0 };
    let ids: Vec<Option<u64>> = entries.iter().map(|entry| entry.planned.id).collect();
    let (save, ids) = world.broadcast_value(&(save, ids), 0)?;
    entries.iter_mut().zip(ids).for_each(|(entry, id)| entry.planned.id = id);
    Ok(save)
}

/// Passes on the state's tensors, in the order of [`DividedModel::contents`], on the ranks that
/// receive them: their bytes, and what reads them. All ranks make this call.
pub fn collect(
    divided: &DividedModel,
    shards: &[Shard],
    own: &OwnStates,
    receivers: Receivers,
    mut each: impl FnMut(usize, Read),
) -> Result<()> {
    let comm = divided.world.comm();
    let slots = shards
        .iter()
        .flat_map(|shard| divided.slots(&shard.bucket).into_iter().map(move |slot| (shard, slot)));
    for (number, (shard, slot)) in slots.enumerate() {
        let values = divided.slot_values(&shard.bucket, slot.name);
        let held = divided.held_values(number, (&values, slot.name), receivers);
        if held.is_empty() && matches!(receivers, Receivers::Holders(_)) {
            continue;
        }
        let local = shard.state(slot.name, slot.dtype.resolve(values.dtype));
        let buffer = match (values.kind, receivers) {
            (BucketKind::Replicated, _) | (_, Receivers::Holders(_)) => vec![local],
            (BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements, Receivers::All) => {
                vec![comm.all_gather(local, &values.counts.to_vec())?.wait()?]
            }
            (BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements, Receivers::Main) => {
                comm.gather(local, &values.counts.to_vec(), 0)?.wait()?
            }
        };
        if !held.is_empty() {
            let elements: usize = held.iter().map(HeldValues::count).sum();
            let bytes = elements * slot.dtype.resolve(values.dtype).size();
            let read = iter::once_with(move || unpack(held, buffer)).flatten();
            each(bytes, Box::new(read));
        }
    }
    own.collect(divided, shards, receivers, each)
}

/// Cuts a buffer, which is in one tensor or in several, into the values of its parameters, one
/// after the other.
fn unpack(parameters: Vec<HeldValues>, buffer: Vec<Tensor<1>>) -> Read {
    let dtype = buffer[0].dtype();
    let (size, elements) = (dtype.size(), buffer.iter().map(|part| part.dims()[0]).sum::<usize>());
    let filled = buffer.into_iter().filter(|part| part.dims() != [0]);
    let mut parts = filled.map(|part| part.into_data().into_parts().0);
    // The buffer of a single parameter can be the largest: in one tensor, it is passed on without a
    // copy, and of several, one after the other is copied.
    if let [held] = &parameters[..]
        && are_in_order(&held.segments)
        && held.count() == elements
    {
        let first = parts.next().unwrap_or_else(|| host::zeros(0, dtype));
        let bytes = match first.len() == elements * size {
            true => first,
            false => {
                let (mut all, mut start) = (host::zeros(elements * size, dtype), 0);
                for part in iter::once(first).chain(parts) {
                    all[start..start + part.len()].copy_from_slice(&part);
                    start += part.len();
                }
                all
            }
        };
        return Box::new(iter::once(TensorData::from_bytes(bytes, held.shape(), dtype)));
    }
    let buffer: Vec<Bytes> = parts.collect();
    Box::new(parameters.into_iter().map(move |held| {
        let (mut values, mut end) = (host::zeros(held.count() * size, dtype), 0);
        for InBuffer { start, len, .. } in &held.segments {
            let first = end;
            end += len * size;
            copy(&buffer, start * size..(start + len) * size, &mut values[first..end]);
        }
        TensorData::from_bytes(values, held.shape(), dtype)
    }))
}

/// Copies a range of the bytes of parts that follow each other.
fn copy(parts: &[Bytes], range: Range<usize>, mut to: &mut [u8]) {
    let mut first = 0;
    for part in parts {
        let [start, end] = [range.start, range.end].map(|at| at.clamp(first, first + part.len()));
        let (copied, rest) = to.split_at_mut(end - start);
        copied.copy_from_slice(&part[start - first..end - first]);
        (first, to) = (first + part.len(), rest);
    }
}

/// Returns `true` if each segment begins in the buffer where the one before it ends.
fn are_in_order(segments: &[InBuffer]) -> bool {
    let mut end = 0;
    segments.iter().all(|segment| {
        let start = end;
        end += segment.len;
        segment.start == start
    })
}

/// Writes the next tensors of a checkpoint, unless one before them could not be written.
fn put(saving: &mut Result<Option<Saving>>, bytes: usize, read: Read) {
    if let Ok(Some(open)) = saving
        && let Err(error) = open.put_read(bytes, read)
    {
        *saving = Err(error);
    }
}
