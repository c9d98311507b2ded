//! Models, gradients and settings that all ranks reject with the same error.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use distmuon::comm::World;
use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig};
use distmuon::parts::{MomentumMixture, Namo};
use distmuon::{AdamWConfig, Error, MuonConfig, Result};
use distmuon_testing::models::Fixed;
use distmuon_testing::worlds::{Case, cases};

use crate::{Net, config, device, ranks, ranks_here};

pub const IN_PROCESS: &[Case] = cases![
    models_that_differ_between_ranks_fail_naming_the_parameter,
    bad_gradients_and_settings_are_rejected_on_all_ranks,
    a_world_without_ranks_is_rejected,
    devices_of_two_backends_are_rejected,
    tensors_on_another_device_fail_naming_the_parameter,
    learning_rates_that_differ_between_ranks_fail_before_the_step,
    requests_that_differ_between_ranks_fail_before_the_step,
    settings_of_a_running_program_that_differ_or_are_invalid_are_rejected,
    configurations_that_differ_between_ranks_fail_naming_the_setting,
    exchanged_values_of_different_types_are_rejected,
    shared_parameters_are_rejected_naming_both_paths,
    models_without_trainable_parameters_are_rejected,
    a_gradient_of_a_parameter_that_was_frozen_or_absent_is_rejected,
];

fn models_that_differ_between_ranks_fail_naming_the_parameter() {
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

    // Rank 0 has one more parameter at the end, trained or frozen.
    for frozen in [false, true] {
        let longer = ranks(2, |world| {
            let ones =
                || Param::from_tensor(Tensor::<2>::ones([8, 8], (world.device(), DType::F32)));
            let mut matrices = vec![ones(), ones().set_require_grad(!frozen)];
            matrices.truncate(2 - world.rank());
            DistMuonConfig::new().init(&world, &matrices).map(|_| ())
        });
        let error = longer.unwrap_err();
        let Error::ModelsDiffer { rank: 1, parameter, .. } = &error else { panic!("{error}") };
        assert_eq!(parameter, "1");
    }
}

