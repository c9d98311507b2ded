//! Row equilibration, as in <https://github.com/karpathy/nanochat>, and the same for columns.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::state::Slots;
use super::{Behaviour, Context, Part, Stage, by_largest};

/// Least norm of a line that is scaled up, over the largest magnitude of the matrix: the squares of
/// its elements are normal numbers in float32. nanochat has 1e-6 for matrices of any size, so that
/// a clip of the gradients could end the equilibration.
const LEAST_NORM: f64 = 1e-15;

/// Scales every row to the root mean square of the row norms before the iteration, as in
/// <https://github.com/karpathy/nanochat>. MuonEq (<https://arxiv.org/abs/2603.28254>) does so.
///
/// A row has the weights of one output. Of `r` rows, row `X_i` becomes
/// `X_i |X|_F / (sqrt(r) |X_i|)`, so that outputs with small gradients contribute to the update as
/// much as others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowEquilibration;

/// Scales every column to the root mean square of the column norms before the iteration: a column
/// has the weights of one input. Otherwise as [`RowEquilibration`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColumnEquilibration;

impl From<RowEquilibration> for Part {
    fn from(part: RowEquilibration) -> Self {
        Self::RowEquilibration(part)
    }
}

impl From<ColumnEquilibration> for Part {
    fn from(part: ColumnEquilibration) -> Self {
        Self::ColumnEquilibration(part)
    }
}

impl Behaviour for RowEquilibration {
    fn name(&self) -> &'static str {
        "row equilibration"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Before]
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        equilibrated(x, context.known.matrices.along_output())
    }
}

impl Behaviour for ColumnEquilibration {
    fn name(&self) -> &'static str {
        "column equilibration"
    }

    fn stages(&self) -> &'static [Stage] {
        &[Stage::Before]
    }

    fn apply(&self, x: Tensor<3>, _state: &mut Slots, context: &Context<'_>) -> Tensor<3> {
        equilibrated(x, 3 - context.known.matrices.along_output())
    }
}

/// The matrices with equal norms of all lines along a dimension.
fn equilibrated(x: Tensor<3>, along: usize) -> Tensor<3> {
    let (x, largest) = by_largest(x);
    let squares = x.clone().square().sum_dim(along);
    let mean = squares.clone().mean_dim(3 - along).sqrt();
    // The largest magnitude comes last: the rest is of its order, so nothing overflows before.
    x * (mean / squares.sqrt().clamp_min(LEAST_NORM)) * largest
}
