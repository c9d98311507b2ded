//! Parameters of which every rank has a slice, and the ranks that exchange them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::mesh::{Axis, Grid, Mesh};
use super::placement_rules::Places;
use super::plan::{Cut, Slice, Slices};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::matrix_view::MatrixView;
use crate::parameters::Found;
use crate::routing::{ParameterRole, ParameterRoute};

/// This rank's slices of the parameters that are cut, and the factors on gradients, by path.
#[derive(Clone, Default)]
pub struct Cuts {
    slices: HashMap<String, Slice>,
    /// The axes along which owned parameters are stored in rows, and their numbers of ranks.
    rows: HashMap<String, (String, usize)>,
    factors: HashMap<String, f64>,
    /// The axes along which gradients are partial.
    partial: HashMap<String, Vec<String>>,
}

/// The ranks with which a rank exchanges parameters that are cut along the same axes.
#[derive(Debug, Clone)]
pub struct SliceGroup {
    pub grid: Arc<Grid>,
    /// The ranks that have the same slices.
    pub alike: Communicator,
    /// The ranks that have the other slices, one of each.
    pub across: Communicator,
}

/// The groups by the axes of cuts.
pub type SliceGroups = BTreeMap<Vec<String>, SliceGroup>;

impl Cuts {
    /// The slices of all parameters, and the factors on their gradients.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a parameter that can't be cut as the places say.
    pub fn of(
        mesh: &Mesh,
        found: &[Found],
        routes: &[ParameterRoute],
        places: &Places<'_>,
    ) -> Result<Self> {
        let mut all = Self::default();
        for (found, route) in found.iter().zip(routes) {
            let mut factor = 1.0;
            let parameter = CutParameter { found, route, mesh };
            let cuts = parameter.cuts(places)?;
            if !cuts.is_empty() {
                let slices = Slices::new(&found.shape, &cuts);
                let index = mesh.grid(slices.axes()).slice;
                // The loss of every rank is a mean over its data: the ranks that share a stack of
                // experts each have a part of the gradient of all data.
                let shared = cuts.iter().filter(|cut| !named(mesh, &cut.axis).is_model());
                factor /= shared.map(|cut| cut.ranks as f64).product::<f64>();
                all.slices.insert(found.path.clone(), Slice { slices, index });
            }
            for axis in places.partial(&found.path) {
                if cuts.iter().any(|cut| cut.axis == axis) {
                    let reason = format!("it is cut along `{axis}`, and partial along it");
                    let remedy = "remove `Place::partial`: a slice has all of its gradient";
                    return parameter.unfit(reason, remedy);
                }
                // The mean over ranks divides by all of them, and a partial gradient is a sum along
                // this axis.
                factor *= named(mesh, axis).size() as f64;
                all.partial.entry(found.path.clone()).or_default().push(axis.to_owned());
            }
            // A factor of 1 is left out, so that a layout that changes no gradient `is_empty`.
            if factor != 1.0 {
                all.factors.insert(found.path.clone(), factor);
            }
        }
        Ok(all)
    }

    /// The groups of ranks that exchange slices. All ranks make this call.
    pub fn groups(&self, mesh: &Mesh) -> Result<SliceGroups> {
        let group = |axes: Vec<String>| {
            let grid = mesh.grid(&axes);
            // Two calls for each kind of cut, in the order of the axes' names, which is the same on
            // all ranks.
            let alike = mesh.split(|rank| [grid.positions[rank][1], rank])?;
            let across = mesh.split(|rank| grid.positions[rank])?;
            Ok((axes, SliceGroup { grid, alike, across }))
        };
        self.axes().into_iter().map(group).collect()
    }

    /// This rank's slice of a parameter, if it is cut.
    pub fn slice(&self, path: &str) -> Option<&Slice> {
        self.slices.get(path)
    }

    /// Stores a parameter in rows along an axis, and gathers its slice, or the whole, for a use.
    pub fn store_in_rows(&mut self, path: &str, axis: &Axis) {
        self.rows.insert(path.to_owned(), (axis.name().to_owned(), axis.size()));
    }

    /// Returns `true` if a parameter is stored in rows.
    pub fn is_in_rows(&self, path: &str) -> bool {
        self.rows.contains_key(path)
    }

    /// The slices of a parameter, or of a block of it, as ranks store them between steps, from
    /// those that they use: its rows, if the parameter is stored in rows.
    pub fn stored(&self, path: &str, used: Option<Slices>, shape: &[usize]) -> Option<Slices> {
        match self.rows.get(path) {
            Some((axis, ranks)) => {
                let used = used.unwrap_or_else(|| Slices::new(shape, &[]));
                Some(used.in_rows(axis, *ranks))
            }
            None => used,
        }
    }

    /// The factor on the mean of a parameter's gradients over the ranks that have the same slice.
    pub fn gradient_factor(&self, path: &str) -> f64 {
        self.factors.get(path).copied().unwrap_or(1.0)
    }

    /// Returns `true` if the ranks along an axis have different gradients of a parameter.
    pub fn differs_along(&self, path: &str, axis: &str) -> bool {
        let is_axis = |axes: &[String]| axes.iter().any(|other| other == axis);
        self.slice(path).is_some_and(|slice| is_axis(slice.slices.axes()))
            || self.partial.get(path).is_some_and(|axes| is_axis(axes))
    }

    pub fn is_empty(&self) -> bool {
        self.slices.is_empty() && self.factors.is_empty()
    }

