//! Regions of tensor parallelism, and experts on ranks, against one rank.

use burn::module::{Module, Param};
use burn::nn::{DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use distmuon::comm::{Communicator, PairCounts, ReduceOp, World};
use distmuon::distributed::{Axis, DistMuonConfig, Layout, Mesh, Place};
use distmuon::parallel::{ColumnLinear, RowEmbedding, RowLinear, enter, exchange, leave};
use distmuon::{AdamWConfig, Error, GradientBuffer, MuonConfig, RoutingRule};
use distmuon_testing::excused;
use distmuon_testing::models::Fixed;
use distmuon_testing::precision::has;
use distmuon_testing::watched::counted;
use distmuon_testing::worlds::{self, Case, cases};

use crate::{device, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![
    slices_of_a_network_compute_as_the_whole,
    rows_and_their_gradients_are_exchanged,
    ranks_without_rows_take_part_in_both_passes,
    sums_of_half_precision_are_rounded_once,
    experts_on_ranks_train_as_on_one,
    rows_of_an_embedding_train_as_the_whole,
    one_seed_drops_the_same_elements_in_processes_along_a_model_axis,
];

pub const IN_PROCESS: &[Case] = cases![
    counts_that_do_not_fit_the_rows_are_an_error_of_all_ranks,
    a_forgotten_partial_gradient_is_found_in_the_first_step,
    partial_gradients_on_a_mesh_with_data_are_those_of_one_rank,
    gradients_are_compared_until_they_are_not_zero_for_at_most_eight_steps,
    other_gradients_on_the_ranks_of_a_model_axis_are_found_in_the_first_step,
    plain_layers_between_enter_and_leave_compute_as_column_and_row_layers,
    a_token_without_a_row_is_an_error_of_all_ranks,
    a_table_that_is_not_cut_is_an_error_of_all_ranks,
    rows_of_an_embedding_are_sent_once,
];

const INPUTS: usize = 12;
/// No multiple of four.
const HIDDEN: usize = 30;

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The columns or rows of a whole layer that a rank has.
fn slice(whole: &Linear, dimension: usize, world: &World) -> Linear {
    let part = |extent: usize| world.part(extent);
    let weight = whole.weight.val().inner();
    let mut ranges = weight.dims().map(|extent| 0..extent);
    ranges[dimension] = part(weight.dims()[dimension]);
    let weight = Tensor::from_inner(weight.slice(ranges)).require_grad();
    let bias = whole.bias.as_ref().map(|bias| {
        let bias = bias.val().inner();
        let bias = if dimension == 1 { bias.slice([part(HIDDEN)]) } else { bias };
        Param::from_tensor(Tensor::from_inner(bias).require_grad())
    });
    Linear { weight: Param::from_tensor(weight), bias }
}

fn layer(inputs: usize, outputs: usize, seed: u64, device: &Device) -> Linear {
    LinearConfig::new(inputs, outputs).init(device).map(&mut Fixed::new(seed))
}

fn slices_of_a_network_compute_as_the_whole() {
    /// The output, the gradients of the input and of the second bias, which all ranks have, and
    /// those of this rank's slices.
    type Computed = ([Vec<f32>; 3], [Vec<f32>; 3]);
    let compute = |count: usize| -> Vec<Computed> {
        let run = ranks(count, |world| {
            let device = world.device();
            let up = slice(&layer(INPUTS, HIDDEN, 3, device), 1, &world);
            let down = slice(&layer(HIDDEN, INPUTS, 4, device), 0, &world);
            let column = ColumnLinear::new(up, world.comm());
            let row = RowLinear::new(down, world.comm());
            let x = layer(5, INPUTS, 7, device).weight.val();
            let output = row.forward(relu(column.forward(x.clone())));
            let gradients = output.clone().square().sum().backward();
            let of = |param: &Param<Tensor<2>>| floats(param.grad(&gradients).unwrap());
            let bias =
                |linear: &Linear| floats(linear.bias.as_ref().unwrap().grad(&gradients).unwrap());
            // By columns, so that slices of ranks are neighbours.
            let columns = floats(column.linear.weight.grad(&gradients).unwrap().transpose());
            Ok((
                [floats(output), floats(x.grad(&gradients).unwrap()), bias(&row.linear)],
                [columns, of(&row.linear.weight), bias(&column.linear)],
            ))
        });
        run.unwrap()
    };
    let (whole, slices) = compute(1).swap_remove(0);
    let near = |values: &[f32], expected: &[f32], what: &str| {
        assert_eq!(values.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(1.0f32, |most, value| most.max(value.abs()));
        let differs = values.iter().zip(expected).position(|(a, b)| (a - b).abs() > 1e-5 * scale);
        assert_eq!(differs, None, "{what}");
    };
    for count in [2, 4].into_iter().filter(worlds::has) {
        let computed = compute(count);
        for (rank, (same, _)) in computed.iter().enumerate() {
            for (index, (values, expected)) in same.iter().zip(&whole).enumerate() {
                near(values, expected, &format!("rank {rank} of {count}, {index}"));
            }
            assert_eq!(same, &computed[0].0, "all ranks have the same bits");
        }
        for (index, expected) in slices.iter().enumerate() {
            let joined: Vec<f32> =
                computed.iter().flat_map(|(_, of_rank)| of_rank[index].clone()).collect();
            near(&joined, expected, &format!("slices of {count}, {index}"));
        }
    }
}

fn rows_and_their_gradients_are_exchanged() {
    let counts = [vec![1, 0, 2], vec![0, 0, 3], vec![2, 1, 1]];
    let run = ranks(3, |world| {
        let rank = world.rank();
        let (device, sent) = (world.device(), counts[rank].iter().sum::<usize>());
        let counts = world.comm().pair_counts(&counts[rank], device)?;
        let rows = (0..sent).map(|row| (10 * rank + row) as f32);
        let rows: Vec<f32> = rows.flat_map(|number| [number, -number]).collect();
        let rows = Tensor::<1>::from_data(TensorData::from(&*rows), (device, DType::F32));
        let rows = rows.reshape([sent, 2]);
        let rows = rows.require_grad();
        let received = exchange(rows.clone(), &counts, world.comm());
        let firsts = floats(received.clone().slice([0..received.dims()[0], 0..1]));
        // Rank r weighs its rows by r + 1.
        let loss = (received * (rank + 1) as f64).sum();
        Ok((firsts, floats(rows.grad(&loss.backward()).unwrap())))
    });
    let (firsts, gradients): (Vec<_>, Vec<_>) = run.unwrap().into_iter().unzip();
    assert_eq!(firsts, [vec![0.0, 20.0, 21.0], vec![22.0], vec![1.0, 2.0, 10.0, 11.0, 12.0, 23.0]]);
    let expected = [vec![1.0, 3.0, 3.0], vec![3.0; 3], vec![1.0, 1.0, 2.0, 3.0]];
    let twice =
        |rows: Vec<f64>| -> Vec<f32> { rows.into_iter().flat_map(|row| [row as f32; 2]).collect() };
    assert_eq!(gradients, expected.map(twice));
}

fn ranks_without_rows_take_part_in_both_passes() {
    let run = ranks(2, |world| {
        let rank = world.rank();
        // Rank 0 sends nothing, and rank 1 receives nothing.
        let counts = world.comm().pair_counts(&[[0, 0], [3, 0]][rank], world.device())?;
        let weight = Tensor::<2>::full([1, 2], 2.0, (world.device(), DType::F32)).require_grad();
        let sent = if rank == 0 { 0 } else { 3 };
        let rows = match sent {
            0 => Tensor::<2>::empty([0, 2], (world.device(), DType::F32)),
            _ => Tensor::<2>::ones([sent, 2], (world.device(), DType::F32)),
        };
        let received = exchange(rows.require_grad(), &counts, world.comm());
        let computed = if rank == 0 { received * weight.clone() } else { received };
        let returned = exchange(computed, &counts.back(), world.comm());
        assert_eq!(returned.dims(), [sent, 2]);
        let loss = if sent == 0 { returned.sum() + weight.clone().sum() } else { returned.sum() };
        let gradients = loss.backward();
        Ok(weight.grad(&gradients).map(floats).unwrap_or_default())
    });
    // Three rows of ones, by rank 1's loss, and one by rank 0's own.
    assert_eq!(run.unwrap(), [vec![4.0, 4.0], vec![]]);
}

fn sums_of_half_precision_are_rounded_once() {
    for dtype in [DType::F16, DType::BF16] {
        if !has(FloatDType::from(dtype)) {
            continue;
        }
        let values = [256.0, 0.75, 0.75, 0.75];
        let run = ranks(4, |world| {
            let x = Tensor::<1>::full([5], values[world.rank()], (world.device(), dtype));
            let x = x.require_grad();
            let sum = leave(enter(x.clone(), world.comm()), world.comm());
            assert_eq!(sum.dtype(), dtype);
            let gradients = (sum.clone() * values[world.rank()]).sum().backward();
            Ok((floats(sum), floats(x.grad(&gradients).expect("of the sum"))))
        });
        let expected = Tensor::<1>::full([5], 258.25, (&device(), DType::F32)).cast(dtype);
        let expected = floats(expected);
        for (sum, gradient) in run.unwrap() {
            assert_eq!(sum, expected, "{dtype:?}");
            // Those of all ranks, which `enter` adds up.
            assert_eq!(gradient, expected, "{dtype:?}");
        }
    }
}

fn counts_that_do_not_fit_the_rows_are_an_error_of_all_ranks() {
    let errors = ranks_here(2, |world| {
        let sent = [1, 1 + world.rank()];
        let counts = world.comm().pair_counts(&sent, world.device())?;
        let rows = Tensor::<2>::ones([2, 3], (&device(), DType::F32));
        let received = exchange(rows, &counts, world.comm());
        assert!(received.sum().into_scalar::<f32>().is_nan());
        Ok(next_error(&world))
    });
    // A rank may learn of it while its world begins.
    for error in errors.unwrap_or_else(|error| vec![error]) {
        let text = error.to_string();
        // NCCL's own communicator has ended on the rank that failed.
        let is_told = matches!(error, Error::PeerFailed { rank: 1, .. });
        assert!(is_told && text.contains("all_to_all") || text.contains("ended"), "{text}");
    }
}

/// The error of the next call, after one that could not return its own.
fn next_error(world: &World) -> Error {
    let one = Tensor::<1>::ones([1], (&device().inner(), DType::F32));
    let next = world.comm().all_reduce(one, ReduceOp::Sum).and_then(|sum| sum.wait());
    next.expect_err("the world has ended")
}

/// A region of tensor parallelism whose hidden values are scaled by a vector that every rank has.
#[derive(Module, Debug)]
struct Scaled {
    up: Linear,
    scale: Param<Tensor<1>>,
    down: Linear,
}

impl Scaled {
    fn new(device: &Device) -> Self {
        let scale = Tensor::<1>::ones([1], (device, DType::F32)).require_grad();
        let linear = |inputs, outputs, seed| {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .init(device)
                .map(&mut Fixed::new(seed))
        };
        Self {
            up: linear(INPUTS, HIDDEN, 3),
            scale: Param::from_tensor(scale),
            down: linear(HIDDEN, INPUTS, 4),
        }
    }

    fn loss(&self, group: &Communicator) -> Tensor<1> {
        let x = Tensor::<2>::ones([4, INPUTS], (&self.scale.val().device(), DType::F32));
        self.region(enter(x, group), group).square().mean()
    }

    /// The region, which ends here.
    fn region(&self, x: Tensor<2>, group: &Communicator) -> Tensor<2> {
        let hidden = relu(self.up.forward(x)) * self.scale.val().unsqueeze();
        leave(self.down.forward(hidden), group)
    }

    /// A layout of two ranks with the slices of the region.
    fn layout(mesh: &Mesh) -> Layout {
        Layout::new(mesh)
            .with_place(Place::shard(r"\bup\.weight$", "tp", 1))
            .with_place(Place::shard(r"\bdown\.weight$", "tp", 0))
    }
}

fn a_forgotten_partial_gradient_is_found_in_the_first_step() {
    // With this epsilon, AdamW's update grows with the gradient.
    let adamw = AdamWConfig::new().with_epsilon(1.0);
    let config = DistMuonConfig::new().with_muon(MuonConfig::new().with_adamw(adamw));
    let train = |partial: bool| {
        ranks_here(2, |world| {
            let mesh = Mesh::new(&world, [Axis::data("dp", 1), Axis::model("tp", 2)])?;
            let mut layout = Scaled::layout(&mesh).with_muon(config.muon.clone());
            if partial {
                layout = layout.with_place(Place::partial("^scale$", "tp"));
            }
            let mut model = layout.shard(Scaled::new(world.device()))?;
            let mut optim = config.init_on(&layout, &model)?;
            for _step in 0..2 {
                let loss = model.loss(mesh.group("tp").expect("an axis of the mesh"));
                model = optim.step(0.01, model.clone(), layout.backward(&loss, &model)?)?;
            }
            Ok(floats(model.scale.val()))
        })
    };
    let scales = train(true).unwrap();
    assert_eq!(scales[0], scales[1], "the ranks have the same vector");
    // That of one rank, whose gradient is the whole sum.
    let alone = ranks_here(1, |world| {
        let mut model = Scaled::new(world.device());
        let mut optim = config.init(&world, &model)?;
        for _step in 0..2 {
            let gradients =
                GradientsParams::from_grads(model.loss(world.comm()).backward(), &model);
            model = optim.step(0.01, model, gradients)?;
        }
        Ok(floats(model.scale.val()))
    });
    let alone = alone.unwrap().swap_remove(0);
    let error = (scales[0][0] - alone[0]).abs();
    assert!(error < 1e-6 && (alone[0] - 1.0).abs() > 1e-4, "{scales:?} for {alone:?}");
    let text = train(false).expect_err("its gradients differ").to_string();
    for words in ["`scale`", "not the same on the ranks along `tp`", "`Place::partial`"] {
        assert!(text.contains(words), "{text}");
    }
}

/// Ranks along `dp` have other data: their gradients are averaged, and those along `tp` added.
fn partial_gradients_on_a_mesh_with_data_are_those_of_one_rank() {
    let data = |rank: usize, device: &Device| {
        Tensor::<2>::full([4, INPUTS], 1.0 + rank as f32, (device, DType::F32))
    };
    let adamw = AdamWConfig::new().with_epsilon(1.0);
    let muon = MuonConfig::new().with_adamw(adamw);
    let layouts: [fn(Layout) -> Layout; 3] = [
        |layout| layout,
        |layout| layout.overlap_backward().with_small_elements(0),
        |layout| layout.owned("dp").with_small_elements(0),
    ];
    for max_norm in [None, Some(1e-3)] {
        let config = DistMuonConfig::new().with_muon(muon.clone()).with_max_norm(max_norm);
        let alone = ranks_here(1, |world| {
            let mut model = Scaled::new(world.device());
            let mut optim = config.init(&world, &model)?;
            for _step in 0..2 {
                let mut buffer = GradientBuffer::new();
                for rank in 0..2 {
                    let output = model.region(data(rank, world.device()), world.comm());
                    let loss = output.square().mean();
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    buffer.add(&model, gradients)?;
                }
                let mean = buffer.take_mean(&model);
                model = optim.step(0.01, model, mean)?;
            }
            Ok(floats(model.scale.val()))
        });
        let alone = alone.unwrap()[0][0];
        assert!((alone - 1.0).abs() > 1e-7, "{alone}");
        for (index, change) in layouts.iter().enumerate() {
            let scales = ranks_here(4, |world| {
                let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::model("tp", 2)])?;
                let layout = Scaled::layout(&mesh).with_muon(muon.clone());
                let layout = change(layout.with_place(Place::partial("^scale$", "tp")));
                let mut model = layout.shard(Scaled::new(world.device()))?;
                let mut optim = config.init_on(&layout, &model)?;
                let group = mesh.group("tp").expect("an axis of the mesh");
                for _step in 0..2 {
                    let x = enter(data(mesh.data().rank(), world.device()), group);
                    let loss = model.region(x, group).square().mean();
                    model = optim.step(0.01, model.clone(), layout.backward(&loss, &model)?)?;
                }
                Ok(floats(layout.unshard(&model)?.scale.val()))
            });
            for scale in scales.unwrap() {
                let error = (scale[0] - alone).abs() / (alone - 1.0).abs();
                assert!(error < 1e-3, "{index}, {max_norm:?}: {scale:?} for {alone}");
            }
        }
    }
}

fn gradients_are_compared_until_they_are_not_zero_for_at_most_eight_steps() {
    /// The step that fails, of ten, if the losses of the first steps are multiplied by zero.
    fn failed(zero: usize, overlaps: bool) -> Option<usize> {
        let run = ranks_here(2, |world| {
            let mesh = Mesh::new(&world, [Axis::data("dp", 1), Axis::model("tp", 2)])?;
            let layout = Scaled::layout(&mesh);
            // Also the gradient of a single element.
            let layout =
                if overlaps { layout.overlap_backward().with_small_elements(0) } else { layout };
            let mut model = layout.shard(Scaled::new(world.device()))?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &model)?;
            for step in 0..10 {
                let loss = model.loss(mesh.group("tp").expect("an axis of the mesh"));
                let loss = if step < zero { loss * 0.0 } else { loss };
                let gradients = layout.backward(&loss, &model)?;
                model = match optim.step(0.01, model, gradients) {
                    Ok(stepped) => stepped,
                    Err(error) => {
                        assert!(error.to_string().contains("not the same on the ranks"), "{error}");
                        return Ok(Some(step));
                    }
                };
            }
            Ok(None)
        });
        let run = run.unwrap();
        assert_eq!(run[0], run[1]);
        run[0]
    }
    for zero in [0, 2, 7] {
        assert_eq!(failed(zero, false), Some(zero));
    }
    // Known limits: nothing is found.
    assert_eq!(failed(8, false), None);
    assert_eq!(failed(0, true), None);
}

