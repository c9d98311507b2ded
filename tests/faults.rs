//! Ranks that die, are late, or disagree: between steps, and at every point of a step and of a
//! save, on every engine whose ranks are threads.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use distmuon::checkpoint::Saver;
#[cfg(feature = "cuda")]
use distmuon::comm::{Launch, Nccl};
use distmuon::comm::{Pending, ReduceOp, World};
use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig};
use distmuon::{Error, Result};
#[cfg(feature = "cuda")]
use distmuon_testing::host;
use distmuon_testing::models::{Fixed, Layers, gradients, weights};
use distmuon_testing::watched::{self, Event, watched};
use distmuon_testing::worlds::{self, cases};
use libtest_mimic::Arguments;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const CASES: &[worlds::Case] = cases![
    an_error_on_one_rank_fails_all_ranks,
    a_rank_that_returns_early_is_noticed_in_a_collective,
    a_panic_on_a_rank_reaches_the_caller,
    a_rank_that_misses_the_deadline_fails_the_world,
    different_calls_of_ranks_fail_naming_both,
    calls_in_different_groups_fail_naming_each,
    a_failure_is_reported_while_results_are_in_use,
    a_rank_that_dies_in_any_phase_stops_all_ranks_before_parameters_change,
    delays_at_any_call_do_not_change_results,
    a_rank_that_dies_during_a_save_leaves_a_complete_checkpoint,
    a_step_sends_the_minimum_number_of_bytes,
];

#[cfg(feature = "cuda")]
const NCCL_CASES: &[worlds::Case] = cases![
    errors_of_nccl_reach_all_ranks,
    a_call_whose_event_cannot_be_recorded_ends_the_world,
    work_queued_before_a_call_does_not_count_towards_the_deadline,
    nccl_rejects_devices_other_than_cuda,
    threads_over_nccl_train_as_copying_threads_do,
    models_of_threads_over_nccl_can_outlive_the_ranks,
    a_failure_of_a_thread_over_nccl_is_the_error_of_the_run,
    a_thread_over_nccl_that_returns_early_is_missed_before_the_deadline,
    a_device_without_memory_is_the_error_of_the_run_before_the_deadline,
    a_rank_that_waits_for_its_own_work_leaves_its_core_to_others,
    the_version_of_nccl_is_known_without_a_world,
];

fn main() {
    #[cfg(feature = "cuda")]
    host::use_test_library();
    let trials = worlds::trials(worlds::HERE, CASES);
    #[cfg(feature = "cuda")]
    let trials = trials.into_iter().chain(worlds::trials(&worlds::HERE[1..], NCCL_CASES)).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

const DEADLINE: Duration = Duration::from_secs(20);
const RANKS: usize = 3;
/// The rank that fails.
const VICTIM: usize = 1;

#[derive(Module, Debug)]
struct Net {
    matrices: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let net = Self {
            matrices: vec![linear(6, 6), linear(6, 6), linear(4, 9), linear(9, 4)],
            norm: LayerNormConfig::new(6).init(device),
            head: linear(20, 40),
        };
        net.map(&mut Fixed::new(5))
    }
}

/// A configuration with buckets of one or two parameters, so that a step has many points.
fn config(clip: bool) -> DistMuonConfig {
    let config = DistMuonConfig::new().with_bucket_mb(Some(0.0004));
    config.with_small_elements(32).with_max_norm(clip.then_some(1.0))
}

fn ranks<T: Send>(count: usize, run: impl Fn(World) -> Result<T> + Sync) -> Result<Vec<T>> {
    worlds::ranks_here(DEADLINE, count, run)
}

fn an_error_on_one_rank_fails_all_ranks() {
    // Before the optimizer is made, between steps, and in the middle of a collective.
    for point in 0..3 {
        let outcome = ranks(3, |world| {
            let fail = |now: usize| match world.rank() == 1 && point == now {
                true => Err(Error::EmptyModel),
                false => Ok(()),
            };
            fail(0)?;
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config(false).init(&world, &net)?;
            for step in 0..3 {
                let gradients = gradients(&net, step);
                net = optim.step(0.01, net, gradients)?;
                fail(1)?;
            }
            let ones = Tensor::<1>::ones([4], (&Device::default(), DType::F32));
            let pending = world.comm().all_reduce(ones.clone(), ReduceOp::Sum)?;
            fail(2)?;
            pending.wait()?;
            world.comm().all_reduce(ones, ReduceOp::Sum)?.wait().map(|_| ())
        });
        assert_eq!(outcome.unwrap_err(), Error::EmptyModel, "the cause, not its consequences");
    }
    // Other ranks get the failed rank and the cause. A rank that returns early has also failed.
    let seen = ranks(2, |world| {
        if world.rank() == 1 {
            return Ok(None);
        }
        Ok(world.comm().barrier().err())
    });
    let seen = seen.unwrap().swap_remove(0);
    assert!(
        matches!(&seen, Some(Error::PeerFailed { rank: 1, cause }) if cause.contains("returned"))
    );
}

