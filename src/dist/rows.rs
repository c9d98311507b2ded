//! The matrices that a rank updates, the parameters that they belong to, and what is decided about those.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::flat;
use crate::gate::ones_where;
use crate::muon::rule::Rates;

/// The numbers that are added up at once.
const FAN_IN: usize = 256;

/// The sums over the rows of every parameter, where those of one bucket come after those of another.
pub struct Rows {
    /// The sums of a parameter's rows, level by level: the numbers that every sum of a level adds up, as
    /// places among those of the level before. A scatter would be one thread on CubeCL, for any number of
    /// rows.
    levels: Vec<Tensor<2, Int>>,
    device: Device,
}

impl Rows {
    /// The rows of a world of `parameters` parameters, where row `r` belongs to number `of_rows[r]`.
    pub fn new(of_rows: &[usize], parameters: usize, device: &Device) -> Self {
        Self {
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
    pub fn sum(&self, rows: Tensor<1>) -> Tensor<1> {
        self.levels.iter().fold(rows, |sums, places| {
            let [count, width] = places.dims();
            let numbers = flat::with_zero(vec![sums], &self.device);
            let numbers = numbers.select(0, places.clone().reshape([-1]));
            numbers.reshape([count, width]).sum_dim(1).reshape([count])
        })
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

/// The host's decisions about every parameter in a step.
pub struct Orders {
    pub rates: Vec<Rates>,
    /// The steps that it has taken part in.
    pub times: Vec<usize>,
}

/// The device's decisions about every parameter in a step.
pub struct Decision {
    /// 1 where a parameter stays as it is, else 0.
    pub left: Tensor<1>,
    /// The number of times that a parameter was refused since the last step: for its gradient, and for what the
    /// iteration made of its momentum then.
    pub refused: Tensor<1>,
}

impl Decision {
    /// Decides by the number of ranks that refuse a parameter, and by whether it has a gradient on one; counts those
    /// refused late, too.
    pub fn new(refused: Tensor<1>, late: Tensor<1>, present: &[bool]) -> Self {
        let absent: Vec<f32> =
            present.iter().map(|present| f32::from(u8::from(!present))).collect();
        let absent = Tensor::from_data(TensorData::from(&*absent), (&refused.device(), DType::F32));
        let any = |sums: Tensor<1>| ones_where(sums.greater_elem(0.0));
        let refused = any(refused);
        Self { left: refused.clone().max_pair(absent), refused: refused + any(late) }
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
        let sums = rows.sum(Tensor::ones([70_000], (&device, DType::F32))).into_data();
        sums.assert_eq(&TensorData::from([69_000.0_f32, 0.0, 1_000.0]), true);
        let none = Rows::new(&[], 2, &device).sum(flat::empty(DType::F32, &device)).into_data();
        none.assert_eq(&TensorData::from([0.0_f32, 0.0]), true);
    }
}
