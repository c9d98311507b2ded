//! The decisions of a step about every parameter.

use std::collections::HashMap;
use std::ops::Range;

use burn::tensor::Tensor;

use super::divided_model::DividedModel;
use crate::distributed::trainable::TrainableParameter;
use crate::error::{Error, Result};
use crate::flat;
use crate::qk_clip::{ClippedHeads, Factors};
use crate::update::StepSize;

/// The decisions by which the parameters of a shard are updated.
#[derive(Clone, Copy)]
pub struct Decisions<'a> {
    pub controls: &'a StepControls,
    pub inputs: &'a StepInputs,
}

/// The device's decisions of a step.
pub struct StepControls {
    /// 1 for parameters that stay as they are, else 0.
    pub rejected: Tensor<1>,
    /// The bias corrections of AdamW.
    pub corrections: [Tensor<1>; 2],
    /// The factor on all gradients.
    pub factor: Option<Tensor<1>>,
    /// `rejected` on the host, if this rank
    /// [reads](super::bucket_shard::Shard::reads_decisions) the decisions; otherwise empty.
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
    pub fn new(
        lrs: Vec<f64>,
        present: Vec<bool>,
        head_clip: Option<HeadClip>,
        divided: &DividedModel,
    ) -> Self {
        let updates = divided.routing.updates();
        let sizes = divided.trainable.iter().zip(&lrs);
        let sizes = sizes.map(|(parameter, lr)| parameter.size(*lr, updates)).collect();
        Self { sizes, lrs, present, times: divided.times(), head_clip }
    }

    /// The parameters that the step may change: those with a gradient, and those whose heads it
    /// scales.
    pub fn changed(&self) -> Vec<bool> {
        let is_scaled = |index: &usize| {
            self.head_clip.as_ref().is_some_and(|clip| clip.factors.contains_key(index))
        };
        let present = self.present.iter().enumerate();
        present.map(|(index, present)| *present || is_scaled(&index)).collect()
    }

    /// The factors on the new values of elements of a parameter.
    pub fn factors(&self, parameter: usize, elements: &Range<usize>) -> Option<Tensor<1>> {
        let factors = self.head_clip.as_ref()?.factors.get(&parameter)?;
        Some(flat::slice(factors, elements.clone()))
    }
}

/// The attention heads that QK-clip scales in a step.
pub struct HeadClip {
    /// Factors on the new values of some parameters, flat, by the index of the parameter.
    factors: HashMap<usize, Tensor<1>>,
    pub heads: ClippedHeads,
}

impl HeadClip {
    pub fn new(factors: &Factors<'_>, divided: &DividedModel) -> Self {
        let scaled = divided.parameters.iter().filter_map(|parameter| {
            let factors = factors.of_elements(&parameter.path)?.to_device(&divided.device());
            let batches = parameter.blocks.batches();
            let elements: usize = batches.map(|batch| batch.iter().product::<usize>()).sum();
            // Others are an error of the step.
            let blocks = match factors.dims() == [elements] {
                true => parameter.blocks.cut(factors),
                false => vec![factors],
            };
            Some(parameter.trainable.clone().zip(blocks))
        });
        Self { factors: scaled.flatten().collect(), heads: factors.clipped_heads() }
    }

    /// Fails for heads that are not heads of whole parameters.
    pub fn ensure_fits(&self, divided: &DividedModel) -> Result<()> {
        for (index, factors) in &self.factors {
            let TrainableParameter { path, shape, .. } = &divided.trainable[*index];
            let (expected, [got]) = (shape.iter().product::<usize>(), factors.dims());
            if expected != got {
                return Err(Error::parameter(
                    path,
                    divided.world.rank(),
                    format!("its heads have other shapes: expected {expected} elements, got {got}"),
                    "make the `QkClip` with the whole model, before `Layout::shard`",
                ));
            }
        }
        Ok(())
    }
}
