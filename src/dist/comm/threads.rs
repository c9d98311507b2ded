//! The engine for ranks that are threads of one process, on one device or several.
//!
//! Every rank leaves its tensor and computes its own part of the result from what all have left,
//! always in the same order: results do not depend on timing.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};

use super::rendezvous::{Hall, Seat, Ticket};
use super::{
    Call, Communicator, Pending, ReduceOp, before, bytes_of, check_counts, check_dtype,
    check_pairs, check_root, members, offer, reduce,
};
use crate::dist::flat;
use crate::error::Result;

/// Engine of threads in one process.
#[derive(Debug)]
pub struct Threads {
    seat: Seat<Call, Payload>,
    device: Device,
}

#[derive(Clone)]
enum Payload {
    Tensor(Tensor<1>),
    /// A tensor, how many of its elements go to every rank, and how many come from it.
    Parts(Tensor<1>, Arc<[usize]>, Arc<[usize]>),
    Bytes(Arc<[u8]>),
}

impl Threads {
    /// An engine for every rank of a world; the results of rank `r` are on `devices[r]`. A rank that
    /// waits for another longer than `deadline` gives up for all.
    pub fn world(devices: &[Device], deadline: Duration) -> Vec<Self> {
        let seats = Hall::seats(devices.len(), deadline).into_iter();
        seats.zip(devices).map(|(seat, device)| Self { seat, device: device.clone() }).collect()
    }

    /// The same engine, with results on another device.
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// The first rank of the world that failed.
    pub fn failed(&self) -> Option<usize> {
        self.seat.failed()
    }

    /// Says that this rank makes no further calls: whoever waits for one is told.
    pub fn leave(&self) {
        self.seat.leave();
    }

    fn arrive(&self, call: Call, payload: Payload) -> Result<Ticket<Call, Payload>> {
        Ok(self.seat.arrive(call, payload)?)
    }

