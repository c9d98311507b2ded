//! The optimizer of every parameter, and the reason for it.
//!
//! Muon is for the matrices inside a network, which map hidden spaces to hidden spaces. AdamW
//! updates the embeddings and the output head, which are matrices as well, and all vectors and
//! scalars (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>).
//!
//! ```
//! use burn::{nn::LinearConfig, tensor::Device};
//! use distmuon::MuonConfig;
//! use distmuon::routing::{ParameterRole, Routing};
//!
//! let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
//! let routing: Routing = MuonConfig::new().route(&model)?;
//! assert_eq!(routing.routes()[1].role, ParameterRole::Vector); // the bias
//! # Ok::<(), distmuon::Error>(())
//! ```

mod built_in;
mod expectations;
mod layers;
mod names;
mod rules;
mod settings;
mod shapes_without_view;
mod summary;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use burn::module::{ParamGroup, ParamId};
use serde::{Deserialize, Serialize};

use crate::custom::CustomOptimizers;
use crate::error::{Error, Result};
use crate::matrix_blocks::{BlockSide, Blocks};
use crate::matrix_view::{MatrixLayout, MatrixView};
use crate::parameters::Found;
use crate::update::{
    ElementwiseUpdate, Ledger, MAX_RANK, Matrices, MuonUpdate, Precision, RoleSettings, Roles,
    SkippedSteps, WholeUpdate,
};
use built_in::Anatomy;
pub use expectations::Expectation;
pub(crate) use expectations::{Expected, Stepped, ensure_once};
use rules::{Decision, Rules};
pub use rules::{MuonRoutingRule, RoutingRule};
use settings::OwnSettings;
pub use summary::RoleSummary;

/// The role of a parameter, which decides on its optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ParameterRole {
    /// Muon, on the parameter seen as matrices.
    Muon {
        /// The view of the parameter as matrices.
        view: MatrixView,
        /// The dimension of those matrices that counts the outputs of the layer.
        layout: MatrixLayout,
    },
    /// AdamW or another optimizer, at the learning rate of embeddings.
    Embedding,
    /// AdamW or another optimizer, at the learning rate of the output head.
    Head,
    /// AdamW or another optimizer, at the learning rate of vectors and scalars.
    Vector,
    /// No optimizer: the parameter did not require a gradient when the routing was made, or does
    /// not have elements.
    Frozen,
}

impl ParameterRole {
    /// The number of roles, where all views of matrices are one.
    const COUNT: usize = 5;

    /// The position of the role in summaries.
    fn index(self) -> usize {
        match self {
            Self::Muon { .. } => 0,
            Self::Embedding => 1,
            Self::Head => 2,
            Self::Vector => 3,
            Self::Frozen => 4,
        }
    }

    /// The role with the plain view of a matrix.
    fn without_view(self) -> Self {
        match self {
            Self::Muon { layout, .. } => Self::Muon { view: MatrixView::Single, layout },
            role => role,
        }
    }
}

impl fmt::Display for ParameterRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Muon { view: MatrixView::Single, .. } => write!(f, "matrix"),
            Self::Muon { view, .. } => write!(f, "matrix ({view:?})"),
            Self::Embedding => write!(f, "embedding"),
            Self::Head => write!(f, "head"),
            Self::Vector => write!(f, "vector"),
            Self::Frozen => write!(f, "frozen"),
        }
    }
}

/// The optimizer of the first `Linear` of a network, whose inputs are data rather than outputs of
/// other layers, as in a perceptron. Networks whose inputs go through an `Embedding` or a
/// convolution have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FirstLinear {
    /// AdamW for up to eight inputs, and Muon for more. Networks of 2 to 32 inputs were measured:
    /// see `docs/guide/excluding.md`.
    #[default]
    Auto,
    /// Muon, as for hidden matrices.
    Muon,
    /// The optimizer of embeddings, at their learning rate. Keller Jordan's recommendation
    /// (<https://kellerjordan.github.io/posts/muon/>).
    AdamW,
}

