//! Times of a step on one rank and on two, with one core for each rank.
//!
//! ```text
//! cargo bench --bench distributed
//! ```
//!
//! The matrices are those of a GPT-2 layer of width 768. Runs on one rank and on two alternate, so
//! that a change of the machine's clock affects both.

mod common;

use std::time::Instant;

use comfy_table::{Table, presets};
use common::{LAYER, Matrices, median};
use distmuon::comm::World;
use distmuon::distributed::DistMuonConfig;
use distmuon::{Coefficients, IterationDtype, MuonConfig, NewtonSchulzConfig, Result, RoutingRule};

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
    let devices = World::devices(ranks);
    let one_core = |world| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        pool.expect("a thread can be started").install(|| run(world))
    };
    World::threads(devices, one_core).expect("no rank fails").swap_remove(0)
}

fn main() {
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
    println!("{table}");
}
