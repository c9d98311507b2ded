//! The state of an update, as data: a table of slots describes what it stores of a parameter, and zeros, records,
//! shards, memory reports and moves between devices are loops over that table.

use burn::optim::{StateSink, StateSource};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

use crate::backend::precise_dtype;
use crate::slices::bytes;

/// A value that an update stores of every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Its name in records and checkpoints.
    pub name: &'static str,
    pub extent: Extent,
    pub dtype: SlotDtype,
}

/// The values of a slot for a batch of matrices `[k, m, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// One per element, `[k, m, n]`.
    Element,
    /// One per row, `[k, m, 1]`.
    Row,
    /// One per column, `[k, 1, n]`.
    Column,
    /// One per matrix, `[k, 1, 1]`.
    #[expect(dead_code, reason = "for second moments of whole matrices, as of NAMO")]
    Matrix,
    /// One per parameter, `[1]`.
    Parameter,
}

/// The type of a slot's values, given that of the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotDtype {
    /// The parameter's type, but float32 for float16: its least number is 6e-8, so that a sum of small gradients would
    /// lose its digits.
    Parameter,
    /// float32, and float64 for float64. In float16, squares of gradients below 1e-3 are zero, and of those above 255
    /// infinite; in bfloat16, `0.999 V` rounds to `V`, so that a moving average never decreases.
    Precise,
    /// float32, for counters.
    F32,
}

impl SlotDtype {
    /// The type, for parameters of a type.
    pub fn resolve(self, parameter: DType) -> DType {
        match self {
            Self::Parameter if parameter == DType::F16 => DType::F32,
            Self::Parameter => parameter,
            Self::Precise => precise_dtype(parameter),
            Self::F32 => DType::F32,
        }
    }
}

impl Extent {
    /// The shape of the values for a batch `[k, m, n]`.
    pub fn shape(self, [k, m, n]: [usize; 3]) -> [usize; 3] {
        match self {
            Self::Element => [k, m, n],
            Self::Row => [k, m, 1],
            Self::Column => [k, 1, n],
            Self::Matrix => [k, 1, 1],
            Self::Parameter => [1, 1, 1],
        }
    }

    /// The number of values for a batch `[k, m, n]`.
    pub fn values(self, batch: [usize; 3]) -> usize {
        self.shape(batch).iter().product()
    }

    /// The shape of the values in records, for a parameter of a shape: that of the parameter, where there is one value
    /// per element, so that records are those of Burn's own optimizers.
    pub fn recorded(self, parameter: &[usize], batch: [usize; 3]) -> Vec<usize> {
        match self {
            Self::Element => parameter.to_vec(),
            Self::Parameter => vec![1],
            Self::Row | Self::Column | Self::Matrix => self.shape(batch).to_vec(),
        }
    }
}

impl Slot {
    /// Bytes of the values for a batch of parameters of a type.
    pub fn bytes(&self, batch: [usize; 3], parameter: DType) -> usize {
        self.extent.values(batch) * self.dtype.resolve(parameter).size()
    }
}

/// The number of steps in which a parameter was skipped, which every optimizer counts.
pub(crate) const SKIPPED: Slot =
    Slot { name: "skipped", extent: Extent::Parameter, dtype: SlotDtype::F32 };

/// The values of slots, flat.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    values: Vec<(&'static str, Value)>,
}

#[derive(Clone, Debug)]
struct Value {
    tensor: Tensor<1>,
    /// Its shape in records.
    recorded: Vec<usize>,
}

impl Slots {
    /// Zeros for a batch of parameters of a type; in records, that of one parameter of a shape.
    pub fn zeros(
        table: &[Slot],
        batch: [usize; 3],
        parameter: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Self {
        let zeros = |slot: &Slot| {
            let count = slot.extent.values(batch);
            let tensor = Tensor::zeros([count], (device, slot.dtype.resolve(dtype)));
            (slot.name, Value { tensor, recorded: slot.extent.recorded(parameter, batch) })
        };
        Self { values: table.iter().map(zeros).collect() }
    }

    /// The values of a slot, if there are any.
    pub fn get(&self, name: &str) -> Option<&Tensor<1>> {
        let (_, value) = self.values.iter().find(|(known, _)| *known == name)?;
        Some(&value.tensor)
    }

    /// Takes the values of a slot out, for an update that will [put](Self::put) the new ones.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn take(&mut self, name: &str) -> Tensor<1> {
        let tensor = self.tensor(name);
        // Something else in their place: with a second reference, the kernels would copy the whole state before they
        // write to it. One element, since not every backend accepts empty tensors.
        let stand_in = Tensor::empty([1], (&tensor.device(), tensor.dtype()));
        core::mem::replace(tensor, stand_in)
    }

    /// Stores the new values of a slot.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn put(&mut self, name: &str, new: Tensor<1>) {
        *self.tensor(name) = new;
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor<1> {
        let value = self.values.iter_mut().find(|(known, _)| *known == name);
        &mut value.unwrap_or_else(|| panic!("state has no slot `{name}`")).1.tensor
    }

