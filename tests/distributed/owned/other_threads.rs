//! Other threads of a rank, while a pass waits for other ranks.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use distmuon::distributed::{DistModuleOptimizer, Layout, Place, Publish};
use distmuon::{Error, Result, World};
use distmuon_testing::excused;
use distmuon_testing::watched::watched;
use distmuon_testing::worlds;

use super::{Net, config, layout, tokens, with_checkpoints};
use crate::ranks_here;

/// The time after which a report that has not come counts as one that waits for the pass.
const PATIENCE: Duration = Duration::from_secs(10);

/// Asks another thread for a report at every event of a rank's pass, and waits for it.
#[derive(Clone, Default)]
struct Reports {
    lines: Arc<Mutex<Option<Lines>>>,
    came: Arc<AtomicUsize>,
    missing: Arc<AtomicUsize>,
}

struct Lines {
    questions: Sender<()>,
    answers: Receiver<()>,
}

/// Ends the thread that reports, also after a panic.
struct HangUp<'a>(&'a Reports);

impl Drop for HangUp<'_> {
    fn drop(&mut self) {
        *self.0.lines.lock().unwrap() = None;
    }
}

impl Reports {
    fn ask(&self) {
        let mut lines = self.lines.lock().unwrap();
        let Some(Lines { questions, answers }) = &*lines else { return };
        questions.send(()).unwrap();
        match answers.recv_timeout(PATIENCE) {
            Ok(()) => _ = self.came.fetch_add(1, SeqCst),
            Err(_) => {
                self.missing.fetch_add(1, SeqCst);
                *lines = None;
            }
        }
    }

    /// Runs a pass, with reports at all of its events.
    fn during<T>(
        &self,
        optim: &DistModuleOptimizer,
        pass: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let ((questions, asked), (answered, answers)) = (channel(), channel());
        *self.lines.lock().unwrap() = Some(Lines { questions, answers });
        std::thread::scope(|scope| {
            let _hang_up = HangUp(self);
            scope.spawn(move || {
                for () in asked {
                    assert!(optim.memory().total.now > 0);
                    if answered.send(()).is_err() {
                        return;
                    }
                }
            });
            pass()
        })
    }
}

/// A layout, and the time at which the parameters of a step arrive.
type Case = (fn(Layout) -> Layout, Publish);

pub fn reports_do_not_wait_for_passes_that_wait_for_other_ranks() {
    let cases: [Case; 4] = [
        (|layout| layout, Publish::Now),
        (|layout| layout.rows("dp"), Publish::AtFirstUse),
        (|layout| layout.overlap_backward().allow_unused(), Publish::Now),
        // Nothing is sent but the parameters of the step before.
        (|layout| layout.with_place(Place::replicated("")), Publish::AtFirstUse),
    ];
    for (lay, publish) in cases {
        let run = ranks_here(2, |world| {
            let reports = Reports::default();
            let asking = reports.clone();
            let world = watched(&with_checkpoints(&world), move |_| {
                asking.ask();
                Ok(())
            });
            let (device, layout) = (world.device(), lay(layout(&world)));
            let mut net = layout.shard(Net::new(device))?;
            let mut optim = config().with_publish(publish).init_on(&layout, &net)?;
            for step in 0..2 {
                let gradients = reports.during(&optim, || {
                    let loss = |batch| net.loss(tokens(world.rank(), batch, device));
                    layout.accumulate(&loss(10 + step), &net)?;
                    layout.backward(&loss(step), &net)
                })?;
                net = optim.step(0.01, net, gradients)?;
            }
            reports.during(&optim, || {
                net.evaluated(&world, 0);
                layout.unshard(&net)?;
                layout.discard()
            })?;
            Ok((reports.came.load(SeqCst), reports.missing.load(SeqCst)))
        });
        for (came, missing) in run.unwrap() {
            assert_eq!(missing, 0, "{publish:?}");
            assert!(came > 3, "{came}");
        }
    }
}

