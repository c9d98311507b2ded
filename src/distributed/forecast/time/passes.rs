//! The forward and the backward pass of an iteration, parameter by parameter.

use super::machine::{Machine, Message, Wires};
use super::slices;
use crate::distributed::layout::bytes_of_two_layers;
use crate::distributed::plan::{Placement, Plan};

/// The part of the passes that is the forward pass. A backward pass has twice its operations.
const FORWARD: f64 = 1.0 / 3.0;

/// The forward and backward passes of an iteration, for [`timeline`](super::timeline).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassTimes {
    /// Seconds of computation of a rank in both passes.
    pub seconds: f64,
    /// `true` if owned parameters are divided inside nodes, and replicated between them.
    pub inside_nodes: bool,
    /// Bytes of owned parameters that are gathered ahead of their use. `None` for the default of
    /// [`Layout::with_ahead_mb`](crate::distributed::Layout::with_ahead_mb).
    pub ahead: Option<usize>,
    /// Bytes of gradients that are collected and reduced at once. `None` for the default of
    /// [`Layout::with_in_flight_mb`](crate::distributed::Layout::with_in_flight_mb).
    pub in_flight: Option<usize>,
    /// Bytes of activations and their gradients that a rank sums up with the ranks that have the
    /// other slices, in both passes together. The passes wait for each of these sums. Rows that are
    /// [exchanged](crate::parallel::exchange) count half, since they are sent once.
    pub activations: usize,
}

/// The passes of a plan on a machine.
pub struct Passes<'a> {
    plan: &'a Plan,
    machine: &'a Machine,
    times: &'a PassTimes,
    /// For every parameter, its bytes, and the seconds of computation in both passes.
    bytes: Vec<usize>,
    seconds: Vec<f64>,
    /// Bytes of the parameters that are cut.
    of_cut: usize,
    /// For every parameter, the index of its bucket.
    bucket_of: Vec<usize>,
    /// Bytes that are gathered ahead, and bytes of gradients in flight.
    ahead: usize,
    in_flight: usize,
}

impl<'a> Passes<'a> {
    pub fn new(plan: &'a Plan, machine: &'a Machine, times: &'a PassTimes) -> Self {
        let parameters = plan.parameters();
        let bytes: Vec<usize> = parameters.iter().map(|p| p.elements() * p.dtype.size()).collect();
        let elements: usize = parameters.iter().map(|p| p.elements()).sum();
        let seconds = parameters
            .iter()
            // By elements, as the operations of a linear layer are for any batch.
            .map(|parameter| times.seconds * parameter.elements() as f64 / elements.max(1) as f64)
            .collect();
        let of_cut = (0..bytes.len()).filter(|p| slices(plan, *p) > 1).map(|p| bytes[p]).sum();
        let mut bucket_of = vec![0; bytes.len()];
        for (index, bucket) in plan.buckets().iter().enumerate() {
            bucket.parameters.iter().for_each(|parameter| bucket_of[*parameter] = index);
        }
        let two_layers = |is_sent: fn(Placement) -> bool| {
            let sent = parameters.iter().zip(&bytes).enumerate();
            let sent = sent.filter(|(_, (parameter, _))| is_sent(parameter.placement));
            bytes_of_two_layers(
                sent.map(|(p, (parameter, bytes))| (&*parameter.path, bytes / slices(plan, p))),
            )
        };
        let ahead = times.ahead.unwrap_or_else(|| two_layers(Placement::is_owned));
        let in_flight =
            times.in_flight.unwrap_or_else(|| two_layers(Placement::reduces_in_backward));
        Self { plan, machine, times, bytes, seconds, of_cut, bucket_of, ahead, in_flight }
    }

    /// Returns the end of the backward pass, and the times at which the gradients of parameters are
    /// reduced.
    pub fn run(&self, wires: &mut Wires) -> (f64, Vec<f64>) {
        let time = self.forward(wires);
        self.backward(wires, time)
    }

