//! The memory that orthogonalisations, steps and checkpoints allocate in addition to their inputs,
//! as counted by the allocators of the host and of CubeCL's devices.

use burn::module::{Module, Param, ParamId};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, LambConfig, ModuleOptimizer};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use distmuon::checkpoint::{self, Checkpointed};
use distmuon::comm::{Communicator, World};
use distmuon::distributed::{
    Axis, DistModuleOptimizer, DistMuonConfig, Keep, Layout, Mesh, Place, Publish, RankMemory,
    StatesOn, WeightAverage,
};
use distmuon::link::{GraphOrder, Link};
use distmuon::parallel::{RowEmbedding, exchange};
use distmuon::{
    Coefficients, Error, IterationDtype, IterationForm, MasterWeights, MuonConfig, NewtonSchulz,
    NewtonSchulzConfig, RoutingRule, StateDtype,
};
use distmuon_testing::device::beyond_memory;
use distmuon_testing::models::{Layers, values};
#[cfg(feature = "mpi")]
use distmuon_testing::mpirun;
use distmuon_testing::simulated::Simulated;
use distmuon_testing::watched::replaced;
use distmuon_testing::{excused, lacks};
use peak_alloc::PeakAlloc;
use std::cell::RefCell;
use std::path::Path;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Runs one test at a time, since the allocators count for the whole process.
///
/// The lock is held until the thread of the test has ended, and freed the workspaces that libraries
/// keep for it: values of a thread are dropped in the reverse order of their first use.
fn alone() {
    static ALONE: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    HELD.with_borrow_mut(|held| {
        held.get_or_insert_with(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner));
    });
}

/// The bytes that all ranks hold while none of them works.
fn usage_of_ranks(together: impl Fn()) -> usize {
    together();
    let bytes = ALLOCATOR.current_usage();
    together();
    bytes
}

/// Memory in which libraries rearrange blocks of their operands.
const SCRATCH: usize = 1 << 20;

/// Returns `true` if the host's allocator counts all memory.
fn is_on_host() -> bool {
    let on_host = std::env::var("BURN_DEVICE").is_ok_and(|device| device != "flex");
    if on_host {
        excused("the memory of the host is counted on Flex");
    }
    !on_host
}

fn config(form: IterationForm) -> NewtonSchulzConfig {
    let set = Coefficients::KellerJordan;
    NewtonSchulzConfig::new()
        .with_coefficients(set)
        .with_steps(Some(5))
        .with_dtype(IterationDtype::F32)
        .with_form(form)
}

fn iteration(form: IterationForm) -> NewtonSchulz {
    config(form).init().unwrap()
}

/// The bytes that were allocated in addition to the batch, and those that were announced for all of
/// its matrices at once.
fn extra(shape: [usize; 3], iteration: &NewtonSchulz) -> [usize; 2] {
    let device = Device::default();
    let batch = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32));
    // Libraries allocate the memory that they keep at first use.
    drop(iteration.orthogonalize(batch.clone()));
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = iteration.orthogonalize(batch.clone());
    let extra = ALLOCATOR.peak_usage() - before;
    drop(result);
    [extra, shape[0] * iteration.explain(&batch).workspace]
}

/// The number of buffers of the size of the batch that a CubeCL device needs at once for an
/// orthogonalisation, including the batch and the result. `None` if the device does not count them.
fn pages(shape: [usize; 3], form: IterationForm) -> Option<usize> {
    let device = Device::default();
    let batch = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32));
    buffers(4 * shape.iter().product::<usize>(), || iteration(form).orthogonalize(batch.clone()))
}

/// The number of buffers of a size that a CubeCL device has had at once after some work. `None` if
/// the device does not count them.
fn buffers<T>(bytes: usize, work: impl FnOnce() -> T) -> Option<usize> {
    let device = Device::default();
    device.sync().unwrap();
    // Frees the buffers of other tests.
    device.memory_cleanup();
    let result = work();
    device.sync().unwrap();
    let (pools, bytes) = (device.memory_pool_report()?, bytes as u64);
    let pool = pools.iter().find(|pool| pool.largest_alloc == bytes);
    let pool = pool.expect("a pool has buffers of that size");
    assert!(pool.page_size < 2 * bytes, "a page for every buffer: {pool:?}");
    drop(result);
    Some(pool.pages as usize)
}

/// Returns `true` on CubeCL's CPU runtime, and reports it.
fn frees_late() -> bool {
    let frees_late = format!("{:?}", Device::default()).contains("CpuDevice");
    if frees_late {
        excused("CubeCL's CPU runtime frees buffers some time after their last use");
    }
    frees_late
}

#[test]
fn a_device_reserves_the_announced_workspace() {
    alone();
    if frees_late() {
        return;
    }
    for (form, shape) in [
        (IterationForm::Standard, [1, 1024, 1024]),
        (IterationForm::Gram, [1, 1024, 1024]),
        (IterationForm::Auto, [4, 640, 640]),
        (IterationForm::Gram, [4, 640, 640]),
    ] {
        let Some(pages) = pages(shape, form) else {
            lacks("counts of its memory");
            return;
        };
        let [_, m, n] = shape;
        let device = Device::default();
        let workspace = iteration(form).explain_shape([m, n], DType::F32, &device).workspace;
        let announced = workspace / (4 * m * n);
        println!("{shape:?} {form:?}: {} buffers more, announced {announced}", pages - 1);
        assert_eq!(pages - 1, announced, "{shape:?} {form:?}");
        assert!(form == IterationForm::Gram || announced <= 3);
    }
}

/// Moments of AdamW, in a bucket for each of eight parameters.
#[test]
fn states_on_the_host_leave_a_device_those_of_two_buckets() {
    alone();
    if frees_late() {
        return;
    }
    let (count, shape) = (8, [512, 1024]);
    let bytes = 4 * shape[0] * shape[1];
    let of_states_on = |place: StatesOn| {
        let device = Device::default().autodiff();
        let config = DistMuonConfig::new()
            .with_muon(MuonConfig::new().with_rule(RoutingRule::adamw("")))
            .with_bucket_mb(Some(bytes as f64 / 1e6))
            .with_states_on(place);
        let work = || {
            let matrix = |_| {
                let zeros = Tensor::<2>::zeros(shape, (&device, DType::F32));
                Param::from_tensor(zeros.require_grad())
            };
            let mut model = Equal { matrices: (0..count).map(matrix).collect() };
            let mut optim = config.init(&World::alone(device.clone()), &model).unwrap();
            assert_eq!(optim.plan().buckets().len(), count);
            for _step in 0..2 {
                let mut grads = GradientsParams::new();
                for matrix in &model.matrices {
                    grads.register(matrix.id, matrix.val().inner().ones_like());
                }
                model = optim.step(1e-3, model, grads).unwrap();
            }
            (model, optim)
        };
        buffers(bytes, work)
    };
    let [Some(host), Some(model)] = [StatesOn::Host, StatesOn::Model].map(of_states_on) else {
        lacks("counts of its memory");
        return;
    };
    println!("{host} buffers with states on the host, {model} on the device");
    // Two moments of all parameters, or of two buckets.
    assert_eq!(model - host, 2 * count - 2 * 2);
}

#[test]
fn an_orthogonalisation_allocates_the_announced_workspace() {
    alone();
    if !is_on_host() {
        return;
    }
    for shape in [[1, 1024, 1024], [4, 512, 512], [1, 700, 1024], [2, 1536, 512], [1, 512, 2048]] {
        let bytes = shape.iter().product::<usize>() * 4;
        for form in [IterationForm::Auto, IterationForm::Standard, IterationForm::Gram] {
            let [extra, announced] = extra(shape, &iteration(form));
            let times = |memory: usize| memory as f64 / bytes as f64;
            println!("{shape:?} {form:?}: {:.2}, announced {:.2}", times(extra), times(announced));
            assert!(extra <= announced + SCRATCH, "{shape:?} {form:?}: {extra} > {announced}");
            // The announced workspace is needed. Of a batch, a CPU takes the matrices at a time
            // that stay in its cache.
            let is_needed = extra + SCRATCH > announced;
            assert!(is_needed || shape[0] > 1, "{shape:?} {form:?}: {extra} < {announced}");
            assert!(form == IterationForm::Gram || announced <= 3 * bytes, "{shape:?} {form:?}");
        }
    }
}

#[test]
fn the_limit_of_the_workspace_is_respected() {
    alone();
    if !is_on_host() {
        return;
    }
    let (count, shape) = (8, [8, 512, 512]);
    let bytes = shape.iter().product::<usize>() * 4;
    let [whole, announced] = extra(shape, &iteration(IterationForm::Auto));
    let [parts, _] =
        extra(shape, &config(IterationForm::Auto).with_workspace_mb(0).init().unwrap());
    println!("{whole} bytes at once, {parts} one by one, announced {announced}");
    // The result, and the workspace of one matrix.
    assert!(parts <= bytes + announced / count + SCRATCH, "{parts}");
    assert!(parts < whole);
}

const LAYERS: usize = 24;
const WIDTH: usize = 256;

/// The largest memory of all ranks together on the host to save and to load, in bytes.
fn to_save_and_load(
    ranks: usize,
    config: &DistMuonConfig,
    layout: fn(&Mesh) -> Layout,
) -> [usize; 2] {
    let folder = tempfile::tempdir().unwrap();
    let path = &folder.path().join("run.bpk");
    let together = Barrier::new(ranks);
    let peaks = World::threads(vec![Device::default().autodiff(); ranks], |world| {
        let layout = layout(&Mesh::flat(&world));
        let (net, mut optim) =
            config.start(&layout, Layers::square(LAYERS, WIDTH, world.device()))?;
        // The optimizers of users make their states in a step.
        let loss = net.layers.iter().map(|layer| layer.weight.val().sum());
        let loss = loss.reduce(|sum, of_layer| sum + of_layer).expect("layers");
        let gradients = optim.backward(&loss, &net)?;
        // The graph has the weights that it gathered.
        drop(loss);
        let net = optim.step(0.01, net, gradients)?;
        // No rank works between two barriers.
        let start = || {
            together.wait();
            if world.rank() == 0 {
                ALLOCATOR.reset_peak_usage();
            }
            let before = ALLOCATOR.current_usage();
            together.wait();
            before
        };
        let end = |before: usize| {
            together.wait();
            let peak = ALLOCATOR.peak_usage();
            together.wait();
            peak - before
        };
        let before = start();
        optim.save(path, &net, &0)?;
        let saved = end(before);
        let before = start();
        let (net, optim, _) = optim.load::<_, i32>(path, net)?;
        let loaded = end(before);
        drop((net, optim));
        Ok::<_, Error>([saved, loaded])
    });
    peaks.unwrap().swap_remove(0)
}

