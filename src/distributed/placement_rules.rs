//! Rules that place parameters by path.

use regex::Regex;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::parameters::{Found, Placement};

/// Places the parameters whose path matches a regular expression, in the syntax of the crate
/// `regex`, which may match any part of the path. The last rule of
/// [`replicated`](Self::replicated), [`owned`](Self::owned) and [`rows`](Self::rows) that matches
/// decides; all rules of [`shard`](Self::shard) and [`partial`](Self::partial) that match apply.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Place {
    pattern: String,
    rule: Rule,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
enum Rule {
    Between(Placement),
    Rows,
    Cut { axis: String, dimension: usize, parts: usize },
    Partial { axis: String },
}

impl Place {
    fn new(pattern: impl Into<String>, rule: Rule) -> Self {
        Self { pattern: pattern.into(), rule }
    }

    /// Leaves parameters on every rank, or the slices of those that are cut.
    pub fn replicated(pattern: impl Into<String>) -> Self {
        Self::new(pattern, Rule::Between(Placement::Replicated))
    }

    /// Divides parameters among the ranks along the axis of
    /// [`Layout::owned`](super::Layout::owned) or [`Layout::rows`](super::Layout::rows), however
    /// small they are; not those that are cut along that axis. Matrices lie whole at their owners.
    ///
    /// Frozen parameters are divided if such a place names them, and only then: they are gathered
    /// at every use, and have no gradient that would be reduced.
    pub fn owned(pattern: impl Into<String>) -> Self {
        Self::new(pattern, Rule::Between(Placement::Owned))
    }

    /// [`owned`](Self::owned), with matrices in equal rows instead of whole at their owners, as
    /// [`Layout::rows`](super::Layout::rows) stores them.
    pub fn rows(pattern: impl Into<String>) -> Self {
        Self::new(pattern, Rule::Rows)
    }

    /// Cuts parameters along a dimension into slices, one for each rank along an axis of the mesh.
    /// In the model that [`Layout::shard`](super::Layout::shard) returns, a parameter is the slice
    /// of this rank, and the model computes with it. On an axis of
    /// [`Axis::model`](crate::distributed::Axis::model), that is tensor parallelism, as with
    /// [`parallel`](crate::parallel). On an axis of data, the slices are whole experts of a stack
    /// `[experts, in, out]` along dimension 0.
    ///
    /// Muon updates whole matrices nevertheless: their owners get all slices of the gradient, and
    /// return the slices of the new values.
    ///
    /// Frozen parameters are cut as well.
    ///
    /// Several rules for one parameter apply in their order, each to the slices of those before it.
    /// Ranks divide a dimension as [`World::part`](crate::comm::World::part) divides items: slices
    /// may differ by an element.
    ///
    /// ```
    /// use distmuon::distributed::Place;
    ///
    /// // Columns and rows of Burn's `[inputs, outputs]`.
    /// let columns = Place::shard(r"(query|key|value|up)\.weight$", "tp", 1);
    /// let rows = Place::shard(r"(output|down)\.weight$", "tp", 0);
    /// let bias = Place::shard(r"up\.bias$", "tp", 0);
    /// // Three projections side by side: every rank has columns of each.
    /// let fused = Place::shard(r"qkv\.weight$", "tp", 1).parts(3);
    /// # let _ = (columns, rows, bias, fused);
    /// ```
    pub fn shard(pattern: impl Into<String>, axis: impl Into<String>, dimension: usize) -> Self {
        Self::new(pattern, Rule::Cut { axis: axis.into(), dimension, parts: 1 })
    }

    /// Sets the number of equal parts of the dimension of [`shard`](Self::shard) of which every
    /// rank has a slice, as of a fused weight: 1 by default. Other places have no parts.
    pub fn parts(mut self, count: usize) -> Self {
        if let Rule::Cut { parts, .. } = &mut self.rule {
            *parts = count;
        }
        self
    }

    /// Adds up the gradients of parameters along an axis of
    /// [`Axis::model`](crate::distributed::Axis::model). Every rank has all of these parameters,
    /// and uses them for its slice only, such as the norms of queries and keys inside a region of
    /// tensor parallelism. Without it, their gradient is taken to be the same on all ranks of the
    /// axis.
    pub fn partial(pattern: impl Into<String>, axis: impl Into<String>) -> Self {
        Self::new(pattern, Rule::Partial { axis: axis.into() })
    }

