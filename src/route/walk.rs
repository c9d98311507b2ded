//! The float parameters of a module, with the names and types that they are found by.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};

/// The type by which Burn announces a LoRA adapter of a weight.
const ADAPTER: &str = "Reparameterization";

/// A float parameter as a walk through the module finds it.
pub(crate) struct Found {
    pub path: String,
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub device: Device,
    /// `true` if it is trained: neither frozen nor without elements.
    pub trainable: bool,
    /// `true` if it is a factor of a LoRA adapter. Its fields are those of the weight that it adapts.
    pub(super) is_adapter: bool,
    /// The way to it.
    pub(super) fields: Vec<Field>,
}

/// A field on the way to a parameter.
#[derive(Clone)]
pub(super) struct Field {
    pub name: String,
    /// The type that has the field, as in `Linear`.
    pub holder: String,
}

impl Found {
    /// The type that holds it, as in `Linear`.
    pub(super) fn holder(&self) -> &str {
        self.fields.last().map_or("", |field| &field.holder)
    }

    /// The name of its own field, as in `weight`.
    pub(super) fn name(&self) -> &str {
        self.fields.last().map_or("", |field| &field.name)
    }

    /// The path of the module that has its field at a depth: the root's is empty, and the one after the
    /// last field is that of the parameter itself, or of the weight that it adapts.
    pub(super) fn module(&self, depth: usize) -> &str {
        let length: usize = self.fields[..depth].iter().map(|field| field.name.len() + 1).sum();
        &self.path[..length.saturating_sub(1)]
    }

    /// The path of the weight: its own, or that of the one that it adapts.
    pub(super) fn weight(&self) -> &str {
        self.module(self.fields.len())
    }

    /// Tells whether the first so many fields have an index among them, so that there may be others like it.
    pub(super) fn in_stack(&self, depth: usize) -> bool {
        let is_index = |field: &Field| field.name.chars().all(|c| c.is_ascii_digit());
        self.fields[..depth].iter().any(is_index)
    }

    /// Tells whether it is in the module of this path and depth.
    pub(super) fn is_in(&self, module: &str, depth: usize) -> bool {
        depth <= self.fields.len() && self.module(depth) == module
    }
}

/// Collects the float parameters of a module.
#[derive(Default)]
pub(crate) struct Walk {
    fields: Vec<Field>,
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
        let names: Vec<&str> = self.fields.iter().map(|field| field.name.as_str()).collect();
        let adapter = self.fields.iter().position(|field| field.holder == ADAPTER);
        self.found.push(Found {
            path: names.join("."),
            id: param.id,
            shape: value.dims().to_vec(),
            dtype: value.dtype(),
            device: value.device(),
            trainable: value.is_require_grad() && !value.dims().contains(&0),
            is_adapter: adapter.is_some(),
            fields: self.fields[..adapter.unwrap_or(self.fields.len())].to_vec(),
        });
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        let holder = container_type.strip_prefix("Struct:").unwrap_or(container_type);
        self.fields.push(Field { name: name.to_owned(), holder: holder.to_owned() });
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.fields.pop();
    }
}
