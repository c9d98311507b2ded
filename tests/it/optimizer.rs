//! The optimizer as a user meets it: whole modules, checkpoints, bad input.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer};
use burn::tensor::{Bytes, Device, Distribution, FloatDType, Int, Tensor, s};
use burn_pack::Reader;
use distmuon::{
    AdamWConfig, ElementwiseConfig, Error, IterationDtype, KernelPolicy, LionConfig, LrScale,
    MatrixLayout, MatrixView, MuonConfig, NewtonSchulzConfig, ParameterRole, RoutingRule, Schedule,
    checkpoint,
};
use distmuon_testing::device::{beyond_memory, has_type, tf32_or};
use distmuon_testing::models::{Fixed, bits, gradients, largest_difference, tensors, values};
use distmuon_testing::panic_message;
use distmuon_testing::references::{matrix, random, tensor};

#[derive(Module, Debug)]
struct Layer {
    up: Linear,
    down: Linear,
    norm: LayerNorm,
}

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Layer>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self::of_width(8, device)
    }

    fn of_width(width: usize, device: &Device) -> Self {
        let layer = || Layer {
            up: LinearConfig::new(width, 2 * width).init(device),
            down: LinearConfig::new(2 * width, width).init(device),
            norm: LayerNormConfig::new(width).init(device),
        };
        Self {
            embedding: EmbeddingConfig::new(16, width).init(device),
            layers: vec![layer(), layer()],
            head: LinearConfig::new(width, 16).init(device),
        }
    }

    fn gradients(&self, seed: i32) -> GradientsParams {
        let device = self.head.weight.val().device();
        let tokens = Tensor::<1, Int>::arange(0..12, &device).mul_scalar(7).add_scalar(seed);
        let tokens = tokens.remainder_scalar(16).reshape([3, 4]);
        let mut x = self.embedding.forward(tokens);
        for layer in &self.layers {
            let hidden = burn::tensor::activation::relu(layer.up.forward(x.clone()));
            x = layer.norm.forward(x + layer.down.forward(hidden));
        }
        let loss = self.head.forward(x).powf_scalar(2.0).mean();
        GradientsParams::from_grads(loss.backward(), self)
    }

    fn weights(&self) -> Vec<Vec<u8>> {
        let mut weights = vec![bits(&self.embedding.weight.val()), bits(&self.head.weight.val())];
        for layer in &self.layers {
            weights.push(bits(&layer.up.weight.val()));
            weights.push(bits(&layer.down.weight.val()));
            weights.push(bits(&layer.norm.gamma.val()));
        }
        weights
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

fn train(mut net: Net, optim: &mut ModuleOptimizer, steps: std::ops::Range<i32>) -> Net {
    for step in steps {
        let grads = net.gradients(step);
        net = optim.step(0.01, net, grads);
    }
    net
}

/// The largest difference of any weight.
fn difference(a: &Net, b: &Net) -> f64 {
    f64::from(largest_difference(&values(a), &values(b)))
}

/// Tensors that are otherwise updated in place are copied if another model shares them. Rows have
/// 200 and 400 bytes, between which Burn's operations leave gaps on CUDA. The kernels agree with
/// Burn's operations.
#[test]
fn models_that_are_kept_do_not_change_during_training() {
    let start = Net::of_width(50, &device()).map(&mut Fixed::new(1));
    let config = MuonConfig::new()
        .with_newton_schulz(NewtonSchulzConfig::new().with_dtype(IterationDtype::F32));
    let train = |kernels| {
        let mut optim = config.clone().with_kernels(kernels).init(&start);
        let mut kept = vec![(start.clone(), start.weights())];
        for step in 0..3 {
            let net = &kept[0].0;
            let net = optim.step(0.01, net.clone(), gradients(net, step));
            let weights = net.weights();
            kept.insert(0, (net, weights));
        }
        for (net, weights) in &kept {
            assert_eq!(net.weights(), *weights, "a model that was kept has changed");
        }
        kept.swap_remove(0).0
    };
    let error = difference(&train(KernelPolicy::Auto), &train(KernelPolicy::Portable));
    assert!(error < 0.01 * tf32_or(1e-3), "{error}");
}

/// The steps of several batches, which differ in size.
#[test]
fn steps_with_graphs_agree_with_steps_without() {
    // One kernel iterates narrower matrices, without a recording.
    let start = Net::of_width(72, &device()).map(&mut Fixed::new(2));
    let trained = |graphs| {
        let mut optim = MuonConfig::new()
            .with_newton_schulz(NewtonSchulzConfig::new().with_graphs(graphs))
            .init(&start);
        let step = |net: Net, step| {
            let grads = gradients(&net, step);
            optim.step(0.01, net, grads)
        };
        (0..3).fold(start.clone(), step)
    };
    let error = difference(&trained(true), &trained(false));
    assert!(error < 0.01 * tf32_or(1e-3), "{error}");
}

#[test]
fn a_step_changes_every_parameter() {
    let net = Net::new(&device());
    let before = net.weights();
    let mut optim = MuonConfig::new().init(&net);
    let after = train(net, &mut optim, 0..2).weights();
    for (before, after) in before.iter().zip(&after) {
        assert_ne!(before, after);
    }
}

#[test]
fn parameters_of_a_network_get_the_expected_roles() {
    let routing = MuonConfig::new().route(&Net::new(&device())).unwrap();
    let role = |path: &str| {
        routing
            .routes()
            .iter()
            .find(|route| route.path == path)
            .unwrap_or_else(|| panic!("{path}"))
            .role
    };
    let muon = ParameterRole::Muon { view: MatrixView::Single, layout: MatrixLayout::InOut };
    assert_eq!(role("embedding.weight"), ParameterRole::Embedding);
    assert_eq!(role("layers.0.up.weight"), muon);
    assert_eq!(role("layers.1.down.weight"), muon);
    assert_eq!(role("layers.1.down.bias"), ParameterRole::Vector);
    assert_eq!(role("layers.0.norm.gamma"), ParameterRole::Vector);
    assert_eq!(role("head.weight"), ParameterRole::Head);
    let table = routing.to_string();
    for text in ["layers.0.up.weight", "[8, 16]", "hidden matrix", "AdamW (embedding)"] {
        assert!(table.contains(text), "{table}");
    }
}

#[test]
fn the_last_linear_is_the_head_unless_it_is_in_a_stack() {
    #[derive(Module, Debug)]
    struct Mlp {
        first: Linear,
        last: Linear,
    }
    #[derive(Module, Debug)]
    struct Tied {
        layers: Vec<Linear>,
    }
    let linear = || LinearConfig::new(4, 4).with_bias(false).init(&device());
    let mlp = MuonConfig::new().route(&Mlp { first: linear(), last: linear() }).unwrap();
    assert!(matches!(mlp.routes()[0].role, ParameterRole::Muon { .. }));
    assert_eq!(mlp.routes()[1].role, ParameterRole::Head);
    let tied = MuonConfig::new().route(&Tied { layers: vec![linear(), linear()] }).unwrap();
    assert!(tied.routes().iter().all(|route| matches!(route.role, ParameterRole::Muon { .. })));
}

#[test]
fn rules_override_defaults_and_unusable_rules_are_rejected() {
    let net = Net::new(&device());
    let routing = MuonConfig::new()
        .with_rule(RoutingRule::adamw(r"^layers\.0\."))
        .with_rule(RoutingRule::muon(r"^layers\.0\.up\.weight$").layout(MatrixLayout::OutIn))
        .route(&net)
        .unwrap();
    let route = |path: &str| routing.routes().iter().find(|route| route.path == path).unwrap();
    assert_eq!(route("layers.0.down.weight").role, ParameterRole::Vector);
    assert!(route("layers.0.down.weight").reason.contains("rule"));
    let turned = ParameterRole::Muon { view: MatrixView::Single, layout: MatrixLayout::OutIn };
    assert_eq!(route("layers.0.up.weight").role, turned);

    let error = |rule: RoutingRule| MuonConfig::new().with_rule(rule).route(&net).unwrap_err();
    assert!(matches!(error(RoutingRule::adamw("layers.(")), Error::Pattern { .. }));
    assert!(matches!(error(RoutingRule::adamw("no_such_layer")), Error::UnusedRule { .. }));
    assert!(matches!(error(RoutingRule::muon(r"norm\.gamma").into()), Error::UnusedRule { .. }));
}

#[derive(Module, Debug)]
struct Vision {
    conv: Conv2d,
    experts: Param<Tensor<3>>,
}

fn vision() -> Vision {
    let experts = Tensor::random([3, 4, 6], Distribution::Default, &device());
    Vision {
        conv: Conv2dConfig::new([2, 5], [3, 3]).with_padding(PaddingConfig2d::Same).init(&device()),
        experts: Param::from_tensor(experts.require_grad()),
    }
}

#[test]
fn parameters_of_more_than_two_dimensions_need_a_view() {
    let error = MuonConfig::new().try_init(&vision()).map(|_| ()).unwrap_err();
    let Error::NoView { parameters, .. } = &error else { panic!("{error}") };
    assert_eq!(parameters[..], ["experts"]);
    assert!(error.to_string().contains("`experts` [3, 4, 6]"), "{error}");

    let mut optim = MuonConfig::new()
        .with_rule(RoutingRule::muon("conv").flatten())
        .with_rule(RoutingRule::muon("experts").batch())
        .with_weight_decay(0.0.into())
        .with_lr_scale(LrScale::None)
        .init(&vision());
    let model = vision();
    let before = (model.conv.weight.val(), model.experts.val());
    let mut grads = GradientsParams::new();
    let random = |seed: u64| {
        Device::default().seed(seed);
        Tensor::<3>::random([3, 4, 6], Distribution::Normal(0.0, 1.0), &Device::default())
    };
    grads.register(model.experts.id, random(1));
    let conv =
        Tensor::<4>::random([5, 2, 3, 3], Distribution::Normal(0.0, 1.0), &Device::default());
    grads.register(model.conv.weight.id, conv);
    // The optimizer was made for another instance: it identifies parameters by their paths.
    let model = optim.step(1.0, model, grads);
    let update = (before.1 - model.experts.val()).inner();
    for k in 0..3 {
        let expert = matrix(&update, k);
        let gram = &expert * expert.transpose();
        assert!((gram.diagonal().column_vector().iter().sum::<f64>() / 4.0 - 1.0).abs() < 0.35);
    }
    let update = (before.0 - model.conv.weight.val()).inner().reshape([1, 5, 18]);
    let flat = matrix(&update, 0);
    let gram = &flat * flat.transpose();
    assert!((0..5).all(|i| (gram[(i, i)] - 1.0).abs() < 0.5));
}

#[test]
fn the_scale_follows_the_layout_of_burns_linear() {
    // 4 inputs, 16 outputs: Original scales by sqrt(16 / 4). Swapped, it would be 1.
    let step = |layout| {
        let linear = LinearConfig::new(4, 16).with_bias(false).init(&device());
        let before = linear.weight.val();
        let mut optim = MuonConfig::new()
            .with_lr_scale(LrScale::Original)
            .with_layout(layout)
            .with_rule(RoutingRule::muon("weight").layout(layout))
            .with_weight_decay(0.0.into())
            .init(&linear);
        let mut grads = GradientsParams::new();
        // Not from the generator of the device, from which tests on other threads draw.
        let grad = tensor(&random(4, 16, 3), &Device::default());
        grads.register(linear.weight.id, grad.reshape([4, 16]));
        let linear = optim.step(1.0, linear, grads);
        (before - linear.weight.val()).powf_scalar(2.0).sum().sqrt().into_scalar::<f32>()
    };
    let ratio = step(MatrixLayout::InOut) / step(MatrixLayout::OutIn);
    assert!((ratio - 2.0).abs() < 1e-4, "{ratio}");
}

#[test]
fn the_module_optimizer_is_bit_equal_to_the_per_parameter_rule() {
    let linear = LinearConfig::new(6, 9).with_bias(false).init(&device());
    let config = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let grad = Tensor::<2>::random([6, 9], Distribution::Normal(0.0, 1.0), &Device::default());
    let (expected, _) = config.build().step(0.1, linear.weight.val().inner(), grad.clone(), None);
    let mut grads = GradientsParams::new();
    grads.register(linear.weight.id, grad);
    let linear = config.init(&linear).step(0.1, linear, grads);
    assert_eq!(bits(&linear.weight.val().inner()), bits(&expected));
}

/// A program that collects gradients in two parts takes two steps.
#[test]
fn two_steps_with_parts_of_the_gradients_are_one_with_all() {
    let loss = |net: &Net| {
        let tokens = Tensor::<2, Int>::from_data([[1, 5, 3]], &device());
        let x = net.embedding.forward(tokens);
        let x = net.layers.iter().fold(x, |x, layer| layer.down.forward(layer.up.forward(x)));
        net.head.forward(x).square().mean().backward()
    };
    let whole = |net: &Net| vec![GradientsParams::from_grads(loss(net), net)];
    let parts = |net: &Net| {
        let mut gradients = loss(net);
        let ids = [net.head.weight.id, net.layers[0].up.weight.id];
        let first = GradientsParams::from_params(&mut gradients, net, &ids);
        vec![first, GradientsParams::from_module(&mut gradients, net)]
    };
    let net = Net::new(&device());
    let train = |collect: &dyn Fn(&Net) -> Vec<GradientsParams>, is_batched: bool| {
        let mut optim = MuonConfig::new().init(&net);
        let mut batched = MuonConfig::new().init_batched(&net).unwrap();
        let trained = (0..3).fold(net.clone(), |net, _| {
            collect(&net).into_iter().fold(net, |net, gradients| match is_batched {
                true => batched.step(0.01, net, gradients).unwrap(),
                false => optim.step(0.01, net, gradients),
            })
        });
        values(&trained)
    };
    for is_batched in [false, true] {
        let expected = train(&whole, is_batched);
        assert!(expected != values(&net));
        assert!(train(&parts, is_batched) == expected, "{is_batched}");
    }
}

#[test]
fn gradients_of_another_shape_are_rejected() {
    let net = Net::new(&device());
    let muon = (net.layers[0].up.weight.id, "`layers.0.up.weight`");
    let adamw = (net.embedding.weight.id, "`embedding.weight`");
    for (id, name) in [muon, adamw] {
        let mut grads = net.gradients(0);
        let turned = grads.remove::<2>(id).unwrap().transpose();
        grads.register(id, turned);
        let step = || MuonConfig::new().init(&net).step(0.01, net.clone(), grads);
        let message = panic_message(step);
        assert!(message.contains(name) && message.contains("wrong shape"), "{message}");
    }
}

#[test]
fn a_step_without_memory_fails_naming_the_parameter() {
    let net = Net::new(&device());
    let Some(huge) = beyond_memory(8, 16) else { return };
    let muon = (net.layers[0].up.weight.id, "`layers.0.up.weight`");
    let adamw = (net.embedding.weight.id, "`embedding.weight`");
    for ((id, name), lost) in [(muon, huge.clone()), (adamw, huge.transpose())] {
        let mut grads = net.gradients(0);
        grads.remove::<2>(id);
        grads.register(id, lost);
        let step = || MuonConfig::new().init(&net).step(0.01, net.clone(), grads);
        let message = panic_message(step);
        assert!(message.contains(name) && message.contains("1099511627776 bytes"), "{message}");
    }
    // The device still works.
    train(net, &mut MuonConfig::new().init(&Net::new(&device())), 0..1).head.weight.val().to_data();
}

#[test]
fn non_finite_gradients_change_nothing_and_are_counted() {
    // Constant, since a skipped step counts in the schedules.
    let config = MuonConfig::new().with_momentum(0.95.into());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let net = Net::new(&device());
        let routing = config.route(&net).unwrap();
        let mut optim = routing.init();
        let net = train(net, &mut optim, 0..2);
        assert!(routing.skipped_steps().read().is_empty());

        let clean = optim.to_record().into_bytes().unwrap();
        let mut spoiled = net.gradients(2);
        let up = net.layers[0].up.weight.id;
        let norm = net.layers[1].norm.gamma.id;
        let spoil = |grad: Tensor<1>| {
            grad.slice_assign(s![0..1], Tensor::from_floats([bad], &Device::default()))
        };
        let grad = spoiled.remove::<2>(up).unwrap();
        let shape = grad.dims();
        spoiled.register::<2>(up, spoil(grad.flatten(0, 1)).reshape(shape));
        let grad = spoiled.remove::<1>(norm).unwrap();
        spoiled.register(norm, spoil(grad));

        let before = net.clone();
        let after = optim.step(0.01, net, spoiled);
        assert_eq!(bits(&after.layers[0].up.weight.val()), bits(&before.layers[0].up.weight.val()));
        assert_eq!(
            bits(&after.layers[1].norm.gamma.val()),
            bits(&before.layers[1].norm.gamma.val())
        );
        assert_ne!(bits(&after.layers[1].up.weight.val()), bits(&before.layers[1].up.weight.val()));
        let skipped = routing.skipped_steps().read();
        assert_eq!(skipped.len(), 2, "{skipped:?}");
        assert_eq!(skipped["layers.0.up.weight"], 1);
        assert_eq!(skipped["layers.1.norm.gamma"], 1);

        // The momentum is also unchanged: the next finite gradient of the matrix has the effect
        // that it has without the spoiled step.
        let good = after.gradients(5);
        let grad = good.get::<2>(up).unwrap();
        let mut twice = [GradientsParams::new(), GradientsParams::new()];
        twice.iter_mut().for_each(|grads| grads.register(up, grad.clone()));
        let [with, without] = twice;
        let mut never = config.init(&after).from_bytes(clean).unwrap();
        let with = optim.step(0.01, after.clone(), with);
        let without = never.step(0.01, after, without);
        assert_eq!(bits(&with.layers[0].up.weight.val()), bits(&without.layers[0].up.weight.val()));
    }
}

