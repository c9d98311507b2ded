//! The ranks that train together.

use std::any::Any;
use std::collections::{HashSet, VecDeque};
use std::fmt::Display;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::backend::DispatchDevice;
use burn::module::{Module, Param};
use burn::tensor::{Device, Shape, Tensor};
use comfy_table::{Table, presets};

use super::choose_engine::{self, Choice};
use super::launch::Launch;
#[cfg(feature = "mpi")]
use super::mpi::Mpi;
#[cfg(feature = "cuda")]
use super::nccl::{DeviceMemory, Meeting, Nccl, cuda_memory};
use super::{Communicator, Hierarchy, Threads, devices};
use crate::error::{Error, Result};
use crate::flat;
use crate::parameters::{self, Placeholders, in_place_of};

/// Parameters in flight in [`World::broadcast`]: one is sent, one is received and one is unpacked.
const IN_FLIGHT: usize = 3;

/// The default time that a rank waits for another before the world fails: 600 seconds.
pub const DEADLINE: Duration = Duration::from_secs(600);

/// One rank's view of the ranks that train together: its index, its device, and its communicator.
///
/// A rank is a thread or a process with one device. Clones of a world are the same rank.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use distmuon::comm::{ReduceOp, World};
///
/// let device = Device::default();
/// let sums = World::threads([device.clone(), device], |world| -> distmuon::Result<f32> {
///     let value = Tensor::<1>::full([1], world.rank() as f32 + 1.0, world.device());
///     Ok(world.comm().all_reduce(value, ReduceOp::Sum)?.wait()?.into_scalar())
/// })?;
/// assert_eq!(sums, [3.0, 3.0]);
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// Programs identify a rank by its world, never by its device: several ranks may share a device.
#[derive(Clone, Debug)]
pub struct World {
    comm: Communicator,
    device: Device,
}

impl World {
    /// Makes the world of a communicator whose results are on `device`.
    pub fn new(comm: impl Into<Communicator>, device: Device) -> Self {
        Self { comm: comm.into(), device }
    }

