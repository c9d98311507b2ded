//! Parameters without a gradient: a run whose gradients are lost trains nothing, or not all. An
//! optimizer of a whole model knows which parameters have one; Burn does not tell its optimizers.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};

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

/// The steps in a row without gradients, of all parameters together and of each.
#[derive(Debug)]
pub(crate) struct Absence {
    /// The number of steps that is reported; `None` for no report.
    limit: Option<usize>,
    of_all: usize,
    of_each: Vec<usize>,
}

impl Absence {
    pub fn new(limit: Option<usize>, parameters: usize) -> Self {
        Self { limit, of_all: 0, of_each: vec![0; parameters] }
    }

    /// Counts a step in which the `present` parameters have a gradient on any rank, given the path
    /// of every parameter. Returns the warning of the first step without any gradient, and of the
    /// step in which parameters reach the limit.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] if no parameter had one up to the limit.
    pub fn count<'a>(
        &mut self,
        present: &[bool],
        path: impl Fn(usize) -> &'a str,
    ) -> Result<Option<String>> {
        for (steps, present) in self.of_each.iter_mut().zip(present) {
            *steps = if *present { 0 } else { *steps + 1 };
        }
        self.of_all = if present.contains(&true) { 0 } else { self.of_all + 1 };
        if self.limit.is_some_and(|limit| self.of_all >= limit) {
            return Err(Error::usage(
                "no parameter has a gradient",
                "gradients of the model that is stepped",
                format!("none in {} steps in a row", self.of_all),
                "take the gradients from the loss of this model, and end a change of its weights \
                 with `detach` and `require_grad`; `max_absent` is the limit",
            ));
        }
        // Once for each row of such steps, in the first: a program may skip steps on purpose.
        if self.of_all == 1 {
            return Ok(Some("a step has no gradient of any parameter, and changes nothing".into()));
        }
        // Equal, so that each parameter is named once and not in every later step.
        let mut reached = self.reached().filter(|(_, steps)| Some(*steps) == self.limit);
        let Some((first, steps)) = reached.next() else { return Ok(None) };
        Ok(Some(warning(path(first), reached.count(), steps)))
    }

    /// The parameters that have reached the limit, and their steps without a gradient.
    pub fn reached(&self) -> impl Iterator<Item = (usize, usize)> {
        let of_each = self.of_each.iter().copied().enumerate();
        of_each.filter(|(_, steps)| self.limit.is_some_and(|limit| *steps >= limit))
    }
}

/// The step in which each parameter of Burn's optimizer was updated last.
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

    const PATHS: [&str; 4] = ["body", "head", "gate", "bias"];

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

    #[test]
    fn parameters_are_reported_once_when_they_reach_the_limit() {
        let mut absence = Absence::new(Some(3), PATHS.len());
        let mut count = |present: [bool; 4]| absence.count(&present, |index| PATHS[index]).unwrap();
        // The second one is trained in one step, the others but the first in none.
        let warnings: Vec<_> = (0..6).map(|step| count([true, step == 1, false, false])).collect();
        let warning = |index: usize| warnings[index].as_deref().unwrap_or_default();
        assert_eq!([0, 1, 3, 5].map(warning), [""; 4]);
        assert!(warning(2).starts_with("`gate` and 1 others had no gradient in 3 steps"));
        assert!(warning(4).starts_with("`head` had no gradient in 3 steps"), "{}", warning(4));
        assert_eq!(absence.reached().collect::<Vec<_>>(), [(1, 4), (2, 6), (3, 6)]);
        absence.count(&[false, true, true, true], |index| PATHS[index]).unwrap();
        assert_eq!(absence.reached().count(), 0);
    }

    #[test]
    fn steps_without_any_gradient_are_reported_and_then_fail() {
        let mut absence = Absence::new(Some(3), 1);
        let mut count = || absence.count(&[false], |_| "body");
        assert!(count().unwrap().unwrap().contains("of any parameter"));
        assert_eq!(count().unwrap(), None);
        assert!(count().is_err());
        let mut unlimited = Absence::new(None, 1);
        assert!((0..1000).all(|_| unlimited.count(&[false], |_| "body").is_ok()));
        assert_eq!(unlimited.reached().count(), 0);
    }
}
