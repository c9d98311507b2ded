//! The engine for ranks that are processes on one host or many, over MPI (the MPI standard, version 3).
//!
//! Tensors pass through the memory of the host. MPI moves elements and adds up nothing: sums are those
//! of [`exchange`], exact and in the order of ranks. Its own reductions would be neither, and in Open
//! MPI a reduce_scatter that does not block sends everything to rank 0 first. With every call goes a
//! signature of it, so that ranks which make different calls are told instead of given garbage.

mod call;
mod library;

use std::os::raw::c_int;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use mpi::ffi;
use mpi::topology::{Color, Communicator as _};
use mpi::traits::Root;

use super::control::{Control, Meeting, PATIENCE, random_secret};
use super::exchange::{self, Exchange};
use super::{
    Call, Communicator, Pending, ReduceOp, check_counts, check_dtype, check_root, exchange_pairs,
};
use crate::dist::{Launch, flat};
use crate::error::{Error, Result};
use call::{Arguments, Started, layout};
use library::{Group, Library};

const ENGINE: &str = "mpi";

/// Engine of processes over MPI.
#[derive(Debug)]
pub struct Mpi {
    // In this order: only a process that has left the world can finalise, which waits for the others.
    control: Arc<Control>,
    group: Arc<Group>,
    device: Device,
}

impl Mpi {
    /// The engine of a process that mpirun or srun started, with results on the device. A rank that
    /// waits for another longer than `deadline` gives up for all.
    ///
    /// The ranks find together where [`Launch::address`] says, with its secret. Without an address,
    /// rank 0 tells the others by MPI where it listens, and a random secret.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if MPI can't be used, [`Error::Launch`] if it counts other ranks than the
    /// launcher, [`Error::Rendezvous`] if the ranks don't find together.
    pub fn connect(launch: &Launch, device: Device, deadline: Duration) -> Result<Self> {
        let library = Library::load(launch.rank)?;
        let world = library.universe.world().duplicate();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if (rank, size) != (launch.rank, launch.world_size) {
            return Err(Error::Launch {
                variable: "the rank".into(),
                value: format!("{} of {}", launch.rank, launch.world_size),
                reason: format!("but MPI says {rank} of {size}"),
                remedy: "start the program with the mpirun or srun of this MPI, and with no other launcher",
            });
        }
        let group = Group::new(world, library);
        let meeting = match &launch.address {
            Some((host, port)) => {
                Meeting::at(rank, host, *port).map(|meeting| (meeting, String::new()))
            }
            None => Self::meeting(&group, rank),
        };
        let joined = meeting.and_then(|(meeting, random)| {
            let secret = if launch.secret.is_empty() { &random } else { &launch.secret };
            meeting.join(rank, size, secret, deadline)
        });
        // A rank that does not find the others can't finalise MPI with them either.
        let control = joined.inspect_err(|_| group.library.abandon())?;
        Ok(Self { control: Arc::new(control), group, device })
    }

