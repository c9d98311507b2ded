//! The optimizer of a whole model on many ranks, in three phases.
//!
//! 1. Every bucket's gradients are packed, handed over and reduced: each rank gets its share.
//! 2. The ranks tell each other which parameters are refused. Bucket by bucket, they update what they
//!    own, and start to gather it.
//! 3. The gathered parameters replace the old ones.
//!
//! No rank waits for another while it updates: all that it needs from the others came before.
//!
//! A world of one goes through the same phases.

use std::collections::BTreeMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData, s};

use super::comm::{Pending, ReduceOp};
use super::config::{DistMuonConfig, Gradients};
use super::held::{Held, pack};
use super::memory::{MemoryReport, Moment, bytes, bytes_of};
use super::plan::{Bucket, BucketKind, Costs, Parameter, Plan, Report, Work};
use super::shard::{Shard, State, Verdict};
use super::{World, start};
use crate::computed;
use crate::error::Result;
use crate::gate::Gate;
use crate::muon::rule::{Rates, Settings};
use crate::route::{Group, Route, Routing};

/// Added to the norm that gradients are clipped by, as in PyTorch's `clip_grad_norm_`.
const NORM_EPSILON: f64 = 1e-6;

/// Muon and AdamW for one model on many ranks, from [`DistMuonConfig::init`](super::DistMuonConfig::init).
///
/// Every rank makes the same calls; what it returns is the same on all of them. For the same reduced
/// gradients, the parameters after a step do not depend on the number of ranks, the plan, the size
/// of the buckets or the overlap, bit for bit, where the backend computes a matrix of a batch as it
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
    /// Steps taken: the position in the schedules.
    pub(super) time: usize,
    costs: Costs,
    gradients: Gradients,
    overlap: bool,
    clip: Option<Clip>,
    memory: MemoryReport,
}

/// A trained parameter.
pub(super) struct Member {
    pub path: String,
    /// Its identity in the model of the last step.
    pub id: ParamId,
    /// What the learning rate is multiplied by before it meets the weight decay.
    lr_factor: f64,
    /// What it is multiplied by after that.
    scale: f64,
}

/// Clipping by the norm of all gradients.
struct Clip {
    max_norm: f64,
    /// For every bucket, the places of the own rows among the rows of all parameters in model order:
    /// their squares are added up in an order that does not depend on the plan.
    places: Vec<Tensor<1, Int>>,
    rows: usize,
}

/// A bucket on its way through a step.
#[derive(Default)]
struct Travel {
    reduced: Option<Pending>,
    share: Option<Tensor<1>>,
    squares: Option<Tensor<1>>,
    gathered: Option<Pending>,
    /// Bytes that are on their way.
    buffer: usize,
}

impl DistModuleOptimizer {
    pub(super) fn new<M: Module>(
        config: &DistMuonConfig,
        world: &World,
        model: &M,
    ) -> Result<Self> {
        let routed = config.check().and_then(|()| config.muon.route(model));
        let routing = world.agree(routed)?;
        let (members, parameters) = world.agree(start::members(config, &routing, model))?;
        start::compare(world, &parameters, model)?;
        let settings = routing.muon().settings().clone();
        let costs = config.costs.costs(world, &parameters, &settings.newton_schulz)?;
        let plan = start::plan(config, world, parameters, &costs)?;
        let device = world.device().clone().inner();
        let rules = (&settings, &config.muon.adamw);
        let shards: Vec<Shard> = plan
            .buckets()
            .iter()
            .map(|bucket| Shard::new(bucket, plan.parameters(), world.rank(), rules, &device))
            .collect();
        let clip =
            config.max_norm.map(|max_norm| Clip::new(max_norm, &plan, world.rank(), &device));
        let mut optim = Self {
            world: world.clone(),
            routing,
            plan,
            shards,
            members,
            time: 0,
            costs,
            gradients: config.gradients,
            overlap: config.overlap,
            clip,
            memory: MemoryReport::default(),
        };
        let parameters = optim.plan.parameters();
        let parameters = parameters.iter().map(|found| found.elements() * found.dtype.size()).sum();
        let states = optim.state_bytes();
        optim.memory.observe(Moment { parameters, states, ..Moment::default() });
        Ok(optim)
    }

