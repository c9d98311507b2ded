//! Saving and loading the parameters of a model, one at a time.

use std::any::Any;
use std::collections::{BTreeSet, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData};

use super::read::Archive;
use super::write::Planned;
use super::{MODEL, prefixed};
use crate::error::{Error, Result};
use crate::host::is_on_host;
use crate::load_difference::{Difference, DifferenceKind};
use crate::parameters::{self, in_place_of, with_mapper};
#[cfg(feature = "train")]
use crate::parameters::{Field, Visit};

/// A parameter of a model.
pub struct Entry {
    pub planned: Planned,
    /// `true` if it is divided among ranks.
    pub is_divided: bool,
    /// `true` if its elements are in the memory of the host, where any thread can read them.
    pub is_on_host: bool,
    /// Reads the elements from the device, or from the flat values of a divided parameter.
    pub data: Box<dyn Fn(Option<Tensor<1>>) -> TensorData + Send>,
}

impl Entry {
    /// The path of the parameter.
    pub fn path(&self) -> &str {
        let path = self.planned.name.strip_prefix(MODEL).and_then(|path| path.strip_prefix('.'));
        path.expect("the name begins so")
    }

    /// The path and the identity of the parameter, if it has one.
    pub fn identity(&self) -> Option<(String, u64)> {
        Some((self.path().to_owned(), self.planned.id?))
    }
}

/// The division of a model's parameters among ranks.
pub trait Divided {
    /// The shape of a parameter of which this rank has a slice.
    fn whole_shape(&self, path: &str) -> Option<Vec<usize>>;

    /// This rank's part of a divided parameter, from the whole, both flat.
    fn part(&self, path: &str, whole: Tensor<1>) -> Tensor<1>;

    /// The [`ParamMapper`](burn::module::ParamMapper) of an owned parameter, whose base refuses to
    /// be stored.
    fn mapper(&self, path: &str) -> Option<&(dyn Any + Send + Sync)>;
}

/// A model that is not divided.
pub struct Undivided;

impl Divided for Undivided {
    fn whole_shape(&self, _path: &str) -> Option<Vec<usize>> {
        None
    }

    fn part(&self, _path: &str, whole: Tensor<1>) -> Tensor<1> {
        whole
    }

    fn mapper(&self, _path: &str) -> Option<&(dyn Any + Send + Sync)> {
        None
    }
}

/// All parameters of a model in its order, in the form in which Burn's records store them.
pub fn entries<M: Module>(model: &M, divided: &dyn Divided) -> Vec<Entry> {
    parameters::settle_statistics(model);
    let mut collector = Collector { path: vec![], in_part: false, divided, entries: vec![] };
    model.visit(&mut collector);
    collector.entries
}

/// Replaces the parameters of a model by an archive's, which are read one by one. Those that
/// are divided are replaced by this rank's part of them. Parameters with one of the `differences`
/// stay as they are. Returns these differences, and parameters of other kinds.
///
/// # Errors
///
/// [`Error::Checkpoint`] if a parameter is damaged.
pub fn load<M: Module>(
    archive: &Archive,
    model: M,
    divided: &dyn Divided,
    differences: Vec<Difference>,
) -> Result<(M, Vec<Difference>)> {
    let path_of = |name: &String| name.strip_prefix(&prefixed(MODEL, "")).map(str::to_owned);
    let unused = archive.tensors().keys().filter_map(path_of).collect();
    let found = parameters::of(&model).into_iter().filter(|found| found.placement.is_owned());
    let owned = found.map(|found| found.path).collect();
    parameters::settle_statistics(&model);
    let mut loader = Loader {
        path: vec![],
        archive,
        in_part: false,
        unused,
        owned,
        divided,
        whole: None,
        differences,
        failure: None,
    };
    let model = model.map(&mut loader);
    if let Some(error) = loader.failure {
        return Err(error);
    }
    let Loader { mut differences, unused, .. } = loader;
    for path in unused {
        // Damage is reported even in what is not used.
        archive.verify(&prefixed(MODEL, &path))?;
        if !differences.iter().any(|known| known.parameter == path) {
            let problem = "expected no parameter, got a tensor";
            differences.push(Difference::new(path, DifferenceKind::Weights, problem));
        }
    }
    Ok((model, differences))
}

/// A visitor that collects the entries of a model.
struct Collector<'a> {
    /// Fields on the way to the current parameter.
    path: Vec<String>,
    /// `true` on the way to this rank's part of a parameter.
    in_part: bool,
    divided: &'a dyn Divided,
    entries: Vec<Entry>,
}

