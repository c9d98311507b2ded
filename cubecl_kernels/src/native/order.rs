//! The order of a stream of this crate with CubeCL's, which are not accessible.
//!
//! A side stream waits for the work that CubeCL was given on its [operands](Operand), by
//! [words](Words) in memory. Where the device can't, it waits for all work of the context,
//! by an event that the driver has from CUDA 12.5 on, or the host waits ([`Order`]). Later work of
//! CubeCL, and of all other streams of the context, waits for an event of the side stream.
//!
//! Another thread may record a graph at the same time, in the mode that CubeCL chooses. The driver
//! then refuses calls such as event queries on all threads of the process, and gives up the
//! recording. None of the calls here names a recorded stream, so all of them are made in relaxed
//! mode (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html>). Only
//! `cuCtxRecordEvent` also fails then, and ends the recording: where work is ordered by it, do not
//! record in a context whose work is ordered with a side stream. A lock instead could deadlock: a
//! recording waits for the device, which may wait for a call of another thread.

mod words;

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl::future::block_on;
use cubecl::server::{Handle, ServerError};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
pub use cudarc::driver::DriverError;
use cudarc::driver::{result, sys};

pub use words::Words;

use super::Refusal;

/// The first driver version with `cuCtxRecordEvent` and `cuCtxWaitEvent`
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CTX.html>).
const CONTEXT_EVENTS: c_int = 12_050;

/// Makes calls of the driver that neither disturb a recording on another thread nor are refused
/// because of it.
pub fn in_relaxed_mode<T>(calls: impl FnOnce() -> T) -> T {
    /// Puts the former mode back, also after a panic.
    struct Former(sys::CUstreamCaptureMode);
    impl Drop for Former {
        fn drop(&mut self) {
            // SAFETY: the thread's mode is exchanged with the variable's.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
        }
    }
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: as above. It fails before the driver is initialised.
    let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let _former = exchanged.result().is_ok().then(|| Former(mode));
    calls()
}

/// The devices that were claimed in this process.
static CLAIMED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// A claim to a device for messages between ranks. Two ranks of a process on one device would wait
/// for each other, since later work of both waits for the messages of either.
#[derive(Debug)]
pub struct Claim(usize);

impl Claim {
    fn all() -> MutexGuard<'static, BTreeSet<usize>> {
        CLAIMED.lock().expect("nothing panics while it holds the lock")
    }

    /// Claims a device. Returns `None` if it is claimed already.
    pub fn new(device: usize) -> Option<Self> {
        let is_free = Self::all().insert(device);
        // Not `then_some`: a claim that is dropped unused would release the other one.
        is_free.then(|| Self(device))
    }

    /// Returns `true` if a device is claimed.
    pub fn is_held(device: usize) -> bool {
        Self::all().contains(&device)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        Self::all().remove(&self.0);
    }
}

type Storage = <<CudaRuntime as Runtime>::Server as ServerStorage>::Storage;

/// Memory of CubeCL that work of a side stream reads or writes. It keeps its address.
pub struct Operand(ManagedResource<<Storage as ComputeStorage>::Resource>);

impl Operand {
    /// Pins the memory of a handle. As for a kernel that uses it, CubeCL's stream of this thread
    /// waits for the stream that the memory comes from.
    ///
    /// # Errors
    ///
    /// The failure of the work that should have filled the memory, or to allocate it.
    pub fn new(client: &Client, handle: &Handle) -> Result<Self, ServerError> {
        client.get_resource::<<CudaRuntime as Runtime>::Server>(handle.clone()).map(Self)
    }

    /// Returns the address.
    pub fn address(&self) -> u64 {
        self.0.resource().ptr
    }
}

/// Returns a refusal because of an error of CubeCL.
fn failed(operation: &'static str) -> impl FnOnce(ServerError) -> Refusal {
    move |error| {
        let error = error.to_string();
        let reason = error.lines().next().unwrap_or_default();
        Refusal(format!("CubeCL failed to {operation}: {reason}"))
    }
}

/// The way in which a side stream waits for CubeCL's work.
#[derive(Clone)]
pub enum Order {
    /// For the work on its operands alone, by words in memory.
    Operands(&'static Words),
    /// For all work of the context, also on other side streams, for the reason that is given.
    Context(String),
    /// By waits of the host, before the work of the side stream and after it: the driver is older
    /// than CUDA 12.5.
    Host,
}

impl Order {
    /// Returns the best order that a device has. The first call tries it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn of(device: usize) -> Result<Self, DriverError> {
        result::init()?;
        let mut version = 0;
        // SAFETY: one number is written.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
        if version < CONTEXT_EVENTS {
            return Ok(Self::Host);
        }
        let untried = || Self::Context("words in memory are being verified".to_owned());
        let words = in_relaxed_mode(|| Words::of(device, || SideStream::new(device, untried())));
        Ok(words.map_or_else(|Refusal(reason)| Self::Context(reason), Self::Operands))
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operands(_) => write!(f, "after the work on their operands"),
            Self::Context(reason) => write!(f, "after all work of the context, since {reason}"),
            Self::Host => {
                write!(f, "after waits of the host, since the driver is older than CUDA 12.5")
            }
        }
    }
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A stream of its own in the context of a device, in which CubeCL also works.
#[derive(Debug)]
pub struct SideStream(Arc<Stream>);

#[derive(Debug)]
struct Stream {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    order: Order,
}