    /// Returns `true` if it divides parameters among ranks between steps.
    pub(super) fn divides(&self) -> bool {
        self.rule.between() == Some(Placement::Owned)
    }

    /// The name of the axis that it is about, other than the owners' axis.
    pub(super) fn axis(&self) -> Option<&str> {
        match &self.rule {
            Rule::Between(_) | Rule::Rows => None,
            Rule::Cut { axis, .. } | Rule::Partial { axis } => Some(axis),
        }
    }

    /// Returns `true` if it is about an axis of slices only.
    pub(super) fn is_partial(&self) -> bool {
        matches!(self.rule, Rule::Partial { .. })
    }
}

impl Rule {
    /// The place between steps.
    fn between(&self) -> Option<Placement> {
        match self {
            Self::Between(placement) => Some(*placement),
            Self::Rows => Some(Placement::Owned),
            Self::Cut { .. } | Self::Partial { .. } => None,
        }
    }
}

/// The rules of a layout, compiled.
pub struct Places<'a>(Vec<(&'a Place, Regex)>);

/// The pattern of a place. Fails if it matches no parameter that the place can be for.
fn compiled(place: &Place, parameters: &[Found]) -> Result<Regex> {
    let regex = Regex::new(&place.pattern).map_err(|error| Error::Pattern {
        pattern: place.pattern.clone(),
        reason: error.to_string(),
    })?;
    let (takes_frozen, expected) = match place.rule {
        Rule::Cut { .. } | Rule::Rows | Rule::Between(Placement::Owned) => {
            (true, "a parameter whose path matches")
        }
        // A frozen parameter has no gradient, and lies on every rank unless a place owns it.
        Rule::Between(_) | Rule::Partial { .. } => {
            (false, "a trained parameter whose path matches")
        }
    };
    let matches = |found: &Found| (found.trainable || takes_frozen) && regex.is_match(&found.path);
    match parameters.iter().any(matches) {
        true => Ok(regex),
        false => Err(Error::UnusedRule { pattern: place.pattern.clone(), expected }),
    }
}

impl<'a> Places<'a> {
    /// Fails for a pattern that is malformed or matches no parameter. Frozen parameters are cut or
    /// owned.
    pub fn compile(places: &'a [Place], parameters: &[Found]) -> Result<Self> {
        places
            .iter()
            .map(|place| Ok((place, compiled(place, parameters)?)))
            .collect::<Result<_>>()
            .map(Self)
    }

    fn matching<'b>(&'b self, path: &'b str) -> impl DoubleEndedIterator<Item = &'a Rule> + 'b {
        let matching = self.0.iter().filter(move |(_, regex)| regex.is_match(path));
        matching.map(|(place, _)| &place.rule)
    }

    /// The placement by the last rule that matches.
    pub fn of(&self, path: &str) -> Option<Placement> {
        self.matching(path).rev().find_map(Rule::between)
    }

    /// `true` if that rule stores matrices in rows. `None` if no rule matches.
    pub fn in_rows(&self, path: &str) -> Option<bool> {
        let last = self.matching(path).rev().find(|rule| rule.between().is_some());
        last.map(|rule| *rule == Rule::Rows)
    }

    /// The cuts by all rules that match, in their order: axis, dimension and parts.
    pub fn cuts<'b>(&'b self, path: &'b str) -> impl Iterator<Item = (&'a str, usize, usize)> + 'b {
        self.matching(path).filter_map(|rule| match rule {
            Rule::Cut { axis, dimension, parts } => Some((&**axis, *dimension, *parts)),
            Rule::Between(_) | Rule::Rows | Rule::Partial { .. } => None,
        })
    }

    /// The axes along which gradients are partial.
    pub fn partial<'b>(&'b self, path: &'b str) -> impl Iterator<Item = &'a str> + 'b {
        self.matching(path).filter_map(|rule| match rule {
            Rule::Partial { axis } => Some(&**axis),
            Rule::Between(_) | Rule::Rows | Rule::Cut { .. } => None,
        })
    }
}
