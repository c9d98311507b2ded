//! The way from one device to ranks: `World::launch`, `DistMuonConfig::start`, and the optimizer's
//! backward pass.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::RunningState;
use burn::module::{Module, Param, ParamGroup, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn::tensor::{Bool, Bytes, DType, Device, Distribution, Int, Shape, Tensor};
use distmuon::distributed::{Axis, GradDtype, Layout, LossScaleConfig, Mesh, Place};
use distmuon::{DistMuonConfig, Error, MuonConfig, Result, RoutingRule, World};
use distmuon_testing::device::has_type;
use distmuon_testing::models::{Fixed, weights};
use distmuon_testing::panic_message;

const WIDTH: usize = 64;
const RANKS: usize = 3;

/// The placements, by name.
type OnWorld = fn(&World) -> Layout;
const PLACEMENTS: [(&str, OnWorld); 3] = [
    ("replicated", |world| world.into()),
    ("reduced", |world| Layout::from(world).overlap_backward()),
    ("owned", |world| Layout::from(world).owned("dp")),
];

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

/// A layer whose weight counts how often it is initialised.
fn counting(device: &Device, draws: &Arc<AtomicUsize>) -> Linear {
    let draws = draws.clone();
    let init = move |device: &Device, is_trained| {
        draws.fetch_add(1, Ordering::SeqCst);
        Tensor::ones([WIDTH, WIDTH], device).set_require_grad(is_trained)
    };
    let shape = Shape::from([WIDTH, WIDTH]);
    let weight = Param::uninitialized(ParamId::new(), init, device.clone(), true, shape);
    Linear { weight, ..linear(device) }
}

#[test]
fn rank_0_alone_draws_initial_values() {
    for (name, layout) in PLACEMENTS {
        let draws = World::launch(RANKS, |world| {
            let draws = Arc::new(AtomicUsize::new(0));
            let model = counting(world.device(), &draws);
            let (model, optim) = DistMuonConfig::new().start(layout(&world), model)?;
            let whole = optim.layout().unshard(&model)?;
            let sum = whole.weight.val().inner().sum().into_scalar::<f32>();
            assert_eq!(sum, (WIDTH * WIDTH) as f32, "{name}");
            assert!(whole.weight.is_require_grad(), "{name}");
            world.all_gather_value(&draws.load(Ordering::SeqCst))
        });
        assert_eq!(draws.unwrap(), [1, 0, 0], "{name}");
    }
}

#[test]
fn the_values_of_rank_0_replace_those_of_other_ranks() {
    let rows: OnWorld = |world| Layout::from(world).rows("dp");
    // Without a group of ranks that compute together, since nothing is computed.
    let cut: OnWorld = |world| {
        let mesh = Mesh::new(world, [Axis::data("dp", 1), Axis::model("tp", RANKS)]);
        let layout = Layout::new(&mesh.expect("a mesh of all ranks"));
        layout.with_place(Place::shard("weight", "tp", 1))
    };
    let expected = weights(&linear(&Device::default().autodiff()).map(&mut Fixed::new(0)));
    for (name, layout) in PLACEMENTS.into_iter().chain([("rows", rows), ("cut", cut)]) {
        let values = World::launch(RANKS, |world| {
            let model = linear(world.device()).map(&mut Fixed::new(world.rank() as u64));
            let (model, optim) = DistMuonConfig::new().start(layout(&world), model)?;
            world.all_gather_value(&weights(&optim.layout().unshard(&model)?))
        });
        for (rank, values) in values.unwrap().iter().enumerate() {
            assert!(*values == expected, "{name}, rank {rank}");
        }
    }
}

/// With parameters that no optimizer trains.
#[derive(Module, Debug)]
struct WithBuffers {
    linear: Linear,
    norm: BatchNorm,
    frozen: Param<Tensor<1>>,
    counts: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

impl WithBuffers {
    fn new(device: &Device) -> Self {
        let frozen = Tensor::zeros([3], device);
        let counts = Tensor::<1, Int>::zeros([3], device);
        let mask = counts.clone().equal_elem(0);
        Self {
            linear: LinearConfig::new(WIDTH, WIDTH).init(device),
            norm: BatchNormConfig::new(WIDTH).init(device),
            frozen: Param::from_tensor(frozen).set_require_grad(false),
            counts: Param::initialized(ParamId::new(), counts),
            mask: Param::initialized(ParamId::new(), mask),
        }
        .map(&mut Fixed::new(1))
    }

    fn running_mean(&self) -> Vec<f32> {
        self.norm.running_mean.value_sync().into_data().iter().collect()
    }
}

/// Burn's clones and forks share them.
#[test]
fn ranks_that_are_threads_have_running_statistics_of_their_own() {
    let device = || Device::default().autodiff();
    for (name, layout) in PLACEMENTS {
        let model = WithBuffers::new(&device());
        let before = model.running_mean();
        let run = World::threads_with(vec![device(); 2], model.clone(), |world, model| {
            let (model, _) = DistMuonConfig::new().start(layout(&world), model)?;
            for _ in 0..3 {
                let of_rank = Distribution::Normal(10.0 * world.rank() as f64, 1.0);
                model.norm.forward(Tensor::<2>::random([8, WIDTH], of_rank, world.device()));
            }
            let is_trained = [&model.linear.weight].map(|param| param.is_require_grad());
            assert!(is_trained[0] || name == "owned");
            assert!(!model.frozen.is_require_grad(), "{name}");
            Ok::<_, Error>(model.running_mean())
        });
        let means = run.unwrap().into_iter().map(|means| means.iter().sum::<f32>());
        let means: Vec<f32> = means.map(|sum| sum / WIDTH as f32).collect();
        // 3 updates with a momentum of 0.1 towards means of 0 and 10, from a value below 1.
        assert!(means[0].abs() < 1.5 && (2.0..5.0).contains(&means[1]), "{name}: {means:?}");
        assert_eq!(model.running_mean(), before, "{name}: the ranks have forks");
    }
}

#[test]
fn values_that_are_never_trained_have_to_be_the_same_on_all_ranks() {
    type Change = fn(&mut WithBuffers, i64);
    let changes: [(&str, Change, bool); 4] = [
        ("counts", |model, rank| model.counts = model.counts.clone().map(|x| x + rank), false),
        (
            "mask",
            |model, rank| {
                model.mask = model.mask.clone().map(|x| if rank == 0 { x } else { x.bool_not() })
            },
            false,
        ),
        ("frozen", |model, rank| model.frozen = model.frozen.clone().map(|x| x + rank), true),
        (
            "norm.running_mean",
            |model, rank| {
                model.norm.running_mean =
                    RunningState::new(Tensor::full([WIDTH], rank, &model.frozen.val().device()));
            },
            true,
        ),
    ];
    for (path, change, is_copied) in changes {
        let model = |world: &World| {
            let mut model = WithBuffers::new(world.device());
            change(&mut model, world.rank() as i64);
            model
        };
        let error =
            World::launch(2, |world| DistMuonConfig::new().init(&world, &model(&world)).map(drop));
        let error = error.unwrap_err();
        assert!(
            matches!(&error, Error::ModelsDiffer { parameter, .. } if parameter == path),
            "{path}: {error}"
        );
        let started =
            World::launch(2, |world| DistMuonConfig::new().start(&world, model(&world)).map(drop));
        match started {
            Ok(_) => assert!(is_copied, "{path}"),
            Err(error) => assert!(!is_copied && error.to_string().contains(path), "{error}"),
        }
    }
}

#[test]
fn initial_values_that_the_other_ranks_do_not_expect_are_an_error() {
    for (name, layout) in PLACEMENTS {
        let error = World::launch(2, |world| {
            let mut model = linear(world.device());
            model.weight = model.weight.init_mapper(|weight| weight.cast(DType::BF16));
            DistMuonConfig::new().start(layout(&world), model).map(drop)
        });
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Parameter { rank: 0, .. }), "{name}: {error:?}");
        let error = error.to_string();
        assert!(error.contains("`weight`") && error.contains("expected f32, got bf16"), "{error}");
    }
    // Alone, a rank knows of all types.
    let world = World::alone(Device::default().autodiff());
    let mut model = linear(world.device());
    model.weight = model.weight.init_mapper(|weight| weight.cast(DType::BF16));
    DistMuonConfig::new().start(&world, model).unwrap();
}

