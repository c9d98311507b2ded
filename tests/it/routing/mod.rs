//! The routing of parameters to optimizers, in models with common structures.

#[allow(dead_code)] // not trained here
#[path = "../../../examples/train_lm/experts.rs"]
mod experts;
#[allow(dead_code)] // not trained here
#[path = "../../../examples/train_lm/model.rs"]
mod model;
#[macro_use]
mod models;
mod field;

use burn::module::{Lora, Module, Param};
use burn::tensor::{Bytes, DType, Device, Tensor};
use burn_pack::Reader;
use distmuon::{
    Error, LrScale, MatrixLayout, MatrixView, MuonConfig, ParameterRole, ParameterRoute, Routing,
    RoutingRule,
};
use models::*;
use regex::Regex;

/// The line of biases and norms, which are in every model.
const VECTORS: &str = "AdamW (vector): *.bias *.gamma *.beta";

/// Checks a whole routing against lines of a role and its paths, to which [`VECTORS`] is added. `*`
/// stands for anything, `(a|b)` for either. A path belongs to the first line that matches it, and
/// every line has to match a path.
fn expect(routing: &Routing, lines: &[&str]) {
    let mut lines: Vec<(&str, Vec<Regex>, usize)> = lines
        .iter()
        .chain(&[VECTORS])
        .map(|line| {
            let (group, paths) = line.split_once(": ").unwrap();
            let path = |path: &str| path.replace('.', r"\.").replace('*', ".*");
            let paths =
                paths.split(' ').map(|glob| Regex::new(&format!("^{}$", path(glob))).unwrap());
            (group, paths.collect(), 0)
        })
        .collect();
    for ParameterRoute { path, optimizer, .. } in routing.routes() {
        let line = lines.iter_mut().find(|(_, paths, _)| paths.iter().any(|re| re.is_match(path)));
        let (expected, _, matches) = line.unwrap_or_else(|| panic!("{path} is new\n{routing}"));
        assert_eq!(optimizer, expected, "{path}\n{routing}");
        *matches += 1;
    }
    for (group, paths, matches) in lines {
        assert!(
            matches > 0 || group == "AdamW (vector)",
            "{group}: {paths:?} is absent\n{routing}"
        );
    }
}

fn routing(model: &impl Module) -> Routing {
    MuonConfig::new().route(model).unwrap()
}

fn with_rule(model: &impl Module, rule: impl Into<RoutingRule>) -> Routing {
    MuonConfig::new().with_rule(rule).route(model).unwrap()
}

fn reason<'a>(routing: &'a Routing, path: &str) -> &'a str {
    &routing.routes().iter().find(|route| route.path == path).expect(path).reason
}

fn group(routing: &Routing, path: &str) -> ParameterRole {
    routing.routes().iter().find(|route| route.path == path).expect(path).role
}

#[test]
fn language_models_get_the_expected_roles() {
    expect(
        &routing(&Gpt::new()),
        &[
            "AdamW (embedding): wte.weight wpe.weight",
            "Muon: blocks.(0|1).attn.(query|key|value|output).weight \
             blocks.(0|1).mlp.linear_(inner|outer).weight",
            "AdamW (head): lm_head.weight",
        ],
    );
    let gpt_of_fields = routing(&GptOfFields::new());
    expect(
        &gpt_of_fields,
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: (first|second).attn.*.weight (first|second).mlp.*.weight",
            "AdamW (head): fc.weight",
        ],
    );
    assert_eq!(reason(&gpt_of_fields, "fc.weight"), "output head? (last Linear)");
    // The embedding's matrix is also the head: no layer is routed as the head.
    expect(
        &routing(&Tied::new()),
        &["AdamW (embedding): tokens.weight", "Muon: blocks.0.*.weight"],
    );
    expect(
        &routing(&TiedOfFields::new()),
        &["AdamW (embedding): tokens.weight", "Muon: (first|second).*.weight"],
    );
}

