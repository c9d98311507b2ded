//! The functions of MPI that move shards, which count the bytes that they send and call MPI's own
//! by its profiling interface. They take the place of the library's functions in every test
//! program.

use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Handles of Open MPI are addresses.
type Handle = *mut c_void;

static SENT: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn PMPI_Comm_rank(comm: Handle, rank: *mut c_int) -> c_int;
    fn PMPI_Comm_size(comm: Handle, size: *mut c_int) -> c_int;
    fn PMPI_Type_size(of: Handle, size: *mut c_int) -> c_int;
    fn PMPI_Ialltoallv(
        send: *const c_void,
        send_counts: *const c_int,
        send_offsets: *const c_int,
        send_type: Handle,
        receive: *mut c_void,
        receive_counts: *const c_int,
        receive_offsets: *const c_int,
        receive_type: Handle,
        comm: Handle,
        request: *mut Handle,
    ) -> c_int;
    fn PMPI_Iallgatherv(
        send: *const c_void,
        send_count: c_int,
        send_type: Handle,
        receive: *mut c_void,
        receive_counts: *const c_int,
        receive_offsets: *const c_int,
        receive_type: Handle,
        comm: Handle,
        request: *mut Handle,
    ) -> c_int;
}

/// Returns the bytes that this process has sent to others so far.
pub fn sent() -> u64 {
    SENT.load(Ordering::SeqCst)
}

/// Counts elements that are sent to others, of which `others` returns the number for a rank and
/// a number of ranks.
///
/// # Safety
///
/// Both handles are alive.
unsafe fn count(of: Handle, comm: Handle, others: impl FnOnce(usize, usize) -> c_int) {
    let (mut rank, mut size, mut width) = (0, 0, 0);
    // SAFETY: one number is written by each.
    unsafe {
        PMPI_Comm_rank(comm, &mut rank);
        PMPI_Comm_size(comm, &mut size);
        PMPI_Type_size(of, &mut width);
    }
    let elements = others(rank as usize, size as usize);
    SENT.fetch_add((elements * width) as u64, Ordering::SeqCst);
}

/// # Safety
///
/// As MPI's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Ialltoallv(
    send: *const c_void,
    send_counts: *const c_int,
    send_offsets: *const c_int,
    send_type: Handle,
    receive: *mut c_void,
    receive_counts: *const c_int,
    receive_offsets: *const c_int,
    receive_type: Handle,
    comm: Handle,
    request: *mut Handle,
) -> c_int {
    // SAFETY: there is a count for every rank.
    let others = |rank, size| unsafe {
        let counts = std::slice::from_raw_parts(send_counts, size);
        counts.iter().sum::<c_int>() - counts[rank]
    };
    // SAFETY: as this function itself.
    unsafe {
        count(send_type, comm, others);
        PMPI_Ialltoallv(
            send,
            send_counts,
            send_offsets,
            send_type,
            receive,
            receive_counts,
            receive_offsets,
            receive_type,
            comm,
            request,
        )
    }
}

/// # Safety
///
/// As MPI's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Iallgatherv(
    send: *const c_void,
    send_count: c_int,
    send_type: Handle,
    receive: *mut c_void,
    receive_counts: *const c_int,
    receive_offsets: *const c_int,
    receive_type: Handle,
    comm: Handle,
    request: *mut Handle,
) -> c_int {
    // SAFETY: as this function itself.
    unsafe {
        count(send_type, comm, |_, size| send_count * (size as c_int - 1));
        PMPI_Iallgatherv(
            send,
            send_count,
            send_type,
            receive,
            receive_counts,
            receive_offsets,
            receive_type,
            comm,
            request,
        )
    }
}