/// The error comes well before the deadline, which is for ranks that are alive and late.
fn a_rank_that_returns_early_is_noticed_in_a_collective() {
    for victim in [0, 1] {
        let ones = || Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        let seen = ranks(RANKS, |world| {
            let sum = || -> Result<()> {
                world.comm().all_reduce(ones(), ReduceOp::Sum)?.wait()?;
                world.comm().synchronize()
            };
            sum()?;
            if world.rank() == victim {
                return Ok(None);
            }
            let start = Instant::now();
            Ok(sum().err().map(|error| (error, start.elapsed())))
        });
        for (rank, seen) in seen.unwrap().into_iter().enumerate() {
            match seen {
                None => assert_eq!(rank, victim),
                Some((Error::PeerFailed { rank, cause }, elapsed)) => {
                    println!("rank {victim} was missed after {elapsed:.1?}: {cause}");
                    assert_eq!(rank, victim);
                    assert!(elapsed < DEADLINE / 4, "{elapsed:?}: {cause}");
                }
                Some((other, _)) => panic!("{other}"),
            }
        }
    }
}

fn a_panic_on_a_rank_reaches_the_caller() {
    let panicked = std::panic::catch_unwind(|| {
        ranks(2, |world| {
            if world.rank() == 0 {
                panic!("a bug");
            }
            world.comm().barrier()
        })
    });
    let message = panicked.unwrap_err();
    assert_eq!(message.downcast_ref::<&str>(), Some(&"a bug"));
}

fn a_rank_that_misses_the_deadline_fails_the_world() {
    let short = Duration::from_millis(500);
    let outcome = worlds::ranks_here(short, 2, |world| {
        if world.rank() == 1 {
            std::thread::sleep(4 * short);
        }
        world.comm().barrier()
    });
    let error = outcome.unwrap_err();
    assert!(
        matches!(&error, Error::PeerFailed { rank: 1, cause } if cause.contains("within")),
        "{error}"
    );
}

fn different_calls_of_ranks_fail_naming_both() {
    let calls = ranks(2, |world| {
        let ones = Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        let started = match world.rank() {
            0 => world.comm().all_reduce(ones, ReduceOp::Sum),
            _ => world.comm().broadcast(ones, 0),
        };
        let finished = started.and_then(Pending::wait).and_then(|_| world.comm().synchronize());
        Ok(finished.unwrap_err())
    });
    for error in calls.unwrap() {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        assert!(
            calls.contains("rank 0: all_reduce") && calls.contains("rank 1: broadcast"),
            "{calls}"
        );
    }
}

fn calls_in_different_groups_fail_naming_each() {
    let (short, errors) = (Duration::from_secs(3), Mutex::new(vec![]));
    let run = worlds::ranks_here(short, 2, |world| {
        // The same ranks in the reverse order.
        let group = world.comm().split(0, 1 - world.rank())?;
        let comm = if world.is_main() { world.comm() } else { &group };
        let ones = Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        let started = comm.all_reduce(ones, ReduceOp::Sum);
        let finished = started.and_then(Pending::wait).and_then(|_| comm.synchronize());
        errors.lock().unwrap().push(finished.clone());
        finished
    });
    run.unwrap_err();
    let errors = errors.into_inner().unwrap();
    assert_eq!(errors.len(), 2);
    for error in errors {
        match error.unwrap_err() {
            Error::Mismatch { calls } => {
                let are_named = |rank| calls.contains(&format!("rank {rank}: all_reduce"));
                let groups = calls.matches(" in group ").count();
                assert!(are_named(0) && are_named(1) && groups == 2, "{calls}");
            }
            other => panic!("{other}"),
        }
    }
}