#[test]
fn the_output_of_attention_is_not_a_head() {
    expect(&routing(&attention()), &["Muon: (query|key|value|output).weight"]);
    expect(
        &routing(&OfAttention::new()),
        &["Muon: attn.(query|key|value|output).weight", "AdamW (head): fc.weight"],
    );
    expect(
        &routing(&OfMixer::new()),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: mixer.(q_proj|k_proj|v_proj|output).weight",
            "AdamW (head): classifier.weight",
        ],
    );
    expect(
        &routing(&Flat::new()),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: (query|key|value|output).weight",
            "AdamW (head): head.weight",
        ],
    );
}

#[test]
fn burns_transformers_get_the_expected_roles() {
    expect(
        &routing(&OfEncoder::new()),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: encoder.layers.(0|1).(mha|pwff).*.weight",
            "AdamW (head): head.weight",
        ],
    );
    expect(
        &routing(&OfEncoderLayer::new()),
        &[
            "Muon: layer.mha.(query|key|value|output).weight layer.pwff.*.weight",
            "AdamW (head): fc.weight",
        ],
    );
    expect(
        &routing(&OfDecoder::new()),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: decoder.layers.(0|1).(self_attn|cross_attn|pwff).*.weight",
            "AdamW (head): output.weight",
        ],
    );
    expect(
        &routing(&EncoderDecoder::new()),
        &[
            "AdamW (embedding): source.weight target.weight",
            "Muon: (encoder|decoder).layers.*.weight",
            "AdamW (head): generator.weight",
        ],
    );
}

#[test]
fn vision_transformers_get_the_expected_roles() {
    let vit = routing(&Vit::new());
    expect(
        &vit,
        &[
            "AdamW (embedding): stem.weight",
            "AdamW (vector): cls_token",
            "AdamW (embedding): pos",
            "Muon: blocks.0.*.weight",
            "AdamW (head): head.weight",
        ],
    );
    assert_eq!(reason(&vit, "pos"), "named as positions");
    assert_eq!(reason(&vit, "cls_token"), "a single row or column");

    let patches = routing(&PatchVit::new());
    expect(
        &patches,
        &[
            "AdamW (embedding): patch_embed.weight pos_embed register",
            "AdamW (vector): scale",
            "Muon: blocks.0.*.weight",
            "AdamW (head): head.weight",
        ],
    );
    assert_eq!(reason(&patches, "patch_embed.weight"), "embedding? (in `patch_embed`)");
    assert_eq!(reason(&patches, "pos_embed"), "named as an embedding");
    assert_eq!(reason(&patches, "register"), "named as learned inputs");
}

#[test]
fn bert_gets_the_expected_roles() {
    let classifier = routing(&BertClassifier::new());
    expect(
        &classifier,
        &[
            "AdamW (embedding): bert.embeddings.(word|position).weight",
            "Muon: *.attention.projections.(query|key|value).weight \
             *.attention.output.dense.weight",
            "Muon: *.layer.(intermediate|output).dense.weight bert.pooler.dense.weight",
            "AdamW (head): classifier.weight",
        ],
    );
    assert_eq!(reason(&classifier, "bert.pooler.dense.weight"), "hidden matrix");
    let alone = routing(&Bert::new());
    assert_eq!(reason(&alone, "layer.output.dense.weight"), "hidden matrix");
    assert_eq!(reason(&alone, "pooler.dense.weight"), "hidden matrix? (as wide as the embedding)");
}

#[test]
fn mixtures_of_experts_get_the_expected_roles() {
    expect(
        &routing(&MoeOfLinears::new()),
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: router.weight experts.(0|1|2).weight",
            "AdamW (head): head.weight",
        ],
    );
    let stacks = with_rule(&MoeOfStacks::new(), RoutingRule::muon("experts").batch());
    expect(
        &stacks,
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: router.weight",
            "Muon (Batch): experts.up experts.down",
            "AdamW (vector): experts.up_bias",
            "AdamW (head): head.weight",
        ],
    );
    assert_eq!(reason(&stacks, "experts.up_bias"), "rule `experts`, but not a matrix");
}

