//! A step on one rank and on two, each on a core of its own.
//!
//! ```text
//! cargo bench --bench distributed
//! ```
//!
//! The matrices are those of a GPT-2 layer of width 768. Turns alternate, so that a machine
//! whose clock is not steady treats both alike.

mod common;

use std::time::Instant;

use comfy_table::{Table, presets};
use common::{LAYER, Matrices};
use distmuon::dist::{DistMuonConfig, World};
use distmuon::{Coefficients, IterationDtype, MuonConfig, Result, Rule};

const TURNS: usize = 5;
const STEPS: usize = 2;

/// Seconds of a step on so many ranks.
fn step(ranks: usize) -> f64 {
    let muon = MuonConfig::new()
        .with_rule(Rule::muon("matrices"))
        .with_coefficients(Coefficients::KellerJordan)
        .with_iteration_dtype(IterationDtype::F32);
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
        pool.expect("a thread").install(|| run(world))
    };
    World::threads(devices, one_core).expect("no rank fails").swap_remove(0)
}

fn main() {
    let counts = [1, 2];
    let turns: Vec<_> = (0..TURNS).map(|_| counts.map(step)).collect();
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["ranks", "step, ms", "of one rank"]);
    let median = |index: usize| {
        let mut times: Vec<f64> = turns.iter().map(|turn| turn[index]).collect();
        times.sort_by(f64::total_cmp);
        times[TURNS / 2]
    };
    for (index, ranks) in counts.into_iter().enumerate() {
        table.add_row([
            ranks.to_string(),
            format!("{:.0}", 1e3 * median(index)),
            format!("{:.3}", median(index) / median(0)),
        ]);
    }
    println!("{table}");
}
