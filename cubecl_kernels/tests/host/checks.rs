//! Checks of the host's side of the native kernels, in a process on the stand-in for CUDA's driver.

use cudarc::driver::{result, sys};
use half::{bf16, f16};

use crate::driver::StandIn;
use crate::native::{
    Element, Launch, Layout, Native, PlusIdentity, Product, Ready, SideStream, Work,
};

/// Runs all checks.
pub fn run() {
    let stand_in = StandIn::loaded();
    for element in Element::ALL {
        let native = Native::of(0, element).expect("the stand-in multiplies exactly");
        let description = native.to_string();
        let all = "tiles of 128 x 128, 256 x 128, 128 x 256, 256 x 256;";
        assert!(description.contains(all), "{description}");
        // Sizes that fill no tile, and both sides.
        for shape in [[1, 72, 136], [2, 136, 72], [3, 264, 200], [2, 200, 264], [1, 136, 136]] {
            let case = Case { element, shape };
            case.runs_exactly(native);
            case.replays_exactly(native, &stand_in);
            case.runs_in_order(native, &stand_in);
        }
    }
    idle_copies_are_only_counted(&stand_in);
}

/// Copies within the device, on a driver that is idle: what is uploaded arrives all the same.
fn idle_copies_are_only_counted(stand_in: &StandIn) {
    let stream = SideStream::new(0).expect("the device has streams");
    let copy = |from: &Memory, to: &Memory| {
        let before = stand_in.copied();
        // SAFETY: both have these bytes.
        unsafe { result::memcpy_dtod_async(to.0, from.0, 6, stream.as_ptr().cast()) }
            .expect("a copy");
        assert_eq!(stand_in.copied() - before, 6);
    };
    stand_in.idle(true);
    let [from, to] = [5, 0].map(|value| Memory::of(&[value; 3]));
    copy(&from, &to);
    stand_in.idle(false);
    assert_eq!([from.read(3), to.read(3)], [vec![5; 3], vec![0; 3]]);
    copy(&from, &to);
    assert_eq!(to.read(3), vec![5; 3]);
}

/// Kernels that wait for ever are left out, and the others are used.
pub fn run_with_stalled_kernels() {
    let stand_in = StandIn::loaded();
    stand_in.stall("product_256");
    let native = Native::of(0, Element::Bf16).expect("narrow tiles do not wait");
    let description = native.to_string();
    assert!(description.contains("tiles of 128 x 128, 256 x 128 (no others"), "{description}");
    let case = Case { element: Element::Bf16, shape: [2, 136, 264] };
    case.runs_exactly(native);
}

/// An iteration of a batch of integers in a type: `(Z + I) X + 2 X` with `Z = R^2 / 16 - R` for
/// `R = X X^T`, or `R = X^T X` from the right.
struct Case {
    element: Element,
    /// Matrices, rows and columns.
    shape: [usize; 3],
}

impl Case {
    fn symmetric_rows(&self) -> usize {
        let [_, m, n] = self.shape;
        m.min(n)
    }

    /// Elements of the buffers of `X`, `R`, `Z`, `Z + I` and the result.
    fn elements(&self) -> [usize; 5] {
        let ([batch, m, n], rows) = (self.shape, self.symmetric_rows());
        let [wide, symmetric] = [batch * m * n, batch * rows * rows];
        [wide, symmetric, symmetric, symmetric, wide]
    }

    fn launches(&self, addresses: &[u64]) -> Vec<Launch> {
        let (&[x, r, z, q, result], [batch, m, n]) = (addresses, self.shape) else {
            panic!("{} buffers", addresses.len());
        };
        let (rows, is_wide) = (self.symmetric_rows(), m <= n);
        let square = if is_wide { Layout::RowsColumns } else { Layout::ColumnsRows };
        let symmetric = |layout, inner, factor, alpha, addend, c| {
            let sizes = [rows, rows, inner];
            let [a, b] = [factor; 2];
            Launch::Product(Product { layout, batch, sizes, a, b, alpha, addend, c, lower: true })
        };
        let (layout, [a, b]) = match is_wide {
            true => (Layout::RowsRows, [q, x]),
            false => (Layout::RowsColumns, [x, q]),
        };
        let (sizes, addend) = ([m, n, rows], Some((x, 2.0)));
        vec![
            symmetric(square, m.max(n), x, 1.0, None, r),
            symmetric(Layout::RowsColumns, rows, r, 0.0625, Some((r, -1.0)), z),
            Launch::PlusIdentity(PlusIdentity { batch, rows, z, factor: 1.0, sum: q }),
            Launch::Product(Product {
                layout,
                batch,
                sizes,
                a,
                b,
                alpha: 1.0,
                addend,
                c: result,
                lower: false,
            }),
        ]
    }

