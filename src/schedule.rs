//! Schedules of momentum, weight decay and learning rate over the steps of a run.
//!
//! A [`Schedule`] is a piecewise curve over the steps of a run. [`MuonConfig`](crate::MuonConfig)
//! takes a schedule for its momentum and one for its weight decay. [`Schedule::into_lr_scheduler`]
//! converts a schedule to a Burn [`LrScheduler`], which composes with Burn's own.
//!
//! ```
//! use distmuon::Schedule;
//!
//! // 100 steps up to 0.02, then hold, then 300 steps down to 0.
//! let lr = Schedule::warmup_constant_warmdown(0.02, 100, 600, 300);
//! assert_eq!(lr.at(0), 0.0002);
//! assert_eq!(lr.at(99), 0.02);
//! assert_eq!(lr.at(1_000), 0.0);
//! ```

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::optim::LearningRate;
use serde::{Deserialize, Serialize};

/// The record key of the step count.
const STEP: &str = "step";

/// The curve of a segment from the value before it to its final value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Curve {
    Hold,
    Linear,
    Cosine,
    /// A power of the steps that are left, with its exponent.
    Power(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Segment {
    curve: Curve,
    steps: usize,
    /// The final value.
    to: f64,
}

/// A value for every step of a run: a start value, then segments that hold or change it. After the
/// last segment, the value stays as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    start: f64,
    segments: Vec<Segment>,
}

impl From<f64> for Schedule {
    fn from(value: f64) -> Self {
        Self::constant(value)
    }
}

impl Schedule {
    /// Makes a schedule with the same value at every step.
    pub fn constant(value: f64) -> Self {
        Self { start: value, segments: vec![] }
    }

    /// Appends `steps` steps that hold the last value.
    pub fn hold(self, steps: usize) -> Self {
        let to = self.end();
        self.then(Curve::Hold, steps, to)
    }

    /// Appends `steps` steps in a straight line to `to`, the value of the last of these steps.
    pub fn linear(self, steps: usize, to: f64) -> Self {
        self.then(Curve::Linear, steps, to)
    }

    /// Appends `steps` steps along half a cosine to `to`, the value of the last of these steps.
    pub fn cosine(self, steps: usize, to: f64) -> Self {
        self.then(Curve::Cosine, steps, to)
    }

    /// Appends `steps` steps to `to`, the value of the last of these steps, in which the distance
    /// from `to` is a power of the steps that are left. Its exponent has to be above zero: 1 is a
    /// straight line, more begins steeply and ends flat, and less the other way round. With another
    /// exponent the values are NaN, which every check of a setting or a learning rate rejects.
    ///
    /// Result 46 of modded-nanogpt's third track (<https://github.com/KellerJordan/modded-nanogpt>,
    /// June 2026) cools down with an exponent of 1.2, to zero at step 2900:
    ///
    /// ```
    /// use distmuon::Schedule;
    ///
    /// // min(peak, c (2900 - step)^1.2), for a `c` with which the rate falls from step 900 on.
    /// let lr = Schedule::constant(0.0375).hold(901).power(2_000, 0.0, 1.2);
    /// assert_eq!(lr.at(900), 0.0375);
    /// assert!((lr.at(1_900) - 0.0375 * 0.5_f64.powf(1.2)).abs() < 1e-12);
    /// ```
    pub fn power(self, steps: usize, to: f64, exponent: f64) -> Self {
        let exponent = if exponent > 0.0 { exponent } else { f64::NAN };
        self.then(Curve::Power(exponent), steps, to)
    }

    /// Makes a linear warm-up of `warmup` steps to `peak`, `constant` steps at `peak`, and a linear
    /// warm-down of `warmdown` steps to zero: the trapezoid of
    /// <https://github.com/karpathy/nanochat>.
    pub fn warmup_constant_warmdown(
        peak: f64,
        warmup: usize,
        constant: usize,
        warmdown: usize,
    ) -> Self {
        Self::constant(if warmup == 0 { peak } else { 0.0 })
            .linear(warmup, peak)
            .hold(constant)
            .linear(warmdown, 0.0)
    }

    /// Makes a linear warm-up of `warmup` steps to `peak`, then half a cosine of `decay` steps to
    /// `min` (Loshchilov and Hutter, <https://arxiv.org/abs/1608.03983>).
    pub fn warmup_cosine(peak: f64, warmup: usize, decay: usize, min: f64) -> Self {
        Self::constant(if warmup == 0 { peak } else { 0.0 }).linear(warmup, peak).cosine(decay, min)
    }

