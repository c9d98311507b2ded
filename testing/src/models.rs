//! Models, their weights, gradients and records.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};
use burn_pack::Reader;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::device::is_flex;

/// A model with a parameter for every rule, and with the same values on every device.
#[derive(Module, Debug)]
pub struct ExpertNet {
    /// `[vocabulary, 6]`.
    pub embedding: Embedding,
    /// Three layers with biases: `[6, 6]`, `[6, 9]` and `[9, 6]`.
    pub layers: Vec<Linear>,
    /// `[2, 5, 4]`.
    pub experts: Param<Tensor<3>>,
    /// `[6, vocabulary]`, with a bias.
    pub head: Linear,
}

impl ExpertNet {
    /// Creates the model for a size of the vocabulary.
    pub fn new(vocabulary: usize, device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let net = Self {
            embedding: EmbeddingConfig::new(vocabulary, 6).init(device),
            layers: vec![linear(6, 6), linear(6, 9), linear(9, 6)],
            experts: Param::from_tensor(Tensor::ones([2, 5, 4], device).require_grad()),
            head: linear(6, vocabulary),
        };
        net.map(&mut Fixed::new(5))
    }
}

/// A model of linear layers.
#[derive(Module, Debug)]
pub struct Layers {
    /// The layers.
    pub layers: Vec<Linear>,
}

impl Layers {
    /// Creates equal square layers without biases, with random values.
    pub fn square(count: usize, width: usize, device: &Device) -> Self {
        let layer = || LinearConfig::new(width, width).with_bias(false).init(device);
        Self { layers: (0..count).map(|_| layer()).collect() }
    }
}

/// Returns the bytes of a tensor.
pub fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u8> {
    tensor.to_data().as_bytes().to_vec()
}

/// Replaces parameters by random values in float32, on devices of any default type, from a
/// generator that no other test uses.
pub struct Fixed(StdRng);

impl Fixed {
    /// Creates the generator from a seed.
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }
}

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let values = (0..old.shape().num_elements()).map(|_| self.0.random_range(-0.3..0.3));
            let values = TensorData::new(values.collect::<Vec<f32>>(), old.shape());
            Tensor::from_data(values, (&old.device(), DType::F32)).require_grad()
        })
    }
}

/// Returns gradients of a model that depend on the seed only.
pub fn gradients<M: Module>(model: &M, seed: u64) -> GradientsParams {
    struct Random(StdRng, GradientsParams);
    impl ModuleVisitor for Random {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner();
            let values = (0..value.shape().num_elements()).map(|_| self.0.random_range(-1.0..1.0));
            let values = TensorData::new(values.collect::<Vec<f32>>(), value.shape());
            let gradient = Tensor::from_data(values, (&value.device(), value.dtype()));
            self.1.register::<D>(param.id, gradient);
        }
    }
    let mut random = Random(StdRng::seed_from_u64(seed), GradientsParams::new());
    model.visit(&mut random);
    random.1
}

/// Returns gradients of a model in float32 times a factor, in a type: those of a scaled loss.
///
/// # Panics
///
/// If a parameter does not have a gradient.
pub fn scaled<M: Module>(
    model: &M,
    gradients: GradientsParams,
    factor: f64,
    dtype: DType,
) -> GradientsParams {
    struct Scale(GradientsParams, f64, DType);
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.remove::<D>(param.id).expect("every parameter has a gradient");
            self.0.register(param.id, gradient.mul_scalar(self.1).cast(self.2));
        }
    }
    let mut scale = Scale(gradients, factor, dtype);
    model.visit(&mut scale);
    scale.0
}

/// Returns the bytes of every parameter of a model.
pub fn weights<M: Module>(model: &M) -> Vec<Vec<u8>> {
    struct Weights(Vec<Vec<u8>>);
    impl ModuleVisitor for Weights {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(bits(&param.val()));
        }
    }
    let mut weights = Weights(vec![]);
    model.visit(&mut weights);
    weights.0
}

/// Returns the tensors of a record, as bytes.
pub fn tensors(record: Bytes) -> BTreeMap<String, Vec<u8>> {
    let reader = Reader::from_bytes(record).expect("a record can be read");
    let tensor = |name: &str| reader.tensor_data(name).expect("the record has this tensor");
    reader.tensor_names().into_iter().map(|name| (name.to_owned(), tensor(name))).collect()
}

/// Returns the elements of every parameter of a model, one parameter after the other.
///
/// # Panics
///
/// If a parameter is neither quantized nor in float32.
pub fn values<M: Module>(model: &M) -> Vec<f32> {
    struct Values(Vec<f32>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val();
            let value = match value.dtype() {
                DType::QFloat(_) => value.dequantize(),
                _ => value,
            };
            let values = value.into_data().try_into_vec::<f32>();
            self.0.extend(values.expect("the parameter is in float32"));
        }
    }
    let mut values = Values(vec![]);
    model.visit(&mut values);
    values.0
}

/// Returns the largest difference of two elements at the same place, or NaN if one of them is NaN.
///
/// # Panics
///
/// If the lengths differ.
pub fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // In this order, NaN is larger than any number.
    differences.max_by(f32::total_cmp).unwrap_or(0.0)
}

/// Compares the [`values`] of a model with those of another run: bit for bit on Flex.
///
/// # Panics
///
/// If they differ.
pub fn assert_same_weights(case: &str, actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len(), "{case}");
    let exact = is_flex();
    for (actual, expected) in actual.iter().zip(expected) {
        let error = (actual - expected).abs();
        // The error of two NaN is not zero, and that of two zeros of different signs is.
        let has_same_bits = || error == 0.0 && actual.to_bits() == expected.to_bits();
        let is_same = if exact { has_same_bits() } else { error < 1e-3 };
        assert!(is_same, "{case}: {actual} for {expected}");
    }
}
