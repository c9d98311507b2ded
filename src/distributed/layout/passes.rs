//! The collectives of forward and backward passes: parts of parameters are gathered before their
//! use, and gradients are reduced after it.
//!
//! All ranks make the same calls, since a decision depends on the sequence of uses, and on maps of
//! the model between them, but never on time: all ranks map the model alike. Results are waited for
//! in the order of the calls.
//!
//! A forward pass can't return an error. After a failure, values are NaN, nothing is sent, and
//! [`Passes::finish`] returns the error.

mod step;
mod unused;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Shape, Tensor};
use serde::{Deserialize, Serialize};

use super::MicroBatches;
use super::events::{Event, Events};
use super::identity::{Identities, Version};
use super::order::{Order, Successors};
use super::pass_parameter::PassParameter;
use crate::backend::precise_dtype;
use crate::checks::ensure_computed;
use crate::comm::{Communicator, Pending, World};
use crate::error::{Error, Result};
use crate::link::{Clock, Link, identity};
use crate::parameters::Placement;
use crate::slices::bytes;

/// The weights that are kept between the forward and the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Keep {
    /// None: a weight is gathered again when the backward pass needs it. This is ZeRO-3, or fully
    /// sharded data parallelism.
    ///
    /// The model has to be on a device with
    /// [`gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing). Without it, Burn
    /// keeps weights of which a layer makes a view, as `Linear` does for inputs of three
    /// dimensions.
    Nothing,
    /// All: two thirds of the messages, and the memory of the whole model from the forward to the
    /// backward pass.
    Weights,
}

/// The limits of what is sent ahead, and of what ranks may leave out.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub keep: Keep,
    /// Bytes of parameters that are gathered before they are used.
    pub ahead: usize,
    /// Bytes of gradients that are being reduced.
    pub in_flight: usize,
    /// `true` if a rank may leave parameters out that others use.
    pub allows_unused: bool,
}

/// The collectives of the passes of one rank, on the parameters whose gradients they reduce. There
/// may be none.
#[derive(Debug)]
pub struct Passes {
    groups: Groups,
    parameters: Vec<Arc<PassParameter>>,
    by_path: HashMap<String, Arc<PassParameter>>,
    micro_batches: MicroBatches,
    limits: Limits,
    clock: Clock,
    state: Mutex<PassState>,
}

/// The ranks with which a rank exchanges parameters.
#[derive(Debug)]
pub struct Groups {
    pub world: World,
    /// By the axes along which parameters are cut.
    pub by_axes: BTreeMap<Vec<String>, SharingGroup>,
}

impl Groups {
    /// The ranks that have the same slice of a parameter, or all of it.
    fn of(&self, parameter: &PassParameter) -> &SharingGroup {
        &self.by_axes[parameter.axes()]
    }
}

/// The ranks with which a rank exchanges parameters that are cut along the same axes.
#[derive(Debug)]
pub struct SharingGroup {
    /// The ranks that share the parameters: each has a part.
    pub sharing: World,
    /// The ranks with replicas of this rank's part: each updates a shard of it.
    pub replicas: World,
}

/// A collective that was started and is not finished.
#[derive(Debug)]
enum Flight {
    Gathering(usize, Pending),
    /// The sum of the gradient of a value among the ranks that share the parameter.
    Reducing(usize, u64, Pending),
    /// The sum of these sums among replicas.
    ReducingReplicas(usize, u64, Pending),
}

/// The actions of a rank on a parameter, in errors.
const GATHERING: &str = "gathering";
const REDUCING: &str = "reducing the gradient of";
const PUBLISHING: &str = "publishing";

/// The number of uses of a parameter in a pass after which the user is told that no backward pass
/// has followed.
const MANY_USES: usize = 10_000;

/// Bytes that forward and backward passes hold at one time.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassBytes {
    /// Owned parameters that are gathered ahead of their use, and the one in use.
    pub gathered: usize,
    /// Gradients that are summed up, or on their way to their owners.
    pub in_flight: usize,
    /// This rank's shards of the means, until the pass ends.
    pub means: usize,
    /// Parts of the last step that are on their way.
    pub publishing: usize,
}

impl PassBytes {
    fn total(&self) -> usize {
        let Self { gathered, in_flight, means, publishing } = self;
        gathered + in_flight + means + publishing
    }
}

#[derive(Debug, Default)]
struct PassState {
    flights: VecDeque<Flight>,
    /// Parts of a step that the ranks with replicas exchange, in the order of the calls.
    publishing: VecDeque<(usize, Pending)>,
    uses: Vec<Uses>,
    /// Bytes of parameters that are gathered ahead, or on their way.
    ahead: usize,
    /// Bytes of gradients that are being reduced.
    reducing: usize,
    /// Bytes of gradients that wait for the gradients of other uses.
    sums: usize,
    /// Bytes of this rank's shards of means.
    means: usize,
    /// The bytes held at the peak of each kind, and of their sum.
    peaks: [PassBytes; 5],
    forward: Order,
    /// The parameters that are gathered again in the backward pass.
    backward: Order,
    /// The parameters that are used without gradients.
    evaluation: Successors,
    events: Events,
    is_micro_batch: bool,
    /// `true` while the values are read for other purposes than a pass.
    is_reading: bool,
    /// `true` while parameters are gathered that this rank does not use.
    is_unused: bool,
    /// `true` while the gradients of a backward pass count as zero.
    is_drained: bool,
    /// The parameters that have a gradient, and that some ranks do not use in this pass, once they
    /// are known.
    partial: Option<Vec<bool>>,
    /// Bytes of such parameters that are kept for the backward pass.
    kept: usize,
    failure: Option<Error>,
}

