//! The host's part of a step: its time on each thread, the tasks of Burn's fusion, and its calls of
//! CUDA's driver, which a stand-in counts whose kernels do nothing. `gpu.sh host` runs it.

use std::collections::BTreeMap;
use std::fs;
#[cfg(feature = "fusion")]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, ensure};
#[cfg(feature = "fusion")]
use burn::backend::fusion::{
    custom::OperationIr,
    observer::{BlockOperations, FusionObservation, FusionObserver},
};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Int, Tensor};
use cubecl::logging::{LaunchObservation, LaunchObserver};
use distmuon::{Error, IterationDtype, MuonConfig, NativeKernels, NewtonSchulzConfig, RoutingRule};

use crate::common::Matrices;
use crate::driver::StandIn;
use crate::train_lm::model::{Gpt, GptConfig};

/// Steps before those that count. The first ones compile kernels and allocate.
const WARM_UP: usize = 4;
const STEPS: usize = 8;
/// Checks of a type, of which the stand-in passes most.
const ATTEMPTS: usize = 100;
/// Parameters of a model that is also updated a parameter at a time, which takes seconds a step for
/// a thousand.
const MOST_ONE_BY_ONE: usize = 100;

/// A model of matrices, and the most that a step may ask of the driver.
struct Model {
    name: &'static str,
    shapes: Vec<[usize; 2]>,
    /// Launches of Muon and of AdamW, for the whole model. A batch or a bucket has a number of its
    /// own, whatever the number of its matrices.
    most_launches: [usize; 2],
    /// The same a parameter at a time.
    most_one_by_one: [usize; 2],
}

/// Waits of a step of a whole model: the bench flushes the device once.
const MOST_WAITS: usize = 1;

/// Tasks of fusion's thread in a step of Muon and of AdamW for a whole model, whatever the number
/// of its parameters.
const MOST_TASKS: [usize; 2] = [45, 20];

/// Launches of a step of Muon for the 123 parameters of `train_lm --preset gpt2`, by their type. In
/// bfloat16, master weights are read and rounded, batch by batch.
const MOST_OF_TRAINING: [(DType, usize); 2] = [(DType::F32, 120), (DType::BF16, 175)];

/// Runs all models. Fails if a step launches more kernels than its limit, or asks for memory, or if
/// one of a whole model waits, or has too many tasks of fusion.
pub fn run(device: &Device) -> anyhow::Result<()> {
    let stand_in = StandIn::loaded();
    println!("\n## The host's part of a step, on a driver whose kernels do nothing\n");
    println!(
        "| model | optimizer | ms | CPU, ms of each thread | tasks of fusion | launches | MB copied \
         | allocations | waits |\n|---|---|---|---|---|---|---|---|---|"
    );
    let layer = [[768, 768], [768, 768], [768, 768], [768, 768], [768, 3072], [3072, 768]];
    let models = [
        Model {
            name: "GPT-2 small",
            shapes: layer.repeat(12),
            most_launches: [110, 36],
            most_one_by_one: [440, 220],
        },
        Model {
            name: "1,200 of 16 x 16",
            shapes: vec![[16, 16]; 1200],
            most_launches: [100, 58],
            most_one_by_one: [usize::MAX; 2],
        },
    ];
    verify_native_kernels(device)?;
    let mut problems = vec![];
    for model in &models {
        model.run(device, &stand_in, &mut problems)?;
    }
    train(device, &stand_in, &mut problems)?;
    ensure!(problems.is_empty(), "{}", problems.join("; "));
    Ok(())
}

