//! Recipes: every one trains, alone, in batches and on ranks.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::DistMuonConfig;
use distmuon::{
    Coefficients, ElementwiseConfig, Error, MuonConfig, NewtonSchulzConfig, Recipe, Result,
    RoutingRule,
};
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

/// The file and the lines of a source, and constants of it.
struct Source {
    recipe: Recipe,
    /// The version and its date.
    version: (&'static str, &'static str),
    file: &'static str,
    lines: &'static str,
    constants: &'static [(&'static str, f64)],
}

/// The sources of the constants, as they were read in August 2026, and Motif's in November. Those
/// of `KimiK3` and `Glm5` are not confirmed beyond the heads.
const SOURCES: &[Source] = &[
    Source {
        recipe: Recipe::Torch,
        version: ("098e03f", "2026-08"),
        file: "torch/optim/_muon.py",
        lines: "the whole file",
        constants: &[
            ("rate", 1e-3),
            ("momentum", 0.95),
            ("decay", 0.1),
            ("a", 3.4445),
            ("b", -4.775),
            ("c", 2.0315),
        ],
    },
    Source {
        recipe: Recipe::KellerJordan,
        version: ("857d1ad", "2025-11-23"),
        file: "muon.py",
        lines: "16-40, 80-94",
        constants: &[
            ("rate", 0.02),
            ("momentum", 0.95),
            ("decay", 0.0),
            ("a", 3.4445),
            ("b", -4.775),
            ("c", 2.0315),
            ("embedding", 3e-4),
            ("head", 3e-4),
            ("vector", 3e-4),
            ("beta 1", 0.9),
            ("beta 2", 0.95),
            ("epsilon", 1e-10),
            ("rest's decay", 0.0),
        ],
    },
    Source {
        recipe: Recipe::Moonlight,
        version: ("c2ad5b2", "2025-08-02"),
        file: "examples/toy_train.py",
        lines: "60, 142-148, 231, 341-346",
        constants: &[
            ("rate", 1e-3),
            ("a", 3.4445),
            ("decay", 0.1),
            ("first step at the peak", 100.0),
            ("last rate", 0.0),
        ],
    },
    Source {
        recipe: Recipe::Nanochat,
        version: ("92d63d4", "2026-07-03"),
        file: "nanochat/optim.py, scripts/base_train.py, nanochat/gpt.py",
        lines: "optim.py 120-200, 393; gpt.py 441-444",
        constants: &[
            ("rate", 0.02),
            ("first momentum", 0.85),
            ("momentum", 0.97),
            ("last momentum", 0.90),
            ("decay", 0.28),
            ("first step at the peak", 39.0),
            ("last rate", 0.05),
            ("embedding", 0.3),
            ("head", 0.008),
            ("beta 1", 0.8),
            ("beta 2", 0.96),
            ("rest's decay", 0.01),
            ("embedding's beta 1", 0.8),
            ("embedding's beta 2", 0.995),
            ("embedding's decay", 0.001),
            ("vector's beta 1", 0.8),
            ("vector's beta 2", 0.95),
            ("vector's decay", 0.05),
        ],
    },
    Source {
        recipe: Recipe::ModdedNanogpt,
        version: ("f411b3d", "2026-08-01"),
        file: "train_gpt.py",
        lines: "474-538, 1890-1891, 1940, 1987, 1992-2076",
        constants: &[
            ("rate", 0.023),
            ("first momentum", 0.85),
            ("momentum", 0.95),
            ("last momentum", 0.85),
            ("decay", 1.2 * 0.023),
            ("last rate", 0.15),
            ("steps at the last rate", 15.0),
            ("embedding", 0.008),
            ("head", 0.008),
            ("vector", 5.0 * 0.008),
            ("rest's decay", 0.005 * 150.0 * 0.008),
            ("beta 1", 0.5),
            ("beta 2", 0.95),
            ("vector's beta 1", 0.9),
            ("vector's beta 2", 0.99),
        ],
    },
    Source {
        recipe: Recipe::KimiK2,
        version: ("arXiv 2507.20534", "2025-07"),
        file: "the report",
        lines: "sections 2.1 and 2.5",
        constants: &[
            ("rate", 2e-4),
            ("first step at the peak", 499.0),
            ("last rate", 0.1),
            ("decay", 0.1),
            ("clip", 100.0),
            ("anneal's end", 7e-6),
        ],
    },
    Source {
        recipe: Recipe::DeepSeekV4,
        version: ("quoted", "2026-08"),
        file: "run_deepseek_v4_pro_muon.sh of AMD-AGI/Primus",
        lines: "the whole file, and pull request 67 of microsoft/dion",
        constants: &[
            ("rate", 2e-4),
            ("last rate", 0.1),
            ("momentum", 0.95),
            ("decay", 0.1),
            ("RMS of updates", 0.18),
            ("epsilon", 1e-20),
        ],
    },
    Source {
        recipe: Recipe::Motif,
        version: ("described", "2026-11"),
        file: "the description of the repository",
        lines: "the part on coefficients",
        constants: &[("iterations", 10.0)],
    },
    Source {
        recipe: Recipe::Track3,
        version: ("f411b3d", "2026-06-11"),
        file: "records/track_3_optimization/train_gpt_simple.py",
        lines: "164-190, 267-307",
        constants: &[
            ("rate", 0.025),
            ("momentum", 0.95),
            ("decay", 0.05),
            ("a", 2.0),
            ("b", -1.5),
            ("c", 0.5),
            ("iterations", 12.0),
            ("embedding", 0.7),
            ("head", 0.004),
            ("vector", 0.015),
            ("beta 1", 0.8),
            ("beta 2", 0.95),
            ("epsilon", 1e-10),
            ("rest's decay", 0.001),
            ("last rate", 0.0),
        ],
    },
    Source {
        recipe: Recipe::KimiK3,
        version: ("arXiv 2607.24653", "2026-07"),
        file: "the report, by accounts of it",
        lines: "section 2.5",
        constants: &[("heads of a block", 1.0)],
    },
    Source {
        recipe: Recipe::Glm5,
        version: ("arXiv 2602.15763", "2026-02"),
        file: "the report, by accounts of it",
        lines: "the part on Muon Split",
        constants: &[("heads of a block", 1.0)],
    },
];

