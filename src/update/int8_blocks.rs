//! Values in 8 bits: a code for each, and a float32 scale for the values of a block.
//!
//! The scale `A` is the largest magnitude of the block, and a code `c` stands for
//! `A (c / 127) |c / 127|`. Small values, of which a momentum has most, lie closer together than
//! with `A c / 127`. One coding changes normal values by 0.0067 of their Frobenius norm, and values
//! of Student's t distribution with 3 degrees of freedom, which has larger outliers, by 0.0080.
//! Linear codes change them by 0.0065 and 0.0136, and the dynamic codes of 8-bit optimizers
//! (Dettmers et al., <https://arxiv.org/abs/2110.02861>) by 0.0102 and 0.0134.
//!
//! Decoded values have the same codes and scale again, since the largest decodes to exactly `A`.
//! They may therefore be saved and sent as float32, and coded where they arrive.

use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Tensor};

use crate::flat::{self, expand};
use crate::host::moved;

/// Values of a block: consecutive elements of one matrix. The last block of a matrix may have
/// fewer, so that the codes of a matrix depend on nothing else, wherever it is stored.
const BLOCK: usize = 128;

/// The largest code.
const LARGEST_CODE: f64 = 127.0;

/// The least scale, 2^-112: blocks of smaller values are zeros. Above it, no decoded value is
/// subnormal, which would have fewer digits, and be zero on some devices.
const LEAST_SCALE: f64 = 1.0 / (1u128 << 112) as f64;

/// The largest factor of an average whose values decrease: the code of a value times a larger one
/// is the same for all codes, while the scale stays.
pub(super) const LARGEST_DECAY: f64 = {
    let next = (LARGEST_CODE - 0.5) / LARGEST_CODE;
    next * next
};

/// Matrices of one size, as codes.
#[derive(Clone, Debug)]
pub(super) struct Blocks8 {
    /// The code of every element, in 8 bits.
    codes: Tensor<1, Int>,
    /// The scale of every block.
    scales: Tensor<1>,
    /// Elements of a matrix.
    matrix: usize,
}

/// The number of blocks of some matrices.
fn blocks(elements: usize, matrix: usize) -> usize {
    // Another rank's matrices have no elements, and may have no shape.
    elements.checked_div(matrix).unwrap_or(0) * matrix.div_ceil(BLOCK)
}

/// Bytes of matrices with `elements` elements in total, and `matrix` in each.
pub(super) fn bytes(elements: usize, matrix: usize) -> usize {
    elements * size_of::<i8>() + blocks(elements, matrix) * size_of::<f32>()
}

/// Flat matrices as rows that are blocks, the last one of each matrix with zeros at its end.
fn in_blocks(values: Tensor<1>, matrix: usize) -> Tensor<2> {
    let (matrices, blocks) = (values.dims()[0] / matrix, matrix.div_ceil(BLOCK));
    let mut rows: Tensor<2> = values.reshape([matrices, matrix]);
    let missing = blocks * BLOCK - matrix;
    if missing > 0 {
        let zeros = Tensor::zeros([matrices, missing], (&rows.device(), rows.dtype()));
        rows = Tensor::cat(vec![rows, zeros], 1);
    }
    rows.reshape([matrices * blocks, BLOCK])
}

/// The reverse of [`in_blocks`].
fn flat(blocks: Tensor<2>, matrix: usize) -> Tensor<1> {
    let padded = matrix.div_ceil(BLOCK) * BLOCK;
    let matrices = blocks.shape().num_elements() / padded;
    let rows: Tensor<2> = blocks.reshape([matrices, padded]);
    let rows = if padded > matrix { rows.slice([0..matrices, 0..matrix]) } else { rows };
    rows.reshape([matrices * matrix])
}

impl Blocks8 {
    /// Zeros.
    pub fn zeros(elements: usize, matrix: usize, device: &Device) -> Self {
        let scales = flat::zeros(blocks(elements, matrix), DType::F32, device);
        let options = (device, DType::I8);
        let codes = match elements {
            0 => Tensor::empty([0], options),
            _ => Tensor::zeros([elements], options),
        };
        Self { codes, scales, matrix }
    }

