//! Properties of the default device.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::{ComputePath, KernelPolicy};
use distmuon_skips::excused;

/// Returns `true` on Flex. Only there, all runs have the same bits, and a matrix has the same bits
/// in a batch and alone.
pub fn is_flex() -> bool {
    format!("{:?}", Device::default()).contains("Flex")
}

/// Returns `true` if the device rounds the factors of float32 products to TF32, as Burn's own
/// products on CUDA do, or if `DISTMUON_TEST_TF32=1` simulates that on Flex.
pub fn has_tf32() -> bool {
    ComputePath::rounds_factors(&Device::default(), FloatDType::F32)
}

/// Returns a tolerance for float32, or for TF32, whose ten bits leave an iteration two digits.
pub fn tf32_or(tolerance: f64) -> f64 {
    if has_tf32() { tolerance.max(1e-2) } else { tolerance }
}

/// Returns `true` if the device rounds to a type. CubeCL's CPU runtime reports bfloat16 also where
/// it does not have it.
pub fn has_type(dtype: FloatDType) -> bool {
    let device = Device::default();
    let round_trip = || {
        let rounded = Tensor::<1>::from_data([1.5_f32], (&device, DType::F32)).cast(dtype);
        rounded.cast(DType::F32).into_scalar::<f32>()
    };
    device.supports_dtype(dtype) && round_trip() == 1.5
}

/// Returns a matrix that the default device does not have the memory to compute. `None` on a device
/// that does not report such a request as an error.
pub fn beyond_memory(rows: usize, columns: usize) -> Option<Tensor<2>> {
    let device = Device::default();
    let path = ComputePath::choose(KernelPolicy::Auto, &device, FloatDType::F32);
    if !matches!(path, ComputePath::CubeCl { .. }) {
        excused("only CubeCL's devices report memory that they cannot allocate");
        return None;
    }
    // A tebibyte.
    let huge = Tensor::<2>::ones([1 << 19, 1 << 19], &device);
    let lost = huge.slice([0..rows, 0..columns]).add_scalar(1.0);
    // Fusion would otherwise compute it where it is used, without the ones.
    lost.clone().try_into_data().expect_err("no device has a tebibyte of memory");
    Some(lost)
}
