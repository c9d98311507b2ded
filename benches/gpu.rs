//! Times of launches, symmetric products, iterations, steps and collectives on a GPU; see `docs/gpu.md`.
//!
//! ```text
//! BURN_DEVICE=cuda cargo bench --bench gpu --features cuda,burn/autotune
//! ```
//!
//! Prints tables in Markdown: medians, ratios to Burn's own matmul in the same run, TFLOP/s of the operations that
//! the full products would need, and the fraction of what the hardware needs at least. `peers/torch_gpu.py` prints
//! the same for PyTorch. `train_lm` and its arguments run that example.

#[path = "common/collectives.rs"]
mod collectives;
mod common;
#[path = "../tests/common/skips.rs"]
mod skips;
#[allow(dead_code)] // this program calls `run`, not the example's `main`
#[path = "../examples/train_lm/main.rs"]
mod train_lm;

use std::env;
use std::time::Instant;

use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, Tensor};
use clap::{Parser, ValueEnum};
use common::Matrices;
use distmuon::dist::World;
use distmuon::orthogonalize::{Engine, cost};
use distmuon::{Coefficients, Form, IterationDtype, Kernels, MuonConfig, NewtonSchulz, Rule};

/// The rate that a dense product of a half type is taken to reach on an H100 or H200 of the SXM kind: four fifths of
/// the 989 TFLOP/s of NVIDIA's data sheet. An assumption.
const FLOOR_TFLOPS: f64 = 790.0;

/// The least that a measurement takes, in milliseconds: a synchronisation and a flush of Burn's queue take longer
/// than many a kernel, so that they come once for many launches.
const LEAST_MS: f64 = 3.0;

#[derive(Parser)]
struct Options {
    /// Subjects to measure; all if none is named.
    #[arg(value_enum, default_values_t = Subject::value_variants().to_vec())]
    subjects: Vec<Subject>,
    /// Shapes of products and iterations.
    #[arg(long, value_enum, default_value_t = Group::Small)]
    group: Group,
    /// Other shapes, of steps too, as a device in software needs: `[k x] m x n`, separated by commas.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Type of products and iterations.
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    dtype: Type,
    /// Measurements, of which the median counts.
    #[arg(long, default_value_t = 9)]
    repeats: usize,
    /// Rate that the floor assumes, in TFLOP/s.
    #[arg(long, default_value_t = FLOOR_TFLOPS)]
    floor: f64,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq)]
enum Subject {
    /// The host's time for a launch.
    Launches,
    /// Symmetric products.
    Products,
    /// Whole iterations.
    Iterations,
    /// Steps of the matrices of a layer.
    Steps,
    /// Collectives, over NCCL on CUDA.
    Collectives,
}

#[derive(ValueEnum, Clone, Copy)]
enum Group {
    /// Single matrices of small language models.
    Small,
    /// Those of large ones.
    Large,
    /// Batches of both, and of a vision model.
    Batched,
}

