//! The states of all ranks as one, as of the single-device optimizer: a record or a checkpoint
//! does not depend on the ranks, the plan or the engine.
//!
//! A save gathers the states on rank 0, which writes them, bucket by bucket. No rank holds more
//! than a bucket on the host. A load reads on every rank only the tensors that its shards need,
//! after the ranks have compared the files.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use burn::module::{Module, Param};
use burn::optim::OptimizerRecord;
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use burn_pack::{Scalar, Writer};
use serde::{Serialize, de::DeserializeOwned};

use super::DistModuleOptimizer;
use super::busy::Busy;
use super::counters::{COUNTERS, Counters};
use super::loss_scale::LossScale;
use super::own_states::OwnStates;
use super::shard::Shard;
use crate::checkpoint::{
    self, Archive, Checkpointed, Contents, Divided, Planned, Saver, Saving, States, TrainedPaths,
};
use crate::difference::{Difference, DifferenceKind};
use crate::distributed::cuts::Cuts;
use crate::distributed::plan::{Bucket, BucketKind, Piece};
use crate::distributed::trained::Kind;
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit};
use crate::update::{CORRECTIONS, OWN_STATE, Slot, TIME, is_half, missing, unused as unused_slot};

/// Names of the scale of the loss, and of the steps since it changed, in records.
const LOSS_SCALE: &str = "loss_scale";
const LOSS_SCALE_STEPS: &str = "loss_scale_steps";

impl DistModuleOptimizer {
    /// Returns the state of all ranks on all ranks, as a
    /// [`ModuleOptimizer`](burn::optim::ModuleOptimizer) of [`MuonConfig`](crate::MuonConfig)
    /// records it. All ranks make this call.
    ///
    /// Every rank then has the whole state in host memory, and briefly twice. To write a
    /// checkpoint, use [`save`](Self::save), which does not collect the whole state.
    ///
    /// # Errors
    ///
    /// As every collective; [`Error::Parameter`] if two parameters share one identity;
    /// [`Error::Usage`] for a state beyond the limits of Burn's records, such as 100,000 tensors,
    /// which [`save`](Self::save) does not have.
    pub fn to_record(&self) -> Result<OptimizerRecord> {
        Ok(self.record(true)?.expect("every rank keeps the record"))
    }

    /// [`to_record`](Self::to_record) on rank 0. The others return nothing, and hold nothing on the
    /// host.
    ///
    /// # Errors
    ///
    /// As [`to_record`](Self::to_record).
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(in crate::distributed) fn gather_record(&self) -> Result<Option<OptimizerRecord>> {
        self.record(false)
    }

    /// Returns the optimizer with the state of a record, which any number of ranks or a single
    /// device made. The state of a parameter that is not in the record starts at zero, and a
    /// warning names it. All ranks make this call, with equal records.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors: [`Error::CheckpointsDiffer`] if the
    /// records differ; [`Error::OtherRun`] with all differences, if recorded states do not fit
    /// their parameters; as every collective.
    pub fn load_record(self, record: OptimizerRecord) -> Result<Self> {
        self.load_states(&States::new(Archive::from_record(record)))
    }

    /// [`load_record`](Self::load_record) of a state that ranks of one process may share.
    pub(in crate::distributed) fn load_states(mut self, states: &States) -> Result<Self> {
        self.compare(states.archive())?;
        let differences = self.take_over(states, BTreeSet::new())?;
        checkpoint::ensure_complete("the record of the optimizer".to_owned(), differences)?;
        Ok(self)
    }

    /// Saves model, optimizer and progress of the run as [`checkpoint::save`] does, in the same
    /// format for any number of ranks. All ranks make this call; rank 0 writes.
    ///
    /// Rank 0 collects and writes the state bucket by bucket, and the model parameter by parameter.
    /// The other ranks wait until the file is complete, however long that takes.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors: [`Error::Checkpoint`] if the file can't
    /// be written, in which case a previous file at the path is unchanged; those of every
    /// collective.
    pub fn save<M: Module, T: Serialize>(
        &self,
        path: impl AsRef<Path>,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        checkpoint::save(path, model, self, progress)
    }