    /// The codes of float32 values. A block with a value that is not finite becomes NaN.
    pub fn new(values: Tensor<1>, matrix: usize) -> Self {
        if values.dims() == [0] {
            return Self::zeros(0, matrix, &values.device());
        }
        let values = in_blocks(values, matrix);
        let [count, _] = values.dims();
        let is_finite = values.clone().is_finite().all_dim(1);
        let largest = values.clone().abs().max_dim(1);
        let is_coded = largest.clone().greater_equal_elem(LEAST_SCALE).bool_and(is_finite.clone());
        let is_other = is_coded.bool_not();
        let divisors = largest.clone().mask_fill(is_other.clone(), 1.0);
        let scales =
            largest.mask_fill(is_other.clone(), 0.0).mask_fill(is_finite.bool_not(), f32::NAN);

        let roots = (values.clone().abs() / divisors).sqrt();
        let codes = (roots * values.sign()).mul_scalar(LARGEST_CODE).round();
        // The integer of NaN is another one on every device.
        let codes = codes.mask_fill(expand(is_other, [count, BLOCK]), 0.0);
        // Converted at the end, into memory that has no more than the elements.
        let codes = flat(codes, matrix).cast(IntDType::I8);
        Self { codes, scales: scales.reshape([count]), matrix }
    }

    /// The values in float32.
    pub fn into_values(self) -> Tensor<1> {
        if self.codes.dims() == [0] {
            // No operation on a tensor without elements: see `flat::zeros`.
            return flat::empty(DType::F32, &self.codes.device());
        }
        let codes = self.codes.cast(FloatDType::F32);
        // A product is exactly 1 for the largest code on every device, and a quotient may not be.
        let units = in_blocks(codes.mul_scalar(1.0 / LARGEST_CODE), self.matrix);
        let values = units.clone() * units.abs();
        let [count] = self.scales.dims();
        flat(values * self.scales.reshape([count, 1]), self.matrix)
    }

    pub fn moved_to(self, device: &Device) -> Self {
        let Self { codes, scales, matrix } = self;
        Self { codes: moved(codes, device), scales: moved(scales, device), matrix }
    }

