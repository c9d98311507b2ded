//! QK-clip (MuonClip): bounds the logits of attention by scaling the projections of queries and
//! keys, head by head.
//!
//! A head whose maximum logit `S` was above the threshold `tau` has its projections scaled after
//! the optimizer's step, by `gamma = tau / S` together (Kimi K2, arXiv 2507.20534, section 2.1 and
//! algorithm 1; <https://kexue.fm/archives/11126>):
//!
//! | attention | projection | factor |
//! |---|---|---|
//! | multi-head | query | `gamma^alpha` |
//! | | key | `gamma^(1 - alpha)` |
//! | grouped-query | key | `g^(1 - alpha)` for the least gamma `g` of the heads that share the key |
//! | | query | `gamma / g^(1 - alpha)`, by head |
//! | latent | query and key without positions | as for multi-head |
//! | | rotary part of the query | `gamma` |
//! | | rotary key, shared by all heads, and value | 1 |
//!
//! So the logits of a head are scaled by its own gamma in every kind, and a head below the
//! threshold keeps its logits. In a group of queries, such a head keeps them because its queries
//! grow by what the shared key loses. With an `alpha` of 1, no query grows and shared keys are not
//! scaled. (Megatron-LM scales all heads of a group by the gamma of its largest logit instead.)
//!
//! The clip has no state. Heads are counted over the whole model: [`Factors::of`] has a factor for
//! every output of a projection, from which a rank with a part of the outputs takes that part.
//!
//! The [guide](crate::guide::qk_clip) has a program.

mod attention;
mod config;
mod factors;
mod logits;

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::comm::World;
use crate::error::{Error, Result};
use crate::parameters;
use attention::{Attentions, Projected, Resolved};
pub use config::{LatentHead, QkClipConfig, QkClipRule};
pub use factors::Factors;
pub use logits::{ClippedAttention, ClippedHeads, MaxLogits};

/// QK-clip for one model, from [`QkClipConfig::init`].
#[derive(Debug, Clone)]
pub struct QkClip {
    tau: f64,
    alpha: f64,
    /// The attentions of every rule.
    attentions: Vec<Attentions>,
    /// All parameters of projections, by path.
    parameters: BTreeMap<String, Projected>,
}

impl QkClipConfig {
    /// Finds the attentions of a model.
    ///
    /// # Errors
    ///
    /// - [`Error::Setting`] for a setting that no run can use;
    /// - [`Error::QkClip`] for a rule without attentions in the model, heads that do not make up
    ///   the outputs of a projection, and projections that are frozen or LoRA adapters.
    pub fn init<M: Module>(&self, model: &M) -> Result<QkClip> {
        self.check()?;
        let Resolved { attentions, parameters } = Resolved::new(self, &parameters::lazily(model))?;
        Ok(QkClip { tau: self.tau, alpha: self.alpha, attentions, parameters })
    }
}

impl QkClip {
    /// Returns the paths of the attentions, with the number of heads of queries, in the order of
    /// the rules and of the model.
    pub fn attentions(&self) -> impl Iterator<Item = (&str, usize)> {
        self.attentions.iter().flat_map(|attentions| {
            attentions.paths.iter().map(|path| (path.as_str(), attentions.heads[0]))
        })
    }

