//! The forms of the momentum.

use distmuon::{MomentumConfig, MomentumForm, Schedule};
use faer::Mat;

use super::{LAYOUTS, all_close, cases, iterated_above, plain, times, updates};

/// Larger than the norm of every momentum, so that the update depends on its size.
const EPSILON: f64 = 2e3;

/// The matrices that steps orthogonalise, given the weights of old momentum and new gradient in
/// each step.
fn directions(
    grads: &[Mat<f64>],
    weights: &[[f64; 2]],
    nesterov: bool,
    corrected: bool,
) -> Vec<Mat<f64>> {
    let mut momentum = times(0.0, &grads[0]);
    let mut sum = 0.0;
    let step = |(grad, [keep, fresh]): (&Mat<f64>, &[f64; 2])| {
        momentum = times(*keep, &momentum) + times(*fresh, grad);
        sum = keep * sum + fresh;
        let (update, weight) = match nesterov {
            true => (times(*keep, &momentum) + times(*fresh, grad), keep * sum + fresh),
            false => (momentum.clone(), sum),
        };
        times(if corrected { 1.0 / weight } else { 1.0 }, &update)
    };
    grads.iter().zip(weights).map(step).collect()
}

#[test]
fn every_form_of_momentum_is_that_of_float64() {
    let schedules = [
        (Schedule::constant(0.9), [0.9; 3]),
        (Schedule::constant(0.5).linear(2, 0.9), [0.7, 0.9, 0.9]),
    ];
    for (case, grads) in cases() {
        for (schedule, momenta) in &schedules {
            for form in [MomentumForm::Average, MomentumForm::Sum] {
                let fresh = |mu: f64| if form == MomentumForm::Sum { 1.0 } else { 1.0 - mu };
                let weights = momenta.map(|mu| [mu, fresh(mu)]);
                for [nesterov, corrected] in
                    [[false, false], [true, false], [false, true], [true, true]]
                {
                    let momentum = MomentumConfig::new()
                        .with_momentum(schedule.clone())
                        .with_form(form)
                        .with_nesterov(nesterov)
                        .with_bias_correction(corrected);
                    let mut config = plain().with_momentum(momentum);
                    config.newton_schulz.epsilon = EPSILON;
                    let directions = directions(&grads, &weights, nesterov, corrected);
                    let expected: Vec<_> =
                        directions.iter().map(|x| iterated_above(x, EPSILON)).collect();
                    let case = format!("{case} {form:?} {nesterov} {corrected} {momenta:?}");
                    for layout in LAYOUTS {
                        all_close(&updates(&config, &grads, layout), &expected, &case);
                    }
                }
            }
        }
    }
}

/// The corrected average of equal gradients is the gradient, from the first step on.
#[test]
fn corrected_momentum_of_equal_gradients_is_the_gradient() {
    for (case, grads) in cases() {
        let equal = vec![grads[0].clone(); 4];
        let expected = vec![iterated_above(&grads[0], EPSILON); 4];
        for form in [MomentumForm::Average, MomentumForm::Sum] {
            for nesterov in [false, true] {
                let momentum = MomentumConfig::new()
                    .with_form(form)
                    .with_nesterov(nesterov)
                    .with_bias_correction(true);
                let mut config = plain().with_momentum(momentum);
                config.newton_schulz.epsilon = EPSILON;
                all_close(&updates(&config, &equal, LAYOUTS[0]), &expected, case);
            }
        }
    }
}