/// The uses of a parameter in a pass.
#[derive(Debug, Default)]
struct Uses {
    /// The part that was last used with a gradient, or that a step has made.
    part: Option<(Values, Tensor<1>)>,
    /// The part that was last used without a gradient.
    evaluated: Option<(Values, Tensor<1>)>,
    /// The part of the last step, if it has arrived and was not used yet.
    published: Option<Tensor<1>>,
    /// The whole that is gathered ahead of its use.
    ahead: Option<Ahead>,
    /// The whole for a backward pass, with the values of its part, if others do not use it.
    kept: Option<(Values, Tensor<1>)>,
    /// The uses of each of its values, in the order of their first uses: of the model's, and of
    /// those of clones with other values.
    leaves: Vec<LeafUses>,
    /// Bytes of the last gradient that was reduced, the same on all ranks.
    sent: usize,
    /// The identity under which its last gradient was returned.
    returned: Option<ParamId>,
}

/// The uses of one value of a parameter in a pass. Burn has a gradient for each of them.
#[derive(Debug)]
struct LeafUses {
    leaf: u64,
    /// The number of uses in the graph, and of their gradients so far.
    count: usize,
    gradients: usize,
    /// The sum of these gradients.
    sum: Option<Tensor<1>>,
    /// The sum of the gradients of earlier micro-batches.
    micro_batches: Option<Tensor<1>>,
    /// `true` if it had gradients of micro-batches, which are the model's.
    had_micro_batches: bool,
    /// This rank's part of the mean over ranks.
    mean: Option<Tensor<1>>,
}

impl LeafUses {
    fn of(leaf: u64) -> Self {
        Self {
            leaf,
            count: 0,
            gradients: 0,
            sum: None,
            micro_batches: None,
            had_micro_batches: false,
            mean: None,
        }
    }

    /// Bytes of the gradients that are not reduced yet.
    fn bytes(&self) -> usize {
        [&self.micro_batches, &self.sum].into_iter().flatten().map(bytes).sum()
    }

    fn has_gradient(&self) -> bool {
        self.sum.is_some() || self.micro_batches.is_some() || self.mean.is_some()
    }
}

impl Uses {
    /// Returns `true` if this pass has a use with a gradient.
    fn are_in_pass(&self) -> bool {
        self.leaves.iter().any(|uses| uses.count > 0)
    }

    /// Returns `true` if an earlier micro-batch had one.
    fn are_earlier(&self) -> bool {
        self.leaves.iter().any(|uses| uses.micro_batches.is_some())
    }

    /// The uses of a value.
    fn of_leaf(&mut self, leaf: u64) -> &mut LeafUses {
        let position = self.leaves.iter().position(|uses| uses.leaf == leaf);
        let position = position.unwrap_or_else(|| {
            self.leaves.push(LeafUses::of(leaf));
            self.leaves.len() - 1
        });
        &mut self.leaves[position]
    }
}

/// The identity of a part's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    /// The leaf of a graph.
    Leaf(u64),
    /// A part's without autodiff.
    Version(Version),
}

/// A whole that is gathered, or on its way.
#[derive(Debug)]
struct Ahead {
    /// The values that it was gathered from. `None` for a part that was not used yet.
    part: Option<Values>,
    whole: Option<Tensor<1>>,
}

impl Passes {
    pub fn new(
        groups: Groups,
        parameters: Vec<Arc<PassParameter>>,
        limits: Limits,
        micro_batches: MicroBatches,
    ) -> Self {
        let by_path = parameters
            .iter()
            .map(|parameter| (parameter.path.clone(), parameter.clone()))
            .collect();
        let uses = parameters.iter().map(|_| Uses::default()).collect();
        let mut state = PassState::default();
        state.uses = uses;
        let (clock, state) = (Clock::default(), Mutex::new(state));
        Self { groups, parameters, by_path, micro_batches, limits, clock, state }
    }

    pub fn parameters(&self) -> &[Arc<PassParameter>] {
        &self.parameters
    }

