//! The gathering of parameters from their parts, at their use and ahead of it.

use burn::tensor::Tensor;

use super::message::Message;
use super::state::{Ahead, Arrived, Flight, OwnedPart, PassState, Uses};
use super::{GATHERING, Limits, Passes};
use crate::checks::ensure_computed;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Values;
use crate::distributed::layout::pass_calls::Event;
use crate::distributed::plan::Counts;
use crate::error::Result;
use crate::flat;

/// This rank's part of a parameter that is to be gathered.
struct PartToGather {
    index: usize,
    /// `None` if the values have no identity before their first use.
    values: Option<Values>,
    tensor: Tensor<1>,
}

/// The kind of a pass, of which the parts are known that were used last.
#[derive(Clone, Copy, PartialEq)]
enum PassKind {
    Training,
    /// Without gradients.
    Evaluation,
}

impl Passes {
    /// The whole for a forward pass.
    pub(super) fn gather(&self, parameter: &PassParameter, part: OwnedPart) -> Tensor<1> {
        let mut state = self.calling();
        // Every use counts, also of a parameter that is there already: the order has to be the same
        // on all ranks.
        let next = state.orders.forward.next(parameter.index).to_vec();
        let uses = &mut state.uses[parameter.index];
        uses.part = Some(part.clone());
        // Some ranks may not use it, and the others need it again.
        let is_asked = self.limits.allows_unused && !self.keeps_whole(parameter);
        if is_asked && uses.in_pass.iter().all(|other| other.values != part.values) {
            uses.in_pass.push(part.clone());
        }
        self.gathered(&mut state, parameter, part, |state| {
            self.start_next(state, &next, PassKind::Training)
        })
    }

    /// The whole for a pass without a gradient. The next ones are only gathered if the pass before
    /// has used the same part: the parts of a model with new values are not known yet.
    pub(super) fn gather_evaluated(
        &self,
        parameter: &PassParameter,
        part: OwnedPart,
        is_reading: bool,
    ) -> Tensor<1> {
        let mut state = self.calling();
        // A reading, as for a checkpoint, is no pass: it must not change what the next pass is
        // taken to use.
        if is_reading {
            return self.gathered(&mut state, parameter, part, |_| Ok(()));
        }
        let next = state.orders.evaluation.next(parameter.index);
        let before = state.uses[parameter.index].evaluated.replace(part.clone());
        let is_known = before.is_some_and(|before| before.values == part.values);
        let next = if is_known { next } else { vec![] };
        self.gathered(&mut state, parameter, part, |state| {
            self.start_next(state, &next, PassKind::Evaluation)
        })
    }

    /// The whole for a backward pass.
    pub(super) fn gather_again(&self, parameter: &PassParameter, part: OwnedPart) -> Tensor<1> {
        let mut state = self.calling();
        // Gathered at the begin of the backward pass, since some ranks do not use it and would not
        // take part here.
        let mut kept = state.uses[parameter.index].kept.iter();
        if let Some((_, whole)) = kept.find(|(values, _)| *values == part.values) {
            return whole.clone();
        }
        let mut next = state.orders.backward.next(parameter.index).to_vec();
        // Parameters that ranks have left out are there already.
        next.retain(|index| !state.is_partial(*index));
        state.uses[parameter.index].part = Some(part.clone());
        self.gathered(&mut state, parameter, part, |state| {
            self.start_next(state, &next, PassKind::Training)
        })
    }

    /// The whole, or NaN after a failure. Starts to gather the parameters that are used next.
    pub(super) fn gathered(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        part: OwnedPart,
        start_next: impl FnOnce(&mut PassState) -> Result<()>,
    ) -> Tensor<1> {
        let device = part.tensor.device();
        let gathered = self.attempt(state, |state| {
            // First the parameter itself, then those ahead: its message is waited for now.
            self.take_or_start(state, parameter, part)?;
            start_next(state)?;
            loop {
                // Other calls may be before it in the queue, reductions among them: they are landed
                // in their order.
                if let Some(Arrived { buffer, starts }) = state.take_ahead(parameter) {
                    let whole = parameter.whole(&buffer, &starts);
                    ensure_computed(&parameter.path, &whole)?;
                    return Ok(whole);
                }
                self.land(state)?;
            }
        });
        gathered.unwrap_or_else(|| parameter.nan(&device))
    }

    /// Starts to gather a parameter, unless that was done ahead with the same part.
    fn take_or_start(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        OwnedPart { values, tensor }: OwnedPart,
    ) -> Result<()> {
        match &state.uses[parameter.index].ahead {
            Some(ahead) if ahead.part == Some(values) => return Ok(()),
            Some(_) => {
                // The part of another model, such as an average of the weights.
                let uses = |state: &PassState| state.uses[parameter.index].ahead.is_some();
                while state.take_ahead(parameter).is_none() && uses(state) {
                    self.land(state)?;
                }
            }
            None => {}
        }
        let part = PartToGather { index: parameter.index, values: Some(values), tensor };
        self.start_gathering(state, vec![part])
    }

