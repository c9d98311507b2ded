//! The collectives of a group in forward and backward passes.

use std::sync::{Arc, Weak};

use burn::tensor::{Shape, Tensor};

use crate::comm::{Communicator, Engine, PairCounts, Pending, ReduceOp};
use crate::error::Result;
use crate::flat;

/// A flat tensor in a shape. Burn takes a zero in a target for the extent of the source.
pub fn shaped<const D: usize>(values: Tensor<1>, shape: Shape) -> Tensor<D> {
    match shape.num_elements() {
        0 => Tensor::empty(shape, (&values.device(), values.dtype())),
        _ => values.reshape(shape),
    }
}

/// The collectives of a group in a pass, which can't return an error.
///
/// It does not keep the group: Burn frees a graph when it makes the next one, and processes have to
/// leave the world before they end.
#[derive(Clone)]
pub struct Collective(Weak<dyn Engine>);

impl Collective {
    pub fn of(group: &Communicator) -> Self {
        Self(Arc::downgrade(&group.clone().into_engine()))
    }

    /// The sum over the ranks.
    pub fn sum(&self, values: Tensor<1>) -> Tensor<1> {
        let shape = values.shape();
        self.call(&values.clone(), shape, |group| group.all_reduce(values, ReduceOp::Sum))
    }

    /// The elements that this rank receives.
    pub fn exchange(&self, values: Tensor<1>, counts: &PairCounts, received: usize) -> Tensor<1> {
        let shape = Shape::from([received]);
        self.call(&values.clone(), shape, |group| group.all_to_all(values, counts))
    }

    /// The result of a call. After a failure, which all ranks are told of, NaN of a shape.
    ///
    /// # Panics
    ///
    /// If the group was dropped since the forward pass.
    fn call(
        &self,
        like: &Tensor<1>,
        shape: Shape,
        start: impl FnOnce(&Communicator) -> Result<Pending>,
    ) -> Tensor<1> {
        let group = self.0.upgrade().expect("the group lives until the backward pass");
        let group = Communicator::new(group);
        let result = start(&group).and_then(Pending::wait);
        // A pass can't return an error: values are NaN from here on, and the next step reports the
        // cause.
        let result = result.inspect_err(|error| group.fail(&error.to_string()));
        let (dtype, device) = (like.dtype(), like.device());
        result.unwrap_or_else(|_| match shape.num_elements() {
            0 => flat::empty(dtype, &device),
            _ => Tensor::full(shape, f32::NAN, (&device, dtype)),
        })
    }
}
