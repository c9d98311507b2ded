//! The parts of a step that are on their way, and the parts that passes remember.

use burn::tensor::{Device, Tensor};

use super::state::{OwnedPart, PassState, Publishing};
use super::{PUBLISHING, Passes};
use crate::comm::Pending;
use crate::distributed::layout::PassParameter;
use crate::distributed::layout::identity::Values;
use crate::error::Result;
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
            // Outside of the lock: an engine may wait here for other ranks.
            _ => replicas.all_gather(sent, &totals)?,
        };
        Ok(Publishing::Sent { of, message, pending })
    }

    /// Has the first use of new parts wait for them. Returns those that are here already. All ranks
    /// do the same, also those that have nothing of the parameters: Burn's clones share a value
    /// that is waited for.
    pub fn publish_later(&self, publishing: Publishing) -> Option<Publishing> {
        match publishing {
            Publishing::Here(_) => Some(publishing),
            Publishing::Sent { .. } => {
                let mut state = self.state();
                state.publishing.push_back(publishing);
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
        let (of, message, pending) = match publishing {
            Publishing::Here(parts) => return Ok(parts),
            Publishing::Sent { of, message, pending } => (of, message, pending),
        };
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

    /// This rank's new part of a parameter, or NaN after a failure.
    pub fn await_part(&self, parameter: &PassParameter, device: &Device) -> Tensor<1> {
        let mut state = self.state();
        let part = self.attempt(&mut state, |state| {
            self.land_publication(state, parameter)?;
            Ok(state.uses[parameter.index].published.clone())
        });
        part.flatten().unwrap_or_else(|| {
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
        while state.publishing.iter().any(|publishing| publishing.is_of(parameter.index)) {
            let oldest = state.publishing.pop_front().expect("one was found above");
            for (index, part) in self.published(oldest)? {
                state.uses[index].published = Some(part);
            }
        }
        Ok(())
    }

    /// Waits for all parts that are on their way.
    pub fn finish_publication(&self) -> Result<()> {
        let mut state = self.state();
        while let Some(oldest) = state.publishing.pop_front() {
            let parts = self.attempt(&mut state, |_| self.published(oldest));
            for (index, part) in parts.into_iter().flatten() {
                state.uses[index].published = Some(part);
            }
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
        if let Some(values) = values {
            uses.latest.gather(values);
        }
        // From here on the value has an identity, and the published one without it is not needed.
        (uses.part, uses.published) =
            (values.map(|values| OwnedPart { values, tensor: value }), None);
        if let Some(ahead) = &mut uses.ahead {
            // Gathered before the part was used, it had no identity.
            ahead.part = ahead.part.or(values);
        }
    }
}
