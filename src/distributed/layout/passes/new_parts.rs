//! The parts of a step that are on their way, and the parts that passes remember.

use burn::tensor::{Device, Tensor};

use super::state::{PassState, Uses, Values};
use super::{PUBLISHING, Passes};
use crate::distributed::layout::PassParameter;
use crate::error::Result;
use crate::link::identity;

impl Passes {
    /// Starts to gather a part from the shards that its replicas updated. Its first use waits for
    /// the result.
    pub(super) fn publish_at_first_use(
        &self,
        parameter: &PassParameter,
        shard: Tensor<1>,
    ) -> Result<()> {
        if parameter.part_count() == 0 {
            // A parameter has an element at least, which may be sent ahead as those of other ranks.
            let part = Tensor::zeros([1], (&shard.device(), parameter.dtype));
            self.state().uses[parameter.index].published = Some(part);
            return Ok(());
        }
        let pending =
            // Started outside of the lock: an engine may wait here for other ranks.
            self.replicas(parameter).all_gather(shard, &parameter.shard_counts().to_vec())?;
        let mut state = self.state();
        state.publishing.push_back((parameter.index, pending));
        state.observe();
        Ok(())
    }

    /// This rank's new part of a parameter, or NaN after a failure.
    pub fn await_part(&self, parameter: &PassParameter, device: &Device) -> Tensor<1> {
        let mut state = self.state();
        let part = self.attempt(&mut state, |state| {
            self.land_publication(state, parameter)?;
            Ok(state.uses[parameter.index].published.clone())
        });
        let nan =
            || Tensor::full([parameter.part_count().max(1)], f32::NAN, (device, parameter.dtype));
        part.flatten().unwrap_or_else(nan)
    }

    /// Waits for the part of a parameter, if it is on its way, and for those before it.
    pub(super) fn land_publication(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
    ) -> Result<()> {
        // In the order of the calls: earlier publications arrive on the way.
        while state.publishing.iter().any(|(index, _)| *index == parameter.index) {
            let (index, pending) = state.publishing.pop_front().expect("one was found above");
            let part = pending.wait();
            let part = part.map_err(|error| self.parameters[index].in_action(PUBLISHING, error))?;
            state.uses[index].published = Some(part);
        }
        Ok(())
    }

    /// Waits for all parts that are on their way.
    pub fn finish_publication(&self) -> Result<()> {
        let mut state = self.state();
        // The last one brings all before it.
        while let Some((index, _)) = state.publishing.back() {
            let parameter = &self.parameters[*index];
            self.attempt(&mut state, |state| self.land_publication(state, parameter));
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
        }
        Ok(())
    }

    /// Forgets the parts that were used, so that a step has the only reference to them.
    pub fn forget_parts(&self) {
        let forget = |uses: &mut Uses| {
            uses.part = None;
            // Parts with a leaf are frozen, and kept to be gathered ahead in the next pass. A clone
            // that was frozen just before a step shares its buffers with the step's parts.
            uses.evaluated.take_if(|(values, _)| matches!(values, Values::Version(_)));
        };
        self.state().uses.iter_mut().for_each(forget);
    }

    /// Remembers the new part of a parameter, so that it is gathered ahead of its next use.
    pub fn remember_part<const D: usize>(&self, parameter: &PassParameter, part: &Tensor<D>) {
        let value = part.clone().without_autodiff().reshape([-1]);
        let (values, mut state) = (identity(part).map(Values::Leaf), self.state());
        let uses = &mut state.uses[parameter.index];
        // From here on the value has an identity, and the published one without it is not needed.
        (uses.part, uses.published) = (values.map(|values| (values, value)), None);
        if let Some(ahead) = &mut uses.ahead {
            // Gathered before the part was used, it had no identity.
            ahead.part = ahead.part.or(values);
        }
    }
}
