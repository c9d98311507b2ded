//! The optimizer of a whole model on many ranks.

mod accounting;
mod agree_on_setup;
mod agree_on_step;
mod audits;
mod bucket_exchange;
mod bucket_shard;
mod buckets_in_flight;
mod custom_states;
mod decisions;
mod detached_parameters;
mod diagnostics;
mod divided_model;
mod drift;
mod global_clipping;
mod gradient_scaling;
mod loss_scale;
mod memory_report;
mod publication;
mod record;
mod rejected_gradients;
mod settings_while_running;
mod share_of_slices;
mod stages;
mod step;
mod step_counts;
mod step_number;
mod traffic;
mod undeclared_partial_gradients;

use std::collections::BTreeMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::config::DistMuonConfig;
use super::layout::Layout;
use super::plan::{Costs, Plan, Report};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::muon::MuonConfig;
use crate::parameters;
use crate::qk_clip::Factors;
use crate::routing::Routing;
use crate::update::SkippedSteps;
use accounting::Accounting;
pub(super) use agree_on_setup::{costs, ensure_exchangeable, plan};
use audits::Audits;
use bucket_exchange::publishers;
use bucket_shard::Shard;
use decisions::HeadClip;
use diagnostics::Observing;
pub use diagnostics::{Diagnostics, GroupDiagnostics, ParameterDiagnostics};
use divided_model::DividedModel;
pub(super) use divided_model::bytes_of_parameter;
use gradient_scaling::GradientScaling;
use memory_report::MemoryMeter;
pub use memory_report::{MemoryReport, Usage};
use settings_while_running::Running;
pub(super) use stages::{Stage, stages};
use step_counts::Accounts;
use step_number::StepNumber;
use traffic::Traffic;
pub(super) use traffic::sent_dtype;
use undeclared_partial_gradients::ComparedGradients;

/// Muon and AdamW for one model on many ranks, from
/// [`DistMuonConfig::init`](super::DistMuonConfig::init).
///
/// Every rank makes the same calls, and all ranks get the same results. For the same reduced
/// gradients, the parameters after a step are the same, bit for bit, for any number of ranks, plan,
/// bucket size and number of buckets in flight. That requires a backend that computes each matrix
/// of a batch exactly as it computes the matrix alone, as Flex does.
///
/// # Failures
///
/// A method that fails on one rank fails on all, and ends the world: each rank returns the typed
/// error, or [`Error::PeerFailed`](crate::Error::PeerFailed) with the text of the first error.
///
/// A step takes the model and returns it only after all parameters were updated: if a rank fails
/// before its last bucket is gathered, no rank returns a model. To keep the old model, clone it
/// before the step, which takes the memory of a second model. In one case the ranks differ: if a
/// rank fails after it has sent its last shard, the other ranks finish the step. With
/// [`Publish::AtFirstUse`](crate::distributed::Publish::AtFirstUse), a step also returns a model
/// whose new parameters are on their way, and a failure comes with the next call. After a failure,
/// the optimizer's states are from an incomplete step: load a checkpoint.
///
/// On an engine whose results arrive asynchronously on the device (`nccl`), a step returns before
/// its last bucket has arrived. The next call of any kind then returns a failure of that step, and
/// [`save`](Self::save) writes nothing. Call
/// [`Communicator::synchronize`](crate::comm::Communicator::synchronize) before you save or use the
/// model by other means.
pub struct DistModuleOptimizer {
    divided: DividedModel,
    /// This rank's shards of the buckets, in the order of the plan.
    shards: Vec<Shard>,
    traffic: Traffic,
    accounts: Accounts,
    scaling: GradientScaling,
    checks: Checks,
    /// The attention heads to clip in the next step.
    head_clip: Option<HeadClip>,
    /// The settings that the program has set since it was made.
    running: Running,
    observing: Observing,
    accounting: Accounting,
    memory: MemoryMeter,
}

/// The comparisons of ranks with each other.
struct Checks {
    /// Gradients that are to be the same along the model axes.
    gradients: ComparedGradients,
    audits: Audits,
    /// The steps between two checks for drift, 0 for none.
    check_every: usize,
    step: StepNumber,
}

