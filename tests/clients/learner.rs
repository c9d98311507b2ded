//! Programs with burn-train's `Learner`.

use std::ops::Range;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::LossMetric;
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainStep,
};
use distmuon::MuonConfig;

use crate::client::{Items, Run, Settings};
use crate::data::cross_entropy;

pub struct Batches;

impl Batcher<usize, Items> for Batches {
    fn batch(&self, indices: Vec<usize>, device: &Device) -> Items {
        Items { indices, device: device.clone() }
    }
}

/// Implements a learner's steps by `logits`, which returns logits and classes.
macro_rules! learns {
    ($model:ty) => {
        impl burn::train::TrainStep for $model {
            type Input = $crate::client::Items;
            type Output = burn::train::ClassificationOutput;

            fn step(&self, items: Self::Input) -> burn::train::TrainOutput<Self::Output> {
                let output = $crate::learner::classified(self.logits(&items));
                burn::train::TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl burn::train::InferenceStep for $model {
            type Input = $crate::client::Items;
            type Output = burn::train::ClassificationOutput;

            fn step(&self, items: Self::Input) -> Self::Output {
                $crate::learner::classified(self.logits(&items))
            }
        }
    };
}
pub(crate) use learns;

pub fn classified((logits, classes): (Tensor<2>, Tensor<1, Int>)) -> ClassificationOutput {
    let loss = cross_entropy(logits.clone(), classes.clone());
    ClassificationOutput::new(loss, logits, classes)
}

/// Trains with batches of eight items, `batches` in a step, at the rates of a scheduler.
/// `configured` has what a program adds.
pub fn train<M>(
    run: &Run,
    rates: impl Into<ModuleLrScheduler>,
    model: M,
    batches: usize,
    configured: impl FnOnce(SupervisedTraining<M>) -> SupervisedTraining<M>,
) -> M
where
    M: LearnerModel
        + TrainStep<Input = Items, Output = ClassificationOutput>
        + InferenceStep<Input = Items, Output = ClassificationOutput>,
{
    let loader = |items: Range<usize>| {
        DataLoaderBuilder::new(Batches).batch_size(8).build(InMemDataset::new(items.collect()))
    };
    let first = run.first_item();
    // Of two.
    let epoch = run.total / 2;
    let training = loader(first..first + 8 * batches * epoch);
    let training = SupervisedTraining::new(&run.folder, training, loader(0..32))
        .metrics((LossMetric::new(),))
        .with_default_checkpointers()
        .with_application_logger(None)
        .num_epochs(run.steps.end / epoch);
    let training = match run.is_resumed() {
        true => training.checkpoint(run.steps.start / epoch),
        false => training,
    };
    let optim = run.optimizer(&Settings::new(MuonConfig::new()), &model);
    let learner = Learner::new(model, optim, rates);
    let result = configured(training).launch(learner);
    assert!(result.error.is_none() && result.interrupted.is_none(), "{:?}", result.error);
    result.model
}
