//! The report of a plan: figures for every rank.

use std::fmt;

use comfy_table::{Table, presets};

use super::{Costs, Plan};

/// The matrices, cost and bytes of one rank, in a [`Report`].
#[derive(Debug, Clone, PartialEq)]
pub struct RankReport {
    /// Number of matrices that the rank owns.
    pub matrices: usize,
    /// Cost of updating these matrices, and whole parameters that have a cost, in the unit of the
    /// costs.
    pub cost: f64,
    /// Bytes of the rank's shards of all buckets, including padding. Replicated buckets count on
    /// every rank.
    pub bytes: usize,
}

/// The work of every rank, from [`Plan::report`]. Prints as a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// One entry per rank.
    pub ranks: Vec<RankReport>,
    /// The cost of the busiest rank divided by the mean cost.
    pub imbalance: f64,
}

impl Report {
    pub(super) fn new(plan: &Plan, costs: &Costs) -> Self {
        let is_matrix = |index: &usize| plan.parameters()[*index].matrices() > 0;
        let owners: Vec<usize> = (0..plan.parameters().len())
            .filter(is_matrix)
            .flat_map(|parameter| plan.owners()[parameter].iter().copied())
            .collect();
        let matrices = |rank| owners.iter().filter(|&&owner| owner == rank).count();
        let bytes = |rank: usize| {
            plan.buckets().iter().map(|bucket| bucket.counts.of(rank) * bucket.dtype.size()).sum()
        };
        let report =
            |(rank, cost)| RankReport { matrices: matrices(rank), cost, bytes: bytes(rank) };
        let ranks = plan.loads(costs).into_iter().enumerate().map(report).collect();
        Self { ranks, imbalance: plan.imbalance(costs) }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["rank", "matrices", "cost", "bytes"]);
        for (rank, RankReport { matrices, cost, bytes }) in self.ranks.iter().enumerate() {
            let cost = format!("{cost:.3e}");
            table.add_row([rank.to_string(), matrices.to_string(), cost, bytes.to_string()]);
        }
        write!(f, "{table}\n\nimbalance of cost: {:.4}", self.imbalance)
    }
}
