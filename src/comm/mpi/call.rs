//! Calls of MPI in flight, with the memory that MPI may access until they have finished.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::{forget, take};
use std::os::raw::{c_int, c_void};
use std::sync::Arc;

use burn::tensor::{Bytes, DType, TensorData};
use mpi::ffi;
use mpi::topology::Communicator as _;

use super::library::{RawCommunicator, check_code};
use crate::comm::control::{COMPARE_AFTER, Control, ExternalCall};
use crate::comm::counts::offsets;
use crate::error::{Error, Result};
use crate::host;

/// The addresses that are passed for empty buffers, to send from and to receive into. An empty
/// `Vec` has a dangling pointer, which may equal an address with a meaning for MPI, such as
/// `MPI_IN_PLACE`.
// Two, since Open MPI takes equal addresses for `MPI_IN_PLACE`. A rank without data then leaves
// `MPI_Ialltoallv` early, and some versions don't count the call: the rank's later messages go to
// wrong calls (`nbc_ialltoallv.c`).
static EMPTY_BUFFERS: [[u8; 8]; 2] = [[0; 8]; 2];

/// The arguments that all calls have in common.
pub struct Arguments<'a> {
    pub send: *const c_void,
    pub receive: *mut c_void,
    /// The type of the elements, which MPI moves and does not compute with.
    pub dtype: ffi::MPI_Datatype,
    /// The lengths and offsets, for calls that have them: in an exchange, those that are sent and
    /// then those that are received.
    pub counts: &'a [Vec<c_int>],
    pub comm: ffi::MPI_Comm,
    pub request: &'a mut ffi::MPI_Request,
}

/// A call of MPI in flight, with all memory that MPI may access until it has finished.
pub struct StartedCall {
    comm: Arc<RawCommunicator>,
    call: ExternalCall,
    signature: Signature,
    request: ffi::MPI_Request,
    /// Read by MPI.
    send: TensorData,
    /// Written by MPI.
    receive: Bytes,
    /// Read by MPI.
    counts: Vec<Vec<c_int>>,
    is_finished: bool,
}

// SAFETY: any thread may test requests, and the buffers are on the heap, where they stay when the
// struct moves.
unsafe impl Send for StartedCall {}

/// Hashes of the call, exchanged by a call of MPI of its own: every rank sends every rank the hash
/// of the call and of the elements that it sends there.
struct Signature {
    request: ffi::MPI_Request,
    /// Read by MPI.
    sent: Vec<u64>,
    /// Written by MPI.
    received: Vec<u64>,
    /// The numbers that this rank has to receive.
    expected: Vec<u64>,
    is_finished: bool,
}

