//! The numbers of kernels that a step launches, of copies from the host and of copies to it,
//! counted on a CubeCL device for different numbers of parameters.
//!
//! A separate binary, and one test at a time, since the counters belong to the process.

#![cfg(feature = "vulkan")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, Once, PoisonError};

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor};
use cubecl::config::memory::MemoryLogLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::logging::{LaunchObservation, LaunchObserver};
use distmuon::comm::World;
use distmuon::custom::Soap;
use distmuon::distributed::{Axis, DistMuonConfig, Layout, Mesh, Place};
use distmuon::parts::{NorMuon, Renormalization, RowEquilibration};
use distmuon::{Error, MuonConfig, RoutingRule};
use distmuon_testing::{empty_operations, excused};

/// Uploads, including those of launch parameters that occur for the first time.
static WRITES: AtomicUsize = AtomicUsize::new(0);
/// Uploads of launch parameters.
static PARAMETERS: AtomicUsize = AtomicUsize::new(0);
static READS: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
struct Launches(Mutex<Vec<&'static str>>);

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        self.0.lock().expect("no holder of the lock panics").push(kernel);
    }
}

/// Counts copies by the messages of wgpu and of CubeCL's memory.
struct Copies;

impl log::Log for Copies {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("wgpu_core::device::")
            || metadata.target() == "cubecl::memory"
    }

    fn log(&self, record: &log::Record<'_>) {
        let text = record.args().to_string();
        let counter = match record.target() {
            "wgpu_core::device::queue"
                if text == "Queue::write_buffer" || text == "Queue::create_staging_buffer" =>
            {
                &WRITES
            }
            "wgpu_core::device::global" if text.starts_with("Buffer::map_async") => &READS,
            "cubecl::memory" if text.starts_with("[Uniform GPU Memory] Reserved") => &PARAMETERS,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    fn flush(&self) {}
}

struct Counted {
    launches: usize,
    uploads: usize,
    reads: usize,
    kernels: BTreeMap<String, usize>,
}

impl Counted {
    fn print(&self, how: &str, structure: &Structure) {
        let Self { launches, uploads, reads, kernels } = self;
        println!(
            "{}, {} parameters, {how}: {launches} launches, {uploads} uploads, {reads} reads",
            structure.name,
            structure.parameters()
        );
        println!("{kernels:#?}");
    }
}

fn counted<T>(device: &Device, work: impl FnOnce() -> T) -> (T, Counted) {
    static LOG: Once = Once::new();
    LOG.call_once(|| {
        log::set_logger(&Copies).expect("no other logger is set");
        log::set_max_level(log::LevelFilter::Trace);
    });
    let now = || [&WRITES, &PARAMETERS, &READS].map(|counter| counter.load(Relaxed));
    // A separate task logs memory, a moment later.
    let settle = || {
        device.sync().expect("the device works");
        std::thread::sleep(std::time::Duration::from_millis(300));
    };
    settle();
    let launches = Arc::new(Launches::default());
    let watching = LaunchObservation::new(launches.clone());
    let before = now();
    let result = work(); // kept until all kernels that compute it were launched
    settle();
    drop(watching);
    let after = now();
    let [writes, parameters, reads] = [0, 1, 2].map(|i: usize| after[i] - before[i]);
    let names = launches.0.lock().expect("no holder of the lock panics");
    let mut kernels = BTreeMap::new();
    for name in &*names {
        let short = name.split('<').next().unwrap_or(name).rsplit("::").next().unwrap_or(name);
        *kernels.entry(short.to_owned()).or_default() += 1;
    }
    let (launches, uploads) = (names.len(), writes - parameters.min(writes));
    (result, Counted { launches, uploads, reads, kernels })
}

/// The parameters of a model, and the factor by which they are scaled down.
struct Structure {
    name: &'static str,
    /// Matrices of Muon.
    matrices: Vec<[usize; 2]>,
    /// Matrices of AdamW.
    embeddings: Vec<[usize; 2]>,
    vectors: Vec<usize>,
    /// The number of elements of the model's matrices for one element here. Buckets are smaller by
    /// the same factor, so that their number is that of the model.
    scale: f64,
}

impl Structure {
    /// Equal matrices and half as many vectors.
    fn equal(parameters: usize) -> Self {
        let vectors = parameters / 3;
        Self {
            name: "equal layers",
            matrices: vec![[32, 32]; parameters - vectors],
            embeddings: vec![],
            vectors: vec![32; vectors],
            scale: 1.0,
        }
    }

    /// GPT-2 small: 12 layers with biases, with a width of 128 instead of 768.
    fn gpt2_small() -> Self {
        let layer = [[128, 128], [128, 128], [128, 128], [128, 128], [128, 512], [512, 128]];
        // Biases and two norms.
        let vectors = [128, 128, 128, 128, 512, 128, 128, 128, 128, 128];
        Self {
            name: "GPT-2 small",
            matrices: layer.repeat(12),
            embeddings: vec![[8376, 128], [171, 128]],
            vectors: [&vectors.repeat(12)[..], &[128, 128]].concat(),
            scale: 36.0,
        }
    }

    /// A model of 7B parameters: 32 layers without biases, with a width of
    /// 128 instead of 4096.
    fn of_7b() -> Self {
        let square = [128, 128];
        let layer = [square, square, square, square, [128, 344], [128, 344], [344, 128]];
        Self {
            name: "7B",
            matrices: layer.repeat(32),
            embeddings: vec![[1000, 128]; 2],
            vectors: vec![128; 65],
            scale: 1024.0,
        }
    }

    fn parameters(&self) -> usize {
        self.matrices.len() + self.embeddings.len() + self.vectors.len()
    }
}

#[derive(Module, Debug)]
struct Net {
    matrices: Vec<Param<Tensor<2>>>,
    embeddings: Vec<Param<Tensor<2>>>,
    vectors: Vec<Param<Tensor<1>>>,
}

fn parameters<const D: usize>(shapes: &[[usize; D]], device: &Device) -> Vec<Param<Tensor<D>>> {
    let filled = |shape: &[usize; D]| Tensor::full(*shape, 0.1, (device, DType::F32));
    shapes.iter().map(|shape| Param::from_tensor(filled(shape).require_grad())).collect()
}

impl Net {
    fn new(structure: &Structure, device: &Device) -> Self {
        let vectors: Vec<_> = structure.vectors.iter().map(|&elements| [elements]).collect();
        Self {
            matrices: parameters(&structure.matrices, device),
            embeddings: parameters(&structure.embeddings, device),
            vectors: parameters(&vectors, device),
        }
    }

    fn gradients(&self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for matrix in self.matrices.iter().chain(&self.embeddings) {
            gradients.register(matrix.id, matrix.val().inner().mul_scalar(0.5));
        }
        for vector in &self.vectors {
            gradients.register(vector.id, vector.val().inner().mul_scalar(0.5));
        }
        gradients
    }

    /// A loss whose gradients are as simple.
    fn loss(&self) -> Tensor<1> {
        let matrices =
            self.matrices.iter().chain(&self.embeddings).map(|matrix| matrix.val().sum());
        let vectors = self.vectors.iter().map(|vector| vector.val().sum());
        matrices.chain(vectors).reduce(|sum, other| sum + other).expect("a model has parameters")
    }
}

/// A placement of parameters on ranks.
#[derive(Clone, Copy)]
struct Placed {
    name: &'static str,
    /// `true` if backward passes reduce the gradients, and not the step.
    passes: bool,
    lay: fn(&World) -> Result<Layout, Error>,
}

/// Every rank has all.
const REPLICATED: Placed =
    Placed { name: "replicated", passes: false, lay: |world| Ok(Layout::new(&Mesh::flat(world))) };

/// Placements in which a rank has parts.
const DIVIDED: [Placed; 3] = [
    Placed {
        name: "owned",
        passes: true,
        lay: |world| Ok(Layout::new(&Mesh::flat(world)).owned("dp")),
    },
    Placed {
        name: "in rows",
        passes: true,
        lay: |world| Ok(Layout::new(&Mesh::flat(world)).rows("dp")),
    },
    Placed {
        name: "in slices",
        passes: false,
        lay: |world| {
            let layout = Layout::new(&Mesh::new(world, [Axis::model("tp", world.size())])?);
            Ok(layout.with_place(Place::shard("matrices", "tp", 1)))
        },
    },
];

/// Matrices by Muon, the rest by AdamW.
fn muon(structure: &Structure) -> MuonConfig {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("matrices"));
    match structure.embeddings.is_empty() {
        true => muon,
        false => muon.with_rule(RoutingRule::adamw("embeddings")),
    }
}