impl Collector<'_> {
    fn add(
        &mut self,
        id: ParamId,
        (dtype, shape, device): (DType, Shape, Device),
        data: impl Fn(Option<Tensor<1>>) -> TensorData + Send + 'static,
    ) {
        let name = prefixed(MODEL, &self.path.join("."));
        let mut planned = Planned::new(name, dtype, shape.to_vec(), Some(id.val()));
        if matches!(dtype, DType::QFloat(_)) {
            // Quantized elements are packed, and their scales follow them.
            planned.bytes = data(None).bytes().len();
        }
        let is_on_host = is_on_host(&device);
        self.entries.push(Entry { planned, is_divided: false, is_on_host, data: Box::new(data) });
    }
}

macro_rules! visit {
    ($method:ident, $kind:ty) => {
        fn $method<const D: usize>(&mut self, param: &Param<$kind>) {
            // The saved form of a parameter may be a copy. It is made once for its type and shape,
            // and again for its elements, so that the copies of all parameters are never in memory
            // at the same time.
            let (id, param) = (param.id, param.clone());
            let saved = move || param.transform_for_save().val();
            let value = saved();
            let kind = (value.dtype(), value.shape(), value.device());
            // Before the next parameter: see above.
            drop(value);
            self.add(id, kind, move |_| saved().into_data());
        }
    };
}

impl ModuleVisitor for Collector<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.in_part |= parameters::is_owned(name, container_type);
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.in_part &= !parameters::is_owned(name, container_type);
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.in_part {
            let base = self.entries.last_mut().expect("a base comes before its part");
            base.planned.id = Some(param.id.val());
            base.is_divided = true;
            return;
        }
        // The saved form of a parameter may be a copy. It is made once for its type and shape, and
        // again for its elements, so that the copies of all parameters are never in memory at the
        // same time.
        let path = self.path.join(".");
        let id = param.id;
        // Without autodiff: another thread must not take part in the graph of a training step.
        let param = with_mapper(param.clone(), self.divided.mapper(&path));
        let param = param.map(Tensor::without_autodiff);
        let whole_shape = self.divided.whole_shape(&path).map(Shape::from);
        let is_slice = whole_shape.is_some();
        let (dtype, stored) = match &whole_shape {
            Some(whole) => stored_whole(&param, whole),
            None => {
                let value = param.transform_for_save().val();
                (value.dtype(), value.shape())
            }
        };
        let kind = (dtype, stored, param.val().device());
        let shape = whole_shape.unwrap_or_else(|| param.val().shape());
        let saved = move |whole: Option<Tensor<D>>| {
            let param = match whole {
                Some(whole) => param.clone().map(|_| whole),
                None => param.clone(),
            };
            param.transform_for_save().val()
        };
        self.add(id, kind, move |whole| {
            saved(whole.map(|whole| whole.reshape(shape.clone()))).into_data()
        });
        self.entries.last_mut().expect("the entry was added above").is_divided = is_slice;
    }

    visit!(visit_int, Tensor<D, Int>);
    visit!(visit_bool, Tensor<D, Bool>);
}

/// The type and shape in which a whole of this shape is stored, given a slice of it.
fn stored_whole<const D: usize>(slice: &Param<Tensor<D>>, whole: &Shape) -> (DType, Shape) {
    let value = slice.val();
    // One element in memory.
    let one = Tensor::<D>::zeros([1; D], (&value.device().inner(), value.dtype()));
    let whole = slice.clone().map(|_| one.expand::<D, _>(whole.clone()));
    let stored = whole.transform_for_save().val();
    (stored.dtype(), stored.shape())
}

/// The shape in which a parameter is stored: a layer may have another, as
/// [`LinearLayout::Col`](burn::nn::LinearLayout::Col) does.
macro_rules! stored_shape {
    ($param:expr) => {
        match $param.is_initialized() {
            true => $param.transform_for_save().val().shape(),
            false => $param.lazy_shape(),
        }
    };
}

/// The path of a float parameter that is stored in another shape than its layer has, if there is
/// one.
#[cfg(feature = "train")]
pub fn stored_otherwise<M: Module>(model: &M) -> Option<String> {
    struct Otherwise(Option<String>);
    impl Visit for Otherwise {
        fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
            if param.val().shape() != param.transform_for_save().val().shape() {
                self.0.get_or_insert_with(|| parameters::path(fields));
            }
        }
    }
    let mut found = Otherwise(None);
    parameters::visit(model, &mut found);
    found.0
}

