//! Loading the states of runs that differ from the one that loads: nothing starts anew in silence.

use std::collections::BTreeSet;
use std::path::Path;

use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{
    AdamConfig, AdamWConfig as BurnAdamW, GradientsParams, ModuleOptimizer, MuonConfig as BurnMuon,
    OptimizerRecord,
};
use burn::tensor::{Bytes, DType, Device, FloatDType, Tensor};
use distmuon::checkpoint::{self, Difference, DifferenceKind};
use distmuon::comm::World;
use distmuon::parts::NorMuon;
use distmuon::{
    AdamWConfig, DistModuleOptimizer, DistMuonConfig, Error, LionConfig, MasterWeights, MuonConfig,
    Result, RoutingRule,
};
use distmuon_testing::device::has_type;
use distmuon_testing::models::{self, Fixed, largest_difference, tensors, values, weights};
use distmuon_testing::{lacks, logs, panic_message};

#[derive(Module, Debug)]
struct Net {
    tokens: Embedding,
    a: Linear,
    b: Linear,
    head: Linear,
}

impl Net {
    fn new(outputs: usize) -> Self {
        let device = Device::default().autodiff();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        let tokens = EmbeddingConfig::new(12, 8).init(&device);
        let net = Self { tokens, a: linear(8, 8), b: linear(8, 8), head: linear(8, outputs) };
        net.map(&mut Fixed::new(3))
    }

    fn cast(self, dtype: FloatDType) -> Self {
        self.map(&mut Cast(dtype))
    }
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.without_autodiff().cast(self.0).autodiff().require_grad())
    }
}

fn config() -> MuonConfig {
    MuonConfig::new()
}

const LR: f64 = 0.01;

/// Gradients of the parameters that are trained.
fn gradients<M: Module>(model: &M, seed: u64) -> GradientsParams {
    struct Trained(GradientsParams, GradientsParams);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.remove::<D>(param.id).expect("every parameter has one");
            if param.val().is_require_grad() {
                self.1.register(param.id, gradient);
            }
        }
    }
    let mut trained = Trained(models::gradients(model, seed), GradientsParams::new());
    model.visit(&mut trained);
    trained.1
}

/// A model and its optimizer after three steps.
fn trained(net: Net, mut optim: ModuleOptimizer) -> (Net, ModuleOptimizer) {
    let net = (0..3).fold(net, |net, step| {
        let gradients = gradients(&net, step);
        optim.step(LR, net, gradients)
    });
    (net, optim)
}

fn saved(folder: &Path, net: Net, optim: ModuleOptimizer) -> std::path::PathBuf {
    let path = folder.join("run.bpk");
    let (net, optim) = trained(net, optim);
    checkpoint::save(&path, &net, &optim, &3u64).unwrap();
    path
}

/// The parameters of the differences of a kind.
fn of(kind: DifferenceKind, differences: &[Difference]) -> Vec<&str> {
    let of_kind = differences.iter().filter(|difference| difference.kind == kind);
    let parameters: BTreeSet<&str> = of_kind.map(|found| found.parameter.as_str()).collect();
    parameters.into_iter().collect()
}

fn differences(error: Error) -> Vec<Difference> {
    let text = error.to_string();
    let Error::OtherRun { differences, .. } = error else { panic!("{error}") };
    for Difference { parameter, .. } in &differences {
        assert!(text.contains(&format!("`{parameter}`")), "{parameter} in {text}");
    }
    assert!(text.contains("`checkpoint::load_matching`"), "{text}");
    differences
}

/// The differences of a load into an optimizer, into one that forms batches, and into two ranks,
/// which are the same.
fn rejected(path: &Path, net: &Net, config: &MuonConfig) -> Vec<Difference> {
    let load = || checkpoint::load::<_, u64, _>(path, net.clone(), config.init(net));
    let plain = differences(load().map(drop).unwrap_err());
    let batched = config.init_batched(net).unwrap();
    let batched = checkpoint::load::<_, u64, _>(path, net.clone(), batched);
    let batched = differences(batched.map(drop).unwrap_err());
    let ranks = World::threads_with(World::devices(2), net.clone(), |world, net| {
        let optim = DistMuonConfig::new().with_muon(config.clone()).init(&world, &net)?;
        Ok::<_, Error>(optim.load::<_, u64>(path, net).map(drop).unwrap_err())
    });
    let sorted = |differences: &[Difference]| {
        let named = differences.iter().map(|found| (found.parameter.clone(), found.kind));
        named.collect::<BTreeSet<_>>()
    };
    for ranks in ranks.unwrap() {
        assert_eq!(sorted(&differences(ranks)), sorted(&plain));
    }
    assert_eq!(sorted(&batched), sorted(&plain));
    plain
}

