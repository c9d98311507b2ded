//! A routing as tables: its parameters, and what its groups cost.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};

use super::{Route, Routing};

/// The parameters of a group and their costs. Groups are those that learning rates are
/// given to, so that all views of Muon are one.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupSummary {
    /// The group, as in `AdamW (head)`; `frozen` for what nothing updates.
    pub optimizer: &'static str,
    /// The number of its tensors.
    pub tensors: usize,
    /// The number of their elements.
    pub parameters: usize,
    /// Floating-point operations of Muon's iteration per step.
    pub operations: f64,
    /// Bytes that the optimizer remembers, but for a few per tensor.
    pub state_bytes: usize,
}

impl GroupSummary {
    fn of<'a>(optimizer: &'static str, routes: impl Iterator<Item = &'a Route>) -> Self {
        let empty = Self { optimizer, tensors: 0, parameters: 0, operations: 0.0, state_bytes: 0 };
        routes.fold(empty, |sum, route| Self {
            tensors: sum.tensors + 1,
            parameters: sum.parameters + route.shape.iter().product::<usize>(),
            operations: sum.operations + route.operations,
            state_bytes: sum.state_bytes + route.state_bytes,
            ..sum
        })
    }
}

impl Routing {
    /// Returns the parameters and costs of each group; groups without parameters are left out.
    pub fn summary(&self) -> Vec<GroupSummary> {
        let groups = ["Muon", "AdamW (embedding)", "AdamW (head)", "AdamW (vector)", "frozen"];
        let of = |group| self.routes.iter().filter(move |route| route.group.name() == group);
        let summaries = groups.map(|group| GroupSummary::of(group, of(group)));
        summaries.into_iter().filter(|summary| summary.tensors > 0).collect()
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(["parameter", "shape", "optimizer", "reason"]);
        for Route { path, shape, group, reason, .. } in &self.routes {
            table.add_row([path, &format!("{shape:?}"), &group.to_string(), reason]);
        }
        write!(f, "{table}\n\n{}", self.summary_table())
    }
}

impl Routing {
    fn summary_table(&self) -> Table {
        let mut table = table(["optimizer", "tensors", "parameters", "operations", "state bytes"]);
        let total = GroupSummary::of("total", self.routes.iter());
        for summary in self.summary().into_iter().chain([total]) {
            table.add_row([
                summary.optimizer.to_owned(),
                summary.tensors.to_string(),
                summary.parameters.to_string(),
                operations(summary.operations),
                summary.state_bytes.to_string(),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

/// Operations per step, to three digits.
fn operations(count: f64) -> String {
    if count == 0.0 { "0".to_owned() } else { format!("{count:.2e}") }
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(header);
    table
}
