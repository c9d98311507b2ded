//! Certificates of equal runs on any ranks, engine and placement, and of runs that differ in
//! anything.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::certificate::Certificate;
use distmuon::distributed::{Axis, DistMuonConfig, Layout, Mesh, Place};
use distmuon::{MuonConfig, RoutingRule, World};
use distmuon_testing::models::Fixed;
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::owned::with_checkpoints;
use crate::ranks;

pub const EVERYWHERE: &[Case] = cases![
    one_two_and_four_ranks_have_equal_chains_in_any_placement,
    a_changed_setting_and_a_flipped_bit_change_the_chain,
    slices_of_equal_gradients_have_the_chain_of_whole_parameters,
];

const STEPS: usize = 4;

/// Two matrices and their biases.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self { first: linear(6, 10), second: linear(10, 7) }.map(&mut Fixed::new(5))
    }

    /// The loss of a layer after the other.
    fn of_input(&self, step: usize) -> Tensor<1> {
        let device = self.first.weight.device();
        let x = Tensor::<2>::full([3, 6], step as f64, (&device, DType::F32));
        self.second.forward(self.first.forward(x)).square().mean()
    }

    /// A loss whose gradients are the parameters times the step, also those of slices.
    fn of_elements(&self, step: usize) -> Tensor<1> {
        let layers = [&self.first, &self.second];
        let of_layer = |layer: &Linear| {
            let bias = layer.bias.as_ref().expect("the layer has a bias").val();
            layer.weight.val().square().sum() + bias.square().sum()
        };
        layers.map(of_layer).into_iter().reduce(|sum, more| sum + more).unwrap() * step as f64 * 0.5
    }

    /// The model with another lowest bit in one weight.
    fn flipped(mut self) -> Self {
        self.second.weight = self.second.weight.map(|weight| {
            let mut values: Vec<f32> = weight.to_data().iter::<f32>().collect();
            values[8] = f32::from_bits(values[8].to_bits() ^ 1);
            let data = TensorData::new(values, weight.shape());
            Tensor::from_data(data, (&weight.device(), DType::F32)).require_grad()
        });
        self
    }
}

fn muon(steps: usize) -> MuonConfig {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let iteration = muon.newton_schulz.clone().with_steps(Some(steps));
    muon.with_newton_schulz(iteration)
}

/// The certificate of a run on ranks with equal gradients, whose sums are exact. A bit of the model
/// flips before a step, if there is one.
fn certified(
    count: usize,
    muon: &MuonConfig,
    layout: impl Fn(&World) -> Layout + Sync,
    flips: Option<usize>,
) -> Certificate {
    certified_by(Net::of_input, count, muon, layout, flips)
}

/// The same with a loss.
fn certified_by(
    loss: fn(&Net, usize) -> Tensor<1>,
    count: usize,
    muon: &MuonConfig,
    layout: impl Fn(&World) -> Layout + Sync,
    flips: Option<usize>,
) -> Certificate {
    let config = DistMuonConfig::new().with_muon(muon.clone()).with_small_elements(1);
    let folder = Folder::create();
    let path = folder.path().join("run.json");
    let written = ranks(count, |world| {
        let world = with_checkpoints(&world);
        let layout = layout(&world).with_muon(muon.clone());
        let mut certificate = Certificate::new(muon, "random numbers");
        certificate.computed_by(world.describe()?);
        let whole = Net::new(world.device());
        certificate.record(0, &whole)?;
        let mut net = layout.shard(whole)?;
        let mut optim = config.init_on(&layout, &net)?;
        for step in 1..=STEPS {
            if flips == Some(step) {
                net = net.flipped();
            }
            let grads = optim.backward(&loss(&net, step), &net)?;
            net = optim.step(0.01, net, grads)?;
            certificate.record(step, &layout.unshard(&net)?)?;
        }
        if world.is_main() {
            certificate.write(&path)?;
        }
        Ok(())
    });
    written.unwrap();
    Certificate::read(&path).unwrap()
}

/// A division of all parameters, however small.
fn divided(world: &World, divide: fn(Layout) -> Layout) -> Layout {
    divide(Layout::from(world)).with_small_elements(0)
}

fn one_two_and_four_ranks_have_equal_chains_in_any_placement() {
    let expected = certified(1, &muon(5), |world| Layout::from(world), None);
    for count in [2, 4].into_iter().filter(worlds::has) {
        let replicated = certified(count, &muon(5), |world| Layout::from(world), None);
        assert_eq!(replicated.links(), expected.links(), "{count} ranks");
        assert_ne!(replicated.ranks(), expected.ranks(), "they are written down");
        let owned =
            certified(count, &muon(5), |world| divided(world, |layout| layout.owned("dp")), None);
        assert_eq!(owned.links(), expected.links(), "{count} ranks, owned");
        let rows =
            certified(count, &muon(5), |world| divided(world, |layout| layout.rows("dp")), None);
        assert_eq!(rows.links(), expected.links(), "{count} ranks, in rows");
        // Two ranks of a node add up and gather among each other first.
        let on_nodes = |world: &World| {
            let node = format!("node {}", world.rank() / 2);
            Layout::from(&world.clone().by_node(&node).expect("all ranks have nodes"))
        };
        let nodes = certified(count, &muon(5), on_nodes, None);
        assert_eq!(nodes.links(), expected.links(), "{count} ranks, on nodes");
    }
}

/// Weights in columns or rows, of uneven lengths, alone and owned.
fn slices_of_equal_gradients_have_the_chain_of_whole_parameters() {
    let of = |count, layout: &(dyn Fn(&World) -> Layout + Sync)| {
        certified_by(Net::of_elements, count, &muon(5), layout, None)
    };
    let expected = of(1, &|world| Layout::from(world));
    for count in [2, 4].into_iter().filter(worlds::has) {
        for dimension in [0, 1] {
            for replicas in [1, 2] {
                let cut = |world: &World| {
                    let axes =
                        [Axis::data("dp", replicas), Axis::model("tp", world.size() / replicas)];
                    let mesh = Mesh::new(world, axes).expect("the axes have all ranks");
                    let layout = Layout::new(&mesh).with_small_elements(0);
                    layout.with_place(Place::shard("weight$", "tp", dimension))
                };
                let case = format!("{count} ranks, {replicas} replicas, dimension {dimension}");
                assert_eq!(of(count, &cut).links(), expected.links(), "{case}");
                let owned = of(count, &|world| cut(world).owned("dp"));
                assert_eq!(owned.links(), expected.links(), "{case}, owned");
            }
        }
    }
}

fn a_changed_setting_and_a_flipped_bit_change_the_chain() {
    let of = |steps, flips| certified(2, &muon(steps), |world| Layout::from(world), flips);
    let expected = of(5, None);
    assert_eq!(of(5, None).chain(), expected.chain(), "it can be repeated");
    let other = of(4, None);
    assert_ne!(other.chain(), expected.chain());
    assert_eq!(other.links()[0].weights, expected.links()[0].weights);
    assert_ne!(other.links()[0].chain, expected.links()[0].chain, "from its beginning");
    for step in 1..=STEPS {
        let flipped = of(5, Some(step));
        assert_eq!(flipped.links()[..step], expected.links()[..step], "before step {step}");
        assert_ne!(flipped.links()[step].chain, expected.links()[step].chain, "step {step}");
        assert_ne!(flipped.chain(), expected.chain());
    }
}
