//! A momentum of several averages.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::{Error, Result};

/// Names of the averages in records, which bound their number.
pub(super) const AVERAGES: [&str; 8] = [
    "average_1",
    "average_2",
    "average_3",
    "average_4",
    "average_5",
    "average_6",
    "average_7",
    "average_8",
];

/// A momentum of several moving averages, in place of the one average of
/// [`MomentumConfig`](crate::MomentumConfig), whose momentum has to be zero.
///
/// Average `i` of the gradients `G` has the decay `tau / (1 + tau)` for its mean age `tau`, in
/// steps: `M_i <- d_i M_i + (1 - d_i) G`. The iteration gets `(1 - mu) G + mu sum w_i M_i`, with
/// the weights `w_i` and the momentum `mu`. Slow averages remember the direction of many steps, and
/// fast ones follow it: see AggMo (Lucas et al., <https://arxiv.org/abs/1804.00325>).
///
/// An average starts at zero, without bias correction, and is float32 (float64 for float64
/// parameters): as large as the momentum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MomentumMixture {
    /// The mean age of every average in steps, zero or more: 19 is a decay of 0.95.
    pub ages: Vec<f64>,
    /// The weight of every average, zero or more.
    pub weights: Vec<f64>,
    /// The weight of the averages together, in `[0, 1)`. The gradient has the rest.
    pub momentum: f64,
}

impl MomentumMixture {
    /// Makes the part with one to eight averages of some mean ages, their weights, and the
    /// momentum.
    pub fn new(ages: Vec<f64>, weights: Vec<f64>, momentum: f64) -> Self {
        Self { ages, weights, momentum }
    }

    /// Makes the *K-Maxwell* momentum of modded-nanogpt's track 3, result `20260824_kmaxwell_2680`
    /// (<https://github.com/KellerJordan/modded-nanogpt>, read in November 2026).
    ///
    /// Six averages have ages in equal ratios from 3 to 56. The weights of the first five grow
    /// linearly, and the oldest has the rest, so that the sum is 1 and the mean age 35. The
    /// momentum is 0.95. The source uses it from step 1000 on, and one average before; the part has
    /// all averages from the first step on.
    ///
    /// The weights are constant, as in this result, whose report says that moving them did not help
    /// there. Others of the track move them linearly to younger averages, which the part does not:
    /// pull request 357 (eight averages) from a mean age of 58 at step 1000 to 26, and 359 (six,
    /// with MuonH) from 50 at step 750 to 22.
    pub fn k_maxwell() -> Self {
        const COUNT: i32 = 6;
        let (youngest, oldest, mean): (f64, f64, f64) = (3.0, 56.0, 35.0);
        let ratio = (oldest / youngest).powf(1.0 / f64::from(COUNT - 1));
        let ages: Vec<f64> = (0..COUNT).map(|index| youngest * ratio.powi(index)).collect();
        let ramp = || (1..COUNT).map(f64::from);
        // From `sum w = 1` and `sum w tau = mean`, where `w_i = slope i` but for the last.
        let of_ramp: f64 = ramp().zip(&ages).map(|(weight, age)| weight * age).sum();
        let slope = (oldest - mean) / (oldest * ramp().sum::<f64>() - of_ramp);
        let mut weights: Vec<f64> = ramp().map(|weight| slope * weight).collect();
        weights.push(1.0 - weights.iter().sum::<f64>());
        Self::new(ages, weights, 0.95)
    }
}

impl From<MomentumMixture> for Part {
    fn from(part: MomentumMixture) -> Self {
        Self::MomentumMixture(part)
    }
}

impl Behaviour for MomentumMixture {
    fn name(&self) -> &'static str {
        "a mixture of momenta"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Gradient]
    }

    fn check(&self) -> Result<()> {
        let Self { ages, weights, momentum } = self;
        if !(1..=AVERAGES.len()).contains(&ages.len()) {
            return Err(Error::setting("MomentumMixture.ages", ages.len(), "one to eight ages"));
        }
        if weights.len() != ages.len() {
            let expected = "as many as `ages`";
            return Err(Error::setting("MomentumMixture.weights", weights.len(), expected));
        }
        ages.iter().try_for_each(|age| ensure_size("MomentumMixture.ages", *age))?;
        weights.iter().try_for_each(|weight| ensure_size("MomentumMixture.weights", *weight))?;
        ensure_decay("MomentumMixture.momentum", *momentum)
    }

    fn slots(&self, _matrices: Matrices) -> Vec<Slot> {
        let slot = |name| Slot { name, extent: Extent::Element, dtype: SlotDtype::Precise };
        AVERAGES[..self.ages.len()].iter().copied().map(slot).collect()
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let mut sum = x.clone().mul_scalar(1.0 - self.momentum);
        for ((slot, age), weight) in AVERAGES.iter().zip(&self.ages).zip(&self.weights) {
            let decay = age / (1.0 + age);
            let average = context.advance(state, slot, x.dims(), |old| {
                old.mul_scalar(decay) + x.clone().mul_scalar(1.0 - decay)
            });
            sum = sum + average.mul_scalar(self.momentum * weight);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weights that the source prints.
    #[test]
    fn k_maxwell_has_the_weights_of_its_source() {
        let MomentumMixture { ages, weights, .. } = MomentumMixture::k_maxwell();
        let printed = [0.036726, 0.073452, 0.110179, 0.146905, 0.183631, 0.449107];
        for (weight, printed) in weights.iter().zip(printed) {
            assert!((weight - printed).abs() < 1e-6, "{weight}, not {printed}");
        }
        let mean: f64 = ages.iter().zip(&weights).map(|(age, weight)| age * weight).sum();
        assert!((mean - 35.0).abs() < 1e-12 && (ages[5] - 56.0).abs() < 1e-12);
    }
}