/// A change of the configuration between two runs.
struct Change {
    what: &'static str,
    before: MuonConfig,
    after: MuonConfig,
    /// The parameters whose states do not fit.
    unfit: Vec<&'static str>,
}

fn changes() -> Vec<Change> {
    let change = |what, before: &MuonConfig, after: MuonConfig, unfit: &[&'static str]| Change {
        what,
        before: before.clone(),
        after,
        unfit: unfit.to_vec(),
    };
    let heads = |count| config().with_rule(RoutingRule::muon(r"^a\.weight").heads(count));
    let normuon = config().with_parts(vec![NorMuon::new(0.9).into()]);
    let split = heads(2);
    vec![
        change(
            "to AdamW",
            &config(),
            config().with_rule(RoutingRule::adamw(r"^a\.")),
            &["a.weight"],
        ),
        change(
            "to Muon",
            &config(),
            config().with_rule(RoutingRule::muon(r"^head\.weight")),
            &["head.weight"],
        ),
        change("into heads", &config(), split.clone(), &["a.weight"]),
        change("no more heads", &split, config(), &["a.weight"]),
        change("other heads", &split, heads(4), &["a.weight"]),
        change("a part", &config(), normuon.clone(), &["a.weight", "b.weight"]),
        change("no part", &normuon, config(), &["a.weight", "b.weight"]),
        change(
            "to Lion",
            &config(),
            config().with_rest(LionConfig::new().into()),
            &["a.bias", "b.bias", "head.bias", "head.weight", "tokens.weight"],
        ),
    ]
}

#[test]
fn states_of_another_kind_fail_at_load_with_all_differences() {
    let folder = tempfile::tempdir().unwrap();
    for Change { what, before, after, unfit } in changes() {
        let net = Net::new(12);
        let path = saved(folder.path(), net.clone(), before.init(&net));
        let found = rejected(&path, &Net::new(12), &after);
        assert_eq!(of(DifferenceKind::State, &found), unfit, "{what}: {found:?}");
        assert_eq!(found.len(), unfit.len(), "{what}: {found:?}");
    }
}

/// Burn's own loading returns no error.
#[test]
fn states_of_another_kind_fail_in_the_step_after_burns_loading() {
    for Change { what, before, after, unfit } in changes() {
        let net = Net::new(12);
        let (net, optim) = trained(net.clone(), before.init(&net));
        let record = || optim.to_record();
        let mut loaded = after.init(&net).load_record(record());
        let steps = gradients(&net, 7);
        let message = panic_message(|| loaded.step(LR, net.clone(), steps));
        for parameter in unfit {
            assert!(
                message.contains(&format!("optimizer state of `{parameter}`")),
                "{what}: {message}"
            );
        }
        // Saved again before a step, the states are refused again.
        let again = after.init(&net).load_record(loaded_again(&after, &net, record()));
        let mut again = again;
        let steps = gradients(&net, 7);
        assert!(panic_message(|| again.step(LR, net.clone(), steps)).contains("of another run"));
    }
}

fn loaded_again(config: &MuonConfig, net: &Net, record: OptimizerRecord) -> OptimizerRecord {
    let bytes = config.init(net).load_record(record).to_record().into_bytes().unwrap();
    OptimizerRecord::from_bytes(bytes).unwrap()
}