#[test]
fn recurrent_networks_get_the_expected_roles() {
    let lstm = routing(&LstmClassifier::new());
    expect(
        &lstm,
        &[
            "AdamW (embedding): tokens.weight",
            "Muon: lstm.(input|forget|output|cell)_gate.(input|hidden)_transform.weight",
            "AdamW (head): fc.weight",
        ],
    );
    expect(&routing(&LstmAlone::new()), &["Muon: input.weight lstm.*.weight"]);
    expect(
        &routing(&GruRegression::new()),
        &[
            "Muon: gru.(update|reset|new)_gate.(input|hidden)_transform.weight",
            "AdamW (head): output.weight",
        ],
    );
}

#[test]
fn convolutional_networks_get_the_expected_roles() {
    let net = routing(&ConvNet::new());
    expect(
        &net,
        &[
            "AdamW (embedding): conv1.weight",
            "Muon (Flatten): conv2.weight",
            "-: norm.running_(mean|var)",
            "Muon: fc1.weight",
            "AdamW (head): fc2.weight",
        ],
    );
    assert_eq!(reason(&net, "conv1.weight"), "stem convolution");
    assert_eq!(reason(&net, "conv2.weight"), "hidden convolution");
    let ruled = with_rule(&ConvNet::new(), RoutingRule::muon("conv").flatten());
    assert_eq!(reason(&ruled, "conv1.bias"), "rule `conv`, but not a matrix");
    assert_eq!(reason(&net, "norm.running_mean"), "running statistics");
    expect(
        &routing(&UNet::new()),
        &[
            "AdamW (embedding): down.0.weight",
            "Muon (Flatten): down.1.weight up.weight",
            "AdamW (head): output.weight",
        ],
    );
}

/// `[in, out, height, width]` is a map from `in` to `out * height * width`.
#[test]
fn transposed_convolutions_have_their_inputs_first() {
    let unet = routing(&UNet::new());
    let layout = |path| match group(&unet, path) {
        ParameterRole::Muon { layout, .. } => layout,
        other => panic!("{other}"),
    };
    assert_eq!(layout("up.weight"), MatrixLayout::InOut);
    assert_eq!(layout("down.1.weight"), MatrixLayout::OutIn);
    // 64 channels to 4, each of 2 x 2: 16 outputs for 64 inputs.
    assert_eq!(LrScale::Original.factor(layout("up.weight"), [64, 16]), 1.0);
    assert_eq!(LrScale::Spectral.factor(layout("up.weight"), [64, 16]), 0.5);
}

#[test]
fn heads_are_recognised_by_name_and_position() {
    let cases: [(Routing, &[&str]); 8] = [
        (
            routing(&OfMlpHead::new()),
            &["Muon: body.weight head.up.weight", "AdamW (head): head.down.weight"],
        ),
        (
            routing(&OfStackHead::new()),
            &["Muon: body.weight classifier.0.weight", "AdamW (head): classifier.1.weight"],
        ),
        (
            routing(&ActorCritic::new()),
            &["AdamW (head): (policy|value)_head.weight", "Muon: trunk.weight"],
        ),
        (
            routing(&Unembedding::new()),
            &[
                "AdamW (embedding): embed.weight",
                "Muon: hidden.weight",
                "AdamW (head): unembed.weight",
            ],
        ),
        (routing(&HeadFirst::new()), &["AdamW (head): classifier.weight", "Muon: hidden.weight"]),
        (routing(&Wrapped::new()), &["AdamW (head): *.classifier.weight", "Muon: *.hidden.weight"]),
        (routing(&HeadsInBlocks::new()), &["Muon: blocks.*.weight", "AdamW (head): last.weight"]),
        (
            routing(&Embedder::new()),
            &["Muon: embedder.*.weight", "AdamW (embedding): time_embed.0.weight"],
        ),
    ];
    for (routing, lines) in cases {
        expect(&routing, lines);
    }
    assert_eq!(reason(&routing(&HeadFirst::new()), "classifier.weight"), "output head");
}

