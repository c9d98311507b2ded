//! A step, stage by stage.
//!
//! 1. The ranks exchange which parameters have a gradient, and verify that they take the same step,
//!    and now and then that they hold the same.
//! 2. Bucket by bucket, gradients are packed, moved out of the model and reduced: each rank gets
//!    its shard. It decides which parameters stay as they are, updates the others, and the ranks
//!    gather the new values. The next buckets are reduced and the last ones gathered meanwhile.
//! 3. Parameters that lie on several ranks come last: the ranks exchange which of them stay as they
//!    are.
//!
//! Clipping and loss scaling make every update depend on all gradients: all buckets are then
//! reduced before the first update.
//!
//! With [`Publish::AtFirstUse`], the new values are gathered once all buckets are updated, in the
//! order in which the next forward pass uses them.
//!
//! The number of buckets in flight is limited, so that the memory of a step, in addition to the
//! model, does not grow with the number of buckets. No rank waits for another while it updates:
//! everything that it needs from the others arrived before.
//!
//! A world of one runs the same stages, as do ranks with averaged gradients: the former packs,
//! sends and gathers nothing, the latter reduce nothing.

use std::collections::VecDeque;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::DistModuleOptimizer;
use super::acceptance::Acceptance;
use super::clip::counts;
use super::controls::{StepControls, StepInputs};
use super::counters::Counters;
use super::detached::{DetachedParameters, Expected, FlatTensors, Parts, pack};
use super::exchange::Exchange;
use super::memory::Snapshot;
use super::shard::Shard;
use super::stages::Stage;
use crate::backend::{FiniteMask, ScaledNorms, precise_dtype};
use crate::checks::{ensure_all_computed, ensure_computed};
use crate::comm::{Difference, Pending, ReduceOp, digest, unite};
use crate::distributed::config::{GradDtype, Gradients, Publish};
use crate::distributed::plan::{Bucket, BucketKind, Run};
use crate::distributed::trained::{ModelParameter, TrainedParameter};
use crate::error::{Error, Result};
use crate::slices::{self, bytes};
use crate::update::{Observations, ensure_rate, is_half};

/// The type in which the gradients of a bucket are sent to be reduced.
pub fn reduced_dtype(grad_dtype: GradDtype, bucket: &Bucket) -> DType {
    match (grad_dtype, bucket.kind) {
        // Every rank keeps all of it: sent as it is used.
        (_, BucketKind::Replicated) | (GradDtype::Float32, _) => precise_dtype(bucket.dtype),
        (GradDtype::Parameter, _) => bucket.dtype,
    }
}

/// A bucket whose reduction has started.
enum Reducing {
    /// The gradients stay as they are: there is one rank, or they are averaged already.
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
    /// The gradients' norms, if they are to be clipped.
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

/// A call of a bucket that was started and is not finished. All ranks wait for the results in the
/// order of the calls.
enum Flight {
    Reduction(usize, Reducing),
    /// The gradients of whole parameters, from slices.
    Assembly(usize, Pending),
    /// The values of whole parameters, from slices.
    ValueAssembly(usize, Pending),
    /// Directions or new values, to slices.
    Distribution(usize, Pending),
    Gathering(usize, Pending),
}

/// The tensors of a step, counted as they come and go.
struct Step {
    inputs: StepInputs,
    detached: DetachedParameters,
    /// The buckets in the order of the stages.
    order: Vec<usize>,
    /// The number of buckets whose reduction has started.
    started: usize,
    flights: VecDeque<Flight>,
    /// The shards that are reduced and not yet updated, by bucket.
    reduced: Vec<Option<ReducedShard>>,
    /// The values of shards whose parameters are slices, by bucket.
    assembled: Vec<Option<Tensor<1>>>,
    /// 1 for parameters whose gradients this rank rejects.
    flags: Tensor<1>,
    /// 1 for parameters without a gradient on any rank.
    absent: Tensor<1>,
    /// The scale of the loss.
    scale: f64,
    observations: Option<Observations>,
    /// This rank's shares of updated buckets that are gathered once all are updated.
    unpublished: Vec<(usize, Tensor<1>)>,
    /// Updated values that are not sent, by parameter.
    local: Vec<(usize, Tensor<1>)>,
    /// Bytes of the shards that were reduced and not yet used.
    shards: usize,
    /// Bytes of buffers in flight.
    buffers: usize,
}

/// The calls for a step, which all ranks make alike.
#[derive(Hash, Serialize, Deserialize)]
struct Calls {
    /// For every parameter its learning rate, as the bits of a float32, and its number of steps.
    steps: Vec<(u32, usize)>,
    requests_diagnostics: bool,
    clips_heads: bool,
    /// The settings that the program has set, as the bits of a float64.
    running: [Option<u64>; 2],
}

impl Step {
    /// The number of buckets that are being reduced.
    fn reductions(&self) -> usize {
        let is_reduction =
            |flight: &&Flight| matches!(flight, Flight::Reduction(..) | Flight::Assembly(..));
        self.flights.iter().filter(is_reduction).count()
    }

