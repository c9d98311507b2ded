//! The Muon update of a batch of matrices.

use std::cell::Cell;
use std::iter::repeat_n;
use std::sync::Arc;

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData, s};

use super::UpdateTensors;
use super::clipping::clip;
use super::idle_matrices::{self, Clocks, IDLE_STEPS, Idle, Section};
use super::ledger::Ledger;
use super::lr_scale::LrScale;
use super::momentum::{MOMENTUM, MomentumConfig, Weights};
use super::parts::{
    Context, Known, Matrices, Part, Quantity, Stage, check_combination, frobenius, norms_along,
};
use super::precision::{InState, Precision, is_half};
use super::rounding::Origin;
use super::state::{Slot, Slots};
use super::step_norms::{Observations, orthogonality_errors};
use super::step_size::{StepSize, WeightDecay};
use crate::backend::{
    FiniteMask, FlaggedRows, KernelPolicy, MatrixFlags, MomentumStep, MomentumUpdate,
    ParameterStep, PartialNorms, SkipCount, Values, apply, apply_and_count, precise_dtype, reject,
    scaled, split, update_momentum,
};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;
use crate::flat;
use crate::matrix_view::MatrixLayout;
use crate::orthogonalize::{IterationDecision, NewtonSchulz};
use crate::schedule::Schedule;

/// Largest element of a direction whose squares parts can sum in float32, with room for the number
/// of elements. The elements of a direction are about 1.
const LARGEST_SQUARED: f64 = 1e15;

/// Name of the number of steps that a parameter has taken, in records.
pub(crate) const TIME: &str = "time";

/// The settings of Muon that all parameters have in common.
#[derive(Clone, Debug)]
pub(crate) struct MuonUpdate {
    pub momentum: MomentumConfig,
    pub weight_decay: WeightDecay,
    pub lr_scale: LrScale,
    pub lr_factor: f64,
    /// `true` if the momentum, or the weight decay, belongs to a rule, which programs do not set.
    pub has_own_momentum: bool,
    pub has_own_decay: bool,
    pub clipping: Option<GradientClippingConfig>,
    pub newton_schulz: NewtonSchulz,
    pub parts: Vec<Part>,
    pub precision: Precision,
    pub ledger: Ledger,
}

/// A parameter in the step of a batch.
pub(crate) struct MuonParameter<'a> {
    /// Index of its flag.
    pub flag: usize,
    /// `false` if it has no gradient, which its flag has to reject.
    pub is_present: bool,
    /// The origin of its values. The steps that it has taken are its position in the schedules, or
    /// that of a stack's matrices with a gradient in each of them.
    pub origin: Origin<'a>,
    pub lr: f64,
    /// Factors on its new values, flat.
    pub factors: Option<Tensor<1>>,
}

/// A piece of a matrix, to which a direction is applied.
pub(crate) struct MuonPiece {
    /// Flat.
    pub values: Tensor<1>,
    pub size: StepSize,
    /// Factors on its new values, flat.
    pub factors: Option<Tensor<1>>,
}

/// A batch of matrices of one shape, in a step. Its gradients and values are flat, one tensor for
/// each parameter.
pub(crate) struct MuonBatch<'a> {
    /// The number of matrices.
    pub count: usize,
    pub matrices: Matrices,
    /// `true` for matrices of stacks, which stay as they are where their gradient is zero.
    pub is_stack: bool,
    /// The type of the parameters.
    pub dtype: DType,
    pub parameters: &'a [MuonParameter<'a>],
    /// The factor on all gradients.
    pub factor: Option<&'a Tensor<1>>,
    /// Positive for parameters that stay as they are. `None` if the flags of the matrices also hold
    /// these.
    pub rejected: Option<&'a Tensor<1>>,
    /// Repeats the flags of parameters for each of their matrices.
    pub by_matrix: &'a dyn Fn(&Tensor<1>) -> Tensor<1>,
    /// Index of the first matrix among the flags of matrices.
    pub first: usize,
    /// The number of matrices that the step has orthogonalised.
    pub iterations: Cell<usize>,
    /// For one parameter of one matrix, the count of its skipped steps, which the step advances.
    pub skips: Cell<Option<SkipCount>>,
}

