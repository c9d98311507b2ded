//! Coefficient sets of the quintic Newton-Schulz iteration, with their sources.

use serde::{Deserialize, Serialize};

use crate::backend::Polynomial;
use crate::error::{Error, Result};

/// Keller Jordan, <https://kellerjordan.github.io/posts/muon/>.
const KELLER_JORDAN: Polynomial = [3.4445, -4.7750, 2.0315];

/// You Jiacheng, as used by <https://github.com/Dao-AILab/gram-newton-schulz> and Optax.
const YOU: [Polynomial; 5] = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
];

/// Polar Express (Amsel et al., <https://arxiv.org/abs/2505.16932>), for singular values down to
/// `1e-3`, before the safety factor.
const POLAR_EXPRESS: [Polynomial; 8] = [
    [8.28721201814563, -23.595886519098837, 17.300387312530933],
    [4.107059111542203, -2.9478499167379106, 0.5448431082926601],
    [3.9486908534822946, -2.908902115962949, 0.5518191394370137],
    [3.3184196573706015, -2.488488024314874, 0.51004894012372],
    [2.300652019954817, -1.6689039845747493, 0.4188073119525673],
    [1.891301407787398, -1.2679958271945868, 0.37680408948524835],
    [1.8750014808534479, -1.2500016453999487, 0.3750001645474248],
    [1.875, -1.25, 0.375],
];

/// Polar Express recomputed for five steps with two per cent of safety and cushioned intervals, as
/// used by <https://github.com/KellerJordan/modded-nanogpt> and
/// <https://github.com/karpathy/nanochat>.
const POLAR_EXPRESS_CUSHIONED: [Polynomial; 5] = [
    [8.156554524902461, -22.48329292557795, 15.878769915207462],
    [4.042929935166739, -2.808917465908714, 0.5000178451051316],
    [3.8916678022926607, -2.772484153217685, 0.5060648178503393],
    [3.285753657755655, -2.3681294933425376, 0.46449024233003106],
    [2.3465413258596377, -1.7097828382687081, 0.42323551169305323],
];

/// The last two of the ten steps of DeepSeek-V4. The first eight have Keller Jordan's coefficients.
const DEEP_SEEK_V4_FINISH: Polynomial = [2.0, -1.5, 0.5];
const DEEP_SEEK_V4_FINISH_STEPS: usize = 2;

/// A coefficient set: the polynomials that the iteration applies, one per step.
///
/// | set | steps | output for singular values in `[1e-2, 1]` |
/// |---|---|---|
/// | `KellerJordan` | 5 | 0.68 to 1.13 |
/// | `You` | 5 | 0.98 to 1.03 |
/// | `PolarExpress { safety: 1.05 }` | 5 | 0.85 to 1.12 |
/// | `PolarExpressCushioned` | 5 | 0.86 to 1.14 |
/// | `DeepSeekV4` | 10 | 1.000 to 1.001 |
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Coefficients {
    /// `(3.4445, -4.7750, 2.0315)` at every step: the original Muon
    /// (<https://kellerjordan.github.io/posts/muon/>).
    KellerJordan,
    /// Five tuned steps by You Jiacheng, as used by
    /// <https://github.com/Dao-AILab/gram-newton-schulz> and Optax.
    You,
    /// Polar Express (Amsel et al., <https://arxiv.org/abs/2505.16932>): each step is the minimax
    /// polynomial for the interval of singular values that the previous steps leave.
    PolarExpress {
        /// The divisor `s` of the input of every polynomial except the last of the eight, as in
        /// `(a/s, b/s^3, c/s^5)`, so that rounding can't push a singular value out of its interval.
        /// At least 1. Use 1.05 for half precision; the paper has 1.01.
        safety: f64,
    },
    /// Polar Express for exactly five steps, with safety 1.02 and cushioned intervals, as used by
    /// <https://github.com/KellerJordan/modded-nanogpt> and <https://github.com/karpathy/nanochat>.
    PolarExpressCushioned,
    /// Keller Jordan's coefficients, then `(2, -1.5, 0.5)` twice: slow and almost exact.
    DeepSeekV4,
    /// One `(a, b, c)` per step, for `a x + b x^3 + c x^5`. Further steps repeat the last.
    Custom(Vec<Polynomial>),
}

impl Coefficients {
    /// Polar Express with safety factor 1.05, which is stable in half precision.
    pub const fn polar_express() -> Self {
        Self::PolarExpress { safety: 1.05 }
    }

    /// Returns the number of steps that the set was designed for.
    pub fn designed_steps(&self) -> usize {
        match self {
            Self::KellerJordan => 5,
            Self::You => YOU.len(),
            // The default length of a run. The set itself has eight polynomials.
            Self::PolarExpress { .. } => 5,
            Self::PolarExpressCushioned => POLAR_EXPRESS_CUSHIONED.len(),
            Self::DeepSeekV4 => 10,
            Self::Custom(steps) => steps.len(),
        }
    }

