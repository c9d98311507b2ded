//! Parameters in half precision on ranks: master weights, random rounding, loss scaling, and the
//! bytes of each rank.

use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use distmuon::distributed::{DistMuonConfig, GradDtype, Gradients, LossScaleConfig, MemoryReport};
use distmuon::{Expectation, MasterWeights, MuonConfig, RoutingRule, StateDtype, checkpoint};
use distmuon_testing::combinations::combinations;
use distmuon_testing::device::is_flex;
use distmuon_testing::models::{self, Fixed, Layers, weights};
use distmuon_testing::precision::{
    LR, Net, Rounded, STEPS, alone, assert_same, config, dist, floats, gradients, has,
};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::{device, owned, ranks};

pub const EVERYWHERE: &[Case] = cases![
    master_weights_are_those_of_a_run_in_float32,
    every_part_of_the_update_has_the_master_weights_of_a_run_in_float32,
    bits_of_the_significand_are_exact_master_weights,
    every_kind_of_master_weights_is_the_same_on_any_number_of_ranks,
    checkpoints_continue_with_the_bits_of_master_weights,
    momentum_in_8_bits_is_the_same_on_any_number_of_ranks_and_in_any_placement,
    momentum_in_8_bits_moves_between_ranks_and_types,
    a_step_that_overflows_on_one_rank_is_skipped_on_all,
    bytes_per_parameter_are_those_of_the_guide,
];

/// The weights of every rank after steps in which all ranks have equal gradients of a type.
fn on_ranks(count: usize, dtype: DType, gradient: DType, dist: &DistMuonConfig) -> Vec<Vec<f32>> {
    let trained = ranks(count, |world| {
        let mut net = Net::new(dtype, world.device());
        let mut optim = dist.init(&world, &net)?;
        for step in 0..STEPS {
            let grads = gradients(&net, step, gradient);
            net = optim.step(LR, net, grads)?;
        }
        Ok(floats(&net))
    });
    trained.unwrap()
}

fn master_weights_are_those_of_a_run_in_float32() {
    for half in [FloatDType::BF16, FloatDType::F16].into_iter().filter(|half| has(*half)) {
        let half = DType::from(half);
        let rounded = rounded_to(half, &alone(DType::F32, &config(MasterWeights::Full)));
        let full = alone(half, &config(MasterWeights::Full));
        assert_same(&full, &rounded, half.name());
        let lost = alone(half, &config(MasterWeights::None));
        assert_ne!(lost, rounded, "{half:?}");
        for count in [1, 2, 4] {
            for weights in on_ranks(count, half, half, &dist(config(MasterWeights::Full))) {
                assert_same(&weights, &rounded, format_args!("{half:?} on {count} ranks"));
            }
        }
    }
}

/// Values in another type.
fn rounded_to(half: DType, values: &[f32]) -> Vec<f32> {
    let data = TensorData::from(values);
    let tensor = Tensor::<1>::from_data(data, (&Device::default(), DType::F32));
    tensor.cast(half).cast(DType::F32).into_data().iter::<f32>().collect()
}

fn every_part_of_the_update_has_the_master_weights_of_a_run_in_float32() {
    if !has(FloatDType::BF16) {
        return;
    }
    // The others have rules for parameters of another model.
    for (name, muon) in combinations().into_iter().filter(|(_, muon)| muon.rules.is_empty()) {
        let MuonConfig { rules, .. } = config(MasterWeights::Full);
        let muon = muon.with_master_weights(MasterWeights::Full);
        let muon = rules.into_iter().fold(muon, MuonConfig::with_rule);
        let rounded = rounded_to(DType::BF16, &alone(DType::F32, &muon));
        assert_same(&alone(DType::BF16, &muon), &rounded, name);
        for count in [1, 2, 4] {
            for weights in on_ranks(count, DType::BF16, DType::BF16, &dist(muon.clone())) {
                assert_same(&weights, &rounded, format_args!("{name} on {count} ranks"));
            }
        }
    }
}

fn bits_of_the_significand_are_exact_master_weights() {
    if !has(FloatDType::BF16) {
        return;
    }
    let wide = alone(DType::F32, &config(MasterWeights::Full));
    // Ties go to the larger number.
    let nearest = |x: f32| {
        let (down, up) = (x.to_bits() & 0xFFFF_0000, (x.to_bits() & 0xFFFF_0000) + 0x1_0000);
        let [down, up] = [down, up].map(f32::from_bits);
        let [to_down, to_up] = [down, up].map(|y| (f64::from(y) - f64::from(x)).abs());
        if to_down < to_up || to_down == to_up && down > up { down } else { up }
    };
    let expected: Vec<f32> = wide.into_iter().map(nearest).collect();
    let lean = alone(DType::BF16, &config(MasterWeights::Mantissa));
    assert_same(&lean, &expected, "one device");
    for count in [1, 2, 3, 4] {
        let dist = dist(config(MasterWeights::Mantissa));
        for weights in on_ranks(count, DType::BF16, DType::BF16, &dist) {
            // Three equal gradients have a mean that rounds.
            let same = weights.iter().zip(&expected).filter(|(a, b)| a == b).count();
            let is_rounded = count == 3 || !is_flex();
            assert!(same == expected.len() || is_rounded && same * 100 > expected.len() * 95);
        }
    }
}

