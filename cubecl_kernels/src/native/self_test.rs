//! Products of integers, which a device has to compute exactly before its kernels are used.

use cudarc::driver::{DriverError, result, sys};

use super::Refusal;
use super::engine::Native;
use super::order::SideStream;
use super::product::{Element, Launch, Layout, PlusIdentity, Product};

impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Self {
        Self::new("verify the kernels", error)
    }
}

/// A product whose result is known.
struct Case {
    layout: Layout,
    sizes: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    lower: bool,
}

const BATCH: usize = 2;

/// Every kernel, with sizes that fill no tile and more slices than stages. Sums are below 256, so
/// that they are exact in bfloat16.
const CASES: [Case; 5] = [
    case(Layout::RowsColumns, [200, 200, 264], 1.0, None, true),
    case(Layout::RowsColumns, [136, 136, 72], 2.0, Some(-1.0), true),
    case(Layout::RowsColumns, [136, 72, 200], 1.0, Some(3.0), false),
    case(Layout::RowsRows, [136, 264, 72], 1.0, Some(2.0), false),
    case(Layout::ColumnsRows, [264, 264, 328], 1.0, None, true),
];

const fn case(
    layout: Layout,
    sizes: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    lower: bool,
) -> Case {
    Case { layout, sizes, alpha, beta, lower }
}

/// Fails unless the device computes all cases exactly.
pub(super) fn verify(native: &Native) -> Result<(), Refusal> {
    for element in Element::ALL {
        for case in &CASES {
            if !case.is_exact(native, element)? {
                return Err(Refusal(format!(
                    "the device multiplies integers wrongly in {element:?}, {:?}",
                    case.layout
                )));
            }
        }
        if !identity_is_exact(native, element)? {
            return Err(Refusal(format!("the device adds the identity wrongly in {element:?}")));
        }
    }
    Ok(())
}

/// One of -1, 0 and 1, most often 0.
fn small(seed: usize) -> i32 {
    let mixed = (seed as u32).wrapping_mul(0x9e37_79b1) >> 13;
    [-1, 0, 0, 1, 0][mixed as usize % 5]
}

impl Case {
    /// An entry of the matrix `A`, `B` or `D` at a row and a column; `D` is symmetric where the
    /// result is.
    fn entry(&self, matrix: usize, z: usize, row: usize, column: usize) -> i32 {
        let [row, column] = match self.lower {
            true if matrix == 2 => [row.min(column), row.max(column)],
            // `B` is the transpose of `A`, so that the product is symmetric.
            true if matrix == 1 => return self.entry(0, z, column, row),
            _ => [row, column],
        };
        small(((matrix * BATCH + z) * 1000 + row) * 1000 + column)
    }

    /// A batch of a matrix as it lies in memory.
    fn matrix(&self, element: Element, matrix: usize) -> Vec<u16> {
        let [m, n, k] = self.sizes;
        let [a_in_rows, b_in_columns] = self.layout.inner_is_contiguous();
        let ([rows, columns], in_rows) = match matrix {
            0 => ([m, k], a_in_rows),
            1 => ([k, n], !b_in_columns),
            _ => ([m, n], true),
        };
        let of_matrix = |z: usize| {
            (0..rows * columns).map(move |at| {
                let (row, column) = match in_rows {
                    true => (at / columns, at % columns),
                    false => (at % rows, at / rows),
                };
                element.bits(self.entry(matrix, z, row, column) as f32)
            })
        };
        (0..BATCH).flat_map(of_matrix).collect()
    }

    fn expected(&self, element: Element) -> Vec<u16> {
        let [m, n, k] = self.sizes;
        let mut expected = vec![];
        for z in 0..BATCH {
            for (row, column) in (0..m * n).map(|at| (at / n, at % n)) {
                let entry = |matrix, row, column| self.entry(matrix, z, row, column);
                let sum: i32 = (0..k).map(|i| entry(0, row, i) * entry(1, i, column)).sum();
                let d = self.beta.map_or(0.0, |beta| beta * entry(2, row, column) as f32);
                expected.push(element.bits(self.alpha * sum as f32 + d));
            }
        }
        expected
    }

