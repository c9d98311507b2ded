//! The division of a model's parameters among ranks.

mod backward_pass;
mod choose_owners;
mod default_limits;
mod divide_model;
mod form;
mod identity;
mod overlap;
mod parameter_shards;
mod pass_calls;
mod pass_parameter;
mod passes;
mod placements;
mod predicted_uses;
mod reparameterizations;
mod table;
mod weight_average;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock};

use burn::module::Module;
use burn::tensor::DType;

pub(super) use pass_parameter::{BlockPart, PassParameter};
pub use passes::Keep;
pub(super) use passes::{Message, PassBytes, Passes, Publishing, ReportedBytes};
pub use table::LayoutTable;
pub use weight_average::WeightAverage;

use super::config::DistMuonConfig;
use super::mesh::{Axis, Mesh};
use super::placement_rules::Place;
use super::plan::{Costs, Parameter};
use super::sliced_parameters::{Cuts, SliceGroup, SliceGroups};
use crate::backend::precise_dtype;
use crate::comm::World;
use crate::error::{Error, Result};
use crate::gradient_buffer::GradientBuffer;
use crate::muon::MuonConfig;
use crate::parameters;
use choose_owners::Chosen;
pub(super) use default_limits::bytes_of_two_layers;
use passes::{Groups, Limits};

/// The default of [`Layout::with_small_elements`].
const SMALL_ELEMENTS: usize = 1024;

/// The placement of a model's parameters on the ranks of a [`Mesh`].
///
/// By default, every rank has all parameters. With [`owned`](Self::owned), a matrix lies whole at
/// its owner between steps, and nowhere else; a table that AdamW updates lies in even rows. With
/// [`rows`](Self::rows), matrices lie in even rows as well. Every use of a parameter gathers it,
/// and every backward pass reduces its gradient to the owner, or to rows. A step sends small
/// values, what replicas and small parameters need, and rows to their owners. The model keeps its
/// type, and its layers are not changed.
///
/// With owned parameters, every forward pass is a collective call: all ranks make the same ones,
/// also in evaluation.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Tensor;
/// use distmuon::distributed::Layout;
/// use distmuon::{DistMuonConfig, World};
///
/// World::launch(2, |world| {
///     let world = world.gradient_checkpointing();
///     let layout = Layout::from(&world).owned("dp");
///     let model = LinearConfig::new(64, 64).init(world.device());
///     let (mut model, mut optim) = DistMuonConfig::new().start(&layout, model)?;
///     for _step in 0..2 {
///         let loss = model.forward(Tensor::<2>::ones([4, 64], world.device())).square().mean();
///         let grads = optim.backward(&loss, &model)?;
///         model = optim.step(1e-3, model, grads)?;
///     }
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// # Failures
///
/// A forward pass can't return an error. After a failure, the values of owned parameters are NaN,
/// and the next of [`backward`](Self::backward), [`accumulate`](Self::accumulate),
/// [`collect`](Self::collect) and
/// [`DistModuleOptimizer::step`](super::DistModuleOptimizer::step) returns the error, mostly with
/// the path of the parameter. The world has ended then, and later calls return the error as well.
///
/// Clones are the same layout.
#[derive(Clone)]
pub struct Layout {
    mesh: Mesh,
    /// The configuration of the optimizer, for its routing and its plan.
    config: DistMuonConfig,
    axis: Option<String>,
    /// `true` if matrices are stored in rows along it.
    in_rows: bool,
    places: Vec<Place>,
    small_elements: usize,
    /// [`Keep::Nothing`], unless set.
    keep: Option<Keep>,
    /// Two layers, unless set.
    ahead_mb: Option<f64>,
    in_flight_mb: Option<f64>,
    rounds_means: bool,
    overlaps_backward: bool,
    allows_unused: bool,
    sharded: Arc<OnceLock<Sharded>>,
    /// The gradients of earlier micro-batches of parameters that every rank has.
    micro_batches: MicroBatches,
}

/// Gradients of micro-batches that the clones of a layout share.
type MicroBatches = Arc<Mutex<GradientBuffer>>;

/// A model that was divided.
pub(super) struct Sharded {
    pub passes: Arc<Passes>,
    pub cuts: Cuts,
    pub groups: SliceGroups,
    /// The parameters as they are planned, in the order of the model.
    pub planned: Vec<Parameter>,
    /// The owners, if any parameter is divided or has its gradient reduced in the backward pass.
    pub chosen: Option<Chosen>,
    /// The places of all parameters.
    pub table: LayoutTable,
}

