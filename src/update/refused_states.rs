//! States that Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer) loads. Burn drops those
//! that an optimizer can't read, and returns no error: their parameters would start anew in
//! silence. Here a rule keeps the reason in place of such a state. The next step reports all of
//! them, and a record has the reasons as texts.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::optim::{
    DynOptimizer, DynState, LearningRate, Optimizer, RecordState, StateSink, StateSource,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, Tensor, TensorData};

use super::layer::with_rank;
use super::missing_gradients::LastSteps;
use crate::error::Error;
use crate::load_difference::{Difference, DifferenceKind};

/// Name of the reason for which a state was refused, in records: the bytes of a text.
pub(crate) const REFUSED: &str = "refused";

/// Name of a scalar in records that optimizers of [`MuonConfig::init`](crate::MuonConfig::init)
/// return, whatever the parameter is, and no others.
pub(crate) const OF_INIT: &str = "of_init";

/// The remedy for a record of another run, if model and optimizer stay as they are.
pub(crate) const BEGIN_ANEW: &str = "load the model alone and begin with a new optimizer";

/// The problem of a state of another optimizer.
pub(crate) fn of_another() -> String {
    "expected the configured optimizer's, got another's".to_owned()
}

/// The rule of one parameter, which reads states from records.
pub(crate) trait Rule: DynOptimizer {
    /// Reads the state of a parameter of `rank` dimensions. The error is the problem of a state
    /// that the rule can't continue from.
    fn load(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Result<DynState, String>;
}

/// A rule by Burn's interface whose states come from records.
pub(crate) trait Resumable: Optimizer {
    /// The problem of a state that the rule can't continue from.
    fn problem<const D: usize>(&self, state: &Self::State<D>) -> Option<String>;

    /// Registers the counts of a state's skipped steps.
    fn start_counting<const D: usize>(&self, state: &mut Self::State<D>);

    /// Reads a state.
    fn read<const D: usize>(
        &self,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Result<Self::State<D>, String> {
        RecordState::state_unflatten(prefix, source, device).ok_or_else(of_another)
    }
}

impl<O: Resumable> Rule for O {
    fn load(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Result<DynState, String> {
        with_rank!(rank, D => {
            let mut state = self.read::<D>(prefix, source, device)?;
            if let Some(problem) = self.problem(&state) {
                return Err(problem);
            }
            self.start_counting(&mut state);
            Ok(DynState::create(state, D))
        })
    }
}

/// The states that the rules of one optimizer have refused, and the steps of its parameters. Clones
/// share them.
#[derive(Clone, Debug)]
pub(crate) struct Refusals(Arc<Mutex<Refused>>);

#[derive(Debug, Default)]
struct Refused {
    /// By the path of the parameter.
    states: BTreeMap<String, Difference>,
    /// States of parameters that the optimizer does not know, by identity.
    unknown: BTreeMap<String, Difference>,
    /// `true` once a parameter has a state.
    is_used: bool,
    /// `true` once a state was loaded.
    has_loaded: bool,
    last_steps: LastSteps,
    /// The last steps of each parameter, if they all began with an empty state.
    begun: HashMap<String, usize>,
}

impl Drop for Refused {
    /// Warns of a run that did nothing. Burn's optimizer calls no rule in a step in which no
    /// parameter has a gradient, so nothing earlier can tell.
    fn drop(&mut self) {
        if !self.is_used && !std::thread::panicking() {
            log::warn!(
                "an optimizer of `MuonConfig::init` was dropped, and no parameter ever had a \
                 gradient: if it took steps, the gradients are of another model, or the \
                 loss is detached"
            );
        }
    }
}

impl Refusals {
    /// For an optimizer that reports parameters without a gradient in `max_absent` steps in a row.
    pub fn new(max_absent: Option<usize>) -> Self {
        let mut refused = Refused::default();
        refused.last_steps = LastSteps::new(max_absent);
        Self(Arc::new(Mutex::new(refused)))
    }

    fn lock(&self) -> MutexGuard<'_, Refused> {
        // The maps are consistent after every statement, also after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a step with a state that was refused.
    fn error(&self) -> Error {
        let Refused { states, unknown, .. } = &*self.lock();
        let differences = states.values().chain(unknown.values()).cloned().collect();
        let saved = "the record of the optimizer".to_owned();
        Error::OtherRun { saved, differences, remedy: BEGIN_ANEW }
    }

    /// The error of a parameter's first step without a state, if the record had states of unknown
    /// parameters, one of which may be this parameter's. Warns if the record had states of others
    /// only.
    fn ensure_new(&self, parameter: &str) -> crate::error::Result<()> {
        let mut refused = self.lock();
        refused.is_used = true;
        let begun = refused.begun.entry(parameter.to_owned()).or_default();
        *begun += 1;
        if *begun == 3 {
            log::warn!(
                "`{parameter}` began three steps in a row with an empty state: expected the same \
                 `ParamId` in every step, got a new one; change weights by `Param::map`, which \
                 keeps it"
            );
        }
        if refused.unknown.is_empty() {
            if refused.has_loaded {
                log::warn!(
                    "the loaded record of the optimizer has no state of `{parameter}`, which \
                     starts with an empty one"
                );
            }
            return Ok(());
        }
        let missing = Difference::no_state(parameter);
        refused.states.insert(parameter.to_owned(), missing);
        // The next line takes the lock again.
        drop(refused);
        Err(self.error())
    }
}

/// A rule of one parameter in a [`ModuleOptimizer`](burn::optim::ModuleOptimizer).
pub(crate) struct Resumed<R> {
    rule: R,
    parameter: Arc<str>,
    refusals: Refusals,
}

/// A state of a [`Resumed`] rule.
#[derive(Clone)]
enum Held {
    State(DynState),
    Refused(String),
}

impl<R: Rule> Resumed<R> {
    pub fn new(rule: R, parameter: &str, refusals: &Refusals) -> Self {
        let parameter: Arc<str> = parameter.into();
        refusals.lock().last_steps.add(parameter.clone());
        Self { rule, parameter, refusals: refusals.clone() }
    }