    /// The number of buckets that are being gathered.
    fn gatherings(&self) -> usize {
        let is_gathering =
            |flight: &&Flight| matches!(flight, Flight::Distribution(..) | Flight::Gathering(..));
        self.flights.iter().filter(is_gathering).count()
    }
}

impl DistModuleOptimizer {
    pub(super) fn stage_by_stage<M: Module>(
        &mut self,
        lr: &ModuleLearningRate,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        self.units.begin_step(self.world.rank())?;
        let common = self.held_in_common(&model);
        let expected = Expected {
            rank: self.world.rank(),
            device: &self.device(),
            wide_gradients: !self.reduces() || self.grad_dtype == GradDtype::Float32,
            at_first_use: self.publish == Publish::AtFirstUse,
        };
        let (model, detached) =
            DetachedParameters::detach(model, gradients, &self.model, &self.units, expected)?;
        // All of its parameters have been taken into this step.
        std::mem::take(&mut self.publication).finish()?;
        for (parameter, id) in self.model.iter_mut().zip(&detached.ids) {
            parameter.id = *id;
        }
        let rate = |parameter: &TrainedParameter| {
            let ModelParameter { id, path, .. } = &self.model[parameter.model];
            lr.lr_from_param(*id, Some(path))
        };
        let lrs: Vec<f64> = self.trained.iter().map(rate).collect();
        lrs.iter().try_for_each(|lr| ensure_rate(*lr))?;
        self.ensure_heads_fit()?;
        if self.reduces() {
            self.compare_gradients(&detached)?;
        }
        let present = self.agree_on_step(&lrs, &detached)?;
        common.map_or(Ok(()), |common| self.ensure_same(&common))?;
        let warning = self.absence.count(&present, |index| &self.trained[index].path)?;
        if let Some(warning) = warning.filter(|_| self.world.is_main()) {
            log::warn!("{warning}");
        }

        // The heads of a step that is skipped are of no use in another.
        let inputs = self.inputs(lrs, &present);
        let mut step = self.begin(inputs, detached, &present);
        self.observe(&step);
        let is_taken = self.advance(&mut step)?;
        if is_taken {
            for (parameter, present) in self.trained.iter_mut().zip(present) {
                parameter.time += usize::from(present);
            }
            if let Some(observations) = step.observations.take() {
                self.keep_observed(observations, &step.inputs);
            }
        }
        let times: Vec<usize> = self.trained.iter().map(|parameter| parameter.time).collect();
        let (counts, logs) = (self.counters.skipped.clone(), self.world.is_main());
        self.skipped.record(&mut self.place, counts, &times, logs)?;
        let parts = self.publish_parts(&mut step)?;
        self.observe(&step);
        let (known, units) = (&self.model, &self.units);
        Ok(step.detached.reattach(model, known, units, parts, &self.publication))
    }

    /// Fails for heads to clip that are not heads of whole parameters.
    fn ensure_heads_fit(&self) -> Result<()> {
        let factors = self.head_clip.iter().flat_map(|clip| &clip.factors);
        for (index, factors) in factors {
            let TrainedParameter { path, shape, .. } = &self.trained[*index];
            let (expected, [got]) = (shape.iter().product::<usize>(), factors.dims());
            if expected != got {
                return Err(Error::parameter(
                    path,
                    self.world.rank(),
                    format!("its heads have other shapes: expected {expected} elements, got {got}"),
                    "make the `QkClip` with the whole model, before `Layout::shard`",
                ));
            }
        }
        Ok(())
    }