/// All ranks on one axis, `dp`, as on [`Mesh::flat`]: every rank has all parameters.
impl From<&World> for Layout {
    fn from(world: &World) -> Self {
        Self::new(&Mesh::flat(world))
    }
}

impl From<&Layout> for Layout {
    fn from(layout: &Layout) -> Self {
        layout.clone()
    }
}

impl Layout {
    /// Returns a layout on which every rank has all parameters.
    pub fn new(mesh: &Mesh) -> Self {
        Self {
            mesh: mesh.clone(),
            config: DistMuonConfig::new(),
            axis: None,
            in_rows: false,
            places: vec![],
            small_elements: SMALL_ELEMENTS,
            keep: None,
            ahead_mb: None,
            in_flight_mb: None,
            rounds_means: false,
            overlaps_backward: false,
            allows_unused: false,
            sharded: Arc::default(),
            micro_batches: Arc::default(),
        }
    }

    /// Divides parameters among the ranks along an axis of the mesh: those of two or more
    /// dimensions that are not [small](Self::with_small_elements). Each matrix lies whole at its
    /// owner.
    pub fn owned(mut self, axis: impl Into<String>) -> Self {
        (self.axis, self.in_rows) = (Some(axis.into()), false);
        self
    }

    /// [`owned`](Self::owned), with matrices in equal rows along the axis instead of whole at their
    /// owners. A rank holds `1 / N` of every parameter, even if a few matrices are most of a model,
    /// or if there are fewer matrices than ranks. FSDP2's `Shard(0)` divides in this way.
    ///
    /// The rows of a stack are the rows of all its matrices, one after the other. Numbers of rows
    /// differ by at most one, and a rank may have none. A step sends what
    /// [`Place::shard`](Place::shard) sends: the owner of a matrix gets the rows of its gradient,
    /// holds its momentum, and returns the rows of its update. Parameters that AdamW updates are
    /// divided as by `owned`.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Tensor;
    /// use distmuon::distributed::Layout;
    /// use distmuon::{DistMuonConfig, MuonConfig, RoutingRule, World};
    ///
    /// World::launch(3, |world| {
    ///     let world = world.gradient_checkpointing();
    ///     let layout = Layout::from(&world).rows("dp");
    ///     let model = LinearConfig::new(64, 32).init(world.device());
    ///     // The only layer, which would otherwise be taken for a head.
    ///     let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    ///     let config = DistMuonConfig::new().with_muon(muon);
    ///     let (mut model, mut optim) = config.start(&layout, model)?;
    ///     let parts = layout.table(&model)?.parts("weight");
    ///     assert_eq!(parts, Some(vec![21 * 32, 21 * 32, 22 * 32])); // of one matrix
    ///     let loss = model.forward(Tensor::<2>::ones([4, 64], world.device())).square().mean();
    ///     let grads = optim.backward(&loss, &model)?;
    ///     model = optim.step(1e-3, model, grads)?;
    ///     # let _ = model;
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn rows(mut self, axis: impl Into<String>) -> Self {
        (self.axis, self.in_rows) = (Some(axis.into()), true);
        self
    }

    /// Adds a rule for the parameters at some paths.
    pub fn with_place(mut self, place: Place) -> Self {
        self.places.push(place);
        self
    }

    /// Sets the configuration of the optimizer: its routing decides which parameters are matrices,
    /// and its [`balancing`](DistMuonConfig::balancing) and [`costs`](DistMuonConfig::costs) decide
    /// which rank owns each. [`DistMuonConfig::start`] makes this call; [`DistMuonConfig::new`] by
    /// default.
    pub fn with_config(mut self, config: DistMuonConfig) -> Self {
        self.config = config;
        self
    }

    /// [`with_config`](Self::with_config) of the routing alone.
    pub fn with_muon(mut self, muon: MuonConfig) -> Self {
        self.config.muon = muon;
        self
    }

    /// Sets the weights that are kept from the forward to the backward pass: [`Keep::Nothing`] by
    /// default. For a layout with [`owned`](Self::owned) or [`rows`](Self::rows), whose passes
    /// gather weights.
    pub fn with_keep(mut self, keep: Keep) -> Self {
        self.keep = Some(keep);
        self
    }

