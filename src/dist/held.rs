//! The parameters and gradients of a step, taken out of the model and put back.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::flat;
use super::memory::bytes;
use super::plan::{Bucket, Parameter};
use crate::error::{Error, Result};
use crate::gradient;

/// A rank's part of the model during a step.
pub struct Held {
    pub ids: Vec<ParamId>,
    pub parameters: Values,
    pub gradients: Values,
}

/// Flat tensors by the numbers of the plan's parameters, and how many bytes they are.
pub struct Values {
    tensors: Vec<Option<Tensor<1>>>,
    bytes: usize,
}

impl Values {
    fn none(count: usize) -> Self {
        Self { tensors: vec![None; count], bytes: 0 }
    }

    /// The tensor of a parameter, if it is there.
    pub fn get(&self, number: usize) -> Option<&Tensor<1>> {
        self.tensors[number].as_ref()
    }

    /// Bytes of all tensors that are there.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes the tensor of a parameter out.
    pub fn take(&mut self, number: usize) -> Option<Tensor<1>> {
        let taken = self.tensors[number].take()?;
        self.bytes -= bytes(&taken);
        Some(taken)
    }

    /// Puts the tensor of a parameter in.
    pub fn set(&mut self, number: usize, tensor: Tensor<1>) {
        self.take(number);
        self.bytes += bytes(&tensor);
        self.tensors[number] = Some(tensor);
    }
}

impl Held {
    /// Takes the parameters out of the model, which keeps placeholders, and their gradients.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if the model or a gradient is not what the plan was made for.
    pub fn take<M: Module>(
        model: M,
        gradients: GradientsParams,
        plan: &[Parameter],
        rank: usize,
        device: &Device,
    ) -> Result<(M, Self)> {
        let held = Self {
            ids: vec![ParamId::from(0); plan.len()],
            parameters: Values::none(plan.len()),
            gradients: Values::none(plan.len()),
        };
        let walk = Walk::through(plan);
        let mut take = Take { walk, held, gradients, plan, rank, device, error: None };
        let model = model.map(&mut take);
        let Take { held, error, .. } = take;
        if let Some(error) = error {
            return Err(error);
        }
        match held.parameters.tensors.iter().position(Option::is_none) {
            Some(missing) => Err(refuse(
                &plan[missing],
                rank,
                "it is not in the model".into(),
                "step the model that the optimizer was made for",
            )),
            None => Ok((model, held)),
        }
    }

    /// Puts the parameters back where they were taken from.
    ///
    /// # Panics
    ///
    /// If a parameter has not been [published](Self::publish).
    pub fn put_back<M: Module>(self, model: M, plan: &[Parameter]) -> M {
        model.map(&mut PutBack { walk: Walk::through(plan), held: self, plan })
    }

    /// The parameters of a bucket from its gathered buffer, instead of the old ones.
    pub fn publish(&mut self, bucket: &Bucket, buffer: &Tensor<1>) {
        for (number, pieces) in bucket.by_parameter() {
            let parts = pieces.iter().map(|(_, at, len)| flat::part(buffer, *at..at + len));
            let value = flat::join(parts.collect(), bucket.dtype, &buffer.device());
            self.parameters.set(number, value);
        }
    }
}

/// A bucket's buffer from the values of its parameters; zeros for what is absent and for padding. A parameter that is
/// one piece of the buffer is taken instead of copied.
pub fn pack(values: &mut Values, bucket: &Bucket, device: &Device) -> Tensor<1> {
    let zeros = |length: usize| Tensor::zeros([length], (device, bucket.dtype));
    let mut parts = vec![];
    for (parameter, elements, padding) in bucket.overlaps(0..bucket.elements()) {
        parts.push(match values.get(parameter) {
            None => zeros(elements.len()),
            Some(whole) if whole.dims() == [elements.len()] => {
                values.take(parameter).expect("it is there")
            }
            Some(value) => flat::part(value, elements),
        });
        if padding > 0 {
            parts.push(zeros(padding));
        }
    }
    flat::join(parts, bucket.dtype, device)
}

fn refuse(parameter: &Parameter, rank: usize, reason: String, remedy: &'static str) -> Error {
    Error::Parameter { parameter: parameter.path.clone(), rank, reason, remedy }
}

/// Where a walk through the module is, and the numbers of the paths.
struct Walk<'a> {
    names: Vec<String>,
    numbers: HashMap<&'a str, usize>,
}

impl<'a> Walk<'a> {
    fn through(plan: &'a [Parameter]) -> Self {
        let numbers = plan.iter().enumerate().map(|(number, found)| (found.path.as_str(), number));
        Self { names: vec![], numbers: numbers.collect() }
    }

    fn number(&self) -> Option<usize> {
        self.numbers.get(self.names.join(".").as_str()).copied()
    }
}

struct Take<'a> {
    walk: Walk<'a>,
    held: Held,
    gradients: GradientsParams,
    plan: &'a [Parameter],
    rank: usize,
    device: &'a Device,
    error: Option<Error>,
}

