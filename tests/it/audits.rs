//! A long run with an audit in every step, and its time.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use distmuon::distributed::DistMuonConfig;
use distmuon::{MuonConfig, Result, RoutingRule, World};
use distmuon_testing::models::{gradients, weights};

/// The model of the long run.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(device: &Device, width: usize) -> Self {
        let linear = |_| LinearConfig::new(width, width).with_bias(false).init(device);
        Self { layers: (0..4).map(linear).collect() }
    }
}

/// The weights after some steps on two ranks, and the shortest time of a step.
fn trained(width: usize, steps: u64, audit_every: usize) -> Result<(Vec<Vec<u8>>, Duration)> {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    // Two buckets of two matrices each, of which an audit takes one.
    let bucket_mb = (2 * width * width * size_of::<f32>()) as f64 / 1e6;
    let config = DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(bucket_mb));
    let config = config.with_audit_every(audit_every);
    let start = Net::new(&Device::default().autodiff(), width);
    let runs = World::threads_with(World::devices(2), start, |world, mut net| -> Result<_> {
        let mut optim = config.init(&world, &net)?;
        assert_eq!(optim.plan().buckets().len(), 2);
        let mut shortest = Duration::MAX;
        for step in 0..steps {
            let grads = gradients(&net, step % 100);
            world.comm().barrier()?;
            let start = Instant::now();
            net = optim.step(0.01, net, grads)?;
            world.comm().barrier()?;
            shortest = shortest.min(start.elapsed());
        }
        Ok((weights(&net), shortest))
    });
    Ok(runs?.swap_remove(0))
}

#[test]
fn audits_find_nothing_in_a_run_without_faults() {
    trained(8, 50, 1).unwrap();
}

#[test]
#[ignore = "takes minutes; run by hand for docs/results/ranks.md"]
fn ten_thousand_audits_find_nothing() {
    trained(8, 10_000, 1).unwrap();
}

#[test]
#[ignore = "it measures; run by hand for docs/results/ranks.md"]
fn times_of_audited_steps() {
    for width in [256, 512] {
        let [without, with] =
            [0, 1].map(|every| (0..3).map(|_| trained(width, 9, every).unwrap().1).min().unwrap());
        let more = with.as_secs_f64() / without.as_secs_f64() - 1.0;
        println!("width {width}: {without:?}, with an audit of half the matrices {with:?}, {more}");
    }
}