    fn forward(&self, wires: &mut Wires) -> f64 {
        let mut published = vec![None; self.plan.buckets().len()];
        let mut gathering = Gathering::new(self, 0..self.bytes.len(), self.times.inside_nodes);
        let mut time = 0.0;
        for (index, seconds) in self.seconds.iter().enumerate() {
            let arrived = self.arrival(wires, &mut published, index);
            time = gathering.arrival(wires, index, time).max(arrived).max(time);
            time = self.summed(wires, time + FORWARD * seconds, index);
        }
        time
    }

    fn backward(&self, wires: &mut Wires, start: f64) -> (f64, Vec<f64>) {
        let mut time = start;
        // A backward pass goes through the layers in reverse.
        let order = || (0..self.bytes.len()).rev();
        // The forward pass has exchanged the new parts among replicas.
        let mut gathering = Gathering::new(self, order(), false);
        let mut reducing = Reducing::new(self);
        for index in order() {
            time = gathering.arrival(wires, index, time).max(time);
            time += (1.0 - FORWARD) * self.seconds[index];
            time = self.summed(wires, time, index);
            if self.plan.parameters()[index].placement.reduces_in_backward() {
                time = reducing.add(wires, index, time);
            }
        }
        time = reducing.send(wires, time);
        (time, reducing.reduced)
    }

    /// The time at which a new parameter has arrived: with all others of its bucket, if that is
    /// gathered at its first use.
    fn arrival(&self, wires: &mut Wires, published: &mut [Option<f64>], parameter: usize) -> f64 {
        let index = self.bucket_of[parameter];
        let bucket = &self.plan.buckets()[index];
        if bucket.placement != Placement::Reduced {
            return 0.0;
        }
        *published[index].get_or_insert_with(|| {
            let (ranks, slices) = (self.plan.world_size(), slices(self.plan, parameter));
            wires.gather(0.0, self.machine.message(bucket.bytes(), ranks, slices))
        })
    }

    /// The message that gathers or reduces parameters that have as many slices.
    fn message(&self, indices: &[usize]) -> Message {
        let bytes = indices.iter().map(|index| self.bytes[*index]).sum();
        self.machine.message(bytes, self.plan.world_size(), slices(self.plan, indices[0]))
    }

    /// Bytes of the slices of parameters.
    fn bytes(&self, indices: &[usize]) -> usize {
        indices.iter().map(|index| self.bytes[*index] / slices(self.plan, *index)).sum()
    }

    /// The end of the sum of activations for a parameter that is cut: a sum for all is one for a
    /// part each, and a gathering.
    fn summed(&self, wires: &mut Wires, time: f64, index: usize) -> f64 {
        let sum = self.sum(index);
        let scattered = wires.reduce(time, sum);
        wires.gather(scattered, sum)
    }

    /// The message of a sum in each pass, whose bytes are divided like the computation.
    fn sum(&self, index: usize) -> Message {
        let slices = slices(self.plan, index);
        if slices == 1 {
            return Message::default();
        }
        let part = self.bytes[index] as f64 / self.of_cut as f64;
        let half = self.times.activations as f64 * part / 2.0;
        self.machine.among_slices(half * (slices as f64 - 1.0) / slices as f64, slices)
    }

    /// The messages of owned parameters that are gathered together: once, and at every use. The
    /// replicas of a part exchange it once, and the ranks that share it at every use.
    fn gathered(&self, indices: &[usize]) -> [Message; 2] {
        let message = self.message(indices);
        match (self.times.inside_nodes, message) {
            (true, Message { inside, across }) => {
                [Message { inside: 0.0, across }, Message { inside, across: 0.0 }]
            }
            (false, message) => [Message::default(), message],
        }
    }
}

/// Owned parameters that are gathered in messages, in the order of their uses.
struct Gathering<'a> {
    passes: &'a Passes<'a>,
    order: Vec<usize>,
    /// The number of parameters that were asked for.
    asked: usize,
    /// Bytes that were asked for and not used.
    ahead: usize,
    /// The times at which parameters arrive.
    arrived: Vec<f64>,
    /// `true` if replicas exchange new parts before.
    publishes: bool,
}

