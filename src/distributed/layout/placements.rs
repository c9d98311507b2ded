//! The placements of a model's parameters, as a layout's settings say.

use std::collections::HashSet;

use burn::module::Module;

use super::Layout;
use crate::distributed::placement_rules::{Place, Places};
use crate::distributed::plan::{Parameter, Work};
use crate::distributed::sliced_parameters::Cuts;
use crate::distributed::trainable::{self, ModelParameter, Trainable, TrainableParameter};
use crate::error::{Error, Result};
use crate::parameters::{self, Found, Placement};
use crate::routing::Routing;

/// The largest number of dimensions of parameters whose gradients the backward pass reduces.
const MOST_DIMENSIONS: usize = 6;

/// The decisions on all parameters of a model that need no other rank.
pub struct Division {
    pub found: Vec<Found>,
    pub cuts: Cuts,
    pub routing: Routing,
    /// In the order of the model.
    pub model: Vec<ModelParameter>,
    pub trainable: Vec<TrainableParameter>,
    pub planned: Vec<Parameter>,
}

impl Division {
    /// Returns `true` if any parameter needs an owner before the optimizer is made.
    pub fn has_owners(&self) -> bool {
        self.found.iter().any(|found| found.placement.reduces_in_backward())
    }
}

impl Layout {
    /// Decides on all parameters of a model, without initialising any.
    pub(super) fn division<M: Module>(&self, model: &M) -> Result<Division> {
        self.check()?;
        // Without initialising: a model may be larger than a rank's memory before it is divided.
        let mut found = parameters::lazily(model);
        let rank = self.world().rank();
        if let Some(owned) = found.iter().find(|found| found.placement.reduces_in_backward()) {
            let remedy = "shard a model once, and keep the layout that did it; for another one, \
                          shard the model of `Layout::unshard`";
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
            found.placement = match self.placement(found, &places, &cuts) {
                // Its factors are added where a pass would see the parameter.
                Placement::Reduced if adapted.contains(&found.path) => Placement::Replicated,
                placement => placement,
            };
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
        let mut trained = trainable::of_model(&routing, &found, &cuts)?;
        let mixed = self.mixed(&trained)?;
        if !mixed.is_empty() {
            let in_step = found.iter_mut().filter(|found| mixed.contains(&found.path));
            in_step.for_each(|found| found.placement = Placement::Replicated);
            trained = trainable::of_model(&routing, &found, &cuts)?;
        }
        let Trainable { model, trainable, planned } = trained;
        Ok(Division { found, cuts, routing, model, trainable, planned })
    }

    /// Fails for settings that no model can use.
    fn check(&self) -> Result<()> {
        self.config.check()?;
        for (setting, megabytes) in
            [("ahead_mb", self.ahead_mb), ("in_flight_mb", self.in_flight_mb)]
        {
            megabytes.map_or(Ok(()), |megabytes| crate::checks::ensure_size(setting, megabytes))?;
        }
        self.ensure_effects()?;
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

    /// Fails for settings of messages that no pass sends, and of means that none takes.
    fn ensure_effects(&self) -> Result<()> {
        let without = |setting, expected| Err(Error::setting(setting, "one without", expected));
        if self.axis.is_some() {
            return Ok(());
        }
        if self.keep.is_some() {
            return without("keep", "a layout with `owned` or `rows`");
        }
        if self.ahead_mb.is_some() {
            return without("ahead_mb", "a layout with `owned` or `rows`");
        }
        let in_passes =
            [("in_flight_mb", self.in_flight_mb.is_some()), ("round_means", self.rounds_means)];
        match in_passes.into_iter().find(|(_, is_set)| *is_set && !self.overlaps_backward) {
            Some((setting, _)) => {
                without(setting, "a layout with `owned`, `rows` or `overlap_backward`")
            }
            None => Ok(()),
        }
    }

    /// The name of the method that sets the axis of divided parameters.
    fn division_name(&self) -> &'static str {
        if self.in_rows { "rows" } else { "owned" }
    }

    /// The placement of a parameter.
    fn placement(&self, found: &Found, places: &Places<'_>, cuts: &Cuts) -> Placement {
        let slice = cuts.slice(&found.path);
        // The largest slice decides for all ranks, some of which may have less.
        let elements = match slice {
            Some(slice) => slice.counts().into_iter().max().expect("a cut has slices"),
            None => found.shape.iter().product(),
        };
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

    /// The parameters whose gradients a pass would reduce, and of which Muon updates some blocks
    /// and AdamW others. Fails for one that is to be divided.
    fn mixed(&self, trained: &Trainable) -> Result<HashSet<String>> {
        let is_mixed = |parameter: &&ModelParameter| {
            let works = || trained.planned[parameter.trainable.clone()].iter();
            let is_matrices = |planned: &Parameter| matches!(planned.work, Work::Matrices { .. });
            parameter.placement.reduces_in_backward()
                && works().any(is_matrices)
                && !works().all(is_matrices)
        };
        let mixed = trained.model.iter().filter(is_mixed);
        if let Some(divided) = mixed.clone().find(|parameter| parameter.placement.is_owned()) {
            let reason = "it has blocks that its rule leaves to AdamW, so it can't be divided";
            let remedy = "leave it on all ranks, or split it without `leave`";
            return Err(Error::parameter(&divided.path, self.world().rank(), reason, remedy));
        }
        Ok(mixed.map(|parameter| parameter.path.clone()).collect())
    }
}
