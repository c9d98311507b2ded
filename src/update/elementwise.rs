//! The update of several parameters element by element, for everything that is not a hidden matrix.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::StateSource;
use burn::tensor::{DType, Device, Tensor};

use super::UpdateTensors;
use super::ledger::{Ledger, UpdatedBy};
use super::momentum::MOMENTUM;
use super::muon::scaled_by;
use super::precision::{InState, Precision};
use super::rounding::Origin;
use super::state::{Extent, MANTISSA, MASTER, Slot, SlotDtype, Slots};
use super::step_norms::Observations;
use super::step_size::StepSize;
use crate::backend::{
    AdamWControls, AdamWStep, ElementwiseRows, FiniteMask, KernelPolicy, LionStep, Moments, Values,
    corrected, lion,
};
use crate::checks::ensure_size;
use crate::error::Result;

/// The settings of the update that all parameters have in common.
#[derive(Clone, Debug)]
pub(crate) struct ElementwiseUpdate {
    pub rule: ElementwiseRule,
    pub weight_decay: f64,
    pub roles: Roles,
    pub precision: Precision,
    pub policy: KernelPolicy,
    pub clipping: Option<GradientClippingConfig>,
    pub ledger: Ledger,
}

/// A parameter in a step.
pub(crate) struct ElementwiseParameter<'a> {
    pub rows: ElementwiseRows,
    pub origin: Origin<'a>,
    /// Factors on its new values, flat.
    pub factors: Option<Tensor<1>>,
}

/// The settings of a role: factors on the learning rate of a step and on the weight decay, and the
/// decays of AdamW's moments in place of the common ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RoleSettings {
    pub lr: f64,
    pub decay: f64,
    pub betas: Option<[f64; 2]>,
}

/// The settings of the roles that have some.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Roles {
    pub embedding: RoleSettings,
    pub head: RoleSettings,
    pub vector: RoleSettings,
}

/// The rule of the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ElementwiseRule {
    AdamW(AdamWStep),
    Lion(LionStep),
}

/// Names of AdamW's state in records. Only AMSGrad has the last.
pub(crate) const MOMENTS: [&str; 3] = ["moment_1", "moment_2", "max_moment_2"];

/// The name, in records, of the state of a block that is updated element by element.
pub(crate) const ELEMENTS: &str = "elements";

/// The slots of AdamW's bias corrections: the sums of the weights in both moments of a parameter.
pub(crate) const CORRECTIONS: [Slot; 2] = [
    Slot { name: "correction_1", extent: Extent::Parameter, dtype: SlotDtype::Precise },
    Slot { name: "correction_2", extent: Extent::Parameter, dtype: SlotDtype::Precise },
];

/// The names of all slots that a parameter may have. A record does not know the configuration, and
/// is read by these.
pub(crate) const ELEMENTWISE_SLOTS: [&str; 8] = [
    MOMENTS[0],
    MOMENTS[1],
    MOMENTS[2],
    CORRECTIONS[0].name,
    CORRECTIONS[1].name,
    MOMENTUM,
    MASTER,
    MANTISSA,
];

/// Names in states of Burn's `AdamW` and `Adam`, whose moments this crate also has: of both
/// moments, of the number of steps, and of AMSGrad's largest moments, which this crate's AdamW does
/// not have.
pub(crate) const BURNS_MOMENTS: [&str; 2] = ["momentum.moment_1", "momentum.moment_2"];
pub(crate) const BURNS_TIME: &str = "momentum.time";
const BURNS_LARGEST: &str = "momentum.max_moment_2";

/// The name in a state of Burn's AdamW of a slot.
pub(crate) fn of_burns(slot: &str) -> Option<&'static str> {
    MOMENTS.iter().zip(BURNS_MOMENTS).find_map(|(name, burns)| (*name == slot).then_some(burns))
}

/// The slot that has the values of a name in a state of Burn's AdamW.
pub(crate) fn from_burns(name: &str) -> Option<&'static str> {
    BURNS_MOMENTS.iter().zip(MOMENTS).find_map(|(burns, slot)| (*burns == name).then_some(slot))
}