/// The flags of a step start from zeros of the step before.
#[test]
fn a_step_after_bad_gradients_of_a_whole_model_leaves_no_parameter() {
    let net = Net::new(&device());
    let mut optim = MuonConfig::new().init_batched(&net).unwrap();
    let (up, norm) = (net.layers[0].up.weight.id, net.layers[1].norm.gamma.id);
    let values =
        |net: &Net| [bits(&net.layers[0].up.weight.val()), bits(&net.layers[1].norm.gamma.val())];
    let mut net = net;
    for step in 0..6 {
        let mut gradients = net.gradients(step);
        let is_bad = step % 2 == 1;
        if is_bad {
            let grad = gradients.remove::<2>(up).unwrap();
            gradients.register(up, grad.mul_scalar(f32::NAN));
            let grad = gradients.remove::<1>(norm).unwrap();
            gradients.register(norm, grad.mul_scalar(f32::INFINITY));
        }
        let before = net.clone();
        net = optim.step(0.01, net, gradients).unwrap();
        for (before, after) in values(&before).iter().zip(values(&net)) {
            assert_eq!(*before == after, is_bad, "step {step}");
        }
        let other = |net: &Net| bits(&net.layers[1].up.weight.val());
        assert_ne!(other(&before), other(&net), "step {step}");
    }
    let skipped = optim.skipped_steps().read();
    assert_eq!(skipped.len(), 2, "{skipped:?}");
    assert_eq!(skipped["layers.0.up.weight"], 3);
    assert_eq!(skipped["layers.1.norm.gamma"], 3);
}

