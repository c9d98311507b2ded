//! A step, stage by stage.
//!
//! 1. The ranks exchange which parameters have a gradient, and verify that they take the same step,
//!    and now and then that they hold the same.
//! 2. Bucket by bucket, gradients are packed, moved out of the model and reduced: each rank gets
//!    its shard. It decides which parameters stay as they are, updates the others, and the ranks
//!    gather the new values. The next buckets are reduced and the last ones gathered meanwhile.
//! 3. Parameters that lie on several ranks come last: the ranks exchange which of them stay as they
//!    are.
//!
//! Clipping and loss scaling make every update depend on all gradients: all buckets are then
//! reduced before the first update.
//!
//! With [`Publish::AtFirstUse`], the new values are gathered once all buckets are updated, in the
//! order in which the next forward pass uses them.
//!
//! `buckets_in_flight.rs` moves the buckets. Here is what is done once for all of them.
//!
//! A world of one runs the same stages, as do ranks with averaged gradients: the former packs,
//! sends and gathers nothing, the latter reduce nothing.

use std::collections::{BTreeMap, VecDeque};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::DistModuleOptimizer;
use super::agree_on_step::StepCalls;
use super::buckets_in_flight::StepInProgress;
use super::decisions::{StepControls, StepInputs};
use super::detached_parameters::{DetachedParameters, Expected, Parts};
use super::divided_model::DividedModel;
use super::drift::{ensure_same, held_in_common};
use super::gradient_scaling::GradientScaling;
use super::stages::Stage;
use super::step_counts::Accounts;
use super::traffic::Traffic;
use crate::backend::{Acceptance, FiniteMask, accept};
use crate::comm::ReduceOp;
use crate::distributed::config::Publish;
use crate::distributed::layout::Publishing;
use crate::error::Result;
use crate::flat;
use crate::update::Observations;

impl DistModuleOptimizer {
    pub(super) fn stage_by_stage<M: Module>(
        &mut self,
        lr: &ModuleLearningRate,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let world = self.divided.world.clone();
        self.divided.passes.begin_step(world.rank())?;
        let step = self.checks.step.begin(&self.divided.times());
        // No step is a multiple of 0, which is for no check.
        let is_checked = step.is_multiple_of(self.checks.check_every) && world.size() > 1;
        // Before the parameters leave the model: the checksums are of the values between two steps.
        // They are only compared once the ranks know that they take the same step.
        let common = is_checked
            .then(|| held_in_common(&model, &self.divided, &self.shards, &self.accounts.counters));
        let (model, mut detached) = self.detach(model, gradients)?;
        let inputs = self.agree_on_inputs(lr, &detached)?;
        detached.take_values(&inputs.changed(), &self.divided.parameters);
        // After the agreement: a rank that takes another step gets that error, which says more than
        // other bits do.
        common.map_or(Ok(()), |common| ensure_same(&common, &world))?;
        self.accounts.count_absent(&inputs.present, &self.divided)?;

        self.accounting.begin(&self.divided);
        let audit = self.checks.audits.begin(step, &self.divided, &self.shards);
        let Self { divided, shards, traffic, accounts, scaling, memory, .. } = self;
        let clips = scaling.clips();
        // The parts of the optimizer are borrowed one by one: what a step reads and what it changes
        // are then separate to the compiler.
        let mut step =
            StepInProgress::new(divided, traffic, shards, memory, inputs, detached, clips);
        step.audit = audit;
        step.flags.set_zeros(accounts.zeros.take());
        step.observations = self.observing.requested.then(Observations::default);
        step.observe();
        let is_taken = take_stages(&mut step, &traffic.stages, accounts, scaling)?;
        let StepInProgress { inputs, mut detached, between, observations, .. } = step;
        let next = self.checks.step.end(is_taken);
        self.checks.audits.end(next, shards);
        // A step that loss scaling skips is not a step of the schedules, and has no norms.
        if is_taken {
            self.accounting.end(&inputs.present, divided)?;
            divided.advance(&inputs.present);
            if let Some(observations) = observations {
                self.observing.keep(observations, &inputs, divided);
            }
        }
        // Also after a skipped step, which is what is counted. The counts are the same on all
        // ranks, so all of them fail here or none does.
        let (skipped, logs) = (accounts.counters.skipped.clone(), divided.world.is_main());
        accounts.skipped.record(&mut accounts.place, skipped, &divided.times(), logs)?;
        let parts = publish_parts(&mut detached, divided, traffic)?;
        // Every call has landed.
        memory.observe(&detached, between.bytes, 0);
        let DividedModel { parameters, passes, .. } = &*divided;
        Ok(detached.reattach(model, parameters, passes, parts, &traffic.publication))
    }

