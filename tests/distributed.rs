//! N ranks against one, on every engine: equal bits, equal refusals, shared memory, checkpoints that
//! move.

mod common;
#[cfg(feature = "cuda")]
#[path = "common/host.rs"]
mod host;
#[path = "common/watched.rs"]
mod watched;
#[path = "common/worlds.rs"]
mod worlds;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use common::{bits, gradients, weights};
use distmuon::dist::comm::{Communicator, Hierarchy, Pending};
use distmuon::dist::plan::Strategy;
use distmuon::dist::{CostSource, DistMuonConfig, Gradients, ReduceOp, World};
use distmuon::{Error, MuonConfig, Result, Rule};
use libtest_mimic::Arguments;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Serialize, de::DeserializeOwned};
use worlds::{Case, Folder, cases};

/// Cases that all ranks end well.
const SOUND: &[Case] = cases![
    any_number_of_ranks_is_bit_equal_to_one,
    clipping_by_the_norm_of_all_gradients_is_bit_equal_too,
    measured_costs_are_agreed,
    different_gradients_count_as_their_mean,
    parameters_without_gradients_stay_and_partial_ones_count_as_zeros,
    a_gradient_that_is_not_finite_stops_its_parameter_on_all_ranks,
    collectives_move_what_they_say,
    timing_changes_nothing,
    a_checkpoint_moves_between_numbers_of_ranks,
    shapes_that_other_systems_are_tested_on,
    one_giant_many_dwarfs_and_more_ranks_than_matrices,
    half_precision_is_bit_equal_too,
    accumulated_gradients_are_one_step,
    frozen_parameters_take_no_part,
    nodes_are_bit_equal_to_a_flat_world,
    nodes_send_less_between_them,
];

/// Cases that end their world, or look into it from outside.
const OTHERS: &[Case] = cases![
    one_rank_is_the_single_device_optimizer,
    memory_is_shared,
    models_that_differ_are_named,
    bad_gradients_and_settings_are_refused_on_all_ranks,
    bad_checkpoints_are_refused_on_all_ranks,
    a_world_has_a_rank,
    devices_of_two_backends_are_no_world,
];

fn main() {
    #[cfg(feature = "cuda")]
    host::use_test_library();
    #[cfg(feature = "mpi")]
    worlds::mpi::work(SOUND);
    let trials = worlds::trials(worlds::HERE, &[SOUND, OTHERS].concat());
    #[cfg(feature = "mpi")]
    let trials = trials.into_iter().chain([worlds::mpi::trial(SOUND.len())]).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// How long the tests wait for a rank that does not come.
const DEADLINE: Duration = Duration::from_secs(20);

/// Shapes that nothing divides.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    square: Vec<Linear>,
    wide: Linear,
    tall: Linear,
    experts: Param<Tensor<3>>,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let experts = Tensor::random([3, 10, 6], Distribution::Normal(0.0, 0.1), device);
        let net = Self {
            embedding: EmbeddingConfig::new(37, 21).init(device),
            square: vec![linear(16, 16), linear(16, 16), linear(16, 16)],
            wide: linear(5, 31),
            tall: linear(32, 3),
            experts: Param::from_tensor(experts.require_grad()),
            norm: LayerNormConfig::new(21).init(device),
            head: linear(21, 37),
        };
        net.map(&mut common::Fixed(StdRng::seed_from_u64(7)))
    }

    fn gradients(&self, seed: u64) -> GradientsParams {
        gradients(self, seed)
    }

    fn weights(&self) -> Vec<Vec<u8>> {
        weights(self)
    }

    fn values(&self) -> Vec<f64> {
        let floats = self.weights().concat();
        let float = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().expect("four bytes")));
        floats.chunks(4).map(float).collect()
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

fn config() -> DistMuonConfig {
    let muon = MuonConfig::new().with_rule(Rule::muon("experts").batch());
    DistMuonConfig::new().with_muon(muon).with_small_elements(64)
}

