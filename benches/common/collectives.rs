//! Times of every collective, beside copying as many bytes in memory.

use std::time::Instant;

use burn::tensor::Tensor;
use comfy_table::{Table, presets};
use distmuon::Result;
use distmuon::dist::{Communicator, Pending, ReduceOp, World};

/// Bytes of the whole tensor, in float32.
const BYTES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
const ROUNDS: usize = 15;

type Start = fn(&dyn Communicator, Tensor<1>) -> Result<Pending>;

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
        comm.all_to_all(whole, &parts, &parts)
    }),
];

fn parts(comm: &dyn Communicator, whole: &Tensor<1>) -> Vec<usize> {
    vec![whole.dims()[0] / comm.size(); comm.size()]
}

/// The median of some rounds, in seconds; all ranks start a round together.
fn median(world: &World, mut round: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        world.comm().barrier()?;
        let start = Instant::now();
        round()?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[ROUNDS / 2].as_secs_f64())
}

/// A row for every size: the copy and every collective, in milliseconds.
pub fn measure(world: &World) -> Result<Vec<Vec<f64>>> {
    let device = world.device();
    let row = |bytes: usize| {
        let whole = Tensor::<1>::ones([bytes / 4], device);
        let (source, mut target) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        let copy = median(world, || {
            target.copy_from_slice(std::hint::black_box(&source));
            std::hint::black_box(&mut target);
            Ok(())
        });
        let mut row = vec![copy? * 1e3];
        for (_, start) in COLLECTIVES {
            let time = median(world, || {
                let result = start(world.comm(), whole.clone())?.wait()?;
                std::hint::black_box(result);
                device.sync().expect("the device works");
                Ok(())
            });
            row.push(time? * 1e3);
        }
        Ok(row)
    };
    BYTES.into_iter().map(row).collect()
}

pub fn print(engine: &str, ranks: usize, rows: &[Vec<f64>]) {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = COLLECTIVES.iter().map(|(name, _)| (*name).to_owned());
    let head = [format!("{engine}, {ranks} ranks, ms"), "memcpy".to_owned()];
    table.set_header(head.into_iter().chain(names));
    for (bytes, row) in BYTES.iter().zip(rows) {
        let cells = row.iter().map(|time| format!("{time:.3}"));
        table.add_row([format!("{} KiB", bytes >> 10)].into_iter().chain(cells));
    }
    println!("{table}\n");
}