/// The weights after two steps of two micro-batches.
fn trained(
    world: &World,
    layout: Layout,
    config: &DistMuonConfig,
    by_hand: bool,
) -> Result<Vec<Vec<u8>>> {
    let model = linear(world.device()).map(&mut Fixed::new(1));
    let (mut model, mut optim) = config.start(layout, model)?;
    for step in 0..2 {
        let loss = |model: &Linear, part: usize| {
            let value = (1 + step + part + world.rank()) as f64;
            let x = Tensor::<2>::full([4, WIDTH], value, world.device());
            model.forward(x).square().mean()
        };
        let grads = if by_hand {
            let scale = optim.loss_scale();
            optim.layout().accumulate(&(loss(&model, 0) * scale), &model)?;
            optim.layout().backward(&(loss(&model, 1) * scale), &model)?
        } else {
            optim.accumulate(&loss(&model, 0), &model)?;
            optim.backward(&loss(&model, 1), &model)?
        };
        model = optim.step(1e-2, model, grads)?;
    }
    Ok(weights(&optim.layout().unshard(&model)?))
}

#[test]
fn the_backward_pass_of_the_optimizer_scales_the_loss_in_every_placement() {
    let scaled = DistMuonConfig::new()
        .with_grad_dtype(GradDtype::Float32)
        .with_loss_scale(Some(LossScaleConfig::new().with_initial(1024.0)));
    for config in [DistMuonConfig::new(), scaled] {
        let mut all = vec![];
        for (_, layout) in PLACEMENTS {
            for by_hand in [true, false] {
                all.push(
                    World::launch(2, |world| trained(&world, layout(&world), &config, by_hand))
                        .unwrap(),
                );
            }
        }
        assert!(all.iter().all(|weights| *weights == all[0]));
    }
}

