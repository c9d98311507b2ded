//! The account of a step, and expectations that can't be met.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param};
use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use distmuon::account::{Account, ParameterAccount, UpdatedBy};
use distmuon::distributed::DistMuonConfig;
use distmuon::{
    Error, Expectation, IterationDtype, IterationForm, LionConfig, MuonConfig, NewtonSchulzConfig,
    Result, RoutingRule, World,
};
use distmuon_testing::device::is_flex;
use distmuon_testing::models::{Fixed, gradients};
use distmuon_testing::panic_message;
use distmuon_testing::watched::watched;

/// A stack of matrices, a matrix in three blocks, a matrix without a gradient, one that is frozen,
/// a table and a vector.
#[derive(Module, Debug)]
struct Net {
    stack: Param<Tensor<3>>,
    fused: Param<Tensor<2>>,
    unused: Param<Tensor<2>>,
    fixed: Param<Tensor<2>>,
    table: Param<Tensor<2>>,
    gain: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let options = (device, DType::F32);
        let matrix = |shape| Param::from_tensor(Tensor::ones(shape, options).require_grad());
        let net = Self {
            stack: Param::from_tensor(Tensor::ones([3, 6, 10], options).require_grad()),
            fused: matrix([6, 12]),
            unused: matrix([6, 6]),
            fixed: matrix([5, 5]),
            table: matrix([40, 32]),
            gain: Param::from_tensor(Tensor::ones([7], options).require_grad()),
        };
        let net = net.map(&mut Fixed::new(3));
        Self { fixed: net.fixed.no_grad(), ..net }
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

fn config() -> MuonConfig {
    let newton_schulz = NewtonSchulzConfig::new()
        .with_dtype(IterationDtype::F32)
        .with_form(IterationForm::Standard);
    MuonConfig::new()
        .with_newton_schulz(newton_schulz)
        .with_rule(RoutingRule::muon("stack").batch())
        .with_rule(RoutingRule::muon("fused").split([4, 6, 2]).leave([2]))
        .with_rule(RoutingRule::adamw("table"))
}

/// The gradients of a step in which one parameter has none.
fn without_unused(net: &Net) -> GradientsParams {
    let mut grads = gradients(net, 0);
    grads.remove::<2>(net.unused.id);
    grads.remove::<2>(net.fixed.id);
    grads
}

/// The account of the second of three steps on every rank, or of a step without gradients, and the
/// owners of every parameter.
fn accounts(ranks: usize, is_idle: bool) -> Vec<(Account, Vec<Vec<usize>>)> {
    let config = config().expect(Expectation::OncePerStep);
    let dist = DistMuonConfig::new().with_muon(config.clone()).with_bucket_mb(Some(0.0005));
    let trained = World::threads(vec![device(); ranks], |world| -> Result<_> {
        let net = Net::new(world.device());
        let mut optim = dist.init(&world, &net)?;
        if is_idle {
            optim.request_account();
            optim.step(0.01, net, GradientsParams::new())?;
            return Ok((optim.account()?.unwrap(), optim.plan().owners().to_vec()));
        }
        let grads = without_unused(&net);
        let net = optim.step(0.01, net, grads)?;
        assert!(optim.account()?.is_none(), "nothing was requested");
        optim.request_account();
        optim.request_diagnostics();
        assert!(optim.account()?.is_none(), "no step was taken");
        let grads = without_unused(&net);
        let net = optim.step(0.01, net, grads)?;
        let account = optim.account()?.unwrap().with_norms(&optim.diagnostics()?.unwrap());
        assert!(optim.account()?.is_none(), "it was read");
        let grads = without_unused(&net);
        optim.step(0.01, net, grads)?;
        assert!(optim.account()?.is_none(), "one step was requested");
        Ok((account, optim.plan().owners().to_vec()))
    });
    trained.unwrap()
}

fn find<'a>(account: &'a Account, path: &str) -> &'a ParameterAccount {
    account.parameters.iter().find(|each| each.path == path).expect("the model has the parameter")
}

