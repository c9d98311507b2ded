//! Tables and plots of finished runs.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use comfy_table::{ContentArrangement, Table, presets};
use distmuon::distributed::GroupDiagnostics;
use plotters::style::RGBColor;

use super::chart::{Axis, COLORS, Chart, Curve};

/// The first part of the steps, whose losses do not count for the upper end of a plot. They are so
/// much higher that they would hide the differences between later ones.
const STEEP_PART: f64 = 0.1;

/// The results of a run.
pub struct Summary {
    pub name: String,
    pub seed: u64,
    pub lr: f64,
    /// Steps, and the validation loss after each.
    pub curve: Vec<(usize, f64)>,
    pub tokens_per_second: f64,
    /// The part of the time that was spent in the optimizer.
    pub optimizer_share: f64,
    pub optimizer_ms: f64,
    /// Steps, and the norms of each by group.
    pub norms: Vec<(usize, Vec<GroupDiagnostics>)>,
    /// The last step and the path of its checkpoint, if Ctrl-C ended the run.
    pub stopped: Option<(usize, PathBuf)>,
}

impl Summary {
    /// The name, with a mark if the run was stopped.
    fn title(&self) -> String {
        match self.stopped {
            Some((step, _)) => format!("{} (stopped at {step})", self.name),
            None => self.name.clone(),
        }
    }

    /// The loss of the last validation, with its step if that is not the run's last one.
    fn final_loss(&self) -> String {
        match (self.curve.last(), &self.stopped) {
            (None, _) => "-".into(),
            (Some((step, loss)), Some(_)) => format!("{loss:.4} (at {step})"),
            (Some((_, loss)), None) => format!("{loss:.4}"),
        }
    }
}

/// A table with one row per run. With several runs, a column has the step at which each of them
/// reached the final loss of the first one.
pub fn table(summaries: &[Summary]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(80);
    let mut header = vec!["run", "lr", "final loss", "tokens/s", "ms/step", "% time"];
    let mut notes = "final loss: of validation; ms/step, % time: in the optimizer".to_owned();
    let first = summaries.first().filter(|_| summaries.len() > 1);
    let compared = first.and_then(|first| Some((first, first.curve.last()?.1)));
    if let Some((first, _)) = compared {
        header.push("reached");
        notes += &format!("\nreached: step of the first validation at the loss of {}", first.name);
    }
    table.set_header(header);
    for run in summaries {
        let mut row = vec![
            run.title(),
            format!("{:.1e}", run.lr),
            run.final_loss(),
            format!("{:.0}", run.tokens_per_second),
            format!("{:.1}", run.optimizer_ms),
            format!("{:.1}", 100.0 * run.optimizer_share),
        ];
        if let Some((_, goal)) = compared {
            row.push(steps_to(&run.curve, goal).map_or("-".into(), |steps| steps.to_string()));
        }
        table.add_row(row);
    }
    format!("{table}\n{notes}")
}

/// A table with one row per optimizer, whose runs differ in their seeds: the mean of the final
/// losses, each of them, and the steps at which the runs reached the final loss of the first
/// optimizer with the same seed.
pub fn table_of_seeds(summaries: &[Summary]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(80);
    let groups = by_name(summaries);
    let goals = &groups[0];
    let seeds = goals.iter().map(|run| format!("seed {}", run.seed));
    let header = ["run", "lr", "mean"].map(str::to_owned).into_iter();
    table.set_header(header.chain(seeds).chain(["reached".into()]));
    for runs in &groups {
        let first = runs[0];
        let finals = runs.iter().filter_map(|run| Some(run.curve.last()?.1));
        let mean = finals.sum::<f64>() / runs.len() as f64;
        let reached = runs.iter().zip(goals).map(|(run, goal)| {
            let goal = goal.curve.last().map(|(_, loss)| *loss);
            goal.and_then(|goal| steps_to(&run.curve, goal)).map_or("-".into(), |s| s.to_string())
        });
        let reached = reached.collect::<Vec<String>>().join(", ");
        let row = [first.name.clone(), format!("{:.1e}", first.lr), format!("{mean:.4}")];
        let losses = (0..goals.len()).map(|i| runs.get(i).map_or("-".into(), |r| r.final_loss()));
        table.add_row(row.into_iter().chain(losses).chain([reached]));
    }
    let name = &goals[0].name;
    format!(
        "{table}\nfinal losses of validation\nreached: step of the first validation at the loss of \
         {name}, by seed"
    )
}