/// The role of one parameter, with the reason and the costs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ParameterRoute {
    /// The path of the parameter in the model, as in `blocks.0.mlp.up.weight`.
    pub path: String,
    /// The identity of the parameter.
    pub id: ParamId,
    /// The shape of the parameter.
    pub shape: Vec<usize>,
    /// The role of the parameter.
    pub role: ParameterRole,
    /// The sizes of the blocks that the parameter's matrices are cut into, each a matrix of its
    /// own; none for matrices that are not cut.
    pub blocks: Vec<usize>,
    /// The side of the matrices that is cut into the blocks.
    pub block_side: BlockSide,
    /// The indices of the blocks that AdamW updates.
    pub left: Vec<usize>,
    /// The name of the optimizer, as in `Muon (Batch)` and `AdamW (head), 2 x rate`: with the view
    /// and the blocks of a matrix or the role, and with the settings of a rule that has its own.
    /// `-` for a frozen parameter.
    pub optimizer: String,
    /// The name in the rule, if an optimizer of [`MuonConfig`](crate::MuonConfig)'s `optimizers`
    /// updates the parameter.
    pub custom: Option<String>,
    /// The factor on the learning rate, from the rule and the role; 1 for matrices, whose update
    /// has it.
    pub(crate) factors: RoleSettings,
    /// The index of the update, among Muon's or among those element by element.
    pub(crate) settings: usize,
    /// The reason for the role, with a question mark if names and positions only suggest the role.
    pub reason: String,
    /// Floating-point operations per step of Muon's iteration, or of a
    /// [`LayerOptimizer`](crate::custom::LayerOptimizer); 0 for all others.
    pub operations: f64,
    /// Bytes of the optimizer's state after the first step. For a user's optimizer, only the bytes
    /// of master weights are known.
    pub state_bytes: usize,
}

/// The rules by which parameters are updated.
#[derive(Debug, Clone)]
pub(crate) struct Updates {
    /// The first has the settings of the configuration, and the others have settings of rules.
    pub muon: Vec<Arc<MuonUpdate>>,
    /// The updates of all other parameters, in the same order.
    pub rest: Vec<Arc<ElementwiseUpdate>>,
    pub custom: CustomOptimizers,
    pub skipped: SkippedSteps,
    /// Steps without a gradient of a parameter after which an optimizer names it.
    pub max_absent: Option<usize>,
}

/// The role of every parameter of a model, from [`MuonConfig::route`](crate::MuonConfig::route).
/// `Display` prints a table with the [`summary`](Self::summary) below.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::{MuonConfig, ParameterRoute, RoleSummary};
///
/// let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
/// let routing = MuonConfig::new().route(&model)?;
/// for ParameterRoute { path, optimizer, reason, .. } in routing.routes() {
///     println!("{path}: {optimizer}, {reason}");
/// }
/// for RoleSummary { optimizer, state_bytes, .. } in routing.summary() {
///     println!("{optimizer}: {state_bytes} bytes of state");
/// }
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Routing {
    routes: Vec<ParameterRoute>,
    updates: Updates,
    expected: Expected,
}

impl Updates {
    /// The ledger that all updates write.
    pub fn ledger(&self) -> &Ledger {
        &self.muon[0].ledger
    }

    /// The update by an optimizer of the user's.
    pub fn whole(&self, name: &str) -> WholeUpdate {
        let optimizer = self.custom.get(name).clone();
        let (precision, ledger) = (self.precision(), self.ledger().clone());
        WholeUpdate { name: name.into(), optimizer, precision, ledger }
    }

    /// The precision that is kept of parameters in half precision, by all updates.
    pub fn precision(&self) -> Precision {
        self.rest[0].precision
    }

    /// The name of a role's optimizer, for the update of an index.
    fn optimizer(&self, role: ParameterRole, settings: usize) -> String {
        match role {
            ParameterRole::Muon { view: MatrixView::Single, .. } => "Muon".to_owned(),
            ParameterRole::Muon { view, .. } => format!("Muon ({view:?})"),
            ParameterRole::Embedding | ParameterRole::Head | ParameterRole::Vector => {
                format!("{} ({role})", self.rest[settings].rule.name())
            }
            ParameterRole::Frozen => "-".to_owned(),
        }
    }

