//! Tables and plots of finished runs.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use comfy_table::{Table, presets};
use plotters::prelude::*;

use crate::train::Summary;

/// A line a run; with several runs also how soon each reached the first one's final loss.
pub fn table(summaries: &[Summary]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let mut header = vec![
        "optimizer".to_owned(),
        "peak lr".into(),
        "final validation loss".into(),
        "tokens/s".into(),
        "optimizer, ms/step".into(),
        "optimizer, % of time".into(),
    ];
    let goal = summaries.first().and_then(|first| Some((first, first.curve.last()?.1)));
    let compared = goal.filter(|_| summaries.len() > 1);
    if let Some((first, _)) = compared {
        header.push(format!("steps to the final loss of {}", first.optimizer));
    }
    table.set_header(header);
    for run in summaries {
        let mut row = vec![
            run.optimizer.clone(),
            format!("{:.1e}", run.lr),
            run.curve.last().map_or("-".into(), |(_, loss)| format!("{loss:.4}")),
            format!("{:.0}", run.tokens_per_second),
            format!("{:.1}", run.optimizer_ms),
            format!("{:.1}", 100.0 * run.optimizer_share),
        ];
        if let Some((_, goal)) = compared {
            row.push(
                steps_to(&run.curve, goal).map_or("not reached".into(), |steps| steps.to_string()),
            );
        }
        table.add_row(row);
    }
    table
}

/// The first validated step at which the loss is no higher than `goal`.
fn steps_to(curve: &[(usize, f64)], goal: f64) -> Option<usize> {
    curve.iter().find(|(_, loss)| *loss <= goal).map(|(step, _)| *step)
}

/// Draws the validation losses of all runs into one SVG.
pub fn plot(path: &Path, summaries: &[Summary]) -> Result<()> {
    let points = || summaries.iter().flat_map(|run| run.curve.iter());
    let last = points().map(|(step, _)| *step).max().context("nothing to plot")?;
    let losses = || points().map(|(_, loss)| *loss).filter(|loss| loss.is_finite());
    let (low, high) = (losses().fold(f64::MAX, f64::min), losses().fold(f64::MIN, f64::max));
    draw(path, summaries, last, (0.95 * low)..(1.02 * high))
        .map_err(|error| anyhow!("--plot {}: {error}", path.display()))
}

fn draw(
    path: &Path,
    summaries: &[Summary],
    last: usize,
    losses: std::ops::Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, (900, 540)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0..last, losses)?;
    chart.configure_mesh().x_desc("step").y_desc("validation loss, nats per token").draw()?;
    for (i, run) in summaries.iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        chart
            .draw_series(LineSeries::new(run.curve.iter().copied(), color.stroke_width(2)))?
            .label(format!("{} (lr {:.1e})", run.optimizer, run.lr))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], color.stroke_width(2)));
    }
    chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw()?;
    area.present()?;
    Ok(())
}