fn a_failure_is_reported_while_results_are_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.ckpt");
    let (seen, started) = (Mutex::new(vec![]), Barrier::new(RANKS));
    let outcome = ranks(RANKS, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = config(false).init(&world, &net)?;
        optim.save(&path, &net, &1)?;
        if world.rank() == VICTIM {
            started.wait();
            return Err(Error::EmptyModel);
        }
        let comm = world.comm();
        let ones = || Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        let pending = comm.all_gather(ones(), &[4; RANKS])?;
        started.wait();
        let result = pending.wait();
        let later = [
            comm.synchronize().err(),
            comm.all_reduce(ones(), ReduceOp::Sum).and_then(Pending::wait).err(),
            optim.save(&path, &net, &2).err(),
        ];
        seen.lock().unwrap().push((result.is_ok(), later));
        result.map(|_| ())
    });
    assert_eq!(outcome.unwrap_err(), Error::EmptyModel);
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), RANKS - 1);
    for (in_use, [synchronized, called, saved]) in seen {
        // If the host waits, it does not return a result.
        assert_eq!(in_use, worlds::results_may_be_early());
        let is_reported =
            |error: &Option<Error>| matches!(error, Some(Error::PeerFailed { rank: VICTIM, .. }));
        assert!(is_reported(&called) && is_reported(&saved), "{called:?}, {saved:?}");
        assert!(!in_use || is_reported(&synchronized), "{synchronized:?}");
    }
    let loaded = ranks(1, |world| {
        let net = Net::new(world.device());
        let optim = config(false).init(&world, &net)?;
        let (_, _, progress): (_, _, usize) = optim.load(&path, net)?;
        Ok(progress)
    });
    assert_eq!(loaded.unwrap(), [1]);
}

/// A program can ask it before it decides how many ranks share a device.
#[cfg(feature = "cuda")]
fn the_version_of_nccl_is_known_without_a_world() {
    let version = Nccl::installed_version().unwrap();
    let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
    let names = ranks(1, |world| Ok(world.comm().version())).unwrap();
    assert!(names[0].contains(&format!("NCCL {major}.{minor}.{patch} ")), "{}", names[0]);
}

/// NCCL has accepted a call and then can't carry it out. The rank on which the call failed returns
/// NCCL's error, and the other ranks return the error of that rank instead of their NCCL's.
#[cfg(feature = "cuda")]
fn errors_of_nccl_reach_all_ranks() {
    let seen = ranks(RANKS, |world| {
        let ones = || Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        world.comm().all_reduce(ones(), ReduceOp::Sum)?.wait()?;
        world.comm().barrier()?;
        if world.rank() == VICTIM {
            host::fail_next();
        }
        let summed = world.comm().all_reduce(ones(), ReduceOp::Sum).and_then(Pending::wait);
        Ok(summed.and_then(|_| world.comm().synchronize()).unwrap_err())
    });
    for (rank, error) in seen.unwrap().into_iter().enumerate() {
        let text = error.to_string();
        assert!(text.contains("the link is down"), "rank {rank}: {text}");
        match error {
            Error::Engine { engine: "nccl", rank: VICTIM, .. } if rank == VICTIM => {}
            Error::PeerFailed { rank: VICTIM, .. } if rank != VICTIM => {}
            other => panic!("rank {rank}: {other:?}"),
        }
    }
}

/// NCCL has accepted a call, and the driver fails to record the event behind the call, without
/// which the engine can't know when the call's buffers are free.
#[cfg(feature = "cuda")]
fn a_call_whose_event_cannot_be_recorded_ends_the_world() {
    let seen = ranks(RANKS, |world| {
        let ones = || Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        world.comm().all_gather(ones(), &[4; RANKS])?.wait()?;
        world.comm().barrier()?;
        if world.rank() == VICTIM {
            host::fail_next_event();
            return Ok(world.comm().all_gather(ones(), &[4; RANKS]).unwrap_err());
        }
        // The victim's part is in flight: the call itself may succeed.
        world.comm().all_gather(ones(), &[4; RANKS]).and_then(Pending::wait).ok();
        Ok(world.comm().barrier().unwrap_err())
    });
    for (rank, error) in seen.unwrap().into_iter().enumerate() {
        let text = error.to_string();
        assert!(text.contains("the driver is out of memory"), "rank {rank}: {text}");
        assert_eq!(matches!(error, Error::PeerFailed { rank: VICTIM, .. }), rank != VICTIM);
    }
}

/// The deadline is for other ranks: local work that was queued before a call may take longer.
#[cfg(feature = "cuda")]
fn work_queued_before_a_call_does_not_count_towards_the_deadline() {
    let deadline = Duration::from_millis(500);
    let outcome = worlds::ranks_here(deadline, 2, |world| {
        let ones = Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        world.comm().barrier()?;
        // Longer than the deadline and the time that a rank has to report that it has passed.
        host::delay_next(Duration::from_millis(3500));
        let gathered = world.comm().all_gather(ones, &[4; 2])?.wait()?;
        world.comm().synchronize()?;
        Ok(gathered.dims())
    });
    assert_eq!(outcome.unwrap(), [[8]; 2]);
}