impl MuonBatch<'_> {
    fn shape(&self) -> [usize; 3] {
        let [m, n] = self.matrices.shape;
        [self.count, m, n]
    }

    /// The flags of parameters.
    fn flags<'a>(&'a self, diverged: &'a Tensor<1>) -> &'a Tensor<1> {
        self.rejected.unwrap_or(diverged)
    }

    /// The matrices whose gradients are not usable, or absent.
    fn rejected(&self, diverged: &Tensor<1>, idle: &Idle) -> FiniteMask {
        FiniteMask::from_rows(idle.or((self.by_matrix)(self.flags(diverged))))
    }

    /// The matrices that stay as they are.
    fn unchanged(&self, diverged: &Tensor<1>, idle: &Idle) -> FiniteMask {
        let rejected = idle.or((self.by_matrix)(self.flags(diverged)));
        let diverged = diverged.clone().slice(s![self.first..self.first + self.count]);
        // A matrix stays as it is for any of three reasons: its gradient, the lack of one, or its
        // iteration.
        FiniteMask::from_rows(rejected.max_pair(diverged))
    }
}

/// The inputs of a direction, apart from the gradients.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    batch: &'a MuonBatch<'a>,
    sections: &'a [Section],
    /// The old values. `None` if the step does not need them for the direction.
    values: Option<&'a Values>,
}

impl Inputs<'_> {
    /// The old values as a batch.
    fn whole(&self) -> Tensor<3> {
        self.values.expect("the step does not separate").batch(self.batch.shape())
    }
}

/// A direction before the iteration.
struct Started<'a> {
    inputs: Inputs<'a>,
    /// The weights of momentum and gradient in each section.
    weights: Vec<Weights>,
    idle: Idle,
    /// The flags of matrices.
    diverged: Tensor<1>,
}

impl Started<'_> {
    /// The matrices whose gradients are not usable, or absent.
    fn mask(&self) -> FiniteMask {
        self.inputs.batch.rejected(&self.diverged, &self.idle)
    }

    /// The weights of the old momentum, for every matrix.
    fn keep(&self) -> Tensor<3> {
        self.by_section(self.weights.iter().map(|weights| weights.keep))
    }

    /// The weights of the gradient, for every matrix.
    fn fresh(&self) -> Tensor<3> {
        self.by_section(self.weights.iter().map(|weights| weights.fresh))
    }

    /// One value for every matrix, `[k, 1, 1]`, from one for each section.
    fn by_section(&self, values: impl Iterator<Item = f64>) -> Tensor<3> {
        let matrices = self.inputs.sections.iter().map(|section| section.count);
        let precise = precise_dtype(self.inputs.batch.dtype);
        by_section(values.zip(matrices), (precise, &self.diverged.device()))
    }
}

/// The direction of a batch, which the step applies to the parameters.
struct Direction {
    direction: Tensor<3>,
    /// The flags of matrices.
    diverged: Tensor<1>,
    idle: Idle,
    /// The [`orthogonality_errors`], if they are observed.
    errors: Option<Tensor<1>>,
    known: Known,
}

impl MuonUpdate {
    /// The same update at another momentum, the same at every step.
    pub fn with_momentum(&self, momentum: f64) -> Result<Self> {
        ensure_decay("momentum", momentum)?;
        self.precision.ensure_momentum_decays("momentum", momentum)?;
        if self.has_own_momentum {
            return Ok(self.clone());
        }
        let momentum = self.momentum.clone().with_momentum(momentum.into());
        check_combination(&self.parts, &momentum, &self.weight_decay)?;
        Ok(Self { momentum, ..self.clone() })
    }

    /// The same update at another rate of the weight decay, the same at every step.
    pub fn with_weight_decay(&self, rate: f64) -> Result<Self> {
        ensure_size("weight_decay", rate)?;
        if self.has_own_decay {
            return Ok(self.clone());
        }
        let weight_decay = self.weight_decay.at_rate(rate);
        check_combination(&self.parts, &self.momentum, &weight_decay)?;
        Ok(Self { weight_decay, ..self.clone() })
    }