impl StartedCall {
    /// Starts a call and the exchange of its signatures. `launch` passes the call to MPI.
    pub fn new(
        comm: &Arc<RawCommunicator>,
        rank: usize,
        call: ExternalCall,
        send: TensorData,
        received: usize,
        counts: Vec<Vec<c_int>>,
        launch: impl FnOnce(Arguments<'_>) -> c_int,
    ) -> Result<Self> {
        let [sends, receives] = match &counts[..] {
            [sends, _, receives, _] => [&sends[..], receives],
            _ => [&[][..]; 2],
        };
        let signature = Signature::start(comm, rank, &call, sends, receives)?;
        let dtype = send.dtype();
        let mut started = Self {
            comm: comm.clone(),
            call,
            signature,
            // SAFETY: a constant of the library.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            send,
            receive: host::zeros(received * dtype.size(), dtype),
            counts,
            is_finished: false,
        };
        let Self { send, receive, counts, request, .. } = &mut started;
        let [no_send, no_receive] = EMPTY_BUFFERS.each_ref().map(|buffer| buffer.as_ptr());
        let send = match send.as_bytes() {
            [] => no_send.cast(),
            bytes => bytes.as_ptr().cast(),
        };
        let receive = match &mut receive[..] {
            [] => no_receive.cast_mut().cast(),
            bytes => bytes.as_mut_ptr().cast(),
        };
        let (dtype, comm) = (datatype(dtype), comm.raw());
        let code = launch(Arguments { send, receive, dtype, counts, comm, request });
        check_code(code, rank, &started.call.call)?;
        Ok(started)
    }

    /// Returns the bytes of both buffers.
    pub fn bytes(&self) -> usize {
        self.send.as_bytes().len() + self.receive.len()
    }

    /// Waits until all ranks have made the same call and it has finished. Returns the received
    /// bytes.
    pub fn finish(mut self, control: &Control) -> Result<Bytes> {
        self.wait(control).map_err(|error| {
            self.comm.library.abandon();
            control.cause_of(&self.call, error, COMPARE_AFTER)
        })?;
        Ok(self.take_received())
    }

    fn take_received(&mut self) -> Bytes {
        std::mem::replace(&mut self.receive, host::zeros(0, DType::U8))
    }

    fn wait(&mut self, control: &Control) -> Result<()> {
        let Self { call, signature, request, is_finished, .. } = self;
        let rank = control.rank();
        // The signatures first: if they differ, the call itself may never finish.
        control.wait(call, || signature.test(rank, call))?;
        let mut pairs = signature.received.iter().zip(&signature.expected);
        if let Some(other) = pairs.position(|(received, expected)| received != expected) {
            let calls =
                format!("rank {rank}: {}, rank {other}: another call, or other counts", call.call);
            return Err(Error::Mismatch { calls });
        }
        control.wait(call, || {
            *is_finished = *is_finished || test(request, rank, call)?;
            Ok(*is_finished)
        })
    }
}

impl Drop for StartedCall {
    fn drop(&mut self) {
        if !self.is_finished {
            // MPI may still read and write this memory: leak it.
            forget(std::mem::replace(&mut self.send, TensorData::new(Vec::<u8>::new(), [0])));
            forget(self.take_received());
            forget(take(&mut self.counts));
        }
    }
}

impl Signature {
    /// `sends` and `receives` have a number of elements for every rank, or none.
    fn start(
        comm: &RawCommunicator,
        rank: usize,
        call: &ExternalCall,
        sends: &[c_int],
        receives: &[c_int],
    ) -> Result<Self> {
        let size = comm.comm.size() as usize;
        let hashes = |counts: &[c_int]| -> Vec<u64> {
            (0..size)
                .map(|rank| {
                    let mut hasher = DefaultHasher::new();
                    (call.number, &call.call, counts.get(rank)).hash(&mut hasher);
                    hasher.finish()
                })
                .collect()
        };
        let mut signature = Self {
            // SAFETY: a constant of the library.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            sent: hashes(sends),
            received: vec![0; size],
            expected: hashes(receives),
            is_finished: false,
        };
        // SAFETY: both buffers are on the heap and live until the request has finished.
        let code = unsafe {
            ffi::MPI_Ialltoall(
                signature.sent.as_ptr().cast(),
                1,
                ffi::RSMPI_UINT64_T,
                signature.received.as_mut_ptr().cast(),
                1,
                ffi::RSMPI_UINT64_T,
                comm.raw(),
                &mut signature.request,
            )
        };
        check_code(code, rank, &call.call)?;
        Ok(signature)
    }

    fn test(&mut self, rank: usize, call: &ExternalCall) -> Result<bool> {
        self.is_finished = self.is_finished || test(&mut self.request, rank, call)?;
        Ok(self.is_finished)
    }
}

impl Drop for Signature {
    fn drop(&mut self) {
        if !self.is_finished {
            // MPI may still read and write this memory: leak it.
            forget(take(&mut self.sent));
            forget(take(&mut self.received));
        }
    }
}

/// Returns `true` if a request has finished.
fn test(request: &mut ffi::MPI_Request, rank: usize, call: &ExternalCall) -> Result<bool> {
    let mut flag = 0;
    // SAFETY: the request belongs to a started call, or is null when it has finished.
    let code = unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
    check_code(code, rank, &call.call)?;
    Ok(flag != 0)
}

/// Returns a type of MPI with the size of a tensor's elements, which MPI only moves.
fn datatype(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match dtype.size() {
            2 => ffi::RSMPI_UINT16_T,
            4 => ffi::RSMPI_FLOAT,
            size => unreachable!("exchanged types have 2 or 4 bytes, got {size}"),
        }
    }
}

/// Returns the lengths and offsets of parts as MPI's integers.
pub fn layout(counts: &[usize], collective: &'static str, rank: usize) -> Result<[Vec<c_int>; 2]> {
    let int = |number: usize| {
        c_int::try_from(number).map_err(|_| Error::Collective {
            collective,
            rank,
            reason: format!(
                "the buffer is too long, since MPI counts in an int: expected at most {} elements, \
                 got {number}",
                c_int::MAX
            ),
            remedy: "set a smaller `bucket_mb`, or split a single parameter of that size into \
                     several",
        })
    };
    int(counts.iter().sum())?;
    let ints = |numbers: &[usize]| numbers.iter().map(|number| int(*number)).collect::<Result<_>>();
    Ok([ints(counts)?, ints(&offsets(counts))?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_of_more_elements_than_an_int_can_count_is_refused_with_a_remedy() {
        let max = c_int::MAX as usize;
        assert_eq!(
            layout(&[max - 1, 0, 1], "gather", 0).unwrap()[1],
            [0, c_int::MAX - 1, c_int::MAX - 1]
        );
        let error = layout(&[max, 1], "gather", 0).unwrap_err().to_string();
        assert!(error.contains("split a single parameter"), "{error}");
    }
}