#[cfg(feature = "cuda")]
fn nccl_rejects_devices_other_than_cuda() {
    let address = Some(("127.0.0.1".to_owned(), 0));
    let launch = Launch { rank: 0, world_size: 1, local_rank: 0, address, secret: String::new() };
    let error = World::nccl(&launch, Device::default(), DEADLINE).unwrap_err().to_string();
    assert!(error.contains("is not a CUDA device") && error.contains("the engine mpi"), "{error}");
}

/// On CUDA devices of their own, `World::threads` connects ranks in this way.
#[cfg(feature = "cuda")]
fn threads_over_nccl_train_as_copying_threads_do() {
    let train = |world: World| -> Result<_> {
        let net = Layers::square(3, 32, world.device()).map(&mut Fixed::new(1));
        let (mut net, mut optim) = DistMuonConfig::new().start(&world, net)?;
        for step in 0..3 {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
        }
        world.comm().synchronize()?;
        Ok((world.comm().engine_name(), weights(&net)))
    };
    let copying = World::threads(vec![Device::default().autodiff(); RANKS], train);
    let copying: Vec<_> = copying.unwrap();
    let start = Instant::now();
    let over_nccl = host::threads(DEADLINE, RANKS, train).unwrap();
    // No rank waits at the end for one that can't depart.
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
    for (nccl, threads) in over_nccl.iter().zip(&copying) {
        assert_eq!((nccl.0, threads.0), ("nccl", "threads"));
        assert!(nccl.1 == threads.1);
    }
}

/// A model whose passes reduce its gradients has its world, and is returned from the ranks.
#[cfg(feature = "cuda")]
fn models_of_threads_over_nccl_can_outlive_the_ranks() {
    let start = Instant::now();
    let models = host::threads(DEADLINE, RANKS, |world| -> Result<_> {
        let net = Layers::square(3, 32, world.device()).map(&mut Fixed::new(1));
        let config = DistMuonConfig::new().with_overlap(true);
        Ok(config.start(&world, net)?.0)
    });
    drop(models.unwrap());
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
}

#[cfg(feature = "cuda")]
fn a_failure_of_a_thread_over_nccl_is_the_error_of_the_run() {
    let outcome = host::threads(DEADLINE, RANKS, |world| match world.rank() {
        VICTIM => Err(Error::EmptyModel),
        _ => world.comm().barrier(),
    });
    assert!(matches!(outcome, Err(Error::EmptyModel)), "{outcome:?}");
}

#[cfg(feature = "cuda")]
fn a_thread_over_nccl_that_returns_early_is_missed_before_the_deadline() {
    let start = Instant::now();
    let outcome = host::threads(DEADLINE, RANKS, |world| match world.rank() {
        VICTIM => Ok(()),
        _ => world.comm().barrier(),
    });
    assert!(matches!(outcome, Err(Error::PeerFailed { rank: VICTIM, .. })), "{outcome:?}");
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
}

#[cfg(feature = "cuda")]
fn a_device_without_memory_is_the_error_of_the_run_before_the_deadline() {
    let start = Instant::now();
    let fails = |rank: usize| if rank == VICTIM { Err(Error::EmptyModel) } else { Ok(()) };
    let outcome = host::threads_with(DEADLINE, RANKS, fails, |world| world.comm().barrier());
    assert!(matches!(outcome, Err(Error::EmptyModel)), "{outcome:?}");
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
}

#[cfg(feature = "cuda")]
fn a_rank_that_waits_for_its_own_work_leaves_its_core_to_others() {
    let polls = host::threads(DEADLINE, 2, |world| {
        world.comm().barrier()?;
        host::delay_next(Duration::from_millis(500));
        let before = host::polls();
        let ones = Tensor::<1>::ones([4], (&Device::default(), DType::F32));
        world.comm().all_gather(ones, &[4; 2])?.wait()?;
        Ok(host::polls() - before)
    });
    for polls in polls.unwrap() {
        // A millisecond of yielding, then pauses of up to one.
        println!("{polls} polls in half a second");
        assert!((1..20_000).contains(&polls), "{polls}");
    }
}