    /// The slot of the table that is absent, or does not have the right number of values.
    pub fn unfit<'a>(&self, table: &'a [Slot], batch: [usize; 3]) -> Option<&'a Slot> {
        table.iter().find(|slot| {
            let count = self.get(slot.name).map(|tensor| tensor.dims()[0]);
            count != Some(slot.extent.values(batch))
        })
    }

    /// Converts the values of a table's slots to the types for a parameter: files of older versions have half precision
    /// where there is float32 now.
    pub fn convert(&mut self, table: &[Slot], parameter: DType) {
        for slot in table {
            let values = self.take(slot.name);
            self.put(slot.name, values.cast(slot.dtype.resolve(parameter)));
        }
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        self.values.iter().map(|(_, value)| bytes(&value.tensor)).sum()
    }

    /// The values on another device.
    pub fn to_device(mut self, device: &Device) -> Self {
        for (_, value) in &mut self.values {
            value.tensor = value.tensor.clone().to_device(device);
        }
        self
    }

    /// The slots without the values of any element, row, column or matrix: the state of a rank that is not the owner.
    pub fn without_values(mut self, rank: usize) -> Self {
        for (_, value) in &mut self.values {
            if value.recorded != [1] {
                let (device, dtype) = (value.tensor.device(), value.tensor.dtype());
                value.tensor = Tensor::empty([0], (&device, dtype));
                value.recorded = vec![0; rank];
            }
        }
        self
    }

    /// Writes all values to a record.
    pub fn flatten(&self, prefix: &str, out: &mut StateSink) {
        for (name, Value { tensor, recorded }) in &self.values {
            let (bytes, _, dtype) = tensor.to_data().into_parts();
            out.push_tensor(prefix, name, TensorData::from_bytes(bytes, recorded.clone(), dtype));
        }
    }

    /// Reads slots from a record, in the types that they were saved in. `None` if one of the required slots is missing.
    pub fn unflatten(
        required: &[&'static str],
        optional: &[&'static str],
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<Self> {
        let mut values = vec![];
        for name in required.iter().chain(optional) {
            let Some(data) = source.take_tensor(prefix, name) else {
                if required.contains(name) {
                    return None;
                }
                continue;
            };
            let (bytes, shape, dtype): (_, Shape, _) = data.into_parts();
            let data = TensorData::from_bytes(bytes, [shape.num_elements()], dtype);
            let tensor = Tensor::from_data(data, (device, dtype));
            values.push((*name, Value { tensor, recorded: shape.to_vec() }));
        }
        Some(Self { values })
    }

    /// The shape of a slot in records.
    pub fn recorded(&self, name: &str) -> Option<&[usize]> {
        let (_, value) = self.values.iter().find(|(known, _)| *known == name)?;
        Some(&value.recorded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_extent_has_its_values() {
        let batch = [2, 3, 5];
        let values = |extent: Extent| (extent.shape(batch), extent.values(batch));
        assert_eq!(values(Extent::Element), ([2, 3, 5], 30));
        assert_eq!(values(Extent::Row), ([2, 3, 1], 6));
        assert_eq!(values(Extent::Column), ([2, 1, 5], 10));
        assert_eq!(values(Extent::Parameter), ([1, 1, 1], 1));
        assert_eq!(Extent::Element.recorded(&[2, 3, 5, 1], batch), [2, 3, 5, 1]);
        assert_eq!(Extent::Row.recorded(&[6, 5], batch), [2, 3, 1]);
    }

    #[test]
    fn types_follow_the_parameter() {
        let types = [DType::F64, DType::F32, DType::BF16, DType::F16];
        let resolved = |slot: SlotDtype| types.map(|dtype| slot.resolve(dtype));
        assert_eq!(
            resolved(SlotDtype::Parameter),
            [DType::F64, DType::F32, DType::BF16, DType::F32]
        );
        assert_eq!(resolved(SlotDtype::Precise), [DType::F64, DType::F32, DType::F32, DType::F32]);
        assert_eq!(resolved(SlotDtype::F32), [DType::F32; 4]);
    }

    #[test]
    fn a_slot_that_is_taken_leaves_one_reference() {
        let table =
            [Slot { name: "momentum", extent: Extent::Element, dtype: SlotDtype::Parameter }];
        let device = Device::default();
        let mut slots = Slots::zeros(&table, [1, 4, 2], &[4, 2], DType::F32, &device);
        assert_eq!(slots.bytes(), 32);
        assert!(slots.unfit(&table, [1, 4, 2]).is_none());
        assert_eq!(slots.unfit(&table, [1, 4, 3]).map(|slot| slot.name), Some("momentum"));
        let taken = slots.take("momentum");
        assert_eq!((taken.dims(), slots.get("momentum").unwrap().dims()), ([8], [1]));
        slots.put("momentum", taken + 1.0);
        assert_eq!(slots.get("momentum").unwrap().clone().sum().into_scalar::<f32>(), 8.0);
    }
}
