//! The buckets of a step on their way: reduced, updated and gathered.
//!
//! The number of buckets in flight is limited, so that the memory of a step, in addition to the
//! model, does not grow with the number of buckets. No rank waits for another while it updates:
//! everything that it needs from the others arrived before.

use std::collections::{BTreeMap, VecDeque};

use burn::tensor::Tensor;

use super::audits::{Again, Audit};
use super::bucket_shard::Shard;
use super::decisions::{Decisions, StepControls, StepInputs};
use super::detached_parameters::DetachedParameters;
use super::divided_model::DividedModel;
use super::global_clipping::counts;
use super::memory_report::MemoryMeter;
use super::rejected_gradients::Flags;
use super::traffic::{Traffic, drop_all};
use crate::backend::ScaledNorms;
use crate::checks::ensure_all_computed;
use crate::comm::PendingParts;
use crate::distributed::config::Publish;
use crate::distributed::plan::Run;
use crate::error::Result;
use crate::flat::{self, bytes};
use crate::update::{Observations, UpdateTensors};

/// The reason for which there is an audit.
const AUDITED: &str = "the bucket is audited in this step";

/// A step on its way: what it reads of the optimizer, and its tensors, counted as they come and go.
pub struct StepInProgress<'a> {
    pub divided: &'a DividedModel,
    traffic: &'a Traffic,
    pub shards: &'a mut [Shard],
    memory: &'a mut MemoryMeter,
    pub inputs: StepInputs,
    pub detached: DetachedParameters,
    calls: CallsInFlight,
    pub between: BetweenCalls,
    pub flags: Flags,
    /// `true` if gradients are clipped, by their norms.
    clips: bool,
    /// The norms of the step, if they were requested.
    pub observations: Option<Observations>,
    /// The audit of the step, if there is one, until it has taken place.
    pub audit: Option<Audit>,
}

/// The calls that were started and are not finished. All ranks wait for the results in the order of
/// the calls.
#[derive(Default)]
struct CallsInFlight {
    /// The buckets in the order of the stages.
    order: Vec<usize>,
    /// The number of buckets whose reduction has started.
    started: usize,
    calls: VecDeque<BucketCall>,
    /// Bytes of their buffers.
    bytes: usize,
}

/// A call of a bucket.
struct BucketCall {
    bucket: usize,
    purpose: Purpose,
    result: PendingParts,
}

/// The use of a call for this rank.
#[derive(Clone, Copy, PartialEq)]
enum Purpose {
    /// The gradients of its shard, or of its share of slices.
    Reduction,
    /// The gradients of the shard that it audits.
    AuditedReduction,
    /// The gradients of whole parameters, from slices.
    Assembly,
    /// The values of whole parameters, from slices.
    ValueAssembly,
    /// Directions or new values, to slices.
    Distribution,
    /// The new values of all ranks.
    Gathering,
}

impl CallsInFlight {
    fn push(&mut self, bucket: usize, purpose: Purpose, result: PendingParts) {
        self.bytes += result.bytes();
        self.calls.push_back(BucketCall { bucket, purpose, result });
    }

    /// The number of buckets that are being reduced.
    fn reductions(&self) -> usize {
        // An assembly is the second half of a reduction: not counted, a further bucket would start
        // while the gradients of this one are still on their way.
        self.count([Purpose::Reduction, Purpose::Assembly])
    }

    /// The number of buckets that are being gathered.
    fn gatherings(&self) -> usize {
        self.count([Purpose::Distribution, Purpose::Gathering])
    }

    fn count(&self, purposes: [Purpose; 2]) -> usize {
        self.calls.iter().filter(|call| purposes.contains(&call.purpose)).count()
    }
}

/// The tensors of buckets that are in no call: between one and the next, or after the last.
#[derive(Default)]
pub struct BetweenCalls {
    /// The shards that are reduced and not yet updated, by bucket.
    pub reduced: BTreeMap<usize, ReducedShard>,
    /// The values of shards whose parameters are slices, by bucket.
    assembled: BTreeMap<usize, Tensor<1>>,
    /// This rank's new values of buckets that are gathered once all are updated.
    unpublished: Vec<(usize, Tensor<1>)>,
    /// Bytes of the tensors above.
    pub bytes: usize,
    /// Updated values that are not sent, by parameter: further references.
    local: Vec<(usize, Tensor<1>)>,
}

/// A shard between its reduction and its update.
pub struct ReducedShard {
    /// The gradients of this rank's parameters.
    gradients: Vec<Tensor<1>>,
    /// The gradients' norms, if they are to be clipped.
    pub norms: Vec<ScaledNorms>,
}

