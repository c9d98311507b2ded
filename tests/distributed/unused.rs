//! Parameters that some ranks do not use, and ranks with fewer batches: as one rank with zeros in
//! place of the gradients that are missing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::module::{Module, Param};
use burn::nn::{EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor};
use distmuon::comm::{Joined, World};
use distmuon::distributed::{Axis, DistMuonConfig, GradDtype, Keep, Layout, Mesh, Place, Publish};
use distmuon::link::Link;
use distmuon::{Error, GradientBuffer, MuonConfig, Result, RoutingRule};
use distmuon_testing::models::{Fixed, Layers, bits, weights};
use distmuon_testing::precision::Rounded;
use distmuon_testing::watched::{watched, with_counted_values};
use distmuon_testing::worlds::{Case, Folder, cases};

use crate::cuts::{Cutting, product, slices};
use crate::owned::rejections::assert_failures_stop_all_ranks;
use crate::owned::{Run, assert_equal, with_checkpoints};
use crate::{Net, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![
    heads_that_some_ranks_do_not_use_train_as_with_zeros_on_one_rank,
    heads_that_every_rank_has_need_no_call,
    heads_that_some_ranks_do_not_use_train_as_replicated_ones,
    heads_of_a_teacher_that_some_ranks_do_not_use_train_as_replicated_ones,
    slices_that_some_ranks_do_not_use_train_as_replicated_ones,
    slices_of_ranks_without_batches_count_as_zeros,
    ranks_with_fewer_batches_train_as_with_zeros_on_one_rank,
    ranks_with_fewer_batches_train_as_replicated_ones,
];

pub const IN_PROCESS: &[Case] = cases![
    the_uses_of_a_pass_are_one_small_message,
    a_rank_holds_one_parameter_that_it_leaves_out_until_the_backward_pass,
    passes_in_another_order_are_rejected_also_where_parameters_may_be_unused,
    parameters_that_only_some_ranks_use_are_rejected_unless_allowed,
    losses_that_are_not_finite_do_not_count_on_a_rank_without_batches,
    a_rank_without_any_batch_is_rejected,
    joined_batches_are_one_empty_message_for_each_step,
    a_backward_pass_of_the_callers_has_the_same_gradients_or_is_an_error,
    a_graph_from_before_a_step_trains_the_parameters_that_the_step_left,
    dropped_passes_keep_earlier_micro_batches,
    uses_that_the_loss_does_not_depend_on_leave_a_parameter_as_it_is,
    a_caught_panic_leaves_no_uses_to_the_next_pass,
    a_pass_that_has_micro_batches_is_not_dropped_by_itself,
    a_table_of_positions_is_exact_or_an_error_where_layers_are_left_out,
    batches_of_ranks_that_exchange_items_can_not_be_left_out,
    a_rank_that_can_not_drain_stops_the_others,
    the_loss_of_one_model_may_run_through_another_one,
    two_forward_passes_may_come_before_their_backward_passes,
    a_rank_that_fails_where_parameters_are_unused_stops_all_ranks,
    a_rank_that_panics_in_a_call_of_a_layout_stops_all_ranks,
];

const WIDTH: usize = 16;
const TASKS: usize = 3;

/// A model with a head for each task.
#[derive(Module, Debug)]
struct Tasks {
    trunk: Linear,
    heads: Vec<Linear>,
}

impl Tasks {
    fn of(dtype: DType, device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let heads = (0..TASKS).map(|_| linear(WIDTH, 24)).collect();
        let net = Self { trunk: linear(WIDTH, WIDTH), heads }.map(&mut Fixed::new(3));
        if dtype == DType::F32 { net } else { net.map(&mut Rounded(dtype)) }
    }

    /// The loss of a task. Other ranks may use the other heads.
    fn loss(&self, layout: Option<&Layout>, seed: usize, task: usize) -> Tensor<1> {
        // Of a small parameter: reading a weight is a use of it.
        let bias = self.trunk.bias.as_ref().expect("a bias").val();
        let (device, dtype) = (bias.device(), bias.dtype());
        let x = relu(self.trunk.forward(input(seed, &device).cast(dtype)));
        let mut loss = None;
        for (index, head) in self.heads.iter().enumerate() {
            match (index == task, layout) {
                (true, _) => loss = Some(head.forward(x.clone()).square().mean()),
                (false, Some(layout)) => layout.unused(head),
                (false, None) => {}
            }
        }
        loss.expect("the model has the head of the task")
    }
}

fn input(seed: usize, device: &Device) -> Tensor<3> {
    let value = |index| ((index * 7 + seed * 13) % 11) as f32 / 8.0;
    let values = std::array::from_fn::<f32, 96, _>(value);
    Tensor::<1>::from_data(values, (device, DType::F32)).reshape([2, 3, WIDTH])
}

fn config() -> DistMuonConfig {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon(r"^heads\.[01]\.weight"));
    DistMuonConfig::new().with_muon(muon).with_small_elements(64).with_bucket_mb(Some(0.002))
}

fn flat(world: &World) -> Layout {
    Layout::new(&Mesh::flat(world)).with_muon(config().muon).with_small_elements(64)
}

/// The task of a rank in a pass: with two ranks, one of them is that of no rank. In every fourth
/// pass, all ranks have the same task, which only some of them had in the pass before.
fn task(rank: usize, pass: usize) -> usize {
    if pass % 4 == 3 { pass % TASKS } else { (rank + pass) % TASKS }
}

/// Layouts of two ranks on which ranks may leave parameters out.
const LAYOUTS: [fn(&World) -> Layout; 6] = [
    |world| flat(world).allow_unused(),
    |world| flat(world).overlap_backward().allow_unused(),
    |world| flat(world).owned("dp").with_keep(Keep::Weights).allow_unused(),
    |world| flat(world).owned("dp").allow_unused(),
    |world| flat(world).owned("dp").overlap_backward().with_in_flight_mb(0.0).allow_unused(),
    |world| flat(world).rows("dp").overlap_backward().allow_unused(),
];

