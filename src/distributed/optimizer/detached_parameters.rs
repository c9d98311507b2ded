//! The parameters and gradients of a step, detached from the model and reattached to it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{
    AutodiffBackend, Dispatch, DispatchAutodiffContext, TensorMetadata, tensor::FloatTensor,
};
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor};

use super::publication::{self, Publication, at_first_use};
use crate::backend::reshaped;
use crate::checks::ensure_gradient_matches;
use crate::distributed::layout::{BlockPart, PassParameter, Passes};
use crate::distributed::plan::{Bucket, Overlap};
use crate::distributed::trainable::ModelParameter;
use crate::error::{Error, Result};
use crate::flat::{self, bytes};
use crate::parameters::{self, Placeholders, in_place_of};
use crate::update::is_half;

/// A rank's parameters and gradients during a step.
pub struct DetachedParameters {
    /// In the order of the model.
    pub ids: Vec<ParamId>,
    pub parameters: FlatTensors,
    pub gradients: FlatTensors,
    /// The values as the model had them, until the step knows which parameters it updates, and then
    /// of all others. A graph from before the step still ends in these.
    originals: Vec<Option<FloatTensor<Dispatch>>>,
}

/// This rank's new parts of owned parameters, by the index of the model's parameter.
pub type Parts = Vec<Option<Tensor<1>>>;

/// Flat tensors by the index of their trained parameter, with a count of their bytes.
pub struct FlatTensors {
    tensors: Vec<Vec<Elements>>,
    bytes: usize,
}

/// Elements of a parameter: all of it, or neighbours in this rank's part.
#[derive(Clone)]
struct Elements {
    /// The first of them, in the parameter.
    start: usize,
    values: Tensor<1>,
}

impl Elements {
    fn end(&self) -> usize {
        self.start + self.values.dims()[0]
    }
}

impl FlatTensors {
    fn none(count: usize) -> Self {
        Self { tensors: vec![vec![]; count], bytes: 0 }
    }

