//! Skipped steps, norms and the share of Muon as metrics of burn-train.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::distributed::{GroupDiagnostics, LatestAccount, LatestDiagnostics};
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

/// The quantity that a [`DiagnosticsMetric`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiagnosticsQuantity {
    /// The norm of the change in a step.
    UpdateNorm,
    /// The norm of the parameters.
    WeightNorm,
    /// The norm of the change relative to the parameters' norm.
    EffectiveLr,
    /// The largest error of the iteration, 0 without one.
    OrthogonalityError,
    /// The number of attention heads that were clipped, 0 without QK-clip.
    ClippedHeads,
    /// The number of attention heads whose maximum logit was not finite, 0 without QK-clip.
    NotFiniteHeads,
    /// The largest finite logit of an attention, 0 without QK-clip.
    MaxLogit,
}

impl DiagnosticsQuantity {
    fn name(self) -> &'static str {
        match self {
            Self::UpdateNorm => "update norm",
            Self::WeightNorm => "weight norm",
            Self::EffectiveLr => "effective lr",
            Self::OrthogonalityError => "orthogonality error",
            Self::ClippedHeads => "clipped heads",
            Self::NotFiniteHeads => "heads that are not finite",
            Self::MaxLogit => "max logit",
        }
    }

    fn of(self, group: &GroupDiagnostics) -> f64 {
        match self {
            Self::UpdateNorm => group.update_norm,
            Self::WeightNorm => group.weight_norm,
            Self::EffectiveLr => group.effective_lr(),
            Self::OrthogonalityError => group.orthogonality_error.unwrap_or(0.0),
            Self::ClippedHeads => group.clipped_heads.unwrap_or(0) as f64,
            Self::NotFiniteHeads => group.not_finite_heads.unwrap_or(0) as f64,
            Self::MaxLogit => f64::from(group.max_logit.unwrap_or(0.0)),
        }
    }
}

/// A quantity of a group of parameters, as a metric of burn-train. Needs the feature `train`.
///
/// The metric shows the diagnostics that
/// [`DistMuonStrategy`](crate::distributed::DistMuonStrategy) computed last, and 0 before the
/// first. The group is named as in [`Routing`](crate::Routing), for example `Muon` or
/// `AdamW (head)`.
///
/// ```
/// # use burn::tensor::Device;
/// use distmuon::distributed::{DistMuonConfig, DistMuonStrategy};
/// use distmuon::{DiagnosticsMetric, DiagnosticsQuantity};
///
/// # let devices = vec![Device::default()];
/// let strategy = DistMuonStrategy::new(devices, DistMuonConfig::new()).with_diagnostics(100);
/// let quantity = DiagnosticsQuantity::EffectiveLr;
/// let metric = DiagnosticsMetric::new(strategy.diagnostics(), "Muon", quantity);
/// // SupervisedTraining::new(..).metric_train_numeric(metric)
/// ```
#[derive(Clone)]
pub struct DiagnosticsMetric {
    name: MetricName,
    latest: LatestDiagnostics,
    group: String,
    quantity: DiagnosticsQuantity,
}

impl DiagnosticsMetric {
    /// Makes the metric of a quantity and a group.
    pub fn new(latest: &LatestDiagnostics, group: &str, quantity: DiagnosticsQuantity) -> Self {
        Self {
            name: Arc::new(format!("{group} {}", quantity.name())),
            latest: latest.clone(),
            group: group.to_owned(),
            quantity,
        }
    }

    fn latest(&self) -> f64 {
        let groups = self.latest.get().map_or(vec![], |diagnostics| diagnostics.groups());
        let group = groups.iter().find(|group| group.group == self.group);
        group.map_or(0.0, |group| self.quantity.of(group))
    }

    fn entry(&self) -> SerializedEntry {
        let value = self.latest();
        SerializedEntry::new(format!("{}: {value:.3e}", self.name), value.to_string())
    }
}

impl Metric for DiagnosticsMetric {
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
        Ok(self.entry())
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry())
    }

    fn clear(&mut self) {}
}

impl Numeric for DiagnosticsMetric {
    fn value(&self) -> Option<NumericEntry> {
        Some(NumericEntry::Value(self.latest()))
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.value()
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Value(self.latest())
    }
}

/// The share of the trained elements that Muon has updated, in percent, as a metric of burn-train.
/// Needs the feature `train`.
///
/// The metric shows the account that [`DistMuonStrategy`](crate::distributed::DistMuonStrategy)
/// kept last, and 0 before the first. It counts what ran, not what was routed to Muon: matrices
/// without a gradient do not count.
///
/// ```
/// # use burn::tensor::Device;
/// use distmuon::MuonShareMetric;
/// use distmuon::distributed::{DistMuonConfig, DistMuonStrategy};
///
/// # let devices = vec![Device::default()];
/// let strategy = DistMuonStrategy::new(devices, DistMuonConfig::new()).with_account(100);
/// let metric = MuonShareMetric::new(strategy.account());
/// // SupervisedTraining::new(..).metric_train_numeric(metric)
/// ```
#[derive(Clone)]
pub struct MuonShareMetric {
    name: MetricName,
    latest: LatestAccount,
}

impl MuonShareMetric {
    /// Makes the metric of the given account.
    pub fn new(latest: &LatestAccount) -> Self {
        Self { name: Arc::new("Updated by Muon".into()), latest: latest.clone() }
    }

    fn percent(&self) -> f64 {
        100.0 * self.latest.get().map_or(0.0, |account| account.muon_share())
    }

    fn entry(&self) -> SerializedEntry {
        let percent = self.percent();
        SerializedEntry::new(format!("{}: {percent:.1} %", self.name), percent.to_string())
    }
}

impl Metric for MuonShareMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: Some("%".into()), higher_is_better: true }.into()
    }

    fn update(
        &mut self,
        _item: &(),
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry())
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry())
    }

    fn clear(&mut self) {}
}

impl Numeric for MuonShareMetric {
    fn value(&self) -> Option<NumericEntry> {
        Some(NumericEntry::Value(self.percent()))
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.value()
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Value(self.percent())
    }
}
