//! Whole iterations by the native kernels for Hopper.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, Once};
use std::time::Instant;

use burn::backend::{TensorMetadata, ops::FloatTensorOps, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::server::Handle;
use distmuon_kernels::native::{
    Element, Launch, Layout, Native, NotRun, PlusIdentity, Product, Refusal, Work, unless_required,
};
use distmuon_kernels::operands::{Operand, Order};

use super::Failure;
use super::tensors::{tensor, unshared};
use crate::backend::graphs;
use crate::backend::program::{PreparedProgram, Side, Step};

type Float = FloatTensor<CubeBackend>;

/// Sizes are multiples of this number of elements, 16 bytes: the copy engine takes no other
/// strides.
const MULTIPLE: usize = 8;

/// Smaller matrices have no tile with enough to do.
const MIN_ROWS: usize = 64;

/// Buffers begin at multiples of this number of bytes, as those that the driver allocates do.
const ALIGNMENT: usize = 256;

/// The most matrices of a batch: a dimension of the grid.
const MAX_BATCH: usize = 65_535;

/// The description of the kernels that iterate matrices `[k, m, n]` of a type, or the reason why
/// no native ones do.
pub(in crate::backend) fn native_kernels(
    device: &CubeDevice,
    dtype: DType,
    shape: [usize; 3],
) -> Result<String, String> {
    let (native, order) = native_for(device, dtype, shape)?;
    Ok(format!("{native}; they start {order}"))
}

/// Returns `true` if native kernels iterate such matrices.
pub(in crate::backend) fn has_native_kernels(
    device: &CubeDevice,
    dtype: DType,
    shape: [usize; 3],
) -> bool {
    native_for(device, dtype, shape).is_ok()
}

/// The native kernels for matrices `[k, m, n]` of a type, or the reason why there are none. Asked
/// for every batch, since a device that fails has none any more.
fn native_for(
    device: &CubeDevice,
    dtype: DType,
    [k, m, n]: [usize; 3],
) -> Result<(&'static Native, Order), String> {
    let (index, element) = index_and_element(device, dtype).map_err(str::to_owned)?;
    if m.min(n) < MIN_ROWS || !m.is_multiple_of(MULTIPLE) || !n.is_multiple_of(MULTIPLE) {
        return Err(format!(
            "the sizes are not multiples of {MULTIPLE} from {MIN_ROWS} on: got {m} x {n}"
        ));
    }
    if k > MAX_BATCH {
        return Err(format!("there are more than {MAX_BATCH} matrices: got {k}"));
    }
    native_in_order(index, element).map_err(|Refusal(reason)| reason)
}

/// The native kernels of a device, and their order with CubeCL's work.
fn native_in_order(index: usize, element: Element) -> Result<(&'static Native, Order), Refusal> {
    let native = Native::of(index, element)?;
    Ok((native, unless_required(Order::of_iterations(index))?))
}

/// The index of a CUDA device, and a type that its native kernels have.
fn index_and_element(device: &CubeDevice, dtype: DType) -> Result<(usize, Element), &'static str> {
    let CubeDevice::Cuda(cuda) = device else { return Err("the device is not a CUDA device") };
    match dtype {
        DType::F16 => Ok((cuda.index, Element::F16)),
        DType::BF16 => Ok((cuda.index, Element::Bf16)),
        _ => Err("the iteration is neither in float16 nor in bfloat16"),
    }
}

/// Runs a program by native kernels. Falls back to the `others` if the device refuses, while a
/// graph is recorded, or, if `tuned`, where native kernels were measured to be slower. Returns NaN
/// if a launch fails, since the launches before it may have overwritten the batch.
pub(super) fn iterate(
    x: Float,
    program: &PreparedProgram,
    tuned: bool,
    others: &dyn Fn(Float) -> Float,
) -> Float {
    // A recording can't have a part on another stream.
    if x.client.is_capturing() || tuned && !is_faster(&x, program, others) {
        return others(x);
    }
    // Programs overwrite their input when nothing reads it any more.
    let x = unshared(x);
    match try_iterate(&x, program) {
        Ok(result) => result,
        Err(refused @ NotRun::Refused(_)) => {
            report(refused);
            others(x)
        }
        Err(failed @ NotRun::Failed(_)) => {
            report(failed);
            CubeBackend::float_mul_scalar(x, f32::NAN.into())
        }
    }
}

