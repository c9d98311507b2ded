//! The rows that a rank updates, and the parameters that they belong to.
//!
//! A row is what is accepted or refused as a whole: a matrix, or [`GRAIN`](super::plan::GRAIN) elements
//! of a parameter that AdamW updates. Whatever is known per parameter, in tensors over all parameters of
//! the plan, is spread to the rows of all buckets at once, and buckets use their parts of that.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData, s};

use super::flat;
use crate::gate::ones_where;
use crate::muon::rule::Rates;

/// The numbers that are added up at once.
const FAN_IN: usize = 256;

/// The rows of a rank, those of one bucket after those of another.
pub struct Rows {
    /// For every row, the number of its parameter.
    parameters: Tensor<1, Int>,
    /// The sums of a parameter's rows, level by level: the numbers that every sum of a level adds up, as
    /// places among those of the level before. A scatter would be one thread on CubeCL, for any number of
    /// rows.
    levels: Vec<Tensor<2, Int>>,
    device: Device,
}

impl Rows {
    /// The rows of a world of `parameters` parameters, where row `r` belongs to number `of_rows[r]`.
    pub fn new(of_rows: &[usize], parameters: usize, device: &Device) -> Self {
        let numbers: Vec<i32> = of_rows.iter().map(|number| *number as i32).collect();
        Self {
            parameters: Tensor::from_data(TensorData::from(&*numbers), device),
            levels: levels(of_rows, parameters, FAN_IN)
                .into_iter()
                .map(|(places, width)| {
                    let shape = [places.len() / width, width];
                    Tensor::from_data(TensorData::new(places, shape), device)
                })
                .collect(),
            device: device.clone(),
        }
    }

    /// For every parameter, the sum of the values of its rows.
    pub fn sum(&self, rows: Vec<Tensor<1>>) -> Tensor<1> {
        let mut sums = rows;
        for places in &self.levels {
            let [count, width] = places.dims();
            let numbers = flat::with_zero(sums, &self.device);
            let numbers = numbers.select(0, places.clone().reshape([-1]));
            sums = vec![numbers.reshape([count, width]).sum_dim(1).reshape([count])];
        }
        sums.swap_remove(0)
    }

    /// For every row, the value of its parameter.
    pub fn spread(&self, per_parameter: &Tensor<1>) -> Tensor<1> {
        match self.parameters.dims() {
            [0] => flat::empty(per_parameter.dtype(), &self.device),
            _ => per_parameter.clone().select(0, self.parameters.clone()),
        }
    }
}

/// The levels of sums that add up, for every parameter, the numbers of its rows: the places of the numbers
/// of all sums of a level, and how many belong to one. The place behind all numbers is that of a zero.
fn levels(of_rows: &[usize], parameters: usize, fan_in: usize) -> Vec<(Vec<i32>, usize)> {
    let mut groups = vec![vec![]; parameters];
    for (row, number) in of_rows.iter().enumerate() {
        groups[*number].push(row as i32);
    }
    let mut numbers = of_rows.len();
    let mut levels = vec![];
    loop {
        let longest = groups.iter().map(Vec::len).max().unwrap_or_default();
        let (width, is_last) = (longest.clamp(1, fan_in), longest <= fan_in);
        let (mut places, mut sums) = (vec![], 0);
        for group in &mut groups {
            let added = std::mem::take(group);
            // The last level has a sum for every parameter, also for one without rows.
            let parts = added.len().div_ceil(width).max(usize::from(is_last));
            places.extend(added);
            places.resize((sums + parts) * width, numbers as i32);
            group.extend((sums..sums + parts).map(|sum| sum as i32));
            sums += parts;
        }
        levels.push((places, width));
        if is_last {
            return levels;
        }
        numbers = sums;
    }
}

/// The host's decisions about every parameter in a step, one entry each.
pub struct Orders {
    /// The factor on the old value.
    pub keep: Vec<f32>,
    /// The factor on the update.
    pub lr: Vec<f32>,
    /// 1 where a rank has a gradient, else 0.
    pub present: Vec<f32>,
}

