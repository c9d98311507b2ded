//! The routing of small models with the structures of public programs, and of the field: every
//! parameter is where an expert would put it, or is marked by a question mark.

use burn::module::{Lora, Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, Linear, Lstm};
use burn::nn::{LayerNormConfig, LstmConfig};
use burn::tensor::Tensor;
use distmuon::{FirstLinear, MuonConfig, Routing, RoutingRule};

use super::models::{attention, bare, conv, device, linear, upscaling};
use super::{expect, reason, routing, with_rule};
use burn::nn::attention::MultiHeadAttention;

/// The paths of the guesses.
fn marked(routing: &Routing) -> Vec<&str> {
    let guesses = routing.routes().iter().filter(|route| route.reason.contains('?'));
    guesses.map(|route| route.path.as_str()).collect()
}

/// Checks the roles of a model's parameters, and that these are the guesses among them.
fn check(model: &impl Module, lines: &[&str], guesses: &[&str]) {
    let routing = routing(model);
    expect(&routing, lines);
    assert_eq!(marked(&routing), guesses, "{routing}");
}

fn embedding(count: usize, width: usize) -> Embedding {
    EmbeddingConfig::new(count, width).init(&device())
}

fn depthwise(channels: usize) -> Conv2d {
    Conv2dConfig::new([channels, channels], [3, 3]).with_groups(channels).init(&device())
}

fn conv1d(inputs: usize, outputs: usize, size: usize, groups: usize) -> Conv1d {
    Conv1dConfig::new(inputs, outputs, size).with_groups(groups).init(&device())
}

fn batch_norm(width: usize) -> BatchNorm {
    BatchNormConfig::new(width).init(&device())
}

fn norm(width: usize) -> LayerNorm {
    LayerNormConfig::new(width).init(&device())
}

fn lstm(inputs: usize, outputs: usize) -> Lstm {
    LstmConfig::new(inputs, outputs, true).init(&device())
}

// Public programs: the disagreements with an expert that they led to.

modules! {
    QNetwork {
        linears: Vec<Linear> = vec![linear(4, 256), linear(256, 256), linear(256, 2)],
    }
    PolicyAndValue {
        fc1: Linear = linear(8, 64),
        fc2: Linear = linear(64, 64),
        policy: Linear = linear(64, 4),
        value: Linear = linear(64, 1),
    }
    Vae {
        fc1: Linear = linear(784, 256),
        fc_mu: Linear = linear(256, 20),
        fc_logvar: Linear = linear(256, 20),
        fc3: Linear = linear(20, 256),
        fc4: Linear = linear(256, 784),
    }
    GeneratorLayer { fc: Linear = linear(100, 128), norm: BatchNorm = batch_norm(128) }
    Generator { layer1: GeneratorLayer = GeneratorLayer::new(), fc: Linear = linear(128, 784) }
    Discriminator {
        fc1: Linear = linear(784, 64),
        fc2: Linear = linear(64, 32),
        fc3: Linear = linear(32, 1),
    }
    SpectralConv1d { weights1: Param<Tensor<3>> = bare([32, 32, 6]) }
    Fno {
        fc0: Linear = linear(2, 32),
        spectral: Vec<SpectralConv1d> = vec![SpectralConv1d::new(), SpectralConv1d::new()],
        pointwise: Vec<Conv1d> = vec![conv1d(32, 32, 1, 1), conv1d(32, 32, 1, 1)],
        fc1: Linear = linear(32, 128),
        fc2: Linear = linear(128, 1),
    }
    InvertedResidual {
        expand: Conv2d = conv(16, 64, 1),
        depthwise: Conv2d = depthwise(64),
        norm: BatchNorm = batch_norm(64),
        project: Conv2d = conv(64, 16, 1),
    }
    MobileNet {
        stem: Conv2d = conv(3, 16, 3),
        features: Vec<InvertedResidual> = vec![InvertedResidual::new(), InvertedResidual::new()],
        classifier: Linear = linear(16, 10),
    }
    ResidualBlock {
        conv1: Conv2d = conv(16, 16, 3),
        bn1: BatchNorm = batch_norm(16),
        conv2: Conv2d = conv(16, 16, 3),
        bn2: BatchNorm = batch_norm(16),
    }
    Resnet {
        conv1: Conv2d = conv(3, 16, 7),
        bn1: BatchNorm = batch_norm(16),
        layer1: Vec<ResidualBlock> = vec![ResidualBlock::new(), ResidualBlock::new()],
        fc: Linear = linear(16, 10),
    }
    BurnUnet {
        encoder: Vec<Conv2d> = vec![conv(1, 16, 3), conv(16, 32, 3)],
        upsample: ConvTranspose2d = upscaling(32, 16),
        decoder: Conv2d = conv(32, 16, 3),
        conv_1x1: Conv2d = conv(16, 1, 1),
    }
    PatchEmbedding { conv: Conv2d = conv(3, 16, 4) }
    BurnVit {
        patch_embedding: PatchEmbedding = PatchEmbedding::new(),
        attention: MultiHeadAttention = attention(),
        classifier: Linear = linear(16, 10),
    }
    /// Mamba-3, whose biases have a head's dimensions.
    MambaBlock {
        in_proj: Linear = linear(32, 192),
        dt_bias_h: Param<Tensor<1>> = bare([8]),
        b_bias_hmr: Param<Tensor<3>> = bare([8, 1, 16]),
        c_bias_hmr: Param<Tensor<3>> = bare([8, 1, 16]),
        out_proj: Linear = linear(64, 32),
    }
    StateTracking {
        in_proj: Linear = linear(3, 32),
        mamba_block: MambaBlock = MambaBlock::new(),
        out_proj: Linear = linear(32, 5),
    }
    LstmCell {
        weight_ih: Linear = linear(1, 128),
        weight_hh: Linear = linear(32, 128),
        norm: LayerNorm = norm(128),
    }
    LstmOfCells { cells: Vec<LstmCell> = vec![LstmCell::new()], fc: Linear = linear(32, 1) }
    /// A model of language whose head is the embedding.
    Albert {
        tokens: Embedding = embedding(100, 32),
        projection: Linear = linear(32, 64),
        attention: MultiHeadAttention = attention(),
        mlm_dense: Linear = linear(64, 32),
    }
    Pooler { output: Linear = linear(64, 64) }
    BertEncoder {
        tokens: Embedding = embedding(100, 64),
        attention: MultiHeadAttention = attention(),
        pooler: Pooler = Pooler::new(),
    }
    OwnParameters {
        rel_bias: Param<Tensor<2>> = bare([225, 8]),
        relative_position_bias_table: Param<Tensor<2>> = bare([225, 8]),
        mixer: Selective = Selective::new(),
        experts: StackedExperts = StackedExperts::new(),
    }
    Selective { a_log: Param<Tensor<2>> = bare([128, 16]), d: Param<Tensor<1>> = bare([128]) }
    StackedExperts {
        w1: Param<Tensor<2>> = bare([24, 32]),
        bias_of_heads: Param<Tensor<3>> = bare([3, 1, 8]),
    }
}