impl BetweenCalls {
    fn put_reduced(&mut self, bucket: usize, reduced: ReducedShard) {
        self.bytes += reduced.gradients.iter().map(bytes).sum::<usize>();
        self.reduced.insert(bucket, reduced);
    }

    fn take_gradients(&mut self, bucket: usize) -> Vec<Tensor<1>> {
        let reduced = self.reduced.remove(&bucket);
        let ReducedShard { gradients, .. } = reduced.expect("the bucket is reduced");
        self.bytes -= gradients.iter().map(bytes).sum::<usize>();
        gradients
    }

    fn put_assembled(&mut self, bucket: usize, values: Tensor<1>) {
        self.bytes += bytes(&values);
        self.assembled.insert(bucket, values);
    }

    fn take_assembled(&mut self, bucket: usize) -> Tensor<1> {
        let values = self.assembled.remove(&bucket).expect("the values are assembled");
        self.bytes -= bytes(&values);
        values
    }

    fn put_unpublished(&mut self, bucket: usize, values: Tensor<1>) {
        self.bytes += bytes(&values);
        self.unpublished.push((bucket, values));
    }
}

impl<'a> StepInProgress<'a> {
    /// A step before its first call, in which the `inputs.present` parameters have a gradient on
    /// any rank.
    pub fn new(
        divided: &'a DividedModel,
        traffic: &'a Traffic,
        shards: &'a mut [Shard],
        memory: &'a mut MemoryMeter,
        inputs: StepInputs,
        detached: DetachedParameters,
        clips: bool,
    ) -> Self {
        // The order of the stages, in which the buckets that one owner decides on come first, and
        // not the plan's.
        let order = traffic.stages.iter().flat_map(|stage| stage.buckets.clone()).collect();
        Self {
            flags: Flags::new(&inputs.present, &divided.device()),
            calls: CallsInFlight { order, ..CallsInFlight::default() },
            between: BetweenCalls::default(),
            divided,
            traffic,
            shards,
            memory,
            inputs,
            detached,
            clips,
            observations: None,
            audit: None,
        }
    }

    /// The number of buckets in flight.
    pub fn in_flight(&self) -> usize {
        self.traffic.in_flight
    }

    /// Counts the memory of this moment.
    pub fn observe(&mut self) {
        let audited = self.audit.as_ref().map_or(0, Audit::bytes);
        self.memory.observe(&self.detached, self.between.bytes + audited, self.calls.bytes);
    }

    /// Returns `true` if a bucket is audited in this step, and its audit has not taken place.
    fn is_audited(&self, bucket: usize) -> bool {
        self.audit.as_ref().is_some_and(|audit| audit.bucket == bucket)
    }

    /// Starts to reduce the gradients of an audited bucket to the ranks that audit it.
    fn start_audited_reduction(&mut self, bucket: usize) -> Result<()> {
        let audit = self.audit.as_ref().expect(AUDITED);
        // Further references: the owners' reduction takes the tensors.
        let mut gradients = self.detached.gradients.references(&audit.shard.bucket);
        let reducing = self.traffic.start_reduction(self.divided, &audit.shard, &mut gradients)?;
        self.calls.push(bucket, Purpose::AuditedReduction, reducing);
        Ok(())
    }

    /// Gives the states of the owners to the ranks that audit a bucket, and returns the old values
    /// of the shard that this rank audits.
    fn begin_audit(&mut self, bucket: usize) -> Result<Vec<Tensor<1>>> {
        let audit = self.audit.as_ref().expect(AUDITED);
        let values = audit.values(&self.detached.parameters);
        let comm = self.divided.world.comm();
        let states = audit.send_states(&self.shards[bucket], comm)?;
        // The results of earlier calls come first.
        self.land_all()?;
        let states = states.wait()?;
        let audit = self.audit.as_mut().expect(AUDITED);
        audit.shard.set_all_states(&states);
        Ok(values)
    }

    /// Computes the shard that this rank audits from its old values, and compares it with its
    /// owner's, before the owners' new values are sent.
    fn end_audit(
        &mut self,
        bucket: usize,
        controls: &StepControls,
        values: Vec<Tensor<1>>,
        updated: &[Tensor<1>],
    ) -> Result<()> {
        let mut audit = self.audit.take().expect(AUDITED);
        audit.gradients = self.final_gradients(&audit.shard, std::mem::take(&mut audit.gradients));
        let rejected = match self.traffic.is_alone(bucket) {
            // As the owner decides, from the gradients that were reduced again.
            true => {
                let mut flags = Flags::new(&self.inputs.present, &self.divided.device());
                flags.reject(|flags| audit.reject(flags));
                flags.decided_alone()
            }
            false => controls.rejected.clone(),
        };
        let (corrections, factor) = (controls.corrections.clone(), controls.factor.clone());
        let controls = StepControls { rejected, corrections, factor, read: vec![] };
        let decisions = Decisions { controls: &controls, inputs: &self.inputs };
        let again = Again { decisions, values };
        audit.compare(&self.shards[bucket], updated, again, self.divided)
    }

