//! Products, compared with loops in float64, with every tiling that the device runs.

mod common;

use Layout::{Columns, Rows, Slice};
use common::{Real, assert_mentions, binding, client, download, excused, lacks, upload, values};
use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::std::tensor::copy_into;
use distmuon_kernels::product::{Product, Tiling, Triangle, Unit};
use distmuon_kernels::{Error, Matrices};

/// Returns an entry of a matrix of a batch, whose values are in order, row by row.
fn entry(values: &[f64], [_, m, n]: [usize; 3], [i, row, column]: [usize; 3]) -> f64 {
    values[(i * m + row) * n + column]
}

/// The layout of matrices in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// Row by row.
    Rows,
    /// Column by column.
    Columns,
    /// Rows with gaps between them, in a buffer that begins before the first row, as in a slice.
    Slice,
}

/// Uploads `[k, m, n]`.
fn matrices<F: Real>(
    client: &Client,
    values: &[f64],
    shape: [usize; 3],
    layout: Layout,
) -> Matrices {
    let [k, m, n] = shape;
    let dtype = F::elem_type_native();
    match layout {
        Rows => Matrices::contiguous(upload::<F>(client, values), dtype, shape),
        Columns => {
            let transposed = |i: usize| entry(values, shape, [i / (m * n), i % m, i / m % n]);
            let transposed: Vec<f64> = (0..k * n * m).map(transposed).collect();
            Matrices::contiguous(upload::<F>(client, &transposed), dtype, [k, n, m]).transposed()
        }
        Slice => {
            let skipped = client.properties().memory.alignment as usize / size_of::<F>();
            let gap = 4;
            let mut wide = vec![f64::NAN; skipped];
            for row in values.chunks(n) {
                wide.extend_from_slice(row);
                wide.extend(vec![f64::NAN; gap]);
            }
            let handle = upload::<F>(client, &wide);
            let handle = handle.offset_start((skipped * size_of::<F>()) as u64);
            let strides = [m * (n + gap), n + gap, 1];
            Matrices { strides, ..Matrices::contiguous(handle, dtype, shape) }
        }
    }
}

struct Case {
    /// `[k, m, inner, n]`; `n` is used by full products only.
    shape: [usize; 4],
    triangle: Triangle,
    /// The layouts of `A` and `B`.
    layouts: [Layout; 2],
    alpha: f32,
    beta: Option<f32>,
}

