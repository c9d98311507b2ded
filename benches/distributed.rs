//! Times of a step, and of an iteration by placement, with one core for each rank.
//!
//! ```text
//! cargo bench --bench distributed
//! ```
//!
//! The first table has a step of the matrices of a GPT-2 layer of width 768, on one rank and on
//! two. The second has an iteration of a small network, with its passes, on two and four ranks: of
//! an optimizer with which every rank gathers and computes everything, and of this crate's, with
//! one cause of its gains after the other, and by placement. All runs alternate, so that a change
//! of the machine's clock affects all of them.

mod common;

use std::time::Instant;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use comfy_table::{Table, presets};
use common::{LAYER, Matrices, median};
use distmuon::comm::{Communicator, World};
use distmuon::distributed::plan::Balancing;
use distmuon::distributed::{
    Axis, DistModuleOptimizer, DistMuonConfig, Layout, Mesh, Place as Rule, Publish,
};
use distmuon::{
    Coefficients, IterationDtype, KernelPolicy, MuonConfig, NewtonSchulzConfig, Result,
    RoutingRule, parallel,
};
use distmuon_testing::naive::Naive;
use distmuon_testing::watched::counted;

const RUNS: usize = 5;
const STEPS: usize = 2;

/// Measures the seconds of a step on a number of ranks.
fn step(ranks: usize) -> f64 {
    let newton_schulz = NewtonSchulzConfig::new()
        .with_coefficients(Coefficients::KellerJordan)
        .with_dtype(IterationDtype::F32);
    let muon = MuonConfig::new()
        .with_rule(RoutingRule::muon("matrices"))
        .with_newton_schulz(newton_schulz);
    let config = DistMuonConfig::new().with_muon(muon);
    let run = |world: World| -> Result<f64> {
        let mut layer = world.broadcast(Matrices::new(&LAYER, world.device()))?;
        let mut optim = config.init(&world, &layer)?;
        let gradients = layer.gradients();
        layer = optim.step(1e-3, layer, gradients)?;
        world.comm().barrier()?;
        let start = Instant::now();
        for _ in 0..STEPS {
            let gradients = layer.gradients();
            layer = optim.step(1e-3, layer, gradients)?;
        }
        world.comm().barrier()?;
        Ok(start.elapsed().as_secs_f64() / STEPS as f64)
    };
    on_ranks(ranks, run)
}

/// Runs a function on ranks with one core each, and returns the result of the first.
fn on_ranks<T: Send>(ranks: usize, run: impl Fn(World) -> Result<T> + Sync) -> T {
    let one_core = |world| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        pool.expect("a thread can be started").install(|| run(world))
    };
    World::threads(World::devices(ranks), one_core).expect("no rank fails").swap_remove(0)
}

/// The width of the network, and the rows of a rank's batch.
const WIDTH: usize = 512;
const ROWS: usize = 64;

/// Four blocks of two layers.
#[derive(Module, Debug)]
struct Net {
    up: Vec<Linear>,
    down: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layers = |inputs, outputs| {
            let layer = || LinearConfig::new(inputs, outputs).with_bias(false).init(device);
            (0..4).map(|_| layer()).collect()
        };
        Self { up: layers(WIDTH, 4 * WIDTH), down: layers(4 * WIDTH, WIDTH) }
    }

    /// A loss, of slices if the layers are those of a group.
    fn loss(&self, group: Option<&Communicator>, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([ROWS, WIDTH], device);
        let blocks = self.up.iter().zip(&self.down);
        let output = blocks.fold(x, |x, (up, down)| {
            let hidden = group.iter().fold(x.clone(), |x, group| parallel::enter(x, group));
            let output = down.forward(relu(up.forward(hidden)));
            x + group.iter().fold(output, |output, group| parallel::leave(output, group))
        });
        output.square().mean()
    }
}

/// A way to train the network on ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Every rank gathers all gradients and updates everything, with full products or with those
    /// of this crate.
    Naive(KernelPolicy),
    /// Every matrix is iterated by its owner: full products, owners in turns.
    Owners(KernelPolicy, Balancing),
    /// Sent during the passes.
    Hidden,
    /// Divided among owners between steps.
    Owned,
    /// Cut into slices.
    Cut,
}

