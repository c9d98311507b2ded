//! Muon on many ranks, one parameter at a time.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use burn::module::Module;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

use super::config::{DistMuonConfig, Gradients};
use crate::comm::{Communicator, DEADLINE, Threads, World, digest, message, unite};
use crate::error::{Error, Result};
use crate::muon::{Muon, MuonConfig, MuonState};
use crate::parameters::ensure_on_one_device;
use crate::update::{Resumable, SkippedSteps};

/// Muon on many ranks as a Burn [`Optimizer`]: each parameter has one owner, the only rank that
/// stores and orthogonalises its momentum. The owner sends the new value to the other ranks.
///
/// Use it in a training loop that requires a Burn optimizer, such as in Burn's
/// [`ModuleOptimizer`] or the data parallelism of burn-train. In your own training loop, use
/// [`DistModuleOptimizer`](super::DistModuleOptimizer). Since Burn passes one parameter at a time,
/// and needs the new value before the next one, `DistMuon` is more limited:
///
/// - gradients are not reduced: they have to be averages, equal on all ranks;
/// - matrices of one shape do not form batches;
/// - owners do not work at the same time on a backend that computes when it is called (Flex). On a
///   backend that queues work, such as CUDA, the work of owners overlaps as far as copies between
///   devices allow;
/// - parameters do not have a plan: the owner of a new parameter is the rank with the least work so
///   far, in the order of the first steps. The owner is part of the state, and does not change;
/// - AdamW is not sharded: every rank updates all parameters that are not matrices;
/// - parameters and states are not compared after the first step, as
///   [`DistMuonConfig::check_every`] has other optimizers do, and there are no audits;
/// - messages are not combined: each parameter needs a small one through rank 0, and a broadcast;
/// - checkpoints are not collected: every rank has to save and load its own record. All ranks can
///   load the record of a single-device [`Muon`].
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Distribution, Tensor}};
/// use distmuon::comm::World;
/// use distmuon::distributed::{DistMuonConfig, Gradients};
///
/// let device = Device::default().autodiff();
/// World::threads([device.clone(), device], |world| {
///     let model = LinearConfig::new(8, 8).with_bias(false).init(world.device());
///     let model = world.broadcast(model)?;
///     let config = DistMuonConfig::new().with_gradients(Gradients::Averaged);
///     // A `burn::optim::ModuleOptimizer`.
///     let mut optim = config.per_parameter(&world)?.init(&model)?;
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
    ranks: RankChoice,
}

/// The state that [`DistMuon`] stores for one parameter. A record of it has the entries of a record
/// of [`MuonState`], and the scalars `owner` and `arrival` (the index of [`Ownership`]).
#[derive(Clone, Debug)]
pub struct DistMuonState<const D: usize> {
    /// The state of Muon. On ranks that do not own the parameter, the momentum has no elements.
    pub muon: MuonState<D>,
    /// Owner and index of the parameter; `None` if the state is of a single device.
    pub ownership: Option<Ownership>,
}

/// The owner of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The rank that updates the parameter.
    pub owner: usize,
    /// The number of parameters whose first step came earlier.
    pub index: usize,
}

/// The rank of a call of [`Optimizer::step`].
#[derive(Clone, Debug)]
enum RankChoice {
    Fixed(Arc<Rank>),
    Threads(Arc<Mutex<ThreadRanks>>),
}

/// Ranks that are assigned to threads in the order of their first step.
#[derive(Debug)]
struct ThreadRanks {
    free: Vec<Threads>,
    taken: HashMap<ThreadId, Arc<Rank>>,
}

/// One rank, and the work that it has assigned to all ranks.
#[derive(Debug)]
struct Rank {
    comm: Communicator,
    assigned: Mutex<Assigned>,
}

#[derive(Debug)]
struct Assigned {
    parameters: usize,
    loads: Vec<f64>,
}

/// Settings of whole models, and what an optimizer of single parameters expects of each.
const OF_WHOLE_MODELS: [(&str, &str); 9] = [
    ("gradients", "`Averaged`, since an optimizer of single parameters reduces nothing"),
    ("max_norm", "`None`, since an optimizer of single parameters clips no global norm"),
    ("loss_scale", "`None`, since an optimizer of single parameters skips no whole step"),
    ("audit_every", "0, since an optimizer of single parameters audits nothing"),
    ("balancing", "the default, since an optimizer of single parameters has no plan"),
    ("costs", "the default, since an optimizer of single parameters has no plan"),
    ("publish", "the default, since an optimizer of single parameters sends each result at once"),
    ("overlap", "the default, since an optimizer of single parameters sees no passes"),
    ("states_on", "the default, since an optimizer of single parameters moves no states"),
];