    /// The slots of a batch of matrices, of stacks or not, for parameters of a type.
    pub fn slots(&self, matrices: Matrices, is_stack: bool, parameter: DType) -> Vec<Slot> {
        let dtype = self.precision.states.momentum_slot(matrices.shape);
        let momentum = self.momentum.slots(dtype).into_iter();
        let parts = self.parts.iter().flat_map(|part| part.slots(matrices));
        let precision = self.precision.slots(parameter);
        let idle = is_stack.then_some(IDLE_STEPS);
        momentum.chain(parts).chain(precision).chain(idle).collect()
    }

    /// The implementations that may be used.
    pub fn policy(&self) -> KernelPolicy {
        self.newton_schulz.policy()
    }

    /// Floating-point operations of the iteration for a batch of parameters of a type.
    pub fn operations(&self, [k, m, n]: [usize; 3], dtype: DType, device: &Device) -> f64 {
        let dtype = self.iterated_dtype(dtype);
        k as f64 * self.newton_schulz.operations([m, n], dtype, device)
    }

    /// The type in which the iteration is given the updates of parameters of a type.
    pub fn iterated_dtype(&self, parameter: DType) -> DType {
        precise_dtype(parameter)
    }

    /// Returns `true` if anything changes the momentum before it is orthogonalised.
    fn prepares(&self) -> bool {
        self.momentum.bias_correction || self.has_parts(Stage::Before)
    }

    fn has_parts(&self, stage: Stage) -> bool {
        self.parts.iter().any(|part| part.stages().contains(&stage))
    }

    /// A batch after the parts of a stage. The state of masked matrices stays as it is.
    fn apply_parts(
        &self,
        stage: Stage,
        batch: Tensor<3>,
        state: &mut Slots,
        known: &Known,
        mask: &dyn Fn() -> FiniteMask,
    ) -> Tensor<3> {
        let parts = self.parts.iter().filter(|part| part.stages().contains(&stage));
        let context = Context { stage, dtype: precise_dtype(batch.dtype()), known, mask };
        parts.fold(batch, |batch, part| part.apply(batch, state, &context))
    }

    /// The size of a step of matrices.
    pub fn size(&self, lr: f64, Matrices { shape, layout }: Matrices, time: usize) -> StepSize {
        StepSize::new(lr, self.scale(Matrices { shape, layout }), &self.weight_decay, time)
    }

    /// The factor on the learning rate of matrices.
    fn scale(&self, Matrices { shape, layout }: Matrices) -> f64 {
        self.lr_factor * self.lr_scale.factor(layout, shape)
    }

    /// Sets the flags of matrices with an element that is not finite, or larger than `largest` in
    /// magnitude.
    fn reject_matrices(
        &self,
        direction: &Tensor<3>,
        flags: Tensor<1>,
        first: usize,
        largest: f64,
    ) -> Tensor<1> {
        let rows = [FlaggedRows { flag: first, rows: direction.dims()[0] }];
        reject(self.policy(), flags, std::slice::from_ref(direction), &rows, largest)
    }

    /// Returns `true` if the step needs nothing of the values but to apply the direction to them,
    /// element by element: [`directions`](Self::directions) and [`apply`](Self::apply) are then a
    /// step. In half precision a value has further digits, or a rounding, of its own. Only the
    /// state of a stack has its matrices' positions in the schedule of the decay.
    pub fn separates(&self, is_stack: bool, parameter: DType) -> bool {
        // The ranks with slices do not have the counts of a stack's matrices, which their decay
        // depends on.
        let decays_by_clock = is_stack && self.weight_decay.rate().settled() > 0;
        !is_half(parameter)
            && !decays_by_clock
            && !matches!(self.weight_decay, WeightDecay::Coupled(_))
            && !self.decays_after()
            && !self.has_parts(Stage::Parameter)
            && !self.reads(Quantity::Old)
            && !self.reads(Quantity::OldNorm)
            && !self.reads(Quantity::OldOutputNorms)
    }

    /// Returns `true` if the weight decay comes after the parts of the parameter.
    fn decays_after(&self) -> bool {
        matches!(self.weight_decay, WeightDecay::CautiousAfter(_))
    }

