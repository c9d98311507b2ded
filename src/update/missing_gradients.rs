//! Parameters of Burn's optimizer that have no gradient for many steps. Burn does not tell of them.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The warning of parameters that had no gradient, of which one is named.
pub(crate) fn warning(parameter: &str, others: usize, steps: usize) -> String {
    let others = match others {
        0 => String::new(),
        others => format!(" and {others} others"),
    };
    format!(
        "`{parameter}`{others} had no gradient in {steps} steps in a row, and stayed as before: \
         use what is to be trained in the loss, and freeze the rest"
    )
}

/// The step in which each parameter of an optimizer was updated last.
#[derive(Debug, Default)]
pub(crate) struct LastSteps {
    /// The number of steps in a row without a gradient that is reported; `None` for no report.
    limit: Option<usize>,
    step: usize,
    of_each: BTreeMap<Arc<str>, usize>,
}

impl LastSteps {
    pub fn new(limit: Option<usize>) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Adds a parameter of the optimizer.
    pub fn add(&mut self, parameter: Arc<str>) {
        self.of_each.insert(parameter, 0);
    }

    /// Counts an update of a parameter. Returns the warning of a step after which others have
    /// reached the limit, once for each row of steps.
    pub fn count(&mut self, parameter: &Arc<str>) -> Option<String> {
        let last = self.of_each.entry(parameter.clone()).or_default();
        // Burn calls no optimizer at the end of a step: it has ended when a parameter that was
        // updated in it comes again.
        let is_next = *last == self.step;
        if is_next {
            self.step += 1;
        }
        *last = self.step;
        if is_next { self.missing() } else { None }
    }

    /// The warning of the step that has ended.
    fn missing(&self) -> Option<String> {
        let (limit, ended) = (self.limit?, self.step - 1);
        // Equal, so that each parameter is named once and not in every later step.
        let mut missing =
            self.of_each.iter().filter(|(_, last)| ended.checked_sub(limit) == Some(**last));
        let (first, _) = missing.next()?;
        Some(warning(first, missing.count(), limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_named_once_when_they_reach_the_limit() {
        let names: Vec<Arc<str>> = ["body", "head", "gate"].map(Arc::from).to_vec();
        let mut steps = LastSteps::new(Some(3));
        names.iter().for_each(|name| steps.add(name.clone()));
        let mut warnings = vec![];
        for step in 0..9 {
            // The head is trained in one step, the gate in none.
            let present = names.iter().take(if step == 1 { 2 } else { 1 });
            warnings.push(present.filter_map(|name| steps.count(name)).collect::<Vec<_>>());
        }
        let named = |step: usize| warnings[step].join("");
        assert!(named(3).starts_with("`gate` had no gradient in 3 steps"), "{warnings:?}");
        assert!(named(5).starts_with("`head` had no gradient in 3 steps"), "{warnings:?}");
        assert_eq!(warnings.concat().len(), 2, "{warnings:?}");
        let mut unlimited = LastSteps::new(None);
        names.iter().for_each(|name| unlimited.add(name.clone()));
        assert!((0..100).all(|_| unlimited.count(&names[0]).is_none()));
    }
}