impl DistMuonConfig {
    /// Makes Muon as a Burn optimizer of single parameters on one rank, to be combined with other
    /// optimizers by hand or by [`DistMuon::init`]. Of this configuration, only the settings of
    /// matrices are used, and by `DistMuon::init` also AdamW's and the routing rules.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a setting that no run can use, for gradients that are not
    /// [`Averaged`](Gradients::Averaged), and for settings of whole models: `max_norm`,
    /// `loss_scale`, `audit_every`, `balancing`, `costs`, `publish`, `overlap` and
    /// `states_on`.
    pub fn per_parameter(&self, world: &World) -> Result<DistMuon> {
        let rank = Rank::new(world.communicator());
        self.build_on(RankChoice::Fixed(Arc::new(rank)))
    }

    /// Makes the optimizer of [`per_parameter`](Self::per_parameter) for threads that
    /// [`World::threads`] did not start, such as in burn-train's data parallelism.
    ///
    /// The threads share clones of the result. The first `ranks` threads that step a parameter
    /// become the ranks, in the order of their first step. The end of a rank is noticed after
    /// [`DEADLINE`].
    ///
    /// # Errors
    ///
    /// As [`per_parameter`](Self::per_parameter), and [`Error::Setting`] for zero ranks.
    pub fn per_parameter_on_threads(&self, ranks: usize) -> Result<DistMuon> {
        if ranks == 0 {
            return Err(Error::setting("ranks", 0, "at least 1"));
        }
        let mut free = Threads::world(&vec![Device::default(); ranks], DEADLINE);
        // `pop` then gives out rank 0 first.
        free.reverse();
        let ranks = ThreadRanks { free, taken: HashMap::new() };
        self.build_on(RankChoice::Threads(Arc::new(Mutex::new(ranks))))
    }

    fn build_on(&self, ranks: RankChoice) -> Result<DistMuon> {
        let values = |config: &Self| {
            let Self { gradients, max_norm, loss_scale, audit_every, .. } = config;
            let Self { balancing, costs, publish, overlap, states_on, .. } = config;
            [
                format!("{gradients:?}"),
                format!("{max_norm:?}"),
                format!("{loss_scale:?}"),
                audit_every.to_string(),
                format!("{balancing:?}"),
                format!("{costs:?}"),
                format!("{publish:?}"),
                format!("{overlap:?}"),
                format!("{states_on:?}"),
            ]
        };
        let possible = values(&Self::new().with_gradients(Gradients::Averaged));
        let settings = OF_WHOLE_MODELS.into_iter().zip(values(self)).zip(possible);
        for (((name, expected), got), possible) in settings {
            if got != possible {
                return Err(Error::setting(name, got, expected));
            }
        }
        let config = self.muon.clone();
        Ok(DistMuon { rule: config.try_build()?, config, ranks })
    }
}

impl DistMuon {
    /// Makes Burn's optimizer for a whole model: hidden matrices by this optimizer, the rest by
    /// AdamW on every rank.
    ///
    /// # Errors
    ///
    /// As [`MuonConfig::try_init`].
    pub fn init<M: Module>(&self, model: &M) -> Result<ModuleOptimizer> {
        ensure_on_one_device(model)?;
        let routing = self.config.route(model)?;
        routing.init_with(|rule| Self { rule, ..self.clone() })
    }

    /// Returns the counts of the steps that left parameters of this rank untouched. Threads that
    /// share one instance share the counts.
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
        let (shape, device, comm) = (parameter.dims(), parameter.device(), &rank.comm);
        let (muon, ownership) =
            state.map_or((None, None), |state| (Some(state.muon), state.ownership));
        // Kept in the state, so that a checkpoint continues with the same owners.
        let ownership = match ownership {
            Some(ownership) => ownership,
            None => rank.assign(self.rule.operations(&shape, parameter.dtype(), &device)?),
        };
        self.check(comm, &shape, lr, ownership, muon.as_ref())?;
        // All ranks take part in the broadcast, and only the owner has the state.
        let (updated, muon) = if ownership.owner == comm.rank() {
            self.rule.try_step(lr, parameter, grad, muon)?
        } else {
            let dtype = parameter.dtype();
            let state = muon.unwrap_or_else(|| self.rule.new_state([0; 3], [0; D], dtype, &device));
            // Burn keeps a state for each parameter on every rank: this one is empty.
            (parameter, state.elsewhere())
        };
        // Waited for at once: Burn's optimizer needs the parameter back before the next one.
        let published = comm.broadcast(updated.reshape([-1]), ownership.owner)?.wait()?;
        let updated = published.to_device(&device).reshape(shape);
        Ok((updated, DistMuonState { muon, ownership: Some(ownership) }))
    }

    /// Fails if the ranks are not at the same parameter and learning rate, or the owner does not
    /// have its momentum.
    fn check<const D: usize>(
        &self,
        comm: &Communicator,
        shape: &[usize; D],
        lr: LearningRate,
        Ownership { owner, index }: Ownership,
        state: Option<&MuonState<D>>,
    ) -> Result<()> {
        let (rank, path) = (comm.rank(), self.rule.parameter());
        let error = |reason: String| {
            let remedy = "load on every rank its saved record, in a world of the same size";
            Err(Error::parameter(path, rank, reason, remedy))
        };
        // A record of a larger world: without this check, the broadcast would name no rank.
        if owner >= comm.size() {
            let size = comm.size();
            return error(format!("its owner is not a rank: expected below {size}, got {owner}"));
        }
        if let Some(state) = state.filter(|state| owner == rank && state.shape() != *shape) {
            let actual = state.shape();
            return error(format!(
                "its momentum at the owner does not fit: expected {shape:?}, got {actual:?}"
            ));
        }
        let call = format!("step {index} `{path}` {shape:?} of rank {owner} at rate {}", lr as f32);
        // Digests first: the calls are sent only to say how they differ.
        if unite(comm, vec![], digest(&call))?.is_some() {
            return Ok(());
        }
        let calls = comm.all_gather_bytes(call.clone().into_bytes())?;
        let other = calls.iter().position(|other| other != call.as_bytes());
        let other = other.expect("the digests of the calls differ");
        let other_call = String::from_utf8_lossy(&calls[other]);
        Err(Error::Mismatch { calls: format!("rank {rank}: {call}, rank {other}: {other_call}") })
    }
}