/// Reads the moments of Burn's AdamW from a record, with the number of steps. `None` if there
/// are none, or AMSGrad's in addition.
pub(crate) fn unflatten_burns(
    prefix: &str,
    source: &mut StateSource,
    device: &Device,
) -> Option<(Slots, usize)> {
    let time = source.take_scalar(prefix, BURNS_TIME)?.try_into().ok()?;
    // A state of Burn's AMSGrad is refused: without its third moment the run would change in
    // silence.
    if source.take_tensor(prefix, BURNS_LARGEST).is_some() {
        return None;
    }
    let names = MOMENTS.iter().copied().zip(BURNS_MOMENTS);
    let mut slots = Slots::unflatten_as(names, prefix, source, device)?;
    // Burn has none; files of other code bases come with these names and have some.
    slots.append(Slots::unflatten(&[], &[MASTER], prefix, source, device)?);
    Some((slots, time))
}

impl RoleSettings {
    /// The common settings.
    pub const COMMON: Self = Self { lr: 1.0, decay: 1.0, betas: None };
}

impl Roles {
    /// Fails for factors that no run can use.
    pub fn check(&self) -> Result<()> {
        let Self { embedding, head, vector } = self;
        ensure_size("embedding_lr", embedding.lr)?;
        ensure_size("head_lr", head.lr)?;
        ensure_size("vector_lr", vector.lr)?;
        ensure_size("embedding_decay", embedding.decay)?;
        ensure_size("head_decay", head.decay)?;
        ensure_size("vector_decay", vector.decay)
    }
}

impl ElementwiseRule {
    /// The rule's name, as the literature has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AdamW(_) => "AdamW",
            Self::Lion(_) => "Lion",
        }
    }

    /// The decays of both averages.
    pub fn betas(self) -> [f64; 2] {
        match self {
            Self::AdamW(AdamWStep { beta_1, beta_2, .. })
            | Self::Lion(LionStep { beta_1, beta_2 }) => [beta_1, beta_2],
        }
    }

    /// The optimizer, as a ledger names it.
    fn updates(self) -> UpdatedBy {
        match self {
            Self::AdamW(_) => UpdatedBy::AdamW,
            Self::Lion(_) => UpdatedBy::Lion,
        }
    }

    /// The names of the slots of elements.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::AdamW(AdamWStep { amsgrad: true, .. }) => &MOMENTS,
            Self::AdamW(_) => &MOMENTS[..2],
            Self::Lion(_) => &[MOMENTUM],
        }
    }

    /// The bias corrections after a number of steps.
    pub fn corrections_after(self, steps: usize) -> [f64; 2] {
        let betas = self.correction_betas();
        betas.map_or([0.0; 2], |betas| betas.map(|beta| 1.0 - beta.powf(steps as f64)))
    }

    /// The decays by which bias corrections advance, if there are any.
    pub fn correction_betas(self) -> Option<[f64; 2]> {
        match self {
            Self::AdamW(AdamWStep { beta_1, beta_2, .. }) => Some([beta_1, beta_2]),
            Self::Lion(_) => None,
        }
    }

    /// The slots of bias corrections.
    pub fn corrections(self) -> &'static [Slot] {
        match self {
            Self::AdamW(_) => &CORRECTIONS,
            Self::Lion(_) => &[],
        }
    }
}

impl ElementwiseUpdate {
    /// The batch that corresponds to a parameter of a shape: one row.
    pub fn batch(shape: &[usize]) -> [usize; 3] {
        [1, 1, shape.iter().product()]
    }

    /// The slots of elements, for parameters of a type.
    pub fn slots(&self, parameter: DType) -> Vec<Slot> {
        let dtype = self.precision.states.slot();
        let names = self.rule.names().iter();
        let slots = names.map(|name| Slot { name, extent: Extent::Element, dtype });
        slots.chain(self.precision.slots(parameter)).collect()
    }

    /// The update of a role's parameters.
    pub fn of_role(self, role: RoleSettings) -> Self {
        let rule = match (self.rule, role.betas) {
            (ElementwiseRule::AdamW(step), Some([beta_1, beta_2])) => {
                ElementwiseRule::AdamW(AdamWStep { beta_1, beta_2, ..step })
            }
            (rule, _) => rule,
        };
        Self { rule, ..self }
    }

    /// The size of a step, with the factors of a role.
    pub fn size(&self, lr: f64, role: RoleSettings) -> StepSize {
        StepSize::decoupled(lr * role.lr, self.weight_decay * role.decay)
    }

