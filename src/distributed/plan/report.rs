//! The report of a plan: figures for every rank.

use std::fmt;

use comfy_table::{Table, presets};

use super::{Costs, Parameter, Plan, Work};

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

/// The matrices of one shape in a [`Report`], and the parameters of that shape that are updated
/// whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupReport {
    /// Shape of each of them.
    pub shape: Vec<usize>,
    /// Number of them that each rank owns.
    pub owned: Vec<usize>,
}

impl GroupReport {
    /// Returns the number of matrices or parameters.
    pub fn count(&self) -> usize {
        self.owned.iter().sum()
    }

    /// The ranks that own some, with the number of each: neighbours with one number together.
    fn owners(&self) -> String {
        let (mut ranges, mut first): (Vec<String>, usize) = (vec![], 0);
        for alike in self.owned.chunk_by(|a, b| a == b) {
            let (last, each) = (first + alike.len() - 1, alike[0]);
            match alike.len() {
                _ if each == 0 => {}
                1 => ranges.push(format!("{first}: {each}")),
                _ => ranges.push(format!("{first}-{last}: {each} each")),
            }
            first = last + 1;
        }
        ranges.join(", ")
    }
}

/// The work of every rank, from [`Plan::report`]. Prints as two tables.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// One entry per shape of matrices or whole parameters, in the order of the plan's buckets.
    pub groups: Vec<GroupReport>,
    /// One entry per rank.
    pub ranks: Vec<RankReport>,
    /// The cost of the busiest rank divided by the mean cost.
    pub imbalance: f64,
}

impl Report {
    pub(super) fn new(plan: &Plan, costs: &Costs) -> Self {
        let owners: Vec<usize> = (0..plan.parameters().len())
            .filter(|index| plan.parameters()[*index].matrices() > 0)
            .flat_map(|parameter| plan.owners()[parameter].iter().copied())
            .collect();
        let matrices = |rank| owners.iter().filter(|&&owner| owner == rank).count();
        let bytes = |rank: usize| {
            plan.buckets().iter().map(|bucket| bucket.counts.of(rank) * bucket.dtype.size()).sum()
        };
        let report =
            |(rank, cost)| RankReport { matrices: matrices(rank), cost, bytes: bytes(rank) };
        let ranks = plan.loads(costs).into_iter().enumerate().map(report).collect();
        Self { groups: groups(plan), ranks, imbalance: plan.imbalance(costs) }
    }
}

/// The matrices and whole parameters of a plan, by their shapes.
fn groups(plan: &Plan) -> Vec<GroupReport> {
    let mut groups: Vec<GroupReport> = vec![];
    for &index in plan.buckets().iter().flat_map(|bucket| &bucket.parameters) {
        let Parameter { work, shape, .. } = &plan.parameters()[index];
        let shape = match *work {
            Work::Matrices { rows, columns, .. } => vec![rows, columns],
            Work::Whole => shape.clone(),
            Work::Elements => continue,
        };
        let group = match groups.iter().position(|group| group.shape == shape) {
            Some(group) => group,
            None => {
                groups.push(GroupReport { shape, owned: vec![0; plan.world_size()] });
                groups.len() - 1
            }
        };
        for &owner in &plan.owners()[index] {
            groups[group].owned[owner] += 1;
        }
    }
    groups
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.groups.is_empty() {
            let mut table = Table::new();
            table.load_style(presets::ASCII_MARKDOWN);
            table.set_header(["count", "shape", "owners"]);
            for group in &self.groups {
                let shape = format!("{:?}", group.shape);
                table.add_row([group.count().to_string(), shape, group.owners()]);
            }
            write!(f, "{table}\n\n")?;
        }
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
