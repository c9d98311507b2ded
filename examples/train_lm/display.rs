//! The output of a run while it trains: a progress bar or lines, and the log.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use distmuon::Account;
use distmuon::distributed::GroupDiagnostics;
use distmuon::qk_clip::ClippedHeads;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::options::LINE_EVERY;
use super::settings::{Progress, Settings};

/// Shows and logs the steps of one run, on rank 0.
pub struct Display<'a> {
    name: &'a str,
    steps: usize,
    bar: Option<ProgressBar>,
    log: Option<&'a File>,
    start: Instant,
    /// The step after which the run has started or was resumed.
    first: usize,
    /// The skipped steps that have been reported.
    reported: Skips,
}

/// The number of steps that each parameter had skipped after a step.
struct Skips {
    step: usize,
    counts: BTreeMap<String, u64>,
}

/// The heads that QK-clip has clipped in a step, over all attentions.
struct Clips {
    /// The largest finite logit before clipping.
    max_logit: Option<f32>,
    clipped: usize,
    /// Heads whose maximum logit was not finite.
    not_finite: usize,
}

impl Clips {
    /// Waits for the device.
    fn of(heads: &ClippedHeads) -> Self {
        let none = Self { max_logit: None, clipped: 0, not_finite: 0 };
        heads.read().iter().fold(none, |sum, attention| Self {
            max_logit: sum.max_logit.into_iter().chain(attention.max_logit).reduce(f32::max),
            clipped: sum.clipped + attention.clipped,
            not_finite: sum.not_finite + attention.not_finite,
        })
    }
}

impl<'a> Display<'a> {
    pub fn new(
        name: &'a str,
        ranks: usize,
        settings: &Settings,
        progress: &Progress,
        log: Option<&'a File>,
    ) -> Result<Self> {
        let steps = settings.steps;
        let first = progress.step;
        let bar = std::io::stderr().is_terminal().then(|| bar(name, steps, first));
        let reported = Skips { step: first, counts: progress.skipped.clone() };
        let display = Self { name, steps, bar, log, start: Instant::now(), first, reported };
        let start = json!({ "run": name, "ranks": ranks, "step": first, "settings": settings });
        display.log(start)?;
        Ok(display)
    }

    /// Reports the loss of a step, and the heads that QK-clip has clipped.
    pub fn step(
        &self,
        step: usize,
        loss: f64,
        lr: f64,
        tokens_per_step: usize,
        clipped: Option<&ClippedHeads>,
    ) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        let per_second = (step - self.first) as f64 / seconds;
        let rate = tokens_per_step as f64 * per_second;
        let remaining = Duration::from_secs_f64((self.steps - step) as f64 / per_second);
        let message = format!("loss {loss:.3}, {rate:.0} tokens/s, {} left", short(remaining));
        let has_line = step.is_multiple_of(LINE_EVERY) || step == 1;
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(step as u64);
            }
            None if has_line => self.line(step, &message),
            None => {}
        }
        let mut record = json!({
            "step": step, "loss": loss, "lr": lr, "tokens_per_second": rate, "seconds": seconds,
        });
        if let Some(clips) = clipped.map(Clips::of) {
            if has_line {
                let Clips { max_logit, clipped, .. } = clips;
                let max_logit = max_logit.map_or("not finite".into(), |max| format!("{max:.1}"));
                self.line(step, &format!("max logit {max_logit}, {clipped} heads clipped"));
            }
            record["max_logit"] = json!(clips.max_logit);
            record["clipped_heads"] = json!(clips.clipped);
            record["heads_not_finite"] = json!(clips.not_finite);
        }
        self.log(record)
    }

    /// Logs the norms of a step by group.
    pub fn diagnostics(&self, step: usize, groups: &[GroupDiagnostics]) -> Result<()> {
        let group = |group: &GroupDiagnostics| {
            let mut record = json!(group);
            record["effective_lr"] = json!(group.effective_lr());
            record
        };
        let groups: Vec<Value> = groups.iter().map(group).collect();
        self.log(json!({ "step": step, "diagnostics": groups }))
    }

    /// Prints and logs what a step did to every group of parameters.
    pub fn account(&self, step: usize, account: &Account) -> Result<()> {
        self.line(step, &format!("the account of the step\n{account}"));
        self.log(json!({ "step": step, "account": account.groups() }))
    }

    /// Reports the loss of a validation.
    pub fn validation(
        &self,
        step: usize,
        loss: f64,
        skipped: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.line(step, &format!("validation loss {loss:.4}"));
        self.log(json!({ "step": step, "validation_loss": loss, "skipped": skipped }))
    }

    /// Reports the steps that were skipped since the last call.
    pub fn skipped(&mut self, step: usize, counts: &BTreeMap<String, u64>) {
        let before = |parameter| self.reported.counts.get(parameter).copied().unwrap_or(0);
        let new = counts.iter().map(|(parameter, count)| count - before(parameter));
        let new: Vec<u64> = new.filter(|count| *count > 0).collect();
        if let (Some(min), Some(max)) = (new.iter().min(), new.iter().max()) {
            let parameters = new.len();
            let steps = step - self.reported.step;
            let up_to = if min == max { "" } else { "up to " };
            self.line(
                step,
                &format!(
                    "{parameters} parameters skipped {up_to}{max} of {steps} steps: gradients not \
                     finite"
                ),
            );
        }
        self.reported = Skips { step, counts: counts.clone() };
    }

    /// Reports the end of the run: after all steps, by Ctrl-C, or by non-finite losses.
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
        .with_style(style.expect("the template is valid"))
        .with_prefix(name.to_owned())
        .with_position(done as u64)
}

/// Writes a time in its two largest units.
fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}
