//! Coefficient sets of the quintic Newton-Schulz iteration, with their sources.

use serde::{Deserialize, Serialize};

use super::polar_express::{Composition, scaled};
use crate::backend::Polynomial;
use crate::checks::ensure_decay;
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

/// Four steps for matrices that AOL rescales, from <https://github.com/microsoft/dion>.
const AOL: [Polynomial; 4] = [
    [4.6051, -9.6552, 5.6769],
    [4.7505, -6.0861, 2.1790],
    [2.7763, -2.3190, 0.5523],
    [2.4231, -2.2861, 0.8193],
];

/// Five cubic steps that leave singular values between 0.7 and 1.3, `cubic5` of
/// <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>.
const CUBIC: [Polynomial; 5] = [
    [3.3656576, -3.3420992, 0.0],
    [2.5744352, -1.4957376, 0.0],
    [2.5368962, -1.4312570, 0.0],
    [2.4418906, -1.2764040, 0.0],
    [2.2230472, -0.9630650, 0.0],
];

/// The cushion of Polar Express in its published code,
/// <https://github.com/NoahAmsel/PolarExpress>.
const CUSHION: f64 = 0.02;

/// The largest distance of an output from 1 for which [`Coefficients::PolarExpressFor`] chooses its
/// number of steps: five for singular values down to 1e-3, as in the field.
const DESIGNED_ERROR: f64 = 0.2;

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
/// | `PolarExpressFor { lower: 1e-2, .. }` | 4 | 0.98 to 1.02 |
/// | `PolarExpressFor { lower: 1e-3, .. }` | 5 | 0.83 to 1.17 |
/// | `PolarExpressFor { lower: 1e-4, .. }` | 7 | 0.92 to 1.08 |
/// | `Aol` | 4 | 0.94 to 1.05 |
/// | `Cubic` | 5 | 0.77 to 1.30 |
/// | `DeepSeekV4` | 10 | 1.000 to 1.001 |
///
/// The rows of `PolarExpressFor` are for [`Coefficients::polar_express_for`].
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
        ///
        /// A run of less than eight steps ends with a polynomial that is divided as well, and so
        /// its results are too small in the mean. With 1.05 and five steps, singular values from
        /// 3e-3 to 0.3 (evenly over their logarithms) come out with a mean of 0.981, where
        /// `PolarExpressCushioned` has 0.999, `You` 1.018 and `KellerJordan` 0.905.
        safety: f64,
    },
    /// Polar Express for exactly five steps, with safety 1.02 and cushioned intervals, as used by
    /// <https://github.com/KellerJordan/modded-nanogpt> and <https://github.com/karpathy/nanochat>.
    PolarExpressCushioned,
    /// Polar Express for other singular values or numbers of steps, computed by the algorithm of
    /// the paper. `PolarExpressCushioned` is `lower` 1e-3, `cushion` 0.02 and `safety` 1.02 in five
    /// steps. CANS (Grishina et al., <https://arxiv.org/abs/2506.10935>), in the table of
    /// <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, is `lower` 1e-3, `cushion` 0 and
    /// `safety` 1 in five steps.
    ///
    /// All singular values from `lower` to 1 come out equally close to 1; smaller ones are enlarged
    /// as much as that allows. The last polynomial belongs to the last step of the run.
    PolarExpressFor {
        /// The smallest singular value, relative to the Frobenius norm of the matrix; above 0 and
        /// below 1.
        lower: f64,
        /// The least ratio of the ends of the interval that a polynomial is made for, at least 0
        /// and below 1: without it, the first polynomials hardly enlarge values in the middle of
        /// the interval.
        cushion: f64,
        /// The divisor of the input of every polynomial except the last, as in
        /// [`PolarExpress`](Self::PolarExpress).
        safety: f64,
    },
    /// Four steps of <https://github.com/microsoft/dion>. They were tuned for matrices whose rows
    /// are rescaled first, as with [`Normalization::Aol`](super::Normalization::Aol). After the
    /// division by the Frobenius norm, the default, singular values below 1e-2 stay small. `aol` of
    /// <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, from Turbo-Muon (Boissin et al.,
    /// <https://arxiv.org/abs/2512.04632>), has other numbers and is left out: it gives singular
    /// values above 0.88 the wrong sign.
    Aol,
    /// Five cubic steps, `cubic5` of <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>, whose
    /// outputs may differ from 1 by 0.3. A cubic polynomial needs no square of `X X^T`, and none is
    /// computed.
    Cubic,
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

    /// Polar Express for singular values down to `lower`, relative to the Frobenius norm, with
    /// the cushion of the published code, 0.02, and safety factor 1.05.
    pub const fn polar_express_for(lower: f64) -> Self {
        Self::PolarExpressFor { lower, cushion: CUSHION, safety: 1.05 }
    }

    /// The cushioned set for matrices that are divided by `margin` times their norm, as its users
    /// do by two per cent or one: the first polynomial takes an argument that is smaller by this
    /// factor.
    pub(crate) fn cushioned_with_margin(margin: f64) -> Self {
        let mut set = POLAR_EXPRESS_CUSHIONED;
        set[0] = scaled(set[0], margin);
        Self::Custom(set.to_vec())
    }

    /// Returns the number of steps that the set was designed for. For `PolarExpressFor`, that is
    /// the least number, at most 30, after which the singular values that it is made for come out
    /// within 0.2 of 1.
    ///
    /// ```
    /// use distmuon::Coefficients;
    ///
    /// assert_eq!(Coefficients::KellerJordan.designed_steps(), 5);
    /// let small = Coefficients::polar_express_for(1e-4);
    /// assert!(small.designed_steps() > Coefficients::polar_express_for(1e-2).designed_steps());
    /// ```
    pub fn designed_steps(&self) -> usize {
        match self {
            Self::KellerJordan => 5,
            Self::You => YOU.len(),
            // The default length of a run. The set itself has eight polynomials.
            Self::PolarExpress { .. } => 5,
            Self::PolarExpressCushioned => POLAR_EXPRESS_CUSHIONED.len(),
            &Self::PolarExpressFor { lower, cushion, safety } => {
                Composition { lower, cushion, safety }.needed_steps(DESIGNED_ERROR)
            }
            Self::Aol => AOL.len(),
            Self::Cubic => CUBIC.len(),
            Self::DeepSeekV4 => 10,
            Self::Custom(steps) => steps.len(),
        }
    }

    /// Returns the polynomials of `steps` steps, one per step.
    ///
    /// If `steps` is larger than the set, the last polynomial is repeated. But `DeepSeekV4` always
    /// ends with its two finishing steps, and `PolarExpressFor` has polynomials for any number of
    /// steps.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for zero steps, a safety factor below 1, a `lower` or `cushion` out of
    /// its range, and custom coefficients that are empty or not finite.
    pub fn schedule(&self, steps: usize) -> Result<Vec<Polynomial>> {
        if steps == 0 {
            return Err(Error::setting("steps", steps, "at least 1"));
        }
        let set = match self {
            Self::KellerJordan => vec![KELLER_JORDAN],
            Self::You => YOU.to_vec(),
            Self::PolarExpress { safety } => polar_express(*safety)?,
            Self::PolarExpressCushioned => POLAR_EXPRESS_CUSHIONED.to_vec(),
            &Self::PolarExpressFor { lower, cushion, safety } => {
                computed(Composition { lower, cushion, safety }, steps)?
            }
            Self::Aol => AOL.to_vec(),
            Self::Cubic => CUBIC.to_vec(),
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
        // Further steps repeat the last polynomial, which keeps singular values near 1.
        Ok((0..steps).map(|step| set[step.min(last)]).collect())
    }
}

