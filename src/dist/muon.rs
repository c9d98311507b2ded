//! Muon on many ranks, one parameter at a time.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use burn::module::Module;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

use super::agree::{digest, unite};
use super::comm::{Communicator, Threads};
use super::config::{DistMuonConfig, Gradients};
use super::world::message;
use super::{DEADLINE, World};
use crate::error::{Error, Result};
use crate::muon::{Muon, MuonConfig, MuonState};
use crate::skipped::{Counting, SkippedSteps};

/// Muon on many ranks as a Burn [`Optimizer`]: each parameter has one owner, which alone keeps its
/// momentum and orthogonalises it, and publishes the new value.
///
/// For what owns its training loop: Burn's [`ModuleOptimizer`] and the data parallelism of
/// burn-train. Where the loop is yours,
/// [`DistModuleOptimizer`](super::DistModuleOptimizer) does more. Burn hands over one parameter
/// at a time and wants it back before the next, so that there are, in contrast to there:
///
/// - no reduction: gradients have to be averaged already, and equal on all ranks;
/// - no batches of matrices of one shape;
/// - no two owners at work at once on a backend that computes when it is called (Flex); on those
///   that queue work, as CUDA does, queues overlap as far as a copy between devices lets them;
/// - no plan: of each new parameter, in the order in which they arrive, the owner is the rank
///   with the least work so far. It stays the owner, as the state says;
/// - no shared AdamW: what is not a matrix is updated by every rank;
/// - no message for several parameters: each takes a small one through rank 0, and its broadcast;
/// - no checkpoint of the whole: every rank has to save and load its own record. The record of a
///   single-device [`Muon`] can be loaded on all of them.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Distribution, Tensor}};
/// use distmuon::dist::{DistMuonConfig, Gradients, World};
///
/// let device = Device::default().autodiff();
/// World::threads([device.clone(), device], |world| {
///     let model = LinearConfig::new(8, 8).with_bias(false).init(world.device());
///     let model = world.broadcast(model)?;
///     let config = DistMuonConfig::new().with_gradients(Gradients::Averaged);
///     let mut optim = config.build(&world)?.init(&model)?; // a burn::optim::ModuleOptimizer
///     let x = Tensor::<2>::ones([4, 8], world.device());
///     let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
///     let model = optim.step(1e-3, model, grads);
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DistMuon {
    config: MuonConfig,
    rule: Muon,
    ranks: Ranks,
}

/// What [`DistMuon`] remembers of a parameter. Its record has what that of [`MuonState`] has, and the
/// scalars `owner` and `arrival`.
#[derive(Clone, Debug)]
pub struct DistMuonState<const D: usize> {
    /// The state of the rule: at the owner that of the parameter; elsewhere the momentum has no
    /// elements.
    pub muon: MuonState<D>,
    /// Owner and place in the order of arrival; none when the state is that of a single device.
    pub place: Option<Place>,
}

/// Where a parameter belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank that updates it.
    pub owner: usize,
    /// How many parameters came before it.
    pub arrival: usize,
}

/// How a call of [`Optimizer::step`] finds its rank.
#[derive(Clone, Debug)]
enum Ranks {
    Own(Arc<Rank>),
    Threads(Arc<Mutex<Seats>>),
}

/// Ranks that are taken by threads as they arrive.
#[derive(Debug)]
struct Seats {
    free: Vec<Threads>,
    taken: HashMap<ThreadId, Arc<Rank>>,
}

/// One rank, and the work that it has given to all of them.
#[derive(Debug)]
struct Rank {
    comm: Arc<dyn Communicator>,
    dealt: Mutex<Dealt>,
}

#[derive(Debug)]
struct Dealt {
    arrivals: usize,
    loads: Vec<f64>,
}

impl DistMuonConfig {
    /// Muon for the matrices of one rank, to be combined by hand or by [`DistMuon::init`]. Of the
    /// configuration, only the rules for matrices count.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a setting that no run can use, for gradients that are not
    /// [`Averaged`](Gradients::Averaged), and for `max_norm`.
    pub fn build(&self, world: &World) -> Result<DistMuon> {
        let rank = Rank::new(world.engine());
        self.build_on(Ranks::Own(Arc::new(rank)))
    }

