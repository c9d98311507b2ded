//! The identities of a model's parameters.
//!
//! A parameter that a layout divides is known by its path alone. Burn has two more identities of
//! it: the id under which an optimizer looks for its gradient, and the leaf of the graph that has
//! the gradient. A load or a map of the model may change both at any time. They are read from the
//! model at hand whenever they are needed, and never kept.
//!
//! Without autodiff a part has no leaf, and its [`Version`] tells whether its values may have
//! changed.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param, ParamId,
};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::pass_parameter::PassParameter;
use crate::error::{Error, Result};
use crate::link;
use crate::parameters::{self, Field, Visit};

/// The identities of a parameter, or of this rank's part of it.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    pub id: ParamId,
    /// `None` for a value without autodiff.
    pub leaf: Option<u64>,
}

/// The identities of all parameters of a model, by path.
pub struct Identities {
    by_path: HashMap<String, Identity>,
    rank: usize,
}

impl Identities {
    /// The identities of the parameters of a model, on a rank.
    pub fn of_model<M: Module>(model: &M, rank: usize) -> Self {
        let mut collect = Collect(HashMap::new());
        parameters::visit(model, &mut collect);
        Self { by_path: collect.0, rank }
    }

    /// The identity of a divided parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if the model does not have it.
    pub fn of(&self, parameter: &PassParameter) -> Result<Identity> {
        self.by_path.get(&parameter.path).copied().ok_or_else(|| {
            let reason = "it has a gradient, and is not in the model";
            let remedy = "take the gradients of the model that `Layout::shard` returned";
            Error::parameter(&parameter.path, self.rank, reason, remedy)
        })
    }

    /// The error of a parameter whose earlier micro-batches are of other values.
    pub fn changed(&self, parameter: &PassParameter) -> Error {
        let reason = "its values are not those that `Layout::accumulate` was called with";
        let remedy = "use one model for all micro-batches of a step, or call `Layout::discard` \
                      before another one";
        Error::parameter(&parameter.path, self.rank, reason, remedy)
    }

    /// The path of the parameter with a leaf.
    pub fn path_of(&self, leaf: u64) -> Option<&str> {
        let mut all = self.by_path.iter();
        all.find(|(_, identity)| identity.leaf == Some(leaf)).map(|(path, _)| &**path)
    }

    /// The error of a parameter that the model has under another path than when it was divided.
    pub fn moved(&self, parameter: &PassParameter, path: &str) -> Error {
        let reason = format!("the model has it as `{path}`, and its gradient has no place there");
        let remedy = "arrange the layers before `Layout::shard`, and leave them in their places";
        Error::parameter(&parameter.path, self.rank, &reason, remedy)
    }

    /// The identities under which gradients are registered, by path.
    pub fn into_ids(self) -> HashMap<String, ParamId> {
        self.by_path.into_iter().map(|(path, identity)| (path, identity.id)).collect()
    }
}

struct Collect(HashMap<String, Identity>);

impl Visit for Collect {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        // Read each time and never kept, since a load or a map may change both.
        let identity = Identity { id: param.id, leaf: link::identity(&param.val()) };
        self.0.insert(parameters::path_with_parts(fields), identity);
    }
}

/// The values that a part has in common with its clones, with autodiff and without, until a map of
/// the module may change them.
///
/// All ranks map a model and its clones alike. So the same values have the same version on all
/// ranks, where identities are other numbers on each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Version(u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The version of a part in a module.
#[derive(Debug, Clone)]
pub struct Versioned {
    pub version: Version,
    /// The number of maps of the module and its clones with this version.
    maps: Arc<AtomicU64>,
}

impl Versioned {
    /// The values with which a model was divided.
    pub fn first() -> Self {
        Self::of(Version(0))
    }

    fn of(version: Version) -> Self {
        Self { version, maps: Arc::default() }
    }

    /// The values after a map. Each map of the same values has another result.
    fn mapped(&self) -> Self {
        let mut hasher = DefaultHasher::new();
        // Only the numbers have to differ; no other memory depends on their order.
        (self.version, self.maps.fetch_add(1, Ordering::Relaxed)).hash(&mut hasher);
        Self::of(Version(hasher.finish()))
    }
}

impl Module for Versioned {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        self.mapped()
    }

    fn to_device(self, _device: &Device) -> Self {
        self.mapped()
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self.mapped()
    }

    fn materialize(self) -> Self {
        self
    }

    // The values are the same, so the number is: an evaluation uses what was gathered for it.
    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Versioned {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content)
    }
}

impl ModuleDisplay for Versioned {}

/// The identity of a part's values. Equal ones have one leaf, or no leaf and one version.
#[derive(Debug, Clone, Copy)]
pub struct Values {
    /// The leaf of a graph. `None` without autodiff.
    pub leaf: Option<u64>,
    /// `None` for a part that a step has made and no pass has used.
    pub version: Option<Version>,
}

impl PartialEq for Values {
    fn eq(&self, other: &Self) -> bool {
        match (self.leaf, other.leaf) {
            (None, None) => self.version == other.version,
            (leaf, other) => leaf == other,
        }
    }
}