fn check<F: Real>(client: &Client, tiling: &Tiling, case: &Case, tolerance: f64) {
    let Case { shape: [k, m, inner, n], triangle, layouts, alpha, beta } = *case;
    let n = if triangle == Triangle::Lower { m } else { n };
    let a = values::<F>(k * m * inner, 1);
    // For a symmetric product, `B = W A^T` with powers of two `W` on a diagonal: not `A`'s
    // transpose.
    let b: Vec<f64> = match triangle {
        Triangle::Full => values::<F>(k * inner * n, 2),
        Triangle::Lower => (0..k * inner * n)
            .map(|i| {
                let weight = [1.0, 0.5, -1.0][i / n % inner % 3];
                weight * entry(&a, [k, m, inner], [i / (inner * n), i % n, i / n % inner])
            })
            .collect(),
    };
    let d = values::<F>(k * m * n, 3);
    // Of a symmetric addend, only the lower triangle is read.
    let is_read = |i: usize| triangle == Triangle::Full || i / n % m >= i % n;
    let addend: Vec<f64> = (0..d.len()).map(|i| if is_read(i) { d[i] } else { f64::NAN }).collect();
    let d = |[i, row, column]: [usize; 3]| match triangle {
        Triangle::Full => entry(&d, [k, m, n], [i, row, column]),
        Triangle::Lower => entry(&d, [k, m, n], [i, row.max(column), row.min(column)]),
    };
    let lhs = matrices::<F>(client, &a, [k, m, inner], layouts[0]);
    let rhs = matrices::<F>(client, &b, [k, inner, n], layouts[1]);
    let addend = matrices::<F>(client, &addend, [k, m, n], Rows);
    let addend = beta.map(|beta| (&addend, beta));
    let product = Product { a: &lhs, b: &rhs, alpha, addend, triangle };

    // Entries that the kernel does not write stay NaN.
    let nan = vec![f64::NAN; k * m * n];
    let result = matrices::<F>(client, &nan, [k, m, n], Rows);
    product.launch_into(client, tiling, &result).unwrap();
    let result = download::<F>(client, &result.handle);

    let description = format!(
        "{tiling}; {shape:?}, {triangle:?}, {layouts:?}, beta {beta:?}",
        shape = case.shape
    );
    for (index, actual) in result.iter().enumerate() {
        let [i, row, column] = [index / (m * n), index / n % m, index % n];
        let terms = (0..inner).map(|j| {
            entry(&a, [k, m, inner], [i, row, j]) * entry(&b, [k, inner, n], [i, j, column])
        });
        let mut sum = 0.0;
        let mut size = 0.0;
        for term in terms {
            sum += term;
            size += f64::abs(term);
        }
        let d = d([i, row, column]);
        let expected = f64::from(alpha) * sum + beta.map_or(0.0, |beta| f64::from(beta) * d);
        let scale = f64::from(alpha).abs() * size + d.abs() + 1e-3;
        let error = (actual - expected).abs() / scale;
        assert!(error <= tolerance, "{description}: entry {index}: {actual}, expected {expected}");
    }
    if triangle == Triangle::Lower {
        for index in 0..k * m * m {
            let [i, row, column] = [index / (m * m), index / m % m, index % m];
            let mirrored = result[(i * m + column) * m + row];
            let is_symmetric = result[index].to_bits() == mirrored.to_bits();
            assert!(is_symmetric, "{description}: not symmetric at {index}");
        }
    }
}

/// Sizes that tiles divide and others, odd sizes and ones; all layouts; with and without an addend.
/// The first shapes are the most common.
const CASES: [Case; 9] = [
    case([2, 128, 64, 128], Triangle::Lower, [Rows, Columns], 1.0, None),
    case([1, 130, 96, 72], Triangle::Lower, [Rows, Rows], 0.5, Some(-2.0)),
    case([3, 33, 17, 64], Triangle::Lower, [Columns, Rows], 2.0, Some(0.75)),
    case([1, 1, 1, 1], Triangle::Lower, [Rows, Columns], 1.0, None),
    case([2, 7, 13, 5], Triangle::Full, [Columns, Columns], 1.0, Some(1.5)),
    case([1, 130, 96, 72], Triangle::Full, [Rows, Rows], -1.0, None),
    case([1, 64, 160, 200], Triangle::Full, [Rows, Columns], 1.0, Some(3.0)),
    case([2, 48, 36, 64], Triangle::Full, [Slice, Slice], 1.0, Some(1.0)),
    case([2, 65, 52, 65], Triangle::Lower, [Slice, Columns], -0.5, None),
];

const fn case(
    shape: [usize; 4],
    triangle: Triangle,
    layouts: [Layout; 2],
    alpha: f32,
    beta: Option<f32>,
) -> Case {
    Case { shape, triangle, layouts, alpha, beta }
}

/// Checks every tiling with a third of the cases: three neighbours in the list of tilings cover
/// them all. The ignored test below omits nothing.
fn check_tilings<F: Real>(tolerance: f64) {
    let Some(client) = client::<F>() else { return };
    let tilings = Tiling::candidates(&client, F::elem_type_native());
    for unit in [Unit::Mma, Unit::Cmma, Unit::Registers] {
        let is_used = tilings.iter().any(|tiling| tiling.unit == unit);
        assert_eq!(is_used, has_unit::<F>(&client, unit), "{unit:?}");
        if !is_used {
            lacks(format!("{unit:?} for {}", core::any::type_name::<F>()));
        }
    }
    for (i, tiling) in tilings.iter().enumerate() {
        for case in CASES.iter().skip(i % 3).step_by(3) {
            check::<F>(&client, tiling, case, tolerance);
        }
        println!("passed: {tiling}");
    }
}

