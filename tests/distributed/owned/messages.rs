//! Calls and bytes of passes of many layers, at the engine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor};
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistMuonConfig, Keep, Layout, Mesh, Place, Publish};
use distmuon::{MuonConfig, RoutingRule};
use distmuon_testing::models::{Fixed, Layers};
use distmuon_testing::watched::{counted, watched};
use distmuon_testing::worlds;

use super::with_checkpoints;
use crate::{ranks, ranks_here};

const LAYERS: usize = 32;
const WIDTH: usize = 16;
/// Bytes of the parameters of a layer: four squares, and two matrices of four.
const LAYER: usize = 12 * WIDTH * WIDTH * 4;

/// The matrices of a layer of a transformer, without an attention in between.
#[derive(Module, Debug)]
struct Block {
    squares: [Linear; 3],
    output: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear =
            |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(device);
        Self {
            squares: std::array::from_fn(|_| linear(WIDTH, WIDTH)),
            output: linear(WIDTH, WIDTH),
            up: linear(WIDTH, 4 * WIDTH),
            down: linear(4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let squares = self.squares.iter().map(|square| square.forward(x.clone()));
        let x = x.clone() + self.output.forward(squares.reduce(|sum, more| sum + more).unwrap());
        let up = relu(self.up.forward(x.clone()));
        (x + self.down.forward(up)) * 0.5
    }
}

/// The calls that a rank has started, by collective.
type Calls = Arc<Mutex<BTreeMap<&'static str, usize>>>;

fn with_counted_calls(world: &World) -> (World, Calls) {
    let calls = Calls::default();
    let counts = calls.clone();
    let world = watched(world, move |event| {
        *counts.lock().unwrap().entry(event.collective).or_default() += usize::from(!event.waits);
        Ok(())
    });
    (world, calls)
}

/// The gathers and the reductions of the last one of some passes, and the bytes that the reductions
/// have sent, of every rank.
fn calls_and_bytes(
    count: usize,
    divided: impl Fn(Layout) -> Layout + Sync,
    passes: usize,
) -> Vec<[usize; 3]> {
    let run = ranks_here(count, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let (world, calls) = with_counted_calls(&with_checkpoints(&world));
        let layout = divided(Layout::from(&world)).with_small_elements(1);
        let blocks: Vec<Block> = (0..LAYERS).map(|_| Block::new(world.device())).collect();
        let (mut blocks, mut optim) =
            DistMuonConfig::new().start(&layout, blocks.map(&mut Fixed::new(7)))?;
        let mut counts = [0; 3];
        for _ in 0..passes {
            calls.lock().unwrap().clear();
            traffic.lock().unwrap().clear();
            let x = Tensor::<2>::ones([4, WIDTH], (world.device(), DType::F32));
            let x = blocks.iter().fold(x, |x, block| block.forward(x));
            let grads = optim.backward(&x.square().mean(), &blocks)?;
            let of = |counts: &BTreeMap<_, usize>, name| counts.get(name).copied().unwrap_or(0);
            let calls = calls.lock().unwrap();
            let bytes = of(&traffic.lock().unwrap(), "reduce_scatter");
            counts = [of(&calls, "all_gather"), of(&calls, "reduce_scatter"), bytes];
            drop(calls);
            blocks = optim.step(0.01, blocks, grads)?;
        }
        Ok(counts)
    });
    run.unwrap()
}

/// A division of a model.
type Divide = fn(Layout) -> Layout;

fn kept(layout: Layout) -> Layout {
    layout.owned("dp").with_keep(Keep::Weights)
}

pub fn a_pass_of_many_layers_makes_few_calls_that_send_each_gradient_once() {
    for count in [2, 3, 8] {
        // With eight ranks, most of the time passes in threads that wait for each other.
        let owned: Divide = |layout| layout.owned("dp");
        let in_rows: Divide = |layout| layout.rows("dp");
        let cases =
            [("owned", owned, 2), ("in rows", in_rows, 2), ("owned, weights kept", kept, 1)];
        for (name, divided, passes) in &cases[..if count < 8 { 3 } else { 2 }] {
            let ranks = calls_and_bytes(count, divided, 3);
            let case = format!("{count} ranks, {name}: {ranks:?}");
            let [gathers, reductions, _] = ranks[0];
            // One for each layer, and the first parameter of a pass alone.
            assert!(gathers <= passes * (LAYERS + 1), "{case}");
            assert!(reductions <= LAYERS + 1, "{case}");
            assert!(ranks.iter().all(|rank| rank[..2] == ranks[0][..2]), "{case}");
            // A rank gets its part of every gradient from each of the others, once.
            let sent: usize = ranks.iter().map(|[_, _, bytes]| bytes).sum();
            let once = (count - 1) * LAYERS * LAYER;
            assert!(sent == once || !worlds::is_exact(), "{case}: {sent} of {once}");
        }
    }
}

