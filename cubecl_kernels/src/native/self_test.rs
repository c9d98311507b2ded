//! Products of integers, which a device has to compute exactly before its kernels are used.

use std::time::{Duration, Instant};

use super::Refusal;
use super::engine::{Native, Queued};
use super::launches::{Element, Launch, Layout, PlusIdentity, Product};
use super::memory::Memory;
use super::stream_order::DriverError;
use super::tile_choice::TileShape;
use super::time_products::random;

/// A product whose result is known.
struct Case {
    layout: Layout,
    sizes: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    lower: bool,
    /// Computes one matrix on multiprocessors for this number of clusters, instead of a batch on
    /// all of them. If it fills these, it can have cut tiles.
    places: Option<usize>,
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

/// Every layout, with sizes that fill no tile and more slices than stages. Sums are exact in
/// float32.
const CASES: [Case; 13] = [
    case(Layout::RowsColumns, [200, 200, 264], 1.0, None, true),
    case(Layout::RowsColumns, [136, 136, 72], 2.0, Some(-1.0), true),
    // Some tiles are cut along the inner dimension: which of these does so depends on the shape.
    on(2, case(Layout::RowsColumns, [264, 264, 1544], 1.0, Some(1.0), true)),
    on(3, case(Layout::ColumnsRows, [264, 264, 1544], 1.0, Some(1.0), true)),
    on(3, case(Layout::RowsColumns, [392, 392, 1544], 1.0, Some(1.0), true)),
    // A block computes several tiles.
    on(2, case(Layout::RowsRows, [264, 520, 200], 1.0, Some(1.0), false)),
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
    Case { layout, sizes, alpha, beta, lower, places: None }
}

const fn on(places: usize, case: Case) -> Case {
    Case { places: Some(places), ..case }
}

/// A device that does not finish a product within this time never will.
const DEADLINE: Duration = Duration::from_secs(20);

/// Returns the shapes of tiles with which the device computes all cases exactly, and the reason if
/// these are not all.
///
/// # Errors
///
/// Fails if there is no such shape, or if the device does not finish a case.
pub(super) fn verify(native: &Native) -> Result<(Vec<TileShape>, Option<Refusal>), Fault> {
    verify_identity(native)?;
    let mut shapes = TileShape::ALL.to_vec();
    let mut wrong = None;
    for known in CASES.iter().map(|case| KnownProduct::of(case, native.element())) {
        let mut exact = Vec::new();
        for shape in shapes {
            match known.verify(native, Some(shape)) {
                Ok(()) => exact.push(shape),
                Err(Fault::Wrong(reason)) => {
                    wrong.get_or_insert(reason);
                    // It may also have counted parts wrongly.
                    native.clear_scratch().map_err(stuck)?;
                }
                Err(stuck) => return Err(stuck),
            }
        }
        shapes = exact;
    }
    // Of the shapes that are left, the first decides the order of sums.
    let mut sums = None;
    let mut same = Vec::new();
    for shape in shapes {
        let of_shape = sums_of_tiles(native, shape)?;
        if *sums.get_or_insert_with(|| of_shape.clone()) == of_shape {
            same.push(shape);
        } else {
            let reason = format!("tiles of {shape} round sums in another way than others");
            wrong.get_or_insert(Refusal(reason));
        }
    }
    match wrong {
        Some(reason) if same.is_empty() => Err(Fault::Wrong(reason)),
        wrong => Ok((same, wrong)),
    }
}

/// Fails unless cuBLASLt computes the cases of full products exactly, and the bits of a matrix in
/// every batch.
pub(super) fn verify_library(native: &Native) -> Result<(), Fault> {
    for case in CASES.iter().filter(|case| !case.lower) {
        KnownProduct::of(case, native.element()).verify(native, None)?;
    }
    let [alone, batch] = [1, BATCH + 1].map(|batch| sums_of_library(native, batch));
    let (alone, batch) = (alone?, batch?);
    match batch.starts_with(&alone) {
        true => Ok(()),
        false => Err(Fault::Wrong(Refusal(
            "cuBLASLt rounds the sums of a matrix in another way in a batch".to_owned(),
        ))),
    }
}

/// A product of matrices that are not integers, whose bits tell the order of its sums: of a matrix
/// and its transpose if `lower`.
fn rounded(layout: Layout, batch: usize, sizes: [usize; 3], lower: bool) -> Product {
    let (a, b, c, alpha) = (0, 0, 0, 1.0);
    Product { layout, batch, sizes, a, b, alpha, addend: None, c, lower }
}

/// The bits of a symmetric product with tiles of a shape.
fn sums_of_tiles(native: &Native, shape: TileShape) -> Result<Vec<u16>, Fault> {
    let product = rounded(Layout::RowsColumns, 1, [264, 264, 1032], true);
    sums(native, product, |product| {
        let launch = Launch::Product(product);
        native.prepare_kernel(&launch, &[shape], None)
    })
}

/// The bits of a full product of a batch.
fn sums_of_library(native: &Native, batch: usize) -> Result<Vec<u16>, Fault> {
    let product = rounded(Layout::RowsRows, batch, [264, 520, 1032], false);
    sums(native, product, |product| {
        let missing = || Refusal("cuBLASLt has no algorithm for a product".to_owned());
        native.prepare_for_library(&product).ok_or_else(missing)
    })
}

/// The bits of a product of random matrices.
fn sums<'a>(
    native: &'a Native,
    product: Product,
    prepare: impl FnOnce(Product) -> Result<Queued<'a>, Refusal>,
) -> Result<Vec<u16>, Fault> {
    let Product { batch, sizes: [m, n, k], lower, .. } = product;
    let memory = |elements: usize| on_device(native, &random(native.element(), batch * elements));
    let (a, b, c) = (memory(m * k)?, memory(k * n)?, memory(m * n)?);
    let factor = if lower { &a } else { &b };
    let product = Product { a: a.address(), b: factor.address(), c: c.address(), ..product };
    let prepared = prepare(product).map_err(Fault::Wrong)?;
    computed(native, &[prepared], vec![a, b, c], 2)
}