fn one_seed_drops_the_same_elements_in_processes_along_a_model_axis() {
    if !worlds::has(&4) {
        return;
    }
    if worlds::name() != "mpi" {
        return excused("threads of one process, which have one sequence of random numbers");
    }
    let dropped = ranks(4, |world| {
        let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::model("tp", 2)])?;
        let device = world.device();
        // Ranks have drawn other numbers before.
        drop(Tensor::<1>::random([world.rank()], Distribution::Default, device));
        device.seed(7 + mesh.data().rank() as u64);
        let ones = Tensor::<1>::ones([64], (device, DType::F32));
        Ok(floats(DropoutConfig::new(0.5).init().forward(ones)))
    });
    let dropped = dropped.unwrap();
    assert!(dropped[0].contains(&0.0) && !dropped[0].iter().all(|element| *element == 0.0));
    assert_eq!(dropped[0], dropped[1]);
    assert_eq!(dropped[2], dropped[3]);
    assert_ne!(dropped[0], dropped[2], "ranks with other data");
}

/// The guide's region without layers of this crate.
fn plain_layers_between_enter_and_leave_compute_as_column_and_row_layers() {
    let run = ranks_here(2, |world| {
        let group = world.comm();
        let Scaled { up, down, .. } = Scaled::new(world.device());
        let (up, down) = (slice(&up, 1, &world), slice(&down, 0, &world));
        let x = layer(5, INPUTS, 7, world.device()).weight.val();
        let plain = leave(down.forward(relu(up.forward(enter(x.clone(), group)))), group);
        let column = ColumnLinear::new(up, group).forward(x.clone());
        let layers = RowLinear::new(down, group).forward(relu(column));
        let computed = [plain, layers].map(|output| {
            let gradients = output.clone().square().sum().backward();
            (floats(output), floats(x.grad(&gradients).expect("the input has a gradient")))
        });
        Ok(computed)
    });
    for [plain, layers] in run.unwrap() {
        assert_eq!(plain, layers);
    }
}

