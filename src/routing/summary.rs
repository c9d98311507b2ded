//! The tables of a routing: its parameters, and the costs of its roles.

use std::collections::HashSet;
use std::fmt;

use comfy_table::{CellAlignment, Table, presets};

use super::{ParameterRole, ParameterRoute, Routing};

/// The number of parameters of a role and their costs. All views of Muon count as one role, and all
/// parameters of an optimizer of the user's.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RoleSummary {
    /// Name of the role, as in `AdamW (head)`, or of the user's optimizer; `frozen` for parameters
    /// that are not updated.
    pub optimizer: String,
    /// Number of parameter tensors.
    pub tensors: usize,
    /// Number of elements of these tensors.
    pub parameters: usize,
    /// Floating-point operations of Muon's iteration per step.
    pub operations: f64,
    /// Bytes of the optimizer state, excluding the counters, which are a few bytes per tensor.
    pub state_bytes: usize,
}

impl RoleSummary {
    fn of<'a>(optimizer: &str, routes: impl Iterator<Item = &'a ParameterRoute>) -> Self {
        let empty = Self { optimizer: optimizer.to_owned(), ..Self::default() };
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
    /// Returns the parameters and costs of each role, and of each optimizer of the user's. Those
    /// without parameters are left out.
    pub fn summary(&self) -> Vec<RoleSummary> {
        let name = |route: &ParameterRoute| match route.role {
            ParameterRole::Frozen => "frozen".to_owned(),
            role => self.updates.optimizer(role.without_view(), route.settings),
        };
        let summaries = (0..ParameterRole::COUNT).flat_map(|index| {
            let is_of_role =
                |route: &&ParameterRoute| route.custom.is_none() && route.role.index() == index;
            let routes: Vec<_> = self.routes.iter().filter(is_of_role).collect();
            // A rule may have given some parameters of a role another optimizer.
            let mut names: Vec<String> = routes.iter().map(|route| name(route)).collect();
            let mut seen = HashSet::new();
            names.retain(|name| seen.insert(name.clone()));
            let of_name = |of: String| {
                let routes = routes.iter().copied().filter(|route| name(route) == of);
                RoleSummary::of(&of, routes)
            };
            names.into_iter().map(of_name).collect::<Vec<_>>()
        });
        let custom = self.updates.custom.names().map(|name| {
            let is_of_name = |route: &&ParameterRoute| route.custom.as_deref() == Some(name);
            RoleSummary::of(name, self.routes.iter().filter(is_of_name))
        });
        summaries.chain(custom).filter(|summary| summary.tensors > 0).collect()
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(["parameter", "shape", "optimizer", "reason"]);
        for ParameterRoute { path, shape, optimizer, reason, .. } in &self.routes {
            table.add_row([path, &format!("{shape:?}"), optimizer, reason]);
        }
        write!(f, "{table}\n\n{}", self.summary_table())
    }
}

impl Routing {
    fn summary_table(&self) -> Table {
        let mut table = table(["optimizer", "tensors", "parameters", "operations", "state bytes"]);
        let total = RoleSummary::of("total", self.routes.iter());
        for summary in self.summary().into_iter().chain([total]) {
            table.add_row([
                summary.optimizer,
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
