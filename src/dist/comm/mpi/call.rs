//! Calls of MPI that were started, with the memory that MPI may touch until they have finished.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::{forget, take};
use std::os::raw::{c_int, c_void};
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use mpi::ffi;
use mpi::topology::Communicator as _;

use super::library::{Group, check};
use crate::dist::comm::control::{Control, Elsewhere, PATIENCE};
use crate::error::{Error, Result};

/// The address that is passed for empty buffers. An empty `Vec` dangles, and its pointer might equal
/// one that MPI gives a meaning, such as `MPI_IN_PLACE`.
static EMPTY: [u8; 8] = [0; 8];

/// The arguments that all calls take.
pub struct Arguments<'a> {
    pub send: *const c_void,
    pub receive: *mut c_void,
    /// The type of the elements, which are moved and not computed with.
    pub of: ffi::MPI_Datatype,
    /// Lengths and offsets, where the call takes them.
    pub counts: &'a [Vec<c_int>],
    pub comm: ffi::MPI_Comm,
    pub request: &'a mut ffi::MPI_Request,
}

/// A call of MPI that was started, with all memory that it may touch until it has finished.
pub struct Started {
    group: Arc<Group>,
    call: Elsewhere,
    signature: Signature,
    request: ffi::MPI_Request,
    /// Held for MPI.
    send: TensorData,
    receive: Vec<u8>,
    counts: Vec<Vec<c_int>>,
    finished: bool,
}

// SAFETY: requests may be tested by any thread, and what is held is memory that moves with this.
unsafe impl Send for Started {}

/// A hash of what every rank calls.
struct Signature {
    request: ffi::MPI_Request,
    own: Box<[u64; 1]>,
    all: Vec<u64>,
    finished: bool,
}

impl Started {
    /// Starts a call and the exchange of its signatures. `give` hands the call to MPI.
    pub fn new(
        group: &Arc<Group>,
        rank: usize,
        call: Elsewhere,
        send: TensorData,
        received: usize,
        counts: Vec<Vec<c_int>>,
        give: impl FnOnce(Arguments<'_>) -> c_int,
    ) -> Result<Self> {
        let signature = Signature::start(group, rank, &call)?;
        let dtype = send.dtype();
        let mut started = Self {
            group: group.clone(),
            call,
            signature,
            // SAFETY: a constant.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            send,
            receive: vec![0; received * dtype.size()],
            counts,
            finished: false,
        };
        let Self { send, receive, counts, request, .. } = &mut started;
        let or_empty = |pointer: *const u8, is_empty| match is_empty {
            true => EMPTY.as_ptr(),
            false => pointer,
        };
        let send = or_empty(send.as_bytes().as_ptr(), send.as_bytes().is_empty()).cast();
        let is_empty = receive.is_empty();
        let receive = or_empty(receive.as_mut_ptr(), is_empty).cast_mut().cast();
        let (of, comm) = (moved_as(dtype), group.raw());
        let code = give(Arguments { send, receive, of, counts, comm, request });
        check(code, rank, &started.call.call)?;
        Ok(started)
    }

    /// Bytes of both buffers.
    pub fn bytes(&self) -> usize {
        self.send.as_bytes().len() + self.receive.len()
    }

    /// Waits until the ranks have made the same call, and then for what it has received.
    pub fn finish(mut self, control: &Control) -> Result<Vec<u8>> {
        self.wait(control).map_err(|error| {
            self.group.library.abandon();
            control.cause_of(&self.call, error, PATIENCE)
        })?;
        Ok(take(&mut self.receive))
    }

    fn wait(&mut self, control: &Control) -> Result<()> {
        let Self { call, signature, request, finished, .. } = self;
        let rank = control.rank();
        control.wait(call, || signature.test(rank, call))?;
        if signature.all.iter().any(|other| *other != signature.own[0]) {
            let calls = format!("rank {rank}: {}, another: something else", call.call);
            return Err(Error::Mismatch { calls });
        }
        control.wait(call, || {
            *finished = *finished || test(request, rank, call)?;
            Ok(*finished)
        })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.finished {
            // MPI may still read and write there.
            forget(std::mem::replace(&mut self.send, TensorData::new(Vec::<u8>::new(), [0])));
            forget(take(&mut self.receive));
            forget(take(&mut self.counts));
        }
    }
}

impl Signature {
    fn start(group: &Group, rank: usize, call: &Elsewhere) -> Result<Self> {
        let mut hasher = DefaultHasher::new();
        (call.number, &call.call).hash(&mut hasher);
        let mut signature = Self {
            // SAFETY: a constant.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            own: Box::new([hasher.finish()]),
            all: vec![0; group.comm.size() as usize],
            finished: false,
        };
        // SAFETY: both buffers are on the heap and live until the request has finished.
        let code = unsafe {
            ffi::MPI_Iallgather(
                signature.own.as_ptr().cast(),
                1,
                ffi::RSMPI_UINT64_T,
                signature.all.as_mut_ptr().cast(),
                1,
                ffi::RSMPI_UINT64_T,
                group.raw(),
                &mut signature.request,
            )
        };
        check(code, rank, &call.call)?;
        Ok(signature)
    }

    fn test(&mut self, rank: usize, call: &Elsewhere) -> Result<bool> {
        self.finished = self.finished || test(&mut self.request, rank, call)?;
        Ok(self.finished)
    }
}

impl Drop for Signature {
    fn drop(&mut self) {
        if !self.finished {
            // MPI may still write there.
            forget(take(&mut self.own));
            forget(take(&mut self.all));
        }
    }
}

/// Returns `true` if a request has finished.
fn test(request: &mut ffi::MPI_Request, rank: usize, call: &Elsewhere) -> Result<bool> {
    let mut flag = 0;
    // SAFETY: the request is that of a started call, or null when it has finished.
    let code = unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
    check(code, rank, &call.call)?;
    Ok(flag != 0)
}

/// MPI's type for the elements of a tensor, by their size.
fn moved_as(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match dtype.size() {
            2 => ffi::RSMPI_UINT16_T,
            _ => ffi::RSMPI_FLOAT,
        }
    }
}

/// Lengths and offsets of parts as MPI takes them.
pub fn layout(counts: &[usize], collective: &'static str, rank: usize) -> Result<[Vec<c_int>; 2]> {
    let int = |number: usize| {
        c_int::try_from(number).map_err(|_| Error::Collective {
            collective,
            rank,
            reason: format!("{number} elements, expected at most {}: MPI counts in an int", c_int::MAX),
            remedy: "set a smaller `bucket_mb`, or split a single parameter of that size into several",
        })
    };
    int(counts.iter().sum())?;
    let ints = |numbers: &[usize]| numbers.iter().map(|number| int(*number)).collect::<Result<_>>();
    Ok([ints(counts)?, ints(&super::super::starts(counts))?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_elements_than_an_int_counts_are_refused_with_a_remedy_that_helps() {
        let most = c_int::MAX as usize;
        assert_eq!(
            layout(&[most - 1, 0, 1], "gather", 0).unwrap()[1],
            [0, c_int::MAX - 1, c_int::MAX - 1]
        );
        let error = layout(&[most, 1], "gather", 0).unwrap_err().to_string();
        assert!(error.contains("split a single parameter"), "{error}");
    }
}
