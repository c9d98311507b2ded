//! The collection of the states of all ranks, and the file that rank 0 writes.

use std::collections::HashMap;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use serde::Serialize;

use super::super::DistModuleOptimizer;
use super::super::bucket_shard::Shard;
use super::super::custom_states::OwnStates;
use super::super::divided_model::DividedModel;
use crate::checkpoint::{self, Contents, Saver, Saving};
use crate::distributed::busy::Busy;
use crate::distributed::plan::{Bucket, BucketKind, InBuffer};
use crate::error::Result;
use crate::parameters;

impl DistModuleOptimizer {
    /// Makes the calls of [`write`](Self::write) on a rank that does not write.
    pub(super) fn send_states(&self, parts: Vec<(String, Tensor<1>)>) -> Result<()> {
        let own = OwnStates::gather(&self.divided, &self.shards, false)?;
        for (path, part) in parts {
            self.divided.collect_whole(&path, part)?;
        }
        collect(&self.divided, &self.shards, &own, false, |_| ())?;
        self.divided.world.comm().synchronize()
    }

    /// Writes a checkpoint. Makes the collective calls of [`collect`] even if the
    /// file can't be written, because the other ranks make them: the outer error is a collective's,
    /// the inner one the file's.
    pub(super) fn write<M: Module, T: Serialize>(
        &self,
        (saver, path): (&mut Saver, &Path),
        model: &M,
        parts: Vec<(String, Tensor<1>)>,
        progress: &T,
    ) -> Result<Result<()>> {
        // The ids in the file belong to the saved model, by which Burn finds the state of a
        // parameter: after a load they differ from the last step's.
        let found = parameters::of(model).into_iter();
        let ids: HashMap<String, u64> = found.map(|found| (found.path, found.id.val())).collect();
        let _busy = Busy::new(self.divided.world.communicator());
        let counters = self.divided.recorded_counters(&self.accounts.counters);
        let own = OwnStates::gather(&self.divided, &self.shards, false)?;
        let contents = self.contents(&counters, &own, &ids);
        let (contents, error) = match contents {
            Ok(contents) => (contents, None),
            Err(error) => (Contents::default(), Some(error)),
        };
        let (to, contents) = ((path, saver.host_bytes()), contents.of_optimizer());
        let (saving, entries) = checkpoint::start(to, (model, &self.divided), contents, progress);
        let mut saving = error.map_or(saving, Err);
        let mut parts = parts.into_iter();
        for entry in entries {
            let whole = match entry.is_divided {
                true => {
                    let (path, part) = parts.next().expect("every divided parameter has a part");
                    Some(self.divided.collect_whole(&path, part)?)
                }
                false => None,
            };
            put(&mut saving, || (entry.data)(whole));
        }
        collect(&self.divided, &self.shards, &own, false, |data| put(&mut saving, || data))?;
        counters
            .into_iter()
            .for_each(|counter| put(&mut saving, || TensorData::from([counter.value])));
        // Collectives may return results that the device has not received yet.
        self.divided.world.comm().synchronize()?;
        Ok(saving.and_then(|saving| saver.finish(path, saving)))
    }
}

/// Passes on the state's tensors one by one, in the order of [`DividedModel::contents`], on
/// rank 0 or on all ranks. All ranks make this call.
pub fn collect(
    divided: &DividedModel,
    shards: &[Shard],
    own: &OwnStates,
    everywhere: bool,
    mut each: impl FnMut(TensorData),
) -> Result<()> {
    let comm = divided.world.comm();
    for shard in shards {
        for slot in divided.slots(&shard.bucket) {
            let values = divided.slot_values(&shard.bucket, slot.name);
            let local = shard.state(slot.name, slot.dtype.resolve(values.dtype));
            let whole = match values.kind {
                BucketKind::Replicated => local,
                BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements if everywhere => {
                    comm.all_gather(local, &values.counts.to_vec())?.wait()?
                }
                BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                    comm.gather(local, &values.counts.to_vec(), 0)?.wait()?
                }
            };
            if everywhere || comm.rank() == 0 {
                unpack(&values, whole, |index, bytes, dtype| {
                    let shape = divided.recorded_shape(index, slot.name);
                    each(TensorData::from_bytes(bytes, shape, dtype));
                });
            }
        }
    }
    own.collect(divided, shards, everywhere, each)
}

/// Cuts the buffer of a bucket into the values of its parameters, in the order of their indices.
fn unpack(bucket: &Bucket, whole: Tensor<1>, mut each: impl FnMut(usize, Bytes, DType)) {
    let elements = whole.dims()[0];
    let (bytes, _, dtype) = whole.into_data().into_parts();
    let parameters = bucket.by_parameter();
    // The buffer of a single parameter is passed on without a copy: such a bucket can be the
    // largest.
    if let Some((number, segments)) = parameters.first_key_value()
        && segments.iter().all(|segment| segment.first == segment.start)
        && segments.iter().map(|segment| segment.len).sum::<usize>() == elements
    {
        return each(*number, bytes, dtype);
    }
    let size = dtype.size();
    for (number, segments) in parameters {
        let bytes_of_all = segments.iter().map(|segment| segment.len * size).sum();
        let mut values = Vec::with_capacity(bytes_of_all);
        for InBuffer { start, len, .. } in segments {
            values.extend_from_slice(&bytes[start * size..(start + len) * size]);
        }
        each(number, Bytes::from_bytes_vec(values), dtype);
    }
}

/// Writes the next tensor of a checkpoint, unless one before it could not be written.
fn put(saving: &mut Result<Saving>, data: impl FnOnce() -> TensorData) {
    if let Ok(open) = saving
        && let Err(error) = open.put(data())
    {
        *saving = Err(error);
    }
}
