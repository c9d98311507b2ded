//! Weights that are stored column by column.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, activation::gelu};

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
    fn error(&self, items: &Items) -> Tensor<1> {
        let (count, inputs) = (items.indices.len(), inputs(items, INPUTS));
        let targets = inputs.iter().flat_map(|input| teacher(input, OUTPUTS)).collect();
        let targets = floats(targets, [count, OUTPUTS], &items.device);
        let x = floats(inputs.concat(), [count, INPUTS], &items.device);
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
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs).with_layout(LinearLayout::Col).init(device)
        };
        Self { up: linear(INPUTS, 48), hidden: linear(48, 48), down: linear(48, OUTPUTS) }
    }

    fn train(run: &Run, model: Self) -> Self {
        let (mut model, mut optim) = run.start(model);
        for step in run.steps.clone() {
            let loss = model.error(&run.batch(step, 32));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(run.rate(step), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.error(&items).into_scalar()
    }
}
