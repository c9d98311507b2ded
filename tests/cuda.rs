//! What only a GPU can show: NCCL itself, on one device and on several.
//!
//! `cargo test --features cuda --test cuda` on a machine with a CUDA device and NCCL; skipped aloud on
//! others. With one device, two processes share it, which NCCL 2.30 and later allow.

#[cfg(feature = "cuda")]
mod common;
#[cfg(feature = "cuda")]
#[path = "common/host.rs"]
mod host;
#[cfg(feature = "cuda")]
#[path = "common/worlds.rs"]
mod worlds;

fn main() {
    #[cfg(feature = "cuda")]
    gpu::main();
    #[cfg(not(feature = "cuda"))]
    println!("skipped: needs --features cuda");
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::os::raw::c_int;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
    use distmuon::Result;
    use distmuon::dist::{DistMuonConfig, Launch, ReduceOp, World};
    use libtest_mimic::{Arguments, Failed, Trial};
    use rand::{SeedableRng, rngs::StdRng};

    use crate::common::{Fixed, bits, gradients, weights};
    use crate::worlds::free_port;

    const DEADLINE: Duration = Duration::from_secs(120);
    /// The ranks of a world of processes.
    const RANKS: usize = 2;
    /// What a process of such a world does.
    const CASE: &str = "DISTMUON_TEST_CASE";
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    type Case = (&'static str, fn(&World) -> Result<()>);

    /// Cases for a world of any size over NCCL.
    const CASES: &[Case] = &[
        ("collectives_are_those_of_threads", collectives_are_those_of_threads),
        ("calls_wait_for_what_was_queued", calls_wait_for_what_was_queued),
        ("steps_are_those_of_threads", steps_are_those_of_threads),
    ];

    pub fn main() {
        if let Ok(case) = std::env::var(CASE) {
            return work(&case);
        }
        let devices = devices();
        let trial = |processes: usize, (name, _): Case| {
            let trial = move || {
                if devices == 0 {
                    println!("skipped: there is no CUDA device");
                    return Ok(());
                }
                start(processes, name, devices)
            };
            Trial::test(format!("ranks_{processes}::{name}"), trial)
        };
        let trials = [1, RANKS]
            .into_iter()
            .flat_map(|ranks| CASES.iter().map(move |case| trial(ranks, *case)));
        libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
    }

    /// CUDA devices of this machine.
    fn devices() -> usize {
        type Init = unsafe extern "C" fn(u32) -> c_int;
        type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: these are two functions of the driver's interface, of those types.
        unsafe {
            let Ok(driver) = libloading::Library::new("libcuda.so.1") else { return 0 };
            let init = driver.get::<Init>(b"cuInit").expect("every driver has it");
            let count = driver.get::<Count>(b"cuDeviceGetCount").expect("every driver has it");
            let mut devices = 0;
            if init(0) == 0 && count(&mut devices) == 0 { devices as usize } else { 0 }
        }
    }

    /// Runs a case in so many processes.
    fn start(processes: usize, case: &str, devices: usize) -> Result<(), Failed> {
        let (own, port) = (std::env::args_os().next().expect("a name"), free_port().to_string());
        let rank = |rank: usize| {
            let mut rank_of = Command::new(&own);
            rank_of.env(CASE, case).env("RANK", rank.to_string()).env("BURN_DEVICE", "cuda");
            rank_of.env("WORLD_SIZE", processes.to_string()).env("MASTER_ADDR", "127.0.0.1");
            rank_of.env("LOCAL_RANK", (rank % devices).to_string()).env("MASTER_PORT", &port);
            rank_of.env("NCCL_MULTI_RANK_GPU_ENABLE", "1").env("NCCL_NVLS_ENABLE", "0");
            rank_of
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("it can be started")
        };
        let started: Vec<_> = (0..processes).map(rank).collect();
        for (rank, child) in started.into_iter().enumerate() {
            let output = child.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            if said.contains("Duplicate GPU detected") {
                println!("skipped: this NCCL does not let ranks share a device");
            } else if !output.status.success() {
                return Err(format!("rank {rank}: {}: {said}", output.status).into());
            }
        }
        Ok(())
    }

    fn work(case: &str) {
        let (_, run) = CASES.iter().find(|(name, _)| *name == case).expect("a case");
        let launch = Launch::from_env().expect("the test says who this is");
        let world = World::nccl(&launch, launch.device().autodiff(), DEADLINE)
            .expect("the ranks find together");
        assert_eq!(world.comm().engine(), "nccl");
        eprintln!("{}", world.describe().expect("all describe"));
        run(&world).unwrap();
    }

    /// Values that are exact in every type, and different on every rank.
    fn own(rank: usize, length: usize, dtype: DType, device: &Device) -> Tensor<1> {
        let values: Vec<f32> =
            (0..length).map(|i| ((i * 7 + rank * 3) % 17) as f32 - 8.0).collect();
        Tensor::from_data(TensorData::from(&values[..]), (&device.clone().inner(), dtype))
    }

    /// Every collective with every type on a world, as bytes.
    fn results(world: &World) -> Result<Vec<Vec<u8>>> {
        let (comm, rank, size) = (world.comm(), world.rank(), world.size());
        let mut results = vec![];
        for dtype in DTYPES {
            let own = |length| own(rank, length, dtype, world.device());
            // Even and uneven, long and empty.
            for parts in [[1000; RANKS], [0, 3], [70_000, 1]] {
                let parts = &parts[..size];
                let all = parts.iter().sum();
                results.push(comm.all_reduce(own(all), ReduceOp::Mean)?);
                results.push(comm.reduce_scatter(own(all), parts, ReduceOp::Sum)?);
                results.push(comm.all_gather(own(parts[rank]), parts)?);
                results.push(comm.broadcast(own(all), size - 1)?);
                let received = vec![parts[rank]; size];
                results.push(comm.all_to_all(own(all), parts, &received)?);
            }
        }
        results.into_iter().map(|result| Ok(bits(&result.wait()?))).collect()
    }

    fn collectives_are_those_of_threads(world: &World) -> Result<()> {
        let threads = World::threads(vec![world.device().clone(); world.size()], |threads| {
            results(&threads)
        })?;
        let own = results(world)?;
        for (index, (own, threads)) in own.iter().zip(&threads[world.rank()]).enumerate() {
            assert!(own == threads, "result {index} on rank {}", world.rank());
        }
        Ok(())
    }

    /// A result that is still being computed is what is sent, and what is received is there before
    /// it is used.
    fn calls_wait_for_what_was_queued(world: &World) -> Result<()> {
        let device = world.device().clone().inner();
        let busy = Tensor::<2>::random([1024, 1024], Distribution::Default, &device);
        for round in 0..1000 {
            let late = (busy.clone().matmul(busy.clone()) * 0.0).slice([0..1, 0..64]).reshape([64]);
            let sum = world
                .comm()
                .all_reduce(late + (round + world.rank()) as f32, ReduceOp::Sum)?
                .wait()?;
            let expected = (0..world.size()).map(|rank| (round + rank) as f32).sum::<f32>();
            let wrong = (sum - expected).abs().sum().into_scalar::<f32>();
            assert_eq!(wrong, 0.0, "round {round}");
        }
        Ok(())
    }

    #[derive(Module, Debug)]
    struct Net {
        layers: Vec<Linear>,
    }

    fn steps(world: &World) -> Result<Vec<Vec<u8>>> {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(world.device());
        let net =
            Net { layers: vec![linear(64, 64), linear(64, 200), linear(200, 64), linear(64, 64)] };
        let mut net = net.map(&mut Fixed(StdRng::seed_from_u64(3)));
        let mut optim = DistMuonConfig::new().with_bucket_mb(0.02).init(world, &net)?;
        for step in 0..10 {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(weights(&net))
    }

    fn steps_are_those_of_threads(world: &World) -> Result<()> {
        let threads =
            World::threads(vec![world.device().clone(); world.size()], |threads| steps(&threads))?;
        assert!(steps(world)? == threads[world.rank()]);
        Ok(())
    }
}