#[test]
fn other_master_weights_fail_at_load() {
    if !has_type(FloatDType::BF16) {
        lacks("bfloat16");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(12).cast(FloatDType::BF16);
    assert_eq!(net.a.weight.val().dtype(), DType::BF16);
    let with = |master| config().with_master_weights(master);
    let path = saved(folder.path(), net.clone(), with(MasterWeights::Full).init(&net));
    for other in [MasterWeights::Mantissa, MasterWeights::None] {
        let found = rejected(&path, &net, &with(other));
        assert_eq!(of(DifferenceKind::State, &found).len(), 7, "{found:?}");
    }
}

#[test]
fn a_matching_load_takes_over_what_fits_and_lists_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    for Change { what, before, after, unfit } in changes() {
        let net = Net::new(12);
        let path = saved(folder.path(), net.clone(), before.init(&net));
        let (expected, _) = trained(net.clone(), before.init(&net));
        let fresh = Net::new(12);
        let (loaded, optim, step, found): (_, ModuleOptimizer, u64, _) =
            checkpoint::load_matching(&path, fresh.clone(), after.init(&fresh)).unwrap();
        assert_eq!((step, of(DifferenceKind::State, &found)), (3, unfit.clone()), "{what}");
        assert_eq!(found.len(), unfit.len(), "{what}: {found:?}");
        assert!(weights(&loaded) == weights(&expected), "{what}");
        let next = stepped(loaded, optim);
        // The states that fit are those of the run, and the others are empty.
        let batched = after.init_batched(&fresh).unwrap();
        let (loaded, mut batched, _, found): (_, DistModuleOptimizer, u64, _) =
            checkpoint::load_matching(&path, fresh, batched).unwrap();
        assert_eq!(of(DifferenceKind::State, &found), unfit, "{what}");
        let steps = gradients(&loaded, 9);
        let batched = batched.step(LR, loaded, steps).unwrap();
        assert!(largest_difference(&values(&next), &values(&batched)) < 1e-5, "{what}");

        let (net, optim) = trained(net.clone(), before.init(&net));
        let whole = stepped(net, optim);
        for (path, [new, old]) in by_path(&next, &whole) {
            let same = new == old;
            assert_eq!(same, !unfit.contains(&path), "{what}: `{path}`");
        }
    }
}

fn stepped(net: Net, mut optim: ModuleOptimizer) -> Net {
    let steps = gradients(&net, 9);
    optim.step(LR, net, steps)
}

/// The weights of two models by path.
fn by_path<'a>(a: &Net, b: &Net) -> Vec<(&'a str, [Vec<u8>; 2])> {
    let paths =
        ["tokens.weight", "a.weight", "a.bias", "b.weight", "b.bias", "head.weight", "head.bias"];
    let pairs = weights(a).into_iter().zip(weights(b));
    paths.into_iter().zip(pairs.map(|(a, b)| [a, b])).collect()
}

/// The settings of both implementations of AdamW.
fn burns_adamw() -> BurnAdamW {
    BurnAdamW::new().with_beta_2(0.99).with_epsilon(1e-8).with_weight_decay(0.01)
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_beta_2(0.99).with_weight_decay(0.01)
}

#[test]
fn moments_of_burns_adamw_continue() {
    moments_continue(&|| burns_adamw().init(), adamw());
}

#[test]
fn moments_of_burns_adam_continue() {
    let adam = || AdamConfig::new().with_beta_2(0.99).with_epsilon(1e-8).init();
    moments_continue(&adam, adamw().with_weight_decay(0.0));
}

