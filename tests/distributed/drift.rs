//! The comparison of what ranks hold in common: bits that differ are found and named.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistMuonConfig, Gradients, Layout, Mesh, Place, Publish};
use distmuon::{DistModuleOptimizer, Error, Result};
use distmuon_testing::models::{Fixed, Layers, bits, gradients};
use distmuon_testing::precision::Rounded;
use distmuon_testing::watched::{watched, with_counted_values};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::owned::{self, train_on};
use crate::{Net, config, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![
    checks_find_nothing_in_a_run_without_faults,
    checks_find_nothing_on_any_layout_and_change_no_result,
];

pub const IN_PROCESS: &[Case] = cases![
    a_bit_that_flips_in_a_parameter_is_found_on_all_ranks,
    a_bit_that_flips_in_a_slice_is_found_on_all_ranks,
    a_bit_that_flips_in_a_replica_of_a_part_is_found_on_all_ranks,
    checks_go_by_the_step_of_a_run_that_is_resumed,
    a_matrix_that_drifts_between_checks_is_replaced_by_its_owners,
    frozen_parameters_and_running_statistics_are_not_compared,
    a_check_is_one_small_message,
    a_check_costs_less_than_a_hundredth_of_its_steps,
];

/// Replaces the last element of a parameter, or of this rank's part of it, by one with another bit,
/// or by itself.
struct Flip {
    names: Vec<String>,
    path: &'static str,
    is_part: bool,
    /// The bits that flip.
    bits: u32,
    found: bool,
}

impl Flip {
    fn of<M: Module>(model: M, path: &'static str, is_part: bool, bits: u32) -> M {
        let mut flip = Self { names: vec![], path, is_part, bits, found: false };
        let model = model.map(&mut flip);
        assert!(flip.found, "the model has `{path}`");
        model
    }
}

impl ModuleMapper for Flip {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.names.join(".");
        let is_part = path.ends_with(".part");
        if is_part != self.is_part || !(path == self.path || is_part && path.starts_with(self.path))
        {
            return param;
        }
        self.found = true;
        param.map(|old| {
            let mut values: Vec<f32> = old.to_data().iter::<f32>().collect();
            let last = values.last_mut().expect("the parameter has elements");
            *last = f32::from_bits(last.to_bits() ^ self.bits);
            let data = TensorData::new(values, old.shape());
            Tensor::from_data(data, (&old.device(), old.dtype())).require_grad()
        })
    }
}

/// Asserts that every rank has the error of a parameter.
fn assert_drifted(errors: &[Error], path: &str, rank: usize) {
    for error in errors {
        let Error::Drifted { parameter, part, ranks, .. } = error else { panic!("{error}") };
        assert_eq!((&**parameter, &**part, &**ranks), (path, "value", &[rank][..]), "{error}");
        assert!(error.to_string().contains(&format!("other bits on rank {rank}")), "{error}");
    }
}