fn every_kind_of_master_weights_is_the_same_on_any_number_of_ranks() {
    let kinds = [
        MasterWeights::Full,
        MasterWeights::Mantissa,
        MasterWeights::None,
        MasterWeights::Stochastic { seed: 9 },
    ];
    if !has(FloatDType::BF16) {
        return;
    }
    for kind in kinds {
        for states in [StateDtype::Float32, StateDtype::BFloat16, StateDtype::Int8] {
            let config = config(kind).with_state_dtype(states);
            let expected = alone(DType::BF16, &config);
            for count in [1, 2, 3, 4] {
                // The mean of three equal gradients may differ from them in the last digit.
                let reduced = if count == 3 { Gradients::Averaged } else { Gradients::PerRank };
                for gradient in [DType::BF16, DType::F32] {
                    let grad_dtype = match gradient {
                        DType::F32 => GradDtype::Float32,
                        _ => GradDtype::Parameter,
                    };
                    let dist = dist(config.clone()).with_grad_dtype(grad_dtype);
                    let dist = dist.with_gradients(reduced);
                    for weights in on_ranks(count, DType::BF16, gradient, &dist) {
                        let case = format_args!("{kind:?}, {states:?}, {count} ranks");
                        assert_same(&weights, &expected, case);
                    }
                }
            }
        }
    }
}

/// The values after some steps of a run on ranks, which continues from its file unless it begins.
fn steps_of_run(
    path: &Path,
    count: usize,
    (dist, dtype): (&DistMuonConfig, DType),
    range: Range<u64>,
    saves: bool,
) -> Vec<f32> {
    let trained = ranks(count, |world| {
        let mut net = Net::new(dtype, world.device());
        let mut optim = dist.init(&world, &net)?;
        if range.start > 0 {
            (net, optim, _) = optim.load::<_, u64>(path, net)?;
        }
        for step in range.clone() {
            let grads = gradients(&net, step, dtype);
            net = optim.step(LR, net, grads)?;
        }
        if saves {
            optim.save(path, &net, &range.end)?;
        }
        Ok(floats(&net))
    });
    trained.unwrap().swap_remove(0)
}

fn checkpoints_continue_with_the_bits_of_master_weights() {
    if !has(FloatDType::BF16) {
        return;
    }
    let folder = Folder::create();
    for (master, states) in [
        (MasterWeights::Full, StateDtype::Float32),
        (MasterWeights::Mantissa, StateDtype::BFloat16),
        (MasterWeights::Stochastic { seed: 5 }, StateDtype::Float32),
        (MasterWeights::None, StateDtype::Int8),
    ] {
        let config = config(master).with_state_dtype(states);
        let expected = alone(DType::BF16, &config);
        let path = folder.path().join(format!("{master:?}"));
        let steps = |count: usize, range: Range<u64>| {
            let dist = dist(config.clone()).with_gradients(Gradients::Averaged);
            let saves = range.end < STEPS;
            steps_of_run(&path, count, (&dist, DType::BF16), range, saves)
        };
        steps(4, 0..2);
        steps(3, 2..4);
        assert_same(&steps(2, 4..STEPS), &expected, format_args!("{master:?}"));

        let net = Net::new(DType::BF16, &device());
        let optim = config.init(&net);
        let (mut net, mut optim, start) = checkpoint::load::<_, u64, _>(&path, net, optim).unwrap();
        for step in start..STEPS {
            let grads = gradients(&net, step, DType::BF16);
            net = optim.step(LR, net, grads);
        }
        assert_same(&floats(&net), &expected, format_args!("{master:?} on a single device"));
    }
}

/// The settings of the models of `owned`, with momentum in a type.
fn with_states(states: StateDtype) -> DistMuonConfig {
    let config = owned::config();
    let muon = config.muon.clone().with_state_dtype(states);
    config.with_muon(muon)
}

