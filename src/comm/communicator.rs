//! The collectives that programs call, with validated arguments.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::validate::CheckedCall;
use super::{Engine, PairCounts, Pending, PendingParts, ReduceOp};
use crate::error::Result;

/// The number of values of each of the two float32 in which a number is sent.
const WORD: usize = 1 << 24;

/// One rank's access to a group of ranks. Clones are the same rank of the same group.
///
/// Tensors are float32, float16 or bfloat16. Reductions add up in float32, in pairs of neighbouring
/// ranks, then in pairs of these sums, and so on, and round the result once. All ranks of the group
/// make the same calls in the same order.
///
/// Some calls need a second exchange, which starts when the result of the first is waited for. All
/// ranks therefore have to wait for the results of a group in the order of the calls. If one rank
/// does not wait for a result, no rank may wait for it. Calls of different groups have one order as
/// well, the same on all ranks that are in both, and so have the waits for their results.
///
/// # Errors
///
/// Every method that returns a [`Result`] fails with
///
/// - [`Error::Collective`](crate::Error::Collective) for arguments that are wrong on this rank,
///   before anything is sent;
/// - [`Error::PeerFailed`](crate::Error::PeerFailed) after a rank of the world has failed;
/// - [`Error::Mismatch`](crate::Error::Mismatch) if the ranks make different calls, also in
///   different groups: as soon as ranks wait for each other, so that none of them can go on.
///
/// A failure found by one rank reaches all.
///
/// A rank waits if all of its threads do that have made calls. A thread that other ranks wait for
/// therefore makes its first call, such as [`barrier`](Self::barrier) in a group of its own, before
/// other threads of its rank wait. If one thread has made all calls of a rank, unfinished calls
/// show that ranks wait for each other even where the host does not wait, as with NCCL.
///
/// ```
/// use burn::tensor::Tensor;
/// use distmuon::World;
///
/// World::launch(2, |world| {
///     let (comm, rank) = (world.comm(), world.rank() as u8);
///     assert_eq!(comm.engine_name(), "threads");
///     assert_eq!(comm.communicators(), 1);
///     // Small data of the host.
///     assert_eq!(comm.all_gather_bytes(vec![rank])?, [[0], [1]]);
///     assert_eq!(comm.gather_bytes(vec![rank], 0)?.is_some(), world.is_main());
///     assert_eq!(comm.broadcast_bytes(vec![rank], 1)?, [1]);
///     assert_eq!(comm.or_bytes(vec![1 << rank])?, [0b11]);
///     // One element of the sum for each rank, in float32.
///     let ones = Tensor::<1>::ones([2], &world.device().clone().inner());
///     let sum = comm.reduce_scatter_f32(ones, &[1, 1])?.wait()?;
///     assert_eq!(sum.into_scalar::<f32>(), 2.0);
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Communicator {
    engine: Arc<dyn Engine>,
}

impl Communicator {
    /// Returns the communicator of an engine.
    pub fn new(engine: Arc<dyn Engine>) -> Self {
        Self { engine }
    }

    /// Returns the engine, without the validation of arguments.
    ///
    /// ```
    /// let world = distmuon::World::alone(burn::tensor::Device::default());
    /// assert_eq!(world.communicator().into_engine().size(), 1);
    /// ```
    pub fn into_engine(self) -> Arc<dyn Engine> {
        self.engine
    }

