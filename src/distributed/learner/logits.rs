//! Maximum logits that a learner's model reports.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
/// use distmuon::LearnerLogits;
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

/// The reports by thread: every rank trains on its own.
type OfThreads = HashMap<ThreadId, MaxLogits>;

impl LearnerLogits {
    /// Returns logits before the first report.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reports the maximum logit of every head of an attention, as
    /// [`MaxLogits::report`](crate::MaxLogits::report) does, on the thread that runs the training
    /// step. It has no effect on another thread, in validation, and outside of a training with
    /// QK-clip.
    pub fn report(&self, attention: impl Into<String>, maxima: Tensor<1>) {
        // The caller's code runs without the lock.
        let (attention, maxima) = (attention.into(), maxima.inner());
        if let Some(logits) = self.of_threads().get_mut(&thread::current().id()) {
            logits.report(attention, maxima);
        }
    }

    /// Collects the reports of this thread until the result is dropped.
    pub(super) fn collect(&self) -> Collecting {
        self.of_threads().insert(thread::current().id(), MaxLogits::new());
        Collecting(self.clone())
    }

    /// Returns the reports of this thread since the last call, if it collects them.
    pub(super) fn take(&self) -> MaxLogits {
        self.of_threads().get_mut(&thread::current().id()).map(std::mem::take).unwrap_or_default()
    }

    fn of_threads(&self) -> MutexGuard<'_, OfThreads> {
        // A thread that panicked has left the reports of the others as they were.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread collects its reports as long as this exists.
pub struct Collecting(LearnerLogits);

impl Drop for Collecting {
    fn drop(&mut self) {
        let reports = self.0.of_threads().remove(&thread::current().id());
        drop(reports); // without the lock
    }
}
