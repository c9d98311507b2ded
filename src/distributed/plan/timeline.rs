//! The predicted duration of an iteration on a described machine.

use super::{Bucket, BucketKind, Costs, Placement, Plan, Run, Slices};
use crate::backend::precise_dtype;
use crate::update::is_half;

/// The part of the passes that is the forward pass. A backward pass has twice its operations.
const FORWARD: f64 = 1.0 / 3.0;

/// The links of a rank of one kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Bytes per second that a rank sends while it receives the same number.
    pub bandwidth: f64,
    /// Seconds that a message takes in addition to the transfer of its bytes.
    pub latency: f64,
}

/// The links and the elementwise speed of a machine, from which [`Plan::timeline`] predicts an
/// iteration.
///
/// A collective over `N` ranks is taken to pass a buffer of `B` bytes in
/// `latency ceil(log2 N) + B (N - 1) / (N bandwidth)`. This is recursive halving and doubling,
/// which moves the fewest bytes and takes the fewest rounds (Thakur, Rabenseifner and Gropp, 2005,
/// <https://doi.org/10.1177/1094342005051521>).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// The links between all ranks, or between nodes.
    pub links: Links,
    /// The ranks of a node and the links inside it, if there are nodes. A collective then takes
    /// place inside nodes, and between the ranks at the same place of all nodes.
    pub node: Option<(usize, Links)>,
    /// Bytes of parameters per second that a rank updates element by element.
    pub elementwise: f64,
}

/// The forward and backward passes of an iteration, for [`Plan::timeline`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassTimes {
    /// Seconds of computation of a rank in both passes.
    pub seconds: f64,
    /// `true` if owned parameters are divided inside nodes, and replicated between them.
    pub inside_nodes: bool,
    /// Bytes of owned parameters that are gathered ahead of their use.
    pub ahead: usize,
    /// Bytes of activations and their gradients that a rank sums up with the ranks that have the
    /// other slices, in both passes together. The passes wait for each of these sums. Rows that are
    /// [exchanged](crate::parallel::exchange) count half, since they are sent once.
    pub activations: usize,
}

/// Seconds that a message occupies the links inside a node and between nodes.
#[derive(Debug, Clone, Copy, Default)]
struct Message {
    inside: f64,
    across: f64,
}

impl Links {
    /// Seconds of a collective for a buffer.
    fn time(&self, bytes: f64, ranks: usize) -> f64 {
        self.sending(bytes * (ranks - 1) as f64 / ranks as f64, ranks)
    }

    /// Seconds of a collective of which a rank sends a number of bytes.
    fn sending(&self, bytes: f64, ranks: usize) -> f64 {
        let rounds = ranks.next_power_of_two().ilog2();
        self.latency * f64::from(rounds) + bytes / self.bandwidth
    }
}

impl Machine {
    /// The message of a collective over all ranks, or over those that have the same slice of a
    /// buffer. The ranks with the other slices are neighbours, as on the last axis of a mesh.
    fn message(&self, bytes: usize, ranks: usize, slices: usize) -> Message {
        let (bytes, ranks) = (bytes as f64 / slices as f64, ranks.div_ceil(slices));
        match self.node {
            Some((size, inside)) => {
                let size = size.div_ceil(slices).min(ranks);
                Message {
                    inside: inside.time(bytes, size),
                    across: self.links.time(bytes / size as f64, ranks.div_ceil(size)),
                }
            }
            None => Message { inside: 0.0, across: self.links.time(bytes, ranks) },
        }
    }

    /// The message of a collective over the ranks with the other slices, of which a rank sends a
    /// number of bytes.
    fn among_slices(&self, bytes: f64, slices: usize) -> Message {
        match self.node {
            Some((size, inside)) if slices <= size => {
                Message { inside: inside.sending(bytes, slices), across: 0.0 }
            }
            _ => Message { inside: 0.0, across: self.links.sending(bytes, slices) },
        }
    }
}

/// The times until which the links are busy. Messages of one kind of links are sent one after the
/// other.
#[derive(Debug, Clone, Copy, Default)]
struct Wires {
    inside: f64,
    across: f64,
    /// The sum of all messages.
    sent: f64,
}

impl Wires {
    fn pass(busy: &mut f64, sent: &mut f64, ready: f64, seconds: f64) -> f64 {
        if seconds == 0.0 {
            return ready;
        }
        *busy = busy.max(ready) + seconds;
        *sent += seconds;
        *busy
    }