/// Moments of an optimizer of Burn's continue in this crate's AdamW with the same settings.
fn moments_continue(burns: &dyn Fn() -> ModuleOptimizer, adamw: AdamWConfig) {
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(12);
    let path = saved(folder.path(), net.clone(), burns());
    let (net, optim) = trained(net, burns());
    let expected = values(&stepped(net.clone(), optim.clone()));
    let close = |case: &str, net: &Net| {
        let difference = largest_difference(&values(net), &expected);
        assert!(difference < 1e-6, "{case}: {difference}");
    };

    let everything = config().with_adamw(adamw.clone()).with_rule(RoutingRule::adamw("."));
    let fresh = Net::new(12);
    let (loaded, optim_loaded, _): (_, _, u64) =
        checkpoint::load(&path, fresh.clone(), everything.init(&fresh)).unwrap();
    close("init", &stepped(loaded, optim_loaded));
    let batched = everything.init_batched(&fresh).unwrap();
    let (loaded, mut batched, _): (_, _, u64) = checkpoint::load(&path, fresh, batched).unwrap();
    let steps = gradients(&loaded, 9);
    close("init_batched", &batched.step(LR, loaded, steps).unwrap());
    let optim = everything.init(&net).load_record(optim.to_record());
    close("Burn's loading", &stepped(net.clone(), optim));
    let ranks = World::threads_with(World::devices(2), net, |world, net| {
        let optim = DistMuonConfig::new().with_muon(everything.clone()).init(&world, &net)?;
        let (loaded, mut optim, _): (_, _, u64) = checkpoint::load(&path, net, optim)?;
        let steps = gradients(&loaded, 9);
        optim.step(LR, loaded, steps)
    });
    ranks.unwrap().iter().for_each(|net| close("ranks", net));

    // Matrices have a momentum instead.
    let muon = config().with_adamw(adamw);
    let found = rejected(&path, &Net::new(12), &muon);
    assert_eq!(of(DifferenceKind::State, &found), ["a.weight", "b.weight"]);
    let fresh = Net::new(12);
    let optim = muon.init(&fresh);
    let (loaded, optim, _, differences): (_, _, u64, _) =
        checkpoint::load_matching(&path, fresh, optim).unwrap();
    assert_eq!(of(DifferenceKind::State, &differences), ["a.weight", "b.weight"]);
    let stepped = values(&stepped(loaded, optim));
    // The embedding, then `a` and `b`, whose matrices Muon updates, then the head.
    for (range, continues) in [(0..96, true), (96..160, false), (160..168, true), (232..240, true)]
    {
        let difference = largest_difference(&stepped[range.clone()], &expected[range.clone()]);
        assert_eq!(difference < 1e-6, continues, "{range:?}: {difference}");
    }
}

#[test]
fn states_of_other_optimizers_of_burn_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(12);
    let path = saved(folder.path(), net.clone(), burns_adamw().with_amsgrad(true).init());
    let everything = config().with_adamw(adamw()).with_rule(RoutingRule::adamw("."));
    assert_eq!(rejected(&path, &net, &everything).len(), 7);
    let muon = ModuleOptimizer::from(BurnMuon::new().build());
    let matrices = |net: &Net| {
        let mut all = gradients(net, 1);
        let mut some = GradientsParams::new();
        for layer in [&net.a, &net.b] {
            some.register(layer.weight.id, all.remove::<2>(layer.weight.id).unwrap());
        }
        some
    };
    let mut muon = muon;
    let steps = matrices(&net);
    let net = muon.step(LR, net, steps);
    checkpoint::save(&path, &net, &muon, &3u64).unwrap();
    let found = rejected(&path, &net, &config());
    assert_eq!(of(DifferenceKind::State, &found), ["a.weight", "b.weight"]);
    // Burn's own loading fails in the next step.
    let mut loaded = config().init(&net).load_record(muon.to_record());
    let steps = gradients(&net, 2);
    let message = panic_message(|| loaded.step(LR, net.clone(), steps));
    assert!(message.contains("optimizer state of `a.weight`"), "{message}");
    assert!(message.contains("begin with a new optimizer"), "{message}");
}

#[test]
fn weights_load_without_an_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(12);
    let path = saved(folder.path(), net.clone(), config().init(&net));
    let (expected, _) = trained(net.clone(), config().init(&net));
    let loaded = checkpoint::load_weights(&path, Net::new(12)).unwrap();
    assert!(weights(&loaded) == weights(&expected));

    let found = differences(checkpoint::load_weights(&path, Net::new(20)).map(drop).unwrap_err());
    assert_eq!(of(DifferenceKind::Weights, &found), ["head.bias", "head.weight"]);
    assert!(found[0].problem.contains("expected [8, 20]"), "{found:?}");
    assert!(found[0].problem.contains("got [8, 12]"), "{found:?}");
}

