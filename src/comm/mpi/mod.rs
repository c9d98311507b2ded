//! The engine for ranks that are processes on one host or many, over MPI (the MPI standard, version
//! 3).
//!
//! Tensors pass through the memory of the host. MPI moves elements and adds up nothing:
//! [`exact_reduction`] takes the sums, exactly and in the order of ranks. MPI's own reductions
//! would be neither, and in Open MPI a non-blocking reduce_scatter sends everything to rank 0
//! first. With every call, every pair of ranks exchanges a signature, so that ranks that make
//! different calls get an error instead of garbage.

mod call;
mod library;

use std::os::raw::c_int;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use mpi::ffi;
use mpi::topology::{Color, Communicator as _};
use mpi::traits::Root;

use super::call::Call;
use super::control::{COMPARE_AFTER, Control, Endpoint, random_secret};
use super::reduce_by_exchange::{self, MovesParts};
use super::validate::assert_fits;
use super::{Engine, Launch, PairCounts, Pending, PendingParts, ReduceOp};
use crate::error::{Error, Result};
use crate::flat;
use call::{Arguments, StartedCall, layout};
use library::{Library, RawCommunicator};

const ENGINE: &str = "mpi";

/// The engine for ranks that are processes, over MPI. Tensors pass through the host.
#[derive(Debug)]
pub struct Mpi {
    // In this order: only a process that has left the world may finalize MPI, which waits for the
    // others.
    control: Arc<Control>,
    comm: Arc<RawCommunicator>,
    device: Device,
}

impl Mpi {
    /// Connects a process that mpirun or srun started, and returns its engine, with results on
    /// `device`. A rank that waits for another longer than `deadline` ends the world.
    ///
    /// The ranks connect to each other at [`Launch::address`], with the secret of the launch.
    /// Without an address, rank 0 sends the others its address and a random secret over MPI.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if MPI can't be used, [`Error::Launch`] if MPI's ranks are not the ranks
    /// of the launcher, [`Error::Rendezvous`] if the ranks can't connect to each other.
    pub fn connect(launch: &Launch, device: Device, deadline: Duration) -> Result<Self> {
        let library = Library::load(launch.rank)?;
        // A duplicate, whose messages can't be taken for those that a program sends by itself.
        let world = library.universe.world().duplicate();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if (rank, size) != (launch.rank, launch.world_size) {
            // Other ranks may be right, and would wait for this one at the end, unless an earlier
            // world of theirs ends MPI.
            if Arc::strong_count(&library) == 1 {
                library.abandon();
            }
            return Err(Error::Launch {
                variable: "the rank".into(),
                value: format!("{} of {}", launch.rank, launch.world_size),
                reason: format!("expected {rank} of {size}, as MPI reports"),
                remedy: "start the program with the mpirun or srun of this MPI, and with no other \
                         launcher",
            });
        }
        let comm = RawCommunicator::new(world, library);
        let endpoint = match &launch.address {
            Some((host, port)) => {
                Endpoint::at(rank, host, *port).map(|endpoint| (endpoint, String::new()))
            }
            None => Self::agree_on_endpoint(&comm, rank),
        };
        let joined = endpoint.and_then(|(endpoint, random_secret)| {
            let secret = if launch.secret.is_empty() { &random_secret } else { &launch.secret };
            endpoint.join(rank, size, secret, deadline)
        });
        // A rank that can't connect to the others can't finalize MPI with them either.
        let control = joined.inspect_err(|_| comm.library.abandon())?;
        Ok(Self { control: Arc::new(control), comm, device })
    }

