//! A GPT in a loop of its own: gradients of two batches are added up, and clipped by their global
//! norm with the program's own code.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Int, Tensor, s};

use crate::client::{Client, Items, Run};
use crate::data::{VOCABULARY, cross_entropy, texts};

pub const LENGTH: usize = 16;
pub const WIDTH: usize = 32;

#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    transformer: TransformerEncoder,
    head: Linear,
}

impl Gpt {
    pub fn new(device: &Device) -> Self {
        let transformer = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2);
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            transformer: transformer.with_dropout(0.0).with_norm_first(true).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    /// The logits of the next tokens and these tokens, of all items one after the other.
    pub fn predict(&self, items: &Items) -> (Tensor<2>, Tensor<1, Int>) {
        let (count, device) = (items.indices.len(), &items.device);
        let texts = texts(items, LENGTH + 1);
        let positions = Tensor::<1, Int>::arange(0..LENGTH as i64, device).unsqueeze();
        let x = self.tokens.forward(texts.clone().slice(s![.., ..LENGTH]));
        let x = x + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(count, LENGTH, device);
        // The mask has `true` where a token may be seen, or the other way round.
        let x = self.transformer.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(x).reshape([-1, VOCABULARY as i32]);
        (logits, texts.slice(s![.., 1..]).reshape([-1]))
    }
}

/// Scales gradients so that their global norm is at most 1.
fn clip(model: &Gpt, gradients: GradientsParams) -> GradientsParams {
    struct Norm<'a>(&'a GradientsParams, f32);
    impl ModuleVisitor for Norm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1 += gradient.square().sum().into_scalar::<f32>();
            }
        }
    }
    struct Scale(GradientsParams, f32);
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, gradient * self.1);
            }
        }
    }
    let mut norm = Norm(&gradients, 0.0);
    model.visit(&mut norm);
    let factor = 1.0 / norm.1.sqrt().max(1.0);
    let mut scale = Scale(gradients, factor);
    model.visit(&mut scale);
    scale.0
}

impl Client for Gpt {
    type Model = Self;

    const NAME: &'static str = "gpt, accumulation and own clipping";
    const ROUTING: &'static str = "\
        AdamW (embedding): tokens.weight positions.weight\n\
        Muon: transformer.layers.*.mha.query.weight transformer.layers.*.mha.key.weight \
            transformer.layers.*.mha.value.weight transformer.layers.*.mha.output.weight \
            transformer.layers.*.pwff.linear_inner.weight \
            transformer.layers.*.pwff.linear_outer.weight\n\
        AdamW (head): head.weight";

    fn model(device: &Device) -> Self {
        Self::new(device)
    }

    fn train(run: &Run, model: Self) -> Self {
        let (mut model, mut optim) = run.start(model);
        let mut accumulator = GradientsAccumulator::new();
        for step in run.steps.clone() {
            for batch in [2 * step, 2 * step + 1] {
                let (logits, targets) = model.predict(&run.batch(batch, 8));
                let loss = cross_entropy(logits, targets) / 2.0;
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                accumulator.accumulate(&model, gradients);
            }
            let gradients = clip(&model, accumulator.grads());
            model = optim.step(run.rate(step), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    fn loss(model: &Self, items: Items) -> f32 {
        let (logits, targets) = model.predict(&items);
        cross_entropy(logits, targets).into_scalar()
    }
}
