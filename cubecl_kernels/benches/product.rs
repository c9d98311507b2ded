//! Symmetric products with every tiling, compared with the full product by the fastest of
//! cubek-matmul's strategies that Burn's autotuning tries.
//!
//! ```sh
//! cargo bench -p distmuon-kernels --bench product
//! ```
//!
//! Prints the smallest of several times, in milliseconds, and the ratio to the full product in the
//! same run. Sizes may be given as arguments, `m,inner,batch`; `DISTMUON_DTYPE` chooses `f32`,
//! `f16` or `bf16`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{binding, device_client};
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubek_matmul::definition::MatmulElems;
use cubek_matmul::launch::launch_ref;
use cubek_matmul::multi_level;
use cubek_matmul::routine::BlueprintStrategy;
use cubek_matmul::strategy::Strategy;
use cubek_std::InputBinding;
use distmuon_kernels::Matrices;
use distmuon_kernels::product::{Product, Tiling, Triangle};

/// Repetitions of a measurement; the fastest counts.
const REPEATS: usize = 5;

fn main() {
    let dtype = match std::env::var("DISTMUON_DTYPE").as_deref() {
        Ok("f16") => ElemType::Float(FloatKind::F16),
        Ok("bf16") => ElemType::Float(FloatKind::BF16),
        _ => ElemType::Float(FloatKind::F32),
    };
    let arguments: Vec<[usize; 3]> = std::env::args().filter_map(|size| parse(&size)).collect();
    let sizes = if arguments.is_empty() { vec![[256, 256, 1], [512, 512, 1]] } else { arguments };
    let client = device_client();
    println!("{} {dtype:?}", client.name());
    for [m, inner, batch] in sizes {
        let elements = batch * m * inner;
        let zeros = client.create_from_slice(&vec![0; elements * dtype.size()]);
        let a = Matrices::contiguous(zeros, dtype, [batch, m, inner]);
        let b = a.clone().transposed();
        println!("\n{batch} x [{m}, {inner}]");
        let full = strategies()
            .into_iter()
            .filter_map(|(name, strategy)| {
                let time = measure(&client, || full(&client, &a, &b, &strategy))?;
                println!("  {time:9.3} ms          full, {name}");
                Some(time)
            })
            .fold(f64::INFINITY, f64::min);
        for triangle in [Triangle::Full, Triangle::Lower] {
            for tiling in Tiling::candidates(&client, dtype) {
                let product = Product { a: &a, b: &b, alpha: 1.0, addend: None, triangle };
                let run =
                    || product.launch(&client, &tiling).map(|_| ()).map_err(|e| e.to_string());
                if let Some(time) = measure(&client, run) {
                    println!("  {time:9.3} ms  {:5.2} x  {triangle:?}, {tiling}", time / full);
                }
            }
        }
    }
}

/// Parses `m,inner,batch`.
fn parse(size: &str) -> Option<[usize; 3]> {
    let numbers: Vec<usize> = size.split(',').filter_map(|x| x.parse().ok()).collect();
    numbers.try_into().ok()
}

/// Returns the time of the fastest run in milliseconds, or `None` after an error.
fn measure(client: &Client, run: impl Fn() -> Result<(), String>) -> Option<f64> {
    let sync = || cubecl::future::block_on(client.sync()).map_err(|e| format!("{e:?}"));
    let first = Instant::now();
    if let Err(reason) = run().and_then(|()| sync()) {
        println!("  not run: {}", reason.lines().next().unwrap_or_default());
        return None;
    }
    if std::env::var("DISTMUON_VERBOSE").is_ok() {
        println!("  first call {:.1} s", first.elapsed().as_secs_f64());
    }
    let times = (0..REPEATS).map(|_| {
        let start = Instant::now();
        run().and_then(|()| sync()).ok()?;
        Some(start.elapsed().as_secs_f64() * 1e3)
    });
    times.collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::min)
}

/// Returns the general strategies of Burn's autotuning.
fn strategies() -> Vec<(&'static str, Strategy)> {
    use multi_level::Strategy::*;
    let inferred = [
        ("simple unit", SimpleUnit(BlueprintStrategy::Inferred(Default::default()))),
        ("double unit", DoubleUnit(BlueprintStrategy::Inferred(Default::default()))),
        ("simple cmma", SimpleCyclicCmma(BlueprintStrategy::Inferred(Default::default()))),
        ("simple mma", SimpleCyclicMma(BlueprintStrategy::Inferred(Default::default()))),
        ("ordered cmma", OrderedDoubleCmma(BlueprintStrategy::Inferred(Default::default()))),
    ];
    inferred.map(|(name, strategy)| (name, strategy.into())).into()
}

/// Computes the full product with a strategy of cubek-matmul.
fn full(client: &Client, a: &Matrices, b: &Matrices, strategy: &Strategy) -> Result<(), String> {
    let result = Matrices::empty(client, a.dtype, [a.shape[0], a.shape[1], b.shape[2]]);
    let mut types = MatmulElems::from_single_dtype(a.dtype);
    // SAFETY: all three were allocated for their shapes.
    let [a, b, c] = [a, b, &result].map(|matrices| unsafe { binding(matrices) });
    let [lhs, rhs] = [a, b].map(|x| InputBinding::new(x, result.dtype));
    launch_ref(strategy, client, lhs, rhs, c, &mut types).map_err(|error| error.to_string())
}
