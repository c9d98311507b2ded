//! The memory of a rank, counted from the tensors that it holds.

use std::fmt;

use comfy_table::{Table, presets};

use crate::distributed::layout::Passes;
use crate::distributed::trained::ModelParameter;

/// Bytes of one kind of tensor in a [`MemoryReport`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes at the time of the report.
    pub now: usize,
    /// Largest number of bytes since the optimizer was made.
    pub peak: usize,
    /// Bytes at the time of the largest total, the first one of several.
    pub at_peak: usize,
}

/// Bytes that one rank holds, from
/// [`DistModuleOptimizer::memory`](super::DistModuleOptimizer::memory). Prints as a table.
///
/// The report counts the tensors of the model and of the optimizer between the phases of a step,
/// the owned parameters and gradients of forward and backward passes, and the buffers that the
/// engine has allocated. It counts neither the intermediate results of an update nor the memory
/// that a backend keeps in reserve. `total` is the sum of all kinds at one time, so its peak may be
/// less than the sum of the other peaks; it is the sum of their `at_peak`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// The model's trained parameters.
    pub parameters: Usage,
    /// Gradients that were given to the step.
    pub gradients: Usage,
    /// This rank's shards of the reduced gradients, until a pass returns them or a step uses them.
    pub shards: Usage,
    /// Master weights of this rank's shards: see [`MasterWeights`](crate::MasterWeights).
    pub masters: Usage,
    /// Momentum, moments and everything else in the state of this rank's shards.
    pub states: Usage,
    /// Buffers for sending and receiving of the collectives of a step in flight, which may last
    /// until the new parameters are used.
    pub buffers: Usage,
    /// Owned parameters that are gathered ahead of their use, with the one in use. Those that a
    /// graph keeps for its backward pass are not counted.
    pub gathered: Usage,
    /// Gradients that backward passes reduce: summed up, or on their way to their owners.
    pub in_flight: Usage,
    /// The sum of all kinds.
    pub total: Usage,
    /// Communicators at the time of the report, of which an engine may keep memory that is not
    /// counted: NCCL some of the device for each.
    pub communicators: usize,
}

/// Bytes of a parameter between steps: of the whole, of this rank's slice, or of its part.
pub fn bytes_of_parameter(known: &ModelParameter, units: &Passes) -> usize {
    let elements = match units.get(&known.path) {
        Some(unit) if known.placement.is_owned() => unit.part_count().max(1),
        _ => known.shape.iter().product(),
    };
    elements * known.dtype.size()
}

/// The bytes of every kind at one time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Snapshot {
    pub parameters: usize,
    pub gradients: usize,
    pub shards: usize,
    pub masters: usize,
    pub states: usize,
    pub buffers: usize,
    pub gathered: usize,
    pub in_flight: usize,
}

impl MemoryReport {
    pub(super) fn observe(&mut self, snapshot: Snapshot) {
        let Snapshot {
            parameters,
            gradients,
            shards,
            masters,
            states,
            buffers,
            gathered,
            in_flight,
        } = snapshot;
        let tensors = parameters + gradients + shards + masters + states;
        let total = tensors + buffers + gathered + in_flight;
        let is_peak = total > self.total.peak;
        for (kind, now) in [
            (&mut self.parameters, parameters),
            (&mut self.gradients, gradients),
            (&mut self.shards, shards),
            (&mut self.masters, masters),
            (&mut self.states, states),
            (&mut self.buffers, buffers),
            (&mut self.gathered, gathered),
            (&mut self.in_flight, in_flight),
            (&mut self.total, total),
        ] {
            let at_peak = if is_peak { now } else { kind.at_peak };
            *kind = Usage { now, peak: kind.peak.max(now), at_peak };
        }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["bytes of", "now", "peak", "at the peak of the total"]);
        for (kind, bytes) in [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("gradient shards", self.shards),
            ("master weights", self.masters),
            ("states", self.states),
            ("buffers", self.buffers),
            ("gathered parameters", self.gathered),
            ("gradients in flight", self.in_flight),
            ("total", self.total),
        ] {
            let Usage { now, peak, at_peak } = bytes;
            table.add_row([kind.into(), now.to_string(), peak.to_string(), at_peak.to_string()]);
        }
        write!(f, "{table}\ncommunicators: {}", self.communicators)
    }
}