#[test]
fn the_last_of_a_stack_of_linear_layers_is_a_head() {
    check(
        &QNetwork::new(),
        &[
            "AdamW (embedding): linears.0.weight",
            "Muon: linears.1.weight",
            "AdamW (head): linears.2.weight",
        ],
        &["linears.0.weight", "linears.2.weight"],
    );
}

#[test]
fn policies_and_values_are_heads() {
    check(
        &PolicyAndValue::new(),
        &[
            "AdamW (embedding): fc1.weight",
            "Muon: fc2.weight",
            "AdamW (head): policy.weight value.weight",
        ],
        &["fc1.weight", "policy.weight", "value.weight"],
    );
}

#[test]
fn distributions_of_an_autoencoder_are_marked() {
    check(
        &Vae::new(),
        &["Muon: fc1.weight fc3.weight", "AdamW (head): fc_mu.weight fc_logvar.weight fc4.weight"],
        &["fc1.weight", "fc_mu.weight", "fc_logvar.weight", "fc4.weight"],
    );
}

#[test]
fn generators_and_discriminators_have_first_and_last_layers() {
    check(
        &Generator::new(),
        &["Muon: layer1.fc.weight", "AdamW (head): fc.weight", "-: *running*"],
        &["layer1.fc.weight", "fc.weight"],
    );
    check(
        &Discriminator::new(),
        &["Muon: fc1.weight fc2.weight", "AdamW (head): fc3.weight"],
        &["fc1.weight", "fc3.weight"],
    );
}

modules! {
    Reconstruction {
        trunk: Linear = linear(16, 64),
        hidden: Linear = linear(64, 64),
        decoder: Linear = linear(64, 512),
        classifier: Linear = linear(64, 10),
    }
    NextSentence {
        tokens: Embedding = embedding(1000, 64),
        hidden: Linear = linear(64, 64),
        vocabulary: Linear = linear(64, 1000),
        nsp: Linear = linear(64, 2),
    }
    Dueling {
        fc1: Linear = linear(12, 64),
        fc2: Linear = linear(64, 64),
        value: Linear = linear(64, 1),
        advantage: Linear = linear(64, 6),
    }
}

