//! The end of a pass: its last calls, and the comparison with the calls of other ranks.

use std::sync::PoisonError;

use super::reduce_gradients::{MeanGradient, mean_of};
use super::state::{LeafUses, PassState, UsesOfRanks};
use super::{Passes, SharingGroup};
use crate::distributed::layout::identity::{Identities, Version};
use crate::distributed::layout::pass_calls::{Event, Events};
use crate::error::{Error, Result};

impl Passes {
    /// Ends a backward pass: returns this rank's shards of all gradients of a model. Those of other
    /// values, such as a clone's, are dropped, as Burn does. All ranks make this call.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a gradient of a parameter that the model does not have, and for
    /// micro-batches of other values than the model's; as every collective.
    pub fn finish(&self, model: &Identities) -> Result<Vec<MeanGradient>> {
        let mut state = self.calling();
        // Known already after a `begin_backward`; `Layout::collect` of gradients from elsewhere
        // comes without one.
        self.exchange_uses(&mut state, Some(model))?;
        let without = self.without_gradients(&mut state, model)?;
        for parameter in &self.parameters {
            if without.contains(&parameter.index) {
                drop(state.take_leaves(parameter.index));
                continue;
            }
            if state.is_partial(parameter.index) {
                self.attempt(&mut state, |state| {
                    self.start_reducing_partial(state, parameter, model)
                });
                continue;
            }
            // Those with uses that the loss does not depend on.
            let leaves: Vec<u64> =
                state.uses[parameter.index].leaves.iter().map(|u| u.leaf).collect();
            for leaf in leaves {
                self.attempt(&mut state, |state| self.start_reducing(state, parameter, leaf));
            }
        }
        // Before the pass ends, which forgets them.
        let of_ranks = state.of_ranks.clone();
        // Before the means are read: the last reductions have landed then, and the ranks have
        // compared their calls.
        self.end_pass(&mut state)?;
        state.bytes.means = 0;
        let means = self.parameters.iter().zip(&mut state.uses).filter_map(|(parameter, uses)| {
            let mean = mean_of(parameter, uses, model).transpose()?;
            // A zero from ranks without a batch, or of a clone's values, is no gradient: the
            // parameter would be moved by its momentum and decay. A use before another backward
            // pass is no use in this one, and has a gradient.
            let has_none = |uses: &UsesOfRanks| uses.are_in_pass && !uses.count;
            let is_zero = of_ranks.as_ref().is_some_and(|all| has_none(&all[parameter.index]));
            (!is_zero || mean.is_err()).then_some(mean)
        });
        let means: Result<Vec<MeanGradient>> = means.collect();
        means.inspect_err(|error| self.fail(&mut state, error.clone()))
    }

