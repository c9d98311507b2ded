//! Claims of the guide that its programs alone do not show.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Param;
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{
    AdamWConfig as BurnAdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer,
    MuonConfig as BurnMuonConfig, SgdConfig,
};
use burn::tensor::{Bytes, DType, Device, Int, Tensor};
use distmuon::{
    AdamWConfig, Coefficients, DistMuonConfig, LrScale, MatrixLayout, MuonConfig,
    NewtonSchulzConfig, RoutingRule, World, checkpoint,
};
use distmuon_testing::device::is_flex;
use distmuon_testing::models::largest_difference;
use regex::Regex;

fn device() -> Device {
    Device::default().autodiff()
}

fn feed_forward() -> PositionWiseFeedForward {
    PositionWiseFeedForwardConfig::new(8, 16).with_dropout(0.0).init(&device())
}

fn gradients(model: &PositionWiseFeedForward, step: i64) -> GradientsParams {
    let x = Tensor::<1, Int>::arange(step * 64..step * 64 + 64, &device()).float().sin();
    let x = x.reshape([4, 2, 8]);
    let loss = (model.forward(x.clone()) - x.flip([2])).square().mean();
    GradientsParams::from_grads(loss.backward(), model)
}

/// The sum of `count` times the same gradients.
fn summed_gradients(count: usize, model: &PositionWiseFeedForward, step: i64) -> GradientsParams {
    let mut sum = GradientsAccumulator::new();
    (0..count).for_each(|_| sum.accumulate(model, gradients(model, step)));
    sum.grads()
}

fn values<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
    param.val().into_data().iter().collect()
}

fn weights(model: &PositionWiseFeedForward) -> Vec<f32> {
    let linear = |linear: &Linear| {
        [values(&linear.weight), linear.bias.as_ref().map(values).unwrap_or_default()].concat()
    };
    [linear(&model.linear_inner), linear(&model.linear_outer)].concat()
}

#[test]
fn the_clipping_setter_of_burns_optimizer_has_no_effect_and_is_not_saved() {
    let start = feed_forward();
    let trained = |mut optim: ModuleOptimizer| {
        let mut model = start.clone();
        for step in 0..3 {
            let grads = gradients(&model, step);
            model = optim.step(1e-2, model, grads);
        }
        weights(&model)
    };
    let clipping = GradientClippingConfig::Value(1e-12);
    let plain = trained(MuonConfig::new().init(&start));
    let by_setter = MuonConfig::new().init(&start).with_grad_clipping(clipping.init());
    assert!(by_setter.has_gradient_clipping());
    // Burn gives no earlier occasion for an error.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let rejected = checkpoint::save(&path, &start, &by_setter, &()).unwrap_err().to_string();
    assert!(rejected.contains("`MuonConfig::with_grad_clipping`"), "{rejected}");
    for (optim, effective) in [
        (MuonConfig::new().init(&start), MuonConfig::new().build().into()),
        (BurnAdamWConfig::new().init(), SgdConfig::new().init()),
    ] {
        let effective: ModuleOptimizer = effective;
        for optim in [optim, effective.with_grad_clipping(clipping.init())] {
            checkpoint::save(&path, &start, &optim, &()).unwrap();
        }
    }
    let loaded = checkpoint::load::<_, (), _>(&path, start.clone(), by_setter.clone());
    assert!(loaded.is_err());
    assert_eq!(
        trained(by_setter),
        plain,
        "the setter has an effect: correct docs/guide/clipping.md"
    );
    let by_config = MuonConfig::new().with_grad_clipping(Some(clipping));
    assert_ne!(trained(by_config.init(&start)), plain);
}

#[test]
fn the_settings_of_burns_adamw_give_its_steps() {
    let start = EmbeddingConfig::new(6, 4).init(&device());
    let trained = |mut optim: ModuleOptimizer| {
        let mut model: Embedding = start.clone();
        for step in 0..5 {
            let tokens = Tensor::<1, Int>::arange(0..6, &device()).reshape([2, 3]);
            let loss = (model.forward(tokens) - f64::from(step)).square().mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1e-2, model, grads);
        }
        values(&model.weight)
    };
    let same = AdamWConfig::new().with_beta_2(0.999).with_epsilon(1e-5).with_weight_decay(1e-4);
    let expected = trained(BurnAdamWConfig::new().init());
    let actual = trained(MuonConfig::new().with_adamw(same).init(&start));
    assert!(largest_difference(&expected, &actual) < 1e-6);
    let defaults = trained(MuonConfig::new().init(&start));
    assert!(largest_difference(&expected, &defaults) > 1e-4);
}

