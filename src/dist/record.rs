//! The states of all ranks as one, that of the single-device optimizer: a record or a checkpoint
//! does not depend on the ranks, the plan or the engine.
//!
//! A save collects the states on rank 0, which writes them, bucket by bucket. No rank holds more than
//! a bucket on the host. A load reads on every rank only the tensors that its shares need, after the
//! ranks have compared what they are about to load.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::optim::OptimizerRecord;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use burn_pack::{Scalar, Writer};
use serde::{Serialize, de::DeserializeOwned};

use super::DistModuleOptimizer;
use super::comm::Communicator;
use super::optimizer::Counters;
use super::plan::{Bucket, BucketKind, Parameter, Work};
use crate::checkpoint::{self, Archive, Contents, Planned, Saving, States};
use crate::error::{Error, Result};
use crate::route::Walk;

impl DistModuleOptimizer {
    /// Returns the state of all ranks on all ranks, as a
    /// [`ModuleOptimizer`](burn::optim::ModuleOptimizer) of [`MuonConfig`](crate::MuonConfig) records
    /// it. All ranks make this call.
    ///
    /// Every rank then has the whole state in host memory, and twice as much for a moment. Use
    /// [`save`](Self::save) to write a checkpoint.
    ///
    /// # Errors
    ///
    /// Those of every collective; [`Error::Parameter`] if two parameters share one identity.
    pub fn to_record(&self) -> Result<OptimizerRecord> {
        Ok(self.record(true)?.expect("every rank keeps what it receives"))
    }

    /// [`to_record`](Self::to_record) on rank 0. The others return nothing, and hold nothing on the
    /// host.
    ///
    /// # Errors
    ///
    /// As [`to_record`](Self::to_record).
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn gather_record(&self) -> Result<Option<OptimizerRecord>> {
        self.record(false)
    }

    /// Returns the optimizer with a recorded state, of any number of ranks or of a single device.
    /// Parameters that the record does not know start anew. All ranks make this call, with equal
    /// records.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one: [`Error::CheckpointsDiffer`] if the records differ;
    /// [`Error::Parameter`] if a recorded state does not fit its parameter; those of every
    /// collective.
    pub fn load_record(self, record: OptimizerRecord) -> Result<Self> {
        self.load_states(&States::new(Archive::from_record(record)))
    }

    /// [`load_record`](Self::load_record) of a state that ranks of one process may share.
    pub(super) fn load_states(mut self, states: &States) -> Result<Self> {
        self.compare(states.archive())?;
        let filled = self.fill(states);
        self.world.agree(filled)?;
        Ok(self)
    }

    /// Saves model, optimizer and progress of the run as [`checkpoint::save`] does, in the same
    /// format, whatever the number of ranks. All ranks make this call; rank 0 writes.
    ///
    /// Rank 0 collects and writes the state bucket by bucket, and the model parameter by parameter.
    /// The other ranks wait until the file is complete, however long that takes.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one: [`Error::Checkpoint`] if the file can't be written, and what the
    /// path held before is then unchanged; those of every collective.
    pub fn save<M: Module, T: Serialize>(
        &self,
        path: impl AsRef<Path>,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        // A collective that fails ends the world, so that there is nothing left to agree on.
        let written = match self.world.is_main() {
            true => self.write(path.as_ref(), model, progress)?,
            false => {
                self.collect(false, |_| ())?;
                self.world.comm().synchronize()?;
                Ok(())
            }
        };
        self.world.agree(written)
    }

    /// Loads a run that [`save`](Self::save) or [`checkpoint::save`] saved, on any number of ranks.
    /// All ranks make this call, and read what they need of the file.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one: those of [`checkpoint::load`] and of
    /// [`load_record`](Self::load_record); [`Error::CheckpointsDiffer`] if the files that the ranks
    /// open are not copies of one file.
    pub fn load<M: Module, T: DeserializeOwned>(
        mut self,
        path: impl AsRef<Path>,
        model: M,
    ) -> Result<(M, Self, T)> {
        let opened = {
            let _busy = Busy::new(self.world.engine());
            Archive::open(path.as_ref())
        };
        let archive = self.world.agree(opened)?;
        self.compare(&archive)?;
        let read = {
            let _busy = Busy::new(self.world.engine());
            self.read(archive, model)
        };
        let (model, progress) = self.world.agree(read)?;
        Ok((model, self, progress))
    }