/// Trains on one rank with the gradients that `ranks` ranks have. `None` for a rank without one.
fn on_one_rank(
    ranks: usize,
    steps: usize,
    loss: impl Fn(&Tasks, usize, usize) -> Option<Tensor<1>>,
) -> Vec<Vec<u8>> {
    let device = crate::device();
    let mut net = Tasks::of(DType::F32, &device);
    let mut optim = config().init(&World::alone(device), &net).unwrap();
    for step in 0..steps {
        let mut buffer = GradientBuffer::new();
        for rank in 0..ranks {
            let gradients = match loss(&net, rank, step) {
                Some(loss) => GradientsParams::from_grads(loss.backward(), &net),
                None => GradientsParams::new(),
            };
            buffer.add(&net, gradients).unwrap();
        }
        let mean = buffer.take_mean(&net);
        net = optim.step(0.01, net, mean).unwrap();
    }
    weights(&net)
}

/// The losses and final weights of a rank whose tasks change, with a layout or without.
fn train(
    world: &World,
    layout: Option<Layout>,
    config: &DistMuonConfig,
    micro_batches: usize,
    dtype: DType,
) -> Result<Run> {
    let net = Tasks::of(dtype, world.device());
    let layout_or_flat = layout.clone().unwrap_or_else(|| flat(world));
    let mut net = layout_or_flat.shard(net)?;
    let mut optim = config.init_on(&layout_or_flat, &net)?;
    let (rank, mut losses) = (world.rank(), vec![]);
    for step in 0..5 {
        let mut buffer = GradientBuffer::new();
        for batch in 0..micro_batches {
            let pass = step * micro_batches + batch;
            let loss = net.loss(layout.as_ref(), 10 * pass + rank, task(rank, pass));
            losses.push(bits(&loss));
            match &layout {
                None => {
                    let gradients = GradientsParams::from_grads(loss.backward(), &net);
                    buffer.add(&net, gradients)?;
                }
                Some(layout) if batch + 1 < micro_batches => layout.accumulate(&loss, &net)?,
                Some(layout) => buffer.add(&net, layout.backward(&loss, &net)?)?,
            }
        }
        net = optim.step(0.01, net, buffer.take_sum())?;
        losses.push(bits(&net.valid().loss(layout.as_ref(), step, task(rank, step))));
    }
    Ok((losses, weights(&layout_or_flat.unshard(&net)?)))
}

fn heads_that_some_ranks_do_not_use_train_as_with_zeros_on_one_rank() {
    let expected = on_one_rank(2, 5, |net, rank, step| {
        Some(net.loss(None, 10 * step + rank, task(rank, step)))
    });
    assert!(expected != weights(&Tasks::of(DType::F32, &crate::device())), "it trains");
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let runs = ranks(2, |world| {
            let world = with_checkpoints(&world);
            train(&world, Some(layout(&world)), &config(), 1, DType::F32)
        });
        for (_, trained) in runs.unwrap() {
            assert!(trained == expected, "layout {index}");
        }
    }
}

/// Neither a save nor a whole model counts as a use.
fn heads_that_every_rank_has_need_no_call() {
    let folder = Folder::create();
    let path = &folder.path().join("run.ckpt");
    let expected = on_one_rank(2, 5, |net, rank, step| {
        Some(net.loss(None, 10 * step + rank, task(rank, step)))
    });
    for (index, layout) in LAYOUTS[..2].iter().enumerate() {
        let runs = ranks(2, |world| {
            let layout = layout(&with_checkpoints(&world));
            let mut net = layout.shard(Tasks::of(DType::F32, world.device()))?;
            let mut optim = config().init_on(&layout, &net)?;
            for step in 0..5 {
                let rank = world.rank();
                let loss = net.loss(None, 10 * step + rank, task(rank, step));
                let gradients = layout.backward(&loss, &net)?;
                net = optim.step(0.01, net, gradients)?;
                optim.save(path, &net, &step)?;
                layout.unshard(&net)?;
            }
            Ok(weights(&layout.unshard(&net)?))
        });
        for trained in runs.unwrap() {
            assert!(trained == expected, "layout {index}");
        }
    }
}

fn heads_that_some_ranks_do_not_use_train_as_replicated_ones() {
    let nodes: fn(&World) -> Layout = |world| {
        let mesh = Mesh::new(world, [Axis::data("node", 2), Axis::data("gpu", 2)]).unwrap();
        let layout = Layout::new(&mesh).owned("gpu").overlap_backward().allow_unused();
        layout.with_muon(config().muon).with_small_elements(64)
    };
    let half = config().with_grad_dtype(GradDtype::Float32);
    for (count, layouts) in [(2, &LAYOUTS[..]), (4, &[LAYOUTS[1], LAYOUTS[3], nodes])] {
        for (config, micro_batches, dtype) in
            [(config(), 1, DType::F32), (config(), 3, DType::F32), (half.clone(), 2, DType::BF16)]
        {
            let on = |layout: Option<fn(&World) -> Layout>| {
                let runs = ranks(count, |world| {
                    let world = with_checkpoints(&world);
                    let layout = layout.map(|layout| layout(&world));
                    train(&world, layout, &config, micro_batches, dtype)
                });
                runs.unwrap()
            };
            let expected = on(None);
            for (index, layout) in layouts.iter().enumerate() {
                let what = format!("{count} ranks, layout {index}, {micro_batches}, {dtype:?}");
                assert_equal(&expected, &on(Some(*layout)), &what);
            }
        }
    }
}

/// The losses of a rank with a teacher.
#[derive(Clone, Copy, Debug)]
enum Losses {
    /// The sum of the model's and the teacher's.
    Both,
    /// The model's or the teacher's, in turns: the ranks use different values.
    InTurns,
}