#[test]
fn wide_outputs_beside_a_head_are_marked() {
    check(
        &Reconstruction::new(),
        &["Muon: trunk.weight hidden.weight decoder.weight", "AdamW (head): classifier.weight"],
        &["trunk.weight", "decoder.weight"],
    );
    let reason_of = |net: &Reconstruction| reason(&routing(net), "decoder.weight").to_owned();
    let expected = "hidden matrix? (no layer takes its outputs)";
    assert_eq!(reason_of(&Reconstruction::new()), expected);
    check(
        &NextSentence::new(),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: hidden.weight vocabulary.weight",
            "AdamW (head): nsp.weight",
        ],
        &["vocabulary.weight", "nsp.weight"],
    );
    check(
        &Dueling::new(),
        &["Muon: fc1.weight fc2.weight", "AdamW (head): value.weight advantage.weight"],
        &["fc1.weight", "value.weight", "advantage.weight"],
    );
}

#[test]
fn a_setting_decides_on_first_layers() {
    let with = |first| MuonConfig::new().with_first_linear(first);
    let perceptron =
        |inputs| QNetwork { linears: vec![linear(inputs, 64), linear(64, 64), linear(64, 2)] };
    for (inputs, by_default) in [(8, "AdamW (embedding)"), (9, "Muon")] {
        for (first, expected) in [
            (FirstLinear::Auto, by_default),
            (FirstLinear::AdamW, "AdamW (embedding)"),
            (FirstLinear::Muon, "Muon"),
        ] {
            let routing = with(first).route(&perceptron(inputs)).unwrap();
            assert_eq!(routing.routes()[0].optimizer, expected, "{inputs} inputs, {first:?}");
        }
    }
    let config = with(FirstLinear::AdamW);
    for (routing, first) in [
        (config.route(&QNetwork::new()), "linears.0.weight"),
        (config.route(&StateTracking::new()), "in_proj.weight"),
        (config.route(&Fno::new()), "fc0.weight"),
    ] {
        let routing = routing.unwrap();
        let inputs = routing.routes().iter().filter(|route| route.optimizer == "AdamW (embedding)");
        assert_eq!(inputs.map(|route| &route.path).collect::<Vec<_>>(), [first], "{routing}");
        assert_eq!(reason(&routing, first), "input layer? (first Linear)");
    }
}

#[test]
fn spectral_weights_need_no_rule() {
    check(
        &Fno::new(),
        &[
            "AdamW (embedding): fc0.weight",
            "Muon: fc1.weight",
            "AdamW (vector): spectral.*.weights1",
            "Muon (Flatten): pointwise.*.weight",
            "AdamW (head): fc2.weight",
        ],
        &["fc0.weight", "spectral.0.weights1", "spectral.1.weights1", "fc2.weight"],
    );
}

#[test]
fn stems_and_depthwise_convolutions_are_not_hidden() {
    let lines = [
        "AdamW (embedding): stem.weight",
        "Muon (Flatten): features.*.(expand|project).weight",
        "AdamW (vector): features.*.depthwise.weight",
        "AdamW (head): classifier.weight",
        "-: *running*",
    ];
    check(&MobileNet::new(), &lines, &[]);
    check(
        &Resnet::new(),
        &[
            "AdamW (embedding): conv1.weight",
            "Muon (Flatten): layer1.*.conv(1|2).weight",
            "AdamW (head): fc.weight",
            "-: *running*",
        ],
        &["fc.weight"],
    );
}

#[test]
fn the_last_convolution_is_a_head() {
    check(
        &BurnUnet::new(),
        &[
            "AdamW (embedding): encoder.0.weight",
            "Muon (Flatten): encoder.1.weight upsample.weight decoder.weight",
            "AdamW (head): conv_1x1.weight",
        ],
        &["conv_1x1.weight"],
    );
}

#[test]
fn rules_say_what_they_override() {
    let rule = || RoutingRule::muon("").flatten();
    let overridden = |model: &Routing, path| reason(model, path).to_owned();
    let mobile = with_rule(&MobileNet::new(), rule());
    for (path, what) in [
        ("stem.weight", "rule ``, overrides \"stem convolution\""),
        ("features.0.depthwise.weight", "rule ``, overrides \"depthwise convolution\""),
        ("features.0.expand.weight", "rule ``"),
        ("classifier.weight", "rule ``, overrides \"output head\""),
        ("stem.bias", "rule ``, but not a matrix"),
    ] {
        assert_eq!(overridden(&mobile, path), what);
    }
    let vit = with_rule(&BurnVit::new(), rule());
    assert_eq!(
        overridden(&vit, "patch_embedding.conv.weight"),
        "rule ``, overrides \"embedding? (in `patch_embedding`)\""
    );
    let unet = with_rule(&BurnUnet::new(), rule());
    assert!(overridden(&unet, "conv_1x1.weight").contains("overrides \"output head? ("));
    let own = with_rule(&OwnParameters::new(), RoutingRule::muon("rel_bias"));
    assert_eq!(overridden(&own, "rel_bias"), "rule `rel_bias`, overrides \"named as positions\"");
}

