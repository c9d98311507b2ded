//! Iterations that are recorded once and replayed as one launch: small ones take less time than
//! their launches.

use cudarc::driver::{DriverError, result, sys};

use super::order::SideStream;
use super::product::Launch;
use super::{Refusal, Work};

/// An iteration as a graph of the driver, with memory of its own, to the end of the process.
pub(super) struct Recording {
    graph: sys::CUgraphExec,
    /// The memory of its input and of its result, and their bytes.
    input: sys::CUdeviceptr,
    result: sys::CUdeviceptr,
    bytes: usize,
}

// SAFETY: any thread that makes the context current may use graphs of CUDA, one at a time.
unsafe impl Send for Recording {}

impl Recording {
    /// Records the launches that `queue` gives the stream, in the context that is current.
    pub fn new(
        stream: &SideStream,
        work: &Work<'_>,
        queue: impl FnOnce(&[Launch]) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let failed = |error| Refusal::new("record the iteration", error);
        let buffers = allocate(work.bytes).map_err(failed)?;
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let raw = stream.as_ptr().cast();
        // SAFETY: the stream is alive, and nothing else uses it meanwhile.
        unsafe { result::stream::begin_capture(raw, relaxed) }.map_err(failed)?;
        let queued = queue(&(work.launches)(&buffers));
        // SAFETY: as above. Also after a failure, to end the recording.
        let graph = unsafe { result::stream::end_capture(raw) };
        queued?;
        let no_flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just recorded.
        let graph = graph.and_then(|graph| unsafe { result::graph::instantiate(graph, no_flags) });
        let graph = graph.map_err(failed)?;
        let (input, result) = (buffers[0], buffers[work.result]);
        Ok(Self { graph, input, result, bytes: work.bytes[0] })
    }

    /// Queues the iteration of a batch: copies it in, and its result out.
    ///
    /// # Safety
    ///
    /// Both addresses are those of memory of the device with the bytes of the recording's input,
    /// until the stream has done its work.
    pub unsafe fn replay(&self, stream: &SideStream, [x, to]: [u64; 2]) -> Result<(), DriverError> {
        let raw = stream.as_ptr().cast();
        // SAFETY: as for this function; the graph and its memory are alive.
        unsafe {
            result::memcpy_dtod_async(self.input, x, self.bytes, raw)?;
            result::graph::launch(self.graph, raw)?;
            result::memcpy_dtod_async(to, self.result, self.bytes, raw)
        }
    }
}

/// Memory for buffers, none of it if one fails.
fn allocate(bytes: &[usize]) -> Result<Vec<sys::CUdeviceptr>, DriverError> {
    let mut buffers = vec![];
    for bytes in bytes {
        // SAFETY: there are some bytes, which a launch writes before another one reads them.
        match unsafe { result::malloc_sync(*bytes) } {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => {
                // SAFETY: allocated above, and nothing uses them.
                buffers
                    .into_iter()
                    .for_each(|buffer| unsafe { result::free_sync(buffer) }.unwrap_or(()));
                return Err(error);
            }
        }
    }
    Ok(buffers)
}
