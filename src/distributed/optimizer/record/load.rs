//! The states of a record or a checkpoint, each taken over by the ranks that have its parameter.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use super::super::DistModuleOptimizer;
use super::super::bucket_shard::Shard;
use super::super::custom_states::{fill_own, own_problem};
use super::super::divided_model::DividedModel;
use super::super::loss_scale::LossScale;
use super::super::step_counts::Counters;
use super::contents::{LOSS_SCALE, LOSS_SCALE_STEPS};
use crate::checkpoint::{Archive, States};
use crate::comm::World;
use crate::distributed::busy::Busy;
use crate::distributed::plan::{BucketKind, InBuffer};
use crate::distributed::trainable::UpdateKind;
use crate::error::{Error, Result};
use crate::host;
use crate::load_difference::{Difference, DifferenceKind};
use crate::update::{
    CORRECTIONS, ElementwiseRule, OWN_STATE, TIME, is_half, missing, unused as unused_slot,
};

/// Fails for ranks that are about to load another file than rank 0.
pub fn compare(archive: &Archive, world: &World) -> Result<()> {
    type Described = (u64, String);
    let local = (archive.digest(), archive.describe());
    // Descriptions contain paths, which may differ.
    let difference = |first: &Described, local: &Described| {
        (first.0 != local.0).then(|| (first.1.clone(), local.1.clone()))
    };
    match world.compare(&local, difference)? {
        Some((rank, (expected, got))) => Err(Error::CheckpointsDiffer { rank, expected, got }),
        None => Ok(()),
    }
}

impl DistModuleOptimizer {
    /// Takes over the states that fit, except of parameters that keep an empty state. Returns the
    /// differences of all ranks. All ranks make this call.
    pub(super) fn take_over(
        &mut self,
        states: &States,
        mut unused: BTreeSet<String>,
    ) -> Result<Vec<Difference>> {
        let found = {
            let _busy = Busy::new(self.divided.world.communicator());
            problems(&self.divided, &self.shards, states, &unused)
        };
        let mut problems = self.divided.world.agree(found)?;
        let is_whole = |shard: &Shard| shard.bucket.kind == BucketKind::Whole;
        if self.divided.world.size() > 1 && self.shards.iter().any(is_whole) {
            // Only its owner knows the problem of a whole parameter.
            let joined = |of_all: Vec<BTreeMap<_, _>>| of_all.into_iter().flatten().collect();
            problems = self.divided.world.combine_on_rank_0(&problems, joined)?;
        }
        let missing = states.missing(&self.divided.trained_paths(), &unused);
        let orphans = orphans(&self.divided, states, &unused);
        // A state with a problem is not taken over: its parameter begins with an empty one.
        unused.extend(problems.keys().cloned());
        let read = {
            let _busy = Busy::new(self.divided.world.communicator());
            self.fill(states, &unused)
        };
        self.divided.world.agree(read)?;
        let problems = problems
            .into_iter()
            .map(|(path, problem)| Difference::new(path, DifferenceKind::State, problem));
        Ok(problems.chain(orphans).chain(missing).collect())
    }

    /// Reads this rank's states. `unused` parameters get empty ones.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a state can't be read.
    fn fill(&mut self, states: &States, unused: &BTreeSet<String>) -> Result<()> {
        let Self { divided, shards, accounts, scaling, checks, .. } = self;
        checks.step.forget();
        checks.audits.forget();
        fill_shards(shards, divided, states, unused)?;
        fill_own(shards, divided, states, unused)?;
        accounts.counters = saved_counters(divided, states, unused)?;
        for index in 0..divided.trainable.len() {
            let (path, name) = divided.state_key(index, TIME);
            let time = states.time(&path, &name).or_else(|| states.burns_time(&path));
            divided.trainable[index].time = time.filter(|_| !unused.contains(&path)).unwrap_or(0);
        }
        if let Some(LossScale { scale, steps, .. }) = &mut scaling.loss_scale {
            // A file of a run without loss scaling does not have them.
            let saved = states.scalar(LOSS_SCALE).and_then(|saved| saved.try_into().ok());
            *scale = saved.unwrap_or(*scale);
            let saved = states.scalar(LOSS_SCALE_STEPS).and_then(|saved| saved.try_into().ok());
            *steps = saved.unwrap_or(0);
        }
        verify_unread(divided, states, unused)?;
        accounts.forget_diverged();
        accounts.start_counting(divided);
        Ok(())
    }
}

