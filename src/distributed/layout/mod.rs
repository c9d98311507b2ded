//! The division of a model's parameters among ranks.

mod choose_owners;
mod default_limits;
mod divide_model;
mod form;
mod identity;
mod pass_calls;
mod pass_parameter;
mod passes;
mod predicted_uses;
mod reparameterizations;
mod table;
mod weight_average;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

pub(super) use pass_parameter::{BlockPart, PassParameter};
pub use passes::Keep;
pub(super) use passes::{Message, PassBytes, Passes, Publishing, ReportedBytes};
pub use table::LayoutTable;

use super::config::DistMuonConfig;
use super::mesh::{Axis, Grid, Mesh};
use super::placement_rules::{Place, Places};
use super::plan::{Bucket, Costs, Overlap, Parameter, Slice, Work};
use super::sliced_parameters::{Cuts, SliceGroup, SliceGroups};
use super::trainable::{self, ModelParameter, Trainable, TrainableParameter};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::gradient_buffer::GradientBuffer;
use crate::muon::MuonConfig;
use crate::parameters::{self, Found, Placement};
use crate::routing::Routing;
use choose_owners::Chosen;
pub(super) use default_limits::bytes_of_two_layers;
use identity::Identities;
use pass_parameter::{ParameterShards, Position};
use passes::{Groups, Limits};

/// The largest number of dimensions of parameters whose gradients the backward pass reduces.
const MOST_DIMENSIONS: usize = 6;
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
    keep: Keep,
    small_elements: usize,
    /// Two layers, unless set.
    ahead_mb: Option<f64>,
    in_flight_mb: Option<f64>,
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

/// The decisions on all parameters of a model that need no other rank.
struct Division {
    found: Vec<Found>,
    cuts: Cuts,
    routing: Routing,
    /// In the order of the model.
    model: Vec<ModelParameter>,
    trainable: Vec<TrainableParameter>,
    planned: Vec<Parameter>,
}

impl Division {
    /// Returns `true` if any parameter needs an owner before the optimizer is made.
    fn has_owners(&self) -> bool {
        self.found.iter().any(|found| found.placement.reduces_in_backward())
    }
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
            keep: Keep::Nothing,
            small_elements: SMALL_ELEMENTS,
            ahead_mb: None,
            in_flight_mb: None,
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
    /// owners: a rank holds `1 / N` of every parameter, also where a few matrices are most of a
    /// model, or where there are fewer matrices than ranks. FSDP2's `Shard(0)` divides in this way.
    ///
    /// The rows of a stack are those of all its matrices, one after the other. Numbers of rows
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
    /// default.
    pub fn with_keep(mut self, keep: Keep) -> Self {
        self.keep = keep;
        self
    }

    /// Sets the number of elements below which every rank has a parameter: 1024 by default.
    pub fn with_small_elements(mut self, elements: usize) -> Self {
        self.small_elements = elements;
        self
    }

    /// Sets the MB (10^6 bytes) of parameters that are gathered ahead of their use, in the order of
    /// the pass before, in messages of up to half of it: by default the bytes of two layers, but at
    /// most a quarter of the divided parameters. With 0, every use waits for its own parameter. The
    /// results are the same.
    ///
    /// A layer is an item of the model's outermost list, as `blocks.3`; without lists, it is the
    /// largest parameter. A parameter with more than half of the bytes is sent alone.
    pub fn with_ahead_mb(mut self, megabytes: f64) -> Self {
        self.ahead_mb = Some(megabytes);
        self
    }

    /// Sets the MB (10^6 bytes) of gradients that are collected and reduced at once while the
    /// backward pass goes on, in messages of up to half of it: by default as for
    /// [`with_ahead_mb`](Self::with_ahead_mb). With 0, every gradient is sent alone. The results
    /// are the same.
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

