//! The state of an update, as data: a table of slots describes what it stores of a parameter, and
//! zeros, records, shards, memory reports and moves between devices are loops over that table.

use burn::optim::{StateSink, StateSource};
use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Shape, Tensor, TensorData};

use super::ONLY_RANK;
use super::int8_blocks::{self, Blocks8};
use crate::backend::precise_dtype;
use crate::error::{Error, Result};
use crate::flat::{self, bytes};
use crate::host::{copied, moved};

/// Name of the float32 values of parameters in half precision, in records.
pub(crate) const MASTER: &str = "master";
/// Name of the further digits of bfloat16 parameters, in records.
pub(crate) const MANTISSA: &str = "mantissa";

/// Name of the number of steps of a stack in which a matrix of it had no gradient, in records.
pub(crate) const IDLE: &str = "idle";

/// A value that an update stores of every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Name of the slot in records and checkpoints.
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
    Matrix,
    /// One per state, `[1]`: counters. Not for parts, since the parameters of a batch share its
    /// state.
    Parameter,
}

/// The type of a slot's values, given the parameter's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotDtype {
    /// float32, and float64 for float64. In float16, squares of gradients below 1e-3 are zero, and
    /// of those above 255 infinite; in bfloat16, `0.999 V` rounds to `V`, so a moving average would
    /// never decrease.
    Precise,
    /// float32, for counters and for the master weights of half precision.
    F32,
    /// bfloat16.
    BFloat16,
    /// Integers of 16 bits, which updates and records have as float32.
    Int16,
    /// Codes of 8 bits with a scale for every block of a matrix, which updates and records have as
    /// float32. Only for values of elements.
    Int8Blocks {
        /// Elements of a matrix.
        matrix: usize,
    },
}

impl SlotDtype {
    /// The type in which values are read and recorded, for parameters of a type.
    pub fn resolve(self, parameter: DType) -> DType {
        match self {
            Self::Precise => precise_dtype(parameter),
            // Whole numbers of 16 bits are exact in float32, in which all updates compute. Values
            // of codes have the same codes again.
            Self::F32 | Self::Int16 | Self::Int8Blocks { .. } => DType::F32,
            Self::BFloat16 => DType::BF16,
        }
    }

    /// Bytes of some values, for parameters of a type.
    fn bytes(self, values: usize, parameter: DType) -> usize {
        match self {
            Self::Int16 => values * size_of::<i16>(),
            Self::Int8Blocks { matrix } => int8_blocks::bytes(values, matrix),
            Self::Precise | Self::F32 | Self::BFloat16 => values * self.resolve(parameter).size(),
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

    /// The shape of the values in records, for a parameter of a shape: the parameter's, where there
    /// is one value per element, so that records are as Burn's own optimizers write them.
    pub fn recorded(self, parameter: &[usize], batch: [usize; 3]) -> Vec<usize> {
        match self {
            Self::Element => parameter.to_vec(),
            Self::Parameter => vec![1],
            Self::Row | Self::Column | Self::Matrix => self.shape(batch).to_vec(),
        }
    }
}

impl Slot {
    /// Returns `true` if zeros may take the place of values that were not saved: an update then
    /// takes the digits of the parameter itself, and no matrix of a stack was ever idle.
    pub fn is_optional(&self) -> bool {
        [MASTER, MANTISSA, IDLE].contains(&self.name)
    }

    /// Bytes of the values for a batch of parameters of a type.
    pub fn bytes(&self, batch: [usize; 3], parameter: DType) -> usize {
        self.dtype.bytes(self.extent.values(batch), parameter)
    }
}

/// The number of steps in which a parameter was skipped, which every optimizer counts.
pub(crate) const SKIPPED: Slot =
    Slot { name: "skipped", extent: Extent::Parameter, dtype: SlotDtype::F32 };

/// The values of slots, flat.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    values: Vec<(&'static str, SlotValue)>,
}

#[derive(Clone, Debug)]
struct SlotValue {
    /// `None` while an update has taken it.
    stored: Option<Stored>,
    /// The type of the slot.
    dtype: SlotDtype,
    /// The slot's shape in records.
    recorded: Vec<usize>,
}

/// The tensor of a slot.
#[derive(Clone, Debug)]
enum Stored {
    Float(Tensor<1>),
    Int16(Tensor<1, Int>),
    Int8(Box<Blocks8>),
}

impl Stored {
    fn new(values: Tensor<1>, dtype: SlotDtype) -> Self {
        match dtype {
            // Stored as integers, for half of the memory; read as float32.
            SlotDtype::Int16 => Self::Int16(values.cast(IntDType::I16)),
            SlotDtype::Int8Blocks { matrix } => Self::Int8(Box::new(Blocks8::new(values, matrix))),
            SlotDtype::Precise | SlotDtype::F32 | SlotDtype::BFloat16 => Self::Float(values),
        }
    }