/// The states whose parameters the model does not have. A checkpoint has their weights too, which
/// make them `unused`.
fn orphans(divided: &DividedModel, states: &States, unused: &BTreeSet<String>) -> Vec<Difference> {
    let known: HashSet<_> = divided.routing.routes().iter().map(|route| &*route.path).collect();
    let orphaned: BTreeSet<_> =
        states.paths().filter(|path| !known.contains(path) && !unused.contains(*path)).collect();
    let problem = "expected none, since the model does not have the parameter";
    let orphaned = orphaned.into_iter();
    orphaned.map(|path| Difference::new(path, DifferenceKind::State, problem)).collect()
}

/// A state that a parameter needs.
struct NeededState<'a> {
    /// The path of the model's parameter.
    path: &'a str,
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    is_optional: bool,
}

/// The states that a parameter needs, without those that users' optimizers made.
fn needed<'a>(divided: &'a DividedModel, index: usize, states: &States) -> Vec<NeededState<'a>> {
    let (path, parameter) = (&*divided.of_model(index).path, &divided.trainable[index]);
    let slots = divided.parameter_slots(index).into_iter().map(|slot| NeededState {
        path,
        name: divided.state_key(index, slot.name).1,
        shape: divided.recorded_shape(index, slot.name),
        dtype: slot.dtype.resolve(parameter.dtype),
        is_optional: slot.is_optional(),
    });
    let counters = parameter.counters(divided.routing.updates()).into_iter();
    let counters = counters.map(|slot| NeededState {
        path,
        name: divided.state_key(index, slot.name).1,
        shape: vec![1],
        dtype: DType::F32,
        // Burn's AdamW has the number of steps instead.
        is_optional: states.burns_time(path).is_some(),
    });
    slots.chain(counters).collect()
}

