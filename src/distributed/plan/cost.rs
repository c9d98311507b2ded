//! The costs of updating matrices.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Parameter, Work};
use crate::error::{Error, Result};

/// The cost of updating matrices of one shape: a batch of `k` matrices takes `fixed + k * each`.
/// All [`Costs`] have the same unit, floating-point operations or measured seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ShapeCost {
    /// Cost of a batch, independent of the number of its matrices.
    pub fixed: f64,
    /// Cost of each matrix.
    pub each: f64,
}

impl ShapeCost {
    /// Returns the cost of a batch of `count` matrices, which is 0 for a `count` of 0.
    pub fn batch(self, count: usize) -> f64 {
        // No matrix, no launch: a batch has the fixed cost once.
        if count == 0 { 0.0 } else { self.fixed + self.each * count as f64 }
    }
}

/// The costs of updating matrices, by shape `[rows, columns]`, and parameters that are updated
/// whole, by path.
///
/// ```
/// use distmuon::distributed::plan::{Costs, ShapeCost};
///
/// let costs = Costs::new([([64, 64], ShapeCost { fixed: 1.0, each: 3.0 })]);
/// let costs = costs.with_whole([("embedding.weight".to_owned(), 5.0)]);
/// assert_eq!(costs.of([64, 64]).batch(2), 1.0 + 2.0 * 3.0);
/// assert_eq!(costs.of_whole("embedding.weight"), Some(5.0));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<CostEntry>", into = "Vec<CostEntry>")]
pub struct Costs {
    matrices: BTreeMap<[usize; 2], ShapeCost>,
    whole: BTreeMap<String, f64>,
}

impl Costs {
    /// Collects costs by shape `[rows, columns]`. If a shape has several costs, the last one
    /// counts.
    pub fn new(costs: impl IntoIterator<Item = ([usize; 2], ShapeCost)>) -> Self {
        Self { matrices: costs.into_iter().collect(), whole: BTreeMap::new() }
    }

    /// Adds the costs of parameters that are updated whole, by path.
    pub fn with_whole(mut self, costs: impl IntoIterator<Item = (String, f64)>) -> Self {
        self.whole.extend(costs);
        self
    }

    /// Multiplies all costs, as from operations to seconds.
    pub fn scaled(&self, factor: f64) -> Self {
        let of_shape = |(shape, cost): (&[usize; 2], &ShapeCost)| {
            (*shape, ShapeCost { fixed: cost.fixed * factor, each: cost.each * factor })
        };
        let of_whole = |(path, cost): (&String, &f64)| (path.clone(), cost * factor);
        Self {
            matrices: self.matrices.iter().map(of_shape).collect(),
            whole: self.whole.iter().map(of_whole).collect(),
        }
    }

    /// Returns the cost of a parameter that is updated whole, or `None` if its optimizer has none.
    pub fn of_whole(&self, path: &str) -> Option<f64> {
        self.whole.get(path).copied()
    }

    /// Returns the cost of a shape `[rows, columns]`.
    ///
    /// # Panics
    ///
    /// If the shape has no cost.
    pub fn of(&self, shape: [usize; 2]) -> ShapeCost {
        *self
            .matrices
            .get(&shape)
            .unwrap_or_else(|| panic!("no cost of matrices of shape {shape:?}"))
    }

    /// Returns the shapes with a cost, in ascending order.
    pub fn shapes(&self) -> impl Iterator<Item = [usize; 2]> {
        self.matrices.keys().copied()
    }

    /// Returns the larger of both costs for each shape, separately for `fixed` and `each`, and for
    /// each whole parameter. What is in only one of both keeps its cost. Ranks that measure
    /// separately combine their costs in this way, so that the slowest rank counts.
    pub fn maximum(&self, other: &Self) -> Self {
        let Self { mut matrices, mut whole } = self.clone();
        for (&shape, b) in &other.matrices {
            let larger = |a: &mut ShapeCost| {
                *a = ShapeCost { fixed: a.fixed.max(b.fixed), each: a.each.max(b.each) }
            };
            matrices.entry(shape).and_modify(larger).or_insert(*b);
        }
        for (path, &cost) in &other.whole {
            let larger = |known: &mut f64| *known = known.max(cost);
            whole.entry(path.clone()).and_modify(larger).or_insert(cost);
        }
        Self { matrices, whole }
    }

