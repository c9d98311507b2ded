//! The reduction of gradients to their owners, while the backward pass goes on.
//!
//! Gradients are collected in the order in which they are computed, and sent in one message when
//! their bytes are half of the limit of those in flight. So all ranks cut the same buckets.

use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::state::{
    Flight, Gradient, GradientOf, LeafUses, PassMode, PassState, Reduction, Uses, added,
};
use super::{Passes, REDUCING, SharingGroup};
use crate::backend::precise_dtype;
use crate::checks::ensure_computed;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Identities;
use crate::distributed::layout::pass_calls::Event;
use crate::error::Result;
use crate::flat::{self, bytes};
use crate::parameters::Placement;

impl Passes {
    /// Adds the gradient of a use of a value, and starts to reduce the sum after the gradient of
    /// its last use. Which values are the model's is known at the end of the pass: all ranks reduce
    /// the same ones until then.
    pub(super) fn add_gradient(&self, parameter: &PassParameter, leaf: u64, gradient: Tensor<1>) {
        let mut state = self.calling();
        self.attempt(&mut state, |state| {
            // A rank without a batch takes part in the calls, and adds nothing.
            let PassMode { is_micro_batch, is_backward, is_drained, .. } = state.mode;
            let gradient = if is_drained { gradient.zeros_like() } else { gradient };
            let waits_for_end = is_micro_batch || self.waits_for_end(state, parameter);
            if is_drained && waits_for_end {
                // Zeros take its place at the end, if another rank has a gradient.
                return Ok(());
            }
            let uses = state.uses[parameter.index].of_leaf(leaf);
            // A pass of the caller's may be dropped, and must not take micro-batches with it.
            let is_callers = !is_backward && !is_drained;
            let is_at_end = waits_for_end || is_callers && uses.micro_batches.is_some();
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

    /// Reduces the gradient of a value together with its bucket, if it has one.
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
        let parts = parameter.parts(sum);
        ensure_computed(&parameter.path, &parts)?;
        let bytes = parameter.most_elements() * parts.dtype().size();
        // While a bucket is collected, the one before is on its way: both are within the limit.
        let of_bucket = self.limits.in_flight / 2;
        if state.waiting_bytes() + bytes > of_bucket {
            self.send_buckets(state)?;
        }
        let of = GradientOf { index: parameter.index, leaf };
        self.add_to_bucket(state, Gradient { of, parts, bytes });
        state.observe();
        // Not with the next gradient only: a large one is on its way at once.
        match state.waiting_bytes() >= of_bucket {
            true => self.send_buckets(state),
            false => Ok(()),
        }
    }

    /// Adds a gradient to the bucket of its type and of the axes along which its parameter is cut.
    fn add_to_bucket(&self, state: &mut PassState, gradient: Gradient) {
        let kind = |Gradient { of, parts, .. }: &Gradient| {
            (self.parameters[of.index].axes(), parts.dtype())
        };
        match state.buckets.iter_mut().find(|bucket| kind(&bucket[0]) == kind(&gradient)) {
            Some(bucket) => bucket.push(gradient),
            None => state.buckets.push_back(vec![gradient]),
        }
    }

    /// Sends the gradients that were collected, once those before them have arrived.
    pub(super) fn send_buckets(&self, state: &mut PassState) -> Result<()> {
        if state.buckets.is_empty() {
            return Ok(());
        }
        let is_reduction = |flight: &Flight| matches!(flight, Flight::Reducing(_));
        let before = state.flights.iter().rposition(is_reduction).map_or(0, |last| last + 1);
        // Only those that are there now: sums among replicas, which start on the way, have the time
        // of the next bucket.
        (0..before).try_for_each(|_| self.land(state))?;
        while let Some(bucket) = state.buckets.pop_front() {
            self.send_bucket(state, bucket)?;
        }
        Ok(())
    }

    /// Starts the sum of gradients among the ranks with the same slice. Sums among the replicas of
    /// a part follow when it lands.
    fn send_bucket(&self, state: &mut PassState, bucket: Vec<Gradient>) -> Result<()> {
        let (of, parts): (Vec<GradientOf>, Vec<Tensor<1>>) =
            bucket.into_iter().map(|gradient| (gradient.of, gradient.parts)).unzip();
        let indices = indices(&of);
        let sharing = self.groups.of(&self.parameters[indices[0]]).sharing.comm();
        if sharing.size() == 1 {
            // Nothing to send: the sum among replicas is the only one, and starts now.
            indices.into_iter().for_each(|index| state.events.push(Event::Reduce(index)));
            let sums = parts.into_iter().map(|sum| {
                let dtype = precise_dtype(sum.dtype());
                sum.cast(dtype)
            });
            return self.sum_among_replicas(state, of, sums.collect());
        }
        let message = self.message(&indices, PassParameter::part_counts);
        let pending = sharing
            .reduce_scatter_f32(message.pack(parts), &message.totals())
            .map_err(|error| self.in_action(REDUCING, &indices, error))?;
        // After the call was accepted: a failed start is not a call that other ranks have to match.
        indices.into_iter().for_each(|index| state.events.push(Event::Reduce(index)));
        state.fly(Reduction { of, message, among_replicas: false, pending });
        Ok(())
    }

    /// Starts the sum of sums among the replicas of this rank's parts, whose links may be slower.
    /// Without replicas, the sums are complete.
    fn sum_among_replicas(
        &self,
        state: &mut PassState,
        of: Vec<GradientOf>,
        sums: Vec<Tensor<1>>,
    ) -> Result<()> {
        let indices = indices(&of);
        let replicas = self.replicas(&self.parameters[indices[0]]);
        if replicas.size() == 1 {
            of.into_iter().zip(sums).for_each(|(of, sum)| self.keep_mean(state, of, sum));
            return Ok(());
        }
        let message = self.message(&indices, PassParameter::shard_counts);
        let pending = replicas
            .reduce_scatter_f32(message.pack(sums), &message.totals())
            .map_err(|error| self.in_action(REDUCING, &indices, error))?;
        // At the end of the queue, as on all ranks: the second stage is a call like any other.
        state.fly(Reduction { of, message, among_replicas: true, pending });
        Ok(())
    }

    /// Waits for sums of gradients.
    pub(super) fn land_reduction(
        &self,
        state: &mut PassState,
        Reduction { of, message, among_replicas, pending }: Reduction,
    ) -> Result<()> {
        let indices = indices(&of);
        let SharingGroup { sharing, replicas } = self.groups.of(&self.parameters[indices[0]]);
        state.bytes.reducing -= pending.bytes();
        let sum = pending.wait().map_err(|error| self.in_action(REDUCING, &indices, error))?;
        if among_replicas {
            let sums = message.split(sum, replicas.rank());
            of.into_iter().zip(sums).for_each(|(of, sum)| self.keep_mean(state, of, sum));
            return Ok(());
        }
        self.sum_among_replicas(state, of, message.split(sum, sharing.rank()))
    }

    /// Keeps this rank's shard of a mean until the pass ends.
    fn keep_mean(&self, state: &mut PassState, of: GradientOf, sum: Tensor<1>) {
        let GradientOf { index, leaf } = of;
        // By all ranks, also where a sum was taken in two stages. A rank may have no part of it.
        let parameter = &self.parameters[index];
        let ranks = parameter.counts().ranks() as f64;
        let mean = flat::mapped(sum, |sum| sum.div_scalar(ranks).cast(parameter.mean_dtype));
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
        let mut state = self.calling();
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
}

/// The parameters of gradients.
fn indices(of: &[GradientOf]) -> Vec<usize> {
    of.iter().map(|of| of.index).collect()
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
pub(super) fn has_gradient(
    gradients: &GradientsParams,
    id: ParamId,
    parameter: &PassParameter,
) -> bool {
    fn has<const D: usize>(gradients: &GradientsParams, id: ParamId) -> bool {
        gradients.get::<D>(id).is_some()
    }
    with_dimensions!(parameter, has(gradients, id))
}

/// Takes the mean gradient of a model's parameter, and drops gradients of other values. Fails for
/// one of a parameter that the model has elsewhere.
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
        } else if let Some(path) = model.path_of(uses.leaf) {
            return Err(model.moved(parameter, path));
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