    /// One step: the model with all of its trained parameters updated from the gradients of all
    /// ranks. Parameters without a gradient on any rank stay as they are; on some ranks, the others
    /// count as zeros.
    ///
    /// For several micro-batches, sum or average their gradients with Burn's
    /// [`GradientsAccumulator`](burn::optim::GradientsAccumulator) and step once.
    ///
    /// # Errors
    ///
    /// - [`Error::Parameter`](crate::Error::Parameter) if the model, or the shape, type or device of a
    ///   gradient, is not what the optimizer was made for;
    /// - [`Error::NotComputed`](crate::Error::NotComputed), with the first parameter of a bucket, if the device
    ///   has no memory for its gradients or their step;
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

    /// What updates which parameter, and why.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Who owns what.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the plan was balanced by.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The plan as a table: matrices, costs and bytes of every rank.
    pub fn report(&self) -> Report {
        self.plan.report(&self.costs)
    }

    /// What this rank holds.
    pub fn memory(&self) -> MemoryReport {
        self.memory
    }

    /// Parameters that were left untouched at least once because their gradient was not finite, with
    /// the number of times. The same on all ranks. Waits for the device.
    pub fn skipped_steps(&self) -> BTreeMap<String, u64> {
        let counts = self.shards.iter().flat_map(|shard| {
            let counts: Vec<f32> = shard.skipped.to_data().iter::<f32>().collect();
            let paths = shard.bucket.parameters.iter().map(|number| &self.members[*number].path);
            paths.cloned().zip(counts).collect::<Vec<_>>()
        });
        counts.filter(|(_, count)| *count > 0.0).map(|(path, count)| (path, count as u64)).collect()
    }

    fn three_phases<M: Module>(
        &mut self,
        lr: &ModuleLearningRate,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let rank = self.world.rank();
        let (model, mut held) =
            Held::take(model, gradients, self.plan.parameters(), rank, &self.device())?;
        let mut travels: Vec<Travel> = self.shards.iter().map(|_| Travel::default()).collect();
        self.observe(&held, &travels);
        for (member, id) in self.members.iter_mut().zip(&held.ids) {
            member.id = *id;
        }

        let present = self.shards.iter().map(|shard| self.present(shard, &held)).collect();
        for bucket in 0..travels.len() {
            self.start_reduce(bucket, &mut held, &mut travels[bucket])?;
            self.observe(&held, &travels);
        }
        let verdicts = self.verdicts(present, &held, &mut travels)?;
        let clip = self.clip_factor(&mut travels, &verdicts)?;
        for (bucket, verdict) in verdicts.into_iter().enumerate() {
            let rates = self.rates(bucket, lr, &held.ids);
            let travel = &mut travels[bucket];
            self.update(bucket, &mut held, travel, verdict, &rates, clip.as_ref())?;
            self.observe(&held, &travels);
        }
        for (bucket, shard) in self.shards.iter().enumerate() {
            let gathered = travels[bucket].gathered.take().expect("every bucket is gathered");
            let gathered = gathered.wait()?;
            travels[bucket].buffer = bytes(&gathered);
            held.publish(&shard.bucket, &gathered);
            self.memory.observe(self.moment(&held, &travels));
            travels[bucket].buffer = 0;
        }
        self.time += 1;
        self.observe(&held, &travels);
        Ok(held.put_back(model, self.plan.parameters()))
    }

    /// Phase 1: hands over the gradients of a bucket.
    fn start_reduce(&self, bucket: usize, held: &mut Held, travel: &mut Travel) -> Result<()> {
        let Shard { bucket, range, .. } = &self.shards[bucket];
        let device = self.device();
        let comm = self.world.comm();
        let pending = match (self.gradients, bucket.kind) {
            (Gradients::Averaged, _) => {
                let own = pack(&mut held.gradients, bucket, range.clone(), &device);
                self.check(bucket, &own)?;
                Pending::ready(own)
            }
            (Gradients::PerRank, kind) => {
                let whole = pack(&mut held.gradients, bucket, 0..bucket.elements(), &device);
                self.check(bucket, &whole)?;
                travel.buffer = bytes(&whole);
                match kind {
                    BucketKind::Replicated => comm.all_reduce(whole, ReduceOp::Mean)?,
                    _ => comm.reduce_scatter(whole, &bucket.counts, ReduceOp::Mean)?,
                }
            }
        };
        bucket.parameters.iter().for_each(|number| held.gradients[*number] = None);
        travel.reduced = Some(self.overlapped(pending)?);
        Ok(())
    }

