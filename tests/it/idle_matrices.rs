//! Matrices of a stack without a gradient, such as experts without tokens: they stay as they are,
//! as layers of their own do.

use std::path::Path;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData, s};
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistMuonConfig, Layout, Mesh, Place};
use distmuon::{MuonConfig, RoutingRule, Schedule, WeightDecay, checkpoint};
use distmuon_testing::combinations::{combinations, with_momentum};
use distmuon_testing::models::assert_same_weights;
use distmuon_testing::worlds::Folder;

const SHAPE: [usize; 3] = [3, 6, 10];
const STEPS: usize = 7;

/// The same matrices as a stack, and as layers of their own.
#[derive(Module, Debug)]
struct Experts {
    stack: Param<Tensor<3>>,
    layers: Vec<Param<Tensor<2>>>,
}

/// Values of a matrix that depend on a number.
fn matrix(number: usize, device: &Device) -> Tensor<2> {
    let [_, m, n] = SHAPE;
    let value = |index: usize| ((index * 37 + number * 101 + index * index * 7) % 53) as f32;
    let values = (0..m * n).map(|index| (value(index) - 26.0) / 40.0).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(values, [m, n]), (device, DType::F32))
}

impl Experts {
    fn new(device: &Device) -> Self {
        let matrices: Vec<_> = (0..SHAPE[0]).map(|expert| matrix(expert, device)).collect();
        let layer = |matrix: &Tensor<2>| Param::from_tensor(matrix.clone().require_grad());
        let layers = matrices.iter().map(layer).collect();
        let stack = Tensor::stack::<3>(matrices, 0).require_grad();
        Self { stack: Param::from_tensor(stack), layers }
    }

    /// The gradients of a step: zeros in the stack where a layer has none. `columns` are those of
    /// the stack that this model has.
    fn gradients(&self, step: usize, rows: std::ops::Range<usize>) -> GradientsParams {
        let device = self.stack.val().device().inner();
        let mut gradients = GradientsParams::new();
        let mut of_stack = vec![];
        for (expert, layer) in self.layers.iter().enumerate() {
            // In one of the steps, no expert has a gradient; in the last two, all have.
            let is_idle = step == 3 || step < 5 && (step + expert).is_multiple_of(3);
            let gradient = matrix(10 * step + expert + 7, &device);
            if is_idle {
                of_stack.push(Tensor::zeros_like(&gradient));
            } else {
                gradients.register(layer.id, gradient.clone());
                of_stack.push(gradient);
            }
        }
        let of_stack = Tensor::stack::<3>(of_stack, 0).slice([0..SHAPE[0], rows]);
        gradients.register(self.stack.id, of_stack);
        gradients
    }

    fn assert_equal(&self, case: &str) {
        let values = |tensor: Tensor<1>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        let layers = self.layers.iter().map(|layer| layer.val().inner().reshape([-1]));
        let layers = Tensor::cat(layers.collect(), 0);
        assert_same_weights(case, &values(self.stack.val().inner().reshape([-1])), &values(layers));
    }
}

/// A decay whose rate falls in the first steps of a matrix.
fn falling(decay: &WeightDecay) -> WeightDecay {
    let first = decay.rate().at(0);
    let rate = Schedule::constant(first).linear(4, 0.3 * first);
    match decay {
        WeightDecay::Cautious(_) => WeightDecay::Cautious(rate),
        WeightDecay::CautiousScaled(_) => WeightDecay::CautiousScaled(rate),
        WeightDecay::CautiousAfter(_) => WeightDecay::CautiousAfter(rate),
        WeightDecay::Independent(_) => WeightDecay::Independent(rate),
        WeightDecay::SquaredRate(_) => WeightDecay::SquaredRate(rate),
        WeightDecay::Coupled(_) => WeightDecay::Coupled(rate),
        _ => WeightDecay::Decoupled(rate),
    }
}

