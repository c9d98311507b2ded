//! A hunt for runs that go wrong in silence: random models, layouts and sequences of calls, each
//! compared with ranks that have all parameters.

use std::fmt::{Debug, Formatter};
use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::{
    Axis, DistModuleOptimizer, DistMuonConfig, Keep, Layout, Mesh, Publish,
};
use distmuon::{GradientBuffer, MuonConfig, Result, RoutingRule};
use distmuon_testing::device::is_flex;
use distmuon_testing::excused;
use distmuon_testing::models::{Fixed, bits, weights};
use distmuon_testing::worlds::{self, Case, Folder, cases};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::owned::with_checkpoints;
use crate::ranks_here;

pub const IN_PROCESS: &[Case] = cases![sequences_of_calls_train_as_ranks_with_all_parameters];

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
    fn new(shape: &Shape, seed: u64, device: &Device) -> Self {
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
        let mut net = net.map(&mut Fixed::new(seed));
        if let Some(frozen) = shape.frozen {
            let layer = net.layers.remove(frozen);
            net.layers.insert(frozen, layer.no_grad());
        }
        net
    }

    fn features(&self, shape: &Shape, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        shape.uses.iter().fold(x, |x, index| match &self.layers[*index] {
            Layer::Dense(linear) => relu(linear.forward(x)),
            Layer::Norm(norm) => norm.forward(x),
            Layer::Feed(feed) => feed.forward(x),
            Layer::Stack(stack) => {
                let matrix = stack.matrices.val().mean_dim(0).squeeze_dim::<2>(0);
                x.clone() + x.matmul(matrix.unsqueeze())
            }
        })
    }

    fn loss(&self, shape: &Shape, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.features(shape, tokens);
        let logits = match &self.head {
            Some(head) => head.forward(x),
            None => x.matmul(self.embedding.weight.val().transpose().unsqueeze()),
        };
        (logits - 0.5).square().mean()
    }

    fn evaluate(&self, shape: &Shape, tokens: Tensor<2, Int>) -> Tensor<1> {
        match &self.evaluated {
            Some(linear) => linear.forward(self.features(shape, tokens)).square().mean(),
            None => self.loss(shape, tokens),
        }
    }
}

/// The division of a model. All ranks are an axis, or they are two nodes with an axis of each.
#[derive(Debug, Clone)]
struct Division {
    is_owned: bool,
    overlaps: bool,
    on_nodes: bool,
    keep: Keep,
    ahead_mb: f64,
    small_elements: usize,
    allows_unused: bool,
}