impl Model {
    /// Prints the rows of the model, and adds what exceeds its limits.
    fn run(
        &self,
        device: &Device,
        stand_in: &StandIn,
        problems: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let muon = MuonConfig::new();
        // Without native kernels, which are recorded in any case.
        let float32 = |graphs| {
            let iteration = NewtonSchulzConfig::new().with_dtype(IterationDtype::F32);
            muon.clone().with_newton_schulz(iteration.with_graphs(graphs))
        };
        let (float32, recorded) = (float32(false), float32(true));
        let adamw = MuonConfig::new().with_rule(RoutingRule::adamw(".*"));
        for (name, config, [most, most_one_by_one], most_tasks) in [
            ("Muon", &muon, [self.most_launches[0], self.most_one_by_one[0]], MOST_TASKS[0]),
            ("Muon, float32", &float32, [usize::MAX; 2], MOST_TASKS[0]),
            ("Muon, float32, recorded", &recorded, [usize::MAX; 2], MOST_TASKS[0]),
            ("AdamW", &adamw, [self.most_launches[1], self.most_one_by_one[1]], MOST_TASKS[1]),
        ] {
            let counts = self.row(&format!("{name}, whole model"), device, stand_in, |model| {
                let mut optim = config.init_batched(model)?;
                Ok(move |model, grads| optim.step(1e-3, model, grads))
            })?;
            self.check(name, &counts, most, problems);
            let Counts { waits, tasks, .. } = counts;
            if waits > MOST_WAITS {
                problems.push(format!("{}, {name}: {waits} waits", self.name));
            }
            if tasks > most_tasks {
                problems.push(format!("{}, {name}: {tasks} tasks of {most_tasks}", self.name));
            }
            if self.shapes.len() <= MOST_ONE_BY_ONE {
                let one_by_one = format!("{name}, a parameter at a time");
                let counts = self.row(&one_by_one, device, stand_in, |model| {
                    let mut optim = config.init(model);
                    Ok(move |model, grads| Ok(optim.step(1e-3, model, grads)))
                })?;
                self.check(&one_by_one, &counts, most_one_by_one, problems);
            }
        }
        Ok(())
    }

    /// Adds what a step has asked too much of the driver.
    fn check(&self, name: &str, counts: &Counts, most: usize, problems: &mut Vec<String>) {
        let &Counts { launches, allocations, .. } = counts;
        if launches > most {
            problems.push(format!("{}, {name}: {launches} launches of {most}", self.name));
        }
        if allocations > 0 {
            problems.push(format!("{}, {name}: {allocations} allocations", self.name));
        }
    }

    /// Prints a row of the table for the optimizer that `init` makes.
    fn row<Step>(
        &self,
        name: &str,
        device: &Device,
        stand_in: &StandIn,
        init: impl Fn(&Matrices) -> distmuon::Result<Step>,
    ) -> anyhow::Result<Counts>
    where
        Step: FnMut(Matrices, GradientsParams) -> distmuon::Result<Matrices>,
    {
        let device = device.clone().autodiff();
        let gradients = Matrices::new(&self.shapes, &device);
        let model = Matrices::new(&self.shapes, &device);
        let mut step = made(|| init(&model))?;
        row((self.name, name), &device, stand_in, model, |model| {
            let grads = model.gradients_from(&gradients);
            Ok(step(model, grads)?)
        })
    }
}

/// Takes steps, and prints a row of the table.
fn row<M>(
    (model_name, name): (&str, &str),
    device: &Device,
    stand_in: &StandIn,
    mut model: M,
    mut step: impl FnMut(M) -> anyhow::Result<M>,
) -> anyhow::Result<Counts> {
    stand_in.idle(true);
    let mut run = |mut model: M, steps: usize| -> anyhow::Result<M> {
        for _ in 0..steps {
            model = step(model)?;
            device.flush()?;
        }
        device.sync()?;
        Ok(model)
    };
    model = run(model, WARM_UP)?;
    let tasks = Tasks::observed();
    let now = || Counts::now(stand_in, &tasks);
    let (before, threads, start) = (now(), threads()?, Instant::now());
    model = run(model, STEPS)?;
    let (ms, counts) = (start.elapsed().as_secs_f64() * 1e3, now());
    let threads = difference(&threads, &self::threads()?);
    drop(model);
    stand_in.idle(false);
    // The end of the measurement waits as well.
    let counts = counts.per_step(&before);
    let Counts { tasks, launches, copied, allocations, waits } = counts;
    println!(
        "| {model_name} | {name} | {:.2} | {threads} | {tasks} | {launches} | {:.1} | {allocations} | {waits} |",
        ms / STEPS as f64,
        copied as f64 * 1e-6
    );
    Ok(counts)
}

