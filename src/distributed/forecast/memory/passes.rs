//! The bytes of the gradients that a backward pass reduces, as they come and go.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{PlannedRank, RankMemory};
use crate::backend::precise_dtype;
use crate::distributed::layout::PassParameter;

/// A gradient on its way to its owners.
struct Flight<'a> {
    unit: &'a PassParameter,
    /// Bytes that count towards the limit, and bytes of the message.
    sent: usize,
    message: usize,
    among_replicas: bool,
}

/// A backward pass in progress, in bytes.
pub struct PassMemory<'a> {
    rank: &'a PlannedRank<'a>,
    flights: VecDeque<Flight<'a>>,
    messages: usize,
    means: usize,
    /// The most of shards, messages and both with a gradient that waits.
    peaks: [usize; 3],
}

impl<'a> PassMemory<'a> {
    pub fn new(rank: &'a PlannedRank<'a>) -> Self {
        Self { rank, flights: VecDeque::new(), messages: 0, means: 0, peaks: [0; 3] }
    }

    /// Adds the peaks of passes to the bytes between steps.
    pub fn run(mut self, units: &'a [Arc<PassParameter>], memory: RankMemory) -> RankMemory {
        let limits = self.rank.layout.limits();
        // In the order of a backward pass; a message may be larger than the limit, alone.
        for unit in units.iter().rev().filter(|unit| unit.is_trained) {
            let bytes = self.rank.gradient_dtype(unit.dtype).size();
            let sent = unit.most_elements() * bytes;
            self.observe(sent);
            while !self.flights.is_empty() && self.sent() + sent > limits.in_flight {
                self.land();
            }
            let message = sent + unit.received() * bytes;
            self.messages += message;
            self.flights.push_back(Flight { unit, sent, message, among_replicas: false });
            self.observe(0);
        }
        while !self.flights.is_empty() {
            self.land();
        }
        let gathered = gathered(units, limits.ahead);
        let [shards, messages, together] = self.peaks;
        let peak = memory.between_steps() + memory.gradients + together + gathered;
        RankMemory { shards, messages, gathered, peak, ..memory }
    }

    fn sent(&self) -> usize {
        self.flights.iter().map(|flight| flight.sent).sum()
    }

    fn land(&mut self) {
        let flight = self.flights.pop_front().expect("a gradient is on its way");
        let Flight { unit, message, sent, among_replicas } = flight;
        self.messages -= message;
        let wide = precise_dtype(unit.dtype).size();
        let replicas = unit.shard_counts().ranks();
        if replicas > 1 && !among_replicas {
            let message = (unit.part_count() + unit.received_of_replicas()) * wide;
            self.messages += message;
            self.flights.push_back(Flight { unit, sent, message, among_replicas: true });
        } else {
            self.means += unit.shard_count() * wide;
        }
        self.observe(0);
    }

    fn observe(&mut self, waiting: usize) {
        let messages = self.messages + waiting;
        let now = [self.means, messages, self.means + messages];
        self.peaks = std::array::from_fn(|kind| self.peaks[kind].max(now[kind]));
    }
}

/// Bytes of owned parameters that are gathered ahead, with the one in use.
fn gathered(units: &[Arc<PassParameter>], limit: usize) -> usize {
    let owned = units.iter().filter(|unit| unit.placement.is_owned());
    let all: Vec<usize> = owned.map(|unit| unit.bytes()).collect();
    let largest = all.iter().copied().max().unwrap_or_default();
    largest.max(limit).min(all.iter().sum())
}
