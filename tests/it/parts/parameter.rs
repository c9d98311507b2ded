//! Parts on the parameter, and weight decay.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Int, Tensor, s};
use distmuon::parts::{Hyperball, MaxNorm, Muown, Namo, RadialBrake, RelativeUpdate};
use distmuon::{
    MatrixLayout, MomentumConfig, MuonConfig, Part, RoutingRule, Schedule, WeightDecay,
};
use distmuon_testing::references::random;
use faer::Mat;

use super::{LAYOUTS, all_close, cases, iterated, mapped, plain, resized, times, trajectory};

const LR: f64 = 0.1;
const SCALE: f64 = 4.0;

fn start(grads: &[Mat<f64>]) -> Mat<f64> {
    random(grads[0].nrows(), grads[0].ncols(), 9)
}

/// The values after every step of a function of values and gradient.
fn stepped(grads: &[Mat<f64>], step: impl Fn(Mat<f64>, &Mat<f64>) -> Mat<f64>) -> Vec<Mat<f64>> {
    let mut value = start(grads);
    let advance = |grad: &Mat<f64>| {
        value = step(value.clone(), grad);
        value.clone()
    };
    grads.iter().map(advance).collect()
}

fn compare(config: &MuonConfig, step: impl Fn(Mat<f64>, &Mat<f64>) -> Mat<f64>) {
    for (case, grads) in cases() {
        let expected = stepped(&grads, &step);
        for layout in LAYOUTS {
            let actual = trajectory(config, &start(&grads), &grads, LR, layout);
            all_close(&actual, &expected, case);
        }
    }
}

fn with(part: impl Into<Part>) -> MuonConfig {
    plain().with_lr_factor(SCALE).with_parts(vec![part.into()])
}

#[test]
fn hyperball_takes_steps_of_an_angle_at_a_fixed_norm() {
    let radius = 3.0;
    compare(&with(Hyperball::fixed(radius)), |value, grad| {
        let moved = value - times(LR, &resized(&iterated(grad), radius));
        resized(&moved, radius)
    });
}

#[test]
fn hyperball_keeps_the_initial_norm() {
    for (case, grads) in cases() {
        let radius = start(&grads).norm_l2();
        let expected = stepped(&grads, |value, grad| {
            resized(&(value - times(LR, &resized(&iterated(grad), radius))), radius)
        });
        for layout in LAYOUTS {
            let config = with(Hyperball::initial());
            let actual = trajectory(&config, &start(&grads), &grads, LR, layout);
            all_close(&actual, &expected, case);
        }
    }
}

#[test]
fn max_norm_projects_on_a_ball() {
    // Smaller than all norms, and between the norms of different steps.
    for limit in [2.0, 9.05, 1e9] {
        compare(&with(MaxNorm::new(limit)), |value, grad| {
            let moved = value - times(LR * SCALE, &iterated(grad));
            let norm = moved.norm_l2();
            times((limit / norm).min(1.0), &moved)
        });
    }
}

#[test]
fn the_radial_brake_keeps_a_fraction_of_the_change_of_the_norm() {
    for (outward, inward) in [(0.5, 1.0), (0.25, 0.5), (0.0, 0.0), (1.0, 1.0)] {
        for decay in [0.0, 4.0] {
            let config = with(RadialBrake::new(outward, inward));
            // With decay, norms shrink.
            compare(&config.with_weight_decay(decay.into()), |value, grad| {
                let before = value.norm_l2();
                let moved = times(1.0 - LR * decay, &value) - times(LR * SCALE, &iterated(grad));
                let change = moved.norm_l2() - before;
                let kept = if change > 0.0 { outward } else { inward };
                resized(&moved, before + kept * change)
            });
        }
    }
}

/// The steps of NAMO with a decay, by the formulas of <https://arxiv.org/abs/2602.17080>: the norms
/// of whole matrices, or with a limit those of columns, the inputs.
fn with_namo(grads: &[Mat<f64>], namo: Namo, mu: f64) -> Vec<Mat<f64>> {
    let (mut value, inputs) = (start(grads), grads[0].ncols());
    let (mut moments, mut momentum) = (vec![0.0; inputs], times(0.0, &grads[0]));
    let step = |(step, grad): (i32, &Mat<f64>)| {
        momentum = times(mu, &momentum) + times(1.0 - mu, grad);
        let norm = |matrix: &Mat<f64>, input: usize| match namo.per_input {
            None => matrix.norm_l2(),
            Some(_) => matrix.col(input).norm_l2(),
        };
        for (input, moment) in moments.iter_mut().enumerate() {
            *moment = namo.beta_2 * *moment + (1.0 - namo.beta_2) * norm(grad, input).powi(2);
        }
        let corrected = (1.0 - namo.beta_2.powi(step)).sqrt() / (1.0 - mu.powi(step));
        let factor = |j: usize| corrected * norm(&momentum, j) / (moments[j].sqrt() + namo.epsilon);
        let factors: Vec<f64> = (0..inputs).map(factor).collect();
        let mean = factors.iter().sum::<f64>() / inputs as f64;
        let limited = |factor: f64| match namo.per_input {
            Some(limit) => factor.clamp(limit * mean, mean / limit),
            None => factor,
        };
        let rate = |lr: f64, input: usize| {
            (lr * limited(factors[input])).min(namo.largest_rate.unwrap_or(f64::INFINITY))
        };
        let iterated = iterated(&momentum);
        value = mapped(&value, |i, j, value| {
            (1.0 - namo.weight_decay * rate(LR, j)) * value - rate(LR * SCALE, j) * iterated[(i, j)]
        });
        value.clone()
    };
    (1..).zip(grads).map(step).collect()
}

