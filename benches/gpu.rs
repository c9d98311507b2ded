//! Times of launches, symmetric products, iterations, steps and collectives on a GPU; see
//! `docs/guide/gpu.md`.
//!
//! ```text
//! BURN_DEVICE=cuda cargo bench --bench gpu --features cuda,burn/autotune
//! ```
//!
//! Prints tables in Markdown: medians, ratios to Burn's own matmul in the same run, TFLOP/s of the
//! operations that the full products would need, and the ratio of the floor to the time ("of the
//! floor"). The floor is the shortest time in which the hardware could do the operations.
//! `peers/torch_gpu.py` prints the same for PyTorch. With the first argument `train_lm`, the
//! program runs that example with the other arguments, and again with those after `then`.

#[cfg(feature = "cuda")]
mod bytes;
mod common;
#[cfg(feature = "cuda")]
#[allow(dead_code)] // tests need more of it
#[path = "../cubecl_kernels/tests/driver/mod.rs"]
mod driver;
#[cfg(feature = "cuda")]
mod host;
#[allow(dead_code)] // this program calls `run`, not the example's `main`
#[path = "../examples/train_lm/main.rs"]
mod train_lm;

use std::env;
use std::time::Instant;

use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, Tensor};
use clap::{Parser, ValueEnum};
use common::{Matrices, median};
use distmuon::comm::World;
use distmuon::orthogonalize::cost;
use distmuon::{
    Coefficients, ComputePath, IterationDtype, IterationForm, KernelPolicy, MuonConfig,
    NewtonSchulzConfig, RoutingRule,
};

/// The rate that a dense product in half precision is assumed to reach on an H100 or H200 SXM: four
/// fifths of the 989 TFLOP/s of NVIDIA's data sheet.
const FLOOR_TFLOPS: f64 = 790.0;

/// Shortest time of a measurement, in milliseconds. A synchronisation and a flush of Burn's queue
/// take longer than a short kernel, so each measurement has many launches and only one of each.
const MIN_MS: f64 = 3.0;

