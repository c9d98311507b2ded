//! A small modern GPT: RMSNorm before every layer, rotary position embeddings, normalised queries
//! and keys, squared ReLU, and an output head that does not share the weights of the embedding.

use burn::config::Config;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
    RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use distmuon::{MaxLogits, QkClipConfig, QkClipRule};

/// Sizes of a model.
#[derive(Config, Debug, PartialEq)]
pub struct GptConfig {
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub context: usize,
    pub vocabulary: usize,
    /// Normalises queries and keys. Without it, the logits of attention have no bound.
    #[config(default = true)]
    pub qk_norm: bool,
}

#[derive(Module, Debug)]
pub struct Gpt {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    rope: RotaryEncoding,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Option<RmsNorm>,
    key_norm: Option<RmsNorm>,
    heads: usize,
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl GptConfig {
    /// Makes a model with random weights from the device's generator.
    pub fn init(&self, device: &Device) -> Gpt {
        let rope = RotaryEncodingConfig::new(self.context, self.width / self.heads);
        Gpt {
            embedding: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(Initializer::Normal { mean: 0.0, std: 0.5 })
                .init(device),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: self.norm(self.width, device),
            head: self.linear(self.width, self.vocabulary, device),
            rope: rope.init(device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let head = self.width / self.heads;
        Block {
            attention_norm: self.norm(self.width, device),
            attention: Attention {
                query: self.linear(self.width, self.width, device),
                key: self.linear(self.width, self.width, device),
                value: self.linear(self.width, self.width, device),
                output: self.linear(self.width, self.width, device),
                query_norm: self.qk_norm.then(|| self.norm(head, device)),
                key_norm: self.qk_norm.then(|| self.norm(head, device)),
                heads: self.heads,
            },
            mlp_norm: self.norm(self.width, device),
            mlp: Mlp {
                up: self.linear(self.width, 4 * self.width, device),
                down: self.linear(4 * self.width, self.width, device),
            },
        }
    }

    /// QK-clip of all attentions at a threshold.
    pub fn qk_clip(&self, tau: f64) -> QkClipConfig {
        let rule = QkClipRule::multi_head(r"^blocks\.\d+\.attention$", self.heads);
        QkClipConfig::new().with_tau(tau).with_rule(rule)
    }

    fn linear(&self, inputs: usize, outputs: usize, device: &Device) -> Linear {
        let std = 0.5 / (inputs as f64).sqrt();
        LinearConfig::new(inputs, outputs)
            .with_bias(false)
            .with_initializer(Initializer::Normal { mean: 0.0, std })
            .init(device)
    }

    fn norm(&self, width: usize, device: &Device) -> RmsNorm {
        RmsNormConfig::new(width).init(device)
    }
}

/// Converts parameters to a type.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0).detach().require_grad())
    }
}

impl Gpt {
    /// The model with parameters of a type.
    pub fn cast(self, dtype: DType) -> Self {
        if dtype == DType::F32 { self } else { self.map(&mut Cast(dtype)) }
    }

    /// Logits of the next token at every position, `[batch, length]` to
    /// `[batch, length, vocabulary]`. The attentions report their maximum logits, if there is
    /// something to report them to.
    pub fn forward(
        &self,
        tokens: Tensor<2, Int>,
        mut max_logits: Option<&mut MaxLogits>,
    ) -> Tensor<3> {
        let mut x = self.embedding.forward(tokens);
        for (index, block) in self.blocks.iter().enumerate() {
            let (next, maxima) = block.forward(x, &self.rope, max_logits.is_some());
            if let Some((logits, maxima)) = max_logits.as_deref_mut().zip(maxima) {
                logits.report(format!("blocks.{index}.attention"), maxima);
            }
            x = next;
        }
        self.head.forward(self.norm.forward(x))
    }

    /// Mean cross-entropy in nats per token; `tokens` and `targets` are `[batch, length]`.
    pub fn loss(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        max_logits: Option<&mut MaxLogits>,
    ) -> Tensor<1> {
        let logits = self.forward(tokens, max_logits).cast(DType::F32);
        let [batch, length, vocabulary] = logits.dims();
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(
            logits.reshape([batch * length, vocabulary]),
            targets.reshape([batch * length]),
        )
    }
}

impl Block {
    /// The output, and the maximum logits of the attention if they are wanted.
    fn forward(
        &self,
        x: Tensor<3>,
        rope: &RotaryEncoding,
        wants_logits: bool,
    ) -> (Tensor<3>, Option<Tensor<1>>) {
        let normalized = self.attention_norm.forward(x.clone());
        let (mixed, maxima) = self.attention.forward(normalized, rope, wants_logits);
        let x = x + mixed;
        (x.clone() + self.mlp.forward(self.mlp_norm.forward(x)), maxima)
    }
}

impl Attention {
    /// The output, and the maximum logits if they are wanted.
    fn forward(
        &self,
        x: Tensor<3>,
        rope: &RotaryEncoding,
        wants_logits: bool,
    ) -> (Tensor<3>, Option<Tensor<1>>) {
        let [batch, length, width] = x.dims();
        let heads = |x: Tensor<3>| {
            x.reshape([batch, length, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let turned = |x: Tensor<4>, norm: &Option<RmsNorm>| {
            let (x, dtype) =
                (norm.iter().fold(x, |x, norm| norm.forward(x)), self.query.weight.dtype());
            // In float32, the type of the rotations.
            rope.forward(x.cast(DType::F32)).cast(dtype)
        };
        let query = turned(heads(self.query.forward(x.clone())), &self.query_norm);
        let key = turned(heads(self.key.forward(x.clone())), &self.key_norm);
        let value = heads(self.value.forward(x));
        // Burn's attention does not return them.
        let maxima = wants_logits.then(|| max_logits(query.clone().inner(), key.clone().inner()));
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let mixed = attention(query, key, value, None, None, causal);
        (self.output.forward(mixed.swap_dims(1, 2).reshape([batch, length, width])), maxima)
    }
}

/// The maximum logit of every head of causal attention, from `[batch, heads, length, width]`.
fn max_logits(query: Tensor<4>, key: Tensor<4>) -> Tensor<1> {
    let [batch, heads, length, width] = query.dims();
    let scores = query.matmul(key.transpose()).div_scalar((width as f64).sqrt());
    let future = Tensor::<2, Bool>::tril_mask([length, length], 0, &scores.device());
    let future = future.reshape([1, 1, length, length]).expand([batch, heads, length, length]);
    let scores = scores.mask_fill(future, f32::MIN);
    scores.swap_dims(0, 1).reshape([heads, batch * length * length]).max_dim(1).reshape([heads])
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(relu(self.up.forward(x)).square())
    }
}