    /// Waits until the gradients of a bucket are reduced. The next buckets are in flight by then,
    /// and remain so while this one is updated.
    pub fn ensure_reduced(&mut self, bucket: usize) -> Result<()> {
        if self.traffic.reduces(&self.divided.world) && self.calls.started == 0 {
            // Once in a step, since the question waits until all work is submitted, and before the
            // first packing: a fused result does not always reveal that its inputs were not
            // computed.
            let gradients = (0..self.divided.trainable.len()).filter_map(|index| {
                Some((self.divided.path(index), self.detached.gradients.get(index)?))
            });
            ensure_all_computed(gradients)?;
        }
        while self.calls.reductions() < self.traffic.in_flight
            && self.calls.started < self.calls.order.len()
        {
            let next = self.calls.order[self.calls.started];
            if self.is_audited(next) {
                self.start_audited_reduction(next)?;
            }
            let gradients = &mut self.detached.gradients;
            let reducing =
                self.traffic.start_reduction(self.divided, &self.shards[next], gradients)?;
            self.calls.push(next, Purpose::Reduction, reducing);
            // With the reduction, so that the values are there when the owner decides. Where the
            // ranks decide together, `take_stages` starts it after the decision.
            if self.traffic.is_alone(next) {
                self.start_value_assembly(next)?;
            }
            self.calls.started += 1;
            self.observe();
        }
        // The oldest call is waited for first, whichever it is: all ranks wait in the order of the
        // calls, or an engine that works only while it is waited for would stop.
        while !self.between.reduced.contains_key(&bucket) {
            self.land()?;
        }
        Ok(())
    }

    /// Returns `true` if the owners of a bucket's matrices distribute directions, which are applied
    /// to slices. An observed step has norms of whole values.
    fn distributes_directions(&self, bucket: usize) -> bool {
        let shard = &self.shards[bucket];
        shard.exchange.is_cut() && shard.separates() && self.observations.is_none()
    }

    /// Starts to assemble the values of a bucket whose parameters are slices, if its update needs
    /// whole ones. Where the ranks decide together, a step may still be skipped: not before that.
    pub fn start_value_assembly(&mut self, bucket: usize) -> Result<()> {
        let shard = &self.shards[bucket];
        if !shard.exchange.is_cut() || self.distributes_directions(bucket) {
            return Ok(());
        }
        let share = shard.pack_share(&mut self.detached.parameters, shard.bucket.dtype);
        let pending = shard.exchange.assemble(share)?;
        self.calls.push(bucket, Purpose::ValueAssembly, pending.in_one_tensor());
        Ok(())
    }

    /// Waits for the result of the oldest call.
    fn land(&mut self) -> Result<()> {
        let call = self.calls.calls.pop_front().expect("a call was started");
        let BucketCall { bucket, purpose, result } = call;
        let buffers = result.bytes();
        let mut parts = result.wait()?;
        if purpose == Purpose::Gathering {
            // With the buffers, which the new values are views of.
            self.detached.publish(&self.shards[bucket].exchange.held, &parts[0]);
            self.observe();
        }
        self.calls.bytes -= buffers;
        let exchange = &self.shards[bucket].exchange;
        match purpose {
            // To the owners of whole parameters.
            Purpose::Reduction if exchange.is_cut() => {
                let pending = exchange.assemble(parts.swap_remove(0))?;
                self.calls.push(bucket, Purpose::Assembly, pending.in_one_tensor());
                self.observe();
            }
            Purpose::Reduction => self.keep_gradients(bucket, parts),
            Purpose::AuditedReduction => {
                let audit = self.audit.as_mut().expect("audits wait for their gradients");
                audit.gradients = parts;
                self.observe();
            }
            Purpose::Assembly => self.keep_gradients(bucket, self.shards[bucket].split(&parts[0])),
            Purpose::ValueAssembly => self.between.put_assembled(bucket, parts.swap_remove(0)),
            Purpose::Distribution => self.on_distributed(bucket, parts.swap_remove(0))?,
            Purpose::Gathering => {}
        }
        Ok(())
    }

