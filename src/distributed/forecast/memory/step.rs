//! The bytes of a step on one rank as they come and go, in the order of its calls.

use std::collections::VecDeque;

use burn::tensor::DType;

use super::RankMemory;
use crate::backend::precise_dtype;
use crate::comm::{received, sum_over_ranks};
use crate::distributed::config::{Gradients, Publish};
use crate::distributed::forecast::planned_rank::PlannedRank;
use crate::distributed::optimizer::{Stage, sent_dtype, stages};
use crate::distributed::plan::{Bucket, BucketKind, Plan};

/// Bytes of the messages and tensors of a bucket.
struct BucketBytes {
    /// The gradients that it has when the step begins, and the values of the parameters.
    gradients: usize,
    /// This rank's shard: the reduced gradients, and the values.
    reduced: usize,
    values: usize,
    /// The message that reduces it, or the gradients that are moved where nothing is reduced.
    reduction: usize,
    /// The contributions that this rank received, and their sums, while it adds them up.
    added_up: usize,
    /// The messages of slices, if its parameters are cut.
    slices: Option<SliceBytes>,
    /// The messages that gather it, if others have to get what this rank has updated, and the share
    /// that it sends.
    gathering: Option<[usize; 2]>,
    /// The values of parameters on this rank.
    held: usize,
}

/// Bytes of messages among the ranks that have the other slices of a bucket.
struct SliceBytes {
    gradients: usize,
    /// `None` if directions are applied to slices.
    values: Option<usize>,
    distribution: usize,
}

/// A message that was sent and not waited for.
enum StepMessage {
    Reduction(usize),
    Assembly(usize),
    Values(usize),
    Distribution(usize),
    Gathering(usize),
}

/// A step in progress, in bytes.
pub struct StepMemory<'a> {
    rank: &'a PlannedRank,
    stages: Vec<Stage>,
    buckets: Vec<BucketBytes>,
    /// Bytes that do not change.
    constant: usize,
    parameters: usize,
    gradients: usize,
    shards: usize,
    messages: usize,
    /// The states that a step brings from the host: of every bucket, and what is here at the time.
    brought: Vec<usize>,
    states_here: usize,
    flights: VecDeque<StepMessage>,
    started: usize,
    is_reduced: Vec<bool>,
    has_values: Vec<bool>,
    unpublished: Vec<usize>,
    peaks: RankMemory,
}

impl<'a> StepMemory<'a> {
    /// `memory` has the bytes between steps, and the peaks of the passes before. `brought` has the
    /// states of every bucket that lie on the host meanwhile.
    pub fn new(
        rank: &'a PlannedRank,
        plan: &Plan,
        (index, brought): (usize, Vec<usize>),
        memory: RankMemory,
    ) -> Self {
        let config = rank.layout.config();
        let of_bucket = |bucket: &Bucket| BucketBytes::new(rank, plan, bucket, index);
        let buckets: Vec<_> = plan.buckets().iter().map(of_bucket).collect();
        Self {
            rank,
            // The same function as in a step: the order of the calls is the step's own.
            stages: stages(plan, config.max_norm.is_some() || config.loss_scale.is_some()),
            // A step neither takes nor frees these.
            constant: memory.frozen + memory.masters + memory.states,
            parameters: memory.parameters,
            // The means of the passes are gradients of the step.
            gradients: memory.gradients + rank.means(),
            shards: 0,
            messages: 0,
            brought,
            states_here: 0,
            flights: VecDeque::new(),
            started: 0,
            is_reduced: vec![false; buckets.len()],
            has_values: vec![false; buckets.len()],
            unpublished: vec![],
            peaks: memory,
            buckets,
        }
    }

    /// The peaks of the step and of the passes before.
    pub fn run(mut self) -> RankMemory {
        self.observe();
        let stages = std::mem::take(&mut self.stages);
        let order: Vec<(usize, bool)> = stages
            .iter()
            .flat_map(|stage| stage.buckets.iter().map(|b| (*b, stage.exchanges)))
            .collect();
        for stage in &stages {
            for bucket in &stage.buckets {
                self.reduce(*bucket, &order);
            }
            if stage.exchanges {
                // The agreement on rejected parameters waits for all calls before it.
                self.land_all();
            }
            let mut next = 0;
            for (index, bucket) in stage.buckets.iter().enumerate() {
                let last = stage.buckets.len().min(index + self.rank.layout.config().in_flight);
                while stage.exchanges && next < last {
                    self.assemble_values(stage.buckets[next]);
                    next += 1;
                }
                self.bring_states(*bucket, &order);
                self.update(*bucket);
            }
        }
        self.land_all();
        self.publish();
        self.peaks
    }

    fn in_flight(&self, counts: fn(&StepMessage) -> bool) -> usize {
        self.flights.iter().filter(|flight| counts(flight)).count()
    }

