//! Tables and plots of finished runs.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use comfy_table::{ContentArrangement, Table, presets};
use plotters::element::DashedPathElement;
use plotters::prelude::*;

/// The results of a run.
pub struct Summary {
    pub name: String,
    pub lr: f64,
    /// Steps and the validation loss after them.
    pub curve: Vec<(usize, f64)>,
    pub tokens_per_second: f64,
    /// Part of the time spent in the optimizer.
    pub optimizer_share: f64,
    pub optimizer_ms: f64,
    /// The last step, and where it is saved, if Ctrl-C came before the end.
    pub stopped: Option<(usize, PathBuf)>,
}

impl Summary {
    /// The name, with a mark if it was stopped.
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

/// A line a run; with several runs also how soon each reached the first one's final loss.
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

/// The first validated step at which the loss is no higher than `goal`.
fn steps_to(curve: &[(usize, f64)], goal: f64) -> Option<usize> {
    curve.iter().find(|(_, loss)| *loss <= goal).map(|(step, _)| *step)
}

/// Colours that are told apart on white.
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 90, 181),
    RGBColor(200, 60, 0),
    RGBColor(0, 120, 80),
    RGBColor(150, 40, 140),
    RGBColor(90, 90, 90),
    RGBColor(120, 80, 0),
];

/// The losses of a run that are drawn. That of the start is left out: it would press the rest together.
fn drawn(run: &Summary) -> impl Iterator<Item = (usize, f64)> + Clone {
    let points = run.curve.iter().copied();
    points.filter(|(step, loss)| *step > 0 && loss.is_finite())
}

/// Draws the validation losses of all runs into one SVG.
pub fn plot(path: &Path, title: &str, summaries: &[Summary]) -> Result<()> {
    let points: Vec<_> = summaries.iter().flat_map(drawn).collect();
    let ends = |ends: Range<f64>, x: f64| ends.start.min(x)..ends.end.max(x);
    let steps = points.iter().map(|(step, _)| *step as f64).fold(f64::MAX..f64::MIN, ends);
    let losses = points.iter().map(|(_, loss)| *loss).fold(f64::MAX..f64::MIN, ends);
    let drawing = if points.is_empty() {
        Err("no validation has found a finite loss after the start".into())
    } else {
        draw(path, title, summaries, [wider(steps), wider(losses)])
    };
    drawing
        .map_err(|error| anyhow!("{error}"))
        .with_context(|| format!("--plot {}", path.display()))
}

/// A range with a margin.
fn wider(range: Range<f64>) -> Range<f64> {
    let margin = 0.04 * (range.end - range.start).max(1e-3 * range.end);
    range.start - margin..range.end + margin
}

fn draw(
    path: &Path,
    title: &str,
    summaries: &[Summary],
    [steps, losses]: [Range<f64>; 2],
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, (900, 540)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(steps, losses)?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .x_desc("step")
        .y_desc("validation loss, nats per token")
        .draw()?;
    for (i, run) in summaries.iter().enumerate() {
        let color = COLORS[i % COLORS.len()].stroke_width(2);
        // Through the gaps of a later curve one sees an equal one.
        let (dash, gap) = if i == 0 { (1 << 16, 0) } else { (4 + 4 * i as i32, 4 + 4 * i as i32) };
        let points = drawn(run).map(|(step, loss)| (step as f64, loss));
        chart
            .draw_series(DashedLineSeries::new(points, dash, gap, color))?
            .label(format!("{}, lr {:.1e}: {}", run.title(), run.lr, run.final_loss()))
            .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 24, y)], dash, gap, color));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}