    fn state(&self) -> MutexGuard<'_, PassState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The whole of a parameter for a use in a forward pass. Its gradient is reduced to the parts.
    pub fn use_whole<const D: usize>(
        self: &Arc<Self>,
        parameter: &Arc<PassParameter>,
        (part, version): (Tensor<1>, Version),
        shape: Shape,
    ) -> Tensor<D> {
        let PassState { is_reading, is_unused, .. } = *self.state();
        let is_trained = part.is_require_grad() && !is_reading;
        let values = identity(&part).map_or(Values::Version(version), Values::Leaf);
        let inner = part.clone().without_autodiff();
        let device = inner.device();
        let whole = match is_trained {
            true => self.gather(parameter, (values, inner)),
            false => self.gather_evaluated(parameter, (values, inner), is_reading),
        };
        let mut whole = whole.reshape(shape.clone());
        if is_unused {
            // No layer reads it: one element in memory.
            whole = Tensor::<D>::zeros([1; D], (&device, parameter.dtype)).expand(shape);
        }
        if !is_trained || is_unused {
            return match part.gradient_checkpointing_strategy() {
                Some(strategy) => {
                    Tensor::from_inner(whole).with_gradient_checkpointing_strategy(strategy)
                }
                None => whole,
            };
        }
        let link = self.reducing(parameter, &part);
        let link = match self.limits.keep {
            Keep::Weights => link,
            Keep::Nothing => {
                let (from, of) = (Arc::downgrade(self), parameter.clone());
                link.made_again(move |part| match from.upgrade() {
                    Some(passes) => passes.gather_again(&of, (values, part)),
                    None => of.nan(&part.device()),
                })
            }
        };
        link.at(self.clock.next(&part)).attach(part, whole)
    }

    /// A parameter that this rank has, for a use in a forward pass. Its gradient is reduced.
    pub fn use_replica<const D: usize>(
        self: &Arc<Self>,
        parameter: &Arc<PassParameter>,
        whole: Tensor<D>,
    ) -> Tensor<D> {
        let PassState { is_reading, is_unused, .. } = *self.state();
        let is_used = !is_reading && !is_unused;
        match whole.is_require_grad() && is_used {
            true => {
                let value = whole.clone().without_autodiff();
                self.reducing(parameter, &whole).at(self.clock.next(&whole)).attach(whole, value)
            }
            false => whole,
        }
    }

    /// A link that reduces the gradient of a use of a value.
    fn reducing<const D: usize>(
        self: &Arc<Self>,
        parameter: &Arc<PassParameter>,
        value: &Tensor<D>,
    ) -> Link {
        let leaf = identity(value).expect("a value that requires a gradient has autodiff");
        let count = {
            let mut state = self.state();
            let uses = state.uses[parameter.index].of_leaf(leaf);
            uses.count += 1;
            uses.count
        };
        if count == MANY_USES {
            log::warn!(
                "`{}` was used {MANY_USES} times without a backward pass in between: evaluate \
                 `model.valid()`, or call `Layout::discard` after a forward pass that is not \
                 trained",
                parameter.path
            );
        }
        // Burn frees a graph when it makes the next one: its closures must not keep the world
        // alive, which processes have to leave before they end.
        let (to, of) = (Arc::downgrade(self), parameter.clone());
        Link::taking(move |gradient| {
            if let Some(passes) = to.upgrade() {
                passes.add_gradient(&of, leaf, gradient);
            }
        })
    }

    /// The whole for a forward pass.
    fn gather(&self, parameter: &PassParameter, part: (Values, Tensor<1>)) -> Tensor<1> {
        let mut state = self.state();
        let next = state.forward.next(parameter.index).to_vec();
        state.uses[parameter.index].part = Some(part.clone());
        self.gathered(&mut state, parameter, part, |state| self.start_next(state, &next))
    }

    /// The whole for a pass without a gradient. The next ones are only gathered if the part is that
    /// of the pass before: those of a model with new values are not known yet.
    fn gather_evaluated(
        &self,
        parameter: &PassParameter,
        part: (Values, Tensor<1>),
        is_reading: bool,
    ) -> Tensor<1> {
        let mut state = self.state();
        if is_reading {
            return self.gathered(&mut state, parameter, part, |_| Ok(()));
        }
        let next = state.evaluation.next(parameter.index);
        let before = state.uses[parameter.index].evaluated.replace(part.clone());
        let is_known = before.is_some_and(|(values, _)| values == part.0);
        let next = if is_known { next } else { vec![] };
        self.gathered(&mut state, parameter, part, |state| self.start_next_evaluated(state, &next))
    }

    /// The whole for a backward pass.
    fn gather_again(&self, parameter: &PassParameter, part: (Values, Tensor<1>)) -> Tensor<1> {
        let mut state = self.state();
        if let Some((values, whole)) = &state.uses[parameter.index].kept
            && part.0 == *values
        {
            return whole.clone();
        }
        let next = state.backward.next(parameter.index).to_vec();
        state.uses[parameter.index].part = Some(part.clone());
        self.gathered(&mut state, parameter, part, |state| self.start_next(state, &next))
    }

    /// The whole, or NaN after a failure. Starts to gather the parameters that are used next.
    fn gathered(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        part: (Values, Tensor<1>),
        start_next: impl FnOnce(&mut PassState) -> Result<()>,
    ) -> Tensor<1> {
        let device = part.1.device();
        let gathered = self.attempt(state, |state| {
            self.take_or_start(state, parameter, part)?;
            start_next(state)?;
            loop {
                if let Some(Ahead { whole: Some(_), .. }) = &state.uses[parameter.index].ahead {
                    return Ok(state.take_ahead(parameter).expect("the whole was found above"));
                }
                self.land(state)?;
            }
        });
        gathered.unwrap_or_else(|| parameter.nan(&device))
    }

