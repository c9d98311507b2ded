//! Steps that left parameters untouched: counted on the device, and told as they happen.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::optim::{DynOptimizer, DynState, LearningRate, Optimizer, StateSink, StateSource};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, Tensor};

use crate::error::{Error, Result};

/// Steps between two looks at the counts. A look waits for the device, once for every optimizer state: often
/// enough to be told in time, and too rare to be felt.
const LOOK_EVERY: usize = 25;

/// How often each parameter was left untouched because its gradient, or what the iteration made of it, was
/// not finite.
///
/// The counts stay on the devices, and are saved with the optimizer's state. At the first step and every 25
/// steps they are looked at: skipped steps are then logged as a warning (crate `log`), and a parameter that
/// was skipped in [`MuonConfig::max_skipped`](crate::MuonConfig::max_skipped) steps in a row ends the run.
/// Clones share the counts.
#[derive(Clone, Debug)]
pub struct SkippedSteps {
    limit: Option<usize>,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Default, Debug)]
struct Counts {
    entries: Vec<Entry>,
    /// The steps of the entry that was warned of last: those of other parameters at the same step are one
    /// event with it.
    warned: usize,
}

/// The counts of one optimizer state.
#[derive(Debug)]
struct Entry {
    names: Vec<String>,
    counts: Tensor<1>,
    /// Steps that were recorded.
    steps: usize,
    /// Of them, those before the last look, and the counts then.
    looked: usize,
    seen: Vec<f32>,
    /// Steps in a row that each parameter was skipped in, up to the last look.
    in_a_row: Vec<usize>,
}

/// The place of an optimizer state among the counts; none before its first step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place(Option<usize>);

impl Place {
    pub fn has_started(self) -> bool {
        self.0.is_some()
    }
}

impl SkippedSteps {
    /// Counts of nothing. A parameter may be skipped in fewer steps in a row than `limit`.
    pub(crate) fn new(limit: Option<usize>) -> Self {
        Self { limit, counts: Arc::default() }
    }

    /// Parameters that were left untouched at least once, with the number of times, over all optimizers that
    /// share these counts. Waits for the devices.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let known: Vec<_> = {
            let Counts { entries, .. } = &*self.lock();
            entries.iter().map(|entry| (entry.names.clone(), entry.counts.clone())).collect()
        };
        let mut sums = BTreeMap::new();
        for (names, counts) in known {
            for (name, count) in names.into_iter().zip(values(counts)).filter(|(_, n)| *n > 0.0) {
                *sums.entry(name).or_default() += count as u64;
            }
        }
        sums
    }

    /// Registers the counts of an optimizer state before its next step.
    pub(crate) fn start(&self, place: &mut Place, names: Vec<String>, counts: Tensor<1>) {
        let seen = values(counts.clone());
        let in_a_row = vec![0; seen.len()];
        let entry = Entry { names, counts, steps: 0, looked: 0, seen, in_a_row };
        let entries = &mut self.lock().entries;
        match place.0 {
            Some(place) => entries[place] = entry,
            None => {
                *place = Place(Some(entries.len()));
                entries.push(entry);
            }
        }
    }

    /// Records the counts of an optimizer state that has [started](Self::start), after a step. Every so many
    /// of them they are looked at, and told of if `tells`.
    ///
    /// # Errors
    ///
    /// [`Error::Skipped`] for a parameter that reached the limit.
    pub(crate) fn record(&self, place: Place, counts: Tensor<1>, tells: bool) -> Result<()> {
        let mut known = self.lock();
        let Counts { entries, warned } = &mut *known;
        let entry = &mut entries[place.0.expect("it has started")];
        entry.counts = counts;
        entry.steps += 1;
        let every = self.limit.map_or(LOOK_EVERY, |limit| limit.clamp(1, LOOK_EVERY));
        if entry.steps != 1 && !entry.steps.is_multiple_of(every) {
            return Ok(());
        }
        if let Some(warning) = entry.look().filter(|_| tells && *warned != entry.steps) {
            *warned = entry.steps;
            log::warn!("{warning}");
        }
        entry.check(self.limit)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().expect("no holder of the lock panics")
    }
}

/// A rule whose states count their skipped steps.
pub(crate) trait Counting: Optimizer {
    /// Registers the counts of a state.
    fn start_counting<const D: usize>(&self, state: &mut Self::State<D>);
}

/// A rule as a [`ModuleOptimizer`](burn::optim::ModuleOptimizer) takes it, which registers the counts of a
/// state when it is loaded. Burn's own way from an [`Optimizer`] to a [`DynOptimizer`] makes a state without
/// asking the rule.
pub(crate) struct CountedOnLoad<O>(pub O);

impl<O: Counting> CountedOnLoad<O> {
    fn loaded<const D: usize>(&self, state: DynState) -> DynState {
        let mut state = state.downcast::<O::State<D>>();
        self.0.start_counting(&mut state);
        DynState::create(state, D)
    }
}

