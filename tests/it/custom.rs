//! Optimizers of the user's next to Muon: the steps of the optimizers alone, half precision, names
//! that are missing, and tables.

use burn::module::{Module, Param};
use burn::optim::{AdafactorConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use distmuon::{
    AdamWConfig, CustomOptimizers, Error, MasterWeights, MuonConfig, RoutingRule, checkpoint,
};
use distmuon_testing::models::{Fixed, assert_same_weights, bits, gradients, values};

#[derive(Module, Debug)]
struct Net {
    embedding: Param<Tensor<2>>,
    body: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

fn device() -> Device {
    Device::default().autodiff()
}

impl Net {
    fn new() -> Self {
        let ones = |shape| Param::from_tensor(Tensor::ones(shape, &device()).require_grad());
        let bias = Param::from_tensor(Tensor::ones([5], &device()).require_grad());
        Self { embedding: ones([9, 4]), body: ones([4, 6]), bias }.map(&mut Fixed::new(11))
    }
}

fn muon() -> MuonConfig {
    MuonConfig::new()
        .with_optimizer("adafactor", AdafactorConfig::new().build())
        .with_rule(RoutingRule::custom("embedding|bias", "adafactor"))
}

fn trained(mut net: Net, mut optim: ModuleOptimizer, lr: f64) -> Net {
    for step in 0..4 {
        let grads = gradients(&net, step);
        net = optim.step(lr, net, grads);
    }
    net
}

#[test]
fn a_users_optimizer_takes_the_steps_that_it_takes_alone() {
    let alone = trained(Net::new(), AdafactorConfig::new().init(), 0.02);
    let rates = AdamWConfig::new().with_embedding_lr(0.5);
    let beside = |lr| trained(Net::new(), muon().with_adamw(rates.clone()).init(&Net::new()), lr);
    let of = |net: &Net| [bits(&net.embedding.val()), bits(&net.bias.val())];
    let body = |net: &Net| bits(&net.body.val());
    // A learning rate of 0.04 is 0.02 for embeddings.
    assert_eq!(of(&beside(0.04))[0], of(&alone)[0]);
    assert_eq!(of(&beside(0.02))[1], of(&alone)[1]);
    assert_ne!(of(&beside(0.02))[0], of(&alone)[0]);
    assert_ne!(body(&beside(0.02)), body(&alone), "Muon has the body");

    let mut batched = muon().init_batched(&Net::new()).unwrap();
    let stepped = (0..4).try_fold(Net::new(), |net, step| {
        let grads = gradients(&net, step);
        batched.step(0.02, net, grads)
    });
    let expected = trained(Net::new(), muon().init(&Net::new()), 0.02);
    assert_same_weights("batched", &values(&stepped.unwrap()), &values(&expected));
}

#[test]
fn gradients_that_are_not_finite_leave_a_users_optimizer_as_it_is() {
    let routing = muon().route(&Net::new()).unwrap();
    let run = |spoiled: Option<f32>| {
        let (mut net, mut optim) = (Net::new(), routing.init());
        for step in 0..4 {
            let mut grads = gradients(&net, step);
            if step % 2 == 0 {
                let grad: Tensor<2> = grads.remove(net.embedding.id).unwrap();
                if let Some(factor) = spoiled {
                    grads.register(net.embedding.id, grad.mul_scalar(factor));
                }
            }
            net = optim.step(0.02, net, grads);
        }
        values(&net)
    };
    assert_eq!(run(Some(f32::INFINITY)), run(None));
    let skipped = routing.skipped_steps().read();
    assert_eq!(skipped.into_iter().collect::<Vec<_>>(), [("embedding".to_owned(), 2)]);
}

/// A bfloat16 parameter, which steps of a ten-thousandth do not change by themselves.
#[test]
fn master_weights_keep_small_steps_of_a_users_optimizer() {
    let start = || {
        let ones = Tensor::<1>::ones([8], (&Device::default(), DType::BF16));
        vec![Param::from_tensor(Tensor::from_inner(ones).require_grad())]
    };
    let config = |master| {
        MuonConfig::new()
            .with_master_weights(master)
            .with_optimizer("sgd", SgdConfig::new().build())
            .with_rule(RoutingRule::custom(".", "sgd"))
    };
    let grads = |net: &Vec<Param<Tensor<1>>>| {
        let mut grads = GradientsParams::new();
        let ones = Tensor::<1>::ones([8], (&Device::default(), DType::BF16));
        grads.register(net[0].id, ones);
        grads
    };
    let first = |net: &Vec<Param<Tensor<1>>>| {
        assert_eq!(net[0].val().dtype(), DType::BF16);
        net[0].val().into_data().iter::<f32>().next().unwrap()
    };
    let cases =
        [(MasterWeights::Full, 0.98), (MasterWeights::Mantissa, 0.98), (MasterWeights::None, 1.0)];
    for (master, expected) in cases {
        let config = config(master);
        let (mut net, mut batched_net) = (start(), start());
        let mut optim = config.init(&net);
        let mut batched = config.init_batched(&batched_net).unwrap();
        for _ in 0..200 {
            let of_step = grads(&net);
            net = optim.step(1e-4, net, of_step);
            let of_step = grads(&batched_net);
            batched_net = batched.step(1e-4, batched_net, of_step).unwrap();
        }
        for net in [&net, &batched_net] {
            let value = first(net);
            assert!((value - expected).abs() < 4e-3, "{master:?}: {value} for {expected}");
        }
        let bytes = match master {
            MasterWeights::Full => 32,
            MasterWeights::Mantissa => 16,
            _ => 0,
        };
        let routing = config.route(&net).unwrap();
        assert_eq!((routing.routes()[0].state_bytes, batched.memory().masters.now), (bytes, bytes));
    }
}

#[test]
fn a_checkpoint_of_one_device_has_the_states_of_users_optimizers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.ckpt");
    let (mut net, mut optim) = (Net::new(), muon().init(&Net::new()));
    for step in 0..5 {
        if step == 2 {
            checkpoint::save(&path, &net, &optim, &2).unwrap();
            let fresh = (Net::new(), muon().init(&Net::new()));
            let at: u64;
            (net, optim, at) = checkpoint::load(&path, fresh.0, fresh.1).unwrap();
            assert_eq!(at, 2);
        }
        let grads = gradients(&net, step);
        net = optim.step(0.02, net, grads);
    }
    let mut through = (Net::new(), muon().init(&Net::new()));
    for step in 0..5 {
        let grads = gradients(&through.0, step);
        through.0 = through.1.step(0.02, through.0, grads);
    }
    assert_eq!(values(&net), values(&through.0));
    let other = MuonConfig::new().init(&Net::new());
    let error = checkpoint::load::<_, u64, _>(&path, Net::new(), other).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }), "{error}");
}