impl Orders {
    /// `[keep, lr, present]` on a device, in one copy.
    pub fn upload(self, device: &Device) -> [Tensor<1>; 3] {
        let length = self.keep.len();
        let data = TensorData::new([self.keep, self.lr, self.present].concat(), [3, length]);
        let table = Tensor::<2>::from_data(data, (device, DType::F32));
        [0, 1, 2].map(|row: usize| table.clone().slice(s![row..row + 1, ..]).reshape([-1]))
    }
}

/// The device's decisions about every parameter in a step.
pub struct Decision {
    /// 1 where a parameter is updated, else 0.
    pub accepted: Tensor<1>,
    /// The number of times that a parameter was refused since the last step: for its gradient, and for what the
    /// iteration made of its momentum then.
    pub refused: Tensor<1>,
}

impl Decision {
    /// Decides by how many rows of each parameter are refused anywhere, and by whether it has a gradient;
    /// counts those refused late, too.
    pub fn new(refused_rows: Tensor<1>, late_rows: Tensor<1>, present: Tensor<1>) -> Self {
        let fine = ones_where(refused_rows.clone().equal_elem(0.0));
        let any = |rows: Tensor<1>| ones_where(rows.greater_elem(0.0));
        Self { accepted: fine * present, refused: any(refused_rows) + any(late_rows) }
    }
}

/// The values of every row of a rank in a step: accepted, keep, learning rate and both corrections of AdamW.
pub struct RowValues([Tensor<1>; 5]);

impl RowValues {
    /// The values of all rows from those of all parameters.
    pub fn new(
        rows: &Rows,
        accepted: &Tensor<1>,
        rates: &Rates,
        corrections: &[Tensor<1>; 2],
    ) -> Self {
        let Rates { keep, lr } = rates;
        let [first, second] = corrections;
        Self([accepted, keep, lr, first, second].map(|values| rows.spread(values)))
    }

    /// 1 for every row in a range that is updated, else 0.
    pub fn accepted(&self, rows: &Range<usize>) -> Tensor<1> {
        self.part(0, rows)
    }

    /// The rates of the rows in a range.
    pub fn rates(&self, rows: &Range<usize>) -> Rates {
        Rates { keep: self.part(1, rows), lr: self.part(2, rows) }
    }

    /// The corrections of AdamW for the rows in a range.
    pub fn corrections(&self, rows: &Range<usize>) -> [Tensor<1>; 2] {
        [self.part(3, rows), self.part(4, rows)]
    }

    fn part(&self, value: usize, rows: &Range<usize>) -> Tensor<1> {
        flat::part(&self.0[value], rows.clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn levels_add_up_the_rows_of_every_parameter(
            of_rows in prop::collection::vec(0_usize..7, 0..60),
            fan_in in 2_usize..9,
        ) {
            let numbers = |row: usize| (row * row + 1) as i64;
            let mut expected = vec![0; 8];
            for (row, number) in of_rows.iter().enumerate() {
                expected[*number] += numbers(row);
            }
            let mut sums: Vec<i64> = (0..of_rows.len()).map(numbers).collect();
            for (places, width) in levels(&of_rows, 8, fan_in) {
                prop_assert!(width <= fan_in);
                sums.push(0);
                let sum = |places: &[i32]| places.iter().map(|place| sums[*place as usize]).sum();
                sums = places.chunks(width).map(sum).collect();
            }
            prop_assert_eq!(sums, expected);
        }
    }

    #[test]
    fn sums_of_many_rows_are_exact_on_the_device() {
        let device = Device::default();
        let of_rows: Vec<usize> = (0..70_000).map(|row| 2 * usize::from(row % 70 == 0)).collect();
        let rows = Rows::new(&of_rows, 3, &device);
        assert_eq!(rows.levels.len(), 3);
        let halves = || Tensor::ones([35_000], (&device, DType::F32));
        let sums = rows.sum(vec![halves(), halves()]).into_data();
        sums.assert_eq(&TensorData::from([69_000.0_f32, 0.0, 1_000.0]), true);
        let none = Rows::new(&[], 2, &device).sum(vec![]).into_data();
        none.assert_eq(&TensorData::from([0.0_f32, 0.0]), true);
    }
}