    fn moved_to(self, device: &Device) -> Self {
        match self {
            Self::Float(tensor) => Self::Float(moved(tensor, device)),
            Self::Int16(tensor) => Self::Int16(moved(tensor, device)),
            Self::Int8(values) => Self::Int8(Box::new(values.moved_to(device))),
        }
    }

    /// The values as floats.
    fn into_values(self) -> Tensor<1> {
        match self {
            Self::Float(tensor) => tensor,
            Self::Int16(tensor) => tensor.cast(FloatDType::F32),
            Self::Int8(values) => values.into_values(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Float(tensor) => bytes(tensor),
            Self::Int16(tensor) => tensor.dims()[0] * size_of::<i16>(),
            Self::Int8(values) => values.bytes(),
        }
    }
}

impl Slots {
    /// Zeros for a batch of parameters of a type. Records have them in the shapes of `parameter`.
    pub fn zeros(
        table: &[Slot],
        batch: [usize; 3],
        parameter: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Self {
        let zeros = |slot: &Slot| {
            let count = slot.extent.values(batch);
            let stored = match slot.dtype {
                // Not from zeros in float32, of four times the memory.
                SlotDtype::Int8Blocks { matrix } => {
                    Stored::Int8(Box::new(Blocks8::zeros(count, matrix, device)))
                }
                other => Stored::new(flat::zeros(count, other.resolve(dtype), device), slot.dtype),
            };
            let recorded = slot.extent.recorded(parameter, batch);
            (slot.name, SlotValue { stored: Some(stored), dtype: slot.dtype, recorded })
        };
        Self { values: table.iter().map(zeros).collect() }
    }

    /// The names of all slots.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.values.iter().map(|(name, _)| *name)
    }

    /// The values of a slot.
    ///
    /// # Panics
    ///
    /// If there is no such slot, or its values are taken.
    pub fn get(&self, name: &str) -> Tensor<1> {
        let value = self.value(name).unwrap_or_else(|| panic!("state has no slot `{name}`"));
        value.stored.clone().expect("an update puts back what it takes").into_values()
    }

    /// Takes the values of a slot out, for an update that will [put](Self::put) the new ones.
    /// Taken, since the kernels would copy the whole state before they write to it if there were a
    /// second reference.
    ///
    /// # Panics
    ///
    /// If there is no such slot, or its values are taken already.
    pub fn take(&mut self, name: &str) -> Tensor<1> {
        // Taken out, the tensor has one reference, and the update may write into it.
        let stored = self.value_mut(name).stored.take();
        stored.expect("an update puts back what it takes").into_values()
    }

    /// Stores the new values of a slot.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn put(&mut self, name: &str, new: Tensor<1>) {
        let value = self.value_mut(name);
        value.stored = Some(Stored::new(new, value.dtype));
    }

    fn value(&self, name: &str) -> Option<&SlotValue> {
        self.values.iter().find_map(|(known, value)| (*known == name).then_some(value))
    }

    fn value_mut(&mut self, name: &str) -> &mut SlotValue {
        let value = self.values.iter_mut().find(|(known, _)| *known == name);
        &mut value.unwrap_or_else(|| panic!("state has no slot `{name}`")).1
    }

    /// The problem of slots that are not in the table, in the shapes for a parameter: that
    /// were saved under another configuration. Slots that updates can do without may be missing.
    pub fn problem(&self, table: &[Slot], batch: [usize; 3], shape: &[usize]) -> Option<String> {
        for slot in table {
            let expected = slot.extent.recorded(shape, batch);
            match self.value(slot.name) {
                None if slot.is_optional() => {}
                None => return Some(missing(slot.name)),
                Some(SlotValue { recorded, .. }) if *recorded != expected => {
                    return Some(format!(
                        "its saved `{}` does not fit: expected {expected:?}, got {recorded:?}",
                        slot.name
                    ));
                }
                Some(_) => {}
            }
        }
        let is_known = |name: &str| table.iter().any(|slot| slot.name == name);
        // A state that the update would not use is lost in silence: say so.
        let (name, _) = self.values.iter().find(|(name, _)| !is_known(name))?;
        Some(unused(name))
    }