/// The losses and final weights of a rank that also has the loss of a teacher, which has the values
/// of two steps before. A head is frozen for the last steps.
fn train_with_teacher(world: &World, layout: Option<Layout>, of: Losses) -> Result<Run> {
    let layout_or_flat = layout.clone().unwrap_or_else(|| flat(world));
    let mut net = layout_or_flat.shard(Tasks::of(DType::F32, world.device()))?;
    let mut optim = config().init_on(&layout_or_flat, &net)?;
    let (rank, mut losses, mut earlier) = (world.rank(), vec![], vec![net.clone()]);
    for step in 0..6 {
        if step == 4 {
            // Only the teacher still has gradients of this head, which are not the model's.
            let head = net.heads.remove(0);
            net.heads.insert(0, head.no_grad());
        }
        let seed = 10 * step + rank;
        let teacher = &earlier[step.saturating_sub(2)];
        let loss = |net: &Tasks, task| net.loss(layout.as_ref(), seed, task);
        let leave_out = |net: &Tasks| layout.iter().for_each(|layout| layout.unused(net));
        let loss = match of {
            Losses::Both => {
                let task = task(rank, step);
                loss(&net, task) + loss(teacher, task) * 0.25
            }
            Losses::InTurns if (rank + step).is_multiple_of(2) => {
                let loss = loss(&net, step % TASKS);
                leave_out(teacher);
                loss
            }
            Losses::InTurns => {
                leave_out(&net);
                loss(teacher, step % TASKS)
            }
        };
        losses.push(bits(&loss));
        let gradients = match &layout {
            Some(layout) => layout.backward(&loss, &net)?,
            None => GradientsParams::from_grads(loss.backward(), &net),
        };
        net = optim.step(0.01, net, gradients)?;
        earlier.push(net.clone());
    }
    Ok((losses, weights(&layout_or_flat.unshard(&net)?)))
}

fn heads_of_a_teacher_that_some_ranks_do_not_use_train_as_replicated_ones() {
    for (count, of) in [(2, Losses::Both), (3, Losses::Both), (2, Losses::InTurns)] {
        let on = |layout: Option<fn(&World) -> Layout>| {
            let runs = ranks(count, |world| {
                let world = with_checkpoints(&world);
                let layout = layout.map(|layout| layout(&world));
                train_with_teacher(&world, layout, of)
            });
            runs.unwrap()
        };
        let expected = on(None);
        for (index, layout) in LAYOUTS.into_iter().enumerate() {
            let what = format!("{count} ranks, {of:?}, layout {index}");
            assert_equal(&expected, &on(Some(layout)), &what);
        }
    }
}

/// Whole weights of heads: one at a time where a rank leaves them out. What only some ranks use,
/// those hold until the end of the backward pass: also when the trunk is gathered.
fn a_rank_holds_one_parameter_that_it_leaves_out_until_the_backward_pass() {
    const HEAD: usize = WIDTH * 24 * 4;
    const TRUNK: usize = WIDTH * WIDTH * 4; // of which each rank has half
    let run = ranks_here(2, |world| {
        let world = with_checkpoints(&world);
        let layout = flat(&world).owned("dp").with_ahead_mb(0.0).allow_unused();
        let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
        let optim = config().init_on(&layout, &net)?;
        // Ranks use the first head or the second, the third is that of no rank.
        let loss = net.loss(Some(&layout), 0, world.rank());
        let after_forward = optim.memory().gathered.now;
        layout.backward(&loss, &net)?;
        let memory = optim.memory().gathered;
        Ok((after_forward, memory.now, memory.peak))
    });
    for (after_forward, now, peak) in run.unwrap() {
        assert!(after_forward <= HEAD, "{after_forward}");
        assert_eq!(now, 0);
        assert!((HEAD + TRUNK / 2..=2 * HEAD).contains(&peak), "{peak}");
    }
}

/// Returns `true` if an error says that the ranks have made different calls.
fn is_of_different_calls(error: &str) -> bool {
    error.contains("the ranks disagree")
}

/// The same or an error, where ranks leave different layers out.
fn two_forward_passes_may_come_before_their_backward_passes() {
    let tasks: [fn(usize, usize) -> usize; 2] = [|_, _| 0, |seed, rank| seed + rank];
    let layouts = LAYOUTS.iter().enumerate();
    for ((index, layout), differ) in layouts.flat_map(|case| [(case, false), (case, true)]) {
        let task = tasks[usize::from(differ)];
        let run = |in_turns: bool| {
            ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = layout(&world).with_muon(config().muon);
                let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
                let mut optim = config().init_on(&layout, &net)?;
                let mut buffer = GradientBuffer::new();
                let rank = world.rank();
                let loss = |seed| net.loss(Some(&layout), 10 * seed + rank, task(seed, rank));
                let losses = if in_turns { vec![] } else { vec![loss(0), loss(1)] };
                for seed in 0..2 {
                    let loss = losses.get(seed).cloned().unwrap_or_else(|| loss(seed));
                    buffer.add(&net, layout.backward(&loss, &net)?)?;
                }
                let net = optim.step(0.01, net, buffer.take_sum())?;
                Ok(weights(&layout.unshard(&net)?))
            })
        };
        let expected = run(true).unwrap();
        assert!(expected[0] != weights(&Tasks::of(DType::F32, &crate::device())), "it trains");
        match run(false) {
            Ok(trained) => assert!(trained == expected, "layout {index}, {differ}"),
            Err(error) => {
                assert!(differ && index > 0, "layout {index}, {differ}: {error}");
                assert!(is_of_different_calls(&error.to_string()), "{error}");
            }
        }
    }
}

fn a_backward_pass_of_the_callers_has_the_same_gradients_or_is_an_error() {
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let run = |is_callers: bool| {
            ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = layout(&world).with_muon(config().muon);
                let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
                let mut optim = config().init_on(&layout, &net)?;
                let loss = net.loss(Some(&layout), world.rank(), world.rank());
                let gradients = match is_callers {
                    true => {
                        let mut rest = GradientsParams::from_grads(loss.backward(), &net);
                        layout.collect(&net, &mut rest)?;
                        rest
                    }
                    false => layout.backward(&loss, &net)?,
                };
                Ok(weights(&layout.unshard(&optim.step(0.01, net, gradients)?)?))
            })
        };
        let expected = run(false).unwrap();
        match run(true) {
            Ok(trained) => assert!(trained == expected, "layout {index}"),
            // Weights that are gathered again are asked for before the ranks know who uses them.
            Err(error) => {
                assert!(index >= 3, "layout {index}: {error}");
                assert!(is_of_different_calls(&error.to_string()), "{error}");
            }
        }
    }
}