    /// A step before its first call.
    fn begin(&self, inputs: StepInputs, detached: DetachedParameters, present: &[bool]) -> Step {
        let device = self.device();
        let absent: Vec<f32> =
            present.iter().map(|present| f32::from(u8::from(!present))).collect();
        Step {
            inputs,
            detached,
            order: self.stages.iter().flat_map(|stage| stage.buckets.clone()).collect(),
            started: 0,
            flights: VecDeque::new(),
            reduced: self.shards.iter().map(|_| None).collect(),
            assembled: vec![None; self.shards.len()],
            flags: Tensor::zeros([self.trained.len()], (&device, DType::F32)),
            absent: Tensor::from_data(TensorData::from(&*absent), (&device, DType::F32)),
            scale: self.loss_scale(),
            observations: self.requested.then(Observations::default),
            unpublished: vec![],
            local: vec![],
            shards: 0,
            buffers: 0,
        }
    }

    /// Takes the stages, one after the other. Returns `false` for a step that is skipped, since a
    /// gradient overflowed under loss scaling.
    fn advance(&mut self, step: &mut Step) -> Result<bool> {
        let stages = self.stages.clone();
        for stage in &*stages {
            for bucket in &stage.buckets {
                self.finish_reduction(*bucket, step)?;
            }
            let Some(controls) = self.decide(stage, step)? else { return Ok(false) };
            let mut next = 0;
            for (index, bucket) in stage.buckets.iter().enumerate() {
                while stage.exchanges && next < stage.buckets.len().min(index + self.in_flight) {
                    self.start_value_assembly(stage.buckets[next], step)?;
                    next += 1;
                }
                self.update(*bucket, &controls, step)?;
            }
        }
        self.land_all(step)?;
        self.publish_in_order(step)?;
        // Once for all of them, since the question waits for all work to be submitted to the
        // device.
        let path = |index: usize| &*self.trained[index].path;
        ensure_all_computed(step.local.iter().map(|(index, values)| (path(*index), values)))?;
        // Before the values are reattached to the model: the last reference to a tensor is consumed
        // by the operation that reads it, and any other one is dropped by an operation of its own.
        step.local.clear();
        Ok(true)
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
        let calls = Calls {
            steps: lrs.zip(times).collect(),
            requests_diagnostics: self.requested,
            clips_heads: self.head_clip.is_some(),
            running: self.running.named().map(|(_, value)| value.map(f64::to_bits)),
        };
        match unite(self.world.comm(), present, digest(&calls))? {
            Some(present) => {
                let bit = |index: usize| present[index / 8] >> (index % 8) & 1 == 1;
                Ok((0..count).map(bit).collect())
            }
            None => Err(self.other_step(&calls)),
        }
    }

    /// The first rank that takes another step than rank 0, and the difference.
    fn other_step(&self, calls: &Calls) -> Error {
        let path = |index: usize| &self.trained[index].path;
        let called = |setting: &str, [first, other]: [bool; 2]| {
            let [first, other] = [first, other].map(|called| called.to_string());
            Some(Difference { setting: setting.to_owned(), first, other })
        };
        let difference = |first: &Calls, local: &Calls| {
            let requests = [first, local].map(|calls| calls.requests_diagnostics);
            if requests[0] != requests[1] {
                return called("request_diagnostics", requests);
            }
            let clips = [first, local].map(|calls| calls.clips_heads);
            if clips[0] != clips[1] {
                return called("clip_heads", clips);
            }
            let set =
                self.running.named().into_iter().zip(first.running.into_iter().zip(local.running));
            if let Some(((name, _), (first, other))) = { set }.find(|(_, (a, b))| a != b) {
                let text = |bits: Option<u64>| {
                    bits.map_or("no call".to_owned(), |bits| f64::from_bits(bits).to_string())
                };
                let (setting, first, other) = (name.to_owned(), text(first), text(other));
                return Some(Difference { setting, first, other });
            }
            let mut steps = first.steps.iter().zip(&local.steps);
            let index = steps.position(|(first, local)| first != local)?;
            let (first, local) = (first.steps[index], local.steps[index]);
            let (setting, first, other) = if first.1 != local.1 {
                (format!("steps of `{}`", path(index)), first.1.to_string(), local.1.to_string())
            } else {
                let [first, local] =
                    [first.0, local.0].map(|bits| f32::from_bits(bits).to_string());
                (format!("learning rate of `{}`", path(index)), first, local)
            };
            Some(Difference { setting, first, other })
        };
        match self.world.same_settings(calls, difference) {
            Err(error) => error,
            Ok(()) => unreachable!("the digests of the steps differ"),
        }
    }