#[test]
fn gradients_of_burns_backward_pass_do_for_whole_parameters() {
    let world = World::alone(Device::default().autodiff());
    let model = linear(world.device()).map(&mut Fixed::new(2));
    let stepped = |by_burn: bool| {
        let (model, mut optim) = DistMuonConfig::new().start(&world, model.clone()).unwrap();
        let x = Tensor::<2>::ones([4, WIDTH], world.device());
        let loss = model.forward(x).square().mean();
        let grads = match by_burn {
            true => GradientsParams::from_grads(loss.backward(), &model),
            false => optim.backward(&loss, &model).unwrap(),
        };
        weights(&optim.step(1e-2, model, grads).unwrap())
    };
    assert_eq!(stepped(true), stepped(false));
}

/// Programs that keep their gradients in half precision, as accumulation on a small device does.
/// The gradient of an owned parameter is the layout's own.
#[test]
fn gradients_in_half_precision_count_as_their_rounded_values() {
    let trained = |world: &World, layout: Layout, dtypes: &[DType]| {
        let model = linear(world.device()).map(&mut Fixed::new(1));
        let (model, mut optim) = DistMuonConfig::new().start(layout, model)?;
        let x = Tensor::<2>::full([4, WIDTH], (1 + world.rank()) as f64, world.device());
        let mut grads = optim.backward(&model.forward(x).square().mean(), &model)?;
        // A rank that has no part of the mean has no gradient.
        if let Some(grad) = grads.remove::<2>(model.weight.id) {
            let cast = |grad: Tensor<2>, dtype: &DType| {
                let grad = grad.cast(*dtype);
                // A compiler may leave out a conversion that the same kernel takes back.
                world.device().sync().expect("the device works");
                grad
            };
            grads.register(model.weight.id, dtypes.iter().fold(grad, cast));
        }
        let model = optim.step(1e-2, model, grads)?;
        Ok::<_, Error>(weights(&optim.layout().unshard(&model)?))
    };
    let placements = PLACEMENTS.into_iter().filter(|(name, _)| *name != "owned");
    for (name, layout) in placements {
        for half in [DType::F16, DType::BF16].into_iter().filter(|half| has_type((*half).into())) {
            let [kept, widened, exact] = [&[half][..], &[half, DType::F32], &[]].map(|dtypes| {
                World::launch(2, |world| trained(&world, layout(&world), dtypes)).unwrap()
            });
            assert_eq!(kept, widened, "{name}, {half:?}");
            assert_ne!(kept, exact, "{name}, {half:?}");
        }
    }
}