/// As in an adversarial network whose generator runs once for both losses, with one optimizer.
fn a_graph_from_before_a_step_trains_the_parameters_that_the_step_left() {
    let losses = |net: &Tasks, seed: usize| {
        let fake = relu(net.trunk.forward(input(seed, &net.heads[0].weight.val().device())));
        (net.heads[0].forward(fake.clone().detach()).square().mean(), fake)
    };
    let of_generator = |net: &Tasks, fake: Tensor<3>| net.heads[0].forward(fake).square().mean();
    let device = crate::device();
    let mut net = Tasks::of(DType::F32, &device);
    let before = weights(&net);
    let mut optim = config().muon.init(&net);
    for seed in 0..3 {
        let (of_critic, fake) = losses(&net, seed);
        let gradients = GradientsParams::from_grads(of_critic.backward(), &net);
        net = optim.step(0.01, net, gradients);
        let gradients = GradientsParams::from_grads(of_generator(&net, fake).backward(), &net);
        net = optim.step(0.01, net, gradients);
    }
    let expected = weights(&net);
    assert!(expected[0] != before[0], "the generator is trained");
    for (index, layout) in LAYOUTS.iter().enumerate() {
        for publish in [Publish::Now, Publish::AtFirstUse] {
            let run = ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = layout(&world);
                let mut net = layout.shard(Tasks::of(DType::F32, world.device()))?;
                let mut optim = config().with_publish(publish).init_on(&layout, &net)?;
                for seed in 0..3 {
                    let (of_critic, fake) = losses(&net, seed);
                    let gradients = layout.backward(&of_critic, &net)?;
                    net = optim.step(0.01, net, gradients)?;
                    let gradients = layout.backward(&of_generator(&net, fake), &net)?;
                    net = optim.step(0.01, net, gradients)?;
                }
                Ok(weights(&layout.unshard(&net)?))
            });
            for trained in run.unwrap() {
                assert!(trained == expected, "layout {index}, {publish:?}");
            }
        }
    }
}

fn dropped_passes_keep_earlier_micro_batches() {
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let run = |drops: bool| {
            let run = ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = layout(&world);
                let mut net = layout.shard(Tasks::of(DType::F32, world.device()))?;
                let mut optim = config().init_on(&layout, &net)?;
                for step in 0..2 {
                    let loss = |seed: usize| net.loss(Some(&layout), 10 * seed + step, 0);
                    layout.accumulate(&loss(0), &net)?;
                    // Whole gradients of the trunk and of a head, of which the layouts divide the
                    // weights.
                    let held = if index == 0 { 0 } else { 4 * WIDTH * (WIDTH + 24) };
                    assert_eq!(optim.memory().in_flight.now, held, "layout {index}");
                    if drops {
                        drop(loss(1)); // a batch that is left out
                        layout.discard_pass()?;
                        layout.accumulate(&loss(2), &net)?;
                        // For the gradient of an input.
                        drop(loss(3).backward());
                        layout.discard_pass()?;
                    } else {
                        layout.accumulate(&loss(2), &net)?;
                    }
                    let gradients = layout.backward(&loss(4), &net)?;
                    net = optim.step(0.01, net, gradients)?;
                }
                Ok((weights(&layout.unshard(&net)?), optim.memory().in_flight.now))
            });
            run.unwrap()
        };
        assert!(run(true) == run(false), "layout {index}");
    }
}

/// As of a metric that some ranks compute: a use without a gradient is none, also next to ranks
/// that have run out of batches.
fn uses_that_the_loss_does_not_depend_on_leave_a_parameter_as_it_is() {
    let cases = LAYOUTS.iter().enumerate();
    for ((index, layout), drains) in cases.flat_map(|case| [(case, false), (case, true)]) {
        let run = ranks_here(if drains { 3 } else { 2 }, |world| {
            let world = with_checkpoints(&world);
            let layout = layout(&world);
            let mut net = layout.shard(Tasks::of(DType::F32, world.device()))?;
            let mut optim = config().init_on(&layout, &net)?;
            let mut seen = vec![];
            for step in 0..3 {
                let x = relu(net.trunk.forward(input(step, world.device())));
                let mut loss = x.clone().square().mean();
                // From the second step on, the head has a momentum.
                match (step, world.rank()) {
                    (0, _) => loss = loss + net.heads[0].forward(x).mean(),
                    (_, 0) => loss = loss + net.heads[0].forward(x).detach().mean(),
                    // A rank without a batch repeats one that the head was trained with.
                    (_, 2) => loss = loss + net.heads[0].forward(x).mean(),
                    _ => layout.unused(&net.heads[0]),
                }
                let gradients = match step > 0 && world.rank() == 2 {
                    true => layout.drain(&loss, &net)?,
                    false => layout.backward(&loss, &net)?,
                };
                net = optim.step(0.01, net, gradients)?;
                let whole = layout.unshard(&net)?;
                seen.push((weights(&whole.trunk), weights(&whole.heads[0])));
            }
            Ok(seen)
        });
        for seen in run.unwrap() {
            let [first, second, third] = seen.try_into().expect("three steps");
            assert!(first.0 != second.0 && second.0 != third.0, "layout {index}: the trunk");
            assert!(first.1 == second.1 && second.1 == third.1, "layout {index}: the head");
        }
    }
}

fn a_caught_panic_leaves_no_uses_to_the_next_pass() {
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let run = |panics: bool| {
            let run = ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = layout(&world);
                let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
                if panics {
                    // Both ranks use a head that neither uses in the next pass.
                    let loss = net.loss(Some(&layout), 0, 2);
                    let fails = Link::new(|_| panic!("before the first gradient"));
                    let loss = fails.attach(loss.clone(), loss.inner());
                    let backward = || drop(layout.backward(&loss, &net));
                    assert!(catch_unwind(AssertUnwindSafe(backward)).is_err());
                }
                let mut optim = config().init_on(&layout, &net)?;
                let loss = net.loss(Some(&layout), 1, world.rank());
                let gradients = layout.backward(&loss, &net)?;
                let net = optim.step(0.01, net, gradients)?;
                Ok(weights(&layout.unshard(&net)?))
            });
            run.unwrap()
        };
        assert!(run(true) == run(false), "layout {index}");
    }
}

