//! Steps on N ranks, which equal those on one rank.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::LinearConfig;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_pack::Reader;
use distmuon::comm::World;
use distmuon::distributed::plan::Balancing;
use distmuon::distributed::{CostSource, DistMuonConfig, Gradients};
use distmuon::{MomentumConfig, MuonConfig, RoutingRule};
use distmuon_testing::device::has_type;
use distmuon_testing::models::{Fixed, Layers, bits, gradients, weights};
use distmuon_testing::naive::Naive;
use distmuon_testing::watched::{Event, watched};
use distmuon_testing::worlds::{self, Case, cases};
use distmuon_testing::{excused, lacks};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{Net, config, device, ranks, ranks_here, trained};

/// A configuration for models without experts.
fn config_of_plain_models() -> DistMuonConfig {
    DistMuonConfig::new().with_small_elements(16)
}

pub const EVERYWHERE: &[Case] = cases![
    steps_on_any_number_of_ranks_are_bit_equal_to_one_rank,
    clipping_by_the_norm_of_all_gradients_is_bit_equal_on_ranks,
    measured_costs_are_the_same_on_all_ranks,
    different_gradients_of_ranks_are_averaged,
    steps_are_those_of_an_optimizer_that_gathers_everything,
    parameters_without_gradients_stay_and_missing_gradients_count_as_zeros,
    a_non_finite_gradient_skips_its_parameter_on_all_ranks,
    delays_between_steps_do_not_change_results,
    accumulated_gradients_on_ranks_are_bit_equal_to_one_device,
    frozen_parameters_are_neither_planned_nor_changed,
    a_model_in_the_devices_default_type_is_trained,
    gradients_whose_squares_overflow_are_clipped_and_not_rejected,
    clipping_in_half_precision_is_as_precise_as_its_gradients,
];

pub const IN_PROCESS: &[Case] = cases![
    one_rank_is_bit_equal_to_the_single_device_optimizer,
    ranks_divide_the_memory_of_shards_and_states,
    a_bucket_is_updated_while_others_are_reduced_and_gathered,
];

