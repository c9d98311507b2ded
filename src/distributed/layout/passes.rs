//! The collectives of forward and backward passes: parts of parameters are gathered before their
//! use, and gradients are reduced after it.
//!
//! All ranks make the same calls, since a decision depends on the sequence of uses, and on maps of
//! the model between them, but never on time: all ranks map the model alike. So do the cuts between
//! messages, each of which has several parameters. Results are waited for in the order of the
//! calls.
//!
//! A forward pass can't return an error. After a failure, values are NaN, nothing is sent, and
//! [`Passes::finish`] returns the error.

mod end_of_pass;
mod for_step;
mod gather_parameters;
mod message;
mod new_parts;
mod reduce_gradients;
mod state;
mod unused_parameters;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Shape, Tensor};
use serde::{Deserialize, Serialize};

use super::MicroBatches;
use super::identity::{Values, Version};
use super::pass_calls::{Event, Events};
use super::pass_parameter::PassParameter;
use crate::comm::{Communicator, World};
use crate::distributed::exclusive::{Access, Exclusive};
use crate::error::{Error, Result};
use crate::link::{GraphOrder, Link, identity};
pub use message::Message;
use state::{Arrived, Flight, InUse, OwnedPart, PassMode, PassState, Uses};
pub use state::{PassBytes, Publishing, ReportedBytes};

/// The weights that are kept between the forward and the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Keep {
    /// None: a weight is gathered again when the backward pass needs it. This is ZeRO-3, or fully
    /// sharded data parallelism. Vectors are kept where ranks may leave parameters out
    /// ([`Layout::allow_unused`](super::Layout::allow_unused)).
    ///
    /// The model has to be on a device with
    /// [`gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing). Without it, Burn
    /// keeps weights of which a layer makes a view, as an output head does that is the transpose
    /// of an embedding.
    Nothing,
    /// All: two thirds of the messages, and the memory of the whole model from the forward to the
    /// backward pass.
    Weights,
}

/// The actions of a rank on a parameter, in errors.
const GATHERING: &str = "gathering";
const REDUCING: &str = "reducing the gradient of";
const PUBLISHING: &str = "publishing";

/// The number of uses of a parameter in a pass after which the user is told that no backward pass
/// has followed.
const MANY_USES: usize = 10_000;

