//! The decisions of a step about every parameter.

use std::ops::Range;

use burn::tensor::Tensor;

use super::HeadClip;
use crate::slices;
use crate::update::StepSize;

/// The device's decisions of a step.
pub struct StepControls {
    /// 1 for parameters that stay as they are, else 0.
    pub rejected: Tensor<1>,
    /// The bias corrections of AdamW.
    pub corrections: [Tensor<1>; 2],
    /// The factor on all gradients.
    pub factor: Option<Tensor<1>>,
    /// `rejected` on the host, if this rank owns whole parameters
    /// ([`Shard::owns_whole`](super::shard::Shard::owns_whole)) among those that are updated.
    pub read: Vec<bool>,
}

/// The host's decisions of a step, for every parameter.
pub struct StepInputs {
    pub sizes: Vec<StepSize>,
    /// Learning rates, before the factors of roles and shapes.
    pub lrs: Vec<f64>,
    /// `true` for parameters that have a gradient on any rank.
    pub present: Vec<bool>,
    /// Steps that each parameter has taken part in.
    pub times: Vec<usize>,
    pub head_clip: Option<HeadClip>,
}

impl StepInputs {
    /// The factors on the new values of elements of a parameter.
    pub fn factors(&self, parameter: usize, elements: &Range<usize>) -> Option<Tensor<1>> {
        let factors = self.head_clip.as_ref()?.factors.get(&parameter)?;
        Some(slices::slice(factors, elements.clone()))
    }
}
