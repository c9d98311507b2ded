//! The forward and the backward pass of an iteration, parameter by parameter.

use super::machine::{Machine, Message, Wires};
use super::slices;
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
    /// Bytes of owned parameters that are gathered ahead of their use.
    pub ahead: usize,
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
        Self { plan, machine, times, bytes, seconds, of_cut, bucket_of }
    }

    /// Returns the end of the backward pass, and the times at which the gradients of parameters are
    /// reduced.
    pub fn run(&self, wires: &mut Wires) -> (f64, Vec<f64>) {
        let time = self.forward(wires);
        self.backward(wires, time)
    }

    fn forward(&self, wires: &mut Wires) -> f64 {
        let mut published = vec![None; self.plan.buckets().len()];
        let (mut time, mut ahead) = (0.0, Ahead::new(self.times.ahead, 0.0));
        for (index, seconds) in self.seconds.iter().enumerate() {
            let [replicas, gathered] = self.gathered(index);
            let arrived =
                self.arrival(wires, &mut published, index).max(wires.gather(0.0, replicas));
            let asked = ahead.ask(self.owned(index));
            time = wires.gather(arrived.max(asked), gathered).max(time);
            time = self.summed(wires, time + FORWARD * seconds, index);
            ahead.used(time);
        }
        time
    }

    fn backward(&self, wires: &mut Wires, start: f64) -> (f64, Vec<f64>) {
        let count = self.bytes.len();
        let (mut time, mut ahead) = (start, Ahead::new(self.times.ahead, start));
        let (mut reduced, mut arrived) = (vec![0.0; count], vec![0.0; count]);
        // A backward pass goes through the layers in reverse.
        let order: Vec<usize> = (0..count).rev().collect();
        let mut asked_for = 0;
        for (position, &index) in order.iter().enumerate() {
            // The next parameters, in the order of the backward pass.
            while asked_for < count
                && (asked_for <= position || ahead.fits(self.owned(order[asked_for])))
            {
                let next = order[asked_for];
                let asked = ahead.ask(self.owned(next));
                let [_, gathered] = self.gathered(next);
                arrived[next] = wires.gather(asked, gathered);
                asked_for += 1;
            }
            time = arrived[index].max(time) + (1.0 - FORWARD) * self.seconds[index];
            time = self.summed(wires, time, index);
            ahead.used(time);
            if self.plan.parameters()[index].placement.reduces_in_backward() {
                reduced[index] = wires.reduce(time, self.message(index));
            }
        }
        (time, reduced)
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

    /// The message that gathers or reduces a parameter.
    fn message(&self, index: usize) -> Message {
        let slices = slices(self.plan, index);
        self.machine.message(self.bytes[index], self.plan.world_size(), slices)
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

    /// The messages of a parameter that is gathered: once, and at every use. The replicas of a part
    /// exchange it once, and the ranks that share it at every use.
    fn gathered(&self, index: usize) -> [Message; 2] {
        match (self.plan.parameters()[index].placement, self.times.inside_nodes) {
            (Placement::Owned, true) => {
                let Message { inside, across } = self.message(index);
                [Message { inside: 0.0, across }, Message { inside, across: 0.0 }]
            }
            (Placement::Owned, false) => [Message::default(), self.message(index)],
            (Placement::Reduced | Placement::Replicated, _) => [Message::default(); 2],
        }
    }

    /// Bytes of a parameter that has owners.
    fn owned(&self, index: usize) -> usize {
        match self.plan.parameters()[index].placement {
            Placement::Owned => self.bytes[index],
            Placement::Replicated | Placement::Reduced => 0,
        }
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
    fn new(limit: usize, start: f64) -> Self {
        Self { limit, asked: vec![], start }
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
