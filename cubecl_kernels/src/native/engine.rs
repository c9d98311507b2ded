//! The native kernels of a device, and their order with CubeCL's work.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::cublaslt::{CublasLt, Plan};
use super::cuda_graphs::Recording;
use super::launches::{ALIGNMENT, Element, Launch, Product};
use super::ptx_module::{Module, Prepared, Scratch};
use super::stream_order::{DriverError, Ready, SideStream, in_relaxed_mode};
use super::tile_choice::TileShape;
use super::{NotRun, Refusal, Work};

/// `true` once a launch has failed: no native kernel runs in this process any more.
static IS_DISABLED: AtomicBool = AtomicBool::new(false);

/// The most iterations that are recorded on a device: a recording keeps its memory.
const MAX_RECORDINGS: usize = 32;

/// The native kernels of a type on a device, loaded and verified by [`of`](Native::of).
pub struct Native {
    pub(super) element: Element,
    pub(super) stream: SideStream,
    pub(super) module: Module,
    pub(super) scratch: Scratch,
    /// Nanoseconds after which a block gives up to wait for others, or 0: it waits for ever.
    pub(super) patience: u32,
    /// The tiles with which the device multiplies exactly: at least one.
    pub(super) shapes: Vec<TileShape>,
    /// The reason if these are not all.
    pub(super) fault: Option<Refusal>,
    /// For full products, or the reason why the kernels also compute these.
    pub(super) library: Result<CublasLt, Refusal>,
    /// The recordings by their keys, or the reason why there is none, and the right to use the
    /// stream.
    pub(super) recordings: Mutex<HashMap<Vec<u64>, Result<Recording, Refusal>>>,
}

impl fmt::Display for Native {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "native kernels for Hopper, tiles of ")?;
        for (i, shape) in self.shapes.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{shape}")?;
        }
        if let Some(reason) = &self.fault {
            write!(f, " (no others, since {reason})")?;
        }
        match &self.library {
            Ok(_) => write!(f, "; full products by cuBLASLt"),
            Err(reason) => write!(f, "; no cuBLASLt, since {reason}"),
        }
    }
}

/// Fails if a launch has failed before.
pub(super) fn ensure_enabled() -> Result<(), Refusal> {
    match IS_DISABLED.load(Ordering::Relaxed) {
        true => Err(Refusal("a launch has failed before".to_owned())),
        false => Ok(()),
    }
}

impl Native {
    /// Queues an iteration that reads and writes memory of CubeCL's tensors: from `ready` on, and
    /// before all work that CubeCL will give the device. `buffers` has the addresses of the
    /// iteration's buffers.
    ///
    /// # Errors
    ///
    /// The reason why it did not run, or not all of it.
    ///
    /// # Safety
    ///
    /// The addresses are multiples of 16, and those of memory with the bytes of the buffers, which
    /// CubeCL does not free before the work that it will give the device. When the iteration is
    /// ready, all work on them is done. No launch reads or writes anything else.
    pub unsafe fn run(&self, ready: Ready, work: &Work<'_>, buffers: &[u64]) -> Result<(), NotRun> {
        if buffers.iter().any(|address| !address.is_multiple_of(ALIGNMENT)) {
            return Err(Refusal("a batch is not aligned".to_owned()).into());
        }
        let _stream = self.stream_alone();
        let launches = (work.launches)(buffers);
        let prepared = in_relaxed_mode(|| self.prepare(&launches))?;
        // SAFETY: as for this function.
        self.in_order(ready, || unsafe { self.queue(&prepared) })
    }

    /// The same for an iteration that is recorded when its key is first met, from the addresses of
    /// its input, which keeps its values, and of its result. A key is any numbers. Returns the
    /// reason if there is no recording.
    ///
    /// # Errors
    ///
    /// The reason why it did not run, or not all of it.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run). Iterations of one key have the same launches.
    pub unsafe fn replay(
        &self,
        ready: Ready,
        key: &[u64],
        work: &Work<'_>,
        [x, result]: [u64; 2],
    ) -> Result<Result<(), Refusal>, NotRun> {
        let mut recordings =
            self.recordings.lock().expect("nothing panics while it holds the lock");
        if !recordings.contains_key(key) {
            let recording = match recordings.len() {
                MAX_RECORDINGS.. => Err(Refusal("there are enough recordings".to_owned())),
                _ => in_relaxed_mode(|| self.record(work)),
            };
            recordings.insert(key.to_owned(), recording);
        }
        let recording = match &recordings[key] {
            Ok(recording) => recording,
            Err(reason) => return Ok(Err(reason.clone())),
        };
        self.in_order(ready, || {
            // SAFETY: as for this function.
            let replayed = unsafe { recording.replay(&self.stream, [x, result]) };
            replayed.map_err(|error| Refusal::new("replay the iteration", error))
        })?;
        Ok(Ok(()))
    }

    fn record(&self, work: &Work<'_>) -> Result<Recording, Refusal> {
        let current = self.stream.make_current();
        current.map_err(|error| Refusal::new("use the context", error))?;
        Recording::new(&self.stream, work, |addresses| {
            let launches = (work.launches)(addresses);
            let prepared = self.prepare(&launches)?;
            // SAFETY: the addresses are those of memory of the recording. A launch that fails here
            // also fails without a recording, and is reported then.
            unsafe { self.queue(&prepared) }
        })
    }

