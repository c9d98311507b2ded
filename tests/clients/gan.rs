//! A Wasserstein GAN: two optimizers, and a critic whose weights are clipped by a mapper. As in the
//! public program, optimizers have neither momentum nor decay, and the critic takes five steps for
//! one of the generator: momentum makes a critic unstable (Arjovsky et al.,
//! <https://arxiv.org/abs/1701.07875>, section 4).

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, activation::leaky_relu};
use distmuon::{MuonConfig, checkpoint};

use crate::client::{Client, Items, Run, Settings};
use crate::data::{floats, inputs, teacher};

const LATENTS: usize = 8;
const WIDTH: usize = 32;
const OUTPUTS: usize = 6;
/// Steps of the critic for one of the generator.
const CRITIC_STEPS: usize = 5;
/// Items of each sample whose distance is the loss. Two samples of real items have a distance of
/// 0.023, and of 0.28 if they have 128 items.
const SAMPLE: usize = 4096;
/// Index of the first of them. No run trains on these.
const FIRST_OF_SAMPLE: usize = 1 << 40;

#[derive(Module, Debug)]
pub struct Layers {
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
}

impl Layers {
    fn new(inputs: usize, outputs: usize, device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self { fc1: linear(inputs, WIDTH), fc2: linear(WIDTH, WIDTH), fc3: linear(WIDTH, outputs) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = leaky_relu(self.fc1.forward(x), 0.2);
        self.fc3.forward(leaky_relu(self.fc2.forward(x), 0.2))
    }
}

#[derive(Module, Debug)]
pub struct Gan {
    generator: Layers,
    critic: Layers,
}

struct Clip(f32);

impl ModuleMapper for Clip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let is_trained = tensor.is_require_grad();
        let clipped = Tensor::from_inner(tensor.inner().clamp(-self.0, self.0));
        Param::from_mapped_value(id, clipped.set_require_grad(is_trained), mapper)
    }
}

/// Points of a curved surface.
fn real(items: &Items) -> Tensor<2> {
    let values: Vec<f32> =
        inputs(items, 3).iter().flat_map(|input| teacher(input, OUTPUTS)).collect();
    floats(values, [items.indices.len(), OUTPUTS], &items.device)
}

fn latents(items: &Items) -> Tensor<2> {
    floats(inputs(items, LATENTS).concat(), [items.indices.len(), LATENTS], &items.device)
}

impl Gan {
    fn optimizers(&self, run: &Run) -> [ModuleOptimizer; 2] {
        let settings = Settings::without_momentum_and_decay();
        [&self.generator, &self.critic].map(|part| run.optimizer(&settings, part))
    }
}

const FILES: [&str; 2] = ["generator.bpk", "critic.bpk"];

impl Client for Gan {
    type Model = Self;

    const NAME: &'static str = "gan, two optimizers and clipped weights";
    const ROUTING: &'static str = "\
        AdamW (embedding): fc1.weight\n\
        Muon: fc2.weight\n\
        AdamW (head): fc3.weight\n\
        AdamW (embedding): fc1.weight\n\
        Muon: fc2.weight\n\
        AdamW (head): fc3.weight";

    fn model(device: &Device) -> Self {
        let generator = Layers::new(LATENTS, OUTPUTS, device);
        Self { generator, critic: Layers::new(OUTPUTS, 1, device) }
    }

    fn train(run: &Run, model: Self) -> Self {
        let optimizers = model.optimizers(run);
        let Self { generator, critic } = model;
        let load = |name, part: Layers, optim| match run.is_resumed() {
            true => checkpoint::load(run.file(name), part, optim).expect("the part was saved"),
            false => (part, optim, ()),
        };
        let [of_generator, of_critic] = optimizers;
        let (mut generator, mut of_generator, ()) = load(FILES[0], generator, of_generator);
        let (mut critic, mut of_critic, ()) = load(FILES[1], critic, of_critic);
        for step in run.steps.clone() {
            let first = (CRITIC_STEPS + 1) * step;
            for batch in first..first + CRITIC_STEPS {
                let items = run.batch(batch, 32);
                let made = generator.forward(latents(&items)).detach();
                let loss = critic.forward(made).mean() - critic.forward(real(&items)).mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &critic);
                critic = of_critic.step(run.rate(step), critic, gradients).map(&mut Clip(0.1));
            }
            let made = generator.forward(latents(&run.batch(first + CRITIC_STEPS, 32)));
            let loss = -critic.forward(made).mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &generator);
            generator = of_generator.step(run.rate(step), generator, gradients);
        }
        let optimizers = [(FILES[0], &generator, &of_generator), (FILES[1], &critic, &of_critic)];
        for (name, part, optim) in optimizers {
            checkpoint::save(run.file(name), part, optim, &()).expect("the part can be saved");
        }
        Self { generator, critic }
    }

    fn roles(model: &Self) -> String {
        [&model.generator, &model.critic]
            .map(|part| crate::roles(&MuonConfig::new(), part))
            .concat()
    }

    /// The distance between the distributions of every output, in a sample of its own.
    fn loss(model: &Self, Items { device, .. }: Items) -> f32 {
        let indices = (FIRST_OF_SAMPLE..).take(SAMPLE).collect();
        let items = Items { indices, device };
        let made = model.generator.forward(latents(&items)).sort(0);
        (made - real(&items).sort(0)).abs().mean().into_scalar()
    }
}