#[test]
fn lora_factors_belong_to_adamw() {
    let lora = || Lora::new(2, 4.0);
    let gpt = routing(&Gpt::new().apply_lora(lora()));
    expect(
        &gpt,
        &[
            "AdamW (embedding): (wte|wpe).weight.lora.(a|b)",
            "AdamW (vector): blocks.*.weight.lora.(a|b)",
            "AdamW (head): lm_head.weight.lora.(a|b)",
            "-: *",
        ],
    );
    assert_eq!(reason(&gpt, "blocks.0.attn.query.weight.lora.a"), "LoRA factor: hidden matrix");
    assert_eq!(reason(&gpt, "wte.weight.lora.b"), "LoRA factor: in an Embedding");
    assert_eq!(reason(&gpt, "wte.weight"), "frozen");
    // Frozen convolutions need no rule.
    expect(
        &routing(&Vit::new().apply_lora(lora())),
        &[
            "AdamW (embedding): pos.lora.(a|b)",
            "AdamW (vector): blocks.0.*.weight.lora.(a|b)",
            "AdamW (head): head.weight.lora.(a|b)",
            "-: *",
        ],
    );
    expect(
        &routing(&BertClassifier::new().apply_lora(lora())),
        &[
            "AdamW (embedding): bert.embeddings.*.weight.lora.(a|b)",
            "AdamW (vector): bert.*.lora.(a|b)",
            "AdamW (head): classifier.weight.lora.(a|b)",
            "-: *",
        ],
    );
    let net = HeadFirst::new().apply_lora(Lora::new(2, 4.0));
    expect(
        &with_rule(&net, RoutingRule::muon(r"hidden.*lora")),
        &["Muon: hidden.weight.lora.(a|b)", "AdamW (head): classifier.weight.lora.(a|b)", "-: *"],
    );
}

#[test]
fn adapters_are_trained_and_their_bases_are_not() {
    let net = HeadFirst::new().apply_lora(Lora::new(2, 4.0));
    let before = net.clone();
    let mut optim = MuonConfig::new().init(&net);
    let grads = net.gradients();
    let after = optim.step(0.1, net, grads);
    let factor = |net: &HeadFirst| net.hidden.weight.adapter().unwrap().b.val().into_data();
    assert_ne!(factor(&after), factor(&before));
    assert_eq!(after.hidden.weight.base().into_data(), before.hidden.weight.base().into_data());
}

#[test]
fn frozen_parameters_need_no_rule_and_may_have_one() {
    let mut net = ConvNet::new();
    (net.conv1, net.conv2) = (net.conv1.freeze(), net.conv2.freeze());
    let lines = &[
        "-: conv* norm.running*",
        "Muon: fc1.weight",
        "AdamW (head): fc2.weight",
        "AdamW (vector): *.bias *.gamma *.beta",
    ];
    expect(&routing(&net), lines);
    expect(&with_rule(&net, RoutingRule::muon("conv").flatten()), lines);
    assert_eq!(reason(&routing(&net), "conv1.weight"), "frozen");
}

#[test]
#[should_panic(
    expected = "parameter `hidden.weight` of shape [16, 16] was frozen when the optimizer was made"
)]
fn a_parameter_that_is_unfrozen_later_is_rejected() {
    let mut net = HeadFirst::new();
    net.hidden = net.hidden.freeze();
    let mut optim = MuonConfig::new().init(&net);
    let net = net.unfreeze();
    let grads = net.gradients();
    optim.step(0.1, net, grads);
}

#[test]
fn models_without_trainable_parameters_are_rejected() {
    let frozen = MuonConfig::new().try_init(&HeadFirst::new().freeze()).map(|_| ()).unwrap_err();
    assert_eq!(frozen, Error::AllFrozen { parameters: 4 });
    assert!(frozen.to_string().contains("unfreeze"), "{frozen}");
    assert!(frozen.to_string().contains("adapter to quantized weights"), "{frozen}");
    let plain = burn::nn::LinearConfig::new(4, 4).init(&Device::default());
    let plain = MuonConfig::new().try_init(&plain).map(|_| ()).unwrap_err();
    assert!(plain.to_string().contains("device.autodiff()"), "{plain}");
}