    pub fn bytes(&self) -> usize {
        self.codes.dims()[0] * size_of::<i8>() + flat::bytes(&self.scales)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;
    use crate::skipped_tests::lacks;

    /// Returns `true` if the default device has integers of 8 bits, and reports it otherwise.
    fn has_codes() -> bool {
        let has = Device::default().supports_dtype(DType::I8);
        if !has {
            lacks("integers of 8 bits");
        }
        has
    }

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), (&Device::default(), DType::F32))
    }

    fn floats(tensor: Tensor<1>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    fn coded(values: &[f32], matrix: usize) -> Blocks8 {
        Blocks8::new(tensor(values), matrix)
    }

    fn decoded(blocks: &Blocks8) -> Vec<f32> {
        floats(blocks.clone().into_values())
    }

    /// The codes, and the bits of the scales.
    fn bits(blocks: &Blocks8) -> (Vec<i8>, Vec<u32>) {
        let codes = blocks.codes.clone().into_data().iter::<i8>().collect();
        (codes, floats(blocks.scales.clone()).into_iter().map(f32::to_bits).collect())
    }

    /// Normal values, by Box and Muller.
    fn normal(random: &mut StdRng) -> f32 {
        let [u, v]: [f64; 2] = [random.random_range(1e-12..1.0), random.random_range(0.0..1.0)];
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    fn assert_kept(blocks: &Blocks8, case: impl std::fmt::Display) {
        let again = Blocks8::new(blocks.clone().into_values(), blocks.matrix);
        assert!(bits(&again) == bits(blocks), "{case}");
    }

    #[test]
    fn decoded_values_have_the_same_codes_again() {
        if !has_codes() {
            return;
        }
        // The largest code in both blocks, and all others.
        let codes: Vec<i8> = (0..=127).rev().chain([127]).chain((-127..0).rev()).collect();
        let mut random = StdRng::seed_from_u64(1);
        let significands = (0..300).map(|_| random.random_range(1.0..2.0_f32));
        let scales = significands.zip(-112..).map(|(x, e)| x * 2f32.powi(e.min(126)));
        let limits = [LEAST_SCALE as f32, f32::MAX, 1.0, 1.0 + f32::EPSILON];
        for scale in scales.chain(limits) {
            let data = TensorData::new(codes.clone(), [256]);
            let blocks = Blocks8 {
                codes: Tensor::from_data(data, (&Device::default(), DType::I8)),
                scales: tensor(&[scale; 2]),
                matrix: 256,
            };
            assert_kept(&blocks, format_args!("scale {scale:e}"));
            let value = decoded(&blocks)[127 - 64];
            let expected = f64::from(scale) * (64.0f64 / 127.0).powi(2);
            assert!((f64::from(value) / expected - 1.0).abs() < 1e-6, "{value:e}, {expected:e}");
        }
        // Of all sizes, subnormal ones included, which become zeros.
        for exponent in -149..127 {
            let values = (0..300).map(|_| (normal(&mut random) / 8.0) * 2f32.powi(exponent));
            assert_kept(&coded(&values.collect::<Vec<_>>(), 300), format_args!("2^{exponent}"));
        }
        let tiny = coded(&[f32::MIN_POSITIVE, -1e-45, 0.0, -0.0], 2);
        assert_eq!(bits(&tiny), (vec![0; 4], vec![0; 2]));
        assert_eq!(decoded(&tiny), [0.0; 4]);
    }

    #[test]
    fn errors_are_those_of_the_documentation() {
        if !has_codes() {
            return;
        }
        let mut random = StdRng::seed_from_u64(2);
        let normals: Vec<f32> = (0..1 << 18).map(|_| normal(&mut random)).collect();
        // Student's t with 3 degrees of freedom.
        let students = normals.iter().map(|x| {
            let squares: f32 = (0..3).map(|_| normal(&mut random).powi(2)).sum();
            x / (squares / 3.0).sqrt()
        });
        let students: Vec<f32> = students.collect();
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        for (values, expected) in [(normals, 0.0067), (students, 0.0080)] {
            let decoded = decoded(&coded(&values, 1 << 16));
            let each = values.iter().zip(&decoded);
            let error = norm(&mut each.map(|(x, y)| f64::from(x - y)));
            let error = error / norm(&mut values.iter().map(|x| f64::from(*x)));
            println!("{error:.5} of the norm, {expected} in the documentation");
            assert!((error / expected - 1.0).abs() < 0.05, "{error}, not {expected}");
        }
    }

    #[test]
    fn a_matrix_has_the_same_codes_in_every_batch() {
        if !has_codes() {
            return;
        }
        let mut random = StdRng::seed_from_u64(3);
        for matrix in [1, 127, 128, 129, 300, 512] {
            let values: Vec<f32> = (0..5 * matrix).map(|_| normal(&mut random)).collect();
            let batch = coded(&values, matrix);
            let each = values.chunks(matrix).map(|values| bits(&coded(values, matrix)));
            let (codes, scales): (Vec<_>, Vec<_>) = each.unzip();
            assert_eq!(bits(&batch), (codes.concat(), scales.concat()), "{matrix}");
            let each = values.chunks(matrix).flat_map(|values| decoded(&coded(values, matrix)));
            assert_eq!(decoded(&batch), each.collect::<Vec<_>>(), "{matrix}");
            for (values, decoded) in values.chunks(matrix).zip(decoded(&batch).chunks(matrix)) {
                for (values, decoded) in values.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                    let largest = values.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
                    let close = |(x, y): (&f32, &f32)| (x - y).abs() <= 0.008 * largest;
                    assert!(values.iter().zip(decoded).all(close), "{matrix}");
                }
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_make_their_block_nan() {
        if !has_codes() {
            return;
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 3 * 200];
            values[200 + 128] = bad;
            let blocks = coded(&values, 200);
            let is_nan = |index: usize| (200 + 128..400).contains(&index);
            for (index, x) in decoded(&blocks).into_iter().enumerate() {
                assert!(if is_nan(index) { x.is_nan() } else { x == 0.5 }, "{bad}, {index}: {x}");
            }
            let again = Blocks8::new(blocks.clone().into_values(), 200);
            assert_eq!(bits(&again).0, bits(&blocks).0);
            assert!(decoded(&again)[200 + 128].is_nan());
        }
    }

    #[test]
    fn values_decrease_below_the_largest_decay() {
        if !has_codes() {
            return;
        }
        let code = |decay: f64| bits(&coded(&[1.0, decay as f32], 2)).0;
        assert_eq!(code(LARGEST_DECAY - 1e-5), [127, 126]);
        assert_eq!(code(LARGEST_DECAY + 1e-5), [127, 127]);
        assert!((0.992..0.993).contains(&LARGEST_DECAY));
    }

    #[test]
    fn bytes_are_those_of_codes_and_scales() {
        for (matrices, matrix, expected) in [(3, 256, 3 * 264), (3, 200, 3 * 208), (0, 200, 0)] {
            assert_eq!(bytes(matrices * matrix, matrix), expected);
            if has_codes() {
                let zeros = Blocks8::zeros(matrices * matrix, matrix, &Device::default());
                assert_eq!(zeros.bytes(), expected);
                assert_eq!(coded(&vec![1.0; matrices * matrix], matrix).bytes(), expected);
                assert_eq!(decoded(&zeros), vec![0.0; matrices * matrix]);
            }
        }
        // The state of another rank's matrix.
        assert_eq!(bytes(0, 0), 0);
    }
}
