//! The settings of a case of Muon.

use distmuon::parts::{
    AdaMuon, EmaNesterov, Hyperball, Mars, MomentumMixture, Muown, Namo, NorMuon, RadialBrake,
    RelativeUpdate, Renormalization, Sign,
};
use distmuon::{
    Coefficients, IterationDtype, LrScale, MatrixLayout, MomentumConfig, MomentumForm, MuonConfig,
    NewtonSchulzConfig, Normalization, Part, RoutingRule, Schedule, WeightDecay,
};
use serde::{Deserialize, Serialize};

use super::Outcome;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MuonSettings {
    pub coefficients: CoefficientSet,
    pub ns_steps: usize,
    pub epsilon: f64,
    pub iteration_dtype: IterationName,
    #[serde(default)]
    pub normalization: NormalizationName,
    pub momentum_form: FormName,
    pub momentum: f64,
    pub nesterov: bool,
    #[serde(default)]
    pub bias_correction: bool,
    pub scale: ScaleName,
    pub weight_decay: f64,
    #[serde(default)]
    pub weight_decay_method: WeightDecayName,
    #[serde(default = "one")]
    pub lr_factor: f64,
    #[serde(default)]
    pub view: ViewName,
    #[serde(default)]
    pub momentum_warmup: Option<Warmup>,
    #[serde(default)]
    pub second_moment: Option<SecondMoment>,
    #[serde(default)]
    pub namo: Option<AdaptiveNorm>,
    #[serde(default)]
    pub rms: Option<f64>,
    #[serde(default)]
    pub hyperball: Option<Ball>,
    #[serde(default)]
    pub relative_update: Option<Ratio>,
    #[serde(default)]
    pub radial_brake: Option<Brake>,
    #[serde(default)]
    pub mars: Option<Variance>,
    #[serde(default)]
    pub momentum_mixture: Option<Mixture>,
    #[serde(default)]
    pub sign: bool,
    #[serde(default)]
    pub muown: Option<Magnitudes>,
    #[serde(default)]
    pub ema_nesterov: Option<Lookahead>,
    #[serde(default)]
    pub splits: Option<Vec<usize>>,
    #[serde(default)]
    pub heads: Option<usize>,
}

fn one() -> f64 {
    1.0
}

/// Linear from `from` to the momentum, which the last of `steps` steps has.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Warmup {
    pub from: f64,
    pub steps: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CoefficientSet {
    Named(CoefficientName),
    Computed(Computed),
    Listed(Vec<[f64; 3]>),
}