    /// Returns the name of the engine, as in `threads`.
    pub fn engine_name(&self) -> &'static str {
        self.engine.engine_name()
    }

    /// Returns the library and the version that the engine uses.
    pub fn version(&self) -> String {
        self.engine.version()
    }

    /// Returns this rank's index in the group, starting at 0.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.engine.size()
    }

    /// Returns the ranks of every node, where all nodes have the same number of ranks. A sum is
    /// taken inside the nodes before it is taken between them. Engines without nodes return a
    /// single node of all ranks.
    pub fn nodes(&self) -> Vec<Vec<usize>> {
        self.engine.nodes()
    }

    /// Returns `true` if a sum over ranks has the same bits whichever rank computes it, as in all
    /// engines but `nccl` with [`Reduction::Native`](super::Reduction::Native).
    pub fn has_exact_sums(&self) -> bool {
        self.engine.has_exact_sums()
    }

    /// Returns the number of communicators that this rank has now, the world's included. Each
    /// may take memory of the device, and connections.
    pub fn communicators(&self) -> usize {
        self.engine.communicators()
    }

    /// Starts the sum or mean of the tensors of all ranks, which every rank receives. The tensors
    /// have the same length.
    pub fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        self.arguments("all_reduce").dtype(&tensor)?;
        self.engine.all_reduce(tensor, op)
    }

    /// Starts the sum or mean of the tensors of all ranks, of which every rank receives one part.
    /// Rank `r` receives `counts[r]` elements, which follow the parts of the lower ranks. The
    /// counts are the same on all ranks.
    pub fn reduce_scatter(
        &self,
        tensor: Tensor<1>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Pending> {
        self.check_scattered(&tensor, counts)?;
        self.engine.reduce_scatter(tensor, counts, op)
    }

    /// Starts the sum of [`reduce_scatter`](Self::reduce_scatter) without the rounding: the result
    /// is float32, for larger sums that are rounded once at the end.
    pub fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        self.check_scattered(&tensor, counts)?;
        self.engine.reduce_scatter_f32(tensor, counts)
    }

    /// Starts the concatenation of the tensors of all ranks, which every rank receives. Rank `r`
    /// gives `counts[r]` elements. The counts are the same on all ranks.
    pub fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let arguments = self.arguments("all_gather");
        arguments.dtype(&tensor)?;
        arguments.gathered(counts, &tensor)?;
        self.engine.all_gather(tensor, counts)
    }

    /// Starts sending the tensor of rank `root` to all ranks. The other ranks give a tensor of the
    /// same length.
    pub fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        let arguments = self.arguments("broadcast");
        arguments.dtype(&tensor)?;
        arguments.root(root)?;
        self.engine.broadcast(tensor, root)
    }

    /// Starts sending a part of the tensor of every rank to every rank. The result is the
    /// concatenation of the received parts in the order of ranks. What a rank receives from another
    /// is what the other sends, as [`pair_counts`](Self::pair_counts) finds it.
    ///
    /// Counts of two ranks that do not fit are a mismatch on the rank that would receive the part.
    /// NCCL does not compare them: such a call never ends, or its result is wrong.
    pub fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        let arguments = self.arguments("all_to_all");
        arguments.dtype(&tensor)?;
        arguments.scattered(&counts.sent, &tensor)?;
        arguments.one_per_rank(&counts.received)?;
        self.engine.all_to_all(tensor, counts)
    }

    /// Sends every rank the same number of numbers below 2^48, those for rank 0 first, and returns
    /// those that this rank receives. Waits for all ranks, by a message on `device`, which is this
    /// rank's.
    pub fn all_to_all_numbers(&self, numbers: &[usize], device: &Device) -> Result<Vec<usize>> {
        // Float32 has all integers of 24 bits.
        let words: Vec<f32> = numbers
            .iter()
            .flat_map(|number| [number % WORD, number / WORD])
            .map(|word| word as f32)
            .collect();
        // Named, since a device's default type may be bfloat16, which rounds integers above 256.
        let device = (&device.clone().inner(), DType::F32);
        let message = Tensor::from_data(TensorData::from(&*words), device);
        let each = vec![words.len() / self.size(); self.size()];
        let counts = PairCounts { sent: each.clone(), received: each };
        let words: Vec<f32> =
            self.all_to_all(message, &counts)?.wait()?.into_data().iter().collect();
        Ok(words.chunks(2).map(|words| words[0] as usize + WORD * words[1] as usize).collect())
    }

    /// Asks every rank how many elements, or rows, it sends to this one, and returns them with
    /// those that this rank sends, one for every rank: see
    /// [`all_to_all_numbers`](Self::all_to_all_numbers).
    pub fn pair_counts(&self, sent: &[usize], device: &Device) -> Result<PairCounts> {
        self.arguments("pair_counts").one_per_rank(sent)?;
        let received = self.all_to_all_numbers(sent, device)?;
        Ok(PairCounts { sent: sent.to_vec(), received })
    }

    /// Starts to collect the tensors of all ranks on rank `root`. Rank `r` gives `counts[r]`
    /// elements. The counts are the same on all ranks.
    ///
    /// Rank `root` receives the elements of all ranks, one rank after the other, in one tensor or
    /// in several: an engine that receives one from each rank leaves it to the caller to copy them
    /// to one place. The other ranks receive no tensor, or one without elements.
    pub fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
        let arguments = self.arguments("gather");
        arguments.dtype(&tensor)?;
        arguments.root(root)?;
        arguments.gathered(counts, &tensor)?;
        self.engine.gather(tensor, counts, root)
    }

    /// Sends small data of the host from all ranks to all ranks, and waits for it.
    ///
    /// The bytes that every rank receives grow with the number of ranks. The other methods for
    /// bytes send less.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.engine.all_gather_bytes(bytes)
    }

    /// Sends small data of the host from all ranks to rank `root`, and waits for it. Returns `None`
    /// on the other ranks.
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        self.arguments("gather_bytes").root(root)?;
        self.engine.gather_bytes(bytes, root)
    }

    /// Sends small data of rank `root` to all ranks, and waits for it. The bytes of the other ranks
    /// are ignored.
    pub fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        self.arguments("broadcast_bytes").root(root)?;
        self.engine.broadcast_bytes(bytes, root)
    }

    /// Returns, on all ranks, the lowest rank that gives bytes, and these bytes. Waits for all
    /// ranks.
    pub fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        self.engine.first_bytes(bytes)
    }

    /// Returns, on all ranks, the bits that are set on any rank. All ranks give the same number of
    /// bytes. Waits for all ranks.
    pub fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.engine.or_bytes(bytes)
    }

    /// Announces that this rank begins or ends something that may take longer than the deadline,
    /// such as writing a file.
    ///
    /// While a rank is busy, no rank times out, since a late rank may itself wait for the busy one.
    /// The exception is a busy rank that itself waits for others. The end of a rank's process is
    /// noticed nevertheless. After five minutes, a rank that is busy while others wait is logged;
    /// after the [limit](Self::set_busy_limit), it has failed.
    pub fn set_busy(&self, busy: bool) {
        self.engine.set_busy(busy);
    }

    /// Sets the longest time for which a busy rank of the world is waited for: an hour by default,
    /// so that a file system that hangs does not keep the other ranks for ever. The call of one
    /// rank is enough.
    pub fn set_busy_limit(&self, limit: Duration) {
        self.engine.set_busy_limit(limit);
    }

    /// Waits until the device has carried out every call whose [`Pending`] was waited for. An
    /// engine may return a result earlier if the device delays all work that uses the result.
    ///
    /// # Errors
    ///
    /// The error of a call whose result was already returned. The results must not be used then,
    /// and the next collective also returns the error.
    pub fn synchronize(&self) -> Result<()> {
        self.engine.synchronize()
    }

    /// Waits until all ranks have made this call.
    pub fn barrier(&self) -> Result<()> {
        self.engine.barrier()
    }

    /// Returns the group of the ranks that give the same color, numbered in the order of `key` and
    /// then of rank.
    ///
    /// Make groups before the loop of a program, not in it: rank 0 keeps the members of each until
    /// the world ends.
    pub fn split(&self, color: usize, key: usize) -> Result<Self> {
        Ok(Self::new(self.engine.split(color, key)?))
    }

    /// Ends the world: the calls of every other rank fail with
    /// [`Error::PeerFailed`](crate::Error::PeerFailed), which names this rank and `cause`.
    pub fn fail(&self, cause: &str) {
        self.engine.fail(cause);
    }

    fn arguments(&self, collective: &'static str) -> CheckedCall {
        CheckedCall { collective, rank: self.rank(), size: self.size() }
    }

    fn check_scattered(&self, tensor: &Tensor<1>, counts: &[usize]) -> Result<()> {
        let arguments = self.arguments("reduce_scatter");
        arguments.dtype(tensor)?;
        arguments.scattered(counts, tensor)
    }
}