/// One of -1, 0 and 1, most often 0.
fn small(seed: usize) -> i32 {
    let mixed = (seed as u32).wrapping_mul(0x9e37_79b1) >> 13;
    // Small and mostly zero, so that float16 holds the sums of all cases exactly.
    [-1, 0, 0, 1, 0][mixed as usize % 5]
}

/// A batch of matrices of integers, in rows.
struct Integers {
    batch: usize,
    sizes: [usize; 2],
    values: Vec<i32>,
}

impl Integers {
    fn new(
        batch: usize,
        sizes @ [rows, columns]: [usize; 2],
        entry: impl Fn(usize, usize, usize) -> i32,
    ) -> Self {
        let of_matrix = |z| (0..rows * columns).map(move |at| (z, at / columns, at % columns));
        let values = (0..batch).flat_map(of_matrix).map(|(z, i, j)| entry(z, i, j)).collect();
        Self { batch, sizes, values }
    }

    fn at(&self, z: usize, row: usize, column: usize) -> i32 {
        let [rows, columns] = self.sizes;
        self.values[(z * rows + row) * columns + column]
    }

    fn transposed(&self) -> Self {
        let [rows, columns] = self.sizes;
        Self::new(self.batch, [columns, rows], |z, row, column| self.at(z, column, row))
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
    fn batch(&self) -> usize {
        if self.places.is_some() { 1 } else { BATCH }
    }

    /// `A`, `B` and `D`. For a symmetric result, `B` is the transpose of `A`.
    fn matrices(&self) -> [Integers; 3] {
        let ([m, n, k], batch) = (self.sizes, self.batch());
        let of = |matrix: usize| {
            move |z: usize, row: usize, column: usize| {
                small(((matrix * BATCH + z) * 1000 + row) * 2000 + column)
            }
        };
        let (a, d) = (Integers::new(batch, [m, k], of(0)), of(2));
        let b = if self.lower { a.transposed() } else { Integers::new(batch, [k, n], of(1)) };
        let d = Integers::new(batch, [m, n], |z, row, column| match self.lower {
            true => d(z, row.min(column), row.max(column)),
            false => d(z, row, column),
        });
        [a, b, d]
    }

    /// A product of the case, from the addresses of `A`, `B`, `D` and `C`.
    fn product(&self, [a, b, d, c]: [u64; 4]) -> Product {
        let Self { layout, sizes, alpha, lower, .. } = *self;
        let addend = self.beta.map(|beta| (d, beta));
        Product { layout, batch: self.batch(), sizes, a, b, alpha, addend, c, lower }
    }

    /// The number of products, of which each adds the result of the one before it: a launch that
    /// does not wait for that result is found.
    fn links(&self) -> usize {
        if self.beta.is_some() { 3 } else { 1 }
    }

    /// The entries of `A B`.
    fn sums(&self, [a, b, _]: &[Integers; 3]) -> Vec<i32> {
        let [m, n, k] = self.sizes;
        let of_columns = b.transposed();
        let line = |number: usize| number * k..(number + 1) * k;
        let mut sums = Vec::with_capacity(self.batch() * m * n);
        for z in 0..self.batch() {
            for row in 0..m {
                let row_of_a = &a.values[line(z * m + row)];
                for column in 0..n {
                    let column_of_b = &of_columns.values[line(z * n + column)];
                    sums.push(row_of_a.iter().zip(column_of_b).map(|(a, b)| a * b).sum());
                }
            }
        }
        sums
    }
}

/// A case in a type of elements: `A`, `B` and `D`, and the result.
struct KnownProduct<'a> {
    case: &'a Case,
    element: Element,
    matrices: [Integers; 3],
    expected: Vec<f32>,
}

