//! Strong scaling of a step to 512 ranks: the critical path of the plan, simulated from costs that
//! are measured here.
//!
//! ```text
//! cargo bench --bench scaling -- docs/scaling.svg
//! ```
//!
//! Measured are the times of the iteration for each shape and of AdamW per byte, on the default
//! device. Assumed are the links between ranks. The other machines have the same costs, divided by
//! how much faster a GPU is said to be, and links of a network and of NVLink.

mod common;

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::{DType, Device};
use comfy_table::{Table, presets};
use common::Matrices;
use distmuon::dist::plan::{Costs, Machine, Parameter, Plan, PlanSettings, ShapeCost, Work};
use distmuon::dist::{CostSource, DistMuonConfig, World};
use distmuon::{MuonConfig, Rule};
use plotters::prelude::*;

/// A GPT of 20 layers and width 1280, as nanochat's d20.
const LAYERS: usize = 20;
const WIDTH: usize = 1280;
const VOCABULARY: usize = 65_536;
/// Tokens of a step, and operations of a forward and a backward pass per token and parameter.
const TOKENS: f64 = 524_288.0;
const PASSES: f64 = 6.0;

const RANKS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// A GPU for comparison: operations per second in such matrices, and bytes per second of memory over
/// the eight passes of AdamW.
const GPU_OPERATIONS: f64 = 4e14;
const GPU_ELEMENTWISE: f64 = 3e12 / 8.0;
/// Links of a rank, in bytes per second: of the machine that was measured, and of GPUs.
const BANDWIDTH: f64 = 1.25e9;
const GPU_LINKS: [(&str, f64); 2] = [("400 Gbit/s", 5e10), ("450 GB/s", 4.5e11)];
const LATENCY: f64 = 1e-5;

/// The shapes of a layer's matrices.
fn layer() -> [[usize; 2]; 6] {
    let [square, up, down] = [[WIDTH; 2], [WIDTH, 4 * WIDTH], [4 * WIDTH, WIDTH]];
    [square, square, square, square, up, down]
}

fn parameters() -> Vec<Parameter> {
    let matrices = (0..LAYERS).flat_map(|i| layer().map(|shape| (i, shape)));
    let matrices = matrices.enumerate().map(|(number, (i, [rows, columns]))| Parameter {
        path: format!("layers.{i}.{number}"),
        shape: vec![rows, columns],
        dtype: DType::F32,
        work: Work::Matrices { count: 1, rows, columns },
    });
    let tables = ["embedding", "head"].map(|path| Parameter {
        path: path.into(),
        shape: vec![VOCABULARY, WIDTH],
        dtype: DType::F32,
        work: Work::Elements,
    });
    matrices.chain(tables).collect()
}

/// Seconds of the iteration by shape, and operations per second in it.
fn measured_costs() -> (Costs, f64) {
    let world = World::alone(Device::default().autodiff());
    let model = Matrices::new(&layer()[3..], world.device());
    let muon = MuonConfig::new().with_rule(Rule::muon("matrices"));
    let config = DistMuonConfig::new().with_muon(muon);
    let costs = |source| {
        let optim = config.clone().with_costs(source).init(&world, &model);
        optim.expect("a model of matrices").costs().clone()
    };
    let (operations, seconds) = (costs(CostSource::Operations), costs(CostSource::Measured));
    let sum = |costs: &Costs| -> f64 { costs.shapes().map(|shape| costs.of(shape).each).sum() };
    let rate = sum(&operations) / sum(&seconds);
    (seconds, rate)
}

