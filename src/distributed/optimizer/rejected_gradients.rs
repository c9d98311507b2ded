//! The acceptance of every parameter's step: rejected gradients, diverged matrices, and their sums
//! per parameter.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::flat;

/// The values that one sum adds up: enough to keep a device busy, few enough for a short row.
const FAN_IN: usize = 256;

/// The sums over the rows of every parameter. The rows are in the order of the buckets.
pub struct RowSums {
    /// Sums of sums, down to one for each parameter. A scatter instead of these would run in one
    /// thread on CubeCL, for any number of rows.
    levels: Vec<Level>,
    device: Device,
}

/// Sums of the values of the level before.
struct Level {
    /// The indices of the values that each sum adds up, one sum after the other.
    indices: Tensor<1, Int>,
    /// The number of indices of a sum.
    width: usize,
    /// `true` if there is an index after the last value, for a zero.
    has_gaps: bool,
}

impl RowSums {
    /// The sums for `parameters` parameters, where row `r` belongs to parameter
    /// `row_parameters[r]`.
    pub fn new(row_parameters: &[usize], parameters: usize, device: &Device) -> Self {
        let mut values = row_parameters.len();
        let levels = levels(row_parameters, parameters, FAN_IN).into_iter();
        let levels = levels.map(|(indices, width)| {
            let gap = std::mem::replace(&mut values, indices.len() / width) as i32;
            let has_gaps = indices.contains(&gap);
            let indices = Tensor::from_data(TensorData::from(&*indices), device);
            Level { indices, width, has_gaps }
        });
        Self { levels: levels.collect(), device: device.clone() }
    }

    /// For every parameter, the sum of the values of its rows.
    pub fn sum(&self, rows: Tensor<1>) -> Tensor<1> {
        self.levels.iter().fold(rows, |values, Level { indices, width, has_gaps }| {
            let values = match has_gaps {
                true => flat::with_zero(vec![values], &self.device),
                false => values,
            };
            let values = values.select(0, indices.clone());
            // Most models have one matrix in each parameter.
            if *width == 1 {
                return values;
            }
            let [count] = values.dims();
            values.reshape([count / width, *width]).sum_dim(1).reshape([count / width])
        })
    }
}

/// Returns the levels of a tree of sums that adds up the values of every parameter's rows, with at
/// most `fan_in` values per sum. A level has the indices of the values that its sums add up, and
/// the number of indices per sum. Unused entries have the index after the last value, which
/// [`RowSums::sum`] sets to zero.
fn levels(row_parameters: &[usize], parameters: usize, fan_in: usize) -> Vec<(Vec<i32>, usize)> {
    let mut groups = vec![vec![]; parameters];
    for (row, parameter) in row_parameters.iter().enumerate() {
        groups[*parameter].push(row as i32);
    }
    let mut values = row_parameters.len();
    let mut levels = vec![];
    loop {
        let longest = groups.iter().map(Vec::len).max().unwrap_or_default();
        // At least 1, also without any row: a tensor of no columns is not accepted by every
        // backend.
        let (width, is_last) = (longest.clamp(1, fan_in), longest <= fan_in);
        let (mut indices, mut sums) = (vec![], 0);
        for group in &mut groups {
            let added = std::mem::take(group);
            // The last level has a sum for every parameter, also for one without rows.
            let parts = added.len().div_ceil(width).max(usize::from(is_last));
            indices.extend(added);
            indices.resize((sums + parts) * width, values as i32);
            group.extend((sums..sums + parts).map(|sum| sum as i32));
            sums += parts;
        }
        levels.push((indices, width));
        if is_last {
            return levels;
        }
        values = sums;
    }
}

/// Flags for every parameter, by which a rank rejects it in a step.
pub struct Flags {
    parameters: usize,
    device: Device,
    /// 1 for parameters whose gradients this rank rejects. `None` for zeros that are not made yet.
    rejected: Option<Tensor<1>>,
    /// 1 for parameters without a gradient on any rank. `None` if all have one.
    absent: Option<Tensor<1>>,
}

