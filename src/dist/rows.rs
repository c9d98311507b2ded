//! The rows that a rank updates, and the parameters that they belong to.
//!
//! A row is what is accepted or refused as a whole: a matrix, or [`GRAIN`](super::plan::GRAIN) elements
//! of a parameter that AdamW updates. Whatever is known per parameter, in tensors over all parameters of
//! the plan, is spread to the rows of all buckets at once, and buckets use their parts of that.

use std::ops::Range;

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData, s};

use super::flat;
use super::plan::Parameter;
use crate::gate::ones_where;
use crate::muon::rule::Rates;

/// The rows of a rank, those of one bucket after those of another.
pub struct Rows {
    /// For every row, the number of its parameter.
    parameters: Vec<i32>,
    numbers: Tensor<1, Int>,
    device: Device,
}

impl Rows {
    /// The rows whose parameters have these numbers.
    pub fn new(parameters: Vec<usize>, device: &Device) -> Self {
        let parameters: Vec<i32> = parameters.into_iter().map(|number| number as i32).collect();
        let numbers = Tensor::from_data(TensorData::from(&*parameters), device);
        Self { parameters, numbers, device: device.clone() }
    }

    /// For every parameter, the sum of the values of its rows.
    pub fn sum(&self, rows: Vec<Tensor<1>>, parameters: &[Parameter]) -> Tensor<1> {
        let zeros = Tensor::zeros([parameters.len()], (&self.device, DType::F32));
        if self.parameters.is_empty() {
            return zeros;
        }
        let rows = flat::join(rows, DType::F32, &self.device);
        zeros.select_assign(0, self.numbers.clone(), rows, IndexingUpdateOp::Add)
    }

    /// For every row, the value of its parameter.
    pub fn spread(&self, per_parameter: &Tensor<1>) -> Tensor<1> {
        match self.parameters.is_empty() {
            true => flat::empty(per_parameter.dtype(), &self.device),
            false => per_parameter.clone().select(0, self.numbers.clone()),
        }
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
    /// 1 where a parameter's gradient is not finite, else 0.
    pub refused: Tensor<1>,
}

impl Decision {
    /// Decides by how many rows of each parameter are refused anywhere, and by whether it has a gradient.
    pub fn new(refused_rows: Tensor<1>, present: Tensor<1>) -> Self {
        let fine = ones_where(refused_rows.clone().equal_elem(0.0));
        let refused = ones_where(refused_rows.greater_elem(0.0));
        Self { accepted: fine * present, refused }
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
