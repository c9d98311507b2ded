//! The factor on all gradients: of clipping by their norm, and of the scale of the loss.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};

use super::bucket_shard::Shard;
use super::buckets_in_flight::ReducedShard;
use super::divided_model::DividedModel;
use super::global_clipping::{Clip, counts};
use super::loss_scale::LossScale;
use crate::backend::{FiniteMask, ScaledNorms};
use crate::distributed::config::DistMuonConfig;
use crate::error::Result;
use crate::flat;

/// The settings by which an update depends on all gradients: `max_norm` and loss scaling.
pub struct GradientScaling {
    clip: Option<Clip>,
    pub loss_scale: Option<LossScale>,
}

impl GradientScaling {
    pub fn new(config: &DistMuonConfig, divided: &DividedModel) -> Self {
        let (rank, device) = (divided.world.rank(), divided.device());
        let clip = |max_norm| Clip::new(max_norm, &divided.plan, rank, &device);
        let loss_scale = config.loss_scale.clone().map(LossScale::new);
        Self { clip: config.max_norm.map(clip), loss_scale }
    }

    /// Returns `true` if every update depends on all gradients.
    pub fn waits_for_all(&self) -> bool {
        self.clips() || self.loss_scale.is_some()
    }

    /// Returns `true` if the norms of gradients are needed.
    pub fn clips(&self) -> bool {
        self.clip.is_some()
    }

    /// The scale of the loss.
    pub fn scale(&self) -> f64 {
        self.loss_scale.as_ref().map_or(1.0, |loss_scale| loss_scale.scale)
    }

    /// Returns `true` if a gradient overflowed under loss scaling, given the number of ranks that
    /// reject the gradient of each parameter, which other values may follow. The host reads it,
    /// which has to know the scale of the next loss.
    pub fn overflows(&self, rejected: &Tensor<1>, parameters: usize) -> bool {
        let largest = || flat::slice(rejected, 0..parameters).max().into_scalar::<f32>();
        self.loss_scale.is_some() && largest() > 0.0
    }

    /// Adapts the scale of the loss after a step.
    pub fn advance(&mut self, overflowed: bool) {
        self.loss_scale.iter_mut().for_each(|loss_scale| loss_scale.advance(overflowed));
    }

    /// The factor on all gradients, where they are clipped or have the scale of the loss. All
    /// buckets are reduced by now.
    pub fn factor(
        &self,
        divided: &DividedModel,
        shards: &[Shard],
        reduced: &BTreeMap<usize, ReducedShard>,
        rejected: &Tensor<1>,
    ) -> Result<Option<Tensor<1>>> {
        let clipped = match &self.clip {
            Some(clip) => {
                let norms = accepted_norms(clip, divided.world.rank(), shards, reduced, rejected);
                Some(clip.factor(&divided.world, norms, self.scale())?)
            }
            None => None,
        };
        if self.loss_scale.is_none() {
            return Ok(clipped);
        }
        let ones = || Tensor::ones([1], (&divided.device(), DType::F32));
        // One factor for both: a gradient is multiplied once, and half precision rounds once.
        Ok(Some(clipped.unwrap_or_else(ones).div_scalar(self.scale())))
    }
}

/// The norms of the rows of reduced gradients that this rank counts, 0 where they are rejected.
fn accepted_norms(
    clip: &Clip,
    rank: usize,
    shards: &[Shard],
    reduced: &BTreeMap<usize, ReducedShard>,
    rejected: &Tensor<1>,
) -> Vec<ScaledNorms> {
    let rejected = clip.broadcast_rows(rejected);
    let (mut norms, mut first) = (vec![], 0);
    for (shard, reduced) in shards.iter().zip(reduced.values()) {
        // The rows of a bucket that others count still have their place: `first` advances over
        // them.
        let counts = counts(&shard.bucket, rank);
        for ScaledNorms { scale, squares } in &reduced.norms {
            let rows = first..first + scale.dims()[0];
            first = rows.end;
            let mask = FiniteMask::from_rows(flat::slice(&rejected, rows));
            let accepted = |values: &Tensor<1>| mask.zero_rejected(values.clone());
            let accepted = || ScaledNorms { scale: accepted(scale), squares: accepted(squares) };
            norms.extend(counts.then(accepted));
        }
    }
    norms
}
