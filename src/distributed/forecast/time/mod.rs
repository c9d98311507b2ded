//! The time of an iteration on a described machine.
//!
//! [`timeline`] goes through an iteration of a [`Plan`] on any number of ranks of a [`Machine`].

mod assumptions;
mod machine;
mod passes;
mod step;
#[cfg(test)]
mod tests;

use std::fmt;

use comfy_table::{Table, presets};

pub use assumptions::TimeAssumptions;
pub use machine::{Links, Machine};
pub use passes::PassTimes;

use crate::distributed::plan::{Costs, Plan, Slices};
use machine::Wires;
use passes::Passes;
use step::Step;

/// The predicted seconds of an iteration, from
/// [`DistMuonConfig::forecast_time`](crate::DistMuonConfig::forecast_time). Prints as a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timeline {
    /// Seconds from the start of the forward pass to the end of the step.
    pub total: f64,
    /// Seconds of computation of the busiest rank.
    pub compute: f64,
    /// Seconds of all collectives, one after the other.
    pub communication: f64,
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["milliseconds of", "forecast"]);
        for (part, seconds) in [
            ("an iteration", self.total),
            ("computation of the busiest rank", self.compute),
            ("messages, one after the other", self.communication),
        ] {
            table.add_row([part.to_owned(), format!("{:.3}", 1e3 * seconds)]);
        }
        write!(f, "{table}")
    }
}

/// Predicts the duration of an iteration: a forward pass, a backward pass and a step. `costs`
/// are in seconds.
///
/// The passes are divided among the parameters by their elements. Parameters are used in the
/// order of the model, and their messages are
///
/// | placement | forward pass | backward pass | step |
/// |---|---|---|---|
/// | [`Replicated`](crate::distributed::plan::Placement::Replicated) | | | reduced, gathered |
/// | [`Reduced`](crate::distributed::plan::Placement::Reduced) | gathered, as with [`AtFirstUse`](crate::distributed::Publish::AtFirstUse) | reduced | |
/// | [`Owned`](crate::distributed::plan::Placement::Owned) | gathered | gathered again, reduced | |
///
/// New parameters arrive in whole buckets, in the order of the first parameter of each. Owned
/// parameters are gathered, and gradients reduced, in the messages of passes.
///
/// Parameters that are cut have messages of slices, except that rows are gathered and reduced like
/// whole owned parameters. In the step, gradients are assembled after the reduction, and directions
/// are distributed before new values are gathered. Of parameters in half precision or updated
/// element by element, values are assembled and distributed. So they are for updates that need
/// whole values, which a plan does not know.
///
/// A rank computes one parameter, or one bucket of the step, after the other. A reduction is one
/// collective, also where the largest part of an owner makes it two: the time of the second, which
/// sends the sums to their owners, is left out.
///
/// # Panics
///
/// If `costs` has no entry for a shape of the plan.
pub fn timeline(plan: &Plan, costs: &Costs, machine: &Machine, passes: &PassTimes) -> Timeline {
    let (mut wires, step) = (Wires::default(), Step::new(plan, costs, machine));
    let (passed, reduced) = Passes::new(plan, machine, passes).run(&mut wires);
    let total = step.run(&mut wires, passed, &reduced);
    Timeline { total, compute: passes.seconds + step.compute(), communication: wires.sent }
}

/// The number of slices of a parameter with which ranks compute.
fn slices(plan: &Plan, parameter: usize) -> usize {
    plan.parameters()[parameter].slices.as_ref().map_or(1, Slices::used)
}
