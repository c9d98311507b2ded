//! The stages of a step: the buckets that are decided on together.

use crate::distributed::plan::Plan;

/// Buckets that are updated once all of them are reduced and decided on.
pub struct Stage {
    /// Indices of the buckets.
    pub buckets: Vec<usize>,
    /// `true` if the ranks exchange which parameters stay as they are. Otherwise the owner of every
    /// parameter decides on it alone.
    pub exchanges: bool,
}

/// Returns the stages of a plan: one for each bucket whose parameters have one owner each on any
/// number of ranks, and one for all others. In the last one, the ranks also count the skipped steps
/// of all parameters.
///
/// With `waits_for_all`, every update depends on the gradients of all parameters, and all buckets
/// are one stage.
pub fn stages(plan: &Plan, waits_for_all: bool) -> Vec<Stage> {
    let (alone, together): (Vec<_>, Vec<_>) =
        (0..plan.buckets().len()).partition(|index| !waits_for_all && plan.decides_alone(*index));
    let alone = alone.into_iter().map(|bucket| Stage { buckets: vec![bucket], exchanges: false });
    alone.chain([Stage { buckets: together, exchanges: true }]).collect()
}