    /// Opens any free port on rank 0, which sends the others its address and a random secret over
    /// MPI.
    fn agree_on_endpoint(comm: &RawCommunicator, rank: usize) -> Result<(Endpoint, String)> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        // A collective call, which all ranks make, before rank 0 alone listens.
        let is_one_host = comm.comm.split_shared(0).size() == comm.comm.size();
        let host = if is_one_host { "127.0.0.1".to_owned() } else { host };
        let opened = (rank == 0).then(|| Ok((Endpoint::at_free_port(&host)?, random_secret()?)));
        // An empty text tells the others that rank 0 can't listen.
        let text = match &opened {
            Some(Ok((endpoint, secret))) => format!("{secret} {}", endpoint.address),
            _ => String::new(),
        };
        let text = broadcast_text(comm, text);
        match (opened, text.split_once(' ')) {
            (Some(opened), _) => opened,
            (None, Some((secret, address))) => {
                Ok((Endpoint::known(address.to_owned()), secret.to_owned()))
            }
            (None, None) => Err(Error::PeerFailed {
                rank: 0,
                cause: "it could not listen for the other ranks".into(),
            }),
        }
    }

    /// Reads the elements of a tensor into the memory of the host.
    fn read(&self, tensor: Tensor<1>) -> Result<TensorData> {
        let dtype = tensor.dtype();
        // Not every backend accepts a tensor without elements.
        if tensor.dims() == [0] {
            return Ok(TensorData::from_bytes_vec(vec![], [0], dtype));
        }
        tensor.try_into_data().map_err(|error| Error::Engine {
            engine: ENGINE,
            rank: self.rank(),
            operation: "read a tensor".into(),
            reason: error.to_string(),
            remedy: "fix the operation on this device that failed first",
        })
    }

    /// Starts a call that receives `received` elements. `launch` passes the call to MPI.
    fn start(
        &self,
        call: Call,
        tensor: Tensor<1>,
        received: usize,
        counts: Vec<Vec<c_int>>,
        launch: impl FnOnce(Arguments<'_>) -> c_int,
    ) -> Result<Pending> {
        // Before the call is numbered: where reading fails, this rank has not made the call.
        let data = self.read(tensor)?;
        let (device, dtype) = (self.device.clone(), data.dtype());
        let call = self.control.begin_call(call);
        let started =
            StartedCall::new(&self.comm, self.rank(), call.clone(), data, received, counts, launch)
                .map_err(|error| {
                    // The call counts as made: the others would wait for it until the deadline.
                    self.comm.library.abandon();
                    self.control.cause_of(&call, error, COMPARE_AFTER)
                })?;
        let control = self.control.clone();
        Ok(Pending::new(started.bytes(), move || {
            let bytes = started.finish(&control)?;
            if received == 0 {
                return Ok(flat::empty(dtype, &device));
            }
            let data = TensorData::from_bytes(bytes, [received], dtype);
            Ok(Tensor::from_data(data, (&device, dtype)))
        }))
    }
}

/// Returns rank 0's text on all ranks.
fn broadcast_text(comm: &RawCommunicator, text: String) -> String {
    let root = comm.comm.process_at_rank(0);
    let mut length = [text.len() as u64];
    root.broadcast_into(&mut length[..]);
    let mut bytes = text.into_bytes();
    bytes.resize(length[0] as usize, 0);
    root.broadcast_into(&mut bytes[..]);
    String::from_utf8_lossy(&bytes).into_owned()
}

impl MovesParts for Mpi {
    fn share(&self) -> Self {
        let Self { control, comm, device } = self;
        Self { control: control.clone(), comm: comm.clone(), device: device.clone() }
    }

    fn exchange(
        &self,
        call: Call,
        tensor: Tensor<1>,
        send: &[usize],
        receive: &[usize],
    ) -> Result<Pending> {
        let (collective, rank) = (call.collective, self.rank());
        assert_fits(&tensor, send.iter().sum(), [send, receive], self.size());
        let received = receive.iter().sum();
        let counts = [layout(send, collective, rank)?, layout(receive, collective, rank)?];
        self.start(call, tensor, received, counts.concat(), |arguments| {
            let [send_counts, send_offsets, receive_counts, receive_offsets] =
                [0, 1, 2, 3].map(|index: usize| arguments.counts[index].as_ptr());
            // SAFETY: the buffers hold the sums of their counts, and live until the request has
            // finished, as the counts do.
            unsafe {
                ffi::MPI_Ialltoallv(
                    arguments.send,
                    send_counts,
                    send_offsets,
                    arguments.dtype,
                    arguments.receive,
                    receive_counts,
                    receive_offsets,
                    arguments.dtype,
                    arguments.comm,
                    arguments.request,
                )
            }
        })
    }
}