    /// The matrices of a batch by their positions in the schedules, from the lengths of its
    /// parameters.
    fn sections(
        &self,
        batch: &MuonBatch<'_>,
        lengths: &[usize],
        state: &Slots,
        clocks: &mut Clocks,
    ) -> Vec<Section> {
        let [m, n] = batch.matrices.shape;
        // After this many steps no schedule moves any more, and the counts on the device need not
        // be read.
        let schedules = [&self.momentum.momentum, self.weight_decay.rate()].into_iter();
        let schedules = schedules.chain(self.parts.iter().filter_map(Part::schedule));
        let settled = schedules.map(Schedule::settled).max().unwrap_or(0);
        let parameters = batch.parameters.iter().zip(lengths);
        let parameters =
            parameters.map(|(parameter, length)| (parameter.origin.step, length / (m * n)));
        clocks.sections(parameters, settled, batch.is_stack.then_some(state))
    }

    fn reads(&self, quantity: Quantity) -> bool {
        self.parts.iter().any(|part| part.reads(quantity))
    }

    /// Updates a batch: the new values of its parameters, and the flags of matrices. Advances
    /// `state`.
    ///
    /// If the iteration returns numbers that are not finite for a matrix, the matrix keeps its
    /// values, and its flag in `diverged` is set.
    ///
    /// Adds the norms of the step to `observations`, if there are any.
    pub fn step(
        &self,
        batch: &MuonBatch<'_>,
        UpdateTensors { values, gradients }: UpdateTensors,
        state: &mut Slots,
        clocks: &mut Clocks,
        diverged: Tensor<1>,
        observations: Option<&mut Observations>,
    ) -> (Vec<Tensor<1>>, Tensor<1>) {
        let (shape @ [count, m, n], parameters) = (batch.shape(), batch.parameters);
        // Master weights of a batch are one tensor: each parameter has its range of it.
        let firsts = starts(&values);
        let values = self.precision.widen(values, &firsts, state);
        let sections = self.sections(batch, &values.lengths(), state, clocks);
        let inputs = Inputs { batch, sections: &sections, values: Some(&values) };
        let Direction { direction, diverged, idle, errors, known } =
            self.direction(inputs, gradients, state, diverged, observations.is_some());
        // Only for an observed step: a second reference keeps the kernels from writing in place.
        let old = errors.is_some().then(|| values.clone().into_each());

        let steps = sections.iter().map(|section| {
            let MuonParameter { flag, lr, .. } = parameters[section.parameter];
            self.size(lr, batch.matrices, section.time).step(flag)
        });
        let steps: Vec<_> = steps.collect();
        let agreeing = self.decays_after().then(|| {
            let agrees = values.batch(shape) * direction.clone().cast(precise_dtype(batch.dtype));
            agrees.greater_elem(0.0)
        });
        // The kernel reads one list of flags for matrices, to which the idle ones are added.
        let unchanged = idle.among(&diverged, batch.first);
        let unchanged = MatrixFlags { flags: &unchanged, first: batch.first };
        let values = idle_matrices::of_sections(values, &sections, m * n);
        let flags = batch.flags(&diverged);
        let values = self.applied(batch, values, direction, flags, unchanged, &steps);
        let mut values = idle_matrices::of_parameters(values, &sections);
        if self.has_parts(Stage::Parameter) {
            let mask = || batch.unchanged(&diverged, &idle);
            let old = values.batch(shape);
            let new = self.apply_parts(Stage::Parameter, old.clone(), state, &known, &mask);
            // A part may divide by a norm of zero: matrices that stay must not see its result.
            values = values.of_batch(mask().select(new, old));
        }
        if let Some(agreeing) = agreeing {
            let unchanged = batch.unchanged(&diverged, &idle);
            values = self.decayed_after(batch, &sections, values, agreeing, &unchanged);
        }
        // After the update, and in float32, so that master weights are scaled as well; also where
        // the gradient was rejected.
        let values = scaled_by(values, parameters.iter().map(|p| p.factors.as_ref()));
        if let Some(((observations, errors), old)) = observations.zip(errors).zip(old) {
            observe(observations, parameters, old, values.clone().into_each(), errors);
        }
        let origins = parameters.iter().map(|parameter| parameter.origin);
        let stored = InState { dtype: batch.dtype, firsts: &firsts, elements: count * m * n };
        (self.precision.narrow(values, stored, origins, state), diverged)
    }

