//! The float parameters of a module: the one walk through a module for training, with the names and
//! types on the way. Checkpoints have another, since they also save integers and booleans, in the
//! form that Burn has for files.

use std::any::Any;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParamMapper};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::update::ONLY_RANK;

/// The type by which Burn announces a LoRA adapter of a weight, or another reparameterization.
const REPARAMETERIZATION: &str = "Reparameterization";

/// The name of the reparameterization of owned parameters, which a layout has divided among ranks.
/// Their field, the base, has the shape of the whole and no values of its own, and the
/// reparameterization has this rank's part.
pub(crate) const OWNED: &str = "owned";

/// The reparameterization of parameters whose gradients are reduced in the backward pass.
pub(crate) const REDUCED: &str = "reduced";

/// The place of a parameter between steps, and the time at which its gradient is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Placement {
    /// Every rank has it. A step reduces its gradient.
    #[default]
    Replicated,
    /// Every rank has it. The backward pass reduces its gradient, of which each rank gets the part
    /// that it updates.
    Reduced,
    /// Every rank has the part that it updates. The backward pass reduces its gradient.
    Owned,
}

impl Placement {
    /// Returns `true` if the ranks divide the parameter between steps.
    pub fn is_owned(self) -> bool {
        self == Self::Owned
    }

    /// Returns `true` if the backward pass reduces the gradient.
    pub fn reduces_in_backward(self) -> bool {
        self != Self::Replicated
    }
}

/// A float parameter of a module.
pub(crate) struct Found {
    pub path: String,
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub device: Device,
    /// `true` if it is trained: neither frozen nor without elements.
    pub trainable: bool,
    /// `true` if it is a factor of a LoRA adapter. Its fields are as for the weight that it
    /// adapts.
    pub is_adapter: bool,
    /// An owned parameter has the identity, type and training of its part, and the shape of the
    /// whole.
    pub placement: Placement,
    /// The fields on the way to it.
    pub fields: Vec<Field>,
}

/// A field on the way to a parameter.
#[derive(Clone)]
pub(crate) struct Field {
    pub name: String,
    /// The type that has the field, as in `Linear`.
    pub holder: String,
}

impl Field {
    /// Returns `true` for an index, as in a stack of layers.
    pub fn is_index(&self) -> bool {
        self.name.chars().all(|c| c.is_ascii_digit())
    }
}

impl Found {
    fn new(
        fields: &[Field],
        id: ParamId,
        shape: &[usize],
        dtype: DType,
        trainable: bool,
        device: Device,
    ) -> Self {
        let adapter = fields.iter().position(|field| field.holder == REPARAMETERIZATION);
        Self {
            path: path(fields),
            id,
            shape: shape.to_vec(),
            dtype,
            device,
            // No optimizer can step a parameter without elements.
            trainable: trainable && !shape.contains(&0),
            is_adapter: adapter.is_some(),
            placement: Placement::Replicated,
            fields: fields[..adapter.unwrap_or(fields.len())].to_vec(),
        }
    }

    /// The type that holds it, as in `Linear`.
    pub fn holder(&self) -> &str {
        self.fields.last().map_or("", |field| &field.holder)
    }

    /// The name of its field, as in `weight`.
    pub fn name(&self) -> &str {
        self.fields.last().map_or("", |field| &field.name)
    }

    /// The path of the module that has its field at a depth. The root's path is empty; the path
    /// after the last field belongs to the parameter, or to the weight that it adapts.
    pub fn module(&self, depth: usize) -> &str {
        let length: usize = self.fields[..depth].iter().map(|field| field.name.len() + 1).sum();
        // Without the dot after the last name, which the root's path does not have.
        &self.path[..length.saturating_sub(1)]
    }

    /// The path of the weight: the parameter's, or the adapted weight's.
    pub fn weight(&self) -> &str {
        self.module(self.fields.len())
    }

    /// Returns `true` if one of the first `depth` fields is an index, as in a stack of layers.
    pub fn in_stack(&self, depth: usize) -> bool {
        self.fields[..depth].iter().any(Field::is_index)
    }

    /// The depth of the only field that is an index; `None` if there is none, or several.
    pub fn only_index(&self) -> Option<usize> {
        let mut indices = (0..self.fields.len()).filter(|depth| self.fields[*depth].is_index());
        indices.next().filter(|_| indices.next().is_none())
    }

