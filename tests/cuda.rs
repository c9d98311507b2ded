//! Tests that need a GPU: NCCL itself, on one device and on several.
//!
//! Run `cargo test --features cuda --test cuda` on a machine with a CUDA device and NCCL. On other
//! machines, the tests are reported as skipped. With one device, two processes share the device,
//! which NCCL 2.30 and later allow. Without Burn's fusion:
//! `--no-default-features --features flex,cuda`.

fn main() {
    #[cfg(feature = "cuda")]
    gpu::main();
    #[cfg(not(feature = "cuda"))]
    distmuon_testing::skip("NCCL needs --features cuda");
}

#[cfg(feature = "cuda")]
pub(crate) mod gpu {
    use std::process::{Command, Stdio};
    use std::sync::Arc;
    use std::time::Duration;

    use burn::module::Module;
    use burn::nn::LinearConfig;
    use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
    use cudarc::driver::{result, sys};
    use distmuon::comm::{CudaMemory, Launch, Nccl, Order, PairCounts, ReduceOp, Reduction, World};
    use distmuon::distributed::DistMuonConfig;
    use distmuon::{IterationDtype, MuonConfig, NativeKernels, NewtonSchulzConfig, Result};
    use distmuon_testing::models::{Fixed, Layers, bits, gradients, weights};
    use distmuon_testing::worlds::{free_port, loopback};
    use distmuon_testing::{excused, lacks};
    use libtest_mimic::{Arguments, Failed, Trial};

    const DEADLINE: Duration = Duration::from_secs(120);
    /// The number of ranks in a world of processes.
    const RANKS: usize = 2;
    /// The variable with the name of the group that a process of such a world runs.
    const GROUP: &str = "DISTMUON_TEST_GROUP";
    /// The arguments with which `tests/gpu_suite.rs` runs only [`rank`]. The program of this file
    /// needs none.
    const RANK_ONLY: [&str; 4] = ["nccl_rank", "--exact", "--ignored", "--nocapture"];
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// The variable with the order of the work, one of [`ORDERS`].
    const ORDER: &str = "DISTMUON_TEST_ORDER";
    /// By words in memory, by events of the context, and by waits of the host.
    const ORDERS: [&str; 3] = ["words", "context", "host"];

    /// The first version, as NCCL encodes it, in which ranks may share a device: 2.30.
    const SHARES_DEVICES: i32 = 23_000;