    /// Values after the step along a direction, which also counts skips if the batch does.
    fn applied(
        &self,
        batch: &MuonBatch<'_>,
        values: Values,
        direction: Tensor<3>,
        flags: &Tensor<1>,
        unchanged: MatrixFlags<'_>,
        steps: &[ParameterStep],
    ) -> Values {
        let policy = self.policy();
        let Some(SkipCount { skipped, .. }) = batch.skips.take() else {
            return apply(policy, values, direction, flags, unchanged, steps);
        };
        let (values, skips) = apply_and_count(policy, values, direction, flags, steps[0], skipped);
        batch.skips.set(Some(skips));
        values
    }

    /// Values after the decay of those elements that agree in sign with the update.
    fn decayed_after(
        &self,
        batch: &MuonBatch<'_>,
        sections: &[Section],
        values: Values,
        agreeing: Tensor<3, Bool>,
        unchanged: &FiniteMask,
    ) -> Values {
        let after = sections.iter().map(|section| {
            let lr = batch.parameters[section.parameter].lr;
            (self.size(lr, batch.matrices, section.time).after, section.count)
        });
        let old = values.batch(batch.shape());
        let kept = by_section(after, (old.dtype(), &old.device())).neg().add_scalar(1.0);
        let new = old.clone().mask_where(agreeing, old.clone() * kept);
        values.of_batch(unchanged.select(new, old))
    }

    /// The directions of a batch, flat for each parameter, and the flags of matrices. Advances
    /// `state`. The direction of a matrix that stays as it is is NaN: [`apply`](Self::apply) may be
    /// called where the flags are not known.
    ///
    /// # Panics
    ///
    /// If the step does not [separate](Self::separates).
    pub fn directions(
        &self,
        batch: &MuonBatch<'_>,
        gradients: Vec<Tensor<1>>,
        state: &mut Slots,
        clocks: &mut Clocks,
        diverged: Tensor<1>,
    ) -> (Vec<Tensor<1>>, Tensor<1>) {
        assert!(self.separates(batch.is_stack, batch.dtype), "the step needs whole values");
        let lengths = lengths(&gradients);
        let sections = self.sections(batch, &lengths, state, clocks);
        let inputs = Inputs { batch, sections: &sections, values: None };
        let Direction { direction, diverged, idle, .. } =
            self.direction(inputs, gradients, state, diverged, false);
        // The ranks that apply it have no flags of these matrices: NaN says it in the message
        // itself.
        let direction = batch.unchanged(&diverged, &idle).fill_rejected(direction, f32::NAN);
        (split(direction.cast(batch.dtype).reshape([-1]), lengths), diverged)
    }

    /// Applies [`directions`](Self::directions): the new values of pieces of matrices, from those
    /// pieces of their directions, `[pieces, 1, elements]`. A piece whose direction is not finite
    /// stays as it is.
    pub fn apply(&self, pieces: Vec<MuonPiece>, direction: Tensor<3>) -> Vec<Tensor<1>> {
        let zeros = flat::zeros(pieces.len(), DType::F32, &direction.device());
        // A piece of a rejected matrix came as NaN, which becomes a flag again here.
        let flags = self.reject_matrices(&direction, zeros, 0, f64::MAX);
        let steps: Vec<_> =
            pieces.iter().enumerate().map(|(flag, piece)| piece.size.step(flag)).collect();
        let (values, factors): (Vec<_>, Vec<_>) =
            pieces.into_iter().map(|piece| (piece.values, piece.factors)).unzip();
        let unchanged = MatrixFlags { flags: &flags, first: 0 };
        let values = Values::Each(values);
        let values = apply(self.policy(), values, direction, &flags, unchanged, &steps);
        scaled_by(values, factors.iter().map(Option::as_ref)).into_each()
    }