#[test]
fn a_checkpoint_allocates_buckets_and_not_the_state() {
    alone();
    if !is_on_host() {
        return;
    }
    let matrix = 4 * WIDTH * WIDTH;
    let state = LAYERS * matrix;
    // Two matrices to a bucket.
    let bucket = 2 * matrix;
    let config = DistMuonConfig::new().with_bucket_mb(Some(0.5));
    // Libraries allocate the memory that they keep at first use.
    to_save_and_load(2, &config, Layout::new);
    let peaks = [1, 2, 4].map(|ranks| {
        let [saved, loaded] = to_save_and_load(ranks, &config, Layout::new);
        let times = |bytes: usize| bytes as f64 / state as f64;
        println!(
            "{ranks} ranks: {saved} to save ({:.2} of the state), {loaded} to load ({:.2})",
            times(saved),
            times(loaded)
        );
        (saved, loaded)
    });
    for (saved, _) in peaks {
        // The gathered bucket, its copy on the host, and two of its tensors that are being written.
        assert!(saved <= 4 * bucket + SCRATCH, "{saved} bytes, a bucket is {bucket}");
        assert!(saved < state, "{saved} bytes, the state is {state}");
    }
    let [(alone, _), .., (four, _)] = peaks;
    assert!(2 * four < 3 * alone.max(bucket + SCRATCH), "{four} bytes on 4 ranks, {alone} on one");
}

#[test]
fn a_divided_model_is_saved_and_loaded_in_buckets_and_single_parameters() {
    alone();
    if !is_on_host() {
        return;
    }
    let matrix = 4 * WIDTH * WIDTH;
    let bucket = 2 * matrix;
    let config = DistMuonConfig::new().with_bucket_mb(Some(0.5));
    let layouts: [Named; 2] = [
        ("owned", |mesh| Layout::new(mesh).owned("dp")),
        ("rows", |mesh| Layout::new(mesh).rows("dp")),
    ];
    for (name, layout) in layouts {
        // Libraries allocate the memory that they keep at first use.
        to_save_and_load(2, &config, layout);
        for ranks in [2, 4] {
            let [saved, loaded] = to_save_and_load(ranks, &config, layout);
            println!("{name}, {ranks} ranks: {saved} to save, {loaded} to load");
            // As for a model that every rank has: a bucket of states, or a gathered parameter with
            // its copy, on the way to the file.
            assert!(saved <= 4 * bucket + SCRATCH, "{name}, {ranks}: {saved}");
            // The model's parts and states are replaced one by one.
            assert!(loaded <= 4 * bucket + SCRATCH, "{name}, {ranks}: {loaded}");
            assert!(loaded < LAYERS * matrix / 2, "{name}, {ranks}: {loaded}");
        }
    }
}

/// The bytes that a save in the background allocates until its file is complete, of a model and the
/// moments of AdamW.
fn to_save_in_background(saver: checkpoint::Saver, folder: &Path) -> usize {
    let net = Layers::square(LAYERS, WIDTH, &Device::default().autodiff());
    let config = MuonConfig::new().with_rule(RoutingRule::adamw(""));
    // A bucket for every two matrices.
    let config = DistMuonConfig::new().with_muon(config).with_bucket_mb(Some(0.5));
    let optim = config.init(&World::alone(Device::default().autodiff()), &net).unwrap();
    let mut saver = saver;
    let mut saved = |name: &str| {
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        saver.save(folder.join(name), &net, &optim, &0).unwrap();
        saver.wait().unwrap();
        ALLOCATOR.peak_usage() - before
    };
    // Libraries allocate the memory that they keep at first use.
    saved("first");
    saved("second")
}

#[test]
fn a_save_in_the_background_allocates_no_more_than_its_limit() {
    alone();
    if !is_on_host() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let matrix = 4 * WIDTH * WIDTH;
    let file = 3 * LAYERS * matrix;
    let unlimited = to_save_in_background(checkpoint::Saver::new(), folder.path());
    println!("{unlimited} bytes without a limit, the file has {file}");
    // The thread reads the tensors themselves.
    assert!(unlimited <= 2 * matrix + SCRATCH, "{unlimited}");
    for limit in [1, 2] {
        let saver = checkpoint::Saver::new().with_host_mb(limit);
        let bytes = to_save_in_background(saver, folder.path());
        println!("{bytes} bytes with a limit of {limit} MB");
        // Tensors that wait, a bucket that is taken apart, and two tensors that are being written.
        assert!(bytes <= limit * 1_000_000 + 4 * matrix + SCRATCH, "{limit} MB: {bytes}");
        assert!(bytes < file / 2);
    }
}

/// All matrices are in one bucket, whose tensors are cut out one by one.
#[test]
fn a_checkpoint_of_one_bucket_allocates_it_once() {
    alone();
    if !is_on_host() {
        return;
    }
    let matrix = 4 * WIDTH * WIDTH;
    let config = DistMuonConfig::new().with_bucket_mb(Some(1000.0));
    to_save_and_load(1, &config, Layout::new);
    let [saved, _] = to_save_and_load(1, &config, Layout::new);
    // The gathered bucket, its copy on the host, and two of its tensors that are being written.
    assert!(saved <= (2 * LAYERS + 2) * matrix + SCRATCH, "{saved} bytes, a matrix has {matrix}");
}

#[test]
fn a_checkpoint_allocates_one_state_of_a_users_optimizer_at_a_time() {
    alone();
    if !is_on_host() {
        return;
    }
    let muon = MuonConfig::new()
        .with_optimizer("lamb", LambConfig::new().build())
        .with_rule(RoutingRule::custom("", "lamb"));
    let config = DistMuonConfig::new().with_muon(muon);
    to_save_and_load(2, &config, Layout::new);
    // Two moments of a layer.
    let state = 2 * 4 * WIDTH * WIDTH;
    for ranks in [1, 2, 4] {
        let [saved, _] = to_save_and_load(ranks, &config, Layout::new);
        // A state in two forms at its owner, and received, taken apart and written by rank 0.
        assert!(saved <= 6 * state + SCRATCH, "{ranks} ranks: {saved}, a state is {state}");
        assert!(saved < LAYERS * state / 2, "{ranks} ranks: {saved}");
    }
}

/// Matrices of one size, each of which fills a bucket.
#[derive(Module, Debug)]
struct Equal {
    matrices: Vec<Param<Tensor<2>>>,
}

/// Bytes of a matrix.
const BUCKET: usize = 2 * 16 * 8192;

/// The largest number of bytes that a step on two ranks allocates in addition to the models,
/// gradients and states of both ranks in bfloat16, and the peak that the ranks report.
fn extra_of_a_step(buckets: usize, set: fn(DistMuonConfig) -> DistMuonConfig) -> [usize; 2] {
    let device = Device::default().autodiff();
    let all = Barrier::new(2);
    let peaks = World::threads([device.clone(), device], |world| {
        let ones = || Tensor::full([16, 8192], 0.01, (world.device(), DType::BF16));
        let matrix = |_| Param::from_tensor(ones().require_grad());
        let mut model = Equal { matrices: (0..buckets).map(matrix).collect() };
        let gradients = |model: &Equal| {
            let mut gradients = GradientsParams::new();
            for matrix in &model.matrices {
                gradients.register(matrix.id, ones().inner());
            }
            gradients
        };
        let muon = MuonConfig::new().with_rule(RoutingRule::muon("matrices"));
        let config =
            DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(BUCKET as f64 / 1e6));
        let mut optim = set(config).init(&world, &model)?;
        assert_eq!(optim.plan().buckets().len(), buckets);
        // Products allocate scratch memory of hundreds of megabytes once per thread.
        let warm = gradients(&model);
        model = optim.step(0.01, model, warm)?;
        optim.finish_publication()?;
        let gradients = gradients(&model);
        all.wait();
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        all.wait();
        let model = optim.step(0.01, model, gradients)?;
        optim.finish_publication()?;
        all.wait();
        let extra = ALLOCATOR.peak_usage().saturating_sub(before);
        all.wait();
        drop(model);
        Ok::<_, Error>([extra, optim.memory().total.peak])
    });
    peaks.expect("both ranks step").swap_remove(0)
}

#[test]
fn a_step_with_more_buckets_does_not_use_more_memory() {
    alone();
    if !is_on_host() {
        return;
    }
    let check = |what: &str, set: fn(DistMuonConfig) -> DistMuonConfig, bound: usize| {
        for buckets in [25, 100] {
            let [extra, reported] = extra_of_a_step(buckets, set);
            let times = |bytes: usize| bytes as f64 / BUCKET as f64;
            println!(
                "{what}, {buckets} buckets: {:.1} buckets more, {:.1} reported",
                times(extra),
                times(reported)
            );
            assert!(extra <= bound, "{what}, {buckets} buckets: {extra} bytes beyond {bound}");
        }
    };
    // As many buckets as two ranks reduce and gather at a time, whatever the number of buckets is.
    // How many of them a run holds at once depends on how far one rank is ahead of the other, so
    // that the peaks of two runs can't be compared.
    let in_flight = 2 * 2 * DistMuonConfig::new().in_flight * BUCKET + SCRATCH;
    check("unchecked", |config| config.with_check_every(0), in_flight);

    // A comparison of what ranks hold in common reads one tensor after the other, on both ranks.
    check("compared", |config| config.with_check_every(1), in_flight + 2 * 2 * BUCKET);

    // An audit adds one bucket of matrices as it is sent and as it is received: the gradients and
    // values in bfloat16, the momentum in float32.
    let audited = 2 * 2 * (1 + 1 + 2) * BUCKET;
    check("audited", |config| config.with_audit_every(1), in_flight + audited);

    // New values that are on their way take the place of the old ones.
    check("published late", |config| config.with_publish(Publish::AtFirstUse), in_flight);
}

/// The gradients of a backward pass, in which Burn frees the leaves of former steps.
fn passed(net: &Linear) -> GradientsParams {
    let output = net.forward(Tensor::<2>::ones([1, 16], &net.weight.val().device()));
    GradientsParams::from_grads(output.mean().backward(), net)
}

