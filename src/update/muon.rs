//! The Muon update of a batch of matrices.

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, s};

use super::lr_scale::LrScale;
use super::parts::{Context, Matrices, Part, Stage};
use super::state::{Extent, Slot, SlotDtype, Slots};
use super::step_size::{LrFactors, StepSize, WeightDecay};
use crate::backend::{
    FiniteMask, FlaggedRows, KernelPolicy, MomentumStep, MomentumUpdate, ParameterStep, apply,
    precise_dtype, reject, update_momentum,
};
use crate::matrix_view::MatrixLayout;
use crate::orthogonalize::NewtonSchulz;
use crate::schedule::Schedule;

/// Largest element of a direction whose squares parts can sum in float32, with room for the number
/// of elements. The elements of a direction are about 1.
const LARGEST_SQUARED: f64 = 1e15;

/// Name of the momentum in records.
pub(crate) const MOMENTUM: &str = "momentum";

/// Name of the number of steps that a parameter has taken, in records.
pub(crate) const TIME: &str = "time";

/// The settings of Muon that all parameters have in common.
#[derive(Debug)]
pub(crate) struct MuonUpdate {
    pub momentum: Schedule,
    pub nesterov: bool,
    pub weight_decay: WeightDecay,
    pub lr_scale: LrScale,
    pub lr_factor: f64,
    pub clipping: Option<GradientClippingConfig>,
    pub newton_schulz: NewtonSchulz,
    pub parts: Vec<Part>,
}

/// A parameter in the step of a batch.
pub(crate) struct MuonParameter {
    /// Index of its flag.
    pub flag: usize,
    /// Steps that it has taken: its position in the schedules.
    pub time: usize,
    pub size: StepSize,
}

/// A batch of matrices of one shape, in a step.
pub(crate) struct MuonBatch<'a> {
    /// `[k, m, n]`.
    pub shape: [usize; 3],
    pub layout: MatrixLayout,
    pub parameters: &'a [MuonParameter],
    /// For each parameter, flat.
    pub gradients: Vec<Tensor<1>>,
    /// For each parameter, flat.
    pub values: Vec<Tensor<1>>,
    /// The factor on all gradients.
    pub factor: Option<&'a Tensor<1>>,
    /// Positive for parameters that stay as they are. `None` if the flags of the matrices also hold
    /// these.
    pub rejected: Option<&'a Tensor<1>>,
    /// Index of the first matrix among the flags of matrices.
    pub first: usize,
}

impl MuonUpdate {
    /// The slots of a batch of matrices.
    pub fn slots(&self, matrices: Matrices) -> Vec<Slot> {
        let momentum =
            Slot { name: MOMENTUM, extent: Extent::Element, dtype: SlotDtype::Parameter };
        let parts = self.parts.iter().flat_map(|part| part.slots(matrices));
        [momentum].into_iter().chain(parts).collect()
    }

    /// The implementations that may be used.
    pub fn policy(&self) -> KernelPolicy {
        self.newton_schulz.policy()
    }

    /// Floating-point operations of the iteration for a batch of parameters of a type.
    pub fn operations(&self, [k, m, n]: [usize; 3], dtype: DType, device: &Device) -> f64 {
        let dtype = self.iterated_dtype(dtype);
        k as f64 * self.newton_schulz.explain_shape([m, n], dtype, device).operations
    }

    /// The type in which the iteration is given the updates of parameters of a type.
    pub fn iterated_dtype(&self, parameter: DType) -> DType {
        let momentum = SlotDtype::Parameter.resolve(parameter);
        match self.has_parts(Stage::Before) {
            true => precise_dtype(momentum),
            false => momentum,
        }
    }

    fn has_parts(&self, stage: Stage) -> bool {
        self.parts.iter().any(|part| part.stage() == stage)
    }

    /// The update after the parts of a stage.
    fn apply_parts(
        &self,
        stage: Stage,
        update: Tensor<3>,
        state: &mut Slots,
        context: &Context<'_>,
    ) -> Tensor<3> {
        let parts = self.parts.iter().filter(|part| part.stage() == stage);
        parts.fold(update, |update, part| part.apply(update, state, context))
    }

    /// The factors on the learning rate of a matrix.
    pub fn lr_factors(&self, matrices: Matrices) -> LrFactors {
        let scale = self.lr_factor * self.lr_scale.factor(matrices.layout, matrices.shape);
        LrFactors { role: 1.0, scale }
    }