/// A layer before a region.
#[derive(Module, Debug)]
struct Led {
    before: Linear,
    region: Scaled,
}

/// Omissions that give the ranks of a model axis other gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Forgotten {
    Nothing,
    /// Each rank has data of its own.
    EqualData,
    /// The region begins without `enter`.
    Enter,
    /// One rank has no gradient, which would count as zeros in the mean.
    Gradient,
}

fn other_gradients_on_the_ranks_of_a_model_axis_are_found_in_the_first_step() {
    use Forgotten::{Enter, EqualData, Gradient, Nothing};
    for forgotten in [Nothing, EqualData, Enter, Gradient] {
        let outcomes = ranks_here(2, |world| {
            let (comm, traffic) = counted(world.communicator());
            let world = World::new(comm, world.device().clone());
            let mesh = Mesh::new(&world, [Axis::data("dp", 1), Axis::model("tp", 2)])?;
            let layout = Scaled::layout(&mesh).with_place(Place::partial(r"\.scale$", "tp"));
            let device = world.device();
            let led = Led { before: layer(INPUTS, INPUTS, 7, device), region: Scaled::new(device) };
            let (led, mut optim) = DistMuonConfig::new().start(&layout, led)?;
            let data = if forgotten == EqualData { 1 + world.rank() } else { 1 };
            let x = Tensor::<2>::full([4, INPUTS], data as f32, (device, DType::F32));
            let group = mesh.group("tp").expect("an axis of the mesh");
            traffic.lock().unwrap().clear();
            let x = led.before.forward(x);
            let x = if forgotten == Enter { x } else { enter(x, group) };
            let loss = led.region.region(x, group).square().mean();
            let mut gradients = optim.backward(&loss, &led)?;
            if forgotten == Gradient && world.rank() == 1 {
                let gradient = gradients.remove::<2>(led.before.weight.id);
                gradient.expect("the layer has a gradient");
            }
            let sent = std::mem::take(&mut *traffic.lock().unwrap());
            Ok((sent, optim.step(0.01, led, gradients).map(drop)))
        });
        for (sent, outcome) in outcomes.unwrap() {
            if forgotten != Nothing {
                let text = outcome.expect_err("the gradients differ").to_string();
                let is_named = text.contains("`before.") && text.contains("along `tp`");
                assert!(is_named, "{forgotten:?}: {text}");
                continue;
            }
            outcome.unwrap();
            // The sums at the region's end and, in the backward pass, at its beginning.
            let sums = 2 * 4 * INPUTS * 4;
            assert!(sent["all_reduce"] == sums || !worlds::is_exact(), "{sent:?}");
        }
    }
}

