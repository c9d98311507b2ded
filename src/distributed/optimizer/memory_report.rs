//! The memory of a rank, counted from the tensors that it holds.

use std::fmt;

use comfy_table::{Table, presets};

use super::bucket_shard::{Shard, StateBytes};
use super::detached_parameters::DetachedParameters;
use super::publication::Arriving;
use crate::distributed::layout::{PassBytes, Passes, ReportedBytes};

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
/// engine has allocated. The states of [users' optimizers](crate::custom) count from their first
/// step on, and in peaks as if they had been there before. It counts neither the intermediate
/// results of an update nor the memory that a backend keeps in reserve. `total` is the sum of all
/// kinds at one time, so its peak may be less than the sum of the other peaks; it is the sum of
/// their `at_peak`.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::MuonConfig;
/// use distmuon::distributed::{MemoryReport, Usage};
///
/// let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
/// let optim = MuonConfig::new().init_batched(&model)?;
/// let memory: MemoryReport = optim.memory();
/// let Usage { now, peak, .. } = memory.parameters;
/// println!("{now} bytes of parameters, {peak} at most, in all {}", memory.total.peak);
/// # Ok::<(), distmuon::Error>(())
/// ```
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
    /// Master weights and states that are on the host, and do not count in `masters` and `states`
    /// meanwhile: see [`StatesOn::Host`](crate::distributed::StatesOn::Host). Not in `total`, which
    /// is of the model's device.
    pub on_host: Usage,
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

/// The bytes of every kind at one time.
#[derive(Debug, Clone, Copy, Default)]
struct Snapshot {
    parameters: usize,
    gradients: usize,
    shards: usize,
    masters: usize,
    states: usize,
    on_host: usize,
    buffers: usize,
    gathered: usize,
    in_flight: usize,
}

/// The report of a rank so far, and what it has between steps.
pub(super) struct MemoryMeter {
    report: MemoryReport,
    parameters: usize,
    states: StateBytes,
}

impl MemoryMeter {
    /// The memory before the first step, with the bytes of the rank's parameters.
    pub fn new(parameters: usize, shards: &[Shard]) -> Self {
        let states = StateBytes::of(shards);
        let mut report = MemoryReport::default();
        report.observe(Snapshot { parameters, ..Snapshot::with(states) });
        Self { report, parameters, states }
    }

    /// Counts the states anew, after some were moved to another device.
    pub fn count_states(&mut self, shards: &[Shard]) {
        self.states = StateBytes::of(shards);
    }

    /// Counts what the rank has at a moment of a step, with the bytes of its reduced shards and of
    /// buffers in flight.
    pub fn observe(&mut self, detached: &DetachedParameters, shards: usize, buffers: usize) {
        self.report.observe(Snapshot {
            parameters: detached.parameters.bytes(),
            gradients: detached.gradients.bytes(),
            shards,
            buffers,
            ..Snapshot::with(self.states)
        });
    }

    /// The report between two steps, with the peaks of the passes and what they have now.
    pub fn between_steps(&self, passes: &Passes, arriving: &Arriving) -> MemoryReport {
        let snapshot = |held: PassBytes| Snapshot {
            parameters: self.parameters,
            shards: held.means,
            buffers: held.publishing,
            gathered: held.gathered,
            in_flight: held.in_flight,
            ..Snapshot::with(self.states)
        };
        let mut report = self.report;
        let ReportedBytes { now, peaks } = passes.reported();
        peaks.into_iter().for_each(|peak| report.observe(snapshot(peak)));
        let mut now = snapshot(now);
        // Parameters on their way have no tensor yet; their bytes are in the buffers.
        now.parameters -= arriving.parameters;
        now.buffers += arriving.buffers;
        report.observe(now);
        report
    }
}

impl Snapshot {
    /// The bytes of states alone.
    fn with(StateBytes { masters, states, on_host }: StateBytes) -> Self {
        Self { masters, states, on_host, ..Self::default() }
    }
}

impl MemoryReport {
    /// Adds the bytes of the states that users' optimizers made in their first step, and have had
    /// since.
    pub(super) fn with_own_states(mut self, bytes: usize) -> Self {
        for Usage { now, peak, at_peak } in [&mut self.states, &mut self.total] {
            *now += bytes;
            *peak += bytes;
            *at_peak += bytes;
        }
        self
    }

    fn observe(&mut self, snapshot: Snapshot) {
        let Snapshot {
            parameters,
            gradients,
            shards,
            masters,
            states,
            on_host,
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
            (&mut self.on_host, on_host),
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
            ("on the host", self.on_host),
        ] {
            let Usage { now, peak, at_peak } = bytes;
            table.add_row([kind.into(), now.to_string(), peak.to_string(), at_peak.to_string()]);
        }
        write!(f, "{table}\ncommunicators: {}", self.communicators)
    }
}