#[derive(Parser)]
struct Options {
    /// Subjects to measure. Default: all that need no stand-in for the driver.
    #[arg(value_enum, default_values_t = Subject::on_devices())]
    subjects: Vec<Subject>,
    /// Shapes of products and iterations.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "small")]
    group: Vec<ShapeGroup>,
    /// Other shapes, also for steps, such as small ones for a software device: `[k x] m x n`,
    /// separated by commas.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Types of products and iterations.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16")]
    dtype: Vec<Type>,
    /// Measurements of which the median is taken.
    #[arg(long, default_value_t = 9)]
    repeats: usize,
    /// Assumed rate of the floor, in TFLOP/s.
    #[arg(long, default_value_t = FLOOR_TFLOPS)]
    floor: f64,
    // Cargo passes it to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq)]
enum Subject {
    /// Host time of a launch.
    Launches,
    /// Symmetric products.
    Products,
    /// Products of native kernels, with tiles of every shape.
    Native,
    /// Whole iterations.
    Iterations,
    /// Steps of the matrices of a layer.
    Steps,
    /// Collectives, over NCCL on CUDA.
    Collectives,
    /// The host's part of a step, on the stand-in for CUDA's driver.
    Host,
}

impl Subject {
    fn on_devices() -> Vec<Self> {
        Self::value_variants().iter().copied().filter(|subject| *subject != Self::Host).collect()
    }
}

#[derive(ValueEnum, Clone, Copy)]
enum ShapeGroup {
    /// Single matrices of small language models.
    Small,
    /// Single matrices of large language models.
    Large,
    /// Batches of matrices of language models, and of a vision model.
    Batched,
}

impl ShapeGroup {
    /// The shapes `[k, m, n]`.
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
            // The first two are those of GPT-2 small.
            Self::Batched => vec![
                [48, 768, 768],
                [24, 768, 3072],
                [16, 1024, 4096],
                [128, 2048, 2048],
                [16, 4096, 8192],
                [126, 64, 576],
            ],
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
    /// The type of products.
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// The type of iterations.
    fn iteration_dtype(self) -> IterationDtype {
        match self {
            Self::F32 => IterationDtype::F32,
            Self::F16 => IterationDtype::F16,
            Self::Bf16 => IterationDtype::Bf16,
        }
    }
}

fn main() -> anyhow::Result<()> {
    // The example is part of this program, so that a machine without Rust gets their common
    // libraries only once.
    if env::args_os().nth(1).is_some_and(|first| first == "train_lm") {
        return train();
    }
    let options = Options::parse();
    let device = Device::default();
    println!("device: {device:?}, {}", fusion());
    for subject in &options.subjects {
        measure(*subject, &options, &device)?;
    }
    Ok(())
}

/// Runs the example once for the arguments up to each `then`. One process compiles and tunes each
/// kernel once.
fn train() -> anyhow::Result<()> {
    let stop = train_lm::start()?;
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let mut runs = arguments.split(|argument| argument == "then");
    runs.try_for_each(|run| train_lm::run(run.iter().cloned(), &stop))
}

/// Measures a subject on a device.
fn measure(subject: Subject, options: &Options, device: &Device) -> anyhow::Result<()> {
    match subject {
        Subject::Launches => launches(&options.bench(device, "")),
        Subject::Products => options.for_each(device, |bench, dtype, shapes| {
            products(bench, dtype.dtype(), shapes);
        })?,
        Subject::Native => options.for_each(device, native_products)?,
        Subject::Iterations => options.for_each(device, |bench, dtype, shapes| {
            iterations(bench, dtype.iteration_dtype(), shapes);
        })?,
        Subject::Steps if options.shapes.is_empty() => {
            steps(&options.bench(device, ""), "a GPT-2 layer (width 768)", &common::LAYER)?;
        }
        Subject::Steps => {
            let layer: Vec<_> = options.given_shapes()?.iter().map(|[_, m, n]| [*m, *n]).collect();
            steps(&options.bench(device, ""), &options.shapes.join(", "), &layer)?;
        }
        Subject::Collectives => collectives()?,
        #[cfg(feature = "cuda")]
        Subject::Host => host::run(device)?,
        #[cfg(not(feature = "cuda"))]
        Subject::Host => anyhow::bail!("the subject `host` needs the feature `cuda`"),
    }
    Ok(())
}

impl Options {
    fn bench(&self, device: &Device, title: &str) -> Bench {
        let Self { repeats, floor, .. } = *self;
        Bench { device: device.clone(), title: title.to_owned(), repeats, floor }
    }

    fn given_shapes(&self) -> anyhow::Result<Vec<[usize; 3]>> {
        self.shapes.iter().map(|shape| parse(shape)).collect()
    }

    /// The names and shapes of the groups to measure.
    fn groups(&self) -> anyhow::Result<Vec<(String, Vec<[usize; 3]>)>> {
        if !self.shapes.is_empty() {
            return Ok(vec![("shapes of the command line".to_owned(), self.given_shapes()?)]);
        }
        let name = |group: ShapeGroup| group.to_possible_value().expect("no value is skipped");
        let group = |group: &ShapeGroup| (name(*group).get_name().to_owned(), group.shapes());
        Ok(self.group.iter().map(group).collect())
    }

    /// Measures with every type and group of shapes, in the order of the command line: a run that
    /// is ended has measured what comes first.
    fn for_each(
        &self,
        device: &Device,
        measure: impl Fn(&Bench, Type, &[[usize; 3]]),
    ) -> anyhow::Result<()> {
        let groups = self.groups()?;
        for dtype in self.dtype.iter().copied() {
            if !device.supports_dtype(dtype.dtype()) {
                distmuon_skips::lacks(format!("{dtype:?}"));
                continue;
            }
            for (title, shapes) in &groups {
                measure(&self.bench(device, title), dtype, shapes);
            }
        }
        Ok(())
    }
}

fn fusion() -> &'static str {
    if cfg!(feature = "fusion") { "with Burn's fusion" } else { "without Burn's fusion" }
}