const EXPERTS: usize = 8;

/// Experts of one layer each, and a layer before them.
#[derive(Module, Debug)]
struct Mixture {
    before: Linear,
    experts: Param<Tensor<3>>,
}

/// The expert of a token of all data: the last experts get few tokens, and one of them none.
fn expert_of(token: usize) -> usize {
    [0, 1, 2, 0, 3, 0, 4, 1, 5, 0, 6, 2][token % 12]
}

impl Mixture {
    fn new(device: &Device) -> Self {
        let experts = Tensor::<3>::ones([EXPERTS, INPUTS, INPUTS], (device, DType::F32));
        let model = Self {
            before: LinearConfig::new(INPUTS, INPUTS).init(device),
            experts: Param::from_tensor(experts.require_grad()),
        };
        model.map(&mut Fixed::new(9))
    }

    /// The sum over some tokens of all data, each of which is sent to its expert and back.
    fn loss(&self, tokens: std::ops::Range<usize>, group: &Communicator) -> Tensor<1> {
        let device = self.before.weight.val().device();
        let data = layer(24, INPUTS, 7, &device).weight.val().detach();
        let x = self.before.forward(data.slice([tokens.clone()]));
        let held = EXPERTS / group.size();
        // In the order of their experts.
        let sorted = |tokens: std::ops::Range<usize>| {
            let mut tokens: Vec<usize> = tokens.collect();
            tokens.sort_by_key(|token| expert_of(*token));
            tokens
        };
        let order = sorted(tokens.clone());
        let indices: Vec<i32> = order.iter().map(|token| (token - tokens.start) as i32).collect();
        let select = |x: Tensor<2>, indices: &[i32]| {
            let indices = Tensor::<1, Int>::from_data(TensorData::from(indices), &x.device());
            x.select(0, indices)
        };
        // Ranks have unequal numbers of tokens.
        let of_rank = |rank: usize| share(rank, group.size());
        let sent = |from: usize, to: usize| {
            of_rank(from).filter(|token| expert_of(*token) / held == to).count()
        };
        let (rank, ranks) = (group.rank(), 0..group.size());
        let counts = PairCounts {
            sent: ranks.clone().map(|to| sent(rank, to)).collect(),
            received: ranks.map(|from| sent(from, rank)).collect(),
        };
        let received = exchange(select(x, &indices), &counts, group);
        let arrived: Vec<usize> = (0..group.size())
            .flat_map(|from| sorted(of_rank(from)))
            .filter(|token| expert_of(*token) / held == group.rank())
            .collect();
        // Row by row: every one by the matrix of its expert.
        let rows = arrived.iter().enumerate().map(|(row, token)| {
            let expert = expert_of(*token) % held;
            let matrix = self.experts.val().slice_dim(0, expert).squeeze_dim::<2>(0);
            received.clone().slice_dim(0, row).matmul(matrix)
        });
        let rows: Vec<Tensor<2>> = rows.collect();
        let computed = if rows.is_empty() { received } else { Tensor::cat(rows, 0) };
        exchange(computed, &counts.back(), group).powi_scalar(3).sum()
    }
}