    /// Runs a function on every rank, and returns the result of this process's first rank. The
    /// function is the `main` of a program for one device, and gets the rank's world.
    ///
    /// If a launcher (torchrun, mpirun, srun) started this process, the process is one rank of
    /// [`from_env`](Self::from_env), and the launcher has the number of ranks. Otherwise the ranks
    /// are `ranks` threads of this process, on the [`devices`](Self::devices) of the default
    /// backend.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::Tensor};
    /// use distmuon::{DistMuonConfig, World};
    ///
    /// let loss = World::launch(2, |world| {
    ///     let model = LinearConfig::new(8, 8).init(world.device());
    ///     let (mut model, mut optim) = DistMuonConfig::new().start(&world, model)?;
    ///     let mut loss = 0.0;
    ///     for step in 0..4 {
    ///         let items = world.part_of(16 * step..16 * (step + 1));
    ///         let x = Tensor::<2>::full([items.len(), 8], items.start as f64, world.device());
    ///         let mean = model.forward(x).square().mean();
    ///         let grads = optim.backward(&mean, &model)?;
    ///         model = optim.step(1e-3, model, grads)?;
    ///         loss = world.mean(mean.into_scalar::<f32>())?;
    ///     }
    ///     Ok::<_, distmuon::Error>(loss)
    /// })?;
    /// assert!(loss.is_finite());
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// In a process of a launcher, make one such call: MPI can't be started twice. In a batch
    /// script of Slurm, start the program with srun: Slurm also sets its variables for the script
    /// itself, which is not a rank.
    ///
    /// # Errors
    ///
    /// As [`threads`](Self::threads), or as [`from_env`](Self::from_env) and the function. A rank
    /// tells the others of its error.
    ///
    /// # Panics
    ///
    /// As [`threads`](Self::threads), or as the function.
    pub fn launch<T, E, F>(ranks: usize, run: F) -> Result<T, E>
    where
        T: Send,
        E: From<Error> + Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        if Launch::is_in_env() {
            return on_rank(Self::from_env()?, run).unwrap_or_else(|panic| resume_unwind(panic));
        }
        Self::threads(Self::devices(ranks), run).map(|mut results| results.swap_remove(0))
    }

    /// Returns a device with autodiff for each of `ranks` ranks: the devices of the default backend
    /// in turn.
    ///
    /// ```
    /// let devices = distmuon::comm::World::devices(4);
    /// assert_eq!(devices.len(), 4);
    /// ```
    pub fn devices(ranks: usize) -> Vec<Device> {
        devices::devices(ranks)
    }

    /// Returns the same rank on a device with autodiff that computes activations again in the
    /// backward pass, by [`Device::gradient_checkpointing`]. Weights that are gathered for a use
    /// are dropped after it there. Make the model on the [`device`](Self::device) of the result.
    pub fn gradient_checkpointing(self) -> Self {
        let Self { comm, device } = self;
        let device = if device.is_autodiff() { device } else { device.autodiff() };
        Self { comm, device: device.gradient_checkpointing() }
    }

    /// Makes a world of one rank.
    pub fn alone(device: Device) -> Self {
        let engine = Threads::world(&[device.clone().inner()], DEADLINE).swap_remove(0);
        Self::new(engine, device)
    }

    /// Runs a function on one thread per device, each a rank of a new world. Returns the results in
    /// the order of ranks. A device may be given more than once.
    ///
    /// Ranks with a CUDA device each exchange tensors by NCCL. Where its library is not found, a
    /// warning names it, and they copy tensors from device to device, as all other threads do.
    ///
    /// A model whose parameters a [`Layout`](crate::distributed::Layout) divides is of no use
    /// without the other ranks, and keeps its world. Return the model of
    /// [`Layout::unshard`](crate::distributed::Layout::unshard) instead.
    ///
    /// # Errors
    ///
    /// The error of the first rank that failed; the calls of the others end with
    /// [`Error::PeerFailed`]. [`Error::Usage`] without a device, [`Error::Devices`] for devices
    /// of different backends.
    ///
    /// # Panics
    ///
    /// If the first rank that failed has panicked, with the same panic.
    pub fn threads<T, E, F>(devices: impl IntoIterator<Item = Device>, run: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: From<Error> + Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        Self::threads_within(DEADLINE, devices, run)
    }

    /// Runs a function like [`threads`](Self::threads), with a copy of the model for every rank, on
    /// the rank's device.
    ///
    /// All ranks therefore start with the same values. Equal seeds do not achieve this for ranks
    /// that share a device, since these also share the random numbers of the device.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::Tensor};
    /// use distmuon::comm::World;
    /// use distmuon::distributed::DistMuonConfig;
    ///
    /// let devices = World::devices(2);
    /// let model = LinearConfig::new(8, 8).init(&devices[0]);
    /// let models = World::threads_with(devices, model, |world, model| {
    ///     let mut optim = DistMuonConfig::new().init(&world, &model)?;
    ///     let x = Tensor::<2>::ones([4, 8], world.device());
    ///     let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
    ///     optim.step(1e-3, model, grads)
    /// })?;
    /// assert_eq!(models.len(), 2); // one for every rank, of the same values
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`threads`](Self::threads).
    ///
    /// # Panics
    ///
    /// As [`threads`](Self::threads).
    pub fn threads_with<M, T, E, F>(
        devices: impl IntoIterator<Item = Device>,
        model: M,
        run: F,
    ) -> Result<Vec<T>, E>
    where
        M: Module,
        T: Send,
        E: From<Error> + Display + Send,
        F: Fn(World, M) -> Result<T, E> + Sync,
    {
        let devices: Vec<Device> = devices.into_iter().collect();
        // Modules need not be `Sync`: this thread makes a fork for every rank.
        let fork = |device: &Device| Mutex::new(Some(parameters::fork(&model, device)));
        let forks: Vec<_> = devices.iter().map(fork).collect();
        // The model's values would otherwise stay in memory as long as the ranks run.
        drop(model);
        Self::threads(devices, |world| {
            let mut fork = forks[world.rank()].lock().expect("no holder of the lock panics");
            let model = fork.take().expect("a rank runs once");
            drop(fork);
            run(world, model)
        })
    }

    /// Runs a function like [`threads`](Self::threads), with a limit on the time that a rank waits
    /// for another.
    ///
    /// ```
    /// use distmuon::{Error, World};
    /// use std::time::Duration;
    ///
    /// let limit = Duration::from_millis(500); // longer than a busy host delays a thread
    /// let run = World::threads_within(limit, World::devices(2), |world| {
    ///     if world.is_main() {
    ///         std::thread::sleep(3 * limit); // rank 1 waits for it
    ///     }
    ///     world.comm().barrier()
    /// });
    /// assert!(matches!(run, Err(Error::PeerFailed { rank: 0, .. })));
    /// ```
    ///
    /// # Errors
    ///
    /// As [`threads`](Self::threads).
    ///
    /// # Panics
    ///
    /// As [`threads`](Self::threads).
    pub fn threads_within<T, E, F>(
        deadline: Duration,
        devices: impl IntoIterator<Item = Device>,
        run: F,
    ) -> Result<Vec<T>, E>
    where
        T: Send,
        E: From<Error> + Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let devices: Vec<Device> = devices.into_iter().collect();
        check(&devices)?;
        match choose_engine::of_devices(&devices) {
            #[cfg(feature = "cuda")]
            Choice::Nccl => return Self::nccl_threads(deadline, devices, cuda_memory, run),
            Choice::WithoutNccl(warning) => log::warn!("{warning}"),
            _ => {}
        }
        // Tensors are exchanged without autodiff, so results are on the inner devices.
        let inner: Vec<Device> = devices.iter().map(|device| device.clone().inner()).collect();
        let engines: Vec<_> = Threads::world(&inner, deadline).into_iter().map(Arc::new).collect();
        let world = |rank: usize| {
            let comm = Communicator::new(engines[rank].clone());
            Ok(Self::new(comm, devices[rank].clone()))
        };
        // All engines share the state of the world, so that any of them knows the rank.
        let failed = || engines[0].failed();
        on_threads(devices.len(), world, |rank, _| engines[rank].depart(), failed, run)
    }

    /// Runs a function like [`threads`](Self::threads) on ranks that exchange tensors by NCCL, in
    /// the memory that `memory` makes for the device of a rank. Never run on GPUs.
    ///
    /// # Errors
    ///
    /// As [`threads`](Self::threads) and [`World::nccl`].
    ///
    /// # Panics
    ///
    /// As [`threads`](Self::threads).
    #[cfg(feature = "cuda")]
    #[doc(hidden)] // for the memory of tests
    pub fn nccl_threads<T, E, F>(
        deadline: Duration,
        devices: Vec<Device>,
        memory: impl Fn(&Device, usize) -> Result<Arc<dyn DeviceMemory>> + Sync,
        run: F,
    ) -> Result<Vec<T>, E>
    where
        T: Send,
        E: From<Error> + Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let comms = Mutex::new(Vec::from_iter(devices.iter().map(|_| None)));
        let (meeting, culprit) = (Meeting::new(devices.len())?, Mutex::new(None));
        let world = |rank: usize| {
            let device = &devices[rank];
            let engine = Nccl::meeting(|| memory(device, rank), &meeting, rank, deadline)?;
            let departure = engine.departure();
            let world = Self::new(engine, device.clone());
            let held = Some((world.communicator(), departure));
            comms.lock().expect("no holder of the lock panics")[rank] = held;
            Ok(world)
        };
        let depart = |rank: usize, has_failed: bool| {
            let held = comms.lock().expect("no holder of the lock panics")[rank].take();
            let Some((comm, departure)) = held else { return };
            match has_failed {
                // A model that was returned may hold the communicator for longer.
                false => departure(),
                // A call after a failure names the rank, at once.
                true => {
                    if let Err(Error::PeerFailed { rank, .. }) = comm.barrier() {
                        culprit.lock().expect("no holder of the lock panics").get_or_insert(rank);
                    }
                }
            }
            // On the thread of the rank, and without the lock: the last communicator of rank 0 is
            // dropped once all other ranks have departed, and NCCL ends all of them together.
            drop(comm);
        };
        let failed = || *culprit.lock().expect("no holder of the lock panics");
        on_threads(devices.len(), world, depart, failed, run)
    }

    /// Returns the world of the processes that a launcher started, on this rank's device of the
    /// default backend, with autodiff: over NCCL on CUDA devices, over MPI on all others.
    ///
    /// ```no_run
    /// // torchrun --no-python --nproc-per-node 4 program, or mpirun -n 4 program
    /// let world = distmuon::comm::World::from_env()?;
    /// println!("{}", world.describe()?);
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// Keep the world until the program ends: MPI can't be started twice.
    ///
    /// # Errors
    ///
    /// As [`Launch::from_env`], `World::mpi` and `World::nccl`; [`Error::Usage`] without the
    /// feature of the engine (`cuda` or `mpi`).
    pub fn from_env() -> Result<Self> {
        let launch = Launch::from_env()?;
        let device = launch.device();
        #[cfg(feature = "cuda")]
        if choose_engine::cuda_index(&device).is_some() {
            return Self::nccl(&launch, device, DEADLINE);
        }
        #[cfg(feature = "mpi")]
        return Self::mpi(&launch, device, DEADLINE);
        #[cfg(not(feature = "mpi"))]
        Err(Error::usage(
            "no engine connects the device's ranks",
            "a device whose ranks this build connects",
            format!("{device:?}"),
            "build distmuon with the feature `cuda` for CUDA devices, or `mpi` for all devices",
        ))
    }

    /// Connects processes over MPI, with any device: tensors pass through the host. If a rank waits
    /// for another longer than `deadline`, the world fails.
    ///
    /// # Errors
    ///
    /// As [`Mpi::connect`].
    #[cfg(feature = "mpi")]
    pub fn mpi(launch: &Launch, device: Device, deadline: Duration) -> Result<Self> {
        let engine = Mpi::connect(launch, device.clone().inner(), deadline)?;
        Self::new(engine, device).by_host()
    }

    /// Connects processes over NCCL, each with its own CUDA device. If a rank waits for another
    /// longer than `deadline`, the world fails.
    ///
    /// Sums are [exact](crate::comm::Reduction::Exact). If there are several hosts with the same
    /// number of ranks, each host is a node, as by [`by_node`](Self::by_node).
    ///
    /// For NCCL's own sums, which need no nodes, pass
    /// [`Nccl::with_reduction`](crate::comm::Nccl::with_reduction) to [`World::new`].
    ///
    /// # Errors
    ///
    /// As [`Nccl::connect`].
    #[cfg(feature = "cuda")]
    pub fn nccl(launch: &Launch, device: Device, deadline: Duration) -> Result<Self> {
        let engine = Nccl::connect(launch, &device, deadline)?;
        Self::new(engine, device).by_host()
    }

    /// Returns the same ranks with each host as a node, if there are several hosts with the same
    /// number of ranks.
    #[cfg(any(feature = "mpi", feature = "cuda"))]
    fn by_host(self) -> Result<Self> {
        self.by_node(&gethostname::gethostname().to_string_lossy())
    }

    /// Returns the same ranks grouped in nodes: the ranks that give the same name are a node. The
    /// call has no effect with one node, with nodes of one rank, or with nodes of different sizes.
    /// All ranks make this call.
    ///
    /// Sums of gradients are taken inside a node before they are taken between nodes. Of a buffer
    /// of `B` bytes on `n` nodes of `d` ranks, a rank sends `(n - 1) / (n d) B` between nodes,
    /// instead of `(n - 1) / n B` without nodes.
    ///
    /// ```
    /// use distmuon::World;
    ///
    /// World::launch(4, |world| {
    ///     let node = format!("node {}", world.rank() / 2);
    ///     let world = world.by_node(&node)?;
    ///     assert_eq!(world.comm().nodes(), [[0, 1], [2, 3]]);
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]).
    pub fn by_node(self, name: &str) -> Result<Self> {
        let Self { comm, device } = self;
        let comm = match Hierarchy::over(comm.clone(), name)? {
            Some(hierarchy) => hierarchy.into(),
            None => comm,
        };
        Ok(Self { comm, device })
    }

    /// Describes the world: returns a table of the engine and of every rank's host, library and
    /// device on rank 0, and one line about this rank on all others. All ranks make this call.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]).
    pub fn describe(&self) -> Result<String> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let row = [host, self.comm.version(), format!("{:?}", self.device)];
        let Some(rows) = self.gather_value(&row, 0)? else {
            return Ok(format!("rank {}: {}", self.rank(), row.join(", ")));
        };
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(["rank", "host", "library", "device"]);
        for (rank, [host, version, device]) in rows.iter().enumerate() {
            table.add_row([&rank.to_string(), host, version, device]);
        }
        let (size, engine) = (self.size(), self.comm.engine_name());
        let communicators = match self.comm.communicators() {
            1 => "1 communicator".to_owned(),
            count => format!("{count} communicators"),
        };
        Ok(format!("{size} ranks over {engine}, {communicators} each\n{table}"))
    }

    /// Returns this rank's index, starting at 0.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// Returns `true` on rank 0, which prints and logs for all.
    ///
    /// Collective calls must not depend on it: all ranks have to make them.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the indices of this rank's part of a number of items. The parts of the ranks follow
    /// each other, and differ in length by at most one item.
    ///
    /// A step takes the mean of the ranks' gradients. The mean over ranks is the mean over all
    /// items only if all parts have the same length.
    ///
    /// ```
    /// # use distmuon::comm::World;
    /// let world = World::alone(Default::default());
    /// assert_eq!(world.part(10), 0..10);
    /// ```
    pub fn part(&self, items: usize) -> Range<usize> {
        flat::share(items, self.rank(), self.size())
    }

    /// Returns this rank's [`part`](Self::part) of items that do not start at 0, such as a batch.
    ///
    /// ```
    /// # use distmuon::comm::World;
    /// let world = World::alone(Default::default());
    /// assert_eq!(world.part_of(20..30), 20..30);
    /// ```
    pub fn part_of(&self, items: Range<usize>) -> Range<usize> {
        let part = self.part(items.len());
        items.start + part.start..items.start + part.end
    }

    /// Returns the mean of a number, such as a loss, over all ranks: the same value on every rank.
    /// All ranks make this call.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]).
    pub fn mean(&self, value: impl Into<f64>) -> Result<f64> {
        let mean = |all: Vec<f64>| all.iter().sum::<f64>() / all.len() as f64;
        self.combine_on_rank_0(&value.into(), mean)
    }

    /// Returns this rank's device, with autodiff if the world was made with such a device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the communicator of the world, which has the collectives.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// Returns a clone of the communicator of the world, for engines that wrap it.
    pub fn communicator(&self) -> Communicator {
        self.comm.clone()
    }

    /// Returns the world of the ranks that give the same color, numbered in the order of `key` and
    /// then of rank. All ranks make this call, before the loop of a program and not in it: rank 0
    /// keeps the members of each group until the world ends.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]).
    pub fn split(&self, color: usize, key: usize) -> Result<Self> {
        Ok(Self::new(self.comm.split(color, key)?, self.device.clone()))
    }

    /// Returns the model with the float parameters of rank 0, so that all ranks start with the same
    /// values. All ranks make this call. Parameters that a
    /// [`Layout`](crate::distributed::Layout) has divided stay as they are. Of parameters that are
    /// not initialised yet, as in a new model of Burn's layers, rank 0 alone draws initial values.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]); [`Error::Mismatch`] for models of
    /// different shapes; [`Error::Parameter`] for initial values of another type than their
    /// device's.
    pub fn broadcast<M: Module>(&self, model: M) -> Result<M> {
        self.broadcast_without(model, |_| false)
    }

    /// [`broadcast`](Self::broadcast) of all parameters but those at some paths.
    pub(crate) fn broadcast_without<M: Module>(
        &self,
        model: M,
        stays: impl Fn(&str) -> bool,
    ) -> Result<M> {
        // Two maps instead of a collective inside one: modules may hold locks inside a map that
        // several ranks share.
        let model = parameters::undrawn(model, self.is_main());
        let found = parameters::lazily(&model).into_iter();
        let found = found.filter(|found| found.placement.is_owned() || stays(&found.path));
        let stay: HashSet<String> = found.map(|found| found.path).collect();
        let mut detach = Detach::without(&stay, self);
        let model = parameters::map(model, &mut detach);
        let Detach { mut values, error, .. } = detach;
        if let Some(error) = error {
            self.comm.fail(&error.to_string());
            return Err(error);
        }
        let mut first = VecDeque::new();
        let mut pending = VecDeque::new();
        while let Some((value, shape)) = values.pop_front() {
            pending.push_back((self.comm.broadcast(value, 0)?, shape));
            // A few at a time: all at once would hold the model in memory twice.
            if pending.len() == IN_FLIGHT || values.is_empty() {
                for (value, shape) in pending.drain(..) {
                    first.push_back((value.wait()?, shape));
                }
            }
        }
        Ok(parameters::map(model, &mut Reattach { stay: &stay, values: first }))
    }
}

