//! burn-train's `Learner` on many ranks.

use std::fmt;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Duration;

use burn::data::dataloader::Progress;
use burn::data::dataset::DatasetError;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsAccumulator, GradientsParams, OptimizerRecord};
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

use super::record::Busy;
use super::world::message;
use super::{DEADLINE, DistModuleOptimizer, DistMuonConfig, World};
use crate::checkpoint::{Archive, States};
use crate::error::{Error, Result};
use crate::skipped::SkippedSteps;

/// Trains a burn-train [`Learner`] on many ranks, one thread each, with
/// [`DistModuleOptimizer`](super::DistModuleOptimizer). Needs the feature `train`.
///
/// ```no_run
/// # use burn::train::{Learner, LearnerModel, LearningResult, SupervisedTraining};
/// # use burn::tensor::Device;
/// use distmuon::dist::{DistMuonConfig, DistMuonStrategy};
/// use distmuon::Schedule;
///
/// # fn train<M: LearnerModel>(model: M, devices: Vec<Device>, training: SupervisedTraining<M>) -> LearningResult<M> {
/// let config = DistMuonConfig::new();
/// let learner = Learner::new(model.clone(), config.muon.init(&model), Schedule::constant(1e-3).lr());
/// training
///     .with_training_strategy(DistMuonStrategy::new(devices, config).into())
///     .launch(learner)
/// # }
/// ```
///
/// The optimizer of the learner has to be that of [`MuonConfig::init`](crate::MuonConfig::init) with the
/// same configuration: its state is what training continues from, and what checkpoints hold. A
/// checkpoint knows of no ranks, and continues on any number of them or with Burn's own
/// strategies.
///
/// Everything else is as with Burn's strategies, except that
///
/// - rank 0 collects the state of the optimizer in host memory at the end of every epoch if there are
///   checkpointers, because Burn's take it as a whole. The other ranks do not;
/// - the training items are cut into one part of equal length per rank. What is left over, fewer
///   items than there are ranks, is not used. A step takes the mean of the gradients of all
///   ranks: `N` ranks with batches of `B` are one with batches of `N B`;
/// - the validation items are dealt to the ranks as well;
/// - [`TrainStep::optimize`] is not called, so that what a model overrides there has no effect;
/// - the model that training starts with stays in memory beside the ranks' own.
///
/// The learner's optimizer is checked when training starts: one of another kind is refused.
///
/// An error or a panic on a rank ends the training on all of them. It is then in
/// [`LearningResult::error`](burn::train::LearningResult), and the model is the one that training
/// started with: the last checkpoint is newer.
#[derive(Clone, Debug)]
pub struct DistMuonStrategy {
    devices: Vec<Device>,
    config: DistMuonConfig,
    deadline: Duration,
    skipped: SkippedSteps,
}

impl DistMuonStrategy {
    /// One rank per device, which may be given more than once.
    pub fn new(devices: impl IntoIterator<Item = Device>, config: DistMuonConfig) -> Self {
        let skipped = SkippedSteps::new(config.muon.max_skipped);
        Self { devices: devices.into_iter().collect(), config, deadline: DEADLINE, skipped }
    }

    /// The steps that left parameters untouched: to be cloned before the training, and read during it and after. As
    /// a metric, see
    /// [`SkippedStepsMetric`](crate::SkippedStepsMetric).
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// Sets the time that a rank may be waited for, [`DEADLINE`] by default.
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
        let devices: Vec<Device> =
            self.devices.iter().map(|device| device.clone().inner().autodiff()).collect();
        let size = devices.len();
        let start = learner.model();
        let interrupter = components.interrupter.clone();
        let each = train.num_items() / size.max(1);
        let run = Run {
            state: States::new(Archive::from_record(state(&learner, &components.event_store))),
            items: [each * size, valid.num_items()],
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation.unwrap_or(1),
            saves: components.checkpointer.is_some(),
            interrupter: interrupter.clone(),
            store: components.event_store,
            processor: Mutex::new(components.event_processor),
        };
        let main = Mutex::new(Some(Main {
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
        }));
        // What can't be shared is made here, and taken by its rank.
        let border = |rank: usize| rank * valid.num_items() / size;
        let seats = devices.iter().enumerate().map(|(rank, device)| {
            Mutex::new(Some(Seat {
                learner: learner.clone(),
                model: start.clone().fork(device),
                train: train.slice(rank * each, (rank + 1) * each).to_device(device),
                valid: valid
                    .slice(border(rank), border(rank + 1))
                    .to_device(&device.clone().inner()),
            }))
        });
        let seats: Vec<_> = seats.collect();

