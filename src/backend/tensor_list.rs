//! Tensors of several parameters as one argument of a backend extension.

// The enum below and those that its macro generates live for one call: a box would be an allocation
// per call.
#![allow(clippy::large_enum_variant)]

use std::ops::Range;

use burn::backend::{Backend, Dispatch, ExtensionType, tensor::FloatTensor};
use burn::tensor::Tensor;

/// The list lengths that a call accepts, the longest first: eight is what one kernel launch
/// processes.
const SIZES: [usize; 4] = [8, 4, 2, 1];

/// The tensors of one call. Extensions of Burn's backends accept enums, but no lists.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum TensorList<B: Backend> {
    /// One tensor.
    One(FloatTensor<B>),
    /// Two tensors.
    Two(FloatTensor<B>, FloatTensor<B>),
    /// Four tensors.
    Four(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    /// Eight tensors.
    Eight(
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
        FloatTensor<B>,
    ),
}

impl<B: Backend> TensorList<B> {
    /// The tensors as a list.
    pub fn into_vec(self) -> Vec<FloatTensor<B>> {
        match self {
            Self::One(a) => vec![a],
            Self::Two(a, b) => vec![a, b],
            Self::Four(a, b, c, d) => vec![a, b, c, d],
            Self::Eight(a, b, c, d, e, f, g, h) => vec![a, b, c, d, e, f, g, h],
        }
    }

    /// The reverse of [`into_vec`](Self::into_vec).
    ///
    /// # Panics
    ///
    /// For a number of tensors that is not one of [`calls`].
    pub fn from_vec(tensors: Vec<FloatTensor<B>>) -> Self {
        let mut tensors = tensors.into_iter();
        let count = tensors.len();
        let mut next = || tensors.next().expect("the length was matched");
        match count {
            1 => Self::One(next()),
            2 => Self::Two(next(), next()),
            4 => Self::Four(next(), next(), next(), next()),
            8 => Self::Eight(next(), next(), next(), next(), next(), next(), next(), next()),
            _ => panic!("a tensor list has a length of {SIZES:?}, got {count}"),
        }
    }
}

impl TensorList<Dispatch> {
    /// The list of a call, from its tensors.
    pub fn from_tensors(tensors: Vec<Tensor<1>>) -> Self {
        Self::from_vec(tensors.into_iter().map(Tensor::into_dispatch).collect())
    }

    /// The tensors of the list.
    pub fn into_tensors(self) -> Vec<Tensor<1>> {
        self.into_vec().into_iter().map(Tensor::from_dispatch).collect()
    }
}

/// The ranges of `count` tensors that consecutive calls process.
pub fn calls(count: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let size = SIZES.into_iter().find(|size| *size <= count - start)?;
        start += size;
        Some(start - size..start)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_cover_all_tensors_in_order() {
        for count in 0..40 {
            let covered: Vec<usize> = calls(count).flatten().collect();
            assert_eq!(covered, (0..count).collect::<Vec<_>>());
            assert!(calls(count).all(|call| SIZES.contains(&call.len())));
        }
        assert_eq!(calls(13).collect::<Vec<_>>(), [0..8, 8..12, 12..13]);
    }
}
