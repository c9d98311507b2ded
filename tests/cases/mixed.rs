//! Cases of several parameters, as of nanochat: Muon with its parts for some, AdamW for the others.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use distmuon::parts::{NorMuon, Renormalization, RowEquilibration};
use distmuon::{
    AdamWConfig, Coefficients, IterationDtype, LrScale, MatrixLayout, MomentumConfig, MuonConfig,
    NewtonSchulzConfig, Part, RoutingRule, WeightDecay,
};
use serde::Deserialize;

use super::mesh::{Products, Slices};
use super::muon::{CoefficientSet, IterationName, ScaleName};
use super::{Case, Outcome, Step, every_optimizer, oriented, relative_error};

/// The settings of a case.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixedSettings {
    adamw: AdamWSettings,
    muon: MuonSettings,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamWSettings {
    betas: [f64; 2],
    epsilon: f64,
    lr: f64,
    weight_decay: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MuonSettings {
    coefficients: CoefficientSet,
    iteration_dtype: IterationName,
    lr: f64,
    momentum: f64,
    nesterov: bool,
    normalisation: Normalisation,
    ns_steps: usize,
    renormalise: bool,
    row_equilibration: bool,
    scale: ScaleName,
    variance_reduction: VarianceReduction,
    weight_decay: f64,
    weight_decay_mode: WeightDecayMode,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Normalisation {
    #[serde(rename = "x / (1.01 * |x|_F + 1e-6)")]
    WithMargin,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VarianceReduction {
    beta2: f64,
    reduce: Reduce,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Reduce {
    #[serde(rename = "shorter dimension")]
    ShorterDimension,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WeightDecayMode {
    Cautious,
}

/// A parameter of the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    kind: Kind,
    shape: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    AdamW,
    Muon,
}

/// A model of the parameters, each in the list of its dimensions.
#[derive(Module, Debug)]
struct Mixed {
    vectors: Vec<Param<Tensor<1>>>,
    matrices: Vec<Param<Tensor<2>>>,
}

impl Products for Mixed {
    fn products(&self, whole: &Self, gradients: &mut Slices) -> Vec<Tensor<1>> {
        let vectors = self.vectors.iter().zip(&whole.vectors);
        let vectors: Vec<_> =
            vectors.map(|(vector, whole)| gradients.product(vector, whole)).collect();
        let matrices = self.matrices.iter().zip(&whole.matrices);
        let matrices = matrices.map(|(matrix, whole)| gradients.product(matrix, whole));
        vectors.into_iter().chain(matrices).collect()
    }
}

/// The largest error of a step and parameter, in both layouts, of every optimizer.
pub fn run(case: &Case) -> Outcome<f64> {
    let mut worst = 0f64;
    for layout in [MatrixLayout::OutIn, MatrixLayout::InOut] {
        worst = worst.max(trajectories(case, layout)?);
    }
    Ok(worst)
}

/// The largest error of every optimizer in a layout.
fn trajectories(case: &Case, layout: MatrixLayout) -> Outcome<f64> {
    every_optimizer(
        &config(case, layout)?,
        |device| model(case, layout, device),
        |model, weight, step| follow(case, model, layout, weight, step),
    )
}

/// The largest error of an optimizer's steps with the gradients times `weight`.
fn follow(
    case: &Case,
    mut model: Mixed,
    layout: MatrixLayout,
    weight: f64,
    step: Step<'_, Mixed>,
) -> Outcome<f64> {
    let device = Device::default();
    let start = model.clone();
    let mut worst = 0f64;
    for number in 1..=case.header.steps {
        let mut grads = GradientsParams::new();
        for (name, param) in case.names("grad", number).into_iter().zip(parameters(&model, case)) {
            match param {
                Either::Vector(param) => {
                    let grad: Tensor<1> = Tensor::from_data(case.tensor(&name)?.clone(), &device);
                    grads.register(param.id, grad.mul_scalar(weight));
                }
                Either::Matrix(param) => {
                    let grad: Tensor<2> = case.load(&name, layout, &device)?;
                    grads.register(param.id, grad.mul_scalar(weight));
                }
            }
        }
        model = step(case.header.lr, model, grads)?;
        let both = parameters(&model, case).into_iter().zip(parameters(&start, case));
        for (name, (param, start)) in case.names("param", number).into_iter().zip(both) {
            let error = match (param, start) {
                (Either::Vector(param), Either::Vector(start)) => {
                    let reference =
                        Tensor::from_data(case.tensor(&name)?.clone(), &param.val().device());
                    relative_error(param.val(), reference, start.val())?
                }
                (Either::Matrix(param), Either::Matrix(start)) => {
                    let reference = case.load(&name, layout, &param.val().device())?;
                    relative_error(param.val(), reference, start.val())?
                }
                _ => unreachable!("both models have the same parameters"),
            };
            worst = worst.max(error);
        }
    }
    Ok(worst)
}

enum Either<'a> {
    Vector(&'a Param<Tensor<1>>),
    Matrix(&'a Param<Tensor<2>>),
}

/// The parameters of a model, in the order of the file.
fn parameters<'a>(model: &'a Mixed, case: &Case) -> Vec<Either<'a>> {
    let (mut vectors, mut matrices) = (model.vectors.iter(), model.matrices.iter());
    let parameter = |described: &Described| match described.shape.len() {
        1 => Either::Vector(vectors.next().expect("the model was made for the file")),
        _ => Either::Matrix(matrices.next().expect("the model was made for the file")),
    };
    case.header.params.iter().map(parameter).collect()
}

fn model(case: &Case, layout: MatrixLayout, device: &Device) -> Outcome<Mixed> {
    let mut model = Mixed { vectors: vec![], matrices: vec![] };
    for (index, described) in case.header.params.iter().enumerate() {
        let init = case.tensor(&format!("param.{index}.init"))?.clone();
        match described.shape.len() {
            1 => {
                let init = Tensor::<1>::from_data(init, device);
                model.vectors.push(Param::from_tensor(init.require_grad()));
            }
            2 => {
                let init = oriented(Tensor::<2>::from_data(init, device), layout);
                model.matrices.push(Param::from_tensor(init.require_grad()));
            }
            rank => return Err(format!("can't be expressed: a parameter of {rank} dimensions")),
        }
    }
    Ok(model)
}

fn config(case: &Case, layout: MatrixLayout) -> Outcome<MuonConfig> {
    let MixedSettings { adamw, muon } = case.settings()?;
    let Normalisation::WithMargin = muon.normalisation;
    let Reduce::ShorterDimension = muon.variance_reduction.reduce;
    let WeightDecayMode::Cautious = muon.weight_decay_mode;
    let IterationName::F32 = muon.iteration_dtype else {
        return Err("can't be expressed: an iteration that is not in float32".into());
    };
    let ScaleName::Original = muon.scale else {
        return Err("can't be expressed: another scale than `original`".into());
    };
    if muon.lr != case.header.lr {
        return Err("can't be expressed: another learning rate of Muon".into());
    }
    // A norm that is larger by a factor is a first polynomial of a smaller argument.
    let set = muon.coefficients.set().schedule(muon.ns_steps);
    let mut set = set.map_err(|error| error.to_string())?;
    let margin = 1.01f64;
    let [a, b, c] = set[0];
    set[0] = [a / margin, b / margin.powi(3), c / margin.powi(5)];
    let mut parts = vec![];
    parts.extend(muon.row_equilibration.then_some(Part::from(RowEquilibration)));
    parts.extend(muon.renormalise.then_some(Part::from(Renormalization::orthogonal())));
    parts.push(NorMuon::new(muon.variance_reduction.beta2).into());

    let lr = adamw.lr / case.header.lr;
    let adamw = AdamWConfig::new()
        .with_beta_1(adamw.betas[0])
        .with_beta_2(adamw.betas[1])
        .with_epsilon(adamw.epsilon)
        .with_weight_decay(adamw.weight_decay)
        .with_embedding_lr(lr)
        .with_head_lr(lr)
        .with_vector_lr(lr);
    let newton_schulz = NewtonSchulzConfig::new()
        .with_coefficients(Coefficients::Custom(set))
        .with_steps(Some(muon.ns_steps))
        .with_epsilon(1e-6)
        .with_dtype(IterationDtype::F32);
    let config = MuonConfig::new()
        .with_momentum(
            MomentumConfig::new().with_momentum(muon.momentum.into()).with_nesterov(muon.nesterov),
        )
        .with_newton_schulz(newton_schulz)
        .with_parts(parts)
        .with_weight_decay(WeightDecay::CautiousScaled(muon.weight_decay.into()))
        .with_lr_scale(LrScale::Original)
        .with_layout(layout)
        .with_adamw(adamw)
        .with_rule(RoutingRule::muon("^matrices"));
    let matrices = case.header.params.iter().filter(|described| described.shape.len() == 2);
    let others = matrices.enumerate().filter(|(_, described)| described.kind == Kind::AdamW);
    Ok(others.fold(config, |config, (index, _)| {
        config.with_rule(RoutingRule::adamw(format!(r"^matrices\.{index}$")))
    }))
}
