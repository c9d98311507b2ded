//! Simulates strong scaling of an iteration to 512 ranks: the critical path of the plan, from costs
//! that are measured here, and for models whose messages are hidden behind the passes from counted
//! operations.
//!
//! ```text
//! cargo bench --bench scaling -- ../docs/scaling.svg ../docs/hiding.svg
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
use distmuon::distributed::forecast::{Machine, PassTimes, timeline};
use distmuon::distributed::plan::{
    Costs, Cut, MatrixOrder, Parameter, Placement, Plan, PlanConfig, ShapeCost, Slices, Work,
};
use distmuon::distributed::{CostSource, DistMuonConfig, Links, TimeAssumptions};
use distmuon::{MuonConfig, RoutingRule};
use plotters::style::RGBColor;

/// A GPT of 20 layers and width 1280, like nanochat's d20.
const LAYERS: usize = 20;
const WIDTH: usize = 1280;
const VOCABULARY: usize = 65_536;
/// Tokens of a step, and operations of a forward and a backward pass per token and parameter.
const TOKENS: f64 = 524_288.0;
const PASSES: f64 = 6.0;

const RANKS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// Bandwidth of a rank's links on the measured machine, in bytes per second.
const BANDWIDTH: f64 = 1.25e9;

/// A GPU for comparison, as forecasts of time assume it.
fn gpu() -> TimeAssumptions {
    TimeAssumptions::new(TOKENS)
}

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
        slices: None,
        settings: 0,
    });
    let tables = ["embedding", "head"].map(|path| Parameter {
        path: path.into(),
        shape: vec![VOCABULARY, WIDTH],
        dtype: DType::F32,
        work: Work::Elements,
        placement: Placement::Replicated,
        slices: None,
        settings: 0,
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
            let path = timeline(&plan, costs, machine, &PassTimes::default());
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

/// A model for which the hiding of messages is simulated.
struct Model {
    name: &'static str,
    parameters: Vec<Parameter>,
    layers: usize,
    /// Tokens of a step.
    tokens: f64,
}

impl Model {
    /// A model of equal layers, with an embedding before and a head after them.
    fn new(
        name: &'static str,
        layers: usize,
        layer: &[[usize; 2]],
        vocabulary: usize,
        (dtype, tokens): (DType, f64),
    ) -> Self {
        let placement = Placement::Replicated;
        let table = |path: &str| Parameter {
            path: path.into(),
            shape: vec![vocabulary, layer[0][0]],
            dtype,
            work: Work::Elements,
            placement,
            slices: None,
            settings: 0,
        };
        let matrices = (0..layers).flat_map(|i| layer.iter().enumerate().map(move |m| (i, m)));
        let matrices = matrices.map(|(i, (number, &[rows, columns]))| Parameter {
            path: format!("layers.{i}.{number}"),
            shape: vec![rows, columns],
            dtype,
            work: Work::Matrices { count: 1, rows, columns },
            placement,
            slices: None,
            settings: 0,
        });
        let parameters = [table("embedding")].into_iter().chain(matrices).chain([table("head")]);
        Self { name, parameters: parameters.collect(), layers, tokens }
    }

    /// The costs at an assumed rate, of the cheaper form of the iteration in operations: for
    /// `m <= n`, `15 m m n + 5 m m m` in standard and `6 m m n + 14 m m m` in Gram form, with
    /// symmetric products of five steps.
    fn costs(&self) -> Costs {
        let shapes = self.parameters.iter().filter_map(|parameter| match parameter.work {
            Work::Matrices { rows, columns, .. } => Some([rows, columns]),
            _ => None,
        });
        Costs::new(shapes.map(|shape| {
            let [m, n] = [shape[0].min(shape[1]), shape[0].max(shape[1])].map(|side| side as f64);
            let standard = 15.0 * m * m * n + 5.0 * m * m * m;
            let gram = 6.0 * m * m * n + 14.0 * m * m * m;
            let operations = if n > m { standard.min(gram) } else { standard };
            (shape, ShapeCost { fixed: 0.0, each: operations / gpu().operations })
        }))
    }

    /// The part of linear scaling that remains on a number of ranks: the passes, and the messages
    /// and updates that are not hidden.
    fn efficiency(&self, ranks: usize, place: &Place) -> f64 {
        let gpu = gpu();
        let elements: usize = self.parameters.iter().map(Parameter::elements).sum();
        let seconds = PASSES * elements as f64 * self.tokens / ranks as f64 / gpu.operations;
        let placed = |(index, parameter): (usize, &Parameter)| {
            let cut = match &place.cut {
                Some(Cuts::Columns(ranks)) if parameter.matrices() > 0 => Some((*ranks, 1)),
                Some(Cuts::Rows) if index == EMBEDDING => Some((ranks, 0)),
                _ => None,
            };
            let cut = cut.map(|(ranks, dimension)| Cut {
                axis: "cut".into(),
                ranks,
                dimension,
                parts: 1,
            });
            let slices = cut.map(|cut| Slices::new(&parameter.shape, &[cut]));
            Parameter { placement: place.placement, slices, ..parameter.clone() }
        };
        let parameters = self.parameters.iter().enumerate().map(placed).collect();
        let costs = self.costs();
        let order = match place.placement {
            Placement::Reduced => MatrixOrder::Model,
            Placement::Replicated | Placement::Owned => MatrixOrder::Size,
        };
        let config = PlanConfig { order, ..PlanConfig::default() };
        let plan = Plan::new(parameters, ranks, &config, &costs);
        let node = place.by_node.then_some((NODE, gpu.inside));
        let machine = Machine { links: gpu.across, node, elementwise: gpu.elementwise };
        let embedding = &self.parameters[EMBEDDING];
        let row = (embedding.shape[1] * embedding.dtype.size()) as f64;
        let tokens = self.tokens / ranks as f64;
        let activations = match &place.cut {
            // Two regions in a layer, each with a sum in either pass.
            Some(Cuts::Columns(ranks)) => {
                2.0 * self.layers as f64 * 2.0 * row * tokens * *ranks as f64
            }
            // An exchange in either pass, each of which counts half.
            Some(Cuts::Rows) => row * different(tokens, embedding.shape[0]),
            None => 0.0,
        } as usize;
        let passes = PassTimes {
            seconds,
            inside_nodes: place.inside_nodes,
            activations,
            ..PassTimes::default()
        };
        seconds / timeline(&plan.expect("usable settings"), &costs, &machine, &passes).total
    }
}

/// The expected number of different tokens among `tokens`, whose frequencies are inversely
/// proportional to their rank (Zipf's law).
fn different(tokens: f64, vocabulary: usize) -> f64 {
    let ranks = || (1..=vocabulary).map(|rank| rank as f64);
    let sum: f64 = ranks().map(|rank| 1.0 / rank).sum();
    ranks().map(|rank| 1.0 - (1.0 - 1.0 / (rank * sum)).powf(tokens)).sum()
}

/// Parameters that are cut into slices.
enum Cuts {
    /// All matrices, into columns for a number of neighbouring ranks.
    Columns(usize),
    /// The embedding, into rows for all ranks.
    Rows,
}

/// A way to place the parameters of a model.
struct Place {
    name: &'static str,
    placement: Placement,
    by_node: bool,
    inside_nodes: bool,
    cut: Option<Cuts>,
}

/// The index of the embedding among the parameters of a model.
const EMBEDDING: usize = 0;

/// Ranks of a node.
const NODE: usize = 8;

/// The numbers of ranks for which hiding is simulated.
const HIDING_RANKS: [usize; 7] = [8, 16, 32, 64, 128, 256, 512];

/// The part of linear scaling that remains for several models and placements: an efficiency by
/// number of ranks for each placement.
fn simulate_hiding() -> Vec<(&'static str, Vec<Efficiency>)> {
    let wide = [[4096, 4096], [4096, 1024], [4096, 1024], [4096, 4096]];
    let mlp = [[4096, 14336], [4096, 14336], [14336, 4096]];
    let llama = [&wide[..], &mlp].concat();
    let models = [
        Model::new("GPT 20 x 1280, float32", LAYERS, &layer(), VOCABULARY, (DType::F32, TOKENS)),
        Model::new("Llama-3-8B, bfloat16", 32, &llama, 128_256, (DType::BF16, 4_194_304.0)),
    ];
    let place = |name, placement, by_node, inside_nodes| Place {
        name,
        placement,
        by_node,
        inside_nodes,
        cut: None,
    };
    let hidden = || place("hidden, by node", Placement::Reduced, true, false);
    let owned = || place("owned inside nodes", Placement::Owned, true, true);
    let places = [
        place("replicated, flat", Placement::Replicated, false, false),
        place("replicated, by node", Placement::Replicated, true, false),
        hidden(),
        Place { name: "the same, rows", cut: Some(Cuts::Rows), ..hidden() },
        place("owned, by node", Placement::Owned, true, false),
        owned(),
        Place { name: "the same, slices of 4", cut: Some(Cuts::Columns(4)), ..owned() },
    ];
    let simulated = models.iter().map(|model| {
        let efficiency = |place: &Place| Efficiency {
            name: place.name.to_owned(),
            points: HIDING_RANKS.map(|ranks| (ranks, model.efficiency(ranks, place))).to_vec(),
        };
        (model.name, places.iter().map(efficiency).collect())
    });
    simulated.collect()
}

fn main() {
    let mut charts = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let (scaling, hiding) = (charts.next(), charts.next());
    let hidden = simulate_hiding();
    for (model, efficiencies) in &hidden {
        println!("{model}\n{}", table(efficiencies));
    }
    if let Some(path) = hiding {
        draw(&hiding_chart(&hidden[0]), &path);
    }
    let (costs, rate) = measured_costs();
    let elementwise = measured_adamw();
    let gpu = gpu();
    let faster = gpu.operations / rate;
    println!(
        "measured: {:.1} GFLOP/s, AdamW {:.2} GB/s; GPU: {faster:.0} times as fast",
        rate / 1e9,
        elementwise / 1e9
    );
    let elements: usize = parameters().iter().map(Parameter::elements).sum();
    let passes = PASSES * TOKENS * elements as f64;
    let links = Links { bandwidth: BANDWIDTH, latency: gpu.across.latency };
    let machine = Machine { links, node: None, elementwise };
    let measured = simulate("measured, 10 Gbit/s", &costs, &machine, passes / rate);

    let scaled = costs.scaled(1.0 / faster);
    let gpus = [("400 Gbit/s", gpu.across), ("450 GB/s", gpu.inside)];
    let gpus = gpus.into_iter().flat_map(|(name, links)| {
        let machine = Machine { links, node: None, elementwise: gpu.elementwise };
        simulate(&format!("GPU, {name}"), &scaled, &machine, passes / gpu.operations)
    });
    let efficiencies: Vec<Efficiency> = measured.into_iter().chain(gpus).collect();
    println!("{}", table(&efficiencies));
    if let Some(path) = scaling {
        draw(&scaling_chart(efficiencies, faster), &path);
    }
}

fn draw(chart: &Chart, path: &str) {
    chart.draw(Path::new(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
}

/// A row for every number of ranks.
fn table(efficiencies: &[Efficiency]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = efficiencies.iter().map(|curve| curve.name.clone());
    table.set_header(std::iter::once("ranks".to_owned()).chain(names));
    for (row, (ranks, _)) in efficiencies[0].points.iter().enumerate() {
        let values = efficiencies.iter().map(|curve| curve.points[row].1);
        let cells = values.map(|value| format!("{:.0} %", 100.0 * value));
        table.add_row(std::iter::once(ranks.to_string()).chain(cells));
    }
    table
}

/// A chart with one colour per machine. The curves of the optimizer are dashed, those of the whole
/// step solid.
fn scaling_chart(efficiencies: Vec<Efficiency>, faster: f64) -> Chart {
    let style = |index: usize| (COLORS[index / 2], index.is_multiple_of(2).then_some([9, 6]));
    chart(
        format!("strong scaling of a step, simulated; GPU: {faster:.0} times as fast as measured"),
        &efficiencies,
        style,
    )
}

/// A chart with one colour per placement. What is not hidden is dashed.
fn hiding_chart((model, efficiencies): &(&str, Vec<Efficiency>)) -> Chart {
    let style = |index: usize| (COLORS[index], (index < 2).then_some([9, 6]));
    chart(format!("strong scaling of an iteration, simulated: {model}"), efficiencies, style)
}

fn chart(
    title: String,
    efficiencies: &[Efficiency],
    style: impl Fn(usize) -> (RGBColor, Option<[i32; 2]>),
) -> Chart {
    // Logarithms of powers of two are equally far apart.
    let position = |ranks: usize| (ranks as f64).log2();
    let ranks: Vec<usize> = efficiencies[0].points.iter().map(|(ranks, _)| *ranks).collect();
    let curves = efficiencies.iter().enumerate().map(|(index, curve)| {
        let (color, dash) = style(index);
        let points = curve.points.iter().map(|(ranks, value)| (position(*ranks), *value));
        chart::Curve { name: curve.name.clone(), points: points.collect(), color, dash }
    });
    Chart {
        title,
        x: Axis {
            name: "ranks",
            range: position(ranks[0])..position(ranks[ranks.len() - 1]),
            ticks: ranks.iter().map(|ranks| (position(*ranks), ranks.to_string())).collect(),
        },
        y: Axis {
            name: "efficiency",
            range: 0.0..1.05,
            ticks: (0..=5_i32).map(|i| (f64::from(i) / 5.0, format!("{} %", 20 * i))).collect(),
        },
        curves: curves.collect(),
    }
}
