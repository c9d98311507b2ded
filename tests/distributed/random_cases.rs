//! A hunt for runs that go wrong in silence: random models, layouts and sequences of calls, each
//! compared with ranks that have all parameters.

use std::collections::BTreeSet;
use std::fmt::{Debug, Formatter};
use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::module::embedding;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use distmuon::checkpoint::Saver;
use distmuon::comm::{Communicator, World};
use distmuon::distributed::plan::Balancing;
use distmuon::distributed::{
    Axis, DistModuleOptimizer, DistMuonConfig, GradDtype, Keep, Layout, Mesh, Place, Publish,
};
use distmuon::parallel::leave;
use distmuon::{
    Expectation, GradientBuffer, MasterWeights, MuonConfig, Result, RoutingRule, checkpoint,
};
use distmuon_testing::device::is_flex;
use distmuon_testing::excused;
use distmuon_testing::models::{Fixed, bits, weights};
use distmuon_testing::precision::Rounded;
use distmuon_testing::worlds::{self, Case, Folder, cases};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::owned::with_checkpoints;
use crate::ranks_here;

pub const IN_PROCESS: &[Case] = cases![
    sequences_that_went_wrong_train_as_ranks_with_all_parameters,
    sequences_of_calls_train_as_ranks_with_all_parameters,
];

/// The number of random cases, in place of a few that are the same in every run.
const CASES: &str = "DISTMUON_HUNT";
const FEW: u32 = 24;

const WIDTH: usize = 8;
const TOKENS: usize = 11;

/// A layer of one of the kinds that use their parameters differently.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // a handful of them
enum Layer {
    Dense(Linear),
    Norm(LayerNorm),
    Feed(PositionWiseFeedForward),
    Stack(Stack),
}

#[derive(Module, Debug)]
struct Stack {
    matrices: Param<Tensor<3>>,
}

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Layer>,
    /// Without one, the embedding is also the output head.
    head: Option<Linear>,
    /// Used without gradients only.
    evaluated: Option<Linear>,
}

/// A model, and the layers of a pass, in order: some several times, and some not at all.
#[derive(Debug, Clone)]
struct Shape {
    kinds: Vec<u8>,
    uses: Vec<usize>,
    frozen: Option<usize>,
    has_head: bool,
    has_evaluated: bool,
}

impl Shape {
    /// Returns `true` if a stack of matrices is trained, for which there is a rule.
    fn trains_stack(&self) -> bool {
        let mut kinds = self.kinds.iter().enumerate();
        kinds.any(|(index, kind)| *kind == 3 && self.frozen != Some(index))
    }

    /// Leaves at most two uses of a parameter in a pass: a sum of more depends on their order. A
    /// teacher that still has the model's parameters uses each as often as the model.
    fn limit_uses(&mut self, has_teacher: bool) {
        let most = if has_teacher { 1 } else { 2 };
        let mut counts = vec![0; self.kinds.len()];
        self.uses.retain(|index| {
            counts[*index] += 1;
            counts[*index] <= most
        });
        self.has_head |= has_teacher;
    }
}

