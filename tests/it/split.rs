//! Matrices that are cut into blocks: a split parameter is trained as separate parameters are.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use distmuon::parts::{NorMuon, RowEquilibration};
use distmuon::{
    AdamWConfig, DistMuonConfig, Error, MatrixLayout, MuonConfig, Result, RoutingRule, WeightDecay,
    World, checkpoint,
};
use distmuon_testing::models::{Fixed, assert_same_weights, gradients, values};
use proptest::prelude::*;

const STEPS: u64 = 4;
const LR: f64 = 0.02;

/// Fused weights: `[6, 14]` of three blocks of outputs, four heads of `[8, 12]` in the other
/// layout, and a stack of two experts `[5, 8]` with gates and inputs of 4 outputs each.
#[derive(Module, Debug)]
struct Fused {
    qkv: Param<Tensor<2>>,
    heads: Param<Tensor<2>>,
    experts: Param<Tensor<3>>,
    bias: Param<Tensor<1>>,
}

/// The same weights, each block as a parameter.
#[derive(Module, Debug)]
struct Separate {
    qkv: Vec<Param<Tensor<2>>>,
    heads: Vec<Param<Tensor<2>>>,
    experts: Vec<Param<Tensor<3>>>,
    bias: Param<Tensor<1>>,
}

const QKV: [usize; 3] = [6, 4, 4];

fn trained<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::from_tensor(Tensor::from_inner(tensor).require_grad())
}

impl Fused {
    fn new(device: &Device) -> Self {
        let ones = Self {
            qkv: trained(Tensor::ones([6, 14], &device.clone().inner())),
            heads: trained(Tensor::ones([8, 12], &device.clone().inner())),
            experts: trained(Tensor::ones([2, 5, 8], &device.clone().inner())),
            bias: trained(Tensor::ones([3], &device.clone().inner())),
        };
        ones.map(&mut Fixed::new(3))
    }

    /// Every block as a parameter.
    fn separate(&self) -> Separate {
        let value = |param: &Param<Tensor<2>>| param.val().inner();
        let qkv = value(&self.qkv).split_with_sizes(QKV.to_vec(), 1);
        let heads = value(&self.heads).split(2, 0);
        let experts = self.experts.val().inner().split(4, 2);
        Separate {
            qkv: qkv.into_iter().map(trained).collect(),
            heads: heads.into_iter().map(trained).collect(),
            experts: experts.into_iter().map(trained).collect(),
            bias: trained(self.bias.val().inner()),
        }
    }

    /// The gradients of a step. In the second one, a block of the fused projection and one head
    /// are not finite.
    fn gradients(&self, step: u64) -> GradientsParams {
        let mut grads = gradients(self, step);
        if step == 1 {
            for (id, ranges) in [(self.qkv.id, [2..3, 7..8]), (self.heads.id, [4..5, 0..1])] {
                let grad = grads.remove::<2>(id).expect("the matrix has a gradient");
                grads.register(id, grad.slice_fill(ranges, f32::NAN));
            }
        }
        grads
    }

    /// The gradients of the separate parameters.
    fn separate_gradients(&self, separate: &Separate, step: u64) -> GradientsParams {
        let mut fused = self.gradients(step);
        let mut grads = GradientsParams::new();
        let qkv = fused.remove::<2>(self.qkv.id).unwrap().split_with_sizes(QKV.to_vec(), 1);
        let heads = fused.remove::<2>(self.heads.id).unwrap().split(2, 0);
        for (param, grad) in separate.qkv.iter().chain(&separate.heads).zip([qkv, heads].concat()) {
            grads.register(param.id, grad);
        }
        let experts = fused.remove::<3>(self.experts.id).unwrap().split(4, 2);
        for (param, grad) in separate.experts.iter().zip(experts) {
            grads.register(param.id, grad);
        }
        grads.register(separate.bias.id, fused.remove::<1>(self.bias.id).unwrap());
        grads
    }
}

fn config() -> MuonConfig {
    MuonConfig::new()
        .with_parts(vec![RowEquilibration.into(), NorMuon::per_output(0.9).into()])
        .with_weight_decay(WeightDecay::Cautious(0.3.into()))
}

fn fused() -> MuonConfig {
    config()
        .with_rule(RoutingRule::muon("qkv").split(QKV))
        .with_rule(RoutingRule::muon("heads").heads(4).layout(MatrixLayout::OutIn))
        .with_rule(RoutingRule::muon("experts").batch().split([4, 4]))
}