/// Returns `true` if a device multiplies a type in the given units, and sums in float32.
fn has_unit<F: Real>(client: &Client, unit: Unit) -> bool {
    let matmul = &client.properties().features.matmul;
    let [f32, tf32] = [FloatKind::F32, FloatKind::TF32].map(ElemType::Float);
    let dtype = F::elem_type_native();
    let is_rounded = dtype == f32 && client.properties().supports_type(tf32);
    let dtype = if is_rounded { tf32 } else { dtype };
    let offers = |config: &MmaConfig| {
        config.a_type == dtype && config.b_type == dtype && config.cd_type == f32
    };
    match unit {
        Unit::Mma => matmul.mma.iter().any(offers),
        Unit::Cmma => matmul.cmma.iter().any(offers),
        Unit::Registers => true,
    }
}

#[test]
fn products_in_float32_match_float64_with_every_tiling() {
    check_tilings::<f32>(common::tf32_or(1e-6));
}

#[test]
fn products_in_float16_match_float64_with_every_tiling() {
    check_tilings::<half::f16>(2e-3);
}

#[test]
fn products_in_bfloat16_match_float64_with_every_tiling() {
    check_tilings::<half::bf16>(1.6e-2);
}

/// Checks sums that need at most eight bits, those of bfloat16: every type represents them exactly.
fn check_integers<F: Real>() {
    let Some(client) = client::<F>() else { return };
    for ([k, m, inner], alpha, beta) in [
        ([2, 128, 128], 0.5, None),
        ([1, 256, 64], 0.25, Some(0.25)),
        ([4, 96, 80], 0.5, Some(0.5)),
    ] {
        let integer = |i: usize| ((i * 7919 + i / 13) % 3) as f64 - 1.0;
        let a: Vec<f64> = (0..k * m * inner).map(integer).collect();
        let factor = |[i, row, j]: [usize; 3]| entry(&a, [k, m, inner], [i, row, j]);
        let d = |row: usize, column: usize| integer(row * column);
        let addend: Vec<f64> = (0..k * m * m).map(|index| d(index / m % m, index % m)).collect();
        let addend = matrices::<F>(&client, &addend, [k, m, m], Rows);
        let addend = beta.map(|beta| (&addend, beta));
        let lhs = matrices::<F>(&client, &a, [k, m, inner], Rows);
        let rhs = lhs.clone().transposed();
        let product = Product { a: &lhs, b: &rhs, alpha, addend, triangle: Triangle::Lower };
        for tiling in Tiling::candidates(&client, F::elem_type_native()) {
            let result = product.launch(&client, &tiling).unwrap();
            let result = download::<F>(&client, &result.handle);
            for (index, actual) in result.iter().enumerate() {
                let [i, row, column] = [index / (m * m), index / m % m, index % m];
                let terms = (0..inner).map(|j| factor([i, row, j]) * factor([i, column, j]));
                let added = f64::from(beta.unwrap_or(0.0)) * d(row, column);
                let expected = f64::from(alpha) * terms.sum::<f64>() + added;
                assert_eq!(*actual, expected, "{tiling}, {k} x {m}x{inner}: entry {index}");
            }
        }
    }
}

#[test]
fn products_of_small_integers_are_exact_in_every_type() {
    check_integers::<f32>();
    check_integers::<half::f16>();
    check_integers::<half::bf16>();
}

