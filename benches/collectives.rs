//! Time of every collective on threads and over MPI, beside copying as many bytes in memory.
//!
//! ```text
//! cargo bench --features mpi --bench collectives
//! ```

use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use comfy_table::{Table, presets};
use distmuon::Result;
use distmuon::dist::{Communicator, Pending, ReduceOp, World};

/// Bytes of the whole tensor, in float32.
const BYTES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
const RANKS: [usize; 2] = [2, 4];
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
fn measure(world: &World) -> Result<Vec<Vec<f64>>> {
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

fn print(engine: &str, ranks: usize, rows: &[Vec<f64>]) {
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

fn threads() -> Result<()> {
    for ranks in RANKS {
        let rows = World::threads(vec![Device::default(); ranks], |world| measure(&world))?;
        print("threads", ranks, &rows[0]);
    }
    Ok(())
}

/// Starts this program again under mpirun.
#[cfg(feature = "mpi")]
fn mpi() -> Result<()> {
    for ranks in RANKS {
        let own = std::env::args_os().next().expect("a program has a name");
        let mut mpirun = std::process::Command::new("mpirun");
        mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]).arg(own);
        // Open MPI asks twice before it runs as root, as containers do.
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        match mpirun.env("RAYON_NUM_THREADS", "1").status() {
            Ok(status) => assert!(status.success(), "mpirun: {status}"),
            Err(error) => println!("no mpirun: {error}"),
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    #[cfg(feature = "mpi")]
    if std::env::var_os("OMPI_COMM_WORLD_RANK").is_some() {
        let launch = distmuon::dist::Launch::from_env()?;
        let world = World::mpi(&launch, Device::default(), Duration::from_secs(60))?;
        let rows = measure(&world)?;
        if world.rank() == 0 {
            print(&world.comm().version(), world.size(), &rows);
        }
        return Ok(());
    }
    let start = Instant::now();
    threads()?;
    #[cfg(feature = "mpi")]
    mpi()?;
    println!("{:?}", Duration::from_secs(start.elapsed().as_secs()));
    Ok(())
}
