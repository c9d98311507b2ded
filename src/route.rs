//! Which parameter is updated by what, and why.
//!
//! Muon is for the matrices inside a network. Embeddings and the output head are matrices as well,
//! but look-ups rather than maps between hidden spaces, and are left to AdamW, as are vectors and
//! scalars (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>).

use std::collections::HashMap;
use std::fmt;

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{DType, Device, Tensor};
use comfy_table::{Table, presets};
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::muon::{MatrixLayout, MatrixView, Muon, MuonConfig};
use crate::skipped::SkippedSteps;

/// Names of fields that hold an output head.
const HEAD_NAMES: [&str; 6] =
    ["head", "lm_head", "output", "output_head", "unembed", "unembedding"];

/// Parts of the names of fields that hold embeddings.
const EMBEDDING_NAMES: [&str; 3] = ["embed", "wte", "wpe"];

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
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Muon { view: MatrixView::Single, .. } => write!(f, "Muon"),
            Self::Muon { view, .. } => write!(f, "Muon ({view:?})"),
            Self::Embedding => write!(f, "AdamW (embedding)"),
            Self::Head => write!(f, "AdamW (head)"),
            Self::Vector => write!(f, "AdamW (vector)"),
        }
    }
}

/// Sends the parameters whose path matches a regular expression to Muon or to AdamW.
///
/// A path is made of field names and indices, as in `blocks.0.mlp.up.weight`; the expression may
/// match any part of it.
///
/// ```
/// use distmuon::Rule;
///
/// let experts = Rule::muon(r"experts\.(up|down)$").batch();
/// let convolutions = Rule::muon(r"^stem\.conv\d+\.weight$").flatten();
/// let probe = Rule::adamw("probe");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    pattern: String,
    to: Destination,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Destination {
    Muon { view: MatrixView, layout: Option<MatrixLayout> },
    AdamW,
}

impl Rule {
    /// To Muon, as single matrices.
    pub fn muon(pattern: impl Into<String>) -> Self {
        let to = Destination::Muon { view: MatrixView::Single, layout: None };
        Self { pattern: pattern.into(), to }
    }

    /// To AdamW: at the rate of embeddings or of the head where the built-in rules see one, else at
    /// the rate of vectors.
    pub fn adamw(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), to: Destination::AdamW }
    }

    /// To Muon, as a stack of matrices: the last two dimensions, for every index of the others.
    pub fn batch(self) -> Self {
        self.with_view(MatrixView::Batch, None)
    }

    /// To Muon, as one matrix of the first dimension by all others. The first dimension counts the
    /// outputs, as in Burn's convolutions.
    pub fn flatten(self) -> Self {
        self.with_view(MatrixView::Flatten, Some(MatrixLayout::OutIn))
    }

    /// Says which dimension of the matrix counts the outputs, for Muon's learning-rate scale.
    pub fn layout(mut self, layout: MatrixLayout) -> Self {
        if let Destination::Muon { layout: chosen, .. } = &mut self.to {
            *chosen = Some(layout);
        }
        self
    }

    fn with_view(mut self, view: MatrixView, layout: Option<MatrixLayout>) -> Self {
        self.to = Destination::Muon { view, layout };
        self
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
    /// Why.
    pub reason: String,
}

/// The decision for every parameter of a model, from [`MuonConfig::route`]. Prints as a table.
#[derive(Debug, Clone)]
pub struct Routing {
    routes: Vec<Route>,
    config: MuonConfig,
    muon: Muon,
}

impl Routing {
    pub(crate) fn new<M: Module>(config: &MuonConfig, model: &M) -> Result<Self> {
        let muon = config.try_build()?;
        let parameters = Walk::through(model);
        if parameters.is_empty() {
            return Err(Error::EmptyModel);
        }
        refuse_shared(&parameters)?;
        let rules = compile(&config.rules)?;
        if let Some((rule, _)) = rules
            .iter()
            .find(|(_, regex)| !parameters.iter().any(|found| regex.is_match(&found.path)))
        {
            return Err(Error::UnusedRule { pattern: rule.pattern.clone() });
        }
        let heads = heads(&parameters);
        let routes = parameters
            .iter()
            .map(|found| {
                let (built_in, reason) = found.group(&heads, config.layout);
                let rule = rules.iter().rev().find(|(_, regex)| regex.is_match(&found.path));
                let (group, reason) = match rule {
                    Some((rule, _)) => {
                        (rule.group(built_in, config.layout), format!("rule `{}`", rule.pattern))
                    }
                    None => (built_in, reason.to_owned()),
                };
                if let Group::Muon { view, .. } = group {
                    view.batch_shape(&found.path, &found.shape)?;
                    muon.newton_schulz().check(&found.path, &found.device, found.dtype)?;
                }
                let (path, shape) = (found.path.clone(), found.shape.clone());
                Ok(Route { path, id: found.id, shape, group, reason })
            })
            .collect::<Result<_>>()?;
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

    /// How often each parameter was left untouched because its gradient was not finite, over all
    /// optimizers that [`init`](Self::init) made of this routing.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        self.muon.skipped_steps()
    }

    /// The optimizer that follows this routing.
    ///
    /// It finds its parameters by path, so that a model whose record was loaded later is still the
    /// same, and by identity, so that the model may be part of another. A parameter that it finds
    /// neither way makes `step` panic, rather than being trained by something else in silence.
    pub fn init(&self) -> ModuleOptimizer {
        self.init_with(|muon| muon)
    }