    /// The direction of a batch, from its gradients. The values may only be left out if the step
    /// [separates](Self::separates).
    fn direction(
        &self,
        inputs: Inputs<'_>,
        gradients: Vec<Tensor<1>>,
        state: &mut Slots,
        diverged: Tensor<1>,
        observed: bool,
    ) -> Direction {
        let Inputs { batch, sections, .. } = inputs;
        let [_, m, n] = batch.shape();
        // Before clipping, which spreads a NaN to matrices without a gradient.
        let idle = match batch.is_stack {
            true => {
                let is_present = batch.parameters.iter().map(|parameter| parameter.is_present);
                Idle::count(is_present.zip(&gradients), m * n, state)
            }
            false => Idle::none(),
        };
        let clipped = |gradient: Tensor<1>| clip(self.clipping.as_ref(), gradient);
        let gradients = gradients.into_iter().map(clipped).collect();
        let gradients = idle_matrices::divided(gradients, sections, m * n);
        let weights = sections.iter().map(|section| self.momentum.weights(section.time)).collect();
        let started = Started { inputs, weights, idle, diverged };

        let mut known = self.known(&started);
        let (gradients, factor) = self.prepared(&started, gradients, state, &mut known);
        let (update, norms) = self.update(&started, gradients, factor, state);
        // A part would make them the norms of another tensor.
        let norms = norms.filter(|_| !self.prepares());
        let update = self.apply_parts(Stage::Before, update, state, &known, &|| started.mask());
        // Computed only where a part reads it: a norm is a pass over the batch.
        known.update_norm = self
            .reads(Quantity::UpdateNorm)
            .then(|| frobenius(update.clone().cast(precise_dtype(update.dtype()))));
        known.update_input_norms = self.reads(Quantity::UpdateInputNorms).then(|| {
            let precise = update.clone().cast(precise_dtype(update.dtype()));
            norms_along(precise, batch.matrices.along_input())
        });
        let (direction, decision) = self.orthogonalized(update, norms, batch.matrices);
        if let Some(decision) = decision {
            self.count_iteration(inputs, &decision, &direction.device());
        }
        self.finished(started, direction, state, known, observed)
    }

    /// The iteration. Where it rescales the rows of square matrices, these have to be the outputs.
    fn orthogonalized(
        &self,
        update: Tensor<3>,
        norms: Option<PartialNorms>,
        Matrices { shape: [m, n], layout }: Matrices,
    ) -> (Tensor<3>, Option<Arc<IterationDecision>>) {
        let outputs_are_columns = m == n && layout == MatrixLayout::InOut;
        if !outputs_are_columns || !self.newton_schulz.rescales_rows() {
            return self.newton_schulz.direction(update, norms);
        }
        let (direction, decision) = self.newton_schulz.direction(update.swap_dims(1, 2), norms);
        (direction.swap_dims(1, 2), decision)
    }

    /// Counts an iteration that was carried out.
    fn count_iteration(
        &self,
        Inputs { batch, sections, .. }: Inputs<'_>,
        decision: &IterationDecision,
        device: &Device,
    ) {
        batch.iterations.set(batch.iterations.get() + batch.count);
        if let Some(entries) = &mut *self.ledger.entries() {
            let parameters = sections.iter().map(|section| {
                (batch.parameters[section.parameter].origin.parameter, section.count)
            });
            entries.add_iteration(|| decision.explained(batch.shape(), device), parameters);
        }
    }

    /// The quantities that parts read and that are known before the gradients.
    fn known(&self, started: &Started<'_>) -> Known {
        let matrices = started.inputs.batch.matrices;
        Known {
            matrices,
            scale: self.scale(matrices),
            keep: self.reads(Quantity::Keep).then(|| started.keep()),
            lr: self.reads(Quantity::Lr).then(|| {
                let Inputs { batch, sections, .. } = started.inputs;
                let lr = |section: &Section| batch.parameters[section.parameter].lr;
                started.by_section(sections.iter().map(|section| self.lr_factor * lr(section)))
            }),
            base_lr: self.reads(Quantity::BaseLr).then(|| {
                let Inputs { batch, sections, .. } = started.inputs;
                let lr = |section: &Section| batch.parameters[section.parameter].lr;
                started.by_section(sections.iter().map(lr))
            }),
            old: self.reads(Quantity::Old).then(|| started.inputs.whole()),
            old_norm: self.reads(Quantity::OldNorm).then(|| frobenius(started.inputs.whole())),
            old_output_norms: self
                .reads(Quantity::OldOutputNorms)
                .then(|| norms_along(started.inputs.whole(), matrices.along_output())),
            gradient_norm: None,
            gradient_input_norms: None,
            update_norm: None,
            update_input_norms: None,
            next_of_schedule: self.reads(Quantity::NextOfSchedule).then(|| {
                let schedule = self.parts.iter().find_map(Part::schedule);
                let schedule = schedule.expect("the part that reads it has one");
                let times = started.inputs.sections.iter().map(|section| section.time);
                started.by_section(times.map(|time| schedule.at(time + 1)))
            }),
        }
    }

