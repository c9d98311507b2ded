//! NAMO's second moment of gradient norms.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::{Extent, Slot, SlotDtype, Slots};
use super::{Behaviour, Context, Matrices, Part, Quantity, Stage};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::{Error, Result};

/// Name of the root of the second moment in records.
pub(super) const SECOND_MOMENT: &str = "gradient_norm";
/// Name of the sum of the weights of all squared norms in the second moment, in records.
pub(super) const WEIGHT: &str = "gradient_norm_weight";

/// Scales the result of the iteration by `|U| / (sqrt(v) + epsilon)`, where `U` is what was
/// orthogonalised and `v` the moving average of the squared norm of the gradients. The update
/// shrinks where gradients contradict each other. This is NAMO, in the form of
/// <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>.
///
/// The second moment is one value for every matrix, which starts at zero. Its root is stored, in
/// float32 (float64 for float64 parameters), since squares of large gradients are infinite.
///
/// The paper corrects the bias of both moments (Zhang et al., <https://arxiv.org/abs/2602.17080>),
/// so that the first update has the size of a later one; Emerging-Optimizers corrects neither. Here
/// [`with_bias_correction`](Self::with_bias_correction) and
/// [`MomentumConfig::bias_correction`](crate::MomentumConfig::bias_correction) are either both set
/// or both not: the momentum's alone would make the first update `1 / sqrt(1 - beta_2)` times as
/// large.
///
/// [`per_input`](Self::per_input) is the paper's NAMO-D, with a factor for each input.
///
/// The paper's step is `P <- P - lr f (U + w P)`: the factor `f` also scales the weight decay.
/// [`with_weight_decay`](Self::with_weight_decay) sets this `w`, and
/// [`MuonConfig::weight_decay`](crate::MuonConfig::weight_decay) then has to be zero. The paper's
/// code (<https://github.com/minxin-zhg/namo>, read in November 2026) limits the rates of update
/// and decay to 1: [`with_largest_rate`](Self::with_largest_rate).
///
/// The paper has no Nesterov. Its code has, and still divides by `1 - mu^t`, while the weights of
/// the gradients in Nesterov's update sum to `1 - mu^(t + 1)`: the first update there is `1 + mu`
/// times as large as here, and the hundredth 1.0003 times at 0.95, within a warm-up of the learning
/// rate over 2,000 steps. Here both forms divide by the sum, since a run without a warm-up would
/// begin with its largest step. Without Nesterov, code, paper and this part agree.
///
/// ```
/// use distmuon::parts::Namo;
/// use distmuon::{MomentumConfig, MuonConfig};
///
/// // The paper's update.
/// let part = Namo::new(0.99).with_bias_correction(true).with_weight_decay(0.1);
/// let momentum = MomentumConfig::from(0.95).with_nesterov(false).with_bias_correction(true);
/// let config = MuonConfig::new()
///     .with_parts(vec![part.with_largest_rate(Some(1.0)).into()])
///     .with_momentum(momentum)
///     .with_weight_decay(0.0.into());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Namo {
    /// Decay of the second moment, in `[0, 1)`.
    pub beta_2: f64,
    /// Summand of the root, zero or more; 1e-30 by default. The 1e-8 of the source is larger than
    /// the gradients that a clip of the global norm may leave.
    pub epsilon: f64,
    /// `true` to divide the second moment by the sum of the weights that the squared norms have in
    /// it, `1 - beta_2^t` after `t` steps. As in the paper, `epsilon` is added to the root before
    /// the division. Steps that a parameter skips do not count.
    #[serde(default)]
    pub bias_correction: bool,
    /// `Some(c)` to take the norms of the weights of each input in place of the whole matrix, and
    /// to limit the factors of inputs to `[c f, f / c]` for their mean `f`; `c` from 0, for no
    /// limit, to 1. 0.75 in the source (`NAMO_D` of <https://github.com/minxin-zhg/namo>, whose
    /// columns are inputs).
    #[serde(default)]
    pub per_input: Option<f64>,
    /// Decay `w` at the rate of the update, `P <- P - lr w f P` for the factor `f`, zero or more; 0
    /// by default, and 0.1 in the source. Inputs with a factor of their own have a decay of their
    /// own. `lr` is the learning rate without `lr_scale` and `lr_factor`.
    #[serde(default)]
    pub weight_decay: f64,
    /// `Some(r)` to limit the rates `lr s f` of the update and `lr f` of the decay to `r`, where
    /// `s` is `lr_scale` times `lr_factor`; 1 in the source's code. Parts that follow may change
    /// the size of the update again.
    #[serde(default)]
    pub largest_rate: Option<f64>,
}

impl Namo {
    /// Makes the part with a decay of the second moment, in `[0, 1)`.
    pub fn new(beta_2: f64) -> Self {
        Self {
            beta_2,
            epsilon: 1e-30,
            bias_correction: false,
            per_input: None,
            weight_decay: 0.0,
            largest_rate: None,
        }
    }

    /// Makes the part with a factor for each input, of a decay of the second moment, in `[0, 1)`,
    /// and a limit of the factors, from 0 to 1.
    pub fn per_input(beta_2: f64, limit: f64) -> Self {
        Self { per_input: Some(limit), ..Self::new(beta_2) }
    }