/// Waits for another rank, for a while.
fn wait_for(flag: &AtomicBool) {
    let start = Instant::now();
    while !flag.load(SeqCst) && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
}

/// The order of two threads' calls would be left to chance, and be another on each rank.
pub fn a_divided_model_in_two_threads_of_a_rank_at_once_is_rejected() {
    if worlds::results_may_be_early() {
        return excused("a pass that does not wait for other ranks is soon over");
    }
    let calls: [fn(&World, &Layout, &Net); 3] = [
        |world, _, net| drop(net.evaluated(world, 0)),
        |_, layout, net| drop(layout.unshard(net)),
        |_, layout, _| _ = layout.discard_pass(),
    ];
    calls.into_iter().for_each(is_rejected_in_another_thread);
}

fn is_rejected_in_another_thread(call: fn(&World, &Layout, &Net)) {
    let is_rejected = AtomicBool::new(false);
    let errors = ranks_here(2, |world| {
        let (begin, begun) = channel();
        let is_dividing = Arc::new(AtomicBool::new(true));
        let divides = is_dividing.clone();
        let world = watched(&with_checkpoints(&world), move |_| {
            // Later events have no listener.
            _ = (!divides.load(SeqCst)).then(|| begin.send(()));
            Ok(())
        });
        let layout = layout(&world);
        let net = layout.shard(Net::new(world.device()))?;
        is_dividing.store(false, SeqCst);
        let loss = || net.loss(tokens(world.rank(), 0, world.device()));
        let loss = match world.rank() {
            0 => std::thread::scope(|scope| {
                let (other, world, layout) = (net.clone(), &world, &layout);
                scope.spawn(move || {
                    begun.recv().unwrap();
                    call(world, layout, &other);
                });
                loss()
            }),
            _ => {
                // The calls of rank 0 wait for this rank.
                wait_for(&is_rejected);
                loss()
            }
        };
        is_rejected.store(true, SeqCst);
        Ok(layout.backward(&loss, &net).expect_err("two threads use the model"))
    });
    let [of_rank_0, of_rank_1] = &errors.unwrap()[..] else { panic!("there are two ranks") };
    assert!(matches!(of_rank_0, Error::Usage { .. }), "{of_rank_0}");
    assert!(matches!(of_rank_1, Error::PeerFailed { rank: 0, .. }), "{of_rank_1}");
    for error in [of_rank_0, of_rank_1] {
        assert!(error.to_string().contains("two threads of a rank"), "{error}");
    }
}

/// Models that another thread may evaluate while a pass waits: a copy from `unshard`, and one whose
/// parameters every rank has.
pub fn a_whole_model_may_be_evaluated_by_another_thread_while_a_pass_waits() {
    for is_owned in [true, false] {
        let is_evaluated = AtomicBool::new(false);
        let run = ranks_here(2, |world| {
            let layout = match is_owned {
                true => layout(&world),
                false => Layout::from(&world).overlap_backward().with_muon(config().muon),
            };
            let net = layout.shard(Net::new(world.device()))?;
            let whole = if is_owned { layout.unshard(&net)? } else { net.clone() };
            let expected = whole.evaluated(&world, 0);
            let loss = || net.loss(tokens(world.rank(), 0, world.device()));
            let gradients = match world.rank() {
                0 => std::thread::scope(|scope| {
                    let (world, is_evaluated) = (&world, &is_evaluated);
                    let loss = (!is_owned).then(loss);
                    scope.spawn(move || {
                        assert!(whole.evaluated(world, 0) == expected);
                        is_evaluated.store(true, SeqCst);
                    });
                    let loss = loss.unwrap_or_else(|| net.loss(tokens(0, 0, world.device())));
                    layout.backward(&loss, &net)
                }),
                _ => {
                    // The pass of rank 0 waits for this rank.
                    wait_for(&is_evaluated);
                    layout.backward(&loss(), &net)
                }
            };
            gradients.map(|_| is_evaluated.load(SeqCst))
        });
        assert_eq!(run.unwrap(), [true; 2], "owned: {is_owned}");
    }
}
