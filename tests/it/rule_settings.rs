//! Settings of rules: a parameter is trained as by a configuration that has these settings for all.

use burn::module::{Module, Param, ParamId};
use burn::optim::{GradientsParams, LambConfig};
use burn::tensor::{Device, Tensor};
use distmuon::distributed::Layout;
use distmuon::{
    AdamWConfig, DistMuonConfig, ElementwiseConfig, Error, LionConfig, MuonConfig, ParameterRole,
    RoutingRule, Schedule, WeightDecay, World,
};
use distmuon_testing::models::{ExpertNet, assert_same_weights, gradients, values};

const STEPS: u64 = 4;
const LR: f64 = 0.02;

fn net() -> ExpertNet {
    ExpertNet::new(24, &Device::default().autodiff())
}

fn base() -> MuonConfig {
    MuonConfig::new().with_rule(RoutingRule::muon("experts").batch())
}

/// The weights after all steps, by Burn's optimizer of single parameters.
fn by_parameter(config: &MuonConfig) -> ExpertNet {
    let mut net = net();
    let mut optim = config.init(&net);
    for step in 0..STEPS {
        let gradients = gradients(&net, step);
        net = optim.step(LR, net, gradients);
    }
    net
}

/// The same in batches.
fn in_batches(config: &MuonConfig) -> ExpertNet {
    let mut net = net();
    let world = World::alone(Device::default().autodiff());
    let dist = DistMuonConfig::new().with_muon(config.clone()).with_small_elements(8);
    let mut optim = dist.init(&world, &net).unwrap();
    for step in 0..STEPS {
        let gradients = gradients(&net, step);
        net = optim.step(LR, net, gradients).unwrap();
    }
    net
}

/// The weights after all steps on two ranks, with a save and a load in between.
fn on_ranks(config: &MuonConfig, lay: fn(Layout) -> Layout) -> ExpertNet {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.ckpt");
    let trained = World::threads(vec![Device::default().autodiff(); 2], |world| {
        let start = || {
            let layout = lay(Layout::from(&world)).with_small_elements(8);
            let dist = DistMuonConfig::new().with_muon(config.clone()).with_small_elements(8);
            dist.start(layout, net())
        };
        let (mut net, mut optim) = start()?;
        for step in 0..STEPS {
            if step == STEPS / 2 {
                optim.save(&path, &net, &())?;
                let (fresh, other) = start()?;
                (net, optim, ()) = other.load(&path, fresh)?;
            }
            let gradients = optim.backward(&loss(&net, step), &net)?;
            net = optim.step(LR, net, gradients)?;
        }
        optim.layout().unshard(&net)
    });
    trained.unwrap().swap_remove(0)
}

/// A loss with the gradients that the other runs have.
fn loss(net: &ExpertNet, step: u64) -> Tensor<1> {
    fn product<const D: usize>(
        of: &Param<Tensor<D>>,
        with: &Param<Tensor<D>>,
        gradients: &mut GradientsParams,
    ) -> Tensor<1> {
        let gradient = gradients.remove::<D>(with.id).expect("every parameter has one");
        (of.val() * Tensor::from_inner(gradient)).sum()
    }
    let whole = self::net();
    let mut gradients = gradients(&whole, step);
    let mut loss = product(&net.embedding.weight, &whole.embedding.weight, &mut gradients)
        + product(&net.experts, &whole.experts, &mut gradients);
    let layers = net.layers.iter().chain([&net.head]);
    for (layer, whole) in layers.zip(whole.layers.iter().chain([&whole.head])) {
        let biases = [layer, whole].map(|layer| layer.bias.as_ref().expect("a bias"));
        loss = loss
            + product(&layer.weight, &whole.weight, &mut gradients)
            + product(biases[0], biases[1], &mut gradients);
    }
    loss
}

/// The values of one parameter.
fn of<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
    param.val().into_data().iter::<f32>().collect()
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_beta_1(0.7).with_beta_2(0.8).with_epsilon(1e-3).with_weight_decay(0.5)
}

/// Compares chosen parameters with those of a configuration for all, and the rest with the base.
fn compare(
    ruled: &MuonConfig,
    all: &MuonConfig,
    chosen: impl Fn(&ExpertNet) -> Vec<Vec<f32>>,
    rest: impl Fn(&ExpertNet) -> Vec<Vec<f32>>,
) {
    let (all, base) = (by_parameter(all), by_parameter(&base()));
    assert_ne!(chosen(&all), chosen(&base), "the settings have an effect");
    for (case, net) in [
        ("single", by_parameter(ruled)),
        ("batched", in_batches(ruled)),
        ("two ranks", on_ranks(ruled, |layout| layout)),
        ("owned", on_ranks(ruled, |layout| layout.owned("dp"))),
        ("rows", on_ranks(ruled, |layout| layout.rows("dp"))),
        ("reduced", on_ranks(ruled, Layout::overlap_backward)),
    ] {
        assert_same_weights(case, &chosen(&net).concat(), &chosen(&all).concat());
        assert_same_weights(case, &rest(&net).concat(), &rest(&base).concat());
    }
}

