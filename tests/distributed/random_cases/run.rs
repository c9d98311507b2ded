//! Runs of a trial: divided among ranks, and on ranks that have all parameters.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use distmuon::checkpoint::Saver;
use distmuon::comm::{Joined, World};
use distmuon::distributed::{DistMuonConfig, GradDtype, Keep, Layout, Mesh, Publish};
use distmuon::{
    Expectation, GradientBuffer, MasterWeights, MuonConfig, Result, RoutingRule, checkpoint,
};
use distmuon_testing::models::{bits, weights};

use super::model::{Net, Pass, Shape};
use super::optim::{DIFFERENCES, Optim, mean};
use super::trial::{Call, Dropped, Load, Second, Trial, Way};

/// A rank's losses, weights and states: names, and bits.
pub type Seen = Vec<(String, Vec<u8>)>;

/// The ranks and the optimizer of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Ranks that divide the model.
    Divided,
    /// Ranks with all parameters.
    Whole,
    Second(Second),
}

/// A run on a rank.
pub struct Run<'a> {
    trial: &'a Trial,
    kind: Kind,
    /// The trial's, with or without a layer for evaluation.
    shape: Shape,
    world: &'a World,
    /// The layout's, or all ranks.
    mesh: Mesh,
    config: DistMuonConfig,
    /// The number of loads, which chooses the division.
    loads: usize,
    /// The number of other runs whose weights were loaded.
    others: usize,
    /// `None` where every rank has all parameters.
    layout: Option<Layout>,
    net: Net,
    optim: Optim,
    teacher: Option<Net>,
    average: Option<Net>,
    /// The layers that are frozen for now.
    frozen: BTreeSet<usize>,
    rate: f64,
    /// Passes so far: each has other tokens.
    passes: usize,
    /// For each of the [ranks](Self::ranks), all losses, and the weights at the end.
    seen: Vec<Seen>,
}

/// The micro-batches of a step.
struct Batches {
    count: usize,
    way: Way,
    /// The rank whose last loss is not a number.
    spoiled: Option<usize>,
    /// The ranks that have no last batch, and only take part in its pass.
    drained: Vec<usize>,
}

impl<'a> Run<'a> {
    pub fn new(trial: &'a Trial, world: &'a World, kind: Kind) -> Result<Self> {
        let muon = match trial.shape.trains_stack() {
            true => MuonConfig::new().with_rule(RoutingRule::muon("matrices").batch()),
            false => MuonConfig::new(),
        };
        let muon = trial.users.iter().fold(muon, |muon, users| users.add_to(muon));
        // Reported after two steps without a gradient, and an error after as many without any.
        let muon = muon.with_max_absent(Some(2));
        let muon = muon.with_master_weights(trial.half.unwrap_or(MasterWeights::Full));
        let config = DistMuonConfig::new().with_muon(muon).with_small_elements(64);
        let config = config.with_grad_dtype(GradDtype::Float32);
        let config = config.with_bucket_mb(Some(0.002)).with_publish(trial.publish);
        let config = config.with_max_norm(trial.max_norm);
        let config = if trial.checks { config.with_check_every(1) } else { config };
        let shape = trial.shape.clone();
        let start = Start { trial, kind, shape: &shape, world, config: &config };
        let (layout, net, optim) = start.run(0, Ok)?;
        let mut run = Self {
            trial,
            kind,
            shape,
            world,
            mesh: mesh(world, layout.as_ref()),
            config,
            loads: 0,
            others: 0,
            layout,
            net,
            optim,
            teacher: None,
            average: None,
            frozen: BTreeSet::new(),
            rate: 0.01,
            passes: 0,
            seen: vec![],
        };
        run.seen = run.ranks().map(|_| vec![]).collect();
        Ok(run)
    }

    /// The ranks among those with different data whose losses this one computes.
    fn ranks(&self) -> Range<usize> {
        let rank = self.mesh.data().rank();
        if self.kind == Kind::Second(Second::Burn) { 0..self.trial.data } else { rank..rank + 1 }
    }