/// The layout's routing is for tables, and for `shard` alone.
#[test]
fn the_configuration_replaces_the_routing_of_the_layout() {
    let with = |rule: MuonConfig| DistMuonConfig::new().with_muon(rule);
    let muon = || MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let adamw = || MuonConfig::new().with_rule(RoutingRule::adamw("weight"));
    for (of_layout, of_start, expected) in [(adamw(), muon(), "Muon"), (muon(), adamw(), "AdamW")] {
        for (name, layout) in PLACEMENTS {
            let optimizers = World::threads(vec![Device::default().autodiff(); 2], |world| {
                let layout = layout(&world).with_muon(of_layout.clone());
                let model = linear(world.device());
                let (_, optim) = with(of_start.clone()).start(&layout, model)?;
                let route = &optim.routing().routes()[0];
                Ok::<_, Error>((route.path.clone(), route.optimizer.clone()))
            });
            for (path, optimizer) in optimizers.unwrap() {
                assert!(path == "weight" && optimizer.starts_with(expected), "{name}: {optimizer}");
            }
        }
    }
}

#[test]
fn launch_returns_the_result_of_the_first_rank_or_the_cause_of_a_failure() {
    assert_eq!(World::launch(RANKS, |world| Ok::<_, Error>(world.rank() + 10)).unwrap(), 10);
    let failed = World::launch(RANKS, |world| match world.rank() {
        1 => Err(Error::EmptyModel),
        _ => world.comm().barrier(),
    });
    assert!(matches!(failed, Err(Error::EmptyModel)), "{failed:?}");
    let none = World::launch(0, |_| Ok::<_, Error>(()));
    assert!(matches!(none, Err(Error::Usage { .. })), "{none:?}");
}

#[test]
fn parts_of_a_batch_follow_each_other() {
    let parts = World::launch(RANKS, |world| {
        let part = world.part_of(20..28);
        world.all_gather_value(&(part.start, part.end))
    });
    assert_eq!(parts.unwrap(), [(20, 22), (22, 25), (25, 28)]);
}

/// A model of layers that are stored in another shape than they have, and of parameters that stay
/// on all ranks.
fn transposed(device: &Device) -> Vec<Linear> {
    layers(device).map(&mut Fixed::new(3))
}

fn layers(device: &Device) -> Vec<Linear> {
    let config = LinearConfig::new(WIDTH, WIDTH / 2).with_layout(LinearLayout::Col);
    vec![config.init(device), config.init(device)]
}

