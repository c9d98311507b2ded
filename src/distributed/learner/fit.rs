//! The start of a learner's training on all ranks of this process, and its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn::train::train::WorkerFailure;
use burn::train::{
    Learner, LearnerModel, SupervisedLearningStrategy, SupervisedTrainingEventProcessor,
    TrainLoader, TrainingComponents, TrainingError, TrainingStrategy, ValidLoader,
};
use serde_json::json;

use super::DistMuonStrategy;
use super::optimizer_state::state;
use super::ranks::{RankFailure, RankInputs, Ranks, items_per_rank, take};
use super::training_loop::{MainParts, TrainingRun, Worker};
use crate::checkpoint::{Archive, States, stored_otherwise};
use crate::comm::{World, message};
use crate::distributed::config::DistMuonConfig;
use crate::error::{Error, Result};

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
            accounted: self.accounted,
            latest: self.latest.clone(),
            account: self.account.clone(),
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
            // Here and not in `World`, which would panic again: a learner returns its failures.
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
        RankInputs { learner, model, loaders }: RankInputs<M>,
        main: Option<MainParts<M>>,
    ) -> Result<M> {
        world.same_config(&json!({
            "training items": run.items[0],
            "epochs": run.epochs,
            "batches per step": run.accumulation,
        }))?;
        ensure_unscaled(&self.config)?;
        let qk_clip = self.qk_clip.as_ref();
        // Of the whole model, before the layout divides it. An error waits for `agree` below, since
        // the other ranks make the calls in between.
        let qk_clip = qk_clip.map(|(config, logits)| Ok((config.init(&model)?, logits)));
        let layout = (self.layout.0)(&world)?;
        world.agree(layout.ensure_whole_layers())?;
        world.agree(ensure_loadable(run.saves, &model, world.rank()))?;
        let (model, optim) = self.config.start(&layout, model)?;
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
            loaders,
            main,
        };
        worker.fit()?;
        worker.whole()
    }
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
