//! The update of one parameter.

use std::sync::Arc;

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

use super::{LrScale, MatrixLayout, MatrixView, ops};
use crate::checkpoint::saved_tensor;
use crate::error::Result;
use crate::gate::SkippedSteps;
use crate::orthogonalize::{Kernels, NewtonSchulz};
use crate::schedule::Schedule;

/// What all parameters of a model have in common.
#[derive(Debug)]
pub(super) struct Settings {
    pub momentum: Schedule,
    pub nesterov: bool,
    pub weight_decay: Schedule,
    pub lr_scale: LrScale,
    pub lr_factor: f64,
    pub newton_schulz: NewtonSchulz,
}

/// Muon as a Burn [`Optimizer`]: the rule for one parameter, built by
/// [`MuonConfig::build`](super::MuonConfig::build).
///
/// [`MuonConfig::init`](super::MuonConfig::init) makes an optimizer for a whole model of it. To put
/// one together by hand, give it to
/// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group).
#[derive(Clone, Debug)]
pub struct Muon {
    pub(super) settings: Arc<Settings>,
    pub(super) view: MatrixView,
    pub(super) layout: MatrixLayout,
    pub(super) parameter: Arc<str>,
    pub(super) skipped: SkippedSteps,
}

/// What Muon remembers of a parameter. Its record has the tensors `momentum` and `skipped` and the
/// scalar `time`.
#[derive(Clone, Debug)]
pub struct MuonState<const D: usize> {
    /// Moving average of the gradients, shaped like the parameter.
    pub momentum: Tensor<D>,
    /// Steps that left the parameter untouched because its gradient was not finite, `[1]`.
    pub skipped: Tensor<1>,
    /// Steps taken, skipped ones included: the position in the schedules.
    pub time: usize,
}

impl<const D: usize> RecordState for MuonState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "momentum", self.momentum.to_data());
        out.push_tensor(prefix, "skipped", self.skipped.to_data());
        out.push_scalar(prefix, "time", self.time.into());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self {
            momentum: saved_tensor("momentum", prefix, src, device)?,
            skipped: saved_tensor("skipped", prefix, src, device)?,
            time: src.take_scalar(prefix, "time")?.try_into().ok()?,
        })
    }
}

impl Muon {
    /// How often parameters were left untouched because their gradient was not finite.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// The iteration that orthogonalises the momentum.
    pub fn newton_schulz(&self) -> &NewtonSchulz {
        &self.settings.newton_schulz
    }

    /// The same rule for a parameter with a name, a view and a layout of its own.
    pub(crate) fn for_parameter(
        &self,
        parameter: &str,
        view: MatrixView,
        layout: MatrixLayout,
    ) -> Self {
        Self { view, layout, parameter: parameter.into(), ..self.clone() }
    }

    /// The orthogonalised update, and the factor that its shape puts on the learning rate.
    fn direction<const D: usize>(&self, update: Tensor<D>) -> Result<(Tensor<D>, f64)> {
        let shape = update.dims();
        let [k, m, n] = self.view.batch_shape(&self.parameter, &shape)?;
        let Settings { lr_scale, lr_factor, newton_schulz, .. } = &*self.settings;
        let orthogonal = newton_schulz.orthogonalize(update.reshape([k, m, n]));
        Ok((orthogonal.reshape(shape), lr_factor * lr_scale.factor(self.layout, [m, n])))
    }

    fn kernels(&self) -> Kernels {
        self.newton_schulz().kernels()
    }
}

impl Optimizer for Muon {
    type State<const D: usize> = MuonState<D>;

    /// One step of one parameter; see the [module](super).
    ///
    /// A gradient that is not finite leaves the parameter and its momentum as they are, which is
    /// decided on the device, and is counted in the state.
    ///
    /// # Panics
    ///
    /// With an [`Error::Shape`](crate::Error::Shape) as the message, when the parameter can't be
    /// seen as matrices. `MuonConfig::try_init` finds that out before training.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<MuonState<D>>,
    ) -> (Tensor<D>, Option<MuonState<D>>) {
        let (old, skipped, time) = match state {
            Some(state) => (state.momentum, Some(state.skipped), state.time),
            None => (grad.zeros_like(), None, 0),
        };
        let mu = self.settings.momentum.at(time);
        let decay = lr * self.settings.weight_decay.at(time);

        let (momentum, update, gate) =
            ops::accumulate(self.kernels(), grad, old, mu, self.settings.nesterov);
        let (direction, scale) = self.direction(update).unwrap_or_else(|error| panic!("{error}"));
        let updated =
            ops::apply(self.kernels(), parameter, direction, &gate, 1.0 - decay, lr * scale);

        let skipped = gate.count(skipped);
        self.skipped.record(&self.parameter, skipped.clone());
        (updated, Some(MuonState { momentum, skipped, time: time + 1 }))
    }

    fn to_device<const D: usize>(state: MuonState<D>, device: &Device) -> MuonState<D> {
        MuonState {
            momentum: state.momentum.to_device(device),
            skipped: state.skipped.to_device(device),
            time: state.time,
        }
    }
}
