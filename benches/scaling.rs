//! Simulates strong scaling of a step to 512 ranks: the critical path of the plan, from costs that
//! are measured here.
//!
//! ```text
//! cargo bench --bench scaling -- ../docs/scaling.svg
//! ```
//!
//! Cargo runs benches in `benches/`, where relative paths begin.
//!
//! The time of the iteration for each shape and that of AdamW per byte are measured on the default
//! device. The links between ranks are assumed. The "GPU" has the measured costs, divided so that
//! the matrices reach an assumed rate, with links of a network or of NVLink.

#[path = "../examples/train_lm/chart.rs"]
mod chart;
mod common;

use std::path::Path;
use std::time::Instant;

use burn::tensor::{DType, Device};
use chart::{Axis, COLORS, Chart};
use comfy_table::{Table, presets};
use common::Matrices;
use distmuon::comm::World;
use distmuon::distributed::plan::{Costs, Machine, Parameter, Plan, PlanConfig, ShapeCost, Work};
use distmuon::distributed::{CostSource, DistMuonConfig};
use distmuon::{MuonConfig, RoutingRule};

/// A GPT of 20 layers and width 1280, like nanochat's d20.
const LAYERS: usize = 20;
const WIDTH: usize = 1280;
const VOCABULARY: usize = 65_536;
/// Tokens of a step, and operations of a forward and a backward pass per token and parameter.
const TOKENS: f64 = 524_288.0;
const PASSES: f64 = 6.0;

const RANKS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// A GPU for comparison: operations per second in these matrices, and bytes of parameters per
/// second in AdamW, which passes over memory eight times.
const GPU_OPERATIONS: f64 = 4e14;
const GPU_ELEMENTWISE: f64 = 3e12 / 8.0;
/// Bandwidths of a rank's links, in bytes per second, for the measured machine and for GPUs; and
/// their latency in seconds.
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
        placement: Placement::Replicated,
    });
    let tables = ["embedding", "head"].map(|path| Parameter {
        path: path.into(),
        shape: vec![VOCABULARY, WIDTH],
        dtype: DType::F32,
        work: Work::Elements,
        placement: Placement::Replicated,
    });
    matrices.chain(tables).collect()
}

/// Measures the seconds of the iteration by shape, and its operations per second.
fn measured_costs() -> (Costs, f64) {
    let world = World::alone(Device::default().autodiff());
    let model = Matrices::new(&layer()[3..], world.device());
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("matrices"));
    let config = DistMuonConfig::new().with_muon(muon);
    let costs = |source| {
        let optim = config.clone().with_costs(source).init(&world, &model);
        optim.expect("the rule matches every matrix").costs().clone()
    };
    let (operations, seconds) = (costs(CostSource::Operations), costs(CostSource::Measured));
    let sum = |costs: &Costs| -> f64 { costs.shapes().map(|shape| costs.of(shape).each).sum() };
    let rate = sum(&operations) / sum(&seconds);
    (seconds, rate)
}