/// Runs a function on one thread per rank, in the world that `world` returns for it, and then calls
/// `depart`, with `true` if the rank has failed. Returns the results in the order of ranks, or the
/// failure that is the cause of the others: the error of the rank that `failed` returns, or of the
/// first one without a world for a reason of its own.
fn on_threads<T, E, F>(
    ranks: usize,
    world: impl Fn(usize) -> Result<World> + Sync,
    depart: impl Fn(usize, bool) + Sync,
    failed: impl FnOnce() -> Option<usize>,
    run: F,
) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<Error> + Display + Send,
    F: Fn(World) -> Result<T, E> + Sync,
{
    let unmade = Mutex::new(None);
    let rank = |rank: usize| {
        // A rank whose engine could not be made has no communicator to report it by. Its error is
        // the cause, unless it is only the echo of another's.
        let joined = world(rank).inspect_err(|error| {
            if !matches!(error, Error::PeerFailed { .. } | Error::Mismatch { .. }) {
                unmade.lock().expect("no holder of the lock panics").get_or_insert(rank);
            }
        });
        let outcome = match joined {
            Ok(world) => on_rank(world, &run),
            Err(error) => Ok(Err(error.into())),
        };
        depart(rank, is_failure(&outcome));
        outcome
    };
    let rank = &rank;
    let mut outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|index| scope.spawn(move || rank(index))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught")).collect()
    });
    if let Some(any) = outcomes.iter().position(is_failure) {
        let unmade = unmade.into_inner().expect("no holder of the lock panics");
        // Of all errors, return the one that the others follow from.
        // A rank that returned early is named, and has no error: then the first of the others is
        // taken.
        let cause = unmade.or_else(failed).filter(|rank| is_failure(&outcomes[*rank]));
        outcomes = vec![outcomes.swap_remove(cause.unwrap_or(any))];
    }
    let outcomes = outcomes.into_iter();
    outcomes.map(|outcome| outcome.unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// Returns `true` for an error and for a panic.
fn is_failure<T, E>(outcome: &thread::Result<Result<T, E>>) -> bool {
    !matches!(outcome, Ok(Ok(_)))
}

/// Runs a function on a rank, and tells the others of its error or panic: they must not wait for a
/// rank that has ended.
fn on_rank<T, E: Display>(
    world: World,
    run: impl Fn(World) -> Result<T, E>,
) -> thread::Result<Result<T, E>> {
    let comm = world.communicator();
    let outcome = catch_unwind(AssertUnwindSafe(|| run(world)));
    let cause = match &outcome {
        Ok(Ok(_)) => return outcome,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("it panicked: {}", message(panic.as_ref())),
    };
    comm.fail(&cause);
    outcome
}

/// Fails for no devices, and for devices of different backends.
fn check(devices: &[Device]) -> Result<()> {
    let Some(first) = devices.first() else {
        let remedy = "give one device for every rank, as `World::devices` does";
        return Err(Error::usage("the devices are missing", "at least one device", "none", remedy));
    };
    let backend = |device: &Device| core::mem::discriminant::<DispatchDevice>(device.as_dispatch());
    // Autodiff is a wrapper: a device with it and one without are of one backend.
    let kind = |device: &Device| backend(&device.clone().inner());
    match devices.iter().position(|device| kind(device) != kind(first)) {
        Some(rank) => Err(Error::Devices {
            rank,
            device: format!("{:?}", devices[rank]),
            first: format!("{first:?}"),
        }),
        None => Ok(()),
    }
}

/// The text of a panic.
pub(crate) fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// The values of a model's parameters in its order, flat, and their shapes.
type Values = VecDeque<(Tensor<1>, Shape)>;

/// Detaches the values from a model, which keeps placeholders.
struct Detach<'a> {
    stay: &'a HashSet<String>,
    rank: usize,
    is_alone: bool,
    values: Values,
    placeholders: Placeholders,
    error: Option<Error>,
}