    /// Waits for the results of all calls.
    pub fn land_all(&mut self) -> Result<()> {
        while !self.calls.calls.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    /// Keeps the gradients of a shard, which are final, until its update, and flags those that are
    /// not usable.
    fn keep_gradients(&mut self, bucket: usize, gradients: Vec<Tensor<1>>) {
        let shard = &self.shards[bucket];
        let gradients = self.final_gradients(shard, gradients);
        let norms = if self.clips { shard.norms(&gradients) } else { vec![] };
        self.flags.reject(|flags| shard.reject(&gradients, flags));
        self.between.put_reduced(bucket, ReducedShard { gradients, norms });
        self.observe();
    }

    /// The gradients of a shard after the factors of its parameters' places.
    fn final_gradients(&self, shard: &Shard, gradients: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
        // The factor of a place is for a mean over ranks that the reduction has taken. A gradient
        // that the program has averaged is final.
        let is_mean = self.traffic.reduces(&self.divided.world)
            || shard.bucket.placement.reduces_in_backward();
        let scaled = |((index, _), gradient): ((usize, usize), Tensor<1>)| {
            let factor = self.divided.of_model(index).gradient_factor;
            match is_mean && factor != 1.0 {
                true => flat::mapped(gradient, |gradient| gradient.mul_scalar(factor)),
                false => gradient,
            }
        };
        // Scaled before the norms and flags: a factor may make a gradient infinite.
        shard.parameters().zip(gradients).map(scaled).collect()
    }

    /// Updates this rank's shard of a bucket, and starts to gather the other ranks' shards. Sets
    /// the flags of matrices for which the iteration diverged in `diverged`.
    pub fn update(
        &mut self,
        bucket: usize,
        controls: &StepControls,
        diverged: &mut Tensor<1>,
    ) -> Result<()> {
        let states_leave = self.shards[bucket].states_leave();
        if states_leave {
            self.bring_states(bucket);
        }
        let audited = match self.is_audited(bucket) {
            true => Some(self.begin_audit(bucket)?),
            false => None,
        };
        let gradients = self.between.take_gradients(bucket);
        let updated = if self.distributes_directions(bucket) {
            let decisions = Decisions { controls, inputs: &self.inputs };
            self.shards[bucket].directions(gradients, decisions, diverged)
        } else {
            let values = match self.shards[bucket].exchange.is_cut() {
                true => self.assembled_values(bucket)?,
                false => self.shards[bucket].take(&mut self.detached.parameters),
            };
            let decisions = Decisions { controls, inputs: &self.inputs };
            let shard = &mut self.shards[bucket];
            // Of a bucket that all ranks update alike, one rank counts, or the sum over ranks would
            // count it several times.
            let is_counted = counts(&shard.bucket, self.divided.world.rank());
            let observations = self.observations.as_mut().filter(|_| is_counted);
            let tensors = UpdateTensors { gradients, values };
            shard.update(tensors, decisions, diverged, observations)
        };
        if states_leave {
            // Before they are read: what the device could not compute has no values to take away.
            let values = self.shards[bucket].parameters().zip(&updated);
            let values = values.map(|((index, _), value)| (self.divided.path(index), value));
            ensure_all_computed(values)?;
        }
        if let Some(old) = audited {
            self.end_audit(bucket, controls, old, &updated)?;
        }
        // The message starts before the next update is queued: it is on its way meanwhile.
        self.on_updated(bucket, updated)?;
        if states_leave {
            self.shards[bucket].take_states_away();
            self.memory.count_states(self.shards);
        }
        self.observe();
        // After the start, so that at least one bucket is on its way during the next update.
        while self.calls.gatherings() >= self.traffic.in_flight {
            self.land()?;
        }
        Ok(())
    }

    /// Brings the states of a bucket, which lie elsewhere, to the model's device, and the states of
    /// the next bucket, so that its update can be queued without waiting for them.
    fn bring_states(&mut self, bucket: usize) {
        let from_here = self.calls.order.iter().skip_while(|next| **next != bucket);
        from_here.take(2).for_each(|next| self.shards[*next].bring_states());
        self.memory.count_states(self.shards);
        self.observe();
    }

    /// The values of whole parameters, which are assembled from slices.
    fn assembled_values(&mut self, bucket: usize) -> Result<Vec<Tensor<1>>> {
        while !self.between.assembled.contains_key(&bucket) {
            self.land()?;
        }
        let values = self.between.take_assembled(bucket);
        Ok(self.shards[bucket].split(&values))
    }

    /// Sends the tensors that an update has returned to the ranks that need them, or stores them.
    fn on_updated(&mut self, bucket: usize, updated: Vec<Tensor<1>>) -> Result<()> {
        let shard = &self.shards[bucket];
        if shard.exchange.is_cut() {
            let packed = shard.pack(updated);
            // Before it is sent: other ranks could not tell a buffer that was never computed from
            // values.
            self.divided.ensure_bucket_computed(&shard.bucket, &packed)?;
            let pending = shard.exchange.distribute(packed)?;
            self.calls.push(bucket, Purpose::Distribution, pending.in_one_tensor());
        } else if shard.is_gathered() {
            let packed = shard.pack(updated);
            self.divided.ensure_bucket_computed(&shard.bucket, &packed)?;
            self.gather(bucket, packed)?;
        } else {
            for ((parameter, start), value) in shard.parameters().zip(updated) {
                // Asked for once at the end of the step: a question for each bucket would wait for
                // the device each time.
                self.between.local.push((parameter, value.clone()));
                self.detached.parameters.set(parameter, start, value);
            }
        }
        Ok(())
    }

    /// Gathers the slices that the owners of whole parameters have distributed: new values, or
    /// directions, which are applied first.
    fn on_distributed(&mut self, bucket: usize, distributed: Tensor<1>) -> Result<()> {
        let mut share = distributed;
        if self.distributes_directions(bucket) {
            let (shard, values) = (&self.shards[bucket], &mut self.detached.parameters);
            share = shard.apply(&share, values, &self.inputs);
            // Directions were asked for at their owner; their application is new work of this rank.
            self.divided.ensure_bucket_computed(&shard.bucket, &share)?;
        }
        if self.shards[bucket].is_gathered() {
            return self.gather(bucket, share);
        }
        self.keep_share(bucket, &share);
        Ok(())
    }

    /// Stores this rank's share of the new values, where it is all that the rank has.
    fn keep_share(&mut self, bucket: usize, share: &Tensor<1>) {
        let exchange = &self.shards[bucket].exchange;
        match exchange.held.placement.is_owned() {
            // In the runs in which it was detached.
            true => {
                for Run { parameter, elements, range } in exchange.held.runs(exchange.group.rank())
                {
                    let values = flat::slice(share, range);
                    self.detached.parameters.set(parameter, elements.start, values);
                }
            }
            // All of the slices, whose pieces may be in any order.
            false => self.detached.publish(&exchange.held, share),
        }
        self.observe();
    }

    /// Starts to gather a bucket from this rank's new values, or keeps them until all buckets are
    /// updated.
    fn gather(&mut self, bucket: usize, values: Tensor<1>) -> Result<()> {
        let exchange = &self.shards[bucket].exchange;
        match self.traffic.publish {
            Publish::AtFirstUse => {
                // The old values are of no use any more. Dropped before the gathering, they leave
                // room for it.
                drop_all(&exchange.held, &mut self.detached.parameters);
                self.between.put_unpublished(bucket, values);
            }
            Publish::Now => {
                let counts = exchange.held.counts.to_vec();
                let gathering = exchange.publishers.all_gather(values, &counts)?;
                self.calls.push(bucket, Purpose::Gathering, gathering.in_one_tensor());
            }
        }
        self.observe();
        Ok(())
    }

    /// Starts to gather the buckets that are waited for at their first use, in the order of the
    /// first parameters that they have in the model.
    pub fn publish_in_order(&mut self) -> Result<()> {
        let mut unpublished = std::mem::take(&mut self.between.unpublished);
        // In the order of the next forward pass: a use waits for its bucket and for those before
        // it.
        unpublished.sort_by_key(|(bucket, _)| self.shards[*bucket].bucket.parameters.iter().min());
        for (bucket, values) in unpublished {
            self.between.bytes -= bytes(&values);
            let exchange = &self.shards[bucket].exchange;
            let counts = exchange.held.counts.to_vec();
            let gathering = exchange.publishers.all_gather(values, &counts)?;
            self.traffic.publication.add(&exchange.held, gathering);
            self.observe();
        }
        Ok(())
    }

    /// Fails if the device did not compute the values that are not sent: once for all of them,
    /// since the question waits for all work to be submitted to the device.
    pub fn ensure_local_computed(&mut self) -> Result<()> {
        let local = self.between.local.iter();
        ensure_all_computed(local.map(|(index, values)| (self.divided.path(*index), values)))?;
        // Before the values are reattached to the model: the last reference to a tensor is consumed
        // by the operation that reads it, and any other one is dropped by an operation of its own.
        self.between.local.clear();
        Ok(())
    }
}