#[test]
fn namo_decays_at_the_rate_of_its_update() {
    let mu = 0.9;
    let momentum = MomentumConfig::from(mu).with_nesterov(false).with_bias_correction(true);
    // The limits are below some rates of updates, and below some of decays.
    for largest in [None, Some(0.3), Some(0.06)] {
        for namo in [Namo::new(0.8), Namo::per_input(0.8, 0.75), Namo::per_input(0.8, 0.1)] {
            for decay in [0.0, 2.5] {
                let namo = namo.with_bias_correction(true).with_epsilon(0.5);
                let namo = namo.with_weight_decay(decay).with_largest_rate(largest);
                let config = with(namo).with_momentum(momentum.clone());
                for (case, grads) in cases() {
                    let sizes = [1.0, 30.0, 0.1];
                    let grads: Vec<_> =
                        grads.iter().zip(sizes).map(|(grad, size)| times(size, grad)).collect();
                    let expected = with_namo(&grads, namo, mu);
                    for layout in LAYOUTS {
                        let actual = trajectory(&config, &start(&grads), &grads, LR, layout);
                        all_close(&actual, &expected, &format!("{case}, {namo:?}"));
                    }
                }
            }
        }
    }
}

/// Settings of runs that were saved before the part had a decay.
#[test]
fn namo_is_read_from_json_with_and_without_its_decay() {
    let old = r#"{"Namo": {"beta_2": 0.9, "epsilon": 1e-30}}"#;
    assert_eq!(serde_json::from_str::<Part>(old).unwrap(), Namo::new(0.9).into());
    let namo = Namo::per_input(0.99, 0.75).with_weight_decay(0.1).with_largest_rate(Some(1.0));
    let text = serde_json::to_string(&Part::from(namo)).unwrap();
    assert_eq!(serde_json::from_str::<Part>(&text).unwrap(), namo.into());
}

#[derive(Module, Debug)]
struct One {
    weight: Param<Tensor<2>>,
}

/// As by a clip of attention. A row of zeros has no direction.
#[test]
fn muown_takes_the_norms_of_rows_as_they_are() {
    const LR: f64 = 1e-3;
    let device = Device::default().autodiff();
    for (layout, dimension) in [(MatrixLayout::OutIn, 1), (MatrixLayout::InOut, 0)] {
        let config = plain().with_parts(vec![Muown::new().into()]).with_weight_decay(0.0.into());
        let config = config.with_layout(layout).with_rule(RoutingRule::muon("weight"));
        let values = || Tensor::<2>::random([6, 6], Distribution::Normal(0.0, 1.0), &device);
        let is_last = Tensor::<1, Int>::arange(0..6, &device).equal_elem(5);
        let is_last = is_last.unsqueeze_dim::<2>(dimension).expand([6, 6]);
        let weight = values().mask_fill(is_last, 0.0);
        let mut one = One { weight: Param::from_tensor(weight) };
        let mut optim = config.init(&one);
        let norms = |one: &One| {
            let weight = one.weight.val().inner();
            weight.square().sum_dim(dimension).sqrt().reshape([6])
        };
        for factor in [1.0, 2.0, 0.5, 1.0] {
            let scaled = |weight: Tensor<2>| {
                Tensor::from_inner(weight.inner().mul_scalar(factor)).require_grad()
            };
            one.weight = one.weight.map(scaled);
            let before = norms(&one);
            let mut gradients = GradientsParams::new();
            gradients.register(one.weight.id, values().inner());
            one = optim.step(LR, one, gradients);
            let after = norms(&one);
            // A step of Adam is at most a few times the learning rate.
            let change = (after.clone() - before).abs().max().into_scalar::<f32>();
            assert!(change > 0.0 && change < 10.0 * LR as f32, "{layout:?}, {factor}: {change}");
            let last = after.slice(s![5..6]).into_scalar::<f32>();
            assert_eq!(last, 0.0, "{layout:?}");
        }
    }
}

