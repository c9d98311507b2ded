//! Matrices of a stack without a gradient on any rank, on every layout: they stay as they are, and
//! have the bits of layers of their own.

use std::ops::Range;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistMuonConfig, Keep, Layout, Mesh, Place};
use distmuon::{MomentumConfig, MuonConfig, Result, RoutingRule, Schedule, WeightDecay};
use distmuon_testing::models::assert_same_weights;
use distmuon_testing::worlds::{self, Case, cases};

use crate::owned::with_checkpoints;
use crate::ranks;

pub const EVERYWHERE: &[Case] = cases![experts_without_a_gradient_stay_as_they_are_on_every_layout];

const SHAPE: [usize; 3] = [4, 6, 10];
const RANKS: usize = 4;
const STEPS: usize = 8;

/// The same matrices as a stack, and as layers of their own.
#[derive(Module, Debug)]
struct Experts {
    stack: Param<Tensor<3>>,
    layers: Vec<Param<Tensor<2>>>,
}

/// Values of a matrix that depend on a number. Half precision has them, and sums of a few.
fn matrix(number: usize, device: &Device) -> Tensor<2> {
    let [_, m, n] = SHAPE;
    let value = |index: usize| ((index * 37 + number * 101 + index * index * 7) % 53) as f32;
    let values = (0..m * n).map(|index| (value(index) - 26.0) / 64.0).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(values, [m, n]), (device, DType::F32))
}

/// Every expert has momentum before it is idle for the first time. In one of the steps, all are,
/// and in the last ones none.
fn is_idle(expert: usize, step: usize) -> bool {
    step == 5 || (2..6).contains(&step) && (step + expert).is_multiple_of(3)
}

/// The sum of the gradients of some ranks. `None` for an idle expert.
fn gradient(expert: usize, step: usize, of: Range<usize>, device: &Device) -> Option<Tensor<2>> {
    let of_rank = |rank| matrix(20 * step + expert + 7 * rank + 5, device);
    (!is_idle(expert, step)).then(|| of.map(of_rank).reduce(|sum, more| sum + more).expect("one"))
}

impl Experts {
    fn new(dtype: DType, device: &Device) -> Self {
        let matrices: Vec<_> = (0..SHAPE[0]).map(|expert| matrix(expert, device)).collect();
        let layer = |matrix: &Tensor<2>| {
            Param::from_tensor(matrix.clone().cast(dtype).detach().require_grad())
        };
        let layers = matrices.iter().map(layer).collect();
        let stack = Tensor::stack::<3>(matrices, 0).cast(dtype).detach().require_grad();
        Self { stack: Param::from_tensor(stack), layers }
    }

    /// A loss whose gradients are those of a step: the stack's are zeros where a layer has none.
    fn loss(&self, step: usize, mesh: &Mesh, cut: Option<(&str, usize)>) -> Tensor<1> {
        let (stack, rank) = (self.stack.val(), mesh.data().rank());
        let (device, dtype) = (stack.device(), stack.dtype());
        // The rows of all ranks of an axis of data go to the rank that has the expert.
        let shared = match cut.and_then(|(axis, _)| mesh.group(axis)) {
            Some(group) if cut == Some(("ep", 0)) => {
                let first = rank - group.rank();
                first..first + group.size()
            }
            _ => rank..rank + 1,
        };
        let of_stack = (0..SHAPE[0]).map(|expert| {
            let gradient = gradient(expert, step, shared.clone(), &device);
            gradient.unwrap_or_else(|| matrix(0, &device) * 0.0)
        });
        let mut of_stack = Tensor::stack::<3>(of_stack.collect(), 0);
        if let Some((axis, dimension)) = cut {
            let group = mesh.group(axis).expect("an axis of the mesh");
            let at = |rank: usize| rank * SHAPE[dimension] / group.size();
            let (start, end) = (at(group.rank()), at(group.rank() + 1));
            of_stack = of_stack.narrow(dimension, start, end - start);
        }
        let mut loss = (stack * of_stack.cast(dtype)).sum();
        for (expert, layer) in self.layers.iter().enumerate() {
            if let Some(gradient) = gradient(expert, step, rank..rank + 1, &device) {
                loss = loss + (layer.val() * gradient.cast(dtype)).sum();
            }
        }
        loss
    }

    /// The values of the stack, matrix by matrix, which are those of the layers.
    fn matrices(&self, case: &str) -> Vec<Vec<f32>> {
        let values = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        let stack = self.stack.val().inner();
        let matrix = |(expert, layer): (usize, &Param<Tensor<2>>)| {
            let of_stack = values(stack.clone().narrow(0, expert, 1).squeeze_dim(0));
            assert_same_weights(case, &of_stack, &values(layer.val().inner()));
            of_stack
        };
        self.layers.iter().enumerate().map(matrix).collect()
    }
}

