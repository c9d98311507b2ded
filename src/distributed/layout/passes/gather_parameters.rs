//! The gathering of parameters from their parts, at their use and ahead of it.

use burn::tensor::Tensor;

use super::state::{Ahead, Flight, PassState, Uses, Values};
use super::{GATHERING, Passes};
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::pass_calls::Event;
use crate::error::Result;

impl Passes {
    /// The whole for a forward pass.
    pub(super) fn gather(&self, parameter: &PassParameter, part: (Values, Tensor<1>)) -> Tensor<1> {
        let mut state = self.state();
        // Every use counts, also of a parameter that is there already: the order has to be the same
        // on all ranks.
        let next = state.orders.forward.next(parameter.index).to_vec();
        state.uses[parameter.index].part = Some(part.clone());
        self.gathered(&mut state, parameter, part, |state| self.start_next(state, &next))
    }

    /// The whole for a pass without a gradient. The next ones are only gathered if the part is that
    /// of the pass before: those of a model with new values are not known yet.
    pub(super) fn gather_evaluated(
        &self,
        parameter: &PassParameter,
        part: (Values, Tensor<1>),
        is_reading: bool,
    ) -> Tensor<1> {
        let mut state = self.state();
        // A reading, as for a checkpoint, is no pass: it must not change what the next pass is
        // taken to use.
        if is_reading {
            return self.gathered(&mut state, parameter, part, |_| Ok(()));
        }
        let next = state.orders.evaluation.next(parameter.index);
        let before = state.uses[parameter.index].evaluated.replace(part.clone());
        let is_known = before.is_some_and(|(values, _)| values == part.0);
        let next = if is_known { next } else { vec![] };
        self.gathered(&mut state, parameter, part, |state| self.start_next_evaluated(state, &next))
    }

    /// The whole for a backward pass.
    pub(super) fn gather_again(
        &self,
        parameter: &PassParameter,
        part: (Values, Tensor<1>),
    ) -> Tensor<1> {
        let mut state = self.state();
        // Gathered at the begin of the backward pass, since some ranks do not use it and would not
        // take part here.
        if let Some((values, whole)) = &state.uses[parameter.index].kept
            && part.0 == *values
        {
            return whole.clone();
        }
        let next = state.orders.backward.next(parameter.index).to_vec();
        state.uses[parameter.index].part = Some(part.clone());
        self.gathered(&mut state, parameter, part, |state| self.start_next(state, &next))
    }

    /// The whole, or NaN after a failure. Starts to gather the parameters that are used next.
    pub(super) fn gathered(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        part: (Values, Tensor<1>),
        start_next: impl FnOnce(&mut PassState) -> Result<()>,
    ) -> Tensor<1> {
        let device = part.1.device();
        let gathered = self.attempt(state, |state| {
            // First the parameter itself, then those ahead: its message is waited for now.
            self.take_or_start(state, parameter, part)?;
            start_next(state)?;
            loop {
                // Other calls may be before it in the queue, reductions among them: they are landed
                // in their order.
                if let Some(Ahead { whole: Some(_), .. }) = &state.uses[parameter.index].ahead {
                    return Ok(state.take_ahead(parameter).expect("the whole was found above"));
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
        (values, part): (Values, Tensor<1>),
    ) -> Result<()> {
        match &state.uses[parameter.index].ahead {
            Some(ahead) if ahead.part == Some(values) => return Ok(()),
            Some(_) => {
                // The part of another model, such as an average of the weights.
                while state.uses[parameter.index]
                    .ahead
                    .as_ref()
                    .is_some_and(|ahead| ahead.whole.is_none())
                {
                    self.land(state)?;
                }
                state.take_ahead(parameter);
            }
            None => {}
        }
        self.start_gathering(state, parameter, Some(values), part)
    }

    fn start_gathering(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        values: Option<Values>,
        part: Tensor<1>,
    ) -> Result<()> {
        let sharing = self.groups.of(parameter).sharing.comm();
        // Without the element that stands for an empty part: the counts say how many each rank
        // sends.
        let pending = sharing.all_gather(parameter.sent(&part), &parameter.part_counts().to_vec());
        let pending = pending.map_err(|error| parameter.in_action(GATHERING, error))?;
        state.events.push(Event::Gather(parameter.index));
        state.flights.push_back(Flight::Gathering(parameter.index, pending));
        state.bytes.ahead += parameter.bytes();
        state.observe();
        // Set at the start: a second use before it arrives finds it and makes no second call.
        state.uses[parameter.index].ahead = Some(Ahead { part: values, whole: None });
        Ok(())
    }

    /// Starts to gather the parameters that are used next, as far as the limit allows.
    fn start_next(&self, state: &mut PassState, next: &[usize]) -> Result<()> {
        for index in next {
            let parameter = &self.parameters[*index];
            // On its way already, by an earlier use.
            if state.uses[*index].ahead.is_some() {
                continue;
            }
            // All ranks have the same limit and order, so all of them stop at the same call.
            if state.bytes.ahead + parameter.bytes() > self.limits.ahead {
                return Ok(());
            }
            self.land_publication(state, parameter)?;
            let Uses { part, published, .. } = &state.uses[*index];
            // The part of this pass before the last step's: an older model may be in use.
            let (id, part) = match (part.clone(), published.clone()) {
                (Some((id, part)), _) => (Some(id), part),
                (None, Some(part)) => (None, part),
                (None, None) => return Ok(()),
            };
            self.start_gathering(state, parameter, id, part)?;
        }
        Ok(())
    }

    /// [`start_next`](Self::start_next) in a pass without gradients.
    fn start_next_evaluated(&self, state: &mut PassState, next: &[usize]) -> Result<()> {
        for index in next {
            let (parameter, uses) = (&self.parameters[*index], &state.uses[*index]);
            // A part that was not evaluated yet is unknown here, and known only at its use.
            let Some((values, part)) = uses.evaluated.clone().filter(|_| uses.ahead.is_none())
            else {
                continue;
            };
            if state.bytes.ahead + parameter.bytes() > self.limits.ahead {
                return Ok(());
            }
            self.start_gathering(state, parameter, Some(values), part)?;
        }
        Ok(())
    }
}
