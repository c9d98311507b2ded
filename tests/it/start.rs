//! The way from one device to ranks: `World::launch`, `DistMuonConfig::start`, and the optimizer's
//! backward pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor};
use distmuon::distributed::{GradDtype, Layout, LossScaleConfig};
use distmuon::{DistMuonConfig, Error, Result, World};
use distmuon_testing::models::{Fixed, weights};

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
    let model = burn::module::Module::map(linear(world.device()), &mut Fixed::new(1));
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
    let model = burn::module::Module::map(linear(world.device()), &mut Fixed::new(2));
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