/// Returns `true` if native kernels iterate batches like `x` in less time than `others`: measured
/// when such a batch is first met.
fn is_faster(x: &Float, program: &PreparedProgram, others: &dyn Fn(Float) -> Float) -> bool {
    type Measured = HashMap<(usize, Element, Vec<u64>), bool>;
    static MEASURED: LazyLock<Mutex<Measured>> = LazyLock::new(Mutex::default);
    let measured = || MEASURED.lock().expect("nothing panics while it holds the lock");
    let Ok((index, element)) = index_and_element(&x.device, x.dtype) else { return false };
    let shape = x.shape().dims();
    let key = (index, element, key(shape, program));
    if let Some(is_faster) = measured().get(&key).copied() {
        return is_faster;
    }
    // Both with a copy of the batch, which native kernels overwrite.
    let copy = || unshared(x.clone());
    let native = seconds(&x.client, &|| try_iterate(&copy(), program).map(drop));
    let native = match native {
        Ok(native) => native,
        // The next batch is refused for the same reason, or runs.
        Err(not_run) => {
            report(not_run);
            return false;
        }
    };
    let others = seconds(&x.client, &|| {
        drop(others(copy()));
        Ok(())
    });
    let Ok(others) = others else { return false };
    log::info!("iterations of {shape:?}: native {native} s, others {others} s");
    measured().insert(key, native < others);
    native < others
}

/// Reports an iteration that did not run: a refusal once, since each batch may be refused, and as a
/// panic if `DISTMUON_NATIVE` is `must`.
fn report(not_run: NotRun) {
    match not_run {
        NotRun::Refused(refusal) => {
            let Err(Refusal(reason)) = unless_required::<()>(Err(refusal)) else { return };
            static WARNING: Once = Once::new();
            WARNING.call_once(|| {
                log::warn!(
                    "native kernels do not iterate a batch: {reason}; CubeCL's kernels do instead"
                );
            });
        }
        NotRun::Failed(Refusal(reason)) => log::error!(
            "native kernels failed to iterate a batch: {reason}; CubeCL's kernels run from now on"
        ),
    }
}

/// The least seconds of an iteration in three runs after a first one.
fn seconds(client: &Client, run: &dyn Fn() -> Result<(), NotRun>) -> Result<f64, NotRun> {
    let wait = || {
        let waited = block_on(client.sync());
        waited.map_err(|error| Refusal(Failure::from(error).reason))
    };
    let timed = || -> Result<f64, NotRun> {
        wait()?;
        let start = Instant::now();
        run()?;
        wait()?;
        Ok(start.elapsed().as_secs_f64())
    };
    timed()?;
    let times = [timed()?, timed()?, timed()?];
    Ok(times.into_iter().fold(f64::INFINITY, f64::min))
}

/// A key of iterations that have all launches on a device in common, except for addresses.
fn key(shape: [usize; 3], program: &PreparedProgram) -> Vec<u64> {
    shape.into_iter().map(|size| size as u64).chain(program.words().iter().copied()).collect()
}

fn try_iterate(x: &Float, program: &PreparedProgram) -> Result<Float, NotRun> {
    let (index, element) =
        index_and_element(&x.device, x.dtype).map_err(|reason| Refusal(reason.to_owned()))?;
    let (native, order) = native_in_order(index, element)?;
    let shape @ [k, m, n] = x.shape().dims();
    let buffers = program.buffers();
    let bytes: Vec<usize> =
        buffers.elements([m, n]).map(|elements| k * elements * x.dtype.size()).collect();
    let launches = |addresses: &[u64]| {
        let steps = buffers.steps(program.program()).map(|(step, operands, result)| {
            let operands: Vec<u64> = operands.into_iter().map(|buffer| addresses[buffer]).collect();
            launch(step, Side::of([m, n]), shape, &operands, addresses[result])
        });
        steps.collect()
    };
    let result = buffers.result();
    let work = Work { bytes: &bytes, launches: &launches, result };
    let pin = |handle: &Handle| {
        let operand = Operand::new(&x.client, handle);
        operand.map_err(|error| Refusal(Failure::from(error).reason))
    };
    // Operands are held until the work is ordered: CubeCL reuses their memory by later work of its
    // streams.
    if k * m * n <= graphs::MOST_ELEMENTS {
        let handle = x.client.empty(bytes[0]);
        let (from, to) = (pin(&x.handle)?, pin(&handle)?);
        let ready = order.ready(&x.client)?;
        let addresses = [from.address(), to.address()];
        // SAFETY: both have the elements of the batch. The key has all that the launches depend on,
        // and they read and write the buffers that they are given.
        match unsafe { native.replay(ready, &key(shape, program), &work, addresses) }? {
            Ok(()) => return Ok(tensor(x, handle, Shape::from(shape), x.dtype)),
            Err(Refusal(reason)) => log::debug!("an iteration is not recorded: {reason}"),
        }
    }
    // Everything between input and result is in one buffer: to allocate and to pin one waits for
    // the device's thread. The result is alone in its buffer, which it keeps.
    let is_scratch = |buffer: usize| buffer != 0 && buffer != result;
    let mut starts = vec![0; bytes.len()];
    let mut scratch = 0;
    for buffer in (0..bytes.len()).filter(|buffer| is_scratch(*buffer)) {
        starts[buffer] = scratch;
        scratch += bytes[buffer].next_multiple_of(ALIGNMENT);
    }
    let of_result = if result == 0 { x.handle.clone() } else { x.client.empty(bytes[result]) };
    let between = x.client.empty(scratch.max(ALIGNMENT));
    let (from, to, between) = (pin(&x.handle)?, pin(&of_result)?, pin(&between)?);
    let addresses: Vec<u64> = (0..bytes.len())
        .map(|buffer| match buffer {
            0 => from.address(),
            buffer if buffer == result => to.address(),
            buffer => between.address() + starts[buffer] as u64,
        })
        .collect();
    let ready = order.ready(&x.client)?;
    // SAFETY: as above, with the elements of every matrix.
    unsafe { native.run(ready, &work, &addresses) }?;
    Ok(tensor(x, of_result, Shape::from(shape), x.dtype))
}