    /// The first elements of a parameter, if any are present.
    pub fn get(&self, index: usize) -> Option<&Tensor<1>> {
        self.tensors[index].first().map(|elements| &elements.values)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Further references to the tensors of a bucket's parameters.
    pub fn references(&self, bucket: &Bucket) -> Self {
        let mut references = Self::none(self.tensors.len());
        for index in &bucket.parameters {
            for Elements { start, values } in &self.tensors[*index] {
                references.set(*index, *start, values.clone());
            }
        }
        references
    }

    /// Takes the tensor of a parameter out, of which all elements are neighbours.
    pub fn take(&mut self, index: usize) -> Option<Tensor<1>> {
        let taken = self.tensors[index].pop()?.values;
        self.bytes -= bytes(&taken);
        Some(taken)
    }

    /// Drops all elements of a parameter.
    pub fn drop_all(&mut self, index: usize) {
        while self.take(index).is_some() {}
    }

    /// Takes elements of a parameter: moved out where they are all that is stored together, so that
    /// the only reference is updated in place. Zeros if they are absent.
    pub fn take_elements(
        &mut self,
        index: usize,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Tensor<1> {
        let all = &mut self.tensors[index];
        let is_all =
            |stored: &Elements| (stored.start, stored.end()) == (elements.start, elements.end);
        // The only reference to a tensor is updated in place by many operations; a slice would be a
        // second one.
        if let Some(position) = all.iter().position(is_all) {
            let Elements { values, .. } = all.swap_remove(position);
            self.bytes -= bytes(&values);
            return values;
        }
        let mut stored: Vec<&Elements> = all
            .iter()
            .filter(|stored| stored.start < elements.end && elements.start < stored.end())
            .collect();
        if stored.is_empty() {
            return flat::zeros(elements.len(), dtype, device);
        }
        // Elements are stored in the order in which their buckets arrived.
        stored.sort_unstable_by_key(|stored| stored.start);
        let pieces = stored.iter().map(|stored| {
            let (start, end) = (elements.start.max(stored.start), elements.end.min(stored.end()));
            flat::slice(&stored.values, start - stored.start..end - stored.start)
        });
        let pieces = flat::concat(pieces.collect(), dtype, device);
        assert_eq!(pieces.dims(), [elements.len()], "all of the elements are stored");
        pieces
    }

    /// Stores this rank's shard of an owned parameter, in its blocks.
    fn set_shard(
        &mut self,
        known: &ModelParameter,
        pass_parameter: &PassParameter,
        shard: &Tensor<1>,
    ) {
        for BlockPart { block, start, values } in pass_parameter.cut(shard) {
            self.set(known.trainable.start + block, start, values);
        }
    }

    /// Stores tensors in the shapes of the model as flat ones, in the blocks of their parameters.
    fn set_whole(&mut self, Shaped { tensors, of }: Shaped, known: &[ModelParameter]) {
        // The inverse of `shaped`, in one operation of the backend.
        let flat = tensors.iter().map(|tensor| [tensor.shape().num_elements()].into()).collect();
        let flat = reshaped(tensors, flat).into_iter().map(Tensor::from_dispatch);
        for (flat, index) in flat.zip(of) {
            let ModelParameter { trainable, held, .. } = &known[index];
            for (block, values) in trainable.clone().zip(held.cut(flat)) {
                self.set(block, 0, values);
            }
        }
    }

    /// Stores the elements of a parameter from `start` on, in place of those that were.
    pub fn set(&mut self, index: usize, start: usize, values: Tensor<1>) {
        let elements = Elements { start, values };
        // All that overlap, and not only those with the same start: a gathered whole takes the
        // place of the part.
        let replaced = self.tensors[index]
            .extract_if(.., |old| old.start < elements.end() && start < old.end());
        self.bytes -= replaced.map(|old| bytes(&old.values)).sum::<usize>();
        self.bytes += bytes(&elements.values);
        self.tensors[index].push(elements);
    }
}

impl DetachedParameters {
    /// Detaches the parameters from the model, which keeps placeholders, and takes their gradients.
    /// The values follow with [`take_values`](Self::take_values), once the step knows which of them
    /// it changes: until then, they count as absent.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if the model or a gradient does not match the plan.
    pub fn detach<M: Module>(
        model: M,
        gradients: GradientsParams,
        known: &[ModelParameter],
        passes: &Arc<Passes>,
        expected: Expected<'_>,
    ) -> Result<(M, Self)> {
        let trained = known.iter().map(|parameter| parameter.blocks.count()).sum();
        let detached = Self {
            ids: vec![ParamId::from(0); known.len()],
            parameters: FlatTensors::none(trained),
            gradients: FlatTensors::none(trained),
            originals: vec![None; known.len()],
        };
        let indices = indices(known);
        let seen = vec![false; known.len()];
        let mut detach = Detach {
            indices,
            detached,
            placeholders: Placeholders::default(),
            shaped: Shaped::default(),
            gradients,
            known,
            passes,
            seen,
            expected,
            error: None,
        };
        // A map can't return an error: the first one is kept until the walk through the model has
        // ended.
        let model = parameters::map(model, &mut detach);
        let Detach { mut detached, seen, shaped, error, gradients, .. } = detach;
        if let Some(error) = error {
            return Err(error);
        }
        // All at once: a backend with operations of its own reshapes them in one, which saves the
        // host's time for each.
        detached.gradients.set_whole(shaped, known);
        passes.ensure_taken(&gradients, expected.rank)?;
        match known.iter().zip(seen).find(|(_, seen)| !seen) {
            Some((missing, _)) if missing.placement.is_owned() => Err(Error::parameter(
                &missing.path,
                expected.rank,
                "it is not divided",
                "step the model that `Layout::shard` returned",
            )),
            Some((missing, _)) => Err(Error::parameter(
                &missing.path,
                expected.rank,
                "it is not in the model",
                "step the model that the optimizer was made for",
            )),
            None => Ok((model, detached)),
        }
    }

    /// Takes the values that are not divided, as flat tensors, and keeps the originals of the
    /// parameters that the step does not change. The others have the only references to their
    /// values, which are updated in place.
    pub fn take_values(&mut self, changed: &[bool], known: &[ModelParameter]) {
        let mut whole = Shaped::default();
        for (index, (original, known)) in self.originals.iter_mut().zip(known).enumerate() {
            let is_changed = changed[known.trainable.clone()].contains(&true);
            // Moved if possible: with fusion, a reference that outlives the operation which takes
            // the value is dropped by a task of its own.
            let value = if is_changed { original.take() } else { original.clone() };
            // Parts are stored already.
            if let Some(value) = value.filter(|_| !known.placement.is_owned()) {
                whole.push(index, inner(value));
            }
        }
        self.parameters.set_whole(whole, known);
    }

    /// Returns `true` if a parameter stays as it is.
    pub fn is_unchanged(&self, index: usize) -> bool {
        self.originals[index].is_some()
    }

    /// Takes this rank's shard of an owned parameter out.
    pub fn take_shard(
        &mut self,
        known: &ModelParameter,
        pass_parameter: &PassParameter,
        device: &Device,
    ) -> Tensor<1> {
        let first = known.trainable.start;
        let values = |block: usize, elements| {
            self.parameters.take_elements(first + block, elements, known.dtype, device)
        };
        pass_parameter.join(values, device)
    }

    /// Reattaches the parameters to the model.
    ///
    /// # Panics
    ///
    /// If a parameter is missing.
    pub fn reattach<M: Module>(
        self,
        model: M,
        known: &[ModelParameter],
        passes: &Arc<Passes>,
        parts: Parts,
        publication: &Arc<Publication>,
    ) -> M {
        let Self { mut parameters, originals, .. } = self;
        let (indices, values) = (indices(known), shaped(&mut parameters, known));
        // Blocks of this rank, of parameters with others that are on their way.
        let whole = known.iter().filter(|parameter| !parameter.placement.is_owned());
        for block in whole.flat_map(|parameter| parameter.trainable.clone()) {
            parameters.take(block).into_iter().for_each(|value| publication.keep(block, value));
        }
        let mut reattach =
            Reattach { indices, originals, values, known, passes, parts, publication };
        parameters::map(model, &mut reattach)
    }

    /// Replaces the parameters of a bucket by those in its gathered buffer.
    pub fn publish(&mut self, bucket: &Bucket, buffer: &Tensor<1>) {
        for (index, value) in publication::values(bucket, buffer) {
            self.parameters.set(index, 0, value);
        }
    }
}

/// A range of a bucket's buffer from the values of its parameters; zeros for absent parameters and
/// for padding. A parameter that is one piece of the buffer is moved instead of copied.
pub fn pack(
    values: &mut FlatTensors,
    bucket: &Bucket,
    range: Range<usize>,
    dtype: DType,
    device: &Device,
) -> Tensor<1> {
    let mut pieces = vec![];
    for Overlap { parameter, elements, padding } in bucket.overlaps(range) {
        pieces.push(values.take_elements(parameter, elements, dtype, device).cast(dtype));
        if padding > 0 {
            pieces.push(Tensor::zeros([padding], (device, dtype)));
        }
    }
    flat::concat(pieces, dtype, device)
}

/// The properties of the tensors that a rank takes a step with.
#[derive(Clone, Copy)]
pub struct Expected<'a> {
    pub rank: usize,
    pub device: &'a Device,
    /// `true` if the gradients of parameters in half precision may be float32.
    pub wide_gradients: bool,
    /// `true` if the values of parameters may have been waited for at their first use.
    pub at_first_use: bool,
}

/// The index of every path.
fn indices(known: &[ModelParameter]) -> HashMap<&str, usize> {
    known.iter().enumerate().map(|(index, parameter)| (parameter.path.as_str(), index)).collect()
}

/// Tensors in the shapes of the model, with the index of their parameter.
#[derive(Default)]
struct Shaped {
    tensors: Vec<FloatTensor<Dispatch>>,
    of: Vec<usize>,
}

impl Shaped {
    fn push(&mut self, index: usize, tensor: FloatTensor<Dispatch>) {
        self.tensors.push(tensor);
        self.of.push(index);
    }
}

/// [`Tensor::inner`] of a tensor of any number of dimensions.
fn inner(tensor: FloatTensor<Dispatch>) -> FloatTensor<Dispatch> {
    match tensor.autodiff {
        DispatchAutodiffContext::Enabled(_) => Dispatch::inner(tensor),
        DispatchAutodiffContext::Disabled => tensor,
    }
}

/// The values of the model's parameters in their shapes. `None` for owned parameters, and for those
/// that are on their way.
fn shaped(
    values: &mut FlatTensors,
    known: &[ModelParameter],
) -> Vec<Option<FloatTensor<Dispatch>>> {
    let is_present = |parameter: &ModelParameter| {
        let mut blocks = parameter.trainable.clone();
        !parameter.placement.is_owned() && blocks.all(|block| values.get(block).is_some())
    };
    let present: Vec<bool> = known.iter().map(is_present).collect();
    let whole = known.iter().zip(&present).filter(|(_, present)| **present);
    let (flat, shapes) = whole
        .map(|(parameter, _)| {
            let block = |block| values.take(block).expect("every block is present");
            let value = parameter.held.join(parameter.trainable.clone().map(block).collect());
            (Tensor::into_dispatch(value), Shape::from(parameter.shape.clone()))
        })
        .unzip();
    let mut tensors = reshaped(flat, shapes).into_iter();
    present.into_iter().map(|present| present.then(|| tensors.next()).flatten()).collect()
}

struct Detach<'a> {
    indices: HashMap<&'a str, usize>,
    detached: DetachedParameters,
    placeholders: Placeholders,
    /// The gradients of the parameters that are not divided.
    shaped: Shaped,
    gradients: GradientsParams,
    known: &'a [ModelParameter],
    passes: &'a Arc<Passes>,
    /// `true` for parameters that are in the model.
    seen: Vec<bool>,
    expected: Expected<'a>,
    error: Option<Error>,
}