#[test]
fn a_non_finite_first_gradient_is_skipped() {
    let linear = LinearConfig::new(4, 4).init(&device());
    let weight = Tensor::<2>::full([4, 4], f32::NAN, &Device::default());
    let (after, state) =
        MuonConfig::new().build().step(0.1, linear.weight.val().inner(), weight, None);
    assert_eq!(bits(&after), bits(&linear.weight.val().inner()));
    let state = state.unwrap();
    assert_eq!(state.momentum().abs().max().into_scalar::<f32>(), 0.0);
    assert_eq!(state.skipped().into_scalar::<f32>(), 1.0);
}

#[test]
fn learning_rates_can_be_set_per_role() {
    let net = Net::new(&device());
    let frozen = AdamWConfig::new().with_embedding_lr(0.0).with_head_lr(0.0).with_vector_lr(0.0);
    let before = net.clone();
    let after = train(net, &mut MuonConfig::new().with_adamw(frozen).init(&before), 0..1);
    assert_eq!(bits(&after.embedding.weight.val()), bits(&before.embedding.weight.val()));
    assert_eq!(bits(&after.head.weight.val()), bits(&before.head.weight.val()));
    assert_ne!(bits(&after.layers[0].up.weight.val()), bits(&before.layers[0].up.weight.val()));

    // A Burn scheduler with a separate group has the same effect.
    let routing = MuonConfig::new().route(&before).unwrap();
    let matrices = |group| matches!(group, ParameterRole::Muon { .. });
    let mut lr = ModuleLrScheduler::new(Schedule::constant(0.0).into_lr_scheduler()).with_group(
        routing.group(matrices),
        Schedule::warmup_cosine(0.01, 1, 10, 0.0).into_lr_scheduler(),
    );
    let grads = before.gradients(0);
    let after = routing.init().step(lr.step(), before.clone(), grads);
    assert_eq!(bits(&after.embedding.weight.val()), bits(&before.embedding.weight.val()));
    assert_ne!(bits(&after.layers[0].up.weight.val()), bits(&before.layers[0].up.weight.val()));
}

