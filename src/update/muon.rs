//! The Muon update of a batch of matrices.

use std::iter::repeat_n;

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::{DType, Device, Tensor, TensorData, s};

use super::lr_scale::LrScale;
use super::momentum::{MOMENTUM, MomentumConfig, Weights};
use super::observations::{Observations, orthogonality_errors};
use super::parts::{Context, Known, Matrices, Part, Quantity, Stage, frobenius};
use super::precision::Precision;
use super::rounding::Origin;
use super::state::{Slot, Slots};
use super::step_size::{StepSize, WeightDecay};
use crate::backend::{
    FiniteMask, FlaggedRows, KernelPolicy, MomentumStep, MomentumUpdate, ParameterStep, apply,
    precise_dtype, reject, scaled, update_momentum,
};
use crate::orthogonalize::NewtonSchulz;
use crate::slices::concat;

/// Largest element of a direction whose squares parts can sum in float32, with room for the number
/// of elements. The elements of a direction are about 1.
const LARGEST_SQUARED: f64 = 1e15;

/// Name of the number of steps that a parameter has taken, in records.
pub(crate) const TIME: &str = "time";

/// The settings of Muon that all parameters have in common.
#[derive(Debug)]
pub(crate) struct MuonUpdate {
    pub momentum: MomentumConfig,
    pub weight_decay: WeightDecay,
    pub lr_scale: LrScale,
    pub lr_factor: f64,
    pub clipping: Option<GradientClippingConfig>,
    pub newton_schulz: NewtonSchulz,
    pub parts: Vec<Part>,
    pub precision: Precision,
}

/// A parameter in the step of a batch.
pub(crate) struct MuonParameter {
    /// Index of its flag.
    pub flag: usize,
    /// The origin of its values. The steps that it has taken are its position in the schedules.
    pub origin: Origin,
    pub size: StepSize,
    /// Factors on its new values, flat.
    pub factors: Option<Tensor<1>>,
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
    /// The slots of a batch of matrices, for parameters of a type.
    pub fn slots(&self, matrices: Matrices, parameter: DType) -> Vec<Slot> {
        let momentum = self.momentum.slots(self.precision.states.slot()).into_iter();
        let parts = self.parts.iter().flat_map(|part| part.slots(matrices));
        momentum.chain(parts).chain(self.precision.slots(parameter)).collect()
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
        reject(self.policy(), flags, &[direction.clone().reshape([-1])], &rows, largest)
    }

