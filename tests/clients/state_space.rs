//! A state-space model that tracks a position, with a fused input projection.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig1d};
use burn::optim::GradientsParams;
use burn::tensor::activation::{silu, softplus};
use burn::tensor::{Device, Int, Tensor, s};
use distmuon::RoutingRule;
use rand::RngExt;

use crate::client::{Client, Items, Run};
use crate::data::{cross_entropy, floats, ints, rng};

const LENGTH: usize = 10;
const MOVES: usize = 3;
const WIDTH: usize = 16;
const INNER: usize = 32;
const STATE: usize = 4;

#[derive(Module, Debug)]
pub struct Block {
    norm: LayerNorm,
    /// `z`, `x`, `B`, `C` and `dt`.
    in_proj: Linear,
    conv1d: Conv1d,
    a_log: Param<Tensor<2>>,
    dt_bias: Param<Tensor<1>>,
    d: Param<Tensor<1>>,
    out_proj: Linear,
}

#[derive(Module, Debug)]
pub struct Mamba {
    in_proj: Linear,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let conv = Conv1dConfig::new(INNER, INNER, 3).with_groups(INNER);
        let a: Vec<f32> =
            (0..INNER).flat_map(|_| (1..=STATE).map(|state| (state as f32).ln())).collect();
        let vector =
            |value: f32| Param::from_tensor(Tensor::full([INNER], value, device).require_grad());
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            in_proj: LinearConfig::new(WIDTH, 3 * INNER + 2 * STATE).init(device),
            conv1d: conv.with_padding(PaddingConfig1d::Explicit(2, 2)).init(device),
            a_log: Param::from_tensor(floats(a, [INNER, STATE], device).require_grad()),
            dt_bias: vector(-1.0),
            d: vector(1.0),
            out_proj: LinearConfig::new(INNER, WIDTH).with_bias(false).init(device),
        }
    }

    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let projected = self.in_proj.forward(self.norm.forward(input.clone()));
        let part =
            |start: usize, len: usize| projected.clone().slice(s![.., .., start..start + len]);
        let (z, x, dt) = (part(0, INNER), part(INNER, INNER), part(2 * INNER, INNER));
        let (b, c) = (part(3 * INNER, STATE), part(3 * INNER + STATE, STATE));
        let x = self.conv1d.forward(x.swap_dims(1, 2)).slice(s![.., .., ..LENGTH]);
        let x = silu(x).swap_dims(1, 2);
        let dt = softplus(dt + self.dt_bias.val().unsqueeze(), 1.0);
        let a = -self.a_log.val().exp().unsqueeze::<3>();
        let mut state = Tensor::<3>::zeros([input.dims()[0], INNER, STATE], &input.device());
        let step = |time: usize| {
            let at = |tensor: &Tensor<3>| tensor.clone().slice(s![.., time..time + 1, ..]);
            let column = |tensor: &Tensor<3>| at(tensor).swap_dims(1, 2);
            let (x, dt) = (column(&x), column(&dt));
            let decay = (dt.clone() * a.clone()).exp();
            state = state.clone() * decay + (dt * x.clone()) * at(&b);
            let y = (state.clone() * at(&c)).sum_dim(2);
            (y + x * self.d.val().reshape([1, INNER, 1])).swap_dims(1, 2)
        };
        let y = Tensor::cat((0..LENGTH).map(step).collect(), 1);
        input + self.out_proj.forward(y * silu(z))
    }
}

/// Moves of every step as unit vectors, and the positions after them on a circle of three places.
fn moves(items: &Items) -> (Tensor<3>, Tensor<1, Int>) {
    let (mut inputs, mut positions) = (vec![], vec![]);
    for item in &items.indices {
        let (mut rng, mut position) = (rng(*item), 0);
        for _ in 0..LENGTH {
            let step = rng.random_range(0..MOVES);
            position = (position + step) % MOVES;
            inputs.extend((0..MOVES).map(|index| f32::from(u8::from(index == step))));
            positions.push(position as i32);
        }
    }
    let count = items.indices.len();
    let inputs = floats(inputs, [count, LENGTH, MOVES], &items.device);
    (inputs, ints(positions, [count * LENGTH], &items.device))
}

impl Mamba {
    fn cross_entropy(&self, items: &Items) -> Tensor<1> {
        let (inputs, positions) = moves(items);
        let x = self.blocks.iter().fold(self.in_proj.forward(inputs), |x, block| block.forward(x));
        let logits = self.head.forward(self.norm.forward(x));
        cross_entropy(logits.reshape([-1, MOVES as i32]), positions)
    }
}

impl Client for Mamba {
    type Model = Self;

    const NAME: &'static str = "state space, a fused projection";
    const ROUTING: &'static str = "\
        AdamW (embedding): in_proj.weight\n\
        Muon: blocks.*.in_proj.weight blocks.*.out_proj.weight\n\
        AdamW (head): head.weight";

    fn model(device: &Device) -> Self {
        Self {
            in_proj: LinearConfig::new(MOVES, WIDTH).init(device),
            blocks: vec![Block::new(device), Block::new(device)],
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, MOVES).init(device),
        }
    }

    fn train(run: &Run, model: Self) -> Self {
        let (mut model, mut optim) = run.start(model);
        for step in run.steps.clone() {
            let loss = model.cross_entropy(&run.batch(step, 16));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(run.rate(step), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    /// `z` and `x` by Muon, the others by AdamW.
    fn blocks() -> Vec<RoutingRule> {
        let in_proj = RoutingRule::muon(r"blocks.*in_proj\.weight");
        vec![in_proj.split([INNER, INNER, INNER, STATE, STATE]).leave([2, 3, 4]).into()]
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.cross_entropy(&items).into_scalar()
    }
}