/// Combinations of parts with constants, and with schedules that move in the first steps of a
/// matrix.
fn configs() -> Vec<(String, MuonConfig)> {
    // The rules of one name parameters of another model.
    let combinations = || combinations().into_iter().filter(|(_, muon)| muon.rules.is_empty());
    let constant =
        combinations().map(|(name, muon)| (name.to_owned(), with_momentum(muon, 0.9.into())));
    let moving = combinations().map(|(name, muon)| {
        let decay = falling(&muon.weight_decay);
        let muon = with_momentum(muon, Schedule::constant(0.6).linear(4, 0.95));
        (format!("{name}, with schedules"), muon.with_weight_decay(decay))
    });
    let routed = |(name, muon): (String, MuonConfig)| {
        let muon = muon.with_rule(RoutingRule::muon("layers"));
        (name, muon.with_rule(RoutingRule::muon("stack").batch()))
    };
    constant.chain(moving).map(routed).collect()
}

#[test]
fn experts_without_a_gradient_stay_as_they_are_as_layers_do() {
    let device = Device::default().autodiff();
    for (name, muon) in configs() {
        let mut net = Experts::new(&device);
        let mut optim = muon.init(&net);
        let mut batched_net = Experts::new(&device);
        let mut batched = muon.init_batched(&batched_net).unwrap();
        for step in 0..STEPS {
            let before = net.stack.val().inner();
            let gradients = net.gradients(step, 0..SHAPE[1]);
            net = optim.step(0.05, net, gradients);
            let gradients = batched_net.gradients(step, 0..SHAPE[1]);
            batched_net = batched.step(0.05, batched_net, gradients).unwrap();
            let change = (net.stack.val().inner() - before).abs().max_dims(&[1, 2]);
            let moves: Vec<bool> = change.into_data().iter::<f32>().map(|max| max > 0.0).collect();
            let is_idle =
                |expert: usize| step == 3 || step < 5 && (step + expert).is_multiple_of(3);
            assert_eq!(moves, [0, 1, 2].map(|expert| !is_idle(expert)), "{name}, step {step}");
            net.assert_equal(&format!("{name}, step {step}"));
            batched_net.assert_equal(&format!("{name}, batched, step {step}"));
        }
    }
}

#[test]
fn experts_without_a_gradient_stay_as_they_are_on_any_ranks() {
    for (name, muon) in configs() {
        for (ranks, cuts) in [(2, false), (3, false), (2, true)] {
            let trained = World::threads(World::devices(ranks), |world| {
                let mesh = if cuts {
                    vec![Axis::model("tp", ranks)]
                } else {
                    vec![Axis::data("dp", ranks)]
                };
                let layout = Layout::new(&Mesh::new(&world, mesh)?).with_muon(muon.clone());
                let layout = match cuts {
                    true => layout.with_place(Place::shard("^stack$", "tp", 1)),
                    false => layout,
                };
                let mut net = layout.shard(Experts::new(world.device()))?;
                let config = DistMuonConfig::new().with_muon(muon.clone());
                let mut optim = config.init_on(&layout, &net)?;
                let rows = if cuts { world.part(SHAPE[1]) } else { 0..SHAPE[1] };
                for step in 0..STEPS {
                    let gradients = net.gradients(step, rows.clone());
                    net = optim.step(0.05, net, gradients)?;
                }
                layout.unshard(&net)
            });
            for net in trained.unwrap() {
                net.assert_equal(&format!("{name}, {ranks} ranks, cut: {cuts}"));
            }
        }
    }
}

