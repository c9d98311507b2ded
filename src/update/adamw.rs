//! The AdamW update of several parameters, for everything that is not a hidden matrix.

use burn::grad_clipping::GradientClippingConfig;
use burn::tensor::{DType, Tensor};

use super::state::{Extent, SKIPPED, Slot, SlotDtype, Slots};
use super::step_size::StepSize;
use crate::backend::{AdamWControls, AdamWRows, AdamWStep, FiniteMask, KernelPolicy, Moments};

/// Learning rates by role, relative to that of the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoleLr {
    pub embedding: f64,
    pub head: f64,
    pub vector: f64,
}

/// The settings of AdamW that all parameters have in common.
#[derive(Clone, Debug)]
pub(crate) struct AdamWUpdate {
    pub step: AdamWStep,
    pub weight_decay: f64,
    pub role_lr: RoleLr,
    pub policy: KernelPolicy,
    pub clipping: Option<GradientClippingConfig>,
}

/// Names of the state in records.
const MOMENTS: [&str; 2] = ["moment_1", "moment_2"];
const CORRECTIONS: [&str; 2] = ["correction_1", "correction_2"];

impl AdamWUpdate {
    /// The slots of elements.
    pub const SLOTS: [Slot; 2] = [
        Slot { name: MOMENTS[0], extent: Extent::Element, dtype: SlotDtype::Precise },
        Slot { name: MOMENTS[1], extent: Extent::Element, dtype: SlotDtype::Precise },
    ];

    /// The slots of whole parameters: the sums of the weights in both moments.
    pub const CORRECTIONS: [Slot; 2] = [
        Slot { name: CORRECTIONS[0], extent: Extent::Parameter, dtype: SlotDtype::Precise },
        Slot { name: CORRECTIONS[1], extent: Extent::Parameter, dtype: SlotDtype::Precise },
    ];

    /// All slots of a parameter, in the order of records.
    pub const STATE: [Slot; 5] =
        [Self::SLOTS[0], Self::SLOTS[1], Self::CORRECTIONS[0], Self::CORRECTIONS[1], SKIPPED];

    /// The batch that corresponds to a parameter of a shape: one row.
    pub fn batch(shape: &[usize]) -> [usize; 3] {
        [1, 1, shape.iter().product()]
    }

    /// The size of a step, at `role` times a learning rate.
    pub fn size(&self, lr: f64, role: f64) -> StepSize {
        StepSize::decoupled(lr * role, self.weight_decay)
    }

    /// The largest gradient of parameters of a type whose square the second moment can hold.
    pub fn largest_gradient(parameter: DType) -> f64 {
        match parameter {
            DType::F64 => f64::MAX.sqrt(),
            // A little below the root, whose square rounds to infinity.
            _ => f64::from(f32::MAX).sqrt() * (1.0 - 1e-6),
        }
    }

    /// The bias corrections after a step, for the rows of a mask.
    pub fn correct(&self, corrections: [Tensor<1>; 2], mask: &FiniteMask) -> [Tensor<1>; 2] {
        let [first, second] = corrections;
        [(first, self.step.beta_1), (second, self.step.beta_2)].map(|(old, beta)| {
            mask.select(old.clone().mul_scalar(beta).add_scalar(1.0 - beta), old)
        })
    }

    /// One step of several parameters: their new values. Advances their moments in `state`.
    pub fn step(
        &self,
        values: Vec<Tensor<1>>,
        gradients: Vec<Tensor<1>>,
        state: &mut Slots,
        controls: &AdamWControls<'_>,
        rows: &[AdamWRows],
    ) -> Vec<Tensor<1>> {
        let [moment_1, moment_2] = MOMENTS.map(|name| state.take(name));
        let moments = Moments { moment_1, moment_2 };
        let (updated, moments) =
            self.step.run(self.policy, values, gradients, moments, controls, rows);
        state.put(MOMENTS[0], moments.moment_1);
        state.put(MOMENTS[1], moments.moment_2);
        updated
    }
}
