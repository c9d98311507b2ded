//! The optimizer of a whole model on many ranks.

mod acceptance;
mod busy;
mod clip;
mod counters;
mod detached;
mod memory;
mod record;
mod setup;
mod shard;
mod step;
mod trained;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

use super::config::{DistMuonConfig, Gradients};
use super::measured_costs::costs;
use super::plan::{Costs, Plan, Report};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::muon::MuonConfig;
use crate::parameters;
use crate::routing::{Routing, Updates};
use crate::update::{Place, SkippedSteps};
use acceptance::RowSums;
#[cfg(feature = "train")]
pub(super) use busy::Busy;
use clip::Clip;
use counters::Counters;
use memory::Snapshot;
pub use memory::{MemoryReport, Usage};
use shard::{RowParameters, Shard};
use trained::TrainedParameter;

/// Muon and AdamW for one model on many ranks, from
/// [`DistMuonConfig::init`](super::DistMuonConfig::init).
///
/// Every rank makes the same calls, and all ranks get the same results. For the same reduced
/// gradients, the parameters after a step do not depend on the number of ranks, the plan, the size
/// of the buckets or the number in flight, bit for bit, where the backend computes a matrix of a
/// batch as it computes it alone (Flex does).
///
/// # Failures
///
/// A method that fails on one rank fails on all, and ends the world: each rank returns the typed
/// error, or [`Error::PeerFailed`](crate::Error::PeerFailed) with the text of the first one. A step
/// takes the model and returns it only when all of its parameters are new: if a rank fails before
/// its last bucket is gathered, no rank returns a model. Clone the model before the step to keep
/// the old one, which keeps its memory as well. One case can't be ruled out: a rank that fails
/// after it has sent its last shard, while or after it reattaches its parameters. The other ranks
/// have then finished the step. After a failure, the states are those of an incomplete step: load a
/// checkpoint.
///
/// On an engine that lets the device wait (`nccl`), a step returns before its last bucket has
/// arrived. A failure is then returned by the next call of any kind, and nothing is
/// [saved](Self::save) before; call
/// [`Communicator::synchronize`](crate::comm::Communicator::synchronize) before you save or use the
/// model by other means.
pub struct DistModuleOptimizer {
    world: World,
    routing: Routing,
    plan: Plan,
    shards: Vec<Shard>,
    /// In the order of the plan.
    trained: Vec<TrainedParameter>,
    counters: Counters,
    skipped: SkippedSteps,
    place: Place,
    /// Sums over the matrices that this rank updates.
    matrices: RowSums,
    /// For each of these matrices, 1 if the iteration diverged in the last step. It is counted with
    /// the rejections of the next step, since no rank waits for another while it updates.
    diverged: Tensor<1>,
    costs: Costs,
    gradients: Gradients,
    in_flight: usize,
    clip: Option<Clip>,
    memory: MemoryReport,
    /// Bytes of all states, which never change.
    state_bytes: usize,
}

impl DistModuleOptimizer {
    pub(super) fn new<M: Module>(
        config: &DistMuonConfig,
        world: &World,
        model: &M,
    ) -> Result<Self> {
        setup::same_config(world, config)?;
        let routed = config.check().and_then(|()| config.muon.route(model));
        let routing = world.agree(routed)?;
        let (trained, parameters) = world.agree(setup::trained(&routing, model))?;
        setup::same_model(world, &parameters, model)?;
        // The parameters are equal on all ranks here, so that all ranks fail alike.
        setup::ensure_exchangeable(&parameters, world.rank())?;
        let Updates { muon, adamw, skipped } = routing.updates();
        let costs = costs(config.costs, world, &parameters, muon)?;
        let plan = setup::plan(config, world, parameters, &costs)?;
        let (rank, device) = (world.rank(), world.device().clone().inner());
        let mut rows = RowParameters::default();
        let shards = plan
            .buckets()
            .iter()
            .map(|bucket| Shard::new(bucket, &trained, rank, (muon, adamw), &mut rows, &device));
        let shards: Vec<Shard> = shards.collect();
        let clip =
            config.max_norm.map(|max_norm| Clip::new(max_norm, &plan, rank, &rows.all, &device));
        let parameters = trained.iter();
        let parameters =
            parameters.map(|p| p.shape.iter().product::<usize>() * p.dtype.size()).sum();
        let states = shards.iter().map(Shard::state_bytes).sum();
        let mut memory = MemoryReport::default();
        memory.observe(Snapshot { parameters, states, ..Snapshot::default() });
        let mut optim = Self {
            world: world.clone(),
            counters: Counters::new(trained.len(), &device),
            skipped: skipped.clone(),
            place: Place::default(),
            diverged: Tensor::zeros([rows.matrices.len()], (&device, DType::F32)),
            matrices: RowSums::new(&rows.matrices, trained.len(), &device),
            routing,
            plan,
            shards,
            trained,
            costs,
            gradients: config.gradients,
            in_flight: config.in_flight,
            clip,
            memory,
            state_bytes: states,
        };
        optim.start_counting();
        Ok(optim)
    }