    /// Writes a checkpoint. Makes the collective calls of [`collect`](Self::collect) even if the file
    /// can't be written, because the other ranks make them: the outer error is that of a collective,
    /// the inner one that of the file.
    fn write<M: Module, T: Serialize>(
        &self,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<Result<()>> {
        // The ids in the file are those of the model beside the state, by which Burn finds the state
        // of a parameter: after a load they are others than those of the last step.
        let found = Walk::through(model).into_iter();
        let ids: HashMap<String, u64> = found.map(|found| (found.path, found.id.val())).collect();
        let _busy = Busy::new(self.world.engine());
        let counters = self.counters();
        let contents = self.contents(&counters, &ids);
        let mut saving = contents
            .and_then(|contents| checkpoint::start(path, model, contents.of_optimizer(), progress));
        self.collect(false, |data| put(&mut saving, data))?;
        counters
            .into_iter()
            .for_each(|counter| put(&mut saving, TensorData::from([counter.value])));
        // The collectives may have handed out results that are not there yet.
        self.world.comm().synchronize()?;
        Ok(saving.and_then(Saving::finish))
    }

    fn read<M: Module, T: DeserializeOwned>(
        &mut self,
        archive: Archive,
        model: M,
    ) -> Result<(M, T)> {
        let loaded = checkpoint::load_model(&archive, model)?;
        let states = States::new(archive);
        let asked = self.fill(&states)?;
        // Damage to what no parameter takes is found, too: the ranks share that work.
        let left = states.keys().filter(|key| !asked.contains(*key));
        let mut left: Vec<_> = left.collect();
        left.sort_unstable();
        for (path, name) in left.into_iter().skip(self.world.rank()).step_by(self.world.size()) {
            let (name, _) = states.find(path, name).expect("one of the keys");
            states.archive().verify(name)?;
        }
        Ok(loaded)
    }

    /// Refuses ranks that are about to load something else than rank 0.
    fn compare(&self, archive: &Archive) -> Result<()> {
        type Described = (u64, String);
        let own = (archive.digest(), archive.describe());
        // Descriptions hold paths, which may differ.
        let difference = |first: &Described, own: &Described| {
            (first.0 != own.0).then(|| (first.1.clone(), own.1.clone()))
        };
        match self.world.compare(&own, difference)? {
            Some((rank, (expected, got))) => Err(Error::CheckpointsDiffer { rank, expected, got }),
            None => Ok(()),
        }
    }

    /// The state of all ranks on all of them, or on rank 0 only.
    fn record(&self, everywhere: bool) -> Result<Option<OptimizerRecord>> {
        let mut states = Vec::new();
        self.collect(everywhere, |data| states.push(data))?;
        let counters = self.counters();
        // The collectives may have handed out results that are not there yet.
        self.world.comm().synchronize()?;
        if !everywhere && self.world.rank() != 0 {
            return Ok(None);
        }
        let _busy = Busy::new(self.world.engine());
        let ids: HashMap<_, _> =
            self.members.iter().map(|member| (member.path.clone(), member.id.val())).collect();
        let contents = self.contents(&counters, &ids)?;
        states.extend(counters.into_iter().map(|counter| TensorData::from([counter.value])));
        Ok(Some(recorded(contents, states)))
    }

    /// A record with the names, types and ranks of this one's state, in tensors of one element each.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn outline(&self) -> Result<OptimizerRecord> {
        let ids = self.members.iter().map(|member| (member.path.clone(), member.id.val()));
        let contents = self.contents(&self.counters(), &ids.collect())?;
        let one = |planned: &Planned| {
            TensorData::from_bytes_vec(
                vec![0; planned.dtype.size()],
                vec![1; planned.shape.len()],
                planned.dtype,
            )
        };
        let tensors = contents.tensors.iter().map(one).collect();
        Ok(recorded(contents, tensors))
    }
}