impl Division {
    fn layout(&self, world: &World, config: &DistMuonConfig) -> Result<Layout> {
        let nodes = [Axis::data("node", 2), Axis::data("gpu", world.size() / 2)];
        // Means over a node and over nodes round twice, unless they divide by powers of two.
        let (mesh, axis) = match self.on_nodes && matches!(world.size(), 2 | 4) {
            true => (Mesh::new(world, nodes)?, "gpu"),
            false => (Mesh::flat(world), "dp"),
        };
        let layout = Layout::new(&mesh).with_muon(config.muon.clone());
        let layout = layout.with_keep(self.keep).with_ahead_mb(self.ahead_mb);
        let layout = layout.with_small_elements(self.small_elements);
        let layout = if self.is_owned { layout.owned(axis) } else { layout };
        let layout = if self.overlaps { layout.overlap_backward() } else { layout };
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
    Teach,
    /// Updates the average of the weights, or begins one.
    Average,
    /// Saves, and loads into a model and an optimizer that are made anew, with the next division.
    Reload,
    Rate(f64),
}

#[derive(Clone)]
struct Trial {
    ranks: usize,
    shape: Shape,
    divisions: Vec<Division>,
    publish: Publish,
    max_norm: Option<f64>,
    calls: Vec<Call>,
}

impl Debug for Trial {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { ranks, shape, divisions, publish, max_norm, calls } = self;
        write!(f, "{ranks} ranks, {shape:?}, {divisions:?}, {publish:?}, {max_norm:?}, {calls:?}")
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
    let ahead_mb = prop_oneof![Just(0.0), Just(0.0005), Just(64.0)];
    let flags = any::<[bool; 4]>();
    let small = prop_oneof![Just(0_usize), Just(16), Just(64), Just(4096)];
    let division = (flags, keep, ahead_mb, small).prop_map(|(flags, keep, ahead_mb, small)| {
        let [is_owned, overlaps, on_nodes, allows_unused] = flags;
        let small_elements = small;
        Division { is_owned, overlaps, on_nodes, keep, ahead_mb, small_elements, allows_unused }
    });
    let call = prop_oneof![
        4 => (1..4_usize).prop_map(|batches| Call::Train { batches }),
        1 => Just(Call::Evaluate),
        1 => any::<bool>().prop_map(|is_accumulated| Call::Discard { is_accumulated }),
        1 => Just(Call::Teach),
        1 => Just(Call::Average),
        1 => Just(Call::Reload),
        1 => (1..5_u8).prop_map(|rate| Call::Rate(0.01 * f64::from(rate))),
    ];
    let publish = prop_oneof![Just(Publish::Now), Just(Publish::AtFirstUse)];
    let max_norm = proptest::option::weighted(0.3, Just(0.05));
    (1..7_usize, shape, vec(division, 1..3), publish, max_norm, vec(call, 1..14)).prop_map(
        |(ranks, mut shape, divisions, publish, max_norm, calls)| {
            shape.limit_uses(calls.iter().any(|call| matches!(call, Call::Teach)));
            Trial { ranks, shape, divisions, publish, max_norm, calls }
        },
    )
}

/// A run on a rank, with a layout or with all parameters.
struct Run<'a> {
    trial: &'a Trial,
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
        let config = DistMuonConfig::new().with_muon(muon).with_small_elements(64);
        let config = config.with_bucket_mb(Some(0.002)).with_publish(trial.publish);
        let config = config.with_max_norm(trial.max_norm);
        let (layout, net, optim) = start(trial, world, &config, is_divided, 0)?;
        let (teacher, average) = (None, None);
        let (loads, rate, passes, seen) = (0, 0.01, 0, vec![]);
        Ok(Self {
            trial,
            world,
            config,
            loads,
            layout,
            net,
            optim,
            teacher,
            average,
            rate,
            passes,
            seen,
        })
    }

    fn tokens(&mut self, device: &Device) -> Tensor<2, Int> {
        self.passes += 1;
        let (rank, pass) = (self.world.rank(), self.passes);
        let token = |index: usize| ((index * (7 + pass) + rank * 5 + pass * pass) % TOKENS) as i64;
        Tensor::from_data(TensorData::new((0..12).map(token).collect::<Vec<_>>(), [2, 6]), device)
    }

    /// The loss of the next pass, which is noted.
    fn loss(&mut self) -> Tensor<1> {
        let tokens = self.tokens(self.world.device());
        let shape = &self.trial.shape;
        let mut loss = self.net.loss(shape, tokens.clone());
        if let Some(teacher) = &self.teacher {
            loss = loss + teacher.loss(shape, tokens) * 0.25;
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
        self.seen.push(bits(&net.valid().evaluate(&self.trial.shape, tokens)));
    }

    fn reload(mut self, path: &Path) -> Result<Self> {
        self.optim.save(path, &self.net, &self.passes)?;
        self.loads += 1;
        let is_divided = self.layout.is_some();
        let (layout, net, optim) =
            start(self.trial, self.world, &self.config, is_divided, self.loads)?;
        let passes: usize;
        (self.net, self.optim, passes) = optim.load(path, net)?;
        assert_eq!(self.passes, passes, "the progress is that of the run");
        // They belong to the division before.
        (self.layout, self.teacher, self.average) = (layout, None, None);
        Ok(self)
    }

    fn call(mut self, call: &Call, path: &Path) -> Result<Self> {
        match call {
            Call::Train { batches } => return self.train(*batches),
            Call::Reload => return self.reload(path),
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
            Call::Teach => self.teacher = Some(self.net.clone()),
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

    /// Everything that was seen, and the weights.
    fn end(mut self) -> Result<Vec<Vec<u8>>> {
        let whole = match &self.layout {
            Some(layout) => layout.unshard(&self.net)?,
            None => self.net,
        };
        self.seen.extend(weights(&whole));
        Ok(self.seen)
    }
}

/// A model and an optimizer that are made anew, other ones after each load.
fn start(
    trial: &Trial,
    world: &World,
    config: &DistMuonConfig,
    is_divided: bool,
    loads: usize,
) -> Result<(Option<Layout>, Net, DistModuleOptimizer)> {
    let net = Net::new(&trial.shape, loads as u64, world.device());
    if !is_divided {
        let optim = config.init(world, &net)?;
        return Ok((None, net, optim));
    }
    let division = &trial.divisions[loads % trial.divisions.len()];
    let layout = division.layout(world, config)?;
    let net = layout.shard(net)?;
    let optim = config.init_on(&layout, &net)?;
    Ok((Some(layout), net, optim))
}

/// The losses and weights of each rank, as bits.
fn seen(trial: &Trial, is_divided: bool) -> Result<Vec<Vec<Vec<u8>>>> {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    ranks_here(trial.ranks, |world| {
        let world = with_checkpoints(&world);
        let run = Run::new(trial, &world, is_divided)?;
        trial.calls.iter().try_fold(run, |run, call| run.call(call, &path))?.end()
    })
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
        let failed = |kind: &'static str| {
            move |error: distmuon::Error| TestCaseError::fail(format!("{kind}: {error}"))
        };
        let expected = seen(&trial, false).map_err(failed("with all parameters"))?;
        let divided = seen(&trial, true).map_err(failed("divided"))?;
        for (rank, (expected, divided)) in expected.iter().zip(&divided).enumerate() {
            let differs = expected.iter().zip(divided).position(|(a, b)| a != b);
            let lengths = (expected.len(), divided.len());
            prop_assert!(
                differs.is_none() && lengths.0 == lengths.1,
                "rank {rank}: {differs:?} of {lengths:?} differs"
            );
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}
