//! LoRA and QLoRA: adapters of a frozen encoder, and a new head.

use burn::module::{Lora, Module, ParamGroup, QLora, Quantizer};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Int, Tensor};

use crate::client::{Client, Items, Run};
use crate::data::{VOCABULARY, cross_entropy, texts};

const LENGTH: usize = 8;
const WIDTH: usize = 32;
const CLASSES: usize = 4;

#[derive(Module, Debug)]
pub struct Classifier {
    embedding: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Classifier {
    /// A model that was trained for other classes, with adapters and a new head.
    fn adapted(device: &Device, adapt: impl FnOnce(Self, Lora) -> Self) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2).with_dropout(0.0);
        let pretrained = Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            encoder: encoder.init(device),
            head: LinearConfig::new(WIDTH, 2).init(device),
        };
        let adapted = adapt(pretrained, Lora::new(4, 8.0));
        Self { head: LinearConfig::new(WIDTH, CLASSES).init(device), ..adapted }
    }

    fn logits(&self, texts: Tensor<2, Int>) -> Tensor<2> {
        let x = TransformerEncoderInput::new(self.embedding.forward(texts));
        self.head.forward(self.encoder.forward(x).mean_dim(1).squeeze_dim::<2>(1))
    }

    /// The class of a text is the quarter of the vocabulary that has most of its tokens' sum.
    fn cross_entropy(&self, items: &Items) -> Tensor<1> {
        let texts = texts(items, LENGTH);
        let most = (LENGTH * VOCABULARY / CLASSES) as i32;
        let classes = texts.clone().sum_dim(1).reshape([-1]).div_scalar(most);
        cross_entropy(self.logits(texts), classes)
    }
}

impl Client for Classifier {
    type Model = Self;

    const NAME: &'static str = "adapters, a new head";
    const ROUTING: &'static str = "\
        AdamW (embedding): embedding.weight.lora.a embedding.weight.lora.b\n\
        AdamW (head): head.weight";

    fn model(device: &Device) -> Self {
        Self::adapted(device, |model, lora| model.apply_lora(lora))
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

    fn loss(model: &Self, items: Items) -> f32 {
        model.cross_entropy(&items).into_scalar()
    }
}

/// The same on matrices in 8 bits.
pub struct Quantized;

impl Client for Quantized {
    type Model = Classifier;

    const NAME: &'static str = "adapters of quantized matrices";
    const ROUTING: &'static str = Classifier::ROUTING;

    fn model(device: &Device) -> Classifier {
        let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
        let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
        quantizer.set_param_group(ParamGroup::from_predicate("weight"));
        Classifier::adapted(device, |model, lora| model.apply_qlora(QLora::new(lora, quantizer)))
    }

    fn train(run: &Run, model: Classifier) -> Classifier {
        <Classifier as Client>::train(run, model)
    }

    fn loss(model: &Classifier, items: Items) -> f32 {
        Classifier::loss(model, items)
    }
}
