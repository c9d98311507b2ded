//! The update of one parameter.

use std::sync::Arc;

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};

use super::{LrScale, MatrixLayout, MatrixView, ops};
use crate::checkpoint::saved_tensor;
use crate::computed;
use crate::error::Result;
use crate::gate::{Gate, SkippedSteps};
use crate::gradient;
use crate::orthogonalize::NewtonSchulz;
use crate::schedule::Schedule;

/// The rank that errors name where there is one.
pub(crate) const ONLY_RANK: usize = 0;

/// What all parameters of a model have in common.
#[derive(Debug)]
pub(crate) struct Settings {
    pub momentum: Schedule,
    pub nesterov: bool,
    pub weight_decay: Schedule,
    pub lr_scale: LrScale,
    pub lr_factor: f64,
    pub newton_schulz: NewtonSchulz,
}

/// What scales the step of every row or matrix: `P <- keep P - lr U`. One float32 value each.
#[derive(Clone)]
pub(crate) struct Rates {
    pub keep: Tensor<1>,
    pub lr: Tensor<1>,
}

impl Rates {
    /// The same learning rate and decoupled decay for one row.
    pub fn of_one(lr: f64, scale: f64, weight_decay: f64, device: &Device) -> Self {
        let one = |value: f64| Tensor::from_data([value as f32], (device, DType::F32));
        Self { keep: one(1.0 - lr * weight_decay), lr: one(lr * scale) }
    }

    /// The rates of one row for as many rows as there are.
    pub fn expand(self, rows: usize) -> Self {
        Self { keep: self.keep.expand([rows]), lr: self.lr.expand([rows]) }
    }
}

impl Settings {
    /// One step of a batch of matrices `[k, m, n]`, given the steps before it: their new values and
    /// their new momentum.
    pub fn step(
        &self,
        time: usize,
        parameters: Tensor<3>,
        grads: Tensor<3>,
        momentum: Tensor<3>,
        gate: &Gate,
        rates: &Rates,
    ) -> (Tensor<3>, Tensor<3>) {
        let (mu, kernels) = (self.momentum.at(time), self.newton_schulz.kernels());
        let (momentum, update, norms) =
            ops::accumulate(kernels, grads, momentum, gate, mu, self.nesterov);
        let direction = self.newton_schulz.orthogonalize_normed(update, norms);
        (ops::apply(kernels, parameters, direction, gate, rates), momentum)
    }

    /// The factor on the learning rate of a matrix `[rows, columns]`.
    pub fn scale(&self, layout: MatrixLayout, shape: [usize; 2]) -> f64 {
        self.lr_factor * self.lr_scale.factor(layout, shape)
    }
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

    /// What the parameter is called in errors.
    pub(crate) fn parameter(&self) -> &str {
        &self.parameter
    }

    /// Floating-point operations of the iteration for a parameter of a shape.
    pub(crate) fn operations(&self, shape: &[usize], dtype: DType, device: &Device) -> Result<f64> {
        let [k, m, n] = self.view.batch_shape(&self.parameter, shape)?;
        let each = self.newton_schulz().explain_shape([m, n], dtype, device).operations;
        Ok(k as f64 * each)
    }

    pub(crate) fn settings(&self) -> &Arc<Settings> {
        &self.settings
    }

    /// [`step`](Optimizer::step), with the errors that it panics with.
    pub(crate) fn try_step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<MuonState<D>>,
    ) -> Result<(Tensor<D>, MuonState<D>)> {
        let (shape, device) = (parameter.dims(), parameter.device());
        let [k, m, n] = self.view.batch_shape(&self.parameter, &shape)?;
        gradient::check(&self.parameter, ONLY_RANK, &parameter, &grad)?;
        let batch = |tensor: Tensor<D>| tensor.reshape([k, m, n]);
        let is_first = state.is_none();
        let MuonState { momentum, skipped, time } = state.unwrap_or_else(|| MuonState {
            momentum: grad.zeros_like(),
            skipped: Tensor::zeros([1], (&device, DType::F32)),
            time: 0,
        });
        let settings = &self.settings;
        let scale = settings.scale(self.layout, [m, n]);
        let rates = Rates::of_one(lr, scale, settings.weight_decay.at(time), &device).expand(k);

        let grad = batch(grad);
        let gate = ops::finite(settings.newton_schulz.kernels(), &grad).all();
        let (updated, momentum) =
            settings.step(time, batch(parameter), grad, batch(momentum), &gate.expand(k), &rates);
        if is_first {
            computed::check(&self.parameter, &updated)?;
        }

        let skipped = gate.count(skipped);
        self.skipped.record(&self.parameter, skipped.clone());
        let momentum = momentum.reshape(shape);
        Ok((updated.reshape(shape), MuonState { momentum, skipped, time: time + 1 }))
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
    /// - With an [`Error::Shape`](crate::Error::Shape) as the message, when the parameter can't be
    ///   seen as matrices. `MuonConfig::try_init` finds that out before training.
    /// - With an [`Error::Parameter`](crate::Error::Parameter), when the gradient has another shape or is on
    ///   another device.
    /// - With an [`Error::NotComputed`](crate::Error::NotComputed), when the device had no memory for the first
    ///   step of the parameter.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<MuonState<D>>,
    ) -> (Tensor<D>, Option<MuonState<D>>) {
        let stepped = self.try_step(lr, parameter, grad, state);
        let (updated, state) = stepped.unwrap_or_else(|error| panic!("{error}"));
        (updated, Some(state))
    }

    fn to_device<const D: usize>(state: MuonState<D>, device: &Device) -> MuonState<D> {
        MuonState {
            momentum: state.momentum.to_device(device),
            skipped: state.skipped.to_device(device),
            time: state.time,
        }
    }
}
