//! The reduction of gradients to their owners, while the backward pass goes on.

use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::state::{Flight, LeafUses, PassState, Uses, added};
use super::{Passes, REDUCING};
use crate::backend::precise_dtype;
use crate::checks::ensure_computed;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Identities;
use crate::distributed::layout::pass_calls::Event;
use crate::error::Result;
use crate::parameters::Placement;
use crate::slices::bytes;

impl Passes {
    /// Adds the gradient of a use of a value, and starts to reduce the sum after the gradient of
    /// its last use. Which values are the model's is known at the end of the pass: all ranks reduce
    /// the same ones until then.
    pub(super) fn add_gradient(&self, parameter: &PassParameter, leaf: u64, gradient: Tensor<1>) {
        let mut state = self.state();
        self.attempt(&mut state, |state| {
            // A rank without a batch takes part in the calls, and adds nothing.
            let gradient = if state.mode.is_drained { gradient.zeros_like() } else { gradient };
            let is_at_end = state.mode.is_micro_batch || self.waits_for_end(state, parameter);
            let uses = state.uses[parameter.index].of_leaf(leaf);
            uses.gradients += 1;
            // Further gradients are added to the sum, which stays as large as one.
            let more = if uses.sum.is_none() { bytes(&gradient) } else { 0 };
            uses.sum = Some(added(uses.sum.take(), gradient));
            // A value that is used several times has as many gradients: their sum is sent once.
            let is_last = uses.gradients == uses.count;
            state.bytes.sums += more;
            state.observe();
            match is_last && !is_at_end {
                true => self.start_reducing(state, parameter, leaf),
                false => Ok(()),
            }
        });
    }

    /// Starts to reduce the gradient of a value, if it has one.
    pub(super) fn start_reducing(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        leaf: u64,
    ) -> Result<()> {
        let uses = state.uses[parameter.index].of_leaf(leaf);
        let held = uses.bytes();
        // Remembered after the sum is taken: a mean of other values than the model's is an error
        // only if micro-batches were in it.
        uses.had_micro_batches |= uses.micro_batches.is_some();
        let gradients = (uses.micro_batches.take(), uses.sum.take());
        // Both sums leave, also if their type differs from the result's.
        state.bytes.sums -= held;
        let sum = match gradients {
            (Some(earlier), Some(sum)) => {
                // The sum of micro-batches is float32; this gradient may be half precision.
                let dtype = earlier.dtype();
                earlier + sum.cast(dtype)
            }
            (Some(sum), None) | (None, Some(sum)) => sum,
            (None, None) => return Ok(()),
        };
        // The elements in the order of their owners.
        let parts = parameter.parts(sum);
        ensure_computed(&parameter.path, &parts)?;
        // Not by the bytes of the calls: an owner also holds what it receives, and all ranks have
        // to wait at the same places.
        let sent = parameter.most_elements() * parts.dtype().size();
        state.uses[parameter.index].sent = sent;
        while state.is_reducing() && state.sent() + sent > self.limits.in_flight {
            self.land(state)?;
        }
        // The ranks with the same slice; the replicas of this part follow in `land_flight`.
        let sharing = self.groups.of(parameter).sharing.comm();
        let pending = sharing.reduce_scatter_f32(parts, &parameter.part_counts().to_vec());
        let pending = pending.map_err(|error| parameter.in_action(REDUCING, error))?;
        state.bytes.reducing += pending.bytes();
        state.observe();
        // After the call was accepted: a failed start is not a call that other ranks have to match.
        state.events.push(Event::Reduce(parameter.index));
        state.flights.push_back(Flight::Reducing(parameter.index, leaf, pending));
        Ok(())
    }

    pub(super) fn keep_mean(
        &self,
        state: &mut PassState,
        (index, leaf): (usize, u64),
        sum: Tensor<1>,
    ) {
        // By all ranks, also where a sum was taken in two stages.
        let mean = sum.div_scalar(self.parameters[index].counts().ranks() as f64);
        let uses = state.uses[index].of_leaf(leaf);
        let more = if uses.mean.is_none() { bytes(&mean) } else { 0 };
        // A value may be reduced more than once in a pass, if it was used again after its last
        // expected gradient.
        uses.mean = Some(added(uses.mean.take(), mean));
        state.bytes.means += more;
        state.observe();
    }