fn ranks<T: Send + Serialize + DeserializeOwned>(
    count: usize,
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    worlds::ranks(DEADLINE, count, run)
}

/// [`ranks`], where what they return does not leave the process.
fn ranks_here<T: Send>(count: usize, run: impl Fn(World) -> Result<T> + Sync) -> Result<Vec<T>> {
    worlds::ranks_here(DEADLINE, count, run)
}

/// The weights after some steps on the same gradients, which are the same on all ranks.
fn trained(count: usize, steps: u64, config: &DistMuonConfig) -> Vec<Vec<u8>> {
    let nets = ranks(count, |world| {
        let mut net = Net::new(world.device());
        let net_of_rank_0 = world.broadcast(net.clone())?;
        net = net_of_rank_0;
        let mut optim = config.init(&world, &net)?;
        for step in 0..steps {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(net.weights())
    });
    let mut nets = nets.unwrap();
    for net in &nets[1..] {
        assert_eq!(*net, nets[0], "the ranks agree");
    }
    nets.swap_remove(0)
}

fn any_number_of_ranks_is_bit_equal_to_one() {
    let alone = trained(1, 10, &config());
    for strategy in [Strategy::Greedy, Strategy::BlockCyclic] {
        for (bucket_mb, overlap) in [(25.0, true), (0.001, true), (0.001, false), (0.01, true)] {
            let config =
                config().with_strategy(strategy).with_bucket_mb(bucket_mb).with_overlap(overlap);
            for count in [1, 2, 4] {
                assert!(trained(count, 10, &config) == alone, "{count} ranks, {config}");
            }
            // Gradients that need no mean are equal on any number of ranks.
            let averaged = config.with_gradients(Gradients::Averaged);
            for count in [3, 7, 16].into_iter().filter(worlds::has) {
                assert!(trained(count, 10, &averaged) == alone, "{count} ranks, {averaged}");
            }
        }
    }
}

fn clipping_by_the_norm_of_all_gradients_is_bit_equal_too() {
    let clipped = config().with_max_norm(Some(0.5));
    let alone = trained(1, 5, &clipped);
    assert!(alone != trained(1, 5, &config()), "it clips");
    assert!(trained(1, 5, &config().with_max_norm(Some(1e9))) == trained(1, 5, &config()));
    for count in [2, 4] {
        for bucket_mb in [25.0, 0.001] {
            assert!(trained(count, 5, &clipped.clone().with_bucket_mb(bucket_mb)) == alone);
        }
    }
}

fn measured_costs_are_agreed() {
    let measured = config().with_costs(CostSource::Measured);
    assert!(
        trained(3, 2, &measured.with_gradients(Gradients::Averaged)) == trained(1, 2, &config())
    );
}

fn different_gradients_count_as_their_mean() {
    let own = |world: &World, net: &Net, step: u64| net.gradients(step * 10 + world.rank() as u64);
    for count in [2, 3, 4] {
        let spread = ranks(count, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().init(&world, &net)?;
            for step in 0..5 {
                let gradients = own(&world, &net, step);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(net.values())
        });
        let spread = spread.unwrap();
        let alone = ranks(1, |world| {
            let mut net = Net::new(world.device());
            let mut optim = config().init(&world, &net)?;
            for step in 0..5 {
                let mut mean = Mean { net: &net, step, count, grads: GradientsParams::new() };
                net.visit(&mut mean);
                let gradients = mean.grads;
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(net.values())
        });
        let alone = alone.unwrap().swap_remove(0);
        let square = |x: f64| x * x;
        let difference: f64 = spread[0].iter().zip(&alone).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = alone.iter().map(|a| square(*a)).sum();
        assert!((difference / norm).sqrt() < 1e-6, "{count} ranks: {}", (difference / norm).sqrt());
    }
}

/// The mean of the gradients of all ranks, in float64.
struct Mean<'a> {
    net: &'a Net,
    step: u64,
    count: usize,
    grads: GradientsParams,
}

impl burn::module::ModuleVisitor for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.val().shape();
        let mut sum = vec![0f64; shape.num_elements()];
        for rank in 0..self.count {
            let grads = self.net.gradients(self.step * 10 + rank as u64);
            let grad = grads.get::<D>(param.id).expect("every parameter has one").into_data();
            sum.iter_mut().zip(grad.iter::<f64>()).for_each(|(sum, x)| *sum += x);
        }
        let mean: Vec<f32> = sum.iter().map(|sum| (sum / self.count as f64) as f32).collect();
        let device = param.val().device().inner();
        self.grads
            .register::<D>(param.id, Tensor::from_data(TensorData::new(mean, shape), &device));
    }
}

