//! A model in half precision, gradients that it has exactly, and its runs on one device.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, bf16};
use distmuon::{DistMuonConfig, MasterWeights, MuonConfig, RoutingRule};
use distmuon_skips::lacks;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::device::{has_type, is_flex};
use crate::models::Fixed;

/// The steps of a run.
pub const STEPS: u64 = 6;

/// A rate at which most steps are smaller than half a unit in the last place of bfloat16.
pub const LR: f64 = 2e-4;

/// Matrices for Muon, two of one shape, and tensors for AdamW, of which one is a single row.
#[derive(Module, Debug)]
pub struct Net {
    /// `[6, 10]`, `[8, 8]` and `[6, 10]`.
    pub hidden: Vec<Param<Tensor<2>>>,
    /// `[40, 32]`.
    pub table: Param<Tensor<2>>,
    /// `[7]`.
    pub gain: Param<Tensor<1>>,
}

impl Net {
    /// Creates the model in a type, with values that bfloat16 has.
    pub fn new(dtype: DType, device: &Device) -> Self {
        let matrix = |rows, columns| {
            let ones = Tensor::<2>::ones([rows, columns], (device, DType::F32));
            Param::from_tensor(ones.require_grad())
        };
        let gain = Tensor::<1>::ones([7], (device, DType::F32));
        let net = Self {
            hidden: vec![matrix(6, 10), matrix(8, 8), matrix(6, 10)],
            table: matrix(40, 32),
            gain: Param::from_tensor(gain.require_grad()),
        };
        net.map(&mut Fixed::new(3)).map(&mut Rounded(dtype))
    }
}

/// Rounds parameters to bfloat16, and converts them to a type.
pub struct Rounded(pub DType);

impl ModuleMapper for Rounded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            // On the host, since a device may have float16 and not bfloat16.
            let values = old.to_data();
            let rounded = values.iter::<f32>().map(|x| bf16::from_f32(x).to_f32());
            let rounded = TensorData::new(rounded.collect::<Vec<_>>(), old.shape());
            let rounded = Tensor::<D>::from_data(rounded, (&old.device(), DType::F32));
            rounded.cast(self.0).detach().require_grad()
        })
    }
}

/// Returns gradients of a model of any type, in a type, with values that bfloat16 has.
pub fn gradients<M: Module>(model: &M, seed: u64, dtype: DType) -> GradientsParams {
    struct Random(StdRng, DType, GradientsParams);
    impl ModuleVisitor for Random {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner();
            let count = value.shape().num_elements();
            let random = (0..count).map(|_| self.0.random_range(-0.1..0.1));
            let random = random.map(|x: f32| bf16::from_f32(x).to_f32());
            let data = TensorData::new(random.collect::<Vec<_>>(), value.shape());
            let gradient = Tensor::<D>::from_data(data, (&value.device(), DType::F32));
            self.2.register::<D>(param.id, gradient.cast(self.1));
        }
    }
    let mut random = Random(StdRng::seed_from_u64(seed), dtype, GradientsParams::new());
    model.visit(&mut random);
    random.2
}

/// Returns the elements of all parameters of a model of any type.
pub fn floats<M: Module>(model: &M) -> Vec<f32> {
    struct Values(Vec<f32>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().cast(DType::F32).into_data().iter::<f32>());
        }
    }
    let mut values = Values(vec![]);
    model.visit(&mut values);
    values.0
}

/// Returns settings with a kind of master weights, for a [`Net`].
pub fn config(master: MasterWeights) -> MuonConfig {
    MuonConfig::new()
        .with_master_weights(master)
        .with_rule(RoutingRule::muon("hidden"))
        .with_rule(RoutingRule::adamw("table"))
}

/// Returns settings of ranks with small buckets.
pub fn dist(muon: MuonConfig) -> DistMuonConfig {
    DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(0.0005)).with_small_elements(16)
}

/// Returns the weights of a [`Net`] after all steps of Burn's optimizer of single parameters.
pub fn alone(dtype: DType, config: &MuonConfig) -> Vec<f32> {
    let mut net = Net::new(dtype, &Device::default().autodiff());
    let mut optim = config.init(&net);
    for step in 0..STEPS {
        let grads = gradients(&net, step, dtype);
        net = optim.step(LR, net, grads);
    }
    floats(&net)
}

/// Returns `true` if the device has a type, and reports it otherwise.
pub fn has(dtype: FloatDType) -> bool {
    let has = has_type(dtype);
    if !has {
        lacks(DType::from(dtype).name());
    }
    has
}

/// Compares weights with those of another run: bit for bit on Flex, where a matrix has the same
/// bits in a batch and alone, and up to some units in the last place of half precision elsewhere.
///
/// # Panics
///
/// If they differ.
pub fn assert_same(actual: &[f32], expected: &[f32], case: impl std::fmt::Display) {
    assert_eq!(actual.len(), expected.len(), "{case}");
    for (actual, expected) in actual.iter().zip(expected) {
        let is_same = if is_flex() { actual == expected } else { (actual - expected).abs() < 4e-3 };
        assert!(is_same, "{case}: {actual} for {expected}");
    }
}