impl Detach<'_> {
    fn check<const D: usize>(
        &self,
        known: &ModelParameter,
        part: Option<&PassParameter>,
        value: &Tensor<D>,
    ) -> Result<()> {
        let Expected { rank, device: on, .. } = self.expected;
        let error = |reason, remedy| Err(Error::parameter(&known.path, rank, reason, remedy));
        let described = |shape: &[usize], dtype| format!("{shape:?} {dtype:?}");
        let (shape, dtype) = (value.dims(), value.dtype());
        let part = part.map(|pass_parameter| [pass_parameter.part_count().max(1)]);
        let expected_shape = part.as_ref().map_or(&known.shape[..], |part| part);
        if shape[..] != *expected_shape || dtype != known.dtype {
            let expected = described(expected_shape, known.dtype);
            let reason =
                format!("it has changed: expected {expected}, got {}", described(&shape, dtype));
            return error(reason, "make a new optimizer for this model");
        }
        if value.device().inner() != *on {
            let (expected, device) = (on, value.device());
            let reason =
                format!("it is on the wrong device: expected {expected:?}, got {device:?}");
            return error(
                reason,
                "move the model with `to_device`, or give its device to the world",
            );
        }
        Ok(())
    }

    /// The error of a parameter that a clone has frozen, or unfrozen.
    fn other_training(&self, known: &ModelParameter) -> Error {
        let reason = "it is frozen although it was set to be trained, or the other way round: a \
                      clone of it was frozen or unfrozen before its first use after a step, and \
                      shared the value that was on its way, or a map detached it";
        let remedy = "freeze or unfreeze a clone after a pass of the model, or use `Publish::Now`";
        Error::parameter(&known.path, self.expected.rank, reason, remedy)
    }

    /// Records an error for a parameter that is trained now and that is not in the plan.
    fn reject_untrained<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        // A tensor without elements is never trained.
        let is_empty = param.val().dims().contains(&0);
        if !param.is_require_grad() || is_empty {
            // The gradient belongs to another parameter with the same identity, as frozen clones
            // have, and may have other dimensions.
            return;
        }
        if self.gradients.get::<D>(param.id).is_some() {
            self.error.get_or_insert(Error::parameter(
                path,
                self.expected.rank,
                "it has a gradient, and was frozen or absent when the optimizer was made",
                "make a new optimizer for this model, or leave its gradient out",
            ));
        }
    }
}

