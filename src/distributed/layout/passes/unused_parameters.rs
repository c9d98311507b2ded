//! Parameters that some ranks do not use in a pass, and passes of ranks without batches.
//!
//! Before a backward pass, the ranks exchange which parameters each of them uses. Those that only
//! some use are *partial*: their gradients are reduced at the end of the pass, with zeros, so that
//! all ranks make the same calls.

use std::collections::HashSet;
use std::sync::Arc;

use super::Passes;
use super::state::{LeafUses, PassState, UsesOfRanks};
use crate::backend::precise_dtype;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Identities;
use crate::error::{Error, Result};
use crate::flat::{self, bytes};

impl Passes {
    /// Gathers the parameters that a function uses, of which this rank has no use.
    pub fn unused<T>(&self, uses: impl FnOnce() -> T) -> T {
        self.during(|state| &mut state.mode.is_unused, uses)
    }

    /// Runs a backward pass whose gradients count as zero.
    pub fn drained<T>(&self, backward: impl FnOnce() -> T) -> T {
        self.during(|state| &mut state.mode.is_drained, backward)
    }

    /// Returns `true` if the gradient of a parameter is reduced at the end of the pass, since some
    /// ranks may have none.
    pub(super) fn waits_for_end(&self, state: &PassState, parameter: &PassParameter) -> bool {
        // Until the ranks have exchanged their uses, every parameter waits: a backward pass without
        // `begin_backward` could not tell.
        let is_known = state.of_ranks.is_some();
        self.limits.allows_unused && (!is_known || state.is_partial(parameter.index))
    }