/// The tokens of a rank of data, unequally many.
fn share(rank: usize, ranks: usize) -> std::ops::Range<usize> {
    let ends = [vec![0, 24], vec![0, 11, 24], vec![], vec![0, 3, 10, 12, 24]];
    let ends = &ends[ranks - 1];
    ends[rank]..ends[rank + 1]
}

fn experts_on_ranks_train_as_on_one() {
    let train = |count: usize| {
        let run = ranks(count, |world| {
            let mesh = Mesh::new(&world, [Axis::data("ep", count)])?;
            let muon = MuonConfig::new().with_rule(RoutingRule::muon("experts").batch());
            let layout = Layout::new(&mesh).with_muon(muon.clone()).with_place(Place::shard(
                "^experts$",
                "ep",
                0,
            ));
            let mut model = layout.shard(Mixture::new(world.device()))?;
            let mut optim = DistMuonConfig::new().with_muon(muon).init_on(&layout, &model)?;
            let group = mesh.group("ep").expect("an axis of the mesh");
            let mut gradients_of_experts = vec![];
            for _step in 0..3 {
                // The mean over ranks of these losses is the sum over all tokens.
                let loss = model.loss(share(world.rank(), count), group) * count as f64;
                let gradients = layout.backward(&loss, &model)?;
                let of_experts = gradients.get::<3>(model.experts.id).map(floats);
                gradients_of_experts.push(of_experts.unwrap_or_default());
                model = optim.step(0.02, model, gradients)?;
            }
            let whole = layout.unshard(&model)?;
            let weights = [floats(whole.before.weight.val()), floats(whole.experts.val())];
            Ok((gradients_of_experts.swap_remove(0), weights.concat()))
        });
        run.unwrap()
    };
    let near = |values: &[f32], expected: &[f32], scale: f32, what: &str| {
        assert_eq!(values.len(), expected.len(), "{what}");
        let differs = values.iter().zip(expected).position(|(a, b)| (a - b).abs() > scale);
        assert_eq!(differs, None, "{what}");
    };
    let (gradients, weights) = train(1).swap_remove(0);
    for count in [2, 4].into_iter().filter(worlds::has) {
        let trained = train(count);
        let most = gradients.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        for (rank, (of_rank, same)) in trained.iter().enumerate() {
            // A rank whose experts have no token has no gradient.
            let all = gradients.len() / count;
            let expected: Vec<f32> =
                gradients[rank * all..(rank + 1) * all].iter().map(|g| g * count as f32).collect();
            let expected = if of_rank.is_empty() { vec![] } else { expected };
            near(
                of_rank,
                &expected,
                1e-5 * most * count as f32,
                &format!("rank {rank} of {count}"),
            );
            near(same, &weights, 1e-4, &format!("weights on rank {rank} of {count}"));
            assert_eq!(*same, trained[0].1, "all ranks have the same bits");
        }
    }
}

