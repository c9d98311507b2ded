//! Assignments of matrices to ranks, as numbers of interchangeable matrices, and their loads.

use std::collections::BTreeMap;

use super::ShapeCost;

/// A matrix, or a whole parameter: the index of its parameter in the plan, and its index in the
/// parameter.
pub type Matrix = (usize, usize);

/// The ranks that may own a matrix, in ascending order: of each that not every rank may own.
pub type Candidates = BTreeMap<Matrix, Vec<usize>>;

/// Interchangeable matrices: loads stay the same if two of them swap ranks.
pub(super) struct Class {
    pub cost: ShapeCost,
    pub matrices: Vec<Matrix>,
    /// The ranks that may own them. `None` for all ranks.
    pub candidates: Option<Vec<usize>>,
}

impl Class {
    /// Returns `true` if a rank may own the matrices.
    pub fn allows(&self, rank: usize) -> bool {
        self.candidates.as_ref().is_none_or(|ranks| ranks.contains(&rank))
    }
}

/// The number of matrices of each class that each rank owns: `[rank][class]`.
pub(super) type Assignment = Vec<Vec<usize>>;

/// The load of a rank that owns `counts` matrices, one entry per class.
pub(super) fn load(classes: &[Class], counts: &[usize]) -> f64 {
    classes.iter().zip(counts).map(|(class, &count)| class.cost.batch(count)).sum()
}

/// The load of the busiest rank.
pub(super) fn makespan(classes: &[Class], assignment: &Assignment) -> f64 {
    assignment.iter().map(|counts| load(classes, counts)).fold(0.0, f64::max)
}

/// The first of the busiest ranks, and its load.
pub(super) fn busiest(loads: &[f64]) -> (usize, f64) {
    // A later rank replaces an earlier one only with a larger load, so ties go to the first.
    let larger = |max: (usize, f64), next: (usize, f64)| if next.1 > max.1 { next } else { max };
    loads.iter().copied().enumerate().reduce(larger).expect("a world has ranks")
}