    /// Reads a state, or the reason for which it is refused.
    fn read(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Result<DynState, String> {
        match source.take_tensor(prefix, REFUSED) {
            Some(text) => Err(String::from_utf8_lossy(text.as_bytes()).into_owned()),
            None => self.rule.load(rank, prefix, source, device),
        }
    }
}

impl<R: Rule> DynOptimizer for Resumed<R> {
    /// # Panics
    ///
    /// With the message of [`Error::OtherRun`] if a state was refused.
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        parameter: BridgeTensor,
        grad: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        let continues = state.is_some();
        let state = match state.map(DynState::downcast::<Held>) {
            Some(Held::State(state)) => Some(state),
            Some(Held::Refused(_)) => panic!("{}", self.refusals.error()),
            None => {
                let new = self.refusals.ensure_new(&self.parameter);
                new.unwrap_or_else(|error| panic!("{error}"));
                None
            }
        };
        let missing = {
            let mut refused = self.refusals.lock();
            // Empty from the second step on.
            if continues && !refused.begun.is_empty() {
                refused.begun.remove(&*self.parameter);
            }
            refused.last_steps.count(&self.parameter)
        };
        missing.into_iter().for_each(|warning| log::warn!("{warning}"));
        let (updated, state) = self.rule.step_dyn(rank, lr, parameter, grad, state);
        (updated, state.map(|state| DynState::create(Held::State(state), rank)))
    }

    fn to_device_dyn(&self, state: DynState, device: &Device) -> DynState {
        let rank = state.rank();
        let held = match state.downcast::<Held>() {
            Held::State(state) => Held::State(self.rule.to_device_dyn(state, device)),
            // Kept as it is, so that the step can report it: Burn returns no error from a load.
            refused @ Held::Refused(_) => refused,
        };
        DynState::create(held, rank)
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        match state.downcast_ref::<Held>() {
            Held::State(state) => self.rule.state_flatten(prefix, state, out),
            Held::Refused(reason) => {
                let bytes = reason.as_bytes().to_vec();
                let length = bytes.len();
                out.push_tensor(prefix, REFUSED, TensorData::new(bytes, [length]));
            }
        }
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<DynState> {
        let path = self.parameter.to_string();
        let held = match self.read(rank, prefix, source, device) {
            Ok(state) => {
                let mut refused = self.refusals.lock();
                // A later load may repair an earlier one.
                refused.states.remove(&path);
                (refused.is_used, refused.has_loaded) = (true, true);
                Held::State(state)
            }
            Err(problem) => {
                let difference = Difference::new(&*path, DifferenceKind::State, &*problem);
                self.refusals.lock().states.insert(path, difference);
                Held::Refused(problem)
            }
        };
        Some(DynState::create(held, rank))
    }
}

/// A stand-in for the rule of parameters that have none.
#[derive(Clone)]
pub(crate) struct Unrouted {
    /// `None` for all parameters that the optimizer does not know.
    frozen: Option<String>,
    refusals: Refusals,
}

impl Unrouted {
    /// For a parameter that is not trained.
    pub fn frozen(path: &str, refusals: &Refusals) -> Self {
        Self { frozen: Some(path.to_owned()), refusals: refusals.clone() }
    }

    /// For the parameters that the optimizer does not know.
    pub fn unknown(refusals: &Refusals) -> Self {
        Self { frozen: None, refusals: refusals.clone() }
    }
}

impl DynOptimizer for Unrouted {
    /// # Panics
    ///
    /// If the parameter has elements: one without is never trained.
    fn step_dyn(
        &self,
        rank: usize,
        _lr: LearningRate,
        parameter: BridgeTensor,
        _grad: BridgeTensor,
        _state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        with_rank!(rank, D => {
            let parameter = Tensor::<D>::from_bridge(parameter);
            let shape = parameter.dims();
            match &self.frozen {
                // Nothing is lost without elements.
                _ if shape.contains(&0) => {}
                Some(path) => panic!(
                    "parameter `{path}` of shape {shape:?} was frozen when the optimizer was made; \
                     call `MuonConfig::init` again with the model as it is trained now"
                ),
                None => panic!(
                    "a parameter of shape {shape:?} was not in the model that the optimizer was \
                     made for; call `MuonConfig::init` with the model that is trained"
                ),
            }
            (parameter.into_bridge(), None)
        })
    }

    fn to_device_dyn(&self, state: DynState, _device: &Device) -> DynState {
        state
    }

    fn state_flatten(&self, prefix: &str, _state: &DynState, out: &mut StateSink) {
        out.push_scalar(prefix, OF_INIT, true.into());
    }

    /// Drops the state, with a warning, unless it is the answer to a question.
    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        _device: &Device,
    ) -> Option<DynState> {
        // The question of a checkpoint, which optimizer this is: see `is_of_init`.
        if source.take_scalar(prefix, OF_INIT).is_some() {
            return Some(DynState::create((), rank));
        }
        let of = match &self.frozen {
            Some(path) => format!("`{path}`, which is not trained"),
            None => {
                let of = format!("identity {prefix}");
                let problem = "expected none, since the model does not have the parameter";
                let difference = Difference::new(&*of, DifferenceKind::State, problem);
                self.refusals.lock().unknown.insert(of.clone(), difference);
                format!("the {of}, which the model does not have")
            }
        };
        log::warn!("the optimizer state of {of}, is dropped");
        None
    }
}