#[test]
fn names_without_an_optimizer_or_a_rule_are_rejected() {
    let sgd = || SgdConfig::new().build();
    let rule = || RoutingRule::custom("bias", "sgd");
    let config = MuonConfig::new().with_optimizer("sgd", sgd()).with_rule(rule());
    let json = serde_json::to_string(&config).unwrap();
    let from_file: MuonConfig = serde_json::from_str(&json).unwrap();
    assert_eq!(from_file.optimizers.names().collect::<Vec<_>>(), ["sgd"]);
    assert!(from_file.clone().with_optimizer("sgd", sgd()).try_init(&Net::new()).is_ok());
    for (config, setting, words) in [
        (MuonConfig::new().with_rule(rule()), "rules", "`sgd`"),
        (from_file, "optimizers.sgd", "a name only"),
        (MuonConfig::new().with_optimizer("sgd", sgd()), "optimizers.sgd", "without a rule"),
        (
            config.clone().with_optimizers(CustomOptimizers::new().with("other", sgd())),
            "rules",
            "`sgd`",
        ),
    ] {
        let error = config.try_init(&Net::new()).map(|_| ()).unwrap_err();
        let Error::Setting { setting: found, value, .. } = &error else { panic!("{error}") };
        assert_eq!(found, setting);
        assert!(value.contains(words), "{error}");
        assert!(error.to_string().contains("with_optimizer") || words == "without a rule");
        let batched = config.init_batched(&Net::new()).map(|_| ()).unwrap_err();
        assert_eq!(batched.to_string(), error.to_string());
    }
    let nothing = config.with_rule(RoutingRule::custom("absent", "sgd"));
    let error = nothing.try_init(&Net::new()).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::UnusedRule { .. }), "{error}");
    let nine = Tensor::<9>::ones([1; 9], &device()).require_grad();
    let nine = vec![Param::from_tensor(nine)];
    let config = MuonConfig::new().with_optimizer("sgd", sgd());
    let error = config.with_rule(RoutingRule::custom(".", "sgd")).try_init(&nine);
    let error = error.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}

#[test]
fn tables_name_a_users_optimizer() {
    let routing = muon().route(&Net::new()).unwrap();
    let named = |path: &str| {
        let route = routing.routes().iter().find(|route| route.path == path).unwrap();
        (route.optimizer.clone(), route.custom.clone())
    };
    assert_eq!(
        named("embedding"),
        ("adafactor (embedding)".to_owned(), Some("adafactor".to_owned()))
    );
    assert_eq!(named("bias").0, "adafactor (vector)");
    assert_eq!(named("body"), ("Muon".to_owned(), None));
    let summary: Vec<_> = routing.summary().into_iter().map(|s| (s.optimizer, s.tensors)).collect();
    assert_eq!(summary, [("Muon".to_owned(), 1), ("adafactor".to_owned(), 2)]);
    assert!(routing.to_string().contains("adafactor (vector)"));
}