/// The runs of every optimizer, in the order of their first runs.
fn by_name(summaries: &[Summary]) -> Vec<Vec<&Summary>> {
    summaries.chunk_by(|a, b| a.name == b.name).map(|runs| runs.iter().collect()).collect()
}

/// The first step whose validation loss is at most `goal`.
fn steps_to(curve: &[(usize, f64)], goal: f64) -> Option<usize> {
    curve.iter().find(|(_, loss)| *loss <= goal).map(|(step, _)| *step)
}

/// Draws the validation losses of all runs into one SVG, as means of the runs that differ only in
/// their seeds.
pub fn plot(path: &Path, title: &str, summaries: &[Summary]) -> Result<()> {
    let curves: Vec<Curve> = by_name(summaries).iter().enumerate().map(curve).collect();
    let points: Vec<_> = curves.iter().flat_map(|curve| curve.points.iter().copied()).collect();
    let drawing = if points.is_empty() {
        Err(anyhow!(
            "there is no loss to draw: expected a finite validation loss after step 0; \
             lower --lr or --eval-every"
        ))
    } else {
        let [x, y] = axes(&points);
        let chart = Chart { title: title.to_owned(), x, y, curves };
        chart.draw(path).map_err(|error| anyhow!("{error}"))
    };
    drawing.with_context(|| format!("--plot {}", path.display()))
}

/// A quantity of a group that has a plot of its own. `None` for groups without it.
type Quantity = fn(&GroupDiagnostics) -> Option<f64>;

/// The plotted quantities.
const QUANTITIES: [(&str, Quantity); 7] = [
    ("effective learning rate", |group| Some(group.effective_lr())),
    ("update norm", |group| Some(group.update_norm)),
    ("weight norm", |group| Some(group.weight_norm)),
    ("orthogonality error", |group| group.orthogonality_error),
    ("skipped steps", |group| Some(group.skipped as f64)),
    ("clipped heads", |group| group.clipped_heads.map(|heads| heads as f64)),
    ("maximum logit", |group| group.max_logit.map(f64::from)),
];

/// Draws the observed quantities of all groups of all runs, each into an SVG next to that of the
/// losses: `loss-update-norm.svg` for `loss.svg`.
pub fn plot_norms(path: &Path, title: &str, summaries: &[Summary]) -> Result<()> {
    for (name, quantity) in QUANTITIES {
        let groups = summaries.iter().flat_map(|run| of_groups(run, quantity));
        let groups = groups.filter(|(_, points)| !points.is_empty()).zip(COLORS.iter().cycle());
        let curve = |((name, points), color): ((_, _), &RGBColor)| Curve {
            name,
            points,
            color: *color,
            dash: None,
        };
        let curves: Vec<Curve> = groups.map(curve).collect();
        let points: Vec<_> = curves.iter().flat_map(|curve| curve.points.iter().copied()).collect();
        if points.is_empty() {
            continue;
        }
        let [x, y] = axes(&points);
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let path = path.with_file_name(format!("{stem}-{}.svg", name.replace(' ', "-")));
        let chart = Chart { title: title.to_owned(), x, y: Axis { name, ..y }, curves };
        chart.draw(&path).map_err(|error| anyhow!("{error}"))?;
    }
    Ok(())
}