    /// Sets the number of elements below which every rank has a parameter: 1024 by default.
    pub fn with_small_elements(mut self, elements: usize) -> Self {
        self.small_elements = elements;
        self
    }

    /// Sets the MB (10^6 bytes) of parameters that are gathered ahead of their use, in the order of
    /// the pass before. A message has up to half of it. By default, it is the bytes of two layers,
    /// but at most a quarter of the divided parameters. With 0, every use waits for its own
    /// parameter. The results are the same.
    ///
    /// A layer is an item of the model's outermost list, as `blocks.3`; without lists, it is the
    /// largest parameter. A parameter with more than half of the bytes is sent alone.
    ///
    /// For a layout with [`owned`](Self::owned) or [`rows`](Self::rows).
    pub fn with_ahead_mb(mut self, megabytes: f64) -> Self {
        self.ahead_mb = Some(megabytes);
        self
    }

    /// Sets the MB (10^6 bytes) of gradients that are collected and reduced at once while the
    /// backward pass goes on. A message has up to half of it. The default is as for
    /// [`with_ahead_mb`](Self::with_ahead_mb). With 0, every gradient is sent alone. The results
    /// are the same.
    ///
    /// For a layout with [`owned`](Self::owned), [`rows`](Self::rows) or
    /// [`overlap_backward`](Self::overlap_backward).
    pub fn with_in_flight_mb(mut self, megabytes: f64) -> Self {
        self.in_flight_mb = Some(megabytes);
        self
    }

    /// Reduces the gradients of parameters that every rank has while the backward pass goes on, and
    /// not in the step: of all that are not [small](Self::with_small_elements) and have up to six
    /// dimensions. The results are the same. As with owned parameters, all ranks have to use the
    /// same parameters in the same order, and [`backward`](Self::backward) or
    /// [`collect`](Self::collect) ends a backward pass.
    pub fn overlap_backward(mut self) -> Self {
        self.overlaps_backward = true;
        self
    }

    /// Rounds the mean gradients of parameters in half precision to the type of the parameter, as
    /// soon as the ranks have added them up, in float32. A rank then holds two bytes for each
    /// element of its shards from the backward pass to the step, in place of four. The update gets
    /// fewer digits: without this setting, it reads the mean in float32.
    ///
    /// For a layout with [`owned`](Self::owned), [`rows`](Self::rows) or
    /// [`overlap_backward`](Self::overlap_backward).
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{DType, Tensor};
    /// use distmuon::distributed::Layout;
    /// use distmuon::{DistMuonConfig, World};
    ///
    /// World::launch(2, |world| {
    ///     let layout = Layout::from(&world).overlap_backward().round_means();
    ///     let mut model = LinearConfig::new(64, 64).with_bias(false).init(world.device());
    ///     let half = |weight: Tensor<2>| weight.cast(DType::BF16).detach().require_grad();
    ///     model.weight = model.weight.map(half);
    ///     let (model, optim) = DistMuonConfig::new().start(&layout, model)?;
    ///     let input = Tensor::<2>::ones([4, 64], (world.device(), DType::BF16));
    ///     let grads = optim.backward(&model.forward(input).mean(), &model)?;
    ///     let mean = grads.get::<2>(model.weight.id);
    ///     assert!(mean.is_none_or(|mean| mean.dtype() == DType::BF16)); // the owner has it
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn round_means(mut self) -> Self {
        self.rounds_means = true;
        self
    }

    /// Lets ranks leave parameters out of a pass that others use, such as the head of a task or the
    /// encoder of a modality. The gradient of such a rank counts as zero, and the mean is over all
    /// ranks.
    ///
    /// Every backward pass then begins with a message of five bits per parameter, in which the
    /// ranks exchange which parameters they use. Those that only some use are reduced at the end of
    /// the pass, after a bit for each that says whether any rank has a gradient. If they are
    /// [owned](Self::owned), the others call [`unused`](Self::unused) in the forward pass. Vectors,
    /// such as biases, stay in memory from the forward to the backward pass, also with
    /// [`Keep::Nothing`].
    ///
    /// Without this setting, such passes are errors, as are passes that use parameters in another
    /// order with it.
    pub fn allow_unused(mut self) -> Self {
        self.allows_unused = true;
        self
    }