    /// Saves as a [`Saver`] does it, which has been waiting for an earlier file on rank 0 alone.
    fn save_by<M: Module, T: Serialize>(
        &self,
        saver: &mut Saver,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        self.finish_publication()?;
        let prepared = {
            let _busy = Busy::new(self.world.communicator());
            saver.prepare(path)
        };
        let parts = self.world.agree(prepared.and_then(|()| self.divided(model)))?;
        // A collective that fails ends the world: only the file is left to agree on.
        let written = self.announced(match self.world.is_main() {
            true => self.write((saver, path), (model, parts), progress),
            false => self.send_states(parts).map(Ok),
        })?;
        self.world.agree(written)
    }

    /// Makes the calls of [`write`](Self::write) on a rank that does not write.
    fn send_states(&self, parts: Vec<(String, Tensor<1>)>) -> Result<()> {
        let own = self.own_states(false)?;
        for (path, part) in parts {
            self.collect_whole(&path, part)?;
        }
        self.collect(&own, false, |_| ())?;
        self.world.comm().synchronize()
    }

    /// Loads a run that [`save`](Self::save) or [`checkpoint::save`] saved, on any number of ranks.
    /// All ranks make this call. Each reads its part of the file, so every host has to have the
    /// file.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors: those of [`checkpoint::load`] and of
    /// [`load_record`](Self::load_record); [`Error::CheckpointsDiffer`] if the files that the ranks
    /// open are not copies of one file.
    pub fn load<M: Module, T: DeserializeOwned>(
        self,
        path: impl AsRef<Path>,
        model: M,
    ) -> Result<(M, Self, T)> {
        checkpoint::load(path, model, self)
    }

    /// Writes a checkpoint. Makes the collective calls of [`collect`](Self::collect) even if the
    /// file can't be written, because the other ranks make them: the outer error is a collective's,
    /// the inner one the file's.
    fn write<M: Module, T: Serialize>(
        &self,
        (saver, path): (&mut Saver, &Path),
        (model, parts): (&M, Vec<(String, Tensor<1>)>),
        progress: &T,
    ) -> Result<Result<()>> {
        // The ids in the file belong to the saved model, by which Burn finds the state of a
        // parameter: after a load they differ from the last step's.
        let found = parameters::of(model).into_iter();
        let ids: HashMap<String, u64> = found.map(|found| (found.path, found.id.val())).collect();
        let _busy = Busy::new(self.world.communicator());
        let counters = self.counters();
        let own = self.own_states(false)?;
        let contents = self.contents(&counters, &own, &ids);
        let (contents, error) = match contents {
            Ok(contents) => (contents, None),
            Err(error) => (Contents::default(), Some(error)),
        };
        let (to, contents) = ((path, saver.host_bytes()), contents.of_optimizer());
        let (saving, entries) = checkpoint::start(to, (model, self), contents, progress);
        let mut saving = error.map_or(saving, Err);
        let mut parts = parts.into_iter();
        for entry in entries {
            let whole = match entry.is_divided {
                true => {
                    let (path, part) = parts.next().expect("every divided parameter has a part");
                    Some(self.collect_whole(&path, part)?)
                }
                false => None,
            };
            put(&mut saving, || (entry.data)(whole));
        }
        self.collect(&own, false, |data| put(&mut saving, || data))?;
        counters
            .into_iter()
            .for_each(|counter| put(&mut saving, || TensorData::from([counter.value])));
        // Collectives may return results that the device has not received yet.
        self.world.comm().synchronize()?;
        Ok(saving.and_then(|saving| saver.finish(path, saving)))
    }

    /// Fails for ranks that are about to load another file than rank 0.
    fn compare(&self, archive: &Archive) -> Result<()> {
        type Described = (u64, String);
        let local = (archive.digest(), archive.describe());
        // Descriptions contain paths, which may differ.
        let difference = |first: &Described, local: &Described| {
            (first.0 != local.0).then(|| (first.1.clone(), local.1.clone()))
        };
        match self.world.compare(&local, difference)? {
            Some((rank, (expected, got))) => Err(Error::CheckpointsDiffer { rank, expected, got }),
            None => Ok(()),
        }
    }

    /// The state of all ranks on all of them, or on rank 0 only.
    fn record(&self, everywhere: bool) -> Result<Option<OptimizerRecord>> {
        let mut states = Vec::new();
        let own = self.announced(self.own_states(everywhere))?;
        let counters = self.counters();
        let contents = self.contents(&counters, &own, &self.ids());
        self.announced(self.collect(&own, everywhere, |data| states.push(data)))?;
        // Collectives may return results that the device has not received yet.
        self.announced(self.world.comm().synchronize())?;
        if !everywhere && self.world.rank() != 0 {
            return Ok(None);
        }
        let _busy = Busy::new(self.world.communicator());
        let contents = contents?;
        states.extend(counters.into_iter().map(|counter| TensorData::from([counter.value])));
        recorded(contents, states).map(Some)
    }