    /// Starts to gather a parameter, unless that was done ahead with the same part.
    fn take_or_start(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        (values, part): (Values, Tensor<1>),
    ) -> Result<()> {
        match &state.uses[parameter.index].ahead {
            Some(ahead) if ahead.part == Some(values) => return Ok(()),
            Some(_) => {
                // The part of another model, such as an average of the weights.
                while state.uses[parameter.index]
                    .ahead
                    .as_ref()
                    .is_some_and(|ahead| ahead.whole.is_none())
                {
                    self.land(state)?;
                }
                state.take_ahead(parameter);
            }
            None => {}
        }
        self.start_gathering(state, parameter, Some(values), part)
    }

    fn start_gathering(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        values: Option<Values>,
        part: Tensor<1>,
    ) -> Result<()> {
        let sharing = self.groups.of(parameter).sharing.comm();
        let pending = sharing.all_gather(parameter.sent(&part), &parameter.part_counts().to_vec());
        let pending = pending.map_err(|error| parameter.in_action(GATHERING, error))?;
        state.events.push(Event::Gather(parameter.index));
        state.flights.push_back(Flight::Gathering(parameter.index, pending));
        state.ahead += parameter.bytes();
        state.observe();
        state.uses[parameter.index].ahead = Some(Ahead { part: values, whole: None });
        Ok(())
    }

    /// Starts to gather the parameters that are used next, as far as the limit allows.
    fn start_next(&self, state: &mut PassState, next: &[usize]) -> Result<()> {
        for index in next {
            let parameter = &self.parameters[*index];
            // On its way already, by an earlier use.
            if state.uses[*index].ahead.is_some() {
                continue;
            }
            // All ranks have the same limit and order, so all of them stop at the same call.
            if state.ahead + parameter.bytes() > self.limits.ahead {
                return Ok(());
            }
            self.land_publication(state, parameter)?;
            let Uses { part, published, .. } = &state.uses[*index];
            // The part of this pass before the last step's: an older model may be in use.
            let (id, part) = match (part.clone(), published.clone()) {
                (Some((id, part)), _) => (Some(id), part),
                (None, Some(part)) => (None, part),
                (None, None) => return Ok(()),
            };
            self.start_gathering(state, parameter, id, part)?;
        }
        Ok(())
    }

    /// [`start_next`](Self::start_next) in a pass without gradients.
    fn start_next_evaluated(&self, state: &mut PassState, next: &[usize]) -> Result<()> {
        for index in next {
            let (parameter, uses) = (&self.parameters[*index], &state.uses[*index]);
            let Some((values, part)) = uses.evaluated.clone().filter(|_| uses.ahead.is_none())
            else {
                continue;
            };
            if state.ahead + parameter.bytes() > self.limits.ahead {
                return Ok(());
            }
            self.start_gathering(state, parameter, Some(values), part)?;
        }
        Ok(())
    }

    /// Adds the gradient of a use of a value, and starts to reduce the sum after the gradient of
    /// its last use. Which values are the model's is known at the end of the pass: all ranks reduce
    /// the same ones until then.
    fn add_gradient(&self, parameter: &PassParameter, leaf: u64, gradient: Tensor<1>) {
        let mut state = self.state();
        self.attempt(&mut state, |state| {
            // A rank without a batch takes part in the calls, and adds nothing.
            let gradient = if state.is_drained { gradient.zeros_like() } else { gradient };
            let is_at_end = state.is_micro_batch || self.waits_for_end(state, parameter);
            let uses = state.uses[parameter.index].of_leaf(leaf);
            uses.gradients += 1;
            let more = if uses.sum.is_none() { bytes(&gradient) } else { 0 };
            uses.sum = Some(added(uses.sum.take(), gradient));
            // A value that is used several times has as many gradients: their sum is sent once.
            let is_last = uses.gradients == uses.count;
            state.sums += more;
            state.observe();
            match is_last && !is_at_end {
                true => self.start_reducing(state, parameter, leaf),
                false => Ok(()),
            }
        });
    }

    /// Starts to reduce the gradient of a value, if it has one.
    fn start_reducing(
        &self,
        state: &mut PassState,
        parameter: &PassParameter,
        leaf: u64,
    ) -> Result<()> {
        let uses = state.uses[parameter.index].of_leaf(leaf);
        let held = uses.bytes();
        uses.had_micro_batches |= uses.micro_batches.is_some();
        let gradients = (uses.micro_batches.take(), uses.sum.take());
        state.sums -= held;
        let sum = match gradients {
            (Some(earlier), Some(sum)) => {
                // The sum of micro-batches is float32; this gradient may be half precision.
                let dtype = earlier.dtype();
                earlier + sum.cast(dtype)
            }
            (Some(sum), None) | (None, Some(sum)) => sum,
            (None, None) => return Ok(()),
        };
        // The elements in the order of their owners.
        let parts = parameter.parts(sum);
        ensure_computed(&parameter.path, &parts)?;
        // Not by the bytes of the calls: an owner also holds what it receives, and all ranks have
        // to wait at the same places.
        let sent = parameter.most_elements() * parts.dtype().size();
        state.uses[parameter.index].sent = sent;
        while state.is_reducing() && state.sent() + sent > self.limits.in_flight {
            self.land(state)?;
        }
        let sharing = self.groups.of(parameter).sharing.comm();
        let pending = sharing.reduce_scatter_f32(parts, &parameter.part_counts().to_vec());
        let pending = pending.map_err(|error| parameter.in_action(REDUCING, error))?;
        state.reducing += pending.bytes();
        state.observe();
        state.events.push(Event::Reduce(parameter.index));
        state.flights.push_back(Flight::Reducing(parameter.index, leaf, pending));
        Ok(())
    }