    fn route(&mut self, found: &Found, decision: &Decision<'_>) -> Result<ParameterRoute> {
        let Found { path, shape, dtype, .. } = found;
        let &Decision { role, optimizer: custom, own, ref reason, .. } = decision;
        let (settings, factors) = match role {
            ParameterRole::Muon { .. } => (self.muon_with(&own), RoleSettings::COMMON),
            ParameterRole::Frozen => (0, RoleSettings::COMMON),
            ParameterRole::Embedding | ParameterRole::Head | ParameterRole::Vector => {
                let settings = self.rest_with(&own, role);
                let common = self.rest[settings].roles.of(role);
                (settings, RoleSettings { lr: common.lr * own.lr_factor, ..common })
            }
        };
        let mut route = ParameterRoute {
            path: path.clone(),
            id: found.id,
            shape: shape.clone(),
            role,
            blocks: vec![],
            block_side: BlockSide::default(),
            left: vec![],
            optimizer: match custom {
                Some(name) => format!("{name} ({role})"),
                None => self.optimizer(role, settings),
            },
            custom: custom.map(str::to_owned),
            factors,
            settings,
            reason: reason.clone(),
            operations: 0.0,
            state_bytes: 0,
        };
        match role {
            ParameterRole::Muon { view, layout } => {
                self.route_matrices(&mut route, found, (view, layout), decision)?;
                route.optimizer += &own.describe(None);
            }
            ParameterRole::Embedding | ParameterRole::Head | ParameterRole::Vector => {
                let batch = ElementwiseUpdate::batch(shape);
                self.precision().ensure_supported(path, *dtype)?;
                let differs = own.elementwise.is_some() || settings != 0;
                // A user's optimizer has neither betas nor a decay of these.
                let rest = (custom.is_none() && differs).then(|| (&*self.rest[settings], factors));
                route.optimizer += &own.describe(rest);
                let slots = match custom {
                    None => self.rest[settings].slots(*dtype),
                    Some(name) => {
                        ensure_whole(path, shape)?;
                        let update = self.whole(name);
                        route.operations = operations(name, &update, found)?;
                        update.slots(*dtype)
                    }
                };
                route.state_bytes = slots.iter().map(|slot| slot.bytes(batch, *dtype)).sum();
            }
            ParameterRole::Frozen => {}
        }
        Ok(route)
    }

    /// Completes the route of matrices of Muon's.
    fn route_matrices(
        &self,
        route: &mut ParameterRoute,
        Found { path, shape, dtype, device, .. }: &Found,
        (view, layout): (MatrixView, MatrixLayout),
        &Decision { split, left, .. }: &Decision<'_>,
    ) -> Result<()> {
        let batch = view.batch_shape(path, shape)?;
        let muon = &self.muon[route.settings];
        muon.newton_schulz.ensure_supported(path, device, *dtype)?;
        muon.precision.ensure_supported(path, *dtype)?;
        muon.precision.ensure_stored(path, device)?;
        if let Some((split, side)) = split {
            route.block_side = side;
            route.blocks = split.sizes(path, shape, (side, batch[side.dimension(layout)]))?;
            route.optimizer += &format!(", {} blocks", route.blocks.len());
        }
        if !left.is_empty() {
            ensure_left(path, shape, left, route.blocks.len())?;
            route.left = left.to_vec();
            let vector = self.optimizer(ParameterRole::Vector, 0);
            route.optimizer += &format!(", {} of {vector}", left.len());
        }
        let blocks = Blocks::new(batch, route.block_side.dimension(layout), &route.blocks);
        for (index, batch @ [k, m, n]) in blocks.batches().enumerate() {
            let matrices = Matrices { shape: [m, n], layout };
            // A rule of Muon's has no settings for AdamW, so the configuration's hold for what it
            // leaves.
            let (batch, slots) = match left.contains(&index) {
                true => (ElementwiseUpdate::batch(&batch), self.rest[0].slots(*dtype)),
                false => {
                    route.operations += muon.operations(batch, *dtype, device);
                    (batch, muon.slots(matrices, k > 1, *dtype))
                }
            };
            route.state_bytes += slots.iter().map(|slot| slot.bytes(batch, *dtype)).sum::<usize>();
        }
        Ok(())
    }
}

impl ParameterRoute {
    /// Returns `true` if matrices or the whole parameter are updated by an owner, and not single
    /// elements by any rank.
    pub(crate) fn has_owners(&self) -> bool {
        matches!(self.role, ParameterRole::Muon { .. }) || self.custom.is_some()
    }