/// The events of the victim in one step, in order.
fn events_of_a_step(clip: bool) -> Vec<Event> {
    let seen = Arc::new(Mutex::new(vec![]));
    let run = ranks(RANKS, |world| {
        let net = Net::new(world.device());
        let (seen, active) = (seen.clone(), Arc::new(AtomicUsize::new(0)));
        let world = watched(&world, {
            let active = active.clone();
            move |event| {
                if event.rank == VICTIM && active.load(Ordering::SeqCst) == 1 {
                    seen.lock().unwrap().push(event);
                }
                Ok(())
            }
        });
        let mut optim = config(clip).init(&world, &net)?;
        active.store(1, Ordering::SeqCst);
        let gradients = gradients(&net, 0);
        optim.step(0.01, net, gradients).map(|_| ())
    });
    run.unwrap();
    Arc::into_inner(seen).unwrap().into_inner().unwrap()
}

/// The way in which the victim ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Panic,
    Error,
}

fn a_rank_that_dies_in_any_phase_stops_all_ranks_before_parameters_change() {
    for (clip, end) in [(false, End::Panic), (true, End::Error)] {
        let events = events_of_a_step(clip);
        let last_gather = events.iter().rposition(|e| e.collective == "all_gather" && !e.waits);
        let last_gather = last_gather.expect("shards are gathered");
        for phase in ["reduce_scatter", "all_reduce", "all_gather"] {
            let both = [true, false].map(|waits| {
                events.iter().any(|event| event.collective == phase && event.waits == waits)
            });
            assert_eq!(both, [true; 2], "{phase} in {events:?}");
        }
        for fatal in events.iter().map(|event| event.number) {
            let outcomes = Mutex::new(vec![]);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                ranks(RANKS, |world| {
                    let net = Net::new(world.device());
                    let watched = watched(&world, move |event| {
                        match (event.rank, event.number) == (VICTIM, fatal) {
                            true if end == End::Panic => panic!("killed"),
                            true => Err(Error::EmptyModel),
                            false => Ok(()),
                        }
                    });
                    let mut optim = config(clip).init(&watched, &net)?;
                    let gradients = gradients(&net, 0);
                    let stepped = optim.step(0.01, net, gradients);
                    let stepped =
                        stepped.and_then(|net| watched.comm().synchronize().map(|()| net));
                    outcomes.lock().unwrap().push((world.rank(), stepped.as_ref().err().cloned()));
                    stepped.map(|_| ())
                })
            }));
            match end {
                End::Panic => {
                    let panic = run.expect_err("the panic reaches the caller");
                    assert_eq!(panic.downcast_ref::<&str>(), Some(&"killed"));
                }
                End::Error => assert_eq!(run.unwrap().unwrap_err(), Error::EmptyModel),
            }
            let event = events.iter().find(|event| event.number == fatal).unwrap();
            for (rank, error) in outcomes.into_inner().unwrap() {
                match error {
                    Some(Error::PeerFailed { rank: VICTIM, .. }) if rank != VICTIM => {}
                    Some(Error::EmptyModel) if rank == VICTIM && end == End::Error => {}
                    // The victim had sent all of its data: the others may finish.
                    None if rank != VICTIM && fatal > events[last_gather].number => {}
                    other => panic!("rank {rank} returned {other:?}; {event:?}, {end:?}"),
                }
            }
        }
    }
}