    /// The largest usable gradient of parameters of a type.
    pub fn largest_gradient(&self, parameter: DType) -> f64 {
        match (self.rule, parameter) {
            // Lion takes signs, and squares nothing.
            (ElementwiseRule::Lion(_), _) => f64::MAX,
            (ElementwiseRule::AdamW(_), DType::F64) => f64::MAX.sqrt(),
            // The second moment holds its square. A little below the root, whose square rounds to
            // infinity.
            (ElementwiseRule::AdamW(_), _) => f64::from(f32::MAX).sqrt() * (1.0 - 1e-6),
        }
    }

    /// The bias corrections after a step, for the rows of a mask.
    pub fn correct(&self, corrections: [Tensor<1>; 2], mask: &FiniteMask) -> [Tensor<1>; 2] {
        match self.rule.correction_betas() {
            Some(betas) => corrected(corrections, betas, mask),
            None => corrections,
        }
    }

    /// One step of several parameters: their new values. Advances their `state`, which has
    /// `elements` elements. Lion does not read the corrections. Adds the norms of the step to
    /// `observations`, if there are any.
    pub fn step(
        &self,
        UpdateTensors { values, gradients }: UpdateTensors,
        state: &mut Slots,
        elements: usize,
        controls: &AdamWControls<'_>,
        parameters: &[ElementwiseParameter<'_>],
        observations: Option<&mut Observations>,
    ) -> Vec<Tensor<1>> {
        let Some(dtype) = values.first().map(Tensor::dtype) else {
            // A rank's part of a small bucket may be zeros after its parameters.
            return values;
        };
        let rows: Vec<_> = parameters.iter().map(|parameter| parameter.rows).collect();
        let firsts: Vec<usize> = rows.iter().map(|row| row.first).collect();
        let values = self.precision.widen(values, &firsts, state);
        let old = observations.is_some().then(|| values.clone().into_each());
        let stored = self.precision.states.slot().resolve(dtype);
        let updated = self.updated(values, gradients, state, stored, controls, &rows);
        let factors = parameters.iter().map(|parameter| parameter.factors.as_ref());
        let updated = scaled_by(updated, factors);
        if let (Some(observations), Some(old)) = (observations, old) {
            let none = || Tensor::zeros([1], (&updated.device(), DType::F32));
            let each = rows.iter().zip(old).zip(updated.clone().into_each());
            each.for_each(|((row, old), new)| observations.add(row.flag, old, &new, none()));
        }
        if let Some(entries) = &mut *self.ledger.entries() {
            let names = parameters.iter().map(|parameter| parameter.origin.parameter);
            names.for_each(|name| entries.add(name, self.rule.updates()));
        }
        // Random rounding depends on the place in the parameter, and not on the rank.
        let origins = parameters.iter().map(|parameter| parameter.origin);
        let stored = InState { dtype, firsts: &firsts, elements };
        self.precision.narrow(updated, stored, origins, state)
    }

    /// The values by the rule, in their type. Advances the states, of the type `stored`.
    fn updated(
        &self,
        values: Values,
        gradients: Vec<Tensor<1>>,
        state: &mut Slots,
        stored: DType,
        controls: &AdamWControls<'_>,
        rows: &[ElementwiseRows],
    ) -> Values {
        // The type after widening, in which everything is computed.
        let precise = values.dtype();
        // Moments that are stored as bfloat16 advance in float32.
        let take = |state: &mut Slots, name| state.take(name).cast(precise);
        match self.rule {
            ElementwiseRule::AdamW(step) => {
                let moments = Moments {
                    moment_1: take(state, MOMENTS[0]),
                    moment_2: take(state, MOMENTS[1]),
                    max_moment_2: step.amsgrad.then(|| take(state, MOMENTS[2])),
                };
                let (updated, moments) =
                    step.run(self.policy, values, gradients, moments, controls, rows);
                state.put(MOMENTS[0], moments.moment_1.cast(stored));
                state.put(MOMENTS[1], moments.moment_2.cast(stored));
                if let Some(largest) = moments.max_moment_2 {
                    state.put(MOMENTS[2], largest.cast(stored));
                }
                updated
            }
            ElementwiseRule::Lion(step) => {
                let momentum = take(state, MOMENTUM);
                let AdamWControls { rejected, factor, .. } = *controls;
                let gradients = gradients.into_iter().map(|gradient| gradient.cast(precise));
                let (values, gradients) = (values.into_each(), gradients.collect());
                let (updated, momentum) =
                    lion(step, values, gradients, momentum, rejected, factor, rows);
                state.put(MOMENTUM, momentum.cast(stored));
                Values::Each(updated)
            }
        }
    }
}
