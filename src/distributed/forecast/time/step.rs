//! The step of an iteration, bucket by bucket.

use super::machine::{Machine, Message, Wires};
use super::slices;
use crate::backend::precise_dtype;
use crate::distributed::plan::{Bucket, BucketKind, Costs, Placement, Plan, Run, Slices};
use crate::update::is_half;

/// The step of a plan on a machine.
pub struct Step<'a> {
    plan: &'a Plan,
    machine: &'a Machine,
    /// The cost of each rank's matrices: `[bucket][rank]`.
    work: Vec<Vec<f64>>,
    /// The order in which the buckets are updated.
    order: Vec<usize>,
}

impl<'a> Step<'a> {
    pub fn new(plan: &'a Plan, costs: &Costs, machine: &'a Machine) -> Self {
        Self { plan, machine, work: plan.work(costs), order: plan.update_order() }
    }

    /// Returns the end of the step, from the end of the passes and the times at which they have
    /// reduced the gradients of parameters.
    pub fn run(&self, wires: &mut Wires, passed: f64, reduced: &[f64]) -> f64 {
        let ready = self.reduce(wires, passed, reduced);
        let mut done = vec![passed; self.plan.world_size()];
        let (mut end, mut agreed) = (passed, None);
        for &index in &self.order {
            let bucket = &self.plan.buckets()[index];
            let start = match self.plan.decides_alone(index) {
                true => ready[index],
                false => *agreed.get_or_insert_with(|| self.agree(wires, &ready)),
            };
            for (rank, done) in done.iter_mut().enumerate() {
                *done = done.max(start) + self.update(index, rank);
            }
            let updated = latest(&done);
            let distributed = self.among_slices(index, bucket.dtype.size());
            let updated = wires.gather(updated, distributed);
            let gathers =
                bucket.placement == Placement::Replicated && bucket.kind != BucketKind::Replicated;
            let arrived =
                if gathers { wires.gather(updated, self.message(bucket)) } else { updated };
            end = end.max(arrived);
        }
        // Also where no bucket waits for it: all ranks count the skipped steps of all parameters.
        end.max(agreed.unwrap_or_else(|| self.agree(wires, &ready)))
    }

    /// The seconds of computation of the busiest rank.
    pub fn compute(&self) -> f64 {
        let buckets = self.plan.buckets().len();
        (0..self.plan.world_size())
            .map(|rank| (0..buckets).map(|bucket| self.update(bucket, rank)).sum())
            .fold(0.0, f64::max)
    }

    /// The times at which the gradients of buckets are reduced and assembled. Replicated parameters
    /// are reduced in the order of their buckets, owned ones before.
    fn reduce(&self, wires: &mut Wires, passed: f64, reduced: &[f64]) -> Vec<f64> {
        let mut ready = vec![0.0; self.plan.buckets().len()];
        for &index in &self.order {
            let bucket = &self.plan.buckets()[index];
            let arrived = match bucket.placement {
                Placement::Replicated => {
                    let summed = wires.reduce(passed, self.message(bucket));
                    match bucket.kind {
                        // An all-reduce is a reduce-scatter and an all-gather.
                        BucketKind::Replicated => wires.gather(summed, self.message(bucket)),
                        _ => summed,
                    }
                }
                _ => bucket.parameters.iter().map(|p| reduced[*p]).fold(passed, f64::max),
            };
            let assembled = self.among_slices(index, to_assemble(bucket));
            ready[index] = wires.reduce(arrived, assembled);
        }
        ready
    }

    /// The time at which all ranks have exchanged one float32 for each parameter, after all
    /// reductions.
    fn agree(&self, wires: &mut Wires, ready: &[f64]) -> f64 {
        let (bytes, ranks) = (4 * self.plan.parameters().len(), self.plan.world_size());
        let flags = self.machine.message(bytes, ranks, 1);
        let summed = wires.reduce(latest(ready), flags);
        wires.gather(summed, flags)
    }

    /// The message that reduces or gathers a bucket.
    fn message(&self, bucket: &Bucket) -> Message {
        let slices = slices(self.plan, bucket.parameters[0]);
        self.machine.message(bucket.bytes(), self.plan.world_size(), slices)
    }

    /// The message that assembles the elements of a bucket at their owners, or distributes them,
    /// with some bytes for each.
    fn among_slices(&self, index: usize, bytes: usize) -> Message {
        let bucket = &self.plan.buckets()[index];
        match assembled(self.plan, bucket) {
            0 => Message::default(),
            elements => {
                let bytes = (bytes * elements) as f64 / self.plan.world_size() as f64;
                let slices = self.plan.parameters()[bucket.parameters[0]].slices.as_ref();
                self.machine.among_slices(bytes, slices.map_or(1, Slices::count))
            }
        }
    }

    /// Seconds in which a rank updates its part of a bucket.
    fn update(&self, index: usize, rank: usize) -> f64 {
        self.work[index][rank] + elementwise(&self.plan.buckets()[index], rank, self.machine)
    }
}

fn latest(times: &[f64]) -> f64 {
    times.iter().copied().fold(0.0, f64::max)
}

/// The bytes of each element of a bucket that are sent to its owner: of the gradient, and of the
/// value if this is distributed instead of a direction.
fn to_assemble(bucket: &Bucket) -> usize {
    let with_values = bucket.kind != BucketKind::Matrices || is_half(bucket.dtype);
    precise_dtype(bucket.dtype).size() + if with_values { bucket.dtype.size() } else { 0 }
}

/// The elements of a bucket whose owners do not have them in their slices. As on the last axis of a
/// mesh, neighbouring ranks have the slices.
fn assembled(plan: &Plan, bucket: &Bucket) -> usize {
    let of_run = |rank: usize, run: &Run| {
        let slices = plan.parameters()[run.parameter].slices.as_ref();
        slices.map_or(0, |slices| {
            let held = slices.range(rank % slices.count(), &run.elements);
            run.elements.len() - held.len()
        })
    };
    (0..plan.world_size())
        .flat_map(|rank| bucket.runs(rank).into_iter().map(move |run| of_run(rank, &run)))
        .sum()
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
