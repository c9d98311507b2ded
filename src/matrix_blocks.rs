//! Matrices that are cut into blocks of outputs or of inputs, each of which is updated as a matrix
//! of its own.

use std::ops::Range;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::flat;
use crate::matrix_view::MatrixLayout;

/// The side of a matrix that is cut into blocks.
// Exhaustive: a matrix has two sides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockSide {
    /// The outputs, as of projections to queries, keys and values.
    #[default]
    Outputs,
    /// The inputs, as of the output projection of an attention.
    Inputs,
}

impl BlockSide {
    /// The dimension of a batch of matrices that counts the side.
    pub(crate) fn dimension(self, layout: MatrixLayout) -> usize {
        match (self, layout) {
            (Self::Outputs, MatrixLayout::InOut) | (Self::Inputs, MatrixLayout::OutIn) => 2,
            (Self::Outputs, MatrixLayout::OutIn) | (Self::Inputs, MatrixLayout::InOut) => 1,
        }
    }
}

/// The rule by which a side of a matrix is cut into blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Split {
    /// Blocks of the given sizes.
    Sizes(Vec<usize>),
    /// A number of blocks of equal size.
    Equal(usize),
}

impl Split {
    /// The sizes of all blocks of a parameter whose matrices have `all` outputs or inputs.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if the blocks do not make up that side.
    pub fn sizes(
        &self,
        parameter: &str,
        shape: &[usize],
        (side, all): (BlockSide, usize),
    ) -> Result<Vec<usize>> {
        let (name, expected) = match side {
            BlockSide::Outputs => ("outputs", "blocks that make up its outputs"),
            BlockSide::Inputs => ("inputs", "blocks that make up its inputs"),
        };
        let error = |remedy| {
            let (parameter, shape) = (parameter.to_owned(), shape.to_vec());
            Error::Shape { parameter, expected, shape, remedy }
        };
        match self {
            Self::Sizes(sizes) => {
                let sum: usize = sizes.iter().sum();
                if sum == all && !sizes.contains(&0) {
                    return Ok(sizes.clone());
                }
                Err(error(format!(
                    "give `split` sizes above zero whose sum is {all}, the {name}, instead \
                     of {sizes:?}, whose sum is {sum}; or set the `layout` of the rule"
                )))
            }
            &Self::Equal(count) => {
                if count > 0 && all.is_multiple_of(count) {
                    return Ok(vec![all / count; count]);
                }
                Err(error(format!(
                    "give `heads` a divisor of {all}, the {name}, instead of {count}; or set \
                     the `layout` of the rule"
                )))
            }
        }
    }
}

/// The blocks of a batch of matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    batch: [usize; 3],
    /// The dimension of the batch that is cut: of outputs, or of inputs.
    dimension: usize,
    /// The sizes of all blocks in that dimension.
    sizes: Vec<usize>,
    /// `true` if the parameter's first two dimensions are the matrices', rather than its
    /// last.
    is_leading: bool,
}

impl Blocks {
    /// The blocks of these sizes along a dimension of the batch; one for no sizes.
    pub fn new(batch: [usize; 3], dimension: usize, sizes: &[usize]) -> Self {
        let sizes = if sizes.is_empty() { vec![batch[dimension]] } else { sizes.to_vec() };
        Self { batch, dimension, sizes, is_leading: false }
    }

    /// The blocks of a parameter whose matrices are in its first two dimensions.
    pub fn leading(self) -> Self {
        Self { is_leading: true, ..self }
    }

    /// The only block of a parameter that is not a matrix.
    pub fn of_elements(count: usize) -> Self {
        Self::new([1, 1, count], 2, &[])
    }

    /// The blocks of a slice of the parameter, as a batch of this shape. The slice may have nothing
    /// of a block.
    pub fn of_slice(&self, batch: [usize; 3], sizes: Vec<usize>) -> Self {
        Self { batch, sizes, ..self.clone() }
    }

    /// Returns `true` if the only block has the parameter's values, in its order.
    pub fn is_whole(&self) -> bool {
        // A stack in the last dimensions has to be turned, unless it has one matrix.
        self.count() == 1 && (!self.is_leading || self.batch[0] == 1)
    }

    /// The number of blocks.
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// The shapes of all blocks, as batches.
    pub fn batches(&self) -> impl Iterator<Item = [usize; 3]> {
        self.sizes.iter().map(|size| {
            let mut batch = self.batch;
            batch[self.dimension] = *size;
            batch
        })
    }

    /// The name of every block of a parameter: its path with the range of outputs or inputs. A
    /// single block has the parameter's name.
    pub fn names(&self, path: &str) -> Vec<String> {
        let name = |range: Range<usize>| format!("{path}[{}..{}]", range.start, range.end);
        match self.count() {
            1 => vec![path.to_owned()],
            _ => self.ranges().map(name).collect(),
        }
    }

