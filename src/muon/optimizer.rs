//! Muon as a Burn optimizer of one parameter at a time.

use std::cell::Cell;
use std::sync::Arc;

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor, s};

use crate::backend::{FlaggedRows, SkipCount, reject};
use crate::checks::{ensure_computed, ensure_gradient_matches};
use crate::error::Result;
use crate::flat::expand;
use crate::matrix_view::{MatrixLayout, MatrixView};
use crate::orthogonalize::NewtonSchulz;
use crate::routing::ensure_once;
use crate::update::{
    Clocks, CountSlot, IDLE, MANTISSA, MASTER, MOMENTUM, MOMENTUM_WEIGHT, Matrices, MuonBatch,
    MuonParameter, MuonUpdate, ONLY_RANK, Origin, Reserved, Resumable, SKIPPED, SkippedSteps, Slot,
    Slots, TIME, UpdateTensors, ensure_rate, parts,
};

/// The names of the slots that every state has. Slots of the configured parts may follow.
const REQUIRED_SLOTS: [&str; 2] = [MOMENTUM, SKIPPED.name];

/// Muon as a Burn [`Optimizer`]: the rule for one parameter, built by
/// [`MuonConfig::build`](super::MuonConfig::build).
///
/// [`MuonConfig::init`](super::MuonConfig::init) combines it with AdamW into an optimizer for a
/// whole model. To combine it with others by hand, pass it to
/// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group).
#[derive(Clone, Debug)]
pub struct Muon {
    pub(super) update: Arc<MuonUpdate>,
    pub(super) view: MatrixView,
    pub(super) layout: MatrixLayout,
    pub(super) parameter: Arc<str>,
    pub(super) skipped: SkippedSteps,
    /// The place of the states' counts, if they belong to one parameter.
    pub(super) reserved: Option<Reserved>,
    /// `true` if every matrix is expected to be orthogonalised once in a step.
    pub(super) once: bool,
}

/// The state that Muon stores for one parameter. A record of it has the tensors `momentum` and
/// `skipped`, the configured parts' tensors, and the scalar `time`.
#[derive(Clone, Debug)]
pub struct MuonState<const D: usize> {
    slots: Slots,
    /// Number of steps taken, skipped ones included: the position in the schedules. The matrices of
    /// a stack have taken fewer where their gradients were zero: a record has the `idle` steps of
    /// each.
    pub time: usize,
    clocks: Clocks,
    /// The place of its count of skipped steps.
    place: CountSlot,
    /// Zeros for the flag of the next step, if the last one has made some.
    flag: Option<Tensor<1>>,
}

/// A parameter after a step.
struct Updated {
    /// Flat.
    values: Tensor<1>,
    /// The number of matrices that were orthogonalised.
    iterations: usize,
}

impl<const D: usize> MuonState<D> {
    /// A state that has not been counted yet.
    fn new(slots: Slots, time: usize) -> Self {
        let (clocks, place) = (Clocks::default(), CountSlot::default());
        Self { slots, time, clocks, place, flag: None }
    }

    /// Returns the moving average of the gradients, in the shape of the parameter and the type of
    /// [`StateDtype`](crate::StateDtype): float32 for [`Int8`](crate::StateDtype::Int8). It has no
    /// elements on a rank that does not own the parameter.
    pub fn momentum(&self) -> Tensor<D> {
        let (momentum, shape) = (self.slots.get(MOMENTUM), self.shape());
        match shape.contains(&0) {
            // Burn interprets a zero in a new shape as the old length.
            true => Tensor::empty(shape, (&momentum.device(), momentum.dtype())),
            false => momentum.reshape(shape),
        }
    }

    /// Returns the number of steps that left the parameter untouched, as a float32 tensor `[1]`:
    /// see [`SkippedSteps`].
    pub fn skipped(&self) -> Tensor<1> {
        self.slots.get(SKIPPED.name)
    }

    /// The shape of the parameter; zeros on a rank that is not its owner.
    pub(crate) fn shape(&self) -> [usize; D] {
        let shape = self.slots.recorded(MOMENTUM);
        shape.try_into().expect("a momentum has the dimensions of its parameter")
    }

    /// The state after a step of another rank, which has the values.
    pub(crate) fn elsewhere(self) -> Self {
        let slots = self.slots.keep_only(SKIPPED.name, D);
        Self { slots, time: self.time + 1, ..self }
    }
}