impl DistModuleOptimizer {
    pub(super) fn new<M: Module>(
        config: &DistMuonConfig,
        layout: &Layout,
        model: &M,
    ) -> Result<Self> {
        let divided = DividedModel::new(config, layout, model)?;
        let publishers = publishers(layout, config.publish)?;
        let (mut shards, mut matrices) = (vec![], vec![]);
        for bucket in divided.plan.buckets() {
            shards.push(Shard::new(bucket, &divided, &publishers, &mut matrices));
        }
        let scaling = GradientScaling::new(config, &divided);
        let checks = Checks {
            gradients: ComparedGradients::default(),
            audits: Audits::new(config, &divided, &shards)?,
            check_every: config.check_every,
            step: StepNumber::default(),
        };
        let mut optim = Self {
            traffic: Traffic::new(config, &divided.plan, scaling.waits_for_all()),
            accounts: Accounts::new(&config.muon, &divided, &matrices),
            head_clip: None,
            running: Running::default(),
            observing: Observing::default(),
            accounting: Accounting::default(),
            memory: MemoryMeter::new(divided.bytes(), &shards),
            divided,
            shards,
            scaling,
            checks,
        };
        optim.accounts.start_counting(&optim.divided);
        Ok(optim)
    }

    /// Runs the backward pass of a loss, and returns the gradients for [`step`](Self::step), in any
    /// placement of the parameters: [`Layout::backward`] of the loss times
    /// [`loss_scale`](Self::loss_scale). If the layout divides parameters or reduces gradients in
    /// passes, all ranks make this call.
    ///
    /// A loss has one backward pass. If two optimizers train two parts of a model by it, call
    /// `loss.backward()` once on one device, and `GradientsParams::from_module(&mut gradients,
    /// &part)` for each part.
    ///
    /// # Errors
    ///
    /// As [`Layout::backward`]; [`Error::Usage`] on several ranks with
    /// [`Gradients::Averaged`](super::Gradients::Averaged), since no step would average them.
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: &Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        self.traffic.ensure_averages(&self.divided.world)?;
        self.announced(self.layout().backward(&self.scaled(loss), model))
    }

    /// Runs the backward pass of a micro-batch, to whose gradients the next
    /// [`backward`](Self::backward) adds its own: [`Layout::accumulate`] of the loss times
    /// [`loss_scale`](Self::loss_scale). All ranks make this call.
    ///
    /// # Errors
    ///
    /// As [`Layout::accumulate`], and as [`backward`](Self::backward).
    pub fn accumulate<M: Module, const D: usize>(&self, loss: &Tensor<D>, model: &M) -> Result<()> {
        self.traffic.ensure_averages(&self.divided.world)?;
        self.announced(self.layout().accumulate(&self.scaled(loss), model))
    }

    fn scaled<const D: usize>(&self, loss: &Tensor<D>) -> Tensor<D> {
        let scale = self.loss_scale();
        if scale == 1.0 { loss.clone() } else { loss.clone() * scale }
    }

    /// Returns the layout of the model.
    pub fn layout(&self) -> &Layout {
        &self.divided.layout
    }

    /// Takes one step at learning rate `lr`: returns the model with all trained parameters updated
    /// from the gradients of all ranks. All ranks make this call.
    ///
    /// Gradients are of the loss times [`loss_scale`](Self::loss_scale). They have the type
    /// of their parameter, or float32 for parameters in half precision: on several ranks with
    /// [`GradDtype::Float32`](super::GradDtype::Float32).
    ///
    /// A parameter without a gradient on any rank stays as it is, and so does its position in the
    /// schedules. If only some ranks have a gradient, it counts as zero on the others. A matrix of
    /// a stack, such as an expert, whose gradient is zero on all ranks also stays as it is.
    ///
    /// For several micro-batches, sum or average their gradients with
    /// [`GradientBuffer`](crate::GradientBuffer) and step once.
    ///
    /// # Errors
    ///
    /// - [`Error::Parameter`](crate::Error::Parameter) if the model, or the shape, type or device
    ///   of a gradient, does not match the optimizer;
    /// - [`Error::SettingsDiffer`](crate::Error::SettingsDiffer) if the ranks give different
    ///   learning rates, or have not taken the same steps before;
    /// - [`Error::Usage`](crate::Error::Usage) for a learning rate that is not finite, or
    ///   negative, and in the step in which
    ///   [`MuonConfig::max_absent`](crate::MuonConfig::max_absent) is reached;
    /// - [`Error::Skipped`](crate::Error::Skipped) for a parameter that was skipped in too many
    ///   steps in a row;
    /// - [`Error::Unexpected`](crate::Error::Unexpected) for a step that is not as
    ///   [`MuonConfig::expect`](crate::MuonConfig::expect) says;
    /// - [`Error::Drifted`](crate::Error::Drifted) after
    ///   [`DistMuonConfig::check_every`](super::DistMuonConfig::check_every) steps, if ranks have
    ///   other bits of what they hold in common;
    /// - [`Error::Audited`](crate::Error::Audited) in a step that is
    ///   [audited](super::DistMuonConfig::audit_every), if two ranks have other bits of its
    ///   results;
    /// - [`Error::NotComputed`](crate::Error::NotComputed) if the device does not have the memory
    ///   for the gradients or the step. It names the first parameter that could not be updated, or
    ///   on several ranks the first parameter of the bucket;
    /// - as every collective.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let stepped = self.stage_by_stage(&lr.into(), model, gradients);
        self.announced(stepped)
    }

    /// Ends the world if this rank failed, so that the other ranks see the error.
    fn announced<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|error| self.divided.world.comm().fail(&error.to_string()))
    }

    /// Waits for the parameters of the last step, with [`Publish::AtFirstUse`](super::Publish): all
    /// ranks make this call before one of them uses the model alone.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn finish_publication(&self) -> Result<()> {
        self.traffic.publication.finish()?;
        self.divided.passes.finish_publication()?;
        // Collectives may return results that the device has not received yet.
        self.shards.iter().try_for_each(|shard| shard.exchange.publishers.synchronize())
    }

    /// Returns the factor on the loss in the next step, the same on all ranks: the scale of
    /// [`DistMuonConfig::loss_scale`](super::DistMuonConfig::loss_scale), or 1 without it.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{DType, Device, FloatDType, Tensor};
    /// use distmuon::distributed::LossScaleConfig;
    /// use distmuon::{DistMuonConfig, World};
    ///
    /// let device = Device::default().autodiff();
    /// let model = LinearConfig::new(8, 8).init(&device);
    /// let config = DistMuonConfig::new().with_loss_scale(Some(LossScaleConfig::new()));
    /// let mut optim = config.init(&World::alone(device.clone()), &model)?;
    /// let loss = model.forward(Tensor::<2>::ones([4, 8], &device)).square().mean();
    /// let grads = (loss * optim.loss_scale()).backward(); // as `optim.backward` does
    /// let model = optim.step(1e-3, model.clone(), GradientsParams::from_grads(grads, &model))?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn loss_scale(&self) -> f64 {
        self.scaling.scale()
    }

    /// Scales the projections of attention heads by the factors of QK-clip in the next step, after
    /// its update: in float32 where there are master weights, of which
    /// [`QkClip::apply`](crate::QkClip::apply) knows nothing. A parameter without a usable gradient
    /// is scaled as well; a step that loss scaling skips scales nothing. All ranks make this call,
    /// with the same factors.
    ///
    /// If a [`Layout`](super::Layout) cuts projections, the heads are still the heads of the whole
    /// model: make the [`QkClip`](crate::QkClip) before [`Layout::shard`](super::Layout::shard),
    /// and report the maxima of all heads on every rank.
    ///
    /// The factors come from [`QkClip::factors_on`](crate::QkClip::factors_on), for the logits
    /// of the forward pass before the step.
    pub fn clip_heads(&mut self, factors: &Factors<'_>) {
        self.head_clip = Some(HeadClip::new(factors, &self.divided));
    }

    /// Returns the optimizer of every parameter, with the reasons.
    pub fn routing(&self) -> &Routing {
        &self.divided.routing
    }

    /// Returns the plan: the owners of all matrices and the buckets of all parameters.
    pub fn plan(&self) -> &Plan {
        &self.divided.plan
    }

    /// Returns the costs that the plan balances, in the unit of
    /// [`DistMuonConfig::costs`](super::DistMuonConfig::costs): floating-point operations or
    /// seconds.
    pub fn costs(&self) -> &Costs {
        &self.divided.costs
    }

    /// Returns the number of matrices, the cost and the bytes of every rank. Prints as a table.
    pub fn report(&self) -> Report {
        self.divided.plan.report(&self.divided.costs)
    }

    /// Returns the bytes of the tensors that this rank holds. Prints as a table.
    ///
    /// A [user's optimizer](crate::custom) does not say what its states take: each call lists their
    /// tensors.
    pub fn memory(&self) -> MemoryReport {
        let DividedModel { passes, world, .. } = &self.divided;
        let own = self.shards.iter().map(Shard::own_bytes).sum();
        let arriving = self.traffic.publication.arriving();
        let mut report = self.memory.between_steps(passes, &arriving).with_own_states(own);
        report.communicators = world.comm().communicators();
        report
    }

    /// Returns the counts of the steps that left parameters untouched, which are the same on all
    /// ranks. Matrices for which the iteration diverges are counted with the next step if gradients
    /// are clipped or have the scale of the loss, and in stacks whose matrices have several owners.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.accounts.skipped
    }

    /// Returns the trained parameters that have had no gradient on any rank in the last
    /// [`MuonConfig::max_absent`](crate::MuonConfig::max_absent) steps or more, with the number of
    /// these steps. The loss does not use the output of such a layer, or it was detached.
    pub fn absent(&self) -> BTreeMap<String, usize> {
        let reached = self.accounts.absence.reached();
        reached.map(|(index, steps)| (self.divided.path(index).to_owned(), steps)).collect()
    }

    /// Counts skipped steps in other counts.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn count_skipped_in(&mut self, skipped: &SkippedSteps) {
        self.accounts.count_skipped_in(skipped, &self.divided);
    }
}