/// A backward pass has taken the gradients of earlier micro-batches with it, and did not end.
fn a_pass_that_has_micro_batches_is_not_dropped_by_itself() {
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let run = ranks_here(2, |world| {
            let layout = layout(&with_checkpoints(&world));
            let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
            let mut optim = config().init_on(&layout, &net)?;
            layout.accumulate(&net.loss(Some(&layout), 0, 0), &net)?;
            // The first gradients are there, and the pass fails after them.
            let loss = net.loss(Some(&layout), 1, 0);
            let bias = net.trunk.bias.as_ref().expect("a bias").val();
            let fails = Link::new(|_| panic!("after the first gradients"));
            let late = fails.attach(bias.clone(), bias.inner()).sum() * 0.0;
            let backward = || drop(layout.backward(&(loss + late), &net));
            let has_failed = catch_unwind(AssertUnwindSafe(backward)).is_err();
            assert!(has_failed, "layout {index}");
            let dropped = layout.discard_pass().err().map(|error| error.to_string());
            layout.discard()?;
            let loss = net.loss(Some(&layout), 2, 0);
            let net = optim.step(0.01, net.clone(), layout.backward(&loss, &net)?)?;
            Ok((dropped, weights(&layout.unshard(&net)?)))
        });
        let expected = on_one_rank(1, 1, |net, _, _| Some(net.loss(None, 2, 0)));
        for (dropped, trained) in run.unwrap() {
            if let Some(error) = dropped {
                assert!(error.contains("has taken earlier micro-batches"), "{index}: {error}");
            } else {
                assert_eq!(index, 0, "an undivided model has its micro-batches at the end");
            }
            assert!(trained == expected, "layout {index}");
        }
    }
}

/// Layers around a table that is added to activations.
#[derive(Module, Debug)]
struct Positioned {
    layers: Vec<Linear>,
    positions: Param<Tensor<3>>,
}

fn a_table_of_positions_is_exact_or_an_error_where_layers_are_left_out() {
    let run = |layout: fn(&World) -> Layout| {
        ranks_here(2, |world| {
            let world = with_checkpoints(&world);
            let layout = layout(&world).with_muon(MuonConfig::new()).allow_unused();
            let device = world.device();
            let linear = |_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
            let positions = Tensor::<3>::full([1, 3, WIDTH], 0.25, device).require_grad();
            let positions = Param::from_tensor(positions);
            let net = Positioned { layers: (0..3).map(linear).collect(), positions };
            let net = layout.shard(net.map(&mut Fixed::new(3)))?;
            let mut x = input(world.rank(), device);
            for (index, layer) in net.layers.iter().enumerate() {
                match index == 1 && world.rank() == 0 {
                    true => layout.unused(layer),
                    false => x = relu(layer.forward(x)),
                }
                x = x + net.positions.val();
            }
            let gradients = layout.backward(&x.square().mean(), &net)?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
            Ok(weights(&layout.unshard(&optim.step(0.01, net, gradients)?)?))
        })
    };
    let owned = |world: &World| Layout::from(world).owned("dp").with_small_elements(0);
    let expected = run(|world| Layout::from(world)).unwrap();
    match run(owned) {
        Ok(trained) => assert!(trained == expected),
        Err(error) => assert!(is_of_different_calls(&error.to_string()), "{error}"),
    }
    let replicated = |world: &World| {
        let layout = Layout::from(world).owned("dp").with_small_elements(0);
        layout.with_place(Place::replicated("positions"))
    };
    assert!(run(replicated).unwrap() == expected);
    let kept = |world: &World| {
        Layout::from(world).owned("dp").with_small_elements(0).with_keep(Keep::Weights)
    };
    assert!(run(kept).unwrap() == expected);
}

/// The loss of a generator runs through its critic, which has a layout of its own.
fn the_loss_of_one_model_may_run_through_another_one() {
    let linear = |outputs: usize, device: &Device| {
        LinearConfig::new(WIDTH, outputs).init(device).map(&mut Fixed::new(5))
    };
    let run = |layout: Option<fn(&World) -> Layout>| {
        let run = ranks_here(2, |world| {
            let world = with_checkpoints(&world);
            let layouts = [0, 1].map(|_| match layout {
                Some(layout) => layout(&world).with_muon(MuonConfig::new()),
                None => Layout::from(&world),
            });
            let config = DistMuonConfig::new();
            let [of_generator, of_critic] = &layouts;
            let (mut generator, mut optim) =
                config.start(of_generator, linear(WIDTH, world.device()))?;
            let (mut critic, mut critics) = config.start(of_critic, linear(24, world.device()))?;
            for seed in 0..3 {
                let batch =
                    |part: usize| input(10 * seed + 2 * part + world.rank(), world.device());
                // The critic's micro-batches are between the generator's.
                of_critic.accumulate(&critic.forward(batch(0)).square().mean(), &critic)?;
                let loss = critic.forward(relu(generator.forward(batch(1)))).square().mean();
                let gradients = of_generator.backward(&loss, &generator)?;
                of_critic.discard_pass()?;
                generator = optim.step(0.01, generator, gradients)?;
                let loss = critic.forward(batch(2)).square().mean();
                let gradients = of_critic.backward(&loss, &critic)?;
                critic = critics.step(0.01, critic, gradients)?;
            }
            let whole = (of_generator.unshard(&generator)?, of_critic.unshard(&critic)?);
            Ok((weights(&whole.0), weights(&whole.1)))
        });
        run.unwrap()
    };
    let expected = run(None);
    for (index, layout) in LAYOUTS.iter().enumerate() {
        assert!(run(Some(*layout)) == expected, "layout {index}");
    }
}

fn a_rank_that_can_not_drain_stops_the_others() {
    let started = Instant::now();
    let errors = ranks_here(2, |world| {
        let layout = Layout::from(&world).with_place(Place::shard("weight", "dp", 0));
        let table = layout.shard(EmbeddingConfig::new(8, 4).init(world.device()))?;
        let loss = table.weight.val().mean();
        match world.rank() {
            0 => layout.drain(&loss, &table).map(drop),
            _ => layout.backward(&loss, &table).and_then(|_| world.comm().barrier()),
        }
    });
    let error = errors.expect_err("a rank can't drain").to_string();
    assert!(error.contains("times zero"), "{error}");
    assert!(started.elapsed() < crate::DEADLINE / 2, "{:?}", started.elapsed());
}

