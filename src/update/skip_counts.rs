//! Counts of the steps that left parameters untouched, kept on the device and logged during a run.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::tensor::Tensor;

use super::state::{SKIPPED, Slots};
use crate::error::{Error, Result};

/// Steps between two looks at the counts. A look waits for the device, once for every optimizer
/// state: often enough for a warning in time, and too rare to cost a measurable time.
const LOOK_EVERY: usize = 25;

/// The number of steps that left each parameter untouched: its gradient or the result of the
/// iteration was not finite, or, for AdamW, the square of the gradient was too large.
///
/// The counts stay on the devices, and are saved with the optimizer's state. They are read at the
/// first step, and then every 25 steps, or every
/// [`MuonConfig::max_skipped`](crate::MuonConfig::max_skipped) steps if that is less. At each
/// reading, new skipped steps are logged as a warning (crate `log`), and the run ends with
/// [`Error::Skipped`] if a parameter was skipped in the last `max_skipped` steps or more. Clones
/// share the counts.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::{MuonConfig, SkippedSteps};
///
/// let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
/// let routing = MuonConfig::new().route(&model)?;
/// let optim = routing.init();
/// let skipped: SkippedSteps = routing.skipped_steps().clone(); // for a thread that logs
/// for (parameter, steps) in skipped.read() {
///     println!("{parameter} was skipped in {steps} steps");
/// }
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SkippedSteps {
    limit: Option<usize>,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Default, Debug)]
struct Counts {
    entries: Vec<StateCounts>,
    /// The indices of entries whose rules were dropped.
    free: Vec<usize>,
    /// The counts of rules that were dropped, by name.
    ended: BTreeMap<String, u64>,
    /// The warning of the states that were read last. It is logged with the next step, when it
    /// covers all of them.
    pending: Option<Warning>,
    /// Tensors that were replaced or read by a thread that did not make them. The thread that made
    /// them drops them at its next call. Tensors of threads that have ended stay: one for each
    /// state that was replaced since.
    retired: Vec<Kept>,
}

/// A tensor, and the thread that works with it. If another thread drops a tensor, Burn's fusion may
/// free its buffer too early: before an operation that the first thread has just queued on a clone
/// (tracel-ai/burn#4947 is one case).
#[derive(Clone, Debug)]
struct Kept {
    tensor: Arc<Tensor<1>>,
    thread: ThreadId,
}

/// The counts of one optimizer state.
#[derive(Debug, Default)]
struct StateCounts {
    names: Vec<String>,
    /// `None` before the first step.
    counts: Option<Kept>,
    /// The counts at the last look, and the steps that each parameter had taken part in.
    seen: Vec<f32>,
    times: Vec<usize>,
    /// Steps in a row that each parameter was skipped in, up to the last look.
    in_a_row: Vec<usize>,
}

/// The parameters that were skipped since the last look.
#[derive(Debug, Clone, PartialEq)]
struct Warning {
    /// The step of the look.
    step: usize,
    first: String,
    others: usize,
    /// Steps that `first` was skipped in, of all its steps since the last look.
    skipped: usize,
    steps: usize,
}

/// The place of an optimizer state among the counts, and its steps since it was made or loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CountSlot {
    entry: Option<usize>,
    steps: usize,
}

/// A place for the states of a rule of one parameter, which clones of the rule share. When the last
/// of them is dropped, the place is free, and its count is added to those that ended.
#[derive(Clone, Debug)]
pub(crate) struct Reserved(Arc<Reservation>);

#[derive(Debug)]
struct Reservation {
    entry: usize,
    skipped: SkippedSteps,
}

impl Reserved {
    /// The place.
    pub fn place(&self) -> CountSlot {
        CountSlot { entry: Some(self.0.entry), steps: 0 }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let ended = std::mem::take(&mut self.skipped.lock().entries[self.entry]);
        // Without the lock, since this waits for the device, which may have failed.
        let read = ended.counts.as_ref().filter(|_| !thread::panicking()).and_then(|counts| {
            let data = Tensor::clone(&counts.tensor).try_into_data().ok()?;
            Some(data.iter::<f32>().collect::<Vec<_>>())
        });
        let mut counts = self.skipped.lock();
        for (name, count) in summed([(ended.names, read.unwrap_or(ended.seen))].into_iter()) {
            *counts.ended.entry(name).or_default() += count;
        }
        counts.free.push(self.entry);
        ended.counts.into_iter().for_each(|kept| counts.retire(kept));
    }
}

impl CountSlot {
    /// Returns `true` if the state has counts.
    pub fn has_started(self) -> bool {
        self.entry.is_some()
    }
}

impl SkippedSteps {
    /// Empty counts. A parameter may be skipped in fewer steps in a row than `limit`.
    pub(crate) fn new(limit: Option<usize>) -> Self {
        Self { limit, counts: Arc::default() }
    }