    /// Queues work between that of CubeCL.
    fn in_order(
        &self,
        ready: Ready,
        queue: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(), NotRun> {
        // Again: another thread may have had the stream meanwhile.
        ensure_enabled()?;
        in_relaxed_mode(|| {
            let ordered = self.stream.wait_for(ready);
            ordered.map_err(|error| Refusal::new("order the iteration", error))?;
            let queued = queue();
            // Also after a failure, whose launches before it may be running.
            let ordered = self.stream.record().and_then(|event| event.make_context_wait());
            // Without that order, the host waits: CubeCL may reuse the memory.
            let ordered = ordered.map(drop).or_else(|_| self.stream.synchronize());
            let ordered = ordered.map_err(|error| Refusal::new("order the iteration", error));
            queued.and(ordered).map_err(|refusal| {
                IS_DISABLED.store(true, Ordering::Relaxed);
                self.stream.synchronize().ok();
                NotRun::Failed(refusal)
            })
        })
    }

    /// Prepares launches: full products for cuBLASLt where it has an algorithm for them. On an H200
    /// it took 0.56 to 0.96 of the kernels' time for those of 768 rows and more, with algorithms
    /// that were chosen for the batch.
    pub(super) fn prepare(&self, launches: &[Launch]) -> Result<Vec<Queued<'_>>, Refusal> {
        let mut prepared = Vec::with_capacity(launches.len());
        for launch in launches {
            match launch {
                Launch::Product(product) => match self.prepare_for_library(product) {
                    Some(queued) => prepared.push(queued),
                    None => {
                        for product in product.launches(self.multiprocessors()) {
                            let launch = Launch::Product(product);
                            prepared.push(self.prepare_kernel(&launch, &self.shapes, None)?);
                        }
                    }
                },
                sum => prepared.push(self.prepare_kernel(sum, &self.shapes, None)?),
            }
        }
        Ok(prepared)
    }

    /// Prepares a full product for cuBLASLt, if it has an algorithm for it.
    pub(super) fn prepare_for_library(&self, product: &Product) -> Option<Queued<'_>> {
        let library = self.library.as_ref().ok().filter(|_| !product.lower)?;
        let plan = library.plan(self.element, product).ok()?;
        Some(Queued::CublasLt(library, *product, plan))
    }

    /// Prepares a launch of a kernel, with tiles of one of the shapes, and for all multiprocessors
    /// or a smaller number.
    pub(super) fn prepare_kernel(
        &self,
        launch: &Launch,
        shapes: &[TileShape],
        multiprocessors: Option<usize>,
    ) -> Result<Queued<'_>, Refusal> {
        let failed = |error| Refusal::new("prepare the iteration", error);
        self.stream.make_current().map_err(failed)?;
        let multiprocessors = multiprocessors.unwrap_or_else(|| self.multiprocessors());
        let prepared =
            self.module.prepare(&self.scratch, launch, shapes, multiprocessors, self.patience);
        prepared.map(Queued::Kernel).map_err(failed)
    }

    /// Queues launches on the stream, in no order with CubeCL's work.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run), until the stream has done its work.
    pub(super) unsafe fn queue<'a>(
        &self,
        launches: impl IntoIterator<Item = &'a Queued<'a>>,
    ) -> Result<(), Refusal> {
        let failed = |error| Refusal::new("launch the iteration", error);
        self.stream.make_current().map_err(failed)?;
        launches.into_iter().enumerate().try_for_each(|(index, launch)| match launch {
            Queued::Kernel(prepared) => {
                // The first launch follows an event or a copy, which it must not overlap with.
                let overlaps = index > 0;
                // SAFETY: as for this function.
                unsafe { prepared.launch(&self.stream, overlaps) }.map_err(failed)
            }
            // SAFETY: as for this function.
            Queued::CublasLt(library, product, plan) => unsafe {
                library.multiply(&self.stream, (product, plan))
            },
        })
    }

    /// Locks the stream for this thread.
    pub(super) fn stream_alone(&self) -> impl Drop + use<'_> {
        self.recordings.lock().expect("nothing panics while it holds the lock")
    }

    /// Returns the type of the matrices.
    pub(super) fn element(&self) -> Element {
        self.element
    }

    /// Returns the shapes of tiles with which the device multiplies exactly.
    pub(super) fn shapes(&self) -> &[TileShape] {
        &self.shapes
    }

    /// Resets the counts of finished parts of tiles, for later launches.
    pub(super) fn clear_scratch(&self) -> Result<(), DriverError> {
        self.scratch.clear(&self.stream)
    }

    /// Returns the number of multiprocessors of the device.
    pub(super) fn multiprocessors(&self) -> usize {
        self.scratch.multiprocessors()
    }

    /// Returns the stream that the kernels run on.
    pub(super) fn stream(&self) -> &SideStream {
        &self.stream
    }
}

/// A launch with its implementation.
pub(super) enum Queued<'a> {
    Kernel(Prepared),
    CublasLt(&'a CublasLt, Product, Plan),
}