fn batches_of_ranks_that_exchange_items_can_not_be_left_out() {
    for (axis, is_rejected) in [(Axis::data("ep", 2), true), (Axis::model("ep", 2), false)] {
        let errors = ranks_here(2, |world| {
            let mesh = Mesh::new(&world, [axis.clone()])?;
            let layout = Layout::new(&mesh).with_place(Place::shard("weight", "ep", 0));
            let table = layout.shard(EmbeddingConfig::new(8, 4).init(world.device()))?;
            let loss = table.weight.val().mean();
            Ok(layout.drain(&loss, &table).err().map(|error| error.to_string()))
        });
        for error in errors.unwrap() {
            let says = |error: &String| error.contains("`ep`") && error.contains("times zero");
            assert_eq!(error.as_ref().is_some_and(says), is_rejected, "{error:?}");
        }
    }
}

/// Two rows of ranks with the slices of two weights.
fn cutting() -> Cutting {
    Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![
            ("^tall\\.weight$", vec![("tp", 0, 1)]),
            ("^wide\\.weight$", vec![("tp", 1, 1)]),
        ],
    }
}

/// Layouts of these slices.
const OF_SLICES: [fn(Layout) -> Layout; 4] = [
    |layout| layout.overlap_backward().allow_unused(),
    |layout| layout.owned("dp").with_keep(Keep::Weights).allow_unused(),
    |layout| layout.owned("dp").overlap_backward().allow_unused(),
    |layout| layout.rows("dp").overlap_backward().allow_unused(),
];

/// A backward pass of a rank in [`train_slices`].
struct SlicedPass<'a> {
    world: &'a World,
    layout: &'a Layout,
    net: &'a Net,
    step: u64,
    /// The gradients of the rank's slices.
    gradients: GradientsParams,
}

/// The final weights of every rank after some steps on these slices, whose layout is changed.
fn train_slices(
    change: impl Fn(Layout) -> Layout + Sync,
    steps: u64,
    backward: impl Fn(SlicedPass<'_>) -> Result<GradientsParams> + Sync,
) -> Vec<Vec<Vec<u8>>> {
    let case = cutting();
    let runs = ranks(4, |world| {
        let config = crate::config();
        let layout = change(case.layout(&world)?.with_muon(config.muon.clone()));
        let whole = Net::new(world.device());
        let mut net = layout.shard(whole.clone())?;
        let mut optim = config.init_on(&layout, &net)?;
        for step in 0..steps {
            let of = (world.rank(), false);
            let gradients = slices(&case, (&whole, whole.gradients(step)), &net, of);
            let pass = SlicedPass { world: &world, layout: &layout, net: &net, step, gradients };
            let gradients = backward(pass)?;
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(layout.unshard(&net)?.weights())
    });
    let weights = runs.unwrap();
    assert!(weights[0] != Net::new(&crate::device()).weights(), "it trains");
    weights
}

fn slices_of_ranks_without_batches_count_as_zeros() {
    let train = |change: fn(Layout) -> Layout, drains: bool| {
        let change = |layout: Layout| change(layout.with_small_elements(8));
        train_slices(change, 3, |SlicedPass { world, layout, net, step, mut gradients }| {
            let mut loss = Tensor::<1>::zeros([1], (world.device(), DType::F32));
            for linear in [&net.tall, &net.wide, &net.head] {
                loss = loss + product(&linear.weight, &mut gradients);
            }
            // The ranks of a row have the same data, and run out together.
            match (world.rank() / 2 == 0 || step == 0, drains) {
                (true, _) => layout.backward(&loss, net),
                (false, true) => layout.drain(&(loss * f32::NAN), net),
                (false, false) => layout.backward(&(loss * 0.0), net),
            }
        })
    };
    let without_unused: fn(Layout) -> Layout = |layout| layout.owned("dp");
    for (index, change) in OF_SLICES.into_iter().chain([without_unused]).enumerate() {
        assert!(train(change, true) == train(change, false), "layout {index}");
    }
}

fn slices_that_some_ranks_do_not_use_train_as_replicated_ones() {
    let train = |change: Option<fn(Layout) -> Layout>| {
        let changed = |layout: Layout| match change {
            Some(change) => change(layout.with_small_elements(8)),
            None => layout,
        };
        train_slices(changed, 4, |SlicedPass { world, layout, net, step, mut gradients }| {
            // The ranks with the other slices of a row use the same.
            let is_first = (world.rank() / 2 + step as usize).is_multiple_of(2);
            let unused = if is_first { &net.tall } else { &net.wide };
            let is_used = |linear: &Linear| linear.weight.id != unused.weight.id;
            let linears = [&net.tall, &net.wide, &net.head];
            if change.is_none() {
                let mut used = GradientsParams::new();
                for Linear { weight, .. } in linears.into_iter().filter(|linear| is_used(linear)) {
                    let gradient = gradients.remove::<2>(weight.id).expect("a gradient");
                    used.register(weight.id, gradient);
                }
                return Ok(used);
            }
            let mut loss = Tensor::zeros([1], (world.device(), DType::F32));
            for linear in linears {
                match is_used(linear) {
                    true => loss = loss + product(&linear.weight, &mut gradients),
                    false => layout.unused(linear),
                }
            }
            layout.backward(&loss, net)
        })
    };
    let expected = train(None);
    for (index, change) in OF_SLICES.into_iter().enumerate() {
        assert!(train(Some(change)) == expected, "layout {index}");
    }
}

/// The task of a rank in a step.
type Task = fn(usize, usize) -> usize;

/// The weights after the steps of the rank that has the most batches.
fn joined(
    world: &World,
    layout: Option<Layout>,
    counts: &[usize],
    task: Task,
) -> Result<Vec<Vec<u8>>> {
    let rank = world.rank();
    let layout_or_flat = layout.clone().unwrap_or_else(|| flat(world));
    let mut net = layout_or_flat.shard(Tasks::of(DType::F32, world.device()))?;
    let mut optim = config().init_on(&layout_or_flat, &net)?;
    let (mut batches, mut own) = (world.join(0..counts[rank]), 0);
    while let Some(batch) = batches.next_batch()? {
        let (Joined::Own(step) | Joined::Repeated(step)) = batch;
        let loss = net.loss(layout.as_ref(), 10 * step + rank, task(rank, step));
        let gradients = match (&batch, &layout) {
            (Joined::Repeated(_), None) => GradientsParams::new(),
            (Joined::Own(_), None) => GradientsParams::from_grads(loss.backward(), &net),
            (Joined::Own(_), Some(layout)) => layout.backward(&loss, &net)?,
            (Joined::Repeated(_), Some(layout)) => layout.drain(&loss, &net)?,
        };
        own += usize::from(matches!(batch, Joined::Own(_)));
        net = optim.step(0.01, net, gradients)?;
    }
    assert!(batches.next_batch()?.is_none(), "all have run out");
    assert_eq!(own, counts[rank], "every batch counts once");
    Ok(weights(&layout_or_flat.unshard(&net)?))
}

fn ranks_with_fewer_batches_train_as_with_zeros_on_one_rank() {
    // In the tasks that change, a rank without a batch has heads that no other rank uses.
    let tasks: [(Task, &str); 2] = [(|_, _| 0, "one task"), (task, "tasks")];
    for (counts, (task, name)) in
        [[3, 5], [5, 3], [1, 4]].into_iter().flat_map(|counts| tasks.map(|task| (counts, task)))
    {
        let steps = counts.into_iter().max().unwrap();
        let expected = on_one_rank(2, steps, |net, rank, step| {
            (step < counts[rank]).then(|| net.loss(None, 10 * step + rank, task(rank, step)))
        });
        for (index, layout) in LAYOUTS.iter().enumerate() {
            let runs = ranks(2, |world| {
                let world = with_checkpoints(&world);
                joined(&world, Some(layout(&world)), &counts, task)
            });
            let runs = runs.unwrap();
            assert!(runs.iter().all(|run| *run == expected), "layout {index}, {counts:?}, {name}");
        }
    }
}

fn ranks_with_fewer_batches_train_as_replicated_ones() {
    let counts = [2, 4, 1, 3];
    let on = |layout: Option<fn(&World) -> Layout>| {
        let runs = ranks(4, |world| {
            let world = with_checkpoints(&world);
            joined(&world, layout.map(|layout| layout(&world)), &counts, |_, _| 0)
        });
        runs.unwrap()
    };
    let expected = on(None);
    for (index, layout) in LAYOUTS.into_iter().enumerate() {
        assert!(on(Some(layout)) == expected, "layout {index}");
    }
    // All ranks use all parameters, also those that have run out.
    assert!(on(Some(|world| flat(world).owned("dp").allow_unused())) == expected);
}

fn losses_that_are_not_finite_do_not_count_on_a_rank_without_batches() {
    for layout in LAYOUTS {
        let trained = |factor: f32| {
            let runs = ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = layout(&world);
                let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
                let mut optim = config().init_on(&layout, &net)?;
                let loss = net.loss(Some(&layout), 1, 0);
                let gradients = match world.rank() {
                    0 => layout.backward(&loss, &net)?,
                    _ => layout.drain(&(loss * factor), &net)?,
                };
                let net = optim.step(0.01, net, gradients)?;
                let skipped = optim.skipped_steps().read();
                assert!(skipped.iter().all(|(_, steps)| *steps == 0), "{skipped:?}");
                Ok(weights(&layout.unshard(&net)?))
            });
            runs.unwrap()
        };
        let expected = trained(1.0);
        assert!(expected[0] != weights(&Tasks::of(DType::F32, &crate::device())), "it trains");
        assert!(trained(f32::NAN) == expected);
        assert!(trained(f32::INFINITY) == expected);
    }
}

