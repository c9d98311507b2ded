//! Tensors of Burn's Flex backend, as the operations read and write them.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::DType;

/// Returns `true` for a type that the operations accept. Burn's operations serve the others.
pub(in crate::backend) fn serves(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The root mean square and the number of values: their norm as
/// [`MatrixOps::norms`](crate::backend::ops::MatrixOps::norms) stores it.
/// Squares of float32 neither overflow nor underflow in float64.
pub(super) fn scaled_squares(values: &[f32]) -> [f32; 2] {
    let squares = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let count = values.len() as f64;
    [(squares / count).sqrt() as f32, count as f32]
}

/// float32 zeros. Burn's own are made from bytes, which are copied again to be aligned.
pub(super) fn zeros(shape: [usize; 3]) -> FloatTensor<Flex> {
    FloatTensor::<Flex>::filled_typed(shape.into(), DType::F32, 0f32)
}

/// The tensor in float32.
pub(super) fn single(tensor: FloatTensor<Flex>) -> FloatTensor<Flex> {
    rounded(tensor, DType::F32)
}

/// The tensor in a type; unchanged if it has that type.
pub(super) fn rounded(tensor: FloatTensor<Flex>, dtype: DType) -> FloatTensor<Flex> {
    if tensor.dtype() == dtype { tensor } else { Flex::float_cast(tensor, dtype.into()) }
}

/// The float32 tensor with its elements in order and nothing else in its buffer.
pub(super) fn contiguous(tensor: FloatTensor<Flex>) -> FloatTensor<Flex> {
    let elements = tensor.shape().num_elements();
    // A contiguous slice of a larger buffer has elements of others in its storage.
    if tensor.is_contiguous() && tensor.storage::<f32>().len() == elements {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// The float32 values of a small tensor.
pub(super) fn values(tensor: FloatTensor<Flex>) -> Vec<f32> {
    contiguous(tensor).storage::<f32>().to_vec()
}

/// Updates parameters in place: those with an item. Each is a tensor, or an entry of `places` in
/// the only tensor.
pub(super) fn updated<T>(
    mut parameters: Vec<FloatTensor<Flex>>,
    places: &[Range<usize>],
    items: impl Iterator<Item = Option<T>>,
    mut update: impl FnMut(&mut [f32], T),
) -> Vec<FloatTensor<Flex>> {
    if places.is_empty() {
        let updated = |(parameter, item): (FloatTensor<Flex>, Option<T>)| {
            let Some(item) = item else { return parameter };
            let dtype = parameter.dtype();
            let mut parameter = contiguous(single(parameter));
            update(parameter.storage_mut::<f32>(), item);
            rounded(parameter, dtype)
        };
        return parameters.into_iter().zip(items).map(updated).collect();
    }
    let all = parameters.swap_remove(0);
    let dtype = all.dtype();
    let mut all = contiguous(single(all));
    for (place, item) in places.iter().zip(items) {
        if let Some(item) = item {
            update(&mut all.storage_mut::<f32>()[place.clone()], item);
        }
    }
    vec![rounded(all, dtype)]
}
