//! The same cases on every engine: threads, `nccl` over the test library, and `mpi`.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use burn::tensor::Device;
use distmuon::Result;
#[cfg(feature = "cuda")]
use distmuon::comm::Reduction;
use distmuon::comm::World;
use libtest_mimic::{Failed, Trial};
use serde::{Serialize, de::DeserializeOwned};

use crate::empty_operations;
#[cfg(feature = "cuda")]
use crate::host::{self, Waits};
#[cfg(feature = "mpi")]
use crate::profile;

/// An engine on which a case runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Ranks that are threads.
    Threads,
    /// `nccl`, where the host waits.
    #[cfg(feature = "cuda")]
    Nccl,
    /// `nccl`, where the device waits.
    #[cfg(feature = "cuda")]
    NcclAhead,
    /// `nccl` with its own reductions, where the device waits.
    #[cfg(feature = "cuda")]
    NcclNative,
    /// Ranks that are processes of MPI.
    #[cfg(feature = "mpi")]
    Mpi,
}

thread_local! {
    static ENGINE: Cell<Engine> = const { Cell::new(Engine::Threads) };
}

/// Returns the engine of this case.
fn engine() -> Engine {
    ENGINE.get()
}

/// Returns the name that the engine of this case reports.
pub fn name() -> &'static str {
    match engine() {
        Engine::Threads => "threads",
        #[cfg(feature = "cuda")]
        Engine::Nccl | Engine::NcclAhead | Engine::NcclNative => "nccl",
        #[cfg(feature = "mpi")]
        Engine::Mpi => "mpi",
    }
}

/// Returns `true` if the engine of the case adds up in the order of ranks.
pub fn is_exact() -> bool {
    #[cfg(feature = "cuda")]
    if engine() == Engine::NcclNative {
        return false;
    }
    true
}

/// Returns the bytes that this thread's rank has sent to others so far, if the engine counts them.
pub(crate) fn sent(engine: &str) -> Option<u64> {
    match engine {
        #[cfg(feature = "cuda")]
        "nccl" => Some(host::sent()),
        #[cfg(feature = "mpi")]
        "mpi" => Some(profile::sent()),
        _ => None,
    }
}

/// Returns `true` if the engine of this case returns results before they are computed.
pub fn results_may_be_early() -> bool {
    #[cfg(feature = "cuda")]
    if matches!(engine(), Engine::NcclAhead | Engine::NcclNative) {
        return true;
    }
    false
}

/// A case and its name.
pub type Case = (&'static str, fn());

/// Returns [`Case`](crate::worlds::Case)s with the names of their functions.
#[macro_export]
macro_rules! cases {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name as fn())),*] };
}
pub use cases;

/// The engines that run in this process.
pub const HERE: &[Engine] = &[
    Engine::Threads,
    #[cfg(feature = "cuda")]
    Engine::Nccl,
    #[cfg(feature = "cuda")]
    Engine::NcclAhead,
    #[cfg(feature = "cuda")]
    Engine::NcclNative,
];

/// One engine of each kind that runs in this process, for cases that do not depend on the ways in
/// which `nccl` waits and reduces.
pub const ONE_OF_EACH: &[Engine] = &[
    Engine::Threads,
    #[cfg(feature = "cuda")]
    Engine::Nccl,
];

/// The engines in this process whose results are complete when they are returned, and may be used
/// before.
pub const NOW_AND_AHEAD: &[Engine] = &[
    Engine::Threads,
    #[cfg(feature = "cuda")]
    Engine::NcclAhead,
];

/// Returns a trial for every case on every engine.
pub fn trials(engines: &[Engine], cases: &[Case]) -> Vec<Trial> {
    let on = |engine: Engine| {
        cases.iter().map(move |(name, case)| {
            let case = *case;
            let trial = move || {
                ENGINE.set(engine);
                empty_operations::ensure_none(|| {
                    case();
                    Ok(())
                })
                .map_err(Failed::from)
            };
            Trial::test(format!("{engine:?}::{name}").to_lowercase(), trial)
        })
    };
    engines.iter().flat_map(|engine| on(*engine)).collect()
}