    /// Makes a momentum that rises linearly from 0.85 to `to` over `steps` steps, as in
    /// <https://github.com/KellerJordan/modded-nanogpt> (to 0.95 over 300).
    pub fn momentum_warmup(to: f64, steps: usize) -> Self {
        Self::constant(0.85).linear(steps, to)
    }

    /// Makes a momentum for a run of `steps` steps that rises from `low` to `high` over the first
    /// `rise` steps, and falls back to `low` over the last `fall`: 0.85, 0.95, 300 and 50 in
    /// <https://github.com/KellerJordan/modded-nanogpt> (`get_muon_momentum` of `train_gpt.py`).
    ///
    /// The first step has the value `low`, and the step after the last one would have it again. In
    /// a run that is shorter than both, the value jumps from the one line to the other.
    pub fn momentum_cool_down(
        [low, high]: [f64; 2],
        [rise, fall]: [usize; 2],
        steps: usize,
    ) -> Self {
        then_down(risen(low, high, rise), rise, steps, fall, [high, low])
    }

    /// Returns the value at a step. The first step is 0.
    pub fn at(&self, step: usize) -> f64 {
        let mut from = self.start;
        let mut first_step = 0;
        for Segment { curve, steps, to } in &self.segments {
            if step < first_step + steps {
                // At least `1 / steps`: the first step already moves, and the last one arrives.
                let progress = (step - first_step + 1) as f64 / *steps as f64;
                return match curve {
                    Curve::Hold => from,
                    Curve::Linear => from + (to - from) * progress,
                    Curve::Cosine => {
                        to + (from - to) * 0.5 * (1.0 + (core::f64::consts::PI * progress).cos())
                    }
                    Curve::Power(exponent) => to + (from - to) * (1.0 - progress).powf(*exponent),
                };
            }
            first_step += steps;
            from = *to;
        }
        from
    }

    /// Converts the schedule to a Burn learning-rate scheduler, which returns one value per step.
    /// A scheduler that loads the record of another one continues at its next step.
    pub fn into_lr_scheduler(self) -> ScheduledLr {
        ScheduledLr { schedule: self, step: 0 }
    }

    /// The start value and the final values of all segments. All other values lie between them, or
    /// are NaN, as the extreme of their segment then is.
    pub(crate) fn extremes(&self) -> impl Iterator<Item = f64> + '_ {
        let extreme = |segment: &Segment| match segment.curve {
            // Also of a configuration that was read, without `power`.
            Curve::Power(exponent) if exponent.is_nan() || exponent <= 0.0 => f64::NAN,
            _ => segment.to,
        };
        core::iter::once(self.start).chain(self.segments.iter().map(extreme))
    }

    /// The number of steps after which it no longer changes: zero for a constant.
    pub(crate) fn settled(&self) -> usize {
        let (mut settled, mut steps, mut from) = (0, 0, self.start);
        for segment in &self.segments {
            steps += segment.steps;
            if segment.to != from {
                (settled, from) = (steps, segment.to);
            }
        }
        settled
    }

    fn end(&self) -> f64 {
        self.segments.last().map_or(self.start, |segment| segment.to)
    }

    fn then(mut self, curve: Curve, steps: usize, to: f64) -> Self {
        self.segments.push(Segment { curve, steps, to });
        self
    }
}

/// A straight line of `steps` steps, whose first one has the value `from`, and which is at `to` at
/// the step after them.
pub(crate) fn risen(from: f64, to: f64, steps: usize) -> Schedule {
    let Some(last) = steps.checked_sub(1) else { return Schedule::constant(to) };
    let end = from + (to - from) * last as f64 / steps as f64;
    Schedule::constant(from).hold(1).linear(last, end)
}

/// Appends a straight line from `from` at step `steps - down` to `to` at step `steps`, the first
/// after the run, to a warm-up of `warmup` steps. In a short run, the line has begun before the
/// warm-up has ended: the value then jumps to it, as in the sources.
pub(crate) fn then_down(
    warmup_schedule: Schedule,
    warmup: usize,
    steps: usize,
    down: usize,
    [from, to]: [f64; 2],
) -> Schedule {
    // Index of the first step after the warm-up and the held steps, which end with the value of
    // `from`.
    let start = (steps.saturating_sub(down) + 1).max(warmup);
    let rest = (steps + 1).saturating_sub(start);
    // The quotient below would be infinite.
    if down == 0 {
        return warmup_schedule.linear(0, from);
    }
    // The run ends within the warm-up.
    if rest == 0 {
        return warmup_schedule;
    }
    let reached = to + (from - to) * (rest as f64 / down as f64);
    // A segment without steps sets the value: the jump of a short run.
    warmup_schedule.linear(0, reached).hold(start - warmup).linear(rest, to)
}

