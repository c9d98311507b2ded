//! Symmetric products and whole iterations on a GPU, beside Burn's matmul; see `docs/gpu.md`.
//!
//! ```text
//! BURN_DEVICE=cuda cargo bench --bench gpu --features cuda,burn/autotune
//! ```
//!
//! Prints tables in Markdown: medians in milliseconds, ratios to Burn's own matmul in the same run, and
//! TFLOP/s of the operations that the full products would need. `peers/torch_gpu.py` prints the same
//! for PyTorch. `--shapes 256x512,2x128x128` measures others, as a software device needs.

mod common;

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use clap::Parser;
use distmuon::orthogonalize::{Engine, cost};
use distmuon::{Coefficients, Form, IterationDtype, Kernels, MuonConfig, NewtonSchulz};

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

/// What a dense product of a half type reaches at most on an H200: measured by PyTorch with 8192^3.
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

fn products(device: &Device, dtype: DType, shapes: &[[usize; 3]], repeats: usize) {
    println!("\n## X X^T, {dtype:?}\n");
    println!(
        "| shape | matmul, ms | symmetric, ms | ratio | TFLOP/s of the full product | kernel |"
    );
    println!("|---|---|---|---|---|---|");
    for &[k, m, n] in shapes {
        let x = random([k, m, n], dtype, device);
        let engine = Engine::choose(Kernels::Tuned, device, dtype.into());
        let full = median(device, repeats, || x.clone().matmul(x.clone().swap_dims(1, 2)));
        let half = median(device, repeats, || engine.syrk(x.clone()));
        let operations = 2.0 * (k * m * m * n) as f64;
        println!(
            "| {k} x {m}x{n} | {full:.3} | {half:.3} | {:.2} | {:.0} | {} |",
            half / full,
            operations / half * 1e-9,
            engine.kernel(device, dtype.into(), [k, m, n]),
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

/// Whole steps of the layers of a GPT-2 layer.
fn steps(device: &Device, repeats: usize) {
    println!("\n## A step of a GPT-2 layer (width 768)\n");
    println!("| optimizer | ms |\n|---|---|");
    let model = common::Matrices::new(&common::LAYER, &device.clone().autodiff());
    for (name, kernels) in
        [("distmuon", Kernels::Tuned), ("on Burn's operations", Kernels::Portable)]
    {
        let optim = std::cell::RefCell::new(MuonConfig::new().with_kernels(kernels).init(&model));
        let time = median(device, repeats, || {
            optim.borrow_mut().step(1e-3, model.clone(), model.gradients())
        });
        println!("| {name} | {time:.3} |");
    }
}