#[test]
fn every_matrix_is_orthogonalised_once_by_the_owners_of_the_plan() {
    for ranks in [1, 2, 3] {
        let all = accounts(ranks, false);
        for (account, owners) in &all {
            assert_eq!(account, &all[0].0, "the ranks get the same");
            let paths: Vec<_> = account.parameters.iter().map(|each| &*each.path).collect();
            let expected = ["stack", "fused[0..4]", "fused[4..10]", "fused[10..12]", "unused"];
            assert_eq!(paths, [&expected[..], &["fixed", "table", "gain"]].concat());
            // Of the parameters that are trained.
            for (path, owners) in expected.iter().zip(owners).take(3) {
                let each = find(account, path);
                let mut owners = owners.clone();
                owners.sort_unstable();
                owners.dedup();
                assert_eq!(each.ranks, owners, "{path} on {ranks} ranks");
                assert_eq!(each.updated_by, UpdatedBy::Muon);
                assert_eq!(each.iterations, each.matrices, "{path}");
                let used = each.iteration.as_ref().unwrap();
                assert_eq!((used.form, used.steps), (IterationForm::Standard, 5));
                assert!(used.to_string().starts_with("Standard, 5 steps, F32, "), "{used}");
                assert!(each.update_norm.unwrap() > 0.0);
            }
            assert_eq!(find(account, "stack").matrices, 3);
            for path in ["fused[10..12]", "table", "gain"] {
                let each = find(account, path);
                assert_eq!(each.updated_by, UpdatedBy::AdamW, "{path}");
                assert_eq!((each.matrices, each.iterations), (0, 0));
                assert!(!each.ranks.is_empty() && each.iteration.is_none());
            }
            let unused = find(account, "unused");
            assert_eq!(unused.updated_by, UpdatedBy::NoGradient);
            assert_eq!((unused.matrices, unused.iterations, unused.ranks.len()), (1, 0, 0));
            assert_eq!(find(account, "fixed").updated_by, UpdatedBy::Frozen);
        }
    }
}

/// The device drops its result.
#[test]
fn a_matrix_that_skips_a_step_violates_no_expectation() {
    let net = Net::new(&device());
    let config = config()
        .expect(Expectation::Muon("stack".into()))
        .expect(Expectation::MuonShare(0.1))
        .expect(Expectation::OncePerStep);
    let mut optim = config.init_batched(&net).unwrap();
    let mut grads = without_unused(&net);
    let bad = grads.remove::<3>(net.stack.id).unwrap().mul_scalar(f32::NAN);
    grads.register(net.stack.id, bad);
    optim.step(0.01, net, grads).unwrap();
    assert_eq!(optim.skipped_steps().read().len(), 1);
}

#[test]
fn groups_add_up_and_print() {
    let (account, _) = accounts(2, false).swap_remove(0);
    let groups = account.groups();
    let names: Vec<_> = groups.iter().map(|group| group.updated_by.to_string()).collect();
    assert_eq!(names, ["Muon", "AdamW", "no gradient", "frozen"]);
    let [muon, adamw, absent, frozen] = &groups[..] else { unreachable!() };
    assert_eq!((muon.elements, muon.matrices, muon.iterations), (240, 5, 5));
    assert_eq!((adamw.elements, absent.elements, frozen.elements), (12 + 1280 + 7, 36, 25));
    let trained = (240 + 1299 + 36) as f64;
    assert_eq!(account.muon_share(), 240.0 / trained);
    assert_eq!((absent.share, frozen.share), (36.0 / trained, 0.0));
    let (table, rows) = (account.to_string(), format!("{account:#}"));
    assert!(table.contains("| Muon        |") && table.lines().count() == 6, "{table}");
    assert!(rows.contains("| fused[4..10] ") && rows.lines().count() == 10, "{rows}");
    let json = serde_json::to_string(&account).unwrap();
    assert_eq!(serde_json::from_str::<Account>(&json).unwrap(), account);
}

