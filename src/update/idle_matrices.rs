//! Matrices of stacks without a gradient, such as experts without tokens: each stays as it is with
//! its states and its position in the schedules, as a layer of its own does.

use std::mem;

use burn::tensor::{DType, Tensor};

use super::state::{Extent, IDLE, Slot, SlotDtype, Slots};
use crate::backend::{FiniteMask, Values, ones_where};
use crate::flat::{concat, zeros};

/// The number of steps of a stack in which a matrix of it had no gradient. Without it, as in files
/// of older versions, all matrices have taken the steps of their stack.
pub(super) const IDLE_STEPS: Slot =
    Slot { name: IDLE, extent: Extent::Matrix, dtype: SlotDtype::F32 };

/// The matrices of stacks that have no part in a step: 1 for those whose gradient is zero. `None`
/// in a batch of other matrices.
pub(super) struct Idle(Option<Tensor<1>>);

impl Idle {
    /// No matrix.
    pub fn none() -> Self {
        Self(None)
    }

    /// The matrices of `elements` whose gradients are zero, of stacks that have a gradient: for
    /// each, if it has one, and its values. They are counted in the state.
    pub fn count<'a>(
        gradients: impl Iterator<Item = (bool, &'a Tensor<1>)>,
        elements: usize,
        state: &mut Slots,
    ) -> Self {
        let flags = gradients.map(|(is_present, gradient)| {
            let rows = gradient.dims()[0] / elements;
            match is_present {
                true => {
                    // Exactly zero, as the gradient of an expert without tokens is: a small one is
                    // an update.
                    let zero = gradient.clone().reshape([rows, elements]).equal_elem(0.0);
                    ones_where(zero.all_dim(1)).reshape([rows])
                }
                // A parameter without a gradient is not updated at all, and its own count says so.
                false => zeros(rows, DType::F32, &gradient.device()),
            }
        });
        let steps = state.take(IDLE);
        let flags = concat(flags.collect(), DType::F32, &steps.device());
        state.put(IDLE, steps + flags.clone());
        Self(Some(flags))
    }

    /// The flags of a batch's matrices, also set for idle ones.
    pub fn or(&self, flags: Tensor<1>) -> Tensor<1> {
        match &self.0 {
            Some(idle) => flags.max_pair(idle.clone()),
            None => flags,
        }
    }

    /// The flags of all matrices, of which the batch has those from `first` on.
    pub fn among(&self, flags: &Tensor<1>, first: usize) -> Tensor<1> {
        let Some(idle) = &self.0 else { return flags.clone() };
        let range = first..first + idle.dims()[0];
        let own = flags.clone().slice([range.clone()]);
        flags.clone().slice_assign([range], self.or(own))
    }

    pub fn mask(&self) -> Option<FiniteMask> {
        self.0.clone().map(FiniteMask::from_rows)
    }
}

/// Neighbouring matrices of a parameter that are at one position in the schedules.
#[derive(Debug, PartialEq)]
pub(super) struct Section {
    /// Index of the parameter in its batch.
    pub parameter: usize,
    /// The number of matrices.
    pub count: usize,
    /// The steps that they have taken.
    pub time: usize,
}

/// The least number of steps that matrices of a batch of stacks have taken, as far as the host
/// knows. The device counts them. Asking it waits for it, and is necessary until the schedules have
/// settled for all matrices: at every step if one of them never has a gradient.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clocks {
    /// Steps that every matrix has taken.
    least: usize,
}

impl Clocks {
    /// The sections of a batch, of which each parameter has taken a number of steps and consists of
    /// a number of matrices. All positions from `settled` on are the same. Stacks have a `state`,
    /// and other matrices `None`.
    pub(super) fn sections(
        &mut self,
        parameters: impl Iterator<Item = (usize, usize)> + Clone,
        settled: usize,
        state: Option<&Slots>,
    ) -> Vec<Section> {
        // Before the first step all counts are zero: no need to wait for the device.
        let is_first = parameters.clone().all(|(time, _)| time == 0);
        let is_asked = self.least < settled && !is_first;
        let Some(state) = state.filter(|_| is_asked) else {
            let whole = |(parameter, (time, count))| Section { parameter, count, time };
            return parameters.enumerate().map(whole).collect();
        };
        let idle = state.get(IDLE).into_data();
        let mut idle = idle.iter::<f32>();
        let mut sections = vec![];
        let mut least = usize::MAX;
        for (parameter, (steps, count)) in parameters.enumerate() {
            let times: Vec<usize> =
                idle.by_ref().take(count).map(|idle| steps.saturating_sub(idle as usize)).collect();
            least = times.iter().copied().fold(least, usize::min);
            // Beyond the end of the schedules, counts that differ have equal values.
            let alike = times.chunk_by(|a, b| a.min(&settled) == b.min(&settled));
            sections.extend(alike.map(|times| Section {
                parameter,
                count: times.len(),
                time: times[0],
            }));
        }
        self.least = least;
        sections
    }
}

