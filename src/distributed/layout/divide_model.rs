//! The division of a model, parameter by parameter, and its reversal.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::tensor::{Shape, Tensor};
use serde::Serialize;

use super::identity::Versioned;
use super::pass_parameter::{PassParameter, Position};
use super::passes::{Groups, Keep, Passes, SharingGroup};
use super::placements::Division;
use super::reparameterizations::{Owned, Reduced};
use super::{Cuts, Layout, LayoutTable, Place, Sharded};
use crate::comm::{Pending, World};
use crate::distributed::config::CostSource;
use crate::distributed::plan::{Balancing, Slice};
use crate::distributed::same_parameters::same_parameters;
use crate::error::{Error, Result};
use crate::link;
use crate::muon::MuonConfig;
use crate::parameters::{self, Found, Placement, in_place_of};

impl Layout {
    /// Divides a model among the ranks: returns a model of the same type in which this rank has its
    /// parts. The values are rank 0's. All ranks make this call, once for a layout.
    ///
    /// Parameters that are not initialised yet, as in a new model of Burn's layers, are initialised
    /// one by one: in addition to its parts, a rank holds two or three parameters at a time.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors:
    ///
    /// - [`Error::Setting`] for an axis that the mesh does not have, sizes that are negative, a
    ///   [`Place::owned`](super::Place::owned) or [`Place::rows`](super::Place::rows) without an
    ///   axis, or a setting without effect, such as [`with_keep`](Self::with_keep) for a layout
    ///   that gathers no weights;
    /// - [`Error::Usage`] for a device on which [links](crate::link::supports) do not work, or a
    ///   layout that has divided a model before;
    /// - [`Error::Pattern`] and [`Error::UnusedRule`] for a [`Place`](super::Place) that matches no
    ///   trained parameter, or none at all for [`Place::shard`](super::Place::shard),
    ///   [`Place::owned`](super::Place::owned) and [`Place::rows`](super::Place::rows);
    /// - [`Error::SettingsDiffer`] and [`Error::ModelsDiffer`] if the ranks have different layouts
    ///   or models;
    /// - [`Error::Parameter`] for a parameter that is already divided, that is to be divided and
    ///   has an adapter, or whose initial values are of another type than its device's;
    /// - [`Error::Parameter`] for a parameter that a [`Place::shard`](super::Place::shard) can't
    ///   cut: it lacks the dimension or a divisor of it, or has fewer elements than ranks. It is
    ///   cut along the axis already, or is a [`Place::partial`](super::Place::partial) along it, or
    ///   the axis is one of data and the parameter is in a list of layers;
    /// - as [`MuonConfig::route`](crate::MuonConfig::route) and every collective.
    pub fn shard<M: Module>(&self, model: M) -> Result<M> {
        let world = self.world();
        self.same_settings()?;
        let division = world.agree(self.dividable(&model))?;
        // Before any call that is sized by the plan: ranks with other models would exchange other
        // lengths.
        same_parameters(world, &division.planned)?;
        let chosen = division.has_owners().then(|| self.owners_together(&division)).transpose()?;
        let parameters = self.pass_parameters(&division, chosen.as_ref());
        let cuts = &division.cuts;
        if parameters.is_empty() && cuts.is_empty() {
            // Nothing is divided: rank 0's values for all, as without a layout.
            return world.broadcast(model);
        }
        // The values are rank 0's. Other ranks on its device would draw random numbers in between.
        let model = parameters::undrawn(model, world.is_main());
        let groups = cuts.groups(&self.mesh)?;
        let table = LayoutTable::new(&division.found, &parameters, cuts);
        let passes = Arc::new(self.passes_of(self.groups(&parameters)?, parameters));
        let (owned, mut error) = (by_path(&passes, Placement::Owned), None);
        let model = model.apply_reparameterization(AttachParts {
            world,
            passes: &passes,
            parameters: &owned,
            cuts,
            error: &mut error,
        });
        let mut cut = Slicing { world, cuts, owned: &owned, error };
        // After the parts: what is owned was cut by `AttachParts`, and is skipped here.
        let model = parameters::map(model, &mut cut);
        if let Some(error) = cut.error {
            return Err(error); // the others were told of it
        }
        // An engine may hold the last parameter until the next call.
        world.agree(Ok(()))?;
        let model = model.apply_reparameterization(Reduce::of(&passes));
        // The rest of rank 0's values. Slices have arrived one by one, from the whole, and parts as
        // well.
        let model = world.broadcast_without(model, |path| cuts.slice(path).is_some())?;
        let Division { cuts, planned, .. } = division;
        self.set_sharded(Sharded { passes, cuts, groups, planned, chosen, table });
        Ok(model)
    }

