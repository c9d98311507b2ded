//! Lion against float64, for both optimizers, and in half precision.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, bf16};
use distmuon::{LionConfig, MasterWeights, MuonConfig, RoutingRule};
use distmuon_testing::models::{Fixed, gradients, values};
use distmuon_testing::precision::{self, LR, Net, assert_same, floats, has};

const STEPS: u64 = 5;

/// A table, a head and a vector, each with a rate of its own.
#[derive(Module, Debug)]
struct Rest {
    embedding: Param<Tensor<2>>,
    head: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

fn device() -> Device {
    Device::default().autodiff()
}

fn rest() -> Rest {
    let ones = |shape: [usize; 2]| {
        Param::from_tensor(Tensor::<2>::ones(shape, (&device(), DType::F32)).require_grad())
    };
    let bias = Tensor::<1>::ones([5], (&device(), DType::F32));
    let rest = Rest {
        embedding: ones([9, 4]),
        head: ones([4, 9]),
        bias: Param::from_tensor(bias.require_grad()),
    };
    rest.map(&mut Fixed::new(4))
}

fn lion() -> LionConfig {
    LionConfig::new()
        .with_beta_1(0.8)
        .with_beta_2(0.95)
        .with_weight_decay(0.3)
        .with_embedding_lr(0.5)
        .with_head_lr(0.25)
        .with_vector_lr(2.0)
}

fn config() -> MuonConfig {
    MuonConfig::new().with_rest(lion().into()).with_rule(RoutingRule::adamw("^embedding|^head"))
}

/// `P <- P - lr (sign(b1 M + (1 - b1) G) + w P)`, `M <- b2 M + (1 - b2) G` (Chen et al., algorithm
/// 2).
fn expected(steps: impl Iterator<Item = Vec<f32>>, mut weights: Vec<f64>) -> Vec<f64> {
    let LionConfig { beta_1, beta_2, weight_decay, .. } = lion();
    let rates = [(36, 0.5), (36, 0.25), (5, 2.0)];
    let rates: Vec<f64> =
        rates.iter().flat_map(|(count, rate)| vec![0.01 * rate; *count]).collect();
    let mut momentum = vec![0.0; weights.len()];
    for grads in steps {
        for (((p, m), g), lr) in weights.iter_mut().zip(&mut momentum).zip(grads).zip(&rates) {
            let g = f64::from(g);
            let update = (beta_1 * *m + (1.0 - beta_1) * g).signum();
            *p -= lr * (update + weight_decay * *p);
            *m = beta_2 * *m + (1.0 - beta_2) * g;
        }
    }
    weights
}

/// The elements of gradients in the order of the model.
fn elements(net: &Rest, grads: &GradientsParams) -> Vec<f32> {
    let flat = |tensor: Tensor<1>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
    [
        flat(grads.get::<2>(net.embedding.id).unwrap().reshape([-1])),
        flat(grads.get::<2>(net.head.id).unwrap().reshape([-1])),
        flat(grads.get::<1>(net.bias.id).unwrap()),
    ]
    .concat()
}

#[test]
fn steps_are_those_of_the_paper() {
    let net = rest();
    let roles: Vec<String> = config()
        .route(&net)
        .unwrap()
        .routes()
        .iter()
        .map(|route| route.optimizer.clone())
        .collect();
    assert_eq!(roles, ["Lion (embedding)", "Lion (head)", "Lion (vector)"]);
    let grads = |step| elements(&net, &gradients(&net, step));
    let expected =
        expected((0..STEPS).map(grads), values(&net).into_iter().map(f64::from).collect());

    let (mut single, mut batched) = (net.clone(), net.clone());
    let mut of_single = config().init(&single);
    let mut of_batched = config().init_batched(&batched).unwrap();
    for step in 0..STEPS {
        single = of_single.step(0.01, single, gradients(&net, step));
        batched = of_batched.step(0.01, batched, gradients(&net, step)).unwrap();
    }
    for (name, net) in [("one parameter at a time", single), ("the model", batched)] {
        for (index, (actual, expected)) in values(&net).iter().zip(&expected).enumerate() {
            let error = (f64::from(*actual) - expected).abs();
            assert!(error < 1e-6, "{name}, element {index}: {actual} for {expected}");
        }
    }
}

/// A factor on all gradients changes no sign.
#[test]
fn steps_do_not_depend_on_the_scale_of_gradients() {
    let trained = |scale: f32| {
        let mut net = rest();
        let mut optim = config().init(&net);
        for step in 0..STEPS {
            let plain = gradients(&net, step);
            let mut grads = GradientsParams::new();
            for id in [net.embedding.id, net.head.id] {
                grads.register(id, plain.get::<2>(id).unwrap() * scale);
            }
            grads.register(net.bias.id, plain.get::<1>(net.bias.id).unwrap() * scale);
            net = optim.step(0.01, net, grads);
        }
        values(&net)
    };
    assert_eq!(trained(1.0), trained(2f32.powi(-20)));
    assert_eq!(trained(1.0), trained(2f32.powi(20)));
}

#[test]
fn half_precision_with_master_weights_is_that_of_float32_rounded() {
    if !has(FloatDType::BF16) {
        return;
    }
    let config = |master| precision::config(master).with_rest(LionConfig::new().into());
    let trained = |dtype, master| {
        let mut net = Net::new(dtype, &device());
        let mut optim = config(master).init_batched(&net).unwrap();
        for step in 0..STEPS {
            let grads = precision::gradients(&net, step, dtype);
            net = optim.step(LR, net, grads).unwrap();
        }
        floats(&net)
    };
    let wide = trained(DType::F32, MasterWeights::Full);
    let rounded: Vec<f32> = wide.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    assert_same(&trained(DType::BF16, MasterWeights::Full), &rounded, "Full");
    let lost = trained(DType::BF16, MasterWeights::None);
    assert_ne!(lost, rounded);
}