/// No multiple of two, three or four.
const ROWS: usize = 29;

/// Tokens of an embedding, and a head without shared weights.
#[derive(Module, Debug)]
struct Words {
    rows: Option<RowEmbedding>,
    whole: Option<Embedding>,
    head: Linear,
}

impl Words {
    /// With the rows on the ranks of a group, or all of them on every rank.
    fn new(group: Option<&Communicator>, device: &Device) -> Self {
        let table = EmbeddingConfig::new(ROWS, INPUTS).init(device).map(&mut Fixed::new(5));
        let (rows, whole) = match group {
            Some(group) => (Some(RowEmbedding::new(table, group)), None),
            None => (None, Some(table)),
        };
        Self { rows, whole, head: layer(INPUTS, ROWS, 6, device) }
    }

    fn table(&self) -> Vec<f32> {
        let rows = self.rows.iter().map(|rows| &rows.embedding);
        let table = rows.chain(&self.whole).next().expect("one of both");
        floats(table.weight.val())
    }

    fn loss(&self, tokens: &[i32]) -> Tensor<1> {
        let device = self.head.weight.val().device();
        let ids = Tensor::<1, Int>::from_data(TensorData::from(tokens), &device);
        let ids = ids.reshape([2, tokens.len() / 2]);
        let x = match (&self.rows, &self.whole) {
            (Some(rows), _) => rows.forward(ids),
            (None, Some(whole)) => whole.forward(ids),
            (None, None) => unreachable!("one of both"),
        };
        self.head.forward(x).square().mean()
    }
}