    /// Sums inside nodes, and then between them.
    fn reduce(&mut self, ready: f64, message: Message) -> f64 {
        let inside = Self::pass(&mut self.inside, &mut self.sent, ready, message.inside);
        Self::pass(&mut self.across, &mut self.sent, inside, message.across)
    }

    /// Gathers between nodes, and then inside them.
    fn gather(&mut self, ready: f64, message: Message) -> f64 {
        let across = Self::pass(&mut self.across, &mut self.sent, ready, message.across);
        Self::pass(&mut self.inside, &mut self.sent, across, message.inside)
    }
}

/// The predicted seconds of an iteration, from [`Plan::timeline`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timeline {
    /// Seconds from the start of the forward pass to the end of the step.
    pub total: f64,
    /// Seconds of computation of the busiest rank.
    pub compute: f64,
    /// Seconds of all collectives, one after the other.
    pub communication: f64,
}

impl Plan {
    /// Predicts the duration of an iteration: a forward pass, a backward pass and a step. `costs`
    /// are in seconds.
    ///
    /// The passes are divided among the parameters by their elements. Parameters are used in the
    /// order of the model, and their messages are
    ///
    /// | placement | forward pass | backward pass | step |
    /// |---|---|---|---|
    /// | [`Replicated`](Placement::Replicated) | | | reduced, gathered |
    /// | [`Reduced`](Placement::Reduced) | gathered, as with [`AtFirstUse`](crate::distributed::Publish::AtFirstUse) | reduced | |
    /// | [`Owned`](Placement::Owned) | gathered | gathered again, reduced | |
    ///
    /// New parameters arrive in whole buckets, in the order of the first parameter of each; all
    /// other messages of the passes are of single parameters.
    ///
    /// Parameters that are cut have messages of slices. In the step, gradients are
    /// assembled after the reduction, and directions are distributed before new values are
    /// gathered. Of parameters in half precision or updated element by element, values are
    /// assembled and distributed. So they are for updates that need whole values, which a plan does
    /// not know.
    ///
    /// A rank computes one parameter, or one bucket of the step, after the other.
    ///
    /// # Panics
    ///
    /// If `costs` has no entry for a shape of the plan.
    pub fn timeline(&self, costs: &Costs, machine: &Machine, passes: &PassTimes) -> Timeline {
        let ranks = self.world_size();
        let mut wires = Wires::default();
        let (passed, reduced) = self.passes(machine, passes, &mut wires);

        // Replicated parameters are reduced in the order of their buckets, owned ones before.
        let slices = |bucket: &Bucket| self.slices(bucket.parameters[0]);
        let message = |bucket: &Bucket| machine.message(bucket.bytes(), ranks, slices(bucket));
        // Of each element of a bucket, the bytes that are sent: gradients, and values if these are
        // distributed instead of directions.
        let assembled: Vec<usize> =
            self.buckets().iter().map(|bucket| self.assembled(bucket)).collect();
        let among_slices = |index: usize, bytes: usize| match assembled[index] {
            0 => Message::default(),
            elements => {
                let bytes = (bytes * elements) as f64 / ranks as f64;
                machine.among_slices(bytes, slices(&self.buckets()[index]))
            }
        };
        let to_assemble = |index: usize| {
            let Bucket { kind, dtype, .. } = self.buckets()[index];
            let precise = precise_dtype(dtype).size();
            let with_values = kind != BucketKind::Matrices || is_half(dtype);
            precise + if with_values { dtype.size() } else { 0 }
        };
        let to_distribute = |index: usize| self.buckets()[index].dtype.size();
        let mut ready = vec![0.0; self.buckets().len()];
        let order = self.update_order();
        for &index in &order {
            let bucket = &self.buckets()[index];
            ready[index] = match bucket.placement {
                Placement::Replicated => {
                    let summed = wires.reduce(passed, message(bucket));
                    match bucket.kind {
                        // An all-reduce is a reduce-scatter and an all-gather.
                        BucketKind::Replicated => wires.gather(summed, message(bucket)),
                        _ => summed,
                    }
                }
                _ => bucket.parameters.iter().map(|p| reduced[*p]).fold(passed, f64::max),
            };
            ready[index] = wires.reduce(ready[index], among_slices(index, to_assemble(index)));
        }
        let work = self.work(costs);
        let update = |index: usize, rank: usize| {
            work[index][rank] + elementwise(&self.buckets()[index], rank, machine)
        };
        // One float32 for each parameter, to all ranks and back, after all reductions.
        let flags = machine.message(4 * self.parameters().len(), ranks, 1);
        let agree = |wires: &mut Wires| {
            let all = ready.iter().copied().fold(0.0, f64::max);
            let summed = wires.reduce(all, flags);
            wires.gather(summed, flags)
        };
        let mut done = vec![passed; ranks];
        let (mut end, mut agreed) = (passed, None);
        for index in order {
            let bucket = &self.buckets()[index];
            let start = match self.decides_alone(index) {
                true => ready[index],
                false => *agreed.get_or_insert_with(|| agree(&mut wires)),
            };
            for (rank, done) in done.iter_mut().enumerate() {
                *done = done.max(start) + update(index, rank);
            }
            let updated = done.iter().copied().fold(0.0, f64::max);
            let updated = wires.gather(updated, among_slices(index, to_distribute(index)));
            let gathers =
                bucket.placement == Placement::Replicated && bucket.kind != BucketKind::Replicated;
            end = end.max(if gathers { wires.gather(updated, message(bucket)) } else { updated });
        }
        end = end.max(agreed.unwrap_or_else(|| agree(&mut wires)));
        let busy = |rank| (0..self.buckets().len()).map(|bucket| update(bucket, rank)).sum();
        Timeline {
            total: end,
            compute: passes.seconds + (0..ranks).map(busy).fold(0.0, f64::max),
            communication: wires.sent,
        }
    }