/// Bytes in use after a number of optimizers, each of which took a step and was dropped.
fn held_after(optimizers: usize, init: impl Fn(&Linear) -> ModuleOptimizer, net: &Linear) -> usize {
    for _ in 0..optimizers {
        init(net).step(0.01, net.clone(), passed(net));
    }
    ALLOCATOR.current_usage()
}

/// The same for optimizers that update matrices in batches.
fn held_after_batched(optimizers: usize, config: &MuonConfig, net: &Linear) -> usize {
    for _ in 0..optimizers {
        let mut optim = config.init_batched(net).expect("the rule routes the weight");
        optim.step(0.01, net.clone(), passed(net)).expect("the step is taken");
    }
    ALLOCATOR.current_usage()
}

#[test]
fn optimizers_leave_next_to_nothing_behind() {
    alone();
    if !is_on_host() {
        return;
    }
    let net = LinearConfig::new(16, 16).with_bias(false).init(&Device::default().autodiff());
    let config = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let routing = config.route(&net).expect("the rule routes the weight");
    for name in ["of one routing", "routed anew", "loaded anew", "in batches"] {
        let init = |net: &Linear| match name {
            "of one routing" => routing.init(),
            "loaded anew" => config.init(net).load_record(config.init(net).to_record()),
            _ => config.init(net),
        };
        let held = |count| match name {
            "in batches" => held_after_batched(count, &config, &net),
            _ => held_after(count, init, &net),
        };
        let before = held(100);
        let more = held(1000).saturating_sub(before);
        println!("1000 optimizers {name}: {more} bytes");
        // A tenth of a tensor of 1 KB of each.
        assert!(more < 100_000, "{name}: {more} bytes");
    }
}

/// Bytes that rounds of a step, a save and a load leave behind, after as many others.
fn left_by_rounds<O: Checkpointed>(
    rounds: usize,
    optim: O,
    net: Linear,
    step: impl Fn(&mut O, Linear, GradientsParams) -> Linear,
) -> usize {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.ckpt");
    let mut run = Some((net, optim));
    let mut held = || {
        for round in 0..rounds {
            let (net, mut optim) = run.take().expect("a run");
            let gradients = passed(&net);
            let net = step(&mut optim, net, gradients);
            checkpoint::save(&path, &net, &optim, &round).expect("the run is saved");
            let (net, optim, saved): (_, _, usize) =
                checkpoint::load(&path, net, optim).expect("the run is loaded");
            assert_eq!(round, saved);
            run = Some((net, optim));
        }
        ALLOCATOR.current_usage()
    };
    let before = held();
    held().saturating_sub(before)
}

#[test]
fn steps_saves_and_loads_leave_nothing_behind() {
    alone();
    if !is_on_host() {
        return;
    }
    let net = LinearConfig::new(16, 16).with_bias(false).init(&Device::default().autodiff());
    let config = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    const ROUNDS: usize = 500;
    let one_by_one =
        left_by_rounds(ROUNDS, config.init(&net), net.clone(), |optim, net, gradients| {
            optim.step(0.01, net, gradients)
        });
    let batched = config.init_batched(&net).expect("the rule routes the weight");
    let in_batches = left_by_rounds(ROUNDS, batched, net, |optim, net, gradients| {
        optim.step(0.01, net, gradients).expect("the step is taken")
    });
    for (name, left) in [("one by one", one_by_one), ("in batches", in_batches)] {
        println!("{ROUNDS} rounds {name}: {left} bytes");
        // A tensor of 1 KB of each round would be ten times as much.
        assert!(left < 100 * ROUNDS, "{name}: {left} bytes");
    }
}

/// Rounds of a step, saves in a thread, a load of what fits and a whole model, on two ranks.
#[test]
fn rounds_of_ranks_leave_nothing_behind() {
    const ROUNDS: usize = 100;
    alone();
    if !is_on_host() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.ckpt");
    for divides in [false, true] {
        let together = Barrier::new(2);
        let left = World::threads(World::devices(2), |world| {
            let world = world.gradient_checkpointing();
            let layout = Layout::from(&world);
            let layout = if divides { layout.owned("dp").with_small_elements(0) } else { layout };
            let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
            let config = DistMuonConfig::new().with_muon(muon);
            let linear = LinearConfig::new(16, 16).with_bias(false).init(world.device());
            let mut run = Some(config.start(&layout, linear)?);
            let mut saver = checkpoint::Saver::new();
            let mut held = || -> Result<usize, Error> {
                for round in 0..ROUNDS {
                    let (net, mut optim) = run.take().expect("a run");
                    let loss = net.forward(Tensor::<2>::ones([1, 16], world.device())).mean();
                    let gradients = optim.backward(&loss, &net)?;
                    let net = optim.step(0.01, net, gradients)?;
                    drop(layout.unshard(&net)?);
                    saver.save(&path, &net, &optim, &round)?;
                    saver.wait()?;
                    world.comm().barrier()?;
                    let (net, optim, saved, differences): (_, _, usize, _) =
                        checkpoint::load_matching(&path, net, optim)?;
                    assert!(saved == round && differences.is_empty(), "{differences:?}");
                    run = Some((net, optim));
                }
                Ok(usage_of_ranks(|| _ = together.wait()))
            };
            let before = held()?;
            Ok::<_, Error>(held()?.saturating_sub(before))
        });
        let left = left.unwrap()[0];
        println!("{ROUNDS} rounds of ranks, divided: {divides}: {left} bytes");
        // A tensor of 1 KB of each round would be ten times as much.
        assert!(left < 100 * ROUNDS, "divided: {divides}: {left} bytes");
    }
}

/// Layers of the model whose parameters are owned.
const OWNED_LAYERS: usize = 16;
/// Bytes of one of them.
const LAYER: usize = 512 * 512 * 4;

/// Bytes in addition to the parts, of two ranks together.
#[derive(Debug)]
struct Extra {
    /// At the peak of dividing the model.
    sharding: usize,
    /// After it.
    held: usize,
    /// At the peak of passes that evaluate the model, before any step.
    evaluating: usize,
    /// After a forward pass.
    kept: usize,
    /// At the peak of a backward pass.
    passing: usize,
}

/// The memory of passes with owned parameters. `layers` are sent ahead, and as many gradients.
fn extra_of_owned_parameters(keep: Keep, in_rows: bool, layers: usize) -> Extra {
    let device = Device::default().autodiff().gradient_checkpointing();
    extra_of_owned_parameters_on(device, (keep, in_rows, layers), Linear::forward)
}

/// A use of a layer.
type Use = fn(&Linear, Tensor<3>) -> Tensor<3>;

fn extra_of_owned_parameters_on(
    device: Device,
    (keep, in_rows, layers): (Keep, bool, usize),
    use_of: Use,
) -> Extra {
    let together = Barrier::new(2);
    let before = ALLOCATOR.current_usage();
    // Reads the allocator while all ranks wait.
    let read = |world: &World, usage: fn(&PeakAlloc) -> usize| {
        together.wait();
        let bytes = usage(&ALLOCATOR).saturating_sub(before);
        together.wait();
        if world.is_main() {
            ALLOCATOR.reset_peak_usage();
        }
        together.wait();
        bytes
    };
    let (peak, now) =
        (PeakAlloc::peak_usage as fn(&_) -> _, PeakAlloc::current_usage as fn(&_) -> _);
    let ranks = World::threads([device.clone(), device], |world| {
        let layout = Layout::new(&Mesh::flat(&world))
            .with_keep(keep)
            .with_ahead_mb((layers * LAYER) as f64 / 1e6)
            .with_in_flight_mb((layers * LAYER) as f64 / 1e6);
        let layout = if in_rows { layout.rows("dp") } else { layout.owned("dp") };
        read(&world, now);
        // Not initialised yet.
        let model = layout.shard(Layers::square(OWNED_LAYERS, 512, world.device()))?;
        let sharding = read(&world, peak);
        // An engine may hold the last parameter until the next call.
        world.comm().barrier()?;
        let held = read(&world, now);
        let evaluated = model.valid();
        let input = Tensor::<3>::ones([2, 2, 512], &world.device().clone().inner());
        // The first pass learns the order.
        for _ in 0..3 {
            drop(evaluated.layers.iter().fold(input.clone(), |x, layer| layer.forward(x)));
        }
        drop(evaluated);
        let evaluating = read(&world, peak);
        let forward = || {
            let input = Tensor::<3>::ones([2, 2, 512], world.device());
            model.layers.iter().fold(input, |x, layer| use_of(layer, x)).mean()
        };
        layout.backward(&forward(), &model)?; // makes the depths of the clock
        let before_passes = read(&world, now);
        let output = forward();
        let kept = read(&world, now).saturating_sub(before_passes);
        let gradients = layout.backward(&output, &model)?;
        let passing = read(&world, peak);
        drop(gradients);
        let extra = |bytes: usize| bytes.saturating_sub(OWNED_LAYERS * LAYER);
        let [sharding, held, evaluating, passing] =
            [sharding, held, evaluating, passing].map(extra);
        Ok::<_, Error>(Extra { sharding, held, evaluating, kept, passing })
    });
    ranks.unwrap().swap_remove(0)
}

#[test]
fn owned_parameters_take_the_memory_of_parts_and_one_parameter() {
    alone();
    if !is_on_host() {
        return;
    }
    // One parameter at a time, and two layers, which is the default.
    for (in_rows, layers) in [(false, 0), (true, 0), (false, 2), (true, 2)] {
        extra_of_owned_parameters(Keep::Nothing, in_rows, layers); // libraries
        let extra = extra_of_owned_parameters(Keep::Nothing, in_rows, layers);
        println!("in rows: {in_rows}, {layers} layers ahead: {extra:?}");
        let Extra { sharding, held, evaluating, kept, passing } = extra;
        // On each of two ranks: the initialised parameter, and that of rank 0.
        assert!(sharding <= 2 * 2 * LAYER + SCRATCH, "{sharding}");
        assert!(held <= SCRATCH, "{held}");
        // On each rank the weight that is used, the limit, and a message that it has sent.
        assert!(evaluating <= 2 * (2 + layers) * LAYER + SCRATCH, "{evaluating}");
        // The layers that the next pass uses first.
        assert!(kept <= 2 * layers * LAYER + SCRATCH, "{kept}");
        // The parts of all gradients; on each rank a weight, its gradient, the sum over ranks, and
        // the mean; a message that a rank has sent while the other computes, as on a busy machine;
        // and the limit.
        let each = 5 + layers;
        assert!(passing <= (OWNED_LAYERS + 2 * each) * LAYER + SCRATCH, "{passing}");
    }
}