    /// The bytes of all ranks.
    fn meet(&self, collective: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>> {
        self.meet_for(Call::new(collective), bytes)
    }

    fn meet_for(&self, call: Call, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>> {
        let payloads = self.arrive(call, Payload::Bytes(bytes.into()))?.meet()?.into_iter();
        let bytes = payloads.map(|payload| match payload {
            Payload::Bytes(bytes) => bytes,
            _ => unreachable!("the same call leaves the same payload"),
        });
        Ok(bytes.collect())
    }

    /// Starts a collective whose result `combine` computes from the tensors of all ranks.
    fn start(
        &self,
        call: Call,
        tensor: Tensor<1>,
        combine: impl FnOnce(Vec<Tensor<1>>, &Device) -> Tensor<1> + Send + 'static,
    ) -> Result<Pending> {
        check_dtype(call.collective, self.rank(), tensor.dtype())?;
        let (device, bytes) = (self.device.clone(), bytes_of(&tensor));
        let ticket = self.arrive(call, Payload::Tensor(tensor))?;
        Ok(Pending::new(bytes, move || {
            let tensors = ticket.meet()?.into_iter().map(|payload| match payload {
                Payload::Tensor(tensor) => tensor,
                _ => unreachable!("the same call leaves the same payload"),
            });
            Ok(combine(tensors.collect(), &device))
        }))
    }

    /// Starts a [`reduce_scatter`](Communicator::reduce_scatter) whose result has the type `dtype`.
    fn scattered(
        &self,
        tensor: Tensor<1>,
        counts: &[usize],
        op: ReduceOp,
        dtype: DType,
    ) -> Result<Pending> {
        let lengths = (counts.iter().sum(), tensor.dims()[0]);
        check_counts("reduce_scatter", self.rank(), self.size(), counts, lengths)?;
        let call =
            Call { counts: counts.to_vec(), op: Some(op), ..Call::on("reduce_scatter", &tensor) };
        let (start, count) = (before(counts, self.rank()), counts[self.rank()]);
        self.start(call, tensor, move |tensors, device| {
            let parts = tensors.iter().map(|tensor| flat::part(tensor, start..start + count));
            reduce::parts(&parts.collect::<Vec<_>>(), op, dtype, device)
        })
    }
}

impl Communicator for Threads {
    fn engine(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.seat.rank()
    }

    fn size(&self) -> usize {
        self.seat.size()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        let call = Call {
            counts: tensor.dims().to_vec(),
            op: Some(op),
            ..Call::on("all_reduce", &tensor)
        };
        let dtype = tensor.dtype();
        self.start(call, tensor, move |tensors, device| reduce::parts(&tensors, op, dtype, device))
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        self.scattered(tensor, counts, op, dtype)
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        self.scattered(tensor, counts, ReduceOp::Sum, DType::F32)
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let expected = counts.get(self.rank()).copied().unwrap_or_default();
        let lengths = (expected, tensor.dims()[0]);
        check_counts("all_gather", self.rank(), self.size(), counts, lengths)?;
        let call = Call { counts: counts.to_vec(), ..Call::on("all_gather", &tensor) };
        let dtype = tensor.dtype();
        self.start(call, tensor, move |tensors, device| flat::join(tensors, dtype, device))
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        check_root("broadcast", self.rank(), self.size(), root)?;
        let call = Call {
            counts: tensor.dims().to_vec(),
            root: Some(root),
            ..Call::on("broadcast", &tensor)
        };
        self.start(call, tensor, move |mut tensors, device| {
            tensors.swap_remove(root).to_device(device)
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending> {
        let (rank, size) = (self.rank(), self.size());
        let lengths = (send.iter().sum(), tensor.dims()[0]);
        check_counts("all_to_all", rank, size, send, lengths)?;
        check_counts("all_to_all", rank, size, receive, (0, 0))?;
        check_dtype("all_to_all", rank, tensor.dtype())?;
        let (device, dtype, bytes) = (self.device.clone(), tensor.dtype(), bytes_of(&tensor));
        let call = Call::on("all_to_all", &tensor);
        let ticket = self.arrive(call, Payload::Parts(tensor, send.into(), receive.into()))?;
        Ok(Pending::new(bytes, move || {
            let payloads = ticket.meet()?.into_iter().map(|payload| match payload {
                Payload::Parts(tensor, send, receive) => (tensor, send, receive),
                _ => unreachable!("the same call leaves the same payload"),
            });
            let payloads: Vec<_> = payloads.collect();
            let counts =
                payloads.iter().map(|(_, send, receive)| [send.to_vec(), receive.to_vec()]);
            check_pairs(&counts.collect::<Vec<_>>())?;
            let parts = payloads.iter().map(|(tensor, send, _)| {
                let start = before(send, rank);
                flat::part(tensor, start..start + send[rank])
            });
            Ok(flat::join(parts.collect(), dtype, &device))
        }))
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<Pending> {
        check_root("gather", self.rank(), self.size(), root)?;
        let expected = counts.get(self.rank()).copied().unwrap_or_default();
        let lengths = (expected, tensor.dims()[0]);
        check_counts("gather", self.rank(), self.size(), counts, lengths)?;
        let call =
            Call { counts: counts.to_vec(), root: Some(root), ..Call::on("gather", &tensor) };
        let (dtype, is_root) = (tensor.dtype(), root == self.rank());
        self.start(call, tensor, move |tensors, device| match is_root {
            true => flat::join(tensors, dtype, device),
            false => flat::empty(dtype, device),
        })
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let all = self.meet("all_gather_bytes", bytes)?;
        Ok(all.iter().map(|bytes| bytes.to_vec()).collect())
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        check_root("gather_bytes", self.rank(), self.size(), root)?;
        let all = self.meet("gather_bytes", bytes)?;
        let is_root = root == self.rank();
        Ok(is_root.then(|| all.iter().map(|bytes| bytes.to_vec()).collect()))
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        check_root("broadcast_bytes", self.rank(), self.size(), root)?;
        Ok(self.meet("broadcast_bytes", bytes)?[root].to_vec())
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        // A byte before the others tells something empty from nothing.
        let own = bytes.map_or(vec![], |bytes| [vec![1], bytes].concat());
        let all = self.meet("first_bytes", own)?;
        let first = all.iter().position(|bytes| !bytes.is_empty());
        Ok(first.map(|rank| (rank, all[rank][1..].to_vec())))
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let call = Call { counts: vec![bytes.len()], ..Call::new("or_bytes") };
        let all = self.meet_for(call, bytes)?;
        let or =
            |all: Vec<u8>, own: &Arc<[u8]>| all.iter().zip(&**own).map(|(a, b)| a | b).collect();
        Ok(all[1..].iter().fold(all[0].to_vec(), or))
    }

    fn set_busy(&self, busy: bool) {
        self.seat.set_busy(busy);
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        // Everybody offers a number for a new group; that of a group's first member counts.
        let offers = self.all_gather_bytes(offer(color, key, self.seat.new_group()))?;
        let (group, ranks) = members(&offers, color);
        let rank = ranks.iter().position(|rank| *rank == self.rank()).expect("of the own color");
        Ok(Box::new(Self { seat: self.seat.join(group, ranks, rank), device: self.device.clone() }))
    }

    fn fail(&self, cause: &str) {
        self.seat.fail(cause.to_owned());
    }
}