fn tokens(step: usize, rank: usize) -> Vec<i32> {
    // Some twice, and most rows by no rank; ranks have different numbers of tokens.
    (0..6 + 2 * rank).map(|index| ((index * index + 7 * rank + step) % 11 * 2) as i32).collect()
}

fn rows_of_an_embedding_train_as_the_whole() {
    let plain = |layout: Layout, _| layout;
    let owned = |layout: Layout, _| layout.owned("dp");
    // The largest slice is not small, the others are.
    let overlapping = |layout: Layout, count: usize| {
        layout.overlap_backward().with_small_elements(ROWS.div_ceil(count) * INPUTS)
    };
    type OnRanks = fn(Layout, usize) -> Layout;
    let layouts: [(&str, OnRanks); 3] =
        [("plain", plain), ("owned", owned), ("overlapping", overlapping)];
    let train = |count: usize, by_rows: bool, layout: OnRanks| {
        let run = ranks(count, |world| {
            let mesh = Mesh::new(&world, [Axis::data("dp", count)])?;
            let layout = layout(Layout::new(&mesh), count);
            let layout = match by_rows {
                true => layout.with_place(Place::shard("^rows", "dp", 0)),
                false => layout,
            };
            let model = Words::new(by_rows.then(|| world.comm()), world.device());
            let mut model = layout.shard(model)?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &model)?;
            let mut losses = vec![];
            for step in 0..5 {
                let loss = model.loss(&tokens(step, world.rank()));
                losses.extend(floats(loss.clone()));
                model = optim.step(0.02, model.clone(), layout.backward(&loss, &model)?)?;
            }
            let mut whole = layout.unshard(&model)?;
            if let Some(rows) = whole.rows.take() {
                // The whole table computes on its own.
                let alone = World::alone(world.device().clone());
                whole.rows = Some(RowEmbedding::new(rows.embedding, alone.comm()));
            }
            losses.extend(floats(whole.loss(&tokens(5, world.rank()))));
            Ok((losses, whole.table()))
        });
        run.unwrap()
    };
    for count in [1, 2, 3, 4].into_iter().filter(worlds::has) {
        let whole = train(count, false, plain);
        for (name, layout) in layouts {
            let rows = train(count, true, layout);
            for ((losses, table), (expected_losses, expected)) in rows.iter().zip(&whole) {
                for (values, expected) in [(losses, expected_losses), (table, expected)] {
                    assert_eq!(values.len(), expected.len());
                    let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
                    let differs = values.iter().zip(expected).find(|pair| !near(*pair));
                    assert_eq!(differs, None, "{count} ranks, {name}");
                }
            }
        }
    }
}

