//! Skipped steps as a metric of burn-train.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::skipped::SkippedSteps;

/// The number of steps that the parameter which was skipped most often was skipped in, as a metric of
/// burn-train: after a batch as of the last look at the counts, at the end of an epoch as it is. Needs the
/// feature `train`.
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
/// On ranks, take the counts of
/// [`DistMuonStrategy::skipped_steps`](crate::dist::DistMuonStrategy::skipped_steps).
#[derive(Clone)]
pub struct SkippedStepsMetric {
    name: MetricName,
    skipped: SkippedSteps,
    most: f64,
}

impl SkippedStepsMetric {
    /// The metric of these counts.
    pub fn new(skipped: &SkippedSteps) -> Self {
        Self { name: Arc::new("Skipped steps".into()), skipped: skipped.clone(), most: 0.0 }
    }
}

/// The count of the parameter that was skipped most often.
fn most(counts: BTreeMap<String, u64>) -> f64 {
    counts.into_values().max().unwrap_or(0) as f64
}

impl SkippedStepsMetric {
    fn entry(&mut self, counts: BTreeMap<String, u64>) -> SerializedEntry {
        self.most = most(counts);
        let raw = self.most.to_string();
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
        // A batch does not wait for the counts of all states.
        Ok(self.entry(self.skipped.looked_at()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry(self.skipped.read()))
    }

    fn clear(&mut self) {}
}

impl Numeric for SkippedStepsMetric {
    fn value(&self) -> Option<NumericEntry> {
        Some(NumericEntry::Value(self.most))
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.value()
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Value(most(self.skipped.read()))
    }
}