impl Take<'_> {
    fn check<const D: usize>(
        &self,
        number: usize,
        value: &Tensor<D>,
        gradient: Option<&Tensor<D>>,
    ) -> Result<()> {
        let planned = &self.plan[number];
        let described = |tensor: &Tensor<D>| (tensor.dims().to_vec(), tensor.dtype());
        let expected = (planned.shape.clone(), planned.dtype);
        if described(value) != expected {
            let reason = format!("it is {:?}, and was {expected:?}", described(value));
            return Err(refuse(planned, self.rank, reason, "make a new optimizer for this model"));
        }
        if value.device().inner() != *self.device {
            let reason = format!("it is on {:?}, and not on {:?}", value.device(), self.device);
            let remedy = "move the model with `to_device`, or give its device to the world";
            return Err(refuse(planned, self.rank, reason, remedy));
        }
        let Some(gradient) = gradient else { return Ok(()) };
        gradient::check(&planned.path, self.rank, value, gradient)?;
        if gradient.dtype() != planned.dtype {
            let reason =
                format!("its gradient is {:?}, and not {:?}", gradient.dtype(), planned.dtype);
            let remedy = "give gradients of the type of the parameter";
            return Err(refuse(planned, self.rank, reason, remedy));
        }
        Ok(())
    }
}

impl Take<'_> {
    /// Refuses a parameter that is to be trained now and that the plan does not know.
    fn refuse_untrained<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_empty = param.val().dims().contains(&0);
        let has_gradient = self.gradients.get::<D>(param.id).is_some();
        let is_trained = param.is_require_grad() && has_gradient && !is_empty;
        if is_trained {
            self.error.get_or_insert(Error::Parameter {
                parameter: self.walk.names.join("."),
                rank: self.rank,
                reason: "it has a gradient, and was frozen or absent when the optimizer was made"
                    .into(),
                remedy: "make a new optimizer for this model, or leave its gradient out",
            });
        }
    }
}

impl ModuleMapper for Take<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.walk.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.walk.names.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(number) = self.walk.number() else {
            self.refuse_untrained(&param);
            return param;
        };
        let (id, value, mapper) = param.consume();
        let gradient = self.gradients.remove::<D>(id);
        if let Err(error) = self.check(number, &value, gradient.as_ref()) {
            self.error.get_or_insert(error);
        }
        let placeholder = placeholder(&value);
        self.held.ids[number] = id;
        self.held.parameters.set(number, value.inner().reshape([-1]));
        if let Some(gradient) = gradient {
            self.held.gradients.set(number, gradient.reshape([-1]));
        }
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

struct PutBack<'a> {
    walk: Walk<'a>,
    held: Held,
    plan: &'a [Parameter],
}

impl ModuleMapper for PutBack<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.walk.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.walk.names.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(number) = self.walk.number() else { return param };
        let (id, placeholder, mapper) = param.consume();
        let value = self.held.parameters.take(number).expect("it was published");
        let shape: [usize; D] = self.plan[number].shape.as_slice().try_into().expect("as taken");
        let value = in_place_of(&placeholder, value.reshape(shape));
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Stands where a value was taken out of a model. Not initialised: nobody reads it.
pub fn placeholder<const D: usize>(value: &Tensor<D>) -> Tensor<D> {
    in_place_of(value, Tensor::empty([1; D], (&value.device().inner(), value.dtype())))
}

/// A value without gradients, made to require them and keep checkpoints as the old one does.
pub fn in_place_of<const D: usize>(old: &Tensor<D>, value: Tensor<D>) -> Tensor<D> {
    let (required, strategy) = (old.is_require_grad(), old.gradient_checkpointing_strategy());
    let mut value = Tensor::from_inner(value);
    if let Some(strategy) = strategy {
        value = value.with_gradient_checkpointing_strategy(strategy);
    }
    if required { value.require_grad() } else { value }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;

    /// Counted again from the tensors that are there.
    fn recounted(values: &Values) -> usize {
        values.tensors.iter().flatten().map(bytes).sum()
    }

    #[test]
    fn bytes_are_those_of_what_is_there() {
        let device = Device::default();
        let tensor = |length: usize, dtype| Tensor::<1>::zeros([length], (&device, dtype));
        let mut values = Values::none(3);
        assert_eq!(values.bytes(), 0);
        values.set(0, tensor(5, DType::F32));
        values.set(2, tensor(7, DType::BF16));
        assert_eq!((values.bytes(), recounted(&values)), (34, 34));
        values.set(0, tensor(3, DType::F32)); // in place of another
        assert_eq!((values.bytes(), recounted(&values)), (26, 26));
        assert!(values.take(1).is_none() && values.take(2).is_some() && values.take(2).is_none());
        assert_eq!((values.bytes(), recounted(&values)), (12, 12));
    }
}
