//! A machine, and the times of messages on its links.

/// The links of a rank of one kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Bytes per second that a rank sends while it receives the same number.
    pub bandwidth: f64,
    /// Seconds that a message takes in addition to the transfer of its bytes.
    pub latency: f64,
}

/// The links and the elementwise speed of a machine, from which [`timeline`](super::timeline)
/// predicts an iteration.
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

/// Seconds that a message occupies the links inside a node and between nodes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Message {
    pub inside: f64,
    pub across: f64,
}

impl Links {
    /// Seconds of a collective for a buffer.
    fn time(&self, bytes: f64, ranks: usize) -> f64 {
        self.sending(bytes * (ranks - 1) as f64 / ranks as f64, ranks)
    }

    /// Seconds of a collective of which a rank sends a number of bytes.
    fn sending(&self, bytes: f64, ranks: usize) -> f64 {
        // The rounds of recursive doubling, rounded up.
        let rounds = ranks.next_power_of_two().ilog2();
        self.latency * f64::from(rounds) + bytes / self.bandwidth
    }
}

impl Machine {
    /// The message of a collective over all ranks, or over those that have the same slice of a
    /// buffer. The ranks with the other slices are neighbours, as on the last axis of a mesh.
    pub(super) fn message(&self, bytes: usize, ranks: usize, slices: usize) -> Message {
        let (bytes, ranks) = (bytes as f64 / slices as f64, ranks.div_ceil(slices));
        match self.node {
            Some((size, inside)) => {
                let size = size.div_ceil(slices).min(ranks);
                Message {
                    inside: inside.time(bytes, size),
                    // Each rank of a node sends its part of the sum to one of every other node.
                    across: self.links.time(bytes / size as f64, ranks.div_ceil(size)),
                }
            }
            None => Message { inside: 0.0, across: self.links.time(bytes, ranks) },
        }
    }

    /// The message of a collective over the ranks with the other slices, of which a rank sends a
    /// number of bytes.
    pub(super) fn among_slices(&self, bytes: f64, slices: usize) -> Message {
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
pub struct Wires {
    inside: f64,
    across: f64,
    /// The sum of all messages.
    pub sent: f64,
}

impl Wires {
    fn pass(busy: &mut f64, sent: &mut f64, ready: f64, seconds: f64) -> f64 {
        // Without a message the wires stay free, and nothing waits for them.
        if seconds == 0.0 {
            return ready;
        }
        *busy = busy.max(ready) + seconds;
        *sent += seconds;
        *busy
    }

    /// Sums inside nodes, and then between them.
    pub fn reduce(&mut self, ready: f64, message: Message) -> f64 {
        // Inside a node first: what then crosses is smaller by the ranks of the node.
        let inside = Self::pass(&mut self.inside, &mut self.sent, ready, message.inside);
        Self::pass(&mut self.across, &mut self.sent, inside, message.across)
    }

    /// Gathers between nodes, and then inside them.
    pub fn gather(&mut self, ready: f64, message: Message) -> f64 {
        // The reverse of a reduction: the small part crosses, and spreads inside.
        let across = Self::pass(&mut self.across, &mut self.sent, ready, message.across);
        Self::pass(&mut self.inside, &mut self.sent, across, message.inside)
    }
}