/// As a tied embedding makes one, or a layer of the user's. Burn's layer makes none.
#[test]
fn views_of_weights_stay_in_memory_without_gradient_checkpointing() {
    alone();
    if !is_on_host() {
        return;
    }
    let view: Use = |layer, x| x.matmul(layer.weight.val().transpose().unsqueeze());
    for (use_of, is_view) in [(Linear::forward as Use, false), (view, true)] {
        for is_checkpointed in [true, false] {
            let device = Device::default().autodiff();
            let device = if is_checkpointed { device.gradient_checkpointing() } else { device };
            let kept = || {
                let case = (Keep::Nothing, false, 0);
                extra_of_owned_parameters_on(device.clone(), case, use_of).kept
            };
            kept(); // libraries
            let kept = kept();
            match is_view && !is_checkpointed {
                // Of both ranks, but for the first layer, whose input needs no gradient.
                true => assert!(kept >= 2 * (OWNED_LAYERS - 1) * LAYER, "{kept}"),
                false => assert!(kept <= SCRATCH, "{is_view}, {is_checkpointed}: {kept}"),
            }
        }
    }
}

/// The host's memory for passes that no backward pass follows.
#[test]
fn a_use_that_is_not_trained_keeps_up_to_64_kb_until_a_shorter_pass() {
    const USES: usize = 200;
    alone();
    if !is_on_host() {
        return;
    }
    let device = Device::default().autodiff().gradient_checkpointing();
    let run = World::threads([device], |world| {
        let layout = Layout::from(&world).owned("dp").with_small_elements(1).with_ahead_mb(0.0);
        let linear = LinearConfig::new(16, 16).with_bias(false).init(world.device());
        let layer = layout.shard(linear)?;
        let input = Tensor::<2>::ones([1, 16], world.device());
        let forward = |uses: usize| (0..uses).for_each(|_| drop(layer.forward(input.clone())));
        let now = || ALLOCATOR.current_usage();
        forward(1); // libraries
        layout.discard_pass()?;
        let before = now();
        forward(USES);
        let held = now() - before;
        layout.discard_pass()?;
        // Burn frees graphs in the next backward pass.
        layout.backward(&layer.forward(input.clone()).mean(), &layer)?;
        Ok::<_, Error>([held, now().saturating_sub(before)])
    });
    let [held, left] = run.unwrap()[0];
    println!("{USES} uses: {held} bytes, {left} after a shorter pass");
    assert!((USES << 15..=USES << 16).contains(&held), "{held}");
    assert!(left <= 4 << 16, "{left}");
}

/// Burn's embedding keeps its table for the backward pass, also the one that was gathered.
#[test]
fn a_gathered_table_is_held_until_the_backward_pass() {
    const TABLE: usize = 4096 * 256 * 4;
    alone();
    if !is_on_host() {
        return;
    }
    let together = Barrier::new(2);
    let now = || usage_of_ranks(|| _ = together.wait());
    let devices = World::devices(2).into_iter().map(|device| device.gradient_checkpointing());
    let run = World::threads(devices, |world| {
        let layout = Layout::from(&world).owned("dp").with_ahead_mb(0.0);
        let table = layout.shard(EmbeddingConfig::new(4096, 256).init(world.device()))?;
        let tokens = Tensor::<2, Int>::zeros([2, 3], world.device());
        // The first pass makes the depths of the clock.
        layout.backward(&table.forward(tokens.clone()).square().mean(), &table)?;
        let before = now();
        let loss = table.forward(tokens.clone()).square().mean();
        let held = now() - before;
        let gradients = layout.backward(&loss, &table)?;
        drop((gradients, loss));
        Ok::<_, Error>([held, now().saturating_sub(before)])
    });
    let [held, left] = run.unwrap()[0];
    println!("{held} of a gathered table on two ranks, {left} after the backward pass");
    assert!((2 * TABLE..=2 * TABLE + SCRATCH).contains(&held), "{held}");
    assert!(left <= SCRATCH, "{left}");
}

/// Parameters of which ranks have parts that are neighbours in the whole: rows of a table, and
/// matrices of a stack.
#[derive(Module, Debug)]
struct Stacked {
    table: Embedding,
    stack: Param<Tensor<3>>,
    layer: Linear,
}

impl Stacked {
    fn new(device: &Device) -> Self {
        Self::smaller(1, device)
    }

    /// A model whose sizes are divided by a number of up to 32.
    fn smaller(by: usize, device: &Device) -> Self {
        let stack = [8, 128 / by, 1024 / by];
        let stack = Tensor::random(stack, Distribution::Normal(0.0, 0.1), device);
        Self {
            table: EmbeddingConfig::new(4096 / by, 256 / by).init(device),
            stack: Param::from_tensor(stack.require_grad()),
            layer: LinearConfig::new(256 / by, 1024 / by).init(device),
        }
    }

    /// A use of every parameter.
    fn output(&self) -> Tensor<1> {
        let weights = [self.table.weight.val(), self.layer.weight.val()];
        let bias = self.layer.bias.as_ref().expect("the layer has a bias").val();
        let sums = weights.map(|weight| weight.square().sum());
        let sums = sums.into_iter().chain([bias.square().sum()]);
        sums.fold(self.stack.val().square().sum(), |sum, more| sum + more)
    }
}

/// A layout with its name.
type Named = (&'static str, fn(&Mesh) -> Layout);

/// Owned parameters of two nodes, each of which has all of them.
const ON_NODES: &str = "owned inside nodes";

/// The divisions of a model with tables and stacks.
const DIVISIONS: [Named; 6] = [
    (ON_NODES, |mesh| {
        let world = mesh.world();
        let axes = [Axis::data("node", 2), Axis::data("gpu", world.size() / 2)];
        Layout::new(&Mesh::new(world, axes).unwrap()).owned("gpu")
    }),
    ("cut by columns", |mesh| {
        let layout = Layout::new(mesh).with_place(Place::shard("^stack", "dp", 2));
        layout.with_place(Place::shard("^table", "dp", 1))
    }),
    ("owned", |mesh| Layout::new(mesh).owned("dp")),
    ("in rows", |mesh| Layout::new(mesh).rows("dp")),
    ("cut", |mesh| {
        let layout = Layout::new(mesh).with_place(Place::shard("^stack", "dp", 0));
        layout.with_place(Place::shard("^table", "dp", 0))
    }),
    ("cut and owned", |mesh| {
        let cut = Layout::new(mesh).with_place(Place::shard("^stack", "dp", 0));
        cut.owned("dp").overlap_backward()
    }),
];

/// A division with a frozen table, as in the base of a LoRA run.
const FROZEN: Named = ("owned, with a frozen table", |mesh| {
    Layout::new(mesh).owned("dp").with_place(Place::owned("^table"))
});

/// The bytes of all ranks beyond what their reports say: of parameters after a model is divided,
/// after an evaluation that comes before the first step, and of parameters and states after a load
/// and after a step.
fn unreported(ranks: usize, (name, layout): Named, path: &Path) -> [usize; 4] {
    let together = Barrier::new(ranks);
    let before = ALLOCATOR.current_usage();
    let held = || usage_of_ranks(|| _ = together.wait()).saturating_sub(before);
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("stack").batch());
    let run = World::threads(vec![Device::default().autodiff(); ranks], |world| {
        let layout = layout(&Mesh::flat(&world)).with_muon(muon.clone());
        let mut model = Stacked::new(world.device());
        if name == FROZEN.0 {
            model.table = model.table.no_grad();
        }
        let model = layout.shard(model)?;
        // An engine may hold the last parameter until the next call.
        world.comm().barrier()?;
        let sharded = held();
        drop(values(&model.valid()));
        world.comm().barrier()?;
        let evaluated = held();
        let optim = DistMuonConfig::new().with_muon(muon.clone()).init_on(&layout, &model)?;
        optim.save(path, &model, &())?;
        let (mut model, mut optim, ()) = optim.load(path, model)?;
        world.comm().barrier()?;
        let loaded = held();
        let reports = |optim: &DistModuleOptimizer| {
            let memory = optim.memory();
            [memory.parameters.now, memory.states.now]
        };
        let after_load = reports(&optim);
        // The depths of the graph are made in the first one.
        for _ in 0..2 {
            let gradients = layout.backward(&model.output(), &model)?;
            model = optim.step(0.01, model, gradients)?;
        }
        world.comm().barrier()?;
        let stepped = held();
        let after_step = reports(&optim);
        drop((model, optim, layout));
        // The workspaces of products stay for as long as a rank's thread.
        let stepped = stepped.saturating_sub(held());
        Ok::<_, Error>(([sharded, evaluated, loaded, stepped], [after_load, after_step]))
    });
    let run = run.unwrap();
    let all = |when: usize, kind: usize| {
        run.iter().map(|(_, reported)| reported[when][kind]).sum::<usize>()
    };
    let [sharded, evaluated, loaded, stepped] = run[0].0;
    let parameters = all(0, 0);
    let [sharded, evaluated] = [sharded, evaluated].map(|held| held.saturating_sub(parameters));
    let loaded = loaded.saturating_sub(parameters + all(0, 1));
    [sharded, evaluated, loaded, stepped.saturating_sub(all(1, 0) + all(1, 1))]
}

#[test]
fn parts_of_tables_and_stacks_do_not_keep_the_whole_in_memory() {
    alone();
    if !is_on_host() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    for division in DIVISIONS.into_iter().chain([FROZEN]) {
        unreported(2, division, &path); // libraries
        let (name, _) = division;
        for ranks in [2, 4] {
            let [sharded, evaluated, loaded, stepped] = unreported(ranks, division, &path);
            println!(
                "{name}, {ranks} ranks: {sharded} after shard, {evaluated} after an evaluation, \
                 {loaded} after load, {stepped} after a step"
            );
            // Reports count trained parameters.
            let frozen = if name == FROZEN.0 { 4 << 20 } else { 0 };
            let all = [(sharded, "shard"), (evaluated, "an evaluation"), (loaded, "load")];
            for (held, when) in all.into_iter().chain([(stepped, "a step")]) {
                assert!(held >= frozen, "{name}, {ranks} ranks, after {when}: {held}");
                assert!(held - frozen <= SCRATCH, "{name}, {ranks} ranks, after {when}: {held}");
            }
        }
    }
}