    /// One of -1, 0 and 1, most often 0, for every entry.
    fn input(&self, seed: usize) -> Vec<f32> {
        let entry = |at: usize| {
            let mixed = ((at + seed * 77_777) as u32).wrapping_mul(0x9e37_79b1);
            let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b) >> 13;
            [-1.0, 0.0, 0.0, 1.0, 0.0][mixed as usize % 5]
        };
        (0..self.elements()[0]).map(entry).collect()
    }

    /// The result, with sums that are exact in float32 and rounded once.
    fn expected(&self, x: &[f32]) -> Vec<u16> {
        let [batch, m, n] = self.shape;
        let rounded = |value: f32| self.widened(self.bits(value));
        let (rows, inner, is_wide) = (self.symmetric_rows(), m.max(n), m <= n);
        let matrices = x.chunks(m * n).map(|x| {
            let x_at = |i: usize, j: usize| if is_wide { x[i * n + j] } else { x[j * n + i] };
            let symmetric = |entry: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
                (0..rows * rows).map(|at| rounded(entry(at / rows, at % rows))).collect()
            };
            let r = symmetric(&|i, j| (0..inner).map(|l| x_at(i, l) * x_at(j, l)).sum());
            let r_at = |i: usize, j: usize| r[i * rows + j];
            let z = symmetric(&|i, j| {
                let square: f32 = (0..rows).map(|l| r_at(i, l) * r_at(l, j)).sum();
                0.0625 * square - r_at(i, j)
            });
            let q = symmetric(&|i, j| z[i * rows + j] + if i == j { 1.0 } else { 0.0 });
            let result = |at: usize| {
                let (i, j) = if is_wide { (at / n, at % n) } else { (at % n, at / n) };
                let applied: f32 = (0..rows).map(|l| q[i * rows + l] * x_at(l, j)).sum();
                self.bits(applied + 2.0 * x_at(i, j))
            };
            (0..m * n).map(result).collect::<Vec<u16>>()
        });
        let expected = matrices.collect::<Vec<_>>().concat();
        assert_eq!(expected.len(), batch * m * n);
        assert!(expected.iter().all(|bits| self.widened(*bits).is_finite()), "nothing overflows");
        expected
    }

    fn bits(&self, value: f32) -> u16 {
        match self.element {
            Element::F16 => f16::from_f32(value).to_bits(),
            Element::Bf16 => bf16::from_f32(value).to_bits(),
        }
    }

    fn widened(&self, bits: u16) -> f32 {
        match self.element {
            Element::F16 => f16::from_bits(bits).to_f32(),
            Element::Bf16 => bf16::from_bits(bits).to_f32(),
        }
    }

    /// Calls `test` with the iteration as work.
    fn with_work(&self, test: impl FnOnce(&Work<'_>)) {
        let bytes = self.elements().map(|elements| elements * size_of::<u16>());
        let launches = |addresses: &[u64]| self.launches(addresses);
        test(&Work { bytes: &bytes, launches: &launches, result: 4 });
    }

    fn uploaded(&self, x: &[f32]) -> Memory {
        Memory::of(&x.iter().map(|x| self.bits(*x)).collect::<Vec<_>>())
    }

    fn runs_exactly(&self, native: &Native) {
        let x = self.input(1);
        let mut memory = vec![self.uploaded(&x)];
        memory.extend(self.elements()[1..].iter().map(|elements| Memory::new(*elements)));
        let addresses: Vec<u64> = memory.iter().map(|memory| memory.0).collect();
        // SAFETY: the buffers have the elements of the iteration.
        self.with_work(|work| unsafe {
            native.run(Ready::Context, work, &addresses).expect("an iteration runs");
        });
        self.assert_result(&memory[4], &x);
    }

    /// A recording of the same launches, used with two inputs.
    fn replays_exactly(&self, native: &Native, stand_in: &StandIn) {
        let key = self.shape.map(|size| size as u64);
        for seed in [1, 2] {
            let x = self.input(seed);
            let (from, to) = (self.uploaded(&x), Memory::new(x.len()));
            let before = stand_in.launches("product");
            self.with_work(|work| {
                let (ready, addresses) = (Ready::Context, [from.0, to.0]);
                // SAFETY: both have the elements of the input.
                let replayed = unsafe { native.replay(ready, &key, work, addresses) };
                replayed.expect("a recording runs").expect("an iteration is recorded");
            });
            self.assert_result(&to, &x);
            // Once before the recording, in which nothing runs.
            let launched = if seed == 1 { 6 } else { 3 };
            assert_eq!(stand_in.launches("product") - before, launched);
        }
    }

    /// Other streams of the context write the input before, and read the result and overwrite the
    /// input afterwards; what runs first is chosen at random.
    fn runs_in_order(&self, native: &Native, stand_in: &StandIn) {
        let x = self.input(3);
        let input = self.uploaded(&x);
        let bytes = x.len() * size_of::<u16>();
        let others = [(); 2].map(|()| SideStream::new(0).expect("the device has streams"));
        let copy = |stream: &SideStream, to: &Memory, from: &Memory| {
            let stream = stream.as_ptr().cast();
            // SAFETY: both have these bytes.
            unsafe { result::memcpy_dtod_async(to.0, from.0, bytes, stream) }.expect("a copy");
        };
        for seed in 0..3 {
            let memory = self.elements().map(Memory::new);
            let addresses = memory.each_ref().map(|memory| memory.0);
            let result = Memory::new(x.len());
            stand_in.hold(true);
            copy(&others[0], &memory[0], &input);
            // SAFETY: the buffers have the elements of the iteration.
            self.with_work(|work| unsafe {
                native.run(Ready::Context, work, &addresses).expect("an iteration runs");
            });
            copy(&others[1], &result, &memory[4]);
            for memory in &memory {
                memory.poison(&others[1]);
            }
            memory[0].poison(&others[0]);
            let mut steps = seed;
            while stand_in.step(steps) {
                steps += 3;
            }
            stand_in.hold(false);
            self.assert_result(&result, &x);
        }
    }

    fn assert_result(&self, memory: &Memory, x: &[f32]) {
        let Self { element, shape } = self;
        let (result, expected) = (memory.read(x.len()), self.expected(x));
        let wrong = (0..x.len()).find(|at| result[*at] != expected[*at]);
        if let Some(at) = wrong {
            let [got, expected] = [result[at], expected[at]].map(|bits| self.widened(bits));
            panic!("{element:?} {shape:?}, element {at}: {got}, not {expected}");
        }
    }
}

/// Memory of the device.
struct Memory(sys::CUdeviceptr);

impl Memory {
    fn new(elements: usize) -> Self {
        let bytes = elements * size_of::<u16>();
        // SAFETY: there are some bytes, which are written before they are read.
        Self(unsafe { result::malloc_sync(bytes) }.expect("the device has memory"))
    }

    fn of(values: &[u16]) -> Self {
        let memory = Self::new(values.len());
        // SAFETY: it has these elements.
        unsafe { result::memcpy_htod_sync(memory.0, values) }.expect("a copy");
        memory
    }

    /// Writes NaN to the first elements, as later work of a stream.
    fn poison(&self, stream: &SideStream) {
        // SAFETY: it has at least one element.
        unsafe { result::memset_d8_async(self.0, 0xff, 2, stream.as_ptr().cast()) }.expect("a set");
    }

    fn read(&self, elements: usize) -> Vec<u16> {
        let mut values = vec![0; elements];
        // SAFETY: it has these elements.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.0) }.expect("a copy");
        values
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated here, and nothing uses it any more.
        unsafe { result::free_sync(self.0) }.ok();
    }
}