/// Two small layers, a large one and two small ones. A message has room for two small ones, and not
/// for the large one.
pub fn a_parameter_of_more_than_half_of_the_limit_is_sent_alone() {
    const SMALL: usize = 16;
    let calls = ranks_here(2, |world| {
        let (world, calls) = with_counted_calls(&with_checkpoints(&world));
        let element = Tensor::<1>::empty([1], world.device()).dtype().size();
        // With some bytes more, since megabytes round.
        let limit = (5 * SMALL * SMALL * element + 64) as f64 / 1e6;
        let layout = Layout::from(&world).owned("dp").with_small_elements(1);
        let layout = layout.with_keep(Keep::Weights).with_ahead_mb(limit).with_in_flight_mb(limit);
        let layer = |inputs: usize, outputs: usize| {
            LinearConfig::new(inputs, outputs).with_bias(false).init(world.device())
        };
        let sizes = [(SMALL, SMALL), (SMALL, SMALL), (SMALL, 3 * SMALL)];
        let last = [(3 * SMALL, SMALL / 3), (SMALL / 3, SMALL)];
        let layers = sizes.into_iter().chain(last).map(|(inputs, outputs)| layer(inputs, outputs));
        let model = Layers { layers: layers.collect() };
        // Parameters of AdamW have padded rows.
        let muon = MuonConfig::new().with_rule(RoutingRule::muon("layers"));
        let (mut model, mut optim) = DistMuonConfig::new().with_muon(muon).start(&layout, model)?;
        let mut counts = [0; 2];
        for _ in 0..3 {
            calls.lock().unwrap().clear();
            let x = Tensor::<2>::ones([4, SMALL], world.device());
            let loss = model.layers.iter().fold(x, |x, layer| layer.forward(x)).square().mean();
            let gradients = optim.backward(&loss, &model)?;
            counts = ["all_gather", "reduce_scatter"].map(|name| calls.lock().unwrap()[name]);
            model = optim.step(0.01, model, gradients)?;
        }
        Ok(counts)
    });
    // The first parameter of a pass is gathered alone, and then the second; the large one; those
    // behind it. Gradients come in the opposite order.
    assert_eq!(calls.unwrap(), [[4, 3]; 2]);
}

/// An owner that received all contributions at once would hold eight times the gradient.
pub fn a_large_gradient_is_sent_once_and_its_sum_once_more() {
    const RANKS: usize = 8;
    const WIDTH: usize = 512;
    let run = ranks_here(RANKS, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = with_checkpoints(&World::new(comm, world.device().clone()));
        let layout = Layout::from(&world).owned("dp");
        let net = layout.shard(Layers::square(1, WIDTH, world.device()))?;
        let element = net.layers[0].weight.val().dtype().size();
        traffic.lock().unwrap().clear();
        let x = Tensor::<2>::ones([1, WIDTH], world.device());
        layout.backward(&net.layers[0].forward(x).square().mean(), &net)?;
        let sent = traffic.lock().unwrap()["reduce_scatter"];
        Ok([sent, element])
    });
    let run = run.unwrap();
    let sent: usize = run.iter().map(|[sent, _]| sent).sum();
    // Every rank sends the even parts of others, and then its sum in float32, except for the
    // owner's. Threads share memory, and count the least bytes.
    let elements = (RANKS - 1) * WIDTH * WIDTH;
    let sums = if worlds::results_may_be_early() { elements / RANKS * 4 } else { 0 };
    assert_eq!(sent, elements * run[0][1] + sums);
}

