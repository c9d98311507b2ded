//! The update of a whole parameter by any optimizer of Burn's interface.

use std::sync::Arc;

use burn::optim::{DynState, LearningRate, StateSink, StateSource, join_path};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{DType, Device, Int, Shape, Tensor};

use super::UpdateTensors;
use super::layer::{Decision, WholeOptimizer, WholeTensors, with_rank};
use super::ledger::{Ledger, UpdatedBy};
use super::muon::scaled_by;
use super::precision::{InState, Precision};
use super::rounding::Origin;
use super::state::{Slot, Slots};
use super::step_norms::Observations;
use crate::backend::{Values, precise_dtype};

/// The prefix of an optimizer's own state in records, which keeps its names apart from the names of
/// slots.
pub(crate) const OWN_STATE: &str = "state";

/// A parameter in a step.
pub(crate) struct WholeParameter<'a> {
    /// Index of its flag.
    pub flag: usize,
    pub shape: &'a [usize],
    pub lr: LearningRate,
    pub origin: Origin<'a>,
    /// Factors on its new values, flat.
    pub factors: Option<Tensor<1>>,
    /// The decision whether it stays as it is.
    pub decision: Decision,
}

/// The update of a parameter by one optimizer.
#[derive(Clone)]
pub(crate) struct WholeUpdate {
    pub name: Arc<str>,
    pub optimizer: WholeOptimizer,
    pub precision: Precision,
    pub ledger: Ledger,
}

impl WholeUpdate {
    /// The slots in addition to the optimizer's own state, for parameters of a type.
    pub fn slots(&self, parameter: DType) -> Vec<Slot> {
        self.precision.slots(parameter).into_iter().collect()
    }

    /// One step of a parameter of a shape: its new values. Advances the slots and the optimizer's
    /// `own` state, which is absent before the first step, unless the step is rejected.
    ///
    /// The optimizer gets the values and the gradient of parameters in half precision in float32.
    /// Adds the norms of the step to `observations`, if there are any.
    pub fn step(
        &self,
        UpdateTensors { values, mut gradients }: UpdateTensors,
        WholeParameter { flag, shape, lr, origin, factors, decision }: WholeParameter<'_>,
        slots: &mut Slots,
        own: &mut Option<DynState>,
        observations: Option<&mut Observations>,
    ) -> Tensor<1> {
        let (dtype, elements) = (values[0].dtype(), values[0].dims()[0]);
        let values = self.precision.widen(values, &[0], slots).into_each().swap_remove(0);
        let old = observations.is_some().then(|| values.clone());
        // In float32, whatever the parameter: optimizers of Burn compute in the type that they are
        // given.
        let gradient = gradients.swap_remove(0).cast(precise_dtype(dtype));
        let tensors =
            WholeTensors { values: shaped(values, shape), gradient: shaped(gradient, shape) };
        // Moved, so that the optimizer may write into its state.
        let (updated, state) = self.optimizer.step(shape.len(), lr, tensors, own.take(), decision);
        *own = state;
        if let Some(entries) = &mut *self.ledger.entries() {
            entries.add(origin.parameter, UpdatedBy::Custom(self.name.to_string()));
        }
        let updated = Values::Each(vec![flattened(updated, shape.len())]);
        let updated = scaled_by(updated, std::iter::once(factors.as_ref()));
        if let (Some(observations), Some(old)) = (observations, old) {
            // There is no iteration whose error could be observed.
            let none = Tensor::zeros([1], (&old.device(), DType::F32));
            observations.add(flag, old, &updated.clone().into_each()[0], none);
        }
        let origins = std::iter::once(origin);
        let stored = InState { dtype, firsts: &[0], elements };
        self.precision.narrow(updated, stored, origins, slots).swap_remove(0)
    }

    /// The bytes of the optimizer's own state.
    pub fn own_bytes(&self, own: Option<&DynState>) -> usize {
        let mut sink = StateSink::default();
        self.flatten(own, "", &mut sink);
        sink.tensors.iter().map(|(_, data)| data.bytes().len()).sum()
    }

    /// The bytes of the optimizer's own state after the first step of a parameter, which is taken
    /// on made-up values for that and dropped.
    pub fn own_bytes_of(&self, shape: &[usize], parameter: DType, device: &Device) -> usize {
        let elements: usize = shape.iter().product();
        if elements == 0 {
            return 0; // no step is taken
        }
        // In the type that a step gives to the optimizer.
        // Different values, since optimizers that factor matrices may fail for zeros.
        let values = || {
            let values = Tensor::<1, Int>::arange(0..elements as i64, device).float();
            let values = values.sin().cast(precise_dtype(parameter));
            shaped(values, shape)
        };
        let tensors = WholeTensors { values: values(), gradient: values() };
        self.own_bytes(self.optimizer.state_after_step(shape.len(), tensors).as_ref())
    }

    /// Writes the optimizer's own state to a record. Its values have to be used before the next
    /// step, or [copied](crate::host::copied).
    pub fn flatten(&self, own: Option<&DynState>, prefix: &str, out: &mut StateSink) {
        if let Some(state) = own {
            self.optimizer.erased().state_flatten(&join_path(prefix, OWN_STATE), state, out);
        }
    }

    /// Reads the optimizer's own state from a record: `Some(None)` if nothing was recorded, `None`
    /// if the recorded state is another optimizer's.
    pub fn unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<Option<DynState>> {
        let prefix = join_path(prefix, OWN_STATE);
        // Some optimizers have no state, such as plain SGD.
        if !source.has_under(&prefix) {
            return Some(None);
        }
        self.optimizer.erased().state_unflatten(rank, &prefix, source, device).map(Some)
    }
}

/// Flat values in the shape of a parameter.
fn shaped(values: Tensor<1>, shape: &[usize]) -> BridgeTensor {
    let to = Shape::from(shape.to_vec());
    with_rank!(shape.len(), D => values.reshape::<D, Shape>(to).into_bridge())
}

/// The values of a tensor of a number of dimensions.
fn flattened(tensor: BridgeTensor, rank: usize) -> Tensor<1> {
    with_rank!(rank, D => Tensor::<D>::from_bridge(tensor).reshape([-1]))
}
