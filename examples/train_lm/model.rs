//! A small modern GPT: RMSNorm before every layer, rotary position embeddings, normalised queries
//! and keys, squared ReLU, and an output head that does not share the weights of the embedding.

use burn::config::Config;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
    RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor};

/// Sizes of a model.
#[derive(Config, Debug, PartialEq)]
pub struct GptConfig {
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub context: usize,
    pub vocabulary: usize,
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
    query_norm: RmsNorm,
    key_norm: RmsNorm,
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
                query_norm: self.norm(head, device),
                key_norm: self.norm(head, device),
                heads: self.heads,
            },
            mlp_norm: self.norm(self.width, device),
            mlp: Mlp {
                up: self.linear(self.width, 4 * self.width, device),
                down: self.linear(4 * self.width, self.width, device),
            },
        }
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

impl Gpt {
    /// Logits of the next token at every position, `[batch, length]` to
    /// `[batch, length, vocabulary]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, &self.rope));
        self.head.forward(self.norm.forward(x))
    }

    /// Mean cross-entropy in nats per token; both arguments are `[batch, length]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = self.forward(tokens);
        let [batch, length, vocabulary] = logits.dims();
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(
            logits.reshape([batch * length, vocabulary]),
            targets.reshape([batch * length]),
        )
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), rope);
        x.clone() + self.mlp.forward(self.mlp_norm.forward(x))
    }
}

impl Attention {
    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let heads = |x: Tensor<3>| {
            x.reshape([batch, length, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let query = rope.forward(self.query_norm.forward(heads(self.query.forward(x.clone()))));
        let key = rope.forward(self.key_norm.forward(heads(self.key.forward(x.clone()))));
        let value = heads(self.value.forward(x));
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let mixed = attention(query, key, value, None, None, causal);
        self.output.forward(mixed.swap_dims(1, 2).reshape([batch, length, width]))
    }
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(relu(self.up.forward(x)).square())
    }
}
