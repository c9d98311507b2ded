//! A step, in three phases.
//!
//! 1. The ranks exchange which parameters have a gradient, and verify that they take the same step.
//!    Every bucket's gradients are packed, moved out of the model and reduced: each rank gets its
//!    shard.
//! 2. The ranks exchange which parameters are rejected. Bucket by bucket, they update the
//!    parameters that they own, and start to gather them.
//! 3. The gathered parameters replace the old ones.
//!
//! The number of buckets in flight is limited, so that the memory of a step, in addition to the
//! model, does not grow with the number of buckets. No rank waits for another while it updates:
//! everything that it needs from the others arrived before.
//!
//! A world of one runs the same phases, as do ranks with averaged gradients: the former packs,
//! sends and gathers nothing, the latter reduce nothing.

use std::collections::VecDeque;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::acceptance::Acceptance;
use super::clip::counts;
use super::counters::Counters;
use super::detached::{DetachedParameters, Expected, FlatTensors, pack};
use super::memory::Snapshot;
use super::shard::{Shard, StepControls, StepInputs};
use super::trained::{ModelParameter, TrainedParameter};
use super::{DistModuleOptimizer, HeadClip};
use crate::backend::{FiniteMask, ScaledNorms, precise_dtype};
use crate::checks::{ensure_all_computed, ensure_computed};
use crate::comm::{Difference, Pending, ReduceOp, digest, unite};
use crate::distributed::config::{GradDtype, Gradients};
use crate::distributed::plan::{Bucket, BucketKind};
use crate::error::{Error, Result};
use crate::slices::{self, bytes};
use crate::update::{Observations, ensure_finite_rate, is_half};

/// A bucket whose reduction has started.
enum Reducing {
    /// The gradients stay as they are: they are those of the only rank, or already averaged.
    Local(Vec<Tensor<1>>),
    Sent(Pending),
}

impl Reducing {
    fn bytes(&self) -> usize {
        match self {
            Self::Local(gradients) => gradients.iter().map(bytes).sum(),
            Self::Sent(pending) => pending.bytes(),
        }
    }
}

/// A shard between its reduction and its update.
struct ReducedShard {
    /// The gradients of this rank's parameters.
    gradients: Vec<Tensor<1>>,
    /// Their norms, if they are to be clipped.
    norms: Vec<ScaledNorms>,
}

/// Gradients in one type, without a loss: parameters in half precision may have some in float32.
fn in_one_type(gradients: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    let is_wide = |gradient: &Tensor<1>| !is_half(gradient.dtype());
    match gradients.iter().find(|gradient| is_wide(gradient)).map(Tensor::dtype) {
        Some(wide) => gradients.into_iter().map(|gradient| gradient.cast(wide)).collect(),
        None => gradients,
    }
}

/// The tensors of a step, counted as they come and go.
struct Step {
    detached: DetachedParameters,
    /// Bytes of the shards that were reduced and not yet used.
    shards: usize,
    /// Bytes of buffers in flight.
    buffers: usize,
}

impl DistModuleOptimizer {
    pub(super) fn three_phases<M: Module>(
        &mut self,
        lr: &ModuleLearningRate,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let expected = Expected {
            rank: self.world.rank(),
            device: &self.device(),
            wide_gradients: !self.reduces() || self.grad_dtype == GradDtype::Float32,
        };
        let (model, detached) =
            DetachedParameters::detach(model, gradients, &self.model, expected)?;
        for (parameter, id) in self.model.iter_mut().zip(&detached.ids) {
            parameter.id = *id;
        }
        let rate = |parameter: &TrainedParameter| {
            let ModelParameter { id, path, .. } = &self.model[parameter.model];
            lr.lr_from_param(*id, Some(path))
        };
        let lrs: Vec<f64> = self.trained.iter().map(rate).collect();
        lrs.iter().try_for_each(|lr| ensure_finite_rate(*lr))?;
        let present = self.agree_on_step(&lrs, &detached)?;

        let mut step = Step { detached, shards: 0, buffers: 0 };
        self.observe(&step);
        let (shards, rejected) = self.reduce(&mut step)?;
        let scale = self.loss_scale();
        // Those of a step that is skipped are of no use in another.
        let head_clip = self.head_clip.take();
        match self.accept(rejected, &present)? {
            None => self.diverged = self.none_diverged(),
            Some(rejected) => {
                let factor = self.factor(&rejected, &shards, scale)?;
                let corrections = self.counters.corrections.clone();
                let controls = StepControls { rejected, corrections, factor };
                let inputs = self.inputs(&lrs, head_clip, &controls.rejected);
                self.update(&mut step, shards, &controls, &inputs)?;
                for (parameter, present) in self.trained.iter_mut().zip(present) {
                    parameter.time += usize::from(present);
                }
            }
        }
        let times: Vec<usize> = self.trained.iter().map(|parameter| parameter.time).collect();
        let (counts, logs) = (self.counters.skipped.clone(), self.world.is_main());
        self.skipped.record(&mut self.place, counts, &times, logs)?;
        self.observe(&step);
        Ok(step.detached.reattach(model, &self.model))
    }