    /// One step: the model with all of its trained parameters updated from the gradients of all
    /// ranks. Parameters without a gradient on any rank stay as they are, and so do their positions
    /// in the schedules; ranks without a gradient that other ranks have count as zeros.
    ///
    /// For several micro-batches, sum or average their gradients with Burn's
    /// [`GradientsAccumulator`](burn::optim::GradientsAccumulator) and step once.
    ///
    /// # Errors
    ///
    /// - [`Error::Parameter`](crate::Error::Parameter) if the model, or the shape, type or device
    ///   of a gradient, does not match the optimizer;
    /// - [`Error::SettingsDiffer`](crate::Error::SettingsDiffer) if the ranks give different
    ///   learning rates, or have not taken the same steps before;
    /// - [`Error::Setting`](crate::Error::Setting) for a learning rate that is not finite;
    /// - [`Error::Skipped`](crate::Error::Skipped) for a parameter that was skipped in too many
    ///   steps in a row;
    /// - [`Error::NotComputed`](crate::Error::NotComputed), with the first parameter that could not
    ///   be updated, or on several ranks the first of its bucket, if the device has no memory for
    ///   gradients or their step;
    /// - those of every collective.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let stepped = self.three_phases(&lr.into(), model, gradients);
        if let Err(error) = &stepped {
            self.world.comm().fail(&error.to_string());
        }
        stepped
    }

    /// The optimizer of every parameter, and the reason for it.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// The owners and buckets of all parameters.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The costs that the plan was balanced by.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The plan as a table: matrices, costs and bytes of every rank.
    pub fn report(&self) -> Report {
        self.plan.report(&self.costs)
    }

    /// The memory of this rank.
    pub fn memory(&self) -> MemoryReport {
        self.memory
    }

    /// The steps that left parameters untouched: the same on all ranks. Matrices for which the
    /// iteration diverges are counted with the next step.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// Counts skipped steps in other counts.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn count_skipped_in(&mut self, skipped: &SkippedSteps) {
        self.skipped = skipped.clone();
        self.place = Place::default();
        self.start_counting();
    }

    /// Registers the counts as they are now.
    fn start_counting(&mut self) {
        let names = self.trained.iter().map(|parameter| parameter.path.clone()).collect();
        let reserved = self.place.has_started().then_some(self.place);
        let times = self.trained.iter().map(|parameter| parameter.time).collect();
        self.place = self.skipped.start(reserved, names, self.counters.skipped.clone(), times);
    }

    fn device(&self) -> Device {
        self.world.device().clone().inner()
    }
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
}

impl MuonConfig {
    /// The optimizer of a whole model on one device, which updates all matrices of one shape as one
    /// batch, and several parameters in every launch: a [`DistModuleOptimizer`] in a world of one.
    /// Use it on a GPU, where a step of many parameters by [`init`](Self::init), which gets one
    /// parameter at a time, is bound by its launches. Both train the same model.
    ///
    /// It accepts neither parameters in float64 nor `grad_clipping`, which clips each gradient
    /// separately. For clipping by the norm of all gradients, use [`DistMuonConfig::max_norm`] with
    /// [`World::alone`].
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Device, Tensor};
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