#[derive(Module, Debug)]
struct Wrapped {
    net: Net,
}

/// Burn finds the parameters of a model inside of another by their identities.
#[test]
fn an_optimizer_of_a_part_trains_the_whole_only_where_burn_steps() {
    let whole = Wrapped { net: Net::new(&device()) };
    let gradients = || whole.net.gradients(0);
    let after = MuonConfig::new().init(&whole.net).step(0.01, whole.clone(), gradients());
    assert!(after.net.weights().iter().zip(whole.net.weights()).all(|(new, old)| *new != old));
    let mut batched = MuonConfig::new().init_batched(&whole.net).unwrap();
    let error = batched.step(0.01, whole.clone(), gradients()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("absent when the optimizer was made"), "{error}");
}

/// Gradients of zero leave the decay alone. Vectors are spared, as in many recipes.
#[test]
fn the_weight_decay_can_be_set_per_role() {
    let adamw = AdamWConfig::new().with_weight_decay(0.5).with_vector_decay(0.0);
    let lion = LionConfig::new().with_weight_decay(0.5).with_vector_decay(0.0);
    let rests: [ElementwiseConfig; 2] = [
        adamw.with_embedding_decay(2.0).with_head_decay(0.5).into(),
        lion.with_embedding_decay(2.0).with_head_decay(0.5).into(),
    ];
    for rest in rests {
        let config = MuonConfig::new().with_rest(rest);
        let net = Net::new(&device());
        let zeros = || {
            let mut gradients = GradientsParams::new();
            let device = device().inner();
            gradients.register(net.embedding.weight.id, Tensor::<2>::zeros([16, 8], &device));
            gradients.register(net.head.weight.id, Tensor::<2>::zeros([8, 16], &device));
            gradients.register(net.layers[0].norm.gamma.id, Tensor::<1>::zeros([8], &device));
            gradients
        };
        let one = config.init(&net).step(0.1, net.clone(), zeros());
        let batched = config.init_batched(&net).unwrap().step(0.1, net.clone(), zeros()).unwrap();
        for after in [one, batched] {
            let close = |new: Tensor<2>, old: Tensor<2>, factor: f64| {
                let error = (new.inner() - old.inner() * factor).abs().max();
                assert!(error.into_scalar::<f32>() < 1e-6, "{factor}, {config:?}");
            };
            close(after.embedding.weight.val(), net.embedding.weight.val(), 0.9);
            close(after.head.weight.val(), net.head.weight.val(), 0.975);
            let gamma = |net: &Net| bits(&net.layers[0].norm.gamma.val());
            assert_eq!(gamma(&after), gamma(&net));
        }
    }
}

