//! The display of a run while it trains: a bar or lines, and the log.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::options::LINE_EVERY;
use super::settings::{Progress, Settings};

/// Tells of the steps of one run, on rank 0.
pub struct Display<'a> {
    name: &'a str,
    steps: usize,
    bar: Option<ProgressBar>,
    log: Option<&'a File>,
    start: Instant,
    /// The step that the run has started or gone on from.
    first: usize,
    told: Skips,
}

/// The steps that parameters had skipped up to a step.
struct Skips {
    step: usize,
    counts: BTreeMap<String, u64>,
}

impl<'a> Display<'a> {
    pub fn new(
        name: &'a str,
        ranks: usize,
        settings: &Settings,
        progress: &Progress,
        log: Option<&'a File>,
    ) -> Result<Self> {
        let (steps, first) = (settings.steps, progress.step);
        let bar = std::io::stderr().is_terminal().then(|| bar(name, steps, first));
        let told = Skips { step: first, counts: progress.skipped.clone() };
        let display = Self { name, steps, bar, log, start: Instant::now(), first, told };
        let start = json!({ "run": name, "ranks": ranks, "step": first, "settings": settings });
        display.log(start)?;
        Ok(display)
    }

    pub fn step(&self, step: usize, loss: f64, lr: f64, tokens_per_step: usize) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        let per_second = (step - self.first) as f64 / seconds;
        let rate = tokens_per_step as f64 * per_second;
        let left = Duration::from_secs_f64((self.steps - step) as f64 / per_second);
        let message = format!("loss {loss:.3}, {rate:.0} tokens/s, {} left", short(left));
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(step as u64);
            }
            None if step.is_multiple_of(LINE_EVERY) || step == 1 => self.line(step, &message),
            None => {}
        }
        self.log(json!({
            "step": step, "loss": loss, "lr": lr, "tokens_per_second": rate, "seconds": seconds,
        }))
    }

    pub fn validation(
        &self,
        step: usize,
        loss: f64,
        skipped: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.line(step, &format!("validation loss {loss:.4}"));
        self.log(json!({ "step": step, "validation_loss": loss, "skipped": skipped }))
    }

    /// Tells of steps that were skipped since this was last called.
    pub fn skipped(&mut self, step: usize, counts: &BTreeMap<String, u64>) {
        let before = |parameter| self.told.counts.get(parameter).copied().unwrap_or(0);
        let more = counts.iter().map(|(parameter, count)| count - before(parameter));
        let more: Vec<u64> = more.filter(|count| *count > 0).collect();
        if let (Some(least), Some(most)) = (more.iter().min(), more.iter().max()) {
            let (parameters, of) = (more.len(), step - self.told.step);
            let up_to = if least == most { "" } else { "up to " };
            self.line(
                step,
                &format!(
                    "{parameters} parameters skipped {up_to}{most} of {of} steps: gradients not finite"
                ),
            );
        }
        self.told = Skips { step, counts: counts.clone() };
    }

    /// The end of the run: of all steps, by Ctrl-C, or by losses that are not finite.
    pub fn end(&self, step: usize, how: &str) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.start.elapsed().as_secs_f64();
        self.log(json!({ "step": step, "end": how, "seconds": seconds }))
    }

    fn line(&self, step: usize, text: &str) {
        let line = format!("{} {step}/{}: {text}", self.name, self.steps);
        match &self.bar {
            Some(bar) => bar.println(line),
            None => tracing::info!("{line}"),
        }
    }

    fn log(&self, record: Value) -> Result<()> {
        let Some(mut file) = self.log else { return Ok(()) };
        file.write_all(format!("{record}\n").as_bytes()).context("can't write to --log")
    }
}

fn bar(name: &str, steps: usize, done: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {bar:16} {pos}/{len} {msg}");
    ProgressBar::new(steps as u64)
        .with_style(style.expect("a valid template"))
        .with_prefix(name.to_owned())
        .with_position(done as u64)
}

/// A time in its two largest units.
fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}