    /// Takes part in the gathering of a module's owned parameters, where other ranks use the module
    /// and this one does not, in the forward pass. The others use every owned parameter of it once,
    /// in the order of its fields. The layout has to [allow it](Self::allow_unused).
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Tensor;
    /// use distmuon::comm::World;
    /// use distmuon::distributed::Layout;
    ///
    /// World::launch(2, |world| {
    ///     let world = world.gradient_checkpointing();
    ///     let layout = Layout::from(&world).owned("dp").allow_unused();
    ///     let head = || LinearConfig::new(64, 64).init(world.device());
    ///     let heads = layout.shard(vec![head(), head()])?;
    ///     let x = Tensor::<2>::ones([4, 64], world.device());
    ///     let mut loss = Tensor::<1>::zeros([1], world.device());
    ///     for (task, head) in heads.iter().enumerate() {
    ///         match task == world.rank() {
    ///             true => loss = loss + head.forward(x.clone()).square().mean(),
    ///             false => layout.unused(head),
    ///         }
    ///     }
    ///     let grads = layout.backward(&loss, &heads)?; // of both heads
    ///     # let _ = grads;
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn unused<M: Module>(&self, module: &M) {
        if let Some(Sharded { passes, .. }) = self.sharded() {
            // Materialising uses every owned parameter once, and takes part in gathering it.
            passes.unused(|| drop(module.clone().materialize()));
        }
    }

    /// The type in which a rank holds the mean gradients of parameters of a type after a pass.
    pub(super) fn mean_dtype(&self, parameter: DType) -> DType {
        if self.rounds_means { parameter } else { precise_dtype(parameter) }
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    pub(super) fn world(&self) -> &World {
        self.mesh.world()
    }

    /// The passes of the model that was divided; of none, if there is no such model.
    pub(super) fn passes(&self) -> Arc<Passes> {
        match self.sharded() {
            Some(sharded) => sharded.passes.clone(),
            None => {
                let groups = Groups { world: self.world().clone(), by_axes: BTreeMap::new() };
                Arc::new(self.passes_of(groups, vec![]))
            }
        }
    }

    fn passes_of(&self, groups: Groups, parameters: Vec<Arc<PassParameter>>) -> Passes {
        let limits = self.limits(&parameters);
        Passes::new(groups, parameters, limits, self.micro_batches.clone())
    }

    /// This rank's slices of the model that was divided.
    pub(super) fn cut_parameters(&self) -> Cuts {
        self.sharded().map(|sharded| sharded.cuts.clone()).unwrap_or_default()
    }

    /// The ranks that exchange parameters that are cut along some axes. `None` for no axes: all
    /// ranks have whole parameters.
    pub(super) fn slice_group(&self, axes: &[String]) -> Option<&SliceGroup> {
        self.sharded()?.groups.get(axes)
    }

    /// The groups of all cuts.
    pub(super) fn all_slice_groups(&self) -> impl Iterator<Item = (&[String], &SliceGroup)> {
        let groups = self.sharded().into_iter().flat_map(|sharded| &sharded.groups);
        groups.map(|(axes, group)| (&axes[..], group))
    }

    /// The model that was divided, if any.
    pub(super) fn sharded(&self) -> Option<&Sharded> {
        self.sharded.get()
    }

    /// The configuration of the optimizer.
    pub(super) fn config(&self) -> &DistMuonConfig {
        &self.config
    }

    /// Fails if the parameters of a model are not the divided model's.
    pub(super) fn check_planned(&self, planned: &[Parameter]) -> Result<()> {
        let known = self.sharded().map(|Sharded { planned, .. }| {
            let by_path = planned.iter().map(|parameter| (&*parameter.path, parameter));
            by_path.collect::<HashMap<_, _>>()
        });
        let rank = self.world().rank();
        let differs = |parameter: &Parameter, reason: &str, remedy| {
            Err(Error::parameter(&parameter.path, rank, reason, remedy))
        };
        for parameter in planned {
            match known.as_ref().map(|known| known.get(&*parameter.path).copied()) {
                None if parameter.placement.reduces_in_backward() => {
                    return differs(
                        parameter,
                        "it is divided, but not by this layout",
                        "use the layout that divided the model, in `DistMuonConfig::init_on`",
                    );
                }
                None => {}
                Some(Some(known)) if known == parameter => {}
                Some(Some(known)) if known.placement != parameter.placement => {
                    return differs(
                        parameter,
                        "it is not placed as the layout has it",
                        "make the optimizer for the model that `Layout::shard` returned",
                    );
                }
                Some(None) => {
                    return differs(
                        parameter,
                        "it was frozen when the model was divided, and is not now",
                        "to train it, divide the whole model of `Layout::unshard` again, by a new \
                         layout; or freeze it with `no_grad`",
                    );
                }
                Some(Some(_)) => {
                    return differs(
                        parameter,
                        "it is not updated as when the model was divided",
                        "give the layout the optimizer's configuration with `Layout::with_muon`, \
                         and freeze parameters before `Layout::shard`",
                    );
                }
            }
        }
        Ok(())
    }

    /// The owners of planned parameters, if they were divided among their owners.
    pub(super) fn owners(&self, planned: &[Parameter]) -> Option<Vec<Vec<usize>>> {
        let Sharded { planned: known, chosen, .. } = self.sharded()?;
        let all = known.iter().zip(&chosen.as_ref()?.owners);
        let all: HashMap<&str, _> =
            all.map(|(parameter, owners)| (&*parameter.path, owners)).collect();
        Some(planned.iter().map(|parameter| all[&*parameter.path].clone()).collect())
    }

    /// The costs by which the owners were chosen, if they were.
    pub(super) fn costs(&self) -> Option<&Costs> {
        Some(&self.sharded()?.chosen.as_ref()?.costs)
    }

    /// Returns the place of every parameter. Prints as a table. Sends nothing, so that one rank may
    /// make this call.
    ///
    /// Before [`shard`](Self::shard), these are the places that the model would get, and `model` is
    /// whole; after it, the places of the divided model.
    ///
    /// # Errors
    ///
    /// As [`shard`](Self::shard) for the layout and the model, and [`Error::Usage`] before it if
    /// several ranks choose owners together: by measured costs, or by a search with a time limit.
    pub fn table<M: Module>(&self, model: &M) -> Result<LayoutTable> {
        if let Some(Sharded { table, .. }) = self.sharded() {
            return Ok(table.clone());
        }
        let division = self.division(model)?;
        let chosen = division.has_owners().then(|| self.owners_alone(&division)).transpose()?;
        let parameters = self.pass_parameters(&division, chosen.as_ref());
        Ok(LayoutTable::new(&division.found, &parameters, &division.cuts))
    }

    /// Returns the number of elements of a model's float parameters, of which this rank may have
    /// parts. Burn's `Module::num_params` counts the whole of an owned parameter, and then this
    /// rank's part of it. Sends nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for slices of another model.
    pub fn num_params<M: Module>(&self, model: &M) -> Result<usize> {
        let mut found = parameters::lazily(model);
        self.cut_parameters().restore_whole(&mut found, self.world().rank())?;
        Ok(found.iter().map(|found| found.shape.iter().product::<usize>()).sum())
    }

    /// Returns `true` if every forward pass is a collective call.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn gathers(&self) -> bool {
        let parameters = self.sharded().map(|sharded| sharded.passes.parameters());
        parameters.is_some_and(|all| all.iter().any(|parameter| parameter.placement.is_owned()))
    }