#[test]
fn state_spaces_need_no_rule() {
    check(
        &StateTracking::new(),
        &[
            "AdamW (vector): mamba_block.(b|c)_bias_hmr mamba_block.dt_bias_h",
            "AdamW (embedding): in_proj.weight",
            "Muon: mamba_block.(in|out)_proj.weight",
            "AdamW (head): out_proj.weight",
        ],
        &["in_proj.weight", "mamba_block.in_proj.weight", "out_proj.weight"],
    );
}

#[test]
fn fused_gates_are_marked() {
    check(
        &LstmOfCells::new(),
        &[
            "AdamW (vector): cells.0.weight_ih.weight",
            "Muon: cells.0.weight_hh.weight",
            "AdamW (head): fc.weight",
        ],
        &["cells.0.weight_hh.weight", "fc.weight"],
    );
}

#[test]
fn the_layer_before_a_tied_head_is_hidden() {
    let lines = ["AdamW (embedding): tokens.weight", "Muon: *.weight"];
    check(&Albert::new(), &lines, &["mlm_dense.weight"]);
    check(&BertEncoder::new(), &lines, &["pooler.output.weight"]);
}

#[test]
fn tables_and_biases_of_several_dimensions_are_not_matrices() {
    check(
        &OwnParameters::new(),
        &[
            "AdamW (embedding): rel_bias relative_position_bias_table",
            "AdamW (vector): mixer.a_log mixer.d experts.bias_of_heads",
            "Muon: experts.w1",
        ],
        &["mixer.a_log", "experts.w1"],
    );
}

// The field.

