//! A `Learner` on two devices, whose optimizer Burn divides between them.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, activation::relu};
use burn::train::{ExecutionStrategy, MultiDeviceOptim};

use crate::client::{Client, Items, Run, device};
use crate::data::{floats, inputs, ints, teacher};
use crate::learner::{self, classified, learns};

const INPUTS: usize = 8;
const CLASSES: usize = 4;

#[derive(Module, Debug)]
pub struct Classifier {
    layers: Vec<Linear>,
}

impl Classifier {
    fn logits(&self, items: &Items) -> (Tensor<2>, Tensor<1, Int>) {
        let (count, inputs) = (items.indices.len(), inputs(items, INPUTS));
        let class = |input: &Vec<f32>| {
            let outputs = teacher(input, CLASSES).into_iter().enumerate();
            outputs.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(class, _)| class as i32)
        };
        let classes = inputs.iter().filter_map(class).collect();
        let mut x = floats(inputs.concat(), [count, INPUTS], &items.device);
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(if index > 0 { relu(x) } else { x });
        }
        (x, ints(classes, [count], &items.device))
    }
}

learns!(Classifier);

impl Client for Classifier {
    type Model = Self;

    const NAME: &'static str = "classifier on two devices";
    const ROUTING: &'static str = "\
        AdamW (embedding): layers.0.weight\n\
        Muon: layers.1.weight\n\
        AdamW (head): layers.2.weight";

    fn model(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self { layers: vec![linear(INPUTS, 48), linear(48, 48), linear(48, CLASSES)] }
    }

    fn train(run: &Run, model: Self) -> Self {
        let devices = vec![device(); 2];
        let strategy = ExecutionStrategy::multi(devices, MultiDeviceOptim::OptimSharded);
        learner::train(run, run.rates().into_lr_scheduler(), model, 2, |training| {
            training.with_training_strategy(strategy.into())
        })
    }

    fn loss(model: &Self, items: Items) -> f32 {
        classified(model.logits(&items)).loss.into_scalar()
    }
}