    /// Sets the summand of the root, zero or more.
    pub fn with_epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }

    /// Sets whether the bias of the second moment is corrected.
    pub fn with_bias_correction(self, bias_correction: bool) -> Self {
        Self { bias_correction, ..self }
    }

    /// Sets the decay at the rate of the update, zero or more.
    pub fn with_weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay, ..self }
    }

    /// Sets the limit of the rates of update and decay, a positive number, or `None` for no limit.
    pub fn with_largest_rate(self, largest_rate: Option<f64>) -> Self {
        Self { largest_rate, ..self }
    }

    /// Returns `true` if the part decays the parameter.
    pub(super) fn decays(&self) -> bool {
        self.weight_decay != 0.0
    }
}

impl From<Namo> for Part {
    fn from(part: Namo) -> Self {
        Self::Namo(part)
    }
}

impl Behaviour for Namo {
    fn name(&self) -> &'static str {
        "NAMO"
    }

    fn stages(&self) -> &'static [Stage] {
        if self.decays() { &[Stage::After, Stage::Parameter] } else { &[Stage::After] }
    }

    fn check(&self) -> Result<()> {
        ensure_decay("Namo.beta_2", self.beta_2)?;
        if let Some(limit) = self.per_input.filter(|limit| !(0.0..=1.0).contains(limit)) {
            return Err(Error::setting("Namo.per_input", limit, "a number from 0 to 1"));
        }
        if let Some(rate) = self.largest_rate.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
            let expected = "a positive number, or `None` for no limit";
            return Err(Error::setting("Namo.largest_rate", rate, expected));
        }
        ensure_size("Namo.weight_decay", self.weight_decay)?;
        ensure_size("Namo.epsilon", self.epsilon)
    }

    fn reads(&self, quantity: Quantity) -> bool {
        match quantity {
            Quantity::GradientNorm | Quantity::UpdateNorm => self.per_input.is_none(),
            Quantity::GradientInputNorms | Quantity::UpdateInputNorms => self.per_input.is_some(),
            Quantity::Old => self.decays(),
            Quantity::BaseLr => self.decays() || self.largest_rate.is_some(),
            _ => false,
        }
    }

    fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        let slot = |name, extent| Slot { name, extent, dtype: SlotDtype::Precise };
        let extent = match (self.per_input, matrices.along_input()) {
            (None, _) => Extent::Matrix,
            (Some(_), 2) => Extent::Row,
            (Some(_), _) => Extent::Column,
        };
        let weight = self.bias_correction.then(|| slot(WEIGHT, Extent::Matrix));
        [slot(SECOND_MOMENT, extent)].into_iter().chain(weight).collect()
    }

    fn apply(&self, x: Tensor<3>, state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        let known = context.known;
        if context.stage == Stage::After {
            self.advance(state, context);
            let factors = self.factors(state, context);
            let Some(largest) = self.largest_rate else { return x * factors };
            let rate = context.read(&known.base_lr).mul_scalar(known.scale);
            let most = rate.clamp_min(f32::MIN_POSITIVE).recip().mul_scalar(largest);
            return x * factors.clone().min_pair(most.expand(factors.dims()));
        }
        // The state of this step has the same factors, which need not be kept.
        let rates = self.factors(state, context) * context.read(&known.base_lr);
        let rates = match self.largest_rate {
            Some(largest) => rates.clamp_max(largest),
            None => rates,
        };
        x - context.read(&known.old) * rates.mul_scalar(self.weight_decay)
    }
}

impl Namo {
    /// Advances the second moment by the gradient.
    fn advance(&self, state: &mut Slots, context: &Context<'_>) {
        let known = context.known;
        let gradient = context.read(match self.per_input {
            None => &known.gradient_norm,
            Some(_) => &known.gradient_input_norms,
        });
        let of_matrices = [gradient.dims()[0], 1, 1];
        context.advance(state, SECOND_MOMENT, gradient.dims(), |old| {
            // Relative to the larger of both, whose square neither overflows nor underflows.
            let largest = old.clone().max_pair(gradient.clone()).clamp_min(f32::MIN_POSITIVE);
            let square = |norm: Tensor<3>| (norm / largest.clone()).square();
            let moment = square(old).mul_scalar(self.beta_2)
                + square(gradient).mul_scalar(1.0 - self.beta_2);
            moment.sqrt() * largest
        });
        if self.bias_correction {
            context.advance(state, WEIGHT, of_matrices, |old| {
                old.mul_scalar(self.beta_2).add_scalar(1.0 - self.beta_2)
            });
        }
    }

    /// The factors on the update, before its rate is limited.
    fn factors(&self, state: &Slots, context: &Context<'_>) -> Tensor<3> {
        let known = context.known;
        let update = context.read(match self.per_input {
            None => &known.update_norm,
            Some(_) => &known.update_input_norms,
        });
        let stored =
            |slot, shape: [usize; 3]| state.get(slot).clone().cast(context.dtype).reshape(shape);
        let root = stored(SECOND_MOMENT, update.dims()).add_scalar(self.epsilon);
        let root = if self.bias_correction {
            let weight = stored(WEIGHT, [update.dims()[0], 1, 1]);
            // Zero before the first step that is not skipped, whose update is zero.
            root / weight.sqrt().clamp_min(f32::MIN_POSITIVE)
        } else {
            root
        };
        let factors = update / root.clamp_min(f32::MIN_POSITIVE);
        match self.per_input.filter(|limit| *limit > 0.0) {
            Some(limit) => limited(factors, limit),
            None => factors,
        }
    }
}

/// Factors of inputs within a limit of their mean.
fn limited(factors: Tensor<3>, limit: f64) -> Tensor<3> {
    let mean = factors.clone().mean_dim(1).mean_dim(2).expand(factors.dims());
    factors.max_pair(mean.clone().mul_scalar(limit)).min_pair(mean.div_scalar(limit))
}