fn parse(shape: &str) -> anyhow::Result<[usize; 3]> {
    let sizes = shape.split('x').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    match sizes[..] {
        [m, n] => Ok([1, m, n]),
        [k, m, n] => Ok([k, m, n]),
        _ => anyhow::bail!("--shapes {shape} is not a shape: expected MxN or KxMxN"),
    }
}

/// The time of one run, in milliseconds: the average over several runs in a row.
struct Time {
    /// Host and device, up to the end of the last run.
    total: f64,
    /// The host alone, which queues one run after the other.
    host: f64,
}

/// The device, and how it is measured.
struct Bench {
    device: Device,
    /// Name of the shapes.
    title: String,
    repeats: usize,
    /// Rate of the floor, in TFLOP/s.
    floor: f64,
}

impl Bench {
    /// Measures median times. Runs before that, which compile and tune kernels, do not count.
    fn time<T>(&self, mut run: impl FnMut() -> T) -> Time {
        let mut sample = |runs: usize| {
            let start = Instant::now();
            // Results are kept until the end, since Burn may omit the computation of dropped ones.
            let results: Vec<T> = (0..runs).map(|_| run()).collect();
            let host = start.elapsed();
            self.device.sync().expect("every kernel of the device succeeds");
            let total = start.elapsed();
            drop(results);
            [total, host].map(|time| time.as_secs_f64() * 1e3 / runs as f64)
        };
        for _ in 0..3 {
            sample(1);
        }
        let mut runs = 1;
        while sample(runs)[0] * (runs as f64) < MIN_MS {
            runs *= 2;
        }
        let samples = (0..self.repeats.max(1)).map(|_| sample(runs));
        let (totals, hosts) = samples.map(|[total, host]| (total, host)).unzip();
        Time { total: median(totals), host: median(hosts) }
    }

    /// The ratio of the floor of some operations to their time.
    fn floor_ratio(&self, operations: f64, ms: f64) -> String {
        format!("{:.0} %", 100.0 * operations / self.floor * 1e-9 / ms)
    }
}

/// The operations of five steps on a matrix, in the form that needs fewer.
fn min_operations(m: usize, n: usize) -> f64 {
    let (short, long) = (m.min(n), m.max(n));
    let five = cost::Steps { all: 5, with_square: 5 };
    cost::standard(five, short, long, |_| 0.5).min(cost::gram(five, 1, short, long, |_| 0.5))
}

/// Sends the operations of a result to the device. Otherwise Burn's fusion would join the
/// operations of several runs, and compile a kernel for every number of runs.
fn flushed<T>(device: &Device, result: T) -> T {
    device.flush().expect("every kernel of the device succeeds");
    result
}

