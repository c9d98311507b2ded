//! A mixture of experts in a stack, each of which has no tokens in most steps.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor, activation::gelu, s};
use distmuon::{MuonConfig, RoutingRule};

use crate::client::{Client, Items, Run};
use crate::data::{floats, inputs, teacher};

const INPUTS: usize = 6;
const WIDTH: usize = 16;
const EXPERTS: usize = 4;

#[derive(Module, Debug)]
pub struct Mixture {
    input: Linear,
    /// `[experts, in, out]`.
    experts: Param<Tensor<3>>,
    output: Linear,
}

impl Mixture {
    fn config() -> MuonConfig {
        MuonConfig::new().with_rule(RoutingRule::muon("experts").batch())
    }

    /// The error of the experts from `first` on, each of which takes an equal share of the items.
    fn error(&self, items: &Items, first: usize) -> Tensor<1> {
        let (count, inputs) = (items.indices.len(), inputs(items, INPUTS));
        let targets = inputs.iter().flat_map(|input| teacher(input, 1)).collect();
        let targets = floats(targets, [count, 1], &items.device);
        let x = floats(inputs.concat(), [count, INPUTS], &items.device);
        let x = gelu(self.input.forward(x)).reshape([
            EXPERTS - first,
            count / (EXPERTS - first),
            WIDTH,
        ]);
        let x = gelu(x.matmul(self.experts.val().slice(s![first..])));
        (self.output.forward(x.reshape([count, WIDTH])) - targets).square().mean()
    }
}

impl Client for Mixture {
    type Model = Self;

    const NAME: &'static str = "experts without tokens";
    const ROUTING: &'static str = "\
        AdamW (embedding): input.weight\n\
        Muon (Batch): experts\n\
        AdamW (head): output.weight";

    fn model(device: &Device) -> Self {
        let deviation = 1.0 / (WIDTH as f64).sqrt();
        let experts = Distribution::Uniform(-deviation, deviation);
        let experts = Tensor::random([EXPERTS, WIDTH, WIDTH], experts, device).require_grad();
        Self {
            input: LinearConfig::new(INPUTS, WIDTH).init(device),
            experts: Param::from_tensor(experts),
            output: LinearConfig::new(WIDTH, 1).init(device),
        }
    }

    fn train(run: &Run, model: Self) -> Self {
        let (mut model, mut optim) = run.start_with(Self::config(), model);
        for step in run.steps.clone() {
            let loss = model.error(&run.batch(step, 12), step % EXPERTS);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(run.rate(step), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.error(&items, 0).into_scalar()
    }

    fn roles(model: &Self) -> String {
        crate::roles(&Self::config(), model)
    }
}