    /// Returns the factors for the maximum logits of a step. Waits for nothing.
    ///
    /// # Errors
    ///
    /// [`Error::QkClip`] if an attention has not reported, or has reported for another number of
    /// heads, and for a report of an attention that no rule has found.
    pub fn factors(&self, logits: &MaxLogits) -> Result<Factors<'_>> {
        Ok(Factors::new(self, self.maxima(logits)?))
    }

    /// Returns the factors for the largest of the maximum logits that the ranks report: the same
    /// factors on every rank. All ranks make this call, with the same configuration.
    ///
    /// The maxima of all attentions are one message. A rank receives 4 bytes for every head and
    /// rank.
    ///
    /// # Errors
    ///
    /// As [`factors`](Self::factors), whose errors end the world, and as every collective (see
    /// [`Communicator`](crate::comm::Communicator)).
    pub fn factors_on(&self, world: &World, logits: &MaxLogits) -> Result<Factors<'_>> {
        let maxima = self.maxima(logits);
        // The other ranks wait in the call below, which this one does not reach.
        let maxima = maxima.inspect_err(|error| world.comm().fail(&error.to_string()))?;
        let ([heads], ranks) = (maxima.dims(), world.size());
        // The engines have sums, and no maximum.
        let all = world.comm().all_gather(maxima, &vec![heads; ranks])?.wait()?;
        Ok(Factors::new(self, all.reshape([ranks, heads]).max_dim(0).reshape([heads])))
    }

    /// Scales the projections of the heads that are above the threshold, after the step of any
    /// optimizer on one device. Returns the model and the heads that were clipped.
    ///
    /// # Errors
    ///
    /// As [`factors`](Self::factors) and of [`Factors::apply`].
    pub fn apply<M: Module>(&self, model: M, logits: &MaxLogits) -> Result<(M, ClippedHeads)> {
        let factors = self.factors(logits)?;
        Ok((factors.apply(model)?, factors.clipped_heads()))
    }

    /// Scales the projections like [`apply`](Self::apply), on ranks that have the whole model each,
    /// by the largest of the maximum logits that the ranks report. All ranks make this call.
    ///
    /// # Errors
    ///
    /// As [`factors_on`](Self::factors_on) and of [`Factors::apply`].
    pub fn apply_on<M: Module>(
        &self,
        world: &World,
        model: M,
        logits: &MaxLogits,
    ) -> Result<(M, ClippedHeads)> {
        let factors = self.factors_on(world, logits)?;
        let model = factors.apply(model);
        let model = model.inspect_err(|error| world.comm().fail(&error.to_string()))?;
        Ok((model, factors.clipped_heads()))
    }

    /// The reported maxima of all heads of all attentions.
    fn maxima(&self, logits: &MaxLogits) -> Result<Tensor<1>> {
        let is_known = |path: &&String| self.attentions().any(|(known, _)| known == path.as_str());
        if let Some(unknown) = logits.reports.keys().find(|path| !is_known(path)) {
            return Err(Error::QkClip {
                subject: format!("`{unknown}`"),
                reason: format!(
                    "it reports logits and is not an attention of the rules: expected one like \
                     `{}`, got `{unknown}`",
                    self.attentions().next().map_or("", |(path, _)| path)
                ),
                remedy: "report the path of the attention's module, or add a rule for it",
            });
        }
        let all: Vec<Tensor<1>> = self
            .attentions()
            .map(|(path, heads)| self.maxima_of(path, heads, logits))
            .collect::<Result<_>>()?;
        // Attentions may lie on several devices, and their maxima are one tensor.
        let device = all.first().expect("the rules have found an attention").device();
        let all = all.into_iter().map(|maxima| maxima.to_device(&device));
        Ok(Tensor::cat(all.collect(), 0))
    }

    /// The reported maxima of an attention.
    fn maxima_of(&self, path: &str, heads: usize, logits: &MaxLogits) -> Result<Tensor<1>> {
        let error = |reason: String, remedy| {
            Err(Error::QkClip { subject: format!("`{path}`"), reason, remedy })
        };
        let Some(reports) = logits.reports.get(path) else {
            return error(
                format!("it has not reported: expected {heads} maximum logits, got none"),
                "report negative infinity for heads without a logit",
            );
        };
        match reports.iter().find(|report| report.dims() != [heads]) {
            Some(other) => error(
                format!(
                    "its report is of other heads: expected [{heads}], one maximum for each head \
                     of queries, got {:?}",
                    other.dims()
                ),
                "report the maxima over sequences and positions",
            ),
            None => Ok(logits::largest(reports)),
        }
    }
}

/// The error of a parameter with another shape than in the model that the clip was made for.
fn of_parameter(path: &str, expected: &[usize], shape: &[usize]) -> Error {
    Error::QkClip {
        subject: format!("`{path}`"),
        reason: format!("its shape has changed: expected {expected:?}, got {shape:?}"),
        remedy: "clip the model that `QkClipConfig::init` was given",
    }
}