    /// Returns `true` if it is in the module of this path and depth.
    pub fn is_in(&self, module: &str, depth: usize) -> bool {
        depth <= self.fields.len() && self.module(depth) == module
    }
}

/// The path of a parameter with these fields.
pub(crate) fn path(fields: &[Field]) -> String {
    let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
    names.join(".")
}

/// A reader of every float parameter. A closure can't be generic over the dimensions.
pub(crate) trait Visit {
    /// Reads a parameter, given the fields on the way to it.
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>);

    /// Learns that the gradient of the last parameter is reduced in the backward pass.
    fn visit_reduced(&mut self) {}

    /// Reads a parameter of integers or truth values, given the fields on the way to it.
    fn visit_other(&mut self, _fields: &[Field], _data: &dyn Fn() -> TensorData) {}
}

/// Reads the float parameters of a model, in its order.
pub(crate) fn visit<M: Module>(model: &M, visit: &mut impl Visit) {
    model.visit(&mut Visiting { fields: vec![], visit });
}

/// The float parameters of a model, in its order.
pub(crate) fn of<M: Module>(model: &M) -> Vec<Found> {
    let mut found = vec![];
    visit(model, &mut found);
    found
}

impl Visit for Vec<Found> {
    fn visit_reduced(&mut self) {
        let last = self.last_mut().expect("a parameter comes before its reparameterization");
        last.placement = Placement::Reduced;
    }

    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let value = param.val();
        if path_of_whole(fields).is_some() {
            let whole = self.last_mut().expect("a base comes before its part");
            (whole.id, whole.dtype, whole.trainable) =
                (param.id, value.dtype(), value.is_require_grad());
            // Burn visits the base, which has the whole's shape, and then its reparameterization,
            // the part. Both are one parameter.
            whole.placement = Placement::Owned;
            return;
        }
        let trainable = value.is_require_grad();
        self.push(Found::new(
            fields,
            param.id,
            &value.dims(),
            value.dtype(),
            trainable,
            value.device(),
        ));
    }
}

/// Returns `true` for the module that has this rank's part of a parameter.
pub(crate) fn is_owned(name: &str, container_type: &str) -> bool {
    container_type == REPARAMETERIZATION && name == OWNED
}

/// The path of the parameter of which the parameter with these fields is this rank's part.
pub(crate) fn path_of_whole(fields: &[Field]) -> Option<String> {
    let part = fields.iter().position(|field| is_owned(&field.name, &field.holder))?;
    Some(path(&fields[..part]))
}

/// The path of the parameter with these fields, or of the one that it is this rank's part of. A
/// visitor comes to the base of a parameter before its part, so that in a map by these paths the
/// part replaces the base.
pub(crate) fn path_with_parts(fields: &[Field]) -> String {
    path_of_whole(fields).unwrap_or_else(|| path(fields))
}

/// The float parameters of a model, in its order, none of which is initialised. Those that are not
/// initialised yet have the default type of their device.
pub(crate) fn lazily<M: Module>(model: &M) -> Vec<Found> {
    let mut found = Lazily(vec![]);
    visit(model, &mut found);
    found.0
}

struct Lazily(Vec<Found>);

impl Visit for Lazily {
    fn visit_reduced(&mut self) {
        self.0.visit_reduced();
    }

    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        if param.is_initialized() || path_of_whole(fields).is_some() {
            return self.0.visit(fields, param);
        }
        self.0.visit(fields, &undrawn_parameter(param));
    }
}

/// A parameter that is not initialised yet, with zeros in place of its initial values: one element
/// in memory, of the default type of its device.
fn undrawn_parameter<const D: usize>(param: &Param<Tensor<D>>) -> Param<Tensor<D>> {
    // Loading does not initialise a parameter. It tells whether it is trained, and its shape:
    // until then, Burn has the shape that is stored in files.
    let stored = Tensor::<D>::zeros([1; D], &param.lazy_device()).expand(param.lazy_shape());
    param.clone().transform_for_load(stored, param.id)
}

/// Fails for a model that is divided among ranks, in a call that needs whole parameters.
pub(crate) fn ensure_whole<M: Module>(model: &M) -> Result<()> {
    ensure_none(model, Placement::is_owned)
}