fn one_rank_is_the_single_device_optimizer() {
    let mut net = Net::new(&device());
    let mut single = config().muon.init(&net);
    for step in 0..10 {
        let gradients = net.gradients(step);
        net = single.step(0.01, net, gradients);
    }
    assert!(net.weights() == trained(1, 10, &config()));
}

fn parameters_without_gradients_stay_and_partial_ones_count_as_zeros() {
    let run = |count: usize, has: fn(usize) -> bool| {
        let runs = ranks(count, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().init(&world, &net)?;
            let before = bits(&net.experts.val());
            let mut gradients = net.gradients(1);
            let (id, shared) = (net.experts.id, net.gradients(2).remove::<3>(net.experts.id));
            gradients.remove::<3>(id);
            if has(world.rank()) {
                gradients.register(id, shared.expect("the experts have one"));
            }
            net = optim.step(0.01, net, gradients)?;
            assert!(optim.skipped_steps().is_empty());
            Ok((before, bits(&net.experts.val())))
        });
        runs.unwrap()
    };
    for (before, after) in run(2, |_| false) {
        assert_eq!(before, after, "no rank has a gradient");
    }
    let (before, after) = &run(2, |rank| rank == 1)[0];
    assert_ne!(before, after);
    assert_eq!(&run(2, |rank| rank == 1)[1].1, after, "the ranks agree");
}

fn a_gradient_that_is_not_finite_stops_its_parameter_on_all_ranks() {
    for count in [1, 3] {
        let runs = ranks(count, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_bucket_mb(0.002).init(&world, &net)?;
            let before = net.clone();
            let mut gradients = net.gradients(1);
            if world.rank() == 0 {
                for (id, dims) in
                    [(net.embedding.weight.id, [37, 21]), (net.wide.weight.id, [5, 31])]
                {
                    let grad = Tensor::<2>::full(dims, 1.0, &Device::default());
                    gradients.register(id, grad.slice_fill([1..2, 1..2], f32::NAN));
                }
            }
            net = optim.step(0.01, net, gradients)?;
            assert_eq!(bits(&net.embedding.weight.val()), bits(&before.embedding.weight.val()));
            assert_eq!(bits(&net.wide.weight.val()), bits(&before.wide.weight.val()));
            assert_ne!(bits(&net.tall.weight.val()), bits(&before.tall.weight.val()));
            assert_ne!(bits(&net.head.weight.val()), bits(&before.head.weight.val()));
            Ok(optim.skipped_steps().into_iter().collect::<Vec<_>>())
        });
        for skipped in runs.unwrap() {
            let expected = [("embedding.weight".to_owned(), 1), ("wide.weight".to_owned(), 1)];
            assert_eq!(skipped, expected);
        }
    }
}

