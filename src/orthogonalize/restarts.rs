//! Where the Gram form must restart, computed from the coefficients.
//!
//! The Gram form never looks at `X` between restarts, so a rounding error in `R = X X^T` that makes
//! an eigenvalue slightly negative grows by about `a^2` a step and ruins `Q`. The danger is measured
//! as the largest condition number that `Q` reaches on simulated singular values when every product
//! `X X^T` carries an error of the size of the arithmetic (the metric of `restart_autotune.py` in
//! <https://github.com/Dao-AILab/gram-newton-schulz>).

use burn::tensor::FloatDType;

use super::coefficients::Polynomial;

/// Rounding error of an eigenvalue of `X X^T` in float16, from the reference.
const NOISE_F16: f64 = 4e-4;

/// Simulated singular values: this many, from 1 down to 1e-10 in equal ratios.
const SAMPLES: usize = 10_000;
const DECADES: f64 = 10.0;

/// More restarts cost more than the Gram form saves.
const MOST_RESTARTS: usize = 3;

/// Rounding error of an eigenvalue of `X X^T`: float16's, scaled by the bits of the mantissa.
pub fn noise(dtype: FloatDType) -> f64 {
    let mantissa_bits = match dtype {
        FloatDType::F64 => 52,
        FloatDType::BF16 => 7,
        FloatDType::F16 => 10,
        _ => 23,
    };
    NOISE_F16 * 2f64.powi(10 - mantissa_bits)
}

/// The largest condition number of `Q` over the run, with `noise` subtracted from each product
/// `X X^T`. Restarts are the steps before which `X` is brought up to date.
pub fn condition(schedule: &[Polynomial], restarts: &[usize], noise: f64) -> f64 {
    let mut worst: f64 = 1.0;
    let mut run: Vec<Simulated> = (0..SAMPLES)
        .map(|i| Simulated::new(10f64.powf(-DECADES * i as f64 / (SAMPLES - 1) as f64), noise))
        .collect();
    for (step, polynomial) in schedule.iter().enumerate() {
        if restarts.contains(&step) {
            worst = worst.max(spread(&run));
            run.iter_mut().for_each(|value| *value = Simulated::new(value.q * value.x, noise));
        }
        run.iter_mut().for_each(|value| value.advance(polynomial));
    }
    worst.max(spread(&run))
}

/// One singular value `x` of `X`, with the eigenvalues of `R` and `Q` that belong to it.
struct Simulated {
    x: f64,
    r: f64,
    q: f64,
}

impl Simulated {
    fn new(x: f64, noise: f64) -> Self {
        Self { x, r: x * x - noise, q: 1.0 }
    }

    fn advance(&mut self, [a, b, c]: &Polynomial) {
        let z = b * self.r + c * self.r * self.r;
        self.q *= z + a;
        self.r *= (z + a) * (z + a);
    }
}

/// Ratio of the extreme magnitudes of `Q`; infinite when one is not a number.
fn spread(run: &[Simulated]) -> f64 {
    let (low, high) = run.iter().fold((f64::MAX, 0f64), |(low, high), value| {
        let q = if value.q.is_nan() { f64::INFINITY } else { value.q.abs() };
        (low.min(q), high.max(q))
    });
    if high.is_finite() { high / low } else { f64::INFINITY }
}

/// The condition number up to which `Q` is trusted. The best single restarts of the common five-step
/// sets reach 53 to 119 in float16. Float32 would survive more, but errors of `R` reach the result
/// amplified by about the square: without a restart they cost it three digits.
const LIMIT: f64 = 125.0;

/// The fewest restarts that keep `Q` well conditioned, at their best positions; `None` when even
/// the most that pay do not suffice, so that the standard form has to serve.
pub fn choose(schedule: &[Polynomial], dtype: FloatDType) -> Option<Vec<usize>> {
    let noise = noise(dtype);
    (0..=MOST_RESTARTS.min(schedule.len() - 1)).find_map(|count| {
        let (condition, positions) = positions(schedule.len(), count)
            .into_iter()
            .map(|positions| (condition(schedule, &positions, noise), positions))
            .min_by(|(a, _), (b, _)| a.total_cmp(b))?;
        (condition <= LIMIT).then_some(positions)
    })
}

/// Every ascending choice of `count` steps out of `1..steps`.
fn positions(steps: usize, count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![vec![]];
    }
    positions(steps, count - 1)
        .into_iter()
        .flat_map(|head| {
            let first = head.last().map_or(1, |last| last + 1);
            (first..steps).map(move |next| [head.as_slice(), &[next]].concat())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orthogonalize::Coefficients;

    fn schedule(set: &Coefficients) -> Vec<Polynomial> {
        set.schedule(set.designed_steps()).unwrap()
    }

    /// Condition numbers of the reference's metric: none, [1], [2], [3].
    #[test]
    fn metric_reproduces_the_reference() {
        for (set, expected) in [
            (Coefficients::PolarExpress { safety: 1.05 }, [2.7e12, 456.0, 84.6, 1.1e5]),
            (Coefficients::PolarExpress { safety: 1.01 }, [3.4e14, 631.0, 2.06e3, 7.6e6]),
            (Coefficients::PolarExpressCushioned, [1.7e14, 660.0, 119.0, 4.1e6]),
            (Coefficients::You, [2.1e8, 401.0, 53.2, 171.0]),
            (Coefficients::KellerJordan, [3.8e6, 667.0, 74.1, 62.5]),
        ] {
            for (restarts, expected) in [&[][..], &[1], &[2], &[3]].into_iter().zip(expected) {
                let found = condition(&schedule(&set), restarts, NOISE_F16);
                assert!((found / expected - 1.0).abs() < 0.03, "{set:?} {restarts:?}: {found:.3e}");
            }
        }
    }

    #[test]
    fn chosen_restarts_reach_the_reference_in_float16() {
        for (set, positions, best) in [
            (Coefficients::PolarExpress { safety: 1.05 }, vec![2], 84.6),
            (Coefficients::PolarExpressCushioned, vec![2], 119.0),
            (Coefficients::You, vec![2], 53.2),
            (Coefficients::KellerJordan, vec![3], 62.5),
        ] {
            let chosen = choose(&schedule(&set), FloatDType::F16).expect("a choice");
            assert_eq!(chosen, positions, "{set:?}");
            assert!(condition(&schedule(&set), &chosen, NOISE_F16) < best * 1.01);
        }
        let deep = schedule(&Coefficients::DeepSeekV4);
        let chosen = choose(&deep, FloatDType::F16).expect("a choice");
        assert!(condition(&deep, &chosen, NOISE_F16) < 125.0, "{chosen:?}");
    }

    #[test]
    fn every_type_gets_a_choice_within_the_limit() {
        for set in [Coefficients::polar_express(), Coefficients::You, Coefficients::KellerJordan] {
            let chosen = choose(&schedule(&set), FloatDType::F32).expect("a choice");
            assert_eq!(chosen.len(), 1, "{set:?}: {chosen:?}");
        }
        let deep = schedule(&Coefficients::DeepSeekV4);
        let chosen = choose(&deep, FloatDType::F32).expect("a choice");
        assert!(condition(&deep, &chosen, noise(FloatDType::F32)) <= LIMIT);
        assert!(chosen.len() > 1, "ten steps amplify float32 rounding, too: {chosen:?}");
    }

    #[test]
    fn positions_are_all_subsets() {
        assert_eq!(positions(4, 2), vec![vec![1, 2], vec![1, 3], vec![2, 3]]);
        assert_eq!(positions(1, 0), vec![Vec::<usize>::new()]);
    }
}