modules! {
    LeNet {
        conv1: Conv2d = conv(1, 10, 5),
        conv2: Conv2d = conv(10, 20, 5),
        fc1: Linear = linear(320, 50),
        fc2: Linear = linear(50, 10),
    }
    ResBlock {
        conv1: Conv2d = conv(16, 16, 3),
        time_emb: Linear = linear(64, 16),
        conv2: Conv2d = conv(16, 16, 3),
    }
    /// A U-Net of diffusion, with skips and a time embedding.
    DiffusionUnet {
        time_mlp: Vec<Linear> = vec![linear(16, 64), linear(64, 64)],
        conv_in: Conv2d = conv(3, 16, 3),
        down: Vec<ResBlock> = vec![ResBlock::new()],
        middle: ResBlock = ResBlock::new(),
        merge: Conv2d = conv(32, 16, 3),
        conv_out: Conv2d = conv(16, 3, 3),
    }
    Tower {
        ids: Embedding = embedding(1000, 32),
        fc1: Linear = linear(32, 64),
        fc2: Linear = linear(64, 16),
    }
    TwoTowers { user: Tower = Tower::new(), item: Tower = Tower::new() }
    MixtureDensity {
        hidden: Linear = linear(6, 32),
        pi: Linear = linear(32, 5),
        mu: Linear = linear(32, 10),
        sigma: Linear = linear(32, 10),
    }
    Message { edge_mlp: Linear = linear(128, 64), node_mlp: Linear = linear(128, 64) }
    GraphNetwork {
        node_encoder: Linear = linear(11, 64),
        edge_encoder: Linear = linear(4, 64),
        messages: Vec<Message> = vec![Message::new(), Message::new()],
        readout: Linear = linear(64, 1),
    }
    TimestepEmbedder { mlp: Vec<Linear> = vec![linear(32, 8), linear(8, 8)] }
    DitBlock {
        attn: MultiHeadAttention = attention(),
        adaln_modulation: Linear = linear(8, 48),
        mlp: Vec<Linear> = vec![linear(8, 32), linear(32, 8)],
    }
    FinalLayer { linear: Linear = linear(8, 4), adaln_modulation: Linear = linear(8, 16) }
    /// A transformer of diffusion.
    Dit {
        x_embedder: Conv2d = conv(4, 8, 2),
        t_embedder: TimestepEmbedder = TimestepEmbedder::new(),
        y_embedder: Embedding = embedding(10, 8),
        blocks: Vec<DitBlock> = vec![DitBlock::new()],
        final_layer: FinalLayer = FinalLayer::new(),
    }
    Mamba1 {
        in_proj: Linear = linear(16, 64),
        conv1d: Conv1d = conv1d(32, 32, 4, 32),
        x_proj: Linear = linear(32, 18),
        dt_proj: Linear = linear(2, 32),
        a_log: Param<Tensor<2>> = bare([32, 8]),
        d: Param<Tensor<1>> = bare([32]),
        out_proj: Linear = linear(32, 16),
    }
    MambaLm {
        embedding: Embedding = embedding(100, 16),
        layers: Vec<Mamba1> = vec![Mamba1::new(), Mamba1::new()],
        lm_head: Linear = linear(16, 100),
    }
    /// Without a head of its own, and in fields rather than a stack.
    TiedMamba {
        embedding: Embedding = embedding(100, 16),
        first: Mamba1 = Mamba1::new(),
        second: Mamba1 = Mamba1::new(),
    }
    /// Mamba-2: a scalar for each of four heads, and a norm before the output.
    Mamba2 {
        in_proj: Linear = linear(16, 84),
        conv1d: Conv1d = conv1d(48, 48, 4, 48),
        dt_bias: Param<Tensor<1>> = bare([4]),
        a_log: Param<Tensor<1>> = bare([4]),
        d: Param<Tensor<1>> = bare([4]),
        norm: LayerNorm = norm(32),
        out_proj: Linear = linear(32, 16),
    }
    Mamba2Lm {
        embedding: Embedding = embedding(100, 16),
        layers: Vec<Mamba2> = vec![Mamba2::new(), Mamba2::new()],
        norm_f: LayerNorm = norm(16),
        lm_head: Linear = linear(16, 100),
    }
    TimeMix {
        time_decay: Param<Tensor<2>> = bare([4, 4]),
        time_maa_w1: Param<Tensor<2>> = bare([16, 10]),
        time_maa_w2: Param<Tensor<3>> = bare([5, 2, 16]),
        receptance: Linear = linear(16, 16),
        key: Linear = linear(16, 16),
        value: Linear = linear(16, 16),
        gate: Linear = linear(16, 16),
        output: Linear = linear(16, 16),
    }
    ChannelMix {
        key: Linear = linear(16, 64),
        receptance: Linear = linear(16, 16),
        value: Linear = linear(64, 16),
    }
    Rwkv {
        emb: Embedding = embedding(100, 16),
        att: TimeMix = TimeMix::new(),
        ffn: ChannelMix = ChannelMix::new(),
        head: Linear = linear(16, 100),
    }
    S4Kernel {
        c: Param<Tensor<3>> = bare([16, 32, 2]),
        log_dt: Param<Tensor<1>> = bare([16]),
        log_a_real: Param<Tensor<2>> = bare([16, 32]),
        a_imag: Param<Tensor<2>> = bare([16, 32]),
    }
    S4Layer { kernel: S4Kernel = S4Kernel::new(), output_linear: Conv1d = conv1d(16, 32, 1, 1) }
    S4 {
        encoder: Linear = linear(3, 16),
        s4_layers: Vec<S4Layer> = vec![S4Layer::new(), S4Layer::new()],
        decoder: Linear = linear(16, 10),
    }
    Nerf {
        layers: Vec<Linear> = vec![linear(63, 64), linear(64, 64), linear(127, 64), linear(64, 64)],
        sigma: Linear = linear(64, 1),
        feature: Linear = linear(64, 64),
        view: Linear = linear(91, 32),
        rgb: Linear = linear(32, 3),
    }
    VqVae {
        encoder: Vec<Conv2d> = vec![conv(3, 32, 4), conv(32, 64, 4)],
        to_codes: Conv2d = conv(64, 16, 1),
        codebook: Param<Tensor<2>> = bare([512, 16]),
        from_codes: Conv2d = conv(16, 64, 1),
        decoder: Vec<ConvTranspose2d> = vec![upscaling(64, 32), upscaling(32, 3)],
    }
    Perceiver {
        input: Linear = linear(48, 8),
        latents: Param<Tensor<2>> = bare([6, 8]),
        cross_attn: MultiHeadAttention = attention(),
        self_attn: MultiHeadAttention = attention(),
        logits: Linear = linear(8, 10),
    }
    TwinCritic { q1: QNetwork = QNetwork::new(), q2: QNetwork = QNetwork::new() }
    SquashedActor {
        trunk: Linear = linear(4, 64),
        mean: Linear = linear(64, 2),
        log_std: Linear = linear(64, 2),
    }
    SoftActorCritic {
        actor: SquashedActor = SquashedActor::new(),
        critic: TwinCritic = TwinCritic::new(),
    }
    /// AlphaZero, whose heads begin with convolutions.
    AlphaZero {
        stem: Conv2d = conv(17, 32, 3),
        tower: Vec<ResBlockOfGo> = vec![ResBlockOfGo::new()],
        policy_conv: Conv2d = conv(32, 2, 1),
        policy_fc: Linear = linear(128, 65),
        value_conv: Conv2d = conv(32, 1, 1),
        value_fc1: Linear = linear(64, 32),
        value_fc2: Linear = linear(32, 1),
    }
    ResBlockOfGo { conv1: Conv2d = conv(32, 32, 3), conv2: Conv2d = conv(32, 32, 3) }
    GanOfConvolutions {
        project: Linear = linear(10, 512),
        up1: ConvTranspose2d = upscaling(32, 16),
        norm: BatchNorm = batch_norm(16),
        up2: ConvTranspose2d = upscaling(16, 3),
    }
    ConvNextBlock {
        dwconv: Conv2d = depthwise(16),
        norm: LayerNorm = norm(16),
        pwconv1: Linear = linear(16, 64),
        pwconv2: Linear = linear(64, 16),
    }
    ConvNext {
        stem: Conv2d = conv(3, 16, 4),
        blocks: Vec<ConvNextBlock> = vec![ConvNextBlock::new()],
        head: Linear = linear(16, 10),
    }
    ResNextBlock {
        reduce: Conv2d = conv(32, 16, 1),
        grouped: Conv2d = Conv2dConfig::new([16, 16], [3, 3]).with_groups(4).init(&device()),
        expand: Conv2d = conv(16, 32, 1),
    }
    ResNext {
        stem: Conv2d = conv(3, 32, 7),
        blocks: Vec<ResNextBlock> = vec![ResNextBlock::new()],
        fc: Linear = linear(32, 10),
    }
    /// Attention of low rank, as in DeepSeek's models.
    LatentAttention {
        q_proj: Linear = linear(64, 64),
        kv_a_proj: Linear = linear(64, 24),
        kv_b_proj: Linear = linear(16, 128),
        o_proj: Linear = linear(64, 64),
    }
    LatentLm {
        tokens: Embedding = embedding(100, 64),
        attention: LatentAttention = LatentAttention::new(),
        head: Linear = linear(64, 100),
    }
    /// Detection, with two outputs at every scale.
    Detector {
        stem: Conv2d = conv(3, 32, 3),
        backbone: Vec<ResBlockOfGo> = vec![ResBlockOfGo::new()],
        cls_preds: Vec<Conv2d> = vec![conv(32, 20, 1), conv(32, 20, 1)],
        boxes: Vec<Conv2d> = vec![conv(32, 4, 1), conv(32, 4, 1)],
    }
    Forecaster { lstm: Lstm = lstm(3, 32), fc: Linear = linear(32, 1) }
    Tabular {
        category: Embedding = embedding(12, 8),
        layers: Vec<Linear> = vec![linear(13, 64), linear(64, 32), linear(32, 2)],
    }
    Multitask {
        trunk: Linear = linear(20, 64),
        hidden: Linear = linear(64, 64),
        tasks: Vec<Linear> = vec![linear(64, 3), linear(64, 5)],
        score: Linear = linear(64, 7),
    }
    /// Adapters of the user's own.
    Adapted {
        base: Linear = linear(16, 16),
        lora_a: Linear = linear(16, 2),
        lora_b: Linear = linear(2, 16),
        head: Linear = linear(16, 4),
    }
    /// Linear layers of three experts.
    Stacked { w: Param<Tensor<3>> = bare([3, 8, 32]), b: Param<Tensor<2>> = bare([3, 32]) }
}

