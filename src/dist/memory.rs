//! The memory of a rank, counted from the tensors it holds.

use std::fmt;

use burn::tensor::Tensor;
use comfy_table::{Table, presets};

/// Bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// After the last step.
    pub now: usize,
    /// The most since the optimizer was made.
    pub peak: usize,
}

/// Bytes that one rank holds, from [`DistModuleOptimizer::memory`](super::DistModuleOptimizer::memory).
/// Prints as a table.
///
/// Counted are the tensors of the model and of the optimizer between the parts of a step, and the buffers
/// that the engine has allocated; not the intermediate results of an update, nor what a backend keeps in
/// reserve. All figures of one moment belong together: `total` is their sum at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// The model's trained parameters.
    pub parameters: Bytes,
    /// Gradients as they were given to the step.
    pub gradients: Bytes,
    /// This rank's parts of the reduced gradients.
    pub shares: Bytes,
    /// Momentum and moments of this rank's parts.
    pub states: Bytes,
    /// Buffers of calls on their way, to send and to receive.
    pub buffers: Bytes,
    /// All of it together.
    pub total: Bytes,
}

/// The bytes of every kind at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moment {
    pub parameters: usize,
    pub gradients: usize,
    pub shares: usize,
    pub states: usize,
    pub buffers: usize,
}

impl MemoryReport {
    pub(super) fn observe(&mut self, moment: Moment) {
        let Moment { parameters, gradients, shares, states, buffers } = moment;
        let total = parameters + gradients + shares + states + buffers;
        for (kind, now) in [
            (&mut self.parameters, parameters),
            (&mut self.gradients, gradients),
            (&mut self.shares, shares),
            (&mut self.states, states),
            (&mut self.buffers, buffers),
            (&mut self.total, total),
        ] {
            *kind = Bytes { now, peak: kind.peak.max(now) };
        }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["bytes of", "now", "peak"]);
        for (kind, bytes) in [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("gradient shares", self.shares),
            ("states", self.states),
            ("buffers", self.buffers),
            ("total", self.total),
        ] {
            table.add_row([kind.to_owned(), bytes.now.to_string(), bytes.peak.to_string()]);
        }
        write!(f, "{table}")
    }
}

/// Bytes of a tensor's elements.
pub(super) fn bytes<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}