    /// Updates a batch: the new values of its parameters, and the flags of matrices. Advances
    /// `state`.
    ///
    /// A matrix of whose momentum the iteration makes something that is not finite keeps its
    /// values, and its flag in `diverged` is set.
    ///
    /// Adds the norms of the step to `observations`, if there are any.
    pub fn step(
        &self,
        batch: MuonBatch<'_>,
        state: &mut Slots,
        diverged: Tensor<1>,
        observations: Option<&mut Observations>,
    ) -> (Vec<Tensor<1>>, Tensor<1>) {
        let MuonBatch { count, matrices, parameters, gradients, values, .. } = batch;
        let MuonBatch { mut factor, rejected, by_matrix, first, .. } = batch;
        let Matrices { shape: [m, n], .. } = matrices;
        let policy = self.policy();
        let steps = parameters.iter().map(|parameter| parameter.origin.step);
        let weights: Vec<Weights> = steps.map(|step| self.momentum.weights(step)).collect();
        let dtype = values[0].dtype();
        let firsts = starts(&values);
        let values = self.precision.widen(values, &firsts, state);
        let precise = values[0].dtype();
        let mut gradients: Vec<_> =
            gradients.into_iter().map(|gradient| gradient.cast(precise)).collect();

        let reads = |quantity| self.parts.iter().any(|part| part.reads(quantity));
        let keep = || by_parameter(&values, m * n, weights.iter().map(|weights| weights.keep));
        let mask = || FiniteMask::from_rows(by_matrix(rejected.unwrap_or(&diverged)));
        let mut known = Known {
            matrices,
            scale: self.scale(matrices),
            keep: reads(Quantity::Keep).then(keep),
            old_norm: reads(Quantity::OldNorm).then(|| frobenius(joined(&values, [count, m, n]))),
            gradient_norm: None,
            update_norm: None,
        };

        let is_coupled = matches!(self.weight_decay, WeightDecay::Coupled(_));
        if is_coupled || self.has_parts(Stage::Gradient) || reads(Quantity::GradientNorm) {
            let mut gradient = joined(&gradients, [count, m, n]);
            gradient = factor.iter().fold(gradient, |g, factor| scaled(g, (*factor).clone()));
            gradient = mask().zero_rejected(gradient);
            if is_coupled {
                let rates = parameters.iter().map(|parameter| parameter.size.coupled);
                let rates = by_parameter(&values, m * n, rates);
                gradient = gradient + joined(&values, [count, m, n]) * rates;
            }
            known.gradient_norm =
                reads(Quantity::GradientNorm).then(|| frobenius(gradient.clone()));
            let gradient = self.apply_parts(Stage::Gradient, gradient, state, &known, &mask);
            (gradients, factor) = (split_like(gradient, &values), None);
        }

        let steps: Vec<_> = parameters
            .iter()
            .zip(&weights)
            .map(|(MuonParameter { flag, .. }, &Weights { keep, fresh })| MomentumStep {
                flag: *flag,
                keep,
                fresh,
            })
            .collect();
        let momentum = state.take(MOMENTUM);
        let stored = momentum.dtype();
        let momentum = momentum.cast(precise).reshape([count, m, n]);
        let MomentumUpdate { momentum, mut update, norms } = update_momentum(
            policy,
            gradients,
            momentum,
            rejected.unwrap_or(&diverged),
            factor,
            &steps,
            self.momentum.nesterov,
        );
        state.put(MOMENTUM, momentum.reshape([count * m * n]).cast(stored));

        if self.momentum.bias_correction {
            let dtype = precise_dtype(update.dtype());
            let fresh = by_parameter(&values, m * n, weights.iter().map(|weights| weights.fresh));
            let weights = [keep(), fresh].map(|weights| weights.cast(dtype));
            update = self.momentum.corrected(update.cast(dtype), weights, &mask(), state);
        }
        // A part would make them the norms of another tensor.
        let norms = norms.filter(|_| !self.prepares());
        let update = self.apply_parts(Stage::Before, update, state, &known, &mask);
        known.update_norm = reads(Quantity::UpdateNorm)
            .then(|| frobenius(update.clone().cast(precise_dtype(update.dtype()))));

        let mut direction = contiguous(self.newton_schulz.direction(update, norms));
        let before =
            observations.is_some().then(|| (values.clone(), orthogonality_errors(&direction)));
        let has_after = self.has_parts(Stage::After);
        // The squares that parts compute have to be finite.
        let largest = if has_after { LARGEST_SQUARED } else { f64::MAX };
        let mut diverged = self.reject_matrices(&direction, diverged, first, largest);
        let unchanged = |diverged: &Tensor<1>| {
            let rejected = by_matrix(rejected.unwrap_or(diverged));
            let diverged = diverged.clone().slice(s![first..first + count]);
            FiniteMask::from_rows(rejected.max_pair(diverged))
        };
        if has_after {
            let mask = || unchanged(&diverged);
            direction = self.apply_parts(Stage::After, direction, state, &known, &mask);
            direction = contiguous(direction);
            diverged = self.reject_matrices(&direction, diverged, first, f64::MAX);
        }

        let steps: Vec<_> = parameters
            .iter()
            .map(|MuonParameter { flag, size, .. }| ParameterStep {
                flag: *flag,
                decay: size.decay,
                lr: size.lr,
                cautious: size.cautious,
            })
            .collect();
        let rejected = rejected.unwrap_or(&diverged);
        let mut values = apply(policy, values, direction, rejected, (&diverged, first), &steps);
        if self.has_parts(Stage::Parameter) {
            let mask = || unchanged(&diverged);
            let batch = joined(&values, [count, m, n]);
            let constrained =
                self.apply_parts(Stage::Parameter, batch.clone(), state, &known, &mask);
            values = split_like(mask().select(constrained, batch), &values);
        }
        let factors = parameters.iter().map(|parameter| parameter.factors.as_ref());
        let values = scaled_by(values, factors);
        if let (Some(observations), Some((old, errors))) = (observations, before) {
            let counts = values.iter().map(|values| values.dims()[0] / (m * n)).collect();
            let errors = errors.split_with_sizes(counts, 0);
            let each = parameters.iter().zip(old).zip(&values).zip(errors);
            each.for_each(|(((parameter, old), new), errors)| {
                observations.add(parameter.flag, old, new, errors.sum());
            });
        }
        let origins = parameters.iter().map(|parameter| parameter.origin);
        let by = (dtype, &*firsts);
        (self.precision.narrow(values, by, origins, count * m * n, state), diverged)
    }
}

