//! The states of all ranks as one record, that of the single-device optimizer: it knows of no ranks,
//! plan or engine.

use std::collections::HashMap;
use std::path::Path;

use burn::module::Module;
use burn::optim::OptimizerRecord;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use burn_pack::{Reader, Scalar, Writer};
use serde::{Serialize, de::DeserializeOwned};

use super::DistModuleOptimizer;
use super::optimizer::Counters;
use super::plan::{BucketKind, Parameter, Work};
use crate::checkpoint;
use crate::error::{Error, Result};

/// The names of [`Counters`] in records.
const COUNTERS: [&str; 3] = ["skipped", "correction_1", "correction_2"];

/// Tensors of a record by path and name.
type Saved = HashMap<(String, String), TensorData>;

impl DistModuleOptimizer {
    /// The state of all ranks, as a [`ModuleOptimizer`](burn::optim::ModuleOptimizer) of
    /// [`MuonConfig`](crate::MuonConfig) records it, to all ranks. All ranks make this call.
    ///
    /// # Errors
    ///
    /// Those of every collective.
    pub fn to_record(&mut self) -> Result<OptimizerRecord> {
        let mut tensors = Vec::new();
        for shard in &mut self.shards {
            let (bucket, dtype) = (shard.bucket.clone(), shard.state_dtype());
            for (name, share) in shard.state_names().iter().zip(shard.state_vectors()) {
                let whole = match bucket.kind {
                    BucketKind::Replicated => share,
                    _ => self.world.comm().all_gather(share, &bucket.counts)?.wait()?,
                };
                let (whole, size) = (whole.into_data(), dtype.size());
                for (number, pieces) in bucket.by_parameter() {
                    let bytes = pieces
                        .iter()
                        .flat_map(|(_, at, len)| &whole.as_bytes()[at * size..(at + len) * size]);
                    let bytes = bytes.copied().collect();
                    let parameter = &self.plan.parameters()[number];
                    let data = TensorData::from_bytes_vec(bytes, parameter.shape.clone(), dtype);
                    tensors.push((number, *name, data));
                }
            }
        }
        for (number, name, value) in self.counted() {
            tensors.push((number, name, TensorData::from([value])));
        }
        let id = |number: usize| self.members[number].id.val();
        let tensors = tensors.into_iter().map(|(number, name, data)| {
            let (bytes, shape, dtype) = data.into_parts();
            let name = format!("{}.{name}", id(number));
            burn_pack::Tensor::new(name, dtype, shape, Some(id(number)), bytes)
        });
        let mut writer = Writer::new(tensors.collect());
        for (number, parameter) in self.plan.parameters().iter().enumerate() {
            let (id, rank) = (id(number), parameter.shape.len());
            writer = writer
                .with_scalar(&format!("{id}.__rank"), Scalar::from(rank))
                .with_metadata(&id.to_string(), &parameter.path);
            if matches!(parameter.work, Work::Matrices { .. }) {
                writer = writer
                    .with_scalar(&format!("{id}.time"), Scalar::from(self.members[number].time));
            }
        }
        let bytes = writer.into_bytes().expect("names are distinct and sizes known");
        Ok(OptimizerRecord::from_bytes(bytes).expect("it was just written"))
    }

    /// The optimizer with a recorded state, of any number of ranks or of a single device. Parameters
    /// that the record does not know start anew. All ranks make this call.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one: [`Error::Parameter`] if a recorded state does not fit its parameter;
    /// those of every collective.
    pub fn load_record(mut self, record: OptimizerRecord) -> Result<Self> {
        let world = self.world.clone();
        let loaded = self.fill(record);
        world.agree(loaded)?;
        Ok(self)
    }

    /// Saves model, optimizer and progress of the run as [`checkpoint::save`] does, in the same
    /// format, whatever the number of ranks. All ranks make this call; rank 0 writes.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one: [`Error::Checkpoint`] if the file can't be written, and what the
    /// path held before is then unchanged; those of every collective.
    pub fn save<M: Module, T: Serialize>(
        &mut self,
        path: impl AsRef<Path>,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        let record = self.to_record()?;
        self.world.comm().synchronize()?;
        let written = match self.world.rank() {
            0 => checkpoint::write(path.as_ref(), model, record, progress),
            _ => Ok(()),
        };
        self.world.agree(written)
    }