    /// Returns the polynomials of `steps` steps, one per step.
    ///
    /// If `steps` is larger than the set, the last polynomial is repeated, except that `DeepSeekV4`
    /// always ends with its two finishing steps.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for zero steps, a safety factor below 1, and custom coefficients that
    /// are empty or not finite.
    pub fn schedule(&self, steps: usize) -> Result<Vec<Polynomial>> {
        if steps == 0 {
            return Err(Error::setting("steps", steps, "at least 1"));
        }
        let set = match self {
            Self::KellerJordan => vec![KELLER_JORDAN],
            Self::You => YOU.to_vec(),
            Self::PolarExpress { safety } => polar_express(*safety)?,
            Self::PolarExpressCushioned => POLAR_EXPRESS_CUSHIONED.to_vec(),
            Self::DeepSeekV4 => return Ok(deep_seek_v4(steps)),
            Self::Custom(set) => set.clone(),
        };
        if set.is_empty() || set.iter().flatten().any(|value| !value.is_finite()) {
            return Err(Error::setting(
                "coefficients",
                format!("{set:?}"),
                "at least one (a, b, c) of finite numbers",
            ));
        }
        let last = set.len() - 1;
        Ok((0..steps).map(|step| set[step.min(last)]).collect())
    }
}

fn polar_express(safety: f64) -> Result<Vec<Polynomial>> {
    if !(safety.is_finite() && safety >= 1.0) {
        return Err(Error::setting("coefficients.safety", safety, "a finite number of at least 1"));
    }
    let mut set = POLAR_EXPRESS.to_vec();
    // As in the published code, the last polynomial is not scaled: longer runs repeat it, and its
    // fixed point is 1.
    let scaled = set.len() - 1;
    for [a, b, c] in &mut set[..scaled] {
        (*a, *b, *c) = (*a / safety, *b / safety.powi(3), *c / safety.powi(5));
    }
    Ok(set)
}

fn deep_seek_v4(steps: usize) -> Vec<Polynomial> {
    let finish = steps.saturating_sub(DEEP_SEEK_V4_FINISH_STEPS);
    (0..steps).map(|step| if step < finish { KELLER_JORDAN } else { DEEP_SEEK_V4_FINISH }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(schedule: &[Polynomial], input: f64) -> f64 {
        schedule.iter().fold(input, |x, [a, b, c]| a * x + b * x.powi(3) + c * x.powi(5))
    }

    /// The smallest and the largest output for singular values in `[1e-2, 1]`.
    fn range(set: Coefficients) -> (f64, f64) {
        let schedule = set.schedule(set.designed_steps()).unwrap();
        (0..=10_000)
            .map(|i| output(&schedule, 10f64.powf(-2.0 * i as f64 / 10_000.0)))
            .fold((f64::MAX, f64::MIN), |(low, high), y| (low.min(y), high.max(y)))
    }

    #[test]
    fn output_ranges_of_the_sets_are_the_documented_ones() {
        for (set, low, high) in [
            (Coefficients::KellerJordan, 0.682, 1.134),
            (Coefficients::You, 0.978, 1.032),
            (Coefficients::PolarExpress { safety: 1.05 }, 0.846, 1.124),
            (Coefficients::PolarExpress { safety: 1.01 }, 0.870, 1.124),
            (Coefficients::PolarExpressCushioned, 0.859, 1.141),
            (Coefficients::DeepSeekV4, 1.0000, 1.0005),
        ] {
            let (actual_low, actual_high) = range(set.clone());
            assert!((actual_low - low).abs() < 1e-3, "{set:?}: low {actual_low}");
            assert!((actual_high - high).abs() < 1e-3, "{set:?}: high {actual_high}");
        }
    }

    #[test]
    fn long_runs_of_polar_express_converge_to_one() {
        for safety in [1.0, 1.05, 1.2, 1.5] {
            let schedule = Coefficients::PolarExpress { safety }.schedule(30).unwrap();
            for input in [1e-3, 0.1, 1.0] {
                let result = output(&schedule, input);
                assert!((result - 1.0).abs() < 1e-12, "safety {safety}, {input}: {result}");
            }
        }
    }

    #[test]
    fn longer_runs_repeat_the_last_polynomial_and_keep_finishing_steps_last() {
        let you = Coefficients::You.schedule(7).unwrap();
        assert_eq!(you[6], YOU[4]);
        let deep = Coefficients::DeepSeekV4.schedule(4).unwrap();
        assert_eq!(deep[1], KELLER_JORDAN);
        assert_eq!(deep[2], DEEP_SEEK_V4_FINISH);
    }

    #[test]
    fn unusable_sets_are_rejected_by_name() {
        for (set, steps, setting) in [
            (Coefficients::KellerJordan, 0, "steps"),
            (Coefficients::PolarExpress { safety: 0.9 }, 5, "coefficients.safety"),
            (Coefficients::PolarExpress { safety: f64::NAN }, 5, "coefficients.safety"),
            (Coefficients::Custom(vec![]), 5, "coefficients"),
            (Coefficients::Custom(vec![[1.0, f64::INFINITY, 0.0]]), 5, "coefficients"),
        ] {
            match set.schedule(steps) {
                Err(Error::Setting { setting: named, .. }) => assert_eq!(named, setting),
                other => panic!("{set:?}: {other:?}"),
            }
        }
    }
}