    /// The gradients that the momentum takes, and the factor on them: after weight decay that is
    /// coupled, and the parts for gradients.
    fn prepared<'a>(
        &self,
        started: &Started<'a>,
        gradients: Vec<Tensor<1>>,
        state: &mut Slots,
        known: &mut Known,
    ) -> (Vec<Tensor<1>>, Option<&'a Tensor<1>>) {
        let Inputs { batch, sections, .. } = started.inputs;
        let is_coupled = matches!(self.weight_decay, WeightDecay::Coupled(_));
        let reads_norms = [Quantity::GradientNorm, Quantity::GradientInputNorms];
        let [reads_norm, reads_input_norms] = reads_norms.map(|norms| self.reads(norms));
        // Joining the gradients copies them. Without a reader of whole gradients, the momentum
        // reads them where they lie.
        let is_read = reads_norm || reads_input_norms;
        if !is_coupled && !self.has_parts(Stage::Gradient) && !is_read {
            return (gradients, batch.factor);
        }
        let lengths = lengths(&gradients);
        let mut gradient = Values::Each(gradients).batch(batch.shape());
        if let Some(factor) = batch.factor {
            // Before the parts, which must see the gradient that the momentum would see.
            gradient = scaled(gradient, factor.clone());
        }
        // NaN in a rejected gradient must not reach the state of a part, nor other matrices by a
        // sum.
        gradient = started.mask().zero_rejected(gradient);
        if is_coupled {
            let rates = started.by_section(sections.iter().map(|section| {
                let lr = batch.parameters[section.parameter].lr;
                self.size(lr, batch.matrices, section.time).coupled
            }));
            gradient = gradient + started.inputs.whole() * rates;
        }
        known.gradient_norm = reads_norm.then(|| frobenius(gradient.clone()));
        known.gradient_input_norms =
            reads_input_norms.then(|| norms_along(gradient.clone(), batch.matrices.along_input()));
        let gradient =
            self.apply_parts(Stage::Gradient, gradient, state, known, &|| started.mask());
        // The factor has been applied above.
        (split(gradient.reshape([-1]), lengths), None)
    }

    /// The update that the iteration is given, from the advanced momentum, and its norms if a
    /// kernel has computed them.
    fn update(
        &self,
        started: &Started<'_>,
        gradients: Vec<Tensor<1>>,
        factor: Option<&Tensor<1>>,
        state: &mut Slots,
    ) -> (Tensor<3>, Option<PartialNorms>) {
        let Started { inputs: Inputs { batch, sections, .. }, weights, idle, diverged } = started;
        let shape @ [count, m, n] = batch.shape();
        let steps: Vec<_> = sections
            .iter()
            .zip(weights)
            .map(|(section, &Weights { keep, fresh })| {
                let MuonParameter { flag, .. } = batch.parameters[section.parameter];
                MomentumStep { flag, keep, fresh }
            })
            .collect();
        // Taken out, so that it has one reference and is updated in place.
        let momentum = state.take(MOMENTUM);
        // A momentum that is stored as bfloat16, or in 8 bits, is averaged in float32.
        let stored = momentum.dtype();
        let momentum = momentum.cast(precise_dtype(batch.dtype)).reshape(shape);
        // With a second reference, the momentum is not updated in place.
        let of_idle = idle.mask().map(|mask| (mask, momentum.clone()));
        let MomentumUpdate { mut momentum, mut update, norms } = update_momentum(
            self.policy(),
            gradients,
            momentum,
            batch.flags(diverged),
            factor,
            &steps,
            self.momentum.nesterov,
        );
        if let Some((mask, old)) = of_idle {
            // An expert without tokens keeps its momentum, as a layer without a gradient does.
            momentum = mask.select(momentum, old);
        }
        state.put(MOMENTUM, momentum.reshape([count * m * n]).cast(stored));
        if self.momentum.bias_correction {
            let dtype = precise_dtype(update.dtype());
            let weights = [started.keep(), started.fresh()].map(|weights| weights.cast(dtype));
            update = self.momentum.corrected(update.cast(dtype), weights, &started.mask(), state);
        }
        (update, norms)
    }

    /// The direction after the parts that follow the iteration. Matrices of which it is not finite
    /// are flagged.
    fn finished(
        &self,
        Started { inputs: Inputs { batch, .. }, idle, diverged, .. }: Started<'_>,
        mut direction: Tensor<3>,
        state: &mut Slots,
        known: Known,
        observed: bool,
    ) -> Direction {
        let errors = observed.then(|| orthogonality_errors(&direction));
        // The iteration of a matrix of zeros returns zeros, whose error says nothing of the run.
        let errors = match idle.mask() {
            Some(mask) => errors.map(|errors| mask.zero_rejected(errors)),
            None => errors,
        };
        let has_after = self.has_parts(Stage::After);
        // The squares that parts compute have to be finite.
        let largest = if has_after { LARGEST_SQUARED } else { f64::MAX };
        let mut diverged = self.reject_matrices(&direction, diverged, batch.first, largest);
        if has_after {
            let mask = || batch.unchanged(&diverged, &idle);
            direction = self.apply_parts(Stage::After, direction, state, &known, &mask);
            direction = contiguous(direction);
            // A part may also divide by zero or overflow: its result is checked like the
            // iteration's.
            diverged = self.reject_matrices(&direction, diverged, batch.first, f64::MAX);
        }
        Direction { direction, diverged, idle, errors, known }
    }
}

