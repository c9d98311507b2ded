//! The state of a rank's passes: calls on their way, uses of parameters, and bytes.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::ParamId;
use burn::tensor::Tensor;

use super::message::Message;
use crate::comm::Pending;
use crate::distributed::exclusive::Taken;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Values;
use crate::distributed::layout::pass_calls::Events;
use crate::distributed::layout::predicted_uses::{Successors, UseOrder};
use crate::error::Error;
use crate::flat::{self, bytes};

/// A collective that was started and is not finished.
#[derive(Debug)]
pub enum Flight {
    /// Parameters that are gathered in one message.
    Gathering(Vec<usize>, Message, Pending),
    Reducing(Reduction),
}

/// Gradients that are summed up in one message.
#[derive(Debug)]
pub struct Reduction {
    pub of: Vec<GradientOf>,
    pub message: Message,
    /// `true` for the sum among replicas of the sums of ranks that share the parameters.
    pub among_replicas: bool,
    pub pending: Pending,
}

/// New parts of parameters, from the shards that ranks have updated.
#[derive(Debug)]
pub enum Publishing {
    /// There are no replicas: the shards are the parts.
    Here(Vec<(usize, Tensor<1>)>),
    Sent(SentParts),
}

/// New parts that are exchanged in one message.
#[derive(Debug)]
pub struct SentParts {
    /// The step that has made them, as [`PassState::steps`] counts.
    pub step: usize,
    pub of: Vec<usize>,
    pub message: Message,
    pub pending: Pending,
}

/// A new part that has arrived, and was not used yet.
#[derive(Debug)]
pub struct Published {
    /// The step that has made it, as [`PassState::steps`] counts.
    pub step: usize,
    pub part: Tensor<1>,
}

/// The parameter of a gradient, and the value that it is of: the model's, or a clone's.
#[derive(Debug, Clone, Copy)]
pub struct GradientOf {
    pub index: usize,
    pub leaf: u64,
}

/// The gradient of a value that is to be reduced.
#[derive(Debug)]
pub struct Gradient {
    pub of: GradientOf,
    /// The elements in the order of their owners.
    pub parts: Tensor<1>,
    /// Bytes of the largest slice, the same on all ranks.
    pub bytes: usize,
}

/// Bytes that forward and backward passes hold at one time.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassBytes {
    /// Owned parameters that are gathered ahead of their use, and the one in use.
    pub gathered: usize,
    /// Gradients that are summed up, or on their way to their owners.
    pub in_flight: usize,
    /// This rank's shards of the means, until the pass ends.
    pub means: usize,
    /// Parts of the last step that are on their way.
    pub publishing: usize,
}

impl PassBytes {
    pub fn total(&self) -> usize {
        let Self { gathered, in_flight, means, publishing } = self;
        gathered + in_flight + means + publishing
    }
}

/// The bytes that passes hold, for reports. They have a lock of their own: a pass keeps the state
/// while it waits for other ranks, so that the calls of a rank have one order.
#[derive(Debug, Clone, Default)]
pub struct ReportedBytes {
    pub now: PassBytes,
    /// The bytes held at the peak of each kind, and of their sum.
    pub peaks: [PassBytes; 5],
}

#[derive(Debug, Default)]
pub struct PassState {
    pub reported: Arc<Mutex<ReportedBytes>>,
    pub flights: VecDeque<Flight>,
    /// The gradients that wait for others. A bucket will be sent in one message.
    pub buckets: VecDeque<Vec<Gradient>>,
    /// The number of steps that have begun.
    pub steps: usize,
    /// Parts of a step that the ranks with replicas exchange, in the order of the calls.
    pub publishing: VecDeque<SentParts>,
    pub uses: Vec<Uses>,
    pub bytes: HeldBytes,
    pub orders: UseOrders,
    pub events: Events,
    /// The values of a model that are compared between the ranks.
    pub listed: Events,
    pub mode: PassMode,
    /// The uses of every parameter on all ranks in this pass, once they are known. `None` if ranks
    /// have to use the same ones.
    pub of_ranks: Option<Vec<UsesOfRanks>>,
    pub failure: Option<Error>,
}

/// The state, in use by this thread. What it holds in the end is reported.
pub struct InUse<'a>(pub Taken<'a, PassState>);

impl Deref for InUse<'_> {
    type Target = PassState;

    fn deref(&self) -> &PassState {
        &self.0
    }
}

impl DerefMut for InUse<'_> {
    fn deref_mut(&mut self) -> &mut PassState {
        &mut self.0
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.observe();
    }
}

/// The uses of a parameter on all ranks in a pass, where ranks may leave it out.
#[derive(Debug, Clone, Copy, Default)]
pub struct UsesOfRanks {
    /// `true` if a rank uses it in this pass.
    pub are_in_pass: bool,
    /// `true` if it has a gradient, and some ranks do not use it.
    pub are_partial: bool,
    /// `true` if a rank uses the model's values and has a batch: then it has a gradient.
    pub count: bool,
}