#[test]
fn diffusion_models_get_the_expected_roles() {
    check(
        &DiffusionUnet::new(),
        &[
            "AdamW (embedding): conv_in.weight *.time_emb.weight",
            "Muon: time_mlp.(0|1).weight",
            "Muon (Flatten): *.conv(1|2).weight merge.weight",
            "AdamW (head): conv_out.weight",
        ],
        &[
            "time_mlp.0.weight",
            "down.0.time_emb.weight",
            "middle.time_emb.weight",
            "conv_out.weight",
        ],
    );
    check(
        &Dit::new(),
        &[
            "AdamW (embedding): x_embedder.weight t_embedder.mlp.*.weight y_embedder.weight",
            "Muon: blocks.*.weight final_layer.adaln_modulation.weight",
            "AdamW (head): final_layer.linear.weight",
        ],
        &[
            "x_embedder.weight",
            "t_embedder.mlp.0.weight",
            "t_embedder.mlp.1.weight",
            "final_layer.linear.weight",
        ],
    );
}

#[test]
fn models_of_recommendation_and_tables_get_the_expected_roles() {
    check(
        &TwoTowers::new(),
        &[
            "AdamW (embedding): *.ids.weight",
            "Muon: *.fc1.weight",
            "AdamW (head): user.fc2.weight item.fc2.weight",
        ],
        &["user.fc2.weight", "item.fc2.weight"],
    );
    check(
        &Tabular::new(),
        &[
            "AdamW (embedding): category.weight",
            "Muon: layers.(0|1).weight",
            "AdamW (head): layers.2.weight",
        ],
        &["layers.2.weight"],
    );
    check(
        &Multitask::new(),
        &["Muon: trunk.weight hidden.weight", "AdamW (head): tasks.*.weight score.weight"],
        &["trunk.weight", "tasks.0.weight", "tasks.1.weight", "score.weight"],
    );
}