/// A mapper that replaces the parameters of a model by an archive's.
struct Loader<'a> {
    /// Fields on the way to the current parameter.
    path: Vec<String>,
    archive: &'a Archive,
    /// `true` on the way to this rank's part of a parameter.
    in_part: bool,
    /// Paths of the archive's tensors that no parameter has taken so far.
    unused: BTreeSet<String>,
    /// Paths of the parameters that are divided among ranks.
    owned: HashSet<String>,
    divided: &'a dyn Divided,
    /// The flat values of the parameter whose part comes next, and its path.
    whole: Option<(String, Tensor<1>)>,
    /// The parameters that stay as they are.
    differences: Vec<Difference>,
    /// The first error. Later parameters are then left as they are, since a mapper can't fail.
    failure: Option<Error>,
}

impl Loader<'_> {
    /// The saved tensor at the current path, and the identity of its parameter. `None` if the
    /// parameter differs.
    fn read<const D: usize, K: Basic>(
        &mut self,
        shape: &Shape,
        device: &Device,
    ) -> Result<Option<(Tensor<D, K>, Option<ParamId>)>> {
        let path = self.path.join(".");
        // Reported already, by the table of the file.
        if self.differences.iter().any(|known| known.parameter == path) {
            return Ok(None);
        }
        let name = prefixed(MODEL, &path);
        let stored = self.archive.tensors().get(&name);
        let Some(stored) = stored.filter(|stored| stored.shape == shape.to_vec()) else {
            let got = stored.map_or("nothing".to_owned(), |stored| format!("{:?}", stored.shape));
            let problem = format!("expected {:?}, got {got}", shape.to_vec());
            self.differences.push(Difference::new(path, DifferenceKind::Weights, problem));
            return Ok(None);
        };
        self.unused.remove(&path);
        let (data, id) = (self.archive.data(&name)?, stored.id.map(ParamId::from));
        let dtype = data.dtype();
        Ok(Some((Tensor::from_data(data, (device, dtype)), id)))
    }

    /// The saved tensor of the current parameter, and its identity. `None` if the parameter stays
    /// as it is: if it differs, or after a failure.
    fn next<const D: usize, K: Basic>(
        &mut self,
        (shape, device, id): (Shape, Device, ParamId),
    ) -> Option<(Tensor<D, K>, ParamId)> {
        if self.failure.is_some() {
            return None;
        }
        match self.read(&shape, &device) {
            Ok(read) => read.map(|(tensor, saved)| (tensor, saved.unwrap_or(id))),
            Err(error) => {
                self.failure = Some(error);
                None
            }
        }
    }
}

/// A trained parameter with its elements in order. A mapper that transposes returns a view, but a
/// step of an optimizer does not, and a product with a view rounds in another way.
fn in_order<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    param.map(|loaded| match loaded.is_require_grad() && !loaded.shape().contains(&0) {
        true => {
            let values = loaded.clone().without_autodiff().reshape([-1]);
            in_place_of(&loaded, values.reshape(loaded.shape()))
        }
        false => loaded,
    })
}

macro_rules! map {
    ($method:ident, $kind:ty) => {
        fn $method<const D: usize>(&mut self, param: Param<$kind>) -> Param<$kind> {
            match self.next((stored_shape!(param), param.lazy_device(), param.id)) {
                Some((tensor, id)) => param.transform_for_load(tensor, id),
                None => param,
            }
        }
    };
}

impl ModuleMapper for Loader<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.in_part |= parameters::is_owned(name, container_type);
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.in_part &= !parameters::is_owned(name, container_type);
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.in_part {
            // None if the whole stays as it is.
            let Some((path, whole)) = self.whole.take() else { return param };
            let part = self.divided.part(&path, whole);
            return param.map(|old| {
                let part = part.reshape(old.shape());
                in_place_of(&old, part)
            });
        }
        let path = self.path.join(".");
        let whole_shape = self.divided.whole_shape(&path).map(Shape::from);
        // Not longer than needed: a clone keeps the old value in memory.
        let form = || with_mapper(param.clone(), self.divided.mapper(&path));
        let shape = match &whole_shape {
            Some(whole) => stored_whole(&form(), whole).1,
            None => stored_shape!(form()),
        };
        match self.next((shape, param.lazy_device(), param.id)) {
            Some((tensor, id)) if self.owned.contains(&path) => {
                let loaded = form().transform_for_load(tensor, id);
                self.whole = Some((path, loaded.val().without_autodiff().reshape([-1])));
                param
            }
            Some((tensor, id)) if whole_shape.is_some() => {
                let shape = param.val().shape();
                let loaded = param.transform_for_load(tensor, id);
                let whole = loaded.val().without_autodiff().reshape([-1]);
                let part = self.divided.part(&path, whole);
                loaded.map(|old| in_place_of(&old, part.reshape(shape)))
            }
            Some((tensor, id)) => in_order(param.transform_for_load(tensor, id)),
            None => param,
        }
    }

    map!(map_int, Tensor<D, Int>);
    map!(map_bool, Tensor<D, Bool>);
}