    /// Ends the backward pass of a micro-batch: the gradients of a model are added to those of
    /// earlier ones.
    pub fn keep_micro_batch(&self, model: &Identities) -> Result<()> {
        let mut state = self.state();
        for (parameter, uses) in self.parameters.iter().zip(&mut state.uses) {
            let sums = uses.leaves.iter_mut().filter_map(|uses| Some((uses.sum.take()?, uses)));
            for (sum, uses) in sums.collect::<Vec<_>>() {
                let identity = model.of(parameter).inspect_err(|error| self.tell(error))?;
                // Gradients of other values, as of a clone, end with this pass, as Burn drops them.
                if identity.leaf == Some(uses.leaf) {
                    let dtype = precise_dtype(sum.dtype());
                    uses.micro_batches = Some(added(uses.micro_batches.take(), sum.cast(dtype)));
                }
            }
        }
        let leaves = state.uses.iter().flat_map(|uses| &uses.leaves);
        // Counted anew: some sums were added to others, and some dropped.
        state.bytes.sums = leaves.filter_map(|uses| uses.micro_batches.as_ref()).map(bytes).sum();
        state.observe();
        self.end_pass(&mut state)
    }

    /// Returns the first parameter whose gradient was not collected.
    pub fn uncollected(&self) -> Option<&PassParameter> {
        let state = self.state();
        let has_gradient = |parameter: &&Arc<PassParameter>| {
            let mut leaves = state.uses[parameter.index].leaves.iter();
            let is_reducing = |flight: &Flight| flight.reduced() == Some(parameter.index);
            leaves.any(LeafUses::has_gradient) || state.flights.iter().any(is_reducing)
        };
        self.parameters.iter().find(has_gradient).map(|parameter| &**parameter)
    }

    /// Returns the first parameter whose gradient is among some under the identity under which it
    /// was returned.
    pub fn among(&self, gradients: &GradientsParams) -> Option<&PassParameter> {
        let state = self.state();
        let is_among = |parameter: &&Arc<PassParameter>| {
            let id = state.uses[parameter.index].returned;
            id.is_some_and(|id| has_gradient(gradients, id, parameter))
        };
        self.parameters.iter().find(is_among).map(|parameter| &**parameter)
    }
}

/// This rank's shard of the mean of a parameter's gradient over ranks.
pub struct MeanGradient {
    parameter: Arc<PassParameter>,
    id: ParamId,
    mean: Tensor<1>,
}

/// Calls a function with the number of dimensions under which a gradient is returned: that of the
/// model's parameter.
macro_rules! with_dimensions {
    ($parameter:expr, $function:ident($($argument:expr),*)) => {
        match $parameter.placement {
            Placement::Owned => $function::<1>($($argument),*), // of the part
            Placement::Reduced | Placement::Replicated => match $parameter.shape.len() {
                1 => $function::<1>($($argument),*),
                2 => $function::<2>($($argument),*),
                3 => $function::<3>($($argument),*),
                4 => $function::<4>($($argument),*),
                5 => $function::<5>($($argument),*),
                6 => $function::<6>($($argument),*),
                _ => unreachable!("the layout divides parameters of up to 6 dimensions"),
            },
        }
    };
}

impl MeanGradient {
    /// Registers the gradient, with the number of dimensions of the model's parameter.
    pub fn register(self, gradients: &mut GradientsParams) {
        fn register<const D: usize>(gradients: &mut GradientsParams, id: ParamId, mean: Tensor<1>) {
            let mut shape = [1; D];
            // Flat in the first dimension, since a shard has no shape of its own.
            [shape[0]] = mean.dims();
            gradients.register::<D>(id, mean.reshape(shape));
        }
        with_dimensions!(self.parameter, register(gradients, self.id, self.mean))
    }
}

/// Returns `true` if a parameter's gradient is registered under an identity.
fn has_gradient(gradients: &GradientsParams, id: ParamId, parameter: &PassParameter) -> bool {
    fn has<const D: usize>(gradients: &GradientsParams, id: ParamId) -> bool {
        gradients.get::<D>(id).is_some()
    }
    with_dimensions!(parameter, has(gradients, id))
}

/// Takes the mean gradient of a model's parameter, and drops gradients of other values.
pub(super) fn mean_of(
    parameter: &Arc<PassParameter>,
    uses: &mut Uses,
    model: &Identities,
) -> Result<Option<MeanGradient>> {
    // All of them end here, with a gradient or without.
    let leaves = std::mem::take(&mut uses.leaves);
    let mut mean = None;
    for uses in leaves.into_iter().filter(LeafUses::has_gradient) {
        if model.of(parameter)?.leaf == Some(uses.leaf) {
            mean = uses.mean;
        } else if uses.had_micro_batches {
            return Err(model.changed(parameter));
        }
    }
    let Some(mean) = mean else { return Ok(None) };
    let id = model.of(parameter)?.id;
    uses.returned = Some(id);
    Ok((parameter.shard_count() > 0).then(|| MeanGradient {
        parameter: parameter.clone(),
        id,
        mean,
    }))
}