    /// Divides a model without its values, for a forecast: returns its parameters, with the shapes
    /// of whole ones. The owners are the `first` rank's, unless this is the first.
    pub(in crate::distributed) fn divide<M: Module>(
        &self,
        model: &M,
        first: Option<&Layout>,
    ) -> Result<Vec<Found>> {
        let division = self.division(model)?;
        let chosen = match first {
            Some(first) => first.sharded().and_then(|sharded| sharded.chosen.clone()),
            None => division.has_owners().then(|| self.owners_together(&division)).transpose()?,
        };
        let parameters = self.pass_parameters(&division, chosen.as_ref());
        let Division { found, cuts, planned, .. } = division;
        if !(parameters.is_empty() && cuts.is_empty()) {
            let table = LayoutTable::new(&found, &parameters, &cuts);
            let groups = cuts.groups(&self.mesh)?;
            let passes = Arc::new(self.passes_of(self.groups(&parameters)?, parameters));
            self.set_sharded(Sharded { passes, cuts, groups, planned, chosen, table });
        }
        Ok(found)
    }

    /// Remembers how the model is divided.
    fn set_sharded(&self, sharded: Sharded) {
        assert!(self.sharded.set(sharded).is_ok(), "a layout divides one model");
    }

    /// The ranks that share parameters, and those that have replicas of their parts.
    fn groups(&self, parameters: &[Arc<PassParameter>]) -> Result<Groups> {
        let axes: BTreeSet<&[String]> =
            parameters.iter().map(|parameter| parameter.axes()).collect();
        let by_axes = axes.into_iter().map(|axes| Ok((axes.to_vec(), self.sharing_group(axes)?)));
        Ok(Groups { world: self.world().clone(), by_axes: by_axes.collect::<Result<_>>()? })
    }

    /// The ranks that share the parameters that are cut along some axes, and their replicas.
    fn sharing_group(&self, axes: &[String]) -> Result<SharingGroup> {
        let grid = self.mesh.grid(axes);
        let positions = self.positions(axes, &grid);
        let split = |index: fn(&Position) -> usize| -> Result<World> {
            let group = self.mesh.split(|rank| {
                let [replica, slice] = grid.positions[rank];
                [index(&positions[replica]) * grid.ranks[0].len() + slice, rank]
            })?;
            Ok(World::new(group, self.world().device().clone()))
        };
        // Ranks with one shard index share the parameter, each with another part; those with one
        // part are its replicas.
        let sharing = split(|position| position.shard)?;
        Ok(SharingGroup { sharing, replicas: split(|position| position.part)? })
    }

    /// Fails on all ranks if their layouts are not the same.
    fn same_settings(&self) -> Result<()> {
        self.world().same_config(&Settings {
            owned: self.axis.as_deref().filter(|_| !self.in_rows),
            rows: self.axis.as_deref().filter(|_| self.in_rows),
            places: &self.places,
            muon: &self.config.muon,
            balancing: self.config.balancing,
            costs: self.config.costs,
            keep: self.keep(),
            small_elements: self.small_elements,
            ahead_mb: self.ahead_mb,
            in_flight_mb: self.in_flight_mb,
            round_means: self.rounds_means,
            overlap_backward: self.overlaps_backward,
            allow_unused: self.allows_unused,
        })
    }

    fn dividable<M: Module>(&self, model: &M) -> Result<Division> {
        let device = self.world().device();
        if self.sharded().is_some() {
            return Err(Error::usage(
                "the layout has divided a model before",
                "one model for each layout",
                "a second model",
                "make a new layout for it",
            ));
        }
        let division = self.division(model)?;
        if division.has_owners() && !link::supports(device) {
            return Err(Error::usage(
                "the device can't train a divided model",
                "a device of Flex, CubeCL or LibTorch",
                format!("{device:?}"),
                "use another device, or a model that is not divided",
            ));
        }
        // Only a warning: the model trains, with more memory than was asked for.
        let keeps = device.gradient_checkpointing_strategy();
        let gathers = division.found.iter().any(|found| found.placement.is_owned());
        if gathers && self.keep() == Keep::Nothing && keeps == Some(Default::default()) {
            log::warn!(
                "weights of which a layer makes a view, as of a tied embedding, stay in memory \
                 until the backward pass: make the model on \
                 `device.autodiff().gradient_checkpointing()`, or set \
                 `Layout::with_keep(Keep::Weights)`"
            );
        }
        Ok(division)
    }

