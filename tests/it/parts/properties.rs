//! Properties that parts claim, of matrices of any shape and size.

use distmuon::parts::{
    AdaMuon, ColumnEquilibration, Hyperball, Mars, MaxNorm, Namo, NorMuon, Renormalization,
    RowEquilibration,
};
use distmuon::{
    IterationForm, MatrixLayout, MomentumConfig, MomentumForm, MuonConfig, Part, WeightDecay,
};
use distmuon_testing::device::tf32_or;
use distmuon_testing::references::random;
use faer::Mat;
use proptest::prelude::*;

use super::{LAYOUTS, close, mapped, times, trajectory, updates};

/// The plain update in the standard form, which has no restarts to compute.
fn plain() -> MuonConfig {
    let mut config = super::plain();
    config.newton_schulz.form = IterationForm::Standard;
    config
}

fn with(part: impl Into<Part>) -> MuonConfig {
    plain().with_parts(vec![part.into()])
}

/// The plain update with momentum.
fn with_momentum() -> MuonConfig {
    plain().with_momentum(MomentumConfig::new().with_momentum(0.9.into()))
}

fn layouts() -> impl Strategy<Value = MatrixLayout> {
    prop::sample::select(LAYOUTS.to_vec())
}

/// Gradients of three steps of one shape.
fn gradients() -> impl Strategy<Value = Vec<Mat<f64>>> {
    (1usize..20, 1usize..20, 0u64..1_000).prop_map(|(rows, columns, seed)| {
        (0..3).map(|step| random(rows, columns, 3 * seed + step)).collect()
    })
}

/// One factor between 1e-3 and 1e3 for each of at most 20 lines.
fn factors() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec((-3.0..3.0f64).prop_map(|power| 10f64.powf(power)), 20)
}

