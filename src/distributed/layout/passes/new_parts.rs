//! The parts of a step that are on their way, and the parts that passes remember.

use burn::tensor::{Device, Tensor};

use super::state::{OwnedPart, PassState, Published, Publishing, SentParts};
use super::{PUBLISHING, Passes};
use crate::comm::Pending;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Values;
use crate::error::{Error, Result};
use crate::flat;
use crate::link::identity;

impl Passes {
    /// Starts to make this rank's new parts of parameters from its shards of them, which the ranks
    /// with replicas of the parts have updated. The parameters are in one
    /// [message](Self::in_messages). All ranks make this call.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn publish(&self, shards: Vec<(usize, Tensor<1>)>) -> Result<Publishing> {
        let (of, shards): (Vec<usize>, Vec<Tensor<1>>) = shards.into_iter().unzip();
        let replicas = self.replicas(&self.parameters[of[0]]);
        if replicas.size() == 1 {
            let part = |(index, shard): (usize, Tensor<1>)| {
                let device = shard.device();
                (index, self.part_or_element(index, &device, || shard))
            };
            return Ok(Publishing::Here(of.into_iter().zip(shards).map(part).collect()));
        }
        let message = self.message(&of, PassParameter::shard_counts);
        let totals = message.totals();
        let dtype = self.parameters[of[0]].dtype;
        let sent = flat::concat(shards.clone(), dtype, &shards[0].device());
        drop(shards);
        let pending = match totals.iter().sum::<usize>() {
            // No replica has anything of the parts.
            0 => Pending::ready(sent),
            // Without the state: an engine may wait here for other ranks.
            _ => replicas.all_gather(sent, &totals)?,
        };
        let step = self.state().steps;
        Ok(Publishing::Sent(SentParts { step, of, message, pending }))
    }

    /// Has the first use of new parts wait for them. Returns those that are here already. All ranks
    /// do the same, also those that have nothing of the parameters: Burn's clones share a value
    /// that is waited for.
    pub fn publish_later(&self, publishing: Publishing) -> Option<Publishing> {
        match publishing {
            Publishing::Here(_) => Some(publishing),
            Publishing::Sent(parts) => {
                let mut state = self.state();
                state.publishing.push_back(parts);
                state.observe();
                None
            }
        }
    }

    /// Waits for new parts.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn published(&self, publishing: Publishing) -> Result<Vec<(usize, Tensor<1>)>> {
        match publishing {
            Publishing::Here(parts) => Ok(parts),
            Publishing::Sent(parts) => self.received(parts),
        }
    }

    /// Waits for new parts that were sent.
    fn received(&self, parts: SentParts) -> Result<Vec<(usize, Tensor<1>)>> {
        let SentParts { of, message, pending, .. } = parts;
        let buffer = pending.wait().map_err(|error| self.in_action(PUBLISHING, &of, error))?;
        let device = buffer.device();
        let part = |(position, index): (usize, usize)| {
            (index, self.part_or_element(index, &device, || message.unpack(&buffer, position)))
        };
        Ok(of.into_iter().enumerate().map(part).collect())
    }

    /// A part, or an element in place of none, since a parameter has an element at least.
    fn part_or_element(
        &self,
        index: usize,
        device: &Device,
        part: impl FnOnce() -> Tensor<1>,
    ) -> Tensor<1> {
        let parameter = &self.parameters[index];
        match parameter.part_count() {
            0 => Tensor::zeros([1], (device, parameter.dtype)),
            _ => part(),
        }
    }

    /// This rank's part of a parameter that a step has made, or NaN after a failure.
    pub fn await_part(&self, parameter: &PassParameter, step: usize, device: &Device) -> Tensor<1> {
        let mut state = self.calling();
        let part = self.attempt(&mut state, |state| {
            self.land_publication(state, parameter)?;
            match &state.uses[parameter.index].published {
                Some(published) if published.step == step => Ok(published.part.clone()),
                _ => Err(Error::parameter(
                    &parameter.path,
                    self.groups.world.rank(),
                    "its value has made room for the value of a later step",
                    "use the model that a step returns, or drop it, before another step",
                )),
            }
        });
        part.unwrap_or_else(|| {
            Tensor::full([parameter.part_count().max(1)], f32::NAN, (device, parameter.dtype))
        })
    }

    /// Waits for the part of a parameter, if it is on its way, and for those before it.
    pub(super) fn land_publication(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
    ) -> Result<()> {
        // In the order of the calls: earlier publications arrive on the way.
        while state.publishing.iter().any(|parts| parts.of.contains(&parameter.index)) {
            let oldest = state.publishing.pop_front().expect("one was found above");
            self.land_parts(state, oldest)?;
        }
        Ok(())
    }

    /// Waits for parts that are on their way.
    fn land_parts(&self, state: &mut PassState, parts: SentParts) -> Result<()> {
        let step = parts.step;
        for (index, part) in self.received(parts)? {
            state.uses[index].published = Some(Published { step, part });
        }
        Ok(())
    }

    /// Waits for all parts that are on their way.
    pub fn finish_publication(&self) -> Result<()> {
        let mut state = self.calling();
        while let Some(oldest) = state.publishing.pop_front() {
            self.attempt(&mut state, |state| self.land_parts(state, oldest));
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
        }
        // Collectives may return results that the device has not received yet.
        self.groups.by_axes.values().try_for_each(|group| group.replicas.comm().synchronize())
    }

    /// Remembers the new part of a parameter, so that it is gathered ahead of its next use.
    pub fn remember_part<const D: usize>(&self, parameter: &PassParameter, part: &Tensor<D>) {
        let value = part.clone().without_autodiff().reshape([-1]);
        let mut state = self.state();
        let uses = &mut state.uses[parameter.index];
        let values = identity(part).map(|leaf| Values { leaf: Some(leaf), version: None });
        // From here on the value has an identity, and the published one without it is not needed.
        (uses.part, uses.published) =
            (values.map(|values| OwnedPart { values, tensor: value }), None);
        if let Some(ahead) = &mut uses.ahead {
            // Gathered before the part was used, it had no identity.
            ahead.part = ahead.part.or(values);
        }
    }
}