    /// The parameters that have a gradient on any rank, if all ranks take the same step: one
    /// message.
    fn agree_on_step(&self, lrs: &[f64], detached: &DetachedParameters) -> Result<Vec<bool>> {
        let count = self.trained.len();
        let mut present = vec![0u8; count.div_ceil(8)];
        for index in (0..count).filter(|index| detached.gradients.get(*index).is_some()) {
            present[index / 8] |= 1 << (index % 8);
        }
        let times = self.trained.iter().map(|parameter| parameter.time);
        // In float32, as they are applied: hosts may differ in the last digits of a float64 cosine.
        let lrs = lrs.iter().map(|lr| (*lr as f32).to_bits());
        let steps: Vec<(u32, usize)> = lrs.zip(times).collect();
        match unite(self.world.comm(), present, digest(&steps))? {
            Some(present) => {
                let bit = |index: usize| present[index / 8] >> (index % 8) & 1 == 1;
                Ok((0..count).map(bit).collect())
            }
            None => Err(self.other_step(&steps)),
        }
    }

    /// The first rank that takes another step than rank 0, and the difference.
    fn other_step(&self, steps: &Vec<(u32, usize)>) -> Error {
        let path = |index: usize| &self.trained[index].path;
        let difference = |first: &Vec<(u32, usize)>, local: &Vec<(u32, usize)>| {
            let index = first.iter().zip(local).position(|(first, local)| first != local)?;
            let (first, local) = (first[index], local[index]);
            let (setting, first, other) = if first.1 != local.1 {
                (format!("steps of `{}`", path(index)), first.1.to_string(), local.1.to_string())
            } else {
                let [first, local] =
                    [first.0, local.0].map(|bits| f32::from_bits(bits).to_string());
                (format!("learning rate of `{}`", path(index)), first, local)
            };
            Some(Difference { setting, first, other })
        };
        match self.world.same_settings(steps, difference) {
            Err(error) => error,
            Ok(()) => unreachable!("the digests of the steps differ"),
        }
    }

    /// The host's decisions about every parameter.
    fn inputs(&self, lrs: &[f64], head_clip: Option<HeadClip>, rejected: &Tensor<1>) -> StepInputs {
        let updates = self.routing.updates();
        let sizes = self.trained.iter().zip(lrs);
        let sizes = sizes.map(|(parameter, lr)| parameter.size(*lr, updates));
        let times = self.trained.iter().map(|parameter| parameter.time).collect();
        // Read by the host before the updates are queued, and only where a user's optimizer is.
        let rejected = match self.shards.iter().any(Shard::owns_whole) {
            true => rejected.to_data().iter::<f32>().map(|flag| flag > 0.0).collect(),
            false => vec![],
        };
        StepInputs { sizes: sizes.collect(), times, head_clip, rejected }
    }

    /// Returns `true` if gradients are reduced at all.
    fn reduces(&self) -> bool {
        self.world.size() > 1 && self.gradients == Gradients::PerRank
    }

    /// Returns `true` if the ranks update a bucket in shards.
    fn gathers(&self, bucket: &Bucket) -> bool {
        self.world.size() > 1 && bucket.kind != BucketKind::Replicated
    }

    /// Phase 1: reduces the gradients of all buckets to this rank's shards, and flags the
    /// parameters whose gradients are not usable.
    fn reduce(&mut self, step: &mut Step) -> Result<(Vec<ReducedShard>, Tensor<1>)> {
        if self.reduces() {
            // Before packing: a fused result does not always reveal that its inputs were not
            // computed.
            let gradients = self.trained.iter().enumerate().filter_map(|(index, parameter)| {
                Some((&*parameter.path, step.detached.gradients.get(index)?))
            });
            ensure_all_computed(gradients)?;
        }
        let mut flags = Tensor::zeros([self.trained.len()], (&self.device(), DType::F32));
        let mut shards = vec![];
        let mut pending = VecDeque::new();
        for bucket in 0..self.shards.len() {
            let started = self.start_reduce(bucket, step)?;
            step.buffers += started.bytes();
            pending.push_back(started);
            self.observe(step);
            if pending.len() == self.in_flight {
                flags = self.finish_reduce(&mut shards, &mut pending, step, flags)?;
            }
        }
        while !pending.is_empty() {
            flags = self.finish_reduce(&mut shards, &mut pending, step, flags)?;
        }
        Ok((shards, flags))
    }