impl DistMuonConfig {
    /// Places a model on the ranks, with the values of rank 0, and makes its optimizer. On a
    /// `&World`, every rank has all parameters; a [`Layout`] may divide them. All ranks make this
    /// call.
    ///
    /// It is [`Layout::with_config`], [`Layout::shard`] and then [`init_on`](Self::init_on). One
    /// rank is the smallest number of ranks.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
    /// use distmuon::distributed::Layout;
    /// use distmuon::{DistMuonConfig, World};
    ///
    /// let world = World::alone(Device::default().autodiff());
    /// let model = LinearConfig::new(64, 256).init(world.device());
    /// let layout = Layout::from(&world); // or `.owned("dp")`, to divide the parameters
    /// let (model, mut optim) = DistMuonConfig::new().start(&layout, model)?;
    /// let loss = model.forward(Tensor::<2>::ones([8, 64], world.device())).square().mean();
    /// let grads = optim.backward(&loss, &model)?;
    /// let model = optim.step(1e-3, model, grads)?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Layout::shard`] and [`init_on`](Self::init_on).
    pub fn start<M: Module>(
        &self,
        on: impl Into<Layout>,
        model: M,
    ) -> Result<(M, DistModuleOptimizer)> {
        let layout = on.into().overlapped(self.clone());
        let model = layout.shard(model)?;
        let optim = layout.config().init_on(&layout, &model)?;
        Ok((model, optim))
    }

