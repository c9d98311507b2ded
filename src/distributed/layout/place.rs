//! Rules that place parameters by path.

use regex::Regex;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::parameters::{Found, Placement};

/// Places the parameters whose path matches a regular expression, in the syntax of the crate
/// `regex`, which may match any part of the path. The last rule that matches decides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Place {
    pattern: String,
    placement: Placement,
}

impl Place {
    /// Leaves parameters on every rank.
    pub fn replicated(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), placement: Placement::Replicated }
    }

    /// Returns `true` if it divides parameters among ranks.
    pub(super) fn divides(&self) -> bool {
        self.placement == Placement::Owned
    }

    /// Divides parameters among the ranks along the axis of
    /// [`Layout::owned`](super::Layout::owned), however small they are.
    pub fn owned(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), placement: Placement::Owned }
    }
}

/// The rules of a layout, compiled.
pub struct Places<'a>(Vec<(&'a Place, Regex)>);

impl<'a> Places<'a> {
    /// Fails for a pattern that is malformed or matches no trained parameter.
    pub fn compile(places: &'a [Place], parameters: &[Found]) -> Result<Self> {
        let compile = |place: &'a Place| {
            let regex = Regex::new(&place.pattern).map_err(|error| Error::Pattern {
                pattern: place.pattern.clone(),
                reason: error.to_string(),
            })?;
            let matches = |found: &Found| found.trainable && regex.is_match(&found.path);
            match parameters.iter().any(matches) {
                true => Ok((place, regex)),
                false => Err(Error::UnusedRule {
                    pattern: place.pattern.clone(),
                    expected: "a trained parameter whose path matches",
                }),
            }
        };
        places.iter().map(compile).collect::<Result<_>>().map(Self)
    }

    /// The placement by the last rule that matches.
    pub fn of(&self, path: &str) -> Option<Placement> {
        let matching = self.0.iter().rev().find(|(_, regex)| regex.is_match(path));
        matching.map(|(place, _)| place.placement)
    }
}
