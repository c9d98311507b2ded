//! The training loop of one rank of a learner: epochs of training, validation and saving.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::data::dataloader::Progress;
use burn::data::dataset::DatasetError;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearnerModel, LearningCheckpointer, SupervisedTrainingEventProcessor,
    TrainLoader, TrainStep, TrainingItem, ValidLoader,
};

use super::optimizer_state::state;
use super::{Every, LatestAccount, LatestDiagnostics, LearnerLogits};
use crate::checkpoint::{Archive, States, TrainedPaths};
use crate::comm::World;
use crate::distributed::busy::Busy;
use crate::distributed::layout::Layout;
use crate::distributed::optimizer::DistModuleOptimizer;
use crate::error::{Error, Result};
use crate::gradient_buffer::GradientBuffer;
use crate::load_difference::listed;
use crate::qk_clip::QkClip;

/// The parts of a training run that all ranks share.
pub struct TrainingRun<M: LearnerModel> {
    /// The initial state of the optimizer.
    pub state: States,
    /// Numbers of items for training and for validation, over all ranks.
    pub items: [usize; 2],
    pub epochs: RangeInclusive<usize>,
    /// Batches per step.
    pub accumulation: usize,
    /// `true` if this process has checkpointers.
    pub saves: bool,
    /// `true` if every rank has a process, of which rank 0's reports.
    pub in_processes: bool,
    pub diagnosed: Every,
    pub accounted: Every,
    pub latest: LatestDiagnostics,
    pub account: LatestAccount,
    pub interrupter: Interrupter,
    pub store: Arc<EventStoreClient>,
    pub processor: Mutex<SupervisedTrainingEventProcessor<M>>,
}

/// The parts of a training run that only rank 0 has.
pub struct MainParts<M: LearnerModel> {
    pub checkpointer: Option<LearningCheckpointer<M>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// The items of one rank.
pub struct Loaders<M: LearnerModel> {
    pub train: TrainLoader<M>,
    pub valid: ValidLoader<M>,
    /// An item for passes that other ranks need after this rank's last item.
    pub spare: ValidLoader<M>,
}

/// The training loop of one rank.
pub struct Worker<'a, M: LearnerModel> {
    pub run: &'a TrainingRun<M>,
    /// `true` if any rank has checkpointers: all of them collect the state then.
    pub saves: bool,
    pub world: World,
    pub optim: DistModuleOptimizer,
    pub layout: Layout,
    pub qk_clip: Option<(QkClip, &'a LearnerLogits)>,
    /// The model, absent only during a step.
    pub model: Option<M>,
    /// The number of steps so far.
    pub steps: usize,
    /// Advances the learning rate. Its model and optimizer are updated only before they are saved.
    pub learner: Learner<M>,
    pub loaders: Loaders<M>,
    /// Only on rank 0.
    pub main: Option<MainParts<M>>,
}

impl<M: LearnerModel> Worker<'_, M> {
    pub fn fit(&mut self) -> Result<()> {
        self.check()?;
        for epoch in self.run.epochs.clone() {
            let [train_items, valid_items] = self.run.items;
            self.on_main(|main| main.train_event(started(epoch, train_items)));
            self.train_epoch()?;
            // Every rank has reported its items before rank 0 reports the end of the split.
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
        let loader = self.loaders.train.clone();
        let mut items = loader.iter();
        let _collecting = self.qk_clip.as_ref().map(|(_, logits)| logits.collect());
        let mut sum = GradientBuffer::new();
        for batch in 1.. {
            let item = self.next(items.next());
            // A rank that stops alone would leave the others in the collectives of the next batch.
            if self.world.any(item.is_none() || self.run.interrupter.should_stop())? {
                break;
            }
            let Some(item) = item else { break };
            let progress = items.progress();
            let pass = || TrainStep::step(self.model(), item);
            let accumulation = self.run.accumulation;
            let is_last = batch % accumulation == 0 || progress.is_completed();
            let mut output = match is_last {
                true => self.layout.in_backward(pass),
                false => self.layout.in_micro_batch(self.model(), pass)?,
            };
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
        if self.run.diagnosed.is_due(self.steps) {
            self.optim.request_diagnostics();
        }
        if self.run.accounted.is_due(self.steps) {
            self.optim.request_account();
        }
        self.steps += 1;
        self.model = Some(self.optim.step(self.learner.lr_current(), model, gradients)?);
        // None for a step that was skipped: the last one stays.
        if let Some(diagnostics) = self.optim.diagnostics()?.filter(|_| self.world.is_main()) {
            self.run.latest.set(diagnostics);
        }
        if let Some(account) = self.optim.account()?.filter(|_| self.world.is_main()) {
            self.run.account.set(account);
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        let all_take_part = self.layout.gathers();
        // On all ranks, also those that validate nothing: parameters on their way arrive by calls
        // of all.
        self.optim.finish_publication()?;
        if self.run.items[1] == 0 || self.run.in_processes && !all_take_part && self.main.is_none()
        {
            return Ok(());
        }
        // Rank 0 may validate alone, for longer than the deadline, while the others wait at the
        // barrier.
        let _busy = self.run.in_processes.then(|| Busy::new(self.world.communicator()));
        let model = self.model().valid();
        let mut items = self.loaders.valid.iter();
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
                let spare = self.next(self.loaders.spare.iter().next());
                drop(spare.map(|item| InferenceStep::step(&model, item)));
                continue;
            };
            let item = InferenceStep::step(&model, item);
            // In processes, rank 0 has all validation items; threads divide them.
            let ranks = if self.run.in_processes { 1 } else { self.world.size() };
            let (progress, total) = (items.progress(), self.run.items[1]);
            let item = self.item(item, &progress, (batch, ranks), None, total);
            self.valid_event(LearnerEvent::ProcessedItem(item));
        }
        Ok(())
    }

    /// The model with all parameters on every rank.
    pub fn whole(&self) -> Result<M> {
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
        // Only rank 0 decides, and the others learn of it in this call.
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