/// A constant of a recipe, for a run that is longer than all warm-ups.
fn constant(recipe: Recipe, name: &str) -> f64 {
    const RUN: usize = 100_000;
    let config = MuonConfig::preset(recipe, RUN);
    let ElementwiseConfig::AdamW(adamw) = &config.rest else { panic!("{:?}", config.rest) };
    let (rate, lr) = (recipe.peak_lr(), recipe.lr(1.0, RUN));
    let momentum = &config.momentum.momentum;
    let polynomial = || config.newton_schulz.coefficients.schedule(1).unwrap()[0];
    match name {
        "rate" => rate,
        "last rate" => lr.at(RUN),
        "first step at the peak" => (0..RUN).find(|step| lr.at(*step) == 1.0).unwrap() as f64,
        "steps at the last rate" => {
            let is_last = |step: &usize| (lr.at(*step) - lr.at(RUN)).abs() < 1e-12;
            (0..RUN).rev().take_while(is_last).count() as f64
        }
        "anneal's end" => recipe.anneal(rate, 50).unwrap().at(49),
        "first momentum" => momentum.at(0),
        "momentum" => momentum.at(RUN / 4),
        "last momentum" => momentum.at(RUN),
        "decay" => config.weight_decay.rate().at(0),
        "a" => polynomial()[0],
        "b" => polynomial()[1],
        "c" => polynomial()[2],
        "iterations" => config.newton_schulz.steps.unwrap() as f64,
        "RMS of updates" => 0.2 * config.lr_factor,
        "clip" => recipe.qk_clip().unwrap().tau,
        "embedding" => rate * adamw.embedding_lr,
        "head" => rate * adamw.head_lr,
        "vector" => rate * adamw.vector_lr,
        "beta 1" => adamw.beta_1,
        "beta 2" => adamw.beta_2,
        "epsilon" => adamw.epsilon,
        "rest's decay" => adamw.weight_decay,
        "embedding's beta 1" => adamw.embedding_betas.unwrap()[0],
        "embedding's beta 2" => adamw.embedding_betas.unwrap()[1],
        "embedding's decay" => adamw.weight_decay * adamw.embedding_decay,
        "vector's beta 1" => adamw.vector_betas.unwrap()[0],
        "vector's beta 2" => adamw.vector_betas.unwrap()[1],
        "vector's decay" => adamw.weight_decay * adamw.vector_decay,
        "heads of a block" => {
            let rule = recipe.per_head("query", 6).expect("the recipe has a rule");
            assert_eq!(rule, RoutingRule::muon("query").heads(6).into());
            1.0
        }
        other => panic!("an unknown constant: {other}"),
    }
}

#[test]
fn constants_are_those_of_a_file_and_a_date() {
    for recipe in Recipe::ALL {
        let of_recipe = SOURCES.iter().filter(|source| source.recipe == recipe);
        assert_eq!(of_recipe.count(), 1, "{recipe:?} has a source");
    }
    for Source { recipe, version, file, lines, constants } in SOURCES {
        assert_eq!((recipe.version(), recipe.date()), *version, "{recipe:?}");
        assert!(!file.is_empty() && !lines.is_empty() && !constants.is_empty(), "{recipe:?}");
        for (name, expected) in *constants {
            let value = constant(*recipe, name);
            let difference = (value - expected).abs();
            let tolerance = 1e-12 * expected.abs().max(1e-9);
            assert!(
                difference <= tolerance,
                "{recipe:?}, {name}: {value}, and {expected} in {file}, {lines}"
            );
        }
    }
}

#[test]
fn the_guide_has_the_source_version_and_date_of_every_recipe() {
    let page = include_str!("../../docs/guide/recipes.md");
    for recipe in Recipe::ALL {
        let (name, version, date) = (recipe.name(), recipe.version(), recipe.date());
        let source = format!("| `{name}` | [{version}]({})", recipe.source());
        let row = page.lines().find(|line| line.starts_with(&source));
        let row = row.unwrap_or_else(|| panic!("no row begins with {source}"));
        assert!(row.contains(&format!(", {date} |")), "{row}");
    }
}

#[test]
fn rules_of_recipes_split_projections_by_heads() {
    let model = LinearConfig::new(16, 24).init(&Device::default().autodiff());
    let blocks = |recipe: Recipe, heads: usize| {
        let rule = recipe.per_head("weight", heads);
        let config = rule.into_iter().fold(MuonConfig::preset(recipe, 100), MuonConfig::with_rule);
        config.route(&model).map(|routing| routing.routes()[0].blocks.clone())
    };
    assert_eq!(blocks(Recipe::KimiK3, 4).unwrap(), [6; 4]);
    assert_eq!(blocks(Recipe::Glm5, 3).unwrap(), [8; 3]);
    assert_eq!(blocks(Recipe::ModdedNanogpt, 4).unwrap(), [12; 2]);
    assert!(blocks(Recipe::KimiK2, 4).unwrap().is_empty());
    let error = blocks(Recipe::KimiK3, 5).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}