/// Runs a function on every rank of a world of threads, on the engine of the case.
pub fn ranks_here<T: Send>(
    deadline: Duration,
    count: usize,
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let device = Device::default().autodiff();
    match engine() {
        #[cfg(feature = "cuda")]
        Engine::Nccl => nccl(deadline, count, &device, (Waits::Host, Reduction::Exact), run),
        #[cfg(feature = "cuda")]
        Engine::NcclAhead => nccl(deadline, count, &device, (Waits::Device, Reduction::Exact), run),
        #[cfg(feature = "cuda")]
        Engine::NcclNative => {
            nccl(deadline, count, &device, (Waits::Device, Reduction::Native), run)
        }
        _ => World::threads_within(deadline, vec![device; count], run),
    }
}

/// Runs a function on every rank of a world, on the engine of the case.
pub fn ranks<T: Send + Serialize + DeserializeOwned>(
    deadline: Duration,
    count: usize,
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    #[cfg(feature = "mpi")]
    if engine() == Engine::Mpi {
        return mpi::ranks(count, run);
    }
    ranks_here(deadline, count, run)
}

/// Returns `true` if the engine of this case can have a world of this size.
pub fn has(count: &usize) -> bool {
    #[cfg(feature = "mpi")]
    if engine() == Engine::Mpi {
        return *count <= mpi::PROCESSES;
    }
    *count > 0
}

/// Runs a function on every rank of a world over NCCL, whose ranks are threads here.
#[cfg(feature = "cuda")]
fn nccl<T: Send>(
    deadline: Duration,
    count: usize,
    device: &Device,
    (waits, reduction): (Waits, Reduction),
    run: impl Fn(World) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use distmuon::comm::Launch;
    let (host, port) = (&loopback(), free_port());
    let rank = |rank| {
        let address = Some((host.clone(), port));
        let launch =
            Launch { rank, world_size: count, local_rank: rank, address, secret: String::new() };
        let world = host::world_that(&launch, device.clone(), deadline, waits, reduction)?;
        let comm = world.communicator();
        let outcome = catch_unwind(AssertUnwindSafe(|| run(world)));
        let outcome = outcome.unwrap_or_else(|panic| {
            comm.fail("it panicked");
            resume_unwind(panic)
        });
        outcome.inspect_err(|error| comm.fail(&error.to_string()))
    };
    let rank = &rank;
    let mut outcomes: Vec<Result<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|r| scope.spawn(move || rank(r))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    // The first cause, not its effects on the other ranks.
    let other = |outcome: &Result<T>| {
        outcome.as_ref().is_err_and(|error| !matches!(error, distmuon::Error::PeerFailed { .. }))
    };
    if let Some(cause) = outcomes.iter().position(other) {
        outcomes = vec![outcomes.swap_remove(cause)];
    }
    outcomes.into_iter().collect()
}

/// Returns an address of this machine that other test processes do not use, where the system has
/// such. Two of them may find the same port free at the same time.
pub fn loopback() -> String {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    match cfg!(target_os = "linux") {
        true => format!("127.{}.{middle}.{low}", 64 | high),
        false => "127.0.0.1".to_owned(),
    }
}

/// Returns a port that nothing listens on at [`loopback`], and that no other call in this process
/// returns. It is below the ports that systems assign by themselves, so nothing else takes it
/// meanwhile.
pub fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    loop {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (97 * (std::process::id() % 20_000) + call) % 20_000;
        let port = u16::try_from(port).expect("the port is below 30 000");
        if std::net::TcpListener::bind((loopback(), port)).is_ok() {
            return port;
        }
    }
}

/// A folder that all ranks share, until it is dropped.
pub struct Folder {
    path: PathBuf,
    _guard: Option<tempfile::TempDir>,
}

