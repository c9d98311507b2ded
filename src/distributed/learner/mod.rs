//! Training burn-train's `Learner` on many ranks.

mod logits;

use std::fmt;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Duration;

use burn::data::dataloader::Progress;
use burn::data::dataset::DatasetError;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::tensor::Device;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction,
    CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::train::WorkerFailure;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearnerModel, LearningCheckpointer, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingError,
    TrainingItem, TrainingStrategy, ValidLoader,
};

use serde_json::json;

use super::optimizer::Busy;
use super::{Diagnostics, DistModuleOptimizer, DistMuonConfig, Layout, Mesh};
use crate::checkpoint::{Archive, States, TrainedPaths, stored_otherwise};
use crate::comm::{DEADLINE, World, message};
use crate::error::{Error, Result};
use crate::gradient_buffer::GradientBuffer;
use crate::load_difference::listed;
use crate::qk_clip::{QkClip, QkClipConfig};
use crate::update::SkippedSteps;
pub use logits::LearnerLogits;

/// Trains a burn-train [`Learner`] on many ranks with
/// [`DistModuleOptimizer`](super::DistModuleOptimizer): on threads by [`new`](Self::new), or in
/// processes by [`on`](Self::on). Needs the feature `train`.
///
/// ```no_run
/// # use burn::train::{Learner, LearnerModel, LearningResult, SupervisedTraining};
/// # use burn::tensor::Device;
/// use distmuon::distributed::{DistMuonConfig, DistMuonStrategy};
/// use distmuon::Schedule;
///
/// # fn train<M: LearnerModel>(
/// #     model: M,
/// #     devices: Vec<Device>,
/// #     training: SupervisedTraining<M>,
/// # ) -> LearningResult<M> {
/// let config = DistMuonConfig::new();
/// let lr = Schedule::constant(1e-3).into_lr_scheduler();
/// let learner = Learner::new(model.clone(), config.muon.init(&model), lr);
/// training
///     .with_training_strategy(DistMuonStrategy::new(devices, config).into())
///     .launch(learner)
/// # }
/// ```
///
/// The learner's optimizer has to be made by [`MuonConfig::init`](crate::MuonConfig::init)
/// with the same configuration: training continues from its state, and checkpoints contain its
/// state. A checkpoint does not depend on ranks: it continues on any number of them, or with Burn's
/// own strategies.
///
/// Differences from Burn's strategies:
///
/// - if there are checkpointers, rank 0 collects the state of the optimizer in host memory at the
///   end of every epoch, because Burn's checkpointers accept the state only as a whole. The other
///   ranks do not collect it;
/// - the training items are cut into one part of equal length per rank. The remaining items, fewer
///   than there are ranks, are not used. A step takes the mean of the gradients of all ranks, so
///   `N` ranks with batches of `B` items train as one rank with batches of `N B` items;
/// - the validation items are also divided between the ranks;
/// - [`TrainStep::optimize`] is not called, so a model's override of it has no effect;
/// - the initial model stays in memory in addition to the models of the ranks.
///
/// The optimizer of the learner is checked when training starts: an optimizer of another kind is
/// rejected.
///
/// In processes, every process makes the learner and launches the training with its rank's
/// strategy. Rank 0 alone saves and reports metrics. Metrics of training cover its part of the
/// items, metrics of validation all items. Rank 0 processes these alone, or every rank does if a
/// [layout](Self::with_layout) has divided the parameters. Give the other processes a folder of
/// their own for burn-train's files.
///
/// An error or a panic on a rank ends the training on all ranks.
/// [`LearningResult::error`](burn::train::LearningResult) then has the error, and the returned
/// model is the initial one: continue from the last checkpoint, which is newer.
#[derive(Clone, Debug)]
pub struct DistMuonStrategy {
    ranks: Ranks,
    layout: MakeLayout,
    config: DistMuonConfig,
    deadline: Duration,
    skipped: SkippedSteps,
    /// Steps between two diagnostics, if there are any.
    diagnosed: Option<usize>,
    latest: LatestDiagnostics,
    qk_clip: Option<(QkClipConfig, LearnerLogits)>,
}

