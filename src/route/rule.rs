//! The user's rules, by path.

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::Group;
use super::walk::Found;
use crate::error::{Error, Result};
use crate::muon::{MatrixLayout, MatrixView};

/// Sends the parameters whose path matches a regular expression to Muon or to AdamW.
///
/// A path is made of field names and indices, as in `blocks.0.mlp.up.weight`; the expression may
/// match any part of it.
///
/// ```
/// use distmuon::{MuonConfig, Rule};
///
/// let config = MuonConfig::new()
///     .with_rule(Rule::muon(r"experts\.(up|down)$").batch())
///     .with_rule(Rule::muon(r"^stem\.conv\d+\.").flatten())
///     .with_rule(Rule::adamw("probe"));
/// ```
///
/// Frozen parameters stay frozen, whatever a rule says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    pattern: String,
    to: Destination,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Destination {
    Muon { view: MatrixView, layout: Option<MatrixLayout> },
    AdamW,
}

/// A [`Rule`] to Muon, from [`Rule::muon`]: what it says further of the matrices, in any order.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonRule {
    pattern: String,
    view: MatrixView,
    layout: Option<MatrixLayout>,
}

impl Rule {
    /// Sends matrices to Muon: parameters of two dimensions, or with [`MuonRule::batch`] and
    /// [`MuonRule::flatten`] of more. Vectors that match as well are left to AdamW.
    pub fn muon(pattern: impl Into<String>) -> MuonRule {
        MuonRule { pattern: pattern.into(), view: MatrixView::Single, layout: None }
    }

    /// Sends parameters to AdamW: at the rate of embeddings or of the head where the built-in rules
    /// see one, else at the rate of vectors.
    pub fn adamw(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), to: Destination::AdamW }
    }
}

impl MuonRule {
    /// Takes parameters of three or more dimensions as stacks of matrices: the last two dimensions,
    /// for every index of the others. What has fewer is left to AdamW, such as the biases of a stack.
    pub fn batch(self) -> Self {
        Self { view: MatrixView::Batch, ..self }
    }

    /// Takes a parameter as one matrix of the first dimension by all others. Unless
    /// [`layout`](Self::layout) says otherwise, the first dimension counts the outputs, and in Burn's
    /// transposed convolutions (`[in, out, height, width]`) the inputs.
    pub fn flatten(self) -> Self {
        Self { view: MatrixView::Flatten, ..self }
    }

    /// Says which dimension of the matrix counts the outputs, for Muon's learning-rate scale.
    pub fn layout(self, layout: MatrixLayout) -> Self {
        Self { layout: Some(layout), ..self }
    }
}

impl From<MuonRule> for Rule {
    fn from(MuonRule { pattern, view, layout }: MuonRule) -> Self {
        Self { pattern, to: Destination::Muon { view, layout } }
    }
}

impl Rule {
    /// The group of a parameter that the built-in rules would send to `built_in`, and why.
    fn decide(&self, found: &Found, built_in: Group, default: MatrixLayout) -> (Group, String) {
        let adamw = match built_in {
            Group::Muon { .. } => Group::Vector,
            other => other,
        };
        match self.to {
            Destination::Muon { view, layout } if view.fits(&found.shape) => {
                let layout = layout.unwrap_or_else(|| match view {
                    MatrixView::Flatten if found.holder().starts_with("ConvTranspose") => {
                        MatrixLayout::InOut
                    }
                    MatrixView::Flatten => MatrixLayout::OutIn,
                    MatrixView::Single | MatrixView::Batch => default,
                });
                (Group::Muon { view, layout }, format!("rule `{}`", self.pattern))
            }
            Destination::Muon { .. } => (adamw, format!("rule `{}`, but no matrix", self.pattern)),
            Destination::AdamW => (adamw, format!("rule `{}`", self.pattern)),
        }
    }

    /// Returns what it needs among the parameters that it matches, if that is not there.
    fn lack(&self, matches: &[&Found]) -> Option<&'static str> {
        match self.to {
            _ if matches.is_empty() => Some("a parameter that it matches"),
            Destination::Muon { view, .. }
                if !matches.iter().any(|found| view.fits(&found.shape)) =>
            {
                Some(match view {
                    MatrixView::Batch => "a parameter of three or more dimensions that it matches",
                    MatrixView::Single | MatrixView::Flatten => "a matrix that it matches",
                })
            }
            _ => None,
        }
    }
}

/// The rules of a configuration, ready to be asked.
pub(super) struct Rules<'a>(Vec<(&'a Rule, Regex)>);

impl<'a> Rules<'a> {
    /// Refuses patterns that are malformed, and rules without anything to do in a model.
    pub fn compile(rules: &'a [Rule], parameters: &[Found]) -> Result<Self> {
        let compile = |rule: &'a Rule| match Regex::new(&rule.pattern) {
            Ok(regex) => Ok((rule, regex)),
            Err(error) => {
                Err(Error::Pattern { pattern: rule.pattern.clone(), reason: error.to_string() })
            }
        };
        let rules = rules.iter().map(compile).collect::<Result<Vec<_>>>()?;
        for (rule, regex) in &rules {
            let matches: Vec<&Found> =
                parameters.iter().filter(|found| regex.is_match(&found.path)).collect();
            if let Some(expected) = rule.lack(&matches) {
                return Err(Error::UnusedRule { pattern: rule.pattern.clone(), expected });
            }
        }
        Ok(Self(rules))
    }

    /// Returns the decision of the last rule that matches a parameter.
    pub fn decide(
        &self,
        found: &Found,
        built_in: Group,
        layout: MatrixLayout,
    ) -> Option<(Group, String)> {
        let (rule, _) = self.0.iter().rev().find(|(_, regex)| regex.is_match(&found.path))?;
        Some(rule.decide(found, built_in, layout))
    }
}