impl Folder {
    /// Creates a folder. On MPI, every rank calls it.
    pub fn create() -> Self {
        #[cfg(feature = "mpi")]
        if engine() == Engine::Mpi {
            return mpi::folder();
        }
        let folder = tempfile::tempdir().expect("a folder can be created");
        Self { path: folder.path().to_owned(), _guard: Some(folder) }
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(feature = "mpi")]
impl Drop for Folder {
    fn drop(&mut self) {
        if engine() == Engine::Mpi && !std::thread::panicking() {
            mpi::barrier();
        }
    }
}

/// Cases on ranks that are processes of MPI.
#[cfg(feature = "mpi")]
pub mod mpi {
    use std::cell::RefCell;

    use distmuon::comm::Launch;
    use libtest_mimic::Failed;

    use super::*;
    use crate::mpirun::{is_there, mpirun, output};

    /// The number of processes that mpirun starts.
    pub(super) const PROCESSES: usize = 4;
    /// The variable that is set in these processes.
    const WORKER: &str = "DISTMUON_TEST_WORKER";

    thread_local! {
        static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
    }

    fn world() -> World {
        WORLD.with_borrow(|world| world.clone()).expect("a worker has a world")
    }

    /// Runs the cases if this is a process of MPI, and ends it.
    pub fn work(cases: &[Case]) {
        if std::env::var_os(WORKER).is_none() {
            return;
        }
        ENGINE.set(Engine::Mpi);
        let deadline = Duration::from_secs(60);
        let launch = Launch::from_env().expect("mpirun sets the variables of a rank");
        let device = Device::default().autodiff();
        let world = World::mpi(&launch, device, deadline).expect("the ranks can connect");
        if world.rank() == 0 {
            println!("{}", world.describe().expect("every rank describes the world"));
        } else {
            world.describe().expect("every rank describes the world");
        }
        let is_first = world.rank() == 0;
        WORLD.set(Some(world));
        for (name, case) in cases {
            case();
            if is_first {
                println!("mpi::{name} ... ok");
            }
        }
        WORLD.set(None);
        std::process::exit(0);
    }

    /// Returns the trial that starts the processes, each of which runs a number of cases.
    pub fn trial(cases: usize) -> Trial {
        Trial::test("mpi", move || {
            if !is_there() {
                return Ok(());
            }
            let program = std::env::args_os().next().expect("a program has a name");
            let mut mpirun = mpirun(PROCESSES);
            mpirun.arg(program).env(WORKER, "1");
            let output = output(mpirun)?;
            let text = String::from_utf8_lossy(&output.stdout);
            println!("{text}{}", String::from_utf8_lossy(&output.stderr));
            if !output.status.success() {
                return Err(Failed::from(format!("mpirun: {}", output.status)));
            }
            assert_eq!(text.matches(" ... ok").count(), cases, "every case was run");
            Ok(())
        })
    }

    /// Runs a function on the first ranks of the world, and returns the results of all of them.
    pub(super) fn ranks<T: Serialize + DeserializeOwned>(
        count: usize,
        run: impl Fn(World) -> Result<T>,
    ) -> Result<Vec<T>> {
        let world = world();
        let takes_part = world.rank() < count;
        let group = world.split(usize::from(!takes_part), 0)?;
        let result = if takes_part { Some(run(group)?) } else { None };
        Ok(world.all_gather_value(&result)?.into_iter().flatten().collect())
    }

    /// Waits for all ranks.
    pub(super) fn barrier() {
        world().comm().barrier().expect("every rank makes the call");
    }

    /// Creates a folder on rank 0, and returns it on every rank.
    pub(super) fn folder() -> Folder {
        let create = || tempfile::tempdir().expect("a folder can be created");
        let folder = (world().rank() == 0).then(create);
        let path = folder.as_ref().map(|folder| folder.path().to_owned());
        let paths = world().all_gather_value(&path).expect("every rank makes the call");
        let path = paths.into_iter().flatten().next().expect("rank 0 has a folder");
        Folder { path, _guard: folder }
    }
}