/// The ranks of a training.
#[derive(Clone, Debug)]
enum Ranks {
    /// One thread per device.
    Threads(Vec<Device>),
    /// This process's rank, of a world of processes.
    Process(World),
}

/// The function that makes the layout of a rank.
#[derive(Clone)]
struct MakeLayout(Arc<LayoutOfWorld>);

type LayoutOfWorld = dyn Fn(&World) -> Result<Layout> + Send + Sync;

impl fmt::Debug for MakeLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MakeLayout")
    }
}

/// The diagnostics of a training in progress, for
/// [`DiagnosticsMetric`](crate::DiagnosticsMetric). Clones share them. Needs the feature `train`.
#[derive(Clone, Debug, Default)]
pub struct LatestDiagnostics(Arc<Mutex<Option<Diagnostics>>>);

impl LatestDiagnostics {
    /// Returns the diagnostics of the last step that had any.
    pub fn get(&self) -> Option<Diagnostics> {
        self.0.lock().expect("no holder of the lock panics").clone()
    }

    fn set(&self, diagnostics: Diagnostics) {
        *self.0.lock().expect("no holder of the lock panics") = Some(diagnostics);
    }
}

impl DistMuonStrategy {
    /// Makes one rank per device, a thread each. A device may be given more than once.
    pub fn new(devices: impl IntoIterator<Item = Device>, config: DistMuonConfig) -> Self {
        Self::of(Ranks::Threads(devices.into_iter().collect()), config)
    }

    /// Makes this process a rank of a world of processes, as from `World::from_env`.
    pub fn on(world: &World, config: DistMuonConfig) -> Self {
        Self::of(Ranks::Process(world.clone()), config)
    }

    fn of(ranks: Ranks, config: DistMuonConfig) -> Self {
        let skipped = SkippedSteps::new(config.muon.max_skipped);
        Self {
            ranks,
            layout: MakeLayout(Arc::new(|world| Ok(Layout::new(&Mesh::flat(world))))),
            config,
            deadline: DEADLINE,
            skipped,
            diagnosed: None,
            latest: LatestDiagnostics::default(),
            qk_clip: None,
        }
    }

    /// Sets the layout of the model, from a function that every rank calls with its world. Where
    /// parameters are divided and a checkpointer saves, all ranks hold the whole model at the end
    /// of every epoch, because Burn's checkpointers accept whole records only.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use distmuon::distributed::{DistMuonConfig, DistMuonStrategy, Layout, Mesh};
    ///
    /// let devices = vec![Device::default(); 2];
    /// let strategy = DistMuonStrategy::new(devices, DistMuonConfig::new())
    ///     .with_layout(|world| Ok(Layout::new(&Mesh::flat(world)).owned("dp")));
    /// ```
    pub fn with_layout(
        mut self,
        layout: impl Fn(&World) -> Result<Layout> + Send + Sync + 'static,
    ) -> Self {
        self.layout = MakeLayout(Arc::new(layout));
        self
    }

    /// Clips the heads of attention whose maximum logit of any rank was above the threshold, in
    /// every step. The model reports to a clone of `logits`, in all batches of a step.
    ///
    /// A rule that does not fit the model, or an attention that does not report in a step, ends
    /// the training with [`Error::QkClip`](crate::Error::QkClip).
    pub fn with_qk_clip(mut self, config: QkClipConfig, logits: &LearnerLogits) -> Self {
        self.qk_clip = Some((config, logits.clone()));
        self
    }

    /// Computes the [diagnostics](super::DistModuleOptimizer::diagnostics) of the first and then of
    /// every `steps`-th step; 0 for none.
    pub fn with_diagnostics(mut self, steps: usize) -> Self {
        self.diagnosed = (steps > 0).then_some(steps);
        self
    }

    /// Returns the diagnostics of the last step that had any: clone them before the training. For a
    /// metric, see [`DiagnosticsMetric`](crate::DiagnosticsMetric).
    pub fn diagnostics(&self) -> &LatestDiagnostics {
        &self.latest
    }