#[test]
fn burns_own_records_refuse_a_divided_model_and_have_the_whole_one() {
    let alone = transposed(&Device::default().autodiff()).into_record();
    let alone = alone.into_bytes().unwrap();
    let bytes = World::launch(2, |world| {
        let model = transposed(world.device());
        let layout = Layout::from(&world).owned("dp");
        let (model, optim) = DistMuonConfig::new().start(&layout, model)?;
        let whole = layout.unshard(&model)?;
        let record = || whole.clone().into_record();
        let weight = ParamGroup::from_regex(r"^0\.weight$").expect("a regular expression");
        // A group may leave the part out.
        for message in [
            panic_message(|| model.clone().into_record()),
            panic_message(|| model.clone().into_record_group(weight)),
        ] {
            assert!(message.contains("`0.weight`"), "{message}");
            assert!(message.contains("Layout::unshard"), "{message}");
        }
        // The record of a layer may have another shape, which Burn reports.
        assert!(model.clone().try_load_record(record().allow_partial(true)).is_err());
        // This crate's checkpoints have whole parameters, in their stored form.
        let folder = world.broadcast_value(&temporary(&world), 0)?;
        let path = Path::new(&folder).join("run.bpk");
        optim.save(&path, &model, &1)?;
        let (loaded, _, _): (_, _, i32) = optim.load(&path, model)?;
        assert_eq!(weights(&layout.unshard(&loaded)?), weights(&whole));
        world.comm().barrier()?;
        if world.is_main() {
            std::fs::remove_dir_all(folder).expect("the folder is there");
        }
        Ok::<_, Error>(record().into_bytes().expect("a record is bytes").to_vec())
    });
    let read = |bytes: Vec<u8>| {
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(bytes)).unwrap();
        weights(&layers(&Device::default().autodiff()).load_record(record))
    };
    assert_eq!(read(bytes.unwrap()), read(alone.to_vec()));
}

#[test]
fn a_divided_model_refuses_values_that_burn_would_load_into_its_base() {
    let world = World::alone(Device::default().autodiff());
    let whole = linear(world.device()).map(&mut Fixed::new(4));
    let (record, layout) = (whole.clone().into_record(), Layout::from(&world).owned("dp"));
    let (model, _) = DistMuonConfig::new().start(&layout, whole).unwrap();
    // Without the part, which the record of a whole model does not have.
    let message = panic_message(|| model.try_load_record(record.allow_partial(true)));
    assert!(message.contains("`weight`") && message.contains("DistModuleOptimizer"), "{message}");
}

/// A new folder, on rank 0.
fn temporary(world: &World) -> String {
    let folder = world.is_main().then(|| tempfile::tempdir().expect("a folder can be made"));
    folder.map_or(String::new(), |folder| folder.keep().display().to_string())
}

