//! The number of a step, which decides when ranks compare what they have.

/// Counts the steps of a run, also of one that a process continues.
#[derive(Default)]
pub struct StepNumber {
    present: usize,
    /// The last step that was taken, since the optimizer was made or loaded.
    taken: usize,
}

impl StepNumber {
    /// The number of the step that begins, from one. `times` are the parameters' positions in the
    /// schedules.
    pub fn begin(&mut self, times: &[usize]) -> usize {
        // Of the run and not of the process: one that is often resumed is checked as often. The
        // positions may stand still, where parameters have no gradient.
        let of_run = times.iter().copied().max().unwrap_or(0);
        self.present = of_run.max(self.taken) + 1;
        self.present
    }

    /// Ends a step, or one that was skipped and will be taken again. Returns the number of the next
    /// one.
    pub fn end(&mut self, is_taken: bool) -> usize {
        if is_taken {
            self.taken = self.present;
        }
        self.present + usize::from(is_taken)
    }

    /// Forgets the steps that were taken: the states are others now.
    pub fn forget(&mut self) {
        self.taken = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of some steps, of which `skips` are skipped at first.
    fn numbers(number: &mut StepNumber, time: usize, steps: usize, skips: usize) -> Vec<usize> {
        (0..steps)
            .map(|step| {
                let begun = number.begin(&[0, time + step]);
                for _ in 0..skips {
                    assert_eq!(number.end(false), begun);
                    assert_eq!(number.begin(&[0, time + step]), begun);
                }
                assert_eq!(number.end(true), begun + 1);
                begun
            })
            .collect()
    }

    #[test]
    fn steps_are_counted_over_loads_and_skipped_steps() {
        let number = &mut StepNumber::default();
        assert_eq!(numbers(number, 0, 3, 2), [1, 2, 3]);
        // No parameter has a gradient.
        assert_eq!(number.begin(&[0, 3]), 4);
        number.end(true);
        assert_eq!(number.begin(&[0, 3]), 5);
        number.end(true);
        number.forget();
        assert_eq!(numbers(number, 1, 2, 0), [2, 3]);
        assert_eq!(numbers(&mut StepNumber::default(), 7, 2, 0), [8, 9]);
    }
}