/// Measures the bytes of parameters per second that AdamW updates.
fn measured_adamw() -> f64 {
    let world = World::alone(Device::default().autodiff());
    let shape = [4096, 1024];
    let mut model = Matrices::new(&[shape], world.device());
    let muon = MuonConfig::new().with_rule(RoutingRule::adamw("matrices"));
    let config = DistMuonConfig::new().with_muon(muon);
    let mut optim = config.init(&world, &model).expect("the rule matches every matrix");
    let mut seconds = f64::INFINITY;
    for _ in 0..5 {
        let gradients = model.gradients();
        let start = Instant::now();
        model = optim.step(1e-3, model, gradients).expect("a world of one rank does not fail");
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    (4 * shape[0] * shape[1]) as f64 / seconds
}

/// The efficiency by number of ranks.
struct Efficiency {
    name: String,
    points: Vec<(usize, f64)>,
}

/// Simulates the optimizer alone, and the whole step with `other` seconds of work that divides
/// evenly.
fn simulate(name: &str, costs: &Costs, machine: &Machine, other: f64) -> [Efficiency; 2] {
    let settings = PlanConfig::default();
    let times: Vec<(usize, f64)> = RANKS
        .iter()
        .map(|ranks| {
            let plan = Plan::new(parameters(), *ranks, &settings, costs).expect("usable settings");
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
        let point = |(ranks, time): &(usize, f64)| {
            let ideal = alone / *ranks as f64;
            (*ranks, ideal / (time + other / *ranks as f64))
        };
        times.iter().map(point).collect()
    };
    [
        Efficiency { name: format!("{name}: optimizer"), points: efficiency(0.0) },
        Efficiency { name: format!("{name}: whole step"), points: efficiency(other) },
    ]
}

fn main() {
    let (costs, rate) = measured_costs();
    let elementwise = measured_adamw();
    let faster = GPU_OPERATIONS / rate;
    println!(
        "measured: {:.1} GFLOP/s, AdamW {:.2} GB/s; GPU: {faster:.0} times as fast",
        rate / 1e9,
        elementwise / 1e9
    );
    let elements: usize = parameters().iter().map(Parameter::elements).sum();
    let passes = PASSES * TOKENS * elements as f64;
    let machine = Machine { bandwidth: BANDWIDTH, latency: LATENCY, elementwise };
    let measured = simulate("measured, 10 Gbit/s", &costs, &machine, passes / rate);

    let scaled = costs.shapes().map(|shape| {
        let ShapeCost { fixed, each } = costs.of(shape);
        (shape, ShapeCost { fixed: fixed / faster, each: each / faster })
    });
    let scaled = Costs::new(scaled);
    let gpus = GPU_LINKS.iter().flat_map(|(links, bandwidth)| {
        let machine =
            Machine { bandwidth: *bandwidth, latency: LATENCY, elementwise: GPU_ELEMENTWISE };
        simulate(&format!("GPU, {links}"), &scaled, &machine, passes / GPU_OPERATIONS)
    });
    let efficiencies: Vec<Efficiency> = measured.into_iter().chain(gpus).collect();
    println!("{}", table(&efficiencies));
    if let Some(path) = std::env::args().skip(1).find(|argument| !argument.starts_with("--")) {
        let chart = scaling_chart(efficiencies, faster);
        chart.draw(Path::new(&path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

fn table(efficiencies: &[Efficiency]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = efficiencies.iter().map(|curve| curve.name.clone());
    table.set_header(std::iter::once("ranks".to_owned()).chain(names));
    for (row, ranks) in RANKS.iter().enumerate() {
        let values = efficiencies.iter().map(|curve| curve.points[row].1);
        let cells = values.map(|value| format!("{:.0} %", 100.0 * value));
        table.add_row(std::iter::once(ranks.to_string()).chain(cells));
    }
    table
}

/// A chart with one colour per machine. The curves of the optimizer are dashed, those of the whole
/// step solid.
fn scaling_chart(efficiencies: Vec<Efficiency>, faster: f64) -> Chart {
    // Logarithms of powers of two are equally far apart.
    let position = |ranks: usize| (ranks as f64).log2();
    let curves = efficiencies.into_iter().enumerate().map(|(index, curve)| chart::Curve {
        name: curve.name,
        points: curve.points.iter().map(|(ranks, value)| (position(*ranks), *value)).collect(),
        color: COLORS[index / 2],
        dash: (index % 2 == 0).then_some([9, 6]),
    });
    Chart {
        title: format!(
            "strong scaling of a step, simulated; GPU: {faster:.0} times as fast as measured"
        ),
        x: Axis {
            name: "ranks",
            range: position(RANKS[0])..position(RANKS[RANKS.len() - 1]),
            ticks: RANKS.iter().map(|ranks| (position(*ranks), ranks.to_string())).collect(),
        },
        y: Axis {
            name: "efficiency",
            range: 0.0..1.05,
            ticks: (0..=5_i32).map(|i| (f64::from(i) / 5.0, format!("{} %", 20 * i))).collect(),
        },
        curves: curves.collect(),
    }
}