impl NeededState<'_> {
    /// The name of the state in the archive; `None` if the archive does not have the parameter, or
    /// its state if that is optional. The error is the problem of a state that has another number
    /// or type of values.
    fn find<'a>(&self, states: &'a States) -> Result<Option<&'a str>, String> {
        let Self { path, name, shape, dtype, is_optional } = self;
        match states.find(path, name) {
            Some((found, stored)) if stored.shape == *shape && fits(stored.dtype, *dtype) => {
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
}

/// Returns `true` if a state of type `dtype` can be read from a saved type: one of another
/// [`StateDtype`](crate::StateDtype), or of an older version.
fn fits(stored: DType, dtype: DType) -> bool {
    let may_differ = |dtype| dtype == DType::F32 || is_half(dtype);
    stored == dtype || may_differ(stored) && may_differ(dtype)
}

/// The problems of saved states that do not fit, by the path of their parameter. Of whole
/// parameters, only this rank's.
fn problems(
    divided: &DividedModel,
    shards: &[Shard],
    states: &States,
    unused: &BTreeSet<String>,
) -> Result<BTreeMap<String, String>> {
    let (mut problems, mut requested) = (BTreeMap::new(), HashSet::new());
    for (index, parameter) in divided.trainable.iter().enumerate() {
        let path = &divided.of_model(index).path;
        if unused.contains(path) || !states.knows(path) {
            continue;
        }
        let mut found = vec![];
        for needed in needed(divided, index, states) {
            match needed.find(states) {
                Ok(name) => requested.extend(name),
                Err(problem) => found.push(problem),
            }
        }
        if matches!(parameter.kind, UpdateKind::Whole { .. }) {
            let (tensors, _) = states.under(path, OWN_STATE);
            requested.extend(tensors.into_iter().map(|(_, name)| name));
            found.extend(own_problem(divided, shards, index, states)?);
        }
        let problem = states.refusal(path).or(found.into_iter().next());
        if let Some(problem) = problem {
            problems.entry(path.clone()).or_insert(problem);
        }
    }
    let mut rest: Vec<_> = states.tensors().filter(|(_, name)| !requested.contains(name)).collect();
    rest.sort_unstable();
    for (path, name) in rest.into_iter().filter(|(path, _)| !unused.contains(*path)) {
        if let Some(problem) = problem_of_rest(divided, states, path, name) {
            problems.entry(path.to_owned()).or_insert(problem);
        }
    }
    Ok(problems)
}

/// The problem of a state that no parameter has requested.
fn problem_of_rest(
    divided: &DividedModel,
    states: &States,
    path: &str,
    name: &str,
) -> Option<String> {
    let is_at = |known: &str| known == path;
    let is_trained = divided.parameters.iter().any(|parameter| is_at(&parameter.path));
    let is_frozen = !is_trained && divided.routing.routes().iter().any(|r| is_at(&r.path));
    match states.archive().state_key(name) {
        Some((.., state)) if is_trained => Some(unused_slot(state)),
        _ if is_frozen => Some("expected none, since it is not trained".to_owned()),
        _ => None,
    }
}

/// Reads the slots of this rank's shards.
fn fill_shards(
    shards: &mut [Shard],
    divided: &DividedModel,
    states: &States,
    unused: &BTreeSet<String>,
) -> Result<()> {
    let (rank, device) = (divided.world.rank(), divided.device());
    for shard in shards {
        for slot in divided.slots(&shard.bucket) {
            let values = divided.slot_values(&shard.bucket, slot.name);
            let dtype = slot.dtype.resolve(values.dtype);
            let mut part = HostShard::new(values.shard_range(rank), dtype);
            for (index, segments) in values.by_parameter() {
                let (path, name) = divided.state_key(index, slot.name);
                let found = states.find(&path, &name).filter(|_| !unused.contains(&path));
                if let Some((found, _)) = found.filter(|_| part.takes(&segments)) {
                    let data = states.archive().data(found)?.convert_dtype(dtype);
                    part.take(&data, &segments);
                }
            }
            shard.set_state(slot.name, &part.into_tensor(dtype, &device));
        }
    }
    Ok(())
}

/// The rule of the update element by element of every trained parameter, which nothing reads where
/// the parameter has another.
fn rules_by_path(divided: &DividedModel) -> HashMap<&str, ElementwiseRule> {
    let updates = divided.routing.updates();
    (0..divided.trainable.len())
        .map(|index| {
            let settings = match divided.trainable[index].kind {
                UpdateKind::Elementwise { settings, .. } => settings,
                UpdateKind::Muon { .. } | UpdateKind::Whole { .. } => 0,
            };
            (&*divided.of_model(index).path, updates.rest[settings].rule)
        })
        .collect()
}

/// The saved counters of all parameters: 0 for `unused` ones.
fn saved_counters(
    divided: &DividedModel,
    states: &States,
    unused: &BTreeSet<String>,
) -> Result<Counters> {
    let rules = rules_by_path(divided);
    divided.counters(|path, name| {
        if unused.contains(path) {
            return Ok(0.0);
        }
        if let Some((found, _)) = states.find(path, name) {
            let data = states.archive().data(found)?;
            return Ok(data.iter::<f32>().next().unwrap_or(0.0));
        }
        let steps = states.burns_time(path).unwrap_or(0);
        let mut corrections = CORRECTIONS.iter().zip(rules[path].corrections_after(steps));
        let correction = corrections.find(|(slot, _)| slot.name == name);
        Ok(correction.map_or(0.0, |(_, value)| value as f32))
    })
}

/// Looks for damage to states that no parameter needs: the ranks divide that work.
fn verify_unread(divided: &DividedModel, states: &States, unused: &BTreeSet<String>) -> Result<()> {
    let is_read = |path: &str| {
        !unused.contains(path) && divided.parameters.iter().any(|known| known.path == path)
    };
    let (first, every) = (divided.world.rank(), divided.world.size());
    let unread = states.unread(is_read).into_iter().skip(first).step_by(every);
    unread.into_iter().try_for_each(|name| states.archive().verify(name))
}

/// A rank's part of a bucket's buffer, in host memory.
struct HostShard {
    range: Range<usize>,
    /// Bytes of an element.
    size: usize,
    bytes: Bytes,
}

impl HostShard {
    fn new(range: Range<usize>, dtype: DType) -> Self {
        let size = dtype.size();
        Self { bytes: host::zeros(range.len() * size, dtype), range, size }
    }

    /// The elements of a segment that are in the shard, as a range of the buffer.
    fn clip(&self, InBuffer { start, len, .. }: InBuffer) -> Range<usize> {
        start.max(self.range.start)..(start + len).min(self.range.end)
    }

    /// Returns `true` if the shard has elements of the segments.
    fn takes(&self, segments: &[InBuffer]) -> bool {
        segments.iter().any(|segment| !self.clip(*segment).is_empty())
    }

    /// Copies the values of a parameter that are in the shard.
    fn take(&mut self, data: &TensorData, segments: &[InBuffer]) {
        for segment in segments {
            let part = self.clip(*segment);
            if part.is_empty() {
                continue;
            }
            let InBuffer { first, start, .. } = *segment;
            let from = (first + part.start - start) * self.size;
            let to = (part.start - self.range.start) * self.size;
            let count = part.len() * self.size;
            self.bytes[to..to + count].copy_from_slice(&data.as_bytes()[from..from + count]);
        }
    }

    fn into_tensor(self, dtype: DType, device: &Device) -> Tensor<1> {
        let data = TensorData::from_bytes(self.bytes, [self.range.len()], dtype);
        Tensor::from_data(data, (device, dtype))
    }
}
