//! A small modern GPT: RMSNorm before every layer, rotary position embeddings, normalised queries
//! and keys, squared ReLU, and an output head that does not share the weights of the embedding.

use burn::config::Config;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
    RotaryEncodingConfig,
};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use distmuon::comm::Communicator;
use distmuon::distributed::Place;
use distmuon::{MaxLogits, QkClipConfig, QkClipRule, parallel};

use super::experts::Experts;

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
    /// The number of networks in every layer of which one computes a token.
    #[config(default = 1)]
    pub experts: usize,
}

#[derive(Module, Debug)]
pub struct Gpt {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    rotation: Rotation,
}

/// Rotary position embeddings: at every position, each pair of a head's elements is turned by an
/// angle of its own.
#[derive(Module, Debug)]
struct Rotation {
    /// `[context, head]`.
    cosines: Tensor<2>,
    /// With the signs of the turned pairs.
    sines: Tensor<2>,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    /// One of both.
    mlp: Option<Mlp>,
    experts: Option<Experts>,
}

#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Option<RmsNorm>,
    key_norm: Option<RmsNorm>,
    /// Outputs of a head.
    head: usize,
    region: Region,
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
    region: Region,
}

/// The ranks that have the other slices of a layer, if it is cut.
#[derive(Module, Debug, Default)]
pub struct Region {
    #[module(skip)]
    group: Option<Communicator>,
}

impl Region {
    pub fn enter<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.group.iter().fold(x, parallel::enter)
    }

    pub fn leave<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.group.iter().fold(x, parallel::leave)
    }

    /// The values of all heads, from those of this rank's.
    fn of_all_heads(&self, values: Tensor<1>) -> Tensor<1> {
        self.group.iter().fold(values, |values, group| {
            let counts = vec![values.dims()[0]; group.size()];
            let heads: usize = counts.iter().sum();
            let nothing = Tensor::full([heads], f32::NAN, &values.device());
            // A pass returns no error: the next step does.
            let all = group.all_gather(values, &counts).and_then(|all| all.wait());
            all.unwrap_or(nothing)
        })
    }
}

