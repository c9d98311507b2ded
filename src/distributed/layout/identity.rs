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
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param, ParamId,
};
use burn::tensor::{Device, Tensor};

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

/// A number that a part has in common with its clones, with autodiff and without, as long as its
/// values can't have changed: with every map of the module, it becomes another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version(u64);

impl Version {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Only the numbers have to differ; no other memory depends on their order.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Module for Version {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        Self::new()
    }

    fn to_device(self, _device: &Device) -> Self {
        Self::new()
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        Self::new()
    }

    fn materialize(self) -> Self {
        self
    }

    // The values are the same, so the number is: an evaluation uses what was gathered for it.
    fn valid(&self) -> Self {
        *self
    }

    fn train(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Version {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content)
    }
}

impl ModuleDisplay for Version {}

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