#[test]
fn densities_and_graphs_get_the_expected_roles() {
    check(
        &MixtureDensity::new(),
        &["AdamW (embedding): hidden.weight", "AdamW (head): (pi|mu|sigma).weight"],
        &["hidden.weight", "pi.weight", "mu.weight", "sigma.weight"],
    );
    check(
        &GraphNetwork::new(),
        &[
            "AdamW (embedding): edge_encoder.weight",
            "Muon: node_encoder.weight messages.*.weight",
            "AdamW (head): readout.weight",
        ],
        &["node_encoder.weight", "edge_encoder.weight", "readout.weight"],
    );
}

#[test]
fn recurrences_without_attention_get_the_expected_roles() {
    let mamba = |prefix: &str| {
        [
            format!("AdamW (vector): {prefix}.conv1d.weight {prefix}.a_log {prefix}.d"),
            format!("Muon: {prefix}.(in|x|dt|out)_proj.weight"),
        ]
    };
    let [vectors, matrices] = mamba("layers.(0|1)");
    check(
        &MambaLm::new(),
        &[
            "AdamW (embedding): embedding.weight",
            &vectors,
            &matrices,
            "AdamW (head): lm_head.weight",
        ],
        &["layers.0.in_proj.weight", "layers.0.a_log", "layers.1.in_proj.weight", "layers.1.a_log"],
    );
    check(
        &Mamba2Lm::new(),
        &[
            "AdamW (embedding): embedding.weight",
            "AdamW (vector): layers.*.conv1d.weight layers.*.(dt_bias|a_log|d)",
            "Muon: layers.*.(in|out)_proj.weight",
            "AdamW (head): lm_head.weight",
        ],
        &["layers.0.in_proj.weight", "layers.1.in_proj.weight"],
    );
    let [vectors, matrices] = mamba("(first|second)");
    check(
        &TiedMamba::new(),
        &["AdamW (embedding): embedding.weight", &vectors, &matrices],
        &["first.in_proj.weight", "first.a_log", "second.in_proj.weight", "second.a_log"],
    );
    check(
        &Rwkv::new(),
        &[
            "AdamW (embedding): emb.weight",
            "AdamW (vector): att.time_*",
            "Muon: att.*.weight ffn.*.weight",
            "AdamW (head): head.weight",
        ],
        &["att.time_decay", "att.time_maa_w1", "att.time_maa_w2"],
    );
    check(
        &S4::new(),
        &[
            "AdamW (embedding): encoder.weight",
            "AdamW (vector): s4_layers.*.kernel.*",
            "Muon (Flatten): s4_layers.*.output_linear.weight",
            "AdamW (head): decoder.weight",
        ],
        &[
            "encoder.weight",
            "s4_layers.0.kernel.c",
            "s4_layers.0.kernel.log_a_real",
            "s4_layers.0.kernel.a_imag",
            "s4_layers.1.kernel.c",
            "s4_layers.1.kernel.log_a_real",
            "s4_layers.1.kernel.a_imag",
            "decoder.weight",
        ],
    );
    check(
        &Forecaster::new(),
        &[
            "AdamW (embedding): lstm.*.input_transform.weight",
            "Muon: lstm.*.hidden_transform.weight",
            "AdamW (head): fc.weight",
        ],
        &[
            "lstm.input_gate.input_transform.weight",
            "lstm.forget_gate.input_transform.weight",
            "lstm.output_gate.input_transform.weight",
            "lstm.cell_gate.input_transform.weight",
            "fc.weight",
        ],
    );
}