    fn start_reduce(&self, bucket: usize, step: &mut Step) -> Result<Reducing> {
        let (shard, comm) = (&self.shards[bucket], self.world.comm());
        let (bucket, gradients) = (&shard.bucket, &mut step.detached.gradients);
        let drop_rest = |gradients: &mut FlatTensors| {
            bucket.parameters.iter().for_each(|index| _ = gradients.take(*index));
        };
        if !self.reduces() {
            let local = shard.take(gradients);
            drop_rest(gradients);
            return Ok(Reducing::Local(in_one_type(local)));
        }
        let dtype = match (self.grad_dtype, bucket.kind) {
            // Every rank keeps all of it: sent as it is used.
            (_, BucketKind::Replicated) | (GradDtype::Float32, _) => precise_dtype(bucket.dtype),
            (GradDtype::Parameter, _) => bucket.dtype,
        };
        let packed = pack(gradients, bucket, dtype, &self.device());
        self.ensure_bucket_computed(bucket, &packed)?;
        drop_rest(gradients);
        Ok(Reducing::Sent(match bucket.kind {
            BucketKind::Replicated => comm.all_reduce(packed, ReduceOp::Sum)?,
            BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                comm.reduce_scatter_f32(packed, &bucket.counts)?
            }
        }))
    }

    fn finish_reduce(
        &mut self,
        shards: &mut Vec<ReducedShard>,
        pending: &mut VecDeque<Reducing>,
        step: &mut Step,
        flags: Tensor<1>,
    ) -> Result<Tensor<1>> {
        let pending = pending.pop_front().expect("a reduction was started");
        let (buffers, shard) = (pending.bytes(), &self.shards[shards.len()]);
        let gradients = match pending {
            Reducing::Local(gradients) => gradients,
            Reducing::Sent(pending) => {
                let mean = pending.wait()?.div_scalar(self.world.size() as f64);
                shard.split(&mean)
            }
        };
        let norms = if self.clip.is_some() { shard.norms(&gradients) } else { vec![] };
        let flags = shard.reject(&gradients, flags);
        step.buffers -= buffers;
        step.shards += gradients.iter().map(bytes).sum::<usize>();
        shards.push(ReducedShard { gradients, norms });
        self.observe(step);
        Ok(flags)
    }

    /// Phase 2: agrees on the parameters that stay as they are, in one message for all buckets, and
    /// counts them. `None` if all do, since a gradient overflowed under loss scaling.
    fn accept(&mut self, rejected: Tensor<1>, present: &[bool]) -> Result<Option<Tensor<1>>> {
        let sums = Tensor::cat(vec![rejected, self.matrices.sum(self.diverged.clone())], 0);
        let sums = self.world.comm().all_reduce(sums, ReduceOp::Sum)?.wait()?;
        let parameters = self.trained.len();
        let rejected = slices::slice(&sums, 0..parameters);
        let diverged = slices::slice(&sums, parameters..2 * parameters);
        // Read by the host, which has to know the scale of the next loss.
        let overflowed =
            self.loss_scale.is_some() && rejected.clone().max().into_scalar::<f32>() > 0.0;
        let acceptance = Acceptance::new(rejected, diverged, present);
        let mask = FiniteMask::from_rows(acceptance.rejected.clone());
        let Counters { skipped, corrections } = &mut self.counters;
        *skipped = skipped.clone() + acceptance.skipped;
        self.loss_scale.iter_mut().for_each(|loss_scale| loss_scale.advance(overflowed));
        if overflowed {
            return Ok(None);
        }
        *corrections = self.routing.updates().rest.correct(corrections.clone(), &mask);
        Ok(Some(acceptance.rejected))
    }

    /// The factor on all gradients, where they are clipped or have the scale of the loss.
    fn factor(
        &self,
        rejected: &Tensor<1>,
        shards: &[ReducedShard],
        scale: f64,
    ) -> Result<Option<Tensor<1>>> {
        let clipped = self.clip_factor(rejected, shards, scale)?;
        if self.loss_scale.is_none() {
            return Ok(clipped);
        }
        let ones = || Tensor::ones([1], (&self.device(), DType::F32));
        Ok(Some(clipped.unwrap_or_else(ones).div_scalar(scale)))
    }

    /// The factor by which gradients times `scale` are clipped.
    fn clip_factor(
        &self,
        rejected: &Tensor<1>,
        shards: &[ReducedShard],
        scale: f64,
    ) -> Result<Option<Tensor<1>>> {
        let Some(clip) = &self.clip else { return Ok(None) };
        let rank = self.world.rank();
        let rejected = clip.broadcast_rows(rejected);
        let (mut norms, mut first) = (vec![], 0);
        for (shard, reduced) in self.shards.iter().zip(shards) {
            let counts = counts(&shard.bucket, rank);
            for ScaledNorms { scale, squares } in &reduced.norms {
                let rows = first..first + scale.dims()[0];
                first = rows.end;
                let mask = FiniteMask::from_rows(slices::slice(&rejected, rows));
                let accepted = |values: &Tensor<1>| mask.zero_rejected(values.clone());
                let accepted =
                    || ScaledNorms { scale: accepted(scale), squares: accepted(squares) };
                norms.extend(counts.then(accepted));
            }
        }
        clip.factor(&self.world, norms, scale).map(Some)
    }

    /// The flags of this rank's matrices where no iteration has diverged.
    pub(super) fn none_diverged(&self) -> Tensor<1> {
        slices::zeros(self.diverged.dims()[0], DType::F32, &self.device())
    }

    /// Phases 2 and 3: updates this rank's shards and gathers those of the other ranks.
    fn update(
        &mut self,
        step: &mut Step,
        shards: Vec<ReducedShard>,
        controls: &StepControls,
        inputs: &StepInputs,
    ) -> Result<()> {
        let mut diverged = self.none_diverged();
        let mut observations = self.requested.then(Observations::default);
        let (mut pending, mut local) = (VecDeque::new(), vec![]);
        for (index, ReducedShard { gradients, .. }) in shards.into_iter().enumerate() {
            let reduced: usize = gradients.iter().map(bytes).sum();
            let shard = &mut self.shards[index];
            let values = shard.take(&mut step.detached.parameters);
            let observations =
                observations.as_mut().filter(|_| counts(&shard.bucket, self.world.rank()));
            let by = (controls, inputs);
            let updated = shard.update(gradients, values, by, &mut diverged, observations);
            step.shards -= reduced;
            let shard = &self.shards[index];
            if self.gathers(&shard.bucket) {
                let packed = shard.pack(updated);
                self.ensure_bucket_computed(&shard.bucket, &packed)?;
                let gathered = self.world.comm().all_gather(packed, &shard.bucket.counts)?;
                step.buffers += gathered.bytes();
                pending.push_back((index, gathered));
            } else {
                for (parameter, value) in shard.parameters().zip(updated) {
                    local.push((parameter, value.clone()));
                    step.detached.parameters.set(parameter, value);
                }
            }
            self.observe(step);
            if pending.len() == self.in_flight {
                self.publish(&mut pending, step)?;
            }
        }
        while !pending.is_empty() {
            self.publish(&mut pending, step)?;
        }
        self.diverged = diverged;
        if let Some(observations) = observations {
            self.keep_observed(observations, inputs);
        }
        // Once for all of them, since the question waits for all work to be submitted to the
        // device.
        let path = |index: usize| &*self.trained[index].path;
        ensure_all_computed(local.iter().map(|(index, values)| (path(*index), values)))
    }

    /// Phase 3: replaces the parameters of a bucket by the gathered ones.
    fn publish(&mut self, pending: &mut VecDeque<(usize, Pending)>, step: &mut Step) -> Result<()> {
        let (index, pending) = pending.pop_front().expect("a gathering was started");
        let buffers = pending.bytes();
        let gathered = pending.wait()?;
        step.detached.publish(&self.shards[index].bucket, &gathered);
        self.observe(step);
        step.buffers -= buffers;
        Ok(())
    }

    /// Fails if the device had no memory for the buffer of a bucket.
    fn ensure_bucket_computed(&self, bucket: &Bucket, buffer: &Tensor<1>) -> Result<()> {
        ensure_computed(&self.trained[bucket.parameters[0]].path, buffer)
    }

    fn observe(&mut self, step: &Step) {
        self.memory.observe(Snapshot {
            parameters: step.detached.parameters.bytes(),
            gradients: step.detached.gradients.bytes(),
            shards: step.shards,
            masters: self.master_bytes,
            states: self.state_bytes,
            buffers: step.buffers,
        });
    }
}