impl RankChoice {
    /// The rank of the thread that asks, with results on the device.
    fn find(&self, device: &Device) -> Result<Arc<Rank>> {
        let ranks = match self {
            Self::Fixed(rank) => return Ok(rank.clone()),
            Self::Threads(ranks) => ranks,
        };
        let mut ranks = ranks.lock().expect("no holder of the lock panics");
        // A thread is a rank: Burn's interface names none.
        let thread = thread::current().id();
        if let Some(rank) = ranks.taken.get(&thread) {
            return Ok(rank.clone());
        }
        let Some(engine) = ranks.free.pop() else {
            return Err(Error::setting(
                "ranks",
                ranks.taken.len(),
                "at least the number of threads that step a parameter, which is larger",
            ));
        };
        let rank = Arc::new(Rank::new(engine.on(device.clone()).into()));
        ranks.taken.insert(thread, rank.clone());
        Ok(rank)
    }
}

impl Rank {
    fn new(comm: Communicator) -> Self {
        let loads = vec![0.0; comm.size()];
        Self { comm, assigned: Mutex::new(Assigned { parameters: 0, loads }) }
    }

    /// Assigns a new parameter to the rank with the least work, the first of several. All ranks
    /// assign alike, since the same parameters are stepped in the same order.
    fn assign(&self, operations: f64) -> Ownership {
        let mut assigned = self.assigned.lock().expect("no holder of the lock panics");
        let loads = assigned.loads.iter().enumerate();
        // All ranks see the parameters in one order, so all of them find the same owner, without a
        // message.
        let least = loads.min_by(|(_, a), (_, b)| a.total_cmp(b));
        let (owner, _) = least.expect("a world has at least one rank");
        assigned.loads[owner] += operations;
        assigned.parameters += 1;
        Ownership { owner, index: assigned.parameters - 1 }
    }
}

impl Resumable for DistMuon {
    fn problem<const D: usize>(&self, state: &DistMuonState<D>) -> Option<String> {
        self.rule.problem(&state.muon)
    }

    fn start_counting<const D: usize>(&self, state: &mut DistMuonState<D>) {
        self.rule.start_counting(&mut state.muon);
    }
}

impl Optimizer for DistMuon {
    type State<const D: usize> = DistMuonState<D>;

    /// Takes one step of one parameter. All ranks make this call, for the same parameter.
    ///
    /// # Panics
    ///
    /// On all ranks, with the message of the error: in the cases of [`Muon`], and if a rank fails,
    /// steps another parameter, or does not have the momentum of a parameter that it owns.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<DistMuonState<D>>,
    ) -> (Tensor<D>, Option<DistMuonState<D>>) {
        let rank = self.ranks.find(&parameter.device()).unwrap_or_else(|error| panic!("{error}"));
        let step = || self.try_step(&rank, lr, parameter, grad, state);
        // `World::threads` ends the world after a panic on one of its threads. Other threads have
        // only this handler, which also catches Burn's panics.
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Ok((updated, state))) => (updated, Some(state)),
            Ok(Err(error)) => {
                // Burn's interface returns no error: the others are told before the panic.
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
        DistMuonState { muon: Muon::to_device(state.muon, device), ..state }
    }
}

impl<const D: usize> RecordState for DistMuonState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.muon.state_flatten(prefix, out);
        if let Some(Ownership { owner, index }) = self.ownership {
            out.push_scalar(prefix, "owner", owner.into());
            // The name of `index` in files since the first format.
            out.push_scalar(prefix, "arrival", index.into());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let mut scalar =
            |name| src.take_scalar(prefix, name).and_then(|value| value.try_into().ok());
        let ownership = match (scalar("owner"), scalar("arrival")) {
            (Some(owner), Some(index)) => Some(Ownership { owner, index }),
            _ => None,
        };
        Some(Self { muon: MuonState::state_unflatten(prefix, src, device)?, ownership })
    }
}