    /// A record with the names, types and ranks of this one's state, in tensors of one element
    /// each.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(in crate::distributed) fn outline(&self) -> Result<OptimizerRecord> {
        let contents = self.contents(&self.counters(), &self.local_own_states(), &self.ids())?;
        let one = |planned: &Planned| {
            TensorData::from_bytes_vec(
                vec![0; planned.dtype.size()],
                vec![1; planned.shape.len()],
                planned.dtype,
            )
        };
        let tensors = contents.tensors.iter().map(one).collect();
        recorded(contents, tensors)
    }
}

/// The record of tensors, in the order of their names in `contents`.
///
/// # Errors
///
/// [`Error::Usage`] if it is beyond the limits of Burn's records.
fn recorded(contents: Contents, tensors: Vec<TensorData>) -> Result<OptimizerRecord> {
    let count = tensors.len();
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
    let record = writer.into_bytes().map(OptimizerRecord::from_bytes);
    let reason = match record {
        Ok(Ok(record)) => return Ok(record),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    Err(Error::usage(
        "the optimizer's state is too large for a record of Burn",
        "a state within Burn's limits, such as 100,000 tensors",
        format!("{count} tensors ({reason})"),
        "use `DistModuleOptimizer::save`, whose files have no limit",
    ))
}

/// The steps that saving and loading consist of.
impl DistModuleOptimizer {
    /// Passes on the state's tensors one by one, in the order of [`contents`](Self::contents), on
    /// rank 0 or on all ranks. All ranks make this call.
    fn collect(
        &self,
        own: &OwnStates,
        everywhere: bool,
        mut each: impl FnMut(TensorData),
    ) -> Result<()> {
        let comm = self.world.comm();
        for shard in &self.shards {
            for slot in self.slots(&shard.bucket) {
                let values = self.slot_values(&shard.bucket, slot.name);
                let local = shard.state(slot.name, slot.dtype.resolve(values.dtype));
                let whole = match values.kind {
                    BucketKind::Replicated => local,
                    BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements
                        if everywhere =>
                    {
                        comm.all_gather(local, &values.counts.to_vec())?.wait()?
                    }
                    BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                        comm.gather(local, &values.counts.to_vec(), 0)?.wait()?
                    }
                };
                if everywhere || comm.rank() == 0 {
                    unpack(&values, whole, |index, bytes, dtype| {
                        let shape = self.recorded_shape(index, slot.name);
                        each(TensorData::from_bytes(bytes, shape, dtype));
                    });
                }
            }
        }
        self.collect_own(own, everywhere, each)
    }

    /// This rank's parts of all owned parameters, and its slices of those that are cut, with their
    /// paths, in the order of the model.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a model that was not divided as the optimizer's.
    fn divided<M: Module>(&self, model: &M) -> Result<Vec<(String, Tensor<1>)>> {
        let rank = self.world.rank();
        let mut found = parameters::of(model);
        self.cuts.restore_whole(&mut found, rank)?;
        let mut values: HashMap<String, Tensor<1>> =
            self.units.parts(model, rank)?.into_iter().collect();
        let mut slices = HeldSlices { cuts: &self.cuts, values: &mut values };
        parameters::visit(model, &mut slices);
        let divided = found.into_iter().filter_map(|found| {
            let value = values.remove(&found.path)?;
            Some((found.path, value))
        });
        Ok(divided.collect())
    }

    /// The whole of a divided parameter, flat, on rank 0. All ranks make this call.
    fn collect_whole(&self, path: &str, part: Tensor<1>) -> Result<Tensor<1>> {
        let slice = self.cuts.slice(path);
        let axes = slice.map_or(&[][..], |slice| slice.slices.axes());
        let group = self.layout.slice_group(axes);
        let held = match self.units.get(path).filter(|unit| unit.placement.is_owned()) {
            Some(unit) => {
                let comm = group.map_or(self.world.comm(), |group| &group.alike);
                let shards = comm.gather(unit.shard(&part), &unit.counts().to_vec(), 0)?.wait()?;
                if comm.rank() == 0 { unit.whole_of_shards(&shards) } else { shards }
            }
            None => part,
        };
        // The first of the ranks with each slice have it now.
        let Some((slice, group)) = slice.zip(group.filter(|group| group.grid.replica == 0)) else {
            return Ok(held);
        };
        let all = group.across.gather(held, &slice.counts(), 0)?.wait()?;
        Ok(if self.world.is_main() { slice.whole(&all) } else { all })
    }

    /// The sharded slots of a bucket, which are the same for all of its parameters up to their
    /// extent, and to those that only stacks have.
    fn slots(&self, bucket: &Bucket) -> Vec<Slot> {
        let most = bucket.parameters.iter().map(|index| self.parameter_slots(*index));
        most.max_by_key(Vec::len).expect("a bucket has parameters")
    }

    fn parameter_slots(&self, index: usize) -> Vec<Slot> {
        self.trained[index].slots(self.routing.updates())
    }

    /// The slot of a parameter, if it has it.
    fn slot(&self, index: usize, name: &str) -> Option<Slot> {
        self.parameter_slots(index).into_iter().find(|slot| slot.name == name)
    }

    /// The path of the model's parameter, and the name in its record, of a state.
    fn state_key(&self, index: usize, name: &str) -> (String, String) {
        let parameter = &self.trained[index];
        (self.model[parameter.model].path.clone(), parameter.recorded(name))
    }

    /// The shape of a slot in records.
    fn recorded_shape(&self, index: usize, name: &str) -> Vec<usize> {
        let parameter = &self.trained[index];
        let slot = self.slot(index, name).expect("the parameter has the slot");
        slot.extent.recorded(&parameter.shape, parameter.batch())
    }

    /// A bucket of the values that a slot has instead of one per element, without the parameters
    /// that do not have the slot.
    fn slot_values(&self, bucket: &Bucket, name: &str) -> Bucket {
        if bucket.kind != BucketKind::Matrices {
            return bucket.clone();
        }
        // Every piece is one matrix.
        let values = |piece: &Piece| {
            let [_, m, n] = self.trained[piece.parameter].batch();
            let slot = self.slot(piece.parameter, name);
            let values = slot.map_or(0, |slot| slot.extent.values([1, m, n]));
            Piece { start: piece.start / (m * n) * values, len: values, ..*piece }
        };
        let mut pieces = bucket.pieces.iter();
        let counts = bucket.counts.iter().map(|count| {
            // The pieces of a rank follow each other.
            let (mut elements, mut sum) = (0, 0);
            while elements < count {
                let piece = pieces.next().expect("the shards cover all pieces");
                elements += piece.len;
                sum += values(piece).len;
            }
            sum
        });
        let counts = counts.collect();
        let pieces = bucket.pieces.iter().map(values).filter(|piece| piece.len > 0).collect();
        Bucket { pieces, counts, ..bucket.clone() }
    }

    /// The identities of the model's parameters in the last step, by path.
    fn ids(&self) -> HashMap<String, u64> {
        let ids = self.model.iter().map(|parameter| (parameter.path.clone(), parameter.id.val()));
        ids.collect()
    }

    /// The names, types and shapes of the state under the names of Burn's record, with the given
    /// identities of the parameters by path.
    fn contents(
        &self,
        counters: &[Counter],
        own: &OwnStates,
        ids: &HashMap<String, u64>,
    ) -> Result<Contents> {
        let ids = self.identities(ids)?;
        let id = |index: usize| ids[self.trained[index].model];
        let mut contents = Contents::default();
        let plan =
            |contents: &mut Contents, index: usize, name: &str, dtype: DType, shape: Vec<usize>| {
                let parameter = &self.trained[index];
                let id = ids[parameter.model];
                let name = format!("{id}.{}", parameter.recorded(name));
                contents.tensors.push(Planned::new(name, dtype, shape, Some(id)));
            };
        for shard in &self.shards {
            let bucket = &shard.bucket;
            for slot in self.slots(bucket) {
                for index in self.slot_values(bucket, slot.name).by_parameter().into_keys() {
                    let shape = self.recorded_shape(index, slot.name);
                    plan(&mut contents, index, slot.name, slot.dtype.resolve(bucket.dtype), shape);
                }
            }
        }
        contents.tensors.extend(own.planned(id));
        contents.scalars.extend(own.scalars(id));
        for counter in counters {
            plan(&mut contents, counter.parameter, counter.name, DType::F32, vec![1]);
        }
        for (parameter, id) in self.model.iter().zip(&ids) {
            contents.metadata.insert(id.to_string(), parameter.path.clone());
            contents.scalars.insert(format!("{id}.__rank"), Scalar::from(parameter.shape.len()));
        }
        if let Some(LossScale { scale, steps, .. }) = &self.loss_scale {
            contents.scalars.insert(LOSS_SCALE.to_owned(), Scalar::from(*scale));
            contents.scalars.insert(LOSS_SCALE_STEPS.to_owned(), Scalar::from(*steps));
        }
        for parameter in &self.trained {
            let (id, name) = (ids[parameter.model], parameter.recorded(TIME));
            contents.scalars.insert(format!("{id}.{name}"), Scalar::from(parameter.time));
        }
        Ok(contents)
    }

    /// The identity of every parameter of the model, by which Burn keys the state.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a parameter without one, or with another parameter's.
    fn identities(&self, ids: &HashMap<String, u64>) -> Result<Vec<u64>> {
        let rank = self.world.rank();
        let mut paths = HashMap::new();
        let identities = self.model.iter().map(|parameter| {
            let path = parameter.path.as_str();
            let Some(id) = ids.get(path).copied() else {
                let remedy = "save the model that the optimizer trains";
                return Err(Error::parameter(path, rank, "it is not in the model", remedy));
            };
            match paths.insert(id, path) {
                None => Ok(id),
                Some(other) => Err(Error::parameter(
                    path,
                    rank,
                    format!("it has the identity of `{other}`, so both share one state"),
                    "give every parameter its own `ParamId`: clones keep it",
                )),
            }
        });
        identities.collect()
    }

    /// Takes over the states that fit, except of parameters that keep an empty state. Returns the
    /// differences of all ranks. All ranks make this call.
    fn take_over(
        &mut self,
        states: &States,
        mut unused: BTreeSet<String>,
    ) -> Result<Vec<Difference>> {
        let found = {
            let _busy = Busy::new(self.world.communicator());
            self.problems(states, &unused)
        };
        let mut problems = self.world.agree(found)?;
        let is_whole = |shard: &Shard| shard.bucket.kind == BucketKind::Whole;
        if self.world.size() > 1 && self.shards.iter().any(is_whole) {
            // Only its owner knows the problem of a whole parameter.
            problems = self.world.all_gather_value(&problems)?.into_iter().flatten().collect();
        }
        let missing = states.missing(&self.trained_paths(), &unused);
        let known: HashSet<_> = self.routing.routes().iter().map(|route| &*route.path).collect();
        let orphaned: BTreeSet<_> = states
            .paths()
            .filter(|path| !known.contains(path) && !unused.contains(*path))
            .collect();
        if !orphaned.is_empty() && self.world.is_main() {
            log::warn!(
                "optimizer states are dropped, since the model does not have their parameters: \
                 {orphaned:?}"
            );
        }
        unused.extend(problems.keys().cloned());
        let read = {
            let _busy = Busy::new(self.world.communicator());
            self.fill(states, &unused)
        };
        self.world.agree(read)?;
        let problems = problems.into_iter();
        let problems =
            problems.map(|(path, problem)| Difference::new(path, DifferenceKind::State, problem));
        Ok(problems.chain(missing).collect())
    }

    fn trained_paths(&self) -> TrainedPaths {
        TrainedPaths::all(self.model.iter().map(|parameter| &*parameter.path))
    }

    /// The problems of saved states that do not fit, by the path of their parameter. Of whole
    /// parameters, only this rank's.
    fn problems(
        &self,
        states: &States,
        unused: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, String>> {
        let mut problems = BTreeMap::new();
        let mut requested = HashSet::new();
        for (index, parameter) in self.trained.iter().enumerate() {
            let path = &self.model[parameter.model].path;
            if unused.contains(path) || !states.knows(path) {
                continue;
            }
            let mut found = vec![];
            let mut look = |name: &str, expected: (&[usize], DType), is_optional| match find(
                states,
                (path, name),
                expected,
                is_optional,
            ) {
                Ok(name) => requested.extend(name),
                Err(problem) => found.push(problem),
            };
            for slot in self.parameter_slots(index) {
                let (_, name) = self.state_key(index, slot.name);
                let shape = self.recorded_shape(index, slot.name);
                look(&name, (&shape, slot.dtype.resolve(parameter.dtype)), slot.is_optional());
            }
            for slot in parameter.counters(self.routing.updates()) {
                let (_, name) = self.state_key(index, slot.name);
                // Burn's AdamW has the number of steps instead.
                look(&name, (&[1], DType::F32), states.burns_time(path).is_some());
            }
            if matches!(parameter.kind, Kind::Whole { .. }) {
                let (tensors, _) = states.under(path, OWN_STATE);
                requested.extend(tensors.into_iter().map(|(_, name)| name));
                found.extend(self.own_problem(index, states)?);
            }
            let problem = states.refusal(path).or(found.into_iter().next());
            if let Some(problem) = problem {
                problems.entry(path.clone()).or_insert(problem);
            }
        }
        let mut rest: Vec<_> =
            states.tensors().filter(|(_, name)| !requested.contains(name)).collect();
        rest.sort_unstable();
        for (path, name) in rest.into_iter().filter(|(path, _)| !unused.contains(*path)) {
            let is_at = |known: &str| known == path;
            let is_trained = self.model.iter().any(|parameter| is_at(&parameter.path));
            let is_frozen = !is_trained && self.routing.routes().iter().any(|r| is_at(&r.path));
            let problem = match states.archive().state_key(name) {
                Some((.., state)) if is_trained => unused_slot(state),
                _ if is_frozen => "expected none, since it is not trained".to_owned(),
                _ => continue,
            };
            problems.entry(path.to_owned()).or_insert(problem);
        }
        Ok(problems)
    }

    /// Reads this rank's shards. The states of `unused` parameters become empty.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a state can't be read.
    fn fill(&mut self, states: &States, unused: &BTreeSet<String>) -> Result<()> {
        let (rank, device) = (self.world.rank(), self.device());
        for shard in 0..self.shards.len() {
            for slot in self.slots(&self.shards[shard].bucket) {
                let values = self.slot_values(&self.shards[shard].bucket, slot.name);
                let dtype = slot.dtype.resolve(values.dtype);
                let mut part = HostShard::new(values.shard_range(rank), dtype);
                for (index, runs) in values.by_parameter() {
                    let (path, name) = self.state_key(index, slot.name);
                    let found = states.find(&path, &name).filter(|_| !unused.contains(&path));
                    if let Some((found, _)) = found.filter(|_| part.takes(&runs)) {
                        let data = states.archive().data(found)?.convert_dtype(dtype);
                        part.take(&data, &runs);
                    }
                }
                let count = part.range.len();
                let data = TensorData::from_bytes_vec(part.bytes, [count], dtype);
                let data = Tensor::<1>::from_data(data, (&device, dtype));
                self.shards[shard].set_state(slot.name, &data);
            }
        }
        self.fill_own(states, unused)?;
        let rule = self.routing.updates().rest.rule;
        self.set_counters(|path, name| {
            if unused.contains(path) {
                return Ok(0.0);
            }
            if let Some((found, _)) = states.find(path, name) {
                let data = states.archive().data(found)?;
                return Ok(data.iter::<f32>().next().unwrap_or(0.0));
            }
            let steps = states.burns_time(path).unwrap_or(0);
            let mut corrections = CORRECTIONS.iter().zip(rule.corrections_after(steps));
            let correction = corrections.find(|(slot, _)| slot.name == name);
            Ok(correction.map_or(0.0, |(_, value)| value as f32))
        })?;
        for index in 0..self.trained.len() {
            let (path, name) = self.state_key(index, TIME);
            let time = states.time(&path, &name).or_else(|| states.burns_time(&path));
            self.trained[index].time = time.filter(|_| !unused.contains(&path)).unwrap_or(0);
        }
        if let Some(LossScale { scale, steps, .. }) = &mut self.loss_scale {
            // A file of a run without loss scaling does not have them.
            let saved = states.scalar(LOSS_SCALE).and_then(|saved| saved.try_into().ok());
            *scale = saved.unwrap_or(*scale);
            let saved = states.scalar(LOSS_SCALE_STEPS).and_then(|saved| saved.try_into().ok());
            *steps = saved.unwrap_or(0);
        }
        // Damage to states that no parameter needs is also detected: the ranks divide that work.
        let is_read = |path: &str| {
            !unused.contains(path) && self.model.iter().any(|parameter| parameter.path == path)
        };
        let (first, every) = (self.world.rank(), self.world.size());
        let unread = states.unread(is_read).into_iter().skip(first).step_by(every);
        unread.into_iter().try_for_each(|name| states.archive().verify(name))?;
        self.diverged = self.none_diverged();
        self.start_counting();
        Ok(())
    }
}

impl Divided for DistModuleOptimizer {
    fn whole_shape(&self, path: &str) -> Option<Vec<usize>> {
        Some(self.cuts.slice(path)?.slices.whole().to_vec())
    }

    fn part(&self, path: &str, whole: Tensor<1>) -> Tensor<1> {
        let held = self.cuts.slice(path).map_or(whole.clone(), |slice| slice.of(&whole));
        match self.units.get(path).filter(|unit| unit.placement.is_owned()) {
            Some(unit) => unit.part(held),
            None => held,
        }
    }
}

/// Collects this rank's slices of the parameters that are not owned.
struct HeldSlices<'a> {
    cuts: &'a Cuts,
    /// The parts of those that are.
    values: &'a mut HashMap<String, Tensor<1>>,
}