/// The model of `train_lm --preset gpt2`, with one text of its 1024 tokens: its passes alone, and
/// with a step. More texts do not change what the host does.
fn train(device: &Device, stand_in: &StandIn, problems: &mut Vec<String>) -> anyhow::Result<()> {
    let device = device.clone().autodiff();
    let config = GptConfig::new(12, 12, 768, 1024, 256);
    let tokens = Tensor::<2, Int>::zeros([1, config.context], &device);
    let gradients = |model: &Gpt| {
        let loss = model.loss(tokens.clone(), tokens.clone(), None);
        GradientsParams::from_grads(loss.backward(), model)
    };
    for (dtype, most) in MOST_OF_TRAINING {
        let model = config.init(&device).cast(dtype);
        let name = format!("`train_lm`, {dtype:?}");
        let passes = row((&name, "passes"), &device, stand_in, model.clone(), |model| {
            drop(gradients(&model));
            Ok(model)
        })?;
        let mut optim = made(|| MuonConfig::new().init_batched(&model))?;
        let whole = row((&name, "passes and a step of Muon"), &device, stand_in, model, |model| {
            let grads = gradients(&model);
            Ok(optim.step(1e-3, model, grads)?)
        })?;
        let launches = whole.launches.saturating_sub(passes.launches);
        if launches > most {
            problems.push(format!("{name}: {launches} launches of {most} in a step"));
        }
    }
    // After the rows of the table above.
    for (dtype, _) in MOST_OF_TRAINING {
        let model = config.init(&device).cast(dtype);
        stand_in.idle(true);
        let passes = || -> anyhow::Result<()> {
            drop(gradients(&model));
            Ok(device.sync()?)
        };
        // The first ones initialise the model, and let fusion find what it joins.
        let kernels = (0..WARM_UP).try_for_each(|_| passes()).and_then(|()| kernels(passes));
        stand_in.idle(false);
        println!("\n### Kernels of the passes of `train_lm`, {dtype:?}\n\n| kernel | launches |");
        println!("|---|---|");
        kernels?.into_iter().for_each(|(name, launches)| println!("| {name} | {launches} |"));
    }
    Ok(())
}

/// Fails unless the native kernels pass their self tests, while the stand-in computes what they do.
fn verify_native_kernels(device: &Device) -> anyhow::Result<()> {
    let iteration = NewtonSchulzConfig::new().init()?;
    let plan = iteration.explain_shape([768, 768], DType::F32, device);
    ensure!(
        matches!(plan.native, NativeKernels::Used(_)),
        "native kernels do not run on the stand-in: {:?}",
        plan.native
    );
    Ok(())
}

/// The result of `make`, once its check of a type passes: on the stand-in, the check reads a buffer
/// that no kernel has written, which mostly has the expected values from before.
fn made<T>(make: impl Fn() -> distmuon::Result<T>) -> distmuon::Result<T> {
    for _ in 0..ATTEMPTS {
        match make() {
            Err(Error::Dtype { .. }) => {}
            made => return made,
        }
    }
    make()
}

/// Tasks of Burn's fusion, and calls of the driver.
struct Counts {
    tasks: usize,
    launches: usize,
    /// Bytes, from the device to the device: by calls, and by graphs.
    copied: usize,
    allocations: usize,
    waits: usize,
}

impl Counts {
    fn now(stand_in: &StandIn, tasks: &Tasks) -> Self {
        let sum = |names: &[&str]| names.iter().map(|name| stand_in.calls(name)).sum();
        Self {
            tasks: tasks.count(),
            launches: sum(&["cuLaunchKernel", "cuGraphLaunch"]),
            copied: stand_in.copied(),
            allocations: sum(&["cuMemAlloc", "cuMemHostAlloc"]),
            waits: sum(&["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"]),
        }
    }