    /// Lets ranks leave parameters out of a pass that others use, such as the head of a task or the
    /// encoder of a modality. The gradient of such a rank counts as zero: the mean is that of all
    /// ranks.
    ///
    /// Every backward pass then begins with a message of five bits per parameter, in which the
    /// ranks exchange which parameters they use. Those that only some use are reduced at the end of
    /// the pass. If they are [owned](Self::owned), the others call [`unused`](Self::unused) in the
    /// forward pass. Vectors, such as biases, stay in memory from the forward to the backward pass,
    /// also with [`Keep::Nothing`].
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
        let by_path = |sharded: &'_ Sharded| -> HashMap<String, Parameter> {
            let planned = sharded.planned.iter();
            planned.map(|parameter| (parameter.path.clone(), parameter.clone())).collect()
        };
        let known = self.sharded().map(by_path);
        let rank = self.world().rank();
        let differs = |parameter: &Parameter, reason: &str, remedy| {
            Err(Error::parameter(&parameter.path, rank, reason, remedy))
        };
        for parameter in planned {
            match known.as_ref().map(|known| known.get(&parameter.path)) {
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
                Some(_) => {
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

    /// Runs the backward pass of a loss, and returns the gradients for a step: this rank's shards
    /// of the means of parameters whose gradients the pass reduces, and this rank's gradients of
    /// all others. All ranks make this call.
    ///
    /// # Errors
    ///
    /// A failure of the forward or of the backward pass; [`Error::Mismatch`] if the ranks have not
    /// used the same parameters in the same order; as every collective.
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: &Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        self.begin_backward(model)?;
        // Divided parameters take their gradients out during the pass, so these are the rest.
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        self.end_backward(model, gradients)
    }

    /// [`backward`](Self::backward) of a rank that has run out of batches, while others have some:
    /// it takes part in their pass, and its own gradients count as zero. The loss may be of any
    /// batch; see [`World::join`](crate::comm::World::join). A parameter that only such ranks use,
    /// where that is [allowed](Self::allow_unused), has no gradient.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn drain<M: Module, const D: usize>(
        &self,
        loss: &Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        if let Some(Sharded { passes, .. }) = self.sharded() {
            passes.drained(|| -> Result<()> {
                self.begin_backward(model)?;
                // For the calls that the closures of the pass make; the gradients count as zero.
                drop(loss.backward());
                Ok(())
            })?;
        }
        self.end_backward(model, GradientsParams::new())
    }

    fn begin_backward<M: Module>(&self, model: &M) -> Result<()> {
        let Some(Sharded { passes, .. }) = self.sharded() else { return Ok(()) };
        // Only the message about unused parameters needs a walk through the model.
        let model = self.allows_unused.then(|| self.identities(model));
        passes.begin_backward(model.as_ref())
    }

    /// Ends the backward pass of a step: the gradients of earlier micro-batches are added.
    fn end_backward<M: Module>(
        &self,
        model: &M,
        mut gradients: GradientsParams,
    ) -> Result<GradientsParams> {
        // Of parameters that the step reduces: the passes add up their own.
        let mut buffer = self.micro_batches();
        if buffer.count() > 0 {
            buffer.add(model, gradients)?;
            gradients = buffer.take_sum();
        }
        // Not while the pass waits for other ranks.
        drop(buffer);
        self.finish(model, &mut gradients)?;
        Ok(gradients)
    }

    /// Runs the backward pass of a micro-batch, whose gradients are added to those of the next call
    /// of [`backward`](Self::backward). Nothing is reduced until then, and every rank holds its
    /// whole gradients. All ranks make this call.
    ///
    /// The sums are float32 for parameters in half precision, which
    /// [`GradDtype::Float32`](super::GradDtype::Float32) has a step accept.
    ///
    /// To hold shards instead, call `backward` for every micro-batch, and add up what it returns by
    /// [`GradientBuffer`](crate::GradientBuffer): the ranks then reduce once for each of them.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn accumulate<M: Module, const D: usize>(&self, loss: &Tensor<D>, model: &M) -> Result<()> {
        let backward = || GradientsParams::from_grads(loss.backward(), model);
        let gradients = self.in_micro_batch(model, backward)?;
        self.micro_batches().add(model, gradients)
    }

    /// Runs a backward pass of a model in which nothing is reduced.
    pub(super) fn in_micro_batch<M: Module, T>(
        &self,
        model: &M,
        backward: impl FnOnce() -> T,
    ) -> Result<T> {
        let Some(Sharded { passes, .. }) = self.sharded() else { return Ok(backward()) };
        self.begin_backward(model)?;
        let outcome = passes.in_micro_batch(backward);
        passes.keep_micro_batch(&self.identities(model))?;
        Ok(outcome)
    }

    fn identities<M: Module>(&self, model: &M) -> Identities {
        Identities::of_model(model, self.world().rank())
    }

    /// Returns `true` if every forward pass is a collective call.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(super) fn gathers(&self) -> bool {
        let parameters = self.sharded().map(|sharded| sharded.passes.parameters());
        parameters.is_some_and(|all| all.iter().any(|parameter| parameter.placement.is_owned()))
    }

    /// Adds this rank's shards of the means of a model's parameters whose gradients the pass has
    /// reduced, after a backward pass of the caller's. All ranks make this call.
    ///
    /// The ranks do not know yet which of them [leave parameters out](Self::allow_unused): with
    /// [`Keep::Nothing`], such a pass is an error, and needs `backward`.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward); [`Error::Usage`] after
    /// [`accumulate`](Self::accumulate), whose gradients `backward` returns.
    pub fn collect<M: Module>(&self, model: &M, gradients: &mut GradientsParams) -> Result<()> {
        match self.micro_batches().count() {
            0 => self.finish(model, gradients),
            earlier => Err(Error::usage(
                "`Layout::collect` does not add earlier micro-batches",
                "no call of `Layout::accumulate` before it",
                format!("{earlier} calls"),
                "end with `Layout::backward`, or add up gradients by `GradientBuffer`",
            )),
        }
    }

    /// Ends a backward pass.
    fn finish<M: Module>(&self, model: &M, gradients: &mut GradientsParams) -> Result<()> {
        let Some(Sharded { passes, .. }) = self.sharded() else { return Ok(()) };
        let means = passes.finish(&self.identities(model))?;
        means.into_iter().for_each(|mean| mean.register(gradients));
        Ok(())
    }

    /// Forgets the gradients that no `backward` or `collect` has returned, such as those of
    /// micro-batches that are not to be trained on, and the forward passes that no backward pass
    /// has followed. All ranks make this call.
    ///
    /// A forward pass of a model with autodiff counts as one that is trained. Without this call,
    /// the next backward pass waits for its gradients, and reduces those of its parameters at its
    /// end only. Until then, a rank keeps what the pass has left: up to
    /// [`with_ahead_mb`](Self::with_ahead_mb) of gathered parameters, and the whole gradients of
    /// micro-batches. `model.valid()` needs no call.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn discard(&self) -> Result<()> {
        self.passes().discard()
    }

    fn micro_batches(&self) -> std::sync::MutexGuard<'_, GradientBuffer> {
        self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails for settings that no model can use.
    fn check(&self) -> Result<()> {
        self.config.check()?;
        for (setting, megabytes) in
            [("ahead_mb", self.ahead_mb), ("in_flight_mb", self.in_flight_mb)]
        {
            megabytes.map_or(Ok(()), |megabytes| crate::checks::ensure_size(setting, megabytes))?;
        }
        let expected = "an axis of the mesh";
        let invalid = |setting, axis: &str, expected| {
            let value = format!("axis `{axis}` of a mesh with {}", self.mesh.names());
            Err(Error::setting(setting, value, expected))
        };
        for place in &self.places {
            let Some(axis) = place.axis() else { continue };
            match self.mesh.axis(axis) {
                None => return invalid("places", axis, expected),
                Some(found) if place.is_partial() && !found.is_model() => {
                    return invalid(
                        "places",
                        axis,
                        "an axis of `Axis::model` for `Place::partial`",
                    );
                }
                Some(_) => {}
            }
        }
        match &self.axis {
            None if self.places.iter().any(Place::divides) => Err(Error::setting(
                "places",
                "`Place::owned` or `Place::rows` without an axis",
                "an axis by `Layout::owned` or `Layout::rows`",
            )),
            Some(axis) => match self.mesh.axis(axis) {
                None => invalid(self.division_name(), axis, expected),
                Some(found) if found.is_model() => invalid(
                    self.division_name(),
                    axis,
                    "an axis of `Axis::data` (parameters are cut along others by `Place::shard`)",
                ),
                Some(_) => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// The name of the method that sets the axis of divided parameters.
    fn division_name(&self) -> &'static str {
        if self.in_rows { "rows" } else { "owned" }
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
            keep: self.keep,
            ahead: of(self.ahead_mb, |parameter| parameter.placement.is_owned()),
            in_flight: of(self.in_flight_mb, |parameter| parameter.is_trained),
            allows_unused: self.allows_unused,
        }
    }

    /// The placement of a parameter.
    fn placement(&self, found: &Found, places: &Places<'_>, cuts: &Cuts) -> Placement {
        let slice = cuts.slice(&found.path);
        let shape = slice.map_or_else(|| found.shape.clone(), Slice::shape);
        let elements: usize = shape.iter().product();
        // Not along the axis along which every rank has its slice.
        let is_cut = |axis: &&String| slice.is_some_and(|slice| slice.slices.axes().contains(axis));
        let axis = self.axis.as_ref().filter(|axis| !is_cut(axis));
        if !found.trainable {
            let is_named = places.of(&found.path) == Some(Placement::Owned);
            let is_owned = is_named && axis.is_some() && elements > 0;
            return if is_owned { Placement::Owned } else { Placement::Replicated };
        }
        // Gradients of more dimensions can't be returned.
        let is_large = elements >= self.small_elements && found.shape.len() <= MOST_DIMENSIONS;
        let unowned = match self.overlaps_backward && is_large {
            true => Placement::Reduced,
            false => Placement::Replicated,
        };
        match (places.of(&found.path), axis) {
            (Some(Placement::Replicated), _) | (_, None) => unowned,
            // However small it is, since a place names it.
            (Some(placement), Some(_)) => placement,
            (None, Some(_)) if is_large && found.shape.len() >= 2 => Placement::Owned,
            (None, Some(_)) => unowned,
        }
    }

    /// The positions of the ranks that share this rank's slice of a parameter and its replicas.
    fn positions(&self, axes: &[String], grid: &Grid) -> Vec<Position> {
        // Slices along the axis of owners are not divided further.
        let axis = self.axis.as_ref().filter(|axis| !axes.contains(axis));
        let part = |rank: usize| axis.map_or(0, |axis| self.mesh.position(axis, rank).0);
        let ranks = grid.ranks.iter().map(|row| row[grid.slice]).enumerate();
        let mut shards = BTreeMap::new();
        let position = |(replica, rank): (usize, usize)| {
            let part = part(rank);
            // Ranks with replicas of a part update one shard of it each, in the order of ranks.
            let shard = shards.entry(part).or_insert(0);
            *shard += 1;
            Position { replica, part, shard: *shard - 1 }
        };
        ranks.map(position).collect()
    }

    /// Decides on all parameters of a model, without initialising any.
    fn division<M: Module>(&self, model: &M) -> Result<Division> {
        self.check()?;
        // Without initialising: a model may be larger than a rank's memory before it is divided.
        let mut found = parameters::lazily(model);
        let rank = self.world().rank();
        if let Some(owned) = found.iter().find(|found| found.placement.reduces_in_backward()) {
            let remedy = "shard a model once, and keep the layout that did it";
            return Err(Error::parameter(&owned.path, rank, "it is already divided", remedy));
        }
        let routing = self.config.muon.route_found(&found)?;
        let places = Places::compile(&self.places, &found)?;
        // Both the factors and the weight that they are added to.
        let adapted: HashSet<String> = found
            .iter()
            .filter(|found| found.is_adapter)
            .flat_map(|factor| [factor.path.clone(), factor.weight().to_owned()])
            .collect();
        let mut cuts = Cuts::of(&self.mesh, &found, routing.routes(), &places)?;
        for (found, route) in found.iter_mut().zip(routing.routes()) {
            found.placement = self.placement(found, &places, &cuts);
            if found.placement.is_owned()
                // AdamW's parameters, which have no owners, lie in even rows of elements in any
                // case.
                && route.has_owners()
                && places.in_rows(&found.path).unwrap_or(self.in_rows)
            {
                let axis = self.axis.as_ref().and_then(|axis| self.mesh.axis(axis));
                cuts.store_in_rows(&found.path, axis.expect("an owned parameter has an axis"));
            }
            let is_divided =
                found.placement.reduces_in_backward() || cuts.slice(&found.path).is_some();
            if is_divided && adapted.contains(&found.path) {
                let remedy = "merge the adapter, leave the parameter on all ranks with \
                              `Place::replicated`, or write the adapter as layers next to a \
                              frozen one, which `Place::owned` divides";
                let reason = "it has an adapter, which can't be divided";
                return Err(Error::parameter(&found.path, rank, reason, remedy));
            }
        }
        let Trainable { model, trainable, planned } = trainable::of_model(&routing, &found, &cuts)?;
        self.ensure_unmixed(&model, &planned)?;
        Ok(Division { found, cuts, routing, model, trainable, planned })
    }

    /// Fails for a parameter to be divided of which Muon updates some blocks and AdamW others.
    fn ensure_unmixed(&self, model: &[ModelParameter], planned: &[Parameter]) -> Result<()> {
        let is_mixed = |parameter: &&ModelParameter| {
            let works = || planned[parameter.trainable.clone()].iter();
            let is_matrices = |planned: &Parameter| matches!(planned.work, Work::Matrices { .. });
            parameter.placement.reduces_in_backward()
                && works().any(is_matrices)
                && !works().all(is_matrices)
        };
        if let Some(mixed) = model.iter().find(is_mixed) {
            let reason = "it has blocks that its rule leaves to AdamW, so it can't be divided";
            let remedy = "leave it on all ranks, or split it without `leave`";
            return Err(Error::parameter(&mixed.path, self.world().rank(), reason, remedy));
        }
        Ok(())
    }

    /// The parameters that are divided, or whose gradients the backward pass reduces, in the order
    /// of the model, with the owners of their blocks.
    fn pass_parameters(
        &self,
        Division { found, cuts, model, planned, .. }: &Division,
        chosen: Option<&Chosen>,
    ) -> Vec<Arc<PassParameter>> {
        let Some(Chosen { owners, .. }) = chosen else { return vec![] };
        let (mut trained, mut all) = (model.iter(), vec![]);
        // Of all ranks: once for all parameters with the same cuts.
        let mut positions: BTreeMap<Vec<String>, Vec<Position>> = BTreeMap::new();
        for found in found {
            let known = found.trainable.then(|| trained.next().expect("each is in the model"));
            if !found.placement.reduces_in_backward() {
                continue;
            }
            let (parameter, blocks, owners) = match known {
                Some(known) => {
                    // All blocks of a parameter are sent together, whichever bucket the plan has
                    // them in.
                    let range = known.trainable.clone();
                    let blocks = planned[range.clone()].to_vec();
                    (known.clone(), blocks, owners[range].to_vec())
                }
                None => {
                    let (parameter, rows) = trainable::frozen(found, cuts);
                    (parameter, vec![rows], vec![vec![]])
                }
            };
            let axes = parameter.slice.as_ref().map_or(&[][..], |slice| slice.slices.axes());
            let grid = self.mesh.grid(axes);
            let bucket = Bucket::of_one(&blocks, &owners, self.world().size());
            let shards = self.shards(&bucket, &blocks, &grid);
            let positions =
                positions.entry(axes.to_vec()).or_insert_with(|| self.positions(axes, &grid));
            let positions = (&**positions, grid.replica);
            all.push(Arc::new(PassParameter::new(all.len(), &parameter, shards, positions)));
        }
        all
    }

    /// The shards of a parameter that the ranks of a column of the grid share.
    fn shards(&self, bucket: &Bucket, blocks: &[Parameter], grid: &Grid) -> ParameterShards {
        // By the slices that are stored, which are rows of those in the grid, or the same.
        let stored = self.mesh.grid(blocks[0].cut_axes());
        let mut of_slices: BTreeMap<usize, Bucket> = BTreeMap::new();
        let shard = |ranks: &Vec<usize>| {
            let [replica, slice] = stored.positions[ranks[grid.slice]];
            // Replicas store the same slice, whose bucket is made once.
            let held = of_slices
                .entry(slice)
                .or_insert_with(|| bucket.of_slice(blocks, &stored.positions, slice));
            let in_use = |Overlap { parameter: block, elements, padding }| {
                let slices = blocks[block].slices.as_ref();
                let first = slices.map_or(0, |slices| slices.before_in_use(slice));
                let elements = first + elements.start..first + elements.end;
                Overlap { parameter: block, elements, padding }
            };
            held.overlaps(held.shard_range(replica)).map(in_use).collect()
        };
        let in_use = grid.ranks.iter().map(shard).collect();
        let runs = of_slices[&stored.slice].runs(stored.replica);
        ParameterShards { in_use, runs }
    }
}