    /// Phase 2: waits for the own shares, and agrees on which parameters are refused: in one message
    /// for all buckets.
    fn verdicts(
        &mut self,
        present: Vec<Tensor<1>>,
        held: &Held,
        travels: &mut [Travel],
    ) -> Result<Vec<Verdict>> {
        let mut refused = Vec::new();
        for bucket in 0..travels.len() {
            refused.push(self.refused(&self.shards[bucket], &mut travels[bucket])?);
            self.observe(held, travels);
        }
        let told = Tensor::cat(vec![Tensor::cat(refused, 0), Tensor::cat(present, 0)], 0);
        let told = self.world.comm().all_reduce(told, ReduceOp::Sum)?.wait()?;
        let parameters = told.dims()[0] / 2;
        let verdict = |parameter: usize, count: usize| {
            let of = |start: usize| told.clone().slice(s![start..start + count]);
            Verdict::new(of(parameter), of(parameters + parameter))
        };
        let starts = self.shards.iter().scan(0, |end, shard| {
            let count = shard.bucket.parameters.len();
            *end += count;
            Some((*end - count, count))
        });
        Ok(starts.map(|(start, count)| verdict(start, count)).collect())
    }

    /// Waits for a share: for every parameter of its bucket, how many of the own rows are refused.
    fn refused(&self, shard: &Shard, travel: &mut Travel) -> Result<Tensor<1>> {
        let share = travel.reduced.take().expect("phase 1 started it").wait()?;
        travel.buffer = 0;
        // Where squares are needed anyway, one that is not finite refuses the row.
        let rows = match &self.clip {
            Some(_) if shard.rows() > 0 => {
                let squares = shard.squares(&share);
                let gate = Gate::of_rows(&squares);
                travel.squares = Some(gate.clean(squares));
                gate
            }
            _ => shard.finite(&share),
        };
        travel.share = Some(share);
        Ok(shard.refused(&rows))
    }

    /// Phase 2: updates the own share of a bucket, and starts to gather the others'.
    fn update(
        &mut self,
        bucket: usize,
        held: &mut Held,
        travel: &mut Travel,
        verdict: Verdict,
        rates: &Rates,
        clip: Option<&Tensor<1>>,
    ) -> Result<()> {
        let (device, time) = (self.device(), self.time);
        let shard = &mut self.shards[bucket];
        let share = travel.share.take().expect("it was waited for");
        let values = pack(&mut held.parameters, &shard.bucket, shard.range.clone(), &device);
        let updated = shard.update(share, values, verdict, rates, clip, time);
        let bucket = &self.shards[bucket].bucket;
        self.check(bucket, &updated)?;
        travel.buffer = bytes(&updated);
        let pending = match bucket.kind {
            BucketKind::Replicated => Pending::ready(updated),
            _ => self.world.comm().all_gather(updated, &bucket.counts)?,
        };
        travel.gathered = Some(self.overlapped(pending)?);
        Ok(())
    }

    /// The factor on all gradients, from the squares of the accepted rows of all ranks.
    fn clip_factor(
        &self,
        travels: &mut [Travel],
        verdicts: &[Verdict],
    ) -> Result<Option<Tensor<1>>> {
        let Some(clip) = &self.clip else { return Ok(None) };
        let mut squares = Tensor::<1>::zeros([clip.rows], (&self.device(), DType::F32));
        let buckets = self.shards.iter().zip(travels).zip(verdicts).zip(&clip.places);
        for (((shard, travel), verdict), places) in buckets {
            let everywhere = shard.bucket.kind == BucketKind::Replicated;
            let counted = !everywhere || self.world.rank() == 0;
            if let Some(own) = travel.squares.take().filter(|_| counted) {
                let own = own * shard.by_row(verdict.accepted.clone());
                squares = squares.select_assign(0, places.clone(), own, IndexingUpdateOp::Add);
            }
        }
        let squares = self.world.comm().all_reduce(squares, ReduceOp::Sum)?.wait()?;
        let norm = squares.sum().sqrt().add_scalar(NORM_EPSILON);
        Ok(Some(norm.recip().mul_scalar(clip.max_norm).clamp_max(1.0)))
    }