impl StepSize {
    /// The step of the values that have a flag.
    fn step(&self, flag: usize) -> ParameterStep {
        let Self { decay, lr, cautious, .. } = *self;
        ParameterStep { flag, decay, lr, cautious }
    }
}

/// Adds the norms of parameters, and the `errors` of their matrices, to observations.
fn observe(
    observations: &mut Observations,
    parameters: &[MuonParameter<'_>],
    old: Vec<Tensor<1>>,
    new: Vec<Tensor<1>>,
    errors: Tensor<1>,
) {
    let lengths = lengths(&new);
    let of_matrix = lengths.iter().sum::<usize>() / errors.dims()[0];
    let counts = lengths.iter().map(|elements| elements / of_matrix).collect();
    let each = parameters.iter().zip(old).zip(new).zip(errors.split_with_sizes(counts, 0));
    each.for_each(|(((parameter, old), new), errors)| {
        observations.add(parameter.flag, old, &new, errors.sum());
    });
}

/// New values times factors, for the parameters that have any.
pub(super) fn scaled_by<'a>(
    values: Values,
    factors: impl Iterator<Item = Option<&'a Tensor<1>>>,
) -> Values {
    let factors: Vec<_> = factors.collect();
    if factors.iter().all(Option::is_none) {
        return values;
    }
    let scaled = |(values, factors): (Tensor<1>, Option<&Tensor<1>>)| match factors {
        Some(factors) => values.clone() * factors.clone().cast(values.dtype()),
        None => values,
    };
    Values::Each(values.into_each().into_iter().zip(factors).map(scaled).collect())
}

fn lengths(tensors: &[Tensor<1>]) -> Vec<usize> {
    tensors.iter().map(|tensor| tensor.dims()[0]).collect()
}

/// The index of each tensor's first element, if all lie behind each other.
fn starts(tensors: &[Tensor<1>]) -> Vec<usize> {
    let start = |end: &mut usize, tensor: &Tensor<1>| {
        let start = *end;
        *end += tensor.dims()[0];
        Some(start)
    };
    tensors.iter().scan(0, start).collect()
}

/// One value for every matrix, `[k, 1, 1]`, from a value and a number of matrices for each section.
fn by_section(
    of_sections: impl Iterator<Item = (f64, usize)>,
    (dtype, device): (DType, &Device),
) -> Tensor<3> {
    let of_matrices: Vec<f64> =
        of_sections.flat_map(|(value, matrices)| repeat_n(value, matrices)).collect();
    let count = of_matrices.len();
    Tensor::from_data(TensorData::new(of_matrices, [count, 1, 1]), (device, dtype))
}

/// Makes the batch contiguous once. Burn's products may leave gaps between its rows, which every
/// reader would otherwise copy away for itself.
fn contiguous(batch: Tensor<3>) -> Tensor<3> {
    let (shape, elements) = (batch.dims(), batch.shape().num_elements());
    batch.reshape([elements]).reshape(shape)
}