    /// The host's decisions about every parameter.
    fn inputs(&mut self, lrs: Vec<f64>, present: &[bool]) -> StepInputs {
        let updates = self.routing.updates();
        let sizes = self.trained.iter().zip(&lrs);
        let sizes = sizes.map(|(parameter, lr)| parameter.size(*lr, updates)).collect();
        let times = self.trained.iter().map(|parameter| parameter.time).collect();
        let (present, head_clip) = (present.to_vec(), self.head_clip.take());
        StepInputs { sizes, lrs, present, times, head_clip }
    }

    /// Returns `true` if gradients are reduced at all.
    fn reduces(&self) -> bool {
        self.world.size() > 1 && self.gradients == Gradients::PerRank
    }

    /// Returns `true` if the ranks update a bucket in shards, and every rank has all of it, or the
    /// same slices.
    fn gathers(&self, bucket: usize) -> bool {
        let Shard { bucket, exchange, .. } = &self.shards[bucket];
        exchange.group.size() > 1
            && bucket.kind != BucketKind::Replicated
            && !bucket.placement.is_owned()
    }

    /// Waits for the reduction of a bucket. The next buckets are in flight by then, and
    /// remain so while this one is updated.
    fn finish_reduction(&mut self, bucket: usize, step: &mut Step) -> Result<()> {
        if self.reduces() && step.started == 0 {
            // Before packing: a fused result does not always reveal that its inputs were not
            // computed.
            let gradients = self.trained.iter().enumerate().filter_map(|(index, parameter)| {
                Some((&*parameter.path, step.detached.gradients.get(index)?))
            });
            ensure_all_computed(gradients)?;
        }
        while step.reductions() < self.in_flight && step.started < step.order.len() {
            let next = step.order[step.started];
            let reducing = self.start_reduce(next, step)?;
            step.buffers += reducing.bytes();
            step.flights.push_back(Flight::Reduction(next, reducing));
            if self.stages.iter().any(|stage| !stage.exchanges && stage.buckets.contains(&next)) {
                self.start_value_assembly(next, step)?;
            }
            step.started += 1;
            self.observe(step);
        }
        while step.reduced[bucket].is_none() {
            self.land(step)?;
        }
        Ok(())
    }

    /// Waits for the result of the oldest call.
    fn land(&mut self, step: &mut Step) -> Result<()> {
        match step.flights.pop_front().expect("a call was started") {
            Flight::Reduction(bucket, reducing) => self.finish_reduce(bucket, reducing, step),
            Flight::Assembly(bucket, pending) => {
                step.buffers -= pending.bytes();
                let assembled = pending.wait()?;
                self.keep_reduced(bucket, self.shards[bucket].split(&assembled), step);
                Ok(())
            }
            Flight::ValueAssembly(bucket, pending) => {
                step.buffers -= pending.bytes();
                let values = pending.wait()?;
                step.shards += bytes(&values);
                step.assembled[bucket] = Some(values);
                Ok(())
            }
            Flight::Distribution(bucket, pending) => {
                step.buffers -= pending.bytes();
                let mut share = pending.wait()?;
                if self.distributes_directions(bucket, step) {
                    let (shard, values) = (&self.shards[bucket], &mut step.detached.parameters);
                    share = shard.apply(&share, values, &step.inputs);
                    self.ensure_bucket_computed(&shard.bucket, &share)?;
                }
                self.gather(bucket, share, step)
            }
            Flight::Gathering(bucket, pending) => self.publish(bucket, pending, step),
        }
    }

    fn land_all(&mut self, step: &mut Step) -> Result<()> {
        while !step.flights.is_empty() {
            self.land(step)?;
        }
        Ok(())
    }

    fn start_reduce(&self, bucket: usize, step: &mut Step) -> Result<Reducing> {
        let shard = &self.shards[bucket];
        let (bucket, gradients) = (&shard.exchange.held, &mut step.detached.gradients);
        let drop_rest = |gradients: &mut FlatTensors| {
            bucket.parameters.iter().for_each(|index| gradients.drop_all(*index));
        };
        if !self.reduces() || bucket.placement.reduces_in_backward() {
            let local = match shard.exchange.is_cut() {
                true => vec![self.packed_share(shard, gradients, precise_dtype(bucket.dtype))],
                false => shard.take(gradients),
            };
            drop_rest(gradients);
            return Ok(Reducing::Local(in_one_type(local)));
        }
        let dtype = reduced_dtype(self.grad_dtype, bucket);
        let packed = pack(gradients, bucket, 0..bucket.elements(), dtype, &self.device());
        self.ensure_bucket_computed(bucket, &packed)?;
        drop_rest(gradients);
        let group = &shard.exchange.group;
        Ok(Reducing::Sent(match bucket.kind {
            BucketKind::Replicated => group.all_reduce(packed, ReduceOp::Sum)?,
            BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                group.reduce_scatter_f32(packed, &bucket.counts.to_vec())?
            }
        }))
    }

