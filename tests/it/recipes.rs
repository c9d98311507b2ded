//! Recipes: every one trains, alone, in batches and on ranks.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::DistMuonConfig;
use distmuon::orthogonalize::{Normalization, restarts};
use distmuon::{
    Coefficients, ElementwiseConfig, Error, MatrixLayout, MomentumForm, MuonConfig,
    NewtonSchulzConfig, Part, Recipe, Result, RoutingRule,
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

/// The file of a source, and constants of it.
struct Source {
    recipe: Recipe,
    /// The version and its date.
    version: (&'static str, &'static str),
    file: &'static str,
    /// Names, values, and the lines or functions of the file that have them. A place with a colon
    /// begins with another file.
    constants: &'static [(&'static str, f64, &'static str)],
}

/// The sources of the constants, as they were read in August and November 2026. Those of `KimiK3`
/// and `Glm5` are not confirmed beyond the heads.
const SOURCES: &[Source] = &[
    Source {
        recipe: Recipe::Torch,
        version: ("098e03f", "2026-08"),
        file: "torch/optim/_muon.py",
        constants: &[
            ("rate", 1e-3, "103"),
            ("decay", 0.1, "104"),
            ("momentum", 0.95, "105"),
            ("nesterov", 1.0, "106"),
            ("weight of a gradient", 1.0 - 0.95, "_single_tensor_muon"),
            ("a", 3.4445, "26, 107"),
            ("b", -4.775, "27, 107"),
            ("c", 2.0315, "28, 107"),
            ("iterations", 5.0, "29, 109"),
            ("least norm", 1e-7, "25, 64, 108"),
            ("scale of 64 by 16", 2.0, "90-91"),
            ("scale of 16 by 64", 1.0, "90-91"),
            ("last rate", 1.0, "torch/optim/_muon.py: no schedule"),
            ("embedding", 1e-3, "torch/optim/adamw.py: AdamW.__init__"),
            ("head", 1e-3, "torch/optim/adamw.py: AdamW.__init__"),
            ("vector", 1e-3, "torch/optim/adamw.py: AdamW.__init__"),
            ("beta 1", 0.9, "torch/optim/adamw.py: AdamW.__init__"),
            ("beta 2", 0.999, "torch/optim/adamw.py: AdamW.__init__"),
            ("epsilon", 1e-8, "torch/optim/adamw.py: AdamW.__init__"),
            ("rest's decay", 0.01, "torch/optim/adamw.py: AdamW.__init__"),
        ],
    },
    Source {
        recipe: Recipe::KellerJordan,
        version: ("857d1ad", "2025-11-23"),
        file: "muon.py",
        constants: &[
            ("rate", 0.02, "MuonWithAuxAdam.__init__"),
            ("momentum", 0.95, "MuonWithAuxAdam.__init__"),
            ("nesterov", 1.0, "34"),
            ("weight of a gradient", 1.0 - 0.95, "35"),
            ("decay", 0.0, "MuonWithAuxAdam.__init__"),
            ("a", 3.4445, "16"),
            ("b", -4.775, "16"),
            ("c", 2.0315, "16"),
            ("least norm", 1e-7, "22, as a summand"),
            ("iterations", 5.0, "34"),
            ("scale of 64 by 16", 2.0, "40"),
            ("scale of 16 by 64", 1.0, "40"),
            ("last rate", 1.0, "no schedule"),
            ("embedding", 3e-4, "MuonWithAuxAdam.__init__"),
            ("head", 3e-4, "MuonWithAuxAdam.__init__"),
            ("vector", 3e-4, "MuonWithAuxAdam.__init__"),
            ("beta 1", 0.9, "MuonWithAuxAdam.__init__"),
            ("beta 2", 0.95, "MuonWithAuxAdam.__init__"),
            ("epsilon", 1e-10, "MuonWithAuxAdam.__init__"),
            ("rest's decay", 0.0, "MuonWithAuxAdam.__init__"),
        ],
    },
    Source {
        recipe: Recipe::Moonlight,
        version: ("c2ad5b2", "2025-08-02"),
        file: "examples/toy_train.py",
        constants: &[
            ("rate", 1e-3, "Muon.__init__"),
            ("decay", 0.1, "Muon.__init__"),
            ("momentum", 0.95, "Muon.__init__"),
            ("nesterov", 1.0, "Muon.__init__"),
            ("weight of a gradient", 1.0, "Muon.step"),
            ("a", 3.4445, "zeropower_via_newtonschulz5"),
            ("b", -4.775, "zeropower_via_newtonschulz5"),
            ("c", 2.0315, "zeropower_via_newtonschulz5"),
            ("iterations", 5.0, "Muon.__init__"),
            ("least norm", 1e-7, "zeropower_via_newtonschulz5, as a summand"),
            ("scale of 64 by 16", 1.6, "142-148"),
            ("scale of 16 by 64", 1.6, "142-148"),
            ("first step at the peak", 100.0, "341-346"),
            ("last rate", 0.0, "341-346"),
            ("embedding", 1e-3, "Muon.step"),
            ("head", 1e-3, "Muon.step"),
            ("vector", 1e-3, "Muon.step"),
            ("beta 1", 0.9, "Muon.__init__"),
            ("beta 2", 0.95, "Muon.__init__"),
            ("epsilon", 1e-8, "Muon.__init__"),
            ("rest's decay", 0.1, "Muon.step"),
        ],
    },
    Source {
        recipe: Recipe::Nanochat,
        version: ("92d63d4", "2026-07-03"),
        file: "nanochat/optim.py",
        constants: &[
            ("rate", 0.02, "scripts/base_train.py: --matrix-lr"),
            ("first momentum", 0.85, "scripts/base_train.py: get_muon_momentum"),
            ("momentum", 0.97, "scripts/base_train.py: get_muon_momentum"),
            ("last momentum", 0.90, "scripts/base_train.py: get_muon_momentum"),
            ("nesterov", 1.0, "133"),
            ("weight of a gradient", 1.0 - 0.97, "132"),
            ("a", 8.156554524902461 / 1.01, "104, 144"),
            ("b", -22.48329292557795 / (1.01 * 1.01 * 1.01), "104, 144"),
            ("c", 15.878769915207462 / (1.01 * 1.01 * 1.01 * 1.01 * 1.01), "104, 144"),
            ("last a", 2.3465413258596377, "108"),
            ("last b", -1.7097828382687081, "108"),
            ("last c", 0.42323551169305323, "108"),
            ("iterations", 5.0, "nanochat/gpt.py: setup_optimizer"),
            ("least norm", 1e-6, "144, as a summand"),
            ("NorMuon's beta 2", 0.9, "nanochat/gpt.py: setup_optimizer"),
            ("scale of 64 by 16", 2.0, "393"),
            ("scale of 16 by 64", 1.0, "393"),
            ("decay", 0.28, "scripts/base_train.py: --weight-decay"),
            ("first step at the peak", 39.0, "scripts/base_train.py: --warmup-steps"),
            ("last rate", 0.05, "scripts/base_train.py: --final-lr-frac"),
            ("embedding", 0.3, "scripts/base_train.py: --embedding-lr"),
            ("head", 0.008, "scripts/base_train.py: --unembedding-lr"),
            ("vector", 0.005, "scripts/base_train.py: --scalar-lr, a hundredth of it"),
            ("beta 1", 0.8, "nanochat/gpt.py: setup_optimizer"),
            ("beta 2", 0.96, "nanochat/gpt.py: setup_optimizer"),
            ("epsilon", 1e-10, "nanochat/gpt.py: setup_optimizer"),
            ("rest's decay", 0.01, "nanochat/gpt.py: setup_optimizer"),
            ("embedding's beta 1", 0.8, "nanochat/gpt.py: setup_optimizer"),
            ("embedding's beta 2", 0.995, "nanochat/gpt.py: setup_optimizer"),
            ("embedding's decay", 0.001, "nanochat/gpt.py: setup_optimizer"),
            ("vector's beta 1", 0.8, "nanochat/gpt.py: setup_optimizer"),
            ("vector's beta 2", 0.95, "nanochat/gpt.py: setup_optimizer"),
            ("vector's decay", 0.05, "nanochat/gpt.py: setup_optimizer"),
        ],
    },
    Source {
        recipe: Recipe::ModdedNanogpt,
        version: ("f411b3d", "2026-08-01"),
        file: "train_gpt.py",
        constants: &[
            ("rate", 0.023, "1992-2076"),
            ("first momentum", 0.85, "get_muon_momentum"),
            ("momentum", 0.95, "get_muon_momentum"),
            ("last momentum", 0.85, "get_muon_momentum"),
            ("nesterov", 1.0, "polar_express"),
            ("weight of a gradient", 1.0 - 0.95, "polar_express"),
            ("a", 8.156554524902461 / 1.02, "polar_express"),
            ("b", -22.48329292557795 / (1.02 * 1.02 * 1.02), "polar_express"),
            ("c", 15.878769915207462 / (1.02 * 1.02 * 1.02 * 1.02 * 1.02), "polar_express"),
            ("last a", 2.3465413258596377, "polar_express_coeffs"),
            ("last b", -1.7097828382687081, "polar_express_coeffs"),
            ("last c", 0.42323551169305323, "polar_express_coeffs"),
            ("iterations", 5.0, "polar_express_coeffs"),
            ("least norm", 1e-6, "polar_express, as a summand"),
            ("NorMuon's beta 2", 0.9, "1992-2076"),
            ("scale of 64 by 16", 2.0, "474-538"),
            ("scale of 16 by 64", 1.0, "474-538"),
            ("decay", 1.2 * 0.023, "1992-2076"),
            ("last rate", 0.15, "1940, 1987"),
            ("steps at the last rate", 15.0, "1890-1891"),
            ("embedding", 0.008, "1992-2076"),
            ("head", 0.008, "1992-2076"),
            ("vector", 5.0 * 0.008, "1992-2076"),
            ("epsilon", 1e-10, "1992-2076"),
            ("rest's decay", 0.005 * 150.0 * 0.008, "1992-2076"),
            ("beta 1", 0.5, "1992-2076"),
            ("beta 2", 0.95, "1992-2076"),
            ("vector's beta 1", 0.9, "1992-2076"),
            ("vector's beta 2", 0.99, "1992-2076"),
        ],
    },
    Source {
        recipe: Recipe::KimiK2,
        version: ("arXiv 2507.20534", "2025-07"),
        file: "the report",
        constants: &[
            ("rate", 2e-4, "section 2.5"),
            ("first step at the peak", 499.0, "section 2.5"),
            ("last rate", 0.1, "section 2.5"),
            ("decay", 0.1, "section 2.5"),
            ("anneal's end", 7e-6, "section 2.5"),
            ("nesterov", 0.0, "section 2.1, algorithm 1"),
            ("weight of a gradient", 1.0, "section 2.1, algorithm 1"),
            ("scale of 64 by 16", 1.6, "section 2.1, algorithm 1"),
            ("scale of 16 by 64", 1.6, "section 2.1, algorithm 1"),
            ("clip", 100.0, "section 2.1"),
            ("momentum", 0.95, "Moonlight's file: the report has no number"),
            ("a", 3.4445, "Moonlight's file: the report has no number"),
            ("least norm", 1e-7, "Moonlight's file: the report has no number"),
            ("beta 1", 0.9, "Moonlight's file: the report has no number"),
            ("beta 2", 0.95, "Moonlight's file: the report has no number"),
            ("rest's decay", 0.1, "Moonlight's file: the report has no number"),
        ],
    },
    Source {
        recipe: Recipe::DeepSeekV4,
        version: ("quoted", "2026-08"),
        file: "run_deepseek_v4_pro_muon.sh of AMD-AGI/Primus",
        constants: &[
            ("rate", 2e-4, "LR"),
            ("last rate", 0.1, "MIN_LR"),
            ("momentum", 0.95, "MUON_MOMENTUM"),
            ("decay", 0.1, "the remark on muon_weight_decay"),
            ("scale of 64 by 16", 0.18 * 8.0, "MUON_EXTRA_SCALE_FACTOR"),
            ("scale of 16 by 64", 0.18 * 8.0, "MUON_EXTRA_SCALE_FACTOR"),
            ("epsilon", 1e-20, "ADAM_EPS"),
            ("a", 3.4445, "microsoft/dion: issue 66, which quotes the report"),
            ("b", -4.775, "microsoft/dion: issue 66, which quotes the report"),
            ("c", 2.0315, "microsoft/dion: issue 66, which quotes the report"),
            ("last a", 2.0, "microsoft/dion: issue 66, which quotes the report"),
            ("last b", -1.5, "microsoft/dion: issue 66, which quotes the report"),
            ("last c", 0.5, "microsoft/dion: issue 66, which quotes the report"),
            ("iterations", 10.0, "microsoft/dion: issue 66, which quotes the report"),
        ],
    },
    Source {
        recipe: Recipe::Motif,
        version: ("described", "2026-11"),
        file: "the description of the repository",
        constants: &[
            ("iterations", 10.0, "the part on coefficients"),
            ("least singular value", 1e-3, "the part on coefficients"),
        ],
    },
    Source {
        recipe: Recipe::Track3,
        version: ("f411b3d", "2026-06-11"),
        file: "records/track_3_optimization/train_gpt_simple.py",
        constants: &[
            ("rate", 0.025, "267-307"),
            ("momentum", 0.95, "muon_update"),
            ("nesterov", 1.0, "muon_update"),
            ("weight of a gradient", 1.0 - 0.95, "muon_update"),
            ("decay", 0.05, "267-307"),
            ("a", 2.0, "164-190"),
            ("b", -1.5, "164-190"),
            ("c", 0.5, "164-190"),
            ("iterations", 12.0, "164-190"),
            ("least norm", 1e-7, "164-190, as a summand"),
            ("scale of 64 by 16", 2.0, "muon_update"),
            ("scale of 16 by 64", 1.0, "muon_update"),
            ("embedding", 0.7, "267-307"),
            ("head", 0.004, "267-307"),
            ("vector", 0.015, "267-307"),
            ("beta 1", 0.8, "267-307"),
            ("beta 2", 0.95, "267-307"),
            ("epsilon", 1e-10, "267-307"),
            ("rest's decay", 0.001, "267-307"),
            ("last rate", 0.0, "267-307"),
        ],
    },
    Source {
        recipe: Recipe::KimiK3,
        version: ("arXiv 2607.24653", "2026-07"),
        file: "the report, by accounts of it",
        constants: &[("heads of a block", 1.0, "section 2.5")],
    },
    Source {
        recipe: Recipe::Glm5,
        version: ("arXiv 2602.15763", "2026-02"),
        file: "the report, by accounts of it",
        constants: &[("heads of a block", 1.0, "the part on Muon Split")],
    },
];

/// A constant of a recipe, for a run that is longer than all warm-ups.
fn constant(recipe: Recipe, name: &str) -> f64 {
    const RUN: usize = 100_000;
    let config = MuonConfig::preset(recipe, RUN);
    let ElementwiseConfig::AdamW(adamw) = &config.rest else { panic!("{:?}", config.rest) };
    let (rate, lr) = (recipe.peak_lr(), recipe.lr(1.0, RUN));
    let momentum = &config.momentum.momentum;
    let NewtonSchulzConfig { coefficients, steps, .. } = &config.newton_schulz;
    let polynomials =
        coefficients.schedule(steps.unwrap_or(coefficients.designed_steps())).unwrap();
    let (first, last) = (polynomials[0], polynomials[polynomials.len() - 1]);
    let scale = |shape| config.lr_factor * config.lr_scale.factor(MatrixLayout::OutIn, shape);
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
        "nesterov" => f64::from(config.momentum.nesterov),
        "weight of a gradient" => match config.momentum.form {
            MomentumForm::Average => 1.0 - momentum.at(RUN / 4),
            MomentumForm::Sum => 1.0,
            other => panic!("a form without a weight: {other:?}"),
        },
        "a" => first[0],
        "b" => first[1],
        "c" => first[2],
        "last a" => last[0],
        "last b" => last[1],
        "last c" => last[2],
        "iterations" => polynomials.len() as f64,
        "least norm" => config.newton_schulz.epsilon,
        "least singular value" => match coefficients {
            Coefficients::PolarExpressFor { lower, .. } => *lower,
            other => panic!("a set without a least value: {other:?}"),
        },
        "NorMuon's beta 2" => {
            let of_normuon = config.parts.iter().find_map(|part| match part {
                Part::NorMuon(normuon) => Some(normuon.beta_2),
                _ => None,
            });
            of_normuon.expect("the recipe has the part")
        }
        // Outputs by inputs.
        "scale of 64 by 16" => scale([64, 16]),
        "scale of 16 by 64" => scale([16, 64]),
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
    for Source { recipe, version, file, constants } in SOURCES {
        assert_eq!((recipe.version(), recipe.date()), *version, "{recipe:?}");
        assert!(!file.is_empty() && !constants.is_empty(), "{recipe:?}");
        for (name, expected, place) in *constants {
            assert!(!place.is_empty(), "{recipe:?}, {name}");
            let value = constant(*recipe, name);
            let difference = (value - expected).abs();
            let tolerance = 1e-12 * expected.abs().max(1e-9);
            assert!(
                difference <= tolerance,
                "{recipe:?}, {name}: {value}, and {expected} in {file}, {place}"
            );
        }
    }
}

/// The sources of nanochat and modded-nanogpt divide by a multiple of the norm, which a first
/// polynomial of a smaller argument does as well. It moves the ripples of the result by up to 0.28,
/// and by 0.06 and 0.08 as a root mean square, and costs the Gram form in bfloat16.
#[test]
fn a_margin_of_the_norm_changes_restarts_in_bfloat16_alone() {
    let cushioned = Coefficients::PolarExpressCushioned.schedule(5).unwrap();
    let mut found = vec![];
    for recipe in [Recipe::Nanochat, Recipe::ModdedNanogpt] {
        let set = MuonConfig::preset(recipe, STEPS).newton_schulz.coefficients;
        let with_margin = set.schedule(5).unwrap();
        assert_eq!(with_margin[1..], cushioned[1..], "{recipe:?}");
        for dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F32] {
            let [of_recipe, published] = [&with_margin, &cushioned]
                .map(|schedule| restarts::choose(schedule, Normalization::Frobenius, dtype));
            found.push((recipe, dtype, of_recipe, published));
        }
    }
    for (recipe, dtype, of_recipe, published) in &found {
        let expected = if *dtype == FloatDType::BF16 { &None } else { published };
        assert_eq!(of_recipe, expected, "{recipe:?}, {dtype:?}: {found:?}");
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
