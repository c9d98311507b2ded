//! Products against loops in float64, with every tiling that the device runs.

mod common;

use Layout::{Columns, Rows, Slice};
use common::{Real, client, download, excused, lacks, upload, values};
use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::std::tensor::copy_into;
use distmuon_kernels::product::{Product, Tiling, Triangle, Unit};
use distmuon_kernels::{Error, Matrices};

/// A matrix of a batch, row by row, in float64.
fn entry(values: &[f64], [_, m, n]: [usize; 3], [i, row, column]: [usize; 3]) -> f64 {
    values[(i * m + row) * n + column]
}

/// How matrices lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// Row by row.
    Rows,
    /// Column by column.
    Columns,
    /// Rows that end before the next one begins, in a buffer that begins before the first: so do slices.
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
            let turned = |i: usize| entry(values, shape, [i / (m * n), i % m, i / m % n]);
            let turned: Vec<f64> = (0..k * n * m).map(turned).collect();
            Matrices::contiguous(upload::<F>(client, &turned), dtype, [k, n, m]).transposed()
        }
        Slice => {
            let skipped = client.properties().memory.alignment as usize / size_of::<F>();
            let (gap, mut wide) = (4, vec![f64::NAN; skipped]);
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
    /// `[k, m, inner, n]`; `n` counts for full products only.
    shape: [usize; 4],
    triangle: Triangle,
    /// Of `A` and `B`.
    layouts: [Layout; 2],
    alpha: f32,
    beta: Option<f32>,
}

fn check<F: Real>(client: &Client, tiling: &Tiling, case: &Case, tolerance: f64) {
    let Case { shape: [k, m, inner, n], triangle, layouts, alpha, beta } = *case;
    let n = if triangle == Triangle::Lower { m } else { n };
    let a = values::<F>(k * m * inner, 1);
    // For a symmetric product `B = W A^T`, with the powers of two `W` on a diagonal: not `A`'s transpose.
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
    let is_read = |at: usize| triangle == Triangle::Full || at / n % m >= at % n;
    let given: Vec<f64> =
        (0..d.len()).map(|at| if is_read(at) { d[at] } else { f64::NAN }).collect();
    let d = |[i, row, column]: [usize; 3]| match triangle {
        Triangle::Full => entry(&d, [k, m, n], [i, row, column]),
        Triangle::Lower => entry(&d, [k, m, n], [i, row.max(column), row.min(column)]),
    };
    let lhs = matrices::<F>(client, &a, [k, m, inner], layouts[0]);
    let rhs = matrices::<F>(client, &b, [k, inner, n], layouts[1]);
    let addend = matrices::<F>(client, &given, [k, m, n], Rows);
    let addend = beta.map(|beta| (&addend, beta));
    let product = Product { a: &lhs, b: &rhs, alpha, addend, triangle };

    let poison = vec![f64::NAN; k * m * n];
    let result = matrices::<F>(client, &poison, [k, m, n], Rows);
    product.launch_into(client, tiling, &result).unwrap();
    let found = download::<F>(client, &result.handle);

    let what = format!(
        "{tiling}; {shape:?}, {triangle:?}, {layouts:?}, beta {beta:?}",
        shape = case.shape
    );
    for (at, found) in found.iter().enumerate() {
        let [i, row, column] = [at / (m * n), at / n % m, at % n];
        let terms = (0..inner).map(|j| {
            entry(&a, [k, m, inner], [i, row, j]) * entry(&b, [k, inner, n], [i, j, column])
        });
        let (mut sum, mut size) = (0.0, 0.0);
        for term in terms {
            (sum, size) = (sum + term, size + f64::abs(term));
        }
        let d = d([i, row, column]);
        let expected = f64::from(alpha) * sum + beta.map_or(0.0, |beta| f64::from(beta) * d);
        let scale = f64::from(alpha).abs() * size + d.abs() + 1e-3;
        let error = (found - expected).abs() / scale;
        assert!(error <= tolerance, "{what}: entry {at} is {found}, not {expected}");
    }
    if triangle == Triangle::Lower {
        for at in 0..k * m * m {
            let [i, row, column] = [at / (m * m), at / m % m, at % m];
            let mirrored = found[(i * m + column) * m + row];
            assert!(found[at].to_bits() == mirrored.to_bits(), "{what}: not symmetric at {at}");
        }
    }
}

/// Sizes that tiles divide and that they do not, odd ones and ones; all layouts; with and without an
/// addend. The first shapes are those of most use.
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

