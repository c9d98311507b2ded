//! The configuration of Muon on many ranks.

use burn::config::Config;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::plan::{Balancing, MatrixOrder, PlanConfig};
use crate::error::{Error, Result};
use crate::host::host;
use crate::muon::MuonConfig;

/// The default of [`DistMuonConfig::in_flight`]: one bucket is sent, one is received and one is
/// updated.
const IN_FLIGHT: usize = 3;
/// The defaults of [`DistMuonConfig::bucket_mb`], and on one rank whose states stay where they are.
const BUCKET_MB: f64 = 25.0;
const BUCKET_MB_ALONE: f64 = 1000.0;
/// The default of [`DistMuonConfig::check_every`].
const CHECK_EVERY: usize = 1000;

/// The gradients that are given to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Gradients {
    /// The gradients of each rank's data, which the step averages over the ranks.
    PerRank,
    /// Averages, equal on all ranks, as after Burn's own data parallelism. The step reduces
    /// nothing. Not for layouts whose backward pass reduces gradients, since it leaves small
    /// parameters out.
    Averaged,
}

/// The time at which the ranks wait for the parameters that others have updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Publish {
    /// Before a step returns.
    Now,
    /// At the first use of a parameter after the step: they arrive while the next forward pass is
    /// at the layers before, in the order of the model. The bits are the same.
    ///
    /// All ranks have to use the model before one of them waits for another, so that a step is not
    /// followed by work of a single rank: call
    /// [`DistModuleOptimizer::finish_publication`](super::DistModuleOptimizer::finish_publication)
    /// on all ranks before. A failure of another rank after the step makes parameters NaN, and the
    /// next step, save or `finish_publication` returns it. A clone that is frozen or unfrozen
    /// between a step and the first use freezes its original as well, which the next step rejects.
    /// A layer that is frozen and trained again in between still gets the gradients of a clone, as
    /// in any of Burn's models before its first use.
    AtFirstUse,
}

/// The consequence of an audit that finds other bits than the owner of a matrix has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OnAuditFailure {
    /// The step fails with [`Error::Audited`] on all ranks, before any rank has a new value of the
    /// matrix.
    Stop,
    /// Rank 0 logs the text of the error as a warning, and the step goes on with the owner's bits.
    Warn,
}

/// The type in which the gradients of parameters in half precision are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GradDtype {
    /// The parameter's type. The ranks send two bytes per element, add up in float32 and do not
    /// round the sum, unless [`Layout::round_means`](super::Layout::round_means) is set.
    Parameter,
    /// float32, for gradients that were accumulated in it: see
    /// [`GradientBuffer`](crate::GradientBuffer). Those in half precision are also accepted.
    Float32,
}

/// Configuration of dynamic loss scaling, for gradients in float16: those below 6e-8 are zero in
/// it, and those above 65504 infinite (Micikevicius et al., <https://arxiv.org/abs/1710.03740>).
///
/// The loss is multiplied by
/// [`DistModuleOptimizer::loss_scale`](super::DistModuleOptimizer::loss_scale) before the backward
/// pass, and the step divides the gradients by it. If a gradient of any rank is not finite, all
/// ranks skip the step, and the scale decreases. Bounds and factors have the defaults of PyTorch's
/// `GradScaler`.
#[derive(Config, Debug, PartialEq)]
pub struct LossScaleConfig {
    /// The scale of the first step.
    #[config(default = 65536.0)]
    pub initial: f64,
    /// The factor by which the scale grows, larger than 1.
    #[config(default = 2.0)]
    pub growth: f64,
    /// The factor on the scale after a step that was skipped, in `(0, 1)`.
    #[config(default = 0.5)]
    pub backoff: f64,
    /// The number of consecutive steps without overflow after which the scale grows.
    #[config(default = 2000)]
    pub interval: usize,
}

impl LossScaleConfig {
    /// Fails for settings that no run can use.
    fn check(&self) -> Result<()> {
        if !(self.initial.is_finite() && self.initial > 0.0) {
            return Err(Error::setting("loss_scale.initial", self.initial, "a positive number"));
        }
        if !(self.growth.is_finite() && self.growth > 1.0) {
            return Err(Error::setting("loss_scale.growth", self.growth, "a number larger than 1"));
        }
        if !(self.backoff > 0.0 && self.backoff < 1.0) {
            let expected = "a number between 0 and 1";
            return Err(Error::setting("loss_scale.backoff", self.backoff, expected));
        }
        match self.interval {
            0 => Err(Error::setting("loss_scale.interval", 0, "at least 1")),
            _ => Ok(()),
        }
    }
}

