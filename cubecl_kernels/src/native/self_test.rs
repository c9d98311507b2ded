//! Products of integers, which a device has to compute exactly before its kernels are used.

use std::time::{Duration, Instant};

use super::Refusal;
use super::engine::Native;
use super::memory::Memory;
use super::order::DriverError;
use super::product::{Element, Launch, Layout, PlusIdentity, Product};

/// A product whose result is known.
struct Case {
    layout: Layout,
    sizes: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    lower: bool,
    /// Cuts tiles as for this number of multiprocessors, instead of that of the device.
    multiprocessors: Option<usize>,
}

/// The failure of a case.
pub(super) enum Fault {
    /// A wrong result.
    Wrong(Refusal),
    /// An error of the driver, or no result in time: the device may be at work.
    Stuck(Refusal),
}

/// An error of the driver, as a fault.
fn stuck(error: DriverError) -> Fault {
    Fault::Stuck(Refusal::new("verify the kernels", error))
}

const BATCH: usize = 2;

/// Every kernel, with sizes that fill no tile and more slices than stages. Sums are exact in
/// float32, and rounded once.
const CASES: [Case; 11] = [
    case(Layout::RowsColumns, [200, 200, 264], 1.0, None, true),
    case(Layout::RowsColumns, [136, 136, 72], 2.0, Some(-1.0), true),
    // Their tiles are cut along the inner dimension: all of them, and one of six.
    case(Layout::RowsColumns, [136, 136, 1032], 1.0, Some(1.0), true),
    Case {
        multiprocessors: Some(5),
        ..case(Layout::RowsColumns, [136, 136, 1032], 1.0, Some(1.0), true)
    },
    case(Layout::ColumnsRows, [264, 264, 520], 1.0, None, true),
    case(Layout::RowsRows, [136, 264, 520], 1.0, Some(2.0), false),
    case(Layout::ColumnsRows, [264, 264, 328], 1.0, None, true),
    case(Layout::RowsColumns, [136, 72, 200], 1.0, None, false),
    case(Layout::RowsColumns, [136, 72, 200], 1.0, Some(3.0), false),
    case(Layout::RowsRows, [136, 264, 72], 1.0, None, false),
    case(Layout::RowsRows, [136, 264, 72], 1.0, Some(2.0), false),
];

const fn case(
    layout: Layout,
    sizes: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    lower: bool,
) -> Case {
    Case { layout, sizes, alpha, beta, lower, multiprocessors: None }
}

/// A device that does not finish a product within this time never will.
const DEADLINE: Duration = Duration::from_secs(20);

/// Fails unless the device computes all cases exactly.
pub(super) fn verify(native: &Native) -> Result<(), Fault> {
    CASES.iter().try_for_each(|case| case.verify(native))?;
    Element::ALL.into_iter().try_for_each(|element| verify_identity(native, element))
}

/// Fails unless the device computes the cases of full products exactly.
pub(super) fn verify_full_products(native: &Native) -> Result<(), Fault> {
    CASES.iter().filter(|case| !case.lower).try_for_each(|case| case.verify(native))
}

/// One of -1, 0 and 1, most often 0.
fn small(seed: usize) -> i32 {
    let mixed = (seed as u32).wrapping_mul(0x9e37_79b1) >> 13;
    [-1, 0, 0, 1, 0][mixed as usize % 5]
}

/// A batch of matrices of integers, in rows.
struct Integers {
    sizes: [usize; 2],
    values: Vec<i32>,
}

impl Integers {
    fn new(
        sizes @ [rows, columns]: [usize; 2],
        entry: impl Fn(usize, usize, usize) -> i32,
    ) -> Self {
        let of_matrix = |z| (0..rows * columns).map(move |at| (z, at / columns, at % columns));
        let values = (0..BATCH).flat_map(of_matrix).map(|(z, i, j)| entry(z, i, j)).collect();
        Self { sizes, values }
    }

    fn at(&self, z: usize, row: usize, column: usize) -> i32 {
        let [rows, columns] = self.sizes;
        self.values[(z * rows + row) * columns + column]
    }

    fn transposed(&self) -> Self {
        let [rows, columns] = self.sizes;
        Self::new([columns, rows], |z, row, column| self.at(z, column, row))
    }

    /// The values as they lie in memory, in rows or in columns.
    fn bits(&self, element: Element, in_rows: bool) -> Vec<u16> {
        if !in_rows {
            return self.transposed().bits(element, true);
        }
        self.values.iter().map(|value| element.bits(*value as f32)).collect()
    }
}

impl Case {
    /// `A`, `B` and `D`. For a symmetric result, `B` is the transpose of `A`.
    fn matrices(&self) -> [Integers; 3] {
        let [m, n, k] = self.sizes;
        let of = |matrix: usize| {
            move |z: usize, row: usize, column: usize| {
                small(((matrix * BATCH + z) * 1000 + row) * 1000 + column)
            }
        };
        let (a, d) = (Integers::new([m, k], of(0)), of(2));
        let b = if self.lower { a.transposed() } else { Integers::new([k, n], of(1)) };
        let d = Integers::new([m, n], |z, row, column| match self.lower {
            true => d(z, row.min(column), row.max(column)),
            false => d(z, row, column),
        });
        [a, b, d]
    }

