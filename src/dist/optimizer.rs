//! The optimizer of a whole model on many ranks, in three phases.
//!
//! 1. The ranks tell each other which parameters have a gradient, and that they take the same step. Every
//!    bucket's gradients are packed, handed over and reduced: each rank gets its share.
//! 2. The ranks tell each other which parameters are refused. Bucket by bucket, they update what they
//!    own, and start to gather it.
//! 3. The gathered parameters replace the old ones.
//!
//! Only so many buckets are on their way at once, so that what a step holds beside the model does not grow
//! with it. No rank waits for another while it updates: all that it needs from the others came before.
//!
//! A world of one goes through the same phases, and ranks with averaged gradients: the one packs, sends and gathers
//! nothing, the others reduce nothing.

use std::collections::VecDeque;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

use super::agree::{Difference, digest, unite};
use super::clip::{Clip, counts};
use super::comm::{Pending, ReduceOp};
use super::config::{DistMuonConfig, Gradients};
use super::held::{Held, Values, pack};
use super::memory::{MemoryReport, Moment, bytes};
use super::plan::{Bucket, BucketKind, Costs, Plan, Report, Work};
use super::rows::{Decision, Orders, Rows};
use super::shard::{Controls, RowsOf, Shard};
use super::{World, flat, start};
use crate::adamw::AdamWSettings;
use crate::clipping::Norms;
use crate::computed;
use crate::error::Result;
use crate::gate::Gate;
use crate::muon::rule::{Rates, Settings, check_rate};
use crate::route::{Group, Route, Routing};
use crate::skipped::{self, SkippedSteps};

/// Muon and AdamW for one model on many ranks, from [`DistMuonConfig::init`](super::DistMuonConfig::init).
///
/// Every rank makes the same calls; what it returns is the same on all of them. For the same reduced
/// gradients, the parameters after a step do not depend on the number of ranks, the plan, the size
/// of the buckets or how many are on their way, bit for bit, where the backend computes a matrix of a batch as it
/// computes it alone (Flex does).
///
/// # Failures
///
/// A method that fails on one rank fails on all, and ends the world: each rank returns the typed
/// error, or [`Error::PeerFailed`](crate::Error::PeerFailed) with the text of the first one. A step
/// takes the model and gives it back only when all of its parameters are new: if a rank fails before
/// its last bucket is gathered, no rank returns a model. Clone the model before the step to keep the
/// old one, which keeps its memory as well. What can't be ruled out is a rank that fails after it
/// has sent its last share, while or after it puts its parameters back: the others have then
/// finished the step. After a failure the states are those of a step half taken: load a checkpoint.
///
/// On an engine that lets the device wait (`nccl`), a step returns before its last bucket is there. A
/// failure is then returned by the next call of any kind, and nothing is [saved](Self::save) before;
/// call [`Communicator::synchronize`](super::Communicator::synchronize) before you save or use the model
/// by other means.
pub struct DistModuleOptimizer {
    pub(super) world: World,
    pub(super) routing: Routing,
    pub(super) plan: Plan,
    pub(super) shards: Vec<Shard>,
    /// The trained parameters as the routing knows them, in the order of the plan.
    pub(super) members: Vec<Member>,
    pub(super) counters: Counters,
    skipped: SkippedSteps,
    place: skipped::Place,
    adamw: AdamWSettings,
    /// The matrices that this rank updates.
    matrices: Rows,
    /// For each of them, 1 if the iteration made something of the last step's momentum that is not finite. It is
    /// counted with what the next step refuses, since no rank waits for another while it updates.
    pub(super) late: Tensor<1>,
    costs: Costs,
    gradients: Gradients,
    in_flight: usize,
    clip: Option<Clip>,
    memory: MemoryReport,
    /// Bytes of all states: they stay what they are.
    state_bytes: usize,
}

/// A trained parameter.
pub(super) struct Member {
    pub path: String,
    /// Its identity in the model of the last step.
    pub id: ParamId,
    /// Steps in which it had a gradient on any rank: its position in the schedules.
    pub time: usize,
    is_matrix: bool,
    /// The factor on the learning rate before it meets the weight decay.
    lr_factor: f64,
    /// The factor on it after that.
    scale: f64,
}

/// The counters of every parameter, on the device: the same on all ranks.
pub(super) struct Counters {
    /// The number of times that it was left untouched because its gradient was not finite.
    pub skipped: Tensor<1>,
    /// AdamW's bias corrections.
    pub corrections: [Tensor<1>; 2],
}

/// A bucket on its way to its share.
enum Reducing {
    /// The gradients stay where they are: they are of one rank, or averaged already.
    Here(Vec<Tensor<1>>),
    Sent(Pending),
}