impl<'a> KnownProduct<'a> {
    fn of(case: &'a Case, element: Element) -> Self {
        let matrices = case.matrices();
        let sums = case.sums(&matrices);
        // The last result, rounded as each of the products rounds its own.
        let next = |sum: i32| {
            move |added: f32, _| {
                let added = case.beta.map_or(0.0, |beta| beta * added);
                element.rounded(case.alpha * sum as f32 + added)
            }
        };
        let last = |(sum, d): (&i32, &i32)| (0..case.links()).fold(*d as f32, next(*sum));
        let expected = sums.iter().zip(&matrices[2].values).map(last).collect();
        Self { case, element, matrices, expected }
    }

    /// Verifies the kernels with tiles of a shape, or cuBLASLt.
    fn verify(&self, native: &Native, shape: Option<TileShape>) -> Result<(), Fault> {
        let Self { case, element, .. } = *self;
        let [a, b, d] = &self.matrices;
        let [m, n, _] = case.sizes;
        let [a_in_rows, b_in_columns] = case.layout.inner_is_contiguous();
        let memory = |values: Vec<u16>| on_device(native, &values);
        let a = memory(a.bits(element, a_in_rows))?;
        let b = memory(b.bits(element, !b_in_columns))?;
        let mut chain = vec![memory(d.bits(element, true))?];
        let mut products = Vec::new();
        for link in 0..case.links() {
            // NaN in both types, so that an entry that is never stored is found.
            chain.push(memory(vec![u16::MAX; case.batch() * m * n])?);
            let [d, c] = [link, link + 1].map(|index| chain[index].address());
            products.push(case.product([a.address(), b.address(), d, c]));
        }
        let prepared: Result<Vec<_>, _> = match shape {
            Some(shape) => {
                let places = case.places.map(|places| places * shape.cluster);
                let multiprocessors = places.map(|places| places.min(native.multiprocessors()));
                let prepare = |product: &Product| {
                    let launch = Launch::Product(*product);
                    native.prepare_kernel(&launch, &[shape], multiprocessors)
                };
                products.iter().map(prepare).collect()
            }
            None => {
                let prepare = |product| native.prepare_for_library(product);
                let missing = || Refusal("cuBLASLt has no algorithm for a product".to_owned());
                products.iter().map(prepare).collect::<Option<_>>().ok_or_else(missing)
            }
        };
        chain.extend([a, b]);
        let prepared = prepared.map_err(Fault::Wrong)?;
        let result = computed(native, &prepared, chain, case.links())?;
        if result.into_iter().ne(self.expected.iter().map(|value| element.bits(*value))) {
            let kernel = shape.map_or("cuBLASLt".to_owned(), |shape| format!("tiles of {shape}"));
            let layout = case.layout;
            return Err(Fault::Wrong(Refusal(format!(
                "the device multiplies integers wrongly in {element:?}, {layout:?}, with {kernel}"
            ))));
        }
        Ok(())
    }
}

