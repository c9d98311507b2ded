//! The bytes of the gradients that a backward pass reduces, as they come and go.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{PlannedRank, RankMemory};
use crate::backend::precise_dtype;
use crate::distributed::layout::PassParameter;

/// A gradient on its way to its owners.
struct Flight<'a> {
    parameter: &'a PassParameter,
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
    pub fn run(mut self, parameters: &'a [Arc<PassParameter>], memory: RankMemory) -> RankMemory {
        let limits = self.rank.layout.limits();
        // In the order of a backward pass; a message may be larger than the limit, alone.
        for parameter in parameters.iter().rev().filter(|parameter| parameter.is_trained) {
            let bytes = self.rank.gradient_dtype(parameter.dtype).size();
            let sent = parameter.most_elements() * bytes;
            // The packed gradient waits while earlier ones make room.
            self.observe(sent);
            while !self.flights.is_empty() && self.sent() + sent > limits.in_flight {
                self.land();
            }
            // The bytes sent and the bytes received are there at one time.
            let message = sent + parameter.received() * bytes;
            self.messages += message;
            self.flights.push_back(Flight { parameter, sent, message, among_replicas: false });
            self.observe(0);
        }
        while !self.flights.is_empty() {
            self.land();
        }
        let gathered = gathered(parameters, limits.ahead);
        let [shards, messages, together] = self.peaks;
        let peak = memory.between_steps() + memory.gradients + together + gathered;
        RankMemory { shards, messages, gathered, peak, ..memory }
    }

    fn sent(&self) -> usize {
        self.flights.iter().map(|flight| flight.sent).sum()
    }

    fn land(&mut self) {
        let flight = self.flights.pop_front().expect("a gradient is on its way");
        let Flight { parameter, message, sent, among_replicas } = flight;
        self.messages -= message;
        let wide = precise_dtype(parameter.dtype).size();
        let replicas = parameter.shard_counts().ranks();
        if replicas > 1 && !among_replicas {
            // The sum of the first stage is float32, whatever was sent.
            let message = (parameter.part_count() + parameter.received_of_replicas()) * wide;
            self.messages += message;
            self.flights.push_back(Flight { parameter, sent, message, among_replicas: true });
        } else {
            self.means += parameter.shard_count() * wide;
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
fn gathered(parameters: &[Arc<PassParameter>], limit: usize) -> usize {
    let owned = parameters.iter().filter(|parameter| parameter.placement.is_owned());
    let all: Vec<usize> = owned.map(|parameter| parameter.bytes()).collect();
    let largest = all.iter().copied().max().unwrap_or_default();
    // One may be larger than the limit, and is gathered nevertheless when it is used.
    largest.max(limit).min(all.iter().sum())
}