fn a_rank_without_any_batch_is_rejected() {
    let all: Vec<Option<Error>> = ranks_here(2, |world| {
        let mut batches = world.join(0..2 * world.rank());
        while let Some(batch) = batches.next_batch().transpose() {
            if let Err(error) = batch.and_then(|_| world.comm().barrier()) {
                return Ok(Some(error));
            }
        }
        Ok(None)
    })
    .unwrap();
    for error in all {
        let error = error.expect("both ranks fail").to_string();
        assert!(error.contains("none on rank 0"), "{error}");
    }
    let none = ranks_here(2, |world| Ok(world.join(0..0).next_batch()?.is_none()));
    assert_eq!(none.unwrap(), [true, true]);
}

/// The message says whether a rank has a batch, and does not depend on what a batch is.
fn joined_batches_are_one_empty_message_for_each_step() {
    let sent = ranks_here(3, |world| {
        let calls = Arc::<Mutex<Vec<&'static str>>>::default();
        let named = calls.clone();
        let (counted, values) = with_counted_values(&world);
        let world = watched(&counted, move |event| {
            named.lock().unwrap().push(event.collective);
            Ok(())
        });
        let mut batches = world.join(vec![[0_u8; 1000]; 2 + world.rank()]);
        values.lock().unwrap().clear();
        let mut steps = 0;
        while batches.next_batch()?.is_some() {
            steps += 1;
        }
        let bytes: usize = values.lock().unwrap().values().sum();
        let calls = calls.lock().unwrap().clone();
        Ok((steps, calls, bytes))
    });
    // The last call says that there is no further step.
    for rank in sent.unwrap() {
        assert_eq!(rank, (4, vec!["first_bytes"; 5], 0));
    }
}

fn the_uses_of_a_pass_are_one_small_message() {
    let calls = |change: fn(Layout) -> Layout| {
        let calls = ranks_here(2, |world| {
            let calls = Arc::<Mutex<Vec<&'static str>>>::default();
            let named = calls.clone();
            let world = watched(&with_checkpoints(&world), move |event| {
                named.lock().unwrap().push(event.collective);
                Ok(())
            });
            let layout = change(flat(&world).owned("dp"));
            let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
            let loss = net.loss(Some(&layout), world.rank(), 0);
            calls.lock().unwrap().clear();
            layout.backward(&loss, &net)?;
            let calls = calls.lock().unwrap().clone();
            Ok(calls)
        });
        calls.unwrap().swap_remove(0)
    };
    let (without, mut with) = (calls(|layout| layout), calls(Layout::allow_unused));
    assert_eq!(with.remove(0), "or_bytes");
    assert_eq!(with, without, "all else is the same if all ranks use the same");

    // Five bits for each of the four owned weights, and a bit for each if uses differ. The
    // comparison at the end of a pass has 32 bytes.
    for (task, bytes) in [([0, 0], 3 + 32), ([0, 1], 3 + 1 + 32)] {
        let sent = ranks_here(2, |world| {
            let (world, values) = with_counted_values(&with_checkpoints(&world));
            let layout = flat(&world).owned("dp").allow_unused();
            let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
            let loss = net.loss(Some(&layout), 0, task[world.rank()]);
            values.lock().unwrap().clear();
            layout.backward(&loss, &net)?;
            let sent = values.lock().unwrap().get("or_bytes").copied();
            Ok(sent)
        });
        assert_eq!(sent.unwrap(), [Some(bytes); 2], "{task:?}");
    }

    let times = ranks_here(2, |world| {
        let start = Instant::now();
        for _ in 0..1000 {
            world.comm().or_bytes(vec![0; 188])?;
        }
        Ok(start.elapsed() / 1000)
    });
    println!("the uses of 300 parameters are 188 bytes, in {:?}", times.unwrap());
}