impl Net {
    fn new(shape: &Shape, seed: u64, half: Option<MasterWeights>, device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(WIDTH, outputs).init(device);
        let layer = |kind: &u8| match kind {
            0 => Layer::Dense(linear(WIDTH)),
            1 => Layer::Norm(LayerNormConfig::new(WIDTH).init(device)),
            2 => {
                let feed = PositionWiseFeedForwardConfig::new(WIDTH, 3 * WIDTH);
                Layer::Feed(feed.with_dropout(0.0).init(device))
            }
            _ => {
                let normal = Distribution::Normal(0.0, 0.1);
                let matrices = Tensor::random([3, WIDTH, WIDTH], normal, device);
                Layer::Stack(Stack { matrices: Param::from_tensor(matrices.require_grad()) })
            }
        };
        let net = Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            layers: shape.kinds.iter().map(layer).collect(),
            head: shape.has_head.then(|| linear(TOKENS)),
            evaluated: shape.has_evaluated.then(|| linear(TOKENS)),
        };
        let net = net.map(&mut Fixed::new(seed));
        let mut net = if half.is_some() { net.map(&mut Rounded(DType::BF16)) } else { net };
        if let Some(frozen) = shape.frozen {
            let layer = net.layers.remove(frozen);
            net.layers.insert(frozen, layer.no_grad());
        }
        net
    }

    fn table(&self, slices: Slices) -> Tensor<2> {
        slices.whole(self.embedding.weight.val(), [TOKENS, WIDTH])
    }

    fn features(&self, (shape, slices): (&Shape, Slices), tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = embedding(self.table(slices), tokens);
        shape.uses.iter().fold(x, |x, index| match &self.layers[*index] {
            Layer::Dense(linear) => relu(linear.forward(x)),
            Layer::Norm(norm) => norm.forward(x),
            Layer::Feed(feed) => feed.forward(x),
            Layer::Stack(stack) => {
                let matrices = slices.whole(stack.matrices.val(), [3, WIDTH, WIDTH]);
                x.clone() + x.matmul(matrices.mean_dim(0))
            }
        })
    }

    fn loss(&self, by @ (_, slices): (&Shape, Slices), tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.features(by, tokens);
        let logits = match &self.head {
            Some(Linear { weight, bias, .. }) => {
                let logits = x.matmul(slices.whole(weight.val(), [WIDTH, TOKENS]).unsqueeze());
                logits + bias.as_ref().expect("the head has a bias").val().unsqueeze()
            }
            None => x.matmul(self.table(slices).transpose().unsqueeze()),
        };
        (logits - 0.5).square().mean()
    }

    fn evaluate(&self, by: (&Shape, Slices), tokens: Tensor<2, Int>) -> Tensor<1> {
        match &self.evaluated {
            Some(linear) => linear.forward(self.features(by, tokens)).square().mean(),
            None => self.loss(by, tokens),
        }
    }
}

/// The ranks that have slices of parameters, if any are cut.
#[derive(Clone, Copy)]
struct Slices<'a>(Option<&'a Communicator>);

impl Slices<'_> {
    /// The whole of a parameter that may be cut: the sum of its slices, each among zeros.
    fn whole<const D: usize>(self, held: Tensor<D>, whole: [usize; D]) -> Tensor<D> {
        let dims = held.dims();
        let Some(dimension) = (0..D).find(|dimension| dims[*dimension] != whole[*dimension]) else {
            return held;
        };
        let group = self.0.expect("slices have a group");
        let start = group.rank() * whole[dimension] / group.size();
        let end = whole[dimension] - start - dims[dimension];
        let zeros = |length| {
            let mut shape = dims;
            shape[dimension] = length;
            (length > 0).then(|| Tensor::zeros(shape, (&held.device(), held.dtype())))
        };
        let parts = [zeros(start), Some(held.clone()), zeros(end)];
        leave(Tensor::cat(parts.into_iter().flatten().collect(), dimension), group)
    }
}

/// The division of a model. All ranks are an axis, or they are two nodes with an axis of each, or
/// they have slices of the same model.
#[derive(Debug, Clone)]
struct Division {
    is_owned: bool,
    /// `true` if what is owned lies in rows.
    in_rows: bool,
    overlaps: bool,
    on_nodes: bool,
    keep: Keep,
    /// Limits of parameters that are gathered ahead, and of gradients; two layers, unless set.
    limits_mb: [Option<f64>; 2],
    small_elements: usize,
    allows_unused: bool,
    balancing: Balancing,
    /// The dimensions along which a table, a head and stacks are cut, where ranks have slices.
    cuts: [Option<usize>; 3],
}

impl Division {
    fn layout(&self, world: &World, config: &DistMuonConfig, trial: &Trial) -> Result<Layout> {
        let nodes = [Axis::data("node", 2), Axis::data("gpu", world.size() / 2)];
        let slices = [Axis::data("dp", 1), Axis::model("tp", world.size())];
        // Means over a node and over nodes round twice, unless they divide by powers of two.
        let (mesh, axis) = match self.on_nodes && matches!(world.size(), 2 | 4 | 8) {
            _ if trial.is_cut => (Mesh::new(world, slices)?, "dp"),
            true => (Mesh::new(world, nodes)?, "gpu"),
            false => (Mesh::flat(world), "dp"),
        };
        let layout = Layout::new(&mesh).with_config(config.clone());
        let layout = layout.with_keep(self.keep).with_small_elements(self.small_elements);
        let [ahead, in_flight] = self.limits_mb;
        let layout = ahead.into_iter().fold(layout, Layout::with_ahead_mb);
        let layout = in_flight.into_iter().fold(layout, Layout::with_in_flight_mb);
        let layout = match (self.is_owned, self.in_rows) {
            (true, true) => layout.rows(axis),
            (true, false) => layout.owned(axis),
            (false, _) => layout,
        };
        let layout = if self.overlaps { layout.overlap_backward() } else { layout };
        let has = [true, trial.shape.has_head, trial.shape.kinds.contains(&3)];
        let patterns = ["^embedding", r"^head\.weight$", "matrices$"];
        let cuts = patterns.into_iter().zip(self.cuts).zip(has);
        let cuts = cuts.filter(|(_, has)| *has && trial.is_cut);
        let layout = cuts.fold(layout, |layout, ((pattern, cut), _)| match cut {
            Some(dimension) => layout.with_place(Place::shard(pattern, "tp", dimension)),
            None => layout,
        });
        Ok(if self.allows_unused { layout.allow_unused() } else { layout })
    }
}