    /// Returns the paths of the parameters that were skipped at least once, with the number of
    /// skipped steps, over all optimizers that share these counts. Waits for the devices.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let counts = self.lock();
        let ended = counts.ended.clone();
        let entries = counts.entries.iter();
        let known: Vec<_> = entries
            .filter_map(|entry| Some((entry.names.clone(), entry.counts.clone()?)))
            .collect();
        // Reading waits for the devices: other threads must not wait for the lock meanwhile.
        drop(counts);
        let of_entry = |(names, counts): &(Vec<String>, Kept)| (names.clone(), counts.values());
        let read = added(summed(known.iter().map(of_entry)), ended);
        let mut counts = self.lock();
        known.into_iter().for_each(|(_, kept)| counts.retire(kept));
        drop(counts);
        read
    }

    /// [`read`](Self::read) as of the last look at each state. Waits for nothing.
    #[cfg(feature = "train")]
    pub(crate) fn looked_at(&self) -> BTreeMap<String, u64> {
        let counts = self.lock();
        let of_entry = |entry: &StateCounts| (entry.names.clone(), entry.seen.clone());
        added(summed(counts.entries.iter().map(of_entry)), counts.ended.clone())
    }

    /// A place for the states of a rule of one parameter. A later state replaces the one before it.
    pub(crate) fn reserve(&self) -> Reserved {
        let entry = self.lock().new_entry();
        Reserved(Arc::new(Reservation { entry, skipped: self.clone() }))
    }

    /// Registers the counts of an optimizer state before its next step, at a place that was
    /// reserved or at a new one. The parameters have taken part in `times` steps.
    pub(crate) fn start(
        &self,
        reserved: Option<CountSlot>,
        names: Vec<String>,
        counts: Tensor<1>,
        times: Vec<usize>,
    ) -> CountSlot {
        let new = || CountSlot { entry: Some(self.lock().new_entry()), steps: 0 };
        let place = CountSlot { steps: 0, ..reserved.unwrap_or_else(new) };
        let counts = Kept::new(counts);
        // Before the lock is taken, since this waits for the device.
        let seen = counts.values();
        let in_a_row = vec![0; seen.len()];
        let entry = StateCounts { names, counts: Some(counts), seen, times, in_a_row };
        let mut known = self.lock();
        let old = &mut known.entries[place.entry.expect("a reserved place has an entry")];
        let old = std::mem::replace(old, entry);
        old.counts.into_iter().for_each(|counts| known.retire(counts));
        place
    }

    /// Records the counts of an optimizer state that has [started](Self::start), after a step. At
    /// the steps of a look they are read, and logged if it `logs`.
    ///
    /// # Errors
    ///
    /// [`Error::Skipped`] for a parameter that reached the limit.
    pub(crate) fn record(
        &self,
        place: &mut CountSlot,
        counts: Tensor<1>,
        times: &[usize],
        logs: bool,
    ) -> Result<()> {
        place.steps += 1;
        let index = place.entry.expect("a started state has an entry");
        let counts = Kept::new(counts);
        let due = {
            let mut known = self.lock();
            let old = known.entries[index].counts.replace(counts.clone());
            old.into_iter().for_each(|old| known.retire(old));
            // A warning waits for the other parameters of its step, and is logged by the first of
            // the next.
            let is_old = known.pending.as_ref().is_some_and(|last| last.step != place.steps);
            if is_old { known.pending.take() } else { None }
        };
        log_warning(due);
        // At least once in as many steps as may be skipped in a row, or the limit would be passed
        // unseen.
        let every = self.limit.map_or(LOOK_EVERY, |limit| limit.min(LOOK_EVERY));
        // In the first step as well, in which most mistakes show.
        if place.steps != 1 && !place.steps.is_multiple_of(every) {
            return Ok(());
        }
        // Without the lock, since this waits for the device.
        let counts = counts.values();
        let mut known = self.lock();
        let Counts { entries, pending, .. } = &mut *known;
        let entry = &mut entries[index];
        let warning = entry.look(counts, times, place.steps).filter(|_| logs);
        let outcome = entry.ensure_below(self.limit);
        if let Some(warning) = warning {
            Warning::add(pending, warning);
        }
        // A state of all parameters, or the end of the run: no other state adds to the warning.
        let due = if times.len() > 1 || outcome.is_err() { pending.take() } else { None };
        drop(known);
        log_warning(due);
        outcome
    }

    /// Adds 1 to a parameter's count of skipped steps if the step left the parameter unchanged, and
    /// [records](Self::record) the count.
    ///
    /// # Errors
    ///
    /// As [`record`](Self::record).
    pub(crate) fn count(
        &self,
        slots: &mut Slots,
        place: &mut CountSlot,
        skipped: Tensor<1>,
    ) -> Result<()> {
        let count = slots.take(SKIPPED.name) + skipped;
        slots.put(SKIPPED.name, count);
        self.record_slot(slots, place)
    }

    /// [Records](Self::record) the count of a parameter after a step, which its slot has already.
    ///
    /// # Errors
    ///
    /// As [`record`](Self::record).
    pub(crate) fn record_slot(&self, slots: &Slots, place: &mut CountSlot) -> Result<()> {
        let times = [place.steps + 1];
        self.record(place, slots.get(SKIPPED.name), &times, true)
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // The counts are consistent after every statement, also after a panic.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    /// The index of an entry that nothing has.
    fn new_entry(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.entries.push(StateCounts::default());
            self.entries.len() - 1
        })
    }

    /// Drops a tensor if it is this thread's or has another owner, and keeps it otherwise. Also
    /// drops the tensors of this thread that other threads have retired.
    fn retire(&mut self, counts: Kept) {
        // Some tensors may only be dropped on the thread that made them: the others keep them until
        // that thread comes by.
        if Arc::strong_count(&counts.tensor) == 1 {
            self.retired.push(counts);
        }
        let current = thread::current().id();
        self.retired.retain(|kept| kept.thread != current);
    }
}