fn bad_gradients_and_settings_are_rejected_on_all_ranks() {
    let all: Vec<Error> = ranks_here(3, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config().init(&world, &net)?;
        let mut gradients = net.gradients(1);
        if world.rank() == 1 {
            let turned = Tensor::<2>::ones([31, 5], (&Device::default(), DType::F32));
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

    let rejected = |config: DistMuonConfig, named: &str| {
        let net = Net::new(&device());
        match config.init(&World::alone(device()), &net) {
            Err(Error::Setting { setting, .. }) => assert_eq!(setting, named),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{named} was accepted"),
        }
    };
    rejected(config().with_bucket_mb(Some(0.0)), "bucket_mb");
    rejected(config().with_bucket_mb(Some(f64::NAN)), "bucket_mb");
    rejected(config().with_max_norm(Some(-1.0)), "max_norm");
    rejected(config().with_in_flight(0), "in_flight");
    let clipping = burn::grad_clipping::GradientClippingConfig::Norm(1.0);
    let muon = MuonConfig::new().with_grad_clipping(Some(clipping));
    rejected(DistMuonConfig::new().with_muon(muon), "muon.grad_clipping");
}

fn a_world_without_ranks_is_rejected() {
    let error = World::threads([], |_| Ok::<_, Error>(())).unwrap_err();
    assert!(matches!(&error, Error::Usage { .. }), "{error}");
    assert!(error.to_string().starts_with("the devices are missing: expected at least one"));
}

fn devices_of_two_backends_are_rejected() {
    let Some(devices) = two_backends() else { return };
    let error = World::threads(devices, |_| Ok::<_, Error>(())).unwrap_err();
    assert!(matches!(error, Error::Devices { rank: 1, .. }), "{error}");
}

fn tensors_on_another_device_fail_naming_the_parameter() {
    let Some([device, other]) = two_backends() else { return };
    let device = device.autodiff();
    let rejected = |net: Net, gradients: GradientsParams, words: &str| {
        let mut optim = config().init(&World::alone(device.clone()), &Net::new(&device)).unwrap();
        let error = optim.step(0.01, net, gradients).map(|_| ()).unwrap_err();
        let Error::Parameter { parameter, rank: 0, reason, .. } = &error else { panic!("{error}") };
        assert_eq!(parameter, "wide.weight");
        assert!(reason.starts_with(words), "{error}");
    };
    let net = Net::new(&device);
    let mut gradients = net.gradients(1);
    let away = Tensor::<2>::ones(net.wide.weight.dims(), (&other, DType::F32));
    gradients.register(net.wide.weight.id, away);
    rejected(net, gradients, "its gradient is on the wrong device");

    let mut net = Net::new(&device);
    let gradients = net.gradients(1);
    net.wide = net.wide.to_device(&other.autodiff());
    rejected(net, gradients, "it is on the wrong device");
}

fn learning_rates_that_differ_between_ranks_fail_before_the_step() {
    let errors = ranks_here(3, |world| {
        let net = Net::new(world.device());
        let mut optim = config().init(&world, &net)?;
        let lr = |step: u64| if step == 1 && world.rank() == 2 { 0.02 } else { 0.01 };
        let gradients = net.gradients(0);
        let net = optim.step(lr(0), net, gradients)?;
        let gradients = net.gradients(1);
        Ok(optim.step(lr(1), net, gradients).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        let Error::SettingsDiffer { rank: 2, setting, other, first } = &error else {
            panic!("{error}")
        };
        assert_eq!(
            [setting, other, first],
            ["learning rate of `embedding.weight`", "0.02", "0.01"]
        );
    }
}

fn settings_of_a_running_program_that_differ_or_are_invalid_are_rejected() {
    type Set = fn(&mut DistModuleOptimizer, usize) -> Result<()>;
    let cases: [(Set, [&str; 3]); 3] = [
        (
            |optim, rank| optim.set_momentum(if rank == 2 { 0.9 } else { 0.8 }),
            ["set_momentum", "0.9", "0.8"],
        ),
        (
            |optim, rank| optim.set_weight_decay(if rank == 2 { 0.0 } else { 0.1 }),
            ["set_weight_decay", "0", "0.1"],
        ),
        (
            |optim, rank| if rank == 2 { Ok(()) } else { optim.set_momentum(0.5) },
            ["set_momentum", "no call", "0.5"],
        ),
    ];
    for (set, expected) in cases {
        let errors = ranks_here(3, |world| {
            let net = Net::new(world.device());
            let mut optim = config().init(&world, &net)?;
            set(&mut optim, world.rank())?;
            let gradients = net.gradients(0);
            Ok(optim.step(0.01, net, gradients).map(|_| ()).unwrap_err())
        });
        for error in errors.unwrap() {
            let Error::SettingsDiffer { rank: 2, setting, other, first } = &error else {
                panic!("{error}")
            };
            assert_eq!([setting, other, first], expected);
        }
    }
    let net = Net::new(&device());
    let mut optim = config().muon.init_batched(&net).unwrap();
    for (error, expected) in [
        (
            optim.set_momentum(1.0),
            "`momentum` is invalid: expected at least 0 and less than 1, got 1",
        ),
        (optim.set_momentum(f64::NAN), "`momentum` is invalid"),
        (optim.set_weight_decay(-0.1), "`weight_decay` is invalid: expected a finite number"),
        (optim.set_weight_decay(f64::INFINITY), "`weight_decay` is invalid"),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // As when they are configured.
    let namo = Namo::new(0.9).with_weight_decay(0.1).into();
    let muon = config().muon.with_parts(vec![namo]).with_weight_decay(0.0.into());
    let mut optim = muon.init_batched(&net).unwrap();
    optim.set_weight_decay(0.0).unwrap();
    let error = optim.set_weight_decay(0.1).unwrap_err().to_string();
    assert!(error.contains("NAMO decays at the rate of its update"), "{error}");
    let mixture = MomentumMixture::k_maxwell().into();
    let muon = config().muon.with_parts(vec![mixture]).with_momentum(0.0.into());
    let error = muon.init_batched(&net).unwrap().set_momentum(0.9).unwrap_err().to_string();
    assert!(error.contains("the mixture is the momentum"), "{error}");
}

fn requests_that_differ_between_ranks_fail_before_the_step() {
    let errors = ranks_here(2, |world| {
        let net = Net::new(world.device());
        let mut optim = config().init(&world, &net)?;
        if world.is_main() {
            optim.request_diagnostics();
        }
        let gradients = net.gradients(0);
        Ok(optim.step(0.01, net, gradients).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        let Error::SettingsDiffer { rank: 1, setting, .. } = &error else { panic!("{error}") };
        assert_eq!(setting, "request_diagnostics");
    }
}

fn configurations_that_differ_between_ranks_fail_naming_the_setting() {
    let errors = ranks_here(3, |world| {
        let net = Net::new(world.device());
        let mut config = config();
        if world.rank() == 1 {
            let adamw = AdamWConfig::new().with_beta_2(0.99);
            config.muon = config.muon.with_adamw(adamw);
        }
        Ok(config.init(&world, &net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        let Error::SettingsDiffer { rank: 1, setting, other, first } = &error else {
            panic!("{error}")
        };
        assert_eq!([setting, other, first], ["muon.rest.AdamW.beta_2", "0.99", "0.95"]);
    }
}

fn exchanged_values_of_different_types_are_rejected() {
    let errors = ranks_here(2, |world| {
        let gathered = match world.rank() {
            0 => world.all_gather_value(&1_u8).map(|_| ()),
            _ => world.all_gather_value(&"one".to_owned()).map(|_| ()),
        };
        Ok(gathered.unwrap_err())
    });
    for (rank, error) in errors.unwrap().into_iter().enumerate() {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        let other = format!("rank {} gave a value of another type", 1 - rank);
        assert!(calls.starts_with(&other), "{error}");
    }
}

fn shared_parameters_are_rejected_naming_both_paths() {
    let layer = LinearConfig::new(8, 8).init(&device());
    let tied = vec![layer.clone(), layer];
    let named = |error: Error| {
        let Error::Shared { first, second } = &error else { panic!("{error}") };
        assert_eq!([first, second], ["0.weight", "1.weight"]);
    };
    named(DistMuonConfig::new().init(&World::alone(device()), &tied).map(|_| ()).unwrap_err());
    named(MuonConfig::new().try_init(&tied).map(|_| ()).unwrap_err());
    // Frozen parameters may be shared.
    let tied = vec![tied[0].clone(), tied[1].clone(), LinearConfig::new(8, 8).init(&device())];
    let tied: Vec<_> =
        tied.into_iter().enumerate().map(|(i, l)| if i < 2 { l.no_grad() } else { l }).collect();
    assert!(MuonConfig::new().try_init(&tied).is_ok());
}

fn models_without_trainable_parameters_are_rejected() {
    for plain in [false, true] {
        let error = ranks(2, |world| {
            let device = world.device().clone();
            let device = if plain { device.inner() } else { device };
            let layer = LinearConfig::new(8, 8).init(&device);
            let layer = if plain { layer } else { layer.freeze() };
            let alone = MuonConfig::new().init_batched(&layer).map(|_| ());
            assert_eq!(alone.unwrap_err(), Error::AllFrozen { parameters: 2 });
            DistMuonConfig::new().init(&world, &layer).map(|_| ())
        });
        assert_eq!(error.unwrap_err(), Error::AllFrozen { parameters: 2 });
    }
    let empty = MuonConfig::new().init_batched(&Vec::<Linear>::new());
    assert_eq!(empty.map(|_| ()).unwrap_err(), Error::EmptyModel);
}

fn a_gradient_of_a_parameter_that_was_frozen_or_absent_is_rejected() {
    let mut net = Net::new(&device());
    let trained = net.wide.clone();
    net.wide = net.wide.no_grad();
    let mut optim = config().init(&World::alone(device()), &net).unwrap();
    // Frozen parameters do not need gradients.
    let mut gradients = net.gradients(0);
    gradients.remove::<2>(net.wide.weight.id);
    gradients.remove::<1>(net.wide.bias.as_ref().expect("the layer has a bias").id);
    let mut net = optim.step(0.01, net, gradients).unwrap();
    net.wide = trained;
    let gradients = net.gradients(1);
    let error = optim.step(0.01, net, gradients).map(|_| ()).unwrap_err();
    let Error::Parameter { parameter, reason, .. } = &error else { panic!("{error}") };
    assert_eq!(parameter, "wide.weight");
    assert!(reason.contains("frozen"), "{error}");

    let layer = || {
        let layer = LinearConfig::new(8, 8).with_bias(false).init(&device());
        layer.map(&mut Fixed::new(7))
    };
    let mut layers: Vec<Linear> = vec![layer()];
    let mut optim = DistMuonConfig::new().init(&World::alone(device()), &layers).unwrap();
    layers.push(layer());
    let gradients = distmuon_testing::models::gradients(&layers, 0);
    let error = optim.step(0.01, layers, gradients).map(|_| ()).unwrap_err();
    let Error::Parameter { parameter, reason, .. } = &error else { panic!("{error}") };
    assert_eq!(parameter, "1.weight");
    assert!(reason.contains("absent"), "{error}");
}

/// Devices of two backends, if two are built.
fn two_backends() -> Option<[Device; 2]> {
    #[cfg(all(feature = "flex", feature = "cpu"))]
    return Some([Device::flex(), Device::cpu()]);
    #[cfg(not(all(feature = "flex", feature = "cpu")))]
    distmuon_testing::skip("there is one backend");
    #[cfg(not(all(feature = "flex", feature = "cpu")))]
    None
}