/// The next call of a training loop.
#[derive(Debug, Clone)]
enum Call {
    /// A step with the sum of some micro-batches.
    Train {
        batches: usize,
    },
    Evaluate,
    /// Drops a pass, or a micro-batch that was accumulated.
    Discard {
        is_accumulated: bool,
    },
    /// Keeps the model at hand as a teacher, whose loss is added to those of all further passes.
    /// Its parameters have arrived if they were read. Burn's clones share the others, and are
    /// frozen and unfrozen together.
    Teach {
        is_read: bool,
    },
    /// Updates the average of the weights, or begins one.
    Average,
    /// Saves, and loads into a model and an optimizer that are made anew, with the next division.
    Reload(Load),
    Rate(f64),
    /// Freezes a layer, or trains it again.
    Freeze(usize),
}

/// The part of a run that is loaded.
#[derive(Debug, Clone, Copy)]
enum Load {
    Run,
    /// The weights alone, before the model is divided.
    Weights,
    /// Into a model with another layer more, or less.
    Matching,
}

#[derive(Clone)]
struct Trial {
    ranks: usize,
    /// `true` if the ranks have slices of one model, which is compared with that of one rank.
    is_cut: bool,
    half: Option<MasterWeights>,
    shape: Shape,
    divisions: Vec<Division>,
    publish: Publish,
    max_norm: Option<f64>,
    calls: Vec<Call>,
}

impl Debug for Trial {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { ranks, is_cut, half, shape, divisions, publish, max_norm, calls } = self;
        write!(f, "{ranks} ranks, cut: {is_cut}, {half:?}, {shape:?}, {divisions:?}, ")?;
        write!(f, "{publish:?}, {max_norm:?}, {calls:?}")
    }
}

fn trials() -> impl Strategy<Value = Trial> {
    let shape = vec(0..4_u8, 1..5).prop_flat_map(|kinds| {
        let count = kinds.len();
        let frozen = proptest::option::weighted(0.3, 0..count);
        (Just(kinds), vec(0..count, 0..6), frozen, any::<bool>(), any::<bool>())
    });
    let shape = shape.prop_map(|(kinds, uses, frozen, has_head, has_evaluated)| Shape {
        kinds,
        uses,
        frozen,
        has_head,
        has_evaluated,
    });
    let keep = prop_oneof![Just(Keep::Weights), Just(Keep::Nothing)];
    let limit = prop_oneof![Just(Some(0.0)), Just(Some(0.0005)), Just(Some(64.0)), Just(None)];
    let limits = [limit.clone(), limit];
    let flags = any::<[bool; 5]>();
    let small = prop_oneof![Just(0_usize), Just(16), Just(64), Just(4096)];
    let cut = |dimensions| proptest::option::weighted(0.7, 0..dimensions);
    let cuts = (cut(2_usize), cut(2), cut(3)).prop_map(<[_; 3]>::from);
    let balancing = prop_oneof![Just(Balancing::Greedy), Just(Balancing::BlockCyclic)];
    let division = (flags, keep, limits, small, balancing, cuts);
    let division = division.prop_map(|division| {
        let (flags, keep, limits_mb, small_elements, balancing, cuts) = division;
        let [is_owned, in_rows, overlaps, on_nodes, allows_unused] = flags;
        Division {
            is_owned,
            in_rows,
            overlaps,
            on_nodes,
            keep,
            limits_mb,
            small_elements,
            allows_unused,
            balancing,
            cuts,
        }
    });
    let load = prop_oneof![Just(Load::Run), Just(Load::Weights), Just(Load::Matching)];
    let call = prop_oneof![
        4 => (1..4_usize).prop_map(|batches| Call::Train { batches }),
        1 => Just(Call::Evaluate),
        1 => any::<bool>().prop_map(|is_accumulated| Call::Discard { is_accumulated }),
        1 => Just(Call::Teach { is_read: true }),
        1 => Just(Call::Average),
        1 => load.prop_map(Call::Reload),
        1 => (1..5_u8).prop_map(|rate| Call::Rate(0.01 * f64::from(rate))),
        1 => (0..4_usize).prop_map(Call::Freeze),
    ];
    let publish = prop_oneof![Just(Publish::Now), Just(Publish::AtFirstUse)];
    let max_norm = proptest::option::weighted(0.3, Just(0.05));
    let masters = prop_oneof![Just(MasterWeights::Full), Just(MasterWeights::Mantissa)];
    let half = proptest::option::weighted(0.25, masters);
    let ranks = prop_oneof![
        1 => Just((2_usize, true)),
        3 => (1..9_usize).prop_map(|ranks| (ranks, false)),
    ];
    let settings = (publish, max_norm, half);
    (ranks, shape, vec(division, 1..3), settings, vec(call, 1..14)).prop_map(
        |((ranks, is_cut), mut shape, divisions, (publish, max_norm, half), calls)| {
            shape.limit_uses(calls.iter().any(|call| matches!(call, Call::Teach { .. })));
            Trial { ranks, is_cut, half, shape, divisions, publish, max_norm, calls }
        },
    )
}