/// The counts of a model's third step on all ranks. Everything was compiled, tuned and cached in
/// the first two steps.
fn step(structure: &Structure, ranks: usize, config: &DistMuonConfig) -> Counted {
    let muon = muon(structure).with_parts(config.muon.parts.clone());
    step_of(REPLICATED, structure, ranks, &config.clone().with_muon(muon))
}

/// The counts of a model's third step whose parameters are placed on ranks. What passes launch does
/// not count.
fn step_of(
    Placed { name, passes, lay }: Placed,
    structure: &Structure,
    ranks: usize,
    config: &DistMuonConfig,
) -> Counted {
    let device = Device::default().autodiff().gradient_checkpointing();
    let all = Barrier::new(ranks);
    let counts = World::threads(vec![device.clone(); ranks], |world| {
        let layout = lay(&world)?.with_muon(config.muon.clone());
        let mut net = layout.shard(Net::new(structure, world.device()))?;
        let mut optim = config.init_on(&layout, &net)?;
        let gradients = |net: &Net| match passes {
            true => layout.backward(&net.loss(), net),
            false => Ok(net.gradients()),
        };
        // Fusion keeps the operations of a thread back until it needs their results.
        let launch_all = || world.device().clone().inner().sync().expect("the device works");
        for _ in 0..2 {
            let gradients = gradients(&net)?;
            net = optim.step(0.01, net, gradients)?;
        }
        let gradients = gradients(&net)?;
        launch_all();
        all.wait();
        let step = || {
            all.wait();
            let net = optim.step(0.01, net, gradients);
            launch_all();
            all.wait();
            net
        };
        // One rank counts for all ranks, which all step meanwhile.
        if world.rank() > 0 {
            return step().map(|_| None);
        }
        let (net, counted) = counted(&device.clone().inner(), step);
        net.map(|_| Some(counted))
    });
    let counted = counts.expect("all ranks step").into_iter().flatten().next();
    let counted = counted.expect("rank 0 counts");
    let how = format!("{name}, {ranks} ranks, clipped by {:?}", config.max_norm);
    counted.print(&how, structure);
    counted
}