/// The errors of all ranks, which have no result.
fn errors(count: usize, run: impl Fn(&World) -> Result<()> + Sync) -> Vec<String> {
    let errors = ranks_here(count, |world| {
        let world = with_checkpoints(&world);
        Ok(run(&world).unwrap_err().to_string())
    });
    errors.unwrap()
}

fn passes_in_another_order_are_rejected_also_where_parameters_may_be_unused() {
    let changes: [fn(Layout) -> Layout; 3] = [
        |layout| layout.overlap_backward(),
        |layout| layout.owned("dp").with_keep(Keep::Weights),
        |layout| layout.owned("dp"),
    ];
    for change in changes {
        let errors = errors(2, |world| {
            let layout = change(Layout::new(&Mesh::flat(world)).allow_unused());
            let mut net = layout.shard(Layers::square(4, 32, world.device()))?;
            if world.rank() == 1 {
                net.layers.swap(0, 2);
            }
            let mut x = Tensor::<2>::ones([2, 32], world.device());
            for layer in &net.layers {
                x = layer.forward(x);
            }
            layout.backward(&x.sum(), &net).map(|_| ())
        });
        let names_both = |error: &String| {
            error.contains("`layers.0.weight`") && error.contains("`layers.2.weight`")
        };
        assert!(errors.iter().all(names_both), "{errors:?}");
    }
}

fn parameters_that_only_some_ranks_use_are_rejected_unless_allowed() {
    let pass = |world: &World, layout: Layout, declares: bool| {
        let net = layout.shard(Tasks::of(DType::F32, world.device()))?;
        let loss = net.loss(declares.then_some(&layout), 1, world.rank());
        layout.backward(&loss, &net).map(|_| ())
    };
    for (is_owned, is_allowed, declares) in
        [(false, false, true), (true, false, true), (true, true, false)]
    {
        let errors = errors(2, |world| {
            let layout = flat(world).overlap_backward();
            let layout = if is_owned { layout.owned("dp") } else { layout };
            let layout = if is_allowed { layout.allow_unused() } else { layout };
            pass(world, layout, declares)
        });
        // Heads have one shape: the ranks may get each other's, and learn of it before they train.
        let is_told = |error: &String| {
            is_of_different_calls(error)
                || is_allowed && error.contains("other ranks use it in this pass")
        };
        assert!(errors.iter().all(is_told), "{errors:?}");
    }
}

fn a_rank_that_fails_where_parameters_are_unused_stops_all_ranks() {
    assert_failures_stop_all_ranks(4, |rank, path| {
        let world = &with_checkpoints(&rank.world);
        let mesh = Mesh::new(world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
        let layout = Layout::new(&mesh).owned("gpu").overlap_backward().allow_unused();
        let layout = layout.with_muon(config().muon).with_small_elements(64).with_ahead_mb(0.002);
        let mut net = layout.shard(Tasks::of(DType::F32, world.device()))?;
        let mut optim = config().with_check_every(1).init_on(&layout, &net)?;
        rank.set_ready();
        let mut batches = world.join(0..1 + world.rank() % 2);
        while let Some(batch) = batches.next_batch()? {
            let loss = net.loss(Some(&layout), 1, world.rank() % TASKS);
            let gradients = match batch {
                Joined::Own(_) => layout.backward(&loss, &net)?,
                Joined::Repeated(_) => layout.drain(&loss, &net)?,
            };
            net = optim.step(0.01, net, gradients)?;
        }
        world.comm().synchronize()?;
        optim.save(path, &net, &1)
    });
}

/// The calls, by their numbers: a forward pass in which the others use more, the backward pass of a
/// rank without a batch, a whole model, and the end of a pass that is not trained.
fn call_all(
    layout: &Layout,
    net: &Tasks,
    rank: usize,
    mut before: impl FnMut(usize),
) -> Result<()> {
    before(0);
    let loss = net.loss(Some(layout), 1, rank);
    before(1);
    match rank {
        0 => drop(layout.backward(&loss, net)?),
        _ => drop(layout.drain(&loss, net)?),
    }
    before(2);
    drop(layout.unshard(net)?);
    before(3);
    drop(net.loss(Some(layout), 1, rank));
    layout.discard()
}

fn a_rank_that_panics_in_a_call_of_a_layout_stops_all_ranks() {
    for (call, layout) in (0..4).flat_map(|call| [3, 5].map(|index| (call, LAYOUTS[index]))) {
        let outcomes = Mutex::new(vec![]);
        let run = catch_unwind(AssertUnwindSafe(|| {
            ranks_here(2, |world| {
                let fails = Arc::new(AtomicBool::new(false));
                let panics = fails.clone();
                let world = watched(&with_checkpoints(&world), move |event| {
                    assert!(!panics.load(SeqCst), "a bug in {}", event.collective);
                    Ok(())
                });
                let (rank, layout) = (world.rank(), layout(&world));
                let net = layout.shard(Tasks::of(DType::F32, world.device()));
                // An engine ends what is on its way, too: then this rank learns of it in `shard`.
                let outcome = net.and_then(|net| {
                    call_all(&layout, &net, rank, |number| {
                        fails.store(rank == 1 && number == call, SeqCst);
                    })
                });
                outcomes.lock().unwrap().push((rank, outcome.clone()));
                outcome
            })
        }));
        let panicked = run.expect_err("rank 1 panics");
        let text = panicked.downcast_ref::<String>().expect("the panic is rank 1's");
        assert!(text.starts_with("a bug in "), "call {call}: {text}");
        let outcomes = outcomes.into_inner().unwrap();
        assert!(
            matches!(&outcomes[..], [(0, Err(Error::PeerFailed { rank: 1, .. }))]),
            "call {call}: {outcomes:?}"
        );
    }
}
