//! Messages behind the passes, by one setting.

use super::Layout;
use crate::distributed::config::{DistMuonConfig, Publish};
use crate::error::{Error, Result};

impl Layout {
    /// Returns this layout with a configuration, both with messages behind the passes if
    /// [`DistMuonConfig::overlap`] says so.
    pub(in crate::distributed) fn overlapped(self, config: DistMuonConfig) -> Self {
        match config.overlap {
            true => self.overlap_backward().with_config(config.with_publish(Publish::AtFirstUse)),
            false => self.with_config(config),
        }
    }

    /// Fails without the overlap that a configuration asks for.
    pub(in crate::distributed) fn ensure_overlaps(&self, config: &DistMuonConfig) -> Result<()> {
        let overlaps = self.overlaps_backward && config.publish == Publish::AtFirstUse;
        match config.overlap && !overlaps {
            true => Err(Error::setting(
                "overlap",
                true,
                "a model of `DistMuonConfig::start`, which sets it (`Layout::overlap_backward` and \
                 `Publish::AtFirstUse` for one of `Layout::shard`)",
            )),
            false => Ok(()),
        }
    }
}