fn matrices(net: &ExpertNet) -> Vec<Vec<f32>> {
    let layers = net.layers.iter().map(|layer| of(&layer.weight));
    layers.chain([of(&net.experts)]).collect()
}

fn head(net: &ExpertNet) -> Vec<Vec<f32>> {
    vec![of(&net.head.weight)]
}

fn embedding(net: &ExpertNet) -> Vec<Vec<f32>> {
    vec![of(&net.embedding.weight)]
}

fn biases(net: &ExpertNet) -> Vec<Vec<f32>> {
    let layers = net.layers.iter().chain([&net.head]);
    layers.map(|layer| of(layer.bias.as_ref().unwrap())).collect()
}

#[test]
fn a_rule_has_betas_epsilon_and_decay_of_its_own() {
    let ruled = base().with_rule(RoutingRule::elementwise(r"head\.weight", adamw()));
    let rest = |net: &ExpertNet| [matrices(net), embedding(net), biases(net)].concat();
    compare(&ruled, &base().with_adamw(adamw()), head, rest);
}

#[test]
fn a_rule_may_take_another_optimizer_for_a_role() {
    let lion = LionConfig::new().with_weight_decay(0.3);
    let rule = RoutingRule::elementwise("", lion.clone()).of_role(ParameterRole::Vector);
    let rest = |net: &ExpertNet| [matrices(net), embedding(net), head(net)].concat();
    compare(&base().with_rule(rule), &base().with_rest(lion.into()), biases, rest);
}

#[test]
fn roles_have_betas_of_their_own() {
    let all = || AdamWConfig::new().with_beta_1(0.7).with_beta_2(0.8);
    let of_embeddings = AdamWConfig::new().with_embedding_betas(Some([0.7, 0.8]));
    let rest = |net: &ExpertNet| [matrices(net), head(net), biases(net)].concat();
    compare(&base().with_adamw(of_embeddings), &base().with_adamw(all()), embedding, rest);
    let of_head = AdamWConfig::new().with_head_betas(Some([0.7, 0.8]));
    let rest = |net: &ExpertNet| [matrices(net), embedding(net), biases(net)].concat();
    compare(&base().with_adamw(of_head), &base().with_adamw(all()), head, rest);
    let of_vectors = AdamWConfig::new().with_vector_betas(Some([0.7, 0.8]));
    let rest = |net: &ExpertNet| [matrices(net), embedding(net), head(net)].concat();
    compare(&base().with_adamw(of_vectors), &base().with_adamw(all()), biases, rest);
}

#[test]
fn several_roles_have_settings_of_their_own_together() {
    let of_head = adamw().with_head_lr(0.5);
    let config = base()
        .with_rule(RoutingRule::elementwise("", of_head.clone()).of_role(ParameterRole::Head))
        .with_rule(
            RoutingRule::elementwise("", LionConfig::new()).of_role(ParameterRole::Embedding),
        );
    let chosen = |net: &ExpertNet| head(net);
    let rest = |net: &ExpertNet| [matrices(net), biases(net)].concat();
    compare(&config, &base().with_adamw(of_head), chosen, rest);
    let lion = by_parameter(&base().with_rest(LionConfig::new().into()));
    for net in [by_parameter(&config), in_batches(&config)] {
        assert_same_weights("lion", &embedding(&net).concat(), &embedding(&lion).concat());
    }
}

#[test]
fn a_rule_of_muons_has_momentum_decay_and_rate_of_its_own() {
    let momentum = Schedule::momentum_warmup(0.9, 2);
    let decay = || WeightDecay::Cautious(0.4.into());
    let rule = RoutingRule::muon("experts")
        .batch()
        .momentum(momentum.clone())
        .weight_decay(decay())
        .lr_factor(3.0);
    let all = base().with_momentum(momentum.into()).with_weight_decay(decay()).with_lr_factor(3.0);
    let chosen = |net: &ExpertNet| vec![of(&net.experts)];
    let rest = |net: &ExpertNet| {
        let layers = net.layers.iter().map(|layer| of(&layer.weight)).collect();
        [layers, embedding(net), head(net), biases(net)].concat()
    };
    compare(&base().with_rule(rule), &all, chosen, rest);
}

