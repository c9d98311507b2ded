//! Messages behind the passes: in which runs they are hidden by default.

use super::{Layout, Place};
use crate::distributed::config::{DistMuonConfig, Gradients, Publish};
use crate::error::{Error, Result};

impl Layout {
    /// Returns a configuration and this layout with it, both with messages behind the passes if
    /// [`DistMuonConfig::overlap`] says so.
    pub(in crate::distributed) fn overlapped(
        self,
        config: &DistMuonConfig,
    ) -> (DistMuonConfig, Self) {
        let config = config.clone();
        let (config, layout) = match config.overlap.unwrap_or_else(|| self.hides_messages(&config))
        {
            true => (config.with_publish(Publish::AtFirstUse), self.overlap_backward()),
            false => (config, self),
        };
        (config.clone(), layout.with_config(config))
    }

    /// Returns `true` if passes hide messages, send no more of them than a step, and leave nothing
    /// out that a step compares.
    fn hides_messages(&self, config: &DistMuonConfig) -> bool {
        let world = self.world();
        world.size() > 1
            && world.comm().works_in_background()
            && config.gradients == Gradients::PerRank
            && config.audit_every == 0
            && !self.allows_unused
            && self.places.iter().all(|place: &Place| place.axis().is_none())
    }

    /// Fails without the overlap that a configuration asks for.
    pub(in crate::distributed) fn ensure_overlaps(&self, config: &DistMuonConfig) -> Result<()> {
        let overlaps = self.overlaps_backward && config.publish == Publish::AtFirstUse;
        match config.overlap {
            Some(true) if !overlaps => Err(Error::setting(
                "overlap",
                "Some(true)",
                "a model of `DistMuonConfig::start`, which sets it (`Layout::overlap_backward` and \
                 `Publish::AtFirstUse` for one of `Layout::shard`)",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::comm::World;
    use crate::distributed::forecast::Planned;

    #[test]
    fn messages_are_hidden_over_nccl_unless_something_else_is_wanted() {
        let overlap = |config: DistMuonConfig, change: fn(Layout) -> Layout, world: &World| {
            let (config, layout) = change(Layout::from(world)).overlapped(&config);
            let overlaps = config.publish == Publish::AtFirstUse;
            assert_eq!(layout.overlaps_backward, overlaps);
            assert_eq!(layout.config().publish, config.publish);
            overlaps
        };
        let (new, as_it_is): (_, fn(Layout) -> Layout) = (DistMuonConfig::new, |layout| layout);
        let nccl = Planned::over_nccl(2);
        assert!(overlap(new(), as_it_is, &nccl));
        assert!(overlap(new(), |layout| layout.owned("dp"), &nccl));
        // One rank has no messages, and threads have none to hide.
        assert!(!overlap(new(), as_it_is, &Planned::over_nccl(1)));
        let threads = Planned::world(0, 2, 1, Device::default()).unwrap();
        assert!(!overlap(new(), as_it_is, &threads));
        assert!(overlap(new().with_overlap(Some(true)), as_it_is, &threads));
        assert!(!overlap(new().with_overlap(Some(false)), as_it_is, &nccl));
        for config in [new().with_audit_every(1), new().with_gradients(Gradients::Averaged)] {
            assert!(!overlap(config, as_it_is, &nccl));
        }
        assert!(!overlap(new(), Layout::allow_unused, &nccl));
        let cut = |layout: Layout| layout.with_place(Place::shard("weight", "dp", 0));
        assert!(!overlap(new(), cut, &nccl));
    }
}