#[test]
fn a_run_continues_with_another_head_or_with_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(12);
    let path = saved(folder.path(), net.clone(), config().init(&net));
    let (expected, _) = trained(net.clone(), config().init(&net));

    let fresh = Net::new(20);
    let found = rejected(&path, &fresh, &config());
    assert_eq!(of(DifferenceKind::Weights, &found), ["head.bias", "head.weight"]);
    let (loaded, optim, _, found): (_, ModuleOptimizer, u64, _) =
        checkpoint::load_matching(&path, fresh.clone(), config().init(&fresh)).unwrap();
    assert_eq!(of(DifferenceKind::Weights, &found), ["head.bias", "head.weight"]);
    assert_eq!(found.len(), 2, "{found:?}");
    for (path, [new, old]) in by_path(&loaded, &expected).into_iter().take(5) {
        assert!(new == old, "{path}");
    }
    assert!(weights(&loaded.head) == weights(&fresh.head));
    stepped(loaded, optim);

    let fresh = Net::new(12).apply_lora(Lora::new(2, 4.0));
    let adapted = MuonConfig::new().with_rule(RoutingRule::adamw("lora"));
    let (loaded, optim, _, found): (_, ModuleOptimizer, u64, _) =
        checkpoint::load_matching(&path, fresh.clone(), adapted.init(&fresh)).unwrap();
    // The adapters are new, and the weights below them are frozen.
    let new = of(DifferenceKind::Weights, &found);
    assert!(!new.is_empty() && new.iter().all(|path| path.contains("lora")), "{new:?}");
    assert!(of(DifferenceKind::State, &found).contains(&"a.weight"), "{found:?}");
    stepped(loaded, optim);
}

/// Layers that are trained from now on have no state yet. Those that are frozen from now on have
/// one that nothing uses.
#[test]
fn layers_are_unfrozen_and_frozen_between_runs() {
    let folder = tempfile::tempdir().unwrap();
    let frozen = || {
        let mut net = Net::new(12);
        net.a = net.a.no_grad();
        net
    };
    let path = saved(folder.path(), frozen(), config().init(&frozen()));
    let net = Net::new(12);
    logs::collect();
    let (loaded, optim, _): (_, ModuleOptimizer, u64) =
        checkpoint::load(&path, net.clone(), config().init(&net)).unwrap();
    stepped(loaded, optim.clone());
    let named = |what: &str| logs::with(&["WARN", what, "`a.weight`", "empty one"]);
    assert!(!named(&path.display().to_string()).is_empty(), "a load names what starts anew");
    // Burn's own loading says nothing: the step does.
    let before = named("the loaded record").len();
    stepped(net.clone(), config().init(&net).load_record(optim.to_record()));
    assert!(named("the loaded record").len() > before);
    for batched in [false, true] {
        let found = if batched {
            let optim = config().init_batched(&net).unwrap();
            checkpoint::load_matching::<_, u64, _>(&path, net.clone(), optim).unwrap().3
        } else {
            let optim = config().init(&net);
            checkpoint::load_matching::<_, u64, _>(&path, net.clone(), optim).unwrap().3
        };
        assert_eq!(of(DifferenceKind::NoState, &found), ["a.bias", "a.weight"]);
        assert_eq!(found.len(), 2, "{found:?}");
    }

    let path = saved(folder.path(), net.clone(), config().init(&net));
    let found = rejected(&path, &frozen(), &config());
    assert_eq!(of(DifferenceKind::State, &found), ["a.bias", "a.weight"]);
}

/// Weights that were copied into a model of other identities leave Burn with two states of every
/// parameter.
#[test]
fn states_of_earlier_identities_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let net = Net::new(12);
    let (net, mut optim) = trained(net.clone(), config().init(&net));
    checkpoint::save(&path, &net, &optim, &3u64).unwrap();
    let in_file = || burn_pack::Reader::from_file_exact(&path).unwrap().tensor_names().len();
    let before = in_file();

    // The states are those of the paths, whatever the identities.
    let earlier = net.a.weight.id.val();
    let renewed = renew(net.clone());
    checkpoint::save(&path, &renewed, &optim, &3u64).unwrap();
    let continued = |fresh: Net| {
        let (loaded, optim, _): (_, ModuleOptimizer, u64) =
            checkpoint::load(&path, fresh.clone(), config().init(&fresh)).unwrap();
        weights(&stepped(loaded, optim))
    };
    let expected = weights(&stepped(net, optim.clone()));
    assert!(continued(Net::new(12)) == expected, "the states are found by path");

    let steps = gradients(&renewed, 9);
    let renewed = optim.step(LR, renewed, steps);
    logs::collect();
    assert_eq!(tensors(optim.to_record().into_bytes().unwrap()).len(), 2 * states(&renewed));
    checkpoint::save(&path, &renewed, &optim, &4u64).unwrap();
    assert_eq!(in_file(), before, "no tensor is left of the earlier identities");
    let earlier = format!("`a.weight` (identity {earlier})");
    assert_eq!(logs::with(&["WARN", "optimizer states are dropped", &earlier]).len(), 1);
    let expected = weights(&stepped(renewed, optim));
    assert!(continued(Net::new(12)) == expected, "the states are those of the model");
}