/// Every tiling with a third of the cases, so that neighbours share them all; the ignored tests below
/// leave nothing out.
fn check_some<F: Real>(tolerance: f64) {
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

/// Whether a device multiplies a type in such units, and sums in float32.
fn has_unit<F: Real>(client: &Client, unit: Unit) -> bool {
    let matmul = &client.properties().features.matmul;
    let [f32, tf32] = [FloatKind::F32, FloatKind::TF32].map(ElemType::Float);
    let dtype = F::elem_type_native();
    let rounded = dtype == f32 && client.properties().supports_type(tf32);
    let dtype = if rounded { tf32 } else { dtype };
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
fn float32() {
    check_some::<f32>(common::tf32_or(1e-6));
}

#[test]
fn float16() {
    check_some::<half::f16>(2e-3);
}

#[test]
fn bfloat16() {
    check_some::<half::bf16>(1.6e-2);
}

/// As long as no sum has more than the eight bits of bfloat16, every type holds all of them.
fn check_integers<F: Real>() {
    let Some(client) = client::<F>() else { return };
    for ([k, m, inner], alpha, beta) in [
        ([2, 128, 128], 0.5, None),
        ([1, 256, 64], 0.25, Some(0.25)),
        ([4, 96, 80], 0.5, Some(0.5)),
    ] {
        let integer = |i: usize| ((i * 7919 + i / 13) % 3) as f64 - 1.0;
        let a: Vec<f64> = (0..k * m * inner).map(integer).collect();
        let at = |[i, row, j]: [usize; 3]| entry(&a, [k, m, inner], [i, row, j]);
        let d = |row: usize, column: usize| integer(row * column);
        let addend: Vec<f64> = (0..k * m * m).map(|at| d(at / m % m, at % m)).collect();
        let addend = matrices::<F>(&client, &addend, [k, m, m], Rows);
        let a = matrices::<F>(&client, &a, [k, m, inner], Rows);
        let b = a.clone().transposed();
        let (addend, triangle) = (beta.map(|beta| (&addend, beta)), Triangle::Lower);
        let product = Product { a: &a, b: &b, alpha, addend, triangle };
        for tiling in Tiling::candidates(&client, F::elem_type_native()) {
            let found = product.launch(&client, &tiling).unwrap();
            let found = download::<F>(&client, &found.handle);
            for (index, found) in found.iter().enumerate() {
                let [i, row, column] = [index / (m * m), index / m % m, index % m];
                let sum: f64 = (0..inner).map(|j| at([i, row, j]) * at([i, column, j])).sum();
                let added = f64::from(beta.unwrap_or(0.0)) * d(row, column);
                let expected = f64::from(alpha) * sum + added;
                assert_eq!(*found, expected, "{tiling}, {k} x {m}x{inner}: entry {index}");
            }
        }
    }
}

#[test]
fn integers_are_exact() {
    check_integers::<f32>();
    check_integers::<half::f16>();
    check_integers::<half::bf16>();
}

/// Matrices of a batch lie more than 2^32 elements apart.
#[test]
fn offsets_beyond_32_bits() {
    type F = half::f16;
    let Some(client) = client::<F>() else { return };
    let (m, inner, apart) = (40, 24, (1_usize << 32) + 64);
    let bytes = ((apart + m * inner) * size_of::<F>()) as u64;
    let most = client.properties().memory.max_page_size;
    // CubeCL's CPU runtime has all of the host's memory, which others need, too.
    if 2 * bytes > most {
        excused(format!("the device allocates {most} bytes at once, and the test needs {bytes}"));
        return;
    }
    let (values, dtype) = (values::<F>(2 * m * inner, 1), F::elem_type_native());
    let buffer = client.empty(bytes as usize);
    for (i, values) in values.chunks(m * inner).enumerate() {
        let start = (i * apart * size_of::<F>()) as u64;
        let target = buffer.clone().offset_start(start);
        let [from, to] = [upload::<F>(&client, values), target]
            .map(|handle| Matrices::contiguous(handle, dtype, [1, m, inner]));
        // SAFETY: both buffers have room for a matrix.
        let [from, to] = [from, to].map(|matrices| unsafe { matrices.binding() });
        copy_into(&client, from, to, dtype);
    }
    let shape = [2, m, inner];
    let far = Matrices { handle: buffer, dtype, shape, strides: [apart, inner, 1] };
    let near = matrices::<F>(&client, &values, shape, Rows);
    for tiling in Tiling::candidates(&client, dtype) {
        let squared = |a: &Matrices| {
            let (b, triangle) = (a.clone().transposed(), Triangle::Lower);
            let product = Product { a, b: &b, alpha: 1.0, addend: None, triangle };
            download::<F>(&client, &product.launch(&client, &tiling).unwrap().handle)
        };
        assert_eq!(squared(&far), squared(&near), "{tiling}");
        println!("passed: {tiling}");
    }
}

/// The grids of quack (`test_gemm_symmetric.py`), Emerging-Optimizers (`test_triton_kernels.py`) and Dion
/// (`test_newton_shulz.py`, here with a result of more than 2^31 elements), on samples of the entries.
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
        let with_all = || {
            for tiling in Tiling::candidates(&client, F::elem_type_native()) {
                for (alpha, beta) in [(1.0, None), (2.5, Some(0.5)), (0.25, Some(1.0))] {
                    sample::<F>(&client, &tiling, shape, alpha, beta, tolerance)?;
                }
            }
            Ok(())
        };
        match with_all() {
            Ok(()) => println!("passed: {k} x {m}x{inner}"),
            Err(error @ Error::Memory { .. }) => excused(format!("{k} x {m}x{inner}: {error}")),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Every entry is `pattern(row, j)` in all matrices, so that one row is what a buffer is made of.
fn sample<F: Real>(
    client: &Client,
    tiling: &Tiling,
    [k, m, inner]: [usize; 3],
    alpha: f32,
    beta: Option<f32>,
    tolerance: f64,
) -> Result<(), Error> {
    let pattern = values::<F>(m * inner, 1);
    let one = upload::<F>(client, &pattern);
    let a = Matrices::contiguous(one, F::elem_type_native(), [1, m, inner]);
    // A batch of one matrix, again and again; results lie where those of a real batch do.
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
        let one = result.handle.clone().offset_start(start).offset_end(end);
        let found = download::<F>(client, &one);
        for at in (0..m * m).step_by(m * m / 997 + 1) {
            let [row, column] = [at / m, at % m];
            let terms = (0..inner).map(|j| pattern[row * inner + j] * pattern[column * inner + j]);
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + f64::abs(x)));
            let expected = f64::from(alpha) * sum + f64::from(beta.unwrap_or(0.0));
            let error = (found[at] - expected).abs() / (f64::from(alpha) * size + 1.0);
            assert!(error < tolerance, "{tiling}, {k} x {m}x{inner}, matrix {i}: entry {at}");
            assert!(found[at] == found[column * m + row], "{tiling}: not symmetric");
        }
    }
    Ok(())
}