impl Visit for HeldSlices<'_> {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let path = parameters::path(fields);
        if self.cuts.slice(&path).is_some() && !self.values.contains_key(&path) {
            self.values.insert(path, param.val().without_autodiff().reshape([-1]));
        }
    }
}

/// A counter of one parameter, a tensor of one element in records.
struct Counter {
    /// Index of the parameter in the plan.
    parameter: usize,
    name: &'static str,
    value: f32,
}

/// The counters of parameters, of which a record has one tensor each.
impl DistModuleOptimizer {
    /// Returns `true` if the state of a parameter has a counter.
    fn has_counter(&self, index: usize, slot: &Slot) -> bool {
        self.trained[index].counters(self.routing.updates()).contains(slot)
    }

    /// The counters of all parameters, which are the same on all ranks.
    fn counters(&self) -> Vec<Counter> {
        let counters = COUNTERS.iter().zip(self.counters.values()).flat_map(|(slot, tensor)| {
            let values: Vec<f32> = tensor.to_data().iter::<f32>().collect();
            let values = values.into_iter().enumerate();
            let values = values.filter(|(index, _)| self.has_counter(*index, slot));
            values.map(|(parameter, value)| Counter { parameter, name: slot.name, value })
        });
        counters.collect()
    }

    /// Sets the counters of all parameters by their paths and names.
    fn set_counters(&mut self, mut value: impl FnMut(&str, &str) -> Result<f32>) -> Result<()> {
        let device = self.device();
        let mut read = |slot: &Slot| -> Result<Tensor<1>> {
            let values = self.trained.iter().enumerate().map(|(index, parameter)| {
                match self.has_counter(index, slot) {
                    true => {
                        let path = &self.model[parameter.model].path;
                        value(path, &parameter.recorded(slot.name))
                    }
                    false => Ok(0.0),
                }
            });
            let values = values.collect::<Result<Vec<f32>>>()?;
            Ok(Tensor::from_data(TensorData::from(&*values), (&device, DType::F32)))
        };
        let [skipped, first, second] = COUNTERS;
        let skipped = read(&skipped)?;
        self.counters = Counters { skipped, corrections: [read(&first)?, read(&second)?] };
        Ok(())
    }
}