/// A [`Schedule`] as a Burn [`LrScheduler`].
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct ScheduledLr {
    schedule: Schedule,
    step: usize,
}

impl LrScheduler for ScheduledLr {
    fn step(&mut self) -> LearningRate {
        let lr = self.schedule.at(self.step);
        self.step += 1;
        lr
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar(STEP, self.step)
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        if let Some(step) = record.scalar(STEP) {
            self.step = step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

    #[test]
    fn segments_follow_each_other() {
        let schedule = Schedule::constant(1.0).hold(2).linear(4, 3.0).cosine(2, 1.0);
        let values: Vec<f64> = (0..9).map(|step| schedule.at(step)).collect();
        assert_eq!(values, [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn a_power_follows_the_steps_that_are_left() {
        let (peak, start, end) = (0.5, 3, 11);
        let schedule = Schedule::constant(peak).hold(start + 1).power(end - start, 0.0, 1.2);
        for step in 0..=end {
            let left = (end - step) as f64 / (end - start) as f64;
            let expected = (peak * left.powf(1.2)).min(peak);
            assert!((schedule.at(step) - expected).abs() < 1e-15, "{step}");
        }
        assert_eq!(schedule.at(end + 5), 0.0);
        assert_eq!(schedule.settled(), end + 1);
        let straight = Schedule::constant(1.0).power(4, 3.0, 1.0);
        assert!(
            (0..6).all(|step| straight.at(step) == Schedule::constant(1.0).linear(4, 3.0).at(step))
        );
        for exponent in [0.0, -1.0, f64::NAN] {
            let schedule = Schedule::constant(0.9).power(4, 0.8, exponent);
            assert!(schedule.at(3).is_nan(), "{exponent}");
            let config = crate::MuonConfig::new().with_momentum(schedule.into());
            assert!(config.try_build().is_err(), "{exponent}");
        }
        let text = serde_json::to_string(&Schedule::constant(0.9).power(4, 0.8, 1.5)).unwrap();
        let read: Schedule = serde_json::from_str(&text.replace("1.5", "-1.0")).unwrap();
        assert!(crate::MuonConfig::new().with_momentum(read.into()).try_build().is_err());
    }

    #[test]
    fn schedules_without_warmup_start_at_the_peak() {
        assert_eq!(Schedule::warmup_cosine(0.5, 0, 10, 0.0).hold(1).at(10), 0.0);
        assert_eq!(Schedule::warmup_constant_warmdown(0.5, 0, 3, 2).at(0), 0.5);
        assert_eq!(Schedule::warmup_constant_warmdown(0.5, 0, 3, 2).at(3), 0.25);
    }

    #[test]
    fn a_schedule_settles_after_its_last_change() {
        assert_eq!(Schedule::constant(0.5).hold(7).settled(), 0);
        assert_eq!(Schedule::momentum_warmup(0.95, 300).hold(50).settled(), 300);
        let schedule = Schedule::constant(1.0).hold(2).linear(4, 3.0).cosine(2, 1.0);
        assert_eq!(schedule.settled(), 8);
        assert!((8..20).all(|step| schedule.at(step) == schedule.at(8)));
        // A step at once.
        let schedule = Schedule::constant(1.0).linear(0, 3.0).hold(5);
        assert_eq!((schedule.settled(), schedule.at(0)), (0, 3.0));
    }

    #[test]
    fn momentum_warmup_rises_to_its_final_value() {
        let momentum = Schedule::momentum_warmup(0.95, 300);
        assert!(momentum.at(0) > 0.85 && momentum.at(0) < 0.851);
        assert_eq!(momentum.at(299), 0.95);
        assert_eq!(momentum.at(5_000), 0.95);
    }

    #[test]
    fn a_scheduler_continues_from_its_record() {
        let schedule = Schedule::warmup_cosine(0.1, 3, 20, 0.01);
        let mut whole = schedule.clone().into_lr_scheduler();
        let values: Vec<f64> = (0..10).map(|_| whole.step()).collect();
        let mut first = schedule.clone().into_lr_scheduler();
        let before: Vec<f64> = (0..4).map(|_| first.step()).collect();
        assert_eq!(before, values[..4]);
        let mut second = ModuleLrScheduler::new(schedule.into_lr_scheduler())
            .load_record(LrSchedulerRecord::new().with_record("0", first.to_record()));
        assert_eq!(second.step().base(), values[4]);
    }
}