#[test]
fn clipping_changes_the_steps() {
    let net = Net::new(&device());
    let step = |clipping| {
        let config = MuonConfig::new().with_grad_clipping(clipping);
        let mut optim = config.init(&net);
        // The second step depends on the size of the first gradient, which the momentum contains.
        train(net.clone(), &mut optim, 0..2).weights()
    };
    assert_ne!(step(Some(GradientClippingConfig::Norm(1e-6))), step(None));
}

#[test]
fn the_weight_decay_follows_its_schedule() {
    let linear = LinearConfig::new(5, 5).with_bias(false).init(&device());
    let weight = linear.weight.val().inner();
    let zero = weight.zeros_like();
    let muon = MuonConfig::new()
        .with_weight_decay(Schedule::constant(1.0).hold(1).linear(1, 0.0).into())
        .build();
    let (once, state) = muon.step(0.5, weight.clone(), zero.clone(), None);
    assert_eq!(bits(&once), bits(&weight.mul_scalar(0.5)));
    let (twice, _) = muon.step(0.5, once.clone(), zero, state);
    assert_eq!(bits(&twice), bits(&once), "the decay has ended");
}

#[test]
fn a_resumed_run_is_bit_equal_to_an_uninterrupted_one() {
    let config = MuonConfig::new().with_momentum(Schedule::momentum_warmup(0.95, 6).into());
    let net = Net::new(&device());
    let mut optim = config.init(&net);
    let net = train(net, &mut optim, 0..3);
    let folder = tempfile::tempdir().unwrap();
    let paths = [folder.path().join("optim.bpk"), folder.path().join("run.ckpt")];
    optim.save(&paths[0]).unwrap();
    checkpoint::save(&paths[1], &net, &optim, &("three", 3)).unwrap();
    let model = net.clone();
    let uninterrupted = train(net, &mut optim, 3..8).weights();

    // Burn's file of the optimizer, with the same module.
    let mut loaded = config.init(&model).load(&paths[0]).unwrap();
    assert_eq!(train(model, &mut loaded, 3..8).weights(), uninterrupted);

    // The checkpoint, loaded into a new model.
    let fresh = Net::new(&device());
    let optim = config.init(&fresh);
    let (model, mut optim, progress): (_, _, (String, i32)) =
        checkpoint::load(&paths[1], fresh, optim).unwrap();
    assert_eq!(progress, ("three".to_owned(), 3));
    assert_eq!(train(model, &mut optim, 3..8).weights(), uninterrupted);
}

