//! The products of the iteration.

use burn::backend::{Backend, TensorMetadata, get_device_settings, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Slice, Tensor};

use crate::backend::precise_dtype;
use crate::backend::program::{AOL_SIZE, Rescaling};

/// Smallest number of rows, and smallest inner dimension, of a product that is split into block
/// rows: below, joining the blocks costs more than the saved half. Measured on Flex; see
/// `docs/results/`.
const SPLIT_ROWS: usize = 512;
const SPLIT_INNER: usize = 1536;

/// Block rows of a split product: more of them save more, fewer keep the pieces large.
const BLOCK_ROWS: usize = 4;

/// The fraction of a symmetric product of `m` rows that [`lower_block_rows`] computes.
pub fn symmetric_share(m: usize, inner: usize) -> f64 {
    if splits(m, inner) { (BLOCK_ROWS + 1) as f64 / (2 * BLOCK_ROWS) as f64 } else { 1.0 }
}

fn splits(m: usize, inner: usize) -> bool {
    m >= SPLIT_ROWS && inner >= SPLIT_INNER
}

/// [`MatrixOps::syrk`](crate::backend::ops::MatrixOps::syrk).
pub fn syrk<B: Backend>(a: FloatTensor<B>) -> FloatTensor<B> {
    lower_block_rows::<B>(a.clone(), a)
}

/// [`MatrixOps::symmetric_product`](crate::backend::ops::MatrixOps::symmetric_product).
pub fn symmetric_product<B: Backend>(
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    c: FloatTensor<B>,
    alpha: f64,
    beta: f64,
) -> FloatTensor<B> {
    let product = lower_block_rows::<B>(a, b);
    // A common factor: one multiplication fewer.
    if alpha == beta {
        return B::float_mul_scalar(B::float_add(product, c), alpha.into());
    }
    let product = if alpha == 1.0 { product } else { B::float_mul_scalar(product, alpha.into()) };
    B::float_add(product, B::float_mul_scalar(c, beta.into()))
}

/// [`MatrixOps::product_add`](crate::backend::ops::MatrixOps::product_add).
pub fn product_add<B: Backend>(
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    c: FloatTensor<B>,
    beta: f64,
) -> FloatTensor<B> {
    B::float_add(B::float_matmul(a, b), B::float_mul_scalar(c, beta.into()))
}

/// `beta Z`, rounded once.
pub fn scaled<B: Backend>(z: FloatTensor<B>, beta: f64) -> FloatTensor<B> {
    let dtype = FloatDType::from(z.dtype());
    // An operation in half precision would round the factor as well.
    let scaled = B::float_mul_scalar(B::float_cast(z, precise(dtype.into())), beta.into());
    B::float_cast(scaled, dtype)
}

/// The numbers by which the rows of `X` are divided, in float32 at least, from `R = X X^T`: one for
/// every row, `[k, m, 1]`, or one for all, `[k, 1, 1]`. An `X` below the full size stays below it.
pub fn divisors<B: Backend>(r: FloatTensor<B>, by: Rescaling) -> FloatTensor<B> {
    let ([_, m, _], dtype) = (r.shape().dims(), r.dtype());
    let r = B::float_cast(r, precise(dtype));
    match by {
        Rescaling::Schatten4 => {
            let squares = B::float_mul(r.clone(), r);
            let norm = B::float_sqrt(B::float_sum_dim(B::float_sum_dim(squares, 2), 1));
            B::float_sqrt(B::float_clamp_min(norm, least_gram_norm(m).into()))
        }
        Rescaling::Aol => {
            let sums = B::float_sum_dim(B::float_abs(r), 2);
            let total = B::float_sum_dim(sums.clone(), 1);
            let size = B::float_mul_scalar(total, SIZE_OF_SUM.into());
            let size = B::float_clamp_max(size, 1.0.into());
            let sums = B::float_add_scalar(sums, least_row_sum(m, dtype).into());
            B::float_sqrt(B::float_div(sums, size))
        }
    }
}

/// The least norm of an `R = X X^T` of `m` rows that is divided by. It is `1 / sqrt(m)` at least
/// for an `X` whose Frobenius norm is 1, and half of that is taken for a smaller one.
pub fn least_gram_norm(m: usize) -> f64 {
    0.5 / (m as f64).sqrt()
}

/// Multiplied by the sum of the magnitudes of `R = X X^T`, it is the size of `X`, up to 1. That
/// sum is at least the square of the norm of `X`: a half of it still counts as an `X` of full size.
pub const SIZE_OF_SUM: f64 = 2.0 / (AOL_SIZE * AOL_SIZE);

/// The addend of a sum over a row of `R`. With it, rows of zeros stay zero, and numbers that are
/// too small for the type can't make a sum too small. At most half of the least number is lost for
/// each of `m` elements, and twice that is added.
pub fn least_row_sum(m: usize, dtype: DType) -> f64 {
    let least = match dtype {
        DType::F16 => 2f64.powi(-24),
        // Devices may take numbers for zeros that are smaller than normal ones.
        _ => f32::MIN_POSITIVE.into(),
    };
    m as f64 * least
}