fn steps_on_any_number_of_ranks_are_bit_equal_to_one_rank() {
    let alone = trained(1, 10, &config());
    for balancing in [Balancing::Greedy, Balancing::BlockCyclic] {
        for (bucket_mb, in_flight) in [(25.0, 3), (0.001, 3), (0.001, 1), (0.01, 100)] {
            let config = config()
                .with_balancing(balancing)
                .with_bucket_mb(Some(bucket_mb))
                .with_in_flight(in_flight);
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

fn clipping_by_the_norm_of_all_gradients_is_bit_equal_on_ranks() {
    let clipped = config().with_max_norm(Some(0.5));
    let alone = trained(1, 5, &clipped);
    assert!(alone != trained(1, 5, &config()), "it clips");
    assert!(trained(1, 5, &config().with_max_norm(Some(1e9))) == trained(1, 5, &config()));
    for count in [2, 4] {
        for bucket_mb in [25.0, 0.001] {
            assert!(trained(count, 5, &clipped.clone().with_bucket_mb(Some(bucket_mb))) == alone);
        }
    }
}

fn measured_costs_are_the_same_on_all_ranks() {
    let measured = config().with_costs(CostSource::Measured);
    assert!(
        trained(3, 2, &measured.with_gradients(Gradients::Averaged)) == trained(1, 2, &config())
    );
}

fn different_gradients_of_ranks_are_averaged() {
    let local_gradients =
        |world: &World, net: &Net, step: u64| net.gradients(step * 10 + world.rank() as u64);
    for count in [2, 3, 4] {
        let spread = ranks(count, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().init(&world, &net)?;
            for step in 0..5 {
                let gradients = local_gradients(&world, &net, step);
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

impl ModuleVisitor for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.val().shape();
        let mut sum = vec![0f64; shape.num_elements()];
        for rank in 0..self.count {
            let grads = self.net.gradients(self.step * 10 + rank as u64);
            let grad = grads.get::<D>(param.id).expect("every parameter has a gradient");
            let grad = grad.into_data();
            sum.iter_mut().zip(grad.iter::<f64>()).for_each(|(sum, x)| *sum += x);
        }
        let mean: Vec<f32> = sum.iter().map(|sum| (sum / self.count as f64) as f32).collect();
        let device = param.val().device().inner();
        self.grads.register::<D>(
            param.id,
            Tensor::from_data(TensorData::new(mean, shape), (&device, DType::F32)),
        );
    }
}

fn one_rank_is_bit_equal_to_the_single_device_optimizer() {
    let mut net = Net::new(&device());
    let mut single = config().muon.init(&net);
    for step in 0..10 {
        let gradients = net.gradients(step);
        net = single.step(0.01, net, gradients);
    }
    assert!(net.weights() == trained(1, 10, &config()));
}

fn steps_are_those_of_an_optimizer_that_gathers_everything() {
    let config = config();
    for count in [1, 2, 3, 4] {
        let run = ranks(count, |world| {
            let net = Net::new(world.device());
            let (mut sharded, mut whole) = (net.clone(), net.clone());
            let mut optim = config.init(&world, &sharded)?;
            let mut naive = Naive::new(&world, &config, &whole)?;
            for step in 0..4 {
                // Other gradients on every rank.
                let gradients = || net.gradients(10 * step + world.rank() as u64);
                sharded = optim.step(0.01, sharded, gradients())?;
                whole = naive.step(0.01, whole, gradients())?;
            }
            Ok((sharded.values(), whole.values()))
        });
        for (sharded, whole) in run.unwrap() {
            for (sharded, whole) in sharded.iter().zip(&whole) {
                assert!((sharded - whole).abs() < 1e-5, "{count} ranks: {sharded} for {whole}");
            }
        }
    }
}

fn parameters_without_gradients_stay_and_missing_gradients_count_as_zeros() {
    let run = |count: usize, has: fn(usize) -> bool| {
        let runs = ranks(count, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().init(&world, &net)?;
            let before = bits(&net.experts.val());
            let mut gradients = net.gradients(1);
            let (id, shared) = (net.experts.id, net.gradients(2).remove::<3>(net.experts.id));
            gradients.remove::<3>(id);
            if has(world.rank()) {
                gradients.register(id, shared.expect("the experts have a gradient"));
            }
            net = optim.step(0.01, net, gradients)?;
            assert!(optim.skipped_steps().read().is_empty());
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

fn a_non_finite_gradient_skips_its_parameter_on_all_ranks() {
    for count in [1, 3] {
        let runs = ranks(count, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_bucket_mb(Some(0.002)).init(&world, &net)?;
            let before = net.clone();
            let mut gradients = net.gradients(1);
            if world.rank() == 0 {
                for (id, dims) in
                    [(net.embedding.weight.id, [37, 21]), (net.wide.weight.id, [5, 31])]
                {
                    let grad = Tensor::<2>::full(dims, 1.0, (&Device::default(), DType::F32));
                    gradients.register(id, grad.slice_fill([1..2, 1..2], f32::NAN));
                }
            }
            net = optim.step(0.01, net, gradients)?;
            assert_eq!(bits(&net.embedding.weight.val()), bits(&before.embedding.weight.val()));
            assert_eq!(bits(&net.wide.weight.val()), bits(&before.wide.weight.val()));
            assert_ne!(bits(&net.tall.weight.val()), bits(&before.tall.weight.val()));
            assert_ne!(bits(&net.head.weight.val()), bits(&before.head.weight.val()));
            Ok(optim.skipped_steps().read().into_iter().collect::<Vec<_>>())
        });
        for skipped in runs.unwrap() {
            let expected = [("embedding.weight".to_owned(), 1), ("wide.weight".to_owned(), 1)];
            assert_eq!(skipped, expected);
        }
    }
}

fn delays_between_steps_do_not_change_results() {
    let alone = trained(1, 20, &config());
    let delayed = ranks(4, |world| {
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config().with_bucket_mb(Some(0.001)).init(&world, &net)?;
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

fn accumulated_gradients_on_ranks_are_bit_equal_to_one_device() {
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

fn frozen_parameters_are_neither_planned_nor_changed() {
    let runs = ranks(2, |world| {
        let mut net = Net::new(world.device());
        net.wide = net.wide.no_grad();
        net.embedding = net.embedding.no_grad();
        let mut optim = config().init(&world, &net)?;
        let frozen = |net: &Net| [bits(&net.wide.weight.val()), bits(&net.embedding.weight.val())];
        let (before, tall) = (frozen(&net), bits(&net.tall.weight.val()));
        let planned: Vec<_> =
            optim.plan().parameters().iter().map(|parameter| parameter.path.clone()).collect();
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

/// Configuring the device is Burn's way to train in half precision.
fn a_model_in_the_devices_default_type_is_trained() {
    let dtype = Tensor::<1>::ones([1], &Device::default()).dtype();
    if dtype == DType::F64 {
        excused("no collective takes float64");
        return;
    }
    let runs = ranks(2, |world| {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(world.device());
        let mut net = world.broadcast(vec![linear(16, 16), linear(16, 8), linear(8, 4)])?;
        assert_eq!(net[0].weight.val().dtype(), dtype);
        let mut optim = config_of_plain_models().init(&world, &net)?;
        let before = weights(&net);
        for step in 0..3 {
            let gradients = gradients(&net, step);
            net = optim.step(0.05, net, gradients)?;
        }
        assert!(optim.skipped_steps().read().is_empty());
        assert!(weights(&net).iter().zip(&before).all(|(new, old)| new != old));
        Ok(weights(&net))
    });
    let runs = runs.unwrap();
    assert!(runs[0] == runs[1], "the ranks agree");
}

fn gradients_whose_squares_overflow_are_clipped_and_not_rejected() {
    for max_norm in [None, Some(1.0)] {
        let runs = ranks(2, |world| {
            let net = Net::new(world.device());
            let mut optim = config().with_max_norm(max_norm).init(&world, &net)?;
            let mut gradients = net.gradients(1);
            let huge = Tensor::<2>::full([5, 31], 1e25, (&Device::default(), DType::F32));
            gradients.register(net.wide.weight.id, huge);
            let net = optim.step(0.01, net, gradients)?;
            let finite = net.values().iter().all(|value| value.is_finite());
            Ok((finite, optim.skipped_steps().read().len()))
        });
        for run in runs.unwrap() {
            assert_eq!(run, (true, 0), "{max_norm:?}");
        }
    }
}

/// For float16 gradients with a norm of about a million, the factor itself would be a subnormal
/// number.
fn clipping_in_half_precision_is_as_precise_as_its_gradients() {
    if !has_type(FloatDType::F16) {
        lacks("float16");
        return;
    }
    let momentum = |dtype: DType| {
        let runs = ranks(2, |world| {
            let value = Tensor::<2>::full([64, 64], 0.01, (world.device(), dtype)).require_grad();
            let net = vec![Param::from_tensor(value)];
            let muon = MuonConfig::new()
                .with_rule(RoutingRule::muon("."))
                .with_momentum(MomentumConfig::new().with_nesterov(false));
            let config = DistMuonConfig::new().with_muon(muon).with_max_norm(Some(1.0));
            let mut optim = config.init(&world, &net)?;
            let mut gradients = GradientsParams::new();
            let huge = Tensor::<2>::full([64, 64], 16384.0, (&Device::default(), dtype));
            gradients.register(net[0].id, huge);
            optim.step(0.0, net, gradients)?;
            let record = optim.to_record()?.into_bytes().expect("a record can be written");
            let reader = Reader::from_bytes(record);
            let reader = reader.expect("the record was just written");
            let names = reader.tensor_names();
            let name = names.iter().find(|name| name.ends_with(".momentum"));
            let name = name.expect("the record has a momentum");
            let data = reader.tensor_data(name).expect("the record has this tensor");
            // The momentum of float16 parameters is float32.
            Ok(TensorData::from_bytes_vec(data, [64 * 64], DType::F32).iter::<f64>().next())
        });
        runs.unwrap()[0].expect("the momentum has elements")
    };
    let [half, single] = [DType::F16, DType::F32].map(momentum);
    let error = (half / single - 1.0).abs();
    assert!(error < 1e-3, "{half} in float16, {single} in float32");
}

fn ranks_divide_the_memory_of_shards_and_states() {
    for count in [1, 2, 4, 8] {
        let reports = ranks_here(count, |world| {
            let net = Layers::square(16, 32, world.device());
            let net = net.map(&mut Fixed::new(1));
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
            // Clipping holds all shards of the gradients at once.
            let held = memory.parameters.now + memory.shards.peak + memory.states.now;
            assert_eq!(held, p + 2 * p / count, "{count} ranks\n{memory}");
            assert_eq!(memory.gradients.peak, p);
            assert_eq!((memory.gradients.now, memory.shards.now, memory.buffers.now), (0, 0, 0));
            assert!(memory.total.peak <= 2 * p + 2 * p / count + p, "{memory}");
        }
    }
}

/// The calls of a step on the first of two ranks, with one matrix in every bucket: their names, and
/// `true` for the wait.
fn calls_of_a_step(config: &DistMuonConfig) -> Vec<(&'static str, bool)> {
    let events = Arc::new(Mutex::new(vec![]));
    let run = ranks_here(2, |world| {
        let of_rank_0 = events.clone();
        let watched = watched(&world, move |event: Event| {
            if event.rank == 0 {
                of_rank_0.lock().unwrap().push((event.collective, event.waits));
            }
            Ok(())
        });
        let net = watched.broadcast(Layers::square(6, 16, world.device()))?;
        let mut optim = config.init(&watched, &net)?;
        let gradients = gradients(&net, 1);
        if world.rank() == 0 {
            events.lock().unwrap().clear();
        }
        optim.step(0.01, net, gradients).map(drop)
    });
    run.unwrap();
    let mut events = events.lock().unwrap();
    events.drain(..).filter(|(name, _)| !name.ends_with("bytes")).collect()
}

fn a_bucket_is_updated_while_others_are_reduced_and_gathered() {
    let config = DistMuonConfig::new().with_bucket_mb(Some(1e-4)).with_in_flight(2);
    let calls = calls_of_a_step(&config);
    // The time of the call or the wait of a bucket.
    let time = |name: &str, waits: bool, bucket: usize| {
        let mut times = (0..calls.len()).filter(|time| calls[*time] == (name, waits));
        times.nth(bucket).unwrap_or_else(|| panic!("{name} of bucket {bucket} in {calls:?}"))
    };
    for bucket in 0..6 {
        // The update begins when the bucket is reduced, and ends when it is sent.
        let update = time("reduce_scatter", true, bucket)..time("all_gather", false, bucket);
        assert!(!update.is_empty());
        let overlaps = |name: &str, other: usize| {
            time(name, false, other) < update.start && update.end < time(name, true, other)
        };
        assert!(bucket == 5 || overlaps("reduce_scatter", bucket + 1), "{bucket}: {calls:?}");
        assert!(bucket == 0 || overlaps("all_gather", bucket - 1), "{bucket}: {calls:?}");
    }
    // The counts of skipped steps come last, and no bucket waits for them.
    assert!(time("all_gather", false, 5) < time("all_reduce", false, 0));

    // Clipping depends on all gradients.
    let calls = calls_of_a_step(&config.with_max_norm(Some(1.0)));
    let last_reduced = calls.iter().rposition(|call| *call == ("reduce_scatter", true));
    let first_sent = calls.iter().position(|call| *call == ("all_gather", false));
    assert!(last_reduced < first_sent, "{calls:?}");
}