#[test]
fn a_rule_has_a_factor_on_the_rate_of_its_role() {
    let rule = RoutingRule::adamw("embedding").lr_factor(0.25);
    let all = base().with_adamw(AdamWConfig::new().with_embedding_lr(0.25));
    let rest = |net: &ExpertNet| [matrices(net), head(net), biases(net)].concat();
    compare(&base().with_rule(rule), &all, embedding, rest);
}

#[test]
fn the_table_shows_settings_of_rules() {
    let config = base()
        .with_rule(RoutingRule::muon(r"layers\.0\.weight").lr_factor(4.0).weight_decay(0.0))
        .with_rule(RoutingRule::elementwise("embedding", adamw()).lr_factor(0.5))
        .with_rule(RoutingRule::elementwise("", LionConfig::new()).of_role(ParameterRole::Head))
        .with_adamw(AdamWConfig::new().with_vector_betas(Some([0.6, 0.9])));
    let routing = config.route(&net()).unwrap();
    let optimizer = |path: &str| {
        let mut routes = routing.routes().iter();
        routes.find(|route| route.path == path).unwrap().optimizer.clone()
    };
    assert_eq!(optimizer("layers.0.weight"), "Muon, 4 x rate, decay 0");
    assert_eq!(
        optimizer("embedding.weight"),
        "AdamW (embedding), 0.5 x rate, betas 0.7, 0.8, decay 0.5, epsilon 1e-3"
    );
    assert_eq!(optimizer("head.weight"), "Lion (head), betas 0.9, 0.99, decay 0");
    assert_eq!(optimizer("layers.1.weight"), "Muon");
    assert_eq!(optimizer("layers.1.bias"), "AdamW (vector), betas 0.6, 0.9, decay 0");
    let names: Vec<_> = routing.summary().into_iter().map(|role| role.optimizer).collect();
    assert_eq!(names, ["Muon", "AdamW (embedding)", "Lion (head)", "AdamW (vector)"]);
}

#[test]
fn the_table_shows_betas_and_decay_of_a_role_but_not_for_a_users_optimizer() {
    let adamw = AdamWConfig::new().with_weight_decay(0.5).with_vector_decay(0.25);
    let config = base()
        .with_optimizer("lamb", LambConfig::new().build())
        .with_rule(RoutingRule::custom(r"layers\.2\.bias", "lamb"))
        .with_adamw(adamw.with_vector_betas(Some([0.6, 0.9])));
    let routing = config.route(&net()).unwrap();
    let shown = |path: &str| routing.routes().iter().find(|route| route.path == path).unwrap();
    assert_eq!(shown("layers.1.bias").optimizer, "AdamW (vector), betas 0.6, 0.9, decay 0.125");
    assert_eq!(shown("layers.2.bias").optimizer, "lamb (vector)");
}

#[test]
fn settings_of_rules_are_saved_as_json() {
    use burn::config::Config;
    let config = base()
        .with_rule(RoutingRule::elementwise("head", adamw()).of_role(ParameterRole::Head))
        .with_rule(RoutingRule::muon("layers").momentum(0.8).lr_factor(2.0).heads(3).of_inputs());
    let path = std::env::temp_dir().join(format!("distmuon-rules-{}.json", std::process::id()));
    config.save(&path).unwrap();
    let loaded = MuonConfig::load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(loaded.rules, config.rules);
    // Rules of older files have none of the settings.
    let old = r#"{"pattern":"probe","to":"AdamW"}"#;
    let old: RoutingRule = serde_json::from_str(old).unwrap();
    assert_eq!(old, RoutingRule::adamw("probe"));
}

#[test]
fn settings_that_no_run_can_use_are_rejected_with_their_rule() {
    let error = |rule: RoutingRule| base().with_rule(rule).route(&net()).unwrap_err().to_string();
    let beta = AdamWConfig::new().with_beta_2(1.0);
    for (rule, words) in [
        (RoutingRule::elementwise("head", beta), "rules (`head`).AdamW.beta_2"),
        (RoutingRule::adamw("head").lr_factor(-1.0), "rules (`head`).lr_factor"),
        (RoutingRule::muon("layers").momentum(1.0).into(), "rules (`layers`).momentum"),
        (
            RoutingRule::muon("layers").weight_decay(f64::NAN).into(),
            "rules (`layers`).weight_decay",
        ),
    ] {
        let error = error(rule);
        assert!(error.contains(words), "{error}");
    }
    let unused = RoutingRule::adamw("head").of_role(ParameterRole::Embedding);
    let unused = base().with_rule(unused).route(&net()).unwrap_err();
    assert!(matches!(unused, Error::UnusedRule { .. }), "{unused}");
}