        let rank = |world: World| {
            let Seat { learner, model, train, valid } = take(&seats[world.rank()]);
            let main = world.is_main().then(|| take(&main));
            let optim = self.config.init(&world, &model)?;
            let mut optim = optim.load_states(&run.state)?;
            if world.is_main() {
                optim.count_skipped_in(&self.skipped);
            }
            let mut worker =
                Worker { run: &run, world, optim, model: Some(model), learner, train, valid, main };
            worker.fit()?;
            Ok(worker.model.expect("every step gives it back"))
        };
        let caught = |world: World| {
            let device_id = world.rank();
            let failed = |message| Failed(WorkerFailure { device_id, message });
            match catch_unwind(AssertUnwindSafe(|| rank(world))) {
                Ok(outcome) => outcome.map_err(|error: Error| failed(error.to_string())),
                Err(panic) => Err(failed(message(panic.as_ref()).to_owned())),
            }
        };
        let model = match World::threads_within(self.deadline, devices, caught) {
            Ok(mut models) => models.swap_remove(0),
            Err(Failed(failure)) => {
                interrupter.fail(TrainingError::Workers(vec![failure]));
                start
            }
        };
        (model, run.processor.into_inner().expect("no holder of the lock panics"))
    }
}

/// What all ranks share.
struct Run<M: LearnerModel> {
    /// The optimizer's state to start from.
    state: States,
    /// Items to train and to validate on.
    items: [usize; 2],
    epochs: RangeInclusive<usize>,
    /// Batches to a step.
    accumulation: usize,
    saves: bool,
    interrupter: Interrupter,
    store: Arc<EventStoreClient>,
    processor: Mutex<SupervisedTrainingEventProcessor<M>>,
}

/// What a rank begins with.
struct Seat<M: LearnerModel> {
    learner: Learner<M>,
    model: M,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
}

/// What rank 0 alone takes care of.
struct Main<M: LearnerModel> {
    checkpointer: Option<LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// A rank at work.
struct Worker<'a, M: LearnerModel> {
    run: &'a Run<M>,
    world: World,
    optim: DistModuleOptimizer,
    /// There except during a step.
    model: Option<M>,
    /// Steps the learning rate. Its model and optimizer are brought up to date to be saved.
    learner: Learner<M>,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    main: Option<Main<M>>,
}

/// An error or a panic of a rank.
struct Failed(WorkerFailure);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self(WorkerFailure { device_id: 0, message: error.to_string() })
    }
}

impl fmt::Display for Failed {
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
            if self.stopped()? {
                break;
            }
            self.on_main(|main| main.valid_event(started(epoch, valid_items)));
            self.world.comm().barrier()?; // it comes before what happens in it
            self.validate();
            self.world.comm().barrier()?;
            self.on_main(|main| {
                main.valid_event(LearnerEvent::EndSplit(epoch));
                main.train_event(LearnerEvent::EndEpoch(epoch));
            });
            if self.close(epoch)? {
                break;
            }
        }
        Ok(())
    }

    /// Refuses too little data, and an optimizer that the state can't be given back to.
    fn check(&mut self) -> Result<()> {
        let refuse = |setting, value, expected| Err(Error::Setting { setting, value, expected });
        let [items, _] = self.run.items;
        if items == 0 {
            return refuse("training items", "too few".into(), "at least one per rank");
        }
        // What it has learnt before is in `Run::state`.
        let ours = self.optim.outline()?.into_bytes().expect("a record can be written to memory");
        let record = OptimizerRecord::from_bytes(ours.clone()).expect("it was just written");
        self.learner.load_optim(record);
        let states = |record| States::new(Archive::from_record(record));
        let kept = states(state(&self.learner, &self.run.store));
        let expected = States::new(Archive::from_record_bytes(ours));
        match expected.keys().find(|(path, name)| kept.find(path, name).is_none()) {
            Some((path, name)) => refuse(
                "the optimizer of the learner",
                format!("one that does not know the state `{name}` of `{path}`"),
                "`config.muon.init(&model)`, with the configuration of the strategy",
            ),
            None => Ok(()),
        }
    }

    fn train_epoch(&mut self) -> Result<()> {
        let loader = self.train.clone();
        let mut items = loader.iter();
        let mut gradients = GradientsAccumulator::new();
        for batch in 1.. {
            let item = self.next(items.next());
            if self.world.any(item.is_none() || self.run.interrupter.should_stop())? {
                break;
            }
            let Some(item) = item else { break };
            let progress = items.progress();
            let output = TrainStep::step(self.model(), item);
            gradients.accumulate(self.model(), output.grads);
            if batch % self.run.accumulation == 0 || progress.is_completed() {
                self.step(gradients.grads())?;
            }
            let lr = Some(self.learner.lr_current());
            let item = self.item(output.item, &progress, batch, lr, self.run.items[0]);
            self.train_event(LearnerEvent::ProcessedItem(item));
        }
        Ok(())
    }

    fn step(&mut self, gradients: GradientsParams) -> Result<()> {
        self.learner.lr_step();
        let model = self.model.take().expect("every step gives it back");
        self.model = Some(self.optim.step(self.learner.lr_current(), model, gradients)?);
        Ok(())
    }

    fn validate(&self) {
        if self.valid.num_items() == 0 {
            return;
        }
        let model = self.model().valid();
        let mut items = self.valid.iter();
        for batch in 1.. {
            let Some(item) = self.next(items.next()) else { break };
            let item = InferenceStep::step(&model, item);
            let item = self.item(item, &items.progress(), batch, None, self.run.items[1]);
            self.valid_event(LearnerEvent::ProcessedItem(item));
            if self.run.interrupter.should_stop() {
                break;
            }
        }
    }

    /// Ends an epoch: saves, and says whether it was the last.
    fn close(&mut self, epoch: usize) -> Result<bool> {
        let early = self.main.as_ref().is_some_and(|main| main.early_stopping.is_some());
        if self.main.is_some() && (self.run.saves || early) {
            let flushed = self.processor().flush();
            self.run.interrupter.fail_on_error(flushed);
        }
        if self.stopped()? {
            return Ok(true);
        }
        // Burn's checkpointers take whole records, and do not say beforehand whether they will save:
        // rank 0 collects the state at every epoch.
        let record = if self.run.saves { self.optim.gather_record()? } else { None };
        let Some(main) = &mut self.main else { return self.world.any(false) };
        if let (Some(checkpointer), Some(record)) = (&mut main.checkpointer, record) {
            let _busy = Busy::new(self.world.engine());
            let model = self.model.clone().expect("every step gives it back");
            self.learner.load_model(model.into_record());
            self.learner.load_optim(record);
            checkpointer.checkpoint(&self.learner, epoch, &self.run.store);
        }
        let early_stopping = main.early_stopping.as_mut();
        let last = early_stopping.is_some_and(|rule| rule.should_stop(epoch, &self.run.store));
        self.world.any(last)
    }

    /// Whether the training was interrupted, as all ranks see it.
    fn stopped(&self) -> Result<bool> {
        self.world.any(self.run.interrupter.should_stop())
    }
}