/// A run on a rank, with a layout or with all parameters.
struct Run<'a> {
    trial: &'a Trial,
    /// The trial's, with or without a layer for evaluation.
    shape: Shape,
    world: &'a World,
    config: DistMuonConfig,
    /// The number of loads, which chooses the division.
    loads: usize,
    /// `None` where every rank has all parameters.
    layout: Option<Layout>,
    net: Net,
    optim: DistModuleOptimizer,
    teacher: Option<Net>,
    average: Option<Net>,
    /// The layers that are frozen for now.
    frozen: BTreeSet<usize>,
    rate: f64,
    /// Passes so far: each has other tokens.
    passes: usize,
    /// The bits of all losses, and of the weights at the end.
    seen: Vec<Vec<u8>>,
}

impl<'a> Run<'a> {
    fn new(trial: &'a Trial, world: &'a World, is_divided: bool) -> Result<Self> {
        let muon = match trial.shape.trains_stack() {
            true => MuonConfig::new().with_rule(RoutingRule::muon("matrices").batch()),
            false => MuonConfig::new(),
        };
        let muon = muon.with_master_weights(trial.half.unwrap_or(MasterWeights::Full));
        let config = DistMuonConfig::new().with_muon(muon).with_small_elements(64);
        let config = config.with_grad_dtype(GradDtype::Float32);
        let config = config.with_bucket_mb(Some(0.002)).with_publish(trial.publish);
        let config = config.with_max_norm(trial.max_norm);
        let shape = trial.shape.clone();
        let (layout, net, optim) = start((trial, &shape), world, &config, is_divided, 0, Ok)?;
        let (teacher, average) = (None, None);
        let (loads, rate, passes, seen) = (0, 0.01, 0, vec![]);
        let frozen = BTreeSet::new();
        Ok(Self {
            trial,
            shape,
            world,
            config,
            loads,
            layout,
            net,
            optim,
            teacher,
            average,
            frozen,
            rate,
            passes,
            seen,
        })
    }

    fn tokens(&mut self, device: &Device) -> Tensor<2, Int> {
        self.passes += 1;
        let (rank, pass) = (if self.trial.is_cut { 0 } else { self.world.rank() }, self.passes);
        let token = |index: usize| ((index * (7 + pass) + rank * 5 + pass * pass) % TOKENS) as i64;
        Tensor::from_data(TensorData::new((0..12).map(token).collect::<Vec<_>>(), [2, 6]), device)
    }

    /// The loss of the next pass, which is noted.
    fn loss(&mut self) -> Tensor<1> {
        let tokens = self.tokens(self.world.device());
        let by = (&self.shape, Slices(Some(self.world.comm())));
        let mut loss = self.net.loss(by, tokens.clone());
        if let Some(teacher) = &self.teacher {
            loss = loss + teacher.loss(by, tokens) * 0.25;
        }
        self.seen.push(bits(&loss));
        loss
    }

