//! A Fourier neural operator with a scheduler for each part of the module.

use std::f32::consts::PI;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor, activation::gelu};
use distmuon::Schedule;

use crate::client::{Client, Items, Run};
use crate::data::{floats, inputs};

const POINTS: usize = 16;
const MODES: usize = 4;
const WIDTH: usize = 16;

#[derive(Module, Debug)]
pub struct Spectral {
    /// `[inputs, outputs, modes]`.
    weights: Param<Tensor<3>>,
    skip: Linear,
}

#[derive(Module, Debug)]
pub struct Operator {
    lift: Linear,
    layers: Vec<Spectral>,
    fc1: Linear,
    fc2: Linear,
}

/// The cosines `[points, modes]`.
fn basis(device: &Device) -> Tensor<2> {
    let cosine =
        |point: usize, mode: usize| (PI * mode as f32 * (point as f32 + 0.5) / POINTS as f32).cos();
    let values = (0..POINTS).flat_map(|point| (0..MODES).map(move |mode| cosine(point, mode)));
    floats(values.collect(), [POINTS, MODES], device)
}

impl Spectral {
    fn new(device: &Device) -> Self {
        let deviation = 1.0 / WIDTH as f64;
        let weights = Distribution::Uniform(-deviation, deviation);
        let weights = Tensor::random([WIDTH, WIDTH, MODES], weights, device).require_grad();
        Self {
            weights: Param::from_tensor(weights),
            skip: LinearConfig::new(WIDTH, WIDTH).init(device),
        }
    }

    /// `[items, points, width]` to the same.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let basis = basis(&x.device());
        let modes = basis.clone().transpose().unsqueeze::<3>().matmul(x.clone()) / POINTS as f32;
        let weights = self.weights.val().permute([2, 0, 1]);
        let mixed = modes.permute([1, 0, 2]).matmul(weights).permute([1, 0, 2]);
        gelu(basis.unsqueeze::<3>().matmul(mixed) * 2.0 + self.skip.forward(x))
    }
}

impl Operator {
    /// The error of the square of a smoothed function, from the function.
    fn error(&self, items: &Items) -> Tensor<1> {
        let (count, device) = (items.indices.len(), &items.device);
        let coefficients = floats(inputs(items, MODES).concat(), [count, MODES], device);
        let basis = basis(device).transpose();
        let function = coefficients.clone().matmul(basis.clone());
        let decay =
            floats((0..MODES).map(|mode| (-0.3 * mode as f32).exp()).collect(), [1, MODES], device);
        let targets = (coefficients * decay).matmul(basis).square();
        let grid = (0..POINTS).map(|point| point as f32 / POINTS as f32).collect();
        let grid = floats(grid, [1, POINTS, 1], device).expand([count, POINTS, 1]);
        let x = Tensor::cat(vec![function.unsqueeze_dim::<3>(2), grid], 2);
        let x = self.layers.iter().fold(self.lift.forward(x), |x, layer| layer.forward(x));
        let output = self.fc2.forward(gelu(self.fc1.forward(x))).squeeze_dim::<2>(2);
        (output - targets).square().mean()
    }
}

impl Client for Operator {
    type Model = Self;

    const NAME: &'static str = "neural operator, a scheduler per module";
    const ROUTING: &'static str = "\
        AdamW (embedding): lift.weight\n\
        Muon: layers.*.skip.weight fc1.weight\n\
        AdamW (head): fc2.weight";

    fn model(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self {
            lift: linear(2, WIDTH),
            layers: vec![Spectral::new(device), Spectral::new(device)],
            fc1: linear(WIDTH, 2 * WIDTH),
            fc2: linear(2 * WIDTH, 1),
        }
    }

    fn train(run: &Run, model: Self) -> Self {
        let (mut model, mut optim) = run.start(model);
        let half = Schedule::constant(run.rate / 2.0);
        let mut scheduler = ModuleLrScheduler::new(run.rates().into_lr_scheduler())
            .with_group(ParamGroup::from_predicate("fc"), half.into_lr_scheduler());
        // A program of its own has no file for a scheduler.
        for _ in 0..run.steps.start {
            scheduler.step();
        }
        for step in run.steps.clone() {
            let loss = model.error(&run.batch(step, 16));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(scheduler.step(), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.error(&items).into_scalar()
    }
}
