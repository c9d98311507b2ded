//! The owned parameters of a model, as a step sees them.

use std::collections::HashMap;
use std::ops::Index;
use std::sync::{Arc, PoisonError};

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Shape, Tensor};

use super::MicroBatches;
use super::passes::{Held, Passes};
use super::unit::Unit;
use crate::comm::{Communicator, Pending};
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit, in_place_if_trained};

/// The owned parameters by path. There may be none.
pub struct Units {
    passes: Option<Arc<Passes>>,
    by_path: HashMap<String, Arc<Unit>>,
    micro_batches: MicroBatches,
}

impl Units {
    /// Without `passes`, there are none.
    pub fn new(passes: Option<Arc<Passes>>, micro_batches: MicroBatches) -> Self {
        let units = passes.iter().flat_map(|passes| passes.units());
        let by_path = units.map(|unit| (unit.path.clone(), unit.clone())).collect();
        Self { passes, by_path, micro_batches }
    }

    pub fn get(&self, path: &str) -> Option<&Arc<Unit>> {
        self.by_path.get(path)
    }

    /// Begins a step: releases the parts, so that the step has the only reference to them.
    ///
    /// # Errors
    ///
    /// A failure of a pass; [`Error::Parameter`] for a gradient that was not collected;
    /// [`Error::Setting`] for gradients of [`Layout::accumulate`](super::Layout::accumulate) that
    /// the step does not have.
    pub fn begin_step(&self, rank: usize) -> Result<()> {
        let earlier = self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner).count();
        if earlier > 0 {
            return Err(Error::setting(
                "gradients",
                format!("without those of {earlier} calls of `Layout::accumulate`"),
                "those of `Layout::backward`, which adds them (or call `Layout::discard` before)",
            ));
        }
        let Some(passes) = &self.passes else { return Ok(()) };
        passes.ensure_alive()?;
        if let Some(unit) = passes.uncollected() {
            let reason = "its gradient was not collected from the ranks";
            let remedy = "take gradients by `Layout::backward`, or pass them to `Layout::collect`";
            return Err(Error::parameter(&unit.path, rank, reason, remedy));
        }
        passes.forget_parts();
        Ok(())
    }

    /// Fails for a gradient that the backward pass has returned for another model than the step's.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for such a gradient among those that the step has left over.
    pub fn ensure_taken(&self, left_over: &GradientsParams, rank: usize) -> Result<()> {
        match self.passes.as_ref().and_then(|passes| passes.among(left_over)) {
            Some(unit) => {
                let reason = "its gradient was taken for a model with other identities";
                let remedy = "load or replace parameters before `Layout::backward`, and step the \
                              model that it was called with";
                Err(Error::parameter(&unit.path, rank, reason, remedy))
            }
            None => Ok(()),
        }
    }

    /// The bytes that passes held at their peaks.
    pub fn held(&self) -> Vec<Held> {
        self.passes.as_ref().map(|passes| passes.held()).unwrap_or_default()
    }

    /// The bytes that passes hold now.
    pub fn holds(&self) -> Held {
        self.passes.as_ref().map(|passes| passes.holds()).unwrap_or_default()
    }

    /// Forgets the gradients of passes and of earlier micro-batches. All ranks make this call.
    ///
    /// # Errors
    ///
    /// Those of every collective.
    pub fn discard(&self) -> Result<()> {
        let mut earlier = self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner);
        drop(earlier.take_sum());
        self.passes.as_ref().map_or(Ok(()), |passes| passes.discard())
    }

    /// Releases the parts.
    pub fn forget_parts(&self) {
        self.passes.iter().for_each(|passes| passes.forget_parts());
    }

    /// This rank's parts of all owned parameters of a model, with their paths, in its order.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a model that was not divided by this layout.
    pub fn parts<M: Module>(&self, model: &M, rank: usize) -> Result<Vec<(String, Tensor<1>)>> {
        let mut parts = Parts(vec![]);
        parameters::visit(model, &mut parts);
        let Parts(parts) = parts;
        let fits = |(path, part): &(String, Tensor<1>)| {
            let unit = self.get(path).filter(|unit| unit.placement.is_owned());
            unit.is_some_and(|unit| part.dims() == [unit.part_count().max(1)])
        };
        let other = parts.iter().find(|part| !fits(part)).map(|(path, _)| path);
        let owned = self.by_path.values().filter(|unit| unit.placement.is_owned());
        let missing = || {
            let mut paths = owned.map(|unit| &unit.path);
            paths.find(|path| !parts.iter().any(|part| part.0 == **path))
        };
        match other.or_else(missing) {
            Some(path) => Err(Error::parameter(
                path,
                rank,
                "the model is not divided as the optimizer's",
                "use the model of the layout that the optimizer was made on",
            )),
            None => Ok(parts),
        }
    }

    /// Starts to make this rank's new part of a parameter, as [`publish`](Self::publish) does. Its
    /// first use waits for it: `None` if that is arranged, as where there are replicas. All ranks
    /// return the same, also those that have nothing of the parameter: Burn's clones share a value
    /// that is waited for.
    ///
    /// # Errors
    ///
    /// Those of every collective.
    pub fn publish_later(&self, unit: &Unit, shard: Tensor<1>) -> Result<Option<Pending>> {
        let passes = self.passes.as_ref().expect("a unit has passes");
        if passes.replicas(unit).size() == 1 {
            return self.publish(unit, shard).map(Some);
        }
        passes.publish_later(unit, shard)?;
        Ok(None)
    }

    /// The part in place of a placeholder, with a value that is waited for at its first use.
    pub fn part_at_first_use<const D: usize>(
        &self,
        unit: &Arc<Unit>,
        (id, placeholder): (ParamId, Tensor<D>),
    ) -> Param<Tensor<D>> {
        let passes = self.passes.clone().expect("a unit has passes");
        let (unit, device) = (unit.clone(), placeholder.device());
        let is_trained = placeholder.is_require_grad();
        let shape = Shape::from([unit.part_count().max(1)]);
        let take = {
            let shape = shape.clone();
            move |device: &Device, is_trained: bool| {
                let inner = device.clone().inner();
                let part = passes.await_part(&unit, &inner).to_device(&inner);
                // It may have been frozen or unfrozen since the step.
                let part = in_place_if_trained(&placeholder, part.reshape(shape), is_trained);
                passes.remember_part(&unit, &part);
                part
            }
        };
        Param::uninitialized(id, take, device, is_trained, shape)
    }

    /// Waits for all parts that are on their way.
    ///
    /// # Errors
    ///
    /// Those of every collective.
    pub fn finish_publication(&self) -> Result<()> {
        self.passes.as_ref().map_or(Ok(()), |passes| passes.finish_publication())
    }

    /// The ranks that have replicas of this rank's part of a parameter.
    pub fn replicas(&self, unit: &Unit) -> &Communicator {
        self.passes.as_ref().expect("a unit has passes").replicas(unit)
    }

    /// Starts to make this rank's new part of a parameter from its shards, which the ranks with
    /// replicas of the part have updated.
    ///
    /// # Errors
    ///
    /// Those of every collective.
    pub fn publish(&self, unit: &Unit, shard: Tensor<1>) -> Result<Pending> {
        if unit.part_count() == 0 {
            // A parameter has an element at least.
            return Ok(Pending::ready(Tensor::zeros([1], (&shard.device(), unit.dtype))));
        }
        let replicas = self.replicas(unit);
        if replicas.size() == 1 {
            return Ok(Pending::ready(shard));
        }
        replicas.all_gather(shard, &unit.shard_counts().to_vec())
    }

    /// Remembers this rank's new part of a parameter.
    pub fn remember<const D: usize>(&self, unit: &Unit, part: &Tensor<D>) {
        self.passes.iter().for_each(|passes| passes.remember_part(unit, part));
    }
}

/// The parts in a model, by the path of the whole.
struct Parts(Vec<(String, Tensor<1>)>);

impl Visit for Parts {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        if let Some(path) = parameters::path_of_whole(fields) {
            self.0.push((path, param.val().without_autodiff().reshape([-1])));
        }
    }
}

impl Index<&str> for Units {
    type Output = Arc<Unit>;

    /// # Panics
    ///
    /// If the parameter is not owned.
    fn index(&self, path: &str) -> &Arc<Unit> {
        &self.by_path[path]
    }
}