impl<const D: usize> RecordState for MuonState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.slots.flatten(prefix, out);
        out.push_scalar(prefix, TIME, self.time.into());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let optional =
            [&parts::SLOT_NAMES[..], &[MOMENTUM_WEIGHT, MASTER, MANTISSA, IDLE]].concat();
        let slots = Slots::unflatten(&REQUIRED_SLOTS, &optional, prefix, src, device)?;
        if slots.recorded(MOMENTUM).len() != D {
            return None;
        }
        let time = src.take_scalar(prefix, TIME)?.try_into().ok()?;
        Some(Self::new(slots, time))
    }
}

impl Muon {
    /// Returns the counts of the steps that left parameters untouched.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// Returns the iteration that orthogonalises the momentum.
    pub fn newton_schulz(&self) -> &NewtonSchulz {
        &self.update.newton_schulz
    }

    /// The rule for one parameter. All states that it makes or loads belong to that parameter, so a
    /// later state replaces an earlier one in the counts.
    pub(crate) fn for_parameter(
        update: &Arc<MuonUpdate>,
        parameter: &str,
        (view, layout): (MatrixView, MatrixLayout),
        skipped: &SkippedSteps,
        once: bool,
    ) -> Self {
        Self {
            once,
            update: update.clone(),
            view,
            layout,
            parameter: parameter.into(),
            skipped: skipped.clone(),
            reserved: Some(skipped.reserve()),
        }
    }

    /// The name of the parameter in errors.
    pub(crate) fn parameter(&self) -> &str {
        &self.parameter
    }

    /// Floating-point operations of the iteration for a parameter of a shape.
    pub(crate) fn operations(&self, shape: &[usize], dtype: DType, device: &Device) -> Result<f64> {
        let batch = self.view.batch_shape(&self.parameter, shape)?;
        Ok(self.update.operations(batch, dtype, device))
    }

    /// The slots of a parameter that is a batch, in the order of records.
    fn slots(&self, [k, m, n]: [usize; 3], parameter: DType) -> Vec<Slot> {
        let matrices = Matrices { shape: [m, n], layout: self.layout };
        let mut table = self.update.slots(matrices, k > 1, parameter);
        table.insert(1, SKIPPED);
        table
    }

    /// The state before the first step of a parameter; with zeros as the shape, the state of
    /// another rank's parameter.
    pub(crate) fn new_state<const D: usize>(
        &self,
        batch: [usize; 3],
        shape: [usize; D],
        dtype: DType,
        device: &Device,
    ) -> MuonState<D> {
        let table = self.slots(batch, dtype);
        let slots = Slots::zeros(&table, batch, &shape, dtype, device);
        MuonState::new(slots, 0)
    }

