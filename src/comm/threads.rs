//! The engine for ranks that are threads of one process, on one device or several.
//!
//! Every rank contributes its tensor and computes its part of the result from the contributions of
//! all, always in the same order. Results do not depend on timing.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};

use super::call::Call;
use super::counts::offset;
use super::thread_rounds::{Participant, ThreadRounds};
use super::{Engine, PairCounts, Pending, PendingParts, ReduceOp, sum_over_ranks, value_bytes};
use crate::error::{Error, Result};
use crate::flat;
use crate::host::is_on_host;

const SAME_CALL: &str = "ranks that make the same call contribute the same kind of payload";

/// The engine for ranks that are threads of one process.
#[derive(Debug)]
pub struct Threads {
    participant: Arc<Participant<Call, Payload>>,
    device: Device,
}

#[derive(Clone)]
enum Payload {
    Tensor(Box<Tensor<1>>),
    /// A tensor, and the elements of it for every rank.
    Parts(Box<Tensor<1>>, Arc<[usize]>),
    Bytes(Arc<[u8]>),
}

impl Threads {
    /// Returns an engine for every rank of a world. The results of rank `r` are on `devices[r]`. A
    /// rank that waits for another longer than `deadline` ends the world.
    pub fn world(devices: &[Device], deadline: Duration) -> Vec<Self> {
        let participants = ThreadRounds::participants(devices.len(), deadline).into_iter();
        participants
            .zip(devices)
            .map(|(participant, device)| Self {
                participant: participant.into(),
                device: device.clone(),
            })
            .collect()
    }

    /// Returns the same engine, with results on another device.
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Returns the first rank of the world that failed.
    pub fn failed(&self) -> Option<usize> {
        self.participant.failed()
    }

    /// Announces that this rank makes no further calls. If another rank waits for a call of this
    /// rank, its call fails.
    pub fn depart(&self) {
        self.participant.depart();
    }

    /// Returns the bytes of all ranks. Waits for all ranks.
    fn collect_bytes(&self, call: Call, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>> {
        let payloads =
            self.participant.arrive(call, Payload::Bytes(bytes.into()))?.collect()?.into_iter();
        let bytes = payloads.map(|payload| match payload {
            Payload::Bytes(bytes) => bytes,
            _ => unreachable!("{SAME_CALL}"),
        });
        Ok(bytes.collect())
    }

    /// Starts a collective whose result `combine` computes from the tensors of all ranks.
    fn start<T: 'static>(
        &self,
        call: Call,
        tensor: Tensor<1>,
        combine: impl FnOnce(Vec<Tensor<1>>, &Device) -> T + Send + 'static,
    ) -> Result<Pending<T>> {
        let bytes = flat::bytes(&tensor);
        self.exchange(call, bytes, Payload::Tensor(Box::new(tensor)), |payloads, device| {
            let tensors = payloads.iter().map(|payload| match payload {
                Payload::Tensor(tensor) => (**tensor).clone(),
                _ => unreachable!("{SAME_CALL}"),
            });
            Ok(combine(tensors.collect(), device))
        })
    }

    /// Starts a collective in which this rank gives a payload of some bytes to all. Each rank
    /// computes its own result when it waits for it: the last one to arrive does not work for all.
    ///
    /// Every thread has a stream of its own on a CubeCL device, and streams do not wait for each
    /// other where they write in place: a kernel waits until another stream has made a buffer, and
    /// neither for its later writes nor, before a write, for the reads of others. So a rank's
    /// tensors are complete before it gives them away, and read before it drops the others'.
    fn exchange<T: 'static>(
        &self,
        call: Call,
        bytes: usize,
        payload: Payload,
        combine: impl FnOnce(&[Payload], &Device) -> Result<T> + Send + 'static,
    ) -> Result<Pending<T>> {
        let (rank, is_alone) = (self.rank(), self.size() == 1);
        let (device, collective) = (self.device.clone(), call.collective);
        let finish = move |device: &Device| match is_alone {
            true => Ok(()),
            false => device.sync().map_err(|error| Error::Engine {
                engine: "threads",
                rank,
                operation: collective.to_owned(),
                reason: error.to_string(),
                remedy: "free memory of the device, and restart all ranks",
            }),
        };
        finish(&device)?;
        let round = self.participant.arrive(call, payload)?;
        Ok(Pending::new(bytes, move || {
            let payloads = round.collect()?;
            let result = combine(&payloads, &device)?;
            finish(&device)?;
            // Only now: a tensor with one reference may be written in place by the rank that gave
            // it.
            drop(payloads);
            Ok(result)
        }))
    }

    /// Starts a [`reduce_scatter`](Engine::reduce_scatter) whose result has the type `dtype`.
    fn reduce_scatter_as(
        &self,
        tensor: Tensor<1>,
        counts: &[usize],
        op: ReduceOp,
        dtype: DType,
    ) -> Result<Pending> {
        let call = Call::reduce_scatter(&tensor, counts, op);
        let start = offset(counts, self.rank());
        let elements = start..start + counts[self.rank()];
        self.start(call, tensor, move |tensors, device| {
            // Sliced before the sum, so that the ranks divide the work of a call.
            let parts = tensors.iter().map(|tensor| flat::slice(tensor, elements.clone()));
            sum_over_ranks::parts(&parts.collect::<Vec<_>>(), op, dtype, device)
        })
    }
}