    /// Which of the bucket's parameters have a gradient on this rank: 1, else 0.
    fn present(&self, shard: &Shard, held: &Held) -> Tensor<1> {
        let there = |number: &usize| if held.gradients[*number].is_some() { 1.0f32 } else { 0.0 };
        let present: Vec<f32> = shard.bucket.parameters.iter().map(there).collect();
        Tensor::from_data(TensorData::from(&*present), (&self.device(), DType::F32))
    }

    /// The rates of a bucket's parameters.
    fn rates(&self, bucket: usize, lr: &ModuleLearningRate, ids: &[ParamId]) -> Rates {
        let shard = &self.shards[bucket];
        let weight_decay = match &shard.state {
            State::Muon { settings, .. } => settings.weight_decay.at(self.time),
            State::AdamW(adamw) => adamw.settings.weight_decay,
        };
        let (keep, lr): (Vec<f32>, Vec<f32>) = shard
            .bucket
            .parameters
            .iter()
            .map(|number| {
                let member = &self.members[*number];
                let lr = lr.lr_from_param(ids[*number], Some(&member.path)) * member.lr_factor;
                ((1.0 - lr * weight_decay) as f32, (lr * member.scale) as f32)
            })
            .unzip();
        let tensor = |values: Vec<f32>| {
            Tensor::from_data(TensorData::from(&*values), (&self.device(), DType::F32))
        };
        Rates { keep: tensor(keep), lr: tensor(lr) }
    }

    /// Fails if the device had no memory for what is about to be sent.
    fn check(&self, bucket: &Bucket, elements: &Tensor<1>) -> Result<()> {
        computed::check(&self.members[bucket.parameters[0]].path, elements)
    }

    /// The pending result, finished first unless communication may overlap.
    fn overlapped(&self, pending: Pending) -> Result<Pending> {
        if self.overlap { Ok(pending) } else { pending.wait().map(Pending::ready) }
    }

    pub(super) fn device(&self) -> Device {
        self.world.device().clone().inner()
    }

    fn state_bytes(&self) -> usize {
        self.shards.iter().map(Shard::state_bytes).sum()
    }

    fn moment(&self, held: &Held, travels: &[Travel]) -> Moment {
        Moment {
            parameters: bytes_of(&held.parameters),
            gradients: bytes_of(&held.gradients),
            shares: bytes_of(travels.iter().map(|travel| &travel.share)),
            states: self.state_bytes(),
            buffers: travels.iter().map(|travel| travel.buffer).sum(),
        }
    }

    fn observe(&mut self, held: &Held, travels: &[Travel]) {
        self.memory.observe(self.moment(held, travels));
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
        Self { path: route.path.clone(), id: route.id, lr_factor, scale }
    }
}

impl Clip {
    fn new(max_norm: f64, plan: &Plan, rank: usize, device: &Device) -> Self {
        // The rows of a parameter come one after the other, after those of the parameters before.
        let mut first = vec![];
        let mut rows = 0;
        for parameter in plan.parameters() {
            first.push(rows);
            rows += parameter.elements().div_ceil(row_elements(parameter));
        }
        let places = |bucket: &Bucket| {
            let parts = bucket.overlaps(bucket.share(rank));
            let places = parts.flat_map(|(number, elements, padding)| {
                let length = row_elements(&plan.parameters()[number]);
                let start = first[number] + elements.start.div_ceil(length);
                let count = (elements.len() + padding) / length;
                (start..start + count).map(|place| place as i32).collect::<Vec<_>>()
            });
            Tensor::from_data(TensorData::from(&*places.collect::<Vec<_>>()), device)
        };
        Self { max_norm, places: plan.buckets().iter().map(places).collect(), rows }
    }
}

/// Elements of a row of a parameter.
fn row_elements(parameter: &Parameter) -> usize {
    match parameter.work {
        Work::Matrices { rows, columns, .. } => rows * columns,
        Work::Elements => super::plan::GRAIN,
    }
}