/// Matrices divided by numbers, one for each matrix, row, column or element, and rounded once.
pub fn over<B: Backend>(x: FloatTensor<B>, by: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = FloatDType::from(x.dtype());
    B::float_cast(B::float_div(B::float_cast(x, precise(dtype.into())), by), dtype)
}

fn precise(dtype: DType) -> FloatDType {
    precise_dtype(dtype).into()
}

/// [`MatrixOps::plus_identity`](crate::backend::ops::MatrixOps::plus_identity).
pub fn plus_identity<B: Backend>(z: FloatTensor<B>) -> FloatTensor<B> {
    let [_, m, _] = z.shape().dims();
    let (device, dtype) = (z.device(), FloatDType::from(z.dtype()));
    let integers = get_device_settings::<B>(&device).int_dtype;
    let diagonal = B::int_arange(0..m as i64, &device, integers);
    let diagonal = B::int_reshape(diagonal, [1, m].into());
    let zeros = B::float_zeros([m, m].into(), &device, FloatDType::F32);
    let ones = B::float_ones([1, m].into(), &device, FloatDType::F32);
    let identity = B::float_scatter(0, zeros, diagonal, ones, IndexingUpdateOp::Add);
    let identity = B::float_reshape(B::float_cast(identity, dtype), [1, m, m].into());
    B::float_add(z, identity)
}

/// [`MatrixOps::normalize`](crate::backend::ops::MatrixOps::normalize).
///
/// The largest magnitude is divided out first, so that no square overflows or underflows.
pub fn normalize(x: Tensor<3>, epsilon: f64) -> Tensor<3> {
    let smallest = match x.dtype() {
        DType::F64 => f64::MIN_POSITIVE,
        _ => f32::MIN_POSITIVE.into(),
    };
    // At least the smallest normal number, so that a matrix of zeros stays one.
    let size = x.clone().abs().max_dim(2).max_dim(1).clamp_min(smallest);
    let x = x / size.clone();
    let norm = x.clone().square().sum_dims(&[1, 2]).sqrt().clamp_min(smallest);
    x / norm.max_pair(size.recip().mul_scalar(epsilon))
}

/// `A B^T` in block rows: the blocks on and below the diagonal are computed, those above it are
/// their transposes.
fn lower_block_rows<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let [k, m, n] = a.shape().dims();
    if !splits(m, n) {
        return B::float_matmul(a, B::float_swap_dims(b, 1, 2));
    }
    // Block rows up to the diagonal: with four, 5/8 of the whole product.
    let block = m.div_ceil(BLOCK_ROWS);
    let mut result = B::float_empty([k, m, m].into(), &a.device(), a.dtype().into());
    for start in (0..m).step_by(block) {
        let end = (start + block).min(m);
        let rows = B::float_slice(a.clone(), &ranges([0..k, start..end, 0..n]));
        let columns = B::float_slice(b.clone(), &ranges([0..k, 0..end, 0..n]));
        let row = B::float_matmul(rows, B::float_swap_dims(columns, 1, 2));
        let left = B::float_slice(row.clone(), &ranges([0..k, 0..end - start, 0..start]));
        result = B::float_slice_assign(result, &ranges([0..k, start..end, 0..end]), row);
        if start > 0 {
            let above = B::float_swap_dims(left, 1, 2);
            result = B::float_slice_assign(result, &ranges([0..k, 0..start, start..end]), above);
        }
    }
    result
}

fn ranges(ranges: [core::ops::Range<usize>; 3]) -> [Slice; 3] {
    ranges.map(Slice::from)
}

#[cfg(test)]
mod tests {
    use burn::backend::Dispatch;
    use burn::tensor::{Device, Distribution};

    use super::*;
    use crate::skipped_tests::excused;

    /// In sizes that the blocks do not divide.
    #[test]
    fn products_in_block_rows_equal_the_plain_product() {
        for (m, n) in [(512, 2048), (515, 2050)] {
            assert!(symmetric_share(m, n) < 1.0, "{m}x{n} is not split");
            let a = Tensor::<3>::random([1, m, n], Distribution::Default, &Device::default());
            let plain = a.clone().matmul(a.clone().swap_dims(1, 2));
            let product = Tensor::from_dispatch(syrk::<Dispatch>(a.into_dispatch()));
            let error = (product - plain).abs().max().into_scalar::<f32>();
            assert!(error < 1e-2, "{m}x{n}: {error}");
        }
        assert_eq!(symmetric_share(511, 4096), 1.0);
    }

    #[test]
    fn the_identity_is_added_in_the_type_of_the_matrices() {
        let device = Device::default();
        for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F64] {
            if !device.supports_dtype(dtype) {
                excused(format!("the device has no {dtype:?}"));
                continue;
            }
            let z = Tensor::<3>::full([2, 3, 3], -0.5, &device).cast(dtype);
            let sum: Tensor<3> =
                Tensor::from_dispatch(plus_identity::<Dispatch>(z.into_dispatch()));
            assert_eq!(sum.dtype(), dtype.into());
            let expected = [[0.5, -0.5, -0.5], [-0.5, 0.5, -0.5], [-0.5, -0.5, 0.5]];
            let values: Vec<f64> = sum.into_data().iter::<f64>().collect();
            assert_eq!(values, [expected; 2].as_flattened().as_flattened());
        }
    }
}
