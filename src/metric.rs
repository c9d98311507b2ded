//! Skipped steps as a metric of burn-train.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::update::SkippedSteps;

/// The largest number of skipped steps of any parameter, as a metric of burn-train. Needs the
/// feature `train`.
///
/// After each batch, the metric shows the counts that were last read from the device, without
/// waiting for the device. At the end of an epoch, it reads the counts.
///
/// ```
/// # use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::{MuonConfig, SkippedStepsMetric};
///
/// # let model = LinearConfig::new(4, 4).init(&Device::default().autodiff());
/// let routing = MuonConfig::new().route(&model)?;
/// let optim = routing.init(); // for the `Learner`
/// let metric = SkippedStepsMetric::new(routing.skipped_steps());
/// // SupervisedTraining::new(..).metric_train_numeric(metric)
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// On many ranks, use the counts of
/// [`DistMuonStrategy::skipped_steps`](crate::distributed::DistMuonStrategy::skipped_steps).
#[derive(Clone)]
pub struct SkippedStepsMetric {
    name: MetricName,
    skipped: SkippedSteps,
    /// The value at the last update.
    max: f64,
}

impl SkippedStepsMetric {
    /// Makes the metric of the given counts.
    pub fn new(skipped: &SkippedSteps) -> Self {
        Self { name: Arc::new("Skipped steps".into()), skipped: skipped.clone(), max: 0.0 }
    }
}

/// The largest count.
fn max_count(counts: BTreeMap<String, u64>) -> f64 {
    counts.into_values().max().unwrap_or(0) as f64
}

impl SkippedStepsMetric {
    fn entry(&mut self, counts: BTreeMap<String, u64>) -> SerializedEntry {
        self.max = max_count(counts);
        let raw = self.max.to_string();
        SerializedEntry::new(format!("{}: {raw}", self.name), raw)
    }
}

impl Metric for SkippedStepsMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: None, higher_is_better: false }.into()
    }

    fn update(
        &mut self,
        _item: &(),
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        // Reading the counts would wait for the device after every batch.
        Ok(self.entry(self.skipped.looked_at()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry(self.skipped.read()))
    }

    fn clear(&mut self) {}
}

impl Numeric for SkippedStepsMetric {
    fn value(&self) -> Option<NumericEntry> {
        Some(NumericEntry::Value(self.max))
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.value()
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Value(max_count(self.skipped.read()))
    }
}