/// Fails for a model of a layout whose passes reduce gradients, in a call for one device.
pub(crate) fn ensure_on_one_device<M: Module>(model: &M) -> Result<()> {
    ensure_none(model, Placement::reduces_in_backward)
}

fn ensure_none<M: Module>(model: &M, is: fn(Placement) -> bool) -> Result<()> {
    let Some(found) = lazily(model).into_iter().find(|found| is(found.placement)) else {
        return Ok(());
    };
    let reason = match found.placement.is_owned() {
        true => "it is divided among ranks",
        false => "a layout's passes reduce its gradient",
    };
    Err(Error::parameter(
        &found.path,
        ONLY_RANK,
        format!("{reason}, and the call is for whole parameters on one device"),
        "use `DistModuleOptimizer`, or the model of `Layout::unshard`",
    ))
}

/// A fork of a model for a rank, with buffers of its own.
///
/// Burn's clones and forks share the running statistics of layers such as BatchNorm, with the lock
/// that a map holds: ranks would add up their statistics, and take each other's placeholders for
/// values.
pub(crate) fn fork<M: Module>(model: &M, device: &Device) -> M {
    let mut buffers = Buffers::default();
    visit(model, &mut buffers);
    // Burn's evaluation on a plain device updates no statistics.
    let updates_buffers = buffers.are_there && device.is_autodiff();
    // Both of them make new buffers, and keep what is trained and what is frozen.
    let own = if updates_buffers { model.valid().train() } else { model.clone() };
    own.fork(device)
}

/// The parameters that may be running statistics: values that no gradient is asked for.
#[derive(Default)]
struct Buffers {
    are_there: bool,
    /// `true` if the model has a parameter that is not initialised.
    has_uninitialised: bool,
}

impl Visit for Buffers {
    fn visit<const D: usize>(&mut self, _fields: &[Field], param: &Param<Tensor<D>>) {
        match param.is_initialized() {
            true => self.are_there |= !param.val().is_require_grad(),
            false => self.has_uninitialised = true,
        }
    }
}

/// Gives running statistics, such as BatchNorm's, the values of the last forward pass.
///
/// Burn keeps these beside the values until the next pass or evaluation: a visitor would read older
/// ones, and a mapper's would be replaced by them.
pub(crate) fn settle_statistics<M: Module>(model: &M) {
    let mut buffers = Buffers::default();
    visit(model, &mut buffers);
    // A model that is not initialised has no forward pass behind it.
    if buffers.are_there && !buffers.has_uninitialised {
        drop(model.valid());
    }
}

/// The model of a rank that gets the values of the first one: parameters that are not initialised
/// yet are zeros, and no random numbers are drawn for them.
pub(crate) fn undrawn<M: Module>(model: M, is_first: bool) -> M {
    // The first rank's is mapped as well, and stays as it is: ranks compare how often they have
    // mapped a model.
    map(model, &mut Undrawn { is_first })
}

struct Undrawn {
    is_first: bool,
}

impl Map for Undrawn {
    fn map<const D: usize>(&mut self, _path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let stays = self.is_first || param.is_initialized();
        if stays { param } else { undrawn_parameter(&param) }
    }
}

/// Initialises a parameter. Fails for initial values of another type than other ranks expect, which
/// have [`undrawn`] ones.
pub(crate) fn initialise<const D: usize>(
    path: &str,
    rank: usize,
    param: &Param<Tensor<D>>,
) -> Result<()> {
    if param.is_initialized() {
        return Ok(());
    }
    let expected = Tensor::<1>::empty([1], &param.lazy_device()).dtype();
    ensure_initial_type(path, rank, [expected, param.val().dtype()])
}

/// The parameter with another [`ParamMapper`], if there is one.
pub(crate) fn with_mapper<const D: usize>(
    param: Param<Tensor<D>>,
    mapper: Option<&(dyn Any + Send + Sync)>,
) -> Param<Tensor<D>> {
    let Some(mapper) = mapper.and_then(|mapper| mapper.downcast_ref::<ParamMapper<Tensor<D>>>())
    else {
        return param;
    };
    let (id, value, _) = param.consume();
    Param::from_mapped_value(id, value, mapper.clone())
}

