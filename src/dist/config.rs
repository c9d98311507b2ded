//! The configuration of Muon on many ranks.

use std::time::Instant;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{DType, Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};

use super::plan::{Costs, Parameter, PlanSettings, ShapeCost, Strategy, Work};
use super::{DistModuleOptimizer, World};
use crate::error::{Error, Result};
use crate::muon::MuonConfig;
use crate::orthogonalize::NewtonSchulz;
use crate::route::Walk;

/// The default of [`DistMuonConfig::in_flight`]: one bucket is sent, one is received and one is worked on.
pub(super) const IN_FLIGHT: usize = 3;
/// The defaults of [`DistMuonConfig::bucket_mb`], on several ranks and on one.
const BUCKET_MB: f64 = 25.0;
const BUCKET_MB_ALONE: f64 = 1000.0;
/// Repetitions of a measurement; the least counts.
const REPETITIONS: usize = 3;

/// What the gradients given to a step are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gradients {
    /// Each rank's own: the step takes their mean.
    PerRank,
    /// The mean already, equal on all ranks, as after Burn's own data parallelism. Nothing is
    /// reduced.
    Averaged,
}

/// Where the costs that a plan balances come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CostSource {
    /// The floating-point operations of the form that will run.
    Operations,
    /// Times measured on the device when the optimizer is made; the slowest rank counts.
    Measured,
}

/// Configuration of [`DistModuleOptimizer`]: [`MuonConfig`], and how the work is shared.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::{MuonConfig, dist::{DistMuonConfig, World}};
///
/// let world = World::alone(Device::default().autodiff());
/// let model = LinearConfig::new(64, 256).init(world.device());
/// let optim = DistMuonConfig::new()
///     .with_muon(MuonConfig::new().with_nesterov(false))
///     .with_max_norm(Some(1.0))
///     .init(&world, &model)?;
/// println!("{}", optim.report());
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Config, Debug)]
pub struct DistMuonConfig {
    /// The rules: Muon, AdamW, and what goes where. Its `grad_clipping`, which is per parameter,
    /// has to be empty: see `max_norm`.
    #[config(default = "MuonConfig::new()")]
    pub muon: MuonConfig,
    /// How matrices are dealt to the ranks.
    #[config(default = "Strategy::Greedy")]
    pub strategy: Strategy,
    /// What is balanced.
    #[config(default = "CostSource::Operations")]
    pub costs: CostSource,
    /// What the gradients given to a step are.
    #[config(default = "Gradients::PerRank")]
    pub gradients: Gradients,
    /// Size in MB (10^6 bytes) of the buckets that parameters travel in. Smaller ones overlap more,
    /// larger ones need fewer messages and make larger batches. Empty: 25, PyTorch's default; in a world of one,
    /// where nothing travels, 1000, so that matrices of one shape are few batches. The states of one bucket are held
    /// twice while they are saved or loaded, on the device and on the host.
    pub bucket_mb: Option<f64>,
    /// AdamW's parameters of fewer elements are updated by every rank; as in nanochat.
    #[config(default = 1024)]
    pub small_elements: usize,
    /// Buckets that are on their way at once, at least 1: so many are reduced while gradients are packed,
    /// and so many gathered while others are updated. More hide more of the communication, where the
    /// engine communicates in the background, and hold more memory. The results are the same.
    #[config(default = "IN_FLIGHT")]
    pub in_flight: usize,
    /// Gradients are scaled down together so that the norm over all of them is at most this: on one device,
    /// too, as [`World::alone`].
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

    /// Refuses settings that no run can use.
    pub(super) fn check(&self) -> Result<()> {
        let refuse =
            |setting, value: String, expected| Err(Error::Setting { setting, value, expected });
        if let Some(size) = self.bucket_mb.filter(|size| !(size.is_finite() && *size > 0.0)) {
            return refuse("bucket_mb", size.to_string(), "a positive number");
        }
        if self.in_flight == 0 {
            return refuse("in_flight", "0".into(), "at least 1");
        }
        if let Some(norm) = self.max_norm.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
            return refuse("max_norm", norm.to_string(), "a positive number");
        }
        match &self.muon.grad_clipping {
            Some(clipping) => refuse(
                "muon.grad_clipping",
                format!("{clipping:?}"),
                "empty for whole models; `DistMuonConfig::with_max_norm` clips all gradients together",
            ),
            None => Ok(()),
        }
    }

    /// The settings of a plan for so many ranks.
    pub(super) fn plan_settings(&self, ranks: usize) -> PlanSettings {
        let default = if ranks == 1 { BUCKET_MB_ALONE } else { BUCKET_MB };
        PlanSettings {
            strategy: self.strategy,
            bucket_bytes: (self.bucket_mb.unwrap_or(default) * 1e6).ceil() as usize,
            small_elements: self.small_elements,
        }
    }
}

