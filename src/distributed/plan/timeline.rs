//! The predicted duration of a step on a described machine.

use super::{Bucket, BucketKind, Costs, Plan};

/// The bandwidth, latency and elementwise speed of a machine, from which [`Plan::timeline`]
/// predicts a step.
///
/// A collective over `N` ranks is taken to pass a buffer of `B` bytes in
/// `latency ceil(log2 N) + B (N - 1) / (N bandwidth)`. This is recursive halving and doubling,
/// which moves the fewest bytes and takes the fewest rounds (Thakur, Rabenseifner and Gropp, 2005,
/// <https://doi.org/10.1177/1094342005051521>).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Bytes per second that a rank sends while it receives the same number.
    pub bandwidth: f64,
    /// Seconds that a message takes in addition to the transfer of its bytes.
    pub latency: f64,
    /// Bytes of parameters per second that a rank updates element by element.
    pub elementwise: f64,
}

impl Machine {
    /// Seconds that a collective takes for a buffer.
    fn collective_time(&self, bytes: usize, ranks: usize) -> f64 {
        let rounds = ranks.next_power_of_two().ilog2();
        let moved = (bytes * (ranks - 1)) as f64 / ranks as f64;
        self.latency * f64::from(rounds) + moved / self.bandwidth
    }
}

/// The predicted seconds of a step, from [`Plan::timeline`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timeline {
    /// Seconds from the start of the first reduction to the arrival of the last parameter.
    pub total: f64,
    /// Seconds of computation of the busiest rank.
    pub compute: f64,
    /// Seconds of all collectives, one after the other.
    pub communication: f64,
}

impl Plan {
    /// Predicts the duration of the three phases of a step. `costs` are in seconds.
    ///
    /// Collectives run one after the other: all reductions, then the agreement on rejected
    /// gradients, then the gathering of each bucket when the last rank has updated it. A rank
    /// updates its shards one after the other as soon as the agreement is known.
    ///
    /// # Panics
    ///
    /// If `costs` has no entry for a shape of the plan.
    pub fn timeline(&self, costs: &Costs, machine: &Machine) -> Timeline {
        let ranks = self.world_size();
        let messages: Vec<Messages> =
            self.buckets().iter().map(|bucket| Messages::new(bucket, machine, ranks)).collect();
        let work = self.work(costs);
        let update = |bucket: usize, rank: usize| {
            work[bucket][rank] + elementwise(&self.buckets()[bucket], rank, machine)
        };
        // One float32 for each parameter, to all ranks and back.
        let agreement = 2.0 * machine.collective_time(4 * self.parameters().len(), ranks);
        let reductions = messages.iter().map(|messages| messages.reduce).sum::<f64>();
        let mut wire: f64 = reductions + agreement;
        let mut done = vec![wire; ranks];
        for (bucket, messages) in messages.iter().enumerate() {
            done.iter_mut().enumerate().for_each(|(rank, done)| *done += update(bucket, rank));
            wire = done.iter().copied().fold(wire, f64::max) + messages.gather;
        }
        let busy = |rank| (0..messages.len()).map(|bucket| update(bucket, rank)).sum();
        Timeline {
            total: wire,
            compute: (0..ranks).map(busy).fold(0.0, f64::max),
            communication: agreement + messages.iter().map(|m| m.reduce + m.gather).sum::<f64>(),
        }
    }
}

/// Seconds that the collectives of a bucket take.
struct Messages {
    reduce: f64,
    gather: f64,
}

impl Messages {
    fn new(bucket: &Bucket, machine: &Machine, ranks: usize) -> Self {
        let time = machine.collective_time(bucket.elements() * bucket.dtype.size(), ranks);
        let (reduce, gather) = match bucket.kind {
            // An all-reduce is a reduce-scatter and an all-gather.
            BucketKind::Replicated => (2.0 * time, 0.0),
            BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => (time, time),
        };
        Self { reduce, gather }
    }
}

/// Seconds of AdamW on a rank's shard of a bucket. An optimizer of the user's counts as AdamW.
fn elementwise(bucket: &Bucket, rank: usize, machine: &Machine) -> f64 {
    match bucket.kind {
        BucketKind::Matrices => 0.0,
        BucketKind::Whole | BucketKind::Elements | BucketKind::Replicated => {
            (bucket.counts[rank] * bucket.dtype.size()) as f64 / machine.elementwise
        }
    }
}