    /// This rank's share of values.
    fn packed_share(&self, shard: &Shard, values: &mut FlatTensors, dtype: DType) -> Tensor<1> {
        pack(values, &shard.exchange.held, shard.exchange.share(), dtype, &self.device())
    }

    /// Returns `true` if the owners of a bucket's matrices distribute directions, which are applied
    /// to slices. An observed step has norms of whole values.
    fn distributes_directions(&self, bucket: usize, step: &Step) -> bool {
        let shard = &self.shards[bucket];
        shard.exchange.is_cut() && shard.separates() && step.observations.is_none()
    }

    /// Starts to assemble the values of a bucket whose parameters are slices, if its update needs
    /// whole ones. Where the ranks decide together, a step may still be skipped: not before that.
    fn start_value_assembly(&self, bucket: usize, step: &mut Step) -> Result<()> {
        let shard = &self.shards[bucket];
        if !shard.exchange.is_cut() || self.distributes_directions(bucket, step) {
            return Ok(());
        }
        let share = self.packed_share(shard, &mut step.detached.parameters, shard.bucket.dtype);
        let pending = shard.exchange.assemble(share)?;
        step.buffers += pending.bytes();
        step.flights.push_back(Flight::ValueAssembly(bucket, pending));
        Ok(())
    }

    fn finish_reduce(&mut self, bucket: usize, reducing: Reducing, step: &mut Step) -> Result<()> {
        let (buffers, shard) = (reducing.bytes(), &self.shards[bucket]);
        let exchange = &shard.exchange;
        let mut gradients = match reducing {
            Reducing::Local(gradients) => gradients,
            Reducing::Sent(pending) => {
                let mean = pending.wait()?.div_scalar(exchange.group.size() as f64);
                if exchange.is_cut() { vec![mean] } else { shard.split(&mean) }
            }
        };
        step.buffers -= buffers;
        if exchange.is_cut() {
            let pending = exchange.assemble(gradients.swap_remove(0))?;
            step.buffers += pending.bytes();
            step.flights.push_back(Flight::Assembly(bucket, pending));
            self.observe(step);
            return Ok(());
        }
        self.keep_reduced(bucket, gradients, step);
        Ok(())
    }

    /// Keeps the reduced gradients of a shard until its update.
    fn keep_reduced(&mut self, bucket: usize, gradients: Vec<Tensor<1>>, step: &mut Step) {
        let shard = &self.shards[bucket];
        let is_mean = self.reduces() || shard.bucket.placement.reduces_in_backward();
        let scaled = |((index, _), gradient): ((usize, usize), Tensor<1>)| {
            let factor = self.model[self.trained[index].model].gradient_factor;
            if is_mean && factor != 1.0 { gradient.mul_scalar(factor) } else { gradient }
        };
        let gradients: Vec<_> = shard.parameters().zip(gradients).map(scaled).collect();
        let norms = if self.clip.is_some() { shard.norms(&gradients) } else { vec![] };
        // Moved out: with a second reference, the flags would be copied before they are written.
        let empty = slices::empty(DType::F32, &self.device());
        step.flags = shard.reject(&gradients, std::mem::replace(&mut step.flags, empty));
        step.shards += gradients.iter().map(bytes).sum::<usize>();
        step.reduced[bucket] = Some(ReducedShard { gradients, norms });
        self.observe(step);
    }