/// Matrices of one block and of several, of which some have fewer than 128 elements.
fn momentum_in_8_bits_is_the_same_on_any_number_of_ranks_and_in_any_placement() {
    let config = with_states(StateDtype::Int8);
    for count in [1, 2, 3].into_iter().filter(worlds::has) {
        let expected = ranks(count, |world| {
            let world = owned::with_checkpoints(&world);
            owned::train_replicated(&world, &config, 6, 1, DType::F32)
        });
        let expected = expected.unwrap();
        let float = ranks(count, |world| {
            let world = owned::with_checkpoints(&world);
            owned::train_replicated(&world, &owned::config(), 6, 1, DType::F32)
        });
        assert!(float.unwrap()[0].1 != expected[0].1, "the momentum is rounded");
        for (name, in_rows) in [("owned", false), ("in rows", true)] {
            let runs = ranks(count, |world| {
                let world = owned::with_checkpoints(&world);
                let layout = owned::layout(&world).with_muon(config.muon.clone());
                let layout = if in_rows { layout.rows("dp") } else { layout };
                owned::train_on(&world, &layout, &config, 6, 1, DType::F32)
            });
            owned::assert_equal(&expected, &runs.unwrap(), &format!("{name}, {count} ranks"));
        }
    }
    // Equal gradients: also the same bits on other numbers of ranks.
    let run = |count: usize| {
        let muon = crate::config().muon.with_state_dtype(StateDtype::Int8);
        let dist = crate::config().with_muon(muon).with_gradients(Gradients::Averaged);
        crate::trained(count, 8, &dist)
    };
    let expected = run(1);
    for count in [2, 3] {
        assert!(!is_flex() || run(count) == expected, "{count} ranks");
    }
}

/// From 2 ranks to 3 with the same bits, and to float32, whose next step reads the same momentum.
fn momentum_in_8_bits_moves_between_ranks_and_types() {
    const STEPS: u64 = 8;
    let folder = Folder::create();
    let path = folder.path().join("run");
    let steps = |count: usize, states: StateDtype, range: Range<u64>| {
        let muon = config(MasterWeights::Full).with_state_dtype(states);
        let dist = dist(muon).with_gradients(Gradients::Averaged);
        let saves = range.start == 0 && range.end < STEPS;
        steps_of_run(&path, count, (&dist, DType::F32), range, saves)
    };
    let expected = steps(1, StateDtype::Int8, 0..STEPS);
    let next = steps(1, StateDtype::Int8, 0..5);
    steps(2, StateDtype::Int8, 0..4);
    assert_same(&steps(3, StateDtype::Int8, 4..STEPS), &expected, "2 ranks to 3");
    assert_same(&steps(3, StateDtype::Float32, 4..5), &next, "to float32");
    // The other way, the momentum is rounded once.
    steps(2, StateDtype::Float32, 0..4);
    let [float, rounded] =
        [StateDtype::Float32, StateDtype::Int8].map(|states| steps(3, states, 4..5));
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() < LR as f32 / 2.0;
    assert!(rounded != float && rounded.iter().zip(&float).all(is_near), "from float32");
    // A momentum in bfloat16 is a float32 one with fewer digits.
    let next = steps(1, StateDtype::BFloat16, 0..5);
    steps(2, StateDtype::BFloat16, 0..4);
    assert_same(&steps(3, StateDtype::Float32, 4..5), &next, "from bfloat16");
}

/// Gradients in float16 of a loss times a scale.
fn scaled(net: &Net, step: u64, scale: f64) -> GradientsParams {
    models::scaled(net, gradients(net, step, DType::F32), scale, DType::F16)
}

fn a_step_that_overflows_on_one_rank_is_skipped_on_all() {
    if !has(FloatDType::F16) {
        return;
    }
    let folder = Folder::create();
    let path = folder.path().join("run");
    // Clipped, since the norm has the scale as well.
    // Expectations are not checked in a step that is skipped.
    let muon = config(MasterWeights::Full).expect(Expectation::OncePerStep);
    let plain = dist(muon).with_max_norm(Some(0.3));
    let scale = LossScaleConfig::new().with_initial(1024.0).with_interval(3);
    let scaling = plain.clone().with_loss_scale(Some(scale));
    let run = |count: usize, dist: &DistMuonConfig, overflows: Option<u64>| {
        let trained = ranks(count, |world| {
            let mut net = Net::new(DType::F16, world.device());
            let mut optim = dist.init(&world, &net)?;
            let mut scales = vec![];
            for step in 0..STEPS {
                if overflows == Some(step) {
                    let before = weights(&net);
                    // The last rank's gradients are infinite, those of the others are not.
                    let factor = if world.rank() + 1 == count { 1e9 } else { 1.0 };
                    let grads = scaled(&net, 77, optim.loss_scale() * factor);
                    net = optim.step(LR, net, grads)?;
                    assert!(weights(&net) == before);
                    scales.push(optim.loss_scale());
                    optim.save(&path, &net, &step)?;
                    let again = dist.init(&world, &net)?;
                    (net, optim, _) = again.load::<_, u64>(&path, net)?;
                }
                let grads = scaled(&net, step, optim.loss_scale());
                net = optim.step(LR, net, grads)?;
                scales.push(optim.loss_scale());
            }
            Ok((floats(&net), scales, optim.skipped_steps().read()))
        });
        trained.unwrap()
    };
    let expected = &run(1, &plain, None)[0].0;
    for count in [1, 2, 4] {
        for (weights, scales, skipped) in run(count, &scaling, None) {
            // Powers of two scale exactly.
            assert_same(&weights, expected, format_args!("{count} ranks"));
            assert_eq!(scales, [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0]);
            assert_eq!(skipped, [].into());
        }
        for (weights, scales, skipped) in run(count, &scaling, Some(2)) {
            let case = format_args!("{count} ranks, with a step that overflows");
            assert_same(&weights, expected, case);
            assert_eq!(scales, [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]);
            assert!(skipped.values().all(|count| *count == 1) && skipped.len() == 5, "{skipped:?}");
        }
    }
}