/// A stack that is rejected for the NaN of one expert leaves the clock of an expert without tokens
/// where it is, also where clipping by the norm spreads the NaN.
#[test]
fn a_rejected_stack_moves_no_clock_of_an_idle_expert() {
    let device = Device::default().autodiff();
    for clipping in [None, Some(1e6)] {
        let momentum = Schedule::constant(0.2).linear(3, 0.9);
        let muon = MuonConfig::new()
            .with_momentum(momentum.into())
            .with_grad_clipping(clipping.map(GradientClippingConfig::Norm))
            .with_rule(RoutingRule::muon("layers"))
            .with_rule(RoutingRule::muon("stack").batch());
        let mut net = Experts::new(&device);
        let mut optim = muon.init(&net);
        for step in 0..4 {
            let of_expert = |expert| match (step, expert) {
                (1, 0) => Tensor::zeros([SHAPE[1], SHAPE[2]], &device.clone().inner()),
                (1, 1) => matrix(11, &device.clone().inner()) * f32::NAN,
                _ => matrix(10 * step + expert, &device.clone().inner()),
            };
            let mut gradients = GradientsParams::new();
            for (expert, layer) in net.layers.iter().enumerate() {
                if (step, expert) != (1, 0) {
                    gradients.register(layer.id, of_expert(expert));
                }
            }
            let stack = Tensor::stack::<3>((0..SHAPE[0]).map(of_expert).collect(), 0);
            gradients.register(net.stack.id, stack);
            net = optim.step(0.05, net, gradients);
        }
        let stack = net.stack.val().inner().slice(s![0..1]).into_data();
        let [stack, layer] = [stack, net.layers[0].val().inner().into_data()]
            .map(|data| data.iter::<f32>().collect::<Vec<_>>());
        assert_same_weights(&format!("{clipping:?}"), &stack, &layer);
    }
}

/// Matrices continue where each of them was, on any number of ranks.
#[test]
fn the_clocks_of_experts_are_in_checkpoints() {
    const BEFORE: usize = 5;
    let device = Device::default().autodiff();
    for (name, muon) in configs() {
        let folder = Folder::create();
        let [one, ranks] = ["one", "ranks"].map(|name| folder.path().join(name));
        let mut net = Experts::new(&device);
        let mut optim = muon.init(&net);
        for step in 0..BEFORE {
            let gradients = net.gradients(step, 0..SHAPE[1]);
            net = optim.step(0.05, net, gradients);
        }
        checkpoint::save(&one, &net, &optim, &BEFORE).unwrap();

        let on_ranks = |count: usize, from: &Path, save: bool| {
            let trained = World::threads(World::devices(count), |world| {
                let config = DistMuonConfig::new().with_muon(muon.clone());
                let net = Experts::new(world.device());
                let optim = config.init(&world, &net)?;
                let (mut net, mut optim, mut step): (_, _, usize) = optim.load(from, net)?;
                if save {
                    optim.save(&ranks, &net, &step)?;
                }
                while step < STEPS {
                    let gradients = net.gradients(step, 0..SHAPE[1]);
                    net = optim.step(0.05, net, gradients)?;
                    step += 1;
                }
                Ok::<_, distmuon::Error>(net)
            });
            trained.unwrap().into_iter().for_each(|net| net.assert_equal(&name));
        };
        on_ranks(2, &one, true);
        on_ranks(1, &ranks, false);
        on_ranks(3, &ranks, false);

        let fresh = Experts::new(&device);
        let optim = muon.init(&fresh);
        let (mut net, mut optim, step): (_, _, usize) =
            checkpoint::load(&ranks, fresh, optim).unwrap();
        for step in step..STEPS {
            let gradients = net.gradients(step, 0..SHAPE[1]);
            net = optim.step(0.05, net, gradients);
        }
        net.assert_equal(&name);
    }
}

#[test]
fn a_loss_that_reaches_an_idle_expert_moves_it_however_small_it_is() {
    let device = Device::default().autodiff();
    for weight in [1e-2, 1e-6, 1e-12] {
        let muon = MuonConfig::new().with_rule(RoutingRule::muon("stack").batch());
        let mut net = Experts::new(&device);
        let mut optim = muon.with_rule(RoutingRule::muon("layers")).init_batched(&net).unwrap();
        let before = net.stack.val().inner();
        let stack = net.stack.val();
        // Tokens reach the first expert alone.
        let loss = stack.clone().slice(s![0..1, .., ..]).square().mean();
        let gradients = (loss + stack.sum() * weight).backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        net = optim.step(0.05, net, gradients).unwrap();
        let change = (net.stack.val().inner() - before).square().mean_dims(&[1, 2]).sqrt();
        let change: Vec<f32> = change.into_data().iter().collect();
        // A gradient of equal elements has rank 1, and all elements of its update are equal.
        assert!(change.iter().all(|rms| *rms > 1e-3), "{weight}: {change:?}");
    }
}