    /// Begins a backward pass. If ranks may leave parameters out, they exchange which parameters
    /// each of them uses, in one message. Those that only some use are gathered here if the pass
    /// needs them again, and reduced at its end. The gradients will be a model's, which is given if
    /// ranks may leave parameters out. All ranks make this call.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a gradient that an earlier backward pass has left; as every
    /// collective.
    pub fn begin_backward(&self, model: Option<&Identities>) -> Result<()> {
        let mut state = self.calling();
        self.ensure_collected(&state)?;
        // Of a pass that did not end, if the caller has caught a panic in it.
        state.of_ranks = None;
        self.exchange_uses(&mut state, model)?;
        let of_ranks = state.of_ranks.clone().unwrap_or_default();
        let is_needed = |uses: &UsesOfRanks| uses.are_partial && uses.are_in_pass;
        for (parameter, _) in self.parameters.iter().zip(&of_ranks).filter(|(_, u)| is_needed(u)) {
            // A whole that is kept is in the graph of every rank that uses it.
            if parameter.placement.is_owned() && !self.keeps_whole(parameter) {
                self.gather_for_backward(&mut state, parameter)?;
            }
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Fails for a gradient of an earlier backward pass that no call has returned: the gradients of
    /// this pass would be added to it.
    fn ensure_collected(&self, state: &PassState) -> Result<()> {
        // Those of `Layout::accumulate` are waited for.
        let is_of_pass = |uses: &LeafUses| uses.sum.is_some() || uses.mean.is_some();
        let left = self.parameters.iter().find(|p| state.has_left(p.index, is_of_pass));
        let Some(parameter) = left else { return Ok(()) };
        let reason = "it has a gradient of an earlier backward pass, which was not collected";
        let remedy = "after `loss.backward()`, call `Layout::collect`, or `Layout::discard_pass` \
                      if its gradients are not used";
        Err(Error::parameter(&parameter.path, self.groups.world.rank(), reason, remedy))
    }

    /// Gathers all parts of a parameter that this pass has used, on all ranks, also those without a
    /// use: a gathering has to have all of its ranks.
    fn gather_for_backward(
        &self,
        state: &mut PassState,
        parameter: &Arc<PassParameter>,
    ) -> Result<()> {
        let parts = state.uses[parameter.index].in_pass.clone();
        if parts.is_empty() {
            let error = self.undeclared(parameter);
            self.fail(state, error.clone());
            return Err(error);
        }
        for part in parts {
            let values = part.values;
            let whole = self.gathered(state, parameter, part, |_| Ok(()));
            // Others took part in the call, and drop the result.
            if values.leaf.is_some_and(|leaf| state.uses[parameter.index].has(leaf)) {
                state.bytes.kept += bytes(&whole);
                state.uses[parameter.index].kept.push((values, whole));
                state.observe();
            }
        }
        Ok(())
    }

    /// The error of a parameter that this rank has neither used nor declared as unused.
    fn undeclared(&self, parameter: &PassParameter) -> Error {
        let reason = "other ranks use it in this pass, and this rank does not";
        let remedy = "call `Layout::unused` where the others use it";
        Error::parameter(&parameter.path, self.groups.world.rank(), reason, remedy)
    }

    /// Exchanges which parameters each rank uses in this pass, unless that is known or all ranks
    /// use the same ones.
    pub(super) fn exchange_uses(
        &self,
        state: &mut PassState,
        model: Option<&Identities>,
    ) -> Result<()> {
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if !self.limits.allows_unused || state.of_ranks.is_some() || self.parameters.is_empty() {
            return Ok(());
        }
        let count = self.parameters.len();
        // Five bits for each parameter, of which a union on all ranks shows where they differ: used
        // and not used, with earlier gradients and without, and with gradients that count.
        let mut bits = vec![0; (5 * count).div_ceil(8)];
        for (index, uses) in state.uses.iter().enumerate() {
            let (is_in_pass, is_earlier) = (uses.are_in_pass(), uses.are_earlier());
            // Of the model's values, and not of a clone's: these have no gradient in the end.
            let identity = model.and_then(|model| model.of(&self.parameters[index]).ok());
            let leaf = identity.and_then(|identity| identity.leaf);
            let is_of_model = leaf.is_some_and(|leaf| uses.has(leaf));
            let counts = is_earlier || is_of_model && !state.mode.is_drained;
            // Also one of several uses, of which others may have more.
            let is_left_out = !is_in_pass || uses.are_left_out;
            let kinds = [is_in_pass, is_left_out, is_earlier, !is_earlier, counts];
            for kind in (0..5).filter(|kind| kinds[*kind]) {
                let bit = kind * count + index;
                bits[bit / 8] |= 1 << (bit % 8);
            }
        }
        let united = self.groups.world.comm().or_bytes(bits);
        let united = united.inspect_err(|error| state.failure = Some(error.clone()))?;
        let of_ranks = |index: usize| {
            let [used, unused, earlier, not_earlier, count] = [0, 1, 2, 3, 4].map(|kind| {
                let bit = kind * count + index;
                united[bit / 8] >> (bit % 8) & 1 == 1
            });
            // A gradient may be half precision where others have a sum with earlier ones in
            // float32: all ranks then send it in float32, at the end.
            let are_mixed = earlier && not_earlier;
            let are_partial = (used || earlier) && (unused || are_mixed);
            UsesOfRanks { are_in_pass: used, are_partial, count }
        };
        state.of_ranks = Some((0..count).map(of_ranks).collect());
        Ok(())
    }

    /// The parameters that only some ranks use, and of which no rank has a gradient: the loss does
    /// not depend on their uses. In one message, if there are any that only some use.
    pub(super) fn without_gradients(
        &self,
        state: &mut PassState,
        model: &Identities,
    ) -> Result<HashSet<usize>> {
        let partial: Vec<usize> =
            (0..self.parameters.len()).filter(|index| state.is_partial(*index)).collect();
        if partial.is_empty() {
            return Ok(HashSet::new());
        }
        let mut bits = vec![0; partial.len().div_ceil(8)];
        for (position, index) in partial.iter().enumerate() {
            let leaf = model.of(&self.parameters[*index]).ok().and_then(|identity| identity.leaf);
            let mut leaves = state.uses[*index].leaves.iter();
            // Micro-batches of other values are an error, of which the others are told.
            let has = leaves.any(|uses| match &uses.micro_batches {
                Some(_) => true,
                None => Some(uses.leaf) == leaf && uses.has_gradient(),
            });
            bits[position / 8] |= u8::from(has) << (position % 8);
        }
        let united = self.groups.world.comm().or_bytes(bits);
        let united = united.inspect_err(|error| self.fail(state, error.clone()))?;
        let has = |position: usize| united[position / 8] >> (position % 8) & 1 == 1;
        let without = partial.into_iter().enumerate().filter(|(position, _)| !has(*position));
        Ok(without.map(|(_, index)| index).collect())
    }

    /// Starts to reduce the gradient of a parameter that only some ranks use: that of the model's
    /// value, or zeros. In float32, since only some ranks may have micro-batches.
    pub(super) fn start_reducing_partial(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        model: &Identities,
    ) -> Result<()> {
        let Some(leaf) = model.of(parameter)?.leaf else { return Err(self.undeclared(parameter)) };
        let leaves = state.take_leaves(parameter.index);
        // The values of a clone are no part of the model's gradient.
        let (of_model, others): (Vec<_>, Vec<_>) =
            leaves.into_iter().partition(|uses| uses.leaf == leaf);
        if others.iter().any(|uses| uses.micro_batches.is_some()) {
            return Err(model.changed(parameter));
        }
        let mut uses = of_model.into_iter().next().unwrap_or_else(|| LeafUses::of(leaf));
        let dtype = precise_dtype(parameter.dtype);
        uses.sum = uses.sum.map(|sum| sum.cast(dtype));
        if !uses.has_gradient() {
            let device = self.groups.world.device().clone().inner();
            // Zeros are sent like any gradient: the others wait for this rank's contribution.
            uses.sum = Some(flat::zeros(parameter.shape.iter().product(), dtype, &device));
        }
        state.bytes.sums += uses.bytes();
        state.observe();
        state.uses[parameter.index].leaves.push(uses);
        self.start_reducing(state, parameter, leaf)
    }
}