#[test]
fn a_step_without_gradients_updates_nothing() {
    for (account, _) in accounts(2, true) {
        let idle = [UpdatedBy::NoGradient, UpdatedBy::Frozen];
        assert!(account.parameters.iter().all(|each| idle.contains(&each.updated_by)));
        assert_eq!(account.muon_share(), 0.0);
    }
}

#[test]
fn burns_optimizer_has_the_account_of_the_batched_one() {
    let routing = config().expect(Expectation::OncePerStep).route(&Net::new(&device())).unwrap();
    let mut optim = routing.init();
    let net = Net::new(&device());
    let grads = without_unused(&net);
    let net = optim.step(0.01, net, grads);
    assert!(routing.account().is_none(), "nothing was requested");
    routing.request_account();
    let grads = without_unused(&net);
    optim.step(0.01, net, grads);
    let account = routing.account().unwrap();
    assert!(routing.account().is_none(), "it was read");
    let (mut batched, _) = accounts(1, false).swap_remove(0);
    batched.parameters.iter_mut().for_each(|each| each.update_norm = None);
    assert_eq!(account, batched);
}

#[test]
fn other_optimizers_are_named() {
    let config = config()
        .with_rest(LionConfig::new().into())
        .with_optimizer("sgd", SgdConfig::new().build())
        .with_rule(RoutingRule::custom("unused", "sgd"));
    let net = Net::new(&device());
    let mut optim = config.init_batched(&net).unwrap();
    let routing = config.route(&net).unwrap();
    let mut burns = routing.init();
    optim.request_account();
    routing.request_account();
    let grads = || {
        let mut grads = gradients(&net, 0);
        grads.remove::<2>(net.fixed.id);
        grads
    };
    optim.step(0.01, net.clone(), grads()).unwrap();
    burns.step(0.01, net.clone(), grads());
    for account in [optim.account().unwrap().unwrap(), routing.account().unwrap()] {
        assert_eq!(find(&account, "table").updated_by, UpdatedBy::Lion);
        assert_eq!(find(&account, "unused").updated_by, UpdatedBy::Custom("sgd".into()));
        assert_eq!(find(&account, "fused[10..12]").updated_by, UpdatedBy::Lion);
    }
}

/// The error of an optimizer that is made with an expectation, of both kinds.
fn rejected(config: &MuonConfig) -> Error {
    let net = Net::new(&device());
    let error = config.try_init(&net).err().expect("the expectation can't be met");
    assert_eq!(config.init_batched(&net).err(), Some(error.clone()));
    error
}

#[test]
fn expectations_that_can_not_be_met_are_rejected_with_the_remedy() {
    for share in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY] {
        let error = rejected(&config().expect(Expectation::MuonShare(share)));
        assert!(matches!(&error, Error::Setting { setting, .. } if setting == "expectations"));
        assert!(error.to_string().ends_with("change `expectations`"), "{error}");
    }
    for pattern in ["(", "no_such_path"] {
        let error = rejected(&config().expect(Expectation::Muon(pattern.into())));
        assert!(matches!(&error, Error::Setting { setting, .. } if setting == "expectations"));
        assert!(error.to_string().contains(pattern), "{error}");
    }
    let all = config().with_rule(RoutingRule::adamw(""));
    let error = rejected(&all.expect(Expectation::OncePerStep)).to_string();
    assert!(error.contains("expected a model with a matrix that Muon updates"), "{error}");

    let error = rejected(&config().expect(Expectation::MuonShare(0.6)));
    let Error::Unexpected { parameter, rank: None, got, .. } = &error else { panic!("{error}") };
    // Of 1575 elements, Muon has 276.
    assert!(parameter == "table" && got.starts_with("17.5 %, and `AdamW (vector)`"), "{error}");
    for (pattern, path, got) in [
        ("fi", "fixed", "no optimizer, since it is frozen"),
        ("fused", "fused", "`Muon, 3 blocks, 1 of AdamW (vector)`"),
        ("e$", "table", "`AdamW (vector)` (rule `table`)"),
    ] {
        let error = rejected(&config().expect(Expectation::Muon(pattern.into()))).to_string();
        let start = format!("parameter `{path}` is not trained as expected: expected Muon (");
        assert!(error.starts_with(&start) && error.contains(got), "{error}");
        assert!(error.contains("`RoutingRule::muon`"), "{error}");
    }
}

