//! Where the Gram form must restart, computed from the coefficients.
//!
//! The Gram form never looks at `X` between restarts. A rounding error of `R = X X^T` grows there by up to
//! `a^2` a step; it is also as large as the largest eigenvalue of `R` makes it, and singular values that a step
//! takes down by cancellation in `Z + a I` get it in full. Restarts are chosen by the error of the result
//! that this comes to, predicted for a number of spectra (`rounding.rs`), beside that of
//! the standard form. `docs/precision.md` compares both with what was measured.

use std::collections::HashMap;

use burn::tensor::FloatDType;

use super::coefficients::Polynomial;
use super::rounding::{Arithmetic, Errors, Spectrum};

/// The predicted error that the Gram form may have, in multiples of that of the standard form: a little
/// less than the three that tests hold it to.
const MOST_ERROR: f64 = 2.75;

/// The same for errors above one half, which are too large to be predicted to first order.
const LARGE: f64 = 0.5;
const MOST_LARGE_ERROR: f64 = 1.25;

/// The error that is allowed in any case, in roundings: 8e-3 in bfloat16, 1e-3 in float16, where products
/// are summed more precisely than they are stored; 6e-5 in float32, 1e-13 in float64.
const ALLOWED_HALF: f64 = 4.0;
const ALLOWED: f64 = 2048.0;

/// First restarts that are looked into for every position of the last of them.
const HEADS_OF_AN_END: usize = 16;

/// Rows of the simulated matrices with graded spectra.
const ROWS: [f64; 3] = [24.0, 256.0, 2048.0];

/// Matrices with fewer rows are not simulated: norms of random matrices say little of them.
const FEWEST_ROWS: f64 = 8.0;

/// Groups of singular values that stand for a graded spectrum.
const GROUPS: usize = 12;

/// Ranks of equal singular values that are simulated for every doubling, up to 4096.
const RANKS_PER_DOUBLING: usize = 2;

/// The fewest restarts with which the Gram form is about as exact as the standard form, at their best
/// positions; `None` where there would have to be more than one for every other step, so that the
/// standard form has to serve.
pub fn choose(schedule: &[Polynomial], dtype: FloatDType) -> Option<Vec<usize>> {
    let arithmetic = Arithmetic::of(dtype);
    let is_half = arithmetic.summing < arithmetic.storing;
    let allowed = arithmetic.storing * if is_half { ALLOWED_HALF } else { ALLOWED };
    let limited = |spectrum: &Spectrum| {
        let errors = Errors::of(schedule, arithmetic, spectrum);
        let standard = errors.standard.sqrt();
        let limit = MOST_ERROR * standard + allowed;
        (errors, limit.min((MOST_LARGE_ERROR * standard).max(LARGE)).powi(2))
    };
    let simulated: Vec<_> = spectra().iter().map(limited).collect();
    // The worst excess over the limits, given the bounds of segments from step 0 on.
    let excess = |bounds: &[usize]| {
        let excess = simulated.iter().map(|(errors, limit)| errors.gram(bounds) / limit);
        excess.fold(0.0, worse)
    };
    let steps = schedule.len();
    let mut heads = vec![vec![0]];
    for _ in 0..=steps / 2 {
        let runs = heads.iter().map(|head| [head.as_slice(), &[steps]].concat());
        let best = runs.map(|run| (excess(&run), run)).min_by(|(a, _), (b, _)| a.total_cmp(b));
        if let Some((_, run)) = best.filter(|(excess, _)| *excess <= 1.0) {
            return Some(run[1..run.len() - 1].to_vec());
        }
        let longer = heads.iter().flat_map(|head| {
            let next = head.last().expect("it starts with 0") + 1..steps;
            next.map(move |next| [head.as_slice(), &[next]].concat())
        });
        let usable = longer.map(|head| (excess(&head), head)).filter(|(excess, _)| *excess <= 1.0);
        heads = best_of_each_end(usable.collect());
    }
    None
}

/// The heads with the least excess among those that end alike: all of them would be too many for long runs.
fn best_of_each_end(mut heads: Vec<(f64, Vec<usize>)>) -> Vec<Vec<usize>> {
    heads.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut kept = HashMap::<usize, usize>::new();
    heads.retain(|(_, head)| {
        let same = kept.entry(*head.last().expect("it starts with 0")).or_default();
        *same += 1;
        *same <= HEADS_OF_AN_END
    });
    heads.into_iter().map(|(_, head)| head).collect()
}

/// The larger of two; what is no number counts as infinite.
fn worse(a: f64, b: f64) -> f64 {
    if b.is_nan() { f64::INFINITY } else { a.max(b) }
}

