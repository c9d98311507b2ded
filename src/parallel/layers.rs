//! Linear layers of which every rank of a group has a slice.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::module::linear;

use super::{enter, leave};
use crate::comm::Communicator;

/// A linear layer whose outputs are divided among the ranks of a group. Every rank has the columns
/// of Burn's `[inputs, outputs]` weight, and the elements of the bias, of its slice of the outputs.
///
/// It begins a region, which a [`RowLinear`] ends.
#[derive(Module, Debug)]
pub struct ColumnLinear {
    /// The slice of this rank.
    pub linear: Linear,
    #[module(skip)]
    group: Communicator,
}

impl ColumnLinear {
    /// Returns the layer whose slice on this rank is `linear`.
    pub fn new(linear: Linear, group: &Communicator) -> Self {
        Self { linear, group: group.clone() }
    }

    /// Returns this rank's slice of the outputs, `[..., outputs of the slice]`, of an input
    /// `[..., inputs]` that is the same on all ranks of the group.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.linear.forward(enter(input, &self.group))
    }
}

/// A linear layer whose inputs are divided among the ranks of a group. Every rank has the rows of
/// Burn's `[inputs, outputs]` weight of its slice of the inputs, and the whole bias, which is added
/// once, after the sum over ranks.
///
/// It ends a region, which a [`ColumnLinear`] has begun.
#[derive(Module, Debug)]
pub struct RowLinear {
    /// The slice of this rank.
    pub linear: Linear,
    #[module(skip)]
    group: Communicator,
}

impl RowLinear {
    /// Returns the layer whose slice on this rank is `linear`.
    pub fn new(linear: Linear, group: &Communicator) -> Self {
        Self { linear, group: group.clone() }
    }

    /// Returns the outputs, `[..., outputs]`, the same on all ranks of the group, from this rank's
    /// slice of the inputs, `[..., inputs of the slice]`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        // Without the bias, which every rank would add to the sum.
        let output = leave(linear(input, self.linear.weight.val(), None), &self.group);
        match &self.linear.bias {
            Some(bias) => output + bias.val().unsqueeze(),
            None => output,
        }
    }
}