/// The counts of a model's third step by Burn's `ModuleOptimizer`.
fn step_of_single_parameters(structure: &Structure) -> Counted {
    let device = Device::default().autodiff();
    let mut net = Net::new(structure, &device);
    let mut optim = muon(structure).init(&net);
    for _ in 0..2 {
        let gradients = net.gradients();
        net = optim.step(0.01, net, gradients);
    }
    let gradients = net.gradients();
    let (_net, counted) = counted(&device.inner(), || optim.step(0.01, net, gradients));
    counted.print("one parameter at a time", structure);
    counted
}

/// Returns `true` for the kernel of Burn's `select_assign`.
fn scatters(kernel: &str) -> bool {
    kernel.to_lowercase().replace('_', "").contains("selectassign")
}

/// Waits for the other test, and configures the counters. `None` on other devices.
fn counting() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    static CONFIGURED: Once = Once::new();
    if std::env::var("BURN_DEVICE").as_deref() != Ok("vulkan") {
        excused("launches are counted on BURN_DEVICE=vulkan");
        return None;
    }
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    CONFIGURED.call_once(|| {
        let mut config = CubeClRuntimeConfig::default();
        config.memory.logger.level = MemoryLogLevel::Full;
        config.memory.logger.log = Some(Default::default());
        CubeClRuntimeConfig::set(config);
    });
    Some(turn)
}

#[test]
fn a_step_launches_few_kernels_and_copies_per_parameter() {
    let Some(_turn) = counting() else { return };
    let device = Device::default();
    let (_sums, scattered) = counted(&device, || {
        let zeros = Tensor::<1>::zeros([2], (&device, DType::F32));
        let places = Tensor::<1, Int>::from_data([1, 0, 1], &device);
        let ones = Tensor::<1>::ones([3], (&device, DType::F32));
        zeros.select_assign(0, places, ones, IndexingUpdateOp::Add)
    });
    let names = scattered.kernels;
    assert!(names.keys().any(|name| scatters(name)), "a scatter is counted: {names:?}");
    let config = DistMuonConfig::new();
    let clipped = config.clone().with_max_norm(Some(1.0));
    // On one rank, parameters are updated in place, eight per launch: gradients, their norms,
    // momenta and new values.
    // On several ranks, packing takes a launch for a gradient, one for its parameter, and one for
    // the zeros that fill the last row of a vector, since Burn's `cat` launches a kernel for every
    // input if the inputs are many.
    for (ranks, config, limit) in [(1, &config, 0.5), (1, &clipped, 0.7), (2, &clipped, 3.0)] {
        let [few, many] =
            [30, 300].map(|parameters| step(&Structure::equal(parameters), ranks, config));
        // Flags are uploaded only where a parameter has no gradient.
        assert_eq!((few.uploads, many.uploads), (0, 0));
        assert_eq!((few.reads, many.reads), (0, 0));
        let each = (many.launches - few.launches) as f64 / 270.0 / ranks as f64;
        println!("{each:.2} launches for each parameter more, on each of {ranks} ranks");
        assert!(each <= limit, "{each}");
        // A scatter would sum any number of rows in a single thread.
        assert!(!many.kernels.keys().any(|name| scatters(name)), "{:?}", many.kernels);
    }

    // Parts find the flags of their matrices by indices that stay on the device.
    let parts = vec![
        RowEquilibration.into(),
        Renormalization::orthogonal().into(),
        NorMuon::new(0.9).into(),
    ];
    let with_parts = config.clone().with_muon(MuonConfig::new().with_parts(parts));
    let counted_with_parts = step(&Structure::equal(30), 1, &with_parts);
    assert_eq!((counted_with_parts.uploads, counted_with_parts.reads), (0, 0));
}

