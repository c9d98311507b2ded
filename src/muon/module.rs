//! Muon and AdamW for a whole model, as Burn's optimizer of modules.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ParamGroup};
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

use super::split::{BlockRule, Split};
use super::{Muon, MuonConfig};
use crate::custom::Whole;
use crate::elementwise::Elementwise;
use crate::error::{Error, Result};
use crate::matrix_view::MatrixView;
use crate::parameters::{self, Found};
use crate::routing::{ParameterRole, Routing, RoutingRule, Updates, parameter_group};
use crate::update::{Refusals, Resumable, Resumed, SkippedSteps, Unrouted};

impl MuonConfig {
    /// Decides which optimizer updates each parameter of a model. The result prints as a table.
    ///
    /// # Errors
    ///
    /// - [`Error::Setting`](crate::Error::Setting) for a setting that no run can use, such as a
    ///   rule that names an optimizer that was not given;
    /// - [`Error::Dtype`](crate::Error::Dtype) for an iteration in a type that a device does not
    ///   support;
    /// - [`Error::NoView`](crate::Error::NoView) for parameters of more than two dimensions without
    ///   a rule for their view as matrices;
    /// - [`Error::Shape`](crate::Error::Shape) for blocks that do not make up a matrix;
    /// - [`Error::Pattern`](crate::Error::Pattern) and
    ///   [`Error::UnusedRule`](crate::Error::UnusedRule) for rules that are malformed or match
    ///   nothing;
    /// - [`Error::Unexpected`](crate::Error::Unexpected) for an
    ///   [expectation](crate::MuonConfig::expect) that does not hold;
    /// - [`Error::Shared`](crate::Error::Shared) for a parameter that is in the model twice;
    /// - [`Error::EmptyModel`](crate::Error::EmptyModel) and
    ///   [`Error::AllFrozen`](crate::Error::AllFrozen) for a model without parameters to train.
    pub fn route<M: Module>(&self, model: &M) -> Result<Routing> {
        self.route_found(&parameters::lazily(model))
    }

    /// [`route`](Self::route) for the parameters of a model.
    pub(crate) fn route_found(&self, parameters: &[Found]) -> Result<Routing> {
        self.optimizers.check(self.rules.iter().filter_map(RoutingRule::optimizer))?;
        let muon = self.update()?;
        self.check_rules()?;
        let updates = Updates {
            rest: vec![Arc::new(self.rest.update(
                self.precision(),
                self.kernels,
                self.grad_clipping.as_ref(),
                muon.ledger.clone(),
            ))],
            muon: vec![Arc::new(muon)],
            custom: self.optimizers.clone(),
            skipped: SkippedSteps::new(self.max_skipped),
            max_absent: self.max_absent,
        };
        let routing =
            Routing::new(updates, &self.rules, self.layout, self.first_linear, parameters)?
                .expecting(&self.expectations)?;
        log::debug!("optimizer of every parameter:\n{routing}");
        Ok(routing)
    }

