//! Times of every collective, and of a copy of the same size in the host's memory.

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::Tensor;
use comfy_table::{Table, presets};
use distmuon::Result;
use distmuon::comm::{Communicator, PairCounts, Pending, ReduceOp, World};

/// Sizes of the whole tensor in bytes, in float32.
const BYTES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
const ROUNDS: usize = 15;
/// Bytes that the calls between two synchronisations move together. A synchronisation takes longer
/// than a small call, so small calls are repeated.
const ROUND_BYTES: usize = 4 << 20;

type Start = fn(&Communicator, Tensor<1>) -> Result<Pending>;

const COLLECTIVES: [(&str, Start); 5] = [
    ("reduce_scatter", |comm, whole| {
        let parts = parts(comm, &whole);
        comm.reduce_scatter(whole, &parts, ReduceOp::Sum)
    }),
    ("all_gather", |comm, whole| {
        let parts = parts(comm, &whole);
        comm.all_gather(whole.narrow(0, 0, parts[0]), &parts)
    }),
    ("all_reduce", |comm, whole| comm.all_reduce(whole, ReduceOp::Sum)),
    ("broadcast", |comm, whole| comm.broadcast(whole, 0)),
    ("all_to_all", |comm, whole| {
        let parts = parts(comm, &whole);
        comm.all_to_all(whole, &PairCounts { sent: parts.clone(), received: parts })
    }),
];

fn parts(comm: &Communicator, whole: &Tensor<1>) -> Vec<usize> {
    vec![whole.dims()[0] / comm.size(); comm.size()]
}

/// Measures the median time of a call in milliseconds, over rounds of `calls` calls each. All ranks
/// start a round together.
fn time(world: &World, calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        world.comm().barrier()?;
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        world.device().sync().expect("every kernel of the device succeeds");
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(super::median(times) * 1e3 / calls as f64)
}

/// Measures one row per size: the copy and every collective, in milliseconds.
pub fn measure(world: &World) -> Result<Vec<Vec<f64>>> {
    let row = |bytes: usize| {
        let calls = (ROUND_BYTES / bytes).max(1);
        let whole = Tensor::<1>::ones([bytes / 4], world.device());
        let (source, mut target) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        let copy = time(world, calls, || {
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
            Ok(())
        });
        let mut row = vec![copy?];
        for (_, start) in COLLECTIVES {
            row.push(time(world, calls, || {
                black_box(start(world.comm(), whole.clone())?.wait()?);
                Ok(())
            })?);
        }
        Ok(row)
    };
    BYTES.into_iter().map(row).collect()
}

pub fn print(engine: &str, ranks: usize, rows: &[Vec<f64>]) {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = COLLECTIVES.iter().map(|(name, _)| (*name).to_owned());
    let header = [format!("{engine}, {ranks} ranks, ms"), "memcpy".to_owned()];
    table.set_header(header.into_iter().chain(names));
    for (bytes, row) in BYTES.iter().zip(rows) {
        let cells = row.iter().map(|time| format!("{time:.3}"));
        table.add_row([format!("{} KiB", bytes >> 10)].into_iter().chain(cells));
    }
    println!("{table}\n");
}
