//! The symbols of NCCL that distmuon calls, over memory that processes share, for machines without
//! a GPU. Buffers are memory of the host. A stream is a thread that carries out calls in order,
//! started by [`distmuonTestStreamCreate`]. Calls return before they are carried out, as NCCL's
//! calls do.
//!
//! Different calls on different ranks wait until a rank ends the communicator, as with NCCL.

#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
#![allow(missing_docs)] // NCCL documents its functions

mod comm;
mod stream;

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::io::Read;
use std::ptr::null_mut;
use std::sync::Arc;

use comm::{Comm, Kind, Operation};
use stream::Stream;

/// Codes of `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// The call succeeded.
    Success = 0,
    /// A call of the system failed.
    SystemError = 2,
    /// An argument is invalid.
    InvalidArgument = 4,
    /// A group has calls of several communicators or streams.
    InvalidUsage = 5,
    /// Another rank failed.
    RemoteError = 6,
    /// The call is in progress.
    InProgress = 7,
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// The calls of a group that has not ended yet.
type Grouped = Vec<(Arc<Comm>, Operation, *mut Stream)>;

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static GROUPED: RefCell<Grouped> = const { RefCell::new(Vec::new()) };
    static FAILS_NEXT: Cell<bool> = const { Cell::new(false) };
    static SENT: Cell<u64> = const { Cell::new(0) };
    /// Keeps the text that `ncclGetLastError` has returned.
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

fn comm(handle: *mut c_void) -> Arc<Comm> {
    let handle = handle.cast::<Comm>();
    // SAFETY: handles come from `Arc::into_raw`, and live until they are destroyed or aborted.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

fn submit(handle: *mut c_void, operation: Operation, stream: *mut c_void) -> c_int {
    if handle.is_null() || stream.is_null() {
        return Code::InvalidArgument as c_int;
    }
    let comm = comm(handle);
    SENT.set(SENT.get() + comm.sent(&operation) as u64);
    GROUPED.with_borrow_mut(|grouped| grouped.push((comm, operation, stream.cast())));
    if DEPTH.get() == 0 { flush() } else { Code::InProgress as c_int }
}

/// Passes all calls of a group to their stream, as one.
fn flush() -> c_int {
    let grouped = GROUPED.take();
    let Some((comm, _, stream)) = grouped.first().cloned() else { return Code::Success as c_int };
    // distmuon uses one communicator and one stream in a group, which NCCL does not require.
    let is_other = |other: &Arc<Comm>, other_stream: *mut Stream| {
        !Arc::ptr_eq(other, &comm) || other_stream != stream
    };
    if grouped.iter().any(|(other, _, other_stream)| is_other(other, *other_stream)) {
        return Code::InvalidUsage as c_int;
    }
    let operations: Vec<Operation> =
        grouped.into_iter().map(|(_, operation, _)| operation).collect();
    comm.expect();
    let fails = FAILS_NEXT.take();
    // SAFETY: streams live as long as the program.
    unsafe { &*stream }.launch(move || if fails { comm.fail() } else { comm.run(&operations) });
    Code::InProgress as c_int
}

fn operation(
    kind: Kind,
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
) -> Operation {
    Operation {
        kind,
        source: source.cast(),
        target: target.cast(),
        count,
        dtype,
        peer: peer as usize,
    }
}

/// Creates a stream that never ends.
#[unsafe(no_mangle)]
pub extern "C" fn distmuonTestStreamCreate() -> *mut c_void {
    Box::into_raw(Box::new(Stream::new())).cast()
}

/// Makes the next call of this thread fail while it is in flight, on this rank.
#[unsafe(no_mangle)]
pub extern "C" fn distmuonTestFailNext() {
    FAILS_NEXT.set(true);
}

/// Returns the bytes that the calls of this thread have sent to other ranks so far.
#[unsafe(no_mangle)]
pub extern "C" fn distmuonTestBytesSent() -> u64 {
    SENT.get()
}

/// Keeps a stream busy, as other work on a device would.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn distmuonTestStreamDelay(stream: *mut c_void, milliseconds: u64) {
    // SAFETY: streams live as long as the program.
    let stream = unsafe { &*stream.cast::<Stream>() };
    stream.launch(move || std::thread::sleep(std::time::Duration::from_millis(milliseconds)));
}