    /// Fails unless every matrix has a finite cost of at least 0, and whole parameters have such a
    /// cost or none.
    pub(super) fn check(&self, parameters: &[Parameter]) -> Result<()> {
        let valid = |part: f64| part.is_finite() && part >= 0.0;
        for parameter in parameters {
            let Work::Matrices { rows, columns, .. } = parameter.work else { continue };
            let cost = self.matrices.get(&[rows, columns]);
            if !cost.is_some_and(|cost| valid(cost.fixed) && valid(cost.each)) {
                let value = format!("{cost:?} for matrices of {rows} x {columns}");
                return Err(Error::setting(
                    "costs",
                    value,
                    "a finite cost of at least 0 for every shape",
                ));
            }
        }
        match self.whole.iter().find(|(_, cost)| !valid(**cost)) {
            Some((path, cost)) => {
                let value = format!("{cost} for `{path}`");
                Err(Error::setting("costs", value, "a finite number of operations, at least 0"))
            }
            None => Ok(()),
        }
    }
}

/// One shape or whole parameter of [`Costs`] in a file: a list of entries, because keys of JSON
/// maps are text.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum CostEntry {
    Matrices {
        shape: [usize; 2],
        #[serde(flatten)]
        cost: ShapeCost,
    },
    Whole {
        parameter: String,
        cost: f64,
    },
}

// Keys of a JSON object are texts: a list of entries has the shapes as numbers.
impl From<Vec<CostEntry>> for Costs {
    fn from(entries: Vec<CostEntry>) -> Self {
        let mut costs = Self::default();
        for entry in entries {
            match entry {
                CostEntry::Matrices { shape, cost } => drop(costs.matrices.insert(shape, cost)),
                CostEntry::Whole { parameter, cost } => drop(costs.whole.insert(parameter, cost)),
            }
        }
        costs
    }
}

impl From<Costs> for Vec<CostEntry> {
    fn from(costs: Costs) -> Self {
        let Costs { matrices, whole } = costs;
        let matrices =
            matrices.into_iter().map(|(shape, cost)| CostEntry::Matrices { shape, cost });
        let whole = whole.into_iter();
        matrices
            .chain(whole.map(|(parameter, cost)| CostEntry::Whole { parameter, cost }))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [[usize; 2]; 3] = [[4, 4], [4, 8], [8, 4]];

    fn costs(entries: &[([usize; 2], f64, f64)]) -> Costs {
        Costs::new(entries.iter().map(|&(shape, fixed, each)| (shape, ShapeCost { fixed, each })))
    }

    #[test]
    fn maximum_takes_the_larger_of_each_part() {
        let [a, b, c] = SHAPES;
        let one = costs(&[(a, 1.0, 5.0), (b, 2.0, 2.0)]);
        let other = costs(&[(a, 3.0, 4.0), (c, 1.0, 1.0)]);
        let whole = |costs: Costs, all: &[(&str, f64)]| {
            costs.with_whole(all.iter().map(|(path, cost)| (path.to_string(), *cost)))
        };
        let one = whole(one, &[("head", 2.0), ("up", 1.0)]);
        let other = whole(other, &[("head", 3.0), ("down", 1.0)]);
        let both = costs(&[(a, 3.0, 5.0), (b, 2.0, 2.0), (c, 1.0, 1.0)]);
        let both = whole(both, &[("head", 3.0), ("up", 1.0), ("down", 1.0)]);
        assert_eq!(one.maximum(&other), both);
        assert_eq!(other.maximum(&one), both);
        assert!(both.shapes().eq(SHAPES));
    }

    #[test]
    fn scaled_costs_are_multiples() {
        let whole = |cost: f64| [("head".to_owned(), cost)];
        let one = costs(&[(SHAPES[0], 1.0, 2.0)]).with_whole(whole(3.0));
        assert_eq!(one.scaled(0.5), costs(&[(SHAPES[0], 0.5, 1.0)]).with_whole(whole(1.5)));
    }

    #[test]
    fn costs_are_equal_after_a_round_trip_through_json() {
        let costs = costs(&[(SHAPES[0], 0.0, 1.5), (SHAPES[1], 2.0, 3.0)]);
        let costs = costs.with_whole([("head.weight".to_owned(), 4.5)]);
        let text = serde_json::to_string(&costs).unwrap();
        assert!(text.starts_with(r#"[{"shape":[4,4],"fixed":0.0,"each":1.5}"#), "{text}");
        assert!(text.ends_with(r#"{"parameter":"head.weight","cost":4.5}]"#), "{text}");
        assert_eq!(serde_json::from_str::<Costs>(&text).unwrap(), costs);
    }

    #[test]
    #[should_panic = "[4, 8]"]
    fn a_shape_without_a_cost_panics_with_the_shape() {
        costs(&[(SHAPES[0], 0.0, 1.0)]).of(SHAPES[1]);
    }
}