/// A bucket between its reduction and its update.
struct Share {
    /// The gradients of this rank's parameters.
    gradients: Vec<Tensor<1>>,
    /// Their norms, if they are to be clipped.
    norms: Vec<Norms>,
}

impl Reducing {
    fn bytes(&self) -> usize {
        match self {
            Self::Here(gradients) => gradients.iter().map(bytes).sum(),
            Self::Sent(pending) => pending.bytes(),
        }
    }
}

/// The holdings of a step, kept up to date as tensors come and go.
struct Step {
    held: Held,
    /// Bytes of the shares that were reduced and not yet used.
    shares: usize,
    /// Bytes that are sent and received.
    buffers: usize,
}

impl Counters {
    fn new(parameters: usize, device: &Device) -> Self {
        let zeros = || Tensor::zeros([parameters], (device, DType::F32));
        Self { skipped: zeros(), corrections: [zeros(), zeros()] }
    }
}

impl DistModuleOptimizer {
    pub(super) fn new<M: Module>(
        config: &DistMuonConfig,
        world: &World,
        model: &M,
    ) -> Result<Self> {
        start::same_config(world, config)?;
        let routed = config.check().and_then(|()| config.muon.route(model));
        let routing = world.agree(routed)?;
        let (members, parameters) = world.agree(start::members(config, &routing, model))?;
        start::same_model(world, &parameters, model)?;
        // Equal on all ranks by now.
        start::check_types(&parameters, world.rank())?;
        let settings = routing.muon().settings().clone();
        let costs = config.costs.costs(world, &parameters, &settings.newton_schulz)?;
        let plan = start::plan(config, world, parameters, &costs)?;
        let (rank, device) = (world.rank(), world.device().clone().inner());
        let rules = (&settings, &config.muon.adamw);
        let mut rows = RowsOf::default();
        let shard = |bucket| Shard::new(bucket, plan.parameters(), rank, rules, &mut rows, &device);
        let shards: Vec<Shard> = plan.buckets().iter().map(shard).collect();
        let clip =
            config.max_norm.map(|max_norm| Clip::new(max_norm, &plan, rank, &rows.all, &device));
        let parameters = plan.parameters().iter();
        let parameters = parameters.map(|found| found.elements() * found.dtype.size()).sum();
        let states = shards.iter().map(Shard::state_bytes).sum();
        let mut memory = MemoryReport::default();
        memory.observe(Moment { parameters, states, ..Moment::default() });
        let skipped = routing.skipped_steps().clone();
        let mut optim = Self {
            world: world.clone(),
            routing,
            counters: Counters::new(members.len(), &device),
            skipped,
            place: skipped::Place::default(),
            adamw: config.muon.adamw.clone(),
            late: Tensor::zeros([rows.matrices.len()], (&device, DType::F32)),
            matrices: Rows::new(&rows.matrices, plan.parameters().len(), &device),
            plan,
            shards,
            members,
            costs,
            gradients: config.gradients,
            in_flight: config.in_flight,
            clip,
            memory,
            state_bytes: states,
        };
        optim.start_counting();
        Ok(optim)
    }

