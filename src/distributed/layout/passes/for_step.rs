//! The owned parameters of a model, as a step sees them.

use std::ops::Index;
use std::sync::{Arc, PoisonError};

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Shape, Tensor};

use super::Passes;
use super::reduce_gradients::has_gradient;
use super::state::LeafUses;
use crate::distributed::layout::PassParameter;
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit, in_place_if_trained};

impl Passes {
    pub fn get(&self, path: &str) -> Option<&Arc<PassParameter>> {
        self.by_path.get(path)
    }

    /// Begins a step: releases the parts, so that the step has the only reference to them.
    ///
    /// # Errors
    ///
    /// A failure of a pass; [`Error::Parameter`] for a gradient that was not collected;
    /// [`Error::Usage`] for gradients of `Layout::accumulate` that the step does not have.
    pub fn begin_step(&self, rank: usize) -> Result<()> {
        // Before anything is taken: the step has not changed anything when it fails here.
        let earlier = self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner).count();
        if earlier > 0 {
            return Err(Error::usage(
                "the gradients lack earlier micro-batches",
                "those of `Layout::backward`, which adds the earlier ones",
                format!("gradients without {earlier} calls of `Layout::accumulate`"),
                "end with `Layout::backward`, or drop the earlier ones by `Layout::discard`",
            ));
        }
        let mut state = self.calling();
        state.failure.clone().map_or(Ok(()), Err)?;
        let mut parameters = self.parameters.iter();
        let uncollected = parameters.find(|p| state.has_left(p.index, LeafUses::has_gradient));
        if let Some(parameter) = uncollected {
            let reason = "its gradient was not collected from the ranks";
            return Err(Error::parameter(&parameter.path, rank, reason, parameter.remedy()));
        }
        state.steps += 1;
        drop(state);
        self.forget_parts();
        Ok(())
    }

    /// Forgets the parts that were used, so that a step has the only reference to them.
    pub fn forget_parts(&self) {
        for uses in &mut self.state().uses {
            uses.part = None;
            uses.in_pass.clear();
            // Parts with a leaf are frozen, and kept to be gathered ahead in the next pass. A clone
            // that was frozen just before a step shares its buffers with the step's parts.
            uses.evaluated.take_if(|part| part.values.leaf.is_none());
        }
    }

    /// Fails for a gradient that the backward pass has returned for another model than the step's.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for such a gradient among those that the step has left over.
    pub fn ensure_taken(&self, left_over: &GradientsParams, rank: usize) -> Result<()> {
        let state = self.state();
        // Under the identity under which it was returned.
        let is_left_over = |parameter: &&Arc<PassParameter>| {
            let id = state.uses[parameter.index].returned;
            id.is_some_and(|id| has_gradient(left_over, id, parameter))
        };
        match self.parameters.iter().find(is_left_over) {
            Some(parameter) => {
                let reason = "its gradient was taken for a model with other identities";
                let remedy = "load or replace parameters before `Layout::backward`, and step the \
                              model that it was called with";
                Err(Error::parameter(&parameter.path, rank, reason, remedy))
            }
            None => Ok(()),
        }
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
            let parameter = self.get(path).filter(|parameter| parameter.placement.is_owned());
            // A parameter has at least one element, also on a rank without a part.
            parameter.is_some_and(|parameter| part.dims() == [parameter.part_count().max(1)])
        };
        let other = parts.iter().find(|part| !fits(part)).map(|(path, _)| path);
        let owned = self.by_path.values().filter(|parameter| parameter.placement.is_owned());
        let missing = || {
            let mut paths = owned.map(|parameter| &parameter.path);
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

    /// The part in place of a placeholder, with a value that is waited for at its first use.
    pub fn part_at_first_use<const D: usize>(
        self: &Arc<Self>,
        parameter: &Arc<PassParameter>,
        (id, placeholder): (ParamId, Tensor<D>),
    ) -> Param<Tensor<D>> {
        let (passes, parameter, device) = (self.clone(), parameter.clone(), placeholder.device());
        let is_trained = placeholder.is_require_grad();
        let step = self.state().steps;
        let shape = Shape::from([parameter.part_count().max(1)]);
        let take = {
            let shape = shape.clone();
            move |device: &Device, is_trained: bool| {
                let inner = device.clone().inner();
                let part = passes.await_part(&parameter, step, &inner).to_device(&inner);
                // It may have been frozen or unfrozen since the step.
                let part = in_place_if_trained(&placeholder, part.reshape(shape), is_trained);
                // At its first use: only then does the value have a leaf by which it is known.
                passes.remember_part(&parameter, &part);
                part
            }
        };
        Param::uninitialized(id, take, device, is_trained, shape)
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

impl Index<&str> for Passes {
    type Output = Arc<PassParameter>;

    /// # Panics
    ///
    /// If the parameter is not owned.
    fn index(&self, path: &str) -> &Arc<PassParameter> {
        &self.by_path[path]
    }
}