fn memory_is_shared() {
    #[derive(Module, Debug)]
    struct Matrices {
        layers: Vec<Linear>,
    }
    for count in [1, 2, 4, 8] {
        let reports = ranks_here(count, |world| {
            world.device().seed(1);
            let layer = || LinearConfig::new(32, 32).with_bias(false).init(world.device());
            // The last layer would be taken for the output head.
            let mut net = Matrices { layers: (0..16).map(|_| layer()).collect() };
            net = world.broadcast(net)?;
            let mut optim = DistMuonConfig::new().with_max_norm(Some(1.0)).init(&world, &net)?;
            let mut gradients = GradientsParams::new();
            for layer in &net.layers {
                gradients.register(layer.weight.id, layer.weight.val().inner());
            }
            optim.step(0.01, net, gradients)?;
            Ok(optim.memory())
        });
        let p = 16 * 32 * 32 * 4;
        for memory in reports.unwrap() {
            // Clipping holds all shares of the gradients at once.
            let held = memory.parameters.now + memory.shares.peak + memory.states.now;
            assert_eq!(held, p + 2 * p / count, "{count} ranks\n{memory}");
            assert_eq!(memory.gradients.peak, p);
            assert_eq!((memory.gradients.now, memory.shares.now, memory.buffers.now), (0, 0, 0));
            assert!(memory.total.peak <= 2 * p + 2 * p / count + p, "{memory}");
        }
    }
}

fn models_that_differ_are_named() {
    let shape = ranks(3, |world| {
        let mut net = Net::new(world.device());
        if world.rank() == 2 {
            net.wide = LinearConfig::new(5, 30).init(world.device());
        }
        config().init(&world, &net).map(|_| ())
    });
    let error = shape.unwrap_err();
    let Error::ModelsDiffer { rank: 2, parameter, .. } = &error else { panic!("{error}") };
    assert_eq!(parameter, "wide.weight");

    let values = ranks(2, |world| {
        let mut net = Net::new(world.device());
        if world.rank() == 1 {
            net.tall = LinearConfig::new(32, 3).init(world.device());
        }
        config().init(&world, &net).map(|_| ())
    });
    let error = values.unwrap_err().to_string();
    assert!(error.contains("World::broadcast"), "{error}");
}

fn bad_gradients_and_settings_are_refused_on_all_ranks() {
    let all: Vec<Error> = ranks_here(3, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config().init(&world, &net)?;
        let mut gradients = net.gradients(1);
        if world.rank() == 1 {
            let turned = Tensor::<2>::ones([31, 5], &Device::default());
            gradients.register(net.wide.weight.id, turned);
        }
        Ok(optim.step(0.01, net, gradients).map(|_| ()).unwrap_err())
    })
    .unwrap();
    let Error::Parameter { parameter, rank: 1, .. } = &all[1] else { panic!("{}", all[1]) };
    assert_eq!(parameter, "wide.weight");
    for rank in [0, 2] {
        let Error::PeerFailed { rank: 1, cause } = &all[rank] else { panic!("{}", all[rank]) };
        assert!(cause.contains("wide.weight"), "{cause}");
    }

    let refused = |config: DistMuonConfig, named: &str| {
        let net = Net::new(&device());
        match config.init(&World::alone(device()), &net) {
            Err(Error::Setting { setting, .. }) => assert_eq!(setting, named),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{named} was accepted"),
        }
    };
    refused(config().with_bucket_mb(0.0), "bucket_mb");
    refused(config().with_bucket_mb(f64::NAN), "bucket_mb");
    refused(config().with_max_norm(Some(-1.0)), "max_norm");
    let clipping = burn::grad_clipping::GradientClippingConfig::Norm(1.0);
    let muon = MuonConfig::new().with_grad_clipping(Some(clipping));
    refused(DistMuonConfig::new().with_muon(muon), "muon.grad_clipping");
    let nobody = World::threads(Vec::<Device>::new(), |_| Ok::<_, Error>(()));
    assert!(matches!(nobody, Err(Error::Setting { setting: "devices", .. })));
}

