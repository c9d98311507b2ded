//! Maximum logits that a learner's model reports.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use burn::tensor::Tensor;

use crate::qk_clip::MaxLogits;

/// The maximum logits that the attentions of a `Learner`'s model report, for
/// [`DistMuonStrategy::with_qk_clip`](super::DistMuonStrategy::with_qk_clip). Clones share them.
/// Needs the feature `train`.
///
/// The model has a clone, in a field that is not a part of its records:
///
/// ```
/// use burn::module::Module;
/// use burn::nn::attention::MultiHeadAttention;
/// use distmuon::distributed::LearnerLogits;
///
/// #[derive(Module, Debug)]
/// struct Net {
///     attention: MultiHeadAttention,
///     #[module(skip)]
///     logits: LearnerLogits, // `self.logits.report("attention", maxima)` in a forward pass
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct LearnerLogits(Arc<Mutex<OfThreads>>);

/// Every rank trains on a thread of its own.
type OfThreads = HashMap<ThreadId, MaxLogits>;

impl LearnerLogits {
    /// Returns logits before the first report.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reports the maximum logit of every head of an attention, as
    /// [`MaxLogits::report`](crate::MaxLogits::report) does, on the thread that runs the training
    /// step. In validation and outside of a training it has no effect.
    pub fn report(&self, attention: impl Into<String>, maxima: Tensor<1>) {
        if let Some(logits) = self.of_threads().get_mut(&thread::current().id()) {
            logits.report(attention, maxima);
        }
    }

    /// Collects the reports of this thread until the result is dropped.
    pub(super) fn collect(&self) -> Collected<'_> {
        self.of_threads().insert(thread::current().id(), MaxLogits::new());
        Collected(self)
    }

    fn of_threads(&self) -> MutexGuard<'_, OfThreads> {
        self.0.lock().expect("no holder of the lock panics")
    }
}

/// The reports of a thread.
pub struct Collected<'a>(&'a LearnerLogits);

impl Collected<'_> {
    /// Returns the reports since the last call.
    pub fn take(&self) -> MaxLogits {
        let mut of_threads = self.0.of_threads();
        let logits = of_threads.get_mut(&thread::current().id());
        std::mem::take(logits.expect("the thread collects its reports"))
    }
}

impl Drop for Collected<'_> {
    fn drop(&mut self) {
        self.0.of_threads().remove(&thread::current().id());
    }
}