#[test]
fn parameters_of_a_divided_model_are_counted_once() {
    World::launch(2, |world| {
        let count = transposed(world.device()).num_params();
        let mesh = Mesh::new(&world, [Axis::model("tp", 2)])?;
        let cut = Layout::new(&mesh).with_place(Place::shard(r"^0\.weight$", "tp", 1));
        for layout in [Layout::from(&world).owned("dp"), (&world).into(), cut] {
            let (model, _) = DistMuonConfig::new().start(&layout, transposed(world.device()))?;
            assert_eq!(layout.num_params(&model)?, count);
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// A matrix, a small one, a long vector, and a frozen matrix.
#[derive(Module, Debug)]
struct Placed {
    weight: Param<Tensor<2>>,
    small: Param<Tensor<2>>,
    long: Param<Tensor<1>>,
    frozen: Param<Tensor<2>>,
}

impl Placed {
    fn new(device: &Device, width: usize) -> Self {
        let matrix = |width| Param::from_tensor(Tensor::ones([width, width], device));
        Self {
            weight: matrix(width),
            small: matrix(4),
            long: Param::from_tensor(Tensor::ones([2048], device)),
            frozen: matrix(width).set_require_grad(false),
        }
    }
}

#[test]
fn the_last_place_that_matches_decides_whatever_the_size() {
    let owned = |elements: usize| Some(vec![elements, 0]);
    let of = |set: fn(Layout) -> Layout| {
        let parts = World::launch(2, |world| {
            let layout = set(Layout::from(&world).owned("dp"));
            let table = layout.table(&Placed::new(world.device(), WIDTH))?;
            let paths = ["weight", "small", "long", "frozen"];
            // The parts of what is divided.
            Ok::<_, Error>(paths.map(|path| table.parts(path)))
        });
        parts.unwrap()
    };
    let matrix = WIDTH * WIDTH;
    // Small, one-dimensional and frozen parameters stay.
    let plain = of(|layout| layout);
    assert_eq!(plain, [owned(matrix), None, None, None]);
    let replicated = |layout: Layout| {
        layout.with_place(Place::owned("weight")).with_place(Place::replicated("weight"))
    };
    assert_eq!(of(replicated)[0], None);
    let all = |layout: Layout| {
        layout.with_place(Place::replicated("")).with_place(Place::owned("weight|small|frozen"))
    };
    let [weight, small, long, frozen] = of(all);
    assert_eq!(long, None);
    for (parts, elements) in [(weight, matrix), (small, 16), (frozen, matrix)] {
        let parts = parts.expect("the model has it");
        // A matrix has one owner; a frozen one needs none, and is divided by rows.
        assert!(parts.iter().all(|part| *part < elements) || parts.contains(&0), "{parts:?}");
        assert_eq!(parts.iter().sum::<usize>(), elements, "{parts:?}");
    }
}

#[test]
fn models_of_other_shapes_are_neither_averaged_nor_sent() {
    let averaged = World::launch(2, |world| {
        let layout = Layout::from(&world);
        let [narrow, wide] = [32, 64].map(|width| Placed::new(world.device(), width));
        layout.average(narrow, &wide, 0.5).map(drop)
    });
    let error = averaged.unwrap_err();
    assert!(matches!(error, Error::Parameter { .. }), "{error:?}");
    assert!(error.to_string().contains("`weight`"), "{error}");

    let sent = World::launch(2, |world| {
        let width = [32, 64][world.rank()];
        world.broadcast(Placed::new(world.device(), width)).map(drop)
    });
    assert!(matches!(sent.unwrap_err(), Error::Mismatch { .. }));
}

#[test]
fn a_function_of_elements_reaches_frozen_parameters() {
    let sums = World::launch(2, |world| {
        let layout = Layout::from(&world).owned("dp");
        let model = layout.shard(Placed::new(world.device(), WIDTH))?;
        let model = layout.map_elements(model, |_, values| values * 3.0);
        let whole = layout.unshard(&model)?;
        let sum = |tensor: Tensor<1>| tensor.sum().into_scalar::<f32>();
        let matrices = [&whole.weight, &whole.small, &whole.frozen];
        let matrices = matrices.map(|matrix| sum(matrix.val().inner().reshape([-1])));
        assert!(!model.frozen.is_require_grad());
        Ok::<_, Error>((matrices, sum(whole.long.val().inner())))
    });
    let matrix = 3.0 * (WIDTH * WIDTH) as f32;
    assert_eq!(sums.unwrap(), ([matrix, 48.0, matrix], 3.0 * 2048.0));
}

#[cfg(feature = "cuda")]
#[test]
fn gpus_go_on_as_threads_without_nccl_with_a_warning_that_names_it() {
    use distmuon_testing::logs;

    if distmuon::comm::Nccl::installed_version().is_ok() {
        distmuon_testing::excused("NCCL is installed");
        return;
    }
    logs::collect();
    let devices = [0, 1].map(|index| Device::cuda(index).autodiff());
    let engine = |world: World| Ok::<_, Error>(world.comm().engine_name());
    assert_eq!(World::threads(devices, engine).unwrap(), ["threads"; 2]);
    let warnings = logs::with(&["WARN: the ranks are threads on 2 GPUs", "libnccl.so.2"]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
}