    /// Waits for the result of the oldest call.
    fn land(&self, state: &mut PassState) -> Result<()> {
        let flight = state.flights.pop_front().expect("a call was started");
        let (index, action) = match &flight {
            Flight::Gathering(index, _) => (*index, GATHERING),
            Flight::Reducing(index, ..) | Flight::ReducingReplicas(index, ..) => (*index, REDUCING),
        };
        let landed = self.land_flight(state, flight);
        landed.map_err(|error| self.parameters[index].in_action(action, error))
    }

    fn land_flight(&self, state: &mut PassState, flight: Flight) -> Result<()> {
        match flight {
            Flight::Gathering(index, pending) => {
                let whole = self.parameters[index].whole(&pending.wait()?);
                ensure_computed(&self.parameters[index].path, &whole)?;
                let ahead = state.uses[index].ahead.as_mut();
                ahead.expect("the parameter is gathered").whole = Some(whole);
            }
            Flight::Reducing(index, leaf, pending) => {
                state.reducing -= pending.bytes();
                let sum = pending.wait()?;
                let replicas = self.replicas(&self.parameters[index]);
                if replicas.size() == 1 {
                    self.keep_mean(state, (index, leaf), sum);
                    return Ok(());
                }
                let counts = self.parameters[index].shard_counts().to_vec();
                let pending = replicas.reduce_scatter_f32(sum, &counts)?;
                state.reducing += pending.bytes();
                state.flights.push_back(Flight::ReducingReplicas(index, leaf, pending));
            }
            Flight::ReducingReplicas(index, leaf, pending) => {
                state.reducing -= pending.bytes();
                let sum = pending.wait()?;
                self.keep_mean(state, (index, leaf), sum);
            }
        }
        Ok(())
    }

    fn keep_mean(&self, state: &mut PassState, (index, leaf): (usize, u64), sum: Tensor<1>) {
        // By all ranks, also where a sum was taken in two stages.
        let mean = sum.div_scalar(self.parameters[index].counts().ranks() as f64);
        let uses = state.uses[index].of_leaf(leaf);
        let more = if uses.mean.is_none() { bytes(&mean) } else { 0 };
        uses.mean = Some(added(uses.mean.take(), mean));
        state.means += more;
        state.observe();
    }

    /// The outcome of a part of a pass. `None` after a failure, which all ranks are told of.
    fn attempt<T>(
        &self,
        state: &mut PassState,
        run: impl FnOnce(&mut PassState) -> Result<T>,
    ) -> Option<T> {
        if state.failure.is_some() {
            return None;
        }
        match run(state) {
            Ok(outcome) => Some(outcome),
            Err(error) => {
                self.fail(state, error);
                None
            }
        }
    }

    /// Reads the values of parameters, which does not count as a pass that is trained.
    pub fn read<T>(&self, read: impl FnOnce() -> T) -> T {
        self.during(|state| &mut state.is_reading, read)
    }

    /// Runs the backward pass of a micro-batch, whose gradients stay on this rank.
    pub fn in_micro_batch<T>(&self, backward: impl FnOnce() -> T) -> T {
        self.during(|state| &mut state.is_micro_batch, backward)
    }

