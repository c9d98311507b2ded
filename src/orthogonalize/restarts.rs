//! The restarts of the Gram form, computed from the coefficients.
//!
//! The Gram form does not read `X` between restarts. There, a rounding error of `R = X X^T` grows
//! by up to `a^2` per step. Its size is set by the largest eigenvalue of `R`, and singular values
//! that a step reduces by cancellation in `Z + a I` receive all of it. Restarts are chosen by the
//! resulting error of the Gram form relative to the standard form's, both predicted for a number of
//! spectra (`rounding_errors.rs`). `docs/design/precision.md` compares the predictions with
//! measurements.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use burn::tensor::FloatDType;

use super::config::Normalization;
use super::rounding_errors::{Arithmetic, Errors, Spectrum};
use crate::backend::Polynomial;

/// The largest predicted error of the Gram form, in multiples of the standard form's. It is a
/// little less than the factor of three that tests allow.
const MAX_ERROR_RATIO: f64 = 2.75;

/// The same for errors above one half, which are too large to be predicted to first order.
const LARGE_ERROR: f64 = 0.5;
const MAX_LARGE_ERROR_RATIO: f64 = 1.25;

/// The error that is always allowed, in units of a rounding. In half precision, where products are
/// summed more precisely than they are stored, it is 8e-3 for bfloat16 and 1e-3 for float16.
/// Otherwise it is 6e-5 for float32 and 1e-13 for float64.
const ALLOWED_HALF: f64 = 4.0;
const ALLOWED: f64 = 2048.0;

/// The number of beginnings that the search keeps for every position of their last restart.
const BEAM_WIDTH: usize = 16;

/// The numbers of rows of the simulated matrices with graded spectra.
const ROWS: [f64; 3] = [24.0, 256.0, 2048.0];

/// The smallest number of rows that is simulated: the norms of random matrices say little about
/// smaller matrices.
const MIN_ROWS: f64 = 8.0;

/// The number of groups of equal singular values that represent a graded spectrum.
const GROUPS: usize = 12;

/// The number of ranks that are simulated per doubling of the rank, up to 4096, for equal singular
/// values.
const RANKS_PER_DOUBLING: usize = 2;

/// The bits of a schedule, the norm before it, and the type of the iteration.
type Key = (Vec<[u64; 3]>, Normalization, FloatDType);

/// Returns the fewest restarts with which the Gram form is about as exact as the standard form, at
/// their best positions: increasing indices of the steps that they precede. `None` if that takes
/// more than one restart for every two steps; the standard form has to be used then.
///
/// A schedule is searched for once in a process: every optimizer and every rank asks for it again.
///
/// ```
/// use burn::tensor::FloatDType;
/// use distmuon::orthogonalize::{Coefficients, Normalization, Polynomial, restarts};
///
/// let schedule: Vec<Polynomial> = Coefficients::KellerJordan.schedule(5)?;
/// let before = restarts::choose(&schedule, Normalization::Frobenius, FloatDType::F16);
/// assert_eq!(before, Some(vec![3])); // one restart, before the fourth of the five steps
/// # Ok::<(), distmuon::Error>(())
/// ```
pub fn choose(
    schedule: &[Polynomial],
    normalization: Normalization,
    dtype: FloatDType,
) -> Option<Vec<usize>> {
    static CHOSEN: Mutex<BTreeMap<Key, Option<Vec<usize>>>> = Mutex::new(BTreeMap::new());
    let bits = schedule.iter().map(|polynomial| polynomial.map(f64::to_bits));
    let key = (bits.collect(), normalization, dtype);
    // Ranks that are threads wait for the first of them to find the restarts.
    let mut chosen = CHOSEN.lock().expect("no search panics");
    chosen.entry(key).or_insert_with(|| search(schedule, normalization, dtype)).clone()
}

fn search(
    schedule: &[Polynomial],
    normalization: Normalization,
    dtype: FloatDType,
) -> Option<Vec<usize>> {
    let arithmetic = Arithmetic::new(dtype);
    let is_half = arithmetic.summing < arithmetic.storing;
    let allowed = arithmetic.storing * if is_half { ALLOWED_HALF } else { ALLOWED };
    let errors_and_limit = |spectrum: &Spectrum| {
        let errors = Errors::new(schedule, arithmetic, spectrum);
        let standard = errors.standard.sqrt();
        let limit = MAX_ERROR_RATIO * standard + allowed;
        (errors, limit.min((MAX_LARGE_ERROR_RATIO * standard).max(LARGE_ERROR)).powi(2))
    };
    let simulated: Vec<_> =
        spectra().iter().map(|spectrum| errors_and_limit(&spectrum.over(normalization))).collect();
    // The largest ratio of an error to its limit, given the bounds of segments from step 0 on.
    let excess = |bounds: &[usize]| {
        let excess = simulated.iter().map(|(errors, limit)| errors.gram(bounds) / limit);
        excess.fold(0.0, max_or_infinite)
    };
    let steps = schedule.len();
    // The bounds of the first segments, with one restart more in every turn.
    let mut beginnings = vec![vec![0]];
    for _ in 0..=steps / 2 {
        let runs = beginnings.iter().map(|beginning| [beginning.as_slice(), &[steps]].concat());
        let best = runs.map(|run| (excess(&run), run)).min_by(|(a, _), (b, _)| a.total_cmp(b));
        if let Some((_, run)) = best.filter(|(excess, _)| *excess <= 1.0) {
            return Some(run[1..run.len() - 1].to_vec());
        }
        let longer = beginnings.iter().flat_map(|beginning| {
            let next = beginning.last().expect("bounds start with 0") + 1..steps;
            next.map(move |next| [beginning.as_slice(), &[next]].concat())
        });
        let usable = longer
            .map(|beginning| (excess(&beginning), beginning))
            .filter(|(excess, _)| *excess <= 1.0);
        beginnings = best_for_each_end(usable.collect());
    }
    None
}

