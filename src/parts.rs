//! Tensors of several parameters in one call of a backend.

// Of the enum below and those that its macro makes: each lives for one call, and a box would be an allocation for it.
#![allow(clippy::large_enum_variant)]

use std::ops::Range;

use burn::backend::{Backend, Dispatch, ExtensionType, tensor::FloatTensor};
use burn::tensor::Tensor;

/// The numbers of tensors that a call takes, the largest first: as many as a kernel works on at once.
const SIZES: [usize; 4] = [8, 4, 2, 1];

/// The tensors of one call. Extensions of Burn's backends take no lists, but enums.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum Parts<B: Backend> {
    /// One tensor.
    One(FloatTensor<B>),
    /// Two.
    Two(FloatTensor<B>, FloatTensor<B>),
    /// Four.
    Four(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    /// Eight.
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

impl<B: Backend> Parts<B> {
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
        let mut next = || tensors.next().expect("there are as many");
        match count {
            1 => Self::One(next()),
            2 => Self::Two(next(), next()),
            4 => Self::Four(next(), next(), next(), next()),
            8 => Self::Eight(next(), next(), next(), next(), next(), next(), next(), next()),
            _ => panic!("parts come in {SIZES:?}, and these are {count}"),
        }
    }
}

impl Parts<Dispatch> {
    /// The parts of a call from their tensors.
    pub fn from_tensors(tensors: Vec<Tensor<1>>) -> Self {
        Self::from_vec(tensors.into_iter().map(Tensor::into_dispatch).collect())
    }

    /// The tensors of the parts.
    pub fn into_tensors(self) -> Vec<Tensor<1>> {
        self.into_vec().into_iter().map(Tensor::from_dispatch).collect()
    }
}

/// The parts that every call takes, of so many.
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
    fn calls_take_all_parts_in_order() {
        for count in 0..40 {
            let parts: Vec<usize> = calls(count).flatten().collect();
            assert_eq!(parts, (0..count).collect::<Vec<_>>());
            assert!(calls(count).all(|call| SIZES.contains(&call.len())));
        }
        assert_eq!(calls(13).collect::<Vec<_>>(), [0..8, 8..12, 12..13]);
    }
}
