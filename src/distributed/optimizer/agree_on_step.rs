//! The agreement of the ranks that they take the same step.

use serde::{Deserialize, Serialize};

use super::detached_parameters::FlatTensors;
use super::divided_model::DividedModel;
use super::settings_while_running::Running;
use crate::comm::{Difference, digest, unite};
use crate::error::{Error, Result};

/// The calls for a step, which all ranks make alike.
#[derive(Hash, Serialize, Deserialize)]
pub struct StepCalls {
    /// For every parameter its learning rate, as the bits of a float32, and its number of steps.
    steps: Vec<(u32, usize)>,
    /// `true` for each of [`CALLED`] that was called.
    called: [bool; 3],
    /// The settings that the program has set, as the bits of a float64.
    running: [Option<u64>; 2],
}

/// The calls before a step that all ranks make, or none.
const CALLED: [&str; 3] = ["request_diagnostics", "request_account", "clip_heads"];

impl StepCalls {
    pub fn new(lrs: &[f64], times: &[usize], called: [bool; 3], running: Running) -> Self {
        // In float32, as they are applied: hosts may differ in the last digits of a float64 cosine.
        let lrs = lrs.iter().map(|lr| (*lr as f32).to_bits());
        Self {
            steps: lrs.zip(times.iter().copied()).collect(),
            called,
            running: running.values().map(|value| value.map(f64::to_bits)),
        }
    }

    /// The parameters that have a gradient on any rank, if all ranks take the same step: one
    /// message.
    pub fn agree(&self, gradients: &FlatTensors, divided: &DividedModel) -> Result<Vec<bool>> {
        let count = divided.trainable.len();
        // A bit for each parameter: the message is in every step, and all ranks send theirs to rank
        // 0.
        let mut present = vec![0u8; count.div_ceil(8)];
        for index in (0..count).filter(|index| gradients.get(*index).is_some()) {
            present[index / 8] |= 1 << (index % 8);
        }
        // The digest goes with the bits. Only where digests differ do the ranks exchange the calls
        // themselves, to name the difference.
        match unite(divided.world.comm(), present, digest(self))? {
            Some(present) => {
                Ok((0..count).map(|index| present[index / 8] >> (index % 8) & 1 == 1).collect())
            }
            None => Err(self.other_step(divided)),
        }
    }

    /// The first rank that takes another step than rank 0, and the difference.
    fn other_step(&self, divided: &DividedModel) -> Error {
        let difference = |first: &Self, local: &Self| first.difference(local, divided);
        match divided.world.same_settings(self, difference) {
            Err(error) => error,
            Ok(()) => unreachable!("the digests of the steps differ"),
        }
    }

    /// The first setting in which another rank's calls differ.
    fn difference(&self, other: &Self, divided: &DividedModel) -> Option<Difference> {
        // Calls first, and steps after them: a call that one rank lacks is the cause, and the rest
        // may follow from it.
        let mut called = CALLED.into_iter().zip(self.called.into_iter().zip(other.called));
        if let Some((setting, (first, other))) = called.find(|(_, (a, b))| a != b) {
            let (first, other) = (first.to_string(), other.to_string());
            return Some(Difference { setting: setting.to_owned(), first, other });
        }
        let mut running =
            Running::NAMES.into_iter().zip(self.running.into_iter().zip(other.running));
        if let Some((setting, (first, other))) = running.find(|(_, (a, b))| a != b) {
            let text = |bits: Option<u64>| match bits {
                Some(bits) => f64::from_bits(bits).to_string(),
                None => "no call".to_owned(),
            };
            let (setting, first, other) = (setting.to_owned(), text(first), text(other));
            return Some(Difference { setting, first, other });
        }
        let mut steps = self.steps.iter().zip(&other.steps);
        let index = steps.position(|(first, other)| first != other)?;
        let ((lr, time), (other_lr, other_time)) = (self.steps[index], other.steps[index]);
        let path = divided.path(index);
        let (setting, first, other) = if time != other_time {
            (format!("steps of `{path}`"), time.to_string(), other_time.to_string())
        } else {
            let [first, other] = [lr, other_lr].map(|bits| f32::from_bits(bits).to_string());
            (format!("learning rate of `{path}`"), first, other)
        };
        Some(Difference { setting, first, other })
    }
}