#[test]
fn fields_of_light_and_codes_get_the_expected_roles() {
    check(
        &Nerf::new(),
        &[
            "Muon: layers.*.weight feature.weight view.weight",
            "AdamW (head): sigma.weight rgb.weight",
        ],
        &["layers.0.weight", "sigma.weight", "rgb.weight"],
    );
    check(
        &VqVae::new(),
        &[
            "AdamW (embedding): encoder.0.weight codebook",
            "Muon (Flatten): encoder.1.weight (to|from)_codes.weight decoder.0.weight",
            "AdamW (head): decoder.1.weight",
        ],
        &["decoder.1.weight"],
    );
    check(
        &Perceiver::new(),
        &[
            "AdamW (embedding): latents",
            "Muon: input.weight (cross|self)_attn.*.weight",
            "AdamW (head): logits.weight",
        ],
        &["input.weight"],
    );
}

#[test]
fn agents_get_the_expected_roles() {
    check(
        &SoftActorCritic::new(),
        &[
            "AdamW (embedding): actor.trunk.weight critic.(q1|q2).linears.0.weight",
            "Muon: critic.(q1|q2).linears.1.weight",
            "AdamW (head): actor.(mean|log_std).weight critic.(q1|q2).linears.2.weight",
        ],
        &[
            "actor.trunk.weight",
            "actor.mean.weight",
            "actor.log_std.weight",
            "critic.q1.linears.0.weight",
            "critic.q1.linears.2.weight",
            "critic.q2.linears.0.weight",
            "critic.q2.linears.2.weight",
        ],
    );
    check(
        &AlphaZero::new(),
        &[
            "AdamW (embedding): stem.weight",
            "Muon (Flatten): tower.*.weight policy_conv.weight",
            "AdamW (vector): value_conv.weight",
            "Muon: value_fc1.weight",
            "AdamW (head): policy_fc.weight value_fc2.weight",
        ],
        &["policy_fc.weight", "value_fc2.weight"],
    );
}

#[test]
fn convolutional_models_of_the_field_get_the_expected_roles() {
    check(
        &GanOfConvolutions::new(),
        &[
            "Muon: project.weight",
            "Muon (Flatten): up1.weight",
            "AdamW (head): up2.weight",
            "-: *running*",
        ],
        &["project.weight", "up2.weight"],
    );
    check(
        &ConvNext::new(),
        &[
            "AdamW (embedding): stem.weight",
            "AdamW (vector): blocks.0.dwconv.weight",
            "Muon: blocks.0.pwconv(1|2).weight",
            "AdamW (head): head.weight",
        ],
        &[],
    );
    check(
        &ResNext::new(),
        &[
            "AdamW (embedding): stem.weight",
            "Muon (Flatten): blocks.*.weight",
            "AdamW (head): fc.weight",
        ],
        &["blocks.0.grouped.weight", "fc.weight"],
    );
    check(
        &Detector::new(),
        &[
            "AdamW (embedding): stem.weight",
            "Muon (Flatten): backbone.*.weight",
            "AdamW (head): cls_preds.*.weight boxes.*.weight",
        ],
        &["cls_preds.0.weight", "cls_preds.1.weight", "boxes.0.weight", "boxes.1.weight"],
    );
}

#[test]
fn classes_are_not_taken_for_the_channels_of_an_earlier_convolution() {
    check(
        &LeNet::new(),
        &[
            "AdamW (embedding): conv1.weight",
            "Muon (Flatten): conv2.weight",
            "Muon: fc1.weight",
            "AdamW (head): fc2.weight",
        ],
        &["fc2.weight"],
    );
}

#[test]
fn low_ranks_get_the_expected_roles() {
    check(
        &LatentLm::new(),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: attention.*.weight",
            "AdamW (head): head.weight",
        ],
        &["attention.kv_a_proj.weight", "attention.kv_b_proj.weight"],
    );
    check(
        &Adapted::new(),
        &["Muon: base.weight", "AdamW (vector): lora_(a|b).weight", "AdamW (head): head.weight"],
        &["lora_a.weight", "lora_b.weight"],
    );
    let lora = Resnet::new().fc.apply_lora(Lora::new(2, 4.0));
    expect(&routing(&lora), &["AdamW (head): *.lora.*", "-: *"]);
}

#[test]
fn biases_are_recognised_beside_their_matrices() {
    let routing = with_rule(&Stacked::new(), RoutingRule::muon("^w$").batch());
    expect(&routing, &["Muon (Batch): w", "AdamW (vector): b"]);
    assert_eq!(reason(&routing, "b"), "bias? (of the outputs of `w`)");
}
