//! Kernels that a step launches, copies from the host and copies to it, counted on a CubeCL device: how they
//! grow with the number of parameters.
//!
//! A binary of its own with one test: what counts is one for the process.

#![cfg(feature = "vulkan")]

#[path = "common/skips.rs"]
mod skips;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex, Once};

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor};
use cubecl::config::memory::MemoryLogLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::logging::{LaunchObservation, LaunchObserver};
use distmuon::dist::{DistMuonConfig, World};
use distmuon::{MuonConfig, Rule};

/// Uploads, those of launch parameters that were not seen before included.
static WRITES: AtomicUsize = AtomicUsize::new(0);
/// Uploads of launch parameters.
static PARAMETERS: AtomicUsize = AtomicUsize::new(0);
static READS: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
struct Launches(Mutex<Vec<&'static str>>);

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        self.0.lock().expect("no panic under it").push(kernel);
    }
}

/// Counts copies by what wgpu and CubeCL's memory say of them.
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

fn counted<T>(device: &Device, work: impl FnOnce() -> T) -> (T, Counted) {
    static LOG: Once = Once::new();
    LOG.call_once(|| {
        log::set_logger(&Copies).expect("nobody else logs");
        log::set_max_level(log::LevelFilter::Trace);
    });
    let now = || [&WRITES, &PARAMETERS, &READS].map(|counter| counter.load(Relaxed));
    // Memory is logged by a task of its own, a moment later.
    let settle = || {
        device.sync().expect("the device works");
        std::thread::sleep(std::time::Duration::from_millis(300));
    };
    settle();
    let launches = Arc::new(Launches::default());
    let watching = LaunchObservation::new(launches.clone());
    let before = now();
    let result = work(); // it lives until all that makes it was launched
    settle();
    drop(watching);
    let after = now();
    let [writes, parameters, reads] = [0, 1, 2].map(|of: usize| after[of] - before[of]);
    let names = launches.0.lock().expect("no panic under it");
    let mut kernels = BTreeMap::new();
    for name in &*names {
        let short = name.split('<').next().unwrap_or(name).rsplit("::").next().unwrap_or(name);
        *kernels.entry(short.to_owned()).or_default() += 1;
    }
    let (launches, uploads) = (names.len(), writes - parameters.min(writes));
    (result, Counted { launches, uploads, reads, kernels })
}

/// Equal matrices and half as many vectors.
#[derive(Module, Debug)]
struct Net {
    matrices: Vec<Param<Tensor<2>>>,
    vectors: Vec<Param<Tensor<1>>>,
}

impl Net {
    fn new(parameters: usize, device: &Device) -> Self {
        let dtype = (device, DType::F32);
        let matrix = |_| Param::from_tensor(Tensor::full([32, 32], 0.1, dtype).require_grad());
        let vector = |_| Param::from_tensor(Tensor::full([32], 0.1, dtype).require_grad());
        Self {
            matrices: (0..parameters - parameters / 3).map(matrix).collect(),
            vectors: (0..parameters / 3).map(vector).collect(),
        }
    }

    fn gradients(&self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for matrix in &self.matrices {
            gradients.register(matrix.id, matrix.val().inner().mul_scalar(0.5));
        }
        for vector in &self.vectors {
            gradients.register(vector.id, vector.val().inner().mul_scalar(0.5));
        }
        gradients
    }
}

/// The counts of a model's fourth step on all ranks: everything was compiled, tuned and cached before.
fn step(parameters: usize, ranks: usize, config: &DistMuonConfig) -> Counted {
    let device = Device::default().autodiff();
    let all = Barrier::new(ranks);
    let counts = World::threads(vec![device.clone(); ranks], |world| {
        let mut net = Net::new(parameters, world.device());
        let mut optim = config.init(&world, &net)?;
        for _ in 0..3 {
            let gradients = net.gradients();
            net = optim.step(0.01, net, gradients)?;
        }
        let gradients = net.gradients();
        all.wait();
        let step = || {
            all.wait();
            let net = optim.step(0.01, net, gradients);
            all.wait();
            net
        };
        // What one rank counts is that of all: none does anything else meanwhile.
        if world.rank() > 0 {
            return step().map(|_| None);
        }
        let (net, counted) = counted(&device.clone().inner(), step);
        net.map(|_| Some(counted))
    });
    counts.expect("all ranks step").into_iter().flatten().next().expect("rank 0 counts")
}

/// Returns `true` for the kernel of Burn's `select_assign`.
fn scatters(kernel: &str) -> bool {
    kernel.to_lowercase().replace('_', "").contains("selectassign")
}

#[test]
fn launches_and_copies_of_a_step() {
    if std::env::var("BURN_DEVICE").as_deref() != Ok("vulkan") {
        skips::excused("launches are counted on BURN_DEVICE=vulkan");
        return;
    }
    let mut config = CubeClRuntimeConfig::default();
    config.memory.logger.level = MemoryLogLevel::Full;
    config.memory.logger.log = Some(Default::default());
    CubeClRuntimeConfig::set(config);
    let device = Device::default();
    let (_sums, scattered) = counted(&device, || {
        let zeros = Tensor::<1>::zeros([2], (&device, DType::F32));
        let places = Tensor::<1, Int>::from_data([1, 0, 1], &device);
        let ones = Tensor::<1>::ones([3], (&device, DType::F32));
        zeros.select_assign(0, places, ones, IndexingUpdateOp::Add)
    });
    let names = scattered.kernels;
    assert!(names.keys().any(|name| scatters(name)), "a scatter is seen: {names:?}");
    let muon = MuonConfig::new().with_rule(Rule::muon("matrices"));
    let config = DistMuonConfig::new().with_muon(muon);
    let clipped = config.clone().with_max_norm(Some(1.0));
    // Packing a gradient and its parameter takes one each, and one for the zeros that fill up the last row of
    // a vector: Burn's `cat` launches a kernel for every input where there are many.
    for (ranks, config) in [(1, &config), (2, &clipped)] {
        let [few, many] = [30, 300].map(|parameters| {
            let counted = step(parameters, ranks, config);
            let Counted { launches, uploads, reads, kernels } = &counted;
            println!(
                "{parameters} parameters, {ranks} ranks, clipped by {:?}: {launches} launches, \
                 {uploads} uploads, {reads} reads",
                config.max_norm
            );
            println!("{kernels:#?}");
            counted
        });
        // Rates, masks and counters of all parameters go to the device at once.
        assert_eq!((few.uploads, many.uploads), (ranks, ranks));
        assert_eq!((few.reads, many.reads), (0, 0));
        let each = (many.launches - few.launches) as f64 / 270.0 / ranks as f64;
        println!("{each:.2} launches for each parameter more, on each of {ranks} ranks");
        assert!(each <= 3.0, "{each}");
        // A sum of rows by a scatter would be one thread, for any number of them.
        assert!(!many.kernels.keys().any(|name| scatters(name)), "{:?}", many.kernels);
    }
}
