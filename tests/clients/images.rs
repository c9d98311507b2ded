//! Convolutions with batch normalisation in a `Learner` that stops early.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, activation::relu};
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::{MetricEarlyStoppingStrategy, StoppingCondition};

use crate::client::{Client, Items, Run};
use crate::data::{CLASSES, images};
use crate::learner::{self, classified, learns};

#[derive(Module, Debug)]
pub struct ConvBlock {
    conv: Conv2d,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
pub struct ConvNet {
    conv1: ConvBlock,
    conv2: ConvBlock,
    pool: AdaptiveAvgPool2d,
    fc1: Linear,
    fc2: Linear,
}

impl ConvBlock {
    fn new(channels: [usize; 2], device: &Device) -> Self {
        let norm = BatchNormConfig::new(channels[1]).init(device);
        Self { conv: Conv2dConfig::new(channels, [3, 3]).init(device), norm }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        relu(self.norm.forward(self.conv.forward(x)))
    }
}

impl ConvNet {
    fn logits(&self, items: &Items) -> (Tensor<2>, Tensor<1, Int>) {
        let (images, classes) = images(items);
        let x = self.conv2.forward(self.conv1.forward(images));
        let x = self.pool.forward(x).flatten::<2>(1, 3);
        (self.fc2.forward(relu(self.fc1.forward(x))), classes)
    }
}

learns!(ConvNet);

impl Client for ConvNet {
    type Model = Self;

    const NAME: &'static str = "convolutions, early stopping";
    const ROUTING: &'static str = "\
        AdamW (embedding): conv1.conv.weight\n\
        Muon (Flatten): conv2.conv.weight\n\
        Muon: fc1.weight\n\
        AdamW (head): fc2.weight";

    fn model(device: &Device) -> Self {
        Self {
            conv1: ConvBlock::new([1, 8], device),
            conv2: ConvBlock::new([8, 16], device),
            pool: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            fc1: LinearConfig::new(64, 32).init(device),
            fc2: LinearConfig::new(32, CLASSES).init(device),
        }
    }

    fn train(run: &Run, model: Self) -> Self {
        let patience = StoppingCondition::NoImprovementSince { n_epochs: 1 };
        let stopping = MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            patience,
        );
        learner::train(run, run.rates().into_lr_scheduler(), model, 1, |training| {
            training.early_stopping(stopping)
        })
    }

    fn loss(model: &Self, items: Items) -> f32 {
        classified(model.logits(&items)).loss.into_scalar()
    }
}