/// A run of a parameter's values in the buffer of its bucket: its start in the parameter, its start
/// in the buffer, and its length.
type Run = (usize, usize, usize);

/// A rank's part of a bucket's buffer, in host memory.
struct HostShard {
    range: Range<usize>,
    /// Bytes of an element.
    size: usize,
    bytes: Vec<u8>,
}

impl HostShard {
    fn new(range: Range<usize>, dtype: DType) -> Self {
        let size = dtype.size();
        Self { bytes: vec![0; range.len() * size], range, size }
    }

    /// The part of a run that is in the shard, as a range of the buffer.
    fn clip(&self, (_, start, len): Run) -> Range<usize> {
        start.max(self.range.start)..(start + len).min(self.range.end)
    }

    /// Returns `true` if the shard has values of the runs.
    fn takes(&self, runs: &[Run]) -> bool {
        runs.iter().any(|run| !self.clip(*run).is_empty())
    }

    /// Copies the values of a parameter that are in the shard.
    fn take(&mut self, data: &TensorData, runs: &[Run]) {
        for run in runs {
            let part = self.clip(*run);
            if part.is_empty() {
                continue;
            }
            let (first, start, _) = *run;
            let from = (first + part.start - start) * self.size;
            let to = (part.start - self.range.start) * self.size;
            let count = part.len() * self.size;
            self.bytes[to..to + count].copy_from_slice(&data.as_bytes()[from..from + count]);
        }
    }
}