/// The page has these lines, and says which two of them are easily forgotten.
#[test]
fn the_settings_of_burns_muon_give_its_steps() {
    let start = feed_forward();
    let trained = |of_muon: &dyn Fn(&PositionWiseFeedForward) -> ModuleOptimizer| {
        let mut model = start.clone();
        let mut optim = of_muon(&model);
        for step in 0..5 {
            // Of matrices alone: Burn's Muon takes no vectors.
            let all = gradients(&model, step);
            let mut matrices = GradientsParams::new();
            for linear in [&model.linear_inner, &model.linear_outer] {
                matrices.register(linear.weight.id, all.get::<2>(linear.weight.id).unwrap());
            }
            model = optim.step(1e-2, model, matrices);
        }
        weights(&model)
    };
    let iteration =
        NewtonSchulzConfig::new().with_coefficients(Coefficients::KellerJordan).with_steps(Some(5));
    let without_two = MuonConfig::new()
        .with_newton_schulz(iteration)
        .with_lr_scale(LrScale::Original)
        .with_layout(MatrixLayout::OutIn)
        // The last `Linear` of this network is a head otherwise.
        .with_rule(RoutingRule::muon("weight"));
    let both = without_two.clone().with_momentum(0.95.into()).with_weight_decay(0.0.into());
    let burns = trained(&|_| BurnMuonConfig::new().init());
    let moved = largest_difference(&burns, &weights(&start));
    let differs = |config: &MuonConfig| {
        largest_difference(&burns, &trained(&|model| config.init(model))) / moved
    };
    assert!(differs(&both) < 1e-3, "{}", differs(&both));
    assert!(differs(&without_two) > 1e-2, "{}", differs(&without_two));
}

/// The Rust sources of a folder, as one text.
fn sources(folder: &Path, all: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of sources").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&fs::read_to_string(&path).expect("a source"));
        }
    }
}

/// The neighbouring words of a text, piece by piece: what stands for other values ends a piece.
fn pairs(text: &str) -> Vec<[String; 2]> {
    let values = Regex::new(r"`[^`]*`|\.\.\.|[0-9][0-9.a-z]*|\([^)]*\)|\[[^\]]*\]").unwrap();
    let word = Regex::new(r"[A-Za-z'_-]+").unwrap();
    let of_piece = |piece: &str| {
        let words: Vec<String> = word.find_iter(piece).map(|word| word.as_str().into()).collect();
        words.windows(2).map(|pair| [pair[0].clone(), pair[1].clone()]).collect::<Vec<_>>()
    };
    values.split(text).flat_map(of_piece).collect()
}

/// By pairs of words, since a program puts names and numbers between them.
#[test]
fn the_errors_that_the_page_on_troubleshooting_quotes_are_those_of_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = String::new();
    ["src", "cubecl_kernels/src"].iter().for_each(|name| sources(&root.join(name), &mut all));
    let joined = Regex::new(r"\\\n\s*").unwrap().replace_all(&all, "");
    let words: Vec<&str> =
        Regex::new(r"[A-Za-z'_-]+").unwrap().find_iter(&joined).map(|word| word.as_str()).collect();
    let said: HashSet<[&str; 2]> = words.windows(2).map(|pair| [pair[0], pair[1]]).collect();
    let quote = Regex::new(r"``\s?(.+?)\s?``|`([^`]+)`").unwrap();
    let (mut found, mut total) = (0, 0);
    for row in include_str!("../../docs/guide/troubleshooting.md").lines() {
        let Some(row) = row.strip_prefix("| ") else { continue };
        let cell = row.split(" | ").next().expect("a row has cells");
        for quoted in quote.captures_iter(cell) {
            let quoted = quoted.get(1).or(quoted.get(2)).expect("one of both").as_str();
            let pairs = pairs(quoted);
            let known = pairs.iter().filter(|[a, b]| said.contains(&[a.as_str(), b])).count();
            assert!(2 * known >= pairs.len(), "no error says {quoted}");
            (found, total) = (found + known, total + pairs.len());
        }
    }
    assert!(total > 200 && found * 20 > total * 19, "{found} of {total}");
}

