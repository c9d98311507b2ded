//! The least load of the busiest rank, as a mixed-integer program.

use good_lp::solvers::microlp::microlp;
use good_lp::{
    Expression, ProblemVariables, Solution, SolverModel, Variable, WithMipGap, WithTimeLimit,
    variable,
};

use super::deal::{Class, Deal, makespan};

/// The most classes times ranks for which the program is tried. Of the cases in the tests with
/// fixed costs, 33 classes on 16 ranks were solved in 0.03 s, and 10 s on 64 ranks found nothing.
const LARGEST_PROGRAM: usize = 1024;

/// The search ends when no deal can be better than the one found by more than this part.
const GAP: f32 = 1e-3;

/// The best deal that is found within the time, or `start` if there is no better one.
pub(super) fn improve(classes: &[Class], start: Deal, time_limit_s: f64) -> Deal {
    let worst = makespan(classes, &start);
    if classes.len() * start.len() > LARGEST_PROGRAM || worst <= bound(classes, start.len()) {
        return start;
    }
    // Ranks are interchangeable, so that those with more of the first class may come first.
    let mut sorted = start.clone();
    sorted.sort_by(|a, b| b.cmp(a));
    match solve(classes, &sorted, worst, time_limit_s) {
        Some(deal) if makespan(classes, &deal) < worst => deal,
        _ => start,
    }
}

/// No deal has a busiest rank with less: the mean load if every class were one batch, or the most
/// expensive matrix alone.
fn bound(classes: &[Class], world_size: usize) -> f64 {
    let whole = classes.iter().map(|class| class.cost.batch(class.matrices.len())).sum::<f64>();
    classes.iter().map(|class| class.cost.batch(1)).fold(whole / world_size as f64, f64::max)
}

/// Minimises the load of the busiest rank over the number of matrices of each class that each rank
/// gets, and over whether it gets any, which decides on the fixed cost. Loads are in units of
/// `worst`, the load of the busiest rank at the start.
fn solve(classes: &[Class], start: &Deal, worst: f64, time_limit_s: f64) -> Option<Deal> {
    let mut variables = ProblemVariables::new();
    let lowest = bound(classes, start.len()) / worst;
    let busiest = variables.add(variable().min(lowest).max(1).initial(1));
    let dealt: Vec<Vec<Dealt>> = start
        .iter()
        .map(|counts| {
            let deal = |(class, &count)| Dealt::new(&mut variables, class, count);
            classes.iter().zip(counts).map(deal).collect()
        })
        .collect();

    let mut model = variables.minimise(busiest).using(microlp);
    for (index, class) in classes.iter().enumerate() {
        let all: Expression = dealt.iter().map(|rank| rank[index].count).sum();
        model.add_constraint(all.eq(class.matrices.len() as f64));
    }
    for rank in &dealt {
        let load: Expression =
            rank.iter().zip(classes).map(|(dealt, class)| dealt.load(class, worst)).sum();
        model.add_constraint(load.leq(busiest));
        for (dealt, class) in rank.iter().zip(classes) {
            if let Some(any) = dealt.any {
                model.add_constraint((class.matrices.len() as f64 * any).geq(dealt.count));
            }
        }
    }
    for pair in dealt.windows(2) {
        model.add_constraint(Expression::from(pair[0][0].count).geq(pair[1][0].count));
    }
    let model = model.with_time_limit(time_limit_s).with_mip_gap(GAP).ok()?;
    let solution = model.solve().ok()?;
    let count = |dealt: &Dealt| solution.value(dealt.count).round() as usize;
    Some(dealt.iter().map(|rank| rank.iter().map(count).collect()).collect())
}

/// What a rank gets of a class.
struct Dealt {
    count: Variable,
    /// 1 if it gets any, else 0; left out where a batch has no fixed cost.
    any: Option<Variable>,
}

impl Dealt {
    fn new(variables: &mut ProblemVariables, class: &Class, start: usize) -> Self {
        let most = class.matrices.len() as f64;
        let count = variable().integer().min(0).max(most).initial(start as f64);
        let any = variable().binary().initial(if start > 0 { 1.0 } else { 0.0 });
        Self {
            count: variables.add(count),
            any: (class.cost.fixed > 0.0).then(|| variables.add(any)),
        }
    }

    /// What it costs the rank, in this unit.
    fn load(&self, class: &Class, unit: f64) -> Expression {
        let fixed = self.any.map(|any| class.cost.fixed / unit * any);
        class.cost.each / unit * self.count + fixed.unwrap_or_default()
    }
}