/// Spectra of many kinds: equal singular values of all, half or few of the dimensions, graded ones, low rank
/// with noise, and a spike.
fn spectra() -> Vec<Spectrum> {
    let ranks =
        (0..=12 * RANKS_PER_DOUBLING).map(|i| 2f64.powf(i as f64 / RANKS_PER_DOUBLING as f64));
    let equal = ranks.flat_map(|rank| [0.02, 1.0, 7.0].map(|rest| [rank, rank * rest]));
    let equal = equal.filter(|[rank, rest]| rank + rest >= FEWEST_ROWS);
    let equal = equal.map(|counts| Spectrum::new(vec![1.0, 0.0], counts.to_vec()));
    equal.chain(ROWS.into_iter().flat_map(graded)).collect()
}

fn graded(rows: f64) -> Vec<Spectrum> {
    let group = |value: &dyn Fn(f64) -> f64| {
        let values = (0..GROUPS).map(|i| value((i as f64 + 0.5) / GROUPS as f64)).collect();
        Spectrum::new(values, vec![rows / GROUPS as f64; GROUPS])
    };
    vec![
        group(&|x| 1.0 - x),
        // About what the singular values of Gaussian matrices are, with two and four times as many columns.
        group(&|x| 1.0 - 0.83 * x),
        group(&|x| 1.0 - 0.67 * x),
        group(&|x| 10f64.powf(-2.0 * x)),
        group(&|x| 10f64.powf(-4.0 * x)),
        Spectrum::new(vec![1.0, 0.01], vec![rows / 8.0, rows * 7.0 / 8.0]),
        Spectrum::new(vec![1.0, 0.001], vec![rows / 2.0; 2]),
        Spectrum::new(vec![1.0, 0.01], vec![1.0, rows - 1.0]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orthogonalize::Coefficients;

    fn schedule(set: &Coefficients) -> Vec<Polynomial> {
        set.schedule(set.designed_steps()).unwrap()
    }

    /// A run of the Gram form, from 0 on, beside the standard form: predicted errors for half ones, half zeros.
    fn half_ones(bounds: &[usize], dtype: FloatDType) -> [f64; 2] {
        let spectrum = Spectrum::new(vec![1.0, 0.0], vec![256.0, 256.0]);
        let schedule = schedule(&Coefficients::polar_express());
        let errors = Errors::of(&schedule, Arithmetic::of(dtype), &spectrum);
        [errors.gram(bounds), errors.standard].map(f64::sqrt)
    }

    /// What a simulation that rounds every product found for 512 by 1024 matrices.
    #[test]
    fn predictions_are_what_was_simulated() {
        for (dtype, bounds, simulated) in [
            (FloatDType::F16, &[0, 2, 5][..], 1.6e-1),
            (FloatDType::BF16, &[0, 1, 3, 5], 8.4e-2),
            (FloatDType::BF16, &[0, 2, 3, 5], 7.0e-2),
            (FloatDType::F16, &[0, 1, 3, 5], 1.1e-2),
            (FloatDType::F16, &[0, 2, 3, 5], 9.1e-3),
        ] {
            let [gram, standard] = half_ones(bounds, dtype);
            let ratio = gram / simulated;
            assert!((0.7..2.0).contains(&ratio), "{dtype:?} {bounds:?}: {gram:.2e}");
            let simulated = if dtype == FloatDType::BF16 { 8.2e-2 } else { 1.0e-2 };
            assert!((0.7..1.6).contains(&(standard / simulated)), "{dtype:?}: {standard:.2e}");
        }
    }

    #[test]
    fn chosen_restarts_of_the_sets() {
        use Coefficients::*;
        use FloatDType::{BF16, F16, F32};
        for (set, dtype, expected) in [
            (Coefficients::polar_express(), F16, &[2, 3][..]),
            (Coefficients::polar_express(), BF16, &[2, 3]),
            (Coefficients::polar_express(), F32, &[2, 4]),
            (PolarExpressCushioned, F16, &[2, 3]),
            (PolarExpressCushioned, BF16, &[2, 3]),
            (PolarExpressCushioned, F32, &[2, 4]),
            (You, F16, &[2, 3]),
            (You, BF16, &[2, 4]),
            (You, F32, &[3]),
            (KellerJordan, F16, &[3]),
            (KellerJordan, BF16, &[2, 3]),
            (KellerJordan, F32, &[3]),
        ] {
            assert_eq!(
                choose(&schedule(&set), dtype),
                Some(expected.to_vec()),
                "{set:?} {dtype:?}"
            );
        }
    }

    #[test]
    fn wild_and_gentle_coefficients() {
        assert_eq!(choose(&[[50.0, -75.0, 26.0]; 8], FloatDType::BF16), None);
        for dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F32, FloatDType::F64] {
            assert_eq!(choose(&[[1.0, 0.0, 0.0]; 8], dtype), Some(vec![]), "{dtype:?}");
        }
    }
}
