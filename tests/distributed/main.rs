//! N ranks against one, on every engine: equal bits, equal errors, divided memory, and checkpoints
//! that continue on other numbers of ranks.

mod audits;
mod certificates;
mod checkpoint_parts;
mod checkpoints;
mod collectives;
mod custom;
mod cuts;
mod drift;
mod idle_experts;
mod layer_optimizers;
mod linear_messages;
mod nodes;
mod owned;
mod parallel;
mod parts;
mod precision;
mod publication;
mod qk_clip;
mod random_cases;
mod rejections;
mod schedules;
mod shapes;
mod steps;
mod unused;

use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use distmuon::comm::World;
use distmuon::distributed::DistMuonConfig;
use distmuon::{Expectation, FirstLinear, MuonConfig, Result, RoutingRule};
use distmuon_testing::excused;
#[cfg(feature = "cuda")]
use distmuon_testing::host;
use distmuon_testing::models::{Fixed, gradients, values, weights};
use distmuon_testing::worlds::{self, Case};
use libtest_mimic::Arguments;
use serde::{Serialize, de::DeserializeOwned};

/// Cases in which every rank returns normally: they also run on ranks that are processes.
fn everywhere() -> Vec<Case> {
    let cases = [steps::EVERYWHERE, shapes::EVERYWHERE, collectives::EVERYWHERE, nodes::EVERYWHERE];
    let more =
        [checkpoints::EVERYWHERE, schedules::EVERYWHERE, custom::EVERYWHERE, drift::EVERYWHERE];
    let others = [audits::EVERYWHERE, checkpoint_parts::EVERYWHERE];
    [&cases[..], &more, &others].concat().concat()
}

/// Such cases of updates, which an engine does not see.
fn updates() -> Vec<Case> {
    [parts::EVERYWHERE, precision::EVERYWHERE, qk_clip::EVERYWHERE].concat()
}

/// Such cases of parameters whose messages are sent in forward and backward passes.
fn passes() -> Vec<Case> {
    let cases =
        [owned::EVERYWHERE, publication::EVERYWHERE, parallel::EVERYWHERE, cuts::EVERYWHERE];
    let more = [unused::EVERYWHERE, layer_optimizers::EVERYWHERE, idle_experts::EVERYWHERE];
    [&cases[..], &more, &[certificates::EVERYWHERE]].concat().concat()
}

/// Cases whose world fails, or that need all ranks in this process.
fn in_process() -> Vec<Case> {
    let cases = [steps::IN_PROCESS, checkpoints::IN_PROCESS, rejections::IN_PROCESS];
    let more = [custom::IN_PROCESS, drift::IN_PROCESS, layer_optimizers::IN_PROCESS];
    let others = [audits::IN_PROCESS, checkpoint_parts::IN_PROCESS];
    [&cases[..], &more, &others].concat().concat()
}

/// Configures the default type of the device according to `DISTMUON_TEST_FLOAT`, since nothing in
/// the crate may depend on that type. A process can do so once, before it uses the device.
fn configure() {
    let dtype = match std::env::var("DISTMUON_TEST_FLOAT").as_deref() {
        Ok("bf16") => FloatDType::BF16,
        Ok("f64") => FloatDType::F64,
        Ok(other) => panic!("DISTMUON_TEST_FLOAT is {other}: set it to bf16 or f64"),
        Err(_) => return,
    };
    let mut device = Device::default();
    device.configure(dtype).expect("the device supports the type");
    let one = Tensor::<1>::ones([1], &device);
    assert_eq!(FloatDType::from(one.dtype()), dtype, "the device is configured");
}

fn main() {
    configure();
    #[cfg(feature = "cuda")]
    host::use_test_library();
    #[cfg(feature = "mpi")]
    let on_processes = [everywhere(), updates(), passes()].concat();
    #[cfg(feature = "mpi")]
    worlds::mpi::work(&on_processes);
    let updates = [updates(), parts::IN_PROCESS.to_vec()].concat();
    let mut trials = worlds::trials(worlds::HERE, &[everywhere(), in_process()].concat());
    trials.extend(worlds::trials(worlds::ONE_OF_EACH, &updates));
    let passes_here =
        [owned::IN_PROCESS, publication::IN_PROCESS, parallel::IN_PROCESS, cuts::IN_PROCESS];
    let passes =
        [&passes()[..], &passes_here.concat(), unused::IN_PROCESS, random_cases::IN_PROCESS]
            .concat();
    let passes = [&passes[..], linear_messages::IN_PROCESS].concat();
    trials.extend(worlds::trials(worlds::NOW_AND_AHEAD, &passes));
    #[cfg(feature = "mpi")]
    trials.push(worlds::mpi::trial(on_processes.len()));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The deadline of the tests' worlds. With sixteen ranks on two cores, a single call may take
/// seconds.
const DEADLINE: Duration = Duration::from_secs(60);

/// A model of shapes that no number of ranks divides.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    square: Vec<Linear>,
    wide: Linear,
    tall: Linear,
    experts: Param<Tensor<3>>,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let experts = Tensor::random([3, 10, 6], Distribution::Normal(0.0, 0.1), device);
        let net = Self {
            embedding: EmbeddingConfig::new(37, 21).init(device),
            square: vec![linear(16, 16), linear(16, 16), linear(16, 16)],
            wide: linear(5, 31),
            tall: linear(32, 3),
            experts: Param::from_tensor(experts.require_grad()),
            norm: LayerNormConfig::new(21).init(device),
            head: linear(21, 37),
        };
        net.map(&mut Fixed::new(7))
    }

    fn gradients(&self, seed: u64) -> GradientsParams {
        gradients(self, seed)
    }

    fn weights(&self) -> Vec<Vec<u8>> {
        weights(self)
    }

    fn values(&self) -> Vec<f64> {
        values(self).into_iter().map(f64::from).collect()
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

/// Burn loads the states of users' optimizers in the device's default type only.
fn loads_states() -> bool {
    let is_default = device().settings().float_dtype == FloatDType::F32;
    if !is_default {
        excused("Burn loads the state of an optimizer in the device's default type");
    }
    is_default
}

fn config() -> DistMuonConfig {
    let muon = MuonConfig::new()
        .with_first_linear(FirstLinear::Muon)
        .with_rule(RoutingRule::muon("experts").batch())
        .expect(Expectation::OncePerStep);
    DistMuonConfig::new().with_muon(muon).with_small_elements(64)
}

fn ranks<T: Send + Serialize + DeserializeOwned>(
    count: usize,
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    worlds::ranks(DEADLINE, count, run)
}

/// As [`ranks`], for results that stay in this process.
fn ranks_here<T: Send>(count: usize, run: impl Fn(World) -> Result<T> + Sync) -> Result<Vec<T>> {
    worlds::ranks_here(DEADLINE, count, run)
}

/// The weights after some steps on the same gradients, which are the same on all ranks.
fn trained(count: usize, steps: u64, config: &DistMuonConfig) -> Vec<Vec<u8>> {
    let nets = ranks(count, |world| {
        let mut net = Net::new(world.device());
        let net_of_rank_0 = world.broadcast(net.clone())?;
        net = net_of_rank_0;
        let mut optim = config.init(&world, &net)?;
        for step in 0..steps {
            let gradients = net.gradients(step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(net.weights())
    });
    let mut nets = nets.unwrap();
    for net in &nets[1..] {
        assert_eq!(*net, nets[0], "the ranks agree");
    }
    nets.swap_remove(0)
}
