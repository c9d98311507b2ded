//! The names, types and shapes of the states in records and checkpoints.

use std::collections::{BTreeMap, HashMap};

use burn::optim::OptimizerRecord;
use burn::tensor::{DType, Tensor, TensorData};
use burn_pack::{Scalar, Writer};

use super::super::custom_states::{OwnStates, Receivers};
use super::super::divided_model::DividedModel;
use super::super::loss_scale::LossScale;
use super::super::step_counts::{COUNTERS, Counters};
use crate::checkpoint::{Contents, Planned, TrainedPaths};
use crate::distributed::plan::{Bucket, BucketKind, InBuffer, Piece};
use crate::error::{Error, Result};
use crate::update::{Slot, TIME};

/// Names of the scale of the loss, and of the steps since it changed, in records.
pub const LOSS_SCALE: &str = "loss_scale";
pub const LOSS_SCALE_STEPS: &str = "loss_scale_steps";

/// A counter of one parameter, a tensor of one element in records.
pub struct Counter {
    /// Index of the parameter in the plan.
    pub parameter: usize,
    pub name: &'static str,
    pub value: f32,
}

/// The values of a parameter in a slot that this rank passes on or writes.
pub struct HeldValues {
    /// Index of the parameter in the plan.
    pub parameter: usize,
    /// The shape of all values of the parameter.
    shape: Vec<usize>,
    /// The segments of the held values in the buffer that the rank has, in the order of the
    /// parameter.
    pub segments: Vec<InBuffer>,
}

impl HeldValues {
    pub fn count(&self) -> usize {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    /// The shape of the values that are held: flat unless these are all.
    pub fn shape(&self) -> Vec<usize> {
        if self.is_whole() { self.shape.clone() } else { vec![self.count()] }
    }

    fn is_whole(&self) -> bool {
        self.count() == self.shape.iter().product::<usize>()
    }

    /// The tensor in a file, given the whole.
    fn planned(&self, whole: Planned) -> Planned {
        let range = |segment: &InBuffer| segment.first..segment.first + segment.len;
        match self.is_whole() {
            true => whole,
            false => whole.excerpt(self.segments.iter().map(range).collect()),
        }
    }
}

impl DividedModel {
    /// The sharded slots of a bucket, which are the same for all of its parameters up to their
    /// extent, and to those that only stacks have.
    pub fn slots(&self, bucket: &Bucket) -> Vec<Slot> {
        let most = bucket.parameters.iter().map(|index| self.parameter_slots(*index));
        // Stacks have all slots of the others, and further ones.
        most.max_by_key(Vec::len).expect("a bucket has parameters")
    }

    /// The sharded slots of all buckets, in the order in which they are recorded.
    pub fn slots_of_buckets(&self) -> impl Iterator<Item = (&Bucket, Slot)> {
        let buckets = self.plan.buckets().iter();
        buckets.flat_map(|bucket| self.slots(bucket).into_iter().map(move |slot| (bucket, slot)))
    }

    /// The sharded slots of a parameter.
    pub fn parameter_slots(&self, index: usize) -> Vec<Slot> {
        self.trainable[index].slots(self.routing.updates())
    }

    /// The slot of a parameter, if it has it.
    fn slot(&self, index: usize, name: &str) -> Option<Slot> {
        self.parameter_slots(index).into_iter().find(|slot| slot.name == name)
    }

    /// The path of the model's parameter, and the name in its record, of a state.
    pub fn state_key(&self, index: usize, name: &str) -> (String, String) {
        let parameter = &self.trainable[index];
        (self.of_model(index).path.clone(), parameter.recorded(name))
    }

    /// The shape of a slot in records.
    pub fn recorded_shape(&self, index: usize, name: &str) -> Vec<usize> {
        let parameter = &self.trainable[index];
        let slot = self.slot(index, name).expect("the parameter has the slot");
        slot.extent.recorded(&parameter.shape, parameter.batch())
    }