impl MuonConfig {
    /// The optimizer of a whole model on one device, which works on all matrices of one shape as one batch, and on
    /// several parameters in every launch: a [`DistModuleOptimizer`] in a world of one. Use it on a GPU, where the
    /// launches of [`init`](Self::init), which sees one parameter at a time, are what a step of many parameters waits
    /// for. Both train the same model.
    ///
    /// Two things it does not take: parameters in float64, and a configuration that clips each gradient by itself
    /// (`grad_clipping`). For clipping by the norm of all gradients, use [`DistMuonConfig::max_norm`] with
    /// [`World::alone`].
    ///
    /// ```
    /// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Distribution, Tensor}};
    /// use distmuon::MuonConfig;
    ///
    /// let device = Device::default().autodiff();
    /// let model = LinearConfig::new(64, 256).init(&device);
    /// let mut optim = MuonConfig::new().init_whole(&model)?;
    /// let loss = model.forward(Tensor::<2>::ones([8, 64], &device)).square().mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    /// let model = optim.step(1e-3, model, grads)?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`DistMuonConfig::init`], and [`Error::Setting`] for a model on several devices.
    pub fn init_whole<M: Module>(&self, model: &M) -> Result<DistModuleOptimizer> {
        let found = Walk::through(model).into_iter();
        let mut devices = found.filter(|found| found.trainable).map(|found| found.device);
        // On any device, `init` tells that there is nothing to train.
        let device = devices.next().unwrap_or_default();
        if let Some(other) = devices.find(|other| *other != device) {
            return Err(Error::Setting {
                setting: "model",
                value: format!("on {device:?} and {other:?}"),
                expected: "on one device; for several, `DistMuonConfig` with `World::devices`",
            });
        }
        DistMuonConfig::new().with_muon(self.clone()).init(&World::alone(device), model)
    }
}

impl CostSource {
    /// The costs of all matrices among the parameters, agreed by all ranks.
    pub(super) fn costs(
        self,
        world: &World,
        parameters: &[Parameter],
        iteration: &NewtonSchulz,
    ) -> Result<Costs> {
        let device = world.device().clone().inner();
        let matrices = parameters.iter().filter_map(|parameter| match parameter.work {
            Work::Matrices { rows, columns, .. } => Some(([rows, columns], parameter.dtype)),
            Work::Elements => None,
        });
        let mut distinct: Vec<([usize; 2], DType)> = matrices.collect();
        distinct.sort_by_key(|(shape, dtype)| (*shape, dtype.size()));
        distinct.dedup_by_key(|(shape, _)| *shape);
        match self {
            Self::Operations => Ok(Costs::new(distinct.into_iter().map(|(shape, dtype)| {
                let each = iteration.explain_shape(shape, dtype, &device).operations;
                (shape, ShapeCost { fixed: 0.0, each })
            }))),
            Self::Measured => {
                let measured = distinct
                    .into_iter()
                    .map(|(shape, dtype)| Ok((shape, measure(iteration, shape, dtype, &device)?)));
                let own = measured.collect::<Result<Vec<_>>>().map(Costs::new);
                let all = world.gather_value(&world.agree(own)?, 0)?.unwrap_or_default();
                let slowest =
                    all.iter().fold(Costs::default(), |costs, other| costs.maximum(other));
                world.broadcast_value(&slowest, 0)
            }
        }
    }
}

/// Seconds that the iteration takes for a batch, from batches of one and of two.
fn measure(
    iteration: &NewtonSchulz,
    [m, n]: [usize; 2],
    dtype: DType,
    device: &Device,
) -> Result<ShapeCost> {
    let time = |count: usize| -> Result<f64> {
        let ones = Distribution::Normal(0.0, 1.0);
        let batch = Tensor::<3>::random([count, m, n], ones, (device, dtype));
        let run = || -> Result<f64> {
            sync(device)?;
            let start = Instant::now();
            iteration.orthogonalize(batch.clone());
            sync(device)?;
            Ok(start.elapsed().as_secs_f64())
        };
        run()?; // compiles and tunes
        (0..REPETITIONS).try_fold(f64::INFINITY, |least, _| Ok(least.min(run()?)))
    };
    let (one, two) = (time(1)?, time(2)?);
    let each = (two - one).clamp(one / 10.0, one);
    Ok(ShapeCost { fixed: one - each, each })
}

fn sync(device: &Device) -> Result<()> {
    device.sync().map_err(|error| Error::Setting {
        setting: "costs",
        value: format!("Measured, on a device that fails: {error:?}"),
        expected: "Operations, or a device that works",
    })
}
