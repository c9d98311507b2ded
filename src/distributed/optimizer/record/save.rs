//! The collection of the states of all ranks, and the files that ranks write.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Bytes, Tensor, TensorData};
use serde::Serialize;

use super::super::DistModuleOptimizer;
use super::super::bucket_shard::Shard;
use super::super::custom_states::{OwnStates, Receivers};
use super::super::divided_model::DividedModel;
use crate::checkpoint::{self, Begun, Entry, Read, Saver, Saving};
use crate::comm::World;
use crate::distributed::busy::Busy;
use crate::distributed::plan::{BucketKind, InBuffer};
use crate::error::Result;
use crate::host::is_on_host;

/// The rank that writes each tensor of a checkpoint, the same on all ranks.
struct Writers {
    /// For the model's tensors, in their order.
    model: Vec<usize>,
    /// For the sharded slots, in the order of [`collect`].
    slots: Vec<usize>,
}

impl Writers {
    /// Rank 0 writes the slices of all ranks, which meet there, and what the ranks may have
    /// differently, such as running statistics: all of it belongs together. Every other tensor is
    /// written by the rank with the fewest bytes so far, of `ranks` that write.
    fn new(ranks: usize, divided: &DividedModel, entries: &[Entry]) -> Self {
        let trained: HashSet<&str> =
            divided.parameters.iter().map(|parameter| &*parameter.path).collect();
        let is_of_rank_0 = |entry: &Entry| {
            let is_slice = divided.cuts.slice(entry.path()).is_some();
            is_slice || !entry.is_divided && !trained.contains(entry.path())
        };
        let mut written = vec![0; ranks];
        let of_rank_0 = entries.iter().filter(|entry| is_of_rank_0(entry));
        // Before anything is assigned, so that rank 0 gets less of what any rank may write.
        written[0] = of_rank_0.map(|entry| entry.planned.bytes).sum();
        let mut next = |bytes: usize| {
            let rank = least(&written);
            written[rank] += bytes;
            rank
        };
        let model = entries.iter().map(|entry| match is_of_rank_0(entry) {
            true => 0,
            false => next(entry.planned.bytes),
        });
        let model = model.collect();
        let slots = divided.slots_of_buckets().map(|(bucket, slot)| {
            let values = divided.slot_values(bucket, slot.name).by_parameter();
            let elements: usize = values.values().flatten().map(|segment| segment.len).sum();
            next(elements * slot.dtype.resolve(bucket.dtype).size())
        });
        Self { model, slots: slots.collect() }
    }
}

/// The rank that has written the fewest bytes.
fn least(written: &[usize]) -> usize {
    let ranks = written.iter().enumerate().min_by_key(|(_, bytes)| **bytes);
    ranks.expect("a rank writes").0
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
        let writers = Writers::new(if in_parts { world.size() } else { 1 }, divided, &entries);
        let receivers = if in_parts { Receivers::Writers(&writers.slots) } else { Receivers::Main };
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
            let is_written = |slot: usize| writers.slots[slot] == rank;
            let states = self.contents(&counters, &own, &ids, is_written)?.of_optimizer();
            let here = entries.iter().zip(&writers.model).filter(|(_, writer)| **writer == rank);
            let here = here.map(|(entry, _)| entry.planned.clone()).collect();
            let begun = Begun::new(&target.file(), (model, divided), progress)?;
            begun.with((here, states), waiting)
        };
        let mut saving = writes.then(start).transpose();
        let mut parts = parts.into_iter();
        for (entry, writer) in entries.into_iter().zip(&writers.model) {
            let whole = match entry.is_divided {
                true => {
                    let (path, part) = parts.next().expect("every divided parameter has a part");
                    Some(divided.collect_whole(&path, part, *writer)?)
                }
                false => None,
            };
            if *writer == rank {
                let Entry { planned, data, .. } = entry;
                put(&mut saving, planned.bytes, Box::new(iter::once_with(move || data(whole))));
            }
        }
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
        let local = shard.state(slot.name, slot.dtype.resolve(values.dtype));
        let receiver = receivers.of(number);
        let whole = match (values.kind, receiver) {
            (BucketKind::Replicated, _) => local,
            (BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements, None) => {
                comm.all_gather(local, &values.counts.to_vec())?.wait()?
            }
            (BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements, Some(rank)) => {
                comm.gather(local, &values.counts.to_vec(), rank)?.wait()?
            }
        };
        if receiver.is_none_or(|rank| rank == comm.rank()) {
            let shape = |index: &usize| divided.recorded_shape(*index, slot.name);
            let parameters = values.by_parameter();
            let shapes: Vec<_> = parameters.keys().map(shape).collect();
            let segments: Vec<_> = parameters.into_values().collect();
            let elements: usize = segments.iter().flatten().map(|segment| segment.len).sum();
            let bytes = elements * whole.dtype().size();
            let read = iter::once_with(move || unpack(segments, shapes, whole)).flatten();
            each(bytes, Box::new(read));
        }
    }
    own.collect(divided, shards, receivers, each)
}

/// Cuts the buffer of a bucket into the values of its parameters, which have these segments, one
/// after the other.
fn unpack(parameters: Vec<Vec<InBuffer>>, shapes: Vec<Vec<usize>>, whole: Tensor<1>) -> Read {
    let elements = whole.dims()[0];
    let (bytes, _, dtype) = whole.into_data().into_parts();
    // The buffer of a single parameter is passed on without a copy: such a bucket can be the
    // largest.
    if let [segments] = &parameters[..]
        && segments.iter().all(|segment| segment.first == segment.start)
        && segments.iter().map(|segment| segment.len).sum::<usize>() == elements
    {
        let shape = shapes.into_iter().next().expect("every parameter has a shape");
        return Box::new(iter::once(TensorData::from_bytes(bytes, shape, dtype)));
    }
    let size = dtype.size();
    let values = move |segments: Vec<InBuffer>| {
        let bytes_of_all = segments.iter().map(|segment| segment.len * size).sum();
        let mut values = Vec::with_capacity(bytes_of_all);
        for InBuffer { start, len, .. } in segments {
            values.extend_from_slice(&bytes[start * size..(start + len) * size]);
        }
        Bytes::from_bytes_vec(values)
    };
    let parameters = parameters.into_iter().zip(shapes);
    Box::new(parameters.map(move |(of, shape)| TensorData::from_bytes(values(of), shape, dtype)))
}

/// Writes the next tensors of a checkpoint, unless one before them could not be written.
fn put(saving: &mut Result<Option<Saving>>, bytes: usize, read: Read) {
    if let Ok(Some(open)) = saving
        && let Err(error) = open.put_read(bytes, read)
    {
        *saving = Err(error);
    }
}