    /// Detaches the parameters and their gradients from the model.
    fn detach<M: Module>(
        &mut self,
        model: M,
        gradients: GradientsParams,
    ) -> Result<(M, DetachedParameters)> {
        let Self { divided, traffic, .. } = self;
        let expected = Expected {
            rank: divided.world.rank(),
            device: &divided.device(),
            // Where nothing is sent in the type of the parameter, float32 costs no message and
            // loses nothing.
            wide_gradients: traffic.takes_wide_gradients(&divided.world),
            at_first_use: traffic.publish == Publish::AtFirstUse,
        };
        let DividedModel { parameters, passes, .. } = &*divided;
        let (model, detached) =
            DetachedParameters::detach(model, gradients, parameters, passes, expected)?;
        // All of its parameters have been taken into this step.
        std::mem::take(&mut traffic.publication).finish()?;
        // A load or a map may have given the parameters other identities, by which the learning
        // rates of the next lines are looked up.
        for (parameter, id) in divided.parameters.iter_mut().zip(&detached.ids) {
            parameter.id = *id;
        }
        Ok((model, detached))
    }

    /// The host's decisions about every parameter, if all ranks take the same step.
    fn agree_on_inputs(
        &mut self,
        lr: &ModuleLearningRate,
        detached: &DetachedParameters,
    ) -> Result<StepInputs> {
        let Self { divided, traffic, head_clip, .. } = self;
        let lrs = divided.learning_rates(lr)?;
        // Before the first message: this fails on all ranks alike, since all have the same factors.
        head_clip.as_ref().map_or(Ok(()), |clip| clip.ensure_fits(divided))?;
        if traffic.reduces(&divided.world) {
            // Averaged gradients are the same everywhere by definition, and there is nothing to be
            // found.
            self.checks.gradients.compare(&detached.gradients, divided)?;
        }
        let calls = [self.observing.requested, self.accounting.requested, head_clip.is_some()];
        let calls = StepCalls::new(&lrs, &divided.times(), calls, self.running);
        let present = calls.agree(&detached.gradients, divided)?;
        // The heads of a step that is skipped are of no use in another.
        Ok(StepInputs::new(lrs, present, head_clip.take(), divided))
    }
}

/// Takes the stages, one after the other. Returns `false` for a step that is skipped, since a
/// gradient overflowed under loss scaling.
fn take_stages(
    step: &mut StepInProgress<'_>,
    stages: &[Stage],
    accounts: &mut Accounts,
    scaling: &mut GradientScaling,
) -> Result<bool> {
    for stage in stages {
        for bucket in &stage.buckets {
            step.ensure_reduced(*bucket)?;
        }
        let Some(controls) = decide(stage, step, accounts, scaling)? else { return Ok(false) };
        // Values of the buckets ahead, for as many as may be in flight: where the ranks decide
        // together, none may start before the decision, which is behind us here.
        let mut next = 0;
        for (index, bucket) in stage.buckets.iter().enumerate() {
            let ahead = stage.buckets.len().min(index + step.in_flight());
            while stage.exchanges && next < ahead {
                step.start_value_assembly(stage.buckets[next])?;
                next += 1;
            }
            step.update(*bucket, &controls, &mut accounts.diverged)?;
        }
    }
    // All gathered values are in place before the parameters are published or reattached.
    step.land_all()?;
    step.publish_in_order()?;
    // Last, since the question waits until all work is submitted to the device.
    step.ensure_local_computed()?;
    Ok(true)
}