    fn expected(&self, [a, b, d]: &[Integers; 3]) -> Vec<f32> {
        let [m, n, k] = self.sizes;
        let of_columns = b.transposed();
        let line = |z: usize, line: usize, lines: usize| {
            let first = (z * lines + line) * k;
            first..first + k
        };
        let mut expected = Vec::with_capacity(BATCH * m * n);
        for z in 0..BATCH {
            for row in 0..m {
                let row_of_a = &a.values[line(z, row, m)];
                for column in 0..n {
                    let column_of_b = &of_columns.values[line(z, column, n)];
                    let sum: i32 = row_of_a.iter().zip(column_of_b).map(|(a, b)| a * b).sum();
                    let added = self.beta.map_or(0.0, |beta| beta * d.at(z, row, column) as f32);
                    expected.push(self.alpha * sum as f32 + added);
                }
            }
        }
        expected
    }

    fn verify(&self, native: &Native) -> Result<(), Fault> {
        let matrices = self.matrices();
        let expected = self.expected(&matrices);
        let [m, n, _] = self.sizes;
        let [a_in_rows, b_in_columns] = self.layout.inner_is_contiguous();
        for element in Element::ALL {
            let [a, b, d] = &matrices;
            let memory = |values: Vec<u16>| on_device(native, &values);
            let a = memory(a.bits(element, a_in_rows))?;
            let b = memory(b.bits(element, !b_in_columns))?;
            let d = memory(d.bits(element, true))?;
            let c = memory(vec![u16::MAX; BATCH * m * n])?;
            let product = Launch::Product(Product {
                layout: self.layout,
                batch: BATCH,
                sizes: self.sizes,
                a: a.address(),
                b: b.address(),
                alpha: self.alpha,
                addend: self.beta.map(|beta| (d.address(), beta)),
                c: c.address(),
                lower: self.lower,
            });
            let result =
                computed(native, (element, self.multiprocessors), product, c, vec![a, b, d])?;
            if result.into_iter().ne(expected.iter().map(|value| element.bits(*value))) {
                let layout = self.layout;
                return Err(Fault::Wrong(Refusal(format!(
                    "the device multiplies integers wrongly in {element:?}, {layout:?}"
                ))));
            }
        }
        Ok(())
    }
}

fn verify_identity(native: &Native, element: Element) -> Result<(), Fault> {
    const ROWS: usize = 72;
    let z = Integers::new([ROWS; 2], |z, row, column| small((z * ROWS + row) * ROWS + column));
    let expected = Integers::new([ROWS; 2], |matrix, row, column| {
        z.at(matrix, row, column) + i32::from(row == column)
    });
    let z = on_device(native, &z.bits(element, true))?;
    let sum = on_device(native, &vec![u16::MAX; BATCH * ROWS * ROWS])?;
    let (batch, rows) = (BATCH, ROWS);
    let launch = PlusIdentity { batch, rows, z: z.address(), sum: sum.address() };
    let result = computed(native, (element, None), Launch::PlusIdentity(launch), sum, vec![z])?;
    if result != expected.bits(element, true) {
        let reason = format!("the device adds the identity wrongly in {element:?}");
        return Err(Fault::Wrong(Refusal(reason)));
    }
    Ok(())
}

fn on_device(native: &Native, values: &[u16]) -> Result<Memory, Fault> {
    native.stream().make_current().map_err(stuck)?;
    Memory::of(native.stream(), values).map_err(stuck)
}

/// The result of a launch.
fn computed(
    native: &Native,
    (element, multiprocessors): (Element, Option<usize>),
    launch: Launch,
    result: Memory,
    operands: Vec<Memory>,
) -> Result<Vec<u16>, Fault> {
    let prepared = match multiprocessors {
        Some(multiprocessors) => native.prepare_for(element, &[launch], multiprocessors),
        None => native.prepare(element, &[launch]),
    };
    let prepared = prepared.map_err(Fault::Wrong)?;
    let run = || {
        // SAFETY: the memory lives until the stream has done its work: it is not freed after a
        // failure.
        unsafe { native.queue(&prepared) }.map_err(Fault::Stuck)?;
        let done = native.stream().record().map_err(stuck)?;
        let start = Instant::now();
        while !done.is_passed().map_err(stuck)? {
            if start.elapsed() > DEADLINE {
                let reason = format!("a product takes longer than {DEADLINE:?}");
                return Err(Fault::Stuck(Refusal(reason)));
            }
            std::thread::yield_now();
        }
        result.read().map_err(stuck)
    };
    let computed = run();
    if computed.is_err() {
        // Freeing would wait for the device.
        std::mem::forget((result, operands));
    }
    computed
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn expected_results_are_exact_and_not_trivial() {
        for case in &CASES {
            let values = case.expected(&case.matrices());
            assert!(values.iter().all(|value| value.abs() < 1024.0));
            let different: BTreeSet<_> = values.iter().map(|value| value.to_bits()).collect();
            assert!(different.len() > 20, "{} values", different.len());
            let [m, n, _] = case.sizes;
            if case.lower {
                assert!((0..m).all(|i| (0..i).all(|j| values[i * n + j] == values[j * n + i])));
            }
        }
    }
}