    /// One step: the model with all of its trained parameters updated from the gradients of all
    /// ranks. Parameters without a gradient on any rank stay as they are, and their schedules where they
    /// are; on some ranks, the others count as zeros.
    ///
    /// For several micro-batches, sum or average their gradients with Burn's
    /// [`GradientsAccumulator`](burn::optim::GradientsAccumulator) and step once.
    ///
    /// # Errors
    ///
    /// - [`Error::Parameter`](crate::Error::Parameter) if the model, or the shape, type or device of a
    ///   gradient, is not what the optimizer was made for;
    /// - [`Error::SettingsDiffer`](crate::Error::SettingsDiffer) if the ranks give different learning rates,
    ///   or have not taken the same steps before;
    /// - [`Error::Setting`](crate::Error::Setting) for a learning rate that is not finite;
    /// - [`Error::Skipped`](crate::Error::Skipped) for a parameter that was skipped in too many steps in a row;
    /// - [`Error::NotComputed`](crate::Error::NotComputed), with the first parameter that could not be updated, or on
    ///   several ranks the first of its bucket, if the device has no memory for gradients or their step;
    /// - those of every collective.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let stepped = self.three_phases(&lr.into(), model, gradients);
        if let Err(error) = &stepped {
            self.world.comm().fail(&error.to_string());
        }
        stepped
    }

    /// The optimizer of every parameter, and the reason for it.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// The owners and buckets of all parameters.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The costs that the plan was balanced by.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The plan as a table: matrices, costs and bytes of every rank.
    pub fn report(&self) -> Report {
        self.plan.report(&self.costs)
    }

    /// The memory that this rank holds.
    pub fn memory(&self) -> MemoryReport {
        self.memory
    }

    /// The steps that left parameters untouched: the same on all ranks. What the iteration can't orthogonalise is
    /// counted with the next step.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// Counts skipped steps somewhere else.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn count_skipped_in(&mut self, skipped: &SkippedSteps) {
        self.skipped = skipped.clone();
        self.place = skipped::Place::default();
        self.start_counting();
    }

    /// Registers the counts as they are now.
    pub(super) fn start_counting(&mut self) {
        let names = self.members.iter().map(|member| member.path.clone()).collect();
        let reserved = self.place.has_started().then_some(self.place);
        let times = self.members.iter().map(|member| member.time).collect();
        self.place = self.skipped.start(reserved, names, self.counters.skipped.clone(), times);
    }

    fn three_phases<M: Module>(
        &mut self,
        lr: &ModuleLearningRate,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let (rank, device) = (self.world.rank(), self.device());
        let (model, held) = Held::take(model, gradients, self.plan.parameters(), rank, &device)?;
        for (member, id) in self.members.iter_mut().zip(&held.ids) {
            member.id = *id;
        }
        let rate = |member: &Member| lr.lr_from_param(member.id, Some(&member.path));
        let lrs: Vec<f64> = self.members.iter().map(rate).collect();
        lrs.iter().try_for_each(|lr| check_rate(*lr))?;
        let present = self.agree_on_step(&lrs, &held)?;

        let mut step = Step { held, shares: 0, buffers: 0 };
        self.observe(&step);
        let (shares, refused) = self.reduce(&mut step)?;
        let left = self.decide(refused, &present)?;
        let factor = self.clip_factor(&left, &shares)?;
        let corrections = self.counters.corrections.clone();
        let controls = Controls { left, corrections, factor };
        self.update(&mut step, shares, &controls, &self.orders(&lrs))?;
        for (member, present) in self.members.iter_mut().zip(present) {
            member.time += usize::from(present);
        }
        let times: Vec<usize> = self.members.iter().map(|member| member.time).collect();
        let (counts, tells) = (self.counters.skipped.clone(), self.world.is_main());
        self.skipped.record(&mut self.place, counts, &times, tells)?;
        self.observe(&step);
        Ok(step.held.put_back(model, self.plan.parameters()))
    }

    /// The parameters that have a gradient on any rank, if all ranks take the same step: one message.
    fn agree_on_step(&self, lrs: &[f64], held: &Held) -> Result<Vec<bool>> {
        let mut present = vec![0u8; self.members.len().div_ceil(8)];
        for number in (0..self.members.len()).filter(|n| held.gradients.get(*n).is_some()) {
            present[number / 8] |= 1 << (number % 8);
        }
        let times = self.members.iter().map(|member| member.time);
        // As they are applied: hosts may differ in the last digits of a float64 cosine.
        let lrs = lrs.iter().map(|lr| (*lr as f32).to_bits());
        let steps: Vec<(u32, usize)> = lrs.zip(times).collect();
        match unite(self.world.comm(), present, digest(&steps))? {
            Some(present) => {
                let bit = |number: usize| present[number / 8] >> (number % 8) & 1 == 1;
                Ok((0..self.members.len()).map(bit).collect())
            }
            None => Err(self.other_step(&steps)),
        }
    }

    /// The first rank that takes another step than rank 0, and how it differs.
    fn other_step(&self, steps: &Vec<(u32, usize)>) -> crate::Error {
        let path = |number: usize| &self.members[number].path;
        let difference = |first: &Vec<(u32, usize)>, own: &Vec<(u32, usize)>| {
            let number = first.iter().zip(own).position(|(first, own)| first != own)?;
            let (first, own) = (first[number], own[number]);
            let (setting, first, other) = if first.1 != own.1 {
                (format!("steps of `{}`", path(number)), first.1.to_string(), own.1.to_string())
            } else {
                let [first, own] = [first.0, own.0].map(|bits| f32::from_bits(bits).to_string());
                (format!("learning rate of `{}`", path(number)), first, own)
            };
            Some(Difference { setting, first, other })
        };
        match self.world.same_settings(steps, difference) {
            Err(error) => error,
            Ok(()) => unreachable!("their digests differ"),
        }
    }

    /// The host's decisions about every parameter.
    fn orders(&self, lrs: &[f64]) -> Orders {
        let muon = self.routing.muon().settings();
        let rates = self.members.iter().zip(lrs).map(|(member, lr)| {
            let weight_decay = match member.is_matrix {
                true => muon.weight_decay.at(member.time),
                false => self.adamw.weight_decay,
            };
            Rates::new(lr * member.lr_factor, member.scale, weight_decay)
        });
        let times = self.members.iter().map(|member| member.time).collect();
        Orders { rates: rates.collect(), times }
    }

    /// Tells whether gradients are reduced at all.
    fn reduces(&self) -> bool {
        self.world.size() > 1 && self.gradients == Gradients::PerRank
    }

    /// Tells whether the ranks update a bucket in parts.
    fn gathers(&self, bucket: &Bucket) -> bool {
        self.world.size() > 1 && bucket.kind != BucketKind::Replicated
    }

    /// Phase 1: hands over the gradients of all buckets, and receives this rank's shares; flags the parameters
    /// whose gradients it can't use.
    fn reduce(&mut self, step: &mut Step) -> Result<(Vec<Share>, Tensor<1>)> {
        if self.reduces() {
            // Before they are packed: what fusion makes of them does not always tell that they were not computed.
            let given = self.members.iter().enumerate().filter_map(|(number, member)| {
                Some((&*member.path, step.held.gradients.get(number)?))
            });
            computed::check_all(given)?;
        }
        let flags = Tensor::zeros([self.members.len()], (&self.device(), DType::F32));
        let (mut shares, mut flags) = (vec![], flags);
        let mut pending = VecDeque::new();
        for bucket in 0..self.shards.len() {
            let started = self.start_reduce(bucket, step)?;
            step.buffers += started.bytes();
            pending.push_back(started);
            self.observe(step);
            if pending.len() == self.in_flight {
                flags = self.finish_reduce(&mut shares, &mut pending, step, flags)?;
            }
        }
        while !pending.is_empty() {
            flags = self.finish_reduce(&mut shares, &mut pending, step, flags)?;
        }
        Ok((shares, flags))
    }

    fn start_reduce(&self, bucket: usize, step: &mut Step) -> Result<Reducing> {
        let (shard, comm) = (&self.shards[bucket], self.world.comm());
        let (bucket, gradients) = (&shard.bucket, &mut step.held.gradients);
        let drop_rest = |gradients: &mut Values| {
            bucket.parameters.iter().for_each(|number| _ = gradients.take(*number));
        };
        if !self.reduces() {
            let here = shard.take(gradients);
            drop_rest(gradients);
            return Ok(Reducing::Here(here));
        }
        let packed = pack(gradients, bucket, &self.device());
        self.check(bucket, &packed)?;
        drop_rest(gradients);
        Ok(Reducing::Sent(match bucket.kind {
            BucketKind::Replicated => comm.all_reduce(packed, ReduceOp::Mean)?,
            _ => comm.reduce_scatter(packed, &bucket.counts, ReduceOp::Mean)?,
        }))
    }

    fn finish_reduce(
        &mut self,
        shares: &mut Vec<Share>,
        pending: &mut VecDeque<Reducing>,
        step: &mut Step,
        flags: Tensor<1>,
    ) -> Result<Tensor<1>> {
        let pending = pending.pop_front().expect("it was started");
        let (held, shard) = (pending.bytes(), &self.shards[shares.len()]);
        let gradients = match pending {
            Reducing::Here(gradients) => gradients,
            Reducing::Sent(pending) => shard.split(&pending.wait()?),
        };
        let norms = if self.clip.is_some() { shard.norms(&gradients) } else { vec![] };
        let flags = shard.refuse(&gradients, flags);
        step.buffers -= held;
        step.shares += gradients.iter().map(bytes).sum::<usize>();
        shares.push(Share { gradients, norms });
        self.observe(step);
        Ok(flags)
    }

    /// Phase 2: agrees on the parameters that are left as they are, in one message for all buckets, and counts.
    fn decide(&mut self, refused: Tensor<1>, present: &[bool]) -> Result<Tensor<1>> {
        let sums = Tensor::cat(vec![refused, self.matrices.sum(self.late.clone())], 0);
        let sums = self.world.comm().all_reduce(sums, ReduceOp::Sum)?.wait()?;
        let parameters = self.members.len();
        let refused = flat::part(&sums, 0..parameters);
        let late = flat::part(&sums, parameters..2 * parameters);
        let Decision { left, refused } = Decision::new(refused, late, present);
        let Counters { skipped, corrections } = &mut self.counters;
        *skipped = skipped.clone() + refused;
        *corrections = self.adamw.correct(corrections.clone(), &Gate::from_left(left.clone()));
        Ok(left)
    }

    /// The factor on all gradients, where they are clipped.
    fn clip_factor(&self, left: &Tensor<1>, shares: &[Share]) -> Result<Option<Tensor<1>>> {
        let Some(clip) = &self.clip else { return Ok(None) };
        let rank = self.world.rank();
        let left = clip.spread(left);
        let (mut norms, mut first) = (vec![], 0);
        for (shard, share) in self.shards.iter().zip(shares) {
            let counts = counts(&shard.bucket, rank);
            for Norms { scale, squares } in &share.norms {
                let rows = first..first + scale.dims()[0];
                first = rows.end;
                let gate = Gate::from_left(flat::part(&left, rows));
                let clean = |values: &Tensor<1>| gate.clean(values.clone());
                norms
                    .extend(counts.then(|| Norms { scale: clean(scale), squares: clean(squares) }));
            }
        }
        clip.factor(&self.world, norms).map(Some)
    }

    /// Phases 2 and 3: updates this rank's shares and gathers the others'.
    fn update(
        &mut self,
        step: &mut Step,
        shares: Vec<Share>,
        controls: &Controls,
        orders: &Orders,
    ) -> Result<()> {
        let mut late = self.late.zeros_like();
        let (mut pending, mut kept) = (VecDeque::new(), vec![]);
        for (number, Share { gradients, .. }) in shares.into_iter().enumerate() {
            let share: usize = gradients.iter().map(bytes).sum();
            let shard = &mut self.shards[number];
            let values = shard.take(&mut step.held.parameters);
            let updated = shard.update(gradients, values, controls, orders, &mut late);
            step.shares -= share;
            let shard = &self.shards[number];
            if self.gathers(&shard.bucket) {
                let packed = shard.pack(updated);
                self.check(&shard.bucket, &packed)?;
                let gathered = self.world.comm().all_gather(packed, &shard.bucket.counts)?;
                step.buffers += gathered.bytes();
                pending.push_back((number, gathered));
            } else {
                for (number, value) in shard.numbers().zip(updated) {
                    kept.push((number, value.clone()));
                    step.held.parameters.set(number, value);
                }
            }
            self.observe(step);
            if pending.len() == self.in_flight {
                self.publish(&mut pending, step)?;
            }
        }
        while !pending.is_empty() {
            self.publish(&mut pending, step)?;
        }
        self.late = late;
        self.check_all(kept)
    }

    /// Phase 3: replaces the parameters of a bucket by the gathered ones.
    fn publish(&mut self, pending: &mut VecDeque<(usize, Pending)>, step: &mut Step) -> Result<()> {
        let (number, pending) = pending.pop_front().expect("it was started");
        let held = pending.bytes();
        let gathered = pending.wait()?;
        step.held.publish(&self.shards[number].bucket, &gathered);
        self.observe(step);
        step.buffers -= held;
        Ok(())
    }

    /// Fails if the device had no memory for what is about to be sent.
    fn check(&self, bucket: &Bucket, elements: &Tensor<1>) -> Result<()> {
        computed::check(&self.members[bucket.parameters[0]].path, elements)
    }

    /// Fails if the device had no memory for values of parameters. Asked once for all of them, since it waits for all
    /// work to be given to the device.
    fn check_all(&self, values: Vec<(usize, Tensor<1>)>) -> Result<()> {
        let path = |number: usize| &*self.members[number].path;
        computed::check_all(values.iter().map(|(number, values)| (path(*number), values)))
    }

    pub(super) fn device(&self) -> Device {
        self.world.device().clone().inner()
    }

    fn observe(&mut self, step: &Step) {
        self.memory.observe(Moment {
            parameters: step.held.parameters.bytes(),
            gradients: step.held.gradients.bytes(),
            shares: step.shares,
            states: self.state_bytes,
            buffers: step.buffers,
        });
    }
}

impl Member {
    /// A parameter with the factors on its learning rate.
    pub fn new(config: &DistMuonConfig, settings: &Settings, route: &Route, work: Work) -> Self {
        let adamw = &config.muon.adamw;
        let (lr_factor, scale) = match (route.group, work) {
            (Group::Muon { layout, .. }, Work::Matrices { rows, columns, .. }) => {
                (1.0, settings.scale(layout, [rows, columns]))
            }
            (Group::Embedding, _) => (adamw.embedding_lr, 1.0),
            (Group::Head, _) => (adamw.head_lr, 1.0),
            _ => (adamw.vector_lr, 1.0),
        };
        let is_matrix = matches!(work, Work::Matrices { .. });
        Self { path: route.path.clone(), id: route.id, time: 0, is_matrix, lr_factor, scale }
    }
}
