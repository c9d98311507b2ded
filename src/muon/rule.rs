//! The update of one parameter.

use std::sync::Arc;

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};

use super::ops::{self, Accumulated, Flagged};
use super::{LrScale, MatrixLayout, MatrixView};
use crate::checkpoint::saved_tensor;
use crate::clipping;
use crate::computed;
use crate::error::{Error, Result};
use crate::gradient;
use crate::orthogonalize::NewtonSchulz;
use crate::schedule::Schedule;
use crate::skipped::{self, Counting, SkippedSteps};

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
    pub clipping: Option<GradientClippingConfig>,
    pub newton_schulz: NewtonSchulz,
}

/// The factors of a parameter's step: `P <- keep P - lr U`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub keep: f64,
    pub lr: f64,
}

impl Rates {
    /// The factors for a learning rate, its scale and the decoupled weight decay.
    pub fn new(lr: f64, scale: f64, weight_decay: f64) -> Self {
        Self { keep: 1.0 - lr * weight_decay, lr: lr * scale }
    }
}

/// A parameter in the step of a batch: what is the same for all of its matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// The number of its flag.
    pub flag: usize,
    /// The weight of the momentum that was.
    pub mu: f64,
    pub rates: Rates,
}

/// The type of what has to be more precise than parameters of a type, such as learning rates: float64 for
/// float64, and float32 for all others. In float32, `1 - lr decay` moves in steps of 6e-8, which is more than
/// what float64 is chosen for.
pub(crate) fn precise_dtype(of: DType) -> DType {
    if of == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The type of the momentum of parameters of a type. In float16, whose least number is 6e-8, what small
/// gradients add to it would lose its digits.
pub(crate) fn momentum_dtype(of: DType) -> DType {
    if of == DType::F16 { DType::F32 } else { of }
}

/// Refuses a learning rate that would make parameters NaN or infinite.
pub(crate) fn check_rate(lr: LearningRate) -> Result<()> {
    // In float32, as most parameters have it.
    match (lr as f32).is_finite() {
        true => Ok(()),
        false => Err(Error::Setting {
            setting: "learning rate",
            value: lr.to_string(),
            expected: "a finite number; look for a division by zero in its schedule",
        }),
    }
}

impl Settings {
    /// Advances the momentum of a batch by the gradients of its parameters, but of those whose flag is set in `left`,
    /// and orthogonalises what it makes of both, in the type of the iteration. Gradients are multiplied by `factor`.
    pub fn direction(
        &self,
        grads: Vec<Tensor<1>>,
        momentum: Tensor<3>,
        left: &Tensor<1>,
        factor: Option<&Tensor<1>>,
        parts: &[Part],
    ) -> (Tensor<3>, Tensor<3>) {
        let kernels = self.newton_schulz.kernels();
        let Accumulated { momentum, update, norms } =
            ops::accumulate(kernels, grads, momentum, left, factor, parts, self.nesterov);
        (momentum, self.newton_schulz.direction(update, norms))
    }

    /// Sets the flags of matrices of which the iteration has made something that is not finite. They begin at `first`.
    pub fn refuse_late(&self, direction: &Tensor<3>, flags: Tensor<1>, first: usize) -> Tensor<1> {
        let rows = [Flagged { flag: first, rows: direction.dims()[0] }];
        let direction = [direction.clone().reshape([-1])];
        ops::refuse(self.newton_schulz.kernels(), flags, &direction, &rows, f64::MAX)
    }

    /// Updates the parameters of a batch, but what has a flag: a parameter in `left`, a matrix in `late`, where those
    /// of the batch begin at a number.
    pub fn apply(
        &self,
        parameters: Vec<Tensor<1>>,
        direction: Tensor<3>,
        left: &Tensor<1>,
        late: (&Tensor<1>, usize),
        parts: &[Part],
    ) -> Vec<Tensor<1>> {
        ops::apply(self.newton_schulz.kernels(), parameters, direction, left, late, parts)
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
    /// Where the states count, if they are of one parameter.
    pub(super) reserved: Option<skipped::Place>,
}

/// What Muon remembers of a parameter. Its record has the tensors `momentum` and `skipped` and the
/// scalar `time`.
#[derive(Clone, Debug)]
pub struct MuonState<const D: usize> {
    /// Moving average of the gradients, shaped like the parameter and of its type, but float32 for float16.
    pub momentum: Tensor<D>,
    /// Steps that left the parameter untouched, `[1]`: see [`SkippedSteps`].
    pub skipped: Tensor<1>,
    /// Steps taken, skipped ones included: the position in the schedules.
    pub time: usize,
    /// Where the skipped steps are counted.
    pub(crate) place: skipped::Place,
}

impl<const D: usize> MuonState<D> {
    /// The state before the first step of a parameter.
    pub(crate) fn new(shape: [usize; D], dtype: DType, device: &Device) -> Self {
        Self {
            momentum: Tensor::zeros(shape, (device, momentum_dtype(dtype))),
            skipped: Tensor::zeros([1], (device, DType::F32)),
            time: 0,
            place: skipped::Place::default(),
        }
    }
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
            place: skipped::Place::default(),
        })
    }
}