fn separate() -> MuonConfig {
    config()
        .with_rule(RoutingRule::muon("qkv"))
        .with_rule(RoutingRule::muon("heads").layout(MatrixLayout::OutIn))
        .with_rule(RoutingRule::muon("experts").batch())
}

fn device() -> Device {
    Device::default().autodiff()
}

/// The weights of separate parameters after all steps, in the order of a [`Fused`] with these
/// weights.
fn expected() -> Vec<f32> {
    let fused = Fused::new(&device());
    let mut net = fused.separate();
    let mut optim = separate().init(&net);
    for step in 0..STEPS {
        let grads = fused.separate_gradients(&net, step);
        net = optim.step(LR, net, grads);
    }
    let joined = |params: &[Param<Tensor<2>>], dim| {
        Tensor::cat(params.iter().map(|param| param.val().inner()).collect(), dim)
    };
    let experts = net.experts.iter().map(|param| param.val().inner()).collect();
    values(&Fused {
        qkv: trained(joined(&net.qkv, 1)),
        heads: trained(joined(&net.heads, 0)),
        experts: trained(Tensor::cat(experts, 2)),
        bias: net.bias,
    })
}

#[test]
fn a_split_parameter_is_trained_as_separate_parameters() {
    let expected = expected();
    let mut net = Fused::new(&device());
    let mut optim = fused().init(&net);
    for step in 0..STEPS {
        let grads = net.gradients(step);
        net = optim.step(LR, net, grads);
    }
    assert_same_weights("one parameter at a time", &values(&net), &expected);

    for count in [1, 2, 3, 4] {
        let dist = DistMuonConfig::new().with_muon(fused()).with_bucket_mb(Some(0.0005));
        let trained = World::threads(vec![device(); count], |world| -> Result<_> {
            let mut net = Fused::new(world.device());
            let mut optim = dist.init(&world, &net)?;
            for step in 0..STEPS {
                let grads = net.gradients(step);
                net = optim.step(LR, net, grads)?;
            }
            Ok((values(&net), optim.skipped_steps().read()))
        });
        for (actual, skipped) in trained.unwrap() {
            assert_same_weights(&format!("{count} ranks"), &actual, &expected);
            let blocks = ["heads[4..6]", "qkv[6..10]"].map(|block| (block.to_owned(), 1));
            assert_eq!(skipped, blocks.into());
        }
    }
}