    /// Returns the counts of the steps that left parameters untouched. Clone the counts before the
    /// training to read them during the training and afterwards. For a metric, see
    /// [`SkippedStepsMetric`](crate::SkippedStepsMetric).
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// Sets the time after which a wait for another rank fails, [`DEADLINE`] by default.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

impl<M: LearnerModel> From<DistMuonStrategy> for TrainingStrategy<M> {
    fn from(strategy: DistMuonStrategy) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for DistMuonStrategy {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let (devices, first, size) = (self.ranks.devices(), self.ranks.first(), self.ranks.count());
        let (initial_model, interrupter) = (learner.model(), components.interrupter.clone());
        let in_processes = matches!(self.ranks, Ranks::Process(_));
        let inputs = RankInputs::of_ranks(&learner, &train, &valid, &self.ranks);
        let run = TrainingRun {
            state: States::new(Archive::from_record(state(&learner, &components.event_store))),
            items: [items_per_rank::<M>(&train, size) * size, valid.num_items()],
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation.unwrap_or(1),
            saves: components.checkpointer.is_some(),
            in_processes,
            diagnosed: self.diagnosed,
            latest: self.latest.clone(),
            interrupter: interrupter.clone(),
            store: components.event_store,
            processor: Mutex::new(components.event_processor),
        };
        let main_parts = Mutex::new(Some(MainParts {
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
        }));
        let outcome = self.run_ranks(devices, |world| {
            let inputs = take(&inputs[world.rank() - first]);
            let main = world.is_main().then(|| take(&main_parts));
            self.train_rank(world, &run, inputs, main)
        });
        let model = match outcome {
            Ok(model) => model,
            Err(RankFailure(failure)) => {
                // A program may ignore the error of the result, and save the initial model.
                log::error!("the training ended with the initial model: {}", failure.message);
                interrupter.fail(TrainingError::Workers(vec![failure]));
                initial_model
            }
        };
        (model, run.processor.into_inner().expect("no holder of the lock panics"))
    }
}

impl DistMuonStrategy {
    /// Trains on all ranks of this process, and returns the model of the first one. A panic of a
    /// rank is its failure.
    fn run_ranks<M: Send>(
        &self,
        devices: Vec<Device>,
        train: impl Fn(World) -> Result<M> + Sync,
    ) -> Result<M, RankFailure> {
        let train = |world: World| {
            let device_id = world.rank();
            let failure = |message| RankFailure(WorkerFailure { device_id, message });
            match catch_unwind(AssertUnwindSafe(|| train(world))) {
                Ok(outcome) => outcome.map_err(|error: Error| failure(error.to_string())),
                Err(panic) => Err(failure(message(panic.as_ref()).to_owned())),
            }
        };
        match &self.ranks {
            Ranks::Threads(_) => {
                let models = World::threads_within(self.deadline, devices, train);
                models.map(|mut models| models.swap_remove(0))
            }
            Ranks::Process(world) => {
                // The others wait for this rank until they are told.
                let failed = |failure: &RankFailure| world.comm().fail(&failure.to_string());
                train(world.clone()).inspect_err(failed)
            }
        }
    }

    /// Trains on one rank. All ranks make this call.
    fn train_rank<M: LearnerModel>(
        &self,
        world: World,
        run: &TrainingRun<M>,
        RankInputs { learner, model, train, valid, spare }: RankInputs<M>,
        main: Option<MainParts<M>>,
    ) -> Result<M> {
        world.same_config(&json!({
            "training items": run.items[0],
            "epochs": run.epochs,
            "batches per step": run.accumulation,
        }))?;
        ensure_unscaled(&self.config)?;
        let qk_clip = self.qk_clip.as_ref();
        let qk_clip = qk_clip.map(|(config, logits)| Ok((config.init(&model)?, logits)));
        let layout = (self.layout.0)(&world)?;
        world.agree(layout.ensure_whole_layers())?;
        world.agree(ensure_loadable(run.saves, &model, world.rank()))?;
        let model = layout.shard(model)?;
        let optim = self.config.init_on(&layout, &model)?;
        let mut optim = optim.load_states(&run.state)?;
        if world.is_main() {
            optim.count_skipped_in(&self.skipped);
        }
        let mut worker = Worker {
            run,
            saves: world.any(run.saves)?,
            qk_clip: world.agree(qk_clip.transpose())?,
            world,
            optim,
            layout,
            model: Some(model),
            steps: 0,
            learner,
            train,
            valid,
            spare,
            main,
        };
        worker.fit()?;
        worker.whole()
    }
}

impl Ranks {
    /// The devices of this process's ranks, with autodiff.
    fn devices(&self) -> Vec<Device> {
        let with_autodiff = |device: &Device| match device.is_autodiff() {
            true => device.clone(),
            false => device.clone().autodiff(),
        };
        match self {
            Self::Threads(devices) => devices.iter().map(with_autodiff).collect(),
            Self::Process(world) => vec![with_autodiff(world.device())],
        }
    }