    /// Decides on the parameters of a stage. `None` if all of them stay as they are, since a
    /// gradient overflowed under loss scaling.
    fn decide(&mut self, stage: &Stage, step: &mut Step) -> Result<Option<StepControls>> {
        let (rejected, factor) = if stage.exchanges {
            let Some(rejected) = self.accept(step)? else { return Ok(None) };
            let factor = self.factor(&rejected, step)?;
            (rejected, factor)
        } else {
            (step.flags.clone().max_pair(step.absent.clone()), None)
        };
        // Read by the host before the updates are queued, and only where a user's optimizer is.
        let is_read = stage.buckets.iter().any(|bucket| self.shards[*bucket].owns_whole());
        let read =
            is_read.then(|| rejected.to_data().iter::<f32>().map(|flag| flag > 0.0).collect());
        let corrections = self.counters.corrections.clone();
        Ok(Some(StepControls { rejected, corrections, factor, read: read.unwrap_or_default() }))
    }

    /// Agrees on the parameters that stay as they are, in one message, and counts the skipped steps
    /// of all parameters. `None` if all stay as they are, since a gradient overflowed under loss
    /// scaling.
    fn accept(&mut self, step: &mut Step) -> Result<Option<Tensor<1>>> {
        let sums = vec![step.flags.clone(), self.matrices.sum(self.diverged.clone())];
        let sums = self.world.comm().all_reduce(Tensor::cat(sums, 0), ReduceOp::Sum)?;
        // The results of earlier calls come first.
        self.land_all(step)?;
        let sums = sums.wait()?;
        self.diverged = self.none_diverged();
        let parameters = self.trained.len();
        let rejected = slices::slice(&sums, 0..parameters);
        let diverged = slices::slice(&sums, parameters..2 * parameters);
        // Read by the host, which has to know the scale of the next loss.
        let overflowed =
            self.loss_scale.is_some() && rejected.clone().max().into_scalar::<f32>() > 0.0;
        let acceptance = Acceptance::new(rejected, diverged, step.absent.clone());
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
    fn factor(&self, rejected: &Tensor<1>, step: &Step) -> Result<Option<Tensor<1>>> {
        let clipped = self.clip_factor(rejected, step)?;
        if self.loss_scale.is_none() {
            return Ok(clipped);
        }
        let ones = || Tensor::ones([1], (&self.device(), DType::F32));
        Ok(Some(clipped.unwrap_or_else(ones).div_scalar(step.scale)))
    }

    /// The factor by which gradients times the scale of the loss are clipped. All buckets are
    /// reduced by now.
    fn clip_factor(&self, rejected: &Tensor<1>, step: &Step) -> Result<Option<Tensor<1>>> {
        let Some(clip) = &self.clip else { return Ok(None) };
        let rank = self.world.rank();
        let rejected = clip.broadcast_rows(rejected);
        let (mut norms, mut first) = (vec![], 0);
        for (shard, reduced) in self.shards.iter().zip(step.reduced.iter().flatten()) {
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
        clip.factor(&self.world, norms, step.scale).map(Some)
    }

    /// The flags of this rank's matrices where no iteration has diverged.
    pub(super) fn none_diverged(&self) -> Tensor<1> {
        slices::zeros(self.diverged.dims()[0], DType::F32, &self.device())
    }

    /// Updates this rank's shard of a bucket, and starts to gather the other ranks' shards.
    fn update(&mut self, bucket: usize, controls: &StepControls, step: &mut Step) -> Result<()> {
        let reduced = step.reduced[bucket].take();
        let ReducedShard { gradients, .. } = reduced.expect("the bucket is reduced");
        step.shards -= gradients.iter().map(bytes).sum::<usize>();
        let updated = match self.distributes_directions(bucket, step) {
            true => {
                let by = (controls, &step.inputs);
                self.shards[bucket].directions(gradients, by, &mut self.diverged)
            }
            false => {
                let values = self.values(bucket, step)?;
                let shard = &mut self.shards[bucket];
                let observations = step.observations.as_mut();
                let observations =
                    observations.filter(|_| counts(&shard.bucket, self.world.rank()));
                let by = (controls, &step.inputs);
                shard.update(gradients, values, by, &mut self.diverged, observations)
            }
        };
        let shard = &self.shards[bucket];
        if shard.exchange.is_cut() {
            let packed = shard.pack(updated);
            self.ensure_bucket_computed(&shard.bucket, &packed)?;
            let pending = shard.exchange.distribute(packed)?;
            step.buffers += pending.bytes();
            step.flights.push_back(Flight::Distribution(bucket, pending));
        } else if self.gathers(bucket) {
            let packed = shard.pack(updated);
            self.ensure_bucket_computed(&shard.bucket, &packed)?;
            self.gather(bucket, packed, step)?;
        } else {
            for ((parameter, start), value) in shard.parameters().zip(updated) {
                step.local.push((parameter, value.clone()));
                step.detached.parameters.set(parameter, start, value);
            }
        }
        self.observe(step);
        while step.gatherings() >= self.in_flight {
            self.land(step)?;
        }
        Ok(())
    }

    /// The values of a shard's parameters, which are waited for if they are assembled.
    fn values(&mut self, bucket: usize, step: &mut Step) -> Result<Vec<Tensor<1>>> {
        while self.shards[bucket].exchange.is_cut() && step.assembled[bucket].is_none() {
            self.land(step)?;
        }
        let shard = &self.shards[bucket];
        Ok(match step.assembled[bucket].take() {
            Some(values) => {
                step.shards -= bytes(&values);
                shard.split(&values)
            }
            None => shard.take(&mut step.detached.parameters),
        })
    }

    /// Starts to gather a bucket from this rank's share of the new values, or keeps the share where
    /// it is all that the rank has.
    fn gather(&mut self, bucket: usize, share: Tensor<1>, step: &mut Step) -> Result<()> {
        let exchange = &self.shards[bucket].exchange;
        if !self.gathers(bucket) {
            let held = &exchange.held;
            match held.placement.is_owned() {
                // In the runs in which it was detached.
                true => {
                    for Run { parameter, elements, range } in held.runs(exchange.group.rank()) {
                        let values = slices::slice(&share, range);
                        step.detached.parameters.set(parameter, elements.start, values);
                    }
                }
                // All of the slices, whose pieces may be in any order.
                false => step.detached.publish(held, &share),
            }
            self.observe(step);
            return Ok(());
        }
        match self.publish {
            Publish::AtFirstUse => {
                let parameters = &mut step.detached.parameters;
                exchange.held.parameters.iter().for_each(|index| parameters.drop_all(*index));
                step.shards += bytes(&share);
                step.unpublished.push((bucket, share));
            }
            Publish::Now => {
                let gathering =
                    exchange.publishers.all_gather(share, &exchange.held.counts.to_vec())?;
                step.buffers += gathering.bytes();
                step.flights.push_back(Flight::Gathering(bucket, gathering));
            }
        }
        self.observe(step);
        Ok(())
    }

    /// Starts to gather the buckets that are waited for at their first use, in the order of the
    /// model: that of the first parameter of each.
    fn publish_in_order(&mut self, step: &mut Step) -> Result<()> {
        let mut unpublished = std::mem::take(&mut step.unpublished);
        unpublished.sort_by_key(|(bucket, _)| self.shards[*bucket].bucket.parameters.iter().min());
        for (bucket, share) in unpublished {
            step.shards -= bytes(&share);
            let Exchange { held, publishers, .. } = &self.shards[bucket].exchange;
            let gathering = publishers.all_gather(share, &held.counts.to_vec())?;
            self.publication.add(held, gathering);
            self.observe(step);
        }
        Ok(())
    }

    /// Replaces the parameters of a bucket by the gathered ones.
    fn publish(&mut self, bucket: usize, pending: Pending, step: &mut Step) -> Result<()> {
        let buffers = pending.bytes();
        let gathered = pending.wait()?;
        step.detached.publish(&self.shards[bucket].exchange.held, &gathered);
        self.observe(step);
        step.buffers -= buffers;
        Ok(())
    }

    /// Gathers this rank's part of each owned parameter from the shards that its replicas updated.
    /// `None` for a part that is on its way.
    fn publish_parts(&self, step: &mut Step) -> Result<Parts> {
        let mut parts: Parts = vec![None; self.model.len()];
        let mut pending = VecDeque::new();
        let owned =
            self.model.iter().enumerate().filter(|(_, parameter)| parameter.placement.is_owned());
        for (index, parameter) in owned {
            let unit = &self.units[&parameter.path];
            let shard = step.detached.take_shard(parameter, unit, &self.device());
            let publishing = match self.publish {
                Publish::Now => self.units.publish(unit, shard).map(Some),
                Publish::AtFirstUse => self.units.publish_later(unit, shard),
            };
            pending.extend(publishing?.map(|part| (index, part)));
            if pending.len() == self.in_flight
                && let Some((index, part)) = pending.pop_front()
            {
                parts[index] = Some(part.wait()?);
            }
        }
        for (index, part) in pending {
            parts[index] = Some(part.wait()?);
        }
        Ok(parts)
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
            ..Snapshot::default()
        });
    }
}