/// The launch of a step for matrices `[k, m, n]`, from the addresses of its operands and its
/// result.
fn launch(step: &Step, side: Side, [batch, m, n]: [usize; 3], operands: &[u64], c: u64) -> Launch {
    let [rows, inner] = [m.min(n), m.max(n)];
    let product = |layout, sizes, [a, b]: [u64; 2], alpha, addend| Product {
        layout,
        batch,
        sizes,
        a,
        b,
        alpha,
        addend,
        c,
        lower: false,
    };
    // A symmetric matrix is its own transpose: it is read in rows or columns alike.
    let on_side = |symmetric, x, alpha, addend| match side {
        Side::Left => product(Layout::RowsRows, [m, n, rows], [symmetric, x], alpha, addend),
        Side::Right => product(Layout::RowsColumns, [m, n, rows], [x, symmetric], alpha, addend),
    };
    let symmetric = |layout, inner, factors, alpha, addend| Product {
        lower: true,
        ..product(layout, [rows, rows, inner], factors, alpha, addend)
    };
    let product = match (step, operands) {
        (Step::Square { .. }, &[x]) => {
            let layout = match side {
                Side::Left => Layout::RowsColumns,
                Side::Right => Layout::ColumnsRows,
            };
            symmetric(layout, inner, [x, x], 1.0, None)
        }
        (Step::Symmetric { alpha, beta, .. }, &[a, b, c]) => {
            let addend = Some((c, *beta as f32));
            symmetric(Layout::RowsColumns, rows, [a, b], *alpha as f32, addend)
        }
        (Step::PlusIdentity { factor, .. }, &[z]) => {
            let factor = *factor as f32;
            return Launch::PlusIdentity(PlusIdentity { batch, rows, z, factor, sum: c });
        }
        (Step::Apply { .. }, &[q, x]) => on_side(q, x, 1.0, None),
        (Step::ApplyAndAdd { factor, a, .. }, &[z, x]) => {
            on_side(z, x, *factor as f32, Some((x, *a as f32)))
        }
        _ => unreachable!("iterations by one kernel are not native, and a step has its operands"),
    };
    Launch::Product(product)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution, FloatDType, Tensor};

    use super::*;
    use crate::backend::program::{Buffers, Program};
    use crate::backend::{ComputePath, KernelPolicy, Polynomial};
    use crate::skipped_tests::excused;

    #[test]
    fn a_device_that_refuses_iterates_by_its_other_kernels() {
        let device = Device::default();
        let path = ComputePath::choose(KernelPolicy::Auto, &device, FloatDType::F32);
        if !matches!(path, ComputePath::CubeCl { .. }) {
            excused("native kernels are refused on CubeCL's devices only");
            return;
        }
        let x = Tensor::<3>::random([2, 24, 40], Distribution::Normal(0.0, 0.1), &device);
        let mut program = Program::default();
        let r = program.push(Step::Square { x: Program::INPUT });
        program.push(Step::ApplyAndAdd { z: r, x: Program::INPUT, factor: 1.0, a: 0.5 });
        let program = program.into();
        let iterate = |native| path.iterate(x.clone(), &program, native).into_data();
        iterate(true).assert_eq(&iterate(false), true);
    }

    /// Memory of batches in float64, in which launches are carried out as the kernels do.
    struct Memory(Vec<Vec<f64>>);

    impl Memory {
        /// The entry of a matrix that lies in rows or in columns.
        fn entry(
            &self,
            address: u64,
            at: [usize; 3],
            [rows, columns]: [usize; 2],
            in_rows: bool,
        ) -> f64 {
            let [z, row, column] = at;
            let within = if in_rows { row * columns + column } else { column * rows + row };
            self.0[address as usize][z * rows * columns + within]
        }

        fn run(&mut self, launch: &Launch) {
            let (batch, [m, n], c) = match launch {
                Launch::Product(product) => {
                    (product.batch, [product.sizes[0], product.sizes[1]], product.c)
                }
                Launch::PlusIdentity(sum) => (sum.batch, [sum.rows; 2], sum.sum),
            };
            let mut result = vec![0.0; batch * m * n];
            for z in 0..batch {
                for at in 0..m * n {
                    let (mut row, mut column) = (at / n, at % n);
                    result[z * m * n + at] = match launch {
                        Launch::PlusIdentity(sum) => {
                            f64::from(sum.factor)
                                * self.entry(sum.z, [z, row, column], [m, n], true)
                                + f64::from(u8::from(row == column))
                        }
                        Launch::Product(product) => {
                            if product.lower {
                                (row, column) = (row.max(column), row.min(column));
                            }
                            let k = product.sizes[2];
                            let (a_in_rows, b_in_rows) = match product.layout {
                                Layout::RowsColumns => (true, false),
                                Layout::RowsRows => (true, true),
                                Layout::ColumnsRows => (false, true),
                            };
                            let term = |i| {
                                self.entry(product.a, [z, row, i], [m, k], a_in_rows)
                                    * self.entry(product.b, [z, i, column], [k, n], b_in_rows)
                            };
                            let sum: f64 = (0..k).map(term).sum();
                            let addend = product.addend.map_or(0.0, |(d, beta)| {
                                assert_ne!(d, c, "a result overwrites what is added");
                                f64::from(beta) * self.entry(d, [z, row, column], [m, n], true)
                            });
                            assert!(
                                product.a != c && product.b != c,
                                "a result overwrites a factor"
                            );
                            f64::from(product.alpha) * sum + addend
                        }
                    };
                }
            }
            self.0[c as usize][..result.len()].copy_from_slice(&result);
        }
    }

    /// The singular value of matrices `[k, m, n]` of rank one with unit norm, after steps of a
    /// polynomial on 1.
    #[test]
    fn launches_compute_the_program_in_its_buffers() {
        // The second is cubic, and multiplies by its Gram matrix with a factor.
        let schedule: [Polynomial; 3] = [[1.5, -0.5, 0.25], [1.5, -0.5, 0.0], [2.0, -1.25, 0.375]];
        for shape @ [k, m, n] in [[2, 3, 5], [2, 5, 3], [1, 4, 4]] {
            let side = Side::of([m, n]);
            let mut program = Program::default();
            let mut x = Program::INPUT;
            for [a, b, c] in schedule {
                let r = program.push(Step::Square { x });
                let (z, factor) = program.push_polynomial(r, [b, c]);
                x = program.push(Step::ApplyAndAdd { z, x, factor, a });
            }
            let r = program.push(Step::Square { x });
            let q = program.push(Step::PlusIdentity { z: r, factor: 0.5 });
            program.push(Step::Apply { q, x });

            // Of rank one: `x = s u v^T` with unit vectors stays so.
            let unit = |length: usize, shift: usize| {
                let raw: Vec<f64> =
                    (0..length).map(|i| ((i * 7 + shift) % 5) as f64 - 1.5).collect();
                let norm = raw.iter().map(|value| value * value).sum::<f64>().sqrt();
                raw.into_iter().map(|value| value / norm).collect::<Vec<_>>()
            };
            let matrix = |z: usize, s: f64| {
                let (u, v) = (unit(m, z), unit(n, z + 2));
                (0..m * n).map(move |at| s * u[at / n] * v[at % n]).collect::<Vec<_>>()
            };
            let of_step = |s: f64, [a, b, c]: Polynomial| a * s + b * s.powi(3) + c * s.powi(5);
            let s = schedule.into_iter().fold(0.75, of_step);
            let expected: Vec<f64> =
                (0..k).flat_map(|z| matrix(z, (1.0 + 0.5 * s * s) * s)).collect();

            let buffers = Buffers::of(&program);
            let mut memory = Memory(vec![vec![f64::NAN; k * m * n]; buffers.wide.len()]);
            memory.0[0] = (0..k).flat_map(|z| matrix(z, 0.75)).collect();
            for (step, operands, result) in buffers.steps(&program) {
                let operands: Vec<u64> = operands.into_iter().map(|buffer| buffer as u64).collect();
                memory.run(&launch(step, side, shape, &operands, result as u64));
            }
            for (got, expected) in memory.0[buffers.result()].iter().zip(&expected) {
                assert!((got - expected).abs() < 1e-12, "{shape:?}: {got}, not {expected}");
            }
        }
    }
}