impl From<Arc<dyn Engine>> for Communicator {
    fn from(engine: Arc<dyn Engine>) -> Self {
        Self::new(engine)
    }
}

impl<E: Engine + 'static> From<E> for Communicator {
    fn from(engine: E) -> Self {
        Self::new(Arc::new(engine))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Threads;
    use super::*;
    use crate::error::Error;

    /// Rank 1 of 3. The other ranks never come, so only argument errors return at once.
    fn rank_1() -> Communicator {
        Threads::world(&vec![Device::default(); 3], Duration::from_secs(60)).swap_remove(1).into()
    }

    fn floats(length: usize, dtype: DType) -> Tensor<1> {
        Tensor::ones([length], (&Device::default(), dtype))
    }

    fn pairs(sent: &[usize], received: &[usize]) -> PairCounts {
        PairCounts { sent: sent.into(), received: received.into() }
    }

    /// Asserts that a call was refused, and returns the reason.
    fn reason<T>(result: Result<T>, name: &str) -> String {
        match result.map(|_| ()).unwrap_err() {
            Error::Collective { collective, rank: 1, reason, .. } if collective == name => reason,
            error => panic!("{name}: {error}"),
        }
    }

    #[test]
    fn counts_that_do_not_fit_are_refused_in_every_collective() {
        let comm = rank_1();
        let tensor = || floats(4, DType::F32);
        for counts in [&[2, 2][..], &[1, 1, 1, 1], &[]] {
            let calls = [
                (comm.reduce_scatter(tensor(), counts, ReduceOp::Sum).map(drop), "reduce_scatter"),
                (comm.reduce_scatter_f32(tensor(), counts).map(drop), "reduce_scatter"),
                (comm.all_gather(tensor(), counts).map(drop), "all_gather"),
                (comm.gather(tensor(), counts, 0).map(drop), "gather"),
                (comm.all_to_all(tensor(), &pairs(counts, &[0; 3])).map(drop), "all_to_all"),
                (comm.all_to_all(tensor(), &pairs(&[4, 0, 0], counts)).map(drop), "all_to_all"),
            ];
            for (call, name) in calls {
                let reason = reason(call, name);
                let expected = format!("expected 3, one for every rank, got {}", counts.len());
                assert!(reason.ends_with(&expected), "{name}: {reason}");
            }
        }
        let scattered = [
            (comm.reduce_scatter(tensor(), &[1, 1, 1], ReduceOp::Mean).map(drop), "reduce_scatter"),
            (comm.reduce_scatter_f32(tensor(), &[1, 1, 1]).map(drop), "reduce_scatter"),
            (comm.all_to_all(tensor(), &pairs(&[1, 1, 1], &[0; 3])).map(drop), "all_to_all"),
            // The count of this rank, and not another's.
            (comm.all_gather(tensor(), &[4, 3, 4]).map(drop), "all_gather"),
            (comm.gather(tensor(), &[4, 3, 4], 0).map(drop), "gather"),
        ];
        for (call, name) in scattered {
            let reason = reason(call, name);
            assert!(reason.ends_with("expected 3 elements, got 4"), "{name}: {reason}");
        }
    }

    #[test]
    fn a_root_outside_the_group_is_refused_in_every_collective() {
        let comm = rank_1();
        let tensor = || floats(4, DType::F32);
        let reasons = [
            reason(comm.broadcast(tensor(), 3), "broadcast"),
            reason(comm.gather(tensor(), &[4; 3], 3), "gather"),
            reason(comm.gather_bytes(vec![], 3), "gather_bytes"),
            reason(comm.broadcast_bytes(vec![], 3), "broadcast_bytes"),
        ];
        for reason in reasons {
            assert!(reason.ends_with("expected a rank below 3, got 3"), "{reason}");
        }
    }

    #[test]
    fn a_type_that_is_not_exchanged_is_refused_before_all_else() {
        if !Device::default().supports_dtype(DType::F64) {
            return;
        }
        let comm = rank_1();
        let wide = || floats(4, DType::F64);
        let reasons = [
            reason(comm.all_reduce(wide(), ReduceOp::Sum), "all_reduce"),
            reason(comm.reduce_scatter(wide(), &[], ReduceOp::Sum), "reduce_scatter"),
            reason(comm.reduce_scatter_f32(wide(), &[]), "reduce_scatter"),
            reason(comm.all_gather(wide(), &[]), "all_gather"),
            reason(comm.broadcast(wide(), 3), "broadcast"),
            reason(comm.all_to_all(wide(), &pairs(&[], &[])), "all_to_all"),
            reason(comm.gather(wide(), &[], 3), "gather"),
        ];
        for reason in reasons {
            assert!(reason.contains("float32, float16 or bfloat16"), "{reason}");
        }
    }

    #[test]
    fn valid_arguments_reach_the_engine() {
        let comm = rank_1();
        for dtype in [DType::F32, DType::F16] {
            let started = [
                comm.all_reduce(floats(4, dtype), ReduceOp::Sum).map(drop),
                comm.reduce_scatter(floats(4, dtype), &[0, 4, 0], ReduceOp::Sum).map(drop),
                comm.all_gather(floats(4, dtype), &[0, 4, 9]).map(drop),
                comm.broadcast(floats(4, dtype), 2).map(drop),
                comm.all_to_all(floats(4, dtype), &pairs(&[4, 0, 0], &[9, 9, 9])).map(drop),
                comm.gather(floats(4, dtype), &[0, 4, 9], 2).map(drop),
            ];
            assert!(started.iter().all(Result::is_ok), "{started:?}");
        }
    }
}
