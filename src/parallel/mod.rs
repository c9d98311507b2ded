//! Tensor and expert parallelism: collectives inside a forward pass, with their gradients.
//!
//! In a *region* of tensor parallelism, the ranks of a group compute the same rows with different
//! slices of the weights. [`enter`] begins a region and [`leave`] ends it, as `f` and `g` of
//! Megatron-LM (<https://arxiv.org/abs/1909.08053>, section 3). [`exchange`] sends rows to the
//! ranks that have their experts, and back. A [`RowEmbedding`] looks up rows that other ranks have.
//!
//! ```text
//!                    rank 0   x W[:, ..k] ──► relu ──► W'[..k, :] ─┐
//!  x ──► enter ──►                                                 ├─► leave ──► y
//!                    rank 1   x W[:, k..] ──► relu ──► W'[k.., :] ─┘
//! ```
//!
//! All ranks of the group make the same calls in the same order, also in evaluation. In a backward
//! pass, a call is made for each of them on which the loss depends: that has to be the same on all
//! ranks, also on one that has received no rows. The group has to live until then.
//!
//! # Failures
//!
//! A forward or backward pass can't return an error. After a failure, results are NaN or undefined,
//! and the next collective of any rank returns an error.

mod embedding;
mod layers;

use std::sync::Arc;

use burn::tensor::{Shape, Tensor};

use crate::comm::{Communicator, Engine, PairCounts, Pending, ReduceOp};
use crate::error::Result;
use crate::link::Link;
use crate::slices;
pub use embedding::RowEmbedding;
pub use layers::{ColumnLinear, RowLinear};

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
    // Every rank goes on with the same sum, whose gradient is that of each summand.
    Link::new(|gradient| gradient).attach(x, sum)
}

/// Sends rows to the ranks of a group: returns the rows that this rank receives, in the order of
/// ranks. In the backward pass, the gradients of the rows return to the ranks that sent them.
///
/// The rows of `x` are along its first dimension: those for rank 0, then those for rank 1, and so
/// on. `counts` has the numbers of rows, which [`Communicator::pair_counts`] finds by those that
/// every rank sends. With the counts of the way back, the rows return:
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use distmuon::World;
/// use distmuon::parallel::exchange;
///
/// World::threads(vec![Device::default(); 2], |world| {
///     let sent = [[1, 2], [0, 3]][world.rank()];
///     let counts = world.comm().pair_counts(&sent, world.device())?;
///     let rows = Tensor::<2>::full([3, 4], world.rank() as f32, world.device());
///     let received = exchange(rows.clone(), &counts, world.comm());
///     assert_eq!(received.dims(), [[1, 4], [5, 4]][world.rank()]);
///     let returned = exchange(received, &counts.back(), world.comm());
///     assert_eq!(returned.into_data(), rows.into_data());
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// # Panics
///
/// As [`enter`].
pub fn exchange<const D: usize>(
    x: Tensor<D>,
    counts: &PairCounts,
    group: &Communicator,
) -> Tensor<D> {
    let mut shape: [usize; D] = x.dims();
    let width: usize = shape[1..].iter().product();
    let elements = |rows: &[usize]| rows.iter().map(|rows| rows * width).collect();
    let counts = PairCounts { sent: elements(&counts.sent), received: elements(&counts.received) };
    // The counts are of elements now.
    shape[0] = counts.received.iter().sum::<usize>() / width.max(1);
    let group = Collective::of(group);
    let rows = x.clone().without_autodiff().reshape([-1]);
    let received = group.exchange(rows, &counts, shape.iter().product());
    let received = shaped(received, shape.into());
    let back = counts.back();
    let sent: usize = x.shape().num_elements();
    Link::new(move |gradient| group.exchange(gradient, &back, sent)).attach(x, received)
}

/// A flat tensor in a shape. Burn takes a zero in a target for the extent of the source.
fn shaped<const D: usize>(values: Tensor<1>, shape: Shape) -> Tensor<D> {
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
struct Collective(std::sync::Weak<dyn Engine>);

impl Collective {
    fn of(group: &Communicator) -> Self {
        Self(Arc::downgrade(&group.clone().into_engine()))
    }

    /// The sum over the ranks.
    fn sum(&self, values: Tensor<1>) -> Tensor<1> {
        let shape = values.shape();
        self.call(&values.clone(), shape, |group| group.all_reduce(values, ReduceOp::Sum))
    }

    /// The elements that this rank receives.
    fn exchange(&self, values: Tensor<1>, counts: &PairCounts, received: usize) -> Tensor<1> {
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
            0 => slices::empty(dtype, &device),
            _ => Tensor::full(shape, f32::NAN, (&device, dtype)),
        })
    }
}
