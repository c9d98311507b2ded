//! Symmetric products and whole iterations on a GPU, beside Burn's matmul; see `docs/gpu.md`.
//!
//! ```text
//! BURN_DEVICE=cuda cargo bench --bench gpu --features cuda,burn/autotune
//! ```
//!
//! Prints tables in Markdown: medians in milliseconds, ratios to Burn's own matmul in the same run,
//! TFLOP/s of the operations that the full products would need, and the fraction of what the hardware
//! needs at least. `peers/torch_gpu.py` prints the same for PyTorch. `--shapes 256x512,2x128x128` measures others, as a software device needs.

mod common;

use std::cell::{Cell, RefCell};
use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use clap::Parser;
use distmuon::orthogonalize::{Engine, cost};
use distmuon::{Coefficients, Form, IterationDtype, Kernels, MuonConfig, NewtonSchulz, Rule};

/// `[k, m, n]`: single matrices of language models, batches, and those of a vision model.
const SHAPES: [[usize; 3]; 11] = [
    [1, 768, 3072],
    [1, 1024, 1024],
    [1, 1024, 4096],
    [1, 2048, 2048],
    [1, 2048, 8192],
    [1, 4096, 4096],
    [1, 4096, 14336],
    [1, 7168, 18432],
    [128, 2048, 2048],
    [16, 4096, 8192],
    [126, 64, 576],
];

/// The rate that a dense product of a half type is taken to reach on an H200: four fifths of the 989 TFLOP/s of
/// NVIDIA's data sheet. An assumption.
const FLOOR_TFLOPS: f64 = 790.0;

#[derive(Parser)]
struct Options {
    /// `[k x] m x n`, separated by commas.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Types of the iteration.
    #[arg(long, value_delimiter = ',', default_value = "f16,bf16")]
    dtypes: Vec<String>,
    /// Measurements, of which the median counts.
    #[arg(long, default_value_t = 9)]
    repeats: usize,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let device = Device::default();
    let shapes = match options.shapes.is_empty() {
        true => SHAPES.to_vec(),
        false => options.shapes.iter().map(|shape| parse(shape)).collect::<anyhow::Result<_>>()?,
    };
    println!("device: {device:?}");
    for dtype in &options.dtypes {
        let (dtype, iteration) = match dtype.as_str() {
            "f16" => (DType::F16, IterationDtype::F16),
            "bf16" => (DType::BF16, IterationDtype::Bf16),
            "f32" => (DType::F32, IterationDtype::F32),
            other => anyhow::bail!("--dtypes: {other} is none of f16, bf16 and f32"),
        };
        if !device.supports_dtype(dtype) {
            println!("skipped: the device has no {dtype:?}");
            continue;
        }
        products(&device, dtype, &shapes, options.repeats);
        iterations(&device, iteration, &shapes, options.repeats);
    }
    steps(&device, options.repeats);
    Ok(())
}

fn parse(shape: &str) -> anyhow::Result<[usize; 3]> {
    let sizes = shape.split('x').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    match sizes[..] {
        [m, n] => Ok([1, m, n]),
        [k, m, n] => Ok([k, m, n]),
        _ => anyhow::bail!("--shapes: {shape} is neither MxN nor KxMxN"),
    }
}