/// A projection of any blocks, and each of them.
#[derive(Module, Debug)]
struct Projection {
    weight: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Blocks {
    weights: Vec<Param<Tensor<2>>>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_blocks_of_outputs_are_trained_as_separate_parameters(
        inputs in 1usize..12, outputs in prop::collection::vec(1usize..9, 1..5),
        equal in any::<bool>(), out_in in any::<bool>(),
    ) {
        let outputs = if equal { vec![outputs[0]; outputs.len()] } else { outputs };
        let total = outputs.iter().sum();
        let (layout, shape, dim) = match out_in {
            true => (MatrixLayout::OutIn, [total, inputs], 0),
            false => (MatrixLayout::InOut, [inputs, total], 1),
        };
        let weight = trained(Tensor::ones(shape, &device().inner()));
        let mut fused = Projection { weight }.map(&mut Fixed::new(3));
        let cut = |tensor: Tensor<2>| tensor.split_with_sizes(outputs.clone(), dim);
        let weights = cut(fused.weight.val().inner());
        let mut blocks = Blocks { weights: weights.into_iter().map(trained).collect() };

        let rule = RoutingRule::muon("weight").layout(layout);
        let split = match equal {
            true => rule.clone().heads(outputs.len()),
            false => rule.clone().split(outputs.clone()),
        };
        let mut of_fused = config().with_rule(split).init(&fused);
        let mut of_blocks = config().with_rule(rule).init(&blocks);
        for step in 0..3 {
            let grads = gradients(&fused, step);
            let grad = grads.get::<2>(fused.weight.id).expect("the matrix has a gradient");
            let mut each = GradientsParams::new();
            for (param, grad) in blocks.weights.iter().zip(cut(grad)) {
                each.register(param.id, grad);
            }
            fused = of_fused.step(LR, fused, grads);
            blocks = of_blocks.step(LR, blocks, each);
        }
        let joined = blocks.weights.iter().map(|param| param.val().inner()).collect();
        let joined = Projection { weight: trained(Tensor::cat(joined, dim)) };
        assert_same_weights("blocks", &values(&fused), &values(&joined));
    }
}

#[test]
fn checkpoints_of_split_parameters_continue_on_any_number_of_ranks() {
    let expected = expected();
    let folder = tempfile::tempdir().unwrap();
    let on_ranks = |count: usize, save: Option<&str>, load: Option<&str>| {
        let dist = DistMuonConfig::new().with_muon(fused()).with_bucket_mb(Some(0.0005));
        let trained = World::threads(vec![device(); count], |world| -> Result<_> {
            let mut net = Fused::new(world.device());
            let mut optim = dist.init(&world, &net)?;
            let mut start = 0;
            if let Some(name) = load {
                (net, optim, start) = optim.load::<_, u64>(folder.path().join(name), net)?;
            }
            let end = if save.is_some() { 2 } else { STEPS };
            for step in start..end {
                let grads = net.gradients(step);
                net = optim.step(LR, net, grads)?;
            }
            if let Some(name) = save {
                optim.save(folder.path().join(name), &net, &end)?;
            }
            Ok(values(&net))
        });
        trained.unwrap().swap_remove(0)
    };
    on_ranks(3, Some("ranks"), None);
    assert_same_weights("ranks to ranks", &on_ranks(2, None, Some("ranks")), &expected);

    let net = Fused::new(&device());
    let optim = fused().init(&net);
    let saved = folder.path().join("ranks");
    let (mut net, mut optim, start) = checkpoint::load::<_, u64, _>(saved, net, optim).unwrap();
    let single = folder.path().join("single");
    checkpoint::save(&single, &net, &optim, &start).unwrap();
    for step in start..STEPS {
        let grads = net.gradients(step);
        net = optim.step(LR, net, grads);
    }
    assert_same_weights("ranks to a single device", &values(&net), &expected);
    assert_same_weights("a single device to ranks", &on_ranks(4, None, Some("single")), &expected);
}

/// A projection with a block of AdamW's, and weights of three frequencies: matrices in the first
/// two dimensions.
#[derive(Module, Debug)]
struct Mixed {
    in_proj: Param<Tensor<2>>,
    modes: Param<Tensor<3>>,
}

/// The same weights as parameters of their own, with the frequencies first.
#[derive(Module, Debug)]
struct Unmixed {
    in_proj: Vec<Param<Tensor<2>>>,
    modes: Param<Tensor<3>>,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let inner = device.clone().inner();
        let ones = Self {
            in_proj: trained(Tensor::ones([6, 14], &inner)),
            modes: trained(Tensor::ones([4, 5, 3], &inner)),
        };
        ones.map(&mut Fixed::new(5))
    }

    fn config() -> MuonConfig {
        config()
            .with_adamw(AdamWConfig::new().with_vector_lr(0.5).with_weight_decay(0.1))
            .with_rule(RoutingRule::muon("in_proj").split(QKV).leave([1]))
            .with_rule(RoutingRule::muon("modes").leading())
    }

    /// The weights after all steps of an optimizer of separate parameters.
    fn expected() -> Vec<f32> {
        let mixed = Self::new(&device());
        let blocks = mixed.in_proj.val().inner().split_with_sizes(QKV.to_vec(), 1);
        let first = |tensor: Tensor<3>| tensor.permute([2, 0, 1]);
        let mut net = Unmixed {
            in_proj: blocks.into_iter().map(trained).collect(),
            modes: trained(first(mixed.modes.val().inner())),
        };
        let separate = Self::config().with_rules(vec![
            RoutingRule::muon("in_proj").into(),
            RoutingRule::adamw(r"in_proj\.1"),
            RoutingRule::muon("modes").batch().into(),
        ]);
        let mut optim = separate.init(&net);
        for step in 0..STEPS {
            let mut mixed_grads = gradients(&mixed, step);
            let mut grads = GradientsParams::new();
            let in_proj = mixed_grads.remove::<2>(mixed.in_proj.id).unwrap();
            for (param, grad) in net.in_proj.iter().zip(in_proj.split_with_sizes(QKV.to_vec(), 1)) {
                grads.register(param.id, grad);
            }
            grads.register(net.modes.id, first(mixed_grads.remove::<3>(mixed.modes.id).unwrap()));
            net = optim.step(LR, net, grads);
        }
        let in_proj = net.in_proj.iter().map(|param| param.val().inner()).collect();
        values(&Self {
            in_proj: trained(Tensor::cat(in_proj, 1)),
            modes: trained(net.modes.val().inner().permute([1, 2, 0])),
        })
    }
}

