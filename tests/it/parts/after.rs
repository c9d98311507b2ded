//! Parts after the iteration.

use distmuon::parts::{AdaMuon, Namo, NorMuon, Renormalization};
use distmuon::{MomentumConfig, MuonConfig, Part};
use faer::Mat;

use super::{LAYOUTS, all_close, cases, iterated, mapped, plain, resized, times, updates};

const BETA_2: f64 = 0.8;

fn with(part: impl Into<Part>) -> MuonConfig {
    plain().with_parts(vec![part.into()])
}

#[test]
fn renormalization_gives_every_target_norm() {
    for (case, grads) in cases() {
        let (rows, columns) = (grads[0].nrows() as f64, grads[0].ncols() as f64);
        for (part, norm) in [
            (Renormalization::orthogonal(), rows.min(columns).sqrt()),
            (Renormalization::rms(0.2), 0.2 * (rows * columns).sqrt()),
            (Renormalization::frobenius(0.7), 0.7),
        ] {
            let expected: Vec<_> =
                grads.iter().map(|grad| resized(&iterated(grad), norm)).collect();
            for layout in LAYOUTS {
                all_close(&updates(&with(part), &grads, layout), &expected, case);
            }
        }
    }
}

/// The updates of NorMuon with a second moment for every row, or for every column.
fn equal_moments(grads: &[Mat<f64>], by_row: bool, divisor: impl Fn(f64) -> f64) -> Vec<Mat<f64>> {
    let (rows, columns) = (grads[0].nrows(), grads[0].ncols());
    let mut moments = vec![0.0; if by_row { rows } else { columns }];
    let step = |grad: &Mat<f64>| {
        let iterated = iterated(grad);
        for (index, moment) in moments.iter_mut().enumerate() {
            let mean = match by_row {
                true => iterated.row(index).squared_norm_l2() / columns as f64,
                false => iterated.col(index).squared_norm_l2() / rows as f64,
            };
            *moment = BETA_2 * *moment + (1.0 - BETA_2) * mean;
        }
        let moment = |i, j| moments[if by_row { i } else { j }];
        resized(&mapped(&iterated, |i, j, x| x / divisor(moment(i, j))), iterated.norm_l2())
    };
    grads.iter().map(step).collect()
}

#[test]
fn normuon_divides_by_a_second_moment_of_the_longer_dimension() {
    // A large guard, which has an effect on some.
    for epsilon in [1e-10, 0.01] {
        let config = with(NorMuon::new(BETA_2).with_epsilon(epsilon));
        for (case, grads) in cases() {
            let by_row = grads[0].nrows() >= grads[0].ncols();
            let expected = equal_moments(&grads, by_row, |moment| moment.max(epsilon).sqrt());
            for layout in LAYOUTS {
                all_close(&updates(&config, &grads, layout), &expected, case);
            }
        }
    }
}

#[test]
fn normuon_per_output_divides_by_a_second_moment_of_rows() {
    for epsilon in [1e-10, 0.1] {
        let config = with(NorMuon::per_output(BETA_2).with_epsilon(epsilon));
        for (case, grads) in cases() {
            let expected = equal_moments(&grads, true, |moment| moment.sqrt() + epsilon);
            for layout in LAYOUTS {
                all_close(&updates(&config, &grads, layout), &expected, case);
            }
        }
    }
}

#[test]
fn adamuon_divides_by_a_second_moment_of_elements() {
    for epsilon in [1e-8, 0.1] {
        let config = with(AdaMuon::new(BETA_2).with_epsilon(epsilon));
        for (case, grads) in cases() {
            let mut moments = times(0.0, &grads[0]);
            let expected = grads.iter().map(|grad| {
                let iterated = iterated(grad);
                let squares = mapped(&iterated, |_, _, x| x * x);
                moments = times(BETA_2, &moments) + times(1.0 - BETA_2, &squares);
                mapped(&iterated, |i, j, x| x / (moments[(i, j)].sqrt() + epsilon))
            });
            let expected: Vec<_> = expected.collect();
            for layout in LAYOUTS {
                all_close(&updates(&config, &grads, layout), &expected, case);
            }
        }
    }
}