impl Kept {
    /// A tensor of this thread.
    fn new(tensor: Tensor<1>) -> Self {
        Self { tensor: Arc::new(tensor), thread: thread::current().id() }
    }

    /// The values of the tensor. Waits for the device.
    fn values(&self) -> Vec<f32> {
        self.tensor.to_data().iter::<f32>().collect()
    }
}

/// Sums the counts by name, without the zeros.
fn summed(counts: impl Iterator<Item = (Vec<String>, Vec<f32>)>) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (names, counts) in counts {
        for (name, count) in names.into_iter().zip(counts).filter(|(_, count)| *count > 0.0) {
            *sums.entry(name).or_default() += count as u64;
        }
    }
    sums
}

/// The sums of counts by name.
fn added(mut sums: BTreeMap<String, u64>, more: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    more.into_iter().for_each(|(name, count)| *sums.entry(name).or_default() += count);
    sums
}

fn log_warning(warning: Option<Warning>) {
    if let Some(warning) = warning {
        log::warn!("{warning}");
    }
}

impl Warning {
    /// Adds the warning of another state at the same step.
    fn add(pending: &mut Option<Self>, more: Self) {
        match pending {
            Some(known) => {
                known.others += more.others + 1;
                if more.skipped > known.skipped {
                    (known.first, known.skipped, known.steps) =
                        (more.first, more.skipped, more.steps);
                }
            }
            None => *pending = Some(more),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "parameter `{}`", self.first)?;
        match self.others {
            0 => {}
            1 => write!(f, " and another")?,
            others => write!(f, " and {others} others")?,
        }
        write!(
            f,
            ": up to {} of {} steps skipped, since gradients or updates were not finite, or too \
             large",
            self.skipped, self.steps
        )
    }
}

impl StateCounts {
    /// Compares the counts of parameters, which have taken part in `times` steps, with the counts
    /// of the last look. The warning names the parameter that was skipped most often.
    fn look(&mut self, counts: Vec<f32>, times: &[usize], step: usize) -> Option<Warning> {
        let mut warning = None;
        for (index, count) in counts.iter().enumerate() {
            // A clone of the optimizer from before shares the counts.
            let Some(steps) = times[index].checked_sub(self.times[index]) else {
                self.in_a_row[index] = 0;
                continue;
            };
            // A failure of one step may be counted with the next step, which then counts twice.
            let skipped = ((count - self.seen[index]) as usize).min(steps);
            let in_a_row = &mut self.in_a_row[index];
            // Between two looks only a sum is known: all of them skipped, or some step was taken.
            *in_a_row = if skipped == steps { *in_a_row + steps } else { 0 };
            if skipped > 0 {
                let first = self.names[index].clone();
                let more = Warning { step, first, others: 0, skipped, steps };
                Warning::add(&mut warning, more);
            }
        }
        (self.seen, self.times) = (counts, times.to_vec());
        warning
    }

