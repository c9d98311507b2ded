//! The momentum of matrices.

use burn::config::Config;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::state::{Extent, Slot, SlotDtype, Slots};
use crate::backend::FiniteMask;
use crate::checks::ensure_decay;
use crate::error::Result;
use crate::schedule::Schedule;

/// Name of the momentum in records.
pub(crate) const MOMENTUM: &str = "momentum";
/// Name of the sum of the weights of all gradients in the momentum, in records.
pub(crate) const MOMENTUM_WEIGHT: &str = "momentum_weight";

/// The form of the momentum. Orthogonalised, both forms differ only where the momentum changes over
/// the run, or where the size of the momentum counts: below the `epsilon` of the iteration and in
/// [`Namo`](super::parts::Namo).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MomentumForm {
    /// `M <- mu M + (1 - mu) G`, the moving average of the gradients, as in Keller Jordan's Muon.
    Average,
    /// `M <- mu M + G`, the classical form, as in <https://github.com/microsoft/dion>.
    Sum,
}

/// Configuration of Muon's momentum.
///
/// ```
/// use distmuon::{MomentumConfig, MomentumForm, MuonConfig};
///
/// // As PyTorch's SGD has it: `M <- 0.9 M + G`.
/// let momentum = MomentumConfig::new().with_momentum(0.9.into()).with_form(MomentumForm::Sum);
/// let config = MuonConfig::new().with_momentum(momentum);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct MomentumConfig {
    /// Momentum `mu`, in `[0, 1)`. By default, it rises from 0.85 to 0.95 over the first 300 steps
    /// of a parameter, as in <https://github.com/KellerJordan/modded-nanogpt>.
    #[config(default = "Schedule::momentum_warmup(0.95, 300)")]
    pub momentum: Schedule,
    /// The form of the momentum.
    #[config(default = "MomentumForm::Average")]
    pub form: MomentumForm,
    /// `true` to orthogonalise `mu M + (1 - mu) G` (Nesterov), or `mu M + G` in the classical form,
    /// instead of the momentum `M`, where `G` is the gradient.
    #[config(default = true)]
    pub nesterov: bool,
    /// `true` to divide what is orthogonalised by the sum of the weights that the gradients have in
    /// it, as Adam does (Kingma and Ba, <https://arxiv.org/abs/1412.6980>, Algorithm 1): the first
    /// updates then have the size of gradients. This changes the update only where its size counts:
    /// see [`MomentumForm`]. Steps that a parameter skips do not count.
    /// [`Namo`](super::parts::Namo) also has a bias to correct, and needs the same choice.
    #[config(default = false)]
    pub bias_correction: bool,
}

impl From<f64> for MomentumConfig {
    fn from(momentum: f64) -> Self {
        Self::new().with_momentum(momentum.into())
    }
}

impl From<Schedule> for MomentumConfig {
    fn from(momentum: Schedule) -> Self {
        Self::new().with_momentum(momentum)
    }
}

/// The weights of old momentum and gradient in a step, `M <- keep M + fresh G`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub keep: f64,
    pub fresh: f64,
}

impl MomentumConfig {
    /// Fails for a momentum that no run can use.
    pub(crate) fn check(&self) -> Result<()> {
        self.momentum.extremes().try_for_each(|mu| ensure_decay("momentum.momentum", mu))
    }

    /// The slots of the momentum, in a type.
    pub(super) fn slots(&self, dtype: SlotDtype) -> Vec<Slot> {
        let momentum = Slot { name: MOMENTUM, extent: Extent::Element, dtype };
        let weight =
            Slot { name: MOMENTUM_WEIGHT, extent: Extent::Matrix, dtype: SlotDtype::Precise };
        [momentum].into_iter().chain(self.bias_correction.then_some(weight)).collect()
    }

    /// The weights at a step of a parameter.
    pub(super) fn weights(&self, time: usize) -> Weights {
        let keep = self.momentum.at(time);
        let fresh = match self.form {
            MomentumForm::Average => 1.0 - keep,
            // As in PyTorch's SGD: the sum is larger by `1 / (1 - keep)`, which the iteration
            // removes.
            MomentumForm::Sum => 1.0,
        };
        Weights { keep, fresh }
    }

    /// The update divided by the sum of the weights of the gradients in it. Weights are
    /// `[k, 1, 1]`, and the update is in their type.
    pub(super) fn corrected(
        &self,
        update: Tensor<3>,
        [keep, fresh]: [Tensor<3>; 2],
        mask: &FiniteMask,
        state: &mut Slots,
    ) -> Tensor<3> {
        let stored = state.take(MOMENTUM_WEIGHT);
        let dtype = stored.dtype();
        let old = stored.cast(update.dtype()).reshape(keep.dims());
        let sum = mask.select(old.clone() * keep.clone() + fresh.clone(), old);
        state.put(MOMENTUM_WEIGHT, sum.clone().reshape([-1]).cast(dtype));
        // The update looks one step ahead, and so does the sum of its weights.
        let sum = if self.nesterov { sum * keep + fresh } else { sum };
        // Zero before the first step that is not skipped, whose update is zero.
        update / sum.clamp_min(f32::MIN_POSITIVE)
    }
}