    /// Sets a flag while a function runs, until it returns or panics.
    fn during<T>(&self, flag: fn(&mut PassState) -> &mut bool, run: impl FnOnce() -> T) -> T {
        struct Set<'a>(&'a Passes, fn(&mut PassState) -> &mut bool);
        impl Drop for Set<'_> {
            fn drop(&mut self) {
                *(self.1)(&mut self.0.state()) = false;
            }
        }
        *flag(&mut self.state()) = true;
        let _set = Set(self, flag);
        run()
    }

    /// Ends the backward pass of a micro-batch: the gradients of a model are added to those of
    /// earlier ones.
    pub fn keep_micro_batch(&self, model: &Identities) -> Result<()> {
        let mut state = self.state();
        for (parameter, uses) in self.parameters.iter().zip(&mut state.uses) {
            let sums = uses.leaves.iter_mut().filter_map(|uses| Some((uses.sum.take()?, uses)));
            for (sum, uses) in sums.collect::<Vec<_>>() {
                let identity = model.of(parameter).inspect_err(|error| self.tell(error))?;
                if identity.leaf == Some(uses.leaf) {
                    let dtype = precise_dtype(sum.dtype());
                    uses.micro_batches = Some(added(uses.micro_batches.take(), sum.cast(dtype)));
                }
            }
        }
        let leaves = state.uses.iter().flat_map(|uses| &uses.leaves);
        state.sums = leaves.filter_map(|uses| uses.micro_batches.as_ref()).map(bytes).sum();
        state.observe();
        self.end_pass(&mut state)
    }

    /// Ends a backward pass: returns this rank's shards of all gradients of a model. Those of other
    /// values, such as a clone's, are dropped, as Burn does. All ranks make this call.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a gradient of a parameter that the model does not have, and for
    /// micro-batches of other values than the model's; as every collective.
    pub fn finish(&self, model: &Identities) -> Result<Vec<MeanGradient>> {
        let mut state = self.state();
        self.exchange_uses(&mut state)?;
        let partial = state.partial.clone().unwrap_or_default();
        for parameter in &self.parameters {
            if partial.get(parameter.index).copied().unwrap_or_default() {
                self.attempt(&mut state, |state| {
                    self.start_reducing_partial(state, parameter, model)
                });
                continue;
            }
            // Those with uses that the loss does not depend on.
            let leaves: Vec<u64> =
                state.uses[parameter.index].leaves.iter().map(|u| u.leaf).collect();
            for leaf in leaves {
                self.attempt(&mut state, |state| self.start_reducing(state, parameter, leaf));
            }
        }
        self.end_pass(&mut state)?;
        state.means = 0;
        let means = self
            .parameters
            .iter()
            .zip(&mut state.uses)
            .filter_map(|(parameter, uses)| mean_of(parameter, uses, model).transpose());
        let means: Result<Vec<MeanGradient>> = means.collect();
        means.inspect_err(|error| self.fail(&mut state, error.clone()))
    }

    /// Ends a pass without a result: forgets its gradients, and the gradients of earlier
    /// micro-batches. All ranks make this call.
    pub fn discard(&self) -> Result<()> {
        let mut earlier = self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner);
        drop(earlier.take_sum());
        if self.parameters.is_empty() {
            return Ok(());
        }
        let mut state = self.state();
        for uses in state.uses.iter_mut().flat_map(|uses| &mut uses.leaves) {
            (uses.sum, uses.micro_batches) = (None, None);
        }
        state.sums = 0;
        let outcome = self.end_pass(&mut state);
        state.uses.iter_mut().for_each(|uses| uses.leaves.clear());
        state.means = 0;
        outcome
    }

    /// Waits for all calls, and compares them with the other ranks' calls.
    fn end_pass(&self, state: &mut PassState) -> Result<()> {
        while state.failure.is_none() && !state.flights.is_empty() {
            if let Err(error) = self.land(state) {
                self.fail(state, error);
            }
        }
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        self.clock.reset();
        state.forward.end();
        state.backward.end();
        state.evaluation.end();
        // Parameters gathered ahead for uses that did not come are dropped.
        (state.ahead, state.kept, state.partial) = (0, 0, None);
        for uses in &mut state.uses {
            (uses.ahead, uses.kept) = (None, None);
            uses.leaves.retain(LeafUses::has_gradient);
            uses.leaves.iter_mut().for_each(|uses| (uses.count, uses.gradients) = (0, 0));
        }
        let events = std::mem::take(&mut state.events);
        let outcome = self.same_events(&events).map_err(|error| self.ending(&events, error));
        if let Err(error) = &outcome {
            // Only the ranks of a group know of a difference in it. Gradients that were reduced are
            // of no use after it.
            self.fail(state, error.clone());
        }
        outcome
    }

    /// Keeps a failure, of which all ranks are told.
    fn fail(&self, state: &mut PassState, error: Error) {
        self.tell(&error);
        state.failure = Some(error);
    }

    /// Tells all ranks of a failure.
    fn tell(&self, error: &Error) {
        self.groups.world.comm().fail(&error.to_string());
    }

    /// Fails if the ranks have not made the same calls. An engine does not notice it if they are of
    /// equal sizes, or if some are missing at the end: the comparison takes place in the groups of
    /// the calls, where it meets them.
    fn same_events(&self, events: &Events) -> Result<()> {
        if self.parameters.is_empty() {
            return Ok(());
        }
        let described = |event: Option<Event>| match event {
            Some(Event::Gather(index)) => format!("used `{}`", self.parameters[index].path),
            Some(Event::Reduce(index)) => {
                format!("had a gradient of `{}`", self.parameters[index].path)
            }
            None => "ended its pass".to_owned(),
        };
        let rank = self.groups.world.rank();
        let difference = |first: &Events, local: &Events| {
            let [first, local] = first.difference(local)?.map(described);
            Some(format!("rank {rank} {local} where another rank {first}"))
        };
        let groups = self.groups.by_axes.values();
        for group in groups.flat_map(|SharingGroup { sharing, replicas }| [sharing, replicas]) {
            if let Some((_, calls)) = group.compare(events, difference)? {
                return Err(Error::Mismatch { calls });
            }
        }
        Ok(())
    }

    /// The error of the comparison, at which a rank with fewer calls than the others arrives first:
    /// with the parameters of which this rank had no gradient.
    fn ending(&self, events: &Events, error: Error) -> Error {
        let without =
            self.parameters.iter().filter(|parameter| !events.has(Event::Reduce(parameter.index)));
        let paths: Vec<String> = without.map(|parameter| format!("`{}`", parameter.path)).collect();
        if paths.is_empty() || paths.len() == self.parameters.len() {
            return error;
        }
        error.in_action(&format!("ending a pass without a gradient of {}", paths.join(", ")))
    }

    /// Returns the first parameter whose gradient was not collected.
    pub fn uncollected(&self) -> Option<&PassParameter> {
        let state = self.state();
        let has_gradient = |parameter: &&Arc<PassParameter>| {
            let mut leaves = state.uses[parameter.index].leaves.iter();
            let is_reducing = |flight: &Flight| flight.reduced() == Some(parameter.index);
            leaves.any(LeafUses::has_gradient) || state.flights.iter().any(is_reducing)
        };
        self.parameters.iter().find(has_gradient).map(|parameter| &**parameter)
    }

    /// Returns the first parameter whose gradient is among some under the identity under which it
    /// was returned.
    pub fn among(&self, gradients: &GradientsParams) -> Option<&PassParameter> {
        let state = self.state();
        let is_among = |parameter: &&Arc<PassParameter>| {
            let id = state.uses[parameter.index].returned;
            id.is_some_and(|id| has_gradient(gradients, id, parameter))
        };
        self.parameters.iter().find(is_among).map(|parameter| &**parameter)
    }

    /// The bytes held at the peaks of all passes.
    pub fn held(&self) -> Vec<PassBytes> {
        self.state().peaks.to_vec()
    }

    /// The bytes held now.
    pub fn holds(&self) -> PassBytes {
        self.state().held()
    }

    /// Fails after a failure in a pass.
    pub fn ensure_alive(&self) -> Result<()> {
        self.state().failure.clone().map_or(Ok(()), Err)
    }

    /// The ranks that have replicas of this rank's part of a parameter.
    pub fn replicas(&self, parameter: &PassParameter) -> &Communicator {
        self.groups.of(parameter).replicas.comm()
    }

    /// Starts to gather a part from the shards that its replicas updated. Its first use waits for
    /// the result.
    fn publish_at_first_use(&self, parameter: &PassParameter, shard: Tensor<1>) -> Result<()> {
        if parameter.part_count() == 0 {
            // A parameter has an element at least, which may be sent ahead as those of other ranks.
            let part = Tensor::zeros([1], (&shard.device(), parameter.dtype));
            self.state().uses[parameter.index].published = Some(part);
            return Ok(());
        }
        let pending =
            self.replicas(parameter).all_gather(shard, &parameter.shard_counts().to_vec())?;
        let mut state = self.state();
        state.publishing.push_back((parameter.index, pending));
        state.observe();
        Ok(())
    }

    /// This rank's new part of a parameter, or NaN after a failure.
    pub fn await_part(&self, parameter: &PassParameter, device: &Device) -> Tensor<1> {
        let mut state = self.state();
        let part = self.attempt(&mut state, |state| {
            self.land_publication(state, parameter)?;
            Ok(state.uses[parameter.index].published.clone())
        });
        let nan =
            || Tensor::full([parameter.part_count().max(1)], f32::NAN, (device, parameter.dtype));
        part.flatten().unwrap_or_else(nan)
    }

    /// Waits for the part of a parameter, if it is on its way, and for those before it.
    fn land_publication(&self, state: &mut PassState, parameter: &PassParameter) -> Result<()> {
        // In the order of the calls: earlier publications arrive on the way.
        while state.publishing.iter().any(|(index, _)| *index == parameter.index) {
            let (index, pending) = state.publishing.pop_front().expect("one was found above");
            let part = pending.wait();
            let part = part.map_err(|error| self.parameters[index].in_action(PUBLISHING, error))?;
            state.uses[index].published = Some(part);
        }
        Ok(())
    }

    /// Waits for all parts that are on their way.
    pub fn finish_publication(&self) -> Result<()> {
        let mut state = self.state();
        while let Some((index, _)) = state.publishing.back() {
            let parameter = &self.parameters[*index];
            self.attempt(&mut state, |state| self.land_publication(state, parameter));
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
        }
        Ok(())
    }

    /// Forgets the parts that were used, so that a step has the only reference to them.
    pub fn forget_parts(&self) {
        let forget = |uses: &mut Uses| {
            uses.part = None;
            // Parts with a leaf are frozen, and kept to be gathered ahead in the next pass. A clone
            // that was frozen just before a step shares its buffers with the step's parts.
            uses.evaluated.take_if(|(values, _)| matches!(values, Values::Version(_)));
        };
        self.state().uses.iter_mut().for_each(forget);
    }

    /// Remembers the new part of a parameter, so that it is gathered ahead of its next use.
    pub fn remember_part<const D: usize>(&self, parameter: &PassParameter, part: &Tensor<D>) {
        let value = part.clone().without_autodiff().reshape([-1]);
        let (values, mut state) = (identity(part).map(Values::Leaf), self.state());
        let uses = &mut state.uses[parameter.index];
        (uses.part, uses.published) = (values.map(|values| (values, value)), None);
        if let Some(ahead) = &mut uses.ahead {
            // Gathered before the part was used, it had no identity.
            ahead.part = ahead.part.or(values);
        }
    }
}