#[test]
fn broken_and_foreign_checkpoints_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.ckpt");
    let net = Net::new(&device());
    let mut optim = MuonConfig::new().init(&net);
    let net = train(net, &mut optim, 0..1);
    checkpoint::save(&path, &net, &optim, &1).unwrap();
    let load = |path: &std::path::Path| {
        let net = Net::new(&device());
        let optim = MuonConfig::new().init(&net);
        checkpoint::load::<_, i32, _>(path, net, optim).map(|_| ())
    };
    assert!(load(&path).is_ok());

    let bytes = std::fs::read(&path).unwrap();
    let truncated = folder.path().join("truncated.ckpt");
    for length in [0, 10, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&truncated, &bytes[..length]).unwrap();
        let error = load(&truncated).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint { path, .. } if *path == truncated), "{error}");
    }
    let missing = load(&folder.path().join("missing.ckpt")).unwrap_err();
    assert!(matches!(missing, Error::Checkpoint { .. }));
    net.clone().save_file(folder.path().join("model.bpk")).unwrap();
    let other = load(&folder.path().join("model.bpk")).unwrap_err().to_string();
    assert!(other.contains("not a checkpoint"), "{other}");

    let wide = Net::of_width(10, &device());
    let optim = MuonConfig::new().init(&wide);
    let error = checkpoint::load::<_, i32, _>(&path, wide, optim).map(|_| ()).unwrap_err();
    let Error::OtherRun { differences, .. } = &error else { panic!("{error}") };
    assert_eq!(differences[0].parameter, "embedding.weight");
    assert!(differences[0].problem.starts_with("expected [16, 10]"), "{error}");
    assert!(differences[0].problem.contains("got [16, 8]"), "{error}");

    // An optimizer of another kind.
    let net = Net::new(&device());
    let error = checkpoint::load::<_, i32, _>(&path, net, burn::optim::SgdConfig::new().init());
    let error = error.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("does not take over `correction_1`"), "{error}");
    let net = Net::new(&device());
    let optim = MuonConfig::new().init(&net);
    let error = checkpoint::load::<_, String, _>(&path, net, optim).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("progress"), "{error}");
}