#[test]
#[ignore = "minutes on a GPU, hours without; needs 16 GB"]
fn the_whole_grid() {
    check_grid::<f32>(common::tf32_or(1e-5));
    check_grid::<half::f16>(2e-3);
    check_grid::<half::bf16>(1.6e-2);
}

#[test]
fn what_does_not_go_together_is_refused() {
    let Some(client) = client::<f32>() else { return };
    let of = |shape| matrices::<f32>(&client, &[0.0; 24], shape, Rows);
    let tiling = Tiling::candidates(&client, f32::elem_type_native())[0];
    let error = |a: &Matrices, b: &Matrices, d: Option<&Matrices>, triangle| {
        let product = Product { a, b, alpha: 1.0, addend: d.map(|d| (d, 1.0)), triangle };
        product.launch(&client, &tiling).unwrap_err()
    };
    let (a, b) = (of([1, 4, 6]), of([1, 6, 4]));
    let says = |error: Error, words: &str| {
        assert!(error.to_string().contains(words), "{error}");
    };
    says(error(&a, &a, None, Triangle::Full), "B is [1, 4, 6]");
    says(error(&a, &b, Some(&b), Triangle::Full), "D is [1, 6, 4]");
    says(error(&of([1, 3, 8]), &of([1, 8, 2]), None, Triangle::Lower), "square");
    says(error(&of([1, 4, 0]), &of([1, 0, 4]), None, Triangle::Full), "inner");
    let scattered = Matrices { strides: [24, 12, 2], ..of([1, 2, 6]) };
    says(error(&scattered, &b, None, Triangle::Full), "copy it");
    // So far apart that their addresses would wrap around.
    let apart = Matrices { strides: [usize::MAX, 6, 1], ..of([2, 2, 6]) };
    let product = Product {
        a: &apart,
        b: &of([2, 6, 2]),
        alpha: 1.0,
        addend: None,
        triangle: Triangle::Full,
    };
    let refused = product.launch(&client, &tiling).unwrap_err();
    assert!(matches!(refused, Error::Buffer { .. } | Error::TooLarge { .. }), "{refused}");
    let count = 1 << 20;
    if count > client.properties().hardware.max_cube_count.2 as usize {
        let many = Matrices { shape: [count, 1, 1], strides: [0, 1, 1], ..of([1, 1, 1]) };
        says(error(&many, &many, None, Triangle::Full), "split the batch");
    } else {
        excused("the device takes batches of any size");
    }
    // A column and a row that the device has, and a product of them that none has.
    let long = 1 << 22;
    let column = Matrices { shape: [1, long, 1], strides: [long, 1, 1], ..of([1, 1, 1]) };
    let row = Matrices { shape: [1, 1, long], ..column.clone() };
    says(error(&column, &row, None, Triangle::Full), "this device; split the batch");
    let half = matrices::<half::f16>(&client, &[0.0; 24], [1, 6, 4], Rows);
    says(error(&a, &half, None, Triangle::Full), "of Float(F32)");
    let nothing = of([0, 4, 6]);
    let product = Product {
        a: &nothing,
        b: &of([0, 6, 4]),
        alpha: 1.0,
        addend: None,
        triangle: Triangle::Full,
    };
    assert_eq!(product.launch(&client, &tiling).unwrap().shape, [0, 4, 4]);
}
