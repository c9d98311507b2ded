//! Rows that ranks send to each other, as tokens to the ranks of their experts.

use burn::tensor::Tensor;

use super::collective::{Collective, shaped};
use crate::comm::{Communicator, PairCounts};
use crate::link::Link;

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
/// As [`enter`](super::enter).
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