impl Drop for PassState {
    /// Waits for all that was not used, since the other ranks take part in it.
    fn drop(&mut self) {
        let publishing = self.publishing.drain(..).map(|(_, pending)| pending);
        let flights = self.flights.drain(..).map(|flight| match flight {
            Flight::Gathering(_, pending)
            | Flight::Reducing(_, _, pending)
            | Flight::ReducingReplicas(_, _, pending) => pending,
        });
        // After a failure there is nothing to wait for.
        _ = publishing.chain(flights).try_for_each(|pending| pending.wait().map(drop));
    }
}

impl PassState {
    fn held(&self) -> PassBytes {
        let publishing = self.publishing.iter().map(|(_, pending)| pending.bytes()).sum();
        let in_flight = self.reducing + self.sums;
        PassBytes { gathered: self.ahead + self.kept, in_flight, means: self.means, publishing }
    }

    fn is_reducing(&self) -> bool {
        self.flights.iter().any(|flight| flight.reduced().is_some())
    }

    /// Bytes of the gradients that are being reduced, without those that a rank receives.
    fn sent(&self) -> usize {
        let reduced = self.flights.iter().filter_map(Flight::reduced);
        reduced.map(|index| self.uses[index].sent).sum()
    }

    fn observe(&mut self) {
        let now = self.held();
        let sizes: [fn(&PassBytes) -> usize; 5] = [
            |held| held.gathered,
            |held| held.in_flight,
            |held| held.means,
            |held| held.publishing,
            PassBytes::total,
        ];
        for (peak, size) in self.peaks.iter_mut().zip(sizes) {
            if size(&now) > size(peak) {
                *peak = now;
            }
        }
    }