/// The file in `data` was written by the last commit before version 2, after one step.
#[test]
fn checkpoints_of_version_1_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v1.bpk");
    // Included in the program, which may run on a machine without sources.
    std::fs::write(&path, include_bytes!("../data/checkpoint-v1.bpk")).unwrap();
    let load = |path: &std::path::Path| {
        let net = Net::new(&device());
        let optim = MuonConfig::new().init(&net);
        checkpoint::load::<_, i32, _>(path, net, optim).unwrap()
    };
    let state = |optim: &ModuleOptimizer| tensors(optim.to_record().into_bytes().unwrap());
    let file = Reader::from_file_exact(&path).unwrap();
    assert_eq!(file.metadata()["distmuon.checkpoint"], "1");
    let saved = ["model", "optimizer"]
        .map(|name| tensors(Bytes::from_bytes_vec(file.tensor_data(name).unwrap())));

    let (net, optim, progress) = load(&path);
    assert_eq!(progress, 1);
    assert!(saved[0] == tensors(net.clone().into_record().into_bytes().unwrap()));
    assert!(saved[1] == state(&optim));
    assert!(saved[1].values().flatten().any(|byte| *byte != 0));

    // Saved again, the checkpoint has the current version and the same contents.
    let again = folder.path().join("again.bpk");
    checkpoint::save(&again, &net, &optim, &progress).unwrap();
    let file = Reader::from_file_exact(&again).unwrap();
    assert_eq!(file.metadata()["distmuon.checkpoint"], "2");
    let (net_again, optim_again, progress) = load(&again);
    assert!(net_again.weights() == net.weights() && state(&optim_again) == state(&optim));
    assert_eq!(progress, 1);
}