/// Decides on the parameters of a stage. `None` if all of them stay as they are, since a gradient
/// overflowed under loss scaling.
fn decide(
    stage: &Stage,
    step: &mut StepInProgress<'_>,
    accounts: &mut Accounts,
    scaling: &mut GradientScaling,
) -> Result<Option<StepControls>> {
    let (rejected, factor) = if stage.exchanges {
        let Some(rejected) = agree_on_rejected(step, accounts, scaling)? else {
            // The scale falls before the next loss is computed, and the step ends here.
            scaling.advance(true);
            return Ok(None);
        };
        // With the scale that the gradients have: it changes only after this.
        let factor = scaling.factor(step.divided, step.shards, &step.between.reduced, &rejected)?;
        scaling.advance(false);
        (rejected, factor)
    } else {
        // One owner has each of these parameters, so its own flags are the decision. No message is
        // sent.
        (step.flags.decided_alone(), None)
    };
    // Read by the host before the updates are queued, and only where a user's optimizer needs it.
    let is_read = stage.buckets.iter().any(|bucket| step.shards[*bucket].reads_decisions());
    let read = is_read.then(|| rejected.to_data().iter::<f32>().map(|flag| flag > 0.0).collect());
    // After `agree_on_rejected`, which has advanced them for this step.
    let corrections = accounts.counters.corrections.clone();
    Ok(Some(StepControls { rejected, corrections, factor, read: read.unwrap_or_default() }))
}

/// Agrees on the parameters that stay as they are, in one message, and counts the skipped steps of
/// all parameters. `None` if all stay as they are, since a gradient overflowed under loss scaling.
fn agree_on_rejected(
    step: &mut StepInProgress<'_>,
    accounts: &mut Accounts,
    scaling: &GradientScaling,
) -> Result<Option<Tensor<1>>> {
    // All counts in one message: a small all-reduce costs its latency and not its bytes.
    let diverged = accounts.matrices.as_ref().map(|sums| sums.sum(accounts.diverged.clone()));
    let sums = std::iter::once(step.flags.rejected()).chain(diverged).collect();
    let sums = flat::concat(sums, DType::F32, &step.divided.device());
    let sums = step.divided.world.comm().all_reduce(sums, ReduceOp::Sum)?;
    // The results of earlier calls come first.
    step.land_all()?;
    let sums = sums.wait()?;
    // They are in the sums now, and must not be counted by the next step again.
    accounts.forget_diverged();
    let parameters = step.divided.trainable.len();
    // Read by the host, and only with loss scaling: everything else is decided on the device.
    let overflowed = scaling.overflows(&sums, parameters);
    let rest = &step.divided.routing.updates().rest;
    // Not in a skipped step: AdamW's moments stay as they are, and so do their corrections. With
    // several updates, each has decays of its own.
    let has_one = accounts.others.is_empty();
    let betas = rest[0].rule.correction_betas().filter(|_| has_one && !overflowed);
    // Also for a step that is skipped as a whole: the parameters whose gradients overflowed are
    // named by their counts.
    let counts = accounts.counters.take(&sums);
    let Acceptance { rejected, counts, zeros } =
        accept(rest[0].policy, sums, step.flags.absent(), counts, betas);
    accounts.counters = counts.into();
    accounts.zeros = zeros;
    if overflowed {
        return Ok(None);
    }
    // Each update element by element corrects its own parameters, and leaves the others as they
    // are.
    let corrections = &mut accounts.counters.corrections;
    for (rest, others) in rest.iter().zip(&accounts.others) {
        let unchanged = FiniteMask::from_rows(rejected.clone().max_pair(others.clone()));
        *corrections = rest.correct(corrections.clone(), &unchanged);
    }
    Ok(Some(rejected))
}