/// The place of the states between the updates of their bucket: momentum, moments and master
/// weights. The states that [users' optimizers](crate::custom) make stay on the model's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StatesOn {
    /// The device of the model.
    Model,
    /// The host, in the memory of Burn's Flex backend, while the model is on a GPU. A step brings
    /// the states of a bucket to the model's device, updates the bucket, and takes them back. The
    /// states of the next bucket come before that update begins, so that the device has the states
    /// of two buckets at most. The bits are the same. Every step copies the states both ways, and
    /// waits for the copies to the host.
    ///
    /// It copies nothing for a model that is on the host.
    Host,
}

/// The source of the costs that a plan balances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CostSource {
    /// The floating-point operations of the iteration, in the form that will run, and of layer
    /// optimizers (see [`custom`](crate::custom)).
    Operations,
    /// The seconds that the iteration and the steps of users' optimizers take, measured on the
    /// devices when the optimizer is made. The slowest rank counts.
    Measured,
}

/// Configuration of [`DistModuleOptimizer`](super::DistModuleOptimizer): [`MuonConfig`], and the
/// division of the work among ranks.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::{DistMuonConfig, MomentumConfig, MuonConfig, World};
///
/// let world = World::alone(Device::default().autodiff());
/// let model = LinearConfig::new(64, 256).init(world.device());
/// let optim = DistMuonConfig::new()
///     .with_muon(MuonConfig::new().with_momentum(MomentumConfig::new().with_nesterov(false)))
///     .with_max_norm(Some(1.0))
///     .init(&world, &model)?;
/// println!("{}", optim.report());
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Config, Debug)]
pub struct DistMuonConfig {
    /// Muon, AdamW, and the routing rules. The field `grad_clipping`, which clips each parameter's
    /// gradient separately, has to be `None`: see [`max_norm`](Self::max_norm).
    #[config(default = "MuonConfig::new()")]
    pub muon: MuonConfig,
    /// The assignment of matrices to ranks, in every placement. A layout needs it before it divides
    /// a model: from [`start`](Self::start), or by
    /// [`Layout::with_config`](super::Layout::with_config).
    #[config(default = "Balancing::Greedy")]
    pub balancing: Balancing,
    /// The source of the costs that are balanced. A layout needs it as it needs
    /// [`balancing`](Self::balancing).
    #[config(default = "CostSource::Operations")]
    pub costs: CostSource,
    /// The gradients that are given to a step.
    #[config(default = "Gradients::PerRank")]
    pub gradients: Gradients,
    /// The type in which the gradients of parameters in half precision are reduced.
    #[config(default = "GradDtype::Parameter")]
    pub grad_dtype: GradDtype,
    /// Dynamic loss scaling, for gradients in float16; `None` for none.
    pub loss_scale: Option<LossScaleConfig>,
    /// Size in MB (10^6 bytes) of the buckets in which parameters are communicated. `None` for 25,
    /// which is PyTorch's default, and for 1000 in a world of one, which communicates nothing,
    /// unless `states_on` is [`Host`](StatesOn::Host).
    ///
    /// Smaller buckets overlap more; larger ones need fewer messages and make larger batches. The
    /// states of one bucket are in memory twice while they are saved or loaded, on the device and
    /// on the host.
    pub bucket_mb: Option<f64>,
    /// Number of elements below which every rank updates a parameter of AdamW as a whole, as in
    /// nanochat.
    #[config(default = 1024)]
    pub small_elements: usize,
    /// Number of buckets in flight, at least 1. A bucket is reduced while others are packed, and
    /// gathered while others are updated. With more buckets in flight, an engine that communicates
    /// in the background hides more of the communication, and a step takes more memory. The results
    /// are the same.
    #[config(default = "IN_FLIGHT")]
    pub in_flight: usize,
    /// The time at which the ranks wait for new parameters.
    #[config(default = "Publish::Now")]
    pub publish: Publish,
    /// Hides messages behind the passes: [`start`](Self::start) then sets both
    /// [`Layout::overlap_backward`](super::Layout::overlap_backward) and [`Publish::AtFirstUse`],
    /// in whatever placement.
    #[config(default = false)]
    pub overlap: bool,
    /// The place of the states between updates.
    #[config(default = "StatesOn::Model")]
    pub states_on: StatesOn,
    /// Largest norm over all gradients: gradients with a larger norm are scaled down together.
    /// `None` for no limit. For clipping on one device, use [`World::alone`](crate::World::alone).
    pub max_norm: Option<f64>,
    /// Number of steps after which the ranks compare checksums of what they hold in common:
    /// parameters that all of them have, replicas of slices and of owned parts, and the states of
    /// parameters that every rank updates. A difference, as after an error of memory, is an
    /// [`Error::Drifted`]. 0 for never.
    ///
    /// Matrices come anew from their owner in every step, so that a difference in one lasts for a
    /// step, unless the owner has it: then all have it. Frozen parameters are not compared.
    #[config(default = "CHECK_EVERY")]
    pub check_every: usize,
    /// Number of steps after which an audit takes place: every rank also computes the matrices of
    /// the rank before it, of one bucket. Both compare the bits of states and new values before any
    /// rank is given them. The next audit is of the next bucket, also in a run that was resumed. 0
    /// for never, which is the default.
    ///
    /// It needs two ranks, and matrices that every rank has whole. Its bits are equal where the
    /// sums over ranks are exact and the kernels are the same: on every engine, and between devices
    /// of one kind. NCCL's own sums are an error. [`bucket_mb`](Self::bucket_mb) sets the
    /// share of the matrices.
    #[config(default = 0)]
    pub audit_every: usize,
    /// The consequence of an audit that finds other bits.
    #[config(default = "OnAuditFailure::Stop")]
    pub on_audit_failure: OnAuditFailure,
}