#[test]
fn the_defaults_that_pages_give_in_numbers_are_those_of_the_code() {
    let config = DistMuonConfig::new();
    assert_eq!((config.check_every, config.muon.max_skipped), (1000, Some(100)));
    assert_eq!((config.muon.max_absent, config.audit_every), (Some(100), 0));
    assert_eq!(distmuon::comm::DEADLINE.as_secs(), 600);
}

/// On docs.rs, a page is a module, and a relative path leads nowhere: of two definitions of a link,
/// the first one counts, which is that of the module.
#[test]
fn every_relative_link_of_a_page_is_redirected_in_the_documentation_of_its_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let modules = fs::read_to_string(root.join("src/guide.rs")).unwrap();
    let inline = Regex::new(r"\]\((?:\.\./|[a-z-]+\.md)").unwrap();
    let definition = Regex::new(r"(?m)^\[([^\]]+)\]:\s+((?:\.\./|[a-z-]+\.md)\S*)$").unwrap();
    let redirect = Regex::new(r"/// \[([^\]]+)\]:(?:\n///)?\s+(\S+)").unwrap();
    // Where a page, a source or another document is found in the documentation.
    let target = |path: &str| match path.split_once(".md") {
        Some((page, heading)) if !page.contains('/') => {
            format!("crate::guide::{}{heading}", page.replace('-', "_"))
        }
        None if path.starts_with("../../src/") => "crate::".to_owned(),
        _ => "crate::guide#other-documents".to_owned(),
    };
    let (mut last, mut links) = (0, 0);
    for include in Regex::new(r#"include_str!\("(.*\.md)"\)"#).unwrap().captures_iter(&modules) {
        let all = include.get(0).unwrap();
        let redirected = &modules[last..all.start()];
        last = all.end();
        let page = fs::read_to_string(root.join("src").join(&include[1])).unwrap();
        let found = inline.find(&page).map(|found| found.as_str());
        assert_eq!(found, None, "{}: write `[text][page]`, and define `page`", &include[1]);
        let redirects: HashMap<&str, &str> =
            redirect.captures_iter(redirected).map(|found| found.extract().1.into()).collect();
        for link in definition.captures_iter(&page) {
            let (what, expected) = (format!("{}: {}", &include[1], &link[0]), target(&link[2]));
            let found = redirects.get(&link[1]).unwrap_or_else(|| panic!("{what}: no redirect"));
            let is_item = expected == "crate::" && found.starts_with(&expected);
            assert!(is_item || *found == expected, "{what}: expected {expected}, got {found}");
            links += 1;
        }
    }
    assert!(links > 150, "{links}");
}

#[test]
fn the_tests_that_the_features_of_other_systems_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = String::new();
    ["tests", "src", "cubecl_kernels"].iter().for_each(|name| sources(&root.join(name), &mut all));
    let page = include_str!("../../docs/design/coverage.md");
    let rows = page.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        Some((cells.next()?, cells.next()?, cells.next()?))
    });
    let mut shown = 0;
    for (feature, here, by) in rows {
        let is_test = |name: &&str| name.matches('_').count() >= 2 && !name.contains(' ');
        let names: Vec<&str> = by.split('`').skip(1).step_by(2).filter(is_test).collect();
        for name in &names {
            let function = match name.strip_suffix('*') {
                Some(start) => format!("fn {start}"),
                None => format!("fn {name}("),
            };
            assert!(all.contains(&function), "{feature}: no test `{name}`");
        }
        assert!(here != "yes" || !names.is_empty(), "{feature}: no test");
        shown += usize::from(here == "yes");
    }
    assert!(shown > 100, "{shown} features");
}