    /// The first of this process's ranks.
    fn first(&self) -> usize {
        match self {
            Self::Threads(_) => 0,
            Self::Process(world) => world.rank(),
        }
    }

    /// The number of all ranks.
    fn count(&self) -> usize {
        match self {
            Self::Threads(devices) => devices.len(),
            Self::Process(world) => world.size(),
        }
    }
}

/// The items that every rank trains on. `World::threads_within` rejects an empty list of devices
/// later.
fn items_per_rank<M: LearnerModel>(train: &TrainLoader<M>, ranks: usize) -> usize {
    train.num_items() / ranks.max(1)
}

/// Fails for loss scaling, since a learner's model computes its gradients by itself, without the
/// scale.
fn ensure_unscaled(config: &DistMuonConfig) -> Result<()> {
    match &config.loss_scale {
        Some(scale) => Err(Error::setting(
            "loss_scale",
            format!("{scale:?}"),
            "`None` with a `Learner`, whose model computes the gradients without a scale (train \
             in bfloat16, which needs none)",
        )),
        None => Ok(()),
    }
}

/// Fails for a model whose checkpoints Burn can't load into the model of the learner: of a layer
/// that is initialised, Burn expects the shape that it has, and not that in which it is stored.
fn ensure_loadable<M: LearnerModel>(saves: bool, model: &M, rank: usize) -> Result<()> {
    match stored_otherwise(model).filter(|_| saves) {
        Some(path) => Err(Error::parameter(
            &path,
            rank,
            "it is stored in another shape than its layer has, which a learner's checkpointers \
             can't load",
            "use `LinearLayout::Row`, or train without checkpointers",
        )),
        None => Ok(()),
    }
}

/// The parts of a training run that all ranks share.
struct TrainingRun<M: LearnerModel> {
    /// The initial state of the optimizer.
    state: States,
    /// Numbers of items for training and for validation, over all ranks.
    items: [usize; 2],
    epochs: RangeInclusive<usize>,
    /// Batches per step.
    accumulation: usize,
    /// `true` if this process has checkpointers.
    saves: bool,
    /// `true` if every rank has a process, of which rank 0's reports.
    in_processes: bool,
    /// Steps between two diagnostics, if there are any.
    diagnosed: Option<usize>,
    latest: LatestDiagnostics,
    interrupter: Interrupter,
    store: Arc<EventStoreClient>,
    processor: Mutex<SupervisedTrainingEventProcessor<M>>,
}

/// The inputs of one rank.
struct RankInputs<M: LearnerModel> {
    learner: Learner<M>,
    model: M,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    spare: ValidLoader<M>,
}

impl<M: LearnerModel> RankInputs<M> {
    /// The inputs of this process's ranks. They can't be shared between threads: they are made
    /// before the ranks, and each rank takes one element.
    fn of_ranks(
        learner: &Learner<M>,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        ranks: &Ranks,
    ) -> Vec<Mutex<Option<Self>>> {
        let (size, items, model) =
            (ranks.count(), items_per_rank::<M>(train, ranks.count()), learner.model());
        let boundary = |rank: usize| rank * valid.num_items() / size;
        let inputs = (ranks.first()..).zip(ranks.devices()).map(|(rank, device)| {
            let validated = match ranks {
                Ranks::Process(_) => valid.clone(),
                Ranks::Threads(_) => valid.slice(boundary(rank), boundary(rank + 1)),
            };
            let spare = valid.slice(0, valid.num_items().min(1));
            let inner = device.clone().inner();
            Mutex::new(Some(Self {
                learner: learner.clone(),
                model: model.clone().fork(&device),
                train: train.slice(rank * items, (rank + 1) * items).to_device(&device),
                valid: validated.to_device(&inner),
                spare: spare.to_device(&inner),
            }))
        });
        inputs.collect()
    }
}

/// The parts of a training run that only rank 0 has.
struct MainParts<M: LearnerModel> {
    checkpointer: Option<LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// The training loop of one rank.
struct Worker<'a, M: LearnerModel> {
    run: &'a TrainingRun<M>,
    /// `true` if any rank has checkpointers: all of them collect the state then.
    saves: bool,
    world: World,
    optim: DistModuleOptimizer,
    layout: Layout,
    qk_clip: Option<(QkClip, &'a LearnerLogits)>,
    /// The model, absent only during a step.
    model: Option<M>,
    /// The number of steps so far.
    steps: usize,
    /// Advances the learning rate. Its model and optimizer are updated only before they are saved.
    learner: Learner<M>,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    /// An item for passes that other ranks need after this rank's last item.
    spare: ValidLoader<M>,
    /// Only on rank 0.
    main: Option<MainParts<M>>,
}

/// An error or a panic of a rank.
struct RankFailure(WorkerFailure);

impl From<Error> for RankFailure {
    fn from(error: Error) -> Self {
        Self(WorkerFailure { device_id: 0, message: error.to_string() })
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl<M: LearnerModel> Worker<'_, M> {
    fn fit(&mut self) -> Result<()> {
        self.check()?;
        for epoch in self.run.epochs.clone() {
            let [train_items, valid_items] = self.run.items;
            self.on_main(|main| main.train_event(started(epoch, train_items)));
            self.train_epoch()?;
            self.world.comm().barrier()?;
            self.on_main(|main| main.train_event(LearnerEvent::EndSplit(epoch)));
            if self.is_interrupted()? {
                break;
            }
            self.on_main(|main| main.valid_event(started(epoch, valid_items)));
            // The start of the split is reported before any of its items.
            self.world.comm().barrier()?;
            self.validate()?;
            self.world.comm().barrier()?;
            self.on_main(|main| {
                main.valid_event(LearnerEvent::EndSplit(epoch));
                main.train_event(LearnerEvent::EndEpoch(epoch));
            });
            if self.finish_epoch(epoch)? {
                break;
            }
        }
        Ok(())
    }

    /// Rejects too few training items, and an optimizer that the state can't be loaded into.
    fn check(&mut self) -> Result<()> {
        let [items, _] = self.run.items;
        if items == 0 {
            return Err(Error::usage(
                "the training items are too few",
                "at least one item per rank",
                format!("fewer than {}", self.world.size()),
                "add items, or train on fewer ranks",
            ));
        }
        let outline =
            self.optim.outline()?.into_bytes().expect("a record can be written to memory");
        let record = OptimizerRecord::from_bytes(outline.clone()).expect("the record is valid");
        // This replaces the state of the learner's optimizer, which `TrainingRun::state` has.
        self.learner.load_optim(record);
        let loaded = state(&self.learner, &self.run.store);
        let loaded = States::new(Archive::from_record(loaded));
        let expected = States::new(Archive::from_record_bytes(outline));
        let lost = expected.lost_in(&loaded, &TrainedPaths::all(expected.paths()), &[].into());
        if lost.is_empty() {
            return Ok(());
        }
        Err(Error::usage(
            "the learner's optimizer does not fit the strategy",
            "one that loads the strategy's states",
            format!("one that does not:{}", listed(&lost)),
            "make it by `config.muon.init(&model)`, with the configuration of the strategy",
        ))
    }

    fn train_epoch(&mut self) -> Result<()> {
        let loader = self.train.clone();
        let mut items = loader.iter();
        let _collecting = self.qk_clip.as_ref().map(|(_, logits)| logits.collect());
        let mut sum = GradientBuffer::new();
        for batch in 1.. {
            let item = self.next(items.next());
            if self.world.any(item.is_none() || self.run.interrupter.should_stop())? {
                break;
            }
            let Some(item) = item else { break };
            let progress = items.progress();
            let pass = || TrainStep::step(self.model(), item);
            let accumulation = self.run.accumulation;
            let is_last = batch % accumulation == 0 || progress.is_completed();
            let mut output =
                if is_last { pass() } else { self.layout.in_micro_batch(self.model(), pass)? };
            let mut gradients = std::mem::take(&mut output.grads);
            if accumulation > 1 {
                // In float32, where a single batch is in the type of the parameters.
                sum.add(self.model(), gradients)?;
                gradients = if is_last { sum.take_sum() } else { GradientsParams::new() };
            }
            if is_last {
                self.layout.collect(self.model(), &mut gradients)?;
                self.step(gradients)?;
            }
            let lr = Some(self.learner.lr_current());
            let (ranks, total) = (self.world.size(), self.run.items[0]);
            let item = self.item(output.item, &progress, (batch, ranks), lr, total);
            self.train_event(LearnerEvent::ProcessedItem(item));
        }
        Ok(())
    }

    fn step(&mut self, gradients: GradientsParams) -> Result<()> {
        self.learner.lr_step();
        if let Some((clip, logits)) = &self.qk_clip {
            self.optim.clip_heads(&clip.factors_on(&self.world, &logits.take())?);
        }
        let model = self.model.take().expect("every step returns the model");
        let is_diagnosed = self.run.diagnosed.is_some_and(|every| self.steps.is_multiple_of(every));
        self.steps += 1;
        if is_diagnosed {
            self.optim.request_diagnostics();
        }
        self.model = Some(self.optim.step(self.learner.lr_current(), model, gradients)?);
        // None for a step that was skipped: the last one stays.
        if let Some(diagnostics) = self.optim.diagnostics()?.filter(|_| self.world.is_main()) {
            self.run.latest.set(diagnostics);
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        let all_take_part = self.layout.gathers();
        self.optim.finish_publication()?;
        if self.run.items[1] == 0 || self.run.in_processes && !all_take_part && self.main.is_none()
        {
            return Ok(());
        }
        let _busy = self.run.in_processes.then(|| Busy::new(self.world.communicator()));
        let model = self.model().valid();
        let mut items = self.valid.iter();
        for batch in 1.. {
            let item = self.next(items.next());
            let ends = item.is_none() || self.run.interrupter.should_stop();
            if all_take_part {
                // Ranks may have different numbers of batches, and each is a collective call.
                if !self.world.any(!ends)? {
                    break;
                }
            } else if ends {
                break;
            }
            let Some(item) = item else {
                let spare = self.next(self.spare.iter().next());
                drop(spare.map(|item| InferenceStep::step(&model, item)));
                continue;
            };
            let item = InferenceStep::step(&model, item);
            let ranks = if self.run.in_processes { 1 } else { self.world.size() };
            let (progress, total) = (items.progress(), self.run.items[1]);
            let item = self.item(item, &progress, (batch, ranks), None, total);
            self.valid_event(LearnerEvent::ProcessedItem(item));
        }
        Ok(())
    }

    /// The model with all parameters on every rank.
    fn whole(&self) -> Result<M> {
        self.optim.finish_publication()?;
        self.layout.unshard(self.model())
    }

    /// Ends an epoch and saves. Returns `true` if it was the last epoch.
    fn finish_epoch(&mut self, epoch: usize) -> Result<bool> {
        let stops_early = self.main.as_ref().is_some_and(|main| main.early_stopping.is_some());
        if self.main.is_some() && (self.saves || stops_early) {
            // Checkpointers and early stopping read the metrics of the epoch from the store.
            let flushed = self.processor().flush();
            self.run.interrupter.fail_on_error(flushed);
        }
        if self.is_interrupted()? {
            return Ok(true);
        }
        // Burn's checkpointers accept only whole records, and do not tell in advance whether they
        // will save: rank 0 collects the state at every epoch.
        let record = if self.saves { self.optim.gather_record()? } else { None };
        let whole = if self.saves { Some(self.whole()?) } else { None };
        let Some(main) = &mut self.main else { return self.world.any(false) };
        if let (Some(checkpointer), Some(record), Some(model)) =
            (&mut main.checkpointer, record, whole)
        {
            let _busy = Busy::new(self.world.communicator());
            self.learner.load_model(model.into_record());
            self.learner.load_optim(record);
            checkpointer.checkpoint(&self.learner, epoch, &self.run.store);
        }
        let early_stopping = main.early_stopping.as_mut();
        let stop = early_stopping.is_some_and(|rule| rule.should_stop(epoch, &self.run.store));
        self.world.any(stop)
    }

    /// Returns `true` on all ranks if the training was interrupted on any rank.
    fn is_interrupted(&self) -> Result<bool> {
        self.world.any(self.run.interrupter.should_stop())
    }
}

/// Helpers of the loops.
impl<M: LearnerModel> Worker<'_, M> {
    fn model(&self) -> &M {
        self.model.as_ref().expect("every step returns the model")
    }

    fn processor(&self) -> MutexGuard<'_, SupervisedTrainingEventProcessor<M>> {
        self.run.processor.lock().expect("no holder of the lock panics")
    }