/// The record of tensors, in the order of their names in `contents`.
fn recorded(contents: Contents, tensors: Vec<TensorData>) -> OptimizerRecord {
    let tensors = contents.tensors.into_iter().zip(tensors).map(|(planned, data)| {
        let (bytes, shape, dtype) = data.into_parts();
        burn_pack::Tensor::new(planned.name, dtype, shape, planned.id, bytes)
    });
    let mut writer = Writer::new(tensors.collect());
    for (name, value) in &contents.scalars {
        writer = writer.with_scalar(name, *value);
    }
    for (name, value) in &contents.metadata {
        writer = writer.with_metadata(name, value);
    }
    let bytes = writer.into_bytes().expect("names are distinct and sizes known");
    OptimizerRecord::from_bytes(bytes).expect("it was just written")
}

/// The parts that saving and loading consist of.
impl DistModuleOptimizer {
    /// Hands over the state's tensors one by one, in the order of [`contents`](Self::contents), on
    /// rank 0 or on all ranks. All ranks make this call.
    fn collect(&self, everywhere: bool, mut each: impl FnMut(TensorData)) -> Result<()> {
        let (comm, parameters) = (self.world.comm(), self.plan.parameters());
        for shard in &self.shards {
            let bucket = &shard.bucket;
            for share in shard.state_vectors() {
                let whole = match bucket.kind {
                    BucketKind::Replicated => share,
                    _ if everywhere => comm.all_gather(share, &bucket.counts)?.wait()?,
                    _ => comm.gather(share, &bucket.counts, 0)?.wait()?,
                };
                if everywhere || comm.rank() == 0 {
                    unpack(bucket, whole, |number, bytes, dtype| {
                        each(TensorData::from_bytes(
                            bytes,
                            parameters[number].shape.clone(),
                            dtype,
                        ));
                    });
                }
            }
        }
        Ok(())
    }

    /// The names, types and shapes of the state under the names of Burn's record, with the given
    /// identities of the parameters by path.
    fn contents(&self, counters: &[Counter], ids: &HashMap<String, u64>) -> Result<Contents> {
        let ids = self.identities(ids)?;
        let parameters = self.plan.parameters();
        let mut contents = Contents::default();
        let mut plan = |number: usize, name: &str, dtype: DType, shape: &[usize]| {
            let id = ids[number];
            let name = format!("{id}.{name}");
            contents.tensors.push(Planned::new(name, dtype, shape.to_vec(), Some(id)));
        };
        for shard in &self.shards {
            for name in shard.state_names() {
                for number in shard.bucket.by_parameter().into_keys() {
                    plan(number, name, shard.state_dtype(), &parameters[number].shape);
                }
            }
        }
        for counter in counters {
            plan(counter.number, counter.name, DType::F32, &[1]);
        }
        for (number, id) in ids.iter().enumerate() {
            contents.metadata.insert(id.to_string(), self.members[number].path.clone());
            for (name, value) in self.scalars(number) {
                contents.scalars.insert(format!("{id}.{name}"), Scalar::from(value));
            }
        }
        Ok(contents)
    }

    /// The identity of every parameter, by which Burn keys the state.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a parameter without one, or with that of another parameter.
    fn identities(&self, ids: &HashMap<String, u64>) -> Result<Vec<u64>> {
        let refuse = |path: &str, reason: String, remedy| Error::Parameter {
            parameter: path.to_owned(),
            rank: self.world.rank(),
            reason,
            remedy,
        };
        let mut paths = HashMap::new();
        let identities = self.members.iter().map(|member| {
            let path = member.path.as_str();
            let Some(id) = ids.get(path).copied() else {
                let remedy = "save the model that the optimizer trains";
                return Err(refuse(path, "it is not in the model".into(), remedy));
            };
            match paths.insert(id, path) {
                None => Ok(id),
                Some(other) => Err(refuse(
                    path,
                    format!("it has the identity of `{other}`, so that both have one state"),
                    "give every parameter its own `ParamId`: clones keep it",
                )),
            }
        });
        identities.collect()
    }