impl DistMuonConfig {
    /// Fails for settings that no run can use.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(size) = self.bucket_mb.filter(|size| !(size.is_finite() && *size > 0.0)) {
            return Err(Error::setting("bucket_mb", size, "a positive number"));
        }
        if self.in_flight == 0 {
            return Err(Error::setting("in_flight", 0, "at least 1"));
        }
        if let Some(norm) = self.max_norm.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
            return Err(Error::setting("max_norm", norm, "a positive number"));
        }
        if self.states_on == StatesOn::Host && host().is_none() {
            let expected = "`Model` in a build without the feature `flex`, which is the host";
            return Err(Error::setting("states_on", "Host", expected));
        }
        self.loss_scale.iter().try_for_each(LossScaleConfig::check)?;
        match &self.muon.grad_clipping {
            Some(clipping) => Err(Error::setting(
                "muon.grad_clipping",
                format!("{clipping:?}"),
                "`None` (`DistMuonConfig::with_max_norm` clips all gradients together)",
            )),
            None => Ok(()),
        }
    }

    /// The device of the states between updates, if it is another one than the model's.
    pub(super) fn states_device(&self, of_model: &Device) -> Option<Device> {
        match self.states_on {
            StatesOn::Model => None,
            StatesOn::Host => host().filter(|host| host != of_model),
        }
    }

    /// The configuration of a plan for a number of ranks.
    pub(super) fn plan_config(&self, ranks: usize) -> PlanConfig {
        let default = match (ranks, self.states_on) {
            (1, StatesOn::Model) => BUCKET_MB_ALONE,
            // States come from the host in buckets: in large ones, all states would come at once.
            _ => BUCKET_MB,
        };
        PlanConfig {
            balancing: self.balancing,
            order: match self.publish {
                Publish::Now => MatrixOrder::Size,
                Publish::AtFirstUse => MatrixOrder::Model,
            },
            // Rounded up, so that no positive size becomes 0 bytes, which a plan rejects.
            bucket_bytes: (self.bucket_mb.unwrap_or(default) * 1e6).ceil() as usize,
            small_elements: self.small_elements,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_come_from_the_host_in_small_buckets_also_on_one_rank() {
        let config = |states| DistMuonConfig::new().with_states_on(states);
        let bytes = |states, ranks| config(states).plan_config(ranks).bucket_bytes;
        assert_eq!(bytes(StatesOn::Model, 1), 1_000_000_000);
        for (states, ranks) in [(StatesOn::Host, 1), (StatesOn::Host, 2), (StatesOn::Model, 2)] {
            assert_eq!(bytes(states, ranks), 25_000_000);
        }
        let chosen = config(StatesOn::Host).with_bucket_mb(Some(100.0));
        assert_eq!(chosen.plan_config(1).bucket_bytes, 100_000_000);
    }
}