/// Many stacks and tables of 1 MB each, not initialised yet, as in a new model of Burn's layers.
#[derive(Module, Debug)]
struct Many {
    tables: Vec<Embedding>,
    stacks: Vec<Param<Tensor<3>>>,
}

impl Many {
    const EACH: usize = 16;
    const BYTES: usize = 8 * 128 * 256 * 4;

    fn new(device: &Device) -> Self {
        let stack = |_| {
            let values = |device: &Device, is_trained: bool| {
                let values = Tensor::<3>::ones([8, 128, 256], (device, DType::F32));
                if is_trained { values.require_grad() } else { values }
            };
            let shape = [8, 128, 256].into();
            Param::uninitialized(ParamId::new(), values, device.clone(), true, shape)
        };
        let table = |_| EmbeddingConfig::new(1024, 256).init(device);
        Self {
            tables: (0..Self::EACH).map(table).collect(),
            stacks: (0..Self::EACH).map(stack).collect(),
        }
    }
}

/// The largest number of bytes of all ranks together while a model is divided, and while it is
/// loaded, in addition to the parts and the states that they have after it.
fn extra_to_divide_and_load(
    ranks: usize,
    layout: fn(&Mesh) -> Layout,
    path: &Path,
    is_initialised: bool,
) -> [usize; 2] {
    let together = Barrier::new(ranks);
    let reset = |world: &World| {
        together.wait();
        if world.is_main() {
            ALLOCATOR.reset_peak_usage();
        }
        together.wait();
    };
    let extra = || {
        together.wait();
        let extra = ALLOCATOR.peak_usage() - ALLOCATOR.current_usage();
        together.wait();
        extra
    };
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("stacks").batch());
    let run = World::threads(vec![Device::default().autodiff(); ranks], |world| {
        let layout = layout(&Mesh::flat(&world)).with_muon(muon.clone());
        let model = Many::new(world.device());
        if is_initialised {
            model.stacks.iter().for_each(|stack| drop(stack.val()));
            model.tables.iter().for_each(|table| drop(table.weight.val()));
        }
        reset(&world);
        let model = layout.shard(model)?;
        world.comm().barrier()?;
        let dividing = extra();
        let config = DistMuonConfig::new().with_muon(muon.clone()).with_bucket_mb(Some(1.0));
        let optim = config.init_on(&layout, &model)?;
        optim.save(path, &model, &())?;
        reset(&world);
        let (model, optim, ()) = optim.load(path, model)?;
        world.comm().barrier()?;
        let loading = extra();
        drop((model, optim));
        Ok::<_, Error>([dividing, loading])
    });
    run.unwrap()[0]
}

#[test]
fn tables_and_stacks_are_divided_and_loaded_one_by_one() {
    alone();
    if !is_on_host() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    for (name, layout) in DIVISIONS {
        extra_to_divide_and_load(2, layout, &path, false); // libraries
        for ranks in [2, 4] {
            let extra = extra_to_divide_and_load(ranks, layout, &path, false);
            let [dividing, loading] = extra.map(|bytes| bytes as f64 / Many::BYTES as f64);
            println!(
                "{name}, {ranks} ranks: {dividing:.2} parameters to divide, {loading:.2} to load"
            );
            // On every rank the whole of a parameter, what it is made of or sent as, and its parts;
            // of the file one more, and a bucket. The model has 32.
            let most = (3 * ranks + 2) as f64;
            assert!(dividing <= most && loading <= most, "{name}, {ranks} ranks");
            // That the whole model would be seen: every rank has it at the begin. Two ranks that
            // are nodes keep it.
            if (name, ranks) == (ON_NODES, 2) {
                continue;
            }
            let [dividing, _] = extra_to_divide_and_load(ranks, layout, &path, true);
            assert!(dividing > Many::EACH * Many::BYTES, "{dividing}");
        }
    }
}

/// The bytes of an average of a divided model's weights, on all ranks: of a clone of the model, or
/// of one in float32.
fn of_an_average(ranks: usize, layout: fn(&Mesh) -> Layout, in_float32: bool) -> usize {
    let together = Barrier::new(ranks);
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("stack").batch());
    let run = World::threads(vec![Device::default().autodiff(); ranks], |world| {
        let layout = layout(&Mesh::flat(&world)).with_muon(muon.clone());
        let model = layout.shard(Stacked::new(world.device()))?;
        world.comm().barrier()?;
        let before = usage_of_ranks(|| _ = together.wait());
        let (mut average, mut exact) = (model.clone(), None);
        if in_float32 {
            let average = exact.insert(WeightAverage::new(&layout, &model));
            (0..3).try_for_each(|_| average.add(&model, 0.9))?;
        } else {
            for _ in 0..3 {
                average = layout.average(average, &model, 0.9)?;
            }
            average = layout.map_elements(average, |_, values| values.clamp(-0.5, 0.5));
        }
        world.comm().barrier()?;
        let after = usage_of_ranks(|| _ = together.wait());
        drop((average, exact, model));
        Ok::<_, Error>(after.saturating_sub(before))
    });
    run.unwrap()[0]
}

#[test]
fn an_average_of_a_divided_model_takes_the_memory_of_its_parts() {
    alone();
    if !is_on_host() {
        return;
    }
    let kinds = DIVISIONS.into_iter().flat_map(|division| [(division, false), (division, true)]);
    for ((name, layout), in_float32) in kinds {
        of_an_average(2, layout, in_float32); // libraries
        for ranks in [2, 4] {
            let average = of_an_average(ranks, layout, in_float32);
            println!("{name}, {ranks} ranks, in float32: {in_float32}: {average} bytes");
            // A table, a stack, and a layer that cuts leave on every rank.
            let replicas = if name == ON_NODES { 2 } else { 1 };
            let most = replicas * (8 << 20) + ranks * (1 << 20) + SCRATCH;
            assert!((4 << 20..=most).contains(&average), "{name}, {ranks} ranks: {average}");
        }
    }
}

/// The numbers that a rank passes to collectives, and the bytes that it allocates, in a lookup of
/// rows on many ranks and its backward pass, in an exchange of a row for every rank, and in a mean.
fn of_an_exchange(ranks: usize) -> [usize; 2] {
    let device = Device::default().autodiff();
    let engine = Simulated::new(ranks);
    let group = Communicator::from(engine.clone());
    let mut layer = RowEmbedding::new(EmbeddingConfig::new(ranks, 8).init(&device), &group);
    layer.embedding = EmbeddingConfig::new(1, 8).init(&device);
    let tokens = Tensor::<2, Int>::from_data([[0, 1, ranks as i32 - 1]], &device);
    let rows = Tensor::<2>::ones([ranks, 1], &device).require_grad();
    let before = (engine.numbers(), ALLOCATOR.current_usage());
    ALLOCATOR.reset_peak_usage();
    drop(layer.forward(tokens).sum().backward());
    let counts = group.pair_counts(&vec![1; ranks], &device).unwrap();
    drop(exchange(rows, &counts, &group).sum().backward());
    let world = World::new(engine.clone(), device);
    world.mean(1.0).unwrap();
    [engine.numbers() - before.0, ALLOCATOR.peak_usage() - before.1]
}

#[test]
fn an_exchange_of_rows_is_linear_in_the_ranks() {
    alone();
    if !is_on_host() {
        return;
    }
    _ = of_an_exchange(8);
    let counted = [8, 64, 512, 4096].map(|ranks| (ranks, of_an_exchange(ranks)));
    for (ranks, [numbers, bytes]) in counted {
        assert!(numbers <= 40 * ranks + 256, "{ranks} ranks: {numbers} numbers");
        assert!(bytes <= 512 * ranks + (64 << 10), "{ranks} ranks: {bytes} bytes");
    }
}

/// A rank of many, after a model was divided and one step was taken.
struct OfManyRanks {
    /// The numbers that it has passed to collectives.
    numbers: usize,
    /// Bytes of the division, beyond its parameters and states, and at the peak.
    held: usize,
    peak: usize,
    /// Seconds of the division, and of a pass with its step.
    times: [f64; 2],
}

impl OfManyRanks {
    fn new(ranks: usize, layout: fn(&Mesh) -> Layout) -> Self {
        let device = Device::default().autodiff().gradient_checkpointing();
        let engine = Simulated::new(ranks);
        let world = World::new(engine.clone(), device.clone());
        let muon = MuonConfig::new().with_rule(RoutingRule::muon("stack").batch());
        let (before, start) = (ALLOCATOR.current_usage(), Instant::now());
        ALLOCATOR.reset_peak_usage();
        let layout = layout(&Mesh::flat(&world)).with_small_elements(8).with_muon(muon.clone());
        let model = layout.shard(Narrow::new(&device)).unwrap();
        let config = DistMuonConfig::new().with_muon(muon).with_check_every(0);
        let mut optim = config.init_on(&layout, &model).unwrap();
        let dividing = start.elapsed().as_secs_f64();
        let tokens = Tensor::<2, Int>::from_data([[0, 1, 2]], &device);
        let gradients = layout.backward(&model.loss(tokens), &model).unwrap();
        let model = optim.step(0.01, model, gradients).unwrap();
        let times = [dividing, start.elapsed().as_secs_f64() - dividing];
        let peak = ALLOCATOR.peak_usage() - before;
        let memory = optim.memory();
        let held = ALLOCATOR.current_usage() - before;
        let held = held.saturating_sub(memory.parameters.now + memory.states.now);
        drop(model);
        Self { numbers: engine.numbers(), held, peak, times }
    }
}

/// A table, a stack and layers with fewer rows than there may be ranks.
#[derive(Module, Debug)]
struct Narrow {
    table: Embedding,
    stack: Param<Tensor<3>>,
    layers: Vec<Linear>,
}

impl Narrow {
    const LAYERS: usize = 8;