    /// Reads this rank's shares, and returns the paths and names of all states that the plan has.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if a state does not fit its parameter, [`Error::Checkpoint`] if it can't
    /// be read.
    fn fill(&mut self, states: &States) -> Result<HashSet<(String, String)>> {
        let (rank, device) = (self.world.rank(), self.device());
        let parameters = self.plan.parameters();
        let mut asked = HashSet::new();
        for shard in &mut self.shards {
            let (dtype, range) = (shard.state_dtype(), shard.range.clone());
            let mut vectors = Vec::new();
            for name in shard.state_names() {
                let mut share = Share::new(range.clone(), dtype);
                for (number, pieces) in shard.bucket.by_parameter() {
                    let Parameter { path, .. } = &parameters[number];
                    asked.insert((path.clone(), (*name).to_owned()));
                    let kind = (parameters[number].elements(), dtype);
                    let found = find(states, (path, name), kind, rank)?;
                    if let Some(found) = found.filter(|_| share.takes(&pieces)) {
                        let data = states.archive().data(found)?.convert_dtype(dtype);
                        share.take(&data, &pieces);
                    }
                }
                let data = TensorData::from_bytes_vec(share.bytes, [range.len()], dtype);
                vectors.push(Tensor::<1>::from_data(data, (&device, dtype)));
            }
            shard.set_state_vectors(vectors);
        }
        self.set_counters(|path, name| {
            asked.insert((path.to_owned(), name.to_owned()));
            let found = find(states, (path, name), (1, DType::F32), rank)?;
            let data = found.map(|found| states.archive().data(found)).transpose()?;
            Ok(data.and_then(|data| data.iter::<f32>().next()).unwrap_or(0.0))
        })?;
        for member in &mut self.members {
            member.time = states.time(&member.path).unwrap_or(0);
        }
        self.late = self.late.zeros_like();
        self.start_counting();
        Ok(asked)
    }
}

/// The name in records of [`Counters::skipped`].
const SKIPPED: &str = "skipped";
/// The names in records of all [`Counters`].
const COUNTERS: [&str; 3] = [SKIPPED, "correction_1", "correction_2"];

/// A number that is kept per parameter, as a tensor of one element.
struct Counter {
    /// Index of the parameter in the plan.
    number: usize,
    name: &'static str,
    value: f32,
}

/// Numbers that are kept per parameter, and not per element.
impl DistModuleOptimizer {
    /// The scalars in the record of a parameter.
    fn scalars(&self, number: usize) -> Vec<(&'static str, usize)> {
        let parameter = &self.plan.parameters()[number];
        let mut scalars = vec![("__rank", parameter.shape.len())];
        if matches!(parameter.work, Work::Matrices { .. }) {
            scalars.push(("time", self.members[number].time));
        }
        scalars
    }

    /// Returns `true` for a counter that the state of a parameter has.
    fn counts(&self, number: usize, name: &str) -> bool {
        name == SKIPPED || self.plan.parameters()[number].work == Work::Elements
    }

    /// The counters of all parameters, which are the same on all ranks.
    fn counters(&self) -> Vec<Counter> {
        let Counters { skipped, corrections: [first, second] } = &self.counters;
        let tensors = COUNTERS.into_iter().zip([skipped, first, second]);
        let counters = tensors.flat_map(|(name, tensor)| {
            let values: Vec<f32> = tensor.to_data().iter::<f32>().collect();
            let values = values.into_iter().enumerate();
            values.map(move |(number, value)| Counter { number, name, value })
        });
        counters.filter(|counter| self.counts(counter.number, counter.name)).collect()
    }

    /// Sets the counters of all parameters by their paths and names.
    fn set_counters(&mut self, mut value: impl FnMut(&str, &str) -> Result<f32>) -> Result<()> {
        let device = self.device();
        let mut read = |name: &'static str| -> Result<Tensor<1>> {
            let values = self.members.iter().enumerate().map(|(number, member)| {
                if self.counts(number, name) { value(&member.path, name) } else { Ok(0.0) }
            });
            let values = values.collect::<Result<Vec<f32>>>()?;
            Ok(Tensor::from_data(TensorData::from(&*values), (&device, DType::F32)))
        };
        let [skipped, first, second] = COUNTERS;
        self.counters =
            Counters { skipped: read(skipped)?, corrections: [read(first)?, read(second)?] };
        Ok(())
    }
}

/// A run of a parameter's elements in the buffer of its bucket: its start in the parameter, its start
/// in the buffer, and its length.
type Run = (usize, usize, usize);