    /// Fails if the slots have a [`problem`](Self::problem).
    pub fn ensure_fit(
        &self,
        table: &[Slot],
        batch: [usize; 3],
        shape: &[usize],
        path: &str,
    ) -> Result<()> {
        match self.problem(table, batch, shape) {
            Some(problem) => Err(unfit(path, ONLY_RANK, problem)),
            None => Ok(()),
        }
    }

    /// Converts the values of a table's slots to the types for a parameter: records have some in
    /// another type.
    pub fn convert(&mut self, table: &[Slot], parameter: DType) {
        for slot in table {
            let value = self.value_mut(slot.name);
            let is_coded = matches!(value.stored, Some(Stored::Int16(_) | Stored::Int8(_)));
            if is_coded && value.dtype == slot.dtype {
                // Not decoded and coded at every step: codes do not depend on the parameter's type.
                continue;
            }
            value.dtype = slot.dtype;
            let values = self.take(slot.name);
            self.put(slot.name, values.cast(slot.dtype.resolve(parameter)));
        }
    }

    /// Adds zeros for the slots of a table that are not in the state, and that updates can do
    /// without: files of older versions do not have them.
    pub fn complete(
        &mut self,
        table: &[Slot],
        batch: [usize; 3],
        shape: &[usize],
        parameter: DType,
        device: &Device,
    ) {
        // Files of older versions and of other precisions do not have these; zeros mean that
        // nothing is known.
        let is_missing = |slot: &&Slot| slot.is_optional() && self.value(slot.name).is_none();
        let missing: Vec<Slot> = table.iter().filter(is_missing).copied().collect();
        self.values.extend(Self::zeros(&missing, batch, shape, parameter, device).values);
    }

    /// Bytes of master weights, whole or in part.
    pub fn master_bytes(&self) -> usize {
        let masters = [MASTER, MANTISSA].into_iter().filter_map(|name| self.value(name));
        masters.filter_map(|value| value.stored.as_ref()).map(Stored::bytes).sum()
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        self.values.iter().filter_map(|(_, value)| value.stored.as_ref()).map(Stored::bytes).sum()
    }

    /// The values on another device.
    #[expect(clippy::wrong_self_convention, reason = "named as for Burn's modules and states")]
    pub fn to_device(mut self, device: &Device) -> Self {
        for (_, value) in &mut self.values {
            value.stored = value.stored.take().map(|stored| stored.moved_to(device));
        }
        self
    }

    /// Drops the values of all slots except one: another rank has them.
    pub fn keep_only(mut self, kept: &str, dimensions: usize) -> Self {
        for (_, value) in self.values.iter_mut().filter(|(name, _)| *name != kept) {
            let old = value.stored.take().expect("an update puts back what it takes").into_values();
            // The slot remains, so that records have the same names on all ranks.
            let none = Tensor::empty([0], (&old.device(), old.dtype()));
            value.stored = Some(Stored::new(none, value.dtype));
            value.recorded = vec![0; dimensions];
        }
        self
    }

    /// Writes all values to a record.
    pub fn flatten(&self, prefix: &str, out: &mut StateSink) {
        for (name, SlotValue { recorded, .. }) in &self.values {
            // Records have the shape of the parameter or of its rows, as Burn's have, and not the
            // flat one.
            // A copy: the next step changes the values in place, perhaps before the record is used.
            let (bytes, _, dtype) = copied(self.get(name).into_data()).into_parts();
            out.push_tensor(prefix, name, TensorData::from_bytes(bytes, recorded.clone(), dtype));
        }
    }

