//! The acceptance of every parameter's step: rejected gradients, diverged matrices, and their sums
//! per parameter.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::flat;

/// The values that one sum adds up: enough to keep a device busy, few enough for a short row.
const FAN_IN: usize = 256;

/// The sums over the rows of every parameter. The rows are in the order of the buckets.
pub struct RowSums {
    /// Level by level, the indices of the values that every sum of a level adds up, among the sums
    /// of the level before. A scatter instead would run in one thread on CubeCL, for any number of
    /// rows.
    levels: Vec<Tensor<2, Int>>,
    device: Device,
}

impl RowSums {
    /// The sums for `parameters` parameters, where row `r` belongs to parameter
    /// `row_parameters[r]`.
    pub fn new(row_parameters: &[usize], parameters: usize, device: &Device) -> Self {
        Self {
            levels: levels(row_parameters, parameters, FAN_IN)
                .into_iter()
                .map(|(indices, width)| {
                    let shape = [indices.len() / width, width];
                    Tensor::from_data(TensorData::new(indices, shape), device)
                })
                .collect(),
            device: device.clone(),
        }
    }

    /// For every parameter, the sum of the values of its rows.
    pub fn sum(&self, rows: Tensor<1>) -> Tensor<1> {
        self.levels.iter().fold(rows, |values, indices| {
            let [count, width] = indices.dims();
            // Groups of different lengths are filled up with the index of this zero.
            let values = flat::with_zero(vec![values], &self.device)
                .select(0, indices.clone().reshape([-1]));
            values.reshape([count, width]).sum_dim(1).reshape([count])
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
    /// 1 for parameters whose gradients this rank rejects.
    pub rejected: Tensor<1>,
    /// 1 for parameters without a gradient on any rank.
    pub absent: Tensor<1>,
}

impl Flags {
    /// The flags before any gradient is looked at, where the `present` parameters have one on any
    /// rank.
    pub fn new(present: &[bool], device: &Device) -> Self {
        let absent: Vec<f32> = present.iter().map(|has| f32::from(u8::from(!has))).collect();
        Self {
            rejected: flat::zeros(present.len(), DType::F32, device),
            absent: Tensor::from_data(TensorData::from(&*absent), (device, DType::F32)),
        }
    }

    /// Adds the flags that a check of gradients returns, from those so far.
    pub fn reject(&mut self, check: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        self.rejected = check(flat::take(&mut self.rejected));
    }

    /// The decision of a rank that asks no other: 1 for parameters that stay as they are.
    pub fn decided_alone(&self) -> Tensor<1> {
        self.rejected.clone().max_pair(self.absent.clone())
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
        let none = RowSums::new(&[], 2, &device).sum(flat::empty(DType::F32, &device)).into_data();
        none.assert_eq(&TensorData::from([0.0_f32, 0.0]), true);
    }
}