/// Fails for initial values of another type than [`undrawn`] parameters have.
pub(crate) fn ensure_initial_type(
    path: &str,
    rank: usize,
    [expected, got]: [DType; 2],
) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    let [expected, got] = [expected, got].map(|dtype| dtype.name());
    Err(Error::parameter(
        path,
        rank,
        format!("its initial values are of another type: expected {expected}, got {got}"),
        "initialise the parameter before the ranks share the model",
    ))
}

/// A walk that reads parameters.
struct Visiting<'a, V> {
    fields: Vec<Field>,
    visit: &'a mut V,
}

impl<V: Visit> ModuleVisitor for Visiting<'_, V> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == REPARAMETERIZATION && name == REDUCED {
            self.visit.visit_reduced();
        }
        // Burn marks the kinds of containers; rules and reasons name the type alone.
        let holder = container_type.strip_prefix("Struct:").unwrap_or(container_type);
        self.fields.push(Field { name: name.to_owned(), holder: holder.to_owned() });
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visit.visit(&self.fields, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.visit.visit_other(&self.fields, &|| param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.visit.visit_other(&self.fields, &|| param.val().into_data());
    }
}

/// A function of every float parameter and its path.
pub(crate) trait Map {
    /// The parameter in place of the one at a path, or the base in place of an owned parameter's.
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>>;

    /// The part in place of this rank's part of the parameter at a path.
    fn map_part<const D: usize>(
        &mut self,
        _path: &str,
        part: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        part
    }
}

/// The model with every float parameter replaced.
pub(crate) fn map<M: Module>(model: M, map: &mut impl Map) -> M {
    model.map(&mut Mapping { names: vec![], whole: None, map })
}

/// A walk that replaces parameters.
struct Mapping<'a, F> {
    names: Vec<String>,
    /// The number of names of the parameter whose part is next.
    whole: Option<usize>,
    map: &'a mut F,
}

impl<F: Map> ModuleMapper for Mapping<'_, F> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if is_owned(name, container_type) {
            self.whole = Some(self.names.len());
        }
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.names.pop();
        if container_type == REPARAMETERIZATION {
            self.whole = None;
        }
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.whole {
            Some(names) => self.map.map_part(&self.names[..names].join("."), param),
            None => self.map.map(&self.names.join("."), param),
        }
    }
}

/// Tensors to stand where values were taken out of a model. There is one for all values of a
/// device, a type and a number of dimensions, since each would be an allocation and, with fusion,
/// three tasks of its service thread.
#[derive(Default)]
pub(crate) struct Placeholders(Vec<(Device, DType, Box<dyn Any>)>);

impl Placeholders {
    /// The one in place of a value. Not initialised, since it is never read.
    pub fn of<const D: usize>(&mut self, value: &Tensor<D>) -> Tensor<D> {
        let (device, dtype) = (value.device().inner(), value.dtype());
        let made = self.0.iter().filter(|made| made.0 == device && made.1 == dtype);
        let placeholder = made.filter_map(|made| made.2.downcast_ref::<Tensor<D>>()).next();
        let placeholder = placeholder.cloned().unwrap_or_else(|| {
            // One element for all parameters of a device and type, while a step has their values.
            let placeholder = Tensor::<D>::empty([1; D], (&device, dtype));
            self.0.push((device, dtype, Box::new(placeholder.clone())));
            placeholder
        });
        in_place_of(value, placeholder)
    }
}

/// A value without gradients, made to require them and keep checkpoints as the old one does.
pub(crate) fn in_place_of<const D: usize, const E: usize>(
    old: &Tensor<D>,
    value: Tensor<E>,
) -> Tensor<E> {
    in_place_if_trained(old, value, old.is_require_grad())
}

/// The same for a value that requires gradients or not, whatever the old one does.
pub(crate) fn in_place_if_trained<const D: usize, const E: usize>(
    old: &Tensor<D>,
    value: Tensor<E>,
    is_trained: bool,
) -> Tensor<E> {
    let mut value = Tensor::from_inner(value);
    if let Some(strategy) = old.gradient_checkpointing_strategy() {
        value = value.with_gradient_checkpointing_strategy(strategy);
    }
    if is_trained { value.require_grad() } else { value }
}
