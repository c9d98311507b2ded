//! The Muon update of a batch of matrices.

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, s};

use super::lr_scale::LrScale;
use super::parts::{Context, Matrices, Part, Stage};
use super::state::{Extent, Slot, SlotDtype, Slots};
use super::step_size::{LrFactors, StepSize, WeightDecay};
use crate::backend::{
    FiniteMask, FlaggedRows, KernelPolicy, MomentumStep, MomentumUpdate, ParameterStep, apply,
    reject, update_momentum,
};
use crate::matrix_view::MatrixLayout;
use crate::orthogonalize::NewtonSchulz;
use crate::schedule::Schedule;

/// Name of the momentum in records.
pub(crate) const MOMENTUM: &str = "momentum";

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
    /// Positive for parameters that stay as they are. `None` if the flags of the matrices hold these, too.
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
        let dtype = SlotDtype::Parameter.resolve(dtype);
        k as f64 * self.newton_schulz.explain_shape([m, n], dtype, device).operations
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

    /// Updates a batch: the new values of its parameters, and the flags of matrices. Advances `state`.
    ///
    /// A matrix of whose momentum the iteration makes something that is not finite keeps its values, and its flag in
    /// `diverged` is set.
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
        let mut parts = self.parts.iter().filter(|part| part.stage() == Stage::Before).peekable();
        // Those of another tensor, if a part changes this one.
        let norms = norms.filter(|_| parts.peek().is_none());
        let update = parts.fold(update, |update, part| part.apply(update, state, &context));

        let direction = self.newton_schulz.direction(update, norms);
        // Burn's products may have gaps between rows, which every reader below would copy away separately.
        let direction = direction.reshape([k * m * n]).reshape(shape);
        let flags = [FlaggedRows { flag: first, rows: k }];
        let flat = [direction.clone().reshape([-1])];
        let diverged = reject(policy, diverged, &flat, &flags, f64::MAX);
        let rejected = rejected.unwrap_or(&diverged);

        let mask = || {
            let diverged = diverged.clone().slice(s![first..first + k]);
            FiniteMask::from_rows(rejected_matrices(rejected).max_pair(diverged))
        };
        let context = Context { matrices, mask: &mask };
        let parts = self.parts.iter().filter(|part| part.stage() == Stage::After);
        let direction = parts.fold(direction, |x, part| part.apply(x, state, &context));

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

/// The flags of parameters, repeated for each of their matrices.
fn flags_of_matrices(flags: &Tensor<1>, parameters: &[MuonParameter], rows: &[usize]) -> Tensor<1> {
    let flag = |(parameter, rows): (&MuonParameter, &usize)| {
        std::iter::repeat_n(parameter.flag as i32, *rows)
    };
    let indices: Vec<i32> = parameters.iter().zip(rows).flat_map(flag).collect();
    let indices = Tensor::<1, Int>::from_data(TensorData::from(&*indices), &flags.device());
    flags.clone().select(0, indices)
}
