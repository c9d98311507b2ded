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

use crate::bytes::{self, Kind, Traffic};
use crate::common::Matrices;
use crate::driver::{Arguments, StandIn};
use crate::train_lm::model::{Gpt, GptConfig};

/// Steps before those that count. The first ones compile kernels and allocate.
const WARM_UP: usize = 4;
const STEPS: usize = 8;
/// Checks of a type, of which the stand-in passes most.
const ATTEMPTS: usize = 100;

/// A model of matrices, and the most that a step may ask of the driver.
struct Model {
    name: &'static str,
    shapes: Vec<[usize; 2]>,
    /// Limits of each of the [`optimizers`]. A batch or a bucket has a number of launches of its
    /// own, whatever the number of its matrices.
    most: [Limits; 4],
}

/// The most launches of a step, and the most tasks of fusion's thread.
#[derive(Clone, Copy)]
struct Limits {
    whole: [usize; 2],
    /// A parameter at a time, with the tasks of one; `None` for steps that take seconds.
    one_by_one: Option<[usize; 2]>,
}

/// The optimizers whose steps are counted. In float32 there are no native kernels, which are
/// recorded in any case.
fn optimizers() -> [(&'static str, MuonConfig); 4] {
    let float32 = |graphs| {
        let iteration = NewtonSchulzConfig::new().with_dtype(IterationDtype::F32);
        MuonConfig::new().with_newton_schulz(iteration.with_graphs(graphs))
    };
    [
        ("Muon", MuonConfig::new()),
        (FLOAT32, float32(false)),
        (RECORDED, float32(true)),
        ("AdamW", MuonConfig::new().with_rule(RoutingRule::adamw(".*"))),
    ]
}

const FLOAT32: &str = "Muon, float32";
const RECORDED: &str = "Muon, float32, recorded";

/// Waits of a step of a whole model: the bench flushes the device once.
const MOST_WAITS: usize = 1;

/// Launches of a step of Muon for the 123 parameters of `train_lm --preset gpt2`, by their type. In
/// bfloat16, master weights are read and rounded, batch by batch.
const MOST_OF_TRAINING: [(DType, usize); 2] = [(DType::F32, 120), (DType::BF16, 175)];
/// The same for AdamW, in both types.
const MOST_OF_TRAINING_BY_ADAMW: usize = 75;

/// The passes around the products, and the bytes that each reads and writes of an element, of
/// parameters in float32 that are iterated in half precision.
const PASSES_OF_MUON: &[(Kind, usize)] = &[
    (Kind::GradientsAreFinite, 4),
    // Gradient and momentum; momentum and what is orthogonalised.
    (Kind::Momentum, 16),
    (Kind::Normalize, 6),
    (Kind::DirectionsAreFinite, 2),
    // Direction and parameter; parameter.
    (Kind::Apply, 10),
];
/// The same of AdamW: gradient, parameter and two moments; the latter three.
const PASSES_OF_ADAMW: &[(Kind, usize)] = &[(Kind::GradientsAreFinite, 4), (Kind::AdamW, 28)];

/// Runs all models. Fails if a step launches more kernels than its limit, or asks for memory, or if
/// one of a whole model waits, has too many tasks of fusion, or moves other bytes than it should.
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
            most: [
                Limits { whole: [100, 45], one_by_one: Some([440, 13]) },
                Limits { whole: [340, 45], one_by_one: Some([5300, 13]) },
                Limits { whole: [340, 45], one_by_one: Some([600, 20]) },
                Limits { whole: [24, 20], one_by_one: Some([220, 8]) },
            ],
        },
        Model {
            name: "1,200 of 16 x 16",
            shapes: vec![[16, 16]; 1200],
            most: [
                Limits { whole: [88, 45], one_by_one: None },
                Limits { whole: [116, 45], one_by_one: None },
                Limits { whole: [76, 45], one_by_one: None },
                Limits { whole: [48, 20], one_by_one: Some([3700, 8]) },
            ],
        },
    ];
    verify_native_kernels(device)?;
    let mut problems = vec![];
    for model in &models {
        model.run(device, &stand_in, &mut problems)?;
    }
    train(device, &stand_in, &mut problems)?;
    models[0].bytes(device, &stand_in, &mut problems)?;
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
        let mut one_by_one = BTreeMap::new();
        for ((name, config), limits) in optimizers().into_iter().zip(self.most) {
            let counts = self.row(&format!("{name}, whole model"), device, stand_in, |model| {
                let mut optim = config.init_batched(model)?;
                Ok(move |model, grads| optim.step(1e-3, model, grads))
            })?;
            self.check(name, &counts, limits.whole, problems);
            if counts.waits > MOST_WAITS {
                problems.push(format!("{}, {name}: {} waits", self.name, counts.waits));
            }
            if let Some([launches, tasks]) = limits.one_by_one {
                let row = format!("{name}, a parameter at a time");
                let counts = self.row(&row, device, stand_in, |model| {
                    let mut optim = config.init(model);
                    Ok(move |model, grads| Ok(optim.step(1e-3, model, grads)))
                })?;
                self.check(&row, &counts, [launches, tasks * self.shapes.len()], problems);
                one_by_one.insert(name, counts.launches);
            }
        }
        // A recording that did not launch less would have no use.
        let of_both = one_by_one.get(RECORDED).zip(one_by_one.get(FLOAT32));
        if of_both.is_some_and(|(recorded, launched)| recorded >= launched) {
            problems.push(format!("{}: recordings save no launch: {one_by_one:?}", self.name));
        }
        Ok(())
    }

    /// Adds what a step has asked too much of the driver and of fusion.
    fn check(
        &self,
        name: &str,
        &Counts { launches, allocations, tasks, .. }: &Counts,
        [most_launches, most_tasks]: [usize; 2],
        problems: &mut Vec<String>,
    ) {
        for (what, count, most) in
            [("launches", launches, most_launches), ("tasks", tasks, most_tasks)]
        {
            if count > most {
                problems.push(format!("{}, {name}: {count} {what} of {most}", self.name));
            }
        }
        if allocations > 0 {
            problems.push(format!("{}, {name}: {allocations} allocations", self.name));
        }
    }

    /// Prints the bytes of a step of the whole model, and adds what its passes move too much.
    fn bytes(
        &self,
        device: &Device,
        stand_in: &StandIn,
        problems: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let elements: usize = self.shapes.iter().map(|[m, n]| m * n).sum();
        let [(_, muon), _, _, (_, adamw)] = optimizers();
        for (optimizer, config, passes) in
            [("Muon", muon, PASSES_OF_MUON), ("AdamW", adamw, PASSES_OF_ADAMW)]
        {
            let name = format!("{}, {optimizer}", self.name);
            let found = bytes::of_step(&self.launches(&config, device, stand_in)?)?;
            println!("\n### Bytes of a step, {name}\n");
            println!("| kernels | launches | MB read | MB written | bytes for each element |");
            println!("|---|---|---|---|---|");
            for (kind, Traffic { launches, read, written, .. }) in &found {
                let [read, written] = [*read, *written].map(|bytes| bytes as f64);
                println!(
                    "| {kind} | {launches} | {:.1} | {:.1} | {:.1} |",
                    read * 1e-6,
                    written * 1e-6,
                    (read + written) / elements as f64
                );
            }
            // Exactly: a pass that is made twice, or over a part of the model, fails as well.
            for (kind, bytes) in passes {
                let traffic = found.get(kind).copied().unwrap_or_default();
                let moved = traffic.read + traffic.written;
                if (traffic.elements, moved) != (elements, bytes * elements) {
                    problems.push(format!(
                        "{name}, {kind}: {moved} bytes for {} of {elements} elements, and not \
                         {bytes} for each",
                        traffic.elements
                    ));
                }
            }
            let is_known = |kind| passes.iter().any(|(known, _)| *known == kind);
            let unknown = found.keys().find(|kind| **kind != Kind::Products && !is_known(**kind));
            problems.extend(unknown.map(|kind| format!("{name}: {kind} is no pass of its step")));
        }
        Ok(())
    }

    /// The launches of a step of the whole model.
    fn launches(
        &self,
        config: &MuonConfig,
        device: &Device,
        stand_in: &StandIn,
    ) -> anyhow::Result<Vec<Arguments>> {
        let device = device.clone().autodiff();
        let gradients = Matrices::new(&self.shapes, &device);
        let mut model = Matrices::new(&self.shapes, &device);
        let mut optim = made(|| config.init_batched(&model))?;
        stand_in.idle(true);
        let mut step = |model: Matrices| -> anyhow::Result<Matrices> {
            let grads = model.gradients_from(&gradients);
            let model = optim.step(1e-3, model, grads)?;
            device.sync()?;
            Ok(model)
        };
        for _ in 0..WARM_UP {
            model = step(model)?;
        }
        let (model, launches) = stand_in.observed(|| step(model));
        drop(model?);
        stand_in.idle(false);
        Ok(launches)
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
        let [(_, muon), _, _, (_, adamw)] = optimizers();
        for (optimizer, config, most) in
            [("Muon", muon, most), ("AdamW", adamw, MOST_OF_TRAINING_BY_ADAMW)]
        {
            let mut optim = made(|| config.init_batched(&model))?;
            let text = format!("passes and a step of {optimizer}");
            let whole = row((&name, &text), &device, stand_in, model.clone(), |model| {
                let grads = gradients(&model);
                Ok(optim.step(1e-3, model, grads)?)
            })?;
            let launches = whole.launches.saturating_sub(passes.launches);
            if launches > most {
                problems.push(format!(
                    "{name}: {launches} launches of {most} in a step of {optimizer}"
                ));
            }
            let mut optim = config.init(&model);
            let text = format!("{text}, a parameter at a time");
            row((&name, &text), &device, stand_in, model.clone(), |model| {
                let grads = gradients(&model);
                Ok(optim.step(1e-3, model, grads))
            })?;
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
