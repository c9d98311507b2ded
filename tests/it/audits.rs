//! A long run with an audit in every step, and its time.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use distmuon::distributed::DistMuonConfig;
use distmuon::{MuonConfig, Result, RoutingRule, World};
use distmuon_testing::models::gradients;

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

/// The times of some steps on two ranks.
fn trained(width: usize, steps: u64, audit_every: usize) -> Result<Vec<Duration>> {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    // Two buckets of two matrices each, of which an audit takes one.
    let bucket_mb = (2 * width * width * size_of::<f32>()) as f64 / 1e6;
    let config = DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(bucket_mb));
    let config = config.with_audit_every(audit_every);
    let start = Net::new(&Device::default().autodiff(), width);
    let runs = World::threads_with(World::devices(2), start, |world, mut net| -> Result<_> {
        let mut optim = config.init(&world, &net)?;
        assert_eq!(optim.plan().buckets().len(), 2);
        let mut times = vec![];
        for step in 0..steps {
            let grads = gradients(&net, step % 100);
            world.comm().barrier()?;
            let start = Instant::now();
            net = optim.step(0.01, net, grads)?;
            world.comm().barrier()?;
            times.push(start.elapsed());
        }
        Ok(times)
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
    const EVERY: usize = 10;
    const ROUNDS: usize = 6;
    for width in [256, 512, 768, 1024] {
        // Steps with and without an audit in one run, so that both meet the same load.
        let times = trained(width, (EVERY * (ROUNDS + 1)) as u64, EVERY).unwrap();
        let (mut audited, mut others) = (vec![], vec![]);
        // The first steps allocate.
        for (step, time) in (1..).zip(times).skip(EVERY) {
            let times = if step % EVERY == 0 { &mut audited } else { &mut others };
            times.push(time.as_secs_f64());
        }
        let [audited, others] = [audited, others].map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let more = audited / others - 1.0;
        println!(
            "width {width}: {:.1} ms, with an audit of half the matrices {:.1} ms: {:+.1} %, and \
             {:+.2} % in the mean of {EVERY} steps, where the share is {:+.2} %",
            1e3 * others,
            1e3 * audited,
            100.0 * more,
            100.0 * more / EVERY as f64,
            50.0 / EVERY as f64,
        );
    }
}