fn a_token_without_a_row_is_an_error_of_all_ranks() {
    let unknown = |rank: usize| if rank == 0 { 3 } else { ROWS as i32 };
    fails_with(true, unknown, "a token has no row: expected 0 to 28, got 29");
}

fn a_table_that_is_not_cut_is_an_error_of_all_ranks() {
    fails_with(false, |_| 3, "its table has other rows: expected");
}

/// A lookup of a token fails on rank 1 at least.
fn fails_with(is_cut: bool, token: impl Fn(usize) -> i32 + Send + Sync, expected: &str) {
    let errors = ranks_here(2, |world| {
        let mesh = Mesh::flat(&world);
        let layout = Layout::new(&mesh).with_place(Place::shard("^rows", "dp", 0));
        let whole = Words::new(Some(world.comm()), world.device());
        let model = if is_cut { layout.shard(whole)? } else { whole };
        // Where calls run ahead, a rank that fails could end before the model has arrived.
        world.comm().synchronize()?;
        let loss = model.loss(&[1, token(world.rank())]);
        assert!(loss.into_scalar::<f32>().is_nan());
        Ok(next_error(&world))
    });
    for error in errors.unwrap_or_else(|error| vec![error]) {
        let text = error.to_string();
        // NCCL's own communicator has ended on a rank that failed.
        let is_told = matches!(error, Error::PeerFailed { .. });
        assert!(is_told && text.contains(expected) || text.contains("ended"), "{text}");
    }
}

/// Each different token and its row, and its gradient: not the table.
fn rows_of_an_embedding_are_sent_once() {
    let sent = ranks_here(2, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let mesh = Mesh::flat(&world);
        let layout = Layout::new(&mesh).with_place(Place::shard("^rows", "dp", 0));
        let model = layout.shard(Words::new(Some(world.comm()), world.device()))?;
        traffic.lock().unwrap().clear();
        let tokens = [[0, 20, 20, 20, 21, 21], [0, 0, 1, 1, 20, 20]][world.rank()];
        let gradients = model.loss(&tokens).backward();
        let rows = &model.rows.as_ref().expect("by rows").embedding;
        assert!(rows.weight.grad(&gradients).is_some());
        let sent = traffic.lock().unwrap()["all_to_all"];
        Ok(sent)
    });
    // Rank 0 asks rank 1 for rows 20 and 21, and rank 1 asks rank 0 for rows 0 and 1, after the
    // number of them in two words.
    let row = INPUTS * 4;
    assert_eq!(sent.unwrap(), [2 * 4 + 2 * 4 + 2 * 2 * row; 2]);
}