/// The guide's bytes of gradients in a pass, on engines that keep what they send and receive.
pub fn gradients_on_their_way_stay_within_the_limit_of_the_guide() {
    const WIDTH: usize = 1024;
    const LAYER: usize = WIDTH * WIDTH * 4;
    for count in [2, 3] {
        for limit in [0, 2, 4] {
            let peaks = ranks(count, |world| {
                let layout = Layout::from(&with_checkpoints(&world)).owned("dp");
                let layout = layout.with_in_flight_mb((limit * LAYER) as f64 / 1e6);
                // In float32 on every device.
                let layers = Layers::square(8, WIDTH, world.device()).map(&mut Fixed::new(7));
                let (net, optim) = DistMuonConfig::new().start(&layout, layers)?;
                let x = Tensor::<2>::ones([1, WIDTH], (world.device(), DType::F32));
                let output = net.layers.iter().fold(x, |x, layer| layer.forward(x));
                drop(layout.backward(&output.square().mean(), &net)?);
                Ok(optim.memory().in_flight.peak)
            });
            // Threads add up in the caller's memory. Other engines send copies, and receive others.
            let most = match worlds::name() {
                "threads" => (limit + 2) * LAYER,
                _ => 2 * (limit + 2) * LAYER + (4 << 20),
            };
            for peak in peaks.unwrap() {
                let held = peak as f64 / LAYER as f64;
                println!("{count} ranks, {limit} layers: {held:.1}");
                assert!(peak <= most, "{count} ranks, {limit} layers: {peak} of {most}");
            }
        }
    }
}

/// A pass gathers layers ahead, and `unshard` nothing.
pub fn a_whole_model_is_gathered_one_parameter_after_the_other() {
    let run = ranks_here(2, |world| {
        let counts = Arc::new(Mutex::new((0_isize, 0_isize)));
        let counted = counts.clone();
        let world = watched(&with_checkpoints(&world), move |event| {
            if event.collective == "all_gather" {
                let (now, most) = &mut *counted.lock().unwrap();
                *now += if event.waits { -1 } else { 1 };
                *most = (*most).max(*now);
            }
            Ok(())
        });
        let layout = Layout::from(&world).owned("dp");
        let net = layout.shard(Layers::square(8, 64, world.device()))?;
        let pass = || {
            let x = Tensor::<2>::ones([1, 64], world.device());
            let output = net.layers.iter().fold(x, |x, layer| layer.forward(x));
            layout.backward(&output.square().mean(), &net).map(drop)
        };
        let most = || std::mem::take(&mut counts.lock().unwrap().1);
        pass()?;
        most();
        pass()?;
        let in_pass = most();
        layout.unshard(&net)?;
        Ok((in_pass, most()))
    });
    for (in_pass, in_unshard) in run.unwrap() {
        assert!(in_pass > 1, "{in_pass}");
        assert_eq!(in_unshard, 1);
    }
}

/// The guide's memory of passes that no backward pass follows, and of micro-batches.
pub fn dropped_passes_hold_what_the_guide_says() {
    const LAYERS: usize = 8;
    const WIDTH: usize = 64;
    const LAYER: usize = WIDTH * WIDTH * 4;
    let run = ranks_here(2, |world| {
        let layout = Layout::from(&with_checkpoints(&world)).owned("dp");
        let ahead = 3 * LAYER;
        let layout = layout.with_ahead_mb(ahead as f64 / 1e6);
        let net = layout.shard(Layers::square(LAYERS, WIDTH, world.device()))?;
        let optim = DistMuonConfig::new().init_on(&layout, &net)?;
        let of_layers = |count: usize| {
            let x = Tensor::<2>::ones([1, WIDTH], world.device());
            net.layers[..count].iter().fold(x, |x, layer| layer.forward(x)).square().mean()
        };
        let loss = || of_layers(LAYERS);
        let held = || (optim.memory().gathered.now, optim.memory().in_flight.now);
        for drops in [Layout::discard_pass, Layout::discard] {
            layout.backward(&loss(), &net)?;
            assert_eq!(held(), (0, 0));
            // The next layers are gathered ahead.
            drop(of_layers(LAYERS / 2));
            let (gathered, gradients) = held();
            assert!(gathered > 0 && gathered <= ahead && gradients == 0, "{gathered}");
            drops(&layout)?;
            assert_eq!(held(), (0, 0));
        }
        layout.accumulate(&loss(), &net)?;
        assert_eq!(held().1, LAYERS * LAYER, "gradients in full size");
        layout.discard_pass()?;
        assert_eq!(held(), (0, LAYERS * LAYER));
        layout.discard()?;
        assert_eq!(held(), (0, 0));
        layout.accumulate(&loss(), &net)?;
        layout.backward(&loss(), &net)?;
        assert_eq!(held(), (0, 0));
        Ok(())
    });
    run.unwrap();
}