impl<O: Counting> DynOptimizer for CountedOnLoad<O> {
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        tensor: BridgeTensor,
        grad: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        self.0.step_dyn(rank, lr, tensor, grad, state)
    }

    fn to_device_dyn(&self, state: DynState, device: &Device) -> DynState {
        self.0.to_device_dyn(state, device)
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        self.0.state_flatten(prefix, state, out);
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        src: &mut StateSource,
        device: &Device,
    ) -> Option<DynState> {
        let state = self.0.state_unflatten(rank, prefix, src, device)?;
        Some(match rank {
            1 => self.loaded::<1>(state),
            2 => self.loaded::<2>(state),
            3 => self.loaded::<3>(state),
            4 => self.loaded::<4>(state),
            5 => self.loaded::<5>(state),
            6 => self.loaded::<6>(state),
            _ => state, // counted from its next step
        })
    }
}

impl Entry {
    /// Looks at the counts; says what was skipped since the last look.
    fn look(&mut self) -> Option<String> {
        let counts = values(self.counts.clone());
        let since = self.steps - self.looked;
        let (mut first, mut others, mut most) = (None, 0, 0);
        for (number, count) in counts.iter().enumerate() {
            let skipped = (count - self.seen[number]) as usize;
            let row = &mut self.in_a_row[number];
            *row = if skipped == since { *row + since } else { 0 };
            if skipped > 0 {
                others += usize::from(first.is_some());
                first = first.or(Some(&self.names[number]));
                most = most.max(skipped);
            }
        }
        (self.seen, self.looked) = (counts, self.steps);
        let others = if others == 0 { String::new() } else { format!(" and {others} others") };
        let first = first?;
        Some(format!(
            "parameter `{first}`{others}: {most} of the last {since} steps skipped, since gradients were not \
             finite"
        ))
    }

    fn check(&self, limit: Option<usize>) -> Result<()> {
        let Some(limit) = limit else { return Ok(()) };
        match self.in_a_row.iter().position(|row| *row >= limit) {
            Some(number) => Err(Error::Skipped {
                parameter: self.names[number].clone(),
                steps: self.in_a_row[number],
            }),
            None => Ok(()),
        }
    }
}

fn values(counts: Tensor<1>) -> Vec<f32> {
    counts.into_data().iter::<f32>().collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn counts(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), &Device::default())
    }

    fn started(skipped: &SkippedSteps, names: &[&str], before: &[f32]) -> Place {
        let mut place = Place::default();
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        skipped.start(&mut place, names, counts(before));
        place
    }

    #[test]
    fn counts_of_several_states_add_up() {
        let skipped = SkippedSteps::new(None);
        let first = started(&skipped, &["a", "b"], &[0.0, 0.0]);
        let second = started(&skipped, &["a"], &[2.0]);
        assert_eq!(skipped.read(), BTreeMap::from([("a".to_owned(), 2)]));
        skipped.record(first, counts(&[1.0, 0.0]), true).unwrap();
        skipped.record(second, counts(&[2.0]), true).unwrap();
        assert_eq!(skipped.clone().read(), BTreeMap::from([("a".to_owned(), 3)]));
        skipped.record(first, counts(&[1.0, 1.0]), true).unwrap();
        assert_eq!(skipped.read().len(), 2);
    }

    #[test]
    fn a_parameter_that_is_always_skipped_ends_the_run() {
        let skipped = SkippedSteps::new(Some(30));
        let place = started(&skipped, &["a", "b"], &[5.0, 0.0]);
        let outcomes = (1..=60).map(|step| {
            // `a` always, `b` in all steps but the 30th.
            let b = if step < 30 { step } else { step - 1 };
            skipped.record(place, counts(&[5.0 + step as f32, b as f32]), false)
        });
        let outcomes: Vec<Result<()>> = outcomes.collect();
        let failed = outcomes.iter().position(Result::is_err).unwrap() + 1;
        assert_eq!(failed, 50, "the first look with 30 in a row");
        let Err(Error::Skipped { parameter, steps }) = &outcomes[49] else { panic!() };
        assert_eq!((parameter.as_str(), *steps), ("a", 50));
        let skipped = SkippedSteps::new(Some(3));
        let place = started(&skipped, &["a"], &[0.0]);
        let fails = (1..=3).map(|n| skipped.record(place, counts(&[n as f32]), false).is_err());
        assert_eq!(fails.collect::<Vec<_>>(), [false, false, true]);
    }

    #[test]
    fn warnings_name_the_first_and_count_the_others() {
        let names = ["a", "b", "c"].map(str::to_owned).to_vec();
        let mut entry = Entry {
            names,
            counts: counts(&[0.0, 2.0, 4.0]),
            steps: 4,
            looked: 0,
            seen: vec![0.0; 3],
            in_a_row: vec![0; 3],
        };
        let warning = entry.look().unwrap();
        assert!(warning.contains("`b` and 1 others: 4 of the last 4 steps"), "{warning}");
        assert_eq!(entry.in_a_row, [0, 0, 4]);
        assert_eq!(entry.look(), None, "nothing since");
    }
}