    /// Opens a port anywhere on rank 0, which tells the others by MPI where, and a random secret.
    fn meeting(group: &Group, rank: usize) -> Result<(Meeting, String)> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let one_host = group.comm.split_shared(0).size() == group.comm.size();
        let host = if one_host { "127.0.0.1".to_owned() } else { host };
        let opened = (rank == 0).then(|| Ok((Meeting::anywhere(&host)?, random_secret()?)));
        // Nothing says that rank 0 could not listen.
        let told = match &opened {
            Some(Ok((meeting, secret))) => format!("{secret} {}", meeting.address),
            _ => String::new(),
        };
        let told = broadcast(group, told);
        match (opened, told.split_once(' ')) {
            (Some(opened), _) => opened,
            (None, Some((secret, address))) => {
                Ok((Meeting::known(address.to_owned()), secret.to_owned()))
            }
            (None, None) => Err(Error::PeerFailed {
                rank: 0,
                cause: "it could not listen for the others".into(),
            }),
        }
    }

    /// The elements of a tensor, on the host.
    fn read(&self, tensor: Tensor<1>) -> Result<TensorData> {
        let (dtype, is_empty) = (tensor.dtype(), tensor.dims() == [0]);
        if is_empty {
            return Ok(TensorData::from_bytes_vec(vec![], [0], dtype));
        }
        tensor.try_into_data().map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank(),
            operation: "read a tensor".into(),
            reason: error.to_string(),
            remedy: "an earlier operation on this device failed: fix that first",
        })
    }

    /// Starts a call, which `give` hands to MPI, and which receives `received` elements.
    fn start(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        counts: Vec<Vec<c_int>>,
        give: impl FnOnce(Arguments<'_>) -> c_int,
    ) -> Result<Pending> {
        let data = self.read(tensor)?;
        let (device, dtype) = (self.device.clone(), data.dtype());
        let call = self.control.announce(call);
        let started =
            Started::new(&self.group, self.rank(), call.clone(), data, received, counts, give)
                .map_err(|error| {
                    // The call is counted as made: the others would wait for it until the deadline.
                    self.group.library.abandon();
                    self.control.cause_of(&call, error, PATIENCE)
                })?;
        let control = self.control.clone();
        Ok(Pending::new(started.bytes(), move || {
            let bytes = started.finish(&control)?;
            if received == 0 {
                return Ok(flat::empty(dtype, &device));
            }
            let data = TensorData::from_bytes_vec(bytes, [received], dtype);
            Ok(Tensor::from_data(data, (&device, dtype)))
        }))
    }
}