    /// Fails for a layout whose ranks compute together, which a `Learner` does not know of.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn ensure_whole_layers(&self) -> Result<()> {
        let mut axes = self.places.iter().filter_map(Place::axis);
        let model = self.mesh.axes().iter().find(|axis| axis.is_model()).map(Axis::name);
        match axes.next().or(model) {
            Some(axis) => Err(Error::usage(
                "a `Learner` can't train the layout",
                "whole layers",
                format!("slices along `{axis}`"),
                "write the training loop to train slices",
            )),
            None => Ok(()),
        }
    }

    /// The weights that are kept from the forward to the backward pass.
    fn keep(&self) -> Keep {
        self.keep.unwrap_or(Keep::Nothing)
    }

    /// The limits of messages in passes of these parameters: the same on all ranks.
    fn limits(&self, parameters: &[Arc<PassParameter>]) -> Limits {
        let of = |megabytes: Option<f64>, counts: fn(&PassParameter) -> bool| match megabytes {
            Some(megabytes) => (megabytes * 1e6).ceil() as usize,
            None => {
                let counted = parameters.iter().filter(|parameter| counts(parameter));
                bytes_of_two_layers(counted.map(|known| (&*known.path, known.bytes())))
            }
        };
        Limits {
            keep: self.keep(),
            ahead: of(self.ahead_mb, |parameter| parameter.placement.is_owned()),
            in_flight: of(self.in_flight_mb, |parameter| parameter.is_trained),
            allows_unused: self.allows_unused,
        }
    }
}