/// NAMO-D, with and without a limit that some factors reach.
#[test]
fn namo_scales_each_input_by_norms_of_its_own() {
    let mu = 0.9;
    for (limit, corrects) in [(0.0, false), (0.9, false), (0.75, true), (1.0, true)] {
        let momentum =
            MomentumConfig::new().with_momentum(mu.into()).with_bias_correction(corrects);
        let part = Namo::per_input(BETA_2, limit).with_epsilon(1e-8);
        let config = with(part.with_bias_correction(corrects)).with_momentum(momentum);
        for (case, grads) in cases() {
            let grads: Vec<_> =
                grads.iter().zip([1.0, 30.0, 0.1]).map(|(grad, size)| times(size, grad)).collect();
            let inputs = grads[0].ncols();
            let (mut moments, mut momentum) = (vec![0.0; inputs], times(0.0, &grads[0]));
            let expected = (1..).zip(&grads).map(|(step, grad)| {
                for (input, moment) in moments.iter_mut().enumerate() {
                    *moment = BETA_2 * *moment + (1.0 - BETA_2) * grad.col(input).squared_norm_l2();
                }
                momentum = times(mu, &momentum) + times(1.0 - mu, grad);
                let update = times(mu, &momentum) + times(1.0 - mu, grad);
                let [by_update, by_moment] = match corrects {
                    true => [1.0 - f64::powi(mu, step + 1), 1.0 - f64::powi(BETA_2, step)],
                    false => [1.0; 2],
                };
                let factor = |input: usize| {
                    let root = (moments[input].sqrt() + 1e-8) / f64::sqrt(by_moment);
                    update.col(input).norm_l2() / by_update / root
                };
                let factors: Vec<f64> = (0..inputs).map(factor).collect();
                let mean = factors.iter().sum::<f64>() / inputs as f64;
                let limited = |factor: f64| match limit > 0.0 {
                    true => factor.clamp(limit * mean, mean / limit),
                    false => factor,
                };
                let of_inputs: Vec<f64> = factors.into_iter().map(limited).collect();
                mapped(&iterated(&update), |_, input, x| of_inputs[input] * x)
            });
            let expected: Vec<_> = expected.collect();
            for layout in LAYOUTS {
                all_close(&updates(&config, &grads, layout), &expected, case);
            }
        }
    }
}

#[test]
fn namo_scales_by_the_norms_of_momentum_and_gradients() {
    let mu = 0.9;
    for (epsilon, corrects) in [(1e-8, false), (0.5, false), (1e-8, true), (0.5, true)] {
        let momentum =
            MomentumConfig::new().with_momentum(mu.into()).with_bias_correction(corrects);
        let config = with(Namo::new(BETA_2).with_epsilon(epsilon).with_bias_correction(corrects))
            .with_momentum(momentum);
        for (case, grads) in cases() {
            // Gradients of different sizes.
            let grads: Vec<_> =
                grads.iter().zip([1.0, 30.0, 0.1]).map(|(grad, size)| times(size, grad)).collect();
            let (mut moment, mut momentum) = (0.0, times(0.0, &grads[0]));
            let expected = (1..).zip(&grads).map(|(step, grad)| {
                moment = BETA_2 * moment + (1.0 - BETA_2) * grad.squared_norm_l2();
                momentum = times(mu, &momentum) + times(1.0 - mu, grad);
                let update = times(mu, &momentum) + times(1.0 - mu, grad);
                // Nesterov's update has the weights of one step more.
                let [by_update, by_moment] = match corrects {
                    true => [1.0 - f64::powi(mu, step + 1), 1.0 - f64::powi(BETA_2, step)],
                    false => [1.0; 2],
                };
                let root = (moment.sqrt() + epsilon) / f64::sqrt(by_moment);
                times(update.norm_l2() / by_update / root, &iterated(&update))
            });
            let expected: Vec<_> = expected.collect();
            for layout in LAYOUTS {
                all_close(&updates(&config, &grads, layout), &expected, case);
            }
        }
    }
}
