//! The result of a collective that was started.

use std::fmt::{self, Debug};

use burn::tensor::Tensor;

use crate::error::Result;
use crate::flat;

/// The result of a collective that was started, to be waited for.
///
/// ```
/// use burn::tensor::Tensor;
/// use distmuon::comm::{Pending, ReduceOp, World};
///
/// World::launch(2, |world| {
///     let ones = Tensor::<1>::ones([4], &world.device().clone().inner());
///     let sum: Pending = world.comm().all_reduce(ones, ReduceOp::Sum)?;
///     // Here the rank does other work, while an engine may already send.
///     assert_eq!(sum.wait()?.into_data().to_vec::<f32>().unwrap(), [2.0; 4]);
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[must_use = "a collective is finished by waiting for it"]
pub struct Pending<T = Tensor<1>> {
    bytes: usize,
    finish: Box<dyn FnOnce() -> Result<T> + Send>,
}

/// The result of a [`gather`](super::Communicator::gather): the elements of all ranks, one rank
/// after the other, in one tensor or in several.
pub type PendingParts = Pending<Vec<Tensor<1>>>;

impl Pending {
    /// Returns a result that is already complete, as of an engine whose calls block.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::comm::Pending;
    ///
    /// let pending = Pending::ready(Tensor::<1>::ones([4], &Device::default()));
    /// assert_eq!(pending.wait()?.dims(), [4]);
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn ready(tensor: Tensor<1>) -> Self {
        Self::new(flat::bytes(&tensor), move || Ok(tensor))
    }

    /// Returns the same result as a list of one tensor, for an engine that gathers into one.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::comm::Pending;
    ///
    /// let gathered = Pending::ready(Tensor::<1>::ones([4], &Device::default()));
    /// assert_eq!(gathered.in_one_tensor().wait()?.len(), 1);
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn in_one_tensor(self) -> PendingParts {
        Pending::new(self.bytes, move || Ok(vec![self.wait()?]))
    }
}

impl<T: 'static> Pending<T> {
    /// Returns a result that `finish` completes, and whose call holds `bytes` bytes until then.
    pub fn new(bytes: usize, finish: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self { bytes, finish: Box::new(finish) }
    }

    /// Returns the bytes of the buffers for sending and receiving, which the call holds until its
    /// result is waited for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Waits for the result and returns it. An engine may return it earlier if the device delays
    /// all work that uses the result: see
    /// [`Communicator::synchronize`](super::Communicator::synchronize).
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`](crate::Error::PeerFailed) if another rank failed or was late,
    /// [`Error::Mismatch`](crate::Error::Mismatch) if the ranks made different calls.
    pub fn wait(self) -> Result<T> {
        (self.finish)()
    }
}

impl<T> Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({} bytes)", self.bytes)
    }
}
