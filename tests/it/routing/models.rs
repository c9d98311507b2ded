//! Small models with common structures.

use burn::module::{Module, Param};
use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoder,
    TransformerDecoderConfig, TransformerEncoder, TransformerEncoderConfig,
    TransformerEncoderLayer,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Gru, GruConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

/// A module with `new`, which makes every field by the expression after it.
macro_rules! modules {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty = $init:expr),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Module, Debug)]
        pub struct $name { $(pub $field: $type),+ }

        impl $name {
            pub fn new() -> Self {
                Self { $($field: $init),+ }
            }
        }
    )+};
}

/// The width of all models.
const WIDTH: usize = 16;

pub fn device() -> Device {
    Device::default().autodiff()
}

pub fn linear(inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs).init(&device())
}

pub fn square() -> Linear {
    linear(WIDTH, WIDTH)
}

pub fn bare<const D: usize>(shape: [usize; D]) -> Param<Tensor<D>> {
    Param::from_tensor(Tensor::ones(shape, &device()).require_grad())
}

fn embedding() -> Embedding {
    EmbeddingConfig::new(32, WIDTH).init(&device())
}

fn norm() -> LayerNorm {
    LayerNormConfig::new(WIDTH).init(&device())
}

pub fn conv(inputs: usize, outputs: usize, size: usize) -> Conv2d {
    Conv2dConfig::new([inputs, outputs], [size, size]).init(&device())
}

pub fn upscaling(inputs: usize, outputs: usize) -> ConvTranspose2d {
    ConvTranspose2dConfig::new([inputs, outputs], [2, 2]).init(&device())
}

fn batch_norm() -> BatchNorm {
    BatchNormConfig::new(WIDTH).init(&device())
}

pub fn attention() -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(WIDTH, 2).init(&device())
}

fn feed_forward() -> PositionWiseFeedForward {
    PositionWiseFeedForwardConfig::new(WIDTH, 4 * WIDTH).init(&device())
}

fn encoder() -> TransformerEncoder {
    TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 2, 2).init(&device())
}

fn decoder() -> TransformerDecoder {
    TransformerDecoderConfig::new(WIDTH, 4 * WIDTH, 2, 2).init(&device())
}

fn encoder_layer() -> TransformerEncoderLayer {
    encoder().layers.remove(0)
}

fn lstm() -> Lstm {
    LstmConfig::new(WIDTH, WIDTH, true).init(&device())
}

fn gru() -> Gru {
    GruConfig::new(WIDTH, WIDTH, true).init(&device())
}

