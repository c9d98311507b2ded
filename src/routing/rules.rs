//! The user's routing rules, by path.

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::ParameterRole;
use super::built_in::flat_layout;
use crate::blocks::Split;
use crate::error::{Error, Result};
use crate::matrix_view::{MatrixLayout, MatrixView};
use crate::parameters::Found;

/// Routes the parameters whose path matches a regular expression to Muon, to AdamW or to an
/// optimizer of the user's.
///
/// A path consists of field names and indices, as in `blocks.0.mlp.up.weight`. The expression, in
/// the syntax of the crate `regex`, may match any part of the path. An expression that is malformed
/// or matches no suitable parameter is an error of [`MuonConfig::route`](crate::MuonConfig::route).
///
/// ```
/// use distmuon::{MuonConfig, RoutingRule};
///
/// let config = MuonConfig::new()
///     .with_rule(RoutingRule::muon(r"experts\.(up|down)$").batch())
///     .with_rule(RoutingRule::muon(r"^stem\.conv\d+\.").flatten())
///     .with_rule(RoutingRule::adamw("probe"));
/// ```
///
/// Frozen parameters stay frozen, even if a rule matches them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoutingRule {
    pattern: String,
    to: Destination,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Destination {
    Muon {
        view: MatrixView,
        layout: Option<MatrixLayout>,
        split: Option<Split>,
        #[serde(default)]
        left: Vec<usize>,
    },
    AdamW,
    Custom {
        optimizer: String,
    },
}

/// A [`RoutingRule`] that routes to Muon, from [`RoutingRule::muon`], with optional settings in any
/// order.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonRoutingRule {
    pattern: String,
    view: MatrixView,
    layout: Option<MatrixLayout>,
    split: Option<Split>,
    left: Vec<usize>,
}

impl RoutingRule {
    /// Routes matrices to Muon: parameters of two dimensions, or of more with
    /// [`MuonRoutingRule::batch`], [`MuonRoutingRule::leading`] or [`MuonRoutingRule::flatten`].
    /// AdamW updates vectors that match as well.
    pub fn muon(pattern: impl Into<String>) -> MuonRoutingRule {
        MuonRoutingRule {
            pattern: pattern.into(),
            view: MatrixView::Single,
            layout: None,
            split: None,
            left: vec![],
        }
    }

    /// Routes parameters to AdamW. The learning rate has the factor `embedding_lr` or `head_lr` for
    /// parameters to which the built-in rules give that role, and `vector_lr` for all others.
    pub fn adamw(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), to: Destination::AdamW }
    }

    /// Routes parameters of up to eight dimensions to an optimizer that
    /// [`MuonConfig::with_optimizer`](crate::MuonConfig::with_optimizer) was given under this name,
    /// which updates every parameter as a whole: see [`custom`](crate::custom). Roles and learning
    /// rates are as for [`adamw`](Self::adamw).
    pub fn custom(pattern: impl Into<String>, optimizer: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), to: Destination::Custom { optimizer: optimizer.into() } }
    }

    /// The name of the optimizer of the user's that the rule routes to.
    pub(crate) fn optimizer(&self) -> Option<&str> {
        match &self.to {
            Destination::Custom { optimizer } => Some(optimizer),
            Destination::Muon { .. } | Destination::AdamW => None,
        }
    }
}

impl MuonRoutingRule {
    /// Takes parameters of three or more dimensions as stacks of matrices: a matrix of the last two
    /// dimensions for every index of the others. AdamW updates parameters with fewer dimensions,
    /// such as stacked biases.
    pub fn batch(self) -> Self {
        Self { view: MatrixView::Batch, ..self }
    }

    /// Takes parameters of three or more dimensions as matrices of the first two, one for every
    /// index of the others, as for weights of frequencies: `[in, out, modes]`. AdamW updates
    /// parameters with fewer dimensions.
    pub fn leading(self) -> Self {
        Self { view: MatrixView::Leading, ..self }
    }

    /// Takes a parameter as one matrix of the first dimension by all others. Unless
    /// [`layout`](Self::layout) is called, the first dimension counts the outputs, except in Burn's
    /// transposed convolutions (`[in, out, height, width]`), where it counts the inputs.
    pub fn flatten(self) -> Self {
        Self { view: MatrixView::Flatten, ..self }
    }

    /// Takes the matrix as blocks of the given numbers of outputs, as for a fused projection of
    /// queries, keys and values, or of gates and inputs. The sizes add up to the outputs of the
    /// matrix.
    ///
    /// Every block is a matrix of its own: its momentum is orthogonalised alone, and its
    /// learning-rate scale is that of its own shape. The update is as for separate parameters.
    ///
    /// ```
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// // 32 heads of 64 queries, and 8 heads of 64 keys and values.
    /// let config =
    ///     MuonConfig::new().with_rule(RoutingRule::muon(r"qkv\.weight$").split([2048, 512, 512]));
    /// ```
    pub fn split(self, outputs: impl Into<Vec<usize>>) -> Self {
        Self { split: Some(Split::Sizes(outputs.into())), ..self }
    }

    /// Takes the matrix as a number of blocks of equal size, one for each head. Otherwise as
    /// [`split`](Self::split).
    pub fn heads(self, count: usize) -> Self {
        Self { split: Some(Split::Equal(count)), ..self }
    }