    /// [`step`](Optimizer::step), with the errors that it panics with.
    pub(crate) fn try_step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<MuonState<D>>,
    ) -> Result<(Tensor<D>, MuonState<D>)> {
        ensure_rate(lr)?;
        let (shape, device, dtype) = (parameter.dims(), parameter.device(), parameter.dtype());
        let batch @ [k, m, n] = self.view.batch_shape(&self.parameter, &shape)?;
        ensure_gradient_matches(&self.parameter, ONLY_RANK, &parameter, &grad)?;
        // Also here, since no routing has checked a rule that was built by hand.
        self.update.precision.ensure_stored(&self.parameter, &device)?;
        let is_first = state.is_none();
        let mut state = state.unwrap_or_else(|| self.new_state(batch, shape, dtype, &device));
        if !state.place.has_started() {
            self.start_counting(&mut state);
        }
        if k * m * n == 0 {
            // Nothing to update, and Burn interprets a zero in a new shape as the old length.
            state.time += 1;
            return Ok((parameter, state));
        }
        let table = self.slots(batch, dtype);
        state.slots.complete(&table, batch, &shape, dtype, &device);
        state.slots.ensure_fit(&table, batch, &shape, &self.parameter)?;
        // Files of older versions have half precision where there is float32 now.
        state.slots.convert(&table, dtype);

        let Updated { values, iterations } = self.updated(lr, batch, parameter, grad, &mut state);
        if self.once {
            ensure_once(&self.parameter, None, k, iterations)?;
        }
        if is_first {
            // Reading waits for the device, so only the first step does it: that is when memory
            // runs out.
            ensure_computed(&self.parameter, &values)?;
        }

        self.skipped.record_slot(&state.slots, &mut state.place)?;
        state.time += 1;
        Ok((values.reshape(shape), state))
    }

    /// A step of a parameter, whose state advances with its count of skipped steps.
    fn updated<const D: usize>(
        &self,
        lr: LearningRate,
        [k, m, n]: [usize; 3],
        parameter: Tensor<D>,
        grad: Tensor<D>,
        MuonState { slots, time, clocks, flag, .. }: &mut MuonState<D>,
    ) -> Updated {
        let update = &self.update;
        // The flag of the parameter, then the flags of its matrices: a single matrix has the flag
        // of the parameter.
        let first = usize::from(k > 1);
        let zeros = || Tensor::zeros([first + k], (&parameter.device(), DType::F32));
        let flags = flag.take().unwrap_or_else(zeros);
        let skipped = slots.take(SKIPPED.name);
        // The kernel that applies the direction counts a single matrix.
        let skips = (k == 1).then(|| SkipCount { skipped: skipped.clone(), zero: None });
        let whole = [FlaggedRows { flag: 0, rows: 1 }];
        // Before the update clips it, which would make an infinite gradient a finite one.
        let flags = reject(update.policy(), flags, std::slice::from_ref(&grad), &whole, f64::MAX);
        let batch = MuonBatch {
            count: k,
            matrices: Matrices { shape: [m, n], layout: self.layout },
            dtype: parameter.dtype(),
            is_stack: k > 1,
            parameters: &[MuonParameter {
                flag: 0,
                is_present: true,
                origin: Origin { parameter: &self.parameter, element: 0, step: *time },
                lr,
                factors: None,
            }],
            factor: None,
            rejected: None,
            by_matrix: &|flags| expand(flags.clone().slice(s![0..1]), [k]),
            first,
            iterations: Cell::default(),
            skips: Cell::new(skips),
        };
        let tensors = UpdateTensors::of_one(parameter, grad);
        let (mut updated, flags) = update.step(&batch, tensors, slots, clocks, flags, None);
        let skipped = match batch.skips.take() {
            Some(SkipCount { skipped, zero }) => {
                *flag = zero;
                skipped
            }
            // One count for the parameter: a skipped matrix of a stack counts.
            None => skipped + flags.max(),
        };
        slots.put(SKIPPED.name, skipped);
        Updated { values: updated.swap_remove(0), iterations: batch.iterations.get() }
    }
}

impl Resumable for Muon {
    fn problem<const D: usize>(&self, state: &MuonState<D>) -> Option<String> {
        let shape = state.shape();
        if shape.contains(&0) {
            // The state of a rank that does not own the parameter.
            return None;
        }
        let batch = match self.view.batch_shape(&self.parameter, &shape) {
            Ok(batch) => batch,
            Err(error) => return Some(error.to_string()),
        };
        // With the slots of half precision, which the parameter may not have.
        let table = self.slots(batch, DType::BF16);
        state.slots.problem(&table, batch, &shape)
    }

    fn start_counting<const D: usize>(&self, state: &mut MuonState<D>) {
        let names = vec![self.parameter.to_string()];
        let reserved = self.reserved.as_ref().map(Reserved::place);
        state.place = self.skipped.start(reserved, names, state.skipped(), vec![0]);
    }
}

impl Optimizer for Muon {
    type State<const D: usize> = MuonState<D>;

    /// Takes one step of one parameter, by the formulas of the [module](super).
    ///
    /// A gradient that is not finite leaves the parameter and its momentum as they are. The device
    /// decides that without a host synchronisation, and counts it in the state. A matrix for which
    /// the iteration diverges keeps its values, and that is also counted.
    ///
    /// # Panics
    ///
    /// With the message of the error:
    ///
    /// - [`Error::Shape`](crate::Error::Shape) if the parameter can't be seen as matrices, which
    ///   `MuonConfig::try_init` detects before training;
    /// - [`Error::Parameter`](crate::Error::Parameter) if the gradient has another shape or is on
    ///   another device, or the state was saved under another configuration;
    /// - [`Error::NotComputed`](crate::Error::NotComputed) if the device had no memory for the
    ///   first step of the parameter;
    /// - [`Error::Usage`](crate::Error::Usage) if the learning rate is not finite, or negative;
    /// - [`Error::Setting`](crate::Error::Setting) if the device has no integers of 8 bits for
    ///   [`StateDtype::Int8`](crate::StateDtype::Int8);
    /// - [`Error::Skipped`](crate::Error::Skipped) if the parameter was skipped in too many steps
    ///   in a row.
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
        // Burn asks for the device in every step.
        // On another device, the next step makes zeros.
        let flag = state.flag.filter(|flag| flag.device() == *device);
        MuonState { slots: state.slots.to_device(device), flag, ..state }
    }
}
