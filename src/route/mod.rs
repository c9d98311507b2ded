//! Which parameter is updated by what, and why.
//!
//! Muon is for the matrices inside a network. Embeddings and the output head are matrices as well,
//! but look-ups rather than maps between hidden spaces, and are left to AdamW, as are vectors and
//! scalars (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>).

mod built_in;
mod rule;
mod summary;
mod walk;

use std::collections::HashMap;
use std::fmt;

use burn::module::{Module, ParamGroup, ParamId};
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::adamw::moment_dtype;
use crate::error::{Error, Result};
use crate::muon::rule::momentum_dtype;
use crate::muon::{MatrixLayout, MatrixView, Muon, MuonConfig};
use crate::skipped::{CountedOnLoad, Counting, SkippedSteps};
use built_in::Anatomy;
use rule::Rules;
pub use rule::{MuonRule, Rule};
pub use summary::GroupSummary;
pub(crate) use walk::{Found, Walk};

/// Why an optimizer refuses a parameter that it was not made for.
const UNKNOWN: &str = "was not in the model that the optimizer was made for; call `MuonConfig::init` \
                       with the model that is trained";

/// Why an optimizer refuses a parameter that was unfrozen.
const FROZEN: &str = "was frozen when the optimizer was made; call `MuonConfig::init` again with the \
                      model as it is trained now";

/// What updates a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Group {
    /// Muon, on the parameter seen as matrices.
    Muon {
        /// How it is seen as matrices.
        view: MatrixView,
        /// Which dimension counts the outputs.
        layout: MatrixLayout,
    },
    /// AdamW, at the learning rate of embeddings.
    Embedding,
    /// AdamW, at the learning rate of the output head.
    Head,
    /// AdamW, at the learning rate of vectors and scalars.
    Vector,
    /// Nothing: it did not require a gradient when the optimizer was made.
    Frozen,
}

impl Group {
    /// The name of what updates it, whichever way it is seen.
    fn name(self) -> &'static str {
        match self {
            Self::Muon { .. } => "Muon",
            Self::Embedding => "AdamW (embedding)",
            Self::Head => "AdamW (head)",
            Self::Vector => "AdamW (vector)",
            Self::Frozen => "frozen",
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Muon { view, .. } if *view != MatrixView::Single => write!(f, "Muon ({view:?})"),
            Self::Frozen => write!(f, "-"),
            group => write!(f, "{}", group.name()),
        }
    }
}

/// Where one parameter goes.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// The path of the parameter in its module.
    pub path: String,
    /// Its identity in the module it was found in.
    pub id: ParamId,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What updates it.
    pub group: Group,
    /// Why. A question mark is behind what names and places only suggest.
    pub reason: String,
    /// Floating-point operations of Muon's iteration per step.
    pub operations: f64,
    /// Bytes that its optimizer remembers, after the first step: a momentum for Muon, two moments for
    /// AdamW.
    pub state_bytes: usize,
}

/// The decision for every parameter of a model, from [`MuonConfig::route`]. Prints as a table, with its
/// [`summary`](Self::summary) below.
#[derive(Debug, Clone)]
pub struct Routing {
    routes: Vec<Route>,
    config: MuonConfig,
    muon: Muon,
}

impl Route {
    fn new(found: &Found, group: Group, reason: String, muon: &Muon) -> Result<Self> {
        let Found { path, shape, dtype, device, .. } = found;
        let elements: usize = shape.iter().product();
        let (operations, state_bytes) = match group {
            Group::Muon { view, layout } => {
                view.batch_shape(path, shape)?;
                muon.newton_schulz().check(path, device, *dtype)?;
                let muon = muon.for_parameter(path, view, layout);
                let momentum = elements * momentum_dtype(*dtype).size();
                (muon.operations(shape, *dtype, device)?, momentum)
            }
            Group::Frozen => (0.0, 0),
            _ => (0.0, 2 * elements * moment_dtype(*dtype).size()),
        };
        let (path, shape) = (path.clone(), shape.clone());
        Ok(Self { path, id: found.id, shape, group, reason, operations, state_bytes })
    }
}

impl Routing {
    pub(crate) fn new<M: Module>(config: &MuonConfig, model: &M) -> Result<Self> {
        let muon = config.try_build()?;
        let parameters = Walk::through(model);
        if parameters.is_empty() {
            return Err(Error::EmptyModel);
        }
        if !parameters.iter().any(|found| found.trainable) {
            return Err(Error::AllFrozen { parameters: parameters.len() });
        }
        refuse_shared(&parameters)?;
        let rules = Rules::compile(&config.rules, &parameters)?;
        let anatomy = Anatomy::of(&parameters);
        let route = |found: &Found| {
            let (built_in, reason) = anatomy.group(found, config.layout);
            let ruled = found.trainable.then(|| rules.decide(found, built_in, config.layout));
            let (group, reason) = ruled.flatten().unwrap_or((built_in, reason));
            Route::new(found, group, reason, &muon)
        };
        let routes = parameters.iter().map(route).collect::<Result<_>>()?;
        Ok(Self { routes, config: config.clone(), muon })
    }