fn polar_express(safety: f64) -> Result<Vec<Polynomial>> {
    ensure_safe(safety)?;
    let mut set = POLAR_EXPRESS.to_vec();
    // As in the published code, the last polynomial is not scaled: longer runs repeat it, and its
    // fixed point is 1.
    let last = set.len() - 1;
    for polynomial in &mut set[..last] {
        *polynomial = scaled(*polynomial, safety);
    }
    Ok(set)
}

fn computed(composition: Composition, steps: usize) -> Result<Vec<Polynomial>> {
    let Composition { lower, cushion, safety } = composition;
    if !(lower > 0.0 && lower < 1.0) {
        return Err(Error::setting("coefficients.lower", lower, "above 0 and below 1"));
    }
    ensure_decay("coefficients.cushion", cushion)?;
    ensure_safe(safety)?;
    Ok(composition.polynomials(steps))
}

/// Fails for a safety factor that would make singular values larger.
fn ensure_safe(safety: f64) -> Result<()> {
    match safety.is_finite() && safety >= 1.0 {
        true => Ok(()),
        false => {
            Err(Error::setting("coefficients.safety", safety, "a finite number of at least 1"))
        }
    }
}

fn deep_seek_v4(steps: usize) -> Vec<Polynomial> {
    // The finishing steps come last, however many steps there are.
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
            (Coefficients::polar_express_for(1e-2), 0.975, 1.025),
            (Coefficients::polar_express_for(1e-3), 0.827, 1.173),
            (Coefficients::polar_express_for(1e-4), 0.923, 1.077),
            (Coefficients::Aol, 0.941, 1.050),
            (Coefficients::Cubic, 0.774, 1.300),
            (Coefficients::DeepSeekV4, 1.0000, 1.0005),
        ] {
            let (actual_low, actual_high) = range(set.clone());
            assert!((actual_low - low).abs() < 1e-3, "{set:?}: low {actual_low}");
            assert!((actual_high - high).abs() < 1e-3, "{set:?}: high {actual_high}");
        }
    }

    #[test]
    fn long_runs_of_polar_express_converge_to_one() {
        let published = |safety| (Coefficients::PolarExpress { safety }, 1e-12);
        // The safety factor makes singular values smaller in all steps except the last.
        let computed = |lower, cushion, safety| {
            (Coefficients::PolarExpressFor { lower, cushion, safety }, 1e-10)
        };
        for (set, bound) in [
            published(1.0),
            published(1.05),
            published(1.2),
            published(1.5),
            computed(1e-3, CUSHION, 1.0),
            computed(1e-3, CUSHION, 1.05),
            computed(1e-3, 0.0, 1.05),
            computed(1e-6, CUSHION, 1.05),
        ] {
            let schedule = set.schedule(30).unwrap();
            for input in [1e-3, 0.1, 1.0] {
                let error = (output(&schedule, input) - 1.0).abs();
                assert!(error < bound, "{set:?}, {input}: {error}");
            }
        }
    }

    /// The largest difference of the coefficients of two sets.
    fn difference(computed: Coefficients, published: &[Polynomial]) -> f64 {
        let computed = computed.schedule(published.len()).unwrap();
        let pairs = computed.iter().flatten().zip(published.iter().flatten());
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn computed_coefficients_are_the_published_ones() {
        let computed =
            |cushion, safety| Coefficients::PolarExpressFor { lower: 1e-3, cushion, safety };
        assert!(difference(computed(0.02, 1.02), &POLAR_EXPRESS_CUSHIONED) < 1e-12);
        // The cushion of the first version of the published code, whose last row is the limit of
        // further steps.
        let paper = || computed(0.02407327424182761, 1.0);
        assert!(difference(paper(), &POLAR_EXPRESS[..6]) < 1e-12);
        assert!(difference(paper(), &POLAR_EXPRESS) < 1e-8);
        // The table of CANS in https://github.com/NVIDIA-NeMo/Emerging-Optimizers has four digits.
        let cans = [
            [8.4703, -25.1081, 18.6293],
            [4.1828, -3.1087, 0.5806],
            [3.9619, -2.9541, 0.5630],
            [3.2866, -2.4647, 0.5074],
            [2.2737, -1.6447, 0.4162],
        ];
        assert!(difference(computed(0.0, 1.0), &cans) < 0.5001e-4);
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
        let with = |cushion, safety| Coefficients::PolarExpressFor { lower: 1e-3, cushion, safety };
        for (set, steps, setting) in [
            (Coefficients::KellerJordan, 0, "steps"),
            (Coefficients::PolarExpress { safety: 0.9 }, 5, "coefficients.safety"),
            (Coefficients::PolarExpress { safety: f64::NAN }, 5, "coefficients.safety"),
            (Coefficients::polar_express_for(0.0), 5, "coefficients.lower"),
            (Coefficients::polar_express_for(1.0), 5, "coefficients.lower"),
            (Coefficients::polar_express_for(-1e-3), 5, "coefficients.lower"),
            (Coefficients::polar_express_for(f64::NAN), 5, "coefficients.lower"),
            (with(0.02, 0.9), 5, "coefficients.safety"),
            (with(0.02, f64::INFINITY), 5, "coefficients.safety"),
            (with(1.0, 1.0), 5, "coefficients.cushion"),
            (with(-0.1, 1.0), 5, "coefficients.cushion"),
            (Coefficients::Custom(vec![]), 5, "coefficients"),
            (Coefficients::Custom(vec![[1.0, f64::INFINITY, 0.0]]), 5, "coefficients"),
        ] {
            match set.schedule(steps) {
                Err(Error::Setting { setting: named, .. }) => assert_eq!(named, setting),
                other => panic!("{set:?}: {other:?}"),
            }
            // The number of steps of a run is chosen before its coefficients are checked.
            assert!(set.designed_steps() <= 30, "{set:?}");
        }
    }
}