    /// A bucket of the values that a slot has instead of one per element, without the parameters
    /// that do not have the slot.
    pub fn slot_values(&self, bucket: &Bucket, name: &str) -> Bucket {
        if bucket.kind != BucketKind::Matrices {
            return bucket.clone();
        }
        // Every piece is one matrix.
        let values = |piece: &Piece| {
            let [_, m, n] = self.trainable[piece.parameter].batch();
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

    /// The values of a [slot](Self::slot_values) that this rank receives, by its
    /// [number](Self::slots_of_buckets), in the order in which they are recorded.
    pub fn held_values(
        &self,
        number: usize,
        (values, name): (&Bucket, &str),
        receivers: Receivers,
    ) -> Vec<HeldValues> {
        let rank = self.world.rank();
        let parameters = match receivers {
            Receivers::All => values.by_parameter(),
            Receivers::Main if rank == 0 => values.by_parameter(),
            Receivers::Main => BTreeMap::new(),
            Receivers::Holders(writers) => match writers[number] {
                Some(writer) if writer != rank => BTreeMap::new(),
                _ => values.of_rank(rank),
            },
        };
        let held = parameters.into_iter().map(|(parameter, segments)| {
            let shape = self.recorded_shape(parameter, name);
            HeldValues { parameter, shape, segments }
        });
        held.collect()
    }

    /// The identities of the model's parameters in the last step, by path.
    pub fn ids(&self) -> HashMap<String, u64> {
        let ids =
            self.parameters.iter().map(|parameter| (parameter.path.clone(), parameter.id.val()));
        ids.collect()
    }

    /// The names, types and shapes of the state under the names of Burn's record, with the given
    /// identities of the parameters by path: what this rank receives.
    pub fn contents(
        &self,
        (counters, own): (&[Counter], &OwnStates),
        ids: &HashMap<String, u64>,
        loss_scale: Option<&LossScale>,
        receivers: Receivers,
    ) -> Result<Contents> {
        let ids = self.identities(ids)?;
        let id = |index: usize| ids[self.trainable[index].model];
        let mut contents = Contents::default();
        let whole = |index: usize, name: &str, dtype: DType, shape: Vec<usize>| {
            let parameter = &self.trainable[index];
            let id = ids[parameter.model];
            let name = format!("{id}.{}", parameter.recorded(name));
            Planned::new(name, dtype, shape, Some(id))
        };
        for (number, (bucket, slot)) in self.slots_of_buckets().enumerate() {
            let (values, dtype) =
                (self.slot_values(bucket, slot.name), slot.dtype.resolve(bucket.dtype));
            let held = self.held_values(number, (&values, slot.name), receivers);
            let planned = held.iter().map(|held| {
                held.planned(whole(held.parameter, slot.name, dtype, held.shape.clone()))
            });
            contents.tensors.extend(planned);
        }
        contents.tensors.extend(own.planned(id));
        contents.scalars.extend(own.scalars(id));
        for counter in counters {
            let planned = whole(counter.parameter, counter.name, DType::F32, vec![1]);
            contents.tensors.push(planned);
        }
        for (parameter, id) in self.parameters.iter().zip(&ids) {
            contents.metadata.insert(id.to_string(), parameter.path.clone());
            contents.scalars.insert(format!("{id}.__rank"), Scalar::from(parameter.shape.len()));
        }
        if let Some(LossScale { scale, steps, .. }) = loss_scale {
            contents.scalars.insert(LOSS_SCALE.to_owned(), Scalar::from(*scale));
            contents.scalars.insert(LOSS_SCALE_STEPS.to_owned(), Scalar::from(*steps));
        }
        for parameter in &self.trainable {
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
        let identities = self.parameters.iter().map(|parameter| {
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

    /// The paths of the parameters that are trained.
    pub fn trained_paths(&self) -> TrainedPaths {
        TrainedPaths::all(self.parameters.iter().map(|parameter| &*parameter.path))
    }

    /// Returns `true` if the state of a parameter has a counter.
    fn has_counter(&self, index: usize, slot: &Slot) -> bool {
        self.trainable[index].counters(self.routing.updates()).contains(slot)
    }

    /// The counters of all parameters, which are the same on all ranks.
    pub fn recorded_counters(&self, counters: &Counters) -> Vec<Counter> {
        let counters = COUNTERS.iter().zip(counters.values()).flat_map(|(slot, tensor)| {
            let values: Vec<f32> = tensor.to_data().iter::<f32>().collect();
            let values =
                values.into_iter().enumerate().filter(|(index, _)| self.has_counter(*index, slot));
            values.map(|(parameter, value)| Counter { parameter, name: slot.name, value })
        });
        counters.collect()
    }

    /// The counters of all parameters by their paths and names.
    pub fn counters(&self, mut value: impl FnMut(&str, &str) -> Result<f32>) -> Result<Counters> {
        let device = self.device();
        let mut read = |slot: &Slot| -> Result<Tensor<1>> {
            let values = self.trainable.iter().enumerate().map(|(index, parameter)| {
                match self.has_counter(index, slot) {
                    true => value(&self.of_model(index).path, &parameter.recorded(slot.name)),
                    false => Ok(0.0),
                }
            });
            let values = values.collect::<Result<Vec<f32>>>()?;
            Ok(Tensor::from_data(TensorData::from(&*values), (&device, DType::F32)))
        };
        let [skipped, first, second] = COUNTERS;
        let skipped = read(&skipped)?;
        Ok(Counters { skipped, corrections: [read(&first)?, read(&second)?] })
    }
}

/// The record of tensors, in the order of their names in `contents`.
///
/// # Errors
///
/// [`Error::Usage`] if it is beyond the limits of Burn's records.
pub fn recorded(contents: Contents, tensors: Vec<TensorData>) -> Result<OptimizerRecord> {
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

#[cfg(test)]
mod tests {
    use burn_pack::MAX_TENSOR_COUNT;

    use super::*;

    #[test]
    fn a_record_of_more_tensors_than_burn_reads_is_an_error_with_a_remedy() {
        let record = |count: usize| {
            let planned = |index: usize| {
                let name = format!("{index}.momentum");
                Planned::new(name, DType::F32, vec![1], Some(index as u64))
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