    /// Starts reductions, and waits for one.
    fn reduce(&mut self, bucket: usize, order: &[(usize, bool)]) {
        let is_reduction = |flight: &StepMessage| {
            matches!(flight, StepMessage::Reduction(_) | StepMessage::Assembly(_))
        };
        while self.in_flight(is_reduction) < self.rank.layout.config().in_flight
            && self.started < order.len()
        {
            let (next, exchanges) = order[self.started];
            // Packed and dropped: from here on the message has them.
            self.gradients -= self.buckets[next].gradients;
            self.send(self.buckets[next].reduction, StepMessage::Reduction(next));
            if !exchanges {
                self.assemble_values(next);
            }
            self.started += 1;
        }
        while !self.is_reduced[bucket] {
            self.land();
        }
    }

    fn send(&mut self, bytes: usize, flight: StepMessage) {
        self.messages += bytes;
        self.flights.push_back(flight);
        self.observe();
    }

    fn assemble_values(&mut self, bucket: usize) {
        let values = self.buckets[bucket].slices.as_ref().and_then(|slices| slices.values);
        if let Some(bytes) = values {
            self.send(bytes, StepMessage::Values(bucket));
        }
    }

    fn land_all(&mut self) {
        while !self.flights.is_empty() {
            self.land();
        }
    }

    fn land(&mut self) {
        let flight = self.flights.pop_front().expect("a message was sent");
        match flight {
            StepMessage::Reduction(bucket) => {
                let BucketBytes { reduction, added_up, .. } = self.buckets[bucket];
                self.messages = self.messages - reduction + added_up;
                self.observe();
                self.messages -= added_up;
                match &self.buckets[bucket].slices {
                    Some(slices) => self.send(slices.gradients, StepMessage::Assembly(bucket)),
                    None => self.land_reduction(bucket),
                }
            }
            StepMessage::Assembly(bucket) => {
                self.messages -= self.slices(bucket).gradients;
                self.land_reduction(bucket);
            }
            StepMessage::Values(bucket) => {
                self.messages -= self.slices(bucket).values.unwrap_or_default();
                self.shards += self.buckets[bucket].values;
                self.has_values[bucket] = true;
            }
            StepMessage::Distribution(bucket) => {
                self.messages -= self.slices(bucket).distribution;
                self.gather(bucket);
            }
            StepMessage::Gathering(bucket) => {
                self.observe();
                // After `observe`: the buffer and the new values are both there for a moment.
                self.messages -= self.gathering(bucket)[0];
            }
        }
        self.observe();
    }

    fn land_reduction(&mut self, bucket: usize) {
        self.shards += self.buckets[bucket].reduced;
        self.is_reduced[bucket] = true;
    }

    fn slices(&self, bucket: usize) -> &SliceBytes {
        self.buckets[bucket].slices.as_ref().expect("a message of slices")
    }

    fn gathering(&self, bucket: usize) -> [usize; 2] {
        self.buckets[bucket].gathering.expect("a bucket that is gathered")
    }

    /// Brings the states of a bucket and of the next one.
    fn bring_states(&mut self, bucket: usize, order: &[(usize, bool)]) {
        let from_here = order.iter().skip_while(|(next, _)| *next != bucket);
        self.states_here = from_here.take(2).map(|(next, _)| self.brought[*next]).sum();
        self.observe();
    }

    fn update(&mut self, bucket: usize) {
        let is_gathering = |flight: &StepMessage| {
            matches!(flight, StepMessage::Distribution(_) | StepMessage::Gathering(_))
        };
        self.shards -= self.buckets[bucket].reduced;
        match &self.buckets[bucket].slices {
            Some(SliceBytes { values, distribution, .. }) => {
                let (waits, distribution) = (values.is_some(), *distribution);
                while waits && !self.has_values[bucket] {
                    self.land();
                }
                self.shards -= if waits { self.buckets[bucket].values } else { 0 };
                self.send(distribution, StepMessage::Distribution(bucket));
            }
            None => self.gather(bucket),
        }
        self.states_here -= self.brought[bucket];
        while self.in_flight(is_gathering) >= self.rank.layout.config().in_flight {
            self.land();
        }
    }

    fn gather(&mut self, bucket: usize) {
        let Some([message, share]) = self.buckets[bucket].gathering else { return self.observe() };
        match self.rank.layout.config().publish {
            Publish::Now => self.send(message, StepMessage::Gathering(bucket)),
            Publish::AtFirstUse => {
                self.parameters -= self.buckets[bucket].held;
                self.shards += share;
                self.unpublished.push(bucket);
                self.observe();
            }
        }
    }