    /// [`init`](Self::init), with what is made of the rule for each matrix.
    pub(crate) fn init_with<O: Optimizer>(&self, matrices: impl Fn(Muon) -> O) -> ModuleOptimizer {
        self.routes.iter().fold(ModuleOptimizer::from(Unrouted), |optim, route| {
            let parameter = group(vec![route.path.clone()], vec![route.id]);
            let adamw = &self.config.adamw;
            let lr_factor = match route.group {
                Group::Muon { view, layout } => {
                    let muon = self.muon.for_parameter(&route.path, view, layout);
                    return optim.with_group(parameter, matrices(muon), None);
                }
                Group::Embedding => adamw.embedding_lr,
                Group::Head => adamw.head_lr,
                Group::Vector => adamw.vector_lr,
            };
            let common = (self.config.kernels, self.config.grad_clipping.as_ref());
            let adamw = adamw.build(common, lr_factor, &route.path, self.skipped_steps());
            optim.with_group(parameter, adamw, None)
        })
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["parameter", "shape", "optimizer", "reason"]);
        for Route { path, shape, group, reason, .. } in &self.routes {
            table.add_row([path, &format!("{shape:?}"), &group.to_string(), reason]);
        }
        write!(f, "{table}")
    }
}

impl Rule {
    /// The group of a parameter that the built-in rules would send to `built_in`.
    fn group(&self, built_in: Group, layout: MatrixLayout) -> Group {
        match (self.to, built_in) {
            (Destination::Muon { view, layout: own }, _) => {
                Group::Muon { view, layout: own.unwrap_or(layout) }
            }
            (Destination::AdamW, Group::Muon { .. }) => Group::Vector,
            (Destination::AdamW, built_in) => built_in,
        }
    }
}

fn compile(rules: &[Rule]) -> Result<Vec<(&Rule, Regex)>> {
    rules
        .iter()
        .map(|rule| match Regex::new(&rule.pattern) {
            Ok(regex) => Ok((rule, regex)),
            Err(error) => {
                Err(Error::Pattern { pattern: rule.pattern.clone(), reason: error.to_string() })
            }
        })
        .collect()
}

fn group(paths: Vec<String>, ids: Vec<ParamId>) -> ParamGroup {
    ParamGroup::from_paths(paths).fuse(&ParamGroup::from_ids(ids))
}

/// A float parameter as a walk through the module finds it.
pub(crate) struct Found {
    pub path: String,
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    device: Device,
    /// Whether it is trained, rather than frozen.
    pub trainable: bool,
    /// The type that holds it, as in `Linear`.
    holder: String,
}

impl Found {
    /// What the built-in rules decide, given the paths of the output heads.
    fn group(&self, heads: &[&str], layout: MatrixLayout) -> (Group, &'static str) {
        let embedding = |name: &str| EMBEDDING_NAMES.iter().any(|part| name.contains(part));
        if self.shape.len() < 2 {
            (Group::Vector, "fewer than two dimensions")
        } else if self.holder == "Embedding" {
            (Group::Embedding, "in an Embedding")
        } else if self.path.split('.').any(embedding) {
            (Group::Embedding, "named as an embedding")
        } else if heads.contains(&self.path.as_str()) {
            (Group::Head, "output head")
        } else {
            (Group::Muon { view: MatrixView::Single, layout }, "hidden matrix")
        }
    }

    /// Whether the path has an index, so that there may be others like it.
    fn in_stack(&self) -> bool {
        self.path.split('.').any(|name| name.chars().all(|c| c.is_ascii_digit()))
    }
}

/// The paths of the output heads: the matrices in fields of such names, or else the last `Linear`.
///
/// A matrix in a stack of layers is never one: where the head is tied to the embedding, the last
/// `Linear` belongs to the last layer.
fn heads(parameters: &[Found]) -> Vec<&str> {
    let alone = || parameters.iter().filter(|found| found.shape.len() == 2 && !found.in_stack());
    let named = |found: &&Found| found.path.split('.').any(|name| HEAD_NAMES.contains(&name));
    let named: Vec<&str> = alone().filter(named).map(|found| found.path.as_str()).collect();
    let last = parameters.iter().rfind(|found| found.holder == "Linear" && found.shape.len() == 2);
    match last {
        Some(last) if named.is_empty() && !last.in_stack() => vec![&last.path],
        _ => named,
    }
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

/// Collects the float parameters of a module.
#[derive(Default)]
pub(crate) struct Walk {
    names: Vec<String>,
    holders: Vec<String>,
    found: Vec<Found>,
}

impl Walk {
    /// The parameters of a model, in its order.
    pub fn through<M: Module>(model: &M) -> Vec<Found> {
        let mut walk = Self::default();
        model.visit(&mut walk);
        walk.found
    }
}

impl ModuleVisitor for Walk {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        self.found.push(Found {
            path: self.names.join("."),
            id: param.id,
            shape: value.dims().to_vec(),
            dtype: value.dtype(),
            device: value.device(),
            trainable: value.is_require_grad(),
            holder: self.holders.last().cloned().unwrap_or_default(),
        });
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.names.push(name.to_owned());
        let holder = container_type.strip_prefix("Struct:").unwrap_or(container_type);
        self.holders.push(holder.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.pop();
        self.holders.pop();
    }
}

/// What the optimizer falls back to for a parameter that its routing has not seen.
#[derive(Clone)]
struct Unrouted;

impl Optimizer for Unrouted {
    type State<const D: usize> = ();

    fn step<const D: usize>(
        &self,
        _lr: LearningRate,
        parameter: Tensor<D>,
        _grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        panic!(
            "a parameter of shape {:?} was not in the model that the optimizer was made for; call \
             `MuonConfig::init` with the model that is trained",
            parameter.dims()
        )
    }

    fn to_device<const D: usize>(_state: (), _device: &Device) {}
}
