//! The iteration on Burn's Flex backend: a program runs on one matrix after another, so that all
//! that it reads and writes stays in the cache.
//!
//! An operation on a whole batch would allocate a tensor for every product, which takes as long as
//! a product of small matrices, or a tenth of a product of large ones.

use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use burn::tensor::{DType, bf16, f16};
use faer::{Accum, MatRef};
use rayon::prelude::*;

use super::products::{Factors, PIECE, THREADS_FROM, product, symmetric_product};
use crate::backend::portable;
use crate::backend::program::{PreparedProgram, Program, Rescaling, Side, Step};

/// Memory of the matrices that are iterated side by side, in bytes: what stays in the cache of a
/// processor between the products.
const CACHED: usize = 8 << 20;

/// Parts into which a thread's share of a batch is cut, so that another thread can take one over.
const PARTS_PER_THREAD: usize = 4;

/// Runs a program on every matrix of a batch, `shape` each, in place. Results of steps are rounded
/// to `dtype`.
pub fn iterate(batch: &mut [f32], program: &PreparedProgram, shape: [usize; 2], dtype: DType) {
    let elements = shape[0] * shape[1];
    let count = batch.len().checked_div(elements).unwrap_or(0);
    if count == 0 {
        return;
    }
    let parts = if count == 1 { 1 } else { most_parts(program, shape).min(count) };
    // Small matrices are taken together, so that a part is worth a thread.
    let least = PIECE.div_ceil(elements * shape[0].min(shape[1]));
    let of_part = count.div_ceil(parts).max(least);
    let side_by_side = count.div_ceil(of_part);
    let iteration = Iteration { program: program.program(), shape, dtype, side_by_side };
    let run = |part: &mut [f32]| {
        let mut spare = Spare::default();
        part.chunks_exact_mut(elements).for_each(|x| iteration.run(x, &mut spare));
    };
    // A thread outside of rayon's waits for the answer of one, also for a part that it could
    // iterate itself: with products on several threads, once rather than for each of them.
    match of_part >= count && elements * shape[0].min(shape[1]) < THREADS_FROM {
        true => run(batch),
        false => batch.par_chunks_mut(of_part * elements).for_each(run),
    }
}

/// The number of parts into which a batch of matrices may be cut.
fn most_parts(program: &PreparedProgram, shape: [usize; 2]) -> usize {
    let bytes = size_of::<f32>() * program.buffers().elements(shape).sum::<usize>();
    (CACHED / bytes).clamp(1, PARTS_PER_THREAD * rayon::current_num_threads())
}

/// An iteration of one of several matrices.
struct Iteration<'a> {
    program: &'a Program,
    shape: [usize; 2],
    dtype: DType,
    /// Number of matrices that are iterated at the same time.
    side_by_side: usize,
}

/// The memory of a matrix.
enum MatrixMemory<'a> {
    /// A matrix of the batch.
    Batch(&'a mut [f32]),
    Spare(Vec<f32>),
}

impl Deref for MatrixMemory<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Batch(values) => values,
            Self::Spare(values) => values,
        }
    }
}

impl DerefMut for MatrixMemory<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Batch(values) => values,
            Self::Spare(values) => values,
        }
    }
}

/// Memory that no matrix of the iteration uses at the moment. It is kept for the next one, since
/// the system clears every page of fresh memory.
#[derive(Default)]
struct Spare(Vec<Vec<f32>>);

impl Spare {
    /// Memory for a matrix, with any values. All that is kept has its size.
    fn take(&mut self, elements: usize) -> Vec<f32> {
        self.0.pop().unwrap_or_else(|| vec![0.0; elements])
    }

    /// Gives up the memory of matrices of another size, which would add to what is in use.
    fn keep(&mut self, elements: usize) {
        self.0.retain(|values| values.len() == elements);
    }
}