/// Gathers this rank's parts of the owned parameters that the step has changed, from the shards
/// that replicas updated. `None` for other parts, and for those that are on their way.
fn publish_parts(
    detached: &mut DetachedParameters,
    divided: &DividedModel,
    traffic: &Traffic,
) -> Result<Parts> {
    let DividedModel { parameters, passes, .. } = divided;
    let owned = parameters.iter().enumerate().filter(|(_, known)| known.placement.is_owned());
    let owned = owned.filter(|(index, _)| !detached.is_unchanged(*index));
    // By their indices among the parameters of the passes.
    let owned: BTreeMap<usize, usize> =
        owned.map(|(index, parameter)| (passes[&parameter.path].index, index)).collect();
    let mut parts: Parts = vec![None; parameters.len()];
    let mut keep = |publishing: Publishing| -> Result<()> {
        let published = passes.published(publishing)?.into_iter();
        published.for_each(|(index, part)| parts[owned[&index]] = Some(part));
        Ok(())
    };
    let mut pending = VecDeque::new();
    for message in passes.in_messages(owned.keys().copied()) {
        let shard = |index: usize| {
            let (parameter, known) = (&parameters[owned[&index]], &passes.parameters()[index]);
            (index, detached.take_shard(parameter, known, &divided.device()))
        };
        let publishing = passes.publish(message.into_iter().map(shard).collect())?;
        pending.extend(match traffic.publish {
            Publish::Now => Some(publishing),
            Publish::AtFirstUse => passes.publish_later(publishing),
        });
        // As many as buckets in flight: the buffers of all parts at once would be as large as this
        // rank's part of the model.
        if pending.len() == traffic.in_flight {
            pending.pop_front().map_or(Ok(()), &mut keep)?;
        }
    }
    pending.into_iter().try_for_each(keep)?;
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::optim::{LearningRate, Optimizer, SgdConfig};
    use burn::tensor::{Device, Tensor};

    use super::super::bucket_shard::Shard;
    use crate::custom::{LayerOptimizer, Rejected};
    use crate::muon::MuonConfig;
    use crate::routing::RoutingRule;

    /// Gradient descent.
    #[derive(Clone)]
    struct Descent;

    impl Optimizer for Descent {
        type State<const D: usize> = ();

        fn step<const D: usize>(
            &self,
            lr: LearningRate,
            parameter: Tensor<D>,
            gradient: Tensor<D>,
            _state: Option<()>,
        ) -> (Tensor<D>, Option<()>) {
            (parameter - gradient * lr, None)
        }

        fn to_device<const D: usize>(_state: (), _device: &Device) {}
    }

    impl LayerOptimizer for Descent {
        fn initial<const D: usize>(&self, _parameter: &Tensor<D>) {}

        fn keep<const D: usize>(_rejected: &Rejected, _old: (), _new: ()) {}

        fn operations(&self, shape: &[usize]) -> f64 {
            2.0 * shape.iter().product::<usize>() as f64
        }
    }

    #[test]
    fn the_host_reads_decisions_for_optimizers_only_that_the_device_can_not_take_back() {
        let model = LinearConfig::new(8, 8).init(&Device::default().autodiff());
        let reads = |muon: MuonConfig| {
            let muon = muon.with_rule(RoutingRule::custom("weight", "descent"));
            muon.init_batched(&model).unwrap().shards.iter().any(Shard::reads_decisions)
        };
        let config = MuonConfig::new;
        assert!(reads(config().with_optimizer("descent", SgdConfig::new().build())));
        assert!(!reads(config().with_layer_optimizer("descent", Descent)));
        // By Burn's interface alone, nothing is known of it.
        assert!(reads(config().with_optimizer("descent", Descent)));
    }
}