impl<'a> Gathering<'a> {
    fn new(passes: &'a Passes<'a>, order: impl Iterator<Item = usize>, publishes: bool) -> Self {
        let is_owned = |index: &usize| passes.plan.parameters()[*index].placement.is_owned();
        let (order, arrived) = (order.filter(is_owned).collect(), vec![0.0; passes.bytes.len()]);
        Self { passes, order, asked: 0, ahead: 0, arrived, publishes }
    }

    /// The time at which a parameter has arrived that is used as soon as possible. Those after it
    /// are asked for.
    fn arrival(&mut self, wires: &mut Wires, index: usize, time: f64) -> f64 {
        let Some(position) = self.order.iter().position(|owned| *owned == index) else {
            return time;
        };
        if position == self.asked {
            self.ask(wires, 1, time);
        }
        while let Some(count) = self.next() {
            self.ask(wires, count, time);
        }
        self.ahead -= self.passes.bytes(&[index]);
        self.arrived[index]
    }

    /// The number of parameters of the next message, if it is within the limit.
    fn next(&self) -> Option<usize> {
        let (passes, rest) = (self.passes, &self.order[self.asked..]);
        let (first, half) = (*rest.first()?, passes.ahead / 2);
        let fits = |count: &usize| {
            let are_alike = slices(passes.plan, rest[count - 1]) == slices(passes.plan, first);
            are_alike && passes.bytes(&rest[..*count]) <= half
        };
        // A parameter above the limit is sent alone.
        let count = (1..=rest.len()).take_while(fits).last().unwrap_or(1);
        let bytes = passes.bytes(&rest[..count]);
        (self.ahead + bytes <= passes.ahead || self.ahead <= half).then_some(count)
    }

    fn ask(&mut self, wires: &mut Wires, count: usize, time: f64) {
        let indices = &self.order[self.asked..self.asked + count];
        let [replicas, gathered] = self.passes.gathered(indices);
        // From the start of the pass on, since the step before has made the new parts.
        let published = if self.publishes { wires.gather(0.0, replicas) } else { 0.0 };
        let arrived = wires.gather(time.max(published), gathered);
        indices.iter().for_each(|index| self.arrived[*index] = arrived);
        self.ahead += self.passes.bytes(indices);
        self.asked += count;
    }
}

/// Gradients that are reduced in messages.
struct Reducing<'a> {
    passes: &'a Passes<'a>,
    waiting: Vec<usize>,
    /// The times at which the messages before have arrived.
    arrived: Vec<f64>,
    /// For every parameter, the time at which its gradient is reduced.
    reduced: Vec<f64>,
}

impl<'a> Reducing<'a> {
    fn new(passes: &'a Passes<'a>) -> Self {
        Self { passes, waiting: vec![], arrived: vec![], reduced: vec![0.0; passes.bytes.len()] }
    }

    /// Adds a gradient. Returns the time at which the backward pass goes on.
    fn add(&mut self, wires: &mut Wires, index: usize, mut time: f64) -> f64 {
        let (passes, half) = (self.passes, self.passes.in_flight / 2);
        // One message has one group of ranks, and parameters with other slices have another.
        let is_alike = |other: &usize| slices(passes.plan, *other) == slices(passes.plan, index);
        let are_alike = self.waiting.iter().all(is_alike);
        if !are_alike || passes.bytes(&self.waiting) + passes.bytes(&[index]) > half {
            time = self.send(wires, time);
        }
        self.waiting.push(index);
        if passes.bytes(&self.waiting) >= half { self.send(wires, time) } else { time }
    }

    /// Sends the gradients that wait, once the message before has arrived; with sums between nodes,
    /// which start after those inside, the one before that.
    fn send(&mut self, wires: &mut Wires, time: f64) -> f64 {
        if self.waiting.is_empty() {
            return time;
        }
        let behind = if self.passes.times.inside_nodes { 2 } else { 1 };
        let before = self.arrived.iter().rev().nth(behind - 1);
        let time = before.map_or(time, |arrived| arrived.max(time));
        let arrived = wires.reduce(time, self.passes.message(&self.waiting));
        self.arrived.push(arrived);
        for index in self.waiting.drain(..) {
            self.reduced[index] = arrived;
        }
        time
    }
}
