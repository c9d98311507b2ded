//! An average of the weights, with which a run validates.

use anyhow::{Context, Result, anyhow, bail, ensure};
use distmuon::distributed::{Layout, WeightAverage};
use serde::{Deserialize, Serialize};

use super::model::Gpt;
use super::options::{at_least_one, positive};

/// The beginning of an average, its reach, and its share in a validation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Averaging {
    /// The step after which it begins.
    pub from: usize,
    /// Steps over which it reaches: its decay is 1 - 1 / `span`.
    pub span: usize,
    /// The rest is of the weights themselves.
    pub share: f64,
}

/// Parses `from=200,span=50,share=0.6`.
pub fn averaging(text: &str) -> Result<Averaging> {
    let form = "it must be from=STEP,span=STEPS, or from=STEP,span=STEPS,share=SHARE";
    let (mut from, mut span, mut share) = (None, None, 1.0);
    for part in text.split(',') {
        let (name, number) = part.split_once('=').context(form)?;
        match name {
            "from" if from.is_none() => from = Some(of_name(name, at_least_one(number))?),
            "span" if span.is_none() => span = Some(of_name(name, at_least_one(number))?),
            "share" => share = of_name(name, positive(number))?,
            _ => bail!(form),
        }
    }
    ensure!(share <= 1.0, "share: it must be at most 1");
    let (Some(from), Some(span)) = (from, span) else { bail!(form) };
    Ok(Averaging { from, span, share })
}

/// The number of a name. The command line shows only the outermost error.
fn of_name<T>(name: &str, parsed: Result<T>) -> Result<T> {
    parsed.map_err(|error| anyhow!("{name}: {error}"))
}

impl Averaging {
    /// Fails for an average of no step.
    pub fn check(self, steps: usize) -> Result<()> {
        let from = self.from;
        ensure!(
            from < steps,
            "--average begins after step {from} of {steps}; give an earlier one, or more --steps"
        );
        Ok(())
    }

    /// Fails for a checkpoint that lacks weights of the average.
    pub fn check_resumed(self, step: usize) -> Result<()> {
        let from = self.from;
        ensure!(
            step <= from,
            "it was saved after step {step}, without the average of --average, which began after \
             step {from}; continue from an earlier checkpoint"
        );
        Ok(())
    }

    /// Adds the weights after a step to the average. All ranks make this call.
    pub fn add(
        self,
        average: &mut Option<WeightAverage>,
        layout: &Layout,
        model: &Gpt,
        step: usize,
    ) -> Result<()> {
        match average {
            Some(average) => average.add(model, 1.0 - 1.0 / self.span as f64)?,
            None if step >= self.from => *average = Some(WeightAverage::new(layout, model)),
            None => {}
        }
        Ok(())
    }
}