impl Way {
    const ALL: [(Way, &'static str); 8] = [
        (Way::Naive(KernelPolicy::Portable), "everything on every rank, full products"),
        (Way::Naive(KernelPolicy::Auto), "everything on every rank"),
        (Way::Owners(KernelPolicy::Portable, Balancing::BlockCyclic), "owners, full products"),
        (Way::Owners(KernelPolicy::Auto, Balancing::BlockCyclic), "owners, in turns"),
        (Way::Owners(KernelPolicy::Auto, Balancing::Greedy), "replicated"),
        (Way::Hidden, "replicated, during the passes"),
        (Way::Owned, "owned"),
        (Way::Cut, "cut among two ranks"),
    ];

    /// The seconds of an iteration, and the bytes that a rank sends in it.
    fn measure(self, ranks: usize) -> (f64, usize) {
        on_ranks(ranks, |world| self.run(&world))
    }

    fn layout(self, world: &World) -> Result<Layout> {
        let slices = if self == Self::Cut { 2 } else { 1 };
        let axes = [Axis::data("dp", world.size() / slices), Axis::model("tp", slices)];
        let layout = Layout::new(&Mesh::new(world, axes)?);
        Ok(match self {
            Self::Cut => layout
                .with_place(Rule::shard("^up", "tp", 1))
                .with_place(Rule::shard("^down", "tp", 0)),
            Self::Owned => layout.owned("dp"),
            Self::Hidden => layout.overlap_backward(),
            Self::Naive(_) | Self::Owners(..) => layout,
        })
    }

    fn config(self) -> DistMuonConfig {
        let (kernels, balancing) = match self {
            Self::Naive(kernels) => (kernels, Balancing::Greedy),
            Self::Owners(kernels, balancing) => (kernels, balancing),
            Self::Hidden | Self::Owned | Self::Cut => (KernelPolicy::Auto, Balancing::Greedy),
        };
        let publish = if self == Self::Hidden { Publish::AtFirstUse } else { Publish::Now };
        DistMuonConfig::new()
            .with_muon(MuonConfig::new().with_kernels(kernels))
            .with_balancing(balancing)
            .with_publish(publish)
    }

    fn run(self, world: &World) -> Result<(f64, usize)> {
        let (comm, traffic) = counted(world.communicator());
        let device = world.device().clone().gradient_checkpointing();
        let world = World::new(comm, device);
        let layout = self.layout(&world)?;
        let mut net = layout.shard(Net::new(world.device()))?;
        let config = self.config();
        let mut optim = match self {
            Self::Naive(_) => Optim::Naive(Box::new(Naive::new(&world, &config, &net)?)),
            _ => Optim::Sharded(Box::new(config.init_on(&layout, &net)?)),
        };
        let group = layout.mesh().group("tp").filter(|_| self == Self::Cut);
        let mut start = Instant::now();
        for iteration in 0..=STEPS {
            if iteration == 1 {
                // Without the first one, which makes what is made once.
                world.comm().barrier()?;
                traffic.lock().expect("no holder of the lock panics").clear();
                start = Instant::now();
            }
            let gradients = layout.backward(&net.loss(group, world.device()), &net)?;
            net = optim.step(net, gradients)?;
        }
        if let Optim::Sharded(optim) = &optim {
            optim.finish_publication()?;
        }
        let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
        let sent: usize = traffic.lock().expect("no holder of the lock panics").values().sum();
        world.comm().barrier()?;
        Ok((seconds, sent / STEPS))
    }
}

enum Optim {
    Naive(Box<Naive>),
    Sharded(Box<DistModuleOptimizer>),
}

impl Optim {
    fn step(&mut self, net: Net, gradients: GradientsParams) -> Result<Net> {
        match self {
            Self::Naive(optim) => optim.step(1e-3, net, gradients),
            Self::Sharded(optim) => optim.step(1e-3, net, gradients),
        }
    }
}

fn steps() -> Table {
    let counts = [1, 2];
    let runs: Vec<_> = (0..RUNS).map(|_| counts.map(step)).collect();
    let seconds = |index: usize| median(runs.iter().map(|run| run[index]).collect());
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["ranks", "step, ms", "of one rank"]);
    for (index, ranks) in counts.into_iter().enumerate() {
        table.add_row([
            ranks.to_string(),
            format!("{:.0}", 1e3 * seconds(index)),
            format!("{:.3}", seconds(index) / seconds(0)),
        ]);
    }
    table
}

fn iterations(ranks: usize) -> Table {
    let run = |_| Way::ALL.map(|(way, _)| way.measure(ranks));
    let runs: Vec<_> = (0..RUNS).map(run).collect();
    let seconds = |index: usize| median(runs.iter().map(|run| run[index].0).collect());
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let header = format!("{ranks} ranks");
    table.set_header([&header, "iteration, ms", "of the first", "sent by a rank, MB"]);
    for (index, (_, name)) in Way::ALL.into_iter().enumerate() {
        table.add_row([
            name.to_owned(),
            format!("{:.0}", 1e3 * seconds(index)),
            format!("{:.2}", seconds(index) / seconds(0)),
            format!("{:.1}", runs[0][index].1 as f64 / 1e6),
        ]);
    }
    table
}

fn main() {
    println!("{}", steps());
    for ranks in [2, 4] {
        println!("\n{}", iterations(ranks));
    }
}