fn norms(matrices: &[Mat<f64>]) -> Vec<f64> {
    matrices.iter().map(|matrix| matrix.norm_l2()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn hyperball_keeps_the_norm(
        grads in gradients(), layout in layouts(), lr in 1e-3..2.0f64, radius in 0.1..50.0f64,
    ) {
        let start = random(grads[0].nrows(), grads[0].ncols(), 5);
        for (part, radius) in
            [(Hyperball::initial(), start.norm_l2()), (Hyperball::fixed(radius), radius)]
        {
            for norm in norms(&trajectory(&with(part), &start, &grads, lr, layout)) {
                prop_assert!((norm / radius - 1.0).abs() < 1e-5, "{norm} for {radius}");
            }
        }
    }

    #[test]
    fn max_norm_is_an_upper_limit_that_changes_nothing_below(
        grads in gradients(), layout in layouts(), limit in 0.1..20.0f64,
    ) {
        let start = random(grads[0].nrows(), grads[0].ncols(), 5);
        let limited = trajectory(&with(MaxNorm::new(limit)), &start, &grads, 0.1, layout);
        prop_assert!(norms(&limited).iter().all(|norm| *norm <= limit * (1.0 + 1e-5)));
        let free = trajectory(&plain(), &start, &grads, 0.1, layout);
        if norms(&free).iter().all(|norm| *norm < limit * (1.0 - 1e-5)) {
            for (limited, free) in limited.iter().zip(&free) {
                prop_assert!(limited == free);
            }
        }
    }

    #[test]
    fn equilibration_removes_the_scales_of_rows_or_columns(
        grads in gradients(), layout in layouts(), factors in factors(),
    ) {
        for (part, by_row) in [
            (Part::from(RowEquilibration), true),
            (ColumnEquilibration.into(), false),
        ] {
            let scaled: Vec<_> = grads
                .iter()
                .map(|grad| mapped(grad, |i, j, x| x * factors[if by_row { i } else { j }]))
                .collect();
            let config = with(part);
            let (actual, expected) =
                (updates(&config, &scaled, layout), updates(&config, &grads, layout));
            for (actual, expected) in actual.iter().zip(&expected) {
                close(actual, expected, "scaled lines");
            }
        }
    }

    #[test]
    fn normuon_keeps_the_norm(grads in gradients(), layout in layouts(), beta_2 in 0.0..0.99f64) {
        let expected = norms(&updates(&plain(), &grads, layout));
        for part in [NorMuon::new(beta_2), NorMuon::per_output(beta_2)] {
            let actual = norms(&updates(&with(part), &grads, layout));
            for (actual, expected) in actual.iter().zip(&expected) {
                let error = (actual / expected - 1.0).abs();
                prop_assert!(error < tf32_or(1e-4), "{actual} for {expected}");
            }
        }
    }

    #[test]
    fn both_forms_of_normuon_agree_on_matrices_with_more_outputs(
        grads in gradients(), layout in layouts(), beta_2 in 0.0..0.99f64,
    ) {
        let grads: Vec<_> = match grads[0].nrows() < grads[0].ncols() {
            true => grads.iter().map(|grad| grad.transpose().to_owned()).collect(),
            false => grads,
        };
        let both = [NorMuon::new(beta_2), NorMuon::per_output(beta_2)]
            .map(|part| updates(&with(part), &grads, layout));
        for (a, b) in both[0].iter().zip(&both[1]) {
            close(a, b, "outputs are the longer dimension");
        }
    }

    #[test]
    fn renormalization_sets_the_norm(
        grads in gradients(), layout in layouts(), norm in 1e-3..1e3f64,
    ) {
        let config = with(Renormalization::frobenius(norm));
        for actual in norms(&updates(&config, &grads, layout)) {
            prop_assert!((actual / norm - 1.0).abs() < 1e-4, "{actual} for {norm}");
        }
    }

    /// A power of two changes no rounding. Another factor does, and may turn the sign of an element
    /// near zero, which is all that the first step of AdaMuon keeps of it.
    #[test]
    fn updates_do_not_depend_on_the_scale_of_all_gradients(
        grads in gradients(), layout in layouts(), power in -60..40i32,
    ) {
        let scaled: Vec<_> = grads.iter().map(|grad| times(2f64.powi(power), grad)).collect();
        let namo = || Namo::new(0.95).into();
        for parts in [
            vec![],
            vec![RowEquilibration.into()],
            vec![ColumnEquilibration.into()],
            vec![namo()],
            vec![namo(), AdaMuon::new(0.9).into()],
            vec![NorMuon::new(0.9).into(), Renormalization::rms(0.2).into()],
        ] {
            let config = with_momentum().with_parts(parts);
            prop_assert_eq!(updates(&config, &scaled, layout), updates(&config, &grads, layout));
        }
    }

    /// The square root of the first second moment is the magnitude of the element.
    #[test]
    fn the_first_step_of_adamuon_has_signs_only(
        grads in gradients(), layout in layouts(), beta_2 in 0.0..0.99f64,
    ) {
        let first = &grads[..1];
        let update = &updates(&with(AdaMuon::new(beta_2).with_epsilon(0.0)), first, layout)[0];
        let size = 1.0 / (1.0 - beta_2).sqrt();
        let expected = mapped(&updates(&plain(), first, layout)[0], |_, _, x| size * x.signum());
        close(update, &expected, "signs");
    }

    /// The correction of the first step has the direction of the gradient, and those of the others
    /// are zero.
    #[test]
    fn mars_follows_gradients_that_stay_the_same(
        grads in gradients(), layout in layouts(), gamma in 0.0..1.0f64,
    ) {
        let same = vec![times(0.05 / grads[0].norm_l2(), &grads[0]); 3];
        let expected = updates(&with_momentum(), &same, layout);
        let config = with_momentum().with_parts(vec![Mars::new(gamma).into()]);
        for (actual, expected) in updates(&config, &same, layout).iter().zip(&expected) {
            close(actual, expected, "equal gradients");
        }
    }

    /// The correction is a factor on the momentum, and the iteration divides by the norm.
    #[test]
    fn bias_correction_does_not_change_directions(
        grads in gradients(), layout in layouts(), mu in 0.0..0.99f64, sum in any::<bool>(),
    ) {
        let form = if sum { MomentumForm::Sum } else { MomentumForm::Average };
        let with = |corrects| {
            let momentum = MomentumConfig::new()
                .with_momentum(mu.into())
                .with_form(form)
                .with_nesterov(false)
                .with_bias_correction(corrects);
            updates(&with_momentum().with_momentum(momentum), &grads, layout)
        };
        for (actual, expected) in with(true).iter().zip(&with(false)) {
            close(actual, expected, "corrected");
        }
    }

    #[test]
    fn uniform_decay_is_a_factor_on_matrices_without_a_gradient(
        grads in gradients(), layout in layouts(), lr in 1e-3..0.9f64, rate in 0.0..1.0f64,
    ) {
        let start = random(grads[0].nrows(), grads[0].ncols(), 5);
        let none = vec![times(0.0, &grads[0])];
        for (decay, factor) in [
            (WeightDecay::Decoupled(rate.into()), 1.0 - lr * rate),
            (WeightDecay::Independent(rate.into()), 1.0 - rate),
            (WeightDecay::SquaredRate(rate.into()), 1.0 - lr * lr * rate),
        ] {
            let decayed = trajectory(&plain().with_weight_decay(decay), &start, &none, lr, layout);
            let difference = (&decayed[0] - times(factor, &start)).norm_l2();
            prop_assert!(difference < 1e-6 * start.norm_l2(), "{difference:e}");
        }
    }

    /// An element moves as with the decay or as without it.
    #[test]
    fn cautious_decay_decides_element_by_element(
        grads in gradients(), layout in layouts(), rate in 0.1..1.0f64,
    ) {
        let start = random(grads[0].nrows(), grads[0].ncols(), 5);
        let stepped = |decay| {
            let config = plain().with_weight_decay(decay);
            trajectory(&config, &start, &grads[..1], 0.1, layout).swap_remove(0)
        };
        let cautious = stepped(WeightDecay::Cautious(rate.into()));
        let [with, without] = [rate, 0.0].map(|w| stepped(WeightDecay::Decoupled(w.into())));
        for j in 0..start.ncols() {
            for i in 0..start.nrows() {
                // Steps towards zero decay. The sign of a step of less than a rounding is unknown.
                let moved = start[(i, j)] - without[(i, j)];
                let expected = if moved * start[(i, j)] >= 0.0 { &with } else { &without };
                let error = (cautious[(i, j)] - expected[(i, j)]).abs();
                prop_assert!(error < 1e-6 || moved.abs() < 1e-6, "{error:e}");
            }
        }
    }

    #[test]
    fn mars_without_strength_limits_the_norm_only(grads in gradients(), layout in layouts()) {
        let small: Vec<_> =
            grads.iter().map(|grad| times(0.9 / grad.norm_l2(), grad)).collect();
        let expected = updates(&with_momentum(), &small, layout);
        let config = with_momentum().with_parts(vec![Mars::new(0.0).into()]);
        for (actual, expected) in updates(&config, &small, layout).iter().zip(&expected) {
            close(actual, expected, "no strength");
        }
    }
}