/// The error of the third step, with a bit that flips on a rank before a step.
fn flipped(
    layout: &Layout,
    gradients_of: Gradients,
    (path, rank, before): (&'static str, usize, u64),
) -> Result<Error> {
    let world = layout.mesh().world();
    let mut net = layout.shard(Net::new(world.device()))?;
    let config = config().with_check_every(3).with_gradients(gradients_of);
    let mut optim = config.init_on(layout, &net)?;
    for step in 0..2 {
        if step == before && world.rank() == rank {
            net = Flip::of(net, path, false, 1);
        }
        let gradients = gradients(&net, step);
        net = optim.step(0.01, net, gradients)?;
    }
    if before == 2 && world.rank() == rank {
        net = Flip::of(net, path, false, 1);
    }
    let gradients = gradients(&net, 2);
    Ok(optim.step(0.01, net, gradients).map(|_| ()).unwrap_err())
}

fn a_bit_that_flips_in_a_parameter_is_found_on_all_ranks() {
    for (path, count, rank, before) in [
        ("norm.gamma", 2, 1, 1), // small: every rank updates it
        ("norm.gamma", 3, 0, 1),
        ("wide.weight", 4, 2, 2), // a matrix
        ("embedding.weight", 3, 1, 2),
        ("experts", 2, 1, 2),
    ] {
        // Averaged, they are never reduced by a step.
        for gradients in [Gradients::PerRank, Gradients::Averaged] {
            let errors = ranks_here(count, |world| {
                let layout = Layout::new(&Mesh::flat(&world)).with_muon(config().muon);
                flipped(&layout, gradients, (path, rank, before))
            });
            assert_drifted(&errors.unwrap(), path, rank);
        }
    }
}

/// Otherwise a run that is resumed more often than it is checked is never checked.
fn checks_go_by_the_step_of_a_run_that_is_resumed() {
    let folder = Folder::create();
    let path = folder.path().join("run.bpk");
    let errors = ranks_here(2, |world| {
        let config = config().with_check_every(4);
        let start = || -> Result<(Net, DistModuleOptimizer)> {
            let net = world.broadcast(Net::new(world.device()))?;
            let optim = config.init(&world, &net)?;
            Ok((net, optim))
        };
        let (mut net, mut optim) = start()?;
        for step in 0..2 {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        optim.save(&path, &net, &())?;
        let (net, optim) = start()?;
        let (net, mut optim, ()) = optim.load(&path, net)?;
        let net = Flip::of(net, "norm.gamma", false, u32::from(world.rank() == 1));
        let third = gradients(&net, 2);
        let net = optim.step(0.01, net, third)?;
        let fourth = gradients(&net, 3);
        Ok(optim.step(0.01, net, fourth).map(|_| ()).unwrap_err())
    });
    assert_drifted(&errors.unwrap(), "norm.gamma", 1);
}

/// A copy is gone with the next step, and all ranks take the owner's over.
fn a_matrix_that_drifts_between_checks_is_replaced_by_its_owners() {
    let run = |faulty: Option<usize>| {
        let run = ranks_here(3, |world| {
            let mut net = world.broadcast(Net::new(world.device()))?;
            let config = config().with_check_every(3);
            let mut optim = config.init(&world, &net)?;
            let owner = {
                let mut parameters = optim.routing().routes().iter();
                let index = parameters.position(|route| route.path == "wide.weight");
                optim.plan().owner(index.expect("the model has this matrix"), 0)
            };
            for step in 0..3 {
                let faulty = faulty.map(|offset| (owner + offset) % 3);
                if step == 1 && faulty == Some(world.rank()) {
                    net = Flip::of(net, "wide.weight", false, 1 << 20);
                }
                let gradients = gradients(&net, step);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(net.weights())
        });
        let run = run.unwrap();
        assert!(run.iter().all(|weights| *weights == run[0]), "the ranks agree");
        run
    };
    let right = run(None);
    assert!(run(Some(1)) == right, "a copy that differs does no harm");
    assert!(run(Some(0)) != right, "the owner's reaches all ranks");
}

#[derive(Module, Debug)]
struct Normalized {
    trained: Linear,
    frozen: Linear,
    norm: BatchNorm,
}

fn frozen_parameters_and_running_statistics_are_not_compared() {
    let statistics = ranks_here(2, |world| {
        let device = world.device();
        let linear = || LinearConfig::new(8, 8).init(device).map(&mut Fixed::new(3));
        let net = Normalized {
            trained: linear(),
            frozen: linear().no_grad(),
            norm: BatchNormConfig::new(8).init(device).map(&mut Rounded(DType::F32)),
        };
        let mut net = world.broadcast(net)?;
        let mut optim = DistMuonConfig::new().with_check_every(1).init(&world, &net)?;
        // A bit that every type has.
        let own = u32::from(world.rank() == 1) << 20;
        net.frozen = Flip::of(net.frozen, "weight", false, own).no_grad();
        for step in 0..3 {
            let x = Tensor::<2>::ones([4, 8], (device, DType::F32));
            let x = x * (1 + world.rank() + step) as f64;
            let x = Tensor::cat(vec![x.clone(), x * -0.5], 0);
            let x = net.norm.forward(net.frozen.forward(net.trained.forward(x)));
            let gradients = GradientsParams::from_grads(x.square().mean().backward(), &net);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(bits(&net.norm.running_mean.value()))
    });
    let statistics = statistics.unwrap();
    assert_ne!(statistics[0], statistics[1], "the ranks have other data");
}

fn a_bit_that_flips_in_a_slice_is_found_on_all_ranks() {
    for (path, rank) in [("tall.weight", 3), ("tall.weight", 2), ("norm.beta", 0)] {
        let errors = ranks_here(4, |world| {
            let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::model("tp", 2)])?;
            let layout = Layout::new(&mesh).with_muon(config().muon).with_place(Place::shard(
                r"^tall\.weight$",
                "tp",
                0,
            ));
            flipped(&layout, Gradients::PerRank, (path, rank, 2))
        });
        assert_drifted(&errors.unwrap(), path, rank);
    }
}

fn a_bit_that_flips_in_a_replica_of_a_part_is_found_on_all_ranks() {
    a_flip_of_a_replica_is_found("embedding.weight", |layout| layout);
    a_flip_of_a_replica_is_found("embedding.weight", |layout| layout.rows("gpu"));
    a_flip_of_a_replica_is_found("wide.weight", |layout| layout.rows("gpu"));
}

fn a_flip_of_a_replica_is_found(path: &'static str, lay: fn(Layout) -> Layout) {
    let errors = ranks_here(4, |world| {
        let mesh = Mesh::new(&world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
        let layout = lay(owned::layout_on(&mesh));
        let device = world.device();
        let mut net = layout.shard(owned::Net::new(device))?;
        let mut optim = owned::config().with_check_every(2).init_on(&layout, &net)?;
        let mut step = |net: owned::Net, step| {
            let loss = net.loss(owned::tokens(world.rank(), step, device));
            let gradients = layout.backward(&loss, &net)?;
            optim.step(0.01, net, gradients)
        };
        net = step(net, 0)?;
        // On all ranks: a part that one rank alone has replaced would be gathered at another time.
        net = Flip::of(net, path, true, u32::from(world.rank() == 2));
        Ok(step(net, 1).map(|_| ()).unwrap_err())
    });
    assert_drifted(&errors.unwrap(), path, 2);
}

fn checks_find_nothing_in_a_run_without_faults() {
    for count in [2, 4].into_iter().filter(worlds::has) {
        let trained = |every| crate::trained(count, 100, &config().with_check_every(every));
        assert!(trained(1) == trained(0), "{count} ranks");
    }
}

/// The layout of a world.
type Of = fn(&World) -> Result<Layout>;

fn checks_find_nothing_on_any_layout_and_change_no_result() {
    let layouts: &[(usize, Of)] = &[
        (2, |world| Ok(owned::layout(world))),
        (3, |world| Ok(owned::layout(world).rows("dp"))),
        (2, |world| Ok(owned::layout(world).overlap_backward())),
        (3, |world| Ok(Layout::new(&Mesh::flat(world)).with_muon(owned::config().muon))),
        (4, |world| {
            Ok(owned::layout_on(&Mesh::new(world, [Axis::data("node", 2), Axis::data("gpu", 2)])?))
        }),
        (4, |world| {
            let mesh = Mesh::new(world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
            Ok(owned::layout_on(&mesh).rows("gpu"))
        }),
    ];
    for (index, (count, layout)) in layouts.iter().enumerate() {
        for publish in [Publish::Now, Publish::AtFirstUse] {
            let run = |every| {
                let config = owned::config().with_check_every(every).with_publish(publish);
                ranks(*count, |world| train_on(&world, &layout(&world)?, &config, 4, 1, DType::F32))
            };
            assert!(run(1).unwrap() == run(0).unwrap(), "layout {index}, {publish:?}");
        }
    }
}

/// The calls of a rank in five steps, by name.
fn calls(count: usize, config: &DistMuonConfig) -> BTreeMap<&'static str, usize> {
    let mut calls = ranks_here(count, |world| {
        let calls = Arc::<Mutex<BTreeMap<_, usize>>>::default();
        let counts = calls.clone();
        let world = watched(&world, move |event| {
            *counts.lock().unwrap().entry(event.collective).or_default() += 1;
            Ok(())
        });
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config.init(&world, &net)?;
        for step in 0..5 {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        let calls = calls.lock().unwrap().clone();
        Ok(calls)
    });
    calls.as_mut().unwrap().swap_remove(0)
}

fn a_check_is_one_small_message() {
    let with = |count, every| calls(count, &config().with_check_every(every));
    let mut without = with(3, 0);
    assert_eq!(with(3, 6), without, "no check is due");
    for (every, checks) in [(5, 1), (2, 2), (1, 5)] {
        *without.get_mut("or_bytes").unwrap() += checks;
        assert_eq!(with(3, every), without, "every {every}");
        *without.get_mut("or_bytes").unwrap() -= checks;
    }
    assert_eq!(with(1, 1), with(1, 0), "one rank");
    let bytes = |every| {
        let bytes = ranks_here(3, |world| {
            let (world, values) = with_counted_values(&world);
            let net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_check_every(every).init(&world, &net)?;
            values.lock().unwrap().clear();
            let gradients = gradients(&net, 1);
            optim.step(0.01, net, gradients)?;
            let bytes: usize = values.lock().unwrap().values().sum();
            Ok(bytes)
        });
        bytes.unwrap()
    };
    for (with, without) in bytes(1).into_iter().zip(bytes(0)) {
        assert!((8..64).contains(&(with - without)), "{with} and {without}");
    }
}

/// The default is a check in a thousand steps: it may take the time of ten.
fn a_check_costs_less_than_a_hundredth_of_its_steps() {
    const STEPS: u64 = 8;
    let time = |every| {
        let times = ranks_here(2, |world| {
            let layers = Layers::square(4, 512, world.device());
            let mut net = world.broadcast(layers)?;
            let config = DistMuonConfig::new().with_check_every(every);
            let mut optim = config.init(&world, &net)?;
            let mut shortest = Duration::MAX;
            for step in 0..STEPS {
                let gradients = gradients(&net, step);
                world.comm().barrier()?;
                let start = Instant::now();
                net = optim.step(0.01, net, gradients)?;
                world.comm().barrier()?;
                shortest = shortest.min(start.elapsed());
            }
            Ok(shortest)
        });
        times.unwrap()[0]
    };
    let (with, without) = (time(1), time(0));
    let check = with.saturating_sub(without);
    println!("a step takes {without:?}, a check of 4 MB {check:?}");
    assert!(check < 10 * without, "{with:?}, without {without:?}");
}
