//! The maximum logits that attentions report, and the heads that they clip.

use std::collections::BTreeMap;

use burn::tensor::{FloatDType, Tensor};
use serde::{Deserialize, Serialize};

/// The value that stands for a maximum that is not finite. A maximum of this size is none of an
/// attention, and unlike infinity it can be exchanged and compared on every device.
pub(super) const NOT_FINITE: f32 = f32::MAX;

/// The maximum logits of the heads of a model's attentions in one step, as these report them.
///
/// A logit is what the softmax gets: the product of a query and a key with its scale, for a key
/// that the query attends to. The maximum of a head is taken over all sequences and positions.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use distmuon::MaxLogits;
///
/// // In an attention: the scaled and masked products, `[batch, heads, queries, keys]`.
/// let scores = Tensor::<4>::ones([2, 4, 8, 8], &Device::default());
/// let maxima = scores.swap_dims(0, 1).reshape([4, -1]).max_dim(1).reshape([4]);
///
/// let mut logits = MaxLogits::new();
/// logits.report("blocks.0.attention", maxima);
/// ```
///
/// The values stay on their device.
#[derive(Debug, Clone, Default)]
pub struct MaxLogits {
    /// The maxima of every report, by the path of the attention.
    pub(super) reports: BTreeMap<String, Vec<Tensor<1>>>,
}

impl MaxLogits {
    /// Returns the maxima of a step before the first report.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reports the maximum logits of an attention, one for every head of queries, `[heads]`, in any
    /// float type. The path is the attention module's, as in `blocks.0.attention`.
    ///
    /// If an attention reports several times, as for several micro-batches, the largest value of
    /// each head counts. A head without a logit reports negative infinity.
    ///
    /// The values are detached from the graph of the gradients.
    pub fn report(&mut self, attention: impl Into<String>, maxima: Tensor<1>) {
        self.reports.entry(attention.into()).or_default().push(maxima.inner());
    }
}

/// The largest of several reports of an attention, in float32. NaN or positive infinity in a report
/// is [`NOT_FINITE`].
pub(super) fn largest(reports: &[Tensor<1>]) -> Tensor<1> {
    let usable = |report: &Tensor<1>| {
        let report = report.clone().cast(FloatDType::F32);
        // Negative infinity is usable: a head without a logit reports it.
        let is_usable =
            report.clone().lower_elem(NOT_FINITE).bool_and(report.clone().is_nan().bool_not());
        report.mask_fill(is_usable.bool_not(), NOT_FINITE)
    };
    let (first, others) = reports.split_first().expect("an attention is known by a report");
    others.iter().fold(usable(first), |largest, other| largest.max_pair(usable(other)))
}

/// The heads that a step of QK-clip has clipped. They stay on the device until they are read.
///
/// ```
/// use distmuon::ClippedHeads;
/// use distmuon::qk_clip::ClippedAttention;
///
/// /// Logs what `QkClip::apply` has returned with the model.
/// fn log(heads: &ClippedHeads) {
///     for ClippedAttention { path, max_logit, clipped, .. } in heads.read() {
///         println!("{path}: {clipped} heads clipped, largest logit {max_logit:?}");
///     }
/// }
/// ```
#[derive(Debug, Clone)]
pub struct ClippedHeads {
    /// The attentions, and the number of heads of each.
    pub(super) attentions: Vec<(String, usize)>,
    /// The maxima of all heads of all attentions.
    pub(super) maxima: Tensor<1>,
    pub(super) tau: f64,
}

/// The heads of one attention that a step of QK-clip has clipped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClippedAttention {
    /// Path of the attention.
    pub path: String,
    /// The largest logit of the heads whose maximum is finite, before clipping; `None` if there is
    /// none.
    pub max_logit: Option<f32>,
    /// Number of heads that were clipped.
    pub clipped: usize,
    /// Number of heads that were not clipped because their maximum was not finite: NaN, or positive
    /// infinity.
    pub not_finite: usize,
}

impl ClippedHeads {
    /// Returns the clipped heads of every attention, in the order of the rules and of the model.
    /// Waits for the device.
    pub fn read(&self) -> Vec<ClippedAttention> {
        self.of_maxima(&self.maxima.to_data().iter::<f32>().collect::<Vec<_>>())
    }

    /// Returns the maxima of all heads, which [`of_maxima`](Self::of_maxima) needs on the host.
    pub(crate) fn maxima(&self) -> Tensor<1> {
        self.maxima.clone()
    }

    /// Returns the clipped heads, for maxima that were read with others.
    pub(crate) fn of_maxima(&self, maxima: &[f32]) -> Vec<ClippedAttention> {
        let mut rest = maxima;
        let attentions = self.attentions.iter().map(|(path, heads)| {
            let (maxima, others) = rest.split_at(*heads);
            rest = others;
            self.attention(path, maxima)
        });
        attentions.collect()
    }

    fn attention(&self, path: &str, maxima: &[f32]) -> ClippedAttention {
        let tau = self.tau as f32;
        let (finite, not_finite): (Vec<f32>, Vec<f32>) =
            maxima.iter().partition(|maximum| **maximum < NOT_FINITE);
        ClippedAttention {
            path: path.to_owned(),
            max_logit: finite.iter().copied().reduce(f32::max),
            clipped: finite.iter().filter(|maximum| **maximum > tau).count(),
            not_finite: not_finite.len(),
        }
    }
}