pub fn a_weight_is_gathered_for_each_of_its_uses() {
    for (keep, passes) in [(Keep::Weights, 1), (Keep::Nothing, 2)] {
        for uses in [1, 3] {
            let run = ranks_here(2, |world| {
                let (world, calls) = with_counted_calls(&with_checkpoints(&world));
                let layout = Layout::from(&world).owned("dp").with_keep(keep).with_ahead_mb(0.0);
                let net = layout.shard(Layers::square(1, 32, world.device()))?;
                calls.lock().unwrap().clear();
                // The first layer also has to have a gradient of its input.
                let x = Tensor::<2>::ones([4, 32], world.device()).require_grad();
                let x = (0..uses).fold(x, |x, _| net.layers[0].forward(x));
                layout.backward(&x.square().mean(), &net)?;
                let gathers = calls.lock().unwrap()["all_gather"];
                Ok(gathers)
            });
            for gathers in run.unwrap() {
                assert_eq!(gathers, passes * uses, "{keep:?}, {uses} uses");
            }
        }
    }
}

/// The gathers of a step and of the passes that follow it, on two nodes of two ranks, each of which
/// has a replica of the model.
fn gathers_of_a_step_and_of_passes(publish: Publish) -> [usize; 2] {
    let run = ranks_here(4, |world| {
        let (world, calls) = with_counted_calls(&with_checkpoints(&world));
        let mesh = Mesh::new(&world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
        let layout = Layout::new(&mesh).owned("gpu").with_small_elements(1);
        let blocks: Vec<Block> = (0..LAYERS).map(|_| Block::new(world.device())).collect();
        let config = DistMuonConfig::new().with_publish(publish);
        let (mut blocks, mut optim) = config.start(&layout, blocks.map(&mut Fixed::new(7)))?;
        let gathers = || calls.lock().unwrap().remove("all_gather").unwrap_or(0);
        let mut counts = [0; 2];
        for _ in 0..3 {
            let x = Tensor::<2>::ones([4, WIDTH], (world.device(), DType::F32));
            let x = blocks.iter().fold(x, |x, block| block.forward(x));
            let grads = optim.backward(&x.square().mean(), &blocks)?;
            counts[1] = gathers();
            blocks = optim.step(0.01, blocks, grads)?;
            counts[0] = gathers();
        }
        Ok(counts)
    });
    let counts = run.unwrap();
    assert!(counts.iter().all(|other| *other == counts[0]), "{counts:?}");
    counts[0]
}

pub fn new_values_of_many_layers_are_published_in_few_calls() {
    for publish in [Publish::Now, Publish::AtFirstUse] {
        let [step, passes] = gathers_of_a_step_and_of_passes(publish);
        // One for each layer, and of the passes as many again for the backward pass.
        assert!(0 < step && step <= LAYERS + 1, "{publish:?}: {step}");
        assert!(passes <= 2 * (LAYERS + 1), "{publish:?}: {passes}");
    }
}

/// The bytes that four ranks together send in an iteration after the first one, of layers that are
/// independent, so that slices of them are.
fn sent_by_an_iteration(axes: &[Axis], division: impl Fn(Layout) -> Layout + Sync) -> usize {
    let run = ranks_here(4, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = with_checkpoints(&World::new(comm, world.device().clone()));
        let layout = Layout::new(&Mesh::new(&world, axes.to_vec())?).with_small_elements(1);
        let layout = division(layout);
        let (mut net, mut optim) =
            DistMuonConfig::new().start(&layout, super::layers(world.device()))?;
        let mut sent = 0;
        for _ in 0..2 {
            traffic.lock().unwrap().clear();
            // A gradient of the input needs the weight again.
            let x = Tensor::<2>::ones([4, 32], (world.device(), DType::F32)).require_grad();
            let losses = net.layers.iter().map(|layer| layer.forward(x.clone()).square().mean());
            let loss = losses.reduce(|sum, more| sum + more).expect("the model has layers");
            let gradients = optim.backward(&loss, &net)?;
            net = optim.step(0.01, net, gradients)?;
            sent = traffic.lock().unwrap().values().sum();
        }
        Ok(sent)
    });
    run.unwrap().into_iter().sum()
}