    /// Loads a run that [`save`](Self::save) or [`checkpoint::save`] saved, on any number of ranks.
    /// All ranks make this call, and read the file.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one: those of [`checkpoint::load`] and of
    /// [`load_record`](Self::load_record).
    pub fn load<M: Module, T: DeserializeOwned>(
        self,
        path: impl AsRef<Path>,
        model: M,
    ) -> Result<(M, Self, T)> {
        let read = checkpoint::read(path.as_ref(), model);
        let (model, record, progress) = self.world.agree(read)?;
        Ok((model, self.load_record(record)?, progress))
    }

    fn fill(&mut self, record: OptimizerRecord) -> Result<()> {
        let (saved, times) = parse(record);
        let (rank, device) = (self.world.rank(), self.device());
        for shard in &mut self.shards {
            let (bucket, range) = (shard.bucket.clone(), shard.range.clone());
            let parameters = self.plan.parameters();
            let find = |name: &str, path: &str, elements: usize, dtype: DType| {
                let found = saved.get(&(path.to_owned(), name.to_owned()));
                let reason = match found {
                    Some(data) if data.num_elements() == elements && data.dtype() == dtype => {
                        return Ok(found);
                    }
                    Some(data) => {
                        format!("its saved `{name}` is {:?} {}", data.shape(), data.dtype().name())
                    }
                    None if saved.keys().any(|(of, _)| of == path) => {
                        format!("its saved state has no `{name}`")
                    }
                    None => return Ok(None),
                };
                let remedy = "configure the optimizer as it was when the state was saved";
                Err(Error::Parameter { parameter: path.to_owned(), rank, reason, remedy })
            };
            let dtype = shard.state_dtype();
            let size = dtype.size();
            let mut vectors = Vec::new();
            for name in shard.state_names() {
                let mut whole = vec![0u8; bucket.elements() * size];
                for (number, pieces) in bucket.by_parameter() {
                    let Parameter { path, .. } = &parameters[number];
                    let elements = parameters[number].elements();
                    let Some(data) = find(name, path, elements, dtype)? else { continue };
                    for (start, at, len) in pieces {
                        let from = &data.as_bytes()[start * size..(start + len) * size];
                        whole[at * size..(at + len) * size].copy_from_slice(from);
                    }
                }
                let own = whole[range.start * size..range.end * size].to_vec();
                let own = TensorData::from_bytes_vec(own, vec![range.len()], dtype);
                vectors.push(Tensor::<1>::from_data(own, (&device, dtype)));
            }
            shard.set_state_vectors(vectors);
        }
        let mut counters = [vec![], vec![], vec![]];
        for (number, member) in self.members.iter_mut().enumerate() {
            for (name, values) in COUNTERS.iter().zip(&mut counters) {
                let saved = saved.get(&(member.path.clone(), (*name).to_owned()));
                values.push(saved.and_then(|data| data.iter::<f32>().next()).unwrap_or(0.0));
            }
            member.time = times.get(&member.path).copied().unwrap_or(0);
            let _ = number;
        }
        let [skipped, first, second] = counters
            .map(|values| Tensor::from_data(TensorData::from(&*values), (&device, DType::F32)));
        self.counters = Counters { skipped, corrections: [first, second] };
        Ok(())
    }

    /// What is counted of every parameter, with the names in records.
    fn counted(&self) -> Vec<(usize, &'static str, f32)> {
        let Counters { skipped, corrections: [first, second] } = &self.counters;
        let mut counted = vec![];
        for (name, values) in COUNTERS.iter().zip([skipped, first, second]) {
            let values = values.to_data();
            for (number, value) in values.iter::<f32>().enumerate() {
                let is_matrix = self.plan.parameters()[number].matrices() > 0;
                if *name == "skipped" || !is_matrix {
                    counted.push((number, *name, value));
                }
            }
        }
        counted
    }
}

/// The tensors of a record by path and name, and by path the steps that were taken.
pub(super) fn parse(record: OptimizerRecord) -> (Saved, HashMap<String, usize>) {
    let bytes: Bytes = record.into_bytes().expect("a record can be written");
    let reader = Reader::from_bytes(bytes).expect("it was just written");
    let (paths, scalars) = (reader.metadata().clone(), reader.scalars().clone());
    let times = scalars.iter().filter_map(|(name, time)| {
        let id = name.strip_suffix(".time")?;
        Some((paths.get(id)?.clone(), usize::try_from(*time).ok()?))
    });
    let times = times.collect();
    let tensors = reader.into_tensors().expect("it was just written").into_iter();
    let saved = tensors.filter_map(|tensor| {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().ok()?;
        let (id, name) = name.split_once('.')?;
        let path = paths.get(id)?.clone();
        Some(((path, name.to_owned()), TensorData::from_bytes(bytes, shape, dtype)))
    });
    (saved.collect(), times)
}