impl parameters::Map for Detach<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(index) = self.indices.get(path).copied() else {
            self.reject_untrained(path, &param);
            return param;
        };
        if self.known[index].placement.is_owned() {
            return param; // the base
        }
        self.detach(index, param, None)
    }

    fn map_part<const D: usize>(&mut self, path: &str, part: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.indices.get(path).copied();
        if index.is_none() && self.passes.get(path).is_some_and(|known| !known.is_trained) {
            self.reject_untrained(path, &part);
            return part;
        }
        let Some((index, pass_parameter)) = index.zip(self.passes.get(path)) else {
            self.error.get_or_insert(Error::parameter(
                path,
                self.expected.rank,
                "it is divided by another layout",
                "make the optimizer with `DistMuonConfig::init_on` for its layout",
            ));
            return part;
        };
        self.detach(index, part, Some(pass_parameter))
    }
}

impl Detach<'_> {
    /// Moves the value and the gradient of a parameter out of the model: all of it, or this rank's
    /// part with its gradient.
    fn detach<const D: usize>(
        &mut self,
        index: usize,
        param: Param<Tensor<D>>,
        part: Option<&PassParameter>,
    ) -> Param<Tensor<D>> {
        // Only values that are waited for can be shared with a clone that was frozen before they
        // arrived.
        let is_as_set = !self.expected.at_first_use || is_trained_as_set(&param);
        let (id, value, mapper) = param.consume();
        let known = &self.known[index];
        let checked = match is_as_set {
            true => self.check(known, part, &value),
            false => Err(self.other_training(known)),
        };
        let checked = checked.and_then(|()| self.gradient(known, id, &value));
        // The model keeps a value of one element: a reference to the old one would force a copy at
        // its update.
        let placeholder = self.placeholders.of(&value);
        self.detached.ids[index] = id;
        self.detached.originals[index] = Some(value.clone().into_dispatch());
        self.seen[index] = true;
        match checked {
            Err(error) => _ = self.error.get_or_insert(error),
            // After an error nothing is collected any more: the step ends without a model.
            Ok(gradient) if self.error.is_none() => {
                let DetachedParameters { parameters, gradients, .. } = &mut self.detached;
                if let Some(pass_parameter) = part {
                    let shard = pass_parameter.shard(&value.inner().reshape([-1]));
                    parameters.set_shard(known, pass_parameter, &shard);
                }
                match (gradient, self.passes.get(&known.path)) {
                    (Some(gradient), None) => self.shaped.push(index, gradient.into_dispatch()),
                    (Some(gradient), Some(pass_parameter)) => {
                        gradients.set_shard(known, pass_parameter, &gradient.reshape([-1]));
                    }
                    (None, _) => {}
                }
            }
            Ok(_) => {}
        }
        Param::from_mapped_value(id, placeholder, mapper)
    }

    /// The gradient of a parameter: all of it, or this rank's shard if the backward pass has
    /// reduced it.
    fn gradient<const D: usize>(
        &mut self,
        known: &ModelParameter,
        id: ParamId,
        value: &Tensor<D>,
    ) -> Result<Option<Tensor<D>>> {
        let rank = self.expected.rank;
        let Some(gradient) = self.gradients.remove::<D>(id) else { return Ok(None) };
        match self.passes.get(&known.path) {
            None => ensure_gradient_matches(&known.path, rank, value, &gradient)?,
            Some(pass_parameter)
                if gradient.shape().num_elements() != pass_parameter.shard_count() =>
            {
                let (expected, got) = (pass_parameter.shard_count(), gradient.dims());
                let reason = format!(
                    "its gradient has the wrong shape: expected {expected} elements, got {got:?}"
                );
                return Err(Error::parameter(&known.path, rank, reason, pass_parameter.remedy()));
            }
            Some(_) => {}
        }
        let Expected { wide_gradients, .. } = self.expected;
        // A backward pass has reduced in float32 already, whatever the step sends.
        let wide_gradients = wide_gradients || known.placement.reduces_in_backward();
        let (expected, dtype) = (known.dtype, gradient.dtype());
        let gradient = match is_half(expected) && dtype != expected {
            false => gradient.cast(expected),
            // Also of float64, which a program may have accumulated in: the update is in float32.
            true if wide_gradients => gradient.cast(DType::F32),
            true => {
                let reason = format!(
                    "its gradient is of another type than it: expected {}, got {}",
                    expected.name(),
                    dtype.name()
                );
                let remedy = "reduce in float32 with `DistMuonConfig::with_grad_dtype`";
                return Err(Error::parameter(&known.path, rank, reason, remedy));
            }
        };
        Ok(Some(gradient))
    }
}