/// Bytes of parameters per second that AdamW updates.
fn measured_adamw() -> f64 {
    let world = World::alone(Device::default().autodiff());
    let shape = [4096, 1024];
    let mut model = Matrices::new(&[shape], world.device());
    let muon = MuonConfig::new().with_rule(Rule::adamw("matrices"));
    let config = DistMuonConfig::new().with_muon(muon);
    let mut optim = config.init(&world, &model).expect("a model");
    let mut seconds = f64::INFINITY;
    for _ in 0..5 {
        let gradients = model.gradients();
        let start = Instant::now();
        model = optim.step(1e-3, model, gradients).expect("one rank");
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    (4 * shape[0] * shape[1]) as f64 / seconds
}

/// A curve: efficiency by number of ranks.
struct Curve {
    name: String,
    points: Vec<(usize, f64)>,
}

/// The optimizer alone, and the whole step with `other` seconds of work that divides evenly.
fn curves(name: &str, costs: &Costs, machine: &Machine, other: f64) -> [Curve; 2] {
    let settings = PlanSettings::default();
    let times: Vec<(usize, f64)> = RANKS
        .iter()
        .map(|ranks| {
            let plan = Plan::new(parameters(), *ranks, &settings, costs).expect("a plan");
            let path = plan.timeline(costs, machine);
            println!(
                "{name}, {ranks} ranks: {:.4} s, busiest rank {:.4} s, messages {:.4} s",
                path.total, path.compute, path.communication
            );
            (*ranks, path.total)
        })
        .collect();
    let efficiency = |other: f64| {
        let alone = times[0].1 + other;
        let of = |(ranks, time): &(usize, f64)| {
            let ideal = alone / *ranks as f64;
            (*ranks, ideal / (time + other / *ranks as f64))
        };
        times.iter().map(of).collect()
    };
    [
        Curve { name: format!("{name}: optimizer"), points: efficiency(0.0) },
        Curve { name: format!("{name}: whole step"), points: efficiency(other) },
    ]
}

fn main() {
    let (costs, rate) = measured_costs();
    let elementwise = measured_adamw();
    println!("measured: {:.1} GFLOP/s, AdamW {:.2} GB/s", rate / 1e9, elementwise / 1e9);
    let elements: usize = parameters().iter().map(Parameter::elements).sum();
    let passes = PASSES * TOKENS * elements as f64;
    let machine = Machine { bandwidth: BANDWIDTH, latency: LATENCY, elementwise };
    let here = curves("measured here, 10 Gbit/s", &costs, &machine, passes / rate);

    let faster = GPU_OPERATIONS / rate;
    let scaled = costs.shapes().map(|shape| {
        let ShapeCost { fixed, each } = costs.of(shape);
        (shape, ShapeCost { fixed: fixed / faster, each: each / faster })
    });
    let scaled = Costs::new(scaled);
    let gpus = GPU_LINKS.iter().flat_map(|(links, bandwidth)| {
        let (bandwidth, elementwise) = (*bandwidth, GPU_ELEMENTWISE);
        let machine = Machine { bandwidth, latency: LATENCY, elementwise };
        let name = format!("{faster:.0} times faster, {links}");
        curves(&name, &scaled, &machine, passes / GPU_OPERATIONS)
    });
    let curves: Vec<Curve> = here.into_iter().chain(gpus).collect();
    println!("{}", table(&curves));
    let path = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    if let Some(path) = path.map(PathBuf::from) {
        plot(&path, &curves).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

fn table(curves: &[Curve]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = curves.iter().map(|curve| curve.name.clone());
    table.set_header(std::iter::once("ranks".to_owned()).chain(names));
    for (row, ranks) in RANKS.iter().enumerate() {
        let cells = curves.iter().map(|curve| format!("{:.0} %", 100.0 * curve.points[row].1));
        table.add_row(std::iter::once(ranks.to_string()).chain(cells));
    }
    table
}

fn plot(path: &std::path::Path, curves: &[Curve]) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, (900, 540)).into_drawing_area();
    area.fill(&WHITE)?;
    let (first, last) = (RANKS[0] as f64, RANKS[RANKS.len() - 1] as f64);
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d((first..last).log_scale().base(2.0), 0.0..1.05)?;
    chart.configure_mesh().x_desc("ranks").y_desc("efficiency of strong scaling").draw()?;
    for (i, curve) in curves.iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        let points = curve.points.iter().map(|(ranks, efficiency)| (*ranks as f64, *efficiency));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}