    type Case = (&'static str, fn(&World) -> Result<()>);

    /// Cases that run one after the other in the processes of a world, since each process starts
    /// the driver, NCCL and the compiler of kernels.
    struct Group {
        name: &'static str,
        /// The sizes of the worlds.
        ranks: &'static [usize],
        reduction: Reduction,
        cases: &'static [Case],
    }

    const GROUPS: [Group; 3] = [
        Group {
            name: "exact",
            ranks: &[1, RANKS],
            reduction: Reduction::Exact,
            cases: &[
                ("collectives_equal_those_of_threads", collectives_equal_those_of_threads),
                ("calls_wait_for_work_queued_before_them", calls_wait_for_work_queued_before_them),
                ("later_work_waits_for_results", later_work_waits_for_results),
                ("steps_equal_those_of_threads", steps_equal_those_of_threads),
                (
                    "steps_are_recorded_while_calls_are_in_flight",
                    steps_are_recorded_while_calls_are_in_flight,
                ),
                ("iterations_run_beside_calls", iterations_run_beside_calls),
            ],
        },
        Group {
            name: "native",
            ranks: &[1, RANKS],
            reduction: Reduction::Native,
            // Values that are exact in every type have the same sum in any order.
            cases: &[("collectives_equal_those_of_threads", collectives_equal_those_of_threads)],
        },
        // By itself, since memory that other cases leave in reserve would be used again.
        Group {
            name: "memory",
            ranks: &[1],
            reduction: Reduction::Exact,
            cases: &[(
                "memory_report_agrees_with_the_driver",
                memory_report_agrees_with_the_driver,
            )],
        },
    ];

    pub fn main() {
        if std::env::var_os(GROUP).is_some() {
            return rank();
        }
        // One at a time: the driver counts the memory of all processes on the device.
        let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
        libtest_mimic::run(&arguments, trials()).exit();
    }

    /// Returns every group in every world. They have to run one after the other.
    pub fn trials() -> Vec<Trial> {
        println!("Burn's fusion is {}", if cfg!(feature = "fusion") { "on" } else { "off" });
        let devices = devices();
        let worlds = GROUPS.iter().flat_map(|group| group.ranks.iter().map(move |r| (group, *r)));
        let worlds = worlds.flat_map(|world| ORDERS.map(|order| (world, order)));
        let trials = worlds.map(|((group, ranks), order)| {
            let trial = move || {
                if devices == 0 {
                    lacks("CUDA");
                    return Ok(());
                }
                if ranks > devices && Nccl::installed_version()? < SHARES_DEVICES {
                    excused("this NCCL does not let ranks share a device");
                    return Ok(());
                }
                start(ranks, order, group.name, devices)
            };
            Trial::test(format!("ranks_{ranks}::{order}::{}", group.name), trial)
        });
        trials.collect()
    }

    /// Returns the number of CUDA devices of this machine.
    fn devices() -> usize {
        // SAFETY: the call looks for the driver's library by name.
        if !unsafe { sys::is_culib_present() } || result::init().is_err() {
            return 0;
        }
        result::device::get_count().map_or(0, |count| count as usize)
    }

    /// Runs a group in a number of processes.
    fn start(processes: usize, order: &str, group: &str, devices: usize) -> Result<(), Failed> {
        let program = std::env::args_os().next().expect("a program has a name");
        let port = free_port().to_string();
        let rank = |rank: usize| {
            let mut command = Command::new(&program);
            command.args(RANK_ONLY);
            command.env(GROUP, group).env(ORDER, order).env("BURN_DEVICE", "cuda");
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", processes.to_string());
            command.env("LOCAL_RANK", (rank % devices).to_string());
            command.env("MASTER_ADDR", loopback()).env("MASTER_PORT", &port);
            command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1").env("NCCL_NVLS_ENABLE", "0");
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("this program can be started again")
        };
        let started: Vec<_> = (0..processes).map(rank).collect();
        for (rank, child) in started.into_iter().enumerate() {
            let output = child.wait_with_output()?;
            let stderr = String::from_utf8_lossy(&output.stderr);
            if !output.status.success() {
                return Err(format!("rank {rank}: {}: {stderr}", output.status).into());
            }
            print!("{}", String::from_utf8_lossy(&output.stdout));
        }
        Ok(())
    }

    /// Runs one rank of a world that [`start`] started.
    pub fn rank() {
        let name = std::env::var(GROUP).expect("the starting process sets the group");
        let group = GROUPS.iter().find(|group| group.name == name);
        let group = group.expect("a group has this name");
        let launch = Launch::from_env().expect("the starting process sets the variables");
        let device = launch.device();
        let memory = CudaMemory::new(&device, launch.rank).expect("a CUDA device is available");
        let memory = match std::env::var(ORDER).as_deref() {
            Ok("host") => memory.with_order(Order::Host),
            Ok("context") => memory.with_order(Order::Context("it is compared".to_owned())),
            _ => {
                assert!(matches!(memory.order(), Order::Operands(_)), "{}", memory.order());
                Ok(memory)
            }
        };
        let memory = memory.expect("the driver has streams");
        let engine = Nccl::over(Arc::new(memory), &launch, DEADLINE);
        let engine = engine.expect("the ranks can connect").with_reduction(group.reduction);
        let world = World::new(engine, device);
        assert_eq!(world.comm().engine_name(), "nccl");
        eprintln!("{}", world.describe().expect("all ranks describe the world"));
        for (name, run) in group.cases {
            // The last of these lines names the case that fails.
            eprintln!("case {name}");
            run(&world).unwrap();
            println!("case {name} ... ok");
        }
    }

    /// Returns values that are exact in every type, and different on every rank.
    fn contribution(rank: usize, length: usize, dtype: DType, device: &Device) -> Tensor<1> {
        let values: Vec<f32> =
            (0..length).map(|i| ((i * 7 + rank * 3) % 17) as f32 - 8.0).collect();
        Tensor::from_data(TensorData::from(&values[..]), (&device.clone().inner(), dtype))
    }

    /// Returns the results of every collective with every type on a world, as bytes.
    fn results(world: &World) -> Result<Vec<Vec<u8>>> {
        let (comm, rank, size) = (world.comm(), world.rank(), world.size());
        let mut results = vec![];
        for dtype in DTYPES {
            let contribution = |length| contribution(rank, length, dtype, world.device());
            // Even and uneven, long and empty.
            for parts in [[1000; RANKS], [0, 3], [70_000, 1]] {
                let parts = &parts[..size];
                let all = parts.iter().sum();
                results.push(comm.all_reduce(contribution(all), ReduceOp::Mean)?);
                results.push(comm.reduce_scatter(contribution(all), parts, ReduceOp::Sum)?);
                results.push(comm.all_gather(contribution(parts[rank]), parts)?);
                results.push(comm.broadcast(contribution(all), size - 1)?);
                let pairs = PairCounts { sent: parts.to_vec(), received: vec![parts[rank]; size] };
                results.push(comm.all_to_all(contribution(all), &pairs)?);
            }
        }
        results.into_iter().map(|result| Ok(bits(&result.wait()?))).collect()
    }

    fn collectives_equal_those_of_threads(world: &World) -> Result<()> {
        let threads = World::threads(vec![world.device().clone(); world.size()], |threads| {
            results(&threads)
        })?;
        let results = results(world)?;
        for (index, (result, expected)) in results.iter().zip(&threads[world.rank()]).enumerate() {
            assert!(result == expected, "result {index} on rank {}", world.rank());
        }
        Ok(())
    }

    /// A tensor that is still being computed is sent with its final values, and a result is used
    /// with the values that were received.
    fn calls_wait_for_work_queued_before_them(world: &World) -> Result<()> {
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

    /// Work that is queued after a call, and work that is queued after that work, uses the call's
    /// result. The memory of a tensor that is dropped while a call reads it is not overwritten.
    fn later_work_waits_for_results(world: &World) -> Result<()> {
        let (comm, device) = (world.comm(), world.device().clone().inner());
        let length = 1 << 20;
        let mut sum = Tensor::<1>::zeros([length], &device);
        for round in 0..1000 {
            let tensor = Tensor::full([length], (round % 7 + world.rank()) as f32, &device);
            let pending = comm.all_reduce(tensor.clone(), ReduceOp::Sum)?;
            drop(tensor);
            let noise = Tensor::<1>::full([length], 1e30, &device);
            sum = sum + pending.wait()?;
            drop(noise);
        }
        comm.synchronize()?;
        let sum_of_ranks =
            |round: usize| (0..world.size()).map(|rank| round % 7 + rank).sum::<usize>();
        let expected = (0..1000).map(sum_of_ranks).sum::<usize>() as f32;
        let wrong = (sum - expected).abs().max().into_scalar::<f32>();
        assert_eq!(wrong, 0.0);
        Ok(())
    }

    fn steps(world: &World) -> Result<Vec<Vec<u8>>> {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(world.device());
        let layers = vec![linear(64, 64), linear(64, 200), linear(200, 64), linear(64, 64)];
        let net = Layers { layers };
        let mut net = net.map(&mut Fixed::new(3));
        let mut optim = DistMuonConfig::new().with_bucket_mb(Some(0.02)).init(world, &net)?;
        for step in 0..10 {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(weights(&net))
    }

    /// The first step records graphs while collectives are in flight, and the watching thread
    /// follows them.
    fn steps_are_recorded_while_calls_are_in_flight(world: &World) -> Result<()> {
        let trained = |graphs| -> Result<Vec<Vec<u8>>> {
            // Neither native kernels nor a single one iterate these, so that CubeCL records them.
            let net = Layers::square(8, 72, world.device());
            let mut net = net.map(&mut Fixed::new(5));
            let iteration =
                NewtonSchulzConfig::new().with_dtype(IterationDtype::F32).with_graphs(graphs);
            let muon = MuonConfig::new().with_newton_schulz(iteration);
            let config = DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(0.02));
            let mut optim = config.init(world, &net)?;
            // A step in a world of one sends nothing. A call with 256 MB occupies NCCL's stream for
            // some 0.1 ms, so all of them last until a recording begins.
            let long = Tensor::<1>::ones([1 << 26], &world.device().clone().inner());
            for step in 0..3 {
                let gradients = gradients(&net, step);
                let call = |_| world.comm().all_reduce(long.clone(), ReduceOp::Sum);
                let pending = (0..32).map(call).collect::<Result<Vec<_>>>()?;
                net = optim.step(0.01, net, gradients)?;
                pending.into_iter().try_for_each(|call| call.wait().map(drop))?;
            }
            world.comm().synchronize()?;
            Ok(weights(&net))
        };
        // In this order: the first run compiles the kernels, which takes longer than the calls.
        let expected = trained(false)?;
        assert!(trained(true)? == expected);
        Ok(())
    }

    /// Native kernels iterate while calls are in flight, of the group that all ranks are in and of
    /// one of each rank, with the bits that they have without.
    fn iterations_run_beside_calls(world: &World) -> Result<()> {
        let device = world.device().clone().inner();
        let iteration = NewtonSchulzConfig::new().with_dtype(IterationDtype::Bf16).init()?;
        let (m, n) = (512, 1024);
        let native = iteration.explain_shape([m, n], DType::F32, &device).native;
        if let NativeKernels::Refused(reason) = &native {
            let others = ["compute capability", "DISTMUON_NATIVE is off"];
            let is_other = others.iter().any(|other| reason.contains(other));
            assert!(is_other, "native kernels are refused: {reason}");
            excused(reason);
            return Ok(());
        }
        let batch = Tensor::<3>::random([4, m, n], Distribution::Default, &device);
        let iterated = || bits(&iteration.orthogonalize(batch.clone()).reshape([-1]));
        let expected = iterated();
        let own = world.split(world.rank(), 0)?;
        let long = Tensor::<1>::ones([1 << 26], &device);
        for round in 0..10 {
            let calls =
                [world, &own].map(|world| world.comm().all_reduce(long.clone(), ReduceOp::Sum));
            assert!(iterated() == expected, "round {round}");
            for call in calls {
                call?.wait()?;
            }
        }
        world.comm().synchronize()
    }

    fn steps_equal_those_of_threads(world: &World) -> Result<()> {
        let threads =
            World::threads(vec![world.device().clone(); world.size()], |threads| steps(&threads))?;
        assert!(steps(world)? == threads[world.rank()]);
        Ok(())
    }

    /// The memory that the driver counts is at least that of the report, and not much more than
    /// what a backend keeps in reserve.
    fn memory_report_agrees_with_the_driver(world: &World) -> Result<()> {
        let device = world.device();
        let used = || {
            device.sync().expect("the device works");
            let (free, total) = result::mem_get_info().expect("the context is current");
            total - free
        };
        // The first use loads modules and creates pools.
        Tensor::<2>::ones([64, 64], device).matmul(Tensor::ones([64, 64], device)).into_data();
        world.comm().barrier()?;
        let before = used();
        let mut net = Layers::square(8, 2048, device);
        let mut optim = DistMuonConfig::new().init(world, &net)?;
        for step in 0..3 {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        world.comm().synchronize()?;
        let (used, report) = (used() - before, optim.memory());
        println!("the driver says {used} bytes more; {report}");
        assert!(used >= report.total.now, "{used} of {}", report.total.now);
        // An orthogonalisation takes three times its batch, at most the workspace's 1 GiB.
        assert!(used <= 2 * (report.total.peak + 3 * report.parameters.now), "{used}");
        Ok(())
    }
}