/// A layout of four ranks: its axes, the cut of the stack, and the rest.
type Divided =
    (&'static str, fn() -> Vec<Axis>, Option<(&'static str, usize)>, fn(Layout) -> Layout);

fn layouts() -> Vec<Divided> {
    let flat = || vec![Axis::data("dp", RANKS)];
    let nodes = || vec![Axis::data("node", 2), Axis::data("gpu", 2)];
    let experts = || vec![Axis::data("dp", 2), Axis::data("ep", 2)];
    let slices = || vec![Axis::data("dp", 2), Axis::model("tp", 2)];
    vec![
        ("plain", flat, None, |layout| layout),
        ("overlap", flat, None, Layout::overlap_backward),
        ("owned", flat, None, |layout| layout.owned("dp")),
        ("owned, kept", flat, None, |layout| layout.owned("dp").with_keep(Keep::Weights)),
        ("rows", flat, None, |layout| layout.rows("dp")),
        ("owned in nodes", nodes, None, |layout| layout.owned("gpu").overlap_backward()),
        ("rows in nodes", nodes, None, |layout| layout.rows("gpu")),
        ("experts", experts, Some(("ep", 0)), |layout| layout),
        ("owned experts", experts, Some(("ep", 0)), |layout| layout.owned("dp")),
        ("owned beside experts", experts, Some(("ep", 0)), |layout| layout.owned("ep")),
        ("rows of experts", experts, Some(("ep", 0)), |layout| layout.rows("dp")),
        ("slices of experts", slices, Some(("tp", 0)), |layout| layout.overlap_backward()),
        ("slices", slices, Some(("tp", 1)), |layout| layout),
        ("owned slices", slices, Some(("tp", 2)), |layout| layout.owned("dp")),
        ("rows of slices", slices, Some(("tp", 1)), |layout| layout.rows("dp")),
    ]
}

/// A momentum and a decay that stay as they are, and some that move in the first steps of each
/// matrix.
fn configs() -> [MuonConfig; 2] {
    let muon = |momentum: MomentumConfig, decay: Schedule| {
        MuonConfig::new()
            .with_momentum(momentum)
            .with_weight_decay(WeightDecay::Decoupled(decay))
            .with_rule(RoutingRule::muon("layers"))
            .with_rule(RoutingRule::muon("stack").batch())
    };
    let constant = MomentumConfig::new().with_momentum(0.9.into());
    let moving = Schedule::constant(0.6).linear(4, 0.95);
    let falling = Schedule::constant(0.3).linear(4, 0.1);
    [muon(constant, 0.2.into()), muon(moving.into(), falling)]
}

/// Trains on a layout. After every step, the matrices that were idle have their old values.
fn train(world: &World, divided: &Divided, muon: &MuonConfig, dtype: DType) -> Result<()> {
    let (name, axes, cut, change) = divided;
    let mesh = Mesh::new(world, axes())?;
    let layout = change(Layout::new(&mesh)).with_small_elements(1);
    let layout = match cut {
        Some((axis, dimension)) => layout.with_place(Place::shard("^stack$", *axis, *dimension)),
        None => layout,
    };
    let config = DistMuonConfig::new().with_muon(muon.clone()).with_check_every(1);
    let net = Experts::new(dtype, world.device());
    let mut before = net.matrices("at the start");
    let (mut net, mut optim) = config.start(&layout, net)?;
    for step in 0..STEPS {
        let grads = optim.backward(&net.loss(step, &mesh, *cut), &net)?;
        net = optim.step(0.05, net, grads)?;
        let case = format!("{name}, {dtype:?}, step {step}");
        let after = optim.layout().unshard(&net)?.matrices(&case);
        for expert in 0..SHAPE[0] {
            let moves = before[expert] != after[expert];
            assert_eq!(moves, !is_idle(expert, step), "{case}: expert {expert}");
        }
        before = after;
    }
    Ok(())
}

fn experts_without_a_gradient_stay_as_they_are_on_every_layout() {
    let [constant, moving] = configs();
    let mut cases = vec![(&moving, DType::BF16), (&constant, DType::F32), (&moving, DType::F32)];
    // The settings make no other calls.
    cases.truncate(if worlds::name() == "threads" { 3 } else { 1 });
    for divided in layouts() {
        for (muon, dtype) in &cases {
            let run =
                ranks(RANKS, |world| train(&with_checkpoints(&world), &divided, muon, *dtype));
            run.unwrap_or_else(|error| panic!("{}, {dtype:?}: {error}", divided.0));
        }
    }
}