/// A program that sets the momentum while it runs does not change that of a rule.
#[test]
fn values_of_a_running_program_leave_those_of_rules() {
    let rule = RoutingRule::muon("experts").batch().momentum(0.5).weight_decay(0.2);
    let config = base().with_rule(rule);
    let trained = |set: bool| {
        let mut net = net();
        let mut optim = config.init_batched(&net).unwrap();
        if set {
            optim.set_momentum(0.1).unwrap();
            optim.set_weight_decay(0.9).unwrap();
        }
        for step in 0..STEPS {
            let gradients = gradients(&net, step);
            net = optim.step(LR, net, gradients).unwrap();
        }
        net
    };
    let (set, unset) = (trained(true), trained(false));
    assert_same_weights("the rule's", &of(&set.experts), &of(&unset.experts));
    assert_ne!(of(&set.layers[0].weight), of(&unset.layers[0].weight));
}

/// Projections whose inputs are three heads, and whose outputs are.
#[derive(Module, Debug)]
struct Attention {
    query: Param<Tensor<2>>,
    output: Param<Tensor<2>>,
}

fn attention() -> Attention {
    let ExpertNet { layers, .. } = net();
    let weight = |index: usize| layers[index].weight.clone();
    Attention { query: weight(1), output: weight(2) }
}

/// Blocks of inputs are trained as the blocks of outputs of the transposed matrix, where nothing
/// depends on the layout.
#[test]
fn heads_of_inputs_are_matrices_of_their_own() {
    let config = |output: RoutingRule| {
        MuonConfig::new()
            .with_rule(RoutingRule::muon("query").heads(3))
            .with_rule(output)
            .with_weight_decay(0.3.into())
    };
    let by_inputs = config(RoutingRule::muon("output").heads(3).of_inputs().into());
    let by_outputs = {
        let turned = distmuon::MatrixLayout::OutIn;
        config(RoutingRule::muon("output").heads(3).layout(turned).into())
    };
    let routing = by_inputs.route(&attention()).unwrap();
    let route = &routing.routes()[1];
    assert_eq!((&*route.blocks, &*route.optimizer), (&[3, 3, 3][..], "Muon, 3 blocks"));
    assert_eq!(route.block_side, distmuon::BlockSide::Inputs);
    let whole = config(RoutingRule::muon("output").into());
    let train = |config: &MuonConfig| {
        let mut net = attention();
        let mut optim = config.init(&net);
        for step in 0..STEPS {
            let gradients = gradients(&net, step);
            net = optim.step(LR, net, gradients);
        }
        values(&net)
    };
    // The scale that matches AdamW does not depend on the layout.
    assert_same_weights("inputs", &train(&by_inputs), &train(&by_outputs));
    assert_ne!(train(&by_inputs), train(&whole));
    let error = config(RoutingRule::muon("output").heads(4).of_inputs().into());
    let error = error.route(&attention()).unwrap_err().to_string();
    assert!(error.contains("a divisor of 9, the inputs"), "{error}");
}

/// The scale of a block of inputs is that of its layout: `sqrt(outputs / inputs)`.
#[test]
fn blocks_of_inputs_keep_the_layout_of_their_scale() {
    use distmuon::LrScale;
    let config = MuonConfig::new()
        .with_lr_scale(LrScale::Spectral)
        .with_momentum(0.0.into())
        .with_weight_decay(0.0.into())
        .with_rule(RoutingRule::muon("output").split([3, 6]).of_inputs())
        .with_rule(RoutingRule::muon("query"));
    let mut net = attention();
    let [id, _]: [ParamId; 2] = [net.output.id, net.query.id];
    let before = net.output.val().inner();
    let mut optim = config.init(&net);
    let mut grads = GradientsParams::new();
    grads.register(id, gradients(&net, 1).remove::<2>(id).unwrap());
    net = optim.step(1.0, net, grads);
    let update = before - net.output.val().inner();
    // An orthogonal block of `[3, 6]` has the norm `sqrt(3)`, one of `[6, 6]` has `sqrt(6)`; both
    // times their scales, `sqrt(6 / 3)` and 1.
    for (range, norm) in [(0..3, 6f32.sqrt()), (3..9, 6f32.sqrt())] {
        let block = update.clone().slice([range, 0..6]);
        let found = block.square().sum().sqrt().into_scalar::<f32>();
        assert!((found / norm - 1.0).abs() < 0.15, "{found} for {norm}");
    }
}

/// A configuration for every role compiles from its parts as well.
#[test]
fn settings_convert_from_every_configuration() {
    let lion: ElementwiseConfig = LionConfig::new().into();
    assert_eq!(
        RoutingRule::elementwise("a", lion),
        RoutingRule::elementwise("a", LionConfig::new())
    );
}
