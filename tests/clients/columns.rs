//! Weights that are stored column by column.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, activation::gelu};
use distmuon::MuonConfig;

use crate::client::{Client, Items, Run};
use crate::data::{floats, inputs, teacher};

const INPUTS: usize = 16;
const OUTPUTS: usize = 4;

#[derive(Module, Debug)]
pub struct Perceptron {
    up: Linear,
    hidden: Linear,
    down: Linear,
}

impl Perceptron {
    pub fn new(inputs: usize, device: &Device) -> Self {
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs).with_layout(LinearLayout::Col).init(device)
        };
        Self { up: linear(inputs, 48), hidden: linear(48, 48), down: linear(48, OUTPUTS) }
    }

    /// Trains the model for the steps of a run.
    pub fn trained(self, run: &Run, config: MuonConfig) -> Self {
        let (mut model, mut optim) = run.start_with(config, self);
        for step in run.steps.clone() {
            let loss = model.error(&run.batch(step, 32));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(run.rate(step), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    fn error(&self, items: &Items) -> Tensor<1> {
        let [width, _] = self.up.weight.val().dims();
        let (count, inputs) = (items.indices.len(), inputs(items, width));
        let targets = inputs.iter().flat_map(|input| teacher(input, OUTPUTS)).collect();
        let targets = floats(targets, [count, OUTPUTS], &items.device);
        let x = floats(inputs.concat(), [count, width], &items.device);
        let x = gelu(self.hidden.forward(gelu(self.up.forward(x))));
        (self.down.forward(x) - targets).square().mean()
    }
}

impl Client for Perceptron {
    type Model = Self;

    const NAME: &'static str = "weights stored by columns";
    const ROUTING: &'static str = "\
        Muon: up.weight hidden.weight\n\
        AdamW (head): down.weight";

    fn model(device: &Device) -> Self {
        Self::new(INPUTS, device)
    }

    fn train(run: &Run, model: Self) -> Self {
        model.trained(run, MuonConfig::new())
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.error(&items).into_scalar()
    }
}