// SAFETY: any thread that makes the context current may use contexts, streams and events of CUDA.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl SideStream {
    /// Returns a new stream on a device, in an [`Order`] that the device has.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(device: usize, order: Order) -> Result<Self, DriverError> {
        result::init()?;
        let device = result::device::get(device as c_int)?;
        // SAFETY: the device exists. CubeCL also works in this context.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let open = || {
            // SAFETY: the context was just retained.
            unsafe { result::ctx::set_current(context) }?;
            result::stream::create(result::stream::StreamKind::NonBlocking)
        };
        match open() {
            Ok(stream) => Ok(Self(Arc::new(Stream { device, context, stream, order }))),
            Err(error) => {
                // SAFETY: the context was retained above, and nothing uses it.
                unsafe { result::primary_ctx::release(device) }.ok();
                Err(error)
            }
        }
    }

    /// Returns the way in which the stream waits for CubeCL's work.
    pub fn order(&self) -> &Order {
        &self.0.order
    }

    /// Returns the device, as the driver has it.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.0.device
    }

    /// Returns the stream, which lives as long as `self` and its events.
    pub fn as_ptr(&self) -> *mut c_void {
        self.0.stream.cast()
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn make_current(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained as long as the stream lives.
        unsafe { result::ctx::set_current(self.0.context) }
    }

    /// Makes later work of the stream wait for all work that CubeCL was given so far on memory that
    /// this thread has made an [`Operand`] of.
    ///
    /// # Errors
    ///
    /// The reason why it does not wait. Unless by words, it is also refused while a graph is
    /// recorded in the context, and the recording fails.
    pub fn wait_for_operands(&self, client: &Client) -> Result<(), Refusal> {
        let driver = |error| Refusal::new("order the work of a stream", error);
        match &self.0.order {
            // A graph would write the word each time that it is replayed.
            Order::Operands(words) if !client.is_capturing() => {
                let (address, number) = words.announce(client)?;
                self.wait_for_word(address, number).map_err(driver)
            }
            Order::Operands(_) | Order::Context(_) => self.wait_for_context().map_err(driver),
            // The stream of this thread waits for all others that have worked on the operands.
            Order::Host => block_on(client.sync()).map_err(failed("wait for the device")),
        }
    }

    /// Makes later work of the stream wait until a word has a number or one of the next 2^31.
    fn wait_for_word(&self, address: u64, number: u32) -> Result<(), DriverError> {
        self.make_current()?;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the stream is alive, and the word is kept to the end of the process.
        unsafe { sys::cuStreamWaitValue32_v2(self.0.stream, address, number, flags) }.result()
    }

    /// Writes a number into a word of CubeCL's memory, as work of the stream.
    fn write_word(&self, address: u64, number: u32) -> Result<(), DriverError> {
        self.make_current()?;
        // SAFETY: the word is kept to the end of the process, and the number is staged when the
        // call returns, since its memory is not pinned.
        unsafe { result::memcpy_htod_async(address, &[number], self.0.stream) }
    }

    /// Makes later work of the stream wait for all work that the context was given so far.
    fn wait_for_context(&self) -> Result<(), DriverError> {
        let ready = self.event()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: context, stream and event are alive; the event may be destroyed before it is
        // passed.
        unsafe {
            sys::cuCtxRecordEvent(self.0.context, ready.event).result()?;
            result::stream::wait_event(self.0.stream, ready.event, flags)
        }
    }

    /// Records an event after all work that the stream was given so far.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn record(&self) -> Result<SideEvent, DriverError> {
        let event = self.event()?;
        // SAFETY: stream and event are alive.
        unsafe { result::event::record(event.event, self.0.stream) }?;
        Ok(event)
    }

    /// Waits on the host until the stream has done its work.
    ///
    /// # Errors
    ///
    /// The driver's error, or that of the work.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.0.stream) }
    }

    fn event(&self) -> Result<SideEvent, DriverError> {
        self.make_current()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(SideEvent { event, of: self.0.clone() })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream and the reference to the context were made in `new`, and nothing else
        // uses them.
        unsafe {
            result::ctx::set_current(self.context).ok();
            result::stream::destroy(self.stream).ok();
            result::primary_ctx::release(self.device).ok();
        }
    }
}

/// A position in a [`SideStream`].
#[derive(Debug)]
pub struct SideEvent {
    event: sys::CUevent,
    /// Keeps the context alive.
    of: Arc<Stream>,
}

// SAFETY: as for `Stream`.
unsafe impl Send for SideEvent {}

impl SideEvent {
    /// Makes all work that the context is given from now on wait for the event. Returns `false` if
    /// the host has to wait instead.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn make_context_wait(&self) -> Result<bool, DriverError> {
        if let Order::Host = self.of.order {
            return Ok(false);
        }
        // SAFETY: context and event are alive; the event may be destroyed before it is passed.
        in_relaxed_mode(|| unsafe { sys::cuCtxWaitEvent(self.of.context, self.event) }).result()?;
        Ok(true)
    }

    /// Returns `true` if the stream has passed the event.
    ///
    /// # Errors
    ///
    /// The driver's error, or that of the work before the event.
    pub fn is_passed(&self) -> Result<bool, DriverError> {
        // SAFETY: the context and the event are alive.
        let query = || unsafe {
            result::ctx::set_current(self.of.context)?;
            Ok(sys::cuEventQuery(self.event))
        };
        match in_relaxed_mode(query)? {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => code.result().map(|()| true),
        }
    }
}

impl Drop for SideEvent {
    fn drop(&mut self) {
        // SAFETY: the event is not used afterwards. CUDA frees it when the stream has passed it.
        in_relaxed_mode(|| unsafe { result::event::destroy(self.event) }).ok();
    }
}
