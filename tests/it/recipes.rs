//! Recipes: every one trains, alone, in batches and on ranks.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::DistMuonConfig;
use distmuon::{Coefficients, MuonConfig, NewtonSchulzConfig, Recipe, Result};
use distmuon_testing::models::Fixed;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const VOCABULARY: usize = 13;
const STEPS: usize = 100;

/// A model with embeddings, hidden matrices of two shapes, biases and a head.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    up: Linear,
    down: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let net = Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 16).init(device),
            up: linear(16, 32),
            down: linear(32, 16),
            head: linear(16, VOCABULARY),
        };
        net.map(&mut Fixed::new(3))
    }

    /// The loss of predicting a fixed successor of every token.
    fn loss(&self) -> Tensor<1> {
        let device = self.head.weight.device();
        let tokens = Tensor::<1, Int>::arange(0..VOCABULARY as i64, &device);
        let targets = tokens.clone().mul_scalar(5).add_scalar(2).remainder_scalar(13);
        let x = self.embedding.forward(tokens.unsqueeze::<2>()).squeeze_dim::<2>(0);
        let x = x.clone() + self.down.forward(relu(self.up.forward(x)));
        CrossEntropyLossConfig::new().init(&device).forward(self.head.forward(x), targets)
    }
}

/// The losses of a run of a recipe at its own rates.
fn losses(
    recipe: Recipe,
    mut net: Net,
    mut step: impl FnMut(f64, Net, GradientsParams) -> Result<Net>,
) -> Result<Vec<f32>> {
    let lr = recipe.lr(recipe.peak_lr(), STEPS);
    let mut losses = Vec::new();
    for at in 0..STEPS {
        let loss = net.loss();
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = step(lr.at(at), net, gradients)?;
    }
    losses.push(net.loss().into_scalar());
    Ok(losses)
}

fn alone(recipe: Recipe) -> Vec<f32> {
    let net = Net::new(&Device::default().autodiff());
    let mut optim =
        MuonConfig::preset(recipe, STEPS).try_init(&net).expect("settings that a run can use");
    losses(recipe, net, |lr, net, gradients| Ok(optim.step(lr, net, gradients))).unwrap()
}

fn in_batches(recipe: Recipe) -> Vec<f32> {
    let net = Net::new(&Device::default().autodiff());
    let mut optim =
        MuonConfig::preset(recipe, STEPS).init_batched(&net).expect("settings that a run can use");
    losses(recipe, net, |lr, net, gradients| optim.step(lr, net, gradients)).unwrap()
}

fn on_two_ranks(recipe: Recipe) -> Vec<f32> {
    let device = Device::default().autodiff();
    let net = Net::new(&device);
    let runs = World::threads_with(vec![device; 2], net, |world, net| {
        let config = DistMuonConfig::new().with_muon(MuonConfig::preset(recipe, STEPS));
        let mut optim = config.init(&world, &net)?;
        losses(recipe, net, |lr, net, gradients| optim.step(lr, net, gradients))
    });
    let [first, second] = <[_; 2]>::try_from(runs.unwrap()).expect("one result per rank");
    assert_eq!(first, second, "{recipe:?}");
    first
}

#[test]
fn every_recipe_trains_in_every_optimizer() {
    for recipe in Recipe::ALL {
        let expected = alone(recipe);
        let (first, last) = (expected[0], expected[STEPS]);
        assert!(expected.iter().all(|loss| loss.is_finite()), "{recipe:?}: {expected:?}");
        assert!(last < 0.995 * first, "{recipe:?}: {first} to {last}");
        for (optimizer, losses) in
            [("batched", in_batches(recipe)), ("two ranks", on_two_ranks(recipe))]
        {
            for (step, (loss, alone)) in losses.iter().zip(&expected).enumerate() {
                let difference = (loss - alone).abs();
                assert!(
                    difference < 1e-3 * alone.max(0.1),
                    "{recipe:?}, {optimizer}, step {step}: {loss} and {alone}"
                );
            }
        }
    }
}

#[test]
fn motifs_iteration_gives_the_exact_polar_factor() {
    let device = Device::default();
    let iteration = MuonConfig::preset(Recipe::Motif, STEPS).newton_schulz;
    let orthogonalize = |config: NewtonSchulzConfig| {
        // Singular values from 1 down to 2e-3 of the largest.
        let values: Vec<f32> = (0..24).map(|index| 0.763_f32.powi(index)).collect();
        let [left, right] = [(24, 24, 1), (24, 40, 2)].map(|(m, n, seed)| {
            let gaussian = Tensor::<2>::from_data(
                TensorData::new(normal(m * n, seed), [m, n]),
                (&device, DType::F32),
            );
            let exact = NewtonSchulzConfig::new()
                .with_coefficients(Coefficients::polar_express_for(1e-3))
                .with_steps(Some(16));
            exact.init().unwrap().orthogonalize(gaussian.unsqueeze::<3>()).squeeze_dim::<2>(0)
        });
        let values = Tensor::<1>::from_data(&*values, (&device, DType::F32)).unsqueeze_dim::<2>(0);
        let polar = left.clone().matmul(right.clone());
        let result =
            config.init().unwrap().orthogonalize((left * values).matmul(right).unsqueeze::<3>());
        (result.squeeze_dim::<2>(0) - polar).abs().max().into_scalar::<f32>()
    };
    let motif = orthogonalize(iteration);
    assert!(motif < 2e-3, "{motif}");
    // Five steps of the default leave the smallest ones behind.
    let few = orthogonalize(NewtonSchulzConfig::new());
    assert!(few > 20.0 * motif, "{few} and {motif}");
}

/// Numbers that are near a normal distribution.
fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| (0..12).map(|_| rng.random_range(-0.5..0.5)).sum()).collect()
}