impl<'a> Detach<'a> {
    fn without(stay: &'a HashSet<String>, world: &World) -> Self {
        let (rank, is_alone) = (world.rank(), world.size() == 1);
        let (values, placeholders) = (Values::default(), Placeholders::default());
        Self { stay, rank, is_alone, values, placeholders, error: None }
    }
}

/// Replaces the placeholders by values.
struct Reattach<'a> {
    stay: &'a HashSet<String>,
    values: Values,
}

impl parameters::Map for Detach<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.stay.contains(path) || self.error.is_some() {
            return param;
        }
        // Initial values of another type than other ranks send would end in a mismatch of calls.
        if !self.is_alone {
            self.error = parameters::initialise(path, self.rank, &param).err();
        }
        param.map(|value| {
            let placeholder = self.placeholders.of(&value);
            let shape = value.shape();
            self.values.push_back((value.inner().reshape([-1]), shape));
            placeholder
        })
    }
}

impl parameters::Map for Reattach<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.stay.contains(path) {
            return param;
        }
        let (value, shape) = self.values.pop_front().expect("one value per detached parameter");
        param.map(|old| in_place_of(&old, value.reshape(shape)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::comm::Engine;

    #[test]
    fn a_rank_without_a_world_is_the_cause_that_is_returned() {
        let engines: Vec<_> = Threads::world(&vec![Device::default(); 3], DEADLINE)
            .into_iter()
            .map(Arc::new)
            .collect();
        let world = |rank: usize| {
            if rank == 1 {
                engines[rank].fail("it has no device");
                return Err(Error::EmptyModel);
            }
            Ok(World::new(Communicator::new(engines[rank].clone()), Device::default()))
        };
        let start = Instant::now();
        let run = |world: World| world.comm().barrier();
        let error = on_threads(3, world, |rank, _| engines[rank].depart(), || Some(0), run);
        assert!(matches!(error, Err(Error::EmptyModel)), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(3));
    }
}