    /// The next batch. `None` if there is none, or if it can't be read, which ends the training.
    fn next<T>(&self, item: Option<Result<T, DatasetError>>) -> Option<T> {
        item?.map_err(|error| self.run.interrupter.fail(error)).ok()
    }

    /// The report of a batch to burn-train, with the progress of the ranks that divide the items:
    /// each is taken to have processed the same number of items.
    fn item<T>(
        &self,
        item: T,
        progress: &Progress,
        (batch, ranks): (usize, usize),
        lr: Option<ModuleLearningRate>,
        items_total: usize,
    ) -> TrainingItem<T> {
        let items_processed = (progress.items_processed * ranks).min(items_total);
        let progress = Progress { items_processed, items_total, unit: progress.unit.clone() };
        TrainingItem::new(item, progress, Some(batch * ranks), lr)
    }

    /// Returns `true` on ranks that report their items.
    fn reports(&self) -> bool {
        !self.run.in_processes || self.main.is_some()
    }

    fn train_event(&self, event: LearnerEvent<<M as TrainStep>::Output>) {
        if !self.reports() {
            return;
        }
        let processed = self.processor().process_train(event);
        self.run.interrupter.fail_on_error(processed);
    }

    fn valid_event(&self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        if !self.reports() {
            return;
        }
        let processed = self.processor().process_valid(event);
        self.run.interrupter.fail_on_error(processed);
    }

