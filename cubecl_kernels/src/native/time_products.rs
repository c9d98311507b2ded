//! The times of single products, by which the estimates of [`Grid`] can be judged.

use std::time::{Duration, Instant};

use super::Refusal;
use super::engine::{Native, Queued};
use super::launches::{Element, Launch, Layout, Product};
use super::memory::Memory;
use super::tile_choice::Grid;

/// The measured time of a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The tiles of the kernel and their distribution, or the library.
    pub kernel: String,
    /// The least average of several rows of products.
    pub seconds: f64,
}

/// The time of a row of products, next to which that of a synchronisation is small.
const ROW: Duration = Duration::from_millis(3);

/// The most products of a row.
const MAX_LENGTH: usize = 1000;

/// Rows of each kernel, in turn with those of the others.
const ROWS: usize = 5;

impl Native {
    /// Measures products of random matrices: with tiles of every shape, and by cuBLASLt if all of
    /// the result is computed. Of a result of which only the `lower` triangle is, both factors are
    /// the same matrix, so that it is symmetric. In a row of products, launches overlap as in an
    /// iteration.
    ///
    /// # Errors
    ///
    /// Fails if memory is missing or a launch fails.
    pub fn measure(
        &self,
        layout: Layout,
        batch: usize,
        sizes @ [m, n, k]: [usize; 3],
        lower: bool,
    ) -> Result<Vec<Measured>, Refusal> {
        let _stream = self.stream_alone();
        let failed = |error| Refusal::new("measure a product", error);
        self.stream().make_current().map_err(failed)?;
        let memory = |elements| {
            Memory::of(self.stream(), &random(self.element(), batch * elements)).map_err(failed)
        };
        let (left, result) = (memory(m * k)?, memory(m * n)?);
        let right = if lower { None } else { Some(memory(k * n)?) };
        let product = Product {
            layout,
            batch,
            sizes,
            a: left.address(),
            b: right.as_ref().unwrap_or(&left).address(),
            alpha: 1.0,
            addend: None,
            c: result.address(),
            lower,
        };

        let mut rows = Vec::new();
        for shape in self.shapes() {
            let all = self.multiprocessors();
            let launches: Vec<Product> = product.launches(all).collect();
            let kernel = Grid::fastest(&launches[0], &[*shape], all).to_string();
            let prepare = |product| self.prepare_kernel(&Launch::Product(product), &[*shape], None);
            let queued = launches.into_iter().map(prepare).collect::<Result<_, _>>()?;
            rows.push(Row::new(self, kernel, queued)?);
        }
        if let Some(queued) = self.prepare_for_library(&product) {
            rows.push(Row::new(self, "cuBLASLt".to_owned(), vec![queued])?);
        }
        for _ in 0..ROWS {
            for row in &mut rows {
                // Kernels take turns, so that a change of the clock rate reaches all of them.
                row.least = row.least.min(seconds(self, &row.queued, row.length)?);
            }
        }
        let measured =
            rows.into_iter().map(|row| Measured { kernel: row.kernel, seconds: row.least });
        Ok(measured.collect())
    }
}

/// A product that is launched several times in a row.
struct Row<'a> {
    kernel: String,
    queued: Vec<Queued<'a>>,
    length: usize,
    /// The least average time that was measured, in seconds.
    least: f64,
}

impl<'a> Row<'a> {
    /// A row that takes about [`ROW`].
    fn new(native: &Native, kernel: String, queued: Vec<Queued<'a>>) -> Result<Self, Refusal> {
        // The driver loads a kernel at its first launch.
        seconds(native, &queued, 1)?;
        let one = seconds(native, &queued, 10)?;
        let length = ((ROW.as_secs_f64() / one) as usize).clamp(1, MAX_LENGTH);
        Ok(Self { kernel, queued, length, least: f64::INFINITY })
    }
}

/// The average time of a number of products, of which the stream has no others.
fn seconds(native: &Native, queued: &[Queued<'_>], count: usize) -> Result<f64, Refusal> {
    let failed = |error| Refusal::new("measure a product", error);
    native.stream().synchronize().map_err(failed)?;
    let start = Instant::now();
    // SAFETY: the memory of the product is freed after it was waited for, also after a failure:
    // freeing waits for the device.
    unsafe { native.queue(std::iter::repeat_n(queued, count).flatten()) }?;
    native.stream().synchronize().map_err(failed)?;
    Ok(start.elapsed().as_secs_f64() / count as f64)
}

/// Numbers from -1 to 1 (xorshift). A device may multiply zeros at a higher clock rate.
pub(super) fn random(element: Element, count: usize) -> Vec<u16> {
    const DIFFERENT: usize = 1 << 16;
    let mut state = 1u32;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        element.bits((f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0) as f32)
    };
    let numbers: Vec<u16> = std::iter::repeat_with(next).take(DIFFERENT.min(count)).collect();
    numbers.into_iter().cycle().take(count).collect()
}