/// New values times factors, for the parameters that have any.
pub(super) fn scaled_by<'a>(
    values: Vec<Tensor<1>>,
    factors: impl Iterator<Item = Option<&'a Tensor<1>>>,
) -> Vec<Tensor<1>> {
    let scaled = |(values, factors): (Tensor<1>, Option<&Tensor<1>>)| match factors {
        Some(factors) => values.clone() * factors.clone().cast(values.dtype()),
        None => values,
    };
    values.into_iter().zip(factors).map(scaled).collect()
}

/// The index of each tensor's first element among those of all.
fn starts(tensors: &[Tensor<1>]) -> Vec<usize> {
    let start = |end: &mut usize, tensor: &Tensor<1>| {
        let start = *end;
        *end += tensor.dims()[0];
        Some(start)
    };
    tensors.iter().scan(0, start).collect()
}

/// Flat tensors as one batch, in [`precise_dtype`].
fn joined(tensors: &[Tensor<1>], shape: [usize; 3]) -> Tensor<3> {
    let (dtype, device) = (tensors[0].dtype(), tensors[0].device());
    concat(tensors.to_vec(), dtype, &device).cast(precise_dtype(dtype)).reshape(shape)
}

/// A batch as flat tensors of the lengths of others, the reverse of [`joined`].
fn split_like(batch: Tensor<3>, like: &[Tensor<1>]) -> Vec<Tensor<1>> {
    let flat: Tensor<1> = batch.reshape([-1]);
    match like {
        [_] => vec![flat],
        _ => flat.split_with_sizes(like.iter().map(|tensor| tensor.dims()[0]).collect(), 0),
    }
}

/// One value for every matrix of `elements` elements, `[k, 1, 1]`: those of the parameters with
/// these values, in the type of [`joined`].
fn by_parameter(
    values: &[Tensor<1>],
    elements: usize,
    of_parameters: impl Iterator<Item = f64>,
) -> Tensor<3> {
    let (dtype, device) = (precise_dtype(values[0].dtype()), values[0].device());
    let of_matrices: Vec<f64> = values
        .iter()
        .zip(of_parameters)
        .flat_map(|(values, value)| repeat_n(value, values.dims()[0] / elements))
        .collect();
    let count = of_matrices.len();
    Tensor::from_data(TensorData::new(of_matrices, [count, 1, 1]), (&device, dtype))
}

/// The batch without gaps between its rows, which Burn's products may leave and every reader would
/// copy away separately.
fn contiguous(batch: Tensor<3>) -> Tensor<3> {
    let (shape, elements) = (batch.dims(), batch.shape().num_elements());
    batch.reshape([elements]).reshape(shape)
}