impl Engine for Mpi {
    fn engine_name(&self) -> &'static str {
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

    fn communicators(&self) -> usize {
        self.control.groups()
    }

    fn has_exact_sums(&self) -> bool {
        true
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        reduce_by_exchange::all_reduce(self, tensor, op)
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        reduce_by_exchange::reduce_scatter(self, tensor, counts, op, dtype)
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        reduce_by_exchange::reduce_scatter(self, tensor, counts, ReduceOp::Sum, DType::F32)
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let call = Call::all_gather(&tensor, counts);
        let sent = counts[self.rank()];
        assert_fits(&tensor, sent, [counts], self.size());
        let received = counts.iter().sum();
        let counts = layout(counts, "all_gather", self.rank())?.into();
        self.start(call, tensor, received, counts, |arguments| {
            let (lengths, offsets) = (arguments.counts[0].as_ptr(), arguments.counts[1].as_ptr());
            // SAFETY: the buffers hold this rank's count and the sum of the counts, and live until
            // the request has finished, as the counts do.
            unsafe {
                ffi::MPI_Iallgatherv(
                    arguments.send,
                    sent as c_int,
                    arguments.dtype,
                    arguments.receive,
                    lengths,
                    offsets,
                    arguments.dtype,
                    arguments.comm,
                    arguments.request,
                )
            }
        })
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        let length = tensor.dims()[0];
        let call = Call::broadcast(&tensor, root);
        let counts = layout(&[length], "broadcast", self.rank())?.into();
        let bytes = flat::bytes(&tensor);
        let is_root = root == self.rank();
        self.start(call, tensor, length, counts, |arguments| {
            let Arguments { send, receive, dtype, counts, comm, request } = arguments;
            // SAFETY: both buffers hold that many elements and don't overlap, and the one that is
            // passed to MPI lives until the request has finished.
            unsafe {
                // MPI has one buffer for both directions.
                if is_root {
                    receive.cast::<u8>().copy_from_nonoverlapping(send.cast(), bytes);
                }
                ffi::MPI_Ibcast(receive, counts[0][0], dtype, root as c_int, comm, request)
            }
        })
    }

    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        self.exchange(Call::all_to_all(&tensor), tensor, &counts.sent, &counts.received)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
        let call = Call::gather(&tensor, counts, root);
        let sent = counts[self.rank()];
        assert_fits(&tensor, sent, [counts], self.size());
        let received = if root == self.rank() { counts.iter().sum() } else { 0 };
        let counts = layout(counts, "gather", self.rank())?.into();
        self.start(call, tensor, received, counts, |arguments| {
            let (lengths, offsets) = (arguments.counts[0].as_ptr(), arguments.counts[1].as_ptr());
            // SAFETY: the buffers hold this rank's count and, on the root, the sum of the counts,
            // and live until the request has finished, as the counts do.
            unsafe {
                ffi::MPI_Igatherv(
                    arguments.send,
                    sent as c_int,
                    arguments.dtype,
                    arguments.receive,
                    lengths,
                    offsets,
                    arguments.dtype,
                    root as c_int,
                    arguments.comm,
                    arguments.request,
                )
            }
        })
        .map(Pending::in_one_tensor)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.control.all_gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        self.control.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
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

    fn set_busy_limit(&self, limit: Duration) {
        self.control.set_busy_limit(limit);
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Engine>> {
        let (control, first) = self.control.split(color, key)?;
        // The rank of a group's first member is different for every group, whatever the colors are.
        let group = Color::with_value(first as c_int);
        let comm = self.comm.comm.split_by_color_with_key(group, control.rank() as c_int);
        let comm = comm.expect("MPI returns a communicator to every rank that gives a color");
        Ok(Arc::new(Self {
            control: Arc::new(control),
            comm: RawCommunicator::new(comm, self.comm.library.clone()),
            device: self.device.clone(),
        }))
    }

    fn fail(&self, cause: &str) {
        self.comm.library.abandon();
        self.control.fail(cause);
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // MPI would wait for ranks that have failed, or make ranks wait that learn of this panic.
        if std::thread::panicking() || self.control.has_failed() {
            self.comm.library.abandon();
        }
    }
}