fn collectives_move_what_they_say() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !Device::default().supports_dtype(dtype) {
            println!("skipped: the device has no {dtype:?}");
            continue;
        }
        let engine = worlds::name();
        let outcome = ranks(3, |world| {
            assert_eq!(world.comm().engine(), engine);
            let (rank, comm) = (world.rank(), world.comm());
            let device = Device::default();
            let own =
                |values: &[f32]| Tensor::<1>::from_data(TensorData::from(values), (&device, dtype));
            let read = |tensor: Tensor<1>| {
                assert_eq!(tensor.dtype(), dtype);
                tensor.into_data().iter::<f32>().collect::<Vec<_>>()
            };
            let r = rank as f32;
            let sum = comm.all_reduce(own(&[r, 10.0 * r]), ReduceOp::Sum)?.wait()?;
            assert_eq!(read(sum), [3.0, 30.0]);
            // Uneven and empty shares; several collectives on their way at once.
            let scattered =
                comm.reduce_scatter(own(&[r, 1.0, 2.0 + r]), &[2, 0, 1], ReduceOp::Mean)?;
            let counts = [1, 0, 2];
            let gathered = comm.all_gather(own(&[r; 2][..counts[rank]]), &counts)?;
            let parts = [&[1.0f32, 1.0][..], &[], &[3.0]];
            assert_eq!(read(scattered.wait()?), parts[rank]);
            assert_eq!(read(gathered.wait()?), [0.0, 2.0, 2.0]);
            let root = comm.broadcast(own(&[r]), 2)?.wait()?;
            assert_eq!(read(root), [2.0]);
            // Rank r sends r elements to every rank.
            let sent = vec![r; 3 * rank];
            let exchanged = comm.all_to_all(own(&sent), &[rank; 3], &[0, 1, 2])?.wait()?;
            assert_eq!(read(exchanged), [1.0, 2.0, 2.0]);
            // Groups of the even and of the odd ranks, the even ones in reverse.
            let group = world.split(rank % 2, 10 - rank)?;
            assert_eq!((group.size(), group.rank()), [(2, 1), (1, 0), (2, 0)][rank]);
            let sum = group.comm().all_reduce(own(&[r]), ReduceOp::Sum)?.wait()?;
            assert_eq!(read(sum), [[2.0], [1.0], [2.0]][rank]);
            let wrong = comm.all_gather(own(&[r]), &[1, 1]).unwrap_err();
            assert!(matches!(wrong, Error::Collective { collective: "all_gather", .. }), "{wrong}");
            Ok(())
        });
        outcome.unwrap();
    }
}

fn timing_changes_nothing() {
    let alone = trained(1, 20, &config());
    let delayed = ranks(4, |world| {
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config().with_bucket_mb(0.001).init(&world, &net)?;
        let mut rng = StdRng::seed_from_u64(world.rank() as u64);
        for step in 0..20 {
            std::thread::sleep(Duration::from_micros(rng.random_range(0..2000)));
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(net.weights())
    });
    for net in delayed.unwrap() {
        assert!(net == alone);
    }
}

fn a_checkpoint_moves_between_numbers_of_ranks() {
    let folder = Folder::new();
    let path = |count: usize| folder.path().join(format!("{count}.ckpt"));
    let config = config().with_gradients(Gradients::Averaged).with_bucket_mb(0.002);
    let train = |world: &World, saved: Option<usize>, steps: std::ops::Range<u64>| {
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(world, &net)?;
        if let Some(count) = saved {
            let step: u64;
            (net, optim, step) = optim.load(path(count), net)?;
            assert_eq!(step, steps.start);
        }
        for step in steps {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok::<_, Error>((net, optim))
    };
    let uninterrupted = ranks(1, |world| Ok(train(&world, None, 0..10)?.0.weights())).unwrap();
    for count in [1, 2, 3, 4] {
        ranks(count, |world| {
            let (net, mut optim) = train(&world, None, 0..5)?;
            optim.save(path(count), &net, &5u64)
        })
        .unwrap();
    }
    for saved in [1, 2, 3, 4] {
        for count in [1, 2, 3, 4] {
            let run = ranks(count, |world| Ok(train(&world, Some(saved), 5..10)?.0.weights()));
            for weights in run.unwrap() {
                assert!(weights == uninterrupted[0], "saved on {saved}, loaded on {count}");
            }
        }
        // The single-device optimizer goes on from the same file.
        let net = Net::new(&device());
        let optim = config.muon.init(&net);
        let (mut net, mut optim, step): (_, _, u64) =
            distmuon::checkpoint::load(path(saved), net, optim).unwrap();
        for step in step..10 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients);
        }
        assert!(net.weights() == uninterrupted[0], "saved on {saved}, loaded without ranks");
    }
}