/// The median time of something in milliseconds, after warming up.
fn median<T>(device: &Device, repeats: usize, run: impl Fn() -> T) -> f64 {
    let timed = || {
        let start = Instant::now();
        let result = run();
        device.sync().expect("the device works");
        drop(result);
        start.elapsed().as_secs_f64() * 1e3
    };
    for _ in 0..3 {
        timed();
    }
    let mut times: Vec<f64> = (0..repeats.max(1)).map(|_| timed()).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn random(shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
    Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// The symmetric products of an iteration, as Burn's operations and as the kernels compute them.
fn products(device: &Device, dtype: DType, shapes: &[[usize; 3]], repeats: usize) {
    println!("\n## Symmetric products, {dtype:?}\n");
    println!(
        "| shape | product | Burn, ms | auto, ms | tuned, ms | Burn / auto | Burn / tuned | TFLOP/s of the \
         full product | of the floor | kernel that was measured to be the fastest |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for &[k, m, n] in shapes {
        let x = random([k, m, n], dtype, device);
        // Small enough for sums in half precision.
        let r = random([k, m, m], dtype, device).mul_scalar(1e-2);
        let r = r.clone() + r.swap_dims(1, 2);
        let full = || x.clone().matmul(x.clone().swap_dims(1, 2));
        let row = Row { name: "X X^T", shape: [k, m, n], inner: n, dtype, repeats };
        row.print(device, full, |engine| engine.syrk(x.clone()));

        let full = || r.clone().matmul(r.clone()).mul_scalar(2.0) + r.clone().mul_scalar(-5.0);
        let row = Row { name: "b R + c R^2", inner: m, ..row };
        row.print(device, full, |engine| {
            engine.symmetric_product(r.clone(), r.clone(), r.clone(), 2.0, -5.0)
        });

        let z = r.clone().mul_scalar(0.5);
        let full = || r.clone().matmul(z.clone()) + r.clone().mul_scalar(3.0);
        let row = Row { name: "Q Z + a Q", ..row };
        row.print(device, full, |engine| {
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
    repeats: usize,
}

impl Row {
    fn print(
        &self,
        device: &Device,
        full: impl Fn() -> Tensor<3>,
        symmetric: impl Fn(Engine) -> Tensor<3>,
    ) {
        let Self { name, shape: [k, m, n], inner, dtype, repeats } = *self;
        let engine = |kernels| Engine::choose(kernels, device, dtype.into());
        let burn = median(device, repeats, full);
        let [auto, tuned] = [Kernels::Auto, Kernels::Tuned]
            .map(|kernels| median(device, repeats, || symmetric(engine(kernels))));
        let operations = 2.0 * (k * m * m * inner) as f64;
        let least = operations / 2.0 / FLOOR_TFLOPS * 1e-9;
        // What is told is the choice for a product without an addend.
        let kernel = match name {
            "X X^T" => engine(Kernels::Tuned).kernel(device, dtype.into(), [k, m, inner]),
            _ => String::new(),
        };
        println!(
            "| {k} x {m}x{n} | {name} | {burn:.3} | {auto:.3} | {tuned:.3} | {:.2} | {:.2} | {:.0} | {:.0} % | {kernel} |",
            burn / auto,
            burn / tuned,
            operations / tuned * 1e-9,
            100.0 * least / tuned,
        );
    }
}

fn iterations(device: &Device, dtype: IterationDtype, shapes: &[[usize; 3]], repeats: usize) {
    println!("\n## Newton-Schulz, five steps, {dtype:?}\n");
    println!(
        "| shape | Burn's matmul, ms | standard, ms | Gram, ms | chosen | best ratio | of the floor |"
    );
    println!("|---|---|---|---|---|---|---|");
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
            median(device, repeats, || iteration.orthogonalize(x.clone()))
        };
        let burn = time(Form::Standard, Kernels::Portable);
        let standard = time(Form::Standard, Kernels::Tuned);
        let gram = time(Form::Gram, Kernels::Tuned);
        let best = standard.min(gram);
        let (short, long) = (m.min(n), m.max(n));
        let least =
            cost::standard(5, short, long, |_| 0.5).min(cost::gram(5, 1, short, long, |_| 0.5));
        let floor = k as f64 * least / FLOOR_TFLOPS * 1e-9;
        let chosen = of(Form::Auto, Kernels::Tuned).explain(&x);
        let place = if chosen.in_one_cube { ", one cube" } else { "" };
        println!(
            "| {k} x {m}x{n} | {burn:.3} | {standard:.3} | {gram:.3} | {:?}{place} | {:.2} | {:.0} % |",
            chosen.form,
            burn / best,
            100.0 * floor / best,
        );
    }
}

/// Whole steps of the matrices of a GPT-2 layer.
fn steps(device: &Device, repeats: usize) {
    println!("\n## A step of a GPT-2 layer (width 768)\n");
    println!("| optimizer | ms |\n|---|---|");
    let muon = MuonConfig::new;
    let all_by_adamw = muon().with_rule(Rule::adamw(".*"));
    for (name, config) in [
        ("Muon", muon()),
        ("Muon, tuned", muon().with_kernels(Kernels::Tuned)),
        ("Muon, recorded", muon().with_graphs(true)),
        ("Muon on Burn's operations", muon().with_kernels(Kernels::Portable)),
        ("AdamW", all_by_adamw.clone()),
        ("AdamW on Burn's operations", all_by_adamw.with_kernels(Kernels::Portable)),
    ] {
        let made = || common::Matrices::new(&common::LAYER, &device.clone().autodiff());
        let (model, values) = (made(), made());
        let optim = RefCell::new(config.init(&model));
        // Nobody else holds the model, so that it is updated in place.
        let trained = Cell::new(Some(model));
        let time = median(device, repeats, || {
            let model = trained.take().expect("given back below");
            let grads = model.gradients_from(&values);
            trained.set(Some(optim.borrow_mut().step(1e-3, model, grads)));
        });
        println!("| {name} | {time:.3} |");
    }
}