/// Rank 0's text, on all ranks.
fn broadcast(group: &Group, text: String) -> String {
    let root = group.comm.process_at_rank(0);
    let mut length = [text.len() as u64];
    root.broadcast_into(&mut length[..]);
    let mut bytes = text.into_bytes();
    bytes.resize(length[0] as usize, 0);
    root.broadcast_into(&mut bytes[..]);
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Exchange for Mpi {
    fn share(&self) -> Self {
        let Self { control, group, device } = self;
        Self { control: control.clone(), group: group.clone(), device: device.clone() }
    }

    fn exchange(
        &self,
        call: Call,
        tensor: Tensor<1>,
        send: &[usize],
        receive: &[usize],
    ) -> Result<Pending> {
        let (collective, rank) = (call.collective, self.rank());
        let received = receive.iter().sum();
        let counts = [layout(send, collective, rank)?, layout(receive, collective, rank)?];
        self.start(call, tensor, received, counts.concat(), |given| {
            let [send, send_at, receive, receive_at] =
                [0, 1, 2, 3].map(|part: usize| given.counts[part].as_ptr());
            // SAFETY: the buffers hold the sums of their counts, and live until the request has
            // finished, as the counts do.
            unsafe {
                ffi::MPI_Ialltoallv(
                    given.send,
                    send,
                    send_at,
                    given.of,
                    given.receive,
                    receive,
                    receive_at,
                    given.of,
                    given.comm,
                    given.request,
                )
            }
        })
    }
}

impl Communicator for Mpi {
    fn engine(&self) -> &'static str {
        ENGINE
    }

    fn version(&self) -> String {
        let version = mpi::environment::library_version().unwrap_or_default();
        version.lines().next().unwrap_or_default().split(',').next().unwrap_or_default().to_owned()
    }

    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        exchange::all_reduce(self, tensor, op)
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        exchange::reduce_scatter(self, tensor, counts, op, dtype)
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        exchange::reduce_scatter(self, tensor, counts, ReduceOp::Sum, DType::F32)
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        check_dtype("all_gather", self.rank(), tensor.dtype())?;
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("all_gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let call = Call { counts: counts.to_vec(), ..Call::on("all_gather", &tensor) };
        let all = counts.iter().sum();
        let counts = layout(counts, "all_gather", self.rank())?.into();
        self.start(call, tensor, all, counts, |given| {
            let (lengths, offsets) = (given.counts[0].as_ptr(), given.counts[1].as_ptr());
            // SAFETY: the buffers hold this rank's count and the sum of the counts, and live until
            // the request has finished, as the counts do.
            unsafe {
                ffi::MPI_Iallgatherv(
                    given.send,
                    own as c_int,
                    given.of,
                    given.receive,
                    lengths,
                    offsets,
                    given.of,
                    given.comm,
                    given.request,
                )
            }
        })
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        check_dtype("broadcast", self.rank(), tensor.dtype())?;
        check_root("broadcast", self.rank(), self.size(), root)?;
        let length = tensor.dims()[0];
        let call =
            Call { counts: vec![length], root: Some(root), ..Call::on("broadcast", &tensor) };
        let counts = layout(&[length], "broadcast", self.rank())?.into();
        let (bytes, is_root) = (length * tensor.dtype().size(), root == self.rank());
        self.start(call, tensor, length, counts, |given| {
            let Arguments { send, receive, of, counts, comm, request } = given;
            // SAFETY: both buffers hold that many elements and don't overlap, and the one that is
            // given to MPI lives until the request has finished.
            unsafe {
                if is_root {
                    receive.cast::<u8>().copy_from_nonoverlapping(send.cast(), bytes);
                }
                ffi::MPI_Ibcast(receive, counts[0][0], of, root as c_int, comm, request)
            }
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending> {
        let (rank, size) = (self.rank(), self.size());
        check_dtype("all_to_all", rank, tensor.dtype())?;
        check_counts("all_to_all", rank, size, send, (send.iter().sum(), tensor.dims()[0]))?;
        check_counts("all_to_all", rank, size, receive, (0, 0))?;
        exchange_pairs(self, send, receive)?;
        self.exchange(Call::on("all_to_all", &tensor), tensor, send, receive)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<Pending> {
        check_dtype("gather", self.rank(), tensor.dtype())?;
        check_root("gather", self.rank(), self.size(), root)?;
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let call =
            Call { counts: counts.to_vec(), root: Some(root), ..Call::on("gather", &tensor) };
        let all = if root == self.rank() { counts.iter().sum() } else { 0 };
        let counts = layout(counts, "gather", self.rank())?.into();
        self.start(call, tensor, all, counts, |given| {
            let (lengths, offsets) = (given.counts[0].as_ptr(), given.counts[1].as_ptr());
            // SAFETY: the buffers hold this rank's count and, on the root, the sum of the counts, and
            // live until the request has finished, as the counts do.
            unsafe {
                ffi::MPI_Igatherv(
                    given.send,
                    own as c_int,
                    given.of,
                    given.receive,
                    lengths,
                    offsets,
                    given.of,
                    root as c_int,
                    given.comm,
                    given.request,
                )
            }
        })
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.control.all_gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        check_root("gather_bytes", self.rank(), self.size(), root)?;
        self.control.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        check_root("broadcast_bytes", self.rank(), self.size(), root)?;
        self.control.broadcast_bytes(bytes, root)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        self.control.first_bytes(bytes)
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.control.or_bytes(bytes)
    }

    fn set_busy(&self, busy: bool) {
        self.control.set_busy(busy);
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let (control, first) = self.control.split(color, key)?;
        // The first member's rank tells the groups apart, whatever the colors are.
        let group = Color::with_value(first as c_int);
        let comm = self.group.comm.split_by_color_with_key(group, control.rank() as c_int);
        let comm = comm.expect("every rank gives a color");
        Ok(Box::new(Self {
            control: Arc::new(control),
            group: Group::new(comm, self.group.library.clone()),
            device: self.device.clone(),
        }))
    }

    fn fail(&self, cause: &str) {
        self.group.library.abandon();
        self.control.fail(cause);
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // MPI would wait for ranks that have failed, or be waited for by those that hear of this panic.
        if std::thread::panicking() || self.control.has_failed() {
            self.group.library.abandon();
        }
    }
}
