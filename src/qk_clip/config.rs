//! The configuration of QK-clip, and its rules.

use burn::config::Config;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::matrix_view::MatrixLayout;

/// Configuration of [`QkClip`](super::QkClip), made by [`init`](Self::init).
///
/// ```
/// use distmuon::{LatentHead, QkClipConfig, QkClipRule};
///
/// let config = QkClipConfig::new()
///     .with_tau(50.0)
///     .with_rule(QkClipRule::multi_head(r"encoder\.\d+\.attention$", 16))
///     .with_rule(QkClipRule::grouped_query(r"decoder\.\d+\.attention$", 32, 8).fused("qkv"))
///     .with_rule(
///         QkClipRule::latent(r"^mla$", 64, LatentHead { nope: 128, rope: 64, value: 128 })
///             .query("q_b_proj")
///             .key("kv_b_proj"),
///     );
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct QkClipConfig {
    /// The threshold of the maximum logit of a head, above 0. A head with a larger one is clipped.
    /// The default is Kimi K2's (arXiv 2507.20534, section 2.1).
    #[config(default = 100.0)]
    pub tau: f64,
    /// The exponent of the query's factor, from 0 to 1. The exponent of the key's factor is
    /// `1 - alpha`. 0.5, the default, gives both the same factor, as in Kimi K2.
    #[config(default = 0.5)]
    pub alpha: f64,
    /// The dimension of a matrix that counts the outputs of its layer, for rules that do not set
    /// it.
    #[config(default = "MatrixLayout::InOut")]
    pub layout: MatrixLayout,
    /// The rules that find the attentions. If several match an attention, the last one counts.
    #[config(default = "Vec::new()")]
    pub rules: Vec<QkClipRule>,
}

impl QkClipConfig {
    /// Adds a rule. If several rules match an attention, the last one counts.
    pub fn with_rule(mut self, rule: QkClipRule) -> Self {
        self.rules.push(rule);
        self
    }

    /// Fails for a setting that no run can use.
    pub(super) fn check(&self) -> Result<()> {
        // In float32, as it is compared with the logits.
        let tau = self.tau as f32;
        if !(tau.is_finite() && tau > 0.0) {
            return Err(Error::setting("tau", self.tau, "a positive number"));
        }
        if !(0.0..=1.0).contains(&self.alpha) {
            return Err(Error::setting("alpha", self.alpha, "a number from 0 to 1"));
        }
        if self.rules.is_empty() {
            return Err(Error::setting("rules", "none", "a rule for every kind of attention"));
        }
        Ok(())
    }
}

/// The attentions of one kind in a model, and the layout of their heads.
///
/// An attention is a module whose path matches a regular expression, as in `blocks.0.attention`,
/// and that has fields with the projections of queries and of keys: `query` and `key`, as in
/// Burn's `MultiHeadAttention`, unless [`query`](Self::query) and [`key`](Self::key) name others.
/// The expression, in the syntax of the crate `regex`, may match any part of the path. A model that
/// is an attention itself has the empty path.
///
/// The outputs of a projection are the heads one after the other. All parameters in its field
/// belong to it: a matrix, and a bias if there is one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QkClipRule {
    pub(super) pattern: String,
    pub(super) heads: Heads,
    pub(super) query: String,
    pub(super) key: String,
    pub(super) layout: Option<MatrixLayout>,
}

/// The heads of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum Heads {
    /// Heads of queries in groups, and a head of keys for each group.
    Grouped { queries: usize, keys: usize },
    /// Heads of latent attention.
    Latent { count: usize, head: LatentHead },
}

/// The widths of the parts of a head of latent attention.
// Exhaustive: these are all parts of the two projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentHead {
    /// The part of a query, and of a key, without positions.
    pub nope: usize,
    /// The rotary part of a query; 0 for none. The rotary part of the key is shared by all heads,
    /// and is not an output of their projection.
    pub rope: usize,
    /// The value.
    pub value: usize,
}

impl QkClipRule {
    /// Multi-head attention with `heads` heads of queries, each with a head of keys.
    pub fn multi_head(pattern: impl Into<String>, heads: usize) -> Self {
        Self::grouped_query(pattern, heads, heads)
    }

    /// Grouped-query attention, where each of the `keys` heads of keys is shared by
    /// `queries / keys` heads of queries that follow each other; multi-query attention with one
    /// head of keys.
    pub fn grouped_query(pattern: impl Into<String>, queries: usize, keys: usize) -> Self {
        Self::new(pattern.into(), Heads::Grouped { queries, keys })
    }

    /// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The outputs of a head are
    /// `[nope, rope]` in the up-projection of the queries, and `[nope, value]` in the up-projection
    /// of keys and values.
    pub fn latent(pattern: impl Into<String>, heads: usize, head: LatentHead) -> Self {
        Self::new(pattern.into(), Heads::Latent { count: heads, head })
    }

    fn new(pattern: String, heads: Heads) -> Self {
        Self { pattern, heads, query: "query".into(), key: "key".into(), layout: None }
    }

    /// Sets the field of the projection of queries, relative to the attention, as in `q_proj`. For
    /// latent attention, it is the up-projection.
    pub fn query(self, field: impl Into<String>) -> Self {
        Self { query: field.into(), ..self }
    }

    /// Sets the field of the projection of keys, relative to the attention, as in `k_proj`. For
    /// latent attention, it is the up-projection of keys and values.
    pub fn key(self, field: impl Into<String>) -> Self {
        Self { key: field.into(), ..self }
    }

    /// Sets the field of a fused projection. Its outputs are all heads of queries, then of keys,
    /// then of values, all of one width.
    pub fn fused(self, field: impl Into<String>) -> Self {
        let field = field.into();
        Self { query: field.clone(), key: field, ..self }
    }

    /// Sets the dimension of the matrices that counts the outputs.
    pub fn layout(self, layout: MatrixLayout) -> Self {
        Self { layout: Some(layout), ..self }
    }

    /// The number of heads of queries, and of heads of keys.
    pub(super) fn counts(&self) -> [usize; 2] {
        match self.heads {
            Heads::Grouped { queries, keys } => [queries, keys],
            Heads::Latent { count, .. } => [count, count],
        }
    }
}