/// Polar Express for singular values down to `lower`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Computed {
    lower: f64,
    cushion: f64,
    safety: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum CoefficientName {
    #[serde(rename = "kj")]
    KellerJordan,
    #[serde(rename = "you")]
    You,
    #[serde(rename = "polar_express_1.02")]
    PolarExpressCushioned,
    #[serde(rename = "polar_express/1.05")]
    PolarExpress,
    #[serde(rename = "aol")]
    Aol,
    #[serde(rename = "cubic")]
    Cubic,
    #[serde(rename = "deepseek_v4")]
    DeepSeekV4,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IterationName {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormalizationName {
    #[default]
    Frobenius,
    Schatten4,
    Aol,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormName {
    Lerp,
    Sum,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleName {
    None,
    Original,
    MatchRmsAdamw,
    LongerSide,
    Spectral,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDecayName {
    #[default]
    Decoupled,
    Cautious,
    CautiousAfter,
    Independent,
    Palm,
    L2,
}

/// The matrices in a parameter of more than two dimensions, in the layout of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewName {
    #[default]
    Single,
    Batch,
    Flatten,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecondMoment {
    pub method: SecondMomentName,
    pub beta2: f64,
    pub epsilon: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum SecondMomentName {
    #[serde(rename = "normuon")]
    NorMuon,
    #[serde(rename = "normuon-rows")]
    NorMuonOfRows,
    #[serde(rename = "adamuon")]
    AdaMuon,
    #[serde(rename = "namo")]
    Namo,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveNorm {
    pub beta2: f64,
    pub epsilon: f64,
    /// For the norms of columns.
    #[serde(default)]
    pub limit: Option<f64>,
    #[serde(default)]
    pub weight_decay: f64,
    #[serde(default)]
    pub largest_rate: Option<f64>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variance {
    pub gamma: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ball {
    radius: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ratio {
    pub least: f64,
    #[serde(default)]
    pub most: Option<f64>,
    /// `true` for the norms of rows.
    #[serde(default)]
    pub rows: bool,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Brake {
    pub outward: f64,
    pub inward: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mixture {
    pub ages: Vec<f64>,
    pub weights: Vec<f64>,
    pub momentum: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Magnitudes {
    pub betas: [f64; 2],
    pub epsilon: f64,
    pub weight_decay: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lookahead {
    pub decay: f64,
    pub from: f64,
    pub to: f64,
    /// The steps from one to the other.
    pub steps: usize,
}

impl Lookahead {
    fn part(self) -> Part {
        let lookahead = Schedule::constant(self.from).linear(self.steps, self.to);
        EmaNesterov::new(lookahead).with_decay(self.decay).into()
    }
}

impl AdaptiveNorm {
    fn part(self, bias_correction: bool) -> Part {
        let Self { beta2, epsilon, limit, weight_decay, largest_rate } = self;
        let part = match limit {
            None => Namo::new(beta2),
            Some(limit) => Namo::per_input(beta2, limit),
        };
        let part = part.with_epsilon(epsilon).with_bias_correction(bias_correction);
        part.with_weight_decay(weight_decay).with_largest_rate(largest_rate).into()
    }
}

impl Mixture {
    fn part(self) -> Part {
        MomentumMixture::new(self.ages, self.weights, self.momentum).into()
    }
}

impl Magnitudes {
    fn part(self) -> Part {
        let Self { betas, epsilon, weight_decay } = self;
        let part = Muown::new().with_betas(betas).with_epsilon(epsilon);
        part.with_weight_decay(weight_decay).into()
    }
}

impl Ratio {
    fn part(self) -> Part {
        let part = match self.rows {
            true => RelativeUpdate::floor_per_output(self.least),
            false => RelativeUpdate::floor(self.least),
        };
        part.with_most(self.most).into()
    }
}

impl MuonSettings {
    /// The configuration for a model with the parameter `weight` in a layout.
    pub fn config(&self, layout: MatrixLayout) -> Outcome<MuonConfig> {
        let momentum = MomentumConfig::new()
            .with_momentum(self.momentum())
            .with_form(self.momentum_form.form())
            .with_nesterov(self.nesterov)
            .with_bias_correction(self.bias_correction);
        let newton_schulz = NewtonSchulzConfig::new()
            .with_coefficients(self.coefficients.set())
            .with_steps(Some(self.ns_steps))
            .with_epsilon(self.epsilon)
            .with_normalization(self.normalization.normalization())
            .with_dtype(self.iteration_dtype.dtype());
        let (scale, factor) = self.scale.scale();
        let second_moment = self.second_moment.map(SecondMoment::part);
        let namo = self.namo.map(|namo| namo.part(self.bias_correction));
        let rms = self.rms.map(|size| Renormalization::rms(size).into());
        let ratio = self.relative_update.map(Ratio::part);
        let hyperball = self.hyperball.map(|ball| Hyperball::fixed(ball.radius).into());
        let brake = self
            .radial_brake
            .map(|Brake { outward, inward }| RadialBrake::new(outward, inward).into());
        let mars = self.mars.map(|Variance { gamma }| Mars::new(gamma).into());
        let mixture = self.momentum_mixture.clone().map(Mixture::part);
        let sign = self.sign.then(|| Sign.into());
        let muown = self.muown.map(Magnitudes::part);
        let ahead = self.ema_nesterov.map(Lookahead::part);
        let parts =
            [mars, mixture, sign, second_moment, namo, rms, ratio, hyperball, brake, muown, ahead];
        Ok(MuonConfig::new()
            .with_newton_schulz(newton_schulz)
            .with_momentum(momentum)
            .with_weight_decay(self.weight_decay_method.decay(self.weight_decay))
            .with_parts(parts.into_iter().flatten().collect())
            .with_lr_scale(scale)
            .with_lr_factor(factor * self.lr_factor)
            .with_layout(layout)
            .with_rule(self.rule()?))
    }

    fn momentum(&self) -> Schedule {
        match self.momentum_warmup {
            Some(Warmup { from, steps }) => Schedule::constant(from).linear(steps, self.momentum),
            None => self.momentum.into(),
        }
    }

    fn rule(&self) -> Outcome<RoutingRule> {
        let rule = match self.view {
            ViewName::Single => RoutingRule::muon("weight"),
            ViewName::Batch => RoutingRule::muon("weight").batch(),
            ViewName::Flatten => RoutingRule::muon("weight").flatten(),
        };
        match (&self.splits, self.heads) {
            (None, None) => Ok(rule.into()),
            (Some(sizes), None) => Ok(rule.split(sizes.clone()).into()),
            (None, Some(count)) => Ok(rule.heads(count).into()),
            (Some(_), Some(_)) => Err("can't be expressed: `splits` and `heads`".into()),
        }
    }
}

impl FormName {
    fn form(self) -> MomentumForm {
        match self {
            Self::Lerp => MomentumForm::Average,
            Self::Sum => MomentumForm::Sum,
        }
    }
}

impl IterationName {
    fn dtype(self) -> IterationDtype {
        match self {
            Self::F32 => IterationDtype::F32,
            Self::F16 => IterationDtype::F16,
            Self::Bf16 => IterationDtype::Bf16,
        }
    }
}

impl ScaleName {
    /// The scale, and a factor on it.
    fn scale(self) -> (LrScale, f64) {
        match self {
            Self::None => (LrScale::None, 1.0),
            Self::Original => (LrScale::Original, 1.0),
            Self::MatchRmsAdamw => (LrScale::MatchRmsAdamW, 1.0),
            // Without the 0.2 of `MatchRmsAdamW`.
            Self::LongerSide => (LrScale::MatchRmsAdamW, 5.0),
            Self::Spectral => (LrScale::Spectral, 1.0),
        }
    }
}

impl WeightDecayName {
    fn decay(self, rate: f64) -> WeightDecay {
        let rate = Schedule::constant(rate);
        match self {
            Self::Decoupled => WeightDecay::Decoupled(rate),
            Self::Cautious => WeightDecay::Cautious(rate),
            Self::CautiousAfter => WeightDecay::CautiousAfter(rate),
            Self::Independent => WeightDecay::Independent(rate),
            Self::Palm => WeightDecay::SquaredRate(rate),
            Self::L2 => WeightDecay::Coupled(rate),
        }
    }
}

impl SecondMoment {
    fn part(self) -> Part {
        let Self { method, beta2, epsilon } = self;
        match method {
            SecondMomentName::NorMuon => NorMuon::new(beta2).with_epsilon(epsilon).into(),
            SecondMomentName::NorMuonOfRows => {
                NorMuon::per_output(beta2).with_epsilon(epsilon).into()
            }
            SecondMomentName::AdaMuon => AdaMuon::new(beta2).with_epsilon(epsilon).into(),
            SecondMomentName::Namo => Namo::new(beta2).with_epsilon(epsilon).into(),
        }
    }
}

impl NormalizationName {
    fn normalization(self) -> Normalization {
        match self {
            Self::Frobenius => Normalization::Frobenius,
            Self::Schatten4 => Normalization::Schatten4,
            Self::Aol => Normalization::Aol,
        }
    }
}

impl CoefficientSet {
    pub fn set(&self) -> Coefficients {
        match self {
            Self::Named(CoefficientName::KellerJordan) => Coefficients::KellerJordan,
            Self::Named(CoefficientName::You) => Coefficients::You,
            Self::Named(CoefficientName::PolarExpressCushioned) => {
                Coefficients::PolarExpressCushioned
            }
            Self::Named(CoefficientName::PolarExpress) => Coefficients::polar_express(),
            Self::Named(CoefficientName::Aol) => Coefficients::Aol,
            Self::Named(CoefficientName::Cubic) => Coefficients::Cubic,
            Self::Named(CoefficientName::DeepSeekV4) => Coefficients::DeepSeekV4,
            &Self::Computed(Computed { lower, cushion, safety }) => {
                Coefficients::PolarExpressFor { lower, cushion, safety }
            }
            Self::Listed(steps) => Coefficients::Custom(steps.clone()),
        }
    }
}