    /// Leaves blocks of [`split`](Self::split) or [`heads`](Self::heads) to AdamW, at the learning
    /// rate of vectors, by their indices: the time steps of a state space, for example, whose fused
    /// projection is a matrix in other outputs.
    ///
    /// ```
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// // Gates, inputs and both state matrices are Muon's; the time steps are AdamW's.
    /// let in_proj = RoutingRule::muon(r"in_proj\.weight$").split([64, 64, 16, 16, 8]).leave([4]);
    /// let config = MuonConfig::new().with_rule(in_proj);
    /// ```
    pub fn leave(self, blocks: impl Into<Vec<usize>>) -> Self {
        Self { left: blocks.into(), ..self }
    }

    /// Sets the dimension of the matrix that counts the outputs, which Muon's learning-rate scale
    /// and parts depend on.
    pub fn layout(self, layout: MatrixLayout) -> Self {
        Self { layout: Some(layout), ..self }
    }
}

impl From<MuonRoutingRule> for RoutingRule {
    fn from(MuonRoutingRule { pattern, view, layout, split, left }: MuonRoutingRule) -> Self {
        Self { pattern, to: Destination::Muon { view, layout, split, left } }
    }
}

impl RoutingRule {
    /// The decision about a parameter in place of the built-in one.
    fn decide(
        &self,
        found: &Found,
        built_in: &Decision<'_>,
        default: MatrixLayout,
    ) -> Decision<'_> {
        // A rule moves the parameter to AdamW, and leaves it the learning rate of its role.
        let adamw = match built_in.role {
            ParameterRole::Muon { .. } => ParameterRole::Vector,
            role @ (ParameterRole::Embedding
            | ParameterRole::Head
            | ParameterRole::Vector
            | ParameterRole::Frozen) => role,
        };
        let rest = |reason| Decision {
            role: adamw,
            optimizer: self.optimizer(),
            split: None,
            left: &[],
            reason,
        };
        match &self.to {
            &Destination::Muon { view, layout, ref split, ref left } if view.fits(&found.shape) => {
                let layout = layout.unwrap_or_else(|| match view {
                    MatrixView::Flatten => flat_layout(found),
                    MatrixView::Single | MatrixView::Batch | MatrixView::Leading => default,
                });
                let overridden = match built_in.role {
                    ParameterRole::Muon { .. } => String::new(),
                    _ => format!(", overrides \"{}\"", built_in.reason),
                };
                Decision {
                    role: ParameterRole::Muon { view, layout },
                    optimizer: None,
                    split: split.as_ref(),
                    left,
                    reason: format!("rule `{}`{overridden}", self.pattern),
                }
            }
            Destination::Muon { .. } => rest(format!("rule `{}`, but not a matrix", self.pattern)),
            Destination::AdamW | Destination::Custom { .. } => {
                rest(format!("rule `{}`", self.pattern))
            }
        }
    }

    /// Returns the kind of parameter that the rule needs, if none of those that it matches is one.
    fn missing(&self, matches: &[&Found]) -> Option<&'static str> {
        match &self.to {
            _ if matches.is_empty() => Some("a parameter that it matches"),
            Destination::Muon { view, .. }
                if !matches.iter().any(|found| view.fits(&found.shape)) =>
            {
                Some(match view {
                    MatrixView::Batch | MatrixView::Leading => {
                        "a parameter of three or more dimensions that it matches"
                    }
                    MatrixView::Single | MatrixView::Flatten => "a matrix that it matches",
                })
            }
            Destination::Muon { .. } | Destination::AdamW | Destination::Custom { .. } => None,
        }
    }
}

/// The decision about a parameter.
pub(super) struct Decision<'a> {
    pub role: ParameterRole,
    /// The name of an optimizer of the user's that updates the parameter.
    pub optimizer: Option<&'a str>,
    /// The blocks that the parameter's matrices are cut into.
    pub split: Option<&'a Split>,
    /// The indices of the blocks that AdamW updates.
    pub left: &'a [usize],
    pub reason: String,
}

/// The rules of a configuration, with compiled patterns.
pub(super) struct Rules<'a>(Vec<(&'a RoutingRule, Regex)>);

impl<'a> Rules<'a> {
    /// Compiles rules. Fails for patterns that are malformed, and for rules that have no effect in
    /// a model.
    pub fn compile(rules: &'a [RoutingRule], parameters: &[Found]) -> Result<Self> {
        let compile = |rule: &'a RoutingRule| match Regex::new(&rule.pattern) {
            Ok(regex) => Ok((rule, regex)),
            Err(error) => {
                Err(Error::Pattern { pattern: rule.pattern.clone(), reason: error.to_string() })
            }
        };
        let rules = rules.iter().map(compile).collect::<Result<Vec<_>>>()?;
        for (rule, regex) in &rules {
            let matches: Vec<&Found> =
                parameters.iter().filter(|found| regex.is_match(&found.path)).collect();
            // A rule with a typing error would otherwise train with the defaults, in silence.
            if let Some(expected) = rule.missing(&matches) {
                return Err(Error::UnusedRule { pattern: rule.pattern.clone(), expected });
            }
        }
        Ok(Self(rules))
    }

    /// Returns the decision of the last rule that matches a parameter.
    pub fn decide(
        &self,
        found: &Found,
        built_in: &Decision<'_>,
        layout: MatrixLayout,
    ) -> Option<Decision<'a>> {
        // The last rule that matches counts, so general rules come first.
        let (rule, _) = self.0.iter().rev().find(|(_, regex)| regex.is_match(&found.path))?;
        Some(rule.decide(found, built_in, layout))
    }
}