    /// Gathers what is waited for at its first use, and the parts that replicas have updated.
    fn publish(&mut self) {
        for bucket in std::mem::take(&mut self.unpublished) {
            let [message, share] = self.gathering(bucket);
            self.shards -= share;
            self.messages += message;
            self.observe();
        }
        let passes = self.rank.layout.passes();
        let replicated = passes.parameters().iter().filter(|parameter| {
            parameter.is_trained
                && parameter.placement.is_owned()
                && parameter.shard_counts().ranks() > 1
        });
        let bytes = |index: usize| {
            let parameter = &passes.parameters()[index];
            (parameter.shard_count() + parameter.part_count()) * parameter.dtype.size()
        };
        let messages = passes.in_messages(replicated.map(|parameter| parameter.index)).into_iter();
        let mut parts: Vec<usize> =
            messages.map(|message| message.into_iter().map(bytes).sum()).collect();
        // The largest at once: the order of the model may bring them together.
        parts.sort_unstable();
        // As many as a step publishes at once.
        self.messages +=
            parts.iter().rev().take(self.rank.layout.config().in_flight).sum::<usize>();
        self.observe();
    }

    fn observe(&mut self) {
        let Self { constant, parameters, gradients, shards, messages, states_here, .. } = *self;
        let peaks = &mut self.peaks;
        peaks.shards = peaks.shards.max(shards);
        peaks.messages = peaks.messages.max(messages);
        peaks.peak =
            peaks.peak.max(constant + parameters + gradients + shards + messages + states_here);
    }
}

impl BucketBytes {
    fn new(rank: &PlannedRank, plan: &Plan, bucket: &Bucket, index: usize) -> Self {
        let parameters = plan.parameters();
        let group = rank.layout.slice_group(parameters[bucket.parameters[0]].cut_axes());
        // The bucket as this rank has it, and its place among the ranks that have the same.
        let (held, replica, replicas) = match group {
            None => (bucket.clone(), index, plan.world_size()),
            Some(group) => {
                let grid = &group.grid;
                (
                    bucket.of_slice(parameters, &grid.positions, grid.slice),
                    grid.replica,
                    grid.ranks.len(),
                )
            }
        };
        let (narrow, wide) = (bucket.dtype.size(), precise_dtype(bucket.dtype).size());
        let (share, shard) = (held.counts.of(replica), bucket.counts.of(index));
        let whole = held.elements();
        let elements: usize = held.pieces.iter().map(|piece| piece.len).sum();
        let in_backward = bucket.placement.reduces_in_backward();
        let given = rank.gradient_dtype(bucket.dtype).size();
        let of_mean = rank.layout.mean_dtype(bucket.dtype).size();
        let gradients = if in_backward { share * of_mean } else { elements * given };
        let reduces = plan.world_size() > 1 && rank.layout.config().gradients == Gradients::PerRank;
        let sent_dtype = sent_dtype(rank.layout.config().grad_dtype, bucket);
        let (reduction, added_up) = match (reduces && !in_backward, group) {
            (true, _) => reduced_in_step(&held, replica, replicas, sent_dtype),
            // Shares of slices are packed in float32; all else is taken as it is.
            (false, Some(_)) => (share * wide, 0),
            (false, None) => (share * if in_backward { of_mean } else { given }, 0),
        };
        let slices = group.map(|_| {
            let updates = rank.routing.updates();
            let has_stacks =
                bucket.parameters.iter().any(|p| rank.trainable.trainable[*p].is_stack());
            let separates = bucket.kind == BucketKind::Matrices
                && updates.muon[bucket.settings(plan.parameters())]
                    .separates(has_stacks, bucket.dtype);
            SliceBytes {
                gradients: (share + shard) * wide,
                values: (!separates).then_some((share + shard) * narrow),
                distribution: (share + shard) * narrow,
            }
        });
        let gathers =
            replicas > 1 && bucket.kind != BucketKind::Replicated && !bucket.placement.is_owned();
        Self {
            gradients,
            reduced: match (reduces || in_backward, slices.is_some()) {
                (false, false) => shard * given,
                (_, false) if in_backward => shard * of_mean,
                _ => shard * wide,
            },
            values: shard * narrow,
            reduction,
            added_up,
            slices,
            gathering: gathers.then_some([(share + whole) * narrow, share * narrow]),
            held: elements * narrow,
        }
    }
}

/// Bytes of the messages in which a step reduces a bucket, and of what a rank then adds up.
fn reduced_in_step(
    held: &Bucket,
    replica: usize,
    replicas: usize,
    sent_dtype: DType,
) -> (usize, usize) {
    let (whole, sent) = (held.elements(), sent_dtype.size());
    let received = received(&held.counts.to_vec(), replica);
    match held.kind {
        _ if replicas == 1 => (whole * sent, 0),
        // Parts are reduced and then gathered.
        BucketKind::Replicated => (2 * whole * sent, 0),
        // The contributions of all ranks to this rank's part, which it adds up.
        BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
            let added_up = sum_over_ranks::bytes_of_rows(received, replicas, sent_dtype);
            ((whole + received) * sent, added_up)
        }
    }
}