    /// Makes Burn's optimizer for the whole model: hidden matrices by Muon, the rest by AdamW.
    ///
    /// Burn passes the optimizer one parameter at a time, so only the matrices of one stacked
    /// parameter form a batch. Each matrix takes 20 to 30 launches, and each other parameter 6.
    /// [`init_batched`](Self::init_batched) takes about 30 for all matrices of one shape. Use
    /// `try_init` where a `ModuleOptimizer` is required, as by burn-train's `Learner`.
    ///
    /// To clip gradients, set [`grad_clipping`](Self::grad_clipping). Burn's setter
    /// `with_grad_clipping` of the returned optimizer has no effect, since it reaches a part of the
    /// optimizer that updates nothing. See the guide's [clipping](crate::guide::clipping).
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route), and [`Error::Shared`](crate::Error::Shared) for a trained
    /// parameter of which a frozen clone comes first in the model: Burn gives the gradient to the
    /// clone. [`Error::Parameter`] for a model of a [`Layout`](crate::distributed::Layout) that
    /// divides parameters, or reduces gradients in passes.
    pub fn try_init<M: Module>(&self, model: &M) -> Result<ModuleOptimizer> {
        parameters::ensure_on_one_device(model)?;
        self.route(model)?.init_with(|muon| muon)
    }

    /// Makes Burn's optimizer for the whole model like [`try_init`](Self::try_init), but panics
    /// instead of returning an error, as Burn's configurations do. On a GPU,
    /// [`init_batched`](Self::init_batched) takes far fewer launches.
    ///
    /// Burn's setter `with_grad_clipping` has no effect on the returned optimizer; set
    /// [`grad_clipping`](Self::grad_clipping) instead.
    ///
    /// # Panics
    ///
    /// With the message of the error that `try_init` returns.
    pub fn init<M: Module>(&self, model: &M) -> ModuleOptimizer {
        self.try_init(model).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Routing {
    /// Makes Burn's optimizer that follows this routing.
    ///
    /// The optimizer finds its parameters by path, so that a record may be loaded into the model
    /// later, and by identity, so that the model may become part of another. `step` panics for the
    /// gradient of a parameter that the optimizer finds in neither way, or that was frozen when the
    /// routing was made: such a gradient is never dropped silently.
    ///
    /// Burn's setter `with_grad_clipping` has no effect on the returned optimizer; set
    /// [`MuonConfig::grad_clipping`] instead.
    ///
    /// # Panics
    ///
    /// With the message of [`Error::Shared`], for a trained parameter of
    /// which a frozen clone comes first in the model.
    pub fn init(&self) -> ModuleOptimizer {
        self.init_with(|muon| muon).unwrap_or_else(|error| panic!("{error}"))
    }

    /// [`init`](Self::init), with an optimizer that is made of the rule for each matrix, and with
    /// its error.
    pub(crate) fn init_with<O: Resumable>(
        &self,
        matrices: impl Fn(Muon) -> O,
    ) -> Result<ModuleOptimizer> {
        // Before any group is made: Burn gives a gradient to the first parameter of an identity.
        self.ensure_first()?;
        // One for all rules, so that the reasons of all refused states are in one message.
        let refusals = Refusals::new(self.updates().max_absent);
        let unknown = Unrouted::unknown(&refusals);
        let optim = ModuleOptimizer::from(Fallback).with_group(ParamGroup::all(), unknown, None);
        let updates @ Updates { muon, rest, skipped, .. } = self.updates();
        // Those that are trained come last, and count: a frozen clone has the identity of one.
        let (frozen, trained): (Vec<_>, Vec<_>) =
            self.routes().iter().partition(|route| route.role == ParameterRole::Frozen);
        let optim = frozen.into_iter().chain(trained).fold(optim, |optim, route| {
            let path = &*route.path;
            let parameter: ParamGroup = parameter_group(vec![route.path.clone()], vec![route.id]);
            match route.role {
                ParameterRole::Muon { view, layout } => {
                    let rule = |path: &str, view| {
                        let once = self.expected().once();
                        let muon = &muon[route.settings];
                        matrices(Muon::for_parameter(muon, path, (view, layout), skipped, once))
                    };
                    let blocks = route.matrix_blocks().expect("a route has matrices");
                    if blocks.is_whole() {
                        let rule = Resumed::new(rule(path, view), path, &refusals);
                        return optim.with_group(parameter, rule, None);
                    }
                    let names = blocks.names(path);
                    let of_block = |(index, name): (usize, &String)| {
                        if route.left.contains(&index) {
                            let role = self.factors_of_left();
                            let rule = Elementwise::new(rest[0].clone(), role, name, skipped);
                            return BlockRule::Elements(rule);
                        }
                        BlockRule::Matrices(rule(name, MatrixView::Batch))
                    };
                    let rules = names.iter().enumerate().map(of_block).collect();
                    let rule = Resumed::new(Split::new(blocks, rules), path, &refusals);
                    optim.with_group(parameter, rule, None)
                }
                ParameterRole::Embedding | ParameterRole::Head | ParameterRole::Vector => {
                    let (role, rest) = (route.factors, &rest[route.settings]);
                    if let Some(name) = &route.custom {
                        let rule = Whole::new(updates.whole(name), rest, role.lr, path, skipped);
                        let rule = Resumed::new(rule, path, &refusals);
                        return optim.with_group(parameter, rule, None);
                    }
                    let rule = Elementwise::new(rest.clone(), role, path, skipped);
                    optim.with_group(parameter, Resumed::new(rule, path, &refusals), None)
                }
                ParameterRole::Frozen => {
                    optim.with_group(parameter, Unrouted::frozen(path, &refusals), None)
                }
            }
        });
        Ok(optim)
    }

    /// Fails for a trained parameter whose identity a frozen one before it has.
    fn ensure_first(&self) -> Result<()> {
        let mut frozen = HashMap::new();
        for route in self.routes() {
            if route.role == ParameterRole::Frozen {
                frozen.entry(route.id).or_insert(&route.path);
            } else if let Some(first) = frozen.get(&route.id) {
                let (first, second) = ((*first).clone(), route.path.clone());
                return Err(Error::Shared { first, second });
            }
        }
        Ok(())
    }
}

/// The first optimizer of a [`ModuleOptimizer`], which Burn wants to be an [`Optimizer`]. The next
/// group, of all parameters, comes before it.
#[derive(Clone)]
struct Fallback;

impl Optimizer for Fallback {
    type State<const D: usize> = ();

    fn step<const D: usize>(
        &self,
        _lr: LearningRate,
        _parameter: Tensor<D>,
        _grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        unreachable!("another group has every parameter")
    }

    fn to_device<const D: usize>(_state: (), _device: &Device) {}
}