    fn train(mut self, batches: usize) -> Result<Self> {
        let mut buffer = GradientBuffer::new();
        let mut gradients = GradientsParams::new();
        for batch in 1..=batches {
            let loss = self.loss();
            match &self.layout {
                Some(layout) if batch < batches => layout.accumulate(&loss, &self.net)?,
                Some(layout) => gradients = layout.backward(&loss, &self.net)?,
                None => {
                    let of_batch = GradientsParams::from_grads(loss.backward(), &self.net);
                    buffer.add(&self.net, of_batch)?;
                }
            }
        }
        if self.layout.is_none() {
            gradients = buffer.take_sum();
        }
        self.net = self.optim.step(self.rate, self.net, gradients)?;
        Ok(self)
    }

    /// Notes the loss of a model without gradients.
    fn evaluate(&mut self, net: &Net) {
        let tokens = self.tokens(&self.world.device().clone().inner());
        let by = (&self.shape, Slices(Some(self.world.comm())));
        self.seen.push(bits(&net.valid().evaluate(by, tokens)));
    }

    fn reload(mut self, load: Load, path: &Path) -> Result<Self> {
        // One file or a folder of parts, in turn: at different paths.
        let in_parts = !self.loads.is_multiple_of(2);
        let path = &path.with_extension(if in_parts { "parts" } else { "bpk" });
        let saver = Saver::new();
        let mut saver = if in_parts { saver.with_parts() } else { saver };
        saver.save(path, &self.net, &self.optim, &self.passes)?;
        saver.wait()?;
        // Rank 0 completes the parts, without telling.
        self.world.comm().barrier()?;
        self.loads += 1;
        self.shape.has_evaluated ^= matches!(load, Load::Matching);
        let prepare = |net| match load {
            Load::Weights => checkpoint::load_weights(path, net),
            Load::Run | Load::Matching => Ok(net),
        };
        let (by, is_divided) = ((self.trial, &self.shape), self.layout.is_some());
        let (layout, net, optim) =
            start(by, self.world, &self.config, is_divided, self.loads, prepare)?;
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
                (self.net, self.optim, passes, differences) =
                    checkpoint::load_matching(path, net, optim)?;
                self.seen.push(format!("{differences:?}").into_bytes());
                passes
            }
        };
        assert_eq!(self.passes, passes, "the progress is that of the run");
        self.frozen.clear();
        // They belong to the division before.
        (self.layout, self.teacher, self.average) = (layout, None, None);
        Ok(self)
    }

    fn call(mut self, call: &Call, path: &Path) -> Result<Self> {
        match call {
            Call::Train { batches } => return self.train(*batches),
            Call::Reload(load) => return self.reload(*load, path),
            Call::Freeze(index) => {
                let index = index % self.net.layers.len();
                // A layer that was frozen when the optimizer was made is not trained later.
                if self.shape.frozen != Some(index) {
                    let layer = self.net.layers.remove(index);
                    let layer = match self.frozen.remove(&index) {
                        true => layer.set_require_grad(true),
                        false => {
                            self.frozen.insert(index);
                            layer.no_grad()
                        }
                    };
                    self.net.layers.insert(index, layer);
                }
            }
            Call::Evaluate => {
                let net = self.net.clone();
                self.evaluate(&net);
            }
            Call::Discard { is_accumulated } => {
                let loss = self.loss();
                if let Some(layout) = &self.layout {
                    if *is_accumulated {
                        layout.accumulate(&loss, &self.net)?;
                    }
                    layout.discard()?;
                }
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

    /// Everything that was seen, and the weights.
    fn end(mut self) -> Result<Vec<Vec<u8>>> {
        self.seen.extend(self.weights()?);
        Ok(self.seen)
    }
}

/// A model and an optimizer that are made anew, other ones after each load. The whole model is
/// prepared by a function.
fn start(
    (trial, shape): (&Trial, &Shape),
    world: &World,
    config: &DistMuonConfig,
    is_divided: bool,
    loads: usize,
    prepare: impl Fn(Net) -> Result<Net>,
) -> Result<(Option<Layout>, Net, DistModuleOptimizer)> {
    let net = prepare(Net::new(shape, loads as u64, trial.half, world.device()))?;
    let expecting = config.muon.clone().expect(Expectation::OncePerStep);
    // Without a matrix that Muon updates, nothing can be expected.
    let muon = if expecting.route(&net).is_ok() { expecting } else { config.muon.clone() };
    let config = &config.clone().with_muon(muon);
    if !is_divided {
        let optim = config.init(world, &net)?;
        return Ok((None, net, optim));
    }
    let division = &trial.divisions[loads % trial.divisions.len()];
    let config = &config.clone().with_balancing(division.balancing);
    let layout = division.layout(world, config, trial)?;
    let net = layout.shard(net)?;
    let optim = config.init_on(&layout, &net)?;
    Ok((Some(layout), net, optim))
}

/// The losses and weights of each rank, as bits.
fn seen(trial: &Trial, is_divided: bool) -> Result<Vec<Vec<Vec<u8>>>> {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let ranks = if trial.is_cut && !is_divided { 1 } else { trial.ranks };
    ranks_here(ranks, |world| {
        let world = with_checkpoints(&world);
        let run = Run::new(trial, &world, is_divided)?;
        trial.calls.iter().try_fold(run, |run, call| run.call(call, &path))?.end()
    })
}

/// Reduced cases of faults that random ones have found: a layer that was frozen during a step was
/// not trained again, a clone shared that it was frozen on some ranks only, and ranks with nothing
/// of a parameter did not gather it ahead.
fn sequences_that_went_wrong_train_as_ranks_with_all_parameters() {
    if !is_flex() {
        return excused("a device that computes a matrix of a batch otherwise than alone");
    }
    let train = |batches| Call::Train { batches };
    let freeze = || Call::Freeze(0);
    for (ranks, kinds, uses, calls) in [
        (2, vec![2], vec![0], vec![train(1), freeze(), train(1), freeze(), train(1)]),
        (4, vec![2], vec![0], vec![train(3), Call::Teach { is_read: false }, freeze(), train(1)]),
        (4, vec![0, 0], vec![0, 1, 0], vec![train(3), train(3)]),
    ] {
        if !worlds::has(&ranks) {
            continue;
        }
        let shape = Shape { kinds, uses, frozen: None, has_head: true, has_evaluated: false };
        for (keep, in_rows) in
            [(Keep::Weights, false), (Keep::Nothing, false), (Keep::Nothing, true)]
        {
            let division = Division {
                is_owned: true,
                in_rows,
                overlaps: true,
                on_nodes: true,
                keep,
                limits_mb: [Some(64.0), None],
                small_elements: 16,
                allows_unused: false,
                balancing: Balancing::Greedy,
                cuts: [None; 3],
            };
            compare(&Trial {
                ranks,
                is_cut: false,
                half: None,
                shape: shape.clone(),
                divisions: vec![division],
                publish: Publish::AtFirstUse,
                max_norm: None,
                calls: calls.clone(),
            })
            .unwrap_or_else(|error| {
                panic!("{ranks} ranks, {calls:?}, {keep:?}, in rows: {in_rows}: {error}")
            });
        }
    }
}

fn sequences_of_calls_train_as_ranks_with_all_parameters() {
    if !is_flex() {
        return excused("a device that computes a matrix of a batch otherwise than alone");
    }
    let cases = std::env::var(CASES).ok();
    let cases = cases.map(|cases| cases.parse().expect("DISTMUON_HUNT is a number of cases"));
    let config = Config {
        cases: cases.unwrap_or(FEW),
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    let mut runner = match cases {
        Some(_) => TestRunner::new(config),
        None => {
            let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
            TestRunner::new_with_rng(config, rng)
        }
    };
    let outcome = runner.run(&trials(), |trial| {
        if !worlds::has(&trial.ranks) {
            return Err(TestCaseError::reject("fewer ranks"));
        }
        // Before it is made smaller, which may take long.
        compare(&trial).inspect_err(|error| println!("{error}: {trial:?}"))
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Fails if a rank of the divided model has seen something else than one with all parameters.
fn compare(trial: &Trial) -> std::result::Result<(), TestCaseError> {
    let failed = |kind: &'static str| {
        move |error: distmuon::Error| TestCaseError::fail(format!("{kind}: {error}"))
    };
    let expected = seen(trial, false).map_err(failed("with all parameters"))?;
    let divided = seen(trial, true).map_err(failed("divided"))?;
    // One rank has what ranks with slices have in common.
    let expected = expected.iter().cycle();
    for (rank, (expected, divided)) in expected.zip(&divided).enumerate() {
        let differs = expected.iter().zip(divided).position(|(a, b)| a != b);
        let lengths = (expected.len(), divided.len());
        prop_assert!(
            differs.is_none() && lengths.0 == lengths.1,
            "rank {rank}: {differs:?} of {lengths:?} differs"
        );
    }
    Ok(())
}