    /// Makes the optimizer for a model on all ranks of a world. All ranks make this call, with the
    /// same configuration and equal models.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors:
    ///
    /// - as [`MuonConfig::route`];
    /// - [`Error::Parameter`] for a parameter in float64, which ranks can't exchange;
    /// - [`Error::Setting`] for a setting that no run can use, and for
    ///   [`audit_every`](Self::audit_every) on one rank or without matrices;
    /// - [`Error::Parameter`] for a matrix that can't be audited, since it is divided;
    /// - [`Error::SettingsDiffer`] if the ranks' configurations differ;
    /// - [`Error::ModelsDiffer`] if the ranks' models or their values differ, with the first
    ///   parameter that differs;
    /// - as every collective.
    pub fn init<M: Module>(&self, world: &World, model: &M) -> Result<DistModuleOptimizer> {
        self.init_on(&world.into(), model)
    }

    /// Makes the optimizer for a model that a layout has divided, or for any model on the ranks of
    /// a layout's mesh. [`init`](Self::init) is the case of a flat mesh and a layout without rules.
    ///
    /// The owners of a divided model are the layout's, which has chosen them by the
    /// [`balancing`](Self::balancing) and [`costs`](Self::costs) of [`Layout::with_config`].
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init), [`Error::Parameter`] if the model was not divided by this layout,
    /// or by another routing, and [`Error::Setting`] if the layout chose the owners by another
    /// balancing or other costs, and for [`Gradients::Averaged`](super::Gradients::Averaged) with a
    /// layout whose backward pass reduces gradients.
    pub fn init_on<M: Module>(&self, layout: &Layout, model: &M) -> Result<DistModuleOptimizer> {
        DistModuleOptimizer::new(self, layout, model)
    }
}

impl MuonConfig {
    /// Makes an optimizer for a whole model on one device that updates all matrices of one shape as
    /// one batch, and several parameters in every launch.
    ///
    /// The result is a [`DistModuleOptimizer`] in a world of one. Use it on a GPU: the optimizer of
    /// [`init`](Self::init) gets one parameter at a time, so the launches limit its speed. Both
    /// optimizers train a model in the same way.
    ///
    /// Parameters in float64 and `grad_clipping`, which clips each gradient separately, are not
    /// supported. For clipping by the norm of all gradients, use [`DistMuonConfig::max_norm`] with
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
    /// As [`DistMuonConfig::init`], and [`Error::Usage`] for a model on several devices.
    pub fn init_batched<M: Module>(&self, model: &M) -> Result<DistModuleOptimizer> {
        let found = parameters::lazily(model).into_iter();
        let mut devices = found.filter(|found| found.trainable).map(|found| found.device);
        // Without a parameter to train, `init` returns the error, on any device.
        let device = devices.next().unwrap_or_default();
        if let Some(other) = devices.find(|other| *other != device) {
            return Err(Error::usage(
                "the model is on several devices",
                "all parameters on one device",
                format!("parameters on {device:?} and {other:?}"),
                "move the model to one device, or use `DistMuonConfig` and `World` for several",
            ));
        }
        DistMuonConfig::new().with_muon(self.clone()).init(&World::alone(device), model)
    }
}