/// Bytes that are held now.
#[derive(Debug, Default)]
pub struct HeldBytes {
    /// Parameters that are gathered ahead, or on their way.
    pub ahead: usize,
    /// Parameters that some ranks do not use, kept for the backward pass.
    pub kept: usize,
    /// Gradients that are being reduced.
    pub reducing: usize,
    /// Gradients that wait for the gradients of other uses.
    pub sums: usize,
    /// This rank's shards of means.
    pub means: usize,
}

/// The uses that are expected next, as the pass before had them.
#[derive(Debug, Default)]
pub struct UseOrders {
    pub forward: UseOrder,
    /// The parameters that are gathered again in the backward pass.
    pub backward: UseOrder,
    /// The parameters that are used without gradients.
    pub evaluation: Successors,
}

/// The purpose of the uses and gradients at present. No flag is set in an ordinary pass.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassMode {
    pub is_micro_batch: bool,
    /// `true` during a backward pass of `Layout::backward`, which adds earlier micro-batches.
    pub is_backward: bool,
    /// `true` while the values are read for other purposes than a pass.
    pub is_reading: bool,
    /// `true` while the versions of values are listed, which gathers nothing.
    pub is_listing: bool,
    /// `true` while parameters are gathered that this rank does not use.
    pub is_unused: bool,
    /// `true` while the gradients of a backward pass count as zero.
    pub is_drained: bool,
}

/// The uses of a parameter in a pass.
#[derive(Debug, Default)]
pub struct Uses {
    /// The part that was last used with a gradient, or that a step has made.
    pub part: Option<OwnedPart>,
    /// The part that was last used without a gradient.
    pub evaluated: Option<OwnedPart>,
    /// The part of the last step, if it has arrived and was not used yet.
    pub published: Option<Published>,
    /// The whole that is gathered ahead of its use.
    pub ahead: Option<Ahead>,
    /// `true` if this pass was told of a use by other ranks.
    pub are_left_out: bool,
    /// The parts that this pass has used with a gradient, if others may leave them out: the model's
    /// and a clone's with other values.
    pub in_pass: Vec<OwnedPart>,
    /// The wholes of these parts for a backward pass, if others do not use them.
    pub kept: Vec<(Values, Tensor<1>)>,
    /// The uses of each of its values, in the order of their first uses: of the model's values, and
    /// of clones with other values.
    pub leaves: Vec<LeafUses>,
    /// The identity under which its last gradient was returned.
    pub returned: Option<ParamId>,
}

/// The uses of one value of a parameter in a pass. Burn has a gradient for each of them.
#[derive(Debug, Default)]
pub struct LeafUses {
    pub leaf: u64,
    /// The number of uses in the graph, and of their gradients so far.
    pub count: usize,
    pub gradients: usize,
    /// The sum of these gradients.
    pub sum: Option<Tensor<1>>,
    /// The sum of the gradients of earlier micro-batches.
    pub micro_batches: Option<Tensor<1>>,
    /// `true` if it had gradients of micro-batches, which are the model's.
    pub had_micro_batches: bool,
    /// This rank's part of the mean over ranks.
    pub mean: Option<Tensor<1>>,
}

impl LeafUses {
    pub fn of(leaf: u64) -> Self {
        Self { leaf, ..Self::default() }
    }

    /// Bytes of the gradients that are not reduced yet.
    pub fn bytes(&self) -> usize {
        [&self.micro_batches, &self.sum].into_iter().flatten().map(bytes).sum()
    }

    pub fn has_gradient(&self) -> bool {
        self.sum.is_some() || self.micro_batches.is_some() || self.mean.is_some()
    }
}

impl Uses {
    /// Returns `true` if this pass has a use with a gradient.
    pub fn are_in_pass(&self) -> bool {
        self.leaves.iter().any(|uses| uses.count > 0)
    }

    /// Returns `true` if an earlier micro-batch had one.
    pub fn are_earlier(&self) -> bool {
        self.leaves.iter().any(|uses| uses.micro_batches.is_some())
    }

    /// Returns `true` if this pass has a use of a value with a gradient.
    pub fn has(&self, leaf: u64) -> bool {
        self.leaves.iter().any(|uses| uses.count > 0 && uses.leaf == leaf)
    }

    /// The uses of a value.
    pub fn of_leaf(&mut self, leaf: u64) -> &mut LeafUses {
        let position = self.leaves.iter().position(|uses| uses.leaf == leaf).unwrap_or_else(|| {
            self.leaves.push(LeafUses::of(leaf));
            self.leaves.len() - 1
        });
        &mut self.leaves[position]
    }
}