/// Cuts the buffer of a bucket into the values of its parameters, in the order of their indices.
fn unpack(bucket: &Bucket, whole: Tensor<1>, mut each: impl FnMut(usize, Bytes, DType)) {
    let elements = whole.dims()[0];
    let (bytes, _, dtype) = whole.into_data().into_parts();
    let parameters = bucket.by_parameter();
    // The buffer of a single parameter is passed on without a copy: such a bucket can be the
    // largest.
    if let Some((number, runs)) = parameters.first_key_value()
        && runs.iter().all(|(first, start, _)| first == start)
        && runs.iter().map(|(.., len)| len).sum::<usize>() == elements
    {
        return each(*number, bytes, dtype);
    }
    let size = dtype.size();
    for (number, runs) in parameters {
        let mut values = Vec::with_capacity(runs.iter().map(|(.., len)| len * size).sum());
        for (_, start, len) in runs {
            values.extend_from_slice(&bytes[start * size..(start + len) * size]);
        }
        each(number, Bytes::from_bytes_vec(values), dtype);
    }
}

/// The name of a parameter's state in the archive; `None` if the archive does not have the
/// parameter, or its state if that is optional. The error is the problem of a state that has
/// another number or type of values.
fn find<'a>(
    states: &'a States,
    (path, name): (&str, &str),
    (shape, dtype): (&[usize], DType),
    is_optional: bool,
) -> Result<Option<&'a str>, String> {
    match states.find(path, name) {
        Some((found, stored)) if stored.shape == shape && fits(stored.dtype, dtype) => {
            Ok(Some(found))
        }
        Some((_, stored)) => Err(format!(
            "its saved `{name}` does not fit: expected {shape:?} of {}, got {:?} of {}",
            dtype.name(),
            stored.shape,
            stored.dtype.name()
        )),
        None if states.knows(path) && !is_optional => Err(missing(name)),
        None => Ok(None),
    }
}