impl Iteration<'_> {
    /// Runs the program on a matrix, in place.
    fn run(&self, x: &mut [f32], spare: &mut Spare) {
        let ([m, n], mut of_batch) = (self.shape, None);
        let side = m.min(n);
        let result = self.program.run(Rc::new(MatrixMemory::Batch(x)), |step, operands| {
            let elements = if step.is_wide() { m * n } else { side * side };
            spare.keep(elements);
            let mut result = match of_batch.take() {
                Some(x) => MatrixMemory::Batch(x),
                None => MatrixMemory::Spare(spare.take(elements)),
            };
            self.compute(step, &operands, &mut result);
            // An operand that later steps read has a second owner.
            for operand in operands.into_iter().filter_map(Rc::into_inner) {
                match operand {
                    MatrixMemory::Batch(x) => of_batch = Some(x),
                    MatrixMemory::Spare(values) => spare.0.push(values),
                }
            }
            // No symmetric matrix has the size of the batch's memory, which would lie idle.
            Rc::new(if m == n { result } else { into_batch(result, &mut of_batch, spare) })
        });
        let result = Rc::into_inner(result).expect("no step reads the result");
        into_batch(result, &mut of_batch, spare);
    }

    /// Computes the result of a step.
    fn compute(&self, step: &Step, operands: &[Rc<MatrixMemory<'_>>], result: &mut [f32]) {
        let [m, n] = self.shape;
        let (side, square) = (Side::of(self.shape), m.min(n));
        let symmetric =
            |index: usize| MatRef::from_row_major_slice(&operands[index], square, square);
        let wide = |index: usize| MatRef::from_row_major_slice(&operands[index], m, n);
        let applied = |factor: f64, accum| {
            let [a, b] = match side {
                Side::Left => [symmetric(0), wide(1)],
                Side::Right => [wide(1), symmetric(0)],
            };
            Factors { a, b, alpha: factor as f32, accum }
        };
        match *step {
            Step::Square { .. } => {
                let a = match side {
                    Side::Left => wide(0),
                    Side::Right => wide(0).transpose(),
                };
                let factors = Factors { a, b: a.transpose(), alpha: 1.0, accum: Accum::Replace };
                symmetric_product(factors, result, self.side_by_side);
            }
            Step::Symmetric { alpha, beta, .. } => {
                // The product is added to it, so that there is one pass over the result less.
                set(result, &operands[2], |c| c * beta as f32);
                let (a, b) = (symmetric(0), symmetric(1).transpose());
                let factors = Factors { a, b, alpha: alpha as f32, accum: Accum::Add };
                symmetric_product(factors, result, self.side_by_side);
            }
            Step::Rescaled { by, .. } => {
                let by = divisors(&operands[1], square, by, self.dtype);
                divide(result, &operands[0], n, |i, j| match side {
                    Side::Left => by[i],
                    Side::Right => by[j],
                });
            }
            Step::RescaledSquare { by, .. } => {
                let by = divisors(&operands[0], square, by, self.dtype);
                divide(result, &operands[0], square, |i, j| by[i] * by[j]);
            }
            Step::PlusIdentity { factor, .. } => {
                set(result, &operands[0], |z| z * factor as f32);
                result.iter_mut().step_by(square + 1).for_each(|x| *x += 1.0);
            }
            Step::AccumulateQ { .. } => unreachable!("no matrix counts as small on a CPU"),
            Step::Apply { .. } => product(applied(1.0, Accum::Replace), result, self.side_by_side),
            Step::ApplyAndAdd { factor, a, .. } => {
                set(result, &operands[1], |x| x * a as f32);
                product(applied(factor, Accum::Add), result, self.side_by_side);
            }
        }
        match self.dtype {
            // As if the result were stored in its type, from which the next step reads it.
            DType::F16 => result.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            DType::BF16 => result.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            _ => {}
        }
    }
}

/// The matrix in the memory of the batch, if that is not in use.
fn into_batch<'a>(
    matrix: MatrixMemory<'a>,
    of_batch: &mut Option<&'a mut [f32]>,
    spare: &mut Spare,
) -> MatrixMemory<'a> {
    match (matrix, of_batch.take()) {
        (MatrixMemory::Spare(values), Some(x)) => {
            x.copy_from_slice(&values);
            spare.0.push(values);
            MatrixMemory::Batch(x)
        }
        (matrix, unused) => {
            *of_batch = unused;
            matrix
        }
    }
}

/// Sets every element from the one of another matrix.
fn set(result: &mut [f32], from: &[f32], value: impl Fn(f32) -> f32) {
    result.iter_mut().zip(from).for_each(|(result, x)| *result = value(*x));
}

/// Divides the element in row `i` and column `j` of a matrix by `by(i, j)`.
fn divide(result: &mut [f32], from: &[f32], columns: usize, by: impl Fn(usize, usize) -> f64) {
    let rows = result.chunks_exact_mut(columns).zip(from.chunks_exact(columns));
    for (i, (result, from)) in rows.enumerate() {
        let elements = result.iter_mut().zip(from).enumerate();
        elements.for_each(|(j, (result, x))| *result = x / by(i, j) as f32);
    }
}

/// The numbers by which the `m` rows of a matrix are divided, from its Gram matrix in a type, as
/// [`portable::divisors`] has them.
fn divisors(r: &[f32], m: usize, by: Rescaling, dtype: DType) -> Vec<f64> {
    match by {
        Rescaling::Schatten4 => {
            let squares = r.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            vec![squares.sqrt().max(portable::least_gram_norm(m)).sqrt(); m]
        }
        Rescaling::Aol => {
            let sum = |row: &[f32]| row.iter().map(|x| f64::from(x.abs())).sum::<f64>();
            let sums: Vec<f64> = r.chunks_exact(m).map(sum).collect();
            let size = (portable::SIZE_OF_SUM * sums.iter().sum::<f64>()).min(1.0);
            let least = portable::least_row_sum(m, dtype);
            sums.into_iter().map(|sum| ((sum + least) / size).sqrt()).collect()
        }
    }
}