    /// [`build`](Self::build) for threads that are not started by [`World::threads`], such as those
    /// of burn-train's data parallelism: they share clones of one instance. The first threads that
    /// step a parameter become the ranks, in the order of their arrival, and stay so. A rank that
    /// dies is noticed after [`DEADLINE`].
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build), and [`Error::Setting`] for no ranks.
    pub fn build_for_threads(&self, ranks: usize) -> Result<DistMuon> {
        if ranks == 0 {
            return Err(Error::Setting {
                setting: "ranks",
                value: "0".into(),
                expected: "at least 1: a world has at least one rank",
            });
        }
        let mut free = Threads::world(&vec![Device::default(); ranks], DEADLINE);
        free.reverse();
        let seats = Seats { free, taken: HashMap::new() };
        self.build_on(Ranks::Threads(Arc::new(Mutex::new(seats))))
    }

    fn build_on(&self, ranks: Ranks) -> Result<DistMuon> {
        let refuse =
            |setting, value: String, expected| Err(Error::Setting { setting, value, expected });
        if self.gradients != Gradients::Averaged {
            let expected = "`Averaged`: an optimizer of single parameters can't reduce the others";
            return refuse("gradients", format!("{:?}", self.gradients), expected);
        }
        if let Some(norm) = self.max_norm {
            let expected = "empty: an optimizer of single parameters does not see all gradients";
            return refuse("max_norm", norm.to_string(), expected);
        }
        let config = self.muon.clone();
        Ok(DistMuon { rule: config.try_build()?, config, ranks })
    }
}

impl DistMuon {
    /// An optimizer for a whole model: hidden matrices by this one, the rest by AdamW on every rank.
    ///
    /// # Errors
    ///
    /// As [`MuonConfig::route`].
    pub fn init<M: Module>(&self, model: &M) -> Result<ModuleOptimizer> {
        let routing = self.config.route(model)?;
        Ok(routing.init_with(|rule| Self { rule, ..self.clone() }))
    }

    /// The steps that left this rank's parameters untouched; of threads that share one instance, those of all.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        self.rule.skipped_steps()
    }

    fn try_step<const D: usize>(
        &self,
        rank: &Rank,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<DistMuonState<D>>,
    ) -> Result<(Tensor<D>, DistMuonState<D>)> {
        let (shape, device, comm) = (parameter.dims(), parameter.device(), &*rank.comm);
        let (muon, place) = state.map_or((None, None), |state| (Some(state.muon), state.place));
        let place = match place {
            Some(place) => place,
            None => rank.deal(self.rule.operations(&shape, parameter.dtype(), &device)?),
        };
        self.check(comm, &shape, lr, place, muon.as_ref())?;
        let (own, muon) = if place.owner == comm.rank() {
            self.rule.try_step(lr, parameter, grad, muon)?
        } else {
            let MuonState { skipped, time, place, .. } =
                muon.unwrap_or_else(|| MuonState::new([0; D], parameter.dtype(), &device));
            let momentum = Tensor::empty([0; D], (&device, parameter.dtype()));
            (parameter, MuonState { momentum, skipped, time: time + 1, place })
        };
        let published = comm.broadcast(own.reshape([-1]), place.owner)?.wait()?;
        let updated = published.to_device(&device).reshape(shape);
        Ok((updated, DistMuonState { muon, place: Some(place) }))
    }

    /// Makes sure that all ranks are at the same parameter and learning rate, and that the owner has its momentum.
    fn check<const D: usize>(
        &self,
        comm: &dyn Communicator,
        shape: &[usize; D],
        lr: LearningRate,
        Place { owner, arrival }: Place,
        state: Option<&MuonState<D>>,
    ) -> Result<()> {
        let (rank, path) = (comm.rank(), self.rule.parameter());
        let refuse = |reason: String| {
            let remedy = "load on every rank the record that it has saved, in a world of that size";
            Err(Error::Parameter { parameter: path.to_owned(), rank, reason, remedy })
        };
        if owner >= comm.size() {
            return refuse(format!("its owner is rank {owner}, and there are {}", comm.size()));
        }
        if let Some(state) = state.filter(|state| owner == rank && state.momentum.dims() != *shape)
        {
            return refuse(format!("its momentum is {:?} at its owner", state.momentum.dims()));
        }
        let call =
            format!("step {arrival} `{path}` {shape:?} of rank {owner} at rate {}", lr as f32);
        if unite(comm, vec![], digest(&call))?.is_some() {
            return Ok(());
        }
        let calls = comm.all_gather_bytes(call.clone().into_bytes())?;
        let other = calls.iter().position(|other| other != call.as_bytes());
        let other = other.expect("their digests differ");
        let theirs = String::from_utf8_lossy(&calls[other]);
        Err(Error::Mismatch { calls: format!("rank {rank}: {call}, rank {other}: {theirs}") })
    }
}