/// The number of tensors in the states of a model.
fn states(net: &Net) -> usize {
    let (_, optim) = trained(net.clone(), config().init(net));
    tensors(optim.to_record().into_bytes().unwrap()).len()
}

fn renew(net: Net) -> Net {
    struct Renew;
    impl ModuleMapper for Renew {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            Param::initialized(ParamId::new(), param.val())
        }
    }
    net.map(&mut Renew)
}

/// A record of a model whose parameters have other paths and identities.
#[test]
fn a_record_of_another_model_fails_in_the_step_after_burns_loading() {
    let other = Linear8::new();
    let other_id = other.other.weight.id;
    let mut optim = config().init(&other);
    let steps = gradients(&other, 1);
    optim.step(LR, other, steps);
    let net = Net::new(12);
    logs::collect();
    let mut loaded = config().init(&net).load_record(optim.to_record());
    let steps = gradients(&net, 1);
    let message = panic_message(|| loaded.step(LR, net, steps));
    assert!(message.contains("the model does not have the parameter"), "{message}");
    let dropped = logs::with(&["WARN", &other_id.val().to_string(), "is dropped"]);
    assert_eq!(dropped.len(), 1, "{dropped:?}");
}

/// With batches and on ranks, it fails when it is loaded.
#[test]
fn a_record_of_another_model_is_refused_on_ranks() {
    let other = Linear8::new();
    let mut optim = config().init(&other);
    let steps = gradients(&other, 1);
    optim.step(LR, other, steps);
    let record = optim.to_record().into_bytes().unwrap().to_vec();
    let record = || OptimizerRecord::from_bytes(Bytes::from_bytes_vec(record.clone())).unwrap();
    let ensure_named = |error: Error| {
        let text = error.to_string();
        let Error::OtherRun { differences, .. } = error else { panic!("{text}") };
        let lost = of(DifferenceKind::State, &differences);
        assert_eq!(lost, ["other.bias", "other.weight"], "{text}");
        assert!(text.contains("begin with a new optimizer"), "{text}");
    };
    let net = Net::new(12);
    let batched = config().init_batched(&net).unwrap();
    ensure_named(batched.load_record(record()).map(drop).unwrap_err());
    let ranks = World::threads_with(World::devices(2), net, |world, net| {
        let optim = DistMuonConfig::new().with_muon(config()).init(&world, &net)?;
        Ok::<_, Error>(optim.load_record(record()).map(drop).unwrap_err())
    });
    ranks.unwrap().into_iter().for_each(ensure_named);
}

#[derive(Module, Debug)]
struct Linear8 {
    other: Linear,
}

impl Linear8 {
    fn new() -> Self {
        Self { other: LinearConfig::new(8, 8).init(&Device::default().autodiff()) }
    }
}

/// On ranks, a part of the states may be loaded on each of them.
#[test]
fn ranks_take_over_what_fits() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(12);
    for Change { what, before, after, unfit } in changes() {
        let path = saved(folder.path(), net.clone(), before.init(&net));
        let alone = {
            let optim = after.init(&net);
            let (loaded, optim, _, _): (_, ModuleOptimizer, u64, _) =
                checkpoint::load_matching(&path, net.clone(), optim)?;
            values(&stepped(loaded, optim))
        };
        let ranks = World::threads_with(World::devices(3), net.clone(), |world, net| {
            let optim = DistMuonConfig::new().with_muon(after.clone()).init(&world, &net)?;
            let (loaded, mut optim, _, found): (_, _, u64, _) =
                checkpoint::load_matching(&path, net, optim)?;
            assert_eq!(of(DifferenceKind::State, &found), unfit, "{what}");
            let steps = gradients(&loaded, 9);
            Ok::<_, Error>(values(&optim.step(LR, loaded, steps)?))
        })?;
        for values in ranks {
            assert!(largest_difference(&values, &alone) < 1e-5, "{what}");
        }
    }
    Ok(())
}