fn random(shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
    Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// Prints the host time of the smallest launches: of a kernel by CubeCL, and of operations by Burn.
fn launches(bench: &Bench) {
    let device = &bench.device;
    println!("\n## Launches on 4 KB\n");
    println!("| launch | host, µs | host and device, µs |\n|---|---|---|");
    let print = |name: &str, time: Time| {
        println!("| {name} | {:.2} | {:.2} |", time.host * 1e3, time.total * 1e3);
    };
    #[cfg(feature = "cube")]
    if let Some(launch) = cubecl_launch(device) {
        print("one kernel, by CubeCL", bench.time(launch));
    }
    let values = Tensor::<1>::ones([1024], (device, DType::F32));
    let name = format!("`x + 1` and a flush, {}", fusion());
    print(&name, bench.time(|| flushed(device, values.clone().add_scalar(1.0))));
    // A flip of the previous result cannot be fused with the previous flip.
    let mut flipped = values;
    print(
        "`x.flip()` of the one before",
        bench.time(|| {
            flipped = flipped.clone().flip([0]);
            flipped.clone()
        }),
    );
}

/// Launches a kernel of this crate without Burn. `None` if the device is not one of CubeCL's.
#[cfg(feature = "cube")]
fn cubecl_launch(device: &Device) -> Option<impl FnMut()> {
    use burn::backend::DispatchDevice;
    use cubecl::ir::{ElemType, FloatKind};
    use distmuon_kernels::fused::{Rows, reject};

    let DispatchDevice::Cube(device) = device.as_dispatch() else { return None };
    let client = device.client();
    let handle = client.create_from_slice(&[0; 4096]);
    let flags = client.create_from_slice(&[0; 4]);
    let tensors = [(Rows { handle, count: 1, elements: 1024 }, 0)];
    let dtype = ElemType::Float(FloatKind::F32);
    Some(move || {
        reject(&client, &tensors, &flags, 1, dtype, f32::MAX).expect("the buffers have room");
    })
}

/// Measures the symmetric products of an iteration, by Burn's operations and by the kernels.
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
        // Scaled down, so that sums do not overflow in half precision.
        let r = random([k, m, m], dtype, device).mul_scalar(1e-2);
        let r = r.clone() + r.swap_dims(1, 2);
        let full = || x.clone().matmul(x.clone().swap_dims(1, 2));
        let row = Row { name: "X X^T", shape: [k, m, n], inner: n, dtype };
        row.print(bench, full, |path| path.product(x.clone(), None));

        let full = || r.clone().matmul(r.clone()).mul_scalar(2.0) + r.clone().mul_scalar(-5.0);
        let row = Row { name: "b R + c R^2", inner: m, ..row };
        row.print(bench, full, |path| path.product(r.clone(), Some([2.0, -5.0])));

        // With `Z = Q`.
        let full = || r.clone().matmul(r.clone()) + r.clone().mul_scalar(3.0);
        let row = Row { name: "Q Z + a Q", ..row };
        row.print(bench, full, |path| path.product(r.clone(), Some([1.0, 3.0])));
    }
}

/// A row of the table of products.
struct Row {
    name: &'static str,
    shape: [usize; 3],
    /// Length of the sums.
    inner: usize,
    dtype: DType,
}

impl Row {
    fn print(
        &self,
        bench: &Bench,
        full: impl Fn() -> Tensor<3>,
        symmetric: impl Fn(ComputePath) -> Tensor<3>,
    ) {
        let Self { name, shape: [k, m, n], inner, dtype } = *self;
        let device = &bench.device;
        let path = |kernels| ComputePath::choose(kernels, device, dtype.into());
        let burn = bench.time(|| flushed(device, full())).total;
        let [auto, tuned] = [KernelPolicy::Auto, KernelPolicy::Tuned]
            .map(|kernels| bench.time(|| flushed(device, symmetric(path(kernels)))));
        let operations = 2.0 * (k * m * m * inner) as f64;
        // The name is that of the kernel for a product without an addend: not for the other rows.
        let kernel = match name {
            "X X^T" => path(KernelPolicy::Tuned).kernel(device, dtype.into(), [k, m, inner]),
            _ => String::new(),
        };
        let (host, auto, tuned) = (tuned.host, auto.total, tuned.total);
        println!(
            "| {k} x {m}x{n} | {name} | {burn:.3} | {auto:.3} | {tuned:.3} | {:.2} | {:.2} | {:.0} | {} | \
             {host:.3} | {kernel} |",
            burn / auto,
            burn / tuned,
            operations / tuned * 1e-9,
            bench.floor_ratio(operations / 2.0, tuned),
        );
    }
}