/// A bad gradient is found and taken back on the device. The step is SOAP's third, in which it does
/// not read its own state: it does so in two of ten.
#[test]
fn an_optimizer_of_whole_layers_does_not_wait_for_the_device() {
    let Some(_turn) = counting() else { return };
    let soap = MuonConfig::new()
        .with_layer_optimizer("soap", Soap::default())
        .with_rule(RoutingRule::custom("matrices", "soap"));
    let (structure, config) = (Structure::equal(6), DistMuonConfig::new().with_muon(soap));
    let on_ranks = [REPLICATED].into_iter().chain(DIVIDED).map(|placed| (placed, 2));
    for (placed, ranks) in [(REPLICATED, 1)].into_iter().chain(on_ranks) {
        let name = placed.name;
        let counted = step_of(placed, &structure, ranks, &config);
        assert_eq!(counted.reads, 0, "{name}, {ranks} ranks");
        assert!(counted.launches > 0, "{name}, {ranks} ranks");
    }
}

#[test]
fn a_step_of_divided_parameters_launches_few_kernels_and_copies_per_parameter() {
    let Some(_turn) = counting() else { return };
    let ranks = 2;
    let counts = DIVIDED.map(|placed| {
        [30, 120].map(|parameters| {
            let structure = Structure::equal(parameters);
            step_of(placed, &structure, ranks, &DistMuonConfig::new().with_muon(muon(&structure)))
        })
    });
    let each = counts
        .each_ref()
        .map(|[few, many]| (many.launches - few.launches) as f64 / 90.0 / ranks as f64);
    println!("{each:.2?} launches for each parameter more, on each of {ranks} ranks");
    // Gradients of owned parameters have arrived before the step, and values stay. Rows and slices
    // are packed, assembled at the owner, cut there, and unpacked: gradients on one way, and
    // directions or values on the other.
    let limits = [1.2, 5.5, 5.7];
    for (index, [few, many]) in counts.iter().enumerate() {
        let name = DIVIDED[index].name;
        assert!(each[index] <= limits[index], "{name}: {}", each[index]);
        assert_eq!((few.reads, many.reads), (0, 0), "{name}");
        assert_eq!((few.uploads, many.uploads), (0, 0), "{name}");
        assert!(!many.kernels.keys().any(|name| scatters(name)), "{:?}", many.kernels);
    }
}

#[test]
fn models_of_the_field_launch_few_kernels() {
    let Some(_turn) = counting() else { return };
    let config = DistMuonConfig::new();
    for (structure, limit) in [(Structure::gpt2_small(), 600), (Structure::of_7b(), 1200)] {
        let bucket_mb = 1000.0 / structure.scale;
        let counted = step(&structure, 1, &config.clone().with_bucket_mb(Some(bucket_mb)));
        assert!(counted.launches <= limit, "{}", counted.launches);
        assert!(counted.uploads + counted.reads <= 10, "{} uploads", counted.uploads);
    }
    let singly = step_of_single_parameters(&Structure::gpt2_small());
    assert!(singly.launches <= 2400, "{}", singly.launches);
    assert_eq!((singly.uploads, singly.reads), (0, 0));
}

#[test]
fn an_operation_without_elements_is_an_error_of_the_tests() {
    let Some(_counting) = counting() else { return };
    let device = Device::default();
    let find = |elements: usize| {
        empty_operations::ensure_none(|| {
            let tensor = Tensor::<1>::empty([elements], (&device, DType::F32));
            tensor.mul_scalar(2.0).into_data();
            Ok(())
        })
    };
    find(1).expect("an operation on an element is found to be none");
    match cfg!(feature = "fusion") {
        true => assert!(find(0).expect_err("no error").contains("MulScalar")),
        false => find(0).expect("without fusion, there are none to be seen"),
    }
}