    /// Returns an ordinary model with all parameters on every rank, for evaluation on one rank, for
    /// export, and for Burn's own records. All ranks make this call.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] if the ranks pass models with other values of owned parameters, such as
    /// an average that one of them has changed alone ([`Error::PeerFailed`] on ranks that share no
    /// such parameter with it); as every collective.
    pub fn unshard<M: Module>(&self, model: &M) -> Result<M> {
        let Some(Sharded { passes, cuts, .. }) = self.sharded() else { return Ok(model.clone()) };
        passes.ensure_same_values(model)?;
        let ids = self.identities(model).into_ids();
        let owned = by_path(passes, Placement::Owned);
        // A use of every parameter gathers it. As a reading, it does not count as a pass.
        let whole = passes.read(|| model.clone().materialize());
        passes.ensure_alive()?;
        let found = parameters::of(model).into_iter();
        let trained = found.map(|found| (found.path, found.trainable)).collect();
        let whole = parameters::map(whole, &mut Unshard { owned, ids, trained });
        let mut join = Joining { layout: self, cuts, error: None };
        let whole = parameters::map(whole, &mut join);
        join.error.map_or(Ok(whole), Err)
    }
}

/// Replaces parameters by this rank's slices of rank 0's values.
struct Slicing<'a> {
    world: &'a World,
    cuts: &'a Cuts,
    /// Parameters that were divided as well.
    owned: &'a HashMap<String, Arc<PassParameter>>,
    error: Option<Error>,
}

impl parameters::Map for Slicing<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slice) = self.cuts.slice(path) else { return param };
        // After an error no further call: the other ranks have ended.
        if self.error.is_some() || self.owned.contains_key(path) {
            return param;
        }
        let (id, whole, mapper) = param.consume();
        // Whole by whole, and not the model at once: a rank never holds more than one of rank 0's
        // parameters.
        let flat = whole.clone().without_autodiff().reshape([-1]);
        let first = self.world.comm().broadcast(flat, 0).and_then(Pending::wait);
        let value = match first {
            Ok(first) => in_place_of(&whole, slice.of(&first).reshape(shape_of::<D>(slice))),
            Err(error) => {
                self.error = Some(error);
                whole
            }
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

/// The shape of a slice of a parameter with this number of dimensions.
fn shape_of<const D: usize>(slice: &Slice) -> [usize; D] {
    slice.shape().try_into().expect("a slice has the dimensions of the whole")
}

/// Replaces slices by whole parameters.
struct Joining<'a> {
    layout: &'a Layout,
    cuts: &'a Cuts,
    error: Option<Error>,
}

impl parameters::Map for Joining<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slice) = self.cuts.slice(path).filter(|_| self.error.is_none()) else {
            return param;
        };
        let group = self.layout.slice_group(slice.slices.axes()).expect("a cut has a group");
        let (id, value, mapper) = param.consume();
        let flat = value.clone().without_autodiff().reshape([-1]);
        let all = group.across.all_gather(flat, &slice.counts()).and_then(Pending::wait);
        let value = match all {
            Ok(all) => {
                let shape: [usize; D] =
                    slice.slices.whole().try_into().expect("of the dimensions of a slice");
                in_place_of(&value, slice.whole(&all).reshape(shape))
            }
            Err(error) => {
                self.error = Some(error);
                value
            }
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

/// The settings of a layout, under the names of the methods that set them.
#[derive(Serialize)]
struct Settings<'a> {
    owned: Option<&'a str>,
    rows: Option<&'a str>,
    places: &'a [Place],
    muon: &'a MuonConfig,
    balancing: Balancing,
    costs: CostSource,
    keep: Keep,
    small_elements: usize,
    ahead_mb: Option<f64>,
    in_flight_mb: Option<f64>,
    round_means: bool,
    overlap_backward: bool,
    allow_unused: bool,
}