    fn pass(&self, rank: usize) -> Pass<'_> {
        let data_cuts = self.trial.data_cuts(self.loads);
        Pass {
            shape: &self.shape,
            slices: self.mesh.group(if data_cuts.is_some() { "dp" } else { "tp" }),
            data_cuts,
            layout: self.layout.as_ref(),
            rank,
            number: self.passes,
        }
    }

    fn note(&mut self, rank: usize, name: &str, bits: Vec<u8>) {
        let first = self.ranks().start;
        self.seen[rank - first].push((name.to_owned(), bits));
    }

    /// The loss of a rank in this pass, which is noted.
    fn loss(&mut self, rank: usize) -> Tensor<1> {
        let pass = self.pass(rank);
        let tokens = pass.tokens(self.world.device());
        let mut loss = self.net.loss(pass, tokens.clone());
        if let Some(teacher) = &self.teacher {
            loss = loss + teacher.loss(pass, tokens) * 0.25;
        }
        self.note(rank, &format!("loss {}", self.passes), bits(&loss));
        loss
    }

    fn train(mut self, Batches { count, way, spoiled, drained }: Batches) -> Result<Self> {
        let ranks = self.ranks();
        let mut buffers: Vec<_> = ranks.clone().map(|_| GradientBuffer::new()).collect();
        let mut gradients = GradientsParams::new();
        let mut losses = vec![];
        let collects = way == Way::Collected && count == 1 && self.collects();
        let exchanges = self.trial.data_cuts(self.loads).is_some();
        // Where ranks leave layers out, a backward pass comes before the next forward pass.
        let forward_first = way == Way::ForwardFirst && !self.shape.skips;
        for batch in 1..=count {
            self.passes += 1;
            let is_last = batch == count;
            for rank in ranks.clone() {
                let loss = self.loss(rank);
                let is_spoiled = is_last && spoiled == Some(rank);
                // Other ranks have some of this rank's gradients, which `drain` leaves out.
                let is_idle = is_last && drained.contains(&rank) && exchanges;
                let factor = if is_idle { 0.0 } else { 1.0 };
                losses.push((rank, is_last, loss * if is_spoiled { f32::NAN } else { factor }));
            }
            if forward_first && !is_last {
                continue;
            }
            for (rank, is_last, loss) in losses.drain(..) {
                let is_drained = is_last && drained.contains(&rank) && !exchanges;
                let net = &self.net;
                let own = || GradientsParams::from_grads(loss.backward(), net);
                match &self.layout {
                    Some(layout) if !is_last => layout.accumulate(&loss, net)?,
                    Some(layout) if is_drained => gradients = layout.drain(&loss, net)?,
                    Some(layout) if collects => {
                        gradients = own();
                        layout.collect(net, &mut gradients)?;
                    }
                    Some(layout) => gradients = layout.backward(&loss, net)?,
                    None if is_drained => {}
                    None => buffers[rank - ranks.start].add(net, own())?,
                }
            }
            if let Way::Dropping(dropped) = way
                && !is_last
            {
                self.passes += 1;
                ranks.clone().try_for_each(|rank| self.drop_pass(rank, dropped))?;
            }
        }
        if self.layout.is_none() {
            let mut sums: Vec<_> = buffers.iter_mut().map(GradientBuffer::take_sum).collect();
            gradients = if sums.len() == 1 { sums.remove(0) } else { mean(&self.net, sums) };
        }
        self.net = self.optim.step(self.rate, self.net, gradients)?;
        Ok(self)
    }

    /// Takes a pass of a rank that is not trained. Micro-batches stay, unless it is one of them.
    fn drop_pass(&mut self, rank: usize, dropped: Dropped) -> Result<()> {
        let loss = self.loss(rank);
        if dropped == Dropped::Backward && self.collects() {
            drop(loss.backward());
        }
        match (&self.layout, dropped) {
            (Some(layout), Dropped::MicroBatch) => {
                layout.accumulate(&loss, &self.net)?;
                layout.discard()
            }
            (Some(layout), _) => layout.discard_pass(),
            (None, _) => Ok(()),
        }
    }

    /// Returns `true` if the layout can collect from a backward pass of the caller's, before which
    /// the ranks do not tell each other which layers they leave out.
    fn collects(&self) -> bool {
        !self.shape.skips || self.trial.division(self.loads).keep == Keep::Weights
    }

    /// Takes steps until all ranks have run out of batches.
    fn join(mut self, offset: usize, count: usize) -> Result<Self> {
        let batches = |rank: usize| 1 + (rank + offset) % 3;
        let ranks = self.ranks();
        // Of one rank that computes the losses of all, the most.
        let own = ranks.clone().map(batches).max().expect("a rank");
        let mut own = self.world.join(0..own);
        for step in 0.. {
            let Some(batch) = own.next_batch()? else { break };
            let drained: Vec<_> = ranks.clone().filter(|rank| batches(*rank) <= step).collect();
            let is_own = matches!(batch, Joined::Own(_));
            assert_eq!(is_own, drained.len() < ranks.len(), "a rank has all of its batches");
            self = self.train(Batches { count, way: Way::InTurn, spoiled: None, drained })?;
        }
        Ok(self)
    }

    /// Notes the loss of a model without gradients.
    fn evaluate(&mut self, net: &Net) {
        self.passes += 1;
        let (device, net) = (self.world.device().clone().inner(), net.valid());
        for rank in self.ranks() {
            let pass = self.pass(rank);
            let loss = bits(&net.evaluate(pass, pass.tokens(&device)));
            self.note(rank, &format!("evaluation {}", self.passes), loss);
        }
    }

    fn reload(mut self, load: Load, path: &Path) -> Result<Self> {
        // One file or a folder of parts, in turn: at different paths.
        let in_parts = !self.loads.is_multiple_of(2);
        let path = &path.with_extension(if in_parts { "parts" } else { "bpk" });
        let saver = Saver::new();
        let mut saver = if in_parts { saver.with_parts() } else { saver };
        self.optim.save(&mut saver, path, &self.net, self.passes)?;
        // Rank 0 completes the parts, without telling.
        self.world.comm().barrier()?;
        self.loads += 1;
        self.shape.has_evaluated ^= matches!(load, Load::Matching);
        let prepare = |net| match load {
            Load::Weights => checkpoint::load_weights(path, net),
            Load::Run | Load::Matching => Ok(net),
        };
        let Self { trial, kind, world, .. } = self;
        let start = Start { trial, kind, shape: &self.shape, world, config: &self.config };
        let (layout, net, optim) = start.run(self.loads, prepare)?;
        let passes: usize = match load {
            Load::Run => {
                let passes;
                (self.net, self.optim, passes) = optim.load(path, net)?;
                passes
            }
            Load::Weights => {
                (self.net, self.optim) = (net, optim);
                checkpoint::progress(path)?
            }
            Load::Matching => {
                let (passes, differences);
                (self.net, self.optim, passes, differences) = optim.load_matching(path, net)?;
                for rank in self.ranks() {
                    self.note(rank, DIFFERENCES, format!("{differences:?}").into_bytes());
                }
                passes
            }
        };
        assert_eq!(self.passes, passes, "the progress is that of the run");
        self.frozen.clear();
        self.mesh = mesh(self.world, layout.as_ref());
        // They belong to the division before.
        (self.layout, self.teacher, self.average) = (layout, None, None);
        Ok(self)
    }

    /// Loads the weights of a run that has not trained: by Burn's records, where every rank has all
    /// parameters, and as a run otherwise.
    fn pretrain(mut self, path: &Path) -> Result<Self> {
        self.others += 1;
        let (seed, device) = (1000 + self.others as u64, self.world.device());
        let other = Net::new(&self.shape, seed, self.trial.half, device);
        let is_cut = self.trial.model > 1 || self.trial.data_cuts(self.loads).is_some();
        if !self.trial.division(self.loads).is_owned && !is_cut {
            self.net = self.net.load_record(other.into_record());
            return Ok(self);
        }
        let path = path.with_extension(format!("other-{}", self.others));
        if self.world.is_main() {
            let optim = self.config.init(&World::alone(device.clone()), &other)?;
            optim.save(&path, &other, &self.passes)?;
        }
        self.world.comm().barrier()?;
        (self.net, self.optim, self.passes) = self.optim.load(&path, self.net)?;
        Ok(self)
    }

    fn freeze(&mut self, index: usize) -> Result<()> {
        let index = index % self.net.layers.len();
        // A layer that was frozen when the optimizer was made is not trained later.
        if self.shape.frozen == Some(index) {
            return Ok(());
        }
        // A layer that is frozen and trained again before the first use after a step is still the
        // teacher's.
        let waits = self.trial.publish == Publish::AtFirstUse;
        if waits && self.teacher.is_some() && self.frozen.contains(&index) {
            self.weights()?;
        }
        let layer = self.net.layers.remove(index);
        let layer = match self.frozen.remove(&index) {
            true => layer.set_require_grad(true),
            false => {
                self.frozen.insert(index);
                layer.no_grad()
            }
        };
        self.net.layers.insert(index, layer);
        Ok(())
    }

    pub fn call(mut self, call: &Call, path: &Path) -> Result<Self> {
        match call {
            Call::Train { batches: count, spoiled, way } => {
                let spoiled = spoiled.map(|rank| rank % self.trial.data);
                return self.train(Batches { count: *count, way: *way, spoiled, drained: vec![] });
            }
            Call::Join { offset, batches } => return self.join(*offset, *batches),
            Call::Reload(load) => return self.reload(*load, path),
            Call::Pretrain => return self.pretrain(path),
            Call::Freeze(index) => self.freeze(*index)?,
            Call::Evaluate => {
                let net = self.net.clone();
                self.evaluate(&net);
            }
            Call::Drop(dropped) => {
                self.passes += 1;
                self.ranks().try_for_each(|rank| self.drop_pass(rank, *dropped))?;
            }
            Call::Teach { is_read } => {
                if *is_read {
                    self.weights()?;
                }
                self.teacher = Some(self.net.clone());
            }
            Call::Average => {
                let average = self.average.take().unwrap_or_else(|| self.net.clone());
                let plain = Layout::new(&Mesh::flat(self.world));
                let layout = self.layout.as_ref().unwrap_or(&plain);
                let average = layout.average(average, &self.net, 0.75)?;
                self.evaluate(&average);
                self.average = Some(average);
            }
            Call::Rate(rate) => self.rate = *rate,
        }
        Ok(self)
    }

    fn weights(&self) -> Result<Vec<Vec<u8>>> {
        Ok(match &self.layout {
            Some(layout) => weights(&layout.unshard(&self.net)?),
            None => weights(&self.net),
        })
    }

    /// Everything that was seen, with the weights, the states of the optimizer and its counts.
    pub fn end(mut self) -> Result<Vec<Seen>> {
        let weights = self.weights()?.into_iter().enumerate();
        let mut last: Seen = weights.map(|(n, bits)| (format!("weight {n}"), bits)).collect();
        last.extend(self.optim.states()?);
        last.extend(self.optim.counts());
        self.seen.iter_mut().for_each(|seen| seen.extend(last.clone()));
        Ok(self.seen)
    }
}