/// The part of a bucket's buffer that a rank keeps, in host memory.
struct Share {
    range: Range<usize>,
    /// Bytes of an element.
    size: usize,
    bytes: Vec<u8>,
}

impl Share {
    fn new(range: Range<usize>, dtype: DType) -> Self {
        let size = dtype.size();
        Self { bytes: vec![0; range.len() * size], range, size }
    }

    /// The part of a run that is in the share, as a range of the buffer.
    fn clip(&self, (_, at, len): Run) -> Range<usize> {
        at.max(self.range.start)..(at + len).min(self.range.end)
    }

    /// Returns `true` if the share has elements of the runs.
    fn takes(&self, runs: &[Run]) -> bool {
        runs.iter().any(|run| !self.clip(*run).is_empty())
    }

    /// Copies the elements of a parameter that are in the share.
    fn take(&mut self, data: &TensorData, runs: &[Run]) {
        for run in runs {
            let part = self.clip(*run);
            if part.is_empty() {
                continue;
            }
            let (start, at, _) = *run;
            let from = (start + part.start - at) * self.size;
            let to = (part.start - self.range.start) * self.size;
            let count = part.len() * self.size;
            self.bytes[to..to + count].copy_from_slice(&data.as_bytes()[from..from + count]);
        }
    }
}

/// Cuts the buffer of a bucket into the elements of its parameters, in the order of their numbers.
fn unpack(bucket: &Bucket, whole: Tensor<1>, mut each: impl FnMut(usize, Bytes, DType)) {
    let elements = whole.dims()[0];
    let (bytes, _, dtype) = whole.into_data().into_parts();
    let parameters = bucket.by_parameter();
    // The buffer of a single parameter is handed over as it is: such a bucket can be the largest.
    if let Some((number, runs)) = parameters.first_key_value()
        && runs.iter().all(|(start, at, _)| start == at)
        && runs.iter().map(|(.., len)| len).sum::<usize>() == elements
    {
        return each(*number, bytes, dtype);
    }
    let size = dtype.size();
    for (number, runs) in parameters {
        let mut own = Vec::with_capacity(runs.iter().map(|(.., len)| len * size).sum());
        for (_, at, len) in runs {
            own.extend_from_slice(&bytes[at * size..(at + len) * size]);
        }
        each(number, Bytes::from_bytes_vec(own), dtype);
    }
}

/// The name in the archive of a parameter's state; nothing if the archive does not know the
/// parameter.
///
/// # Errors
///
/// [`Error::Parameter`] if the state has other elements than expected.
fn find<'a>(
    states: &'a States,
    (path, name): (&str, &str),
    (elements, dtype): (usize, DType),
    rank: usize,
) -> Result<Option<&'a str>> {
    let reason = match states.find(path, name) {
        Some((found, stored)) if stored.elements() == elements && fits(stored.dtype, dtype) => {
            return Ok(Some(found));
        }
        Some((_, stored)) => format!(
            "its saved `{name}` does not fit: expected {elements} elements of {}, got shape {:?} of {}",
            dtype.name(),
            stored.shape,
            stored.dtype.name()
        ),
        None if states.knows(path) => format!("its saved state has no `{name}`"),
        None => return Ok(None),
    };
    let remedy = "configure the optimizer as it was when the state was saved";
    Err(Error::Parameter { parameter: path.to_owned(), rank, reason, remedy })
}

/// Returns `true` for a saved type that a state can be made of: its own, or half precision, which files of older
/// versions have where there is float32 now.
fn fits(stored: DType, dtype: DType) -> bool {
    let is_half = matches!(stored, DType::F16 | DType::BF16);
    stored == dtype || dtype == DType::F32 && is_half
}

/// Writes the next tensor of a checkpoint, unless one before it could not be written.
fn put(saving: &mut Result<Saving>, data: TensorData) {
    if let Ok(open) = saving
        && let Err(error) = open.put(data)
    {
        *saving = Err(error);
    }
}

/// This rank does something that may take longer than the deadline, until this is dropped.
pub(super) struct Busy(Arc<dyn Communicator>);

impl Busy {
    pub(super) fn new(comm: Arc<dyn Communicator>) -> Self {
        comm.set_busy(true);
        Self(comm)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set_busy(false);
    }
}