#[test]
fn a_failed_save_leaves_the_earlier_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.ckpt");
    let net = Net::new(&device());
    let optim = MuonConfig::new().init(&net);
    checkpoint::save(&path, &net, &optim, &1).unwrap();
    let before = std::fs::read(&path).unwrap();
    // Progress that can't be serialized interrupts the save.
    let error =
        checkpoint::save(&path, &net, &optim, &std::collections::HashMap::from([((1, 2), 3)]));
    assert!(matches!(error, Err(Error::Checkpoint { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let nowhere = checkpoint::save(folder.path().join("no/such/folder"), &net, &optim, &1);
    assert!(matches!(nowhere, Err(Error::Checkpoint { .. })));
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "nothing half-written is left");
}

/// The error comes before training.
#[test]
fn a_type_that_the_device_does_not_support_is_rejected() {
    let net = Net::new(&device());
    for (dtype, iteration) in
        [(FloatDType::F16, IterationDtype::F16), (FloatDType::BF16, IterationDtype::Bf16)]
    {
        let error = MuonConfig::new()
            .with_newton_schulz(NewtonSchulzConfig::new().with_dtype(iteration))
            .try_init(&net)
            .err();
        assert_eq!(error.is_none(), has_type(dtype), "{dtype:?}: {error:?}");
        if let Some(error) = error {
            assert!(matches!(error, Error::Dtype { .. }), "{error}");
            assert!(error.to_string().contains("weight`"), "{error}");
            assert!(error.to_string().contains("`newton_schulz.dtype`"), "{error}");
        }
    }
}

#[test]
fn invalid_settings_are_rejected_and_named() {
    let net = Net::new(&device());
    let rejected = |config: MuonConfig, setting: &str| match config.try_init(&net) {
        Err(Error::Setting { setting: named, .. }) => assert_eq!(named, setting),
        Err(error) => panic!("{setting}: {error}"),
        Ok(_) => panic!("{setting} was accepted"),
    };
    let config = MuonConfig::new;
    rejected(config().with_momentum(1.0.into()), "momentum.momentum");
    let momentum = Schedule::constant(0.9).linear(5, f64::NAN);
    rejected(config().with_momentum(momentum.into()), "momentum.momentum");
    rejected(config().with_weight_decay((-0.1).into()), "weight_decay");
    rejected(config().with_lr_factor(f64::INFINITY), "lr_factor");
    let iteration = NewtonSchulzConfig::new;
    rejected(config().with_newton_schulz(iteration().with_steps(Some(0))), "newton_schulz.steps");
    rejected(config().with_newton_schulz(iteration().with_epsilon(-1e-7)), "newton_schulz.epsilon");
    let adamw = AdamWConfig::new;
    rejected(config().with_adamw(adamw().with_beta_1(1.0)), "rest.AdamW.beta_1");
    rejected(config().with_adamw(adamw().with_beta_2(-0.1)), "rest.AdamW.beta_2");
    rejected(config().with_adamw(adamw().with_epsilon(f64::NAN)), "rest.AdamW.epsilon");
    rejected(config().with_adamw(adamw().with_weight_decay(-1.0)), "rest.AdamW.weight_decay");
    rejected(config().with_adamw(adamw().with_head_lr(f64::NAN)), "rest.AdamW.head_lr");
    rejected(config().with_adamw(adamw().with_vector_decay(-1.0)), "rest.AdamW.vector_decay");
    let betas = adamw().with_head_betas(Some([0.9, 1.0]));
    rejected(config().with_adamw(betas), "rest.AdamW.head_betas");

    #[derive(Module, Debug)]
    struct Empty {
        count: usize,
    }
    assert!(matches!(MuonConfig::new().try_init(&Empty { count: 0 }), Err(Error::EmptyModel)));
}

#[test]
#[should_panic(expected = "was not in the model")]
fn training_another_model_panics() {
    let linear = LinearConfig::new(4, 4).init(&device());
    let mut optim = MuonConfig::new().init(&linear);
    let net = Net::new(&device());
    let grads = net.gradients(0);
    optim.step(0.01, net, grads);
}

#[test]
#[should_panic(expected = "use `MuonConfig::init` with a routing rule")]
fn the_per_parameter_rule_names_a_remedy_for_three_dimensions() {
    let tensor = Tensor::<3>::ones([2, 3, 4], &Device::default());
    MuonConfig::new().build().step(0.1, tensor.clone(), tensor, None);
}

#[test]
fn configuration_round_trips_through_json() {
    use burn::config::Config;
    let config = MuonConfig::new()
        .with_momentum(Schedule::momentum_warmup(0.97, 400).into())
        .with_newton_schulz(
            NewtonSchulzConfig::new()
                .with_coefficients(distmuon::Coefficients::Custom(vec![[1.5, -0.5, 0.0]])),
        )
        .with_rule(RoutingRule::muon("experts").batch())
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("muon.json");
    config.save(&path).unwrap();
    let loaded = MuonConfig::load(&path).unwrap();
    assert_eq!(loaded.to_string(), config.to_string());
    assert_eq!(loaded.momentum, config.momentum);
    assert_eq!(loaded.rules, config.rules);
}