    fn is_exact(&self, native: &Native, element: Element) -> Result<bool, Refusal> {
        let [m, n, _] = self.sizes;
        native.stream().make_current()?;
        let memory = |values: &[u16]| Memory::of(native.stream(), values);
        let [a, b, d] = [0, 1, 2].map(|matrix| memory(&self.matrix(element, matrix)));
        let (a, b, d, c) = (a?, b?, d?, memory(&vec![u16::MAX; BATCH * m * n])?);
        let product = Launch::Product(Product {
            layout: self.layout,
            batch: BATCH,
            sizes: self.sizes,
            a: a.address,
            b: b.address,
            alpha: self.alpha,
            addend: self.beta.map(|beta| (d.address, beta)),
            c: c.address,
            lower: self.lower,
        });
        // SAFETY: the memory lives until the stream has done its work; addresses of allocations
        // are multiples of 256.
        unsafe { native.queue(element, &[product]) }?;
        native.stream().synchronize()?;
        Ok(c.read()? == self.expected(element))
    }
}

fn identity_is_exact(native: &Native, element: Element) -> Result<bool, Refusal> {
    const ROWS: usize = 72;
    let entry = |at: usize| small(at) as f32;
    let diagonal = |at: usize| f32::from(u8::from(at / ROWS % ROWS == at % ROWS));
    let count = BATCH * ROWS * ROWS;
    native.stream().make_current()?;
    let values: Vec<u16> = (0..count).map(|at| element.bits(entry(at))).collect();
    let z = Memory::of(native.stream(), &values)?;
    let sum = Memory::of(native.stream(), &vec![u16::MAX; count])?;
    let launch = PlusIdentity { batch: BATCH, rows: ROWS, z: z.address, sum: sum.address };
    // SAFETY: as in `Case::is_exact`.
    unsafe { native.queue(element, &[Launch::PlusIdentity(launch)]) }?;
    native.stream().synchronize()?;
    let expected = (0..count).map(|at| element.bits(entry(at) + diagonal(at)));
    Ok(sum.read()?.into_iter().eq(expected))
}

/// Memory of the device, freed when it is dropped.
struct Memory {
    address: sys::CUdeviceptr,
    length: usize,
}

impl Memory {
    /// The values, which are there for later work of the stream. Without a stream, a copy from
    /// memory that is not pinned may be under way when the call returns.
    fn of(stream: &SideStream, values: &[u16]) -> Result<Self, DriverError> {
        // SAFETY: there are some bytes, which the copy below fills.
        let address = unsafe { result::malloc_sync(size_of_val(values)) }?;
        let memory = Self { address, length: values.len() };
        // SAFETY: the allocation has these bytes, and the values are staged when the call returns,
        // since their memory is not pinned.
        unsafe { result::memcpy_htod_async(address, values, stream.as_ptr().cast()) }?;
        Ok(memory)
    }

    fn read(&self) -> Result<Vec<u16>, DriverError> {
        let mut values = vec![0; self.length];
        // SAFETY: the allocation has these bytes.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.address) }?;
        Ok(values)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `of`, and no work uses it any more: the stream was waited for, or
        // freeing waits for the device.
        unsafe { result::free_sync(self.address) }.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_results_are_exact_and_not_trivial() {
        for case in &CASES {
            let sums = case.expected(Element::F16);
            let values: Vec<f32> =
                sums.iter().map(|bits| half::f16::from_bits(*bits).to_f32()).collect();
            assert!(values.iter().all(|value| value.abs() < 256.0));
            let different: std::collections::BTreeSet<_> = sums.iter().collect();
            assert!(different.len() > 20, "{} values", different.len());
            let [m, n, _] = case.sizes;
            if case.lower {
                assert!((0..m).all(|i| (0..i).all(|j| sums[i * n + j] == sums[j * n + i])));
            }
        }
    }
}