modules! {
    Block {
        attn: MultiHeadAttention = attention(),
        mlp: PositionWiseFeedForward = feed_forward(),
        norm: LayerNorm = norm(),
    }
    Gpt {
        wte: Embedding = embedding(),
        wpe: Embedding = embedding(),
        blocks: Vec<Block> = vec![Block::new(), Block::new()],
        norm: LayerNorm = norm(),
        lm_head: Linear = linear(WIDTH, 32),
    }
    GptOfFields {
        tokens: Embedding = embedding(),
        first: Block = Block::new(),
        second: Block = Block::new(),
        fc: Linear = linear(WIDTH, 32),
    }
    Tied {
        tokens: Embedding = embedding(),
        blocks: Vec<Block> = vec![Block::new()],
    }
    TiedOfFields {
        tokens: Embedding = embedding(),
        first: Block = Block::new(),
        second: Block = Block::new(),
    }
    /// Attention that only the names of its fields reveal.
    Mixer {
        q_proj: Linear = square(),
        k_proj: Linear = square(),
        v_proj: Linear = square(),
        output: Linear = square(),
    }
    OfMixer {
        tokens: Embedding = embedding(),
        mixer: Mixer = Mixer::new(),
        classifier: Linear = linear(WIDTH, 4),
    }
    OfAttention {
        attn: MultiHeadAttention = attention(),
        norm: LayerNorm = norm(),
        fc: Linear = linear(WIDTH, 4),
    }
    /// Everything in one module.
    Flat {
        tokens: Embedding = embedding(),
        query: Linear = square(),
        key: Linear = square(),
        value: Linear = square(),
        output: Linear = square(),
        head: Linear = linear(WIDTH, 32),
    }
    OfEncoder {
        tokens: Embedding = embedding(),
        encoder: TransformerEncoder = encoder(),
        head: Linear = linear(WIDTH, 4),
    }
    OfEncoderLayer {
        layer: TransformerEncoderLayer = encoder_layer(),
        fc: Linear = linear(WIDTH, 4),
    }
    OfDecoder {
        tokens: Embedding = embedding(),
        decoder: TransformerDecoder = decoder(),
        output: Linear = linear(WIDTH, 32),
    }
    EncoderDecoder {
        source: Embedding = embedding(),
        target: Embedding = embedding(),
        encoder: TransformerEncoder = encoder(),
        decoder: TransformerDecoder = decoder(),
        generator: Linear = linear(WIDTH, 32),
    }
    Vit {
        stem: Conv2d = conv(3, WIDTH, 4),
        cls_token: Param<Tensor<3>> = bare([1, 1, WIDTH]),
        pos: Param<Tensor<2>> = bare([17, WIDTH]),
        blocks: Vec<Block> = vec![Block::new()],
        norm: LayerNorm = norm(),
        head: Linear = linear(WIDTH, 10),
    }
    /// Patches by a `Linear`, positions of three dimensions.
    PatchVit {
        patch_embed: Linear = linear(48, WIDTH),
        pos_embed: Param<Tensor<3>> = bare([1, 16, WIDTH]),
        register: Param<Tensor<2>> = bare([4, WIDTH]),
        scale: Param<Tensor<2>> = bare([1, WIDTH]),
        blocks: Vec<Block> = vec![Block::new()],
        head: Linear = linear(WIDTH, 10),
    }
    Dense { dense: Linear = square() }
    DenseNorm { dense: Linear = square(), norm: LayerNorm = norm() }
    BertProjections { query: Linear = square(), key: Linear = square(), value: Linear = square() }
    BertSelf {
        projections: BertProjections = BertProjections::new(),
        output: DenseNorm = DenseNorm::new(),
    }
    BertLayer {
        attention: BertSelf = BertSelf::new(),
        intermediate: Dense = Dense::new(),
        output: DenseNorm = DenseNorm::new(),
    }
    BertEmbeddings {
        word: Embedding = embedding(),
        position: Embedding = embedding(),
        norm: LayerNorm = norm(),
    }
    Bert {
        embeddings: BertEmbeddings = BertEmbeddings::new(),
        layer: BertLayer = BertLayer::new(),
        pooler: Dense = Dense::new(),
    }
    BertClassifier { bert: Bert = Bert::new(), classifier: Linear = linear(WIDTH, 2) }
    MoeOfLinears {
        tokens: Embedding = embedding(),
        router: Linear = linear(WIDTH, 3),
        experts: Vec<Linear> = vec![square(), square(), square()],
        head: Linear = linear(WIDTH, 32),
    }
    Experts {
        up: Param<Tensor<3>> = bare([3, WIDTH, 4 * WIDTH]),
        up_bias: Param<Tensor<2>> = bare([3, 4 * WIDTH]),
        down: Param<Tensor<3>> = bare([3, 4 * WIDTH, WIDTH]),
    }
    WithoutViews {
        blocks: Vec<Experts> = vec![Experts::new(), Experts::new()],
        own_conv: Param<Tensor<3>> = bare([8, 4, 3]),
        scale_of_heads: Param<Tensor<3>> = bare([4, 1, 8]),
        weights_of_modes: Param<Tensor<3>> = bare([8, 8, 6]),
        head: Linear = linear(WIDTH, 4),
    }
    MoeOfStacks {
        tokens: Embedding = embedding(),
        router: Linear = linear(WIDTH, 3),
        experts: Experts = Experts::new(),
        head: Linear = linear(WIDTH, 32),
    }
    LstmClassifier {
        tokens: Embedding = embedding(),
        lstm: Lstm = lstm(),
        fc: Linear = linear(WIDTH, 4),
    }
    LstmAlone { input: Linear = square(), lstm: Lstm = lstm() }
    GruRegression { gru: Gru = gru(), output: Linear = linear(WIDTH, 1) }
    ConvNet {
        conv1: Conv2d = conv(3, WIDTH, 3),
        norm: BatchNorm = batch_norm(),
        conv2: Conv2d = conv(WIDTH, WIDTH, 3),
        fc1: Linear = square(),
        fc2: Linear = linear(WIDTH, 10),
    }
    UNet {
        down: Vec<Conv2d> = vec![conv(3, WIDTH, 3), conv(WIDTH, 2 * WIDTH, 3)],
        up: ConvTranspose2d = upscaling(2 * WIDTH, WIDTH),
        output: Conv2d = conv(WIDTH, 2, 1),
    }
    MlpHead { up: Linear = linear(WIDTH, 16), down: Linear = linear(16, 4) }
    OfMlpHead { body: Linear = square(), head: MlpHead = MlpHead::new() }
    OfStackHead {
        body: Linear = square(),
        classifier: Vec<Linear> = vec![square(), linear(WIDTH, 4)],
    }
    ActorCritic {
        policy_head: Linear = linear(WIDTH, 4),
        value_head: Linear = linear(WIDTH, 1),
        trunk: Linear = square(),
    }
    Unembedding {
        embed: Embedding = embedding(),
        hidden: Linear = square(),
        unembed: Linear = linear(WIDTH, 32),
    }
    HeadFirst { classifier: Linear = linear(WIDTH, 4), hidden: Linear = square() }
    Wrapped { model: HeadFirst = HeadFirst::new(), projection: HeadFirst = HeadFirst::new() }
    HeadsInBlocks { blocks: Vec<OfMlpHead> = vec![OfMlpHead::new()], last: Linear = square() }
    Embedder { embedder: Vec<Block> = vec![Block::new()], time_embed: Vec<Linear> = vec![square()] }
}

impl HeadFirst {
    pub fn gradients(&self) -> GradientsParams {
        let x = Tensor::<2>::ones([1, WIDTH], &device());
        let loss = self.classifier.forward(self.hidden.forward(x)).sum();
        GradientsParams::from_grads(loss.backward(), self)
    }
}