    /// Forgets the gradients of earlier micro-batches, and ends a pass without a result. All ranks
    /// make this call.
    pub fn discard(&self) -> Result<()> {
        // Also where nothing is divided: micro-batches are kept for every layout.
        drop(self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner).take_sum());
        for uses in self.state().leaves_mut() {
            (uses.micro_batches, uses.had_micro_batches) = (None, false);
        }
        self.discard_pass()
    }

    /// Ends a pass without a result: forgets its gradients. All ranks make this call.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] if the pass has taken the gradients of earlier micro-batches with it; as
    /// every collective.
    pub fn discard_pass(&self) -> Result<()> {
        if self.parameters.is_empty() {
            return Ok(());
        }
        let mut state = self.calling();
        if state.leaves_mut().any(|uses| uses.had_micro_batches) {
            return Err(Error::usage(
                "the pass can't be dropped by itself",
                "a forward pass, or a backward pass of the caller's",
                "a pass of `Layout::backward` that has taken earlier micro-batches with it",
                "drop them as well, by `Layout::discard`",
            ));
        }
        state.leaves_mut().for_each(|uses| uses.sum = None);
        // A bucket that is not full: no rank has sent it.
        state.buckets.clear();
        state.bytes.sums = state.leaves_mut().map(|uses| uses.bytes()).sum();
        // The calls that were made must still be matched by the other ranks.
        let outcome = self.end_pass(&mut state);
        for uses in &mut state.uses {
            uses.leaves.iter_mut().for_each(|uses| uses.mean = None);
            uses.leaves.retain(LeafUses::has_gradient);
        }
        state.bytes.means = 0;
        outcome
    }

    /// Waits for all calls, and compares them with the other ranks' calls.
    pub(super) fn end_pass(&self, state: &mut PassState) -> Result<()> {
        self.attempt(state, |state| self.send_buckets(state));
        // After a failure there is nothing to wait for: the world has ended.
        while state.failure.is_none() && !state.flights.is_empty() {
            if let Err(error) = self.land(state) {
                self.fail(state, error);
            }
        }
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        // The depths are kept and used again: the next graph starts from the first of them.
        self.order.reset();
        state.orders.forward.end();
        state.orders.backward.end();
        state.orders.evaluation.end();
        // Parameters gathered ahead for uses that did not come are dropped.
        (state.bytes.ahead, state.bytes.kept, state.of_ranks) = (0, 0, None);
        for uses in &mut state.uses {
            uses.ahead = None;
            uses.are_left_out = false;
            uses.in_pass.clear();
            uses.kept.clear();
            uses.leaves.retain(LeafUses::has_gradient);
            // The rest has gradients of micro-batches: the next backward pass counts its uses anew.
            uses.leaves.iter_mut().for_each(|uses| (uses.count, uses.gradients) = (0, 0));
        }
        // Taken before the comparison, so that a failed one does not leave them to the next pass.
        let events = std::mem::take(&mut state.events);
        let outcome = match self.differences(&events).find_map(Result::transpose) {
            None => Ok(()),
            Some(Ok(calls)) => Err(Error::Mismatch { calls }),
            Some(Err(error)) => Err(error),
        };
        let outcome = outcome.map_err(|error| self.ending(&events, error));
        if let Err(error) = &outcome {
            // Only the ranks of a group know of a difference in it. Gradients that were reduced are
            // of no use after it.
            self.fail(state, error.clone());
        }
        outcome
    }

    /// Compares the calls of the ranks, group after group, and returns what differs in each. An
    /// engine does not notice it if they are of equal sizes, or if some are missing at the end: the
    /// comparison takes place in the groups of the calls, where it meets them.
    pub(super) fn differences<'a>(
        &'a self,
        events: &'a Events,
    ) -> impl Iterator<Item = Result<Option<String>>> + 'a {
        let rank = self.groups.world.rank();
        let difference = move |first: &Events, local: &Events| {
            let [first, local] = first.difference(local)?.map(|event| match event {
                Some(Event::Gather(index, version)) => {
                    format!("used `{}` {}", self.parameters[index].path, of_values(version))
                }
                Some(Event::Reduce(index)) => {
                    format!("had a gradient of `{}`", self.parameters[index].path)
                }
                None => "ended its pass".to_owned(),
            });
            Some(format!("rank {rank} {local} where another rank {first}"))
        };
        let groups = self.groups.by_axes.values().filter(|_| !self.parameters.is_empty());
        let groups = groups.flat_map(|SharingGroup { sharing, replicas }| [sharing, replicas]);
        groups.map(move |group| Ok(group.compare(events, difference)?.map(|(_, calls)| calls)))
    }

    /// The error of the comparison, at which a rank with fewer calls than the others arrives first:
    /// with the parameters of which this rank had no gradient.
    fn ending(&self, events: &Events, error: Error) -> Error {
        let trained = || self.parameters.iter().filter(|parameter| parameter.is_trained);
        let without = trained().filter(|parameter| !events.has(Event::Reduce(parameter.index)));
        let paths: Vec<String> = without.map(|parameter| format!("`{}`", parameter.path)).collect();
        // A rank with all gradients or with none: a list of paths would not help.
        if paths.is_empty() || paths.len() == trained().count() {
            return error;
        }
        error.in_action(&format!("ending a pass without a gradient of {}", paths.join(", ")))
    }
}

/// Says which values of a parameter a rank has gathered.
fn of_values(version: Option<Version>) -> String {
    match version {
        None => "of the last step".to_owned(),
        Some(version) => {
            format!("with values of version {version}, of which each map of a model makes another")
        }
    }
}