/// Returns the number of calls that were passed to a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn distmuonTestStreamLaunched(stream: *mut c_void) -> u64 {
    // SAFETY: streams live as long as the program.
    unsafe { &*stream.cast::<Stream>() }.launched()
}

/// Returns the number of calls that a stream has carried out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn distmuonTestStreamFinished(stream: *mut c_void) -> u64 {
    // SAFETY: streams live as long as the program.
    unsafe { &*stream.cast::<Stream>() }.finished()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let pretended =
        std::env::var("DISTMUON_TEST_NCCL_VERSION").ok().and_then(|version| version.parse().ok());
    // SAFETY: the caller passes the address of the result.
    unsafe { *version = pretended.unwrap_or(22_903) };
    Code::Success as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    let mut bytes = [0; 128];
    let random =
        File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes[..16]));
    if random.is_err() {
        return Code::SystemError as c_int;
    }
    // SAFETY: the caller passes the address of the result.
    unsafe { *id = UniqueId(bytes) };
    Code::Success as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    result: *mut *mut c_void,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    _config: *mut c_void,
) -> c_int {
    let name: String = id.0[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    match Comm::open(name, rank as usize, size as usize) {
        Ok(comm) => {
            // SAFETY: the caller passes the address of the result.
            unsafe { *result = Arc::into_raw(Arc::new(comm)).cast_mut().cast() };
            Code::InProgress as c_int
        }
        Err(reason) => {
            LAST_ERROR.set(CString::new(reason).unwrap_or_default());
            Code::SystemError as c_int
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    parent: *mut c_void,
    color: c_int,
    key: c_int,
    result: *mut *mut c_void,
    _config: *mut c_void,
) -> c_int {
    match comm(parent).split(color, key) {
        Ok(child) => {
            // SAFETY: the caller passes the address of the result.
            unsafe { *result = Arc::into_raw(Arc::new(child)).cast_mut().cast() };
            Code::InProgress as c_int
        }
        Err(code) => code as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(_comm: *mut c_void) -> c_int {
    Code::Success as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(handle: *mut c_void) -> c_int {
    // SAFETY: the handle comes from `Arc::into_raw`, and is not used afterwards.
    unsafe { Arc::decrement_strong_count(handle.cast::<Comm>()) };
    Code::Success as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: *mut c_void) -> c_int {
    comm(handle).abort();
    comm(handle).wait();
    // SAFETY: the caller passes a handle, and does not use it afterwards.
    unsafe { ncclCommDestroy(handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, state: *mut c_int) -> c_int {
    // SAFETY: the caller passes the address of the result.
    unsafe { *state = comm(handle).state() as c_int };
    Code::Success as c_int
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        2 => c"unhandled system error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        _ => c"another error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(handle: *mut c_void) -> *const c_char {
    if !handle.is_null() {
        LAST_ERROR.set(CString::new(comm(handle).last_error()).unwrap_or_default());
    }
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    DEPTH.set(DEPTH.get() + 1);
    Code::Success as c_int
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    DEPTH.set(DEPTH.get() - 1);
    if DEPTH.get() == 0 { flush() } else { Code::Success as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    _op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    submit(comm, operation(Kind::AllReduce, source, target, count, dtype, 0), stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    _op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    submit(comm, operation(Kind::ReduceScatter, source, target, count, dtype, 0), stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    submit(comm, operation(Kind::AllGather, source, target, count, dtype, 0), stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    submit(comm, operation(Kind::Broadcast, source, target, count, dtype, root), stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    source: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    submit(comm, operation(Kind::Send, source, null_mut(), count, dtype, peer), stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    submit(comm, operation(Kind::Receive, null_mut(), target, count, dtype, peer), stream)
}