#[test]
fn expectations_are_settings_that_are_saved_and_compared() {
    let config = config()
        .expect(Expectation::MuonShare(0.1))
        .expect(Expectation::Muon("stack".into()))
        .expect(Expectation::OncePerStep);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    burn::config::Config::save(&config, &path).unwrap();
    let loaded = <MuonConfig as burn::config::Config>::load(&path).unwrap();
    assert_eq!(loaded.expectations, config.expectations);
    assert!(config.to_string().contains("OncePerStep"), "they are shown with the settings");

    let errors = World::threads(vec![device(); 2], |world| -> Result<_> {
        let muon = if world.rank() == 0 { config.clone() } else { self::config() };
        let net = Net::new(world.device());
        Ok(DistMuonConfig::new().with_muon(muon).init(&world, &net).err())
    });
    for error in errors.unwrap() {
        let Some(Error::SettingsDiffer { setting, .. }) = error else { panic!("{error:?}") };
        assert_eq!(setting, "muon.expectations");
    }
}

#[test]
fn ranks_request_an_account_together() {
    let error = World::threads(vec![device(); 2], |world| {
        let net = Net::new(world.device());
        let mut optim = DistMuonConfig::new().with_muon(config()).init(&world, &net)?;
        if world.rank() == 1 {
            optim.request_account();
        }
        let grads = without_unused(&net);
        optim.step(0.01, net, grads).map(drop)
    });
    let error = error.unwrap_err();
    let Error::SettingsDiffer { rank: 1, setting, .. } = &error else { panic!("{error}") };
    assert_eq!(setting, "request_account");
}

/// The calls of rank 0 in three steps, with the account of the last if it is asked for.
fn calls(config: &MuonConfig, asks: bool) -> usize {
    let dist = DistMuonConfig::new().with_muon(config.clone());
    let count = World::threads(vec![device(); 2], |world| {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let world = watched(&world, move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        let mut net = Net::new(world.device());
        let mut optim = dist.init(&world, &net)?;
        calls.store(0, Ordering::SeqCst);
        for _ in 0..3 {
            if asks {
                optim.request_account();
            }
            let grads = without_unused(&net);
            net = optim.step(0.01, net, grads)?;
        }
        assert_eq!(optim.account()?.is_some(), asks);
        Ok::<_, Error>(calls.load(Ordering::SeqCst))
    });
    count.unwrap()[0]
}

#[test]
fn expectations_send_nothing_and_an_account_is_two_messages() {
    let expecting = config()
        .expect(Expectation::MuonShare(0.1))
        .expect(Expectation::Muon("stack".into()))
        .expect(Expectation::OncePerStep);
    let plain = calls(&config(), false);
    assert_eq!(calls(&expecting, false), plain);
    // To rank 0, and from it.
    assert_eq!(calls(&expecting, true), plain + 2);
}

#[test]
fn the_table_of_the_guide_is_the_printed_one() {
    let model = PositionWiseFeedForwardConfig::new(16, 64).init(&device());
    let config = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let mut optim = config.init_batched(&model).unwrap();
    optim.request_account();
    optim.step(3e-3, model.clone(), gradients(&model, 0)).unwrap();
    let printed = optim.account().unwrap().unwrap().to_string();
    let page = include_str!("../../docs/guide/is-it-really-muon.md");
    if is_flex() {
        assert!(page.contains(&printed), "{printed}");
    }
}

#[test]
fn burns_optimizer_panics_with_the_error_of_an_expectation() {
    let config = config().expect(Expectation::Muon("table".into()));
    let message = panic_message(|| config.init(&Net::new(&device())));
    assert!(message.starts_with("parameter `table` is not trained as expected"), "{message}");
}