    fn new(device: &Device) -> Self {
        let linear = |_| LinearConfig::new(64, 64).with_bias(false).init(device);
        let stack = Tensor::<3>::full([4, 64, 64], 0.01, (device, DType::F32));
        Self {
            table: EmbeddingConfig::new(1 << 14, 64).init(device),
            stack: Param::from_tensor(stack.require_grad()),
            layers: (0..Self::LAYERS).map(linear).collect(),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.table.forward(tokens);
        let x = x.matmul(self.stack.val().mean_dim(0));
        self.layers.iter().fold(x, |x, layer| layer.forward(x)).square().mean()
    }
}

#[test]
fn a_division_and_a_step_are_linear_in_the_ranks() {
    alone();
    if !is_on_host() {
        return;
    }
    let layouts: [Named; 5] = [
        ("replicated", Layout::new),
        ("reduced", |mesh| Layout::new(mesh).overlap_backward()),
        ("owned", |mesh| Layout::new(mesh).owned("dp")),
        ("in rows", |mesh| Layout::new(mesh).rows("dp")),
        ("a table in slices", |mesh| Layout::new(mesh).with_place(Place::shard("^table", "dp", 0))),
    ];
    for (name, layout) in layouts {
        OfManyRanks::new(8, layout); // libraries
        // Other work on the machine may disturb one of them.
        let least_times = |ranks: usize, first: [f64; 2]| {
            (0..2)
                .map(|_| OfManyRanks::new(ranks, layout).times)
                .fold(first, |least, times| [least[0].min(times[0]), least[1].min(times[1])])
        };
        let few = OfManyRanks::new(64, layout);
        let mut before = least_times(64, few.times);
        for ranks in [512, 4096] {
            let many = OfManyRanks::new(ranks, layout);
            let OfManyRanks { numbers, held, peak, times } = many;
            let times = least_times(ranks, times);
            // As in `host_times_of_calls_are_linear_in_the_ranks`.
            for (seconds, on_an_eighth) in times.into_iter().zip(before) {
                let most = 24.0 * on_an_eighth;
                assert!(seconds <= most, "{name}, {ranks} ranks: {seconds} s, {on_an_eighth}");
            }
            before = times;
            let [dividing, stepping] = times.map(|seconds| seconds * 1e3);
            println!(
                "{name}, {ranks} ranks: {numbers} numbers, {held} bytes held, {peak} at the peak, \
                 {dividing:.0} ms to divide, {stepping:.0} ms to step"
            );
            // Counts of calls, and of every parameter in rows or slices those of every rank.
            let more = ranks - 64;
            let each = match name {
                "in rows" => 4096,
                "a table in slices" => 1024,
                _ => 512,
            };
            assert!(numbers <= few.numbers + 64 * more, "{name}: {} numbers before", few.numbers);
            assert!(held <= few.held + each * more, "{name}: {} bytes before", few.held);
            assert!(peak <= few.peak + each * more + SCRATCH, "{name}: {} at the peak", few.peak);
        }
    }
}

/// The host's time of calls on one rank of many, the least of 51 in microseconds: a lookup of rows
/// and its backward pass, an exchange of a row for every rank and back, a mean, and a step of a
/// model of 16 matrices of 32 x 32. Other work on the machine rarely disturbs all 51.
fn host_times(ranks: usize) -> [f64; 4] {
    let device = Device::default().autodiff();
    let least = |call: &mut dyn FnMut()| {
        let mut time = |_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        };
        (0..51).map(&mut time).fold(f64::INFINITY, f64::min)
    };
    let group = Communicator::from(Simulated::new(ranks));
    let mut layer = RowEmbedding::new(EmbeddingConfig::new(ranks, 8).init(&device), &group);
    layer.embedding = EmbeddingConfig::new(1, 8).init(&device);
    let tokens = Tensor::<2, Int>::from_data([[0, 1, ranks as i32 - 1]], &device);
    let lookup = least(&mut || drop(layer.forward(tokens.clone()).sum().backward()));
    let rows = Tensor::<2>::ones([ranks, 1], &device).require_grad();
    let exchanged = least(&mut || {
        let counts = group.pair_counts(&vec![1; ranks], &device).unwrap();
        drop(exchange(rows.clone(), &counts, &group).sum().backward());
    });
    let world = World::new(Simulated::new(ranks), device.clone());
    let mean = least(&mut || _ = world.mean(1.0).unwrap());
    let mut net = Some(Layers::square(16, 32, &device));
    let mut optim = DistMuonConfig::new().init(&world, net.as_ref().unwrap()).unwrap();
    let step = least(&mut || {
        let model = net.take().unwrap();
        let loss = model.layers.iter().map(|layer| layer.weight.val().square().mean());
        let loss = loss.reduce(|a, b| a + b).unwrap();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        net = Some(optim.step(0.01, model, gradients).unwrap());
    });
    [lookup, exchanged, mean, step]
}

/// A table of N x N numbers takes 64 times as long on eight times the ranks, and what is linear at
/// most 8 times.
#[test]
fn host_times_of_calls_are_linear_in_the_ranks() {
    alone();
    println!("| ranks | lookup of rows | exchange of rows | mean | step |");
    println!("|---|---|---|---|---|");
    let [_, _, fewer, more] = [8, 64, 512, 4096].map(|ranks| {
        let times = host_times(ranks);
        let cells = times.map(|time| format!("{time:.0}"));
        println!("| {ranks} | {} |", cells.join(" | "));
        times
    });
    for (call, (fewer, more)) in fewer.into_iter().zip(more).enumerate() {
        assert!(more <= 24.0 * fewer, "call {call}: {more} us, and {fewer} on an eighth");
    }
}

/// The bytes by which 10,000 evaluations of a divided model grow the memory of two ranks.
fn growth_of_evaluations(layout: fn(&Mesh) -> Layout) -> usize {
    let together = Barrier::new(2);
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("stack").batch());
    let run = World::threads(vec![Device::default().autodiff(); 2], |world| {
        let layout = layout(&Mesh::flat(&world)).with_muon(muon.clone()).with_small_elements(1);
        let model = layout.shard(Stacked::smaller(32, world.device()))?;
        let evaluated = model.valid();
        let evaluate = |passes: usize| {
            (0..passes).for_each(|_| drop(evaluated.output()));
            usage_of_ranks(|| _ = together.wait())
        };
        // Calls are kept one by one until there are 16,384, here by four of each pass.
        let before = evaluate(6_000);
        let after = evaluate(10_000);
        // A rank does not leave while another one gathers.
        world.comm().barrier()?;
        Ok::<_, Error>(after.saturating_sub(before))
    });
    run.unwrap()[0]
}

#[test]
fn evaluations_of_a_divided_model_do_not_grow_memory() {
    alone();
    if !is_on_host() {
        return;
    }
    for (name, layout) in DIVISIONS {
        let start = Instant::now();
        let growth = growth_of_evaluations(layout);
        println!("{name}: {growth} bytes in 10000 evaluations, {:.1?}", start.elapsed());
        assert!(growth <= SCRATCH / 16, "{name}: {growth}");
    }
}

/// The bytes of two ranks in passes without a step, and the bytes in their reports of gathered
/// parameters and gradients: after a micro-batch, after a second one without a layer on one rank,
/// before the backward pass of such a batch, and after all of it is dropped.
#[test]
fn passes_hold_what_their_reports_say() {
    const LAYERS: usize = 4;
    alone();
    if !is_on_host() {
        return;
    }
    let together = Barrier::new(2);
    let layouts: [Named; 3] = [
        ("owned", |mesh| Layout::new(mesh).owned("dp")),
        ("in rows", |mesh| Layout::new(mesh).rows("dp")),
        ("kept", |mesh| Layout::new(mesh).owned("dp").with_keep(Keep::Weights)),
    ];
    for (name, layout) in layouts {
        let device = Device::default().autodiff().gradient_checkpointing();
        let run = World::threads(vec![device; 2], |world| {
            let layout = layout(&Mesh::flat(&world)).with_ahead_mb(0.0).allow_unused();
            let model = layout.shard(Layers::square(LAYERS, 512, world.device()))?;
            let optim = DistMuonConfig::new().init_on(&layout, &model)?;
            // Rank 1 leaves the third layer out.
            let loss = |leaves_out: bool| {
                let input = Tensor::<2>::ones([1, 512], world.device());
                let layers = model.layers.iter().enumerate();
                let output = layers.fold(input, |x, (index, layer)| {
                    if leaves_out && index == 2 && world.rank() == 1 {
                        layout.unused(layer);
                        return x;
                    }
                    layer.forward(x)
                });
                output.square().mean()
            };
            // Libraries, and the depths of the graph.
            layout.backward(&loss(true), &model)?;
            let before = usage_of_ranks(|| _ = together.wait());
            let states = |when| {
                let memory = optim.memory();
                let reported = memory.gathered.now + memory.in_flight.now;
                (when, usage_of_ranks(|| _ = together.wait()).saturating_sub(before), reported)
            };
            layout.accumulate(&loss(false), &model)?;
            let first = states("a micro-batch");
            layout.accumulate(&loss(true), &model)?;
            let second = states("a micro-batch without a layer");
            let output = loss(true);
            let forward = states("a forward pass");
            drop(output);
            layout.discard()?;
            Ok::<_, Error>([first, second, forward, states("a discard")])
        });
        let [of_rank_0, of_rank_1] = <[_; 2]>::try_from(run.unwrap()).expect("two ranks");
        for ((when, held, reported), (_, _, of_other)) in of_rank_0.into_iter().zip(of_rank_1) {
            let reported = reported + of_other;
            println!("{name}, after {when}: {held} bytes, {reported} reported");
            // Weights that the graph keeps are in no report.
            let is_kept = name == "kept" && when == "a forward pass";
            let kept = if is_kept { 2 * LAYERS * LAYER } else { 0 };
            assert!(held <= reported + kept + SCRATCH, "{name}, after {when}: {held}");
            assert!(held + SCRATCH >= reported, "{name}, after {when}: {held} of {reported}");
        }
    }
}

#[test]
fn a_parameter_that_can_not_be_gathered_is_an_error_on_all_ranks() {
    alone();
    let device = Device::default().autodiff().gradient_checkpointing();
    let Some(lost) = beyond_memory(64, 64) else { return };
    let lost = lost.reshape([-1]);
    let errors = Mutex::new(vec![]);
    let run = World::threads(vec![device; 2], |world| {
        let (rank, lost) = (world.rank(), lost.clone());
        let world = replaced(&world, move |collective, result| match (rank, collective) {
            (1, "all_gather") => lost.clone(),
            _ => result,
        });
        let layout = Layout::new(&Mesh::flat(&world)).owned("dp");
        let model = layout.shard(Layers::square(4, 64, world.device()))?;
        let input = Tensor::<2>::ones([4, 64], world.device());
        let output = model.layers.iter().fold(input, |x, layer| layer.forward(x));
        let outcome = layout.backward(&output.mean(), &model);
        let error = outcome.expect_err("the weights were not gathered");
        errors.lock().unwrap().push((rank, error.clone()));
        Err::<(), Error>(error)
    });
    drop(run);
    let errors = errors.into_inner().unwrap();
    assert_eq!(errors.len(), 2, "every rank has trained");
    for (rank, error) in errors {
        match error {
            Error::NotComputed { parameter, .. } if rank == 1 => {
                assert_eq!(parameter, "layers.0.weight");
            }
            Error::PeerFailed { rank: 1, cause } if rank == 0 => {
                assert!(cause.contains("layers.0.weight"), "{cause}");
            }
            other => panic!("rank {rank}: {other}"),
        }
    }
}

