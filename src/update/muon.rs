//! The Muon update of a batch of matrices.

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::{DType, Device, Tensor, s};

use super::lr_scale::LrScale;
use super::parts::{Context, Matrices, Part, Stage};
use super::state::{Extent, Slot, SlotDtype, Slots};
use super::step_size::{StepSize, WeightDecay};
use crate::backend::{
    FiniteMask, FlaggedRows, KernelPolicy, MomentumStep, MomentumUpdate, ParameterStep, apply,
    precise_dtype, reject, update_momentum,
};
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
    /// The number of matrices.
    pub count: usize,
    pub matrices: Matrices,
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
    /// Repeats the flags of parameters for each of their matrices.
    pub by_matrix: &'a dyn Fn(&Tensor<1>) -> Tensor<1>,
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
        k as f64 * self.newton_schulz.operations([m, n], dtype, device)
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

    /// The size of a step of matrices.
    pub fn size(&self, lr: f64, Matrices { shape, layout }: Matrices, time: usize) -> StepSize {
        let scale = self.lr_factor * self.lr_scale.factor(layout, shape);
        StepSize::new(lr, scale, &self.weight_decay, time)
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
        let MuonBatch { count, matrices, parameters, gradients, values, .. } = batch;
        let MuonBatch { factor, rejected, by_matrix, first, .. } = batch;
        let Matrices { shape: [m, n], .. } = matrices;
        let policy = self.policy();
        let steps: Vec<_> = parameters
            .iter()
            .map(|parameter| MomentumStep {
                flag: parameter.flag,
                mu: self.momentum.at(parameter.time),
            })
            .collect();
        let momentum = state.take(MOMENTUM).reshape([count, m, n]);
        let MomentumUpdate { momentum, update, norms } = update_momentum(
            policy,
            gradients,
            momentum,
            rejected.unwrap_or(&diverged),
            factor,
            &steps,
            self.nesterov,
        );
        state.put(MOMENTUM, momentum.reshape([count * m * n]));

        let mask = || FiniteMask::from_rows(by_matrix(rejected.unwrap_or(&diverged)));
        let context = Context { matrices, mask: &mask };
        // A part would make them the norms of another tensor.
        let norms = norms.filter(|_| !self.has_parts(Stage::Before));
        let update = self.apply_parts(Stage::Before, update, state, &context);

        let mut direction = contiguous(self.newton_schulz.direction(update, norms));
        let has_after = self.has_parts(Stage::After);
        // The squares that parts compute have to be finite.
        let largest = if has_after { LARGEST_SQUARED } else { f64::MAX };
        let mut diverged = self.reject_matrices(&direction, diverged, first, largest);
        if has_after {
            let mask = || {
                let rejected = by_matrix(rejected.unwrap_or(&diverged));
                let diverged = diverged.clone().slice(s![first..first + count]);
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