/// The tables "sent by a rank in an iteration" of the guide, for what other tests do not count.
pub fn an_iteration_sends_what_the_guide_says() {
    const BYTES: usize = 16 * 32 * 32 * 4;
    let nodes = [Axis::data("node", 2), Axis::data("gpu", 2)];
    let slices = [Axis::data("dp", 2), Axis::model("tp", 2)];
    let columns = |layout: Layout| layout.with_place(Place::shard("^layers", "tp", 1));
    let counted: [(&str, usize, usize); 6] = [
        (
            "every rank has all",
            sent_by_an_iteration(&[Axis::data("dp", 4)], |layout| layout),
            4 * 2 * BYTES * 3 / 4,
        ),
        (
            "in rows, gathered again",
            sent_by_an_iteration(&[Axis::data("dp", 4)], |layout| layout.rows("dp")),
            4 * (3 * BYTES * 3 / 4 + 2 * BYTES * 3 / 16),
        ),
        (
            "owned inside nodes: inside and between",
            sent_by_an_iteration(&nodes, |layout| layout.owned("gpu")),
            4 * (3 * BYTES / 2 + 2 * BYTES / 4),
        ),
        (
            "owned inside nodes, with weights that are kept",
            sent_by_an_iteration(&nodes, |layout| layout.owned("gpu").with_keep(Keep::Weights)),
            4 * (2 * BYTES / 2 + 2 * BYTES / 4),
        ),
        (
            "slices, and whole matrices from them",
            sent_by_an_iteration(&slices, columns),
            4 * (2 * BYTES / 4 + 2 * BYTES / 8),
        ),
        (
            "slices, owned and gathered again",
            sent_by_an_iteration(&slices, |layout| columns(layout).owned("dp")),
            4 * (3 * BYTES / 4 + 2 * BYTES / 8),
        ),
    ];
    for (name, sent, expected) in counted {
        println!("{name}: {sent} of {expected}");
        // Counts of skipped steps, and which parameters have gradients: a few numbers for each.
        let small = 4 * 16 * 4 * 4;
        let is_that = (expected..=expected + small).contains(&sent);
        assert!(is_that || !worlds::is_exact(), "{name}: {sent} of {expected}");
    }
}

/// Gradients of micro-batches stay where they are until the last one, in full size.
pub fn gradients_of_micro_batches_are_reduced_once() {
    let run = ranks_here(2, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = with_checkpoints(&World::new(comm, world.device().clone()));
        let layout = Layout::from(&world).owned("dp").with_small_elements(1);
        let (net, optim) = DistMuonConfig::new().start(&layout, super::layers(world.device()))?;
        let loss = || super::output(&net, super::ones(world.device()));
        let reduced = || traffic.lock().unwrap().remove("reduce_scatter").unwrap_or(0);
        optim.backward(&loss(), &net)?;
        let of_one = reduced();
        for _ in 0..2 {
            optim.accumulate(&loss(), &net)?;
        }
        let (of_first, held) = (reduced(), optim.memory().in_flight.now);
        optim.backward(&loss(), &net)?;
        Ok([of_one, of_first, held, reduced()])
    });
    let all = 16 * 32 * 32 * 4;
    for [of_one, of_first, held, of_last] in run.unwrap() {
        assert_eq!((of_first, held, of_last), (0, all, of_one));
        assert!(of_one > 0);
    }
}

/// Gathering ahead needs the order of a pass before.
pub fn the_first_pass_gathers_every_parameter_alone() {
    for [gathers, ..] in calls_and_bytes(2, kept, 1) {
        assert_eq!(gathers, 6 * LAYERS);
    }
}

pub fn reports_of_a_divided_model_send_nothing() {
    let run = ranks_here(2, |world| {
        let (world, calls) = with_counted_calls(&with_checkpoints(&world));
        let layout = Layout::from(&world).owned("dp").with_small_elements(1);
        let (net, optim) = DistMuonConfig::new().start(&layout, super::layers(world.device()))?;
        calls.lock().unwrap().clear();
        // On one rank alone.
        if world.is_main() {
            let (table, count) = (layout.table(&net)?.to_string(), layout.num_params(&net)?);
            assert!(table.contains("layers.0.weight") && count == 16 * 32 * 32);
            layout.average(net.clone(), &net, 0.5)?;
            assert!(!optim.memory().to_string().is_empty());
        }
        let calls = calls.lock().unwrap().clone();
        Ok(calls)
    });
    assert_eq!(run.unwrap(), [BTreeMap::new(), BTreeMap::new()]);
}