/// Bytes that a chain of products with weights that are made again holds after its forward pass,
/// and at most in its backward pass.
fn extra_of_links(order: Option<&GraphOrder>) -> [usize; 2] {
    let device = Device::default().autodiff();
    let leaves: Vec<_> = (0..4).map(|_| Tensor::<1>::ones([1], &device).require_grad()).collect();
    let input = Tensor::<2>::ones([4, 512], &device);
    let before = ALLOCATOR.current_usage();
    let weight = |leaf: &Tensor<1>| {
        let make =
            |part: Tensor<1>| Tensor::<1>::ones([512 * 512], (&part.device(), DType::F32)) * part;
        let link = Link::new(|gradient| gradient.sum()).made_again(make);
        let link = match order {
            Some(order) => link.at(order.next(leaf)),
            None => link,
        };
        let whole = make(leaf.clone().inner()).reshape([512, 512]);
        link.attach::<1, 2>(leaf.clone(), whole)
    };
    let output = leaves.iter().fold(input, |x, leaf| x.matmul(weight(leaf)) / 512.0).sum();
    let kept = ALLOCATOR.current_usage() - before;
    ALLOCATOR.reset_peak_usage();
    let gradients = output.backward();
    let peak = ALLOCATOR.peak_usage() - before;
    assert!(leaves.iter().all(|leaf| leaf.grad(&gradients).is_some()));
    [kept, peak]
}

#[test]
fn a_backward_pass_of_links_holds_one_weight_and_one_gradient() {
    alone();
    if !is_on_host() {
        return;
    }
    let order = GraphOrder::default();
    extra_of_links(Some(&order)); // libraries, and the depths of the order
    order.reset();
    let [kept, peak] = extra_of_links(Some(&order));
    assert!(kept <= SCRATCH / 4 && peak <= 2 * LAYER + SCRATCH / 4, "{kept}, {peak}");
    // Without an order, all gradients wait for the end.
    let [_, at_the_end] = extra_of_links(None);
    assert!(at_the_end >= 4 * LAYER, "{at_the_end}");
}

/// Matrices of a model whose memory is forecast, two of which fill a bucket.
const FORECAST: usize = 128;

type Lay = fn(&World) -> Result<Layout, Error>;

/// A run whose memory is forecast.
struct ForecastCase {
    name: &'static str,
    dtype: DType,
    config: DistMuonConfig,
    /// Gradients are those of backward passes.
    passes: bool,
    lay: Lay,
}

impl ForecastCase {
    fn layout(&self, world: &World) -> Result<Layout, Error> {
        Ok((self.lay)(world)?.with_muon(self.config.muon.clone()))
    }

    fn model(&self, count: usize, columns: usize, device: &Device) -> Equal {
        let zeros = |_| {
            Param::from_tensor(Tensor::zeros([16, columns], (device, self.dtype)).require_grad())
        };
        Equal { matrices: (0..count).map(zeros).collect() }
    }

    /// The bytes of every rank.
    fn forecast(&self, columns: usize, ranks: usize) -> Vec<RankMemory> {
        let model = self.model(FORECAST, columns, &forecast_device());
        let forecast = self.config.forecast_memory(ranks, 1, &model, |world| self.layout(world));
        forecast.unwrap().ranks().to_vec()
    }

    /// The bytes between steps and at the peak of a step, as the allocator of this process counts
    /// them. `together` waits for all ranks.
    fn counted(
        &self,
        world: &World,
        columns: usize,
        together: impl Fn(),
    ) -> Result<[usize; 2], Error> {
        // Products allocate scratch memory once per thread.
        let layout = self.layout(world)?;
        let small = layout.shard(self.model(2 * world.size(), columns, world.device()))?;
        let mut optim = self.config.init_on(&layout, &small)?;
        drop(step_of(&layout, small, &mut optim, self.passes)?);
        drop((optim, layout));
        world.comm().barrier()?;
        let before = usage_of_ranks(&together);
        let layout = self.layout(world)?;
        let model = layout.shard(self.model(FORECAST, columns, world.device()))?;
        let mut optim = self.config.init_on(&layout, &model)?;
        // Threads share the values until the first step, and the first pass has no order of uses.
        let model = step_of(&layout, model, &mut optim, self.passes)?;
        world.comm().barrier()?;
        let between = usage_of_ranks(&together).saturating_sub(before);
        ALLOCATOR.reset_peak_usage();
        usage_of_ranks(&together);
        let model = step_of(&layout, model, &mut optim, self.passes)?;
        together();
        let peak = ALLOCATOR.peak_usage().saturating_sub(before);
        together();
        drop(model);
        Ok([between, peak])
    }

    /// Bytes of the workspace of an update, which a forecast leaves out, for an element of a
    /// bucket.
    fn workspace(&self, updating: usize) -> usize {
        match () {
            // Random rounding has the largest: the numbers of a bucket, of which all ranks together
            // have one. Whether they have them at the same time, and at the peak, is chance.
            () if self.name.starts_with("lean") => 14,
            // Codes of 8 bits have the second largest: the values of a bucket in float32.
            () if self.name.starts_with("8 bits") => 16,
            // The direction of a matrix, half a bucket, at each rank that updates one.
            () if self.name == "in slices" => DType::F32.size() / 2 * updating,
            () => 0,
        }
    }
}

/// Counts a model whose tensors have 8192 columns, without the names, routes and functions of the
/// host, which has them for as many small parameters, too. `of_small` is their forecast.
fn counted_in_tensors(of_small: usize, counted: impl Fn(usize) -> [usize; 2]) -> [f64; 2] {
    let of_host = counted(64)[0].saturating_sub(of_small);
    counted(8192).map(|bytes| bytes.saturating_sub(of_host) as f64)
}

fn forecast_device() -> Device {
    Device::default().autodiff().gradient_checkpointing()
}

/// A step on gradients of a backward pass, or on given ones.
fn step_of(
    layout: &Layout,
    model: Equal,
    optim: &mut DistModuleOptimizer,
    passes: bool,
) -> Result<Equal, Error> {
    let grads = match passes {
        true => {
            let outputs = model.matrices.iter().map(|matrix| {
                let matrix = matrix.val();
                Tensor::<2>::ones([1, 16], (&matrix.device(), matrix.dtype())).matmul(matrix).mean()
            });
            layout.backward(&outputs.reduce(|sum, output| sum + output).unwrap(), &model)?
        }
        false => {
            let mut grads = GradientsParams::new();
            for matrix in &model.matrices {
                grads.register(matrix.id, matrix.val().inner().ones_like());
            }
            grads
        }
    };
    optim.step(1e-3, model, grads)
}

/// Elements of a bucket: two matrices.
const OF_BUCKET: usize = 2 * 16 * 8192;

fn forecast_cases() -> Vec<ForecastCase> {
    let replicated: Lay = |world| Ok(Layout::new(&Mesh::flat(world)));
    let reduced: Lay =
        |world| Ok(Layout::new(&Mesh::flat(world)).overlap_backward().with_in_flight_mb(0.0));
    let rounded: Lay = |world| {
        let layout = Layout::new(&Mesh::flat(world)).overlap_backward().round_means();
        Ok(layout.with_in_flight_mb(0.0))
    };
    let owned: Lay = |world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        Ok(layout.with_ahead_mb(0.0).with_in_flight_mb(0.0))
    };
    let rows: Lay = |world| {
        let layout = Layout::new(&Mesh::flat(world)).rows("dp");
        Ok(layout.with_ahead_mb(0.0).with_in_flight_mb(0.0))
    };
    // Without replicas, since ranks that are threads would share the values that they gather.
    let sliced: Lay = |world| {
        let mesh = Mesh::new(world, [Axis::model("tp", world.size())])?;
        Ok(Layout::new(&mesh).with_place(Place::shard("matrices", "tp", 1)))
    };
    let config = |muon: MuonConfig, dtype: DType| {
        let bucket = OF_BUCKET * dtype.size();
        let short = NewtonSchulzConfig::new().with_coefficients(Coefficients::KellerJordan);
        let muon = muon.with_newton_schulz(short.with_steps(Some(1)));
        DistMuonConfig::new()
            .with_muon(muon)
            .with_bucket_mb(Some(bucket as f64 / 1e6))
            .with_in_flight(1)
    };
    let muon = || MuonConfig::new().with_rule(RoutingRule::muon(""));
    let adamw = MuonConfig::new().with_rule(RoutingRule::adamw(""));
    let stochastic = muon().with_master_weights(MasterWeights::Stochastic { seed: 1 });
    let lean = stochastic.with_state_dtype(StateDtype::BFloat16);
    let coded = muon().with_state_dtype(StateDtype::Int8);
    let lamb = MuonConfig::new()
        .with_optimizer("lamb", LambConfig::new().build())
        .with_rule(RoutingRule::custom("", "lamb"));
    let (full, half) = (DType::F32, DType::BF16);
    let cases = [
        ("Muon", full, muon(), false, replicated),
        ("AdamW", full, adamw, false, replicated),
        ("bfloat16", half, muon(), false, replicated),
        ("reduced in passes", full, muon(), true, reduced),
        ("lean, reduced in passes", half, lean.clone(), true, reduced),
        ("lean, with rounded means", half, lean.clone(), true, rounded),
        ("lean, owned", half, lean, true, owned),
        ("in slices", full, muon(), false, sliced),
        ("owned", full, muon(), true, owned),
        ("in rows", full, muon(), true, rows),
        ("8 bits", full, coded.clone(), false, replicated),
        ("8 bits, owned", full, coded, true, owned),
        ("LAMB", full, lamb.clone(), false, replicated),
        ("LAMB, owned", full, lamb, true, owned),
    ];
    let case = |(name, dtype, muon, passes, lay)| ForecastCase {
        name,
        dtype,
        config: config(muon, dtype),
        passes,
        lay,
    };
    cases.into_iter().map(case).collect()
}