    /// The end of the backward pass, and the times at which the gradients of parameters are
    /// reduced.
    fn passes(&self, machine: &Machine, passes: &PassTimes, wires: &mut Wires) -> (f64, Vec<f64>) {
        let bytes: Vec<usize> =
            self.parameters().iter().map(|p| p.elements() * p.dtype.size()).collect();
        let elements: usize = self.parameters().iter().map(super::Parameter::elements).sum();
        let seconds: Vec<f64> = self
            .parameters()
            .iter()
            .map(|parameter| passes.seconds * parameter.elements() as f64 / elements.max(1) as f64)
            .collect();
        let message =
            |index: usize| machine.message(bytes[index], self.world_size(), self.slices(index));
        // A sum in each pass, whose bytes are divided like the computation.
        let cut = |index: usize| self.slices(index) > 1;
        let of_cut: usize = (0..bytes.len()).filter(|index| cut(*index)).map(|i| bytes[i]).sum();
        let sum = |index: usize| match cut(index) {
            true => {
                let part = bytes[index] as f64 / of_cut as f64;
                let half = passes.activations as f64 * part / 2.0;
                let slices = self.slices(index) as f64;
                machine.among_slices(half * (slices - 1.0) / slices, self.slices(index))
            }
            false => Message::default(),
        };
        // A sum for all is one for a part each, and a gathering.
        let summed = |wires: &mut Wires, time: f64, index: usize| {
            let scattered = wires.reduce(time, sum(index));
            wires.gather(scattered, sum(index))
        };
        let split = |index: usize| match (self.parameters()[index].placement, passes.inside_nodes) {
            // The replicas of a part exchange it once, and the ranks that share it at every use.
            (Placement::Owned, true) => {
                let Message { inside, across } = message(index);
                [Message { inside: 0.0, across }, Message { inside, across: 0.0 }]
            }
            (Placement::Owned, false) => [Message::default(), message(index)],
            (Placement::Reduced | Placement::Replicated, _) => [Message::default(); 2],
        };
        let owned = |index: usize| match self.parameters()[index].placement {
            Placement::Owned => bytes[index],
            Placement::Replicated | Placement::Reduced => 0,
        };
        // Of those that arrive at their first use, a bucket is gathered as a whole.
        let mut bucket_of = vec![0; bytes.len()];
        for (index, bucket) in self.buckets().iter().enumerate() {
            bucket.parameters.iter().for_each(|parameter| bucket_of[*parameter] = index);
        }
        let mut published: Vec<Option<f64>> = vec![None; self.buckets().len()];
        let mut arrival = |wires: &mut Wires, parameter: usize| {
            let bucket = &self.buckets()[bucket_of[parameter]];
            if bucket.placement != Placement::Reduced {
                return 0.0;
            }
            *published[bucket_of[parameter]].get_or_insert_with(|| {
                wires.gather(
                    0.0,
                    machine.message(bucket.bytes(), self.world_size(), self.slices(parameter)),
                )
            })
        };
        let mut time = 0.0;
        let count = self.parameters().len();
        let mut forward = Ahead::new(passes.ahead);
        for (index, seconds) in seconds.iter().enumerate() {
            let [replicas, gathered] = split(index);
            let arrived = arrival(wires, index).max(wires.gather(0.0, replicas));
            let asked = forward.ask(owned(index));
            time = wires.gather(arrived.max(asked), gathered).max(time);
            time = summed(wires, time + FORWARD * seconds, index);
            forward.used(time);
        }
        let (mut reduced, mut backward) = (vec![0.0; count], Ahead::new(passes.ahead));
        backward.start = time;
        // The messages of the next parameters, in the order of the backward pass.
        let mut arrived = vec![0.0; count];
        let order: Vec<usize> = (0..count).rev().collect();
        let mut asked_for = 0;
        for (position, &index) in order.iter().enumerate() {
            while asked_for < count
                && (asked_for <= position || backward.fits(owned(order[asked_for])))
            {
                let next = order[asked_for];
                let asked = backward.ask(owned(next));
                arrived[next] = wires.gather(asked, split(next)[1]);
                asked_for += 1;
            }
            time = arrived[index].max(time) + (1.0 - FORWARD) * seconds[index];
            time = summed(wires, time, index);
            backward.used(time);
            if self.parameters()[index].placement.reduces_in_backward() {
                reduced[index] = wires.reduce(time, message(index));
            }
        }
        (time, reduced)
    }

