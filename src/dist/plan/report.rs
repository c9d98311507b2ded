//! A plan in figures.

use std::fmt;

use comfy_table::{Table, presets};

use super::{Costs, Plan};

/// What one rank has to do.
#[derive(Debug, Clone, PartialEq)]
pub struct RankReport {
    /// Matrices that it owns.
    pub matrices: usize,
    /// What updating them costs, in the unit of the costs.
    pub cost: f64,
    /// Its shares of all buckets, in bytes, with padding. Replicated ones count on every rank.
    pub bytes: usize,
}

/// What every rank has to do, from [`Plan::report`]. Prints as a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// By rank.
    pub ranks: Vec<RankReport>,
    /// The cost of the busiest rank over the mean.
    pub imbalance: f64,
}

impl Report {
    pub(super) fn new(plan: &Plan, costs: &Costs) -> Self {
        let owned = |rank| plan.owners().iter().flatten().filter(|&&owner| owner == rank).count();
        let bytes = |rank: usize| {
            plan.buckets().iter().map(|bucket| bucket.counts[rank] * bucket.dtype.size()).sum()
        };
        let report = |(rank, cost)| RankReport { matrices: owned(rank), cost, bytes: bytes(rank) };
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
