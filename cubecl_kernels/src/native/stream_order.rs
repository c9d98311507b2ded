//! A stream next to CubeCL's, whose streams are not accessible, and its order with their work.
//!
//! Before its work, a side stream waits for a word in memory, which one of CubeCL's streams writes
//! ([`operands`](crate::operands)), or for an event of the whole context, which drivers have from
//! CUDA 12.5 on. Later work of CubeCL, and of all other streams of the context, waits for an event
//! of the side stream.
//!
//! Another thread may record a graph at the same time, in the mode that CubeCL chooses. The driver
//! then refuses calls such as event queries on all threads of the process, and gives up the
//! recording. None of the calls here names a recorded stream, so all of them are made in relaxed
//! mode (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html>). Only
//! `cuCtxRecordEvent` and `cuCtxWaitEvent` also fail then, and end the recording: do not record in
//! a context whose work is ordered with a side stream. A lock instead could deadlock: a recording
//! waits for the device, which may wait for a call of another thread.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

pub use cudarc::driver::DriverError;
use cudarc::driver::{result, sys};

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

/// The point from which work of a side stream may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// A word of the device's memory has a number, or one of the next 2^31. The driver was given
    /// the work that writes it, and the word is kept to the end of the process.
    Word {
        /// The address, a multiple of four.
        address: u64,
        /// The number.
        number: u32,
    },
    /// All work that the context was given so far is done.
    Context,
    /// The host has waited.
    Now,
}

/// A stream of its own in the context of a device, in which CubeCL also works.
#[derive(Debug)]
pub struct SideStream(Arc<Stream>);

#[derive(Debug)]
struct Stream {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    has_context_events: bool,
}

// SAFETY: any thread that makes the context current may use contexts, streams and events of CUDA.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl SideStream {
    /// Returns a new stream on a device.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(device: usize) -> Result<Self, DriverError> {
        result::init()?;
        let device = result::device::get(device as c_int)?;
        // SAFETY: the device exists. CubeCL also works in this context.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let open = || {
            // SAFETY: the context was just retained.
            unsafe { result::ctx::set_current(context) }?;
            let mut version = 0;
            // SAFETY: one number is written.
            unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            Ok((stream, version >= CONTEXT_EVENTS))
        };
        match open() {
            Ok((stream, has_context_events)) => {
                Ok(Self(Arc::new(Stream { device, context, stream, has_context_events })))
            }
            Err(error) => {
                // SAFETY: the context was retained above, and nothing uses it.
                unsafe { result::primary_ctx::release(device) }.ok();
                Err(error)
            }
        }
    }

    /// Returns `true` if the driver has events of whole contexts.
    pub fn has_context_events(&self) -> bool {
        self.0.has_context_events
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

    /// Makes later work of the stream wait.
    ///
    /// # Errors
    ///
    /// The driver's error, for [`Ready::Context`] also where it has no events of whole contexts, or
    /// while a graph is recorded in the context, whose recording then fails.
    pub fn wait_for(&self, ready: Ready) -> Result<(), DriverError> {
        match ready {
            Ready::Word { address, number } => {
                self.make_current()?;
                let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
                // SAFETY: the stream is alive, and the word is kept.
                unsafe { sys::cuStreamWaitValue32_v2(self.0.stream, address, number, flags) }
                    .result()
            }
            Ready::Context => {
                let event = self.event()?;
                let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                // SAFETY: context, stream and event are alive; the event may be destroyed before it
                // is passed.
                unsafe {
                    sys::cuCtxRecordEvent(self.0.context, event.event).result()?;
                    result::stream::wait_event(self.0.stream, event.event, flags)
                }
            }
            Ready::Now => Ok(()),
        }
    }

    /// Writes a number into a word that is kept to the end of the process, as work of the stream.
    pub(crate) fn write_word(&self, address: u64, number: u32) -> Result<(), DriverError> {
        self.make_current()?;
        // SAFETY: the word is kept, and the number is staged when the call returns, since its
        // memory is not pinned.
        unsafe { result::memcpy_htod_async(address, &[number], self.0.stream) }
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
    /// the driver has no events of whole contexts.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn make_context_wait(&self) -> Result<bool, DriverError> {
        if !self.of.has_context_events {
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
