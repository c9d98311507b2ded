//! Settings that a program decides on while it runs, in place of their schedules.

use std::sync::Arc;

use super::DistModuleOptimizer;
use crate::error::Result;
use crate::update::MuonUpdate;

/// The values that a program has set. `None` where the schedules of the configuration apply.
#[derive(Debug, Clone, Copy, Default)]
pub struct Running {
    pub momentum: Option<f64>,
    pub weight_decay: Option<f64>,
}

impl Running {
    /// The names of the methods that set them.
    pub const NAMES: [&str; 2] = ["set_momentum", "set_weight_decay"];

    /// The values, in the order of the names.
    pub fn values(self) -> [Option<f64>; 2] {
        [self.momentum, self.weight_decay]
    }
}

impl DistModuleOptimizer {
    /// Sets the momentum of the matrices from the next step on, in place of the schedule of
    /// [`MomentumConfig::momentum`](crate::MomentumConfig::momentum): for programs that decide on
    /// it while they run. All ranks make this call, with the same value, which the next step
    /// compares.
    ///
    /// The value is not part of a checkpoint: set it again after [`load`](Self::load). Matrices of
    /// a rule with a [momentum](crate::MuonRoutingRule::momentum) of its own keep that.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::Device};
    /// use distmuon::MuonConfig;
    ///
    /// let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
    /// let mut optim = MuonConfig::new().init_batched(&model)?;
    /// optim.set_momentum(0.9)?;
    /// optim.set_weight_decay(0.05)?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Setting`](crate::Error::Setting) for a momentum outside of `[0, 1)`, or one that
    /// averages in bfloat16 do not follow, or that the [parts](crate::parts) of the update exclude.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.set_updates(|update| update.with_momentum(momentum))?;
        self.running.momentum = Some(momentum);
        Ok(())
    }

    /// Sets the rate of the weight decay of the matrices from the next step on, in place of the
    /// schedule of [`MuonConfig::weight_decay`](crate::MuonConfig::weight_decay), whose kind stays.
    /// Otherwise as [`set_momentum`](Self::set_momentum).
    ///
    /// # Errors
    ///
    /// [`Error::Setting`](crate::Error::Setting) for a rate that is not finite, or negative, or
    /// that the [parts](crate::parts) of the update exclude.
    pub fn set_weight_decay(&mut self, rate: f64) -> Result<()> {
        self.set_updates(|update| update.with_weight_decay(rate))?;
        self.running.weight_decay = Some(rate);
        Ok(())
    }

    fn set_updates(&mut self, set: impl Fn(&MuonUpdate) -> Result<MuonUpdate>) -> Result<()> {
        let all = self.divided.routing.updates().muon.iter();
        // All are made before any is set, so that an error changes nothing.
        let all = all.map(|update| set(update).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        self.shards.iter_mut().for_each(|shard| shard.set_muon(&all));
        self.divided.routing.set_muon(all);
        Ok(())
    }
}