#[test]
fn matrices_more_than_2_to_the_32_elements_apart_are_multiplied() {
    type F = half::f16;
    let Some(client) = client::<F>() else { return };
    let m = 40;
    let inner = 24;
    let distance = (1_usize << 32) + 64;
    let bytes = ((distance + m * inner) * size_of::<F>()) as u64;
    let max = client.properties().memory.max_page_size;
    // Half of it at most: on CubeCL's CPU runtime, it is the host's memory, which is also used
    // otherwise.
    if 2 * bytes > max {
        excused(format!("the device allocates {max} bytes at once, and the test needs {bytes}"));
        return;
    }
    let values = values::<F>(2 * m * inner, 1);
    let dtype = F::elem_type_native();
    let buffer = client.empty(bytes as usize);
    for (i, values) in values.chunks(m * inner).enumerate() {
        let start = (i * distance * size_of::<F>()) as u64;
        let target = buffer.clone().offset_start(start);
        let [from, to] = [upload::<F>(&client, values), target]
            .map(|handle| Matrices::contiguous(handle, dtype, [1, m, inner]));
        // SAFETY: both buffers have room for a matrix.
        let [from, to] = [from, to].map(|matrices| unsafe { binding(&matrices) });
        copy_into(&client, from, to, dtype);
    }
    let shape = [2, m, inner];
    let far = Matrices { handle: buffer, dtype, shape, strides: [distance, inner, 1] };
    let near = matrices::<F>(&client, &values, shape, Rows);
    for tiling in Tiling::candidates(&client, dtype) {
        let squared = |a: &Matrices| {
            let b = a.clone().transposed();
            let product = Product { a, b: &b, alpha: 1.0, addend: None, triangle: Triangle::Lower };
            download::<F>(&client, &product.launch(&client, &tiling).unwrap().handle)
        };
        assert_eq!(squared(&far), squared(&near), "{tiling}");
        println!("passed: {tiling}");
    }
}