fn mesh(world: &World, layout: Option<&Layout>) -> Mesh {
    layout.map_or_else(|| Mesh::flat(world), |layout| layout.mesh().clone())
}

/// The beginning of a run, and its continuation after a load.
struct Start<'a> {
    trial: &'a Trial,
    kind: Kind,
    shape: &'a Shape,
    world: &'a World,
    config: &'a DistMuonConfig,
}

impl Start<'_> {
    /// A model and an optimizer that are made anew, other ones after each load. The whole model is
    /// prepared by a function.
    fn run(
        &self,
        loads: usize,
        prepare: impl Fn(Net) -> Result<Net>,
    ) -> Result<(Option<Layout>, Net, Optim)> {
        let Self { trial, kind, shape, world, config } = *self;
        let net = prepare(Net::new(shape, loads as u64, trial.half, world.device()))?;
        let expecting = config.muon.clone().expect(Expectation::OncePerStep);
        // Without a matrix that Muon updates, nothing can be expected.
        let muon = if expecting.route(&net).is_ok() { expecting } else { config.muon.clone() };
        let config = &config.clone().with_muon(muon);
        let optim = match kind {
            Kind::Divided => {
                let division = trial.division(loads);
                let config = &config.clone().with_balancing(division.balancing);
                let layout = division.layout(world, config, (trial, shape))?;
                let net = layout.shard(net)?;
                let optim = config.init_on(&layout, &net)?;
                return Ok((Some(layout), net, Optim::Ranks(optim)));
            }
            Kind::Whole => Optim::Ranks(config.init(world, &net)?),
            Kind::Second(Second::Everything) => Optim::everything(config, world, &net)?,
            Kind::Second(Second::Burn) => Optim::burn(config, &net)?,
        };
        Ok((None, net, optim))
    }
}
