//! AdamW and Lion as a Burn optimizer of one parameter at a time.

use std::sync::Arc;

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};

use crate::backend::{
    Acceptance, AdamWControls, ElementwiseRows, FlaggedRows, StepCounts, accept, reject,
};
use crate::checks::{ensure_computed, ensure_gradient_matches};
use crate::error::Result;
use crate::update::{
    CORRECTIONS, CountSlot, ELEMENTWISE_SLOTS, ElementwiseParameter, ElementwiseUpdate, ONLY_RANK,
    Origin, Reserved, Resumable, RoleSettings, SKIPPED, SkippedSteps, Slot, Slots, StepSize, TIME,
    UpdateTensors, clip, ensure_rate, missing, of_another, unflatten_burns,
};

/// The elementwise optimizer of one parameter.
#[derive(Clone)]
pub(crate) struct Elementwise {
    update: Arc<ElementwiseUpdate>,
    role: RoleSettings,
    parameter: Arc<str>,
    skipped: SkippedSteps,
    /// The place of the states' counts.
    reserved: Reserved,
}

/// The state of a parameter. Its record has the tensor `skipped`, and the rule's:
/// `moment_1`, `moment_2`, `correction_1` and `correction_2` for AdamW, `momentum` for Lion.
#[derive(Clone)]
pub(crate) struct ElementwiseState<const D: usize> {
    slots: Slots,
    /// Number of steps taken, skipped ones included.
    time: usize,
    /// The place of its count of skipped steps.
    place: CountSlot,
    /// Zeros for the flag of the next step, if the last one has made some.
    flag: Option<Tensor<1>>,
}

impl<const D: usize> ElementwiseState<D> {
    /// A state that has not been counted yet.
    fn new(slots: Slots, time: usize) -> Self {
        Self { slots, time, place: CountSlot::default(), flag: None }
    }

    fn skipped(&self) -> Tensor<1> {
        self.slots.get(SKIPPED.name)
    }
}

impl<const D: usize> RecordState for ElementwiseState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.slots.flatten(prefix, out);
        out.push_scalar(prefix, TIME, self.time.into());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let slots = Slots::unflatten(&[SKIPPED.name], &ELEMENTWISE_SLOTS, prefix, src, device)?;
        // Files of older versions do not have it.
        let time =
            src.take_scalar(prefix, TIME).and_then(|time| time.try_into().ok()).unwrap_or_default();
        slots.have_rank(D).then(|| Self::new(slots, time))
    }
}

impl Elementwise {
    /// The optimizer of a parameter, with the factors of its role.
    pub fn new(
        update: Arc<ElementwiseUpdate>,
        role: RoleSettings,
        parameter: &str,
        skipped: &SkippedSteps,
    ) -> Self {
        let reserved = skipped.reserve();
        Self { update, role, parameter: parameter.into(), skipped: skipped.clone(), reserved }
    }

    /// The slots of a parameter, in the order of records.
    fn slots(&self, parameter: DType) -> Vec<Slot> {
        let rest = [self.update.rule.corrections(), &[SKIPPED]].concat();
        self.update.slots(parameter).into_iter().chain(rest).collect()
    }

    /// The state before the first step of a parameter.
    fn new_state<const D: usize>(
        &self,
        shape: [usize; D],
        dtype: DType,
        device: &Device,
    ) -> ElementwiseState<D> {
        let batch = ElementwiseUpdate::batch(&shape);
        let slots = Slots::zeros(&self.slots(dtype), batch, &shape, dtype, device);
        ElementwiseState::new(slots, 0)
    }

    /// [`step`](Optimizer::step), with the errors that it panics with.
    fn try_step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<ElementwiseState<D>>,
    ) -> Result<(Tensor<D>, ElementwiseState<D>)> {
        ensure_rate(lr)?;
        ensure_gradient_matches(&self.parameter, ONLY_RANK, &parameter, &grad)?;
        let (shape, device, dtype) = (parameter.dims(), parameter.device(), parameter.dtype());
        let is_first = state.is_none();
        let mut state = state.unwrap_or_else(|| self.new_state(shape, dtype, &device));
        if !state.place.has_started() {
            self.start_counting(&mut state);
        }
        if shape.contains(&0) {
            // Nothing to update, and Burn interprets a zero in a new shape as the old length.
            return Ok((parameter, state));
        }
        let batch = ElementwiseUpdate::batch(&shape);
        let (table, slots) = (self.slots(dtype), &mut state.slots);
        slots.complete(&table, batch, &shape, dtype, &device);
        slots.ensure_fit(&table, batch, &shape, &self.parameter)?;
        // Files of older versions have bfloat16 moments.
        slots.convert(&table, dtype);

        let updated = self.updated(lr, parameter, grad, &mut state);
        if is_first {
            ensure_computed(&self.parameter, &updated)?;
        }

        self.skipped.record_slot(&state.slots, &mut state.place)?;
        state.time += 1;
        Ok((updated.reshape(shape), state))
    }

    /// The new values of a parameter, flat. Advances the slots.
    fn updated<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        ElementwiseState { slots, time, flag, .. }: &mut ElementwiseState<D>,
    ) -> Tensor<1> {
        let (shape, dtype) = (parameter.dims(), parameter.dtype());
        let [.., elements] = ElementwiseUpdate::batch(&shape);
        let zeros = || Tensor::zeros([1], (&parameter.device(), DType::F32));
        let flags = flag.take().unwrap_or_else(zeros);
        let whole = [FlaggedRows { flag: 0, rows: 1 }];
        let largest = self.update.largest_gradient(dtype);
        // Before clipping, which would make an infinite gradient a finite one.
        let rejected =
            reject(self.update.policy, flags, std::slice::from_ref(&grad), &whole, largest);
        let grad = clip(self.update.clipping.as_ref(), grad);
        let betas = self.update.rule.correction_betas();
        let corrections = CORRECTIONS.map(|slot| match betas {
            Some(_) => slots.take(slot.name),
            // Lion reads none, and a tensor has to be there.
            None => rejected.clone(),
        });
        let counts = StepCounts { skipped: slots.take(SKIPPED.name), corrections };
        let Acceptance { rejected, counts, zeros } =
            accept(self.update.policy, rejected, None, counts, betas);
        let StepCounts { skipped, corrections } = counts;
        slots.put(SKIPPED.name, skipped);
        *flag = zeros;
        let StepSize { decay, lr, .. } = self.update.size(lr, self.role);
        let parameters = [ElementwiseParameter {
            rows: ElementwiseRows { flag: 0, first: 0, decay, lr },
            origin: Origin { parameter: &self.parameter, element: 0, step: *time },
            factors: None,
        }];
        let controls =
            AdamWControls { rejected: &rejected, corrections: &corrections, factor: None };
        let tensors = UpdateTensors::of_one(parameter, grad);
        let mut updated = self.update.step(tensors, slots, elements, &controls, &parameters, None);
        for (slot, correction) in self.update.rule.corrections().iter().zip(corrections) {
            slots.put(slot.name, correction);
        }
        updated.swap_remove(0)
    }
}