/// A part of a parameter, without autodiff.
#[derive(Debug, Clone)]
pub struct OwnedPart {
    pub values: Values,
    pub tensor: Tensor<1>,
}

/// A whole that is gathered, or on its way.
#[derive(Debug)]
pub struct Ahead {
    /// The values that it was gathered from. `None` for a part that was not used yet.
    pub part: Option<Values>,
    pub arrived: Option<Arrived>,
}

/// The parts of a parameter in the buffer of a message, which may have other parameters as well.
#[derive(Debug)]
pub struct Arrived {
    pub buffer: Tensor<1>,
    /// The position of every rank's part.
    pub starts: Vec<usize>,
}

impl Drop for PassState {
    /// Waits for all that was not used, since the other ranks take part in it.
    fn drop(&mut self) {
        let publishing = self.publishing.drain(..).map(|parts| parts.pending);
        let flights = self.flights.drain(..).map(|flight| match flight {
            Flight::Gathering(_, _, pending) | Flight::Reducing(Reduction { pending, .. }) => {
                pending
            }
        });
        // After a failure there is nothing to wait for.
        _ = publishing.chain(flights).try_for_each(|pending| pending.wait().map(drop));
    }
}

impl PassState {
    fn held(&self) -> PassBytes {
        let publishing = self.publishing.iter().map(|parts| parts.pending.bytes()).sum();
        let waiting: usize = self.waiting().map(|gradient| bytes(&gradient.parts)).sum();
        let HeldBytes { ahead, kept, reducing, sums, means } = self.bytes;
        let in_flight = reducing + sums + waiting;
        PassBytes { gathered: ahead + kept, in_flight, means, publishing }
    }

    /// The gradients that wait for others.
    fn waiting(&self) -> impl Iterator<Item = &Gradient> {
        self.buckets.iter().flatten()
    }

    /// Adds a reduction that has started.
    pub fn fly(&mut self, reduction: Reduction) {
        self.bytes.reducing += reduction.pending.bytes();
        self.flights.push_back(Flight::Reducing(reduction));
        self.observe();
    }

    /// Bytes of the gradients that wait for others, the same on all ranks.
    pub fn waiting_bytes(&self) -> usize {
        self.waiting().map(|gradient| gradient.bytes).sum()
    }

    /// Returns `true` if a parameter has gradients of a kind, or on their way, that no call has
    /// returned.
    pub fn has_left(&self, index: usize, is_left: fn(&LeafUses) -> bool) -> bool {
        self.uses[index].leaves.iter().any(is_left) || self.is_reducing(index)
    }

    /// Returns `true` if a gradient of a parameter waits for others, or is on its way.
    fn is_reducing(&self, index: usize) -> bool {
        self.waiting().any(|gradient| gradient.of.index == index)
            || self.flights.iter().any(|flight| match flight {
                Flight::Gathering(..) => false,
                Flight::Reducing(reduction) => reduction.of.iter().any(|of| of.index == index),
            })
    }

    /// Takes the uses of a parameter's values out.
    pub fn take_leaves(&mut self, index: usize) -> Vec<LeafUses> {
        let leaves = std::mem::take(&mut self.uses[index].leaves);
        self.bytes.sums -= leaves.iter().map(LeafUses::bytes).sum::<usize>();
        leaves
    }

    /// The uses of all values of all parameters.
    pub fn leaves_mut(&mut self) -> impl Iterator<Item = &mut LeafUses> {
        self.uses.iter_mut().flat_map(|uses| &mut uses.leaves)
    }

    /// Reports the bytes that are held now.
    pub fn observe(&self) {
        let now = self.held();
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        reported.now = now;
        let sizes: [fn(&PassBytes) -> usize; 5] = [
            |held| held.gathered,
            |held| held.in_flight,
            |held| held.means,
            |held| held.publishing,
            PassBytes::total,
        ];
        for (peak, size) in reported.peaks.iter_mut().zip(sizes) {
            if size(&now) > size(peak) {
                *peak = now;
            }
        }
    }

    /// Returns `true` if a parameter of this pass is known to be partial.
    pub fn is_partial(&self, index: usize) -> bool {
        self.of_ranks.as_ref().is_some_and(|of_ranks| of_ranks[index].are_partial)
    }

    /// Takes a parameter out that has arrived.
    pub fn take_ahead(&mut self, parameter: &PassParameter) -> Option<Arrived> {
        let ahead = self.uses[parameter.index].ahead.take_if(|ahead| ahead.arrived.is_some())?;
        self.bytes.ahead -= parameter.bytes();
        ahead.arrived
    }
}

/// A sum, in the order in which Burn adds the gradients of several uses.
pub fn added(sum: Option<Tensor<1>>, more: Tensor<1>) -> Tensor<1> {
    match sum {
        Some(sum) => flat::mapped(sum, |sum| sum + more),
        None => more,
    }
}