impl Ranks {
    /// The rank of the thread that asks, with results on the device.
    fn find(&self, device: &Device) -> Result<Arc<Rank>> {
        let seats = match self {
            Self::Own(rank) => return Ok(rank.clone()),
            Self::Threads(seats) => seats,
        };
        let mut seats = seats.lock().expect("no holder of the lock panics");
        let thread = thread::current().id();
        if let Some(rank) = seats.taken.get(&thread) {
            return Ok(rank.clone());
        }
        let Some(engine) = seats.free.pop() else {
            return Err(Error::Setting {
                setting: "ranks",
                value: seats.taken.len().to_string(),
                expected: "the number of threads that step a parameter, which are more",
            });
        };
        let rank = Arc::new(Rank::new(Arc::new(engine.on(device.clone()))));
        seats.taken.insert(thread, rank.clone());
        Ok(rank)
    }
}

impl Rank {
    fn new(comm: Arc<dyn Communicator>) -> Self {
        let loads = vec![0.0; comm.size()];
        Self { comm, dealt: Mutex::new(Dealt { arrivals: 0, loads }) }
    }

    /// The place of a new parameter: with the rank that has the least work, the first of several.
    /// All ranks deal alike, since the same parameters arrive in the same order.
    fn deal(&self, operations: f64) -> Place {
        let mut dealt = self.dealt.lock().expect("no holder of the lock panics");
        let loads = dealt.loads.iter().enumerate();
        let least = loads.min_by(|(_, a), (_, b)| a.total_cmp(b));
        let (owner, _) = least.expect("there is at least one rank");
        dealt.loads[owner] += operations;
        dealt.arrivals += 1;
        Place { owner, arrival: dealt.arrivals - 1 }
    }
}

impl Counting for DistMuon {
    fn start_counting<const D: usize>(&self, state: &mut DistMuonState<D>) {
        self.rule.start_counting(&mut state.muon);
    }
}

impl Optimizer for DistMuon {
    type State<const D: usize> = DistMuonState<D>;

    /// One step of one parameter, which all ranks take together.
    ///
    /// # Panics
    ///
    /// With the message of the error, on all ranks: as [`Muon`] does, and if a rank fails, is at
    /// another parameter, or lacks the momentum that it should have.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<DistMuonState<D>>,
    ) -> (Tensor<D>, Option<DistMuonState<D>>) {
        let rank = self.ranks.find(&parameter.device()).unwrap_or_else(|error| panic!("{error}"));
        let step = || self.try_step(&rank, lr, parameter, grad, state);
        // Nobody else watches a thread that is not of `World::threads`: a panic of Burn's, too, has to end the world.
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Ok((updated, state))) => (updated, Some(state)),
            Ok(Err(error)) => {
                rank.comm.fail(&error.to_string());
                panic!("{error}")
            }
            Err(panic) => {
                rank.comm.fail(&format!("it panicked: {}", message(panic.as_ref())));
                resume_unwind(panic)
            }
        }
    }

    fn to_device<const D: usize>(state: DistMuonState<D>, device: &Device) -> DistMuonState<D> {
        DistMuonState { muon: Muon::to_device(state.muon, device), place: state.place }
    }
}

impl<const D: usize> RecordState for DistMuonState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.muon.state_flatten(prefix, out);
        if let Some(Place { owner, arrival }) = self.place {
            out.push_scalar(prefix, "owner", owner.into());
            out.push_scalar(prefix, "arrival", arrival.into());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let mut scalar =
            |name| src.take_scalar(prefix, name).and_then(|value| value.try_into().ok());
        let place = match (scalar("owner"), scalar("arrival")) {
            (Some(owner), Some(arrival)) => Some(Place { owner, arrival }),
            _ => None,
        };
        Some(Self { muon: MuonState::state_unflatten(prefix, src, device)?, place })
    }
}