/// The limits of what is sent ahead, and of what ranks may leave out. A message has up to half of
/// the bytes of a limit: one is on its way while another is used up, or collected.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub keep: Keep,
    /// Bytes of parameters that are gathered before they are used.
    pub ahead: usize,
    /// Bytes of gradients that are collected and reduced.
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
    order: GraphOrder,
    /// Taken by a call for as long as it waits for other ranks.
    state: Exclusive<PassState>,
    reported: Arc<Mutex<ReportedBytes>>,
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
        let reported = state.reported.clone();
        Self {
            groups,
            parameters,
            by_path,
            micro_batches,
            limits,
            order: GraphOrder::default(),
            state: Exclusive::new(state),
            reported,
        }
    }

    pub fn parameters(&self) -> &[Arc<PassParameter>] {
        &self.parameters
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Cuts a sequence of parameters into messages. The parameters of a message have one type, are
    /// cut along the same axes, and have at most half of the bytes of the limit ahead; or there is
    /// one.
    pub fn in_messages(&self, indices: impl IntoIterator<Item = usize>) -> Vec<Vec<usize>> {
        let of = |index: usize| &self.parameters[index];
        let kind = |index: usize| (of(index).axes(), of(index).dtype);
        let bytes =
            |message: &[usize]| message.iter().map(|index| of(*index).bytes()).sum::<usize>();
        let mut messages: Vec<Vec<usize>> = vec![];
        for index in indices {
            let alike = messages.iter_mut().rev().find(|message| kind(message[0]) == kind(index));
            let more = bytes(&[index]);
            match alike.filter(|message| bytes(message) + more <= self.limits.ahead / 2) {
                Some(message) => message.push(index),
                None => messages.push(vec![index]),
            }
        }
        messages
    }

    /// The state, for what waits for no other rank.
    fn state(&self) -> InUse<'_> {
        self.take(Access::Look)
    }

    /// The state, for a call that may wait for other ranks.
    fn calling(&self) -> InUse<'_> {
        self.take(Access::Call)
    }

    /// The state. A second thread that needs it while a call waits for other ranks ends the wait:
    /// all ranks fail, instead of waiting for each other.
    fn take(&self, access: Access) -> InUse<'_> {
        let mut error = None;
        let mut state = self.state.take(access, || {
            if self.groups.world.size() > 1 {
                // Before this thread waits: the other one leaves its call when the world fails.
                self.tell(error.insert(Error::usage(
                    "a divided model is in use by two threads of a rank at once",
                    "one thread, whose calls have the same order on all ranks",
                    "a call while another thread's call waits for other ranks",
                    "let one thread make the calls, or give the other a copy from \
                     `Layout::unshard`",
                )));
            }
        });
        state.failure = error.or(state.failure.take());
        InUse(state)
    }

    /// The whole of a parameter for a use in a forward pass. Its gradient is reduced to the parts.
    pub fn use_whole<const D: usize>(
        self: &Arc<Self>,
        parameter: &Arc<PassParameter>,
        (part, version): (Tensor<1>, Version),
        shape: Shape,
    ) -> Tensor<D> {
        // Copied, so that the state is free again: the calls below take it.
        let PassMode { is_reading, is_listing, is_unused, .. } = self.calling().mode;
        let is_trained = part.is_require_grad() && !is_reading && !is_listing;
        // The identity of the values decides whether what was gathered ahead is still right.
        // Without autodiff there is no leaf, and the number takes its place.
        let values = Values { leaf: identity(&part), version: Some(version) };
        let inner = part.clone().without_autodiff();
        let device = inner.device();
        let used = OwnedPart { values, tensor: inner };
        if is_listing {
            self.calling().listed.push(Event::Gather(parameter.index, Some(version)));
        }
        let gathered = (!is_listing).then(|| match is_trained {
            true => self.gather(parameter, used),
            false => self.gather_evaluated(parameter, used, is_reading),
        });
        let whole = match gathered.filter(|_| !is_unused) {
            Some(whole) => whole.reshape(shape),
            // No layer reads it: one element in memory.
            None => Tensor::<D>::zeros([1; D], (&device, parameter.dtype)).expand(shape),
        };
        if is_unused && is_trained {
            self.leave_out(parameter, &part);
        }
        if !is_trained || is_unused {
            return match part.gradient_checkpointing_strategy() {
                // On the autodiff device of the part, with its strategy: layers mix it with tensors
                // that have autodiff.
                Some(strategy) => {
                    Tensor::from_inner(whole).with_gradient_checkpointing_strategy(strategy)
                }
                None => whole,
            };
        }
        let link = self.reducing(parameter, &part);
        let link = match self.keeps_whole(parameter) {
            true => link,
            false => {
                let (from, of) = (Arc::downgrade(self), parameter.clone());
                link.made_again(move |part| match from.upgrade() {
                    Some(passes) => passes.gather_again(&of, OwnedPart { values, tensor: part }),
                    None => of.nan(&part.device()),
                })
            }
        };
        // Only the part is a parent: its leaf gets the gradient, and the whole is no part of the
        // graph.
        link.at(self.order.next(&part)).attach(part, whole)
    }

    /// Returns `true` if the whole of a parameter stays in the graph until the backward pass.
    ///
    /// Burn computes what a layer has read anew where it needs it, with the vectors that other
    /// layers have added or multiplied. Where ranks leave layers out, these are other layers, and
    /// each rank would gather their vectors in another order. Matrices come in the order of the
    /// products that read them.
    fn keeps_whole(&self, parameter: &PassParameter) -> bool {
        match self.limits.keep {
            Keep::Weights => true,
            Keep::Nothing => self.limits.allows_unused && parameter.shape.len() == 1,
        }
    }

    /// A parameter that this rank has, for a use in a forward pass. Its gradient is reduced.
    pub fn use_replica<const D: usize>(
        self: &Arc<Self>,
        parameter: &Arc<PassParameter>,
        whole: Tensor<D>,
    ) -> Tensor<D> {
        if !whole.is_require_grad() {
            // Without the state: an evaluation in another thread does not wait for a pass.
            return whole;
        }
        let PassMode { is_reading, is_listing, is_unused, .. } = self.calling().mode;
        if is_reading || is_listing {
            // Without a backward pass, a count of the use would wait for a gradient for ever.
            return whole;
        }
        if is_unused {
            self.leave_out(parameter, &whole);
            return whole;
        }
        // The value itself, by a link: the parameter's own gradient would stay on this rank.
        let value = whole.clone().without_autodiff();
        self.reducing(parameter, &whole).at(self.order.next(&whole)).attach(whole, value)
    }

    /// Counts a use by other ranks.
    fn leave_out<const D: usize>(&self, parameter: &PassParameter, value: &Tensor<D>) {
        self.state().uses[parameter.index].are_left_out = true;
        // The links after it have the same depths on all ranks.
        drop(self.order.next(value));
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
        // Equal, so that it is said once.
        if count == MANY_USES {
            log::warn!(
                "`{}` was used {MANY_USES} times without a backward pass in between: evaluate \
                 `model.valid()`, or call `Layout::discard_pass` after a forward pass that is not \
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

    /// Waits for the result of the oldest call.
    fn land(&self, state: &mut PassState) -> Result<()> {
        match state.flights.pop_front().expect("a call was started") {
            Flight::Gathering(indices, message, pending) => {
                let buffer =
                    pending.wait().map_err(|error| self.in_action(GATHERING, &indices, error))?;
                for (position, index) in indices.into_iter().enumerate() {
                    let arrived =
                        Arrived { buffer: buffer.clone(), starts: message.starts(position) };
                    let ahead = state.uses[index].ahead.as_mut();
                    ahead.expect("the parameter is gathered").arrived = Some(arrived);
                }
                Ok(())
            }
            Flight::Reducing(reduction) => self.land_reduction(state, reduction),
        }
    }

    /// The error of a message, with what it was for.
    fn in_action(&self, action: &str, indices: &[usize], error: Error) -> Error {
        let first = &self.parameters[indices[0]].path;
        let more = match indices.len() {
            1 => String::new(),
            several => format!(" and {} more", several - 1),
        };
        error.in_action(&format!("{action} `{first}`{more}"))
    }

    /// The outcome of a part of a pass. `None` after a failure, which all ranks are told of.
    fn attempt<T>(
        &self,
        state: &mut PassState,
        run: impl FnOnce(&mut PassState) -> Result<T>,
    ) -> Option<T> {
        // No further call: the other ranks are told of the failure and make none either.
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
        self.during(|state| &mut state.mode.is_reading, read)
    }

    /// Fails unless all ranks have models of the same values: the model of the last step, or clones
    /// that they have changed alike. All ranks make this call. Only owned parameters are compared,
    /// and without any it sends nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`], or [`Error::PeerFailed`] with its text on the ranks of other groups; a
    /// failure of a pass.
    pub fn ensure_same_values<M: Module>(&self, model: &M) -> Result<()> {
        self.ensure_alive()?;
        if !self.parameters.iter().any(|parameter| parameter.placement.is_owned()) {
            return Ok(());
        }
        self.calling().listed = Events::default();
        self.during(|state| &mut state.mode.is_listing, || drop(model.clone().materialize()));
        let listed = std::mem::take(&mut self.calling().listed);
        // In all groups, before the ranks of other ones are told: these wait in their own.
        let differences: Vec<_> = self.differences(&listed).collect::<Result<_>>()?;
        let difference = differences.into_iter().flatten().next();
        let outcome = difference.map_or(Ok(()), |calls| {
            Err(Error::Mismatch { calls }.in_action("comparing the values of the model"))
        });
        self.groups.world.agree(outcome)
    }

    /// Runs the backward pass of a step, which adds the gradients of earlier micro-batches.
    pub fn in_backward<T>(&self, backward: impl FnOnce() -> T) -> T {
        self.during(|state| &mut state.mode.is_backward, backward)
    }

    /// Runs the backward pass of a micro-batch, whose gradients stay on this rank.
    pub fn in_micro_batch<T>(&self, backward: impl FnOnce() -> T) -> T {
        self.during(|state| &mut state.mode.is_micro_batch, backward)
    }

    /// Sets a flag while a function runs, until it returns or panics.
    fn during<T>(&self, flag: fn(&mut PassState) -> &mut bool, run: impl FnOnce() -> T) -> T {
        struct Set<'a>(&'a Passes, fn(&mut PassState) -> &mut bool);
        impl Drop for Set<'_> {
            fn drop(&mut self) {
                *(self.1)(&mut self.0.state()) = false;
            }
        }
        // Set before the guard is made, which resets it also after a panic of the layers.
        *flag(&mut self.state()) = true;
        let _set = Set(self, flag);
        run()
    }

    /// Keeps a failure, of which all ranks are told.
    fn fail(&self, state: &mut PassState, error: Error) {
        // At once, and not at the end of the pass: the others wait for this rank in the next call.
        self.tell(&error);
        state.failure = Some(error);
    }

    /// Tells all ranks of a failure.
    fn tell(&self, error: &Error) {
        self.groups.world.comm().fail(&error.to_string());
    }

    /// The bytes held now, and at the peaks of all passes. Waits for no other rank.
    pub fn reported(&self) -> ReportedBytes {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fails after a failure in a pass.
    pub fn ensure_alive(&self) -> Result<()> {
        self.state().failure.clone().map_or(Ok(()), Err)
    }

    /// The ranks that have replicas of this rank's part of a parameter.
    pub fn replicas(&self, parameter: &PassParameter) -> &Communicator {
        self.groups.of(parameter).replicas.comm()
    }
}
