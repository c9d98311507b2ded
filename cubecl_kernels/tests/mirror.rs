//! The kernels against plain loops, on the runtime that the features choose (wgpu without any).

use cubecl::features::TypeUsage;
use cubecl::prelude::*;
use distmuon_kernels::mirror;

/// Runs the kernel on a batch whose upper triangles hold rubbish.
fn check<F: Float + CubeElement + PartialEq + core::fmt::Debug>(m: usize, batch: usize) {
    let client = cubecl::test_client();
    if !F::supported_uses(&client).contains(TypeUsage::Buffer) {
        eprintln!("skipped: the device has no {}", core::any::type_name::<F>());
        return;
    }
    let entry = |index: usize| {
        let (row, column) = (index / m % m, index % m);
        if column > row { F::new(-77.0) } else { F::new((index % 1000) as f32 / 8.0) }
    };
    let input: Vec<F> = (0..batch * m * m).map(entry).collect();
    let handle = client.create_from_slice(F::as_bytes(&input));
    mirror::<F>(&client, &handle, m, batch);
    let bytes = client.read_one_unchecked(handle);
    let output = F::from_bytes(&bytes);
    assert_eq!(output.len(), input.len());
    for (index, found) in output.iter().enumerate() {
        let (matrix, row, column) = (index / (m * m), index / m % m, index % m);
        let below = (matrix * m + row.max(column)) * m + row.min(column);
        assert_eq!(*found, input[below], "m {m}, batch {batch}, entry {index}");
    }
}

#[test]
fn float32() {
    for (m, batch) in [(1, 1), (7, 3), (16, 1), (33, 2), (100, 1), (129, 2)] {
        check::<f32>(m, batch);
    }
}

#[test]
fn float16() {
    for (m, batch) in [(5, 2), (64, 1), (65, 3)] {
        check::<half::f16>(m, batch);
    }
}

#[test]
fn nothing_to_do() {
    let client = cubecl::test_client();
    let handle = client.create_from_slice(f32::as_bytes(&[1.0, 2.0]));
    mirror::<f32>(&client, &handle, 0, 3);
    mirror::<f32>(&client, &handle, 3, 0);
    assert_eq!(f32::from_bytes(&client.read_one_unchecked(handle)), [1.0, 2.0]);
}