/// Returns `true` if the value of a parameter requires gradients as the parameter was set to.
fn is_trained_as_set<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    // Only `train` reads what was set.
    !param.val().device().is_autodiff()
        || param.clone().train().is_require_grad() == param.is_require_grad()
}

struct Reattach<'a> {
    indices: HashMap<&'a str, usize>,
    /// By the index of the model's parameter: the values that stay, and the new ones.
    originals: Vec<Option<FloatTensor<Dispatch>>>,
    values: Vec<Option<FloatTensor<Dispatch>>>,
    known: &'a [ModelParameter],
    passes: &'a Arc<Passes>,
    parts: Parts,
    /// Has the parameters without a value.
    publication: &'a Arc<Publication>,
}

impl parameters::Map for Reattach<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(index) = self.indices.get(path).copied() else { return param };
        let known = &self.known[index];
        if known.placement.is_owned() {
            return param; // the base
        }
        if let Some(original) = self.originals[index].take() {
            self.publication.leave_out(known.trainable.clone());
            let (id, _, mapper) = param.consume();
            return Param::from_mapped_value(id, Tensor::from_dispatch(original), mapper);
        }
        // On its way: the model returns before it arrives.
        let Some(value) = self.values[index].take() else {
            return at_first_use(param, known.clone(), self.publication.clone());
        };
        let (id, placeholder, mapper) = param.consume();
        let value = in_place_of(&placeholder, Tensor::<D>::from_dispatch(value));
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_part<const D: usize>(&mut self, path: &str, part: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(index) = self.indices.get(path).copied() else { return part }; // frozen
        let pass_parameter = &self.passes[path];
        let (id, placeholder, mapper) = part.consume();
        let value = match (self.originals[index].take(), self.parts[index].take()) {
            (Some(original), _) => Tensor::<D>::from_dispatch(original),
            (None, Some(value)) => {
                let shape = value.shape();
                in_place_of(&placeholder, value.reshape::<D, _>(shape))
            }
            (None, None) => {
                return self.passes.part_at_first_use(pass_parameter, (id, placeholder));
            }
        };
        // The pass gathers it ahead of its first use, for which it has to know the values.
        self.passes.remember_part(pass_parameter, &value);
        Param::from_mapped_value(id, value, mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes, counted again from the tensors.
    fn recounted(values: &FlatTensors) -> usize {
        values.tensors.iter().flatten().map(|elements| bytes(&elements.values)).sum()
    }

    #[test]
    fn the_count_of_bytes_follows_the_tensors() {
        let device = Device::default();
        let tensor = |length: usize, dtype| Tensor::<1>::zeros([length], (&device, dtype));
        let mut values = FlatTensors::none(3);
        assert_eq!(values.bytes(), 0);
        values.set(0, 0, tensor(5, DType::F32));
        values.set(2, 4, tensor(7, DType::BF16));
        assert_eq!((values.bytes(), recounted(&values)), (34, 34));
        values.set(0, 0, tensor(3, DType::F32)); // replaces another
        assert_eq!((values.bytes(), recounted(&values)), (26, 26));
        assert!(values.take(1).is_none() && values.take(2).is_some() && values.take(2).is_none());
        assert_eq!((values.bytes(), recounted(&values)), (12, 12));
    }
}