/// The error of a rank that would receive another number of elements than are sent to it.
fn different_counts([from, to]: [usize; 2], [sent, received]: [usize; 2]) -> Error {
    let calls = format!(
        "rank {from}: all_to_all with {sent} elements for rank {to}, rank {to}: all_to_all with \
         {received} elements from rank {from}"
    );
    Error::Mismatch { calls }
}

impl Engine for Threads {
    fn engine_name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.participant.rank()
    }

    fn size(&self) -> usize {
        self.participant.size()
    }

    fn communicators(&self) -> usize {
        self.participant.groups()
    }

    fn has_exact_sums(&self) -> bool {
        true
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        let call = Call::all_reduce(&tensor, op);
        let dtype = tensor.dtype();
        self.start(call, tensor, move |tensors, device| {
            sum_over_ranks::parts(&tensors, op, dtype, device)
        })
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        self.reduce_scatter_as(tensor, counts, op, dtype)
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        self.reduce_scatter_as(tensor, counts, ReduceOp::Sum, DType::F32)
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let call = Call::all_gather(&tensor, counts);
        let dtype = tensor.dtype();
        self.start(call, tensor, move |tensors, device| flat::concat(tensors, dtype, device))
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        let call = Call::broadcast(&tensor, root);
        self.start(call, tensor, move |mut tensors, device| {
            tensors.swap_remove(root).to_device(device)
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        let call = Call::all_to_all(&tensor);
        let (rank, dtype) = (self.rank(), tensor.dtype());
        let (expected, bytes) = (counts.received.clone(), flat::bytes(&tensor));
        // With the counts: another rank finds its part behind the parts of the lower ranks.
        let payload = Payload::Parts(Box::new(tensor), counts.sent.as_slice().into());
        let participant = self.participant.clone();
        self.exchange(call, bytes, payload, move |payloads, device| {
            let mut parts = vec![];
            for (from, payload) in payloads.iter().enumerate() {
                let Payload::Parts(tensor, sent) = payload else { unreachable!("{SAME_CALL}") };
                let (start, count) = (offset(sent, rank), sent[rank]);
                if count != expected[from] {
                    let error = different_counts([from, rank], [count, expected[from]]);
                    // At once: the sender cannot know what was expected of it.
                    participant.fail(error.to_string());
                    return Err(error);
                }
                parts.push(flat::slice(tensor, start..start + count));
            }
            Ok(flat::concat(parts, dtype, device))
        })
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
        let call = Call::gather(&tensor, counts, root);
        let dtype = tensor.dtype();
        let is_root = root == self.rank();
        self.start(call, tensor, move |tensors, device| match is_root {
            // Not copied: a rank that changes its tensor later makes another one. On a CubeCL
            // device, it may change it while a copy of the caller's still waits in its stream.
            true if is_on_host(device) => tensors,
            true => vec![flat::concat(tensors, dtype, device)],
            false => vec![],
        })
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let all = self.collect_bytes(Call::new("all_gather_bytes"), bytes)?;
        Ok(all.iter().map(|bytes| bytes.to_vec()).collect())
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        let all = self.collect_bytes(Call::new("gather_bytes"), bytes)?;
        let is_root = root == self.rank();
        Ok(is_root.then(|| all.iter().map(|bytes| bytes.to_vec()).collect()))
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        Ok(self.collect_bytes(Call::new("broadcast_bytes"), bytes)?[root].to_vec())
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        // A leading byte distinguishes empty bytes from no bytes.
        let bytes = bytes.map_or(vec![], |bytes| [vec![1], bytes].concat());
        let all = self.collect_bytes(Call::new("first_bytes"), bytes)?;
        let first = all.iter().position(|bytes| !bytes.is_empty());
        Ok(first.map(|rank| (rank, all[rank][1..].to_vec())))
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        // Ranks with other lengths get a mismatch; `zip` below would cut the longer bytes.
        let call = Call { counts: vec![bytes.len()], ..Call::new("or_bytes") };
        let all = self.collect_bytes(call, bytes)?;
        let or = |united: Vec<u8>, bytes: &Arc<[u8]>| {
            united.iter().zip(&**bytes).map(|(a, b)| a | b).collect()
        };
        Ok(all[1..].iter().fold(all[0].to_vec(), or))
    }

    fn set_busy(&self, busy: bool) {
        self.participant.set_busy(busy);
    }

    fn set_busy_limit(&self, limit: Duration) {
        self.participant.set_busy_limit(limit);
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Engine>> {
        // Every rank offers a number for a new group; the first member's is used.
        let offer = (color, key, self.participant.new_group());
        let offers = self.collect_bytes(Call::new("split"), value_bytes::to_bytes(&offer))?;
        let mut members: Vec<(usize, usize, u64)> = vec![];
        for (rank, bytes) in offers.iter().enumerate() {
            let (of, key, group): (usize, usize, u64) = value_bytes::from_bytes(rank, bytes)?;
            members.extend((of == color).then_some((key, rank, group)));
        }
        // By key, and by rank where keys are equal, as in `MPI_Comm_split`.
        members.sort_unstable();
        let (_, _, group) = members[0];
        let ranks: Vec<usize> = members.into_iter().map(|(_, rank, _)| rank).collect();
        let rank = ranks
            .iter()
            .position(|rank| *rank == self.rank())
            .expect("this rank is a member of the group of its color");
        let participant = self.participant.join(group, ranks, rank);
        Ok(Arc::new(Self { participant: participant.into(), device: self.device.clone() }))
    }

    fn fail(&self, cause: &str) {
        self.participant.fail(cause.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::error::Error;

    #[test]
    fn parts_of_another_length_than_expected_are_a_mismatch() {
        for sent in [1, 3] {
            let mut engines = Threads::world(&vec![Device::default(); 2], Duration::from_secs(60));
            let (last, first) = (engines.remove(1), engines.remove(0));
            let exchange = move |rank: &Threads, sent: [usize; 2], received: [usize; 2]| {
                let tensor = Tensor::zeros([sent.iter().sum::<usize>()], &Device::default());
                let counts = PairCounts { sent: sent.into(), received: received.into() };
                rank.all_to_all(tensor, &counts)?.wait()
            };
            let error = thread::scope(|scope| {
                let received = scope.spawn(move || exchange(&last, [0, 0], [2, 0]));
                _ = exchange(&first, [0, sent], [0, 0]);
                received.join().unwrap().unwrap_err()
            });
            let Error::Mismatch { calls } = &error else { panic!("{error}") };
            let expected = format!("rank 0: all_to_all with {sent} elements for rank 1");
            assert!(calls.starts_with(&expected), "{calls}");
            assert!(calls.ends_with("rank 1: all_to_all with 2 elements from rank 0"), "{calls}");
        }
    }

    #[test]
    fn splitting_is_not_taken_for_a_gather_of_bytes() {
        let mut engines = Threads::world(&vec![Device::default(); 2], Duration::from_secs(60));
        let (last, first) = (engines.remove(1), engines.remove(0));
        let error = thread::scope(|scope| {
            let split = scope.spawn(move || last.split(0, 0).map(|_| ()));
            let gathered = first.all_gather_bytes(vec![1; 24]).map(|_| ());
            [gathered, split.join().unwrap()].map(Result::unwrap_err)
        });
        for error in error {
            let Error::Mismatch { calls } = &error else { panic!("{error}") };
            assert!(calls.contains("split") && calls.contains("all_gather_bytes"), "{calls}");
        }
    }
}