    fn on_main(&self, report: impl FnOnce(&Self)) {
        if self.main.is_some() {
            report(self);
        }
    }
}

fn started<T>(epoch_number: usize, total_items: usize) -> LearnerEvent<T> {
    LearnerEvent::StartSplit { epoch_number, total_items }
}

fn take<T>(slot: &Mutex<Option<T>>) -> T {
    slot.lock().expect("no holder of the lock panics").take().expect("each rank takes once")
}

/// The state of a learner's optimizer. A learner gives its state to checkpointers only, so this
/// saves with a checkpointer that sends the record back.
fn state<M: LearnerModel>(learner: &Learner<M>, store: &EventStoreClient) -> OptimizerRecord {
    let (sender, states) = mpsc::channel();
    let mut checkpointer = LearningCheckpointer::new(
        AsyncCheckpointer::new(SendToChannel(mpsc::channel().0)),
        AsyncCheckpointer::new(SendToChannel(sender)),
        AsyncCheckpointer::new(SendToChannel(mpsc::channel().0)),
        Box::new(SaveAlways),
    );
    checkpointer.checkpoint(learner, 0, store);
    states.recv().expect("the checkpointer sends the record of the optimizer")
}

/// A checkpointer that sends the records to a channel.
struct SendToChannel<R>(mpsc::Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for SendToChannel<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        // The records of the model and of the scheduler have no receiver, which is not an error.
        self.0.send(record).or(Ok(()))
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("this checkpointer keeps no record".into()))
    }
}

/// A strategy that saves at every call.
struct SaveAlways;

impl CheckpointingStrategy for SaveAlways {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