/// Attaches parts to a model.
struct AttachParts<'a> {
    world: &'a World,
    passes: &'a Arc<Passes>,
    parameters: &'a HashMap<String, Arc<PassParameter>>,
    cuts: &'a Cuts,
    error: &'a mut Option<Error>,
}

impl AttachParts<'_> {
    /// The value of an outcome. Keeps its error, and tells the other ranks, which wait for this one
    /// in the next broadcast.
    fn report<T>(&mut self, outcome: Result<T>) -> Option<T> {
        let tell = |error: &Error| self.world.comm().fail(&error.to_string());
        outcome.inspect_err(tell).map_err(|error| *self.error = Some(error)).ok()
    }

    /// The part of a parameter with rank 0's value, which is trained like the whole.
    fn part<const D: usize>(
        &self,
        parameter: &PassParameter,
        whole: Tensor<D>,
    ) -> Result<Tensor<1>> {
        let types = [parameter.dtype, whole.dtype()];
        parameters::ensure_initial_type(&parameter.path, self.world.rank(), types)?;
        let flat = whole.clone().without_autodiff().reshape([-1]);
        let first = self.world.comm().broadcast(flat, 0)?.wait()?;
        let held = self.cuts.slice(&parameter.path).map_or(first.clone(), |slice| slice.of(&first));
        Ok(in_place_of(&whole, parameter.part(held)))
    }
}

impl Reparameterizer for AttachParts<'_> {
    type Reparam = Owned;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Owned>) {
        let Some(parameter) = self.parameters.get(path) else {
            if self.error.is_none() && self.cuts.slice(path).is_none() {
                // Random numbers are drawn in the order of the model, as on one device.
                let initialised = parameters::initialise(path, self.world.rank(), &param);
                self.report(initialised);
            }
            return (param, None);
        };
        let (id, whole, mapper) = param.consume();
        let slice = self.cuts.slice(path).map(|slice| Shape::from(shape_of::<D>(slice)));
        let shape = slice.unwrap_or(whole.shape());
        let nan = Tensor::<D>::full([1; D], f32::NAN, (&whole.device(), whole.dtype()));
        let part = match self.error {
            Some(_) => return (Param::from_mapped_value(id, whole, mapper), None),
            None => self.part(parameter, whole),
        };
        let part = self.report(part).unwrap_or_else(|| nan.clone().reshape([1]));
        let at = (path, self.world.rank());
        let base = parameter.form.base(nan.expand(shape), mapper, at);
        let (parameter, passes) = (parameter.clone(), self.passes.clone());
        // The first pass gathers ahead as well.
        passes.remember_part(&parameter, &part);
        let part = Param::initialized(id, part);
        (base, Some(Owned { part, version: Versioned::first(), parameter, passes }))
    }
}

/// The parameters of the passes with a placement, by path.
fn by_path(passes: &Passes, placement: Placement) -> HashMap<String, Arc<PassParameter>> {
    let parameters =
        passes.parameters().iter().filter(|parameter| parameter.placement == placement);
    parameters.map(|parameter| (parameter.path.clone(), parameter.clone())).collect()
}

/// Attaches the reduction of gradients to a model.
struct Reduce<'a> {
    passes: &'a Arc<Passes>,
    parameters: HashMap<String, Arc<PassParameter>>,
}

impl<'a> Reduce<'a> {
    fn of(passes: &'a Arc<Passes>) -> Self {
        Self { passes, parameters: by_path(passes, Placement::Reduced) }
    }
}

impl Reparameterizer for Reduce<'_> {
    type Reparam = Reduced;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Reduced>) {
        let parameter = self.parameters.get(path).cloned();
        (param, parameter.map(|parameter| Reduced { parameter, passes: self.passes.clone() }))
    }
}

/// Gives parameters that were gathered their identity back, and the form in which they are stored.
struct Unshard {
    owned: HashMap<String, Arc<PassParameter>>,
    ids: HashMap<String, ParamId>,
    /// `false` for frozen parameters.
    trained: HashMap<String, bool>,
}

impl parameters::Map for Unshard {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((parameter, id)) = self.owned.get(path).zip(self.ids.get(path)) else {
            return param;
        };
        let (_, value, mapper) = param.consume();
        // Gathered values are no leaves; what the model trains is to be trained again.
        let whole = Param::from_mapped_value(*id, value, mapper);
        parameter.form.whole(whole).set_require_grad(self.trained[path])
    }
}