#[test]
fn blocks_of_adamw_and_leading_matrices_are_trained_as_separate_parameters() {
    let expected = Mixed::expected();
    let mut net = Mixed::new(&device());
    let mut optim = Mixed::config().init(&net);
    let folder = tempfile::tempdir().unwrap();
    let single = folder.path().join("single");
    for step in 0..STEPS {
        if step == 2 {
            checkpoint::save(&single, &net, &optim, &step).unwrap();
        }
        let grads = gradients(&net, step);
        net = optim.step(LR, net, grads);
    }
    assert_same_weights("one parameter at a time", &values(&net), &expected);

    let resumed = Mixed::new(&device());
    let optim = Mixed::config().init(&resumed);
    let (mut net, mut optim, start) =
        checkpoint::load::<_, u64, _>(&single, resumed, optim).unwrap();
    for step in start..STEPS {
        let grads = gradients(&net, step);
        net = optim.step(LR, net, grads);
    }
    assert_same_weights("resumed", &values(&net), &expected);

    for count in [1, 2, 3] {
        for load in [false, true] {
            let dist =
                DistMuonConfig::new().with_muon(Mixed::config()).with_bucket_mb(Some(0.0005));
            let trained = World::threads(vec![device(); count], |world| -> Result<_> {
                let mut net = Mixed::new(world.device());
                let mut optim = dist.init(&world, &net)?;
                let mut start = 0;
                if load {
                    (net, optim, start) = optim.load::<_, u64>(&single, net)?;
                }
                for step in start..STEPS {
                    let grads = gradients(&net, step);
                    net = optim.step(LR, net, grads)?;
                }
                Ok(values(&net))
            });
            for actual in trained.unwrap() {
                assert_same_weights(&format!("{count} ranks"), &actual, &expected);
            }
        }
    }
}

#[test]
fn blocks_that_can_not_be_left_are_rejected_by_name() {
    let net = Fused::new(&device());
    for rule in [
        RoutingRule::muon("qkv").leave([0]),
        RoutingRule::muon("qkv").split(QKV).leave([3]),
        RoutingRule::muon("qkv").split(QKV).leave([0, 1, 2]),
    ] {
        let error = fused().with_rule(rule).route(&net).unwrap_err();
        assert!(matches!(&error, Error::Shape { parameter, .. } if parameter == "qkv"), "{error}");
    }
    let rule = RoutingRule::muon("qkv").split(QKV).leave([2]);
    let routing = fused().with_rule(rule).route(&net).unwrap();
    let route = &routing.routes()[0];
    assert_eq!(route.optimizer, "Muon, 3 blocks, 1 of AdamW (vector)");
    // One momentum of 10 outputs, two moments of 4, and the second moments of NorMuon's rows.
    let all = fused().route(&net).unwrap().routes()[0].state_bytes;
    assert_eq!(route.state_bytes, all - (6 * 4 + 4) * 4 + 2 * 6 * 4 * 4);
}

#[test]
fn the_table_shows_the_blocks() {
    let net = Fused::new(&device());
    let routing = fused().route(&net).unwrap();
    let table = routing.to_string();
    for text in ["Muon, 3 blocks", "Muon, 4 blocks", "Muon (Batch), 2 blocks"] {
        assert!(table.contains(text), "{table}");
    }
    let separate = separate().route(&net.separate()).unwrap();
    let (blocks, parameters) = (&routing.summary()[0], &separate.summary()[0]);
    assert_eq!(blocks.operations, parameters.operations);
    assert_eq!(blocks.state_bytes, parameters.state_bytes);
    assert_eq!(routing.routes()[0].blocks, QKV);
}

#[test]
fn blocks_that_do_not_fit_are_rejected_by_name() {
    let net = Fused::new(&device());
    for rule in [
        RoutingRule::muon("qkv").split([6, 4]),
        RoutingRule::muon("qkv").heads(4),
        RoutingRule::muon("qkv").split(QKV).layout(MatrixLayout::OutIn),
    ] {
        let error = fused().with_rule(rule).route(&net).unwrap_err();
        assert!(matches!(&error, Error::Shape { parameter, .. } if parameter == "qkv"), "{error}");
    }
}