    /// The decisions, in the order of the model.
    pub fn routes(&self) -> &[Route] {
        &self.routes
    }

    /// The parameters that satisfy a condition, as a Burn group: for a
    /// [`ModuleLrScheduler`](burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler) that
    /// gives them a learning rate of their own.
    ///
    /// ```
    /// # use burn::{nn::{Embedding, EmbeddingConfig}, tensor::Device};
    /// # let model = EmbeddingConfig::new(10, 4).init(&Device::default().autodiff());
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use distmuon::{Group, MuonConfig, Schedule};
    ///
    /// let routing = MuonConfig::new().route(&model)?;
    /// let mut lr = ModuleLrScheduler::new(Schedule::warmup_cosine(0.02, 100, 900, 0.0).lr())
    ///     .with_group(routing.group(|group| group == Group::Embedding), Schedule::constant(0.1).lr());
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn group(&self, condition: impl Fn(Group) -> bool) -> ParamGroup {
        let chosen = self.routes.iter().filter(|route| condition(route.group));
        let (paths, ids) = chosen.map(|route| (route.path.clone(), route.id)).unzip();
        group(paths, ids)
    }

    /// The rule for matrices that [`init`](Self::init) uses.
    pub(crate) fn muon(&self) -> &Muon {
        &self.muon
    }

    /// The steps that left parameters untouched, over all optimizers that [`init`](Self::init) made of this
    /// routing.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        self.muon.skipped_steps()
    }

    /// The optimizer that follows this routing.
    ///
    /// It finds its parameters by path, so that a model whose record was loaded later is still the
    /// same, and by identity, so that the model may be part of another. A gradient of a parameter that
    /// it finds neither way, or that was frozen, makes `step` panic, rather than being used by
    /// something else or dropped in silence.
    ///
    /// Burn's setter `with_grad_clipping` has no effect on the returned optimizer; use
    /// [`MuonConfig::grad_clipping`].
    pub fn init(&self) -> ModuleOptimizer {
        self.init_with(|muon| muon)
    }

    /// [`init`](Self::init), with what is made of the rule for each matrix.
    pub(crate) fn init_with<O: Counting>(&self, matrices: impl Fn(Muon) -> O) -> ModuleOptimizer {
        let frozen = self.group(|group| group == Group::Frozen);
        let optim = ModuleOptimizer::from(Refuse { because: UNKNOWN });
        let optim = optim.with_group(frozen, Refuse { because: FROZEN }, None);
        self.routes.iter().fold(optim, |optim, route| {
            let parameter = group(vec![route.path.clone()], vec![route.id]);
            let adamw = &self.config.adamw;
            let lr_factor = match route.group {
                Group::Muon { view, layout } => {
                    let muon = self.muon.for_parameter(&route.path, view, layout);
                    return optim.with_group(
                        parameter,
                        CountedOnLoad(matrices(muon.for_one_optimizer())),
                        None,
                    );
                }
                Group::Embedding => adamw.embedding_lr,
                Group::Head => adamw.head_lr,
                Group::Vector => adamw.vector_lr,
                Group::Frozen => return optim,
            };
            let common = (self.config.kernels, self.config.grad_clipping.as_ref());
            let adamw = adamw.build(common, lr_factor, &route.path, self.skipped_steps());
            optim.with_group(parameter, CountedOnLoad(adamw), None)
        })
    }
}

fn group(paths: Vec<String>, ids: Vec<ParamId>) -> ParamGroup {
    ParamGroup::from_paths(paths).fuse(&ParamGroup::from_ids(ids))
}

/// Refuses a trained parameter that is in the model twice: a step gives its gradient to the first place
/// only, and makes two parameters of it.
fn refuse_shared(parameters: &[Found]) -> Result<()> {
    let mut paths = HashMap::new();
    for found in parameters.iter().filter(|found| found.trainable) {
        if let Some(first) = paths.insert(found.id, &found.path) {
            return Err(Error::Shared { first: first.clone(), second: found.path.clone() });
        }
    }
    Ok(())
}

/// A stand-in for the optimizer of a parameter that has none.
#[derive(Clone)]
struct Refuse {
    /// Why, after "a parameter of shape `[..]`".
    because: &'static str,
}

impl Optimizer for Refuse {
    type State<const D: usize> = ();

    fn step<const D: usize>(
        &self,
        _lr: LearningRate,
        parameter: Tensor<D>,
        _grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        let shape = parameter.dims();
        // What has no elements is never trained.
        assert!(shape.contains(&0), "a parameter of shape {shape:?} {}", self.because);
        (parameter, None)
    }

    fn to_device<const D: usize>(_state: (), _device: &Device) {}
}