/// Flat tensors of parameters, divided into their sections, of matrices of `elements`.
pub(super) fn divided(
    tensors: Vec<Tensor<1>>,
    sections: &[Section],
    elements: usize,
) -> Vec<Tensor<1>> {
    let divide = |(tensor, sections): (Tensor<1>, &[Section])| match sections {
        [_] => vec![tensor],
        _ => {
            let lengths = sections.iter().map(|section| section.count * elements);
            tensor.split_with_sizes(lengths.collect(), 0)
        }
    };
    tensors.into_iter().zip(by_parameter(sections)).flat_map(divide).collect()
}

/// The values of parameters by section, of matrices of `elements`.
pub(super) fn of_sections(values: Values, sections: &[Section], elements: usize) -> Values {
    match values {
        Values::Each(values) => Values::Each(divided(values, sections, elements)),
        Values::Joined { all, .. } => {
            let place = |end: &mut usize, section: &Section| {
                let start = *end;
                *end += section.count * elements;
                Some(start..*end)
            };
            Values::Joined { all, places: sections.iter().scan(0, place).collect() }
        }
    }
}

/// The values of sections by parameter: the reverse of [`of_sections`].
pub(super) fn of_parameters(values: Values, sections: &[Section]) -> Values {
    match values {
        Values::Each(values) => Values::Each(joined(values, sections)),
        Values::Joined { all, places } => {
            let mut places = places.into_iter();
            let place = |sections: &[Section]| {
                let mut own = places.by_ref().take(sections.len());
                let first = own.next().expect("a parameter has a section");
                first.start..own.last().map_or(first.end, |last| last.end)
            };
            Values::Joined { all, places: by_parameter(sections).map(place).collect() }
        }
    }
}

/// Flat tensors of sections, joined by parameter: the reverse of [`divided`].
fn joined(tensors: Vec<Tensor<1>>, sections: &[Section]) -> Vec<Tensor<1>> {
    let mut tensors = tensors;
    by_parameter(sections)
        .map(|sections| {
            let rest = tensors.split_off(sections.len());
            let mut own = mem::replace(&mut tensors, rest);
            match own.len() {
                1 => own.swap_remove(0),
                _ => {
                    let (dtype, device) = (own[0].dtype(), own[0].device());
                    concat(own, dtype, &device)
                }
            }
        })
        .collect()
}

fn by_parameter(sections: &[Section]) -> impl Iterator<Item = &[Section]> {
    sections.chunk_by(|a, b| a.parameter == b.parameter)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn state(idle: &[f32]) -> Slots {
        let (batch, device) = ([idle.len(), 2, 2], Device::default());
        let mut state = Slots::zeros(&[IDLE_STEPS], batch, &batch, DType::F32, &device);
        state.put(IDLE, Tensor::from_data(TensorData::from(idle), (&device, DType::F32)));
        state
    }

    #[test]
    fn neighbours_at_one_position_are_a_section() {
        let section = |parameter, count, time| Section { parameter, count, time };
        let state = state(&[0.0, 0.0, 3.0, 0.0, 1.0, 1.0]);
        let parameters = || [(7, 4), (5, 2)].into_iter();
        let sections = |settled| Clocks::default().sections(parameters(), settled, Some(&state));
        let [a, b, c] = [section(0, 2, 7), section(0, 1, 4), section(0, 1, 7)];
        assert_eq!(sections(9), [a, b, c, section(1, 2, 4)]);
        // Positions after the last change are the same, and schedules that never change have one.
        assert_eq!(sections(4), [section(0, 4, 7), section(1, 2, 4)]);
        assert_eq!(sections(0), [section(0, 4, 7), section(1, 2, 5)]);
    }

    #[test]
    fn the_device_is_asked_only_while_schedules_move() {
        let mut clocks = Clocks::default();
        let late = state(&[0.0, 3.0]);
        let mut sections =
            |time, idle: &Slots| clocks.sections([(time, 2)].into_iter(), 5, Some(idle)).len();
        assert_eq!(sections(6, &late), 2);
        assert_eq!(sections(8, &late), 1);
        // Counts fall in no run.
        assert_eq!(sections(9, &state(&[0.0, 9.0])), 1);
    }

    #[test]
    fn tensors_of_sections_are_those_of_parameters() {
        let values = |range| Tensor::<1, burn::tensor::Int>::arange(range, &Device::default());
        let tensors = vec![values(0..12).float(), values(12..18).float()];
        let sections = [(0, 1), (0, 3), (1, 2)];
        let sections = sections.map(|(parameter, count)| Section { parameter, count, time: 0 });
        let parts = divided(tensors.clone(), &sections, 3);
        assert_eq!(parts.iter().map(|part| part.dims()[0]).collect::<Vec<_>>(), [3, 9, 6]);
        let data = |tensors: Vec<Tensor<1>>| tensors.into_iter().map(Tensor::into_data);
        assert!(data(joined(parts, &sections)).eq(data(tensors)));

        let all = values(0..18).float();
        let parameters = Values::Joined { all, places: vec![0..12, 12..18] };
        let of_sections = of_sections(parameters, &sections, 3);
        assert_eq!(of_sections.lengths(), [3, 9, 6]);
        assert_eq!(of_parameters(of_sections, &sections).lengths(), [12, 6]);
    }
}