    /// The dimension of a batch of the parameter's matrices that is cut into blocks.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// The ranges of outputs or inputs.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.sizes.iter().scan(0, |end, size| {
            let start = *end;
            *end += size;
            Some(start..*end)
        })
    }

    /// Cuts the values of a parameter into blocks.
    pub fn cut(&self, values: Tensor<1>) -> Vec<Tensor<1>> {
        if self.is_whole() {
            return vec![values];
        }
        let [count, m, n] = self.batch;
        let values = match self.is_leading {
            // The matrices are in the first dimensions, so the stack varies the fastest: turned to
            // the front.
            true => values.reshape([m * n, count]).transpose().reshape([-1]),
            false => values,
        };
        let (dtype, device) = (values.dtype(), values.device());
        // A rank's slice may have nothing of a block, and not every backend splits into empty
        // tensors.
        let filled = self.sizes.iter().copied().filter(|size| *size > 0).collect();
        let mut filled =
            values.reshape(self.batch).split_with_sizes(filled, self.dimension).into_iter();
        let block = |size: &usize| match size {
            0 => flat::empty(dtype, &device),
            _ => filled.next().expect("a block for every size").reshape([-1]),
        };
        self.sizes.iter().map(block).collect()
    }

    /// Joins the values of blocks, the reverse of [`cut`](Self::cut).
    pub fn join(&self, mut blocks: Vec<Tensor<1>>) -> Tensor<1> {
        if self.is_whole() {
            return blocks.swap_remove(0);
        }
        let shaped = blocks
            .into_iter()
            .zip(self.batches())
            // Empty blocks, as `cut` returns them, have nothing to join.
            .filter(|(_, batch)| !batch.contains(&0))
            .map(|(block, batch)| block.reshape(batch))
            .collect();
        let values: Tensor<3> = Tensor::cat(shaped, self.dimension);
        let [count, m, n] = self.batch;
        match self.is_leading {
            true => values.reshape([count, m * n]).transpose().reshape([-1]),
            false => values.reshape([-1]),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int};

    use super::*;

    fn counted(count: usize) -> Tensor<1> {
        Tensor::<1, Int>::arange(0..count as i64, &Device::default()).float()
    }

    #[test]
    fn joined_blocks_are_the_parameter() {
        for (batch, layout, sizes) in [
            ([1, 4, 6], MatrixLayout::InOut, vec![2, 1, 3]),
            ([1, 6, 4], MatrixLayout::OutIn, vec![2, 1, 3]),
            ([3, 4, 6], MatrixLayout::InOut, vec![3, 3]),
            ([3, 4, 6], MatrixLayout::OutIn, vec![]),
        ] {
            let blocks = Blocks::new(batch, BlockSide::Outputs.dimension(layout), &sizes);
            let values = counted(batch.iter().product());
            let cut = blocks.cut(values.clone());
            let elements = blocks.batches().map(|batch| batch.iter().product::<usize>());
            assert_eq!(
                cut.iter().map(|block| block.dims()[0]).collect::<Vec<_>>(),
                elements.collect::<Vec<_>>()
            );
            blocks.join(cut).into_data().assert_eq(&values.clone().into_data(), true);
            let leading = blocks.leading();
            leading
                .join(leading.cut(values.clone()))
                .into_data()
                .assert_eq(&values.into_data(), true);
        }
    }

    #[test]
    fn leading_matrices_are_those_of_the_first_dimensions() {
        // Of `[2, 2, 3]`: the matrices at the three last indices.
        let blocks = Blocks::new([3, 2, 2], 2, &[]).leading();
        assert!(!blocks.is_whole());
        let values = blocks.cut(counted(12)).swap_remove(0).into_data();
        let expected = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11].map(|x| x as f32);
        assert_eq!(values.iter::<f32>().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn blocks_of_burns_linear_are_columns() {
        let blocks = Blocks::new([1, 2, 3], 2, &[2, 1]);
        let cut = blocks.cut(counted(6));
        let values = |index: usize| cut[index].to_data().iter::<f32>().collect::<Vec<_>>();
        assert_eq!((values(0), values(1)), (vec![0.0, 1.0, 3.0, 4.0], vec![2.0, 5.0]));
        assert_eq!(blocks.names("qkv"), ["qkv[0..2]", "qkv[2..3]"]);
    }

    #[test]
    fn blocks_that_do_not_make_up_the_outputs_are_rejected_by_name() {
        for (split, words) in [
            (Split::Sizes(vec![4, 3]), "whose sum is 8"),
            (Split::Sizes(vec![8, 0]), "sizes above zero"),
            (Split::Sizes(vec![]), "whose sum is 0"),
            (Split::Equal(3), "a divisor of 8"),
            (Split::Equal(0), "a divisor of 8"),
        ] {
            let all = (BlockSide::Outputs, 8);
            let error = split.sizes("qkv.weight", &[2, 8], all).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("qkv.weight"), "{error}");
        }
        let sizes = |side| Split::Equal(4).sizes("qkv.weight", &[2, 8], side);
        assert_eq!(sizes((BlockSide::Outputs, 8)), Ok(vec![2; 4]));
        let error = sizes((BlockSide::Inputs, 2)).unwrap_err().to_string();
        assert!(error.contains("a divisor of 2, the inputs"), "{error}");
    }
}
