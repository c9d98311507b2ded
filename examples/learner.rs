//! burn-train's `Learner` on two ranks: `cargo run --example learner --features train`.

use std::ops::Range;

use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use distmuon::{DistMuonConfig, DistMuonStrategy, Schedule, World};

fn main() -> anyhow::Result<()> {
    let devices = World::devices(2); // 1 for training on a single device
    let start = Net { body: PositionWiseFeedForwardConfig::new(16, 64).init(&devices[0]) };
    let config = DistMuonConfig::new();
    let optim = config.muon.init(&start);
    let lr = Schedule::warmup_cosine(3e-3, 5, 59, 0.0).into_lr_scheduler(); // for Burn
    let loader = |items: Range<i64>| {
        DataLoaderBuilder::new(Sines).batch_size(8).build(InMemDataset::new(items.collect()))
    };
    let folder = tempfile::tempdir()?;
    let result = SupervisedTraining::new(folder.path(), loader(0..256), loader(256..288))
        .metrics((LossMetric::new(),))
        .with_training_strategy(DistMuonStrategy::new(devices.clone(), config).into())
        .num_epochs(4)
        .launch(Learner::new(start.clone(), optim, lr));
    if let Some(error) = result.error {
        anyhow::bail!(error);
    }
    let x = Sines.batch((256..288).collect(), &devices[0].clone().inner());
    let loss = |net: &Net| net.reverse(x.clone()).loss.into_scalar::<f32>();
    let (before, after) = (loss(&start.valid()), loss(&result.model));
    println!("validation loss: {before:.4} before, {after:.4} after four epochs");
    Ok(())
}

#[derive(Module, Debug)]
struct Net {
    body: PositionWiseFeedForward,
}

impl Net {
    fn reverse(&self, x: Tensor<2>) -> RegressionOutput {
        let (output, targets) = (self.body.forward(x.clone()), x.flip([1]));
        let loss = (output.clone() - targets.clone()).square().mean();
        RegressionOutput { loss, output, targets }
    }
}

impl TrainStep for Net {
    type Input = Tensor<2>;
    type Output = RegressionOutput;
    fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
        let output = self.reverse(x);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Tensor<2>;
    type Output = RegressionOutput;
    fn step(&self, x: Tensor<2>) -> RegressionOutput {
        self.reverse(x)
    }
}

struct Sines;

impl Batcher<i64, Tensor<2>> for Sines {
    fn batch(&self, items: Vec<i64>, device: &Device) -> Tensor<2> {
        let sines =
            |item| Tensor::<1, Int>::arange(16 * item..16 * item + 16, device).float().sin();
        Tensor::stack(items.into_iter().map(sines).collect(), 0)
    }
}