/// Measures the products of an iteration by native kernels, with tiles of every shape, and full
/// ones by cuBLASLt.
#[cfg(feature = "cuda")]
fn native_products(bench: &Bench, dtype: Type, shapes: &[[usize; 3]]) {
    use distmuon_kernels::native::{Element, Layout, Native};

    let element = match dtype {
        Type::F16 => Some(Element::F16),
        Type::Bf16 => Some(Element::Bf16),
        Type::F32 => None,
    };
    let native = match (element, distmuon_skips::is_on_cuda()) {
        (Some(element), true) => match Native::of(0, element) {
            Ok(native) => native,
            Err(reason) => return distmuon_skips::excused(format!("native products: {reason}")),
        },
        _ => return distmuon_skips::excused("native products, which need CUDA and half precision"),
    };
    println!("\n## Native products, {dtype:?}, {}\n", bench.title);
    println!("{native}\n");
    println!(
        "| shape | product | ms | TFLOP/s of the full product | of the floor | kernel |\n\
         |---|---|---|---|---|---|"
    );
    for &[batch, m, n] in shapes {
        let (short, long) = (m.min(n), m.max(n));
        let products = [
            ("X X^T", Layout::RowsColumns, [short, short, long], true),
            ("X^T X", Layout::ColumnsRows, [short, short, long], true),
            ("R R", Layout::RowsColumns, [short, short, short], true),
            ("Q X", Layout::RowsRows, [short, long, short], false),
        ];
        for (name, layout, sizes @ [rows, columns, inner], lower) in products {
            let all = 2.0 * (batch * rows * columns * inner) as f64;
            let needed = if lower { all / 2.0 } else { all };
            let measured = match native.measure(layout, batch, sizes, lower) {
                Ok(measured) => measured,
                Err(reason) => {
                    println!("| {batch} x {m}x{n} | {name} | failed: {reason} | | | |");
                    continue;
                }
            };
            for kernel in measured {
                let ms = kernel.seconds * 1e3;
                println!(
                    "| {batch} x {m}x{n} | {name} | {ms:.4} | {:.0} | {} | {} |",
                    all / ms * 1e-9,
                    bench.floor_ratio(needed, ms),
                    kernel.kernel,
                );
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn native_products(_: &Bench, _: Type, _: &[[usize; 3]]) {
    distmuon_skips::excused("native products, which need the feature `cuda`");
}

/// Measures five steps of Newton-Schulz, in both forms.
fn iterations(bench: &Bench, dtype: IterationDtype, shapes: &[[usize; 3]]) {
    let device = &bench.device;
    println!("\n## Newton-Schulz, five steps, {dtype:?}, {}\n", bench.title);
    println!(
        "| shape | Burn's matmul, ms | standard, ms | Gram, ms | chosen | best ratio | of the floor | host, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for &[k, m, n] in shapes {
        let x = random([k, m, n], DType::F32, device);
        let iteration = |form, kernels| {
            NewtonSchulzConfig::new()
                .with_coefficients(Coefficients::PolarExpressCushioned)
                .with_steps(Some(5))
                .with_dtype(dtype)
                .with_form(form)
                .init()
                .expect("these coefficients are stable")
                .with_kernels(kernels)
        };
        let time = |form, kernels| {
            let iteration = iteration(form, kernels);
            bench.time(|| flushed(device, iteration.orthogonalize(x.clone())))
        };
        let burn = time(IterationForm::Standard, KernelPolicy::Portable).total;
        let Time { total: standard, host } = time(IterationForm::Standard, KernelPolicy::Auto);
        let gram = time(IterationForm::Gram, KernelPolicy::Auto).total;
        let best = standard.min(gram);
        let chosen = iteration(IterationForm::Auto, KernelPolicy::Auto).explain(&x);
        let single = if chosen.single_kernel { ", single kernel" } else { "" };
        println!(
            "| {k} x {m}x{n} | {burn:.3} | {standard:.3} | {gram:.3} | {:?}{single} | {:.2} | {} | {host:.3} |",
            chosen.form,
            burn / best,
            bench.floor_ratio(k as f64 * min_operations(m, n), best),
        );
    }
}

/// Measures whole steps of the matrices of a layer, one parameter at a time and all of them
/// together.
fn steps(bench: &Bench, title: &str, layer: &[[usize; 2]]) -> distmuon::Result<()> {
    println!("\n## A step of {title}\n");
    println!(
        "| optimizer | ms | host, ms | of the floor of Muon | the first, s |\n|---|---|---|---|---|"
    );
    let muon = MuonConfig::new();
    let adamw = MuonConfig::new().with_rule(RoutingRule::adamw(".*"));
    let portable = |config: &MuonConfig| config.clone().with_kernels(KernelPolicy::Portable);
    let tuned = muon.clone().with_kernels(KernelPolicy::Tuned);
    // Without native kernels, which are recorded in any case.
    let float32 = |graphs| {
        let iteration = NewtonSchulzConfig::new().with_dtype(IterationDtype::F32);
        muon.clone().with_newton_schulz(iteration.with_graphs(graphs))
    };
    let (float32, recorded) = (float32(false), float32(true));
    let (portable_muon, portable_adamw) = (portable(&muon), portable(&adamw));
    // First what a user runs by default, in case that the program is ended; last what measures
    // every tiling, which compiles for a minute.
    for (name, config, is_whole_model) in [
        ("Muon, whole model", &muon, true),
        ("AdamW, whole model", &adamw, true),
        ("Muon", &muon, false),
        ("AdamW", &adamw, false),
        ("AdamW on Burn's operations", &portable_adamw, false),
        ("Muon on Burn's operations", &portable_muon, false),
        ("Muon, whole model, float32", &float32, true),
        ("Muon, float32", &float32, false),
        ("Muon, float32, recorded", &recorded, false),
        ("Muon, whole model, tuned", &tuned, true),
        ("Muon, tuned", &tuned, false),
    ] {
        if is_whole_model {
            step(bench, name, layer, |model| {
                let mut optim = config.init_batched(model)?;
                Ok(move |model, grads| optim.step(1e-3, model, grads))
            })?;
        } else {
            step(bench, name, layer, |model| {
                let mut optim = config.init(model);
                Ok(move |model, grads| Ok(optim.step(1e-3, model, grads)))
            })?;
        }
    }
    Ok(())
}

/// Prints a row of the table of steps, for the optimizer that `init` makes for a model.
fn step<Step>(
    bench: &Bench,
    name: &str,
    layer: &[[usize; 2]],
    init: impl FnOnce(&Matrices) -> distmuon::Result<Step>,
) -> distmuon::Result<()>
where
    Step: FnMut(Matrices, GradientsParams) -> distmuon::Result<Matrices>,
{
    let device = bench.device.clone().autodiff();
    let model = Matrices::new(layer, &device);
    let gradients = Matrices::new(layer, &device);
    let mut step = init(&model)?;
    // There is no other reference to the model, so it is updated in place.
    let mut trained = Some(model);
    let mut run = || {
        let model = trained.take().expect("every run puts the model back");
        let grads = model.gradients_from(&gradients);
        let model = step(model, grads).expect("a step on one device does not fail");
        trained = Some(flushed(&bench.device, model));
    };
    bench.device.sync().expect("no earlier work has failed");
    let start = Instant::now();
    run();
    bench.device.sync().expect("a step on one device does not fail");
    let first = start.elapsed().as_secs_f64();
    let Time { total, host } = bench.time(run);
    let floor_ratio = match name.starts_with("Muon") {
        true => bench.floor_ratio(layer.iter().map(|[m, n]| min_operations(*m, *n)).sum(), total),
        false => "-".to_owned(),
    };
    println!("| {name} | {total:.3} | {host:.3} | {floor_ratio} | {first:.1} |");
    Ok(())
}

/// Measures collectives over NCCL, on the processes that a launcher started or on one; on other
/// devices than CUDA's, on two threads.
fn collectives() -> distmuon::Result<()> {
    use common::collectives::{measure, print};

    println!("\n## Collectives\n");
    #[cfg(feature = "cuda")]
    if distmuon_skips::is_on_cuda() {
        let world = nccl()?;
        let rows = measure(&world)?;
        if world.is_main() {
            print(&world.comm().version(), world.size(), &rows);
        }
        return Ok(());
    }
    let devices = vec![Device::default(); 2];
    let rows = World::threads(devices, |world| measure(&world))?;
    print("threads", 2, &rows[0]);
    Ok(())
}

/// The world of the ranks that a launcher started, or a world of one rank.
#[cfg(feature = "cuda")]
fn nccl() -> distmuon::Result<World> {
    use std::time::Duration;

    use distmuon::comm::Launch;

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