/// Rules on layers with biases.
#[test]
fn rules_leave_vectors_to_adamw() {
    #[derive(Module, Debug)]
    struct Net {
        conv: burn::nn::conv::Conv2d,
        experts: Experts,
        probe: burn::nn::Linear,
    }
    let net = Net { conv: ConvNet::new().conv1, experts: Experts::new(), probe: square() };
    let routing = MuonConfig::new()
        .with_rule(RoutingRule::muon("experts").batch())
        .with_rule(RoutingRule::muon("conv").flatten())
        .with_rule(RoutingRule::adamw("probe"))
        .route(&net)
        .unwrap();
    expect(
        &routing,
        &[
            "Muon (Flatten): conv.weight",
            "AdamW (vector): conv.bias experts.up_bias probe.bias",
            "Muon (Batch): experts.up experts.down",
            "AdamW (head): probe.weight",
        ],
    );
}

#[test]
fn rules_without_a_matrix_are_rejected() {
    let rejected = |rule: RoutingRule| {
        let error = MuonConfig::new().with_rule(rule).route(&MoeOfLinears::new()).unwrap_err();
        assert!(matches!(error, Error::UnusedRule { .. }), "{error}");
        error.to_string()
    };
    assert!(rejected(RoutingRule::muon(r"\.bias$").into()).contains("expected a matrix"));
    assert!(
        rejected(RoutingRule::muon("experts").batch().into()).contains("three or more dimensions")
    );
    assert!(rejected(RoutingRule::adamw("expert$")).contains("`expert$`"));
}

#[test]
fn setters_of_a_rule_apply_in_any_order() {
    let group = |rule: RoutingRule| group(&with_rule(&MoeOfStacks::new(), rule), "experts.up");
    let batch = |layout| ParameterRole::Muon { view: MatrixView::Batch, layout };
    let rule = || RoutingRule::muon("experts");
    assert_eq!(group(rule().batch().into()), batch(MatrixLayout::InOut));
    assert_eq!(
        group(rule().batch().layout(MatrixLayout::OutIn).into()),
        batch(MatrixLayout::OutIn)
    );
    assert_eq!(
        group(rule().layout(MatrixLayout::OutIn).batch().into()),
        batch(MatrixLayout::OutIn)
    );
    let flat = |layout| ParameterRole::Muon { view: MatrixView::Flatten, layout };
    assert_eq!(group(rule().flatten().into()), flat(MatrixLayout::OutIn));
    assert_eq!(
        group(rule().layout(MatrixLayout::InOut).flatten().into()),
        flat(MatrixLayout::InOut)
    );
    assert_eq!(group(rule().flatten().batch().into()), batch(MatrixLayout::InOut));
}