    /// The calls of one step since an earlier count, rounded down: calls that are made only once do
    /// not count.
    fn per_step(&self, before: &Self) -> Self {
        Self {
            tasks: (self.tasks - before.tasks) / STEPS,
            launches: (self.launches - before.launches) / STEPS,
            copied: (self.copied - before.copied) / STEPS,
            allocations: (self.allocations - before.allocations) / STEPS,
            waits: (self.waits - before.waits) / STEPS,
        }
    }
}

/// The time that the threads of each name have spent on a processor, in milliseconds. A thread that
/// spins while it waits also spends some.
fn threads() -> anyhow::Result<BTreeMap<String, f64>> {
    let mut times = BTreeMap::new();
    for task in fs::read_dir("/proc/self/task").context("Linux has a folder of threads")? {
        let task = task?.path();
        // A thread may have ended meanwhile.
        let (Ok(name), Ok(times_of_task)) =
            (fs::read_to_string(task.join("comm")), fs::read_to_string(task.join("schedstat")))
        else {
            continue;
        };
        let nanoseconds: f64 = times_of_task.split(' ').next().unwrap_or_default().parse()?;
        *times.entry(name.trim().to_owned()).or_default() += nanoseconds * 1e-6;
    }
    Ok(times)
}

/// The times per step of the threads that have spent some between two counts, as text.
fn difference(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) -> String {
    let spent = after.iter().map(|(name, time)| (name, time - before.get(name).unwrap_or(&0.0)));
    let spent =
        spent.map(|(name, time)| (name, time / STEPS as f64)).filter(|spent| spent.1 >= 0.01);
    spent.map(|(name, time)| format!("{name} {time:.2}")).collect::<Vec<_>>().join(", ")
}

/// The kernels that a function launches, the most frequent first.
fn kernels(run: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Vec<(&'static str, usize)>> {
    let launched = Arc::<Launched>::default();
    let observation = LaunchObservation::new(launched.clone());
    run()?;
    drop(observation);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in launched.0.lock().expect("no holder of the lock panics").iter() {
        // Of `path::KernelBinop<path::MulOp>`, `KernelBinop`.
        let name = name.split('<').next().and_then(|path| path.rsplit("::").next());
        *counts.entry(name.unwrap_or_default()).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, launches)| std::cmp::Reverse(*launches));
    Ok(counts)
}

/// The tasks of fusion's thread: operations, and drops of tensors.
#[cfg(feature = "fusion")]
struct Tasks {
    registered: Arc<Registered>,
    _observation: FusionObservation,
}

#[cfg(feature = "fusion")]
impl Tasks {
    fn observed() -> Self {
        let registered = Arc::<Registered>::default();
        Self { _observation: FusionObservation::new(registered.clone()), registered }
    }

    fn count(&self) -> usize {
        self.registered.0.load(Ordering::Relaxed)
    }
}

#[cfg(feature = "fusion")]
#[derive(Default)]
struct Registered(AtomicUsize);

#[cfg(feature = "fusion")]
impl FusionObserver for Registered {
    fn registered(&self, _operation: &OperationIr) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn block_starts(&self, _block: BlockOperations<'_>) {}

    fn block_ran(&self) {}
}

/// None without fusion.
#[cfg(not(feature = "fusion"))]
struct Tasks;

#[cfg(not(feature = "fusion"))]
impl Tasks {
    fn observed() -> Self {
        Self
    }

    fn count(&self) -> usize {
        0
    }
}

#[derive(Default)]
struct Launched(Mutex<Vec<&'static str>>);

impl LaunchObserver for Launched {
    fn launched(&self, kernel: &'static str) {
        self.0.lock().expect("no holder of the lock panics").push(kernel);
    }
}
