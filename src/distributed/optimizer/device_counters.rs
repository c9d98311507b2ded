//! The counters of every parameter, on the device: the same on all ranks.

use burn::tensor::{DType, Device, Tensor};

use crate::update::{CORRECTIONS, SKIPPED, Slot};

/// One value for every parameter, in the order of the plan.
pub struct Counters {
    /// Steps that left the parameter untouched.
    pub skipped: Tensor<1>,
    /// AdamW's bias corrections.
    pub corrections: [Tensor<1>; 2],
}

/// The slots of all counters.
pub const COUNTERS: [Slot; 3] = [SKIPPED, CORRECTIONS[0], CORRECTIONS[1]];

impl Counters {
    /// Zeros.
    pub fn new(parameters: usize, device: &Device) -> Self {
        let zeros = || Tensor::zeros([parameters], (device, DType::F32));
        Self { skipped: zeros(), corrections: [zeros(), zeros()] }
    }

    /// The counters in the order of [`COUNTERS`].
    pub fn values(&self) -> [&Tensor<1>; 3] {
        let [first, second] = &self.corrections;
        [&self.skipped, first, second]
    }
}
