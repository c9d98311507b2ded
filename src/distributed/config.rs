//! The configuration of Muon on many ranks.

use burn::config::Config;
use burn::module::Module;
use serde::{Deserialize, Serialize};

use super::DistModuleOptimizer;
use super::plan::{Balancing, PlanConfig};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::muon::MuonConfig;
use crate::parameters;

/// The default of [`DistMuonConfig::in_flight`]: one bucket is sent, one is received and one is updated.
const IN_FLIGHT: usize = 3;
/// The defaults of [`DistMuonConfig::bucket_mb`], on several ranks and on one.
const BUCKET_MB: f64 = 25.0;
const BUCKET_MB_ALONE: f64 = 1000.0;

/// The gradients that are given to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gradients {
    /// Those of each rank's data: the step averages them.
    PerRank,
    /// Averages, equal on all ranks, as after Burn's own data parallelism. Nothing is
    /// reduced.
    Averaged,
}

/// The source of the costs that a plan balances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CostSource {
    /// The floating-point operations of the form that will run.
    Operations,
    /// Times measured on the device when the optimizer is made; the largest of all ranks.
    Measured,
}

/// Configuration of [`DistModuleOptimizer`]: [`MuonConfig`], and the division of the work among ranks.
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
    /// Muon, AdamW, and the routing rules. Its `grad_clipping`, which is per parameter,
    /// has to be `None`: see `max_norm`.
    #[config(default = "MuonConfig::new()")]
    pub muon: MuonConfig,
    /// The assignment of matrices to ranks.
    #[config(default = "Balancing::Greedy")]
    pub balancing: Balancing,
    /// The source of the costs that are balanced.
    #[config(default = "CostSource::Operations")]
    pub costs: CostSource,
    /// The gradients that are given to a step.
    #[config(default = "Gradients::PerRank")]
    pub gradients: Gradients,
    /// Size in MB (10^6 bytes) of the buckets in which parameters are communicated. Smaller buckets overlap more;
    /// larger ones need fewer messages and make larger batches. `None`: 25, PyTorch's default; in a world of one, which
    /// communicates nothing, 1000, so that the matrices of one shape form few batches. The states of one bucket are in
    /// memory twice while they are saved or loaded, on the device and on the host.
    pub bucket_mb: Option<f64>,
    /// AdamW's parameters with fewer elements are updated by every rank, as in nanochat.
    #[config(default = 1024)]
    pub small_elements: usize,
    /// Number of buckets in flight, at least 1: reduced while gradients are packed, and gathered while others are
    /// updated. More buckets hide more of the communication, where the engine communicates in the background, and take
    /// more memory. The results are the same.
    #[config(default = "IN_FLIGHT")]
    pub in_flight: usize,
    /// Largest norm over all gradients: larger gradients are scaled down together. It also works on one device, as
    /// [`World::alone`].
    pub max_norm: Option<f64>,
}

impl DistMuonConfig {
    /// An optimizer for the model on all ranks of a world, which all make this call.
    ///
    /// # Errors
    ///
    /// On all ranks, if on one:
    /// - those of [`MuonConfig::route`];
    /// - [`Error::Parameter`] for a parameter in float64, which ranks can't exchange;
    /// - [`Error::Setting`] for a setting that no run can use;
    /// - [`Error::SettingsDiffer`] if the ranks' configurations differ;
    /// - [`Error::ModelsDiffer`] if the ranks' models or their values differ, naming the first
    ///   parameter that does;
    /// - those of every collective.
    pub fn init<M: Module>(&self, world: &World, model: &M) -> Result<DistModuleOptimizer> {
        DistModuleOptimizer::new(self, world, model)
    }

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
        match &self.muon.grad_clipping {
            Some(clipping) => Err(Error::setting(
                "muon.grad_clipping",
                format!("{clipping:?}"),
                "`None` for whole models; `DistMuonConfig::with_max_norm` clips all gradients together",
            )),
            None => Ok(()),
        }
    }

    /// The configuration of a plan for a number of ranks.
    pub(super) fn plan_config(&self, ranks: usize) -> PlanConfig {
        let default = if ranks == 1 { BUCKET_MB_ALONE } else { BUCKET_MB };
        PlanConfig {
            balancing: self.balancing,
            bucket_bytes: (self.bucket_mb.unwrap_or(default) * 1e6).ceil() as usize,
            small_elements: self.small_elements,
        }
    }
}

impl MuonConfig {
    /// The optimizer of a whole model on one device, which updates all matrices of one shape as one batch, and
    /// several parameters in every launch: a [`DistModuleOptimizer`] in a world of one. Use it on a GPU, where a step of
    /// many parameters by [`init`](Self::init), which gets one parameter at a time, is bound by its launches. Both train
    /// the same model.
    ///
    /// It accepts neither parameters in float64 nor `grad_clipping`, which clips each gradient separately. For clipping
    /// by the norm of all gradients, use [`DistMuonConfig::max_norm`] with [`World::alone`].
    ///
    /// ```
    /// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Distribution, Tensor}};
    /// use distmuon::MuonConfig;
    ///
    /// let device = Device::default().autodiff();
    /// let model = LinearConfig::new(64, 256).init(&device);
    /// let mut optim = MuonConfig::new().init_batched(&model)?;
    /// let loss = model.forward(Tensor::<2>::ones([8, 64], &device)).square().mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    /// let model = optim.step(1e-3, model, grads)?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`DistMuonConfig::init`], and [`Error::Setting`] for a model on several devices.
    pub fn init_batched<M: Module>(&self, model: &M) -> Result<DistModuleOptimizer> {
        let found = parameters::of(model).into_iter();
        let mut devices = found.filter(|found| found.trainable).map(|found| found.device);
        // Without a parameter to train, `init` returns the error, on any device.
        let device = devices.next().unwrap_or_default();
        if let Some(other) = devices.find(|other| *other != device) {
            return Err(Error::setting(
                "model",
                format!("on {device:?} and {other:?}"),
                "on one device; for several, `DistMuonConfig` with `World::devices`",
            ));
        }
        DistMuonConfig::new().with_muon(self.clone()).init(&World::alone(device), model)
    }
}