    /// Fails for a parameter that was skipped in too many steps in a row.
    fn ensure_below(&self, limit: Option<usize>) -> Result<()> {
        let Some(limit) = limit else { return Ok(()) };
        match self.in_a_row.iter().position(|steps| *steps >= limit) {
            Some(index) => Err(Error::Skipped {
                parameter: self.names[index].clone(),
                steps: self.in_a_row[index],
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn counts(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), &Device::default())
    }

    fn started(skipped: &SkippedSteps, names: &[&str], before: &[f32]) -> CountSlot {
        let owned = names.iter().map(|name| (*name).to_owned()).collect();
        skipped.start(None, owned, counts(before), vec![0; names.len()])
    }

    #[test]
    fn counts_of_several_states_add_up() {
        let skipped = SkippedSteps::new(None);
        let mut first = started(&skipped, &["a", "b"], &[0.0, 0.0]);
        let mut second = started(&skipped, &["a"], &[2.0]);
        assert_eq!(skipped.read(), BTreeMap::from([("a".to_owned(), 2)]));
        skipped.record(&mut first, counts(&[1.0, 0.0]), &[1, 1], true).unwrap();
        skipped.record(&mut second, counts(&[2.0]), &[1], true).unwrap();
        assert_eq!(skipped.clone().read(), BTreeMap::from([("a".to_owned(), 3)]));
        skipped.record(&mut first, counts(&[1.0, 1.0]), &[2, 2], true).unwrap();
        assert_eq!(skipped.read().len(), 2);
        // A state that is loaded takes the place of the one before it.
        let reserved = skipped.reserve();
        for before in [7.0, 9.0] {
            skipped.start(Some(reserved.place()), vec!["c".into()], counts(&[before]), vec![0]);
            assert_eq!(skipped.read()["c"], before as u64);
        }
    }

    #[test]
    fn counts_are_dropped_by_the_thread_that_works_with_them() {
        let skipped = SkippedSteps::new(None);
        let reserved = skipped.reserve();
        let place = Some(reserved.place());
        let start = |count| skipped.start(place, vec!["a".into()], counts(&[count]), vec![0]);
        start(1.0);
        let retired = || skipped.lock().retired.len();
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                start(2.0);
                assert_eq!(retired(), 1, "the first thread's");
            });
            other.join().unwrap();
        });
        assert_eq!(skipped.read()["a"], 2);
        assert_eq!(retired(), 0, "this thread dropped its tensor; the other's is in use");
        start(3.0);
        assert_eq!(retired(), 1, "the other's");
    }

    #[test]
    fn a_parameter_that_is_always_skipped_ends_the_run() {
        let skipped = SkippedSteps::new(Some(30));
        let mut place = started(&skipped, &["a", "b", "c"], &[5.0, 0.0, 0.0]);
        let outcomes = (1..=60).map(|step| {
            // `a` always, `b` in all steps but the 30th; `c` takes part in every other step, and is
            // counted twice in one of them.
            let b = if step < 30 { step } else { step - 1 };
            let c = step / 2;
            let now = [5.0 + step as f32, b as f32, (c + 1) as f32];
            skipped.record(&mut place, counts(&now), &[step, step, c], false)
        });
        let outcomes: Vec<Result<()>> = outcomes.collect();
        let failed = outcomes.iter().position(Result::is_err).unwrap() + 1;
        assert_eq!(failed, 50, "the first look with 30 in a row");
        let Err(Error::Skipped { parameter, steps }) = &outcomes[49] else { panic!() };
        assert_eq!((parameter.as_str(), *steps), ("a", 50));

        for (limit, times) in [(3, [1, 2, 3]), (2, [0, 1, 2])] {
            let skipped = SkippedSteps::new(Some(limit));
            let mut place = started(&skipped, &["a"], &[0.0]);
            let fails = times.map(|n| {
                skipped.record(&mut place, counts(&[n as f32 + 1.0]), &[n], false).is_err()
            });
            assert_eq!(fails[..2], [false, false], "{limit}");
        }
    }

    #[test]
    fn warnings_name_the_worst_and_count_the_others() {
        let names = ["a", "b", "c"].map(str::to_owned).to_vec();
        let (seen, times) = (vec![0.0; 3], vec![0; 3]);
        let mut entry = StateCounts { names, counts: None, seen, times, in_a_row: vec![0; 3] };
        let warning = entry.look(vec![0.0, 2.0, 4.0], &[4; 3], 4).unwrap().to_string();
        assert!(warning.contains("`c` and another: up to 4 of 4 steps"), "{warning}");
        assert_eq!(entry.in_a_row, [0, 0, 4]);
        assert_eq!(entry.look(vec![0.0, 2.0, 4.0], &[5; 3], 5), None, "nothing since");

        // States of one parameter each share a warning, logged with the next step.
        let skipped = SkippedSteps::new(None);
        let mut places = ["a", "b"].map(|name| started(&skipped, &[name], &[0.0]));
        for (place, count) in places.iter_mut().zip([0.0, 1.0]) {
            skipped.record(place, counts(&[count]), &[1], true).unwrap();
        }
        assert_eq!(skipped.lock().pending.as_ref().unwrap().first, "b");
        skipped.record(&mut places[0], counts(&[0.0]), &[2], true).unwrap();
        assert_eq!(skipped.lock().pending, None);
    }
}