/// A quantity of every group of a run: the name of the curve, and its points.
fn of_groups(
    run: &Summary,
    quantity: Quantity,
) -> impl Iterator<Item = (String, Vec<(f64, f64)>)> + '_ {
    let groups = run.norms.first().map_or(&[][..], |(_, groups)| groups);
    groups.iter().enumerate().map(move |(index, group)| {
        let point = |(step, groups): &(usize, Vec<GroupDiagnostics>)| {
            Some((*step as f64, quantity(&groups[index]).filter(|y| y.is_finite())?))
        };
        let name = format!("{}, {}", run.title(), group.group);
        (name, run.norms.iter().filter_map(point).collect())
    })
}

fn curve((index, runs): (usize, &Vec<&Summary>)) -> Curve {
    let run = runs[0];
    let mean = |i: usize| {
        let losses = runs.iter().map(|run| run.curve.get(i).map_or(f64::NAN, |(_, loss)| *loss));
        losses.sum::<f64>() / runs.len() as f64
    };
    let points = run.curve.iter().enumerate().map(|(i, (step, _))| (*step as f64, mean(i)));
    // The loss of an untrained model is left out: it says nothing about the optimizer.
    let points: Vec<_> = points.filter(|(step, loss)| *step > 0.0 && loss.is_finite()).collect();
    let last = match (runs.len(), points.last()) {
        (2.., Some((_, loss))) => format!("{loss:.4}, mean of {} seeds", runs.len()),
        _ => run.final_loss(),
    };
    Curve {
        name: format!("{}, lr {:.1e}: {last}", run.title(), run.lr),
        points,
        color: COLORS[index % COLORS.len()],
        // An equal curve is visible through the gaps of a later one.
        dash: (index > 0).then(|| [6 + 6 * index as i32, 6]),
    }
}

/// The axes for points of steps and losses.
fn axes(points: &[(f64, f64)]) -> [Axis; 2] {
    let last_step = points.iter().map(|(step, _)| *step).fold(0.0, f64::max);
    let late = points.iter().filter(|(step, _)| *step >= STEEP_PART * last_step);
    let lowest = points.iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
    let highest = late.map(|(_, loss)| *loss).fold(f64::NEG_INFINITY, f64::max);
    // The last two terms keep the range from being empty if all values are equal.
    let least = if highest == 0.0 { 1.0 } else { 1e-9 };
    let margin = 0.04 * (highest - lowest).max(1e-3 * highest.abs()).max(least);
    let steps = 0.0..last_step;
    let losses = lowest - margin..highest + margin;
    let (step_ticks, _) = round_numbers(&steps, 1.0);
    let step_ticks = step_ticks.into_iter().map(|step| (step, format!("{step:.0}"))).collect();
    let (loss_ticks, decimals) = round_numbers(&losses, 0.0);
    let decimals = decimals.max(1);
    let loss_ticks = loss_ticks.into_iter().map(|loss| (loss, format!("{loss:.decimals$}")));
    [
        Axis { name: "step", range: steps, ticks: step_ticks },
        Axis {
            name: "validation loss, nats per token",
            range: losses,
            ticks: loss_ticks.collect(),
        },
    ]
}

/// Returns the multiples of a round number that lie in a range, and the number's decimals. They are
/// four to ten, or fewer if the number would be less than `minimum`.
fn round_numbers(range: &Range<f64>, minimum: f64) -> (Vec<f64>, usize) {
    let quarter = (range.end - range.start) / 4.0;
    let power = 10f64.powf(quarter.log10().floor());
    let digit = [5.0_f64, 2.0].into_iter().find(|digit| digit * power <= quarter).unwrap_or(1.0);
    let number = (digit * power).max(minimum);
    let multiples = (range.start / number).ceil() as i64..=(range.end / number).floor() as i64;
    let decimals = (-number.log10().floor()).max(0.0) as usize;
    (multiples.map(|multiple| multiple as f64 * number).collect(), decimals)
}