/// Bytes per parameter that every rank has at the beginning of a step. At the peak of the step,
/// those of the buffers in flight are the only further ones.
fn bytes(count: usize, [of, gradient]: [DType; 2], muon: MuonConfig) -> f64 {
    let dist = DistMuonConfig::new()
        .with_muon(muon)
        .with_grad_dtype(if gradient == DType::F32 {
            GradDtype::Float32
        } else {
            GradDtype::Parameter
        })
        .with_bucket_mb(Some(0.02))
        .with_in_flight(1);
    let elements = 16 * 64 * 64;
    let measured = ranks(count, |world| {
        let net = Layers::square(16, 64, world.device()).map(&mut Fixed::new(4));
        let mut net = net.map(&mut Rounded(of));
        let mut optim = dist.init(&world, &net)?;
        let begin = optim.memory().total.now + elements * gradient.size();
        for step in 0..2 {
            let grads = gradients(&net, step, gradient);
            net = optim.step(LR, net, grads)?;
        }
        let MemoryReport { parameters, gradients, shards, masters, states, buffers, total, .. } =
            optim.memory();
        let kinds = [parameters, gradients, shards, masters, states, buffers];
        let at_peak = kinds.iter().map(|kind| kind.at_peak).sum::<usize>();
        assert_eq!(at_peak, total.peak, "{}", optim.memory());
        assert_eq!(gradients.peak, elements * gradient.size());
        let held = total.peak - buffers.at_peak;
        assert!(total.peak >= begin && held <= begin, "{held} of {begin}\n{}", optim.memory());
        Ok(begin as f64 / elements as f64)
    });
    let measured = measured.unwrap();
    assert!(measured.iter().all(|bytes| *bytes == measured[0]), "{measured:?}");
    measured[0]
}

fn bytes_per_parameter_are_those_of_the_guide() {
    for count in [1, 2, 4, 8].into_iter().filter(worlds::has) {
        let n = count as f64;
        let adamw = || MuonConfig::new().with_rule(RoutingRule::adamw(""));
        let muon = || MuonConfig::new().with_rule(RoutingRule::muon(""));
        let lean = muon()
            .with_master_weights(MasterWeights::Mantissa)
            .with_state_dtype(StateDtype::BFloat16);
        let single = [DType::F32; 2];
        assert_eq!(bytes(count, single, adamw()), 8.0 + 8.0 / n);
        assert_eq!(bytes(count, single, muon()), 8.0 + 4.0 / n);
        let coded = muon().with_state_dtype(StateDtype::Int8);
        assert_eq!(bytes(count, single, coded), 8.0 + (1.0 + 4.0 / 128.0) / n);
        for half in [FloatDType::F16, FloatDType::BF16].into_iter().filter(|half| has(*half)) {
            let half = DType::from(half);
            assert_eq!(bytes(count, [half; 2], adamw()), 4.0 + 12.0 / n);
            assert_eq!(bytes(count, [half; 2], muon()), 4.0 + 8.0 / n);
            assert_eq!(bytes(count, [half, DType::F32], adamw()), 6.0 + 12.0 / n);
            assert_eq!(bytes(count, [half, DType::F32], muon()), 6.0 + 8.0 / n);
            if half == DType::BF16 {
                assert_eq!(bytes(count, [half; 2], lean.clone()), 4.0 + 4.0 / n);
                assert_eq!(bytes(count, [half, DType::F32], lean.clone()), 6.0 + 4.0 / n);
            }
        }
    }
}
