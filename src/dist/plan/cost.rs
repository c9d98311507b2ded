//! What updating matrices costs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Parameter, Work, refused};
use crate::error::Result;

/// What updating matrices of one shape costs: `k` of them in one batch take `fixed + k * each`.
/// The unit is that of all [`Costs`]: floating-point operations, or seconds where measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ShapeCost {
    /// Of a batch, however many matrices it has.
    pub fixed: f64,
    /// Of each matrix.
    pub each: f64,
}

impl ShapeCost {
    /// The cost of a batch of so many matrices; 0 if there are none.
    pub fn batch(self, count: usize) -> f64 {
        if count == 0 { 0.0 } else { self.fixed + self.each * count as f64 }
    }
}

/// What updating matrices costs, by shape `[rows, columns]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<Entry>", into = "Vec<Entry>")]
pub struct Costs(BTreeMap<[usize; 2], ShapeCost>);

impl Costs {
    /// The given costs. Of several for a shape the last counts.
    pub fn new(costs: impl IntoIterator<Item = ([usize; 2], ShapeCost)>) -> Self {
        Self(costs.into_iter().collect())
    }

    /// The cost of a shape.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn of(&self, shape: [usize; 2]) -> ShapeCost {
        *self.0.get(&shape).unwrap_or_else(|| panic!("no cost of matrices of shape {shape:?}"))
    }

    /// The shapes that have a cost, in ascending order.
    pub fn shapes(&self) -> impl Iterator<Item = [usize; 2]> {
        self.0.keys().copied()
    }

    /// The larger of both costs, in both parts; a shape that only one of them has keeps its cost.
    /// Ranks that measured for themselves agree by this on what all of them can hold to.
    pub fn maximum(&self, other: &Self) -> Self {
        let mut costs = self.0.clone();
        for (&shape, b) in &other.0 {
            let larger = |a: &mut ShapeCost| {
                *a = ShapeCost { fixed: a.fixed.max(b.fixed), each: a.each.max(b.each) }
            };
            costs.entry(shape).and_modify(larger).or_insert(*b);
        }
        Self(costs)
    }

    /// Whether every matrix has a cost to reckon with.
    pub(super) fn check(&self, parameters: &[Parameter]) -> Result<()> {
        let valid = |part: f64| part.is_finite() && part >= 0.0;
        for parameter in parameters {
            let Work::Matrices { rows, columns, .. } = parameter.work else { continue };
            let cost = self.0.get(&[rows, columns]);
            if !cost.is_some_and(|cost| valid(cost.fixed) && valid(cost.each)) {
                let value = format!("{cost:?} for matrices of {rows} x {columns}");
                return Err(refused("costs", value, "finite and at least 0 for every shape"));
            }
        }
        Ok(())
    }
}

/// One shape of [`Costs`] in a file, where keys have to be text.
#[derive(Serialize, Deserialize)]
struct Entry {
    shape: [usize; 2],
    #[serde(flatten)]
    cost: ShapeCost,
}

impl From<Vec<Entry>> for Costs {
    fn from(entries: Vec<Entry>) -> Self {
        Self::new(entries.into_iter().map(|entry| (entry.shape, entry.cost)))
    }
}

impl From<Costs> for Vec<Entry> {
    fn from(costs: Costs) -> Self {
        costs.0.into_iter().map(|(shape, cost)| Entry { shape, cost }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [[usize; 2]; 3] = [[4, 4], [4, 8], [8, 4]];

    fn costs(of: &[([usize; 2], f64, f64)]) -> Costs {
        Costs::new(of.iter().map(|&(shape, fixed, each)| (shape, ShapeCost { fixed, each })))
    }

    #[test]
    fn maximum_takes_the_larger_of_each_part() {
        let [a, b, c] = SHAPES;
        let one = costs(&[(a, 1.0, 5.0), (b, 2.0, 2.0)]);
        let other = costs(&[(a, 3.0, 4.0), (c, 1.0, 1.0)]);
        let both = costs(&[(a, 3.0, 5.0), (b, 2.0, 2.0), (c, 1.0, 1.0)]);
        assert_eq!(one.maximum(&other), both);
        assert_eq!(other.maximum(&one), both);
        assert!(both.shapes().eq(SHAPES));
    }

    #[test]
    fn costs_survive_a_file() {
        let costs = costs(&[(SHAPES[0], 0.0, 1.5), (SHAPES[1], 2.0, 3.0)]);
        let text = serde_json::to_string(&costs).unwrap();
        assert!(text.starts_with(r#"[{"shape":[4,4],"fixed":0.0,"each":1.5}"#), "{text}");
        assert_eq!(serde_json::from_str::<Costs>(&text).unwrap(), costs);
    }

    #[test]
    #[should_panic = "[4, 8]"]
    fn an_unknown_shape_is_named() {
        costs(&[(SHAPES[0], 0.0, 1.0)]).of(SHAPES[1]);
    }
}
