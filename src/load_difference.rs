//! The differences between what was saved and the run that loads it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of a run that a load did not take over from what was saved.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Difference {
    /// Path of the parameter in the model, or in the model that was saved.
    pub parameter: String,
    /// The part that was not taken over.
    pub kind: DifferenceKind,
    /// The problem, with what was expected and what was saved.
    pub problem: String,
}

/// The part of a run that has a [`Difference`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DifferenceKind {
    /// The values of the parameter: the model keeps its own. If the model does not have the
    /// parameter, the saved values are not used.
    Weights,
    /// The optimizer state of the parameter, which starts anew. If the parameter is not trained,
    /// the saved state is not used.
    State,
    /// The optimizer state of a trained parameter, of which none was saved: the parameter was
    /// frozen, or never had a gradient. It starts with an empty state.
    NoState,
}

impl Difference {
    pub(crate) fn new(
        parameter: impl Into<String>,
        kind: DifferenceKind,
        problem: impl Into<String>,
    ) -> Self {
        Self { parameter: parameter.into(), kind, problem: problem.into() }
    }

    /// The difference of a trained parameter without a saved state.
    pub(crate) fn no_state(parameter: &str) -> Self {
        Self::new(parameter, DifferenceKind::NoState, "none was saved")
    }

    /// Returns `true` if something was saved and not taken over.
    pub(crate) fn is_loss(&self) -> bool {
        self.kind != DifferenceKind::NoState
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match self.kind {
            DifferenceKind::Weights => "weights",
            DifferenceKind::State | DifferenceKind::NoState => "optimizer state",
        };
        write!(f, "{of} of `{}`: {}", self.parameter, self.problem)
    }
}

/// The differences as a list, a line each.
pub(crate) fn listed(differences: &[Difference]) -> String {
    let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
    format!("\n  {}", lines.join(";\n  "))
}
