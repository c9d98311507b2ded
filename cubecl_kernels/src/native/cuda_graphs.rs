//! Iterations that are recorded once and replayed as one launch: small ones take less time than
//! their launches.

use cudarc::driver::{DriverError, result, sys};

use super::memory::Memory;
use super::stream_order::SideStream;
use super::{Refusal, Work};

/// An iteration as a graph of the driver, with memory of its own, to the end of the process.
pub(super) struct Recording {
    graph: sys::CUgraphExec,
    buffers: Vec<Memory>,
    /// Index of the buffer that has the result.
    result: usize,
    bytes: usize,
}

// SAFETY: any thread that makes the context current may use graphs of CUDA, one at a time.
unsafe impl Send for Recording {}

impl Recording {
    /// Records what `queue` gives the stream, whose context is current, for the addresses of the
    /// buffers.
    pub fn new(
        stream: &SideStream,
        work: &Work<'_>,
        queue: impl Fn(&[u64]) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let failed = |error| Refusal::new("record the iteration", error);
        let zeroed = |bytes: &usize| Memory::zeroed(stream, *bytes);
        let buffers =
            work.bytes.iter().map(zeroed).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let addresses: Vec<u64> = buffers.iter().map(Memory::address).collect();
        // The driver loads a kernel at its first launch, and may refuse to while it records.
        queue(&addresses)?;
        stream.synchronize().map_err(failed)?;

        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let raw = stream.as_ptr().cast();
        // SAFETY: the stream is alive, and nothing else uses it meanwhile.
        unsafe { result::stream::begin_capture(raw, relaxed) }.map_err(failed)?;
        let queued = queue(&addresses);
        // SAFETY: as above. Also after a failure, to end the recording.
        let recorded = unsafe { result::stream::end_capture(raw) }.map_err(failed)?;
        let no_flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just recorded, and nothing uses it once it is instantiated.
        let graph = unsafe {
            let graph = queued
                .and_then(|()| result::graph::instantiate(recorded, no_flags).map_err(failed));
            result::graph::destroy(recorded).ok();
            graph?
        };
        Ok(Self { graph, buffers, result: work.result, bytes: work.bytes[0] })
    }

    /// Queues the iteration of a batch: copies it in, and its result out.
    ///
    /// # Safety
    ///
    /// Both addresses are those of memory of the device with the bytes of the recording's input,
    /// until the stream has done its work.
    pub unsafe fn replay(&self, stream: &SideStream, [x, to]: [u64; 2]) -> Result<(), DriverError> {
        let raw = stream.as_ptr().cast();
        let [input, output] = [0, self.result].map(|index| self.buffers[index].address());
        // SAFETY: as for this function; the graph and its memory are alive.
        unsafe {
            result::memcpy_dtod_async(input, x, self.bytes, raw)?;
            result::graph::launch(self.graph, raw)?;
            result::memcpy_dtod_async(to, output, self.bytes, raw)
        }
    }
}