    /// The matrices of the parameter as blocks; one block for any other parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for a parameter that can't be seen as matrices.
    pub(crate) fn matrix_blocks(&self) -> Result<Blocks> {
        match self.role {
            ParameterRole::Muon { view, layout } => {
                let batch = view.batch_shape(&self.path, &self.shape)?;
                let dimension = self.block_side.dimension(layout);
                let blocks = Blocks::new(batch, dimension, &self.blocks);
                Ok(if view == MatrixView::Leading { blocks.leading() } else { blocks })
            }
            _ => Ok(Blocks::of_elements(self.shape.iter().product())),
        }
    }
}

impl Routing {
    pub(crate) fn new(
        mut updates: Updates,
        rules: &[RoutingRule],
        layout: MatrixLayout,
        first_linear: FirstLinear,
        parameters: &[Found],
    ) -> Result<Self> {
        if parameters.is_empty() {
            return Err(Error::EmptyModel);
        }
        if !parameters.iter().any(|found| found.trainable) {
            return Err(Error::AllFrozen { parameters: parameters.len() });
        }
        // Burn identifies parameters by their ids: a step would write the same update to two
        // places.
        reject_shared(parameters)?;
        let anatomy = Anatomy::of(parameters, first_linear);
        let mut built_in: Vec<_> =
            parameters.iter().map(|found| (found, anatomy.role(found, layout))).collect();
        name_frozen_clones(&mut built_in);
        let roles: Vec<_> = built_in.iter().map(|(found, (role, _))| (*found, *role)).collect();
        // After the built-in roles, to which a rule may be limited.
        let rules = Rules::compile(rules, &roles)?;
        let decide = |(found, (role, reason)): (&Found, (ParameterRole, String))| {
            let own = OwnSettings::NONE;
            let built_in = Decision { role, optimizer: None, split: None, left: &[], own, reason };
            let ruled = found.trainable.then(|| rules.decide(found, &built_in, layout));
            ruled.flatten().unwrap_or(built_in)
        };
        let decisions: Vec<_> = built_in.into_iter().map(decide).collect();
        // Before the routes, whose error would name the first of these parameters alone.
        shapes_without_view::ensure_views(parameters.iter().zip(&decisions))?;
        let routes = parameters
            .iter()
            .zip(decisions)
            .map(|(found, decision)| updates.route(found, &decision))
            .collect::<Result<_>>()?;
        Ok(Self { routes, updates, expected: Expected::default() })
    }

    /// The routing with what a user expects of it and of every step.
    pub(crate) fn expecting(self, expectations: &[Expectation]) -> Result<Self> {
        Ok(Self { expected: Expected::new(expectations, &self.routes)?, ..self })
    }

    /// The statements about every step.
    pub(crate) fn expected(&self) -> &Expected {
        &self.expected
    }

    /// Returns the role of every parameter, in the order of the model's fields.
    pub fn routes(&self) -> &[ParameterRoute] {
        &self.routes
    }

    /// Returns the parameters whose role satisfies a condition, as a Burn group: for a
    /// [`ModuleLrScheduler`](burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler) that
    /// gives them a separate learning rate.
    ///
    /// ```
    /// # use burn::{nn::{Embedding, EmbeddingConfig}, tensor::Device};
    /// # let model = EmbeddingConfig::new(10, 4).init(&Device::default().autodiff());
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use distmuon::{MuonConfig, ParameterRole, Schedule};
    ///
    /// let routing = MuonConfig::new().route(&model)?;
    /// let matrices = Schedule::warmup_cosine(0.02, 100, 900, 0.0).into_lr_scheduler();
    /// let embeddings = Schedule::constant(0.1).into_lr_scheduler();
    /// let mut lr = ModuleLrScheduler::new(matrices)
    ///     .with_group(routing.group(|role| role == ParameterRole::Embedding), embeddings);
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn group(&self, condition: impl Fn(ParameterRole) -> bool) -> ParamGroup {
        let chosen = self.routes.iter().filter(|route| condition(route.role));
        let (paths, ids) = chosen.map(|route| (route.path.clone(), route.id)).unzip();
        parameter_group(paths, ids)
    }

    /// Replaces the updates of matrices by others with other settings of a step.
    pub(crate) fn set_muon(&mut self, muon: Vec<Arc<MuonUpdate>>) {
        self.updates.muon = muon;
    }

    /// The rules by which parameters are updated.
    pub(crate) fn updates(&self) -> &Updates {
        &self.updates
    }

