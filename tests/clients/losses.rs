//! The losses of optimizers on the data of every program.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::module::Module;
use distmuon::{FirstLinear, MuonConfig, RoutingRule};

use crate::client::{Choice, Client, Entry, Items, OTHERS, Run, device};
use crate::columns::Perceptron;

const STEPS: usize = 120;
/// The variable with a number of seeds.
const SEEDS: &str = "DISTMUON_SEEDS";
/// The variable with a text that the names of programs have to contain.
const PROGRAMS: &str = "DISTMUON_PROGRAMS";
/// The first learning rate that is tried.
const RATE: f64 = 8e-3;
const CHOICES: [Choice; 3] = [Choice::DistMuon, Choice::BurnMuon, Choice::BurnAdamW];

/// The losses of all seeds at a learning rate.
type Losses = Vec<f32>;

/// Prints the loss of every optimizer at its best rate: the mean of the seeds, and their range.
pub fn print(clients: &[Entry]) {
    let start = Instant::now();
    let programs = std::env::var(PROGRAMS).unwrap_or_default();
    let clients = clients.iter().filter(|client| client.name.contains(&programs));
    let row = |client: &Entry| {
        let cells = CHOICES.map(|choice| cell(client, choice));
        format!("| {} | {} |\n", client.name, cells.join(" | "))
    };
    // At once, since learners print their progress.
    let rows: String = clients.map(row).collect();
    println!("| program | distmuon | Burn's Muon | Burn's AdamW |\n|---|---|---|---|\n{rows}");
    println!("{:.0} s", start.elapsed().as_secs_f64());
}

/// Prints the losses of perceptrons by the number of their inputs, with both optimizers of the
/// first layer.
pub fn print_first_layers() {
    let loss = |run: &Run, inputs: usize, first: FirstLinear| {
        device().seed(run.seed);
        let model = Perceptron::new(inputs, &device());
        let model = model.trained(run, MuonConfig::new().with_first_linear(first));
        let items = Items { indices: OTHERS.collect(), device: device().inner() };
        Perceptron::loss(&model.valid(), items)
    };
    println!("| inputs | Muon | AdamW on the first layer |\n|---|---|---|");
    for inputs in [2, 3, 4, 8, 16, 32] {
        let cells = [FirstLinear::Muon, FirstLinear::AdamW]
            .map(|first| of_best(Choice::DistMuon, &[], |run| loss(run, inputs, first)));
        println!("| {inputs} | {} |", cells.join(" | "));
    }
}

/// Prints the losses of the programs with fused projections: as whole matrices, and in blocks.
pub fn print_blocks(clients: &[Entry]) {
    println!("| program | whole | in blocks |\n|---|---|---|");
    for client in clients.iter().filter(|client| !(client.blocks)().is_empty()) {
        let cells =
            [vec![], (client.blocks)()].map(|rules| of_best(Choice::DistMuon, &rules, client.loss));
        println!("| {} | {} |", client.name, cells.join(" | "));
    }
}

fn cell(client: &Entry, choice: Choice) -> String {
    of_best(choice, &[], client.loss)
}

/// The losses of runs at the best rate: the mean of the seeds, their range, and the rate.
fn of_best(choice: Choice, rules: &[RoutingRule], loss: impl Fn(&Run) -> f32) -> String {
    let (rate, mut losses) = best(|rate| {
        let loss = |seed| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let (folder, steps) = (folder.path().to_owned(), 0..STEPS);
            let (rules, world) = (rules.to_vec(), None);
            loss(&Run { folder, steps, total: STEPS, seed, rate, choice, rules, world })
        };
        let seeds = std::env::var(SEEDS).map_or(3, |seeds| seeds.parse().expect("a number"));
        (0..seeds).map(loss).collect()
    });
    losses.sort_by(f32::total_cmp);
    let [mean, least, most] =
        [mean(&losses), losses[0], losses[losses.len() - 1]].map(three_digits);
    format!("{mean} ({least} to {most}) @{rate}")
}

/// The best learning rate, between half of it and twice it, and its losses.
fn best(losses: impl Fn(f64) -> Losses) -> (f64, Losses) {
    let at = |power: i32| RATE * 2_f64.powi(power);
    let mut tried: BTreeMap<i32, Losses> = BTreeMap::new();
    let mut middle = 0;
    loop {
        for power in middle - 1..=middle + 1 {
            tried.entry(power).or_insert_with(|| losses(at(power)));
        }
        let of_power = |power: &i32| mean(&tried[power]);
        let best = tried.keys().copied().min_by(|a, b| of_power(a).total_cmp(&of_power(b)));
        let best = best.expect("three rates were tried");
        if best == middle {
            let losses = tried.remove(&middle).expect("the middle was tried");
            return (at(middle), losses);
        }
        middle = best;
    }
}

fn mean(losses: &Losses) -> f32 {
    losses.iter().sum::<f32>() / losses.len() as f32
}

fn three_digits(value: f32) -> String {
    let decimals = (2.0 - value.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}