impl Flags {
    /// The flags before any gradient is looked at, where the `present` parameters have one on any
    /// rank.
    pub fn new(present: &[bool], device: &Device) -> Self {
        let absent = present.contains(&false).then(|| {
            let absent: Vec<f32> = present.iter().map(|has| f32::from(u8::from(!has))).collect();
            Tensor::from_data(TensorData::from(&*absent), (device, DType::F32))
        });
        Self { parameters: present.len(), device: device.clone(), rejected: None, absent }
    }

    /// Gives the flags zeros to start from, if there are any at hand, before the first
    /// [`reject`](Self::reject).
    pub fn set_zeros(&mut self, zeros: Option<Tensor<1>>) {
        self.rejected = zeros;
    }

    fn zeros(&self) -> Tensor<1> {
        flat::zeros(self.parameters, DType::F32, &self.device)
    }

    /// Adds the flags that a check of gradients returns, from those so far.
    pub fn reject(&mut self, check: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        let rejected = self.rejected.take().unwrap_or_else(|| self.zeros());
        self.rejected = Some(check(rejected));
    }

    /// 1 for parameters whose gradients this rank rejects.
    pub fn rejected(&self) -> Tensor<1> {
        self.rejected.clone().unwrap_or_else(|| self.zeros())
    }

    /// 1 for parameters without a gradient on any rank. `None` if all have one.
    pub fn absent(&self) -> Option<&Tensor<1>> {
        self.absent.as_ref()
    }

    /// The decision of a rank that asks no other: 1 for parameters that stay as they are.
    pub fn decided_alone(&self) -> Tensor<1> {
        let rejected = self.rejected();
        match &self.absent {
            Some(absent) => rejected.max_pair(absent.clone()),
            None => rejected,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn levels_add_up_the_rows_of_every_parameter(
            row_parameters in prop::collection::vec(0_usize..7, 0..60),
            fan_in in 2_usize..9,
        ) {
            let value = |row: usize| (row * row + 1) as i64;
            let mut expected = vec![0; 8];
            for (row, parameter) in row_parameters.iter().enumerate() {
                expected[*parameter] += value(row);
            }
            let mut sums: Vec<i64> = (0..row_parameters.len()).map(value).collect();
            for (indices, width) in levels(&row_parameters, 8, fan_in) {
                prop_assert!(width <= fan_in);
                sums.push(0);
                let sum = |added: &[i32]| added.iter().map(|index| sums[*index as usize]).sum();
                sums = indices.chunks(width).map(sum).collect();
            }
            prop_assert_eq!(sums, expected);
        }
    }

    #[test]
    fn sums_of_many_rows_are_exact_on_the_device() {
        let device = Device::default();
        let row_parameters: Vec<usize> =
            (0..70_000).map(|row| 2 * usize::from(row % 70 == 0)).collect();
        let rows = RowSums::new(&row_parameters, 3, &device);
        assert_eq!(rows.levels.len(), 3);
        let sums = rows.sum(Tensor::ones([70_000], (&device, DType::F32))).into_data();
        sums.assert_eq(&TensorData::from([69_000.0_f32, 0.0, 1_000.0]), true);
        for (row_parameters, expected) in
            [(vec![2, 0, 1], [2.0_f32, 4.0, 1.0]), (vec![0, 0, 2, 2, 1, 1], [3.0, 48.0, 12.0])]
        {
            let values: Vec<f32> = (0..row_parameters.len()).map(|row| (1 << row) as f32).collect();
            let values = Tensor::from_data(&*values, (&device, DType::F32));
            let sums = RowSums::new(&row_parameters, 3, &device);
            assert!(!sums.levels[0].has_gaps);
            sums.sum(values).into_data().assert_eq(&TensorData::from(expected), true);
        }
        let none = RowSums::new(&[], 2, &device).sum(flat::empty(DType::F32, &device)).into_data();
        none.assert_eq(&TensorData::from([0.0_f32, 0.0]), true);
    }
}
