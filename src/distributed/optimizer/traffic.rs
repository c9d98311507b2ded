//! The messages of a step: gradients travel to their owners, and new values back.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::bucket_shard::Shard;
use super::detached_parameters::{FlatTensors, pack};
use super::divided_model::DividedModel;
use super::publication::Publication;
use super::stages::{Stage, stages};
use crate::backend::precise_dtype;
use crate::comm::{Pending, PendingParts, ReduceOp, World};
use crate::distributed::config::{DistMuonConfig, GradDtype, Gradients, Publish};
use crate::distributed::plan::{Bucket, BucketKind, Plan};
use crate::error::{Error, Result};
use crate::flat::{self, bytes};
use crate::update::is_half;

/// The messages of a step: which there are, in which order and types, and how many at once.
pub struct Traffic {
    gradients: Gradients,
    grad_dtype: GradDtype,
    pub publish: Publish,
    /// The number of buckets that are reduced at once, and that are gathered at once.
    pub in_flight: usize,
    /// In the order in which they are taken.
    pub stages: Vec<Stage>,
    /// Parameters of the last step that may be on their way.
    pub publication: Arc<Publication>,
}

impl Traffic {
    /// The messages of a configuration, of which no update waits for all gradients unless
    /// `waits_for_all`.
    pub fn new(config: &DistMuonConfig, plan: &Plan, waits_for_all: bool) -> Self {
        Self {
            gradients: config.gradients,
            grad_dtype: config.grad_dtype,
            publish: config.publish,
            in_flight: config.in_flight,
            stages: stages(plan, waits_for_all),
            publication: Arc::default(),
        }
    }

    /// Returns `true` if gradients are reduced at all.
    pub fn reduces(&self, world: &World) -> bool {
        world.size() > 1 && self.gradients == Gradients::PerRank
    }

    /// Fails if the gradients of each rank's data would never be averaged.
    pub fn ensure_averages(&self, world: &World) -> Result<()> {
        if world.size() == 1 || self.reduces(world) {
            return Ok(());
        }
        Err(Error::usage(
            "the gradients of a backward pass are from one rank's data",
            "gradients that are averaged over the ranks, by `Gradients::Averaged`",
            "a backward pass of the optimizer",
            "configure `Gradients::PerRank`, or pass averaged gradients to the step",
        ))
    }

    /// Returns `true` if gradients of parameters in half precision may be float32.
    pub fn takes_wide_gradients(&self, world: &World) -> bool {
        !self.reduces(world) || self.grad_dtype == GradDtype::Float32
    }

    /// Returns `true` if the owners of a bucket's parameters decide on them alone.
    pub fn is_alone(&self, bucket: usize) -> bool {
        self.stages.iter().any(|stage| !stage.exchanges && stage.buckets.contains(&bucket))
    }

    /// Starts to reduce the gradients of a bucket, which are taken out of `gradients`. The result
    /// is this rank's gradients: of every parameter of its shard, or of its share of slices in one
    /// tensor.
    pub fn start_reduction(
        &self,
        divided: &DividedModel,
        shard: &Shard,
        gradients: &mut FlatTensors,
    ) -> Result<PendingParts> {
        let (bucket, group) = (&shard.exchange.held, &shard.exchange.group);
        // Nothing to send, but the same way as for all: one rank and many run one code.
        if !self.reduces(&divided.world) || bucket.placement.reduces_in_backward() {
            let local = match shard.exchange.is_cut() {
                // Wide: gradients that a backward pass has reduced are float32, and averaged ones
                // may be.
                true => vec![shard.pack_share(gradients, precise_dtype(bucket.dtype))],
                false => shard.take(gradients),
            };
            // The rest belongs to shards of other ranks.
            drop_all(bucket, gradients);
            let held = local.iter().map(bytes).sum();
            return Ok(Pending::new(held, move || Ok(in_one_type(local))));
        }
        let dtype = sent_dtype(self.grad_dtype, bucket);
        let packed = pack(gradients, bucket, 0..bucket.elements(), dtype, &divided.device());
        // Before it is sent, since a rank must fail and not send what was never computed.
        divided.ensure_bucket_computed(bucket, &packed)?;
        // Packed: a copy of every gradient is in the buffer, and the originals would double it.
        drop_all(bucket, gradients);
        let sum = match bucket.kind {
            // Small parameters: every rank updates all of them, which is faster than a second
            // message.
            BucketKind::Replicated => group.all_reduce(packed, ReduceOp::Sum)?,
            BucketKind::Matrices | BucketKind::Whole | BucketKind::Elements => {
                // The sum is float32 whatever was sent, so that half precision rounds once for each
                // rank and not once for each addition.
                group.reduce_scatter_f32(packed, &bucket.counts.to_vec())?
            }
        };
        let (ranks, parts) = (group.size() as f64, shard.parts());
        Ok(Pending::new(sum.bytes(), move || {
            // Once, after the sum: a division before it would lose digits in half precision. A rank
            // may have no part of the sum.
            let mean = flat::mapped(sum.wait()?, |sum| sum.div_scalar(ranks));
            Ok(match parts {
                Some(parts) => parts.into_iter().map(|part| flat::slice(&mean, part)).collect(),
                None => vec![mean],
            })
        }))
    }
}

/// The type in which the gradients of a bucket are sent.
pub fn sent_dtype(grad_dtype: GradDtype, bucket: &Bucket) -> DType {
    match (grad_dtype, bucket.kind) {
        // Every rank keeps all of it: sent as it is used.
        (_, BucketKind::Replicated) | (GradDtype::Float32, _) => precise_dtype(bucket.dtype),
        (GradDtype::Parameter, _) => bucket.dtype,
    }
}

/// Drops what is left of the tensors of a bucket's parameters.
pub fn drop_all(bucket: &Bucket, tensors: &mut FlatTensors) {
    bucket.parameters.iter().for_each(|index| tensors.drop_all(*index));
}

/// Gradients in one type, without a loss: parameters in half precision may have some in float32.
fn in_one_type(gradients: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    let is_wide = |gradient: &Tensor<1>| !is_half(gradient.dtype());
    match gradients.iter().find(|gradient| is_wide(gradient)).map(Tensor::dtype) {
        // A batch has one type: narrowing would lose digits, widening does not.
        Some(wide) => gradients.into_iter().map(|gradient| gradient.cast(wide)).collect(),
        None => gradients,
    }
}