    /// Takes a whole that was gathered out.
    fn take_ahead(&mut self, parameter: &PassParameter) -> Option<Tensor<1>> {
        let whole = self.uses[parameter.index].ahead.take()?.whole?;
        self.ahead -= parameter.bytes();
        Some(whole)
    }
}

impl Flight {
    /// The parameter whose gradient is reduced.
    fn reduced(&self) -> Option<usize> {
        match self {
            Self::Gathering(..) => None,
            Self::Reducing(index, ..) | Self::ReducingReplicas(index, ..) => Some(*index),
        }
    }
}

/// This rank's shard of the mean of a parameter's gradient over ranks.
pub struct MeanGradient {
    parameter: Arc<PassParameter>,
    id: ParamId,
    mean: Tensor<1>,
}

/// Calls a function with the number of dimensions under which a gradient is returned: that of the
/// model's parameter.
macro_rules! with_dimensions {
    ($parameter:expr, $function:ident($($argument:expr),*)) => {
        match $parameter.placement {
            Placement::Owned => $function::<1>($($argument),*), // of the part
            Placement::Reduced | Placement::Replicated => match $parameter.shape.len() {
                1 => $function::<1>($($argument),*),
                2 => $function::<2>($($argument),*),
                3 => $function::<3>($($argument),*),
                4 => $function::<4>($($argument),*),
                5 => $function::<5>($($argument),*),
                6 => $function::<6>($($argument),*),
                _ => unreachable!("the layout divides parameters of up to 6 dimensions"),
            },
        }
    };
}

impl MeanGradient {
    /// Registers the gradient, with the number of dimensions of the model's parameter.
    pub fn register(self, gradients: &mut GradientsParams) {
        fn register<const D: usize>(gradients: &mut GradientsParams, id: ParamId, mean: Tensor<1>) {
            let mut shape = [1; D];
            [shape[0]] = mean.dims();
            gradients.register::<D>(id, mean.reshape(shape));
        }
        with_dimensions!(self.parameter, register(gradients, self.id, self.mean))
    }
}

/// Returns `true` if a parameter's gradient is registered under an identity.
fn has_gradient(gradients: &GradientsParams, id: ParamId, parameter: &PassParameter) -> bool {
    fn has<const D: usize>(gradients: &GradientsParams, id: ParamId) -> bool {
        gradients.get::<D>(id).is_some()
    }
    with_dimensions!(parameter, has(gradients, id))
}

/// Takes the mean gradient of a model's parameter, and drops gradients of other values.
fn mean_of(
    parameter: &Arc<PassParameter>,
    uses: &mut Uses,
    model: &Identities,
) -> Result<Option<MeanGradient>> {
    let leaves = std::mem::take(&mut uses.leaves);
    let mut mean = None;
    for uses in leaves.into_iter().filter(LeafUses::has_gradient) {
        if model.of(parameter)?.leaf == Some(uses.leaf) {
            mean = uses.mean;
        } else if uses.had_micro_batches {
            return Err(model.changed(parameter));
        }
    }
    let Some(mean) = mean else { return Ok(None) };
    let id = model.of(parameter)?.id;
    uses.returned = Some(id);
    Ok((parameter.shard_count() > 0).then(|| MeanGradient {
        parameter: parameter.clone(),
        id,
        mean,
    }))
}

/// A sum, in the order in which Burn adds the gradients of several uses.
fn added(sum: Option<Tensor<1>>, more: Tensor<1>) -> Tensor<1> {
    match sum {
        Some(sum) => sum + more,
        None => more,
    }
}