#[test]
fn the_scale_of_gradients_changes_clipped_steps_only() {
    let start = feed_forward();
    let world = World::alone(device());
    let trained = |count: usize, max_norm: Option<f64>| {
        let mut model = start.clone();
        let config = DistMuonConfig::new().with_max_norm(max_norm);
        let mut optim = config.init(&world, &model).unwrap();
        for step in 0..3 {
            // The norms of the steps differ, so a limit between them changes their weights.
            let count = if step == 1 { 3 * count } else { count };
            let grads = summed_gradients(count, &model, step);
            model = optim.step(1e-2, model, grads).unwrap();
        }
        weights(&model)
    };
    let moved = largest_difference(&trained(1, None), &weights(&start));
    let scaled = largest_difference(&trained(1, None), &trained(4, None));
    assert!(scaled < 1e-2 * moved, "{scaled} of {moved}");
    // None of the gradients reaches this limit, and all gradients that are four times as large do.
    let limit = Some(norm_limit(&start));
    let clipped = largest_difference(&trained(1, limit), &trained(4, limit));
    assert!(clipped > 2e-2 * moved, "{clipped} of {moved}");
}

/// A norm above those of all gradients of the clipping test.
fn norm_limit(start: &PositionWiseFeedForward) -> f64 {
    let grads = gradients(start, 0);
    let square = |grad: Tensor<2>| grad.square().sum().into_scalar::<f32>();
    let matrices = [&start.linear_inner, &start.linear_outer];
    let squares = matrices.map(|linear| square(grads.get(linear.weight.id).unwrap()));
    3.5 * f64::from(squares.iter().sum::<f32>().sqrt())
}

#[test]
fn the_record_of_a_burn_scheduler_fits_into_the_progress() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let model = LinearConfig::new(4, 8).init(&device());
    let scheduler = || CosineAnnealingLrSchedulerConfig::new(0.1, 10).init().unwrap();
    let mut first = scheduler();
    (0..3).for_each(|_| _ = first.step());
    let record = first.to_record().into_bytes().unwrap().to_vec();
    checkpoint::save(&path, &model, &MuonConfig::new().init(&model), &(3, record)).unwrap();

    let optim = MuonConfig::new().init(&model);
    let (_, _, (_, record)): (_, _, (usize, Vec<u8>)) =
        checkpoint::load(&path, model, optim).unwrap();
    let record = LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(record)).unwrap();
    let mut second = scheduler().load_record(record);
    assert_eq!(first.step().base(), second.step().base());
    assert_ne!(scheduler().step().base(), second.step().base());
}

#[test]
fn non_finite_progress_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let model = LinearConfig::new(4, 8).init(&device());
    let optim = MuonConfig::new().init(&model);
    checkpoint::save(&path, &model, &optim, &f64::NAN).unwrap();
    assert!(checkpoint::load::<_, f64, _>(&path, model, optim).is_err());
}

#[test]
fn the_factors_of_a_linear_layer_are_those_of_the_guide() {
    let factors = |shape: [usize; 2]| {
        [LrScale::MatchRmsAdamW, LrScale::Original, LrScale::Spectral, LrScale::None]
            .map(|scale| (1e3 * scale.factor(MatrixLayout::InOut, shape)).round() / 1e3)
    };
    assert_eq!(factors([512, 1024]), [6.4, 1.414, 1.414, 1.0]);
    assert_eq!(factors([1024, 512]), [6.4, 1.0, 0.707, 1.0]);
}

#[test]
fn the_operations_of_an_iteration_are_those_of_the_guide() {
    let muon = MuonConfig::new().build();
    let operations = |columns: usize| {
        let explanation =
            muon.newton_schulz().explain_shape([768, columns], DType::F32, &Device::default());
        (explanation.operations / 768_f64.powi(3)).round()
    };
    let page = include_str!("../../docs/guide/cost.md");
    let claim = format!(
        "{} `m^3` for a square matrix of `m` rows, {} `m^3` for `[m, 4m]` in float32",
        operations(768),
        operations(3072)
    );
    // On other backends products are not halved, and restarts differ.
    if is_flex() {
        assert!(page.contains(&claim), "{claim}");
    }
}