#[test]
fn forecasts_are_what_the_allocator_counts() {
    alone();
    if !is_on_host() {
        return;
    }
    let on_threads = |case: &ForecastCase, ranks: usize, columns: usize| {
        let barrier = Barrier::new(ranks);
        let together = || _ = barrier.wait();
        let devices = vec![forecast_device(); ranks];
        World::threads(devices, |world| case.counted(&world, columns, together)).unwrap()[0]
    };
    let cases = forecast_cases();
    // Libraries allocate the memory that they keep at first use.
    on_threads(&cases[0], 1, 8192);
    for ranks in [1, 2, 4, 8] {
        for case in &cases {
            let of_all = |columns: usize, bytes: fn(&RankMemory) -> usize| -> usize {
                case.forecast(columns, ranks).iter().map(bytes).sum()
            };
            let of_small = of_all(64, RankMemory::between_steps);
            let [held, most] =
                counted_in_tensors(of_small, |columns| on_threads(case, ranks, columns));
            let between = of_all(8192, RankMemory::between_steps);
            let [peak, messages] = [of_all(8192, |of| of.peak), of_all(8192, |of| of.messages)];
            let name = case.name;
            let text = format!("{name}, {ranks} ranks: {held} between steps, {most} at the peak");
            println!("{text}; forecast: {between}, {peak} with {messages} in messages");
            assert!((held / between as f64 - 1.0).abs() < 0.03, "{text}: {between}");
            // Ranks have their most messages at different times, and what a thread receives takes
            // no memory.
            let least = (peak - messages) as f64;
            let largest = 1.03 * (peak + case.workspace(ranks) * OF_BUCKET) as f64;
            assert!(most > 0.97 * least && most < largest, "{text}: {peak}");
        }
    }
}

#[cfg(feature = "mpi")]
#[test]
fn forecasts_are_what_processes_count() {
    let name = "forecasts_are_what_processes_count";
    in_processes(name, &[1, 2, 4, 8], compare_forecasts_with_a_process);
}

/// Compares the forecast of this rank with what its process allocates.
#[cfg(feature = "mpi")]
fn compare_forecasts_with_a_process() {
    let world = World::from_env().unwrap();
    let world = World::new(world.communicator(), forecast_device());
    let (rank, ranks) = (world.rank(), world.size());
    let counted = |case: &ForecastCase, columns: usize| {
        case.counted(&world, columns, || world.comm().barrier().unwrap()).unwrap()
    };
    let cases = forecast_cases();
    // Libraries allocate the memory that they keep at first use.
    counted(&cases[0], 8192);
    for case in &cases {
        let of_small = case.forecast(64, ranks)[rank].between_steps();
        let [held, most] = counted_in_tensors(of_small, |columns| counted(case, columns));
        let forecast = case.forecast(8192, ranks)[rank];
        let [between, peak] = [forecast.between_steps(), forecast.peak];
        let text = format!("{}, rank {rank} of {ranks}: {held} between steps, {most}", case.name);
        println!("{text} at the peak; forecast: {between}, {peak}");
        assert!((held / between as f64 - 1.0).abs() < 0.03, "{text}: {between}");
        // The direction of a matrix and two factors of its iteration, and, with random rounding,
        // the numbers of a bucket.
        let workspace = if case.name.starts_with("lean") { 14 } else { 6 } * OF_BUCKET;
        let (least, largest) = (0.97 * peak as f64, 1.03 * (peak + workspace) as f64);
        assert!((least..largest).contains(&most), "{text} at the peak: {peak}");
    }
    world.comm().barrier().unwrap();
}

#[test]
fn a_forecast_allocates_nothing_of_the_models_size() {
    alone();
    if !is_on_host() {
        return;
    }
    let device = Device::default().autodiff();
    // 16 GB, not initialised.
    let model = Layers::square(64, 8192, &device);
    let owned = |world: &World| Ok::<_, Error>(Layout::new(&Mesh::flat(world)).owned("dp"));
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let forecast = DistMuonConfig::new().forecast_memory(64, 8, &model, owned).unwrap();
    let extra = ALLOCATOR.peak_usage() - before;
    assert!(forecast.largest().1.peak > 1 << 30, "{forecast}");
    assert!(extra <= 32 << 20, "{extra}");
}

/// The variable that is set in processes that are ranks.
#[cfg(feature = "mpi")]
const RANK: &str = "DISTMUON_TEST_RANK";

#[cfg(feature = "mpi")]
#[test]
fn a_process_holds_its_share_of_owned_parameters_and_states() {
    let name = "a_process_holds_its_share_of_owned_parameters_and_states";
    in_processes(name, &[2], hold_the_share_of_a_process);
}

/// Runs a test in several numbers of processes that are ranks, in which it must pass. In such a
/// process, it is what a rank does.
#[cfg(feature = "mpi")]
fn in_processes(test: &str, numbers: &[usize], of_rank: fn()) {
    alone();
    if std::env::var_os(RANK).is_some() {
        return of_rank();
    }
    if !is_on_host() || !mpirun::is_there() {
        return;
    }
    numbers.iter().for_each(|ranks| run_in_processes(test, *ranks));
}

#[cfg(feature = "mpi")]
fn run_in_processes(test: &str, ranks: usize) {
    let mut mpirun = mpirun::mpirun(ranks);
    // Not the current executable, which is the loader's where that was called with a program.
    let program = std::env::args_os().next().expect("a program has a name");
    mpirun.arg(program).env(RANK, "1");
    mpirun.args([test, "--exact", "--show-output"]);
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let passed = text.matches("1 passed").count();
    println!("{text}");
    assert!(output.status.success() && passed == ranks, "{text}{errors}");
}

#[cfg(feature = "mpi")]
fn hold_the_share_of_a_process() {
    let world = World::from_env().unwrap();
    let device = world.device().clone().gradient_checkpointing();
    let world = World::new(world.communicator(), device);
    let share = OWNED_LAYERS * LAYER / 2;
    // Libraries allocate the memory that they keep at first use.
    held_and_kept(&world, Keep::Nothing, false);
    for (keep, in_rows) in [(Keep::Nothing, false), (Keep::Weights, false), (Keep::Nothing, true)] {
        let (held, kept) = held_and_kept(&world, keep, in_rows);
        // This rank's parameters, and a momentum for each.
        assert!((2 * share..2 * share + share / 5).contains(&held), "{held} of {share}");
        match keep {
            Keep::Nothing => assert!(kept <= SCRATCH, "{kept}"),
            // The weights of the other rank; this rank's are its parts.
            _ => assert!(kept >= share - 2 * LAYER, "{kept}"),
        }
    }
    hold_rows_of_one_matrix(&world);
    for (name, layout) in DIVISIONS {
        hold_parts_of_tables_and_stacks(&world, name, layout);
    }
    world.comm().barrier().unwrap();
}

/// The parts of a table and of a stack do not keep the whole.
#[cfg(feature = "mpi")]
fn hold_parts_of_tables_and_stacks(world: &World, name: &str, layout: fn(&Mesh) -> Layout) {
    let before = ALLOCATOR.current_usage();
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("stack").batch());
    let layout = layout(&Mesh::flat(world)).with_muon(muon.clone());
    let model = layout.shard(Stacked::new(world.device())).unwrap();
    world.comm().barrier().unwrap();
    let held = ALLOCATOR.current_usage() - before;
    let optim = DistMuonConfig::new().with_muon(muon).init_on(&layout, &model).unwrap();
    let own = optim.memory().parameters.now;
    // Half of 8 MB, and a layer of 1 MB that one rank has, or both; or all of it.
    let replicas = if name == ON_NODES { 2 } else { 1 };
    assert!((replicas * (4 << 20)..replicas * (6 << 20)).contains(&own), "{name}: {own}");
    assert!((own..own + SCRATCH).contains(&held), "{name}: {held} of {own}");
}

/// Fewer matrices than ranks: each has half of it in rows, from the start on.
#[cfg(feature = "mpi")]
fn hold_rows_of_one_matrix(world: &World) {
    const ROWS: usize = 4095;
    const COLUMNS: usize = 1024;
    let before = ALLOCATOR.current_usage();
    let held = || ALLOCATOR.current_usage().saturating_sub(before);
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let layout = Layout::new(&Mesh::flat(world)).rows("dp").with_muon(muon.clone());
    let layer = LinearConfig::new(ROWS, COLUMNS).with_bias(false).init(world.device());
    let mut layer = layout.shard(layer).unwrap();
    world.comm().barrier().unwrap();
    let rows = (ROWS + world.rank()) / 2 * COLUMNS * 4;
    let own = rows..rows + SCRATCH;
    assert!(own.contains(&held()), "{} of {rows} before the first step", held());
    let mut optim = DistMuonConfig::new().with_muon(muon).init_on(&layout, &layer).unwrap();
    let input = Tensor::<2>::ones([4, ROWS], world.device());
    let gradients = layout.backward(&layer.forward(input).mean(), &layer).unwrap();
    layer = optim.step(1e-3, layer, gradients).unwrap();
    // The owner of the matrix has its momentum.
    let states = optim.memory().states.now;
    // Buffers that the first call has left may be gone.
    let own = (rows + states).saturating_sub(SCRATCH)..rows + states + SCRATCH;
    assert!([0, ROWS * COLUMNS * 4].contains(&states), "{states}");
    assert!(own.contains(&held()), "{} of {rows} and {states} after a step", held());
    drop(layer);
}

/// The bytes that a rank holds between steps, and those that a forward pass keeps for the backward
/// pass.
#[cfg(feature = "mpi")]
fn held_and_kept(world: &World, keep: Keep, in_rows: bool) -> (usize, usize) {
    let before = ALLOCATOR.current_usage();
    let layout = Layout::new(&Mesh::flat(world)).with_keep(keep);
    let layout = if in_rows { layout.rows("dp") } else { layout.owned("dp") };
    let mut model = layout.shard(Layers::square(OWNED_LAYERS, 512, world.device())).unwrap();
    let mut optim = DistMuonConfig::new().init_on(&layout, &model).unwrap();
    let mut kept = 0;
    for _ in 0..2 {
        let start = ALLOCATOR.current_usage();
        let input = Tensor::<2>::ones([4, 512], world.device());
        let output = model.layers.iter().fold(input, |x, layer| layer.forward(x));
        kept = ALLOCATOR.current_usage().saturating_sub(start);
        let gradients = layout.backward(&output.mean(), &model).unwrap();
        model = optim.step(1e-3, model, gradients).unwrap();
    }
    (ALLOCATOR.current_usage() - before, kept)
}