/// Returns `true` if a state of type `dtype` can be read from a saved type: one of another
/// [`StateDtype`](crate::StateDtype), or of an older version.
fn fits(stored: DType, dtype: DType) -> bool {
    let may_differ = |dtype| dtype == DType::F32 || is_half(dtype);
    stored == dtype || may_differ(stored) && may_differ(dtype)
}

/// Writes the next tensor of a checkpoint, unless one before it could not be written.
fn put(saving: &mut Result<Saving>, data: impl FnOnce() -> TensorData) {
    if let Ok(open) = saving
        && let Err(error) = open.put(data())
    {
        *saving = Err(error);
    }
}

impl Checkpointed for DistModuleOptimizer {
    fn save_run<M: Module, T: Serialize>(
        &self,
        saver: &mut Saver,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        self.save_by(saver, path, model, progress)
    }

    fn load_run<M: Module, T: DeserializeOwned>(
        mut self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T, Vec<Difference>)> {
        let opened = {
            let _busy = Busy::new(self.world.communicator());
            let parts = self.divided(&model);
            parts.and_then(|_| Archive::open(path))
        };
        // Gradients of the values that are replaced.
        self.units.discard()?;
        self.units.forget_parts();
        let archive = self.world.agree(opened)?;
        self.compare(&archive)?;
        let read = {
            let _busy = Busy::new(self.world.communicator());
            let progress = archive.progress();
            progress.and_then(|progress| {
                Ok((checkpoint::load_model(&archive, model, &self)?, progress))
            })
        };
        let ((model, mut differences), progress) = self.world.agree(read)?;
        let unused = differences.iter().map(|difference| difference.parameter.clone()).collect();
        differences.extend(self.take_over(&States::new(archive), unused)?);
        Ok((model, self, progress, differences))
    }
}

#[cfg(test)]
mod tests {
    use burn_pack::MAX_TENSOR_COUNT;

    use super::*;

    #[test]
    fn a_record_of_more_tensors_than_burn_reads_is_an_error_with_a_remedy() {
        let record = |count: usize| {
            let planned = |index: usize| Planned {
                name: format!("{index}.momentum"),
                dtype: DType::F32,
                shape: vec![1],
                id: Some(index as u64),
                bytes: 4,
            };
            let contents =
                Contents { tensors: (0..count).map(planned).collect(), ..Contents::default() };
            recorded(contents, vec![TensorData::from([0.0f32]); count])
        };
        assert!(record(3).is_ok());
        let error = record(MAX_TENSOR_COUNT + 1).unwrap_err().to_string();
        assert!(error.contains("100001 tensors") && error.contains("::save"), "{error}");
    }
}