    /// The elements of a bucket whose owners do not have them in their slices. As on the last axis
    /// of a mesh, neighbouring ranks have the slices.
    fn assembled(&self, bucket: &Bucket) -> usize {
        let of_run = |rank: usize, run: &Run| {
            let slices = self.parameters()[run.parameter].slices.as_ref();
            let of_others = |slices: &Slices| {
                let held = slices.range(rank % slices.count(), &run.elements);
                run.elements.len() - held.len()
            };
            slices.map_or(0, of_others)
        };
        let ranks = 0..self.world_size();
        ranks
            .flat_map(|rank| bucket.runs(rank).into_iter().map(move |run| of_run(rank, &run)))
            .sum()
    }

    /// The number of slices of a parameter.
    fn slices(&self, parameter: usize) -> usize {
        self.parameters()[parameter].slices.as_ref().map_or(1, Slices::count)
    }

    /// Returns `true` if the owners of a bucket's parameters decide alone on their updates.
    pub(crate) fn decides_alone(&self, bucket: usize) -> bool {
        let parameters = &self.buckets()[bucket].parameters;
        parameters.iter().all(|parameter| self.owners()[*parameter].len() == 1)
    }

    /// The order in which a step updates the buckets: first those that owners decide on alone.
    fn update_order(&self) -> Vec<usize> {
        let (alone, together): (Vec<_>, Vec<_>) =
            (0..self.buckets().len()).partition(|bucket| self.decides_alone(*bucket));
        [alone, together].concat()
    }
}

/// Parameters that are gathered ahead of their use, up to a number of bytes.
struct Ahead {
    limit: usize,
    /// Bytes of those that were asked for, and the time of their use, if they were used.
    asked: Vec<(usize, Option<f64>)>,
    start: f64,
}

impl Ahead {
    fn new(limit: usize) -> Self {
        Self { limit, asked: vec![], start: 0.0 }
    }

    fn outstanding(&self) -> usize {
        self.asked.iter().filter(|(_, used)| used.is_none()).map(|(bytes, _)| bytes).sum()
    }

    /// Returns `true` if more bytes are within the limit.
    fn fits(&self, bytes: usize) -> bool {
        self.outstanding() + bytes <= self.limit
    }

    /// The time at which a parameter may be asked for: after the uses of those with which it
    /// exceeds the limit.
    fn ask(&mut self, bytes: usize) -> f64 {
        let mut together = bytes;
        let mut time = self.start;
        for (asked, used) in self.asked.iter().rev() {
            together += asked;
            if together > self.limit {
                time = used.unwrap_or(self.start);
                break;
            }
        }
        self.asked.push((bytes, None));
        time
    }

    /// Marks the first that was not used as used.
    fn used(&mut self, time: f64) {
        if let Some((_, used)) = self.asked.iter_mut().find(|(_, used)| used.is_none()) {
            *used = Some(time);
        }
    }
}

/// Seconds of AdamW on a rank's shard of a bucket. An optimizer of the user's counts as AdamW.
fn elementwise(bucket: &Bucket, rank: usize, machine: &Machine) -> f64 {
    match bucket.kind {
        BucketKind::Matrices => 0.0,
        BucketKind::Whole | BucketKind::Elements | BucketKind::Replicated => {
            (bucket.counts.of(rank) * bucket.dtype.size()) as f64 / machine.elementwise
        }
    }
}
