//! Iterations that are recorded once and replayed as one launch.
//!
//! A small iteration is bound by its launches. Where the device has graphs (CUDA, ROCm; wgpu
//! encodes the launches again), the first batch of a shape is iterated a few times and recorded
//! with the buffers that it used. Later batches are copied into the first buffer, the graph is
//! replayed, and the result is copied out. The copies read and write the batch twice, so a batch of
//! more than [`MOST_ELEMENTS`], which keeps the device busy anyway, is not recorded. Momentum,
//! learning rate and weight decay have no part in it, so no schedule makes a recording stale. What
//! a recording needs stays in memory: its batch, everything in between, and the result.
//!
//! The rest of a step is not recorded, since gradients and parameters lie somewhere else at every
//! step. A recording would copy in the gradient, the parameter, the momentum and three rates of
//! each batch, and copy two of them out again. The launches that there are now take several
//! parameters each.

use std::collections::HashMap;
use std::sync::Mutex;
use std::thread::{self, ThreadId};

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Graph, Tensor, capture};

use super::ops::{MatrixOps, PartialNorms};

/// The most elements of a batch whose iteration is recorded. Estimated, not measured: on an H200 a
/// product of 1024 x 4096 takes about as long as two launches, and so do the copies of a batch of
/// this size in and out.
pub(crate) const MOST_ELEMENTS: usize = 1024 * 4096;

/// An iteration, as the recording calls it.
pub(crate) type Iteration = Box<dyn FnMut() -> Tensor<3> + Send>;

/// The inputs that a recording serves: a thread's, since it was recorded on the thread's
/// stream, with a shape, a type, and norms or none.
type RecordingKey = (ThreadId, [usize; 3], DType, bool);

/// The recordings of some inputs on each device; nothing where one refused to record.
type OnDevices = Vec<(Device, Option<Recording>)>;

/// The recordings of an iteration.
#[derive(Default)]
pub(crate) struct Recordings(Mutex<HashMap<RecordingKey, OnDevices>>);

struct Recording {
    /// The buffers that inputs are copied into.
    batch: Tensor<3>,
    norms: Option<Tensor<3>>,
    graph: Graph<Tensor<3>, Iteration>,
}

impl std::fmt::Debug for Recordings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} recordings", self.count())
    }
}

impl Recordings {
    /// Returns the number of shapes that have a recording.
    pub fn count(&self) -> usize {
        let known = self.0.lock().expect("no holder of the lock panics");
        known.values().flatten().filter(|(_, recording)| recording.is_some()).count()
    }

    /// Returns the iteration of a batch by a replay, or nothing if the device has no graphs.
    /// `iteration` returns the function to record, from the buffers that it has to read.
    pub fn run(
        &self,
        batch: &Tensor<3>,
        norms: Option<&PartialNorms>,
        iteration: impl FnOnce(Tensor<3>, Option<PartialNorms>) -> Iteration,
    ) -> Option<Tensor<3>> {
        let (device, dtype) = (batch.device(), batch.dtype());
        // By thread, since each has a stream of its own.
        let key = (thread::current().id(), batch.dims(), dtype, norms.is_some());
        let mut known = self.0.lock().expect("no holder of the lock panics");
        let of_devices = known.entry(key).or_default();
        let place = of_devices.iter().position(|(of, _)| is_same(of, &device));
        let place = place.unwrap_or_else(|| {
            let batch = batch.clone().mul_scalar(1.0);
            let norms = norms.map(|PartialNorms(norms)| norms.clone().mul_scalar(1.0));
            let recording = Recording::new(&device, batch, norms, iteration);
            of_devices.push((device, recording));
            of_devices.len() - 1
        });
        Some(of_devices[place].1.as_mut()?.replay(batch, norms))
    }
}

impl Recording {
    fn new(
        device: &Device,
        batch: Tensor<3>,
        norms: Option<Tensor<3>>,
        iteration: impl FnOnce(Tensor<3>, Option<PartialNorms>) -> Iteration,
    ) -> Option<Self> {
        let mut iteration = iteration(batch.clone(), norms.clone().map(PartialNorms));
        // Kernels that are tested or measured at their first use are read back from the device,
        // which cannot be recorded.
        drop(iteration());
        let graph = capture(device, iteration);
        // Burn replays a graph in software where a device has none, which saves nothing here:
        // `None` is kept, and the iteration runs as it is.
        graph.is_hardware().then_some(Self { batch, norms, graph })
    }

    fn replay(&mut self, batch: &Tensor<3>, norms: Option<&PartialNorms>) -> Tensor<3> {
        // The results keep the copies from being dropped before they are made.
        let _batch = overwrite(&self.batch, batch);
        let _norms =
            self.norms.as_ref().zip(norms).map(|(old, PartialNorms(new))| overwrite(old, new));
        // SAFETY: the recording keeps its inputs, the closure and the result alive. The key has the
        // thread, hence the stream, and the lock is held, so no other thread uses the buffers until
        // the copy below has been queued on the same stream.
        let result = unsafe { self.graph.replay() };
        let shape @ [k, m, n] = result.dims();
        // Without the gaps between rows that Burn may leave in the copy.
        result.clone().mul_scalar(1.0).reshape([k * m * n]).reshape(shape)
    }
}

/// Returns `true` for one device. Burn takes a device with autodiff for equal to the one without,
/// and kernels run on the latter alone.
pub(crate) fn is_same(first: &Device, second: &Device) -> bool {
    first == second && first.is_autodiff() == second.is_autodiff()
}

/// Copies values into the buffer of a tensor, even if other tensors share it.
fn overwrite(target: &Tensor<3>, values: &Tensor<3>) -> Tensor<3> {
    let [target, values] = [target, values].map(|tensor| tensor.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::overwrite(target, values))
}