    /// Returns the counts of the steps that left parameters untouched, over all optimizers that
    /// [`init`](Self::init) made of this routing.
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.updates.skipped
    }

    /// The factors of blocks that are left to AdamW.
    pub(crate) fn factors_of_left(&self) -> RoleSettings {
        self.updates.rest[0].roles.vector
    }
}

impl Roles {
    /// The settings of a role. Nothing reads them for matrices and frozen parameters.
    fn of(&self, role: ParameterRole) -> RoleSettings {
        match role {
            ParameterRole::Embedding => self.embedding,
            ParameterRole::Head => self.head,
            ParameterRole::Vector => self.vector,
            ParameterRole::Muon { .. } | ParameterRole::Frozen => RoleSettings::COMMON,
        }
    }
}

/// The parameters of these paths, or of these identities, as a Burn group.
pub(crate) fn parameter_group(paths: Vec<String>, ids: Vec<ParamId>) -> ParamGroup {
    ParamGroup::from_paths(paths).fuse(&ParamGroup::from_ids(ids))
}

/// The operations of a step by an optimizer of the user's, 0 where they are not known.
fn operations(name: &str, update: &WholeUpdate, Found { path, shape, .. }: &Found) -> Result<f64> {
    let operations = update.optimizer.operations(shape).unwrap_or_default();
    match operations.is_finite() && operations >= 0.0 {
        true => Ok(operations),
        false => Err(Error::setting(
            format!("optimizers.{name}"),
            format!("{operations} operations for `{path}` of shape {shape:?}"),
            "a finite number of operations, at least 0, by `LayerOptimizer::operations`",
        )),
    }
}

/// Fails for a parameter of more dimensions than Burn's optimizers support.
fn ensure_whole(path: &str, shape: &[usize]) -> Result<()> {
    if shape.len() <= MAX_RANK {
        return Ok(());
    }
    Err(Error::Shape {
        parameter: path.to_owned(),
        expected: "at most eight dimensions",
        shape: shape.to_vec(),
        remedy: "route it with `RoutingRule::adamw`".to_owned(),
    })
}

/// Fails for indices of blocks that a parameter does not have, and if no block is Muon's.
fn ensure_left(path: &str, shape: &[usize], left: &[usize], blocks: usize) -> Result<()> {
    let all = (0..blocks).all(|block| left.contains(&block));
    if !all && left.iter().all(|block| *block < blocks) {
        return Ok(());
    }
    Err(Error::Shape {
        parameter: path.to_owned(),
        expected: "blocks of which Muon keeps some",
        shape: shape.to_vec(),
        remedy: format!(
            "give `leave` some indices below {blocks}, the number of blocks by `split` or `heads`, \
             instead of {left:?}"
        ),
    })
}

/// Adds to the reasons of frozen parameters that are in the model twice where else they are, and
/// warns of them. Burn freezes all clones of a parameter together until it is initialised, so a
/// student is not trained whose teacher was cloned from it too early.
fn name_frozen_clones(decided: &mut [(&Found, (ParameterRole, String))]) {
    let is_frozen = |found: &Found| !found.trainable && !found.shape.contains(&0);
    let mut first_places: HashMap<ParamId, &str> = HashMap::new();
    let mut clones = vec![];
    for (found, (_, reason)) in decided.iter_mut().filter(|(found, _)| is_frozen(found)) {
        match first_places.entry(found.id) {
            Entry::Vacant(place) => _ = place.insert(&found.path),
            Entry::Occupied(first) => {
                reason.push_str(&format!(", with its clone `{}`", first.get()));
                clones.push(format!("`{}` and `{}`", first.get(), found.path));
            }
        }
    }
    if !clones.is_empty() {
        log::warn!(
            "frozen parameters are in the model twice: {}; if one of two is to be trained, \
             initialise the model before you clone it, since Burn otherwise freezes both",
            clones.join(", ")
        );
    }
}

/// Fails for a trained parameter that is in the model twice: a step gives the gradient to the first
/// place only, and so makes two different parameters of one.
fn reject_shared(parameters: &[Found]) -> Result<()> {
    let mut paths = HashMap::new();
    for found in parameters.iter().filter(|found| found.trainable) {
        if let Some(first) = paths.insert(found.id, &found.path) {
            return Err(Error::Shared { first: first.clone(), second: found.path.clone() });
        }
    }
    Ok(())
}