#[test]
fn updates_are_kept_above_a_floor_and_below_a_limit() {
    let norms_of_rows = |matrix: &Mat<f64>| -> Vec<f64> {
        (0..matrix.nrows()).map(|row| matrix.row(row).norm_l2()).collect()
    };
    for ratio in [0.1, 0.5, 2.0] {
        compare(&with(RelativeUpdate::floor(ratio)), |value, grad| {
            let update = times(SCALE, &iterated(grad));
            let factor = (ratio * value.norm_l2() / update.norm_l2()).max(1.0);
            value - times(LR * factor, &update)
        });
        compare(&with(RelativeUpdate::exact(ratio)), |value, grad| {
            let update = iterated(grad);
            let factor = ratio * value.norm_l2() / update.norm_l2();
            value - times(LR * factor, &update)
        });
        for most in [None, Some(1.2 * ratio)] {
            let part = RelativeUpdate::floor_per_output(ratio).with_most(most);
            compare(&with(part), |value, grad| {
                let update = times(SCALE, &iterated(grad));
                let (old, of_update) = (norms_of_rows(&value), norms_of_rows(&update));
                let moved = mapped(&update, |i, _, x| {
                    let of_row = old[i] / of_update[i];
                    let floor = (ratio * of_row).max(1.0);
                    LR * x * most.map_or(floor, |most| floor.min(most * of_row))
                });
                value - moved
            });
        }
    }
}

#[test]
fn a_parameter_of_zeros_stays_zero_at_an_exact_ratio_and_leaves_it_by_a_floor() {
    let (_, grads) = &cases()[0];
    let zeros = Mat::zeros(grads[0].nrows(), grads[0].ncols());
    for (part, stays) in [(RelativeUpdate::exact(1.0), true), (RelativeUpdate::floor(0.35), false)]
    {
        let values = trajectory(&with(part), &zeros, grads, LR, LAYOUTS[0]);
        assert_eq!(values.iter().all(|value| value.norm_l2() == 0.0), stays, "{part:?}");
    }
}

fn decaying(decay: WeightDecay) -> MuonConfig {
    plain().with_lr_factor(SCALE).with_weight_decay(decay)
}

#[test]
fn uniform_decay_scales_the_old_values() {
    let rate = 0.5;
    let schedule = || Schedule::constant(rate);
    for (decay, factor) in [
        (WeightDecay::Decoupled(schedule()), 1.0 - LR * rate),
        (WeightDecay::Independent(schedule()), 1.0 - rate),
        (WeightDecay::SquaredRate(schedule()), 1.0 - LR * LR * rate),
    ] {
        compare(&decaying(decay), |value, grad| {
            times(factor, &value) - times(LR * SCALE, &iterated(grad))
        });
    }
}

#[test]
fn coupled_decay_is_part_of_the_gradient() {
    let rate = 0.5;
    compare(&decaying(WeightDecay::Coupled(rate.into())), |value, grad| {
        let update = iterated(&(grad + times(rate, &value)));
        value - times(LR * SCALE, &update)
    });
}

#[test]
fn cautious_decay_never_works_against_the_update() {
    let rate = 0.5;
    for (decay, decayed_at) in [
        (WeightDecay::Cautious(rate.into()), LR),
        (WeightDecay::CautiousScaled(rate.into()), LR * SCALE),
    ] {
        compare(&decaying(decay), |value, grad| {
            let update = iterated(grad);
            mapped(&value, |i, j, old| {
                let agrees = old * update[(i, j)] >= 0.0;
                let decayed = if agrees { old * (1.0 - decayed_at * rate) } else { old };
                decayed - LR * SCALE * update[(i, j)]
            })
        });
    }
    // Both signs occur.
    for (_, grads) in cases() {
        let (value, update) = (start(&grads), iterated(&grads[0]));
        let agreeing = mapped(&value, |i, j, old| f64::from(old * update[(i, j)] >= 0.0));
        let share = agreeing.squared_norm_l2() / (value.nrows() * value.ncols()) as f64;
        assert!((0.1..0.9).contains(&share), "{share}");
    }
}

/// As in modded-nanogpt's third track: after the part that sets the norm.
#[test]
fn cautious_decay_after_the_parts_is_not_undone_by_them() {
    let (rate, outward) = (3.0, 0.0);
    let config = with(RadialBrake::new(outward, 1.0));
    compare(&config.with_weight_decay(WeightDecay::CautiousAfter(rate.into())), |value, grad| {
        let (update, before) = (iterated(grad), value.norm_l2());
        let moved = &value - times(LR * SCALE, &update);
        let change = moved.norm_l2() - before;
        let kept = if change > 0.0 { outward } else { 1.0 };
        let braked = resized(&moved, before + kept * change);
        mapped(&braked, |i, j, new| {
            let agrees = value[(i, j)] * update[(i, j)] > 0.0;
            if agrees { new * (1.0 - LR * rate) } else { new }
        })
    });
}

/// Decay follows a schedule over the steps of the parameter.
#[test]
fn rates_of_decay_follow_their_schedule() {
    let rate = Schedule::constant(0.4).linear(2, 0.0);
    let rates = [0.2, 0.0, 0.0];
    for (case, grads) in cases() {
        let config = decaying(WeightDecay::Independent(rate.clone()));
        let mut value = start(&grads);
        let expected = grads.iter().zip(rates).map(|(grad, rate)| {
            value = times(1.0 - rate, &value) - times(LR * SCALE, &iterated(grad));
            value.clone()
        });
        let expected: Vec<_> = expected.collect();
        let actual = trajectory(&config, &start(&grads), &grads, LR, LAYOUTS[0]);
        all_close(&actual, &expected, case);
    }
}