/// The expressions of the rules in an error.
fn patterns(error: &str) -> Vec<&str> {
    let pattern = Regex::new(r#"RoutingRule::(?:muon|adamw)\(r"([^"]+)"\)"#).unwrap();
    pattern.captures_iter(error).map(|captures| captures.get(1).unwrap().as_str()).collect()
}

/// An error has all parameters without a view. Its rules can be copied, and then the model is
/// accepted.
#[test]
fn the_error_for_shapes_has_rules_that_can_be_copied() {
    let error = MuonConfig::new().route(&WithoutViews::new()).unwrap_err();
    let Error::NoView { parameters, .. } = &error else { panic!("{error}") };
    let paths = [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
        "own_conv",
        "scale_of_heads",
        "weights_of_modes",
    ];
    assert_eq!(parameters[..], paths);
    let error = error.to_string();
    let lines: Vec<&str> = error.lines().collect();
    for (line, words) in lines.iter().zip([
        [
            "in `Experts`",
            "`blocks.0.up` [3, 16, 64]",
            r#"add `.with_rule(RoutingRule::muon(r"^blocks\.\d+\.(up|down)$").batch())`"#,
        ],
        ["in `WithoutViews`", "`own_conv` [8, 4, 3]", r#"muon(r"^own_conv$").flatten())"#],
        ["in `WithoutViews`", "[4, 1, 8]", r#"add `.with_rule(RoutingRule::adamw("#],
        ["`weights_of_modes`", "[8, 8, 6]", r#"muon(r"^weights_of_modes$").leading())"#],
    ]) {
        assert!(words.iter().all(|word| line.contains(word)), "{words:?}\n{line}");
    }
    assert_eq!(lines.len(), 4, "{error}");
    for (view, rule) in [
        ("batch", RoutingRule::muon(patterns(lines[0])[0]).batch().into()),
        ("adamw", RoutingRule::adamw(patterns(lines[0])[1])),
    ] {
        let rules =
            lines[1..].iter().map(|line| RoutingRule::adamw(*patterns(line).last().unwrap()));
        let config = rules.fold(MuonConfig::new().with_rule(rule), MuonConfig::with_rule);
        config.route(&WithoutViews::new()).expect(view);
    }
}

#[test]
fn the_summary_counts_parameters_operations_and_state() {
    let mut net = Unembedding::new();
    net.hidden.bias = net.hidden.bias.map(Param::no_grad);
    let half = |tensor: Tensor<2>| tensor.cast(DType::F16).detach().require_grad();
    net.unembed.weight = net.unembed.weight.map(half);
    let routing = routing(&net);
    let summary = routing.summary();
    let counts = summary.iter().map(|group| {
        (
            group.optimizer.as_str(),
            group.tensors,
            group.parameters,
            group.operations > 0.0,
            group.state_bytes,
        )
    });
    assert_eq!(
        counts.collect::<Vec<_>>(),
        [
            ("Muon", 1, 256, true, 256 * 4),
            ("AdamW (embedding)", 1, 512, false, 512 * 8),
            // The moments of float16 are float32, as are its master weights.
            ("AdamW (head)", 1, 512, false, 512 * 12),
            ("AdamW (vector)", 1, 32, false, 32 * 8),
            ("frozen", 1, 16, false, 0),
        ]
    );
    let table = routing.to_string();
    let (_, summary) = table.split_once("\n\n").unwrap();
    assert!(summary.lines().all(|line| line.len() <= 80), "{summary}");
    assert!(summary.contains("| total "), "{summary}");
}

/// The bytes are those of the record without the counters.
#[test]
fn the_state_of_a_step_has_the_bytes_of_the_summary() {
    let net = HeadFirst::new();
    let routing = routing(&net);
    let mut optim = routing.init();
    let grads = net.gradients();
    optim.step(0.1, net, grads);
    let record = optim.into_bytes().unwrap().to_vec();
    let record = Reader::from_bytes(Bytes::from_bytes_vec(record)).unwrap();
    let size = |name: &&str| record.tensor_data(name).unwrap().len();
    let bytes: usize = record.tensor_names().iter().map(size).sum();
    let summed: usize = routing.summary().iter().map(|group| group.state_bytes).sum();
    // Muon counts skipped steps, AdamW those and the weights in its two moments.
    assert_eq!(bytes, summed + 4 + 3 * 3 * 4);
}

/// The guide shows what `train_lm --routes` prints.
#[test]
fn the_tables_of_the_guide_equal_the_printed_routing() {
    let page = include_str!("../../../docs/guide/routing.md");
    let tables: Vec<&str> = page.lines().filter(|line| line.starts_with('|')).collect();
    let model = model::GptConfig::new(4, 4, 128, 128, 256).init(&device());
    let routing = routing(&model).to_string();
    let printed: Vec<&str> = routing.lines().collect();
    for line in &tables {
        assert!(printed.contains(line), "{line}\n{routing}");
    }
    // Without the empty line between the tables, and with one block of four.
    let others = ["blocks.1", "blocks.2", "blocks.3"];
    let cut = |line: &&&str| others.iter().any(|block| line.contains(block));
    assert_eq!(tables.len(), printed.len() - 1 - printed.iter().filter(cut).count());
}
