//! The borders of a region in which ranks compute with different slices of the weights.

use burn::tensor::Tensor;

use super::collective::{Collective, shaped};
use crate::comm::Communicator;
use crate::link::Link;

/// Returns the input of a region, unchanged. In the backward pass, the gradients of the ranks are
/// added up: each belongs to the slice of its rank.
///
/// The result has the shape and type of `x`, which is the same on all ranks of the group.
///
/// # Panics
///
/// If links do not work on the device, as [`link::supports`](crate::link::supports) says.
pub fn enter<const D: usize>(x: Tensor<D>, group: &Communicator) -> Tensor<D> {
    let value = x.clone();
    let group = Collective::of(group);
    // Every rank uses the same input for its own slice: the gradients of all slices add up.
    Link::new(move |gradient| group.sum(gradient)).attach(x, value)
}

/// Returns the sum of the results of the ranks, with which a region ends. In the backward pass,
/// every rank gets the gradient of the sum.
///
/// The ranks' results are added up in float32, in the same order on all ranks, and the sum is
/// rounded to their type.
///
/// # Panics
///
/// As [`enter`].
pub fn leave<const D: usize>(x: Tensor<D>, group: &Communicator) -> Tensor<D> {
    let shape = x.shape();
    let partial = x.clone().without_autodiff().reshape([-1]);
    let sum = shaped(Collective::of(group).sum(partial), shape);
    // Every rank goes on with the same sum, whose gradient is the gradient of each summand.
    Link::new(|gradient| gradient).attach(x, sum)
}
