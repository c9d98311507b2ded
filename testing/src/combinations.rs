//! Parts of the update that are used together, and a model for them.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::parts::{
    AdaMuon, ColumnEquilibration, EmaNesterov, Hyperball, Mars, MaxNorm, MomentumMixture, Muown,
    Namo, NorMuon, Part, RadialBrake, RelativeUpdate, Renormalization, RowEquilibration, Sign,
};
use distmuon::{
    AdamWConfig, Coefficients, LionConfig, MasterWeights, MatrixLayout, MomentumConfig,
    MomentumForm, MuonConfig, NewtonSchulzConfig, Normalization, RoutingRule, Schedule, StateDtype,
    WeightDecay,
};

use crate::models::{Fixed, gradients};
use crate::precision::{self, Rounded, has};

/// Returns combinations with all parts, kinds of decay and forms of momentum, and states of every
/// extent.
pub fn combinations() -> Vec<(&'static str, MuonConfig)> {
    let corrected = MomentumConfig::new().with_bias_correction(true);
    let sum = MomentumConfig::new().with_form(MomentumForm::Sum).with_bias_correction(true);
    let warmup = MomentumConfig::from(Schedule::momentum_warmup(0.95, 3));
    vec![
        ("as in nanochat", {
            let parts = vec![
                RowEquilibration.into(),
                Renormalization::orthogonal().into(),
                NorMuon::new(0.9).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_weight_decay(WeightDecay::CautiousScaled(0.2.into()))
        }),
        ("second moments of elements", {
            let parts = vec![
                Mars::new(0.025).into(),
                AdaMuon::new(0.9).into(),
                Renormalization::rms(0.2).into(),
                MaxNorm::new(1.2).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_momentum(warmup)
                .with_weight_decay(WeightDecay::Coupled(0.1.into()))
        }),
        ("moments of matrices", {
            let parts = vec![
                ColumnEquilibration.into(),
                Hyperball::initial().into(),
                Namo::new(0.9).with_bias_correction(true).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_momentum(corrected.clone())
                .with_weight_decay(0.0.into())
                .with_rest(LionConfig::new().with_weight_decay(0.1).into())
        }),
        ("moments of outputs", {
            let parts = vec![
                RowEquilibration.into(),
                ColumnEquilibration.into(),
                NorMuon::per_output(0.9).into(),
                Namo::new(0.9).with_bias_correction(true).into(),
                MaxNorm::new(1.2).into(),
            ];
            MuonConfig::new()
                .with_parts(parts)
                .with_momentum(sum)
                .with_weight_decay(WeightDecay::Independent(0.05.into()))
                .with_rest(LionConfig::new().into())
        }),
        ("a fixed norm", {
            let parts = vec![Hyperball::fixed(1.5).into(), NorMuon::new(0.5).into()];
            MuonConfig::new().with_parts(parts).with_weight_decay(WeightDecay::Cautious(0.3.into()))
        }),
        ("a limit of gradients", {
            MuonConfig::new().with_parts(vec![Mars::exact(0.025).into(), NorMuon::new(0.9).into()])
        }),
        ("a braked norm", {
            let parts = vec![RadialBrake::new(0.5, 0.9).into(), MaxNorm::new(9.0).into()];
            MuonConfig::new().with_parts(parts).with_weight_decay(0.2.into())
        }),
        ("magnitudes and directions", {
            let parts = vec![Sign.into(), Muown::new().with_weight_decay(0.1).into()];
            MuonConfig::new().with_parts(parts).with_weight_decay(0.0.into())
        }),
        ("a point ahead", {
            let ahead = EmaNesterov::new(Schedule::constant(0.6));
            let parts = vec![Namo::per_input(0.9, 0.75).into(), ahead.into()];
            MuonConfig::new().with_parts(parts).with_weight_decay(0.2.into())
        }),
        ("decay at the rate of an update", {
            let namo = Namo::new(0.9).with_bias_correction(true).with_weight_decay(0.9);
            MuonConfig::new()
                .with_parts(vec![namo.into(), NorMuon::new(0.9).into()])
                .with_momentum(corrected.with_nesterov(false))
                .with_weight_decay(0.0.into())
        }),
        ("decay at the rates of inputs", {
            // Some rates of updates and of decays are larger.
            let namo = Namo::per_input(0.9, 0.75).with_largest_rate(Some(0.006));
            let ahead = EmaNesterov::new(Schedule::constant(0.6));
            MuonConfig::new()
                .with_parts(vec![namo.with_weight_decay(0.9).into(), ahead.into()])
                .with_weight_decay(0.0.into())
                .with_rule(RoutingRule::muon(r"weights\.1").lr_factor(2.0))
        }),
        ("several momenta", {
            let parts = vec![MomentumMixture::k_maxwell().into(), NorMuon::new(0.9).into()];
            MuonConfig::new().with_parts(parts).with_momentum(Schedule::constant(0.0).into())
        }),
        ("a floor of updates", {
            let parts = vec![
                NorMuon::new(0.9).into(),
                RelativeUpdate::floor_per_output(0.5).with_most(Some(0.9)).into(),
                RadialBrake::new(0.5, 1.0).into(),
            ];
            let decay = WeightDecay::CautiousAfter(0.5.into());
            MuonConfig::new().with_parts(parts).with_weight_decay(decay)
        }),
        ("settings of rules", {
            let table = AdamWConfig::new().with_beta_1(0.7).with_beta_2(0.8).with_weight_decay(0.2);
            MuonConfig::new()
                .with_parts(vec![NorMuon::new(0.9).into()])
                .with_rule(RoutingRule::muon(r"weights\.1").momentum(0.8).lr_factor(2.0))
                .with_rule(RoutingRule::muon("weight_stack").batch().weight_decay(0.4))
                .with_rule(RoutingRule::muon(r"weights\.4").split([2, 4]).of_inputs())
                .with_rule(RoutingRule::elementwise("table", table).lr_factor(0.5))
                .with_rule(RoutingRule::elementwise("bias", LionConfig::new()))
        }),
        ("rescaled rows", {
            let iteration = NewtonSchulzConfig::new().with_coefficients(Coefficients::Aol);
            let iteration = iteration.with_normalization(Normalization::Aol);
            MuonConfig::new()
                .with_newton_schulz(iteration)
                .with_parts(vec![AdaMuon::new(0.9).into()])
        }),
        ("momentum in 8 bits", {
            MuonConfig::new()
                .with_parts(vec![NorMuon::new(0.9).into()])
                .with_state_dtype(StateDtype::Int8)
        }),
        ("no parts", MuonConfig::new().with_weight_decay(WeightDecay::SquaredRate(50.0.into()))),
    ]
}

/// Returns a configuration with another momentum, unless a mixture of momenta takes its place.
pub fn with_momentum(muon: MuonConfig, momentum: Schedule) -> MuonConfig {
    if muon.parts.iter().any(|part| matches!(part, Part::MomentumMixture(_))) {
        return muon;
    }
    let momentum = muon.momentum.clone().with_momentum(momentum);
    muon.with_momentum(momentum)
}

/// Returns a configuration whose update needs no more of values than to apply directions to them:
/// without the parts and decays that read or constrain values, and with decoupled weight decay
/// instead of one before or after them.
fn separable(mut muon: MuonConfig) -> MuonConfig {
    muon.parts.retain(|part| {
        !matches!(
            part,
            Part::EmaNesterov(_)
                | Part::Hyperball(_)
                | Part::MaxNorm(_)
                | Part::Muown(_)
                | Part::RadialBrake(_)
                | Part::RelativeUpdate(_)
        )
    });
    for part in &mut muon.parts {
        if let Part::Namo(namo) = part {
            namo.weight_decay = 0.0;
        }
    }
    muon.weight_decay = match muon.weight_decay {
        WeightDecay::Coupled(decay) | WeightDecay::CautiousAfter(decay) => {
            WeightDecay::Decoupled(decay)
        }
        decay => decay,
    };
    muon
}

/// Matrices of one shape in several parameters, a matrix of two blocks, a stack of matrices, and
/// for the rest a vector that every rank updates whole and a table that is cut among ranks.
#[derive(Module, Debug)]
pub struct Net {
    /// Matrices, the last of which is split into two blocks.
    pub weights: Vec<Param<Tensor<2>>>,
    /// `[3, 6, 10]`.
    pub weight_stack: Param<Tensor<3>>,
    /// `[5]`.
    pub bias: Param<Tensor<1>>,
    /// `[9, 4]`.
    pub table: Param<Tensor<2>>,
}

impl Net {
    /// Creates the model, with the same values on every device.
    pub fn new(device: &Device) -> Self {
        let ones = |shape: [usize; 2]| {
            Param::from_tensor(Tensor::<2>::ones(shape, (device, DType::F32)).require_grad())
        };
        let stack = Tensor::<3>::ones([3, 6, 10], (device, DType::F32));
        let bias = Tensor::<1>::ones([5], (device, DType::F32));
        let net = Self {
            weights: vec![ones([6, 10]), ones([10, 6]), ones([6, 10]), ones([7, 7]), ones([6, 14])],
            weight_stack: Param::from_tensor(stack.require_grad()),
            bias: Param::from_tensor(bias.require_grad()),
            table: ones([9, 4]),
        };
        net.map(&mut Fixed::new(5))
    }

    /// Creates the model in a type, with values that bfloat16 has in half precision.
    pub fn of(dtype: DType, device: &Device) -> Self {
        let net = Self::new(device);
        if dtype == DType::F32 { net } else { net.map(&mut Rounded(dtype)) }
    }

    /// Returns the gradients of a step, in the type of the model. One of the second step is not
    /// finite.
    pub fn gradients(&self, step: u64) -> GradientsParams {
        let mut gradients = match self.table.val().dtype() {
            DType::F32 => gradients(self, step),
            half => precision::gradients(self, step, half),
        };
        if step == 1 {
            let id = self.weights[2].id;
            let gradient = gradients.remove::<2>(id).expect("the matrix has a gradient");
            gradients.register(id, gradient.mul_scalar(f32::NAN));
        }
        gradients
    }
}

/// Every combination, also without what needs whole values, in float32 and with float32 master
/// weights in bfloat16, if the device has it.
pub fn in_types() -> impl Iterator<Item = (String, MuonConfig, DType)> {
    let all = combinations().into_iter();
    let all = all.flat_map(|(name, muon)| [(name, separable(muon.clone())), (name, muon)]);
    let halves = has(FloatDType::BF16).then_some(DType::BF16);
    let types: Vec<DType> = [DType::F32].into_iter().chain(halves).collect();
    all.flat_map(move |(name, muon)| {
        let muon = routed(muon);
        types.clone().into_iter().map(move |dtype| {
            let muon = match dtype {
                DType::F32 => muon.clone(),
                _ => muon.clone().with_master_weights(MasterWeights::Full),
            };
            (format!("{name}, {}", dtype.name()), muon, dtype)
        })
    })
}

/// Adds the rules for a [`Net`], before those that the configuration has.
pub fn routed(mut config: MuonConfig) -> MuonConfig {
    let own = std::mem::take(&mut config.rules);
    let mut config = config
        .with_rule(RoutingRule::muon("weights"))
        .with_rule(RoutingRule::muon(r"weights\.2").layout(MatrixLayout::OutIn))
        .with_rule(RoutingRule::muon(r"weights\.4").split([10, 4]))
        .with_rule(RoutingRule::muon("weight_stack").batch())
        .with_rule(RoutingRule::adamw("table"));
    config.rules.extend(own);
    config
}