    /// The axes of all cuts, each combination once, with and without the axis of rows.
    fn axes(&self) -> Vec<Vec<String>> {
        let of = |path: &str| self.slice(path).map_or(&[][..], |slice| slice.slices.axes());
        let cut = self.slices.keys().map(|path| of(path).to_vec());
        let rows = self
            .rows
            .iter()
            .map(|(path, (axis, _))| [of(path), std::slice::from_ref(axis)].concat());
        cut.chain(rows).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Gives the parameters of a model that was cut the shapes of whole parameters.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a parameter that is not the slice.
    pub fn restore_whole(&self, found: &mut [Found], rank: usize) -> Result<()> {
        for found in found {
            let Some(slice) = self.slice(&found.path) else { continue };
            let (expected, got) = (slice.shape(), &found.shape);
            if *got != expected {
                return Err(Error::parameter(
                    &found.path,
                    rank,
                    format!("it is not this rank's slice: expected {expected:?}, got {got:?}"),
                    "use the model that `Layout::shard` returned",
                ));
            }
            found.shape = slice.slices.whole().to_vec();
        }
        Ok(())
    }
}

/// The axis of a name that was checked.
fn named<'a>(mesh: &'a Mesh, axis: &str) -> &'a Axis {
    mesh.axis(axis).expect("the axis was checked")
}

/// A parameter that is cut, with the ranks that have its slices.
struct CutParameter<'a> {
    found: &'a Found,
    route: &'a ParameterRoute,
    mesh: &'a Mesh,
}

impl CutParameter<'_> {
    fn unfit<T>(&self, reason: String, remedy: &'static str) -> Result<T> {
        Err(Error::parameter(&self.found.path, self.mesh.world().rank(), reason, remedy))
    }

    /// The cuts by all places that match.
    fn cuts(&self, places: &Places<'_>) -> Result<Vec<Cut>> {
        let mut cuts = vec![];
        for (axis, dimension, parts) in places.cuts(&self.found.path) {
            cuts.push(self.cut(&cuts, named(self.mesh, axis), dimension, parts)?);
        }
        if !cuts.is_empty() {
            self.check(&cuts)?;
        }
        Ok(cuts)
    }

    /// A cut along an axis, after those before it.
    fn cut(&self, before: &[Cut], axis: &Axis, dimension: usize, parts: usize) -> Result<Cut> {
        let (shape, name) = (&self.found.shape, axis.name());
        let Some(extent) = shape.get(dimension).copied() else {
            let reason = format!(
                "it can't be cut along `{name}`: its shape {shape:?} does not have dimension \
                 {dimension}"
            );
            return self.unfit(reason, "give `Place::shard` a dimension of the shape, from 0");
        };
        if parts == 0 || !extent.is_multiple_of(parts) {
            let reason = format!(
                "it can't be cut along `{name}`: {parts} parts do not divide dimension \
                 {dimension} of {shape:?}"
            );
            return self.unfit(reason, "give `Place::parts` a divisor of the dimension");
        }
        if before.iter().any(|cut| cut.axis == name) {
            let reason = format!("it is cut along `{name}` twice");
            return self.unfit(reason, "give one `Place::shard` for each axis");
        }
        if parts > 1 && before.iter().any(|cut| cut.dimension == dimension) {
            let reason = format!("the second cut of dimension {dimension} has parts");
            return self.unfit(reason, "give the parts to the first `Place::shard` of a dimension");
        }
        if !axis.is_model() && self.is_in_a_list() {
            let reason = format!(
                "it can't be cut along `{name}`, whose ranks have different data: it is a \
                 matrix in a list of layers, of which every rank would have another part"
            );
            let remedy = "make one parameter of all experts, `[experts, in, out]`, or cut \
                          along an axis of `Axis::model`";
            return self.unfit(reason, remedy);
        }
        Ok(Cut { axis: name.to_owned(), ranks: axis.size(), dimension, parts })
    }

    /// Returns `true` for a matrix of Muon's that is one of several of the same path but an index.
    fn is_in_a_list(&self) -> bool {
        let is_matrix = matches!(self.route.role, ParameterRole::Muon { .. });
        is_matrix && self.found.shape.len() == 2 && self.found.in_stack(self.found.fields.len())
    }

    /// Fails if the parameter can't have its cuts, at least one.
    fn check(&self, cuts: &[Cut]) -> Result<()> {
        let Self { found, route, .. } = self;
        let (shape, axis) = (&found.shape, &cuts[cuts.len() - 1].axis);
        // Layers such as BatchNorm write them anew at their whole width.
        if !found.trainable && found.name().starts_with("running_") {
            let reason = format!("it is a running statistic, which can't be cut along `{axis}`");
            let remedy = "let the pattern of `Place::shard` match trained parameters only";
            return self.unfit(reason, remedy);
        }
        let slices = Slices::new(shape, cuts);
        if (0..slices.count()).any(|slice| slices.shape(slice).contains(&0)) {
            let reason = format!(
                "it can't be cut along `{axis}`: its shape {shape:?} has fewer elements than ranks"
            );
            return self.unfit(reason, "leave it whole, or use fewer ranks");
        }
        let blocks = found.trainable.then(|| route.matrix_blocks()).transpose()?;
        let is_stack = matches!(
            route.role,
            ParameterRole::Muon { view: MatrixView::Batch, .. } if shape.len() == 3
        );
        if let Some(blocks) = blocks
            && !blocks.is_whole()
            && shape.len() != 2
            && !is_stack
        {
            let matrices: usize = blocks.batches().map(|[count, ..]| count).sum();
            let reason = format!("it is split into {matrices} matrices, and can't be cut as well");
            return self.unfit(reason, "remove the rule that splits it");
        }
        Ok(())
    }
}