/// Helpers of the loops.
impl<M: LearnerModel> Worker<'_, M> {
    fn model(&self) -> &M {
        self.model.as_ref().expect("every step gives it back")
    }

    fn processor(&self) -> MutexGuard<'_, SupervisedTrainingEventProcessor<M>> {
        self.run.processor.lock().expect("no holder of the lock panics")
    }

    /// The next batch, unless there is none or it can't be read, which ends the training.
    fn next<T>(&self, item: Option<Result<T, DatasetError>>) -> Option<T> {
        item?.map_err(|error| self.run.interrupter.fail(error)).ok()
    }

    /// What burn-train is told of a batch: as of all ranks, which are equally far.
    fn item<T>(
        &self,
        item: T,
        progress: &Progress,
        batch: usize,
        lr: Option<ModuleLearningRate>,
        items_total: usize,
    ) -> TrainingItem<T> {
        let size = self.world.size();
        let items_processed = (progress.items_processed * size).min(items_total);
        let progress = Progress { items_processed, items_total, unit: progress.unit.clone() };
        TrainingItem::new(item, progress, Some(batch * size), lr)
    }

    fn train_event(&self, event: LearnerEvent<<M as TrainStep>::Output>) {
        let processed = self.processor().process_train(event);
        self.run.interrupter.fail_on_error(processed);
    }

    fn valid_event(&self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        let processed = self.processor().process_valid(event);
        self.run.interrupter.fail_on_error(processed);
    }

    fn on_main(&self, tell: impl FnOnce(&Self)) {
        if self.main.is_some() {
            tell(self);
        }
    }
}

fn started<T>(epoch_number: usize, total_items: usize) -> LearnerEvent<T> {
    LearnerEvent::StartSplit { epoch_number, total_items }
}

fn take<T>(seat: &Mutex<Option<T>>) -> T {
    seat.lock().expect("no holder of the lock panics").take().expect("there is one per rank")
}

/// The state of a learner's optimizer, which it hands to checkpointers only.
fn state<M: LearnerModel>(learner: &Learner<M>, store: &EventStoreClient) -> OptimizerRecord {
    let (sender, states) = mpsc::channel();
    let mut checkpointer = LearningCheckpointer::new(
        AsyncCheckpointer::new(Catch(mpsc::channel().0)),
        AsyncCheckpointer::new(Catch(sender)),
        AsyncCheckpointer::new(Catch(mpsc::channel().0)),
        Box::new(Always),
    );
    checkpointer.checkpoint(learner, 0, store);
    states.recv().expect("the checkpointer was given it")
}

/// Sends what it is given to save to whoever wants it.
struct Catch<R>(mpsc::Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for Catch<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        // Nobody may want it.
        self.0.send(record).or(Ok(()))
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing is kept".into()))
    }
}

/// Saves whenever it is asked.
struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
