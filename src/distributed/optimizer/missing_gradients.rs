//! Parameters without a gradient: a run whose gradients are lost trains nothing, or not all.

use crate::error::{Error, Result};
use crate::update::missing_gradients;

/// The steps in a row without gradients, of all parameters together and of each.
#[derive(Debug)]
pub struct Absence {
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
                "take the gradients from the loss of this model; `max_absent` is the limit",
            ));
        }
        // Once for each row of such steps, in the first: a program may skip steps on purpose.
        if self.of_all == 1 {
            return Ok(Some("a step has no gradient of any parameter, and changes nothing".into()));
        }
        // Equal, so that each parameter is named once and not in every later step.
        let mut reached = self.reached().filter(|(_, steps)| Some(*steps) == self.limit);
        let Some((first, steps)) = reached.next() else { return Ok(None) };
        Ok(Some(missing_gradients::warning(path(first), reached.count(), steps)))
    }

    /// The parameters that have reached the limit, and their steps without a gradient.
    pub fn reached(&self) -> impl Iterator<Item = (usize, usize)> {
        let of_each = self.of_each.iter().copied().enumerate();
        of_each.filter(|(_, steps)| self.limit.is_some_and(|limit| *steps >= limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATHS: [&str; 4] = ["body", "head", "gate", "bias"];

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
