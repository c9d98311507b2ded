//! The bytes of the gradients that a backward pass reduces, as they come and go.

use std::collections::VecDeque;

use super::RankMemory;
use crate::backend::precise_dtype;
use crate::comm::{received, sum_over_ranks};
use crate::distributed::forecast::planned_rank::PlannedRank;
use crate::distributed::layout::{Message, PassParameter, Passes};

/// Gradients of one type on their way to their owners, in one message.
struct GradientMessage<'a> {
    parameters: Vec<&'a PassParameter>,
    /// Bytes of the message: sent and received, and while what was received is added up.
    message: usize,
    added_up: usize,
    among_replicas: bool,
}

/// A backward pass in progress, in bytes.
pub struct PassMemory<'a> {
    rank: &'a PlannedRank,
    /// Gradients that wait for others of their kind, and their bytes.
    buckets: Vec<Vec<&'a PassParameter>>,
    waiting: usize,
    flights: VecDeque<GradientMessage<'a>>,
    messages: usize,
    means: usize,
    /// The most of shards, of messages with gradients that wait, and of both.
    peaks: [usize; 3],
}

impl<'a> PassMemory<'a> {
    pub fn new(rank: &'a PlannedRank) -> Self {
        let (buckets, flights) = (vec![], VecDeque::new());
        Self { rank, buckets, waiting: 0, flights, messages: 0, means: 0, peaks: [0; 3] }
    }

    /// Adds the peaks of passes to the bytes between steps.
    pub fn run(mut self, passes: &'a Passes, memory: RankMemory) -> RankMemory {
        let of_bucket = passes.limits().in_flight / 2;
        let trained = passes.parameters().iter().filter(|parameter| parameter.is_trained);
        // In the order of a backward pass; a gradient may be larger than the limit, alone.
        for parameter in trained.rev() {
            let bytes = self.bytes(parameter);
            // It waits while earlier ones make room.
            self.observe(bytes);
            if self.waiting + bytes > of_bucket {
                self.send();
            }
            self.add_to_bucket(parameter);
            if self.waiting >= of_bucket {
                self.send();
            }
        }
        self.send();
        while !self.flights.is_empty() {
            self.land();
        }
        let gathered = gathered(passes);
        let [shards, messages, together] = self.peaks;
        let peak = memory.between_steps() + memory.gradients + together + gathered;
        RankMemory { shards, messages, gathered, peak, ..memory }
    }

    /// Bytes of a gradient: of the largest slice, if the parameter is cut.
    fn bytes(&self, parameter: &PassParameter) -> usize {
        parameter.most_elements() * self.rank.gradient_dtype(parameter.dtype).size()
    }

    fn add_to_bucket(&mut self, parameter: &'a PassParameter) {
        self.waiting += self.bytes(parameter);
        let kind = |parameter: &'a PassParameter| (parameter.axes(), parameter.dtype);
        match self.buckets.iter_mut().find(|bucket| kind(bucket[0]) == kind(parameter)) {
            Some(bucket) => bucket.push(parameter),
            None => self.buckets.push(vec![parameter]),
        }
        self.observe(0);
    }

    /// Sends the gradients that wait, once those before them have arrived.
    fn send(&mut self) {
        if self.buckets.is_empty() {
            return;
        }
        (0..self.flights.len()).for_each(|_| self.land());
        for parameters in std::mem::take(&mut self.buckets) {
            let dtype = self.rank.gradient_dtype(parameters[0].dtype);
            let sent: usize = parameters.iter().map(|parameter| self.bytes(parameter)).sum();
            if parameters.len() > 1 {
                // Copied into one buffer.
                self.observe(sent);
            }
            self.waiting -= sent;
            // The bytes sent and the bytes received are there at one time.
            let totals = Message::of(parameters.iter().map(|of| of.part_counts())).totals();
            let received = received(&totals, parameters[0].part_index());
            let message = sent + received * dtype.size();
            let added_up = sum_over_ranks::bytes_of_rows(received, totals.len(), dtype);
            self.messages += message;
            self.observe(0);
            let flight = GradientMessage { parameters, message, added_up, among_replicas: false };
            match totals.len() {
                // Nothing to send: the sum among replicas is the only one.
                1 => self.arrive(flight),
                _ => self.flights.push_back(flight),
            }
        }
    }

    fn land(&mut self) {
        let flight = self.flights.pop_front().expect("a gradient is on its way");
        self.arrive(flight);
    }

    fn arrive(&mut self, flight: GradientMessage<'a>) {
        let GradientMessage { parameters, message, added_up, among_replicas } = flight;
        self.messages -= message;
        self.observe(added_up);
        let precise = precise_dtype(parameters[0].dtype);
        let wide = precise.size();
        let sum = |count: fn(&PassParameter) -> usize| -> usize {
            parameters.iter().map(|parameter| count(parameter)).sum()
        };
        if parameters[0].shard_counts().ranks() > 1 && !among_replicas {
            // The sum of the first stage is float32, whatever was sent.
            let totals = Message::of(parameters.iter().map(|of| of.shard_counts())).totals();
            let received = received(&totals, parameters[0].shard_index());
            let message = (sum(PassParameter::part_count) + received) * wide;
            let added_up = sum_over_ranks::bytes_of_rows(received, totals.len(), precise);
            self.messages += message;
            self.flights.push_back(GradientMessage {
                parameters,
                message,
                added_up,
                among_replicas: true,
            });
        } else {
            self.means += sum(PassParameter::shard_count) * parameters[0].mean_dtype.size();
        }
        self.observe(0);
    }

    fn observe(&mut self, more: usize) {
        let messages = self.messages + self.waiting + more;
        let now = [self.means, messages, self.means + messages];
        self.peaks = std::array::from_fn(|kind| self.peaks[kind].max(now[kind]));
    }
}

/// Bytes of owned parameters that are gathered ahead, with the one in use.
fn gathered(passes: &Passes) -> usize {
    let owned = passes.parameters().iter().filter(|parameter| parameter.placement.is_owned());
    let all: Vec<usize> = owned.map(|parameter| parameter.bytes()).collect();
    let (limit, largest) = (passes.limits().ahead, all.iter().copied().max().unwrap_or_default());
    // A large one is gathered alone, while others have at most half of the limit.
    limit.max(limit / 2 + largest).min(all.iter().sum())
}