impl Resumable for Elementwise {
    fn problem<const D: usize>(&self, state: &ElementwiseState<D>) -> Option<String> {
        // The first slot has one value for every element, and so the shape of the parameter.
        let first = self.update.rule.names()[0];
        let Some(shape) = state.slots.shape_of(first) else { return Some(missing(first)) };
        let batch = ElementwiseUpdate::batch(shape);
        // With the slots of half precision, which the parameter may not have.
        state.slots.problem(&self.slots(DType::BF16), batch, shape)
    }

    /// Also reads the state of Burn's AdamW.
    fn read<const D: usize>(
        &self,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Result<ElementwiseState<D>, String> {
        if let Some(state) = RecordState::state_unflatten(prefix, source, device) {
            return Ok(state);
        }
        let (mut slots, time) = unflatten_burns(prefix, source, device).ok_or_else(of_another)?;
        let rule = &self.update.rule;
        for (slot, value) in rule.corrections().iter().zip(rule.corrections_after(time)) {
            slots.insert(slot, value, device);
        }
        slots.insert(&SKIPPED, 0.0, device);
        match slots.have_rank(D) {
            true => Ok(ElementwiseState::new(slots, time)),
            false => Err(of_another()),
        }
    }

    fn start_counting<const D: usize>(&self, state: &mut ElementwiseState<D>) {
        let names = vec![self.parameter.to_string()];
        let reserved = Some(self.reserved.place());
        state.place = self.skipped.start(reserved, names, state.skipped(), vec![0]);
    }
}

impl Optimizer for Elementwise {
    type State<const D: usize> = ElementwiseState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<ElementwiseState<D>>,
    ) -> (Tensor<D>, Option<ElementwiseState<D>>) {
        let stepped = self.try_step(lr, parameter, grad, state);
        let (updated, state) = stepped.unwrap_or_else(|error| panic!("{error}"));
        (updated, Some(state))
    }

    fn to_device<const D: usize>(
        state: ElementwiseState<D>,
        device: &Device,
    ) -> ElementwiseState<D> {
        // Burn asks for the device in every step.
        // On another device, the next step makes zeros.
        let flag = state.flag.filter(|flag| flag.device() == *device);
        ElementwiseState { slots: state.slots.to_device(device), flag, ..state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::KernelPolicy;
    use crate::elementwise::{AdamWConfig, ElementwiseConfig};
    use crate::skipped_tests::lacks;
    use crate::update::{Ledger, MasterWeights, Precision, StateDtype};

    /// The square of such a gradient is zero in float16, so the step after it would be divided by
    /// epsilon.
    #[test]
    fn small_gradients_in_float16_make_small_steps() {
        let device = Device::default();
        if !device.supports_dtype(DType::F16) {
            lacks("float16");
            return;
        }
        let precision = Precision { master: MasterWeights::Full, states: StateDtype::Float32 };
        for policy in [KernelPolicy::Auto, KernelPolicy::Portable] {
            let update = ElementwiseConfig::from(AdamWConfig::new()).update(
                precision,
                policy,
                None,
                Ledger::default(),
            );
            let optimizer = Elementwise::new(
                update.into(),
                RoleSettings::COMMON,
                "weight",
                &SkippedSteps::new(None),
            );
            let full = |value: f32| Tensor::<1>::full([8], value, (&device, DType::F16));
            let (mut weight, mut state) = (full(1.0), None);
            for grad in [1e-4, 0.0, 2e3, 0.0] {
                (weight, state) = optimizer.step(0.01, weight, full(grad), state);
            }
            let weight = weight.cast(DType::F32).into_data();
            let moved = weight.iter::<f32>().map(|x| (x - 1.0).abs()).fold(0.0, f32::max);
            assert!(moved > 0.01 && moved < 0.06, "{policy:?}: moved by {moved}");
        }
    }
}
