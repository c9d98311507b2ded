//! An optimizer of the user's for one parameter at a time, with the rules of all others: skips,
//! clipping and half precision.

use std::sync::Arc;

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{DynOptimizer, DynState, LearningRate, StateSink, StateSource};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{DType, Device, Tensor};

use crate::backend::{FlaggedRows, KernelPolicy, reject};
use crate::checks::{ensure_computed, ensure_gradient_matches};
use crate::error::Result;
use crate::host::copied;
use crate::update::{
    CountSlot, Decision, ElementwiseUpdate, MANTISSA, MASTER, ONLY_RANK, Origin, Reserved, Rule,
    SKIPPED, SkippedSteps, Slot, Slots, TIME, UpdateTensors, WholeParameter, WholeUpdate, clip,
    ensure_rate, of_another, with_rank,
};

/// The optimizer of one parameter.
#[derive(Clone)]
pub(crate) struct Whole {
    update: WholeUpdate,
    /// The factor on the learning rate.
    lr: f64,
    policy: KernelPolicy,
    clipping: Option<GradientClippingConfig>,
    parameter: Arc<str>,
    skipped: SkippedSteps,
    /// The place of the states' counts.
    reserved: Reserved,
}

/// The state of a parameter. Its record has the tensor `skipped`, the further digits of a parameter
/// in half precision, the scalar `time`, and the optimizer's own state after `state.`.
#[derive(Clone)]
struct WholeState {
    slots: Slots,
    /// `None` before the first step that was not skipped; a layer optimizer has a state from the
    /// first step on.
    own: Option<DynState>,
    /// Number of steps taken, skipped ones included.
    time: usize,
    /// The place of its count of skipped steps.
    place: CountSlot,
}

impl Whole {
    /// The optimizer of a parameter at `lr` times the learning rate. Kernels and clipping are those
    /// of `rest`.
    pub fn new(
        update: WholeUpdate,
        rest: &ElementwiseUpdate,
        lr: f64,
        parameter: &str,
        skipped: &SkippedSteps,
    ) -> Self {
        Self {
            update,
            lr,
            policy: rest.policy,
            clipping: rest.clipping.clone(),
            parameter: parameter.into(),
            skipped: skipped.clone(),
            reserved: skipped.reserve(),
        }
    }

    /// The slots of a parameter, in the order of records.
    fn slots(&self, parameter: DType) -> Vec<Slot> {
        self.update.slots(parameter).into_iter().chain([SKIPPED]).collect()
    }

    /// The state before the first step of a parameter.
    fn new_state(&self, shape: &[usize], dtype: DType, device: &Device) -> WholeState {
        let batch = ElementwiseUpdate::batch(shape);
        let slots = Slots::zeros(&self.slots(dtype), batch, shape, dtype, device);
        let place = self.start_counting(&slots);
        WholeState { slots, own: None, time: 0, place }
    }

    /// Registers the count of a state.
    fn start_counting(&self, slots: &Slots) -> CountSlot {
        let names = vec![self.parameter.to_string()];
        self.skipped.start(Some(self.reserved.place()), names, slots.get(SKIPPED.name), vec![0])
    }

    /// One step, with the errors that it panics with.
    fn try_step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<WholeState>,
    ) -> Result<(Tensor<D>, WholeState)> {
        ensure_rate(lr)?;
        ensure_gradient_matches(&self.parameter, ONLY_RANK, &parameter, &grad)?;
        let (shape, device, dtype) = (parameter.dims(), parameter.device(), parameter.dtype());
        let is_first = state.is_none();
        let state = state.unwrap_or_else(|| self.new_state(&shape, dtype, &device));
        if shape.contains(&0) {
            // Nothing to update, and Burn interprets a zero in a new shape as the old length.
            return Ok((parameter, state));
        }
        let WholeState { mut slots, mut own, time, mut place } = state;
        let (batch, table) = (ElementwiseUpdate::batch(&shape), self.slots(dtype));
        slots.complete(&table, batch, &shape, dtype, &device);
        slots.ensure_fit(&table, batch, &shape, &self.parameter)?;
        slots.convert(&table, dtype);

        let whole = [FlaggedRows { flag: 0, rows: 1 }];
        let flags = Tensor::zeros([1], (&device, DType::F32));
        // Before clipping, which would make an infinite gradient a finite one.
        let rejected = reject(self.policy, flags, std::slice::from_ref(&grad), &whole, f64::MAX);
        let grad = clip(self.clipping.as_ref(), grad);
        let tensors = UpdateTensors::of_one(parameter, grad);
        let parameter = WholeParameter {
            flag: 0,
            shape: &shape,
            lr: lr * self.lr,
            origin: Origin { parameter: &self.parameter, element: 0, step: time },
            factors: None,
            decision: Decision { flag: rejected.clone(), read: None },
        };
        let updated = self.update.step(tensors, parameter, &mut slots, &mut own, None);
        if is_first {
            ensure_computed(&self.parameter, &updated)?;
        }
        let updated = updated.reshape(shape);
        self.skipped.count(&mut slots, &mut place, rejected)?;
        Ok((updated, WholeState { slots, own, time: time + 1, place }))
    }
}

impl DynOptimizer for Whole {
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        parameter: BridgeTensor,
        grad: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        let state = state.map(DynState::downcast::<WholeState>);
        with_rank!(rank, D => {
            let [parameter, grad] = [parameter, grad].map(Tensor::<D>::from_bridge);
            let stepped = self.try_step(lr, parameter, grad, state);
            let (updated, state) = stepped.unwrap_or_else(|error| panic!("{error}"));
            (updated.into_bridge(), Some(DynState::create(state, rank)))
        })
    }

    fn to_device_dyn(&self, state: DynState, device: &Device) -> DynState {
        let rank = state.rank();
        let WholeState { slots, own, time, place } = state.downcast();
        let own = own.map(|own| self.update.optimizer.erased().to_device_dyn(own, device));
        let slots = slots.to_device(device);
        DynState::create(WholeState { slots, own, time, place }, rank)
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        let state: &WholeState = state.downcast_ref();
        state.slots.flatten(prefix, out);
        let slots = out.tensors.len();
        self.update.flatten(state.own.as_ref(), prefix, out);
        // Nobody knows when the record will be used.
        let own = out.tensors.split_off(slots);
        out.tensors.extend(own.into_iter().map(|(name, data)| (name, copied(data))));
        out.push_scalar(prefix, TIME, state.time.into());
    }

    /// Not called: [`Rule::load`] reads states.
    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<DynState> {
        self.load(rank, prefix, source, device).ok()
    }
}

impl Rule for Whole {
    fn load(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Result<DynState, String> {
        let optional = [MASTER, MANTISSA];
        let slots = Slots::unflatten(&[SKIPPED.name], &optional, prefix, source, device)
            .ok_or_else(of_another)?;
        // Only the digits of half precision have the shape of the parameter; without them there is
        // none to check.
        let digits = optional.iter().find_map(|name| slots.shape_of(name));
        let shape = digits.unwrap_or_default().to_vec();
        // With the slots of half precision, which the parameter may not have.
        let table = self.slots(DType::BF16);
        if let Some(problem) = slots.problem(&table, ElementwiseUpdate::batch(&shape), &shape) {
            return Err(problem);
        }
        let own = self.update.unflatten(rank, prefix, source, device).ok_or_else(of_another)?;
        let time = source.take_scalar(prefix, TIME).and_then(|time| time.try_into().ok());
        let place = self.start_counting(&slots);
        let state = WholeState { slots, own, time: time.unwrap_or_default(), place };
        Ok(DynState::create(state, rank))
    }
}
