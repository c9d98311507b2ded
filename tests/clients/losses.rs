//! The losses of optimizers on the data of every program.

use std::time::Instant;

use crate::client::{Choice, Entry, Run};

const STEPS: usize = 120;
const SEEDS: u64 = 3;
/// The learning rates of all optimizers.
const RATES: [f64; 3] = [4e-3, 1.6e-2, 6.4e-2];
const CHOICES: [Choice; 3] = [Choice::DistMuon, Choice::BurnMuon, Choice::BurnAdamW];

/// Prints the loss of every optimizer at its best rate: the mean of the seeds, and their range.
pub fn print(clients: &[Entry]) {
    println!("| program | distmuon | Burn's Muon | Burn's AdamW |\n|---|---|---|---|");
    let start = Instant::now();
    for client in clients {
        let cells = CHOICES.map(|choice| best(client, choice));
        println!("| {} | {} |", client.name, cells.join(" | "));
    }
    println!("\n{:.0} s", start.elapsed().as_secs_f64());
}

fn best(client: &Entry, choice: Choice) -> String {
    let of_rate = |rate: f64| {
        let loss = |seed| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let folder = folder.path().to_owned();
            (client.loss)(&Run { folder, steps: 0..STEPS, seed, rate, choice })
        };
        let losses: Vec<f32> = (0..SEEDS).map(loss).collect();
        (losses.iter().sum::<f32>() / losses.len() as f32, losses, rate)
    };
    let best = RATES.map(of_rate).into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
    let (mean, mut losses, rate) = best.expect("`RATES` is not empty");
    losses.sort_by(f32::total_cmp);
    let [mean, least, most] = [mean, losses[0], losses[losses.len() - 1]].map(three_digits);
    format!("{mean} ({least} to {most}) @{rate}")
}

fn three_digits(value: f32) -> String {
    let decimals = (2.0 - value.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}