fn verify_identity(native: &Native) -> Result<(), Fault> {
    let element = native.element();
    const ROWS: usize = 72;
    const FACTORS: [f32; 8] = [1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0];
    const TIMES: usize = FACTORS.len();
    let z =
        Integers::new(BATCH, [ROWS; 2], |z, row, column| small((z * ROWS + row) * ROWS + column));
    // Two sums with the factor -1 leave a matrix as it is, and each of the four others adds one.
    let expected = Integers::new(BATCH, [ROWS; 2], |matrix, row, column| {
        z.at(matrix, row, column) + 4 * i32::from(row == column)
    });
    // NaN, which an entry that is not written keeps.
    let poison = vec![u16::MAX; BATCH * ROWS * ROWS];
    let mut memory = vec![on_device(native, &z.bits(element, true))?];
    let mut launches = Vec::new();
    for (index, factor) in FACTORS.into_iter().enumerate() {
        memory.push(on_device(native, &poison)?);
        let [z, sum] = [index, index + 1].map(|index| memory[index].address());
        launches.push(Launch::PlusIdentity(PlusIdentity {
            batch: BATCH,
            rows: ROWS,
            z,
            factor,
            sum,
        }));
    }
    let prepared = native.prepare(&launches).map_err(Fault::Wrong)?;
    let result = computed(native, &prepared, memory, TIMES)?;
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

/// Waits for all work of the stream, at most until the deadline.
fn wait_for_all(native: &Native) -> Result<(), Fault> {
    let done = native.stream().record().map_err(stuck)?;
    let start = Instant::now();
    while !done.is_passed().map_err(stuck)? {
        if start.elapsed() > DEADLINE {
            let reason = format!("a product takes longer than {DEADLINE:?}");
            return Err(Fault::Stuck(Refusal(reason)));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The result of launches, one of the pieces of memory that they read and write.
fn computed(
    native: &Native,
    launches: &[Queued<'_>],
    memory: Vec<Memory>,
    result: usize,
) -> Result<Vec<u16>, Fault> {
    // SAFETY: the memory lives until the stream has done its work: it is not freed after a failure.
    let queued = unsafe { native.queue(launches) }.map_err(Fault::Stuck);
    let done = queued.and_then(|()| wait_for_all(native));
    let computed = done.and_then(|()| memory[result].read().map_err(stuck));
    if computed.is_err() {
        // Freeing would wait for the device.
        std::mem::forget(memory);
    }
    computed
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::tile_choice::Grid;
    use super::*;

    #[test]
    fn expected_results_are_exact_and_not_trivial() {
        for case in &CASES {
            let values = KnownProduct::of(case, Element::F16).expected;
            assert!(values.iter().all(|value| value.abs() < 2048.0), "float16 rounds none");
            let different: BTreeSet<_> = values.iter().map(|value| value.to_bits()).collect();
            assert!(different.len() > 20, "{} values", different.len());
            let [m, n, _] = case.sizes;
            if case.lower {
                assert!((0..m).all(|i| (0..i).all(|j| values[i * n + j] == values[j * n + i])));
            }
        }
    }

    /// Each shape has cases with whole tiles and parts of tiles, and several of them in a cluster.
    #[test]
    fn cases_have_all_kinds_of_tasks() {
        for shape in TileShape::ALL {
            let grids = CASES.iter().map(|case| {
                let [m, n, _] = case.sizes;
                assert!(!case.lower || m == n);
                let multiprocessors = case.places.unwrap_or(66) * shape.cluster;
                Grid::fastest(&case.product([0; 4]), &[shape], multiprocessors)
            });
            let grids: Vec<_> = grids.collect();
            let any = |is: &dyn Fn(&Grid) -> bool| assert!(grids.iter().any(is), "{grids:?}");
            any(&|grid| grid.cut > 0 && grid.whole > 0);
            any(&|grid| grid.cut == 0 && grid.clusters < grid.whole);
            any(&|grid| grid.cut > 0 && grid.clusters < grid.whole + grid.slots());
        }
    }
}
