//! Times of every collective on threads and over MPI, and of a copy of the same size in memory.
//!
//! ```text
//! cargo bench --features mpi --bench collectives
//! ```

mod common;

use std::time::{Duration, Instant};

use burn::tensor::Device;
use common::collectives::{measure, print};
use distmuon::Result;
use distmuon::comm::World;

const RANKS: [usize; 2] = [2, 4];

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
        let program = std::env::args_os().next().expect("the first argument is the program");
        let mut mpirun = std::process::Command::new("mpirun");
        mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
        mpirun.arg(program);
        // Open MPI refuses to run as root, the user of most containers, unless both of these are
        // set.
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        match mpirun.env("RAYON_NUM_THREADS", "1").status() {
            Ok(status) => assert!(status.success(), "mpirun: {status}"),
            Err(error) => println!("skipped: mpirun cannot be started: {error}"),
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    #[cfg(feature = "mpi")]
    if std::env::var_os("OMPI_COMM_WORLD_RANK").is_some() {
        let launch = distmuon::comm::Launch::from_env()?;
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