/// Checks samples of the entries for the shapes of quack (`test_gemm_symmetric.py`),
/// Emerging-Optimizers (`test_triton_kernels.py`) and Dion (`test_newton_shulz.py`, here with a
/// result of more than 2^31 elements).
fn check_grid<F: Real>(tolerance: f64) {
    let Some(client) = client::<F>() else { return };
    let mut shapes = vec![[2, 128, 128], [4, 256, 64], [4, 256, 256], [4, 256, 1024]];
    for k in [1, 3, 10] {
        for m in [128, 512, 1024, 4096] {
            shapes.extend([128, 512, 2048].map(|inner| [k, m, inner]));
        }
    }
    shapes.push([330, 2560, 3072]);
    for shape @ [k, m, inner] in shapes {
        let with_all_tilings = || {
            for tiling in Tiling::candidates(&client, F::elem_type_native()) {
                for (alpha, beta) in [(1.0, None), (2.5, Some(0.5)), (0.25, Some(1.0))] {
                    sample::<F>(&client, &tiling, shape, alpha, beta, tolerance)?;
                }
            }
            Ok(())
        };
        match with_all_tilings() {
            Ok(()) => println!("passed: {k} x {m}x{inner}"),
            Err(error @ Error::Memory { .. }) => excused(format!("{k} x {m}x{inner}: {error}")),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Checks samples of the entries of one product. All matrices of the batch have the same values, so
/// the buffer of one matrix is enough.
fn sample<F: Real>(
    client: &Client,
    tiling: &Tiling,
    [k, m, inner]: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    tolerance: f64,
) -> Result<(), Error> {
    let pattern = values::<F>(m * inner, 1);
    let matrix = upload::<F>(client, &pattern);
    let a = Matrices::contiguous(matrix, F::elem_type_native(), [1, m, inner]);
    // The stride of zero repeats one matrix. The results are at the places of those of a real
    // batch.
    let a = Matrices { shape: [k, m, inner], strides: [0, inner, 1], ..a };
    let b = a.clone().transposed();
    let d = Matrices {
        shape: [k, m, m],
        strides: [0, m, 1],
        ..matrices::<F>(client, &vec![1.0; m * m], [1, m, m], Rows)
    };
    let addend = beta.map(|beta| (&d, beta));
    let product = Product { a: &a, b: &b, alpha, addend, triangle: Triangle::Lower };
    let result = product.launch(client, tiling)?;
    for i in [0, k / 2, k - 1] {
        let start = (i * m * m * size_of::<F>()) as u64;
        let end = ((k - 1 - i) * m * m * size_of::<F>()) as u64;
        let matrix = result.handle.clone().offset_start(start).offset_end(end);
        let matrix = download::<F>(client, &matrix);
        for index in (0..m * m).step_by(m * m / 997 + 1) {
            let [row, column] = [index / m, index % m];
            let terms = (0..inner).map(|j| pattern[row * inner + j] * pattern[column * inner + j]);
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + f64::abs(x)));
            let expected = f64::from(alpha) * sum + f64::from(beta.unwrap_or(0.0));
            let error = (matrix[index] - expected).abs() / (f64::from(alpha) * size + 1.0);
            assert!(error < tolerance, "{tiling}, {k} x {m}x{inner}, matrix {i}: entry {index}");
            assert!(matrix[index] == matrix[column * m + row], "{tiling}: not symmetric");
        }
    }
    Ok(())
}

#[test]
#[ignore = "takes minutes on a GPU and hours without one, and 16 GB"]
fn products_of_the_whole_grid_match_float64_with_every_tiling() {
    check_grid::<f32>(common::tf32_or(1e-5));
    check_grid::<half::f16>(2e-3);
    check_grid::<half::bf16>(1.6e-2);
}

#[test]
fn operands_that_do_not_fit_are_rejected() {
    let Some(client) = client::<f32>() else { return };
    let zeros = |shape| matrices::<f32>(&client, &[0.0; 24], shape, Rows);
    let tiling = Tiling::candidates(&client, f32::elem_type_native())[0];
    let error = |a: &Matrices, b: &Matrices, d: Option<&Matrices>, triangle| {
        let product = Product { a, b, alpha: 1.0, addend: d.map(|d| (d, 1.0)), triangle };
        product.launch(&client, &tiling).unwrap_err()
    };
    let a = zeros([1, 4, 6]);
    let b = zeros([1, 6, 4]);
    let wrong_b = error(&a, &a, None, Triangle::Full);
    assert_mentions(wrong_b.clone(), "type of B");
    assert_mentions(wrong_b, "got [1, 4, 6]");
    let wrong_d = error(&a, &b, Some(&b), Triangle::Full);
    assert_mentions(wrong_d.clone(), "type of D");
    assert_mentions(wrong_d, "got [1, 6, 4]");
    let oblong = error(&zeros([1, 3, 8]), &zeros([1, 8, 2]), None, Triangle::Lower);
    assert_mentions(oblong, "square");
    let no_inner = error(&zeros([1, 4, 0]), &zeros([1, 0, 4]), None, Triangle::Full);
    assert_mentions(no_inner, "inner");
    let scattered = Matrices { strides: [24, 12, 2], ..zeros([1, 2, 6]) };
    assert_mentions(error(&scattered, &b, None, Triangle::Full), "copy it");
    // At this distance, the addresses of the second matrix would wrap around.
    let apart = Matrices { strides: [usize::MAX, 6, 1], ..zeros([2, 2, 6]) };
    let too_far = error(&apart, &zeros([2, 6, 2]), None, Triangle::Full);
    assert!(matches!(too_far, Error::Buffer { .. } | Error::TooLarge { .. }), "{too_far}");
    let count = 1 << 20;
    if count > client.properties().hardware.max_cube_count.2 as usize {
        let many = Matrices { shape: [count, 1, 1], strides: [0, 1, 1], ..zeros([1, 1, 1]) };
        assert_mentions(error(&many, &many, None, Triangle::Full), "split the batch");
    } else {
        excused("the device accepts batches of any size");
    }
    // The device has room for this column and this row, but no device for their product.
    let long = 1 << 22;
    let column = Matrices { shape: [1, long, 1], strides: [long, 1, 1], ..zeros([1, 1, 1]) };
    let row = Matrices { shape: [1, 1, long], ..column.clone() };
    let too_large = error(&column, &row, None, Triangle::Full);
    assert!(matches!(too_large, Error::Memory { .. } | Error::TooLarge { .. }), "{too_large}");
    let half = matrices::<half::f16>(&client, &[0.0; 24], [1, 6, 4], Rows);
    assert_mentions(error(&a, &half, None, Triangle::Full), "of Float(F32)");
    let nothing = zeros([0, 4, 6]);
    let product = Product {
        a: &nothing,
        b: &zeros([0, 6, 4]),
        alpha: 1.0,
        addend: None,
        triangle: Triangle::Full,
    };
    assert_eq!(product.launch(&client, &tiling).unwrap().shape, [0, 4, 4]);
}