impl Muon {
    /// The steps that left parameters untouched.
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

    /// The same rule, all states of which are of one parameter: one takes the place of another.
    pub(crate) fn for_one_optimizer(self) -> Self {
        Self { reserved: Some(self.skipped.reserve()), ..self }
    }

    /// What the parameter is called in errors.
    pub(crate) fn parameter(&self) -> &str {
        &self.parameter
    }

    /// Floating-point operations of the iteration for a parameter of a shape.
    pub(crate) fn operations(&self, shape: &[usize], dtype: DType, device: &Device) -> Result<f64> {
        let [k, m, n] = self.view.batch_shape(&self.parameter, shape)?;
        let dtype = momentum_dtype(dtype);
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
        check_rate(lr)?;
        let (shape, device, dtype) = (parameter.dims(), parameter.device(), grad.dtype());
        let [k, m, n] = self.view.batch_shape(&self.parameter, &shape)?;
        gradient::check(&self.parameter, ONLY_RANK, &parameter, &grad)?;
        let is_first = state.is_none();
        let mut state = state.unwrap_or_else(|| MuonState::new(shape, dtype, &device));
        if !state.place.has_started() {
            self.start_counting(&mut state);
        }
        let MuonState { momentum, skipped, time, mut place } = state;
        if k * m * n == 0 {
            // Nothing to update, and Burn takes a zero in a new shape for the old length.
            return Ok((parameter, MuonState { momentum, skipped, time: time + 1, place }));
        }
        let settings = &self.settings;
        let kernels = settings.newton_schulz.kernels();
        let scale = settings.scale(self.layout, [m, n]);
        let rates = Rates::new(lr, scale, settings.weight_decay.at(time));
        let part = [Part { flag: 0, mu: settings.momentum.at(time), rates }];

        // The flag of the parameter, and those of its matrices: a single one has that of the parameter.
        let of_matrices = usize::from(k > 1);
        let flags = Tensor::zeros([of_matrices + k], (&device, DType::F32));
        let whole = [Flagged { flag: 0, rows: 1 }];
        // Clipping comes after that: it would make an infinite gradient a usual one.
        let flags = ops::refuse(kernels, flags, &[grad.clone().reshape([-1])], &whole, f64::MAX);
        let grad = clipping::clip(settings.clipping.as_ref(), grad).reshape([-1]);
        // Files of older versions have float16 here.
        let momentum = momentum.cast(momentum_dtype(dtype)).reshape([k, m, n]);
        let (momentum, direction) = settings.direction(vec![grad], momentum, &flags, None, &part);
        let flags = settings.refuse_late(&direction, flags, of_matrices);
        let parameter = vec![parameter.reshape([-1])];
        let parameter = settings
            .apply(parameter, direction, &flags, (&flags, of_matrices), &part)
            .swap_remove(0);
        if is_first {
            computed::check(&self.parameter, &parameter)?;
        }

        let skipped = skipped + if k > 1 { flags.max() } else { flags };
        let times = [place.next_step()];
        self.skipped.record(&mut place, skipped.clone(), &times, true)?;
        let momentum = momentum.reshape(shape);
        let state = MuonState { momentum, skipped, time: time + 1, place };
        Ok((parameter.reshape(shape), state))
    }
}

impl Counting for Muon {
    fn start_counting<const D: usize>(&self, state: &mut MuonState<D>) {
        let names = vec![self.parameter.to_string()];
        state.place = self.skipped.start(self.reserved, names, state.skipped.clone(), vec![0]);
    }
}

impl Optimizer for Muon {
    type State<const D: usize> = MuonState<D>;

    /// One step of one parameter; see the [module](super).
    ///
    /// A gradient that is not finite leaves the parameter and its momentum as they are, which is
    /// decided on the device, and is counted in the state. So is a matrix of whose momentum the iteration
    /// makes something that is not finite.
    ///
    /// # Panics
    ///
    /// - With an [`Error::Shape`](crate::Error::Shape) as the message, when the parameter can't be
    ///   seen as matrices. `MuonConfig::try_init` finds that out before training.
    /// - With an [`Error::Parameter`](crate::Error::Parameter), when the gradient has another shape or is on
    ///   another device.
    /// - With an [`Error::NotComputed`](crate::Error::NotComputed), when the device had no memory for the first
    ///   step of the parameter.
    /// - With an [`Error::Setting`](crate::Error::Setting), when the learning rate is not finite.
    /// - With an [`Error::Skipped`](crate::Error::Skipped), when the parameter was skipped in too many steps in
    ///   a row.
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
            place: state.place,
        }
    }
}