fn bad_checkpoints_are_refused_on_all_ranks() {
    let folder = Folder::new();
    let path = folder.path().join("run.ckpt");
    let save = |path: std::path::PathBuf| {
        ranks_here(2, move |world| {
            let net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().init(&world, &net)?;
            Ok(optim.save(&path, &net, &0).map_err(|error| error.to_string()))
        })
        .unwrap()
    };
    assert_eq!(save(path.clone()), [Ok(()), Ok(())]);
    let nowhere = save(folder.path().join("no/such/folder"));
    assert!(
        nowhere.iter().all(|saved| saved.as_ref().is_err_and(|e| e.contains("no/such/folder")))
    );

    let before = std::fs::read(&path).unwrap();
    let truncated = folder.path().join("truncated.ckpt");
    std::fs::write(&truncated, &before[..before.len() / 2]).unwrap();
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = config().init(&world, &net)?;
        Ok(optim.load::<_, i32>(&truncated, net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    }
    // States of another rule.
    let other = config().with_muon(MuonConfig::new().with_rule(Rule::adamw(".")));
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = other.init(&world, &net)?;
        Ok(optim.load::<_, i32>(&path, net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(error.to_string().contains("configure the optimizer as it was"), "{error}");
    }
}

/// Matrices of any shapes.
#[derive(Module, Debug)]
struct Stack {
    matrices: Vec<Param<Tensor<2>>>,
}

impl Stack {
    fn new(shapes: &[[usize; 2]], dtype: DType, device: &Device) -> Self {
        let mut rng = StdRng::seed_from_u64(11);
        let mut matrix = |shape: &[usize; 2]| {
            let values = (0..shape[0] * shape[1]).map(|_| rng.random_range(-0.3..0.3));
            let values = TensorData::new(values.collect::<Vec<f32>>(), *shape);
            Param::from_tensor(Tensor::from_data(values, (device, dtype)).require_grad())
        };
        Self { matrices: shapes.iter().map(&mut matrix).collect() }
    }

    /// The weights after ten steps on a number of ranks, which agree.
    fn trained(
        shapes: &[[usize; 2]],
        dtype: DType,
        count: usize,
        config: &DistMuonConfig,
    ) -> Vec<Vec<u8>> {
        let mut runs = ranks(count, |world| {
            let mut stack = Self::new(shapes, dtype, world.device());
            let mut optim = config.init(&world, &stack)?;
            for step in 0..10 {
                let gradients = gradients(&stack, step);
                stack = optim.step(0.01, stack, gradients)?;
            }
            Ok(weights(&stack))
        })
        .unwrap();
        assert!(runs.iter().all(|weights| *weights == runs[0]), "the ranks agree");
        runs.swap_remove(0)
    }
}

fn matrices_only() -> DistMuonConfig {
    DistMuonConfig::new().with_muon(MuonConfig::new().with_rule(Rule::muon("matrices")))
}

/// The shapes that Emerging-Optimizers tests its distributed Muon on, and that DMuon's and
/// Megatron's tests add: overlapped is as good as in turn, a run is like any other.
fn shapes_that_other_systems_are_tested_on() {
    let shapes = [[21, 16], [16, 32], [3, 32], [5, 100]];
    let trained =
        |count, config: &DistMuonConfig| Stack::trained(&shapes, DType::F32, count, config);
    let alone = trained(1, &matrices_only());
    for count in [2, 4] {
        for overlap in [true, false] {
            let config = matrices_only().with_bucket_mb(0.002).with_overlap(overlap);
            assert!(trained(count, &config) == alone, "{count} ranks, overlap {overlap}");
        }
    }
    for run in 0..10 {
        assert!(trained(4, &matrices_only()) == alone, "run {run}");
    }
}

fn one_giant_many_dwarfs_and_more_ranks_than_matrices() {
    let mut shapes = vec![[3, 2]; 30];
    shapes.insert(7, [64, 96]);
    for (shapes, counts) in [(&shapes[..], [2, 4, 8]), (&[[4, 6], [6, 4]][..], [4, 8, 16])] {
        let trained = |count| Stack::trained(shapes, DType::F32, count, &matrices_only());
        let alone = trained(1);
        for count in counts.into_iter().filter(worlds::has) {
            assert!(trained(count) == alone, "{count} ranks, {shapes:?}");
        }
    }
}

fn half_precision_is_bit_equal_too() {
    let shapes = [[16, 24], [24, 16], [24, 16], [7, 5]];
    for dtype in [DType::F16, DType::BF16] {
        if !Device::default().supports_dtype(dtype) {
            println!("skipped: the device has no {dtype:?}");
            continue;
        }
        let alone = Stack::trained(&shapes, dtype, 1, &matrices_only());
        let start = Stack::new(&shapes, dtype, &device());
        assert!(start.matrices.iter().all(|matrix| matrix.val().dtype() == dtype));
        assert!(alone.iter().zip(weights(&start)).all(|(new, old)| *new != old), "{dtype:?}");
        for count in [2, 4] {
            assert!(Stack::trained(&shapes, dtype, count, &matrices_only()) == alone, "{dtype:?}");
        }
    }
}

fn accumulated_gradients_are_one_step() {
    let micro = |net: &Net, step: u64| {
        let mut accumulator = GradientsAccumulator::new();
        for batch in 0..3 {
            accumulator.accumulate(net, net.gradients(100 * step + batch));
        }
        accumulator.grads()
    };
    let mut net = Net::new(&device());
    let mut single = config().muon.init(&net);
    for step in 0..4 {
        let gradients = micro(&net, step);
        net = single.step(0.01, net, gradients);
    }
    let shared = ranks(4, |world| {
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config().init(&world, &net)?;
        for step in 0..4 {
            let gradients = micro(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(net.weights())
    });
    for weights in shared.unwrap() {
        assert!(weights == net.weights());
    }
}

fn frozen_parameters_take_no_part() {
    let runs = ranks(2, |world| {
        let mut net = Net::new(world.device());
        net.wide = net.wide.no_grad();
        net.embedding = net.embedding.no_grad();
        let mut optim = config().init(&world, &net)?;
        let frozen = |net: &Net| [bits(&net.wide.weight.val()), bits(&net.embedding.weight.val())];
        let (before, tall) = (frozen(&net), bits(&net.tall.weight.val()));
        let planned: Vec<_> =
            optim.plan().parameters().iter().map(|found| found.path.clone()).collect();
        assert!(!planned.iter().any(|path| path.contains("wide") || path.contains("embedding")));
        for step in 0..3 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        assert!(!net.wide.weight.is_require_grad(), "it stays frozen");
        assert!(net.tall.weight.is_require_grad());
        assert_eq!(frozen(&net), before);
        assert_ne!(bits(&net.tall.weight.val()), tall);
        Ok(())
    });
    runs.unwrap();
}

fn nodes_are_bit_equal_to_a_flat_world() {
    // Neighbours are a node, or every other rank is.
    for node in [|rank: usize| rank / 2, |rank: usize| rank % 2] {
        let nets = ranks(4, |world| {
            let name = format!("node {}", node(world.rank()));
            let world = world.by_node(&name)?;
            assert!(world.comm().version().ends_with(", 2 nodes"), "{}", world.comm().version());
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_bucket_mb(0.002).init(&world, &net)?;
            for step in 0..5 {
                let gradients = net.gradients(step);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(net.weights())
        });
        let alone = trained(1, 5, &config());
        for net in nets.unwrap() {
            assert!(net == alone);
        }
    }
    // Nodes of different sizes, of one rank, and a single node are a flat world.
    for name in [|rank: usize| rank / 3, |rank: usize| rank, |_| 0] {
        let versions = ranks(4, |world| {
            let flat = world.comm().version();
            Ok(world.clone().by_node(&name(world.rank()).to_string())?.comm().version() == flat)
        });
        assert_eq!(versions.unwrap(), [true; 4]);
    }
}

fn nodes_send_less_between_them() {
    let counts = [5, 0, 4, 7];
    let own = |rank: usize, length: usize, dtype| {
        let values = (0..length).map(|i| ((3 * i + rank) % 11) as f32 - 5.0).collect::<Vec<f32>>();
        Tensor::<1>::from_data(TensorData::from(&values[..]), (&Device::default(), dtype))
    };
    let sent = ranks(4, |world| {
        let rank = world.rank();
        let bytes = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
        let nodes = Hierarchy::over(world.engine(), &format!("{}", rank / 2))?.expect("two nodes");
        let nodes = nodes.watched(|link, engine| {
            let bytes = bytes[usize::from(link == "across")].clone();
            let group = World::new(engine, world.device().clone());
            let count = move |event: watched::Event| {
                bytes.fetch_add(event.bytes, Ordering::SeqCst);
                Ok(())
            };
            watched::watched(&group, count).engine()
        });
        let read = |result: Pending| Ok::<_, Error>(bits(&result.wait()?));
        for dtype in [DType::F32, DType::F16] {
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                let flat = world.comm().reduce_scatter(own(rank, 16, dtype), &counts, op)?;
                let summed = nodes.reduce_scatter(own(rank, 16, dtype), &counts, op)?;
                assert_eq!(read(summed)?, read(flat)?, "exact in any order");
            }
            let part = || own(rank, counts[rank], dtype);
            let flat = world.comm().all_gather(part(), &counts)?;
            assert_eq!(read(nodes.all_gather(part(), &counts)?)?, read(flat)?);
        }
        bytes.iter().for_each(|bytes| bytes.store(0, Ordering::SeqCst));
        nodes.reduce_scatter(own(rank, 16, DType::F32), &[4; 4], ReduceOp::Sum)?.wait()?;
        Ok(bytes.map(|bytes| bytes.load(Ordering::SeqCst)))
    });
    for [inside, across] in sent.unwrap() {
        // Of 64 bytes a flat rank sends the 32 of the other node across.
        assert_eq!((inside, across), (32, 16));
    }
}

fn a_world_has_a_rank() {
    let error = World::threads([], |_| Ok::<_, Error>(())).unwrap_err();
    assert!(matches!(error, Error::Setting { setting: "devices", .. }), "{error}");
}

fn devices_of_two_backends_are_no_world() {
    #[cfg(not(all(feature = "flex", feature = "wgpu")))]
    return println!("skipped: there is one backend");
    #[cfg(all(feature = "flex", feature = "wgpu"))]
    devices_of_two_backends();
}

#[cfg(all(feature = "flex", feature = "wgpu"))]
fn devices_of_two_backends() {
    let devices = [Device::flex(), Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)];
    let error = World::threads(devices, |_| Ok::<_, Error>(())).unwrap_err();
    assert!(matches!(error, Error::Devices { rank: 1, .. }), "{error}");
}