impl GptConfig {
    /// Makes a model with random weights from the device's generator.
    pub fn init(&self, device: &Device) -> Gpt {
        Gpt {
            embedding: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(Initializer::Normal { mean: 0.0, std: 0.5 })
                .init(device),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: self.norm(self.width, device),
            head: self.linear(self.width, self.vocabulary, device),
            rotation: Rotation::new(self.context, self.width / self.heads, device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let (head, hidden) = (self.width / self.heads, 4 * self.width);
        Block {
            attention_norm: self.norm(self.width, device),
            attention: Attention {
                query: self.linear(self.width, self.width, device),
                key: self.linear(self.width, self.width, device),
                value: self.linear(self.width, self.width, device),
                output: self.linear(self.width, self.width, device),
                query_norm: self.qk_norm.then(|| self.norm(head, device)),
                key_norm: self.qk_norm.then(|| self.norm(head, device)),
                head,
                region: Region::default(),
            },
            mlp_norm: self.norm(self.width, device),
            mlp: (self.experts == 1).then(|| Mlp {
                up: self.linear(self.width, hidden, device),
                down: self.linear(hidden, self.width, device),
                region: Region::default(),
            }),
            experts: (self.experts > 1)
                .then(|| Experts::new(self.experts, self.width, hidden, device)),
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

    /// The places of parameters for tensor parallelism along an axis: columns of the layers that
    /// begin a region, and rows of those that end it.
    pub fn places_of_slices(&self, axis: &str) -> Vec<Place> {
        let has = |has: fn(&Block) -> bool| self.blocks.iter().any(has);
        let mut places = vec![
            Place::shard(r"\.attention\.(query|key|value)\.weight$", axis, 1),
            Place::shard(r"\.attention\.output\.weight$", axis, 0),
        ];
        if has(|block| block.attention.query_norm.is_some()) {
            // They act on the heads of one rank.
            places.push(Place::partial(r"\.(query|key)_norm\.", axis));
        }
        if has(|block| block.mlp.is_some()) {
            places.push(Place::shard(r"\.mlp\.up\.weight$", axis, 1));
            places.push(Place::shard(r"\.mlp\.down\.weight$", axis, 0));
        }
        if has(|block| block.experts.is_some()) {
            places.push(Place::shard(r"\.experts\.up$", axis, 2));
            places.push(Place::shard(r"\.experts\.down$", axis, 1));
        }
        places
    }

    /// The place of whole experts along an axis.
    pub fn places_of_experts(axis: &str) -> Place {
        Place::shard(r"\.experts\.(up|down)$", axis, 0)
    }

    /// The model whose layers have slices on the ranks of one group, and experts on those of
    /// another, or all of them without the group.
    pub fn on_ranks(
        mut self,
        slices: Option<&Communicator>,
        experts: Option<&Communicator>,
    ) -> Self {
        for block in &mut self.blocks {
            block.attention.region.group = slices.cloned();
            block.mlp.iter_mut().for_each(|mlp| mlp.region.group = slices.cloned());
            if let Some(mixture) = &mut block.experts {
                mixture.region.group = slices.cloned();
                mixture.group = experts.cloned();
            }
        }
        self
    }

    /// Logits of the next token at every position, `[batch, length]` to
    /// `[batch, length, vocabulary]`. The attentions report their maximum logits, if there is
    /// something to report them to.
    pub fn forward(
        &self,
        tokens: Tensor<2, Int>,
        mut max_logits: Option<&mut MaxLogits>,
    ) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let mut x = self.embedding.forward(tokens);
        let future = future(length, (&x.device(), x.dtype()));
        for (index, block) in self.blocks.iter().enumerate() {
            let context = (&self.rotation, &future);
            let (next, maxima) = block.forward(x, context, max_logits.is_some());
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
        context: Context,
        wants_logits: bool,
    ) -> (Tensor<3>, Option<Tensor<1>>) {
        let normalized = self.attention_norm.forward(x.clone());
        let (mixed, maxima) = self.attention.forward(normalized, context, wants_logits);
        let x = x + mixed;
        let normalized = self.mlp_norm.forward(x.clone());
        let computed = match (&self.mlp, &self.experts) {
            (Some(mlp), _) => mlp.forward(normalized),
            (None, Some(experts)) => experts.forward(normalized),
            (None, None) => unreachable!("a block has one of both"),
        };
        (x + computed, maxima)
    }
}

impl Attention {
    /// The output, and the maximum logits if they are wanted.
    fn forward(
        &self,
        x: Tensor<3>,
        (rotation, future): Context,
        wants_logits: bool,
    ) -> (Tensor<3>, Option<Tensor<1>>) {
        let [batch, length, _] = x.dims();
        // Those of this rank, in a region.
        let width = self.query.weight.dims()[1];
        let heads =
            |x: Tensor<3>| x.reshape([batch, length, width / self.head, self.head]).swap_dims(1, 2);
        let x = self.region.enter(x);
        let turned = |x: Tensor<4>, norm: &Option<RmsNorm>| {
            let (x, dtype) =
                (norm.iter().fold(x, |x, norm| norm.forward(x)), self.query.weight.dtype());
            // In float32, the type of the rotations.
            rotation.forward(x.cast(DType::F32)).cast(dtype)
        };
        let query = turned(heads(self.query.forward(x.clone())), &self.query_norm);
        let key = turned(heads(self.key.forward(x.clone())), &self.key_norm);
        let value = heads(self.value.forward(x));
        let maxima = wants_logits.then(|| {
            let maxima = max_logits(query.clone().inner(), key.clone().inner(), future);
            self.region.of_all_heads(maxima)
        });
        let weights = softmax(logits(query, key, future), 3);
        let mixed = weights.matmul(value);
        let mixed = mixed.swap_dims(1, 2).reshape([batch, length, width]);
        (self.region.leave(self.output.forward(mixed)), maxima)
    }
}

/// The rotations, and the values that are added to the logits of later tokens, for all blocks.
type Context<'a> = (&'a Rotation, &'a Tensor<2>);

/// Minus infinity for the logits of the tokens after each one of a text.
fn future(length: usize, (device, dtype): (&Device, DType)) -> Tensor<2> {
    let is_later = Tensor::<2, Bool>::tril_mask([length, length], 0, device);
    Tensor::zeros([length, length], (device, dtype)).mask_fill(is_later, f32::NEG_INFINITY)
}

/// The logits of causal attention, from `[batch, heads, length, width]`.
///
/// Burn's `attention` computes its passes with a gradient by more kernels than these, of which each
/// reads all logits.
fn logits(query: Tensor<4>, key: Tensor<4>, future: &Tensor<2>) -> Tensor<4> {
    let width = query.dims()[3];
    // The queries are scaled, since they have fewer elements than the logits.
    let logits = query.div_scalar((width as f64).sqrt()).matmul(key.transpose());
    logits + future.clone().unsqueeze()
}

/// The maximum logit of every head of causal attention.
fn max_logits(query: Tensor<4>, key: Tensor<4>, future: &Tensor<2>) -> Tensor<1> {
    let [batch, heads, length, _] = query.dims();
    let logits = logits(query, key, &future.clone().without_autodiff());
    logits.swap_dims(0, 1).reshape([heads, batch * length * length]).max_dim(1).reshape([heads])
}

impl Rotation {
    fn new(context: usize, head: usize, device: &Device) -> Self {
        let angles = RotaryEncodingConfig::new(context, head).init(device).freq_complex;
        let of = |part: usize| angles.clone().narrow(2, part, 1).reshape([context, head]);
        let signs = Tensor::<1>::from_floats([-1.0, 1.0], device).repeat_dim(0, head / 2);
        Self { cosines: of(0), sines: of(1) * signs.unsqueeze() }
    }

    /// Turns `[batch, heads, length, head]`.
    ///
    /// The elements of each pair change places by a copy: Burn's `RotaryEncoding` multiplies them
    /// by a matrix of 2 x 4, whose result has twice the elements.
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, heads, length, head] = x.dims();
        let pairs = x.clone().reshape([batch * heads, length, head / 2, 2]);
        let swapped = pairs.flip([3]).reshape([batch, heads, length, head]);
        let of = |table: &Tensor<2>| table.clone().narrow(0, 0, length).unsqueeze();
        x * of(&self.cosines) + swapped * of(&self.sines)
    }
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.region.enter(x);
        self.region.leave(self.down.forward(relu(self.up.forward(x)).square()))
    }
}