/// The beginnings with the least excess among those with the same last bound. To keep all
/// beginnings would take too long for long runs.
fn best_for_each_end(mut beginnings: Vec<(f64, Vec<usize>)>) -> Vec<Vec<usize>> {
    beginnings.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut kept = HashMap::<usize, usize>::new();
    beginnings.retain(|(_, beginning)| {
        let count = kept.entry(*beginning.last().expect("bounds start with 0")).or_default();
        *count += 1;
        *count <= BEAM_WIDTH
    });
    beginnings.into_iter().map(|(_, beginning)| beginning).collect()
}

/// The larger of two numbers, where NaN as the second one counts as infinite.
fn max_or_infinite(a: f64, b: f64) -> f64 {
    if b.is_nan() { f64::INFINITY } else { a.max(b) }
}

/// Spectra of many kinds: equal singular values in all, half or few of the dimensions, graded
/// spectra, low rank with noise, and a spike.
fn spectra() -> Vec<Spectrum> {
    let ranks =
        (0..=12 * RANKS_PER_DOUBLING).map(|i| 2f64.powf(i as f64 / RANKS_PER_DOUBLING as f64));
    let equal = ranks.flat_map(|rank| [0.02, 1.0, 7.0].map(|rest| [rank, rank * rest]));
    let equal = equal.filter(|[rank, rest]| rank + rest >= MIN_ROWS);
    let equal = equal.map(|counts| Spectrum::new(vec![1.0, 0.0], counts.to_vec()));
    equal.chain(ROWS.into_iter().flat_map(graded)).collect()
}

/// Graded spectra, low rank with noise, and a spike, for a number of rows.
fn graded(rows: f64) -> Vec<Spectrum> {
    let group = |value: &dyn Fn(f64) -> f64| {
        let values = (0..GROUPS).map(|i| value((i as f64 + 0.5) / GROUPS as f64)).collect();
        Spectrum::new(values, vec![rows / GROUPS as f64; GROUPS])
    };
    vec![
        group(&|x| 1.0 - x),
        // Approximately the singular values of Gaussian matrices with two and four times as many
        // columns as rows.
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

    /// The predicted errors of the Gram form with these bounds and of the standard form. Half of
    /// the singular values are equal, the others are zero.
    fn half_ones(bounds: &[usize], dtype: FloatDType) -> [f64; 2] {
        let spectrum = Spectrum::new(vec![1.0, 0.0], vec![256.0, 256.0]);
        let schedule = schedule(&Coefficients::polar_express());
        let errors = Errors::new(&schedule, Arithmetic::new(dtype), &spectrum);
        [errors.gram(bounds), errors.standard].map(f64::sqrt)
    }

    /// The simulation rounded every product, for 512 by 1024 matrices.
    #[test]
    fn predicted_errors_are_near_simulated_ones() {
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
    fn the_sets_have_the_expected_restarts() {
        use Coefficients::*;
        use FloatDType::{BF16, F16, F32};
        for (set, dtype, expected) in [
            (Coefficients::polar_express(), F16, Some(&[2, 3][..])),
            (Coefficients::polar_express(), BF16, Some(&[2, 3])),
            (Coefficients::polar_express(), F32, Some(&[2, 4])),
            (PolarExpressCushioned, F16, Some(&[2, 3])),
            (PolarExpressCushioned, BF16, Some(&[2, 3])),
            (PolarExpressCushioned, F32, Some(&[2, 4])),
            (Coefficients::polar_express_for(1e-2), F16, Some(&[2])),
            (Coefficients::polar_express_for(1e-2), BF16, Some(&[2])),
            (Coefficients::polar_express_for(1e-2), F32, Some(&[2])),
            (Coefficients::polar_express_for(1e-3), F16, Some(&[2, 3])),
            (Coefficients::polar_express_for(1e-3), BF16, Some(&[2, 3])),
            (Coefficients::polar_express_for(1e-3), F32, Some(&[2, 3])),
            (Coefficients::polar_express_for(1e-4), F16, Some(&[2, 3, 5])),
            (Coefficients::polar_express_for(1e-4), BF16, None),
            (Coefficients::polar_express_for(1e-4), F32, Some(&[3, 5])),
            (Aol, F16, Some(&[2])),
            (Aol, BF16, Some(&[1, 2])),
            (Aol, F32, Some(&[])),
            (Cubic, F16, Some(&[2])),
            (Cubic, BF16, Some(&[2])),
            (Cubic, F32, Some(&[2])),
            (You, F16, Some(&[2, 3])),
            (You, BF16, Some(&[2, 4])),
            (You, F32, Some(&[3])),
            (KellerJordan, F16, Some(&[3])),
            (KellerJordan, BF16, Some(&[2, 3])),
            (KellerJordan, F32, Some(&[3])),
        ] {
            let chosen = choose(&schedule(&set), Normalization::Frobenius, dtype);
            assert_eq!(chosen.as_deref(), expected, "{set:?} {dtype:?}");
        }
    }

    #[test]
    fn unstable_coefficients_exclude_the_gram_form_and_the_identity_needs_no_restart() {
        let choose =
            |schedule: &[Polynomial], dtype| choose(schedule, Normalization::Frobenius, dtype);
        assert_eq!(choose(&[[50.0, -75.0, 26.0]; 8], FloatDType::BF16), None);
        for dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F32, FloatDType::F64] {
            assert_eq!(choose(&[[1.0, 0.0, 0.0]; 8], dtype), Some(vec![]), "{dtype:?}");
        }
    }
}