fn delays_at_any_call_do_not_change_results() {
    let trained = |count: usize, delays: bool| {
        let nets = ranks(count, |world| {
            let mut net = Net::new(world.device());
            let rng = Mutex::new(StdRng::seed_from_u64(world.rank() as u64));
            let world = watched(&world, move |_| {
                if delays {
                    let pause = rng.lock().unwrap().random_range(0..150);
                    std::thread::sleep(Duration::from_micros(pause));
                }
                Ok(())
            });
            let mut optim = config(false).init(&world, &net)?;
            for step in 0..100 {
                let gradients = gradients(&net, step);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(weights(&net))
        });
        nets.unwrap()
    };
    let alone = trained(1, false).swap_remove(0);
    for weights in trained(4, true) {
        assert!(weights == alone);
    }
}

/// A way to save a run and its progress.
type Save = fn(&DistModuleOptimizer, &Path, &Net, usize) -> Result<()>;

fn a_rank_that_dies_during_a_save_leaves_a_complete_checkpoint() {
    let at_once: Save = |optim, path, net, progress| optim.save(path, net, &progress);
    let in_background: Save = |optim, path, net, progress| {
        let mut saver = Saver::new();
        saver.save(path, net, optim, &progress)?;
        saver.wait()
    };
    let in_parts: Save = |optim, path, net, progress| {
        let mut saver = Saver::new().with_parts().with_patience(Duration::from_secs(1));
        saver.save(path, net, optim, &progress)?;
        saver.wait()
    };
    for (name, save) in [("file", at_once), ("background", in_background), ("parts", in_parts)] {
        a_rank_that_dies_during_a_save(name, save);
    }
}

/// Lets a rank fail at each event of a save, one after the other.
fn a_rank_that_dies_during_a_save(name: &str, save: Save) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("run.{name}"));
    let save = |path: &Path, progress: usize, fatal: Option<usize>| {
        let events = Arc::new(AtomicUsize::new(0));
        let saved = ranks(2, |world| {
            let net = Net::new(world.device());
            let (events, counting) = (events.clone(), Arc::new(AtomicUsize::new(0)));
            let watched = watched(&world, {
                let counting = counting.clone();
                move |event| {
                    if event.rank == VICTIM && counting.load(Ordering::SeqCst) == 1 {
                        let number = events.fetch_add(1, Ordering::SeqCst);
                        if Some(number) == fatal {
                            return Err(Error::EmptyModel);
                        }
                    }
                    Ok(())
                }
            });
            let optim = config(false).init(&watched, &net)?;
            counting.store(1, Ordering::SeqCst);
            save(&optim, path, &net, progress)
        });
        (saved, events.load(Ordering::SeqCst))
    };
    let (saved, events) = save(&path, 0, None);
    saved.unwrap();
    assert!(events > 2, "{name}: {events}");
    let mut last = 0;
    for fatal in 0..events {
        let (saved, _) = save(&path, fatal + 1, Some(fatal));
        assert_eq!(saved.unwrap_err(), Error::EmptyModel, "{name}, event {fatal}");
        let loaded = ranks(3, |world| {
            let net = Net::new(world.device());
            let optim = config(false).init(&world, &net)?;
            let (net, _, progress): (_, _, usize) = optim.load(&path, net)?;
            Ok((weights(&net), progress))
        });
        let (loaded, progress) = loaded.unwrap().swap_remove(0);
        assert!(loaded == weights(&Net::new(&Device::default().autodiff())), "{name}");
        assert!(progress == last || progress == fatal + 1, "{name}, event {fatal}: {progress}");
        last = progress;
    }
    // The next save that succeeds leaves nothing of those that failed.
    save(&path, events + 1, None).0.unwrap();
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|one| one.unwrap()).collect();
    assert_eq!(left.len(), 1, "{name}: no temporary file is left, {left:?}");
    if path.is_dir() {
        let mut parts: Vec<_> =
            std::fs::read_dir(&path).unwrap().map(|one| one.unwrap().file_name()).collect();
        parts.sort();
        assert_eq!(parts.len(), 3, "an index and two parts: {parts:?}");
    }
}

fn a_step_sends_the_minimum_number_of_bytes() {
    let p = 16 * 32 * 32 * 4;
    for count in [1, 2, 4, 8] {
        let minimum = 2 * p * (count - 1) / count;
        // NCCL's reductions need equal shards: those of five matrices on four ranks are padded.
        let is_exact = worlds::is_exact();
        let is_minimal =
            |sent: usize| sent == minimum || !is_exact && (minimum..=2 * minimum).contains(&sent);
        let sent = ranks(count, |world| {
            let net = world.broadcast(Layers::square(16, 32, world.device()))?;
            let (comm, traffic) = watched::counted(world.communicator());
            let watched = World::new(comm, world.device().clone());
            let mut optim =
                DistMuonConfig::new().with_bucket_mb(Some(0.02)).init(&watched, &net)?;
            traffic.lock().unwrap().clear();
            let mut gradients = GradientsParams::new();
            for layer in &net.layers {
                gradients.register(layer.weight.id, layer.weight.val().inner());
            }
            optim.step(0.01, net, gradients)?;
            let mut traffic = traffic.lock().unwrap();
            let large = ["reduce_scatter", "all_gather"].map(|large| traffic.remove(large));
            Ok([traffic.values().sum::<usize>(), large.into_iter().flatten().sum()])
        });
        for [small, large] in sent.unwrap() {
            assert!(is_minimal(large), "{count} ranks: {large}");
            // Flags of gradients that are finite and of those that are present: two floats per
            // parameter.
            assert!(small <= 2 * 16 * 2 * 4, "{count} ranks: {small} bytes of flags");
        }
    }
}