impl Group {
    /// `[k, m, n]`.
    fn shapes(self) -> Vec<[usize; 3]> {
        match self {
            Self::Small => vec![
                [1, 768, 3072],
                [1, 1024, 1024],
                [1, 1024, 4096],
                [1, 2048, 2048],
                [1, 2048, 8192],
            ],
            Self::Large => vec![[1, 4096, 4096], [1, 4096, 14336], [1, 7168, 18432]],
            Self::Batched => vec![[128, 2048, 2048], [16, 4096, 8192], [126, 64, 576]],
        }
    }
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum Type {
    F32,
    F16,
    Bf16,
}

impl Type {
    fn of_products(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    fn of_iterations(self) -> IterationDtype {
        match self {
            Self::F32 => IterationDtype::F32,
            Self::F16 => IterationDtype::F16,
            Self::Bf16 => IterationDtype::Bf16,
        }
    }
}

fn main() -> anyhow::Result<()> {
    // The example is part of this program: a machine without Rust gets what both link only once.
    if env::args_os().nth(1).is_some_and(|first| first == "train_lm") {
        return train_lm::run(env::args_os().skip(1));
    }
    let options = Options::parse();
    let device = Device::default();
    println!("device: {device:?}, {}", fusion());
    let shapes = match options.shapes.is_empty() {
        true => options.group.shapes(),
        false => options.shapes.iter().map(|shape| parse(shape)).collect::<anyhow::Result<_>>()?,
    };
    let title = match options.shapes.is_empty() {
        true => options.group.to_possible_value().expect("no value is skipped").get_name().into(),
        false => "given shapes".to_owned(),
    };
    let dtype = options.dtype;
    let bench =
        Bench { device: device.clone(), title, repeats: options.repeats, floor: options.floor };
    for subject in options.subjects {
        let of_type = matches!(subject, Subject::Products | Subject::Iterations);
        if of_type && !device.supports_dtype(dtype.of_products()) {
            skips::lacks(format!("{dtype:?}"));
            continue;
        }
        match subject {
            Subject::Launches => launches(&bench),
            Subject::Products => products(&bench, dtype.of_products(), &shapes),
            Subject::Iterations => iterations(&bench, dtype.of_iterations(), &shapes),
            Subject::Steps if options.shapes.is_empty() => {
                steps(&bench, "a GPT-2 layer (width 768)", &common::LAYER)?;
            }
            Subject::Steps => {
                let layer: Vec<_> = shapes.iter().map(|[_, m, n]| [*m, *n]).collect();
                steps(&bench, &options.shapes.join(", "), &layer)?;
            }
            Subject::Collectives => collectives()?,
        }
    }
    Ok(())
}

fn fusion() -> &'static str {
    if cfg!(feature = "fusion") { "with Burn's fusion" } else { "without Burn's fusion" }
}

fn parse(shape: &str) -> anyhow::Result<[usize; 3]> {
    let sizes = shape.split('x').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    match sizes[..] {
        [m, n] => Ok([1, m, n]),
        [k, m, n] => Ok([k, m, n]),
        _ => anyhow::bail!("--shapes: {shape} is neither MxN nor KxMxN"),
    }
}

/// Milliseconds of one run among many.
struct Time {
    /// Of the host and the device, up to the end of the last run.
    total: f64,
    /// Of the host alone, which queues one run after the other.
    host: f64,
}

/// The device and the way that it is measured.
struct Bench {
    device: Device,
    /// Of the shapes.
    title: String,
    repeats: usize,
    /// In TFLOP/s.
    floor: f64,
}

impl Bench {
    /// Median times, after what is compiled and tuned at first use.
    fn time<T>(&self, mut run: impl FnMut() -> T) -> Time {
        let mut sample = |runs: usize| {
            let start = Instant::now();
            // Kept: nothing may be left out because nobody reads it.
            let results: Vec<T> = (0..runs).map(|_| run()).collect();
            let host = start.elapsed();
            self.device.sync().expect("the device works");
            let total = start.elapsed();
            drop(results);
            [total, host].map(|time| time.as_secs_f64() * 1e3 / runs as f64)
        };
        for _ in 0..3 {
            sample(1);
        }
        let mut runs = 1;
        while sample(runs)[0] * (runs as f64) < LEAST_MS {
            runs *= 2;
        }
        let samples: Vec<_> = (0..self.repeats.max(1)).map(|_| sample(runs)).collect();
        let median = |of: usize| {
            let mut times: Vec<f64> = samples.iter().map(|sample| sample[of]).collect();
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Time { total: median(0), host: median(1) }
    }

    /// The part of some milliseconds that so many operations need at least.
    fn of_floor(&self, operations: f64, ms: f64) -> String {
        format!("{:.0} %", 100.0 * operations / self.floor * 1e-9 / ms)
    }
}

/// The fewest operations of five steps on a matrix.
fn operations(m: usize, n: usize) -> f64 {
    let (short, long) = (m.min(n), m.max(n));
    cost::standard(5, short, long, |_| 0.5).min(cost::gram(5, 1, short, long, |_| 0.5))
}

/// A result that the device was told to compute: Burn's fusion would join what many runs queue, and compile a
/// kernel for every number of them.
fn told<T>(device: &Device, result: T) -> T {
    device.flush().expect("the device works");
    result
}

fn random(shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
    Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// Prints the host's time for the smallest launches: of a kernel by CubeCL, and of operations by Burn.
fn launches(bench: &Bench) {
    let device = &bench.device;
    println!("\n## Launches on 4 KB\n");
    println!("| launch | host, µs | host and device, µs |\n|---|---|---|");
    let print = |name: &str, time: Time| {
        println!("| {name} | {:.2} | {:.2} |", time.host * 1e3, time.total * 1e3);
    };
    #[cfg(feature = "cube")]
    if let Some(launch) = direct(device) {
        print("one kernel, by CubeCL", bench.time(launch));
    }
    let values = Tensor::<1>::ones([1024], (device, DType::F32));
    let name = format!("`x + 1` and a flush, {}", fusion());
    print(&name, bench.time(|| told(device, values.clone().add_scalar(1.0))));
    // Not fused with the one before, which it needs.
    let mut sorted = values;
    print(
        "`x.flip()` of the one before",
        bench.time(|| {
            sorted = sorted.clone().flip([0]);
            sorted.clone()
        }),
    );
}

/// A launch of a kernel of this crate past Burn, on its CubeCL devices.
#[cfg(feature = "cube")]
fn direct(device: &Device) -> Option<impl FnMut()> {
    use burn::backend::DispatchDevice;
    use cubecl::ir::{ElemType, FloatKind};
    use distmuon_kernels::fused::{Part, refuse};

    let DispatchDevice::Cube(device) = device.as_dispatch() else { return None };
    let client = device.client();
    let handle = client.create_from_slice(&[0; 4096]);
    let flags = client.create_from_slice(&[0; 4]);
    let parts = [(Part { handle, rows: 1, elements: 1024 }, 0)];
    let dtype = ElemType::Float(FloatKind::F32);
    Some(move || refuse(&client, &parts, &flags, 1, dtype, f32::MAX).expect("buffers of 4 KB"))
}

/// The symmetric products of an iteration, as Burn's operations and as the kernels compute them.
fn products(bench: &Bench, dtype: DType, shapes: &[[usize; 3]]) {
    let device = &bench.device;
    println!("\n## Symmetric products, {dtype:?}, {}\n", bench.title);
    println!(
        "| shape | product | Burn, ms | auto, ms | tuned, ms | Burn / auto | Burn / tuned | TFLOP/s of the \
         full product | of the floor | host, ms | kernel that was measured to be the fastest |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for &[k, m, n] in shapes {
        let x = random([k, m, n], dtype, device);
        // Small enough for sums in half precision.
        let r = random([k, m, m], dtype, device).mul_scalar(1e-2);
        let r = r.clone() + r.swap_dims(1, 2);
        let full = || x.clone().matmul(x.clone().swap_dims(1, 2));
        let row = Row { name: "X X^T", shape: [k, m, n], inner: n, dtype };
        row.print(bench, full, |engine| engine.syrk(x.clone()));

        let full = || r.clone().matmul(r.clone()).mul_scalar(2.0) + r.clone().mul_scalar(-5.0);
        let row = Row { name: "b R + c R^2", inner: m, ..row };
        row.print(bench, full, |engine| {
            engine.symmetric_product(r.clone(), r.clone(), r.clone(), 2.0, -5.0)
        });

        let z = r.clone().mul_scalar(0.5);
        let full = || r.clone().matmul(z.clone()) + r.clone().mul_scalar(3.0);
        let row = Row { name: "Q Z + a Q", ..row };
        row.print(bench, full, |engine| {
            engine.symmetric_product(r.clone(), z.clone(), r.clone(), 1.0, 3.0)
        });
    }
}

/// A row of the table of products.
struct Row {
    name: &'static str,
    shape: [usize; 3],
    /// The length of the sums.
    inner: usize,
    dtype: DType,
}

impl Row {
    fn print(
        &self,
        bench: &Bench,
        full: impl Fn() -> Tensor<3>,
        symmetric: impl Fn(Engine) -> Tensor<3>,
    ) {
        let Self { name, shape: [k, m, n], inner, dtype } = *self;
        let device = &bench.device;
        let engine = |kernels| Engine::choose(kernels, device, dtype.into());
        let burn = bench.time(|| told(device, full())).total;
        let [auto, tuned] = [Kernels::Auto, Kernels::Tuned]
            .map(|kernels| bench.time(|| told(device, symmetric(engine(kernels)))));
        let operations = 2.0 * (k * m * m * inner) as f64;
        // What is told is the choice for a product without an addend.
        let kernel = match name {
            "X X^T" => engine(Kernels::Tuned).kernel(device, dtype.into(), [k, m, inner]),
            _ => String::new(),
        };
        let (host, auto, tuned) = (tuned.host, auto.total, tuned.total);
        println!(
            "| {k} x {m}x{n} | {name} | {burn:.3} | {auto:.3} | {tuned:.3} | {:.2} | {:.2} | {:.0} | {} | \
             {host:.3} | {kernel} |",
            burn / auto,
            burn / tuned,
            operations / tuned * 1e-9,
            bench.of_floor(operations / 2.0, tuned),
        );
    }
}

fn iterations(bench: &Bench, dtype: IterationDtype, shapes: &[[usize; 3]]) {
    let device = &bench.device;
    println!("\n## Newton-Schulz, five steps, {dtype:?}, {}\n", bench.title);
    println!(
        "| shape | Burn's matmul, ms | standard, ms | Gram, ms | chosen | best ratio | of the floor | host, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for &[k, m, n] in shapes {
        let x = random([k, m, n], DType::F32, device);
        let of = |form, kernels| {
            let set = Coefficients::PolarExpressCushioned;
            NewtonSchulz::new(&set, 5, 1e-7, dtype, form)
                .expect("these coefficients are stable")
                .with_kernels(kernels)
        };
        let time = |form, kernels| {
            let iteration = of(form, kernels);
            bench.time(|| told(device, iteration.orthogonalize(x.clone())))
        };
        let burn = time(Form::Standard, Kernels::Portable).total;
        let Time { total: standard, host } = time(Form::Standard, Kernels::Tuned);
        let gram = time(Form::Gram, Kernels::Tuned).total;
        let best = standard.min(gram);
        let chosen = of(Form::Auto, Kernels::Tuned).explain(&x);
        let place = if chosen.in_one_cube { ", one cube" } else { "" };
        println!(
            "| {k} x {m}x{n} | {burn:.3} | {standard:.3} | {gram:.3} | {:?}{place} | {:.2} | {} | {host:.3} |",
            chosen.form,
            burn / best,
            bench.of_floor(k as f64 * operations(m, n), best),
        );
    }
}

/// Whole steps of the matrices of a layer, one parameter at a time and all of them together.
fn steps(bench: &Bench, of: &str, layer: &[[usize; 2]]) -> distmuon::Result<()> {
    println!("\n## A step of {of}\n");
    println!("| optimizer | ms | host, ms | of the floor of Muon |\n|---|---|---|---|");
    let muon = MuonConfig::new();
    let adamw = MuonConfig::new().with_rule(Rule::adamw(".*"));
    let portable = |config: &MuonConfig| config.clone().with_kernels(Kernels::Portable);
    let tuned = muon.clone().with_kernels(Kernels::Tuned);
    let recorded = muon.clone().with_graphs(true);
    for (name, config) in [
        ("Muon", &muon),
        ("Muon, tuned", &tuned),
        ("Muon, recorded", &recorded),
        ("Muon on Burn's operations", &portable(&muon)),
        ("AdamW", &adamw),
        ("AdamW on Burn's operations", &portable(&adamw)),
    ] {
        step(bench, name, layer, |model| {
            let mut optim = config.init(model);
            Ok(move |model, grads| Ok(optim.step(1e-3, model, grads)))
        })?;
    }
    for (name, config) in [
        ("Muon, whole model", &muon),
        ("Muon, whole model, tuned", &tuned),
        ("Muon, whole model, recorded", &recorded),
        ("AdamW, whole model", &adamw),
    ] {
        step(bench, name, layer, |model| {
            let mut optim = config.init_whole(model)?;
            Ok(move |model, grads| optim.step(1e-3, model, grads))
        })?;
    }
    Ok(())
}

/// A row of the table of steps, for an optimizer that is made for a model.
fn step<Step>(
    bench: &Bench,
    name: &str,
    layer: &[[usize; 2]],
    init: impl FnOnce(&Matrices) -> distmuon::Result<Step>,
) -> distmuon::Result<()>
where
    Step: FnMut(Matrices, GradientsParams) -> distmuon::Result<Matrices>,
{
    let made = || Matrices::new(layer, &bench.device.clone().autodiff());
    let (model, values) = (made(), made());
    let mut step = init(&model)?;
    // Nobody else holds the model, so that it is updated in place.
    let mut trained = Some(model);
    let Time { total, host } = bench.time(|| {
        let model = trained.take().expect("given back below");
        let grads = model.gradients_from(&values);
        trained = Some(told(&bench.device, step(model, grads).expect("one device that works")));
    });
    let of_floor = match name.starts_with("Muon") {
        true => bench.of_floor(layer.iter().map(|[m, n]| operations(*m, *n)).sum(), total),
        false => "-".to_owned(),
    };
    println!("| {name} | {total:.3} | {host:.3} | {of_floor} |");
    Ok(())
}

/// Collectives of the processes that a launcher started over NCCL, or of one; on other devices of two threads.
fn collectives() -> distmuon::Result<()> {
    println!("\n## Collectives\n");
    #[cfg(feature = "cuda")]
    if skips::is_on_cuda() {
        let world = nccl()?;
        let rows = collectives::measure(&world)?;
        if world.is_main() {
            collectives::print(&world.comm().version(), world.size(), &rows);
        }
        return Ok(());
    }
    let devices = vec![Device::default(); 2];
    let rows = World::threads(devices, |world| collectives::measure(&world))?;
    collectives::print("threads", 2, &rows[0]);
    Ok(())
}

#[cfg(feature = "cuda")]
fn nccl() -> distmuon::Result<World> {
    use std::time::Duration;

    use distmuon::dist::Launch;

    let alone = Launch {
        rank: 0,
        world_size: 1,
        local_rank: 0,
        address: Some(("127.0.0.1".into(), 0)),
        secret: String::new(),
    };
    let launch = if Launch::is_in_env() { Launch::from_env()? } else { alone };
    World::nccl(&launch, launch.device(), Duration::from_secs(60))
}