    /// Reads slots from a record, in the types that they were saved in. `None` if one of the
    /// required slots is missing.
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
            // The type of the slot comes with the configuration: see `convert`.
            let dtype = SlotDtype::F32;
            let stored = Some(Stored::Float(tensor));
            values.push((*name, SlotValue { stored, dtype, recorded: shape.to_vec() }));
        }
        Some(Self { values })
    }

    /// Reads slots from a record, where they have other names. `None` if one of them is missing.
    pub fn unflatten_as(
        names: impl Iterator<Item = (&'static str, &'static str)>,
        prefix: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<Self> {
        let values = names.map(|(slot, name)| {
            let mut read = Self::unflatten(&[name], &[], prefix, source, device)?;
            Some((slot, read.values.swap_remove(0).1))
        });
        Some(Self { values: values.collect::<Option<_>>()? })
    }

    /// Adds all slots of other ones.
    pub fn append(&mut self, mut other: Self) {
        self.values.append(&mut other.values);
    }

    /// Adds the value of a slot that has one for the whole parameter.
    pub fn insert(&mut self, slot: &Slot, value: f64, device: &Device) {
        let value = Tensor::full([1], value, (device, DType::F32));
        let stored = Some(Stored::Float(value));
        self.values
            .push((slot.name, SlotValue { stored, dtype: SlotDtype::F32, recorded: vec![1] }));
    }

    /// Returns `true` if all recorded shapes are a rank's parameters, or one value for
    /// the whole parameter.
    pub fn have_rank(&self, rank: usize) -> bool {
        self.values.iter().all(|(_, value)| [1, rank].contains(&value.recorded.len()))
    }

    /// Returns `true` if there is such a slot.
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// The shape of a slot in records.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn recorded(&self, name: &str) -> &[usize] {
        self.shape_of(name).unwrap_or_else(|| panic!("state has no slot `{name}`"))
    }

    /// The shape of a slot in records, if there is such a slot.
    pub fn shape_of(&self, name: &str) -> Option<&[usize]> {
        self.value(name).map(|value| &*value.recorded)
    }
}

/// The problem of a slot that the configuration needs, and that was not saved.
pub(crate) fn missing(name: &str) -> String {
    format!("its saved state does not have `{name}`")
}

/// The problem of a saved slot that the configuration does not use.
pub(crate) fn unused(name: &str) -> String {
    format!("its saved state has a `{name}`, which the configured update does not use")
}

/// An error for a state that was saved under another configuration.
fn unfit(path: &str, rank: usize, problem: String) -> Error {
    let remedy = "configure the optimizer as it was when the state was saved";
    Error::parameter(path, rank, problem, remedy)
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
        assert_eq!(resolved(SlotDtype::BFloat16), [DType::BF16; 4]);
        assert_eq!(resolved(SlotDtype::Precise), [DType::F64, DType::F32, DType::F32, DType::F32]);
        assert_eq!(resolved(SlotDtype::F32), [DType::F32; 4]);
    }

    #[test]
    fn a_slot_that_is_taken_leaves_one_reference() {
        let table = [Slot { name: "momentum", extent: Extent::Element, dtype: SlotDtype::Precise }];
        let device = Device::default();
        let mut slots = Slots::zeros(&table, [1, 4, 2], &[4, 2], DType::F32, &device);
        assert_eq!(slots.bytes(), 32);
        let taken = slots.take("momentum");
        assert_eq!((taken.dims(), slots.bytes()), ([8], 0));
        slots.put("momentum", taken + 1.0);
        assert_eq!(slots.get("momentum").sum().into_scalar::<f32>(), 8.0);
    }

    #[test]
    fn slots_of_another_configuration_are_named() {
        let momentum =
            Slot { name: "momentum", extent: Extent::Element, dtype: SlotDtype::Precise };
        let second = |extent| Slot { name: "second_moment", extent, dtype: SlotDtype::Precise };
        let [plain, rows, columns] = [
            vec![momentum],
            vec![momentum, second(Extent::Row)],
            vec![momentum, second(Extent::Column)],
        ];
        // Square, so that only the shape tells rows and columns apart.
        let (batch, shape) = ([1, 3, 3], [3, 3]);
        let slots =
            |table: &[Slot]| Slots::zeros(table, batch, &shape, DType::F32, &Device::default());
        let problem = |slots: &Slots, table: &[Slot]| {
            slots.ensure_fit(table, batch, &shape, "weight").map_err(|error| error.to_string())
        };
        for table in [&plain, &rows, &columns] {
            assert_eq!(problem(&slots(table), table), Ok(()));
        }
        for (slots, table, words) in [
            (slots(&plain), &rows, "does not have `second_moment`"),
            (slots(&rows), &plain, "a `second_moment`, which the configured update does not use"),
            (slots(&rows), &columns, "expected [1, 1, 3], got [1, 3, 1]"),
        ] {
            let error = problem(&slots, table).unwrap_err();
            assert!(error.contains(words) && error.contains("`weight`"), "{error}");
        }
    }
}