    /// The size of a step.
    pub fn size(&self, lr: f64, factors: LrFactors, time: usize) -> StepSize {
        StepSize::new(lr, factors, &self.weight_decay, time)
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
        reject(self.policy(), flags, &[direction.clone().reshape([-1])], &rows, largest)
    }

    /// Updates a batch: the new values of its parameters, and the flags of matrices. Advances
    /// `state`.
    ///
    /// A matrix of whose momentum the iteration makes something that is not finite keeps its
    /// values, and its flag in `diverged` is set.
    pub fn step(
        &self,
        batch: MuonBatch<'_>,
        state: &mut Slots,
        diverged: Tensor<1>,
    ) -> (Vec<Tensor<1>>, Tensor<1>) {
        let MuonBatch { shape, layout, parameters, gradients, values, factor, rejected, first } =
            batch;
        let [k, m, n] = shape;
        let policy = self.policy();
        let steps: Vec<_> = parameters
            .iter()
            .map(|parameter| MomentumStep {
                flag: parameter.flag,
                mu: self.momentum.at(parameter.time),
            })
            .collect();
        let momentum = state.take(MOMENTUM);
        // Files of older versions have float16 where there is float32 now.
        let dtype = SlotDtype::Parameter.resolve(gradients[0].dtype());
        let MomentumUpdate { momentum, update, norms } = update_momentum(
            policy,
            gradients,
            momentum.cast(dtype).reshape(shape),
            rejected.unwrap_or(&diverged),
            factor,
            &steps,
            self.nesterov,
        );
        state.put(MOMENTUM, momentum.reshape([k * m * n]));

        let matrices = Matrices { shape: [m, n], layout };
        let rows: Vec<_> = values.iter().map(|values| values.dims()[0] / (m * n)).collect();
        let rejected_matrices =
            |rejected: &Tensor<1>| flags_of_matrices(rejected, parameters, &rows);

        let mask = || FiniteMask::from_rows(rejected_matrices(rejected.unwrap_or(&diverged)));
        let context = Context { matrices, mask: &mask };
        // A part would make them the norms of another tensor.
        let norms = norms.filter(|_| !self.has_parts(Stage::Before));
        let update = self.apply_parts(Stage::Before, update, state, &context);

        let direction = contiguous(self.newton_schulz.direction(update, norms));
        let has_after = self.has_parts(Stage::After);
        // The squares that parts compute have to be finite.
        let largest = if has_after { LARGEST_SQUARED } else { f64::MAX };
        let mut diverged = self.reject_matrices(&direction, diverged, first, largest);
        let mut direction = direction;
        if has_after {
            let mask = || {
                let rejected = rejected_matrices(rejected.unwrap_or(&diverged));
                let diverged = diverged.clone().slice(s![first..first + k]);
                FiniteMask::from_rows(rejected.max_pair(diverged))
            };
            let context = Context { matrices, mask: &mask };
            direction = contiguous(self.apply_parts(Stage::After, direction, state, &context));
            diverged = self.reject_matrices(&direction, diverged, first, f64::MAX);
        }
        let rejected = rejected.unwrap_or(&diverged);

        let steps: Vec<_> = parameters
            .iter()
            .map(|&MuonParameter { flag, size, .. }| ParameterStep {
                flag,
                decay: size.decay,
                lr: size.lr,
                cautious: size.cautious,
            })
            .collect();
        let values = apply(policy, values, direction, rejected, (&diverged, first), &steps);
        (values, diverged)
    }
}

/// The batch without gaps between its rows, which Burn's products may leave and every reader would
/// copy away separately.
fn contiguous(batch: Tensor<3>) -> Tensor<3> {
    let (shape, elements) = (batch.dims(), batch.shape().num_elements());
    batch.reshape([elements]).reshape(shape)
}

/// The flags of parameters, repeated for each of their matrices.
fn flags_of_matrices(flags: &Tensor<1>, parameters: &[MuonParameter], rows: &[usize]) -> Tensor<1> {
    let flag = |(parameter, rows): (&MuonParameter, &usize)| {
        std::iter::repeat_n(parameter.flag as i32, *rows)
    };
    let indices: Vec<i32> = parameters.iter().zip(rows).flat_map(flag).collect();
    let indices = Tensor::<1, Int>::from_data(TensorData::from(&*indices), &flags.device());
    flags.clone().select(0, indices)
}