    /// Starts to gather parameters in one message.
    fn start_gathering(&self, state: &mut PassState, parts: Vec<PartToGather>) -> Result<()> {
        let indices: Vec<usize> = parts.iter().map(|part| part.index).collect();
        let first = &self.parameters[indices[0]];
        let message = self.message(&indices, PassParameter::part_counts);
        // Without the element that stands for an empty part: the counts say how many each rank
        // sends.
        let sent = parts.iter().map(|part| self.parameters[part.index].sent(&part.tensor));
        let sent = flat::concat(sent.collect(), first.dtype, &parts[0].tensor.device());
        let sharing = self.groups.of(first).sharing.comm();
        let pending = sharing
            .all_gather(sent, &message.totals())
            .map_err(|error| self.in_action(GATHERING, &indices, error))?;
        for PartToGather { index, values: part, .. } in parts {
            state.events.push(Event::Gather(index, part.and_then(|values| values.version)));
            state.bytes.ahead += self.parameters[index].bytes();
            // Set at the start: a second use before it arrives finds it and makes no second call.
            state.uses[index].ahead = Some(Ahead { part, arrived: None });
        }
        state.flights.push_back(Flight::Gathering(indices, message, pending));
        state.observe();
        Ok(())
    }

    /// The message of parameters, of which every rank has this many elements.
    pub(super) fn message(
        &self,
        indices: &[usize],
        counts: fn(&PassParameter) -> &Counts,
    ) -> Message {
        Message::of(indices.iter().map(|index| counts(&self.parameters[*index])))
    }

    /// Starts to gather the parameters that are used next, as far as the limit allows. All ranks
    /// have the same limit and order, so all of them stop at the same call.
    fn start_next(&self, state: &mut PassState, next: &[usize], kind: PassKind) -> Result<()> {
        let mut rest = next;
        loop {
            let (indices, after) = self.next_message(state, rest, kind);
            let bytes: usize = indices.iter().map(|index| self.parameters[*index].bytes()).sum();
            let Limits { ahead, .. } = self.limits;
            // The second of a parameter that is larger than half of the limit.
            let fits = state.bytes.ahead + bytes <= ahead || state.bytes.ahead <= ahead / 2;
            if indices.is_empty() || !fits {
                return Ok(());
            }
            for message in self.in_messages(indices) {
                let parts: Result<Vec<_>> =
                    message.into_iter().map(|index| self.last_part(state, index, kind)).collect();
                self.start_gathering(state, parts?)?;
            }
            rest = after;
        }
    }

    /// The first of some parameters that go in one message, and those after them. While the last
    /// message is used up, this one is on its way: each has at most half of the bytes of the limit,
    /// or one parameter.
    fn next_message<'a>(
        &self,
        state: &PassState,
        next: &'a [usize],
        kind: PassKind,
    ) -> (Vec<usize>, &'a [usize]) {
        let (mut indices, mut bytes) = (vec![], 0);
        for (position, index) in next.iter().enumerate() {
            let is_on_its_way = state.uses[*index].ahead.is_some() || indices.contains(index);
            if is_on_its_way || !state.knows_part(*index, kind) {
                continue;
            }
            let more = self.parameters[*index].bytes();
            if !indices.is_empty() && bytes + more > self.limits.ahead / 2 {
                return (indices, &next[position..]);
            }
            indices.push(*index);
            bytes += more;
        }
        (indices, &[])
    }

    /// The part of a parameter that a pass of a kind will most likely use, which is
    /// [known](PassState::knows_part).
    fn last_part(
        &self,
        state: &mut PassState,
        index: usize,
        kind: PassKind,
    ) -> Result<PartToGather> {
        if kind == PassKind::Training {
            self.land_publication(state, &self.parameters[index])?;
        }
        let arrived = state.arrived_part(index, kind);
        let (values, tensor) = arrived.expect("the part is known, and has arrived");
        Ok(PartToGather { index, values, tensor: tensor.clone() })
    }
}

impl PassState {
    /// The part of a parameter that a pass of a kind will most likely use, unless it is on its way.
    /// One that was not used yet is known only at its use.
    fn arrived_part(&self, index: usize, kind: PassKind) -> Option<(Option<Values>, &Tensor<1>)> {
        let Uses { part, published, evaluated, .. } = &self.uses[index];
        let (used, published) = match kind {
            PassKind::Training => (part, published.as_ref().map(|published| &published.part)),
            PassKind::Evaluation => (evaluated, None),
        };
        // The part of this pass before the last step's: an older model may be in use.
        match used {
            Some(OwnedPart { values, tensor }) => Some((Some(*values), tensor)),
            None => Some((None, published?)),
        }
    }

    /// Returns `true` if the part that a pass of a kind will most likely use has arrived, or is on
    /// its way.
    fn knows_part(&self, index: usize, kind: PassKind) -> bool {
        let is_publishing = || self.publishing.iter().any(|parts| parts.of.contains(&index));
        self.arrived_part(index, kind).is_some() || kind == PassKind::Training && is_publishing()
    }
}
